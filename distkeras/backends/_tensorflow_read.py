"""Copies of variables in host memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

# Larger ones are read one by one: together they would be held twice on their device.
_SMALL_BYTES = 2**18
# Types that TensorFlow joins on every device.
_JOINED = ("float64", "float32", "float16", "int64", "int32")


def read_variables(variables: Iterable[Any]) -> list[np.ndarray]:
    """Returns the values of Keras variables: what training does next leaves them.

    By the plain operation, since a checkpoint is taken between two steps: Keras' way
    through `__array__` takes five times as long for each variable, 35 against 6 ms for
    the 160 of a ResNet-20.

    Args:
        variables: of a model, a metric or an optimizer.
    """
    return [_read(variable.value) for variable in variables]


def _read(held: Any) -> np.ndarray:
    tensor = tf.raw_ops.ReadVariableOp(resource=held.handle, dtype=held.dtype)
    return np.asarray(tensor.numpy())


class Reader:
    """Reads the same variables again and again: small ones together, in one call.

    Each list of variables is traced once; 1 against 5 ms for those of a ResNet-20.

    Example:
        >>> read = Reader()
        >>> arrays = read(model.variables)
    """

    def __init__(self) -> None:
        self._readers: dict[tuple[int, ...], Callable[[], list[np.ndarray]]] = {}

    def __call__(self, variables: Iterable[Any]) -> list[np.ndarray]:
        """Returns what `read_variables` does."""
        held = [variable.value for variable in variables]
        key = tuple(map(id, held))
        if key not in self._readers:
            self._readers[key] = _reader(held)
        return self._readers[key]()


def _reader(held: Sequence[Any]) -> Callable[[], list[np.ndarray]]:
    groups: dict[tuple[str, str], list[int]] = {}
    for number, variable in enumerate(held):
        name = variable.dtype.name
        nbytes = math.prod(variable.shape) * variable.dtype.size
        if nbytes <= _SMALL_BYTES and name in _JOINED:
            groups.setdefault((name, variable.device), []).append(number)
    joined = [numbers for numbers in groups.values() if len(numbers) > 1]
    sizes = [math.prod(variable.shape) for variable in held]

    @tf.function(autograph=False)
    def join() -> list[tf.Tensor]:
        flat = []
        for numbers in joined:
            with tf.device(held[numbers[0]].device):
                flat.append(tf.concat([tf.reshape(held[n], [-1]) for n in numbers], 0))
        return flat

    def read() -> list[np.ndarray]:
        found: dict[int, np.ndarray] = {}
        for numbers, tensor in zip(joined, join() if joined else [], strict=True):
            ends = np.cumsum([sizes[n] for n in numbers])[:-1]
            parts = np.split(tensor.numpy(), ends)
            for n, part in zip(numbers, parts, strict=True):
                found[n] = part.reshape(held[n].shape)
        return [found[n] if n in found else _read(v) for n, v in enumerate(held)]

    return read
