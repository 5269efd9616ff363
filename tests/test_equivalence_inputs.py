"""Every kind of input and every option of `fit`, against one process on all of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
from equivalence import CLASSES
from equivalence import FEATURES
from equivalence import assert_equal_everywhere
from equivalence import assert_equal_history
from equivalence import assert_equal_weights
from equivalence import build
from equivalence import samples
from equivalence import trainer
from inputs import BATCH
from inputs import COUNT
from inputs import drop_remainder
from inputs import finite
from inputs import from_list
from inputs import generator
from inputs import global_batches
from inputs import py_dataset
from inputs import py_dataset_workers
from inputs import rank_batches
from inputs import torch_loader
from inputs import unknown

from distkeras.communicators import Communicator

pytestmark = pytest.mark.dealt

EPOCHS = 3


def momentum() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1, momentum=0.9)


DEALT = [
    finite,
    unknown,
    drop_remainder,
    py_dataset,
    py_dataset_workers,
    torch_loader,
]


# Of a length that is not known, as Keras does in one process.
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("kind", DEALT)
def test_batches_dealt_in_turn(
    world: Communicator, kind: Callable[[list[Any]], Any]
) -> None:
    if world.size == 1:
        pytest.skip("at one rank the input goes to Keras as it is")
    batches = rank_batches()
    if kind is drop_remainder:
        batches = [batch for batch in batches if len(batch[0]) == BATCH]
    single = build(momentum)
    expected = single.fit(
        from_list(global_batches(world.size, batches)),
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        validation_data=from_list(batches),
    )
    model = build(momentum)
    history = trainer(model).fit(
        kind(batches),
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        validation_data=kind(batches),
    )
    assert_equal_weights(model, single)
    assert_equal_history(history, expected)
    assert_equal_everywhere(world, model)


@pytest.mark.parametrize("ends_early", [False, True])
def test_generator(world: Communicator, ends_early: bool) -> None:
    """Ten batches a step are asked for; one generator has fewer than two epochs'."""
    batches = rank_batches()
    steps = 5
    have = batches[: 7 * world.size + 1] if ends_early else batches
    stream = have if ends_early else have * (2 * steps * world.size)

    used = stream[: 2 * steps * world.size]
    whole = global_batches(world.size, used)
    single = build(momentum)
    for x, y in whole:
        single.train_on_batch(x, y)
    model = build(momentum)
    options = {"epochs": 2, "steps_per_epoch": steps, "verbose": 0}
    if ends_early:
        with pytest.warns(UserWarning, match="ran out of data"):
            trainer(model).fit(generator(stream), shuffle=False, **options)
    else:
        trainer(model).fit(generator(stream), shuffle=False, **options)
    assert_equal_weights(model, single)
    assert_equal_everywhere(world, model)


def test_infinite_dataset(world: Communicator) -> None:
    batches = rank_batches()
    if world.size == 1:
        pytest.skip("at one rank the input goes to Keras as it is")
    used = (batches * 5)[: 7 * 2 * world.size]
    single = build(momentum)
    single.fit(
        from_list(global_batches(world.size, used)),
        epochs=2,
        steps_per_epoch=7,
        shuffle=False,
        verbose=0,
    )
    model = build(momentum)
    trainer(model).fit(
        from_list(batches).repeat(),
        epochs=2,
        steps_per_epoch=7,
        shuffle=False,
        verbose=0,
    )
    assert_equal_weights(model, single)


def test_own_data_of_each_rank(world: Communicator) -> None:
    """`shard=False`: this rank's batches are its own, and of another number."""
    own = [
        [
            tuple(part + 0 for part in batch)
            for batch in rank_batches(4 * (3 + 2 * rank))
        ]
        for rank in range(world.size)
    ]
    longest = max(map(len, own))
    whole = []
    for step in range(longest):
        parts = [batches[step] for batches in own if step < len(batches)]
        whole.append(tuple(map(np.concatenate, zip(*parts, strict=True))))
    single = build(momentum)
    expected = single.fit(from_list(whole), shuffle=False, verbose=0)
    x, y = map(np.concatenate, zip(*own[world.rank], strict=True))
    model = build(momentum)
    history = trainer(model).fit(
        x, y, batch_size=BATCH, shuffle=False, verbose=0, shard=False
    )
    assert_equal_weights(model, single)
    assert_equal_history(history, expected)


def arrays(**_: Any) -> dict[str, Any]:
    x, y = samples(COUNT)
    return {"x": x, "y": y}


def tensors(**_: Any) -> dict[str, Any]:
    x, y = samples(COUNT)
    return {"x": tf.constant(x), "y": tf.constant(y)}


def frames(**_: Any) -> dict[str, Any]:
    x, y = samples(COUNT)
    return {"x": pd.DataFrame(x), "y": pd.Series(y)}


def sample_weight() -> dict[str, Any]:
    weights = np.random.default_rng(3).uniform(0, 2, COUNT).astype("float32")
    return {**arrays(), "sample_weight": weights}


def class_weight() -> dict[str, Any]:
    return {**arrays(), "class_weight": {0: 0.5, 1: 2.0, 2: 1.0}}


def validation_split() -> dict[str, Any]:
    return {**arrays(), "validation_split": 0.2}


def validation_options() -> dict[str, Any]:
    x, y = samples(37, seed=5)
    return {
        **arrays(),
        "validation_data": (x, y),
        "validation_freq": 2,
        "epochs": 4,
    }


