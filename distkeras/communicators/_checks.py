"""Argument checks that every communicator makes before it touches the network."""

from __future__ import annotations

from typing import Any
from typing import get_args

from distkeras._errors import CommunicatorError
from distkeras.communicators._base import Op

OPS: tuple[str, ...] = get_args(Op)


def check_op(op: str) -> None:
    """Raises `ValueError` unless `op` is one of the four operations."""
    if op not in OPS:
        raise ValueError(f"Expected op to be one of {', '.join(OPS)}. Received: {op!r}")


def check_root(root: int, size: int) -> None:
    """Raises `ValueError` unless `root` is a rank of a group of `size`."""
    if not 0 <= root < size:
        raise ValueError(
            f"Expected root to be a rank, 0 to {size - 1}. Received: {root!r}"
        )


def check_buffer(buffer: Any, *, writable: bool) -> None:
    """Raises unless `buffer` is a flat contiguous array that may be written to.

    Args:
        buffer: a NumPy or CuPy array.
        writable: whether the collective overwrites it.
    """
    flags = getattr(buffer, "flags", None)
    if flags is None or not hasattr(buffer, "dtype"):
        raise TypeError(
            "Expected a NumPy array (or a CuPy array on a device communicator). "
            f"Received: {type(buffer).__name__}"
        )
    if buffer.ndim != 1 or not flags.c_contiguous:
        raise ValueError(
            "Expected a flat, C-contiguous buffer; use array.reshape(-1) of a "
            f"contiguous array. Received: shape={tuple(buffer.shape)}, "
            f"strides={tuple(buffer.strides)}"
        )
    # CuPy's flags know no `writeable`: device arrays always are.
    if writable and not getattr(flags, "writeable", True):
        raise ValueError(
            "Expected a writable buffer, it is overwritten in place. "
            "Received: a read-only array; pass a copy of it."
        )


def check_open(closed: bool) -> None:
    """Raises `CommunicatorError` if the communicator was closed."""
    if closed:
        raise CommunicatorError(
            "Expected an open communicator. Received: one that was closed. Close it "
            "after its last use, or make another: `communicator.duplicate()` before "
            "that, or `distkeras.init()` for all ranks."
        )
