"""The installed package: metadata, editable install, wheel, and the two commands."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import distkeras

ROOT = Path(__file__).resolve().parent.parent
# Where each source folder is to be found in a wheel.
FOLDERS = {
    "distkeras": "distkeras",
    "callbacks": "distkeras/callbacks",
    "recipes": "distkeras/recipes",
}
SHOW = (
    "import distkeras, distkeras.callbacks, distkeras.recipes; "
    "print(distkeras.__version__, distkeras.__file__, distkeras.callbacks.__file__, "
    "distkeras.recipes.__file__)"
)


def run(*words: object, cwd: Path) -> str:
    """Runs a command and returns its output; its errors fail the test."""
    answer = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, cwd=cwd
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from a copy: the build leaves nothing in the project."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in FOLDERS:
        shutil.copytree(
            ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    words = ("wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, source)
    run(sys.executable, "-m", "pip", *words, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def test_version_stands_in_one_place() -> None:
    version = importlib.metadata.version("distkeras3")
    assert version == distkeras.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(
        r"^## \[(Unreleased|" + re.escape(version) + r")\]", changelog, re.M
    )


@pytest.mark.launches
def test_editable_install_is_found_from_any_folder(tmp_path: Path) -> None:
    version, *files = run(sys.executable, "-c", SHOW, cwd=tmp_path).split()
    assert version == distkeras.__version__
    assert [Path(file).parent for file in files] == [ROOT / name for name in FOLDERS]


@pytest.mark.launches
def test_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    expected = {
        f"{target}/{path.relative_to(ROOT / source)}"
        for source, target in FOLDERS.items()
        for path in (ROOT / source).rglob("*.py")
    }
    expected.add("distkeras/py.typed")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert any(name.endswith("/licenses/LICENSE") for name in names)


@pytest.mark.launches
def test_wheel_works_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    fresh = tmp_path / "fresh"
    run(sys.executable, "-m", "venv", "--without-pip", fresh, cwd=tmp_path)
    python = fresh / "bin" / "python"
    words = ("install", "-q", "--no-deps", "--no-index", wheel)
    run(sys.executable, "-m", "pip", "--python", python, *words, cwd=tmp_path)
    # The dependencies are borrowed from this environment. A folder named in a
    # .pth file adds its packages but not its own .pth files: the editable
    # install that is running here stays out of it.
    (site,) = fresh.glob("lib/python*/site-packages")
    borrowed = os.path.dirname(os.path.dirname(pytest.__file__))
    (site / "borrowed.pth").write_text(f"{borrowed}\n")

    version, *files = run(python, "-c", SHOW, cwd=tmp_path).split()
    assert version == distkeras.__version__
    assert [Path(file).parent for file in files] == [
        site / target for target in FOLDERS.values()
    ]
    assert (site / "distkeras" / "py.typed").is_file()
    command = fresh / "bin" / "distkeras"
    assert run(command, "--version", cwd=tmp_path).split() == ["distkeras", version]


def shell_blocks() -> list[str]:
    """Returns the README's `sh` blocks, in order."""
    return re.findall(
        r"^```sh\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S
    )


def test_readme_opens_with_two_commands_of_one_line() -> None:
    first, second, *_ = shell_blocks()
    assert first.count("\n") == second.count("\n") == 1
    assert "distkeras run -n 2 -m distkeras.recipes.resnet" in first
    assert "pytest" in second


def test_readme_names_extras_that_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    groups = re.findall(r"(?:\.|distkeras3)\[([a-z,]+)\]", text)
    assert groups
    used = {extra for group in groups for extra in group.split(",")}
    assert used <= set(project["optional-dependencies"])


def test_ci_runs_the_second_command_of_the_readme(tmp_path: Path) -> None:
    """The script itself decides: here it runs with a shell that only prints."""
    printing = tmp_path / "bash"
    printing.write_text('#!/bin/sh\nfor word; do last="$word"; done; echo "$last"\n')
    printing.chmod(0o755)
    answer = subprocess.run(
        ["/bin/bash", str(ROOT / ".ci" / "run")],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == shell_blocks()[1]
