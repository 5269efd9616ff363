"""The hosts of a job: as words of the user, from a file, or from a scheduler."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from distkeras._launcher import expand_counts
from distkeras.launch._mpiexec import LaunchError

# Variables in which MPI launchers and schedulers name a file with hosts.
_HOSTFILES = {
    "PBS_NODEFILE": "PBS",
    "LSB_DJOB_HOSTFILE": "LSF",
    "PE_HOSTFILE": "Grid Engine",
    "PRTE_MCA_prte_default_hostfile": "Open MPI's default hostfile",
    "OMPI_MCA_orte_default_hostfile": "Open MPI's default hostfile",
    "I_MPI_HYDRA_HOST_FILE": "Intel MPI's default hostfile",
    "HYDRA_HOST_FILE": "MPICH's default hostfile",
}


# Which of Slurm's variables are there only where a number of tasks was asked for.
_ASKED = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE")


class Host(NamedTuple):
    """A machine that runs ranks.

    Attributes:
        name: by which the launcher reaches it.
        slots: ranks that it takes; None where nobody has said.
    """

    name: str
    slots: int | None = None


@dataclasses.dataclass(frozen=True)
class Allocation:
    """The hosts that a scheduler or a variable gives to this job.

    Attributes:
        origin: who gives them, in words for messages.
        hosts: the machines.
    """

    origin: str
    hosts: tuple[Host, ...]


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Reads hosts as `-H` takes them.

    Args:
        text: names with commas between them, each with `:slots` or without.

    Returns:
        The hosts, in their order.

    Raises:
        LaunchError: an entry is empty, or its slots are no number from 1 up.

    Example:
        >>> parse_hosts("a:4,b")
        (Host(name='a', slots=4), Host(name='b', slots=None))
    """
    return tuple(_host(word.strip(), text) for word in text.split(","))


def _host(word: str, text: str) -> Host:
    match = re.fullmatch(r"([^\s:,]+)(?::([1-9]\d*))?", word)
    if match is None:
        raise LaunchError(
            "expected hosts as name:slots,name:slots with slots from 1 up, for "
            f"example -H a:4,b:4. Received: {word!r} in {text!r}"
        )
    return Host(match[1], int(match[2]) if match[2] else None)


def read_hostfile(path: str | Path) -> tuple[Host, ...]:
    """Reads a file with a host a line, in the way of any MPI or scheduler.

    `a slots=4` (Open MPI), `a:4` (MPICH, Intel MPI), `a 4 queue ...` (Grid Engine,
    LSF) and `a` are understood; a host that stands there several times has as many
    slots (PBS). What follows `#` is a comment.

    Args:
        path: the file.

    Returns:
        The hosts, each once, in the order of their first lines.

    Raises:
        LaunchError: the file cannot be read, has no host or a line that is none.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise LaunchError(f"the hostfile cannot be read: {error}") from error
    slots: dict[str, list[int | None]] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        found = re.fullmatch(r"([^\s:=]+)(?::(\d+))?", words[0])
        if found is None:
            raise LaunchError(
                f"expected a host in line {number} of {path}, as `name slots=4` or "
                f"`name:4`. Received: {line!r}"
            )
        given = found[2]
        for word in words[1:]:
            named = re.fullmatch(r"(?:slots=)?(\d+)", word)
            if named is not None and given is None:
                given = named[1]
        slots.setdefault(found[1], []).append(None if given is None else int(given))
    if not slots:
        raise LaunchError(f"the hostfile {path} names no host")
    return tuple(Host(name, _sum(counts)) for name, counts in slots.items())


def _sum(counts: Sequence[int | None]) -> int | None:
    """Adds the slots of a host's lines; a line without a number counts one."""
    if len(counts) == 1:
        return counts[0]
    return sum(1 if count is None else count for count in counts)


def allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Returns the hosts that the environment gives to this job.

    Args:
        environ: environment variables; Slurm's, or those that name a hostfile.

    Returns:
        The allocation; None where there is none, or its file cannot be read.

    Example:
        >>> slurm = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "4(x2)"}
        >>> allocation(slurm).hosts
        (Host(name='n1', slots=4), Host(name='n2', slots=4))
    """
    nodes = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if nodes:
        names = expand_nodes(nodes)
        slots: list[int | None] = list(
            expand_counts(environ.get("SLURM_TASKS_PER_NODE", ""))
        )
        slots += [None] * (len(names) - len(slots))
        job = environ.get("SLURM_JOB_ID", "")
        return Allocation(
            f"Slurm job {job}".rstrip(),
            tuple(map(Host, names, slots)),
        )
    for variable, origin in _HOSTFILES.items():
        if environ.get(variable):
            try:
                hosts = read_hostfile(environ[variable])
            except LaunchError:
                continue
            return Allocation(f"{origin} ({variable})", hosts)
    return None


def tasks_here(environ: Mapping[str, str]) -> int | None:
    """Returns how many ranks Slurm was asked for, where its job has one node.

    One task may be all that was asked for, to start the others itself: that is `None`,
    as where no number of tasks was asked for (Slurm then counts processors), and where
    Slurm has no part in it.

    Args:
        environ: environment variables.

    Example:
        >>> slurm = {"SLURM_JOB_NODELIST": "n7", "SLURM_TASKS_PER_NODE": "3"}
        >>> tasks_here(slurm), tasks_here({**slurm, "SLURM_NTASKS": "3"})
        (None, 3)
    """
    if not (environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")):
        return None
    if not any(environ.get(name) for name in _ASKED):
        return None
    given = allocation(environ)
    if given is None or len(given.hosts) != 1:
        return None
    slots = total(given.hosts)
    return slots if slots is not None and slots > 1 else None


def expand_nodes(text: str) -> list[str]:
    """Expands Slurm's short form of node names.

    Args:
        text: such as `SLURM_JOB_NODELIST` holds.

    Returns:
        The names.

    Example:
        >>> expand_nodes("gpu[08-10,12],login")
        ['gpu08', 'gpu09', 'gpu10', 'gpu12', 'login']
    """
    names = []
    # Commas within brackets belong to a name.
    for word in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        names += _expand_node(word)
    return names


def _expand_node(word: str) -> list[str]:
    match = re.match(r"([^\[]*)\[([^\]]*)\](.*)", word)
    if match is None:
        return [word]
    head, ranges, tail = match.groups()
    numbers = []
    for part in ranges.split(","):
        if not re.fullmatch(r"\d+(-\d+)?", part.strip()):
            raise LaunchError(
                "expected names of nodes as Slurm writes them (gpu[01-04,07]). "
                f"Received: {word!r}. Name the hosts by -H or --hostfile."
            )
        first, _, last = part.strip().partition("-")
        for number in range(int(first), int(last or first) + 1):
            numbers.append(str(number).zfill(len(first)))
    return [
        f"{head}{number}{rest}" for number in numbers for rest in _expand_node(tail)
    ]


def total(hosts: Sequence[Host]) -> int | None:
    """Returns the slots of all hosts together; None if one does not tell its own."""
    counts = [host.slots for host in hosts]
    return None if None in counts else sum(count or 0 for count in counts)


def place(hosts: Sequence[Host], n: int) -> tuple[Host, ...]:
    """Returns how many ranks each host runs: slots are filled in order.

    Args:
        hosts: the machines. Where one does not tell its slots, all ranks are shared
            out evenly.
        n: number of ranks.

    Returns:
        Hosts with the number of their ranks; without those that run none.

    Raises:
        LaunchError: there are more ranks than slots.

    Example:
        >>> place(parse_hosts("a:4,b:4"), 6)
        (Host(name='a', slots=4), Host(name='b', slots=2))
        >>> place(parse_hosts("a,b"), 3)
        (Host(name='a', slots=2), Host(name='b', slots=1))
    """
    slots = total(hosts)
    if slots is not None and n > slots:
        raise LaunchError(
            f"expected at most {slots} ranks, one a slot of the {len(hosts)} hosts. "
            f"Received: -n {n}"
        )
    even, rest = divmod(n, len(hosts))
    placed = []
    for index, host in enumerate(hosts):
        count = even + (index < rest)
        if slots is not None:
            count = min(host.slots or 0, n)
            n -= count
        if count:
            placed.append(Host(host.name, count))
    return tuple(placed)
