"""What is saved are ordinary Keras files, which load where distkeras is not."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ordinary_files import BASE_RATE

HERE = Path(__file__).parent


def run(*words: object, **environ: str) -> str:
    """Runs a command and returns what it printed; its errors fail the test."""
    answer = subprocess.run(
        [str(word) for word in words],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, **environ},
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


@pytest.fixture
def borrowing(tmp_path: Path) -> Path:
    """The Python of an environment with this one's packages, but without distkeras.

    A folder named in a .pth file adds its packages and not its own .pth files, by one
    of which distkeras is installed here.
    """
    folder = tmp_path / "borrowing"
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    (site,) = folder.glob("lib/python*/site-packages")
    packages = Path(pytest.__file__).parent.parent
    (site / "borrowed.pth").write_text(f"{packages}\n")
    return folder / "bin" / "python"


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """The Python of an environment into which pip has installed Keras alone."""
    folder = tmp_path / "fresh"
    run(sys.executable, "-m", "venv", folder)
    versions = [
        f"{name}=={importlib.metadata.version(name)}"
        for name in ("tensorflow-cpu", "keras", "numpy")
    ]
    run(folder / "bin" / "python", "-m", "pip", "install", "-q", *versions)
    return folder / "bin" / "python"


def files_load(python: Path, folder: Path, ranks: int) -> None:
    """Lets a job save and a Python without distkeras load."""
    folder.mkdir()
    words = [sys.executable, "-m", "distkeras", "run", "-n", ranks]
    run(*words, HERE / "ordinary_files.py", folder)
    # Loaded by all ranks, the model is scaled once.
    rates = json.loads((folder / "rates.json").read_text())
    assert rates == [ranks * BASE_RATE]
    output = run(python, HERE / "plain_keras.py", folder, PYTHONPATH="")
    assert output.split() == ["loaded"]


@pytest.mark.launches
def test_files_load_where_distkeras_is_not(tmp_path: Path, borrowing: Path) -> None:
    files_load(borrowing, tmp_path / "files", 2)


@pytest.mark.soak
@pytest.mark.launches
@pytest.mark.timeout(900)
def test_files_load_in_a_fresh_environment(tmp_path: Path, fresh: Path) -> None:
    """`python -m pytest -m soak tests/test_ordinary_files.py`: downloads TensorFlow."""
    files_load(fresh, tmp_path / "files", 3)
