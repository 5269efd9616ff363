"""No rank waits for ever: the watchdog of a job of several ranks.

A thread in each process looks, a few times a second, at the collectives this rank
waits in (`_waiting.py`). When a wait is some seconds old, the first of the ranks that
wait asks the others where they stand (`_inquiry.py`), by messages on a communicator
that nothing else uses. What the answers mean is decided in `_case.py` and `_stall.py`:
ranks in different collectives and ranks that have left end the job at once, anything
else at the timeout.

A rank whose script ends waits in an `atexit` handler until all others end theirs, as
MPI's own finalization does, but so that it can still answer. That is the only cost of
leaving.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from distkeras._exit import STALLED
from distkeras._exit import write
from distkeras.communicators import _dump
from distkeras.communicators import _elastic
from distkeras.communicators import _ending
from distkeras.communicators import _failure
from distkeras.communicators import _silence
from distkeras.communicators import _stall
from distkeras.communicators import _standing
from distkeras.communicators import _waiting
from distkeras.communicators._case import Case
from distkeras.communicators._inquiry import Inquirer
from distkeras.communicators._inquiry import Inquiry
from distkeras.communicators._mail import Mail
from distkeras.communicators._mpi import MPICommunicator
from distkeras.communicators._processes import Process
from distkeras.communicators._processes import this_process
from distkeras.communicators._stall import State
from distkeras.communicators._stall import Verdict

# Seconds between looks at the waits and at the messages.
_POLL = 0.2
# The same in a job that outlives its ranks: what a loss costs begins here.
_LOOK = 0.05
# Errors in a row after which it gives up.
_MOST_FAILURES = 25
# Seconds of waiting after which ranks are asked, and between two questions.
_CHECK = 4.0
# Seconds by which each rank lets those before it ask first: one report, few messages.
_TURN = 0.3


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
        self._end = _waiting.Calls(range(host.size))
        self._left = False
        mail = Mail(self._mpi, self._comm) if self._speaks else None
        self._inquirer = Inquirer(self._rank, mail, self._state)
        self._case = Case(None)
        self._stop = threading.Event()
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
                    self._inquirer.inquiry = None
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
        self._inquirer.receive()
        now = time.monotonic()
        if self._inquirer.inquiry is not None:
            inquiry = self._inquirer.finished(now)
            if inquiry is not None:
                self._conclude(inquiry)
            return
        wait = _standing.oldest_wait(self._end, now)
        key = None if wait is None else (wait.name, wait.call.number)
        if key != self._case.key:
            self._case = Case(key)
        if wait is None:
            return
        case = self._case
        check = min(_CHECK, self.timeout / 3) if self.timeout else _CHECK
        turn = min(wait.members.index(self._rank), 20) * _TURN
        due = wait.call.since + check + min(turn, check)
        # Of those that wait, the first asks for all of them.
        quiet_until = 0.0 if case.suspects else self._inquirer.quiet_until
        if now >= max(due, case.next_question, quiet_until):
            case.next_question = now + check
            self._inquirer.ask(wait)

    def _state(self, name: str, number: int) -> State:
        return _standing.state(self._rank, self._end, name, number, left=self._left)

    def _conclude(self, inquiry: Inquiry) -> None:
        """Does what follows from the answers."""
        wait, states, case = inquiry.wait, inquiry.states, self._case
        now = time.monotonic()
        if not _standing.still_waits(self._end, wait):
            return
        wait = dataclasses.replace(wait, age=now - wait.call.since)
        silent = _silence.reasons(
            frozenset(wait.members) - states.keys(),
            self._peers,
            self._peers[self._rank],
            asked=self._speaks,
        )
        report = functools.partial(
            _stall.report,
            wait=wait,
            states=states,
            silent=silent,
            places={rank: str(peer) for rank, peer in enumerate(self._peers)},
        )
        verdict = case.judge(self._rank, wait, states, silent, self.timeout, now)
        if verdict is not None:
            self._announce(verdict, silent, report)
            return
        warning = case.warning(wait, states, silent, self.timeout)
        if warning is not None:
            write(report(warning, ending=False))

    def _announce(
        self, verdict: Verdict, silent: dict[int, str], report: Callable[..., str]
    ) -> None:
        """Writes the report and ends the job."""
        ending = not self._reports_only
        if not ending and self._case.reported:
            return
        self._case.reported = True
        if verdict.code == STALLED and self._dumps:
            # They hold Python's lock: a signal alone makes them show their stacks.
            busy = [rank for rank, why in silent.items() if why == _silence.BUSY]
            _dump.request(self._peers[rank].pid for rank in busy)
        write(report(verdict, ending=ending))
        if ending:
            _ending.end_job(self._host, verdict.code, speaks=self._speaks)

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