def validation_weights() -> dict[str, Any]:
    x, y = samples(37, seed=5)
    weights = np.random.default_rng(3).uniform(0, 2, 37).astype("float32")
    return {**arrays(), "validation_data": (x, y, weights)}


def initial_epoch() -> dict[str, Any]:
    return {**arrays(), "initial_epoch": 1, "epochs": 3}


def steps_per_epoch() -> dict[str, Any]:
    return {**arrays(), "steps_per_epoch": 2, "epochs": 4}


OPTIONS = [
    arrays,
    tensors,
    frames,
    sample_weight,
    class_weight,
    validation_split,
    validation_options,
    validation_weights,
    initial_epoch,
    steps_per_epoch,
]


@pytest.mark.parametrize("options", OPTIONS)
def test_arrays_and_options(
    world: Communicator, options: Callable[[], dict[str, Any]]
) -> None:
    keywords = {"epochs": EPOCHS, "shuffle": False, "verbose": 0, **options()}
    single = build(momentum)
    expected = single.fit(batch_size=BATCH * world.size, **keywords)
    model = build(momentum)
    history = trainer(model).fit(batch_size=BATCH, **keywords)
    assert_equal_weights(model, single)
    assert_equal_history(history, expected)
    assert history.epoch == expected.epoch
    assert_equal_everywhere(world, model)


def nested() -> keras.Model:
    """Returns a model of two named inputs and two outputs with losses of their own."""
    keras.utils.set_random_seed(2)
    left, right = keras.Input((FEATURES,), name="left"), keras.Input((2,), name="right")
    joined = keras.layers.Concatenate()([left, right])
    shared = keras.layers.Dense(5, activation="tanh")
    hidden = keras.layers.Add()([shared(left), shared(left * 2.0)])
    frozen = keras.layers.Dense(5, trainable=False)(joined)
    hidden = keras.layers.Add()([hidden, frozen])
    kind = keras.layers.Dense(CLASSES, name="kind")(hidden)
    value = keras.layers.Dense(1, name="value")(hidden)
    model = keras.Model({"left": left, "right": right}, {"kind": kind, "value": value})
    model.compile(
        # Small: a rate at which training diverges multiplies rounding errors.
        keras.optimizers.SGD(0.01, momentum=0.9),
        loss={
            "kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "value": "mse",
        },
        loss_weights={"kind": 0.3, "value": 2.0},
        metrics={"kind": ["accuracy"], "value": ["mae"]},
    )
    return model


def test_nested_inputs_and_outputs(world: Communicator) -> None:
    x, y = samples(COUNT)
    inputs = {"left": x, "right": x[:, :2]}
    targets = {"kind": y, "value": x[:, :1]}
    single = nested()
    options = {"epochs": EPOCHS, "shuffle": False, "verbose": 0}
    single.fit(inputs, targets, batch_size=BATCH * world.size, **options)
    model = nested()
    run = trainer(model)
    history = run.fit(inputs, targets, batch_size=BATCH, **options)
    assert_equal_weights(model, single)
    expected = single.evaluate(inputs, targets, verbose=0, return_dict=True)
    result = run.evaluate(inputs, targets, verbose=0, return_dict=True)
    # Keras averages the parts over batches, distkeras over examples: see _metrics.
    for name in ("loss", "kind_accuracy", "value_mae"):
        assert result[name] == pytest.approx(expected[name], rel=1e-4)
        assert math.isfinite(history.history[name][-1])
    whole = single.predict(inputs, verbose=0)
    for name, values in run.predict(inputs, batch_size=BATCH, verbose=0).items():
        np.testing.assert_allclose(values, whole[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [finite, py_dataset])
def test_predict_in_order(
    world: Communicator, kind: Callable[[list[Any]], Any]
) -> None:
    model = build(momentum)
    batches = rank_batches()
    x = np.concatenate([batch[0] for batch in batches])
    expected = model.predict(x, verbose=0)
    result = trainer(model).predict(kind(batches), verbose=0)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def test_shuffled_epochs_see_every_sample_once(world: Communicator) -> None:
    """Learning rate 0: the epoch's loss is that of the whole data, in any order."""
    x, y = samples(COUNT)
    model = build(lambda: keras.optimizers.SGD(0.0))
    expected = model.evaluate(x, y, batch_size=COUNT, verbose=0, return_dict=True)
    history = trainer(model).fit(x, y, batch_size=BATCH, epochs=2, verbose=0)
    for name in ("loss", "accuracy"):
        assert history.history[name] == pytest.approx([expected[name]] * 2, rel=1e-5)


def test_second_epoch_traces_nothing(world: Communicator) -> None:
    traces = []

    class Traced(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            traces.append(1)
            return x

    x, y = samples(COUNT)
    keras.utils.set_random_seed(0)
    inputs = keras.Input((FEATURES,))
    model = keras.Model(inputs, keras.layers.Dense(CLASSES)(Traced()(inputs)))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    run = trainer(model)
    counts = []
    log = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: counts.append(len(traces))
    )
    options = {"batch_size": BATCH, "verbose": 0, "callbacks": [log]}
    run.fit(x, y, epochs=3, validation_data=(x[:9], y[:9]), **options)
    assert counts[0] == counts[1] == counts[2]
    if world.size > 1:
        run.fit(x, y, epochs=1, validation_data=(x[:9], y[:9]), **options)
        assert counts[3] - counts[0] <= 1  # building looks at the shapes again
