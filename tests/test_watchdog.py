"""What ranks know of their waits, and what the watchdog makes of it."""

from __future__ import annotations

import os
import pickle
import subprocess
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from mpi_runtimes import launch
from mpi_runtimes import mpich
from mpi_runtimes import open_mpi

import distkeras
from distkeras._errors import CommunicatorError
from distkeras._exit import LEFT
from distkeras._exit import OUT_OF_STEP
from distkeras._exit import STALLED
from distkeras.communicators import Communicator
from distkeras.communicators import MPICommunicator
from distkeras.communicators import _mail
from distkeras.communicators import _processes
from distkeras.communicators import _stacks
from distkeras.communicators import _stall
from distkeras.communicators import _waiting
from distkeras.communicators._stall import State
from distkeras.communicators._stall import Wait
from distkeras.communicators._timeout import read_timeout
from distkeras.communicators._waiting import Call
from distkeras.communicators._waiting import Calls

# The records


@pytest.fixture
def calls() -> Calls:
    made = Calls([0, 1])
    yield made
    made.close()


def test_a_call_is_known_while_it_lasts(calls: Calls) -> None:
    assert (calls.entered, calls.current) == (0, None)
    with calls("allreduce", 64, "sum"):
        current = calls.current
        assert current is not None
        assert current[:4] == (1, "allreduce", 64, "sum")
        assert current.thread == threading.get_ident()
        assert time.monotonic() - current.since < 10
    assert (calls.entered, calls.current) == (1, None)
    with pytest.raises(ValueError, match="inside"), calls("barrier"):
        raise ValueError("inside")
    assert (calls.entered, calls.current) == (2, None)
    assert calls.find(1) == current and calls.find(3) is None
    for _ in range(100):
        with calls("barrier"):
            pass
    assert calls.find(1) is None and calls.entered == 102


def test_what_must_be_equal() -> None:
    def key(*words: object) -> tuple[object, ...]:
        return Call(1, *words, 0.0, 0).key  # type: ignore[arg-type]

    assert key("allreduce", 8, "sum") != key("allreduce", 16, "sum")
    assert key("allreduce", 8, "sum") != key("allreduce", 8, "max")
    assert key("allgather", 8, None) == key("allgather", 16, None)


def test_names_depend_on_the_members_and_their_order() -> None:
    made = [Calls([0, 2]), Calls([0, 1]), Calls([0, 2])]
    made += [Calls([0, 2], made[0]), Calls([0, 2], made[0]), Calls([2], made[0])]
    names = [m.name for m in made]
    assert len(set(names)) == len(names)
    assert names[3:5] == [f"{names[0]}.1", f"{names[0]}.2"]
    assert names[5] == f"{names[0]}.1(2)"
    with made[0]("barrier"):
        pass
    for m in made:
        m.close()
    assert _waiting.entered()[names[0]] == 1
    assert _waiting.find_calls(names[0]) is None


def test_a_record_costs_little(calls: Calls) -> None:
    def record() -> None:
        with calls("allreduce", 4096, "sum"):
            pass

    best = min(_seconds(record, 2000) for _ in range(20))
    assert best < 10e-6, best  # 1.2 microseconds on a quiet machine


def _seconds(function: object, times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        function()  # type: ignore[operator]
    return (time.perf_counter() - start) / times


def test_ranks_agree_on_names_and_numbers(world: Communicator) -> None:
    if world.size == 1:
        pytest.skip("one rank agrees with itself")
    first = MPICommunicator()
    second = first.duplicate()
    buffer = np.ones(3, "float32")
    second.allreduce(buffer)
    second.allreduce(buffer, "max")
    second.broadcast_object("x")
    mine = (second.calls.name, second.calls.entered, first.calls.name)
    last = second.calls.recent[-1]
    assert (last.verb, last.detail) == ("broadcast_object", 0)
    assert len(set(world.allgather_object(mine))) == 1
    assert second.calls.members == tuple(range(world.size))
    second.close()
    first.close()


# Where a process stands


def test_where_names_the_users_line() -> None:
    assert _stacks.where().startswith(f"{__file__}:")
    assert _stacks.where().endswith("in test_where_names_the_users_line")
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(_stacks.stack()))
    thread.start()
    time.sleep(0.2)
    thread.join()
    lines = found[0].splitlines()
    assert "calls inside of libraries" in lines[0]  # pytest's
    place = next(i for i, line in enumerate(lines) if __file__ in line)
    assert lines[place].endswith("in test_where_names_the_users_line")
    assert lines[place + 1].startswith("  ")  # the source


