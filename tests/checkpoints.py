"""What the checkpoint tests share: training that is interrupted, and its data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from equivalence import CLASSES
from equivalence import FEATURES

import distkeras
from distkeras.communicators import Communicator


class Killed(BaseException):
    """Ends `fit` where a process would have been killed."""


class KillAt(keras.callbacks.Callback):
    """Ends training after a number of steps, in the way a kill would: no goodbye."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.left = steps

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if self.left == 0:
            raise Killed


def build(
    optimizer: Callable[[], Any], *, dropout: bool = True, **options: Any
) -> keras.Model:
    """Returns a compiled classifier with dropout and moving statistics."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((FEATURES,))
    hidden = keras.layers.Dense(8, activation="relu")(inputs)
    hidden = keras.layers.BatchNormalization()(hidden)
    if dropout:
        hidden = keras.layers.Dropout(0.3)(hidden)
    outputs = keras.layers.Dense(CLASSES)(hidden)
    model = keras.Model(inputs, outputs)
    model.compile(
        optimizer(),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        **options,
    )
    return model


def fit(
    model: keras.Model, data: Any, *, seed: int = 5, trainer: Any = None, **options: Any
) -> keras.callbacks.History:
    """Trains with arguments that all tests share."""
    x, y = data if isinstance(data, tuple) else (data, None)
    run = distkeras.Trainer(model, seed=seed, **(trainer or {}))
    return run.fit(x, y, verbose=0, **options)


def state(model: keras.Model) -> list[bytes]:
    """Returns all of this rank's state that training goes on from, as bytes."""
    variables = [*model.variables, *model.optimizer.variables]
    return [np.asarray(v.numpy()).tobytes() for v in variables]


def assert_same_state(
    world: Communicator, model: keras.Model, expected: keras.Model
) -> None:
    """Fails unless two models are equal to the last bit, on every rank."""
    pairs = zip(state(model), state(expected), strict=True)
    differ = [number for number, (a, b) in enumerate(pairs) if a != b]
    variables = [*model.variables, *model.optimizer.variables]
    paths = [variables[number].path for number in differ]
    assert world.allgather_object(paths) == [[]] * world.size
