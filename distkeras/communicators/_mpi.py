"""The communicator of host memory: MPI through mpi4py, whatever library it finds.

What MPI leaves to its caller is settled here and in `_mpi_arithmetic`. Its counts are
C ints, and some libraries overflow earlier: long buffers go in chunks. What ranks send
in one call may differ in kind or length: they find out before they exchange it.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence
from typing import Any
from typing import NoReturn

import numpy as np

from distkeras._errors import CommunicatorError
from distkeras._exit import flush
from distkeras._exit import tell_launcher
from distkeras.communicators import _elastic
from distkeras.communicators._agreement import name_ranks
from distkeras.communicators._base import Communicator
from distkeras.communicators._base import Op
from distkeras.communicators._checks import check_buffer
from distkeras.communicators._checks import check_op
from distkeras.communicators._checks import check_open
from distkeras.communicators._checks import check_root
from distkeras.communicators._layout import Layout
from distkeras.communicators._layout import find_layout
from distkeras.communicators._mpi_arithmetic import Arithmetic
from distkeras.communicators._mpi_library import load_mpi
from distkeras.communicators._mpi_library import world_ranks
from distkeras.communicators._stacks import where
from distkeras.communicators._waiting import Calls

_PLACE_BYTES = 256

# Verbs whose first message tells them apart.
_GATHERS = ("allgather", "allgather_object", "gather_object")


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
        """
        check_open(self._closed)
        check_op(op)
        self._check_host(buffer, writable=True)
        if buffer.dtype.kind == "c" and op in ("min", "max"):
            raise TypeError(
                f"Expected a real dtype for op={op!r}, complex numbers have no "
                f"order. Received: {buffer.dtype}"
            )
        with self._calls("allreduce", buffer.nbytes, op):
            for part in self._chunks(buffer):
                self._arithmetic.combine(part, op)

    def allgather(self, buffer: Any) -> list[Any]:
        """Returns every rank's `buffer`, by rank.

        Args:
            buffer: flat NumPy array; lengths may differ, the dtype may not.
        """
        check_open(self._closed)
        self._check_host(buffer, writable=False)
        with self._calls("allgather", buffer.nbytes):
            parts = self._allgather_bytes(_as_bytes(buffer), "allgather")
        return [part.view(buffer.dtype) for part in parts]

    def _heads(self, size: int, verb: str, failed: bool = False) -> np.ndarray:
        """Returns every rank's bytes to come and whether it failed, a row a rank.

        Raises, on every rank alike, if they are in different verbs that begin so.
        """
        kind, number = _GATHERS.index(verb), self._calls.entered
        mine = np.array([size, number, 2 * kind + failed], np.int64)
        everyone = np.empty((self._size, mine.size), np.int64)
        self._comm.Allgather(mine, everyone)
        sizes, numbers, kinds = everyone[:, 0], everyone[:, 1], everyone[:, 2] // 2
        if (numbers != number).any() or (kinds != kind).any():
            self._raise_different(list(zip(numbers.tolist(), kinds, strict=True)))
        return np.stack([sizes, everyone[:, 2] % 2], axis=1)

    def _allgather_bytes(self, data: np.ndarray, verb: str) -> list[np.ndarray]:
        """Returns every rank's bytes, in arrays of their own."""
        counts = self._heads(data.size, verb)[:, 0]
        results = [np.empty(count, np.uint8) for count in counts]
        total = int(counts.sum())
        if total <= self.chunk_bytes:
            joined = np.empty(total, np.uint8)
            self._comm.Allgatherv(data, (joined, counts.tolist()))
            ends = np.cumsum(counts)
            for result, end in zip(results, ends, strict=True):
                result[...] = joined[end - result.size : end]
            return results
        for root, result in enumerate(results):
            if root == self._rank:
                result[...] = data
            self._broadcast_bytes(result, root)
        return results

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
            self._broadcast_bytes(_as_bytes(buffer), root)

    def _broadcast_bytes(self, data: np.ndarray, root: int) -> None:
        for part in self._chunks(data):
            self._comm.Bcast(part, root=root)

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
        failed, data = False, np.empty(0, np.uint8)
        problem: Exception | None = None
        if self._rank == root:
            failed, data, problem = _pickle(obj)
        with self._calls("broadcast_object", data.size, root):
            head = np.array([data.size, failed, self._calls.entered], np.int64)
            self._comm.Bcast(head, root=root)
            self._check_number(root, int(head[2]))
            if self._rank != root:
                data = np.empty(int(head[0]), np.uint8)
            self._broadcast_bytes(data, root)
        if head[1]:
            _raise_unpicklable({root: bytes(data).decode()}, problem)
        return obj if self._rank == root else pickle.loads(data.data)

    def allgather_object(self, obj: Any) -> list[Any]:
        """Returns every rank's object, by rank; this rank's own comes back as it is.

        Args:
            obj: anything `pickle` takes.

        Raises:
            CommunicatorError: on every rank, if one cannot be pickled.
        """
        check_open(self._closed)
        failed, data, problem = _pickle(obj)
        with self._calls("allgather_object", data.size):
            head = np.array([failed, self._calls.entered], np.int64)
            joined = np.concatenate([_as_bytes(head), data])
            parts = self._allgather_bytes(joined, "allgather_object")
            heads = [part[: head.nbytes].tobytes() for part in parts]
            parts = [part[head.nbytes :] for part in parts]
            flags = []
            for rank, theirs in enumerate(heads):
                # A message of another call may be of any length.
                flag, number = np.frombuffer(theirs.ljust(16, b"\0"), np.int64)
                self._check_number(rank, int(number))
                flags.append(bool(flag))
        failures = {
            rank: bytes(part).decode() for rank, part in enumerate(parts) if flags[rank]
        }
        if failures:
            _raise_unpicklable(failures, problem)
        return [
            obj if rank == self._rank else pickle.loads(part.data)
            for rank, part in enumerate(parts)
        ]

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
        failed, data, problem = _pickle(obj)
        with self._calls("gather_object", data.size, root):
            heads = self._heads(data.size, "gather_object", failed)
            parts: list[np.ndarray] = []
            if not heads[:, 1].any():
                parts = self._gather_bytes(data, heads[:, 0].tolist(), root)
        if heads[:, 1].any():
            texts = self.allgather_object(bytes(data).decode() if failed else None)
            failures = {rank: text for rank, text in enumerate(texts) if text}
            _raise_unpicklable(failures, problem)
        if self._rank != root:
            return None
        return [
            obj if rank == root else pickle.loads(part.data)
            for rank, part in enumerate(parts)
        ]

    def _gather_bytes(
        self, data: np.ndarray, counts: list[int], root: int
    ) -> list[np.ndarray]:
        """Returns every rank's bytes on `root`, nothing elsewhere."""
        receives = self._rank == root
        if sum(counts) <= self.chunk_bytes:
            joined = np.empty(sum(counts) if receives else 0, np.uint8)
            self._comm.Gatherv(data, (joined, counts) if receives else None, root)
            return np.split(joined, np.cumsum(counts)[:-1]) if receives else []
        if not receives:
            for piece in self._chunks(data):
                self._comm.Send(piece, dest=root)
            return []
        parts = [np.empty(count, np.uint8) for count in counts]
        parts[root] = data
        for rank, part in enumerate(parts):
            for piece in self._chunks(part) if rank != root else []:
                self._comm.Recv(piece, source=rank)
        return parts

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

    def _check_number(self, rank: int, number: int) -> None:
        """Raises if a rank's message belongs to another call than this one.

        The root of a broadcast waits for nobody: what it alone has sent arrives when
        the others broadcast the next time.
        """
        mine = self._calls.entered
        if number != mine:
            raise CommunicatorError(
                f"Expected all ranks to make the same calls in the same order. "
                f"Received: call {number} of rank {rank} on a communicator on which "
                f"rank {self._rank} is at call {mine}. Rank {rank} has made a call "
                "that others have not, or the other way round."
            )

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

    def _chunks(self, buffer: np.ndarray) -> list[np.ndarray]:
        """Cuts a buffer in views of at most `chunk_bytes`."""
        step = max(1, self.chunk_bytes // buffer.dtype.itemsize)
        return [buffer[i : i + step] for i in range(0, buffer.size, step)]

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


def _as_bytes(buffer: np.ndarray) -> np.ndarray:
    return buffer.view(np.uint8)


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
