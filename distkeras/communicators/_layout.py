"""Which ranks sit on one node: what MPI says, and what the system says.

Under a launcher that does not tell it where ranks are (Slurm's srun by a PMIx that is
not Open MPI's own), MPI takes every rank for alone on its node. Each would then use the
first GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_SHARED = Path("/dev/shm")


class Layout(NamedTuple):
    """Where the ranks of a communicator sit; the same for all its duplicates.

    Attributes:
        local_rank: number among the ranks of this node.
        local_size: how many they are.
        hosts: the host name of every rank, by rank.
        node: the first rank of this node.
        known_to_mpi: whether MPI takes the ranks of this node for such.
    """

    local_rank: int
    local_size: int
    hosts: tuple[str, ...]
    node: int
    known_to_mpi: bool


class Place(NamedTuple):
    """Where a rank is.

    Attributes:
        leader: the first rank of those that MPI takes for its node's.
        host: its name.
        system: what is the same in processes that see the same shared memory; None
            where that cannot be told.
    """

    leader: int
    host: str
    system: tuple[str, int, int] | None


def find_layout(
    rank: int, leader: int, host: str, allgather: Callable[[Place], Sequence[Place]]
) -> Layout:
    """Returns where the ranks sit; collective.

    Args:
        rank: of this process.
        leader: the first rank of those that MPI takes for this node's.
        host: this machine's name.
        allgather: returns every rank's place, by rank.
    """
    places = list(allgather(Place(leader, host, _system())))
    by_mpi = [place.leader for place in places]
    nodes = _nodes(places)
    mine = [r for r, node in enumerate(nodes) if node == nodes[rank]]
    return Layout(
        mine.index(rank),
        len(mine),
        tuple(place.host for place in places),
        nodes[rank],
        nodes == by_mpi,
    )


def _nodes(places: Sequence[Place]) -> list[int]:
    """Returns the first rank of each rank's node, by rank.

    The system's word joins what MPI has put apart, and never puts apart what MPI has
    joined: that knows of containers in which one node has two names.
    """
    by_mpi = [place.leader for place in places]
    first: dict[object, int] = {}
    by_system = [
        first.setdefault((place.host, place.system) if place.system else rank, rank)
        for rank, place in enumerate(places)
    ]
    # All ranks that MPI joins are joined by the system too.
    agrees = all(by_system[r] == by_system[leader] for r, leader in enumerate(by_mpi))
    return by_system if agrees else by_mpi


def _system() -> tuple[str, int, int] | None:
    """Returns this boot of this machine, and the folder of shared memory."""
    try:
        folder = os.stat(_SHARED)
        return _BOOT.read_text().strip(), folder.st_dev, folder.st_ino
    except OSError:
        return None
