"""Runs the examples of all docstrings, as one process: `python docstring_examples.py`.

Examples may use what a reader takes for granted: `model`, compiled; `x` and `y`;
`others`, weights of the model; and `world`. Exits with 1 if one is not as written.
"""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import sys
from typing import Any

import keras
import numpy as np

import distkeras
from distkeras import communicators

OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.REPORT_NDIFF


def names() -> dict[str, Any]:
    """Returns what examples may use, new for each module."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return {
        "keras": keras,
        "np": np,
        "distkeras": distkeras,
        "model": model,
        "others": [weights + 1 for weights in model.get_weights()],
        "x": np.ones((8, 3), "float32"),
        "y": np.ones((8, 1), "float32"),
        "world": communicators.world(),
    }


def main() -> None:
    """Runs them and prints how many there were."""
    attempted = failed = 0
    for found in pkgutil.walk_packages(distkeras.__path__, "distkeras."):
        if found.name.endswith("__main__"):
            continue
        try:
            module = importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            if error.name not in ("torch", "cupy"):
                raise
            continue
        if ">>>" not in "".join(_docstrings(module)):
            continue
        given = {k: v for k, v in names().items() if not hasattr(module, k)}
        result = doctest.testmod(module, extraglobs=given, optionflags=OPTIONS)
        attempted, failed = attempted + result.attempted, failed + result.failed
    print(f"{attempted} examples, {failed} failed")
    sys.exit(failed > 0)


def _docstrings(module: Any) -> list[str]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    return [test.docstring or "" for test in finder.find(module)]


if __name__ == "__main__":
    main()
