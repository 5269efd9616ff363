"""Going on from a checkpoint: finding it, putting it back, passing over what was done.

Keras begins its loop at an epoch, never within one. So in the epoch that goes on, the
steps that were done are gone through once more by Keras' loop alone: the data begins
after them, the training function returns at once, and callbacks do not hear of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import warnings
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from typing import Literal

import keras
import numpy as np

from distkeras import _callback_states
from distkeras import _state
from distkeras._errors import CheckpointError
from distkeras._logging import LOGGER
from distkeras._position import Position
from distkeras._position import Tracker
from distkeras._saver import FORMAT
from distkeras._saver import Saver
from distkeras.callbacks import _files
from distkeras.callbacks._checkpoint import Checkpoint
from distkeras.communicators import Communicator
from distkeras.communicators import collectively

Resized = Literal["keep_global_batch", "rescale"]


@dataclasses.dataclass
class Resumption:
    """A checkpoint that all ranks hold, to go on from.

    Attributes:
        path: of the file on rank 0.
        state: of the model and what belongs to it.
        position: where training goes on.
        data: how the data was dealt.
        callbacks: states of callbacks.
        resized: what is done about another number of ranks; None for as many.
    """

    path: str
    state: _state.State
    position: Position
    data: dict[str, Any]
    callbacks: dict[str, Any]
    resized: Resized | None

    @property
    def seed(self) -> int:
        """Of the order of the data."""
        return self.data["seed"]

    @property
    def kept_global_batch(self) -> int | None:
        """The global batch size to go on with, where another would be chosen."""
        keeps = self.resized == "keep_global_batch" and not self.data["own"]
        return self.data["units_a_step"] if keeps and self._by_sample else None

    @property
    def kept_factor(self) -> float | None:
        """The factor of the learning rate to go on with, where the batch is kept."""
        if self.kept_global_batch is None:
            return None
        factors = [
            part["factor"]
            for rates in self.state.description["rates"]
            for part in rates
        ]
        return factors[0] if factors else None

    @property
    def _by_sample(self) -> bool:
        return self.data["kind"] == "arrays"


def find_checkpoint(callbacks: Sequence[Any]) -> Checkpoint | None:
    """Returns the callback that writes checkpoints, if there is one.

    Raises:
        ValueError: if there are several.
    """
    found = [c for c in callbacks if isinstance(c, Checkpoint)]
    if len(found) > 1:
        raise ValueError(
            f"Expected one `Checkpoint` among the callbacks. Received: {len(found)}"
        )
    return found[0] if found else None


def find(
    resume: str | os.PathLike[str] | None,
    checkpoint: Checkpoint | None,
    communicator: Communicator,
    *,
    resized: Resized,
) -> Resumption | None:
    """Returns the checkpoint to go on from, on all ranks; collective.

    Args:
        resume: `"auto"` for the newest usable one of `checkpoint`, or none if there is
            none; the path of a file, or of a folder that holds one; None for none.
        checkpoint: the user's callback.
        communicator: the ranks. Rank 0 alone reads.
        resized: what to do if the checkpoint is one of another number of ranks.

    Raises:
        ValueError: if an option has no meaning.
        CheckpointError: on every rank, if rank 0 finds no usable checkpoint where one
            was named.
    """
    if resized not in ("keep_global_batch", "rescale"):
        raise ValueError(
            "Expected `resized` to be 'keep_global_batch' or 'rescale'. Received: "
            f"{resized!r}"
        )
    if resume is None:
        return None
    auto = resume == "auto"
    if auto and checkpoint is None:
        raise ValueError(
            "Expected a `distkeras.callbacks.Checkpoint` among the callbacks with "
            "resume='auto': its folder is where to look. Or pass the path of a file."
        )
    place = checkpoint.directory if auto and checkpoint else Path(resume)
    damaged: list[str] = []

    def reading_the_checkpoint() -> tuple[str, dict[str, np.ndarray], Any] | None:
        if communicator.rank > 0:
            return None
        return _newest(place, damaged, needed=not auto)

    try:
        found = collectively(communicator, reading_the_checkpoint)
    finally:
        # Last where it raises too: no rank may be left in a collective.
        texts = [f"Damaged checkpoint, passed over: {text}" for text in damaged]
    received = _distribute(found, communicator)
    for text in texts:
        warnings.warn(text, stacklevel=3)
    if received is None:
        LOGGER.info("resume='auto': no checkpoint in %s, training begins", place)
        return None
    path, arrays, content = received
    same = content["state"]["world_size"] == communicator.size
    return Resumption(
        path=path,
        state=_state.State(arrays, content["state"]),
        position=Position(**content["position"]),
        data=content["data"],
        callbacks=content["callbacks"],
        resized=None if same else resized,
    )


def _newest(
    place: Path, damaged: list[str], *, needed: bool
) -> tuple[str, dict[str, np.ndarray], Any] | None:
    """Reads the newest usable checkpoint; notes those that are not usable."""
    candidates = [place] if place.is_file() else _files.listed(place)
    for path in candidates:
        try:
            arrays, content = _files.read(path)
        except _files.DamagedError as error:
            damaged.append(f"{path}: {error}")
            continue
        if content["format"] > FORMAT:
            raise CheckpointError(
                f"Expected a checkpoint of format {FORMAT} or lower. Received: {path}, "
                f"of format {content['format']}, written by distkeras "
                f"{content['versions']['distkeras']}"
            )
        return str(path), arrays, content
    # Also with "auto": to begin anew is not what somebody with checkpoints expects.
    if needed or damaged:
        reasons = f" ({'; '.join(damaged)})" if damaged else ""
        raise CheckpointError(f"Expected a usable checkpoint in {place}: none{reasons}")
    return None


def _distribute(
    found: tuple[str, dict[str, np.ndarray], Any] | None, communicator: Communicator
) -> tuple[str, dict[str, np.ndarray], Any] | None:
    """Gives all ranks what rank 0 has read; collective."""
    head = None
    if found is not None:
        path, arrays, content = found
        kinds = [(name, array.dtype, array.shape) for name, array in arrays.items()]
        head = (path, kinds, content)
    head = communicator.broadcast_object(head)
    if head is None:
        return None
    path, kinds, content = head
    received = {}
    for name, dtype, shape in kinds:
        if found is not None:
            data = np.frombuffer(bytearray(found[1][name].tobytes()), np.uint8)
        else:
            data = np.empty(math.prod(shape) * dtype.itemsize, np.uint8)
        if data.size:
            communicator.broadcast(data)
        received[name] = data.view(dtype).reshape(shape)
    return path, received, content


class Continuation:
    """What a `fit` runs with that writes checkpoints, or goes on from one.

    Args:
        model: built, its optimizers too.
        data: the sharded training data, looked at already.
        communicator: the ranks.
        callbacks: the user's.
        resumption: the checkpoint to go on from, or None.
        steps_per_epoch: as given to `fit`.

    Raises:
        ValueError: on every rank, if the data is not that of the checkpoint, or cannot
            be gone on with.
    """

    def __init__(
        self,
        model: keras.Model,
        data: Any,
        communicator: Communicator,
        callbacks: Sequence[keras.callbacks.Callback],
        resumption: Resumption | None,
        steps_per_epoch: int | None,
    ) -> None:
        self._model = model
        self._checkpoint = find_checkpoint(callbacks)
        if self._checkpoint is not None:
            _check_can_be_gone_on_with(data, steps_per_epoch)
        start = None
        if resumption is not None:
            start = _place(resumption, data, steps_per_epoch)
        # The last execution of an epoch may be a short one.
        step = 0 if start is None else start.step
        self._skipped = math.ceil(step / model.steps_per_execution)
        self._tracker = Tracker(
            start=start, steps_per_epoch=steps_per_epoch, pass_steps=data.num_batches
        )
        self._early: list[keras.callbacks.Callback] = []
        self._late: list[keras.callbacks.Callback] = []
        if resumption is not None:
            within = step > 0
            restore = _Restore(resumption, callbacks, communicator, within=within)
            self._early.append(restore)
            if within:
                self._late.append(_RestoreWithin(restore))
        self._saver = None
        if self._checkpoint is not None:
            self._saver = Saver(
                self._checkpoint,
                self._tracker,
                data,
                callbacks,
                communicator,
                steps_per_epoch,
            )
            self._late.append(self._saver)

    @property
    def early(self) -> list[keras.callbacks.Callback]:
        """Callbacks that come right after the broadcast of variables."""
        return [*self._early, self._tracker]

    @property
    def late(self) -> list[keras.callbacks.Callback]:
        """Callbacks that come after all that change the state."""
        return self._late

    def train_function(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns what `fit` calls a step: at first it passes over steps done."""
        if not self._skipped:
            return function
        left = self._skipped
        logs: dict[str, Any] | None = None

        def train_function(iterator: Any) -> Any:
            nonlocal left, logs
            if left == 0:
                return function(iterator)
            left -= 1
            if logs is None:  # of the epoch so far, in case that nothing follows
                logs = self._model.get_metrics_result()
            return logs

        return train_function

    def arranged(self, callbacks: list[Any], **params: Any) -> Any:
        """Returns the callbacks in the form in which `fit` is to be given them.

        Args:
            callbacks: all of them, in order.
            **params: verbose, epochs, steps.
        """
        if not self._skipped:
            return callbacks
        return _QuietAtFirst(self._skipped, callbacks, self._model, **params)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """To be entered around `fit`."""
        with contextlib.ExitStack() as stack:
            if self._saver is not None and self._checkpoint is not None:
                stack.callback(self._saver.close)
                stack.enter_context(self._checkpoint.attached())
            yield


