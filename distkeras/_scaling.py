"""What `fit` makes of a model's learning rates for a number of ranks."""

from __future__ import annotations

import dataclasses
import math

import keras

from distkeras import backends
from distkeras._learning_rate import Rule
from distkeras._learning_rate import ScaledRate
from distkeras._learning_rate import scale_learning_rate
from distkeras._learning_rate import scaling_factor
from distkeras._learning_rate import warm_up_learning_rate


@dataclasses.dataclass(frozen=True)
class Scaled:
    """What has become of the rates.

    Attributes:
        rates: each before and after.
        rule: in words, with the factor and the warm-up.
    """

    rates: list[ScaledRate]
    rule: str


@dataclasses.dataclass(frozen=True)
class Scaling:
    """How learning rates are chosen.

    Attributes:
        rule: as `Trainer` takes it.
        warmup_epochs: over which rates rise; 0 for none.

    Raises:
        ValueError: if the number of epochs has no meaning.
    """

    rule: Rule
    warmup_epochs: float

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_epochs < math.inf:
            raise ValueError(
                "Expected `warmup_epochs` to be a number of epochs from 0 up. "
                f"Received: warmup_epochs={self.warmup_epochs}. 0 is for no warm-up."
            )

    def factor(self, size: int) -> float:
        """Returns what rates are multiplied by for so many ranks; for one by 1."""
        factor = scaling_factor(self.rule, size)  # raises, also for one
        return 1.0 if size == 1 else factor

    def apply(self, model: keras.Model, factor: float, steps: int | None) -> Scaled:
        """Scales and warms up the rate of every optimizer that a model holds.

        Args:
            model: built, its optimizers too.
            factor: what rates are multiplied by.
            steps: of an epoch, None where they are not known.

        Raises:
            ValueError: if they are needed and not known.
        """
        if self.warmup_epochs and steps is None:
            raise ValueError(
                "Expected to know the steps of an epoch, to place the end of the "
                "learning rate's warm-up. Received: data of unknown length, and "
                f"warmup_epochs={self.warmup_epochs:g}. Pass `steps_per_epoch`."
            )
        rates = []
        for optimizer in backends.current().find_optimizers(model):
            rates += scale_learning_rate(optimizer, factor)
            if self.warmup_epochs and steps is not None:
                warm_up_learning_rate(optimizer, self.warmup_epochs * steps)
        rule = f"{self._name()} scaled, x{factor:g}"
        if self.warmup_epochs:
            rule += f", rising to it over {self.warmup_epochs:g} epochs"
        return Scaled(rates, rule)

    def _name(self) -> str:
        if self.rule is None:
            return "not"
        return self.rule if isinstance(self.rule, str) else "own rule"
