"""How a rank ends its job from a thread, and what limits its own end."""

from __future__ import annotations

import os
import signal
import threading
import time

from distkeras import _leftovers
from distkeras._exit import LAST_WORDS
from distkeras.communicators._mpi import MPICommunicator

# Seconds for `MPI_Abort` to end this process, before it ends itself.
_GRACE = 3.0


def end_job(host: MPICommunicator, code: int, *, speaks: bool = True) -> None:
    """Ends all ranks from a thread, whatever the others of this process do."""
    time.sleep(LAST_WORDS)
    _leftovers.remove_own()
    if speaks:
        threading.Thread(target=host.abort, args=(code,), daemon=True).start()
        time.sleep(_GRACE)
    os._exit(code)


def limit_what_follows(timeout: float) -> None:
    """Has the system end this process if MPI's finalization takes too long.

    It waits for all ranks, also for those of a host that is out of reach by now, and
    no thread of Python runs any more. Not where the program uses the alarm itself.
    """
    unused = (
        hasattr(signal, "setitimer")
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
        and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    )
    if timeout and unused:
        signal.setitimer(signal.ITIMER_REAL, timeout)
