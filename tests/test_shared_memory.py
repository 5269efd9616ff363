"""What the shared-memory communicator leaves behind, and how a rank's end is met."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from mpi_runtimes import Runtime
from mpi_runtimes import launch
from mpi_runtimes import mpich
from mpi_runtimes import open_mpi

from distkeras._errors import CommunicatorError
from distkeras.communicators import Communicator
from distkeras.communicators import SharedMemoryCommunicator
from distkeras.communicators import _rendezvous
from distkeras.communicators._arithmetic import UFUNCS
from distkeras.communicators._arithmetic import place_matters
from distkeras.communicators._arithmetic import quiet
from distkeras.communicators._futex import Futex
from distkeras.communicators._futex import find_futex
from distkeras.communicators._rendezvous import ADDED
from distkeras.communicators._rendezvous import ARRIVED
from distkeras.communicators._rendezvous import HEADER_BYTES
from distkeras.communicators._rendezvous import READ
from distkeras.communicators._rendezvous import Process
from distkeras.communicators._rendezvous import Rendezvous
from distkeras.communicators._shared_chain import Chain
from distkeras.communicators._shared_reduction import Direct
from distkeras.communicators._steps import BARRIER
from distkeras.communicators._steps import make_label
from distkeras.communicators._waiting import Call
from distkeras.communicators._waiting import Calls
from distkeras.communicators._waiting import open_calls

KILLED = """\
import os, signal
import numpy as np
from distkeras.communicators import SharedMemoryCommunicator
communicator = SharedMemoryCommunicator()
buffers = [np.ones(1 << 10, "float32"), np.ones(1 << 20, "float32")]
for buffer in buffers:
    communicator.allreduce(buffer)
communicator.barrier()
if communicator.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
for buffer in buffers:
    communicator.allreduce(buffer)
print("not reached")
"""

# What MPICH itself leaves of every job that is killed, with or without windows.
MPICHS_OWN = 1


def left_in_shared_memory() -> set[str]:
    """Names the files in shared memory that an MPI made."""
    return {path.name for path in Path("/dev/shm").glob("*")}


@pytest.mark.launches
@pytest.mark.parametrize("runtime", (open_mpi, mpich))
def test_nothing_is_left_when_a_rank_is_killed(
    tmp_path: Path, runtime: Callable[[], Runtime]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    before = left_in_shared_memory()
    result = launch(runtime(), 2, [str(script)], timeout=60)
    assert result.code != 0 and "not reached" not in result.output, result.tail
    # Files of other jobs come and go: those of windows have names of their own.
    left = left_in_shared_memory() - before
    assert not {name for name in left if "osc" in name or "win" in name}
    if runtime is mpich:
        assert len([n for n in left if n.startswith("mpich")]) <= MPICHS_OWN


def meeting(other: Process) -> tuple[Rendezvous, memoryview]:
    """Returns rank 0's side of a meeting with one other, and the other's words."""
    headers = [memoryview(bytearray(HEADER_BYTES)) for _ in range(2)]
    calls = Calls([0, 99])  # unlike any other's
    made = Rendezvous(0, headers, [Process.this(), other], lambda: None, calls)
    calls.close()
    return made, headers[1].cast("q")


def dead_child() -> int:
    """Returns the number of a process that has ended."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return child


def test_another_ranks_death_is_noticed() -> None:
    """Not by MPI or the launcher, which may take their time."""
    gone = dataclasses.replace(Process.this(), pid=dead_child())
    rendezvous, _ = meeting(gone)
    start = time.monotonic()
    with pytest.raises(CommunicatorError, match=f"Rank 1 .process {gone.pid}. has"):
        rendezvous.meet_alike(BARRIER)
    assert time.monotonic() - start < 2
    assert rendezvous.broken is not None
    rendezvous.release()


def test_deaths_in_other_containers_are_not_guessed() -> None:
    """There the same number may be another process, or none."""
    elsewhere = dataclasses.replace(
        Process.this(), pid=dead_child(), namespace="pid:[1]"
    )
    rendezvous, words = meeting(elsewhere)
    late = threading.Timer(0.5, lambda: words.__setitem__(ARRIVED, 1))
    late.start()
    assert rendezvous.meet_alike(BARRIER) == 1
    late.join()
    rendezvous.release()


