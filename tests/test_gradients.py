"""The plan and the host's half of the exchange, against their definitions."""

from __future__ import annotations

import numpy as np
import pytest

from distkeras import MismatchError
from distkeras.communicators import Communicator
from distkeras.communicators import SharedMemoryCommunicator
from distkeras.gradients import Gradient
from distkeras.gradients import GradientExchange
from distkeras.gradients import canonical_path
from distkeras.gradients import make_plan
from distkeras.gradients._packing import pack_part

SHAPES = [(3,), (), (2, 5), (17, 3), (1,)]


def gradients(dtype: str = "float32") -> list[Gradient]:
    return [Gradient(f"v{i}", shape, dtype) for i, shape in enumerate(SHAPES)]


def values(rank: int, dtype: str = "float32") -> list[np.ndarray]:
    generator = np.random.default_rng(rank)
    return [generator.normal(size=shape).astype(dtype) for shape in SHAPES]


def in_order_of(plan, number, arrays):
    return [arrays[place.index] for place in plan.buckets[number].placements]


def test_plan_places_every_gradient_once_aligned_and_apart() -> None:
    plan = make_plan(gradients(), bucket_bytes=200)
    assert len(plan.buckets) > 1
    seen = []
    for bucket in plan.buckets:
        end = 64 // bucket.dtype.itemsize
        for place in bucket.placements:
            assert place.offset >= end
            assert place.offset * bucket.dtype.itemsize % 64 == 0
            end = place.offset + place.length
            seen.append(place.index)
        assert end <= bucket.length
    assert seen == [4, 3, 2, 1, 0]  # the backward pass ends with the first variable


def test_plan_separates_dtypes_and_skips_what_has_no_gradient() -> None:
    mixed = [
        Gradient("a", (2,), "float32"),
        Gradient("b", (2,), "float64"),
        Gradient("c", (2,), "float16"),
        Gradient("d", (2,), "float32", exists=False),
        Gradient("e", (2,), "float32", reduction="max"),
    ]
    plan = make_plan(mixed)
    kinds = {
        (b.dtype.name, b.reduction): sorted(p.index for p in b.placements)
        for b in plan.buckets
    }
    assert kinds == {
        ("float32", "mean"): [0, 2],  # 16-bit floats are summed in float32
        ("float64", "mean"): [1],
        ("float32", "max"): [4],
    }


def test_plan_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="bucket_bytes=0"):
        make_plan(gradients(), bucket_bytes=0)
    with pytest.raises(ValueError, match="at least one trainable variable"):
        make_plan([Gradient("a", (2,), "float32", exists=False)])


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("dense_12/kernel", "dense/kernel"),
        ("dense/kernel", "dense/kernel"),
        ("adam_1/dense_2_kernel_momentum", "adam/dense_kernel_momentum"),
        ("metric/variable_1", "metric/variable"),
    ],
)
def test_path_without_numbering(path: str, expected: str) -> None:
    class Variable:
        name = "kernel"

    variable = Variable()
    variable.path = path
    assert canonical_path(variable) == expected


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("bucket_bytes", [100, 2**20])
def test_reduce_is_the_mean_over_examples(
    world: Communicator, dtype: str, bucket_bytes: int
) -> None:
    exchange = GradientExchange(world, bucket_bytes=bucket_bytes)
    plan = exchange.plan((1,), gradients(dtype))
    counts = [3 * r + 1 for r in range(world.size)]
    mine = values(world.rank, dtype)
    result: list[np.ndarray | None] = [None] * len(SHAPES)
    for number, bucket in enumerate(plan.buckets):
        outputs = exchange.reduce(
            plan, number, counts[world.rank], in_order_of(plan, number, mine)
        )
        for place, output in zip(bucket.placements, outputs, strict=True):
            result[place.index] = output
    for i, shape in enumerate(SHAPES):
        every = [values(r, dtype)[i].astype("float64") for r in range(world.size)]
        expected = np.average(every, axis=0, weights=counts)
        assert result[i].shape == shape
        assert result[i].dtype == dtype
        tolerance = 2e-3 if dtype == "float16" else 1e-6
        np.testing.assert_allclose(result[i], expected, rtol=tolerance, atol=tolerance)
    assert exchange.examples == sum(counts)
    assert exchange.counters.exchanges == 1
    assert exchange.counters.collectives == len(plan.buckets)
    assert exchange.counters.bytes == plan.nbytes
    exchange.close()


