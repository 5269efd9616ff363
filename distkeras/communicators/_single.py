"""The communicator of a process that is alone: every collective is the identity."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

from distkeras._exit import flush
from distkeras.communicators._base import Communicator
from distkeras.communicators._base import Op
from distkeras.communicators._checks import check_buffer
from distkeras.communicators._checks import check_op
from distkeras.communicators._checks import check_open
from distkeras.communicators._checks import check_root


class SingleCommunicator(Communicator):
    """A group of one rank. Needs no MPI, checks what the others check.

    Example:
        >>> communicator = SingleCommunicator()
        >>> communicator.rank, communicator.size
        (0, 1)
        >>> communicator.allgather_object("me")
        ['me']
    """

    name = "single"

    def __init__(self) -> None:
        """Makes the group."""
        self._closed = False

    @property
    def rank(self) -> int:
        """0."""
        return 0

    @property
    def size(self) -> int:
        """1."""
        return 1

    @property
    def local_rank(self) -> int:
        """0."""
        return 0

    @property
    def local_size(self) -> int:
        """1."""
        return 1

    @property
    def hosts(self) -> Sequence[str]:
        """This machine's name, alone."""
        return (socket.gethostname(),)

    def allreduce(self, buffer: Any, op: Op = "sum") -> None:
        """Leaves `buffer` as it is."""
        check_open(self._closed)
        check_op(op)
        check_buffer(buffer, writable=True)

    def allgather(self, buffer: Any) -> list[Any]:
        """Returns a copy of `buffer`, in a list."""
        check_open(self._closed)
        check_buffer(buffer, writable=False)
        return [buffer.copy()]

    def broadcast(self, buffer: Any, root: int = 0) -> None:
        """Leaves `buffer` as it is."""
        check_open(self._closed)
        check_root(root, 1)
        check_buffer(buffer, writable=True)

    def barrier(self) -> None:
        """Returns at once."""
        check_open(self._closed)

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """Returns `obj`."""
        check_open(self._closed)
        check_root(root, 1)
        return obj

    def allgather_object(self, obj: Any) -> list[Any]:
        """Returns `obj`, in a list."""
        check_open(self._closed)
        return [obj]

    def gather_object(self, obj: Any, root: int = 0) -> list[Any] | None:
        """Returns `obj`, in a list."""
        check_open(self._closed)
        check_root(root, 1)
        return [obj]

    def duplicate(self) -> SingleCommunicator:
        """Returns another group of one."""
        check_open(self._closed)
        return SingleCommunicator()

    def abort(self, code: int = 1) -> None:
        """Ends this process at once with exit code `code`."""
        flush()
        os._exit(code)

    def close(self) -> None:
        """Makes every later call an error."""
        self._closed = True
