"""What Keras' own loops run with while a `Trainer` trains or evaluates on many ranks.

Everything here is undone when `fit` or `evaluate` returns: the model is left as Keras
knows it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras

from distkeras import backends
from distkeras._boards import Boards
from distkeras._boards import boards_among
from distkeras._consensus import arrange_callbacks
from distkeras._consensus import rank_zero_talks
from distkeras._consensus import shared_variables
from distkeras._figures import FigureKeeper
from distkeras._learning_rate import warms_up
from distkeras._logging import LOGGER
from distkeras._metrics import exact_metrics
from distkeras._metrics import plain_metrics
from distkeras._optimizer import undistributed
from distkeras._position import Order
from distkeras._progress import GlobalProgress
from distkeras._replicas import ReplicaCheck
from distkeras._replicas import weight_digests
from distkeras._resume import Continuation
from distkeras._settings import AgreeOnSettings
from distkeras._statistics import averaged_moving_statistics
from distkeras._timeline import Timeline
from distkeras.callbacks._broadcast import BroadcastVariables
from distkeras.callbacks._broadcast import broadcast_variables
from distkeras.communicators import Communicator
from distkeras.gradients import Compression
from distkeras.gradients import GradientExchange
from distkeras.gradients import make_wire


@dataclasses.dataclass
class Functions:
    """The functions of one compiled model, and the state they were made for."""

    exchange: GradientExchange
    train: Any
    test: Any
    state: tuple[Any, ...]
    norm: backends.Norm | None


class Session:
    """Prepares one model for training on all ranks.

    Args:
        model: the user's.
        communicator: the ranks.
        bucket_bytes: size above which a fusion bucket is closed; None measures.
        compression: of gradients on the wire.
        error_feedback: whether rounding errors of compression are kept.
        check_replicas: whether epochs end with the proof of exchange.
        timeline: of the file that a trace of the steps goes to.

    Attributes:
        model: the user's.
        communicator: the ranks.
        timeline: of the file that a trace of the steps goes to, or None.
        functions: of the newest training; None before.
    """

    def __init__(
        self,
        model: keras.Model,
        communicator: Communicator,
        *,
        bucket_bytes: int | None = None,
        compression: Compression | None = None,
        error_feedback: bool = False,
        check_replicas: bool = True,
        timeline: str | os.PathLike[str] | None = None,
    ) -> None:
        self.model = model
        self.communicator = communicator
        self._bucket_bytes = bucket_bytes
        self._compression = compression
        self._error_feedback = error_feedback
        self._check_replicas = check_replicas
        self.timeline = timeline
        self.functions: Functions | None = None
        self._test: tuple[Any, Any] | None = None

    @property
    def options(self) -> list[str]:
        """What ranks must have chosen alike, a line for each setting."""
        return [
            f"check_replicas={self._check_replicas}",
            f"timeline={'none' if self.timeline is None else 'written'}",
        ]

    def move(self, communicator: Communicator) -> None:
        """Goes on with other ranks. What belongs to the earlier ones is left behind."""
        self.communicator = communicator
        if self.functions is not None:
            self.functions.exchange.free()
        self.functions = self._test = None

    @contextlib.contextmanager
    def exchanging_alone(self) -> Iterator[None]:
        """While inside, no `DistributedOptimizer` exchanges what the step does.

        One that the step does not know of, as a callback may have, goes on.
        """
        backend = backends.current()
        optimizers = backend.find_optimizers(self.model)
        if not backend.overrides_train_step(self.model):
            compiled = getattr(self.model, "optimizer", None)
            optimizers = [] if compiled is None else [compiled]
        with undistributed(optimizers):
            yield

    def build(self, data: Any) -> None:
        """Creates all variables of the model, its metrics and its optimizer.

        Args:
            data: the sharded training data.
        """
        if not self.model.compiled:
            raise ValueError(
                "Expected a compiled model. Received: one that is not. Call "
                "`trainer.compile(optimizer=..., loss=...)` before `fit`."
            )
        backends.current().build(self.model, data)

    def prepare(
        self, data: Any, callbacks: Sequence[keras.callbacks.Callback] = ()
    ) -> None:
        """Makes the functions, unless nothing that they depend on has changed.

        Collective.

        Args:
            data: the sharded training data; `build` has seen it.
            callbacks: the user's. TensorBoard is given the norm of the gradients.
        """
        model = self.model
        if not model.trainable_variables:
            raise ValueError(
                "Expected a model with trainable weights. Received: one in which all "
                "are frozen; there is nothing to train."
            )
        backend = backends.current()
        before = self.functions
        normed = bool(boards_among(callbacks)) or (before and before.norm) is not None
        normed = self.communicator.broadcast_object(normed)
        state = _state(model, uneven=data.may_be_empty, normed=normed)
        if self.functions is not None:
            if self.functions.state == state:
                return
            if not backend.overrides_train_step(model):
                self._check_trainable(self.functions.state, state)
        self.close()
        wire = make_wire(self._compression, error_feedback=self._error_feedback)
        exchange = GradientExchange(
            self.communicator, bucket_bytes=self._bucket_bytes, wire=wire
        )
        graph = backend.exchange(exchange)
        graph.norm = backend.gradient_norm() if normed else None
        self.functions = Functions(
            exchange=exchange,
            train=backend.train_function(model, graph, uneven=data.may_be_empty),
            test=self._test_function(),
            state=state,
            norm=graph.norm,
        )

    def _check_trainable(self, before: tuple[Any, ...], now: tuple[Any, ...]) -> None:
        """Says what becomes of weights that `compile` did not see as they are.

        Keras trains those that were trainable when its step was traced.
        """
        if before[:2] != now[:2]:
            return
        more, less = set(now[2]) - set(before[2]), set(before[2]) - set(now[2])
        if more:
            raise ValueError(
                "Expected the weights to be trainable that were so in the last `fit`. "
                f"Received: {len(more)} more. A change of `trainable` takes effect by "
                "`compile`: call it again before `fit`."
            )
        if less and not self.model.run_eagerly and self.communicator.rank == 0:
            LOGGER.warning(
                f"{len(less)} weights are trained no longer, as `trainable` was "
                "changed. One process would train them until `compile` is called "
                "again, which it should be."
            )

    def close(self) -> None:
        """Frees what the functions hold; collective. `prepare` makes them anew."""
        if self.functions is not None:
            self.functions.exchange.close()
            self.functions = None

    @contextlib.contextmanager
    def training(
        self,
        data: Any,
        callbacks: Sequence[keras.callbacks.Callback],
        *,
        bar: bool,
        steps: int | None,
        going_on: Continuation,
    ) -> Iterator[list[keras.callbacks.Callback]]:
        """While inside, `model.fit` trains on all ranks.

        Args:
            data: the sharded training data; `prepare` has seen it.
            callbacks: the user's.
            bar: whether rank 0 shows a progress bar; the same on every rank.
            steps: of an epoch, None where they are not known.
            going_on: from a checkpoint, and writing others.

        Yields:
            What `fit` is to be called with as callbacks.
        """
        functions = self.functions
        if functions is None:
            raise RuntimeError("Expected `prepare` to be called before `training`.")
        check = ReplicaCheck(
            self.communicator,
            functions.exchange.counters,
            backends.current().find_optimizers(self.model),
        )
        users = arrange_callbacks(callbacks, self.communicator, functions.exchange)
        going_on.exchange_by(functions.exchange)
        keeper = FigureKeeper(self.communicator, functions.exchange)
        boards = Boards(self.communicator, boards_among(users), keeper, functions.norm)
        arranged = [
            BroadcastVariables(communicator=self.communicator),
            AgreeOnSettings(self.communicator),
            *going_on.early,
            Order(data),
            keeper,
            boards,
            *([check] if self._check_replicas else []),
            *self._timelines(functions.exchange),
            *boards.arranged(users),
            *going_on.late,
            GlobalProgress(
                self.communicator,
                shown=bar,
                batches=steps and math.ceil(steps / self.model.steps_per_execution),
                counters=functions.exchange.counters,
            ),
        ]
        with (
            self._setting(
                train_function=going_on.train_function(functions.train),
                test_function=functions.test,
            ),
            self._own_evaluations(),
            rank_zero_talks(callbacks, self.communicator.rank),
            going_on.active(),
        ):
            yield arranged

    def _timelines(self, exchange: GradientExchange) -> list[keras.callbacks.Callback]:
        if self.timeline is None:
            return []
        return [Timeline(self.timeline, self.communicator, exchange.clock)]

    @contextlib.contextmanager
    def _own_evaluations(self) -> Iterator[None]:
        """Leaves to Keras what a callback evaluates by the model itself.

        Its data is not sharded, and it may run on one rank alone. `fit` calls the
        same method for its validation, with a private argument that tells.
        """
        model = self.model
        original = model.evaluate
        stock: list[Any] = [None]

        def evaluate(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("_use_cached_eval_dataset"):
                return original(*args, **kwargs)
            ours = model.test_function
            model.test_function = stock[0]
            try:
                with plain_metrics(model):
                    return original(*args, **kwargs)
            finally:
                stock[0] = model.test_function
                model.test_function = ours

        evaluate._of_fit = True  # type: ignore[attr-defined]
        object.__setattr__(model, "evaluate", evaluate)
        try:
            yield
        finally:
            object.__delattr__(model, "evaluate")

    @contextlib.contextmanager
    def equalised(self, data: Any, *, predicts: bool = False) -> Iterator[None]:
        """While inside, all ranks hold the same model.

        They get rank 0's weights, where they do not hold the same, as `fit` does: an
        unseeded script has another model on every rank. In a callback of `fit` they
        hold the same but for moving statistics, which are averaged for the while.

        Args:
            data: the sharded data, from which an unbuilt model is built.
            predicts: whether the data has no targets.
        """
        model, communicator = self.model, self.communicator
        with self.exchanging_alone():
            backends.current().build(model, data, predicts=predicts)
        if _is_trained(model):
            with averaged_moving_statistics(model, communicator):
                yield
            return
        weights = weight_digests(shared_variables(model))
        if len(set(map(tuple, communicator.allgather_object(weights)))) > 1:
            broadcast_variables(model.variables, communicator=communicator)
        yield

    @contextlib.contextmanager
    def evaluating(self, data: Any) -> Iterator[None]:
        """While inside, `model.evaluate` gives the results of all ranks' data."""
        with (
            self.equalised(data),
            self._setting(test_function=self._test_function()),
            _evaluate_of_keras(self.model),
        ):
            yield

    def _test_function(self) -> Any:
        """Returns the test function, which is traced once as long as it is right."""
        state = _compilation(self.model)
        if self._test is None or self._test[0] != state:
            self._test = state, backends.current().test_function(self.model)
        return self._test[1]

    @contextlib.contextmanager
    def _setting(self, **functions: Any) -> Iterator[None]:
        before = {name: getattr(self.model, name) for name in functions}
        for name, function in functions.items():
            setattr(self.model, name, function)
        try:
            with exact_metrics(self.model, self.communicator):
                yield
        finally:
            for name, function in before.items():
                setattr(self.model, name, function)


