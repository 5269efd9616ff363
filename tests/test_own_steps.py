"""Models that only their own step knows how to call, as generative ones are."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import assert_equal_everywhere
from equivalence import assert_equal_weights
from equivalence import trainer

import distkeras
from distkeras.backends._tensorflow_step import rows
from distkeras.communicators import Communicator

pytestmark = pytest.mark.tensorflow

BATCH = 4


def dense(units: int, seed: int) -> keras.layers.Layer:
    return keras.layers.Dense(
        units, kernel_initializer=keras.initializers.GlorotUniform(seed)
    )


class Parts(keras.Model):
    """No `call`; the parts are built in the step; optimizers where `how` says."""

    def __init__(self, how: str, seed: int) -> None:
        super().__init__()
        self.encoder = keras.Sequential([dense(5, seed), dense(3, seed + 1)])
        self.decoder = keras.Sequential([dense(6, seed + 2)])
        self.error = keras.metrics.Mean("error")
        one, other = keras.optimizers.SGD(0.05), keras.optimizers.SGD(0.1, 0.9)
        self.how = how
        if how == "dictionary":
            self.steppers = {"encoder": one, "decoder": other}
        elif how == "list":
            self.steppers = [one, other]
        elif how == "models":
            self.encoder.compile(one)
            self.decoder.compile(other)

    def optimizers(self) -> list[Any]:
        if self.how == "dictionary":
            return [self.steppers["encoder"], self.steppers["decoder"]]
        if self.how == "list":
            return list(self.steppers)
        if self.how == "models":
            return [self.encoder.optimizer, self.decoder.optimizer]
        return [self.optimizer]

    @property
    def metrics(self) -> list[Any]:
        return [self.error]

    def train_step(self, data: Any) -> dict[str, Any]:
        x, _, weights, _ = data  # more than Keras' own step would take
        with tf.GradientTape() as tape:
            errors = tf.reduce_mean((self.decoder(self.encoder(x)) - x) ** 2, -1)
            loss = tf.reduce_mean(weights * errors)
        parts = self.encoder.trainable_variables, self.decoder.trainable_variables
        gradients = tape.gradient(loss, parts)
        if len(self.optimizers()) == 1:
            parts, gradients = [sum(parts, [])], [sum(gradients, [])]
        for optimizer, mine, to in zip(
            self.optimizers(), gradients, parts, strict=True
        ):
            optimizer.apply_gradients(zip(mine, to, strict=True))
        self.error.update_state(errors)
        return {"error": self.error.result()}


@pytest.mark.parametrize("how", ("compiled", "dictionary", "list", "models"))
def test_known_by_its_step_alone(world: Communicator, how: str) -> None:
    generator = np.random.default_rng(0)
    count = BATCH * world.size * 5 - 3
    x = generator.normal(size=(count, 6)).astype("float32")
    parts = x, x[:, 0], generator.uniform(size=count).astype("float32"), x[:, :2]
    single, model = Parts(how, seed=0), Parts(how, seed=10 * world.rank)
    for one in (single, model):
        one.compile(optimizer=keras.optimizers.SGD(0.1, 0.9), jit_compile=False)

    def batches(size: int) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(parts).batch(size)

    how_often: dict[str, Any] = {"epochs": 2, "shuffle": False, "verbose": 0}
    expected = single.fit(batches(BATCH * world.size), **how_often).history
    history = trainer(model).fit(batches(BATCH), **how_often).history
    assert_equal_everywhere(world, model)
    assert_equal_weights(single, model)
    np.testing.assert_allclose(history["error"], expected["error"], rtol=1e-5)
    assert len(model.trainable_variables) == 6


@pytest.mark.parametrize(("how", "ahead"), [("list", True), ("models", False)])
def test_optimizers_that_are_distributed_already(
    world: Communicator, how: str, ahead: bool
) -> None:
    """They exchanged twice: with accumulation each step was 1/N of itself."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(BATCH * world.size * 4, 6)).astype("float32")
    ones = np.ones(len(x), "float32")
    single, model = Parts(how, seed=0), Parts(how, seed=0)
    for one, distribute in ((single, None), (model, distkeras.DistributedOptimizer)):
        for part in (one.encoder, one.decoder):
            optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
            part.compile(optimizer if distribute is None else distribute(optimizer))
        if how == "list":
            one.steppers = [one.encoder.optimizer, one.decoder.optimizer]
        one.compile(jit_compile=False)
    if ahead and world.rank == 0:  # which has nothing left to trace
        model.decoder(model.encoder(x[:1]))
        for part in (model.encoder, model.decoder):
            part.optimizer.build(part.trainable_variables)

    def batches(size: int) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((x, ones, ones, ones)).batch(size)

    single.fit(batches(BATCH * world.size), shuffle=False, verbose=0)
    trainer(model).fit(batches(BATCH), shuffle=False, verbose=0)
    assert_equal_everywhere(world, model)
    assert_equal_weights(single, model)


def test_what_cannot_be_built_is_told(world: Communicator) -> None:
    """One process has no need to."""

    class Broken(Parts):
        def train_step(self, data: Any) -> dict[str, Any]:
            raise RuntimeError("nothing works")

    model = Broken("compiled", seed=0)
    model.compile(optimizer="sgd")
    x = np.ones((8, 6), "float32")
    kind = RuntimeError if world.size == 1 else ValueError
    with pytest.raises(kind, match="nothing works"):
        trainer(model).fit(x, batch_size=2, verbose=0)


def test_examples_are_counted_by_targets() -> None:
    """Merged graphs have nodes by the dozen, and one target each."""
    nodes, graphs = tf.zeros((12, 3)), tf.zeros((4,))
    for batch, expected in (
        ((nodes, graphs), 4),
        ((nodes, graphs, tf.ones((4,))), 4),
        (({"nodes": nodes}, {"a": None, "b": graphs}), 4),
        ((nodes, None), 12),
        ((nodes, tf.constant(1.0)), 12),
        ((nodes,), 12),
        (nodes, 12),
        ({"a": graphs, "b": nodes}, 4),
        ((nodes, graphs, graphs, graphs), 12),
        ((tf.RaggedTensor.from_row_lengths(nodes, [5, 7]), None), 2),
        ((tf.sparse.from_dense(nodes), None), 12),
    ):
        assert int(rows(batch)) == expected
