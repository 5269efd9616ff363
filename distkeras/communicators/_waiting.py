"""What this rank waits in: one small record for each collective call.

Every communicator owns a `Calls`, and enters each collective through it:

    self._calls = Calls(members)
    with self._calls("allreduce", buffer.nbytes, op):
        ...

That costs well under a microsecond. Nothing here looks at the records: the watchdog
(`_watchdog.py`) does, from its own thread, when a wait has become long.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

from distkeras._errors import CommunicatorError
from distkeras.communicators import _elastic
from distkeras.communicators._agreement import name_ranks

# How far a rank may run ahead of one that waits (the root of a broadcast does) and
# still be asked what its own call at that place was.
_KEPT = 64

# Verbs whose sizes must be the same on all ranks.
_SIZED = frozenset({"allreduce", "broadcast"})


class Call(NamedTuple):
    """One collective call of this rank.

    Attributes:
        number: of the call among those on its communicator, from 1 up.
        verb: the collective.
        size: bytes of the buffer, 0 where there is none.
        detail: what else must be the same on all ranks (operation, root).
        since: when it began, of `time.monotonic`.
        thread: the identity of the thread that called.
    """

    number: int
    verb: str
    size: int
    detail: Any
    since: float
    thread: int

    @property
    def key(self) -> tuple[Any, ...]:
        """What must be the same on all ranks."""
        return (self.verb, self.detail, self.size if self.verb in _SIZED else -1)


class Calls:
    """The collective calls of this rank on one communicator; a context manager.

    Args:
        members: the communicator's ranks, as numbers in MPI's world.
        parent: the calls of the communicator it was made from.

    Attributes:
        name: the same on all members, as they make their communicators in the same
            order.
        members: as given.
        current: the call that has not returned yet.
        pending: tells whether the last call's work goes on after its return, as on a
            device; None if it cannot.
        recent: the last calls, the newest at the end.

    Example:
        >>> calls = Calls([0, 1])
        >>> with calls("barrier"):
        ...     calls.current.number, calls.current.verb
        (1, 'barrier')
        >>> calls.current is None, calls.entered
        (True, 1)
        >>> calls.close()
    """

    __slots__ = ("_previous", "current", "members", "name", "pending", "recent")

    def __init__(self, members: Sequence[int], parent: Calls | None = None) -> None:
        self.members = tuple(members)
        self.name = _new_name(self.members, parent)
        self.current: Call | None = None
        self.pending: Callable[[], bool] | None = None
        self.recent: collections.deque[Call] = collections.deque(maxlen=_KEPT)
        self._previous = 0
        _open[self.name] = self

    def __call__(self, verb: str, size: int = 0, detail: Any = None) -> Calls:
        """Notes a call that begins; to be used in a `with` at once.

        Args:
            verb: the collective.
            size: bytes of the buffer.
            detail: what else must be the same on all ranks.
        """
        self._previous = number = self._previous + 1
        thread = threading.get_ident()
        call = Call(number, verb, size, detail, time.monotonic(), thread)
        _threads.add(thread)
        # One assignment each: the watchdog's thread sees all of a call or nothing.
        self.recent.append(call)
        self.current = call
        return self

    def again(self) -> Calls:
        """Notes that a thread waits for the last call's work; no call of its own."""
        if self.recent:
            last = self.recent[-1]
            self.current = last._replace(
                since=time.monotonic(), thread=threading.get_ident()
            )
        return self

    def __enter__(self) -> None:
        """The call was noted already."""

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        """Notes that the call has returned."""
        self.current = None
        # Not of a communicator that was left behind with a lost rank.
        known = error is not None and _open.get(self.name) is self
        if error is not None and known and _elastic.failed(error):
            raise CommunicatorError(_elastic.LOST) from error

    @property
    def entered(self) -> int:
        """How many calls have begun."""
        recent = self.recent
        return recent[-1].number if recent else 0

    def find(self, number: int) -> Call | None:
        """Returns the call of that number, if it is not long past."""
        # A tuple is made in one step, whatever other threads do.
        return next((c for c in tuple(self.recent) if c.number == number), None)

    def close(self) -> None:
        """Ends the record; what was entered stays known."""
        self.current = None
        if _open.pop(self.name, None) is not None:
            _closed[self.name] = self.entered
            while len(_closed) > _MOST_CLOSED:
                del _closed[next(iter(_closed))]


_MOST_CLOSED = 1000

_open: dict[str, Calls] = {}
_closed: dict[str, int] = {}
_names: collections.Counter[tuple[str, tuple[int, ...]]] = collections.Counter()
_threads: set[int] = set()


def open_calls() -> list[Calls]:
    """Returns the records of all communicators of this process."""
    return list(_open.values())


def find_calls(name: str) -> Calls | None:
    """Returns the record of that name, if it is open."""
    return _open.get(name)


def entered() -> dict[str, int]:
    """Returns how many calls have begun, by the communicator's name."""
    return {**_closed, **{calls.name: calls.entered for calls in open_calls()}}


def calling_threads() -> list[int]:
    """Returns the threads of Python's own that called a collective and still run.

    Threads that a framework made (TensorFlow runs a step's host calls on such) are
    not among them.
    """
    return [
        thread.ident
        for thread in threading.enumerate()
        if thread.ident in _threads and not isinstance(thread, threading._DummyThread)
    ]


def start_over() -> None:
    """Forgets all communicators: their ranks, or their numbers, are others now."""
    _open.clear()
    _closed.clear()
    _names.clear()


def _new_name(members: tuple[int, ...], parent: Calls | None) -> str:
    """Returns a name that all members give, without a message.

    They make the communicators they share in the same order: counted for each set
    of members, the numbers are equal.
    """
    base = "" if parent is None else f"{parent.name}."
    _names[base, members] += 1
    name = f"{base}{_names[base, members]}"
    if parent is not None and parent.members == members:
        return name
    return f"{name}({name_ranks(members).partition(' ')[2]})"
