"""Gradients that have been added up for an update that is still to come.

While ranks train, each holds a part of its own: the parts of all ranks add up to what
one process would hold (see `backends/_tensorflow_accumulation.py`). Whole gradients
are those of one process. They belong in files, and are what ranks begin with that have
loaded one; so parts are made whole where training ends, and parted again where it
begins.

Scales that overwrite their variable (float8) are not added up: of them the largest
counts, so that all ranks may hold the whole.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from distkeras import backends
from distkeras.backends._optimizers import accumulation_steps
from distkeras.backends._optimizers import inner_optimizers
from distkeras.communicators import Communicator

Optimizers = Sequence[keras.optimizers.Optimizer]


@dataclasses.dataclass(frozen=True)
class Part:
    """Where one rank adds up the gradients of one variable.

    Attributes:
        variable: that holds the sum.
        largest: whether not the sum counts, but the largest of all ranks.
    """

    variable: Any
    largest: bool


def parts(optimizers: Optimizers) -> list[Part]:
    """Returns where ranks add up gradients.

    Not in a `MultiOptimizer` whose members have no common rhythm: its gradients are
    exchanged at every step, and all ranks add up the same.
    """
    return [
        Part(variable, bool(getattr(of, "overwrite_with_gradient", False)))
        for optimizer in optimizers
        for member in _accumulating(optimizer)
        for of, variable in zip(
            member._trainable_variables, member._accumulated_gradients, strict=True
        )
    ]


def pending(optimizers: Optimizers) -> bool:
    """Whether gradients have been added up that no update has used yet."""
    return any(
        int(member._iterations) % member.gradient_accumulation_steps
        for optimizer in optimizers
        for member in _accumulating(optimizer)
    )


def spread(optimizers: Optimizers, communicator: Communicator) -> None:
    """Gives all ranks equal parts; collective."""
    _combine(optimizers, communicator, 1 / communicator.size)


def make_whole(
    optimizers: Optimizers, communicator: Communicator, *, everywhere: bool
) -> None:
    """Gives ranks whole gradients; collective.

    Args:
        optimizers: all that a model has.
        communicator: the ranks.
        everywhere: whether on all ranks, which then no longer are parts. Otherwise on
            rank 0, and nothing on the others: these are parts, too.
    """
    mine = everywhere or communicator.rank == 0
    _combine(optimizers, communicator, 1.0 if mine else 0.0)


def part(optimizers: Optimizers, communicator: Communicator) -> None:
    """Makes parts of gradients that all ranks hold whole; others are left; collective.

    Ranks that all hold the same hold it whole: after training, or from a file.

    Args:
        optimizers: all that a model has, as far along on every rank.
        communicator: the ranks.
    """
    if not pending(optimizers):
        return
    digest = hashlib.blake2b()
    for each in parts(optimizers):
        digest.update(_array(each.variable).tobytes())
    same = len(set(communicator.allgather_object(digest.digest()))) == 1
    if same and communicator.rank > 0:
        scale(optimizers, 0.0)


def scale(optimizers: Optimizers, factor: float) -> None:
    """Multiplies what this rank has added up."""
    if factor == 1:
        return
    for each in parts(optimizers):
        if not each.largest:
            each.variable.assign(each.variable * factor)


class WholeGradients(keras.callbacks.Callback):
    """Makes gradients whole before files are written; before the user's callbacks.

    On rank 0, which writes, at the end of an epoch; on all ranks when training ends.
    Nothing is sent where none are added up.

    Args:
        communicator: the ranks.
    """

    def __init__(self, communicator: Communicator) -> None:
        super().__init__()
        self._communicator = communicator

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Before checkpoints."""
        self._make_whole(everywhere=False)

    def on_train_end(self, logs: Any = None) -> None:
        """Before the ranks do without each other."""
        self._make_whole(everywhere=True)

    def _make_whole(self, *, everywhere: bool) -> None:
        optimizers = backends.current().find_optimizers(self.model)
        if pending(optimizers):
            make_whole(optimizers, self._communicator, everywhere=everywhere)


def _accumulating(
    optimizer: keras.optimizers.Optimizer,
) -> list[keras.optimizers.Optimizer]:
    """Returns the members whose gradients are exchanged once an update."""
    if not optimizer.built or not accumulation_steps(optimizer):
        return []
    return inner_optimizers(optimizer)


def _combine(optimizers: Optimizers, communicator: Communicator, factor: float) -> None:
    """Adds up what ranks hold, in float64, and keeps a share of it."""
    for each in parts(optimizers):
        value = _array(each.variable)
        flat = value.astype("float64").reshape(-1)
        communicator.allreduce(flat, "max" if each.largest else "sum")
        if not each.largest:
            flat *= factor
        whole = flat.reshape(value.shape)
        each.variable.assign(keras.ops.cast(whole, each.variable.dtype))


def _array(variable: Any) -> np.ndarray:
    return np.array(keras.ops.convert_to_numpy(variable.value))
