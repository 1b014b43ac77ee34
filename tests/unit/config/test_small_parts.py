"""Vocabulary size, the launcher's world, the reference and the JSON schemas, the tools of the schema check."""

import json

import pytest

from largetrain.config.document import Document, dotted, nearest, shown
from largetrain.config.engine_schema import engine_keys, engine_schema
from largetrain.config.reference import json_schema, reference
from largetrain.config.run_schema import RUNS, run_keys, run_schema
from largetrain.config.schema_check import SchemaCheck
from largetrain.config.vocab import vocab_size_of
from largetrain.config.world import World, launch_world, task_rank
from largetrain.errors import ConfigError


def test_vocabulary_of_bytes_and_of_a_tokenizer_file(tmp_path):
    assert vocab_size_of("bytes") == 257
    path = tmp_path / "tokenizer.json"
    for content, size in (
        ({"model": {"type": "BPE", "vocab": {"a": 0, "b": 5}}, "added_tokens": []}, 6),
        ({"model": {"type": "BPE", "vocab": {"a": 0}}, "added_tokens": [{"id": 9, "content": "<end>"}]}, 10),
        ({"model": {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0]]}}, 2),
    ):
        path.write_text(json.dumps(content))
        assert vocab_size_of(str(path)) == size


@pytest.mark.parametrize("token_id", [-1, 10**30])
def test_token_ids_that_no_embedding_can_have(tmp_path, token_id):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"vocab": {"a": 0, "b": token_id}}}))
    with pytest.raises(ConfigError, match=rf"holds the token id {token_id}; ids go from 0 to 99,999,999"):
        vocab_size_of(str(path))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": {"vocab": {}}}', '{"model": 3}', "[" * 100000, "\x00"])
def test_files_that_are_no_tokenizer(tmp_path, text):
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"data\.tokenizer: .*tokenizer\.json"):
        vocab_size_of(str(path))
    with pytest.raises(ConfigError, match=r"no such file; write \"bytes\""):
        vocab_size_of(str(tmp_path / "absent.json"))


MEET = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("env", "world"),
    [
        ({}, World()),
        (
            {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            World(3, 1, 8, 2, "WORLD_SIZE=8 set by the launcher"),
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"},
            World(1, 1, 2, 2, "WORLD_SIZE=2 set by the launcher"),
        ),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_SIZE": "4"}, World(5, 1, 8, 4, "WORLD_SIZE=8 set by the launcher")),
        ({"LOCAL_RANK": "0"}, World()),
    ],
)
def test_world_of_a_launch(env, world):
    assert launch_world({**MEET, **env}) == world


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"RANK": "0", "WORLD_SIZE": "two"}, 'WORLD_SIZE="two" is not a whole number from 1 to 10000000; unset it'),
        ({"RANK": "0", "WORLD_SIZE": "0"}, 'WORLD_SIZE="0" is not'),
        ({"RANK": "0", "WORLD_SIZE": "9" * 5000}, r'WORLD_SIZE="9{50,60}\.\.\. is not'),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, 'RANK="-1" is not'),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "70000"}, 'MASTER_PORT="70000" is not a whole number'),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": ""}, "WORLD_SIZE=2 is set without MASTER_ADDR, where"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "", "MASTER_PORT": ""},
            "WORLD_SIZE=2 is set without MASTER_ADDR and MASTER_PORT",
        ),
        (
            {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
            "LOCAL_RANK=2 lies outside the 2 ranks of this host",
        ),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 lies outside WORLD_SIZE=2"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set without RANK"),
        ({"RANK": "1"}, "RANK=1 is set without WORLD_SIZE"),
    ],
)
def test_a_broken_launch_environment(env, said):
    with pytest.raises(ConfigError, match=said) as caught:
        launch_world({**MEET, **env})
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (
            {"SLURM_NTASKS": "8", "SLURM_PROCID": "3"},
            r"task 3 of 8 started by srun.*export RANK=\$SLURM_PROCID WORLD_SIZE=\$SLURM_NTASKS "
            r"LOCAL_RANK=\$SLURM_LOCALID .*MASTER_ADDR=",
        ),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, r"mpirun.*RANK=\$OMPI_COMM_WORLD_RANK"),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, r"task 1 of 2 started by mpirun.*RANK=\$PMI_RANK"),
    ],
)
def test_tasks_without_a_rank_would_each_train_alone(env, said):
    with pytest.raises(ConfigError, match=said):
        launch_world(env)
    given = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert launch_world({**MEET, **env, **given}).rank == 1
    assert task_rank(env) == env[next(key for key in env if key.endswith(("PROCID", "RANK")))]


