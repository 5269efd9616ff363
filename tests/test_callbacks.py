"""`LearningRateWarmup` and `LearningRateSchedule`, as in Horovod's own tests."""

import keras
import numpy as np
import pytest
from newer_keras import multi_optimizer

import distkeras
from distkeras import callbacks
from distkeras._learning_rate import scale_learning_rate

# Keras 3.15 itself calls np.array on a variable, which NumPy 2.4 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")

STEPS = 5


class Rates(keras.callbacks.Callback):
    """Notes the rate that each batch uses, epoch by epoch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_epoch_begin(self, epoch, logs=None):
        self.seen.append([])

    def on_train_batch_begin(self, batch, logs=None):
        rate = keras.ops.convert_to_tensor(self.model.optimizer.learning_rate)
        self.seen[-1].append(float(rate))


def small_model(optimizer, **options):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse", **options)
    return model


def fit(model, *more, epochs=1, **options):
    x = np.linspace(-1, 1, 8 * STEPS).reshape(-1, 2)
    rates = Rates()
    history = model.fit(
        x,
        x[:, :1],
        batch_size=4,
        epochs=epochs,
        verbose=0,
        callbacks=[*more, rates],
        **options,
    )
    return np.array(rates.seen), history.history


@pytest.mark.parametrize("size", [None, 4])
def test_warm_up_then_schedules(world, size):
    # 20 epochs of 5 steps, warmed up for 5, divided by 10 and 100, then multiplied.
    ranks = size or world.size
    initial = 0.1 * ranks
    model = small_model(keras.optimizers.SGD(initial))
    schedule = callbacks.LearningRateSchedule
    seen, history = fit(
        model,
        callbacks.LearningRateWarmup(warmup_epochs=5, divisor=size),
        schedule(lambda epoch: 10.0 ** -(epoch // 5), start_epoch=5, end_epoch=11),
        schedule(
            lambda epoch: 10.0 ** -(epoch / 5),
            start_epoch=11,
            end_epoch=15,
            staircase=False,
        ),
        schedule(lambda epoch: epoch, start_epoch=15),
        epochs=20,
    )
    assert seen.shape == (20, STEPS)
    update = np.arange(5 * STEPS).reshape(5, STEPS)
    warm = 0.1 * (1 + (ranks - 1) * np.minimum(1, update / (5 * STEPS)))
    np.testing.assert_allclose(seen[:5], warm, rtol=1e-6)
    assert (seen[:5] <= np.float32(initial)).all()
    np.testing.assert_allclose(seen[6:10], 0.1 * initial, rtol=1e-6)
    np.testing.assert_allclose(seen[10], 0.01 * initial, rtol=1e-6)
    at = 11 + np.arange(4 * STEPS).reshape(4, STEPS) / STEPS
    np.testing.assert_allclose(seen[11:15], initial * 10.0 ** -(at / 5), rtol=1e-6)
    assert (seen[11:15] < 0.01 * initial).all()
    expected = initial * np.arange(15, 20)[:, None] * np.ones(STEPS)
    np.testing.assert_allclose(seen[15:], expected, rtol=1e-6)
    # Logged is the rate at the end of an epoch, and the run is the same everywhere.
    np.testing.assert_allclose(history["learning_rate"][15:], expected[:, 0], rtol=1e-6)
    assert len({repr(h) for h in world.allgather_object(history)}) == 1


def test_warm_up_under_the_trainer(world):
    # 20 rows on N ranks, one a step on each: the last step may be of fewer ranks.
    model = small_model(keras.optimizers.SGD(0.1 * world.size))
    trainer = distkeras.Trainer(model, learning_rate_scaling=None)
    rates = Rates()
    x = np.linspace(-1, 1, 40).reshape(-1, 2)
    warm_up = callbacks.LearningRateWarmup(warmup_epochs=2)
    trainer.fit(
        x, x[:, :1], batch_size=1, epochs=3, verbose=0, callbacks=[warm_up, rates]
    )
    seen = np.array(rates.seen)
    steps = -(-20 // world.size)
    assert seen.shape == (3, steps)
    share = np.minimum(1, np.arange(3 * steps) / (2 * steps)).reshape(3, steps)
    np.testing.assert_allclose(seen, 0.1 * (1 + (world.size - 1) * share), rtol=1e-6)
    # The step is the Trainer's still: it exchanges.
    weights = [w.tolist() for w in model.get_weights()]
    assert len({repr(w) for w in world.allgather_object(weights)}) == 1


@pytest.mark.parametrize("jit", [False, True])
def test_warm_up_takes_a_step_that_was_traced_before(jit):
    model = small_model(keras.optimizers.SGD(0.4), jit_compile=jit)
    fit(model)
    frozen = model.get_weights()
    model.optimizer.iterations.assign(0)
    seen, _ = fit(
        model, callbacks.LearningRateWarmup(warmup_epochs=2, divisor=4), shuffle=False
    )
    np.testing.assert_allclose(seen[0], 0.1 * (1 + 3 * np.arange(STEPS) / 10), 1e-6)

    class ByHand(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            self.model.optimizer.learning_rate = seen[0][batch]

    reference = small_model(keras.optimizers.SGD(0.1))
    reference.set_weights(frozen)
    fit(reference, ByHand(), shuffle=False)
    for a, b in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_warm_up_begins_at_the_rate_that_the_trainer_scaled():
    model = small_model(keras.optimizers.SGD(0.1))
    scale_learning_rate(model.optimizer, 3)
    warm_up = callbacks.LearningRateWarmup(warmup_epochs=1)
    warm_up.prepare(model.optimizer, STEPS)
    seen, _ = fit(model, warm_up, epochs=2)
    np.testing.assert_allclose(seen[0], 0.1 * (1 + 2 * np.arange(STEPS) / STEPS), 1e-6)
    np.testing.assert_array_equal(seen[1], np.float32(0.1) * np.float32(3))


def test_warm_up_of_a_second_fit_goes_on():
    model = small_model(keras.optimizers.SGD(0.4))
    warm_up = callbacks.LearningRateWarmup(warmup_epochs=2, divisor=4)
    first, _ = fit(model, warm_up)
    function = model.train_function
    second, _ = fit(model, warm_up)
    assert model.train_function is function
    whole = 0.1 * (1 + 3 * np.arange(2 * STEPS) / (2 * STEPS))
    np.testing.assert_allclose(np.ravel([first, second]), whole, rtol=1e-6)


def test_warm_up_says_when_it_is_over(world, capsys):
    fit(
        small_model(keras.optimizers.SGD(0.5)),
        callbacks.LearningRateWarmup(warmup_epochs=1.5, divisor=2, verbose=1),
        epochs=3,
    )
    printed = capsys.readouterr().out
    text = "Epoch 2: learning-rate warm-up finished at 0.5.\n"
    assert printed == (text if world.rank == 0 else "")


def test_plateau_during_the_warm_up_multiplies_once():
    model = small_model(keras.optimizers.SGD(0.4))
    plateau = keras.callbacks.ReduceLROnPlateau("loss", 0.5, patience=1, min_delta=9.0)
    seen, history = fit(
        model,
        callbacks.LearningRateWarmup(warmup_epochs=4, divisor=4),
        plateau,
        epochs=6,
    )
    share = np.minimum(1, np.arange(6 * STEPS) / (4 * STEPS)).reshape(6, STEPS)
    halvings = np.maximum(0, np.arange(6) - 1)[:, None]  # first epoch: the best
    expected = 0.1 * (1 + 3 * share) * 0.5**halvings
    np.testing.assert_allclose(seen, expected, rtol=1e-6)
    assert history["learning_rate"][-1] == pytest.approx(0.4 * 0.5**4)


def test_exponential_multiplier_and_several_optimizers():
    parts = keras.optimizers.SGD(0.1, name="a"), keras.optimizers.SGD(0.2, name="b")
    model = small_model(multi_optimizer(parts[0], {".*bias": parts[1]}))
    x = np.ones((8, 2))
    halve = callbacks.LearningRateSchedule(0.5, start_epoch=1)
    for _ in range(2):  # a second fit begins at the same initial rate
        history = model.fit(x, x[:, :1], epochs=3, verbose=0, callbacks=[halve]).history
        np.testing.assert_allclose(history["learning_rate_a"][1:], [0.1, 0.05])
        np.testing.assert_allclose(history["learning_rate_b"][1:], [0.2, 0.1])


def test_a_resumed_run_names_its_initial_rate():
    model = small_model(keras.optimizers.SGD(0.01))
    tenth = callbacks.LearningRateSchedule(
        lambda epoch: 0.1 ** (epoch // 2), initial_learning_rate=1.0
    )
    seen, _ = fit(model, tenth, epochs=4, initial_epoch=2)
    np.testing.assert_allclose(seen, 0.1, rtol=1e-6)


def generated():
    while True:
        yield np.ones((2, 2)), np.ones((2, 1))


def test_unknown_lengths_are_refused_and_can_be_given():
    for callback in (
        callbacks.LearningRateWarmup(warmup_epochs=1),
        callbacks.LearningRateSchedule(0.5, staircase=False),
    ):
        model = small_model(keras.optimizers.SGD(0.1))
        callback.set_model(model)
        callback.set_params({"epochs": 1, "steps": None, "verbose": 0})
        with pytest.raises(ValueError, match="steps_per_epoch"):
            callback.on_train_begin()
        callback.steps_per_epoch = 3
        model.fit(
            generated(),
            steps_per_epoch=3,
            epochs=2,
            shuffle=False,
            verbose=0,
            callbacks=[callback],
        )


def test_a_schedule_of_schedules_is_refused():
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5)
    model = small_model(keras.optimizers.SGD(rate))
    with pytest.raises(TypeError, match="is a schedule"):
        fit(model, callbacks.LearningRateSchedule(0.5))
    with pytest.raises(ValueError, match="warmup_epochs=-1"):
        callbacks.LearningRateWarmup(warmup_epochs=-1)
    for divisor in (0, -2.0, float("inf")):
        with pytest.raises(ValueError, match=f"divisor={divisor}"):
            callbacks.LearningRateWarmup(divisor=divisor)


def test_the_rate_that_horovod_takes_first_is_not_taken_for_epochs():
    with pytest.raises(TypeError, match=r"warmup_epochs=5.*\n  initial_lr: .*SGD"):
        callbacks.LearningRateWarmup(0.4)
    with pytest.raises(TypeError, match="initial_lr: .*initial_learning_rate="):
        callbacks.LearningRateSchedule(0.4, lambda epoch: 0.1**epoch)
    with pytest.raises(TypeError, match="initial_lr: .*\n  momentum_correction: leave"):
        callbacks.LearningRateWarmup(initial_lr=0.4, momentum_correction=False)
    with pytest.raises(TypeError, match="unexpected keyword argument 'unknown'"):
        callbacks.LearningRateWarmup(unknown=1)
