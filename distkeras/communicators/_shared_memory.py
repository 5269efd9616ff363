"""The communicator of one node: buffers are combined in memory that its ranks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from distkeras._errors import CommunicatorError
from distkeras._logging import LOGGER
from distkeras.communicators import _elastic
from distkeras.communicators._arithmetic import UFUNCS
from distkeras.communicators._arithmetic import place_matters
from distkeras.communicators._arithmetic import quiet
from distkeras.communicators._base import Op
from distkeras.communicators._base import Part
from distkeras.communicators._checks import check_buffer
from distkeras.communicators._checks import check_op
from distkeras.communicators._checks import check_open
from distkeras.communicators._composed import ComposedCommunicator
from distkeras.communicators._mpi import MPICommunicator
from distkeras.communicators._mpi_library import load_mpi
from distkeras.communicators._rendezvous import HEADER_BYTES
from distkeras.communicators._rendezvous import Process
from distkeras.communicators._rendezvous import Rendezvous
from distkeras.communicators._shared_chain import Chain
from distkeras.communicators._shared_reduction import SLOTS
from distkeras.communicators._shared_reduction import Direct
from distkeras.communicators._shared_reduction import Message
from distkeras.communicators._shared_reduction import Node
from distkeras.communicators._shared_reduction import Reduction
from distkeras.communicators._shared_reduction import Sliced
from distkeras.communicators._shared_window import MappedWindow
from distkeras.communicators._shared_window import SharedWindow
from distkeras.communicators._shared_window import lacking_room
from distkeras.communicators._steps import BARRIER
from distkeras.communicators._steps import DTYPES
from distkeras.communicators._steps import make_label

Window = SharedWindow | MappedWindow

# Flags of NumPy's arrays: C-contiguous, aligned, writeable.
_USABLE = 0x1 | 0x100 | 0x400

_MOST_REDUCTIONS = 256
_FIRST_SLOT = 1 << 14  # bytes
_SHORTEST_LINK = 1 << 18  # bytes, of a sum that is made in turn
# Bytes up to which each rank combines for itself what one of them could for all: of a
# buffer where each has its core, else of all ranks' buffers together, as there a second
# meeting costs more (measured with 3, 4 and 6 ranks on 2 cores).
_DIRECT_BYTES = 1 << 14
_DIRECT_BYTES_OF_ALL = 1 << 20


class SharedMemoryCommunicator(ComposedCommunicator):
    """Collectives among ranks of one node, flat buffers through shared memory.

    A buffer is copied in chunks to a window of memory that all ranks map, combined
    there, and read from it once. What is no allreduce, and allreduces of dtypes for
    which this gains nothing (complex, long double), go to the MPI communicator it is
    composed with.

    Results are the same bits on every rank, elements are combined in the order of
    ranks. A NaN on any rank makes the element NaN. `float16` and `bfloat16` are
    combined in `float32` and rounded once.

    Memory: three chunks a rank, made at the first allreduce for a buffer of that size
    and, each time a longer one comes, made anew at twice the size or more, up to
    `chunk_bytes`. Longer buffers go in several chunks. All of it is given back by
    `close`, and by the system when the last rank ends, however it ends.

    Waiting: see `distkeras.communicators._rendezvous`. A rank that waits finds out
    within a second if the process it waits for has ended, unless ranks of a node run
    in containers that do not see each other's processes.

    Args:
        host: the MPI communicator to compose with, owned from here on; by default a
            duplicate of MPI's world.
        chunk_bytes: largest chunk. The default measured best on 2 cores that share
            32 MiB of cache: much smaller ones are waited for too often, larger ones
            leave the cache before they are read.
        direct_bytes: up to this many bytes, more than two ranks combine a buffer each
            by itself, above it each combines a slice for all. Two ranks always do
            the former, but for half precision. By default 16 KiB; where there are
            two cores for three ranks, or less, 1 MiB divided by the number of ranks
            if that is more.
        in_turn: whether more than two ranks add to one sum, one after another, where a
            buffer fills a chunk. By default where they are twice as many as their
            cores, or more, and a buffer has a chunk or more for each core to work on.

    Raises:
        CommunicatorError: if the ranks are not all on one node.

    Example:
        >>> communicator = SharedMemoryCommunicator()
        >>> buffer = np.ones(3, "float32")
        >>> communicator.allreduce(buffer)
        >>> bool((buffer == communicator.size).all())
        True
        >>> communicator.close()
    """

    name = "shared_memory"

    def __init__(
        self,
        host: MPICommunicator | None = None,
        *,
        chunk_bytes: int = 1 << 20,
        direct_bytes: int | None = None,
        in_turn: bool | None = None,
    ) -> None:
        """Checks that the ranks share memory; collective."""
        super().__init__(host)
        if self._host.local_size != self._host.size:
            raise CommunicatorError(
                f"Expected all {self._host.size} ranks on one node. Received: "
                f"{self._host.local_size} ranks on {self._host.hosts[self.rank]}. "
                "DISTKERAS_COMMUNICATOR=hierarchical works on several nodes, and so "
                "does mpi."
            )
        if chunk_bytes < 64:
            raise ValueError(
                f"Expected chunk_bytes to be 64 or more. Received: {chunk_bytes}"
            )
        # Does what is not for shared memory, and agrees on whether there is enough.
        self._fallback = self._host
        self._chunk_bytes = chunk_bytes // 64 * 64
        self._direct_bytes = direct_bytes
        self._in_turn = in_turn
        self._node: Node | None = None  # made at the first use
        self._control: Window | None = None
        self._slots: list[list[np.ndarray]] = []  # by slot, by rank
        self._slot_bytes = 0
        self._staging: Window | None = None  # once it has grown
        self._no_room = False
        self._reductions: dict[tuple[Any, ...], Reduction] = {}

    @property
    def fixed_order(self) -> bool:
        """Whether `allreduce` sums an element alike wherever in a message it lies.

        Known after the first one: without room for shared memory MPI does it.
        """
        return self.has_room or super().fixed_order

    @property
    def has_room(self) -> bool:
        """Whether no allreduce so far has found too little shared memory."""
        return not self._no_room

    def allreduce(self, buffer: Any, op: Op = "sum") -> None:
        """Combines `buffer` over all ranks, in place.

        Args:
            buffer: flat NumPy array, the same length and dtype on every rank.
            op: "sum", "min", "max" or "product". Of booleans, "sum" is "or" and
                "product" is "and".

        Raises:
            CommunicatorError: on every rank, if lengths, dtypes or operations differ;
                if the process of another rank has ended.
        """
        reduction = self._find(buffer, op)
        if reduction is not None:
            reduction.run(buffer)
        elif self._node is None or not self._takes(buffer):
            self._fallback.allreduce(buffer, op)
        else:  # not aligned
            copy = buffer.copy()
            self.allreduce(copy, op)
            buffer[...] = copy

    def allreduce_parts(
        self, buffer: np.ndarray, op: Op = "sum", *, pack: Part, unpack: Part
    ) -> None:
        """Combines what `pack` writes over all ranks, into `buffer`, part by part.

        Parts have `chunk_bytes`, and are packed into shared memory itself. See
        `Communicator.allreduce_parts`.
        """
        reduction = self._find(buffer, op)
        if reduction is None:
            super().allreduce_parts(buffer, op, pack=pack, unpack=unpack)
        else:
            reduction.run(buffer, pack, unpack)

    def _find(self, buffer: Any, op: Op) -> Reduction | None:
        """Returns what combines buffers like this; `None` where this is MPI's to do.

        Most calls are like an earlier one, whose arguments were checked: what small
        buffers can afford is to see that.
        """
        try:
            reduction = self._reductions[buffer.shape, buffer.dtype, op]
            if buffer.flags.num & _USABLE == _USABLE:
                return reduction
        except (AttributeError, KeyError, TypeError):
            pass
        check_open(self._closed)
        check_op(op)
        check_buffer(buffer, writable=True)
        node = self._connect() if self._takes(buffer) else None
        if node is None or not buffer.flags.aligned:
            return None
        if len(self._reductions) >= _MOST_REDUCTIONS:
            self._reductions.clear()
        made = self._prepare(node, buffer, op)
        self._reductions[buffer.shape, buffer.dtype, op] = made
        return made

    def _takes(self, buffer: Any) -> bool:
        """Whether this is for shared memory; the same on all ranks."""
        return (
            isinstance(buffer, np.ndarray)
            and buffer.dtype.name in DTYPES
            and buffer.dtype.isnative
            and buffer.size > 0
        )

    def _prepare(self, node: Node, buffer: np.ndarray, op: Op) -> Reduction:
        """Returns the fastest reduction for buffers like this; collective."""
        dtype, label = buffer.dtype, make_label(buffer, op)
        if buffer.nbytes > self._slot_bytes < self._chunk_bytes:
            # Only together, and only if all are about to.
            node.rendezvous.meet_alike(label)
            self._grow(buffer.nbytes)
        narrow = dtype.kind in "fV" and dtype.itemsize < 4
        message = Message(label, buffer.size, dtype, op)
        many = self.size > 2 and buffer.nbytes > self._most_direct(node)
        beyond = node.across is not None
        if many and not beyond and not narrow and self._goes_in_turn(node, buffer):
            return Chain(node, self._slots, message)
        if beyond or narrow or many or place_matters(UFUNCS[op], dtype):
            return Sliced(node, self._slots, message)
        return Direct(node, self._slots, message)

    def _most_direct(self, node: Node) -> int:
        """Returns up to how many bytes each rank combines for itself."""
        if self._direct_bytes is not None:
            return self._direct_bytes
        if 3 * node.rendezvous.cores <= 2 * self.size:
            return max(_DIRECT_BYTES, _DIRECT_BYTES_OF_ALL // self.size)
        return _DIRECT_BYTES

    def _goes_in_turn(self, node: Node, buffer: np.ndarray) -> bool:
        """Whether a sum is made by one rank after another; the same on all ranks."""
        if self._in_turn is not None:
            return self._in_turn and buffer.nbytes >= self._chunk_bytes
        cores = node.rendezvous.cores
        return (
            2 * cores <= self.size
            and buffer.nbytes > cores * self._chunk_bytes
            and self._chunk_bytes >= _SHORTEST_LINK
        )

    def _connect(self) -> Node | None:
        """Returns the meeting place, made at the first call; collective.

        A rank alone needs none. Without room for shared memory there is none: MPI
        does everything then.
        """
        if self._node is not None or self._no_room or self._fallback.size == 1:
            return self._node
        slot = min(self._chunk_bytes, _FIRST_SLOT)
        window = self._allocate(HEADER_BYTES + SLOTS * slot)
        if window is None:
            self._no_room = True
            return None
        rendezvous = Rendezvous(
            self.rank,
            [part[:HEADER_BYTES].data for part in window.parts],
            self._host.allgather_object(Process.this()),
            window.sync,
            self._host.calls,
        )
        self._control, self._slot_bytes = window, slot
        self._slots = _slots(window, HEADER_BYTES, slot)
        takers, across = self._beyond()
        self._node = Node(self.rank, self.size, rendezvous, quiet(), takers, across)
        return self._node

    def _beyond(self) -> tuple[int, Callable[[np.ndarray, Op], None] | None]:
        """Returns how many ranks take slices, and what they do with those of theirs."""
        return self.size, None

    def _allocate(self, size: int) -> Window | None:
        """Returns a window, or `None` on all ranks if there is no room; collective."""
        reasons = self._fallback.allgather_object(lacking_room(size * self.size))
        lacking = next((reason for reason in reasons if reason is not None), None)
        known = self._host.layout.known_to_mpi
        if lacking is None and (_elastic.active() or not known):
            with self._host.calls("window"):
                return MappedWindow(self._host.mpi_comm, size)
        if lacking is None:
            return SharedWindow(load_mpi(), self._host.mpi_comm, size)
        if self._fallback.rank == 0:
            # Not `warnings.warn`, which may be made to raise, on this rank alone.
            LOGGER.warning(
                f"Too little shared memory: {lacking}. The exchange goes on through "
                "MPI, slower."
            )
        return None

    def _grow(self, nbytes: int) -> None:
        """Makes longer chunks, for a buffer of that many bytes; collective."""
        wanted = max(2 * self._slot_bytes, 1 << (nbytes - 1).bit_length())
        slot = min(self._chunk_bytes, wanted)
        window = self._allocate(SLOTS * slot)
        if window is None:
            self._chunk_bytes = self._slot_bytes  # do not ask again
            return
        self._reductions.clear()
        old, self._staging, self._slot_bytes = self._staging, window, slot
        self._slots = _slots(window, 0, slot)
        if old is not None:
            old.free()

    def allgather(self, buffer: Any) -> list[Any]:
        """Returns every rank's `buffer`, by rank, by MPI."""
        check_open(self._closed)
        return self._host.allgather(buffer)

    def broadcast(self, buffer: Any, root: int = 0) -> None:
        """Overwrites `buffer` with that of rank `root`, in place, by MPI."""
        check_open(self._closed)
        self._host.broadcast(buffer, root)

    def barrier(self) -> None:
        """Returns once every rank has called it."""
        check_open(self._closed)
        node = self._connect()
        if node is None:
            self._fallback.barrier()
        else:
            node.rendezvous.meet_alike(BARRIER)

    def duplicate(self) -> SharedMemoryCommunicator:
        """Returns the same group with a message space of its own; collective."""
        check_open(self._closed)
        return type(self)(
            self._host.duplicate(),
            chunk_bytes=self._chunk_bytes,
            direct_bytes=self._direct_bytes,
            in_turn=self._in_turn,
        )

    def close(self) -> None:
        """Gives the shared memory back and frees MPI's communicator; collective, once.

        After another rank's end nothing is given back: that would wait for it.
        """
        if self._closed:
            return
        self._closed = True
        self._reductions.clear()
        self._slots = []
        node, self._node = self._node, None
        if node is not None:
            node.rendezvous.release()
            if node.rendezvous.broken is not None:
                return
        windows = [w for w in (self._staging, self._control) if w is not None]
        if not load_mpi().Is_finalized():
            for window in windows:
                window.free()
        self._host.close()


def _slots(window: Window, start: int, size: int) -> list[list[np.ndarray]]:
    """Returns the bytes of the slots that begin at `start`, by slot and rank."""
    begins = range(start, start + SLOTS * size, size)
    return [[part[b : b + size] for part in window.parts] for b in begins]
