"""`Checkpoint` and `resume`: as if training had never been interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from checkpoints import KillAt
from checkpoints import Killed
from checkpoints import assert_same_state
from checkpoints import build
from checkpoints import fit
from equivalence import FEATURES
from equivalence import Adversarial
from equivalence import assert_equal_weights
from equivalence import samples

from distkeras.callbacks import Checkpoint
from distkeras.callbacks import LearningRateSchedule
from distkeras.callbacks import LearningRateWarmup
from distkeras.callbacks import _files
from distkeras.communicators import Communicator
from distkeras.communicators import SingleCommunicator

OPTIMIZERS: dict[str, Any] = {
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.CosineDecay(0.01, 20)
    ),
    "ema": lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9),
    "accumulation": lambda: keras.optimizers.Adam(
        0.01, gradient_accumulation_steps=2, clipnorm=1.0
    ),
}


# Each kind once by default.
SOAKS = {("momentum", "within an epoch"), ("ema", "within an epoch")} | {
    ("adam", "between epochs"),
    ("accumulation", "between epochs"),
}


@pytest.mark.dealt
@pytest.mark.parametrize(
    ("kind", "stopped"),
    [
        pytest.param(
            kind, stopped, marks=[pytest.mark.soak] * ((kind, stopped) in SOAKS)
        )
        for stopped in ("between epochs", "within an epoch")
        for kind in OPTIMIZERS
    ],
)
def test_as_if_never_interrupted(
    world: Communicator, tmp_path_shared: Path, kind: str, stopped: str
) -> None:
    """Bit for bit: weights, optimizer, statistics, random states, and the logs."""
    data = samples(22 * world.size + 1)  # six steps, the last one short
    options: dict[str, Any] = {"batch_size": 4, "validation_data": samples(9, seed=2)}
    expected = build(OPTIMIZERS[kind])
    # At one rank Keras' own `fit` deals the data where no checkpoint is asked for.
    whole = [Checkpoint(tmp_path_shared / "whole")]
    history = fit(expected, data, epochs=4, callbacks=whole, **options)

    killed = build(OPTIMIZERS[kind])
    if stopped == "between epochs":
        checkpoint = Checkpoint(tmp_path_shared)
        fit(killed, data, epochs=2, callbacks=[checkpoint], **options)
    else:
        checkpoint = Checkpoint(tmp_path_shared, every_steps=3)
        with pytest.raises(Killed):
            fit(killed, data, epochs=4, callbacks=[checkpoint, KillAt(17)], **options)

    model = build(OPTIMIZERS[kind])
    keras.utils.set_random_seed(99)
    rest = fit(
        model,
        data,
        seed=77,
        epochs=4,
        callbacks=[Checkpoint(tmp_path_shared)],
        resume="auto",
        **options,
    )
    assert rest.epoch == [2, 3]
    assert_same_state(world, model, expected)
    for name, values in rest.history.items():
        assert values == history.history[name][2:], name


@pytest.mark.dealt
def test_error_feedback_goes_on(world: Communicator, tmp_path_shared: Path) -> None:
    """What rounding took from each rank's gradients is part of the state."""
    data = samples(20 * world.size)
    how = {"compression": "bfloat16", "error_feedback": True}

    def train(name: str, *more: Any, **options: Any) -> keras.Model:
        model = build(OPTIMIZERS["momentum"])
        callbacks = [Checkpoint(tmp_path_shared / name, every_steps=1), *more]
        fit(
            model,
            data,
            trainer=how,
            batch_size=4,
            epochs=2,
            callbacks=callbacks,
            **options,
        )
        return model

    expected = train("whole")
    with pytest.raises(Killed):
        train("killed", KillAt(8))
    world.barrier()
    arrays, _ = _files.read(_files.listed(tmp_path_shared / "killed")[0])
    for rank in range(world.size if world.size > 1 else 0):
        names = [n for n in arrays if n.startswith(f"rank-{rank}/residual/")]
        assert names and any(arrays[name].any() for name in names)
    model = train("killed", resume="auto")
    assert_same_state(world, model, expected)


