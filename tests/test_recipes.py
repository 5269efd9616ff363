"""The recipes: their images, then whole runs with the files that they leave."""

import csv
import io
import json
import math
import os
import pickle
import re
import shlex
import statistics
import struct
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from checkpoints import KillAt
from checkpoints import Killed
from numpy.testing import assert_array_equal

import distkeras
from distkeras import communicators
from distkeras.callbacks import Checkpoint
from distkeras.recipes import _data
from distkeras.recipes import _options
from distkeras.recipes import _samples
from distkeras.recipes import _training
from distkeras.recipes import evidence
from distkeras.recipes import resnet
from distkeras.recipes import resnet_imagenet

RESULT = re.compile(
    r"^ResNet-\d+ on (?P<data>\w+), ranks: (?P<ranks>\d+), "
    r"val_accuracy: (?P<accuracy>[\d.]+) in epoch (?P<epoch>\d+) of (?P<epochs>\d+), "
    r"time: (?P<seconds>[\d.]+) s, samples/s: (?P<speed>\d+), "
    r"best model: (?P<model>\S+)$",
    re.MULTILINE,
)

# Images


def test_digits_are_split_and_normalized_alike_everywhere(
    world: communicators.Communicator,
) -> None:
    images = _data.load("digits")
    assert images.x_train.shape == (1437, 8, 8, 1)
    assert images.x_val.shape == (360, 8, 8, 1)
    assert images.x_train.dtype == images.x_val.dtype == np.float32
    assert abs(images.x_train.mean()) < 1e-5
    assert abs(images.x_train.std() - 1) < 1e-5
    assert 0.9 < images.x_val.std() < 1.1
    for y in (images.y_train, images.y_val):
        assert set(y) == set(range(images.num_classes))
    sums = world.allgather_object([float(images.x_val.sum()), *images.y_val])
    assert all(theirs == sums[0] for theirs in sums)


def test_no_digit_is_in_both_parts() -> None:
    images = _data.load("digits")
    train = {image.tobytes() for image in images.x_train}
    val = {image.tobytes() for image in images.x_val}
    assert len(train) == 1437
    assert not train & val


def test_synthetic_images_are_the_same_each_time() -> None:
    first, second = _data.load("synthetic"), _data.load("synthetic")
    assert first.x_train.shape == (2048, 32, 32, 3)
    assert_array_equal(first.x_train, second.x_train)
    assert_array_equal(first.y_val, second.y_val)


class Python2Pickler(pickle._Pickler):
    """Pickles strings as Python 2 did: such are in the files of CIFAR."""

    dispatch = dict(pickle._Pickler.dispatch)

    def save_string(self, text: bytes | str) -> None:
        text = text.encode() if isinstance(text, str) else text
        if len(text) < 256:
            self.write(pickle.SHORT_BINSTRING + bytes([len(text)]) + text)
        else:
            self.write(pickle.BINSTRING + struct.pack("<i", len(text)) + text)

    dispatch[bytes] = dispatch[str] = save_string


def write_batch(path: Path, batch: dict[str, Any]) -> None:
    """Writes a file as those of CIFAR's python version are."""
    file = io.BytesIO()
    Python2Pickler(file, protocol=2).dump(batch)
    old_name = file.getvalue().replace(
        b"numpy._core.multiarray", b"numpy.core.multiarray"
    )
    path.write_bytes(old_name)


