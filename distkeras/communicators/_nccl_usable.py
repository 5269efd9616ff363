"""Whether NCCL can be used here, and what is missing if not."""

from __future__ import annotations

import importlib.util
import os
import warnings

from distkeras._errors import CommunicatorError
from distkeras.communicators._agreement import name_ranks
from distkeras.communicators._base import Communicator
from distkeras.communicators._device import NO_GPU_IN_TENSORFLOW
from distkeras.communicators._device import driver_failure
from distkeras.communicators._device import tensorflow_lists_gpus
from distkeras.communicators._device import visible_devices


def unusable_reason() -> str | None:
    """Returns what this process lacks to use NCCL, or `None` if nothing.

    The text names the driver, the variable or the pip package that would help.
    Cheap things first: CuPy is imported only if the driver shows a GPU.
    """
    if importlib.util.find_spec("cupy") is None:
        return (
            "CuPy is not installed (`pip install cupy-cuda12x nvidia-nccl-cu12`; "
            "TensorFlow brings CUDA 12, and drivers of CUDA 13 run it)"
        )
    if not visible_devices():
        failure = driver_failure()
        if failure is not None:
            return f"NVIDIA's driver does not start: {failure}"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            return f"CUDA shows no GPU (CUDA_VISIBLE_DEVICES is {visible!r})"
        return (
            "CUDA shows no GPU: this machine has none, or NVIDIA's driver "
            "(libcuda.so.1) is not installed"
        )
    if not tensorflow_lists_gpus():
        return f"CUDA shows a GPU, but {NO_GPU_IN_TENSORFLOW}"
    try:
        with warnings.catch_warnings():
            # CuPy warns of a missing NCCL; it is reported below.
            warnings.simplefilter("ignore")
            cupy = importlib.import_module("cupy")
            nccl = importlib.import_module("cupy.cuda.nccl")
    except Exception as error:  # any broken CUDA installation has its own
        return (
            f"CuPy cannot be imported ({type(error).__name__}: {error}); its pip "
            "package must be that of TensorFlow's CUDA (cupy-cuda12x)"
        )
    if not getattr(nccl, "available", False):
        return "NCCL's library is missing (`pip install nvidia-nccl-cu12`)"
    try:
        cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        return (
            f"CUDA's runtime does not start ({error}); the driver may be older than "
            "CuPy's CUDA: update it, or install the CuPy of its CUDA"
        )
    return None


def check_usable(host: Communicator) -> None:
    """Raises on every rank if one of them cannot use NCCL; collective."""
    reasons = host.allgather_object(unusable_reason())
    lacking = [rank for rank, reason in enumerate(reasons) if reason is not None]
    if lacking:
        first = lacking[0]
        raise CommunicatorError(
            f"The nccl communicator cannot be used on {name_ranks(lacking)} "
            f"({host.hosts[first]}): {reasons[first]}. The mpi communicator works on "
            "any machine (DISTKERAS_COMMUNICATOR=mpi)."
        )
