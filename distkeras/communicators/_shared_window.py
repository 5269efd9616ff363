"""Memory that the ranks of a node share, as MPI gives it out."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import tempfile
import threading
from typing import Any

import numpy as np

PAGE = 4096
"""Bytes. Every rank's part begins at a multiple of it, in every process."""

_FOLDER = "/dev/shm"
PREFIX = "distkeras_"
"""Of the names that files have there while they are made."""

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


class MappedWindow:
    """The same without MPI's windows.

    Those do not outlive a rank that is lost, and are refused where MPI takes the ranks
    of a node for far apart.

    The file has no name but while it is made. The memory is given back as soon as no
    process views it any more.

    Args:
        comm: the ranks, all of one node; making a window is collective.
        size: bytes of each rank's part, the same on all ranks.

    Attributes:
        size: bytes of each part.
        parts: the parts as bytes, by rank, cleared.
    """

    def __init__(self, comm: Any, size: int) -> None:
        self.size = size
        self._lock = threading.Lock()
        whole = -(-size // PAGE) * PAGE
        path: str | None = None
        if comm.Get_rank() == 0:
            file, path = tempfile.mkstemp(
                prefix=PREFIX, dir=_FOLDER if os.path.isdir(_FOLDER) else None
            )
            os.truncate(file, whole * comm.Get_size())
        try:
            path = comm.bcast(path)
            if comm.Get_rank() > 0:
                file = os.open(path, os.O_RDWR)
            memory = mmap.mmap(file, whole * comm.Get_size())
            os.close(file)
            first = comm.Get_rank() * whole
            memory[first : first + whole] = bytes(whole)  # given to us from here on
            comm.Barrier()
        finally:
            if comm.Get_rank() == 0:
                with contextlib.suppress(OSError):
                    os.unlink(path or "")
        parts = np.frombuffer(memory, np.uint8).reshape(comm.Get_size(), whole)
        self.parts = [part[:size] for part in parts]

    def sync(self) -> None:
        """Orders this process' memory accesses, as seen by the other ranks.

        What a lock orders between threads of one process: what comes before its
        release is seen before what comes after it is taken again.
        """
        for _ in range(2):
            self._lock.acquire()
            self._lock.release()

    def free(self) -> None:
        """Lets go of the memory; arrays that view it stay valid."""
        self.parts = []


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
