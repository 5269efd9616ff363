"""The progress bar shows the metrics of all ranks while an epoch runs."""

from __future__ import annotations

from typing import Any

import keras
import pytest
from equivalence import build
from equivalence import samples
from equivalence import trainer

from distkeras._progress import GlobalProgress
from distkeras._progress import global_results
from distkeras._resume import Continuation
from distkeras._session import Session
from distkeras.communicators import Communicator
from distkeras.data import shard


class Recorder(keras.callbacks.Callback):
    """Stands where Keras puts the bar."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Any]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(dict(logs))


def make() -> keras.Model:
    metrics = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(k=2, name="top")]
    return build(lambda: keras.optimizers.SGD(0.1), metrics=metrics)


@pytest.mark.parametrize("shown", [True, False])
def test_values_are_those_of_one_process(world: Communicator, shown: bool) -> None:
    x, y = samples(45)
    expected = Recorder()
    make().fit(
        x,
        y,
        batch_size=4 * world.size,
        shuffle=False,
        verbose=0,
        callbacks=[expected],
    )
    model, found = make(), Recorder()
    data = shard(x, y, communicator=world, batch_size=4, shuffle=False)
    if world.size == 1:
        progress = GlobalProgress(world, shown=shown, batches=data.num_batches)
        model.fit(data, shuffle=False, verbose=0, callbacks=[progress, found])
    else:
        session = Session(model, world, check_replicas=True)
        session.build(data)
        session.prepare(data)
        going_on = Continuation(model, data, world, [], None, None)
        steps = data.num_batches
        with session.training(
            data, [], bar=shown, steps=steps, going_on=going_on
        ) as callbacks:
            model.fit(data, shuffle=False, verbose=0, callbacks=[*callbacks, found])
    assert len(found.seen) == len(expected.seen)
    paces = [logs.pop("samples_per_second", None) for logs in found.seen]
    if shown and world.size > 1:  # the first step has nothing to be compared with
        assert paces[0] == 0 and all(pace > 0 for pace in paces[1:])
    if shown and world.rank == 0:
        for mine, theirs in zip(found.seen, expected.seen, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("execution", [1, 2])
def test_a_hundred_times_an_epoch(
    world: Communicator, monkeypatch: pytest.MonkeyPatch, execution: int
) -> None:
    """Of a generator, whose length `steps_per_epoch` tells, it was every tenth step."""
    if world.size == 1:
        pytest.skip("at one rank the bar is Keras' own")
    asked = []

    def counted(*arguments: Any) -> Any:
        asked.append(1)
        return global_results(*arguments)

    monkeypatch.setattr("distkeras._progress.global_results", counted)
    x, y = samples(4)
    steps = 300 * execution
    batches = ((x, y) for _ in range(world.size * steps))
    model = build(lambda: keras.optimizers.SGD(0.1), steps_per_execution=execution)
    trainer(model).fit(batches, steps_per_epoch=steps, verbose=1)
    assert sum(asked) == 100
