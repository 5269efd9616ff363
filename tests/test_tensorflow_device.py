"""The hand-over of fused buckets, on host memory and, where there is one, on a GPU."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import assert_equal_weights
from equivalence import build
from equivalence import samples

from distkeras.backends._tensorflow_device import DeviceHandOver
from distkeras.backends._tensorflow_device import _aligned_empty
from distkeras.backends._tensorflow_device import allreduce_on_device
from distkeras.backends._tensorflow_exchange import TensorFlowExchange
from distkeras.backends._tensorflow_step import make_train_function
from distkeras.communicators import Communicator
from distkeras.data import shard
from distkeras.gradients import Gradient
from distkeras.gradients import GradientExchange
from distkeras.gradients import make_wire

pytestmark = pytest.mark.dealt

SHAPES = [(3,), (2, 5), (), (7, 3)]
ALIKE = [(8,)] * 4
NOT_KNOWN = tf.constant(0.0, tf.float64)  # when a step's data had come


def values(rank: int, shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    generator = np.random.default_rng(rank)
    return [generator.normal(size=shape).astype("float32") for shape in shapes]


def check(
    world: Communicator,
    exchange: GradientExchange,
    arrays: object,
    shapes: list[tuple[int, ...]] = SHAPES,
) -> None:
    hand_over = DeviceHandOver(exchange, arrays)
    plan = exchange.plan(
        (1,), [Gradient(f"v{i}", s, "float32") for i, s in enumerate(shapes)]
    )
    counts = [2.0 * r for r in range(world.size)]  # rank 0 has no example
    counts[-1] += world.size == 1

    def on_host(number: int, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        raise AssertionError("no scales here")

    @tf.function(autograph=False)
    def step(count: tf.Tensor, *gradients: tf.Tensor) -> list[tf.Tensor]:
        reduced, examples = allreduce_on_device(
            hand_over,
            exchange,
            plan,
            list(gradients),
            [0, 1, 2, 3],
            count,
            NOT_KNOWN,
            on_host,
        )
        return [examples, *reduced]

    for _ in range(2):
        mine = values(world.rank, shapes)
        if counts[world.rank] == 0:
            mine = [np.full_like(array, np.nan) for array in mine]
        count = tf.constant(counts[world.rank], tf.float64)
        examples, *reduced = step(count, *map(tf.constant, mine))
        assert float(examples) == sum(counts)
        for i, result in enumerate(reduced):
            every = [values(r, shapes)[i] for r in range(world.size)]
            expected = np.average(every, axis=0, weights=counts)
            close = 1e-5 if exchange.wire is None else 4e-3
            np.testing.assert_allclose(result, expected, rtol=close, atol=close / 10)
    assert exchange.counters.exchanges == 2
    assert exchange.counters.collectives == 2 * len(plan.buckets)
    exchange.close()


@pytest.mark.parametrize("bucket_bytes", [100, 2**20])
def test_host_memory(world: Communicator, bucket_bytes: int) -> None:
    check(world, GradientExchange(world, bucket_bytes=bucket_bytes), np)


def test_buckets_of_one_length(world: Communicator) -> None:
    """They shared a buffer once, and the second bucket's sum stood in the first."""
    check(world, GradientExchange(world, bucket_bytes=100), np, ALIKE)


def test_half_the_bytes(world: Communicator) -> None:
    exchange = GradientExchange(world, wire=make_wire("float16"))
    check(world, exchange, np)
    assert exchange.counters.bytes == 2 * 2 * sum(map(math.prod, SHAPES))


def test_errors_cannot_be_fed_back(world: Communicator) -> None:
    exchange = GradientExchange(world, wire=make_wire("float16", error_feedback=True))
    with pytest.raises(ValueError, match="error_feedback=False"):
        TensorFlowExchange(exchange, DeviceHandOver(exchange, np))
    exchange.close()


@pytest.mark.parametrize("accumulation", [None, 2])
@pytest.mark.parametrize("jit_compile", [False, True])
def test_training_by_hand_over(
    world: Communicator, jit_compile: bool, accumulation: int | None
) -> None:
    """The whole step, on host memory, in the way it takes with NCCL."""

    def adam() -> keras.optimizers.Optimizer:
        return keras.optimizers.Adam(0.01, gradient_accumulation_steps=accumulation)

    x, y = samples(24 * world.size)
    single = build(adam, jit_compile=jit_compile)
    single.fit(x, y, batch_size=4 * world.size, shuffle=False, verbose=0)
    model = build(adam, jit_compile=jit_compile)
    model.optimizer.build(model.trainable_variables)
    exchange = GradientExchange(world)
    graph = TensorFlowExchange(exchange, DeviceHandOver(exchange, np))
    data = shard(x, y, communicator=world, batch_size=4, shuffle=False)
    model._symbolic_build(data_batch=next(iter(data.get_tf_dataset())))
    model.train_function = make_train_function(model, graph, uneven=False)
    model.fit(data, shuffle=False, verbose=0)
    assert_equal_weights(model, single)
    assert exchange.counters.exchanges == 6 // (accumulation or 1)
    assert exchange.counters.examples == len(x)
    exchange.close()


