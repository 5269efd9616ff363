"""What `distkeras doctor` runs on two ranks: one allreduce, checked and timed.

Answers by a line of JSON from rank 0, and from each rank that fails: what launchers
and MPI write when a job is ended by force comes in any order, and in any length.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from distkeras import communicators

_ELEMENTS = 1 << 22  # 16 MiB of float32
_ROUNDS = 5


def main(argv: Sequence[str] | None = None) -> None:
    """Reduces a buffer on all ranks and says how that went.

    Args:
        argv: `device` for buffers of the GPU; those of the process if None.

    Raises:
        RuntimeError: the sum is wrong.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        _reduce(words)
    except Exception as error:
        # Not by rank: where ranks do not find each other each one is rank 0.
        said = {"error": f"{type(error).__name__}: {error}"}
        print("\n" + json.dumps({f"failed in {os.getpid()}": said}), flush=True)
        raise


def _reduce(words: Sequence[str]) -> None:
    world = communicators.world()
    arrays: Any = np
    if words == ["device"]:
        arrays = importlib.import_module("cupy")
    buffer = arrays.full(_ELEMENTS, world.rank + 1, np.float32)
    world.allreduce(buffer)
    expected = world.size * (world.size + 1) / 2
    if not bool((buffer == expected).all()):
        raise RuntimeError(
            f"Expected an allreduce of {_ELEMENTS} numbers to give {expected} "
            f"everywhere. Received: {buffer.min()} to {buffer.max()}"
        )
    seconds = []
    for _ in range(_ROUNDS):
        world.barrier()
        start = time.perf_counter()
        world.allreduce(buffer)
        if arrays is not np:  # the call only starts it
            arrays.cuda.Device().synchronize()
        seconds.append(time.perf_counter() - start)
    if world.rank == 0:
        answer = {
            "ranks": world.size,
            "hosts": list(world.hosts),
            "bytes": buffer.nbytes,
            "seconds": min(seconds),
            "communicator": communicators.describe(),
        }
        print("\n" + json.dumps({"allreduce": answer}), flush=True)


if __name__ == "__main__":
    main()
