"""Keras' own loops over sharded data, on one rank."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from distkeras import data

pytestmark = pytest.mark.dealt


class Alone:
    """The communicator of one process, as far as sharding needs it."""

    rank = 0
    size = 1

    def allgather_object(self, obj: Any) -> list[Any]:
        return [obj]


class Counting(keras.layers.Layer):
    """Counts how often it is traced, and records what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.traces = 0

    def call(self, x: Any) -> Any:
        self.traces += 1
        return x


def model() -> tuple[keras.Model, Counting]:
    keras.utils.set_random_seed(1)
    counting = Counting()
    net = keras.Sequential([keras.Input((3,)), counting, keras.layers.Dense(2)])
    net.compile("sgd", "mse", jit_compile=False)
    counting.traces = 0
    return net, counting


X = np.random.default_rng(0).normal(size=(23, 3)).astype("float32")
Y = np.random.default_rng(1).normal(size=(23, 2)).astype("float32")


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return X[4 * index : 4 * index + 4], Y[4 * index : 4 * index + 4]


def pipeline() -> Any:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)


KINDS = {
    "arrays": lambda: ((X, Y), dict(batch_size=4, shuffle=False)),
    "tf.data": lambda: ((pipeline(),), {}),
    "PyDataset": lambda: ((Batches(workers=1),), dict(shuffle=False)),
    "PyDataset, workers": lambda: ((Batches(workers=2),), dict(shuffle=False)),
}


@pytest.mark.parametrize("steps", [None, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.*`shuffle=True`:UserWarning")
def test_fit_is_that_of_keras(kind: str, steps: int | None) -> None:
    if steps and "workers" in kind:
        pytest.skip("Keras itself starts a finite PyDataset again in each epoch")
    arrays, options = KINDS[kind]()
    plain, _ = model()
    expected = plain.fit(*arrays, epochs=3, steps_per_epoch=steps, verbose=0, **options)
    net, counting = model()
    sharded = data.shard(
        *KINDS[kind]()[0],
        communicator=Alone(),
        **({"steps_per_epoch": steps} | options),
    )
    history = net.fit(sharded, epochs=3, steps_per_epoch=steps, verbose=0)
    assert history.history == expected.history
    for ours, theirs in zip(net.weights, plain.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    traces = counting.traces
    net.fit(sharded, epochs=2, steps_per_epoch=steps, verbose=0)
    assert counting.traces == traces


def test_shuffled_epochs_build_no_new_function() -> None:
    net, counting = model()
    sharded = data.shard(X, Y, communicator=Alone(), batch_size=4)
    net.fit(sharded, epochs=1, verbose=0)
    traces = counting.traces
    net.fit(sharded, epochs=3, verbose=0)
    again = data.shard(X, Y, communicator=Alone(), batch_size=4, seed=3)
    net.fit(again, epochs=2, verbose=0)
    assert counting.traces == traces


@pytest.mark.parametrize("kind", KINDS)
def test_evaluate_and_predict_are_those_of_keras(kind: str) -> None:
    arrays, options = KINDS[kind]()
    options.pop("shuffle", None)
    net, _ = model()

    def sharded() -> data.ShardedData:
        return data.shard(
            *KINDS[kind]()[0], communicator=Alone(), training=False, **options
        )

    assert net.evaluate(sharded(), verbose=0) == net.evaluate(
        *arrays, verbose=0, **options
    )
    ours = sharded()
    outputs = net.predict(ours, verbose=0)
    np.testing.assert_array_equal(
        outputs, net.predict(KINDS[kind]()[0][0], verbose=0, **options)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_validation_data_may_be_sharded(kind: str) -> None:
    arrays, options = KINDS[kind]()
    options.pop("shuffle", None)
    net, _ = model()
    validation = data.shard(*arrays, communicator=Alone(), training=False, **options)
    history = net.fit(
        X, Y, validation_data=validation, epochs=2, verbose=0, batch_size=4
    )
    assert history.history["val_loss"][-1] == pytest.approx(
        net.evaluate(X, Y, verbose=0), rel=1e-5
    )
