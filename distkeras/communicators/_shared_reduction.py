"""The ways to combine buffers of the ranks of a node, prepared once and then run.

Each is made for one length, dtype and operation. Whatever depends on those only, all
views of the shared memory in particular, is made then: for small buffers that is
most of the work.

In all of them every element is combined in the order of ranks, and all ranks hold
the same bits afterwards: either one rank computes an element for all, or all compute
it from the same operands by code that gives the same bits (`place_matters`).
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from distkeras.communicators._arithmetic import UFUNCS
from distkeras.communicators._arithmetic import Quiet
from distkeras.communicators._arithmetic import copy_bytes
from distkeras.communicators._base import Op
from distkeras.communicators._base import Part
from distkeras.communicators._rendezvous import REDUCED
from distkeras.communicators._rendezvous import Label
from distkeras.communicators._rendezvous import Rendezvous

_SMALL = 4096  # bytes, up to which an assignment is the fastest copy
_PIECE = 1 << 17  # bytes that are combined at a time: all operands fit a core's cache
_LINE = 64  # bytes, that no two ranks should write at once

SLOTS = 3
"""Chunks that each rank has in shared memory; they take turns, step by step."""


class Node(NamedTuple):
    """What all reductions of a communicator work with.

    Attributes:
        rank: of this process.
        size: how many ranks.
        rendezvous: where they meet.
        quiet: runs NumPy's functions.
        takers: how many of the ranks, from the first on, take a slice.
        across: combines a slice with other nodes', in place; `None` if there are none.
    """

    rank: int
    size: int
    rendezvous: Rendezvous
    quiet: Quiet
    takers: int
    across: Callable[[np.ndarray, Op], None] | None = None

    def slices(self, length: int, itemsize: int) -> list[slice]:
        """Returns each rank's slice of a buffer; those of some may be empty."""
        cuts = slices(length, self.takers, itemsize)
        return cuts + [slice(length, length)] * (self.size - self.takers)


class Message(NamedTuple):
    """What a reduction is prepared for.

    Attributes:
        label: of the call.
        length: elements of the buffer.
        dtype: of the buffer; but for `Sliced` one that NumPy computes in.
        op: the operation.
    """

    label: Label
    length: int
    dtype: np.dtype
    op: Op


class Reduction(abc.ABC):
    """A prepared allreduce."""

    @abc.abstractmethod
    def run(
        self, buffer: np.ndarray, pack: Part | None = None, unpack: Part | None = None
    ) -> None:
        """Combines `buffer` over all ranks, in place.

        Args:
            buffer: which is combined.
            pack: if given, writes what is combined, see `Communicator.allreduce_parts`.
            unpack: if given, is called with what was combined.
        """


class _Slot(NamedTuple):
    """A chunk in shared memory.

    Attributes:
        mine: this rank's elements.
        bytes: the same as bytes.
        combine: combines this rank's slice of all ranks' bytes.
        result: that slice, combined.
        results: each rank's slice of the result, and where in the chunk it belongs.
    """

    mine: np.ndarray
    bytes: np.ndarray
    combine: Callable[[], None]
    result: np.ndarray
    results: list[tuple[slice, np.ndarray]]