def write_cifar100(folder: Path, count: int = 20) -> None:
    """Writes files in the format of CIFAR-100's python version."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(3)
    for name, number in (("train", count), ("test", 5)):
        batch = {
            "filenames": [f"{index}.png" for index in range(number)],
            "batch_label": f"{name}ing batch 1 of 1",
            "fine_labels": [99, *(label % 100 for label in range(1, number))],
            "coarse_labels": [0] * number,
            "data": random.integers(256, size=(number, 3072), dtype="uint8"),
        }
        write_batch(folder / name, batch)


@pytest.mark.parametrize("inside", ["", "cifar-100-python"])
def test_cifar100_is_read_from_a_folder(tmp_path: Path, inside: str) -> None:
    write_cifar100(tmp_path / "data" / inside)
    images = _data.load("cifar100", tmp_path / "data")
    assert images.x_train.shape == (20, 32, 32, 3)
    assert list(images.y_val) == [99, 1, 2, 3, 4]
    assert images.num_classes == 100


def write_cifar10(folder: Path, count: int = 20) -> None:
    """Writes files in the format of CIFAR-10's python version."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(3)
    for name in _data._CIFAR10_FILES:
        batch = {
            "batch_label": name,
            "labels": [int(label) for label in np.arange(count) % 10],
            "data": random.integers(256, size=(count, 3072), dtype="uint8"),
            "filenames": [f"{index}.png" for index in range(count)],
        }
        write_batch(folder / name, batch)


@pytest.mark.parametrize("inside", ["", "cifar-10-batches-py"])
def test_cifar10_is_read_from_a_folder(
    world: communicators.Communicator, tmp_path_shared: Path, inside: str
) -> None:
    if world.rank == 0:
        write_cifar10(tmp_path_shared / "data" / inside)
    world.barrier()
    images = _data.load("cifar10", tmp_path_shared / "data")
    assert images.x_train.shape == (100, 32, 32, 3)
    assert images.x_val.shape == (20, 32, 32, 3)
    assert list(images.y_val) == [*range(10)] * 2
    # Each channel on its own; rows of a file are red, green, blue planes.
    assert np.abs(images.x_train.mean((0, 1, 2))).max() < 1e-5
    path = tmp_path_shared / "data" / inside / "data_batch_1"
    row = pickle.loads(path.read_bytes(), encoding="bytes")[b"data"][7]
    green = row[1024:2048].reshape(32, 32)
    assert np.corrcoef(green.ravel(), images.x_train[7, :, :, 1].ravel())[0, 1] > 0.9999


def test_missing_files_are_named_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "data_batch_1").touch()
    with pytest.raises(
        distkeras.CommunicatorError,
        match=r"rank 0: DataError: (?s:.*)Missing: data_batch_2, .*test_batch\. "
        r"Download https://.* and unpack",
    ):
        _data.load("cifar10", tmp_path)


def test_without_scikit_learn_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(distkeras.CommunicatorError, match=r"pip install scikit-learn"):
        _data.load("digits")


def test_unknown_data_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"one of digits, cifar10, cifar100, synthetic.*'mnist'"
    ):
        _data.load("mnist")


# Augmentation


def test_crops_are_windows_of_the_padded_image() -> None:
    x = np.random.default_rng(0).normal(size=(40, 5, 7, 2)).astype("float32")
    made = _data.crop_and_flip(x, 2, np.random.default_rng(1))
    assert made.shape == x.shape
    assert made.dtype == x.dtype
    seen = set()
    for before, after in zip(x, made, strict=True):
        padded = np.pad(before, ((2, 2), (2, 2), (0, 0)))
        found = [
            (top, left, flip)
            for top in range(5)
            for left in range(5)
            for flip in (False, True)
            if np.array_equal(
                padded[top : top + 5, left : left + 7][:, :: -1 if flip else 1], after
            )
        ]
        assert len(found) == 1
        seen.update(found)
    assert len(seen) > 20
    assert {flip for _, _, flip in seen} == {False, True}


def test_augmented_batches_hold_each_image_once_an_epoch() -> None:
    x = np.arange(10, dtype="float32").reshape(10, 1, 1, 1)
    data = _data.Augmented(x, np.arange(10), 4, padding=0, seed=5)
    orders = []
    for _ in range(2):
        batches = [data[index] for index in range(len(data))]
        assert [len(y) for _, y in batches] == [4, 4, 2]
        for images, y in batches:
            assert_array_equal(images[:, 0, 0, 0], y)
        orders.append(np.concatenate([y for _, y in batches]))
        data.on_epoch_begin()
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(10))
    assert list(orders[0]) != list(orders[1])