def _place(resumption: Resumption, data: Any, steps_per_epoch: int | None) -> Position:
    """Lets the data begin where the checkpoint was taken; returns where that is."""
    position, saved = resumption.position, resumption.data
    now = {"kind": data.kind, "own": data.part.own, "units": data.units}
    within = position.pass_steps > 0
    names = {
        "kind": "kind of data",
        "own": "`shard=False`",
        "units": "number of samples" if data.kind == "arrays" else "number of batches",
    }
    for key, value in now.items():
        if within and saved[key] != value and not (key == "units" and saved["own"]):
            raise ValueError(
                f"Expected the data of the checkpoint {resumption.path}, which was "
                f"taken within a pass over it: {names[key]} {saved[key]!r}. Received: "
                f"{value!r}"
            )
    if not within:
        data.start_at(position.pass_number, 0, steps=0, epochs=position.epochs)
        return position
    if steps_per_epoch != saved["steps_per_epoch"]:
        raise ValueError(
            f"Expected `steps_per_epoch={saved['steps_per_epoch']}`, as when the "
            f"checkpoint {resumption.path} was taken, within a pass over the data. "
            f"Received: {steps_per_epoch}"
        )
    if data.num_batches is not None and position.pass_steps != position.step:
        raise ValueError(
            "Expected a checkpoint of the beginning of a pass over the data. Received: "
            f"{resumption.path}, taken {position.pass_steps} steps into one of "
            f"{data.num_batches}, of which `steps_per_epoch={steps_per_epoch}` makes "
            "several epochs. Leave `steps_per_epoch` out, and give more epochs."
        )
    same_steps = resumption.resized is None and (
        saved["own"] or saved["units_a_step"] == data.units_a_step
    )
    if data.part.own and not same_steps:
        raise ValueError(
            f"Expected as many ranks as wrote the checkpoint {resumption.path}: it was "
            "taken within an epoch, in which each rank has data of its own "
            "(`shard=False`). Checkpoints of the ends of epochs can be gone on from."
        )
    units = data.units_after(position.pass_steps) if same_steps else saved["units_done"]
    pass_steps = data.start_at(
        position.pass_number,
        units,
        steps=position.pass_steps if same_steps else None,
        epochs=position.epochs,
    )
    step = pass_steps if steps_per_epoch is None else position.step
    return dataclasses.replace(position, step=step, pass_steps=pass_steps)


