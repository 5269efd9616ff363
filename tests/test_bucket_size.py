"""The size of buckets: chosen alike on all ranks, and never at the price of bits."""

from __future__ import annotations

import logging
import time
from typing import Any

import keras
import numpy as np
import pytest

import distkeras
from distkeras.communicators import Communicator
from distkeras.communicators import HierarchicalCommunicator
from distkeras.communicators import MPICommunicator
from distkeras.communicators import SharedMemoryCommunicator
from distkeras.gradients import DEFAULT_BUCKET_BYTES
from distkeras.gradients import Gradient
from distkeras.gradients import GradientExchange
from distkeras.gradients import make_plan
from distkeras.gradients._bucket_size import choose_bucket_bytes

MIB = 2**20


def test_first_bucket_is_small() -> None:
    gradients = [Gradient(f"{n}", (2**18,), "float32") for n in range(12)]  # 1 MiB
    plan = make_plan(gradients, 4 * MIB + 64, first_bytes=MIB + 64)
    assert [len(b.placements) for b in plan.buckets] == [1, 4, 4, 3]
    plan = make_plan(gradients, 2 * MIB + 64, first_bytes=8 * MIB)
    assert [len(b.placements) for b in plan.buckets] == [2] * 6


def test_a_measured_size_is_the_same_on_all_ranks(world: Communicator) -> None:
    own = world.duplicate()
    chosen = choose_bucket_bytes(own)
    own.close()
    assert set(world.allgather_object(chosen)) == {chosen}
    assert MIB <= chosen.bytes <= 32 * MIB
    assert chosen.bytes.bit_count() == 1
    if world.size > 1:
        assert own.fixed_order and "MB/s" in chosen.reason  # shared memory


def test_a_measurement_that_says_nothing(
    world: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small messages that took longer than large ones gave bandwidths of 1 PB/s."""
    own = world.duplicate()
    quick = own.allreduce

    def allreduce(buffer: np.ndarray, *args: Any) -> None:
        if buffer.nbytes == 2**12 and own.rank == own.size - 1:
            time.sleep(0.05)
        quick(buffer, *args)

    monkeypatch.setattr(own, "allreduce", allreduce)
    chosen = choose_bucket_bytes(own)
    own.close()
    assert set(world.allgather_object(chosen)) == {chosen}
    assert chosen.bytes == DEFAULT_BUCKET_BYTES
    assert "MB/s" not in chosen.reason
    if world.size > 1:
        assert "1024 KiB took no longer than 4 KiB" in chosen.reason


def test_what_would_not_reproduce_is_not_measured(world: Communicator) -> None:
    own = MPICommunicator()
    chosen = choose_bucket_bytes(own)
    own.close()
    assert own.fixed_order == (world.size <= 2)
    if not own.fixed_order:
        assert chosen.bytes == DEFAULT_BUCKET_BYTES
        assert "would not reproduce" in chosen.reason


@pytest.mark.parametrize("kind", (SharedMemoryCommunicator, HierarchicalCommunicator))
def test_without_shared_memory_the_order_is_that_of_mpi(
    world: Communicator, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SharedMemoryCommunicator, "_allocate", lambda *_: None)
    own = kind()
    chosen = choose_bucket_bytes(own)
    assert own.fixed_order == (world.size <= 2)
    own.close()
    assert ("would not reproduce" in chosen.reason) == (world.size > 2)


@pytest.mark.parametrize("bucket_bytes", (0, -1, "auto", True, 1e6))
def test_sizes_that_are_none(bucket_bytes: Any) -> None:
    with pytest.raises(
        ValueError, match="a whole number of bytes from 1 up, or None.*Received"
    ):
        distkeras.Trainer(keras.Sequential(), bucket_bytes=bucket_bytes)


def test_sizes_may_be_numpys() -> None:
    size = np.int64(1 << 20)
    assert make_plan([Gradient("a", (3,), "float32")], size).buckets[0].length == 32


@pytest.mark.parametrize("nodes", ("one", "two"))
def test_cuts_leave_the_bits_where_the_order_is_fixed(
    world: Communicator, nodes: str
) -> None:
    if nodes == "one":
        own = world.duplicate()
    else:
        own = HierarchicalCommunicator(
            node_of_rank=[rank % 2 for rank in range(world.size)]
        )
    assert own.fixed_order
    values = np.random.default_rng(world.rank).normal(size=300_000)
    whole = values.astype(np.float32)
    parts = np.split(whole.copy(), [77, 1000, 140_001])
    own.allreduce(whole)
    for part in parts:
        own.allreduce(part)
    own.close()
    assert np.concatenate(parts).tobytes() == whole.tobytes()


def test_what_was_chosen_is_logged_and_can_be_given(
    world: Communicator, caplog: pytest.LogCaptureFixture
) -> None:
    gradients = [Gradient(f"{n}", (2**18,), "float32") for n in range(9)]
    with caplog.at_level(logging.INFO, "distkeras"):
        exchange = GradientExchange(world)
        plan = exchange.plan((1,), gradients)
        exchange.close()
    assert len(plan.buckets[0].placements) == 1
    assert f"gradients of 9.4 MB travel in {len(plan.buckets)} bucket(s)" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "distkeras"):
        exchange = GradientExchange(world, bucket_bytes=2**30)
        assert len(exchange.plan((1,), gradients).buckets) == 1
        exchange.close()
    assert not caplog.text
