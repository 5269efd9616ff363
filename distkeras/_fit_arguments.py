"""What `Trainer.fit` was called with: what of it Keras is told, and the other ranks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from numbers import Integral
from typing import Any
from typing import Literal
from typing import get_args

import keras
from keras.src.trainers.data_adapters import array_slicing

from distkeras._resumption import Resized
from distkeras.data import check_batch_sizes
from distkeras.data import check_shard

_NOT_OF_KERAS = ("global_batch_size", "shard", "resume", "resized")
# Of these ranks agree in other ways, or need not: only rank 0 prints.
_NOT_AGREED_ON = ("x", "y", "sample_weight", "class_weight", "callbacks", "verbose")


def check_seed(seed: Any) -> None:
    """Raises where no order could be drawn by a seed."""
    if seed is not None and (not isinstance(seed, Integral) or seed < 0):
        raise ValueError(
            f"Expected `seed` to be an integer from 0 up. Received: seed={seed!r}"
        )


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Raises where what is no callback would fail within training."""
    for callback in callbacks:
        if isinstance(callback, type) or not hasattr(callback, "set_model"):
            raise TypeError(
                "Expected instances of `keras.callbacks.Callback`. Received: "
                f"{callback!r} among the callbacks"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitArguments:
    """The arguments of `Trainer.fit`, by their names; callbacks are a plain list.

    Raises:
        ValueError: if arguments contradict each other, or one has no meaning.
        TypeError: if a callback is none.
    """

    x: Any
    y: Any
    batch_size: int | None
    epochs: int
    verbose: str | int
    callbacks: list[keras.callbacks.Callback]
    validation_split: float
    validation_data: Any
    shuffle: bool | Literal["batch"]
    class_weight: dict[int, float] | None
    sample_weight: Any
    initial_epoch: int
    steps_per_epoch: int | None
    validation_steps: int | None
    validation_batch_size: int | None
    validation_freq: int | Sequence[int]
    global_batch_size: int | None
    shard: bool | Literal["auto"]
    resume: str | os.PathLike[str] | None
    resized: Resized

    def __post_init__(self) -> None:
        check_batch_sizes(self.batch_size, self.global_batch_size)
        check_shard(self.shard)
        if self.resized not in get_args(Resized):
            raise ValueError(
                "Expected `resized` to be 'keep_global_batch' or 'rescale'. Received: "
                f"{self.resized!r}"
            )
        if not isinstance(self.resume, str | os.PathLike | None):
            raise ValueError(
                "Expected `resume` to be 'auto', the path of a checkpoint or None. "
                f"Received: {self.resume!r}"
            )
        check_callbacks(self.callbacks)

    def for_keras(self) -> dict[str, Any]:
        """Returns the arguments of `keras.Model.fit`, where one process trains."""
        own = {name: v for name, v in vars(self).items() if name not in _NOT_OF_KERAS}
        batch = self.global_batch_size if self.batch_size is None else self.batch_size
        return {**own, "batch_size": batch}

    def to_agree_on(self) -> dict[str, Any]:
        """Returns what must be the same on all ranks, as far as it can be compared."""
        values = {n: v for n, v in vars(self).items() if n not in _NOT_AGREED_ON}
        validated = values.pop("validation_data") is not None
        # Where ranks have data of their own they may have counted its classes.
        weights = None if self.shard is False else self.class_weight
        return {
            **values,
            "class_weight": weights and sorted(weights.items()),
            "validation": validated or bool(self.validation_split),
            "resume": self.resume is not None,
        }

    def steps_of_epoch(self, data: Any) -> int | None:
        """Returns the steps of an epoch on each rank, None where they are not known.

        Args:
            data: the sharded training data.
        """
        return self.steps_per_epoch or data.num_batches

    def split(self) -> FitArguments:
        """Returns the arguments with the samples to validate on apart, as in Keras."""
        if not self.validation_split or self.validation_data is not None:
            return self
        (x, y, sample_weight), validation_data = array_slicing.train_validation_split(
            (self.x, self.y, self.sample_weight), validation_split=self.validation_split
        )
        return dataclasses.replace(
            self,
            x=x,
            y=y,
            sample_weight=sample_weight,
            validation_data=validation_data,
            validation_split=0.0,
        )
