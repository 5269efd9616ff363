"""Jobs with a fault in them: which, where, how they end, and the table of it.

The job is a training loop reduced to its collectives, or a real `Trainer.fit`. At one
stage, on one rank, the fault happens. What is looked at: how long the other ranks
outlive it, the exit code, what the output says, and what is left behind.
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from pathlib import Path

import mpi_runtimes

STAGES = ("start-up", "step", "validation", "checkpoint", "end")
RANKS = 3
TIMEOUT = 3.0  # seconds of DISTKERAS_TIMEOUT where a rank is stuck
LIMIT = 10.0  # seconds within which all ranks must be gone


@dataclasses.dataclass(frozen=True)
class Fault:
    """One way in which a rank fails.

    Attributes:
        name: for the table.
        code: what the rank runs.
        says: patterns that the end of the output must match, all of them.
        rank: on which it happens.
        stuck: whether only the timeout can tell it from work.
        signal: what the test sends to the launcher once the rank is there.
        stages: at which it makes sense.
    """

    name: str
    code: str
    says: tuple[str, ...]
    rank: int = 1
    stuck: bool = False
    signal: signal.Signals | None = None
    stages: tuple[str, ...] = STAGES


_LATE = ("rank 1", r"job\.py:\d+, in reach|has not started MPI", "DISTKERAS_TIMEOUT")
_LEFT = (r"rank 1 has ended the script|rank 1 ended before", r"job\.py:\d+|start MPI")
_RANK_1 = r"rank 1\b|@1,1\]"  # the second is Open MPI's, before distkeras is imported
# The launcher's word, or where that is slow, that of a rank which waited for it.
_KILLED = r"signal 9 \(Killed\)|Rank \d+ \(process \d+\) has ended"
_EARLY = tuple(s for s in STAGES if s != "end")

FAULTS = (
    Fault(
        "an exception",
        "raise ValueError('on purpose')",
        (_RANK_1, "ValueError: on purpose", r'job\.py", line \d+, in reach'),
    ),
    Fault(
        "out of memory (MemoryError)",
        "import numpy; numpy.ones(1 << 50)",
        (_RANK_1, "MemoryError", r'job\.py", line \d+, in reach'),
    ),
    Fault(
        "kill -9 of rank 1",
        "os.kill(os.getpid(), signal.SIGKILL)",
        ("rank 1", _KILLED),
    ),
    Fault(
        "kill -9 of rank 0",
        "os.kill(os.getpid(), signal.SIGKILL)",
        ("rank 0", _KILLED),
        rank=0,
    ),
    Fault(
        "SIGTERM to one rank",
        "os.kill(os.getpid(), signal.SIGTERM)",
        ("rank 1", r"signal 15 \(Terminated\)"),
    ),
    Fault("stuck (sleeps)", "time.sleep(1000)", _LATE, stuck=True),
    Fault(
        "stuck (SIGSTOP)",
        "os.kill(os.getpid(), signal.SIGSTOP)",
        ("rank 1", "is stopped", r"job\.py:\d+|start MPI|the end of the script"),
        stuck=True,
    ),
    Fault("leaves by sys.exit(0)", "sys.exit(0)", _LEFT, stages=_EARLY),
    Fault(
        "leaves by raise SystemExit(3)",
        "raise SystemExit(3)",
        (rf"{_LEFT[0]}|\[rank 1\] exited with code 3|@1,1\]",),
        stages=_EARLY,
    ),
    Fault("leaves by os._exit(0)", "os._exit(0)", ("rank 1|exiting|ended before",)),
    Fault(
        "another collective than the others'",
        "import distkeras; distkeras.broadcast_object('mine')",
        (
            r"in different collectives|wait for each other|ended the script|same calls",
            r"rank 0",
            r"job\.py:\d+, in reach|job\.py\", line \d+",
        ),
        rank=0,
    ),
    Fault("Ctrl-C", "time.sleep(60)", (), signal=signal.SIGINT),
    Fault("SIGTERM to the launcher", "time.sleep(60)", (), signal=signal.SIGTERM),
)

CUT = Fault(
    "the link between two hosts is cut",
    "\n    ".join(
        [
            "while not os.path.exists(f'{folder}/cut'):",
            "    time.sleep(0.01)",
        ]
    ),
    (r"rank 1\b|other hosts", "DISTKERAS_TIMEOUT"),
    stuck=True,
)
"""On the second host of two, each with one rank."""

_HEAD = """
import os, signal, sys, time

