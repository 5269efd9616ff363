"""One child process: its output, the signals it is sent, and its end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from types import FrameType
from typing import IO

_PR_SET_PDEATHSIG = 1
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Open MPI writes "[1,3]<stdout>: text" (job, rank), others "[3] text".
_OPEN_MPI_TAG = re.compile(rb"^\[(?:\d+,)?(\d+)\]<(?:stdout|stderr)>: ?")


def run(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    tagged: bool = False,
    grace: float = 5.0,
) -> int:
    """Runs a launcher until it ends.

    SIGINT, SIGTERM and SIGHUP are passed on to it. If it has not ended `grace`
    seconds later, or at the second signal, it is killed.

    Args:
        command: the words of the command.
        environ: the whole environment.
        tagged: its output carries rank tags: they are written alike, `[rank] `.
        grace: seconds.

    Returns:
        The exit code: the child's own, or 128 plus the number of the signal that
        ended it or that was passed on.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    prctl = getattr(ctypes.CDLL(None), "prctl", None)

    def die_with_parent() -> None:
        if prctl is not None:  # Linux
            prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    pipe = subprocess.PIPE if tagged else None
    # A session of its own: Ctrl-C in a terminal reaches this process alone, and
    # the child hears of it once.
    process = subprocess.Popen(
        command,
        env=dict(environ),
        stdout=pipe,
        stderr=pipe,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    with _passing_signals_to(process, grace) as received:
        pumps = [
            threading.Thread(target=_pump, args=(source, sink))
            for source, sink in (
                (process.stdout, sys.stdout.buffer),
                (process.stderr, sys.stderr.buffer),
            )
            if source is not None
        ]
        for pump in pumps:
            pump.start()
        code = process.wait()
        for pump in pumps:
            pump.join()
    if received:
        return 128 + received[0]
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _passing_signals_to(
    process: subprocess.Popen[bytes], grace: float
) -> Iterator[list[int]]:
    """Hands signals on while the body runs; yields the list of those that came."""
    received: list[int] = []

    def kill_group(*_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def hand_on(number: int, _: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            kill_group()
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        signal.setitimer(signal.ITIMER_REAL, grace)

    before = {number: signal.signal(number, hand_on) for number in _FORWARDED}
    before[signal.SIGALRM] = signal.signal(signal.SIGALRM, kill_group)
    try:
        yield received
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _pump(source: IO[bytes], sink: IO[bytes]) -> None:
    """Copies lines as they come, with the rank tag in its short form."""
    with source:
        for line in source:
            sink.write(_OPEN_MPI_TAG.sub(rb"[\1] ", line))
            sink.flush()
