"""The state after every step of an elastic job, kept in memory to be gone back to.

A step of all ranks is done once it is committed: all ranks have come to the end of
it, and each has copied what it holds. The last message of a commit comes back only
where every rank has sent it, and so has done the step. So when a rank is lost, those
that are left have the newest commit, or stand right behind it: none needs anything of
another but what the metrics of all ranks add up to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from distkeras import _accumulated
from distkeras import _callback_states
from distkeras import _csv_logs
from distkeras import _state
from distkeras import backends
from distkeras._consensus import runs_on_rank_zero_only
from distkeras._errors import CommunicatorError
from distkeras._logging import LOGGER
from distkeras._metric_states import combined_states
from distkeras._metric_states import put_states_back
from distkeras._position import Position
from distkeras._resumption import Resized
from distkeras._resumption import Resumption
from distkeras._training_run import TrainingRun
from distkeras.callbacks._checkpoint import Checkpoint
from distkeras.communicators import Communicator
from distkeras.communicators import SingleCommunicator


@dataclasses.dataclass(frozen=True)
class Commit:
    """What is the same on all ranks after a step, beside the variables.

    Attributes:
        number: counts them.
        size: of the world that it was made by.
        position: where training goes on.
        data: how the data was dealt.
        metrics: states of all ranks together; None between epochs.
        stop: whether training is to stop here.
        writers: states of callbacks that run on rank 0 alone, by name.
        logs: how long the files of such callbacks are, in bytes.
    """

    number: int
    size: int
    position: Position
    data: dict[str, Any]
    metrics: list[np.ndarray] | None
    stop: bool
    writers: dict[str, Any]
    logs: dict[str, int]


class Commits:
    """The newest commit of one call of `fit`, over all losses of ranks.

    Args:
        size: number of ranks.

    Attributes:
        newest: None before the first one.
        rows: the logs of epochs that are over, with their numbers.
        lost_at: when the newest loss was noticed, of `time.monotonic`.
        first: whether this rank has been the one that writes.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.newest: Commit | None = None
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.lost_at: float | None = None
        self.first = False
        self._snapshot: Any = None
        self._built: list[bool] = []
        self._users: Sequence[keras.callbacks.Callback] = ()
        self._states: dict[str, Any] = {}
        self._went_back_to: int | None = None
        self._attached: list[Checkpoint] = []
        self._until_the_end = contextlib.ExitStack()

    def attach(self, checkpoint: Checkpoint) -> None:
        """Catches a checkpoint's signals until the end, while ranks recover too.

        Args:
            checkpoint: the user's. One that is attached already stays so, and knows
                what it has received.
        """
        if checkpoint not in self._attached:
            self._attached.append(checkpoint)
            self._until_the_end.enter_context(checkpoint.attached())

    def close(self) -> None:
        """Lets go of the signals."""
        self._until_the_end.close()

    def ranks_before(self, size: int) -> int:
        """Returns how many ranks there were at first, 0 if no more than now."""
        return self._size if self._size > size else 0

    def add(
        self,
        commit: Commit,
        model: keras.Model,
        users: Sequence[keras.callbacks.Callback],
    ) -> None:
        """Makes a commit the newest; nothing here waits for another rank."""
        optimizers = backends.current().find_optimizers(model)
        built = [optimizer.built for optimizer in optimizers]
        if self._snapshot is None or self._built != built:
            variables = list(_state.state_variables(model, optimizers).values())
            self._snapshot, self._built = backends.current().snapshot(variables), built
        self._snapshot.take()
        self._users = users
        self._states = _callback_states.glance(users)
        self.newest = commit

    def settle(self, model: keras.Model, communicator: Communicator) -> None:
        """Agrees on the newest commit; collective among the ranks that are left.

        Args:
            model: as the loss has left it.
            communicator: the ranks.

        Raises:
            CommunicatorError: if a rank has missed more than one commit.
        """
        mine = -1 if self.newest is None else self.newest.number
        numbers = communicator.allgather_object(mine)
        highest = max(numbers)
        if highest < 0:
            return
        commit = communicator.broadcast_object(self.newest, numbers.index(highest))
        if min(numbers) < highest - 1:
            raise CommunicatorError(
                f"Expected ranks that are one step apart at most. Received: {numbers}"
            )
        if mine < highest:
            # It was in the very last message of that commit, and has done the step.
            self.add(commit, model, self._users)

    def resumption(
        self, model: keras.Model, communicator: Communicator, *, resized: Resized
    ) -> Resumption | None:
        """Puts the newest commit back, and returns it as a checkpoint to go on from.

        Args:
            model: the user's.
            communicator: the ranks that are left.
            resized: what is done about the smaller number of ranks.

        Returns:
            This rank's own state; None if there is no commit yet.
        """
        commit = self.newest
        if commit is None:
            return None
        self._snapshot.restore()
        if commit.metrics is not None:
            put_states_back(model, commit.metrics, communicator.rank)
        # As fewer ranks have to add up to it.
        optimizers = backends.current().find_optimizers(model)
        _accumulated.scale(optimizers, commit.size / communicator.size)
        self._went_back_to = commit.position.epoch
        if communicator.rank == 0 and not self.first:
            self._states = {**self._states, **commit.writers}
        state = _state.take(
            model, SingleCommunicator(), metrics=commit.metrics is not None
        )
        return Resumption(
            path="the last step",
            state=state,
            position=commit.position,
            data=commit.data,
            callbacks=self._states,
            resized=resized,
            logs=commit.logs,
            own=True,
            stop=commit.stop,
        )

    def whole(self, history: keras.callbacks.History) -> keras.callbacks.History:
        """Adds the epochs before the newest loss to a history, in front."""
        if self._went_back_to is None:
            return history
        past = {e: logs for e, logs in self.rows if e < self._went_back_to}
        later = zip(history.epoch, _rows(history), strict=True)
        history.epoch, history.history = [], {}
        for epoch, logs in [*sorted(past.items()), *later]:
            history.epoch.append(epoch)
            for name, value in logs.items():
                history.history.setdefault(name, []).append(value)
        return history


