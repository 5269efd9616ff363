"""Says so where a launcher has bound each rank to one core, and cores lie idle.

Open MPI's `mpiexec` does that by default for two ranks: all threads of TensorFlow then
share that one core, and a rank trains at a fraction of the machine's speed.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from typing import NamedTuple

from distkeras import _logging
from distkeras._cores import cpu_quota
from distkeras._cores import physical_cores
from distkeras._exit import STATUS
from distkeras.communicators._agreement import name_ranks
from distkeras.communicators._base import Communicator


class Binding(NamedTuple):
    """Where one rank runs.

    Attributes:
        cores: that it may run on.
        of_node: that it could be let run on.
        ranks: on its node.
    """

    cores: int
    of_node: int
    ranks: int


def warn_of_bound_ranks(host: Communicator) -> None:
    """Logs a warning, on rank 0, if ranks are bound too narrowly; collective.

    Not under `distkeras run`, which binds no rank unless it is told to.

    Args:
        host: all ranks.
    """
    mine = None if os.environ.get(STATUS) else find_binding(host.local_size)
    text = complaint(host.allgather_object(mine))
    if text is not None and host.rank == 0:
        _logging.configure(0).warning("%s", text)


def find_binding(ranks: int) -> Binding | None:
    """Returns where this process runs; None where the system does not tell.

    Args:
        ranks: on this node.
    """
    if not hasattr(os, "sched_getaffinity"):
        return None
    own = physical_cores(os.sched_getaffinity(0))
    return Binding(own, _most_cores() if own < 2 else own, ranks)


def complaint(bindings: Sequence[Binding | None]) -> str | None:
    """Returns what to tell the user of the ranks' bindings; None if all is well.

    Args:
        bindings: by rank.

    Example:
        >>> complaint([Binding(1, 2, 2)] * 2) is None  # they share the cores anyway
        True
    """
    bound = {
        rank: each
        for rank, each in enumerate(bindings)
        if each is not None and each.cores < 2 and each.of_node // each.ranks > 1
    }
    if not bound:
        return None
    first = next(iter(bound.values()))
    each = "" if len(bound) == 1 else " each"
    return (
        f"The launcher has bound {name_ranks(list(bound))} to 1 core{each}, of "
        f"{first.of_node} for {first.ranks} rank{'s' * (first.ranks > 1)} of the node: "
        "all threads of a rank share it. Start by `distkeras run`, or let mpiexec bind "
        "none: `mpiexec --bind-to none` (Open MPI), `mpiexec -bind-to none` (MPICH), "
        "`I_MPI_PIN=0` (Intel MPI), `srun --cpu-bind=none`."
    )


def _most_cores() -> int:
    """Returns how many cores this process would have if nobody had bound it.

    The kernel lets it try: what a container or a job's control group keeps from it is
    left out of the answer.
    """
    found: set[int] = set()

    def ask() -> None:
        # The binding of this thread alone, which then ends.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
        found.update(os.sched_getaffinity(0))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    limits = [physical_cores(found), cpu_quota()]
    given = os.environ.get("SLURM_CPUS_ON_NODE", "")
    if given.isdecimal():  # the others are perhaps another job's
        limits.append(int(given))
    return min(limit for limit in limits if limit is not None)
