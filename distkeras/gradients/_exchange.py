"""The host's half of the exchange: pack, allreduce, scale, count.

A backend calls `GradientExchange.reduce` once a bucket with NumPy views of this
rank's gradients; the arrays that come back are views of the fusion buffer and stay
valid until the same bucket is exchanged again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from distkeras.communicators import Communicator
from distkeras.communicators import agree
from distkeras.gradients._plan import ALIGNMENT
from distkeras.gradients._plan import DEFAULT_BUCKET_BYTES
from distkeras.gradients._plan import HEADER
from distkeras.gradients._plan import Bucket
from distkeras.gradients._plan import Gradient
from distkeras.gradients._plan import Plan
from distkeras.gradients._plan import make_plan

_EXAMPLES, _STOP, _NONFINITE = 0, 1, 2


@dataclasses.dataclass
class Counters:
    """What has been exchanged so far on this rank.

    Attributes:
        exchanges: gradient exchanges; one an optimizer update.
        collectives: allreduce calls, one a bucket.
        messages: small allreduce calls between updates (accumulation).
        bytes: bytes that were reduced.
    """

    exchanges: int = 0
    collectives: int = 0
    messages: int = 0
    bytes: int = 0


class GradientExchange:
    """Averages gradients over ranks, weighted by the examples each rank saw.

    The flags that all ranks must see alike travel in the header of each bucket, so
    that they cost no message of their own.

    Args:
        communicator: carries the gradients. It is duplicated, so that nothing else
            is ever sent between the messages of a step.
        bucket_bytes: size above which a fusion bucket is closed.

    Attributes:
        counters: see `Counters`.
        examples: what all ranks together saw in the newest step.
        exhausted: set when no rank had an example left in a step; whoever acts on
            it clears it.
    """

    def __init__(
        self,
        communicator: Communicator,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        self.communicator = communicator.duplicate()
        self.bucket_bytes = bucket_bytes
        self.counters = Counters()
        self.examples = 0.0
        self.exhausted = False
        self._stop_requested = False
        self._stop_seen = False
        self._plans: dict[tuple[int, ...], Plan] = {}
        self._buffers: dict[tuple[int, int], np.ndarray] = {}

    def __deepcopy__(self, memo: object) -> GradientExchange:
        # A copy of a model or optimizer goes on talking to the same ranks.
        return self

    def plan(self, key: tuple[int, ...], gradients: Sequence[Gradient]) -> Plan:
        """Returns the plan for a list of variables, agreed over ranks when new.

        Collective the first time that `key` is seen.

        Args:
            key: identifies the list of variables on this rank.
            gradients: their gradients.

        Raises:
            MismatchError: on every rank, naming the first gradient that differs.
        """
        known = self._plans.get(key)
        if known is not None and known.gradients == tuple(gradients):
            return known
        plan = make_plan(gradients, self.bucket_bytes)
        if known is None:
            agree(
                self.communicator,
                "the model's gradients (trainable variables in order, with shape, "
                "dtype and whether the loss depends on them)",
                plan.rows,
            )
        self._plans[key] = plan
        return plan

    def announce_stop(self) -> None:
        """Tells all ranks, with the next exchange, that this rank wants to stop."""
        self._stop_requested = True

    @property
    def stop_announced(self) -> bool:
        """Whether an exchange since `clear_stop` carried some rank's announcement.

        The same on all ranks after each step.
        """
        return self._stop_seen

    def clear_stop(self) -> None:
        """Forgets announcements, this rank's own and those that were seen."""
        self._stop_requested = False
        self._stop_seen = False

    def reduce(
        self, plan: Plan, number: int, examples: float, arrays: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Exchanges one bucket.

        Args:
            plan: what `plan` returned.
            number: of the bucket within the plan.
            examples: how many examples this rank's gradients average; a rank with
                none adds nothing, whatever its arrays hold.
            arrays: this rank's gradients, in the order of the bucket's placements.

        Returns:
            Σ n·g / Σ n over ranks (or the maximum), in the order and the dtypes of
            `arrays`: views of the fusion buffer where the dtype is that of the wire.
        """
        bucket = plan.buckets[number]
        buffer = self._buffer(plan, number)
        header = buffer[: HEADER // bucket.dtype.itemsize]
        header[:] = 0
        if bucket.reduction == "max":
            self._pack_max(bucket, buffer, examples, arrays)
            self._allreduce(buffer, "max")
        else:
            header[_EXAMPLES] = examples
            header[_STOP] = self._stop_requested
            self._pack_mean(bucket, buffer, examples, arrays)
            self._allreduce(buffer, "sum")
            self._read(float(header[_EXAMPLES]), bool(header[_STOP]))
            body = buffer[header.size :]
            body *= 1 / self.examples if self.examples else 0.0
        if number == len(plan.buckets) - 1:
            self._stop_requested = False
            self.counters.exchanges += self.examples > 0
        return [
            buffer[p.offset : p.offset + p.length]
            .reshape(p.shape)
            .astype(array.dtype, copy=False)
            for p, array in zip(bucket.placements, arrays, strict=True)
        ]

    def reduce_counts(self, examples: float, nonfinite: bool) -> tuple[float, bool]:
        """Exchanges the flags alone, for a step in which gradients stay local.

        Returns:
            The examples of all ranks, and whether any rank's gradients are not
            finite.
        """
        flags = np.zeros(3, np.float64)
        flags[_EXAMPLES] = examples
        flags[_STOP] = self._stop_requested
        flags[_NONFINITE] = nonfinite
        self.communicator.allreduce(flags)
        self.counters.messages += 1
        self._read(float(flags[_EXAMPLES]), bool(flags[_STOP]))
        self._stop_requested = False
        return self.examples, bool(flags[_NONFINITE])

    def close(self) -> None:
        """Frees the communicator's message space."""
        self.communicator.close()

    def _read(self, examples: float, stop: bool) -> None:
        self.examples = examples
        self._stop_seen = self._stop_seen or stop
        if examples == 0:
            self.exhausted = True

    def _allreduce(self, buffer: np.ndarray, op: str) -> None:
        self.communicator.allreduce(buffer, op)  # type: ignore[arg-type]
        self.counters.collectives += 1
        self.counters.bytes += buffer.nbytes

    def _buffer(self, plan: Plan, number: int) -> np.ndarray:
        key = (id(plan), number)
        if key not in self._buffers:
            bucket = plan.buckets[number]
            self._buffers[key] = _aligned_zeros(bucket.length, bucket.dtype)
        return self._buffers[key]

    @staticmethod
    def _pack_mean(
        bucket: Bucket,
        buffer: np.ndarray,
        examples: float,
        arrays: Sequence[np.ndarray],
    ) -> None:
        if examples == 0:
            # Not by multiplication: the arrays of an empty batch may hold NaN.
            buffer[HEADER // bucket.dtype.itemsize :] = 0
            return
        weight = bucket.dtype.type(examples)
        for place, array in zip(bucket.placements, arrays, strict=True):
            out = buffer[place.offset : place.offset + place.length]
            np.multiply(array.reshape(-1), weight, out=out, dtype=bucket.dtype)

    @staticmethod
    def _pack_max(
        bucket: Bucket,
        buffer: np.ndarray,
        examples: float,
        arrays: Sequence[np.ndarray],
    ) -> None:
        if examples == 0:
            buffer[:] = -np.inf
            return
        for place, array in zip(bucket.placements, arrays, strict=True):
            buffer[place.offset : place.offset + place.length] = array.reshape(-1)


def _aligned_zeros(length: int, dtype: np.dtype) -> np.ndarray:
    """Returns zeros whose first byte is aligned for zero-copy hand-over."""
    raw = np.zeros(length * dtype.itemsize + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + length * dtype.itemsize].view(dtype)
