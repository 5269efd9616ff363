"""TensorFlow's half of the exchange: from gradient tensors to reduced ones.

On the host one call per bucket hands NumPy views of the gradients to
`GradientExchange` (`_tensorflow_host.py`); nothing is concatenated in the graph, the
only copy is the one into the fusion buffer. Sparse gradients (`tf.IndexedSlices`) stay
sparse. Here is their order, the same on all ranks, and what optimizers ask of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from distkeras.backends import _tensorflow_host
from distkeras.backends._optimizers import accumulation_steps
from distkeras.backends._optimizers import indifferent_to_duplicates
from distkeras.backends._tensorflow_accumulation import accumulate
from distkeras.backends._tensorflow_device import DeviceHandOver
from distkeras.backends._tensorflow_device import allreduce_on_device
from distkeras.backends._tensorflow_norm import GradientNorm
from distkeras.gradients import Gradient
from distkeras.gradients import GradientExchange
from distkeras.gradients import Plan
from distkeras.gradients import canonical_path

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

        Raises:
            ValueError: if the step is traced for XLA.
        """
        if _traced_for_xla():
            raise ValueError(
                "Expected a step that XLA does not compile: it cannot contain the "
                "exchange with other ranks. Received: jit_compile=True, which on a GPU "
                "`compile` chooses by itself. Pass `jit_compile=False` to `compile`, "
                "or to `tf.function`; or train by `distkeras.Trainer(model)`, where "
                "XLA compiles what is before and after the exchange."
            )
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

    @contextlib.contextmanager
    def before_the_step(self) -> Iterator[None]:
        """Lets variables be read inside, also while the step is traced."""
        with tf.init_scope():
            yield

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
        return list(newest.get(self._queue, ()))

    @property
    def _queue(self) -> object:
        """What keeps its calls in one order: this exchange, or all of the device's.

        NCCL wants one order on all ranks for all its communicators of a device.
        """
        return id(self) if self._hand_over is None else DeviceHandOver

    def _note(self, *tensors: tf.Tensor) -> None:
        """Keeps what this exchange ends with, on the graph: it ends with that."""
        if not tf.executing_eagerly():
            graph = tf.compat.v1.get_default_graph()
            newest = getattr(graph, _NEWEST, {})
            setattr(graph, _NEWEST, {**newest, self._queue: tensors})

    def _plan(self, gradients: Sequence[Any], variables: Sequence[Any]) -> Plan:
        together = tf.executing_eagerly()
        return self.exchange.plan(
            tuple(id(variable) for variable in variables),
            [_describe(g, v) for g, v in zip(gradients, variables, strict=True)],
            together=together,
            arrived=float(self._when) if together else 0.0,
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
        if not accumulation_steps(optimizer):
            merge = indifferent_to_duplicates(optimizer)
            reduced, examples = self._allreduce(plan, gradients, present, count, merge)
            if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
                reduced = [_plainly_finite_or_not(g) for g in reduced]
            return reduced, examples
        # As in Keras, whose accumulators are dense.
        dense = [tf.convert_to_tensor(g) for g in gradients]
        largest = [plan.gradients[index].reduction == "max" for index in present]

        def exchange_counts(nonfinite: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return _tensorflow_host.reduce_counts(
                self.exchange, count, self._when, nonfinite
            )

        def allreduce(sums: list[tf.Tensor]) -> tuple[list[tf.Tensor], tf.Tensor]:
            one = tf.constant(1.0, tf.float64)
            return self._allreduce(plan, sums, present, one, True)

        return accumulate(
            optimizer,
            dense,
            variables,
            largest,
            count,
            exchange_counts=exchange_counts,
            allreduce=allreduce,
        )

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
                self._when,
                lambda number, bucket: _tensorflow_host.reduce_bucket(
                    self.exchange, plan, number, bucket, count, self._when
                )[1],
            )
        position = {index: i for i, index in enumerate(present)}
        reduced: list[Any] = list(gradients)
        after: list[tf.Operation | tf.Tensor] = []
        examples = count
        for number, bucket in enumerate(plan.buckets):
            where = [position[place.index] for place in bucket.placements]
            with tf.control_dependencies(after):
                bucketed = [gradients[i] for i in where]
                examples, outputs = _tensorflow_host.reduce_bucket(
                    self.exchange, plan, number, bucketed, count, self._when
                )
            # One order on all ranks, so that messages match without negotiation.
            after = [examples]
            for i, output in zip(where, outputs, strict=True):
                reduced[i] = output
        if plan.sparse:
            where = [position[index] for index in plan.sparse]
            with tf.control_dependencies(after):
                sparse = [gradients[i] for i in where]
                examples, rows = _tensorflow_host.reduce_rows(
                    self.exchange, plan, sparse, count, self._when, merge=merge
                )
            for i, output in zip(where, rows, strict=True):
                reduced[i] = output
        return reduced, examples


def _traced_for_xla() -> bool:
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    return graph is not None and control_flow_util.GraphOrParentsInXlaContext(graph)


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
