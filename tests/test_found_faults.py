"""Faults that were found by trying to break training: each failed at two ranks once."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from equivalence import FEATURES
from equivalence import assert_equal_history
from equivalence import assert_equal_weights
from equivalence import build
from equivalence import samples
from equivalence import trainer
from newer_keras import multi_optimizer

from distkeras import _fitting
from distkeras.callbacks import Checkpoint
from distkeras.communicators import Communicator


def _sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1)


def _endless(x: np.ndarray, y: np.ndarray, batch: int) -> Iterator[Any]:
    while True:
        for start in range(0, len(x), batch):
            yield x[start : start + batch], y[start : start + batch]


def test_validation_by_an_endless_generator_every_epoch(world: Communicator) -> None:
    """The second validation reported `val_loss` 0.0.

    All batches are alike: how far Keras reads ahead between epochs varies.
    """
    x, y = samples(24)
    xv, yv = samples(4, seed=1)
    xv, yv = np.tile(xv, (world.size, 1)), np.tile(yv, world.size)
    single, model = build(_sgd), build(_sgd)
    options: dict[str, Any] = {"epochs": 3, "shuffle": False, "verbose": 0}
    expected = single.fit(
        x,
        y,
        batch_size=4 * world.size,
        validation_data=_endless(xv, yv, 4 * world.size),
        validation_steps=3,
        **options,
    )
    history = trainer(model).fit(
        x,
        y,
        batch_size=4,
        validation_data=_endless(xv, yv, 4),
        validation_steps=3,
        **options,
    )
    assert_equal_history(history, expected)


@pytest.mark.parametrize(
    ("own_step", "validates"), [(False, False), (True, False), (True, True)]
)
def test_generator_of_fewer_epochs(
    world: Communicator, own_step: bool, validates: bool
) -> None:
    """The epochs after its end logged a loss of 0.0, or that of the epoch before."""
    if world.size == 1:
        pytest.skip("at one rank the generator is Keras' affair")
    x, y = samples(8 * world.size)

    def batches() -> Iterator[Any]:
        return ((x[i : i + 4], y[i : i + 4]) for i in range(0, 8 * world.size, 4))

    run = trainer(build(_sgd, own_step=own_step))
    with pytest.raises(ValueError, match="`steps_per_epoch` with a generator"):
        run.fit(batches(), epochs=2, verbose=0)
    history = keras.callbacks.History()
    options: dict[str, Any] = {"steps_per_epoch": 2, "verbose": 0}
    if validates:
        options["validation_data"] = x, y
    with (
        pytest.warns(UserWarning, match="ran out of data"),
        pytest.raises(ValueError, match="Received: none, on any rank"),
    ):
        run.fit(batches(), epochs=3, callbacks=[history], **options)
    assert len(history.history["loss"]) == 1


def test_validation_by_a_generator_of_one_epoch(world: Communicator) -> None:
    """The second validation logged a `val_loss` of 0.0."""
    if world.size == 1:
        pytest.skip("at one rank the generator is Keras' affair")
    x, y = samples(8)
    run = trainer(build(_sgd))
    with (
        pytest.warns(UserWarning, match="ran out of data"),
        pytest.raises(ValueError, match="Received: none, on any rank"),
    ):
        run.fit(
            x,
            y,
            batch_size=4,
            epochs=2,
            verbose=0,
            validation_data=((x[:4], y[:4]) for _ in range(3)),
        )


class OwnLogs(keras.Model):
    """Returns a loss that no metric keeps, as many published `train_step`s do."""

    def train_step(self, data: Any) -> dict[str, Any]:
        import tensorflow as tf

        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(self(x, training=True) - y))
        variables = [v.value for v in self.trainable_variables]
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss, "size": keras.ops.shape(x)[0]}

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        loss = keras.ops.mean(keras.ops.square(self(x, training=False) - y))
        return {"loss": loss, "size": keras.ops.shape(x)[0]}


def test_loss_that_the_step_returns_and_no_metric_keeps(world: Communicator) -> None:
    """The loss was 0.0: the state of Keras' own tracker, which nothing had updated."""
    count = 4 * world.size
    x, _ = samples(count)
    y = np.ones((count, 1), "float32")
    keras.utils.set_random_seed(0)
    inputs = keras.Input((FEATURES,))
    model = OwnLogs(inputs, keras.layers.Dense(1)(inputs))
    model.compile(optimizer=_sgd(), loss="mse")
    before = float(np.mean((model(x).numpy() - y) ** 2))
    run = trainer(model)
    batch = 4 if world.size > 1 else count
    result = run.evaluate(x, y, batch_size=batch, verbose=0, return_dict=True)
    assert result["loss"] == pytest.approx(before, rel=1e-5)
    history = run.fit(x, y, batch_size=batch, shuffle=False, verbose=0)
    assert history.history["loss"] == pytest.approx([before], rel=1e-5)


