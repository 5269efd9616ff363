"""The learning rate: scaled once, warmed up per update, saved as the base rate."""

import copy
import os
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
from newer_keras import multi_optimizer

from distkeras._learning_rate import applied_factor
from distkeras._learning_rate import scale_learning_rate
from distkeras._learning_rate import scaling_factor
from distkeras._learning_rate import target_rates
from distkeras._learning_rate import warm_up_learning_rate
from distkeras._scaling import Scaling

SIZES = (1, 2, 3, 4)

# Keras 3.15 itself calls np.array on a variable, which NumPy 2.4 warns of.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation"),
    pytest.mark.dealt,
]


@keras.saving.register_keras_serializable("tests")
class Halving(keras.optimizers.schedules.LearningRateSchedule):
    """A user's own schedule."""

    def __init__(self, start):
        self.start = start

    def __call__(self, step):
        return self.start / (1.0 + keras.ops.cast(step, "float32"))

    def get_config(self):
        return {"start": self.start}


def rate(optimizer):
    return float(keras.ops.convert_to_tensor(optimizer.learning_rate))


def small_model(optimizer, **options):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(4, activation="tanh", name="hidden")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1, name="out")(hidden))
    model.compile(optimizer, "mse", **options)
    model.optimizer.build(model.trainable_variables)
    return model


def data(samples=24):
    random = np.random.default_rng(0)
    x = random.normal(size=(samples, 3)).astype("float32")
    return x, x.sum(1, keepdims=True)


