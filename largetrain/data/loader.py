"""Micro-batches of one data-parallel rank, from a map-style dataset and the sample order.

The index that reaches a loader process carries epochs and sample ids, so prefetching and persistent processes
cannot fall behind the epoch.

A dataset may carry `on_bad_image` ("error" or "skip") and `max_bad_images`: they say what becomes of samples whose
`__getitem__` raises BadImage.
"""

import hashlib
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from largetrain.config.batch import Batch
from largetrain.data.images import IGNORED, BadImage
from largetrain.data.order import SampleOrder
from largetrain.data.worker_signals import leave_signals_to_parent, signals_held
from largetrain.errors import EXIT_MISTAKE, ConfigError, LargetrainError

ORDER_BLOCK = 1024
TIMEOUT_S = 600.0
MAX_BAD_IMAGES = 100
_COLLATE = 0xC0117A7E  # sets the random numbers of a micro-batch apart from those of its samples

MicroBatch = dict[str, Any]


class LoaderError(LargetrainError):
    """A loader process died or gave nothing for too long, or too many samples cannot be read."""


class UnreadableSamples(LoaderError):
    """More files cannot be read than the user allows, or all: the data are wrong, not the run."""

    exit_code = EXIT_MISTAKE


class Index(NamedTuple):
    """The samples of one micro-batch: ids and epochs, int64 [micro_batch]."""

    ids: np.ndarray
    epochs: np.ndarray


class _Failed(NamedTuple):
    """In place of a micro-batch: an error, which torch would otherwise turn into text on its way between processes."""

    error: LargetrainError


class _Replaced(NamedTuple):
    """A micro-batch in which other samples stand for those of unreadable files; None: there were not enough."""

    batch: MicroBatch | None
    bad: dict[str, str]
    """Path -> reason."""


class _Fetcher(Dataset):
    """Makes a whole micro-batch in the process that the loader chose."""

    def __init__(self, dataset: Any, seed: int):
        self.dataset, self.seed = dataset, seed
        self.skip = getattr(dataset, "on_bad_image", "error") == "skip"
        self._epoch: int | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, index: Index) -> MicroBatch | _Failed | _Replaced:
        try:
            if callable(getattr(self.dataset, "get_batch", None)):
                return self._finished(self.dataset.get_batch(index.ids), index.ids)
            # a loader process has no streams that anything else draws from
            with _streams_kept() if get_worker_info() is None else nullcontext():
                return self._from_items(index)
        except (BadImage, ConfigError, LoaderError) as error:
            return _Failed(error)

    def _from_items(self, index: Index) -> MicroBatch | _Replaced:
        bad: dict[str, str] = {}
        items, ids = [], index.ids.copy()
        for place, epoch in enumerate(index.epochs.tolist()):
            found = self._item(int(ids[place]), epoch, bad)
            if found is None:
                return _Replaced(None, bad)
            ids[place] = found[0]
            items.append(found[1])
        collate: Callable[[list[Any]], MicroBatch] = default_collate
        if hasattr(self.dataset, "collate_fn"):
            collate = self.dataset.collate_fn
            _seed_streams(self.seed, int(index.epochs[0]), int(index.ids[0]), _COLLATE)
        batch = self._finished(collate(items), ids)
        return _Replaced(batch, bad) if bad else batch

    def _finished(self, batch: Any, ids: np.ndarray) -> MicroBatch:
        if not isinstance(batch, dict):
            raise TypeError(f"{type(self.dataset).__name__} gives {type(batch).__name__} instead of a dict per sample")
        batch["sample_id"] = torch.from_numpy(ids)
        return batch

    def _item(self, sample: int, epoch: int, bad: dict[str, str]) -> tuple[int, Any] | None:
        """The sample, or with `skip` the next one that can be read, with its id; None: none, or too many are bad."""
        if epoch != self._epoch:
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(epoch)
            self._epoch = epoch
        most, count = _max_bad_images(self.dataset), len(self.dataset)
        for candidate in range(sample, sample + count):
            try:
                _seed_streams(self.seed, epoch, candidate % count)
                return candidate % count, self.dataset[candidate % count]
            except BadImage as error:
                if not self.skip:
                    raise
                bad[error.path] = error.reason
                if len(bad) > most:
                    break
        return None


