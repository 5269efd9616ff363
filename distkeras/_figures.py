"""How fast training runs: figures of all ranks, by epoch and at the end of `fit`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import keras

from distkeras._logging import LOGGER
from distkeras.communicators import Communicator
from distkeras.gradients import GradientExchange

# From where on waiting for data is worth a warning: a share of the step, and seconds.
_NOTEWORTHY = 0.2
_LONG_ENOUGH = 5.0


@dataclasses.dataclass(frozen=True)
class Figures:
    """What some steps took.

    Attributes:
        samples_per_second: of all ranks together.
        step_ms: milliseconds a step, of the slowest rank.
        exchange_ms: milliseconds a step from gradients to reduced ones, on the rank
            that waits least for the others.
        waiting_ms: milliseconds a step that a rank waits for slower ones, on average.
        data_wait_ms: milliseconds a step that the data is waited for, on the rank
            where it is most.
        bytes_sent: by each rank, a step.
        slowest_rank: the one that the others wait for.
    """

    samples_per_second: float
    step_ms: float
    exchange_ms: float
    waiting_ms: float
    data_wait_ms: float
    bytes_sent: float
    slowest_rank: int

    @property
    def line(self) -> str:
        """The figures in words."""

        def share(ms: float) -> str:
            return f"{ms:.2f} ms ({ms / self.step_ms:.0%})" if self.step_ms else "0 ms"

        return (
            f"{self.samples_per_second:.4g} samples/s, {self.step_ms:.2f} ms a step: "
            f"exchange {share(self.exchange_ms)} of {self.bytes_sent / 1e6:.3g} MB, "
            f"waiting for rank {self.slowest_rank} {share(self.waiting_ms)}, "
            f"data wait {share(self.data_wait_ms)}"
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
        data_wait_ms=1e3 * max(rank.data for rank in ranks) / steps,
        bytes_sent=ranks[0].bytes / steps,
        slowest_rank=exchanging.index(least),
    )


class FigureKeeper(keras.callbacks.Callback):
    """Logs the figures at the end of training, and gives each epoch's to TensorBoard.

    The first step of training is left out, in which TensorFlow traces.

    Args:
        communicator: the ranks.
        exchange: what they exchange gradients by.
        boards: the TensorBoard callbacks of this rank; they must come after this one.

    Attributes:
        epochs: the figures of each epoch, on rank 0.
    """

    def __init__(
        self,
        communicator: Communicator,
        exchange: GradientExchange,
        boards: Sequence[keras.callbacks.TensorBoard] = (),
    ) -> None:
        super().__init__()
        self._communicator = communicator
        self._exchange = exchange
        self._boards = boards
        self._seconds = 0.0
        self._began = 0.0
        self._start: _Sums | None = None
        self._epoch_start: _Sums | None = None
        self.epochs: list[Figures | None] = []

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes where the sums stand."""
        self._began = time.perf_counter()
        self._epoch_start = self._now()

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Adds up the time between ends of batches, without validation."""
        now = time.perf_counter()
        self._seconds += now - self._began
        self._began = now
        if self._start is None:
            self._start = self._epoch_start = self._now()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Gathers the epoch's sums; collective."""
        found = self._gather(self._epoch_start)
        if self._communicator.rank != 0:
            return
        self.epochs.append(found)
        if found is not None:
            for board in self._boards:
                _write(board, found, epoch)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Says what training took; collective."""
        found = self._gather(self._start)
        if self._communicator.rank != 0 or found is None:
            return
        LOGGER.info(f"trained: {found.line}")
        waits = found.data_wait_ms > _NOTEWORTHY * found.step_ms
        if waits and self._seconds > _LONG_ENOUGH:
            LOGGER.warning(
                "The input pipeline is slower than the training step: ranks wait for "
                f"data {found.data_wait_ms / found.step_ms:.0%} of the time. Prefetch, "
                "decode in parallel, or cache."
            )

    def _gather(self, start: _Sums | None) -> Figures | None:
        now = self._now()
        mine = now - (start or now)
        return figures(self._communicator.allgather_object(mine))

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


def _write(board: keras.callbacks.TensorBoard, found: Figures, epoch: int) -> None:
    """Writes figures beside Keras' scalars; private to Keras, and all here."""
    with board._train_writer.as_default():
        for name, value in dataclasses.asdict(found).items():
            board.summary.scalar(f"distkeras/{name}", value, step=epoch)
