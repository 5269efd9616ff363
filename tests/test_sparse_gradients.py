"""Sparse gradients of embeddings: what Keras makes of them, and their exchange."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import assert_equal_everywhere
from equivalence import assert_equal_history
from equivalence import assert_equal_weights
from equivalence import trainer
from newer_keras import multi_optimizer
from newer_keras import muon

import distkeras
from distkeras.backends import indifferent_to_duplicates
from distkeras.backends._tensorflow_exchange import TensorFlowExchange
from distkeras.communicators import Communicator
from distkeras.gradients import Gradient
from distkeras.gradients import GradientExchange
from distkeras.gradients import Rows

pytestmark = pytest.mark.dealt

optimizers = keras.optimizers
VOCABULARY, WIDTH = 7, 3

CLASSES = {
    name: kind
    for name, kind in vars(optimizers).items()
    if inspect.isclass(kind)
    and issubclass(kind, optimizers.Optimizer)
    and kind is not optimizers.Optimizer
    and name not in ("LossScaleOptimizer", "MultiOptimizer")
}


class Own(optimizers.SGD):
    """A user's optimizer, of which nothing is known."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        gradient = keras.ops.sign(gradient)
        super().update_step(gradient, variable, learning_rate)


def multi(**options: Any) -> keras.optimizers.Optimizer:
    default = optimizers.SGD(0.01, **options)
    others = {".*embeddings": optimizers.Adam(0.01, **options)}
    return multi_optimizer(default, others)


KINDS: dict[str, Callable[[], Any]] = {
    **{name: lambda kind=kind: kind(0.01) for name, kind in CLASSES.items()},
    "Muon": lambda: muon(0.01),
    "momentum": lambda: optimizers.SGD(0.01, momentum=0.9),
    "nesterov": lambda: optimizers.SGD(0.01, momentum=0.9, nesterov=True),
    "centered": lambda: optimizers.RMSprop(0.01, momentum=0.9, centered=True),
    "amsgrad": lambda: optimizers.Adam(0.01, amsgrad=True),
    "clipnorm": lambda: optimizers.SGD(0.01, clipnorm=0.1),
    "clipvalue": lambda: optimizers.SGD(0.01, clipvalue=0.1),
    "global_clipnorm": lambda: optimizers.SGD(0.01, global_clipnorm=0.1),
    "ema": lambda: optimizers.SGD(
        0.01, weight_decay=0.1, use_ema=True, ema_overwrite_frequency=2
    ),
    "accumulation": lambda: optimizers.Adam(
        0.01, gradient_accumulation_steps=2, clipnorm=0.1
    ),
    "loss_scale_sgd": lambda: optimizers.LossScaleOptimizer(
        optimizers.SGD(0.01), initial_scale=8.0
    ),
    "loss_scale_adam": lambda: optimizers.LossScaleOptimizer(
        optimizers.Adam(0.01), initial_scale=8.0
    ),
    "loss_scale_accumulation": lambda: optimizers.LossScaleOptimizer(
        optimizers.Adam(0.01, gradient_accumulation_steps=2), initial_scale=8.0
    ),
    "multi": multi,
    "multi_accumulation": lambda: multi(gradient_accumulation_steps=2),
    "own": lambda: Own(0.01),
}


def variable() -> keras.Variable:
    start = np.random.default_rng(1).normal(size=(VOCABULARY, WIDTH))
    return keras.Variable(start, dtype="float32", name="embeddings")


def slices(
    indices: np.ndarray, values: np.ndarray, shape: tuple[int, ...] | None = None
) -> tf.IndexedSlices:
    return tf.IndexedSlices(
        tf.constant(values, "float32"),
        tf.constant(indices, "int32"),
        tf.constant(shape or (VOCABULARY, WIDTH)),
    )


