"""Where this rank stands: what a watchdog tells the others that ask."""

from __future__ import annotations

import contextlib
import threading
import time

from distkeras.communicators import _stacks
from distkeras.communicators import _waiting
from distkeras.communicators._stall import END
from distkeras.communicators._stall import State
from distkeras.communicators._stall import Wait
from distkeras.communicators._waiting import Call
from distkeras.communicators._waiting import Calls

PENDING_AFTER = 4.0
"""Seconds after which work that goes on after a call's return counts as waiting."""


def waits(end: Calls, now: float, *, places: bool = True) -> list[Wait]:
    """Returns the collectives in which this rank waits.

    Args:
        end: the record of the calls in which ranks wait for each other's end.
        now: of `time.monotonic`.
        places: whether to look up where in the user's code that is.
    """
    found = []
    drivers: list[int] | None = None
    for calls in _waiting.open_calls():
        call = calls.current
        driver, place = "", ""
        if call is None:
            call = pending(calls, now)
            driver = "other"  # the host may go on
        if call is None:
            continue
        if places and not driver:
            drivers = _waiting.calling_threads() if drivers is None else drivers
            driver = _driver(call.thread, drivers)
        if places:
            place = _stacks.where(call.thread)
        name = END if calls is end else calls.name
        found.append(Wait(name, calls.members, call, now - call.since, driver, place))
    return found


def state(rank: int, end: Calls, name: str, number: int, *, left: bool) -> State:
    """Describes where this rank stands.

    Args:
        rank: this one.
        end: as for `waits`.
        name: the communicator that was asked about.
        number: the call.
        left: whether the script has ended.
    """
    now = time.monotonic()
    calls = end if name == END else _waiting.find_calls(name)
    held = tuple(waits(end, now))
    entered = _waiting.entered()
    entered[END] = end.entered
    text = ""
    if not left:
        text = _stacks.stack()
        for thread in {w.call.thread for w in held}:
            if thread != threading.main_thread().ident:
                text += "\nin another thread:\n" + _stacks.stack(thread)
    return State(
        rank=rank,
        left=left,
        entered=entered,
        asked=None if calls is None else calls.find(number),
        waits=held,
        busy=_busy(),
        where="" if left else _stacks.where(),
        stack=text,
    )


def oldest_wait(end: Calls, now: float) -> Wait | None:
    """Returns the wait that began first: others may be parts of it.

    Args:
        end: as for `waits`.
        now: of `time.monotonic`.
    """
    return max(waits(end, now, places=False), key=lambda wait: wait.age, default=None)


def still_waits(end: Calls, wait: Wait) -> bool:
    """Whether this rank is in that call yet.

    Args:
        end: as for `waits`.
        wait: of this rank, some time ago.
    """
    calls = end if wait.name == END else _waiting.find_calls(wait.name)
    call = None if calls is None else calls.current
    if call is None and calls is not None:
        call = pending(calls, time.monotonic())
    return call is not None and call.number == wait.call.number


def pending(calls: Calls, now: float) -> Call | None:
    """Returns the last call if its work is not done long after its return."""
    if calls.pending is None or not calls.recent:
        return None
    last = calls.recent[-1]
    return last if now - last.since >= PENDING_AFTER and calls.pending() else None


def _driver(thread: int, calling: list[int]) -> str:
    if thread not in calling:
        return "framework" if len(calling) <= 1 else "other"
    return "main" if calling == [thread] else "other"


def _busy() -> float:
    """Returns CPU seconds of this process but for threads that do not work."""
    total = time.process_time() - time.thread_time()
    seen = set()
    for calls in _waiting.open_calls():
        # Looked up just before: the clock of a thread that has ended must not be
        # asked for, and one in a call is alive.
        call = calls.current
        if call is not None and call.thread not in seen:
            seen.add(call.thread)
            with contextlib.suppress(OSError, AttributeError):
                total -= time.clock_gettime(time.pthread_getcpuclockid(call.thread))
    return total
