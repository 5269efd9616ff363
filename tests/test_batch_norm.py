"""`BatchNormalization(synchronized=True)` against plain BN on the joined batch."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import OwnStep
from equivalence import assert_equal_everywhere
from equivalence import assert_equal_history
from equivalence import trainer

from distkeras.backends._tensorflow_batch_norm import SynchronizedBatchNorm
from distkeras.communicators import Communicator

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.dealt,
]

CHANNELS = 3


def shards(size: int, empty: int | None = None) -> list[slice]:
    """Returns each rank's rows: 3·rank + 1 of them, none for rank `empty`."""
    rows = [0 if rank == empty else 3 * rank + 1 for rank in range(size)]
    ends = np.cumsum(rows)
    return [slice(end - n, end) for end, n in zip(ends, rows, strict=True)]


def layer_of(axis: int, *, synchronized: bool, **options: Any) -> Any:
    """Returns a layer whose weights are not those of a fresh one."""
    layer = keras.layers.BatchNormalization(
        axis=axis, synchronized=synchronized, momentum=0.7, **options
    )
    layer.build((None, 4, CHANNELS) if axis == -1 else (None, CHANNELS, 4))
    for i, weight in enumerate(layer.weights):
        weight.assign(np.linspace(0.5, 1.5 + i, CHANNELS))
    return layer


def run(layer: Any, x: Any, mask: Any, weight: Any) -> list[np.ndarray]:
    """Returns the output and the gradients of a sum of the rows' losses."""
    x = tf.convert_to_tensor(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x, training=True, mask=mask)
        loss = tf.reduce_sum(tf.sin(y) * weight)
    sources = [x, *(v.value for v in layer.trainable_variables)]
    return [y.numpy(), *(g.numpy() for g in tape.gradient(loss, sources))]


@pytest.mark.parametrize("empty", [None, 0, -1])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("offset", [0.0, 5.0])
@pytest.mark.parametrize("axis", [-1, 1])
def test_layer_equals_plain_on_the_joined_batch(
    world: Communicator, axis: int, offset: float, masked: bool, empty: int | None
) -> None:
    if masked and axis != -1:
        pytest.skip("a mask leaves out the last axis")
    if world.size == 1:
        empty, offset = None, 0.0  # Keras' own: it subtracts squares in float32
    where = shards(world.size, None if empty is None else empty % world.size)
    rows = where[-1].stop
    generator = np.random.default_rng(0)
    shape = (rows, 4, CHANNELS) if axis == -1 else (rows, CHANNELS, 4)
    x = (generator.normal(size=shape) * 2 + offset).astype("float32")
    weight = generator.normal(size=shape).astype("float32")
    mask = (generator.random(shape[:-1]) < 0.6) if masked else None

    plain = layer_of(axis, synchronized=False)
    expected = run(plain, x, mask, weight)
    layer = layer_of(axis, synchronized=True)
    mine = where[world.rank]
    model = keras.Sequential([layer])
    synchronized = SynchronizedBatchNorm(model, world)
    try:
        with synchronized.over():
            y, dx, *weights = run(
                layer, x[mine], None if mask is None else mask[mine], weight[mine]
            )
    finally:
        synchronized.close()
    for gradient in weights:  # before anything can fail on one rank alone
        world.allreduce(gradient)
    # Keras normalises by x·a - mean·a, which costs digits where the mean is large.
    close = {"rtol": 1e-5, "atol": 1e-5 * (1 + offset)}
    np.testing.assert_allclose(y, expected[0][mine], **close)
    np.testing.assert_allclose(dx, expected[1][mine], **close)
    for gradient, whole in zip(weights, expected[2:], strict=True):
        np.testing.assert_allclose(gradient, whole, **close)
    for got, wanted in zip(layer.weights, plain.weights, strict=True):
        np.testing.assert_allclose(got.numpy(), wanted.numpy(), rtol=1e-5, atol=1e-6)
    assert "_moments" not in vars(layer)


