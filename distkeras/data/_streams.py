"""Batches made by Python code: what PyDatasets, generators and loaders share."""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import numpy as np
from keras import tree
from keras.src.trainers.data_adapters import data_adapter_utils

from distkeras.communicators._base import Communicator
from distkeras.data._base import ShardedData
from distkeras.data._tf_ahead import work_ahead


class Reiterable:
    """An iterable that makes a new iterator each time it is asked for one.

    Args:
        make: makes the iterator.
    """

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return self._make()


class ShardedStream(ShardedData):
    """Batches that Python code makes, dealt in turn; the base of three kinds.

    A subclass says which batches are this rank's (`_own_batches`) and shows the
    first few of the whole data (`_first_batches`), from which the types and shapes
    are taken, in the way Keras does.
    """

    _samples: list[Any] | None = None
    _empty: Any = None
    _rows: list[int]

    @abc.abstractmethod
    def _own_batches(self) -> Iterator[Any]:
        """One pass over this rank's batches, without padding."""

    @abc.abstractmethod
    def _first_batches(self) -> list[Any]:
        """Up to two batches of the whole data, the same on all ranks."""

    def first_batches(self) -> list[Any]:
        """Up to two batches of the whole data, looked at once."""
        if self._samples is None:
            self._samples = self._first_batches()
        return self._samples

    def zero_rows(self) -> Any:
        """A batch like the others, without rows; None if there is no batch at all."""
        if self._empty is None and self.first_batches():
            self._empty = empty_like(self.first_batches()[0])
        return self._empty

    def settle(self, communicator: Communicator) -> None:
        """Agrees on the steps a pass, and on types where a rank has no batch.

        Args:
            communicator: the ranks.
        """
        super().settle(communicator)
        if self.part.own and not all(
            communicator.allgather_object(bool(self.first_batches()))
        ):
            self._borrow_types(communicator)

    def _borrow_types(self, communicator: Communicator) -> None:
        offers = communicator.allgather_object(_portable(self.zero_rows()))
        offers = [offer for offer in offers if offer is not None]
        if not offers:
            raise ValueError(
                f"Expected at least one batch on some rank. Received: an empty "
                f"{self.kind} on every rank"
            )
        if not self.first_batches():
            self._samples = offers[:1]

    def _fingerprint_of_types(self) -> list[tuple[str, Any]]:
        def describe(leaf: Any) -> str:
            return f"{getattr(leaf, 'dtype', type(leaf).__name__)} {np.shape(leaf)}"

        batches = self.first_batches()
        return [
            (
                "types and shapes of the first batches",
                [
                    str(tree.map_structure(describe, batch, none_is_leaf=False))
                    for batch in batches
                ],
            )
        ]

    @property
    def rows_seen(self) -> list[int]:
        """Rows of each batch of the last pass."""
        return self._rows

    def _batches(self) -> Iterator[Any]:
        """One pass: this rank's batches, and batches of zero rows at the end."""
        done = 0 if self._start is None else self._start.steps
        rows: list[int] = []
        self._rows = rows
        for batch in self._own_batches():
            if not self.training:
                rows.append(count_rows(batch))
            yield batch
            done += 1
        if not self.training:
            padding: int | None = 0 if done else 1
        elif self._steps is None:
            padding = 0 if self.ends else None
        else:
            padding = self._steps - done
        zero_rows = self.zero_rows()
        if padding is None:
            yield from itertools.repeat(zero_rows)
        else:
            yield from itertools.repeat(zero_rows, padding)

    def _steps_of(self, count: int | None) -> int | None:
        """Steps a pass in which this rank takes its turns of `count` batches."""
        if count is None:
            return None
        if self.training:
            return max(math.ceil(count / self.part.size), 1)
        return max(len(range(self.part.rank, count, self.part.size)), 1)

    # In the form each backend takes

    def get_tf_dataset(self) -> Any:
        """A `tf.data.Dataset` of this rank's batches; each iterator is a pass."""
        return self._prefetch(self._tf_dataset(self._batches))

    def get_tf_samples(self) -> Any:
        """A `tf.data.Dataset` of the first batches; none is taken from the stream."""
        return self._tf_dataset(self.first_batches)

    def _tf_dataset(self, make: Callable[[], Iterable[Any]]) -> Any:
        import tensorflow as tf

        signature = data_adapter_utils.get_tensor_spec(self.first_batches())

        def batches() -> Iterator[Any]:
            for batch in make():
                yield tree.map_structure(_to_tensorflow, batch, signature)

        return tf.data.Dataset.from_generator(batches, output_signature=signature)

    def _prefetch(self, dataset: Any) -> Any:
        return work_ahead(dataset)

    def get_numpy_iterator(self) -> Iterator[Any]:
        """This rank's batches of one pass, as NumPy arrays."""
        return data_adapter_utils.get_numpy_iterator(self._batches())

    def get_jax_iterator(self) -> Iterator[Any]:
        """This rank's batches of one pass, in a form that JAX takes."""
        return data_adapter_utils.get_jax_iterator(self._batches())

    def get_torch_dataloader(self) -> Any:
        """A torch `DataLoader` of this rank's batches; each iterator is a pass."""
        return data_adapter_utils.get_torch_dataloader(Reiterable(self._batches))


