"""Images that the recipes train on: packaged, downloaded, from a folder, or made up."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

from distkeras import communicators

CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
CIFAR100_URL = "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz"
_CIFAR10_FOLDER = "cifar-10-batches-py"
_CIFAR10_FILES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
_CIFAR100_FOLDER = "cifar-100-python"
_CIFAR100_FILES = ("train", "test")


class DataError(Exception):
    """The images cannot be had; says what to install, or what to put where."""


@dataclasses.dataclass(frozen=True)
class Images:
    """Images and labels, split once and for all.

    Attributes:
        x_train: float32 `(examples, height, width, channels)`; over all training
            images each channel has mean 0 and standard deviation 1.
        y_train: int64 `(examples,)`, classes from 0.
        x_val: like `x_train`, normalized by the same numbers.
        y_val: like `y_train`.
        num_classes: number of classes.
    """

    x_train: np.ndarray
    y_train: np.ndarray
    x_val: np.ndarray
    y_val: np.ndarray
    num_classes: int = 10


def load(name: str, folder: Path | None = None) -> Images:
    """Returns the images of a name, the same on every rank. Collective.

    Args:
        name: `"digits"`: the 1797 real 8x8 images that scikit-learn ships, a fifth of
            them for validation. `"cifar10"`: 50000 and 10000 photographs of 32x32,
            from `folder` or downloaded by Keras; the test set is for validation, as
            in He et al. `"synthetic"`: 2048 and 512 made images of 32x32.
        folder: where the python version of CIFAR was unpacked.

    Returns:
        The images.

    Raises:
        distkeras.CommunicatorError: on every rank, if one cannot have the images.
            It says which and why, and what to install or to download.
        ValueError: if there is no such name.

    Example:
        >>> load("digits").x_train.shape
        (1437, 8, 8, 1)
    """
    if name not in LOADERS:
        raise ValueError(
            f"Expected the data to be one of {', '.join(LOADERS)}. Received: {name!r}"
        )
    world = communicators.world()
    held: list[Images] = []

    def loading_the_images(turn: bool) -> None:
        if turn:
            held.append(LOADERS[name](folder))

    # One rank of each node first: if there is something to download, only it does.
    first = world.local_rank == 0
    communicators.collectively(world, loading_the_images, first)
    communicators.collectively(world, loading_the_images, not first)
    return held[0]


def digits(folder: Path | None = None) -> Images:
    """Optical recognition of handwritten digits (UCI; E. Alpaydin, C. Kaynak 1998)."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            "The digits come with scikit-learn, which is not installed: "
            "pip install scikit-learn. Or use --data synthetic."
        ) from error
    bunch = load_digits()
    x, y = bunch.images[..., np.newaxis], bunch.target
    order = np.random.default_rng(0).permutation(len(x))
    val, train = np.split(order, [len(x) // 5 + 1])
    return _normalized(x[train], y[train], x[val], y[val])


def cifar10(folder: Path | None = None) -> Images:
    """CIFAR-10 (A. Krizhevsky 2009)."""
    if folder is not None:
        x_train, y_train, x_val, y_val = _read_cifar(
            *(folder, _CIFAR10_FOLDER, _CIFAR10_FILES), CIFAR10_URL, b"labels"
        )
        return _normalized(x_train, y_train, x_val, y_val)
    return _download(keras.datasets.cifar10, CIFAR10_URL, _CIFAR10_FOLDER, classes=10)


def cifar100(folder: Path | None = None) -> Images:
    """CIFAR-100 with its fine labels (A. Krizhevsky 2009)."""
    if folder is not None:
        x_train, y_train, x_val, y_val = _read_cifar(
            *(folder, _CIFAR100_FOLDER, _CIFAR100_FILES), CIFAR100_URL, b"fine_labels"
        )
        return _normalized(x_train, y_train, x_val, y_val, num_classes=100)
    return _download(
        keras.datasets.cifar100, CIFAR100_URL, _CIFAR100_FOLDER, classes=100
    )


def _download(module: Any, url: str, inside: str, *, classes: int) -> Images:
    try:
        (x_train, y_train), (x_val, y_val) = module.load_data()
    except Exception as error:
        raise DataError(
            f"CIFAR-{classes} could not be downloaded ({error}). Download {url} "
            "where there is a network, unpack it, and say --data-dir FOLDER, the "
            f"folder that holds {inside}."
        ) from error
    return _normalized(x_train, y_train, x_val, y_val, num_classes=classes)


def synthetic(folder: Path | None = None) -> Images:
    """Noise around one random image a class: to time training, not to judge it."""
    random = np.random.default_rng(0)
    prototypes = random.normal(size=(10, 32, 32, 3))
    y = random.integers(10, size=2048 + 512)
    x = prototypes[y] + 4 * random.normal(size=(len(y), 32, 32, 3))
    return _normalized(x[:2048], y[:2048], x[2048:], y[2048:])


LOADERS: dict[str, Callable[[Path | None], Images]] = {
    "digits": digits,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "synthetic": synthetic,
}


class Augmented(keras.utils.PyDataset):
    """Batches of images, moved and mirrored at random, in another order each epoch.

    As He et al. 2015 (arXiv:1512.03385, section 4.2) train on CIFAR: images are
    padded with zeros, a crop of the old size is taken, and half of them are flipped
    from left to right.

    Args:
        x: images, `(examples, height, width, channels)`.
        y: targets, one an image.
        batch_size: images a batch.
        padding: by how many pixels an image moves at most, in each direction.
        seed: of all random numbers.
    """

    def __init__(
        self,
        x: np.ndarray,
        y: np.ndarray,
        batch_size: int,
        *,
        padding: int = 4,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.x = x
        self.y = y
        self._batch_size = batch_size
        self._padding = padding
        self._seed = seed
        self._epoch = -1
        self.on_epoch_begin()

    def on_epoch_begin(self) -> None:
        """Draws the order of the next epoch."""
        self._epoch += 1
        random = np.random.default_rng((self._seed, self._epoch))
        self._order = random.permutation(len(self.x))

    def __len__(self) -> int:
        return -(-len(self.x) // self._batch_size)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = self._order[index * self._batch_size :][: self._batch_size]
        # By epoch and batch: the same whichever rank makes the batch, and when.
        random = np.random.default_rng((self._seed, self._epoch, index))
        return crop_and_flip(self.x[rows], self._padding, random), self.y[rows]


def crop_and_flip(
    x: np.ndarray, padding: int, random: np.random.Generator
) -> np.ndarray:
    """Pads each image with zeros, crops it to its size and flips half of them.

    Args:
        x: images, `(examples, height, width, channels)`.
        padding: pixels added on each side.
        random: decides where to crop and what to flip, for each image.

    Returns:
        New images of the same shape and dtype.
    """
    count, height, width, _ = x.shape
    margins = ((0, 0), (padding, padding), (padding, padding), (0, 0))
    padded = np.pad(x, margins)
    top, left = random.integers(2 * padding + 1, size=(2, count, 1))
    rows = top + np.arange(height)
    columns = left + np.arange(width)
    flip = random.random(count) < 0.5
    columns[flip] = columns[flip, ::-1]
    example = np.arange(count)[:, np.newaxis, np.newaxis]
    return padded[example, rows[:, :, np.newaxis], columns[:, np.newaxis, :]]


def _normalized(
    x_train: Any, y_train: Any, x_val: Any, y_val: Any, *, num_classes: int = 10
) -> Images:
    x_train = np.asarray(x_train, "float32")
    mean = x_train.mean((0, 1, 2))
    deviation = x_train.std((0, 1, 2))
    x_train -= mean
    x_train /= deviation
    return Images(
        x_train=x_train,
        y_train=np.asarray(y_train, "int64").reshape(-1),
        x_val=(np.asarray(x_val, "float32") - mean) / deviation,
        y_val=np.asarray(y_val, "int64").reshape(-1),
        num_classes=num_classes,
    )


def _read_cifar(
    folder: Path, inside: str, names: tuple[str, ...], url: str, labels: bytes
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Reads the python version of CIFAR as its authors publish it."""
    if (folder / inside).is_dir():
        folder = folder / inside
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise DataError(
            f"Expected the files {', '.join(names)} in {folder}. Missing: "
            f"{', '.join(missing)}. Download {url} and unpack it there."
        )
    batches = [_read_batch(folder / name, labels) for name in names]
    x_train = np.concatenate([x for x, _ in batches[:-1]])
    y_train = np.concatenate([y for _, y in batches[:-1]])
    return x_train, y_train, *batches[-1]


def _read_batch(path: Path, labels: bytes) -> tuple[np.ndarray, np.ndarray]:
    with path.open("rb") as file:
        batch = pickle.load(file, encoding="bytes")
    x = np.asarray(batch[b"data"], "uint8").reshape(-1, 3, 32, 32)
    return x.transpose(0, 2, 3, 1), np.asarray(batch[labels], "int64")
