"""How many processor cores this process has, found out from the kernel."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def usable_cores() -> int:
    """Returns how many physical cores this process may use, at least 1.

    Hardware threads of one core count once (a second thread adds little to dense
    arithmetic), and a container's CPU quota is a limit.
    """
    cores = physical_cores(os.sched_getaffinity(0))
    limit = cpu_quota()
    return max(1, cores if limit is None else min(cores, limit))


def physical_cores(cpus: Iterable[int]) -> int:
    """Counts the physical cores of logical CPUs.

    Args:
        cpus: by the numbers that `os.sched_getaffinity` gives them.
    """
    return len({_siblings(cpu) for cpu in cpus})


def cpu_quota() -> int | None:
    """Returns the control group's limit of processor time, in whole cores, if any.

    Of version 2 of control groups, then of version 1.
    """
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        folder = Path("/sys/fs/cgroup/cpu")
        try:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    return None if quota in ("max", "-1") else int(quota) // int(period)


def _siblings(cpu: int) -> str:
    """Names the physical core of a logical CPU by the list of its threads."""
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        return (topology / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)
