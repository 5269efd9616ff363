"""Callbacks by which a checkpoint's state is put back, and steps done passed over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from distkeras import _callback_states
from distkeras import _state
from distkeras._logging import LOGGER
from distkeras._resumption import Resumption
from distkeras._saver import RESIDUALS
from distkeras.communicators import Communicator
from distkeras.communicators import SingleCommunicator
from distkeras.gradients import GradientExchange


class Restore(keras.callbacks.Callback):
    """Puts the state back when training begins; comes first in the list.

    Args:
        resumption: the checkpoint.
        users: the user's callbacks.
        communicator: the ranks.
        within: whether an epoch is gone on with. Then what callbacks do when it begins
            has been done: the state is put back once more after them.

    Attributes:
        exchange: by which ranks exchange gradients; None at one rank.
    """

    def __init__(
        self,
        resumption: Resumption,
        users: Sequence[keras.callbacks.Callback],
        communicator: Communicator,
        *,
        within: bool,
    ) -> None:
        super().__init__()
        self._resumption: Resumption | None = resumption
        self._users = users
        self._communicator = SingleCommunicator() if resumption.own else communicator
        self._within = within
        self.exchange: GradientExchange | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Restores weights and optimizers."""
        resumption = self._resumption
        if resumption is None:
            return
        _state.restore(self.model, resumption.state, self._communicator)
        if self.exchange is not None:
            self.exchange.restore_residuals(
                _state.of_ranks(resumption.state, RESIDUALS)
            )
        if self._communicator.rank == 0:
            position = resumption.position
            LOGGER.info(
                "going on from %s: epoch %d, %d of its steps done",
                resumption.path,
                position.epoch + 1,
                position.step,
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Restores what callbacks have reset when training began."""
        if self._resumption is not None and not self._within:
            self._restore_callbacks(self._resumption)
            self._resumption = None

    def restore_callbacks(self) -> None:
        """Restores callbacks alone, where no epoch follows."""
        if self._resumption is not None:
            self._restore_callbacks(self._resumption)

    def restore_within(self) -> None:
        """Restores all, after what callbacks do when an epoch begins."""
        resumption, self._resumption = self._resumption, None
        if resumption is not None:
            _state.restore(self.model, resumption.state, self._communicator)
            _state.restore_metrics(self.model, resumption.state, self._communicator)
            self._restore_callbacks(resumption)
            if resumption.stop:
                self.model.stop_training = True

    def _restore_callbacks(self, resumption: Resumption) -> None:
        arrays = resumption.state.arrays
        _callback_states.restore(self._users, resumption.callbacks, arrays)


class RestoreWithin(keras.callbacks.Callback):
    """The rest of `Restore`; comes last in the list.

    Args:
        restore: the first half.
        within: as for `Restore`.
    """

    def __init__(self, restore: Restore, *, within: bool) -> None:
        super().__init__()
        self._restore = restore
        self._within = within

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Restores what callbacks have reset; all epochs may be over."""
        self._restore.restore_callbacks()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Restores, where an epoch is gone on with."""
        if self._within:
            self._restore.restore_within()


class QuietAtFirst(keras.callbacks.CallbackList):
    """Keras' list of callbacks, which does not tell them of steps passed over."""

    def __init__(
        self, executions: int, callbacks: list[Any], model: keras.Model, **params: Any
    ) -> None:
        super().__init__(
            callbacks,
            add_history=True,
            add_progbar=params["verbose"] != 0,
            model=model,
            **params,
        )
        self._left = executions

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Passes on, but for the first ones."""
        if not self._left:
            super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Passes on, but for the first ones."""
        if self._left:
            self._left -= 1
        else:
            super().on_train_batch_end(batch, logs)
