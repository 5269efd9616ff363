"""What communicators have in common that leave some verbs to MPI's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distkeras.communicators._base import Communicator
from distkeras.communicators._checks import check_open
from distkeras.communicators._mpi import MPICommunicator


class ComposedCommunicator(Communicator):
    """A group of ranks that MPI knows, whose large buffers go another way.

    Args:
        host: the MPI communicator to compose with, owned from here on; by default a
            duplicate of MPI's world.
    """

    def __init__(self, host: MPICommunicator | None = None) -> None:
        """Duplicates MPI's world, if need be; collective then."""
        self._host = MPICommunicator() if host is None else host
        self._closed = False

    @property
    def rank(self) -> int:
        """This process' number, 0 to `size - 1`."""
        return self._host.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._host.size

    @property
    def local_rank(self) -> int:
        """This process' number among the ranks that share its memory."""
        return self._host.local_rank

    @property
    def local_size(self) -> int:
        """The number of ranks that share this node's memory."""
        return self._host.local_size

    @property
    def hosts(self) -> Sequence[str]:
        """The host name of every rank, by rank."""
        return self._host.hosts

    @property
    def host(self) -> MPICommunicator:
        """The MPI communicator it is composed with."""
        return self._host

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """Returns rank `root`'s object, by MPI."""
        check_open(self._closed)
        return self._host.broadcast_object(obj, root)

    def allgather_object(self, obj: Any) -> list[Any]:
        """Returns every rank's object, by rank, by MPI."""
        check_open(self._closed)
        return self._host.allgather_object(obj)

    def gather_object(self, obj: Any, root: int = 0) -> list[Any] | None:
        """Returns every rank's object, by rank, on rank `root`, by MPI."""
        check_open(self._closed)
        return self._host.gather_object(obj, root)

    def abort(self, code: int = 1) -> None:
        """Ends all processes of the job at once with exit code `code`."""
        self._host.abort(code)