def test_augmented_batches_do_not_depend_on_who_makes_them() -> None:
    x = np.random.default_rng(0).normal(size=(12, 8, 8, 1)).astype("float32")
    one, other = (_data.Augmented(x, np.arange(12), 4, seed=5) for _ in range(2))
    assert_array_equal(one[2][0], [other[index][0] for index in (0, 2)][1])
    third = _data.Augmented(x, np.arange(12), 4, seed=6)
    assert not np.array_equal(one[2][0], third[2][0])


# Options


def test_defaults_depend_on_the_data() -> None:
    digits = resnet.parse([])
    assert (digits.data, digits.epochs, digits.augment) == ("digits", 15, False)
    cifar10 = resnet.parse(["--data", "cifar10", "--epochs", "3"])
    assert (cifar10.epochs, cifar10.batch_size, cifar10.augment) == (3, 128, True)
    plain = resnet.parse(["--data", "cifar10", "--no-augment", "--warmup-epochs", "0"])
    assert (plain.augment, plain.warmup_epochs) == (False, 0)


@pytest.mark.parametrize("words", [["--depth", "21"], ["--steps", "0"]])
def test_options_without_meaning_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        resnet.parse(words)


def test_schedules_fall_as_the_papers_have_it() -> None:
    steps = _training.schedule("steps", 0.1, 64_000)
    cosine = _training.schedule("cosine", 0.1, 64_000)
    poly = _training.schedule("poly", 0.1, 64_000)
    at = [0, 32_000, 32_001, 48_000, 48_001, 64_000]
    rates = [float(steps(step)) for step in at]
    np.testing.assert_allclose(rates, [0.1, 0.1, 0.01, 0.01, 1e-3, 1e-3], rtol=1e-6)
    rates = [float(cosine(step)) for step in (0, 32_000, 64_000)]
    np.testing.assert_allclose(rates, [0.1, 0.05, 0], rtol=1e-6, atol=1e-9)
    rates = [float(poly(step)) for step in (0, 32_000, 64_000)]
    np.testing.assert_allclose(rates, [0.1, 0.025, 0], rtol=1e-6, atol=1e-9)


def test_flags_win_over_the_file_and_the_file_over_the_defaults(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.toml"
    path.write_text('data = "cifar10"\nepochs = 3\nbatch-size = 8\naugment = false\n')
    args = resnet.parse(["--config", str(path), "--epochs", "4"])
    assert (args.data, args.epochs, args.batch_size) == ("cifar10", 4, 8)
    assert (args.augment, args.schedule) == (False, "steps")


def test_a_written_configuration_runs_the_same_again(tmp_path: Path) -> None:
    words = ["--data", "cifar10", "--ema", "0.99", "--output", str(tmp_path / 'a "b"')]
    args = resnet.parse(words)
    _options.write_config(args, global_batch_size=7)
    if distkeras.rank() == 0:
        path = args.output / "config.toml"
        assert path.read_text().startswith(f"# ranks: {distkeras.size()}, global bat")
        again = resnet.parse(["--config", str(path)])
        assert vars(again) == {**vars(args), "config": path}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("epoch = 3", "no such option: epoch = 3"),
        ("epochs = 0", "expected a number from 1 up"),
        ('precision = "half"', "invalid choice: 'half'"),
        ("[training]\nepochs = 3", "no such option: training"),
        ("epochs", "cannot read --config"),
    ],
)
def test_what_is_wrong_in_a_file_of_options_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    path = tmp_path / "a.toml"
    path.write_text(text)
    with pytest.raises(SystemExit, match="2"):
        resnet.parse(["--config", str(path)])
    assert said in capsys.readouterr().err


# Evidence


