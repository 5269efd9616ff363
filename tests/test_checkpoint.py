"""`Checkpoint` and `resume`: as if training had never been interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest
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
