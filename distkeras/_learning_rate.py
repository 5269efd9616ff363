"""The learning rate: multiplied by the world size, warmed up, saved unscaled.

The live optimizer holds the *scaled* rate: that is what TensorBoard,
`ReduceLROnPlateau` and the update see. Every file holds the *base* rate, the one of
a single process, so that "load, then scale once" is always right and one process can
go on from the file without distkeras.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Literal

import keras
import numpy as np

from distkeras._scaled_rate import install
from distkeras._scaled_rate import install_on_wrappers
from distkeras._scaled_rate import number
from distkeras._scaled_rate import parts_of
from distkeras._scaled_rate import rate_variable
from distkeras._scaled_rate import raw_value
from distkeras._scaled_rate import state_of

Rule = Literal["linear", "sqrt"] | Callable[[int], float] | None


@dataclasses.dataclass(frozen=True)
class ScaledRate:
    """The learning rate of one optimizer before and after it was scaled.

    Attributes:
        name: the optimizer's name.
        before: the base rate, of a single process; for a schedule its value at the
            optimizer's current iteration.
        after: the rate that training now uses.
    """

    name: str
    before: float
    after: float


def scaling_factor(rule: Rule, size: int) -> float:
    """Returns what `rule` multiplies the learning rate by.

    Args:
        rule: `"linear"`: the number of ranks (Goyal et al. 2017, arXiv:1706.02677);
            `"sqrt"`: its square root, which keeps the variance of an update
            (Krizhevsky 2014, arXiv:1404.5997); `None`: 1; or a callable of the size.
        size: the number of ranks.

    Raises:
        ValueError: the rule is unknown, or its factor is not a positive number.

    Example:
        >>> scaling_factor("linear", 4), scaling_factor("sqrt", 4)
        (4.0, 2.0)
    """
    if rule is None:
        return 1.0
    if rule == "linear":
        return float(size)
    if rule == "sqrt":
        return math.sqrt(size)
    if not callable(rule):
        raise ValueError(
            "Expected the learning-rate rule to be 'linear', 'sqrt', None or a "
            f"callable of the number of ranks. Received: {rule!r}"
        )
    return _checked_factor(rule(size))


def scale_learning_rate(
    optimizer: keras.optimizers.Optimizer, factor: float
) -> list[ScaledRate]:
    """Multiplies the learning rate by `factor`, once, whatever its kind.

    Plain values, `LearningRateSchedule` objects and callables are taken, inside
    `LossScaleOptimizer` and in every part of a `MultiOptimizer`. A second call with
    the same factor changes nothing; another factor is applied to the base rate.

    Args:
        optimizer: a Keras optimizer. A `MultiOptimizer` whose parts a function makes
            must be built.
        factor: positive; see `scaling_factor`.

    Returns:
        One entry for each optimizer that updates weights.

    Raises:
        ValueError: `factor` is not a positive number, or there is no optimizer to
            scale yet.

    Example:
        >>> optimizer = keras.optimizers.SGD(0.5)
        >>> scale_learning_rate(optimizer, 4)[0].after
        2.0
        >>> optimizer.get_config()["learning_rate"]
        0.5
    """
    factor = _checked_factor(factor)
    results = []
    for part in parts_of(optimizer):
        state = state_of(part)
        if state is None and factor == 1.0:
            rate = raw_value(part)
            results.append(ScaledRate(part.name, rate, rate))
            continue
        state = state or install(part)
        before = state.scale(factor)
        results.append(ScaledRate(part.name, before, raw_value(part)))
    install_on_wrappers(optimizer)
    return results


def warm_up_learning_rate(
    optimizer: keras.optimizers.Optimizer,
    steps: float,
    *,
    divisor: float | None = None,
) -> None:
    """Lets the learning rate rise from its base to its scaled value.

    At update k the rate is `base * (1 + (f - 1) * min(1, k / updates))`, f the
    factor the rate was scaled by: the gradual warm-up of Goyal et al. 2017
    (arXiv:1706.02677, 2.2), per update. It is computed inside the training step from
    `optimizer.iterations` alone: it is right after a resume, for several steps per
    execution and under XLA, and applies on top of schedules. `optimizer.iterations`
    counts updates where gradients are accumulated.

    While it rises, `optimizer.learning_rate` is the rate of the next update. Setting
    it makes the next update use just that value; the rise goes on from there. So a
    callback that reads, multiplies and sets the rate does so once.

    Args:
        optimizer: as for `scale_learning_rate`.
        steps: the length in batches of this rank (epochs times batches an epoch);
            each optimizer divides it by its `gradient_accumulation_steps`. 0 ends
            a warm-up.
        divisor: what the rate starts divided by; by default the factor that
            `scale_learning_rate` applied.

    Raises:
        ValueError: `steps` is negative or `divisor` is not a positive number.
    """
    if not steps >= 0:
        raise ValueError(
            f"Expected the length of the warm-up to be 0 or more. Received: {steps}"
        )
    if divisor is not None:
        divisor = _checked_factor(divisor)
    for part in parts_of(optimizer):
        state = state_of(part)
        factor = state.factor if state else 1.0
        start = factor if divisor is None else divisor
        if state is None and (start == 1.0 or steps == 0):
            continue
        state = state or install(part)
        accumulated = part.gradient_accumulation_steps or 1
        state.warm_up(steps / accumulated, start)
    install_on_wrappers(optimizer)


def warms_up(optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether a warm-up was ever installed: a step traced before has none."""
    states = map(state_of, parts_of(optimizer))
    return any(state is not None and state.ramps for state in states)


