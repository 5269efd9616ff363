"""A training script whose files are loaded where distkeras is not: `FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

import distkeras

BASE_RATE = 0.125


class Rates(keras.callbacks.Callback):
    """Notes the learning rates that steps are done with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[float] = set()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.seen.add(float(self.model.optimizer.learning_rate))


def main(folder: Path) -> None:
    """Trains, saves in every way, loads, trains on and saves once more."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(4, activation="tanh")(inputs)
    hidden = keras.layers.BatchNormalization()(hidden)
    model = keras.Model(inputs, keras.layers.Dense(2)(hidden))
    trainer = distkeras.Trainer(model, warmup_epochs=1)
    trainer.compile(
        keras.optimizers.SGD(BASE_RATE, momentum=0.9, clipnorm=1.0),
        loss="mse",
        metrics=["mae"],
    )
    x = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
    y = x[:, :2]
    trainer.fit(
        x,
        y,
        batch_size=2,
        epochs=2,
        verbose=0,
        callbacks=[
            keras.callbacks.ModelCheckpoint(folder / "checkpoint.keras"),
            keras.callbacks.ModelCheckpoint(
                folder / "only.weights.h5", save_weights_only=True
            ),
        ],
    )
    trainer.save(folder / "saved.keras")
    if distkeras.rank() == 0:
        model.save(folder / "plain.keras")
        loss, mae = model.evaluate(x, y, verbose=0)
        np.savez(
            folder / "expected.npz",
            x=x,
            y=y,
            results=[loss, mae],
            iterations=int(model.optimizer.iterations),
            momenta=np.concatenate(
                [np.ravel(v.numpy()) for v in model.optimizer.momentums]
            ),
        )
    distkeras.barrier()
    loaded, rates = distkeras.load_model(folder / "saved.keras"), Rates()
    again = distkeras.Trainer(loaded)
    again.fit(x, y, batch_size=2, verbose=0, callbacks=[rates])
    again.save(folder / "again.keras")
    if distkeras.rank() == 0:
        (folder / "rates.json").write_text(json.dumps(sorted(rates.seen)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
