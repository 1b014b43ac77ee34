"""The launcher's end of its connection to one host's agent."""

import collections
import contextlib
import os
import queue
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from largetrain.hosts.hostfile import Host
from largetrain.hosts.messages import ALIVE_EVERY_S, Lines, Message, encode

SAID_LINES = 40


@dataclass(frozen=True)
class Event:
    """Something that the launcher has to look at: a message, the end of a connection, or a signal to itself."""

    link: "Link | None" = None
    message: Message | None = None
    signal: int | None = None


Events = queue.SimpleQueue[Event]  # its put() may be called by a signal handler


class Link:
    """An agent that is being started, by ssh or on this machine.

    Args:
        command: starts it.
        events: where its messages go; the last one of a link has neither message nor signal: the connection is closed.
    """

    def __init__(self, host: Host, command: Sequence[str], environment: Mapping[str, str], events: Events):
        self.host = host
        self.heard_at = time.monotonic()
        self._events = events
        self._said: collections.deque[str] = collections.deque(maxlen=SAID_LINES)
        self._lock = threading.Lock()
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the launcher alone, which passes it on
        )
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read, self._read_errors)]
        for reader in self._readers:
            reader.start()

    @property
    def said(self) -> str:
        """What ssh or the agent wrote to standard error, or a login shell to standard output: its last lines."""
        return "\n".join(self._said)

    def send(self, kind: str, **fields: Any) -> None:
        """A message to the agent; when the connection is gone it is lost, and the events tell."""
        assert self.process.stdin is not None
        with self._lock, contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(encode(kind, **fields))
            self.process.stdin.flush()

    def close(self, limit_s: float) -> None:
        """End the connection: the agent is given `limit_s` to go by itself."""
        with self._lock, contextlib.suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        try:
            self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for reader in self._readers:
            reader.join(1)

    def drop(self) -> None:
        """Give the connection up at once: nothing comes through it any more."""
        self.process.kill()

    def _read(self) -> None:
        assert self.process.stdout is not None
        lines = Lines()
        while received := os.read(self.process.stdout.fileno(), 1 << 18):
            self.heard_at = time.monotonic()
            for found in lines.feed(received):
                if isinstance(found, str):
                    self._said.append(found)
                else:
                    self._events.put(Event(self, found))
        self.process.wait()
        self._readers[1].join(1)  # why it ended
        self._events.put(Event(self))

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._said.append(line.decode(errors="replace").rstrip())


class Heartbeat:
    """Tells all agents that the launcher is alive, whatever its main thread waits for."""

    def __init__(self, links: Sequence[Link]):
        self._links, self._end = links, threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._end.wait(ALIVE_EVERY_S):
            for link in self._links:
                link.send("ping")

    def stop(self) -> None:
        """No more signs of life."""
        self._end.set()
