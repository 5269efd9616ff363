"""Who runs where, stopping together, and one learning rate for all."""

import os

import keras
import numpy as np
import pytest

from distkeras._consensus import AverageStatistics
from distkeras._consensus import Consensus
from distkeras._consensus import arrange_callbacks
from distkeras._consensus import filter_callbacks
from distkeras._consensus import on_rank_zero
from distkeras._learning_rate import scale_learning_rate
from distkeras._metrics import exact_metrics
from distkeras._statistics import average_moving_statistics
from distkeras._statistics import moving_statistics

# Keras 3.15 itself calls np.array on a variable, which NumPy 2.4 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")


class Flags:
    """The stop flag of an exchange: it rides in an allreduce every step."""

    def __init__(self, communicator):
        self.communicator = communicator
        self.stop_announced = False
        self.wanted = False
        self.steps = 0

    def announce_stop(self):
        self.wanted = True

    def clear_stop(self):
        self.wanted = self.stop_announced = False

    def exchange(self):
        buffer = np.array([self.wanted, 1.0])
        self.communicator.allreduce(buffer)
        assert buffer[1] == self.communicator.size  # all ranks are in this step
        self.stop_announced = self.stop_announced or bool(buffer[0])
        self.steps += 1


class Exchanging(keras.Model):
    """A model of which every step meets the other ranks."""

    flags = None

    def train_step(self, data):
        logs = super().train_step(data)
        self.flags.exchange()
        return logs


def exchanging_model(world, rate=0.01, **options):
    keras.utils.set_random_seed(2)
    inputs = keras.Input((2,))
    model = Exchanging(inputs, keras.layers.Dense(1)(inputs))
    model.compile(keras.optimizers.SGD(rate), "mse", run_eagerly=True, **options)
    object.__setattr__(model, "flags", Flags(world))
    return model


def data(steps=6):
    x = np.random.default_rng(1).normal(size=(4 * steps, 2)).astype("float32")
    return x, x.sum(1, keepdims=True)


def fit(world, model, callbacks, epochs=2, **options):
    x, y = data()
    with exact_metrics(model, world):
        return model.fit(
            x,
            y,
            batch_size=4,
            epochs=epochs,
            verbose=0,
            shuffle=False,
            callbacks=[*callbacks, Consensus(world, model.flags)],
            **options,
        )


class StopAt(keras.callbacks.Callback):
    """Stops on one rank only."""

    def __init__(self, batch, here):
        super().__init__()
        self.batch, self.here = batch, here

    def on_train_batch_end(self, batch, logs=None):
        if self.here and batch == self.batch:
            self.model.stop_training = True


