"""`Trainer`'s methods go on when a rank is lost: back to the last step, and again.

The ranks that are left make a world of their own and call the method once more. `fit`
then goes on from its newest commit (`_commits.py`), as from a checkpoint of another
number of ranks; the other methods begin again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import Concatenate
from typing import ParamSpec
from typing import Protocol
from typing import TypeVar

import keras

from distkeras._commits import Commits
from distkeras._exit import LEFT
from distkeras._logging import LOGGER
from distkeras._saver import Saver
from distkeras.communicators import Communicator
from distkeras.communicators import _elastic
from distkeras.communicators import recover


class Survivor(Protocol):
    """What has methods that outlive a lost rank."""

    model: keras.Model
    communicator: Communicator
    _commits: Commits | None

    def _follow_world(self) -> bool:
        """Takes the world's ranks, if they are others now; whether it uses them."""


Self = TypeVar("Self", bound=Survivor)
Params = ParamSpec("Params")
Result = TypeVar("Result")


def survives(
    method: Callable[Concatenate[Self, Params], Result],
) -> Callable[Concatenate[Self, Params], Result]:
    """Lets a method begin again with the ranks that are left, when one is lost.

    All ranks leave it together, or none does. In an ordinary job, and where one such
    method calls another, the method is called and nothing else.

    Args:
        method: collective, and such that it may be called again.
    """

    @functools.wraps(method)
    def call(self: Self, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        if self._commits is not None:
            return method(self, *args, **kwargs)
        if not self._follow_world() or not _elastic.active():
            return method(self, *args, **kwargs)
        self._commits = commits = Commits(self.communicator.size)
        try:
            while True:
                done = False
                try:
                    if commits.lost_at is not None:
                        commits.settle(self.model, self.communicator)
                    result = method(self, *args, **kwargs)
                    done = True
                except Exception as error:
                    if not _elastic.is_loss(error):
                        raise
                if _elastic.agreed(done):
                    return result
                commits.lost_at = _elastic.lost_since()
                recover()
                self._follow_world()
        finally:
            self._commits = None
            commits.close()

    return call


def check_can_be_shared_out_anew(
    data: Any,
    validation: Any,
    callbacks: Sequence[keras.callbacks.Callback],
    steps_per_epoch: int | None,
) -> None:
    """Raises before training where the loss of a rank could not be outlived.

    Args:
        data: the sharded training data.
        validation: the sharded validation data, or None.
        callbacks: the user's.
        steps_per_epoch: as given to `fit`.

    Raises:
        ValueError: on every rank, which says what stands against it.
    """
    steps = data.num_batches
    reason = None
    if data.part.own:
        reason = (
            "data that is dealt to the ranks; that of a lost rank would be missing "
            "(`shard=False`)"
        )
    elif data.single_pass or getattr(validation, "single_pass", False):
        reason = (
            "data that can be gone through again, so that it can be dealt anew: pass "
            "a keras.utils.PyDataset or a tf.data.Dataset instead of a generator"
        )
    elif not data.can_begin_again:
        reason = (
            "data whose order can be had again, so that a pass can be dealt anew: a "
            "pipeline with `shuffle(..., reshuffle_each_iteration=False)`, or a "
            "keras.utils.PyDataset without `on_epoch_begin` and `on_epoch_end` (it is "
            "shuffled every epoch anyway)"
        )
    elif steps is not None and steps_per_epoch is not None and steps_per_epoch < steps:
        reason = (
            "epochs of whole passes over the data: leave `steps_per_epoch` out "
            f"({steps_per_epoch} of {steps} steps), or pass data without an end "
            "(`.repeat()`)"
        )
    elif any(isinstance(c, keras.callbacks.BackupAndRestore) for c in callbacks):
        reason = (
            "no `BackupAndRestore`, which would put an earlier epoch back: use "
            "distkeras.callbacks.Checkpoint"
        )
    if reason is not None:
        raise ValueError(
            f"Expected, in an elastic job, {reason}. Received: {data.description}. "
            "Without `--elastic` (DISTKERAS_ELASTIC) a lost rank ends the job."
        )


class Leave(keras.callbacks.Callback):
    """Ends a job that has too few ranks left, with a checkpoint if there are any.

    Args:
        saver: writes it; None without a `Checkpoint` among the callbacks.
        communicator: the ranks that are left.
        least: the number of ranks to go on with.
    """

    def __init__(
        self, saver: Saver | None, communicator: Communicator, least: int
    ) -> None:
        super().__init__()
        self._saver = saver
        self._communicator = communicator
        self._least = least

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes, and exits on all ranks; collective."""
        text = f"{self._communicator.size} ranks are left, {self._least} are needed"
        if self._saver is not None:
            self._saver.leave(text)
        if self._communicator.rank == 0:
            LOGGER.error("%s: exiting with code %d, without a checkpoint", text, LEFT)
        raise SystemExit(LEFT)
