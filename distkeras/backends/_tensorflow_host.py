"""Calls on the host from TensorFlow: `GradientExchange` gets views of the tensors.

Each function adds one call to the graph, or makes it at once where there is none, and
returns its results as tensors, the examples of all ranks first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from distkeras.gradients import GradientExchange
from distkeras.gradients import Plan
from distkeras.gradients import Rows
from distkeras.gradients import nonzero_rows


def reduce_bucket(
    exchange: GradientExchange,
    plan: Plan,
    number: int,
    gradients: list[tf.Tensor],
    count: tf.Tensor,
    arrived: tf.Tensor,
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Exchanges one bucket.

    Args:
        exchange: the host's half.
        plan: of all gradients.
        number: of the bucket within the plan.
        gradients: in the order of the bucket's placements.
        count: this rank's examples, a float64 scalar.
        arrived: when the step's data had come; 0 where it is not known.
    """
    examples, *outputs = tf.numpy_function(
        _bucket_call(exchange, plan, number),
        [count, arrived, *gradients],
        [tf.float64, *(gradient.dtype for gradient in gradients)],
    )
    examples.set_shape(())
    for gradient, output in zip(gradients, outputs, strict=True):
        output.set_shape(gradient.shape)
    return examples, outputs


def reduce_rows(
    exchange: GradientExchange,
    plan: Plan,
    gradients: list[Any],
    count: tf.Tensor,
    arrived: tf.Tensor,
    *,
    merge: bool,
) -> tuple[tf.Tensor, list[Any]]:
    """Exchanges the sparse gradients, all of them in one call.

    Those that have become dense come back dense.

    Args:
        exchange: as in `reduce_bucket`.
        plan: of all gradients.
        gradients: one for each of `plan.sparse`; all `tf.IndexedSlices`, or none.
        count: as in `reduce_bucket`.
        arrived: as in `reduce_bucket`.
        merge: whether rows with the same index may be summed.
    """
    if not isinstance(gradients[0], tf.IndexedSlices):
        examples, *outputs = tf.numpy_function(
            _dense_rows_call(exchange, plan),
            [count, arrived, *gradients],
            [tf.float64, *(g.dtype for g in gradients)],
        )
        for gradient, output in zip(gradients, outputs, strict=True):
            output.set_shape(gradient.shape)
    else:
        flat = [part for g in gradients for part in (g.indices, g.values)]
        examples, *parts = tf.numpy_function(
            _rows_call(exchange, plan, merge),
            [count, arrived, *flat],
            [tf.float64, *(part.dtype for part in flat)],
        )
        outputs = []
        shapes = [plan.gradients[index].shape for index in plan.sparse]
        pairs = zip(parts[::2], parts[1::2], strict=True)
        for shape, (indices, values) in zip(shapes, pairs, strict=True):
            indices.set_shape((None,))
            values.set_shape((None, *shape[1:]))
            outputs.append(
                tf.IndexedSlices(values, indices, tf.constant(shape, indices.dtype))
            )
    examples.set_shape(())
    return examples, outputs


def reduce_counts(
    exchange: GradientExchange,
    count: tf.Tensor,
    arrived: tf.Tensor,
    nonfinite: tf.Tensor,
    *,
    begins: bool = True,
    plan: Plan | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Exchanges counts and flags alone.

    Args:
        exchange: as in `reduce_bucket`.
        count: as in `reduce_bucket`.
        arrived: as in `reduce_bucket`.
        nonfinite: whether this rank's gradients are not finite.
        begins: see `GradientExchange.reduce_counts`.
        plan: likewise.

    Returns:
        The examples of all ranks, and whether any rank's gradients are not finite.
    """
    examples, any_nonfinite = tf.numpy_function(
        _counts_call(exchange, begins, plan),
        [count, arrived, nonfinite],
        [tf.float64, tf.bool],
    )
    examples.set_shape(())
    any_nonfinite.set_shape(())
    return examples, any_nonfinite


def _bucket_call(
    exchange: GradientExchange, plan: Plan, number: int
) -> Callable[..., list[Any]]:
    """Returns the function that TensorFlow calls on the host for one bucket."""

    def exchange_bucket(examples: Any, arrived: Any, *arrays: Any) -> list[Any]:
        reduced = exchange.reduce(plan, number, float(examples), arrays, float(arrived))
        return [np.float64(exchange.examples), *reduced]

    return exchange_bucket


def _rows_call(
    exchange: GradientExchange, plan: Plan, merge: bool
) -> Callable[..., list[Any]]:
    """Returns the function that TensorFlow calls on the host for sparse gradients."""

    def exchange_rows(examples: Any, arrived: Any, *arrays: np.ndarray) -> list[Any]:
        pairs = list(zip(arrays[::2], arrays[1::2], strict=True))
        pieces = [Rows(indices, values) for indices, values in pairs]
        reduced = exchange.reduce_rows(
            plan, float(examples), pieces, merge=merge, arrived=float(arrived)
        )
        outputs: list[Any] = [np.float64(exchange.examples)]
        for (indices, values), rows in zip(pairs, reduced, strict=True):
            outputs += [
                rows.indices.astype(indices.dtype, copy=False),
                rows.values.astype(values.dtype, copy=False),
            ]
        return outputs

    return exchange_rows


def _dense_rows_call(
    exchange: GradientExchange, plan: Plan
) -> Callable[..., list[Any]]:
    """Returns the same for gradients of which many rows may be zero, still dense."""

    def exchange_dense_rows(
        examples: Any, arrived: Any, *arrays: np.ndarray
    ) -> list[Any]:
        pieces = [nonzero_rows(array) for array in arrays]
        reduced = exchange.reduce_rows(
            plan, float(examples), pieces, merge=True, arrived=float(arrived)
        )
        dense = [
            rows.dense(array.shape, array.dtype)
            for rows, array in zip(reduced, arrays, strict=True)
        ]
        return [np.float64(exchange.examples), *dense]

    return exchange_dense_rows


def _counts_call(
    exchange: GradientExchange, begins: bool, plan: Plan | None
) -> Callable[..., list[Any]]:
    """Returns the function that TensorFlow calls on the host between updates."""

    def exchange_counts(examples: Any, arrived: Any, nonfinite: Any) -> list[Any]:
        total, any_nonfinite = exchange.reduce_counts(
            float(examples), bool(nonfinite), float(arrived), begins=begins, plan=plan
        )
        return [np.float64(total), np.bool_(any_nonfinite)]

    return exchange_counts
