"""A trace of all ranks' steps, for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import keras

from distkeras._logging import LOGGER
from distkeras.communicators import Communicator
from distkeras.communicators import collectively
from distkeras.gradients import StepClock

_BARRIERS = 5


class Timeline(keras.callbacks.Callback):
    """Writes where each rank's time went, on rank 0, when training ends.

    The file is a Chrome trace (JSON, "Trace Event Format"): a process a rank, a slice
    for each part of each step: data (waiting for it), compute (forward and backward),
    pack, wait (for slower ranks), exchange, unpack, update. Where gradients are
    exchanged while the backward pass goes on, "compute" is what of it is not covered.

    To tell waiting from exchanging, all ranks meet once more before each message: a
    traced run is a little slower. Of a long run the trace holds the beginning.

    Args:
        path: of the file, on rank 0.
        communicator: the ranks.
        clock: of this rank's exchange.
    """

    def __init__(
        self, path: str | os.PathLike[str], communicator: Communicator, clock: StepClock
    ) -> None:
        super().__init__()
        self._path = Path(path)
        self._communicator = communicator
        self._clock = clock

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begins to keep events, if the file can be written; collective."""

        def opening_the_timeline() -> None:
            if self._communicator.rank == 0:  # or it is missed when training is over
                _try_to_write(self._path)

        collectively(self._communicator, opening_the_timeline)
        self._clock.events.clear()
        self._clock.traced = True

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Gathers the events of all ranks and writes them; collective.

        What has been trained is not lost for a trace: that it cannot be written (the
        disk may have run full) is logged.
        """
        self._clock.traced = False
        shift = _shift(self._communicator)
        mine = [(e.part, e.start - shift, e.seconds) for e in self._clock.events]
        ranks = self._communicator.gather_object(mine)
        self._clock.events.clear()

        if ranks is not None:
            trace = _trace(ranks, self._communicator.hosts)
            try:
                self._path.write_text(json.dumps(trace))
            except OSError as error:
                LOGGER.error("the timeline is not written: %s", error)


def _try_to_write(path: Path) -> None:
    """Raises OSError unless there can be a file; leaves what there is as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    there = os.path.lexists(path)
    with path.open("ab"):
        pass
    if not there:
        path.unlink()


def _shift(communicator: Communicator) -> float:
    """Returns by how many seconds this rank's clock is ahead of rank 0's; collective.

    All leave a barrier at nearly the same time. On one host there is one clock.
    """
    times = []
    for _ in range(_BARRIERS):
        communicator.barrier()
        times.append(time.time())
    zero = communicator.broadcast_object(times)
    hosts = communicator.hosts
    if hosts[communicator.rank] == hosts[0]:
        return 0.0
    return statistics.median(a - b for a, b in zip(times, zero, strict=True))


def _trace(ranks: list[list[tuple[str, float, float]]], hosts: Any) -> dict[str, Any]:
    """Returns the events of all ranks in the form of a Chrome trace, microseconds."""
    origin = min((start for events in ranks for _, start, _ in events), default=0.0)
    trace: list[dict[str, Any]] = []
    for rank, events in enumerate(ranks):
        name = f"rank {rank} ({hosts[rank]})"
        common = {"pid": rank, "tid": 0}
        trace.append(
            {"name": "process_name", "ph": "M", **common, "args": {"name": name}}
        )
        trace += [
            {
                "name": part,
                "cat": "step",
                "ph": "X",
                "ts": round(1e6 * (start - origin), 1),
                "dur": round(1e6 * seconds, 1),
                **common,
            }
            for part, start, seconds in events
        ]
    return {"traceEvents": trace, "displayTimeUnit": "ms"}
