"""What an optimizer can be told, against one process on all of the data.

That every class of optimizer goes with every option is in test_equivalence.py.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
from equivalence import CLASSES
from equivalence import FEATURES
from equivalence import assert_equal_everywhere
from equivalence import assert_equal_weights
from equivalence import build
from equivalence import samples
from equivalence import trainer
from newer_keras import multi_optimizer
from newer_keras import muon

from distkeras.backends import updates
from distkeras.communicators import Communicator

pytestmark = pytest.mark.dealt

optimizers = keras.optimizers
schedules = keras.optimizers.schedules

COUNT, BATCH, STEPS = 103, 8, 20

RATE = 0.003
"""Of Adam's kin, which make steps of this size out of gradients of any: also of one
that is close to zero, and of which rounding has left few digits."""

Make = Callable[[], Any]


class Own(optimizers.Optimizer):
    """A user's optimizer: the sign of the gradient, softened, with a memory."""

    def build(self, variables: Any) -> None:
        if self.built:
            return
        super().build(variables)
        self.memory = self.add_optimizer_variables(variables, "memory")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        memory = self.memory[self._get_variable_index(variable)]
        self.assign(memory, 0.5 * memory + gradient)
        self.assign_sub(variable, learning_rate * keras.ops.tanh(10 * memory))


def multi(**options: Any) -> keras.optimizers.Optimizer:
    return multi_optimizer(
        optimizers.Adam(RATE, **options), {".*bias": optimizers.SGD(0.1, **options)}
    )


PLAIN: dict[str, Make] = {
    "SGD": lambda: optimizers.SGD(0.1),
    "RMSprop": lambda: optimizers.RMSprop(0.01),
    "Adam": lambda: optimizers.Adam(RATE),
    "Muon": lambda: muon(0.01),
}

OPTIONS: dict[str, Make] = {
    "own": lambda: Own(0.01),
    "loss_scale": lambda: optimizers.LossScaleOptimizer(
        optimizers.SGD(0.1, momentum=0.9), dynamic_growth_steps=6
    ),
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "centered": lambda: optimizers.RMSprop(0.01, momentum=0.9, centered=True),
    "amsgrad": lambda: optimizers.Adam(RATE, amsgrad=True),
    "clipnorm": lambda: optimizers.SGD(0.1, momentum=0.9, clipnorm=0.1),
    "clipvalue": lambda: optimizers.SGD(0.1, momentum=0.9, clipvalue=0.02),
    "global_clipnorm": lambda: optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.1),
    "weight_decay": lambda: optimizers.SGD(0.1, weight_decay=0.1),
    "weight_decay_some": lambda: excluding_biases(optimizers.AdamW(RATE)),
    "ema": lambda: optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9),
    "ema_overwrite": lambda: optimizers.SGD(
        0.1, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3
    ),
    "accumulation_2": lambda: optimizers.Adam(RATE, gradient_accumulation_steps=2),
    "accumulation_4": lambda: optimizers.Adam(RATE, gradient_accumulation_steps=4),
    "accumulation_clipped": lambda: optimizers.SGD(
        0.1, momentum=0.9, gradient_accumulation_steps=4, global_clipnorm=0.05
    ),
    "accumulation_ema": lambda: optimizers.SGD(
        0.1,
        weight_decay=0.1,
        gradient_accumulation_steps=2,
        use_ema=True,
        ema_momentum=0.9,
        ema_overwrite_frequency=3,
    ),
    "accumulation_multi": lambda: multi(gradient_accumulation_steps=2),
    "exponential_decay": lambda: optimizers.SGD(
        schedules.ExponentialDecay(0.1, 3, 0.8), momentum=0.9
    ),
    "cosine_with_warmup": lambda: optimizers.SGD(
        schedules.CosineDecay(0.0, 15, warmup_target=0.1, warmup_steps=5)
    ),
    "piecewise_accumulation": lambda: optimizers.SGD(
        schedules.PiecewiseConstantDecay([7, 13], [0.1, 0.03, 0.01]),
        gradient_accumulation_steps=2,
    ),
    "loss_scale_factor": lambda: optimizers.SGD(0.1, loss_scale_factor=64.0),
    "loss_scale_accumulation": lambda: optimizers.LossScaleOptimizer(
        optimizers.Adam(RATE, gradient_accumulation_steps=2, clipnorm=0.1),
        dynamic_growth_steps=6,
    ),
    "loss_scale_multi": lambda: optimizers.LossScaleOptimizer(multi()),
}


