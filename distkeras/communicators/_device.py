"""One process a GPU: which device a rank takes, and that no two take the same.

The devices are asked from NVIDIA's driver itself, so that neither TensorFlow nor
CuPy needs to be imported, and no context is opened, to know them.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import os
import sys
import uuid
import warnings
from collections.abc import Sequence
from typing import Any

from distkeras._errors import CommunicatorError
from distkeras._launcher import GROWTH
from distkeras.communicators._agreement import name_ranks

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE

#: NCCL's own switch for several ranks on a GPU (NCCL 2.31 and newer).
SHARING_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"

NO_GPU_IN_TENSORFLOW = (
    "TensorFlow lists none: it was built for CPUs, or does not find CUDA's libraries "
    "(`pip install tensorflow[and-cuda]`)"
)


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU that CUDA shows to this process.

    Attributes:
        index: its number among the visible ones.
        uuid: its name in the whole world, the same in every process.
    """

    index: int
    uuid: str


_pinned: Device | None = None


def visible_devices() -> tuple[Device, ...]:
    """Returns the GPUs that CUDA shows to this process; none without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    return tuple(Device(i, _uuid(driver, i)) for i in range(count.value))


def driver_failure() -> str | None:
    """Returns why NVIDIA's driver does not start; None if it does, or is not there.

    A driver without a GPU, or whose GPUs `CUDA_VISIBLE_DEVICES` hides, has not failed.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    code = driver.cuInit(0)
    if code in (0, _NO_DEVICE):
        return None
    text = ctypes.c_char_p()
    driver.cuGetErrorString(code, ctypes.byref(text))
    return f"{(text.value or b'unknown error').decode()} (CUDA's error {code})"


def _uuid(driver: Any, index: int) -> str:
    """Returns a device's UUID; the second version tells slices of a GPU apart."""
    handle = ctypes.c_int()
    data = (ctypes.c_ubyte * 16)()
    newer = getattr(driver, "cuDeviceGetUuid_v2", None)
    get_uuid = driver.cuDeviceGetUuid if newer is None else newer
    if driver.cuDeviceGet(ctypes.byref(handle), index) or get_uuid(data, handle):
        raise CommunicatorError(f"CUDA's driver gives no UUID for GPU {index}.")
    return str(uuid.UUID(bytes=bytes(data)))


def choose_device(local_rank: int, count: int) -> int | None:
    """Returns the index of the device for a rank, or `None` if there is none.

    Args:
        local_rank: the rank's number on its node.
        count: number of devices it sees. A launcher that sets
            `CUDA_VISIBLE_DEVICES` to one device a rank leaves only that.

    Example:
        >>> choose_device(2, 4), choose_device(2, 1), choose_device(2, 0)
        (2, 0, None)
    """
    return local_rank % count if count else None


def pin_device(local_rank: int) -> str:
    """Chooses this process' GPU, remembers it for CuPy and tells TensorFlow.

    Imports TensorFlow where it is installed and is Keras' backend, if there is a GPU.

    Args:
        local_rank: the rank's number on its node.

    Returns:
        What was chosen, in words.

    Raises:
        CommunicatorError: if TensorFlow has opened other GPUs already.
    """
    global _pinned
    devices = visible_devices()
    index = choose_device(local_rank, len(devices))
    _pinned = None if index is None else devices[index]
    if _pinned is None:
        _warn_of_driver()
        return "no GPU"
    if _is_for_tensorflow():
        configure_tensorflow()
    return f"GPU {_pinned.index} of {len(devices)} visible"