stage_of_fault, culprit, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
with open(f"{folder}/{rank}.pid", "w") as file:
    file.write(str(os.getpid()))


def reach(stage):
    if (stage, rank) != (stage_of_fault, culprit):
        return
    with open(f"{folder}/reached.tmp", "w") as file:
        file.write(str(time.time()))
    os.rename(f"{folder}/reached.tmp", f"{folder}/reached")
    FAULT


reach("start-up")
"""

LOOP = """
import numpy as np
import distkeras

world = distkeras.init()
steps = world.duplicate()
gradients = np.ones(100_000, np.float32)


def train():
    for step in range(4):
        if step == 2:
            reach("step")
        steps.allreduce(gradients)
    reach("validation")
    steps.allgather_object({"loss": 1.0})
    reach("checkpoint")
    world.barrier()


train()
reach("end")
"""

FIT = """
import keras
import numpy as np
import distkeras


class Faulty(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            reach("step")

    def on_test_batch_end(self, batch, logs=None):
        reach("validation")

    def on_epoch_end(self, epoch, logs=None):
        reach("checkpoint")


keras.utils.set_random_seed(1)
layers = [keras.layers.Dense(WIDTH), keras.layers.Dense(1)]
model = keras.Sequential([keras.Input((8,)), *layers])
x = np.random.default_rng(SEED).normal(size=(96, 8)).astype("float32")
trainer = distkeras.Trainer(model)
trainer.compile(optimizer="sgd", loss="mse")
trainer.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0,
            validation_data=(x, x[:, :1]), callbacks=[Faulty()])
reach("end")
"""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a job with a fault ended.

    Attributes:
        code: the exit code.
        seconds: from the fault to the launcher's end.
        output: both streams.
        orphans: processes of ranks that still ran two seconds later.
        left: files that were left behind.
        hung: whether the job had to be ended by the test.
        timeout: seconds that ranks waited for each other if one was stuck.
    """

    code: int
    seconds: float
    output: str
    orphans: list[int]
    left: list[str]
    hung: bool
    timeout: float

    @property
    def tail(self) -> str:
        """The end of the output, where a reader looks."""
        return "\n".join(self.output.splitlines()[-45:])


def launchers() -> dict[str, tuple[list[str], dict[str, str]]]:
    """Returns what each launcher's command begins with, and its environment."""
    here, mpich = mpi_runtimes.open_mpi(), mpi_runtimes.mpich()
    run = [sys.executable, "-m", "distkeras", "run", "-n", str(RANKS)]
    number = ["-n", str(RANKS), sys.executable]
    return {
        "distkeras run": (run, {}),
        "mpiexec": ([*here.command, *number], dict(here.environ)),
        "MPICH": ([*mpich.command, *number], dict(mpich.environ)),
    }


