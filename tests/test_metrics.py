"""Metrics and losses over unequal shards equal one process over all the data."""

import inspect

import keras
import numpy as np
import pytest

from distkeras._errors import MismatchError
from distkeras._metrics import exact_metrics
from distkeras._metrics import taken_to_add_up

# Keras 3.15 itself calls np.array on a variable, which NumPy 2.4 warns of.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation"),
    pytest.mark.dealt,
]

SAMPLES = 101


def shards(size, samples=SAMPLES):
    """Unequal contiguous shards: rank r gets a share that grows with r."""
    edges = np.cumsum([0, *range(1, size + 1)]) * samples // sum(range(1, size + 1))
    return [slice(a, b) for a, b in zip(edges[:-1], edges[1:], strict=True)]


def binary(random):
    y = random.integers(0, 2, (SAMPLES, 1)).astype("float32")
    return y, np.clip(0.3 * y + random.random((SAMPLES, 1)) * 0.7, 0, 1)


def one_hot(random):
    y = np.eye(4)[random.integers(0, 4, SAMPLES)]
    logits = random.normal(size=(SAMPLES, 4)) + y
    return y, np.exp(logits) / np.exp(logits).sum(1, keepdims=True)


def sparse(random):
    y, p = one_hot(random)
    return y.argmax(1), p


def labels(random):
    return random.integers(0, 3, (SAMPLES, 1)), random.integers(0, 3, (SAMPLES, 1))


def positive(random):
    return random.random((SAMPLES, 3)) + 0.1, random.random((SAMPLES, 3)) + 0.1


def pairs(random):
    """Targets that differ within an example, for correlations."""
    y = random.normal(size=(SAMPLES, 5))
    return y, y + random.normal(size=(SAMPLES, 5))


def signs(random):
    y, p = binary(random)
    return 2 * y - 1, 2 * p - 1


# Every class of `keras.metrics`: its data and arguments.
CASES = {
    "AUC": (binary, {}),
    "Accuracy": (labels, {}),
    "BinaryAccuracy": (binary, {}),
    "BinaryCrossentropy": (binary, {}),
    "BinaryIoU": (binary, {"target_class_ids": [0, 1]}),
    "CategoricalAccuracy": (one_hot, {}),
    "CategoricalCrossentropy": (one_hot, {}),
    "CategoricalHinge": (one_hot, {}),
    "ConcordanceCorrelation": (pairs, {}),
    "CosineSimilarity": (pairs, {}),
    "F1Score": (one_hot, {"average": "macro"}),
    "FBetaScore": (one_hot, {"beta": 2.0}),
    "FalseNegatives": (binary, {}),
    "FalsePositives": (binary, {}),
    "Hinge": (signs, {}),
    "IoU": (labels, {"num_classes": 3, "target_class_ids": [0, 2]}),
    "KLDivergence": (one_hot, {}),
    "LogCoshError": (pairs, {}),
    "Mean": (positive, {}),
    "MeanAbsoluteError": (pairs, {}),
    "MeanAbsolutePercentageError": (positive, {}),
    "MeanIoU": (labels, {"num_classes": 3}),
    "MeanMetricWrapper": (pairs, {"fn": lambda t, p: keras.ops.abs(t - p) ** 3}),
    "MeanSquaredError": (pairs, {}),
    "MeanSquaredLogarithmicError": (positive, {}),
    "OneHotIoU": (one_hot, {"num_classes": 4, "target_class_ids": [1, 2]}),
    "OneHotMeanIoU": (one_hot, {"num_classes": 4}),
    "PearsonCorrelation": (pairs, {}),
    "Poisson": (positive, {}),
    "Precision": (binary, {"thresholds": [0.3, 0.5]}),
    "PrecisionAtRecall": (binary, {"recall": 0.6}),
    "R2Score": (pairs, {}),
    "Recall": (binary, {"thresholds": 0.4}),
    "RecallAtPrecision": (binary, {"precision": 0.6}),
    "RootMeanSquaredError": (pairs, {}),
    "SensitivityAtSpecificity": (binary, {"specificity": 0.6}),
    "SparseCategoricalAccuracy": (sparse, {}),
    "SparseCategoricalCrossentropy": (sparse, {}),
    "SparseTopKCategoricalAccuracy": (sparse, {"k": 2}),
    "SpecificityAtSensitivity": (binary, {"sensitivity": 0.6}),
    "SquaredHinge": (signs, {}),
    "Sum": (positive, {}),
    "TopKCategoricalAccuracy": (one_hot, {"k": 2}),
    "TrueNegatives": (binary, {}),
    "TruePositives": (binary, {}),
}


