"""Questions to the machine that may crash or hang: each asked of a fresh process.

A broken library ends the process that loads it. So nothing is imported here: a
snippet runs in an interpreter of its own, within a time limit, and answers by lines
of JSON, of which those before a crash count.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

# Each snippet prints {"name": {...}} for what it finds, "error" within it for what
# does not load.
_ASK = """
import json, sys
def tell(name, question):
    try:
        answer = question()
    except BaseException as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    print("\\n" + json.dumps({name: answer}), flush=True)
"""

FRAMEWORKS = (
    _ASK
    + """
def tensorflow():
    import tensorflow as tf
    return {
        "version": tf.__version__,
        "cuda": tf.test.is_built_with_cuda(),
        "gpus": len(tf.config.list_physical_devices("GPU")),
    }
def keras():
    import keras
    return {"version": keras.__version__, "backend": keras.backend.backend()}
if sys.argv[1] == "tensorflow":
    tell("tensorflow", tensorflow)
tell("keras", keras)
"""
)

MPI = (
    _ASK
    + """
def mpi():
    from mpi4py import MPI
    levels = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    names = {getattr(MPI, f"THREAD_{level}"): level for level in levels}
    files = [line.split()[-1] for line in open("/proc/self/maps") if "libmpi" in line]
    return {
        "library": MPI.Get_library_version().replace(chr(0), "").splitlines()[0],
        "thread_level": names[MPI.Query_thread()],
        "file": next((f for f in files if "/libmpi.so" in f), None),
    }
tell("mpi", mpi)
"""
)

CUPY = (
    _ASK
    + """
import warnings
warnings.simplefilter("ignore")
def cupy():
    import cupy
    return {"version": cupy.__version__, "cuda": cupy.cuda.runtime.runtimeGetVersion()}
def devices():
    import cupy
    return {"count": cupy.cuda.runtime.getDeviceCount()}
def nccl():
    from cupy.cuda import nccl
    if not getattr(nccl, "available", False):
        return {"error": "the library is not installed"}
    return {"version": nccl.get_version()}
tell("cupy", cupy)
tell("devices", devices)
tell("nccl", nccl)
"""
)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a fresh process said before it ended.

    Attributes:
        found: by name, what was found; a dict with the key "error" for what failed.
        end: how the process ended, in words, if not well; else None.
        stderr: what it wrote there.
    """

    found: Mapping[str, Mapping[str, Any]]
    end: str | None
    stderr: str

    def get(self, name: str) -> Mapping[str, Any]:
        """Returns what was found of a name, or the error that was met on the way."""
        last = self.stderr.strip().rpartition("\n")[2]
        lost = {"error": " ".join(filter(None, [self.end, last])) or "no answer"}
        return self.found.get(name, lost)


def ask(snippet: str, *words: str, environ: Mapping[str, str], limit: float) -> Answer:
    """Runs a snippet in a fresh interpreter.

    Args:
        snippet: Python code.
        *words: its `sys.argv[1:]`.
        environ: the whole environment.
        limit: seconds after which it is ended.

    Returns:
        Its answers.
    """
    return run([sys.executable, "-c", snippet, *words], environ=environ, limit=limit)


def run(command: Sequence[str], *, environ: Mapping[str, str], limit: float) -> Answer:
    """Runs a command that answers by lines of JSON; see `ask`."""
    process = subprocess.Popen(
        command,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    end = None
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        # A launcher needs a chance to end its ranks.
        process.terminate()
        try:
            out, err = process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
        end = f"no answer within {limit:g} s."
    code = process.returncode
    if end is None and code < 0:
        end = f"the process was ended by {_signal_name(-code)}."
    elif end is None and code:
        end = f"exit code {code}."
    return Answer(_read(out), end, err)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _read(text: str) -> dict[str, Any]:
    """Merges the lines that are JSON objects; libraries print other things too."""
    found: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                found.update(json.loads(line))
            except ValueError:
                continue
    return found
