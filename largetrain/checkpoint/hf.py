"""GPT-2 and Llama as Hugging Face keeps them, and our decoder: sizes, names and layouts, in both directions.

Neither direction needs `transformers`. What our decoder computes otherwise than a config.json asks for is refused by
the key's name.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from largetrain.checkpoint.restricted import read_torch_file
from largetrain.checkpoint.sources import (
    Entry,
    computed,
    in_memory,
    index_of,
    read_json,
    safetensors_entries,
    sharded_entries,
    without_prefixes,
)
from largetrain.config.decoder_spec import DecoderSpec
from largetrain.errors import ConfigError
from largetrain.models.state_dicts import some

EMBEDDING, HEAD, POSITIONS = "token_embedding.weight", "head.weight", "position_embedding.weight"
BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")
# config.json key -> values that our decoder computes; absent counts as the first
GPT2_NEEDS: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False, None),
    "add_cross_attention": (False, None),
}
LLAMA_NEEDS: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "sliding_window": (None,),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1, 1.0, None),
}
# further keys that change what is computed, whatever the model type
OTHER_NEEDS: dict[str, tuple[Any, ...]] = {"quantization_config": (None,), "is_encoder_decoder": (False, None)}
# our name within a block -> theirs, and whether theirs is transposed (GPT-2's Conv1D keeps [in, out])
GPT2_BLOCK = {
    "attention_norm": ("ln_1", False),
    "attention.output": ("attn.c_proj", True),
    "feed_forward_norm": ("ln_2", False),
    "feed_forward.up": ("mlp.c_fc", True),
    "feed_forward.down": ("mlp.c_proj", True),
}
GPT2_QKV = {"attention.query": 0, "attention.key": 1, "attention.value": 2}  # thirds of attn.c_attn
GPT2_TOP = {EMBEDDING: "wte.weight", POSITIONS: "wpe.weight", "final_norm.weight": "ln_f.weight"}
GPT2_TOP["final_norm.bias"] = "ln_f.bias"
LLAMA_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
LLAMA_TOP = {EMBEDDING: "embed_tokens.weight", "final_norm.weight": "norm.weight"}
BASE = {"gpt": "transformer.", "llama": "model."}  # before every name but lm_head's
LM_HEAD = "lm_head.weight"
# buffers of older versions, which hold nothing that was learned
IGNORED = re.compile(r"(.*\.)?(attn\.(bias|masked_bias)|rotary_emb\.inv_freq)")


def is_hf_folder(path: Path) -> bool:
    """Whether a folder holds a model of Hugging Face's (a config.json with `model_type`)."""
    config = path / "config.json"
    return config.is_file() and "model_type" in read_json(config, str(path))


