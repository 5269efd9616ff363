"""`Trainer.fit` against one process that trains on the concatenated batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import Adversarial
from equivalence import assert_equal_everywhere
from equivalence import assert_equal_history
from equivalence import assert_equal_weights
from equivalence import build
from equivalence import samples
from equivalence import trainer
from newer_keras import multi_optimizer

import distkeras
from distkeras._settings import settings_of
from distkeras.communicators import Communicator

pytestmark = pytest.mark.dealt

OPTIMIZERS = {
    "sgd_momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    # Adam makes steps of one size out of gradients of any: at a rate of 0.01 one weight
    # whose gradient nears zero differs by 1.007e-5 at 3 ranks, in float64 by 3e-16.
    "adam": lambda: keras.optimizers.Adam(0.003),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.1),
}


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_equals_one_process(world: Communicator, kind: str, jit_compile: bool) -> None:
    """21 steps over uneven shards: 103 samples, the last batch shorter."""
    x, y = samples(103)
    xv, yv = samples(31, seed=1)
    steps = -(-103 // (8 * world.size))
    epochs = -(-21 // steps)
    single = build(OPTIMIZERS[kind], jit_compile=jit_compile)
    expected = single.fit(
        x,
        y,
        batch_size=8 * world.size,
        epochs=epochs,
        shuffle=False,
        validation_data=(xv, yv),
        verbose=0,
    )
    model = build(OPTIMIZERS[kind], jit_compile=jit_compile)
    run = trainer(model)
    history = run.fit(
        x,
        y,
        batch_size=8,
        epochs=epochs,
        shuffle=False,
        validation_data=(xv, yv),
        verbose=0,
    )
    assert_equal_weights(model, single)
    assert_equal_history(history, expected)
    assert_equal_everywhere(world, model)
    if world.size > 1:
        assert run.exchange.counters.exchanges == epochs * steps
        assert run.exchange.counters.collectives == epochs * steps
        assert int(model.optimizer.iterations) == epochs * steps


@pytest.mark.parametrize("own_step", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"run_eagerly": True, "jit_compile": False},
        {"steps_per_execution": 4, "jit_compile": False},
        {"steps_per_execution": 4, "jit_compile": True},
        {"jit_compile": "auto"},
        {"jit_compile": True},
    ],
    ids=str,
)
def test_ways_of_running_a_step(
    world: Communicator, options: dict[str, Any], own_step: bool
) -> None:
    x, y = samples(50)
    single = build(OPTIMIZERS["adam"], **options)
    expected = single.fit(
        x, y, batch_size=8 * world.size, epochs=2, shuffle=False, verbose=0
    )
    model = build(OPTIMIZERS["adam"], own_step=own_step, **options)
    history = trainer(model).fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert_equal_weights(model, single)
    assert_equal_history(history, expected)
    assert_equal_everywhere(world, model)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("own_step", [False, True])
def test_fewer_samples_than_ranks(
    world: Communicator, count: int, own_step: bool
) -> None:
    x, y = samples(count)
    single = build(OPTIMIZERS["adam"])
    expected = single.fit(
        x, y, batch_size=2 * world.size, epochs=3, shuffle=False, verbose=0
    )
    model = build(OPTIMIZERS["adam"], own_step=own_step)
    history = trainer(model).fit(x, y, batch_size=2, epochs=3, shuffle=False, verbose=0)
    assert_equal_weights(model, single)
    assert_equal_history(history, expected)


def test_shuffled_run_is_repeatable_and_sees_every_sample(world: Communicator) -> None:
    x, y = samples(40)
    weights = []
    for _ in range(2):
        model = build(OPTIMIZERS["sgd_momentum"])
        trainer(model, seed=7).fit(x, y, batch_size=4, epochs=2, verbose=0)
        weights.append([v.numpy() for v in model.trainable_variables])
    if world.size > 1:  # at one rank Keras shuffles, from its own generator
        for a, b in zip(*weights, strict=True):
            np.testing.assert_array_equal(a, b)


def test_weights_begin_as_on_rank_zero(world: Communicator) -> None:
    x, y = samples(16)
    model = build(OPTIMIZERS["sgd_momentum"], seed=world.rank)
    trainer(model).fit(x, y, batch_size=4, epochs=1, shuffle=False, verbose=0)
    single = build(OPTIMIZERS["sgd_momentum"], seed=0)
    single.fit(x, y, batch_size=4 * world.size, epochs=1, shuffle=False, verbose=0)
    assert_equal_weights(model, single)


@pytest.mark.parametrize(
    ("rule", "factor"),
    [
        ("linear", lambda n: n),
        ("sqrt", lambda n: n**0.5),
        (None, lambda n: 1),
        (lambda n: 3 * n, lambda n: 3 * n),
    ],
)
def test_learning_rate_is_scaled_once(
    world: Communicator,
    rule: Any,
    factor: Any,
    tmp_path: Path,
    tmp_path_shared: Path,
) -> None:
    x, y = samples(8)
    model = build(OPTIMIZERS["sgd_momentum"])
    run = distkeras.Trainer(model, learning_rate_scaling=rule)
    scaled = 0.1 * factor(world.size) if world.size > 1 else 0.1
    checkpoint = distkeras.callbacks.Checkpoint(tmp_path_shared / "run")
    for callbacks in ([], [checkpoint]):  # by which one rank takes another way
        run.fit(x, y, batch_size=4, verbose=0, callbacks=callbacks)
        assert float(model.optimizer.learning_rate) == pytest.approx(scaled)
    path = tmp_path / "model.keras"
    run.save(path)
    loaded = distkeras.load_model(path)
    assert float(loaded.optimizer.learning_rate) == pytest.approx(0.1)
    distkeras.Trainer(loaded, learning_rate_scaling=rule).fit(
        x, y, batch_size=4, verbose=0
    )
    assert float(loaded.optimizer.learning_rate) == pytest.approx(scaled)


def test_global_batch_size(
    world: Communicator, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = samples(30)
    single = build(OPTIMIZERS["adam"])
    single.fit(x, y, batch_size=7, epochs=2, shuffle=False, verbose=0)
    model = build(OPTIMIZERS["adam"])
    options: dict[str, Any] = {"epochs": 2, "shuffle": False, "verbose": 0}
    with caplog.at_level("INFO", logger="distkeras"):
        trainer(model).fit(x, y, global_batch_size=7, **options)
    assert_equal_weights(model, single)
    if world.size > 1 and world.rank == 0:
        most = -(-7 // world.size)
        assert f" {most} a rank, 7 global" in caplog.text


def test_arguments_that_contradict(world: Communicator) -> None:
    x, y = samples(8)
    run = trainer(build(OPTIMIZERS["adam"]))
    with pytest.raises(ValueError, match="batch_size=2, global_batch_size=4"):
        run.fit(x, y, batch_size=2, global_batch_size=4)
    with pytest.raises(TypeError, match="Expected a Keras model"):
        distkeras.Trainer("model")
    model = build(OPTIMIZERS["adam"])
    for options, text in (
        ({"warmup_epochs": -1}, "Expected .* Received: warmup_epochs=-1"),
        ({"warmup_epochs": float("inf")}, "warmup_epochs=inf"),
        ({"seed": -1}, "seed=-1"),
        ({"learning_rate_scaling": "cubic"}, "cubic"),
        ({"bucket_bytes": 0}, "Expected .* Received: bucket_bytes=0"),
    ):
        with pytest.raises(ValueError, match=text):
            distkeras.Trainer(model, **options)
    for options in ({"resume": True}, {"resized": "no"}, {"shard": 0}):
        name, value = next(iter(options.items()))
        with pytest.raises(ValueError, match=f"`{name}` .* Received: {value!r}"):
            run.fit(x, y, verbose=0, **options)
    callbacks: list[Any] = [keras.callbacks.EarlyStopping]
    for call in (
        lambda: run.fit(x, y, verbose=0, callbacks=callbacks),
        lambda: run.evaluate(x, y, verbose=0, callbacks=callbacks),
        lambda: run.predict(x, verbose=0, callbacks=callbacks),
    ):
        with pytest.raises(TypeError, match="Expected instances of .*EarlyStopping"):
            call()
    with pytest.raises(ValueError, match="`gather` .* 'none'"):
        run.predict(x, gather="none", verbose=0)
    with pytest.raises(ValueError, match="`shard` .* 'none'"):
        run.evaluate(x, y, shard="none", verbose=0)


def test_public_names_are_for_users(world: Communicator) -> None:
    run = trainer(build(OPTIMIZERS["adam"]))
    methods = {"close", "compile", "evaluate", "fit", "predict", "save", "summary"}
    settings = {"communicator", "learning_rate_scaling", "model", "warmup_epochs"}
    names = {name for name in dir(run) if not name.startswith("_")}
    assert names == methods | settings | {"exchange"}


def test_ranks_that_were_called_differently(world: Communicator) -> None:
    if world.size == 1:
        pytest.skip("needs a rank to differ from")
    x, y = samples(8)
    run = trainer(build(OPTIMIZERS["adam"]))
    with pytest.raises(distkeras.MismatchError, match=r"epochs=1.*\n.*epochs=2"):
        run.fit(x, y, batch_size=2, epochs=1 + (world.rank > 0), verbose=0)


def test_ranks_with_other_class_weights(world: Communicator) -> None:
    if world.size == 1:
        pytest.skip("needs a rank to differ from")
    x, y = samples(8)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(2)
    weights = {0: 1.0, 1: 1.0 + world.rank, 2: 1.0}
    run = trainer(build(OPTIMIZERS["adam"]))
    with pytest.raises(distkeras.MismatchError, match=r"class_weight=\[\(0, 1.0\)"):
        run.fit(data, class_weight=weights, verbose=0)


def test_closed_trainers_leave_nothing(world: Communicator) -> None:
    """And can be used again."""
    x, y = samples(8)
    run = trainer(build(OPTIMIZERS["sgd_momentum"]))
    for _ in range(2):
        run.fit(x, y, batch_size=4, shuffle=False, verbose=0)
        assert (run.exchange is None) == (world.size == 1)
        run.close()
        run.close()
        assert run.exchange is None
    single = build(OPTIMIZERS["sgd_momentum"])
    for _ in range(2):
        single.fit(x, y, batch_size=4 * world.size, shuffle=False, verbose=0)
    assert_equal_weights(run.model, single)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"check_replicas": False}, "check_replicas=False"),
        ({"timeline": "trace.json"}, "timeline=written"),
        ({"warmup_epochs": 2}, "warmup_epochs=2"),
    ],
)
def test_ranks_with_other_options(
    world: Communicator, options: dict[str, Any], text: str
) -> None:
    if world.size == 1:
        pytest.skip("needs a rank to differ from")
    x, y = samples(8)
    run = trainer(build(OPTIMIZERS["adam"]), **(options if world.rank == 1 else {}))
    with pytest.raises(distkeras.MismatchError, match=text):
        run.fit(x, y, batch_size=2, verbose=0)


def test_checkpoint_on_rank_zero_alone(world: Communicator, tmp_path: Path) -> None:
    """As Horovod has it; here all ranks take part in one."""
    if world.size == 1:
        pytest.skip("needs a rank to differ from")
    x, y = samples(8)
    callbacks = [distkeras.callbacks.Checkpoint(tmp_path)] if world.rank == 0 else []
    with pytest.raises(distkeras.MismatchError, match="to be passed on every rank"):
        trainer(build(OPTIMIZERS["adam"])).fit(
            x, y, batch_size=2, verbose=0, callbacks=callbacks
        )


def test_models_that_differ(world: Communicator) -> None:
    if world.size == 1:
        pytest.skip("needs a rank to differ from")
    x, y = samples(8)
    keras.utils.set_random_seed(0)
    width = 5 + (world.rank == 1)
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(width), keras.layers.Dense(3)]
    )
    model.compile("sgd", loss="sparse_categorical_crossentropy")
    with pytest.raises(distkeras.MismatchError, match=r"dense/kernel: \(6, 5\)"):
        trainer(model).fit(x, y, batch_size=2, verbose=0)


def test_the_models_own_fit_before_compile(world: Communicator) -> None:
    """Rank 0 alone had another error than Keras'."""
    x, y = samples(4)
    inputs = keras.Input((x.shape[1],))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    trainer(model)
    with pytest.raises(ValueError, match=r"must call `compile\(\)`"):
        model.fit(x, y, verbose=0)


