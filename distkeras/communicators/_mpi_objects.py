"""Pickled objects over MPI: an object that cannot be pickled fails on every rank."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from distkeras._errors import CommunicatorError
from distkeras.communicators._mpi_bytes import ByteTransport
from distkeras.communicators._mpi_bytes import as_bytes
from distkeras.communicators._mpi_order import CallOrder
from distkeras.communicators._waiting import Calls


class ObjectTransport:
    """The object verbs of a communicator; all are collective.

    Args:
        comm: the ranks, an `mpi4py.MPI.Intracomm`.
        transport: of bytes between them.
        order: compares the calls they are in.
        calls: this rank's.
    """

    def __init__(
        self, comm: Any, transport: ByteTransport, order: CallOrder, calls: Calls
    ) -> None:
        self._comm = comm
        self._rank = int(comm.Get_rank())
        self._bytes = transport
        self._order = order
        self._calls = calls

    def broadcast(self, obj: Any, root: int) -> Any:
        """Returns rank `root`'s object."""
        failed, data = False, np.empty(0, np.uint8)
        problem: Exception | None = None
        if self._rank == root:
            failed, data, problem = _pickle(obj)
        with self._calls("broadcast_object", data.size, root):
            head = np.array([data.size, failed, self._calls.entered], np.int64)
            self._comm.Bcast(head, root=root)
            self._order.check_number(root, int(head[2]))
            if self._rank != root:
                data = np.empty(int(head[0]), np.uint8)
            self._bytes.broadcast(data, root)
        if head[1]:
            _raise_unpicklable({root: bytes(data).decode()}, problem)
        return obj if self._rank == root else pickle.loads(data.data)

    def allgather(self, obj: Any) -> list[Any]:
        """Returns every rank's object, by rank; this rank's own as it is."""
        failed, data, problem = _pickle(obj)
        with self._calls("allgather_object", data.size):
            head = np.array([failed, self._calls.entered], np.int64)
            joined = np.concatenate([as_bytes(head), data])
            counts = self._order.heads(joined.size, "allgather_object")[:, 0]
            parts = self._bytes.allgather(joined, counts)
            heads = [part[: head.nbytes].tobytes() for part in parts]
            parts = [part[head.nbytes :] for part in parts]
            flags = []
            for rank, theirs in enumerate(heads):
                # A message of another call may be of any length.
                flag, number = np.frombuffer(theirs.ljust(16, b"\0"), np.int64)
                self._order.check_number(rank, int(number))
                flags.append(bool(flag))
        failures = {
            rank: bytes(part).decode() for rank, part in enumerate(parts) if flags[rank]
        }
        if failures:
            _raise_unpicklable(failures, problem)
        return self._unpickled(obj, parts)

    def gather(self, obj: Any, root: int) -> list[Any] | None:
        """Returns every rank's object, by rank, on rank `root`; None elsewhere."""
        failed, data, problem = _pickle(obj)
        with self._calls("gather_object", data.size, root):
            heads = self._order.heads(data.size, "gather_object", failed)
            parts: list[np.ndarray] = []
            if not heads[:, 1].any():
                parts = self._bytes.gather(data, heads[:, 0].tolist(), root)
        if heads[:, 1].any():
            texts = self.allgather(bytes(data).decode() if failed else None)
            failures = {rank: text for rank, text in enumerate(texts) if text}
            _raise_unpicklable(failures, problem)
        return self._unpickled(obj, parts) if self._rank == root else None

    def _unpickled(self, mine: Any, parts: list[np.ndarray]) -> list[Any]:
        return [
            mine if rank == self._rank else pickle.loads(part.data)
            for rank, part in enumerate(parts)
        ]


def _pickle(obj: Any) -> tuple[bool, np.ndarray, Exception | None]:
    """Returns (failed, pickle or the error's text, error): peers wait for either."""
    try:
        data = pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return True, np.frombuffer(text.encode(), np.uint8), error
    return False, np.frombuffer(data, np.uint8), None


def _raise_unpicklable(failures: dict[int, str], cause: Exception | None) -> None:
    lines = "; ".join(f"rank {rank}: {text}" for rank, text in failures.items())
    raise CommunicatorError(
        f"Expected an object that can be pickled. Received: {lines}"
    ) from cause
