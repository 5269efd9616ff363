"""The interface every communicator implements: who am I, and a dozen collectives."""

from __future__ import annotations

import abc
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import ClassVar
from typing import Literal

import numpy as np

ALIGNMENT = 64
"""Bytes. TensorFlow aborts the process on a less aligned zero-copy tensor."""

Op = Literal["sum", "min", "max", "product"]

Part = Callable[[np.ndarray, int], None]
"""Works on a part of a buffer that begins at the element given."""


class Communicator(abc.ABC):
    """A fixed group of ranks and the collectives among them.

    Verbs have MPI's names. Those without a suffix work on flat buffers (one-
    dimensional, C-contiguous arrays); those that end in `_object` carry any
    Python object that can be pickled. Every verb but `abort` is collective: all
    ranks call it, in the same order, with buffers of equal length and dtype.

    Attributes:
        name: the word that selects this kind (`DISTKERAS_COMMUNICATOR`).
    """

    name: ClassVar[str]

    @property
    @abc.abstractmethod
    def rank(self) -> int:
        """This process' number, 0 to `size - 1`."""

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """The number of ranks."""

    @property
    @abc.abstractmethod
    def local_rank(self) -> int:
        """This process' number among the ranks of its node."""

    @property
    @abc.abstractmethod
    def local_size(self) -> int:
        """The number of ranks on this node."""

    @property
    @abc.abstractmethod
    def hosts(self) -> Sequence[str]:
        """The host name of every rank, by rank."""

    @property
    def fixed_order(self) -> bool:
        """Whether `allreduce` sums an element alike wherever in a message it lies.

        MPI and NCCL choose an order by length and place, so that cutting a message
        in two may change the last bits. Two terms have one order only.
        """
        return self.size <= 2

    @abc.abstractmethod
    def allreduce(self, buffer: Any, op: Op = "sum") -> None:
        """Combines `buffer` over all ranks, in place.

        Args:
            buffer: flat array; NumPy's for a host communicator, CuPy's or
                NumPy's for a device communicator.
            op: how elements are combined.

        Raises:
            CommunicatorError: if the communicator was closed, or a rank has ended.
            ValueError: if `op` is none of the words, or the buffer is not flat or not
                writable.
        """

    def allreduce_parts(
        self, buffer: np.ndarray, op: Op = "sum", *, pack: Part, unpack: Part
    ) -> None:
        """Combines what `pack` writes over all ranks, into `buffer`, part by part.

        For data that is made from something, and made into something, right before
        and after: while a part is in the processor's cache. A communicator without
        such parts does all of it at once.

        Args:
            buffer: flat NumPy array, the same length and dtype on every rank. What it
                holds before does not count.
            op: how elements are combined.
            pack: called as `pack(part, start)`, part after part: writes this rank's
                elements from `start` on to all of `part`, an array of the buffer's
                dtype that need not lie in the buffer.
            unpack: called as `unpack(part, start)`, in the same order: `part` is that
                of the buffer, combined.
        """
        pack(buffer, 0)
        self.allreduce(buffer, op)
        unpack(buffer, 0)

    @abc.abstractmethod
    def allgather(self, buffer: Any) -> list[Any]:
        """Returns every rank's `buffer`, by rank.

        Args:
            buffer: flat array, of the same dtype on every rank; lengths may differ.

        Returns:
            New arrays, as many as ranks.
        """

    @abc.abstractmethod
    def broadcast(self, buffer: Any, root: int = 0) -> None:
        """Overwrites `buffer` with that of rank `root`, in place.

        Args:
            buffer: flat array, the same length and dtype on every rank.
            root: the rank that sends, the same on every rank.

        Raises:
            ValueError: if `root` is no rank, or the buffer is not flat or not writable.
        """

    @abc.abstractmethod
    def barrier(self) -> None:
        """Returns once every rank has called it."""

    @abc.abstractmethod
    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """Returns rank `root`'s object.

        Args:
            obj: anything `pickle` takes; ignored on ranks other than `root`.
            root: the rank that sends, the same on every rank.

        Raises:
            CommunicatorError: on every rank, if the object cannot be pickled.
            ValueError: if `root` is no rank.
        """

    @abc.abstractmethod
    def allgather_object(self, obj: Any) -> list[Any]:
        """Returns every rank's object, by rank.

        Args:
            obj: anything `pickle` takes.

        Raises:
            CommunicatorError: on every rank, if one cannot be pickled.
        """

    @abc.abstractmethod
    def gather_object(self, obj: Any, root: int = 0) -> list[Any] | None:
        """Returns every rank's object, by rank, on rank `root`; None elsewhere.

        Args:
            obj: anything `pickle` takes.
            root: the rank that receives, the same on every rank.

        Raises:
            CommunicatorError: on every rank, if one cannot be pickled.
            ValueError: if `root` is no rank.
        """

    @abc.abstractmethod
    def duplicate(self) -> Communicator:
        """Returns the same group with a message space of its own; to be closed, too."""

    @abc.abstractmethod
    def abort(self, code: int = 1) -> None:
        """Ends all ranks at once; not collective. Does not return.

        Args:
            code: the exit code of the job.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Frees what the communicator holds; it cannot be used afterwards."""


def aligned_zeros(length: int, dtype: Any) -> np.ndarray:
    """Returns a flat array of zeros whose first byte is aligned to 64 bytes.

    As frameworks want it for taking an array over without a copy; and processors copy
    and add faster what lies so.

    Args:
        length: elements.
        dtype: NumPy's dtype or its name.
    """
    dtype = np.dtype(dtype)
    raw = np.zeros(length * dtype.itemsize + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + length * dtype.itemsize].view(dtype)
