"""Starts a job that failed again: the whole of it, from its last checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable

_USAGE = 2


def run_again(run: Callable[[int, list[int]], int], most: int) -> int:
    """Runs a job, and again while it fails.

    Not after a signal that this process was sent (Ctrl-C, a scheduler's warning), nor
    after exit code 2, which tells of a wrong command line.

    Args:
        run: of the number of the restart, 0 at first, and a list to which it adds the
            signals that came; returns the exit code.
        most: how often the job is started again.

    Returns:
        The exit code of the last run.

    Example:
        >>> codes = [1, 75, 0]
        >>> run_again(lambda number, signals: codes[number], 3)
        0
    """
    number = 0
    while True:
        signals: list[int] = []
        code = run(number, signals)
        if code in (0, _USAGE) or signals or number >= most:
            return code
        number += 1
        print(
            f"distkeras run: the job ended with exit code {code}; starting it again, "
            f"{number} of {most}",
            file=sys.stderr,
            flush=True,
        )
