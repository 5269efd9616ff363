"""Gradient accumulation over ranks: gradients stay on their rank until the update."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from distkeras.backends._optimizers import accumulating_optimizers
from distkeras.backends._optimizers import accumulation_steps
from distkeras.backends._optimizers import gradient_scale


def accumulate(
    optimizer: keras.optimizers.Optimizer,
    gradients: list[tf.Tensor],
    variables: Sequence[Any],
    largest: list[bool],
    count: tf.Tensor,
    *,
    exchange_counts: Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]],
    allreduce: Callable[[list[tf.Tensor]], tuple[list[tf.Tensor], tf.Tensor]],
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Exchanges once an update: between updates gradients stay on their rank.

    Each rank accumulates its share n·g / Σ n of every micro-step; at the update
    the shares, accumulators included, are summed and the accumulators cleared,
    so that Keras' own `(g + accumulator) / steps` is the same on all ranks.
    Handing over `reduced - accumulator` instead would round differently on each.
    Scales that overwrite their variable have no shares: of them, Keras and the
    exchange keep the largest.

    Args:
        optimizer: the outermost; one within it accumulates.
        gradients: of a micro-step, dense.
        variables: what they belong to.
        largest: of each gradient, whether it is such a scale.
        count: this rank's examples, a float64 scalar.
        exchange_counts: returns, of whether this rank's gradients are not finite, the
            examples of all ranks and whether any rank's gradients are not.
        allreduce: returns the means (of scales, the maxima) over ranks that count
            alike, and the number of ranks.

    Returns:
        What the optimizer is to be handed, and the examples of all ranks.
    """
    steps = accumulation_steps(optimizer)
    owners = accumulating_optimizers(optimizer, variables)
    accumulators = [owner.accumulator(v).value for owner, v in owners]
    scale = gradient_scale(optimizer)
    guarded = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    finite = tf.constant(True)
    if guarded:
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in gradients])
    examples, nonfinite = exchange_counts(
        tf.logical_and(count > 0, tf.logical_not(finite))
    )
    share = tf.math.divide_no_nan(count, examples)
    whole = tf.cast(count > 0, count.dtype)
    shares = [
        tf.math.multiply_no_nan(g, tf.cast(whole if is_max else share, g.dtype))
        for g, is_max in zip(gradients, largest, strict=True)
    ]
    if guarded:
        # Every rank must skip the micro-step that one rank has to skip.
        shares = [
            tf.where(nonfinite, tf.constant(float("inf"), g.dtype), g) for g in shares
        ]

    def at_update() -> list[tf.Tensor]:
        sums = [
            tf.maximum(g, a) if is_max else g + _scaled(a, scale, g.dtype)
            for g, a, is_max in zip(shares, accumulators, largest, strict=True)
        ]
        # The shares are already weighted, so here every rank counts once and
        # the mean over ranks is brought back to the sum.
        means, ranks = allreduce(sums)
        for accumulator in accumulators:
            accumulator.assign(tf.zeros_like(accumulator))
        return [
            g if is_max else g * tf.cast(ranks, g.dtype)
            for g, is_max in zip(means, largest, strict=True)
        ]

    first = owners[0][0].optimizer
    is_update = (first._iterations.value + 1) % steps == 0
    # A step that is skipped updates nothing: it must not clear the accumulators.
    is_update &= tf.logical_and(examples > 0, tf.logical_not(nonfinite))
    reduced = tf.cond(is_update, at_update, lambda: shares)
    return reduced, examples


def _scaled(accumulator: tf.Tensor, scale: Any, dtype: tf.DType) -> tf.Tensor:
    # A loss scale is float32 whatever the variable is.
    return tf.cast(accumulator * tf.cast(scale, accumulator.dtype), dtype)
