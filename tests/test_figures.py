"""Figures of all ranks and the trace of their steps."""

from __future__ import annotations

import json
import logging
import re
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from equivalence import build
from equivalence import samples
from equivalence import trainer

from distkeras import CommunicatorError
from distkeras._figures import _Sums
from distkeras._figures import figures
from distkeras.communicators import Communicator
from distkeras.communicators import SingleCommunicator
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
    assert found.data_wait_ms == pytest.approx(70 / 3)
    assert found.longest_data_wait_ms == pytest.approx(40)
    assert found.bytes_sent == 100
    assert found.slowest_rank == 1
    assert figures([_Sums(0, 0, 0, 0, 0, 0)]) is None


@pytest.mark.parametrize("size", (2, 3, 8))
def test_shares_are_of_one_step(size: int) -> None:
    """One rank waits for data, the others for it: that was counted twice."""
    others = [_Sums(1.0, 0.8, 0.1, 10, 1000, 640)] * (size - 1)
    found = figures([_Sums(1.0, 0.1, 0.7, 10, 1000, 640), *others])
    assert found is not None and found.slowest_rank == 0
    percent = [int(text) for text in re.findall(r"\((\d+)%\)", found.line(size))]
    assert len(percent) == 3 and sum(percent) <= 90 + 1  # rounded
    assert percent[0] == 10 and percent[1] == round(70 * (size - 1) / size)


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
    run = trainer(model, timeline=tmp_path_shared / "new" / "trace.json")
    logger = logging.getLogger("distkeras")
    propagates, logger.propagate = logger.propagate, True
    with caplog.at_level(logging.INFO, logger="distkeras"):
        run.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[board])
    logger.propagate = propagates
    said = [r.getMessage() for r in caplog.records]
    by_epoch = [text for text in said if re.match(r"epoch \d+: \S+ samples/s, ", text)]
    assert [text.split(":")[0] for text in by_epoch] == (
        ["epoch 1", "epoch 2"] if world.rank == 0 else []
    )
    said = [text for text in said if text.startswith("trained for ")]
    assert len(said) == (world.rank == 0)
    for text in said:
        assert re.match(r"trained for \d+\.\d s: \S+ samples/s, \S+ ms a step: ", text)
        assert re.search(r"exchange \S+ ms \(\d+%\) of \S+ MB, waiting for rank", text)
        assert re.search(r"data wait \S+ ms \(\d+%\); about \S+ x one rank", text)
        assert sum(int(share) for share in re.findall(r"\((\d+)%\)", text)) <= 101
    assert run.exchange is not None
    assert run.exchange.counters.examples == 2 * len(x)
    assert run.exchange.clock.steps == 12
    if world.rank != 0:
        return
    trace = json.loads((tmp_path_shared / "new" / "trace.json").read_text())[
        "traceEvents"
    ]
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


class Last(keras.callbacks.Callback):
    """Notes that training has ended, and before that takes a place away."""

    def __init__(self, taken: Path | None) -> None:
        super().__init__()
        self.taken, self.ended = taken, False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.taken is not None:
            self.taken.mkdir(exist_ok=True)

    def on_train_end(self, logs: Any = None) -> None:
        self.ended = True


def test_a_timeline_that_cannot_be_written(
    world: Communicator,
    tmp_path_shared: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Is an error before the training, never after it."""
    if world.size == 1:
        pytest.skip("one rank writes none")
    x, y = samples(8 * world.size)
    for path in (tmp_path_shared, tmp_path_shared / "file" / "trace.json"):
        (tmp_path_shared / "file").touch()
        run = trainer(build(sgd), timeline=path)
        with pytest.raises(CommunicatorError, match="opening the timeline"):
            run.fit(x, y, batch_size=4, verbose=0)
        run.close()
    there = tmp_path_shared / "there.json"
    if world.rank == 0:
        there.write_text("kept")
    world.barrier()
    last = Last(tmp_path_shared / "later.json" if world.rank == 0 else None)
    run = trainer(build(sgd), timeline=tmp_path_shared / "later.json")
    monkeypatch.setattr(logging.getLogger("distkeras"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="distkeras"):
        history = run.fit(
            x, y, batch_size=4, epochs=2, verbose=0, callbacks=[last]
        ).history
    assert len(history["loss"]) == 2 and last.ended
    said = [r for r in caplog.records if "timeline is not written" in r.getMessage()]
    assert len(said) == (world.rank == 0)
    run.close()
    # One that is there stays until there is a new one.
    run = trainer(build(sgd), timeline=there)
    with pytest.raises(ZeroDivisionError):
        run.fit(x, y, batch_size=4, verbose=0, callbacks=[Failing(there)])
    world.barrier()
    assert there.read_text() == "kept"
    run.close()


class Failing(keras.callbacks.Callback):
    """Fails on every rank alike."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        raise ZeroDivisionError(self.path.read_text())


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
        if tag != "keras"  # the model
    }


