"""What a checkpoint adds to the steps in which it is taken and written, in pairs.

    distkeras run -n 2 benchmarks/checkpoint.py
    python benchmarks/checkpoint.py --pairs 31 --json checkpoint.json

The recipe's ResNet-20 trains by `Trainer.fit` with a `Checkpoint` every eight steps. A
pair is a step with a checkpoint and the step four later, which has none: taking the
state is part of the one step, writing the file goes on during the next one, and is over
long before the other half of the pair. Printed are medians over pairs, on rank 0: of
both steps, of their ratios, and of what both together add, in shares of a step. Then
the raw numbers, as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import distkeras
from distkeras.recipes.models import resnet_small

EVERY = 8


class Begins(keras.callbacks.Callback):
    """Notes when steps begin: what callbacks do after one is part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Notes."""
        self.times.append(time.perf_counter())


def measure(options: argparse.Namespace) -> list[float]:
    """Trains; returns the seconds of each step of this rank."""
    keras.utils.set_random_seed(0)
    generator = np.random.default_rng(distkeras.rank())
    x = generator.normal(size=(options.batch, 32, 32, 3)).astype("float32")
    y = generator.integers(0, 10, size=options.batch)
    data = tf.data.Dataset.from_tensors((x, y)).cache().repeat()
    trainer = distkeras.Trainer(resnet_small(20))
    trainer.compile(
        keras.optimizers.SGD(0.01, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=options.jit,
    )
    begins = Begins()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = distkeras.callbacks.Checkpoint(
            distkeras.broadcast_object(folder),
            every_steps=EVERY,
            every_epochs=None,
            background=not options.foreground,
        )
        trainer.fit(
            data,
            steps_per_epoch=EVERY * (options.pairs + 2),
            verbose=0,
            shard=False,
            callbacks=[checkpoint, begins],
        )
    return [b - a for a, b in zip(begins.times, begins.times[1:], strict=False)]


def report(seconds: Sequence[float], pairs: int) -> list[dict[str, float]]:
    """Prints the medians; returns the raw numbers, in seconds."""
    rows = []
    for n in range(1, pairs + 1):  # the first one comes while caches fill
        taken = EVERY * n - 1  # after this step, counted from 0
        rows.append(
            {
                "taken": seconds[taken],
                "written": seconds[taken + 1],
                "without": seconds[taken + 4],
                "without, the next": seconds[taken + 5],
            }
        )

    def median(value: Any) -> float:
        return statistics.median(value(row) for row in rows)

    step = median(lambda row: row["without"])
    taking = median(lambda row: row["taken"] / row["without"])
    writing = median(lambda row: row["written"] / row["without, the next"])
    added = median(
        lambda row: (
            row["taken"] + row["written"] - row["without"] - row["without, the next"]
        )
    )
    print(
        f"ResNet-20, {distkeras.size()} ranks, {pairs} pairs: a step "
        f"{1e3 * step:.1f} ms; with the state taken x{taking:.3f}; with the file being "
        f"written x{writing:.3f}; both together add {1e3 * added:.1f} ms, "
        f"{added / step:.1%} of a step"
    )
    return rows


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--batch", type=int, default=32, help="images a rank")
    parser.add_argument("--jit", action="store_true")
    parser.add_argument("--foreground", action="store_true", help="wait for the file")
    parser.add_argument("--json", help="a file for the raw numbers, too")
    options = parser.parse_args()
    seconds = measure(options)
    if distkeras.rank() > 0:
        return 0
    raw = {"options": vars(options), "seconds": report(seconds, options.pairs)}
    print(json.dumps(raw))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(raw, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
