"""Importing costs nothing and changes nothing; every module says what it is for."""

import ast
import json
import subprocess
import sys
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
    code = "import distkeras; [getattr(distkeras, name) for name in distkeras.__all__]"
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
