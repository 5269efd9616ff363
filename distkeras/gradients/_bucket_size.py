"""How large a bucket should be, from a short measurement of the allreduce.

Small buckets can travel while the rest of the backward pass still runs, but each
costs a call; large ones cost nothing extra, but the last one is waited for in full.
The size chosen is the smallest at which that cost is a small share of the transfer
(Li et al. 2020, "PyTorch Distributed", arXiv:2006.15704, section 5.2, find the best
size to depend on the network as well, and leave it to the user).
"""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

import numpy as np

from distkeras.communicators import Communicator
from distkeras.gradients._plan import DEFAULT_BUCKET_BYTES

FIRST_BUCKET_BYTES = 2**20
"""Bound of the first bucket, which lets the exchange begin early."""

_SMALLEST, _LARGEST = 2**20, 2**25
_SHARE = 20  # times that the transfer of a bucket takes what the bucket itself costs
_CALL = 1e-4  # seconds, for going from the framework to Python and back
_SMALL, _LARGE = 2**12, 2**20  # bytes of the messages that are timed
_TIMES = 5


class BucketSize(NamedTuple):
    """A size in bytes, and why."""

    bytes: int
    reason: str


def choose_bucket_bytes(communicator: Communicator) -> BucketSize:
    """Returns the size of buckets for an exchange over `communicator`; collective.

    The same on every rank. Measured only where the result of an allreduce does not
    depend on how it is cut (`Communicator.fixed_order`): where it does, a size that
    were another in each run would take the reproducible weights away.
    """
    if communicator.size == 1:
        return BucketSize(DEFAULT_BUCKET_BYTES, "nothing is exchanged")
    if communicator.name == "nccl":
        return BucketSize(DEFAULT_BUCKET_BYTES, "not measured on devices")
    communicator.allreduce(np.zeros(1, np.float32))  # finds out how it is done
    if not communicator.fixed_order:
        return BucketSize(
            DEFAULT_BUCKET_BYTES,
            f"sums over {communicator.size} ranks by {communicator.name} depend on "
            "their cuts, so that a measured size would not reproduce",
        )
    return _size_for(*_measure(communicator))


def _size_for(small: float, large: float) -> BucketSize:
    """Returns the size that follows from what was measured.

    Args:
        small: seconds of an allreduce of `_SMALL` bytes.
        large: seconds of one of `_LARGE` bytes.
    """
    if large <= small:
        return BucketSize(
            DEFAULT_BUCKET_BYTES,
            f"the default: {_LARGE >> 10} KiB took no longer than {_SMALL >> 10} KiB "
            f"({1e3 * large:.3f} and {1e3 * small:.3f} ms), so that other work on the "
            "cores has spoilt the measurement",
        )
    rate = (_LARGE - _SMALL) / (large - small)
    wanted = _SHARE * (small + _CALL) * rate
    # Powers of two, so that it is mostly the same in each run.
    size = 2 ** round(np.log2(wanted)) if wanted > 1 else _SMALLEST
    return BucketSize(
        int(min(max(size, _SMALLEST), _LARGEST)),
        f"measured: an allreduce takes {1e3 * small:.3f} ms and {rate / 1e6:.0f} MB/s",
    )


def _measure(communicator: Communicator) -> tuple[float, float]:
    """Returns seconds that an allreduce takes, of a small message and a large one."""
    medians = np.zeros(2)
    for number, nbytes in enumerate((_SMALL, _LARGE)):
        buffer = np.zeros(nbytes // 4, np.float32)
        communicator.allreduce(buffer)  # the first one makes buffers, connections
        times = []
        for _ in range(_TIMES):
            communicator.barrier()
            start = time.perf_counter()
            communicator.allreduce(buffer)
            times.append(time.perf_counter() - start)
        medians[number] = statistics.median(times)
    communicator.allreduce(medians, "max")
    small, large = medians
    return float(small), float(large)
