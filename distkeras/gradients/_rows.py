"""Rows of an embedding's gradient: merged, packed into bytes, and unpacked.

A sparse gradient is a list of rows, with the index of each, in which an index may
come more than once. Whether such rows may be summed is the optimizer's affair: see
`distkeras.backends.indifferent_to_duplicates`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

_UNIT = 8
"""Bytes to which each array is padded, so that all can be viewed where they lie."""


Kind = tuple[tuple[int, ...], np.dtype]
"""Shape of a variable, and dtype of its gradient on the wire."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """Some rows of a gradient.

    Attributes:
        indices: (n,) int64, of the rows within the variable.
        values: (n, ...) of the wire's dtype.
    """

    indices: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.indices)

    def merged(self) -> Rows:
        """Returns each index once, in ascending order, with the sum of its rows."""
        order = np.argsort(self.indices, kind="stable")
        indices, first = np.unique(self.indices[order], return_index=True)
        if not len(indices):
            return self
        return Rows(indices, np.add.reduceat(self.values[order], first, axis=0))

    def dense(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Returns the gradient of a variable of `shape`; rows must be merged."""
        result = np.zeros(shape, dtype)
        result[self.indices] = self.values
        return result


def weighted(rows: Rows, examples: float, dtype: np.dtype) -> Rows:
    """Returns the rows times `examples`; none where there are no examples."""
    if examples == 0:
        # Not by multiplication: the rows of an empty batch may hold NaN.
        rows = Rows(rows.indices[:0], rows.values[:0])
    values = np.multiply(rows.values, dtype.type(examples), dtype=dtype)
    return Rows(rows.indices.astype(np.int64, copy=False), values)


def nonzero_rows(dense: np.ndarray) -> Rows:
    """Returns the rows of a dense gradient that are not zero throughout."""
    used = (dense.reshape(len(dense), -1) != 0).any(axis=1)  # NaN is not 0
    indices = np.flatnonzero(used)
    return Rows(indices, dense[indices])


def joined(parts: Sequence[Rows]) -> Rows:
    """Returns all rows of all parts, in their order."""
    return Rows(
        np.concatenate([part.indices for part in parts]),
        np.concatenate([part.values for part in parts]),
    )


def split_dense(flat: np.ndarray, shapes: Sequence[tuple[int, ...]]) -> list[Rows]:
    """Returns all rows of dense gradients that lie in `flat`, one after another."""
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    return [
        Rows(np.arange(shape[0]), part.reshape(shape))
        for part, shape in zip(np.split(flat, ends[:-1]), shapes, strict=True)
    ]


def dense_bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Returns what a dense gradient takes on the wire, in bytes."""
    return math.prod(shape) * dtype.itemsize


def row_bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Returns what one row, with its index, takes on the wire, in bytes."""
    return 8 + math.prod(shape[1:]) * dtype.itemsize


def pack(head: np.ndarray, pieces: Sequence[Rows]) -> np.ndarray:
    """Returns `head` (float64) and the rows of several variables as flat bytes."""
    arrays = [head]
    for piece in pieces:
        arrays += [piece.indices, piece.values]
    data = np.zeros(sum(_padded(a.nbytes) for a in arrays), np.uint8)
    start = 0
    for array in arrays:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        data[start : start + flat.size] = flat
        start += _padded(flat.size)
    return data


def unpack(
    data: np.ndarray, lengths: Sequence[int], kinds: Sequence[Kind]
) -> list[Rows]:
    """Returns views of the rows that `pack` put behind the head.

    Args:
        data: flat bytes, without the head.
        lengths: how many rows of each variable.
        kinds: shape of the variables, and dtype of their rows on the wire.
    """
    pieces = []
    start = 0
    for length, (shape, dtype) in zip(lengths, kinds, strict=True):
        indices = data[start : start + length * 8].view(np.int64)
        start += indices.nbytes
        size = length * math.prod(shape[1:]) * dtype.itemsize
        values = data[start : start + size].view(dtype)
        start += _padded(size)
        pieces.append(Rows(indices, values.reshape(length, *shape[1:])))
    return pieces


def _padded(size: int) -> int:
    return -(-size // _UNIT) * _UNIT
