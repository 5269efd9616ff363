"""The global random number generators, made equal on all ranks for a while."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np

from distkeras.data._order import generator


@contextlib.contextmanager
def same_on_all_ranks(seed: int, number: int) -> Iterator[int]:
    """Seeds `random` and `numpy.random` inside, and restores them after.

    For user code that shuffles by the global generators: one order on all ranks.

    Args:
        seed: the same on all ranks.
        number: of the pass or call, the same on all ranks.

    Yields:
        A seed for other generators.
    """
    shared = int(generator(seed, number).integers(2**31))
    python, array = random.getstate(), np.random.get_state()
    random.seed(shared)
    np.random.seed(shared)
    try:
        yield shared
    finally:
        random.setstate(python)
        np.random.set_state(array)