def applied_factor(optimizer: keras.optimizers.Optimizer) -> float:
    """Returns the factor that the rate of `optimizer` is scaled by now, else 1."""
    factors = {s.factor if (s := state_of(o)) else 1.0 for o in parts_of(optimizer)}
    return factors.pop() if len(factors) == 1 else 1.0


def target_rates(optimizer: keras.optimizers.Optimizer) -> list[float]:
    """Returns every part's scaled rate, without regard to a warm-up under way."""
    return [raw_value(part) for part in parts_of(optimizer)]


def set_target_rate(optimizer: keras.optimizers.Optimizer, value: float) -> None:
    """Sets the scaled rate of one optimizer; a warm-up goes on, towards `value`.

    Raises:
        TypeError: the rate is a schedule, which cannot be set.
    """
    variable = rate_variable(optimizer)
    if variable is None:
        raise TypeError(
            "Expected an optimizer whose learning rate is a number. Received: "
            f"'{optimizer.name}', whose rate is a schedule"
        )
    variable.assign(value)


def has_settable_rate(optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether the rate is a number rather than a schedule."""
    return rate_variable(optimizer) is not None


def rates(optimizer: keras.optimizers.Optimizer) -> list[dict[str, float]]:
    """Returns, for each part, its factor, base rate and scaled rate, as stored."""
    found = []
    for part in parts_of(optimizer):
        state, live = state_of(part), raw_value(part)
        factor = 1.0 if state is None else state.factor
        base = live if state is None else state.base(live)
        found.append({"factor": factor, "base": base, "scaled": live})
    return found


def restore_rates(
    optimizer: keras.optimizers.Optimizer, saved: Sequence[Mapping[str, float]]
) -> None:
    """Sets scaled rates as `rates` returned them, where the factor is the same.

    A rate that is stored, divided and multiplied again may be another by a rounding.
    Where the factor is another, or the rate is a schedule, nothing is done.
    """
    for part, values in zip(parts_of(optimizer), saved, strict=True):
        state, variable = state_of(part), rate_variable(part)
        factor = 1.0 if state is None else state.factor
        if variable is not None and values["factor"] == factor:
            variable.assign(values["scaled"])
            if state is not None:
                state.pair = (values["base"], number(variable))


def _checked_factor(factor: Any) -> float:
    if not isinstance(factor, (int, float, np.number)) or not (0 < factor < math.inf):
        raise ValueError(
            "Expected the factor of the learning rate to be a positive number. "
            f"Received: {factor!r}"
        )
    return float(factor)
