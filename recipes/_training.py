"""What the training scripts share: how the learning rate falls, how to end."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import keras
import numpy as np

import distkeras
import distkeras.callbacks


def schedule(
    name: str,
    learning_rate: float,
    updates: int,
    *,
    drops: Sequence[float] = (1 / 2, 3 / 4),
) -> keras.optimizers.schedules.LearningRateSchedule:
    """Returns how the learning rate falls; the Trainer scales it and warms it up.

    Args:
        name: `"cosine"` to zero (Loshchilov, Hutter 2016, arXiv:1608.03983),
            `"poly"`, by the square of what is left (You et al. 2017,
            arXiv:1708.03888), or `"steps"`: a tenth after each of `drops`.
        learning_rate: of a single process, at the start.
        updates: of the whole training.
        drops: parts of the training. By default those of He et al. 2015
            (arXiv:1512.03385, section 4.2) on CIFAR.
    """
    schedules = keras.optimizers.schedules
    if name == "cosine":
        return schedules.CosineDecay(learning_rate, updates)
    if name == "poly":
        return schedules.PolynomialDecay(learning_rate, updates, 0.0, power=2.0)
    return schedules.PiecewiseConstantDecay(
        [int(updates * drop) for drop in drops],
        [learning_rate / 10**count for count in range(len(drops) + 1)],
    )


def length(args: argparse.Namespace, steps_per_epoch: int) -> tuple[int, int]:
    """Returns how many epochs of how many updates to train.

    Args:
        args: the options; `--steps` shortens both.
        steps_per_epoch: updates that an epoch of all data has.
    """
    if args.steps is None:
        return args.epochs, steps_per_epoch
    steps_per_epoch = min(steps_per_epoch, args.steps)
    return math.ceil(args.steps / steps_per_epoch), steps_per_epoch


def callbacks(args: argparse.Namespace, monitor: str) -> list[keras.callbacks.Callback]:
    """Returns Keras' callbacks that keep the best model and the history.

    They write `best.keras`, `history.csv`, TensorBoard's `logs` and, if training is to
    be resumed, `checkpoints`.

    Args:
        args: the options.
        monitor: what decides which epoch is the best; the highest is.
    """
    output: Path = args.output
    output.mkdir(parents=True, exist_ok=True)
    found: list[keras.callbacks.Callback] = []
    if args.ema is not None:
        # In evaluation and in the file it takes the weights' place.
        found.append(keras.callbacks.SwapEMAWeights(swap_on_epoch=True))
    if args.resume:
        found.append(
            distkeras.callbacks.Checkpoint(
                output / "checkpoints", every_steps=args.checkpoint_steps
            )
        )
    return [
        *found,
        keras.callbacks.ModelCheckpoint(
            output / "best.keras", monitor=monitor, mode="max", save_best_only=True
        ),
        keras.callbacks.TensorBoard(output / "logs", write_graph=False),
        keras.callbacks.CSVLogger(output / "history.csv", append=args.resume),
        keras.callbacks.TerminateOnNaN(),
    ]


def check(history: dict[str, list[float]]) -> None:
    """Ends the job if a loss is not finite, or if there was no epoch. Collective."""
    if not history:
        leave("All epochs have been trained before: there is nothing to do.", code=0)
    if not np.isfinite([*history["loss"], *history["val_loss"]]).all():
        leave(
            f"The loss is not finite: {history['loss']}. Try a lower --learning-rate.",
            code=1,
        )


def leave(message: str, *, code: int) -> NoReturn:
    """Ends every rank with an exit code, after rank 0 has said why. Collective."""
    if distkeras.rank() == 0:
        print(message, file=sys.stderr, flush=True)
    distkeras.barrier()  # the launcher ends the whole job at the first bad exit
    sys.exit(code)
