"""The logger: rank in every record, rank 0 at INFO, other ranks at WARNING."""

from __future__ import annotations

import logging
import sys

LOGGER = logging.getLogger("distkeras")

_FORMAT = "[distkeras, rank %(rank)d] %(message)s"


class _Rank(logging.Filter):
    """Puts the rank into every record, for formats of the program's own too."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def filter(self, record: logging.LogRecord) -> bool:
        record.rank = self.rank
        return True


class _Handler(logging.StreamHandler):
    """Writes to whatever `sys.stderr` is at the time, as notebooks replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def configure(rank: int) -> logging.Logger:
    """Gives the logger a handler and a level, unless the program did so before.

    Args:
        rank: of this process; it stands in every record, as `%(rank)d`.

    Returns:
        The logger named `distkeras`.
    """
    _number(rank)
    if LOGGER.level == logging.NOTSET:
        LOGGER.setLevel(_level(rank))
    if not LOGGER.handlers and not logging.getLogger().handlers:
        handler = _Handler()
        handler.setFormatter(logging.Formatter(_FORMAT))
        LOGGER.addHandler(handler)
    return LOGGER


def renumber(before: int, rank: int) -> None:
    """Gives records another rank, and the logger its level where that was ours.

    Args:
        before: what the rank was.
        rank: what it is.
    """
    if LOGGER.level == _level(before):
        LOGGER.setLevel(_level(rank))
    _number(rank)


def _number(rank: int) -> None:
    for known in LOGGER.filters:
        if isinstance(known, _Rank):
            known.rank = rank
            return
    LOGGER.addFilter(_Rank(rank))


def _level(rank: int) -> int:
    return logging.INFO if rank == 0 else logging.WARNING
