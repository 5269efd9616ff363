"""What a call of `fit` trains by: all that checkpoints and commits tell of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import keras

from distkeras._position import Position
from distkeras._position import Tracker
from distkeras.communicators import Communicator


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """One call of `fit`, as those see it that keep its state.

    Attributes:
        communicator: the ranks.
        data: the sharded training data.
        users: the user's callbacks.
        tracker: knows the position.
        steps_per_epoch: as given to `fit`.
    """

    communicator: Communicator
    data: Any
    users: Sequence[keras.callbacks.Callback]
    tracker: Tracker
    steps_per_epoch: int | None

    @property
    def position(self) -> Position:
        """Where training stands."""
        return self.tracker.position

    def describe_data(self) -> dict[str, Any]:
        """Returns how data is dealt and how far it has been gone through, as JSON."""
        data, position = self.data, self.position
        each = data.num_examples
        units = data.units_after(position.pass_steps)
        seen = None
        if each is not None and self.steps_per_epoch is None:
            seen = position.epochs * each + min(
                math.ceil(units * each / (data.units or 1)), each
            )
        return {
            "kind": data.kind,
            "seed": data.seed,
            "own": data.part.own,
            "units": data.units,
            "units_a_step": data.units_a_step,
            "units_done": units,
            "pass": data.describe_pass(position.pass_steps),
            "steps": data.num_batches,
            "steps_per_epoch": self.steps_per_epoch,
            "examples": each,
            "examples_seen": seen,
        }
