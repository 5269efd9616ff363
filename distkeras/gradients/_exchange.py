"""The host's half of the exchange: the facade that a backend calls.

A backend calls `GradientExchange.reduce` once a bucket with NumPy views of this
rank's gradients; the arrays that come back are views of the fusion buffer and stay
valid until the same bucket is exchanged again. Sparse gradients follow, all of them
in one call of `GradientExchange.reduce_rows`. Here a step is followed from call to
call; each form of the exchange has a module of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np

from distkeras.communicators import Communicator
from distkeras.communicators import aligned_zeros
from distkeras.gradients._agreed_plans import AgreedPlans
from distkeras.gradients._channel import Channel
from distkeras.gradients._channel import Counters
from distkeras.gradients._clock import StepClock
from distkeras.gradients._coded import CodedBuckets
from distkeras.gradients._flags import NO_PLAN
from distkeras.gradients._flags import StepFlags
from distkeras.gradients._flags import marks
from distkeras.gradients._plain import reduce_plain
from distkeras.gradients._plan import Gradient
from distkeras.gradients._plan import Plan
from distkeras.gradients._plan import check_bucket_bytes
from distkeras.gradients._rows import Rows
from distkeras.gradients._sparse import SparseExchange
from distkeras.gradients._wire import Wire


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
        self.wire = wire
        self.counters = Counters()
        self.clock = StepClock()
        self._channel = Channel(self.communicator, self.clock, self.counters)
        self._flags = StepFlags(self._channel)
        self._plans = AgreedPlans(
            self._channel,
            bucket_bytes,
            "as they are" if wire is None else wire.describe(),
            self._drop,
        )
        self._coded: CodedBuckets | None = None
        if wire is not None:
            self._coded = CodedBuckets(wire, self._channel, self._flags, self._plans)
        self._sparse = SparseExchange(self._channel, self._flags)
        self._also_close: list[Callable[[], None]] = []
        self._buffers: dict[tuple[int, int], tuple[Plan, Any]] = {}

    def __deepcopy__(self, memo: object) -> GradientExchange:
        # A copy of a model or optimizer goes on talking to the same ranks.
        return self

    def plan(
        self,
        key: tuple[int, ...],
        gradients: Sequence[Gradient],
        *,
        together: bool = False,
        arrived: float = 0.0,
    ) -> Plan:
        """Returns the plan for a list of variables, agreed over ranks when new.

        Collective the first time that `key` is seen, and whenever `together` is given.
        Should ranks follow plans that differ nevertheless, `reduce` raises.

        Args:
            key: identifies the list of variables on this rank.
            gradients: their gradients.
            together: whether all ranks are here, now: where steps are run eagerly.
                Ranks trace steps at different times.
            arrived: with that, when the step's data had come, as for `reduce`.

        Raises:
            MismatchError: on every rank, naming the first gradient that differs.
        """
        if together:
            self.clock.arrived(arrived)
        return self._plans.get(key, gradients, together=together)

    def buffer(self, plan: Plan, number: int, make: Callable[[], Any]) -> Any:
        """Returns a bucket's lasting buffer, in whatever memory.

        Args:
            plan: what `plan` returned.
            number: of the bucket within the plan.
            make: makes the buffer, when it is wanted first.
        """
        key = (id(plan), number)
        if key not in self._buffers:
            # With the plan, whose identity must not be given to another.
            self._buffers[key] = (plan, make())
        return self._buffers[key][1]

    def residuals(self) -> dict[str, np.ndarray]:
        """Returns what error feedback keeps on this rank, to go on with later."""
        return {} if self._coded is None else self._coded.residuals()

    def restore_residuals(self, ranks: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Goes on with what error feedback kept; where nothing was, with nothing.

        Args:
            ranks: what `residuals` gave on each rank. Another number of ranks than now
                share the sum.
        """
        if self._coded is not None:
            self._coded.restore_residuals(ranks)

    @property
    def examples(self) -> float:
        """What all ranks together saw in the newest step."""
        return self._flags.examples

    @examples.setter
    def examples(self, examples: float) -> None:
        self._flags.examples = examples

    @property
    def exhausted(self) -> bool:
        """Set when no rank had an example left in a step; who acts on it clears it."""
        return self._flags.exhausted

    @exhausted.setter
    def exhausted(self, exhausted: bool) -> None:
        self._flags.exhausted = exhausted

    def announce_stop(self) -> None:
        """Tells all ranks, with the next exchange, that this rank wants to stop."""
        self._flags.announce_stop()

    @property
    def stop_announced(self) -> bool:
        """Whether an exchange since `clear_stop` carried some rank's announcement.

        The same on all ranks after each step.
        """
        return self._flags.stop_seen

    def clear_stop(self) -> None:
        """Forgets announcements, this rank's own and those that were seen."""
        self._flags.clear_stop()

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

        Raises:
            MismatchError: on every rank, if gradients differ over ranks.
        """
        self.clock.arrived(arrived)
        self._follow(plan, arrived, number)
        bucket = plan.buckets[number]
        buffer = self.buffer(
            plan, number, lambda: aligned_zeros(bucket.length, bucket.dtype)
        )
        if self._coded is not None and self._coded.takes(plan, number):
            self._coded.reduce(plan, number, buffer, examples, arrays)
        else:
            reduce_plain(self._channel, self._flags, bucket, buffer, examples, arrays)
        self._check(plan)
        if number == len(plan.buckets) - 1 and not plan.sparse:
            self._flags.finish()
        results = [
            buffer[p.offset : p.offset + p.length]
            .reshape(p.shape)
            .astype(array.dtype, copy=False)
            for p, array in zip(bucket.placements, arrays, strict=True)
        ]
        self.clock.lap("unpack")
        return results

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

        Raises:
            MismatchError: on every rank, if gradients differ over ranks.
        """
        self.clock.arrived(arrived)
        self._follow(plan, arrived)
        result = self._sparse.reduce(plan, examples, pieces, merge=merge)
        self._check(plan)
        self._flags.finish()
        self.clock.lap("unpack")
        return result

    def reduce_counts(
        self,
        examples: float,
        nonfinite: bool,
        arrived: float = 0.0,
        *,
        begins: bool = True,
        plan: Plan | None = None,
    ) -> tuple[float, bool]:
        """Exchanges the flags alone, before gradients go elsewhere or stay local.

        Args:
            examples: as in `reduce`.
            nonfinite: whether this rank's gradients are not finite.
            arrived: as in `reduce`.
            begins: whether a step begins with this, where `arrived` does not say.
            plan: that gradients follow elsewhere.

        Returns:
            The examples of all ranks, and whether any rank's gradients are not
            finite.

        Raises:
            MismatchError: on every rank, if gradients differ over ranks.
        """
        self.clock.arrived(arrived)
        self._follow(plan, arrived, begins=begins)
        any_nonfinite = self._flags.exchange(examples, nonfinite)
        self._check(plan)
        return self._flags.examples, any_nonfinite

    def finish(self) -> None:
        """Counts an exchange whose gradients went elsewhere after `reduce_counts`."""
        self._flags.finish()

    def also_close(self, close: Callable[[], None]) -> None:
        """Lets `close` be called when this exchange is closed; collective as it is."""
        self._also_close.append(close)

    def close(self) -> None:
        """Frees the communicator's message space, and what was made along with it."""
        self.free()
        for close in self._also_close:
            close()
        self._also_close.clear()
        self.communicator.close()

    def free(self) -> None:
        """Lets go of all buffers. Other ranks need not do so.

        TensorFlow keeps what a graph calls, and so this object, for good.
        """
        for plan, _ in list(self._buffers.values()):
            self._forget(plan)
        if self._coded is not None:
            self._coded.forget()

    def _follow(
        self,
        plan: Plan | None,
        arrived: float,
        number: int = 0,
        *,
        begins: bool = False,
    ) -> None:
        """Notes that a message is to be sent, of a plan or of none."""
        self._flags.enter(arrived, begins=begins)
        # Other marks with each bucket: what one lets pass the next will not.
        shift = 18 * (number % 3)
        self._flags.marks = NO_PLAN if plan is None else marks(plan.digest >> shift)

    def _check(self, plan: Plan | None) -> None:
        """Raises on every rank if the flags of a message told of different plans."""
        if self._flags.plans_differ:
            self._flags.plans_differ = False
            self._plans.agree(plan or Plan((), ()))

    def _drop(self, plan: Plan) -> None:
        """Lets go of a plan's buffers, but not of what is yet to be sent."""
        if self._coded is not None:
            self._coded.leave(plan)
        self._forget(plan)

    def _forget(self, plan: Plan) -> None:
        """Lets go of a plan's buffers, and of what is yet to be sent of it."""
        for key in [key for key in self._buffers if key[0] == id(plan)]:
            del self._buffers[key]
            if self.wire is not None:
                self.wire.forget(key)
