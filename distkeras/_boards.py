"""TensorBoard: the values of all ranks, by epoch and by step, in rank 0's files.

Keras' callback writes what it is given: after a batch the running values of one rank.
Around it stand callbacks that give it those of all ranks and take them away again, so
that the callbacks after it see what they always do.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import keras

from distkeras._figures import FigureKeeper
from distkeras._figures import Figures
from distkeras._progress import global_results
from distkeras.communicators import Communicator


def boards_among(
    callbacks: Sequence[keras.callbacks.Callback],
) -> list[keras.callbacks.TensorBoard]:
    """Returns the TensorBoard callbacks."""
    return [c for c in callbacks if isinstance(c, keras.callbacks.TensorBoard)]


class Boards(keras.callbacks.Callback):
    """Gathers and writes; before the user's callbacks, after the `FigureKeeper`.

    By epoch: `distkeras/samples_per_second` and the other figures,
    `distkeras/learning_rate` and `distkeras/gradient_norm`. By step, where a board has
    a number as its `update_freq` and whenever it writes: the same, named
    `distkeras/batch_...`; and loss and metrics, which the board writes itself.

    Args:
        communicator: the ranks.
        boards: the TensorBoard callbacks of this rank; only rank 0 has any.
        keeper: of the figures.
        norm: of the gradients, or None.
    """

    def __init__(
        self,
        communicator: Communicator,
        boards: Sequence[keras.callbacks.TensorBoard],
        keeper: FigureKeeper,
        norm: Any,
    ) -> None:
        super().__init__()
        self._communicator = communicator
        self._boards = list(boards)
        self._keeper = keeper
        self._norm = norm
        self._every: list[int] = []
        self._counts: list[int] | None = None
        self.values: dict[str, Any] | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Lets all ranks know which steps are written; collective."""
        mine = [0 if b.update_freq == "epoch" else b.update_freq for b in self._boards]
        self._every = self._communicator.broadcast_object(mine)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Forgets how many batches there were: callbacks may be put back yet."""
        self._counts = None

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Counts as the boards do; collective at the first batch of an epoch."""
        if not any(self._every):
            return
        if self._counts is None:
            mine = [board._global_train_batch for board in self._boards]
            self._counts = self._communicator.broadcast_object(mine)
        self._counts = [count + 1 for count in self._counts]

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Gathers and writes where a board writes; collective then."""
        self.values = None
        due = [
            every > 0 and count % every == 0
            for every, count in zip(self._every, self._counts or [], strict=False)
        ]
        if not any(due):
            return
        self.values = global_results(self.model, self._communicator)
        found = self._keeper.interval()
        for board, is_due in zip(self._boards, due, strict=False):
            if is_due:
                self._write(board, "batch_", found, board._global_train_batch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes the epoch's figures."""
        for board in self._boards:
            self._write(board, "", self._keeper.newest, epoch)

    def arranged(
        self, callbacks: Sequence[keras.callbacks.Callback]
    ) -> list[keras.callbacks.Callback]:
        """Returns callbacks with those that give the boards the values of all ranks."""
        found: list[keras.callbacks.Callback] = []
        for callback in callbacks:
            if callback in self._boards:
                lent = _Lent(self)
                found += [lent, callback, _TakenBack(lent)]
            else:
                found.append(callback)
        return found

    def _write(
        self,
        board: keras.callbacks.TensorBoard,
        prefix: str,
        found: Figures | None,
        step: int,
    ) -> None:
        """Writes beside Keras' scalars; private to Keras, and all here."""
        values = {} if found is None else dataclasses.asdict(found)
        values |= board._collect_learning_rate({})
        if self._norm is not None and not math.isnan(self._norm.value):
            values["gradient_norm"] = self._norm.value
        # Between its batches the board holds a condition over, of the newest one.
        with board._train_writer.as_default(), board.summary.record_if(True):
            for name, value in values.items():
                board.summary.scalar(f"distkeras/{prefix}{name}", value, step=step)


class _Lent(keras.callbacks.Callback):
    """Right before a board: puts the values of all ranks into the logs."""

    def __init__(self, boards: Boards) -> None:
        super().__init__()
        self._source = boards
        self.own: dict[str, Any] = {}

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Lends."""
        values = self._source.values
        if logs is None or values is None:
            return
        self.own = {name: logs[name] for name in values if name in logs}
        logs.update({name: values[name] for name in self.own})


class _TakenBack(keras.callbacks.Callback):
    """Right after it: puts this rank's back."""

    def __init__(self, lent: _Lent) -> None:
        super().__init__()
        self._lent = lent

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Takes back."""
        if logs is not None:
            logs.update(self._lent.own)
        self._lent.own = {}
