"""Finding the checkpoint to go on from, and giving it to all ranks."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from typing import Literal

import numpy as np

from distkeras import _state
from distkeras._errors import CheckpointError
from distkeras._logging import LOGGER
from distkeras._position import Position
from distkeras._saver import FORMAT
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
        logs: how long the files of `CSVLogger` were, in bytes.
        own: whether it is this rank's own state, of a job that has lost ranks.
        stop: whether training was to stop there.
    """

    path: str
    state: _state.State
    position: Position
    data: dict[str, Any]
    callbacks: dict[str, Any]
    resized: Resized | None
    logs: dict[str, int]
    own: bool = False
    stop: bool = False

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

    found = collectively(communicator, reading_the_checkpoint, error=CheckpointError)
    for text in damaged:
        LOGGER.warning("Damaged checkpoint, passed over: %s", text)
    received = _distribute(found, communicator)
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
        logs=content.get("logs", {}),
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
