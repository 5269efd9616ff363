"""`distkeras bench --model`: one training step of a known model, taken apart."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distkeras.launch._mpiexec import LaunchError

PARTS = ("data", "compute", "pack", "wait", "exchange", "unpack", "update")
_CLASSES = 10


def measure_step(options: argparse.Namespace) -> dict[str, Any] | None:
    """Trains for some steps on random images; collective.

    Args:
        options: model, batch, image_size, steps, jit_compile.

    Returns:
        On rank 0, milliseconds of each part of each step, by rank; elsewhere None.

    Raises:
        LaunchError: there is no such model, or one rank only.
    """
    import keras
    import numpy as np

    import distkeras
    from distkeras import communicators

    shape = (options.image_size, options.image_size, 3)
    model = _make(options.model, shape)
    world = communicators.world()
    if world.size == 1:
        raise LaunchError("expected 2 ranks or more, whose exchange to show: -n 2")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trainer = distkeras.Trainer(
            model, learning_rate_scaling=None, timeline=path, check_replicas=False
        )
        trainer.compile(
            optimizer=keras.optimizers.SGD(0.01, momentum=0.9),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=options.jit_compile,
        )
        count = options.batch * world.size * (options.steps + 1)
        generator = np.random.default_rng(0)
        x = generator.random((options.batch * world.size, *shape), dtype=np.float32)
        x = np.resize(x, (count, *shape))
        y = generator.integers(0, _CLASSES, count)
        trainer.fit(x, y, batch_size=options.batch, verbose=0)
        trainer.close()
        if world.rank:
            return None
        trace = json.loads(path.read_text())
    return {
        "ranks": world.size,
        "parameters": model.count_params(),
        "steps": options.steps,
        "milliseconds": _by_rank(trace["traceEvents"], options.steps),
    }


def _make(name: str, shape: tuple[int, int, int]) -> Any:
    """Returns an untrained model of that name."""
    import keras

    if name == "resnet20":
        from distkeras.recipes.models import resnet_small

        return resnet_small(20)
    known = {
        word.lower(): word
        for word in dir(keras.applications)
        if word[0].isupper() and callable(getattr(keras.applications, word))
    }
    if name.lower() not in known:
        raise LaunchError(
            f"expected a model: resnet20, {', '.join(sorted(known))}. Received: {name}"
        )
    make = getattr(keras.applications, known[name.lower()])
    return make(
        weights=None, input_shape=shape, classes=_CLASSES, classifier_activation=None
    )


def _by_rank(events: Sequence[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """Returns for each rank the parts of its last steps, in milliseconds a step."""
    ranks: dict[int, list[dict[str, float]]] = {}
    for event in events:
        if event["ph"] != "X":
            continue
        mine = ranks.setdefault(event["pid"], [{}])
        part = event["name"]
        mine[-1][part] = mine[-1].get(part, 0.0) + event["dur"] / 1e3
        if part == "update":  # the last of a step
            mine.append({})
    return [
        {part: [step.get(part, 0.0) for step in mine[:-1][-steps:]] for part in PARTS}
        for _, mine in sorted(ranks.items())
    ]


def print_step(options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Prints the medians of the parts, a line a rank."""
    ranks = found["milliseconds"]
    whole = [
        statistics.median(map(sum, zip(*(rank[part] for part in PARTS), strict=True)))
        for rank in ranks
    ]
    slowest = max(whole)
    samples = 1e3 * options.batch * len(ranks) / slowest
    print(
        f"{options.model}, {found['parameters'] / 1e6:.3g} M parameters, {len(ranks)} "
        f"ranks with {options.batch} images of {options.image_size}x"
        f"{options.image_size} each: {slowest:.1f} ms a step, {samples:.4g} samples/s; "
        f"medians of {found['steps']} steps in ms"
    )
    print(f"{'rank':<6}" + "".join(f"{part:>10}" for part in PARTS) + f"{'step':>10}")
    for number, (rank, step) in enumerate(zip(ranks, whole, strict=True)):
        medians = [statistics.median(rank[part]) for part in PARTS]
        cells = "".join(f"{ms:>10.2f}" for ms in [*medians, step])
        print(f"{number:<6}{cells}")
