"""What `distkeras.run` executes on each rank: the function, and the way back.

`python -m distkeras.launch._worker -m distkeras.launch._call FOLDER`. The function is
read from the folder; the result, or the exception, is written there.
"""

from __future__ import annotations

import linecache
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distkeras._exit import flush
from distkeras._exit import write
from distkeras._launcher import discover
from distkeras.launch import _payload
from distkeras.launch import _worker

_PATIENCE = 10.0
"""Seconds in which `distkeras.run` ends the job after a rank has failed."""


def main(argv: Sequence[str] | None = None) -> None:
    """Calls the function on this rank.

    Args:
        argv: the folder; the words of the process if None.
    """
    (folder,) = map(Path, sys.argv[1:] if argv is None else argv)
    launcher = discover(os.environ)
    rank = launcher.rank if launcher is not None else 0
    try:
        result = _call(folder)
        data = _payload.dump(result, "the result")
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            data = pickle.dumps(None)
        else:
            _fail(error, folder, rank)
    _payload.write(folder / f"{rank}.result", data)


def _call(folder: Path) -> Any:
    """Reads the function and calls it."""
    try:
        with open(folder / "call", "rb") as file:
            path, cells = pickle.load(file)
            data = file.read()
    except FileNotFoundError as error:
        raise RuntimeError(
            f"Expected {folder} to be visible on all hosts, distkeras.run carries the "
            f"function there. On {socket.gethostname()} it is not. Set the environment "
            "variable TMPDIR to a folder that the hosts share."
        ) from error
    sys.path[:] = path
    # The lines of a notebook's cells, for tracebacks.
    linecache.cache.update(cells)
    fn, args, kwargs = _payload.load(data, "the function and its arguments")
    return fn(*args, **kwargs)


def _fail(error: BaseException, folder: Path, rank: int) -> None:
    """Tells the caller of the exception and waits to be ended with the other ranks."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    lines = traceback.format_exception(type(error), error, trace)
    if isinstance(error, SystemExit):
        lines = [f"exited with code {error.code!r}\n"]
    try:
        carried = _payload.dump(error, "the exception")
        _payload.load(carried, "the exception")
    except Exception:
        carried = None
    failure = {
        "rank": rank,
        "host": socket.gethostname(),
        "time": time.time(),
        "text": "".join(lines),
        "exception": carried if isinstance(error, Exception) else None,
    }
    flush()
    _payload.write(folder / f"{rank}.failure", pickle.dumps(failure))
    time.sleep(_PATIENCE)
    # Nobody came: this host does not share the folder, or the caller hangs.
    write("".join(lines))
    _worker._end_job(1)
    os._exit(1)


if __name__ == "__main__":
    main()
