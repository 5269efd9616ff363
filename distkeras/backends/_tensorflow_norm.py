"""The norm of the gradients that an optimizer is handed, noted for logs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from distkeras.backends._optimizers import accumulating_optimizers
from distkeras.backends._optimizers import accumulation_steps
from distkeras.backends._optimizers import gradient_scale


class GradientNorm:
    """The global norm of the averaged gradients, before clipping, of the newest update.

    Of all gradients together, in float32, without the loss scale. With accumulation of
    the mean over its steps. It costs a pass over the gradients a step, so a step is
    traced with it only where somebody reads it.
    """

    def __init__(self) -> None:
        self._value = tf.Variable(float("nan"), dtype=tf.float32, trainable=False)

    @property
    def value(self) -> float:
        """NaN before the first update."""
        return float(self._value.numpy())

    def note(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        examples: tf.Tensor | None = None,
    ) -> None:
        """Notes the norm while the step runs.

        Args:
            optimizer: the outermost one.
            gradients: what it is handed, None where there is none.
            variables: what they belong to.
            examples: of all ranks; where they are none there is no update.
        """
        steps = accumulation_steps(optimizer)
        scale = gradient_scale(optimizer)
        updates = tf.constant(True) if examples is None else examples > 0
        accumulated: list[Any] = [0.0] * len(variables)
        if steps:
            owners = accumulating_optimizers(optimizer, variables)
            accumulated = [owner.accumulator(v).value * scale for owner, v in owners]
            done = owners[0][0].optimizer._iterations.value
            updates &= (done + 1) % steps == 0
        squares = []
        triples = zip(gradients, accumulated, variables, strict=True)
        for gradient, held, variable in triples:
            if gradient is None or getattr(variable, "overwrite_with_gradient", False):
                continue
            if isinstance(gradient, tf.IndexedSlices) and steps:
                gradient = tf.convert_to_tensor(gradient)
            if isinstance(gradient, tf.IndexedSlices):
                gradient = gradient.values
            whole = tf.cast(gradient, tf.float32) + tf.cast(held, tf.float32)
            squares.append(tf.reduce_sum(tf.square(whole)))
        norm = tf.sqrt(tf.add_n(squares)) / tf.cast(scale, tf.float32) / (steps or 1)
        self._value.assign(tf.where(updates, norm, self._value))

    @contextlib.contextmanager
    def noted_by(self, optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
        """Notes what `apply` is handed, in functions that are traced while inside.

        Args:
            optimizer: the outermost one.
        """
        original = optimizer.apply

        def apply(grads: Any, trainable_variables: Any = None) -> None:
            grads = list(grads)
            variables = trainable_variables
            if variables is None:
                variables = optimizer._trainable_variables
            elif not optimizer.built:
                optimizer.build(variables)
            self.note(optimizer, grads, list(variables))
            original(grads, trainable_variables)

        object.__setattr__(optimizer, "apply", apply)
        try:
            yield
        finally:
            object.__delattr__(optimizer, "apply")
