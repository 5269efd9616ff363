"""Which `BatchNormalization` layers ask for the statistics of all ranks' batches."""

from __future__ import annotations

import keras


def synchronized_layers(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    """Returns the layers made with `synchronized=True`, at any depth, each once."""
    found = {
        id(layer): layer
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized
    }
    return list(found.values())