def test_a_thread_in_a_library_is_placed_by_the_main_thread() -> None:
    event, ready = threading.Event(), threading.Event()

    def wait() -> None:
        ready.set()
        event.wait()

    thread = threading.Thread(target=event.wait)
    own = threading.Thread(target=wait)
    for started in (thread, own):
        started.start()
    ready.wait()
    assert _stacks.where(thread.ident).endswith("placed_by_the_main_thread")
    assert _stacks.where(own.ident).endswith("<locals>.wait")
    event.set()
    for started in (thread, own):
        started.join()


@pytest.mark.launches
def test_states_of_processes() -> None:
    mine = _processes.this_process()
    assert str(mine).endswith(f", process {os.getpid()}")
    child = subprocess.Popen(["sleep", "60"])
    theirs = _processes.Process(mine.host, child.pid, mine.machine)
    assert _processes.status(theirs, mine) == "alive"
    child.send_signal(19)
    deadline = time.monotonic() + 10
    while _processes.status(theirs, mine) != "stopped":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    child.kill()
    child.wait()
    assert _processes.status(theirs, mine) == "gone"
    elsewhere = _processes.Process("other", child.pid, "another machine")
    assert _processes.status(elsewhere, mine) is None


# What follows from the answers


def wait_in(
    name: str, number: int, verb: str = "allreduce", size: int = 8, **options: object
) -> Wait:
    """A wait of three ranks."""
    given = {"age": 6.0, "driver": "main", "where": "train.py:3, in main", **options}
    call = Call(number, verb, size, None, 0.0, 0)
    return Wait(name, (0, 1, 2), call, **given)  # type: ignore[arg-type]


def state(rank: int, *waits: Wait, **options: object) -> State:
    """A rank that waits, or does something else."""
    given: dict[str, object] = {
        "left": False,
        "entered": {w.name: w.call.number for w in waits},
        "asked": None,
        "busy": 1.0,
        "where": f"train.py:{rank}, in work",
        "stack": "",
        **options,
    }
    return State(rank=rank, waits=waits, **given)  # type: ignore[arg-type]


def judge(*states: State, before: tuple[State, ...] = ()) -> _stall.Verdict | None:
    """What rank 0 concludes from its own state and the others'."""
    known = {s.rank: s for s in states}
    earlier = {s.rank: s for s in before}
    return _stall.judge(0, states[0].waits[0], known, earlier, 2.0 if before else 0.0)


def test_a_late_rank_may_come() -> None:
    wait = wait_in("1", 5)
    assert judge(state(0, wait), state(1, wait)) is None
    late = state(2, entered={"1": 4})
    assert judge(state(0, wait), state(1, wait), late) is None
    assert _stall.late_ranks(wait, {2: late}) == [2]
    # One that waits for another in a communicator of which rank 0 is no member.
    other = Wait("7", (1, 2), Call(1, "barrier", 0, None, 0.0, 0), 6.0, "main", "")
    assert judge(state(0, wait), state(2, other, entered={"1": 4, "7": 1})) is None


def test_different_calls_of_one_number() -> None:
    wait = wait_in("1", 5)
    theirs = wait_in("1", 5, "broadcast", where="train.py:9, in callback")
    same = state(1, wait, asked=wait.call)
    ranks = state(0, wait), same, state(2, theirs, asked=theirs.call)
    verdict = judge(*ranks)
    assert verdict is not None and not verdict.certain
    verdict = judge(*ranks, before=ranks)
    assert verdict is not None and verdict.certain
    assert verdict.code == OUT_OF_STEP
    assert "ranks 0, 1 in allreduce (call 5" in verdict.summary
    assert "rank 2 in broadcast (call 5" in verdict.summary
    assert "at train.py:9, in callback" in verdict.summary
    # The root of a broadcast has gone on.
    ahead = state(2, entered={"1": 9}, asked=theirs.call)
    assert judge(state(0, wait), ahead) is not None
    assert judge(state(0, wait), state(2, entered={"1": 9}, asked=wait.call)) is None


def test_a_rank_that_left() -> None:
    wait = wait_in("1", 5)
    verdict = judge(state(0, wait), state(1, left=True, entered={"1": 4}, where=""))
    assert verdict is not None and verdict.code == LEFT
    assert verdict.summary.startswith("rank 1 has ended the script")
    assert "rank 0 waits in allreduce" in verdict.summary
    assert judge(state(0, wait), state(1, left=True, entered={"1": 5})) is None


def test_the_rank_that_left_finds_it_too() -> None:
    end = wait_in(_stall.END, 1, "end", 0)
    mine = state(0, end, left=True, entered={_stall.END: 1, "1": 4})
    verdict = judge(mine, state(1, wait_in("1", 5)))
    assert verdict is not None and verdict.code == LEFT
    assert "rank 0 has ended" in verdict.summary
    assert judge(mine, state(1, entered={"1": 4})) is None  # it has work to do yet


