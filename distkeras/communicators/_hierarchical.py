"""The communicator of several nodes: shared memory within each, MPI between them."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import numpy as np

from distkeras.communicators._arithmetic import UFUNCS
from distkeras.communicators._arithmetic import place_matters
from distkeras.communicators._base import Op
from distkeras.communicators._base import Part
from distkeras.communicators._checks import check_buffer
from distkeras.communicators._checks import check_op
from distkeras.communicators._checks import check_open
from distkeras.communicators._composed import ComposedCommunicator
from distkeras.communicators._mpi import MPICommunicator
from distkeras.communicators._shared_memory import SharedMemoryCommunicator
from distkeras.communicators._steps import DTYPES

_LONG = 1 << 16  # bytes, from which on bandwidth matters more than latency
_PIECE = 1 << 20  # bytes that are sent at a time
_FLYING = 4

# Combined otherwise between nodes: as bytes, or in float32.
_NOT_NUMBERS = ("bool", "float16", "bfloat16")


_Kind = tuple[Op, str]
"""An operation, and the name of the dtype that it is done in."""


def _placeless() -> frozenset[_Kind]:
    """Returns what gives the same bits on all ranks of machines like this one."""
    return frozenset(
        (op, name)
        for op, ufunc in UFUNCS.items()
        for name in DTYPES
        if name not in _NOT_NUMBERS and not place_matters(ufunc, np.dtype(name))
    )


class _NodePart(SharedMemoryCommunicator):
    """The ranks of one node, whose slices are combined with other nodes' as well."""

    def __init__(
        self,
        host: MPICommunicator,
        everyone: MPICommunicator,
        peers: MPICommunicator | None,
        takers: int,
        swapped: frozenset[_Kind],
        chunk_bytes: int,
    ) -> None:
        super().__init__(host, chunk_bytes=chunk_bytes)
        self._fallback = everyone
        self._peers = peers
        self._takers = takers
        self._swapped = swapped

    def _beyond(self) -> tuple[int, Callable[[np.ndarray, Op], None]]:
        return self._takers, self._across

    def _across(self, part: np.ndarray, op: Op) -> None:
        """Combines this rank's slice with its peers', in place."""
        peers = self._peers
        if peers is None:
            return
        plain = (op, part.dtype.name) in self._swapped
        if peers.size == 2 and plain and part.nbytes >= _LONG:
            with peers.calls("allreduce", part.nbytes, op):
                self._swap(peers, part, UFUNCS[op])
        else:
            peers.allreduce(part, op)

    def _swap(self, peers: MPICommunicator, part: np.ndarray, ufunc: np.ufunc) -> None:
        """Combines with one peer: both send all they have, at the same time.

        That sends no more than a ring does, and keeps both directions of the link
        busy. The next pieces travel while one is added.
        """
        step = _PIECE // part.dtype.itemsize
        pieces = [part[i : i + step] for i in range(0, part.size, step)]
        comm, other = peers.mpi_comm, 1 - peers.rank
        rooms = [np.empty(step, part.dtype) for _ in range(min(_FLYING, len(pieces)))]
        flying: list[tuple[Any, Any]] = []

        def start(number: int) -> None:
            piece = pieces[number]
            room = rooms[number % _FLYING][: piece.size]
            flying.append((comm.Irecv(room, other, 0), comm.Isend(piece, other, 0)))

        for number in range(len(rooms)):
            start(number)
        for number, piece in enumerate(pieces):
            receipt, sending = flying[number]
            receipt.Wait()
            sending.Wait()
            theirs = rooms[number % _FLYING][: piece.size]
            # In the order of ranks, on both: they must get the same bits.
            pair = (theirs, piece) if peers.rank else (piece, theirs)
            ufunc(*pair, out=piece)
            if number + len(rooms) < len(pieces):
                start(number + len(rooms))

    @property
    def broken(self) -> bool:
        """Whether a rank of the node has ended."""
        return self._node is not None and self._node.rendezvous.broken is not None


