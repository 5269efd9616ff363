"""How fast training runs: figures of all ranks, by epoch and at the end of `fit`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import keras

from distkeras._logging import LOGGER
from distkeras.backends._optimizers import updates
from distkeras.communicators import Communicator
from distkeras.communicators import SingleCommunicator
from distkeras.gradients import GradientExchange

# From where on waiting for data is worth a warning: a share of the step, and seconds.
_NOTEWORTHY = 0.2
_LONG_ENOUGH = 5.0


@dataclasses.dataclass(frozen=True)
class Figures:
    """What some steps took.

    Exchange, waiting and data wait are parts of the mean rank's step: together they
    are no more than the step.

    Attributes:
        samples_per_second: of all ranks together.
        step_ms: milliseconds a step, of the slowest rank.
        exchange_ms: milliseconds a step from gradients to reduced ones, on the rank
            that waits least for the others: what it takes every rank.
        waiting_ms: milliseconds a step that a rank waits for slower ones, on average.
        data_wait_ms: milliseconds a step that a rank waits for its data, on average.
        longest_data_wait_ms: the same on the rank where it is most. The others wait
            for that rank meanwhile, or for their own data.
        bytes_sent: by each rank, a step.
        slowest_rank: the one that the others wait for.
    """

    samples_per_second: float
    step_ms: float
    exchange_ms: float
    waiting_ms: float
    data_wait_ms: float
    longest_data_wait_ms: float
    bytes_sent: float
    slowest_rank: int

    def line(self, size: int) -> str:
        """Returns the figures in words.

        What the ranks would do together if none had to exchange or to wait is taken
        for the number of ranks times what one does alone.

        Args:
            size: number of ranks.
        """

        def share(ms: float) -> str:
            return f"{ms:.2f} ms ({ms / self.step_ms:.0%})" if self.step_ms else "0 ms"

        pace = f"{self.step_ms:.2f} ms a step"
        if self.samples_per_second:
            pace = f"{self.samples_per_second:.4g} samples/s, {pace}"
        if size == 1:
            return pace
        lost = self.exchange_ms + self.waiting_ms
        alone = max(self.step_ms - lost, 0.0) / self.step_ms if self.step_ms else 1.0
        return (
            f"{pace}: "
            f"exchange {share(self.exchange_ms)} of {self.bytes_sent / 1e6:.3g} MB, "
            f"waiting for rank {self.slowest_rank} {share(self.waiting_ms)}, "
            f"data wait {share(self.data_wait_ms)}; "
            f"about {size * alone:.2f} x one rank that trains alone"
        )


@dataclasses.dataclass(frozen=True)
class _Sums:
    """What one rank has spent so far; differences of two are what lies between."""

    seconds: float
    exchanging: float
    data: float
    steps: int
    bytes: int
    examples: float

    def __sub__(self, other: _Sums) -> _Sums:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return _Sums(*(a - b for a, b in pairs))


def figures(ranks: Sequence[_Sums]) -> Figures | None:
    """Returns the figures of all ranks' sums, by rank; None where there was no step."""
    steps = ranks[0].steps
    if not steps:
        return None
    exchanging = [rank.exchanging for rank in ranks]
    # Who comes last to the exchange waits for nobody.
    least = min(exchanging)
    slowest = max(rank.seconds for rank in ranks)
    return Figures(
        samples_per_second=ranks[0].examples / slowest if slowest else 0.0,
        step_ms=1e3 * slowest / steps,
        exchange_ms=1e3 * least / steps,
        waiting_ms=1e3 * (sum(exchanging) / len(ranks) - least) / steps,
        data_wait_ms=1e3 * sum(rank.data for rank in ranks) / len(ranks) / steps,
        longest_data_wait_ms=1e3 * max(rank.data for rank in ranks) / steps,
        bytes_sent=ranks[0].bytes / steps,
        slowest_rank=exchanging.index(least),
    )


