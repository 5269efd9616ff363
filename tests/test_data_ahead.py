"""What works ahead of the step ends when it is told to."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest

from distkeras.communicators import Communicator
from distkeras.data import shard

pytestmark = [pytest.mark.tensorflow, pytest.mark.dealt]

pytest.importorskip("tensorflow")

STEPS = 40


class Batches(keras.utils.PyDataset):
    """Batches of one row a rank."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return np.full((2, 3), index, "float32"), np.zeros(2, "float32")


def batches(count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    yield from (Batches(count)[index] for index in range(count))


@pytest.mark.parametrize("kind", ("arrays", "PyDataset", "generator"))
def test_iterators_left_in_the_middle_are_let_go_at_once(
    world: Communicator, kind: str
) -> None:
    """Each waited for a thread that slept, as long as it had lived."""
    count = STEPS * world.size
    data: dict[str, Any] = {
        "arrays": lambda: shard(
            np.zeros((2 * count, 3)),
            np.zeros(2 * count),
            communicator=world,
            batch_size=2,
        ),
        "PyDataset": lambda: shard(Batches(count), communicator=world),
        "generator": lambda: shard(
            batches(count), communicator=world, steps_per_epoch=STEPS
        ),
    }
    datasets = [data[kind]().get_tf_dataset() for _ in range(8)]
    iterators = [iter(dataset) for dataset in datasets]
    for iterator in iterators:
        next(iterator)
    time.sleep(1.4)  # it sleeps until 2.55 s have passed since the beginning
    start = time.monotonic()
    iterators.clear()
    del iterator
    assert time.monotonic() - start < 0.7
