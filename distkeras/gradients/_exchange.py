"""The host's half of the exchange: pack, allreduce, scale, count.

A backend calls `GradientExchange.reduce` once a bucket with NumPy views of this
rank's gradients; the arrays that come back are views of the fusion buffer and stay
valid until the same bucket is exchanged again. Sparse gradients follow, all of them
in one call of `GradientExchange.reduce_rows`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence

import numpy as np

from distkeras._logging import LOGGER
from distkeras.communicators import Communicator
from distkeras.communicators import Op
from distkeras.communicators import agree
from distkeras.communicators import aligned_zeros
from distkeras.gradients import _residuals
from distkeras.gradients._bucket_size import FIRST_BUCKET_BYTES
from distkeras.gradients._bucket_size import BucketSize
from distkeras.gradients._bucket_size import choose_bucket_bytes
from distkeras.gradients._clock import StepClock
from distkeras.gradients._packing import pack_part
from distkeras.gradients._plan import HEADER
from distkeras.gradients._plan import Bucket
from distkeras.gradients._plan import Gradient
from distkeras.gradients._plan import Plan
from distkeras.gradients._plan import check_bucket_bytes
from distkeras.gradients._plan import make_plan
from distkeras.gradients._plan import wire_dtype
from distkeras.gradients._rows import Kind
from distkeras.gradients._rows import Rows
from distkeras.gradients._rows import dense_bytes
from distkeras.gradients._rows import joined
from distkeras.gradients._rows import pack
from distkeras.gradients._rows import row_bytes
from distkeras.gradients._rows import split_dense
from distkeras.gradients._rows import unpack
from distkeras.gradients._rows import weighted
from distkeras.gradients._wire import Wire

_EXAMPLES, _STOP, _NONFINITE = 0, 1, 2


@dataclasses.dataclass
class Counters:
    """What has been exchanged so far on this rank.

    Attributes:
        exchanges: gradient exchanges; one an optimizer update.
        collectives: calls that carry gradients: an allreduce for each bucket, and for
            all sparse gradients together an allgather, an allreduce of those that are
            smaller dense, or both.
        messages: small calls that carry counts only: between updates (accumulation),
            before sparse gradients for which there is a choice, and before coded
            buckets.
        bytes: bytes that this rank handed to them.
        examples: that all ranks together trained on.
    """

    exchanges: int = 0
    collectives: int = 0
    messages: int = 0
    bytes: int = 0
    examples: float = 0.0


class GradientExchange:
    """Averages gradients over ranks, weighted by the examples each rank saw.

    The flags that all ranks must see alike travel in the header of each bucket, so
    that they cost no message of their own.

    Args:
        communicator: carries the gradients. It is duplicated, so that nothing else
            is ever sent between the messages of a step.
        bucket_bytes: size above which a fusion bucket is closed; None chooses one
            with the first plan, see `choose_bucket_bytes`, and makes the first bucket
            a small one.
        wire: codec of what travels; None sends gradients as they are.

    Attributes:
        counters: see `Counters`.
        clock: where the time of steps goes.
        examples: what all ranks together saw in the newest step.
        exhausted: set when no rank had an example left in a step; whoever acts on
            it clears it.
    """

    def __init__(
        self,
        communicator: Communicator,
        *,
        bucket_bytes: int | None = None,
        wire: Wire | None = None,
    ) -> None:
        check_bucket_bytes(bucket_bytes)
        self.communicator = communicator.duplicate()
        self.bucket_bytes = bucket_bytes
        self._chosen: BucketSize | None = None
        self.wire = wire
        self.counters = Counters()
        self.clock = StepClock()
        self.examples = 0.0
        self.exhausted = False
        self._stop_requested = False
        self._stop_seen = False
        self._counted = False  # whether this step's examples have been
        self._also_close: list[Callable[[], None]] = []
        self._plans: dict[tuple[int, ...], Plan] = {}
        self._residuals: dict[str, np.ndarray] = {}
        self._buffers: dict[tuple[int, int], tuple[Plan, np.ndarray]] = {}

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
        if known is None:
            agree(
                self.communicator,
                "the model's gradients (trainable variables in order, with shape, "
                "dtype and whether the loss depends on them)",
                [self._described_options(), *Plan(tuple(gradients), ()).rows],
            )
        plan = self._make_plan(gradients)
        self._plans[key] = plan
        return plan

    def _make_plan(self, gradients: Sequence[Gradient]) -> Plan:
        if self.bucket_bytes is not None:
            return make_plan(gradients, self.bucket_bytes)
        if self._chosen is None:
            self._chosen = choose_bucket_bytes(self.communicator)
        plan = make_plan(gradients, self._chosen.bytes, first_bytes=FIRST_BUCKET_BYTES)
        LOGGER.info(
            "gradients of %.1f MB travel in %d bucket(s) of up to %d MiB (%s)",
            plan.nbytes / 1e6,
            len(plan.buckets),
            self._chosen.bytes >> 20,
            self._chosen.reason,
        )
        return plan

    def _described_options(self) -> str:
        wire = "as they are" if self.wire is None else self.wire.describe()
        return f"sent {wire}, bucket_bytes={self.bucket_bytes}"

    def residuals(self) -> dict[str, np.ndarray]:
        """Returns what error feedback keeps on this rank, to go on with later."""
        wire = self.wire
        if wire is None or not wire.error_feedback:
            return {}
        return _residuals.split(self._plans.values(), wire)

    def restore_residuals(self, ranks: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Goes on with what error feedback kept; where nothing was, with nothing.

        Args:
            ranks: what `residuals` gave on each rank. Another number of ranks than now
                share the sum.
        """
        wire = self.wire
        if wire is None or not wire.error_feedback:
            return
        communicator = self.communicator
        wire.errors.clear()
        self._residuals = _residuals.shared_out(
            ranks, communicator.rank, communicator.size, wire
        )

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
        self,
        plan: Plan,
        number: int,
        examples: float,
        arrays: Sequence[np.ndarray],
        arrived: float = 0.0,
    ) -> list[np.ndarray]:
        """Exchanges one bucket.

        Args:
            plan: what `plan` returned.
            number: of the bucket within the plan.
            examples: how many examples this rank's gradients average; a rank with
                none adds nothing, whatever its arrays hold.
            arrays: this rank's gradients, in the order of the bucket's placements.
            arrived: when the step's data had come, in seconds since the epoch.

        Returns:
            Σ n·g / Σ n over ranks (or the maximum), in the order and the dtypes of
            `arrays`: views of the fusion buffer where the dtype is that of the wire.
        """
        self.clock.arrived(arrived)
        bucket = plan.buckets[number]
        buffer = self._buffer(plan, number)
        wire = self._wire_of(bucket)
        if wire is not None:
            self._reduce_coded(wire, plan, number, buffer, examples, arrays)
        else:
            self._reduce_plain(bucket, buffer, examples, arrays)
        if number == len(plan.buckets) - 1 and not plan.sparse:
            self._finish()
        results = [
            buffer[p.offset : p.offset + p.length]
            .reshape(p.shape)
            .astype(array.dtype, copy=False)
            for p, array in zip(bucket.placements, arrays, strict=True)
        ]
        self.clock.lap("unpack")
        return results

    def _reduce_plain(
        self,
        bucket: Bucket,
        buffer: np.ndarray,
        examples: float,
        arrays: Sequence[np.ndarray],
    ) -> None:
        """Packs, combines and divides part by part, while a part is in the cache."""
        first = HEADER // bucket.dtype.itemsize
        mean = bucket.reduction == "mean"
        op: Op = "sum" if mean else "max"

        def pack(part: np.ndarray, start: int) -> None:
            self.clock.lap("exchange")
            if start == 0:
                part[:first] = 0
                if mean:
                    part[_EXAMPLES] = examples
                    part[_STOP] = self._stop_requested
            pack_part(bucket, arrays, examples, part, start)
            self.clock.lap("pack")

        def unpack(part: np.ndarray, start: int) -> None:
            self.clock.lap("exchange")
            if not mean:
                return
            if start == 0:
                self._read(float(part[_EXAMPLES]), bool(part[_STOP]))
                part = part[first:]
            self._divide(part)
            self.clock.lap("unpack")

        if self.clock.traced:  # packing, waiting and the exchange told apart
            pack(buffer, 0)
            self._packed()
            self.communicator.allreduce(buffer, op)
            unpack(buffer, 0)
        else:
            self.communicator.allreduce_parts(buffer, op, pack=pack, unpack=unpack)
        self.counters.collectives += 1
        self.counters.bytes += buffer.nbytes
        self.clock.lap("exchange")

    def _wire_of(self, bucket: Bucket) -> Wire | None:
        return self.wire if self.wire is not None and self.wire.takes(bucket) else None

    def _reduce_coded(
        self,
        wire: Wire,
        plan: Plan,
        number: int,
        buffer: np.ndarray,
        examples: float,
        arrays: Sequence[np.ndarray],
    ) -> None:
        """Sums shares of the mean: Σ n·g would leave the range of sixteen bits."""
        bucket = plan.buckets[number]
        if not any(self._wire_of(before) for before in plan.buckets[:number]):
            self.reduce_counts(examples, False)
        body = buffer[HEADER // bucket.dtype.itemsize :]
        if not self.examples:  # nobody applies anything: nothing is sent
            body[:] = 0
            return
        pack_part(bucket, arrays, examples / self.examples, buffer, 0)
        self._packed()
        key = (id(plan), number)
        if self._residuals and key not in wire.errors:
            n = next(n for n, p in enumerate(self._plans.values()) if p is plan)
            wire.errors[key] = _residuals.join(n, bucket, self._residuals)
        self.counters.bytes += wire.allreduce(self.communicator, key, body)
        self.counters.collectives += 1
        self.clock.lap("exchange")

    def _packed(self) -> None:
        """Notes that a message is ready, and when those of all ranks are."""
        self.clock.lap("pack")
        if self.clock.traced:
            self.communicator.barrier()
            self.clock.lap("wait")

    def reduce_rows(
        self,
        plan: Plan,
        examples: float,
        pieces: Sequence[Rows],
        *,
        merge: bool,
        arrived: float = 0.0,
    ) -> list[Rows]:
        """Exchanges all sparse gradients of the plan.

        Args:
            plan: what `plan` returned.
            examples: as in `reduce`.
            pieces: this rank's rows, one entry for each of `plan.sparse`; of any dtype.
            merge: whether rows with the same index may be summed. Then a gradient is
                sent dense when the rows of all ranks would take more bytes than that.
            arrived: as in `reduce`.

        Returns:
            All ranks' rows, in the order of ranks, each times n / Σ n; with `merge`,
            their sums, each index once. In the wire's dtype.
        """
        self.clock.arrived(arrived)
        kinds = [
            (plan.gradients[i].shape, wire_dtype(plan.gradients[i].dtype))
            for i in plan.sparse
        ]
        mine = [
            weighted(piece, examples, dtype)
            for piece, (_, dtype) in zip(pieces, kinds, strict=True)
        ]
        if merge:
            result = self._reduce_merged(examples, [m.merged() for m in mine], kinds)
        else:
            heads, result = self._allgather_rows(examples, mine, kinds)
            self._read_heads(heads)
        for piece in result:
            self._divide(piece.values)
        self._finish()
        self.clock.lap("unpack")
        return result

    def _reduce_merged(
        self, examples: float, mine: list[Rows], kinds: list[Kind]
    ) -> list[Rows]:
        """Sums rows over ranks, each variable's in the form that is smaller."""
        self._packed()
        heads = self.communicator.allgather(self._head(examples, mine))
        self.counters.messages += 1
        self._read_heads(heads)
        lengths = np.sum(heads, axis=0)[2:]
        forms: dict[str, list[int]] = {}
        for k, (kind, length) in enumerate(zip(kinds, lengths, strict=True)):
            sparse = length * row_bytes(*kind) < dense_bytes(*kind)
            forms.setdefault("rows" if sparse else kind[1].name, []).append(k)
        result = list(mine)
        for form, chosen in forms.items():
            ours, of = [mine[k] for k in chosen], [kinds[k] for k in chosen]
            if form == "rows":
                _, gathered = self._allgather_rows(examples, ours, of)
                sums = [piece.merged() for piece in gathered]
            else:
                flat = np.concatenate(
                    [
                        rows.dense(*kind).reshape(-1)
                        for rows, kind in zip(ours, of, strict=True)
                    ]
                )
                self._allreduce(flat, "sum")
                sums = split_dense(flat, [shape for shape, _ in of])
            for k, piece in zip(chosen, sums, strict=True):
                result[k] = piece
        return result

    def _allgather_rows(
        self, examples: float, mine: list[Rows], kinds: list[Kind]
    ) -> tuple[list[np.ndarray], list[Rows]]:
        """Returns every rank's head, and for each variable all ranks' rows."""
        head = self._head(examples, mine)
        packed = pack(head, mine)
        self._packed()
        self.counters.collectives += 1
        self.counters.bytes += packed.nbytes
        parts = self.communicator.allgather(packed)
        self.clock.lap("exchange")
        heads = [part[: head.nbytes].view(np.float64) for part in parts]
        unpacked = [
            unpack(part[head.nbytes :], h[2:].astype(int).tolist(), kinds)
            for part, h in zip(parts, heads, strict=True)
        ]
        return heads, [joined(pieces) for pieces in zip(*unpacked, strict=True)]

    def _head(self, examples: float, mine: list[Rows]) -> np.ndarray:
        return np.array([examples, self._stop_requested, *map(len, mine)], np.float64)

    def _read_heads(self, heads: list[np.ndarray]) -> None:
        total = np.sum(heads, axis=0)
        self._read(float(total[_EXAMPLES]), bool(total[_STOP]))

    def _finish(self) -> None:
        """Counts an exchange whose last message has been sent."""
        self._stop_requested = False
        self._counted = False
        self.counters.exchanges += self.examples > 0

    def reduce_counts(
        self, examples: float, nonfinite: bool, arrived: float = 0.0
    ) -> tuple[float, bool]:
        """Exchanges the flags alone, for a step in which gradients stay local.

        Returns:
            The examples of all ranks, and whether any rank's gradients are not
            finite.
        """
        self.clock.arrived(arrived)
        flags = np.zeros(3, np.float64)
        flags[_EXAMPLES] = examples
        flags[_STOP] = self._stop_requested
        flags[_NONFINITE] = nonfinite
        self._packed()
        self.communicator.allreduce(flags)
        self.counters.messages += 1
        self._counted = False  # a step between updates ends here
        self._read(float(flags[_EXAMPLES]), bool(flags[_STOP]))
        self._stop_requested = False
        self.clock.lap("exchange")
        return self.examples, bool(flags[_NONFINITE])

    def also_close(self, close: Callable[[], None]) -> None:
        """Lets `close` be called when this exchange is closed; collective as it is."""
        self._also_close.append(close)

    def close(self) -> None:
        """Frees the communicator's message space, and what was made along with it."""
        for close in self._also_close:
            close()
        self._also_close.clear()
        self.communicator.close()

    def _divide(self, sums: np.ndarray) -> None:
        """Makes Σ n·g the mean, in place; zeros where no rank had an example."""
        # Not times the reciprocal, which would round twice.
        if self.examples:
            np.divide(sums, sums.dtype.type(self.examples), out=sums)
        else:
            sums[...] = 0

    def _read(self, examples: float, stop: bool) -> None:
        self.examples = examples
        if not self._counted:
            self.counters.examples += examples
            self._counted = True
        self._stop_seen = self._stop_seen or stop
        if examples == 0:
            self.exhausted = True

    def _allreduce(self, buffer: np.ndarray, op: Op) -> None:
        self._packed()
        self.communicator.allreduce(buffer, op)
        self.counters.collectives += 1
        self.counters.bytes += buffer.nbytes
        self.clock.lap("exchange")

    def _buffer(self, plan: Plan, number: int) -> np.ndarray:
        key = (id(plan), number)
        if key not in self._buffers:
            bucket = plan.buckets[number]
            buffer = aligned_zeros(bucket.length, bucket.dtype)
            # With the plan, whose identity must not be given to another.
            self._buffers[key] = (plan, buffer)
        return self._buffers[key][1]
