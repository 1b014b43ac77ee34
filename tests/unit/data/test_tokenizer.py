"""Tokenizers: bytes, tokenizer.json, and what is wrong with a file."""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from largetrain.data import tokenizer as module
from largetrain.data.tokenizer import load_tokenizer, tokenizer_vocab_size
from largetrain.errors import ConfigError
from tests.unit.data.helpers import make_tokenizer


@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = load_tokenizer("bytes")
    try:
        ids = tokenizer.encode(text)
    except UnicodeEncodeError:
        pytest.fail("strategies.text() gives no surrogates")
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode([*ids, tokenizer.eos_id]) == text


def test_bytes_have_an_end_of_text_id():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer_vocab_size("bytes")) == (257, 256, 257)


def test_vocab_size_needs_no_heavy_import():
    code = (
        "import sys; from largetrain.data.tokenizer import tokenizer_vocab_size as size; size('bytes');"
        "print(sorted({'numpy', 'torch', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_tokenizer_file_agrees_with_its_library(tmp_path):
    path = tmp_path / "tokenizer.json"
    reference = make_tokenizer(path)
    tokenizer = load_tokenizer(str(path))
    text = "the quick brown dog\nüber 你好"
    assert tokenizer.encode(text).tolist() == reference.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert [ids.tolist() for ids in tokenizer.encode_many(["the", "", "fox"])] == [
        reference.encode(one).ids for one in ("the", "", "fox")
    ]
    assert tokenizer.vocab_size == tokenizer_vocab_size(str(path)) == max(reference.get_vocab().values()) + 1
    assert tokenizer.eos_id == reference.token_to_id("<|endoftext|>")


def test_special_tokens_padding_and_truncation_of_the_file_are_off(tmp_path):
    from tokenizers.processors import TemplateProcessing

    path = tmp_path / "tokenizer.json"
    plain = make_tokenizer(path)
    expected = plain.encode("the quick fox").ids
    eos = plain.token_to_id("<|endoftext|>")
    plain.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", eos)])
    plain.enable_truncation(2)
    plain.enable_padding(length=50)
    plain.save(str(path))
    assert load_tokenizer(str(path)).encode("the quick fox").tolist() == expected


def test_long_texts_are_cut_at_line_ends(tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.json"
    reference = make_tokenizer(path)
    monkeypatch.setattr(module, "PIECE_CHARACTERS", 50)
    text = "the quick brown fox\njumps over\n" * 20 + "x" * 130
    ids = load_tokenizer(str(path)).encode(text)
    assert reference.decode(ids.tolist()) == text
    assert all(piece.endswith("\n") for piece in module._pieces(text)[:-3])


@pytest.mark.parametrize("name", ["<|endoftext|>", "</s>", "[SEP]"])
def test_usual_end_of_text_names_are_found(tmp_path, name):
    path = tmp_path / "tokenizer.json"
    reference = make_tokenizer(path, specials=("[UNK]", name))
    assert load_tokenizer(str(path)).eos_id == reference.token_to_id(name)


def test_the_file_beside_names_the_end_of_text_token(tmp_path):
    path = tmp_path / "tokenizer.json"
    reference = make_tokenizer(path, specials=("</s>", "<stop>"))
    other = load_tokenizer(str(path)).fingerprint
    for named in ("<stop>", {"content": "<stop>", "lstrip": False}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
        tokenizer = load_tokenizer(str(path))
        assert tokenizer.eos_id == reference.token_to_id("<stop>") and tokenizer.fingerprint != other


def test_no_end_of_text_token_is_told(tmp_path):
    make_tokenizer(tmp_path / "tokenizer.json", specials=("[UNK]",))
    with pytest.raises(ConfigError, match=r"data.tokenizer: .*no end-of-text token .*tokenizer_config.json"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "no such file"),
        (b"", "cannot be read as a tokenizer.json"),
        (b"\xff\xfe", "cannot be read as a tokenizer.json"),
        (b"[]", "holds no vocabulary"),
        (b'{"model": {}}', "holds no vocabulary"),
        (b'{"model": {"type": "BPE", "vocab": {"a": 0}}}', "is not a usable tokenizer.json"),
    ],
)
def test_broken_files_are_told(tmp_path, content, told):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"data.tokenizer: {path}.*{told}"):
        load_tokenizer(str(path))


def test_a_missing_library_is_told(tmp_path, monkeypatch):
    make_tokenizer(tmp_path / "tokenizer.json")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"needs the package `tokenizers`.*pip install tokenizers"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert tokenizer_vocab_size(str(tmp_path / "tokenizer.json")) > 256
