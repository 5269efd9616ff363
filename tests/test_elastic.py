"""Ranks that are lost in an elastic job: the others go on, as if nothing had been.

With the global batch kept, a run that loses ranks does the same steps as one that does
not: its history must be the same, to rounding.

    python -m pytest -m soak tests/test_elastic.py
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import elastic_job
import failures
import numpy as np
import pytest
from elastic_job import EPOCHS
from elastic_job import STEPS

from distkeras._exit import INTERRUPTED
from distkeras._exit import LEFT
from distkeras._exit import OUT_OF_STEP
from distkeras._exit import PREEMPTED
from distkeras._exit import STALLED

pytestmark = [
    pytest.mark.launches,
    pytest.mark.tensorflow,
    pytest.mark.timeout(300),
]

SCRIPT = Path(__file__).with_name("elastic_job.py")
RANKS = 3


@dataclasses.dataclass
class Job:
    """A job that has ended.

    Attributes:
        code: the exit code.
        output: both streams.
        results: of the ranks that were left, by the launcher's numbers.
        steps: the steps that each rank has begun.
        rows: of the CSV file.
    """

    code: int
    output: str
    results: dict[int, dict[str, Any]]
    steps: dict[int, list[int]]
    rows: list[dict[str, str]]

    @property
    def repeated(self) -> int:
        """How many steps some rank has begun again."""
        return max(len(steps) - len(set(steps)) for steps in self.steps.values())

    @property
    def recoveries(self) -> list[float]:
        """Seconds from each loss to the next step."""
        return [float(word) for word in re.findall(r"recovered: ([\d.]+)", self.output)]


def begin(folder: Path, options: dict[str, Any], *more: str) -> subprocess.Popen[str]:
    """Starts a job."""
    command = [sys.executable, "-m", "distkeras", "run", "-n", str(RANKS), *more]
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [*command, str(SCRIPT), str(folder), json.dumps(options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environ,
    )


def finish(process: subprocess.Popen[str], folder: Path) -> Job:
    """Waits for a job and reads what its ranks have left."""
    try:
        output, _ = process.communicate(timeout=250)
    finally:
        process.terminate()
        process.wait()
    results = {
        int(path.stem.partition("-")[2]): json.loads(path.read_text())
        for path in folder.glob("result-*.json")
    }
    steps = {
        int(path.name.partition("-")[2]): [int(w) for w in path.read_text().split()]
        for path in folder.glob("steps-*")
    }
    log = folder / "log.csv"
    lines = log.read_text().splitlines() if log.exists() else []
    rows = list(csv.DictReader(lines))
    return Job(process.returncode, output, results, steps, rows)


def check(job: Job, left: list[int], history: dict[str, list[float]]) -> None:
    """Checks a job that has lost ranks and trained to the end."""
    assert job.code == 0, job.output
    assert sorted(job.results) == left, job.output
    assert len({result["weights"] for result in job.results.values()}) == 1
    for place, rank in enumerate(left):
        result = job.results[rank]
        assert result["rank"] == place
        assert result["epochs"] == list(range(EPOCHS))
        for name in ("rarest", "most"):
            assert result["history"][name] == [1.0] * EPOCHS, name
        for name, values in history.items():
            np.testing.assert_allclose(
                result["history"][name], values, rtol=2e-5, err_msg=name
            )
    assert [int(row["epoch"]) for row in job.rows] == list(range(EPOCHS))


def by_keras() -> dict[str, list[float]]:
    """Returns the history of one process, by Keras alone, in the order of the data."""
    x, y = elastic_job.samples()
    model = elastic_job.build()
    model.compile(**elastic_job.compiled_with(0.01 * RANKS))
    options = {"batch_size": elastic_job.GLOBAL_BATCH, "shuffle": False, "verbose": 0}
    validation = (x[:30], y[:30])
    history = model.fit(x, y, epochs=EPOCHS, validation_data=validation, **options)
    kept = ("loss", "val_loss")
    return {name: history.history[name] for name in kept}


def test_rank_0_is_lost_and_then_another(tmp_path: Path) -> None:
    """In a validation and in a step; one rank is left, and its weights are right."""
    deaths = [[0, "validation", 1, 0], [2, "step", 2, 5]]
    options = {"deaths": deaths, "shuffle": False}
    job = finish(begin(tmp_path, options, "--elastic"), tmp_path)
    check(job, [1], by_keras())
    assert job.results[1]["size"] == 1
    assert "lost rank 0 (as numbered" in job.output
    assert "lost rank 2 (as numbered" in job.output
    assert job.repeated <= 1
    assert len(job.recoveries) == 2
    assert (tmp_path / "model.keras").exists()


@pytest.mark.soak
def test_too_few_are_left_and_the_job_is_started_again(tmp_path: Path) -> None:
    """A checkpoint is written, and the second run goes on from there."""
    deaths = [[1, "step", 1, 3]]
    options = {"deaths": deaths, "shuffle": False, "checkpoint": True}
    words = ["--elastic", "--min-n", "3", "--max-restarts", "1"]
    job = finish(begin(tmp_path, options, *words), tmp_path)
    assert job.code == 0, job.output
    assert f"ended with exit code {PREEMPTED}; starting it again, 1 of 1" in job.output
    assert "2 ranks are left, 3 are needed: wrote" in job.output
    # Not at step 2 of the epoch, where the last one was due.
    assert f"{STEPS + 3} of its" not in job.output
    assert re.search(r"going on from .*: epoch 2, 3 of its steps done", job.output)
    assert {r["size"] for r in job.results.values()} == {3}
    losses = job.results[0]["history"]["loss"]
    np.testing.assert_allclose(losses, by_keras()["loss"][1:], rtol=2e-5)


@pytest.mark.soak
def test_a_signal_that_comes_with_a_loss(tmp_path: Path) -> None:
    """A host is taken away. The signal was forgotten, and the job trained on."""
    deaths = [[1, "step", 1, 3]]
    options = {"deaths": deaths, "preempted": True, "checkpoint": True}
    job = finish(begin(tmp_path, options, "--elastic"), tmp_path)
    assert job.code == PREEMPTED, job.output
    assert "lost rank 1 (as numbered" in job.output
    assert re.search(r"SIGTERM on rank \d: wrote", job.output)
    assert not job.results


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """The history of a job that loses nobody."""
    folder = tmp_path_factory.mktemp("whole")
    job = finish(begin(folder, {}, "--elastic"), folder)
    check(job, list(range(RANKS)), {})
    return job.results[0]["history"]


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "death",
    [
        ["train_begin", 0, 0],
        ["step", 0, 0],
        ["batch_end", 1, STEPS - 1],
        ["validation", 2, 0],
        ["epoch_end", 1, 0],
        ["epoch_end", EPOCHS - 1, 0],
        ["train_end", EPOCHS - 1, 0],
        ["evaluate", EPOCHS - 1, 0],
        ["save", EPOCHS - 1, 0],
    ],
    ids=lambda death: f"{death[0]}-{death[1]}",
)
def test_lost_at_any_stage(
    tmp_path: Path, rank: int, death: list[Any], history: dict[str, list[float]]
) -> None:
    job = finish(begin(tmp_path, {"deaths": [[rank, *death]]}, "--elastic"), tmp_path)
    check(job, [r for r in range(RANKS) if r != rank], history)
    assert job.repeated <= 1


@pytest.mark.soak
@pytest.mark.parametrize("communicator", ["mpi", "hierarchical"])
def test_lost_with_other_communicators(
    tmp_path: Path,
    communicator: str,
    history: dict[str, list[float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DISTKERAS_COMMUNICATOR", communicator)
    deaths = [[2, "step", 1, 4], [0, "validation", 2, 0]]
    job = finish(begin(tmp_path, {"deaths": deaths}, "--elastic"), tmp_path)
    check(job, [1], history)
    assert job.repeated <= 1


@pytest.mark.soak
def test_several_steps_an_execution(
    tmp_path: Path, history: dict[str, list[float]]
) -> None:
    """The whole execution is done again."""
    options = {"deaths": [[1, "step", 1, 3]], "execution": 3}
    job = finish(begin(tmp_path, options, "--elastic"), tmp_path)
    check(job, [0, 2], history)


@pytest.mark.soak
def test_gradients_of_several_steps_are_kept(tmp_path: Path) -> None:
    """Epochs of nine steps end between two updates: what was added up goes on."""
    jobs = []
    for name, deaths in (
        ("whole", []),
        ("lost", [[1, "step", 1, 4], [0, "validation", 2, 0]]),
    ):
        folder = tmp_path / name
        folder.mkdir()
        options = {"deaths": deaths, "accumulated": 2}
        jobs.append(finish(begin(folder, options, "--elastic"), folder))
    check(jobs[0], [0, 1, 2], {})
    check(jobs[1], [2], jobs[0].results[0]["history"])


@pytest.mark.soak
def test_the_learning_rate_follows(tmp_path: Path) -> None:
    options = {"deaths": [[1, "step", 1, 3]], "resized": "rescale"}
    job = finish(begin(tmp_path, options, "--elastic"), tmp_path)
    check(job, [0, 2], {})
    assert job.results[0]["rate"] == pytest.approx(0.02)
    batch = 2 * elastic_job.GLOBAL_BATCH // RANKS
    last = job.steps[0][-1] - (EPOCHS - 1) * STEPS
    assert last == -(-elastic_job.SAMPLES // batch) - 1


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["PyDataset", "tf.data"])
def test_data_that_is_dealt_by_batch(tmp_path: Path, kind: str) -> None:
    options = {"deaths": [[0, "step", 1, 3], [2, "epoch_end", 2, 0]], "data": kind}
    job = finish(begin(tmp_path, options, "--elastic"), tmp_path)
    check(job, [1], {})
    assert job.results[1]["rate"] == pytest.approx(0.01)


@pytest.mark.soak
def test_too_few_are_left_without_a_checkpoint(tmp_path: Path) -> None:
    options = {"deaths": [[1, "step", 1, 3]]}
    job = finish(begin(tmp_path, options, "--elastic", "--min-n", "3"), tmp_path)
    assert job.code == LEFT
    assert "2 ranks are left, 3 are needed: exiting" in job.output


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "stage", "code"),
    [
        ("an exception", "step", 1),
        ("kill -9 of rank 1", "start-up", LEFT),
        ("kill -9 of rank 0", "step", 1),
        ("stuck (SIGSTOP)", "step", STALLED),
        ("leaves by os._exit(0)", "step", 1),
        ("leaves by sys.exit(0)", "validation", LEFT),
        ("another collective than the others'", "step", OUT_OF_STEP),
        ("Ctrl-C", "step", INTERRUPTED),
        ("SIGTERM to the launcher", "step", 143),
    ],
)
def test_what_no_trainer_sees_ends_the_job(
    name: str, stage: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing hangs, and nothing is left."""
    command, environ = failures.launchers()["distkeras run"]
    elastic = {"distkeras run": ([*command, "--elastic"], environ)}
    monkeypatch.setattr(failures, "launchers", lambda: elastic)
    fault = next(fault for fault in failures.FAULTS if fault.name == name)
    outcome = failures.run("distkeras run", fault, stage, tmp_path)
    said = "the output does not say"
    wrong = [p for p in failures.problems(fault, outcome) if not p.startswith(said)]
    assert not wrong, f"{wrong}\n{outcome.tail}"
    assert outcome.code == code, outcome.tail


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_lost_at_twenty_instants(
    tmp_path: Path, history: dict[str, list[float]]
) -> None:
    """Ten minutes. The times of recovery are printed (`pytest -s`)."""
    instants = random.Random(6)
    recoveries: list[float] = []
    early: list[float] = []
    losses = 0
    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir()
        process = begin(folder, {"pause": 0.05}, "--elastic")
        while not all((folder / f"started-{r}").exists() for r in range(RANKS)):
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.01)
        time.sleep(instants.uniform(0, 8))
        rank = instants.randrange(RANKS)
        steps = [folder / f"steps-{r}" for r in range(RANKS)]
        traced = all(s.exists() and s.read_text().count("\n") > 1 for s in steps)
        with contextlib.suppress(ProcessLookupError):
            os.kill(int((folder / f"process-{rank}").read_text()), signal.SIGKILL)
        job = finish(process, folder)
        left = sorted(job.results)
        assert len(left) >= RANKS - 1, job.output
        check(job, left, history)
        assert job.repeated <= 1
        losses += "lost rank" in job.output
        # A loss while another rank traces its first step has to wait for that.
        (recoveries if traced else early).extend(job.recoveries)
        print(f"{number}: rank {rank}, recovered in s: {job.recoveries}", flush=True)
    print(f"{losses} of 20 lost a rank; recovered in s: {sorted(recoveries)}")
    print(f"lost before all ranks had traced a step: {sorted(early)}")
    assert losses >= 10
    assert max(recoveries) < 2
