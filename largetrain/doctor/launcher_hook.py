"""Teaches DeepSpeed's launcher `-m MODULE` and what signals mean, and spares its two processes the import of torch.

`largetrain setup` copies this file into site-packages beside a one-line `.pth` file, which loads it in the processes
of the `deepspeed` command alone. So it stands by itself: standard library only, nothing of largetrain. No file of
DeepSpeed is changed, and `pip install -U deepspeed` changes nothing here.

* `deepspeed [options] -m NAME ...` becomes `deepspeed [options] --module NAME ...`, the spelling that DeepSpeed knows.
  Only an `-m` in the place of the script counts; what follows the script belongs to the script.
* The launcher's INFO lines are left out for `--module largetrain` unless its `--verbose` asks for them.
* The `deepspeed` command imports torch and all of DeepSpeed twice (`runner`, then `launch`) before the first rank
  starts, and needs of them a logger, a device count and the name of one environment variable. On a machine without an
  accelerator these three are provided here, if the launcher's files are the ones that this was written for.
* On one host the `deepspeed` command keeps SIGTERM to itself and leaves its ranks behind; the process below it ends one
  rank after the other, by force after 30 s each, and answers 1. With the same files, and for `--module largetrain`,
  both pass the signals in RELAYED on to all at once, wait for the ranks to save, and answer with their exit code.
"""

import atexit
import hashlib
import importlib.util
import logging
import os
import signal
import subprocess
import sys
import time
from types import FrameType, ModuleType

COMMANDS = ("deepspeed", "deepspeed.pt", "ds")
RUNNER, LAUNCH = "deepspeed.launcher.runner", "deepspeed.launcher.launch"
VALUE_OPTIONS = (
    "--hostfile --include --exclude --num_nodes --num_gpus --num_accelerators --master_port --master_addr --node_rank "
    "--launcher --launcher_args --enable_each_rank_log --autotuning --bind_core_list --ssh_port --venv_script "
    "--log_level -H -i -e"
).split()
FLAGS = (
    "--help --module --no_python --no_local_rank --no_ssh --no_ssh_check --force_multi --save_pid "
    "--bind_cores_to_rank --quiet -h -q"
).split()
LOG_FORMAT = "[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s"
# sha256 over SOURCES of the DeepSpeed releases whose launcher is known to need no more than what is provided here
SOURCES = (
    "launcher/__init__.py",
    "launcher/runner.py",
    "launcher/launch.py",
    "launcher/multinode_runner.py",
    "launcher/constants.py",
    "constants.py",
    "utils/numa.py",
    "utils/logging.py",
    "accelerator/real_accelerator.py",
    "accelerator/cpu_accelerator.py",
)
KNOWN_LAUNCHERS = {"5e794e6b47628449a65e54067927f1538751f78809f35e0ff7c9d1c11859432f": "0.19.8"}
ACCELERATOR_DEVICES = ("nvidia", "kfd", "dri", "dxg", "accel", "davinci", "habana", "hl", "cambricon", "biren", "sdaa")
RELAYED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
GRACE = "LARGETRAIN_GRACE_S"  # environment variable: how long ranks may go on after a signal
GRACE_S = 600.0
SECOND_S = 3.0  # a signal so soon after another of its kind is the same one on another way; as in largetrain's ranks
FORCE_S = 5.0  # from a second signal to the end by force
STRAGGLER_S = 30.0  # from the end of the first rank to that of the others, by force
ACCELERATOR_PACKAGES = ("torch_npu", "torch_sdaa", "habana_frameworks", "torch_mlu", "torch_supa", "torch_xmlir")


def with_module_flag(arguments: list[str]) -> list[str]:
    """The launcher's arguments with `-m NAME` (or `-mNAME`) in the place of the script spelt `--module NAME`.

    Follows argparse: values of options are skipped, unambiguous abbreviations and `--option=value` understood; the
    first argument that is neither an option nor a value is the script, and nothing after it is touched.
    """
    index = 0
    while index < len(arguments):
        argument = arguments[index]
        if argument == "--" or not argument.startswith("-"):
            break
        if argument == "-m":
            return [*arguments[:index], "--module", *arguments[index + 1 :]]
        if argument.startswith("-m"):
            return [*arguments[:index], "--module", argument[2:], *arguments[index + 1 :]]
        index += 2 if _takes_next(argument) else 1
    return arguments


def quietened(arguments: list[str]) -> list[str]:
    """Ask the launcher for warnings only when it starts `--module largetrain`; INFO lines come with `--verbose`.

    A log level that is given is left alone, and so is the launch of anything else.
    """
    index = 0
    while index < len(arguments) and arguments[index].startswith("-"):
        if arguments[index].startswith(("-q", "--q", "--log_level")):
            return arguments
        index += 2 if _takes_next(arguments[index]) else 1
    if not starts_largetrain(arguments) or "--verbose" in arguments[index:]:
        return arguments
    return ["--log_level=warning", *arguments]


