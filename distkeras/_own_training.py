"""Notices training by the model itself, past the `Trainer` that it was given to.

A script that was moved halfway makes a `Trainer` and still calls `model.fit`: every
rank then trains a model of its own, and nothing about the job looks wrong.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras

from distkeras import backends
from distkeras._logging import LOGGER
from distkeras._optimizer import is_distributed
from distkeras.communicators import Communicator

_METHODS = ("fit", "train_on_batch")

_by_trainer: weakref.WeakSet[keras.Model] = weakref.WeakSet()


def warn_of_own_training(model: keras.Model, communicator: Communicator) -> None:
    """Lets a model say once, on rank 0, that its ranks train it each by itself.

    A warning and no error: to train on one rank first, or on each, can be meant.

    Args:
        model: whose `fit` and `train_on_batch` are replaced.
        communicator: of the trainer, with several ranks.
    """
    for name in _METHODS:
        if name not in vars(model):
            method = _warning(getattr(model, name), model, communicator)
            object.__setattr__(model, name, method)


@contextlib.contextmanager
def by_trainer(model: keras.Model) -> Iterator[None]:
    """While inside, the model trains for its `Trainer`."""
    _by_trainer.add(model)
    try:
        yield
    finally:
        _by_trainer.discard(model)


def _warning(
    method: Callable[..., Any], model: keras.Model, communicator: Communicator
) -> Callable[..., Any]:
    told = communicator.rank > 0

    @functools.wraps(method)
    def train(*args: Any, **kwargs: Any) -> Any:
        nonlocal told
        if not told and model not in _by_trainer and not _exchanges(model):
            told = True
            # Not `warnings.warn`, which may be made to raise, on this rank alone.
            LOGGER.warning(
                "`model.%s` trains '%s' on each rank by itself: no gradients are "
                "exchanged, and every rank gets another model. Call `trainer.fit` to "
                "train on all ranks together.",
                method.__name__,
                model.name,
            )
        return method(*args, **kwargs)

    return train


def _exchanges(model: keras.Model) -> bool:
    """Whether an optimizer that the model holds exchanges gradients by itself."""
    optimizers = [getattr(model, "optimizer", None)]
    if backends.is_supported():
        optimizers = backends.current().find_optimizers(model)
    parts = [*optimizers, *(getattr(o, "inner_optimizer", None) for o in optimizers)]
    return any(is_distributed(part) for part in parts if part is not None)