@pytest.mark.filterwarnings("ignore:Not exact over ranks")
def test_own_logs_of_a_step_without_rows(world: Communicator) -> None:
    """They were averaged with those of the row of zeros that it ran on."""
    import tensorflow as tf

    size = world.size
    x, _ = samples(4 * (2 * size - 1) - 1)
    y = np.ones((len(x), 1), "float32")
    keras.utils.set_random_seed(0)
    inputs = keras.Input((FEATURES,))
    model = OwnLogs(inputs, keras.layers.Dense(1)(inputs))
    model.compile(optimizer=keras.optimizers.SGD(0.0), loss="mse")
    squares = (model(x).numpy() - y) ** 2
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    run = trainer(model)
    history = run.fit(data, shuffle=False, verbose=0).history
    # Of the last step of each rank, which is the last one of all.
    last = 4 * size if size > 1 else 0
    assert history["loss"] == pytest.approx([np.mean(squares[last:])], rel=1e-5)
    options: dict[str, Any] = {"verbose": 0, "return_dict": True}
    # Of the last batch that each rank has.
    result = run.evaluate(data, **options)
    assert result["loss"] == pytest.approx(np.mean(squares[4 * size - 4 :]), rel=1e-5)
    result = run.evaluate(data.take(1), **options)
    assert result["loss"] == pytest.approx(np.mean(squares[:4]), rel=1e-5)


def _members(*rhythms: int | None) -> keras.optimizers.Optimizer:
    first, second = (
        keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=steps)
        for steps in rhythms
    )
    return multi_optimizer(first, {".*bias": second})


ACCUMULATING = {
    "adam": lambda: keras.optimizers.Adam(0.003, gradient_accumulation_steps=3),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1, gradient_accumulation_steps=3), initial_scale=8.0
    ),
    "members": lambda: _members(3, 3),
    "own rhythms": lambda: _members(3, None),
}


class Stop(keras.callbacks.Callback):
    """Ends `fit` by an error, or not."""

    def __init__(self, error: bool) -> None:
        super().__init__()
        self._error = error

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._error:
            raise InterruptedError


@pytest.mark.dealt
@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("adam", False),
        pytest.param("adam", True, marks=pytest.mark.soak),
        pytest.param("scaled", False, marks=pytest.mark.soak),
        pytest.param("members", False, marks=pytest.mark.soak),
        ("own rhythms", False),
    ],
)
def test_gradients_that_a_fit_leaves_to_the_next(
    world: Communicator, tmp_path_shared: Path, kind: str, error: bool
) -> None:
    """Rank 0's, added up for the next update, took the place of the others'."""
    x, y = samples(4 * world.size * 5)
    options: dict[str, Any] = {"shuffle": False, "verbose": 0}
    single, model = build(ACCUMULATING[kind]), build(ACCUMULATING[kind])
    run = trainer(model)
    single.fit(x, y, batch_size=4 * world.size, **options)
    with contextlib.suppress(InterruptedError):
        run.fit(x, y, batch_size=4, callbacks=[Stop(error)], **options)
    path = tmp_path_shared / "model.keras"
    run.save(path)
    held = [v.numpy() for v in single.optimizer.variables if "accumulator" in v.path]
    loaded = keras.models.load_model(path)
    again = [v for v in loaded.optimizer.variables if "accumulator" in v.path]
    for a, b in zip(again, held, strict=True):
        np.testing.assert_allclose(a.numpy(), b, rtol=1e-5, atol=1e-6)
    single.fit(x, y, batch_size=4 * world.size, **options)
    for each in (model, loaded):
        trainer(each).fit(x, y, batch_size=4, **options)
        assert_equal_weights(each, single)


