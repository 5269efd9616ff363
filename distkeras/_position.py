"""Where training stands: epoch, step, and what the data has given so far."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras


@dataclasses.dataclass(frozen=True)
class Position:
    """Where training goes on.

    Attributes:
        epoch: the number of the epoch, from 0.
        step: how many of its steps are done.
        pass_number: the number of the pass over the data, which is that of the epoch
            in which it began: with `steps_per_epoch` a pass may last several.
        pass_steps: how many steps of that pass are done.
        epochs: how many epochs have been completed since training first began.
        steps: as many steps.
    """

    epoch: int = 0
    step: int = 0
    pass_number: int = 0
    pass_steps: int = 0
    epochs: int = 0
    steps: int = 0


class Tracker(keras.callbacks.Callback):
    """Follows Keras' loop over epochs and steps.

    Args:
        start: where training goes on; None where it begins.
        steps_per_epoch: as given to `fit`.
        pass_steps: steps of a pass over the data, where they are known.

    Attributes:
        position: after the newest step, or the newest epoch.
    """

    def __init__(
        self,
        *,
        start: Position | None,
        steps_per_epoch: int | None,
        pass_steps: int | None,
    ) -> None:
        super().__init__()
        self.position = start or Position()
        self._resumed = start is not None
        self._steps_per_epoch = steps_per_epoch
        self._pass_steps = pass_steps

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the number of the epoch, and of the pass if one begins."""
        if self._resumed:
            self._resumed = False
            return
        changes = {"epoch": epoch, "step": 0}
        if self.position.pass_steps == 0:
            changes["pass_number"] = epoch
        self.position = dataclasses.replace(self.position, **changes)

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Counts the steps of an execution."""
        step = batch + 1
        most = self._steps_per_epoch or self._pass_steps
        if most is not None:  # the last execution of an epoch may be a short one
            step = min(step, most)
        position = self.position
        done = step - position.step
        self.position = dataclasses.replace(
            position,
            step=step,
            pass_steps=position.pass_steps + done,
            steps=position.steps + done,
        )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Moves on to the next epoch, and to the next pass where this one is over."""
        position = self.position
        goes_on = (
            self._steps_per_epoch is not None
            and position.step == self._steps_per_epoch
            and (self._pass_steps is None or position.pass_steps < self._pass_steps)
        )
        self.position = dataclasses.replace(
            position,
            epoch=epoch + 1,
            step=0,
            pass_number=position.pass_number if goes_on else epoch + 1,
            pass_steps=position.pass_steps if goes_on else 0,
            epochs=position.epochs + 1,
        )


class Order(keras.callbacks.Callback):
    """Tells the data which epoch begins, so that its order depends on that alone.

    Args:
        data: the sharded training data.
    """

    def __init__(self, data: Any) -> None:
        super().__init__()
        self._data = data

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Passes the number on."""
        self._data.set_epoch(epoch)
