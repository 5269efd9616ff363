"""What docstrings show is what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.launches
def test_examples_of_docstrings(tmp_path: Path) -> None:
    script = Path(__file__).parent / "docstring_examples.py"
    answer = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path
    )
    assert answer.returncode == 0, answer.stdout
    count = re.search(r"(\d+) examples, 0 failed", answer.stdout)
    assert count is not None and int(count[1]) > 50, answer.stdout
