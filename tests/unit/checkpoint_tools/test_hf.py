"""Hugging Face's GPT-2 and Llama: their logits from our decoder and ours from theirs, and what is refused by key."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from largetrain.checkpoint.export import export
from largetrain.checkpoint.hf import config_of, decoder_shapes, section_of, spec_of, their_place
from largetrain.checkpoint.importing import import_weights
from largetrain.checkpoint.sources import MODEL, in_memory, of_names
from largetrain.checkpoint.weights import match_report, weights_from
from largetrain.errors import ConfigError
from largetrain.models.decoder import Decoder
from tests.reference import tolerance_for
from tests.unit.models.specs import small_spec

GPT2 = {"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 16, "vocab_size": 65}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "vocab_size": 65,
    "rope_theta": 5e5,
}
IDS = torch.arange(48).view(3, 16) * 7 % 65
LONGEST_SUM, PRODUCTS = 192, 2 * 7 + 1  # n_inner; products one after the other in two blocks and the head


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers", reason="needs the extra hf: pip install -e '.[hf]'")


def their_model(transformers, config, tied, **changes):
    """Every parameter random, norms and biases included, large enough that attention is far from uniform."""
    kind = {"gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel)}.get(
        config["model_type"], (transformers.LlamaConfig, transformers.LlamaForCausalLM)
    )
    sizes = {"bos_token_id": None, "eos_token_id": None, **config, "tie_word_embeddings": tied, **changes}
    sizes.pop("model_type")
    torch.manual_seed(7)
    model = kind[1](kind[0](**sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    return model


def ours_from(path):
    """Our decoder filled by the weights of a path, as `init_from` does it."""
    source = weights_from(str(path))
    spec = spec_of(source.facts["model"])
    model = Decoder(spec).eval()
    names = match_report(decoder_shapes(spec), source).names
    assert sorted(names) == sorted(decoder_shapes(spec))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(source.entries[MODEL + name].whole())
    return model


def assert_same_logits(ours, theirs):
    """Up to the order of sums, relative to the largest logit."""
    with torch.no_grad():
        expected, actual = theirs(IDS).logits, ours(IDS)
    scale = expected.abs().max()
    bounds = tolerance_for(torch.float32, LONGEST_SUM * PRODUCTS)
    torch.testing.assert_close(actual / scale, expected / scale, **bounds)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_imported_models_give_their_logits_and_come_back_to_the_bit(tmp_path, transformers, config, tied):
    theirs = their_model(transformers, config, tied)
    theirs.save_pretrained(tmp_path / "theirs")
    assert_same_logits(ours_from(tmp_path / "theirs"), theirs)
    source = import_weights(str(tmp_path / "theirs"), tmp_path / "ours", "import")
    assert_same_logits(ours_from(tmp_path / "ours"), theirs)
    assert (tmp_path / "ours" / "model.yaml").read_text().startswith("model:\n  style: ")
    assert source.shared["tied"] == ({"head.weight": "token_embedding.weight"} if tied else {})
    for shard, files in ((10**9, 1), (20_000, None)):
        target = tmp_path / f"back-{shard}"
        written = export(weights_from(str(tmp_path / "ours")), target, "hf", shard_bytes=shard)
        assert (files is None and written.files > 2) or written.files == files
        back = transformers.AutoModelForCausalLM.from_pretrained(target).eval()
        assert type(back) is type(theirs) and torch.equal(back(IDS).logits, theirs(IDS).logits)
        assert (back.get_output_embeddings().weight is back.get_input_embeddings().weight) is tied
        state = back.state_dict()
        assert state.keys() == theirs.state_dict().keys()
        assert all(torch.equal(tensor, state[name]) for name, tensor in theirs.state_dict().items())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("style", ["gpt", "llama"])
def test_exported_models_give_our_logits(tmp_path, transformers, style, tied):
    spec = small_spec(style, vocab_size=65, hidden=48, heads=6, kv_heads=2 if style == "llama" else 6, dropout=0.1)
    spec = type(spec)(**{**vars(spec), "tie_embeddings": tied})
    model = Decoder(spec).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    source = of_names({name: in_memory(p) for name, p in model.named_parameters()}, "memory", {"model": section(spec)})
    export(source, tmp_path / "out", "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(theirs).__name__ == {"gpt": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}[style]
    assert_same_logits(model, theirs)
    export(source, tmp_path / "half", "hf", dtype=torch.bfloat16)
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert half.dtype == torch.bfloat16
    weight = half.get_input_embeddings().weight
    assert torch.equal(weight, model.token_embedding.weight.to(torch.bfloat16))


def section(spec):
    """The model section that a run saves for a spec."""
    keys = "style vocab_size layers hidden heads kv_heads ffn_hidden seq_len tie_embeddings norm_eps dropout".split()
    made = {key: getattr(spec, key) for key in keys}
    return {**made, **({"rope_theta": spec.rope_theta} if spec.style == "llama" else {})}


def write_theirs(folder, spec, *, prefix=True, extra=None, config=None, name="model.safetensors"):
    """A folder as Hugging Face writes it, made without `transformers`; returns our tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    ours = {name: torch.randn(shape) for name, shape in decoder_shapes(spec).items()}
    export(of_names({n: in_memory(t) for n, t in ours.items()}, "here", {"model": section(spec)}), folder / "tmp", "hf")
    state = {**load_file(folder / "tmp" / "model.safetensors"), **(extra or {})}
    if not prefix:
        base = "transformer." if spec.style == "gpt" else "model."
        state = {name.removeprefix(base): tensor for name, tensor in state.items()}
    written = json.loads((folder / "tmp" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, **(config or {})}))
    if name.endswith(".bin"):
        torch.save(state, folder / name)
    else:
        save_file(state, folder / name)
    return ours


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("style", ["gpt", "llama"])
def test_names_without_the_base_models_prefix_and_old_buffers(tmp_path, style, name):
    """OpenAI's own GPT-2 file has `h.0.ln_1.weight` and the causal mask; old Llama files have the frequencies."""
    old = {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    old = old if style == "gpt" else {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    ours = write_theirs(tmp_path / "theirs", small_spec(style), prefix=False, extra=old, name=name)
    source = weights_from(str(tmp_path / "theirs"))
    for ours_name, tensor in ours.items():
        assert torch.equal(source.entries[MODEL + ours_name].whole(), tensor)


def test_a_sharded_bin_is_read(tmp_path):
    ours = write_theirs(tmp_path / "theirs", small_spec("gpt"))
    folder = tmp_path / "theirs"
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(state)
    parts = {"pytorch_model-00001-of-00002.bin": names[:9], "pytorch_model-00002-of-00002.bin": names[9:]}
    for file, held in parts.items():
        torch.save({name: state[name] for name in held}, folder / file)
    index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    source = weights_from(str(folder))
    assert all(torch.equal(source.entries[MODEL + name].whole(), tensor) for name, tensor in ours.items())
    index["weight_map"][names[0]] = "../outside.bin"
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"names '../outside.bin', which is not a file beside it"):
        weights_from(str(folder))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
        ({**GPT2, "scale_attn_weights": False}, "scale_attn_weights = False"),
        ({**GPT2, "activation_function": "relu"}, "activation_function = 'relu'"),
        ({**GPT2, "add_cross_attention": True}, "add_cross_attention"),
        ({**GPT2, "n_head": 0}, "n_head = 0"),
        ({**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling"),
        ({**LLAMA, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters"),
        ({**LLAMA, "attention_bias": True}, "attention_bias"),
        ({**LLAMA, "mlp_bias": True}, "mlp_bias"),
        ({**LLAMA, "hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({**LLAMA, "sliding_window": 4096}, "sliding_window"),
        ({**LLAMA, "head_dim": 32}, "head_dim = 32"),
        ({**LLAMA, "head_dim": {}}, "head_dim = {}"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, "quantization_config"),
        ({"model_type": "mixtral"}, "model_type 'mixtral'"),
    ],
)
def test_what_our_decoder_does_not_compute_is_refused_by_its_key(config, words):
    with pytest.raises(ConfigError) as raised:
        section_of(config, "import: config.json")
    assert all(line.startswith("import: config.json: ") for line in raised.value.problems)
    assert words in str(raised.value)


def test_sizes_and_both_ways_to_write_the_rotation():
    assert section_of({**GPT2, "n_inner": 100}, "x")["ffn_hidden"] == 100
    assert section_of(GPT2, "x")["ffn_hidden"] == 192 and section_of(GPT2, "x")["tie_embeddings"] is True
    assert section_of(LLAMA, "x")["rope_theta"] == 5e5 and section_of(LLAMA, "x")["tie_embeddings"] is False
    newer = {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 7e5}}
    del newer["rope_theta"]
    assert section_of(newer, "x")["rope_theta"] == 7e5
    every_head = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert section_of(every_head, "x")["kv_heads"] == 6


def test_the_written_config_describes_the_same_decoder():
    for style in ("gpt", "llama"):
        spec = small_spec(style, dropout=0.1)
        again = spec_of({**section_of(config_of(spec, torch.float32), "x"), "dropout": 0.1, "loss_chunk_tokens": 1024})
        assert again == spec


def test_every_name_has_a_place_of_its_own():
    for style in ("gpt", "llama"):
        places = [their_place(name, style) for name in decoder_shapes(small_spec(style, tie_embeddings=False))]
        assert len({(place.name, place.third) for place in places}) == len(places)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("transformer.h.1.ln_2.bias"), "transformer.h.1.ln_2.bias is missing"),
        (lambda state: state.update({"transformer.wte.weight": torch.zeros(3, 32)}), r"wte.weight is \[3, 32\]"),
        (
            lambda state: state.update({"transformer.h.0.adapter": torch.zeros(3)}),
            "adapter, which the built-in decoder",
        ),
        (lambda state: state.update({"lm_head.weight": torch.zeros(61, 32)}), "tie_word_embeddings: true, but lm_head"),
    ],
)
def test_weights_that_are_not_what_config_json_says(tmp_path, change, words):
    write_theirs(tmp_path / "theirs", small_spec("gpt"))
    path = tmp_path / "theirs" / "model.safetensors"
    state = load_file(path)
    change(state)
    save_file(state, path)
    with pytest.raises(ConfigError, match=words):
        weights_from(str(tmp_path / "theirs"))


def test_grouped_heads_have_no_place_in_gpt2(tmp_path):
    spec = small_spec("gpt", kv_heads=2)
    with pytest.raises(ConfigError, match=r"GPT-2 has no grouped key/value heads, and model.kv_heads is 2 of 4"):
        config_of(spec, torch.float32)


def test_weights_under_their_names_with_a_config_from_elsewhere(tmp_path):
    """Such as a GPT-2 of Hugging Face's that somebody trained with DeepSpeed."""
    ours = write_theirs(tmp_path / "theirs", small_spec("gpt"))
    state = load_file(tmp_path / "theirs" / "model.safetensors")
    save_file({f"module.{name}": tensor for name, tensor in state.items()}, tmp_path / "bare.safetensors")
    import_weights(
        str(tmp_path / "bare.safetensors"), tmp_path / "out", "import", hf_config=tmp_path / "theirs" / "config.json"
    )
    source = weights_from(str(tmp_path / "out"))
    assert all(torch.equal(source.entries[MODEL + name].whole(), tensor) for name, tensor in ours.items())
