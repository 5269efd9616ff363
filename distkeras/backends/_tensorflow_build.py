"""Creates a model's variables before training, so that they can be broadcast.

On TensorFlow Keras leaves that to the first trace of the step, which is too late: by
then the step would have run on weights that differ by rank.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf


def build(model: keras.Model, data: Any, *, predicts: bool = False) -> None:
    """Creates all variables of the model, its metrics and its optimizer.

    Args:
        model: compiled, or for prediction only.
        data: a Keras data adapter, whose dataset tells shapes and dtypes; it is read
            only where a model cannot be built from them.
        predicts: whether the data has no targets: then those of the layers alone.
    """
    dataset = data.get_tf_dataset()
    try:
        batch = keras.tree.map_structure(_symbolic, dataset.element_spec)
        _symbolic_build(model, batch, predicts)
    except Exception:
        # A model that looks at values, or data of a kind that has no symbol.
        for batch in dataset.take(1):
            x, *_ = keras.utils.unpack_x_y_sample_weight(batch)
            model(x)
            _symbolic_build(model, batch, predicts)


def _symbolic_build(model: keras.Model, batch: Any, predicts: bool) -> None:
    if predicts or not model.compiled:
        if not all(layer.built for layer in model._flatten_layers()):
            x, *_ = keras.utils.unpack_x_y_sample_weight(batch)
            keras.src.backend.compute_output_spec(model, x, training=False)
        return
    model._symbolic_build(data_batch=batch)


def _symbolic(spec: Any) -> Any:
    if not isinstance(spec, tf.TensorSpec):
        # TensorFlow gives the other class out since 2.21 only.
        if isinstance(spec, tf.OptionalSpec) or type(spec).__name__ == "NoneTensorSpec":
            return None
        raise TypeError(f"no Keras symbol for {spec}")
    return keras.KerasTensor(
        tuple(spec.shape), keras.backend.standardize_dtype(spec.dtype)
    )