@pytest.mark.dealt
def test_validation_after_a_fit_that_failed(world: Communicator) -> None:
    """Keras would go on with the data of the earlier call."""
    x, y = samples(8 * world.size)
    xv, yv = samples(13, seed=1)
    model = build(_sgd)
    run = trainer(model)
    options: dict[str, Any] = {"batch_size": 4, "shuffle": False, "verbose": 0}
    with pytest.raises(InterruptedError):
        run.fit(x, y, validation_data=(x, y), callbacks=[Stop(True)], **options)
    model._initial_epoch = 1  # as of `BackupAndRestore`
    history = run.fit(x, y, validation_data=(xv, yv), **options)
    expected = run.evaluate(xv, yv, batch_size=4, verbose=0)
    values = [history.history["val_loss"], history.history["val_accuracy"]]
    np.testing.assert_allclose(np.ravel(values), expected, rtol=1e-5)


class Tenth(keras.optimizers.SGD):
    """A user's optimizer that changes gradients where Keras' step hands them over."""

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        pairs = [(0.1 * g, v) for g, v in grads_and_vars]
        return super().apply_gradients(pairs)


def test_optimizer_that_overrides_apply_gradients(world: Communicator) -> None:
    """It was not called, and nothing said so."""
    x, y = samples(24)
    options: dict[str, Any] = {"epochs": 2, "shuffle": False, "verbose": 0}
    single, model = build(lambda: Tenth(0.5)), build(lambda: Tenth(0.5))
    single.fit(x, y, batch_size=4 * world.size, **options)
    trainer(model).fit(x, y, batch_size=4, **options)
    assert_equal_weights(model, single)


@pytest.mark.dealt
@pytest.mark.parametrize("loss", [None, "mse"])
def test_compiled_again_with_the_same_optimizer(
    world: Communicator, loss: str | None
) -> None:
    """Without a loss by name the log was that of a tracker which nothing updated."""
    x, _ = samples(8 * world.size)
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((FEATURES,)), keras.layers.Dense(2, activity_regularizer="l2")]
    )
    optimizer = keras.optimizers.SGD(0.0)
    model.compile(optimizer, loss)
    run = trainer(model)
    options: dict[str, Any] = {"shuffle": False, "verbose": 0}
    first = run.fit(x, x[:, :2], batch_size=8, **options)
    run.compile(optimizer, loss)
    again = run.fit(x, x[:, :2], batch_size=8, **options)
    assert first.history["loss"][0] > 0
    assert again.history == first.history


def _adding(layer: keras.layers.Layer) -> keras.Model:
    """Returns a model with a layer that has a loss of its own."""
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense(2, kernel_regularizer="l2")
    return keras.Sequential([keras.Input((FEATURES,)), dense, layer])


class Penalty(keras.layers.Layer):
    """Adds a loss that is a sum over the batch, or a mean."""

    def __init__(self, mean: bool) -> None:
        super().__init__()
        self.mean = mean

    def call(self, x: Any) -> Any:
        squares = keras.ops.sum(x * x, axis=-1)
        ops = keras.ops
        self.add_loss(0.1 * (ops.mean(squares) if self.mean else ops.sum(squares)))
        return x


