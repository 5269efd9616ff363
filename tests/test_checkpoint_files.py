"""Files of checkpoints: whole or not there, damage is noticed, full disks are told."""

from __future__ import annotations

import contextlib
import os
import random
import re
import resource
import signal
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import ml_dtypes
import numpy as np
import pytest
from checkpoints import build
from checkpoints import fit
from equivalence import samples

import distkeras
from distkeras.callbacks import Checkpoint
from distkeras.callbacks import _archive
from distkeras.callbacks import _files
from distkeras.communicators import Communicator

ARRAYS = {
    "a/kernel": np.arange(6.0).reshape(2, 3),
    "scalar": np.float32(2)[()] * np.ones((), "float32"),
    "narrow": np.ones(3, ml_dtypes.bfloat16),
    "narrower": np.ones((2, 3), ml_dtypes.float8_e4m3fn),
    "rows": np.arange(6, dtype="int8").reshape(3, 2).T,
    "empty": np.zeros((0, 2)),
    "flag": np.array([True, False]),
}


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1, momentum=0.9)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / _files.name(1, epoch=2, step=3)
    _files.write(path, ARRAYS, {"epoch": np.int64(2)})
    arrays, content = _files.read(path)
    assert content == {"epoch": 2}
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(arrays[name], array)
    with np.load(path) as plain:
        np.testing.assert_array_equal(plain["a/kernel"], ARRAYS["a/kernel"])


@pytest.mark.parametrize("limits", [{}, {"_LARGE": 150}, {"_MANY": 2}, {"_LARGE": 1}])
def test_archives_are_those_of_zip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, int]
) -> None:
    """Also beyond 4 GiB and 65535 members; here the limits are lower."""
    for name, value in limits.items():
        monkeypatch.setattr(_archive, name, value)
    path = tmp_path / "a.npz"
    _files.write(path, ARRAYS, {"epoch": 2})
    assert _files.read(path)[1] == {"epoch": 2}
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == [*(f"{n}.npy" for n in ARRAYS), "metadata.json"]
    with np.load(path) as plain:
        for name, array in ARRAYS.items():
            if array.dtype.kind in "bf":
                np.testing.assert_array_equal(plain[name], array)


def test_damage_at_any_byte_is_noticed_or_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / _files.name(1, epoch=0, step=0)
    _files.write(path, ARRAYS, {"epoch": 2})
    whole = path.read_bytes()
    noticed = 0
    for at in range(0, len(whole), 5):
        flipped = whole[:at] + bytes([whole[at] ^ 64]) + whole[at + 1 :]
        for content in (whole[:at], flipped):
            path.write_bytes(content)
            try:
                arrays, metadata = _files.read(path)
            except _files.DamagedError:
                noticed += 1
                continue
            assert metadata == {"epoch": 2}
            for name, array in ARRAYS.items():
                np.testing.assert_array_equal(arrays[name], array)
    assert noticed > len(whole) // 5