def test_a_scale_comes_last(world: Communicator) -> None:
    """It travels on the host, and its step was counted twice."""
    exchange = GradientExchange(world)
    hand_over = DeviceHandOver(exchange, np)
    scale = Gradient("scale", (1,), "float32", reduction="max")
    plan = exchange.plan((1,), [scale, Gradient("v", (9,), "float32")])
    assert plan.buckets[-1].reduction == "max"

    def on_host(number: int, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        arrays = [tensor.numpy() for tensor in tensors]
        return [tf.constant(a) for a in exchange.reduce(plan, number, 2.0, arrays)]

    for _ in range(3):
        mine = [tf.fill((1,), world.rank + 1.0), tf.fill((9,), world.rank + 1.0)]
        (largest, mean), examples = allreduce_on_device(
            hand_over,
            exchange,
            plan,
            mine,
            [0, 1],
            tf.constant(2.0, "float64"),
            NOT_KNOWN,
            on_host,
        )
        assert float(examples) == 2 * world.size
        assert float(largest[0]) == world.size
        np.testing.assert_allclose(mean, np.full(9, (world.size + 1) / 2))
    assert exchange.counters.exchanges == 3
    assert exchange.counters.examples == 3 * 2 * world.size
    exchange.close()


class OnGpu:
    """Stands in for a CuPy array: NumPy's, with the number of a GPU."""

    def __init__(self, array: np.ndarray, number: int) -> None:
        self.array = array
        self.data = SimpleNamespace(ptr=array.ctypes.data, device_id=number)
        self.shape, self.dtype, self.nbytes = array.shape, array.dtype, array.nbytes

    def __setitem__(self, where: Any, other: OnGpu) -> None:
        assert other.data.device_id == self.data.device_id
        self.array[where] = other.array

    def __dlpack__(self) -> Any:
        assert self.data.device_id == 0  # TensorFlow has been shown one GPU alone
        return self.array.__dlpack__()


class StandIn:
    """Stands in for CuPy where TensorFlow's GPU 0 is CUDA's GPU 3."""

    def __init__(self) -> None:
        self.current = 0
        self.cuda = SimpleNamespace(
            Device=self.device,
            UnownedMemory=lambda ptr, size, owner, number: (ptr, owner, number),
            MemoryPointer=lambda memory, offset: memory,
        )

    @contextlib.contextmanager
    def device(self, number: int) -> Iterator[None]:
        before, self.current = self.current, number
        yield
        self.current = before

    def from_dlpack(self, capsule: Any) -> OnGpu:
        assert capsule.__dlpack_device__() == (2, 3)  # else GPU 0 would be opened
        tensor = tf.experimental.dlpack.from_dlpack(capsule.__dlpack__())
        return OnGpu(tensor.numpy(), 0)

    def empty_like(self, like: OnGpu) -> OnGpu:
        assert self.current == like.data.device_id
        return OnGpu(_aligned_empty(np, like.array), self.current)

    def ndarray(self, shape: tuple[int, ...], dtype: Any, pointer: Any) -> OnGpu:
        ptr, owner, number = pointer
        assert (ptr, shape, dtype) == (owner.data.ptr, owner.shape, owner.dtype)
        return OnGpu(owner.array, number)


def test_gpus_have_other_numbers_in_tensorflow(
    world: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under plain mpiexec a rank sees all GPUs of its node, TensorFlow one of them."""
    exchange = GradientExchange(world)
    communicator = exchange.communicator
    on_host = communicator.allreduce
    arrays, connected = StandIn(), []

    def allreduce(buffer: Any, op: Any = "sum") -> None:
        if isinstance(buffer, OnGpu):
            assert buffer.data.device_id == arrays.current == 3
            buffer = buffer.array
        on_host(buffer, op)

    monkeypatch.setattr(communicator, "allreduce", allreduce)
    monkeypatch.setattr(communicator, "device", 3, raising=False)
    monkeypatch.setattr(
        communicator, "connect", lambda: connected.append(1), raising=False
    )
    check(world, exchange, arrays)
    assert connected == [1]  # before the first step


def test_exchanges_of_one_step_take_turns(world: Communicator) -> None:
    """NCCL wants one order on all ranks for all of a device."""
    log = []

    class Slow(DeviceHandOver):
        def sum(self, *arguments: Any) -> tf.Tensor:
            log.append("begins")
            time.sleep(0.1)
            result = super().sum(*arguments)
            log.append("ends")
            return result

    def accumulating() -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)

    exchanges = [GradientExchange(world) for _ in range(2)]
    graphs = [TensorFlowExchange(e, Slow(e, np)) for e in exchanges]
    models = [build(accumulating) for _ in graphs]

    @tf.function(autograph=False)
    def step() -> None:
        for graph, model in zip(graphs, models, strict=True):
            variables = model.trainable_variables
            gradients = [tf.ones(v.shape) for v in variables]
            optimizer = model.optimizer
            graph.apply(optimizer.apply, optimizer, gradients, variables)

    for model in models:
        model.optimizer.build(model.trainable_variables)
    for _ in range(2):
        step()
    assert log == ["begins", "ends"] * 2
    for exchange in exchanges:
        exchange.close()


@pytest.mark.gpu
def test_gpu_memory(world: Communicator) -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    if world.name != "nccl":
        pytest.skip("needs DISTKERAS_COMMUNICATOR=nccl and a GPU for every rank")
    check(world, GradientExchange(world), cupy)
