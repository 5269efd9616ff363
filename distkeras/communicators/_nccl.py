"""The communicator of device memory: NCCL through CuPy's low-level binding.

NCCL has no launcher and no objects: it is composed with an MPI communicator, which
brings its id to all ranks and carries whatever is not on a device. Written after
NCCL's and CuPy's documentation; not run on a GPU yet.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from distkeras._errors import CommunicatorError
from distkeras.communicators import _elastic
from distkeras.communicators._agreement import collectively
from distkeras.communicators._base import Op
from distkeras.communicators._checks import check_buffer
from distkeras.communicators._checks import check_op
from distkeras.communicators._checks import check_open
from distkeras.communicators._checks import check_root
from distkeras.communicators._composed import ComposedCommunicator
from distkeras.communicators._device import choose_device
from distkeras.communicators._device import pinned_device
from distkeras.communicators._mpi import MPICommunicator
from distkeras.communicators._nccl_usable import check_usable
from distkeras.communicators._waiting import Calls

# ncclDataType_t; CuPy's own table has bfloat16 since version 14.
_DTYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
}
_BYTE = _DTYPES["uint8"]

# ncclRedOp_t.
_OPS = {"sum": 0, "product": 1, "max": 2, "min": 3}

_NOT_READY = 600  # cudaErrorNotReady


class NCCLCommunicator(ComposedCommunicator):
    """Collectives on CuPy buffers by NCCL, one GPU a rank; not run on a GPU yet.

    Buffers of NumPy go to the MPI communicator it is composed with. Work on device
    buffers is ordered by streams, without waiting on the host: it starts after what
    the caller's stream holds, runs on a stream of its own, and what the caller's
    stream does afterwards comes after it. `synchronize` waits for it, and sees
    errors that NCCL reports late.

    NCCL itself is connected at the first collective on a device buffer, when the
    device has been chosen, or by `connect`.

    Args:
        host: the MPI communicator to compose with, owned from here on; by
            default a duplicate of MPI's world.

    Raises:
        CommunicatorError: on every rank, if a rank lacks a GPU, CuPy or NCCL; the
            message says which, and which package or driver brings it.

    Example:
        >>> communicator = NCCLCommunicator()  # doctest: +SKIP
        >>> buffer = cupy.ones(3, "bfloat16")  # doctest: +SKIP
        >>> communicator.allreduce(buffer)  # doctest: +SKIP
    """

    name = "nccl"

    def __init__(self, host: MPICommunicator | None = None) -> None:
        """Checks on every rank that NCCL can be used; collective."""
        super().__init__(host)
        check_usable(self._host)
        self._cupy: Any = importlib.import_module("cupy")
        self._binding: Any = importlib.import_module("cupy.cuda.nccl")
        self._lock = threading.Lock()
        self._nccl: Any = None
        self._stream: Any = None
        self._finished: Any = None
        self._calls = Calls(self._host.calls.members, self._host.calls)
        self._calls.pending = self._works
        self._device = self._find_device()
        # For arrays that are made on this thread next.
        self._device_context().use()
        _elastic.register_device(self)

    def _find_device(self) -> int:
        """Returns the index of this rank's GPU."""
        pinned = pinned_device()
        if pinned is not None:
            return pinned.index
        count = int(self._cupy.cuda.runtime.getDeviceCount())
        return choose_device(self.local_rank, count) or 0

    @property
    def device(self) -> int:
        """The index of this rank's GPU among those that CUDA shows it."""
        return self._device

    def connect(self) -> None:
        """Connects NCCL now, by a sum of one number; collective.

        It needs some hundred MB of the device, which TensorFlow takes for itself as
        training goes on, and never gives back.

        Raises:
            CommunicatorError: if NCCL fails.
        """
        with self._device_context():
            number = self._cupy.zeros(1, "float32")
        self.allreduce(number)
        self.synchronize()

    @property
    def library(self) -> str:
        """NCCL and its version."""
        version = int(self._binding.get_version())
        # 2.9 and later count in steps of 10000, as 21803 for 2.18.3.
        return f"NCCL {version // 10000}.{version // 100 % 100}.{version % 100}"

    def allreduce(self, buffer: Any, op: Op = "sum", *, stream: Any = None) -> None:
        """Combines `buffer` over all ranks, in place.

        Args:
            buffer: flat CuPy array (on this rank's device) or NumPy array, the
                same length and dtype on every rank. Half precision is combined
                by NCCL itself.
            op: "sum", "min", "max" or "product". A NaN on any rank makes the
                element NaN.
            stream: the `cupy.cuda.Stream` the buffer was written on and will be
                read on; CuPy's current one by default.
        """
        check_open(self._closed)
        if isinstance(buffer, np.ndarray):
            self._host.allreduce(buffer, op)
            return
        check_op(op)
        check_buffer(buffer, writable=True)
        self._check_device(buffer)
        if buffer.dtype.kind == "b":
            buffer = buffer.view("uint8")
            op = {"sum": "max", "product": "min"}.get(op, op)  # type: ignore[assignment]
        elif buffer.dtype.kind == "c" and op == "sum":
            buffer = buffer.view(f"f{buffer.dtype.itemsize // 2}")
        number = _dtype_number(buffer.dtype)
        floating = buffer.dtype.kind not in "iu"
        if not buffer.size:
            return
        noted = self._calls("allreduce", buffer.nbytes, op)
        with noted, self._ordered(stream) as (nccl, own):
            if not (floating and op in ("min", "max")):
                self._reduce(nccl, own, buffer, number, op)
                return
            # NCCL's minimum drops NaNs, as C's fmin does.
            missing = (buffer != buffer).astype("uint8")
            self._reduce(nccl, own, buffer, number, op)
            self._reduce(nccl, own, missing, _BYTE, "max")
            buffer[missing.view("bool")] = float("nan")

    def _reduce(self, nccl: Any, own: Any, buffer: Any, number: int, op: str) -> None:
        at = buffer.data.ptr
        nccl.allReduce(at, at, buffer.size, number, _OPS[op], own.ptr)

    def allgather(self, buffer: Any, *, stream: Any = None) -> list[Any]:
        """Returns every rank's `buffer`, by rank.

        Args:
            buffer: flat CuPy or NumPy array; lengths may differ, the dtype may not.
                The lengths travel by MPI.
            stream: as in `allreduce`.
        """
        check_open(self._closed)
        if isinstance(buffer, np.ndarray):
            return self._host.allgather(buffer)
        check_buffer(buffer, writable=False)
        self._check_device(buffer)
        cupy = self._cupy
        counts = [int(n) for n in self._host.allgather(np.array([buffer.nbytes]))]
        longest = max(counts)
        with self._device_context(), stream or contextlib.nullcontext():
            # On the caller's stream, which they belong to from here on. A plain
            # copy: no kernel to compile, and what pads a short one does not matter.
            mine = cupy.empty(longest, "uint8")
            caller = cupy.cuda.get_current_stream()
            mine.data.copy_from_device_async(buffer.data, buffer.nbytes, caller)
            everyone = cupy.empty((self.size, longest), "uint8")
        if longest:
            noted = self._calls("allgather", longest)
            with noted, self._ordered(stream) as (nccl, own):
                nccl.allGather(
                    mine.data.ptr, everyone.data.ptr, longest, _BYTE, own.ptr
                )
        return [
            row[:count].view(buffer.dtype)
            for row, count in zip(everyone, counts, strict=True)
        ]

    def broadcast(self, buffer: Any, root: int = 0, *, stream: Any = None) -> None:
        """Overwrites `buffer` with that of rank `root`, in place.

        Args:
            buffer: flat CuPy or NumPy array, the same length and dtype everywhere.
            root: the rank that sends, the same on every rank.
            stream: as in `allreduce`.
        """
        check_open(self._closed)
        if isinstance(buffer, np.ndarray):
            self._host.broadcast(buffer, root)
            return
        check_root(root, self.size)
        check_buffer(buffer, writable=True)
        self._check_device(buffer)
        if not buffer.size:
            return
        noted = self._calls("broadcast", buffer.nbytes, root)
        with noted, self._ordered(stream) as (nccl, own):
            at = buffer.data.ptr
            nccl.broadcast(at, at, buffer.nbytes, _BYTE, root, own.ptr)

    def barrier(self) -> None:
        """Returns once every rank has called it; device work may still run."""
        check_open(self._closed)
        self._host.barrier()

    def duplicate(self) -> NCCLCommunicator:
        """Returns the same group with a message space of its own; collective."""
        check_open(self._closed)
        return NCCLCommunicator(self._host.duplicate())

    def synchronize(self) -> None:
        """Waits for all device work given so far.

        Raises:
            CommunicatorError: if NCCL reports that a peer or the network failed;
                the NCCL communicator is aborted then, so that no kernel waits on.
        """
        check_open(self._closed)
        if _elastic.lost():
            raise CommunicatorError(_elastic.LOST)
        nccl = self._nccl
        if nccl is None:
            return
        with self._calls.again(), self._device_context(), self._failures():
            done = self._cupy.cuda.Event(disable_timing=True)
            done.record(self._stream)
            spins = 0
            # A plain wait would never come back after a peer's death.
            while not self._is_done(done):
                if _elastic.lost():
                    raise CommunicatorError(_elastic.LOST)
                nccl.check_async_error()
                spins += 1
                time.sleep(0 if spins < 1000 else 0.0005)
            # Kernels that were aborted are done as well.
            if _elastic.lost():
                raise CommunicatorError(_elastic.LOST)
            nccl.check_async_error()

    def close(self) -> None:
        """Frees NCCL's communicator and MPI's; collective, once."""
        if self._closed:
            return
        if self._nccl is not None:
            self.synchronize()
            with self._device_context():
                self._nccl.destroy()
        self._closed = True
        self._calls.close()
        self._host.close()

    def interrupt(self) -> None:
        """Ends the device's work when a rank is lost; on any thread.

        Kernels of NCCL wait for their peers without end, and streams for them.
        """
        nccl, self._nccl = self._nccl, None
        if nccl is not None:
            with self._device_context():
                nccl.abort()

    def _works(self) -> bool:
        """Whether device work is not done yet; for the watchdog's thread."""
        if self._finished is None:
            return False
        with self._device_context():
            state = self._cupy.cuda.runtime.eventQuery(self._finished.ptr)
        return bool(state == _NOT_READY)

    def _is_done(self, event: Any) -> bool:
        """Whether the device has come to an event; raises what CUDA says instead.

        CuPy's `Event.done` is False for ever after an error.
        """
        runtime = self._cupy.cuda.runtime
        state = runtime.eventQuery(event.ptr)
        if state not in (0, _NOT_READY):
            raise runtime.CUDARuntimeError(state)
        return bool(state == 0)

    def _check_device(self, buffer: Any) -> None:
        """Raises if a buffer is on another GPU: NCCL would read wrong memory."""
        if buffer.data.device_id != self._device:
            raise ValueError(
                f"Expected a buffer on GPU {self._device}, that of rank {self.rank}. "
                f"Received: one on GPU {buffer.data.device_id}. Make it under `with "
                f"cupy.cuda.Device({self._device}):`."
            )

    def _device_context(self) -> Any:
        """CUDA's current device is a thread's own, and a step runs on many."""
        return self._cupy.cuda.Device(self._device)

    @contextlib.contextmanager
    def _ordered(self, stream: Any) -> Iterator[tuple[Any, Any]]:
        """Gives NCCL's communicator and its stream, in order with the caller's."""
        with self._device_context():
            caller = self._cupy.cuda.get_current_stream() if stream is None else stream
            nccl = self._connect()
            own = self._stream
            with self._failures():
                ready = self._cupy.cuda.Event(disable_timing=True)
                ready.record(caller)
                own.wait_event(ready)
                with own:
                    yield nccl, own
                finished = self._cupy.cuda.Event(disable_timing=True)
                finished.record(own)
                caller.wait_event(finished)
                self._finished = finished

    def _connect(self) -> Any:
        """Returns NCCL's communicator, connected at the first call; collective."""
        with self._lock:
            if self._nccl is None:
                with self._failures():
                    # A failure of rank 0 is everyone's.
                    mine = collectively(
                        self._host,
                        self._draw_id,
                        what="drawing NCCL's id",
                        advice="NCCL_DEBUG=WARN in the environment makes NCCL say "
                        "more; DISTKERAS_COMMUNICATOR=mpi does without it.",
                    )
                    shared = self._host.broadcast_object(mine)
                    self._nccl = self._binding.NcclCommunicator(
                        self.size, shared, self.rank
                    )
                    self._stream = self._cupy.cuda.Stream(non_blocking=True)
            return self._nccl

    def _draw_id(self) -> Any:
        """Returns NCCL's id on rank 0, where a thread then waits for all others."""
        return self._binding.get_unique_id() if self.rank == 0 else None

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Aborts NCCL after its errors, so that no peer's kernel waits for ours."""
        try:
            yield
        # CuPy looks NCCL's errors up in a table that lacks the newer numbers.
        except (
            self._binding.NcclError,
            self._cupy.cuda.runtime.CUDARuntimeError,
            KeyError,
        ) as error:
            nccl, self._nccl = self._nccl, None
            if nccl is not None:
                nccl.abort()
            confined = ""
            if "SLURM_JOB_ID" in os.environ:
                confined = (
                    " Under Slurm every task must be let see all GPUs of its node "
                    "(`--gpus-per-node`, `--gpu-bind=none`; not `--gpus-per-task`)."
                )
            raise CommunicatorError(
                f"NCCL failed on rank {self.rank} ({self.hosts[self.rank]}, GPU "
                f"{self._device}): {error}. A peer may have ended, or the GPU's memory "
                "may be full; NCCL_DEBUG=WARN in the environment makes NCCL say more."
                f"{confined}"
            ) from error


def _dtype_number(dtype: Any) -> int:
    """Returns NCCL's number of a dtype."""
    number = _DTYPES.get(dtype.name)
    if number is None:
        raise TypeError(
            f"Expected a dtype that NCCL can combine ({', '.join(_DTYPES)}). "
            f"Received: {dtype.name}"
        )
    return number
