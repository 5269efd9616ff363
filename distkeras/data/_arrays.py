"""Arrays: NumPy, tensors, pandas, ragged and sparse, in any nested structure."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import numpy as np
from keras import tree
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

from distkeras.data import _order
from distkeras.data._base import Part
from distkeras.data._base import ShardedData
from distkeras.data._digest import digest
from distkeras.data._streams import Reiterable
from distkeras.data._tf_ahead import PARALLEL
from distkeras.data._tf_ahead import work_ahead


class ShardedArrays(ShardedData):
    """This rank's share of arrays that every rank holds whole.

    Nothing is copied: each step gathers the rank's rows by index. In training step
    k of all ranks together is batch k of one process. In evaluation and prediction
    each rank has one contiguous piece, so that predictions need no reordering.

    Args:
        x: as for `keras.Model.fit`.
        y: as for `keras.Model.fit`.
        sample_weight: as for `keras.Model.fit`.
        batch_size: samples a step and rank.
        global_batch_size: samples a step over all ranks, instead.
        steps: `steps_per_epoch`. In training, without a batch size, the data is
            divided in as many batches. In evaluation it limits the data.
        shuffle: True, False or "batch", as in Keras, on the whole data.
        class_weight: as for `keras.Model.fit`.
        part: this rank's part.
        training: for `fit`, not for `evaluate` or `predict`.
        seed: with the number of the pass decides the order.
    """

    kind = "arrays"

    def __init__(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        batch_size: int | None,
        global_batch_size: int | None,
        steps: int | None,
        shuffle: _order.Shuffle,
        class_weight: dict[int, float] | None,
        part: Part,
        training: bool,
        seed: int,
    ) -> None:
        super().__init__(part=part, training=training, seed=seed)
        # Keras checks the arguments, packs them and applies the class weights.
        keras_adapter = ArrayDataAdapter(
            x, y, sample_weight=sample_weight, class_weight=class_weight
        )
        self._inputs = keras_adapter._inputs
        count = int(keras_adapter._num_samples)
        if count == 0 and not part.own:
            raise ValueError("Expected at least one sample. Received: no samples")
        if global_batch_size is None and not batch_size and steps:
            global_batch_size = max(math.ceil(count / steps), 1)
        self._global_batch = global_batch_size or (batch_size or 32) * part.size
        self._count = count
        self._converted: dict[str, Any] = {}
        if not training and steps:
            count = min(count, steps * self._global_batch)
        self._used = count
        self._shuffle = shuffle if training else False

    # How many

    @property
    def local_steps(self) -> int:
        """Steps a pass that this rank has data for, at least one."""
        if self.training:
            return max(math.ceil(self._used / self._global_batch), 1)
        start, stop = _order.share(self._used, self.part.rank, self.part.size)
        return max(math.ceil((stop - start) / self.batch_size), 1)

    @property
    def batch_size(self) -> int:
        """Samples a step on the rank that has the most; the same on all ranks."""
        return math.ceil(self._global_batch / self.part.size)

    @property
    def may_be_empty(self) -> bool:
        """Whether a rank may have a step without examples; the same on all ranks."""
        if self.part.own or not self.training or self._uneven_start:
            return True
        smallest = min(self._global_batch, self._rest() or self._global_batch)
        return smallest < self.part.size

    @property
    def has_partial_batch(self) -> bool:
        """Whether the last batch is smaller."""
        return self._rest() > 0

    @property
    def partial_batch_size(self) -> int | None:
        """Samples in this rank's last batch, if that is smaller; 0 is possible."""
        if not self.has_partial_batch:
            return None
        start, stop = _order.share(self._rest(), self.part.rank, self.part.size)
        return stop - start if self.training else self._rest()

    def _rest(self) -> int:
        if self.training:
            return self._used % self._global_batch
        start, stop = _order.share(self._used, self.part.rank, self.part.size)
        return (stop - start) % self.batch_size

    def _local_examples(self) -> int:
        return self._used

    def _how(self) -> str:
        if not self.training:
            return f"{self._used} samples in contiguous pieces"
        order = "shuffled" if self._shuffle else "in order"
        if self._shuffle == "batch":
            order = "shuffled within batches"
        return (
            f"{self._used} samples {order}, global batch {self._global_batch}, "
            f"{self.batch_size} a rank"
        )

    def fingerprint(self) -> list[tuple[str, Any]]:
        """Counts, structure, types, and some of the values, of all arrays."""
        leaves = [leaf for leaf in tree.flatten(self._inputs) if leaf is not None]
        kinds = [(str(_dtype(leaf)), _trailing(leaf)) for leaf in leaves]
        return [
            ("number of samples", self._count),
            ("structure of x, y and sample_weight", _structure(self._inputs)),
            ("dtypes and shapes without the batch dimension", kinds),
            ("global batch size", self._global_batch),
            ("shuffle", self._shuffle),
            ("values of the data", [digest(leaf) for leaf in leaves]),
        ]

    # Which

    @property
    def units_a_step(self) -> int:
        """Samples of a global batch."""
        return self._global_batch

    @property
    def units(self) -> int:
        """Samples a pass."""
        return self._used

    def _indices(self) -> tuple[np.ndarray, np.ndarray, np.int64]:
        """The next pass: rows of full steps, of the short one, and if there is one."""
        number, seen = self._begin_pass()
        rank, size = self.part.rank, self.part.size
        if not self.training:
            start, stop = _order.share(self._used, rank, size)
            order = np.arange(start, stop, dtype=np.int64)
            full, rest = _order.deal(order, self.batch_size, 0, 1)
            return full, rest, np.int64(self.has_partial_batch)
        seed, *stream = self.part.seeds(self.seed)
        random = _order.generator(seed, number, *stream)
        order = _order.permutation(
            self._used, self._global_batch, self._shuffle, random
        )
        order = order[seen:]
        full, rest = _order.deal(order, self._global_batch, rank, size)
        return full, rest, np.int64(len(order) % self._global_batch > 0)

    @property
    def _full_steps(self) -> int:
        if self.training:
            return self._used // self._global_batch
        start, stop = _order.share(self._used, self.part.rank, self.part.size)
        return (stop - start) // self.batch_size

    @property
    def _padding(self) -> int | None:
        """Batches of zero rows at the end; None for no end."""
        if self._steps is None:
            return None
        return self._steps - self._full_steps - self.has_partial_batch

    def _batches_of_indices(self) -> Iterator[np.ndarray]:
        full, rest, short = self._indices()
        yield from full
        if short:
            yield rest
        if self._padding is None:
            yield from itertools.repeat(rest[:0])
        else:
            yield from itertools.repeat(rest[:0], self._padding)

    # In the form each backend takes

    def get_tf_dataset(self) -> Any:
        """A `tf.data.Dataset` of this rank's batches; each iterator is a pass."""
        import tensorflow as tf

        padding = self._padding
        has_short = self.has_partial_batch or self._uneven_start
        # A batch dimension that is 0 in every step must not become a constant.
        rows = self._rows_of_full_step() or None

        @tf.autograph.experimental.do_not_convert
        def one_pass(_: Any) -> Any:
            full, rest, short = tf.numpy_function(
                self._indices, [], (tf.int64, tf.int64, tf.int64), stateful=True
            )
            full.set_shape([None, rows])
            # Left open on every rank alike, even where it is the same as `rows`.
            rest.set_shape([None])
            short.set_shape([])
            return full, rest, short

        @tf.autograph.experimental.do_not_convert
        def batches(full: Any, rest: Any, short: Any) -> Any:
            indices = tf.data.Dataset.from_tensor_slices(full)
            if has_short:
                last = tf.data.Dataset.from_tensors(rest).take(short)
                indices = indices.concatenate(last)
            if padding != 0:
                none = tf.data.Dataset.from_tensors(rest[:0]).repeat(padding)
                indices = indices.concatenate(none)
            return indices

        # The pipeline is that of Keras' ArrayDataAdapter.get_tf_dataset: indices
        # are batched, and one gather a batch takes the rows.
        indices = tf.data.Dataset.range(1).map(one_pass).prefetch(1).flat_map(batches)
        inputs = self._sliceable("tensorflow")
        inputs = tree.lists_to_tuples(inputs)
        whole = tf.data.Dataset.from_tensors(inputs).repeat()
        dataset = tf.data.Dataset.zip((indices, whole))

        @tf.autograph.experimental.do_not_convert
        def gather(indices: Any, data: Any) -> Any:
            return tree.traverse(functools.partial(_gather, indices=indices), data)

        dataset = dataset.map(gather, num_parallel_calls=PARALLEL)
        options = tf.data.Options()
        # As in Keras: rewriting the graph costs more than it brings here.
        options.experimental_optimization.apply_default_optimizations = False
        options.experimental_external_state_policy = (
            tf.data.experimental.ExternalStatePolicy.IGNORE
        )
        options.experimental_distribute.auto_shard_policy = (
            tf.data.experimental.AutoShardPolicy.OFF
        )
        return work_ahead(dataset.with_options(options))

    def _rows_of_full_step(self) -> int:
        if not self.training:
            return self.batch_size
        start, stop = _order.share(self._global_batch, self.part.rank, self.part.size)
        return stop - start

    def get_numpy_iterator(self) -> Iterator[Any]:
        """This rank's batches of one pass, as NumPy arrays."""
        return self._iterate("numpy", lambda kind, x: kind.convert_to_numpy(x))

    def get_jax_iterator(self) -> Iterator[Any]:
        """This rank's batches of one pass, in a form that JAX takes."""
        return self._iterate("jax", lambda kind, x: kind.convert_to_jax_compatible(x))

    def get_torch_dataloader(self) -> Any:
        """A torch `DataLoader` of this rank's batches; each iterator is a pass."""
        return data_adapter_utils.get_torch_dataloader(
            Reiterable(
                lambda: self._iterate(
                    "torch", lambda kind, x: kind.convert_to_torch_compatible(x)
                )
            )
        )

    def _sliceable(self, backend: str) -> Any:
        """The arrays in Keras' form for a backend; made once, as it may copy."""
        if backend not in self._converted:
            self._converted[backend] = array_slicing.convert_to_sliceable(
                self._inputs, target_backend=backend
            )
        return self._converted[backend]

    def _iterate(self, backend: str, convert: Callable[..., Any]) -> Iterator[Any]:
        inputs = self._sliceable(backend)
        for indices in self._batches_of_indices():

            def rows(sliceable: Any, indices: np.ndarray = indices) -> Any:
                return convert(sliceable, sliceable[indices])

            yield tree.map_structure(rows, inputs, none_is_leaf=False)


def _gather(x: Any, indices: Any) -> Any:
    """The rows of a leaf inside a `tf.data` function; None to descend further."""
    import tensorflow as tf

    if isinstance(x, array_slicing.TensorflowSparseWrapper):
        return array_slicing.slice_tensorflow_sparse_wrapper(x, indices)
    if isinstance(x, list | tuple | dict):
        return None
    if tf.is_tensor(x):
        return tf.gather(x, indices, axis=0)
    return x


def _structure(inputs: Any) -> str:
    return str(
        tree.map_structure(lambda leaf: "." if leaf is not None else "-", inputs)
    )


def _dtype(leaf: Any) -> Any:
    if hasattr(leaf, "dtypes"):  # pandas
        return getattr(leaf.dtypes, "tolist", lambda: leaf.dtypes)()
    return leaf.dtype


def _trailing(leaf: Any) -> tuple[int | None, ...]:
    return tuple(None if size is None else int(size) for size in leaf.shape[1:])
