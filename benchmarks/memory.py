"""What the exchange takes in memory beyond plain Keras, and whether that grows.

    python benchmarks/memory.py -n 2 --steps 1000

Two jobs train the same model, one after another: one in which gradients are exchanged,
one in which ranks only wait for each other. Each rank's proportional share of memory
(PSS: what several ranks map counts once) is read after 20 steps and after all. Printed
is what the exchange adds, in multiples of the gradients' bytes, and how much both grew.
With `--json FILE` the raw numbers. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_EARLY = 20

# Lets the C library give memory back when it is freed: what is read is what is in use.
_AT_ONCE = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}


def pss() -> int:
    """Returns this process' proportional share of memory in bytes."""
    text = Path("/proc/self/smaps_rollup").read_text()
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    if found is None:
        raise RuntimeError("expected a line Pss in /proc/self/smaps_rollup")
    return 1024 * int(found[1])


def work(kind: str, steps: int, width: int, out: Path) -> None:
    """Trains on this rank; rank 0 writes what was measured."""
    sys.path.insert(0, str(HERE))
    import keras
    import numpy as np
    import tensorflow as tf
    from step import BarrierExchange

    from distkeras import backends
    from distkeras.communicators import world
    from distkeras.gradients import GradientExchange

    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((64,)), *(layers.Dense(width) for _ in range(4)), layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(1e-6), "mse", jit_compile=False)
    x = np.ones((2, 64), "float32")
    dataset = tf.data.Dataset.from_tensors((x, x[:, :1])).cache().repeat()
    model._symbolic_build(data_batch=(tf.constant(x), tf.constant(x[:, :1])))
    backend = backends.current()
    make = GradientExchange if kind == "exchange" else BarrierExchange
    exchange = make(world())
    function = backend.train_function(model, backend.exchange(exchange), uneven=False)
    iterator = iter(dataset)
    readings = []
    for step in range(1, steps + 1):
        function(iterator)
        if step in (_EARLY, steps):
            world().barrier()
            readings.append(pss())
            world().barrier()
    everyone = world().allgather_object(readings)
    if world().rank == 0:
        gradients = 4 * model.count_params()
        out.write_text(json.dumps({"gradients": gradients, "pss": everyone}))


def measure(n: int, steps: int, width: int) -> dict[str, Any]:
    """Starts both jobs; returns what they read, by kind."""
    found: dict[str, Any] = {}
    for kind in ("barrier", "exchange"):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.json"
            words = [sys.executable, "-m", "distkeras", "run", "-n", str(n), __file__]
            words += ["--worker", kind, "--out", str(out), "--steps", str(steps)]
            words += ["--width", str(width)]
            subprocess.run(words, check=True, env={**os.environ, **_AT_ONCE})
            found[kind] = json.loads(out.read_text())
    return found


def summary(found: dict[str, Any]) -> dict[str, float]:
    """Returns multiples of the gradients' bytes, and bytes of growth, at most."""
    gradients = found["exchange"]["gradients"]
    pairs = zip(found["exchange"]["pss"], found["barrier"]["pss"], strict=True)
    added = max((mine[-1] - plain[-1]) / gradients for mine, plain in pairs)
    growth = {
        kind: max(float(late - early) for early, late in found[kind]["pss"])
        for kind in found
    }
    return {"added": added, **growth}


def main() -> None:
    """Measures and prints, or is one rank of a job."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, default=2, help="ranks")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--width", type=int, default=1500, help="of four layers")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.steps, options.width, options.out)
        return
    found = measure(options.n, options.steps, options.width)
    figures = summary(found)
    print(
        f"{options.n} ranks, gradients of {found['exchange']['gradients'] / 1e6:.1f} "
        f"MB: the exchange takes {figures['added']:.2f} times their bytes; from step "
        f"{_EARLY} to {options.steps} memory grew by {figures['exchange'] / 1e6:.2f} "
        f"MB, without the exchange by {figures['barrier'] / 1e6:.2f} MB"
    )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
