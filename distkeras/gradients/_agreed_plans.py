"""The plans of one exchange: made once a list of gradients, agreed over ranks."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable
from collections.abc import Sequence

import numpy as np

from distkeras._logging import LOGGER
from distkeras.communicators import agree
from distkeras.gradients._bucket_size import FIRST_BUCKET_BYTES
from distkeras.gradients._bucket_size import BucketSize
from distkeras.gradients._bucket_size import choose_bucket_bytes
from distkeras.gradients._channel import Channel
from distkeras.gradients._plan import Gradient
from distkeras.gradients._plan import Plan
from distkeras.gradients._plan import make_plan

_MOST_PLANS = 3

_Key = tuple[int, ...]


class AgreedPlans:
    """Plans by the list of variables they are for, and by which gradients exist.

    A layer that is left out of some steps makes a plan for those with it and one for
    those without. Of each list of variables the newest few are kept, and those that a
    graph has.

    Args:
        channel: to the ranks that agree.
        bucket_bytes: size above which a bucket is closed; None chooses one with the
            first plan, and makes the first bucket a small one.
        sent: in which form gradients travel; ranks agree on that too.
        dropped: called with a plan that is no longer among the newest.
    """

    def __init__(
        self,
        channel: Channel,
        bucket_bytes: int | None,
        sent: str,
        dropped: Callable[[Plan], None],
    ) -> None:
        self._channel = channel
        self._communicator = channel.communicator
        self._bucket_bytes = bucket_bytes
        self._options = f"sent {sent}, bucket_bytes={bucket_bytes}"
        digest = hashlib.blake2b(self._options.encode(), digest_size=7).digest()
        self._salt = int.from_bytes(digest)
        self._dropped = dropped
        self._chosen: BucketSize | None = None
        # By list, the newest plan last.
        self._plans: dict[_Key, dict[tuple[Gradient, ...], Plan]] = {}
        self._old = weakref.WeakValueDictionary[
            tuple[_Key, tuple[Gradient, ...]], Plan
        ]()

    def get(
        self,
        key: tuple[int, ...],
        gradients: Sequence[Gradient],
        *,
        together: bool = False,
    ) -> Plan:
        """Returns the plan for a list of variables, agreed over ranks when new.

        Collective the first time that `key` is seen, and whenever all come here
        together; see `GradientExchange.plan`.
        """
        listed = tuple(gradients)
        plans = self._plans.get(key, {})
        plan = plans.get(listed) or self._old.get((key, listed))
        if together:  # whatever a rank knows of the list
            self._compare(plan or Plan(listed, ()))
        elif not plans:
            self.agree(Plan(listed, ()))
        if plan is None:
            plan = self._make(listed, new=not plans)
        self._old.pop((key, listed), None)
        plans.pop(listed, None)
        self._plans.setdefault(key, plans)[listed] = plan
        if len(plans) > _MOST_PLANS:
            oldest = next(iter(plans))
            self._old[key, oldest] = plans[oldest]
            self._dropped(plans.pop(oldest))
        return plan

    def agree(self, plan: Plan) -> None:
        """Raises the same error on every rank unless all follow the same plan.

        Collective.

        Raises:
            MismatchError: on every rank, naming the first gradient that differs.
        """
        agree(
            self._communicator,
            "the model's gradients (trainable variables in order, with shape, "
            "dtype and whether the loss depends on them)",
            [self._options, *plan.rows],
        )

    def _compare(self, plan: Plan) -> None:
        """Does what `agree` does, by one small message where ranks agree."""
        self._channel.ready()
        digest = plan.digest ^ self._salt
        least = np.array([digest, -digest])
        self._communicator.allreduce(least, "min")
        self._channel.counters.messages += 1
        self._channel.clock.lap("exchange")
        if least[0] != -least[1]:
            self.agree(plan)

    def _make(self, gradients: Sequence[Gradient], *, new: bool) -> Plan:
        if self._bucket_bytes is not None:
            return make_plan(gradients, self._bucket_bytes)
        if self._chosen is None:
            self._chosen = choose_bucket_bytes(self._communicator)
        plan = make_plan(gradients, self._chosen.bytes, first_bytes=FIRST_BUCKET_BYTES)
        if new:
            LOGGER.info(
                "gradients of %.1f MB travel in %d bucket(s) of up to %d MiB (%s)",
                plan.nbytes / 1e6,
                len(plan.buckets),
                self._chosen.bytes >> 20,
                self._chosen.reason,
            )
        return plan

    def number(self, plan: Plan) -> int | None:
        """Returns the number of a plan's list, in the order in which lists came.

        None for a plan of which nothing is known.
        """
        for number, (key, plans) in enumerate(self._plans.items()):
            old = self._old.get((key, plan.gradients))
            if plan is old or any(kept is plan for kept in plans.values()):
                return number
        return None
