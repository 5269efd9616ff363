"""One child process: its output, the signals it is sent, and its end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from distkeras import _leftovers
from distkeras._exit import LEFT
from distkeras._exit import STATUS
from distkeras._exit import write
from distkeras.launch import _ranks

_PR_SET_PDEATHSIG = 1
# Seconds for ranks that their launcher has just killed.
_DYING = 0.3
# Seconds between looks at whether a rank has ended the job, and for the launcher to
# end then; and for its last lines.
_BETWEEN_LOOKS = 1.0
_CLEANING_UP = 5.0
_LAST_LINES = 5.0
# Seconds for ranks that handle a signal themselves, to finish and to write.
_FINISHING = 600.0
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# They need not end a job: schedulers send them as a warning.
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
# Open MPI writes "[1,3]<stdout>: text" (job, rank), Slurm " 3: text", the others
# "[3] text".
_TAG = re.compile(rb"^\[(?:\d+,)?(\d+)\](?:<(?:stdout|stderr)>:)? ?|^ *(\d+): ")


def start(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    piped: bool = False,
    stdin: int | None = None,
) -> subprocess.Popen[bytes]:
    """Starts a launcher, which ends when this process dies.

    Args:
        command: the words of the command.
        environ: the whole environment.
        piped: whether its output comes by pipes; else it goes where ours goes.
        stdin: as `subprocess.Popen` takes it.

    Returns:
        The process, in a session of its own: Ctrl-C in a terminal reaches this
        process alone, and the child hears of it once.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)

    def die_with_parent() -> None:
        if prctl is not None:  # Linux
            prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    pipe = subprocess.PIPE if piped else None
    return subprocess.Popen(
        command,
        env=dict(environ),
        stdin=stdin,
        stdout=pipe,
        stderr=pipe,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )


def end(process: subprocess.Popen[bytes], *, grace: float = 5.0) -> None:
    """Ends a launcher, which ends its ranks; kills it if that takes too long.

    Args:
        process: one that `start` started.
        grace: seconds.
    """
    try:
        if process.poll() is None:
            process.terminate()
            process.wait(grace)
    except BaseException as error:  # a second Ctrl-C is in a hurry
        _kill_group(process)
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise


def split_tag(line: bytes) -> tuple[int | None, bytes]:
    r"""Takes the rank from the beginning of a line of tagged output.

    Args:
        line: as a launcher writes it.

    Returns:
        The rank, or None for what the launcher says itself; the rest of the line.

    Example:
        >>> split_tag(b"[1,0]<stderr>: text\n"), split_tag(b"[3] text\n")
        ((0, b'text\n'), (3, b'text\n'))
    """
    match = _TAG.match(line)
    if match is None:
        return None, line
    return int(match[1] or match[2]), line[match.end() :]


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def run(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    tagged: bool = False,
    shown: bool = True,
    logs: Path | None = None,
    grace: float = 5.0,
    heard: list[int] | None = None,
    may_lose: bool = False,
) -> int:
    """Runs a launcher until it ends.

    SIGINT, SIGTERM and SIGHUP are passed on to it. If it has not ended `grace`
    seconds later, or at the second signal, it is killed. But where ranks of this
    machine handle SIGTERM themselves (`distkeras.callbacks.Checkpoint` does during
    `fit`), they get it, not the launcher, and have ten minutes to end. SIGUSR1 and
    SIGUSR2 are passed on too, and nothing follows.

    A launcher that does not end after a rank of this machine has ended the job is
    killed: it may wait for a host that does not answer any more.

    Args:
        command: the words of the command.
        environ: the whole environment.
        tagged: its output carries rank tags.
        shown: whether these are shown, then alike for all launchers: `[rank] `.
        logs: a folder in which each rank's output is written to a file too.
        grace: seconds.
        heard: gets the numbers of the signals that came.
        may_lose: whether its exit code is 0 also where all ranks, which are of this
            machine, were killed.

    Returns:
        The exit code: the child's own, or 128 plus the number of the signal that
        ended it or that was passed on to it.
    """
    with tempfile.TemporaryDirectory(prefix="distkeras-") as folder:
        code = _run(
            command,
            {**environ, STATUS: folder},
            tagged,
            _Logs(logs),
            shown,
            grace,
            [] if heard is None else heard,
            Path(folder) / "failed",
        )
        if code or not may_lose or (Path(folder) / "ended").exists():
            return code
    write(f"distkeras run: all ranks were lost, none has ended well: exit code {LEFT}")
    return LEFT


