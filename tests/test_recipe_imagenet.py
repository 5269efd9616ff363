"""Photographs in files: each read once, by one rank; windows; whole trainings."""

import json
import logging
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from checkpoints import KillAt
from checkpoints import Killed
from checkpoints import assert_same_state
from numpy.testing import assert_allclose
from numpy.testing import assert_array_equal

import distkeras
from distkeras import _figures
from distkeras import communicators
from distkeras.callbacks import Checkpoint
from distkeras.data import ShardedData
from distkeras.data import shard
from distkeras.recipes import _decoding
from distkeras.recipes import _image_files
from distkeras.recipes import _imagenet
from distkeras.recipes import _samples
from distkeras.recipes import resnet_imagenet
from distkeras.recipes._dealing import Dealing

pytestmark = pytest.mark.tensorflow

FORMS = ("tfrecords", "folders")
SIZE = 16
CLASSES = 121


class Seen(keras.metrics.Metric):
    """How many images were seen, and how often the one that was seen most."""

    def __init__(self) -> None:
        super().__init__(name="seen")
        self.counts = self.add_variable((CLASSES,), "zeros", name="counts")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.counts.assign(self.counts + keras.ops.sum(y_true, 0))

    def result(self) -> dict[str, Any]:
        counts = self.counts.value
        return {
            "seen": keras.ops.sum(keras.ops.cast(counts > 0, "int32")),
            "most": keras.ops.max(counts),
        }


def make_numbered(folder: Path, form: str) -> None:
    """Writes the samples so that no two images of a split have the same label."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in _samples.COUNTS:
        examples = [
            (contents, number)
            for number, (contents, _) in enumerate(_samples.images(split))
        ]
        if form == "tfrecords":
            _samples._write_records(folder, split, examples)
            continue
        for contents, number in examples:
            path = folder / split / f"{number:03}" / "a.JPEG"
            path.parent.mkdir(parents=True)
            path.write_bytes(contents)


def read(
    files: _image_files.Files, *, training: bool = True, **more: Any
) -> _imagenet.ShardedImages:
    """Reads numbered images."""
    options = {
        "batch_size": 8,
        "image_size": SIZE,
        "num_classes": CLASSES,
        "first_label": 1,
        **more,
    }
    return _imagenet.ShardedImages(files, training=training, **options)


def numbers_of(data: _imagenet.ShardedImages) -> list[int]:
    """Goes through one pass of the data, and returns the labels; nothing is decoded."""
    data.on_epoch_begin()
    dataset = tf.data.Dataset.range(1).flat_map(lambda _: data._encoded())
    return [int(label) - data._first_label for _, label, _ in dataset]


def batches_of(data: _imagenet.ShardedImages) -> list[Any]:
    """Goes through one pass of the data, and returns its batches."""
    data.on_epoch_begin()
    return list(data.get_tf_dataset().as_numpy_iterator())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of images whose labels are their numbers, 121 and 37, by form."""
    # Not by the fixture `world`: most tests that use this one give the same anywhere.
    world = communicators.world()
    folder = world.broadcast_object(tmp_path_factory.mktemp("numbered"))
    if world.rank == 0:
        for form in FORMS:
            make_numbered(folder / form, form)
    world.barrier()
    return {form: folder / form for form in FORMS}


@pytest.fixture(scope="module")
def found(folders: dict[str, Path]) -> dict[tuple[str, str], _image_files.Files]:
    """Their files, by form and split."""
    return {
        (form, split): _image_files.find(folder, split)
        for form, folder in folders.items()
        for split in _samples.COUNTS
    }


Found = dict[tuple[str, str], _image_files.Files]


