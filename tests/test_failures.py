"""The failure matrix: no fault of one rank leaves the others waiting.

A few cells run by default. The whole matrix takes ten minutes; it also writes the
table of the documentation:

    DISTKERAS_FAILURES_TABLE=docs/failures.md python -m pytest -m soak tests/test_failures.py
"""  # noqa: E501

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import failures
import pytest
from failures import CUT
from failures import FAULTS
from failures import FIT
from failures import LIMIT
from failures import LOOP
from failures import STAGES
from failures import Fault
from failures import Outcome
from several_hosts import two_hosts

pytestmark = pytest.mark.launches

_BY_NAME = {fault.name: fault for fault in FAULTS}
_CELLS = [
    (launcher, fault.name, stage)
    for launcher in ("distkeras run", "mpiexec", "MPICH")
    for fault in FAULTS
    for stage in STAGES
    if stage in fault.stages
]


def _check(
    launcher: str, fault: Fault, stage: str, folder: Path, program: str = LOOP
) -> Outcome:
    # Ranks may be seconds apart when TensorFlow is being loaded.
    timeout = failures.TIMEOUT if program == LOOP else 12
    outcome = failures.run(launcher, fault, stage, folder, program, timeout=timeout)
    wrong = failures.problems(fault, outcome, launcher=launcher)
    assert not wrong, f"{'; '.join(wrong)}\n{outcome.tail}"
    return outcome


@pytest.mark.parametrize(
    ("launcher", "name", "stage"),
    [
        ("distkeras run", "leaves by sys.exit(0)", "step"),
        ("mpiexec", "another collective than the others'", "checkpoint"),
        ("mpiexec", "stuck (SIGSTOP)", "validation"),
        ("MPICH", "stuck (sleeps)", "end"),
    ],
)
def test_some_cells(launcher: str, name: str, stage: str, tmp_path: Path) -> None:
    _check(launcher, _BY_NAME[name], stage, tmp_path)


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[tuple[str, str, str], Outcome]]:
    """Collects the cells; writes the table once all of them are there."""
    collected: dict[tuple[str, str, str], Outcome] = {}
    yield collected
    path = os.environ.get("DISTKERAS_FAILURES_TABLE")
    if path and len(collected) == len(_CELLS) + len(STAGES):
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_text(failures.table(collected), encoding="utf-8")


@pytest.mark.soak
@pytest.mark.parametrize("stage", STAGES)
def test_hosts_whose_link_is_cut(
    stage: str, tmp_path: Path, outcomes: dict[tuple[str, str, str], Outcome]
) -> None:
    """The ranks on both sides end at the timeout, and so does the launcher."""
    with two_hosts(tmp_path) as hosts:
        command = [sys.executable, "-m", "distkeras", "run"]
        command += ["-H", ",".join(f"{address}:1" for address in hosts.addresses)]
        command += ["--prtemca", "plm_ssh_agent", str(hosts.agent)]

        def act() -> None:
            hosts.cut()
            (tmp_path / "cut").touch()

        # One side waits from the cut on, the other until it has come there.
        outcome = failures.run(
            "two hosts", CUT, stage, tmp_path, command=hosts.on_first(command), act=act
        )
        hosts.end()
    wrong = failures.problems(CUT, outcome)
    assert not wrong, f"{'; '.join(wrong)}\n{outcome.tail}"
    outcomes["two hosts", CUT.name, stage] = outcome


@pytest.mark.soak
@pytest.mark.parametrize(("launcher", "name", "stage"), _CELLS)
def test_every_cell(
    launcher: str,
    name: str,
    stage: str,
    tmp_path: Path,
    outcomes: dict[tuple[str, str, str], Outcome],
) -> None:
    outcome = _check(launcher, _BY_NAME[name], stage, tmp_path)
    outcomes[launcher, name, stage] = outcome


@pytest.mark.soak
@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("an exception", "step"),
        ("an exception", "validation"),
        ("out of memory (MemoryError)", "checkpoint"),
        ("kill -9 of rank 0", "step"),
        ("stuck (sleeps)", "step"),
        ("stuck (SIGSTOP)", "checkpoint"),
        ("leaves by sys.exit(0)", "step"),
        ("another collective than the others'", "step"),
        ("another collective than the others'", "checkpoint"),
        ("Ctrl-C", "validation"),
    ],
)
@pytest.mark.parametrize("launcher", ["distkeras run", "mpiexec"])
def test_in_a_real_fit(launcher: str, name: str, stage: str, tmp_path: Path) -> None:
    program = FIT.replace("WIDTH", "4").replace("SEED", "0")
    _check(launcher, _BY_NAME[name], stage, tmp_path, program)


@pytest.mark.soak
@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("width", "seed", "says"),
    [
        ("4 + (rank == 1)", "0", r"rank 1: .*\(8, 5\)"),
        ("4", "rank", r"data|samples|x\b"),
    ],
    ids=["models", "data"],
)
def test_ranks_that_hold_different_things(
    width: str, seed: str, says: str, tmp_path: Path
) -> None:
    """They find it before the first step."""
    fault = Fault("different", "pass", (says, r"rank 1"), rank=9)
    program = FIT.replace("WIDTH", width).replace("SEED", seed)
    outcome = failures.run("mpiexec", fault, "start-up", tmp_path, program)
    wrong = failures.problems(fault, outcome)
    assert not wrong, f"{'; '.join(wrong)}\n{outcome.tail}"
    assert outcome.seconds < LIMIT
