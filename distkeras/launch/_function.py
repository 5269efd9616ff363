"""`distkeras.run`: a function on several ranks, from a notebook or a script.

The ranks are fresh processes, started as by `distkeras run`. They share nothing with
this one: the function is carried there and the results back, by files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import linecache
import os
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path
from typing import IO
from typing import Any
from typing import Literal
from typing import NoReturn

from distkeras._errors import RankError
from distkeras._exit import LAST_WORDS
from distkeras._launcher import discover
from distkeras.launch import _mpiexec
from distkeras.launch import _node
from distkeras.launch import _payload
from distkeras.launch import _process
from distkeras.launch import _run
from distkeras.launch._mpiexec import LaunchError

# Seconds.
_POLL = 0.1
_HELD = 5.0  # for what the launcher says: in the end an exception may say it better
_LATE = 2.0  # for output that processes hold which ranks left behind


class RankTraceback(Exception):
    """The traceback on a rank, as text: the cause of what `distkeras.run` raises."""

    __module__ = "distkeras"  # as it is shown


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    n: int | Literal["auto"] = 2,
    *,
    environ: Mapping[str, str] | None = None,
    mpiexec: str | None = None,
    mpi_args: Sequence[str] = (),
) -> list[Any]:
    """Calls a function on `n` ranks and returns their results.

    For notebooks, and for scripts that want one part of them to run on several
    ranks. Each rank is a fresh process, started as `distkeras run` would: it sees
    nothing of this one but what the function brings along. The function and what it
    uses of the notebook are carried by cloudpickle; Keras models can be arguments and
    results (a model of classes defined in the notebook is better made inside the
    function). What ranks print appears here at once, with `[rank]` before each line.

    Interrupting the call ends the ranks.

    Args:
        fn: the function.
        args: its positional arguments, the same on every rank.
        kwargs: its keyword arguments.
        n: number of ranks; `"auto"` for one a GPU, or where there is none, one a
            physical core.
        environ: variables to set for the ranks, besides those of this process.
        mpiexec: the launcher; searched for as by `distkeras run`.
        mpi_args: more options for the launcher.

    Returns:
        What the function returned on each rank, by rank. A rank that leaves by
        `sys.exit(0)` has None.

    Raises:
        Exception: the exception of the first rank that failed, with its traceback
            there as `__cause__`; the other ranks were ended.
        RankError: a rank ended otherwise: killed, or by `sys.exit` with an error.
        pickle.PicklingError: the function, an argument or a result cannot be
            carried; names the part that cannot.
        pickle.UnpicklingError: a rank cannot read the function or an argument, or
            this process a result: not both can import what it is made of.
        TypeError: `fn` is no function, `args` no sequence or `kwargs` no dict.
        ValueError: `n` is no number of ranks.
        LaunchError: no ranks can be started: there is no MPI, or this process is one
            of several ranks itself.

    Example:
        >>> import distkeras
        >>> distkeras.run(lambda: distkeras.rank() ** 2, n=3)  # doctest: +SKIP
        [0, 1, 4]
    """
    _check(fn, args, kwargs, n)
    launcher = _mpiexec.find(mpiexec)
    data = _carried(fn, tuple(args), dict(kwargs or {}))
    _warn_of_opened_gpus()
    size = _run.default_size() if n == "auto" else n
    outer = {**_mpiexec.outside_jobs(os.environ), **(environ or {})}
    added = _mpiexec.environment(launcher, outer, root=os.geteuid() == 0)
    with tempfile.TemporaryDirectory(prefix="distkeras-run-") as name:
        folder = Path(name)
        _payload.write(folder / "call", data)
        program = [*_run.WORKER, "-m", "distkeras.launch._call", name]
        command = _mpiexec.command(
            launcher, program, n=size, tag=True, extra=tuple(mpi_args)
        )
        job = _Job(folder)
        code = job.run(command, {**outer, **added})
        failures = _failures(folder)
        if failures:
            _raise(failures, size)
        missing = [r for r in range(size) if not (folder / f"{r}.result").exists()]
        if code or missing:
            raise RankError(_how_it_ended(code, missing, size, job.held_text()))
        job.show_held()
        return [
            _payload.load(
                (folder / f"{rank}.result").read_bytes(), f"the result of rank {rank}"
            )
            for rank in range(size)
        ]


def _check(fn: Any, args: Any, kwargs: Any, n: Any) -> None:
    """Raises where the call cannot be meant."""
    if not callable(fn):
        raise TypeError(
            f"Expected a function, and its arguments by `args`. Received: fn={fn!r}"
        )
    if isinstance(args, str | bytes) or not isinstance(args, Sequence):
        raise TypeError(
            f"Expected `args` to be a tuple of arguments. Received: args={args!r}"
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(
            f"Expected `kwargs` to be a dict of arguments. Received: kwargs={kwargs!r}"
        )
    if n != "auto" and (isinstance(n, bool) or not isinstance(n, int) or n < 1):
        raise ValueError(
            f'Expected `n` to be a number of ranks from 1 up, or "auto". Received: '
            f"n={n!r}"
        )
    here = discover(os.environ)
    if here is not None and here.size not in (None, 1):
        raise LaunchError(
            f"this process is rank {here.rank} of {here.size} already, started by "
            f"{here.name}: call the function itself, or start this script without a "
            "launcher."
        )


def _carried(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Returns the file that `_call` reads."""
    for value, what in (
        (fn, getattr(fn, "__name__", "the function")),
        (args, "args"),
        (kwargs, "kwargs"),
    ):
        _payload.dump(value, what)
    # Cells of a notebook are files that do not exist, known here alone.
    cells = {
        name: entry
        for name, entry in linecache.cache.items()
        if len(entry) == 4 and entry[1] is None and not os.path.exists(name)
    }
    path = [folder or os.getcwd() for folder in sys.path]
    call = _payload.dump((fn, args, kwargs), "the function and its arguments")
    return pickle.dumps((path, cells)) + call


