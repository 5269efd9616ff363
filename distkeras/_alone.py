"""What Keras' own `fit` runs with while a `Trainer` trains in one process.

Everything here is undone when `fit` returns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras

from distkeras import backends
from distkeras._boards import Boards
from distkeras._boards import boards_among
from distkeras._figures import LoneFigureKeeper
from distkeras._position import Order
from distkeras._resume import Continuation
from distkeras.communicators import SingleCommunicator


@contextlib.contextmanager
def training(
    model: keras.Model,
    data: Any,
    callbacks: Sequence[keras.callbacks.Callback],
    *,
    going_on: Continuation,
) -> Iterator[list[keras.callbacks.Callback]]:
    """While inside, one process trains by Keras' own step, and writes checkpoints.

    Args:
        model: built.
        data: the training data, which the model was built for.
        callbacks: the user's.
        going_on: from a checkpoint, and writing others.

    Yields:
        What `fit` is to be called with as callbacks.
    """
    with going_on.active(), keeping_figures(model, callbacks) as kept:
        model.make_train_function()
        stock = model.train_function
        model.train_function = going_on.train_function(stock)
        try:
            yield [*going_on.early, Order(data), *kept, *going_on.late]
        finally:
            model.train_function = stock


@contextlib.contextmanager
def keeping_figures(
    model: keras.Model, callbacks: Sequence[keras.callbacks.Callback]
) -> Iterator[list[keras.callbacks.Callback]]:
    """While inside, one process trains by Keras' own step and says what it took.

    Where there is a TensorBoard callback the step is traced anew, with the norm of the
    gradients.

    Args:
        model: the user's.
        callbacks: the user's.

    Yields:
        The callbacks, with those that keep figures.
    """
    keeper = LoneFigureKeeper()
    found, norm = boards_among(callbacks), None
    if not found:
        yield [keeper, *callbacks]
        return
    with contextlib.ExitStack() as stack:
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None and backends.is_supported():
            norm = backends.current().gradient_norm()
            stack.enter_context(norm.noted_by(optimizer))
            stack.callback(setattr, model, "train_function", None)
            model.train_function = None
        boards = Boards(SingleCommunicator(), found, keeper, norm)
        yield [keeper, boards, *boards.arranged(callbacks)]
