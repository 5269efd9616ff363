"""A training script whose ranks get lost: `elastic_job.py FOLDER OPTIONS`.

The options are JSON. `deaths` lists where ranks kill themselves: the number that the
launcher gave the rank, a stage, an epoch and a batch; `pause` is how long a step takes.
With `preempted` a rank that dies sends SIGTERM to the others first.
Each rank notes its process and its steps in the folder, and at the end what it holds.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

import distkeras

SAMPLES, GLOBAL_BATCH, EPOCHS = 100, 12, 4
STEPS = -(-SAMPLES // GLOBAL_BATCH)
ME = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))


class Seen(keras.metrics.Metric):
    """How often the samples of an epoch were seen: the rarest, or the most frequent.

    The number of a sample is its first feature.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.counts = self.add_weight(
            shape=(SAMPLES,), initializer="zeros", name="counts"
        )

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        numbers = keras.ops.cast(y_true[:, 1], "int32")
        self.counts.assign_add(
            keras.ops.sum(keras.ops.one_hot(numbers, SAMPLES, dtype="float32"), axis=0)
        )

    def result(self) -> Any:
        if self.name == "rarest":
            return keras.ops.min(self.counts)
        return keras.ops.max(self.counts)


class FirstColumn(keras.losses.Loss):
    """The squared error of the first column; the second one numbers samples."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.ops.square(y_true[:, 0] - y_pred[:, 0])


class Die(keras.callbacks.Callback):
    """Notes steps, takes a while for each, and ends this process where it is to."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        super().__init__()
        self.folder = folder
        deaths = options.get("deaths", [])
        self.deaths = [(stage, e, b) for r, stage, e, b in deaths if r == ME]
        self.pause = options.get("pause", 0.0)
        self.preempted = options.get("preempted", False)
        self.epoch = 0

    def reach(self, stage: str, batch: int = 0) -> None:
        here = (stage, self.epoch, batch)
        done = self.folder / f"died-{ME}-{stage}-{self.epoch}-{batch}"
        if here in self.deaths and not done.exists():
            done.touch()
            if self.preempted:
                self.tell_the_others()
            os.kill(os.getpid(), signal.SIGKILL)

    def tell_the_others(self) -> None:
        for path in self.folder.glob("process-*"):
            if path.name != f"process-{ME}":
                os.kill(int(path.read_text()), signal.SIGTERM)

    def on_train_begin(self, logs: Any = None) -> None:
        self.reach("train_begin")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        with (self.folder / f"steps-{ME}").open("a") as file:
            print(self.epoch * STEPS + batch, file=file)
        self.reach("step", batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.reach("batch_end", batch)
        time.sleep(self.pause)

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.reach("validation", batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.reach("epoch_end")

    def on_train_end(self, logs: Any = None) -> None:
        self.reach("train_end")


def build() -> keras.Model:
    """Returns the model, the same everywhere."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((4,)), *layers])


def compiled_with(rate: float, accumulated: int | None = None) -> dict[str, Any]:
    """Returns the arguments of `compile`."""
    return {
        "optimizer": keras.optimizers.SGD(
            rate, momentum=0.9, gradient_accumulation_steps=accumulated
        ),
        "loss": FirstColumn(),
        "metrics": [Seen("rarest"), Seen("most")],
    }


def samples() -> tuple[np.ndarray, np.ndarray]:
    """Returns x, and y with the numbers of the samples as its second column."""
    x = np.random.default_rng(2).normal(size=(SAMPLES, 4)).astype("float32")
    return x, np.stack([x.sum(axis=1), np.arange(SAMPLES)], axis=1).astype("float32")


class Batches(keras.utils.PyDataset):
    """Samples in batches, by number."""

    def __init__(self, x: np.ndarray, y: np.ndarray, size: int) -> None:
        super().__init__()
        self.x, self.y, self.size = x, y, size

    def __len__(self) -> int:
        return -(-len(self.x) // self.size)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        part = slice(index * self.size, (index + 1) * self.size)
        return self.x[part], self.y[part]


def in_batches(kind: str, x: np.ndarray, y: np.ndarray, size: int) -> Any:
    """Returns samples as data that comes in batches."""
    if kind == "PyDataset":
        return Batches(x, y, size)
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices((x, y))
    again = kind == "tf.data, shuffled anew"
    return data.shuffle(SAMPLES, seed=3, reshuffle_each_iteration=again).batch(size)


def main(folder: Path, options: dict[str, Any]) -> None:
    """Trains, evaluates and saves."""
    (folder / f"process-{ME}").write_text(str(os.getpid()))
    distkeras.init()
    x, y = samples()
    die = Die(folder, options)
    stopping = keras.callbacks.EarlyStopping("loss", patience=50)
    callbacks = [die, stopping, keras.callbacks.CSVLogger(folder / "log.csv")]
    resume = None
    if options.get("checkpoint"):
        checkpoint = distkeras.callbacks.Checkpoint(
            folder / "checkpoints", every_steps=2
        )
        callbacks.append(checkpoint)
        resume = "auto"
    (folder / f"started-{ME}").touch()
    model = build()
    trainer = distkeras.Trainer(model, seed=4)
    trainer.compile(
        **compiled_with(0.01, options.get("accumulated")),
        steps_per_execution=options.get("execution", 1),
    )
    data, size = (x, y), GLOBAL_BATCH // distkeras.size()
    if options.get("data"):
        data, size = (in_batches(options["data"], x, y, size), None), None
    history = trainer.fit(
        *data,
        batch_size=size,
        epochs=EPOCHS,
        validation_data=(x[:30], y[:30]),
        callbacks=callbacks,
        shuffle=options.get("shuffle", True),
        resume=resume,
        resized=options.get("resized", "keep_global_batch"),
        verbose=0,
    )
    die.reach("evaluate")
    loss = trainer.evaluate(x, y, verbose=0, return_dict=True)["loss"]
    die.reach("save")
    trainer.save(folder / "model.keras")
    weights = b"".join(array.tobytes() for array in model.get_weights())
    result = {
        "rank": distkeras.rank(),
        "size": distkeras.size(),
        "epochs": history.epoch,
        "history": history.history,
        "best": stopping.best,
        "evaluated": loss,
        "rate": float(model.optimizer.learning_rate),
        "weights": hashlib.blake2b(weights).hexdigest(),
    }
    (folder / f"result-{ME}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
