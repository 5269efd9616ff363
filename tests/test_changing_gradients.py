"""Gradients that exist in some steps only: exact where ranks agree, else an error."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import trainer

import distkeras
from distkeras import MismatchError
from distkeras.backends._tensorflow_device import DeviceHandOver
from distkeras.backends._tensorflow_device import allreduce_on_device
from distkeras.communicators import Communicator
from distkeras.gradients import Gradient
from distkeras.gradients import GradientExchange
from distkeras.gradients import Rows
from distkeras.gradients import make_wire
from distkeras.gradients._flags import _alike
from distkeras.gradients._flags import marks

# What may differ without a word of the communicator: the messages are as long.
FIRST = [Gradient("a", (9,), "float32"), Gradient("b", (9,), "float32", exists=False)]
SECOND = [Gradient("a", (9,), "float32", exists=False), Gradient("b", (9,), "float32")]
BOTH = [Gradient("a", (9,), "float32"), Gradient("b", (9,), "float32")]


def assert_one_error(world: Communicator, call: Callable[[], Any], *words: str) -> None:
    """Checks that all ranks get the same error."""
    with pytest.raises(MismatchError) as error:
        call()
    messages = world.allgather_object(str(error.value))
    assert len(set(messages)) == 1
    for word in words:
        assert word in messages[0]


def test_marks_tell_plans_apart_on_any_number_of_ranks() -> None:
    generator = random.Random(1)
    for size in (1, 2, 3, 1000, 4096):
        digest = generator.getrandbits(60)
        for one in (digest, (1 << 60) - 1):
            for other in (one, one ^ 1, one ^ (63 << 12)):
                sums = np.zeros(6, "float32")
                for rank in range(size):
                    sums += np.array(marks(other if rank == size // 2 else one), "f4")
                assert _alike(sums.tolist(), size) == (other == one or size == 1)


@pytest.mark.parametrize("compression", (None, "float16"))
def test_plans_that_differ_are_noticed_with_the_first_message(
    world: Communicator, compression: str | None
) -> None:
    """Ranks that trace a step again do so by themselves: they agree on nothing then."""
    exchange = GradientExchange(world, wire=make_wire(compression))
    exchange.plan((1,), BOTH)
    mine = FIRST if world.rank == 0 else SECOND
    plan = exchange.plan((1,), mine)
    array = np.full(9, world.rank + 1, "float32")
    if world.size > 1:
        assert_one_error(
            world,
            lambda: exchange.reduce(plan, 0, 1, [array]),
            "rank 0: 0 a: 9 float32, gradient",
            "0 a: 9 float32, no gradient",
        )
    # All go on together.
    plan = exchange.plan((1,), FIRST)
    (mean,) = exchange.reduce(plan, 0, 1, [array])
    np.testing.assert_allclose(mean, (world.size + 1) / 2)
    exchange.close()


def test_plans_that_differ_in_device_memory(world: Communicator) -> None:
    """The flags that go ahead on the host tell, and all buffers go with their plans."""
    exchange = GradientExchange(world)
    hand_over = DeviceHandOver(exchange, np)
    exchange.plan((1,), BOTH)

    def reduce(mine: list[Gradient], place: int) -> Any:
        (mean,), _ = allreduce_on_device(
            hand_over,
            exchange,
            exchange.plan((1,), mine),
            [tf.fill((9,), world.rank + 1.0)],
            [place],
            tf.constant(1.0, tf.float64),
            tf.constant(0.0, tf.float64),
            lambda number, tensors: tensors,
        )
        return mean.numpy()

    if world.size > 1:
        other = int(world.rank > 0)
        with pytest.raises((MismatchError, tf.errors.OpError)) as error:
            reduce((FIRST, SECOND)[other], other)
        assert "The first difference is entry 2 of 3" in str(error.value)
    for _ in range(3):
        np.testing.assert_allclose(reduce(FIRST, 0), (world.size + 1) / 2)
        np.testing.assert_allclose(reduce(SECOND, 1), (world.size + 1) / 2)
    assert len(exchange._buffers) == 2
    exchange.close()
    assert not exchange._buffers


NARROW = Gradient("a", (900, 3), "float32", sparse=True)
OTHERS = {
    "other": [Gradient("b", (900, 3), "float32", sparse=True)],
    "wider": [Gradient("a", (900, 5), "float32", sparse=True)],
    "more": [NARROW, Gradient("b", (900, 2), "float32", sparse=True)],
}


@pytest.mark.parametrize("merge", (True, False))
@pytest.mark.parametrize("other", OTHERS)
def test_sparse_plans_that_differ(world: Communicator, other: str, merge: bool) -> None:
    """Also where messages are of different lengths."""
    exchange = GradientExchange(world)
    exchange.plan((1,), BOTH)
    mine = [NARROW] if world.rank == 0 else OTHERS[other]
    plan = exchange.plan((1,), mine)

    def reduce() -> list[Rows]:
        rows = [
            Rows(np.array([5, world.rank]), np.ones((2, g.shape[1]), "float32"))
            for g in mine
        ]
        return exchange.reduce_rows(plan, 1, rows, merge=merge)

    if world.size == 1:
        reduce()
    else:
        assert_one_error(world, reduce, "1 b: 900x2" if other == "more" else "0 a: ")
    exchange.close()


def test_together_ranks_agree_before_anything_is_sent(world: Communicator) -> None:
    """Whatever each knows of the list, and however long its messages are."""
    exchange = GradientExchange(world)
    if world.size == 1:
        exchange.plan((1,), BOTH, together=True)
        exchange.close()
        return
    lists = [FIRST, SECOND, BOTH]
    mine = lists[world.rank % 3]
    known = [exchange.plan((1,), listed, together=True) for listed in lists]
    for key in ((1,), (1 + world.rank,), (5,)):
        assert_one_error(
            world,
            lambda key=key: exchange.plan(key, mine, together=True),
            "The first difference is entry 2",
        )
    for listed, plan in zip(lists, known, strict=True):  # nothing is lost by an error
        assert exchange.plan((1,), listed, together=True) is plan
    # A new list on some ranks only, as numbers of objects come again.
    exchange.plan((10 + world.rank % 2,), BOTH, together=True)
    exchange.plan((10,), BOTH, together=True)
    for mine in (*lists, *lists):
        plan = exchange.plan((1,), mine, together=True)
        exchange.reduce(plan, 0, 1, [np.ones(9, "float32")] * (1 + (mine is BOTH)))
    exchange.close()


@pytest.mark.parametrize("compression", (None, "bfloat16"))
def test_what_is_kept_does_not_grow(
    world: Communicator, compression: str | None
) -> None:
    """Of every list of variables the newest plans, their buffers, and nothing else."""
    feedback = compression is not None
    wire = make_wire(compression, error_feedback=feedback)
    exchange = GradientExchange(world, wire=wire)
    generator = random.Random(3)
    for _ in range(60):
        exist = [generator.random() < 0.5 for _ in range(6)] + [True]
        listed = [
            Gradient(str(n), (9,), "float32", exists=e) for n, e in enumerate(exist)
        ]
        plan = exchange.plan((1,), listed)
        arrays = [
            np.full(9, p.index + world.rank, "float32")
            for p in plan.buckets[0].placements
        ]
        means = exchange.reduce(plan, 0, 1, arrays)
        for place, mean in zip(plan.buckets[0].placements, means, strict=True):
            np.testing.assert_allclose(mean, place.index + (world.size - 1) / 2, 0.01)
        assert len(exchange._buffers) <= 3
        assert wire is None or len(wire.errors) <= 3
    exchange.close()
    assert not exchange._buffers
    assert wire is None or not wire.errors and not wire._narrow


def test_what_is_yet_to_be_sent_follows_its_gradient(world: Communicator) -> None:
    """To the other plans of a list, into files, and back: once, and nothing is lost.

    Of each step rank 0 sends 0.3 in float16, others nothing, so that sums are exact.
    """
    wire = make_wire("float16", error_feedback=True)
    exchange = GradientExchange(world, wire=wire)
    generator = random.Random(5)
    names = "abcde"
    sums = dict.fromkeys(names, 0.0)
    due = dict.fromkeys(names, 0.0)
    exact = float(np.float32(0.3))
    for step in range(50):
        exist = [generator.random() < 0.5 for _ in names[1:]] + [True]
        listed = [
            Gradient(name, (9,), "float32", exists=e)
            for name, e in zip(names, exist, strict=True)
        ]
        plan = exchange.plan((1,), listed)
        places = plan.buckets[0].placements
        mine = 0.3 * world.size if world.rank == 0 else 0.0
        arrays = [np.full(9, mine, "float32") for _ in places]
        for place, mean in zip(
            places, exchange.reduce(plan, 0, 1, arrays), strict=True
        ):
            sums[names[place.index]] += float(mean[0])
            due[names[place.index]] += exact
        if step % 17 == 16:  # as if it went on from a file
            ranks = world.allgather_object(exchange.residuals())
            exchange.close()
            wire = make_wire("float16", error_feedback=True)
            exchange = GradientExchange(world, wire=wire)
            exchange.restore_residuals(ranks)
    held = world.broadcast_object(exchange.residuals())
    scale = wire.multiplier(world.size)
    for n, name in enumerate(names):
        left = float(held[f"0/{n}"][0]) / scale
        assert sums[name] + left == pytest.approx(due[name], abs=1e-5)
        assert abs(left) < 3e-4
    exchange.close()


def test_graphs_keep_their_plans(world: Communicator) -> None:
    exchange = GradientExchange(world)
    lists = [
        [Gradient(str(n), (9,), "float32", exists=n <= m) for n in range(6)]
        for m in range(6)
    ]
    plans = [exchange.plan((1,), listed) for listed in lists]
    for _ in range(3):
        for m, listed in enumerate(lists):
            assert exchange.plan((1,), listed) is plans[m]
            arrays = [np.full(9, world.rank, "float32") for _ in range(m + 1)]
            for mean in exchange.reduce(plans[m], 0, 1, arrays):
                np.testing.assert_allclose(mean, (world.size - 1) / 2)
    assert len(exchange._buffers) <= 6
    exchange.close()


def test_waiting_is_not_computing(world: Communicator) -> None:
    """Where ranks agree on a plan first, the late one is waited for there."""
    exchange = GradientExchange(world)
    for _ in range(2):
        exchange.plan((1,), BOTH, together=True)
    if world.rank == world.size - 1 > 0:
        time.sleep(0.8)
    before = exchange.clock.exchanging
    exchange.plan((1,), BOTH, together=True)
    waited = exchange.clock.exchanging - before
    if world.size > 1:
        assert (waited > 0.4) == (world.rank != world.size - 1)
    exchange.close()


def alternating(world: Communicator, graph: bool, differ: bool) -> list[float]:
    """Trains two numbers in turn, by a loop; returns them."""
    a, b = keras.Variable(0.0, name="a"), keras.Variable(0.0, name="b")
    optimizer = distkeras.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([a, b])

    def step(use_a: bool, use_b: bool) -> None:
        with tf.GradientTape() as tape:
            loss = (world.rank + 1) * (use_a * a.value + 10.0 * use_b * b.value)
            loss = tf.convert_to_tensor(loss)
            if not use_a:
                loss = (world.rank + 1) * 10.0 * tf.convert_to_tensor(b.value)
            if not use_b:
                loss = (world.rank + 1) * tf.convert_to_tensor(a.value)
        found = tape.gradient(loss, [a.value, b.value])
        optimizer.apply_gradients(zip(found, [a, b], strict=True))

    run = tf.function(step) if graph else step
    for _ in range(2):
        run(True, True)
        run(True, False)
        run(False, True)
    if differ:
        run(world.rank == 0, world.rank != 0)
    return [float(a.numpy()), float(b.numpy())]


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("graph", (False, True))
def test_in_a_loop_of_ones_own(world: Communicator, graph: bool) -> None:
    mean = (world.size + 1) / 2
    assert alternating(world, graph, False) == [-4 * mean, -40 * mean]
    if world.size == 1:
        return
    with pytest.raises((MismatchError, tf.errors.OpError)) as error:
        alternating(world, graph, True)
    assert "The first difference is entry 2 of 3" in str(error.value)
    assert len(set(world.allgather_object(isinstance(error.value, MismatchError)))) == 1


class Some(keras.layers.Layer):
    """Adds up those of two layers that a function of the step's number chooses."""

    def __init__(self, chosen: Callable[[int], Sequence[int]]) -> None:
        super().__init__()
        self.chosen, self.steps = chosen, 0
        self.layers = [keras.layers.Dense(4, name=name) for name in "ab"]

    def build(self, shape: tuple[int | None, ...]) -> None:
        for layer in self.layers:
            layer.build(shape)
        super().build(shape)

    def call(self, x: Any, training: bool = False) -> Any:
        self.steps += bool(training)
        first, *others = [self.layers[n](x) for n in self.chosen(self.steps)]
        return sum(others, first)


