"""The model's own ways to save, in scripts that were written for one process.

Such a script ends with `model.save("model.keras")`, on every rank: all would write the
same file at once, and leave a damaged one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

_METHODS = ("save", "save_weights", "export")
_ORIGINAL = "_distkeras_original"


def leave_saving_to_rank_zero(model: keras.Model, rank: Callable[[], int]) -> None:
    """Lets `save`, `save_weights` and `export` of a model do nothing on other ranks.

    They wait for nobody, so that they may also be called on rank 0 alone, as callbacks
    and careful scripts do.

    Args:
        model: of which rank 0 holds what the others hold.
        rank: returns that of this process, which an elastic job may change.
    """
    for name in _METHODS:
        method = getattr(model, name)
        # Of a model of several Trainers the newest one's ranks count.
        original = getattr(method, _ORIGINAL, method)
        object.__setattr__(model, name, _on_rank_zero(original, rank))


def _on_rank_zero(method: Callable[..., Any], rank: Callable[[], int]) -> Any:
    @functools.wraps(method)
    def save(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs) if rank() == 0 else None

    setattr(save, _ORIGINAL, method)
    return save
