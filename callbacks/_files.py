"""Checkpoint files: one a checkpoint, whole or not there, read by NumPy alone.

A checkpoint is a `.npz` file, as `numpy.load` opens it: one array a variable, and the
member `metadata.json`, which holds everything else and a digest of each array. The
digest of the metadata stands in the comment of the zip archive, so that a file that is
whole proves it, and nothing in it can have changed.

Nothing here knows of Keras or of ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import zipfile
from collections.abc import Iterable
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from distkeras.callbacks._archive import Archive

_METADATA = "metadata.json"
_NAME = re.compile(r"checkpoint-(\d{6,})-epoch-(\d+)-step-(\d+)\.npz")
_UNFINISHED = ".unfinished"


class DamagedError(ValueError):
    """A file is not the checkpoint that it was written as."""


def name(sequence: int, epoch: int, step: int) -> str:
    """Returns the name of a checkpoint's file.

    Args:
        sequence: the number of the checkpoint in its folder; the newest has the
            highest.
        epoch: that training goes on with, from 0.
        step: of that epoch that training goes on with, from 0.

    Example:
        >>> name(12, epoch=3, step=40)
        'checkpoint-000012-epoch-3-step-40.npz'
    """
    return f"checkpoint-{sequence:06d}-epoch-{epoch}-step-{step}.npz"


def listed(folder: Path) -> list[Path]:
    """Returns the checkpoints in a folder, the newest first."""
    with contextlib.suppress(FileNotFoundError):
        found = [p for p in folder.iterdir() if _NAME.fullmatch(p.name)]
        return sorted(found, key=sequence, reverse=True)
    return []


def sequence(path: Path) -> int:
    """Returns the number of a checkpoint in its folder, by its name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else 0


def remove_unfinished(folder: Path) -> None:
    """Removes what runs that were killed while they wrote have left."""
    with contextlib.suppress(FileNotFoundError):
        for path in folder.iterdir():
            whole = path.name.removesuffix(_UNFINISHED)
            if whole != path.name and _NAME.fullmatch(whole):
                path.unlink(missing_ok=True)


def remove_old(folder: Path, *, keep: int | None, besides: Iterable[str] = ()) -> None:
    """Removes all checkpoints but the newest ones.

    Args:
        folder: of the checkpoints.
        keep: how many to leave; None for all.
        besides: names of others to leave.
    """
    if keep is None:
        return
    spared = set(besides)
    for path in listed(folder)[keep:]:
        if path.name not in spared:
            path.unlink(missing_ok=True)


def write(path: Path, arrays: Mapping[str, np.ndarray], metadata: Any) -> None:
    """Writes a checkpoint that is there whole or not at all.

    First to another name in the same folder, and to the disk; then renamed, and the
    folder's entry to the disk too. A file of the same name is replaced.

    Args:
        path: of the file; its folder is made if there is none.
        arrays: by name; of any dtype.
        metadata: what JSON can hold, and numbers of NumPy's.

    Raises:
        OSError: it could not be written; nothing is left of it, and what the folder
            held is as it was.
    """
    folder = path.parent
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + _UNFINISHED)
    try:
        with unfinished.open("wb", buffering=2**20) as file:
            _write_archive(file, arrays, metadata)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise
    _flush_folder(folder)


def read(path: Path) -> tuple[dict[str, np.ndarray], Any]:
    """Reads a checkpoint and proves that it is as it was written.

    Returns:
        The arrays by name, and the metadata.

    Raises:
        DamagedError: it is not whole, or has changed; the message says what.
        OSError: it cannot be opened.
    """
    with path.open("rb") as file:
        try:
            return _read_archive(file)
        except DamagedError:
            raise
        except Exception as error:
            # Bytes that tell of other formats, or lead to places that are not in the
            # file, make `zipfile`, its codecs, `numpy` and `json` raise all sorts.
            raise DamagedError(f"{type(error).__name__}: {error}") from error


def _read_archive(file: Any) -> tuple[dict[str, np.ndarray], Any]:
    with zipfile.ZipFile(file) as archive:
        text = archive.read(_METADATA)
        if archive.comment.decode("ascii", "replace") != _digest(text):
            raise DamagedError("its metadata does not match its digest")
        metadata = json.loads(text)
        arrays = {
            name: _read_array(archive, name, entry)
            for name, entry in metadata["arrays"].items()
        }
    return arrays, metadata["content"]


def _write_archive(file: Any, arrays: Mapping[str, np.ndarray], metadata: Any) -> None:
    entries = {}
    archive = Archive(file)
    for name, array in arrays.items():
        stored = _plain(array)
        # As they are in memory: no copy of what may be gigabytes.
        data = stored.reshape(-1).view("u1").data
        entries[name] = {"dtype": str(array.dtype), "digest": _digest(data)}
        archive.add(f"{name}.npy", [_header(stored), data])
    # Without indentation: only so it is not written by Python code.
    content = {"arrays": entries, "content": metadata}
    text = json.dumps(content, default=_number).encode()
    archive.add(_METADATA, [text])
    archive.close(_digest(text).encode())


def _number(value: Any) -> Any:
    """Returns Python's number for one of NumPy's, as batch sizes and seeds may be."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(
        "Expected what JSON can hold, or a number of NumPy's. Received: "
        f"{value!r} of type {type(value).__name__}"
    )


def _header(array: np.ndarray) -> bytes:
    """Returns what precedes the data in a `.npy` file, version 1.0 of the format.

    `numpy.lib.format.write_array` does so too, in a third of the time of a small array.
    """
    fields = {
        "descr": array.dtype.str,
        "fortran_order": False,
        "shape": array.shape,
    }
    text = repr(fields).encode("latin1")
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def _read_array(archive: zipfile.ZipFile, name: str, entry: Any) -> np.ndarray:
    # In one piece: the archive checks its own sum at the end of a member.
    content = io.BytesIO(archive.read(f"{name}.npy"))
    stored = np.lib.format.read_array(content, allow_pickle=False)
    if _digest(stored.reshape(-1).view("u1").data) != entry["digest"]:
        raise DamagedError(f"the array '{name}' does not match its digest")
    if str(stored.dtype) != entry["dtype"]:
        stored = stored.view(_dtype(entry["dtype"]))
    return stored


def _plain(array: np.ndarray) -> np.ndarray:
    """Returns an array of a dtype that a file of NumPy's can name."""
    array = np.asarray(array)
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array).reshape(array.shape)
    if array.dtype.kind in "biufc":
        return array
    return array.view(f"u{array.dtype.itemsize}")  # bfloat16 and its like


def _dtype(name: str) -> np.dtype:
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))


def _digest(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _flush_folder(folder: Path) -> None:
    """Makes a renaming last; where folders cannot be opened, it is left at that."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