def test_float32_statistics_are_no_worse_than_plain(world: Communicator) -> None:
    """A mean of 1000 standard deviations, against float64."""
    generator = np.random.default_rng(1)
    x = (generator.normal(size=(64 * world.size, CHANNELS)) + 1000).astype("float32")
    exact = x.astype("float64").var(0)
    layer = keras.layers.BatchNormalization(synchronized=True)
    plain = keras.layers.BatchNormalization()
    for one in (layer, plain):
        one.build((None, CHANNELS))
    synchronized = SynchronizedBatchNorm(keras.Sequential([layer]), world)
    with synchronized.over():
        mine = tf.constant(x[world.rank :: world.size])
        _, variance = layer._moments(mine, None)
    synchronized.close()
    if world.size > 1:
        _, plainly = plain._moments(tf.constant(x), None)
        error, plain_error = (np.abs(v / exact - 1).max() for v in (variance, plainly))
        assert error <= max(plain_error, 1e-6)


@keras.saving.register_keras_serializable("tests")
class OwnBatchNormStep(OwnStep):
    """A model with a `train_step` of its own."""


def network(kind: str, *, synchronized: bool, own_step: bool, **options: Any) -> Any:
    """Returns a compiled model; the same weights at every call."""
    keras.utils.set_random_seed(3)
    layers = keras.layers
    # Not zero, of which a few steps make numbers as small as rounding errors.
    start = keras.initializers.RandomUniform(0.5, 1.0)

    def batch_norm(x: Any) -> Any:
        return layers.BatchNormalization(
            momentum=0.8, synchronized=synchronized, beta_initializer=start
        )(x)

    if kind == "masked":
        inputs = keras.Input((5, 4))
        x = layers.Masking()(inputs)
        x = batch_norm(layers.Dense(6, activation="tanh")(x))
        x = layers.GlobalAveragePooling1D()(x)
    else:
        inputs = keras.Input((5, 4))
        x = layers.Conv1D(6, 3, padding="same", use_bias=False)(inputs)
        x = layers.ReLU()(batch_norm(x))
        if kind == "branches":
            left = batch_norm(layers.Conv1D(4, 1, use_bias=False)(x))
            # Without biases: their gradients are rounding errors, and nothing else.
            right = layers.Conv1D(4, 3, padding="same", use_bias=False)(x)
            right = layers.Activation("tanh")(batch_norm(right))
            right = batch_norm(layers.Conv1D(4, 1, use_bias=False)(right))
            x = layers.Add()([layers.Activation("tanh")(left), right])
        x = layers.Flatten()(x)
    outputs = layers.Dense(2, bias_initializer=start, dtype=keras.config.floatx())(x)
    model = (OwnBatchNormStep if own_step else keras.Model)(inputs, outputs)
    options.setdefault("jit_compile", False)
    model.compile(
        optimizer=keras.optimizers.SGD(0.02, momentum=0.9),
        loss="mse",
        metrics=["mae"],
        **options,
    )
    return model


