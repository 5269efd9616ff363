"""`distkeras bench`: the ranks it starts, its table and its files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from distkeras.launch import _bench
from distkeras.launch import _bench_step
from distkeras.launch._mpiexec import LaunchError


def test_sizes_in_words() -> None:
    assert [_bench._size(w) for w in ("7", "4K", "1mb", "2G")] == [
        *(7, 4096, 1 << 20, 2 << 30)
    ]
    assert _bench._words(4 << 10) == "4 KiB" and _bench._words(10) == "10 bytes"
    with pytest.raises(SystemExit):
        _bench.main(["--sizes", "many"])


@pytest.mark.parametrize(
    "words",
    (
        "--rounds 0",
        "--dtype bfloat16",
        "--dtype nonsense",
        "--model resnet20 --steps 0",
        "--model resnet20 --batch -1",
        "-n none",
    ),
)
def test_options_that_mean_nothing(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        _bench.main(words.split())
    assert error.value.code == 2
    assert f"argument {words.split()[-2]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    (
        ("--sizes 4,0,3", "of 4 bytes each. Received: 0, 3"),
        ("--sizes 4 --dtype float64", "of 8 bytes each. Received: 4"),
        ("--json missing/x.json", "missing/x.json"),
        ("--plot .", "--plot"),
    ),
)
def test_what_would_fail_in_the_end_fails_at_once(words: str, said: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(said)):
        _bench.main(words.split())


def test_a_plot_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bench.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LaunchError, match="pip install matplotlib"):
        _bench.main(["--plot", "x.png"])


def bench(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs `distkeras bench` to its good end."""
    answer = subprocess.run(
        [sys.executable, "-m", "distkeras", "bench", *words],
        capture_output=True,
        text=True,
        timeout=100,
        env=dict(os.environ),
        cwd=folder,
    )
    assert answer.returncode == 0, answer.stderr
    return answer


@pytest.mark.launches
def test_table_and_numbers(tmp_path: Path) -> None:
    path = tmp_path / "numbers.json"
    words = ["-n", "2", "--sizes", "4K,40K", "--rounds", "2"]
    words += ["--communicators", "mpi,shared_memory,hierarchical"]
    answer = bench(tmp_path, *words, "--json", str(path))
    assert "2 ranks on 1 node" in answer.stdout
    assert "shared_memory, in and out" in answer.stdout
    numbers = json.loads(path.read_text())
    assert numbers["ranks"] == 2 and numbers["rounds"] == 2
    rows = numbers["results"]
    assert {row["size"] for row in rows} == {4096, 40960}
    assert {"MPI", "memcpy", "mpi", "hierarchical"} < {row["name"] for row in rows}
    assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in rows)


@pytest.mark.launches
@pytest.mark.tensorflow
def test_parts_of_a_step(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    words = ["-n", "2", "--model", "resnet20", "--image-size", "32"]
    words += ["--batch", "2", "--steps", "2", "--json", str(path)]
    answer = bench(tmp_path, *words)
    assert "resnet20, 0.271 M parameters, 2 ranks with 2 images" in answer.stdout
    found = json.loads(path.read_text())
    assert found["ranks"] == 2 and found["parameters"] == 271_098
    for rank in found["milliseconds"]:
        assert set(rank) == set(_bench_step.PARTS)
        assert all(len(steps) == 2 for steps in rank.values())
        assert min(rank["compute"]) > 0 and min(rank["exchange"]) > 0


def test_a_model_that_nobody_knows() -> None:
    with pytest.raises(LaunchError, match="resnet20, convnextbase.*Received: alexnet"):
        _bench_step._make("alexnet", (64, 64, 3))
