"""Scripts that save as one process does: one whole file, whoever calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from equivalence import build
from equivalence import samples
from equivalence import trainer

from distkeras.communicators import Communicator

pytestmark = pytest.mark.tensorflow

WAYS: dict[str, Callable[[keras.Model, Path], Any]] = {
    "model.keras": lambda model, path: model.save(path),
    "model.h5": lambda model, path: model.save(path),
    "model.weights.h5": lambda model, path: model.save_weights(path),
    "exported": lambda model, path: model.export(path, verbose=False),
}


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1)


def assert_same_weights(left: keras.Model, right: keras.Model) -> None:
    for a, b in zip(left.get_weights(), right.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def folder_of(world: Communicator, tmp_path: Path) -> Path:
    """Returns rank 0's folder, on all ranks."""
    return Path(world.broadcast_object(str(tmp_path)))


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
def test_all_ranks_call(world: Communicator, tmp_path: Path, name: str) -> None:
    """Files were damaged, or one rank found them locked."""
    model = build(sgd)
    trainer(trainer(model).model)  # of two Trainers the methods are wrapped once
    folder = folder_of(world, tmp_path)
    for _ in range(3):
        WAYS[name](model, folder / name)
    WAYS[name](model, folder / f"{world.rank}-{name}")
    world.barrier()
    assert {path.name for path in folder.iterdir()} == {name, f"0-{name}"}
    again = build(sgd, seed=2)
    if name.endswith("weights.h5"):
        again.load_weights(folder / name)
    elif name != "exported":
        again = keras.models.load_model(folder / name)
    if name != "exported":
        assert_same_weights(again, model)


def test_rank_0_alone_calls(world: Communicator, tmp_path: Path) -> None:
    """It waits for nobody, as it is written in Horovod's scripts."""
    model = build(sgd)
    trainer(model)
    if world.rank == 0:
        model.save(tmp_path / "model.keras")
        assert_same_weights(keras.models.load_model(tmp_path / "model.keras"), model)


def test_a_callback_of_the_users_saves(world: Communicator, tmp_path: Path) -> None:
    path = folder_of(world, tmp_path) / "last.weights.h5"

    class Save(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.save_weights(path, overwrite=True)

    model = build(sgd)
    x, y = samples(12 * world.size)
    trainer(model).fit(x, y, batch_size=4, epochs=3, verbose=0, callbacks=[Save()])
    world.barrier()
    again = build(sgd, seed=2)
    again.load_weights(path)
    assert_same_weights(again, model)


def test_clones_are_others(world: Communicator) -> None:
    """What is put on a model goes into no copy, file or configuration of it."""
    model = build(sgd)
    trainer(model)
    clone = keras.models.clone_model(model)
    assert "save" not in vars(clone)
    assert ("save" in vars(model)) == (world.size > 1)
