"""The recipes' ResNets: published sizes, shapes, and the structure of their blocks."""

import functools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest

from distkeras.recipes import models


@pytest.fixture(autouse=True)
def _float32() -> Iterator[None]:
    before = keras.config.dtype_policy()
    yield
    keras.config.set_dtype_policy(before)
    keras.utils.clear_session()


@functools.cache
def large(depth: int) -> keras.Model:
    """A model for 1000 classes, built once."""
    return models.resnet(depth, input_shape=(64, 64, 3))


def count(model: keras.Model) -> int:
    """Counts what is trained, as the papers do: not the moving statistics."""
    return sum(int(np.prod(v.shape)) for v in model.trainable_variables)


def strides(model: keras.Model) -> dict[str, int]:
    """Maps each convolution that moves by more than a pixel to its stride."""
    return {
        layer.name: layer.strides[0]
        for layer in model.layers
        if isinstance(layer, keras.layers.Conv2D) and layer.strides[0] > 1
    }


# In millions, as published: He et al. 2015, table 6.
@pytest.mark.parametrize(
    ("depth", "millions"),
    [
        *((20, 0.27), (32, 0.46), (44, 0.66), (56, 0.85)),
        pytest.param(110, 1.7, marks=pytest.mark.soak),
    ],
)
def test_small_sizes_are_the_published_ones(depth: int, millions: float) -> None:
    model = models.resnet_small(depth)
    digits = 1 if depth == 110 else 2
    assert round(count(model) / 1e6, digits) == millions
    kinds = (keras.layers.Conv2D, keras.layers.Dense)
    assert sum(isinstance(layer, kinds) for layer in model.layers) == depth


# To the last weight, as torchvision lists its ResNets.
@pytest.mark.parametrize(
    ("depth", "weights"),
    [
        (10, 5_418_792),  # of no paper
        (18, 11_689_512),
        (34, 21_797_672),
        (50, 25_557_032),
        pytest.param(101, 44_549_160, marks=pytest.mark.soak),
        pytest.param(152, 60_192_808, marks=pytest.mark.soak),
    ],
)
def test_large_sizes_are_the_published_ones(depth: int, weights: int) -> None:
    model = large(depth)
    assert count(model) == weights
    kinds = (keras.layers.Conv2D, keras.layers.Dense)
    weighted = [layer for layer in model.layers if isinstance(layer, kinds)]
    assert sum(not layer.name.endswith("_0_conv") for layer in weighted) == depth


def test_small_halves_the_image_twice() -> None:
    model = models.resnet_small(20, input_shape=(8, 8, 1), num_classes=7)
    assert strides(model) == {
        "conv3_block1_1_conv": 2,
        "conv4_block1_1_conv": 2,
    }
    shapes = [model.get_layer(f"conv{n}_block3_out").output.shape for n in (2, 3, 4)]
    assert shapes == [(None, 8, 8, 16), (None, 4, 4, 32), (None, 2, 2, 64)]
    assert model.output_shape == (None, 7)


def test_small_shortcuts_have_no_weights() -> None:
    model = models.resnet_small(20)
    assert not [layer for layer in model.layers if layer.name.endswith("_0_conv")]
    x = keras.random.normal((2, 32, 32, 16), seed=1)
    first = model.get_layer("conv3_block1_0_skip")
    # From the input of the first layer of the shortcut to what is added.
    shortcut, _ = model.get_layer("conv3_block1_add").input
    path = keras.Model(first.input, shortcut)
    padded = keras.ops.convert_to_numpy(path(x))
    np.testing.assert_array_equal(padded[..., 8:24], np.asarray(x)[:, ::2, ::2])
    assert not padded[..., :8].any()
    assert not padded[..., 24:].any()


def test_bottlenecks_have_their_stride_in_the_3x3() -> None:
    model = large(50)
    assert strides(model) == {
        "conv1_conv": 2,
        **{f"conv{n}_block1_{part}_conv": 2 for n in (3, 4, 5) for part in (0, 2)},
    }
    assert model.get_layer("conv3_block1_2_conv").kernel_size == (3, 3)
    shapes = [
        model.get_layer(f"conv{stage}_block{blocks}_out").output.shape[1:]
        for stage, blocks in ((2, 3), (3, 4), (4, 6), (5, 3))
    ]
    assert shapes == [(16, 16, 256), (8, 8, 512), (4, 4, 1024), (2, 2, 2048)]


@pytest.mark.parametrize(("depth", "last"), [(18, 2), (50, 3)])
def test_large_blocks_start_as_identities(depth: int, last: int) -> None:
    model = large(depth)
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            zero = "block" in layer.name and layer.name.endswith(f"_{last}_bn")
            gamma = keras.ops.convert_to_numpy(layer.gamma)
            assert (gamma == (0 if zero else 1)).all(), layer.name


@pytest.mark.parametrize("make", [models.resnet_small, models.resnet])
def test_only_kernels_decay(make: Any) -> None:
    depth = 20 if make is models.resnet_small else 18
    model = make(depth, input_shape=(32, 32, 3), num_classes=10, weight_decay=0.1)
    kernels = [v for v in model.trainable_variables if v.name == "kernel"]
    decaying = [v for v in model.trainable_variables if v.regularizer is not None]
    assert [id(v) for v in decaying] == [id(v) for v in kernels]
    # The gradient of the penalty is 0.1 * w: the penalty is 0.1 / 2 * w^2.
    penalty = float(sum(model.losses))
    squares = sum(float(keras.ops.sum(v * v)) for v in kernels)
    np.testing.assert_allclose(penalty, 0.05 * squares, rtol=1e-4)
    assert make(depth, input_shape=(32, 32, 3), num_classes=10).losses == []


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_logits_are_float32_under_mixed_precision(policy: str) -> None:
    keras.config.set_dtype_policy(policy)
    for model in (
        models.resnet_small(20, input_shape=(8, 8, 1)),
        models.resnet(18, input_shape=(32, 32, 3), num_classes=10),
    ):
        assert model.get_layer("conv1_conv").compute_dtype == policy[len("mixed_") :]
        assert model.output.dtype == "float32"
        assert {v.dtype for v in model.variables} == {"float32"}


def test_models_are_rebuilt_from_their_configuration() -> None:
    model = models.resnet_small(20, input_shape=(8, 8, 1), weight_decay=1e-4)
    copy = keras.Model.from_config(model.get_config())
    copy.set_weights(model.get_weights())
    x = keras.random.normal((2, 8, 8, 1), seed=1)
    np.testing.assert_array_equal(np.asarray(copy(x)), np.asarray(model(x)))


@pytest.mark.parametrize("make", [models.resnet_small, models.resnet])
def test_other_depths_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"Expected `depth` to be one of .*depth=21"):
        make(21)
