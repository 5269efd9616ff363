"""The communicator of host memory: MPI through mpi4py, whatever library it finds.

What MPI leaves to its caller is settled in the modules that begin with `_mpi`: what it
cannot add (`_mpi_arithmetic`), what is too long for it (`_mpi_bytes`), objects
(`_mpi_objects`), and ranks whose calls differ (`_mpi_order`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from distkeras._exit import flush
from distkeras._exit import tell_launcher
from distkeras.communicators import _elastic
from distkeras.communicators._base import Communicator
from distkeras.communicators._base import Op
from distkeras.communicators._checks import check_buffer
from distkeras.communicators._checks import check_op
from distkeras.communicators._checks import check_open
from distkeras.communicators._checks import check_root
from distkeras.communicators._layout import Layout
from distkeras.communicators._layout import find_layout
from distkeras.communicators._mpi_arithmetic import Arithmetic
from distkeras.communicators._mpi_bytes import ByteTransport
from distkeras.communicators._mpi_bytes import as_bytes
from distkeras.communicators._mpi_library import load_mpi
from distkeras.communicators._mpi_library import world_ranks
from distkeras.communicators._mpi_objects import ObjectTransport
from distkeras.communicators._mpi_order import CallOrder
from distkeras.communicators._waiting import Calls


class MPICommunicator(Communicator):
    """Collectives on NumPy buffers by MPI, in a message space of its own.

    Results are the same bits on every rank. `float16`, `bfloat16` and other types
    narrower than `float32` are combined in `float32` and rounded once at the end.

    Args:
        comm: the `mpi4py.MPI.Intracomm` to duplicate (collective over its
            ranks); MPI's world by default.

    Raises:
        CommunicatorError: if mpi4py or an MPI library is missing.

    Example:
        >>> communicator = MPICommunicator()
        >>> buffer = np.ones(3, "float32")
        >>> communicator.allreduce(buffer)
        >>> bool((buffer == communicator.size).all())
        True
        >>> communicator.close()
    """

    name = "mpi"

    #: Largest message, in bytes. MPI's counts are C ints; below that, some
    #: libraries overflow in sums of counts.
    chunk_bytes = 1 << 28

    def __init__(self, comm: Any = None, *, parent: Calls | None = None) -> None:
        """Duplicates `comm`; collective. `parent`: the calls on `comm`, if watched."""
        self._mpi = load_mpi()
        self._closed = False
        source = self._mpi.COMM_WORLD if comm is None else comm
        self._comm = source.Dup()
        _elastic.register(self)
        self._rank = int(self._comm.Get_rank())
        self._size = int(self._comm.Get_size())
        self._arithmetic = Arithmetic(self._mpi, self._comm)
        self._calls = Calls(world_ranks(self._mpi, self._comm), parent)
        self._bytes = ByteTransport(self._comm, self.chunk_bytes)
        self._order = CallOrder(self._comm, self._calls)
        self._objects = ObjectTransport(
            self._comm, self._bytes, self._order, self._calls
        )
        name = self._mpi.Get_processor_name()
        self._layout = find_layout(
            self._rank, self._node_leader(), name, self.allgather_object
        )

    def _node_leader(self) -> int:
        """Returns the first of the ranks that MPI takes for this node's."""
        with self._calls("split"):
            node = self._comm.Split_type(self._mpi.COMM_TYPE_SHARED, self._rank)
        mine, everyone = node.Get_group(), self._comm.Get_group()
        first = int(mine.Translate_ranks([0], everyone)[0])
        for handle in (mine, everyone, node):
            handle.Free()
        return first

    @property
    def layout(self) -> Layout:
        """Where the ranks sit."""
        return self._layout

    @property
    def library(self) -> str:
        """The MPI library and its version, one line."""
        text = str(self._mpi.Get_library_version()).splitlines()[0].strip("\0")
        # "Open MPI v5.0.11, package: …", "MPICH Version:      5.0.2"
        return " ".join(text.split(",")[0].replace("Version:", " ").split())

    @property
    def mpi_comm(self) -> Any:
        """The duplicated `mpi4py.MPI.Intracomm` underneath."""
        check_open(self._closed)
        return self._comm

    @property
    def raw(self) -> Any:
        """The same, also where this communicator is closed already."""
        return self._comm

    @property
    def calls(self) -> Calls:
        """What the watchdog knows of the collectives on this communicator."""
        return self._calls

    @property
    def rank(self) -> int:
        """This process' number, 0 to `size - 1`."""
        return self._rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._size

    @property
    def local_rank(self) -> int:
        """This process' number among the ranks that share its memory."""
        return self._layout.local_rank

    @property
    def local_size(self) -> int:
        """The number of ranks that share this node's memory."""
        return self._layout.local_size

    @property
    def hosts(self) -> Sequence[str]:
        """The host name of every rank, by rank."""
        return self._layout.hosts

    def allreduce(self, buffer: Any, op: Op = "sum") -> None:
        """Combines `buffer` over all ranks, in place.

        Args:
            buffer: flat NumPy array, the same length and dtype on every rank.
            op: "sum", "min", "max" or "product". A NaN on any rank makes the
                element NaN, whatever the operation. Of booleans, "sum" is "or"
                and "product" is "and".

        Raises:
            TypeError: for the least or the greatest of complex numbers.
            ValueError: if the numbers are in another order of bytes than this
                machine's.
        """
        check_open(self._closed)
        check_op(op)
        self._check_host(buffer, writable=True)
        if buffer.dtype.kind == "c" and op in ("min", "max"):
            raise TypeError(
                f"Expected a real dtype for op={op!r}, complex numbers have no "
                f"order. Received: {buffer.dtype}"
            )
        if not buffer.dtype.isnative:
            raise ValueError(
                "Expected numbers in this machine's order of bytes; use "
                "array.astype(array.dtype.newbyteorder('=')). Received: "
                f"{buffer.dtype.str}"
            )
        if not buffer.flags.aligned:  # mpi4py knows no such numbers
            copy = buffer.copy()
            self.allreduce(copy, op)
            buffer[...] = copy
            return
        with self._calls("allreduce", buffer.nbytes, op):
            for part in self._bytes.chunks(buffer):
                self._arithmetic.combine(part, op)

    def allgather(self, buffer: Any) -> list[Any]:
        """Returns every rank's `buffer`, by rank.

        Args:
            buffer: flat NumPy array; lengths may differ, the dtype may not.
        """
        check_open(self._closed)
        self._check_host(buffer, writable=False)
        with self._calls("allgather", buffer.nbytes):
            data = as_bytes(buffer)
            counts = self._order.heads(data.size, "allgather")[:, 0]
            parts = self._bytes.allgather(data, counts)
        return [part.view(buffer.dtype) for part in parts]

    def broadcast(self, buffer: Any, root: int = 0) -> None:
        """Overwrites `buffer` with that of rank `root`, in place.

        Args:
            buffer: flat NumPy array, the same length and dtype on every rank.
            root: the rank that sends, the same on every rank.
        """
        check_open(self._closed)
        check_root(root, self._size)
        self._check_host(buffer, writable=True)
        with self._calls("broadcast", buffer.nbytes, root):
            self._bytes.broadcast(as_bytes(buffer), root)

    def barrier(self) -> None:
        """Returns once every rank has called it."""
        check_open(self._closed)
        with self._calls("barrier"):
            self._comm.Barrier()

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """Returns rank `root`'s object; what other ranks pass is ignored.

        Args:
            obj: anything `pickle` takes.
            root: the rank that sends, the same on every rank.

        Raises:
            CommunicatorError: on every rank, if the object cannot be pickled.
        """
        check_open(self._closed)
        check_root(root, self._size)
        return self._objects.broadcast(obj, root)

    def allgather_object(self, obj: Any) -> list[Any]:
        """Returns every rank's object, by rank; this rank's own comes back as it is.

        Args:
            obj: anything `pickle` takes.

        Raises:
            CommunicatorError: on every rank, if one cannot be pickled.
        """
        check_open(self._closed)
        return self._objects.allgather(obj)

    def gather_object(self, obj: Any, root: int = 0) -> list[Any] | None:
        """Returns every rank's object, by rank, on rank `root`; None elsewhere.

        Args:
            obj: anything `pickle` takes.
            root: the rank that receives, the same on every rank.

        Raises:
            CommunicatorError: on every rank, if one cannot be pickled.
        """
        check_open(self._closed)
        check_root(root, self._size)
        return self._objects.gather(obj, root)

    def duplicate(self) -> MPICommunicator:
        """Returns the same group with a message space of its own; collective."""
        check_open(self._closed)
        with self._calls("duplicate"):
            return type(self)(self._comm, parent=self._calls)

    def abort(self, code: int = 1) -> None:
        """Ends all processes of the job at once with exit code `code`."""
        flush()
        tell_launcher("failed", str(code))
        self._mpi.COMM_WORLD.Abort(code)

    def close(self) -> None:
        """Frees the duplicated communicator; collective, once."""
        if self._closed:
            return
        self._closed = True
        if not self._mpi.Is_finalized():
            with self._calls("close"):
                self._comm.Free()
        self._calls.close()

    @staticmethod
    def _check_host(buffer: Any, *, writable: bool) -> None:
        check_buffer(buffer, writable=writable)
        if not isinstance(buffer, np.ndarray):
            raise TypeError(
                "Expected a NumPy array, the mpi communicator works on host memory. "
                f"Received: {type(buffer).__name__}"
            )
        if buffer.dtype.hasobject or buffer.dtype.kind in "SUmM":
            raise TypeError(
                f"Expected a numeric dtype. Received: {buffer.dtype}. Use the verbs "
                "that end in `_object` for anything else."
            )
