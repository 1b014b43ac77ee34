"""Reading files: one dialect for the engine JSON, safe YAML for the run, one clear line for everything else."""

import json

import hjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from largetrain.config.parse import read_engine_file, read_run_file
from largetrain.config.parse_engine import parse_engine_text
from largetrain.config.parse_run import parse_run_text, parse_value
from largetrain.errors import ConfigError

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=5), below, max_size=3),
    max_leaves=8,
)


def problems(parser, text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parser("f", text)
    return list(caught.value.problems)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "b": {"c": [1, 2.5, true, null, "x"]}}',
        '{"a": 1, // comment\n # another\n /* a\n third */ "b": {"c": [1, 2.5, true, null, "x",],},}',
        "{a: 1, b: {c: [1, 2.5, true, null, 'x']}}",
        "a: 1\nb: {\n  c: [1\n 2.5\n true, null, x\n]\n}\n",
        '{\r\n  "a": 1,\r\n  "b": {"c": [1, 2.5, true, null, "x"]}\r\n}\r\n',
    ],
)
def test_every_form_of_the_dialect_gives_the_same_data(text):
    assert parse_engine_text("f", text).data == {"a": 1, "b": {"c": [1, 2.5, True, None, "x"]}}


@given(st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), PLAIN, max_size=4))
@settings(max_examples=60, deadline=None)
def test_json_reads_as_deepspeed_reads_it(data):
    text = json.dumps(data)
    assert parse_engine_text("f", text).data == hjson.loads(text, object_pairs_hook=dict)


def test_whole_floats_are_integers_as_in_hjson():
    data = parse_engine_text("f", '{"a": 5e8, "b": 15099494.4, "c": 1.0}').data
    assert data == {"a": 500000000, "b": 15099494.4, "c": 1}
    assert isinstance(data["a"], int)


def test_lines_of_keys_are_kept():
    document = parse_engine_text("f.json", '{\n "a": 1,\n "b": {\n  "c": [1,\n {"d": 2}] } }')
    assert document.origin(("b", "c")) == "f.json:4"
    assert document.origin(("b", "c", 1, "d")) == "f.json:5"
    assert document.origin(("b", "absent")) == "f.json:3"


def test_repeated_keys_are_refused_at_every_depth_with_line_and_column():
    text = '{"gradient_clipping": 1.0,\n "zero": {"stage": 1,\n   "stage": 2},\n "gradient_clipping": 0.1}'
    assert problems(parse_engine_text, text) == [
        "f:3:4: zero.stage: written twice (first in line 2). Remove one.",
        "f:4:2: gradient_clipping: written twice (first in line 1). Remove one.",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"lr": NaN}', "f:1:8: NaN is not a finite number."),
        ('{"lr": -Infinity\n}', "f:1:8: -Infinity is not a finite number."),
        ('{"lr": 1e400}', "f:1:8: the number 1e400 is not finite."),
        ("[]", "f: holds a list at the top; an object {...} is needed."),
        ("null", "f: holds null at the top; an object {...} is needed."),
        ("3", "f: holds a number at the top; an object {...} is needed."),
        ('{"a": True}', "f:1:7: write true instead of True."),
        ('{"a": 1', "f:1:8: the file ends inside an object; is a closing } missing?"),
        ('{"a": 1 "b": 2}', "f:1:7: cannot read '1 \"b\": 2}'"),
        ("{type: AdamW, lr: 1}", "f:1:8: cannot read 'AdamW, lr: 1}'"),
        ('{"a"\n 1}', 'f:2:2: a ":" is expected after the key "a".'),
        (
            '{"a": "x\ny"}',
            "f:1:9: a text in quotes holds a control character (or is not closed on its line); write it as \\n.",
        ),
        (
            '{"a": "x\ty"}',
            "f:1:9: a text in quotes holds a control character (or is not closed on its line); write it as \\t.",
        ),
        (
            '{"a\x01": 1}',
            "f:1:4: a text in quotes holds a control character (or is not closed on its line); write it as \\u0001.",
        ),
        ('{"a": "x', "f:1:7: a text that starts here is not closed."),
        ('{"a": \uff11\uff10}', "f:1:7: the digits of \uff11\uff10 are not those of a number; write 10."),
        ('{"a": 1\uff10}', "f:1:7: the digits of 1\uff10 are not those of a number; write 10."),
        ('{"a": 1.\uff15}', "f:1:7: the digits of 1.\uff15 are not those of a number; write 1.5."),
        ("/* no end", "f:1: the file ends inside a comment or a text."),
        ('{"a": "\\ud800"}', "f: a: the text holds half of a surrogate pair"),
        ('{"a": ' + "9" * 5000 + "}", "f:1:7: the number has too many digits."),
    ],
)
def test_what_cannot_be_read_is_one_line_with_its_place(text, said):
    (problem,) = problems(parse_engine_text, text)
    assert problem.startswith(said)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty."),
        (b" \n\t\n", "is empty."),
        (b"\xff\xfe{\x00}", "is not UTF-8 text (byte 0xff)."),
        (b'{"a":\n "\0"}', "holds a NUL byte: not a text file."),
        (b"[" * 100_000, "is nested too deeply."),
    ],
)
def test_files_that_are_no_configuration(tmp_path, content, said):
    path = tmp_path / "c.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_engine_file(str(path))
    (problem,) = caught.value.problems
    assert problem.startswith(str(path)) and problem.endswith(said)


