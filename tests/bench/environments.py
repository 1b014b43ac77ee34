"""Small environments over the running one, made once in a cache folder, so that the programs compare fairly.

Each is a virtual environment that borrows the packages of the Python that runs the benchmark:
- `largetrain` has what `largetrain setup` adds to the `deepspeed` command, as the README tells its users;
- `plain` has DeepSpeed as it comes;
- `hf` has DeepSpeed as it comes, with transformers and accelerate from PyPI;
- `timm`, of the comparison on images alone, has timm from PyPI, if the running environment has none.

The operators that the last two compile at their first start are compiled beforehand, into a folder that all share, so
that only warm starts are compared.
"""

import hashlib
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from largetrain.doctor.hook_install import install_hook
from largetrain.doctor.ops import run_worker

ROOT = Path(__file__).parents[2]
HF_PACKAGES = ("transformers>=5,<6", "accelerate>=1.10,<2")
TIMM_PACKAGES = ("timm>=1.0.20,<2",)
OPERATORS = ("fused_adam", "deepspeed_shm_comm")
# site-packages are searched for .pth files in alphabetic order; the launcher hook's must come after the borrowed path
BORROW = "000_largetrain_bench.pth"

Say = Callable[[str], None]


class EnvironmentsError(Exception):
    """An environment could not be made; the message is for a person."""


def cache_folder() -> Path:
    """Where the environments of this Python, torch and DeepSpeed are kept."""
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    key = "\n".join([sys.prefix, sys.version, version("torch"), version("deepspeed"), *HF_PACKAGES])
    return root / "largetrain" / "bench" / hashlib.sha256(key.encode()).hexdigest()[:12]


def borrowing_environment(folder: Path) -> Path:
    """Make a virtual environment over this one's packages and this checkout; returns its site-packages."""
    site = folder / Path(sysconfig.get_paths()["purelib"]).relative_to(sys.prefix)
    done = folder / "complete"
    if not done.exists():
        _run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)])
        done.touch()
    own = sysconfig.get_paths()
    (site / BORROW).write_text("\n".join(dict.fromkeys([str(ROOT), own["purelib"], own["platlib"]])) + "\n")
    command = folder / "bin" / "deepspeed"
    command.write_text(f"#!{folder}/bin/python\nfrom deepspeed.launcher.runner import main\n\nmain()\n")
    command.chmod(0o755)
    return site


def prepare_environments(with_hf: bool, say: Say) -> dict[str, Path]:
    """Make what is missing; returns name -> folder of the environment.

    Raises:
        EnvironmentsError: pip or a compiler failed.
    """
    cache = cache_folder()
    folders = {name: cache / name for name in ("largetrain", "plain", *(["hf"] if with_hf else []))}
    sites = {name: borrowing_environment(folder) for name, folder in folders.items()}
    install_hook(sites["largetrain"])
    if with_hf:
        _install(folders["hf"], HF_PACKAGES, say)
    return folders


def python_with_timm(say: Say) -> Path:
    """An interpreter that can import timm: this one, or that of an environment made once.

    Raises:
        EnvironmentsError: pip failed.
    """
    if find_spec("timm") is not None:
        return Path(sys.executable)
    folder = cache_folder() / "timm"
    borrowing_environment(folder)
    _install(folder, TIMM_PACKAGES, say)
    return folder / "bin" / "python"


def _install(folder: Path, packages: Sequence[str], say: Say) -> None:
    """Install packages into an environment, unless that was done before."""
    done = folder / "installed"
    if not done.exists():
        say(f"installing {', '.join(packages)} into {folder} (once)")
        _run([sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", *packages])
        done.touch()


def extensions_folder() -> Path:
    """The TORCH_EXTENSIONS_DIR of all programs."""
    return cache_folder() / "torch_extensions"


def compile_operators(say: Say) -> None:
    """Compile what the plain loop and HF Trainer would otherwise compile within their first step.

    Raises:
        EnvironmentsError: an operator does not compile.
    """
    done = extensions_folder() / "complete"
    if done.exists() and json.loads(done.read_text()) == list(OPERATORS):
        return
    say(f"compiling {', '.join(OPERATORS)} into {extensions_folder()} (once; minutes)")
    os.environ["TORCH_EXTENSIONS_DIR"] = str(extensions_folder())
    log = extensions_folder() / "compile.log"
    for result in run_worker(OPERATORS, lambda name, seconds: None, log=log):
        if result.state == "failed":
            raise EnvironmentsError(f"{result.name} does not compile: {result.detail} (see {log})")
        say(f"{result.name}: {result.state} {result.detail}")
    done.write_text(json.dumps(list(OPERATORS)))


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    if done.returncode != 0:
        raise EnvironmentsError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-2000:]}")
