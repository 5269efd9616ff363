"""`tf.data.Dataset`: its batches, dealt to the ranks in turn."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from keras import tree
from keras.src.trainers.data_adapters import tf_dataset_adapter

from distkeras.data._base import Part
from distkeras.data._base import ShardedData
from distkeras.data._tf_order import check_order
from distkeras.data._tf_order import files_of_caches
from distkeras.data._tf_order import has_order_of_its_own

_INFINITE = -1
# Steps of a pass that has no end: more than any run takes.
_FOREVER = 1 << 62


class ShardedTFDataset(ShardedData):
    """This rank's batches of a batched `tf.data.Dataset`.

    Every rank runs the pipeline and keeps every `size`-th batch. Where making the
    batches is expensive, shard where they are still file names
    (`.shard(distkeras.size(), distkeras.rank())`) and pass `shard=False`.

    The order has to be the same on every rank. Shuffles must be seeded, which is
    checked; that no rank has iterated over the data before the others is not (it
    would shift the shuffles of the rank that did).

    Args:
        dataset: yields batches.
        class_weight: as for `keras.Model.fit`.
        steps: `steps_per_epoch`. In evaluation it limits the data.
        part: this rank's part.
        training: for `fit`, not for `evaluate` or `predict`.
        seed: not used: the order is the pipeline's.
    """

    kind = "tf.data.Dataset"

    def __init__(
        self,
        dataset: Any,
        *,
        class_weight: dict[int, float] | None,
        steps: int | None,
        part: Part,
        training: bool,
        seed: int,
    ) -> None:
        super().__init__(part=part, training=training, seed=seed)
        self._order = check_order(dataset) if part.size > 1 else []
        for spec in tree.flatten(dataset.element_spec):
            if getattr(spec, "shape", None) is not None and spec.shape.rank == 0:
                raise ValueError(
                    "Expected a batched tf.data.Dataset: call `.batch(batch_size)`. "
                    f"Received elements without a batch dimension: {spec}"
                )
        if class_weight is not None:
            dataset = dataset.map(
                tf_dataset_adapter.make_class_weight_map_fn(class_weight)
            )
        if steps and not training:
            dataset = dataset.take(steps * part.size)
        self._cardinality = int(dataset.cardinality())
        if self._cardinality == _INFINITE and not steps:
            name = "steps_per_epoch" if training else "steps"
            raise ValueError(
                f"Expected `{name}` with a tf.data.Dataset that repeats without end. "
                f"Received: {name}=None"
            )
        if self._cardinality == 0 and not part.own:
            raise ValueError("Expected at least one batch. Received: an empty dataset")
        self._whole = dataset
        self._steps_per_epoch = steps if training else None
        self._adapter: tf_dataset_adapter.TFDatasetAdapter | None = None
        self._rows: list[int] = []
        self._seen: Any = None

    @property
    def files_to_write(self) -> list[str]:
        """Those of `.cache(path)`, where they are not there yet."""
        return files_of_caches(self._whole)

    def fingerprint(self) -> list[tuple[str, Any]]:
        """Length, types and what decides the order."""
        return [
            ("number of batches (-1: no end, -2: unknown)", self._cardinality),
            ("element_spec", self._whole.element_spec),
            *self._order,
        ]

    @property
    def units(self) -> int | None:
        """Batches a pass; None if unknown or without end."""
        return None if self._cardinality < 0 else self._cardinality

    def start_at(
        self, number: int, units: int, *, steps: int | None = None, epochs: int = 0
    ) -> int:
        """Lets the next pass begin after the first batches.

        They are run through, as the pipeline cannot tell them by a number. Each
        iterator gets another order of a pipeline that shuffles; so as many are made as
        the earlier run had made.
        """
        import tensorflow as tf

        for _ in range(self._iterators(epochs)):
            iter(self._whole)
        if units:
            with tf.device("CPU:0"):  # where pipelines run
                self._seen = tf.Variable(units, dtype=tf.int64, trainable=False)
            self._adapter = None
        return super().start_at(number, units, steps=steps)

    def set_epoch(self, epoch: int) -> None:
        """Lets passes after the first one begin at the beginning."""
        super().set_epoch(epoch)
        if self._start is not None:
            self._begin_pass()
        elif self._seen is not None and self._cardinality != _INFINITE:
            self._seen.assign(0)
            self._going_on = None

    def _iterators(self, epochs: int) -> int:
        """How many iterators Keras makes in so many epochs."""
        if self._steps_per_epoch:
            # One a pass, which need not be an epoch.
            return epochs * self._steps_per_epoch // (self._steps or _FOREVER)
        # Where it knows the number of steps it makes another at the end of each.
        return epochs if self._steps is None else 2 * epochs

    @property
    def can_begin_again(self) -> bool:
        """Whether a pass that has begun can be gone through again in this process."""
        return not has_order_of_its_own(self._whole)

    @property
    def _own_count(self) -> int | None:
        """Batches a pass that are this rank's; None if unknown or without end."""
        if self._cardinality < 0:
            return None
        return len(range(self.part.rank, self._cardinality, self.part.size))

    @property
    def local_steps(self) -> int | None:
        """Steps a pass, or None if it is not known."""
        count = self._own_count
        if count is None:
            return None
        if self.training:
            count = math.ceil(self._cardinality / self.part.size)
        return max(count, 1)

    @property
    def batch_size(self) -> int | None:
        """Samples a batch, where the pipeline says so."""
        for spec in tree.flatten(self._whole.element_spec):
            shape = getattr(spec, "shape", None)
            if shape is not None and shape.rank:
                size = shape[0]
                return None if size is None else int(size)
        return None

    @property
    def may_be_empty(self) -> bool:
        """Whether a rank may have a step without examples; the same on all ranks."""
        if self.part.own or not self.training or self._uneven_start:
            return True
        return self._cardinality != _INFINITE and self._padded_anywhere()

    @property
    def rows_seen(self) -> list[int]:
        """Rows of each batch of the last pass, in evaluation and prediction."""
        return self._rows

    # The pipeline

    def _padding(self) -> int | None:
        """Batches of zero rows after the last one; None for no end."""
        if not self.training:
            # A rank that has no batch is only known at the end where the length is
            # unknown, so there the batch of zero rows always comes.
            return 1 if not self._own_count else 0
        if self._cardinality == _INFINITE and self._steps is None:
            return 0
        if self._uneven_start:  # ranks end otherwise in this pass; Keras counts steps
            return None
        if self._steps is None and self.ends:
            return 0
        if self._steps is None or self._own_count is None:
            return None
        return self._steps - self._own_count

    def _padded_anywhere(self) -> bool:
        """Whether any rank needs padding: then types are the same on all ranks."""
        if self.training and not self.part.own and self._cardinality >= 0:
            return self._uneven_start or self._cardinality % self.part.size != 0
        return self._padding() != 0

    def _keras(self) -> tf_dataset_adapter.TFDatasetAdapter:
        if self._adapter is None:
            import tensorflow as tf

            dataset = self._whole
            if not self._padded_anywhere():
                dataset = self._dealt(dataset)
            elif _has_open_dimensions(dataset.element_spec):
                dataset = self._dealt_with_last_shape(dataset)
            else:
                padding = _zero_rows(dataset.element_spec).repeat(self._padding())
                dataset = self._dealt(dataset).concatenate(padding)
            if not self.training:
                dataset = self._recorded(dataset)
            if dataset.options().deterministic is False and self.part.size > 1:
                options = tf.data.Options()
                options.deterministic = True
                dataset = dataset.with_options(options)
            self._adapter = tf_dataset_adapter.TFDatasetAdapter(
                dataset.prefetch(tf.data.AUTOTUNE)
            )
        return self._adapter

    def _dealt(self, dataset: Any) -> Any:
        rank, size = self.part.rank, self.part.size
        if self._seen is None:
            return dataset if size == 1 else dataset.shard(size, rank)

        keep = _do_not_convert(lambda number, batch: self._is_own(number))
        dataset = dataset.enumerate().filter(keep)
        return dataset.map(_do_not_convert(lambda number, batch: batch))

    def _is_own(self, number: Any) -> Any:
        """Whether a batch is this rank's, and not seen yet; inside `tf.data`."""
        import tensorflow as tf

        seen = tf.constant(0, tf.int64) if self._seen is None else self._seen
        mine = tf.math.floormod(number - seen, self.part.size) == self.part.rank
        return tf.logical_and(number >= seen, mine)

    def _dealt_with_last_shape(self, dataset: Any) -> Any:
        """Deals and pads where dimensions beside the batch dimension vary.

        A batch of zero rows then has the other dimensions of the last batch of the
        whole data, whichever rank's it was: a model may not accept any others.
        """
        import tensorflow as tf

        spec = dataset.element_spec
        pad = _zero_rows(spec).repeat(self._padding())
        none = tf.data.Dataset.from_tensors(np.int64(-1)).repeat()
        tagged = dataset.enumerate().concatenate(tf.data.Dataset.zip((none, pad)))

        @tf.autograph.experimental.do_not_convert
        def carry_shapes(shapes: Any, element: Any) -> Any:
            number, batch = element
            is_pad = number < 0
            leaves, new_shapes = [], []
            for leaf, leaf_spec, shape in zip(
                tree.flatten(batch), tree.flatten(spec), shapes, strict=True
            ):
                if _is_open(leaf_spec):
                    leaf = _zeros_if(is_pad, leaf, shape)
                    leaf.set_shape(_relaxed(leaf_spec))
                    shape = tf.shape(leaf)
                leaves.append(leaf)
                new_shapes.append(shape)
            keep = tf.logical_or(is_pad, self._is_own(number))
            return tuple(new_shapes), (keep, tree.pack_sequence_as(batch, leaves))

        first = tuple(
            tf.constant([0] + [1] * (leaf.shape.rank - 1), tf.int32)
            if _is_open(leaf) and leaf.shape.rank
            else tf.constant([0], tf.int32)
            for leaf in tree.flatten(spec)
        )
        scanned = tagged.scan(first, carry_shapes)
        scanned = scanned.filter(_do_not_convert(lambda keep, batch: keep))
        return scanned.map(_do_not_convert(lambda keep, batch: batch))

    def _recorded(self, dataset: Any) -> Any:
        """Notes how many rows each batch has, to put predictions in order."""
        import tensorflow as tf

        def note(number: np.ndarray, rows: np.ndarray) -> np.ndarray:
            if number == 0:
                self._rows = []
            self._rows.append(int(rows))
            return rows

        @tf.autograph.experimental.do_not_convert
        def record(number: Any, batch: Any) -> Any:
            leaf = next(leaf for leaf in tree.flatten(batch) if leaf is not None)
            if isinstance(leaf, tf.SparseTensor):
                rows = leaf.dense_shape[0]
            elif isinstance(leaf, tf.RaggedTensor):
                rows = leaf.nrows(tf.int64)
            else:
                rows = tf.shape(leaf, tf.int64)[0]
            tf.numpy_function(note, [number, rows], tf.int64, stateful=True)
            return batch

        return dataset.enumerate().map(record)

    # In the form each backend takes

    def get_tf_dataset(self) -> Any:
        """A `tf.data.Dataset` of this rank's batches; each iterator is a pass."""
        return self._keras().get_tf_dataset()

    def get_numpy_iterator(self) -> Iterator[Any]:
        """This rank's batches of one pass, as NumPy arrays."""
        return self._keras().get_numpy_iterator()

    def get_jax_iterator(self) -> Iterator[Any]:
        """This rank's batches of one pass, in a form that JAX takes."""
        return self._keras().get_jax_iterator()

    def get_torch_dataloader(self) -> Any:
        """A torch `DataLoader` of this rank's batches; each iterator is a pass."""
        return self._keras().get_torch_dataloader()