@pytest.mark.parametrize(
    "env",
    [
        {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {"SLURM_NTASKS": "8"},
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
    ],
)
def test_one_task_or_an_allocation_alone_is_one_process(env):
    assert launch_world(env) == World()
    assert task_rank(env) == "0"


def test_the_reference_holds_every_key_of_both_files():
    text = reference()
    lines = {line.strip().partition(":")[0] for line in text.splitlines()}
    for schema in (*map(run_schema, RUNS), engine_schema()):
        for key, node in schema["properties"].items():
            assert key in lines or node.get("deprecated")
            for below, below_node in node.get("properties", {}).items():
                assert below in lines or below_node.get("deprecated")
    for name in ("WarmupDecayLR", "Muon", "elasticity", "gpt3-175b"):
        assert name in text


@pytest.mark.parametrize("task", RUNS)
def test_every_run_key_is_explained(task):
    for key, node in run_schema(task)["properties"].items():
        assert node["description"], key
        for below, below_node in node.get("properties", {}).items():
            assert below_node["description"], f"{key}.{below}"


def test_no_run_section_bears_an_engine_keys_name():
    assert not set(run_keys()) & engine_keys()


@pytest.mark.parametrize("which", ["engine", "run"])
def test_json_schemas_are_plain_draft_2020_12(which):
    schema = json_schema(which)
    assert schema["$schema"].endswith("2020-12/schema") and schema["type"] == "object"
    text = json.dumps(schema)
    assert '"x-' not in text and "$ref" not in text
    assert all(choice["additionalProperties"] is False for choice in schema.get("anyOf", [schema]))


def test_the_engine_schema_offers_auto_and_the_parameters_of_a_type():
    schema = json_schema("engine")
    batch = schema["properties"]["train_batch_size"]
    assert batch["anyOf"] == [{"type": "integer", "minimum": 1}, {"const": "auto"}]
    adam = next(
        rule
        for rule in schema["properties"]["optimizer"]["allOf"]
        if "AdamW" in rule["if"]["properties"]["type"]["enum"]
    )
    assert {"lr", "betas", "torch_adam"} <= set(adam["then"]["properties"]["params"]["properties"])


def test_paths_and_values_as_shown():
    assert dotted(("optimizer", "params", "betas", 1)) == "optimizer.params.betas[1]"
    assert dotted(("a\nb",)) == "a\\nb"
    assert shown("x" * 100).endswith("...") and len(shown("x" * 100)) == 60
    assert nearest("LR", ["lr", "eps"]) == "lr" and nearest("qqqq", ["lr", "eps"]) is None


def test_a_document_remembers_who_set_a_key():
    document = Document("f", {"a": {"b": 1}}, {("a",): "f:1", ("a", "b"): "f:2"})
    document.set(("a", "c", "d"), 3, "--set")
    assert document.data == {"a": {"b": 1, "c": {"d": 3}}}
    assert (document.origin(("a", "b")), document.origin(("a", "c", "d")), document.origin(("a", "c"))) == (
        "f:2",
        "--set",
        "--set",
    )
    document.set(("a",), {}, "--flag")
    assert document.origin(("a", "b")) == "--flag"
    with pytest.raises(KeyError, match=r"a\.x"):
        Document("f", {"a": {"x": 1}}).set(("a", "x", "y"), 2)


@pytest.mark.parametrize(
    ("node", "value", "result"),
    [
        ({"type": "integer"}, 5e8, 500_000_000),
        ({"type": "number"}, 3, 3),
        ({"type": "integer", "x-auto": "run"}, "AUTO", "auto"),
        ({"type": ["integer", "null"]}, None, None),
        ({"type": "string", "enum": ["Warn"]}, "WARN", "WARN"),
        ({}, {"any": ["thing"]}, {"any": ["thing"]}),
        ({"type": "array", "items": {"type": "integer"}}, [1.0, 2], [1, 2]),
    ],
)
def test_values_that_fit_are_normalised(node, value, result):
    check = SchemaCheck(Document("f", {}), {})
    got = check.check(value, node, ("key",))
    assert (got, type(got), check.problems) == (result, type(result), [])


@pytest.mark.parametrize(
    ("node", "value", "said"),
    [
        ({"type": "integer"}, True, "expected a whole number, got true."),
        ({"type": "integer"}, 1e30, "expected a whole number, got 1e+30"),
        ({"type": "boolean"}, 0, "expected true or false, got 0. Write false."),
        ({"type": "number"}, ".5", 'expected a number, got ".5" (text). Write 0.5 without quotes.'),
        ({"type": "string"}, True, "expected text, got true. Put it in quotes."),
        (
            {"type": "integer"},
            "\uff11\uff10",
            'expected a whole number, got "\uff11\uff10" (text). Write 10 without quotes.',
        ),
        (
            {"type": "number"},
            "\uff11e-\uff13",
            'expected a number, got "\uff11e-\uff13" (text). Write 0.001 without quotes.',
        ),
        ({"type": "number"}, "inf", 'expected a number, got "inf" (text).'),
        ({"type": "number", "maximum": 1}, 2, "must be at most 1, got 2."),
        ({"type": "string"}, ["a"], 'expected text, got ["a"].'),
        ({"type": "array"}, {}, "expected a list, got {}."),
    ],
)
def test_values_that_do_not_fit_are_explained(node, value, said):
    check = SchemaCheck(Document("f", {}), {})
    check.check(value, node, ("key",))
    assert check.problems[0].startswith(f"f: key: {said}")