def starts_largetrain(arguments: list[str]) -> bool:
    """Whether these arguments of `deepspeed`, or of the process below it, start `--module largetrain`."""
    index, module = 0, False
    while index < len(arguments) and arguments[index].startswith("-"):
        module = module or arguments[index].startswith("--mod")
        index += 2 if _takes_next(arguments[index]) or arguments[index] == "--save_pid" else 1
    return module and arguments[index : index + 1] == ["largetrain"]


def _takes_next(argument: str) -> bool:
    """Whether argparse reads the next argument as this option's value."""
    if argument in VALUE_OPTIONS:
        return True
    if argument in FLAGS or "=" in argument or not argument.startswith("--"):
        return False
    return any(option.startswith(argument) for option in VALUE_OPTIONS)


def launcher_module(argv: list[str], original: list[str]) -> str | None:
    """Which launcher module this process is about to run, or None.

    Args:
        argv: `sys.argv` while Python starts: the script's path first, or "-m".
        original: `sys.orig_argv`, which still has the module's name.
    """
    if not argv:
        return None
    if argv[0] == "-m":
        name = original[original.index("-m") + 1] if "-m" in original[:-1] else None
        return name if name in (RUNNER, LAUNCH) else None
    if os.path.basename(argv[0]) not in COMMANDS or not os.path.isfile(argv[0]):
        return None
    with open(argv[0], "rb") as script:  # another program may bear the same name
        return RUNNER if RUNNER.encode() in script.read(4096) else None


def on_cpu_only() -> bool:
    """Whether DeepSpeed would settle for its CPU accelerator here, as far as can be told without torch."""
    chosen = os.environ.get("DS_ACCELERATOR")
    if chosen is not None or not sys.platform.startswith("linux"):
        return chosen == "cpu"
    if any(name.startswith(ACCELERATOR_DEVICES) for name in os.listdir("/dev")):
        return False
    return not any(importlib.util.find_spec(name) for name in ACCELERATOR_PACKAGES)


def launcher_digest(package: str) -> str:
    """sha256 of the launcher's files, and of those that this module stands in for, under DeepSpeed's folder.

    Empty when one of them is missing, as it may be in a later DeepSpeed.
    """
    digest = hashlib.sha256()
    for path in (os.path.join(package, name) for name in SOURCES):
        if not os.path.isfile(path):
            return ""
        with open(path, "rb") as source:
            digest.update(source.read())
    return digest.hexdigest()


class CpuDevices:
    """What the launcher asks of an accelerator, answered as DeepSpeed's `CPU_Accelerator` answers it."""

    def device_name(self, device_index: int | None = None) -> str:
        """Name of the kind of device."""
        return "cpu"

    def device_count(self) -> int:
        """$LOCAL_SIZE, else the number of NUMA nodes that have cores of their own."""
        count = int(os.environ.get("LOCAL_SIZE", "0"))
        if count > 0:
            return count
        from deepspeed.utils.numa import get_numa_cores

        last: list[int] = []
        for cores in get_numa_cores():
            if cores and cores != last:  # memory-only nodes have no cores, and the last one's list may be repeated
                count, last = count + 1, cores
        return count or 1

    def export_envs(self) -> list[str]:
        """Prefixes of the environment variables that are forwarded to other hosts."""
        return []

    def visible_devices_envs(self) -> list[str]:
        """Environment variables that choose devices."""
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[int]) -> None:
        """Write the chosen devices into the environment of the ranks."""
        current_env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, local_accelerator_ids))


def _logger() -> logging.Logger:
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    handler = logging.StreamHandler(stream=sys.stdout)
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    logger.addHandler(handler)
    return logger


def provide_light_modules(package: str) -> None:
    """Fill `sys.modules` so that the launcher's own files load without DeepSpeed's package imports, hence torch.

    Args:
        package: DeepSpeed's folder; every other submodule is still found there and loaded as it is.
    """

    def add(name: str, **attributes: object) -> None:
        module = ModuleType(name)
        module.__path__ = [os.path.join(package, *name.split(".")[1:])]
        module.__dict__.update(attributes)
        sys.modules[name] = module

    def set_log_level_from_string(log_level_str: str) -> None:
        logger.setLevel(log_level_str.upper())
        for handler in logger.handlers:
            handler.setLevel(log_level_str.upper())

    def get_numactl_cmd(*arguments: object) -> object:
        from deepspeed.utils.numa import get_numactl_cmd as real

        return real(*arguments)

    logger, devices = _logger(), CpuDevices()
    add("deepspeed")
    add(
        "deepspeed.utils",
        logger=logger,
        set_log_level_from_string=set_log_level_from_string,
        get_numactl_cmd=get_numactl_cmd,
    )
    add("deepspeed.accelerator", get_accelerator=lambda: devices)
    add("deepspeed.autotuning", Autotuner=None)  # never reached: `--autotuning` takes the full imports


