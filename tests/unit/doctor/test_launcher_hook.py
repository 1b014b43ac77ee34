"""The launcher hook: which arguments it rewrites, in which processes, and what it provides in place of DeepSpeed."""

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from largetrain.doctor import launcher_hook as hook

DEEPSPEED = Path(importlib.util.find_spec("deepspeed").submodule_search_locations[0])


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("--num_gpus=8 -m largetrain --ds_config z.json", "--num_gpus=8 --module largetrain --ds_config z.json"),
        ("-m largetrain", "--module largetrain"),
        ("-mlargetrain --steps 1", "--module largetrain --steps 1"),
        ("--num_gpus 2 -m largetrain -m x", "--num_gpus 2 --module largetrain -m x"),
        ("train.py -m foo", "train.py -m foo"),
        ("--num_gpus 2 train.py -m foo", "--num_gpus 2 train.py -m foo"),
        ("--module largetrain -m x", "--module largetrain -m x"),
        ("-H hostfile -i host-1@host-2:0,1 -m largetrain", "-H hostfile -i host-1@host-2:0,1 --module largetrain"),
        ("--node_rank -1 --master_port 29501 -m a", "--node_rank -1 --master_port 29501 --module a"),
        ("--no_ssh -q --save_pid -m a", "--no_ssh -q --save_pid --module a"),
        ("--inc host-1 -m a", "--inc host-1 --module a"),
        ("--mod a -m b", "--mod a -m b"),
        ("-- -m a", "-- -m a"),
        ("-m", "--module"),
        ("", ""),
    ],
)
def test_only_an_m_in_the_place_of_the_script_is_rewritten(typed, expected):
    assert hook.with_module_flag(typed.split()) == expected.split()


@pytest.mark.parametrize(
    ("arguments", "quiet"),
    [
        ("--num_gpus=8 --module largetrain --steps 1", True),
        ("--num_gpus 8 -H hosts --module largetrain", True),
        ("--mod largetrain", True),
        ("--module largetrain --verbose", False),
        ("--log_level info --module largetrain", False),
        ("--log_level=debug --module largetrain", False),
        ("-q --module largetrain", False),
        ("--module other largetrain", False),
        ("largetrain --module largetrain", False),
        ("train.py", False),
        ("", False),
    ],
)
def test_the_launcher_is_quiet_for_largetrain_alone(arguments, quiet):
    typed = arguments.split()
    assert hook.quietened(typed) == (["--log_level=warning", *typed] if quiet else typed)


def launcher_parser(monkeypatch) -> argparse.ArgumentParser:
    """The parser that DeepSpeed's runner builds inside of `parse_args`."""
    from deepspeed.launcher import runner

    seen = []
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", lambda self, args=None: seen.append(self))
    runner.parse_args([])
    return seen[0]


def test_the_options_are_those_of_the_installed_launcher(monkeypatch):
    actions = [action for action in launcher_parser(monkeypatch)._actions if action.option_strings]
    with_value = {name for action in actions if action.nargs is None for name in action.option_strings}
    without = {name for action in actions if action.nargs == 0 for name in action.option_strings}
    assert set(hook.VALUE_OPTIONS) == with_value
    assert set(hook.FLAGS) == without


def test_the_installed_launcher_is_a_known_one():
    """When this fails, read what the new launcher needs of DeepSpeed, then add its digest."""
    assert hook.launcher_digest(str(DEEPSPEED)) in hook.KNOWN_LAUNCHERS


def test_a_launcher_with_changed_or_missing_files_is_unknown(tmp_path):
    assert hook.launcher_digest(str(tmp_path)) == ""
    for name in hook.SOURCES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((DEEPSPEED / name).read_bytes())
    assert hook.launcher_digest(str(tmp_path)) in hook.KNOWN_LAUNCHERS
    (tmp_path / "constants.py").write_text("changed = True")
    assert hook.launcher_digest(str(tmp_path)) not in hook.KNOWN_LAUNCHERS
    (tmp_path / "constants.py").unlink()
    assert hook.launcher_digest(str(tmp_path)) == ""


