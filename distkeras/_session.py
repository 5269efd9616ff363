"""What Keras' own loops run with while a `Trainer` trains or evaluates.

Everything here is undone when `fit` or `evaluate` returns: the model is left as Keras
knows it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras

from distkeras import backends
from distkeras._boards import Boards
from distkeras._consensus import arrange_callbacks
from distkeras._consensus import filter_callbacks
from distkeras._figures import FigureKeeper
from distkeras._figures import LoneFigureKeeper
from distkeras._learning_rate import warms_up
from distkeras._metrics import exact_metrics
from distkeras._metrics import plain_metrics
from distkeras._optimizer import undistribute
from distkeras._progress import GlobalProgress
from distkeras._replicas import ReplicaCheck
from distkeras._replicas import weight_digests
from distkeras._resume import Continuation
from distkeras._timeline import Timeline
from distkeras.callbacks._broadcast import BroadcastVariables
from distkeras.callbacks._broadcast import broadcast_variables
from distkeras.communicators import Communicator
from distkeras.communicators import SingleCommunicator
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
        self._model = model
        self._communicator = communicator
        self._bucket_bytes = bucket_bytes
        self._compression = compression
        self._error_feedback = error_feedback
        self._check_replicas = check_replicas
        self._timeline = timeline
        self.functions: Functions | None = None

    @property
    def options(self) -> list[str]:
        """What ranks must have chosen alike, a line for each setting."""
        return [
            f"check_replicas={self._check_replicas}",
            f"timeline={'none' if self._timeline is None else 'written'}",
        ]

    def move(self, communicator: Communicator) -> None:
        """Goes on with other ranks. What belongs to the earlier ones is left behind."""
        self._communicator = communicator
        self.functions = None

    def build(self, data: Any) -> None:
        """Creates all variables of the model, its metrics and its optimizer.

        Args:
            data: the sharded training data.
        """
        if not self._model.compiled:
            raise ValueError(
                "Expected a compiled model. Received: one that is not. Call "
                "`trainer.compile(optimizer=..., loss=...)` before `fit`."
            )
        if self._model.optimizer is not None:
            undistribute(self._model.optimizer)
        backends.current().build(self._model, data)

    def prepare(
        self, data: Any, callbacks: Sequence[keras.callbacks.Callback] = ()
    ) -> None:
        """Makes the functions, unless nothing that they depend on has changed.

        Collective.

        Args:
            data: the sharded training data; `build` has seen it.
            callbacks: the user's. TensorBoard is given the norm of the gradients.
        """
        model = self._model
        if not model.trainable_variables:
            raise ValueError(
                "Expected a model with trainable weights. Received: one in which all "
                "are frozen; there is nothing to train."
            )
        backend = backends.current()
        before = self.functions
        normed = bool(_boards(callbacks)) or (before and before.norm) is not None
        normed = self._communicator.broadcast_object(normed)
        state = _state(model, uneven=data.may_be_empty, normed=normed)
        if self.functions is not None:
            if self.functions.state == state:
                return
            self.functions.exchange.close()
        wire = make_wire(self._compression, error_feedback=self._error_feedback)
        exchange = GradientExchange(
            self._communicator, bucket_bytes=self._bucket_bytes, wire=wire
        )
        graph = backend.exchange(exchange)
        graph.norm = backend.gradient_norm() if normed else None
        self.functions = Functions(
            exchange=exchange,
            train=backend.train_function(model, graph, uneven=data.may_be_empty),
            test=backend.test_function(model),
            state=state,
            norm=graph.norm,
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
        going_on: Continuation,
    ) -> Iterator[list[keras.callbacks.Callback]]:
        """While inside, `model.fit` trains on all ranks.

        Args:
            data: the sharded training data; `prepare` has seen it.
            callbacks: the user's.
            bar: whether rank 0 shows a progress bar; the same on every rank.
            going_on: from a checkpoint, and writing others.

        Yields:
            What `fit` is to be called with as callbacks.
        """
        functions = self.functions
        if functions is None:
            raise RuntimeError("Expected `prepare` to be called before `training`.")
        check = ReplicaCheck(
            self._communicator,
            functions.exchange.counters,
            backends.current().find_optimizers(self._model),
        )
        users = arrange_callbacks(callbacks, self._communicator, functions.exchange)
        going_on.exchange_by(functions.exchange)
        keeper = FigureKeeper(self._communicator, functions.exchange)
        boards = Boards(self._communicator, _boards(users), keeper, functions.norm)
        arranged = [
            BroadcastVariables(communicator=self._communicator),
            *going_on.early,
            Order(data),
            keeper,
            boards,
            *([check] if self._check_replicas else []),
            *self._timelines(functions.exchange),
            *boards.arranged(users),
            *going_on.late,
            GlobalProgress(
                self._communicator,
                shown=bar,
                steps=data.num_batches,
                counters=functions.exchange.counters,
            ),
        ]
        with (
            self._setting(
                train_function=going_on.train_function(functions.train),
                test_function=functions.test,
            ),
            self._own_evaluations(),
            going_on.active(),
        ):
            yield arranged

    @contextlib.contextmanager
    def training_alone(
        self,
        data: Any,
        callbacks: Sequence[keras.callbacks.Callback],
        *,
        going_on: Continuation,
    ) -> Iterator[list[keras.callbacks.Callback]]:
        """While inside, `model.fit` trains in one process, by Keras' own step.

        Args:
            data: the training data; `build` has seen it.
            callbacks: the user's.
            going_on: from a checkpoint, and writing others.

        Yields:
            What `fit` is to be called with as callbacks.
        """
        model = self._model
        users = filter_callbacks(callbacks, 0)
        with going_on.active(), self.figuring_alone(users) as figuring:
            model.make_train_function()
            stock = model.train_function
            model.train_function = going_on.train_function(stock)
            try:
                yield [*going_on.early, Order(data), *figuring, *going_on.late]
            finally:
                model.train_function = stock

    @contextlib.contextmanager
    def figuring_alone(
        self, callbacks: Sequence[keras.callbacks.Callback]
    ) -> Iterator[list[keras.callbacks.Callback]]:
        """While inside, one process trains by Keras' own step and says what it took.

        Where there is a TensorBoard callback the step is traced anew, with the norm of
        the gradients.

        Args:
            callbacks: the user's.

        Yields:
            The callbacks, with those that keep figures.
        """
        model = self._model
        keeper = LoneFigureKeeper()
        found, norm = _boards(callbacks), None
        with contextlib.ExitStack() as stack:
            optimizer = getattr(model, "optimizer", None)
            if found and optimizer is not None and backends.is_supported():
                norm = backends.current().gradient_norm()
                stack.enter_context(norm.noted_by(optimizer))
                stack.callback(setattr, model, "train_function", None)
                model.train_function = None
            if not found:
                yield [keeper, *callbacks]
                return
            boards = Boards(SingleCommunicator(), found, keeper, norm)
            yield [keeper, boards, *boards.arranged(callbacks)]

    def _timelines(self, exchange: GradientExchange) -> list[keras.callbacks.Callback]:
        if self._timeline is None:
            return []
        return [Timeline(self._timeline, self._communicator, exchange.clock)]

    @contextlib.contextmanager
    def _own_evaluations(self) -> Iterator[None]:
        """Leaves to Keras what a callback evaluates by the model itself.

        Its data is not sharded, and it may run on one rank alone. `fit` calls the
        same method for its validation, with a private argument that tells.
        """
        model = self._model
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

        object.__setattr__(model, "evaluate", evaluate)
        try:
            yield
        finally:
            object.__delattr__(model, "evaluate")

    def equalise(self, data: Any) -> None:
        """Gives all ranks rank 0's weights, where they do not hold the same.

        As `fit` does: an unseeded script has another model on every rank.

        Args:
            data: the sharded data, from which an unbuilt model is built.
        """
        backends.current().build(self._model, data)
        weights = weight_digests(self._model.variables)
        if len(set(map(tuple, self._communicator.allgather_object(weights)))) > 1:
            broadcast_variables(self._model.variables, communicator=self._communicator)

    @contextlib.contextmanager
    def evaluating(self, data: Any) -> Iterator[None]:
        """While inside, `model.evaluate` gives the results of all ranks' data."""
        backend = backends.current()
        self.equalise(data)
        with self._setting(test_function=backend.test_function(self._model)):
            yield

    @contextlib.contextmanager
    def _setting(self, **functions: Any) -> Iterator[None]:
        before = {name: getattr(self._model, name) for name in functions}
        for name, function in functions.items():
            setattr(self._model, name, function)
        try:
            with exact_metrics(self._model, self._communicator):
                yield
        finally:
            for name, function in before.items():
                setattr(self._model, name, function)


