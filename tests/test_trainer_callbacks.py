"""Keras' callbacks under `Trainer.fit`: one set of files, decisions shared by all."""

from __future__ import annotations

import contextlib
import http.server
import io
import itertools
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import FEATURES
from equivalence import assert_equal_everywhere
from equivalence import assert_equal_history
from equivalence import assert_equal_weights
from equivalence import build
from equivalence import samples
from equivalence import trainer

import distkeras
from distkeras.communicators import Communicator


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1, momentum=0.9)


def test_callbacks_decide_as_in_one_process(world: Communicator) -> None:
    """Early stopping, plateau, scheduler and EMA swap, all on validation values."""
    x, y = samples(60)
    xv, yv = samples(23, seed=9)

    def callbacks() -> list[keras.callbacks.Callback]:
        return [
            keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
            keras.callbacks.LearningRateScheduler(lambda epoch, lr: lr * 1.1),
            keras.callbacks.ReduceLROnPlateau(patience=1, factor=0.5, min_delta=0.01),
            keras.callbacks.EarlyStopping(patience=3, restore_best_weights=True),
        ]

    def optimizer() -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(0.3, momentum=0.9, use_ema=True, ema_momentum=0.9)

    single, model = build(optimizer), build(optimizer)
    options: dict[str, Any] = {"epochs": 12, "shuffle": False, "verbose": 0}
    options["validation_data"] = (xv, yv)
    expected = single.fit(
        x, y, batch_size=6 * world.size, callbacks=callbacks(), **options
    )
    history = trainer(model).fit(x, y, batch_size=6, callbacks=callbacks(), **options)
    assert history.epoch == expected.epoch
    assert_equal_history(history, expected, 1e-4)
    assert_equal_weights(model, single, 1e-4)
    assert_equal_everywhere(world, model)


def test_nan_on_one_rank_stops_all(world: Communicator) -> None:
    x, y = samples(16 * world.size)
    x[16 * world.size // 2 :] = np.nan  # only in the shard of the last rank
    model = build(sgd)
    history = trainer(model).fit(
        x[:, :],
        y,
        batch_size=16,
        epochs=50,
        shuffle=False,
        verbose=0,
        callbacks=[keras.callbacks.TerminateOnNaN()],
    )
    epochs = world.allgather_object(history.epoch)
    assert all(theirs == epochs[0] for theirs in epochs)
    assert len(epochs[0]) <= 2


class StopAt(keras.callbacks.Callback):
    """Stops at a batch, on one rank alone."""

    def __init__(self, rank: int, mine: int, batch: int) -> None:
        super().__init__()
        self.asks, self.batch, self.seen = rank == mine, batch, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen += 1
        if self.asks and batch == self.batch:
            self.model.stop_training = True


@pytest.mark.parametrize("batch", [2, 4])
@pytest.mark.parametrize("accumulation", [None, 2])
def test_stop_at_a_batch_of_one_rank(
    world: Communicator, batch: int, accumulation: int | None
) -> None:
    x, y = samples(10 * 4 * world.size)
    stop = StopAt(world.size - 1, world.rank, batch)
    model = build(
        lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=accumulation)
    )
    trainer(model).fit(
        x, y, batch_size=4, epochs=3, shuffle=False, verbose=0, callbacks=[stop]
    )
    seen = world.allgather_object(stop.seen)
    late = 1 if world.size > 1 else 0
    assert seen == [batch + 1 + late] * world.size


class Posts(http.server.BaseHTTPRequestHandler):
    """Counts what is posted to the server."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posts += 1  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Prints nothing."""


@contextlib.contextmanager
def listening() -> Iterator[http.server.HTTPServer]:
    """A server that counts posts, while inside."""
    server = http.server.HTTPServer(("127.0.0.1", 0), Posts)
    server.posts = 0  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Writes(keras.callbacks.Callback):
    """A user's callback that writes one line an epoch."""

    rank_zero_only = True

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        with self.path.open("a") as file:
            print(epoch, file=file)


class Marked(Writes):
    """The same without the attribute: an instance is marked."""

    rank_zero_only = None


def writers(folder: Path, port: int) -> list[keras.callbacks.Callback]:
    """Returns all that write, and one on each rank."""
    callbacks = keras.callbacks
    everywhere = Marked(folder / "everywhere.txt")
    return [
        callbacks.ModelCheckpoint(folder / "best.keras", save_best_only=True),
        callbacks.ModelCheckpoint(
            folder / "{epoch}.weights.h5", save_weights_only=True
        ),
        callbacks.CSVLogger(folder / "log.csv"),
        callbacks.TensorBoard(folder / "board", update_freq=1),
        callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False),
        callbacks.RemoteMonitor(f"http://127.0.0.1:{port}"),
        callbacks.ProgbarLogger(),
        Writes(folder / "attribute.txt"),
        distkeras.callbacks.on_rank_zero(Marked(folder / "marked.txt")),
        everywhere,
    ]