class HierarchicalCommunicator(ComposedCommunicator):
    """Collectives among ranks of several nodes, each byte sent between them once.

    An allreduce has three parts: the ranks of a node combine their buffers in shared
    memory, each a slice; each rank combines its slice with those of its peers on the
    other nodes, by MPI; and all read the slices of their node. So a node sends what
    a single rank would, by as many ranks as it has.

    Nodes may have different numbers of ranks: as many slices are made as the smallest
    node has ranks, and the further ranks of larger nodes take part in the first and
    the last part only.

    Results are the same bits on every rank: elements are combined within a node in
    the order of ranks, then over nodes as MPI does. Half precision is combined in
    `float32`, between nodes too, and rounded once (but see `allreduce_parts`). What is
    no allreduce goes to the MPI communicator it is composed with.

    Args:
        host: the MPI communicator to compose with, owned from here on; by default a
            duplicate of MPI's world.
        node_of_rank: which node each rank belongs to, by rank, any numbers. By default
            what MPI finds. To try on one node how several would do: it must not
            join ranks that share no memory.
        chunk_bytes: largest part of an ordinary buffer that goes through the three
            parts at a time.

    Example:
        >>> communicator = HierarchicalCommunicator()
        >>> buffer = np.ones(3, "float32")
        >>> communicator.allreduce(buffer)
        >>> bool((buffer == communicator.size).all())
        True
        >>> communicator.close()
    """

    name = "hierarchical"

    def __init__(
        self,
        host: MPICommunicator | None = None,
        *,
        node_of_rank: Sequence[int] | None = None,
        chunk_bytes: int = 4 << 20,
    ) -> None:
        """Makes the groups of ranks of a node, and of peers; collective."""
        super().__init__(host)
        if node_of_rank is not None and len(node_of_rank) != self._host.size:
            raise ValueError(
                f"Expected node_of_rank to name {self._host.size} nodes, one a rank. "
                f"Received: {len(node_of_rank)}"
            )
        self._node_of_rank = node_of_rank
        self._chunk_bytes = chunk_bytes
        local = self._group(self._node_color(), self._host.rank)
        everyone = self._host.allgather_object((local.rank, local.size, _placeless()))
        self._node_sizes = tuple(size for rank, size, _ in everyone if rank == 0)
        # Of all machines: two peers must go the same way, and their processors differ.
        swapped = frozenset.intersection(*(kinds for *_, kinds in everyone))
        takers = min(self._node_sizes)
        # Of a node's further ranks, those of one number have a group too, unused.
        peers = self._group(local.rank, self._host.rank)
        self._peers = peers
        taking = peers if local.rank < takers else None
        self._local = _NodePart(local, self._host, taking, takers, swapped, chunk_bytes)

    def _node_color(self) -> int:
        """Returns a number that the ranks of this node have in common."""
        if self._node_of_rank is not None:
            numbers = sorted(set(self._node_of_rank))
            return numbers.index(self._node_of_rank[self._host.rank])
        return self._host.layout.node

    def _group(self, color: int, key: int) -> MPICommunicator:
        """Returns the communicator of the ranks of one color; collective."""
        with self._host.calls("split"):
            comm = self._host.mpi_comm.Split(color, key)
        made = MPICommunicator(comm, parent=self._host.calls)
        comm.Free()
        return made

    @property
    def node_sizes(self) -> Sequence[int]:
        """How many ranks each node has, by the node's first rank."""
        return self._node_sizes

    @property
    def fixed_order(self) -> bool:
        """Whether `allreduce` sums an element alike wherever in a message it lies."""
        few_nodes = len(self._node_sizes) <= 2
        return (few_nodes and self._local.has_room) or super().fixed_order

    def allreduce(self, buffer: Any, op: Op = "sum") -> None:
        """Combines `buffer` over all ranks, in place.

        Args:
            buffer: flat NumPy array, the same length and dtype on every rank.
            op: "sum", "min", "max" or "product". Of booleans, "sum" is "or" and
                "product" is "and".
        """
        check_open(self._closed)
        dtype = getattr(buffer, "dtype", None)
        if isinstance(dtype, np.dtype) and dtype.itemsize < 4 and dtype.kind in "fV":
            check_op(op)
            check_buffer(buffer, writable=True)
            wide = buffer.astype(np.float32)
            self._local.allreduce(wide, op)
            with np.errstate(over="ignore"):  # beyond the type's range: infinity
                buffer[...] = wide.astype(dtype)
            return
        self._local.allreduce(buffer, op)

    def allreduce_parts(
        self, buffer: np.ndarray, op: Op = "sum", *, pack: Part, unpack: Part
    ) -> None:
        """Combines what `pack` writes over all ranks, into `buffer`, part by part.

        See `Communicator.allreduce_parts`. Half precision travels between nodes in its
        sixteen bits here: the result of a node is rounded, and that of all nodes once
        more.
        """
        check_open(self._closed)
        self._local.allreduce_parts(buffer, op, pack=pack, unpack=unpack)

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
        self._local.barrier()
        if len(self._node_sizes) > 1:
            if self._local.rank == 0:
                self._peers.barrier()
            self._local.barrier()

    def duplicate(self) -> HierarchicalCommunicator:
        """Returns the same group with a message space of its own; collective."""
        check_open(self._closed)
        return type(self)(
            self._host.duplicate(),
            node_of_rank=self._node_of_rank,
            chunk_bytes=self._chunk_bytes,
        )

    def close(self) -> None:
        """Gives shared memory back and frees MPI's communicators; collective, once.

        After another rank's end nothing is given back: that would wait for it.
        """
        if self._closed:
            return
        self._closed = True
        broken = self._local.broken
        self._local.close()
        if not broken:
            self._peers.close()
            self._host.close()
