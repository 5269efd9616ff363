"""Agreement on what a `Trainer` is called for, before any rank acts on it."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any

import keras

from distkeras import backends
from distkeras._session import Session
from distkeras.callbacks._checkpoint import Checkpoint
from distkeras.communicators import agree

# In these all ranks take part, also where rank 0 alone writes.
_SHARED = (keras.callbacks.BackupAndRestore, Checkpoint)


def agree_on_call(
    call: str, session: Session, callbacks: Iterable[Any], options: Mapping[str, Any]
) -> None:
    """Raises on every rank unless all make the same call of the same model.

    Collective.

    Args:
        call: the name of the method.
        session: of the model and the ranks.
        callbacks: the user's.
        options: what the method was called with, and the trainer made with.

    Raises:
        MismatchError: on every rank, if ranks were called differently.
    """
    listed = list(callbacks)
    rows = [
        f"call={call}",
        *(f"{name}={value!r}" for name, value in options.items()),
        *session.options,
        *(
            f"{kind.__name__} callbacks (to be passed on every rank): "
            f"{sum(isinstance(callback, kind) for callback in listed)}"
            for kind in _SHARED
        ),
        *_compilation(session.model),
    ]
    agree(session.communicator, f"the call of `Trainer.{call}` and its options", rows)


def _compilation(model: keras.Model) -> list[str]:
    """Returns what ranks must have compiled alike, a line for each setting."""
    if not model.compiled:
        return ["not compiled"]
    losses = keras.tree.flatten(getattr(model._compile_loss, "_user_loss", None))
    optimizers = backends.current().find_optimizers(model)
    return [
        f"jit_compile={model.jit_compile}",
        f"run_eagerly={model.run_eagerly}",
        f"steps_per_execution={model.steps_per_execution}",
        f"loss={[_name(loss) for loss in losses]}",
        f"optimizers={[_name(optimizer) for optimizer in optimizers]}",
    ]


def _name(thing: Any) -> str:
    """Returns a name that is the same in every process, without addresses."""
    if isinstance(thing, str):
        return thing
    return getattr(thing, "__name__", type(thing).__name__)
