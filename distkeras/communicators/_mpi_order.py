"""Ranks that are in different calls find out by the first message of each.

MPI would match what they send, and one would take the other's bytes for its own.
"""

from __future__ import annotations

import threading
from typing import Any
from typing import NoReturn

import numpy as np

from distkeras._errors import CommunicatorError
from distkeras.communicators._agreement import name_ranks
from distkeras.communicators._stacks import where
from distkeras.communicators._waiting import Calls

_PLACE_BYTES = 256

# Verbs whose first message tells them apart.
_GATHERS = ("allgather", "allgather_object", "gather_object")


class CallOrder:
    """Compares the calls that ranks are in on one communicator.

    Args:
        comm: the ranks, an `mpi4py.MPI.Intracomm`.
        calls: this rank's on it.
    """

    def __init__(self, comm: Any, calls: Calls) -> None:
        self._comm = comm
        self._rank = int(comm.Get_rank())
        self._size = int(comm.Get_size())
        self._calls = calls

    def heads(self, size: int, verb: str, failed: bool = False) -> np.ndarray:
        """Returns every rank's bytes to come and whether it failed, a row a rank.

        Args:
            size: this rank's bytes.
            verb: the collective that begins so: one of those that gather.
            failed: whether this rank has an error to tell instead.

        Raises:
            CommunicatorError: on every rank alike, if they are in different verbs that
                begin so.
        """
        kind, number = _GATHERS.index(verb), self._calls.entered
        mine = np.array([size, number, 2 * kind + failed], np.int64)
        everyone = np.empty((self._size, mine.size), np.int64)
        self._comm.Allgather(mine, everyone)
        sizes, numbers, kinds = everyone[:, 0], everyone[:, 1], everyone[:, 2] // 2
        if (numbers != number).any() or (kinds != kind).any():
            self._raise_different(list(zip(numbers.tolist(), kinds, strict=True)))
        return np.stack([sizes, everyone[:, 2] % 2], axis=1)

    def _places(self) -> list[str]:
        """Returns where every rank's script stands, by rank; collective."""
        mine = where(threading.get_ident()).encode(errors="replace")[-_PLACE_BYTES:]
        padded = np.frombuffer(mine.ljust(_PLACE_BYTES, b"\0"), np.uint8)
        everyone = np.empty((self._size, _PLACE_BYTES), np.uint8)
        self._comm.Allgather(padded, everyone)
        return [
            row.tobytes().rstrip(b"\0").decode(errors="replace") for row in everyone
        ]

    def _raise_different(self, calls: list[tuple[int, int]]) -> NoReturn:
        """Raises, on every rank alike, as ranks are in different collectives."""
        held: dict[str, list[int]] = {}
        for rank, ((number, kind), place) in enumerate(
            zip(calls, self._places(), strict=True)
        ):
            what = f"{_GATHERS[kind]} (call {number}) at {place}"
            held.setdefault(what, []).append(rank)
        lines = "; ".join(f"{name_ranks(r)} in {what}" for what, r in held.items())
        raise CommunicatorError(
            "Expected all ranks to make the same calls in the same order. Received: "
            f"{lines}. A callback or a branch that runs on one rank only must call no "
            "collective."
        )

    def check_number(self, rank: int, number: int) -> None:
        """Raises if a rank's message belongs to another call than this one.

        The root of a broadcast waits for nobody: what it alone has sent arrives when
        the others broadcast the next time.

        Args:
            rank: that sent it.
            number: of the call it was sent in.
        """
        mine = self._calls.entered
        if number != mine:
            raise CommunicatorError(
                f"Expected all ranks to make the same calls in the same order. "
                f"Received: call {number} of rank {rank} on a communicator on which "
                f"rank {self._rank} is at call {mine}. Rank {rank} has made a call "
                "that others have not, or the other way round."
            )
