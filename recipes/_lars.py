"""LARS: a learning rate for each layer, for batches of many thousands."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops


@keras.saving.register_keras_serializable("distkeras.recipes")
class LARS(keras.optimizers.Optimizer):
    """Momentum whose step is scaled, layer by layer, by weights over gradients.

    With w the weights of a layer, g their gradient, β the decay, m the momentum, γ the
    learning rate and η the trust coefficient (You, Gitman, Ginsburg 2017,
    arXiv:1708.03888, equation 6 and algorithm 1):

        λ = η |w| / (|g| + β |w|)
        v = m v + γ λ (g + β w)
        w = w - v

    Vectors (biases, scales and offsets of normalization) have no decay, and λ = 1. So
    has a layer whose weights or gradients are all zero.

    A saved model names this class: without this package it loads by
    `keras.models.load_model(path, compile=False)`.

    Args:
        learning_rate: γ; a number or a schedule.
        momentum: m.
        trust: η, 0.001 in the paper.
        decay: β, as part of the gradient. Not Keras' `weight_decay`, which is apart
            from it: leave that, and the L2 penalties of layers, out.
        name: of the optimizer.
        **kwargs: further options of `keras.optimizers.Optimizer`.

    Raises:
        ValueError: as Keras does, if one of `kwargs` is no option or has no meaning.

    Example:
        >>> optimizer = LARS(8.0, decay=1e-4)
        >>> optimizer.get_config()["trust"]
        0.001
    """

    def __init__(
        self,
        learning_rate: Any = 0.1,
        momentum: float = 0.9,
        trust: float = 1e-3,
        decay: float = 0.0,
        name: str = "lars",
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate=learning_rate, name=name, **kwargs)
        self.momentum = momentum
        self.trust = trust
        self.decay = decay

    def build(self, variables: list[Any]) -> None:
        """Creates a velocity for each variable."""
        if self.built:
            return
        super().build(variables)
        self.velocities = [
            self.add_variable_from_reference(variable, name="velocity")
            for variable in variables
        ]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Moves one variable."""
        rate = ops.cast(learning_rate, variable.dtype)
        gradient = ops.cast(gradient, variable.dtype)
        velocity = self.velocities[self._get_variable_index(variable)]
        if len(variable.shape) > 1:
            weights = ops.norm(ops.reshape(variable, (-1,)))
            slope = ops.norm(ops.reshape(gradient, (-1,)))
            known = ops.logical_and(weights > 0, slope > 0)
            below = ops.where(known, slope + self.decay * weights, 1.0)
            rate = rate * ops.where(known, self.trust * weights / below, 1.0)
            gradient = gradient + self.decay * variable
        step = self.momentum * velocity + rate * gradient
        self.assign(velocity, step)
        self.assign_sub(variable, step)

    def get_config(self) -> dict[str, Any]:
        """Returns the options."""
        mine = {"momentum": self.momentum, "trust": self.trust, "decay": self.decay}
        return {**super().get_config(), **mine}
