"""What runs on each rank: prepares the process, then becomes the user's script.

`python -m distkeras.launch._worker script.py args` behaves like `python script.py
args`, but for three things. Threads and GPU are this rank's share of the node,
chosen before any framework is imported. A failure ends the whole job, also where
the script has not started MPI yet. And the rank dies with the launcher.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable
from collections.abc import MutableMapping
from collections.abc import Sequence
from typing import Any

from distkeras import _leftovers
from distkeras._cores import usable_cores
from distkeras._exit import INTERRUPTED
from distkeras._exit import LAST_WORDS
from distkeras._exit import STACKS
from distkeras._exit import flush
from distkeras._exit import tell_launcher
from distkeras._exit import write
from distkeras._launcher import GROWTH
from distkeras._launcher import Launcher
from distkeras._launcher import discover
from distkeras.launch import _node

_PR_SET_PDEATHSIG = 1
_OWN_FILES = frozenset({__file__, runpy.__file__, "<frozen runpy>"})


def main(argv: Sequence[str] | None = None) -> None:
    """Prepares this rank and runs the user's program in this process.

    Args:
        argv: `script args...` or `-m module args...`; those of the process if
            None.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    launcher = discover(os.environ)
    if launcher is not None:
        _die_with_parent()
        prepare(os.environ, launcher)
        # For ranks that wait for this one to start MPI.
        with contextlib.suppress(OSError, RuntimeError, ValueError, AttributeError):
            faulthandler.register(STACKS, all_threads=True)
    _write_whole_lines()
    try:
        _run_as_main(words)
    except SystemExit as exit_:
        code = _exit_code(exit_)
        if code == 0:
            _end_well(launcher)
            raise
        _report_exit(exit_, launcher)
    except BaseException as error:
        _report_error(error, launcher)
        code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    else:
        _end_well(launcher)
        return
    _end_job(code)
    sys.exit(code)


def prepare(environ: MutableMapping[str, str], launcher: Launcher) -> None:
    """Gives this rank its share of the node's cores and GPUs.

    A variable that the user has set stays as it is. A rank that is alone on its
    node keeps all cores.

    Args:
        environ: the environment, changed in place.
        launcher: who started this rank, and which of the node's ranks it is.
    """
    local_size = launcher.local_size or 1
    if local_size > 1:
        threads = max(1, usable_cores() // local_size)
        environ.setdefault("OMP_NUM_THREADS", str(threads))
        environ.setdefault("TF_NUM_INTRAOP_THREADS", str(threads))
        # An operation that waits for other ranks holds one of these threads:
        # with a single one, nothing else of the graph could run meanwhile.
        environ.setdefault("TF_NUM_INTEROP_THREADS", str(max(2, threads)))
    gpus = _node.visible_gpus(environ)
    if len(gpus) > 1 and launcher.local_rank is not None:
        environ["CUDA_VISIBLE_DEVICES"] = gpus[launcher.local_rank % len(gpus)]
    if gpus and launcher.size != 1:
        # A model that is made before the `Trainer` opens the GPU, and TensorFlow would
        # take all of its memory; NCCL needs some.
        environ.setdefault(GROWTH, "true")


def _die_with_parent() -> None:
    """Has the kernel end this process when its launcher dies: no orphans."""
    with contextlib.suppress(OSError, AttributeError):  # not on Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _write_whole_lines() -> None:
    """Writes output line by line: ranks then mix by lines, and none comes late."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure: Callable[..., None] | None = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(line_buffering=True, write_through=False)


def _run_as_main(words: Sequence[str]) -> None:
    """Runs `script args...` or `-m module args...` as Python itself would."""
    if words[0] == "-m":
        sys.argv = list(words[1:])
        sys.path[0] = os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(words)
    # For a folder or a zip file, run_path puts the program itself on the path.
    if os.path.isdir(words[0]):
        del sys.path[0]
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
    runpy.run_path(words[0], run_name="__main__")


def _exit_code(exit_: SystemExit) -> int:
    """Returns the code that Python exits with, within one byte."""
    if exit_.code is None:
        return 0
    if not isinstance(exit_.code, int):
        return 1
    # The system keeps the low byte: a failure must not turn into success.
    return (exit_.code & 0xFF) or int(exit_.code != 0)


def _report_exit(exit_: SystemExit, launcher: Launcher | None) -> None:
    """Prints what Python would print, before the job is ended."""
    if isinstance(exit_.code, int):
        text = f"exited with code {exit_.code}; ending the other ranks"
    else:
        text = str(exit_.code)
    _write(text, launcher)


def _report_error(error: BaseException, launcher: Launcher | None) -> None:
    """Shows an uncaught exception as Python would, without this module's frames."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in _OWN_FILES:
        trace = trace.tb_next
    if sys.excepthook is not sys.__excepthook__:
        # The script's own hook; or that of a communicator, which ends the job.
        sys.excepthook(type(error), error, trace)
        return
    _write("".join(traceback.format_exception(type(error), error, trace)), launcher)


def _write(text: str, launcher: Launcher | None) -> None:
    """Writes lines to stderr in one piece, with the rank before each."""
    lines = text.splitlines()
    if launcher is not None and launcher.size != 1:
        lines = [f"[rank {launcher.rank}] {line}" for line in lines]
    write("\n".join(lines))


def _end_well(launcher: Launcher | None) -> None:
    """Says once if the ranks did the same work side by side, then tells the launcher.

    Several ranks that are to know of each other start MPI, by whatever means. Without
    Keras nothing was trained that this could be said of.
    """
    mpi: Any = sys.modules.get("mpi4py.MPI")
    together = mpi is not None and mpi.Is_initialized()
    several = launcher is not None and launcher.rank == 0 and (launcher.size or 1) > 1
    if several and "keras" in sys.modules and not together:
        _write(
            "warning: the program ended without any use of distkeras: each rank ran "
            "all of it by itself, and a model that was trained is another one on every "
            "rank. Train by `distkeras.Trainer(model).fit(...)`.",
            launcher,
        )
    tell_launcher("ended")


def _end_job(code: int) -> None:
    """Makes the launcher end all ranks with this code, as far as it must be told.

    Open MPI does so as soon as one rank exits with a code that is not zero. After
    MPI has started, leaving without `Abort` could wait in `MPI_Finalize` for the
    others. MPICH and Intel MPI overlook ranks that fail before MPI has started;
    they take the message that `MPI_Abort` would send (PMI-1's wire protocol).
    """
    flush()
    tell_launcher("failed", str(code))
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized():
        if not mpi.Is_finalized():
            _leftovers.remove_own()
            mpi.COMM_WORLD.Abort(code)
        return
    connection = os.environ.get("PMI_FD", "")
    if connection.isdecimal():
        time.sleep(LAST_WORDS)
        with contextlib.suppress(OSError):
            os.write(int(connection), f"cmd=abort exitcode={code}\n".encode())


if __name__ == "__main__":
    main()
