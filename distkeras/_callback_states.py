"""What callbacks have seen so far, where that decides what they do next."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

# Attributes that `on_train_begin` resets, or that belong to one run.
_KNOWN: tuple[tuple[type, tuple[str, ...]], ...] = (
    (
        keras.callbacks.EarlyStopping,
        ("wait", "stopped_epoch", "best", "best_weights", "best_epoch"),
    ),
    (keras.callbacks.ReduceLROnPlateau, ("wait", "cooldown_counter", "best")),
    (
        keras.callbacks.ModelCheckpoint,
        ("best", "_batches_seen_since_last_saving", "_last_batch_seen"),
    ),
    (keras.callbacks.SwapEMAWeights, ("_ema_weights_in_model",)),
    (keras.callbacks.TensorBoard, ("_global_train_batch", "_global_test_batch")),
)
_ARRAY = "array"


def take(
    callbacks: Iterable[keras.callbacks.Callback],
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the states of callbacks: as JSON can hold them, and arrays by name.

    Args:
        callbacks: those of Keras whose state is known, and others that have methods
            `get_state()`, which returns what JSON can hold and arrays, and
            `set_state(state)`.
    """
    arrays: dict[str, np.ndarray] = {}
    states = {}
    for key, callback in named(callbacks):
        state = _get(callback)
        if state is not None:
            states[key] = _encoded(state, f"callback/{key}", arrays)
    return states, arrays


def restore(
    callbacks: Iterable[keras.callbacks.Callback],
    states: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
) -> None:
    """Gives callbacks their states back; one that had none keeps its own."""
    for key, callback in named(callbacks):
        if key in states:
            _set(callback, _decoded(states[key], arrays))


def glance(callbacks: Iterable[keras.callbacks.Callback]) -> dict[str, Any]:
    """Returns the states of callbacks as they are, without copies of arrays.

    To be kept in this process: `restore` takes them too.
    """
    states = {name: _get(callback) for name, callback in named(callbacks)}
    return {name: state for name, state in states.items() if state is not None}


def named(
    callbacks: Iterable[keras.callbacks.Callback],
) -> list[tuple[str, keras.callbacks.Callback]]:
    """Returns callbacks with names: the class and its number among those of it."""
    counts: dict[str, int] = {}
    named = []
    for callback in callbacks:
        kind = type(callback).__name__
        counts[kind] = counts.get(kind, -1) + 1
        named.append((f"{kind}-{counts[kind]}", callback))
    return named


def _get(callback: keras.callbacks.Callback) -> Any:
    if hasattr(callback, "get_state"):
        return callback.get_state()
    for kind, names in _KNOWN:
        if isinstance(callback, kind):
            held = vars(callback)
            return {name: held[name] for name in names if name in held}
    return None


def _set(callback: keras.callbacks.Callback, state: Any) -> None:
    if hasattr(callback, "set_state"):
        callback.set_state(state)
        return
    for name, value in state.items():
        setattr(callback, name, value)


def _encoded(value: Any, name: str, arrays: dict[str, np.ndarray]) -> Any:
    """Returns a value as JSON can hold it; arrays go to `arrays`."""
    if isinstance(value, Mapping):
        return {str(k): _encoded(v, f"{name}/{k}", arrays) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_encoded(v, f"{name}/{n}", arrays) for n, v in enumerate(value)]
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()
    if isinstance(value, keras.Variable) or keras.ops.is_tensor(value):
        value = np.asarray(keras.ops.convert_to_numpy(value))
    if isinstance(value, np.ndarray):
        arrays[name] = np.array(value)
        return {_ARRAY: name}
    return value


def _decoded(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if isinstance(value, list):
        return [_decoded(part, arrays) for part in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_ARRAY}:
        return arrays[value[_ARRAY]]
    return {name: _decoded(part, arrays) for name, part in value.items()}