def test_the_table_takes_its_place_in_a_page() -> None:
    row = evidence.Row("scaled", 2, 16, ("--warmup-epochs", "0"))
    outcome = evidence.Outcome(
        [0.9, 0.8, 0.7], [1.0, 2.0, 3.0], [1.0, 2.0, 6.0], [2000.0] * 3
    )
    text = evidence.table({row: outcome})
    command = "distkeras run -n 2 -m distkeras.recipes.resnet --depth 8"
    assert text.splitlines()[2] == (
        "| scaled | 2 | 32 | 0.1 | 0.8000 ± 0.1000 | 2.0000 ± 1.0000 | 3 | 2 | "
        f"`{command} --batch-size 16 --warmup-epochs 0` |"
    )
    page = f"a\n{evidence.BEGIN}\nold\n{evidence.END}\nb\n"
    assert evidence.replaced(page, text) == page.replace("old", text)
    with pytest.raises(ValueError, match="Expected a page with"):
        evidence.replaced("a", text)


def test_runs_are_compared_in_noise() -> None:
    outcomes = {
        row: evidence.Outcome(
            [row.ranks / 10, 0.5, 0.6],
            [1.0] * 3,
            [1.0] * 3,
            [3000.0 if row.what == evidence.COMPRESSED else 6000.0] * 3,
        )
        for row in evidence.ROWS
    }
    # Means of 0.1, 0.5, 0.6 and of 0.4, 0.5, 0.6; at two ranks of 0.2, 0.5, 0.6.
    said = evidence.comparison(outcomes)
    assert "by 0.1000 at most; the standard deviation of one process is 0.2646." in said
    assert "Compressed to 50% of the bytes" in said
    assert "by 0.0000 at most; the standard deviation without is 0.2082." in said


def as_good(mean: float, expected: float, deviation: float) -> bool:
    """Whether a mean accuracy is within noise of another.

    That is one standard deviation of the other or, where its three runs happen to
    agree by more than that, one image of the 360 that are validated.
    """
    return abs(mean - expected) <= max(deviation, 1 / 360)


def test_recorded_accuracies_are_within_noise() -> None:
    """Those of scaled training, in the README: within one standard deviation."""
    page = (Path(evidence.__file__).parent / "README.md").read_text()
    found = re.findall(
        r"^\| ([^|]+) \| (\d) \| .* \| (0\.\d+) ± (0\.\d+) \| [\d.]+ ± [\d.]+ "
        r"\| \d+ \| (\d+) \| ",
        page,
        re.MULTILINE,
    )
    rows = [(what, int(ranks), *map(float, others)) for what, ranks, *others in found]
    assert [row[:2] for row in rows] == [(row.what, row.ranks) for row in evidence.ROWS]
    (alone,) = (row for row in rows if row[1] == 1)
    scaled = {row[1]: row for row in rows if row[0] == evidence.SCALED}
    assert set(scaled) == {2, 4}
    for _, _, mean, *_ in scaled.values():
        assert abs(mean - alone[2]) <= alone[3]
    compressed = [row for row in rows if row[0] == evidence.COMPRESSED]
    assert len(compressed) == 3
    *_, expected, deviation, sent = scaled[2]
    for *_, mean, _, half in compressed:
        assert as_good(mean, expected, deviation)
        assert half == pytest.approx(sent / 2, abs=1)


@pytest.mark.launches
@pytest.mark.soak
@pytest.mark.tensorflow
@pytest.mark.timeout(1800)
def test_scaled_training_is_as_good_as_that_of_one_process(tmp_path: Path) -> None:
    """Three seeds each: `python -m pytest -m soak tests/test_recipes.py -k as_good`."""
    means, deviations = {}, {}
    for row in evidence.ROWS:
        if row.ranks == 1 or row.what == evidence.SCALED:
            runs = [evidence.run(row, seed, tmp_path, []) for seed in range(3)]
            accuracies = [accuracy for accuracy, *_ in runs]
            means[row.ranks] = statistics.mean(accuracies)
            deviations[row.ranks] = statistics.stdev(accuracies)
    assert set(means) == {1, 2, 4}
    for ranks in (2, 4):
        assert abs(means[ranks] - means[1]) <= deviations[1], (means, deviations)


