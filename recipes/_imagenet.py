"""Photographs with labels, in TFRecords or in a folder for each class, by tf.data.

Each rank reads its own shard of the files. All examples are read once an epoch, by one
rank, in training and in evaluation.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import math
import os
import struct
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

import distkeras
from distkeras import communicators
from distkeras.data import Part
from distkeras.data import ShardedData
from distkeras.recipes._data import DataError
from distkeras.recipes._dealing import Dealing
from distkeras.recipes._dealing import Stage

# Of ImageNet, by channel.
_MEAN = (123.675, 116.28, 103.53)
_DEVIATION = (58.395, 57.12, 57.375)

_SPLITS = {"train": ("train",), "val": ("validation", "val")}
_SUFFIXES = (".jpeg", ".jpg", ".png")
_READ_AT_ONCE = 16
_SHUFFLED = 4096  # encoded images in memory, about 0.5 GB of ImageNet


@dataclasses.dataclass(frozen=True)
class Files:
    """Where the examples of one split are, the same on all ranks.

    Attributes:
        paths: of TFRecords, or of images.
        labels: of each image, from 0; None for TFRecords, which hold them.
        classes: their names, by label; None for TFRecords.
        counts: examples in each file of TFRecords; None for images.
    """

    paths: list[str]
    labels: list[int] | None = None
    classes: list[str] | None = None
    counts: list[int] | None = None

    @property
    def total(self) -> int:
        """Examples in all files."""
        return len(self.paths) if self.counts is None else sum(self.counts)

    @functools.cached_property
    def digest(self) -> str:
        """The same for the same files."""
        text = repr((self.paths, self.labels, self.counts))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def by_file(self, size: int) -> bool:
        """Whether there is a file at least for each of so many ranks."""
        return len(self.paths) >= size

    def count(self, rank: int, size: int) -> int:
        """Examples that a rank of so many reads in a pass."""
        if self.counts is not None and self.by_file(size):
            return sum(self.counts[rank::size])
        return len(range(rank, self.total, size))


def find(folder: Path, split: str) -> Files:
    """Returns the files of a split. Collective: rank 0 looks, all count examples.

    Args:
        folder: with `train-*` and `validation-*`, TFRecords as TensorFlow's ImageNet
            scripts write them (in `folder` itself, or in `train` and `validation` in
            it); or with `train` and `val`, in which each class has a folder of images.
        split: `"train"` or `"val"`.

    Raises:
        distkeras.CommunicatorError: on every rank, if there are none, or if one is cut
            short.
    """
    world = communicators.world()

    def looking_for_images() -> Files | None:
        return _find(folder.absolute(), split) if world.rank == 0 else None

    found = communicators.collectively(world, looking_for_images)
    files: Files = world.broadcast_object(found)
    if files.labels is not None:
        return files

    def counting_examples() -> list[int]:
        return [count_records(path) for path in files.paths[world.rank :: world.size]]

    parts = world.allgather_object(communicators.collectively(world, counting_examples))
    counts = [
        parts[number % world.size][number // world.size]
        for number in range(len(files.paths))
    ]
    return dataclasses.replace(files, counts=counts)


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
        data = data.map(self._prepared, num_parallel_calls=tf.data.AUTOTUNE)
        data = data.batch(self._batch_size)
        if self._limit is not None:
            data = data.take(self._limit)
        size, classes = self._image_size, self._num_classes
        none = tf.zeros((0, size, size, 3)), tf.zeros((0, classes))
        empty = tf.data.Dataset.from_tensors(none)
        padding = once.flat_map(lambda _: empty.repeat(self._numbers[_Number.PADDING]))
        return data.concatenate(padding).prefetch(tf.data.AUTOTUNE)

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
        read = _images if self._files.counts is None else _records
        data = read(self._files, rank, size, seed if self.training else None)
        # An image has its own random numbers, whoever decodes it, and when.
        return data.enumerate().map(
            lambda number, example: (*example, tf.stack([seed, number]))
        )

    def _prepared(self, contents: Any, label: Any, numbers: Any) -> tuple[Any, Any]:
        size = self._image_size
        if self.training:
            window = _random_window(contents, numbers)
        else:
            window = _middle(contents, size)
        image = tf.image.resize(_cut(contents, window), (size, size))
        if self.training:
            image = tf.image.stateless_random_flip_left_right(image, numbers)
        label = _checked(label - self._first_label, self._num_classes)
        image = (image - _MEAN) / tf.constant(_DEVIATION)
        image = tf.ensure_shape(image, (size, size, 3))
        return image, tf.one_hot(label, self._num_classes)


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


def count_records(path: str | os.PathLike[str]) -> int:
    """Counts the examples of a TFRecord file by its lengths; it reads no contents.

    Raises:
        DataError: if the file is cut short.
    """
    count, end = 0, os.path.getsize(path)
    with open(path, "rb") as file:
        while (at := file.tell()) < end:
            head = file.read(12)
            # Length, its checksum, the contents, their checksum.
            after = at + 16 + struct.unpack("<Q", head[:8])[0] if len(head) == 12 else 0
            if not at < after <= end:
                raise DataError(f"Expected whole TFRecords. {path} ends within one.")
            file.seek(after)
            count += 1
    return count


# Finding and reading


def _find(folder: Path, split: str) -> Files:
    for name in _SPLITS[split]:
        for place in (folder, folder / name):
            records = sorted(map(str, place.glob(f"{name}-*")))
            if records:
                return Files(records)
        if (folder / name).is_dir():
            return _find_images(folder / name, _classes(folder / "train"))
    names = " or ".join(_SPLITS[split])
    raise DataError(
        f"Expected TFRecords {names}-* in {folder}, or a folder {names} with a folder "
        "of images for each class. There is neither."
    )


def _classes(folder: Path) -> list[str]:
    """Names the classes, in the order of their labels: that of their names."""
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())


def _find_images(folder: Path, classes: list[str]) -> Files:
    others = sorted(set(_classes(folder)) - set(classes))
    if others:
        raise DataError(
            f"Expected the folders in {folder} to be those of the training images. "
            f"There are others: {', '.join(others[:5])}"
        )
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        if not (folder / name).is_dir():
            continue
        images = (entry.path for entry in os.scandir(folder / name))
        of_class = sorted(p for p in images if p.lower().endswith(_SUFFIXES))
        paths += of_class
        labels += [label] * len(of_class)
    if not paths:
        raise DataError(
            f"Expected images ({', '.join(_SUFFIXES)}) in the folders of {folder}. "
            "There are none."
        )
    return Files(paths, labels, classes)


def _images(files: Files, rank: int, size: int, seed: Any) -> tf.data.Dataset:
    paths = _held(files.paths[rank::size], tf.string)
    labels = _held((files.labels or [])[rank::size], tf.int64)
    data = tf.data.Dataset.from_tensor_slices((paths, labels))
    if seed is not None:
        data = _shuffled(data, max(files.count(rank, size), 1), seed)
    return data.map(
        lambda path, label: (tf.io.read_file(path), label),
        num_parallel_calls=tf.data.AUTOTUNE,
    )


def _records(files: Files, rank: int, size: int, seed: Any) -> tf.data.Dataset:
    by_file = files.by_file(size)
    paths = files.paths[rank::size] if by_file else files.paths
    data = tf.data.Dataset.from_tensor_slices(_held(paths, tf.string))
    # Where ranks share files, they read them in the same order, always.
    if seed is not None and by_file:
        data = _shuffled(data, len(paths), seed)
    data = data.interleave(
        tf.data.TFRecordDataset,
        cycle_length=_READ_AT_ONCE,
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=True,
    )
    if not by_file:
        data = data.shard(size, rank)
    count = files.count(rank, size)
    data = data.apply(tf.data.experimental.assert_cardinality(count))
    if seed is not None:
        data = _shuffled(data, _SHUFFLED, seed)
    return data.map(_parsed, num_parallel_calls=tf.data.AUTOTUNE)


def _shuffled(data: tf.data.Dataset, count: int, seed: Any) -> tf.data.Dataset:
    """Shuffles by this seed alone, within a function of a pipeline."""
    graph = tf.compat.v1.get_default_graph()
    before, graph.seed = graph.seed, 1  # of the program: it would be added
    try:
        return data.shuffle(count, seed, reshuffle_each_iteration=False)
    finally:
        graph.seed = before


def _held(values: Sequence[Any], dtype: tf.DType) -> tf.Tensor:
    """Makes a tensor that a pipeline refers to, rather than one within its graph."""
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.constant(values, dtype)


def _parsed(record: Any) -> tuple[Any, Any]:
    features = {
        "image/encoded": tf.io.FixedLenFeature((), tf.string),
        "image/class/label": tf.io.FixedLenFeature((), tf.int64),
    }
    example = tf.io.parse_single_example(record, features)
    return example["image/encoded"], example["image/class/label"]


def _checked(label: Any, num_classes: int) -> Any:
    # A label out of range would be a row of zeros, and no error.
    inside = tf.logical_and(label >= 0, label < num_classes)
    check = tf.debugging.Assert(
        inside,
        [
            f"Expected a label from 0 to {num_classes - 1}. Received:",
            label,
            "Set --classes and, for TFRecords, --first-label.",
        ],
    )
    with tf.control_dependencies([check]):
        return tf.identity(label)


# Images


def _if_jpeg(contents: Any, yes: Callable[[], Any], no: Callable[[Any], Any]) -> Any:
    """JPEGs are decoded in part. Among ImageNet's files is a PNG."""

    def other() -> Any:
        return no(tf.io.decode_image(contents, channels=3, expand_animations=False))

    return tf.cond(tf.io.is_jpeg(contents), yes, other)


