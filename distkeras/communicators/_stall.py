"""What ranks that wait tell each other, what follows from it, and the report of it.

Everything here is a function of the answers: who is late, and whether that can end
well. A verdict before the timeout needs certainty, as a rank that is merely slow must
never be ended:

- two ranks whose calls of the same number on a communicator differ, seen twice;
- a rank that has ended its script and is waited for;
- two ranks that wait for each other on different communicators, when the thread that
  waits is the one that drives its rank, and nothing else there computes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from collections.abc import Sequence

from distkeras._exit import LEFT
from distkeras._exit import OUT_OF_STEP
from distkeras._exit import STALLED
from distkeras.communicators._agreement import name_ranks
from distkeras.communicators._waiting import Call

END = "end"
"""The communicator name under which ranks wait for each other's end."""


@dataclasses.dataclass(frozen=True)
class Wait:
    """A collective in which a rank waits.

    Attributes:
        name: of the communicator.
        members: its ranks, as numbers in the world.
        call: the call; `since` has no meaning on another rank.
        age: seconds.
        driver: of the thread that waits: "main" if no other thread of Python's own
            uses collectives, "framework" if a framework made it, "other" if several
            threads use collectives.
        where: the user's line that it came from.
    """

    name: str
    members: tuple[int, ...]
    call: Call
    age: float
    driver: str
    where: str