def some(seed: int, count: int, low: int = 0, high: int = VOCABULARY) -> Any:
    generator = np.random.default_rng(seed)
    return (
        generator.integers(low, high, count),
        generator.normal(size=(count, WIDTH)).astype("float32"),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_keras_makes_of_duplicates(kind: str) -> None:
    """Fails when Keras changes it: the exchange sums rows only where that is exact."""
    results = []
    for dense in (False, True):
        weights = variable()
        optimizer = KINDS[kind]()
        optimizer.build([weights])
        for seed in range(4):
            gradient = slices(*some(seed, 9))
            if dense:
                gradient = tf.convert_to_tensor(gradient)
            optimizer.apply([gradient], [weights])
        results.append(weights.numpy())
    same = np.abs(results[0] - results[1]).max() < 1e-6
    assert indifferent_to_duplicates(optimizer) == (same and kind != "own")


def test_distributed_class_is_known(world: Communicator) -> None:
    for kind in (optimizers.SGD, optimizers.Lion):
        optimizer = distkeras.DistributedOptimizer(kind(0.1))
        assert indifferent_to_duplicates(optimizer)
    assert not indifferent_to_duplicates(distkeras.DistributedOptimizer(Own(0.1)))


IDS = {
    "overlapping": lambda rank, size: (0, VOCABULARY),
    "disjoint": lambda rank, size: (rank * 2, rank * 2 + 2),
}


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("kind", KINDS)
def test_apply_equals_one_process(world: Communicator, kind: str, ids: str) -> None:
    """Ranks of unequal rows and examples; in turn, one has none at all."""
    exchange = GradientExchange(world)
    graph = TensorFlowExchange(exchange)
    mine, single = variable(), variable()
    optimizer, expected = KINDS[kind](), KINDS[kind]()
    optimizer.build([mine])
    expected.build([single])

    @tf.function(reduce_retracing=True, autograph=False)
    def step(indices: Any, values: Any, count: Any) -> None:
        gradient = tf.IndexedSlices(values, indices, tf.constant([VOCABULARY, WIDTH]))
        with graph.counting(count):
            graph.apply(optimizer.apply, optimizer, [gradient], [mine])

    for number in range(4):
        idle = number % world.size if world.size > 1 else None
        counts = [0 if r == idle else r + 1 for r in range(world.size)]
        parts = [
            some(10 * number + r, 3 + 4 * r + number, *IDS[ids](r, world.size))
            for r in range(world.size)
        ]
        if world.rank == idle:
            parts[idle] = (parts[idle][0], np.full_like(parts[idle][1], np.nan))
        indices, values = parts[world.rank]
        step(tf.constant(indices, tf.int32), tf.constant(values), counts[world.rank])
        kept = [r for r in range(world.size) if r != idle]
        whole = slices(
            np.concatenate([parts[r][0] for r in kept]),
            np.concatenate([parts[r][1] * (counts[r] / sum(counts)) for r in kept]),
        )
        expected.apply([whole], [single])
    difference = np.abs(mine.numpy() - single.numpy()).max()
    assert difference <= 1e-5 * np.abs(single.numpy()).max()
    updates = 2 if "accumulation" in kind else 4
    assert exchange.counters.exchanges == updates
    assert exchange.counters.collectives == updates
    everywhere = world.allgather_object(mine.numpy().tobytes())
    assert all(other == everywhere[0] for other in everywhere)
    exchange.close()


def model_of(
    optimizer: Callable[[], Any],
    *,
    vocabulary: int = 40,
    dtype: Any = None,
    tied: bool = False,
    own_step: bool = False,
    **options: Any,
) -> keras.Model:
    keras.utils.set_random_seed(0)
    first, second = keras.Input((4,), dtype="int32"), keras.Input((2,), dtype="int32")
    table = keras.layers.Embedding(vocabulary, 3, dtype=dtype)
    other = table if tied else keras.layers.Embedding(vocabulary, 2, dtype=dtype)
    pool = keras.layers.GlobalAveragePooling1D()
    joined = keras.layers.Concatenate()([pool(table(first)), pool(other(second))])
    outputs = keras.layers.Dense(3, dtype="float32")(joined)
    kind = OwnStep if own_step else keras.Model
    model = kind([first, second], outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer(), loss=loss, **options)
    return model


class OwnStep(keras.Model):
    """A model that brings its own `train_step`."""

    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


def texts(count: int, vocabulary: int) -> tuple[list[np.ndarray], np.ndarray]:
    generator = np.random.default_rng(0)
    x = [generator.integers(0, vocabulary, (count, width)) for width in (4, 2)]
    return [part.astype("int32") for part in x], generator.integers(0, 3, count)


FITS: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": KINDS["Adam"]},
    "adam_jit": {"optimizer": KINDS["Adam"], "jit_compile": True},
    "adam_own_step": {"optimizer": KINDS["Adam"], "own_step": True},
    "adam_eager": {"optimizer": KINDS["Adam"], "run_eagerly": True},
    "adam_shared": {"optimizer": KINDS["Adam"], "tied": True},
    "adam_large": {"optimizer": KINDS["Adam"], "vocabulary": 2000},
    "momentum": {"optimizer": KINDS["momentum"]},
    "momentum_jit": {"optimizer": KINDS["momentum"], "jit_compile": True},
    "momentum_large": {"optimizer": KINDS["momentum"], "vocabulary": 2000},
    "accumulation": {"optimizer": KINDS["accumulation"]},
    "accumulation_large": {"optimizer": KINDS["accumulation"], "vocabulary": 2000},
    "accumulation_jit": {"optimizer": KINDS["accumulation"], "jit_compile": True},
    "loss_scale": {"optimizer": KINDS["loss_scale_adam"]},
    "loss_scale_accumulation": {"optimizer": KINDS["loss_scale_accumulation"]},
    "multi": {"optimizer": KINDS["multi"]},
    "global_clipnorm": {"optimizer": KINDS["global_clipnorm"]},
    "mixed": {"optimizer": KINDS["Adam"], "dtype": "mixed_bfloat16"},
}


