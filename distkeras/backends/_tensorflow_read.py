"""Copies of variables in host memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf


def read_variables(variables: Iterable[Any]) -> list[np.ndarray]:
    """Returns the values of Keras variables: what training does next leaves them.

    By the plain operation, since a checkpoint is taken between two steps: Keras' way
    through `__array__` takes five times as long for each variable, 35 against 6 ms for
    the 160 of a ResNet-20.

    Args:
        variables: of a model, a metric or an optimizer.
    """
    read = tf.raw_ops.ReadVariableOp
    held = [variable.value for variable in variables]
    return [np.asarray(read(resource=v.handle, dtype=v.dtype).numpy()) for v in held]
