"""`distkeras run`: starts a script or module on several ranks."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from distkeras._cores import usable_cores
from distkeras._launcher import ELASTIC
from distkeras.launch import _hosts
from distkeras.launch import _mpiexec
from distkeras.launch import _node
from distkeras.launch import _process
from distkeras.launch import _restarts
from distkeras.launch._hosts import Host
from distkeras.launch._mpiexec import LaunchError

_EPILOG = """\
Options of mpiexec stand between ours and the script, and reach it unchanged:
    distkeras run -n 8 --mca btl tcp,self train.py --epochs 90
The script is then the first word that ends in .py; for another name write -- before
it. What follows the script is the script's own.

exit code: that of the first rank that failed; 2 if the ranks could not be started.
With --elastic: 0 if those that are left ended well; where too few are left 75 after a
checkpoint (of distkeras.callbacks.Checkpoint), else 121.
"""


_OPTIONS = (
    *(["-O"] * sys.flags.optimize),
    *(f"-W{option}" for option in sys.warnoptions),
    *(
        f"-X{name}" if value is True else f"-X{name}={value}"
        for name, value in sys._xoptions.items()
    ),
)

WORKER = (sys.executable, *_OPTIONS, "-m", "distkeras.launch._worker")
"""What each rank executes, before `script args...` or `-m module args...`.

