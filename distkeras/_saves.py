"""The model's own ways to save, in scripts that were written for one process.

Such a script ends with `model.save("model.keras")`, on every rank: all would write the
same file at once, and leave a damaged one.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

_METHODS = ("save", "save_weights", "export")


def write_whole_files(model: keras.Model) -> None:
    """Lets a model, and those within it, write files that appear when they are whole.

    Every rank that calls writes a file of its own, and then puts it in place; that of
    the last one stays. So it does not matter whether all ranks call or rank 0 alone,
    nor whether paths are the same, and whoever has saved a file can read it. Of a
    folder that is only true of each file, and of the whole when all are done.

    Args:
        model: whose `save`, `save_weights` and `export` are replaced, where they are
            those of Keras.
    """
    for part in model._flatten_layers():
        if isinstance(part, keras.Model):
            for name in _METHODS:
                of_keras = getattr(type(part), name, None) is getattr(keras.Model, name)
                if of_keras and name not in vars(part):
                    object.__setattr__(part, name, _whole(getattr(part, name)))


def _whole(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def save(filepath: Any, *args: Any, **kwargs: Any) -> Any:
        overwrite = args[0] if args else kwargs.get("overwrite", True)
        if not _is_ordinary(filepath) or (not overwrite and os.path.exists(filepath)):
            return method(filepath, *args, **kwargs)
        path = Path(filepath)
        # In the same folder, so that it is put in place by a change of names.
        with tempfile.TemporaryDirectory(prefix=".saving-", dir=path.parent) as folder:
            result = method(str(Path(folder) / path.name), *args, **kwargs)
            _put_in_place(Path(folder), path.parent)
        return result

    return save


def _is_ordinary(filepath: Any) -> bool:
    """Whether this names a file, there or not, in a folder of this machine."""
    if not isinstance(filepath, str | os.PathLike) or "://" in str(filepath):
        return False
    path = Path(filepath)
    return bool(path.name) and path.parent.is_dir() and not path.is_symlink()


def _put_in_place(source: Path, target: Path) -> None:
    for entry in sorted(source.iterdir()):
        place = target / entry.name
        if entry.is_dir():
            place.mkdir(exist_ok=True)
            _put_in_place(entry, place)
        else:
            os.replace(entry, place)
