"""The machine's checks, each against a machine that lacks the thing."""

import os
import shutil
import sys
import sysconfig
from collections import namedtuple
from pathlib import Path

import pytest

from largetrain.doctor import machine


def check(name: str, build_root: Path) -> machine.Check:
    return {found.name: found for found in machine.check_machine(build_root)}[name]


def test_the_environments_own_programs_come_first_and_once(monkeypatch):
    own = os.path.join(sys.prefix, "bin")
    monkeypatch.setenv("PATH", f"/usr/bin:{own}:/bin")
    assert machine.environment_path() == f"{own}:/usr/bin:/bin"


def test_a_missing_and_a_broken_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    missing = check("C++ compiler", tmp_path)
    assert not missing.ok
    assert missing.line() == (
        "MISS C++ compiler: `no-such-compiler` is not on PATH; "
        "install g++ (Debian, Ubuntu: apt-get install g++) or set CXX"
    )
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\nexit 7\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    assert "exits with 7" in check("C++ compiler", tmp_path).found


def test_a_working_compiler_is_named_with_its_version(monkeypatch, tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'c++ 99.1'\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    found = check("C++ compiler", tmp_path)
    assert found.line() == f"ok   C++ compiler: {compiler}, c++ 99.1"


def test_missing_python_headers(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert check("Python headers", tmp_path).found == f"{tmp_path}/Python.h is missing"


def test_too_little_disk_for_a_folder_that_is_yet_to_be_made(monkeypatch, tmp_path):
    usage = namedtuple("usage", "total used free")
    asked = []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(path) or usage(1, 1, 400_000_000))
    found = check("disk", tmp_path / "a" / "b")
    assert (found.ok, asked) == (False, [tmp_path])
    assert found.found == f"0.4 GB free at {tmp_path}"


@pytest.mark.parametrize(
    ("limit", "expected"), [("max", 4_096_000_000), ("3000000000", 2_000_000_000), ("500", 0), (None, 4_096_000_000)]
)
def test_available_memory_is_capped_by_the_control_group(tmp_path, limit, expected):
    (tmp_path / "meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable: 4000000 kB\n")
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit + "\n")
        (tmp_path / "memory.current").write_text("1000000000\n")
    assert machine.available_memory_bytes(tmp_path / "meminfo", tmp_path) == expected


@pytest.mark.parametrize(("gigabytes", "cores", "jobs"), [(1, 8, 1), (6, 8, 2), (100, 8, 8), (100, 1, 1)])
def test_compiler_processes_fit_into_memory_and_cores(gigabytes, cores, jobs):
    assert machine.compile_jobs(gigabytes * 1_000_000_000, cores) == jobs
