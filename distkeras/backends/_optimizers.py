"""What the exchange must know of a Keras optimizer: who accumulates, what scales.

All reading of private optimizer attributes is here; `tests/test_optimizer.py` fails
when Keras changes one of them.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import keras


@dataclasses.dataclass(frozen=True)
class Accumulating:
    """An optimizer that sums gradients over several steps before it updates."""

    optimizer: keras.optimizers.Optimizer

    def accumulator(self, variable: Any) -> Any:
        """Returns the Keras variable that holds the sum for `variable`."""
        index = self.optimizer._get_variable_index(variable)
        return self.optimizer._accumulated_gradients[index]


def inner_optimizers(
    optimizer: keras.optimizers.Optimizer,
) -> list[keras.optimizers.Optimizer]:
    """Returns the optimizers that update weights, through every wrapper.

    Args:
        optimizer: plain, or a `LossScaleOptimizer` or `MultiOptimizer` around others.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        return inner_optimizers(inner)
    return list(getattr(optimizer, "optimizers", None) or [optimizer])


def accumulation_steps(optimizer: keras.optimizers.Optimizer) -> int | None:
    """Returns how many steps make one update, None where every step does.

    Where the parts of a `MultiOptimizer` accumulate differently there is no common
    rhythm; None is returned too: gradients are then exchanged at every step, which
    costs messages, not exactness.
    """
    steps = {o.gradient_accumulation_steps for o in inner_optimizers(optimizer)}
    return steps.pop() if len(steps) == 1 else None


def accumulating_optimizers(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[Any]
) -> list[tuple[Accumulating, Any]]:
    """Returns, for each variable, the optimizer that accumulates its gradient."""
    outer = getattr(optimizer, "inner_optimizer", optimizer)
    parts = inner_optimizers(outer)
    if len(parts) == 1 and parts[0] is outer:
        return [(Accumulating(outer), variable) for variable in variables]
    owner = outer._var_to_optimizer_idx
    return [(Accumulating(parts[owner[outer._var_key(v)]]), v) for v in variables]


def gradient_scale(optimizer: keras.optimizers.Optimizer) -> Any:
    """Returns what gradients are still multiplied by when they are exchanged."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer.dynamic_scale.value
    return optimizer.loss_scale_factor or 1.0


def under_loss_scaling() -> bool:
    """Returns whether a `LossScaleOptimizer` is applying the optimizer inside of it.

    It does so in a branch that is taken where gradients are finite, and lets the one
    inside know of nothing: the stack alone tells.
    """
    file = keras.optimizers.LossScaleOptimizer.apply.__code__.co_filename
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    return frame is not None


def indifferent_to_duplicates(optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether rows of a sparse gradient with the same index may be summed.

    Keras 3 hands the rows of an embedding's gradient to the optimizer as they are, an
    index as often as the batch holds it, and most optimizers take the sum of their
    squares for the square of their sum: Adam's velocity grows by Σ g², and not by
    (Σ g)². What has been summed, or made dense, trains otherwise. The exceptions are
    rules that are linear in the gradient up to where it meets dense state, without
    clipping; and accumulation, where Keras makes the gradient dense first.
    """
    return all(map(_is_linear_in_rows, inner_optimizers(optimizer)))


def _is_linear_in_rows(optimizer: keras.optimizers.Optimizer) -> bool:
    if optimizer.gradient_accumulation_steps:
        return True
    kind = type(optimizer)
    if kind.__module__ == "keras.optimizers":
        kind = kind.__mro__[1]  # a public class under `DistributedOptimizer`
    clips = optimizer.clipnorm or optimizer.global_clipnorm or optimizer.clipvalue
    return kind in (keras.optimizers.SGD, keras.optimizers.Lion) and not clips


def updates(optimizer: keras.optimizers.Optimizer) -> int:
    """Returns how many updates the optimizer has made so far."""
    return max(int(o.iterations) for o in inner_optimizers(optimizer))