With the options of this Python that change what a program does.
"""


@dataclasses.dataclass(frozen=True)
class _Words:
    """The words after `distkeras run`, sorted by whom they are for."""

    ours: list[str]
    mpiexec: list[str]
    program: list[str]


def main(argv: Sequence[str]) -> int:
    """Runs the subcommand.

    Args:
        argv: the words after `distkeras run`.

    Returns:
        The exit code of the job.

    Raises:
        LaunchError: the ranks cannot be started.
    """
    parser, actions = _parser()
    words = _sort(argv, actions)
    options = parser.parse_args(words.ours)
    if not words.program:
        raise LaunchError(
            "expected a script or `-m module` after the options. Received: "
            f"{shlex.join(argv) or 'nothing'}. For example: distkeras run -n 2 train.py"
        )
    mpiexec = _mpiexec.find(options.mpiexec)
    if options.min_n is not None and not options.elastic:
        raise LaunchError("expected --elastic with --min-n")
    hosts = _chosen_hosts(options, mpiexec)
    n = default_size(hosts) if options.n == "auto" else int(options.n)
    if options.min_n is not None and options.min_n > n:
        raise LaunchError(f"expected --min-n of {n} or less. Received: {options.min_n}")
    added = _mpiexec.environment(mpiexec, os.environ, root=os.geteuid() == 0)
    if options.elastic:
        added[ELASTIC] = str(options.min_n or 1)
        # Also where the script starts MPI itself: see `distkeras.communicators`.
        added.setdefault("MPI4PY_RC_FINALIZE", "false")
    environ = {**os.environ, **added}
    tagged = options.tag or options.log_dir is not None
    command = _mpiexec.command(
        mpiexec,
        [*WORKER, *words.program],
        n=n,
        tag=tagged,
        extra=[*shlex.split(options.mpi_args), *words.mpiexec],
        hosts=[(host.name, host.slots or 0) for host in _hosts.place(hosts, n)]
        if hosts
        else [],
        export=_mpiexec.exported(environ),
        elastic=options.elastic,
    )
    if options.dry_run:
        settings = [f"{name}={value}" for name, value in added.items()]
        print(shlex.join([*(["env", *settings] if settings else []), *command]))
        return 0
    _check_exists(words.program[0])

    def run(number: int, signals: list[int]) -> int:
        folder = options.log_dir
        if folder is not None and number:
            folder = folder / f"restart-{number}"
        return _process.run(
            command,
            environ,
            tagged=tagged,
            shown=options.tag,
            logs=folder,
            heard=signals,
            may_lose=options.elastic and not hosts,
        )

    return _restarts.run_again(run, options.max_restarts)


def _chosen_hosts(
    options: argparse.Namespace, mpiexec: _mpiexec.Mpiexec
) -> tuple[Host, ...]:
    """Returns the hosts to start ranks on; none where that is this machine alone."""
    if options.hosts is not None and options.hostfile is not None:
        raise LaunchError("expected -H or --hostfile, not both")
    if options.hosts is not None:
        return _hosts.parse_hosts(options.hosts)
    if options.hostfile is not None:
        return _hosts.read_hostfile(options.hostfile)
    given = _hosts.allocation(os.environ)
    if given is None or mpiexec.flavour.name == "Slurm":  # which knows its nodes
        return ()
    if len(given.hosts) == 1:
        return ()
    slots = _hosts.total(given.hosts)
    if options.n != "auto" and slots is not None and int(options.n) > slots:
        # A scheduler counts tasks, often one a node: the nodes are ours all the same.
        return tuple(Host(host.name) for host in given.hosts)
    return given.hosts


def _check_exists(script: str) -> None:
    """Raises once, where otherwise every rank would."""
    if script != "-m" and not os.path.exists(script):
        raise LaunchError(f"expected a script or `-m module`; no such file: {script}")


def _parser() -> tuple[argparse.ArgumentParser, list[argparse.Action]]:
    """Returns the parser of our own options, and these options."""
    parser = argparse.ArgumentParser(
        prog="distkeras run",
        usage="distkeras run [-n N] [options] [mpiexec options] "
        "(script.py | -m module) [arguments]",
        description="Start a Python script or module on N ranks by MPI's mpiexec.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    add = parser.add_argument
    actions = [
        add("-h", "--help", action="help", help="show this text and exit"),
        add(
            "-n",
            "-np",
            metavar="N",
            type=_size,
            default="auto",
            help="number of ranks; auto, the default: the slots of the hosts or the "
            "tasks of Slurm's job, else the GPUs of this machine, or where it has none "
            "its physical cores",
        ),
        add(
            "-H",
            "--hosts",
            metavar="a:4,b:4",
            help="hosts with their slots (default: those of a Slurm, PBS or LSF "
            "allocation, else this machine)",
        ),
        add(
            "--hostfile",
            metavar="FILE",
            help="a file with a host a line: `a slots=4`, or `a:4`",
        ),
        add("--tag", action="store_true", help="begin each line of output by [rank]"),
        add(
            "--log-dir",
            metavar="DIR",
            type=Path,
            help="write the output of each rank to a file there too: rank-0.log ...",
        ),
        add(
            "--elastic",
            action="store_true",
            help="go on without ranks that are lost (killed, crashed) while "
            "distkeras.Trainer trains; needs Open MPI 5",
        ),
        add(
            "--min-n",
            metavar="M",
            type=_count,
            help="with --elastic: stop when fewer ranks are left (default: 1)",
        ),
        add(
            "--max-restarts",
            metavar="R",
            type=_count,
            default=0,
            help="start a job that failed again, R times at most; the script goes on "
            "from its last checkpoint by fit(resume='auto')",
        ),
        add("--dry-run", action="store_true", help="print the command, start nothing"),
        add(
            "--mpiexec",
            metavar="PATH",
            help="the launcher (default: that of this Python's environment, else the "
            "first on the PATH)",
        ),
        add(
            "--mpi-args",
            metavar="WORDS",
            default="",
            help="more options for mpiexec, in one quoted word",
        ),
    ]
    return parser, actions


def _size(word: str) -> str:
    if word == "auto" or (word.isdecimal() and int(word) > 0):
        return word
    raise argparse.ArgumentTypeError(f"expected a number from 1 up, or auto: {word!r}")


def _count(word: str) -> int:
    if word.isdecimal() and int(word) > 0:
        return int(word)
    raise argparse.ArgumentTypeError(f"expected a number from 1 up: {word!r}")


def _sort(argv: Sequence[str], actions: Sequence[argparse.Action]) -> _Words:
    """Sorts the words by whom they are for: us, mpiexec, or the program.

    A word that begins with a dash and is none of our options is mpiexec's. How many
    values follow it only mpiexec knows: all words up to the program are taken as
    such, and the program is known by its name or by `-m` or `--` before it.
    """
    takes_value = {
        name: action.nargs != 0 for action in actions for name in action.option_strings
    }
    words = list(argv)
    ours: list[str] = []
    mpiexec: list[str] = []
    while words:
        word = words[0]
        name, equals, _ = word.partition("=")
        if word == "--":
            return _Words(ours, mpiexec, words[1:])
        if word == "-m":
            return _Words(ours, mpiexec, words if len(words) > 1 else [])
        if name in takes_value:
            count = 2 if takes_value[name] and not equals else 1
            ours += words[:count]
            del words[:count]
        elif word.startswith("-") or (mpiexec and not word.endswith(".py")):
            mpiexec.append(words.pop(0))
        else:
            return _Words(ours, mpiexec, words)
    return _Words(ours, mpiexec, [])


def default_size(hosts: Sequence[Host] = ()) -> int:
    """Returns one rank a slot, else a task, a GPU, a core of this machine; says so.

    Raises:
        LaunchError: the slots of a host are not known.
    """
    if hosts:
        slots = _hosts.total(hosts)
        if slots is None:
            raise LaunchError(
                "expected -n N, or the slots of each host (-H a:4,b:4): the cores and "
                "GPUs of other hosts are not known here"
            )
        size, what = slots, "slots"
    elif (tasks := _hosts.tasks_here(os.environ)) is not None:
        size, what = tasks, "tasks of Slurm's job"
    else:
        gpus = len(_node.visible_gpus(os.environ))
        size = gpus or usable_cores()
        what = "GPUs" if gpus else "physical cores"
    print(
        f"distkeras run: {size} ranks, one for each of {size} {what}.", file=sys.stderr
    )
    return size
