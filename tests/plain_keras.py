"""Loads what a job has saved, by Keras alone: `FOLDER`. Run without distkeras."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import keras
import numpy as np

BASE_RATE = 0.125


def check(path: Path, expected: dict[str, np.ndarray], *, same: bool) -> None:
    """Fails unless a file holds an ordinary compiled model that trains on.

    Args:
        path: of the file.
        expected: what the job knew when it saved.
        same: whether it is that moment's model, and not a later one.
    """
    model = keras.models.load_model(path)
    optimizer = model.optimizer
    assert type(optimizer) is keras.optimizers.SGD, type(optimizer)
    assert float(optimizer.learning_rate) == BASE_RATE, optimizer.learning_rate
    assert optimizer.clipnorm == 1.0
    x, y = expected["x"], expected["y"]
    results = model.evaluate(x, y, verbose=0)
    if same:
        np.testing.assert_allclose(results, expected["results"], rtol=1e-6)
        assert int(optimizer.iterations) == expected["iterations"]
        momenta = [np.ravel(v.numpy()) for v in optimizer.momentums]
        np.testing.assert_array_equal(np.concatenate(momenta), expected["momenta"])
    else:
        assert int(optimizer.iterations) > expected["iterations"]
    assert len(results) == 2  # the loss and the metric it was compiled with
    before = [weight.copy() for weight in model.get_weights()]
    history = model.fit(x, y, batch_size=4, epochs=2, verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    pairs = zip(before, model.get_weights(), strict=True)
    assert all((a != b).any() for a, b in pairs)
    assert float(optimizer.learning_rate) == BASE_RATE


def main(folder: Path) -> None:
    """Checks all files of a folder."""
    assert importlib.util.find_spec("distkeras") is None
    with np.load(folder / "expected.npz") as file:
        expected = dict(file)
    for name in ("checkpoint.keras", "saved.keras", "plain.keras"):
        check(folder / name, expected, same=True)
    check(folder / "again.keras", expected, same=False)
    model = keras.models.load_model(folder / "again.keras")
    model.load_weights(folder / "only.weights.h5")
    results = model.evaluate(expected["x"], expected["y"], verbose=0)
    np.testing.assert_allclose(results, expected["results"], rtol=1e-6)
    print("loaded")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