def files(folder: Path) -> list[str]:
    """Returns the files of a folder; TensorBoard's without times and processes."""
    paths = (p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    return sorted(re.sub(r"tfevents.*?\d\.", "tfevents.", path) for path in paths)


def test_files_are_those_of_one_process(world: Communicator, tmp_path: Path) -> None:
    """Each rank has a folder of its own: the others' hold what runs everywhere."""
    x, y = samples(24)
    options: dict[str, Any] = {"epochs": 2, "verbose": 2, "validation_data": (x, y)}
    posts, names = [], []
    for way in ("trainer", "keras"):
        (folder := tmp_path / way).mkdir()
        model = build(sgd)
        with listening() as server, contextlib.redirect_stdout(io.StringIO()) as text:
            callbacks = writers(folder, server.server_port)
            if way == "trainer":
                run = distkeras.Trainer(model)
                run.fit(x, y, batch_size=4, callbacks=callbacks, **options)
                assert bool(text.getvalue()) == (world.rank == 0)
            elif world.rank == 0:
                model.fit(x, y, batch_size=4, callbacks=callbacks, **options)
        posts.append(server.posts)  # type: ignore[attr-defined]
        names.append([re.sub(r"\.\d+\.(v2)", r".\1", name) for name in files(folder)])
    if world.rank == 0:
        assert posts == [2, 2]
        assert names[0] == names[1] and len(names[0]) == 11
        for name in ("log.csv", "attribute.txt", "marked.txt", "everywhere.txt"):
            lengths = {
                len((tmp_path / way / name).read_text().splitlines())
                for way in ("trainer", "keras")
            }
            assert len(lengths) == 1, name
    else:
        assert posts == [0, 0]
        assert names == [["everywhere.txt"], []]


def test_dropout_masks_differ_by_rank_and_repeat(world: Communicator) -> None:
    class Masks(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = keras.layers.Dropout(0.5)
            self.seen = self.add_weight(
                shape=(FEATURES,), initializer="zeros", trainable=False
            )

        def call(self, x: Any, training: bool = False) -> Any:
            x = self.dropout(x, training=training)
            if training:
                mask = keras.ops.cast(keras.ops.not_equal(x[0], 0), "float32")
                self.seen.assign(keras.ops.add(self.seen * 2.0, mask))
            return x

    x, y = np.ones((8 * world.size, FEATURES), "float32"), np.zeros(8 * world.size)
    masks = []
    for _ in range(2):
        keras.utils.set_random_seed(3)
        inputs = keras.Input((FEATURES,))
        layer = Masks()
        model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)))
        model.compile("sgd", loss="mse")
        record = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs, seen=layer.seen: masks.append(
                seen.numpy().tolist()
            )
        )
        trainer(model).fit(
            x, y, batch_size=2, shuffle=False, verbose=0, callbacks=[record]
        )
    assert masks[0] == masks[1]
    everyone = world.allgather_object(tuple(masks[0]))
    assert len(set(everyone)) == world.size


@pytest.mark.parametrize("aggregation", ["none", "mean"])
def test_own_state_of_ranks_is_made_one(
    world: Communicator, caplog: pytest.LogCaptureFixture, aggregation: str
) -> None:
    class Sum(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.total = self.add_weight(
                shape=(), initializer="zeros", trainable=False, aggregation=aggregation
            )

        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                self.total.assign(self.total + keras.ops.sum(x))
            return x

    inputs = keras.Input((1,))
    layer = Sum()
    model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)))
    model.compile("sgd", loss="mse")
    x = np.arange(world.size, dtype="float32")[:, None]
    trainer(model).fit(x, x, batch_size=1, shuffle=False, verbose=0)
    told = "State that is not trained" in caplog.text
    assert told == (aggregation == "none" and world.rank == 0 and world.size > 1)
    if world.size > 1:
        expected = 0 if aggregation == "none" else (world.size - 1) / 2
        assert float(layer.total) == expected


def test_moving_statistics_are_equal_in_the_end(world: Communicator) -> None:
    x, y = samples(8 * world.size)
    inputs = keras.Input((FEATURES,))
    hidden = keras.layers.BatchNormalization()(inputs)
    model = keras.Model(inputs, keras.layers.Dense(3)(hidden))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    trainer(model).fit(x, y, batch_size=4, verbose=0)
    mine = [v.numpy().tobytes() for v in model.variables]
    assert all(theirs == mine for theirs in world.allgather_object(mine))


