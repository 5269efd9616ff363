"""Digests of data, to notice ranks that hold something else."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

# All of what is smaller; of what is larger as many rows, spread over it. They are
# digested in some hundredths of a second.
_BYTES = 8 << 20
_FEWEST_ROWS = 16
_MOST_CALLS = 64


def digest(data: Any) -> str | None:
    """A digest of the data, or where that is large of many rows spread over it.

    Args:
        data: an array, a pandas frame or series, a dense or ragged tensor, a
            list or tuple.

    Returns:
        Hexadecimal digits, or None where rows are not cheap to take.
    """
    if hasattr(data, "row_splits"):  # ragged tensors
        return f"{digest(data.row_splits)} {digest(data.flat_values)}"
    count = len(data) if isinstance(data, Sequence) else int(data.shape[0])
    most = min(count, max(_BYTES // _row_bytes(data), _FEWEST_ROWS))
    picked = np.linspace(0, max(count - 1, 0), most).astype(int).tolist()
    if isinstance(data, np.ndarray):
        rows = data if most == count else data[picked]
    elif isinstance(data, Sequence):
        rows = np.array([_plain(data[i]) for i in picked], dtype=object)
    elif hasattr(data, "iloc"):
        rows = data.iloc[picked].to_numpy()
    elif hasattr(data, "__array__"):  # dense tensors, of which each row is a call
        few = picked[:: max(most // _MOST_CALLS, 1)]
        whole = most == count
        rows = _on_host(data) if whole else np.array([_on_host(data[i]) for i in few])
    else:
        return None
    if rows.dtype == object:
        content = repr(rows.tolist()).encode()
    else:
        content = np.ascontiguousarray(rows).tobytes()
    head = f"{count} {rows.dtype}".encode()
    return hashlib.blake2b(head + content, digest_size=8).hexdigest()


def _row_bytes(data: Any) -> int:
    """About how many bytes a row has, at least 1; of Python objects a guess."""
    if isinstance(data, np.ndarray) and data.dtype != object:
        return max(data.nbytes // max(len(data), 1), 1)
    shape = getattr(data, "shape", (0,))
    # In lists and frames objects are turned to text, each of some bytes.
    each = 8 if hasattr(data, "__array__") and not hasattr(data, "iloc") else 64
    return each * math.prod(int(n or 1) for n in shape[1:]) or 1


def _on_host(row: Any) -> np.ndarray:
    return np.asarray(row.detach().cpu() if hasattr(row, "detach") else row)


def _plain(item: Any) -> Any:
    """What of a list's item is the same on every machine."""
    if isinstance(item, str | os.PathLike):
        return os.path.basename(item)
    return item if isinstance(item, int | float | bool | bytes) else type(item).__name__
