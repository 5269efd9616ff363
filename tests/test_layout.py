"""Which ranks share a node, where MPI and the system are of two minds."""

from __future__ import annotations

import pytest

from distkeras.communicators import Communicator
from distkeras.communicators._layout import Layout
from distkeras.communicators._layout import Place
from distkeras.communicators._layout import find_layout

HERE, THERE = ("boot", 25, 1), ("other boot", 25, 1)


def layouts(*places: Place) -> list[Layout]:
    """Returns what each rank would find."""
    return [
        find_layout(rank, place.leader, place.host, lambda _: places)
        for rank, place in enumerate(places)
    ]


def nodes(*places: Place) -> list[tuple[int, int, int]]:
    return [(x.node, x.local_rank, x.local_size) for x in layouts(*places)]


def test_both_agree() -> None:
    found = layouts(Place(0, "a", HERE), Place(1, "b", THERE), Place(0, "a", HERE))
    assert [x[:4] for x in found] == [
        (0, 2, ("a", "b", "a"), 0),
        (0, 1, ("a", "b", "a"), 1),
        (1, 2, ("a", "b", "a"), 0),
    ]
    assert all(x.known_to_mpi for x in found)


def test_ranks_that_mpi_takes_for_alone() -> None:
    """As under srun with a PMIx that is not Open MPI's own."""
    places = [Place(0, "a", HERE), Place(1, "a", HERE), Place(2, "b", THERE)]
    assert nodes(*places) == [(0, 0, 2), (0, 1, 2), (2, 0, 1)]
    assert not any(x.known_to_mpi for x in layouts(*places))


@pytest.mark.parametrize(
    "other",
    [
        Place(1, "b", HERE),  # hosts made of network namespaces
        Place(1, "a", THERE),  # two machines of one name
        Place(1, "a", ("boot", 26, 1)),  # a container with shared memory of its own
        Place(1, "a", ("boot", 25, 2)),  # the same, a folder of one file system
        Place(1, "a", None),  # nothing to tell by
    ],
)
def test_what_keeps_ranks_apart(other: Place) -> None:
    assert nodes(Place(0, "a", HERE), other) == [(0, 0, 1), (1, 0, 1)]


def test_mpi_knows_of_containers() -> None:
    """It has joined names that the system holds apart: then it is believed."""
    places = [Place(0, "a", HERE), Place(0, "b", HERE), Place(2, "a", HERE)]
    assert nodes(*places) == [(0, 0, 2), (0, 1, 2), (2, 0, 1)]
    assert all(x.known_to_mpi for x in layouts(*places))


def test_ranks_of_this_machine(world: Communicator) -> None:
    if world.size == 1:
        pytest.skip("one rank is alone")
    assert (world.local_rank, world.local_size) == (world.rank, world.size)
