"""What `Trainer` costs with one rank: `Trainer.fit` beside `keras.Model.fit`.

    python benchmarks/single.py

Both train the same model in turn, an epoch each. Printed are the medians and the
median of the ratios pair by pair, and whether MPI was imported.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import keras
import numpy as np

import distkeras


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    generator = np.random.default_rng(0)
    x = generator.normal(size=(32 * options.steps, 784)).astype("float32")
    y = generator.integers(0, 10, size=len(x))
    layers = keras.layers

    def make() -> keras.Model:
        model = keras.Sequential(
            [
                keras.Input((784,)),
                layers.Dense(128, activation="relu"),
                layers.Dense(128, activation="relu"),
                layers.Dense(10),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01), loss=loss)
        return model

    def seconds(trainer: Any) -> float:
        start = time.perf_counter()
        trainer.fit(x, y, batch_size=32, epochs=1, verbose=0)
        return time.perf_counter() - start

    plain, wrapped = make(), distkeras.Trainer(make())
    seconds(plain)
    seconds(wrapped)
    pairs = []
    for number in range(options.pairs):
        # Who goes first alternates, as the second may find warmer caches.
        if number % 2:
            a, b = seconds(wrapped), seconds(plain)
        else:
            b, a = seconds(plain), seconds(wrapped)
        pairs.append((a / options.steps, b / options.steps))
    ratio = statistics.median(a / b for a, b in pairs)
    trainer_ms, keras_ms = (
        1e3 * statistics.median(c) for c in zip(*pairs, strict=True)
    )
    print(
        f"MLP 784-128-128-10, batch 32, {options.pairs} pairs of {options.steps} "
        f"steps: Trainer {trainer_ms:.3f} ms a step, Keras {keras_ms:.3f} ms, "
        f"ratio {ratio:.3f}; mpi4py imported: {'mpi4py' in sys.modules}"
    )


if __name__ == "__main__":
    main()
