"""What the ranks print: a file for each, and all together on the terminal with the rank's name before each line."""

import collections
import contextlib
import queue
import sys
import threading
from pathlib import Path
from typing import BinaryIO

TAIL_LINES = 200
CHAIN = ("The above exception was the direct cause", "During handling of the above exception")
LAST_LINES = 15


class Console:
    """Takes the output of one start's ranks.

    Args:
        folder: where each rank's file goes; made when the first line comes.
        names: host of each rank, in order.
        quiet: files only.
    """

    def __init__(self, folder: Path, names: list[str], quiet: bool = False):
        self.folder, self.names, self.quiet = folder, names, quiet
        self.tails = [collections.deque[str](maxlen=TAIL_LINES) for _ in names]
        self._files: dict[int, BinaryIO] = {}

    def take(self, rank: int, text: str) -> None:
        """Text that a rank has written: whole lines."""
        if rank not in self._files:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._files[rank] = (self.folder / f"rank-{rank:05d}-{self.names[rank]}.txt").open("ab", buffering=0)
        self._files[rank].write(text.encode())
        lines = text.removesuffix("\n").split("\n")
        self.tails[rank].extend(lines)
        if not self.quiet:
            before = f"{self.names[rank]}:{rank}: " if len(self.names) > 1 else ""
            _printer.put("".join(f"{before}{line}\n" for line in lines))

    def last_words(self, rank: int) -> list[str]:
        """The traceback that a rank ended with, else its last lines."""
        return last_words(list(self.tails[rank]))

    def close(self) -> None:
        """All is written."""
        for file in self._files.values():
            file.close()
        self._files.clear()


def last_words(lines: list[str]) -> list[str]:
    """From the first traceback of the last chain of them to the end; without one, the last lines."""
    starts = [index for index, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    if not starts:
        return lines[-LAST_LINES:]
    begin = starts.pop()
    while starts and any(line.startswith(CHAIN) for line in lines[starts[-1] : begin]):
        begin = starts.pop()
    return lines[begin:]


class Printer:
    """Writes to standard output from a thread: a terminal that is held (Ctrl-S) must not hold up the launcher."""

    def __init__(self) -> None:
        self._texts: queue.SimpleQueue[str | threading.Event] = queue.SimpleQueue()
        self._started = False

    def put(self, text: str) -> None:
        """Whole lines to be printed."""
        if not self._started:
            self._started = True
            threading.Thread(target=self._print, daemon=True).start()
        self._texts.put(text)

    def drain(self, limit_s: float = 5.0) -> None:
        """Wait until all is printed."""
        if self._started:
            done = threading.Event()
            self._texts.put(done)
            done.wait(limit_s)

    def _print(self) -> None:
        while True:
            text = self._texts.get()
            if isinstance(text, threading.Event):
                text.set()
                continue
            with contextlib.suppress(OSError, ValueError):  # nobody reads any more; the files have it all
                sys.stdout.write(text)
                sys.stdout.flush()


_printer = Printer()


def say(line: str) -> None:
    """A line of the launcher's own, in its place among those of the ranks."""
    _printer.put(f"largetrain launch: {line}\n")


def drain() -> None:
    """Wait until all that was said is printed."""
    _printer.drain()
