"""The hand-over of fused buckets, on host memory and, where there is one, on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from distkeras.backends._tensorflow_device import DeviceHandOver
from distkeras.backends._tensorflow_device import allreduce_on_device
from distkeras.communicators import Communicator
from distkeras.gradients import Gradient
from distkeras.gradients import GradientExchange

SHAPES = [(3,), (2, 5), (), (7, 3)]


def values(rank: int) -> list[np.ndarray]:
    generator = np.random.default_rng(rank)
    return [generator.normal(size=shape).astype("float32") for shape in SHAPES]


def check(world: Communicator, exchange: GradientExchange, arrays: object) -> None:
    hand_over = DeviceHandOver(exchange, arrays)
    plan = exchange.plan(
        (1,), [Gradient(f"v{i}", s, "float32") for i, s in enumerate(SHAPES)]
    )
    counts = [2.0 * r for r in range(world.size)]  # rank 0 has no example
    counts[-1] += world.size == 1

    @tf.function(autograph=False)
    def step(count: tf.Tensor, *gradients: tf.Tensor) -> list[tf.Tensor]:
        reduced, examples = allreduce_on_device(
            hand_over, exchange, plan, list(gradients), [0, 1, 2, 3], count
        )
        return [examples, *reduced]

    for _ in range(2):
        mine = values(world.rank)
        if counts[world.rank] == 0:
            mine = [np.full_like(array, np.nan) for array in mine]
        count = tf.constant(counts[world.rank], tf.float64)
        examples, *reduced = step(count, *map(tf.constant, mine))
        assert float(examples) == sum(counts)
        for i, result in enumerate(reduced):
            every = [values(r)[i] for r in range(world.size)]
            expected = np.average(every, axis=0, weights=counts)
            np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
    assert exchange.counters.exchanges == 2
    assert exchange.counters.collectives == 2 * len(plan.buckets)
    exchange.close()


@pytest.mark.parametrize("bucket_bytes", [100, 2**20])
def test_host_memory(world: Communicator, bucket_bytes: int) -> None:
    check(world, GradientExchange(world, bucket_bytes=bucket_bytes), np)


@pytest.mark.gpu
def test_gpu_memory(world: Communicator) -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    if world.name != "nccl":
        pytest.skip("needs DISTKERAS_COMMUNICATOR=nccl and a GPU for every rank")
    check(world, GradientExchange(world), cupy)
