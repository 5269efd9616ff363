"""The recipes' commands, as their README and docstrings print them, and that they run.

All are read, and their options checked. By default those that take seconds run, with
`--steps 2`; `python -m pytest -m soak tests/test_recipe_commands.py` runs all others:
with files of the same format in FOLDER, small images, and at most 2 ranks.
"""

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_recipes import write_cifar10
from test_recipes import write_cifar100

from distkeras import recipes
from distkeras.recipes import _samples
from distkeras.recipes import evidence
from distkeras.recipes import resnet
from distkeras.recipes import resnet_imagenet

FOLDER = Path(recipes.__path__[0])
_LAUNCHERS = ("python", "distkeras", "mpiexec", "srun")
_SHORT = (
    "python -m distkeras.recipes.resnet",
    "distkeras run -n 2 -m distkeras.recipes.resnet_imagenet",
)
_LONGEST = 2


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


def options_of(command: str) -> tuple[str, list[str], int]:
    """Returns the module that a command starts, its words, and the number of ranks."""
    words = shlex.split(command)
    at = next(i for i, word in enumerate(words) if word.startswith("distkeras.recipes"))
    launcher = words[:at]
    ranks = int(launcher[launcher.index("-n") + 1]) if "-n" in launcher else 1
    return words[at], words[at + 1 :], ranks if launcher[0] != "srun" else 2


def run(command: str, cwd: Path, more: list[str]) -> str:
    """Runs a command on this machine, on 2 ranks at most, and returns what it said."""
    module, words, ranks = options_of(command)
    launcher = [sys.executable]
    if not command.startswith("python"):
        launcher += ["-m", "distkeras", "run", "-n", str(min(ranks, _LONGEST))]
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


@pytest.mark.parametrize("command", all_commands())
def test_their_options_are_known(command: str) -> None:
    module, words, _ = options_of(command)
    if module != "distkeras.recipes.evidence":
        args = importlib.import_module(module).parse(words)
        assert args.steps is None


@pytest.mark.launches
@pytest.mark.tensorflow
@pytest.mark.timeout(300)  # 20 s where two cores are free
@pytest.mark.parametrize("command", _SHORT)
def test_short_commands_run(tmp_path: Path, command: str) -> None:
    more = ["--steps", "2", "--output", "out"]
    said = run(command, tmp_path, more)
    (last,) = re.findall(r"^ResNet-.*$", said, re.MULTILINE)
    _, _, ranks = options_of(command)
    if ranks > 1:
        (wait,) = re.findall(r"trained: .* data wait .* ms \((\d+)%\)", said)
        assert int(wait) < 10
    assert f"ranks: {ranks}" in last
    config = (tmp_path / "out/config.toml").read_text()
    assert config.startswith(f"# ranks: {ranks}, ")
    assert "seed = 0\n" in config
    assert (tmp_path / "out/best.keras").is_file()


@pytest.mark.launches
@pytest.mark.soak
@pytest.mark.tensorflow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", sorted(set(all_commands()) - set(_SHORT)))
def test_long_commands_run_for_two_steps(tmp_path: Path, command: str) -> None:
    module, words, _ = options_of(command)
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
        more += ["--image-size", 32]
    elif "cifar10" in words:
        write_cifar10(tmp_path / "FOLDER")
        more += ["--data-dir", "FOLDER"]
    elif "cifar100" in words:
        write_cifar100(tmp_path / "FOLDER")
    said = run(command, tmp_path, list(map(str, more)))
    assert len(re.findall(r"^ResNet-.* time: ", said, re.MULTILINE)) == 1
