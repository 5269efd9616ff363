"""Why ranks do not answer, as far as that can be seen from another."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence

from distkeras.communicators._processes import Process
from distkeras.communicators._processes import status

GONE = "its process is gone"
BUSY = (
    "does not answer, though its process lives: it runs code that holds Python's lock"
)

_CANNOT = "cannot be asked: MPI's thread level is below MPI_THREAD_MULTIPLE"
_WHY = {
    "gone": GONE,
    "stopped": "does not answer: its process is stopped (SIGSTOP, or a debugger)",
    "alive": BUSY,
    None: "does not answer: it is stopped, or holds Python's lock, or its host is gone",
}


def reasons(
    ranks: Iterable[int], peers: Sequence[Process], mine: Process, *, asked: bool
) -> dict[int, str]:
    """Returns what is known of ranks that did not answer.

    Args:
        ranks: that did not, as numbers in the world.
        peers: the processes of all ranks.
        mine: this process.
        asked: whether they could be.
    """
    return {
        rank: _WHY[status(peers[rank], mine)] if asked else _CANNOT
        for rank in sorted(ranks)
    }
