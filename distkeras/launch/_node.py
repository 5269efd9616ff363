"""Which GPUs this node has, found out without importing a framework."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path


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