def test_which_processes_are_the_launcher(tmp_path):
    script, other = tmp_path / "deepspeed", tmp_path / "other" / "deepspeed"
    other.parent.mkdir()
    script.write_text("from deepspeed.launcher.runner import main\nmain()\n")
    other.write_text("print('a program of the same name')\n")
    assert hook.launcher_module([str(script), "-m", "a"], []) == hook.RUNNER
    assert hook.launcher_module([str(other), "-m", "a"], []) is None
    assert hook.launcher_module(["-m", "x"], ["python", "-u", "-m", hook.LAUNCH, "x"]) == hook.LAUNCH
    assert hook.launcher_module(["-m"], ["python", "-m", "largetrain", "-m", hook.LAUNCH]) is None
    assert hook.launcher_module(["train.py"], ["python", "train.py"]) is None
    assert hook.launcher_module([], []) is None


@pytest.mark.parametrize(
    ("nodes", "local_size", "expected"),
    [([], None, 1), ([[0, 1], [2, 3]], None, 2), ([[0, 1], [], [0, 1]], None, 1), ([[0], []], "6", 6)],
)
def test_devices_are_counted_as_deepspeed_counts_them(monkeypatch, nodes, local_size, expected):
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    monkeypatch.setattr("deepspeed.utils.numa.get_numa_cores", lambda: nodes)
    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    if local_size is not None:
        monkeypatch.setenv("LOCAL_SIZE", local_size)
    assert hook.CpuDevices().device_count() == CPU_Accelerator().device_count() == expected


def test_the_other_answers_are_those_of_deepspeed():
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    ours, theirs = hook.CpuDevices(), CPU_Accelerator()
    assert ours.device_name() == theirs.device_name()
    assert ours.visible_devices_envs() == theirs.visible_devices_envs()
    assert ours.export_envs() == theirs.export_envs()
    environments = [{}, {}]
    ours.set_visible_devices_envs(environments[0], [0, 2])
    theirs.set_visible_devices_envs(environments[1], [0, 2])
    assert environments[0] == environments[1]


def test_a_chosen_accelerator_is_respected(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    assert not hook.on_cpu_only()
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert hook.on_cpu_only()


def test_an_accelerator_device_takes_the_full_imports(monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(os, "listdir", lambda path: ["null", "nvidia0"])
    assert not hook.on_cpu_only()


def test_both_launcher_modules_load_without_torch():
    program = (
        "import sys; from largetrain.doctor import launcher_hook as hook;"
        f"hook.provide_light_modules({str(DEEPSPEED)!r});"
        "import deepspeed.launcher.runner as runner, deepspeed.launcher.launch as launch;"
        "from deepspeed.launcher.multinode_runner import PDSHRunner;"
        "assert runner.parse_args(['--module', 'a']).module and launch.main;"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


def test_an_unknown_launcher_gets_the_flag_but_no_substitutes(monkeypatch, tmp_path):
    script = tmp_path / "deepspeed"
    script.write_text(f"from {hook.RUNNER} import main\n")
    monkeypatch.setattr(hook, "KNOWN_LAUNCHERS", {})
    monkeypatch.setattr(hook, "provide_light_modules", lambda package: pytest.fail("substituted"))
    monkeypatch.setattr(sys, "argv", [str(script), "-m", "a"])
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    hook.install()
    assert sys.argv == [str(script), "--module", "a"]


@pytest.mark.parametrize("option", ["--autotuning=run", "--autot"])
def test_the_autotuner_gets_the_full_imports(monkeypatch, tmp_path, option):
    script = tmp_path / "deepspeed"
    script.write_text(f"from {hook.RUNNER} import main\n")
    monkeypatch.setattr(hook, "provide_light_modules", lambda package: pytest.fail("substituted"))
    monkeypatch.setattr(sys, "argv", [str(script), option, "train.py"])
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    hook.install()


def test_a_second_call_finds_nothing_left_to_do(tmp_path):
    """Python reads `.pth` files twice in a virtual environment."""
    script = tmp_path / "deepspeed"
    script.write_text(f"from {hook.RUNNER} import main\n")
    program = (
        "import sys; from largetrain.doctor import launcher_hook as hook;"
        f"sys.argv = [{str(script)!r}, '-m', 'a', '-m', 'b']; hook.install(); first = sys.modules['deepspeed'];"
        "hook.install(); print(sys.argv[1:], first is sys.modules['deepspeed'])"
    )
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("['--module', 'a', '-m', 'b'] True\n", "")