def excluding_biases(optimizer: Any) -> Any:
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


def fit_both(
    world: Communicator,
    make: Callable[[], keras.Model],
    tolerance: float = 1e-5,
    data: Any = None,
    eager: bool = True,
) -> tuple[keras.Model, keras.Model, Any]:
    """Trains for 20 steps or more, alone and with all ranks; compares the weights."""
    x, y = data or samples(COUNT)
    steps = -(-COUNT // (BATCH * world.size))
    options: dict[str, Any] = {
        "epochs": -(-STEPS // steps),
        "shuffle": False,
        "verbose": 0,
    }
    single = make()
    single.run_eagerly = eager  # for so few steps faster than to trace them
    single.fit(x, y, batch_size=BATCH * world.size, **options)
    model = make()
    run = trainer(model)
    run.fit(x, y, batch_size=BATCH, **options)
    assert_equal_weights(model, single, tolerance)
    assert_equal_everywhere(world, model)
    for a, b in zip(model.optimizer.variables, single.optimizer.variables, strict=True):
        if a.dtype.startswith("int"):
            np.testing.assert_array_equal(a.numpy(), b.numpy(), a.path)
    return model, single, run


def plain(optimizer: Make) -> Callable[[], keras.Model]:
    return lambda: build(optimizer, jit_compile=False, metrics=None)


@pytest.mark.parametrize("kind", OPTIONS)
def test_equals_one_process(world: Communicator, kind: str) -> None:
    model, single, run = fit_both(world, plain(OPTIONS[kind]))
    assert updates(model.optimizer) == updates(single.optimizer) > 0
    if kind == "loss_scale":
        scale = single.optimizer.dynamic_scale.numpy()
        assert model.optimizer.dynamic_scale.numpy() == scale > 2.0**15
    if world.size > 1:
        assert run.exchange.counters.exchanges == updates(model.optimizer)


@pytest.fixture
def policy(request: pytest.FixtureRequest) -> Iterator[str]:
    """Sets the global dtype policy, upon which `compile` scales the loss or not."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy(before)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kind", ["Adam", "RMSprop", "Muon", "accumulation_multi"])
def test_nothing_but_rounding_differs(world: Communicator, kind: str) -> None:
    x, y = samples(COUNT)
    make = {**PLAIN, **OPTIONS}[kind]
    fit_both(world, plain(make), 1e-12, (x.astype("float64"), y))


# Gradients are rounded to 11 and 8 bits before they are summed, here over a rank's
# batch and there over the global one: a step differs by 2^-12 and 2^-9 of its size at
# least, by some times that where terms cancel, and the differences of 20 steps add up
# like a random walk (x 4.5). The sum of all steps is no larger than the weights here.
BOUNDS = {"mixed_float16": 2.0**-9, "mixed_bfloat16": 2.0**-6}


@pytest.mark.parametrize("policy", BOUNDS, indirect=True)
@pytest.mark.parametrize("kind", ["SGD", "momentum", "accumulation_clipped"])
def test_sixteen_bits(world: Communicator, policy: str, kind: str) -> None:
    make = {**PLAIN, **OPTIONS}[kind]
    model, _, _ = fit_both(world, plain(make), BOUNDS[policy], eager=False)
    scaled = isinstance(model.optimizer, optimizers.LossScaleOptimizer)
    assert scaled == (policy == "mixed_float16")


@pytest.mark.parametrize("policy", ["mixed_float16"], indirect=True)
@pytest.mark.parametrize(
    ("kind", "step"),
    [("momentum", 3), ("accumulation_clipped", 3), ("accumulation_clipped", 4)],
)
def test_infinity_on_one_rank_under_mixed_float16(
    world: Communicator, policy: str, kind: str, step: int
) -> None:
    """One sample of a step is infinite: all ranks skip it and halve the scale.

    With accumulation it is the step that would update, or one before.
    """
    x, y = samples(COUNT)
    x[step * BATCH * world.size - 1] = np.inf
    make = plain(OPTIONS[kind])
    model, single, _ = fit_both(world, make, BOUNDS[policy], (x, y), eager=False)
    assert all(np.isfinite(v.numpy()).all() for v in model.trainable_variables)
    scale = float(model.optimizer.dynamic_scale)
    assert scale == float(single.optimizer.dynamic_scale) < 2.0**15
    assert set(world.allgather_object(scale)) == {scale}


def frozen() -> keras.Model:
    model = build(PLAIN["Adam"], jit_compile=False)
    model.layers[1].trainable = False
    model.compile(optimizers.Adam(RATE), loss=model.loss, jit_compile=False)
    return model


def shared() -> keras.Model:
    keras.utils.set_random_seed(0)
    layer = keras.layers.Dense(FEATURES, activation="tanh")
    inputs = keras.Input((FEATURES,))
    outputs = keras.layers.Dense(CLASSES)(layer(layer(inputs)))
    return compiled(keras.Model(inputs, outputs))


class Unused(keras.layers.Layer):
    """Has a weight that nothing depends on."""

    def build(self, input_shape: Any) -> None:
        self.useless = self.add_weight(shape=(2, 3), name="useless")

    def call(self, inputs: Any) -> Any:
        return inputs


def without_gradient() -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = [Unused(), keras.layers.Dense(CLASSES), Unused()]
    return compiled(keras.Sequential([keras.Input((FEATURES,)), *layers]))


def compiled(model: keras.Model, optimizer: Make = PLAIN["Adam"]) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer(), loss=loss, jit_compile=False)
    return model


@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")
@pytest.mark.parametrize("make", [frozen, shared, without_gradient])
def test_models(world: Communicator, make: Callable[[], keras.Model]) -> None:
    fit_both(world, make)


@pytest.mark.parametrize("kind", ["Adam", "accumulation_2"])
def test_float8(world: Communicator, kind: str) -> None:
    """Scales overwrite their variables: the largest over ranks, never an average.

    That of the gradient of the outputs belongs to a rank's mean loss, and may differ.
    """

    def make() -> keras.Model:
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(16), keras.layers.Dense(CLASSES)]
        model = keras.Sequential([keras.Input((FEATURES,)), *layers])
        layers[0].quantize("float8")
        return compiled(model, {**PLAIN, **OPTIONS}[kind])

    x, y = samples(COUNT)
    steps = -(-COUNT // (BATCH * world.size))
    options: dict[str, Any] = {"epochs": -(-STEPS // steps), "shuffle": False}
    single, model = make(), make()
    single.fit(x, y, batch_size=BATCH * world.size, verbose=0, **options)
    trainer(model).fit(x, y, batch_size=BATCH, verbose=0, **options)
    assert_equal_everywhere(world, model)
    layer, expected = model.layers[0], single.layers[0]
    # The data alone decides what its scale is, to the last bit.
    for name in ("inputs_scale", "inputs_amax_history"):
        mine, right = (getattr(part, name).numpy() for part in (layer, expected))
        np.testing.assert_array_equal(mine, right, err_msg=name)
    # A gradient has three bits in float8 (e5m2), and Adam divides its size out: each
    # of the steps may be wrong by an eighth, and the weights by a little less.
    for name in ("kernel", "bias", "kernel_scale", "kernel_amax_history"):
        mine, right = (getattr(part, name).numpy() for part in (layer, expected))
        assert np.abs(mine - right).max() <= 0.1 * np.abs(right).max(), name
