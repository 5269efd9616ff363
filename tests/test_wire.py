"""Gradients in half the bytes: rounding, error feedback, what is counted."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from equivalence import assert_equal_everywhere
from equivalence import build
from equivalence import samples
from equivalence import trainer

import distkeras
from distkeras.communicators import Communicator
from distkeras.communicators import HierarchicalCommunicator
from distkeras.communicators import SingleCommunicator
from distkeras.gradients import Gradient
from distkeras.gradients import GradientExchange
from distkeras.gradients import _residuals
from distkeras.gradients import make_wire

LENGTH = 40_000
"""Elements: more than what MPI's communicator sums whole."""

# Half a unit in the last place, of each share and once more of the sum.
EPSILON = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


def exchange_of(
    world: Communicator, kind: str, bucket_bytes: int | None = None, **options: Any
) -> GradientExchange:
    wire = make_wire(kind, **options)
    return GradientExchange(world, bucket_bytes=bucket_bytes, wire=wire)


def gradient(rank: int) -> np.ndarray:
    return np.random.default_rng(rank).normal(size=LENGTH).astype("float32")


def reduce(
    exchange: GradientExchange, examples: float, array: np.ndarray
) -> np.ndarray:
    plan = exchange.plan((1,), [Gradient("v", array.shape, "float32")])
    (result,) = exchange.reduce(plan, 0, examples, [array])
    return result.copy()


@pytest.mark.parametrize("kind", EPSILON)
def test_mean_over_examples_rounded_twice(world: Communicator, kind: str) -> None:
    exchange = exchange_of(world, kind)
    counts = [3 * r + 1 for r in range(world.size)]
    result = reduce(exchange, counts[world.rank], gradient(world.rank))
    every = [gradient(r).astype("float64") for r in range(world.size)]
    exact = np.average(every, axis=0, weights=counts)
    shares = sum(
        np.abs(g) * n / sum(counts) for g, n in zip(every, counts, strict=True)
    )
    bound = EPSILON[kind] * 1.01 * (shares + np.abs(exact)) + 1e-7
    assert (np.abs(result - exact) <= bound).all()
    assert (result != exact.astype("float32")).any()  # it was rounded
    everywhere = world.allgather_object(result.tobytes())
    assert len(set(everywhere)) == 1
    assert exchange.counters.bytes == 2 * LENGTH
    assert exchange.counters.collectives == 1
    assert exchange.counters.messages == 1
    assert exchange.counters.exchanges == 1
    assert exchange.examples == sum(counts)
    exchange.close()


@pytest.mark.parametrize("accumulating", (False, True))
def test_examples_are_counted_once(world: Communicator, accumulating: bool) -> None:
    """A bucket that no wire takes goes first, or the flags of what is accumulated."""
    exchange = exchange_of(world, "float16")
    plan = exchange.plan(
        (1,), [Gradient("b", (3,), "float32"), Gradient("a", (3,), "float64")]
    )
    assert [bucket.dtype.name for bucket in plan.buckets] == ["float64", "float32"]
    for _ in range(2):
        examples = 4.0
        if accumulating:
            exchange.reduce_counts(examples, False)
            exchange.reduce_counts(examples, False)
            examples = 1.0
        for number, dtype in enumerate(("float64", "float32")):
            (mean,) = exchange.reduce(plan, number, examples, [np.ones(3, dtype)])
            np.testing.assert_array_equal(mean, np.ones(3))
    steps = 4 if accumulating else 2
    assert exchange.counters.examples == steps * 4 * world.size
    assert exchange.counters.exchanges == 2
    exchange.close()


@pytest.mark.parametrize("kind", EPSILON)
def test_errors_that_are_fed_back_do_not_add_up(world: Communicator, kind: str) -> None:
    """The same gradient again and again: the mean over steps nears the exact one."""
    steps = 16
    exact = np.mean([gradient(r).astype("float64") for r in range(world.size)], 0)
    errors = {}
    for feedback in (False, True):
        exchange = exchange_of(world, kind, error_feedback=feedback)
        mine = gradient(world.rank)
        total = sum(reduce(exchange, 1, mine).astype("float64") for _ in range(steps))
        errors[feedback] = np.abs(total / steps - exact).mean()
        exchange.close()
    # The sum's own rounding stays, which no rank keeps: at one rank there is none.
    assert errors[True] < (0.2 if world.size == 1 else 0.85) * errors[False]


