"""Jobs that are killed or told to end, at any instant: they go on where they were."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distkeras._exit import PREEMPTED

SCRIPT = Path(__file__).with_name("interrupted.py")
RUN = [sys.executable, "-m", "distkeras", "run"]
EVERY = 5


def start(folder: Path, ranks: int = 2, kind: str = "background") -> subprocess.Popen:
    """Starts the job in a folder that its earlier runs have used."""
    for path in folder.glob("process-*"):
        path.unlink()
    command = [*RUN, "-n", str(ranks), str(SCRIPT), str(folder), kind]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def done(folder: Path) -> list[int]:
    """Returns the steps that have begun so far, in all runs."""
    with contextlib.suppress(FileNotFoundError):
        return [int(line) for line in (folder / "steps").read_text().split()]
    return []


def wait_for_steps(job: subprocess.Popen, folder: Path, more: int) -> bool:
    """Waits until a job has begun some steps; False if it has ended before."""
    goal = len(done(folder)) + more
    while len(done(folder)) < goal:
        if job.poll() is not None:
            return False
        time.sleep(0.002)
    return True


def send(folder: Path, rank: int, number: int) -> None:
    """Sends a signal to one rank."""
    os.kill(int((folder / f"process-{rank}").read_text()), number)


def end(job: subprocess.Popen) -> tuple[int, str]:
    """Waits for a job; returns its exit code and what it wrote."""
    _, text = job.communicate(timeout=100)
    return job.returncode, text


def repeated(folder: Path) -> int:
    """Returns the largest number of steps that a run has done again."""
    steps = done(folder)
    largest = [max(steps[: n + 1]) for n in range(len(steps))]
    return max(m - s for m, s in zip(largest, steps[1:], strict=False)) + 1


@pytest.mark.launches
@pytest.mark.timeout(400)
def test_killed_told_to_end_and_gone_on(tmp_path: Path) -> None:
    """Rank 1 killed at once; SIGTERM to it, to the launcher; and then to the end."""
    job = start(tmp_path)
    assert wait_for_steps(job, tmp_path, 33)
    send(tmp_path, 1, signal.SIGKILL)
    code, _ = end(job)
    assert code not in (0, PREEMPTED)

    job = start(tmp_path)
    assert wait_for_steps(job, tmp_path, 8)
    send(tmp_path, 1, signal.SIGTERM)
    code, text = end(job)
    assert code == PREEMPTED, text
    assert "SIGTERM on rank 1: wrote" in text
    ends = [max(done(tmp_path))]

    job = start(tmp_path)
    assert wait_for_steps(job, tmp_path, 8)
    job.send_signal(signal.SIGTERM)
    code, text = end(job)
    assert code == PREEMPTED, text
    assert "SIGTERM on rank" in text
    ends.append(max(done(tmp_path)))

    job = start(tmp_path)
    code, text = end(job)
    assert code == 0, text
    steps = done(tmp_path)
    for before in ends:
        assert steps[steps.index(before) + 1] == before + 1  # nothing is done twice
    assert repeated(tmp_path) <= EVERY + 1


@pytest.mark.soak
@pytest.mark.launches
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("kind", "bound"), [("foreground", 5), ("background", 6)])
def test_killed_at_thirty_instants(tmp_path: Path, kind: str, bound: int) -> None:
    """`python -m pytest -m soak tests/test_checkpoint_kill.py`: half an hour at most.

    A file that is written in the background counts once it is there, which may be a
    step later.
    """
    instants = random.Random(kind)
    for _ in range(30):
        job = start(tmp_path, kind=kind)
        if wait_for_steps(job, tmp_path, instants.randrange(1, 12)):
            time.sleep(instants.uniform(0, 0.05))
            with contextlib.suppress(ProcessLookupError):
                send(tmp_path, instants.randrange(2), signal.SIGKILL)
        code, text = end(job)
        if code == 0:
            break
        assert "DamagedError" not in text
    else:
        code, text = end(start(tmp_path, kind=kind))
    assert code == 0, text
    assert repeated(tmp_path) <= bound
    assert not list(tmp_path.rglob("*.unfinished"))
