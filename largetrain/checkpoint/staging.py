"""Pieces of a snapshot copied to host memory, as one safetensors file that lies ready to be written.

`safetensors.save_file` would turn every tensor into bytes of its own and leave hashing to a second pass. The format is
eight bytes of length, a JSON header and the tensors one after another, so the live tensors are copied straight to
their places in the image of the file: the only copy, which has to be done before the next update changes them.
"""

import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from largetrain.checkpoint.header import Stored, header
from largetrain.parallel.columns import plainly
from largetrain.parallel.pieces import Piece

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

TOUCHED_BYTES = 64 << 20
"""At once."""


@dataclass(frozen=True)
class Planned:
    """Where the pieces of one rank go in its file."""

    pieces: list[Piece]
    """In the order of the file: largest elements first, so that every tensor is aligned."""
    header: bytes
    """With its length in front."""
    data_bytes: int
    ready: Mapping[torch.device, Any]
    """For each CUDA device that pieces lie on, the event after which they are what is to be copied."""


def plan(pieces: Sequence[Piece]) -> Planned:
    """Lay out a file of these pieces; empty ranges of tensors that have elements are left out.

    What devices are to do by now is done before they are copied, and what they are given afterwards is not waited for.

    Raises:
        ValueError: two pieces have the same place.
        KeyError: a dtype that a checkpoint has not.
    """
    kept = [piece for piece in pieces if len(piece.values) or not prod(piece.shape)]
    kept.sort(key=lambda piece: (-piece.values.element_size(), piece.key, piece.start))
    devices = {piece.values.device for piece in kept if piece.values.is_cuda}
    ready = {device: torch.cuda.current_stream(device).record_event() for device in devices}
    return Planned(kept, header([_stored(piece) for piece in kept]), sum(piece.values.nbytes for piece in kept), ready)


def _stored(piece: Piece) -> Stored:
    start, columns = plainly(piece.shape, piece.start, piece.columns)
    return Stored(piece.key, piece.shape, DTYPES[piece.values.dtype], start, len(piece.values), 0, columns)


class Staging:
    """Host memory for the file of one snapshot, kept from save to save: fresh pages are slow to touch.

    The memory is the process's own and no child's: a data loader's workers that are forked in the meantime would
    otherwise make every page of it be copied at the next save. It is pinned once tensors of a CUDA device come.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._flat: Tensor | None = None
        self._pinned = False

    def reserve(self, count: int) -> None:
        """Have memory for a file of so many bytes, and touch it: the kernel gives it page by page, which takes time.

        Raises:
            OSError: the host has not the memory.
        """
        memory, flat = self._sized(count)
        for part in flat.split(TOUCHED_BYTES):
            if self._memory is not memory:  # closed meanwhile
                return
            part.zero_()  # without the interpreter lock

    def fill(self, planned: Planned) -> memoryview:
        """Copy the live pieces; returns the file, at the start of a page, valid until the next call.

        Raises:
            OSError: the host has not the memory.
        """
        if not planned.pieces:
            return memoryview(b"")
        offset = len(planned.header)
        memory, flat = self._sized(offset + planned.data_bytes)
        memory[:offset] = planned.header
        with ExitStack() as entered:  # streams of its own, so that training does not wait in line behind the copies
            streams = [entered.enter_context(self._stream(device, ready)) for device, ready in planned.ready.items()]
            for piece in planned.pieces:
                end = offset + piece.values.nbytes
                if end > offset:
                    place = flat[offset:end].view(piece.values.dtype)
                    place.copy_(piece.values, non_blocking=piece.values.is_cuda)
                offset = end
            for stream in streams:
                stream.synchronize()
        return memoryview(memory)[:offset]

    @contextmanager
    def _stream(self, device: torch.device, ready: Any) -> Iterator[Any]:
        """A stream that begins where `ready` was recorded; current within."""
        stream = torch.cuda.Stream(device)
        stream.wait_event(ready)
        with torch.cuda.stream(stream):  # also makes the device current: a thread begins with the first one
            if not self._pinned:
                self._pin()
            yield stream

    def close(self) -> None:
        """Give the memory back."""
        if self._pinned and self._flat is not None:
            torch.cuda.cudart().cudaHostUnregister(self._flat.data_ptr())
        self._memory, self._flat, self._pinned = None, None, False

    def _sized(self, needed_bytes: int) -> tuple[mmap.mmap, Tensor]:
        if self._memory is None or self._flat is None or len(self._flat) < needed_bytes:
            self.close()
            self._memory = mmap.mmap(-1, needed_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
                if hasattr(mmap, advice):
                    self._memory.madvise(getattr(mmap, advice))
            self._flat = torch.frombuffer(self._memory, dtype=torch.uint8)
        return self._memory, self._flat

    def _pin(self) -> None:
        """Let the device copy straight into the memory; without it the copy is slower, but right."""
        assert self._flat is not None
        done = torch.cuda.cudart().cudaHostRegister(self._flat.data_ptr(), len(self._flat), 0)
        self._pinned = int(done) == 0