def test_ranks_that_wait_for_each_other_are_looked_at_twice() -> None:
    first, second = wait_in("1", 5), wait_in("2", 3, driver="framework")
    ranks = state(0, first), state(1, second), state(2, second)
    verdict = judge(*ranks)
    assert verdict is not None and not verdict.certain
    verdict = judge(*ranks, before=ranks)
    assert verdict is not None and verdict.certain and verdict.code == OUT_OF_STEP
    assert "rank 0 in allreduce (call 5 on communicator 1" in verdict.summary
    assert "ranks 1, 2 in allreduce (call 3 on communicator 2" in verdict.summary
    # A rank that computes meanwhile may be on its way to the other collective.
    busy = state(0, first, busy=2.0), *ranks[1:]
    verdict = judge(*busy, before=ranks)
    assert verdict is not None and not verdict.certain


@pytest.mark.parametrize(
    "drivers", [("framework", "framework"), ("main", "other"), ("other", "other")]
)
def test_threads_may_wait_crosswise(drivers: tuple[str, str]) -> None:
    """Two parts of a step's graph use two communicators, in any order."""
    first = wait_in("1", 5, driver=drivers[0])
    second = wait_in("2", 3, driver=drivers[1])
    ranks = state(0, first), state(1, second)
    assert judge(*ranks, before=ranks) is None


def test_report_names_ranks_that_tell_the_same_together() -> None:
    wait = wait_in("1", 5)
    states = {r: state(r, wait, stack='File "a.py"') for r in (0, 2)}
    states[1] = state(1, entered={"1": 4}, stack='File "late.py"')
    wait = Wait("1", (0, 1, 2, 3), wait.call, 600.0, "main", wait.where)
    silent = {3: "does not answer"}
    verdict = _stall.stalled(wait, states, silent, 600.0)
    assert verdict.code == STALLED
    places = {r: f"host, process {r}" for r in range(4)}
    text = _stall.report(verdict, wait, states, silent, places, ending=True)
    lines = text.splitlines()
    assert all(line.startswith("[distkeras] ") for line in lines)
    assert "ranks 0, 2: in allreduce (call 5 on communicator 1" in lines[1]
    assert lines[2].endswith('File "a.py"')
    assert "rank 1 (host, process 1): late for allreduce" in lines[3]
    assert "rank 3 (host, process 3): does not answer" in lines[5]
    assert "600 s in allreduce" in lines[-3]
    assert "rank 1 is late, it is at train.py:1, in work" in lines[-3]
    assert lines[-1].endswith("exit code 124.")


def test_messages_stay_small() -> None:
    """Small enough that no MPI waits for the receiver, who may be stopped."""
    lines = [f'File "/a/path/{os.urandom(9).hex()}.py", line {n}' for n in range(500)]
    data = _mail.pack(("tell", state(0, stack="\n".join(lines)), "1", 5))
    assert len(data) <= 3500
    kind, got, *question = pickle.loads(zlib.decompress(data))
    assert kind == "tell" and got.stack.splitlines()[-1] == lines[-1]
    assert question == ["1", 5]


# The option


def test_timeout_of_the_argument_and_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("DISTKERAS_TIMEOUT", raising=False)
    assert read_timeout(None) == 600
    monkeypatch.setenv("DISTKERAS_TIMEOUT", "1.5")
    assert read_timeout(None) == 1.5
    assert read_timeout(0) == 0
    monkeypatch.setenv("DISTKERAS_TIMEOUT", "10m")
    with pytest.raises(CommunicatorError, match="Expected DISTKERAS_TIMEOUT.*'10m'"):
        read_timeout(None)
    for wrong in (-1, float("nan"), float("inf")):
        with pytest.raises(CommunicatorError, match="Expected timeout to be"):
            distkeras.init(timeout=wrong)


# Jobs that nothing is wrong with

FINE = """
import atexit, multiprocessing, os, sys, threading, time
import numpy as np
import distkeras
from distkeras import communicators

def watched():
    return [t for t in threading.enumerate() if t.name == "distkeras-watchdog"]

def child(queue):
    queue.put(len(watched()))

world = distkeras.init(timeout=600)
rank = world.rank
assert len(watched()) == 1
# A worker of a data set, forked.
context = multiprocessing.get_context("fork")
queue = context.Queue()
worker = context.Process(target=child, args=(queue,))
worker.start()
assert queue.get() == 0
worker.join()
assert worker.exitcode == 0
# A forked child's exit is none of the rank's.
if os.fork() == 0:
    atexit._run_exitfuncs()
    os._exit(0)
assert os.wait()[1] == 0
communicators.shutdown()
assert not watched()
world = distkeras.init(timeout=3)
assert len(watched()) == 1
# Late, but within the timeout; others ask meanwhile.
if rank == 1:
    time.sleep(2)
world.barrier()
if END == "finalize":
    from mpi4py import MPI
    MPI.Finalize()
    assert not watched()
elif rank == 1:
    # It has work to do alone, for longer than the timeout.
    end = time.monotonic() + 5
    while time.monotonic() < end:
        sum(range(10000))
print("done", rank, flush=True)
"""


