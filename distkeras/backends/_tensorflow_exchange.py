"""TensorFlow's half of the exchange: from gradient tensors to reduced ones.

On the host one call per bucket hands NumPy views of the gradients to
`GradientExchange`; nothing is concatenated in the graph, the only copy is the one
into the fusion buffer. Sparse gradients (`tf.IndexedSlices`) stay sparse.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from distkeras.backends._optimizers import accumulating_optimizers
from distkeras.backends._optimizers import accumulation_steps
from distkeras.backends._optimizers import gradient_scale
from distkeras.backends._optimizers import indifferent_to_duplicates
from distkeras.backends._tensorflow_device import DeviceHandOver
from distkeras.backends._tensorflow_device import allreduce_on_device
from distkeras.backends._tensorflow_norm import GradientNorm
from distkeras.gradients import Gradient
from distkeras.gradients import GradientExchange
from distkeras.gradients import Plan
from distkeras.gradients import Rows
from distkeras.gradients import canonical_path
from distkeras.gradients import nonzero_rows

# Attribute of a graph: what each exchange in it ends with.
_NEWEST = "_distkeras_newest"


class TensorFlowExchange:
    """Reduces gradient tensors over ranks, inside or outside a `tf.function`.

    Args:
        exchange: the host's half.
        hand_over: to a communicator that sums in device memory; made by itself for
            NCCL's. Then sparse gradients become dense.

    Attributes:
        examples: how many examples the gradients that are reduced next average, a
            scalar tensor; None counts every rank alike.
        norm: where the norm of reduced gradients is noted, if it is.
    """

    def __init__(
        self, exchange: GradientExchange, hand_over: DeviceHandOver | None = None
    ) -> None:
        self.exchange = exchange
        if hand_over is None and exchange.communicator.name == "nccl":
            hand_over = DeviceHandOver(exchange)
        if hand_over is not None and exchange.wire and exchange.wire.error_feedback:
            raise ValueError(
                "Expected `error_feedback=False` with the nccl communicator: rounding "
                "errors are kept in host memory, where its gradients never are. "
                "Received: error_feedback=True"
            )
        self._hand_over = hand_over
        self.norm: GradientNorm | None = None
        self.examples: tf.Tensor | None = None
        self._arrived: tf.Tensor | None = None

    def __deepcopy__(self, memo: object) -> TensorFlowExchange:
        return self

    @contextlib.contextmanager
    def counting(self, examples: tf.Tensor) -> Iterator[None]:
        """Weights every reduction inside by `examples`, a scalar integer tensor.

        That tensor is known when the step's data has come, and the time is taken.
        """
        previous = self.examples, self._arrived
        self.examples = examples
        with tf.control_dependencies([examples]):
            self._arrived = tf.timestamp()
        try:
            yield
        finally:
            self.examples, self._arrived = previous

    @property
    def _when(self) -> tf.Tensor:
        """When the step's data had come; 0 outside of `counting`."""
        return tf.zeros((), tf.float64) if self._arrived is None else self._arrived

    def apply(
        self,
        apply: Callable[[list[Any], Sequence[Any]], Any],
        optimizer: keras.optimizers.Optimizer,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        *,
        may_be_exhausted: bool = False,
    ) -> None:
        """Exchanges `gradients` and hands the result to `apply`.

        Args:
            apply: the optimizer's own `apply`.
            optimizer: the outermost optimizer, which says when it updates.
            gradients: this rank's, None where the loss does not depend on the
                variable. `tf.IndexedSlices` are handed on as such.
            variables: what they belong to.
            may_be_exhausted: whether a step may come in which no rank has an
                example left; then nothing is applied.
        """
        if not optimizer.built:  # `apply` does so too, but accumulators are read before
            optimizer.build(list(variables))
        reduced, examples = self.reduce(optimizer, gradients, variables)

        def update() -> tf.Tensor:
            apply(reduced, variables)
            return tf.constant(True)

        if may_be_exhausted:
            tf.cond(examples > 0, update, lambda: tf.constant(False))
        else:
            update()

    def reduce(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: Sequence[Any],
        variables: Sequence[Any],
    ) -> tuple[list[Any], tf.Tensor]:
        """Exchanges `gradients`; see `apply`.

        Returns:
            What the optimizer is to be handed, and the examples of all ranks: where
            they are none, nothing may be applied.
        """
        if self._hand_over is not None:
            gradients = [g if g is None else tf.convert_to_tensor(g) for g in gradients]
        present = [i for i, g in enumerate(gradients) if g is not None]
        plan = self._plan(gradients, variables)
        kept = [variables[i] for i in present]
        mine = [gradients[i] for i in present]
        with tf.control_dependencies(self._previous()):
            reduced, examples = self._reduce(plan, optimizer, mine, present, kept)
        self._note(examples, *(g for g in reduced[:1] if tf.is_tensor(g)))
        result: list[Any] = [None] * len(gradients)
        for i, gradient in zip(present, reduced, strict=True):
            result[i] = gradient
        if self.norm is not None:
            self.norm.note(optimizer, result, variables, examples)
        return result, examples

    def _previous(self) -> list[tf.Tensor]:
        """Returns what the exchange before this one ends with, in the same graph.

        All ranks must make their calls in one order, and TensorFlow knows none between
        those of two optimizers where one of them stands in a branch (accumulation).
        """
        if tf.executing_eagerly():
            return []
        newest = getattr(tf.compat.v1.get_default_graph(), _NEWEST, {})
        return list(newest.get(id(self), ()))

    def _note(self, *tensors: tf.Tensor) -> None:
        """Keeps what this exchange ends with, on the graph: it ends with that."""
        if not tf.executing_eagerly():
            graph = tf.compat.v1.get_default_graph()
            newest = getattr(graph, _NEWEST, {})
            setattr(graph, _NEWEST, {**newest, id(self): tensors})

    def _plan(self, gradients: Sequence[Any], variables: Sequence[Any]) -> Plan:
        return self.exchange.plan(
            tuple(id(variable) for variable in variables),
            [_describe(g, v) for g, v in zip(gradients, variables, strict=True)],
        )

    def _reduce(
        self,
        plan: Plan,
        optimizer: keras.optimizers.Optimizer,
        gradients: list[Any],
        present: list[int],
        variables: list[Any],
    ) -> tuple[list[Any], tf.Tensor]:
        count = 1.0 if self.examples is None else self.examples
        count = tf.cast(count, tf.float64)
        if not accumulation_steps(optimizer, variables):
            merge = indifferent_to_duplicates(optimizer)
            reduced, examples = self._allreduce(plan, gradients, present, count, merge)
            if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
                reduced = [_plainly_finite_or_not(g) for g in reduced]
            return reduced, examples
        # As in Keras, whose accumulators are dense.
        dense = [tf.convert_to_tensor(g) for g in gradients]
        return self._accumulate(plan, optimizer, dense, present, variables, count)

    def _allreduce(
        self,
        plan: Plan,
        gradients: list[Any],
        present: list[int],
        count: tf.Tensor,
        merge: bool,
    ) -> tuple[list[Any], tf.Tensor]:
        """Returns the mean over all examples of all ranks, and their number."""
        if self._hand_over is not None:
            return allreduce_on_device(
                self._hand_over,
                self.exchange,
                plan,
                gradients,
                present,
                count,
                lambda number, bucket: self._on_host(plan, number, bucket, count)[1],
            )
        position = {index: i for i, index in enumerate(present)}
        reduced: list[Any] = list(gradients)
        after: list[tf.Operation | tf.Tensor] = []
        examples = count
        for number, bucket in enumerate(plan.buckets):
            where = [position[place.index] for place in bucket.placements]
            with tf.control_dependencies(after):
                examples, outputs = self._on_host(
                    plan, number, [gradients[i] for i in where], count
                )
            # One order on all ranks, so that messages match without negotiation.
            after = [examples]
            for i, output in zip(where, outputs, strict=True):
                reduced[i] = output
        if plan.sparse:
            where = [position[index] for index in plan.sparse]
            with tf.control_dependencies(after):
                examples, rows = self._exchange_rows(
                    plan, [gradients[i] for i in where], count, merge
                )
            for i, output in zip(where, rows, strict=True):
                reduced[i] = output
        return reduced, examples

    def _on_host(
        self, plan: Plan, number: int, gradients: list[tf.Tensor], count: tf.Tensor
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Exchanges one bucket by a call on the host."""
        examples, *outputs = tf.numpy_function(
            _host_call(self.exchange, plan, number),
            [count, self._when, *gradients],
            [tf.float64, *(gradient.dtype for gradient in gradients)],
        )
        examples.set_shape(())
        for gradient, output in zip(gradients, outputs, strict=True):
            output.set_shape(gradient.shape)
        return examples, outputs

    def _exchange_rows(
        self, plan: Plan, gradients: list[Any], count: tf.Tensor, merge: bool
    ) -> tuple[tf.Tensor, list[Any]]:
        """Exchanges the sparse gradients, all of them in one call on the host.

        Those that have become dense come back dense.
        """
        if not isinstance(gradients[0], tf.IndexedSlices):
            examples, *outputs = tf.numpy_function(
                _dense_rows_call(self.exchange, plan),
                [count, self._when, *gradients],
                [tf.float64, *(g.dtype for g in gradients)],
            )
            for gradient, output in zip(gradients, outputs, strict=True):
                output.set_shape(gradient.shape)
        else:
            flat = [part for g in gradients for part in (g.indices, g.values)]
            examples, *parts = tf.numpy_function(
                _rows_call(self.exchange, plan, merge),
                [count, self._when, *flat],
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

    def _accumulate(
        self,
        plan: Plan,
        optimizer: keras.optimizers.Optimizer,
        gradients: list[tf.Tensor],
        present: list[int],
        variables: list[Any],
        count: tf.Tensor,
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Exchanges once an update: between updates gradients stay on their rank.

        Each rank accumulates its share n·g / Σ n of every micro-step; at the update
        the shares, accumulators included, are summed and the accumulators cleared,
        so that Keras' own `(g + accumulator) / steps` is the same on all ranks.
        Handing over `reduced - accumulator` instead would round differently on each.
        Scales that overwrite their variable have no shares: of them, Keras and the
        exchange keep the largest.
        """
        steps = accumulation_steps(optimizer, variables)
        owners = accumulating_optimizers(optimizer, variables)
        accumulators = [owner.accumulator(v).value for owner, v in owners]
        scale = gradient_scale(optimizer)
        guarded = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        finite = tf.constant(True)
        if guarded:
            finite = tf.reduce_all(
                [tf.reduce_all(tf.math.is_finite(g)) for g in gradients]
            )
        examples, nonfinite = tf.numpy_function(
            _counts_call(self.exchange),
            [count, self._when, tf.logical_and(count > 0, tf.logical_not(finite))],
            [tf.float64, tf.bool],
        )
        examples.set_shape(())
        nonfinite.set_shape(())
        share = tf.math.divide_no_nan(count, examples)
        whole = tf.cast(count > 0, count.dtype)
        largest = [plan.gradients[index].reduction == "max" for index in present]
        shares = [
            tf.math.multiply_no_nan(g, tf.cast(whole if is_max else share, g.dtype))
            for g, is_max in zip(gradients, largest, strict=True)
        ]
        if guarded:
            # Every rank must skip the micro-step that one rank has to skip.
            shares = [
                tf.where(nonfinite, tf.constant(float("inf"), g.dtype), g)
                for g in shares
            ]

        def at_update() -> list[tf.Tensor]:
            sums = [
                tf.maximum(g, a) if is_max else g + tf.cast(a * scale, g.dtype)
                for g, a, is_max in zip(shares, accumulators, largest, strict=True)
            ]
            # The shares are already weighted, so here every rank counts once and
            # the mean over ranks is brought back to the sum.
            one = tf.constant(1.0, tf.float64)
            means, ranks = self._allreduce(plan, sums, present, one, True)
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


def _plainly_finite_or_not(gradient: Any) -> Any:
    """Makes all rows of a sparse gradient infinite if one is not finite.

    Keras' check for finite gradients looks, of rows with the same index, at the last
    one only (`isfinite` of `tf.IndexedSlices`, Keras 3.15): it would miss the others,
    and an infinite weight would be the end of the run.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    values = gradient.values
    finite = tf.reduce_all(tf.math.is_finite(values))
    values = tf.where(finite, values, tf.constant(float("inf"), values.dtype))
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)


def _host_call(
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


def _counts_call(exchange: GradientExchange) -> Callable[..., list[Any]]:
    """Returns the function that TensorFlow calls on the host between updates."""

    def exchange_counts(examples: Any, arrived: Any, nonfinite: Any) -> list[Any]:
        total, any_nonfinite = exchange.reduce_counts(
            float(examples), bool(nonfinite), float(arrived)
        )
        return [np.float64(total), np.bool_(any_nonfinite)]

    return exchange_counts


def _describe(gradient: Any, variable: Any) -> Gradient:
    shape = tuple(int(d) for d in variable.shape)
    path = canonical_path(variable)
    if gradient is None:
        dtype = keras.backend.standardize_dtype(variable.dtype)
        return Gradient(path, shape, dtype, exists=False)
    overwrites = getattr(variable, "overwrite_with_gradient", False)
    return Gradient(
        path,
        shape,
        gradient.dtype.name,
        sparse=isinstance(gradient, tf.IndexedSlices),
        reduction="max" if overwrites else "mean",
    )
