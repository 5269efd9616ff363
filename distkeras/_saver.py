"""Writes checkpoints while `fit` runs: when, what, and what becomes of errors."""

from __future__ import annotations

import dataclasses
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from typing import NoReturn

import keras
import numpy as np

from distkeras import _callback_states
from distkeras import _csv_logs
from distkeras import _state
from distkeras import backends
from distkeras._errors import CheckpointError
from distkeras._exit import PREEMPTED
from distkeras._logging import LOGGER
from distkeras._position import Position
from distkeras._training_run import TrainingRun
from distkeras._version import __version__
from distkeras.callbacks import _files
from distkeras.callbacks._checkpoint import VALIDATION
from distkeras.callbacks._checkpoint import Checkpoint
from distkeras.communicators import collectively
from distkeras.gradients import GradientExchange

FORMAT = 1
"""The number of what `metadata.json` holds; a later one may hold other things."""


RESIDUALS = "residual/"
"""Before the names of what error feedback keeps, see `GradientExchange.residuals`."""


class Saver(keras.callbacks.Callback):
    """Does what `Checkpoint` is asked to; after `Consensus` in the list of callbacks.

    There, all callbacks have changed what they change, and all ranks stop alike.

    Args:
        checkpoint: the user's.
        run: what is to be gone on with.

    Attributes:
        exchange: by which ranks exchange gradients; None at one rank.
    """

    def __init__(self, checkpoint: Checkpoint, run: TrainingRun) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._run = run
        self._communicator = run.communicator
        self._writer = _Writer()
        self._number = 0
        self._steps = 0
        self._read = backends.current().reader()
        self.exchange: GradientExchange | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Makes the folder, and removes what a killed run has left in it."""
        folder = self._checkpoint.directory
        self._steps = self._run.position.steps

        def preparing_the_checkpoints() -> None:
            if self._communicator.rank == 0:
                folder.mkdir(parents=True, exist_ok=True)
                _files.remove_unfinished(folder)
                self._number = max(
                    map(_files.sequence, _files.listed(folder)), default=0
                )

        collectively(
            self._communicator, preparing_the_checkpoints, error=CheckpointError
        )
        # All ranks name the best one.
        self._number = self._communicator.broadcast_object(self._number)
        self._take(metrics=True)  # traces now what else the first one would

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Writes a checkpoint where one is due, and the last one after a signal."""
        before, self._steps = self._steps, self._run.position.steps
        if self.model.stop_training:
            self._leave_if_signalled()
        every = self._checkpoint.every_steps
        if every is not None and self._steps // every > before // every:
            self._save()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes a checkpoint where one is due, or the epoch is the best so far."""
        best = self._is_best(logs or {})
        every = self._checkpoint.every_epochs
        if self.model.stop_training:
            self._leave_if_signalled(best=best)
        if best or (every is not None and (epoch + 1) % every == 0):
            self._save(best=best)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Waits for the last checkpoint."""
        self._agree_on_success()

    def close(self) -> None:
        """Waits for what is being written, whatever becomes of it."""
        self._writer.wait()

    def leave(self, why: str) -> NoReturn:
        """Writes a checkpoint and exits, on all ranks; collective.

        Args:
            why: for the log.
        """
        path = self._save()
        self._agree_on_success()
        if self._communicator.rank == 0:
            LOGGER.info("%s: wrote %s, exiting with code %d", why, path, PREEMPTED)
        raise SystemExit(PREEMPTED)

    def _is_best(self, logs: Mapping[str, Any]) -> bool:
        """Returns whether the epoch is the best one by rank 0's logs; collective."""
        checkpoint, name = self._checkpoint, self._checkpoint.monitor
        if name is None:
            return False

        def comparing_the_epoch_with_the_best_one() -> float | None:
            if self._communicator.rank > 0:
                return None
            return self._monitored(name, logs)

        value = collectively(
            self._communicator,
            comparing_the_epoch_with_the_best_one,
            error=CheckpointError,
        )
        value = self._communicator.broadcast_object(value)
        if value is None or not checkpoint.improves(value):
            return False
        checkpoint.best = value
        return True

    def _monitored(self, name: str, logs: Mapping[str, Any]) -> float | None:
        """Returns the value that tells the best epoch, None without a validation."""
        if self._checkpoint.monitors_validation and not _validated(logs):
            return None  # as of `validation_freq`
        if name not in logs:
            raise CheckpointError(
                "Expected `monitor` of `Checkpoint` to be among the logs of an epoch: "
                f"{', '.join(sorted(logs))}. Received: {name!r}"
            )
        return float(logs[name])

    def _leave_if_signalled(self, *, best: bool = False) -> None:
        """Writes and exits on all ranks, if the stop is one of a signal; collective."""
        mine = self._checkpoint.signalled
        numbers = self._communicator.allgather_object(mine)
        if not any(numbers):
            return
        path = self._save(best=best)
        self._agree_on_success()
        rank = next(rank for rank, number in enumerate(numbers) if number)
        if self._communicator.rank == 0:
            LOGGER.info(
                "%s on rank %d: wrote %s, exiting with code %d; resume='auto' goes on",
                signal.Signals(numbers[rank]).name,
                rank,
                path,
                PREEMPTED,
            )
        raise SystemExit(PREEMPTED)

    def _save(self, *, best: bool = False) -> Path:
        """Takes the state and lets rank 0 write it; collective."""
        checkpoint, position = self._checkpoint, self._run.position
        self._agree_on_success()
        state = self._take(metrics=position.step > 0)
        self._number += 1
        name = _files.name(self._number, position.epoch, position.step)
        path = checkpoint.directory / name
        if best:
            checkpoint.best_file = name
        if self._communicator.rank == 0:
            self._write(path, position, state)
        if not checkpoint.background:
            self._agree_on_success()
        return path

    def _take(self, *, metrics: bool) -> _state.State:
        held = {} if self.exchange is None else self.exchange.residuals()
        return _state.take(
            self.model,
            self._communicator,
            metrics=metrics,
            more={f"{RESIDUALS}{name}": array for name, array in held.items()},
            read=self._read,
        )

    def _write(self, path: Path, position: Position, state: _state.State) -> None:
        """Lets the file be written; on rank 0."""
        checkpoint = self._checkpoint
        states, arrays = _callback_states.take(self._run.users)
        content = {
            "format": FORMAT,
            "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "versions": _versions(),
            "position": dataclasses.asdict(position),
            "data": self._run.describe_data(),
            "state": state.description,
            "callbacks": states,
            "logs": _csv_logs.lengths(self._run.users),
        }
        arrays = {**state.arrays, **arrays}
        kept = [checkpoint.best_file] if checkpoint.best_file else []

        def write() -> None:
            _files.write(path, arrays, content)
            _files.remove_old(checkpoint.directory, keep=checkpoint.keep, besides=kept)

        self._writer.start(write, str(path))

    def _agree_on_success(self) -> None:
        """Raises on all ranks if the newest checkpoint was not written; collective."""
        failure = self._writer.wait() if self._communicator.rank == 0 else None
        text = self._communicator.broadcast_object(failure)
        if text is not None:
            raise CheckpointError(
                f"Rank 0 could not write a checkpoint: {text}. Earlier checkpoints are "
                "as they were. Training has been ended."
            )


def _validated(logs: Mapping[str, Any]) -> bool:
    return any(name.startswith(VALIDATION) for name in logs)


class _Writer:
    """Runs one function at a time in a thread of its own."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: str | None = None

    def start(self, function: Callable[[], None], what: str) -> None:
        """Runs a function in the background; the one before must have been waited for.

        Args:
            function: what to run.
            what: what it makes, for the message if it fails.
        """

        def run() -> None:
            try:
                function()
            except Exception as error:
                self._failure = f"{what}: {type(error).__name__}: {error}"

        # Not a daemon: where Python ends, a file is still finished.
        self._thread = threading.Thread(target=run, name="distkeras-checkpoint")
        self._thread.start()

    def wait(self) -> str | None:
        """Returns when the function has; what failed since the last call."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        return failure


def _versions() -> dict[str, str]:
    backend = keras.backend.backend()
    return {
        "distkeras": __version__,
        "keras": keras.__version__,
        "backend": f"{backend} {getattr(sys.modules.get(backend), '__version__', '')}",
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
