"""Statistics that every rank gathers from its own data, and their mean."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from distkeras.communicators import Communicator


def moving_statistics(model: keras.Model) -> list[Any]:
    """Returns the variables that differ by rank by nature, each once.

    The moving mean and variance of every `BatchNormalization` layer, at any depth,
    and other non-trainable floating variables declared with `aggregation="mean"`.
    """
    found: dict[int, Any] = {}
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization) and layer.built:
            for variable in (layer.moving_mean, layer.moving_variance):
                found[id(variable)] = variable
    for variable in model.non_trainable_variables:
        mean = str(variable.aggregation) == "mean"
        if mean and "float" in keras.backend.standardize_dtype(variable.dtype):
            found.setdefault(id(variable), variable)
    return list(found.values())


def average_moving_statistics(model: keras.Model, communicator: Communicator) -> None:
    """Replaces moving statistics by their mean over ranks; collective.

    All ranks count alike, in float64; afterwards all hold the same, to the last bit.
    The mean of the ranks' variances leaves out the variance of their means, as the
    statistics of one process leave out that of the means of its batches.

    Args:
        model: built, with the same layers on every rank.
        communicator: the ranks.
    """
    variables = moving_statistics(model)
    if communicator.size == 1 or not variables:
        return
    values = [keras.ops.convert_to_tensor(variable) for variable in variables]
    arrays = [np.asarray(keras.ops.convert_to_numpy(value)) for value in values]
    buffer = np.concatenate([a.astype("float64").ravel() for a in arrays])
    communicator.allreduce(buffer, "sum")
    buffer /= communicator.size
    offset = 0
    for variable in variables:
        length = math.prod(variable.shape)
        value = buffer[offset : offset + length].reshape(variable.shape)
        variable.assign(keras.ops.cast(value, variable.dtype))
        offset += length


@contextlib.contextmanager
def averaged_moving_statistics(
    model: keras.Model, communicator: Communicator
) -> Iterator[None]:
    """Averages moving statistics while inside; collective.

    Afterwards each rank goes on with its own, as in the middle of an epoch it should.

    Args:
        model: built, with the same layers on every rank.
        communicator: the ranks.
    """
    variables = moving_statistics(model)
    values = [keras.ops.convert_to_tensor(variable) for variable in variables]
    own = [np.array(keras.ops.convert_to_numpy(value)) for value in values]
    average_moving_statistics(model, communicator)
    try:
        yield
    finally:
        for variable, value in zip(variables, own, strict=True):
            variable.assign(value)