@pytest.mark.parametrize("kind", ["mean", "sum", "regularizer"])
def test_losses_that_layers_add(
    world: Communicator, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """A sum over the batch trained towards something else, without a word."""

    def make() -> keras.Model:
        if kind == "regularizer":
            return _adding(keras.layers.Dense(2, activity_regularizer="l2"))
        return _adding(Penalty(kind == "mean"))

    x, _ = samples(13 * world.size)
    single, model = make(), make()
    for each in (single, model):
        each.compile(keras.optimizers.SGD(0.1), "mse")
    options: dict[str, Any] = {"shuffle": False, "verbose": 0}
    expected = single.fit(x, x[:, :2], batch_size=8 * world.size, **options)
    run = trainer(model)
    history = run.fit(x, x[:, :2], batch_size=8, **options)
    if kind != "sum":
        assert_equal_weights(model, single)
        assert_equal_history(history, expected)
    run.fit(x, x[:, :2], batch_size=8, **options)
    told = [text for text in caplog.messages if "`add_loss`" in text]
    assert len(told) == (kind != "regularizer" and world.size > 1 > world.rank)
    assert all(f"layer '{model.layers[1].name}'" in text for text in told)


class TestStep(keras.Model):
    """Counts how often its test step is traced."""

    __test__ = False
    traced = 0

    def test_step(self, data: Any) -> Any:
        self.traced += 1
        return super().test_step(data)


def test_evaluating_again_traces_nothing(world: Communicator) -> None:
    """Every call made a function anew, for seconds where models are large."""
    x, _ = samples(8 * world.size)
    inputs = keras.Input((FEATURES,))
    model = TestStep(inputs, keras.layers.Dense(2)(inputs))
    model.compile("sgd", "mse")
    run = trainer(model)
    run.evaluate(x, x[:, :2], batch_size=4, verbose=0)
    traced = model.traced
    for _ in range(2):
        run.evaluate(x, x[:, :2], batch_size=4, verbose=0)
    assert traced > 0 and model.traced == traced


class Count(keras.metrics.Metric):
    """How many examples were seen."""

    def __init__(self, name: str = "count", **options: Any) -> None:
        super().__init__(name=name, **options)
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(keras.ops.cast(keras.ops.shape(y_pred)[0], "float32"))

    def result(self) -> Any:
        return self.total


class Evaluates(keras.callbacks.Callback):
    """A user's callback that evaluates by the model itself."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        super().__init__()
        self._data = x, y
        self.results: dict[str, Any] = {}

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.results = self.model.evaluate(*self._data, verbose=0, return_dict=True)


def test_callback_that_evaluates_the_model_itself(world: Communicator) -> None:
    """The results were those of the data counted once for every rank."""
    x, y = samples(24)
    callback = Evaluates(x, y)
    model = build(_sgd, metrics=[Count()])
    trainer(model).fit(x, y, batch_size=4, verbose=0, callbacks=[callback])
    assert callback.results["count"] == 24


@pytest.mark.dealt
def test_predict_before_fit_of_a_model_with_metrics(world: Communicator) -> None:
    """Metrics were to be built of targets that there are none of."""
    x, y = samples(6 * world.size)
    model, single = build(_sgd), build(_sgd)
    run = trainer(model)
    result = run.predict(x, batch_size=4, verbose=0)
    expected = single.predict(x, verbose=0)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
    options: dict[str, Any] = {"shuffle": False, "verbose": 0}
    history = run.fit(x, y, batch_size=4, **options)
    expected = single.fit(x, y, batch_size=4 * world.size, **options)
    assert_equal_history(history, expected)


@pytest.mark.parametrize("same", [True, False], ids=["same", "another"])
def test_predict_and_evaluate_before_fit(world: Communicator, same: bool) -> None:
    """Results of models that differ by rank were mixed, and nothing said so."""
    x, _ = samples(6 * world.size)
    keras.utils.set_random_seed(0 if same else world.rank)
    inputs = keras.Input((FEATURES,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    expected = world.broadcast_object(model.predict(x, verbose=0))
    try:
        result = trainer(model).predict(x, batch_size=4, verbose=0)
    except ValueError:  # a clear error on all ranks would do, too
        assert not same
    else:
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("predicts", [False, True])
def test_a_callback_asks_the_trainer(world: Communicator, predicts: bool) -> None:
    """`fit` failed for want of a method that the inner call had taken away."""
    x, y = samples(26)
    xv, yv = samples(11, seed=1)
    single, model = build(_sgd), build(_sgd)
    made = trainer(model)

    class Ask(keras.callbacks.Callback):
        def __init__(self, asked: Any) -> None:
            super().__init__()
            self.asked, self.answers = asked, []

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if predicts:
                self.answers.append(self.asked.predict(xv, batch_size=4, verbose=0))
            else:
                self.answers.append(self.asked.evaluate(xv, yv, verbose=0))

    asks = Ask(single), Ask(made)
    options: dict[str, Any] = {"epochs": 3, "shuffle": False, "verbose": 0}
    options["validation_data"] = xv, yv
    expected = single.fit(
        x, y, batch_size=4 * world.size, callbacks=[asks[0]], **options
    )
    history = made.fit(x, y, batch_size=4, callbacks=[asks[1]], **options)
    assert_equal_history(history, expected)
    np.testing.assert_allclose(asks[1].answers, asks[0].answers, rtol=1e-5, atol=1e-6)
    assert "evaluate" not in vars(model)


def _dropping(dropout: bool) -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.BatchNormalization(), keras.layers.Dense(3)]
    layers += [keras.layers.Dropout(0.5)] * dropout
    model = keras.Sequential([keras.Input((FEATURES,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(_sgd(), loss)
    return model


@pytest.mark.parametrize("dropout", [False, True])
def test_asking_in_the_middle_of_an_epoch_changes_nothing(
    world: Communicator, dropout: bool
) -> None:
    """Moving statistics became rank 0's, and masks began anew."""
    x, y = samples(16 * world.size)
    left, answers = [], []
    for asks in (False, True):
        model = _dropping(dropout)
        run = trainer(model, seed=2)

        def ask(batch: int, logs: Any, run: Any = run) -> None:
            answers.append(run.evaluate(x, y, batch_size=4, verbose=0))
            run.predict(x, batch_size=4, verbose=0)

        ask_often = keras.callbacks.LambdaCallback(on_train_batch_end=ask)
        callbacks = [ask_often] if asks else []
        run.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=callbacks)
        left.append([variable.numpy().tobytes() for variable in model.variables])
    assert left[0] == left[1]
    assert world.allgather_object(answers) == [answers] * world.size


