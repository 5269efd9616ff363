"""A small set of photographs in files, made of images that scikit-learn ships.

So that what reads ImageNet can be tried without it: eight classes, cut out of two
photographs and drawn from handwritten digits; JPEGs of several sizes, one PNG.
"""

from __future__ import annotations

import importlib.resources
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from distkeras import communicators
from distkeras.recipes._data import DataError

CLASSES = ("china", "flower", *(f"digit_{number}" for number in range(6)))
COUNTS = {"train": 121, "val": 37}  # divided by neither 2 nor 3
_FILES = {"train": ("train", 5), "val": ("validation", 2)}


def make(folder: Path, form: str, *, seed: int = 0) -> None:
    """Writes the images, unless they are there. Collective: rank 0 writes.

    Args:
        folder: that all ranks see.
        form: `"tfrecords"`: `train-*` and `validation-*`, labels from 1, as
            TensorFlow's scripts write ImageNet; `"folders"`: `train` and `val`, in
            which each class has a folder.
        seed: of what is cut out.

    Raises:
        distkeras.CommunicatorError: on every rank, if scikit-learn is missing.
    """
    world = communicators.world()

    def making_images() -> None:
        done = folder / "done"
        if world.rank == 0 and not done.exists():
            folder.mkdir(parents=True, exist_ok=True)
            for split in COUNTS:
                write = _write_records if form == "tfrecords" else _write_folders
                write(folder, split, images(split, seed=seed))
            done.touch()

    communicators.collectively(world, making_images)


def images(split: str, *, seed: int = 0) -> list[tuple[bytes, int]]:
    """Returns encoded images and their labels, from 0.

    Photographs are split by place: the right part of each is for validation.
    """
    try:
        from sklearn.datasets import load_digits

        shipped = importlib.resources.files("sklearn.datasets.images")
    except ImportError as error:
        raise DataError(
            "The images come with scikit-learn, which is not installed: "
            "pip install scikit-learn. Or use --data synthetic."
        ) from error
    photographs = [
        tf.io.decode_jpeg((shipped / f"{name}.jpg").read_bytes()).numpy()
        for name in CLASSES[:2]
    ]
    digits = load_digits()
    random = np.random.default_rng((seed, len(split)))
    made: list[tuple[bytes, int]] = []
    for number in range(COUNTS[split]):
        label = number % len(CLASSES)
        if label < 2:
            image = _piece(photographs[label], split, random)
        else:
            rows = np.flatnonzero(digits.target == label - 2)
            chosen = rows[number if split == "train" else -1 - number]
            image = _enlarged(digits.images[chosen])
        encode = tf.io.encode_png if number == 3 else tf.io.encode_jpeg
        made.append((encode(image).numpy(), label))
    return made


def _piece(photograph: np.ndarray, split: str, random: np.random.Generator) -> Any:
    height, width = random.integers(60, 150, size=2)
    edge = 420  # of 640 columns
    first, last = (0, edge - width) if split == "train" else (edge, 640 - width)
    top = random.integers(photograph.shape[0] - height)
    left = random.integers(first, last)
    return photograph[top : top + height, left : left + width]


def _enlarged(digit: np.ndarray) -> np.ndarray:
    image = (digit * (255 / 16)).astype("uint8")
    return np.kron(image, np.ones((10, 10), "uint8"))[..., np.newaxis].repeat(3, -1)


def _write_records(folder: Path, split: str, examples: list[tuple[bytes, int]]) -> None:
    name, count = _FILES[split]
    # Files of different lengths: the first is the longest.
    ends = np.cumsum(np.arange(count, 0, -1))
    ends = ends * len(examples) // ends[-1]
    for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        path = folder / f"{name}-{number:05}-of-{count:05}"
        with tf.io.TFRecordWriter(str(path)) as writer:
            for contents, label in examples[start:end]:
                feature = {
                    "image/encoded": tf.train.Feature(
                        bytes_list=tf.train.BytesList(value=[contents])
                    ),
                    "image/class/label": tf.train.Feature(
                        int64_list=tf.train.Int64List(value=[label + 1])
                    ),
                }
                features = tf.train.Features(feature=feature)
                writer.write(tf.train.Example(features=features).SerializeToString())


def _write_folders(folder: Path, split: str, examples: list[tuple[bytes, int]]) -> None:
    for number, (contents, label) in enumerate(examples):
        path = folder / split / CLASSES[label] / f"{number:04}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents)