def test_byte_order_mark_and_crlf_are_accepted(tmp_path):
    path = tmp_path / "c.json"
    path.write_bytes(b'\xef\xbb\xbf{\r\n"a": 1\r\n}')
    assert read_engine_file(str(path)).data == {"a": 1}
    path.write_bytes(b"\xef\xbb\xbfsteps: 3\r\nname: x\r\n")
    assert read_run_file(str(path)).data == {"steps": 3, "name": "x"}


def test_missing_files_and_folders(tmp_path):
    (tmp_path / "zero2.json").write_text("{}")
    for path, said in (
        (tmp_path / "zer2.json", f"no such file; did you mean {tmp_path / 'zero2.json'}?"),
        (tmp_path, "is a folder; name a file in it."),
        (tmp_path / "no" / "c.json", f"no such file (the folder {tmp_path / 'no'} does not exist)."),
    ):
        with pytest.raises(ConfigError) as caught:
            read_engine_file(str(path))
        assert str(caught.value) == f"{path}: {said}"
    for path in ("a\0b", "x" * 5000):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_run_file(path)


def test_yaml_numbers_with_an_exponent_are_numbers():
    assert parse_run_text("f", "a: 2e-5\nb: -1E3\nc: 2.0e-5\nd: '2e-5'\ne: e5\n").data == {
        "a": 2e-5,
        "b": -1000.0,
        "c": 2e-5,
        "d": "2e-5",
        "e": "e5",
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "a: 1\nb: {c: 1, c: 2}\na: 2\n",
            [
                "f:3:1: a: written twice (first in line 1). Remove one.",
                "f:2:11: b.c: written twice (first in line 2). Remove one.",
            ],
        ),
        (
            "a: !!python/object/apply:os.system [touch x]",
            ["f:1: a: the tag !!python/object/apply:os.system is not accepted: only plain data is read."],
        ),
        ("a: 010", ["f:1: a: 010 is read as 8; write 8, or quote it to keep the text."]),
        ("a: 1:30", ["f:1: a: 1:30 is read as 90; write 90, or quote it to keep the text."]),
        ("a: .inf", ["f:1: a: .inf is not a finite number."]),
        ("a: &x [*x]", ["f:1: aliases expand without end; write the values out."]),
        ("- 1", ["f: holds a list at the top; `key: value` lines are needed."]),
        ("a: 2024-01-01", ["f:1: a: 2024-01-01 is read as a date; quote it to keep the text."]),
        ("a:\n\tb: 1", ["f:2:1: a tab stands where spaces are needed."]),
        ("a: \x07", ["f: holds control characters: not a YAML text file."]),
    ],
)
def test_yaml_mistakes(text, said):
    assert problems(parse_run_text, text) == said


def test_a_python_tag_runs_nothing(tmp_path):
    marker = tmp_path / "marker"
    problems(parse_run_text, f"a: !!python/object/apply:os.mkdir ['{marker}']")
    assert not marker.exists()


def test_aliases_cannot_exhaust_memory():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    (problem,) = problems(parse_run_text, "\n".join(lines))
    assert "aliases expand without end" in problem


def test_an_empty_run_file_sets_nothing():
    assert parse_run_text("f", "# only a comment\n").data == {}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4),
        ("2e-5", 2e-5),
        ("true", True),
        ("[0.9, 0.95]", [0.9, 0.95]),
        ("{stage: 3}", {"stage": 3}),
        ("runs/x", "runs/x"),
        ("", None),
        ("null", None),
        ('"4"', "4"),
        ("Auto", "Auto"),
    ],
)
def test_values_of_set(text, value):
    assert parse_value(text) == value


@pytest.mark.parametrize("text", ["a: b: c", "[1", "!!python/name:os.system", ".nan", "{a: 1, a: 2}"])
def test_values_of_set_that_cannot_be_read(text):
    with pytest.raises(ValueError, match=r"\."):
        parse_value(text)


SEED_TEXT = b'{\n "a": {"b": [1, 2.5e-3, {"c": null}], // x\n "t": \'q\'},\n k: word\n "m": \'\'\'\n x\n \'\'\'\n}\n'
YAML_SEED = b"a: {b: [1, 2e-3], <<: {c: ~}}\nd: &x |\n  text\ne: *x\nf: !!int 3\n? g\n: h\n"


@given(
    seed=st.sampled_from([SEED_TEXT, YAML_SEED, b""]),
    cuts=st.lists(st.tuples(st.integers(0, 90), st.binary(max_size=4)), max_size=4),
)
@settings(max_examples=300, deadline=None)
def test_fuzz_nothing_but_a_config_error(tmp_path_factory, seed, cuts):
    content = seed
    for place, piece in cuts:
        content = content[:place] + piece + content[place + len(piece) // 2 :]
    path = tmp_path_factory.getbasetemp() / "fuzz"
    path.write_bytes(content)
    for reader in (read_engine_file, read_run_file):
        try:
            assert isinstance(reader(str(path)).data, dict)
        except ConfigError as error:
            assert all(problem.startswith(str(path)) and "\n" not in problem for problem in error.problems)
