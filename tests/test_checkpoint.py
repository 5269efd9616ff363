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
from equivalence import samples

from distkeras.callbacks import Checkpoint
from distkeras.communicators import Communicator

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


@pytest.mark.dealt
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("stopped", ["between epochs", "within an epoch"])
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
    return dataset.shuffle(33, seed=4).batch(3)


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
