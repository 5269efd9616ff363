"""Finds out from the environment which launcher started this process, if any.

Nothing here imports MPI: a process that no launcher started must not pay for it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import NamedTuple

ELASTIC = "DISTKERAS_ELASTIC"
"""The variable by which ranks know that their job outlives lost ones."""

GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"
"""TensorFlow's own, for taking a GPU's memory as it is needed."""


@dataclasses.dataclass(frozen=True)
class Launcher:
    """What the environment says about the job this process belongs to.

    Attributes:
        name: the launcher, in words for messages.
        rank: this process' number in the job.
        size: number of processes of the job; `None` where the launcher leaves
            it to MPI (a bare PMIx server).
        local_rank: number among the processes of this node, where known.
        local_size: number of processes on this node, where known.
    """

    name: str
    rank: int
    size: int | None
    local_rank: int | None = None
    local_size: int | None = None


class _Variables(NamedTuple):
    """The environment variables of one launcher."""

    name: str
    rank: str
    size: str | None
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]


# In order of precedence: a launcher that runs inside a Slurm allocation leaves
# Slurm's variables in place, so the inner one must be asked first.
_LAUNCHERS = (
    _Variables(
        "Open MPI's mpiexec",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Variables(
        "MVAPICH's mpiexec",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Variables(
        "a PMI launcher (MPICH's or Intel MPI's mpiexec)",
        "PMI_RANK",
        "PMI_SIZE",
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    ),
    # sbatch and salloc set SLURM_PROCID and SLURM_NTASKS for the batch script
    # too, which is one process whatever they say; only srun sets the step's size.
    _Variables(
        "Slurm's srun",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        ("SLURM_LOCALID",),
        (),
    ),
    _Variables("a PMIx launcher", "PMIX_RANK", None, (), ()),
)


def discover(environ: Mapping[str, str]) -> Launcher | None:
    """Returns the launcher that `environ` tells of, or `None` without one.

    Args:
        environ: the environment variables, usually `os.environ`.

    Returns:
        The innermost launcher whose variables are complete and are numbers.

    Example:
        >>> discover({"PMI_RANK": "1", "PMI_SIZE": "3"}).rank
        1
        >>> discover({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) is None
        True
    """
    for variables in _LAUNCHERS:
        rank = _number(environ, (variables.rank,))
        size = None
        if variables.size is not None:
            size = _number(environ, (variables.size,))
            if size is None:
                continue
        if rank is None:
            continue
        local_size = _number(environ, variables.local_size)
        if variables.rank == "SLURM_PROCID":
            local_size = _slurm_local_size(environ)
        return Launcher(
            name=variables.name,
            rank=rank,
            size=size,
            local_rank=_number(environ, variables.local_rank),
            local_size=local_size,
        )
    return None


def _number(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    """Returns the first of the variables that is a non-negative integer."""
    for name in names:
        value = environ.get(name, "").strip()
        if value.isdecimal():
            return int(value)
    return None


def _slurm_local_size(environ: Mapping[str, str]) -> int | None:
    """Returns this node's entry of `SLURM_STEP_TASKS_PER_NODE` ("2(x3),1")."""
    node = _number(environ, ("SLURM_NODEID",))
    if node is None:
        return None
    counts = expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return counts[node] if node < len(counts) else None


def expand_counts(text: str) -> list[int]:
    """Expands Slurm's short form of a number for each node.

    Args:
        text: such as `SLURM_TASKS_PER_NODE` holds.

    Returns:
        The numbers; empty if `text` is no such list.

    Example:
        >>> expand_counts("2(x3),1")
        [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