@pytest.mark.launches
@pytest.mark.soak
@pytest.mark.tensorflow
@pytest.mark.timeout(1800)
def test_compressed_training_is_as_good_as_exact_training(tmp_path: Path) -> None:
    """Three seeds each: `python -m pytest -m soak tests/test_recipes.py -k as_good`."""
    runs = {
        row.options: [evidence.run(row, seed, tmp_path, []) for seed in range(3)]
        for row in evidence.ROWS
        if row.ranks == 2 and row.what in (evidence.SCALED, evidence.COMPRESSED)
    }
    assert len(runs) == 4
    exact, _, _, sent = zip(*runs.pop(()), strict=True)
    for options, outcomes in runs.items():
        accuracies, _, _, half = zip(*outcomes, strict=True)
        mean, expected = statistics.mean(accuracies), statistics.mean(exact)
        assert as_good(mean, expected, statistics.stdev(exact)), (options, accuracies)
        assert sum(half) == pytest.approx(sum(sent) / 2, rel=0.01)


# Whole runs, in this process and those of its job


@pytest.fixture
def folder(
    world: communicators.Communicator,
    tmp_path_shared: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Path]:
    """The working directory of all ranks; the recipe's settings are undone."""
    monkeypatch.chdir(tmp_path_shared)
    yield tmp_path_shared
    keras.config.set_dtype_policy("float32")
    world.barrier()  # before the folder is removed


def rows_of(folder: Path) -> list[dict[str, str]]:
    """Reads the history that a run has left."""
    with (folder / "history.csv").open(newline="") as file:
        return list(csv.DictReader(file))


# Each of the flags at least once, in few runs.
FLAGS: dict[str, tuple[Any, str]] = {
    "bfloat16, augmented": (
        resnet,
        "--data cifar10 --data-dir data --depth 8 --precision mixed_bfloat16 "
        "--schedule steps --batch-size 4",
    ),
    "float16, moving average": (
        resnet,
        "--data synthetic --depth 8 --precision mixed_float16 --ema 0.9 --scaling "
        "sqrt --label-smoothing 0.2 --weight-decay 0.001 --warmup-epochs 0.0 "
        "--batch-size 4",
    ),
    "LARS, bfloat16, moving average": (
        resnet_imagenet,
        "--optimizer lars --depth 10 --image-size 32 --precision mixed_bfloat16 "
        "--ema 0.9 --files folders --scaling none --jit-compile off --schedule poly "
        "--compression bfloat16",
    ),
    "XLA": (resnet, "--depth 8 --jit-compile on"),
}


def flags_take_effect(folder: Path, what: str) -> None:
    """Runs a recipe for two steps, on all ranks of this job, and looks at its files."""
    recipe, text = FLAGS[what]
    words = shlex.split(text)
    recipe.main([*words, "--steps", "2", "--output", "out"])
    if distkeras.rank() > 0:
        return
    assert set(RUN_FILES) <= set(files_in(folder / "out"))
    config = tomllib.loads((folder / "out/config.toml").read_text())
    given = zip(words[::2], words[1::2], strict=True)
    for flag, value in given:
        assert str(config[flag[2:].replace("-", "_")]) == value
    assert_as_configured(folder / "out/best.keras", config)


