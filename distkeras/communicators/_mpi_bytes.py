"""Bytes of any number over MPI: what exceeds its counts goes in chunks.

Counts are C ints, and some libraries overflow earlier.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def as_bytes(buffer: np.ndarray) -> np.ndarray:
    """Returns a view of a flat array as bytes."""
    return buffer.view(np.uint8)


class ByteTransport:
    """Moves bytes whose numbers all ranks concerned know.

    Args:
        comm: the ranks, an `mpi4py.MPI.Intracomm`.
        chunk_bytes: largest message.
    """

    def __init__(self, comm: Any, chunk_bytes: int) -> None:
        self._comm = comm
        self._rank = int(comm.Get_rank())
        self._chunk_bytes = chunk_bytes

    def chunks(self, buffer: np.ndarray) -> list[np.ndarray]:
        """Cuts a flat array of any dtype in views that are short enough."""
        step = max(1, self._chunk_bytes // buffer.dtype.itemsize)
        return [buffer[i : i + step] for i in range(0, buffer.size, step)]

    def broadcast(self, data: np.ndarray, root: int) -> None:
        """Overwrites `data` with that of rank `root`, in place."""
        for part in self.chunks(data):
            self._comm.Bcast(part, root=root)

    def allgather(self, data: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
        """Returns every rank's bytes, in arrays of their own.

        Args:
            data: this rank's.
            counts: of all ranks, by rank.
        """
        results = [np.empty(count, np.uint8) for count in counts]
        total = int(counts.sum())
        if total <= self._chunk_bytes:
            joined = np.empty(total, np.uint8)
            self._comm.Allgatherv(data, (joined, counts.tolist()))
            ends = np.cumsum(counts)
            for result, end in zip(results, ends, strict=True):
                result[...] = joined[end - result.size : end]
            return results
        for root, result in enumerate(results):
            if root == self._rank:
                result[...] = data
            self.broadcast(result, root)
        return results

    def gather(
        self, data: np.ndarray, counts: list[int], root: int
    ) -> list[np.ndarray]:
        """Returns every rank's bytes on `root`, nothing elsewhere.

        Args:
            data: this rank's.
            counts: of all ranks, by rank.
            root: the rank that receives.
        """
        receives = self._rank == root
        if sum(counts) <= self._chunk_bytes:
            joined = np.empty(sum(counts) if receives else 0, np.uint8)
            self._comm.Gatherv(data, (joined, counts) if receives else None, root)
            return np.split(joined, np.cumsum(counts)[:-1]) if receives else []
        if not receives:
            for piece in self.chunks(data):
                self._comm.Send(piece, dest=root)
            return []
        parts = [np.empty(count, np.uint8) for count in counts]
        parts[root] = data
        for rank, part in enumerate(parts):
            for piece in self.chunks(part) if rank != root else []:
                self._comm.Recv(piece, source=rank)
        return parts