class Direct(Reduction):
    """Every rank combines all elements by itself: one meeting, no copy back.

    The fastest for two ranks, and for small buffers. What was packed in a step is read
    by all before they reach the next one.

    Args:
        node: the ranks.
        slots: bytes of each rank, by rank, of each slot.
        message: what for.
    """

    def __init__(
        self,
        node: Node,
        slots: Sequence[Sequence[np.ndarray]],
        message: Message,
    ) -> None:
        self._rendezvous, self._label = node.rendezvous, message.label
        self._quiet, self._ufunc = node.quiet, UFUNCS[message.op]
        length, dtype = message.length, message.dtype
        step = slots[0][0].size // dtype.itemsize
        self._pieces = [
            (slice(i, i + step), _operands(slots, min(step, length - i), node, dtype))
            for i in range(0, length, step)
        ]
        self._only = self._pieces[0][1] if len(self._pieces) == 1 else None
        self._small = length * dtype.itemsize <= _SMALL

    def run(
        self, buffer: np.ndarray, pack: Part | None = None, unpack: Part | None = None
    ) -> None:
        """Combines `buffer` over all ranks, in place."""
        rendezvous = self._rendezvous
        if self._only is not None and pack is None:
            mine, bytes_, first, second, others = self._only[
                (rendezvous.step + 1) % SLOTS
            ]
            if self._small:
                mine[...] = buffer
            else:
                copy_bytes(buffer.view(np.uint8), bytes_)
            rendezvous.meet_alike(self._label)
            self._quiet(self._ufunc, first, second, out=buffer)
            for other in others:
                self._quiet(self._ufunc, buffer, other, out=buffer)
            return
        self._quiet(self._run_pieces, buffer, pack, unpack)

    def _run_pieces(
        self, buffer: np.ndarray, pack: Part | None, unpack: Part | None
    ) -> None:
        rendezvous, ufunc = self._rendezvous, self._ufunc
        for place, slots in self._pieces:
            part = buffer[place]
            mine, bytes_, first, second, others = slots[(rendezvous.step + 1) % SLOTS]
            if pack is None:
                copy_bytes(part.view(np.uint8), bytes_)
            else:
                pack(mine, place.start)
            rendezvous.meet_alike(self._label)
            ufunc(first, second, out=part)
            for other in others:
                ufunc(part, other, out=part)
            if unpack is not None:
                unpack(part, place.start)


_Operands = tuple[
    np.ndarray, np.ndarray, np.ndarray, np.ndarray, tuple[np.ndarray, ...]
]


def _operands(
    slots: Sequence[Sequence[np.ndarray]], length: int, node: Node, dtype: np.dtype
) -> tuple[_Operands, ...]:
    """Returns for each slot this rank's part, its bytes, and all ranks' parts."""
    found = []
    for ranks in slots:
        parts = [part[: length * dtype.itemsize].view(dtype) for part in ranks]
        mine = parts[node.rank]
        found.append((mine, mine.view(np.uint8), parts[0], parts[1], tuple(parts[2:])))
    return tuple(found)


class Sliced(Reduction):
    """Every rank combines its slice of each chunk for all.

    The fewest additions, for more than two ranks; and one rounding for all ranks,
    for dtypes narrower than float32. Between two meetings a rank reads the result of
    one chunk, combines its slice of the next, and packs the one after that: a meeting
    a chunk, and one in the end. What was packed in a step is combined before the next
    one and read before the one after that; then its slot is written to again.

    Args:
        node: the ranks.
        slots: bytes of each rank, by rank, of each slot.
        message: what for.
    """

    def __init__(
        self,
        node: Node,
        slots: Sequence[Sequence[np.ndarray]],
        message: Message,
    ) -> None:
        self._node, self._label, self._op = node, message.label, message.op
        length, dtype = message.length, message.dtype
        step = slots[0][0].size // dtype.itemsize
        known: dict[int, tuple[_Slot, ...]] = {}
        self._pieces: list[tuple[slice, tuple[_Slot, ...]]] = []
        for start in range(0, length, step):
            count = min(step, length - start)
            if count not in known:
                known[count] = tuple(self._slot(s, count, dtype) for s in slots)
            self._pieces.append((slice(start, start + count), known[count]))

    def _slot(self, ranks: Sequence[np.ndarray], length: int, dtype: np.dtype) -> _Slot:
        size = length * dtype.itemsize
        parts = [part[:size].view(dtype) for part in ranks]
        cuts = self._node.slices(length, dtype.itemsize)
        mine = cuts[self._node.rank]
        combine = combiner([p[mine] for p in parts], self._node.rank, self._op)
        places = [
            slice(s.start * dtype.itemsize, s.stop * dtype.itemsize) for s in cuts
        ]
        return _Slot(
            parts[self._node.rank],
            ranks[self._node.rank][:size],
            combine,
            parts[self._node.rank][mine],
            [(place, part[place]) for place, part in zip(places, ranks, strict=True)],
        )

    def run(
        self, buffer: np.ndarray, pack: Part | None = None, unpack: Part | None = None
    ) -> None:
        """Combines `buffer` over all ranks, in place."""
        self._node.quiet(self._run_pieces, buffer, pack, unpack)

    def _run_pieces(
        self, buffer: np.ndarray, pack: Part | None, unpack: Part | None
    ) -> None:
        rendezvous, last = self._node.rendezvous, len(self._pieces) - 1
        slot = self._pack(0, buffer, pack)
        before: tuple[slice, _Slot] | None = None
        for number, (place, _) in enumerate(self._pieces):
            step = rendezvous.meet_alike(self._label)
            if before is not None:
                _read(*before, buffer, unpack)
            slot.combine()
            if self._node.across is not None and slot.result.size:
                self._node.across(slot.result, self._op)
            before = (place, slot)
            if number < last:
                slot = self._pack(number + 1, buffer, pack)
        rendezvous.meet(REDUCED, step)
        _read(place, slot, buffer, unpack)

    def _pack(self, number: int, buffer: np.ndarray, pack: Part | None) -> _Slot:
        """Writes a piece to shared memory; returns where."""
        place, slots = self._pieces[number]
        slot = slots[(self._node.rendezvous.step + 1) % SLOTS]
        if pack is None:
            copy_bytes(buffer[place].view(np.uint8), slot.bytes)
        else:
            pack(slot.mine, place.start)
        return slot