def assert_as_configured(path: Path, config: dict[str, Any]) -> None:
    """Looks for each setting in what was trained, as its file tells it."""
    with zipfile.ZipFile(path) as archive:
        saved = json.loads(archive.read("config.json"))
    compiled = saved["compile_config"]
    layers = {layer["config"]["name"]: layer for layer in saved["config"]["layers"]}
    convolution = layers["conv1_conv"]["config"]
    assert convolution["dtype"]["config"]["name"] == config["precision"]
    assert compiled["loss"]["config"]["label_smoothing"] == config["label_smoothing"]
    jit_compile = _options.JIT_COMPILE[config["jit_compile"]]
    if jit_compile != "auto":  # Keras puts in what it has chosen
        assert compiled["jit_compile"] is jit_compile
    optimizer = compiled["optimizer"]
    assert optimizer["class_name"].lower() == config.get("optimizer", "sgd")
    settings = optimizer["config"]
    assert settings["use_ema"] == ("ema" in config)
    assert settings["ema_momentum"] == config.get("ema", 0.99)
    kinds = {"cosine": "Cosine", "poly": "Polynomial", "steps": "PiecewiseConstant"}
    falls = settings["learning_rate"]
    assert falls["class_name"] == kinds[config["schedule"]] + "Decay"
    if "decay" in settings:
        assert settings["decay"] == config["weight_decay"]
    else:  # the gradient of a square is twice as large
        decay = 2 * convolution["kernel_regularizer"]["config"]["l2"]
        assert decay == pytest.approx(config["weight_decay"])


@pytest.mark.tensorflow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "what",
    # XLA takes long to compile so small a model; the step under it is tested elsewhere.
    [pytest.param(w, marks=[pytest.mark.soak] * (w == "XLA")) for w in FLAGS],
)
def test_flags_take_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_cifar10(tmp_path / "data")
    flags_take_effect(tmp_path, what)
    keras.config.set_dtype_policy("float32")


@pytest.mark.soak
@pytest.mark.tensorflow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("what", FLAGS)
def test_flags_take_effect_on_ranks(
    world: communicators.Communicator, folder: Path, what: str
) -> None:
    """`mpiexec -n 3 python -m pytest -m soak tests/test_recipes.py -k flags`."""
    if world.rank == 0:
        write_cifar10(folder / "data")
    world.barrier()
    flags_take_effect(folder, what)


@pytest.mark.tensorflow
@pytest.mark.timeout(240)
def test_gradients_travel_compressed(
    world: communicators.Communicator, folder: Path
) -> None:
    """As flags say, or a file of options."""
    path = folder / "a.toml"
    if world.rank == 0:
        path.write_text('compression = "float16"\nerror-feedback = true\n')
    world.barrier()
    resnet.main(["--depth", "8", "--steps", "2", "--config", str(path)])
    if world.rank == 0:
        output = folder / "runs/resnet"
        config = tomllib.loads((output / "config.toml").read_text())
        assert (config["compression"], config["error_feedback"]) == ("float16", True)
        weights = keras.models.load_model(output / "best.keras").trainable_weights
        count = sum(math.prod(weight.shape) for weight in weights)
        expected = 2 * count if world.size > 1 else 0
        assert evidence.bytes_sent(output) == pytest.approx(expected, rel=0.01)
    world.barrier()


def the_same_command_goes_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs it three times: the third time there is nothing left to do."""
    words = ["--depth", "8", "--batch-size", "360", "--ema", "0.9", "--resume"]
    world = communicators.world()
    for epochs in (1, 2):
        resnet.main([*words, "--epochs", str(epochs)])
        said = capsys.readouterr().out
        assert len(rows_of(folder / "runs/resnet")) == epochs
        if world.rank == 0:
            (result,) = RESULT.finditer(said)
            assert result["epochs"] == str(epochs)
        world.barrier()
    with pytest.raises(SystemExit, match="0"):
        resnet.main([*words, "--epochs", "2"])
    said = capsys.readouterr().err
    assert said.count("there is nothing to do") == (world.rank == 0)


@pytest.mark.tensorflow
@pytest.mark.timeout(240)
def test_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    the_same_command_goes_on(tmp_path, capsys)


@pytest.mark.soak
@pytest.mark.tensorflow
@pytest.mark.timeout(240)
def test_the_same_command_goes_on_on_ranks(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`mpiexec -n 3 python -m pytest -m soak tests/test_recipes.py -k goes_on`."""
    the_same_command_goes_on(folder, capsys)