class FigureKeeper(keras.callbacks.Callback):
    """Logs the figures of epochs and of all of training, and keeps the newest.

    The first step of training is left out, in which TensorFlow traces. It must come
    before callbacks that read what it keeps.

    Args:
        communicator: the ranks.
        exchange: what they exchange gradients by.

    Attributes:
        newest: the figures of the newest epoch, on rank 0.
    """

    def __init__(self, communicator: Communicator, exchange: GradientExchange) -> None:
        super().__init__()
        self._communicator = communicator
        self._exchange = exchange
        self._fit_began = 0.0
        self._seconds = 0.0
        self._began = 0.0
        self._start: _Sums | None = None
        self._epoch_start: _Sums | None = None
        self._interval_start: _Sums | None = None
        self.newest: Figures | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Notes the time."""
        self._fit_began = time.perf_counter()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes where the sums stand."""
        self._began = time.perf_counter()
        self._epoch_start = self._interval_start = self._now()

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Adds up the time between ends of batches, without validation."""
        now = time.perf_counter()
        self._seconds += now - self._began
        self._began = now
        if self._start is None:
            self._start = self._epoch_start = self._interval_start = self._now()

    def interval(self) -> Figures | None:
        """Returns the figures since the last call, or since the epoch began.

        Collective; None on other ranks than 0, and where there was no step.
        """
        found = self._gather(self._interval_start)
        self._interval_start = self._now()
        return found

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Gathers the epoch's sums, and logs the figures; collective."""
        self.newest = self._gather(self._epoch_start)
        size = self._communicator.size
        # Of a single epoch the line at the end says the same.
        if self.newest and size > 1 and (self.params or {}).get("epochs", 1) > 1:
            LOGGER.info(f"epoch {epoch + 1}: {self.newest.line(size)}")

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Says what training took; collective."""
        took = time.perf_counter() - self._fit_began
        found = self._gather(self._start)
        if found is None:
            return
        size = self._communicator.size
        LOGGER.info(f"trained for {took:.1f} s: {found.line(size)}")
        wait = found.longest_data_wait_ms / found.step_ms if found.step_ms else 0.0
        if wait > _NOTEWORTHY and self._seconds > _LONG_ENOUGH:
            LOGGER.warning(
                "The input pipeline is slower than the training step: a rank waits for "
                f"data {wait:.0%} of the time. Prefetch, decode in parallel, or cache."
            )

    def _gather(self, start: _Sums | None) -> Figures | None:
        now = self._now()
        ranks = self._communicator.gather_object(now - (start or now))
        return None if ranks is None else figures(ranks)

    def _now(self) -> _Sums:
        clock, counters = self._exchange.clock, self._exchange.counters
        return _Sums(
            seconds=self._seconds,
            exchanging=clock.exchanging,
            data=clock.seconds.get("data", 0.0),
            steps=clock.steps,
            bytes=counters.bytes,
            examples=counters.examples,
        )


class LoneFigureKeeper(FigureKeeper):
    """The same for one process that trains by Keras' own step, without an exchange.

    It looks at no batches, which Keras may then do ahead: steps are the optimizer's
    updates, and examples those that Keras' loss of the epoch is the mean of. The first
    epoch, in which TensorFlow traces, is left out where others follow.
    """

    def __init__(self) -> None:
        communicator = SingleCommunicator()
        super().__init__(communicator, GradientExchange(communicator))
        self._examples = 0.0
        self._epochs = 0
        self._running = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes where the sums stand; Keras has reset its loss."""
        self._running = True
        super().on_epoch_begin(epoch, logs)
        if self._epochs < 2:
            self._start = self._epoch_start
        self._epochs += 1

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Does nothing."""

    on_train_batch_end._is_default = True  # type: ignore[attr-defined]

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Ends the epoch's sums before validation, which resets the loss."""
        self._settle()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Ends the epoch's sums, if there was no validation."""
        self._settle()
        super().on_epoch_end(epoch, logs)

    def _settle(self) -> None:
        now = self._now()
        self._seconds, self._examples = now.seconds, now.examples
        self._running = False

    def _now(self) -> _Sums:
        seconds, examples = self._seconds, self._examples
        tracker = getattr(self.model, "_loss_tracker", None)
        if self._running:
            seconds += time.perf_counter() - self._began
            examples += 0.0 if tracker is None else float(tracker.count)
        optimizer = self.model.optimizer
        return _Sums(
            seconds=seconds,
            exchanging=0.0,
            data=0.0,
            steps=0 if optimizer is None else updates(optimizer),
            bytes=0,
            examples=examples,
        )