def _shape(contents: Any) -> Any:
    return _if_jpeg(contents, lambda: tf.io.extract_jpeg_shape(contents), tf.shape)


def _cut(contents: Any, window: Any) -> Any:
    """Decodes the part of an image in a window: top, left, height, width."""

    def cut(image: Any) -> Any:
        top, left, height, width = tf.unstack(window)
        return image[top : top + height, left : left + width]

    return _if_jpeg(
        contents, lambda: tf.io.decode_and_crop_jpeg(contents, window, channels=3), cut
    )


def _random_window(contents: Any, numbers: Any) -> Any:
    """Draws a window of 8 to 100 % of the image, from 3:4 to 4:3.

    As Szegedy et al. 2014 (arXiv:1409.4842, section 6) and Goyal et al. 2017.
    """
    begin, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
        _shape(contents),
        bounding_boxes=tf.zeros((0, 0, 4)),
        seed=numbers,
        min_object_covered=0.0,
        aspect_ratio_range=(3 / 4, 4 / 3),
        area_range=(0.08, 1.0),
        max_attempts=10,
        use_image_if_no_bounding_boxes=True,
    )
    return tf.concat([begin[:2], extent[:2]], 0)


def _middle(contents: Any, image_size: int) -> Any:
    """The window whose resizing is the middle of the image resized by 256/224."""
    height, width = tf.unstack(_shape(contents)[:2])
    side = tf.minimum(height, width)
    side = tf.cast(tf.round(tf.cast(side, tf.float32) * (224 / 256)), tf.int32)
    return tf.stack([(height - side) // 2, (width - side) // 2, side, side])