@dataclasses.dataclass(frozen=True)
class State:
    """Where a rank stands.

    Attributes:
        rank: in the world.
        left: whether its script has ended.
        entered: how many calls it has begun, by communicator.
        asked: its call of the number that it was asked for, if it remembers it.
        waits: the collectives in which it waits.
        busy: CPU seconds it has used, without those of the watchdog and of threads
            that wait (many an MPI waits by spinning).
        where: the line of the user's code its main thread is at.
        stack: of its main thread and of those that wait.
    """

    rank: int
    left: bool
    entered: Mapping[str, int]
    asked: Call | None
    waits: tuple[Wait, ...]
    busy: float
    where: str
    stack: str


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Why the job has to end.

    Attributes:
        code: the exit code.
        summary: one sentence: which ranks, what, where.
        remedy: what to do.
        certain: whether it stands; else it needs to be seen a second time.
    """

    code: int
    summary: str
    remedy: str
    certain: bool = True


def describe(name: str, call: Call) -> str:
    """Returns a call in words, as "allreduce (call 17 on communicator 1, 64 bytes)"."""
    if name == END:
        return "shutdown()" if call.verb == "shutdown" else "the end of the script"
    verb = call.verb if call.detail is None else f"{call.verb}({call.detail})"
    size = f", {call.size} bytes" if call.size else ""
    return f"{verb} (call {call.number} on communicator {name}{size})"


def late_ranks(wait: Wait, states: Mapping[int, State]) -> list[int]:
    """Returns the ranks that are known not to have entered the collective."""
    return [
        rank
        for rank in wait.members
        if rank in states and states[rank].entered.get(wait.name, 0) < wait.call.number
    ]


def judge(
    me: int,
    wait: Wait,
    states: Mapping[int, State],
    before: Mapping[int, State],
    elapsed: float,
) -> Verdict | None:
    """Says whether a wait can never end, from what is known for certain.

    Args:
        me: the rank that asks.
        wait: in which it waits.
        states: of itself and of the ranks that answered, asked for that call.
        before: the same, of an earlier time in this wait; may be empty.
        elapsed: seconds between the two.
    """
    return (
        _different_calls(me, wait, states, before, elapsed)
        or _left(states)
        or _waiting_for_each_other(states, before, elapsed)
    )


def _different_calls(
    me: int,
    wait: Wait,
    states: Mapping[int, State],
    before: Mapping[int, State],
    elapsed: float,
) -> Verdict | None:
    """Compares the calls of one number on one communicator."""
    held: dict[tuple[object, ...], list[int]] = {wait.call.key: [me]}
    for rank, state in states.items():
        if rank != me and rank in wait.members and state.asked is not None:
            held.setdefault(state.asked.key, []).append(rank)
    if len(held) == 1:
        return None
    # A rank that is about to enter may not have written down all of it yet.
    differ = [r for key, ranks in held.items() if key != wait.call.key for r in ranks]
    seen = elapsed >= 1 and any(
        r in before and before[r].asked == states[r].asked for r in differ
    )
    parts = []
    for ranks in sorted(held.values()):
        first = ranks[0]
        asked = wait.call if first == me else states[first].asked
        if asked is not None:
            place = _place_of(states[first], wait.name, wait.call.number)
            parts.append(f"{name_ranks(ranks)} in {describe(wait.name, asked)}{place}")
    return Verdict(
        OUT_OF_STEP,
        f"ranks are in different collectives: {'; '.join(parts)}.",
        _SAME_CALLS,
        certain=seen,
    )


def _left(states: Mapping[int, State]) -> Verdict | None:
    """Finds a rank that has ended its script and is waited for."""
    waiting: dict[tuple[str, int], tuple[Wait, list[int]]] = {}
    for state in states.values():
        for theirs in state.waits:
            key = (theirs.name, theirs.call.number)
            waiting.setdefault(key, (theirs, []))[1].append(state.rank)
    for theirs, ranks in waiting.values():
        gone = [r for r in late_ranks(theirs, states) if states[r].left]
        if gone:
            verb = "has" if len(gone) == 1 else "have"
            wait_word = "waits" if len(ranks) == 1 else "wait"
            return Verdict(
                LEFT,
                f"{name_ranks(gone)} {verb} ended the script (normally, or by an exit "
                f"that is not seen here), while {name_ranks(ranks)} {wait_word} in "
                f"{describe(theirs.name, theirs.call)}, at {theirs.where}.",
                "Every rank has to make the same calls of distkeras: let an error end "
                "the script instead of catching it, and call no collective (`fit` "
                "too) on some ranks only.",
            )
    return None


def _waiting_for_each_other(
    states: Mapping[int, State], before: Mapping[int, State], elapsed: float
) -> Verdict | None:
    """Finds two ranks each of which waits for the other in another collective."""
    blocked = [(s.rank, wait) for s in states.values() for wait in s.waits]
    for index, (a, first) in enumerate(blocked):
        for b, second in blocked[index + 1 :]:
            if a == b or first.name == second.name:
                continue
            drivers = {first.driver, second.driver}
            if "main" not in drivers or "other" in drivers:
                continue
            if _lacks(states[a], second, a) and _lacks(states[b], first, b):
                seen = all(
                    _same_and_idle(before.get(rank), states[rank], wait, elapsed)
                    for rank, wait in ((a, first), (b, second))
                )
                verdict = _crossed(a, first, b, second, blocked)
                return dataclasses.replace(verdict, certain=seen)
    return None


def _lacks(state: State, wait: Wait, rank: int) -> bool:
    """Whether a rank is waited for in a collective that it has not entered."""
    entered = state.entered.get(wait.name, 0)
    return rank in wait.members and entered < wait.call.number


def _same_and_idle(
    before: State | None, now: State, wait: Wait, elapsed: float
) -> bool:
    """Whether a rank waited in the same call all the time, and nothing else ran.

    A framework may compute on, in threads of its own, towards the collective that
    the others wait in.
    """
    if before is None or elapsed < 1:
        return False
    same = any(
        w.name == wait.name and w.call.number == wait.call.number for w in before.waits
    )
    return same and is_idle(before, now, elapsed)


def is_idle(before: State, now: State, elapsed: float) -> bool:
    """Whether a rank has computed next to nothing between two answers."""
    return now.busy - before.busy < max(_IDLE_SECONDS, _IDLE_SHARE * elapsed)


_IDLE_SECONDS = 0.1
_IDLE_SHARE = 0.01


def _crossed(
    a: int, first: Wait, b: int, second: Wait, blocked: Sequence[tuple[int, Wait]]
) -> Verdict:
    sides = []
    for rank, wait in sorted([(a, first), (b, second)]):
        ranks = [
            r
            for r, w in blocked
            if w.name == wait.name and w.call.number == wait.call.number
        ]
        at = f"{describe(wait.name, wait.call)}, at {wait.where}"
        sides.append(f"{name_ranks(ranks or [rank])} in {at}")
    return Verdict(
        OUT_OF_STEP,
        f"ranks wait for each other in different collectives: {'; '.join(sides)}.",
        _SAME_CALLS,
    )


_SAME_CALLS = (
    "Every rank has to make the same calls in the same order: a callback or a branch "
    "that runs on one rank only (`if rank == 0`) must call no collective."
)


def _place_of(state: State, name: str, number: int) -> str:
    """Returns ", at <line>" where a rank still waits in that call."""
    for wait in state.waits:
        if wait.name == name and wait.call.number == number:
            return f", at {wait.where}"
    return f" (now at {state.where})"


def gone(ranks: Sequence[int], wait: Wait) -> Verdict:
    """The verdict when processes do not exist any more."""
    verb = "does" if len(ranks) == 1 else "do"
    return Verdict(
        LEFT,
        f"the process of {name_ranks(ranks)} {verb} not exist any more, without having "
        f"told MPI; others wait in {describe(wait.name, wait.call)}, at {wait.where}.",
        "It was killed (out of memory?) or left by `os._exit`.",
    )


def stalled(
    wait: Wait,
    states: Mapping[int, State],
    silent: Mapping[int, str],
    timeout: float,
) -> Verdict:
    """The verdict at the timeout.

    Args:
        wait: the collective of the rank that asked.
        states: the answers.
        silent: what is known of the ranks that did not answer.
        timeout: seconds.
    """
    late = late_ranks(wait, states)
    parts = [f"rank {r} is late, it is at {states[r].where}" for r in late[:4]]
    parts += [f"rank {r} {why}" for r, why in list(silent.items())[:4]]
    more = len(late) + len(silent) - len(parts)
    if more > 0:
        parts.append(f"{more} more ranks are late or silent")
    at = "" if wait.name == END else f", at {wait.where}"
    if not parts:
        parts.append("all ranks have entered it")
    return Verdict(
        STALLED,
        f"ranks have waited {wait.age:.0f} s in {describe(wait.name, wait.call)}{at}: "
        f"{'; '.join(parts)}.",
        f"The limit is {timeout:g} s; where such a wait is right, raise it by "
        "distkeras.init(timeout=seconds) or DISTKERAS_TIMEOUT (0: no limit).",
    )


def report(
    verdict: Verdict,
    wait: Wait,
    states: Mapping[int, State],
    silent: Mapping[int, str],
    places: Mapping[int, str],
    *,
    ending: bool,
) -> str:
    """Writes all that is known; the summary stands at the end.

    Args:
        verdict: what the report is about.
        wait: the collective of the rank that asked.
        states: the answers.
        silent: what is known of the ranks that did not answer.
        places: host and process of every rank.
        ending: whether the job ends.
    """
    lines = ["where the ranks stand:"]
    # Ranks that tell the same are named together: there may be hundreds.
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, state in sorted(states.items()):
        if rank in wait.members or state.left:
            groups.setdefault(_standing(state, wait), []).append(rank)
    for (standing, where, stack), ranks in groups.items():
        first = f" ({places[ranks[0]]})" if len(ranks) == 1 else ""
        at = f", at {where}" if where else ""
        lines.append(f"  {name_ranks(ranks)}{first}: {standing}{at}")
        lines += [f"      {line}" for line in stack.splitlines()]
    for rank, why in silent.items():
        lines.append(f"  rank {rank} ({places[rank]}): {why}")
    lines.append(f"{verdict.summary}")
    lines.append(verdict.remedy)
    if ending:
        lines.append(f"All ranks are ended, exit code {verdict.code}.")
    return "\n".join(f"[distkeras] {line}" for line in lines)


def _standing(state: State, wait: Wait) -> tuple[str, str, str]:
    """Returns what a rank does, where, and its stack."""
    if state.left:
        return "the script has ended", state.where, state.stack
    if state.waits:
        inner = max(state.waits, key=lambda w: (w.name == wait.name, -w.age))
        what = f"in {describe(inner.name, inner.call)}"
        return what, inner.where, state.stack
    late = state.entered.get(wait.name, 0) < wait.call.number
    what = f"late for {describe(wait.name, wait.call)}" if late else "going on"
    return what, state.where, state.stack
