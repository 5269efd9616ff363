"""Finds the implementation for the Keras backend that is in use."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any
from typing import Protocol

import keras
import numpy as np

from distkeras.gradients import GradientExchange

_IMPLEMENTATIONS = {"tensorflow": "distkeras.backends._tensorflow"}


class Snapshot(Protocol):
    """The values that variables had at one moment."""

    def take(self) -> None:
        """Copies what the variables hold now."""

    def restore(self) -> None:
        """Puts it back."""


class Norm(Protocol):
    """The norm of the gradients of the newest update."""

    @property
    def value(self) -> float:
        """NaN before the first one."""

    def noted_by(
        self, optimizer: keras.optimizers.Optimizer
    ) -> contextlib.AbstractContextManager[None]:
        """While inside, functions that are traced note what `apply` is handed."""


class Backend(Protocol):
    """What a Keras backend must offer; one module implements it."""

    def exchange(self, exchange: GradientExchange) -> Any:
        """Returns this backend's half of `exchange`."""

    def train_function(self, model: keras.Model, exchange: Any, *, uneven: bool) -> Any:
        """Returns what `model.train_function` is set to during `fit`."""

    def test_function(self, model: keras.Model) -> Any:
        """Returns what `model.test_function` is set to."""

    def overrides_train_step(self, model: keras.Model) -> bool:
        """Returns whether the model brings its own `train_step`."""

    def build(self, model: keras.Model, data: Any, *, predicts: bool = False) -> None:
        """Creates all variables of the model, its metrics and its optimizer."""

    def find_optimizers(self, model: keras.Model) -> list[keras.optimizers.Optimizer]:
        """Returns every optimizer the model holds."""

    def first_batches(self, iterator: Any, count: int) -> Any:
        """Returns an iterator over batches taken from what a step is called with."""

    def gradient_norm(self) -> Norm:
        """Returns what an exchange, or an optimizer, notes the norm of gradients in."""

    def snapshot(self, variables: Sequence[Any]) -> Snapshot:
        """Returns room for a copy of variables where they lie."""

    def read_variables(self, variables: Iterable[Any]) -> list[np.ndarray]:
        """Returns copies of variables in host memory."""

    def reader(self) -> Callable[[Iterable[Any]], list[np.ndarray]]:
        """Returns a `read_variables` that is fast with the same variables again."""


def is_supported() -> bool:
    """Returns whether `current` has an implementation."""
    return keras.backend.backend() in _IMPLEMENTATIONS


def current() -> Backend:
    """Returns the implementation for `keras.backend.backend()`.

    Raises:
        NotImplementedError: for a Keras backend without one.
    """
    name = keras.backend.backend()
    if name not in _IMPLEMENTATIONS:
        raise NotImplementedError(
            "distkeras trains models on these Keras backends with more than one "
            f"rank: {sorted(_IMPLEMENTATIONS)}. Received: KERAS_BACKEND={name!r}. Set "
            "KERAS_BACKEND=tensorflow, or run with one rank (without a Checkpoint)."
        )
    return importlib.import_module(_IMPLEMENTATIONS[name])
