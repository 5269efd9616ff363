"""The optimizers that a model holds, and how a step of its own lets them exchange."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

from distkeras.backends._optimizers import inner_optimizers
from distkeras.backends._tensorflow_exchange import TensorFlowExchange


def overrides_train_step(model: keras.Model) -> bool:
    """Returns whether the model brings its own `train_step`."""
    return type(model).train_step is not TensorFlowTrainer.train_step


def find_optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Returns every optimizer a model holds.

    `compile`'s, its own attributes, lists and dictionaries of them; and where its
    step is its own, those that its models were compiled with.
    """
    compiled = getattr(model, "optimizer", None)  # set by `compile` alone
    found = [] if compiled is None else [compiled]
    # An attribute may be what `compile` wrapped in a `LossScaleOptimizer`.
    seen = {id(o) for c in found for o in (c, *inner_optimizers(c))}
    held = list(_optimizers_in(list(vars(model).values())))
    if overrides_train_step(model):
        parts = model._flatten_layers(include_self=False)
        models = [part for part in parts if isinstance(part, keras.Model)]
        # Those that were never compiled have no such attribute.
        held += _optimizers_in([getattr(m, "optimizer", None) for m in models])
    for optimizer in held:
        if id(optimizer) not in seen:
            seen.update(id(o) for o in (optimizer, *inner_optimizers(optimizer)))
            found.append(optimizer)
    return found


def _optimizers_in(value: Any) -> Iterator[keras.optimizers.Optimizer]:
    """Yields the optimizers of an attribute, in order."""
    if isinstance(value, keras.optimizers.Optimizer):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _optimizers_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _optimizers_in(item)


@contextlib.contextmanager
def exchanging(
    optimizers: list[keras.optimizers.Optimizer],
    exchange: TensorFlowExchange,
    *,
    may_be_exhausted: bool,
) -> Iterator[None]:
    """Makes `apply` of each optimizer exchange first, while inside.

    The instance attribute hides the method during tracing only, so that nothing that
    is saved, copied or traced elsewhere ever sees it.
    """

    def hook(optimizer: keras.optimizers.Optimizer) -> None:
        original = optimizer.apply

        def apply(grads: Any, trainable_variables: Any = None) -> None:
            grads = list(grads)
            if trainable_variables is None:
                trainable_variables = optimizer._trainable_variables
            exchange.apply(
                original,
                optimizer,
                grads,
                list(trainable_variables),
                may_be_exhausted=may_be_exhausted,
            )

        object.__setattr__(optimizer, "apply", apply)

    hooked = []
    try:
        for optimizer in optimizers:
            hook(optimizer)
            hooked.append(optimizer)
        yield
    finally:
        for optimizer in hooked:
            object.__delattr__(optimizer, "apply")
