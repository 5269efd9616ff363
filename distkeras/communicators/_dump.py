"""Python stacks of a process that holds Python's lock, on a signal from outside."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import time
from collections.abc import Iterable

from distkeras._exit import LAST_WORDS
from distkeras._exit import STACKS


def register() -> bool:
    """Makes this process write its stacks to stderr on the signal `STACKS`.

    Returns:
        Whether it does: not where there is no such signal or no file as stderr.
    """
    try:
        faulthandler.register(STACKS, all_threads=True)
    except (OSError, RuntimeError, ValueError, AttributeError):
        return False
    return True


def unregister() -> None:
    """Gives the signal back to the system."""
    faulthandler.unregister(STACKS)


def request(pids: Iterable[int]) -> None:
    """Has processes that have registered write their stacks, and lets them.

    Args:
        pids: of this machine.
    """
    sent = False
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, STACKS)
            sent = True
    if sent:
        time.sleep(LAST_WORDS)