@pytest.mark.parametrize("method", ["fit", "train_on_batch"])
def test_training_past_the_trainer_is_told_once(
    world: Communicator, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    """Ranks trained a model each; what the `Trainer` does by itself is no such case."""
    x, y = samples(8)
    model = build(OPTIMIZERS["adam"])
    run = trainer(model)
    with caplog.at_level("WARNING", logger="distkeras"):
        run.fit(x, y, batch_size=2, verbose=0, callbacks=[Look()])
        model.evaluate(x, y, verbose=0)
        model.predict(x, verbose=0)
        assert "by itself" not in caplog.text
        for _ in range(2):
            getattr(model, method)(x, y)
    first = world.size > 1 and world.rank == 0
    assert caplog.text.count(f"`model.{method}` trains") == first
    caplog.clear()
    other = keras.models.clone_model(model)
    other.compile(
        distkeras.DistributedOptimizer(keras.optimizers.SGD(0.1)),
        "sparse_categorical_crossentropy",
        jit_compile=False,
    )
    trainer(other)
    with caplog.at_level("WARNING", logger="distkeras"):
        other.train_on_batch(x, y)
    assert "by itself" not in caplog.text


class Look(keras.callbacks.Callback):
    """Does with the model itself what callbacks do, on this rank's own data."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        x, y = samples(3)
        self.model.evaluate(x, y, verbose=0)
        self.model.predict(x, verbose=0)


def _with_settings(
    rank: int, *, slope: float = 0.2, smoothing: float = 0.1, momentum: float = 0.9
) -> keras.Model:
    """Returns a model that differs by rank in what may differ."""
    for _ in range(rank):  # names are numbered on
        keras.layers.Dense(1), keras.layers.Dropout(0.1)
    model = keras.Sequential(
        [
            keras.layers.Dense(
                4,
                activation=lambda x: x * (1 + rank * 0),
                kernel_initializer=keras.initializers.RandomNormal(seed=rank),
            ),
            keras.layers.LeakyReLU(negative_slope=slope),
            keras.layers.Dropout(0.1, seed=rank),
            Ranked(rank),
            keras.layers.Lambda(lambda x: x + 0 * rank),
            keras.layers.Dense(1, "sigmoid", name=f"last_{rank}"),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.1 * (rank + 1), momentum),
        keras.losses.BinaryCrossentropy(label_smoothing=smoothing),
    )
    return model


class Ranked(keras.layers.Layer):
    """A layer that is made with the rank."""

    def __init__(self, rank: int, **options: Any) -> None:
        super().__init__(**options)
        self.rank = rank

    def call(self, x: Any) -> Any:
        return x

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "rank": self.rank}


@pytest.mark.parametrize(
    ("option", "values", "text"),
    [
        ("slope", (0.2, 0.3), r"layer 2 \(LeakyReLU\): negative_slope=0.[23]\n"),
        ("smoothing", (0.1, 0.2), r"loss 1 \(Binary.*\): label_smoothing=0.[12]\n"),
        ("momentum", (0.9, 0.5), r"optimizer 1 \(SGD\): momentum=0.[95]\n"),
    ],
)
def test_settings_that_differ(
    world: Communicator, option: str, values: tuple[float, float], text: str
) -> None:
    """Training went on to its end, or drifted for a reason that was not named."""
    if world.size == 1:
        pytest.skip("needs a rank to differ from")
    x, _ = samples(8)
    last = world.rank == world.size - 1
    model = _with_settings(0, **{option: values[last]})
    with pytest.raises(distkeras.MismatchError, match=text) as error:
        trainer(model).fit(x, x[:, :1] > 0, batch_size=2, verbose=0)
    assert len(set(world.allgather_object(str(error.value)))) == 1
    assert int(model.optimizer.iterations) == 0


@pytest.mark.parametrize("by", ["map", "function"])
def test_settings_of_one_of_several_optimizers_that_differ(
    world: Communicator, by: str
) -> None:
    """What a `MultiOptimizer` is made with shows at most the first."""
    if world.size == 1:
        pytest.skip("needs a rank to differ from")
    x, _ = samples(8)
    last = world.rank == world.size - 1
    kernels = keras.optimizers.SGD(0.1)
    biases = keras.optimizers.SGD(0.1, momentum=0.9 - 0.4 * last)
    if by == "map":
        optimizer = multi_optimizer(kernels, {".*bias": biases})
    else:
        optimizer = multi_optimizer(
            lambda variable: biases if variable.path.endswith("bias") else kernels
        )
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    text = r"optimizer [23] \(SGD\): momentum=0.[95]\n"
    with pytest.raises(distkeras.MismatchError, match=text):
        trainer(model).fit(x, x[:, :1], batch_size=2, verbose=0)


def test_settings_that_may_differ(world: Communicator) -> None:
    """Names, seeds, functions, rates and what classes of the user's are made with."""
    x, _ = samples(8)
    model = _with_settings(world.rank)
    trainer(model).fit(x, x[:, :1] > 0, batch_size=2, verbose=0)
    assert_equal_everywhere(world, model)


def test_settings_are_those_of_the_file(tmp_path: Path) -> None:
    """A rank may have loaded the model that another one has made."""
    dense = keras.layers.Dense(3, "relu", kernel_regularizer="l2")
    image = [keras.layers.Conv1D(3, 2), keras.layers.BatchNormalization(), dense]
    model = keras.Sequential([keras.Input((6, 1)), *image])
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    loss = keras.losses.CategoricalCrossentropy(label_smoothing=0.1)
    model.compile(keras.optimizers.Adam(rate, clipnorm=1), loss)
    model.optimizer.build(model.trainable_variables)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    settings = settings_of(model)
    assert settings_of(loaded) == settings
    for row in (
        "layer 1 (Conv1D): kernel_size=[2]",
        "layer 3 (Dense): kernel_regularizer.l2=0.01",
        "loss 1 (CategoricalCrossentropy): label_smoothing=0.1",
        "optimizer 1 (Adam): learning_rate.decay_rate=0.9",
    ):
        assert row in settings


class Bypass(keras.Model):
    """Applies gradients without an optimizer that the model holds."""

    def train_step(self, data: Any) -> Any:
        import tensorflow as tf

        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - tf.cast(y, tf.float32)) ** 2)
        variables = self.trainable_variables
        for g, v in zip(tape.gradient(loss, variables), variables, strict=True):
            v.assign_sub(0.1 * g)
        return {"loss": loss}


