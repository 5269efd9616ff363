"""Exchanges buckets by a codec, and keeps what it has yet to send."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence

import numpy as np

from distkeras.gradients import _residuals
from distkeras.gradients._agreed_plans import AgreedPlans
from distkeras.gradients._channel import Channel
from distkeras.gradients._flags import StepFlags
from distkeras.gradients._packing import pack_part
from distkeras.gradients._plan import HEADER
from distkeras.gradients._plan import Plan
from distkeras.gradients._wire import Wire


class CodedBuckets:
    """Sums shares of the mean: Σ n·g would leave the range of sixteen bits.

    The examples of all ranks must be known before, so that a message of flags goes
    ahead of the first such bucket.

    Args:
        wire: the codec.
        channel: carries them.
        flags: of the step.
        plans: of the exchange: what is kept is numbered by their lists.
    """

    def __init__(
        self, wire: Wire, channel: Channel, flags: StepFlags, plans: AgreedPlans
    ) -> None:
        self._wire = wire
        self._channel = channel
        self._flags = flags
        self._plans = plans
        # What is kept of gradients that the newest plan of their list has not.
        self._pool: dict[str, np.ndarray] = {}
        self._newest: dict[int, Plan] = {}  # by the number of the list

    def takes(self, plan: Plan, number: int) -> bool:
        """Returns whether the bucket goes this way; the same on all ranks."""
        return self._wire.takes(plan.buckets[number])

    def reduce(
        self,
        plan: Plan,
        number: int,
        buffer: np.ndarray,
        examples: float,
        arrays: Sequence[np.ndarray],
    ) -> None:
        """Leaves the mean of gradients over all examples in `buffer`.

        Args:
            plan: of the gradients.
            number: of the bucket within the plan.
            buffer: of the bucket's length and dtype.
            examples: how many this rank's gradients average.
            arrays: this rank's gradients, in the order of the bucket's placements.
        """
        bucket = plan.buckets[number]
        if not any(self.takes(plan, before) for before in range(number)):
            self._flags.exchange(examples, False)
        if self._flags.plans_differ:
            return
        body = buffer[HEADER // bucket.dtype.itemsize :]
        total = self._flags.examples
        if not total:  # nobody applies anything: nothing is sent
            body[:] = 0
            return
        pack_part(bucket, arrays, examples / total, buffer, 0)
        self._channel.ready()
        key = (id(plan), number)
        if self._wire.error_feedback:
            n = self._follow(plan)
            if self._pool and key not in self._wire.errors and n is not None:
                self._wire.errors[key] = _residuals.join(n, bucket, self._pool)
        nbytes = self._wire.allreduce(self._channel.communicator, key, body)
        self._channel.exchanged(nbytes)

    def _follow(self, plan: Plan) -> int | None:
        """Lets what is kept follow gradients to their list's newest plan."""
        n = self._plans.number(plan)
        if n is None or self._newest.get(n) is plan:
            return n
        before = self._newest.get(n)
        if before is not None:
            self.leave(before)
        self._newest[n] = plan
        return n

    def leave(self, plan: Plan) -> None:
        """Keeps what a plan has yet to send for others of its list."""
        n = self._plans.number(plan)
        if n is not None:
            self._pool.update(_residuals.split({n: plan}, self._wire))
        for number in range(len(plan.buckets)):
            self._wire.errors.pop((id(plan), number), None)

    def forget(self) -> None:
        """Lets go of what is yet to be sent."""
        self._pool.clear()
        self._newest.clear()

    def residuals(self) -> dict[str, np.ndarray]:
        """Returns what error feedback keeps on this rank, to go on with later."""
        if not self._wire.error_feedback:
            return {}
        return {**self._pool, **_residuals.split(self._newest, self._wire)}

    def restore_residuals(self, ranks: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Goes on with what error feedback kept; where nothing was, with nothing.

        Args:
            ranks: what `residuals` gave on each rank. Another number of ranks than now
                share the sum.
        """
        if not self._wire.error_feedback:
            return
        communicator = self._channel.communicator
        self._wire.errors.clear()
        self.forget()
        self._pool = _residuals.shared_out(
            ranks, communicator.rank, communicator.size, self._wire
        )
