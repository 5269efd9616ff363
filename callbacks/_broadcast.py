"""`BroadcastVariables`: all ranks begin with rank 0's weights and optimizer state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from distkeras import _accumulated
from distkeras import backends
from distkeras.communicators import Communicator
from distkeras.communicators import agree
from distkeras.communicators import world
from distkeras.communicators._checks import check_root
from distkeras.gradients import canonical_path


class BroadcastVariables(keras.callbacks.Callback):
    """Copies weights and optimizer state from one rank to all when training begins.

    `Trainer` adds it by itself. In a loop of one's own call
    `broadcast_variables` once the model and the optimizer are built.

    The states of seed generators differ by rank on purpose, so that dropout draws
    another mask on every rank; they are derived from the root's, so that a run can be
    repeated. Gradients that ranks have added up for an update to come stay each rank's.

    Args:
        root: the rank whose state is copied.
        communicator: the ranks that take part; by default all of them.

    Raises:
        MismatchError: when training begins, on every rank, if the ranks' variables
            differ in number, order, shape or dtype.

    Example:
        ```python
        model.fit(x, y, callbacks=[distkeras.callbacks.BroadcastVariables()])
        ```
    """

    def __init__(
        self, *, root: int = 0, communicator: Communicator | None = None
    ) -> None:
        super().__init__()
        self.root = root
        self._communicator = communicator

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcasts."""
        communicator = self._communicator or world()
        if communicator.size == 1:
            return
        model = self.model
        optimizers = [] if model.optimizer is None else [model.optimizer]
        if backends.is_supported():
            optimizers = backends.current().find_optimizers(model)
        variables = [*model.variables]
        for optimizer in optimizers:
            variables += optimizer.variables
        # Between updates each rank holds what it alone has added up.
        parts = {id(part.variable) for part in _accumulated.parts(optimizers)}
        broadcast_variables(
            [variable for variable in variables if id(variable) not in parts],
            root=self.root,
            communicator=communicator,
        )
        _accumulated.part(optimizers, communicator)


def broadcast_variables(
    variables: Iterable[Any],
    *,
    root: int = 0,
    communicator: Communicator | None = None,
) -> None:
    """Overwrites variables with those of one rank.

    Args:
        variables: Keras variables, the same list in the same order on every rank.
        root: the rank whose values are copied.
        communicator: the ranks that take part; by default all of them.

    Raises:
        MismatchError: on every rank, if they name different roots, or naming the first
            variable that differs in path, shape or dtype.
        ValueError: on every rank, if `root` is no rank.

    Example:
        ```python
        variables = [*model.variables, *optimizer.variables]
        distkeras.callbacks.broadcast_variables(variables)
        ```
    """
    group = communicator or world()
    listed = list(variables)
    rows = [
        f"{n} {canonical_path(v)}: {tuple(v.shape)} {v.dtype}"
        for n, v in enumerate(listed)
    ]
    agree(
        group,
        "the variables to broadcast (root; path, shape and dtype, in order)",
        [f"root={root!r}", *rows],
    )
    check_root(root, group.size)
    if group.size == 1:
        return
    generators = [v for v in listed if _is_seed_state(v)]
    for variable in listed:
        value = np.array(keras.ops.convert_to_numpy(variable.value))
        # As bytes: a copy needs no arithmetic, so every dtype can travel.
        flat = np.frombuffer(bytearray(value.tobytes()), np.uint8)
        group.broadcast(flat, root)
        variable.assign(flat.view(value.dtype).reshape(value.shape))
    for generator in generators:
        generator.assign(_fold_in(generator, group.rank))


def _is_seed_state(variable: Any) -> bool:
    return variable.name.startswith("seed_generator_state")


def _fold_in(generator: Any, rank: int) -> np.ndarray:
    """Returns a seed state that belongs to this rank alone; rank 0 keeps its own."""
    state = np.array(keras.ops.convert_to_numpy(generator.value))
    if rank == 0:
        return state
    mixed = np.random.SeedSequence([*state.tolist(), rank]).generate_state(1)
    state[0] = mixed[0].astype(state.dtype)
    return state
