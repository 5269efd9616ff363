"""The world communicator: made on first use, chosen by what the job looks like."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
import warnings
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

from distkeras import _horovod
from distkeras import _logging
from distkeras._errors import CommunicatorError
from distkeras._launcher import Launcher
from distkeras._launcher import discover
from distkeras._logging import LOGGER
from distkeras.communicators import _binding
from distkeras.communicators import _device
from distkeras.communicators import _elastic
from distkeras.communicators import _ending
from distkeras.communicators import _failure
from distkeras.communicators import _startup
from distkeras.communicators import _waiting
from distkeras.communicators import _watchdog
from distkeras.communicators._agreement import agree
from distkeras.communicators._agreement import collectively
from distkeras.communicators._agreement import name_ranks
from distkeras.communicators._base import Communicator
from distkeras.communicators._composed import ComposedCommunicator
from distkeras.communicators._hierarchical import HierarchicalCommunicator
from distkeras.communicators._mpi import MPICommunicator
from distkeras.communicators._mpi_library import begin_world
from distkeras.communicators._mpi_library import load_mpi
from distkeras.communicators._nccl import NCCLCommunicator
from distkeras.communicators._nccl_usable import unusable_reason
from distkeras.communicators._shared_memory import SharedMemoryCommunicator
from distkeras.communicators._single import SingleCommunicator
from distkeras.communicators._timeout import read_timeout

VARIABLE = "DISTKERAS_COMMUNICATOR"
WORDS = ("single", "mpi", "shared_memory", "hierarchical", "nccl")

_HOST_KINDS: dict[str, Callable[[MPICommunicator], Communicator]] = {
    "mpi": lambda host: host,
    "shared_memory": SharedMemoryCommunicator,
    "hierarchical": HierarchicalCommunicator,
}


@dataclasses.dataclass
class _World:
    """The world communicator and why it is that one."""

    communicator: Communicator
    description: str
    numbers: tuple[int, ...] = ()  # of its ranks when the job was started, if elastic


_lock = threading.RLock()
_world: _World | None = None


def init(
    communicator: str | None = None, *, timeout: float | None = None
) -> Communicator:
    """Makes the world communicator, if it does not exist yet.

    Calling it is optional: the first use of anything that needs to know the rank
    does. Call it yourself to choose the communicator, or before TensorFlow opens
    its GPUs in a script that does so early.

    With more than one process it also gives each process its GPU, makes an uncaught
    exception on one rank end the whole job, and watches that no rank waits for ever.

    Args:
        communicator: "single", "mpi", "shared_memory", "hierarchical" or "nccl". By
            default what the environment variable `DISTKERAS_COMMUNICATOR` says, else
            what fits. For one process that is `single`. For several: `nccl` if
            every one of them can use its GPU by CuPy and NCCL, else `shared_memory`
            if all are on one node, else `hierarchical` if any node has several, else
            `mpi`.
        timeout: seconds that a rank may wait for others in a collective, before the
            job is ended with a report of where each rank stands; 0 for no limit. By
            default what the environment variable `DISTKERAS_TIMEOUT` says, else 600.
            Ranks that have left, or are in another collective, are noticed within
            seconds in any case. A later call may change it.

    Returns:
        The world communicator, the same object at every call.

    Raises:
        CommunicatorError: if the word is unknown or not the one of an earlier
            call, if what it needs is missing (the message says what and how
            to get it), or if MPI does not see the processes the launcher started.
        MismatchError: on every rank, if ranks ask for different communicators.

    Example:
        >>> init().size
        1
    """
    global _world
    with _lock:
        if communicator is not None:
            _check_word(communicator, "the argument of init")
        if timeout is not None or _world is None:
            seconds = read_timeout(timeout)
            _watchdog.set_timeout(seconds)
        if _world is None:
            _world = _create(communicator, seconds)
        elif communicator not in (None, _world.communicator.name):
            raise CommunicatorError(
                f"Expected one choice of communicator, it is "
                f"{_world.communicator.name!r} already. Received: {communicator!r}. "
                "Call distkeras.init(...) once, before anything else of distkeras."
            )
        return _world.communicator


def world() -> Communicator:
    """Returns the world communicator, made now if this is its first use.

    Returns:
        The communicator of all ranks, the same object at every call.

    Raises:
        CommunicatorError: as `init` does.

    Example:
        >>> world().size
        1
    """
    return init()


def rank() -> int:
    """Returns this process' number in the world.

    Returns:
        0 to `size() - 1`; 0 in a process that was started alone.

    Raises:
        CommunicatorError: as `init` does, at the first use.

    Example:
        >>> rank()
        0
    """
    return world().rank


def size() -> int:
    """Returns the number of processes of the world.

    Returns:
        1 or more; 1 in a process that was started alone.

    Raises:
        CommunicatorError: as `init` does, at the first use.

    Example:
        >>> size()
        1
    """
    return world().size


def local_rank() -> int:
    """Returns this process' number among those of its node.

    Returns:
        0 to `local_size() - 1`: which of the node's GPUs is this rank's.

    Raises:
        CommunicatorError: as `init` does, at the first use.

    Example:
        >>> local_rank()
        0
    """
    return world().local_rank


def local_size() -> int:
    """Returns the number of processes of the world on this node.

    Returns:
        1 to `size()`.

    Raises:
        CommunicatorError: as `init` does, at the first use.

    Example:
        >>> local_size()
        1
    """
    return world().local_size


def describe() -> str:
    """Returns, in one line, which communicator was chosen and why."""
    init()
    with _lock:
        return "none" if _world is None else _world.description


def shutdown() -> None:
    """Closes the world communicator (collective); the next use makes a new one."""
    global _world
    with _lock:
        current, _world = _world, None
        if current is not None:
            _watchdog.shut_down()
            _failure.uninstall()
            _device.release_device()
            current.communicator.close()
            _elastic.stop()


def recover() -> Communicator:
    """Makes the world of the ranks that are left; collective among them.

    To be called after `_elastic.agreed` has said no. Should another rank be lost
    meanwhile, it begins again.

    Returns:
        The new world communicator, in which ranks are numbered anew, in order.

    Raises:
        CommunicatorError: if there is no world yet, or the ranks that are left cannot
            make one.
    """
    global _world
    with _lock:
        previous = _world
        if previous is None:
            raise CommunicatorError("Expected a world to recover. Received: none")
        since = _elastic.lost_since()
        timeout = _watchdog.abandon()

        def end(code: int) -> None:
            _ending.end_job(_host_of(previous.communicator), code)

        with _elastic.limited(timeout or 0.0, end):
            while True:
                failure: Exception | None = None
                made: _World | None = None
                _watchdog.abandon()  # that of an attempt that failed
                try:
                    made = _create_again(_elastic.shrink(), previous, timeout)
                except Exception as error:
                    if not _elastic.is_loss(error):
                        failure = error
                if _elastic.agreed(made is not None) and made is not None:
                    break
                if failure is not None:
                    raise failure
        _world = made
        _tell(previous, made, time.monotonic() - since)
        if made.communicator.size == 1:
            _elastic.stop()
        return made.communicator


def _tell(previous: _World, made: _World, seconds: float) -> None:
    """Says which ranks were lost, by the numbers that the launcher gave them."""
    before, now = previous.communicator, made.communicator
    _logging.renumber(before.rank, now.rank)
    lost = [rank for rank in previous.numbers if rank not in made.numbers]
    if now.rank == 0:
        LOGGER.warning(
            "lost %s (as numbered at the start); went on after %.3f s as %s",
            name_ranks(lost),
            seconds,
            made.description,
        )


def _create_again(comm: Any, previous: _World, timeout: float | None) -> _World:
    """Makes the world of the ranks of an MPI communicator; collective."""
    begin_world(comm)
    _waiting.start_over()
    host = MPICommunicator(comm)
    _failure.rebind(host)
    if timeout is not None:
        _watchdog.start(host, timeout)
    mine = load_mpi().COMM_WORLD.Get_rank()
    numbers = tuple(host.allgather_object(mine))
    why = "what is left"
    if host.size == 1:
        text = "single (one process is left)"
        return _World(SingleCommunicator(), text, numbers)
    made: Communicator
    if previous.communicator.name == "nccl":
        made = NCCLCommunicator(host)
    else:
        made = _HOST_KINDS[previous.communicator.name](host)
    return _World(made, _line(made, host.library, why), numbers)


def _host_of(communicator: Communicator) -> MPICommunicator:
    if isinstance(communicator, ComposedCommunicator):
        return communicator.host
    if isinstance(communicator, MPICommunicator):
        return communicator
    raise TypeError(f"Expected a communicator of MPI. Received: {communicator.name}")


def _check_word(word: str, origin: str) -> None:
    if word not in WORDS:
        raise CommunicatorError(
            f"Expected {origin} to be one of {', '.join(WORDS)}. Received: {word!r}"
        )


def _create(argument: str | None, timeout: float) -> _World:
    """Chooses and makes the world communicator."""
    word, origin = argument, "the argument of init"
    if word is None:
        word, origin = os.environ.get(VARIABLE) or None, VARIABLE
    if word is not None:
        _check_word(word, origin)
    launcher = discover(os.environ)
    _horovod.warn_of_ignored_variables(os.environ, launcher)
    if launcher is None or launcher.size == 1:
        if launcher is not None:
            _binding.warn_of_bound_ranks(SingleCommunicator())
        return _create_alone(word, origin, launcher)
    return _create_together(word, origin, launcher, timeout)


def _create_alone(word: str | None, origin: str, launcher: Launcher | None) -> _World:
    """Makes the world of a process that no launcher gave peers."""
    why = "one process" if launcher is None else f"one process, by {launcher.name}"
    if word in (None, "single"):
        return _World(SingleCommunicator(), f"single ({why})")
    try:
        host = MPICommunicator()
    except CommunicatorError as error:
        if word == "nccl":
            raise
        warnings.warn(
            f"{origin} asks for {word!r}, but this process is alone and goes on with "
            f"'single'. {error}",
            RuntimeWarning,
            stacklevel=4,
        )
        return _World(SingleCommunicator(), f"single ({why}; MPI cannot be loaded)")
    if word != "nccl":
        made = _HOST_KINDS[word](host)
        return _World(made, _line(made, host.library, f"{origin}={word}"))
    nccl = NCCLCommunicator(host)
    return _World(nccl, _line(nccl, nccl.library, f"{origin}={word}"))


def _create_together(
    word: str | None, origin: str, launcher: Launcher, timeout: float
) -> _World:
    """Makes the world of one of several processes; collective."""
    with _startup.guard(timeout, launcher.local_size):
        least = _elastic.requested(os.environ)
        if least is not None:
            mpi = load_mpi()
            _elastic.start(mpi, mpi.COMM_WORLD, least)
        host = MPICommunicator()
        _check_size(launcher, host)
        _failure.install(host)
        _watchdog.start(host, timeout)
    agree(host, "the choice of communicator", [f"{VARIABLE}={word or '(automatic)'}"])
    _binding.warn_of_bound_ranks(host)
    device = _pin(host)
    if word is not None:
        why = f"{origin}={word}"
    else:
        word, why = _choose(host, launcher)
    if word == "single":
        return _separate(host, origin)
    numbers = tuple(range(host.size))
    if word != "nccl":
        made = _HOST_KINDS[word](host)
        return _World(made, _line(made, host.library, why, device), numbers)
    nccl = NCCLCommunicator(host)
    library = f"{nccl.library}, {host.library}"
    return _World(nccl, _line(nccl, library, why, device), numbers)


def _choose(host: Communicator, launcher: Launcher) -> tuple[str, str]:
    """Returns the word that fits on all ranks, and why."""
    why = f"started by {launcher.name}"
    reasons = host.allgather_object(unusable_reason())
    lacking = [rank for rank, reason in enumerate(reasons) if reason is not None]
    if not lacking:
        return "nccl", why
    where = "" if len(lacking) == host.size else f" on {name_ranks(lacking)}"
    sizes = host.allgather_object(host.local_size)
    if host.local_size == host.size:
        word = "shared_memory"
    else:
        word = "hierarchical" if max(sizes) > 1 else "mpi"
    with_gpu = host.allgather_object(_device.pinned_device() is not None)
    if any(with_gpu) and host.rank == 0:
        seeing = [rank for rank, sees in enumerate(with_gpu) if sees]
        _logging.configure(0).warning("%s", _unused(seeing, word, lacking, reasons))
    return word, f"{why}; no nccl{where}: {reasons[lacking[0]]}"


def _unused(
    seeing: Sequence[int],
    word: str,
    lacking: Sequence[int],
    reasons: Sequence[str | None],
) -> str:
    """Says why GPUs will not talk to each other.

    Args:
        seeing: the ranks that have a GPU.
        word: the communicator that was chosen.
        lacking: the ranks that cannot use NCCL.
        reasons: by rank, what it lacks.
    """
    return (
        f"GPUs are visible on {name_ranks(seeing)}, but gradients will go through the "
        f"host's memory ({word}): NCCL cannot be used on {name_ranks(lacking)}: "
        f"{reasons[lacking[0]]}. Mend that, or set {VARIABLE}={word} if it is meant."
    )


def _pin(host: Communicator) -> str:
    """Gives every rank its GPU; raises on all ranks if two got the same."""
    description = collectively(
        host,
        _device.pin_device,
        host.local_rank,
        what="giving each rank its GPU",
    )
    pinned = _device.pinned_device()
    mine = (None if pinned is None else pinned.uuid, _device.sharing_allowed())
    uuids, allowed = zip(*host.allgather_object(mine), strict=True)
    _device.check_distinct(uuids, host.hosts, allowed)
    return description


def _separate(host: Communicator, origin: str) -> _World:
    """Makes a world of one for each process, as its user insists on."""
    count, first = host.size, host.rank == 0
    _watchdog.shut_down()
    _failure.uninstall()
    host.close()
    _elastic.stop()
    if first:
        warnings.warn(
            f"{origin} asks for 'single': {count} processes train {count} separate "
            "models and exchange nothing.",
            RuntimeWarning,
            stacklevel=5,
        )
    why = f"{origin}=single; {count} processes that exchange nothing"
    return _World(SingleCommunicator(), f"single ({why})")


def _check_size(launcher: Launcher, host: MPICommunicator) -> None:
    """Raises if MPI sees another number of processes than the launcher started."""
    if launcher.size is None or launcher.size == host.size:
        return
    raise CommunicatorError(
        f"Expected MPI to see the {launcher.size} processes that {launcher.name} "
        f"started. Received: {host.size} ({host.library}). Each would train a model "
        "of its own and exchange nothing. Either mpi4py loaded another MPI than the "
        "launcher's: use the mpiexec of that library, or name the launcher's libmpi "
        "in the environment variable MPI4PY_LIBMPI. Or srun was started without the "
        "protocol that library speaks: try `srun --mpi=pmix` (`srun --mpi=list` "
        "shows what there is)."
    )


def _line(
    communicator: Communicator, library: str, why: str, device: str | None = None
) -> str:
    """Returns the description of a communicator, one line."""
    ranks, nodes = communicator.size, len(set(communicator.hosts))
    parts = [
        f"{ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}",
        library,
    ]
    if device is not None:
        parts.append(device)
    return f"{communicator.name} ({', '.join(parts)}; {why})"
