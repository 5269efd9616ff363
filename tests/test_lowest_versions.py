"""The oldest packages that pyproject.toml allows are good enough.

Of each the newest of its oldest series is taken: for `keras>=3.12` that is 3.12's last.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from test_packaging import ROOT
from test_packaging import run
from test_packaging import wheel as wheel

pytestmark = [pytest.mark.launches, pytest.mark.soak]

EXTRAS = ("cpu", "recipes", "test")


def lowest() -> list[str]:
    """Returns what pip calls constraints: the oldest series of each dependency."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = project["dependencies"] + project["optional-dependencies"]["cpu"]
    found = []
    for requirement in needed:
        name, version = re.match(r"([\w-]+)>=([\d.]+)", requirement).groups()
        series = version if "." in version else f"{version}.0"
        found.append(f"{name}=={series}.*")
    return found


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment that holds them."""
    folder = tmp_path_factory.mktemp("lowest")
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(lowest()) + "\n")
    run(sys.executable, "-m", "venv", folder / "environment", cwd=folder)
    python = folder / "environment" / "bin" / "python"
    what = f"{wheel}[{','.join(EXTRAS)}]"
    run(python, "-m", "pip", "install", "-q", "-c", constraints, what, cwd=folder)
    return python


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", (1, 2))
def test_tests_of_ranks_pass(python: Path, ranks: int, tmp_path: Path) -> None:
    command = [python, "-m", "distkeras", "run", "-n", ranks, "-m", "pytest", "-q"]
    command += [
        "--of-ranks",
        "-m",
        "not launches and not soak",
        "-p",
        "no:cacheprovider",
    ]
    command += ["--rootdir", ROOT, "-c", ROOT / "pyproject.toml", ROOT / "tests"]
    answer = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, cwd=tmp_path
    )
    assert answer.returncode == 0, answer.stdout[-5000:] + answer.stderr[-2000:]
    assert re.search(r"\d{3,} passed", answer.stdout), answer.stdout[-500:]
