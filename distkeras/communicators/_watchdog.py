"""No rank waits for ever: the watchdog of a job of several ranks.

A thread in each process looks, a few times a second, at the collectives this rank
waits in (`_waiting.py`). When a wait is some seconds old, the first of the ranks that
wait asks the others where they stand, by messages on a communicator that nothing else
uses. What the answers mean is decided in `_stall.py`: ranks in different collectives
and ranks that have left end the job at once, anything else at the timeout.

A rank whose script ends waits in an `atexit` handler until all others end theirs, as
MPI's own finalization does, but so that it can still answer. That is the only cost of
leaving.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import math
import os
import sys
import threading
import time
from typing import Any

from distkeras._errors import CommunicatorError
from distkeras._exit import LAST_WORDS
from distkeras._exit import STACKS
from distkeras._exit import STALLED
from distkeras._exit import write
from distkeras.communicators import _dump
from distkeras.communicators import _elastic
from distkeras.communicators import _ending
from distkeras.communicators import _failure
from distkeras.communicators import _stall
from distkeras.communicators import _standing
from distkeras.communicators import _waiting
from distkeras.communicators._mail import Mail
from distkeras.communicators._mpi import MPICommunicator
from distkeras.communicators._processes import Process
from distkeras.communicators._processes import status
from distkeras.communicators._processes import this_process
from distkeras.communicators._stall import END
from distkeras.communicators._stall import State
from distkeras.communicators._stall import Verdict
from distkeras.communicators._stall import Wait
from distkeras.communicators._waiting import waiting as waiting

VARIABLE = "DISTKERAS_TIMEOUT"
DEFAULT_TIMEOUT = 600.0

# Seconds between looks at the waits and at the messages.
_POLL = 0.2
# The same in a job that outlives its ranks: what a loss costs begins here.
_LOOK = 0.05
# Errors in a row after which it gives up.
_MOST_FAILURES = 25
# Seconds of waiting after which ranks are asked, and between two questions.
_CHECK = 4.0
# Seconds for the answers; a rank that computes under load may be slow.
_PATIENCE = 2.0
# Seconds by which each rank lets those before it ask first, and those that it stays
# quiet after another has asked: one report, and few messages.
_TURN = 0.3
_HOLD = 2.5
# Seconds until the second look at what needs two.
_CONFIRM = 1.5


def read_timeout(argument: float | None) -> float:
    """Returns the seconds a rank may wait; 0 for no limit.

    Args:
        argument: that of `init`; the environment variable counts if None.

    Raises:
        CommunicatorError: it is not a number of seconds.
    """
    word: Any = argument
    origin = "timeout"
    if argument is None:
        word = os.environ.get(VARIABLE) or DEFAULT_TIMEOUT
        origin = VARIABLE
    try:
        seconds = float(word)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise CommunicatorError(
            f"Expected {origin} to be a number of seconds, 0 for no limit. Received: "
            f"{word!r}"
        )
    return seconds


@dataclasses.dataclass
class _Inquiry:
    """A question to the other members of a communicator, and the answers so far."""

    wait: Wait
    deadline: float
    expected: frozenset[int]
    states: dict[int, State]

    @property
    def complete(self) -> bool:
        return self.expected <= self.states.keys()


class _Watchdog:
    """The watchdog of one process.

    Args:
        host: the world's communicator of host memory; collective.
        timeout: seconds, 0 for no limit.
    """

    def __init__(self, host: MPICommunicator, timeout: float) -> None:
        self.timeout = timeout
        self.process = os.getpid()
        self._host = host
        self._rank = host.rank
        self._mpi: Any = sys.modules["mpi4py.MPI"]
        facts = host.allgather_object((this_process(), _failure.is_interactive()))
        self._peers: list[Process] = [peer for peer, _ in facts]
        # A session in which somebody types survives; there may be no hurry either.
        self._reports_only = any(interactive for _, interactive in facts)
        self._speaks = self._mpi.Query_thread() >= self._mpi.THREAD_MULTIPLE
        self._comm: Any = host.mpi_comm.Dup()
        self._mail = Mail(self._mpi, self._comm)
        self._end = _waiting.Calls(range(host.size))
        self._left = False
        self._stop = threading.Event()
        self._unanswered: dict[int, float] = {}
        self._inquiry: _Inquiry | None = None
        self._current: tuple[str, int] | None = None
        self._earlier: dict[int, tuple[float, State]] = {}
        self._next = 0.0
        self._quiet_until = 0.0
        self._warned = False
        self._suspects = False
        self._working_since = 0.0
        self._dumps = _dump.register()
        self._keyval: Any = None
        self._thread = threading.Thread(
            target=self._run, name="distkeras-watchdog", daemon=True
        )
        self._stop_before_finalization()
        self._thread.start()

    # The thread

    def _run(self) -> None:
        failures = 0
        while not self._stop.wait(_LOOK if _elastic.active() else _POLL):
            try:
                if _elastic.look():  # until those that are left have come together
                    self._inquiry = None
                    continue
                self._tick()
                failures = 0
            except Exception as error:
                if self._stop.is_set():
                    return
                _elastic.failed(error)
                if _elastic.lost():
                    continue
                failures += 1
                if failures in (1, _MOST_FAILURES):
                    write(
                        f"[distkeras] rank {self._rank}: the watchdog "
                        f"{'stumbles' if failures == 1 else 'stops'}: "
                        f"{type(error).__name__}: {error}"
                    )
                if failures == _MOST_FAILURES:
                    return

    def _tick(self) -> None:
        self._receive()
        now = time.monotonic()
        inquiry = self._inquiry
        if inquiry is not None:
            if inquiry.complete or now >= inquiry.deadline:
                self._inquiry = None
                self._conclude(inquiry)
            return
        wait = self._oldest_wait(now)
        key = None if wait is None else (wait.name, wait.call.number)
        if key != self._current:
            self._current = key
            self._earlier = {}
            self._warned = self._suspects = False
            self._next = self._working_since = 0.0
        if wait is None:
            return
        check = self._check_interval()
        turn = min(wait.members.index(self._rank), 20) * _TURN
        due = wait.call.since + check + min(turn, check)
        # Of those that wait, the first asks for all of them.
        quiet_until = 0.0 if self._suspects else self._quiet_until
        if now >= max(due, self._next, quiet_until):
            self._next = now + check
            self._ask(wait)

    def _check_interval(self) -> float:
        return min(_CHECK, self.timeout / 3) if self.timeout else _CHECK

    def _is_late(self, wait: Wait) -> bool:
        start = max(self._working_since, wait.call.since)
        return bool(self.timeout) and time.monotonic() - start >= self.timeout

    def _oldest_wait(self, now: float) -> Wait | None:
        """Returns the wait that began first: others may be parts of it."""
        waits = self._waits(now, places=False)
        return max(waits, key=lambda wait: wait.age, default=None)

    def _waits(self, now: float, *, places: bool = True) -> list[Wait]:
        return _standing.waits(self._end, now, places=places)

    def _state(self, name: str, number: int) -> State:
        return _standing.state(self._rank, self._end, name, number, left=self._left)

    # Questions and answers

    def _ask(self, wait: Wait) -> None:
        """Asks the other members where they stand."""
        now = time.monotonic()
        mine = self._state(wait.name, wait.call.number)
        # With its place, which is only looked up now.
        for known in mine.waits:
            if (known.name, known.call.number) == (wait.name, wait.call.number):
                wait = known
        others = frozenset(wait.members) - {self._rank}
        if not self._speaks:
            others = frozenset()
        for rank in others:
            # Messages to a rank that does not read them must not pile up.
            if now - self._unanswered.get(rank, -math.inf) > 6 * _CHECK:
                self._unanswered[rank] = now
                self._mail.send(rank, ("ask", wait.name, wait.call.number))
        deadline = now + _PATIENCE
        self._inquiry = _Inquiry(wait, deadline, others, {self._rank: mine})

    def _receive(self) -> None:
        if not self._speaks:
            return
        for source, (kind, *content) in self._mail.received():
            if kind == "ask":
                self._quiet_until = time.monotonic() + _HOLD
                self._mail.send(source, ("tell", self._state(*content), *content))
            else:
                self._unanswered.pop(source, None)
                self._take_answer(source, *content)

    def _take_answer(self, source: int, state: State, name: str, number: int) -> None:
        """Adds an answer to the inquiry; it may come late, after another question."""
        inquiry = self._inquiry
        if inquiry is None or source not in inquiry.expected:
            return
        if (name, number) != (inquiry.wait.name, inquiry.wait.call.number):
            state = dataclasses.replace(state, asked=None)
        inquiry.states[source] = state

    def _conclude(self, inquiry: _Inquiry) -> None:
        """Decides what follows from the answers."""
        wait, states = inquiry.wait, inquiry.states
        now = time.monotonic()
        if not self._still_waits(wait):
            return
        wait = dataclasses.replace(wait, age=now - wait.call.since)
        before = {rank: state for rank, (_, state) in self._earlier.items()}
        elapsed = now - max((t for t, _ in self._earlier.values()), default=now)
        verdict = _stall.judge(self._rank, wait, states, before, elapsed)
        silent = self._silent(inquiry)
        if verdict is None:
            gone = [r for r, why in silent.items() if why == _GONE]
            if gone:
                verdict = _stall.gone(gone, wait)
            elif self._is_late(wait) and not (
                wait.name == END and self._others_work(wait, states, silent, now)
            ):
                verdict = _stall.stalled(wait, states, silent, self.timeout)
        self._suspects = verdict is not None and not verdict.certain
        if self._suspects:
            self._next = now + _CONFIRM
            verdict = None
        if wait.name != END or not self._earlier:
            self._earlier = {rank: (now, state) for rank, state in states.items()}
        if verdict is not None:
            self._announce(verdict, wait, states, silent)
            return
        self._warn_once(wait, states, silent)

    def _still_waits(self, wait: Wait) -> bool:
        calls = self._end if wait.name == END else _waiting.find_calls(wait.name)
        call = None if calls is None else calls.current
        if call is None and calls is not None:
            call = _standing.pending(calls, time.monotonic())
        return call is not None and call.number == wait.call.number

    def _silent(self, inquiry: _Inquiry) -> dict[int, str]:
        """Returns what is known of the ranks that did not answer."""
        silent = {}
        mine = self._peers[self._rank]
        others = frozenset(inquiry.wait.members) - inquiry.states.keys()
        for rank in sorted(others):
            if not self._speaks:
                silent[rank] = (
                    "cannot be asked: MPI's thread level is below MPI_THREAD_MULTIPLE"
                )
                continue
            silent[rank] = _SILENT[status(self._peers[rank], mine)]
        return silent

    def _others_work(
        self,
        wait: Wait,
        states: dict[int, State],
        silent: dict[int, str],
        now: float,
    ) -> bool:
        """Whether the ranks that this one waits for at its end do something.

        One rank often has work to do after the others (it evaluates, exports). As
        long as it does, there is no harm in waiting.
        """
        late = _stall.late_ranks(wait, states)
        working = [r for r, why in silent.items() if why == _SILENT["alive"]]
        for rank in late:
            earlier = self._earlier.get(rank)
            if earlier is None or not _stall.is_idle(
                earlier[1], states[rank], now - earlier[0]
            ):
                working.append(rank)
        if working:
            self._working_since = now
            self._earlier = {}
        return bool(working)

    def _warn_once(
        self, wait: Wait, states: dict[int, State], silent: dict[int, str]
    ) -> None:
        """Says early that ranks wait, where the timeout is far away."""
        if self._warned or wait.name == END or self.timeout < 10 * _CHECK:
            return
        if wait.age < min(60.0, self.timeout / 10):
            return
        self._warned = True
        verdict = _stall.stalled(wait, states, silent, self.timeout)
        verdict = dataclasses.replace(
            verdict, remedy=f"Still waiting; the limit is {self.timeout:g} s."
        )
        write(self._report(verdict, wait, states, silent, ending=False))

    def _report(
        self,
        verdict: Verdict,
        wait: Wait,
        states: dict[int, State],
        silent: dict[int, str],
        *,
        ending: bool,
    ) -> str:
        places = {rank: str(peer) for rank, peer in enumerate(self._peers)}
        return _stall.report(verdict, wait, states, silent, places, ending=ending)

    def _announce(
        self,
        verdict: Verdict,
        wait: Wait,
        states: dict[int, State],
        silent: dict[int, str],
    ) -> None:
        """Writes the report and ends the job."""
        ending = not self._reports_only
        if not ending and self._warned:
            return
        self._warned = True
        if verdict.code == STALLED:
            self._ask_for_dumps(silent)
        write(self._report(verdict, wait, states, silent, ending=ending))
        if ending:
            _ending.end_job(self._host, verdict.code, speaks=self._speaks)

    def _ask_for_dumps(self, silent: dict[int, str]) -> None:
        """Lets ranks that hold Python's lock show their stacks, by a signal."""
        sent = False
        for rank, why in silent.items():
            if self._dumps and why == _SILENT["alive"]:
                with contextlib.suppress(OSError):
                    os.kill(self._peers[rank].pid, STACKS)
                    sent = True
        if sent:
            time.sleep(LAST_WORDS)

    # The end

    def leave(self, *, free: bool) -> None:
        """Waits until all ranks leave, answering meanwhile; then stops.

        Args:
            free: whether MPI goes on and its communicator is to be given back.
        """
        if self._stop.is_set() or self._mpi.Is_finalized():
            return
        try:
            if self._speaks and (free or not self._reports_only):
                self._left = not free
                self._wait_for_all("shutdown" if free else "end")
        except self._mpi.Exception:
            if not _elastic.look():
                raise
        finally:
            self.stop()
        if free and not _elastic.lost():
            self._comm.Free()

    def _wait_for_all(self, verb: str) -> None:
        """Returns when every rank has called it."""
        with self._end(verb):
            request = self._comm.Ibarrier()
            pause = 0.0005
            while not request.Test():
                if not self._thread.is_alive() or _elastic.lost():
                    return  # MPI failed
                time.sleep(pause)
                pause = min(pause * 1.5, 0.02)

    def stop(self) -> None:
        """Stops the thread; no MPI call of it comes afterwards."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._end.close()
        keyval, self._keyval = self._keyval, None
        if keyval is not None and not self._mpi.Is_finalized():
            self._mpi.COMM_SELF.Delete_attr(keyval)
        if self._dumps:
            _dump.unregister()
            self._dumps = False

    def _stop_before_finalization(self) -> None:
        """Has MPI call `stop` where a script finalizes it by itself.

        MPI deletes the attributes of `COMM_SELF` first of all.
        """

        def finalizing(*_: Any) -> None:
            if self._keyval is not None:
                self._keyval = None
                self.stop()

        keyval = self._mpi.Comm.Create_keyval(delete_fn=finalizing)
        self._mpi.COMM_SELF.Set_attr(keyval, True)
        self._keyval = keyval


_GONE = "its process is gone"
_SILENT = {
    "gone": _GONE,
    "stopped": "does not answer: its process is stopped (SIGSTOP, or a debugger)",
    "alive": "does not answer, though its process lives: it runs code that holds "
    "Python's lock",
    None: "does not answer: it is stopped, or holds Python's lock, or its host is gone",
}


_watchdog: _Watchdog | None = None


def start(host: MPICommunicator, timeout: float) -> None:
    """Starts the watchdog; collective.

    Args:
        host: the world's communicator of host memory; nothing starts for one rank.
        timeout: seconds a rank may wait in a collective, 0 for no limit.
    """
    global _watchdog
    if host.size == 1 or _watchdog is not None:
        return
    _watchdog = _Watchdog(host, timeout)
    atexit.register(_leave_at_exit)


def set_timeout(timeout: float) -> None:
    """Changes the timeout of this rank's watchdog, if it runs."""
    if _watchdog is not None:
        _watchdog.timeout = timeout


def shut_down() -> None:
    """Stops the watchdog and frees its communicator; collective."""
    global _watchdog
    watchdog, _watchdog = _watchdog, None
    if watchdog is not None and watchdog.process == os.getpid():
        atexit.unregister(_leave_at_exit)
        watchdog.leave(free=True)


def abandon() -> float | None:
    """Stops without a message, where a rank is lost; returns the timeout.

    To be started anew with the ranks that are left. None if it did not run.
    """
    global _watchdog
    watchdog, _watchdog = _watchdog, None
    if watchdog is None:
        return None
    atexit.unregister(_leave_at_exit)
    watchdog.stop()
    return watchdog.timeout


def _leave_at_exit() -> None:
    """Leaves in step with the other ranks; a fork's exit is its own."""
    watchdog = _watchdog
    if watchdog is not None and watchdog.process == os.getpid():
        watchdog.leave(free=False)
        _ending.limit_what_follows(watchdog.timeout)
