"""Buckets travel while the rest of the backward pass still runs."""

from __future__ import annotations

import threading
from typing import Any

import keras
import numpy as np
import pytest

from distkeras import backends
from distkeras.communicators import Communicator
from distkeras.gradients import GradientExchange

pytestmark = pytest.mark.tensorflow

tf = pytest.importorskip("tensorflow")


class Telling(GradientExchange):
    """Says when the first bucket is back."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.first_is_back = threading.Event()

    def reduce(self, plan: Any, number: int, *args: Any, **kwargs: Any) -> Any:
        result = super().reduce(plan, number, *args, **kwargs)
        if number == 0:
            self.first_is_back.set()
        return result


class Waiting(keras.layers.Layer):
    """The identity, whose gradient waits for the exchange of later layers'."""

    def __init__(self, exchange: Telling) -> None:
        super().__init__()
        self.exchange = exchange
        self.found: list[bool] = []

    def call(self, x: Any) -> Any:
        def wait(gradient: np.ndarray) -> np.ndarray:
            self.found.append(self.exchange.first_is_back.wait(5))
            return gradient

        @tf.custom_gradient
        def identity(x: Any) -> Any:
            def backward(gradient: Any) -> Any:
                # Stateful calls run in the order of the program.
                after = tf.numpy_function(wait, [gradient], gradient.dtype, False)
                after.set_shape(gradient.shape)
                return after

            return tf.identity(x), backward

        return identity(x)


@pytest.mark.parametrize("uneven", (False, True))
def test_first_bucket_is_back_before_the_backward_pass_ends(
    world: Communicator, uneven: bool
) -> None:
    exchange = Telling(world, bucket_bytes=64)
    waiting = Waiting(exchange)
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8), waiting, keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    x = np.full((2, 4), world.rank + 1, "float32")
    batches = tf.data.Dataset.from_tensors((x, x[:, :1]))
    backend = backends.current()
    model._symbolic_build(data_batch=next(iter(batches)))
    function = backend.train_function(model, backend.exchange(exchange), uneven=uneven)
    # A step says nothing in which TensorFlow's executor hands both calls to one thread,
    # the waiting one first, or in which garbage is collected for long, with Python's
    # lock held. Where the exchange needed the gradient that waits, every step would be
    # so.
    for _ in range(5):
        exchange.first_is_back.clear()
        function(iter(batches))
        if all(world.allgather_object(waiting.found[-1])):
            break
    exchange.close()
    assert waiting.found[-1]