def _rows(history: keras.callbacks.History) -> list[dict[str, Any]]:
    """Returns the logs by epoch; what was not logged every time ends at the end."""
    rows: list[dict[str, Any]] = [{} for _ in history.epoch]
    for name, values in history.history.items():
        for row, value in zip(rows[len(rows) - len(values) :], values, strict=True):
            row[name] = value
    return rows


class Committing(keras.callbacks.Callback):
    """Commits after every step; the last one that has messages.

    Args:
        commits: where to.
        run: what is to be gone on with.
    """

    def __init__(self, commits: Commits, run: TrainingRun) -> None:
        super().__init__()
        self._commits = commits
        self._run = run
        self._communicator = run.communicator
        self._begun = False
        commits.first = run.communicator.rank == 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Commits what training begins with."""
        if self._begun:
            return
        self._commit(written=True)
        self._begun = True
        since, self._commits.lost_at = self._commits.lost_at, None
        if since is not None and self._communicator.rank == 0:
            LOGGER.info(
                "recovered: %.2f s from the loss to the next step",
                time.monotonic() - since,
            )

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Commits, but between updates that add up gradients of several steps."""
        if not _accumulated.pending(backends.current().find_optimizers(self.model)):
            self._commit(written=False)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Commits the epoch, with what rank 0 has written."""
        self._commits.rows.append((epoch, dict(logs or {})))
        self._commit(written=True)

    def _commit(self, *, written: bool) -> None:
        """Commits; collective. `written`: whether rank 0 may have written since."""
        commits, run, position = self._commits, self._run, self._run.position
        communicator, before = run.communicator, commits.newest
        if communicator.size == 1:  # with none to lose
            return
        writers = {} if before is None else before.writers
        logs = {} if before is None else before.logs
        if written:
            optimizers = backends.current().find_optimizers(self.model)
            if _accumulated.pending(optimizers):  # so that none holds what others miss
                _accumulated.spread(optimizers, communicator)
            mine = None
            if communicator.rank == 0:
                mine = (_writers(run.users), _csv_logs.lengths(run.users))
            writers, logs = communicator.allgather_object(mine)[0]
        metrics = None
        if position.step > 0:
            metrics = combined_states(self.model, communicator)
        commit = Commit(
            number=0 if before is None else before.number + 1,
            size=communicator.size,
            position=position,
            data=run.describe_data(),
            metrics=metrics,
            stop=bool(self.model.stop_training),
            writers=writers,
            logs=logs,
        )
        commits.add(commit, self.model, run.users)


def _writers(users: Sequence[keras.callbacks.Callback]) -> dict[str, Any]:
    """Returns the states of callbacks that run on rank 0 alone."""
    named = _callback_states.named(users)
    alone = [name for name, callback in named if runs_on_rank_zero_only(callback)]
    states = _callback_states.glance(users)
    return {name: states[name] for name in alone if name in states}