def _warn_of_driver() -> None:
    """Says so if there is a driver that does not start: GPUs would lie idle."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    failure = None if hidden else driver_failure()
    if failure is not None:
        warnings.warn(
            f"NVIDIA's driver is installed, but does not start: {failure}. Training "
            "goes on on the CPU; set CUDA_VISIBLE_DEVICES to nothing if that is meant.",
            RuntimeWarning,
            stacklevel=2,
        )


def _is_for_tensorflow() -> bool:
    """Whether TensorFlow is there, or will be.

    It must be told before it opens its GPUs, which nobody else does once this process
    knows its rank.
    """
    if "tensorflow" in sys.modules:
        return True
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    return backend == "tensorflow" and importlib.util.find_spec(backend) is not None


def pinned_device() -> Device | None:
    """Returns the GPU that `pin_device` chose; `None` before it, or without one."""
    return _pinned


def release_device() -> None:
    """Forgets the choice; TensorFlow keeps what it was told."""
    global _pinned
    _pinned = None


def sharing_allowed() -> bool:
    """Whether this process' environment allows several ranks on a GPU."""
    return os.environ.get(SHARING_VARIABLE, "0").strip() not in ("", "0")


def check_distinct(
    uuids: Sequence[str | None], hosts: Sequence[str], allowed: Sequence[bool]
) -> None:
    """Raises if two ranks took the same GPU.

    Args:
        uuids: every rank's device, by rank; `None` for a rank without one.
        hosts: every rank's host name.
        allowed: for every rank, whether its environment allows sharing.

    Raises:
        CommunicatorError: naming the ranks that share, and the ways out.
    """
    owners: dict[str, list[int]] = {}
    for rank, device in enumerate(uuids):
        if device is not None:
            owners.setdefault(device, []).append(rank)
    lines = [
        f"  {name_ranks(ranks)} on {hosts[ranks[0]]}: GPU {device}"
        for device, ranks in owners.items()
        if len(ranks) > 1 and not all(allowed[rank] for rank in ranks)
    ]
    if lines:
        raise CommunicatorError(
            "\n".join(
                [
                    "Expected every rank to have a GPU of its own. Received:",
                    *lines,
                    "Start one process a GPU, or let each see its own "
                    "(CUDA_VISIBLE_DEVICES, which some launchers set). To train on "
                    "the CPU set CUDA_VISIBLE_DEVICES to nothing; to share a GPU on "
                    f"purpose set {SHARING_VARIABLE}=1 (NCCL 2.31 or newer).",
                ]
            )
        )


def tensorflow_lists_gpus() -> bool:
    """Whether TensorFlow has a GPU to train on; True where it is not imported."""
    tf = sys.modules.get("tensorflow")
    return tf is None or bool(tf.config.list_physical_devices("GPU"))


def configure_tensorflow() -> None:
    """Lets TensorFlow see this process' GPU alone, with memory growth.

    Imports TensorFlow. Does nothing without a pinned device: one process keeps
    what Keras would do.

    Raises:
        CommunicatorError: if TensorFlow has opened other GPUs already.
    """
    if _pinned is None:
        return
    import tensorflow as tf

    devices = tf.config.list_physical_devices("GPU")
    if not devices:
        warnings.warn(
            f"NVIDIA's driver shows GPU {_pinned.index}, but {NO_GPU_IN_TENSORFLOW}. "
            "Training goes on on the CPU; set CUDA_VISIBLE_DEVICES to nothing if that "
            "is meant.",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    if _pinned.index >= len(devices):
        raise CommunicatorError(
            f"Expected TensorFlow to see GPU {_pinned.index}. Received: "
            f"{len(devices)} GPUs; the driver shows more of them."
        )
    device = devices[_pinned.index]
    try:
        if tf.config.get_visible_devices("GPU") != [device]:
            tf.config.set_visible_devices(device, "GPU")
    except RuntimeError as error:
        raise CommunicatorError(
            f"Expected TensorFlow to take GPU {_pinned.index} alone, but it has "
            f"opened its GPUs already: {error}. Call distkeras.init() before "
            "anything else of TensorFlow or Keras touches a device."
        ) from error
    if os.environ.get(GROWTH) == "true":  # as `distkeras run` sets it
        return
    try:
        tf.config.experimental.set_memory_growth(device, True)
    except (RuntimeError, ValueError) as error:
        warnings.warn(
            "TensorFlow's memory growth could not be switched on, it may take the "
            f"whole GPU and leave nothing for NCCL: {error}. Call distkeras.init() "
            f"before the model is made, or set {GROWTH}=true, as `distkeras "
            "run` does.",
            RuntimeWarning,
            stacklevel=2,
        )
