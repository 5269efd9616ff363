"""Creates a model's variables before training, so that they can be broadcast.

On TensorFlow Keras leaves that to the first trace of the step, which is too late: by
then the step would have run on weights that differ by rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

from distkeras.backends._tensorflow_optimizers import find_optimizers


def build(model: keras.Model, data: Any, *, predicts: bool = False) -> None:
    """Creates all variables of the model, its metrics and its optimizer.

    Args:
        model: compiled, or for prediction only.
        data: sharded, whose dataset tells shapes and dtypes; a batch is looked at only
            where a model cannot be built from them.
        predicts: whether the data has no targets: then those of the layers alone.
    """
    spec = data.get_tf_dataset().element_spec
    step = None if predicts else _own_step(model)
    if step is not None and _is_built(model):
        return
    try:
        _build_from(model, data, spec, predicts)
    except Exception as error:
        # What a step of the model's own takes need not be what its `call` takes, if
        # there is one; and it may have been built by its parts.
        if step is None:
            raise
        _trace(step, spec, error)
    else:
        if step is not None and not _parts_are_built(model):
            _trace(step, spec, None)


def _build_from(model: keras.Model, data: Any, spec: Any, predicts: bool) -> None:
    try:
        batch = keras.tree.map_structure(_symbolic, spec)
        _symbolic_build(model, batch, predicts)
    except Exception:
        # A model that looks at values, or data of a kind that has no symbol.
        for batch in data.get_tf_samples().take(1):
            x, *_ = keras.utils.unpack_x_y_sample_weight(batch)
            model(x)
            _symbolic_build(model, batch, predicts)


def _own_step(model: keras.Model) -> Callable[[Any], Any] | None:
    """Returns the step that the model brings, for training if it has that."""
    for name in ("train_step", "test_step"):
        if getattr(type(model), name) is not getattr(TensorFlowTrainer, name):
            return getattr(model, name)
    return None


def _parts_are_built(model: keras.Model) -> bool:
    return all(layer.built for layer in model._flatten_layers(include_self=False))


def _is_built(model: keras.Model) -> bool:
    metrics = model._compile_metrics
    return (
        _parts_are_built(model)
        and all(optimizer.built for optimizer in find_optimizers(model))
        and (metrics is None or metrics.built)
    )


def _trace(step: Callable[[Any], Any], spec: Any, before: Exception | None) -> None:
    """Traces a step: that creates all variables that it uses, and changes none."""

    @tf.autograph.experimental.do_not_convert
    def call(data: Any) -> None:
        step(data)

    try:
        tf.function(call).get_concrete_function(spec)
    except Exception as error:
        raise ValueError(
            "Expected a model whose variables can be created before training, so that "
            "all ranks begin with the same. Received: one that is built neither from "
            f"its data nor by its step, which could not be traced ({error}). Call its "
            "parts once, on a batch, before `fit`."
        ) from (before or error)


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
