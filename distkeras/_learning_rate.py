"""The learning rate: multiplied by the world size, warmed up, saved unscaled.

The live optimizer holds the *scaled* rate: that is what TensorBoard,
`ReduceLROnPlateau` and the update see. Every file holds the *base* rate, the one of
a single process, so that "load, then scale once" is always right and one process can
go on from the file without distkeras.

Nothing is subclassed. Attributes of the optimizer *instance* take the place of a few
methods (all in `_install`); the class that is saved stays the stock one. The factor
and the length of the warm-up live in variables that no optimizer tracks: a change
needs no new trace, and the number of saved variables does not change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Literal

import keras
import numpy as np

from distkeras.backends._optimizers import inner_optimizers

Rule = Literal["linear", "sqrt"] | Callable[[int], float] | None

_STATE = "_distkeras_rate"


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
    for part in _parts(optimizer):
        state = _state(part)
        if state is None and factor == 1.0:
            rate = _raw_value(part)
            results.append(ScaledRate(part.name, rate, rate))
            continue
        state = state or _install(part)
        before = state.scale(factor)
        results.append(ScaledRate(part.name, before, _raw_value(part)))
    _install_on_wrappers(optimizer)
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
    for part in _parts(optimizer):
        state = _state(part)
        start = divisor or (state.factor if state else 1.0)
        if state is None and (start == 1.0 or steps == 0):
            continue
        state = state or _install(part)
        accumulated = part.gradient_accumulation_steps or 1
        state.warm_up(steps / accumulated, _checked_factor(start))
    _install_on_wrappers(optimizer)


def warms_up(optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether a warm-up was ever installed: a step traced before has none."""
    return any((state := _state(part)) and state.ramps for part in _parts(optimizer))


def applied_factor(optimizer: keras.optimizers.Optimizer) -> float:
    """Returns the factor that the rate of `optimizer` is scaled by now, else 1."""
    factors = {s.factor if (s := _state(o)) else 1.0 for o in _parts(optimizer)}
    return factors.pop() if len(factors) == 1 else 1.0


def target_rates(optimizer: keras.optimizers.Optimizer) -> list[float]:
    """Returns every part's scaled rate, without regard to a warm-up under way."""
    return [_raw_value(part) for part in _parts(optimizer)]


def set_target_rate(optimizer: keras.optimizers.Optimizer, value: float) -> None:
    """Sets the scaled rate of one optimizer; a warm-up goes on, towards `value`.

    Raises:
        TypeError: the rate is a schedule, which cannot be set.
    """
    variable = _variable(optimizer)
    if variable is None:
        raise TypeError(
            "Expected an optimizer whose learning rate is a number. Received: "
            f"'{optimizer.name}', whose rate is a schedule"
        )
    variable.assign(value)