class Order(keras.callbacks.Callback):
    """Tells the data which epoch begins, so that its order depends on that alone."""

    def __init__(self, data: Any) -> None:
        super().__init__()
        self._data = data

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Passes the number on."""
        self._data.set_epoch(epoch)


def _boards(
    callbacks: Sequence[keras.callbacks.Callback],
) -> list[keras.callbacks.TensorBoard]:
    return [c for c in callbacks if isinstance(c, keras.callbacks.TensorBoard)]


def _state(model: keras.Model, **more: Any) -> tuple[Any, ...]:
    """Returns what the functions of a model depend on, to be compared."""
    optimizers = backends.current().find_optimizers(model)
    return (
        [(id(optimizer), warms_up(optimizer)) for optimizer in optimizers],
        model.optimizer,
        model._compile_loss,
        model._compile_metrics,
        model.jit_compile,
        model.run_eagerly,
        model.steps_per_execution,
        [id(variable) for variable in model.trainable_variables],
        [id(layer) for layer in backends.synchronized_layers(model)],
        more,
    )


def described_compilation(model: keras.Model) -> list[str]:
    """Returns what ranks must have compiled alike, a line for each setting."""
    if not model.compiled:
        return ["not compiled"]
    losses = keras.tree.flatten(getattr(model._compile_loss, "_user_loss", None))
    optimizers = backends.current().find_optimizers(model)
    return [
        f"jit_compile={model.jit_compile}",
        f"run_eagerly={model.run_eagerly}",
        f"steps_per_execution={model.steps_per_execution}",
        f"loss={[_name(loss) for loss in losses]}",
        f"optimizers={[_name(optimizer) for optimizer in optimizers]}",
    ]


def _name(thing: Any) -> str:
    """Returns a name that is the same in every process, without addresses."""
    if isinstance(thing, str):
        return thing
    return getattr(thing, "__name__", type(thing).__name__)
