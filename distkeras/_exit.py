"""How a rank that fails leaves: what its launcher must be told, and when."""

import contextlib
import os
import signal
import sys
from pathlib import Path

INTERRUPTED = 130
"""The exit code that a shell reports for a program that Ctrl-C ended."""

PREEMPTED = 75
"""The exit code of a job that a signal ended after it wrote a checkpoint.

`EX_TEMPFAIL` of sysexits.h: start it again, and it goes on.
"""

LEFT = 121
"""The exit code when a rank has ended its script while others wait for it."""

OUT_OF_STEP = 122
"""The exit code when ranks wait for each other in different collectives."""

STALLED = 124
"""The exit code when ranks have waited longer than `timeout` (as of `timeout`(1))."""

STACKS = getattr(signal, "SIGRTMAX", 64) - 3
"""The signal on which a rank writes its Python stacks; libraries leave it alone."""

LAST_WORDS = 0.5
"""Seconds between the last output and the end of the job.

MPICH's launcher drops what it has not read when a rank aborts.
"""


STATUS = "DISTKERAS_STATUS"
"""The variable that names a folder in which ranks beside their launcher tell their end.

By files: `ended` of a rank that has ended well, `failed` with the exit code of one that
ends the job.
"""


def tell_launcher(name: str, text: str = "") -> None:
    """Leaves a file in the launcher's folder, if there is one on this machine.

    Args:
        name: `ended` or `failed`.
        text: its content.
    """
    folder = os.environ.get(STATUS)
    if folder:
        with contextlib.suppress(OSError):
            (Path(folder) / name).write_text(text)


def flush() -> None:
    """Writes out what was printed, as far as that can be.

    A disk may be full and a terminal gone; whoever ends a job for that very reason
    must get to it.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def write(text: str) -> None:
    """Writes lines to stderr in one piece, as several ranks share it; if it can be."""
    flush()
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text.rstrip("\n") + "\n")
    flush()