def test_asking_after_dropout_sends_no_weights(world: Communicator) -> None:
    """The states of random numbers differ by rank, and all was sent for them."""
    x, y = samples(8 * world.size)
    model = _dropping(True)
    run = trainer(model)
    run.fit(x, y, batch_size=4, verbose=0)
    before = [variable.numpy().tolist() for variable in model.variables]
    run.evaluate(x, y, verbose=0)
    run.predict(x, verbose=0)
    assert [variable.numpy().tolist() for variable in model.variables] == before


def test_fit_draws_nothing_of_a_seeded_script(world: Communicator) -> None:
    """Initial weights made afterwards were others than those of one process."""
    x, y = samples(8 * world.size)
    random.seed(3)
    made = trainer(build(_sgd))
    before = random.getstate()
    made.fit(x, y, batch_size=4, verbose=0)
    assert random.getstate() == before


def test_orders_change_from_one_fit_to_the_next(world: Communicator) -> None:
    """Though `random` stands still; and a cell of a notebook run again repeats them."""

    def seeds() -> list[int]:
        random.seed(5)
        made = trainer(build(_sgd))
        found = [_fitting._drawn(None, made._session) for _ in range(3)]
        assert _fitting._drawn(7, made._session) == 7
        return found

    first = seeds()
    assert len(set(first)) == 3
    assert seeds() == first
    assert world.allgather_object(first) == [first] * world.size


