"""Photographs with labels, in TFRecords or in a folder for each class, by tf.data.

Each rank reads its own shard of the files. All examples are read once an epoch, by one
rank, in training and in evaluation: pass the data with `shard=False`.
"""

from __future__ import annotations

import dataclasses
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import distkeras
from distkeras import communicators
from distkeras.recipes._data import DataError

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
    """

    paths: list[str]
    labels: list[int] | None = None
    classes: list[str] | None = None


def find(folder: Path, split: str) -> Files:
    """Returns the files of a split. Collective: rank 0 looks, for all.

    Args:
        folder: with `train-*` and `validation-*`, TFRecords as TensorFlow's ImageNet
            scripts write them (in `folder` itself, or in `train` and `validation` in
            it); or with `train` and `val`, in which each class has a folder of images.
        split: `"train"` or `"val"`.

    Raises:
        distkeras.CommunicatorError: on every rank, if there are none.
    """
    world = communicators.world()
    found: list[Files] = []

    def looking_for_images() -> None:
        if world.rank == 0:
            found.append(_find(folder.absolute(), split))

    communicators.collectively(world, looking_for_images)
    return world.broadcast_object(found[0] if found else None)


def load(
    files: Files,
    *,
    batch_size: int,
    image_size: int,
    num_classes: int,
    first_label: int = 1,
    training: bool,
    seed: int = 0,
    rank: int | None = None,
    size: int | None = None,
) -> tf.data.Dataset:
    """Returns this rank's batches of images and one-hot labels.

    In training, images are cropped and flipped at random and come in another order
    each epoch. In evaluation they come as they are listed, their middle cut out.

    Args:
        files: of the split.
        batch_size: examples a batch.
        image_size: height and width.
        num_classes: how many there are.
        first_label: of the first class in TFRecords: 1 where TensorFlow's scripts
            wrote them.
        training: whether to train on them.
        seed: of all that is random.
        rank: whose shard to read; by default this rank's.
        size: of how many.

    Returns:
        A dataset that knows its number of batches, of float32 images `(batch,
        image_size, image_size, 3)`, about 0 with deviation 1, and float32 labels
        `(batch, num_classes)`.
    """
    rank = distkeras.rank() if rank is None else rank
    size = distkeras.size() if size is None else size
    # Differs by rank, or all would crop alike.
    own_seed = int(np.random.SeedSequence((seed, rank)).generate_state(1)[0])
    read = _records if files.labels is None else _images
    data = read(files, rank, size, own_seed if training else None)
    if training:
        random = tf.data.Dataset.random(own_seed, rerandomize_each_iteration=True)
        data = tf.data.Dataset.zip(data, random.batch(2, drop_remainder=True))
    first = first_label if files.labels is None else 0

    def prepare(example: Any, numbers: Any = None) -> tuple[Any, Any]:
        contents, label = example
        if numbers is None:
            window = _middle(contents, image_size)
        else:
            window = _random_window(contents, numbers)
        image = tf.image.resize(_cut(contents, window), (image_size, image_size))
        if numbers is not None:
            image = tf.image.stateless_random_flip_left_right(image, numbers)
        label = _checked(label - first, num_classes)
        image = (image - _MEAN) / tf.constant(_DEVIATION)
        image = tf.ensure_shape(image, (image_size, image_size, 3))
        return image, tf.one_hot(label, num_classes)

    if not training:
        data = data.map(lambda *example: (example,))
    data = data.map(prepare, num_parallel_calls=tf.data.AUTOTUNE)
    return data.batch(batch_size).prefetch(tf.data.AUTOTUNE)


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


def _images(files: Files, rank: int, size: int, seed: int | None) -> tf.data.Dataset:
    paths = np.asarray(files.paths, dtype=object)[rank::size]
    labels = np.asarray(files.labels, "int64")[rank::size]
    data = tf.data.Dataset.from_tensor_slices((tf.constant(paths, tf.string), labels))
    if seed is not None:
        data = data.shuffle(max(len(paths), 1), seed)
    return data.map(
        lambda path, label: (tf.io.read_file(path), label),
        num_parallel_calls=tf.data.AUTOTUNE,
    )


def _records(files: Files, rank: int, size: int, seed: int | None) -> tf.data.Dataset:
    by_file = len(files.paths) >= size
    paths = files.paths[rank::size] if by_file else files.paths
    count = sum(map(count_records, paths))
    data = tf.data.Dataset.from_tensor_slices(paths)
    # Where ranks share files, they read them in the same order, always.
    if seed is not None and by_file:
        data = data.shuffle(len(paths), seed)
    data = data.interleave(
        tf.data.TFRecordDataset,
        cycle_length=_READ_AT_ONCE,
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=True,
    )
    if not by_file:
        data = data.shard(size, rank)
        count = len(range(rank, count, size))
    data = data.apply(tf.data.experimental.assert_cardinality(count))
    if seed is not None:
        data = data.shuffle(_SHUFFLED, seed)
    return data.map(_parsed, num_parallel_calls=tf.data.AUTOTUNE)


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
