"""Files of `CSVLogger`, of a line an epoch: a later run goes on with them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence

import keras


def lengths(callbacks: Sequence[keras.callbacks.Callback]) -> dict[str, int]:
    """Returns how long the files are by now, in bytes, by name.

    Args:
        callbacks: the user's.
    """
    names = [logger.filename for logger in _loggers(callbacks)]
    return {name: os.path.getsize(name) for name in names if os.path.exists(name)}


@contextlib.contextmanager
def gone_on_with(
    held: Mapping[str, int], callbacks: Sequence[keras.callbacks.Callback], rank: int
) -> Iterator[None]:
    """Lets `CSVLogger` go on with files, while inside, rather than begin them anew.

    Without the lines that were added after their lengths were taken: these epochs
    come again.

    Args:
        held: what `lengths` returned then.
        callbacks: the user's.
        rank: of this process; the first one writes.
    """
    changed = []
    if rank == 0:
        for logger in _loggers(callbacks):
            if logger.filename not in held:
                continue
            _cut(logger.filename, held[logger.filename])
            if not logger.append:
                changed.append(logger)
                logger.append = True
    try:
        yield
    finally:
        for logger in changed:
            logger.append = False


def _loggers(
    callbacks: Sequence[keras.callbacks.Callback],
) -> list[keras.callbacks.CSVLogger]:
    return [c for c in callbacks if isinstance(c, keras.callbacks.CSVLogger)]


def _cut(name: str, length: int) -> None:
    """Removes what follows; one that is shorter is another file, and stays."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.getsize(name) > length:
            os.truncate(name, length)