def test_trainable_takes_effect_by_compile(
    world: Communicator, caplog: pytest.LogCaptureFixture
) -> None:
    """One process goes on as compiled, in silence."""
    x, y = samples(8 * world.size)
    model = build(_sgd)
    made = trainer(model)
    last = model.layers[-1]
    options: dict[str, Any] = {"batch_size": 4, "verbose": 0}
    made.fit(x, y, **options)
    last.trainable = False
    with caplog.at_level("WARNING", "distkeras"):
        made.fit(x, y, **options)
    named = "2 weights are trained no longer" in caplog.text
    assert named == (world.size > 1 and world.rank == 0)
    frozen = [v.numpy() for v in last.variables]
    made.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    made.fit(x, y, **options)
    for variable, value in zip(last.variables, frozen, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    last.trainable = True
    if world.size > 1:
        with pytest.raises(ValueError, match=r"Received: 2 more\..*call it again"):
            made.fit(x, y, **options)


@pytest.mark.parametrize("alike", [True, False])
def test_generators_of_other_orders_are_named(
    world: Communicator, caplog: pytest.LogCaptureFixture, alike: bool
) -> None:
    """Samples were lost and repeated without a word."""
    if world.size == 1:
        pytest.skip("at one rank the generator is Keras' affair")
    x, y = samples(16 * world.size)
    order = np.random.default_rng(0 if alike else world.rank).permutation(len(x))
    model = build(_sgd)
    with caplog.at_level("WARNING", "distkeras"):
        trainer(model).fit(
            _endless(x[order], y[order], 4), steps_per_epoch=2, epochs=2, verbose=0
        )
    named = "first batches of the generator are not the same" in caplog.text
    assert named == (not alike and world.rank == 0)


def _ones() -> keras.layers.Layer:
    return keras.layers.Dense(1, kernel_initializer="ones")


class LooksAtValues(keras.Model):
    """Cannot be built from shapes: its first call is with numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = _ones()

    def call(self, x: Any) -> Any:
        if not self.dense.built:
            assert np.isfinite(x.numpy()).all()
        return self.dense(x)


@pytest.mark.parametrize("kind", ["sparse", "values"])
def test_generator_of_which_a_model_is_built(
    world: Communicator, tmp_path_shared: Path, kind: str
) -> None:
    """The batches that it was built from were seen by no step, and not predicted."""
    x, _ = samples(8 * world.size)
    y = x[:, :1]
    single = keras.Sequential([keras.Input((FEATURES,)), _ones()])
    if kind == "sparse":
        convert = pytest.importorskip("scipy.sparse").csr_matrix
        model = keras.Sequential([keras.Input((FEATURES,), sparse=True), _ones()])
    else:
        convert = np.asarray
        model = LooksAtValues()
    for each in (single, model):
        each.compile(keras.optimizers.SGD(0.1), "mse")

    def batches() -> Iterator[Any]:
        starts = range(0, len(x), 2)
        return ((convert(x[i : i + 2]), y[i : i + 2]) for i in starts)

    # With a checkpoint one rank does not leave all to Keras.
    options: dict[str, Any] = {"callbacks": [Checkpoint(tmp_path_shared)], "verbose": 0}
    run = trainer(model)
    run.fit(batches(), steps_per_epoch=2, epochs=2, shuffle=False, **options)
    single.fit(x, y, batch_size=2 * world.size, shuffle=False, verbose=0)
    assert_equal_weights(model, single)
    result = run.predict(((a,) for a, _ in batches()), steps=4, verbose=0)
    np.testing.assert_allclose(result, single.predict(x, verbose=0), rtol=1e-5)
