"""Ranks that are lost while the others go on: noticed once, and told to all.

Open MPI's ULFM makes a call that waits for a dead process fail. The first rank that
finds one dead revokes every communicator, so that no rank waits on; then those that
are left agree, and shrink MPI's world to themselves. Whoever waits without MPI, in
shared memory or for a device, asks `lost()` meanwhile.

Nothing here runs in a job that is not elastic: `active()` is false, and a dead rank
ends the job.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import threading
import time
import weakref
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from contextlib import contextmanager
from contextlib import suppress
from typing import Any

from distkeras import _leftovers
from distkeras._errors import CommunicatorError
from distkeras._exit import STALLED
from distkeras._exit import write
from distkeras._launcher import ELASTIC

_TOLERANT = "OMPI_MCA_mpi_ft_enable"  # what `mpiexec --with-ft ulfm` tells its ranks

# Seconds in which MPI must have heard of a process that is gone; else it never will,
# as after `os._exit`, which MPI does not take for a failure.
_HEARSAY = 3.0
_LOOK = 0.02


@dataclasses.dataclass
class _Job:
    """An elastic job, as this rank sees it.

    Attributes:
        mpi: the module `mpi4py.MPI`.
        control: a communicator of all ranks that are left, for nothing else.
        since: when a loss was noticed, of `time.monotonic`; None while none is.
    """

    mpi: Any
    control: Any
    since: float | None = None


_job: _Job | None = None
_least = 1
_losses = 0
_lock = threading.Lock()
_communicators: weakref.WeakSet[Any] = weakref.WeakSet()
_devices: weakref.WeakSet[Any] = weakref.WeakSet()


def requested(environ: Mapping[str, str]) -> int | None:
    """Returns the least number of ranks to go on with, None in an ordinary job.

    Raises:
        CommunicatorError: if `DISTKERAS_ELASTIC` is no number of ranks.
    """
    word = environ.get(ELASTIC, "")
    if not word:
        return None
    if not word.isdecimal() or int(word) < 1:
        raise CommunicatorError(
            f"Expected {ELASTIC} to be the least number of ranks to go on with, from "
            f"1 up. Received: {word!r}"
        )
    return int(word)


def start(mpi: Any, comm: Any, least: int) -> None:
    """Begins to watch for lost ranks; collective.

    Args:
        mpi: the module `mpi4py.MPI`.
        comm: all ranks.
        least: as `requested` returned it.

    Raises:
        CommunicatorError: if MPI was not started so that it outlives a process.
    """
    global _job, _least
    tolerant = os.environ.get(_TOLERANT, "") in ("1", "true")
    if not tolerant or "Open MPI" not in mpi.Get_library_version():
        raise CommunicatorError(
            f"Expected Open MPI 5 started by `mpiexec --with-ft ulfm`, as {ELASTIC} "
            "asks for a job that outlives its ranks (`distkeras run --elastic` does "
            f"it). Received: {str(mpi.Get_library_version()).split(',')[0]}, "
            f"{_TOLERANT} is {os.environ.get(_TOLERANT)!r}"
        )
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise CommunicatorError(
            "Expected MPI's thread level to be MPI_THREAD_MULTIPLE, which an elastic "
            "job needs."
        )
    _job, _least = _Job(mpi, comm.Dup()), least
    process = os.getpid()

    def finalize() -> None:
        if os.getpid() != process or mpi.Is_finalized():
            return
        if _losses:
            _leftovers.remove_own()
        else:
            mpi.Finalize()

    # Not by mpi4py: with a rank lost, MPI may wait for it without end.
    atexit.register(finalize)


def stop() -> None:
    """Ends the watch: from here on a lost rank is an error like any other."""
    global _job
    _job = None


def active() -> bool:
    """Whether this job goes on without ranks that it loses."""
    return _job is not None


def least() -> int:
    """Returns the number of ranks below which an elastic job stops.

    Also where a single rank is left, which has none to lose.
    """
    return _least


def register(communicator: Any) -> None:
    """Has a communicator's `mpi_comm` revoked when a rank is lost."""
    if _job is not None:
        _communicators.add(communicator)


