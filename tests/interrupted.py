"""A training script that gets killed: `interrupted.py FOLDER BACKGROUND`.

It goes on from its newest checkpoint. Each rank notes its process in the folder, rank 0
each step that it does. When training is over, it is done once more without a pause, and
the exit code tells whether both ended with the same state.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import keras
from checkpoints import build
from checkpoints import fit
from checkpoints import state
from equivalence import samples

import distkeras
from distkeras.callbacks import Checkpoint

EPOCHS, STEPS, EVERY = 8, 25, 5


class Note(keras.callbacks.Callback):
    """Notes the numbers of the steps, and takes a while for each."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.steps = folder / "steps"
        self.pause = 0.02

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if distkeras.rank() == 0:
            with self.steps.open("a") as file:
                print(self.epoch * STEPS + batch, file=file)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        time.sleep(self.pause)


def optimizer() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(0.01)


def main(folder: Path, background: bool) -> int:
    """Trains; returns the exit code."""
    (folder / f"process-{distkeras.rank()}").write_text(str(os.getpid()))
    data = samples(STEPS * 2 * distkeras.size() - 1)
    options: dict[str, Any] = {"batch_size": 2, "epochs": EPOCHS}
    model = build(optimizer)
    checkpoint = Checkpoint(
        folder / "checkpoints",
        every_steps=EVERY,
        background=background,
        signals=(signal.SIGTERM, signal.SIGUSR1),
    )
    callbacks = [checkpoint, Note(folder)]
    fit(model, data, callbacks=callbacks, resume="auto", **options)
    expected = build(optimizer)
    whole = Checkpoint(folder / "whole", every_epochs=EPOCHS)
    fit(expected, data, callbacks=[whole], **options)
    return 0 if state(model) == state(expected) else 3


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2] == "background"))