def section_of(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The `model` section of a run YAML for the decoder that a config.json describes.

    Args:
        config: content of config.json.
        where: its path with the key that asked for it, for messages.

    Raises:
        ConfigError: our decoder does not compute that; names each key.
    """
    kind = config.get("model_type")
    if kind not in ("gpt2", "llama"):
        raise ConfigError(f"{where}: model_type {kind!r} is not read; gpt2 and llama are.")
    problems = [
        f"{where}: {key} = {config[key]!r} is not what the built-in decoder computes (it does {accepted[0]!r})."
        for key, accepted in {**(GPT2_NEEDS if kind == "gpt2" else LLAMA_NEEDS), **OTHER_NEEDS}.items()
        if key in config and config[key] not in accepted
    ]
    section = _gpt2_section(config, where) if kind == "gpt2" else _llama_section(config, where, problems)
    if problems:
        raise ConfigError(problems)
    return section


def _number(config: Mapping[str, Any], key: str, where: str, default: Any = None) -> Any:
    value = config.get(key, default)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"{where}: {key} = {value!r}; a number above 0 is needed.")
    return value


def _gpt2_section(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    hidden = _number(config, "n_embd", where, 768)
    return {
        "style": "gpt",
        "vocab_size": _number(config, "vocab_size", where, 50257),
        "layers": _number(config, "n_layer", where, 12),
        "hidden": hidden,
        "heads": (heads := _number(config, "n_head", where, 12)),
        "kv_heads": heads,
        "ffn_hidden": _number(config, "n_inner", where, 4 * hidden),
        "seq_len": _number(config, "n_positions", where, config.get("n_ctx", 1024)),
        "tie_embeddings": bool(config.get("tie_word_embeddings", True)),
        "norm_eps": float(_number(config, "layer_norm_epsilon", where, 1e-5)),
    }


def _llama_section(config: Mapping[str, Any], where: str, problems: list[str]) -> dict[str, Any]:
    hidden, heads = _number(config, "hidden_size", where), _number(config, "num_attention_heads", where)
    head_dim = config.get("head_dim")
    if head_dim is not None and not (isinstance(head_dim, int) and head_dim * heads == hidden):
        problems.append(f"{where}: head_dim = {head_dim!r} is not hidden_size / num_attention_heads.")
    return {
        "style": "llama",
        "vocab_size": _number(config, "vocab_size", where),
        "layers": _number(config, "num_hidden_layers", where),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": _number(config, "num_key_value_heads", where, heads),
        "ffn_hidden": _number(config, "intermediate_size", where),
        "seq_len": _number(config, "max_position_embeddings", where, 2048),
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "norm_eps": float(_number(config, "rms_norm_eps", where, 1e-6)),
        "rope_theta": _rope_theta(config, where, problems),
    }


def _rope_theta(config: Mapping[str, Any], where: str, problems: list[str]) -> float:
    """Base of the frequencies; older files have it at the top, newer ones in `rope_parameters`."""
    theta = config.get("rope_theta")
    for key in ("rope_scaling", "rope_parameters"):
        scaling = config.get(key)
        if scaling is None:
            continue
        kind = scaling.get("rope_type", scaling.get("type", "default")) if isinstance(scaling, dict) else scaling
        extra = sorted(set(scaling) - {"rope_type", "type", "rope_theta"}) if isinstance(scaling, dict) else []
        if kind != "default" or extra:
            problems.append(f"{where}: {key} = {scaling!r} is not what the built-in decoder computes (plain rotation).")
            continue
        theta = scaling.get("rope_theta", theta)
    return float(_number({"rope_theta": theta}, "rope_theta", where, 1e4))


def config_of(spec: DecoderSpec, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json with which `AutoModelForCausalLM` builds the same decoder.

    Raises:
        ConfigError: GPT-2 has no such decoder.
    """
    shared = {
        "torch_dtype": str(dtype).removeprefix("torch."),
        "tie_word_embeddings": spec.tie_embeddings,
        "vocab_size": spec.vocab_size,
        "use_cache": True,
        # our data know one end-of-text token, and its number is in no checkpoint
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if spec.style == "gpt":
        if spec.kv_heads != spec.heads:
            raise ConfigError(
                f"export --format hf: GPT-2 has no grouped key/value heads, and model.kv_heads is {spec.kv_heads} of "
                f"{spec.heads}; export --format safetensors keeps the model as it is."
            )
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_embd": spec.hidden,
            "n_layer": spec.layers,
            "n_head": spec.heads,
            "n_inner": spec.ffn_hidden,
            "n_positions": spec.seq_len,
            "layer_norm_epsilon": spec.norm_eps,
            "activation_function": "gelu_new",
            **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), spec.dropout),
            **shared,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn_hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.seq_len,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": spec.dropout,
        **shared,
    }


@dataclass(frozen=True)
class Theirs:
    """Where a tensor of ours lies in theirs."""

    name: str
    transposed: bool = False
    third: int | None = None
    """Of GPT-2's fused query, key and value, along their last dim."""


def their_place(name: str, style: str) -> Theirs:
    """Where Hugging Face's model keeps our parameter `name`."""
    if name == HEAD:
        return Theirs(LM_HEAD)
    base, match = BASE[style], BLOCK.fullmatch(name)
    if match is None:
        return Theirs(base + (GPT2_TOP if style == "gpt" else LLAMA_TOP)[name])
    part, _, leaf = match[2].rpartition(".")
    if style == "llama":
        return Theirs(f"{base}layers.{match[1]}.{LLAMA_BLOCK[part]}.{leaf}")
    matrix = leaf == "weight"
    if part in GPT2_QKV:
        return Theirs(f"{base}h.{match[1]}.attn.c_attn.{leaf}", matrix, GPT2_QKV[part])
    theirs, transposed = GPT2_BLOCK[part]
    return Theirs(f"{base}h.{match[1]}.{theirs}.{leaf}", transposed and matrix)


def decoder_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Our decoder's parameters, a tied table once, in their order."""
    from largetrain.models.decoder import Decoder

    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in Decoder(spec).named_parameters()}


def to_theirs(ours: Mapping[str, Entry], spec: DecoderSpec) -> dict[str, Entry]:
    """Our tensors under their names and in their layout; a tied head is left out, as Hugging Face does."""
    groups: dict[str, list[tuple[Theirs, Entry]]] = {}
    for name in decoder_shapes(spec):
        place = their_place(name, spec.style)
        groups.setdefault(place.name, []).append((place, ours[name]))
    return {name: _assembled(sorted(parts, key=lambda part: part[0].third or 0)) for name, parts in groups.items()}


def _assembled(parts: list[tuple[Theirs, Entry]]) -> Entry:
    """One tensor of theirs: ours as it is, transposed, or three side by side."""
    transposed = parts[0][0].transposed
    shapes = [entry.shape[::-1] if transposed else entry.shape for _, entry in parts]
    whole = (*shapes[0][:-1], sum(shape[-1] for shape in shapes))
    if len(parts) == 1 and not transposed:
        return parts[0][1]

    def read() -> Tensor:
        return torch.cat([entry.whole().t() if transposed else entry.whole() for _, entry in parts], dim=-1)

    return computed(whole, parts[0][1].dtype, read)


