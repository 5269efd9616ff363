"""Messages between the watchdogs: small, and nobody waits for one."""

from __future__ import annotations

import dataclasses
import pickle
import zlib
from collections.abc import Iterator
from typing import Any

# Bytes up to which every MPI sends without waiting for the receiver.
_EAGER = 3500
_TAG = 1


class Mail:
    """The messages of one rank.

    Args:
        mpi: the module `mpi4py.MPI`.
        comm: the ranks, for nothing else.
    """

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi = mpi
        self._comm = comm
        self._sent: list[tuple[Any, bytes]] = []

    def send(self, rank: int, message: Any) -> None:
        """Sends a message, to be read whenever its receiver looks."""
        data = pack(message)
        self._sent = [(r, d) for r, d in self._sent if not r.Test()]
        request = self._comm.Isend([data, self._mpi.BYTE], dest=rank, tag=_TAG)
        self._sent.append((request, data))

    def received(self) -> Iterator[tuple[int, Any]]:
        """Yields senders and messages, as long as there are any."""
        info = self._mpi.Status()
        while self._comm.Iprobe(self._mpi.ANY_SOURCE, _TAG, info):
            data = bytearray(info.Get_count(self._mpi.BYTE))
            source = info.Get_source()
            self._comm.Recv([data, self._mpi.BYTE], source=source, tag=_TAG)
            yield source, pickle.loads(zlib.decompress(data))


def pack(message: Any) -> bytes:
    """Pickles a message; a stack that is too long loses its outer part."""
    data = zlib.compress(pickle.dumps(message))
    while len(data) > _EAGER and message[0] == "tell" and message[1].stack:
        state = message[1]
        lines = state.stack.splitlines()
        kept = lines[len(lines) // 4 + 1 :]
        shorter = dataclasses.replace(state, stack="\n".join(kept))
        message = ("tell", shorter, *message[2:])
        data = zlib.compress(pickle.dumps(message))
    return data