def test_in_fit(world: Communicator) -> None:
    """In the step itself: else ranks drift apart, and are told so an epoch later."""

    def by_rank(step: int) -> Sequence[int]:
        return (0, 1) if step < 3 else (world.rank % 2,)

    model = keras.Sequential([keras.Input((3,)), Some(by_rank)])
    model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    x, y = np.ones((24, 3), "float32"), np.ones((24, 4), "float32")
    run = trainer(model)
    if world.size == 1:
        return

    def fit() -> None:
        run.fit(x, y, batch_size=2, verbose=0)

    assert_one_error(world, fit, "a/kernel: 3x4 float32, no gradient")


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_ranks_without_examples_follow(world: Communicator) -> None:
    """The last batch leaves some ranks none, in a step that uses the other layer."""
    x = np.random.default_rng(0).normal(size=(6 * world.size + 1, 3)).astype("f4")
    y = np.repeat(x.sum(1, keepdims=True), 4, 1)
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((3,)), Some(lambda step: (step % 2,))])
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
        model.layers[0].steps = 0
        models.append(model)
    single, model = models
    options: dict[str, Any] = {"epochs": 2, "shuffle": False, "verbose": 0}
    single.fit(x, y, batch_size=2 * world.size, **options)
    run = trainer(model)
    model.layers[0].steps = 0
    run.fit(x, y, batch_size=2, **options)
    for theirs, ours in zip(single.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_loss_scale_for_wide_variables(world: Communicator) -> None:
    """Accumulators are as wide as their variables, the scale is not."""
    x = np.random.default_rng(0).normal(size=(12 * world.size, 3)).astype("float32")
    y = x.sum(1, keepdims=True)
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(4, dtype="float64")]
        )
        model.add(keras.layers.Dense(1, dtype="float32"))
        inner = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
        model.compile(keras.optimizers.LossScaleOptimizer(inner, 8.0), "mse")
        models.append(model)
    single, model = models
    options: dict[str, Any] = {"epochs": 2, "shuffle": False, "verbose": 0}
    single.fit(x, y, batch_size=3 * world.size, **options)
    trainer(model).fit(x, y, batch_size=3, **options)
    for theirs, ours in zip(single.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_complex_gradients_are_an_error(world: Communicator) -> None:
    exchange = GradientExchange(world)
    with pytest.raises(ValueError, match=r"real numbers.*complex64.*'z'"):
        exchange.plan((1,), [*BOTH, Gradient("z", (2,), "complex64")])
    exchange.close()
