"""MPI's files in shared memory: removed where a job does not end by itself.

MPI libraries remove them in `MPI_Finalize`. A job that is aborted does not get there,
and what is left takes memory until the machine restarts.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

_FOLDER = Path("/dev/shm")
# Inodes that Linux gives the first namespaces (include/linux/proc_ns.h).
_INITIAL = {"ipc": "ipc:[4026531839]", "pid": "pid:[4026531836]"}
# Open MPI's, MPICH's and ours (Intel MPI's files have no names by then).
_PATTERNS = ("sm_segment.*", "osc_sm.*", "mpich_shm_*", "distkeras_*")


def remove_own() -> None:
    """Removes the files that this process has mapped; its job must be ending.

    Processes that use them go on using them: only the names vanish.
    """
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:  # not Linux
        return
    _remove(path for path in _files() if str(path) in maps)


def remove_unused(since: float) -> None:
    """Removes those of this user that no process has mapped.

    Not in a container that shares the machine's memory without seeing its processes
    (`docker run --ipc=host`): what is mapped by others cannot be told there.

    Args:
        since: seconds since 1970; older files are left alone.
    """
    if _is_initial("ipc") and not _is_initial("pid"):
        return
    paths = []
    for path in _files():
        with contextlib.suppress(OSError):
            status = path.stat()
            if status.st_uid == os.getuid() and status.st_mtime >= since:
                paths.append(path)
    if not paths:
        return
    used = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text()
        except OSError:  # it has ended, or is another user's
            continue
        used |= {path for path in paths if str(path) in text}
    _remove(path for path in paths if path not in used)


def _is_initial(namespace: str) -> bool:
    """Whether this process is in the machine's own namespace, not a container's."""
    try:
        return os.readlink(f"/proc/self/ns/{namespace}") == _INITIAL[namespace]
    except OSError:  # not Linux
        return True


def _files() -> list[Path]:
    return [path for pattern in _PATTERNS for path in _FOLDER.glob(pattern)]


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()
