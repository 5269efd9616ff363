"""Photographs in files: each read once, by one rank; windows; whole trainings."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from numpy.testing import assert_allclose
from numpy.testing import assert_array_equal

import distkeras
from distkeras import communicators
from distkeras.recipes import _imagenet
from distkeras.recipes import _samples
from distkeras.recipes import resnet_imagenet

pytestmark = pytest.mark.tensorflow

FORMS = ("tfrecords", "folders")
SIZE = 16


class Seen(keras.metrics.Metric):
    """How often the label seen least was seen, and the one seen most."""

    def __init__(self, classes: int) -> None:
        super().__init__(name="seen")
        self.counts = self.add_variable((classes,), "zeros", name="counts")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.counts.assign_add(keras.ops.sum(y_true, 0))

    def result(self) -> dict[str, Any]:
        counts = self.counts.value
        return {"least": keras.ops.min(counts), "most": keras.ops.max(counts)}


def make_numbered(folder: Path, form: str, split: str) -> None:
    """Writes a split of the samples in which no two images have the same label."""
    examples = [
        (contents, number)
        for number, (contents, _) in enumerate(_samples.images(split))
    ]
    folder.mkdir(parents=True, exist_ok=True)
    if form == "tfrecords":
        _samples._write_records(folder, split, examples)
        return
    for contents, number in examples:
        path = folder / split / f"{number:03}" / "a.JPEG"
        path.parent.mkdir(parents=True)
        path.write_bytes(contents)


def read(files: _imagenet.Files, *, training: bool, **more: Any) -> tf.data.Dataset:
    """Reads numbered images."""
    options = {"batch_size": 8, "image_size": SIZE, "num_classes": 121, **more}
    return _imagenet.load(files, training=training, **options)


def numbers_of(data: tf.data.Dataset) -> list[int]:
    """Goes through the data and returns the labels."""
    return [int(number) for _, y in data for number in np.argmax(y, -1)]


@pytest.fixture(params=FORMS)
def numbered(
    request: pytest.FixtureRequest,
    world: communicators.Communicator,
    tmp_path_shared: Path,
) -> Path:
    """A folder of images whose labels are their numbers: 121 and 37."""
    folder = tmp_path_shared / request.param
    if world.rank == 0:
        for split in _samples.COUNTS:
            make_numbered(folder, request.param, split)
    world.barrier()
    return folder


# Which rank reads what


def test_each_image_is_seen_once_an_epoch(
    world: communicators.Communicator, numbered: Path
) -> None:
    for split, count in _samples.COUNTS.items():
        files = _imagenet.find(numbered, split)
        data = read(files, training=split == "train", num_classes=count)
        model = keras.Sequential(
            [
                keras.Input((SIZE, SIZE, 3)),
                keras.layers.GlobalAveragePooling2D(),
                keras.layers.Dense(count),
            ]
        )
        trainer = distkeras.Trainer(model, seed=1)
        loss = keras.losses.CategoricalCrossentropy(from_logits=True)
        trainer.compile(keras.optimizers.SGD(0.01), loss, metrics=[Seen(count)])
        options = {"shard": False, "verbose": 0}
        history = trainer.fit(data, epochs=2, shuffle=False, **options).history
        assert history["least"] == history["most"] == [1, 1]
        logs = trainer.evaluate(data, return_dict=True, **options)
        assert logs["least"] == logs["most"] == 1


def test_evaluation_is_that_of_one_process(
    world: communicators.Communicator, numbered: Path
) -> None:
    files = _imagenet.find(numbered, "val")
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((SIZE, SIZE, 3)),
            keras.layers.Flatten(),
            keras.layers.Dense(121),
        ]
    )
    top_5 = keras.metrics.TopKCategoricalAccuracy(5, "top_5")
    trainer = distkeras.Trainer(model)
    trainer.compile("sgd", "mse", metrics=["accuracy", top_5])
    logs = trainer.evaluate(
        read(files, training=False), shard=False, verbose=0, return_dict=True
    )
    alone = model.evaluate(
        read(files, training=False, rank=0, size=1), verbose=0, return_dict=True
    )
    assert logs == pytest.approx(alone, rel=1e-5)
    assert all(theirs == logs for theirs in world.allgather_object(logs))


# 5 files: with 7 ranks each file is read by several.
@pytest.mark.parametrize("size", [3, 7])
@pytest.mark.parametrize("form", FORMS)
def test_ranks_share_the_images(tmp_path: Path, form: str, size: int) -> None:
    make_numbered(tmp_path, form, "train")
    files = _imagenet._find(tmp_path, "train")
    parts = []
    for rank in range(size):
        data = read(files, training=True, rank=rank, size=size)
        parts.append([numbers_of(data) for _ in range(2)])
        assert int(data.cardinality()) == -(-len(parts[-1][0]) // 8)
    assert sorted(n for first, _ in parts for n in first) == list(range(121))
    for first, second in parts:
        assert sorted(first) == sorted(second)
        assert first != second


@pytest.mark.parametrize("form", FORMS)
def test_images_depend_on_the_seed_alone(tmp_path: Path, form: str) -> None:
    make_numbered(tmp_path, form, "train")
    files = _imagenet._find(tmp_path, "train")

    def first(**more: Any) -> tuple[np.ndarray, np.ndarray]:
        data = read(files, training=True, rank=0, size=1, **more)
        return next(iter(data.as_numpy_iterator()))

    (x, y), again, other = first(seed=1), first(seed=1), first(seed=2)
    assert_array_equal(x, again[0])
    assert_array_equal(y, again[1])
    assert not np.array_equal(y, other[1])


# Images


def encoded(image: np.ndarray, form: str) -> Any:
    encode = tf.io.encode_png if form == "png" else tf.io.encode_jpeg
    return encode(image)


@pytest.mark.parametrize("form", ["jpeg", "png"])
def test_the_middle_is_what_is_left_of_256_pixels(form: str) -> None:
    image = np.zeros((256, 320, 3), "uint8")
    image[16:-16, 48:-48] = 200
    contents = encoded(image, form)
    window = _imagenet._middle(contents, 224)
    assert window.numpy().tolist() == [16, 48, 224, 224]
    middle = _imagenet._cut(contents, window).numpy()
    assert middle.shape == (224, 224, 3)
    assert middle[8:-8, 8:-8].min() > 190
    assert _imagenet._middle(encoded(image[:, :64], form), 9).numpy().tolist() == [
        *(100, 4, 56, 56)
    ]


def test_random_windows_have_the_published_sizes() -> None:
    contents = encoded(np.zeros((100, 200, 3), "uint8"), "jpeg")
    windows = np.array(
        [
            _imagenet._random_window(contents, tf.constant([3, number])).numpy()
            for number in range(200)
        ]
    )
    top, left, height, width = windows.T
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + height <= 100).all()
    assert (left + width <= 200).all()
    area = height * width / 20_000
    assert 0.07 < area.min() < 0.12
    # 3:4 to 4:3 leaves two thirds of so wide an image at most.
    assert 0.55 < area.max() < 0.68
    ratio = width / height
    assert 0.7 < ratio.min() < 0.85
    assert 1.2 < ratio.max() < 1.4


def test_images_are_normalized(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    mean = np.round(_imagenet._MEAN).astype("uint8")
    image = np.broadcast_to(mean, (64, 64, 3))
    path.write_bytes(encoded(image, "png").numpy())
    files = _imagenet.Files([str(path)], [2], ["a", "b", "c"])
    (x, y), *more = read(files, training=False, rank=0, size=1, num_classes=3)
    assert not more
    assert x.shape == (1, SIZE, SIZE, 3)
    assert_allclose(x, 0, atol=0.01)
    assert y.numpy().tolist() == [[0, 0, 1]]


# What can be wrong


def test_missing_images_are_said_on_every_rank(tmp_path: Path) -> None:
    with pytest.raises(distkeras.CommunicatorError, match=r"Expected TFRecords train-"):
        _imagenet.find(tmp_path, "train")


def test_classes_that_were_not_trained_are_named(tmp_path: Path) -> None:
    for folder in ("train/cat", "val/cat", "val/dog"):
        (tmp_path / folder).mkdir(parents=True)
    with pytest.raises(distkeras.CommunicatorError, match="There are others: dog"):
        _imagenet.find(tmp_path, "val")


def test_files_that_were_cut_short_are_named(tmp_path: Path) -> None:
    make_numbered(tmp_path, "tfrecords", "val")
    path = tmp_path / "validation-00000-of-00002"
    contents = path.read_bytes()
    assert _imagenet.count_records(path) == 24
    for cut in (1, 5, len(contents) - 5):
        path.write_bytes(contents[:-cut])
        with pytest.raises(_imagenet.DataError, match=f"{path.name} ends within one"):
            _imagenet.count_records(path)


@pytest.mark.parametrize("more", [{"num_classes": 3}, {"first_label": 2}])
def test_labels_out_of_range_are_an_error(tmp_path: Path, more: dict[str, int]) -> None:
    make_numbered(tmp_path, "tfrecords", "val")
    files = _imagenet.Files([str(tmp_path / "validation-00000-of-00002")])
    data = read(files, training=False, rank=0, size=1, **more)
    with pytest.raises(tf.errors.InvalidArgumentError, match="Expected a label from 0"):
        numbers_of(data)


# Options


def test_defaults_depend_on_data_and_optimizer() -> None:
    samples = resnet_imagenet.parse([])
    assert (samples.depth, samples.schedule) == (18, "cosine")
    words = ["--data", "imagenet", "--data-dir", "x"]
    goyal = resnet_imagenet.parse(words)
    assert (goyal.depth, goyal.epochs, goyal.warmup_epochs) == (50, 90, 5)
    assert (goyal.learning_rate, goyal.schedule) == (0.1, "steps")
    lars = resnet_imagenet.parse([*words, "--optimizer", "lars"])
    assert (lars.learning_rate, lars.schedule) == (0.25, "poly")


def test_imagenet_needs_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        resnet_imagenet.parse(["--data", "imagenet"])
    assert "needs --data-dir FOLDER" in capsys.readouterr().err
