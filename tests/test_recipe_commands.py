"""The recipes' commands, as their README and docstrings print them, and that they run.

All are read: their options are checked, and their launchers asked what they would
start. By default those that take seconds run, with `--steps 2`;
`python -m pytest -m soak tests/test_recipe_commands.py` runs all others: with files of
the same format in FOLDER, small images and models, and at most 3 ranks.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mpi_runtimes import open_mpi
from test_recipes import write_cifar10
from test_recipes import write_cifar100

from distkeras import recipes
from distkeras.launch import _cli
from distkeras.recipes import _samples
from distkeras.recipes import evidence
from distkeras.recipes import resnet
from distkeras.recipes import resnet_imagenet

FOLDER = Path(recipes.__path__[0])
_LAUNCHERS = ("python", "distkeras", "mpiexec", "srun")
_SHORT = (
    "python -m distkeras.recipes.resnet",
    "python -m distkeras.recipes.resnet_imagenet",
)
_MOST = 3


def commands_in(text: str) -> list[str]:
    """Returns what starts a recipe: lines of code blocks, and code in backticks."""
    text = re.sub(r"\\\n\s*", "", text)
    found = re.findall(r"^(?:    )?(\w+ .*)$", text, re.MULTILINE)
    found += re.findall(r"`(\w+ [^`\n]*)`", text)
    return [
        line
        for line in found
        if line.split()[0] in _LAUNCHERS and "-m distkeras.recipes." in line
    ]


def all_commands() -> list[str]:
    texts = [(FOLDER / "README.md").read_text()]
    texts += [str(module.__doc__) for module in (resnet, resnet_imagenet, evidence)]
    return list(dict.fromkeys(line for text in texts for line in commands_in(text)))


def parts_of(command: str) -> tuple[list[str], str, list[str]]:
    """Returns what starts a module, the module, and its words."""
    words = shlex.split(command)
    at = next(i for i, word in enumerate(words) if word.startswith("distkeras.recipes"))
    return words[: at - 1], words[at], words[at + 1 :]


def ranks_of(command: str) -> int:
    """Returns the number of ranks that a command asks for."""
    launcher, _, _ = parts_of(command)
    if launcher[0] == "srun":
        options = srun_options(launcher)
        return options.nodes * options.ntasks_per_node
    return int(launcher[launcher.index("-n") + 1]) if "-n" in launcher else 1


def srun_options(launcher: list[str]) -> argparse.Namespace:
    """Reads the options of Slurm's launcher, as its manual has them."""
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    add = parser.add_argument
    add("-N", "--nodes", type=int, required=True)
    add("--ntasks-per-node", type=int, required=True)
    add("--gpus-per-node", type=int, required=True)
    add("--cpu-bind", choices=["none"], required=True)
    add("program", choices=["python"])
    return parser.parse_args(launcher[1:])


