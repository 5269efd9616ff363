"""Keras' training and test steps on TensorFlow, with the exchange in between.

`train_function` is what `keras.Model.fit` calls a step. Keras builds its own only
where none is set, so setting one is enough; the optimizer, and thus what is saved,
stays untouched.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from distkeras._logging import LOGGER
from distkeras.backends._logs import Logs
from distkeras.backends._tensorflow_batch_norm import SynchronizedBatchNorm
from distkeras.backends._tensorflow_exchange import TensorFlowExchange
from distkeras.backends._tensorflow_optimizers import exchanging
from distkeras.backends._tensorflow_optimizers import find_optimizers
from distkeras.backends._tensorflow_optimizers import overrides_train_step

Function = Callable[[Any], Any]


def make_train_function(
    model: keras.Model, exchange: TensorFlowExchange, *, uneven: bool
) -> Function:
    """Returns the function that `fit` calls for every execution.

    With Keras' own `train_step` the step is a backward half and an update half, each
    compiled by XLA when `jit_compile` says so, and the exchange stands between them:
    a host call cannot be compiled. A `train_step` of the model's own runs whole and
    uncompiled, its optimizers exchange from inside `apply`.

    Args:
        model: compiled and built, its optimizer too.
        exchange: reduces gradients.
        uneven: whether a rank may get a batch without rows.

    Returns:
        A function of an iterator, as `keras.Model.make_train_function` sets it. It
        raises `StopIteration` on all ranks after an execution in which none had a row.
    """
    communicator = exchange.exchange.communicator
    batch_norm = SynchronizedBatchNorm(model, communicator)
    exchange.exchange.also_close(batch_norm.close)
    if overrides_train_step(model):
        step = _whole_step(model, exchange, batch_norm, uneven)
    else:
        step = _split_step(model, exchange, batch_norm, uneven)
        if batch_norm.layers and model.jit_compile and communicator.rank == 0:
            LOGGER.warning(
                "XLA compiles the update alone, not the backward pass: "
                "BatchNormalization(synchronized=True) talks to other ranks in it"
            )
    function = _on_iterators(model, step)

    host = exchange.exchange

    def train_function(iterator: Any) -> Any:
        host.clock.begin(model.steps_per_execution)
        before = host.counters.examples
        logs = function(iterator)
        host.clock.lap("update")
        exhausted, host.exhausted = host.exhausted, False
        # Of an execution of several steps the first ones may have had rows.
        if exhausted and host.counters.examples == before:
            raise StopIteration
        return logs

    return train_function


def make_test_function(model: keras.Model) -> Function:
    """Returns a test function that passes over batches without rows.

    Ranks evaluate their shards without talking to each other, so that an empty batch
    comes only where a rank has no examples at all: Keras needs one to get going.
    """
    test_step = model.test_step
    compiled = _half(model, test_step)

    def step(data: Any) -> Any:
        return tf.cond(
            rows(data) > 0,
            lambda: compiled(data),
            lambda: _on_dummy(model, test_step, data),
        )

    return _on_iterators(model, step)


def rows(data: Any) -> tf.Tensor:
    """Returns the number of examples of a batch, a scalar int32 tensor.

    Those of the targets, over which a loss is a mean: graphs, say, that are merged to
    one have as many of them as there were graphs, but inputs for each of their nodes.
    Where there are none, those of the inputs.
    """
    parts = data if isinstance(data, (tuple, list)) else (data,)
    if len(parts) in (2, 3):
        targets = [leaf for leaf in keras.tree.flatten(parts[1]) if _has_rows(leaf)]
        if targets:
            return _rows_of(targets[0])
    return _rows_of_inputs(data)


def _rows_of_inputs(data: Any) -> tf.Tensor:
    """The same of the inputs, or of what a step of the model's own takes."""
    return _rows_of(next(leaf for leaf in keras.tree.flatten(data) if _has_rows(leaf)))


def _has_rows(leaf: Any) -> bool:
    return leaf is not None and leaf.shape.rank != 0


