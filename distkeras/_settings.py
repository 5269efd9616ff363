"""What a model, its loss and its optimizers are set to, to be compared over ranks.

Replicas hold equal variables, but a rate of dropout or a momentum is no variable: ranks
that differ in one train different models with equal weights, or drift apart.

A difference ends the job, so that only what cannot differ for a good reason is looked
at: plain numbers, words and truth values that Keras' own classes are made with. Names,
seeds, initializers, shapes and learning rates may differ: they are numbered anew, meant
to, or given to all ranks by rank 0.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from numbers import Real
from typing import Any

import keras
import numpy as np

from distkeras import backends
from distkeras.backends._optimizers import inner_optimizers
from distkeras.communicators import Communicator
from distkeras.communicators import agree

_LEFT_OUT = ("name", "seed", "seed_generator", "learning_rate", "trainable")
_LEFT_OUT_ENDINGS = ("initializer", "shape", "_name", "config")
_MOST_VALUES = 16  # of a list: vocabularies may have millions


class AgreeOnSettings(keras.callbacks.Callback):
    """Raises on every rank, before training begins, if settings differ.

    Args:
        communicator: the ranks that must agree.
    """

    def __init__(self, communicator: Communicator) -> None:
        super().__init__()
        self._communicator = communicator

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Compares.

        Raises:
            MismatchError: on every rank, naming the first setting that differs.
        """
        what = "the settings of layers, losses and optimizers"
        agree(self._communicator, what, settings_of(self.model))


def settings_of(model: keras.Model) -> list[str]:
    """Returns a line for each setting, in an order that is the same on every rank.

    Args:
        model: built and compiled.
    """
    losses = keras.tree.flatten(getattr(model._compile_loss, "_user_loss", None))
    return [
        *_rows("layer", model._flatten_layers(include_self=False)),
        *_rows("loss", losses),
        *_rows("optimizer", _optimizers(model)),
    ]


def _optimizers(model: keras.Model) -> Iterator[keras.optimizers.Optimizer]:
    """Yields a model's optimizers, after each those that it wraps.

    What a `MultiOptimizer` writes of itself does not tell all of its members.
    """
    for optimizer in backends.current().find_optimizers(model):
        yield optimizer
        for member in inner_optimizers(optimizer):
            if member is not optimizer:
                yield member


def _rows(what: str, things: Iterable[Any]) -> Iterator[str]:
    """Yields the settings of Keras' own objects; `what` they are is for the message."""
    known = [thing for thing in things if _is_known(thing)]
    for number, thing in enumerate(known, 1):
        for path, value in _plain(_config(thing)):
            yield f"{what} {number} ({type(thing).__name__}): {path}={value}"


def _is_known(thing: Any) -> bool:
    """Whether this is an object of Keras' own, whose settings mean the same to all.

    Models are made of the layers that come after them; whether there is an input layer
    depends on how they were built.
    """
    if isinstance(thing, keras.Model | keras.layers.InputLayer):
        return False
    return _is_of_keras(type(thing).__module__)


def _config(thing: Any) -> Mapping[str, Any]:
    """Returns the configuration of an object, empty where it has none to show."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as of lambdas, which are not written here
        try:
            config = thing.get_config()
        except Exception:  # whatever it is made with cannot be told
            return {}
    return config if isinstance(config, Mapping) else {}


def _plain(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Yields each setting with its value, if that is the same in equal processes."""
    for key in config:
        value = config[key]
        if key == "learning_rate" and isinstance(value, Mapping):
            yield from _of_object(value, f"{path}{key}")  # a schedule
        elif key not in _LEFT_OUT and not key.endswith(_LEFT_OUT_ENDINGS):
            yield from _of_value(value, f"{path}{key}")


def _of_value(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        yield from _of_object(value, path)
        return
    text = _text(value)
    if text is not None:
        yield path, text


def _of_object(value: Mapping[str, Any], path: str) -> Iterator[tuple[str, str]]:
    """Yields what Keras writes of an object within another, if that is its own."""
    kind, config = value.get("class_name"), value.get("config")
    if kind == "DTypePolicy" and isinstance(config, Mapping):
        yield path, str(config.get("name"))
    elif _is_of_keras(value.get("module")) and isinstance(config, Mapping):
        yield path, str(kind)
        yield from _plain(config, f"{path}.")


def _is_of_keras(module: Any) -> bool:
    return f"{module}.".startswith("keras.")


def _text(value: Any) -> str | None:
    """Returns a value as it is compared, None for what is not."""
    if value is None or isinstance(value, bool | np.bool_):
        return str(value)
    if isinstance(value, Real):
        return f"{float(value):.6g}"  # the last digits may be a machine's
    if isinstance(value, str):
        return None if os.sep in value else value
    if isinstance(value, list | tuple) and len(value) <= _MOST_VALUES:
        parts = [_text(part) for part in value]
        return None if None in parts else f"[{', '.join(map(str, parts))}]"
    return None
