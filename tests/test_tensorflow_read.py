"""Copies of variables in host memory, one by one and together."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from distkeras.backends import current

DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint32")
SHAPES = ((), (3,), (2, 5), (0, 4), (300, 300))  # the last one is read alone


def variables() -> list[keras.Variable]:
    random = np.random.default_rng(0)
    made = [
        keras.Variable(random.integers(0, 99, shape), dtype=dtype, trainable=False)
        for dtype in DTYPES
        for shape in SHAPES
    ]
    flag = keras.Variable(True, dtype="bool", trainable=False)
    narrow = keras.Variable(
        tf.cast(np.arange(4.0), "float8_e4m3fn"), dtype="float8_e4m3fn", trainable=False
    )
    return [*made, flag, narrow]


def test_together_as_one_by_one() -> None:
    read, listed = current().reader(), variables()
    for chosen in (listed, listed[::-3], listed[:1], []):
        for found in (read(chosen), current().read_variables(chosen)):
            assert len(found) == len(chosen)
            for array, variable in zip(found, chosen, strict=True):
                expected = variable.value.numpy()
                assert array.dtype == expected.dtype
                np.testing.assert_array_equal(array, expected)


def test_what_follows_does_not_change_them() -> None:
    read, listed = current().reader(), variables()
    read(listed)
    for round_ in range(2):  # traced once, read at each call
        for variable in listed[:-2]:
            variable.assign(np.full(variable.shape, round_ + 5))
        first = read(listed)
        for variable in listed[:-2]:
            variable.assign(np.zeros(variable.shape))
        for array in first[:-2]:
            assert (array == round_ + 5).all()