class Relay:
    """A handler that passes signals on to this process's children, waits for them and exits as they did.

    Args:
        grace_s: from a signal to the end of the children by force.
        started: ranks, or the process between, as the launcher has started them; it may know how some have ended.
    """

    def __init__(self, grace_s: float, started: "list[subprocess.Popen[bytes]]"):
        self.grace_s, self.started = grace_s, started
        self._first_at: dict[bool, float] = {}
        self._end_at: float | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        kind = number == signal.SIGUSR1  # a warning, after which SIGTERM is no second signal
        seen = kind in self._first_at
        second = now - self._first_at.setdefault(kind, now) >= SECOND_S
        if second or not seen:  # what a terminal sends to all, or what comes on two ways, is passed on once
            _send(children(os.getpid()), number)
        if self._end_at is None:
            self._end_at = now + self.grace_s
            sys.exit(self._wait(number))
        if second:  # within the wait of the first
            self._end_at = min(self._end_at, now + FORCE_S)

    def _wait(self, number: int) -> int:
        """Exit code of the first child that ended with one; 128 + the signal's number when there was no child."""
        assert self._end_at is not None
        codes = [child.returncode for child in self.started if child.returncode is not None]
        while True:
            try:
                process_id, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if process_id:
                codes.append(os.waitstatus_to_exitcode(status))
                self._end_at = min(self._end_at, time.monotonic() + STRAGGLER_S)
            elif time.monotonic() > self._end_at:
                _send(descendants(os.getpid()), signal.SIGKILL)
                time.sleep(0.2)
            else:
                time.sleep(0.05)
        return next((_shell_code(code) for code in codes if code), 0 if codes else 128 + number)


def _shell_code(code: int) -> int:
    """An exit code that can be handed on: the end by a signal as shells tell it."""
    return 128 - code if code < 0 else code


def _send(process_ids: list[int], number: int) -> None:
    for process_id in process_ids:
        try:
            os.kill(process_id, number)
        except ProcessLookupError:
            continue  # it has just ended


def children(parent: int) -> list[int]:
    """Processes that `parent` has started, by /proc."""
    return [process_id for process_id, above in _parents().items() if above == parent]


def descendants(process_id: int) -> list[int]:
    """Processes started by it, directly or not."""
    parents, found, known = _parents(), [], {process_id}
    while new := [child for child, above in parents.items() if above in known and child not in known]:
        known.update(new)
        found += new
    return found


def _parents() -> dict[int, int]:
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has just ended
    return parents


def relay_signals(module: str) -> None:
    """Let signals to this process of the launcher mean what they mean to a rank.

    Signals that are ignored, as in background jobs of a shell, stay ignored.
    """
    if isinstance(signal.getsignal(signal.SIGTERM), Relay) or not os.path.isdir("/proc/self"):
        return
    try:
        grace_s = float(os.environ.get(GRACE, GRACE_S))
    except ValueError:
        grace_s = GRACE_S
    # the upper one only waits for the lower one, which ends the ranks
    relay = Relay(grace_s if module == LAUNCH else grace_s + STRAGGLER_S, _started_children())
    for number in RELAYED:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, relay)
    if module == LAUNCH:
        _keep_handlers()
    atexit.register(_pass_over)


def _keep_handlers() -> None:
    """Make nothing of the launcher's own handlers, which end one rank after the other."""
    plain = signal.signal

    def careful(number: int, handler: object) -> object:
        if number in RELAYED and getattr(handler, "__name__", "") == "sigkill_handler":
            return signal.getsignal(number)
        return plain(number, handler)  # type: ignore[arg-type]

    signal.signal = careful  # type: ignore[assignment]


def _started_children() -> "list[subprocess.Popen[bytes]]":
    """A list to which what runs `largetrain` is added as it is started.

    The `deepspeed` command answers 0 when the process below it was killed; here 128 + the signal's number.
    """
    started: list[subprocess.Popen[bytes]] = []

    class Child(subprocess.Popen):
        def __init__(self, args: object, *more: object, **options: object):
            super().__init__(args, *more, **options)  # type: ignore[call-overload]
            if isinstance(args, list) and "largetrain" in args:
                started.append(self)

        def wait(self, timeout: float | None = None) -> int:
            code = super().wait(timeout)
            if code < 0 and self in started:
                sys.exit(_shell_code(code))
            return code

    subprocess.Popen = Child  # type: ignore[misc]
    return started


def _pass_over() -> None:
    """At the end of this process: Python is about to put the system's handlers back, which would change its answer."""
    for number in RELAYED:
        if isinstance(signal.getsignal(number), Relay):
            signal.signal(number, signal.SIG_IGN)


def install() -> None:
    """Called while Python starts: prepare this process if it is one of the launcher's, else do nothing.

    In a virtual environment Python reads the `.pth` files twice, so a second call must find nothing left to do.
    """
    module = launcher_module(sys.argv, sys.orig_argv)
    if module is None:
        return
    if module == RUNNER:
        sys.argv[1:] = quietened(with_module_flag(sys.argv[1:]))
    if "deepspeed" in sys.modules or any(argument.startswith("--auto") for argument in sys.argv):
        return
    on_cpu, ours = on_cpu_only(), starts_largetrain(sys.argv[1:])
    spec = importlib.util.find_spec("deepspeed") if on_cpu or ours else None
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders or launcher_digest(folders[0]) not in KNOWN_LAUNCHERS:
        return
    if ours:
        relay_signals(module)
    if on_cpu:
        provide_light_modules(folders[0])
