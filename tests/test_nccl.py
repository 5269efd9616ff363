"""NCCL: what is missing is named; on GPUs, the same promises as the others'.

A GPU for each rank, or one for all with NCCL_MULTI_RANK_GPU_ENABLE=1.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi_runtimes import launch
from mpi_runtimes import open_mpi
from mpi_runtimes import run

from distkeras._errors import CommunicatorError
from distkeras.communicators import Communicator
from distkeras.communicators import NCCLCommunicator
from distkeras.communicators._nccl_usable import unusable_reason

OPS = {"sum": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}
DTYPES = ("uint8", "int8", "int32", "int64", "float16", "float32", "float64")


def test_says_what_is_missing() -> None:
    reason = unusable_reason()
    if reason is not None:
        hints = ("pip install cupy-cuda12x", "driver", "pip install nvidia-nccl-cu12")
        assert any(hint in reason for hint in (*hints, "CUDA_VISIBLE_DEVICES"))


@pytest.mark.launches
def test_choosing_it_without_what_it_needs_is_an_error() -> None:
    reason = unusable_reason()
    if reason is None:
        pytest.skip("this machine has all it needs")
    text = "import distkeras; print('made', distkeras.init('nccl').name)"
    result = run([sys.executable, "-c", text], timeout=60)
    assert result.code == 1 and "made" not in result.output
    assert f"cannot be used on rank 0 ({open_host()}): {reason}" in result.output
    result = launch(open_mpi(), 2, ["-c", text], timeout=60)
    assert result.code != 0 and "made" not in result.output
    assert "cannot be used on ranks 0, 1" in result.output
    assert reason in result.output


def open_host() -> str:
    """The host name as MPI has it."""
    import socket

    return socket.gethostname()


@pytest.mark.launches
def test_without_a_visible_gpu_says_so(tmp_path: Any) -> None:
    """CuPy alone is not enough; a stand-in that must not be imported."""
    (tmp_path / "cupy.py").write_text("raise SystemExit('imported without a GPU')")
    text = (
        "from distkeras.communicators._nccl_usable import unusable_reason\n"
        "print(unusable_reason())"
    )
    result = run(
        [sys.executable, "-c", text],
        timeout=60,
        environ={"PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "-1"},
    )
    assert result.code == 0, result.tail
    assert result.output.strip() == ("CUDA shows no GPU (CUDA_VISIBLE_DEVICES is '-1')")


@pytest.fixture
def nccl(world: Communicator) -> Iterator[NCCLCommunicator]:
    """NCCL's communicator over all ranks, where every rank can have it."""
    reasons = [r for r in world.allgather_object(unusable_reason()) if r is not None]
    if reasons:
        pytest.skip(reasons[0])
    if world.size == 1:
        pytest.skip("needs mpiexec")
    communicator = NCCLCommunicator()
    yield communicator
    communicator.close()