def test_residuals_are_gone_on_with(world: Communicator) -> None:
    """By a run that deals the same gradients into other buckets, to the last bit."""
    shapes = [(300, 20), (77,), (5, 5, 5)]
    gradients = [Gradient(f"v{n}", shape, "float32") for n, shape in enumerate(shapes)]

    def step(exchange: GradientExchange, seed: int) -> list[bytes]:
        plan = exchange.plan((1,), gradients)
        found: list[bytes] = [b""] * len(shapes)
        for number, bucket in enumerate(plan.buckets):
            arrays = [
                np.random.default_rng([seed, world.rank, p.index])
                .normal(size=p.shape)
                .astype("float32")
                for p in bucket.placements
            ]
            results = exchange.reduce(plan, number, 1, arrays)
            for place, result in zip(bucket.placements, results, strict=True):
                found[place.index] = result.tobytes()
        return found

    whole = exchange_of(world, "bfloat16", error_feedback=True)
    other = exchange_of(world, "bfloat16", error_feedback=True, bucket_bytes=400)
    step(whole, 0)
    held = whole.residuals()
    assert len(held) == 3 and all(array.any() for array in held.values())
    step(other, 5)
    other.restore_residuals(world.allgather_object(held))
    for seed in (1, 2):
        assert step(other, seed) == step(whole, seed)
    whole.close()
    other.close()


def test_residuals_are_shared_by_another_number_of_ranks() -> None:
    wire = make_wire("float16", error_feedback=True)
    assert wire is not None
    ranks = [{"0/0": np.full(3, 2.0 + rank, "float32")} for rank in range(5)]
    shares = [_residuals.shared_out(ranks, rank, 3, wire) for rank in range(3)]
    # They are kept multiplied by 4 on five ranks, and by 2 on three.
    total = sum(share["0/0"] for share in shares) / 2
    np.testing.assert_allclose(total, sum(range(2, 7)) / 4)
    assert _residuals.shared_out(ranks, 3, 5, wire)["0/0"][0] == 5


def test_infinity_passes_and_is_not_kept(world: Communicator) -> None:
    exchange = exchange_of(world, "float16", error_feedback=True)
    array = gradient(world.rank)
    bad = array.copy()
    if world.rank == world.size - 1:
        bad[7], bad[8] = np.inf, 1e6 * world.size  # the second is beyond float16
    first = reduce(exchange, 1, bad)
    assert np.isinf(first[7:9]).all() and np.isfinite(first[9:]).all()
    assert np.isfinite(reduce(exchange, 1, array)).all()
    exchange.close()


def test_rank_without_examples_and_step_without_any(world: Communicator) -> None:
    exchange = exchange_of(world, "bfloat16")
    alone = world.size == 1
    array = np.full(LENGTH, 1.0 if alone or world.rank else np.nan, "float32")
    result = reduce(exchange, 1 if alone else world.rank, array)
    np.testing.assert_allclose(result, 1.0, rtol=2**-7)
    sent = exchange.counters.bytes
    result = reduce(exchange, 0, array)
    assert exchange.exhausted and not result.any()
    assert exchange.counters.bytes == sent
    exchange.close()


def test_other_dtypes_go_as_they_are(world: Communicator) -> None:
    exchange = exchange_of(world, "float16")
    plan = exchange.plan(
        (1,),
        [
            Gradient("wide", (5,), "float64"),
            Gradient("scale", (5,), "float32", reduction="max"),
            Gradient("half", (5,), "bfloat16"),
        ],
    )
    every = [1 / 3 + r for r in range(world.size)]
    for number, bucket in enumerate(plan.buckets):
        (place,) = bucket.placements
        array = np.full(5, every[world.rank], plan.gradients[place.index].dtype)
        (result,) = exchange.reduce(plan, number, 1, [array])
        name = plan.gradients[place.index].path
        expected = max(every) if name == "scale" else np.mean(every)
        tolerance = {"wide": 1e-15, "scale": 1e-7, "half": 2**-7}[name]
        np.testing.assert_allclose(result.astype("float64"), expected, rtol=tolerance)
    exchange.close()


