"""What stands in the place of an optimizer's learning rate once that is scaled.

Nothing is subclassed. Attributes of the optimizer *instance* take the place of a few
methods (all in `install`); the class that is saved stays the stock one. The factor and
the length of the warm-up live in variables that no optimizer tracks: a change needs no
new trace, and the number of saved variables does not change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras

from distkeras.backends._optimizers import inner_optimizers

_STATE = "_distkeras_rate"


class Rate:
    """What one optimizer's rate is multiplied by, and how to undo it for a file."""

    def __init__(self, optimizer: keras.optimizers.Optimizer) -> None:
        self.optimizer = optimizer
        self.factor = 1.0
        # The rate before and after scaling, as they were stored: a quotient of
        # rounded numbers need not give the base back to the last bit.
        self.pair: tuple[float, float] | None = None
        self.variable = rate_variable(optimizer)
        self._multiplier = _untracked_variable(1.0)
        self._ramp_updates = _untracked_variable(0.0)
        self._ramp_divisor = _untracked_variable(1.0)
        self.ramps = False

    def scale(self, factor: float) -> float:
        """Applies `factor` to the base rate, which it returns."""
        if self.variable is not rate_variable(self.optimizer):
            # A schedule was put in the place of a number, or the reverse.
            self.variable, self.pair = rate_variable(self.optimizer), None
            self.factor = 1.0
            self._multiplier.assign(1.0)
        if self.variable is None:
            self.factor = factor
            self._multiplier.assign(factor)
            return raw_value(self.optimizer) / factor
        base = self.base(number(self.variable))
        if factor != self.factor:
            self.factor = factor
            self.variable.assign(base * factor)
            self.pair = (base, number(self.variable))
        return base

    def warm_up(self, updates: float, divisor: float) -> None:
        """Starts (or changes) the rise; the first `updates` updates depend on it."""
        self._ramp_updates.assign(updates)
        self._ramp_divisor.assign(divisor)
        self.ramps = True
        if self.variable is not None:
            # Not by setattr: the optimizer would look for a variable to track.
            vars(self.optimizer)["_learning_rate"] = RisingRate(self)

    def raw(self, original: Callable[[], Any]) -> Any:
        """Returns the scaled rate, a tensor or variable, without the warm-up."""
        if isinstance(vars(self.optimizer)["_learning_rate"], RisingRate):
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
        live = number(self.variable)
        attributes["_learning_rate"] = self.variable
        self.variable.assign(self.base(live))
        base = number(self.variable)
        try:
            yield
        finally:
            attributes["_learning_rate"] = held
            if number(self.variable) != base:  # a file was loaded
                base = number(self.variable)
                live = base * self.factor
            # Saving must not move the live rate by a rounding: it is done on one
            # rank only, and ranks must stay equal to the last bit.
            self.variable.assign(live)
            self.pair = (base, number(self.variable))

    def base(self, value: float) -> float:
        """Returns the base rate that a scaled one came of."""
        if self.pair is not None and value == self.pair[1]:
            return self.pair[0]
        return value / self.factor


class RisingRate:
    """Stands where the optimizer keeps its rate variable, during a warm-up.

    Keras' setter calls `assign` on it: what is set is what the next update uses.
    """

    def __init__(self, rate: Rate) -> None:
        self._rate = rate

    def assign(self, value: Any) -> None:
        """Lets the next update use `value`; the rise goes on from there."""
        share = self._rate.share()
        variable = self._rate.variable
        if number(value) == number(variable * share):
            return  # what was read is set again: no rounding, epoch after epoch
        variable.assign(value / share)


@contextlib.contextmanager
def holding_base_rates(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """For the duration, the variables hold base rates, as they belong in a file.

    What they hold at the end is the base rate then: so files are written and read.
    """
    with contextlib.ExitStack() as stack:
        for part in parts_of(optimizer):
            state = state_of(part)
            if state is not None:
                stack.enter_context(state.holding_base())
        yield


def install(optimizer: keras.optimizers.Optimizer) -> Rate:
    """Puts instance attributes in place of methods: all that is private of Keras.

    `tests/test_learning_rate.py` fails when Keras changes what is relied on here:
    `_get_current_learning_rate` is the only reader of `_learning_rate`, the property
    `learning_rate` calls it on the instance, its setter calls `_learning_rate.assign`
    for what is neither schedule nor callable, and saving calls `get_config`,
    `save_own_variables` and `load_own_variables` on the instance.
    """
    state = Rate(optimizer)
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


def install_on_wrappers(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes wrappers, which save the variables of their parts, save base rates."""
    if state_of(optimizer) is not None or getattr(optimizer, _STATE + "_parts", False):
        return
    if any(state_of(part) is not None for part in parts_of(optimizer)):
        _set(optimizer, _STATE + "_parts", True)
        _hold_base_in(optimizer, optimizer, "save_own_variables")
        _hold_base_in(optimizer, optimizer, "load_own_variables")
        inner = getattr(optimizer, "inner_optimizer", None)
        if inner is not None:
            install_on_wrappers(inner)


def _hold_base_in(
    target: Any, optimizer: keras.optimizers.Optimizer, name: str
) -> None:
    """Runs the method `name` of `target` with base rates in the variables."""
    original = getattr(target, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        with holding_base_rates(optimizer):
            return original(*args, **kwargs)

    _set(target, name, method)


def parts_of(
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


def state_of(optimizer: keras.optimizers.Optimizer) -> Rate | None:
    """Returns what `install` has put in place, None before."""
    return vars(optimizer).get(_STATE)


def rate_variable(optimizer: keras.optimizers.Optimizer) -> Any:
    """Returns the Keras variable of the rate, None for a schedule."""
    held = optimizer._learning_rate
    if isinstance(held, RisingRate):
        return held._rate.variable
    return held if isinstance(held, keras.Variable) else None


def raw_value(optimizer: keras.optimizers.Optimizer) -> float:
    """Returns the rate without regard to a warm-up; of a schedule, that of now."""
    variable = rate_variable(optimizer)
    if variable is not None:
        return number(variable)
    state = state_of(optimizer)
    original = type(optimizer)._get_current_learning_rate
    if state is None:
        return number(original(optimizer))
    return number(state.raw(lambda: original(optimizer)))


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


def number(value: Any) -> float:
    """Returns a variable, tensor or number as a Python number."""
    return float(keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(value)))
