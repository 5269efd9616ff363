"""NCCL's bus bandwidth, and what handing gradients over to it costs; needs GPUs.

    distkeras run -n 8 benchmarks/nccl.py --json nccl.json
    NCCL_MULTI_RANK_GPU_ENABLE=1 distkeras run -n 2 benchmarks/nccl.py  # on one GPU

For each size: the allreduce of a lasting buffer on the device, in place; the same
with the copy into it and back, as a bucket of gradients goes; and packing alone, as
a fused concatenation of `--tensors` tensors into a flat one. Bus bandwidth is
2 (N - 1) / N times the bytes, over the seconds of the slowest rank: what each link
must have carried, comparable over numbers of ranks (as nccl-tests define it).

Not run on a GPU yet: this script is how to.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from distkeras.communicators import NCCLCommunicator
from distkeras.communicators import world
from distkeras.communicators._nccl_usable import unusable_reason


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", default="1,4,16,64,256")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tensors", type=int, default=64, help="that make a bucket")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    reason = unusable_reason()
    if reason is not None:
        sys.exit(f"nothing to measure: {reason}")
    communicator = NCCLCommunicator()
    records = []
    for word in options.megabytes.split(","):
        nbytes = int(float(word) * 2**20)
        for name, run in contenders(communicator, nbytes, options).items():
            seconds = [timed(communicator, run) for _ in range(options.rounds)]
            records.append({"bytes": nbytes, "name": name, "seconds": seconds})
    if world().rank == 0:
        report(records, communicator, options)
    communicator.close()


def contenders(
    communicator: Any, nbytes: int, options: argparse.Namespace
) -> dict[str, Callable[[], None]]:
    """Returns what is measured at one size, by name."""
    import cupy

    length = nbytes // np.dtype(options.dtype).itemsize
    buffer = cupy.zeros(length, options.dtype)
    source, target = cupy.zeros_like(buffer), cupy.zeros_like(buffer)
    pieces = cupy.array_split(source, options.tensors)

    def allreduce() -> None:
        communicator.allreduce(buffer)

    def in_and_out() -> None:
        buffer[...] = source
        communicator.allreduce(buffer)
        target[...] = buffer

    def pack() -> None:
        cupy.concatenate(pieces, out=buffer)

    return {"allreduce": allreduce, "in and out": in_and_out, "packing alone": pack}


def timed(communicator: Any, run: Callable[[], None], repeats: int = 10) -> float:
    """Returns the slowest rank's seconds of one run, by the device's own clock."""
    import cupy

    run()
    communicator.synchronize()
    communicator.barrier()
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    communicator.synchronize()
    slowest = np.array([cupy.cuda.get_elapsed_time(start, end) / 1e3 / repeats])
    communicator.allreduce(slowest, "max")
    return float(slowest[0])


def report(
    records: list[dict[str, Any]], communicator: Any, options: argparse.Namespace
) -> None:
    """Prints the table, and writes the raw numbers."""
    ranks = communicator.size
    print(f"{communicator.library}, {ranks} ranks, {options.dtype}, medians")
    print(f"{'MiB':>8} {'':<16}{'ms':>10}{'GB/s on the bus':>18}")
    for record in records:
        median = statistics.median(record["seconds"])
        bus = 2 * (ranks - 1) / ranks * record["bytes"] / median / 1e9
        shown = "" if record["name"] == "packing alone" else f"{bus:.1f}"
        print(
            f"{record['bytes'] / 2**20:>8.4g} {record['name']:<16}"
            f"{1e3 * median:>10.3f}{shown:>18}"
        )
    if options.json:
        about = {"ranks": ranks, "library": communicator.library}
        text = json.dumps({**about, "dtype": options.dtype, "records": records})
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