def _seed_streams(*key: int) -> None:
    """Let all random numbers from here on come from streams of this key.

    Augmentation then depends on the sample and the epoch alone: not on the rank, the number of loader processes, or
    whether the run was resumed.
    """
    # for every image: a digest and a one-word seed take a third of the time of SeedSequence and a seed of several words
    digest = hashlib.blake2b(repr(key).encode(), digest_size=20).digest()
    random.seed(digest[:8])
    np.random.seed(int.from_bytes(digest[8:12], "little"))
    torch.default_generator.manual_seed(int.from_bytes(digest[12:], "little") >> 1)


@contextmanager
def _streams_kept() -> Iterator[None]:
    """Leave the process's own streams as they were: dropout must not depend on how data are loaded."""
    kept = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.default_generator.set_state(kept[2])


def _max_bad_images(dataset: Any) -> int:
    return getattr(dataset, "max_bad_images", MAX_BAD_IMAGES)


def _unpacked(fetched: MicroBatch | _Failed | _Replaced, dataset: Any, instead: str) -> MicroBatch:
    """The micro-batch that came from a fetcher; tells each unreadable file once.

    Raises:
        BadImage, ConfigError: what the dataset raised.
        LoaderError: more files than allowed, or all, cannot be read.
    """
    if isinstance(fetched, _Failed):
        raise fetched.error
    if not isinstance(fetched, _Replaced):
        return fetched
    known: dict[str, str] = vars(dataset).setdefault("bad_files", {})  # outlives this stream: evaluations repeat
    most = _max_bad_images(dataset)
    for path, reason in fetched.bad.items():
        if path in known:
            continue
        known[path] = reason
        if len(known) > most:
            raise UnreadableSamples(
                f"data: {path} cannot be read ({reason}), and that is more than data.max_bad_images={most} on this "
                f"rank. Repair or remove the files named, or allow more."
            )
        told = f"data: {path} cannot be read ({reason}); {instead} ({len(known)} of at most {most})"
        print(f"largetrain: {told}", file=sys.stderr, flush=True)
    if fetched.batch is None:
        raise UnreadableSamples(f"data: none of the {len(dataset)} samples can be read. Check the files named above.")
    return fetched.batch


