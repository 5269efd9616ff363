"""What the gradient exchange adds to a training step, in pairs.

    distkeras run -n 2 benchmarks/step.py --model resnet20
    distkeras run -n 2 benchmarks/step.py --model mlp --pairs 15

Two identical models train in turn, a block of steps each: one with the exchange, one
with a bare barrier in its place, so that waiting for the slower rank, which no
exchange can avoid, counts on both sides. Printed are the medians of the blocks' step
times, and the median of the ratios pair by pair; with `--json FILE` the raw numbers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import keras
import numpy as np

from distkeras import backends
from distkeras.communicators import world
from distkeras.gradients import GradientExchange
from distkeras.recipes.models import resnet_small


class BarrierExchange(GradientExchange):
    """Waits for the other ranks and leaves every gradient as it is."""

    def reduce(
        self,
        plan: Any,
        number: int,
        examples: float,
        arrays: Any,
        arrived: float = 0.0,
    ) -> Any:
        """Returns this rank's arrays."""
        self.communicator.barrier()
        self.examples = examples
        return list(arrays)


def make_model(name: str) -> tuple[keras.Model, tuple[int, ...], int]:
    """Returns a model, its input shape and its default batch a rank."""
    if name == "resnet20":
        return resnet_small(20), (32, 32, 3), 32
    if name == "resnet50":
        shape = (64, 64, 3)
        model = keras.applications.ResNet50(
            weights=None, input_shape=shape, classes=10, classifier_activation=None
        )
        return model, shape, 16
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((784,)),
            layers.Dense(128, activation="relu"),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )
    return model, (784,), 32


def contender(
    name: str,
    kind: type[GradientExchange],
    *,
    jit: bool,
    batch: int | None = None,
    uneven: bool = False,
    options: dict[str, Any] | None = None,
) -> Any:
    """Returns a function that runs steps and returns seconds a step.

    Args:
        name: of the model.
        kind: of the exchange.
        jit: whether XLA compiles the halves of the step.
        batch: samples a rank; by default the model's.
        uneven: whether batches may be empty on some ranks.
        options: of the exchange.
    """
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    model, shape, usual = make_model(name)
    batch = batch or usual
    model.compile(
        keras.optimizers.SGD(0.01, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=jit,
    )
    generator = np.random.default_rng(world().rank)
    x = generator.normal(size=(batch, *shape)).astype("float32")
    y = generator.integers(0, 10, size=batch)
    dataset = tf.data.Dataset.from_tensors((x, y)).cache().repeat()
    model._symbolic_build(data_batch=(tf.constant(x), tf.constant(y)))
    backend = backends.current()
    exchange = kind(world(), **(options or {}))
    graph = backend.exchange(exchange)
    function = backend.train_function(model, graph, uneven=uneven)
    iterator = iter(dataset)

    def run(steps: int) -> float:
        world().barrier()
        start = time.perf_counter()
        for _ in range(steps):
            function(iterator)
        world().barrier()
        return (time.perf_counter() - start) / steps

    run(3)  # traces and compiles
    return run


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    choices = ["resnet20", "resnet50", "mlp"]
    parser.add_argument("--model", choices=choices, default="resnet20")
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--steps", type=int, default=None, help="in a block")
    parser.add_argument("--jit", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args()
    steps = options.steps or {"resnet20": 8, "resnet50": 3, "mlp": 300}[options.model]
    exchange = contender(options.model, GradientExchange, jit=options.jit)
    barrier = contender(options.model, BarrierExchange, jit=options.jit)
    pairs = [(exchange(steps), barrier(steps)) for _ in range(options.pairs)]
    if world().rank:
        return
    with_exchange, without = zip(*pairs, strict=True)
    ratio = statistics.median(a / b for a, b in pairs)
    added = statistics.median(a - b for a, b in pairs)
    print(
        f"{options.model}, {world().size} ranks, {options.pairs} pairs of {steps} "
        f"steps: exchange {1e3 * statistics.median(with_exchange):.2f} ms a step, "
        f"barrier {1e3 * statistics.median(without):.2f} ms, ratio {ratio:.3f}, "
        f"added {1e3 * added:.3f} ms"
    )
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"options": vars(options), "seconds": pairs}, file, indent=1)


if __name__ == "__main__":
    main()