def build(**options: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = keras.layers
    inputs = keras.Input((SIZE, SIZE, 3))
    outputs = layers.Dense(CLASSES)(layers.Flatten()(inputs))
    model = keras.Model(inputs, outputs)
    model.compile(
        keras.optimizers.SGD(0.01, 0.9),
        keras.losses.CategoricalCrossentropy(from_logits=True),
        metrics=[Seen(), keras.metrics.TopKCategoricalAccuracy(5, "top_5")],
        **options,
    )
    return model


# Which rank reads what


@pytest.mark.timeout(300)
def test_each_image_is_seen_once_an_epoch(
    world: communicators.Communicator, found: Found
) -> None:
    """By real training; and an evaluation is that of one process."""
    if world.size == 2:
        pytest.skip("at 1 and 3 ranks it is the same, and takes long")
    model = build()
    trainer = distkeras.Trainer(model)
    for form in FORMS:
        train = read(found[form, "train"])
        val = read(found[form, "val"], training=False)
        history = trainer.fit(train, epochs=2, validation_data=val, verbose=0).history
        assert history["seen"] == [121, 121]
        assert history["val_seen"] == [37, 37]
        assert history["most"] == history["val_most"] == [1, 1]
    alone = read(found[form, "val"], training=False, rank=0, size=1)
    logs = model.evaluate(alone, verbose=0, return_dict=True)
    for name, value in logs.items():
        assert history[f"val_{name}"][-1] == pytest.approx(value, rel=1e-5)
    assert world.allgather_object(history) == [history] * world.size


# 5 files: with 7 ranks each file is read by several.
@pytest.mark.parametrize(("form", "size"), [("tfrecords", 7), ("folders", 3)])
def test_ranks_share_the_images(found: Found, form: str, size: int) -> None:
    files = found[form, "train"]
    first, second = [], []
    for rank in range(size):
        data = read(files, rank=rank, size=size)
        for epoch in (first, second):
            epoch.append(numbers_of(data))
    assert sorted(sum(first, [])) == list(range(121))
    for one, other in zip(first, second, strict=True):
        assert sorted(one) == sorted(other)
        assert one != other


@pytest.mark.parametrize("form", FORMS)
def test_iterators_left_in_the_middle_are_let_go_at_once(
    found: Found, form: str
) -> None:
    """See `test_data_ahead`."""
    data = read(found[form, "train"], rank=0, size=2)
    data.on_epoch_begin()
    dataset = data.get_tf_dataset()
    for _ in range(2):
        begin = time.monotonic()
        iterators = [iter(dataset) for _ in range(10)]
        for iterator in iterators:
            next(iterator)
        # A thread that tuned them would sleep until 2.55 s have passed.
        time.sleep(max(begin + 1.5 - time.monotonic(), 0))
        start = time.monotonic()
        iterators.clear()
        del iterator
        assert time.monotonic() - start < 0.7


def test_images_depend_on_seed_and_epoch_alone(found: Found) -> None:
    """Not on the seed of the program."""
    files = found["tfrecords", "train"]
    one, other, third = (read(files, rank=0, size=2, seed=seed) for seed in (1, 1, 2))
    for data in (one, other, third):
        data.set_epoch(4)
    tf.random.set_seed(0)
    batches = batches_of(one)
    tf.random.set_seed(1)
    for batch, again in zip(batches, batches_of(other), strict=True):
        assert_array_equal(batch[0], again[0])
        assert_array_equal(batch[1], again[1])
    assert not np.array_equal(batches[0][1], batches_of(third)[0][1])


@pytest.mark.parametrize("size", [1, 2, 5])
def test_what_is_left_is_dealt_evenly(size: int) -> None:
    """Whoever was there before: each example once, in the order in which it was."""
    counts = {3: [56, 41, 24], 2: [73, 48], 7: [18, 18, 17, 17, 17, 17, 17]}
    dealing = Dealing(lambda rank, size: counts[size][rank])
    for before in ([(3, 12)], [(7, 17)], [(2, 60)], [(2, 80)], [(3, 30), (2, 5)]):
        *earlier, (old, taken) = before
        seen = [
            (rank, number)
            for new in range(size)
            for rank, start, count in dealing.pieces(before, new, size)
            for number in range(start, start + count)
        ]
        assert seen == [
            (rank, number)
            for rank in range(old)
            for number in range(taken, dealing.count(earlier, rank, old))
        ]
        each = [dealing.count(before, new, size) for new in range(size)]
        assert max(each) - min(each) <= 1
        assert sum(each) == len(seen)


@pytest.mark.parametrize(
    ("form", "stages"),
    [
        ("tfrecords", [(3, 2), (2, 3), (1, 99)]),
        ("folders", [(2, 3), (1, 99)]),
        pytest.param(
            *("tfrecords", [(2, 2), (7, 1), (3, 2), (3, 1), (2, 99)]),
            marks=pytest.mark.soak,
        ),
    ],
)
def test_ranks_come_and_go_within_an_epoch(
    found: Found, form: str, stages: list[tuple[int, int]]
) -> None:
    seen: list[int] = []
    described = None
    for size, steps in stages:
        now: list[int] = []
        for rank in range(size):
            data = read(found[form, "train"], batch_size=5, rank=rank, size=size)
            data.set_epoch(4)
            done = 0
            if described is not None:
                data.recall_pass(json.loads(described))
                done = data.start_at(4, len(seen))
            now += numbers_of(data)[: 5 * steps]
        seen += now
        described = json.dumps(data.describe_pass(done + steps))
        assert data.units_after(done + steps) == len(seen)
    assert sorted(seen) == list(range(121))


# Going on


def train(
    files: _image_files.Files,
    *callbacks: Any,
    communicator: communicators.Communicator,
    **options: Any,
) -> tuple[keras.Model, Any]:
    """Trains two epochs on all ranks, or on one."""
    data = read(files, rank=communicator.rank, size=communicator.size)
    model = build(jit_compile=False)
    trainer = distkeras.Trainer(model, communicator=communicator)
    history = trainer.fit(
        data, epochs=2, callbacks=list(callbacks), verbose=0, **options
    )
    return model, history


@pytest.mark.dealt
@pytest.mark.timeout(300)
@pytest.mark.parametrize("form", FORMS)
def test_as_if_never_interrupted(
    world: communicators.Communicator,
    tmp_path_shared: Path,
    found: Found,
    form: str,
) -> None:
    """Bit for bit, within the second epoch."""
    files = found[form, "train"]
    whole = Checkpoint(tmp_path_shared / "whole")
    expected, history = train(files, whole, communicator=world)
    steps = read(files).num_batches
    interrupted = Checkpoint(tmp_path_shared / "interrupted", every_steps=1)
    with pytest.raises(Killed):
        train(files, interrupted, KillAt(steps + 2), communicator=world)
    rest = Checkpoint(tmp_path_shared / "interrupted")
    model, history_of_rest = train(files, rest, communicator=world, resume="auto")
    assert history_of_rest.history == {
        name: values[1:] for name, values in history.history.items()
    }
    assert_same_state(world, model, expected)


@pytest.mark.dealt
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("form", "more_ranks"),
    [
        ("tfrecords", True),
        pytest.param("tfrecords", False, marks=pytest.mark.soak),
        pytest.param("folders", True, marks=pytest.mark.soak),
        ("folders", False),
    ],
)
def test_another_number_of_ranks_goes_on(
    world: communicators.Communicator,
    tmp_path_shared: Path,
    found: Found,
    form: str,
    more_ranks: bool,
) -> None:
    """From one to all, or from all to one: an epoch has each image once."""
    files = found[form, "train"]

    def on(many: bool, *callbacks: Any, **options: Any) -> Any:
        if many:
            return train(files, *callbacks, communicator=world, **options)
        if world.rank == 0:
            alone = communicators.SingleCommunicator()
            return train(files, *callbacks, communicator=alone, **options)
        return None

    if not more_ranks or world.rank == 0:
        with pytest.raises(Killed):
            on(not more_ranks, Checkpoint(tmp_path_shared, every_steps=1), KillAt(2))
    world.barrier()
    trained = on(more_ranks, resume=tmp_path_shared)
    if trained is not None:
        history = trained[1].history
        assert history["seen"] == [121, 121]
        assert history["most"] == [1, 1]
    world.barrier()


