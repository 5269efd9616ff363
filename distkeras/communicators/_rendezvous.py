"""Waiting for the ranks of a node without MPI: flags in memory that all of them see.

Whoever waits reads the flag again for some microseconds, which is what an exchange
between ranks in step takes. Then it offers the core to others at some looks, and then
it sleeps until it is woken: the peer that is late is probably computing, and may want
this very core. Where it cannot be woken (`_futex`), it offers the core for longer, and
sleeps longer and longer. Now and then it looks whether the peer's process lives.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from distkeras._errors import CommunicatorError
from distkeras.communicators import _elastic
from distkeras.communicators._futex import Futex
from distkeras.communicators._futex import find_futex
from distkeras.communicators._steps import Label
from distkeras.communicators._steps import Steps
from distkeras.communicators._steps import describe
from distkeras.communicators._waiting import Calls

HEADER_BYTES = 1024
"""Room for one rank's flags, at the start of its part of the shared memory."""

# Indices of 8-byte words, two cache lines apart: processors fetch lines in pairs.
ARRIVED = 0
REDUCED = 16
_LABEL = 32  # and the next: for even and for odd steps
_ASLEEP = 48  # 1 while the rank sleeps until it is woken
# And the next two: the word, the number, and whose it is, or `_ALL`. Who reads them
# while they are written may wake nobody: the sleeper looks once more afterwards.
_AWAITED = 49
ADDED = 64
READ = 80

_ALL = -1

_MOST_SPINS = 512  # about 30 microseconds
_FEWEST_SPINS = 16
_YIELDS = 700  # about half a millisecond
_YIELDS_BEFORE_FUTEX = 200
_LONGEST_SLEEP = 1e-3  # seconds
_LONGEST_FUTEX = 5e-3
_SHORTEST_SLEEP = 2e-5
_BETWEEN_CHECKS = 0.1
_LAUNCHERS_TURN = 1.0


@dataclasses.dataclass(frozen=True)
class Process:
    """A rank's process, as others of its node can find it.

    Attributes:
        pid: its number.
        started: its start time in clock ticks since boot; 0 if it cannot be known.
        namespace: names the numbering that `pid` belongs to; empty if unknown.
        cores: the processor cores it may run on.
    """

    pid: int
    started: int
    namespace: str
    cores: frozenset[int]

    @classmethod
    def this(cls) -> Process:
        """Returns the calling process."""
        pid = os.getpid()
        state = _state(pid)
        try:
            namespace = os.readlink("/proc/self/ns/pid")
        except OSError:
            namespace = ""
        if hasattr(os, "sched_getaffinity"):
            cores = frozenset(os.sched_getaffinity(0))
        else:
            cores = frozenset(range(os.cpu_count() or 1))
        return cls(pid, state[1] if state else 0, namespace, cores)

    def alive(self) -> bool:
        """Whether it still runs: neither gone nor waiting to be buried."""
        if self.started:
            state = _state(self.pid)
            return (
                state is not None
                and state[0] not in "ZX"
                and state[1] == (self.started)
            )
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except OSError:
            return True  # it is another user's
        return True


