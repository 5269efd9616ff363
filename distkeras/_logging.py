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
        LOGGER.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    if not LOGGER.handlers and not logging.getLogger().handlers:
        handler = _Handler()
        handler.setFormatter(logging.Formatter(f"[distkeras, rank {rank}] %(message)s"))
        LOGGER.addHandler(handler)
    return LOGGER
