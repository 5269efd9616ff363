"""Learning rates over epochs, under the names that Horovod's users know."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras

from distkeras import _horovod
from distkeras import communicators
from distkeras._learning_rate import applied_factor
from distkeras._learning_rate import has_settable_rate
from distkeras._learning_rate import set_target_rate
from distkeras._learning_rate import target_rates
from distkeras._learning_rate import warm_up_learning_rate
from distkeras.backends._optimizers import inner_optimizers


class LearningRateWarmup(keras.callbacks.Callback):
    """Raises the learning rate from that of one process to that of all ranks.

    At update k the rate is `base * (1 + (N - 1) * min(1, k / (W * S)))`, where W is
    `warmup_epochs`, S the updates of an epoch and `base * N` the rate the optimizer
    is set to (by the Trainer's scaling, or by hand: `SGD(0.1 * distkeras.size())`).
    The rule is the gradual warm-up of Goyal et al. 2017 (arXiv:1706.02677, 2.2). It
    is computed within the training step from `optimizer.iterations`: it is exact per
    update, also with `steps_per_execution`, under XLA, with gradient accumulation and
    on top of a schedule, and goes on where it was when training is resumed.

    `Trainer(warmup_epochs=...)` does the same; this callback is for a rate that
    is scaled by hand. It replaces Horovod's `LearningRateWarmupCallback`, whose
    formula has k + 1 in the place of k.

    Args:
        warmup_epochs: how long, in epochs; a fraction will do.
        steps_per_epoch: batches an epoch on this rank; needed where Keras cannot
            know it (generators, datasets of unknown length).
        divisor: what the rate starts divided by: by default the factor the Trainer
            scaled it by, and the number of ranks if it scaled nothing.
        verbose: 1: rank 0 says when the warm-up is over.

    Raises:
        ValueError: if `warmup_epochs` or `divisor` has no meaning; at the start of
            training, if the steps of an epoch are unknown or the model has no
            optimizer.

    Example:
        >>> model.fit(x, y, callbacks=[
        ...     distkeras.callbacks.LearningRateWarmup(warmup_epochs=5)])
    """

    @_horovod.explains_arguments(_horovod.WARMUP_ARGUMENTS)
    def __init__(
        self,
        *,
        warmup_epochs: float = 5,
        steps_per_epoch: int | None = None,
        divisor: float | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__()
        if not 0 <= warmup_epochs < math.inf:
            raise ValueError(
                "Expected `warmup_epochs` to be 0 or more. Received: "
                f"warmup_epochs={warmup_epochs}"
            )
        if divisor is not None and not 0 < divisor < math.inf:
            raise ValueError(
                "Expected `divisor` to be a positive number: what the rate starts "
                f"divided by. Received: divisor={divisor}"
            )
        self.warmup_epochs = warmup_epochs
        self.steps_per_epoch = steps_per_epoch
        self.divisor = divisor
        self.verbose = verbose
        self._prepared_for: keras.optimizers.Optimizer | None = None
        self._ranks: int | None = None

    def prepare(
        self,
        optimizer: keras.optimizers.Optimizer,
        steps_per_epoch: int | None,
        *,
        ranks: int | None = None,
    ) -> None:
        """Puts the warm-up in the optimizer; must come before the step is traced.

        Under `fit`, the model's or the Trainer's, it happens by itself.

        Args:
            optimizer: the model's.
            steps_per_epoch: batches an epoch on this rank; the callback's own
                argument comes first.
            ranks: how many train together; by default all of the job.
        """
        self._ranks = ranks
        self._prepare(optimizer, steps_per_epoch)

    def set_params(self, params: Any) -> None:
        """Prepares a model that no Trainer prepared, before Keras traces its step."""
        super().set_params(params)
        steps = self.steps_per_epoch or (params or {}).get("steps")
        if self.model is None or not steps:
            return
        first = self._prepared_for is not self.model.optimizer
        self._prepare(self.model.optimizer, steps)
        if first:
            # A step that was traced before would go on with the constant rate.
            self.model.train_function = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Checks that the warm-up is in place."""
        if self._prepared_for is not self.model.optimizer:
            self._prepare(self.model.optimizer, None)

    def _prepare(
        self,
        optimizer: keras.optimizers.Optimizer | None,
        steps_per_epoch: int | None,
    ) -> None:
        steps = self.steps_per_epoch or steps_per_epoch
        if optimizer is None:
            raise ValueError(
                "Expected a model compiled with the optimizer whose learning rate is "
                "to be warmed up. Received: optimizer=None. "
                "`Trainer(warmup_epochs=...)` takes every optimizer of a model."
            )
        if not steps:
            raise ValueError(
                "Expected to know the batches of an epoch, to place the end of the "
                "learning rate's warm-up. Received data of unknown length. Pass "
                "LearningRateWarmup(steps_per_epoch=...)."
            )
        divisor = self.divisor
        if divisor is None:
            divisor = applied_factor(optimizer)
            if divisor == 1.0:
                divisor = self._ranks or communicators.size()
        warm_up_learning_rate(
            optimizer, self.warmup_epochs * steps, divisor=float(divisor)
        )
        self._prepared_for = optimizer

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Says that the warm-up is over."""
        over = epoch + 1 == math.ceil(self.warmup_epochs)
        if over and self.verbose and communicators.rank() == 0:
            rates = ", ".join(
                f"{rate:g}" for rate in target_rates(self.model.optimizer)
            )
            print(f"Epoch {epoch + 1}: learning-rate warm-up finished at {rates}.")


class LearningRateSchedule(keras.callbacks.Callback):
    """Sets the learning rate to `initial rate * multiplier(epoch)`.

    Several of them, with ranges that follow one another, make a schedule; all
    multiply the same initial rate. It replaces Horovod's
    `LearningRateScheduleCallback`, without its momentum correction.

    Args:
        multiplier: a number (for exponential decay: `multiplier ** (epoch -
            start_epoch)`), or a callable of the epoch, which is a fraction unless
            `staircase`.
        start_epoch: the first epoch it acts on.
        end_epoch: the first epoch it no longer acts on; `None`: none.
        staircase: True: set at the start of epochs. False: before each batch, with
            the epoch as a fraction.
        steps_per_epoch: batches an epoch on this rank, where Keras cannot know it;
            used only without `staircase`.
        initial_learning_rate: the rate to multiply, the number of ranks included; by
            default what the optimizer is set to when training starts. A `Checkpoint`
            keeps it; pass it where training is resumed by other means.

    Raises:
        ValueError: at the start of training, if `staircase` is False and the steps
            of an epoch are unknown.
        TypeError: at the start of training, if the optimizer's rate is a schedule.

    Example:
        >>> step = distkeras.callbacks.LearningRateSchedule(
        ...     lambda epoch: 0.1 ** (epoch // 30))
        >>> model.fit(x, y, epochs=90, callbacks=[step])
    """

    @_horovod.explains_arguments(_horovod.SCHEDULE_ARGUMENTS)
    def __init__(
        self,
        multiplier: float | Callable[[float], float],
        *,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        steps_per_epoch: int | None = None,
        initial_learning_rate: float | None = None,
    ) -> None:
        super().__init__()
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            base = float(multiplier)
            self.multiplier = lambda epoch: base ** (epoch - start_epoch)
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.steps_per_epoch = steps_per_epoch
        self.initial_learning_rate = initial_learning_rate
        self._initial: list[float] = []
        self._initial_of: keras.optimizers.Optimizer | None = None
        self._epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Notes the rates that are multiplied."""
        optimizer = self.model.optimizer
        parts = inner_optimizers(optimizer)
        for part in parts:
            if not has_settable_rate(part):
                raise TypeError(
                    "Expected an optimizer whose learning rate is a number. "
                    f"Received: '{part.name}', whose rate is a schedule. Use one or "
                    "the other."
                )
        if self.initial_learning_rate is not None:
            self._initial = [self.initial_learning_rate] * len(parts)
        elif self._initial_of is not optimizer:
            # Once an optimizer: a second `fit` must not multiply what the first left.
            self._initial = target_rates(optimizer)
            self._initial_of = optimizer
        self.steps_per_epoch = self.steps_per_epoch or (self.params or {}).get("steps")
        if not self.staircase and not self.steps_per_epoch:
            raise ValueError(
                "Expected to know the batches of an epoch for `staircase=False`. "
                "Received data of unknown length. Pass "
                "LearningRateSchedule(steps_per_epoch=...)."
            )

    def get_state(self) -> dict[str, Any]:
        """Returns what a run that goes on is to multiply, see `Checkpoint`."""
        optimizer = self._initial_of
        factor = 1.0 if optimizer is None else applied_factor(optimizer)
        return {"initial": self._initial, "factor": factor}

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes over what an earlier run multiplied; for other ranks, scaled anew."""
        if self.initial_learning_rate is None and state["initial"]:
            factor = applied_factor(self.model.optimizer) / state["factor"]
            self._initial = [rate * factor for rate in state["initial"]]

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Sets the rate of this epoch."""
        self._epoch = epoch
        if self.staircase:
            self._adjust(epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Sets the rate of this batch, without `staircase`."""
        if not self.staircase and self.steps_per_epoch:
            self._adjust(self._epoch + batch / self.steps_per_epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds the rate to the logs, as Keras' own schedulers do."""
        if logs is not None:
            parts = inner_optimizers(self.model.optimizer)
            for part in parts:
                key = f"learning_rate_{part.name}" if parts[1:] else "learning_rate"
                logs[key] = float(keras.ops.convert_to_numpy(part.learning_rate))

    def _adjust(self, epoch: float) -> None:
        past = self.end_epoch is not None and epoch >= self.end_epoch
        if epoch < self.start_epoch or past:
            return
        parts = inner_optimizers(self.model.optimizer)
        for part, initial in zip(parts, self._initial, strict=True):
            set_target_rate(part, initial * self.multiplier(epoch))