def _is_trained(model: keras.Model) -> bool:
    """Returns whether a callback of `Session.training` is what asks."""
    return hasattr(vars(model).get("evaluate"), "_of_fit")


@contextlib.contextmanager
def _evaluate_of_keras(model: keras.Model) -> Iterator[None]:
    """Takes back what `Session.training` has put there, in a callback of `fit`."""
    if not _is_trained(model):
        yield
        return
    ours = vars(model)["evaluate"]
    object.__delattr__(model, "evaluate")
    try:
        yield
    finally:
        object.__setattr__(model, "evaluate", ours)


def _state(model: keras.Model, **more: Any) -> tuple[Any, ...]:
    """Returns what the functions of a model depend on, to be compared."""
    optimizers = backends.current().find_optimizers(model)
    return (
        _compilation(model),
        model.optimizer,
        [id(variable) for variable in model.trainable_variables],
        [(id(optimizer), warms_up(optimizer)) for optimizer in optimizers],
        [id(layer) for layer in backends.synchronized_layers(model)],
        more,
    )


def _compilation(model: keras.Model) -> tuple[Any, ...]:
    """Returns what is another after `compile`, or after a setting was changed."""
    return (
        model._loss_tracker,
        model._compile_loss,
        model._compile_metrics,
        model.jit_compile,
        model.run_eagerly,
        model.steps_per_execution,
    )