def _rows_of(first: Any) -> tf.Tensor:
    if isinstance(first, tf.RaggedTensor):
        return tf.cast(first.nrows(), tf.int32)
    if isinstance(first, tf.SparseTensor):
        return tf.cast(first.dense_shape[0], tf.int32)
    return tf.shape(first)[0]


def _on_iterators(model: keras.Model, step: Function) -> Function:
    """Lets Keras' own loop over iterators and executions call `step`.

    What it then returns are `Logs`, where the step's are a mapping.
    """

    def counted(data: Any) -> Any:
        return step(data), rows(data)

    jit_compile = model.jit_compile
    model.jit_compile = False
    try:
        function = model._make_function(counted)
    finally:
        model.jit_compile = jit_compile

    def on_iterator(iterator: Any) -> Any:
        logs, examples = function(iterator)
        return Logs(logs, examples) if isinstance(logs, Mapping) else logs

    return on_iterator


def _half(model: keras.Model, function: Function) -> Function:
    if model.run_eagerly or not model.jit_compile:
        return function
    return tf.function(
        function, reduce_retracing=True, jit_compile=True, autograph=False
    )


def _split_step(
    model: keras.Model,
    exchange: TensorFlowExchange,
    batch_norm: SynchronizedBatchNorm,
    uneven: bool,
) -> Function:
    variables = list(model.trainable_variables)
    optimizer = model.optimizer
    parts = _Parts(variables)
    plain_compute_metrics = keras.Model.compute_metrics

    def backward(data: Any) -> tuple[Any, list[tf.Tensor]]:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            options = {"training": True} if model._call_has_training_arg else {}
            y_pred = model(x, **options)
            loss = model._compute_loss(
                x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True
            )
            model._loss_tracker.update_state(loss, sample_weight=_rows_of_inputs(data))
            loss = optimizer.scale_loss(loss)
        gradients = tape.gradient(loss, [v.value for v in variables])
        logs = model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        return logs, parts.split(gradients)

    def nothing(data: Any) -> tuple[Any, list[tf.Tensor]]:
        if tf.executing_eagerly():
            # Which gradients there are may change from step to step.
            logs, flat = _on_dummy(model, backward, data)
            if type(model).compute_metrics is plain_compute_metrics:
                logs = model.get_metrics_result()
            return logs, flat
        if parts.known and type(model).compute_metrics is plain_compute_metrics:
            logs = model.get_metrics_result()
        else:
            logs, _ = _on_dummy(model, backward, data)
        return logs, parts.zeros()

    def synchronized(data: Any, count: tf.Tensor) -> tuple[Any, list[tf.Tensor]]:
        # Also without rows: the other ranks' layers wait for this one's.
        with batch_norm.over(count):
            if not uneven:
                return backward(data)
            logs, flat = _on_dummy(
                model, backward, data, unless=count > 0, batch_norm=batch_norm
            )
        if type(model).compute_metrics is plain_compute_metrics:
            logs = model.get_metrics_result()
        return logs, flat

    compiled_backward = _half(model, backward)

    def hand_over(gradients: list[Any]) -> None:
        # Keras' step calls this one, which an optimizer of the user's may override.
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    update = _half(model, hand_over)

    results = _Parts(variables)

    def exchanged(logs: Any, flat: list[tf.Tensor]) -> Any:
        reduced, examples = exchange.reduce(optimizer, parts.join(flat), variables)
        return logs, results.split(reduced), examples

    def apply(flat: list[tf.Tensor]) -> tf.Tensor:
        update(results.join(flat))
        return tf.constant(True)

    def step(data: Any) -> Any:
        count = rows(data)
        with exchange.counting(count):
            if batch_norm.layers:
                logs, flat, examples = exchanged(*synchronized(data, count))
            elif uneven:
                # The exchange inside of the branches: behind them it would wait for
                # the whole backward pass.
                logs, flat, examples = tf.cond(
                    count > 0,
                    lambda: exchanged(*compiled_backward(data)),
                    lambda: exchanged(*nothing(data)),
                )
            else:
                logs, flat, examples = exchanged(*compiled_backward(data))
        if uneven:
            tf.cond(examples > 0, lambda: apply(flat), lambda: tf.constant(False))
        else:
            apply(flat)
        return logs

    return step


