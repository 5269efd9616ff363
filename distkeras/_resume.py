"""Going on from a checkpoint, and writing others: what a `fit` runs with.

Keras begins its loop at an epoch, never within one. So in the epoch that goes on, the
steps that were done are gone through once more by Keras' loop alone: the data begins
after them, the training function returns at once, and callbacks do not hear of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras

from distkeras import backends
from distkeras._commits import Commits
from distkeras._commits import Committing
from distkeras._elastic import Leave
from distkeras._position import Position
from distkeras._position import Tracker
from distkeras._restoring import QuietAtFirst
from distkeras._restoring import Restore
from distkeras._restoring import RestoreWithin
from distkeras._resumption import Resumption
from distkeras._resumption import find_checkpoint
from distkeras._saver import Saver
from distkeras._training_run import TrainingRun
from distkeras.communicators import Communicator
from distkeras.communicators import _elastic
from distkeras.gradients import GradientExchange


class Continuation:
    """What a `fit` runs with that writes checkpoints, or goes on from one.

    Args:
        model: built, its optimizers too.
        data: the sharded training data, looked at already.
        communicator: the ranks.
        callbacks: the user's.
        resumption: the checkpoint to go on from, or None.
        steps_per_epoch: as given to `fit`.
        commits: where steps are committed; None in an ordinary job.

    Raises:
        ValueError: on every rank, if the data is not that of the checkpoint, or cannot
            be gone on with.
    """

    def __init__(
        self,
        model: keras.Model,
        data: Any,
        communicator: Communicator,
        callbacks: Sequence[keras.callbacks.Callback],
        resumption: Resumption | None,
        steps_per_epoch: int | None,
        commits: Commits | None = None,
    ) -> None:
        too_few = commits is not None and communicator.size < _elastic.least()
        self._model = model
        self._commits = commits
        self._checkpoint = find_checkpoint(callbacks)
        if self._checkpoint is not None:
            _check_can_be_gone_on_with(data, steps_per_epoch)
        start = None
        if resumption is not None:
            start = _place(resumption, data, steps_per_epoch)
        step = 0 if start is None else start.step
        self._skipped, self._rest = _executions(
            step, model.steps_per_execution, steps_per_epoch or data.num_batches
        )
        self._tracker = Tracker(
            start=start, steps_per_epoch=steps_per_epoch, pass_steps=data.num_batches
        )
        run = TrainingRun(communicator, data, callbacks, self._tracker, steps_per_epoch)
        self._early: list[keras.callbacks.Callback] = []
        self._late: list[keras.callbacks.Callback] = []
        self._saver: Saver | None = None
        self._restore: Restore | None = None
        if resumption is not None:
            within = step > 0
            restore = Restore(resumption, callbacks, communicator, within=within)
            self._early.append(restore)
            self._late.append(RestoreWithin(restore, within=within))
            self._restore = restore
        if self._checkpoint is not None:
            self._saver = Saver(self._checkpoint, run)
            self._late.append(self._saver)
        if too_few:
            self._late.append(Leave(self._saver, communicator, _elastic.least()))
        if commits is not None:
            self._late.append(Committing(commits, run))

    @property
    def early(self) -> list[keras.callbacks.Callback]:
        """Callbacks that come right after the broadcast of variables."""
        return [*self._early, self._tracker]

    @property
    def late(self) -> list[keras.callbacks.Callback]:
        """Callbacks that come after all that change the state."""
        return self._late

    def exchange_by(self, exchange: GradientExchange) -> None:
        """Takes part of the state from what ranks exchange gradients by.

        Args:
            exchange: of this `fit`.
        """
        for part in (self._saver, self._restore):
            if part is not None:
                part.exchange = exchange

    def train_function(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns what `fit` calls a step: at first it passes over steps done."""
        if not (self._skipped or self._rest):
            return function
        left, rest = self._skipped, self._rest
        logs: dict[str, Any] | None = None

        def train_function(iterator: Any) -> Any:
            nonlocal left, rest, logs
            if left == 0:
                if rest:
                    iterator = backends.current().first_batches(iterator, rest)
                    rest = 0
                return function(iterator)
            left -= 1
            if logs is None:  # of the epoch so far, in case that nothing follows
                logs = self._model.get_metrics_result()
            return logs

        return train_function

    def arranged(self, callbacks: list[Any], **params: Any) -> Any:
        """Returns the callbacks in the form in which `fit` is to be given them.

        Args:
            callbacks: all of them, in order.
            **params: verbose, epochs, steps.
        """
        if not self._skipped:
            return callbacks
        return QuietAtFirst(self._skipped, callbacks, self._model, **params)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """To be entered around `fit`."""
        with contextlib.ExitStack() as stack:
            if self._saver is not None and self._checkpoint is not None:
                stack.callback(self._saver.close)
                if self._commits is None:
                    stack.enter_context(self._checkpoint.attached())
                else:
                    self._commits.attach(self._checkpoint)
            yield


