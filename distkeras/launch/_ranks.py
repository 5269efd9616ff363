"""The ranks below a launcher on this machine, found in the kernel's list of processes.

Open MPI's `mpiexec` passes most signals on to its ranks, but not SIGTERM: it ends them
within seconds. A rank that handles SIGTERM itself, to write a checkpoint, has to be
told past the launcher.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

_WORKER = b"distkeras.launch._worker"


def tell(launcher: int, number: int) -> bool:
    """Sends a signal to those ranks of this machine that handle it themselves.

    The others hear from these: what a `Checkpoint` does, all ranks do together.

    Args:
        launcher: process number of `mpiexec`.
        number: of the signal.

    Returns:
        Whether there was one.
    """
    told = False
    for pid in _ranks(launcher):
        if _handles(pid, number):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
                told = True
    return told


def _ranks(launcher: int) -> list[int]:
    """Returns the processes below a launcher that run a user's program.

    Not what these have forked in turn, such as workers that prepare data.
    """
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found: list[int] = []
    waiting = [launcher]
    while waiting:
        for pid in children.get(waiting.pop(), []):
            words = b""
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
            # The agent that starts another host's ranks names the worker as well.
            is_rank = _WORKER in words.split(b"\0")
            (found if is_rank else waiting).append(pid)
    return found


def _handles(pid: int, number: int) -> bool:
    """Returns whether a process has a handler of its own for a signal."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = Path(f"/proc/{pid}/status").read_text()
        caught = int(text.partition("SigCgt:")[2].split()[0], 16)
        return bool(caught >> (signal.Signals(number) - 1) & 1)
    return False