def identity(width, **options):
    """A model whose predictions are its inputs."""
    inputs = keras.Input((width,))
    model = keras.Model(inputs, keras.layers.Activation("linear")(inputs))
    model.compile("sgd", run_eagerly=True, **options)
    return model


class Values(keras.Model):
    """A model with metrics of its own, which `compile` does not see."""

    def test_step(self, data):
        x, y, weights = data
        self.m.update_state(x)
        self.w.update_state(x, sample_weight=weights)
        return super().test_step((x, y, weights))


def values_model(width, cls, **arguments):
    inputs = keras.Input((width,))
    model = Values(inputs, keras.layers.Activation("linear")(inputs))
    model.m, model.w = cls(name="m", **arguments), cls(name="w", **arguments)
    model.compile("sgd", "mse", run_eagerly=True)
    return model


def of_all_ranks(model, world, x, y, weights=None, **options):
    part = shards(world.size, len(x))[world.rank]
    weights = None if weights is None else weights[part]
    with exact_metrics(model, world):
        return model.evaluate(
            x[part],
            keras.tree.map_structure(lambda a: a[part], y),
            sample_weight=weights,
            verbose=0,
            return_dict=True,
            **options,
        )


def check(world, got, expected, rel=1e-6, absolute=1e-6):
    assert list(got) == list(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rel, absolute, err_msg=name)
    assert len({repr(r) for r in world.allgather_object(got)}) == 1


def test_every_metric_class_has_a_case():
    classes = {
        name
        for name, item in vars(keras.metrics).items()
        if inspect.isclass(item) and issubclass(item, keras.metrics.Metric)
    }
    assert classes - {"Metric"} == set(CASES)


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_metric(name, world):
    make, arguments = CASES[name]
    y, p = (a.astype("float32") for a in make(np.random.default_rng(7)))
    weights = np.random.default_rng(8).integers(1, 4, SAMPLES)
    if "IoU" not in name:  # they count
        weights = weights.astype("float32") / 3

    def model():
        cls = getattr(keras.metrics, name)
        if name in ("Mean", "Sum"):  # of values: `compile` does not take them
            return values_model(p.shape[1], cls, **arguments)
        metrics = {"metrics": [cls(name="m", **arguments)]}
        metrics["weighted_metrics"] = [cls(name="w", **arguments)]
        loss = "mse" if y.shape == p.shape else "sparse_categorical_crossentropy"
        return identity(p.shape[1], loss=loss, **metrics)

    expected = model().evaluate(
        p, y, sample_weight=weights, batch_size=40, verbose=0, return_dict=True
    )
    got = of_all_ranks(model(), world, p, y, weights, batch_size=16)
    check(world, got, expected)


