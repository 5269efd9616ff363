"""What this node has, found out without importing a framework: cores and GPUs."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path


def usable_cores() -> int:
    """Returns how many physical cores this process may use, at least 1.

    Hardware threads of one core count once (a second thread adds little to dense
    arithmetic), and a container's CPU quota is a limit.
    """
    cpus = os.sched_getaffinity(0)
    cores = {_siblings(cpu) for cpu in cpus}
    return max(1, min(len(cores), _cpu_quota(len(cores))))


def _siblings(cpu: int) -> str:
    """Names the physical core of a logical CPU by the list of its threads."""
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        return (topology / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _cpu_quota(default: int) -> int:
    """Reads the control group's CPU limit, in whole cores; version 2, then 1."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        folder = Path("/sys/fs/cgroup/cpu")
        try:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return default
    if quota in ("max", "-1"):
        return default
    return int(quota) // int(period)


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Returns the GPUs a process with this environment would see.

    Args:
        environ: environment variables; `CUDA_VISIBLE_DEVICES` is obeyed.

    Returns:
        Words that `CUDA_VISIBLE_DEVICES` takes (numbers or UUIDs), in order.
    """
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        words = [word.strip() for word in chosen.split(",")]
        # CUDA ignores all that stands after the first invalid entry.
        for position, word in enumerate(words):
            if not word or word.startswith("-"):
                return words[:position]
        return words
    return [str(number) for number in range(_count_gpus())]


def _count_gpus() -> int:
    """Counts NVIDIA GPUs by the driver's own tool, else by device files."""
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return len([p for p in Path("/dev").glob("nvidia*") if p.name[6:].isdigit()])
    return len(re.findall(r"^GPU \d+:", listing.stdout, re.MULTILINE))


def opened_gpus() -> list[int]:
    """Returns the GPUs on which this process has opened a CUDA context.

    By the driver, whichever framework opened it; nothing is opened by asking. The
    numbers are those of the visible GPUs.
    """
    try:
        if "/libcuda.so" not in Path("/proc/self/maps").read_text():
            return []
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if driver.cuDeviceGetCount(ctypes.byref(count)):  # not started
        return []
    opened = []
    for number in range(count.value):
        device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
        failed = driver.cuDeviceGet(ctypes.byref(device), number)
        failed = failed or driver.cuDevicePrimaryCtxGetState(
            device, ctypes.byref(flags), ctypes.byref(active)
        )
        if not failed and active.value:
            opened.append(number)
    return opened