def test_step_that_bypasses_the_exchange_is_caught(
    world: Communicator, caplog: pytest.LogCaptureFixture
) -> None:
    if world.size == 1:
        pytest.skip("one replica cannot drift")
    x, _ = samples(8 * world.size)
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,))
    model = Bypass(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd")
    with pytest.raises(distkeras.ReplicaDriftError, match="0 dense/kernel") as error:
        trainer(model).fit(x, x[:, :1], batch_size=4, verbose=0)
    assert len(set(world.allgather_object(str(error.value)))) == 1
    unchecked = trainer(model, check_replicas=False)
    unchecked.fit(x, x[:, :1], batch_size=4, verbose=0)
    words = "Weights differ between ranks when training ends"
    assert (words in caplog.text) == (world.rank == 0)
    assert_equal_everywhere(world, model)


@pytest.mark.parametrize("accumulated", [(None, None), (None, 2), (2, 3)])
def test_step_with_two_optimizers(
    world: Communicator, accumulated: tuple[int | None, int | None]
) -> None:
    """Which Keras builds at their first use; twice, as a `fit` may leave gradients."""
    x, _ = samples(24)
    first, second = accumulated

    def make() -> keras.Model:
        keras.utils.set_random_seed(0)
        model = Adversarial()
        model.build((None, 6))
        model.compile(
            keras.optimizers.SGD(0.1, gradient_accumulation_steps=first),
            keras.optimizers.SGD(0.1, 0.9, gradient_accumulation_steps=second),
        )
        return model

    single, model = make(), make()
    run = trainer(model)
    for _ in range(2):
        single.fit(x, batch_size=4 * world.size, epochs=3, shuffle=False, verbose=0)
        run.fit(x, batch_size=4, epochs=3, shuffle=False, verbose=0)
        assert_equal_weights(model, single)
    if world.size > 1:
        steps = 2 * 3 * -(-24 // (4 * world.size))
        exchanges = steps // (first or 1) + steps // (second or 1)
        assert run.exchange.counters.exchanges == exchanges
        assert run.exchange.counters.examples == 2 * 3 * 24  # not once an optimizer


def test_evaluate_and_predict(world: Communicator) -> None:
    x, y = samples(23)
    model = build(OPTIMIZERS["adam"])
    expected = model.evaluate(x, y, batch_size=4, verbose=0, return_dict=True)
    run = trainer(model)
    result = run.evaluate(x, y, batch_size=4, verbose=0, return_dict=True)
    assert result == pytest.approx(expected, rel=1e-5)
    values = [expected["loss"], expected["accuracy"]]
    assert run.evaluate(x, y, verbose=0) == pytest.approx(values, rel=1e-5)
    whole = model.predict(x, verbose=0)
    np.testing.assert_allclose(run.predict(x, verbose=0), whole, rtol=1e-5, atol=1e-6)
    one = run.predict(x[:1], verbose=0, gather="rank0")
    if world.rank == 0:
        np.testing.assert_allclose(one, whole[:1], rtol=1e-5, atol=1e-6)
    else:
        assert one is None


def test_second_fit_builds_no_new_function(world: Communicator) -> None:
    x, y = samples(20)
    model = build(OPTIMIZERS["adam"])
    run = trainer(model)
    run.fit(x, y, batch_size=4, verbose=0)
    before = run._session.functions
    run.fit(x, y, batch_size=4, verbose=0)
    assert run._session.functions is before
    model.compile("sgd", loss="sparse_categorical_crossentropy")
    run.fit(x, y, batch_size=4, verbose=0)
    assert world.size == 1 or run._session.functions is not before


def test_functions_of_the_model_are_put_back(world: Communicator) -> None:
    x, y = samples(20)
    model = build(OPTIMIZERS["adam"])
    model.fit(x, y, verbose=0)
    before = model.train_function, model.test_function
    trainer(model).fit(x, y, batch_size=4, verbose=0)
    if world.size > 1:
        assert (model.train_function, model.test_function) == before
    assert "_get_metrics_result_or_logs" not in vars(model)


def test_decisions_are_logged_once_on_rank_zero(
    world: Communicator, caplog: pytest.LogCaptureFixture, tmp_path_shared: Path
) -> None:
    x, y = samples(20)
    model, path = build(OPTIMIZERS["sgd_momentum"]), tmp_path_shared / "trace.json"
    run = distkeras.Trainer(model, timeline=path, warmup_epochs=0.5)
    with caplog.at_level("INFO", logger="distkeras"):
        run.fit(x, y, batch_size=4, verbose=0)
        run.fit(x, y, batch_size=4, verbose=0)
    text = "\n".join(r.getMessage() for r in caplog.records if r.name == "distkeras")
    if world.size == 1:
        assert "1 rank" in text
        assert text.count(f"No timeline is written to {path}") == 1
    elif world.rank == 0:
        for words in [
            f"{world.size} ranks on 1 node",
            f"4 a rank, {4 * world.size} global",
            f"0.1 -> {0.1 * world.size:.6g}",
            f"(linear scaled, x{world.size}, rising to it over 0.5 epochs)",
            "mpi",
        ]:
            assert words in text
        assert text.count("learning rate") == 1