@pytest.mark.launches
@pytest.mark.parametrize(
    ("end", "runtime"), [("works on", open_mpi), ("finalize", mpich)]
)
def test_jobs_without_a_fault_are_left_alone(
    tmp_path: Path, end: str, runtime: object
) -> None:
    script = tmp_path / "fine.py"
    script.write_text(FINE.replace("END", repr(end), 1))
    result = launch(runtime(), 2, [str(script)], timeout=90)  # type: ignore[operator]
    assert result.code == 0, result.tail
    assert result.output.count("done") == 2
    assert "[distkeras]" not in result.output, result.tail


@pytest.mark.launches
@pytest.mark.soak
def test_an_interactive_session_gets_reports_only(tmp_path: Path) -> None:
    script = tmp_path / "session.py"
    script.write_text(
        "import builtins, time\n"
        "builtins.get_ipython = lambda: None  # what IPython's kernel puts there\n"
        "import distkeras\n"
        "world = distkeras.init(timeout=1.5)\n"
        "if world.rank == 1:\n"
        "    time.sleep(7)\n"
        "world.barrier()\n"
        "print('reached')\n"
    )
    result = launch(open_mpi(), 2, [str(script)], timeout=60)
    assert result.code == 0, result.tail
    assert result.output.count("reached") == 2
    assert result.output.count("rank 1 is late") == 1, result.tail
    assert "are ended" not in result.output


@pytest.mark.parametrize("alone", ["broadcast_object", "allgather"])
def test_a_call_of_one_rank_alone_is_an_error_of_all(
    world: Communicator, alone: str
) -> None:
    """Where MPI alone would hand one call's bytes to the other."""
    if world.size == 1:
        pytest.skip("one rank makes the same calls as itself")
    communicator = MPICommunicator()
    with pytest.raises(CommunicatorError, match="same calls in the same order") as info:
        if alone == "allgather" and world.rank == 0:
            communicator.allgather(np.ones(2))
        elif alone == "allgather":
            communicator.allgather_object("x")
        else:
            if world.rank == 0:  # the root waits for nobody
                communicator.broadcast_object("mine")
            communicator.allgather_object("x")
    if alone == "allgather":
        others = "ranks" if world.size > 2 else "rank"
        assert "rank 0 in allgather (call " in str(info.value)
        assert f"{others} 1" in str(info.value)
        assert str(info.value).count("test_watchdog.py:") == 2  # where each stands
    assert len(set(world.allgather_object(str(info.value)))) == 1
    communicator.mpi_comm.Free()
    communicator.calls.close()


@pytest.mark.launches
@pytest.mark.soak
def test_ranks_behind_wrappers_may_start_late(tmp_path: Path) -> None:
    """Each rank has a parent of its own then, and seems to be alone."""
    script = tmp_path / "late.py"
    script.write_text(
        "import os, subprocess, sys, time\n"
        "if len(sys.argv) == 1:\n"
        "    sys.exit(subprocess.call([sys.executable, __file__, 'inner']))\n"
        "if os.environ['OMPI_COMM_WORLD_RANK'] == '1':\n"
        "    time.sleep(7)\n"
        "import distkeras\n"
        "distkeras.init()\n"
        "print('started')\n"
    )
    result = launch(open_mpi(), 2, [str(script)], timeout=60)
    assert result.code == 0, result.tail
    assert result.output.count("started") == 2
    assert "[distkeras]" not in result.output, result.tail


UNWRITABLE = """\
import os, sys
import distkeras

full = os.open("/dev/full", os.O_WRONLY)
os.dup2(full, 1)
os.dup2(full, 2)
rank = distkeras.rank()
if rank == 1:
    LEAVE
distkeras.barrier()
"""


@pytest.mark.launches
@pytest.mark.parametrize(
    ("leave", "code"),
    [("raise OSError('the disk is full')", 1), ("sys.exit(7)", 7)],
    ids=["exception", "sys.exit"],
)
def test_a_full_disk_ends_the_job(tmp_path: Path, leave: str, code: int) -> None:
    """Where no word of it can be written."""
    script = tmp_path / "script.py"
    script.write_text(UNWRITABLE.replace("LEAVE", leave))
    finished = launch(open_mpi(), 2, [str(script)], timeout=30)
    assert finished.code == code, finished.output
