"""Launches from node1 of a cluster: started, watched, signalled, and what they left."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.fake_hosts import Cluster
from tests.cluster.stand_in import as_json

ROOT = Path(__file__).parents[2]
LIMIT_S = 60.0


@dataclass
class Done:
    """A launch that is over."""

    code: int
    out: str
    err: str
    wall_s: float
    output: Path
    left: dict[str, list[str]] = field(default_factory=dict)
    """Processes of each host afterwards; of those that are on."""

    @property
    def log(self) -> list[dict[str, Any]]:
        """launch.jsonl, without the times of day."""
        rows = (self.output / "logs" / "launch.jsonl").read_text().splitlines()
        return [{key: value for key, value in json.loads(row).items() if key != "time"} for row in rows]

    def rank(self, number: int) -> dict[str, Any]:
        """What a stand-in saw of its world."""
        return json.loads((self.output / f"rank-{number}.json").read_text())


class Launch:
    """`largetrain launch` on node1, with stand-ins or, without a plan, real ranks."""

    def __init__(
        self,
        cluster: Cluster,
        flags: Sequence[str],
        arguments: Sequence[str] = (),
        plan: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        output: str = "out",
        folder: Path | None = None,
    ):
        self.cluster = cluster
        self.folder = folder or Path(cluster.folder, f"run-{time.monotonic_ns()}")
        if folder is None:
            self.folder.mkdir()
        self.output = self.folder / output
        words = [sys.executable, "-m", "tests.cluster.start", *flags]
        words += ["--env", f"STAND_IN={as_json(**(plan or {}))}", "--", "--output", output, *arguments]
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            cluster.command("node1", words, self.folder),
            env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.texts = {"out": "", "err": ""}
        self.readers = [
            threading.Thread(target=self._read, args=(name, stream), daemon=True)
            for name, stream in (("out", self.process.stdout), ("err", self.process.stderr))
        ]
        for reader in self.readers:
            reader.start()

    def _read(self, name: str, stream: Any) -> None:
        for line in stream:
            self.texts[name] += line

    def wait_for(self, text: str, limit_s: float = LIMIT_S) -> None:
        """Until the launch has printed this."""
        deadline = time.monotonic() + limit_s
        while text not in self.texts["out"]:
            assert self.process.poll() is None and time.monotonic() < deadline, self.texts
            time.sleep(0.01)

    def pids(self, name: str, containing: str) -> list[int]:
        """Processes of a host whose command line holds this, by this machine's numbers."""
        return list(self.cluster.processes(name, containing))

    def signal(self, number: int) -> None:
        """Send it to the launcher itself."""
        for process_id in self.pids("node1", "tests.cluster.start"):
            os.kill(process_id, number)

    def kill(self, name: str, containing: str) -> None:
        """kill -9 processes of a host."""
        for process_id in self.pids(name, containing):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)

    def done(self, limit_s: float = LIMIT_S, left_limit_s: float = 2.0) -> Done:
        """Wait for the end; processes that are there then have `left_limit_s` to go, and are told of otherwise."""
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            for name in self.cluster.hosts:
                self.kill(name, "")
            raise AssertionError(f"not over within {limit_s} s: {self.texts}") from None
        wall_s = time.monotonic() - self.began
        for reader in self.readers:
            reader.join(5)
        deadline = time.monotonic() + left_limit_s
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return Done(code, self.texts["out"], self.texts["err"], wall_s, self.output, left)

    def _left(self) -> dict[str, list[str]]:
        found = {name: list(self.cluster.processes(name).values()) for name in self.cluster.hosts}
        return {name: [words for words in there if words.strip()] for name, there in found.items() if there}


def start(cluster: Cluster, *flags: str, slots: int = 1, **plan: Any) -> Launch:
    """Stand-ins on all hosts of the cluster."""
    return Launch(cluster, ["--hostfile", str(cluster.hostfile(slots)), *flags], plan=plan)


def until(true: Callable[[], object], limit_s: float = 10.0) -> float:
    """Wait until something is true; returns the seconds that took."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < limit_s, "not within the limit"
        time.sleep(0.02)
    return time.monotonic() - began