@pytest.mark.dealt
def test_another_number_of_steps_an_execution(
    world: Communicator, tmp_path_shared: Path
) -> None:
    """What was done is four of seven steps: neither a whole number of threes."""
    data = samples(28 * world.size - 1)

    def train(name: str, steps: int, *more: Any, **options: Any) -> keras.Model:
        model = build(OPTIMIZERS["momentum"], steps_per_execution=steps)
        checkpoint = Checkpoint(tmp_path_shared / name, every_steps=1)
        callbacks = [checkpoint, *more]
        fit(model, data, batch_size=4, epochs=2, callbacks=callbacks, **options)
        return model

    expected = train("whole", 2)
    with pytest.raises(Killed):
        train("killed", 2, KillAt(3))
    model = train("killed", 3, resume="auto")
    assert_same_state(world, model, expected)
    world.barrier()
    names = [path.name for path in _files.listed(tmp_path_shared / "killed")]
    assert names[1:] == [f"checkpoint-{1 + n:06d}-epoch-1-step-{n}.npz" for n in (7, 6)]


class Batches(keras.utils.PyDataset):
    """Eleven batches of three, whose hook puts them in another order."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.x, self.y = samples(33)
        self.order = np.arange(11)
        self.made: list[int] = []

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Any:
        self.made.append(index)
        rows = slice(3 * self.order[index], 3 * self.order[index] + 3)
        return self.x[rows], self.y[rows]

    def on_epoch_end(self) -> None:
        self.order = np.random.permutation(self.order)


def pipeline() -> Any:
    """A `tf.data` pipeline in another order each time."""
    dataset = tf.data.Dataset.from_tensor_slices(samples(33))
    options = tf.data.Options()
    options.autotune.enabled = False  # else what is left in the middle ends late
    return dataset.shuffle(33, seed=4).batch(3).with_options(options)


KINDS: dict[str, Any] = {
    "PyDataset": lambda: (Batches(), {}),
    "tf.data": lambda: (pipeline(), {}),
    "tf.data of unknown length": lambda: (
        pipeline().filter(lambda x, y: tf.reduce_sum(x) < 1e9),
        {},
    ),
    "tf.data without end": lambda: (pipeline().repeat(), {"steps_per_epoch": 4}),
    "generator": lambda: (
        (batch for _ in range(12) for batch in pipeline().as_numpy_iterator()),
        {"steps_per_epoch": 4},
    ),
}


@pytest.mark.dealt
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_data_go_on_within_an_epoch(
    world: Communicator, tmp_path_shared: Path, kind: str
) -> None:
    def train(name: str, *callbacks: Any, **options: Any) -> keras.Model:
        model = build(OPTIMIZERS["momentum"], dropout=False)
        data, more = KINDS[kind]()
        checkpoint = Checkpoint(tmp_path_shared / name, every_steps=1)
        fit(
            model,
            data,
            epochs=4,
            callbacks=[checkpoint, *callbacks],
            **more,
            **options,
        )
        return model

    expected = train("whole")
    steps = 4 if "end" in kind or kind == "generator" else -(-11 // world.size)
    with pytest.raises(Killed):
        train("killed", KillAt(2 * steps + 2))
    model = train("killed", resume="auto")
    assert_same_state(world, model, expected)


@pytest.mark.dealt
def test_optimizers_of_the_models_own(
    world: Communicator, tmp_path_shared: Path
) -> None:
    """Which only a step of the model builds: their state was taken for another's."""
    x, _ = samples(24 * world.size)

    def train(*callbacks: keras.callbacks.Callback, **options: Any) -> keras.Model:
        keras.utils.set_random_seed(0)
        model = Adversarial()
        model.build((None, FEATURES))
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), keras.optimizers.Adam())
        checkpoint = Checkpoint(tmp_path_shared, every_steps=2, background=False)
        fit(
            model,
            (x, None),
            batch_size=4,
            epochs=2,
            callbacks=[checkpoint, *callbacks],
            **options,
        )
        return model

    with pytest.raises(Killed):
        train(KillAt(9))
    model = train(resume="auto")
    expected = train()
    for mine, theirs in zip(model.weights, expected.weights, strict=True):
        np.testing.assert_array_equal(mine.numpy(), theirs.numpy())


