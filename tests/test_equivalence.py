"""N ranks against one process: optimizer x option x input x way of running a step.

The whole product has thousands of cases. These cover every pair of values (the greedy
choice of Cohen et al., 1997, doi:10.1109/32.605761): a fault that takes two things to
show is found, whichever they are. The first of them cover every value once; they run
by default, the others as a soak:

    distkeras run -n 3 -m pytest tests/test_equivalence.py -m 'soak or not soak'

Each case trains for 20 steps or more over uneven batches, the last one shorter, and
the session ends with the tables of the largest differences that README shows.
"""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import keras
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
from equivalence import assert_equal_everywhere
from equivalence import assert_equal_weights
from equivalence import build
from equivalence import samples
from equivalence import trainer
from inputs import BATCH
from inputs import COUNT
from inputs import finite
from inputs import from_list
from inputs import generator
from inputs import global_batches
from inputs import py_dataset
from inputs import py_dataset_workers
from inputs import rank_batches
from inputs import torch_loader
from inputs import unknown
from newer_keras import multi_optimizer
from newer_keras import muon
from newer_keras import optimizer_class

from distkeras.backends import updates
from distkeras.communicators import Communicator

pytestmark = pytest.mark.dealt

optimizers = keras.optimizers
STEPS = 20

RATE = 0.003
"""Of Adam's kin, which make steps of this size out of gradients of any: also of one
that is close to zero, and of which rounding has left few digits."""


def multi(rate: Any, **options: Any) -> keras.optimizers.Optimizer:
    return multi_optimizer(
        optimizers.Adam(rate, **options), {".*bias": optimizers.SGD(0.1, **options)}
    )


def loss_scale(rate: Any, **options: Any) -> keras.optimizers.Optimizer:
    inner = optimizers.SGD(rate, momentum=0.9, **options)
    return optimizers.LossScaleOptimizer(inner, dynamic_growth_steps=6)


OPTIMIZERS: dict[str, tuple[Callable[..., Any], float]] = {
    "SGD": (optimizers.SGD, 0.1),
    "RMSprop": (optimizers.RMSprop, 0.01),
    "Adam": (optimizers.Adam, RATE),
    "AdamW": (optimizers.AdamW, RATE),
    "Adadelta": (optimizers.Adadelta, 1.0),
    "Adagrad": (optimizers.Adagrad, 0.1),
    "Adamax": (optimizers.Adamax, RATE),
    "Adafactor": (optimizers.Adafactor, 0.01),
    "Nadam": (optimizers.Nadam, RATE),
    "Ftrl": (optimizers.Ftrl, 0.1),
    "Lion": (optimizers.Lion, RATE),
    "Lamb": (optimizers.Lamb, RATE),
    "Muon": (muon, 0.01),
    "ScheduleFreeAdamW": (optimizer_class("ScheduleFreeAdamW"), RATE),
    "LossScaleOptimizer": (loss_scale, 0.1),
    "MultiOptimizer": (multi, RATE),
}

OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "clipnorm": {"clipnorm": 0.1},
    "clipvalue": {"clipvalue": 0.02},
    "global_clipnorm": {"global_clipnorm": 0.1},
    "weight_decay": {"weight_decay": 0.1},
    "ema": {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 3},
    "accumulation": {"gradient_accumulation_steps": 2},
    "schedule": {},
}


def arrays(_: list[Any]) -> Any:
    return samples(COUNT)


def tensors(_: list[Any]) -> Any:
    return tuple(map(tf.constant, samples(COUNT)))


def frames(_: list[Any]) -> Any:
    x, y = samples(COUNT)
    return pd.DataFrame(x), pd.Series(y)


INPUTS: dict[str, Callable[[list[Any]], Any]] = {
    "arrays": arrays,
    "tensors": tensors,
    "pandas": frames,
    "tf.data": finite,
    "tf.data, length unknown": unknown,
    "PyDataset": py_dataset,
    "PyDataset, workers": py_dataset_workers,
    "generator": generator,
    "torch DataLoader": torch_loader,
}

WAYS: dict[str, dict[str, Any]] = {
    "graph": {"jit_compile": False},
    "XLA": {"jit_compile": True},
    "auto": {"jit_compile": "auto"},
    "eager": {"jit_compile": False, "run_eagerly": True},
    "4 steps an execution": {"jit_compile": False, "steps_per_execution": 4},
}


