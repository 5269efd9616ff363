"""Files of photographs with labels: found, counted, and read as they are by tf.data.

TFRecords, or a folder for each class.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from distkeras import communicators
from distkeras.recipes._data import DataError

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


def read(files: Files, rank: int, size: int, seed: Any) -> tf.data.Dataset:
    """Returns what a rank of so many reads in a whole pass, encoded images and labels.

    Args:
        files: of the split.
        rank: whose shard to read.
        size: of how many.
        seed: of the order; None for that in which they are listed.
    """
    if files.counts is None:
        return _images(files, rank, size, seed)
    return _records(files, rank, size, seed)


# Finding


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


# Reading


def _images(files: Files, rank: int, size: int, seed: Any) -> tf.data.Dataset:
    paths = _held(files.paths[rank::size], tf.string)
    labels = _held((files.labels or [])[rank::size], tf.int64)
    data = tf.data.Dataset.from_tensor_slices((paths, labels))
    if seed is not None:
        data = _shuffled(data, max(files.count(rank, size), 1), seed)
    return data.map(
        lambda path, label: (tf.io.read_file(path), label),
        num_parallel_calls=_READ_AT_ONCE,
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
        num_parallel_calls=_READ_AT_ONCE,
        deterministic=True,
    )
    if not by_file:
        data = data.shard(size, rank)
    count = files.count(rank, size)
    data = data.apply(tf.data.experimental.assert_cardinality(count))
    if seed is not None:
        data = _shuffled(data, _SHUFFLED, seed)
    return data.map(_parsed)


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
