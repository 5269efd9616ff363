"""`Checkpoint`: the whole state of training, so that a run goes on where it ended."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import threading
import warnings
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from numbers import Integral
from typing import Any
from typing import Literal

import keras

VALIDATION = "val_"
"""Before the names of what Keras logs of a validation."""

_CAUGHT = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
_LARGER_IS_BETTER = ("acc", "accuracy", "auc", "precision", "recall", "f1_score")


class Checkpoint(keras.callbacks.Callback):
    """Writes the whole state of training, for `Trainer.fit(resume="auto")`.

    Weights, optimizers, learning rates, metrics of the epoch so far, random numbers of
    every rank, the position in the data, and what Keras' callbacks have seen. A run
    that goes on from a checkpoint ends with the weights, bit for bit, of one that was
    never interrupted (on CPU, with as many ranks).

    Rank 0 writes, while training goes on: one file a checkpoint, which is there whole
    or not at all. `numpy.load` opens it. A file that cannot be written is an error on
    every rank, at the next checkpoint or at the end of training.

    On a signal (SIGTERM, which schedulers send before they end a job, or others that
    they can be told to send) the step is finished, a checkpoint is written, and the
    process exits with code 75.

    Args:
        directory: of the checkpoints. Only rank 0 needs to see it.
        every_steps: steps between checkpoints; None for none within epochs.
        every_epochs: epochs between checkpoints; None for none at their ends.
        keep: how many checkpoints to keep, the newest; and the best one. None keeps
            all.
        monitor: name of a value in the logs, such as `"val_loss"`, that tells the
            best epoch. A best epoch is always written. None for no best one. Epochs
            without a validation, as of `validation_freq`, are none. Rank 0's logs
            count.
        mode: `"min"` or `"max"`, which is best; `"auto"` guesses by the name.
        background: whether training goes on while the file is written. The state is
            copied before.
        signals: after which to write a checkpoint and exit. With `()` none is caught.

    Raises:
        ValueError: if an option has no meaning.

    Example:
        ```python
        trainer.fit(
            x, y, epochs=90, resume="auto",
            callbacks=[distkeras.callbacks.Checkpoint("run1", every_steps=500)],
        )
        ```
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every_steps: int | None = None,
        every_epochs: int | None = 1,
        keep: int | None = 3,
        monitor: str | None = None,
        mode: Literal["auto", "min", "max"] = "auto",
        background: bool = True,
        signals: Sequence[int] = (signal.SIGTERM,),
    ) -> None:
        super().__init__()
        counts: dict[str, Any] = {
            "every_steps": every_steps,
            "every_epochs": every_epochs,
            "keep": keep,
        }
        for name, value in counts.items():
            if value is not None and (not isinstance(value, Integral) or value < 1):
                raise ValueError(
                    f"Expected `{name}` to be an integer from 1 up, or None. Received: "
                    f"{name}={value!r}"
                )
        if mode not in ("auto", "min", "max"):
            raise ValueError(
                f"Expected `mode` to be 'auto', 'min' or 'max'. Received: {mode!r}"
            )
        numbers = tuple(signals) if isinstance(signals, Iterable) else (None,)
        if not _CAUGHT.issuperset(numbers):
            raise ValueError(
                "Expected `signals` to be a sequence of signals that a process can "
                "catch, such as `(signal.SIGTERM,)`; `()` for none. Received: "
                f"signals={signals!r}"
            )
        self.directory = pathlib.Path(directory)
        self.every_steps = every_steps
        self.every_epochs = every_epochs
        self.keep = keep
        self.monitor = monitor
        if mode == "auto":
            larger = (monitor or "").endswith(_LARGER_IS_BETTER)
            mode = "max" if larger else "min"
        self.mode = mode
        self.background = background
        self.signals = numbers
        self.best: float | None = None
        self.best_file: str | None = None
        self._received = 0
        self._attached = False
        self._process = os.getpid()

    @property
    def best_path(self) -> pathlib.Path | None:
        """The checkpoint of the best epoch so far, None before there is one."""
        return None if self.best_file is None else self.directory / self.best_file

    @property
    def signalled(self) -> int:
        """The number of the signal that this rank has received, 0 for none."""
        return self._received

    @property
    def monitors_validation(self) -> bool:
        """Whether `monitor` is a value of the validation."""
        return (self.monitor or "").startswith(VALIDATION)

    def improves(self, value: float) -> bool:
        """Returns whether a value of `monitor` is better than any before."""
        if self.best is None:
            return value == value  # not NaN
        return value < self.best if self.mode == "min" else value > self.best

    def get_state(self) -> dict[str, Any]:
        """Returns what is to be known after a restart."""
        return {"best": self.best, "best_file": self.best_file}

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes over what an earlier run knew."""
        self.best, self.best_file = state["best"], state["best_file"]

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """While inside, `fit` may run, and the signals are caught."""
        self._received, self._attached, self._process = 0, True, os.getpid()
        before = {}
        try:
            if threading.current_thread() is threading.main_thread():
                for number in self.signals:
                    before[number] = signal.signal(number, self._receive)
            elif self.signals:
                warnings.warn(
                    "Signals are not caught: training does not run in the main thread, "
                    "and only there Python lets them be.",
                    stacklevel=2,
                )
            yield
        finally:
            for number, handler in before.items():
                # None stands for a handler that Python did not install.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            self._attached = False

    def _receive(self, number: int, frame: Any) -> None:
        if os.getpid() != self._process:  # a worker that was forked ends as it would
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        # A launcher may pass a signal on more than once.
        self._received = self._received or number

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Refuses to do nothing, under `keras.Model.fit`."""
        if not self._attached:
            raise RuntimeError(
                "Expected `Checkpoint` among the callbacks of `distkeras.Trainer.fit`, "
                "at one rank too. Received: it is called by `keras.Model.fit`, which "
                "keeps the order of the data to itself."
            )

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Asks training to stop after a signal; all ranks hear of it."""
        self._stop_if_signalled()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Asks training to stop after a signal; all ranks hear of it."""
        self._stop_if_signalled()

    def _stop_if_signalled(self) -> None:
        if self._received:
            self.model.stop_training = True
