"""What compression has taken from gradients and is yet to be sent, by gradient.

By gradient and not by bucket: another run may deal the same gradients into others.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence

import numpy as np

from distkeras.gradients._plan import HEADER
from distkeras.gradients._plan import Bucket
from distkeras.gradients._plan import Plan
from distkeras.gradients._wire import Wire


def split(plans: Mapping[int, Plan], wire: Wire) -> dict[str, np.ndarray]:
    """Returns this rank's residuals: copies, by the numbers of list and gradient.

    Args:
        plans: by the number of the list of variables that they are for.
        wire: that keeps them.
    """
    found = {}
    for n, plan in plans.items():
        for number, bucket in enumerate(plan.buckets):
            errors = wire.errors.get((id(plan), number))
            if errors is None:
                continue
            for name, where in _places(n, bucket):
                found[name] = errors[where].copy()
    return found


def join(n: int, bucket: Bucket, residuals: dict[str, np.ndarray]) -> np.ndarray:
    """Returns what a bucket begins with; zeros where nothing is known.

    Args:
        n: number of the list of variables.
        bucket: of a plan for it.
        residuals: as of `split`; what is taken over is taken out of them.
    """
    errors = np.zeros(bucket.length - _header(bucket), bucket.dtype)
    for name, where in _places(n, bucket):
        held = residuals.pop(name, None)
        if held is not None and held.shape == errors[where].shape:
            errors[where] = held
    return errors


def shared_out(
    ranks: Sequence[Mapping[str, np.ndarray]], rank: int, size: int, wire: Wire
) -> dict[str, np.ndarray]:
    """Returns one rank's residuals, of what some ranks had.

    As many ranks get each its own. Another number share the sum: nothing that is yet
    to be sent is lost.

    Args:
        ranks: what each rank had, as of `split`.
        rank: this one.
        size: ranks now.
        wire: that keeps them.
    """
    if len(ranks) == size:
        return dict(ranks[rank])
    # They are kept as they travel, multiplied by a power of two.
    factor = wire.multiplier(size) / wire.multiplier(len(ranks)) / size
    sums = {}
    for name in {name: None for theirs in ranks for name in theirs}:
        held = [theirs[name] for theirs in ranks if name in theirs]
        sums[name] = np.sum(held, 0, dtype="float64") * factor
    return sums


def _places(n: int, bucket: Bucket) -> list[tuple[str, slice]]:
    skipped = _header(bucket)
    return [
        (f"{n}/{p.index}", slice(p.offset - skipped, p.offset - skipped + p.length))
        for p in bucket.placements
    ]


def _header(bucket: Bucket) -> int:
    return HEADER // bucket.dtype.itemsize
