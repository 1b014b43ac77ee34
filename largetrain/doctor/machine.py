"""What this machine offers to a compilation: compiler, ninja, Python headers, memory, disk. Imports no torch."""

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

COMPILE_MEMORY_BYTES = 2_500_000_000  # one compiler process on torch's headers peaks at 2.1 GB (measured); some room
COMPILE_DISK_BYTES = 500_000_000  # objects and libraries of the operators
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Check:
    """One thing looked at: whether it will do, what was found, and what to do if it will not."""

    name: str
    ok: bool
    found: str
    advice: str = ""

    def line(self) -> str:
        """One line for the terminal."""
        return f"{'ok  ' if self.ok else 'MISS'} {self.name}: {self.found}" + (
            f"; {self.advice}" if not self.ok else ""
        )


def environment_path() -> str:
    """$PATH with this environment's own programs first.

    Torch's build starts `ninja` from $PATH; two versions of it take turns in finding each other's work outdated and
    compile everything anew.
    """
    own = str(Path(sys.prefix, "bin"))
    rest = [part for part in os.environ.get("PATH", os.defpath).split(os.pathsep) if part != own]
    return os.pathsep.join([own, *rest])


def available_memory_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = CGROUP) -> int:
    """Memory that a new process can have: the kernel's estimate, capped by the control group's limit."""
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = cgroup / "memory.max", cgroup / "memory.current"
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, max(0, int(text) - int(used.read_text())))
    return available


def compile_jobs(memory_bytes: int, cores: int) -> int:
    """Compiler processes at once: what memory holds, at most one per core, at least one."""
    return max(1, min(cores, memory_bytes // COMPILE_MEMORY_BYTES))


def check_machine(build_root: Path) -> list[Check]:
    """Look at everything that compiling an operator needs, without compiling.

    Args:
        build_root: where the compiled operators go; need not exist yet.
    """
    return [_compiler(), _ninja(), _headers(), _memory(), _disk(build_root)]


def _compiler() -> Check:
    name = os.environ.get("CXX", "c++")
    advice = "install g++ (Debian, Ubuntu: apt-get install g++) or set CXX"
    return _version_check("C++ compiler", name, ["--version"], advice)


def _ninja() -> Check:
    return _version_check("ninja", "ninja", ["--version"], f"{sys.executable} -m pip install ninja")


def _version_check(title: str, program: str, arguments: list[str], advice: str) -> Check:
    path = shutil.which(program, path=environment_path())
    if path is None:
        return Check(title, False, f"`{program}` is not on PATH", advice)
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=False, timeout=60)
    if done.returncode != 0:
        return Check(title, False, f"{path} {' '.join(arguments)} exits with {done.returncode}", advice)
    return Check(title, True, f"{path}, {done.stdout.splitlines()[0] if done.stdout else 'version unknown'}")


def _headers() -> Check:
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    advice = f"install the headers of this Python (Debian, Ubuntu: apt-get install python{sys.version_info[0]}-dev)"
    return Check("Python headers", header.exists(), str(header) + ("" if header.exists() else " is missing"), advice)


def _memory() -> Check:
    available = available_memory_bytes()
    found = f"{available / 1e9:.1f} GB available, {COMPILE_MEMORY_BYTES / 1e9:.1f} GB wanted for one compiler process"
    return Check("memory", available >= COMPILE_MEMORY_BYTES, found, "stop other programs or add swap")


def _disk(build_root: Path) -> Check:
    place = build_root
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    found = f"{free / 1e9:.1f} GB free at {place}"
    advice = f"free {COMPILE_DISK_BYTES / 1e9:.1f} GB, or set TORCH_EXTENSIONS_DIR to a roomy folder"
    return Check("disk", free >= COMPILE_DISK_BYTES, found, advice)