class Rates(keras.callbacks.Callback):
    """Notes the rate that each batch will use."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_begin(self, batch, logs=None):
        self.seen.append(rate(self.model.optimizer))


def warm_up_formula(base, factor, update, updates):
    return base * (1 + (factor - 1) * min(1, update / updates))


def test_rules_of_keras_that_are_relied_on():
    optimizer = keras.optimizers.SGD(0.5)
    assert vars(optimizer)["_learning_rate"] is optimizer.learning_rate
    seen = []
    object.__setattr__(optimizer, "_get_current_learning_rate", lambda: 7.0)
    assert optimizer.learning_rate == 7.0

    class Stand:
        def assign(self, value):
            seen.append(value)

    vars(optimizer)["_learning_rate"] = Stand()
    optimizer.learning_rate = 0.25
    assert seen == [0.25]


@pytest.mark.parametrize("size", SIZES)
def test_rules(size):
    assert scaling_factor("linear", size) == size
    assert scaling_factor("sqrt", size) == size**0.5
    assert scaling_factor(None, size) == 1
    assert scaling_factor(lambda n: 1 + n / 2, size) == 1 + size / 2
    with pytest.raises(ValueError, match="'cubic'"):
        scaling_factor("cubic", size)
    with pytest.raises(ValueError, match="positive number"):
        scaling_factor(lambda n: -n, size)


@pytest.mark.parametrize("factor", [2, 3, 2**0.5])
def test_plain_value_is_scaled_once(factor):
    optimizer = keras.optimizers.Adam(0.1, name="mine")
    for _ in range(2):
        (result,) = scale_learning_rate(optimizer, factor)
        assert result.name == "mine"
        assert result.before == np.float32(0.1)
        assert result.after == pytest.approx(0.1 * factor, rel=1e-6)
        assert rate(optimizer) == result.after
    scale_learning_rate(optimizer, 5)
    assert rate(optimizer) == pytest.approx(0.5, rel=1e-6)
    scale_learning_rate(optimizer, 1)
    assert rate(optimizer) == np.float32(0.1)


def test_factor_one_touches_nothing():
    optimizer = keras.optimizers.SGD(0.1)
    before = set(vars(optimizer))
    scale_learning_rate(optimizer, 1)
    warm_up_learning_rate(optimizer, 10)
    assert set(vars(optimizer)) == before


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    "schedule",
    [
        lambda: keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5),
        lambda: keras.optimizers.schedules.PiecewiseConstantDecay([2], [0.1, 0.01]),
        lambda: Halving(0.1),
    ],
)
def test_schedules_are_scaled_in_the_step(schedule, jit):
    x, y = data(12)
    models = []
    for factor in (1, 3):
        # The weights of plain SGD show the rate: what one step did with it.
        optimizer = keras.optimizers.SGD(schedule())
        model = small_model(optimizer, jit_compile=jit)
        (result,) = scale_learning_rate(optimizer, factor)
        assert result.before == pytest.approx(0.1)
        assert result.after == pytest.approx(0.1 * factor)
        before = model.get_weights()
        model.fit(x, y, batch_size=12, verbose=0)
        models.append([b - a for a, b in zip(model.get_weights(), before, strict=True)])
        assert rate(optimizer) == pytest.approx(factor * float(schedule()(1)))
        config = optimizer.get_config()["learning_rate"]
        assert config == keras.saving.serialize_keras_object(schedule())
    for plain, scaled in zip(*models, strict=True):
        np.testing.assert_allclose(3 * plain, scaled, rtol=1e-5, atol=3e-7)


def test_another_factor_needs_no_new_trace():
    x, y = data(8)
    optimizer = keras.optimizers.SGD(Halving(0.1))
    model = small_model(optimizer)
    scale_learning_rate(optimizer, 2)
    model.fit(x, y, batch_size=8, verbose=0)
    scale_learning_rate(optimizer, 4)
    before = model.get_weights()
    step = float(optimizer.iterations)
    tape_free = small_model(keras.optimizers.SGD(0.1 * 4 / (1 + step)))
    tape_free.set_weights(before)
    model.fit(x, y, batch_size=8, verbose=0, shuffle=False)
    tape_free.fit(x, y, batch_size=8, verbose=0, shuffle=False)
    for a, b in zip(model.get_weights(), tape_free.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_loss_scale_and_multi_optimizers():
    inner = keras.optimizers.SGD(0.1)
    wrapped = keras.optimizers.LossScaleOptimizer(inner)
    scale_learning_rate(wrapped, 4)
    assert rate(wrapped) == rate(inner) == np.float32(0.4)

    parts = keras.optimizers.SGD(0.1, name="a"), keras.optimizers.Adam(0.01, name="b")
    multi = multi_optimizer(parts[0], {"out/.*": parts[1]})
    results = scale_learning_rate(multi, 2)
    assert {r.name: r.after for r in results} == {
        "a": np.float32(0.2),
        "b": np.float32(0.02),
    }
    assert applied_factor(multi) == 2
    unbuilt = multi_optimizer(lambda variable: parts[0])
    with pytest.raises(ValueError, match="build"):
        scale_learning_rate(unbuilt, 2)


OPTIMIZERS = {
    "plain": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "schedule": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    ),
    "user": lambda: keras.optimizers.SGD(Halving(0.1)),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.1)
    ),
    "multi": lambda: multi_optimizer(
        keras.optimizers.SGD(0.1, momentum=0.9),
        {"out/.*": keras.optimizers.Adam(0.01)},
    ),
    "accumulating": lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=2),
}


def base_rates(optimizer):
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    return [rate(o) for o in getattr(optimizer, "optimizers", [optimizer])]


def state(optimizer):
    return [v.numpy() for v in optimizer.variables]


@pytest.mark.parametrize("ramp", [0, 100])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_files_hold_the_base_rate(kind, ramp, tmp_path):
    x, y = data()
    single = small_model(OPTIMIZERS[kind]())
    model = small_model(OPTIMIZERS[kind]())
    scale_learning_rate(model.optimizer, 3)
    warm_up_learning_rate(model.optimizer, ramp)
    path = tmp_path / "model.keras"
    checkpoint = keras.callbacks.ModelCheckpoint(str(tmp_path / "in_fit.keras"))
    model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[checkpoint])
    live = base_rates(model.optimizer)
    stored = state(model.optimizer)
    model.save(path)
    model.save_weights(tmp_path / "model.weights.h5")
    for a, b in zip(stored, state(model.optimizer), strict=True):
        np.testing.assert_array_equal(a, b)  # saving moves nothing
    assert base_rates(model.optimizer) == live

    single.fit(x, y, batch_size=8, epochs=2, verbose=0)
    expected = base_rates(single.optimizer)
    for file in (path, tmp_path / "in_fit.keras"):
        loaded = keras.models.load_model(file)
        assert type(loaded.optimizer) is type(single.optimizer)
        assert base_rates(loaded.optimizer) == expected
        assert int(loaded.optimizer.iterations) == int(model.optimizer.iterations)
        by_name = zip(
            loaded.optimizer.variables, model.optimizer.variables, strict=True
        )
        for a, b in by_name:
            if "learning_rate" not in a.name:
                np.testing.assert_array_equal(a.numpy(), b.numpy())
        # Load, then scale: once, to the rate that was live.
        scale_learning_rate(loaded.optimizer, 3)
        warm_up_learning_rate(loaded.optimizer, ramp)
        assert base_rates(loaded.optimizer) == live

    # Into a live, scaled optimizer.
    target = small_model(OPTIMIZERS[kind]())
    scale_learning_rate(target.optimizer, 3)
    warm_up_learning_rate(target.optimizer, ramp)
    target.load_weights(tmp_path / "model.weights.h5")
    assert base_rates(target.optimizer) == live
    # And into one of another size.
    target = small_model(OPTIMIZERS[kind]())
    scale_learning_rate(target.optimizer, 2)
    target.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_allclose(base_rates(target.optimizer), 2 * np.array(expected))


def test_a_rate_that_was_changed_is_saved_divided(tmp_path):
    model = small_model(keras.optimizers.SGD(0.1))
    scale_learning_rate(model.optimizer, 3)
    model.optimizer.learning_rate = 0.03
    live = rate(model.optimizer)
    model.save(tmp_path / "m.keras")
    assert rate(model.optimizer) == live
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert rate(loaded.optimizer) == pytest.approx(0.01, rel=1e-6)
    assert scale_learning_rate(model.optimizer, 3)[0].after == live


@pytest.mark.parametrize("kind", ["plain", "schedule", "loss scale"])
def test_copies_and_configs_are_single_process(kind):
    optimizer = OPTIMIZERS[kind]()
    scale_learning_rate(optimizer, 3)
    warm_up_learning_rate(optimizer, 10)
    again = type(optimizer).from_config(optimizer.get_config())
    assert base_rates(again) == base_rates(OPTIMIZERS[kind]())
    assert base_rates(copy.deepcopy(optimizer)) == base_rates(OPTIMIZERS[kind]())
    assert scale_learning_rate(again, 3)[0].after == target_rates(optimizer)[0]


@pytest.mark.launches
def test_files_load_without_distkeras(tmp_path):
    model = small_model(keras.optimizers.Adam(0.1))
    scale_learning_rate(model.optimizer, 4)
    warm_up_learning_rate(model.optimizer, 8)
    model.fit(*data(), batch_size=8, verbose=0)
    model.save(tmp_path / "model.keras")
    script = textwrap.dedent(
        """
        import sys
        sys.modules["distkeras"] = None  # an import of it fails
        import keras, numpy
        model = keras.models.load_model("model.keras")
        assert type(model.optimizer) is keras.optimizers.Adam
        assert float(model.optimizer.learning_rate) == numpy.float32(0.1)
        assert int(model.optimizer.iterations) == 3
        model.fit(numpy.ones((4, 3)), numpy.ones((4, 1)), verbose=0)
        """
    )
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("factor", SIZES)
@pytest.mark.parametrize("kind", ["plain", "schedule", "loss scale", "accumulating"])
def test_warm_up_at_every_update(kind, factor):
    def optimizer():
        if kind == "schedule":
            return keras.optimizers.SGD(
                keras.optimizers.schedules.ExponentialDecay(0.1, 4, 0.5)
            )
        if kind == "accumulating":
            return keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
        plain = keras.optimizers.SGD(0.1)
        return plain if kind == "plain" else keras.optimizers.LossScaleOptimizer(plain)

    model = small_model(optimizer())
    scale_learning_rate(model.optimizer, factor)
    steps = 6
    warm_up_learning_rate(model.optimizer, 2 * steps)  # W = 2, S = 6 batches
    rates = Rates()
    model.fit(*data(24), batch_size=4, epochs=4, verbose=0, callbacks=[rates])
    every = 2 if kind == "accumulating" else 1
    for step, seen in enumerate(rates.seen):
        base = 0.1 * 0.5 ** (step / 4) if kind == "schedule" else 0.1
        expected = warm_up_formula(base, factor, step // every, 2 * steps / every)
        assert seen == pytest.approx(expected, rel=1e-6), step
    if kind == "plain":
        assert rates.seen[-1] == np.float32(0.1 * factor)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("per_execution", [1, 3])
def test_warm_up_within_the_step(jit, per_execution):
    # The reference sets the rate by hand before each batch of plain Keras.
    class ByHand(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            update = int(self.model.optimizer.iterations)
            value = warm_up_formula(0.05, 4, update, 7)
            self.model.optimizer.learning_rate = value

    options = {"batch_size": 4, "epochs": 2, "verbose": 0, "shuffle": False}
    reference = small_model(keras.optimizers.SGD(0.05, momentum=0.9))
    reference.fit(*data(), callbacks=[ByHand()], **options)
    model = small_model(
        keras.optimizers.SGD(0.05, momentum=0.9),
        jit_compile=jit,
        steps_per_execution=per_execution,
    )
    scale_learning_rate(model.optimizer, 4)
    warm_up_learning_rate(model.optimizer, 7)
    model.fit(*data(), **options)
    for a, b in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_warm_up_goes_on_after_a_resume(tmp_path):
    def fresh():
        model = small_model(keras.optimizers.SGD(0.1))
        scale_learning_rate(model.optimizer, 3)
        warm_up_learning_rate(model.optimizer, 10)
        return model

    whole, first, second = Rates(), Rates(), Rates()
    fresh().fit(*data(), batch_size=4, epochs=2, verbose=0, callbacks=[whole])
    model = fresh()
    model.fit(*data(), batch_size=4, verbose=0, callbacks=[first])
    model.save(tmp_path / "m.keras")
    model = keras.models.load_model(tmp_path / "m.keras")
    scale_learning_rate(model.optimizer, 3)
    warm_up_learning_rate(model.optimizer, 10)
    model.fit(*data(), batch_size=4, verbose=0, callbacks=[second])
    assert first.seen + second.seen == whole.seen


def test_what_is_set_during_the_warm_up_is_not_compounded():
    model = small_model(keras.optimizers.SGD(0.1))
    optimizer = model.optimizer
    scale_learning_rate(optimizer, 4)
    warm_up_learning_rate(optimizer, 12)
    rates = Rates()
    same = keras.callbacks.LearningRateScheduler(lambda epoch, lr: lr)
    model.fit(*data(), batch_size=4, epochs=2, verbose=0, callbacks=[rates, same])
    for update, seen in enumerate(rates.seen):
        assert seen == pytest.approx(warm_up_formula(0.1, 4, update, 12), rel=1e-6)

    optimizer.iterations.assign(6)
    half = rate(optimizer)
    optimizer.learning_rate = half * 0.1  # as ReduceLROnPlateau does
    assert rate(optimizer) == pytest.approx(half * 0.1, rel=1e-6)
    assert target_rates(optimizer) == [pytest.approx(0.04, rel=1e-6)]
    optimizer.iterations.assign(12)
    assert rate(optimizer) == target_rates(optimizer)[0]
    warm_up_learning_rate(optimizer, 0)
    optimizer.iterations.assign(0)
    assert rate(optimizer) == target_rates(optimizer)[0]


def test_the_number_of_saved_variables_does_not_change():
    plain = small_model(keras.optimizers.Adam(0.1)).optimizer
    optimizer = small_model(keras.optimizers.Adam(0.1)).optimizer
    scale_learning_rate(optimizer, 4)
    warm_up_learning_rate(optimizer, 12)
    names = [v.name for v in optimizer.variables]
    assert names == [v.name for v in plain.variables]


def test_bad_arguments():
    optimizer = keras.optimizers.SGD(0.1)
    with pytest.raises(ValueError, match="positive number"):
        scale_learning_rate(optimizer, 0)
    with pytest.raises(ValueError, match="0 or more"):
        warm_up_learning_rate(optimizer, -1)
    for divisor in (0, 0.0, -1):
        with pytest.raises(ValueError, match="positive number"):
            warm_up_learning_rate(optimizer, 10, divisor=divisor)
    with pytest.raises(ValueError, match="Expected .* Pass `steps_per_epoch`"):
        Scaling("linear", warmup_epochs=2).apply(keras.Sequential(), 2.0, None)
