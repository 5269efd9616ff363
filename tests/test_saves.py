"""Scripts that save as one process does: one whole file, whoever calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from equivalence import FEATURES
from equivalence import build
from equivalence import samples
from equivalence import trainer

import distkeras
from distkeras import CommunicatorError
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
        if name != "exported":  # a folder changes file by file
            read(folder / name, model)
    WAYS[name](model, folder / f"{world.rank}-{name}")
    world.barrier()
    own = {f"{rank}-{name}" for rank in range(world.size)}
    assert {path.name for path in folder.iterdir()} == {name, *own}
    read(folder / name, model)


def read(path: Path, model: keras.Model) -> None:
    """Fails unless what a model was saved to holds its weights."""
    again = build(sgd, seed=2)
    if path.name.endswith("weights.h5"):
        again.load_weights(path)
    elif path.suffix:
        again = keras.models.load_model(path)
    else:
        found = keras.layers.TFSMLayer(str(path), call_endpoint="serve")
        x = np.ones((2, FEATURES), "float32")
        np.testing.assert_allclose(found(x), model(x), rtol=1e-5, atol=1e-6)
        return
    assert_same_weights(again, model)


def test_rank_0_alone_calls(world: Communicator, tmp_path: Path) -> None:
    """It waits for nobody, as it is written in Horovod's scripts."""
    model = build(sgd)
    trainer(model)
    if world.rank == 0:
        model.save(tmp_path / "model.keras")
        read(tmp_path / "model.keras", model)
        assert [path.name for path in tmp_path.iterdir()] == ["model.keras"]


def test_models_within_save_too(world: Communicator, tmp_path: Path) -> None:
    inner, outer = build(sgd), keras.Sequential()
    outer.add(inner)
    trainer(outer)
    path = folder_of(world, tmp_path) / "inner.keras"
    for _ in range(3):
        inner.save(path)
        read(path, inner)
    world.barrier()


def test_ways_of_the_users_stay(world: Communicator, tmp_path: Path) -> None:
    class Own(keras.Sequential):
        def save(self) -> str:  # type: ignore[override]
            return "own"

    model = Own([keras.layers.Dense(2)])
    model.build((None, 3))
    model.export = lambda: "mine"
    trainer(model)
    assert (model.save(), model.export()) == ("own", "mine")
    model.save_weights(tmp_path / "model.weights.h5")
    assert [path.name for path in tmp_path.iterdir()] == ["model.weights.h5"]


def test_what_is_there_stays_until_the_new_is_whole(
    world: Communicator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in the middle, an overwrite that is refused; links stay links."""
    model = build(sgd)
    path = tmp_path / "model.weights.h5"
    model.save_weights(path)
    before = path.read_bytes()
    trainer(model)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr("keras.src.saving.saving_lib._save_state", fail)
        with pytest.raises(OSError, match="no space left"):
            model.save_weights(path)
        if world.size > 1:
            assert path.read_bytes() == before
    monkeypatch.setattr("builtins.input", lambda *_: "n")
    model.save_weights(path, overwrite=False)
    (tmp_path / "link.weights.h5").symlink_to(path)
    model.save_weights(tmp_path / "link.weights.h5")
    assert (tmp_path / "link.weights.h5").is_symlink()
    names = {"model.weights.h5", "link.weights.h5"}
    assert {entry.name for entry in tmp_path.iterdir()} == names


def test_a_callback_of_the_users_saves(world: Communicator, tmp_path: Path) -> None:
    path = folder_of(world, tmp_path) / "last.weights.h5"

    class Save(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.save_weights(path, overwrite=True)

    model = build(sgd)
    x, y = samples(12 * world.size)
    trainer(model).fit(x, y, batch_size=4, epochs=3, verbose=0, callbacks=[Save()])
    world.barrier()
    read(path, model)


def test_a_file_that_is_not_there(world: Communicator, tmp_path: Path) -> None:
    """The error says what was done, what came of it on which rank, and what helps."""
    path = tmp_path / "missing.keras"
    if world.size == 1:
        with pytest.raises(ValueError, match="File not found"):
            distkeras.load_model(path)
        return
    with pytest.raises(CommunicatorError) as caught:
        distkeras.load_model(path)
    said = str(caught.value).splitlines()
    assert said[0].startswith(f"Expected reading {str(path)!r} on rank 0 to succeed")
    assert said[0].endswith("Received an error on rank 0:")
    assert said[1].startswith("  rank 0: FileNotFoundError: ")
    assert said[2].startswith("Only rank 0 needs to see the file.")
    assert len(said) == 3
    assert (caught.value.__cause__ is not None) == (world.rank == 0)


def test_a_file_that_is_no_model(world: Communicator, tmp_path: Path) -> None:
    path = folder_of(world, tmp_path) / "model.keras"
    if world.rank == 0:
        path.write_text("nothing")
    if world.size == 1:
        with pytest.raises(ValueError):
            distkeras.load_model(path)
        return
    with pytest.raises(CommunicatorError) as caught:
        distkeras.load_model(path)
    ranks = [line for line in str(caught.value).splitlines() if line[:6] == "  rank"]
    assert len(ranks) == world.size
    assert str(caught.value).startswith(f"Expected loading the model of {str(path)!r}")
    assert "`custom_objects=`, on every rank." in str(caught.value)


def test_a_place_that_cannot_be_written(world: Communicator, tmp_path: Path) -> None:
    if world.size == 1:
        pytest.skip("the error is Keras' own")
    with pytest.raises(CommunicatorError) as caught:
        trainer(build(sgd)).save(tmp_path / "nowhere" / "model.keras")
    said = str(caught.value)
    assert said.startswith("Expected saving the model to succeed. ")
    assert "Its own traceback is above, in what rank 0 wrote; the others" in said


def test_clones_are_others(world: Communicator) -> None:
    """What is put on a model goes into no copy, file or configuration of it."""
    model = build(sgd)
    trainer(model)
    clone = keras.models.clone_model(model)
    assert "save" not in vars(clone)
    assert ("save" in vars(model)) == (world.size > 1)
