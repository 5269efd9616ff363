"""Importing costs nothing and changes nothing; every module says what it is for."""

import ast
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("tensorflow", "keras", "torch", "jax", "mpi4py", "cupy")

PROBE = """
import json, os, sys, time
environ = dict(os.environ)
start = time.perf_counter()
import {module}
seconds = time.perf_counter() - start
print(json.dumps({{
    "seconds": seconds,
    "loaded": [name for name in {heavy!r} if name in sys.modules],
    "environ": dict(os.environ) == environ,
    "threads": len(os.listdir("/proc/self/task")),
}}))
"""


def probe(module: str) -> dict[str, object]:
    """Imports `module` in a fresh process and says what that did."""
    code = PROBE.format(module=module, heavy=HEAVY)
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return json.loads(answer.stdout)


@pytest.mark.launches
@pytest.mark.parametrize(
    "module", ["distkeras", "distkeras.launch._cli", "distkeras.launch._run"]
)
def test_import_is_quick_and_without_effects(module: str) -> None:
    results = [probe(module) for _ in range(5)]
    for result in results:
        assert result["loaded"] == []
        assert result["environ"]
        assert result["threads"] == 1
    assert min(result["seconds"] for result in results) < 0.3


@pytest.mark.launches
def test_every_public_name_resolves() -> None:
    """In a fresh process: the framework that some of them load stays there."""
    code = """
import distkeras
for name in distkeras.__all__:
    getattr(distkeras, name)
assert issubclass(distkeras.LaunchError, distkeras.DistkerasError)
assert distkeras.RankTraceback.__module__ == "distkeras"
assert distkeras.communicators.world() is distkeras.init()
assert distkeras.data.shard
"""
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stderr


def sources() -> list[Path]:
    """Lists all Python files of the project."""
    folders = ("distkeras", "callbacks", "recipes", "tests", "benchmarks")
    return sorted(path for name in folders for path in (ROOT / name).rglob("*.py"))


def test_every_module_has_a_docstring() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in sources()
        if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []


def test_communicators_and_launch_import_no_framework_at_module_level() -> None:
    """They serve every Keras backend, and run before one is chosen."""
    offenders = []
    for part in ("communicators", "launch"):
        for path in (ROOT / "distkeras" / part).rglob("*.py"):
            for node in ast.parse(path.read_text()).body:
                names = [alias.name for alias in getattr(node, "names", [])]
                names.append(getattr(node, "module", None) or "")
                heads = {name.partition(".")[0] for name in names}
                if heads & {"tensorflow", "keras", "torch", "jax"}:
                    offenders.append(f"{path.name}:{node.lineno}")
    assert offenders == []


def private_names(path: Path) -> Iterator[str]:
    """Yields the names with one underscore that a file takes from objects."""
    for node in ast.walk(ast.parse(path.read_text())):
        name: object = None
        if isinstance(node, ast.Attribute):
            name = node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            taken = node.func.id in ("getattr", "hasattr") and node.args[1:]
            name = getattr(taken[0], "value", None) if taken else None
        if isinstance(name, str) and re.match(r"_[a-zA-Z]", name):
            yield name


def own_names(path: Path) -> Iterator[str]:
    """Yields what a file defines, or is; not what it sets on objects of others."""
    yield path.stem
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def words(package: str, folder: str = "") -> set[str]:
    """Returns the words with an underscore in an installed package's source."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    found: set[str] = set()
    for path in (Path(spec.origin).parent / folder).rglob("*.py"):
        found.update(re.findall(r"\b_[a-zA-Z]\w*", path.read_text()))
    return found


def test_private_names_of_keras_are_where_they_should_be() -> None:
    """In the modules that CONTRIBUTING.md lists, and in Keras itself."""
    files = [path for path in sources() if ROOT / "tests" not in path.parents]
    ours = {name for path in files for name in own_names(path)}
    ours |= {"_asdict", "_fields", "_replace", "_getframe"}  # of Python
    ours |= {"_of_fit"}  # by which `_session` knows a function of its own
    listed = (ROOT / "CONTRIBUTING.md").read_text().partition("Private names of Keras")
    places = set(re.findall(r"`([_a-z]+)/?`", listed[2].partition("`tests/")[0]))
    of_keras, of_tf_data = words("keras"), words("tensorflow", "python/data")
    elsewhere, gone = [], set()
    for path in files:
        if "communicators" in path.parts:
            continue  # of mpi4py and the like
        taken = set(private_names(path)) - ours
        if {path.stem, path.parent.name} & places:
            gone |= taken - of_keras - of_tf_data
        elif taken & of_keras or "keras.src" in path.read_text():
            elsewhere.append(str(path.relative_to(ROOT)))
    assert elsewhere == []
    assert gone == set()
