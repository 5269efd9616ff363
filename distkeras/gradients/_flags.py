"""The flags of a step: what all ranks must see alike of it.

They travel in the header of every bucket, before the rows of sparse gradients, or in
a message of their own where gradients stay local. Their places in it are known here
alone. With them travels which plan a rank follows.
"""

from __future__ import annotations

import numpy as np

from distkeras.gradients._channel import Channel

_EXAMPLES, _STOP = 0, 1
_MARKS = slice(2, 8)

WRITTEN = 8
"""Numbers at the start of a head that `StepFlags.write` writes."""

_NONFINITE = WRITTEN  # only in a message of flags alone

NO_PLAN: tuple[float, ...] = (0.0,) * 6
"""The marks of what follows no plan."""


def marks(digest: int) -> tuple[float, ...]:
    """Returns three numbers made of a plan's digest, and the square of each.

    Summed over ranks they tell whether all ranks' are the same: the mean of squares is
    the square of the mean for equal numbers alone. Below 64 their sums are exact in
    float32 for 4096 ranks; three let one difference in 260,000 pass.
    """
    numbers = [digest >> shift & 63 for shift in (0, 6, 12)]
    return tuple(float(n) for number in numbers for n in (number, number * number))


def _alike(sums: list[float], size: int) -> bool:
    pairs = zip(sums[::2], sums[1::2], strict=True)
    return all(size * squares == first * first for first, squares in pairs)


class StepFlags:
    """How many examples a step has on all ranks, and whether a rank wants to stop.

    Args:
        channel: whose counters count the steps, and which carries the flags alone.

    Attributes:
        examples: what all ranks together saw in the newest step.
        exhausted: set when no rank had an example left in a step; whoever acts on
            it clears it.
        stop_seen: whether the flags of a step since `clear_stop` carried some rank's
            stop.
        marks: of this rank's plan, see `marks`.
        plans_differ: set when ranks were found to follow plans that differ.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.examples = 0.0
        self.exhausted = False
        self.stop_seen = False
        self.marks = NO_PLAN
        self.plans_differ = False
        self._stop_requested = False
        self._arrived = 0.0
        self._counted = False  # whether this step's examples have been
        self._open = False  # whether messages were sent after the newest `finish`

    def announce_stop(self) -> None:
        """Has what is written next carry this rank's stop."""
        self._stop_requested = True

    def clear_stop(self) -> None:
        """Forgets announcements, this rank's own and those that were seen."""
        self._stop_requested = False
        self.stop_seen = False

    def enter(self, arrived: float, *, begins: bool = False) -> None:
        """Notes that a message of a step is to be sent.

        A step may have several exchanges, one for each of its optimizers, and its
        examples count once.

        Args:
            arrived: when the step's data had come, which is another time in each
                step; 0 where that is not known: then a step has one exchange.
            begins: whether a step begins with this, where `arrived` does not say.
        """
        if arrived != self._arrived or (begins and not arrived):
            self._counted = False
        self._arrived = arrived
        self._open = True

    def write(self, head: np.ndarray, examples: float) -> None:
        """Writes this rank's flags, to be summed over ranks.

        Args:
            head: of a message; the first `WRITTEN` of its numbers are written.
            examples: this rank's.
        """
        head[_EXAMPLES] = examples
        head[_STOP] = self._stop_requested
        head[_MARKS] = self.marks

    def read(self, head: np.ndarray) -> None:
        """Takes over the sums of what all ranks wrote, of any message of the step."""
        self.examples = float(head[_EXAMPLES])
        if not self._counted:
            self._channel.counters.examples += self.examples
            self._counted = True
        self.stop_seen = self.stop_seen or bool(head[_STOP])
        if self.examples == 0:
            self.exhausted = True
        if not _alike(head[_MARKS].tolist(), self._channel.communicator.size):
            self.plans_differ = True

    def exchange(self, examples: float, nonfinite: bool) -> bool:
        """Exchanges the flags alone, in a message of their own.

        Args:
            examples: this rank's.
            nonfinite: whether this rank's gradients are not finite.

        Returns:
            Whether those of any rank are not.
        """
        head = np.zeros(WRITTEN + 1, np.float64)
        self.write(head, examples)
        head[_NONFINITE] = nonfinite
        self._channel.ready()
        self._channel.communicator.allreduce(head)
        self._channel.counters.messages += 1
        self.read(head)
        self._stop_requested = False
        self._channel.clock.lap("exchange")
        return bool(head[_NONFINITE])

    def finish(self) -> None:
        """Counts an exchange whose last message has been sent, once."""
        self._stop_requested = False
        self._channel.counters.exchanges += self._open and self.examples > 0
        self._open = False
        if not self._arrived:
            self._counted = False

    def divide(self, sums: np.ndarray) -> None:
        """Makes Σ n·g the mean, in place; zeros where no rank had an example."""
        # Not times the reciprocal, which would round twice.
        if self.examples:
            np.divide(sums, sums.dtype.type(self.examples), out=sums)
        else:
            sums[...] = 0