def _check_can_be_gone_on_with(data: Any, steps_per_epoch: int | None) -> None:
    """Raises before training where no checkpoint of it could be used."""
    steps = data.num_batches
    if steps is not None and steps_per_epoch is not None and steps_per_epoch < steps:
        raise ValueError(
            "Expected epochs of whole passes over the data with a Checkpoint, which "
            "cannot be gone on from within a pass of several epochs. Received: "
            f"steps_per_epoch={steps_per_epoch} of {steps} ({data.description}). Leave "
            "`steps_per_epoch` out, or pass data without an end (`.repeat()`)."
        )


class _Restore(keras.callbacks.Callback):
    """Puts the state back when training begins; comes first in the list.

    Args:
        resumption: the checkpoint.
        users: the user's callbacks.
        communicator: the ranks.
        within: whether an epoch is gone on with. Then what callbacks do when it begins
            has been done: the state is put back once more after them.
    """

    def __init__(
        self,
        resumption: Resumption,
        users: Sequence[keras.callbacks.Callback],
        communicator: Communicator,
        *,
        within: bool,
    ) -> None:
        super().__init__()
        self._resumption: Resumption | None = resumption
        self._users = users
        self._communicator = communicator
        self._within = within

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Restores weights and optimizers."""
        resumption = self._resumption
        if resumption is None:
            return
        _state.restore(self.model, resumption.state, self._communicator)
        if self._communicator.rank == 0:
            position = resumption.position
            LOGGER.info(
                "going on from %s: epoch %d, %d of its steps done",
                resumption.path,
                position.epoch + 1,
                position.step,
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Restores what callbacks have reset when training began."""
        if self._resumption is not None and not self._within:
            self._restore_callbacks(self._resumption)
            self._resumption = None

    def restore_within(self) -> None:
        """Restores all, after what callbacks do when an epoch begins."""
        resumption, self._resumption = self._resumption, None
        if resumption is not None:
            _state.restore(self.model, resumption.state, self._communicator)
            _state.restore_metrics(self.model, resumption.state, self._communicator)
            self._restore_callbacks(resumption)

    def _restore_callbacks(self, resumption: Resumption) -> None:
        arrays = resumption.state.arrays
        _callback_states.restore(self._users, resumption.callbacks, arrays)


class _RestoreWithin(keras.callbacks.Callback):
    """The second half of `_Restore`; comes last in the list."""

    def __init__(self, restore: _Restore) -> None:
        super().__init__()
        self._restore = restore

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Restores."""
        self._restore.restore_within()


class _QuietAtFirst(keras.callbacks.CallbackList):
    """Keras' list of callbacks, which does not tell them of steps passed over."""

    def __init__(
        self, executions: int, callbacks: list[Any], model: keras.Model, **params: Any
    ) -> None:
        super().__init__(
            callbacks,
            add_history=True,
            add_progbar=params["verbose"] != 0,
            model=model,
            **params,
        )
        self._left = executions

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Passes on, but for the first ones."""
        if not self._left:
            super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Passes on, but for the first ones."""
        if self._left:
            self._left -= 1
        else:
            super().on_train_batch_end(batch, logs)
