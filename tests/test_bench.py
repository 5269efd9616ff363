"""`distkeras bench`: the ranks it starts, its table and its files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from distkeras.launch import _bench
from distkeras.launch._mpiexec import LaunchError


def test_sizes_in_words() -> None:
    assert [_bench._size(w) for w in ("7", "4K", "1mb", "2G")] == [
        *(7, 4096, 1 << 20, 2 << 30)
    ]
    assert _bench._words(4 << 10) == "4 KiB" and _bench._words(10) == "10 bytes"
    with pytest.raises(SystemExit):
        _bench.main(["--sizes", "many"])


def test_a_plot_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bench.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LaunchError, match="pip install matplotlib"):
        _bench.main(["--plot", "x.png"])


@pytest.mark.launches
def test_table_and_numbers(tmp_path: Path) -> None:
    path = tmp_path / "numbers.json"
    words = ["bench", "-n", "2", "--sizes", "4K,40K", "--rounds", "2"]
    words += ["--communicators", "mpi,shared_memory,hierarchical"]
    answer = subprocess.run(
        [sys.executable, "-m", "distkeras", *words, "--json", str(path)],
        capture_output=True,
        text=True,
        timeout=100,
        env=dict(os.environ),
        cwd=tmp_path,
    )
    assert answer.returncode == 0, answer.stderr
    assert "2 ranks on 1 node" in answer.stdout
    assert "shared_memory, allocated" in answer.stdout
    numbers = json.loads(path.read_text())
    assert numbers["ranks"] == 2 and numbers["rounds"] == 2
    rows = numbers["results"]
    assert {row["size"] for row in rows} == {4096, 40960}
    assert {"MPI", "memcpy", "mpi", "hierarchical"} < {row["name"] for row in rows}
    assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in rows)