@pytest.mark.dealt
@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": {"global_clipnorm": 1e-3}},
        {"steps_per_execution": 2, "optimizer": {"gradient_accumulation_steps": 2}},
    ],
    ids=["clipped", "accumulated"],
)
def test_board_has_the_values_of_all_ranks(
    world: Communicator, tmp_path_shared: Path, options: dict[str, Any]
) -> None:
    """By epoch and by step, those of one process with the global batch."""
    pytest.importorskip("tensorboard")
    optimizer = options.pop("optimizer", {})
    x, y = samples(24 * world.size - 1)

    class Seen(keras.callbacks.Callback):
        """What callbacks after the board see: this rank's."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.logs = dict(logs)

    def train(folder: Path, communicator: Communicator) -> Seen:
        model = build(lambda: sgd(**optimizer), **options)
        board = keras.callbacks.TensorBoard(folder, update_freq=2)
        trainer(model, communicator=communicator).fit(
            x,
            y,
            batch_size=4 * world.size // communicator.size,
            epochs=2,
            shuffle=False,
            verbose=0,
            validation_data=(x[:9], y[:9]),
            callbacks=[board, seen := Seen()],
        )
        return seen

    seen = train(tmp_path_shared / "all", world)
    losses = {logs["loss"] for logs in world.allgather_object(seen.logs)}
    assert len(losses) == world.size
    if world.rank > 0:
        return
    assert [p.name for p in tmp_path_shared.iterdir()] == ["all"]
    assert {p.name for p in (tmp_path_shared / "all").iterdir()} == {
        "train",
        "validation",
    }
    train(tmp_path_shared / "one", SingleCommunicator())
    found = written(tmp_path_shared / "all" / "train")
    expected = written(tmp_path_shared / "one" / "train")
    executions = [2, 4, 6] if options else [2, 4, 6, 8, 10, 12]
    same = ("loss", "accuracy", "learning_rate", "gradient_norm")
    for name in same[2:]:
        assert [step for step, _ in found[f"distkeras/{name}"]] == [0, 1]
    for name in same:
        begin = "batch_" if name in same[:2] else "distkeras/batch_"
        for tag in (f"{begin}{name}", f"distkeras/{name}"):
            if tag not in ("distkeras/loss", "distkeras/accuracy"):
                np.testing.assert_allclose(found[tag], expected[tag], rtol=1e-5)
        assert [step for step, _ in found[f"{begin}{name}"]] == executions
    for name in ("samples_per_second", "step_ms", "exchange_ms", "slowest_rank"):
        for scalars in (found, expected):
            steps = [step for step, _ in scalars[f"distkeras/batch_{name}"]]
            assert steps == executions
            assert [step for step, _ in scalars[f"distkeras/{name}"]] == [0, 1]
    assert all(value > 0 for _, value in expected["distkeras/samples_per_second"])


def test_one_process_says_what_it_took(caplog: pytest.LogCaptureFixture) -> None:
    x, y = samples(40)
    model = build(sgd)
    with caplog.at_level(logging.INFO, logger="distkeras"):
        logger = logging.getLogger("distkeras")
        propagates, logger.propagate = logger.propagate, True
        run = trainer(model, communicator=SingleCommunicator())
        run.fit(x, y, batch_size=4, epochs=3, verbose=0, validation_data=(x, y))
        logger.propagate = propagates
    (said,) = [m for m in caplog.messages if m.startswith("trained for ")]
    pace, step = re.search(r"s: (\S+) samples/s, (\S+) ms a step$", said).groups()
    assert float(pace) * float(step) == pytest.approx(4000, rel=0.01)