def test_warmup_epochs(world: Communicator) -> None:
    """At update k the rate is base·(1 + (N - 1)·min(1, k / (W·S)))."""
    x, y = samples(12 * world.size)
    model = build(lambda: keras.optimizers.SGD(0.1))
    rates = []
    log = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: rates.append(
            float(model.optimizer.learning_rate)
        )
    )
    run = distkeras.Trainer(model, warmup_epochs=2)
    run.fit(x, y, batch_size=4, epochs=3, verbose=0, callbacks=[log])
    steps = 3
    expected = [
        0.1 * (1 + (world.size - 1) * min(1, k / (2 * steps))) for k in range(3 * steps)
    ]
    if world.size == 1:
        expected = [0.1] * len(rates)
    assert rates == pytest.approx(expected, rel=1e-6)


@pytest.mark.dealt
@pytest.mark.parametrize("kind", ["generator", "tf.data"])
def test_warmup_epochs_of_so_many_steps(world: Communicator, kind: str) -> None:
    """A generator was refused, and a pass over a dataset was taken for an epoch."""
    x, y = samples(24 * world.size)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    if kind == "generator":
        data = ((x[:4], y[:4]) for _ in itertools.repeat(None))
    model = build(lambda: keras.optimizers.SGD(0.1))
    rates = []
    log = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: rates.append(
            float(model.optimizer.learning_rate)
        )
    )
    distkeras.Trainer(model, warmup_epochs=2).fit(
        data, steps_per_epoch=2, epochs=3, shuffle=False, verbose=0, callbacks=[log]
    )
    expected = [0.1 * (1 + (world.size - 1) * min(1, k / 4)) for k in range(6)]
    if world.size == 1:
        expected = [0.1] * 6
    assert rates == pytest.approx(expected, rel=1e-6)


@pytest.mark.dealt
@pytest.mark.parametrize("kept", [False, True], ids=["", "checkpoint"])
def test_warmup_callback_of_a_later_fit(
    world: Communicator, tmp_path: Path, kept: bool
) -> None:
    """It was ignored: the step of the first `fit` knew of none."""
    x, y = samples(12 * world.size)
    single = build(lambda: keras.optimizers.SGD(0.1 * world.size))
    options: dict[str, Any] = {"shuffle": False, "verbose": 0}
    single.fit(x, y, batch_size=4 * world.size, **options)
    single.optimizer.learning_rate = 0.05 * world.size
    single.fit(x, y, batch_size=4 * world.size, **options)
    model = build(lambda: keras.optimizers.SGD(0.1))
    run = distkeras.Trainer(model)
    callbacks = [distkeras.callbacks.Checkpoint(tmp_path)] if kept else []
    run.fit(x, y, batch_size=4, callbacks=callbacks, **options)
    # So long that it has not left its beginning after three updates.
    callbacks.append(
        distkeras.callbacks.LearningRateWarmup(warmup_epochs=1e9, divisor=2)
    )
    run.fit(x, y, batch_size=4, callbacks=callbacks, **options)
    assert_equal_weights(model, single)


def test_warmup_that_comes_with_a_later_fit(world: Communicator) -> None:
    """The step that the first `fit` traced knows no warm-up; it must not be used."""
    x, y = samples(12 * world.size)
    model = build(lambda: keras.optimizers.SGD(0.1))
    run = distkeras.Trainer(model)
    run.fit(x, y, batch_size=4, verbose=0)
    before = run._session.functions
    run.warmup_epochs = 4
    run.fit(x, y, batch_size=4, verbose=0)
    if world.size > 1:
        assert run._session.functions is not before
        updates = int(model.optimizer.iterations)
        expected = 0.1 * (1 + (world.size - 1) * min(1, updates / 12))
        assert float(model.optimizer.learning_rate) == pytest.approx(expected)


def test_callbacks_that_steer_print_on_rank_0_alone(
    world: Communicator, capsys: pytest.CaptureFixture[str]
) -> None:
    x, y = samples(8 * world.size)
    callbacks = [
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate, verbose=1),
        keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=9, verbose=1),
        keras.callbacks.EarlyStopping("loss", patience=2, min_delta=9, verbose=1),
    ]
    run = trainer(build(lambda: keras.optimizers.SGD(0.1)))
    run.fit(x, y, batch_size=4, epochs=4, verbose=0, callbacks=callbacks)
    text = capsys.readouterr().out
    own = [text.count(word) for word in ("Scheduler", "Plateau", "early stopping")]
    assert own == ([3, 2, 1] if world.rank == 0 else [0, 0, 0]), text
    # The process may be rank 0 of the next `fit`.
    assert [callback.verbose for callback in callbacks] == [1, 1, 1]
