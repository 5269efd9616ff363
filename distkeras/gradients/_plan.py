"""The plan: which gradient lies in which bucket, at which offset, on all ranks.

A plan is made from the list of variables alone, so that ranks which agree on the
list (`Plan.rows`, compared by digest) agree on every message of every step without
talking about it again.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import re
from collections.abc import Sequence
from typing import Any
from typing import Literal

import numpy as np

from distkeras.communicators._base import ALIGNMENT

HEADER = 64
"""Bytes at the start of every bucket that carry the flags of the step."""

DEFAULT_BUCKET_BYTES = 8 * 2**20

Reduction = Literal["mean", "max"]


@dataclasses.dataclass(frozen=True)
class Gradient:
    """One variable's gradient, as every rank must see it.

    Attributes:
        path: the path of the variable, without Keras' numbering of layers.
        shape: of the gradient, fully known.
        dtype: NumPy's name of the gradient's dtype.
        exists: whether the loss depends on the variable.
        sparse: whether the backend hands it over as rows of an embedding.
        reduction: how it is combined over ranks: `"mean"`, weighted by examples,
            or `"max"` for scales that overwrite their variable (float8).
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    exists: bool = True
    sparse: bool = False
    reduction: Reduction = "mean"

    @property
    def row(self) -> str:
        """The line that ranks compare."""
        kind = "sparse gradient" if self.sparse else "gradient"
        kind = kind if self.exists else "no gradient"
        shape = "x".join(map(str, self.shape)) or "scalar"
        return f"{self.path}: {shape} {self.dtype}, {kind}, {self.reduction}"


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a gradient lies in its bucket; offset and length in elements."""

    index: int
    offset: int
    length: int
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Gradients that travel in one message.

    Attributes:
        dtype: of the elements on the wire.
        reduction: shared by all gradients of the bucket.
        placements: in the order of the buffer.
        length: elements of the whole buffer, header included.
    """

    dtype: np.dtype
    reduction: Reduction
    placements: tuple[Placement, ...]
    length: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer, header included."""
        return self.length * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Plan:
    """All gradients of one optimizer update: dense ones dealt into buckets."""

    gradients: tuple[Gradient, ...]
    buckets: tuple[Bucket, ...]

    @property
    def sparse(self) -> list[int]:
        """Numbers of the gradients that travel as rows, after the buckets."""
        return [n for n, g in enumerate(self.gradients) if g.exists and g.sparse]

    @property
    def rows(self) -> list[str]:
        """One line a variable, for comparison over ranks."""
        return [f"{n} {gradient.row}" for n, gradient in enumerate(self.gradients)]

    @functools.cached_property
    def digest(self) -> int:
        """A number of 60 bits, made of `rows`."""
        data = "\n".join(self.rows).encode()
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest()) >> 4

    @property
    def nbytes(self) -> int:
        """Bytes that one exchange reduces, rows of sparse gradients apart."""
        return sum(bucket.nbytes for bucket in self.buckets)


def canonical_path(variable: Any) -> str:
    """Returns a variable's path without the numbers that Keras appends to names.

    They count the layers that a process has made so far, and a rank that made another
    model before is none the worse for it.
    """
    path = getattr(variable, "path", None) or variable.name
    return re.sub(r"_\d+(?=[_/:]|$)", "", path)


def wire_dtype(dtype: str) -> np.dtype:
    """Returns the dtype in which gradients of `dtype` are summed on the host.

    Sixteen-bit floats are summed in float32: their sum over many ranks would lose
    the digits that an average needs.
    """
    return np.dtype(np.float64 if dtype == "float64" else np.float32)


def make_plan(
    gradients: Sequence[Gradient],
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    *,
    first_bytes: int | None = None,
) -> Plan:
    """Deals gradients into buckets.

    The last variable comes first, since the backward pass finishes it first
    (Li et al. 2020, "PyTorch Distributed", arXiv:2006.15704, section 3.2.3).

    Args:
        gradients: one entry a trainable variable, in the optimizer's order.
        bucket_bytes: a bucket is closed when the next gradient would make it
            larger; a larger gradient gets a bucket of its own.
        first_bytes: the same for the first bucket, if it is to be smaller.

    Returns:
        The plan.

    Raises:
        ValueError: if `bucket_bytes` is not positive, if no gradient exists, or if one
            is complex.

    Example:
        >>> plan = make_plan([Gradient("a", (3,), "float32"),
        ...                   Gradient("b", (2, 2), "float32")])
        >>> [(p.index, p.offset) for p in plan.buckets[0].placements]
        [(1, 16), (0, 32)]
    """
    check_bucket_bytes(bucket_bytes)
    _check_real(gradients)
    first = min(bucket_bytes, first_bytes or bucket_bytes)
    open_: dict[tuple[np.dtype, Reduction], list[Placement]] = {}
    ends: dict[tuple[np.dtype, Reduction], int] = {}
    buckets: list[Bucket] = []

    def close(key: tuple[np.dtype, Reduction]) -> None:
        dtype, reduction = key
        buckets.append(Bucket(dtype, reduction, tuple(open_.pop(key)), ends[key]))

    for index in reversed(range(len(gradients))):
        gradient = gradients[index]
        if not gradient.exists or gradient.sparse:
            continue
        dtype = wire_dtype(gradient.dtype)
        key = (dtype, gradient.reduction)
        length = math.prod(gradient.shape)
        step = _aligned(length, dtype)
        limit = bucket_bytes if buckets else first
        if key in open_ and (ends[key] + step) * dtype.itemsize > limit:
            close(key)
        if key not in open_:
            open_[key] = []
            ends[key] = HEADER // dtype.itemsize
        open_[key].append(Placement(index, ends[key], length, gradient.shape))
        ends[key] += step
    for key in list(open_):
        close(key)
    plan = Plan(tuple(gradients), tuple(buckets))
    if not buckets and not plan.sparse:
        raise ValueError(
            "Expected a gradient for at least one trainable variable. Received: "
            f"none for any of {[gradient.path for gradient in gradients]}. Does the "
            "loss depend on the model's outputs?"
        )
    return plan


def _check_real(gradients: Sequence[Gradient]) -> None:
    for gradient in gradients:
        if gradient.exists and gradient.dtype.startswith("complex"):
            raise ValueError(
                "Expected gradients of real numbers. Received: one of "
                f"{gradient.dtype} for the variable {gradient.path!r}. Keep its real "
                "and imaginary part in a variable each, and make the complex number "
                "of them (`tf.complex`) where it is used."
            )


def check_bucket_bytes(bucket_bytes: int | None) -> None:
    """Raises ValueError unless this is a size of buckets, or None."""
    if bucket_bytes is None:
        return
    whole = isinstance(bucket_bytes, (int, np.integer))
    if not whole or isinstance(bucket_bytes, bool) or bucket_bytes <= 0:
        raise ValueError(
            "Expected `bucket_bytes` to be a whole number of bytes from 1 up, or None. "
            f"Received: bucket_bytes={bucket_bytes!r}. None, the default, chooses by a "
            "measurement."
        )


def _aligned(length: int, dtype: np.dtype) -> int:
    """Rounds a number of elements up to whole alignment units."""
    unit = ALIGNMENT // dtype.itemsize
    return -(-length // unit) * unit