class Watch(keras.callbacks.Callback):
    """Counts what it sees, and what is asked of it before it begins."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []
        self.known: int | None = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches.append(batch)

    def get_state(self) -> dict[str, Any]:
        return {"seen": len(self.batches)}

    def set_state(self, state: dict[str, Any]) -> None:
        self.known = state["seen"]


@pytest.mark.dealt
@pytest.mark.parametrize("within", [False, True])
def test_callbacks_that_steer_go_on(
    world: Communicator, tmp_path_shared: Path, within: bool
) -> None:
    """A warm-up, a plateau, a schedule that multiplies, early stopping, averages."""
    data, held_out = samples(20 * world.size), samples(16, seed=8)

    def steering() -> list[keras.callbacks.Callback]:
        return [
            LearningRateWarmup(warmup_epochs=4, divisor=2),
            keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 1.3),
            keras.callbacks.ReduceLROnPlateau(patience=1, factor=0.5, min_delta=0.05),
            keras.callbacks.EarlyStopping(patience=3, restore_best_weights=True),
        ]

    options: dict[str, Any] = {"batch_size": 4, "validation_data": held_out}
    expected = build(OPTIMIZERS["ema"])
    whole = Checkpoint(tmp_path_shared / "whole")
    history = fit(expected, data, epochs=9, callbacks=[whole, *steering()], **options)
    checkpoint = Checkpoint(tmp_path_shared, every_steps=1 if within else None, keep=1)
    killed = build(OPTIMIZERS["ema"])
    with pytest.raises(Killed):
        callbacks = [checkpoint, Watch(), *steering(), KillAt(13 if within else 11)]
        fit(killed, data, epochs=9, callbacks=callbacks, **options)
    model, watch = build(OPTIMIZERS["ema"]), Watch()
    callbacks = [Checkpoint(tmp_path_shared), watch, *steering()]
    rest = fit(model, data, epochs=9, callbacks=callbacks, resume="auto", **options)
    assert rest.epoch == history.epoch[2:]
    assert rest.history["learning_rate"] == history.history["learning_rate"][2:]
    assert_same_state(world, model, expected)
    assert watch.batches[:4] == ([2, 3, 4, 0] if within else [0, 1, 2, 3])
    assert watch.known == (12 if within else 10)


@pytest.mark.dealt
def test_a_schedule_goes_on_from_its_initial_rate(
    world: Communicator, tmp_path_shared: Path
) -> None:
    """It multiplied what the earlier run had left; and a log was begun anew."""
    data = samples(8 * world.size)

    def train(folder: str, *more: Any, **options: Any) -> tuple[keras.Model, Any]:
        model = build(OPTIMIZERS["momentum"])
        schedule = LearningRateSchedule(lambda epoch: 0.5**epoch)
        log = keras.callbacks.CSVLogger(str(tmp_path_shared / f"{folder}.csv"))
        callbacks = [Checkpoint(tmp_path_shared / folder), schedule, log, *more]
        try:
            history = fit(
                model,
                data,
                epochs=4,
                batch_size=4,
                trainer={"learning_rate_scaling": "linear"},
                callbacks=callbacks,
                **options,
            )
        finally:
            if log.csv_file:
                log.csv_file.close()
        return model, history.history["learning_rate"]

    expected, whole = train("whole")
    initial = 0.05 * world.size
    np.testing.assert_allclose(whole, initial * 0.5 ** np.arange(4), rtol=1e-6)
    with pytest.raises(Killed):
        train("killed", KillAt(7))  # of epoch 3 there is a line, and no checkpoint
    (tmp_path_shared / "killed" / _files.name(3, 3, 0)).unlink(missing_ok=True)
    world.barrier()
    model, rest = train("killed", resume="auto")
    assert rest == whole[2:]
    assert_same_state(world, model, expected)
    logs = [tmp_path_shared / f"{folder}.csv" for folder in ("whole", "killed")]
    assert logs[0].read_text() == logs[1].read_text()
    assert len(logs[0].read_text().splitlines()) == 5


class Seen(keras.metrics.Metric):
    """How often the samples of an epoch were seen; targets are their numbers."""

    def __init__(self, count: int) -> None:
        super().__init__(name="seen")
        self.count = count
        self.counts = self.add_variable((count,), "zeros", name="counts")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        numbers = keras.ops.cast(keras.ops.reshape(y_true, (-1,)), "int32")
        seen = keras.ops.sum(keras.ops.one_hot(numbers, self.count), axis=0)
        self.counts.assign(self.counts + seen)

    def result(self) -> dict[str, Any]:
        return {
            "fewest": keras.ops.min(self.counts),
            "most": keras.ops.max(self.counts),
        }


SAMPLES = 45


def numbered(kind: str) -> Any:
    """Data whose targets are the numbers of its samples."""
    x = samples(SAMPLES)[0]
    y = np.arange(SAMPLES, dtype="float32")
    if kind == "arrays":
        return x, y
    if kind == "tf.data":
        return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(45, seed=1).batch(3)
    batches = Batches()
    batches.order, batches.x, batches.y = np.arange(15), x, y
    return batches


def train_numbered(
    kind: str,
    communicator: Communicator,
    *callbacks: Any,
    accumulation: int | None = None,
    **options: Any,
) -> tuple[keras.Model, Any]:
    """Trains two epochs with a global batch of six, or batches of three a rank."""
    keras.utils.set_random_seed(4)
    inputs = keras.Input((6,))
    model = keras.Model(inputs, keras.layers.Dense(1, name="only")(inputs))
    rate = 0.0005 if kind == "arrays" else 0.001
    optimizer = keras.optimizers.SGD(
        rate, 0.9, gradient_accumulation_steps=accumulation
    )
    model.compile(optimizer, "mse", metrics=[Seen(SAMPLES)])
    if kind == "arrays" and "batch_size" not in options:
        options["global_batch_size"] = 6
    history = fit(
        model,
        numbered(kind),
        trainer={"communicator": communicator},
        epochs=2,
        callbacks=list(callbacks),
        **options,
    )
    return model, history


@pytest.mark.dealt
@pytest.mark.parametrize("more_ranks", [True, False])
@pytest.mark.parametrize(
    ("kind", "resized", "accumulation"),
    [
        ("arrays", "keep_global_batch", None),
        ("arrays", "keep_global_batch", 3),  # stopped between two updates
        ("arrays", "rescale", None),
        ("PyDataset", "keep_global_batch", None),
        ("tf.data", "keep_global_batch", None),
    ],
)
def test_another_number_of_ranks(
    world: Communicator,
    tmp_path_shared: Path,
    kind: str,
    resized: str,
    accumulation: int | None,
    more_ranks: bool,
) -> None:
    """Each sample of the epoch is seen once, by the ranks before and after together."""
    alone = SingleCommunicator()

    def on(many: bool, *callbacks: Any, **options: Any) -> Any:
        options["accumulation"] = accumulation
        if many:
            return train_numbered(kind, world, *callbacks, **options)
        if world.rank == 0:
            return train_numbered(kind, alone, *callbacks, **options)
        return None

    folder = tmp_path_shared
    if not more_ranks or world.rank == 0:
        with pytest.raises(Killed):
            on(not more_ranks, Checkpoint(folder, every_steps=1), KillAt(4))
    world.barrier()
    options: dict[str, Any] = {"resume": folder, "resized": resized}
    if resized == "rescale":
        options["batch_size"] = 4
    trained = on(more_ranks, **options)
    if trained is not None:
        model, history = trained
        assert history.epoch == [0, 1]
        assert history.history["fewest"] == history.history["most"] == [1, 1]
        rate = float(model.optimizer.learning_rate)
        if resized == "keep_global_batch" and kind == "arrays":
            assert rate == pytest.approx(0.0005 * (1 if more_ranks else world.size))
        elif world.size > 1:
            base = 0.0005 if kind == "arrays" else 0.001
            assert rate == pytest.approx(base * (world.size if more_ranks else 1))
        if resized == "keep_global_batch" and kind == "arrays" and more_ranks:
            whole = Checkpoint(folder / f"whole-{world.rank}")
            single, _ = train_numbered(kind, alone, whole, accumulation=accumulation)
            assert_equal_weights(model, single)
    world.barrier()