def test_mean_is_rounded_once(world: Communicator) -> None:
    """Sums of whole numbers are exact: what is left is the rounding of a division."""
    exchange = GradientExchange(world)
    plan = exchange.plan((1,), [Gradient("v", (997,), "float32")])
    every = [np.arange(997) * (r + 1) for r in range(world.size)]
    counts = [3 * r + 7 for r in range(world.size)]
    mine = every[world.rank].astype("float32")
    (result,) = exchange.reduce(plan, 0, counts[world.rank], [mine])
    total = sum(n * g for n, g in zip(counts, every, strict=True))
    np.testing.assert_array_equal(result, (total / sum(counts)).astype("float32"))
    exchange.close()


def test_many_gradients_share_one_collective(world: Communicator) -> None:
    exchange = GradientExchange(world)
    plan = exchange.plan((1,), [Gradient(f"v{i}", (9,), "float32") for i in range(60)])
    for _ in range(3):
        exchange.reduce(plan, 0, 1, [np.ones(9, "float32")] * 60)
    assert exchange.counters.collectives == 3
    exchange.close()


def test_results_are_bit_equal_on_all_ranks(world: Communicator) -> None:
    exchange = GradientExchange(world)
    plan = exchange.plan((1,), gradients())
    mine = in_order_of(plan, 0, values(world.rank))
    result = exchange.reduce(plan, 0, world.rank + 1, mine)
    everywhere = world.allgather_object([array.tobytes() for array in result])
    assert all(other == everywhere[0] for other in everywhere)
    exchange.close()


def test_rank_without_examples_adds_nothing_not_even_nan(world: Communicator) -> None:
    exchange = GradientExchange(world)
    plan = exchange.plan((1,), gradients())
    idle = world.size - 1 if world.size > 1 else None
    arrays = values(world.rank)
    if world.rank == idle:
        arrays = [np.full_like(a, np.nan) for a in arrays]
    count = 0 if world.rank == idle else 2
    result = exchange.reduce(plan, 0, count, in_order_of(plan, 0, arrays))
    working = [r for r in range(world.size) if r != idle]
    for place, output in zip(plan.buckets[0].placements, result, strict=True):
        every = [values(r)[place.index] for r in working]
        np.testing.assert_allclose(output, np.mean(every, axis=0), rtol=1e-5, atol=1e-6)
    assert not exchange.exhausted
    exchange.close()


def test_no_examples_anywhere_is_not_an_exchange(world: Communicator) -> None:
    exchange = GradientExchange(world)
    plan = exchange.plan((1,), gradients())
    nan = [np.full(SHAPES[p.index], np.nan, "f4") for p in plan.buckets[0].placements]
    result = exchange.reduce(plan, 0, 0, nan)
    assert all((array == 0).all() for array in result)
    assert exchange.exhausted
    assert exchange.counters.exchanges == 0
    exchange.close()


def test_maximum_for_scales(world: Communicator) -> None:
    exchange = GradientExchange(world)
    scale = [Gradient("scale", (2,), "float32", reduction="max")]
    plan = exchange.plan((1,), [*scale, Gradient("w", (1,), "float32")])
    number = [b.reduction for b in plan.buckets].index("max")
    mine = np.array([world.rank, -world.rank], "float32")
    (result,) = exchange.reduce(plan, number, 1, [mine])
    assert result.tolist() == [world.size - 1, 0]
    exchange.close()


@pytest.mark.parametrize("by_message", [False, True])
def test_stop_announced_by_one_rank_reaches_all(
    world: Communicator, by_message: bool
) -> None:
    exchange = GradientExchange(world, bucket_bytes=100)
    plan = exchange.plan((1,), gradients())

    def step() -> bool:
        if by_message:
            exchange.reduce_counts(1, False)
        else:
            for number in range(len(plan.buckets)):
                exchange.reduce(
                    plan, number, 1, in_order_of(plan, number, values(world.rank))
                )
        return exchange.stop_announced

    assert not step()
    if world.rank == world.size - 1:
        exchange.announce_stop()
    assert step()
    assert step()  # several steps may run before a callback can look
    exchange.clear_stop()
    assert not step()
    exchange.close()