class _TrainSampler:
    """Yields the Index of each micro-batch of one rank; orders are computed for many micro-batches at once."""

    def __init__(self, order: SampleOrder, batch: Batch, rank: int, consumed_samples: int, updates: int | None):
        self.order, self.batch, self.rank = order, batch, rank
        self.consumed_samples, self.updates = consumed_samples, updates

    def __iter__(self) -> Iterator[Index]:
        batch, micro = self.batch, self.batch.micro_batch
        offsets = np.arange(batch.gradient_accumulation_steps)[:, None] * (batch.data_parallel * micro)
        offsets = (offsets + self.rank * micro + np.arange(micro)).ravel()
        block = max(1, ORDER_BLOCK // len(offsets))
        update = 0
        while self.updates is None or update < self.updates:
            count = block if self.updates is None else min(block, self.updates - update)
            starts = self.consumed_samples + np.arange(update, update + count) * batch.global_batch
            ids, epochs = self.order.at((starts[:, None] + offsets).ravel())
            for low in range(0, len(ids), micro):
                yield Index(ids[low : low + micro].copy(), epochs[low : low + micro])
            update += count


class TrainStream:
    """Iterator of micro-batches of one data-parallel rank.

    Args:
        dataset: map-style; either with `get_batch(ids) -> dict of stacked tensors`, or with items that are dicts, which
            are put together by its own `collate_fn(items)` if it has one and by torch's default otherwise. A method
            `set_epoch(epoch)` is called in the process that loads, before the first sample of another epoch.
        order: the order of samples; its global batch must be that of `batch`.
        batch: how an update is divided.
        rank: data-parallel rank.
        consumed_samples: samples that earlier updates took, over all ranks.
        workers: loader processes; 0 loads in this process.
        updates: end after so many updates; None: never.
        pin_memory: copy batches to page-locked memory (CUDA).
        start_method: how loader processes start; None: the system's default.
        timeout_s: longest wait for a loader process.

    Each micro-batch is a dict of CPU tensors stacked along the first dim, with "sample_id" int64 [micro_batch].

    Raises:
        BadImage: from next(): a file cannot be read and the dataset's `on_bad_image` is not "skip". With "skip" the
            next sample that can be read takes its place.
        LoaderError: from next(): a loader process died or gave nothing for timeout_s, or more different files than
            the dataset's `max_bad_images` could not be read on this rank.
    """

    def __init__(
        self,
        dataset: Any,
        order: SampleOrder,
        batch: Batch,
        rank: int,
        consumed_samples: int = 0,
        workers: int = 0,
        *,
        updates: int | None = None,
        pin_memory: bool = False,
        start_method: str | None = None,
        timeout_s: float = TIMEOUT_S,
    ):
        assert order.global_batch == batch.global_batch and 0 <= rank < batch.data_parallel
        self.wait_s = 0.0
        """Seconds spent in next(), cumulative."""
        self._dataset, self._workers = dataset, workers
        sampler = _TrainSampler(order, batch, rank, consumed_samples, updates)
        self._loader = _loader(
            _Fetcher(dataset, order.seed), sampler, workers, (order.seed, rank), pin_memory, start_method, timeout_s
        )
        self._iterator: Iterator[Any] | None = None

    def __iter__(self) -> "TrainStream":
        return self

    def __next__(self) -> MicroBatch:
        started = time.perf_counter()
        try:
            if self._iterator is None:
                self._iterator = _started(self._loader)
            with _explained(self._workers):
                fetched = next(self._iterator)
            return _unpacked(fetched, self._dataset, "another sample takes its place")
        except Exception:
            self.close()
            raise
        finally:
            self.wait_s += time.perf_counter() - started

    def close(self) -> None:
        """End the loader processes; the stream gives nothing afterwards."""
        iterator, self._iterator = self._iterator, iter(())
        _end_processes(iterator)


class NoStream:
    """Stands in for a stream where a rank needs no data: between the first and the last pipeline stage."""

    wait_s = 0.0

    def __iter__(self) -> "NoStream":
        return self

    def __next__(self) -> MicroBatch:
        return {}

    def close(self) -> None:
        """Nothing to end."""


def evaluation_batches(
    dataset: Any,
    micro_batch: int,
    data_parallel: int,
    rank: int,
    max_samples: int | None = None,
    workers: int = 0,
    *,
    pin_memory: bool = False,
    start_method: str | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Iterator[MicroBatch]:
    """Yield this rank's share of an evaluation: over all ranks each sample exactly once, in order.

    Every rank yields the same number of full micro-batches. Places without a sample repeat sample 0 with "valid"
    False, "sample_id" -1 and integer labels all -100, so that loss sums and counts are right without looking at them.
    With the dataset's `on_bad_image` "skip", a file that cannot be read is such a place, filled with the next sample
    that can be read.

    Args:
        dataset: as for `TrainStream`.
        max_samples: only the first so many samples.

    Yields:
        As `TrainStream`, with "valid" bool [micro_batch].

    Raises:
        BadImage, LoaderError: as `TrainStream`.
    """
    samples = len(dataset) if max_samples is None else min(len(dataset), max_samples)
    indices = []
    for start in range(rank * micro_batch, samples + rank * micro_batch, micro_batch * data_parallel):
        ids = np.arange(start, start + micro_batch)
        indices.append(Index(np.where(ids < samples, ids, -1), np.zeros(micro_batch, dtype=np.int64)))
    fetcher = _EvaluationFetcher(dataset, 0)
    loader = _loader(fetcher, indices, workers, (0, rank), pin_memory, start_method, timeout_s)
    iterator = _started(loader)
    try:
        while True:
            with _explained(workers):
                fetched = next(iterator, None)
            if fetched is None:
                return
            yield _unpacked(fetched, dataset, "it is left out of the evaluation")
    finally:
        _end_processes(iterator)


class _EvaluationFetcher(_Fetcher):
    def __getitems__(self, index: Index) -> MicroBatch | _Failed | _Replaced:
        fetched = super().__getitems__(Index(np.maximum(index.ids, 0), index.epochs))
        batch = fetched.batch if isinstance(fetched, _Replaced) else fetched
        if batch is None or isinstance(batch, _Failed):
            return fetched
        # an id other than the one asked for stands in for a file that cannot be read
        valid = batch["sample_id"].eq(torch.from_numpy(index.ids))
        labels = batch.get("labels")
        if isinstance(labels, Tensor) and labels.dtype in (torch.int16, torch.int32, torch.int64):
            batch["labels"] = labels.masked_fill(~valid.reshape(-1, *[1] * (labels.dim() - 1)), IGNORED)
        batch["sample_id"] = batch["sample_id"].masked_fill(~valid, -1)
        batch["valid"] = valid
        return fetched


class _WorkerStart:
    """Sets up a loader process."""

    def __call__(self, worker: int) -> None:
        # the threads of a tokenizer used by the parent do not exist in a forked child, which would wait for them
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        torch.set_num_threads(1)  # torch does so too; several threads in each of several processes only wait
        leave_signals_to_parent()


def _started(loader: DataLoader) -> Iterator[Any]:
    """Its iterator, whose processes let signals wait until they are set up."""
    context = loader.multiprocessing_context or multiprocessing
    # a fork server started inside would hold them back in all that it ever starts
    held = loader.num_workers > 0 and context.get_start_method() != "forkserver"
    with signals_held() if held else nullcontext():
        return iter(loader)


def _end_processes(iterator: Any) -> None:
    """End loader processes now: left to the garbage collector, torch may wait 5 s for each, its queues being gone."""
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()


def _identity(batch: MicroBatch) -> MicroBatch:
    return batch


def _loader(
    fetcher: _Fetcher,
    sampler: Any,
    workers: int,
    seed: tuple[int, int],
    pin_memory: bool,
    start_method: str | None,
    timeout_s: float,
) -> DataLoader:
    # an own generator: the loader's base seed must not be drawn from the stream that dropout uses
    state = np.random.SeedSequence(seed).generate_state(1, dtype=np.uint64)[0]
    processes: dict[str, Any] = {}
    if workers:
        processes = {
            "num_workers": workers,
            "timeout": timeout_s,
            "worker_init_fn": _WorkerStart(),
            "multiprocessing_context": start_method,
        }
    return DataLoader(
        fetcher,
        batch_sampler=sampler,
        collate_fn=_identity,  # type: ignore[arg-type]  # __getitems__ gives the whole micro-batch
        generator=torch.Generator().manual_seed(int(state >> np.uint64(1))),
        pin_memory=pin_memory,
        **processes,
    )


@contextmanager
def _explained(workers: int) -> Iterator[None]:
    """Say what can be done when loader processes fail as such; errors of the dataset pass through."""
    try:
        yield
    except RuntimeError as error:
        if not workers:
            raise
        # torch keeps the signal that ended a process in the cause
        text = str(error) + (f": {error.__cause__}" if error.__cause__ else "")
        if "Bus error" in text or "shared memory" in text or "No space left on device" in text:
            raise LoaderError(
                "a loader process ran out of shared memory: /dev/shm is full or too small for the batches "
                "on their way. Enlarge it (docker: --shm-size), clear it of stale files, or lower data.workers "
                "(0 needs none)."
            ) from error
        if "DataLoader timed out" in text:
            raise LoaderError(
                f"no micro-batch from {workers} loader processes in time ({text}). The dataset hangs or is too slow; "
                f"data.workers=0 shows where."
            ) from error
        if "DataLoader worker" in text:
            raise LoaderError(f"a loader process died ({text}). data.workers=0 loads in the main process.") from error
        raise
