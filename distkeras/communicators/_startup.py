"""Watches the start of MPI, in which no thread of Python can run.

`MPI_Init` waits for all ranks, and `mpi4py` holds Python's lock in it. So a small
process of its own watches: this file, run by `guard`, with nothing but the standard
library. It ends the rank when another has ended, or the timeout has come, and says
what the other ranks of this machine do, from what `/proc` shows of the launcher's
children.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_RANK_VARIABLES = (
    b"OMPI_COMM_WORLD_RANK",
    b"MV2_COMM_WORLD_RANK",
    b"PMI_RANK",
    b"SLURM_PROCID",
    b"PMIX_RANK",
)
# Seconds between looks at the other ranks; missing ones must be so in two of them.
_INTERVAL = 2.0
# Seconds by which each waiting rank lets the one before it speak first.
_TURN = 1.5


@contextlib.contextmanager
def guard(timeout: float, local_size: int | None) -> Iterator[None]:
    """Ends this process if the body takes too long; where `/proc` exists.

    Args:
        timeout: seconds, 0 for no limit.
        local_size: the number of ranks of this node, where known.
    """
    usable = Path("/proc/self/stat").exists() and Path(__file__).exists()
    if not usable or not sys.executable:
        yield
        return
    command = [sys.executable, "-I", "-S", __file__]
    command += [str(os.getpid()), str(timeout), str(local_size or 0)]
    try:
        watcher = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
    except OSError:  # no process to be had; MPI may still start
        yield
        return
    try:
        yield
    finally:
        watcher.kill()
        watcher.communicate()


def main(pid: int, timeout: float, local_size: int) -> None:
    """Watches a process until its end of the pipe closes.

    Args:
        pid: the rank.
        timeout: seconds, 0 for no limit.
        local_size: the number of ranks of this node, 0 where unknown.
    """
    start = time.monotonic()
    variable = _rank_variable(pid)
    mine = _rank(pid, variable)
    root = _outermost(pid, variable)
    missing = 0
    # In containers of their own, ranks do not see each other.
    sees = len(_ranks_beside(root, variable)) > 1
    while True:
        elapsed = time.monotonic() - start
        pause = min(_INTERVAL, max(0.05, timeout - elapsed)) if timeout else _INTERVAL
        if select.select([sys.stdin], [], [], pause)[0]:
            return
        ranks = _ranks_beside(root, variable)
        elapsed = time.monotonic() - start
        sees = sees or len(ranks) > 1
        missing = missing + 1 if sees and len(ranks) < local_size else 0
        late = bool(timeout) and elapsed >= timeout
        if not (late or missing > 1):
            continue
        # One report: the first of those that wait speaks, and that ends the job.
        waiting = [r for r, p in ranks.items() if _waits(p)]
        before = sum(r < mine for r in waiting)
        if select.select([sys.stdin], [], [], before * _TURN)[0]:
            return
        _report(mine, ranks, elapsed, local_size)
        _end(pid)
        return


def _report(mine: int, ranks: dict[int, int], elapsed: float, local_size: int) -> None:
    lines = []
    for rank, pid in sorted(ranks.items()):
        if rank == mine or _waits(pid):
            continue
        if _stat(pid)[0] in "Tt":
            what = "is stopped (SIGSTOP, or a debugger)"
        else:
            what = "has not started MPI"
            if _dump(pid):
                what += "; its stack is above"
        name = f"rank {rank} (process {pid})"
        if rank < 0:
            name = f"process {pid}, whose rank cannot be read,"
        lines.append(f"{name} {what}")
    gone = local_size - len(ranks)
    if gone > 0:
        names = ", ".join(f"rank {r}" for r in range(local_size) if r not in ranks)
        if max(ranks, default=0) >= local_size:  # there are other machines
            names = f"{gone} of this machine's ranks"
        lines.append(f"{names} ended before that")
    if not lines:
        lines.append("all ranks of this machine wait; look at those of other hosts")
    text = (
        f"[distkeras] rank {mine} has waited {elapsed:.0f} s for all ranks to start "
        f"MPI: {'; '.join(lines)}.\n"
        "[distkeras] Every rank has to reach distkeras.init(), or the first use of "
        "distkeras. This rank is ended, and the job with it. (The limit is "
        "DISTKERAS_TIMEOUT, in seconds.)\n"
    )
    with contextlib.suppress(OSError):  # a full disk; the rank is ended all the same
        sys.stderr.write(text)
        sys.stderr.flush()
    time.sleep(0.5)


def _end(pid: int) -> None:
    """Ends the rank; a handler of its own could not run."""
    _remove_files(pid)
    folder = os.environ.get("DISTKERAS_STATUS")  # see `distkeras._exit.tell_launcher`
    if folder:
        with contextlib.suppress(OSError):
            (Path(folder) / "failed").write_text(str(128 + signal.SIGTERM))
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        time.sleep(1)


def _remove_files(pid: int) -> None:
    """Removes what MPI has made in shared memory for a rank that is to be ended.

    As `distkeras._leftovers` does, which cannot be imported here.
    """
    for pattern in ("sm_segment.*", "mpich_shm_*"):
        for path in Path("/dev/shm").glob(pattern):
            with contextlib.suppress(OSError):
                if str(path) in Path(f"/proc/{pid}/maps").read_text():
                    path.unlink()


def _ranks_beside(root: int, variable: bytes) -> dict[int, int]:
    """Returns the processes of the ranks that the same launcher started here.

    Where a rank is started by a wrapper (a shell, a profiler), it is the innermost
    process. Where a rank cannot be read it stands under minus its process number.
    """
    parent = _stat(root)[1]
    children: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            state, theirs = _stat(int(path.name))
            if state not in "ZX":
                children.setdefault(theirs, []).append(int(path.name))
    found = {}
    for pid in children.get(parent, []):
        rank = _rank(pid, variable)
        # A program that changes its title may write over its variables.
        if rank >= 0 or (variable and not _environ(pid)):
            found[rank if rank >= 0 else -pid] = _python_of(pid, children)
    return found


def _python_of(pid: int, children: dict[int, list[int]]) -> int:
    """Returns a process or the one below it that has started MPI, if one has."""
    below = [pid]
    for process in below:
        below += children.get(process, [])
    return next((p for p in below if _has_mpi(p)), pid)


def _outermost(pid: int, variable: bytes) -> int:
    """Returns the process that the launcher itself has started for a rank."""
    rank = _rank(pid, variable)
    parent = _stat(pid)[1]
    while parent > 0 and _rank(parent, variable) == rank:
        pid, parent = parent, _stat(parent)[1]
    return pid


def _stat(pid: int) -> tuple[str, int]:
    """Returns the letter of a process' state, and its parent."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "X", -1
    words = text.rpartition(")")[2].split()
    return words[0], int(words[1])


def _environ(pid: int) -> dict[bytes, bytes]:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return dict(v.split(b"=", 1) for v in variables if b"=" in v)


def _rank_variable(pid: int) -> bytes:
    """Returns the variable by which the innermost launcher tells the rank."""
    environ = _environ(pid)
    return next((name for name in _RANK_VARIABLES if name in environ), b"")


def _rank(pid: int, variable: bytes) -> int:
    """Returns a process' rank; -1 if it is none of this launcher's."""
    word = _environ(pid).get(variable, b"")
    return int(word) if word.isdigit() else -1


def _has_mpi(pid: int) -> bool:
    """Whether a process has begun to start MPI."""
    try:
        return "libmpi" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def _waits(pid: int) -> bool:
    """Whether a process has begun to start MPI, and can go on."""
    return _has_mpi(pid) and _stat(pid)[0] not in "Tt"


def _dump(pid: int) -> bool:
    """Lets a process write its Python stack, if it has been prepared for that."""
    number = signal.SIGRTMAX - 3
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                if not int(line.split()[1], 16) >> (number - 1) & 1:
                    return False
                os.kill(pid, number)
                time.sleep(0.3)
                return True
    except OSError:
        pass
    return False


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
