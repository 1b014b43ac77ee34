"""Process group and DeepSpeed's process-wide settings, with what DeepSpeed wastes on a CPU left out.

Nothing of DeepSpeed's files is changed: attributes of its modules are set before first use.
"""

import logging
import os
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch

from largetrain.errors import ConfigError


def prepare(*, rank: int, local_rank: int, world_size: int, timeout_s: int, verbose: bool) -> torch.device:
    """Join the process group and return this rank's device.

    A run without a launcher becomes a world of one. Safe to call once per process.

    Raises:
        ConfigError: another program has the port where the ranks are to meet.
    """
    if "DS_ACCELERATOR" not in os.environ and not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"  # spares the accelerator probe and its warning
    # an operator that is built or looked up at run time must meet this environment's ninja: another one builds anew
    os.environ["PATH"] = f"{sys.prefix}/bin{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    _quiet(verbose)
    import deepspeed.comm
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    on_cpu = accelerator.device_name() == "cpu"
    if on_cpu:
        _spare_shared_memory_op()
        # torch's CPU kernels do compute fp16; engine/half_on_cpu makes them exact and fast
        accelerator.is_fp16_supported = lambda: True
    for key, value in _single_process_rendezvous(rank, local_rank, world_size).items():
        os.environ.setdefault(key, value)
    with _taken_port_named():
        deepspeed.comm.init_distributed(
            dist_backend=accelerator.communication_backend_name(),
            auto_mpi_discovery=False,
            timeout=timedelta(seconds=timeout_s),
            verbose=verbose,
        )
    if on_cpu:
        return torch.device("cpu")
    accelerator.set_device(local_rank)
    return torch.device(accelerator.device_name(), local_rank)


def limit_timeouts(timeout_s: int) -> None:
    """Give every process group made so far the run's collective timeout.

    `deepspeed.initialize` makes groups with torch's default of 30 minutes whatever the world group has.
    """
    import torch.distributed as dist

    for group in list(dist.distributed_c10d._world.pg_map):
        dist.set_timeout(timedelta(seconds=timeout_s), group)


@contextmanager
def _taken_port_named() -> Iterator[None]:
    """Turn the failure to listen on the rendezvous port, as of a second run on this host, into one line."""
    try:
        yield
    except RuntimeError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise ConfigError(
            f"MASTER_PORT {os.environ.get('MASTER_PORT')}: another program on this host has the port where the ranks "
            f"are to meet, perhaps another run; choose a free one with the launcher's --master_port (torchrun: "
            f"--master-port, or --standalone)."
        ) from error


def _spare_shared_memory_op() -> None:
    """Keep DeepSpeed from compiling deepspeed_shm_comm and from leaving 66 MiB per rank in /dev/shm.

    Only `inference_all_reduce` uses that op, which training never calls. The submodule has to be
    taken from sys.modules: `deepspeed.comm.torch` as an attribute is torch itself.
    """
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]


def _single_process_rendezvous(rank: int, local_rank: int, world_size: int) -> dict[str, str]:
    if world_size > 1:
        return {}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _quiet(verbose: bool) -> None:
    """Silence DeepSpeed's own log lines and torch's warnings about it, or let all of them through when asked for."""
    if not verbose:
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\..*|deepspeed\..*")
    import deepspeed.utils.logging as chatter

    chatter.logger.setLevel(logging.INFO if verbose else logging.ERROR)
    chatter.set_log_level_from_string("info" if verbose else "error")