def sleepers(
    monkeypatch: pytest.MonkeyPatch, futex: str, size: int
) -> list[Rendezvous]:
    """Returns all ranks' sides of a meeting, which sleep until they are woken."""
    if futex == "refused":
        monkeypatch.setattr(Futex, "wait", lambda *_: False)
    if futex == "missing":
        monkeypatch.setattr(_rendezvous, "find_futex", lambda words: None)
    elif find_futex(memoryview(bytearray(8)).cast("q")) is None:
        pytest.skip("the system has no futex")
    monkeypatch.setattr(_rendezvous, "_LONGEST_FUTEX", 1e3)
    headers = [memoryview(bytearray(HEADER_BYTES)) for _ in range(size)]
    calls = Calls([0, 100 - size])
    ranks = [
        Rendezvous(rank, headers, [Process.this()] * size, lambda: None, calls)
        for rank in range(size)
    ]
    calls.close()
    return ranks


@pytest.mark.parametrize("futex", ("there", "refused", "missing"))
def test_sleepers_go_on(monkeypatch: pytest.MonkeyPatch, futex: str) -> None:
    """Woken, not by the end of a nap; or, where nobody can be woken, by that."""
    pair = sleepers(monkeypatch, futex, 2)
    for rank, late in ((0, 1), (1, 0), (0, 1)):
        waiting = threading.Thread(target=pair[rank].meet_alike, args=[BARRIER])
        waiting.start()
        time.sleep(0.2)
        assert waiting.is_alive()
        pair[late].meet_alike(BARRIER)
        waiting.join(20)
        assert not waiting.is_alive()
    for rendezvous in pair:
        rendezvous.release()


@pytest.mark.parametrize("futex", ("there", "missing"))
def test_sleepers_are_woken_by_whom_they_wait_for(
    monkeypatch: pytest.MonkeyPatch, futex: str
) -> None:
    """Not by others, nor by what they do not wait for."""
    ranks = sleepers(monkeypatch, futex, 3)
    for number in (5, 9):
        waiting = threading.Thread(target=ranks[2].await_rank, args=[1, ADDED, number])
        waiting.start()
        time.sleep(0.2)
        ranks[0].announce(ADDED, number)
        ranks[1].announce(READ, number)
        ranks[1].announce(ADDED, number - 1)
        waiting.join(0.2)
        assert waiting.is_alive()
        ranks[1].announce(ADDED, number)
        waiting.join(20)
        assert not waiting.is_alive()
    waiting = threading.Thread(target=ranks[0].await_all, args=[READ, 12])
    waiting.start()
    for rank in (2, 1):
        time.sleep(0.2)
        assert waiting.is_alive()
        ranks[rank].announce(READ, 12)
    waiting.join(20)
    assert not waiting.is_alive()
    for rendezvous in ranks:
        rendezvous.release()


def test_deaths_of_those_that_others_wait_for_are_noticed() -> None:
    """Rank 0 waits for rank 1, which would wait for rank 2, which is dead."""
    headers = [memoryview(bytearray(HEADER_BYTES)) for _ in range(3)]
    gone = dataclasses.replace(Process.this(), pid=dead_child())
    calls = Calls([0, 96])
    here = Process.this()
    rendezvous = Rendezvous(0, headers, [here, here, gone], lambda: None, calls)
    calls.close()
    start = time.monotonic()
    with pytest.raises(CommunicatorError, match=f"Rank 2 .process {gone.pid}. has"):
        rendezvous.await_rank(1, ADDED, 1)
    assert time.monotonic() - start < 2
    rendezvous.release()


