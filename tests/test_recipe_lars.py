"""LARS: the published update to the last digit, and N ranks like one process."""

from pathlib import Path

import keras
import numpy as np
import pytest
from numpy.testing import assert_allclose
from numpy.testing import assert_array_equal

import distkeras
from distkeras import communicators
from distkeras.recipes._lars import LARS


def expected(
    weights: np.ndarray, gradients: list[np.ndarray], *, trust: float, decay: float
) -> np.ndarray:
    """Goes through the published update (algorithm 1) in float64; rate 2, m 0.9."""
    w, v = weights.astype("float64"), 0.0
    for gradient in gradients:
        g = gradient.astype("float64")
        norm = np.linalg.norm
        local = trust * norm(w) / (norm(g) + decay * norm(w))
        v = 0.9 * v + 2.0 * local * (g + decay * w)
        w = w - v
    return w


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(3, 4), (3, 3, 2, 5)])
def test_kernels_move_as_published(shape: tuple[int, ...], decay: float) -> None:
    random = np.random.default_rng(1)
    weights = random.normal(size=shape).astype("float32")
    gradients = [random.normal(size=shape).astype("float32") for _ in range(4)]
    variable = keras.Variable(weights)
    optimizer = LARS(2.0, trust=0.01, decay=decay)
    for gradient in gradients:
        optimizer.apply([keras.ops.convert_to_tensor(gradient)], [variable])
    want = expected(weights, gradients, trust=0.01, decay=decay)
    assert_allclose(keras.ops.convert_to_numpy(variable), want, rtol=2e-6, atol=1e-7)


def test_vectors_move_by_plain_momentum() -> None:
    start, gradient = np.float32([1, -2, 3]), np.float32([0.5, 0.25, -1])
    ours, stock = keras.Variable(start), keras.Variable(start)
    for optimizer, variable in (
        (LARS(0.1, decay=0.5), ours),
        (keras.optimizers.SGD(0.1, momentum=0.9), stock),
    ):
        for _ in range(3):
            optimizer.apply([keras.ops.convert_to_tensor(gradient)], [variable])
    assert_allclose(*map(keras.ops.convert_to_numpy, (ours, stock)), rtol=1e-6)


@pytest.mark.parametrize("which", ["weights", "gradient"])
def test_zeros_make_no_nan(which: str) -> None:
    ones, zeros = np.ones((2, 3), "float32"), np.zeros((2, 3), "float32")
    weights, gradient = (zeros, ones) if which == "weights" else (ones, zeros)
    variable = keras.Variable(weights)
    LARS(0.5).apply([keras.ops.convert_to_tensor(gradient)], [variable])
    # As plain momentum: the layer's own factor is 1.
    assert_array_equal(
        keras.ops.convert_to_numpy(variable), weights - np.float32(0.5) * gradient
    )


def test_it_is_saved_with_its_options(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(LARS(0.3, momentum=0.8, trust=0.02, decay=0.1), "mse")
    model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    model.save(tmp_path / "a.keras")
    loaded = keras.models.load_model(tmp_path / "a.keras").optimizer
    assert loaded.get_config() == model.optimizer.get_config()
    for ours, theirs in zip(loaded.variables, model.optimizer.variables, strict=True):
        assert_array_equal(np.asarray(ours), np.asarray(theirs))


def test_ranks_train_like_one_process(world: communicators.Communicator) -> None:
    random = np.random.default_rng(2)
    x = random.normal(size=(50, 5)).astype("float32")
    y = random.normal(size=(50, 2)).astype("float32")

    def model() -> keras.Model:
        keras.utils.set_random_seed(3)
        return keras.Sequential(
            [keras.Input((5,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(2)]
        )

    alone, together = model(), distkeras.Trainer(model())
    alone.compile(LARS(0.05 * world.size, trust=0.5, decay=0.1), "mse")
    alone.fit(x, y, batch_size=4 * world.size, epochs=2, shuffle=False, verbose=0)
    together.compile(LARS(0.05, trust=0.5, decay=0.1), "mse")
    together.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    pairs = zip(alone.get_weights(), together.model.get_weights(), strict=True)
    for ours, theirs in pairs:
        assert_allclose(theirs, ours, rtol=1e-5, atol=1e-6)