LOSING = """
import json, os, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import distkeras, keras
from distkeras.recipes import _image_files
from test_recipe_imagenet import build, read

class Die(keras.callbacks.Callback):
    step = 0
    def on_train_batch_end(self, batch, logs=None):
        self.step += 1
        if self.step == read(files).num_batches + 2 and distkeras.size() == 3:
            if distkeras.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)

distkeras.init()
files = _image_files.find(Path(sys.argv[2]), "train")
val = read(_image_files.find(Path(sys.argv[2]), "val"), training=False)
trainer = distkeras.Trainer(build(jit_compile=False))
history = trainer.fit(
    read(files), epochs=3, validation_data=val, callbacks=[Die()], verbose=0
).history
if distkeras.rank() == 0:
    print(json.dumps([distkeras.size(), *(
        history[name] for name in ("seen", "most", "val_seen", "val_most")
    )]))
"""


@pytest.mark.launches
@pytest.mark.soak
@pytest.mark.timeout(180)
@pytest.mark.parametrize("form", FORMS)
def test_images_of_a_lost_rank_are_seen_by_the_others(
    folders: dict[str, Path], tmp_path: Path, form: str
) -> None:
    """In an elastic job, in the middle of the second of three epochs."""
    (tmp_path / "losing.py").write_text(LOSING)
    words = ["run", "--elastic", "-n", "3", "losing.py", Path(__file__).parent]
    answer = subprocess.run(
        [sys.executable, "-m", "distkeras", *map(str, words), str(folders[form])],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=170,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    said = json.loads(answer.stdout.strip().splitlines()[-1])
    assert said == [2, [121] * 3, [1] * 3, [37] * 3, [1] * 3], answer.stderr


def test_data_of_other_ranks_is_refused(world: communicators.Communicator) -> None:
    """Where it cannot be dealt anew."""

    class Fixed(_imagenet.ShardedImages):
        deal_to = ShardedData.deal_to

    data = Fixed(
        _image_files.Files(["a"], [0], ["b"]),
        **{"batch_size": 1, "image_size": 8, "num_classes": 1, "training": True},
        rank=world.rank,
        size=world.size + 1,
    )
    with pytest.raises(ValueError, match="Expected data for rank"):
        shard(data, communicator=world)


def test_another_seed_cannot_go_on(found: Found) -> None:
    files = found["folders", "train"]
    data = read(files, seed=2)
    with pytest.raises(ValueError, match="Expected the seed .*: 1. Received: 2"):
        data.recall_pass(read(files, seed=1).describe_pass(1))


@pytest.mark.dealt
def test_a_slow_pipeline_is_named(
    world: communicators.Communicator,
    found: Found,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """At the end of training, with how long was waited for it."""
    if world.size == 1:
        pytest.skip("at one rank the step is Keras' own")

    def sleep(image: np.ndarray) -> np.ndarray:
        time.sleep(0.02)
        return image

    fast = _decoding.cut
    monkeypatch.setattr(_figures, "_LONG_ENOUGH", 0.1)
    monkeypatch.setattr(
        _decoding,
        "cut",
        lambda *args: tf.ensure_shape(
            tf.numpy_function(sleep, [fast(*args)], tf.uint8), (None, None, 3)
        ),
    )
    logger = logging.getLogger("distkeras")
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level(logging.INFO, logger="distkeras"):
        train(found["folders", "train"], communicator=world)
    if world.rank == 0:
        (line,) = re.findall(
            r"trained for .*data wait [\d.]+ ms \((\d+)%\)", caplog.text
        )
        assert int(line) > 20
        assert "The input pipeline is slower than the training step" in caplog.text


# Images


def encoded(image: np.ndarray, form: str) -> Any:
    encode = tf.io.encode_png if form == "png" else tf.io.encode_jpeg
    return encode(image)


@pytest.mark.parametrize("form", ["jpeg", "png"])
def test_the_middle_is_what_is_left_of_256_pixels(form: str) -> None:
    image = np.zeros((256, 320, 3), "uint8")
    image[16:-16, 48:-48] = 200
    contents = encoded(image, form)
    window = _decoding.middle(contents)
    assert window.numpy().tolist() == [16, 48, 224, 224]
    middle = _decoding.cut(contents, window).numpy()
    assert middle.shape == (224, 224, 3)
    assert middle[8:-8, 8:-8].min() > 190
    assert _decoding.middle(encoded(image[:, :64], form)).numpy().tolist() == [
        *(100, 4, 56, 56)
    ]


def test_random_windows_have_the_published_sizes() -> None:
    contents = encoded(np.zeros((100, 200, 3), "uint8"), "jpeg")
    windows = np.array(
        [
            _decoding.random_window(contents, tf.constant([3, number])).numpy()
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
    mean = np.round(_decoding.MEAN).astype("uint8")
    image = np.broadcast_to(mean, (64, 64, 3))
    path.write_bytes(encoded(image, "png").numpy())
    files = _image_files.Files([str(path)], [2], ["a", "b", "c"])
    data = read(files, training=False, rank=0, size=1, num_classes=3)
    ((x, y),) = batches_of(data)
    assert x.shape == (1, SIZE, SIZE, 3)
    assert_allclose(x, 0, atol=0.01)
    assert y.tolist() == [[0, 0, 1]]


# What can be wrong


def test_missing_images_are_said_on_every_rank(tmp_path: Path) -> None:
    with pytest.raises(distkeras.CommunicatorError, match=r"Expected TFRecords train-"):
        _image_files.find(tmp_path, "train")


def test_classes_that_were_not_trained_are_named(tmp_path: Path) -> None:
    for folder in ("train/cat", "val/cat", "val/dog"):
        (tmp_path / folder).mkdir(parents=True)
    with pytest.raises(distkeras.CommunicatorError, match="There are others: dog"):
        _image_files.find(tmp_path, "val")


def test_files_that_were_cut_short_are_named(
    world: communicators.Communicator, folders: dict[str, Path], tmp_path_shared: Path
) -> None:
    name = "validation-00001-of-00002"
    contents = (folders["tfrecords"] / name).read_bytes()
    path = tmp_path_shared / name
    if world.rank == 0:
        path.with_name(name.replace("1", "0", 1)).write_bytes(contents)
    for cut in (1, 5, len(contents) - 5):
        world.barrier()
        if world.rank == 0:
            path.write_bytes(contents[:-cut])
        world.barrier()
        with pytest.raises(distkeras.CommunicatorError, match=f"{name} ends within"):
            _image_files.find(tmp_path_shared, "val")


@pytest.mark.parametrize("more", [{"num_classes": 3}, {"first_label": 2}])
def test_labels_out_of_range_are_an_error(found: Found, more: dict[str, int]) -> None:
    files = found["tfrecords", "val"]
    data = read(files, training=False, rank=0, size=1, **more)
    with pytest.raises(tf.errors.InvalidArgumentError, match="Expected a label from 0"):
        batches_of(data)


# Options


def test_defaults_depend_on_data_and_optimizer() -> None:
    samples = resnet_imagenet.parse([])
    assert (samples.depth, samples.schedule) == (10, "cosine")
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