def take_turns(batches: Iterable[Any], rank: int, size: int) -> Iterator[Any]:
    """Every `size`-th batch, beginning with that of number `rank`."""
    return itertools.islice(batches, rank, None, size)


def count_rows(batch: Any) -> int:
    """The number of examples in a batch."""
    for leaf in tree.flatten(batch):
        if leaf is not None:
            return int(leaf.shape[0])
    return 0


def empty_like(batch: Any) -> Any:
    """The same structure, types and trailing shapes, without rows."""

    def no_rows(leaf: Any) -> Any:
        if data_adapter_utils.is_tensorflow_sparse(leaf):
            import tensorflow as tf

            return tf.sparse.slice(
                leaf, [0] * leaf.shape.rank, [0, *leaf.dense_shape[1:]]
            )
        if data_adapter_utils.is_scipy_sparse(leaf):
            return leaf.tocsr()[:0]
        return leaf[:0] if hasattr(leaf, "shape") else np.asarray(leaf)[:0]

    return tree.map_structure(no_rows, batch, none_is_leaf=False)


def _portable(batch: Any) -> Any:
    """A batch that can be pickled: NumPy in place of tensors."""

    def convert(leaf: Any) -> Any:
        if data_adapter_utils.is_torch_tensor(leaf):
            leaf = leaf.cpu()
        return np.asarray(leaf) if hasattr(leaf, "__array__") else leaf

    if batch is None:
        return None
    return tree.map_structure(convert, batch, none_is_leaf=False)


def _to_tensorflow(leaf: Any, spec: Any) -> Any:
    """A leaf as `from_generator` takes it (as Keras' GeneratorDataAdapter does)."""
    import tensorflow as tf

    if leaf is None:
        return tf.experimental.Optional.empty(None)
    if data_adapter_utils.is_scipy_sparse(leaf):
        leaf = data_adapter_utils.scipy_sparse_to_tf_sparse(leaf)
    elif data_adapter_utils.is_jax_sparse(leaf):
        leaf = data_adapter_utils.jax_sparse_to_tf_sparse(leaf)
    elif data_adapter_utils.is_torch_tensor(leaf):
        leaf = np.asarray(leaf.cpu())
    if not spec.shape.is_compatible_with(np.shape(leaf)):
        raise TypeError(
            f"Expected batches of shape {spec.shape}, as the first two batches had. "
            f"Received a batch of shape {np.shape(leaf)}. Where a dimension beside "
            "the batch dimension varies, make the first two batches differ in it."
        )
    return leaf
