"""Ranks that wait ask the others where they stand, and answer when they are asked."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

from distkeras.communicators._mail import Mail
from distkeras.communicators._stall import State
from distkeras.communicators._stall import Wait

# Seconds for the answers; a rank that computes under load may be slow.
_PATIENCE = 2.0
# Seconds that a rank stays quiet after another has asked: few messages.
_HOLD = 2.5
# Seconds until a rank that has not answered is asked again: messages to a rank that
# does not read them must not pile up.
_PAUSE = 24.0


@dataclasses.dataclass
class Inquiry:
    """A question to the other members of a communicator, and the answers so far."""

    wait: Wait
    deadline: float
    expected: frozenset[int]
    states: dict[int, State]

    @property
    def complete(self) -> bool:
        """Whether all have answered that were asked."""
        return self.expected <= self.states.keys()


class Inquirer:
    """Asks and answers for one rank; one question at a time.

    Args:
        rank: this one, in the world.
        mail: to the others; None where MPI allows a thread no messages.
        state: says where this rank stands, asked for a call by the name of its
            communicator and its number.

    Attributes:
        inquiry: the question that is open, if one is.
        quiet_until: when it is this rank's turn again, of `time.monotonic`.
    """

    def __init__(
        self, rank: int, mail: Mail | None, state: Callable[[str, int], State]
    ) -> None:
        self.inquiry: Inquiry | None = None
        self.quiet_until = 0.0
        self._rank = rank
        self._mail = mail
        self._state = state
        self._unanswered: dict[int, float] = {}

    def ask(self, wait: Wait) -> None:
        """Asks the other members where they stand."""
        now = time.monotonic()
        mine = self._state(wait.name, wait.call.number)
        # With its place, which is only looked up now.
        for known in mine.waits:
            if (known.name, known.call.number) == (wait.name, wait.call.number):
                wait = known
        others: frozenset[int] = frozenset()
        if self._mail is not None:
            others = frozenset(wait.members) - {self._rank}
            for rank in others:
                if now - self._unanswered.get(rank, -math.inf) > _PAUSE:
                    self._unanswered[rank] = now
                    self._mail.send(rank, ("ask", wait.name, wait.call.number))
        self.inquiry = Inquiry(wait, now + _PATIENCE, others, {self._rank: mine})

    def receive(self) -> None:
        """Answers what others ask, and takes their answers."""
        if self._mail is None:
            return
        for source, (kind, *content) in self._mail.received():
            if kind == "ask":
                self.quiet_until = time.monotonic() + _HOLD
                self._mail.send(source, ("tell", self._state(*content), *content))
            else:
                self._unanswered.pop(source, None)
                self._take(source, *content)

    def _take(self, source: int, state: State, name: str, number: int) -> None:
        """Adds an answer to the inquiry; it may come late, after another question."""
        inquiry = self.inquiry
        if inquiry is None or source not in inquiry.expected:
            return
        if (name, number) != (inquiry.wait.name, inquiry.wait.call.number):
            state = dataclasses.replace(state, asked=None)
        inquiry.states[source] = state

    def finished(self, now: float) -> Inquiry | None:
        """Returns the question once nothing more is waited for, and closes it."""
        inquiry = self.inquiry
        if inquiry is None or not (inquiry.complete or now >= inquiry.deadline):
            return None
        self.inquiry = None
        return inquiry