def run(
    launcher: str,
    fault: Fault,
    stage: str,
    folder: Path,
    program: str = LOOP,
    *,
    timeout: float = TIMEOUT,
    command: list[str] | None = None,
    act: Callable[[], None] | None = None,
) -> Outcome:
    """Runs a job in which a fault happens.

    Args:
        launcher: a key of `launchers()`.
        fault: which.
        stage: where.
        folder: empty; for the script and for what the job writes.
        program: what stands behind the start-up.
        timeout: seconds, where a rank is stuck.
        command: what the launcher's command begins with, if it is another one.
        act: what the test does once the rank is there.
    """
    script = folder / "job.py"
    script.write_text(_HEAD.replace("FAULT", fault.code) + textwrap.dedent(program))
    # Short: Open MPI makes sockets below it, whose paths have a limit.
    temporary = Path(tempfile.mkdtemp(prefix="dk", dir="/tmp"))
    begin, added = (command, {}) if command else launchers()[launcher]
    environ = {
        **{k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"},
        **added,
        "TMPDIR": str(temporary),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "CUDA_VISIBLE_DEVICES": "",
    }
    environ.pop("DISTKERAS_TIMEOUT", None)
    if fault.stuck:
        environ["DISTKERAS_TIMEOUT"] = str(timeout)
    words = [*begin, str(script), stage, str(fault.rank), str(folder)]
    with (folder / "output").open("wb") as sink:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=environ,
            start_new_session=True,
        )
        shared: set[str] = set()
        hung = not _wait(process, folder, fault, shared, act)
    ended = time.time()
    reached = folder / "reached"
    since = float(reached.read_text()) if reached.exists() else ended
    pids = [int(path.read_text() or 0) for path in folder.glob("*.pid")]
    # Two sides that are cut off end each by itself.
    orphans = _orphans(pids, 10 if fault is CUT else 2)
    left = sorted(str(p.relative_to(temporary)) for p in temporary.rglob("*"))
    left += sorted(filter(os.path.exists, shared))
    subprocess.run(["rm", "-rf", str(temporary)], check=False)
    output = (folder / "output").read_bytes().decode(errors="replace")
    return Outcome(
        process.returncode,
        ended - since,
        output.replace("\0", ""),
        orphans,
        left,
        hung,
        timeout,
    )


def _wait(
    process: subprocess.Popen[bytes],
    folder: Path,
    fault: Fault,
    shared: set[str],
    act: Callable[[], None] | None,
) -> bool:
    """Waits for a job to end; sends its signal; ends it if it is late.

    Meanwhile it collects in `shared` the files in shared memory that ranks use.
    """
    start = time.monotonic()
    reached = folder / "reached"
    while not reached.exists() and process.poll() is None:
        if time.monotonic() - start > 90:
            break
        shared |= _shared_memory(folder)
        time.sleep(0.02)
    time.sleep(0.1)
    shared |= _shared_memory(folder)
    if act is not None:
        act()
    if fault.signal is not None:
        time.sleep(1)  # the others wait in a collective by then
        process.send_signal(fault.signal)
    try:
        process.wait(3 * LIMIT)
        return True
    except subprocess.TimeoutExpired:
        pids = [int(path.read_text() or 0) for path in folder.glob("*.pid")]
        process.terminate()
        try:
            process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for pid in filter(None, pids):
            if _alive(pid):
                os.kill(pid, signal.SIGKILL)
        return False


