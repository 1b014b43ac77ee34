"""The loop: sequence optimizer updates, tell the callbacks, nothing else."""

import gc
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol

from largetrain.callbacks.base import Callback, Moment
from largetrain.engine.base import Backend, MicroBatch
from largetrain.train.state import TrainState


class Stream(Protocol):
    """Endless micro-batches of one rank."""

    wait_s: float

    def __next__(self) -> MicroBatch: ...

    def __iter__(self) -> "Stream": ...

    def close(self) -> None: ...


class Trainer:
    """Runs updates until `total_steps`.

    Args:
        backend: whose unit of work is one update.
        stream: micro-batches of this rank, standing at `state.consumed_samples`.
        state: counters, advanced in place.
        total_steps: updates of the whole run, done ones included.
        global_batch: samples per update.
        callbacks: called in order on every rank.
    """

    def __init__(
        self,
        backend: Backend,
        stream: Stream,
        state: TrainState,
        total_steps: int,
        global_batch: int,
        callbacks: Sequence[Callback],
    ):
        self.backend, self.stream, self.state = backend, stream, state
        self.total_steps, self.global_batch, self.callbacks = total_steps, global_batch, callbacks

    def fit(self) -> TrainState:
        """Train to the end; a callback that raises stops the run.

        However it ends, the loader's processes are gone and every callback was told.
        """
        gc.collect()
        gc.freeze()  # what was built lasts as long as the run: the collector need not walk it again in every pass
        try:
            for callback in self.callbacks:
                callback.on_start(self.state.step)
            while self.state.step < self.total_steps:
                moment = self._update()
                for callback in self.callbacks:
                    callback.on_step(moment)
            for callback in self.callbacks:
                callback.on_end(self.state.step)
        except BaseException:
            with ExitStack() as told:  # every one, also after one that fails in its turn
                for callback in reversed(self.callbacks):
                    told.callback(callback.on_failure, self.state.step)
            raise
        finally:
            self.stream.close()
        return self.state

    def _update(self) -> Moment:
        started, waited = time.perf_counter(), self.stream.wait_s
        result = self.backend.train_step(self.stream)
        self.state.advance(applied=result.applied, samples=self.global_batch, tokens=result.tokens)
        return Moment(
            step=self.state.step,
            total_steps=self.total_steps,
            consumed_samples=self.state.consumed_samples,
            skipped=self.state.skipped,
            skipped_in_a_row=self.state.skipped_in_a_row,
            step_s=time.perf_counter() - started,
            data_s=self.stream.wait_s - waited,
            result=result,
        )
