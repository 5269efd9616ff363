"""The messages of an exchange: timed and counted, whatever they carry."""

from __future__ import annotations

import dataclasses

from distkeras.communicators import Communicator
from distkeras.gradients._clock import StepClock


@dataclasses.dataclass
class Counters:
    """What has been exchanged so far on this rank.

    Attributes:
        exchanges: gradient exchanges; one an optimizer update.
        collectives: calls that carry gradients: an allreduce for each bucket, and for
            all sparse gradients together an allgather, an allreduce of those that are
            smaller dense, or both.
        messages: small calls that carry counts only: between updates (accumulation),
            before sparse gradients for which there is a choice, and before buckets
            that are coded or stay on a device.
        bytes: bytes that this rank handed to them.
        examples: that all ranks together trained on.
    """

    exchanges: int = 0
    collectives: int = 0
    messages: int = 0
    bytes: int = 0
    examples: float = 0.0


@dataclasses.dataclass(frozen=True)
class Channel:
    """What gradients and flags are exchanged by.

    Attributes:
        communicator: carries them, and nothing else.
        clock: where the time of steps goes.
        counters: see `Counters`.
    """

    communicator: Communicator
    clock: StepClock
    counters: Counters

    def ready(self) -> None:
        """Notes that a message is packed, and when those of all ranks are."""
        self.clock.lap("pack")
        if self.clock.traced:
            self.communicator.barrier()
            self.clock.lap("wait")

    def exchanged(self, nbytes: int) -> None:
        """Notes that a call has returned, to which this rank handed gradients.

        Args:
            nbytes: of them.
        """
        self.counters.collectives += 1
        self.counters.bytes += nbytes
        self.clock.lap("exchange")