def regression_model(**options):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((3,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    options = {"loss": "mse", "metrics": ["mae", keras.metrics.R2Score()]} | options
    model.compile(keras.optimizers.SGD(0.0), **options)
    return model


def regression_data(samples=SAMPLES):
    random = np.random.default_rng(5)
    x = random.normal(size=(samples, 3)).astype("float32")
    return x, x.sum(1, keepdims=True) + random.normal(size=(samples, 1)) * 0.1


def test_hook_of_keras_that_is_relied_on():
    asked = []
    model = regression_model(metrics=None)
    original = model._get_metrics_result_or_logs
    object.__setattr__(
        model,
        "_get_metrics_result_or_logs",
        lambda logs: asked.append(sorted(logs)) or original(logs),
    )
    x, y = regression_data(4)
    model.evaluate(x, y, batch_size=2, verbose=0)
    model.fit(x, y, epochs=2, validation_data=(x, y), verbose=0, batch_size=2)
    assert asked == [["loss"]] * 5


@pytest.mark.parametrize("jit", [False, True])
def test_fit_with_validation(world, jit):
    x, y = regression_data()
    xv, yv = regression_data(17)
    plain = regression_model(jit_compile=jit)
    options = {"epochs": 2, "verbose": 0, "shuffle": False, "batch_size": 8}
    expected = plain.fit(x, y, validation_data=(xv, yv), **options).history
    part, part_v = shards(world.size)[world.rank], shards(world.size, 17)[world.rank]
    model = regression_model(jit_compile=jit)
    with exact_metrics(model, world):
        history = model.fit(
            x[part], y[part], validation_data=(xv[part_v], yv[part_v]), **options
        ).history
    check(world, history, expected)
    assert "_get_metrics_result_or_logs" not in vars(model)


def test_nothing_is_retraced_and_nothing_stays(world):
    model = regression_model()
    x, y = regression_data(12)
    with exact_metrics(model, world):
        model.fit(x, y, batch_size=4, verbose=0)
        function = model.train_function
        model.fit(x, y, batch_size=4, verbose=0)
    assert model.train_function is function
    assert "call" not in vars(model._compile_loss)


@pytest.mark.parametrize("built", [False, True])
def test_a_rank_without_data(world, built):
    x, y = regression_data(10)
    expected = regression_model().evaluate(x, y, verbose=0, return_dict=True)
    model = regression_model()
    if built:
        model.evaluate(x, y, verbose=0)
    last = world.rank == world.size - 1

    def batches():
        if last or world.size == 1:
            yield x, y

    with exact_metrics(model, world):
        if last:
            got = model.evaluate(batches(), steps=1, verbose=0, return_dict=True)
        else:
            model.reset_metrics()
            got = keras_results(model)
    check(world, got, expected)


def keras_results(model, logs=()):
    """What Keras asks when its loop is over; without a batch there are no logs."""
    return model._get_metrics_result_or_logs(dict(logs))


def test_different_metrics_raise_on_all_ranks(world):
    x, y = regression_data(10)
    metrics = ["mae"] if world.rank == world.size - 1 else ["mae", "mape"]
    model = regression_model(metrics=metrics)
    with exact_metrics(model, world):
        if world.size == 1:
            model.evaluate(x, y, verbose=0)
            return
        with pytest.raises(MismatchError, match="state of the metrics"):
            model.evaluate(x, y, verbose=0)


def test_counts_above_what_float32_can_count(world):
    model = regression_model(metrics=None)
    with exact_metrics(model, world):
        big = 2.0**23 + 1
        model._loss_tracker.total.assign(big)
        model._loss_tracker.count.assign(big)
        assert float(keras_results(model, {"loss": 0.0})["loss"]) == 1.0
        total = float(np.float32(big * world.size))
        assert float(model._loss_tracker.count.numpy()) == total


class Extremes(keras.metrics.Metric):
    """A user's metric whose state does not add up."""

    distributed_reduction = {"largest": "max", "lowest": "min", "odds": "product"}

    def __init__(self, name="extremes", **kwargs):
        super().__init__(name=name, **kwargs)
        zeros = keras.initializers.Constant(-np.inf)
        self.largest = self.add_variable((), zeros, name="largest")
        self.least = self.add_variable(
            (), keras.initializers.Constant(np.inf), name="lowest"
        )
        self.odds = self.add_variable((), "ones", name="odds")
        self.seen = self.add_variable((), "zeros", dtype="int32", name="seen")

    def reset_state(self):
        self.largest.assign(-np.inf)
        self.least.assign(np.inf)
        self.odds.assign(1.0)
        self.seen.assign(0)

    def update_state(self, y_true, y_pred, sample_weight=None):
        ops = keras.ops
        self.largest.assign(ops.maximum(self.largest, ops.max(y_pred)))
        self.least.assign(ops.minimum(self.least, ops.min(y_pred)))
        self.odds.assign(self.odds * ops.prod(1 - 0.01 * ops.abs(y_pred)))
        self.seen.assign_add(ops.cast(ops.shape(y_pred)[0], "int32"))

    def result(self):
        return {
            "largest": keras.ops.convert_to_tensor(self.largest),
            "least": keras.ops.convert_to_tensor(self.least),
            "odds": keras.ops.convert_to_tensor(self.odds),
            "seen": keras.ops.convert_to_tensor(self.seen),
        }


@pytest.mark.parametrize("eager", [False, True])
def test_custom_metrics_declare_their_reduction(world, eager):
    x, y = regression_data()
    metrics = {"metrics": [Extremes()], "run_eagerly": eager}
    expected = regression_model(**metrics).evaluate(x, y, verbose=0, return_dict=True)
    metrics["metrics"] = [Extremes()]
    got = of_all_ranks(regression_model(**metrics), world, x, y, batch_size=9)
    check(world, got, expected, rel=1e-5)
    assert got["seen"] == SAMPLES


@pytest.mark.parametrize("spec", [{"largest": "most"}, {"biggest": "max"}])
def test_wrong_declarations_are_refused(world, spec):
    metric = Extremes()
    metric.distributed_reduction = spec
    model = regression_model(metrics=[metric])
    x, y = regression_data(5)
    if world.size == 1:
        return
    model.evaluate(x, y, verbose=0)
    with pytest.raises(ValueError, match="Expected"), exact_metrics(model, world):
        pass


class Guide(keras.Model):
    """A model whose step is that of Keras' guide."""

    def test_step(self, data):
        x, y = data
        predictions = self(x, training=False)
        loss = self.compute_loss(y=y, y_pred=predictions)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, predictions)
        return {metric.name: metric.result() for metric in self.metrics}


def test_metrics_of_a_step_as_in_the_guide(world):
    """No warning either: all of them are kept by metrics."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((3,))
    model = Guide(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse", metrics=["mae", "mape"])
    x, y = regression_data()
    expected = model.evaluate(x, y, verbose=0, return_dict=True)
    part = shards(world.size)[world.rank]
    with exact_metrics(model, world):
        got = model.evaluate(
            x[part], y[part], batch_size=4, verbose=0, return_dict=True
        )
    for name in ("mae", "mape"):
        assert got[name] == pytest.approx(float(expected[name]), rel=1e-6)


class Logging(keras.Model):
    """A model whose step logs what no metric keeps."""

    def test_step(self, data):
        logs = super().test_step(data)
        x, _ = data
        return {
            "loss": logs["loss"],
            "rows": keras.ops.cast(keras.ops.shape(x)[0], "float32"),
        }


def test_logs_of_a_custom_step(world, caplog):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((3,))
    model = Logging(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse", metrics=["mae"])
    x, y = regression_data()
    part = shards(world.size)[world.rank]
    expected = model.evaluate(x, y, verbose=0, return_dict=True)
    # Older Keras returns tensors.
    expected = {name: float(value) for name, value in expected.items()}
    own = len(x[part]) % 4 or 4

    def run():
        with exact_metrics(model, world):
            return model.evaluate(
                x[part], y[part], batch_size=4, verbose=0, return_dict=True
            )

    got = run()
    rows = world.allgather_object(own)
    assert got["rows"] == pytest.approx(sum(rows) / len(rows))
    assert got["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert set(got) == {"loss", "rows"}
    assert run() == got
    told = caplog.text.count("'rows' is logged by the step")  # once
    assert told == (world.rank == 0 and world.size > 1)
    assert len(set(map(str, world.allgather_object(got)))) == 1


class OwnLoss(keras.Model):
    """A model whose step logs a loss of its own, and nothing else."""

    def test_step(self, data):
        x, _ = data
        return {"loss": keras.ops.sum(keras.ops.zeros_like(x)) + self.value}


@pytest.mark.parametrize("value", [0.0, 1.5])
def test_loss_that_no_metric_keeps(world, value):
    inputs = keras.Input((3,))
    model = OwnLoss(inputs, keras.layers.Dense(1)(inputs))
    model.value = value
    model.compile("sgd")
    x, y = regression_data()
    if world.size == 1:  # Keras' own: it takes the tracker's, which saw nothing
        value = model.evaluate(x, y, verbose=0)
    assert of_all_ranks(model, world, x, y)["loss"] == value


def inexact(caplog):
    """What the log has named as not exact."""
    return [text for text in caplog.messages if "Not exact over ranks" in text]


def by_example(y_true, y_pred):
    return keras.ops.abs(y_true - y_pred)[:, 0]


def by_batch(y_true, y_pred):
    return keras.ops.sqrt(keras.ops.mean((y_true - y_pred) ** 2))


@pytest.mark.parametrize("eager", [False, True])
def test_functions_of_a_whole_batch_are_named(world, caplog, eager):
    x, y = regression_data()
    model = regression_model(metrics=[by_example, by_batch], run_eagerly=eager)
    expected = model.evaluate(x, y, batch_size=SAMPLES, verbose=0, return_dict=True)
    model = regression_model(metrics=[by_example, by_batch], run_eagerly=eager)
    model.evaluate(x[:4], y[:4], verbose=0)  # builds the metrics
    model.make_test_function(force=True)
    got = of_all_ranks(model, world, x, y, batch_size=9)
    assert got["by_example"] == pytest.approx(expected["by_example"], rel=1e-5)
    of_all_ranks(model, world, x, y, batch_size=9)  # and nothing is said twice
    told = caplog.text.count("'by_batch': its function returns one")
    assert told == (world.size > 1 and world.rank == 0)
    assert len(inexact(caplog)) == told


def test_metrics_whose_state_is_taken_to_add_up(world):
    class Own(keras.metrics.MeanSquaredError):
        pass

    metrics = [Own(name="mine"), Extremes(), "mae"]
    model = regression_model(metrics=metrics)
    x, y = regression_data(4)
    model.evaluate(x, y, verbose=0)
    assert taken_to_add_up(model.metrics) == ["mine (Own)"]


def two_outputs(**options):
    keras.utils.set_random_seed(4)
    inputs = keras.Input((3,))
    outputs = {
        "a": keras.layers.Dense(1, name="a", kernel_regularizer="l2")(inputs),
        "b": keras.layers.Dense(2, name="b")(inputs),
    }
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.0), **options)
    return model


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_several_outputs_losses_and_weights(world, eager, training):
    options = {
        "loss": {"a": "mse", "b": "mae"},
        "loss_weights": {"a": 0.3, "b": 2.0},
        "metrics": {"a": ["mae"], "b": ["mse"]},
        "run_eagerly": eager,
    }
    x, y = regression_data()
    y = {"a": y, "b": np.concatenate([y, -y], 1)}
    # One batch of all: the mean over examples, of which Keras' own value for
    # several uneven batches of several losses is but an approximation.
    expected = two_outputs(**options).evaluate(
        x, y, batch_size=SAMPLES, verbose=0, return_dict=True
    )
    model = two_outputs(**options)
    if training:
        part = shards(world.size)[world.rank]
        part_y = {name: value[part] for name, value in y.items()}
        with exact_metrics(model, world):
            history = model.fit(x[part], part_y, batch_size=8, verbose=0).history
        got = {name: values[0] for name, values in history.items()}
        expected = {name: expected[name] for name in got}
    else:
        got = of_all_ranks(model, world, x, y, batch_size=8)
    if world.size > 1:
        check(world, got, expected)
        plain = 0.3 * got["a_loss"] + 2.0 * got["b_loss"]
        penalty = float(keras.ops.convert_to_numpy(model.losses[0]))
        assert got["loss"] == pytest.approx(plain + penalty, rel=1e-6)


def sequence_model(loss, mask):
    keras.utils.set_random_seed(5)
    inputs = keras.Input((4, 3))
    hidden = keras.layers.Masking()(inputs) if mask else inputs
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile(keras.optimizers.SGD(0.0), loss, weighted_metrics=["mae"])
    return model


def sequences():
    random = np.random.default_rng(6)
    x = random.normal(size=(96, 4, 3)).astype("float32")
    x[random.integers(0, 4, (96, 1)) < np.arange(4)] = 0.0  # 1 to 4 steps each
    weights = random.random((96, 4)).astype("float32") + 0.1
    return x, x.sum(2, keepdims=True), weights


LOSSES = [
    # reduction, mask, weights, exact, part of the warning in the log
    ("sum_over_batch_size", False, True, True, None),
    ("mean", False, False, True, None),
    ("mean_with_sample_weight", False, False, True, None),
    ("mean_with_sample_weight", False, True, False, "sample weights"),
    ("sum", False, False, False, "adds up a batch"),
    ("sum_over_batch_size", True, False, False, "unmasked"),
]


@pytest.mark.parametrize(("reduction", "mask", "weighted", "exact", "warning"), LOSSES)
def test_losses_are_exact_or_named(
    world, caplog, reduction, mask, weighted, exact, warning
):
    x, y, weights = sequences()
    weights = weights if weighted else None

    def model():
        return sequence_model(keras.losses.MeanSquaredError(reduction), mask)

    def single(batch):
        return model().evaluate(
            x, y, batch, sample_weight=weights, verbose=0, return_dict=True
        )

    # Shards of whole batches of 4, so that one process can have the same batches.
    bounds = [24 * 4 * r // world.size // 4 * 4 for r in range(world.size + 1)]
    part = slice(bounds[world.rank], bounds[world.rank + 1])
    instance = model()

    def run():
        own = None if weights is None else weights[part]
        with exact_metrics(instance, world):
            return instance.evaluate(
                x[part], y[part], 4, sample_weight=own, verbose=0, return_dict=True
            )

    got = run()
    # What is not exact for the whole is what one process has for these batches.
    check(world, got, single(4))
    whole = single(96)
    if exact:
        check(world, got, whole)
    else:
        assert abs(got["loss"] - whole["loss"]) > 1e-4
    assert got["mae"] == pytest.approx(whole["mae"], rel=1e-6)
    run()  # and nothing is said twice
    told = inexact(caplog)
    assert len(told) == bool(warning and world.size > 1 and world.rank == 0)
    assert all(warning in text for text in told)


def test_bitwise_equal_at_every_call(world):
    x, y = regression_data()
    model = regression_model()
    results = [of_all_ranks(model, world, x, y, batch_size=7) for _ in range(3)]
    assert results[0] == results[1] == results[2]
    assert len(set(map(str, world.allgather_object(results)))) == 1