@pytest.mark.parametrize("in_turn", (None, True, False))
def test_who_adds_in_turn(world: Communicator, in_turn: bool | None) -> None:
    """More than two ranks; by themselves with two for a core, and much to do."""
    if world.size == 1:
        pytest.skip("one rank shares no memory")
    communicator = SharedMemoryCommunicator(in_turn=in_turn)
    chunk = communicator._chunk_bytes
    communicator.allreduce(np.ones(1, "float32"))
    node = communicator._node
    assert node is not None
    sizes = (chunk // 2, chunk, node.rendezvous.cores * chunk + 4)
    found = []
    for size in sizes:
        buffer = np.ones(size // 4, "float32")
        communicator.allreduce(buffer)
        assert (buffer == world.size).all()
        found.append(isinstance(communicator._find(buffer, "sum"), Chain))
    if in_turn is None:
        crowded = world.size > 2 and world.size >= 2 * node.rendezvous.cores
        assert found == [False, False, crowded]
    else:
        wanted = in_turn and world.size > 2
        assert found == [False, wanted, wanted]
    communicator.close()


@pytest.mark.parametrize("direct_bytes", (None, 1 << 12))
def test_who_combines_all_by_itself(
    world: Communicator, direct_bytes: int | None
) -> None:
    """Two ranks; more where buffers are small, or where cores are shared and not large.

    As the option says, or up to 16 KiB, or up to 1 MiB of all ranks together.
    """
    if world.size == 1:
        pytest.skip("one rank shares no memory")
    communicator = SharedMemoryCommunicator(direct_bytes=direct_bytes, in_turn=False)
    communicator.allreduce(np.ones(1, "float32"))
    node = communicator._node
    assert node is not None
    crowded = 3 * node.rendezvous.cores <= 2 * world.size
    most = direct_bytes or ((1 << 20) // world.size if crowded else 1 << 14)
    for size in (most - most % 4, most - most % 4 + 4):
        buffer = np.full(size // 4, world.rank + 1, "float32")
        communicator.allreduce(buffer)
        assert (buffer == world.size * (world.size + 1) / 2).all()
        wanted = world.size == 2 or size <= most
        assert isinstance(communicator._find(buffer, "sum"), Direct) == wanted
    communicator.close()


def test_a_futex_looks_before_it_sleeps() -> None:
    words = memoryview(bytearray(64)).cast("q")
    futex = find_futex(words)
    if futex is None:
        pytest.skip("the system has no futex")
    words[3] = 1 << 32 | 7
    futex.wait(3, 1 << 32 | 6, 1e3)  # returns at once, as something else is there
    start = time.monotonic()
    futex.wait(3, 1 << 32 | 7, 0.05)
    assert 0.04 < time.monotonic() - start < 10
    futex.wake(3)  # nobody sleeps
    assert futex.wait(3, 0, 1)
    futex._start = 0
    assert not futex.wait(3, 0, 1)  # nothing is there
    words.release()  # nothing holds the memory


def test_long_waits_are_told_to_the_watchdog() -> None:
    rendezvous, words = meeting(Process.this())
    seen: list[Call | None] = []

    def look() -> None:
        deadline = time.monotonic() + 10
        while not seen and time.monotonic() < deadline:
            seen.extend(c.current for c in open_calls() if c.members == (0, 99))
            if seen == [None]:
                seen.clear()
            time.sleep(0.01)
        words[ARRIVED + 32 + 1] = label  # rank 1 does the same
        words[ARRIVED] = 1

    label = make_label(np.ones(1000, "float32"), "max")
    thread = threading.Thread(target=look)
    thread.start()
    rendezvous.meet_alike(label)
    thread.join()
    (call,) = seen
    assert call is not None and call.key == ("allreduce", "max", 4000)
    assert call.number == 1
    (steps,) = [c for c in open_calls() if c.members == (0, 99)]
    found = steps.find(1)
    assert found is not None and found.key == call.key
    rendezvous.release()
    assert steps.find(1) is None  # it may be asked for just then


def test_this_process_lives() -> None:
    process = Process.this()
    assert process.pid == os.getpid() and process.cores and process.alive()
    assert not Process(dead_child(), 0, "", frozenset()).alive()
    later = dataclasses.replace(process, started=process.started + 1)
    assert not later.alive()  # another process that was given the number


@pytest.mark.parametrize("op", UFUNCS)
def test_bits_do_not_depend_on_addresses(op: str) -> None:
    """Else the slower way is taken: to be known, as it costs time."""
    for dtype in ("float32", "float64"):
        assert not place_matters(UFUNCS[op], np.dtype(dtype))  # type: ignore[index]


def test_no_warnings_of_numbers() -> None:
    huge = np.full(4, 3e38, "float32")
    run = quiet()
    assert np.isinf(run(np.add, huge, huge)).all()
    with pytest.warns(RuntimeWarning, match="overflow"):
        np.add(huge, huge)


def test_memory_is_given_back(world: Communicator) -> None:
    """Many communicators in turn, each with windows of its own."""
    if world.size == 1:
        pytest.skip("one rank shares no memory")

    def windows() -> int:
        maps = Path("/proc/self/maps").read_text().splitlines()
        return sum("osc" in line or "(deleted)" in line for line in maps)

    before = windows()
    for _ in range(20):
        communicator = SharedMemoryCommunicator()
        communicator.allreduce(np.ones(1 << 20, "float32"))
        communicator.close()
    assert world.allgather_object(windows() - before < 20) == [True] * world.size
