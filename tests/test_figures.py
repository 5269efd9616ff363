"""Figures of all ranks and the trace of their steps."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from equivalence import build
from equivalence import samples
from equivalence import trainer

from distkeras._figures import _Sums
from distkeras._figures import figures
from distkeras.communicators import Communicator
from distkeras.gradients import StepClock


def sgd(**options: Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1, **options)


def test_figures_of_ranks() -> None:
    """Ten steps of three ranks; the second computes longest, and waits for nobody."""
    ranks = [
        _Sums(2.0, 0.9, 0.1, 10, 1000, 640),
        _Sums(2.0, 0.3, 0.4, 10, 1000, 640),
        _Sums(1.9, 0.6, 0.2, 10, 1000, 640),
    ]
    found = figures(ranks)
    assert found is not None
    assert found.samples_per_second == 320
    assert found.step_ms == pytest.approx(200)
    assert found.exchange_ms == pytest.approx(30)
    assert found.waiting_ms == pytest.approx(30)
    assert found.data_wait_ms == pytest.approx(40)
    assert found.bytes_sent == 100
    assert found.slowest_rank == 1
    assert figures([_Sums(0, 0, 0, 0, 0, 0)]) is None


def test_clock_tells_data_from_computing() -> None:
    clock = StepClock()
    clock.begin(2)
    began = time.time()
    time.sleep(0.02)
    arrived = time.time()
    time.sleep(0.01)
    clock.arrived(arrived)
    clock.lap("exchange")
    clock.arrived(time.time())  # of the second step: not told apart
    assert clock.seconds["data"] == pytest.approx(arrived - began, abs=2e-3)
    assert clock.seconds["compute"] >= 0.01
    assert clock.steps == 2 and not clock.events


@pytest.mark.parametrize(
    "options",
    [{}, {"steps_per_execution": 2}, {"optimizer": {"gradient_accumulation_steps": 2}}],
    ids=str,
)
def test_what_training_took(
    world: Communicator,
    tmp_path_shared: Path,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
) -> None:
    if world.size == 1:
        pytest.skip("at one rank the step is Keras' own")
    pytest.importorskip("tensorboard")
    optimizer = options.pop("optimizer", {})
    x, y = samples(24 * world.size)
    model = build(lambda: sgd(**optimizer), jit_compile=False, **options)
    board = keras.callbacks.TensorBoard(tmp_path_shared / "board")
    run = trainer(model, timeline=tmp_path_shared / "trace.json")
    logger = logging.getLogger("distkeras")
    propagates, logger.propagate = logger.propagate, True
    with caplog.at_level(logging.INFO, logger="distkeras"):
        run.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[board])
    logger.propagate = propagates
    said = [r.getMessage() for r in caplog.records]
    said = [text for text in said if text.startswith("trained: ")]
    assert len(said) == (world.rank == 0)
    assert run.exchange is not None
    assert run.exchange.counters.examples == 2 * len(x)
    assert run.exchange.clock.steps == 12
    if world.rank != 0:
        return
    trace = json.loads((tmp_path_shared / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in trace} == set(range(world.size))
    for rank in range(world.size):
        slices = [e for e in trace if e["pid"] == rank and e["ph"] == "X"]
        names = {e["name"] for e in slices}
        assert {"data", "compute", "pack", "wait", "exchange", "unpack"} <= names
        starts = [e["ts"] for e in slices]
        assert starts == sorted(starts) and min(starts) >= 0
        ends = np.array([e["ts"] + e["dur"] for e in slices])
        assert (np.array(starts[1:]) >= ends[:-1] - 0.2).all()  # one after the other
    scalars = written(tmp_path_shared / "board" / "train")
    assert [step for step, _ in scalars["distkeras/samples_per_second"]] == [0, 1]
    assert all(value > 0 for _, value in scalars["distkeras/samples_per_second"])
    assert {value for _, value in scalars["distkeras/slowest_rank"]} <= set(
        range(world.size)
    )


def written(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Returns the scalars in TensorBoard's files, by name: (step, value)."""
    from tensorboard.backend.event_processing import event_accumulator
    from tensorboard.util import tensor_util

    events = event_accumulator.EventAccumulator(
        str(folder), size_guidance={event_accumulator.TENSORS: 0}
    )
    events.Reload()
    return {
        tag: [
            (e.step, float(tensor_util.make_ndarray(e.tensor_proto)))
            for e in events.Tensors(tag)
        ]
        for tag in events.Tags()["tensors"]
        if tag.startswith("distkeras/")
    }
