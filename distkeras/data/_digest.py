"""Digests of data, to notice ranks that hold something else."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

# Enough to notice another order or another file, few enough to cost nothing.
_ROWS = 16


def digest(data: Any) -> str | None:
    """A digest of a few rows, spread over the data.

    Args:
        data: an array, a pandas frame or series, a dense tensor, a list or tuple.

    Returns:
        Hexadecimal digits, or None where rows are not cheap to take.
    """
    count = len(data) if isinstance(data, Sequence) else int(data.shape[0])
    picked = np.unique(np.linspace(0, max(count - 1, 0), _ROWS).astype(np.int64))
    picked = picked[:count]
    if isinstance(data, np.ndarray):
        rows = data[picked]
    elif isinstance(data, Sequence):
        rows = np.array([_plain(data[i]) for i in picked], dtype=object)
    elif hasattr(data, "iloc"):
        rows = data.iloc[picked].to_numpy()
    elif hasattr(data, "__array__"):  # dense tensors
        rows = np.array([_on_host(data[int(i)]) for i in picked])
    else:
        return None
    if rows.dtype == object:
        content = repr(rows.tolist()).encode()
    else:
        content = np.ascontiguousarray(rows).tobytes()
    head = f"{count} {rows.dtype}".encode()
    return hashlib.blake2b(head + content, digest_size=8).hexdigest()


def _on_host(row: Any) -> np.ndarray:
    return np.asarray(row.detach().cpu() if hasattr(row, "detach") else row)


def _plain(item: Any) -> Any:
    """What of a list's item is the same on every machine."""
    if isinstance(item, str | os.PathLike):
        return os.path.basename(item)
    return item if isinstance(item, int | float | bool | bytes) else type(item).__name__
