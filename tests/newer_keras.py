"""Optimizers that not every supported version of Keras has: tests skip without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest


def optimizer_class(name: str) -> Callable[..., Any]:
    """Returns what makes Keras' optimizer of that name, or skips the test."""

    def make(*args: Any, **kwargs: Any) -> Any:
        kind = getattr(keras.optimizers, name, None)
        if kind is None:
            pytest.skip(f"Keras {keras.__version__} has no {name}")
        return kind(*args, **kwargs)

    return make


def multi_optimizer(default: Any, others: dict[str, Any] | None = None) -> Any:
    """Returns a `MultiOptimizer`, or skips the test.

    Args:
        default: the optimizer of all other variables; or a function of a variable.
        others: optimizers by patterns of variables' paths.
    """
    if others is not None:
        default = optimizer_class("OptimizerMap")(default, others)
    return optimizer_class("MultiOptimizer")(default)


def muon(*args: Any, **kwargs: Any) -> Any:
    """Returns `Muon`, or skips the test where Keras' own cannot be trained."""
    version = tuple(int(number) for number in keras.__version__.split(".")[:2])
    if version < (3, 13):
        pytest.skip("Muon of Keras before 3.13 fails on TensorFlow's variables")
    return keras.optimizers.Muon(*args, **kwargs)
