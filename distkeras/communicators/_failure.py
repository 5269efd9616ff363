"""An error on one rank ends the job, where MPI alone would leave the others waiting.

Two ways out of a script are watched. An uncaught exception arrives at
`sys.excepthook`. A `sys.exit` with an error code arrives nowhere: Python drops the
exception and goes on to finalize MPI, which waits for peers that wait for this rank.
It is noticed when the exception object is dropped by the interpreter itself, with
no Python frame left that could have caught it.
"""

from __future__ import annotations

import atexit
import builtins
import dataclasses
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any
from typing import NoReturn

from distkeras import _leftovers
from distkeras._exit import INTERRUPTED
from distkeras._exit import LAST_WORDS
from distkeras._exit import write
from distkeras.communicators._base import Communicator

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


@dataclasses.dataclass
class _Watch:
    """What to end, and what to put back."""

    communicator: Communicator
    hook: _Hook
    exit: Callable[..., NoReturn]
    process: int


_watch: _Watch | None = None


def install(communicator: Communicator) -> bool:
    """Makes an error that ends this rank's script end all ranks.

    Args:
        communicator: what to abort; nothing is installed for one rank.

    Returns:
        Whether it was installed. An interactive session survives its errors, and
        is left alone.
    """
    global _watch
    if communicator.size == 1 or _watch is not None or is_interactive():
        return False
    _watch = _Watch(communicator, sys.excepthook, sys.exit, os.getpid())
    sys.excepthook = _excepthook
    sys.exit = _exit
    atexit.register(uninstall)
    return True


def uninstall() -> None:
    """Puts back what `install` replaced, unless others replaced it since."""
    global _watch
    watch, _watch = _watch, None
    if watch is None:
        return
    atexit.unregister(uninstall)
    if sys.excepthook is _excepthook:
        sys.excepthook = watch.hook
    if sys.exit is _exit:
        sys.exit = watch.exit


def rebind(communicator: Communicator) -> None:
    """Goes on with fewer ranks, numbered anew."""
    if _watch is not None:
        _watch.communicator = communicator


def is_interactive() -> bool:
    """Whether somebody types at this process."""
    return hasattr(builtins, "get_ipython") or hasattr(sys, "ps1")


def _active() -> _Watch | None:
    """Returns the watch in the process that installed it, not in its forks."""
    return _watch if _watch is not None and _watch.process == os.getpid() else None


def _excepthook(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Shows an uncaught exception with its rank and ends the job."""
    watch = _active()
    if watch is None:
        sys.__excepthook__(kind, error, trace)
        return
    rank, size = watch.communicator.rank, watch.communicator.size
    prefix = f"[rank {rank}] "
    try:
        if issubclass(kind, KeyboardInterrupt):
            write(f"{prefix}interrupted")
        elif watch.hook is sys.__excepthook__:
            text = "".join(traceback.format_exception(kind, error, trace))
            write("".join(prefix + line for line in text.splitlines(keepends=True)))
        else:
            host = watch.communicator.hosts[rank]
            write(f"{prefix}uncaught exception on rank {rank} of {size}, {host}:")
            watch.hook(kind, error, trace)
    finally:
        code = INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1
        _abort(watch, code)


def _abort(watch: _Watch, code: int) -> None:
    time.sleep(LAST_WORDS)
    _leftovers.remove_own()
    watch.communicator.abort(code)


def _exit(status: Any = None, /) -> NoReturn:
    """Exits as `sys.exit` does, noticed if the status tells of an error."""
    raise _Exit(*(() if status is None else (status,)))


class _Exit(SystemExit):
    """A `SystemExit` that ends the job if it ends the process with an error."""

    def __del__(self) -> None:
        """Ends the job if no frame is left: then Python handles the exit."""
        watch = _active()
        if watch is None or self.code in (None, 0):
            return
        if threading.current_thread() is not threading.main_thread():
            return
        if sys._getframe().f_back is not None:
            return  # somebody caught it, and goes on
        if isinstance(self.code, int):
            code, text = self.code & 0xFF, f"exited with code {self.code & 0xFF}"
        else:  # Python would print it after this object is gone
            code, text = 1, str(self.code)
        if code:
            write(f"[rank {watch.communicator.rank}] {text}")
            _abort(watch, code)
