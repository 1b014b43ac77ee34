"""What the launcher and its agents say to each other: one JSON object a line, over the two pipes of an ssh.

A login shell may print before the agent does, so lines of ours begin with a mark; others are handed on as text.
"""

import json
from typing import Any

MARK = b"\x01largetrain "
LONGEST_LINE_BYTES = 16_000_000
ALIVE_EVERY_S = 2.0
LOST_S = 11.0
"""Silence after which the other end counts as gone: five signs of life are missing."""

Message = dict[str, Any]


def encode(kind: str, **fields: Any) -> bytes:
    """A message as it is written to the pipe."""
    return MARK + json.dumps({"kind": kind, **fields}).encode("ascii") + b"\n"


class Lines:
    """Takes bytes as they arrive and gives whole messages."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> list[Message | str]:
        """Messages, and as text the lines that are none of ours, in their order."""
        *whole, self._rest = (self._rest + received).split(b"\n")
        if len(self._rest) > LONGEST_LINE_BYTES:
            self._rest = b""  # no message is so long: a program floods the pipe
        return [_decoded(line) for line in whole]


def _decoded(line: bytes) -> Message | str:
    before, mark, body = line.partition(MARK)
    if mark and not before.strip():
        try:
            message = json.loads(body)
        except ValueError:
            message = None
        if isinstance(message, dict) and isinstance(message.get("kind"), str):
            return message
    return line.decode(errors="replace")
