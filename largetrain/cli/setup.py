"""`largetrain setup`: prepare this environment for training, once.

Adds `-m` to the environment's `deepspeed` command and compiles the DeepSpeed operators that this machine can use.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from largetrain.doctor.hook_install import hook_files, hook_state, install_hook, remove_hook, site_packages
from largetrain.doctor.machine import Check, check_machine
from largetrain.doctor.ops import OpResult, run_worker
from largetrain.errors import EXIT_DONE, EXIT_INTERNAL, ConfigError


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    made = argparse.ArgumentParser(prog="largetrain setup", description=__doc__, allow_abbrev=False)
    made.add_argument(
        "--ops",
        default="all",
        metavar="a,b|all|common|none",
        help="operators to compile; all (default): those that training can use on this machine; common: AdamW's",
    )
    made.add_argument("--check", action="store_true", help="only report; exit code 1 when something is missing")
    made.add_argument("--undo", action="store_true", help="take `-m` out of the `deepspeed` command again")
    return made


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code.

    Raises:
        ConfigError: read-only environment, a file in the way, a missing tool, an unknown operator.
    """
    options = parser().parse_args(argv)
    names = [] if options.ops == "none" else [name.strip() for name in options.ops.split(",") if name.strip()]
    start = time.monotonic()
    if options.undo:
        return _undo()
    ready = _report_hook(site_packages()) if options.check else _install_hook(site_packages())
    if names:
        checks = check_machine(build_root())
        for check in checks:
            _say(check.line())
        _require(checks)
        ready = _operators(names, build=not options.check) and ready
    _say(f"{'checked' if options.check else 'set up'} in {time.monotonic() - start:.0f} s")
    return EXIT_DONE if ready else EXIT_INTERNAL


def build_root() -> Path:
    """Folder that holds the compiled operators: $TORCH_EXTENSIONS_DIR, or torch's default."""
    cache = os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR", os.path.join(cache, "torch_extensions")))


def _say(line: str) -> None:
    print(line, flush=True)


def _install_hook(site: Path) -> bool:
    before = install_hook(site)
    word = {"absent": "added", "outdated": "brought up to date", "installed": "already there"}[before]
    files = ", ".join(str(path) for path in hook_files(site))
    _say(f"deepspeed -m: {word} ({files}; `largetrain setup --undo` removes it)")
    if not Path(sys.prefix, "bin", "deepspeed").exists():
        _say(f"note: no `deepspeed` command in {sys.prefix}/bin; `python -m deepspeed.launcher.runner` knows -m too")
    return True


def _report_hook(site: Path) -> bool:
    state = hook_state(site)
    _say(f"{'ok  ' if state == 'installed' else 'MISS'} deepspeed -m: {state} ({site})")
    return state == "installed"


def _undo() -> int:
    removed = remove_hook(site_packages())
    for path in removed:
        _say(f"removed {path}")
    _say("`deepspeed` is as it came; write --module again" if removed else "nothing to undo: `deepspeed` is as it came")
    _say(f"compiled operators stay in {build_root()}; delete the folder to be rid of them")
    return EXIT_DONE


def _require(checks: Sequence[Check]) -> None:
    """Refuse to start a compilation that cannot end well; short memory is only a warning, since swap may help."""
    missing = [check for check in checks if not check.ok and check.name != "memory"]
    if missing:
        way_out = "or run `largetrain setup --ops none` (then only training without offload works on this machine)"
        raise ConfigError([f"setup: no {check.name}: {check.found}; {check.advice}, {way_out}" for check in missing])


def _operators(names: Sequence[str], build: bool) -> bool:
    """Check or compile; False when one failed, or is missing while only checking."""
    log = build_root() / "largetrain-setup.log"
    _say(f"operators in {build_root()} (compiler output: {log}); the first time takes one to a few minutes each")
    results = []
    # an exception unwinds through run_worker, which ends the compilers; the default action would leave them running
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    for result in run_worker(names, _heartbeat, build=build, log=log):
        _say(_result_line(result))
        results.append(result)
    unknown = [result.name for result in results if result.state == "unusable" and result.name in names]
    if unknown:
        raise ConfigError(f"--ops: {', '.join(unknown)}: cannot be used here, see above; leave it out")
    return not any(result.state in ("failed", "stale") for result in results)


def _heartbeat(name: str, seconds: float) -> None:
    _say(f"     ... {name or 'starting'}: {seconds:.0f} s")


def _result_line(result: OpResult) -> str:
    mark = {"failed": "FAIL", "stale": "MISS", "unusable": "--  "}.get(result.state, "ok  " if result.final else "... ")
    seconds = f" in {result.seconds:.0f} s" if result.state in ("compiled", "failed") else ""
    word = {"stale": "not compiled, or outdated", "unusable": "not on this machine"}.get(result.state, result.state)
    detail = f": {result.detail}" if result.detail and result.state not in ("ready", "compiled", "stale") else ""
    return f"{mark} {result.name}: {word}{seconds}{detail}"
