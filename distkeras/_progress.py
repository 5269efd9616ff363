"""The progress bar's values: those of all ranks, now and then within an epoch."""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np

from distkeras._metrics import _entries
from distkeras.communicators import Communicator
from distkeras.gradients import Counters

_REFRESHES = 100
_EVERY = 10
_MOST_ELEMENTS = 2**16


class GlobalProgress(keras.callbacks.Callback):
    """Gives what comes after it in the list the metrics of all ranks, during an epoch.

    Must be last, so that only Keras' progress bar follows. All ranks take part; a
    hundred times an epoch the states of their metrics travel, and rank 0 computes the
    results from all of them, as at the end of the epoch. In between the bar keeps
    what it shows.

    Args:
        communicator: the ranks.
        shown: whether rank 0 shows a bar; the same on every rank. Without, nothing is
            sent.
        batches: of an epoch, as Keras counts them, where they are known: executions.
        counters: of the exchange, which know of all ranks' examples: the bar shows
            `samples_per_second` then.
    """

    def __init__(
        self,
        communicator: Communicator,
        *,
        shown: bool,
        batches: int | None,
        counters: Counters | None = None,
    ) -> None:
        super().__init__()
        self._communicator = communicator
        self._shown = shown
        self._every = max(1, batches // _REFRESHES) if batches else _EVERY
        self._counters = counters
        self._began: tuple[float, float] | None = None
        self._batches = 0
        self._values: dict[str, Any] = {}

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begins to count batches."""
        self._began = None
        self._batches = 0
        self._values = {}

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Puts the values of all ranks in the place of this rank's."""
        if not self._shown:
            return
        if self._batches % self._every == 0:
            self._values = global_results(self.model, self._communicator) or {}
        self._batches += 1
        if logs is not None:
            logs.update({k: v for k, v in self._values.items() if k in logs})
            logs.update(self._pace())

    def _pace(self) -> dict[str, float]:
        """Returns examples a second of this epoch, without the step that is traced."""
        if self._counters is None:
            return {}
        now, seen = time.perf_counter(), self._counters.examples
        if self._began is None:
            self._began = now, seen
        then, before = self._began
        return {
            "samples_per_second": (seen - before) / (now - then) if then < now else 0
        }


def global_results(
    model: keras.Model, communicator: Communicator
) -> dict[str, Any] | None:
    """Returns the metrics of all ranks' examples so far, on rank 0; collective.

    Args:
        model: with the same metrics on every rank.
        communicator: the ranks.

    Returns:
        None on other ranks, and where the states are too large to travel often.
    """
    entries = _entries(model.metrics)
    arrays = [keras.ops.convert_to_numpy(e.variable.value) for e in entries]
    if sum(array.size for array in arrays) > _MOST_ELEMENTS:
        return None
    flat = [np.asarray(array, "float64").reshape(-1) for array in arrays]
    gathered = communicator.gather_object(np.concatenate([*flat, np.empty(0)]))
    if gathered is None:
        return None
    ends = np.cumsum([array.size for array in arrays])[:-1]
    parts = [np.split(theirs, ends) for theirs in gathered]
    pairs = [
        (entry.variable, _combined(entry, [part[i] for part in parts]))
        for i, entry in enumerate(entries)
    ]
    with keras.StatelessScope(state_mapping=pairs):
        results = model.get_metrics_result()
    return {
        name: float(value)
        for name, value in results.items()
        if not keras.ops.shape(value)
    }


def _combined(entry: Any, states: list[np.ndarray]) -> Any:
    """Returns the state of all ranks, as a tensor of the variable's kind."""
    ways: dict[str, Any] = {
        "sum": np.sum,
        "mean": np.mean,
        "min": np.min,
        "max": np.max,
        "product": np.prod,
        "first": lambda values, axis: values[0],
    }
    state = ways[entry.reduction](states, axis=0).reshape(entry.variable.shape)
    return keras.ops.convert_to_tensor(state, dtype=entry.variable.dtype)
