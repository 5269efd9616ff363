"""Prints README's tables of equivalence, of what `--record FILE` wrote.

For N = 2 and 3 `distkeras run -n N -m pytest tests/test_equivalence.py --record FILE`,
with `-m "soak or not soak"` for all cases, and then this script with FILE.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

CASE = re.compile(r"test_equivalence\.py::test_equals_one_process\[(.*)\]")


def read(path: Path) -> list[tuple[tuple[str, ...], float]]:
    """Returns the cases, as values by axis, and their largest difference."""
    found = []
    for line in path.read_text().splitlines():
        ranks, test, difference = json.loads(line)
        match = CASE.search(test)
        if match:
            found.append(((*match.group(1).split("/"), str(ranks)), difference))
    return found


def table(
    cases: Iterable[tuple[tuple[str, ...], float]], rows: int, columns: int, corner: str
) -> str:
    """Returns the largest differences by the values of two axes, as Markdown."""
    cells: dict[tuple[str, str], float] = {}
    for values, difference in cases:
        key = values[rows], values[columns]
        cells[key] = max(difference, cells.get(key, 0.0))
    down = list(dict.fromkeys(row for row, _ in cells))
    across = list(dict.fromkeys(column for _, column in cells))
    lines = [f"| {corner} | " + " | ".join(across) + " |", "| --- " * (len(across) + 1)]
    lines[1] += "|"
    for row in sorted(down):
        texts = [
            f"{cells[row, column]:.0e}" if (row, column) in cells else "-"
            for column in across
        ]
        lines.append(f"| {row} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    cases = read(Path(sys.argv[1]))
    print(table(cases, 0, 1, "optimizer"), end="\n\n")
    print(table(cases, 2, 3, "input"), end="\n\n")
    print(table(cases, 4, 3, "ranks"))
