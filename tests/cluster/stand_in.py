"""What the tests of launches start in the place of a training: ranks that meet, take steps together, save, and fail.

Starts in a tenth of a second. As with gloo, each step waits for all ranks, and whoever loses a peer ends with exit
code 1. Behaviour comes from $STAND_IN, a JSON object with the fields of `Plan`.
"""

import json
import os
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

STOP_CODES = {signal.SIGTERM: 75, signal.SIGINT: 130}
JOIN_LIMIT_S = 10.0


@dataclass(frozen=True)
class Plan:
    """What the ranks do."""

    steps: int = 3
    step_s: float = 0.05
    save_every: int = 0
    fails: int = -1
    """The rank that fails, in the step `at`: by "raise", "kill", "hang", "deaf", "leave" (a process), an exit code."""
    at: int = 2
    how: str = "raise"
    once: bool = False
    """Only in the first start."""
    slow_save_s: float = 0.0
    """How long saving takes after a signal."""


class Peers:
    """All ranks' connections to rank 0."""

    def __init__(self) -> None:
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if self.rank == 0:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            server = socket.create_server(("", port), family=family)
            self.sockets = [server.accept()[0] for _ in range(self.ranks - 1)]
            server.close()
            return
        deadline = time.monotonic() + JOIN_LIMIT_S
        while True:
            try:
                self.sockets = [socket.create_connection((address, port))]
                return
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def largest(self, number: int) -> int:
        """Of all ranks' numbers; waits for all of them."""
        if self.rank == 0:
            number = max([number, *(self._receive(peer) for peer in self.sockets)])
        for peer in self.sockets:
            peer.sendall(bytes([number]))
        return number if self.rank == 0 else self._receive(self.sockets[0])

    def _receive(self, peer: socket.socket) -> int:
        try:
            received = peer.recv(1)
        except ConnectionError:
            received = b""
        if not received:
            print("this rank stops because another one has ended", flush=True)
            sys.exit(1)
        return received[0]


def main() -> None:
    """Behave as $STAND_IN says."""
    plan = Plan(**json.loads(os.environ.get("STAND_IN", "{}")))
    rank = int(os.environ["RANK"])
    output = Path(sys.argv[sys.argv.index("--output") + 1])
    output.mkdir(parents=True, exist_ok=True)
    seen = {
        "arguments": sys.argv[1:],
        "environment": dict(os.environ),
        "host": socket.gethostname(),
        "cwd": os.getcwd(),
    }
    (output / f"rank-{rank}.json").write_text(json.dumps(seen))
    asked: list[int] = []
    for number in STOP_CODES:
        signal.signal(number, lambda number, _: asked.append(number))
    peers = Peers()
    failed_before = output / "failed"
    first = 1 + (_saved(output) if "--resume" in sys.argv else 0)
    print(f"rank {rank} begins with step {first}", flush=True)
    for step in range(first, plan.steps + 1):
        if rank == plan.fails and step == plan.at and not (plan.once and failed_before.exists()):
            failed_before.touch()
            _fail(plan.how)
        time.sleep(plan.step_s)
        stop = peers.largest(asked[0] if asked else 0)
        if rank == 0 and (stop or (plan.save_every and step % plan.save_every == 0)):
            time.sleep(plan.slow_save_s if stop else 0)
            _save(output, step)
        print(f"rank {rank} step {step}", flush=True)
        if stop:
            peers.largest(0)
            sys.exit(STOP_CODES[signal.Signals(stop)])
    peers.largest(0)


def _fail(how: str) -> None:
    if how == "raise":
        raise ArithmeticError("planned")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how in ("hang", "deaf"):
        for number in STOP_CODES:
            signal.signal(number, signal.SIG_IGN)
        time.sleep(1000)
    elif how == "leave":
        if os.fork() == 0:
            os.setsid()
            os.execlp("sleep", "sleep", "1001")
    else:
        sys.exit(int(how))


def _saved(output: Path) -> int:
    latest = output / "checkpoints" / "latest"
    return int(latest.read_text()[-8:]) if latest.exists() else 0


def _save(output: Path, step: int) -> None:
    folder = output / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder.parent / "latest.new").write_text(folder.name)
    (folder.parent / "latest.new").replace(folder.parent / "latest")


def as_json(**fields: object) -> str:
    """A plan, for $STAND_IN."""
    return json.dumps(asdict(Plan(**fields)))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
