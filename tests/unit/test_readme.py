"""What the README names is there: files, commands, keys of both files, flags."""

import os
import re
from pathlib import Path

from largetrain.cli import arguments, check, checkpoint, config, launch, setup
from largetrain.config.engine_schema import engine_schema, key_places
from largetrain.config.run_schema import RUNS, run_schema

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCES = re.findall(r"^```\w*\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
SPANS = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", README, flags=re.MULTILINE | re.DOTALL))
CODE = [*FENCES, *SPANS]
KEY = r"[a-z_][a-z0-9_]*(?:\.[a-z0-9_]+)+"
NO_KEY = re.compile(r"(torch|largetrain|tests)\.|.*\.(json|jsonl|yaml|py|pth|pt|txt|safetensors)$")
FREE = ("args", "lr_factors")  # sections whose keys are the user's
# of other programs
IMAGENET_EXAMPLE = (
    "--arch --workers --epochs --start-epoch --batch-size --lr --momentum --wd --print-freq --resume --evaluate "
    "--pretrained --world-size --rank --dist-url --dist-backend --seed --gpu --no-accel --multiprocessing-distributed "
    "--dummy"
).split()
LAUNCHERS = "--num_gpus --hostfile --master_addr --module --include --nproc-per-node --local_rank --local-rank".split()
TOOLS = "--logdir --rounds --count --parts --models --warm".split()


def exists(key: str) -> bool:
    """Whether a dotted key stands in the run YAML of some task, or in the engine JSON."""
    path = key.split(".")
    path = path[1:] if path[0] == "engine" else path
    if path[:2] in (["optimizer", "params"], ["scheduler", "params"]):
        return tuple(path) in key_places().values()
    for node in (engine_schema(), *map(run_schema, RUNS)):
        rest = list(path)
        while rest and rest[0] in node.get("properties", {}):
            node = node["properties"][rest[0]]
            if rest.pop(0) in FREE:
                return True
        if not rest:
            return True
    return False


def test_lookup_of_keys_can_fail():
    assert exists("data.augment.mixup") and exists("zero_optimization.stage") and exists("optimizer.params.lr")
    assert not exists("data.augment.mixing") and not exists("optimizer.params.speed") and not exists("fp32.enabled")


def test_keys():
    named = {match for span in SPANS for match in re.findall(rf"^({KEY})(?:$|[:=])", span)}
    named |= {match for code in CODE for match in re.findall(rf"(?<![\w./-])({KEY})=", code)}
    keys = {key for key in named if not NO_KEY.match(key)}
    assert len(keys) > 50
    assert sorted(key for key in keys if not exists(key)) == []


def test_files_and_commands():
    paths = set(re.findall(r"ds_configs/[\w./-]+\.(?:json|yaml)", README))
    assert [path for path in sorted(paths) if not (ROOT / path).is_file()] == []
    commands = set(re.findall(r"\blaunch/\w+", README))
    assert len(commands) >= 5
    assert [name for name in sorted(commands) if not os.access(ROOT / name, os.X_OK)] == []
    modules = {module for code in CODE for module in re.findall(r"-m (tests[\w.]+)", code)}
    assert [name for name in modules if not (ROOT / name.replace(".", "/")).with_suffix(".py").is_file()] == []


def test_every_shipped_config_is_in_the_tables():
    shipped = [path.name for kind in ("*.json", "runs/*.yaml") for path in (ROOT / "ds_configs").glob(kind)]
    spans = " ".join(SPANS)
    # `zero0_bf16.json` ... `zero3_bf16.json` stand for those between them
    written = [name for name in shipped if not re.fullmatch(r"zero[12]_(bf16|fp32)\.json", name)]
    assert [name for name in written if name not in spans] == []


def test_flags():
    parsers = [arguments.train_parser("largetrain"), config.parser(), check.parser(), setup.parser(), launch.parser()]
    parsers += checkpoint.parser().commands.choices.values()
    ours = {flag for parser in parsers for flag in parser._option_string_actions}
    named = {flag for code in CODE for flag in re.findall(r"(?<![\w-])(--[a-z][\w-]*)", code)}
    assert sorted(named - ours - {*IMAGENET_EXAMPLE, *LAUNCHERS, *TOOLS}) == []
    ours_alone = arguments.train_parser("largetrain")._option_string_actions
    assert sorted(flag for flag in ours_alone if flag[:2] == "--" and flag not in named) == ["--ds-config", "--help"]


def test_the_imagenet_example_has_its_table():
    """Every option of it stands in the first column, with an answer beside it."""
    table = README.split("### Coming from the PyTorch ImageNet example")[1].split("\n### ")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| `")]
    answered = " ".join(row[0] for row in rows if row[1].strip())
    assert [option for option in IMAGENET_EXAMPLE if f"`{option}`" not in answered] == []
