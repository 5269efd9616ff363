"""The plans of one exchange: made once a list of variables, agreed over ranks."""

from __future__ import annotations

from collections.abc import Sequence

from distkeras._logging import LOGGER
from distkeras.communicators import Communicator
from distkeras.communicators import agree
from distkeras.gradients._bucket_size import FIRST_BUCKET_BYTES
from distkeras.gradients._bucket_size import BucketSize
from distkeras.gradients._bucket_size import choose_bucket_bytes
from distkeras.gradients._plan import Gradient
from distkeras.gradients._plan import Plan
from distkeras.gradients._plan import make_plan


class AgreedPlans:
    """Plans by the list of variables they are for.

    Args:
        communicator: the ranks that agree.
        bucket_bytes: size above which a bucket is closed; None chooses one with the
            first plan, and makes the first bucket a small one.
        sent: in which form gradients travel; ranks agree on that too.
    """

    def __init__(
        self, communicator: Communicator, bucket_bytes: int | None, sent: str
    ) -> None:
        self._communicator = communicator
        self._bucket_bytes = bucket_bytes
        self._options = f"sent {sent}, bucket_bytes={bucket_bytes}"
        self._chosen: BucketSize | None = None
        self._plans: dict[tuple[int, ...], Plan] = {}

    def get(self, key: tuple[int, ...], gradients: Sequence[Gradient]) -> Plan:
        """Returns the plan for a list of variables, agreed over ranks when new.

        Collective the first time that `key` is seen; see `GradientExchange.plan`.
        """
        known = self._plans.get(key)
        if known is not None and known.gradients == tuple(gradients):
            return known
        if known is None:
            agree(
                self._communicator,
                "the model's gradients (trainable variables in order, with shape, "
                "dtype and whether the loss depends on them)",
                [self._options, *Plan(tuple(gradients), ()).rows],
            )
        plan = self._make(gradients)
        self._plans[key] = plan
        return plan

    def _make(self, gradients: Sequence[Gradient]) -> Plan:
        if self._bucket_bytes is not None:
            return make_plan(gradients, self._bucket_bytes)
        if self._chosen is None:
            self._chosen = choose_bucket_bytes(self._communicator)
        plan = make_plan(gradients, self._chosen.bytes, first_bytes=FIRST_BUCKET_BYTES)
        LOGGER.info(
            "gradients of %.1f MB travel in %d bucket(s) of up to %d MiB (%s)",
            plan.nbytes / 1e6,
            len(plan.buckets),
            self._chosen.bytes >> 20,
            self._chosen.reason,
        )
        return plan

    @property
    def made(self) -> list[Plan]:
        """The newest plan of each list, in the order in which the lists came."""
        return list(self._plans.values())

    def number(self, plan: Plan) -> int | None:
        """Returns the place of a plan in `made`; None if another took its place."""
        return next((n for n, made in enumerate(self.made) if made is plan), None)