class Case(NamedTuple):
    """One value of each axis, by name."""

    optimizer: str
    option: str
    input: str
    way: str

    def make(self) -> keras.Model:
        """Returns the compiled model, the same at every call."""
        kind, rate = OPTIMIZERS[self.optimizer]
        if self.option == "schedule":
            rate = keras.optimizers.schedules.ExponentialDecay(rate, 3, 0.8)
        return build(
            lambda: kind(rate, **OPTIONS[self.option]), metrics=None, **WAYS[self.way]
        )


def covering(axes: tuple[dict[str, Any], ...]) -> list[Case]:
    """Returns cases in which every pair of values of two axes occurs."""
    names = [list(axis) for axis in axes]
    open_pairs = {
        frozenset({(i, a), (j, b)})
        for i, j in itertools.combinations(range(len(names)), 2)
        for a in names[i]
        for b in names[j]
    }
    unseen = {(i, a) for i, axis in enumerate(names) for a in axis}
    chance = random.Random(0)  # the same cases on all ranks
    cases = []

    def gain(case: tuple[str, ...]) -> tuple[int, int]:
        values = list(enumerate(case))
        pairs = itertools.combinations(values, 2)
        new = len(unseen.intersection(values))
        return new, sum(frozenset(pair) in open_pairs for pair in pairs)

    while open_pairs:
        pair = dict(min(open_pairs, key=sorted))
        drawn = (
            tuple(pair.get(i) or chance.choice(axis) for i, axis in enumerate(names))
            for _ in range(60)
        )
        best = max(drawn, key=gain)
        values = list(enumerate(best))
        open_pairs -= {frozenset(p) for p in itertools.combinations(values, 2)}
        unseen -= set(values)
        cases.append(Case(*best))
    return cases


def parameters() -> list[Any]:
    """Returns the cases; those that bring no value for the first time are a soak."""
    seen: set[tuple[int, str]] = set()
    result = []
    for case in covering((OPTIMIZERS, OPTIONS, INPUTS, WAYS)):
        values = set(enumerate(case))
        marks = [pytest.mark.soak] if values <= seen else []
        seen |= values
        result.append(pytest.param(case, id="/".join(case), marks=marks))
    return result


# Of data whose length is not known, as Keras does in one process.
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("case", parameters())
def test_equals_one_process(world: Communicator, case: Case) -> None:
    if (
        world.size == 1
        and case.input == "tf.data, length unknown"
        and case.way in ("graph", "auto")
    ):
        pytest.skip("Keras itself begins a step too many at the end of such data")
    batches = rank_batches()
    steps = -(-COUNT // (BATCH * world.size))
    options: dict[str, Any] = {"shuffle": False, "verbose": 0}
    epochs = -(-STEPS // steps)
    single, model = case.make(), case.make()
    if case.way != "XLA":
        single.run_eagerly = True  # for so few steps faster than to trace them
    for each in (single, model):
        # Keras 3.15 by itself traces how ScheduleFreeAdamW begins, at every step.
        each.optimizer.build(each.trainable_variables)
    run = trainer(model)
    if case.input == "generator":
        # Goes on where the last epoch ended, at whatever batch that is.
        stream = (batches * (epochs + 1))[: steps * epochs * world.size]
        single.fit(from_list(global_batches(world.size, stream)), **options)
        run.fit(generator(stream), steps_per_epoch=steps, epochs=epochs, **options)
    else:
        whole = from_list(global_batches(world.size, batches))
        single.fit(whole, epochs=epochs, **options)
        x = INPUTS[case.input](batches)
        x, y = x if isinstance(x, tuple) else (x, None)
        size = None if y is None else BATCH
        run.fit(x, y, batch_size=size, epochs=epochs, **options)
    assert_equal_weights(model, single)
    assert_equal_everywhere(world, model)
    for a, b in zip(model.optimizer.variables, single.optimizer.variables, strict=True):
        if a.dtype.startswith("int"):
            np.testing.assert_array_equal(a.numpy(), b.numpy(), a.path)
    if world.size > 1:
        assert run.exchange.counters.exchanges == updates(model.optimizer) > 0


def test_every_optimizer_of_keras_is_covered() -> None:
    found = {
        name
        for name, kind in vars(optimizers).items()
        if inspect.isclass(kind) and issubclass(kind, optimizers.Optimizer)
    }
    known = {name for name in OPTIMIZERS if hasattr(optimizers, name)}
    assert found - {"Optimizer"} == known


def test_every_pair_is_covered() -> None:
    cases = covering((OPTIMIZERS, OPTIONS, INPUTS, WAYS))
    for i, j in itertools.combinations(range(4), 2):
        axes = (OPTIMIZERS, OPTIONS, INPUTS, WAYS)
        pairs = set(itertools.product(axes[i], axes[j]))
        assert {(case[i], case[j]) for case in cases} == pairs