def mutated(whole: bytes, number: int) -> bytes:
    """Returns a file as a disk, a copy or a crash may leave it."""
    chance = random.Random(number)
    content = bytearray(whole)
    start = chance.randrange(len(whole))
    length = chance.choice([1, 2, 16, 64, 512, len(whole)])
    piece = slice(start, start + length)
    kind = number % 7
    if kind == 0:  # bits
        for _ in range(length % 100):
            content[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
    elif kind == 1:
        content[piece] = bytes(len(content[piece]))
    elif kind == 2:
        content[piece] = chance.randbytes(len(content[piece]))
    elif kind == 3:  # shorter
        del content[piece]
    elif kind == 4:  # longer
        content[start:start] = chance.randbytes(length)
    elif kind == 5:  # from elsewhere in the file
        other = chance.randrange(len(whole))
        content[piece] = whole[other : other + len(content[piece])]
    else:
        content += chance.randbytes(length)
    return bytes(content)


@pytest.mark.parametrize("count", [700, pytest.param(70_000, marks=pytest.mark.soak)])
@pytest.mark.timeout(900)
def test_damage_of_any_kind_is_noticed_or_changes_nothing(
    tmp_path: Path, count: int
) -> None:
    path = tmp_path / _files.name(1, epoch=0, step=0)
    _files.write(path, ARRAYS, {"epoch": 2})
    whole = path.read_bytes()
    noticed = 0
    for number in range(count):
        path.write_bytes(mutated(whole, number))
        try:
            arrays, metadata = _files.read(path)
        except _files.DamagedError:
            noticed += 1
            continue
        assert metadata == {"epoch": 2} and arrays.keys() == ARRAYS.keys(), number
        for name, array in ARRAYS.items():
            np.testing.assert_array_equal(arrays[name], array, err_msg=str(number))
    assert noticed > 0.8 * count


def test_old_ones_are_removed_and_the_newest_comes_first(tmp_path: Path) -> None:
    for number in (1, 2, 3, 10):
        (tmp_path / _files.name(number, epoch=9 - number % 7, step=0)).touch()
    unfinished = tmp_path / (_files.name(4, epoch=0, step=0) + ".unfinished")
    for other in (unfinished, tmp_path / "notes.txt"):
        other.touch()
    _files.remove_old(tmp_path, keep=2, besides=[_files.name(1, epoch=8, step=0)])
    _files.remove_unfinished(tmp_path)
    assert [_files.sequence(p) for p in _files.listed(tmp_path)] == [10, 3, 1]
    assert (tmp_path / "notes.txt").exists() and not unfinished.exists()


@pytest.mark.parametrize(
    "options",
    [
        {"every_steps": 0},
        {"keep": 0},
        {"every_epochs": 1.5},
        {"mode": "up"},
        {"signals": (signal.SIGKILL,)},
        {"signals": signal.SIGTERM},
        {"signals": (signal.SIGTERM, 999)},
        {"signals": ("SIGTERM",)},
    ],
)
def test_options_without_meaning(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Checkpoint(tmp_path, **options)


def test_all_are_kept_on_request(world: Communicator, tmp_path: Path) -> None:
    """None removed all, the one just written too."""
    data = samples(4 * world.size)
    fit(build(sgd), data, epochs=5, callbacks=[Checkpoint(tmp_path, keep=None)])
    numbers = [_files.sequence(path) for path in _files.listed(tmp_path)]
    assert numbers == ([5, 4, 3, 2, 1] if world.rank == 0 else [])


def test_numbers_of_numpy(world: Communicator, tmp_path: Path) -> None:
    """As they come of `len(x) // steps` and the like: JSON would not hold them."""
    data, two = samples(4 * world.size), np.int64(2)
    checkpoint = Checkpoint(tmp_path, every_steps=two)
    fit(build(sgd), data, seed=two, batch_size=two, callbacks=[checkpoint])
    assert world.rank > 0 or len(_files.listed(tmp_path)) == 2
    options: dict[str, Any] = {"batch_size": two, "steps_per_epoch": two, "seed": two}
    again = Checkpoint(tmp_path)
    history = fit(
        build(sgd), data, epochs=two, callbacks=[again], resume="auto", **options
    )
    assert history.epoch == [1]


def test_wrong_use_is_told(world: Communicator, tmp_path: Path) -> None:
    x, y = samples(12)
    model = build(sgd)
    with pytest.raises(RuntimeError, match="Trainer"):
        model.fit(x, y, verbose=0, callbacks=[Checkpoint(tmp_path)])
    with pytest.raises(ValueError, match="resume='auto'"):
        fit(model, (x, y), resume="auto")
    with pytest.raises(distkeras.CheckpointError, match="usable checkpoint"):
        fit(model, (x, y), resume=tmp_path)


def test_damaged_one_is_named_and_the_one_before_used(
    world: Communicator, tmp_path_shared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = samples(4 * world.size)
    fit(build(sgd), data, epochs=3, callbacks=[Checkpoint(tmp_path_shared)])
    newest, before = _files.listed(tmp_path_shared)[:2]
    world.barrier()
    if world.rank == 0:
        content = bytearray(newest.read_bytes())
        content[len(content) // 2] ^= 1
        newest.write_bytes(content)
        (tmp_path_shared / (newest.name + ".unfinished")).write_bytes(b"half")
    history = fit(
        build(sgd),
        data,
        epochs=3,
        callbacks=[Checkpoint(tmp_path_shared)],
        resume="auto",
    )
    assert history.epoch == [2]
    texts = [text for text in caplog.messages if "Damaged" in text]
    assert len(texts) == (world.rank == 0)
    assert all(str(newest) in text for text in texts)
    world.barrier()
    assert before.exists() and not list(tmp_path_shared.glob("*.unfinished"))
    assert _files.sequence(_files.listed(tmp_path_shared)[0]) == 4


def test_forked_workers_can_be_told_to_end(tmp_path: Path) -> None:
    """They inherit the handler, and would only note the signal."""
    checkpoint = Checkpoint(tmp_path)
    ready, tell = os.pipe()
    with checkpoint.attached():
        worker = os.fork()
        if worker == 0:
            os.write(tell, b"1")
            time.sleep(30)
            os._exit(0)
        os.read(ready, 1)
        os.kill(worker, signal.SIGTERM)
        _, status = os.waitpid(worker, 0)
    os.close(ready)
    os.close(tell)
    assert os.WTERMSIG(status) == signal.SIGTERM


def test_none_that_can_be_used_is_an_error(
    world: Communicator, tmp_path_shared: Path
) -> None:
    """Not a new beginning, after which the damaged ones would be removed."""
    data = samples(4 * world.size)
    callbacks = [Checkpoint(tmp_path_shared)]
    fit(build(sgd), data, callbacks=callbacks)
    world.barrier()
    if world.rank == 0:
        for path in _files.listed(tmp_path_shared):
            path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(distkeras.CheckpointError, match="usable checkpoint"):
        fit(build(sgd), data, callbacks=callbacks, resume="auto")
    world.barrier()
    assert len(_files.listed(tmp_path_shared)) == 1


def test_epochs_within_a_pass_are_refused(world: Communicator, tmp_path: Path) -> None:
    data = samples(16 * world.size)
    options = {
        "batch_size": 4,
        "steps_per_epoch": 2,
        "callbacks": [Checkpoint(tmp_path)],
    }
    with pytest.raises(ValueError, match="steps_per_epoch=2 of 4"):
        fit(build(sgd), data, **options)


@contextlib.contextmanager
def no_room(after: int) -> Iterator[None]:
    """Lets no file of this process grow beyond some bytes: a disk that is full.

    The kernel's signal for that is ignored by Python, which raises an error.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (after, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_folder_that_is_a_file_is_an_error_on_every_rank(
    world: Communicator, tmp_path: Path
) -> None:
    (taken := tmp_path / "taken").touch()
    with pytest.raises(distkeras.CheckpointError, match="FileExistsError.*taken"):
        fit(build(sgd), samples(4 * world.size), callbacks=[Checkpoint(taken)])


class Full(keras.callbacks.Callback):
    """Fills the disk when an epoch begins, on rank 0."""

    def __init__(self, epoch: int, rank: int, stack: contextlib.ExitStack) -> None:
        super().__init__()
        self.when, self.mine, self.stack = epoch, rank == 0, stack

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self.mine and epoch == self.when:
            self.stack.enter_context(no_room(2000))


@pytest.mark.parametrize("background", [True, False])
def test_full_disk_is_an_error_on_every_rank(
    world: Communicator, tmp_path_shared: Path, background: bool
) -> None:
    data = samples(4 * world.size)
    checkpoint = Checkpoint(tmp_path_shared, keep=9, background=background)
    with contextlib.ExitStack() as stack:
        full = Full(2, world.rank, stack)
        with pytest.raises(distkeras.CheckpointError, match="Rank 0 .* File too large"):
            fit(build(sgd), data, epochs=9, callbacks=[checkpoint, full])
    world.barrier()
    names = sorted(os.listdir(tmp_path_shared))
    # In the background the second one may have been under way.
    assert [re.sub(r"-step.*", "", name) for name in names] in (
        ["checkpoint-000001-epoch-1"] * background,
        ["checkpoint-000001-epoch-1", "checkpoint-000002-epoch-2"],
    )
    for path in _files.listed(tmp_path_shared):
        _files.read(path)


def test_the_best_of_epochs_with_a_validation(
    world: Communicator, tmp_path: Path
) -> None:
    """The first epoch without one ended training."""
    data = samples(4 * world.size)
    options: dict[str, Any] = {"every_epochs": None, "monitor": "val_loss"}
    best = Checkpoint(tmp_path, **options)
    with pytest.raises(ValueError, match="monitor='val_loss'"):
        fit(build(sgd), data, callbacks=[best])
    freq = [2, 3]
    kept = {"validation_data": data, "validation_freq": freq, "epochs": 4}
    history = fit(build(sgd), data, callbacks=[best], **kept)
    values = history.history["val_loss"]
    epoch = freq[int(np.argmin(values))]
    assert best.best == min(values)
    assert f"-epoch-{epoch}-" in str(best.best_file)


class Scores(keras.callbacks.Callback):
    """Logs a number that rises on rank 0 and falls on others."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.sign = 1 if rank == 0 else -1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["score"] = self.sign * (epoch + 1.0)


@pytest.mark.parametrize("alone", [False, True])
def test_rank_0_tells_the_best_epoch(
    world: Communicator, tmp_path: Path, alone: bool
) -> None:
    """Each rank decided by its own logs, and some wrote without the others."""
    data = samples(4 * world.size)
    best = Checkpoint(tmp_path, every_epochs=None, monitor="score", mode="max")
    scores = Scores(world.rank)
    if alone:
        distkeras.callbacks.on_rank_zero(scores)
    fit(build(sgd), data, epochs=3, callbacks=[scores, best])
    assert world.allgather_object(best.best) == [3.0] * world.size
    assert best.best_file == "checkpoint-000003-epoch-3-step-0.npz"


@pytest.mark.parametrize("value", [None, "high"])
def test_what_rank_0_cannot_compare_is_an_error_everywhere(
    world: Communicator, tmp_path: Path, value: str | None
) -> None:
    def log(epoch: int, logs: dict[str, Any]) -> None:
        logs.update({} if value is None and world.rank == 0 else {"score": value})

    callback = keras.callbacks.LambdaCallback(on_epoch_end=log)
    data = samples(4 * world.size)
    best = Checkpoint(tmp_path, monitor="score", mode="max")
    with pytest.raises(distkeras.CheckpointError, match=value or "score"):
        fit(build(sgd), data, callbacks=[callback, best])


def test_last_ones_and_the_best_are_kept(world: Communicator, tmp_path: Path) -> None:
    """Each rank has a folder of its own: the others' stay empty, none is missed."""
    data = samples(8 * world.size)
    best = Checkpoint(tmp_path, keep=2, monitor="loss", mode="max")
    fit(build(sgd), data, epochs=5, callbacks=[best])
    found = [path.name for path in reversed(_files.listed(tmp_path))]
    if world.rank > 0:
        assert not found
    else:
        assert found[-2:] == [
            "checkpoint-000004-epoch-4-step-0.npz",
            "checkpoint-000005-epoch-5-step-0.npz",
        ]
        assert best.best_path is not None and best.best_path.name in found
        assert len(found) <= 3
    again = Checkpoint(tmp_path, keep=2, monitor="loss", mode="max")
    history = fit(build(sgd), data, epochs=6, callbacks=[again], resume="auto")
    assert history.epoch == [5]
    assert again.best is not None and best.best is not None
    assert again.best >= best.best
    names = world.allgather_object(again.best_file)
    assert names == [names[0]] * world.size
    assert world.rank > 0 or (tmp_path / names[0]).exists()
