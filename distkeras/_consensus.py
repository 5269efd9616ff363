"""Callbacks on many ranks: who runs where, and decisions that all share.

Keras' callbacks act on this process alone. A rank that stops by itself leaves the
others waiting in an exchange that it will never join; so whether to stop, and at which
learning rate to go on, is agreed after all callbacks have run.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import Protocol
from typing import TypeVar

import keras
import numpy as np

from distkeras._accumulated import WholeGradients
from distkeras._accumulated import part
from distkeras._learning_rate import has_settable_rate
from distkeras._learning_rate import set_target_rate
from distkeras._learning_rate import target_rates
from distkeras._logging import LOGGER
from distkeras._statistics import average_moving_statistics
from distkeras.backends._optimizers import inner_optimizers
from distkeras.communicators import Communicator

Target = TypeVar("Target")

# `OrbaxCheckpoint` is not among them: it synchronises its processes itself.
_WRITERS = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)


class ExchangeFlags(Protocol):
    """What the gradient exchange carries along for `Consensus`."""

    @property
    def stop_announced(self) -> bool:
        """Whether an exchange since `clear_stop` carried some rank's stop.

        The same on all ranks after each step. It must not be forgotten at the next
        exchange: several steps may run before a callback can look.
        """

    def announce_stop(self) -> None:
        """Lets the next exchange carry this rank's stop."""

    def clear_stop(self) -> None:
        """Forgets what was announced, here and elsewhere."""


def on_rank_zero(callback: Target) -> Target:
    """Marks a callback (or a class of callbacks) to run on rank 0 alone.

    For what writes or prints. It must steer nothing: what it sets on the model would
    be set on one rank only.

    Args:
        callback: an instance, which is returned, or a class, as a decorator. The
            class attribute `rank_zero_only = True` says the same; False lets a
            subclass of a writing callback of Keras run on all ranks.

    Returns:
        `callback` itself, marked.

    Example:
        >>> tell = keras.callbacks.LambdaCallback(on_train_end=lambda _: print("over"))
        >>> trainer = distkeras.Trainer(model)
        >>> history = trainer.fit(x, y, callbacks=[on_rank_zero(tell)], verbose=0)
        over
    """
    callback.rank_zero_only = True  # type: ignore[attr-defined]
    return callback


def runs_on_rank_zero_only(callback: keras.callbacks.Callback) -> bool:
    """Returns whether a callback is for rank 0 alone.

    Keras' callbacks that write (and their subclasses) are; those that steer training
    and the user's own run everywhere, unless marked: see `on_rank_zero`.
    """
    marked = getattr(callback, "rank_zero_only", None)
    return isinstance(callback, _WRITERS) if marked is None else bool(marked)


def filter_callbacks(
    callbacks: Iterable[Any] | None, rank: int
) -> list[keras.callbacks.Callback]:
    """Returns the callbacks that are to run on `rank`, in their order.

    Those for rank 0 alone are left out elsewhere rather than silenced: TensorBoard
    writes as soon as it is given the model.

    Args:
        callbacks: as `fit` takes them, also nested or a `CallbackList`.
        rank: of this process.
    """
    inner = getattr(callbacks, "callbacks", callbacks)  # of a `CallbackList`
    flat = keras.tree.flatten(inner) if inner else []
    return [c for c in flat if rank == 0 or not runs_on_rank_zero_only(c)]


# Of Keras' own, those that act on all ranks and print what they do.
_TALKING = (
    keras.callbacks.EarlyStopping,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
)


def arrange_callbacks(
    callbacks: Iterable[Any] | None,
    communicator: Communicator,
    exchange_flags: ExchangeFlags | None = None,
) -> list[keras.callbacks.Callback]:
    """Returns this rank's callbacks with those that keep the ranks alike.

    In order: `AverageStatistics`, `WholeGradients`, the user's (`BackupAndRestore`
    followed on all ranks by `RestoreEverywhere`), `Consensus`.

    Args:
        callbacks: as `fit` takes them, the same on every rank.
        communicator: the ranks.
        exchange_flags: the gradient exchange.
    """
    arranged: list[keras.callbacks.Callback] = [
        AverageStatistics(communicator),
        WholeGradients(communicator),
    ]
    for callback in filter_callbacks(callbacks, 0):
        arranged += filter_callbacks([callback], communicator.rank)
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            arranged.append(RestoreEverywhere(communicator))
    return [*arranged, Consensus(communicator, exchange_flags)]


