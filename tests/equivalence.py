"""What the equivalence tests share: models, data and the single process' result."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import distkeras
from distkeras.communicators import Communicator

FEATURES, CLASSES = 6, 3

DIFFERENCES: dict[str, float] = {}
"""The largest relative difference of weights that each test has met so far."""


def samples(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs (count, 6) float32 and labels (count,) int64."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(count, FEATURES)).astype("float32")
    y = generator.integers(0, CLASSES, size=count)
    return x, y


def build(
    optimizer: Callable[[], Any],
    *,
    own_step: bool = False,
    seed: int = 1,
    dtype: str | None = None,
    **compile_options: Any,
) -> keras.Model:
    """Returns a compiled two-layer classifier, the same at every call."""
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((FEATURES,))
    hidden = keras.layers.Dense(
        8,
        activation="tanh",
        kernel_regularizer=keras.regularizers.L2(1e-2),
        dtype=dtype,
    )(inputs)
    outputs = keras.layers.Dense(CLASSES, dtype=dtype)(hidden)
    kind = OwnStep if own_step else keras.Model
    model = kind(inputs, outputs)
    options: dict[str, Any] = {
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
        **compile_options,
    }
    model.compile(optimizer=optimizer(), **options)
    return model


class OwnStep(keras.Model):
    """A model that brings its own `train_step`."""

    def train_step(self, data: Any) -> Any:
        """Trains as Keras does, but is not Keras' method."""
        return super().train_step(data)


class Adversarial(keras.Model):
    """Two networks, two optimizers, one step: a generative adversarial network."""

    def __init__(self) -> None:
        super().__init__()
        self.first = keras.layers.Dense(2)
        self.second = keras.layers.Dense(2)

    def build(self, input_shape: Any) -> None:
        self.first.build(input_shape)
        self.second.build((None, 2))

    def compile(self, first: Any, second: Any) -> None:
        super().compile()
        self.first_optimizer, self.second_optimizer = first, second

    def call(self, x: Any) -> Any:
        return self.second(self.first(x))

    def train_step(self, data: Any) -> Any:
        import tensorflow as tf

        x = keras.utils.unpack_x_y_sample_weight(data)[0]
        for layer, optimizer in (
            (self.first, self.first_optimizer),
            (self.second, self.second_optimizer),
        ):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self(x) ** 2)
            variables = [v.value for v in layer.trainable_variables]
            optimizer.apply(tape.gradient(loss, variables), layer.trainable_variables)
        self._loss_tracker.update_state(loss)
        return self.get_metrics_result()


def assert_equal_weights(
    left: keras.Model, right: keras.Model, tolerance: float = 1e-5
) -> None:
    """Fails unless the largest relative difference is within `tolerance`."""
    largest = 0.0
    for a, b in zip(left.trainable_variables, right.trainable_variables, strict=True):
        name, a, b = a.path, a.numpy(), b.numpy()
        difference = float(np.abs(a - b).max() / np.abs(b).max())
        assert difference <= tolerance, (name, difference)
        largest = max(largest, difference)
    test = os.environ.get("PYTEST_CURRENT_TEST", "").removesuffix(" (call)")
    DIFFERENCES[test] = max(largest, DIFFERENCES.get(test, 0.0))


def matrix() -> list[str]:
    """Returns a line for each equivalence test: the largest relative difference."""
    return [f"{value:8.1e}  {name}" for name, value in sorted(DIFFERENCES.items())]


def assert_equal_everywhere(world: Communicator, model: keras.Model) -> None:
    """Fails unless all ranks hold the same weights to the last bit."""
    mine = [v.numpy().tobytes() for v in model.trainable_variables]
    for other in world.allgather_object(mine):
        assert other == mine


def assert_equal_history(left: Any, right: Any, tolerance: float = 1e-5) -> None:
    """Fails unless two histories have the same names and close values."""
    assert left.history.keys() == right.history.keys()
    for name, values in left.history.items():
        np.testing.assert_allclose(
            values, right.history[name], rtol=tolerance, atol=tolerance, err_msg=name
        )


def trainer(model: keras.Model, **options: Any) -> distkeras.Trainer:
    """Returns a trainer that leaves the learning rate as it is."""
    return distkeras.Trainer(model, learning_rate_scaling=None, **options)
