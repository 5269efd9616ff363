"""Copies of variables where they lie, taken and put back by one call each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


class Snapshot:
    """The values that variables had at one moment, on their devices.

    Args:
        variables: of a model, its metrics and its optimizers, each once. As much
            memory is taken once more.

    Example:
        >>> snapshot = Snapshot(model.variables)
        >>> snapshot.take()
        >>> model.set_weights(others)
        >>> snapshot.restore()
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        live = [variable.value for variable in variables]
        held = []
        for variable in live:
            with tf.device(variable.device):
                held.append(tf.Variable(variable, trainable=False))
        self._held = held  # alive as long as this is

        @tf.function(autograph=False)
        def take() -> None:
            for copy, variable in zip(held, live, strict=True):
                copy.assign(variable)

        @tf.function(autograph=False)
        def restore() -> None:
            for copy, variable in zip(held, live, strict=True):
                variable.assign(copy)

        self._take, self._restore = take, restore

    def take(self) -> None:
        """Copies what the variables hold now."""
        self._take()

    def restore(self) -> None:
        """Puts it back."""
        self._restore()
