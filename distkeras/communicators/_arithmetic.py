"""Combining arrays so that all ranks hold the same bits, without a word said."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from distkeras.communicators._base import Op

UFUNCS: dict[Op, np.ufunc] = {
    "sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}

Quiet = Callable[..., Any]
"""Calls its first argument with the others."""


def quiet() -> Quiet:
    """Returns a function that calls another without NumPy's warnings of overflow.

    Infinities and NaNs are what the ranks' data make them: other libraries do not
    warn of them either. To be used by one thread at a time.

    Example:
        >>> bool(quiet()(np.multiply, np.float32(3e38), np.float32(2)) == np.inf)
        True
    """
    if int(np.__version__.partition(".")[0]) < 2:
        return _quiet_slowly
    # Ten times as fast as `np.errstate`.
    context = contextvars.Context()
    context.run(np.seterr, all="ignore")
    return context.run


def _quiet_slowly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with np.errstate(all="ignore"):
        return function(*args, **kwargs)


def copy_bytes(source: np.ndarray, target: np.ndarray) -> None:
    """Copies flat arrays of bytes that do not overlap.

    Not by the C library: on some processors (AMD's Zen 3) its copy becomes ten times
    slower when the target lies a few bytes further in its page than the source, and
    arrays of NumPy and whole pages do lie so.
    """
    np.bitwise_or(source, source, target)


@functools.cache
def place_matters(ufunc: np.ufunc, dtype: np.dtype) -> bool:
    """Whether a result's bits depend on where it is stored.

    Which of two NaNs an addition returns, or which of two zeros a maximum, depends on
    the order in which the processor gets its operands. That is fixed by the code that
    runs; but code may differ for the first or last elements, or for arrays that are
    not aligned. Tried here with all pairs of special values.

    Args:
        ufunc: a function of two arguments.
        dtype: of floating point.
    """
    if dtype.kind != "f":
        return False
    special = np.array([np.nan, -np.nan, 0.0, -0.0, 1.0, -1.0, np.inf, -np.inf], dtype)
    special = np.concatenate([special, _other_nans(dtype)])
    count = len(special)
    first = np.tile(np.repeat(special, count), 7)
    second = np.tile(special, count * 7)
    room = np.zeros(len(first) + 64, dtype)
    start = (-room.ctypes.data % 64) // dtype.itemsize
    with np.errstate(all="ignore"):
        expected = ufunc(first, second).tobytes()
        for shift in range(start, start + 64 // dtype.itemsize):
            out = room[shift : shift + len(first)]
            ufunc(first, second, out=out)
            if out.tobytes() != expected:
                return True
            out[...] = first
            ufunc(out, second, out=out)
            if out.tobytes() != expected:
                return True
            out[...] = second
            ufunc(first, out, out=out)
            if out.tobytes() != expected:
                return True
    return False


def _other_nans(dtype: np.dtype) -> np.ndarray:
    """Returns two NaNs that differ in the bits that have no meaning."""
    pair = np.full(2, np.nan, dtype)
    pair.view(f"u{dtype.itemsize}")[...] += np.array([1, 2], f"u{dtype.itemsize}")
    return pair