def from_theirs(theirs: Mapping[str, Entry], spec: DecoderSpec, where: str) -> dict[str, Entry]:
    """Their tensors under our names and in our layout; every one of theirs is used.

    Raises:
        ConfigError: one is missing, has another shape than config.json says, or has no place in our decoder.
    """
    base = BASE[spec.style]
    held = {_full_name(name, base): entry for name, entry in theirs.items() if not IGNORED.fullmatch(name)}
    ours: dict[str, Entry] = {}
    used: set[str] = set()
    for name, shape in decoder_shapes(spec).items():
        place = their_place(name, spec.style)
        if place.name not in held:
            hint = "; config.json says tie_word_embeddings: false" if name == HEAD else ""
            raise ConfigError(f"{where}: {place.name} is missing{hint}. It has {some(list(theirs))}.")
        entry, used = held[place.name], used | {place.name}
        expected = _shape_there(place, shape)
        if entry.shape != expected:
            raise ConfigError(
                f"{where}: {place.name} is {list(entry.shape)}, but config.json makes it {list(expected)}."
            )
        ours[name] = _cut_out(place, entry, shape)
    if spec.tie_embeddings and LM_HEAD in held:
        _check_tie(held[LM_HEAD], ours[EMBEDDING], where)
        used.add(LM_HEAD)
    if left := sorted(set(held) - used):
        raise ConfigError(f"{where}: holds {some(left)}, which the built-in decoder has no place for.")
    return ours


def _full_name(name: str, base: str) -> str:
    """With the base model's prefix, which files of the base model alone lack."""
    return name if name.startswith((base, "lm_head.")) else base + name


def _shape_there(place: Theirs, shape: tuple[int, ...]) -> tuple[int, ...]:
    turned = shape[::-1] if place.transposed else shape
    return turned if place.third is None else (*turned[:-1], 3 * turned[-1])


def _cut_out(place: Theirs, entry: Entry, shape: tuple[int, ...]) -> Entry:
    if not place.transposed and place.third is None:
        return entry

    def read() -> Tensor:
        tensor = entry.whole()
        if place.third is not None:
            tensor = tensor.chunk(3, dim=-1)[place.third]
        return tensor.t() if place.transposed else tensor

    return computed(shape, entry.dtype, read)


def _check_tie(head: Entry, embedding: Entry, where: str) -> None:
    if head.shape != embedding.shape or not torch.equal(head.whole(), embedding.whole()):
        raise ConfigError(
            f"{where}: config.json says tie_word_embeddings: true, but lm_head.weight is not the embedding; correct "
            f"the key."
        )


def read_hf_folder(folder: Path, key: str) -> tuple[dict[str, Any], dict[str, Entry]]:
    """The `model` section, and weights by our names, of a folder with a GPT-2 or Llama of Hugging Face's.

    Raises:
        ConfigError: another model, a missing or damaged file.
    """
    where = f"{key}: {folder / 'config.json'}"
    section = section_of(read_json(folder / "config.json", key), where)
    theirs = without_prefixes(_their_tensors(folder, key))
    return section, from_theirs(theirs, spec_of(section), f"{key}: {folder}")


def spec_of(section: Mapping[str, Any]) -> DecoderSpec:
    """All sizes of a decoder from a `model` section with every size in it, as runs save it.

    Raises:
        ConfigError: the sizes contradict each other.
    """
    from pydantic import ValidationError

    from largetrain.config.decoder_spec import resolve_decoder
    from largetrain.config.schema import ModelConfig

    try:
        model = ModelConfig.model_validate(dict(section))
    except ValidationError as error:
        raise ConfigError(f"the model section of the weights is not one of this version: {error}") from error
    if not isinstance(model.vocab_size, int):
        raise ConfigError("the model section of the weights has no vocab_size")
    return resolve_decoder(model, model.vocab_size)


def _their_tensors(folder: Path, key: str) -> dict[str, Entry]:
    """From model.safetensors, its shards, pytorch_model.bin, or its shards: the first that is there."""
    readers: tuple[tuple[str, Callable[[Path, str], dict[str, Entry]]], ...] = (
        ("model.safetensors", safetensors_entries),
        ("pytorch_model.bin", torch_entries),
    )
    for name, read in readers:
        if (folder / name).is_file():
            return read(folder / name, key)
        index = folder / f"{name}.index.json"
        if index.is_file():
            return sharded_entries(index, key, read)
    if (other := index_of(folder, key)) is not None:
        return sharded_entries(other, key, safetensors_entries)
    names = ", ".join(name for name, _ in readers)
    raise ConfigError(f"{key}: {folder} has a config.json and no weights ({names}, or shards with an index).")


def torch_entries(path: Path, key: str) -> dict[str, Entry]:
    """A bare state_dict of torch.save, mapped."""
    held = read_torch_file(path, key)
    if not isinstance(held, dict) or not held or not all(isinstance(value, Tensor) for value in held.values()):
        raise ConfigError(f"{key}: {path} holds no tensors by name; save model.state_dict().")
    return {str(name): in_memory(tensor) for name, tensor in held.items()}