@pytest.mark.parametrize("kind", FITS)
def test_fit_equals_one_process(world: Communicator, kind: str) -> None:
    options = FITS[kind]
    x, y = texts(37, options.get("vocabulary", 40))
    settings = {"epochs": 2, "shuffle": False, "verbose": 0}
    single = model_of(**options)
    expected = single.fit(x, y, batch_size=4 * world.size, **settings)
    model = model_of(**options)
    history = trainer(model).fit(x, y, batch_size=4, **settings)
    # bfloat16 rounds sums over a batch in an order of its own, 2^-8 relative, and
    # Adam's step is as large as its rate whatever the gradient.
    tolerance = 1e-2 if kind == "mixed" else 1e-5
    assert_equal_weights(model, single, tolerance)
    assert_equal_history(history, expected, tolerance)
    assert_equal_everywhere(world, model)


def test_more_ranks_than_samples(world: Communicator) -> None:
    x, y = texts(1, 40)
    settings = {"epochs": 3, "shuffle": False, "verbose": 0}
    for kind in ("adam", "momentum", "accumulation", "adam_jit", "adam_own_step"):
        single, model = model_of(**FITS[kind]), model_of(**FITS[kind])
        single.fit(x, y, batch_size=world.size, **settings)
        trainer(model).fit(x, y, batch_size=1, **settings)
        assert_equal_weights(model, single)


def plan_of(exchange: GradientExchange, dtype: str = "float32") -> Any:
    return exchange.plan(
        (1,),
        [
            Gradient("large", (1000, 3), dtype, sparse=True),
            Gradient("dense", (2,), "float32"),
            Gradient("small", (4, 2), dtype, sparse=True),
        ],
    )


@pytest.mark.parametrize("merge", [False, True])
def test_rows_of_all_ranks(world: Communicator, merge: bool) -> None:
    """Large tables travel as rows, small ones dense; duplicates are kept or summed."""
    exchange = GradientExchange(world)
    plan = plan_of(exchange)
    assert [p.index for b in plan.buckets for p in b.placements] == [1]
    exchange.reduce(plan, 0, 1, [np.ones(2, "float32")])
    assert exchange.counters.exchanges == 0  # the rows are still to come
    before = exchange.counters.bytes
    rank, size = world.rank, world.size
    large = Rows(np.array([5, 900 + rank, 5]), np.full((3, 3), rank + 1.0, "float32"))
    small = Rows(np.arange(8) % 4, np.full((8, 2), 1.0, "float32"))
    first, second = exchange.reduce_rows(plan, rank + 1, [large, small], merge=merge)
    total = size * (size + 1) / 2
    if merge:
        assert first.indices.tolist() == [5, *(900 + r for r in range(size))]
        squares = [(r + 1.0) ** 2 for r in range(size)]
        expected = [2 * sum(squares), *squares]
        np.testing.assert_allclose(first.values[:, 0], np.array(expected) / total)
        assert second.indices.tolist() == [0, 1, 2, 3]
        np.testing.assert_allclose(second.values, 2.0)
    else:
        assert first.indices.tolist() == [
            i for r in range(size) for i in (5, 900 + r, 5)
        ]
        assert len(second) == 8 * size
        np.testing.assert_allclose(second.values[:8], 1 / total)
    assert exchange.examples == total
    assert exchange.counters.exchanges == 1
    assert exchange.counters.collectives == (3 if merge else 2)
    assert exchange.counters.messages == (1 if merge else 0)
    assert exchange.counters.bytes - before < 1000  # of a table of 12000
    exchange.close()


def test_rows_carry_stop_and_exhaustion(world: Communicator) -> None:
    exchange = GradientExchange(world)
    only = [Gradient("large", (1000, 3), "float16", sparse=True)]
    plan = exchange.plan((2,), only)
    assert not plan.buckets
    rows = Rows(np.array([1], "int32"), np.full((1, 3), np.nan, "float16"))
    for merge in (False, True):
        if world.rank == world.size - 1:
            exchange.announce_stop()
        (result,) = exchange.reduce_rows(plan, 0, [rows], merge=merge)
        assert len(result) == 0
        assert exchange.stop_announced
        assert exchange.exhausted
        assert exchange.counters.exchanges == 0
        exchange.clear_stop()
        exchange.exhausted = False
    exchange.close()


def test_infinity_in_rows_of_one_rank_skips_on_all(world: Communicator) -> None:
    for kind in ("loss_scale_sgd", "loss_scale_adam", "loss_scale_accumulation"):
        weights = variable()
        optimizer = distkeras.DistributedOptimizer(KINDS[kind]())
        optimizer.build([weights])
        for number in range(4):
            indices, values = some(number * 10 + world.rank, 5)
            if number == 1 and world.rank == world.size - 1:
                # Keras alone sees an infinity only in the last row of an index.
                indices[-2:] = 1
                values[-1 if world.size == 1 else -2, 1] = np.inf
            optimizer.apply([slices(indices, values)], [weights])
        assert float(optimizer.dynamic_scale) == 4.0
        everywhere = world.allgather_object(weights.numpy())
        for other in everywhere:
            np.testing.assert_array_equal(other, everywhere[0])
            assert np.isfinite(other).all()