def _place(resumption: Resumption, data: Any, steps_per_epoch: int | None) -> Position:
    """Lets the data begin where the checkpoint was taken; returns where that is."""
    position, saved = resumption.position, resumption.data
    now = {"kind": data.kind, "own": data.part.own, "units": data.units}
    within = position.pass_steps > 0
    names = {
        "kind": "kind of data",
        "own": "`shard=False`",
        "units": "number of samples or batches",
    }
    for key, value in now.items():
        if within and saved[key] != value and not (key == "units" and saved["own"]):
            raise ValueError(
                f"Expected the data of the checkpoint {resumption.path}, which was "
                f"taken within a pass over it: {names[key]} {saved[key]!r}. Received: "
                f"{value!r}"
            )
    if not within:
        data.start_at(position.pass_number, 0, steps=0, epochs=position.epochs)
        return position
    if steps_per_epoch != saved["steps_per_epoch"]:
        raise ValueError(
            f"Expected `steps_per_epoch={saved['steps_per_epoch']}`, as when the "
            f"checkpoint {resumption.path} was taken, within a pass over the data. "
            f"Received: {steps_per_epoch}"
        )
    if data.num_batches is not None and position.pass_steps != position.step:
        raise ValueError(
            "Expected a checkpoint of the beginning of a pass over the data. Received: "
            f"{resumption.path}, taken {position.pass_steps} steps into one of "
            f"{data.num_batches}, of which `steps_per_epoch={steps_per_epoch}` makes "
            "several epochs. Leave `steps_per_epoch` out, and give more epochs."
        )
    same_steps = resumption.resized is None and (
        saved["own"] or saved["units_a_step"] == data.units_a_step
    )
    if data.part.own and not same_steps:
        raise ValueError(
            f"Expected as many ranks as wrote the checkpoint {resumption.path}: it was "
            "taken within an epoch, in which each rank has data of its own "
            "(`shard=False`). Checkpoints of the ends of epochs can be gone on from."
        )
    if saved.get("pass") is not None:
        data.recall_pass(saved["pass"])
    units = data.units_after(position.pass_steps) if same_steps else saved["units_done"]
    pass_steps = data.start_at(
        position.pass_number,
        units,
        steps=position.pass_steps if same_steps else None,
        epochs=position.epochs,
    )
    step = pass_steps if steps_per_epoch is None else position.step
    return dataclasses.replace(position, step=step, pass_steps=pass_steps)


def _executions(step: int, each: int, most: int | None) -> tuple[int, int]:
    """Returns how many executions are passed over, and the steps of a short next one.

    Args:
        step: of the epoch, the first one to be done.
        each: `steps_per_execution`, by which `step` need not have been reached.
        most: steps of the epoch, where they are known.

    Example:
        >>> _executions(6, 2, 8), _executions(7, 4, 20), _executions(7, 4, 7)
        ((3, 0), (1, 1), (2, 0))
    """
    passed, done = divmod(step, each)
    if done and step == most:  # the last execution of an epoch may be a short one
        return passed + 1, 0
    return passed, each - done if done else 0


def _check_can_be_gone_on_with(data: Any, steps_per_epoch: int | None) -> None:
    """Raises before training where no checkpoint of it could be used."""
    steps = data.num_batches
    if steps is not None and steps_per_epoch is not None and steps_per_epoch < steps:
        raise ValueError(
            "Expected epochs of whole passes over the data with a Checkpoint, which "
            "cannot be gone on from within a pass of several epochs. Received: "
            f"steps_per_epoch={steps_per_epoch} of {steps} ({data.description}). Leave "
            "`steps_per_epoch` out, or pass data without an end (`.repeat()`)."
        )
