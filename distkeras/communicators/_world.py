"""The world communicator: made on first use, chosen by what the job looks like."""

from __future__ import annotations

import dataclasses
import os
import threading
import warnings

from distkeras._errors import CommunicatorError
from distkeras.communicators._base import Communicator
from distkeras.communicators._launcher import Launcher
from distkeras.communicators._launcher import discover
from distkeras.communicators._mpi import MPICommunicator
from distkeras.communicators._single import SingleCommunicator

VARIABLE = "DISTKERAS_COMMUNICATOR"
WORDS = ("single", "mpi", "nccl")


@dataclasses.dataclass
class _World:
    """The world communicator and why it is that one."""

    communicator: Communicator
    description: str


_lock = threading.RLock()
_world: _World | None = None


def init(communicator: str | None = None) -> Communicator:
    """Makes the world communicator, if it does not exist yet.

    Calling it is optional: the first use of anything that needs to know the rank
    does. Call it yourself to choose the communicator, or before TensorFlow opens
    its GPUs in a script that does so early.

    Args:
        communicator: "single", "mpi" or "nccl". By default what the environment
            variable `DISTKERAS_COMMUNICATOR` says, else what fits: `nccl` if
            the job has several processes and every one of them can use its
            GPU by CuPy and NCCL, `mpi` if it has several, `single` otherwise.

    Returns:
        The world communicator, the same object at every call.

    Raises:
        CommunicatorError: if the word is unknown or not the one of an earlier
            call, if what it needs is missing (the message says what and how
            to get it), or if MPI does not see the processes the launcher started.

    Example:
        >>> init().size
        1
    """
    global _world
    with _lock:
        if _world is None:
            _world = _create(communicator)
        elif communicator is not None and communicator != _world.communicator.name:
            _check_word(communicator, "the argument")
            raise CommunicatorError(
                f"The world communicator is {_world.communicator.name!r} already. "
                f"Received: {communicator!r}. Call distkeras.init(...) once, before "
                "anything else of distkeras."
            )
        return _world.communicator


def world() -> Communicator:
    """Returns the world communicator, made now if this is its first use."""
    return init()


def rank() -> int:
    """Returns this process' number in the world, 0 to `size() - 1`."""
    return world().rank


def size() -> int:
    """Returns the number of processes of the world."""
    return world().size


def local_rank() -> int:
    """Returns this process' number among those of its node."""
    return world().local_rank


def local_size() -> int:
    """Returns the number of processes of the world on this node."""
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
        if _world is not None:
            _world.communicator.close()
        _world = None


def _check_word(word: str, origin: str) -> None:
    if word not in WORDS:
        raise CommunicatorError(
            f"Expected {origin} to be one of {', '.join(WORDS)}. Received: {word!r}"
        )


def _create(argument: str | None) -> _World:
    """Chooses and makes the world communicator."""
    word, origin = argument, "the argument of init"
    if word is None:
        word, origin = os.environ.get(VARIABLE) or None, VARIABLE
    if word is not None:
        _check_word(word, origin)
    launcher = discover(os.environ)
    if launcher is None or launcher.size == 1:
        return _create_alone(word, origin, launcher)
    communicator = MPICommunicator()
    _check_size(launcher, communicator)
    return _World(communicator, f"mpi, {communicator.size} ranks")


def _create_alone(word: str | None, origin: str, launcher: Launcher | None) -> _World:
    """Makes the world of a process that no launcher gave peers."""
    why = "one process" if launcher is None else f"one process by {launcher.name}"
    if word in (None, "single"):
        return _World(SingleCommunicator(), f"single: {why}")
    try:
        mpi = MPICommunicator()
    except CommunicatorError as error:
        warnings.warn(
            f"{origin} asks for {word!r}; going on alone, with 'single'. {error}",
            RuntimeWarning,
            stacklevel=4,
        )
        return _World(SingleCommunicator(), f"single: {why}, MPI cannot be loaded")
    return _World(mpi, f"mpi, {mpi.size} rank: asked for by {origin}")


def _check_size(launcher: Launcher, communicator: Communicator) -> None:
    """Raises if MPI sees another number of processes than the launcher started."""
    if launcher.size is None or launcher.size == communicator.size:
        return
    raise CommunicatorError(
        f"{launcher.name} started {launcher.size} processes, but MPI sees "
        f"{communicator.size}."
    )