class _Parts:
    """Takes gradients apart into tensors that any function can return.

    A sparse gradient becomes its values and its indices, an absent one nothing.
    """

    def __init__(self, variables: list[Any]) -> None:
        self._variables = variables
        self._kinds: list[str] = []

    @property
    def known(self) -> bool:
        """Whether gradients have been seen, so that `zeros` knows their kinds."""
        return bool(self._kinds)

    def split(self, gradients: list[Any]) -> list[tf.Tensor]:
        """Returns the tensors of `gradients`, and keeps in mind what they were."""
        flat = []
        self._kinds = []
        for gradient in gradients:
            if gradient is None:
                self._kinds.append("absent")
            elif isinstance(gradient, tf.IndexedSlices):
                self._kinds.append(gradient.indices.dtype.name)
                flat += [gradient.values, gradient.indices]
            else:
                self._kinds.append("dense")
                flat.append(gradient)
        return flat

    def join(self, flat: list[tf.Tensor]) -> list[Any]:
        """Returns the gradients that `split` took apart."""
        supply = iter(flat)
        gradients: list[Any] = []
        for kind, variable in zip(self._kinds, self._variables, strict=True):
            if kind == "absent":
                gradients.append(None)
            elif kind == "dense":
                gradients.append(next(supply))
            else:
                values, indices = next(supply), next(supply)
                shape = tf.constant(tuple(variable.shape), kind)
                gradients.append(tf.IndexedSlices(values, indices, shape))
        return gradients

    def zeros(self) -> list[tf.Tensor]:
        """Returns the tensors of a rank without rows: zeros, and no indices."""
        flat = []
        for kind, variable in zip(self._kinds, self._variables, strict=True):
            if kind == "dense":
                flat.append(tf.zeros(variable.shape, variable.dtype))
            elif kind != "absent":
                flat += [
                    tf.zeros((0, *variable.shape[1:]), variable.dtype),
                    tf.zeros((0,), kind),
                ]
        return flat


def _whole_step(
    model: keras.Model,
    exchange: TensorFlowExchange,
    batch_norm: SynchronizedBatchNorm,
    uneven: bool,
) -> Function:
    def step(data: Any) -> Any:
        count = rows(data)
        with (
            exchange.counting(count),
            exchanging(find_optimizers(model), exchange, may_be_exhausted=uneven),
            batch_norm.over(count),
        ):
            if not uneven:
                return model.train_step(data)
            return _on_dummy(
                model,
                model.train_step,
                data,
                unless=count > 0,
                batch_norm=batch_norm,
            )

    return step


def _on_dummy(
    model: keras.Model,
    function: Function,
    data: Any,
    unless: Any = False,
    batch_norm: SynchronizedBatchNorm | None = None,
) -> Any:
    """Runs `function` on one row of zeros and takes back what that did to the state.

    Args:
        model: whose metrics and non-trainable variables are restored.
        function: of a batch.
        data: a batch that may have no rows; one that has is passed on as it is.
        unless: true where `data` has rows: then the state is kept.
        batch_norm: its statistics are kept where any rank has rows.
    """
    state = [*model.metrics_variables, *model.non_trainable_variables]
    before = [tf.identity(v.value) for v in state]
    result = function(keras.tree.map_structure(_at_least_one_row, data))
    for variable, old in zip(state, before, strict=True):
        keep = unless
        if batch_norm is not None and batch_norm.owns(variable):
            keep = batch_norm.has_examples
        variable.assign(tf.where(keep, variable.value, old))
    return result


def _at_least_one_row(leaf: Any) -> Any:
    if not isinstance(leaf, tf.Tensor):
        return leaf
    missing = tf.maximum(1 - tf.shape(leaf)[0], 0)
    shape = tf.concat([[missing], tf.shape(leaf)[1:]], 0)
    return tf.concat([leaf, tf.zeros(shape, leaf.dtype)], 0)
