"""The logger: rank in every record, rank 0 at INFO, other ranks at WARNING."""

from __future__ import annotations

import logging
import sys

LOGGER = logging.getLogger("distkeras")


class _Handler(logging.StreamHandler):
    """Writes to whatever `sys.stderr` is at the time, as notebooks replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def configure(rank: int) -> logging.Logger:
    """Gives the logger a handler and a level, unless the program did so before.

    Args:
        rank: of this process; it stands in every record.

    Returns:
        The logger named `distkeras`.
    """
    if LOGGER.level == logging.NOTSET:
        LOGGER.setLevel(_level(rank))
    if not LOGGER.handlers and not logging.getLogger().handlers:
        handler = _Handler()
        handler.setFormatter(_format(rank))
        LOGGER.addHandler(handler)
    return LOGGER


def renumber(before: int, rank: int) -> None:
    """Gives records another rank, where the level and the handler are ours.

    Args:
        before: what the rank was.
        rank: what it is.
    """
    if LOGGER.level == _level(before):
        LOGGER.setLevel(_level(rank))
    for handler in LOGGER.handlers:
        if isinstance(handler, _Handler):
            handler.setFormatter(_format(rank))


def _level(rank: int) -> int:
    return logging.INFO if rank == 0 else logging.WARNING


def _format(rank: int) -> logging.Formatter:
    return logging.Formatter(f"[distkeras, rank {rank}] %(message)s")
