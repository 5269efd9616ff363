"""Which samples make up a step, and which of them are a rank's: plain arithmetic.

A step is a slice of one order that all ranks hold. With a global batch of B
samples, step k is `order[k * B : (k + 1) * B]`, and every rank takes one contiguous
part of it. So with any number of ranks the step is the batch that one process with
batch size B would take.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

Shuffle = bool | Literal["batch"]


def share(count: int, rank: int, size: int) -> tuple[int, int]:
    """Splits `count` samples as evenly as possible; the first ranks get one more.

    Args:
        count: number of samples, 0 or more.
        rank: whose share.
        size: number of ranks.

    Returns:
        Start and stop of the rank's contiguous share.

    Example:
        >>> [share(7, rank, 3) for rank in range(3)]
        [(0, 3), (3, 5), (5, 7)]
    """
    smaller, more = divmod(count, size)
    start = rank * smaller + min(rank, more)
    return start, start + smaller + (rank < more)


def generator(seed: int, pass_number: int, *more: int) -> np.random.Generator:
    """The random numbers of one pass over the data, the same on every rank."""
    sequence = np.random.SeedSequence([seed, pass_number, *more])
    return np.random.Generator(np.random.Philox(sequence))


def permutation(
    count: int, batch: int, shuffle: Shuffle, random: np.random.Generator
) -> np.ndarray:
    """The order of one pass over `count` samples.

    Args:
        count: number of samples.
        batch: the global batch size, used by `shuffle="batch"`.
        shuffle: False, True, or "batch": batches stay in order, and each is
            shuffled within, as Keras does.
        random: from `generator`.

    Returns:
        int64 array of shape `(count,)`.
    """
    order = np.arange(count, dtype=np.int64)
    if shuffle == "batch":
        full = count // batch * batch
        order[:full] = random.permuted(order[:full].reshape(-1, batch), axis=1).ravel()
        random.shuffle(order[full:])
    elif shuffle:
        random.shuffle(order)
    return order


def deal(
    order: np.ndarray, batch: int, rank: int, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """A rank's part of every step.

    Args:
        order: the pass' order, from `permutation`.
        batch: the global batch size.
        rank: whose part.
        size: number of ranks.

    Returns:
        The rank's part of the full steps, shape `(steps, rows)`, and of the short
        step at the end, shape `(rows,)`, possibly without rows.

    Example:
        >>> deal(np.arange(11), 4, rank=1, size=2)
        (array([[2, 3],
               [6, 7]]), array([10]))
    """
    steps = len(order) // batch
    start, stop = share(batch, rank, size)
    full = order[: steps * batch].reshape(steps, batch)[:, start:stop]
    rest = order[steps * batch :]
    start, stop = share(len(rest), rank, size)
    return np.ascontiguousarray(full), rest[start:stop]
