"""A model's `BatchNormalization` layers, and which ask for all ranks' statistics."""

from __future__ import annotations

import keras


def synchronized_layers(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    """Returns the layers made with `synchronized=True`, at any depth, each once."""
    return [layer for layer in batch_norm_layers(model) if layer.synchronized]


def batch_norm_layers(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    """Returns all of them, at any depth, each once."""
    found = {
        id(layer): layer
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization)
    }
    return list(found.values())
