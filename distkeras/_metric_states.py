"""States of metrics in the middle of an epoch: of all ranks together, and put back."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np

from distkeras import backends
from distkeras._metrics import OPERATIONS
from distkeras._metrics import _entries
from distkeras.communicators import Communicator
from distkeras.communicators import Op


def combined_states(model: keras.Model, communicator: Communicator) -> list[np.ndarray]:
    """Returns the states of a model's metrics of all ranks together; collective.

    The variables stay as they are. This comes back only when every rank has called it.

    Args:
        model: with the same metrics on every rank.
        communicator: the ranks.

    Returns:
        One float64 array a state variable, in the order of the metrics.
    """
    entries = _entries(model.metrics)
    held = backends.current().read_variables(entry.variable for entry in entries)
    values = [np.asarray(value, "float64") for value in held]
    kinds: dict[Op, list[int]] = {"sum": [], "min": [], "product": []}
    for place, entry in enumerate(entries):
        kinds[OPERATIONS.get(entry.reduction, "sum")].append(place)
        if entry.reduction == "max":
            values[place] = -values[place]
        elif entry.reduction == "mean":
            values[place] = values[place] / communicator.size
        elif entry.reduction == "first" and communicator.rank > 0:
            values[place] = np.zeros_like(values[place])
    if not entries:
        communicator.barrier()
    for op, places in kinds.items():
        if not places:
            continue
        buffer = np.concatenate([values[place].reshape(-1) for place in places])
        communicator.allreduce(buffer, op)
        ends = np.cumsum([values[place].size for place in places])[:-1]
        for place, part in zip(places, np.split(buffer, ends), strict=True):
            part = -part if entries[place].reduction == "max" else part
            values[place] = part.reshape(values[place].shape)
    return values


def put_states_back(
    model: keras.Model, states: Sequence[np.ndarray], rank: int
) -> None:
    """Gives the metrics of this rank what `combined_states` returned, or its part.

    What adds up goes to rank 0, and the others begin with nothing.

    Args:
        model: the same.
        states: of all ranks together.
        rank: of this process.
    """
    model.reset_metrics()
    for entry, value in zip(_entries(model.metrics), states, strict=True):
        if rank > 0 and entry.reduction in ("sum", "product"):
            continue
        whole = "int" in str(entry.variable.dtype)
        value = np.rint(value).astype("int64") if whole else value
        entry.variable.assign(keras.ops.cast(value, entry.variable.dtype))