@pytest.mark.soak
@pytest.mark.tensorflow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("files", ["tfrecords", "folders"])
def test_imagenet_goes_on_within_an_epoch(
    world: communicators.Communicator,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: str,
) -> None:
    """`mpiexec -n 3 python -m pytest -m soak tests/test_recipes.py -k goes_on`."""
    _samples.make(folder / "images", files)
    words = ["--depth", "10", "--image-size", "32", "--epochs", "2", "--resume"]
    words += ["--data-dir", "images", "--checkpoint-steps", "1"]
    resnet_imagenet.main([*words, "--output", "whole"])
    with monkeypatch.context() as patch:
        usual, train = _training.callbacks, _samples.COUNTS["train"]
        steps = train // (8 * world.size) + 2  # within the second epoch
        patch.setattr(
            _training, "callbacks", lambda *args: [*usual(*args), KillAt(steps + 3)]
        )
        with pytest.raises(Killed):
            resnet_imagenet.main([*words, "--output", "killed"])
    resnet_imagenet.main([*words, "--output", "killed"])
    if world.rank == 0:
        assert rows_of(folder / "killed") == rows_of(folder / "whole")
    world.barrier()


def test_checkpoints_are_written_within_epochs_too(tmp_path: Path) -> None:
    words = ["--resume", "--checkpoint-steps", "5", "--output", str(tmp_path)]
    for recipe in (resnet, resnet_imagenet):
        checkpoint, *others = _training.callbacks(recipe.parse(words), "val_accuracy")
        assert isinstance(checkpoint, Checkpoint)
        assert (checkpoint.every_steps, checkpoint.every_epochs) == (5, 1)
        assert not any(isinstance(other, Checkpoint) for other in others)


@pytest.mark.tensorflow
def test_a_loss_that_is_not_finite_ends_the_job(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With a code, and one message."""
    history = {"loss": [1.0, float("nan")], "val_loss": [1.0, 2.0]}
    with pytest.raises(SystemExit, match="1"):
        _training.check(history)
    err = capsys.readouterr().err
    assert err.count("The loss is not finite") == (distkeras.rank() == 0)


@pytest.mark.launches
@pytest.mark.soak
@pytest.mark.tensorflow
def test_a_loss_that_is_not_finite_ends_all_ranks(tmp_path: Path) -> None:
    words = ("--learning-rate", "1e30", "--warmup-epochs", 0, "--steps", 4)
    answer = run(*words, ranks=2, cwd=tmp_path)
    assert answer.returncode == 1, answer.stdout + answer.stderr
    assert answer.stderr.count("The loss is not finite") == 1
    assert not RESULT.search(answer.stdout)


def test_checkpoints_and_few_steps_exclude_each_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in (["--resume", "--steps", "2"], ["--checkpoint-steps", "5"]):
        with pytest.raises(SystemExit, match="2"):
            resnet.parse(words)
        assert "--resume" in capsys.readouterr().err


def test_without_compression_there_is_no_error_to_feed_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for recipe in (resnet, resnet_imagenet):
        with pytest.raises(SystemExit, match="2"):
            recipe.parse(["--error-feedback"])
        assert "--error-feedback needs --compression" in capsys.readouterr().err
        args = recipe.parse(["--error-feedback", "--compression", "bfloat16"])
        assert (args.compression, args.error_feedback) == ("bfloat16", True)


# Whole runs, by their launcher


def run(
    *words: object, ranks: int | None, cwd: Path, timeout: float = 100, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Runs the recipe in a folder, by `distkeras run` or, for None, without it."""
    launcher = [] if ranks is None else ["-m", "distkeras", "run", "-n", str(ranks)]
    return subprocess.run(
        [
            *(sys.executable, *launcher, "-m", "distkeras.recipes.resnet"),
            *map(str, words),
        ],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environ},
        stdin=subprocess.DEVNULL,
        timeout=timeout,
    )


