"""Photographs with labels, in TFRecords or in a folder for each class, by tf.data.

Each rank reads its own shard of the files. All examples are read once an epoch, by one
rank, in training and in evaluation.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import os
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

import distkeras
from distkeras.data import Part
from distkeras.data import ShardedData
from distkeras.recipes import _decoding
from distkeras.recipes._dealing import Dealing
from distkeras.recipes._dealing import Stage
from distkeras.recipes._image_files import Files
from distkeras.recipes._image_files import read

_BATCHES_AHEAD = 2


class ShardedImages(ShardedData):
    """This rank's part of the images, for `Trainer.fit` and `Trainer.evaluate`.

    Each rank reads its own shard of the files (of the examples, where ranks outnumber
    files), decodes in parallel, and crops and flips at random in training. Order,
    crops and flips follow from the seed and the number of the epoch alone. So an epoch
    that was interrupted goes on without reading what was seen, or at least without
    decoding it; and on another number of ranks what is left is dealt out anew.

    Args:
        files: of the split.
        batch_size: examples a batch.
        image_size: height and width.
        num_classes: how many there are.
        first_label: of the first class in TFRecords: 1 where TensorFlow's scripts
            wrote them.
        training: whether to train on them. If not, images come as they are listed,
            their middle cut out.
        seed: of all that is random.
        steps: of an evaluation, at most; None for all.
        rank: whose shard to read; by default this rank's.
        size: of how many.

    Example:
        >>> files = find(Path("imagenet"), "train")
        >>> data = ShardedImages(
        ...     files, batch_size=32, image_size=224, num_classes=1000, training=True
        ... )
        >>> trainer.fit(data, epochs=90)
    """

    kind = "image files"

    def __init__(
        self,
        files: Files,
        *,
        batch_size: int,
        image_size: int,
        num_classes: int,
        first_label: int = 1,
        training: bool,
        seed: int = 0,
        steps: int | None = None,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        part = Part(
            rank=distkeras.rank() if rank is None else rank,
            size=distkeras.size() if size is None else size,
        )
        super().__init__(part=part, training=training, seed=seed)
        self._files = files
        self._batch_size = batch_size
        self._image_size = image_size
        self._num_classes = num_classes
        self._first_label = 0 if files.counts is None else first_label
        self._limit = None if training else steps
        self._dealing = Dealing(files.count)
        # How the images of a pass that goes on were dealt before, see `Dealing`, and
        # how many this way of dealing has given each rank.
        self._before: list[Stage] = []
        self._taken = 0
        with tf.device("CPU:0"):  # where pipelines run
            self._numbers = tf.Variable([0] * len(_Number), dtype=tf.int64)

    # What Keras and the Trainer ask

    @property
    def batch_size(self) -> int:
        """Examples a batch."""
        return self._batch_size

    @property
    def num_examples(self) -> int:
        """Images of all ranks together."""
        return self._files.total

    @property
    def num_batches(self) -> int:
        """Steps a pass: of the rank with most in training, of this one otherwise."""
        if self.training:
            return max(self._steps_by_rank)
        return self.local_steps

    @property
    def local_steps(self) -> int:
        """Steps that this rank has images for; 1 if it has none."""
        steps = max(self._steps_by_rank[self.part.rank], 1)
        return steps if self._limit is None else min(steps, self._limit)

    @property
    def _steps_by_rank(self) -> list[int]:
        size = self.part.size
        counts = [self._files.count(rank, size) for rank in range(size)]
        return [math.ceil(count / self._batch_size) for count in counts]

    @property
    def may_be_empty(self) -> bool:
        """Whether a rank may have a step without examples; the same on all ranks."""
        steps = self._steps_by_rank
        return bool(self._start or self._going_on) or min(steps) < max(steps)

    def fingerprint(self) -> list[tuple[str, Any]]:
        """Which files, and what becomes of them."""
        return [
            ("files and their examples", self._files.digest),
            ("batch size", self._batch_size),
            ("image size", self._image_size),
            ("number of classes", self._num_classes),
        ]

    def _how(self) -> str:
        shared = self._files.counts is not None and not self._files.by_file(
            self.part.size
        )
        return "which share files" if shared else "each reads its own files"

    # A pass that goes on

    def deal_to(self, rank: int, size: int) -> None:
        """Takes the part of this rank of so many, before a pass begins."""
        self.part = dataclasses.replace(self.part, rank=rank, size=size)

    @property
    def units(self) -> int:
        """Images a pass."""
        return self._files.total

    @property
    def units_a_step(self) -> int:
        """Images a step of all ranks."""
        return self._batch_size * self.part.size

    def units_after(self, steps: int) -> int:
        """Images that so many steps of a pass have taken."""
        ranks, taken = range(self.part.size), self._taken_after(steps)
        before = self._before if self._start or self._going_on else []
        left = [self._dealing.count(before, r, self.part.size) - taken for r in ranks]
        return self._files.total - sum(max(count, 0) for count in left)

    def describe_pass(self, steps: int) -> dict[str, Any]:
        """How a pass was dealt until now, for a checkpoint."""
        before = self._before if self._start or self._going_on else []
        now = (self.part.size, self._taken_after(steps))
        return {"seed": self.seed, "dealt": [*before, now]}

    def recall_pass(self, described: dict[str, Any]) -> None:
        """Takes over how the pass that goes on was dealt."""
        if described["seed"] != self.seed:
            raise ValueError(
                f"Expected the seed with which the epoch began: {described['seed']}. "
                f"Received: {self.seed}"
            )
        *before, (size, taken) = (tuple(stage) for stage in described["dealt"])
        if size != self.part.size:
            before, taken = [*before, (size, taken)], 0
        self._before, self._taken = before, taken

    def start_at(
        self, number: int, units: int, *, steps: int | None = None, epochs: int = 0
    ) -> int:
        """Lets the next pass go on where one of an earlier run was left."""
        if units == 0:
            self._before, self._taken = [], 0
        size = self.part.size
        left = max(self._dealing.count(self._before, r, size) for r in range(size))
        todo = math.ceil(max(left - self._taken, 0) / self._batch_size)
        return super().start_at(number, units, steps=self.num_batches - todo)

    def _taken_after(self, steps: int) -> int:
        start = self._start or self._going_on
        if start is None:
            return steps * self._batch_size
        return self._taken + (steps - start.steps) * self._batch_size

    # The pipeline

    def on_epoch_begin(self) -> None:
        """Tells the pipeline which pass begins; it reads that with the first batch."""
        number, _ = self._begin_pass()
        start, before, taken = self._going_on, self._before, self._taken
        if start is None:
            before, taken = [], 0
        left = self._dealing.count(before, self.part.rank, self.part.size) - taken
        if self.training:
            done = 0 if start is None else start.steps
            padding = (
                self.num_batches - done - math.ceil(max(left, 0) / self.batch_size)
            )
        else:
            padding = left == 0
        seed = np.random.SeedSequence((self.seed, number)).generate_state(1, "uint64")
        numbers = {
            _Number.SEED: int(seed[0] >> 2),
            _Number.SKIPPED: taken,
            _Number.PADDING: int(padding),
            _Number.AS_BEFORE: -1 if before else 0,
            _Number.AS_EVER: 0 if before else -1,
        }
        self._numbers.assign([numbers[name] for name in _Number])

    def get_tf_dataset(self) -> tf.data.Dataset:
        """A dataset of this rank's batches; each iterator is a pass.

        Of float32 images `(batch, image_size, image_size, 3)`, about 0 with deviation
        1, and float32 labels `(batch, num_classes)`.
        """
        once = tf.data.Dataset.range(1)
        data = once.flat_map(lambda _: self._encoded())
        data = data.map(self._prepared, num_parallel_calls=_decoded_at_once())
        data = data.batch(self._batch_size)
        if self._limit is not None:
            data = data.take(self._limit)
        size, classes = self._image_size, self._num_classes
        none = tf.zeros((0, size, size, 3)), tf.zeros((0, classes))
        empty = tf.data.Dataset.from_tensors(none)
        padding = once.flat_map(lambda _: empty.repeat(self._numbers[_Number.PADDING]))
        data = data.concatenate(padding).prefetch(_BATCHES_AHEAD)
        # TensorFlow's tuning runs in a thread which an iterator that is left in the
        # middle of an epoch (a checkpoint at a signal) waits for, up to a minute.
        options = tf.data.Options()
        options.autotune.enabled = False
        return data.with_options(options)

    def get_numpy_iterator(self) -> Iterator[Any]:
        """This rank's batches of one pass, as NumPy arrays."""
        return TFDatasetAdapter(self.get_tf_dataset()).get_numpy_iterator()

    def get_jax_iterator(self) -> Iterator[Any]:
        """This rank's batches of one pass, in a form that JAX takes."""
        return TFDatasetAdapter(self.get_tf_dataset()).get_jax_iterator()

    def get_torch_dataloader(self) -> Any:
        """A torch `DataLoader` of this rank's batches; each iterator is a pass."""
        return TFDatasetAdapter(self.get_tf_dataset()).get_torch_dataloader()

    def _encoded(self) -> tf.data.Dataset:
        """Encoded images, labels and random numbers of the pass that begins."""
        rank, size = self.part.rank, self.part.size
        data = self._dealt([], rank, size).take(self._numbers[_Number.AS_EVER])
        if self._before:
            rest = self._dealt(self._before, rank, size)
            data = rest.take(self._numbers[_Number.AS_BEFORE]).concatenate(data)
        return data.skip(self._numbers[_Number.SKIPPED])

    def _dealt(self, before: Sequence[Stage], rank: int, size: int) -> tf.data.Dataset:
        if not before:
            return self._shard(rank, size)
        *earlier, (old_size, _) = before
        data = self._shard(rank, size).take(0)
        for old_rank, start, count in self._dealing.pieces(before, rank, size):
            piece = self._dealt(earlier, old_rank, old_size).skip(start).take(count)
            data = data.concatenate(piece)
        return data

    def _shard(self, rank: int, size: int) -> tf.data.Dataset:
        """What a rank of so many reads in a whole pass."""
        seed = self._numbers[_Number.SEED] + size * 2**16 + rank
        data = read(self._files, rank, size, seed if self.training else None)
        # An image has its own random numbers, whoever decodes it, and when.
        return data.enumerate().map(
            lambda number, example: (*example, tf.stack([seed, number]))
        )

    def _prepared(self, contents: Any, label: Any, numbers: Any) -> tuple[Any, Any]:
        return _decoding.prepared(
            contents,
            label - self._first_label,
            numbers,
            image_size=self._image_size,
            num_classes=self._num_classes,
            training=self.training,
        )


def _decoded_at_once() -> int:
    """Returns this rank's share of the node's cores, which decoding needs most of."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        cores = os.cpu_count() or 1
    return max(cores // distkeras.local_size(), 2)


class _Number(enum.IntEnum):
    """Places of the numbers that tell the pipeline which pass begins."""

    SEED = 0
    SKIPPED = 1  # images, encoded
    PADDING = 2  # batches without images at the end
    AS_BEFORE = 3  # images that go on being dealt, -1 for all
    AS_EVER = 4  # the same of a whole pass


def synthetic(
    count: int, *, batch_size: int, image_size: int, num_classes: int, seed: int = 0
) -> tf.data.Dataset:
    """Returns this rank's batches of `count` examples: one batch of noise, repeated.

    Nothing is read or decoded: to time training alone.
    """
    rank, size = distkeras.rank(), distkeras.size()
    batches = -(-len(range(rank, count, size)) // batch_size)
    random = np.random.default_rng((seed, rank))
    shape = (batch_size, image_size, image_size, 3)
    x = random.normal(size=shape).astype("float32")
    y = random.integers(num_classes, size=batch_size)
    batch = tf.constant(x), tf.one_hot(y, num_classes)
    return tf.data.Dataset.from_tensors(batch).repeat(batches)