def examples(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows (count, 5, 4), some time steps of which are all zeros."""
    generator = np.random.default_rng(4)
    x = generator.normal(size=(count, 5, 4)).astype(keras.config.floatx())
    x[generator.random((count, 5)) < 0.3] = 0
    y = generator.normal(size=(count, 2)).astype(keras.config.floatx())
    return x, y


def assert_close(
    left: keras.Model, right: keras.Model, tolerance: float = 1e-5
) -> None:
    """Fails if any variable, statistics included, differs by more than that."""
    for a, b in zip(left.variables, right.variables, strict=True):
        if "seed" in a.path:
            continue
        name, a, b = a.path, a.numpy(), b.numpy()
        scale = np.abs(b).max() or 1
        assert np.abs(a - b).max() <= tolerance * scale, name


@pytest.mark.parametrize(
    ("count", "kind", "own_step", "options"),
    [
        (43, "plain", False, {}),
        (49, "branches", False, {}),
        (43, "masked", False, {}),
        (49, "branches", True, {}),
        (43, "branches", False, {"run_eagerly": True}),
        (49, "plain", False, {"steps_per_execution": 4}),
        (43, "plain", True, {"steps_per_execution": 4}),
        (49, "plain", False, {"jit_compile": True}),
    ],
    ids=str,
)
def test_fit_equals_one_process(
    world: Communicator, count: int, kind: str, own_step: bool, options: Any
) -> None:
    """At least 12 steps; with 49 samples a last batch of one, on one rank alone."""
    x, y = examples(count)
    steps = -(-count // (4 * world.size))
    epochs = -(-12 // steps)
    how = {"epochs": epochs, "shuffle": False, "verbose": 0}
    single = network(kind, synchronized=False, own_step=own_step, **options)
    before = single.fit(
        x, y, batch_size=4 * world.size, validation_data=(x[:7], y[:7]), **how
    )
    model = network(kind, synchronized=True, own_step=own_step, **options)
    after = trainer(model).fit(
        x, y, batch_size=4, validation_data=(x[:7], y[:7]), **how
    )
    assert_close(model, single)
    assert_equal_everywhere(world, model)
    statistics = [v.numpy().tobytes() for v in model.non_trainable_variables]
    assert all(s == statistics for s in world.allgather_object(statistics))
    assert_equal_history(after, before, 2e-5)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kind", ["branches", "masked"])
def test_nothing_but_rounding_differs(world: Communicator, kind: str) -> None:
    x, y = examples(43)
    models = [network(kind, synchronized=s, own_step=False) for s in (False, True)]
    how = {"epochs": 2, "shuffle": False, "verbose": 0}
    models[0].fit(x, y, batch_size=4 * world.size, **how)
    trainer(models[1]).fit(x, y, batch_size=4, **how)
    assert_close(models[1], models[0], 1e-12)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_generator_that_ends_early_on_some_ranks(world: Communicator) -> None:
    """Steps are not known beforehand: in the last one nobody has an example."""
    x, y = examples(8)

    def own() -> Any:
        for i in range(world.rank + 1):
            yield x[i : i + 2], y[i : i + 2]

    model = network("branches", synchronized=True, own_step=False)
    trainer(model).fit(own(), shard=False, shuffle=False, verbose=0)
    single = network("branches", synchronized=False, own_step=False)
    for i in range(world.size):
        ranks = world.size - i
        batch = np.repeat(x[None, i : i + 2], ranks, 0).reshape(-1, 5, 4)
        labels = np.repeat(y[None, i : i + 2], ranks, 0).reshape(-1, 2)
        single.train_on_batch(batch, labels)
    assert_close(model, single)
    assert_equal_everywhere(world, model)


def test_gradient_accumulation(world: Communicator) -> None:
    x, y = examples(43)
    models = []
    for synchronized in (False, True):
        model = network("branches", synchronized=synchronized, own_step=False)
        model.compile(
            keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
            loss="mse",
            jit_compile=False,
        )
        models.append(model)
    how = {"epochs": 2, "shuffle": False, "verbose": 0}
    models[0].fit(x, y, batch_size=4 * world.size, **how)
    trainer(models[1]).fit(x, y, batch_size=4, **how)
    for a, b in zip(*(m.trainable_variables for m in models), strict=True):
        # Adam divides by gradients that may be near zero.
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=1e-4)
    assert_equal_everywhere(world, models[1])


def test_mixed_precision(world: Communicator) -> None:
    """With weights that stay, as overflows may leave out other steps than elsewhere."""
    x, y = examples(21)
    how: dict[str, Any] = {"epochs": 2, "shuffle": False, "verbose": 0}
    keras.config.set_dtype_policy("mixed_float16")
    try:
        whole = network("branches", synchronized=False, own_step=False)
        model = network("branches", synchronized=True, own_step=False)
        for one in (whole, model):
            one.optimizer.inner_optimizer.learning_rate = 0.0
        expected = whole.fit(x, y, batch_size=4 * world.size, **how).history["loss"]
        loss = trainer(model).fit(x, y, batch_size=4, **how).history["loss"]
    finally:
        keras.config.set_dtype_policy("float32")
    np.testing.assert_allclose(loss, expected, rtol=5e-3)
    for a, b in zip(whole.weights, model.weights, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=2e-3)
    assert_equal_everywhere(world, model)


def test_says_that_xla_stays_out(
    world: Communicator, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = examples(8)
    model = network("plain", synchronized=True, own_step=False, jit_compile=True)
    logger = logging.getLogger("distkeras")
    propagates, logger.propagate = logger.propagate, True
    with caplog.at_level(logging.WARNING, logger="distkeras"):
        trainer(model).fit(x, y, batch_size=4, verbose=0)
    logger.propagate = propagates
    said = [r for r in caplog.records if "synchronized=True" in r.getMessage()]
    assert len(said) == (world.size > 1 and world.rank == 0)
    assert model.jit_compile is True


@pytest.mark.parametrize("synchronized", (False, True))
def test_the_summary_tells_whose_batches_count(
    world: Communicator, caplog: pytest.LogCaptureFixture, synchronized: bool
) -> None:
    x, y = examples(8)
    model = network("branches", synchronized=synchronized, own_step=False)
    count = sum(
        isinstance(layer, keras.layers.BatchNormalization) for layer in model.layers
    )
    logger = logging.getLogger("distkeras")
    propagates, logger.propagate = logger.propagate, True
    with caplog.at_level(logging.INFO, logger="distkeras"):
        trainer(model).fit(x, y, batch_size=4, verbose=0)
    logger.propagate = propagates
    expected = f"{count} {'synchronised' if synchronized else 'by the batch of each'}"
    said = [r for r in caplog.records if expected in r.getMessage()]
    assert len(said) == (world.size > 1), caplog.text


class Rematerialised(keras.layers.Layer):
    """Calls its layer within a `tf.function` of its own."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def build(self, input_shape: Any) -> None:
        self.layer.build(input_shape)

    def call(self, x: Any, training: Any = None) -> Any:
        return tf.function(lambda x: self.layer(x, training=training))(x)


def test_where_ranks_may_not_all_come_is_an_error(world: Communicator) -> None:
    layer = keras.layers.BatchNormalization(synchronized=True)
    model = keras.Sequential([keras.Input((3,)), Rematerialised(layer)])
    synchronized = SynchronizedBatchNorm(model, world)
    x = np.ones((2, 3), "float32")
    with synchronized.over():
        if world.size == 1:
            model(x, training=True)
        else:
            with pytest.raises(NotImplementedError, match="synchronized=False"):
                model(x, training=True)
    synchronized.close()


def test_second_derivatives_are_an_error(world: Communicator) -> None:
    layer = layer_of(-1, synchronized=True)
    synchronized = SynchronizedBatchNorm(keras.Sequential([layer]), world)
    x = tf.random.normal((2, 4, CHANNELS))
    with synchronized.over(), tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            loss = tf.reduce_sum(layer(x, training=True) ** 3)
        slope = tf.reduce_sum(inner.gradient(loss, x) ** 2)
        if world.size > 1:
            with pytest.raises(NotImplementedError, match="derivative"):
                outer.gradient(slope, x)
    synchronized.close()


def test_what_is_used_of_keras_is_there() -> None:
    kind = keras.layers.BatchNormalization
    assert list(inspect.signature(kind._moments).parameters) == [
        "self",
        "inputs",
        "mask",
    ]
    layer = kind()
    layer.build((None, 5, 4))
    assert layer._reduction_axes == [0, 1]
    assert layer.axis == -1 and layer.synchronized is False
    calls = []

    def moments(inputs: Any, mask: Any) -> Any:
        calls.append(mask)
        return tf.zeros(4), tf.ones(4)

    object.__setattr__(layer, "_moments", moments)
    layer(np.ones((2, 5, 4), "float32"), training=True)
    layer(np.ones((2, 5, 4), "float32"), training=False)
    assert len(calls) == 1
    object.__delattr__(layer, "_moments")
    assert "_moments" not in vars(layer)
