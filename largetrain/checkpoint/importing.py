"""Weights of a model from elsewhere, as a folder that `init_from` and `export` read."""

from pathlib import Path

from largetrain.checkpoint.deepspeed_files import deepspeed_folder, deepspeed_weights
from largetrain.checkpoint.hf import from_theirs, section_of, spec_of
from largetrain.checkpoint.locate import existing
from largetrain.checkpoint.reshard import write_weights
from largetrain.checkpoint.sources import MODEL, Source, of_names, read_json
from largetrain.checkpoint.weights import tied_source, weights_from
from largetrain.errors import ConfigError


def import_weights(
    path: str, target: Path, key: str, *, hf_config: Path | None = None, trust: bool = False, force: bool = False
) -> Source:
    """Read weights from elsewhere and write them to `target`; returns what was read.

    Args:
        path: a Hugging Face GPT-2 or Llama folder, a checkpoint of DeepSpeed, or another source of `init_from`.
        hf_config: config.json of the GPT-2 or Llama that the weights are of, for weights without one beside them.
        trust: unpickle DeepSpeed's files whatever is in them.

    Raises:
        ConfigError: the weights cannot be read, or the target is taken.
    """
    given = existing(path, key)
    # also in a checkpoint of ours of the first format, whose files were DeepSpeed's
    folder = deepspeed_folder(given) if given.is_dir() else None
    if trust and folder is None:
        raise ConfigError(f"{key} --trust: is for checkpoints of DeepSpeed, and {given} is none; leave it out.")
    source = deepspeed_weights(folder, key, trust=trust) if folder is not None else weights_from(path, key)
    if hf_config is not None:
        source = _translated(source, hf_config, key)
    write_weights(source, target, key, force=force)
    return source


def _translated(source: Source, hf_config: Path, key: str) -> Source:
    """Weights under Hugging Face's names, under ours."""
    section = section_of(read_json(hf_config, key), f"{key}: {hf_config}")
    theirs = {name.removeprefix(MODEL): entry for name, entry in source.entries.items()}
    state = from_theirs(theirs, spec_of(section), f"{key}: {source.where}")
    made = of_names(state, source.where, {"model": section})
    return tied_source(made, section)