def register_device(communicator: Any) -> None:
    """Has a communicator's `interrupt()` called when a rank is lost."""
    _devices.add(communicator)


def lost() -> bool:
    """Whether a rank has been lost that has not been left behind yet."""
    return _job is not None and _job.since is not None


def lost_since() -> float:
    """Returns when that was noticed here, of `time.monotonic`."""
    return time.monotonic() if _job is None or _job.since is None else _job.since


LOST = (
    "A rank has been lost: it was killed, or has crashed. The methods of "
    "`distkeras.Trainer` go on without it, other collectives cannot."
)


def failed(error: BaseException) -> bool:
    """Looks at an error that came out of a collective, on whatever thread.

    Returns:
        Whether it tells of a lost rank.
    """
    job = _job
    kind = getattr(error, "Get_error_class", None)
    if job is None or kind is None:
        return False
    losses = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")
    if kind() not in [getattr(job.mpi, name) for name in losses]:
        return False
    _notice(job)
    return True


def look() -> bool:
    """Asks MPI whether a rank is lost; for the watchdog's thread. Never waits."""
    job = _job
    if job is None:
        return False
    if job.since is None and _known(job):
        _notice(job)
    return job.since is not None


def confirm() -> bool:
    """Waits until MPI knows of a process that was seen to be gone.

    Returns:
        Whether it does: only then can the ranks that are left go on.
    """
    deadline = time.monotonic() + _HEARSAY
    while _job is not None and not look():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK)
    return _job is not None


def _known(job: _Job) -> bool:
    """Whether MPI knows of a dead rank, or another rank has told of one."""
    if job.control.Is_revoked():
        return True
    group = job.control.Get_failed()
    count = group.Get_size()
    group.Free()
    return bool(count)


def _notice(job: _Job) -> None:
    """Lets no rank wait on: everything it may wait in comes back with an error."""
    with _lock:
        if job.since is not None:
            return
        job.since = time.monotonic()
        revoked = [communicator.raw for communicator in list(_communicators)]
    for comm in [*revoked, job.control]:
        with suppress(job.mpi.Exception):  # another rank may have done so
            if comm:  # it has not been freed
                comm.Revoke()
    for device in list(_devices):
        device.interrupt()


def is_loss(error: BaseException) -> bool:
    """Whether an error that ended something came of a lost rank.

    Frameworks wrap what their host calls raise: not the error is looked at, but
    whether there is a loss. That may be known a moment after the error.
    """
    if _job is None:
        return False
    if lost() or look():
        return True
    of_mpi = hasattr(error, "Get_error_class") or isinstance(error, CommunicatorError)
    wrapped = any(word in str(error) for word in ("mpi4py", "CommunicatorError"))
    return (of_mpi or wrapped) and confirm()


def agreed(done: bool) -> bool:
    """Returns whether all ranks have come to this point, and all have `done`.

    Collective among the ranks that are left, and the same on each of them: whatever
    happens meanwhile, either all go on from here or none does.
    """
    job = _job
    if job is None:
        return done
    try:
        return bool(job.control.Agree(int(done)))
    except job.mpi.Exception:  # on all of them: another one is gone
        return False


def shrink() -> Any:
    """Returns an MPI communicator of the ranks that are left; collective among them.

    What is made from it is watched anew.
    """
    global _losses
    job = _job
    if job is None:
        raise CommunicatorError("Expected an elastic job. Received: an ordinary one")
    _losses += 1
    shrunk = job.control.Shrink()
    with _lock:
        _communicators.clear()
        _devices.clear()
        job.control, job.since = shrunk, None
    return shrunk


@contextmanager
def limited(timeout: float, end: Callable[[int], None]) -> Iterator[None]:
    """Ends the job if the body takes too long: a rank that is left may be stuck.

    Args:
        timeout: seconds, 0 for no limit.
        end: what ends the job, with an exit code.
    """

    def late() -> None:
        write(
            "[distkeras] a rank was lost, and those that are left have not come "
            f"together within {timeout:g} s: one of them is stuck. The job is ended."
        )
        end(STALLED)

    timer = threading.Timer(timeout or threading.TIMEOUT_MAX, late)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