def run(command: str, cwd: Path, more: list[str]) -> str:
    """Runs a command on this machine, on 3 ranks at most, and returns what it said."""
    _, module, words = parts_of(command)
    launcher = [sys.executable]
    if not command.startswith("python"):
        ranks = str(min(ranks_of(command), _MOST))
        launcher += ["-m", "distkeras", "run", "-n", ranks]
    answer = subprocess.run(
        [*launcher, "-m", module, *words, *more],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        timeout=500,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout + answer.stderr


def test_the_commands_are_found() -> None:
    commands = all_commands()
    assert len(commands) > 15
    assert set(_SHORT) <= set(commands)
    launchers = {command.split()[0] for command in commands}
    assert launchers == set(_LAUNCHERS)
    assert not [command for command in commands if "\\" in command]
    for module in (resnet, resnet_imagenet):
        mine = commands_in(str(module.__doc__))
        assert {1, 2, 8, 256} <= {ranks_of(command) for command in mine}
        assert any(command.startswith("srun ") for command in mine)


@pytest.mark.parametrize("command", all_commands())
def test_their_options_are_known(command: str) -> None:
    _, module, words = parts_of(command)
    if module != "distkeras.recipes.evidence":
        args = importlib.import_module(module).parse(words)
        assert args.steps is None


@pytest.mark.launches
@pytest.mark.parametrize(
    "command", [c for c in all_commands() if not c.startswith("python ")]
)
def test_their_launchers_would_start_them(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As many ranks as are said, each with the recipe's words."""
    launcher, module, words = parts_of(command)
    ranks = ranks_of(command)
    if launcher[0] == "srun":
        assert srun_options(launcher).gpus_per_node == 8
        assert ranks in (16, 256)
        return
    if launcher[0] == "distkeras":
        assert launcher[1] == "run"
        started = ["--dry-run", *launcher[2:], "-m", module, *words]
        assert _cli.main(["run", *started]) == 0
        said = shlex.split(capsys.readouterr().out)
        assert said[-len(words) - 2 :] == ["-m", module, *words]
        assert said[said.index("-n") + 1] == str(ranks)
        return
    # Open MPI maps the ranks, and shows where they would run.
    nodes = [f"node{number} slots=8" for number in range(32)]
    (tmp_path / "hosts").write_text("\n".join(nodes))
    runtime = open_mpi()
    show = ["--runtime-options", "donotlaunch", "--display", "map"]
    answer = subprocess.run(
        [runtime.command[0], *show, *launcher[1:], "-m", module, *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, **runtime.environ},
        timeout=60,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert answer.stdout.count("Data for proc: ") == ranks, answer.stdout


@pytest.mark.launches
@pytest.mark.tensorflow
@pytest.mark.timeout(300)  # 5 s where two cores are free
@pytest.mark.parametrize("command", _SHORT)
def test_short_commands_run(
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In this process, which has TensorFlow already."""
    _, module, words = parts_of(command)
    monkeypatch.chdir(tmp_path)
    importlib.import_module(module).main([*words, "--steps", "2", "--output", "out"])
    said = capsys.readouterr().out
    (last,) = re.findall(r"^ResNet-.*$", said, re.MULTILINE)
    assert "ranks: 1" in last
    config = (tmp_path / "out/config.toml").read_text()
    assert config.startswith("# ranks: 1, ")
    assert "seed = 0\n" in config
    assert (tmp_path / "out/best.keras").is_file()


@pytest.mark.launches
@pytest.mark.soak
@pytest.mark.tensorflow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", sorted(set(all_commands()) - set(_SHORT)))
def test_long_commands_run_for_two_steps(tmp_path: Path, command: str) -> None:
    _, module, words = parts_of(command)
    more: list[Any] = ["--steps", 2]
    if module == "distkeras.recipes.evidence":
        (tmp_path / "recipes").mkdir()
        page = tmp_path / "recipes/README.md"
        page.write_text(f"{evidence.BEGIN}\n{evidence.END}\n")
        run(command, tmp_path, ["--steps", "2", "--seeds", "1", "--ranks", "2"])
        assert "| one process | 1 |" in page.read_text()
        return
    if "imagenet" in words:
        _samples.make(tmp_path / "FOLDER", "folders")
        more += ["--image-size", 32, "--depth", 18]
    elif "cifar10" in words:
        write_cifar10(tmp_path / "FOLDER", count=200)
        more += ["--data-dir", "FOLDER"]
    elif "cifar100" in words:
        write_cifar100(tmp_path / "FOLDER", count=1000)
    said = run(command, tmp_path, list(map(str, more)))
    (ranks,) = re.findall(r"^ResNet-.*, ranks: (\d+), ", said, re.MULTILINE)
    assert int(ranks) == min(ranks_of(command), _MOST)


@pytest.mark.launches
@pytest.mark.soak
@pytest.mark.tensorflow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("files", ["tfrecords", "folders"])
def test_three_ranks_hardly_wait_for_images(tmp_path: Path, files: str) -> None:
    """The whole of the README's command; under a tenth of a step, where it is quiet."""
    command = "distkeras run -n 3 -m distkeras.recipes.resnet_imagenet --files " + files
    assert command in all_commands()
    said = run(command, tmp_path, [])
    (wait,) = re.findall(r"trained for .* data wait .* ms \((\d+)%\)", said)
    assert int(wait) < 10
