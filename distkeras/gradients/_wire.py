"""What a bucket looks like on the wire: as it is, or in half the bytes.

A codec is a `Wire`. It gets the buffer of one bucket, which holds this rank's share of
the mean, and leaves the sum over ranks in it; how many bytes travel is its affair.
"""

from __future__ import annotations

import abc
from collections.abc import Hashable
from typing import Any
from typing import Literal

import ml_dtypes
import numpy as np

from distkeras.communicators import Communicator
from distkeras.communicators import aligned_zeros
from distkeras.gradients._plan import Bucket

Compression = Literal["float16", "bfloat16"]

_DTYPES: dict[str, np.dtype] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


class Wire(abc.ABC):
    """Sums buffers over ranks in a form of its own.

    Attributes:
        error_feedback: whether something is kept in host memory from step to step.
        errors: what is, by the key of the bucket.
    """

    error_feedback = False

    def __init__(self) -> None:
        self.errors: dict[Hashable, np.ndarray] = {}

    @abc.abstractmethod
    def describe(self) -> str:
        """Returns what it does to gradients, in a few words; the same on all ranks."""

    @abc.abstractmethod
    def takes(self, bucket: Bucket) -> bool:
        """Returns whether the bucket goes this way; the same on all ranks."""

    @abc.abstractmethod
    def dtype(self, bucket: Bucket) -> np.dtype:
        """Returns in which dtype the elements of a bucket travel."""

    @abc.abstractmethod
    def scale(self, bucket: Bucket, size: int) -> float:
        """Returns by what shares are multiplied while they travel.

        Args:
            bucket: which goes this way or not.
            size: number of ranks.
        """

    @abc.abstractmethod
    def multiplier(self, size: int) -> float:
        """Returns what `errors` are multiplied by on so many ranks."""

    def forget(self, key: Hashable) -> None:
        """Lets go of what is kept under a key of `allreduce`, if anything is."""
        self.errors.pop(key, None)

    @abc.abstractmethod
    def allreduce(
        self, communicator: Communicator, key: Hashable, buffer: np.ndarray
    ) -> int:
        """Sums `buffer` over ranks, in place; collective.

        Args:
            communicator: the ranks.
            key: of the bucket: what is kept from step to step is kept under it.
            buffer: this rank's share, float32, one-dimensional.

        Returns:
            The bytes that this rank handed to the communicator.
        """


class HalfPrecision(Wire):
    """Rounds what float32 gradients send to sixteen bits.

    Sums are made in float32, by all host communicators, and rounded once more, between
    nodes once in addition. A rank's
    share of the mean is smaller than its gradient by the number of ranks; it travels
    multiplied by the power of two next to that, so that float16 does not lose on many
    ranks what it could hold on one. A mean of more than 65504 / ranks becomes infinite:
    a `LossScaleOptimizer` skips such a step and lowers its scale.

    With error feedback each rank keeps what rounding took from its share and adds it
    to its next one, so that errors do not add up over steps (Seide et al. 2014, "1-bit
    stochastic gradient descent", Interspeech; Karimireddy et al. 2019,
    arXiv:1901.09847). It costs a float32 buffer more a bucket, and makes a step depend
    on the ones before.

    Args:
        dtype: "float16", of 11 bits and a range up to 65504, or "bfloat16", of 8 bits
            and float32's range.
        error_feedback: whether rounding errors are kept for the next step.
    """

    def __init__(self, dtype: Compression, *, error_feedback: bool = False) -> None:
        super().__init__()
        self._dtype = _DTYPES[dtype]
        self.error_feedback = error_feedback
        self._narrow: dict[Hashable, np.ndarray] = {}

    def describe(self) -> str:
        """Returns the dtype, and whether errors are fed back."""
        return f"{self._dtype.name}{' with error feedback' * self.error_feedback}"

    def takes(self, bucket: Bucket) -> bool:
        """Returns whether these are float32 gradients that are averaged."""
        return bucket.reduction == "mean" and bucket.dtype == np.float32

    def dtype(self, bucket: Bucket) -> np.dtype:
        """Returns sixteen bits for what is taken."""
        return self._dtype if self.takes(bucket) else bucket.dtype

    def scale(self, bucket: Bucket, size: int) -> float:
        """Returns the largest power of two that is not above `size`."""
        return self.multiplier(size) if self.takes(bucket) else 1.0

    def multiplier(self, size: int) -> float:
        """Returns the largest power of two that is not above `size`."""
        return float(1 << (size.bit_length() - 1))

    def forget(self, key: Hashable) -> None:
        """Lets go of what is kept under a key of `allreduce`, if anything is."""
        super().forget(key)
        self._narrow.pop(key, None)

    def allreduce(
        self, communicator: Communicator, key: Hashable, buffer: np.ndarray
    ) -> int:
        """Sums `buffer` over ranks, rounded to sixteen bits; collective."""
        scale = self.multiplier(communicator.size)
        if key not in self._narrow:
            self._narrow[key] = aligned_zeros(buffer.size, self._dtype)
        if self.error_feedback and key not in self.errors:
            self.errors[key] = np.zeros_like(buffer)
        narrow = self._narrow[key]

        def pack(part: np.ndarray, start: int) -> None:
            exact = buffer[start : start + part.size]
            exact *= scale  # exact, as long as nothing overflows
            if self.error_feedback:
                errors = self.errors[key][start : start + part.size]
                exact += errors
            with np.errstate(over="ignore"):  # beyond the type's range: infinity
                part[...] = exact
            if self.error_feedback:
                self._keep(errors, exact, part)

        def unpack(part: np.ndarray, start: int) -> None:
            result = buffer[start : start + part.size]
            result[...] = part
            result *= 1 / scale

        communicator.allreduce_parts(narrow, "sum", pack=pack, unpack=unpack)
        return narrow.nbytes

    @staticmethod
    def _keep(errors: np.ndarray, exact: np.ndarray, sent: np.ndarray) -> None:
        with np.errstate(invalid="ignore"):
            np.subtract(exact, sent.astype(exact.dtype), out=errors)
        # What is not finite would stay so for ever. A loss scaler skips such a step.
        if not np.isfinite(np.dot(errors, errors)):
            errors[~np.isfinite(errors)] = 0


def make_wire(compression: Any, *, error_feedback: bool = False) -> Wire | None:
    """Returns the codec of a name, None for none.

    Args:
        compression: None, "float16" or "bfloat16".
        error_feedback: see `HalfPrecision`.

    Raises:
        ValueError: if there is no such codec, or nothing to feed back.
    """
    if compression is None:
        if error_feedback:
            raise ValueError(
                "Expected `compression` with `error_feedback=True`: without it nothing "
                "is rounded. Received: compression=None"
            )
        return None
    dtype: Compression | None = compression if compression in tuple(_DTYPES) else None
    if dtype is None:
        raise ValueError(
            "Expected `compression` to be None, 'float16' or 'bfloat16'. Received: "
            f"compression={compression!r}"
        )
    return HalfPrecision(dtype, error_feedback=error_feedback)