def _do_not_convert(function: Any) -> Any:
    import tensorflow as tf

    return tf.autograph.experimental.do_not_convert(function)


def _is_open(spec: Any) -> bool:
    """Whether a dense tensor's dimensions beside the first are not all known."""
    import tensorflow as tf

    if not isinstance(spec, tf.TensorSpec):
        return False
    return spec.shape.rank is None or None in spec.shape.as_list()[1:]


def _has_open_dimensions(element_spec: Any) -> bool:
    return any(_is_open(spec) for spec in tree.flatten(element_spec))


def _zeros_if(is_pad: Any, leaf: Any, shape: Any) -> Any:
    """The tensor, or one without rows whose other dimensions are given."""
    import tensorflow as tf

    return tf.cond(
        is_pad,
        lambda: tf.zeros(tf.concat([[0], shape[1:]], 0), leaf.dtype),
        lambda: leaf,
    )


def _relaxed(spec: Any) -> Any:
    import tensorflow as tf

    if spec.shape.rank is None:
        return spec.shape
    return tf.TensorShape([None, *spec.shape.as_list()[1:]])


def _zero_rows(element_spec: Any) -> Any:
    """A dataset of one batch without rows; open dimensions are 1."""
    import tensorflow as tf

    def zero_rows(spec: Any) -> Any:
        # TensorFlow gives the class out since 2.21 only.
        if spec is None or type(spec).__name__ == "NoneTensorSpec":
            return None
        if isinstance(spec, tf.OptionalSpec):
            return tf.experimental.Optional.empty(spec._element_spec)
        shape = [1 if size is None else size for size in (spec.shape or [0])]
        shape[0] = 0
        if isinstance(spec, tf.SparseTensorSpec):
            return tf.SparseTensor(
                np.zeros((0, len(shape)), "int64"), tf.zeros([0], spec.dtype), shape
            )
        if isinstance(spec, tf.RaggedTensorSpec):
            splits = [tf.zeros([1], spec.row_splits_dtype)] * spec.ragged_rank
            flat = tf.zeros([0, *shape[spec.ragged_rank + 1 :]], spec.dtype)
            return tf.RaggedTensor.from_nested_row_splits(flat, splits)
        return tf.zeros(shape, spec.dtype)

    batch = tree.map_structure(zero_rows, element_spec)
    dataset = tf.data.Dataset.from_tensors(batch)

    @tf.autograph.experimental.do_not_convert
    def relax(*parts: Any) -> Any:
        whole = parts if isinstance(batch, tuple) else parts[0]

        def open_rows(leaf: Any, spec: Any) -> Any:
            if not isinstance(spec, tf.TensorSpec):
                return leaf
            return tf.compat.v1.placeholder_with_default(leaf, _relaxed(spec))

        return tree.map_structure(open_rows, whole, element_spec)

    return dataset.map(relax)