class Alike(SingleCommunicator):
    """Stands for one rank of many that all send the same."""

    size = 512  # type: ignore[assignment]

    def allreduce(self, buffer: np.ndarray, op: Any = "sum") -> None:
        buffer[...] = buffer.astype("float32") * self.size


def test_many_ranks_lose_no_more_than_one() -> None:
    """Gradients of 1e-5 are within float16; 1/512 of them would not be."""
    exact = np.random.default_rng(0).normal(size=LENGTH).astype("float32") * 1e-5
    errors = []
    for communicator in (SingleCommunicator(), Alike()):
        buffer = exact / communicator.size
        make_wire("float16").allreduce(communicator, "key", buffer)
        errors.append(np.abs(buffer - exact).max() / np.abs(exact).max())
    assert errors[1] <= 1.01 * errors[0] < 1e-2


def test_nodes_exchange_halves(world: Communicator) -> None:
    """Sixteen bits between nodes too: what is 2048 + 1 on one travels as 2048."""
    if world.size == 1:
        pytest.skip("needs two nodes")
    nodes = [min(rank, 1) for rank in range(world.size)]
    communicator = HierarchicalCommunicator(node_of_rank=nodes)
    buffer = np.empty(LENGTH, "float16")

    def allreduce(mine: int) -> None:
        communicator.allreduce_parts(
            buffer, pack=lambda part, _: part.fill(mine), unpack=lambda part, _: None
        )

    allreduce({1: 2048, 2: 1}.get(world.rank, 2))
    np.testing.assert_array_equal(buffer, 2050)
    allreduce({1: 2048, 2: 1}.get(world.rank, 1 if world.size > 2 else 2))
    # Of three: 1 + (2048 + 1) is 2050 in float32, and 2048 where 2049 was rounded.
    np.testing.assert_array_equal(buffer, 2050 if world.size == 2 else 2048)
    communicator.close()


def test_words_without_meaning() -> None:
    with pytest.raises(ValueError, match="compression='int8'"):
        make_wire("int8")
    with pytest.raises(ValueError, match="bfloat16"):
        make_wire(["float16"])
    with pytest.raises(ValueError, match="error_feedback=True"):
        make_wire(None, error_feedback=True)
    with pytest.raises(ValueError, match="compression='gzip'"):
        distkeras.Trainer(build(keras.optimizers.SGD), compression="gzip")


def test_ranks_that_compress_differently(world: Communicator) -> None:
    if world.size == 1:
        pytest.skip("needs a rank to differ from")
    exchange = exchange_of(world, "float16" if world.rank else "bfloat16")
    with pytest.raises(distkeras.MismatchError, match=r"sent bfloat16.*\n.*float16"):
        exchange.plan((1,), [Gradient("v", (3,), "float32")])
    exchange.close()


@pytest.mark.dealt
@pytest.mark.parametrize(
    ("kind", "feedback", "options"),
    [
        ("float16", False, {}),
        ("bfloat16", True, {"gradient_accumulation_steps": 2}),
    ],
)
def test_training_comes_close(
    world: Communicator, kind: str, feedback: bool, options: dict[str, Any]
) -> None:
    x, y = samples(103)

    def make() -> Any:
        return keras.optimizers.SGD(0.1, momentum=0.9, **options)

    single, model = build(make), build(make)
    how = {"epochs": 2, "shuffle": False, "verbose": 0}
    single.fit(x, y, batch_size=8 * world.size, **how)
    run = trainer(model, compression=kind, error_feedback=feedback)
    run.fit(x, y, batch_size=8, **how)
    assert_equal_everywhere(world, model)
    for a, b in zip(model.trainable_variables, single.trainable_variables, strict=True):
        largest = np.abs(b.numpy()).max()
        assert np.abs(a.numpy() - b.numpy()).max() <= 8 * EPSILON[kind] * largest
    if world.size > 1:
        counters = run.exchange.counters
        elements = counters.bytes / 2 / counters.exchanges
        assert elements < sum(np.size(v) for v in model.trainable_variables) + 64