def has_settable_rate(optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether the rate is a number rather than a schedule."""
    return _variable(optimizer) is not None


@contextlib.contextmanager
def holding_base_rates(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """For the duration, the variables hold base rates, as they belong in a file.

    What they hold at the end is the base rate then: so files are written and read.
    """
    with contextlib.ExitStack() as stack:
        for part in _parts(optimizer):
            state = _state(part)
            if state is not None:
                stack.enter_context(state.holding_base())
        yield


def rates(optimizer: keras.optimizers.Optimizer) -> list[dict[str, float]]:
    """Returns, for each part, its factor, base rate and scaled rate, as stored."""
    found = []
    for part in _parts(optimizer):
        state, live = _state(part), _raw_value(part)
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
    for part, values in zip(_parts(optimizer), saved, strict=True):
        state, variable = _state(part), _variable(part)
        factor = 1.0 if state is None else state.factor
        if variable is not None and values["factor"] == factor:
            variable.assign(values["scaled"])
            if state is not None:
                state.pair = (values["base"], _number(variable))


class _Rate:
    """What one optimizer's rate is multiplied by, and how to undo it for a file."""

    def __init__(self, optimizer: keras.optimizers.Optimizer) -> None:
        self.optimizer = optimizer
        self.factor = 1.0
        # The rate before and after scaling, as they were stored: a quotient of
        # rounded numbers need not give the base back to the last bit.
        self.pair: tuple[float, float] | None = None
        self.variable = _variable(optimizer)
        self._multiplier = _untracked_variable(1.0)
        self._ramp_updates = _untracked_variable(0.0)
        self._ramp_divisor = _untracked_variable(1.0)
        self.ramps = False

    def scale(self, factor: float) -> float:
        """Applies `factor` to the base rate, which it returns."""
        if self.variable is not _variable(self.optimizer):
            # A schedule was put in the place of a number, or the reverse.
            self.variable, self.pair = _variable(self.optimizer), None
            self.factor = 1.0
            self._multiplier.assign(1.0)
        if self.variable is None:
            self.factor = factor
            self._multiplier.assign(factor)
            return _raw_value(self.optimizer) / factor
        base = self.base(_number(self.variable))
        if factor != self.factor:
            self.factor = factor
            self.variable.assign(base * factor)
            self.pair = (base, _number(self.variable))
        return base

    def warm_up(self, updates: float, divisor: float) -> None:
        """Starts (or changes) the rise; the first `updates` updates depend on it."""
        self._ramp_updates.assign(updates)
        self._ramp_divisor.assign(divisor)
        self.ramps = True
        if self.variable is not None:
            # Not by setattr: the optimizer would look for a variable to track.
            vars(self.optimizer)["_learning_rate"] = _RisingRate(self)

    def raw(self, original: Callable[[], Any]) -> Any:
        """Returns the scaled rate, a tensor or variable, without the warm-up."""
        if isinstance(vars(self.optimizer)["_learning_rate"], _RisingRate):
            return self.variable
        rate = original()
        if self.variable is not None and rate is self.variable:
            return rate
        rate = _as_floating(rate)
        return rate * keras.ops.cast(self._multiplier, rate.dtype)

    def share(self) -> Any:
        """Returns the part of the scaled rate that the next update uses.

        1/f at the start, exactly 1 at the end of the warm-up.
        """
        ops = keras.ops
        count = ops.cast(self.optimizer.iterations, "float32")
        length = ops.convert_to_tensor(self._ramp_updates)
        done = ops.where(count >= length, 1.0, count / ops.maximum(length, 1e-30))
        return done + (1.0 - done) / self._ramp_divisor

    @contextlib.contextmanager
    def holding_base(self) -> Iterator[None]:
        """For the duration, the variable holds what belongs in a file."""
        if self.variable is None:
            yield
            return
        attributes = vars(self.optimizer)
        held = attributes["_learning_rate"]
        live = _number(self.variable)
        attributes["_learning_rate"] = self.variable
        self.variable.assign(self.base(live))
        base = _number(self.variable)
        try:
            yield
        finally:
            attributes["_learning_rate"] = held
            if _number(self.variable) != base:  # a file was loaded
                base = _number(self.variable)
                live = base * self.factor
            # Saving must not move the live rate by a rounding: it is done on one
            # rank only, and ranks must stay equal to the last bit.
            self.variable.assign(live)
            self.pair = (base, _number(self.variable))

    def base(self, value: float) -> float:
        """Returns the base rate that a scaled one came of."""
        if self.pair is not None and value == self.pair[1]:
            return self.pair[0]
        return value / self.factor


class _RisingRate:
    """Stands where the optimizer keeps its rate variable, during a warm-up.

    Keras' setter calls `assign` on it: what is set is what the next update uses.
    """

    def __init__(self, rate: _Rate) -> None:
        self._rate = rate

    def assign(self, value: Any) -> None:
        share = self._rate.share()
        variable = self._rate.variable
        if _number(value) == _number(variable * share):
            return  # what was read is set again: no rounding, epoch after epoch
        variable.assign(value / share)


def _install(optimizer: keras.optimizers.Optimizer) -> _Rate:
    """Puts instance attributes in place of methods: all that is private of Keras.

    `tests/test_learning_rate.py` fails when Keras changes what is relied on here:
    `_get_current_learning_rate` is the only reader of `_learning_rate`, the property
    `learning_rate` calls it on the instance, its setter calls `_learning_rate.assign`
    for what is neither schedule nor callable, and saving calls `get_config`,
    `save_own_variables` and `load_own_variables` on the instance.
    """
    state = _Rate(optimizer)
    original = optimizer._get_current_learning_rate

    def _get_current_learning_rate() -> Any:
        rate = state.raw(original)
        if not state.ramps:
            return rate
        return rate * keras.ops.cast(state.share(), rate.dtype)

    _set(optimizer, _STATE, state)
    _set(optimizer, "_get_current_learning_rate", _get_current_learning_rate)
    _hold_base_in(optimizer, optimizer, "get_config")
    _hold_base_in(optimizer, optimizer, "save_own_variables")
    _hold_base_in(optimizer, optimizer, "load_own_variables")
    return state


def _install_on_wrappers(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes wrappers, which save the variables of their parts, save base rates."""
    if _state(optimizer) is not None or getattr(optimizer, _STATE + "_parts", False):
        return
    if any(_state(part) is not None for part in _parts(optimizer)):
        _set(optimizer, _STATE + "_parts", True)
        _hold_base_in(optimizer, optimizer, "save_own_variables")
        _hold_base_in(optimizer, optimizer, "load_own_variables")
        inner = getattr(optimizer, "inner_optimizer", None)
        if inner is not None:
            _install_on_wrappers(inner)


def _hold_base_in(
    target: Any, optimizer: keras.optimizers.Optimizer, name: str
) -> None:
    """Runs the method `name` of `target` with base rates in the variables."""
    original = getattr(target, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        with holding_base_rates(optimizer):
            return original(*args, **kwargs)

    _set(target, name, method)


def _parts(
    optimizer: keras.optimizers.Optimizer,
) -> list[keras.optimizers.Optimizer]:
    """Returns the optimizers that update weights, each once."""
    parts = list({id(part): part for part in inner_optimizers(optimizer)}.values())
    if any(hasattr(part, "optimizers") for part in parts):
        raise ValueError(
            "Expected a MultiOptimizer that knows its optimizers. Received: "
            f"'{optimizer.name}', which makes them when it is built. Call "
            "`optimizer.build(model.trainable_variables)` first."
        )
    return parts


def _state(optimizer: keras.optimizers.Optimizer) -> _Rate | None:
    return vars(optimizer).get(_STATE)


def _variable(optimizer: keras.optimizers.Optimizer) -> Any:
    """Returns the Keras variable of the rate, None for a schedule."""
    held = optimizer._learning_rate
    if isinstance(held, _RisingRate):
        return held._rate.variable
    return held if isinstance(held, keras.Variable) else None


def _raw_value(optimizer: keras.optimizers.Optimizer) -> float:
    variable = _variable(optimizer)
    if variable is not None:
        return _number(variable)
    state = _state(optimizer)
    original = type(optimizer)._get_current_learning_rate
    if state is None:
        return _number(original(optimizer))
    return _number(state.raw(lambda: original(optimizer)))


def _set(optimizer: Any, name: str, value: Any) -> None:
    # Past the optimizers' own __setattr__, which would track what it is given.
    object.__setattr__(optimizer, name, value)


def _untracked_variable(value: float) -> Any:
    return keras.Variable(value, dtype="float32", trainable=False)


def _as_floating(rate: Any) -> Any:
    rate = keras.ops.convert_to_tensor(rate)
    dtype = keras.backend.standardize_dtype(rate.dtype)
    if "float" not in dtype:
        rate = keras.ops.cast(rate, keras.config.floatx())
    return rate


def _number(value: Any) -> float:
    return float(keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(value)))


def _checked_factor(factor: Any) -> float:
    if not isinstance(factor, (int, float, np.number)) or not (0 < factor < math.inf):
        raise ValueError(
            "Expected the factor of the learning rate to be a positive number. "
            f"Received: {factor!r}"
        )
    return float(factor)
