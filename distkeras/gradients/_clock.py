"""Where the time of a step goes: waiting for data, computing, exchanging.

A step of rank 0 and one of rank 7 can be laid side by side, so all times are those of
the system's clock, in seconds since the epoch.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Literal

Part = Literal["data", "compute", "pack", "wait", "exchange", "unpack", "update"]


MOST_EVENTS = 200_000
"""Kept of a traced run: the first so many, some tens of megabytes."""


@dataclasses.dataclass
class Event:
    """One part of one step of this rank; `start` in seconds since the epoch."""

    part: Part
    start: float
    seconds: float


class StepClock:
    """Adds up, by part, what this rank's steps take; and lists it, if asked to.

    Attributes:
        steps: that were begun so far.
        seconds: spent in each part so far.
        events: every part of every step, while `traced` is set.
        traced: whether events are kept, and waiting for other ranks is told from the
            exchange itself (which takes a barrier a bucket, and some time).
    """

    def __init__(self) -> None:
        self.steps = 0
        self.seconds: dict[Part, float] = {}
        self.events: list[Event] = []
        self.traced = False
        self._mark = time.time()
        self._data_due = False

    def begin(self, steps: int = 1) -> None:
        """Notes that an execution of the training function begins.

        Args:
            steps: that it makes.
        """
        self.steps += steps
        self._mark = time.time()
        self._data_due = True

    def arrived(self, when: float) -> None:
        """Notes when a step's data had come, at each of its messages.

        In an execution of several steps this is seen for the first alone: before the
        data of the others comes the update of the one before.

        Args:
            when: seconds since the epoch; 0 where it is not known.
        """
        if self._data_due and when > self._mark:
            self._add("data", when)
        self._data_due = False
        self.lap("compute")

    def lap(self, part: Part) -> None:
        """Counts the time since the last mark as `part`, and marks now."""
        self._add(part, time.time())

    def _add(self, part: Part, until: float) -> None:
        seconds = max(until - self._mark, 0.0)
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds
        if self.traced and len(self.events) < MOST_EVENTS:
            self.events.append(Event(part, self._mark, seconds))
        self._mark = until

    @property
    def exchanging(self) -> float:
        """Seconds from gradients to reduced gradients so far, waiting included."""
        parts: tuple[Part, ...] = ("pack", "wait", "exchange", "unpack")
        return sum(self.seconds.get(part, 0.0) for part in parts)