def result_of(answer: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Reads the one line at the end of a run that went well."""
    assert answer.returncode == 0, answer.stdout + answer.stderr
    (match,) = RESULT.finditer(answer.stdout)
    return match.groupdict()


def evaluate(checkpoint: Path, images: _data.Images) -> float:
    """Evaluates a checkpoint by Keras; its file names nothing of distkeras."""
    with zipfile.ZipFile(checkpoint) as file:
        assert b"distkeras" not in file.read("config.json")
    model = keras.models.load_model(checkpoint)
    assert type(model.optimizer) is keras.optimizers.SGD
    y = keras.utils.to_categorical(images.y_val)
    logs = model.evaluate(images.x_val, y, verbose=0, return_dict=True)
    return logs["accuracy"]


def scalars(folder: Path) -> dict[str, list[float]]:
    """Reads TensorBoard's logs by TensorBoard itself."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util

    events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()
    return {
        tag: [
            float(tensor_util.make_ndarray(event.tensor_proto))
            for event in events.Tensors(tag)
        ]
        for tag in events.Tags()["tensors"]
    }


def files_in(folder: Path) -> list[str]:
    """Lists all files, without what is unique in their names."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    names = [str(path.relative_to(folder)) for path in paths]
    return sorted(re.sub(r"tfevents\..*", "tfevents", name) for name in names)


RUN_FILES = [
    "best.keras",
    "config.toml",
    "history.csv",
    "logs/train/events.out.tfevents",
    "logs/validation/events.out.tfevents",
]


@pytest.mark.launches
@pytest.mark.tensorflow
@pytest.mark.timeout(300)  # 20 s where two cores are free
@pytest.mark.parametrize(
    ("words", "accuracy"),
    [
        (["--depth", "8", "--epochs", "5"], 0.95),
        pytest.param([], 0.97, marks=pytest.mark.soak),
    ],
    ids=["shortened", "default"],
)
def test_two_ranks_read_digits_as_promised(
    tmp_path: Path, words: list[str], accuracy: float
) -> None:
    answer = run(*words, ranks=2, cwd=tmp_path, timeout=280)
    result = result_of(answer)
    assert (result["data"], result["ranks"]) == ("digits", "2")
    assert float(result["accuracy"]) >= accuracy
    assert files_in(tmp_path) == [f"runs/resnet/{name}" for name in RUN_FILES]

    checkpoint = tmp_path / result["model"]
    reached = evaluate(checkpoint, _data.load("digits"))
    assert reached == pytest.approx(float(result["accuracy"]), abs=1e-4)

    epochs = int(result["epochs"])
    train = scalars(tmp_path / "runs/resnet/logs/train")
    val = scalars(tmp_path / "runs/resnet/logs/validation")
    assert len(train["epoch_loss"]) == len(val["epoch_accuracy"]) == epochs
    assert max(val["epoch_accuracy"]) == pytest.approx(reached, abs=1e-4)
    # Two ranks: twice 0.05 after the warm-up, then down to nothing.
    rates = train["epoch_learning_rate"]
    assert 0.05 < max(rates) <= 0.1
    assert rates[-1] < 1e-6


@pytest.mark.launches
@pytest.mark.parametrize(
    "ranks", [None, pytest.param(2, marks=pytest.mark.soak)], ids=str
)
def test_without_a_network_the_error_says_what_to_download(
    tmp_path: Path, ranks: int | None
) -> None:
    answer = run(
        *("--data", "cifar10"),
        ranks=ranks,
        cwd=tmp_path,
        KERAS_HOME=str(tmp_path / "keras"),
        https_proxy="http://127.0.0.1:9",  # nobody listens there
    )
    assert answer.returncode == 2, answer.stdout + answer.stderr
    assert answer.stderr.count(f"Download {_data.CIFAR10_URL}") == 1
    assert "--data-dir FOLDER" in answer.stderr
    assert "Traceback" not in answer.stderr
