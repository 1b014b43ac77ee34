"""Puts the launcher hook into an environment's site-packages, says whether it is there, and takes it out again.

Two files: the module, a copy of `launcher_hook.py`, and a `.pth` line that loads it in processes of DeepSpeed's
launcher. (Python runs the `import` lines of `.pth` files at every start; setuptools uses the same door.) Files of the
same name that were not written here are never touched.
"""

import importlib.util
import os
import sysconfig
from pathlib import Path

from largetrain.errors import ConfigError

MARK = "# Written by `largetrain setup`; `largetrain setup --undo` removes it."
MODULE_NAME, PTH_NAME = "largetrain_launcher_hook.py", "largetrain_launcher.pth"
PTH = f"""{MARK}
import sys; any("deepspeed" in part or part.endswith("/ds") for part in sys.orig_argv[:5]) and \
__import__("largetrain_launcher_hook").install()
"""


def site_packages() -> Path:
    """The folder of this environment from which Python reads `.pth` files."""
    return Path(sysconfig.get_paths()["purelib"])


def hook_files(site: Path) -> dict[Path, str]:
    """The files that make the hook, and their text; the module first, so that the `.pth` never points at nothing."""
    source = Path(__file__).with_name("launcher_hook.py").read_text(encoding="utf-8")
    return {site / MODULE_NAME: f"{MARK}\n{source}", site / PTH_NAME: PTH}


def hook_state(site: Path) -> str:
    """`installed`, `outdated` (ours, of another version or incomplete), `absent`, or `foreign` (not written here)."""
    wanted = hook_files(site)
    found = {path: path.read_text(encoding="utf-8") for path in wanted if path.exists()}
    if not found:
        return "absent"
    if not all(text.startswith(MARK) for text in found.values()):
        return "foreign"
    return "installed" if found == wanted else "outdated"


def install_hook(site: Path) -> str:
    """Write the hook's files where they are missing or old; returns the state found before.

    Raises:
        ConfigError: the environment is read-only, or a file of that name is not ours.
    """
    state = hook_state(site)
    if state == "foreign":
        raise ConfigError(_foreign(site))
    if state != "installed":
        for path, text in hook_files(site).items():
            _replace(path, text)
    return state


def remove_hook(site: Path) -> list[Path]:
    """Delete the hook's files and their bytecode; returns what was deleted.

    Raises:
        ConfigError: the environment is read-only, or a file of that name is not ours.
    """
    if hook_state(site) == "foreign":
        raise ConfigError(_foreign(site))
    module, pth = site / MODULE_NAME, site / PTH_NAME
    bytecode = Path(importlib.util.cache_from_source(str(module)))
    others = bytecode.parent.glob(f"{module.stem}.*.pyc")
    removed = [path for path in (pth, module, *others) if path.exists()]
    try:
        for path in removed:
            path.unlink()
    except OSError as error:
        raise ConfigError(_read_only(site, error)) from error
    return removed


def _replace(path: Path, text: str) -> None:
    """Write a file so that a Python that starts meanwhile sees the old text or the new one, never half of it."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise ConfigError(_read_only(path.parent, error)) from error


def _foreign(site: Path) -> str:
    return (
        f"{site}: {MODULE_NAME} or {PTH_NAME} exists but was not written by `largetrain setup`; "
        "move it away, or write `--module` instead of `-m` after `deepspeed`"
    )


def _read_only(site: Path, error: OSError) -> str:
    return (
        f"{site}: cannot be written ({error.strerror}); run `largetrain setup` as the owner of this environment, "
        "or write `--module` instead of `-m` after `deepspeed`"
    )