def _read(place: slice, slot: _Slot, buffer: np.ndarray, unpack: Part | None) -> None:
    """Reads a piece, once all ranks have combined their slices."""
    part = buffer[place].view(np.uint8)
    for where, result in slot.results:
        copy_bytes(result, part[where])
    if unpack is not None:
        unpack(buffer[place], place.start)


def slices(length: int, ranks: int, itemsize: int) -> list[slice]:
    """Returns each rank's slice, cut where a cache line ends.

    Example:
        >>> slices(40, 2, 4)
        [slice(0, 16, None), slice(16, 40, None)]
    """
    line = max(1, _LINE // itemsize)
    cuts = [length * rank // ranks // line * line for rank in range(ranks)]
    cuts.append(length)
    return [slice(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]


def combiner(parts: Sequence[np.ndarray], rank: int, op: Op) -> Callable[[], None]:
    """Returns a function that combines arrays of all ranks, in cache-sized pieces.

    Args:
        parts: each rank's array, by rank. Those narrower than float32 are combined
            in float32 and rounded once.
        rank: whose array takes the result.
        op: the operation.
    """
    ufunc, first = UFUNCS[op], parts[0]
    narrow = first.dtype.itemsize < 4 and first.dtype.kind in "fV"
    step = max(1, min(_PIECE // first.dtype.itemsize, first.size))
    pieces = [
        [part[i : i + step] for part in parts] for i in range(0, first.size, step)
    ]
    scratch = np.empty(
        step if narrow or len(parts) > 2 else 0, np.float32 if narrow else first.dtype
    )
    other = np.empty(step if narrow else 0, np.float32)

    def combine_narrow(piece: list[np.ndarray], into: np.ndarray) -> None:
        sums, term = scratch[: into.size], other[: into.size]
        sums[...] = piece[0]
        for part in piece[1:]:
            term[...] = part
            ufunc(sums, term, out=sums)
        into[...] = sums

    def combine_wide(piece: list[np.ndarray], into: np.ndarray) -> None:
        # Elsewhere first: this rank's own terms may not have had their turn.
        sums, *terms = piece
        if not terms:
            return  # a rank alone: its array is the result
        for part in terms[:-1]:
            out = scratch[: into.size]
            ufunc(sums, part, out=out)
            sums = out
        ufunc(sums, terms[-1], out=into)

    combine_piece = combine_narrow if narrow else combine_wide

    def combine() -> None:
        for piece in pieces:
            combine_piece(piece, piece[rank])

    return combine