def _alive(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


def _orphans(pids: Iterable[int], seconds: float) -> list[int]:
    """Returns which processes still run after some seconds; ends them."""
    deadline = time.monotonic() + seconds
    left = [pid for pid in pids if pid]
    while (left := [p for p in left if _alive(p)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left


def _shared_memory(folder: Path) -> set[str]:
    """Returns the files in shared memory that ranks have mapped."""
    found = set()
    for path in folder.glob("*.pid"):
        try:
            maps = Path(f"/proc/{path.read_text()}/maps").read_text()
        except OSError:
            continue
        found |= set(re.findall(r"/dev/shm/\S+", maps))
    return found


def problems(fault: Fault, outcome: Outcome, *, launcher: str = "mpiexec") -> list[str]:
    """Returns what is wrong with the way a job ended.

    Args:
        fault: which it had.
        outcome: how it ended.
        launcher: by which it was started. What MPICH's does where nothing of
            distkeras runs any more is not looked at.
    """
    killed = fault.code.startswith(("os.kill", "os._exit")) and not fault.stuck
    ours = launcher != "MPICH" or not (killed or fault.signal)
    limit = LIMIT + (outcome.timeout if fault.stuck else 0)
    if fault is CUT:  # there Open MPI's launcher is waited for, and ended
        limit += 10
    found = []
    if outcome.hung:
        found.append("it hung")
    if outcome.seconds > limit:
        found.append(f"it took {outcome.seconds:.1f} s")
    if outcome.code == 0 and (ours or "_exit" not in fault.code):
        found.append("its exit code is 0")
    if outcome.orphans:
        found.append(f"processes were left: {outcome.orphans}")
    if outcome.left and (ours or outcome.hung) and fault is not CUT:
        found.append(f"files were left: {outcome.left}")
    if ours:
        found += [
            f"the output does not say {pattern!r}"
            for pattern in fault.says
            if not re.search(pattern, outcome.tail)
        ]
    return found


Table = Mapping[tuple[str, str, str], Outcome]


def table(outcomes: Table) -> str:
    """Returns the matrix as text in Markdown.

    Args:
        outcomes: by launcher, name of the fault, and stage.
    """
    lines = [_INTRODUCTION.format(timeout=TIMEOUT, ranks=RANKS)]
    for launcher in dict.fromkeys(launcher for launcher, _, _ in outcomes):
        lines += [f"## {_TITLES[launcher]}", ""]
        lines += [
            "| | " + " | ".join(STAGES) + " |",
            "| --- |" + " --- |" * len(STAGES),
        ]
        named = {name for started, name, _ in outcomes if started == launcher}
        for fault in (f for f in (*FAULTS, CUT) if f.name in named):
            cells = [_cell(outcomes.get((launcher, fault.name, s))) for s in STAGES]
            lines.append(f"| {fault.name} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _cell(outcome: Outcome | None) -> str:
    return "–" if outcome is None else f"{outcome.code} ({outcome.seconds:.0f} s)"


_TITLES = {
    "distkeras run": "`distkeras run`, Open MPI",
    "mpiexec": "Open MPI's `mpiexec`",
    "MPICH": "MPICH's `mpiexec`",
    "two hosts": "`distkeras run` over two hosts, Open MPI",
}

_INTRODUCTION = """\
# What happens when a rank fails

Whatever happens to one rank, all ranks are gone within seconds, the exit code is not
zero, and the last lines of the output say which rank, what, and where.

Generated by the tests, which check this for each cell, and that no process and no file
is left:

    export DISTKERAS_FAILURES_TABLE=docs/failures.md
    python -m pytest -m soak tests/test_failures.py

A cell is the job's exit code, and the seconds from the fault to the launcher's end,
with {ranks} ranks. Where a rank is stuck the time includes the timeout, here
{timeout:g} s; the default is 600 s (`distkeras.init(timeout=seconds)` or the variable
`DISTKERAS_TIMEOUT=seconds`, 0 for none). Nothing but the timeout ends a job whose late
rank may still come: a rank that compiles or writes a checkpoint is waited for. A rank
that has ended its script waits for the others as long as these compute.

| exit code | meaning |
| --- | --- |
| 121 | a rank has ended its script, or its process is gone, while others wait for it |
| 122 | ranks wait for each other in different collectives |
| 124 | ranks have waited longer than the timeout |
| 130 | Ctrl-C |
| 128 + n | signal n ended a rank; 143 also where all wait for one to start MPI |
| other | that of the rank that failed: 1 for an exception, n for `sys.exit(n)` |

The stages: before the first use of distkeras; in a training step; in validation; in a
callback at the end of an epoch; after the training. Empty cells are no faults.

What is not so: MPICH's launcher names the process that was killed and not its rank, has
codes of its own for signals, and leaves one file in `/dev/shm` where a rank is killed
from outside (`distkeras run` removes those of its machine). After `os._exit(0)` it ends
the other ranks, silently, and sometimes with exit code 0; nothing of distkeras runs
then. Ranks of other hosts cannot
be looked at by process number: one that is stopped there is said not to answer. Where a
host is out of reach, the ranks on both sides end at the timeout. `distkeras run` ends
Open MPI's launcher then, which would wait for its daemon on that host; the daemon stays
until its connection breaks.
"""
