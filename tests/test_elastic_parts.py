"""The parts of which recovery from a lost rank is made; on any number of ranks."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import distkeras
from distkeras import backends
from distkeras import data
from distkeras._beginning import begin
from distkeras._commits import Commit
from distkeras._commits import Commits
from distkeras._csv_logs import gone_on_with
from distkeras._elastic import check_can_be_shared_out_anew
from distkeras._errors import CommunicatorError
from distkeras._fit_arguments import FitArguments
from distkeras._metric_states import combined_states
from distkeras._metric_states import put_states_back
from distkeras._position import Position
from distkeras._scaling import Scaling
from distkeras._session import Session
from distkeras.communicators import Communicator
from distkeras.communicators import MPICommunicator
from distkeras.communicators import _elastic
from distkeras.communicators._shared_window import MappedWindow
from distkeras.launch._restarts import run_again

pytestmark = pytest.mark.tensorflow


def test_mapped_memory_is_shared(world: Communicator) -> None:
    if world.size == 1:
        pytest.skip("needs MPI")
    host = MPICommunicator()
    window = MappedWindow(host.mpi_comm, 100)
    assert [part.size for part in window.parts] == [100] * world.size
    window.parts[world.rank][:] = world.rank + 1
    window.sync()
    world.barrier()
    window.sync()
    for rank, part in enumerate(window.parts):
        assert (part == rank + 1).all()
    kept = window.parts[0]
    window.free()
    assert kept[0] == 1  # what views the memory stays valid
    host.close()


class Extremes(keras.metrics.Metric):
    """Of every kind of state."""

    distributed_reduction = {"low": "min", "high": "max", "odds": "product"}

    def __init__(self, name: str = "extremes") -> None:
        super().__init__(name=name)
        self.low = self.add_weight(name="low", initializer="zeros")
        self.high = self.add_weight(name="high", initializer="zeros")
        self.odds = self.add_weight(name="odds", initializer="ones")
        self.count = self.add_weight(
            name="count", initializer="zeros", dtype="int32", shape=(2,)
        )

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        value = keras.ops.sum(y_true)
        self.low.assign(keras.ops.minimum(self.low, value))
        self.high.assign(keras.ops.maximum(self.high, value))
        self.odds.assign(self.odds * 2)
        self.count.assign_add([1, 2])

    def reset_state(self) -> None:
        super().reset_state()
        self.odds.assign(1)

    def result(self) -> Any:
        return self.low + self.high


def build() -> keras.Model:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.Adam(), loss="mse", metrics=[Extremes()])
    backends.current().build(model, data_for(model))
    return model


def data_for(model: keras.Model) -> Any:
    from distkeras.communicators import SingleCommunicator

    x = np.ones((4, 2), "float32")
    return data.shard(x, x[:, :1], communicator=SingleCommunicator(), batch_size=2)


def test_metrics_of_all_ranks_go_to_those_that_are_left(world: Communicator) -> None:
    model = build()
    metric = model.metrics[-1].metrics[-1]
    for value in (world.rank, -2 * world.rank):
        metric.update_state(np.float32(value), None)
    states = combined_states(model, world)
    values = [float(v.value.numpy().max()) for v in metric.variables]
    put_states_back(model, states, world.rank)
    low, high, odds, count = (v.value.numpy() for v in metric.variables)
    assert low == -2 * (world.size - 1)
    assert high == world.size - 1
    assert odds == (4**world.size if world.rank == 0 else 1)
    first = world.rank == 0
    assert count.tolist() == [first * 2 * world.size, first * 4 * world.size]
    assert values[2] == 4  # taking them changes nothing


def test_a_snapshot_is_taken_and_put_back() -> None:
    model = build()
    variables = [*model.variables, *model.optimizer.variables]
    variables = list({id(v): v for v in variables}.values())
    snapshot = backends.current().snapshot(variables)
    for number, variable in enumerate(variables):
        variable.assign(keras.ops.zeros_like(variable) + number)
    snapshot.take()
    for variable in variables:
        variable.assign(keras.ops.zeros_like(variable) - 1)
    snapshot.restore()
    for number, variable in enumerate(variables):
        assert (variable.value.numpy() == number).all()


def commit(number: int, **changes: Any) -> Commit:
    values: dict[str, Any] = {
        "number": number,
        "size": 1,
        "position": Position(epoch=number),
        "data": {},
        "metrics": None,
        "stop": False,
        "writers": {},
        "logs": {},
    }
    return Commit(**{**values, **changes})


def test_the_newest_commit_is_everyone_s(world: Communicator) -> None:
    """Ranks but the last one have missed the end of it; their variables are right."""
    model = build()
    commits = Commits(3)
    last = world.rank == world.size - 1
    commits.add(commit(4), model, [])
    model.layers[0].bias.assign([7.0])
    if last:
        commits.add(commit(5), model, [])
    commits.settle(model, world)
    assert commits.newest == commit(5)
    model.layers[0].bias.assign([8.0])
    found = commits.resumption(model, world, resized="rescale")
    assert found is not None
    assert found.position.epoch == 5
    assert model.layers[0].bias.value.numpy() == 7


def test_ranks_that_are_steps_apart_are_an_error(world: Communicator) -> None:
    if world.size == 1:
        pytest.skip("needs ranks")
    model, commits = build(), Commits(3)
    commits.add(commit(4 if world.rank else 6), model, [])
    with pytest.raises(CommunicatorError, match=r"one step apart .*\[6, 4"):
        commits.settle(model, world)


def test_history_is_that_of_all_epochs() -> None:
    model, commits = build(), Commits(3)
    history = keras.callbacks.History()
    history.epoch, history.history = [2, 3], {"loss": [5.0, 6.0], "val_loss": [7.0]}
    assert commits.whole(history).epoch == [2, 3]
    commits.rows = [(0, {"loss": 1.0}), (1, {"loss": 2.0}), (2, {"loss": 9.0})]
    commits.add(commit(2), model, [])
    from distkeras.communicators import SingleCommunicator

    commits.resumption(model, SingleCommunicator(), resized="rescale")
    whole = commits.whole(history)
    assert whole.epoch == [0, 1, 2, 3]
    assert whole.history == {"loss": [1.0, 2.0, 5.0, 6.0], "val_loss": [7.0]}


def test_a_log_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    text = "epoch,loss\n0,1.0\n1,0."
    path.write_text(text)
    logger = keras.callbacks.CSVLogger(str(path))
    held = {str(path): 17}
    for mine, rank in (({}, 0), (held, 1), ({str(path): 100}, 0), (held, 0)):
        assert path.read_text() == text
        with gone_on_with(mine, [logger], rank):
            assert logger.append == (mine != {} and rank == 0)
        assert not logger.append
    assert path.read_text() == "epoch,loss\n0,1.0\n"
    path.unlink()
    with gone_on_with(held, [logger], 0):
        assert logger.append and not path.exists()


@pytest.mark.parametrize(
    ("options", "whole", "kept"),
    [
        ({}, 32, True),
        ({"batch_size": 4}, 4, True),
        ({"batch_size": 4, "resized": "rescale"}, None, False),
        ({"global_batch_size": 6}, None, True),
        ({"steps_per_epoch": 3}, None, True),
    ],
    ids=str,
)
def test_a_loss_before_the_first_step(
    world: Communicator, options: dict[str, Any], whole: int | None, kept: bool
) -> None:
    """Where the global batch did not depend on the ranks, the rate had become less."""
    x = np.ones((12, 2), "float32")
    parameters = inspect.signature(distkeras.Trainer.fit).parameters.values()
    arguments = {p.name: p.default for p in parameters if p.name != "self"}
    arguments |= {"x": x, "y": x, "callbacks": [], **options}
    before = world.size + 1
    beginning = begin(
        FitArguments(**arguments),
        Session(build(), world),
        Scaling("linear", 0),
        Commits(before),
    )
    assert beginning.found is None
    assert beginning.factor == (before if kept else world.size)
    found = beginning.given
    if whole is None:
        assert found.batch_size == options.get("batch_size")
        assert found.global_batch_size == options.get("global_batch_size")
    else:
        assert (found.batch_size, found.global_batch_size) == (None, whole * before)


class Hooked(keras.utils.PyDataset):
    """Shuffles itself."""

    def __init__(self) -> None:
        super().__init__()

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return np.ones((2, 2), "float32"), np.ones((2, 1), "float32")

    def on_epoch_end(self) -> None:
        pass


def test_what_cannot_be_dealt_anew_is_refused(world: Communicator) -> None:
    x = np.ones((12, 2), "float32")

    def batches() -> Any:
        yield x, x

    own = data.shard(x, communicator=world, batch_size=2, shard=False)
    whole = data.shard(x, communicator=world, batch_size=2)
    once = data.shard(batches(), communicator=world, steps_per_epoch=1)
    pipeline = tf.data.Dataset.from_tensor_slices((x, x)).shuffle(12, seed=1).batch(2)
    shuffled = data.shard(pipeline, communicator=world)
    hooked = data.shard(Hooked(), communicator=world)
    check_can_be_shared_out_anew(whole, None, [], None)
    backup = keras.callbacks.BackupAndRestore("folder")
    steps = whole.num_batches - 1
    for wrong, says in (
        ((own, None, [], None), "shard=False"),
        ((once, None, [], None), "generator"),
        ((whole, once, [], None), "generator"),
        ((shuffled, None, [], None), "reshuffle_each_iteration"),
        ((hooked, None, [], None), "on_epoch_end"),
        ((whole, None, [backup], None), "BackupAndRestore"),
        *([((whole, None, [], steps), "steps_per_epoch")] if steps else []),
    ):
        with pytest.raises(ValueError, match=says):
            check_can_be_shared_out_anew(*wrong)


def test_the_least_number_of_ranks_is_read() -> None:
    assert _elastic.requested({}) is None
    assert _elastic.requested({"DISTKERAS_ELASTIC": "2"}) == 2
    for word in ("0", "two"):
        with pytest.raises(CommunicatorError, match="DISTKERAS_ELASTIC"):
            _elastic.requested({"DISTKERAS_ELASTIC": word})


@pytest.mark.parametrize(
    ("codes", "signals", "most", "code", "runs"),
    [
        ([0], [], 3, 0, 1),
        ([1, 75, 0], [], 3, 0, 3),
        ([1, 1, 1], [], 1, 1, 2),
        ([2], [], 3, 2, 1),
        ([75], [10], 3, 75, 1),
    ],
)
def test_when_a_job_is_started_again(
    codes: list[int], signals: list[int], most: int, code: int, runs: int
) -> None:
    begun = []

    def run(number: int, heard: list[int]) -> int:
        begun.append(number)
        heard += signals
        return codes[number]

    assert run_again(run, most) == code
    assert begun == list(range(runs))
