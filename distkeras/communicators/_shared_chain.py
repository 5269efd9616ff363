"""Sums that the ranks of a node add to one after another, where they share cores.

That takes fewer passes over shared memory than sums to which each rank contributes a
copy, and less of the processor's cache, but ranks wait for one another in turn: what
is gained where their cores are busy all the time is lost where each has its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distkeras.communicators._arithmetic import UFUNCS
from distkeras.communicators._arithmetic import copy_bytes
from distkeras.communicators._base import Part
from distkeras.communicators._rendezvous import ADDED
from distkeras.communicators._rendezvous import READ
from distkeras.communicators._shared_reduction import SLOTS
from distkeras.communicators._shared_reduction import Message
from distkeras.communicators._shared_reduction import Node
from distkeras.communicators._shared_reduction import Reduction

# Numbers of links follow from that of the step: ranks agree on it whatever has failed.
_MOST_LINKS = 1 << 24


class Chain(Reduction):
    """Rank after rank adds its elements to those in shared memory; then all read them.

    A buffer goes in links of a slot's length. Rank 0 writes a link, rank 1 adds to it
    when that is done, and so on; the last one's sums are the result. Links take turns
    in the slots of all ranks that belong to the step: one is written to again when
    all ranks have read it. The first ranks may be some links ahead of the last, so
    that one does several before another needs its core.

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
        self._node, self._label = node, message.label
        self._ufunc = UFUNCS[message.op]
        length, dtype = message.length, message.dtype
        step = slots[0][0].size // dtype.itemsize
        self._links = [slice(i, min(i + step, length)) for i in range(0, length, step)]
        self._slots = [
            [part[: step * dtype.itemsize].view(dtype) for part in ranks]
            for ranks in slots
        ]
        # How many links a rank adds to before it reads the first: so many that those
        # behind it have had their turn. Never more than there are places, less one:
        # rank 0 waits for the others to have read one before it writes there again,
        # and must have done so itself.
        self._lag = min(2 * (node.size - 1 - node.rank), node.size - 1)

    def run(
        self, buffer: np.ndarray, pack: Part | None = None, unpack: Part | None = None
    ) -> None:
        """Combines `buffer` over all ranks, in place."""
        self._node.quiet(self._run_links, buffer, pack, unpack)

    def _run_links(
        self, buffer: np.ndarray, pack: Part | None, unpack: Part | None
    ) -> None:
        # From here on all are done with earlier steps: every slot is free. But ranks
        # that are done with this one write to their slot of the next.
        step = self._node.rendezvous.meet_alike(self._label)
        places = self._slots[step % SLOTS]
        own = self._slots[(step + 2) % SLOTS][self._node.rank]
        count, first = len(self._links), step * _MOST_LINKS
        for number in range(count + self._lag):
            if number < count:
                self._add(number, first, places, own, buffer, pack)
            if number >= self._lag:
                self._read(number - self._lag, first, places, buffer, unpack)

    def _add(
        self,
        number: int,
        first: int,
        places: Sequence[np.ndarray],
        own: np.ndarray,
        buffer: np.ndarray,
        pack: Part | None,
    ) -> None:
        """Adds this rank's elements to a link."""
        rank, rendezvous = self._node.rank, self._node.rendezvous
        where = self._links[number]
        length = where.stop - where.start
        sums = places[number % len(places)][:length]
        if rank == 0:
            if number >= len(places):
                rendezvous.await_all(READ, first + number - len(places) + 1)
            if pack is None:
                copy_bytes(buffer[where].view(np.uint8), sums.view(np.uint8))
            else:
                pack(sums, where.start)
        else:
            mine = buffer[where] if pack is None else own[:length]
            if pack is not None:
                pack(mine, where.start)
            rendezvous.await_rank(rank - 1, ADDED, first + number + 1)
            self._ufunc(sums, mine, out=sums)
        rendezvous.announce(ADDED, first + number + 1)

    def _read(
        self,
        number: int,
        first: int,
        places: Sequence[np.ndarray],
        buffer: np.ndarray,
        unpack: Part | None,
    ) -> None:
        """Reads a link that all ranks have added to."""
        node, part = self._node, buffer[self._links[number]]
        if node.rank < node.size - 1:
            node.rendezvous.await_rank(node.size - 1, ADDED, first + number + 1)
        sums = places[number % len(places)][: part.size]
        copy_bytes(sums.view(np.uint8), part.view(np.uint8))
        node.rendezvous.announce(READ, first + number + 1)
        if unpack is not None:
            unpack(part, self._links[number].start)