def _run(
    command: Sequence[str],
    environ: Mapping[str, str],
    tagged: bool,
    files: _Logs,
    shown: bool,
    grace: float,
    heard: list[int],
    failed: Path,
) -> int:
    """Does what `run` says; `failed` is the file that a rank makes to end the job."""
    sys.stdout.flush()
    sys.stderr.flush()
    began = time.time()
    process = start(command, environ, piped=tagged)
    with _passing_signals_to(process, grace, heard) as received:
        pumps = [
            threading.Thread(
                target=_pump, args=(source, sink, files, shown), daemon=True
            )
            for source, sink in (
                (process.stdout, sys.stdout.buffer),
                (process.stderr, sys.stderr.buffer),
            )
            if source is not None
        ]
        for pump in pumps:
            pump.start()
        code = _wait(process, failed)
        for pump in pumps:
            # What the launcher has started on other hosts may hold the pipe for ever.
            pump.join(_LAST_LINES if code else None)
        files.close()
    if received or code:
        remove_leftovers(began)
    if received:
        return 128 + received[0]
    return code if code >= 0 else 128 - code


def _wait(process: subprocess.Popen[bytes], failed: Path) -> int:
    """Waits for a launcher; kills it where it outlives a rank's end of the job."""
    while True:
        try:
            return process.wait(_BETWEEN_LOOKS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError, ValueError):
                late = time.time() - failed.stat().st_mtime
                if late > _CLEANING_UP:
                    code = int(failed.read_text())
                    _kill_group(process)
                    process.wait()
                    write(
                        f"distkeras run: the launcher has not ended {late:.0f} s after "
                        "its ranks on this machine: a host may be out of reach, where "
                        f"processes may be left. It was killed; exit code {code}."
                    )
                    return code


def remove_leftovers(began: float) -> None:
    """Removes what a job that was ended has left in shared memory.

    Args:
        began: when the job did, in seconds since 1970.
    """
    time.sleep(_DYING)
    _leftovers.remove_unused(began)


@contextlib.contextmanager
def _passing_signals_to(
    process: subprocess.Popen[bytes], grace: float, heard: list[int]
) -> Iterator[list[int]]:
    """Hands signals on while the body runs; yields those that ended the launcher."""
    received: list[int] = []
    told = False

    def kill_group(*_: object) -> None:
        _kill_group(process)

    def hand_on(number: int, _: FrameType | None) -> None:
        nonlocal told
        heard.append(number)
        if number == signal.SIGTERM and told:  # schedulers repeat it
            return
        received.append(number)
        if len(received) > 1 or told:
            kill_group()
            return
        if number == signal.SIGTERM and _ranks.tell(process.pid, number):
            told = True
            received.clear()
            signal.setitimer(signal.ITIMER_REAL, _FINISHING)
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        signal.setitimer(signal.ITIMER_REAL, grace)

    def pass_on(number: int, _: FrameType | None) -> None:
        heard.append(number)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)

    before = {number: signal.signal(number, hand_on) for number in _FORWARDED}
    before |= {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    before[signal.SIGALRM] = signal.signal(signal.SIGALRM, kill_group)
    try:
        yield received
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


class _Logs:
    """A file for each rank, and one for what the launcher says itself.

    Where one cannot be written to (a full disk), it says so once; the job goes on.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._complained = False
        self._files: dict[int | None, IO[bytes]] = {}
        self._lock = threading.Lock()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def write(self, rank: int | None, line: bytes) -> None:
        """Adds a line; both streams of a rank share its file."""
        if self._folder is None:
            return
        with self._lock:
            try:
                if rank not in self._files:
                    name = "launcher.log" if rank is None else f"rank-{rank}.log"
                    self._files[rank] = (self._folder / name).open("wb", buffering=0)
                self._files[rank].write(line)
            except OSError as error:
                if not self._complained:
                    self._complained = True
                    write(
                        f"distkeras run: --log-dir {self._folder}: {error}. The job "
                        "goes on, lines are missing there."
                    )

    def close(self) -> None:
        """Closes all files."""
        for file in self._files.values():
            file.close()


def _pump(source: IO[bytes], sink: IO[bytes], logs: _Logs, shown: bool) -> None:
    """Copies lines as they come."""
    with source:
        for line in source:
            rank, rest = split_tag(line)
            logs.write(rank, rest)
            sink.write(
                b"[%d] %b" % (rank, rest) if shown and rank is not None else rest
            )
            sink.flush()
