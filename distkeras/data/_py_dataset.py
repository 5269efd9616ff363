"""`keras.utils.PyDataset`: its batches, dealt to the ranks in turn."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import numpy as np
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.trainers.data_adapters.py_dataset_adapter import OrderedEnqueuer
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDataset
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

from distkeras.data import _order
from distkeras.data._base import Part
from distkeras.data._digest import digest
from distkeras.data._global_random import same_on_all_ranks
from distkeras.data._streams import ShardedStream
from distkeras.data._tf_ahead import untuned
from distkeras.data._tf_ahead import work_ahead

# Where a PyDataset has no end: more batches than any run asks for.
_FOREVER = 1 << 62


class ShardedPyDataset(ShardedStream):
    """This rank's batches of a `keras.utils.PyDataset`.

    With `shuffle` the batches of each pass are taken in one order that all ranks
    share. The dataset's hooks (`on_epoch_begin`, `on_epoch_end`) run on every rank
    with `random` and `numpy.random` in the same state, so that a shuffle in them is
    the same everywhere; what its constructor shuffles has to be seeded.

    Args:
        dataset: the user's.
        class_weight: as for `keras.Model.fit`.
        shuffle: whether to take the batches in another order each pass.
        steps: `steps_per_epoch`. In evaluation it limits the data.
        part: this rank's part.
        training: for `fit`, not for `evaluate` or `predict`.
        seed: with the number of the pass decides the order.
    """

    kind = "PyDataset"

    def __init__(
        self,
        dataset: PyDataset,
        *,
        class_weight: dict[int, float] | None,
        shuffle: bool,
        steps: int | None,
        part: Part,
        training: bool,
        seed: int,
    ) -> None:
        super().__init__(part=part, training=training, seed=seed)
        self._dataset = dataset
        self._shuffle = shuffle and training
        self._limit = None if training or not steps else steps * part.size
        self._hooks = 0
        self._epochs_to_repeat = 0
        # Only for the checks it makes on a batch, and for the class weights.
        self._keras = PyDatasetAdapter(dataset, class_weight=class_weight)
        count = self._count()
        if count == 0 and not part.own:
            raise ValueError("Expected at least one batch. Received: an empty dataset")
        if count is None and not steps:
            name = "steps_per_epoch" if training else "steps"
            raise ValueError(
                f"Expected `{name}` with a PyDataset without end. Received: {name}=None"
            )
        self.first_batches()

    def _count(self) -> int | None:
        """Batches a pass of the whole data; None for no end."""
        count: int | None = self._dataset.num_batches
        if self._limit is None:
            return count
        return self._limit if count is None else min(count, self._limit)

    @property
    def local_steps(self) -> int | None:
        """Steps a pass, or None for no end."""
        return self._steps_of(self._count())

    @property
    def may_be_empty(self) -> bool:
        """Whether a rank may have a step without examples; the same on all ranks."""
        if self.part.own or not self.training or self._uneven_start:
            return True
        return (self._count() or 0) % self.part.size != 0

    def _how(self) -> str:
        return f"batches in turn, {'shuffled' if self._shuffle else 'in order'}"

    def fingerprint(self) -> list[tuple[str, Any]]:
        """Length, types, and the arrays and lists that the dataset holds."""
        held = [
            (f"attribute `{name}` of the PyDataset", digest(value))
            for name, value in sorted(vars(self._dataset).items())
            if isinstance(value, list | tuple)
            or (isinstance(value, np.ndarray) and value.ndim)
        ]
        return [
            ("number of batches", self._count()),
            ("shuffle", self._shuffle),
            *self._fingerprint_of_types(),
            *held,
        ]

    def _first_batches(self) -> list[Any]:
        count = self._count()
        looked_at = data_adapter_utils.NUM_BATCHES_FOR_TENSOR_SPEC
        if count is not None:
            looked_at = min(looked_at, count)
        return [
            self._keras._standardize_batch(self._dataset[index])
            for index in range(looked_at)
        ]

    def _own_batches(self) -> Iterator[Any]:
        dealt = _Dealt(self._dataset, self._indices(*self._begin_pass()))
        workers = self._dataset.workers
        if workers > 1 or (workers > 0 and self._dataset.use_multiprocessing):
            batches = _from_workers(dealt)
        else:
            batches = (dealt[index] for index in range(dealt.num_batches))
        # Closed here, not by whoever collects it: that would leave workers behind.
        with contextlib.closing(batches):
            for batch in batches:
                yield self._keras._standardize_batch(batch)

    @property
    def units(self) -> int | None:
        """Batches a pass; None for no end."""
        return self._count()

    def _indices(self, number: int, seen: int) -> Sequence[int]:
        """The batches of this rank in one pass, after the first ones of all ranks."""
        rank, size = self.part.rank, self.part.size
        count = self._count()
        if count is None:
            return range(seen + rank, _FOREVER, size)
        seed, *stream = self.part.seeds(self.seed)
        random = _order.generator(seed, number, *stream)
        order = _order.permutation(count, 1, self._shuffle, random)
        return [int(index) for index in order[seen:][rank::size]]

    def _prefetch(self, dataset: Any) -> Any:
        import tensorflow as tf

        workers = self._dataset.workers
        if workers > 1 or (workers > 0 and self._dataset.use_multiprocessing):
            # As in Keras: the workers prefetch already.
            options = tf.data.Options()
            options.threading.private_threadpool_size = 1
            return untuned(dataset.with_options(options))
        return work_ahead(dataset)

    @property
    def can_begin_again(self) -> bool:
        """Whether a pass that has begun can be gone through again in this process.

        What hooks have done to a dataset cannot be taken back.
        """
        kind = type(self._dataset)
        hooks = ("on_epoch_begin", "on_epoch_end")
        return all(getattr(kind, n) is getattr(PyDataset, n) for n in hooks)

    def on_epoch_begin(self) -> None:
        """Runs the dataset's hook, with the same random numbers on all ranks."""
        self._run_hook(self._dataset.on_epoch_begin)

    def on_epoch_end(self) -> None:
        """Runs the dataset's hook, with the same random numbers on all ranks."""
        self._run_hook(self._dataset.on_epoch_end)
        repeat, self._epochs_to_repeat = self._epochs_to_repeat, 0
        for _ in range(repeat):
            self._run_hook(self._dataset.on_epoch_begin)
            self._run_hook(self._dataset.on_epoch_end)

    def start_at(
        self, number: int, units: int, *, steps: int | None = None, epochs: int = 0
    ) -> int:
        """Lets the next pass go on where an earlier run left it.

        What the hooks of the dataset did in the epochs before is done again, when
        Keras calls the first one: before the first epoch there is one for the end.
        """
        self._epochs_to_repeat = epochs
        return super().start_at(number, units, steps=steps)

    def _run_hook(self, hook: Any) -> None:
        self._hooks += 1
        with same_on_all_ranks(self.seed, self._hooks):
            hook()


class _Dealt(PyDataset):
    """The batches of one rank in one pass, in the form that Keras' workers take."""

    def __init__(self, dataset: PyDataset, indices: Sequence[int]) -> None:
        super().__init__(
            workers=dataset.workers,
            use_multiprocessing=dataset.use_multiprocessing,
            max_queue_size=dataset.max_queue_size,
        )
        self.dataset = dataset
        self.indices = indices

    @property
    def num_batches(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.indices[index]]


def _from_workers(dealt: _Dealt) -> Generator[Any, None, None]:
    """The batches, made by threads or processes, in order."""
    if not dealt.num_batches:
        return
    enqueuer = OrderedEnqueuer(
        dealt,
        workers=dealt.workers,
        use_multiprocessing=dealt.use_multiprocessing,
        max_queue_size=dealt.max_queue_size,
        shuffle=False,
    )
    enqueuer.start()
    try:
        yield from itertools.islice(enqueuer.get(), dealt.num_batches)
    finally:
        enqueuer.stop()
