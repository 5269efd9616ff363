"""Memory that the ranks of a node share, as MPI gives it out."""

from __future__ import annotations

import os
import shutil
from typing import Any

import numpy as np

PAGE = 4096
"""Bytes. Every rank's part begins at a multiple of it, in every process."""

_FOLDER = "/dev/shm"
_SPARE = 8 << 20


class SharedWindow:
    """A part of shared memory for each rank, all of one size.

    MPI frees it when it ends, and removes it from the file system as soon as all
    ranks have it: nothing is left when a rank is killed.

    Args:
        mpi: the module `mpi4py.MPI`.
        comm: the ranks, all of one node; making a window is collective.
        size: bytes of each rank's part, the same on all ranks.

    Attributes:
        size: bytes of each part.
        parts: the parts as bytes, by rank, cleared.
    """

    def __init__(self, mpi: Any, comm: Any, size: int) -> None:
        self.size = size
        whole = -(-size // PAGE) * PAGE
        # The room to align: MPI promises the alignment of its largest number only.
        self._window = mpi.Win.Allocate_shared(whole + PAGE, 1, comm=comm)
        # MPICH allows `Sync` between these only; nothing is locked in fact.
        self._window.Lock_all()
        self.parts = [self._part(rank) for rank in range(comm.Get_size())]
        self.parts[comm.Get_rank()][:] = 0
        self._window.Sync()
        comm.Barrier()
        self._window.Sync()

    def _part(self, rank: int) -> np.ndarray:
        memory, _ = self._window.Shared_query(rank)
        part = np.frombuffer(memory, np.uint8)
        # Whole pages are mapped: all processes find the same remainder.
        start = -part.ctypes.data % PAGE
        return part[start : start + self.size]

    def sync(self) -> None:
        """Orders this process' memory accesses, as seen by the other ranks."""
        self._window.Sync()

    def free(self) -> None:
        """Gives the memory back; collective. Arrays that view it die with it."""
        self.parts = []
        self._window.Unlock_all()
        self._window.Free()


def lacking_room(size: int) -> str | None:
    """Returns why `size` bytes of shared memory cannot be had, or `None`.

    The file system takes any size, and ends the process when it runs full.
    """
    if not os.path.isdir(_FOLDER):
        return None
    free = shutil.disk_usage(_FOLDER).free
    if free >= size + _SPARE:
        return None
    return (
        f"{_FOLDER} has {free >> 20} MiB left, {(size + _SPARE) >> 20} MiB are needed "
        "(a container gets more by `docker run --shm-size=1g`)"
    )