@contextlib.contextmanager
def rank_zero_talks(callbacks: Iterable[Any] | None, rank: int) -> Iterator[None]:
    """While inside, what runs on all ranks and prints what it does does so on rank 0.

    Args:
        callbacks: as `fit` takes them.
        rank: of this process.
    """
    talking = [c for c in filter_callbacks(callbacks, rank) if isinstance(c, _TALKING)]
    before = [(callback, callback.verbose) for callback in talking]
    for callback in talking:
        callback.verbose = callback.verbose if rank == 0 else 0
    try:
        yield
    finally:  # this process may be rank 0 of the next `fit`
        for callback, verbose in before:
            callback.verbose = verbose


class Consensus(keras.callbacks.Callback):
    """Makes all ranks stop at the same step and train at the same rate.

    Must be last in the list on every rank. A stop that a callback asks for after a
    batch is held back, travels with the next gradient exchange and takes effect on
    all ranks after that step, one later than in a single process; after an epoch it
    takes effect at once. Any rank's wish to stop stops all.

    At the end of an epoch the learning rates are compared, and rank 0's is taken if
    they differ; at the end of training, the weights, as a callback may have put back
    those of its best epoch. Rank 0 warns of either.

    Args:
        communicator: the ranks.
        exchange_flags: what carries a stop between epochs' ends; without it, stops
            wait for the end of the epoch.
    """

    def __init__(
        self,
        communicator: Communicator,
        exchange_flags: ExchangeFlags | None = None,
    ) -> None:
        super().__init__()
        self._communicator = communicator
        self._flags = exchange_flags
        self._held_back = False
        self._warned = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Forgets the stop of an earlier `fit`."""
        self._held_back = False
        if self._flags is not None:
            self._flags.clear_stop()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Holds a stop back until every rank has heard of it; no message."""
        model = self.model
        if model.stop_training and not self._held_back:
            self._held_back = True
            if self._flags is not None:
                self._flags.announce_stop()
        model.stop_training = self._flags is not None and self._flags.stop_announced

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Agrees on stopping and on the learning rates: one small message."""
        model = self.model
        rates = [] if model.optimizer is None else target_rates(model.optimizer)
        stop = bool(model.stop_training) or self._held_back
        mine = np.array([stop, *rates], dtype="float64")
        gathered = self._communicator.allgather(mine)
        model.stop_training = any(theirs[0] > 0 for theirs in gathered)
        self._held_back = False
        if self._flags is not None:
            self._flags.clear_stop()
        # As bytes: NaN is to be equal to NaN.
        if len({theirs[1:].tobytes() for theirs in gathered}) > 1:
            self._take_rates([theirs[1:] for theirs in gathered])

    def on_train_end(self, logs: Any = None) -> None:
        """Makes weights equal that a callback changed on some ranks, and states."""
        model = self.model
        trainable = {id(variable) for variable in model.trainable_variables}
        variables = shared_variables(model)
        mine = [hashlib.blake2b(_array(v).tobytes()).digest() for v in variables]
        gathered = self._communicator.allgather_object(mine)
        differ = [
            variable
            for variable, *digests in zip(variables, *gathered, strict=True)
            if len(set(digests)) > 1
        ]
        _broadcast(differ, self._communicator)
        # Not `warnings.warn`, which may be made to raise, on this rank alone.
        if self._communicator.rank != 0:
            return
        weights = [v.path for v in differ if id(v) in trainable]
        states = [v.path for v in differ if id(v) not in trainable]
        if weights:
            LOGGER.warning(
                "Weights differ between ranks when training ends, as if a callback "
                "had changed them (EarlyStopping with a monitor that differs "
                "between ranks?): %s. Rank 0's are taken.",
                weights,
            )
        if states:
            LOGGER.warning(
                "State that is not trained differs between ranks when training ends, "
                "since each rank has seen other examples: %s. Rank 0's is "
                "taken. Variables made with `aggregation='mean'` are averaged.",
                states,
            )

    def _take_rates(self, gathered: Sequence[np.ndarray]) -> None:
        optimizers = inner_optimizers(self.model.optimizer)
        for optimizer, rate in zip(optimizers, gathered[0], strict=True):
            if has_settable_rate(optimizer):
                set_target_rate(optimizer, float(rate))
        if self._communicator.rank == 0 and not self._warned:
            other = next(
                r for r, v in enumerate(gathered) if list(v) != list(gathered[0])
            )
            LOGGER.warning(
                "Learning rates differ between ranks after the callbacks of an epoch: "
                "%s on rank 0, %s on rank %d. Rank 0's are taken. A callback that sets "
                "the rate must do so alike on every rank.",
                gathered[0].tolist(),
                gathered[other].tolist(),
                other,
            )
        self._warned = True


class AverageStatistics(keras.callbacks.Callback):
    """Averages moving statistics before anything looks at them; first in the list.

    Before validation, before what other callbacks do at the end of an epoch
    (checkpoints), and at the end of training. Nothing is sent for models without
    such statistics. See `average_moving_statistics`.

    Args:
        communicator: the ranks.
    """

    def __init__(self, communicator: Communicator) -> None:
        super().__init__()
        self._communicator = communicator
        self._due = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Notes that the epoch will move the statistics."""
        self._due = True

    def on_test_begin(self, logs: Any = None) -> None:
        """Before validation."""
        self._average()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Before checkpoints, where there was no validation."""
        self._average()

    def on_train_end(self, logs: Any = None) -> None:
        """After an epoch that ended early."""
        self._average()

    def _average(self) -> None:
        if self._due:
            average_moving_statistics(self.model, self._communicator)
        self._due = False


class RestoreEverywhere(keras.callbacks.Callback):
    """Gives all ranks what `BackupAndRestore` has read on rank 0; right after it.

    Weights, optimizer variables, and the epoch to go on with, which Keras keeps in
    the private `Model._initial_epoch` and never clears: a later `fit` of the same
    model would begin there. Here it is cleared when training ends.

    Args:
        communicator: the ranks.
    """

    def __init__(self, communicator: Communicator) -> None:
        super().__init__()
        self._communicator = communicator

    def on_train_begin(self, logs: Any = None) -> None:
        """Sends what rank 0 holds."""
        model = self.model
        epoch = self._communicator.broadcast_object(model._initial_epoch)
        model._initial_epoch = epoch
        if epoch is None:  # no backup
            return
        optimizer = model.optimizer
        if optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)
        variables = shared_variables(model)
        variables += [] if optimizer is None else optimizer.variables
        _broadcast(variables, self._communicator)
        if optimizer is not None:  # the file holds them whole
            part([optimizer], self._communicator)

    def on_train_end(self, logs: Any = None) -> None:
        """Clears the epoch that `fit` began with."""
        self.model._initial_epoch = None


def shared_variables(model: keras.Model) -> list[Any]:
    """Returns a model's variables but for the seeds, which differ by rank."""
    return [v for v in model.variables if "seed_generator_state" not in v.path]


def _array(variable: Any) -> np.ndarray:
    value = keras.ops.convert_to_tensor(variable)
    return np.asarray(keras.ops.convert_to_numpy(value))


def _broadcast(variables: Sequence[Any], communicator: Communicator) -> None:
    for variable in variables:
        array = _array(variable)
        # As bytes: not every communicator knows every dtype.
        data = np.frombuffer(array.tobytes(), dtype=np.uint8).copy()
        communicator.broadcast(data)
        variable.assign(np.frombuffer(data.tobytes(), array.dtype).reshape(array.shape))
