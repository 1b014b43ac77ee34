"""Installing the hook: both files, announced states, nothing of others overwritten, taken back exactly."""

import subprocess
import sys
from pathlib import Path

import pytest

from largetrain.doctor.hook_install import (
    MODULE_NAME,
    PTH_NAME,
    hook_files,
    hook_state,
    install_hook,
    remove_hook,
)
from largetrain.errors import ConfigError


def listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_install_twice_and_undo_leave_the_folder_as_it_was(tmp_path):
    (tmp_path / "other.pth").write_text("# not ours\n")
    before = listing(tmp_path)
    assert install_hook(tmp_path) == "absent"
    assert install_hook(tmp_path) == "installed"
    assert listing(tmp_path) == before | {MODULE_NAME, PTH_NAME}
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "largetrain_launcher_hook.cpython-39.pyc").write_text("")
    assert {path.name for path in remove_hook(tmp_path)} >= {MODULE_NAME, PTH_NAME}
    assert listing(tmp_path) == before
    assert remove_hook(tmp_path) == []


def test_an_old_or_incomplete_hook_is_brought_up_to_date(tmp_path):
    install_hook(tmp_path)
    module = tmp_path / MODULE_NAME
    module.write_text(module.read_text() + "# of an older version\n")
    assert hook_state(tmp_path) == "outdated"
    (tmp_path / PTH_NAME).unlink()
    assert install_hook(tmp_path) == "outdated"
    assert {path: path.read_text() for path in tmp_path.iterdir()} == hook_files(tmp_path)


@pytest.mark.parametrize("action", [install_hook, remove_hook])
@pytest.mark.parametrize("name", [MODULE_NAME, PTH_NAME])
def test_files_of_others_are_never_touched(tmp_path, name, action):
    (tmp_path / name).write_text("somebody else's\n")
    with pytest.raises(ConfigError, match=r"not written by `largetrain setup`.*--module"):
        action(tmp_path)
    assert listing(tmp_path) == {name}
    assert (tmp_path / name).read_text() == "somebody else's\n"


def test_a_read_only_environment_is_one_clear_line(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be written \(.*--module") as caught:
        install_hook(tmp_path / "missing")
    assert len(caught.value.problems) == 1


def test_any_python_starts_silently_with_the_hook(tmp_path):
    """The `.pth` line runs at every start, so it must neither print nor import anything outside the launcher."""
    install_hook(tmp_path)
    program = (
        f"import site, sys; before = set(sys.modules); site.addsitedir({str(tmp_path)!r});"
        "print(sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
