"""One wait under suspicion: what follows from the answers that came in its course.

A single round of answers is judged in `_stall.py`. Here is what takes several: whether
a suspicion is seen twice, whether late ranks still work, and what was said already.
"""

from __future__ import annotations

import dataclasses

from distkeras.communicators import _silence
from distkeras.communicators import _stall
from distkeras.communicators._stall import END
from distkeras.communicators._stall import State
from distkeras.communicators._stall import Verdict
from distkeras.communicators._stall import Wait

# Seconds until the second look at what needs two.
_CONFIRM = 1.5
# The shortest timeout, in seconds, before which a warning comes; and when it does.
_FAR = 40.0
_EARLY = 60.0


class Case:
    """What a rank has found out about one of its waits.

    Args:
        key: name of the communicator and number of the call; None while the rank
            waits in nothing.

    Attributes:
        key: as given.
        next_question: not before that, of `time.monotonic`.
        suspects: whether the last answers showed what has to be seen twice.
        reported: whether something was said about it.
    """

    def __init__(self, key: tuple[str, int] | None) -> None:
        self.key = key
        self.next_question = 0.0
        self.suspects = False
        self.reported = False
        self._earlier: dict[int, tuple[float, State]] = {}
        self._working_since = 0.0

    def judge(
        self,
        me: int,
        wait: Wait,
        states: dict[int, State],
        silent: dict[int, str],
        timeout: float,
        now: float,
    ) -> Verdict | None:
        """Says whether the job has to end.

        Args:
            me: the rank that asked.
            wait: this case's.
            states: of itself and of the ranks that answered.
            silent: what is known of those that did not.
            timeout: seconds, 0 for no limit.
            now: of `time.monotonic`.
        """
        before = {rank: state for rank, (_, state) in self._earlier.items()}
        elapsed = now - max((t for t, _ in self._earlier.values()), default=now)
        verdict = _stall.judge(me, wait, states, before, elapsed)
        if verdict is None:
            gone = [r for r, why in silent.items() if why == _silence.GONE]
            if gone:
                verdict = _stall.gone(gone, wait)
            elif self._is_late(wait, timeout, now) and not (
                wait.name == END and self._others_work(wait, states, silent, now)
            ):
                verdict = _stall.stalled(wait, states, silent, timeout)
        self.suspects = verdict is not None and not verdict.certain
        if self.suspects:
            self.next_question = now + _CONFIRM
            verdict = None
        if wait.name != END or not self._earlier:
            self._earlier = {rank: (now, state) for rank, state in states.items()}
        return verdict

    def _is_late(self, wait: Wait, timeout: float, now: float) -> bool:
        start = max(self._working_since, wait.call.since)
        return bool(timeout) and now - start >= timeout

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
        working = [r for r, why in silent.items() if why == _silence.BUSY]
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

    def warning(
        self,
        wait: Wait,
        states: dict[int, State],
        silent: dict[int, str],
        timeout: float,
    ) -> Verdict | None:
        """Says early, and once, that ranks wait, where the timeout is far away."""
        if self.reported or wait.name == END or timeout < _FAR:
            return None
        if wait.age < min(_EARLY, timeout / 10):
            return None
        self.reported = True
        return dataclasses.replace(
            _stall.stalled(wait, states, silent, timeout),
            remedy=f"Still waiting; the limit is {timeout:g} s.",
        )
