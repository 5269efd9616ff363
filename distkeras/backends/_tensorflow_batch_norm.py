"""`BatchNormalization(synchronized=True)` over ranks, forward and backward.

Keras synchronises by `tf.distribute` and computes local statistics without. Here the
layers' `_moments`, which is private to Keras and used in this file alone, is replaced
while a training step runs or is traced.

Each rank sums its rows and their squares shifted by its own mean, which keeps them
small, and sends count, sum and sum of squares, shifted back in float64. So one message
does for two: what cancels in `E[x²] - E[x]²` cancels among numbers of 53 bits. In
float32 the variance comes out as exact as that of plain BatchNormalization, which
centres, and far more so than what Keras itself does with `synchronized=True`.

The gradient that ranks exchange is `Σ n·g / Σ n`, with n the examples behind each
rank's mean loss. A cotangent that crosses ranks inside the backward pass therefore
crosses as n·g and is divided by the receiver's n.

All ranks make the same calls in the same order, else they would wait for each other.
A tape is free to visit parallel branches in any order, so every call takes a token
from the call before it, and hands its gradient back: of the backward calls exactly
the reverse order remains. `tf.function` runs stateful operations in the order in which
they were traced, which orders these calls among the gradients' own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from distkeras.backends._batch_norm import synchronized_layers
from distkeras.communicators import Communicator


class SynchronizedBatchNorm:
    """The synchronised layers of a model and the ranks they talk to.

    Collective to make where the model has such layers: they get a message space of
    their own.

    Args:
        model: built or not; its layers stay as they are.
        communicator: the ranks.

    Attributes:
        layers: what is synchronised; with none, everything here does nothing.
    """

    def __init__(self, model: keras.Model, communicator: Communicator) -> None:
        self.layers = synchronized_layers(model) if communicator.size > 1 else []
        self._communicator = communicator.duplicate() if self.layers else None
        self._examples: tf.Tensor | None = None
        self._graph: Any = None
        self._token: tf.Tensor | None = None
        self._total: tf.Tensor | None = None

    def __deepcopy__(self, memo: object) -> SynchronizedBatchNorm:
        return self

    @contextlib.contextmanager
    def over(self, examples: tf.Tensor | None = None) -> Iterator[None]:
        """Lets the layers use the statistics of all ranks' batches, while inside.

        Inside is one training step, its forward and its backward pass; every rank
        runs the same one.

        Args:
            examples: how many examples this rank's loss is the mean of, a scalar; a
                rank with 0 adds nothing to any statistic, whatever its batch holds.
                None where the losses of the ranks are to be added up as they are.
        """
        if not self.layers:
            yield
            return
        before = (self._examples, self._graph, self._token)
        self._examples = None if examples is None else tf.cast(examples, tf.float64)
        self._graph = _current_graph()
        self._token = tf.zeros((), tf.float64)
        self._total = None
        hooked = []
        try:
            for layer in self.layers:
                object.__setattr__(layer, "_moments", self._moments_of(layer))
                hooked.append(layer)
            yield
        finally:
            for layer in hooked:
                object.__delattr__(layer, "_moments")
            self._examples, self._graph, self._token = before

    @property
    def has_examples(self) -> Any:
        """Whether any rank has an example; False where no layer has asked so far."""
        return False if self._total is None else self._total > 0

    def owns(self, variable: Any) -> bool:
        """Returns whether `variable` is a statistic that a layer here keeps."""
        return any(
            variable is own
            for layer in self.layers
            for own in layer.non_trainable_variables
        )

    def close(self) -> None:
        """Frees the message space; collective."""
        if self._communicator is not None:
            self._communicator.close()

    def _moments_of(
        self, layer: keras.layers.BatchNormalization
    ) -> Callable[[Any, Any], tuple[tf.Tensor, tf.Tensor]]:
        def moments(inputs: Any, mask: Any) -> tuple[tf.Tensor, tf.Tensor]:
            if _current_graph() is not self._graph:
                raise NotImplementedError(
                    "Expected BatchNormalization(synchronized=True) to be called in "
                    "the training step itself, where all ranks are sure to call it. "
                    f"Received: layer '{layer.path}' inside a loop, a condition, a "
                    "rematerialised block or a `tf.function` of the model's own. Set "
                    "synchronized=False there."
                )
            return self._moments(layer, inputs, mask)

        return moments

    def _moments(
        self, layer: keras.layers.BatchNormalization, x: tf.Tensor, mask: Any
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns mean and variance (channels,) of all ranks' `x`, in its dtype."""
        examples = tf.ones((), tf.float64) if self._examples is None else self._examples
        count, mean, square = _local_sums(layer, x, mask)
        sums = tf.concat([count, count * mean, count * square], 0)
        # Not by multiplication: what stands for no rows may not be a number.
        sums = tf.where(examples > 0, sums, tf.zeros_like(sums))
        received = self._allreduce(tf.concat([examples[None], sums], 0))
        self._total = received[0]
        count, total, squares = tf.split(received[1:], 3)
        # With a mask Keras divides so, and this gives its numbers.
        divisor = count if mask is None else count + keras.backend.epsilon()
        mean = tf.math.divide_no_nan(total, divisor)
        centred = squares - 2 * mean * total + count * mean**2
        variance = tf.math.divide_no_nan(tf.maximum(centred, 0), divisor)
        return tf.cast(mean, x.dtype), tf.cast(variance, x.dtype)

    def _allreduce(self, values: tf.Tensor) -> tf.Tensor:
        """Returns the sum over ranks of a float64 vector, differentiable once."""
        weight = self._examples

        @tf.custom_gradient
        def backward(cotangent: tf.Tensor, token: tf.Tensor) -> Any:
            def gradient(*_: Any) -> Any:
                raise NotImplementedError(
                    "Expected first derivatives only of a model with "
                    "BatchNormalization(synchronized=True). Received: a derivative "
                    "of a derivative (a gradient penalty?). Set synchronized=False."
                )

            if weight is None:
                return self._host_call(cotangent, token), gradient
            sent = tf.where(weight > 0, cotangent * weight, tf.zeros_like(cotangent))
            received, token = self._host_call(sent, token)
            return (tf.math.divide_no_nan(received, weight), token), gradient

        @tf.custom_gradient
        def forward(values: tf.Tensor, token: tf.Tensor) -> Any:
            return self._host_call(values, token), backward

        total, self._token = forward(values, self._token)
        return total

    def _host_call(
        self, values: tf.Tensor, token: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        communicator = self._communicator

        def exchange(values: Any, token: Any) -> tuple[np.ndarray, np.ndarray]:
            buffer = np.array(values)
            if communicator is not None:
                communicator.allreduce(buffer)
            return buffer, token

        total, after = tf.numpy_function(
            exchange, [values, token], [tf.float64, tf.float64]
        )
        total.set_shape(values.shape)
        after.set_shape(())
        return total, after


def _local_sums(
    layer: keras.layers.BatchNormalization, x: tf.Tensor, mask: Any
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns count, mean and mean square of this rank's rows by channel, float64."""
    axes = layer._reduction_axes
    channels = x.shape[layer.axis]
    if mask is None:
        rows = tf.size(x, out_type=tf.int64) // channels
        count = tf.fill([channels], rows)
        valid: tf.Tensor | bool = True
    else:
        valid = tf.broadcast_to(tf.cast(mask, tf.bool)[..., None], tf.shape(x))
        count = tf.math.count_nonzero(valid, axes, dtype=tf.int64)
    count = tf.cast(count, tf.float64)
    divisor = tf.cast(tf.maximum(count, 1), x.dtype)

    def mean_of(values: tf.Tensor) -> tf.Tensor:
        if mask is not None:
            values = tf.where(valid, values, tf.zeros_like(values))
        return tf.reduce_sum(values, axes) / divisor

    # Any shift would do. From the mean, rounded as it is, what is summed is small.
    shift = tf.stop_gradient(mean_of(x))
    shape = [1] * len(x.shape)
    shape[layer.axis] = channels
    difference = x - tf.reshape(shift, shape)
    shift, first, second = (
        tf.cast(values, tf.float64)
        for values in (shift, mean_of(difference), mean_of(tf.square(difference)))
    )
    return count, shift + first, second + 2 * shift * first + shift**2


def _current_graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