def test_counts_between_updates(world: Communicator) -> None:
    exchange = GradientExchange(world)
    total, nonfinite = exchange.reduce_counts(world.rank + 1, world.rank == 0)
    assert total == world.size * (world.size + 1) / 2
    assert nonfinite
    assert exchange.reduce_counts(1, False) == (world.size, False)
    assert exchange.counters.messages == 2
    assert exchange.counters.exchanges == 0
    exchange.close()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (Gradient("v2", (2, 6), "float32"), ["2 v2", "2x6", "2x5"]),
        (Gradient("v2", (2, 5), "float64"), ["2 v2", "float64"]),
        (Gradient("v2", (2, 5), "float32", exists=False), ["2 v2", "no gradient"]),
        (Gradient("other", (2, 5), "float32"), ["2 other", "2 v2"]),
        (None, ["nothing", "2 v2"]),
    ],
)
def test_mismatch_is_one_error_on_every_rank(
    world: Communicator, changed: Gradient | None, words: list[str]
) -> None:
    exchange = GradientExchange(world)
    mine = gradients()[:3]
    if world.rank == world.size - 1:
        mine[2:] = [] if changed is None else [changed]
    if world.size == 1:
        exchange.plan((1,), mine)  # nobody to differ from
        return
    with pytest.raises(MismatchError) as error:
        exchange.plan((1,), mine)
    messages = world.allgather_object(str(error.value))
    assert len(set(messages)) == 1
    for word in [*words, f"rank {world.size - 1}"]:
        assert word in messages[0]
    exchange.close()


@pytest.mark.parametrize("length", (16, 24, 40, 1000))
@pytest.mark.parametrize("reduction", ("mean", "max"))
@pytest.mark.parametrize("weight", (0.0, 3.0))
def test_parts_are_packed_as_the_whole(
    length: int, reduction: str, weight: float
) -> None:
    """Every element but the header's is written, wherever it is cut."""
    shapes = [*SHAPES, (0,), (33,)]
    of = [
        Gradient(f"v{i}", shape, "float32", reduction=reduction)  # type: ignore[arg-type]
        for i, shape in enumerate(shapes)
    ]
    (bucket,) = make_plan(of).buckets
    generator = np.random.default_rng(1)
    arrays = [generator.normal(size=p.shape) for p in bucket.placements]
    nothing = 0 if reduction == "mean" else -np.inf
    expected = np.full(bucket.length, 0 if weight else nothing, "float32")
    for place, array in zip(bucket.placements, arrays, strict=True):
        scaled = array.astype("float32") * np.float32(
            weight if reduction == "mean" else 1
        )
        here = slice(place.offset, place.offset + place.length)
        if weight:
            expected[here] = scaled.reshape(-1)
    packed = np.full(bucket.length, np.nan, "float32")
    packed[:16] = 7  # the header's
    halves = [array.astype("float32") for array in arrays]
    for start in range(0, bucket.length, length):
        part = packed[start : start + length]
        pack_part(bucket, halves, weight, part, start)
    expected[:16] = 7
    np.testing.assert_array_equal(packed, expected)


@pytest.mark.parametrize("chunk_bytes", (64, 192, 1 << 20))
def test_exchange_in_parts(world: Communicator, chunk_bytes: int) -> None:
    """A bucket of several parts: flags, padding, idle ranks as in one."""
    if world.size == 1 or world.local_size != world.size:
        pytest.skip("parts are those of shared memory")
    communicator = SharedMemoryCommunicator(chunk_bytes=chunk_bytes)
    exchange = GradientExchange(communicator)
    scale = Gradient("scale", (50,), "float32", reduction="max")
    plan = exchange.plan((1,), [*gradients(), scale])
    last = world.size - 1
    for counts in (
        [r + 1 for r in range(world.size)],
        [1] * last + [0],
        [0] * last + [0],
    ):
        count = counts[world.rank]
        mine = [*values(world.rank), np.arange(50, dtype="f4") * (world.rank + 1)]
        if count == 0:
            mine = [np.full_like(array, np.nan) for array in mine]
        for number, bucket in enumerate(plan.buckets):
            outputs = exchange.reduce(
                plan, number, count, in_order_of(plan, number, mine)
            )
            for place, output in zip(bucket.placements, outputs, strict=True):
                working = [r for r in range(world.size) if counts[r]]
                if bucket.reduction == "max":
                    largest = max((r + 1 for r in working), default=-np.inf)
                    expected = np.arange(50) * largest if working else -np.inf
                elif working:
                    every = [values(r)[place.index].astype("f8") for r in working]
                    weights = [counts[r] for r in working]
                    expected = np.average(every, axis=0, weights=weights)
                else:
                    expected = 0
                np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)
        assert exchange.examples == sum(counts)
    assert exchange.counters.exchanges == 2
    assert exchange.exhausted
    exchange.close()
    communicator.close()


def test_buffer_is_aligned_and_reused(world: Communicator) -> None:
    exchange = GradientExchange(world)
    plan = exchange.plan((1,), gradients())
    addresses = set()
    for _ in range(3):
        result = exchange.reduce(plan, 0, 1, in_order_of(plan, 0, values(0)))
        assert all(array.ctypes.data % 64 == 0 for array in result)
        addresses.add(tuple(array.ctypes.data for array in result))
    assert len(addresses) == 1
    exchange.close()