def values(rank: int, dtype: Any, length: int = 17) -> np.ndarray:
    return ((np.arange(length) + rank) % 4 + 1).astype(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_allreduce(nccl: NCCLCommunicator, dtype: str, op: Any) -> None:
    import cupy

    for length in (1, 17, 17**3):
        everyone = [values(r, dtype, length) for r in range(nccl.size)]
        buffer = cupy.asarray(everyone[nccl.rank])
        nccl.allreduce(buffer, op)
        expected = OPS[op].reduce(everyone, dtype=everyone[0].dtype)
        np.testing.assert_array_equal(cupy.asnumpy(buffer), expected)


@pytest.mark.gpu
def test_bfloat16_is_native(nccl: NCCLCommunicator) -> None:
    import cupy
    import ml_dtypes

    try:
        buffer = cupy.asarray(values(nccl.rank, ml_dtypes.bfloat16))
    except (TypeError, ValueError) as error:
        pytest.skip(f"this CuPy has no bfloat16 arrays: {error}")
    nccl.allreduce(buffer)
    expected = sum(values(r, "float32") for r in range(nccl.size))
    np.testing.assert_array_equal(cupy.asnumpy(buffer).astype("float32"), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("op", ("min", "max", "sum"))
def test_nan_wins(nccl: NCCLCommunicator, op: Any) -> None:
    import cupy

    mine = [np.nan if nccl.rank == nccl.size - 1 else 1.0, 2.0]
    buffer = cupy.asarray(mine, dtype="float32")
    nccl.allreduce(buffer, op)
    assert np.isnan(cupy.asnumpy(buffer)).tolist() == [True, False]


@pytest.mark.gpu
def test_allgather_of_different_lengths(nccl: NCCLCommunicator) -> None:
    import cupy

    lengths = (17, 0, 32, 81, 12, 15, 23, 22)
    mine = cupy.asarray(values(nccl.rank, "float32", lengths[nccl.rank]))
    parts = nccl.allgather(mine)
    for rank, part in enumerate(parts):
        expected = values(rank, "float32", lengths[rank])
        np.testing.assert_array_equal(cupy.asnumpy(part), expected)


@pytest.mark.gpu
def test_broadcast_from_each_root(nccl: NCCLCommunicator) -> None:
    import cupy

    for root in range(nccl.size):
        buffer = cupy.asarray(values(nccl.rank, "int64"))
        nccl.broadcast(buffer, root)
        np.testing.assert_array_equal(cupy.asnumpy(buffer), values(root, "int64"))


@pytest.mark.gpu
def test_is_ordered_with_the_callers_stream(nccl: NCCLCommunicator) -> None:
    """No wait on the host between the kernels before, NCCL, and those after."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(20):
            buffer = cupy.zeros(1 << 20, "float32")
            for _ in range(20):
                buffer += 1
            nccl.allreduce(buffer, stream=stream)
            doubled = buffer * 2
            assert float(doubled.min()) == float(doubled.max()) == 40 * nccl.size
    nccl.synchronize()


@pytest.mark.gpu
def test_host_buffers_and_objects_go_by_mpi(nccl: NCCLCommunicator) -> None:
    buffer = np.full(3, nccl.rank, "float32")
    nccl.allreduce(buffer)
    assert buffer[0] == nccl.size * (nccl.size - 1) / 2
    assert nccl.allgather_object(nccl.rank) == list(range(nccl.size))
    assert nccl.broadcast_object(nccl.rank, nccl.size - 1) == nccl.size - 1


@pytest.mark.gpu
def test_wrong_buffers(nccl: NCCLCommunicator) -> None:
    import cupy

    with pytest.raises(ValueError, match="flat"):
        nccl.allreduce(cupy.ones((2, 2)))
    with pytest.raises(TypeError, match="NCCL can combine.*int16"):
        nccl.allreduce(cupy.ones(2, "int16"))
    count = cupy.cuda.runtime.getDeviceCount()
    if count > 1:
        with cupy.cuda.Device((nccl.device + 1) % count):
            elsewhere = cupy.ones(2)
        with pytest.raises(ValueError, match=f"buffer on GPU {nccl.device}"):
            nccl.allreduce(elsewhere)


@pytest.mark.gpu
def test_connects_when_it_is_told_to(nccl: NCCLCommunicator) -> None:
    import cupy

    assert cupy.cuda.Device().id == nccl.device  # for arrays of this thread
    for _ in range(2):
        nccl.connect()
        assert nccl._nccl is not None


@pytest.mark.gpu
def test_cuda_errors_are_told_at_once(nccl: NCCLCommunicator) -> None:
    """They were "not done yet", until the timeout."""
    import cupy

    nccl.connect()
    event = cupy.cuda.Event()
    event.record(nccl._stream)
    event.synchronize()
    assert nccl._is_done(event)
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
        nccl._is_done(SimpleNamespace(ptr=0))  # an invalid handle


@pytest.mark.gpu
def test_duplicates_and_closed(nccl: NCCLCommunicator) -> None:
    import cupy

    other = nccl.duplicate()
    buffer = cupy.ones(5, "float32")
    other.allreduce(buffer)
    assert float(buffer[0]) == nccl.size
    other.close()
    with pytest.raises(CommunicatorError, match="closed"):
        other.allreduce(buffer)
