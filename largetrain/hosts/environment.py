"""Variables of the ranks: what is handed on from the launcher's shell, and what each rank is told."""

import re
from collections.abc import Iterable, Mapping

from largetrain.errors import ConfigError

HANDED_ON = (
    *("PATH", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "TORCH_EXTENSIONS_DIR", "DEEPSPEED_TIMEOUT"),
    *("DS_ACCELERATOR", "TOKENIZERS_PARALLELISM", "XDG_CACHE_HOME"),
)
PREFIXES = ("NCCL_", "GLOO_", "HF_", "WANDB_", "OMP_", "KMP_", "MKL_", "TORCH_NCCL_", "UCX_", "LARGETRAIN_")
"""Network interfaces are in here: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME."""
NOT_HANDED_ON = ("LARGETRAIN_JOB", "LARGETRAIN_START")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def handed_on(environment: Mapping[str, str], more: Iterable[str] = ()) -> dict[str, str]:
    """The launcher's variables that go to every host.

    Args:
        more: `NAME` (of the launcher's environment) or `NAME=VALUE`, from `--env`.

    Raises:
        ConfigError: one of `more` is no name, or not set here.
    """
    found = {
        name: value
        for name, value in environment.items()
        if (name in HANDED_ON or name.startswith(PREFIXES)) and name not in NOT_HANDED_ON
    }
    problems = []
    for written in more:
        name, equals, value = written.partition("=")
        if not NAME.fullmatch(name):
            problems.append(f"--env {written}: {name!r} is no name of a variable; write NAME or NAME=VALUE.")
        elif not equals and name not in environment:
            problems.append(f"--env {written}: {name} is not set here; export it, or write {name}=VALUE.")
        else:
            found[name] = value if equals else environment[name]
    if problems:
        raise ConfigError(problems)
    return found


def rank_variables(
    *, rank: int, local_rank: int, ranks: int, local_ranks: int, address: str, port: int
) -> dict[str, str]:
    """Who a rank is among all, as every launcher says it."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(local_ranks),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def threads(cores: int, local_ranks: int) -> str:
    """OMP_NUM_THREADS: a rank's share of its host's cores."""
    return str(max(1, cores // local_ranks))
