"""Kinds of input that tests deal to ranks, and what one process sees of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import samples

COUNT, BATCH = 103, 4
"""Samples, and how many a rank takes a step: the last batch is shorter."""


def rank_batches(count: int = COUNT) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the data in batches of a rank, the last one shorter."""
    x, y = samples(count)
    return [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, count, BATCH)]


def global_batches(
    size: int, batches: list[tuple[np.ndarray, ...]]
) -> list[tuple[np.ndarray, ...]]:
    """Returns what one process sees when `size` batches are dealt a step."""
    return [
        tuple(map(np.concatenate, zip(*batches[k : k + size], strict=True)))
        for k in range(0, len(batches), size)
    ]


def from_list(batches: list[tuple[np.ndarray, ...]]) -> tf.data.Dataset:
    """Returns a data set of batches whose number TensorFlow knows."""
    signature = tuple(
        tf.TensorSpec((None, *part.shape[1:]), part.dtype) for part in batches[0]
    )
    dataset = tf.data.Dataset.from_generator(
        lambda: iter(batches), output_signature=signature
    )
    return dataset.apply(tf.data.experimental.assert_cardinality(len(batches)))


class Batches(keras.utils.PyDataset):
    """A PyDataset of ready-made batches."""

    def __init__(self, batches: list[tuple[np.ndarray, ...]], **options: Any) -> None:
        super().__init__(**options)
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        return self.batches[index]


def finite(batches: list[Any]) -> Any:
    return from_list(batches)


def unknown(batches: list[Any]) -> Any:
    return from_list(batches).filter(tf.autograph.experimental.do_not_convert(keep))


def keep(*_: Any) -> tf.Tensor:
    return tf.constant(True)


def drop_remainder(batches: list[Any]) -> Any:
    x, y = map(np.concatenate, zip(*batches, strict=True))
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    return dataset.batch(BATCH, drop_remainder=True)


def py_dataset(batches: list[Any]) -> Any:
    return Batches(batches)


def py_dataset_workers(batches: list[Any]) -> Any:
    return Batches(batches, workers=2)


def torch_loader(batches: list[Any]) -> Any:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x, y = map(np.concatenate, zip(*batches, strict=True))
    data = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
    return torch.utils.data.DataLoader(data, batch_size=BATCH)


def generator(batches: list[Any]) -> Iterator[Any]:
    yield from batches