def _state(pid: int) -> tuple[str, int] | None:
    """Returns a process' state letter and start time, or `None` if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name of the program, in parentheses, may hold anything.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


class Rendezvous:
    """Where the ranks of a node meet, again and again, step by step.

    Each rank writes the number of the step it has reached where all can read it, and
    waits until all others' numbers are as high. Steps are numbered alike on all ranks,
    because all ranks call the same collectives in the same order. Should they not,
    they find out by a label that each rank leaves with the number. Within a step
    ranks may announce other numbers, and wait for one rank's or for all.

    Memory order: `fence` is called after the data is written and before the number
    is, and again between reading the others' numbers and their data. MPI defines it
    (`MPI_Win_sync`) as what makes the processes' stores visible to one another in
    this order; the numbers themselves are aligned words, written in one piece.

    Args:
        rank: of this process.
        headers: `HEADER_BYTES` of each rank, by rank: cleared, and shared.
        processes: each rank's process, by rank.
        fence: orders memory accesses.
        calls: the calls of the communicator that the ranks have otherwise.

    Attributes:
        step: the number of the newest step.
        cores: how many processor cores the ranks have together.
        broken: what went wrong for good, else `None`.
    """

    def __init__(
        self,
        rank: int,
        headers: Sequence[memoryview],
        processes: Sequence[Process],
        fence: Callable[[], None],
        calls: Calls,
    ) -> None:
        words = [header.cast("B")[:HEADER_BYTES].cast("q") for header in headers]
        self.step = 0
        self.broken: str | None = None
        self._rank = rank
        self._words = words
        self._mine = words[rank]
        self._others = [pair for pair in enumerate(words) if pair[0] != rank]
        self._futex = find_futex(self._mine)
        found = [(w, find_futex(w)) for _, w in self._others]
        self._sleepers = [(w, futex) for w, futex in found if futex is not None]
        self._processes = processes
        self._fence = fence
        self._steps = Steps(calls, lambda: self.step, self._label)
        cores = frozenset[int]().union(*(p.cores for p in processes))
        self.cores = len(cores)
        # Where ranks share cores, the one waited for may need this very core.
        self._most_spins = (
            _MOST_SPINS if self.cores >= len(processes) else _FEWEST_SPINS
        )
        self._spins = self._most_spins
        self._yields = _YIELDS if self._futex is None else _YIELDS_BEFORE_FUTEX
        # Numbers of processes mean something only in one and the same numbering.
        self._can_look = len({p.namespace for p in processes}) == 1

    def meet(self, word: int, step: int) -> None:
        """Says that this rank has reached a step, and waits for all others.

        Args:
            word: `ARRIVED` or `REDUCED`.
            step: its number, higher than at the last call for this word.

        Raises:
            CommunicatorError: if the process of a rank that is waited for has ended.
        """
        self.announce(word, step)
        self.await_all(word, step)

    def announce(self, word: int, number: int) -> None:
        """Says that this rank has come to a number, and has written its data before.

        Args:
            word: of which the number is.
            number: higher than at the last call for this word.
        """
        self._fence()
        self._mine[word] = number
        if self._sleepers:
            self._fence()  # the number is written before it is seen who sleeps
            for words, futex in self._sleepers:
                if words[_ASLEEP]:
                    self._wake(words, futex, word)

    def await_all(self, word: int, number: int) -> None:
        """Waits until all other ranks have come to a number; raises as `meet` does."""
        for _, words in self._others:
            if words[word] < number:
                self._wait(words, _ALL, word, number)
        self._fence()

    def await_rank(self, rank: int, word: int, number: int) -> None:
        """Waits until another rank has come to a number; raises as `meet` does."""
        words = self._words[rank]
        if words[word] < number:
            self._wait(words, rank, word, number)
        self._fence()

    def meet_alike(self, label: Label) -> int:
        """Begins the next step, and checks that all ranks begin the same.

        Data that others will read must have been written before.

        Args:
            label: what this rank is about to do.

        Returns:
            The number of the step.

        Raises:
            CommunicatorError: on every rank, if labels differ; the ranks can go on
                afterwards. On this rank, if another's process has ended.
        """
        step = self.step = self.step + 1
        place = _LABEL + (step & 1)
        self._mine[place] = label
        self.meet(ARRIVED, step)
        for _, words in self._others:
            # Stays until its writer has begun two more steps: not before this one
            # has begun the next.
            if words[place] != label:
                self._raise_different(place)
        return step

    def _label(self, step: int) -> Label:
        """Returns this rank's label of the newest step, or of the one before."""
        return self._mine[_LABEL + (step & 1)]

    def release(self) -> None:
        """Lets go of the shared memory; it cannot be used afterwards."""
        self._steps.close()
        self._futex, self._sleepers = None, []
        self._mine.release()
        for _, words in self._others:
            words.release()

    def _raise_different(self, place: int) -> None:
        words = sorted([*self._others, (self._rank, self._mine)])
        lines = [f"  rank {r}: {describe(w[place])}" for r, w in words]
        raise CommunicatorError(
            "\n".join(
                [
                    "Expected all ranks to call the same collective with buffers of "
                    "one length and dtype. Received:",
                    *lines,
                    "Make every rank run the same code; what depends on the rank "
                    "must not change this.",
                ]
            )
        )

    def _wake(self, words: memoryview, futex: Futex, word: int) -> None:
        """Wakes a rank, if what it waits for is now there, by this one's last word.

        Of two ranks that come last at the same time one at least sees the other's
        number: both have written theirs, and fenced, before they look.
        """
        self._fence()  # what it waits for was written before it slept
        awaited, number, whose = words[_AWAITED : _AWAITED + 3]
        if awaited != word or whose not in (self._rank, _ALL):
            return
        looked_at = [self._mine] if whose == self._rank else self._words
        if all(w[word] >= number for w in looked_at if w is not words):
            words[_ASLEEP] = 0  # should it be about to sleep, it will not
            futex.wake(_ASLEEP)

    def _wait(self, words: memoryview, whose: int, word: int, number: int) -> None:
        """Waits for one rank's number at less and less cost, in the end for `whose`."""
        for _ in range(self._spins):
            if words[word] >= number:
                if self._spins < self._most_spins:
                    self._spins *= 2
                return
        # In vain: the other may need this core, if not now then the next time.
        self._spins = max(_FEWEST_SPINS, self._spins // 2)
        for _ in range(self._yields):
            if words[word] >= number:
                return
            os.sched_yield()
        with self._steps.waits(self.step):
            self._sleep(whose, word, number)

    def _sleep(self, whose: int, word: int, number: int) -> None:
        """Waits for the number of a rank, or of all, asleep in between."""
        awaited = [w for r, w in self._others if whose in (r, _ALL)]
        self._mine[_AWAITED], self._mine[_AWAITED + 1] = word, number
        self._mine[_AWAITED + 2] = whose
        start = checked = time.perf_counter()
        while True:
            if self._futex is not None:
                self._fence()  # what is awaited is written before this rank sleeps
                self._mine[_ASLEEP] = 1
                self._fence()
            if all(w[word] >= number for w in awaited):
                break
            if _elastic.lost():
                self._break(_elastic.LOST)
            now = time.perf_counter()
            if now - checked > _BETWEEN_CHECKS:
                checked = now
                # All, as the one that is waited for may wait for one that has ended.
                for rank, words in self._others:
                    self._check_alive(rank, words, word, number)
            if self._futex is not None:
                if not self._futex.wait(_ASLEEP, 1, _LONGEST_FUTEX):
                    self._futex = None  # not with this memory
                continue
            # What is overslept is a small part of what was waited anyway.
            pause = (now - start) / 16
            time.sleep(min(max(pause, _SHORTEST_SLEEP), _LONGEST_SLEEP))
        self._mine[_ASLEEP] = 0

    def _check_alive(
        self, rank: int, words: memoryview, word: int, number: int
    ) -> None:
        if words[word] >= number or not self._can_look:
            return
        if self._processes[rank].alive():
            return
        if words[word] >= number:  # its last deed
            return
        if _elastic.confirm():
            self._break(_elastic.LOST)
        # The launcher ends this rank in that time; what is on the screen last is
        # then the word of the rank that failed, not that of those it left.
        time.sleep(_LAUNCHERS_TURN)
        self._break(
            f"Rank {rank} (process {self._processes[rank].pid}) has ended while rank "
            f"{self._rank} waited for it in a collective. Its own output, or the "
            "system's log if it was killed (`dmesg` tells of a lack of memory), says "
            "why. The communicator cannot be used any more."
        )

    def _break(self, why: str) -> NoReturn:
        self.broken = why
        raise CommunicatorError(why)