class Count(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.batches = self.epochs = 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1

    def on_epoch_end(self, epoch, logs=None):
        self.epochs += 1


def same_everywhere(world, value):
    return len({repr(v) for v in world.allgather_object(value)}) == 1


@pytest.mark.parametrize("batch", [0, 3, 4, 5])
def test_a_stop_after_a_batch_of_one_rank(world, batch):
    model, count = exchanging_model(world), Count()
    last = world.rank == world.size - 1
    fit(world, model, [StopAt(batch, last), count])
    # One step later, in which the flag travels; after the last step at once.
    assert count.batches == min(batch + 2, 6)
    assert count.epochs == 1
    assert model.stop_training
    assert same_everywhere(world, model.get_weights()[0].tolist())
    # Nothing of it is left for the next fit.
    count.batches = 0
    fit(world, model, [count], epochs=1)
    assert count.batches == 6


def test_a_stop_without_flags_waits_for_the_epochs_end(world):
    model, count = exchanging_model(world), Count()
    x, y = data()
    callbacks = [StopAt(2, world.rank == 0), count, Consensus(world)]
    model.fit(x, y, batch_size=4, epochs=3, verbose=0, callbacks=callbacks)
    assert (count.batches, count.epochs) == (6, 1)


class Poison(keras.callbacks.Callback):
    """Makes this rank's loss NaN."""

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 2:
            self.model._loss_tracker.total.assign(np.nan)


def test_terminate_on_nan_of_one_rank(world, capsys):
    model, count = exchanging_model(world), Count()
    poison = [Poison()] if world.rank == world.size - 1 else []
    fit(world, model, [*poison, keras.callbacks.TerminateOnNaN(), count])
    assert (count.batches, count.epochs) == (4, 1)


class Rankwise(keras.callbacks.Callback):
    """A monitor that differs between ranks: rank 0's gets worse, others' better."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def on_epoch_end(self, epoch, logs=None):
        logs["mine"] = float(epoch if self.rank == 0 else -epoch)


def test_early_stopping_with_a_rank_dependent_monitor(world, caplog):
    model, count = exchanging_model(world), Count()
    stop = keras.callbacks.EarlyStopping(
        "mine", mode="min", patience=2, restore_best_weights=True
    )

    fit(world, model, [Rankwise(world.rank), stop, count], epochs=8)
    told = "Weights differ between ranks" in caplog.text
    assert told == (world.size > 1 and world.rank == 0)
    assert count.epochs == 3
    assert same_everywhere(world, model.get_weights()[0].tolist())


def test_a_plateau_seen_by_one_rank(world, caplog):
    model = exchanging_model(world, rate=0.125)
    plateau = keras.callbacks.ReduceLROnPlateau("mine", 0.5, patience=1, mode="min")

    fit(world, model, [Rankwise(world.rank), plateau], epochs=4)
    rate = float(keras.ops.convert_to_tensor(model.optimizer.learning_rate))
    told = caplog.text.count("0.0625] on rank 0, [0.125] on rank 1")
    assert told == (world.size > 1 and world.rank == 0)
    assert rate == 0.125 * 0.5**3
    assert same_everywhere(world, rate)


def test_a_scheduler_and_a_plateau_on_global_logs(world):
    model = exchanging_model(world, rate=0.1)
    scale_learning_rate(model.optimizer, world.size)
    x, y = data()
    rates = fit(
        world,
        model,
        [
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
            keras.callbacks.ReduceLROnPlateau("loss", 0.5, patience=1, min_delta=1e9),
        ],
        epochs=3,
        validation_data=(x[world.rank :], y[world.rank :]),
    ).history
    assert same_everywhere(world, rates)
    expected = [0.05, 0.025, 0.00625]
    np.testing.assert_allclose(rates["learning_rate"], np.array(expected) * world.size)


def writers(folder):
    callbacks = keras.callbacks
    return [
        callbacks.ModelCheckpoint(os.path.join(folder, "best.keras")),
        callbacks.TensorBoard(os.path.join(folder, "logs")),
        callbacks.CSVLogger(os.path.join(folder, "log.csv")),
        callbacks.RemoteMonitor(),
        callbacks.ProgbarLogger(),
        callbacks.BackupAndRestore(os.path.join(folder, "backup")),
    ]


def test_writing_callbacks_run_on_rank_zero_only(tmp_path):
    class MyCheckpoint(keras.callbacks.ModelCheckpoint):
        pass

    class Everywhere(keras.callbacks.CSVLogger):
        rank_zero_only = False

    @on_rank_zero
    class Report(keras.callbacks.Callback):
        pass

    writing = [*writers(str(tmp_path)), MyCheckpoint("x.keras"), Report()]
    writing.append(on_rank_zero(keras.callbacks.LambdaCallback()))
    steering = [
        keras.callbacks.EarlyStopping(),
        keras.callbacks.ReduceLROnPlateau(),
        keras.callbacks.LearningRateScheduler(lambda epoch: 0.1),
        keras.callbacks.TerminateOnNaN(),
        keras.callbacks.SwapEMAWeights(),
        keras.callbacks.History(),
        keras.callbacks.LambdaCallback(),
        Everywhere("y.csv"),
        Count(),
    ]
    mixed = [c for pair in zip(writing, steering, strict=True) for c in pair]
    assert filter_callbacks(mixed, 0) == mixed
    assert filter_callbacks(mixed, 1) == steering
    assert filter_callbacks([mixed[:4], mixed[4:]], 2) == steering
    assert filter_callbacks(keras.callbacks.CallbackList(mixed), 1) == steering
    assert filter_callbacks(None, 1) == []
    # It synchronises its processes itself; made without Orbax, which is not needed.
    orbax = object.__new__(keras.callbacks.OrbaxCheckpoint)
    assert filter_callbacks([orbax], 1) == [orbax]


def test_every_callback_class_of_keras_is_known():
    names = {
        name
        for name, item in vars(keras.callbacks).items()
        if isinstance(item, type) and issubclass(item, keras.callbacks.Callback)
    }
    assert (
        names - {"Callback", "CallbackList"}
        == {
            # On rank 0 only:
            "BackupAndRestore",
            "CSVLogger",
            "ModelCheckpoint",
            "ProgbarLogger",
            "RemoteMonitor",
            "TensorBoard",
            # On all ranks:
            "EarlyStopping",
            "History",
            "LambdaCallback",
            "LearningRateScheduler",
            "MonitorCallback",
            "OrbaxCheckpoint",  # synchronises itself
            "ReduceLROnPlateau",
            "SwapEMAWeights",
            "TerminateOnNaN",
        }
        & names
    )


def test_dropping_callbacks_changes_no_training(world, tmp_path):
    plain = exchanging_model(world)
    fit(world, plain, [])
    model = exchanging_model(world)
    some = [
        keras.callbacks.ModelCheckpoint(tmp_path / "m.keras", save_best_only=True),
        keras.callbacks.TensorBoard(tmp_path / "logs"),
        keras.callbacks.CSVLogger(tmp_path / "log.csv"),
    ]
    some[0].monitor = "loss"
    fit(world, model, filter_callbacks(some, world.rank))
    for a, b in zip(plain.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == (["log.csv", "logs", "m.keras"] if world.rank == 0 else [])


class Fail(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise RuntimeError("interrupted")


def test_backup_and_restore(world, tmp_path):
    def run(epochs, *more):
        model, count = exchanging_model(world), Count()
        backup = keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))
        callbacks = arrange_callbacks([backup, count, *more], world, model.flags)
        x, y = data()
        options = {"batch_size": 4, "verbose": 0, "shuffle": False}
        model.fit(x, y, epochs=epochs, callbacks=callbacks, **options)
        return model, count

    with pytest.raises(RuntimeError, match="interrupted"):
        run(4, Fail())
    world.barrier()
    model, count = run(4)
    assert count.epochs == 2  # the other two were done before
    whole = exchanging_model(world)
    fit(world, whole, [], epochs=4)
    for a, b in zip(model.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert model._initial_epoch is None
    assert not (tmp_path / "backup").exists()


def normalised_model():
    keras.utils.set_random_seed(3)
    inputs = keras.Input((2,))
    inner = keras.Sequential(
        [keras.Input((4,)), keras.layers.BatchNormalization(name="deep")]
    )
    hidden = keras.layers.BatchNormalization()(inputs)
    hidden = inner(keras.layers.Dense(4)(hidden))
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile(keras.optimizers.SGD(0.0), "mse")
    return model


def test_moving_statistics_are_averaged(world):
    model = normalised_model()
    names = [v.name for v in moving_statistics(model)]
    assert names == ["moving_mean", "moving_variance"] * 2
    x, y = data()
    model.fit(x + world.rank, y, verbose=0)
    mine = [v.numpy() for v in moving_statistics(model)]
    expected = [
        np.mean(all_, 0) for all_ in zip(*world.allgather_object(mine), strict=True)
    ]
    average_moving_statistics(model, world)
    got = [v.numpy() for v in moving_statistics(model)]
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert same_everywhere(world, [a.tobytes() for a in got])


def test_statistics_are_equal_whenever_someone_looks(world):
    seen = []

    class Look(keras.callbacks.Callback):
        def look(self, *_):
            seen.append([v.numpy().tobytes() for v in moving_statistics(self.model)])

        def on_test_begin(self, logs=None):
            self.look()

        def on_epoch_end(self, epoch, logs=None):
            self.look()

        def on_train_end(self, logs=None):
            self.look()

    model = normalised_model()
    x, y = data()
    model.fit(
        x + world.rank,
        y,
        epochs=2,
        verbose=0,
        validation_data=(x, y),
        validation_freq=2,
        callbacks=[AverageStatistics(world), Look()],
    )
    assert len(seen) == 4
    assert same_everywhere(world, seen)
    assert seen[0] != seen[1]