def _warn_of_opened_gpus() -> None:
    opened = _node.opened_gpus()
    if opened:
        warnings.warn(
            opened_gpus_text(opened),
            RuntimeWarning,
            stacklevel=3,
        )


def opened_gpus_text(opened: Sequence[int]) -> str:
    """Says what it means that this process holds GPUs that ranks will use."""
    which = ", ".join(map(str, opened))
    return (
        f"This process has opened GPU {which}. TensorFlow takes nearly all memory of a "
        "GPU that it opens: ranks that use the same one may find too little. Restart "
        "the kernel and call distkeras.run before anything here builds a model; or "
        "begin the notebook with os.environ['TF_FORCE_GPU_ALLOW_GROWTH'] = 'true'."
    )


@dataclasses.dataclass
class _Line:
    """A line of output."""

    rank: int | None
    text: str
    error: bool
    time: float


class _Job:
    """A launcher that runs: its output appears here, its failures end it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lines: queue.SimpleQueue[_Line | None] = queue.SimpleQueue()
        self._held: list[_Line] = []

    def run(self, command: Sequence[str], environ: Mapping[str, str]) -> int:
        """Runs the job to its end, or to that of a call that is interrupted."""
        sys.stdout.flush()
        sys.stderr.flush()
        began = time.time()
        process = _process.start(command, environ, piped=True, stdin=subprocess.DEVNULL)
        pumps = [
            threading.Thread(target=self._pump, args=(pipe, error), daemon=True)
            for pipe, error in ((process.stdout, False), (process.stderr, True))
            if pipe is not None
        ]
        for pump in pumps:
            pump.start()
        try:
            self._follow(process, len(pumps))
        finally:
            _process.end(process)
            if process.returncode:
                _process.remove_leftovers(began)
        for pump in pumps:
            pump.join(_LATE)
        self._drain()
        return process.returncode

    def _pump(self, pipe: IO[bytes], error: bool) -> None:
        """Hands lines over as they come: only the caller's thread may show them."""
        with pipe:
            for line in pipe:
                rank, rest = _process.split_tag(line)
                text = rest.decode(errors="replace").rstrip("\n")
                self._lines.put(_Line(rank, text, error, time.monotonic()))
        self._lines.put(None)

    def _follow(self, process: subprocess.Popen[bytes], pumps: int) -> None:
        """Shows output until the job has ended, by itself or by a rank's failure."""
        failed = ended = None
        while pumps:
            with contextlib.suppress(queue.Empty):
                line = self._lines.get(timeout=_POLL)
                if line is None:
                    pumps -= 1
                else:
                    self._show(line)
            now = time.monotonic()
            if self._held and now - self._held[0].time > _HELD:
                self.show_held()
            if failed is None and any(self._folder.glob("*.failure")):
                failed = now
            if failed is not None and now - failed > LAST_WORDS:
                return
            if ended is None and process.poll() is not None:
                ended = now
            if ended is not None and now - ended > _LATE:
                return

    def _drain(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                line = self._lines.get_nowait()
                if line is not None:
                    self._show(line)

    def _show(self, line: _Line) -> None:
        if line.rank is None:
            self._held.append(line)
            return
        # Not their file descriptors: a notebook puts objects of its own there.
        stream = sys.stderr if line.error else sys.stdout
        stream.write(f"[{line.rank}] {line.text}\n")
        stream.flush()

    def held_text(self) -> str:
        """Returns what the launcher said itself and was not shown yet."""
        return "\n".join(line.text for line in self._held).strip()

    def show_held(self) -> None:
        """Shows what the launcher said itself."""
        for line in self._held:
            sys.stderr.write(f"{line.text}\n")
        sys.stderr.flush()
        self._held.clear()


def _failures(folder: Path) -> list[dict[str, Any]]:
    """Returns what ranks told of their exceptions, the first first."""
    found = [pickle.loads(path.read_bytes()) for path in folder.glob("*.failure")]
    return sorted(found, key=lambda failure: failure["time"])


def _raise(failures: Sequence[dict[str, Any]], size: int) -> NoReturn:
    """Raises the exception of the first rank that failed."""
    first = failures[0]
    where = f"rank {first['rank']} of {size}, {first['host']}"
    also = [str(failure["rank"]) for failure in failures[1:]]
    note = f"raised on {where}" + (f"; later also on {', '.join(also)}" if also else "")
    cause = RankTraceback(f"on {where}:\n\n{first['text']}")
    error: Exception = RankError(f"{note}: {_last_line(first['text'])}")
    if first["exception"] is not None:
        # It may be an UnpicklingError itself: raised only after this.
        with contextlib.suppress(pickle.UnpicklingError):
            error = _payload.load(first["exception"], "the exception")
            error.add_note(note)
    raise error from cause


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def _how_it_ended(code: int, missing: Sequence[int], size: int, launcher: str) -> str:
    """Says what is known of a job that ended without an exception."""
    how = f"with exit code {code}" if code >= 0 else f"by signal {-code}"
    if missing:
        what = f"none from rank {', '.join(map(str, missing))}, and no exception"
    else:
        what = "all of them, but some rank failed after it had returned"
    lines = [
        f"Expected {size} results. Received: {what}; the job ended {how}. A rank was "
        "killed, crashed, or left by os._exit; or memory ran out. What the ranks "
        "printed stands above.",
    ]
    if launcher:
        lines += ["The launcher says:", launcher]
    return "\n".join(lines)
