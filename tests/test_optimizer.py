"""`DistributedOptimizer`: exact in a loop of one's own, invisible in files."""

from __future__ import annotations

import copy
import inspect
import json
import textwrap
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from newer_keras import multi_optimizer

import distkeras
from distkeras import MismatchError
from distkeras._optimizer import is_distributed
from distkeras._optimizer import undistributed
from distkeras.backends import inner_optimizers
from distkeras.backends import updates
from distkeras.communicators import Communicator

pytestmark = pytest.mark.dealt

Optimizer = keras.optimizers.Optimizer

KINDS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.2),
    "global_clipnorm": lambda: keras.optimizers.Adam(0.1, global_clipnorm=0.2),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=0.1),
    "adamw": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1),
    "ema": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=3),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)
    ),
    "accumulation": lambda: keras.optimizers.Adam(
        0.1, gradient_accumulation_steps=2, global_clipnorm=0.2
    ),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.2)
    ),
    "loss_scale_accumulation": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    ),
    "loss_scale_factor": lambda: keras.optimizers.SGD(
        0.1, loss_scale_factor=8.0, gradient_accumulation_steps=2
    ),
    "multi": lambda: multi_optimizer(
        keras.optimizers.Adam(0.1), {".*bias": keras.optimizers.SGD(0.1)}
    ),
    "multi_accumulation": lambda: multi_optimizer(
        keras.optimizers.Adam(0.1, gradient_accumulation_steps=2),
        {".*bias": keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)},
    ),
    "multi_mixed_accumulation": lambda: multi_optimizer(
        keras.optimizers.Adam(0.1, gradient_accumulation_steps=2),
        {".*bias": keras.optimizers.SGD(0.1)},
    ),
}


def batches(parts: int, steps: int = 6) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Returns, for each step, one batch for each of `parts` ranks."""
    generator = np.random.default_rng(0)
    return [
        [
            (
                generator.normal(size=(4, 3)).astype("float32"),
                generator.normal(size=(4, 2)).astype("float32"),
            )
            for _ in range(parts)
        ]
        for _ in range(steps)
    ]


def dense() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    return model


def train(model: keras.Model, optimizer: Optimizer, data: list, graph: bool) -> None:
    optimizer.build(model.trainable_variables)

    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            loss = optimizer.scale_loss(loss)
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )

    run = tf.function(step, autograph=False) if graph else step
    for x, y in data:
        run(tf.constant(x), tf.constant(y))


def assert_close(left: keras.Model, right: keras.Model, tolerance: float) -> None:
    for a, b in zip(left.trainable_variables, right.trainable_variables, strict=True):
        a, b = a.numpy(), b.numpy()
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max(), a


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("kind", KINDS)
def test_loop_equals_one_process(world: Communicator, kind: str, graph: bool) -> None:
    data = batches(world.size)
    single = dense()
    whole = [tuple(map(np.concatenate, zip(*step, strict=True))) for step in data]
    train(single, KINDS[kind](), whole, graph)
    model = dense()
    optimizer = distkeras.DistributedOptimizer(KINDS[kind]())
    train(model, optimizer, [step[world.rank] for step in data], graph)
    assert_close(model, single, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_one_exchange_for_each_update(world: Communicator, kind: str) -> None:
    optimizer = distkeras.DistributedOptimizer(KINDS[kind]())
    train(dense(), optimizer, [s[world.rank] for s in batches(world.size)], True)
    if world.size == 1:
        assert not is_distributed(optimizer)
        return
    counters = optimizer._distkeras_exchange.exchange.counters
    accumulates = kind in (
        "accumulation",
        "loss_scale_accumulation",
        "loss_scale_factor",
        "multi_accumulation",
    )
    assert updates(optimizer) == (3 if accumulates else 6)
    assert counters.exchanges == updates(optimizer)
    assert counters.collectives == counters.exchanges


@pytest.mark.parametrize("kind", KINDS)
def test_file_is_an_ordinary_one(
    world: Communicator, tmp_path: Path, kind: str
) -> None:
    stock = KINDS[kind]()
    optimizer = distkeras.DistributedOptimizer(KINDS[kind]())
    assert isinstance(optimizer, type(stock))
    model = dense()
    model.compile(optimizer, loss="mse")
    train(model, optimizer, [step[world.rank] for step in batches(world.size)], True)
    path = tmp_path / f"model{world.rank}.keras"
    model.save(path)
    with zipfile.ZipFile(path) as archive:
        config = json.loads(archive.read("config.json"))
    assert "distkeras" not in json.dumps(config)
    loaded = keras.models.load_model(path)
    assert type(loaded.optimizer) is type(stock)
    assert int(loaded.optimizer.iterations) == int(optimizer.iterations)
    for a, b in zip(loaded.optimizer.variables, optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


@keras.saving.register_keras_serializable("tests")
class Registered(keras.optimizers.SGD):
    """An optimizer of the user's own, registered."""


class Unregistered(keras.optimizers.SGD):
    """An optimizer of the user's own, to be named when a file is loaded."""


@pytest.mark.parametrize("kind", [Registered, Unregistered])
def test_own_optimizer_keeps_its_name_in_files(
    world: Communicator, tmp_path: Path, kind: type
) -> None:
    optimizer = distkeras.DistributedOptimizer(kind(0.5))
    model = dense()
    model.compile(optimizer, loss="mse")
    path = tmp_path / f"model{world.rank}.keras"
    model.save(path)
    objects = {} if kind is Registered else {"Unregistered": Unregistered}
    loaded = keras.models.load_model(path, custom_objects=objects)
    assert type(loaded.optimizer) is kind


def test_from_config_and_copy(world: Communicator) -> None:
    optimizer = distkeras.DistributedOptimizer(keras.optimizers.RMSprop(0.3))
    config = optimizer.get_config()
    stock = keras.optimizers.RMSprop(0.3, name=config["name"])
    assert config == stock.get_config()
    again = type(optimizer).from_config(config)
    assert again.get_config() == config
    assert type(again) is type(type(optimizer)(0.3)) is keras.optimizers.RMSprop
    assert not is_distributed(again)
    restored = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(restored) is keras.optimizers.RMSprop
    duplicate = copy.deepcopy(optimizer)
    assert type(duplicate) is type(optimizer)


def test_wrapping_twice_or_undoing_it(world: Communicator) -> None:
    optimizer = keras.optimizers.SGD(0.1)
    assert distkeras.DistributedOptimizer(optimizer) is optimizer
    assert distkeras.DistributedOptimizer(optimizer) is optimizer
    assert is_distributed(optimizer) == (world.size > 1)
    with undistributed([optimizer, keras.optimizers.SGD()]):
        assert type(optimizer) is type(keras.optimizers.SGD())
        assert not is_distributed(optimizer)
    assert is_distributed(optimizer) == (world.size > 1)


def test_loop_after_a_trainer(world: Communicator) -> None:
    """It trained each rank by itself, and nothing said so."""
    steps = batches(world.size)
    whole = [tuple(map(np.concatenate, zip(*step, strict=True))) for step in steps]
    x, y = map(np.concatenate, zip(*whole, strict=True))
    single, model = dense(), dense()
    single.compile(KINDS["sgd"](), "mse")
    model.compile(distkeras.DistributedOptimizer(KINDS["sgd"]()), "mse")
    options: dict[str, Any] = {"shuffle": False, "verbose": 0}
    single.fit(x, y, batch_size=4 * world.size, **options)
    run = distkeras.Trainer(model, learning_rate_scaling=None)
    run.fit(x, y, batch_size=4, **options)
    train(single, single.optimizer, whole, True)
    train(model, model.optimizer, [step[world.rank] for step in steps], True)
    run.fit(x, y, batch_size=4, **options)
    single.fit(x, y, batch_size=4 * world.size, **options)
    assert_close(model, single, 1e-5)


def test_options_that_come_too_late_are_refused(world: Communicator) -> None:
    optimizer = distkeras.DistributedOptimizer(keras.optimizers.SGD(0.1))
    for options in ({"compression": "float16"}, {"bucket_bytes": 5}):
        if world.size == 1:  # nothing has been done
            assert distkeras.DistributedOptimizer(optimizer, **options) is optimizer
            continue
        ((name, value),) = options.items()
        with pytest.raises(ValueError, match=f"already.*Received: {name}={value!r}"):
            distkeras.DistributedOptimizer(optimizer, **options)


def test_wrong_argument(world: Communicator) -> None:
    with pytest.raises(TypeError, match="Expected a Keras optimizer.*'sgd'"):
        distkeras.DistributedOptimizer("sgd")


def test_infinity_on_one_rank_skips_the_step_on_all(world: Communicator) -> None:
    optimizer = distkeras.DistributedOptimizer(KINDS["loss_scale"]())
    model = dense()
    data = [step[world.rank] for step in batches(world.size, steps=4)]
    if world.rank == world.size - 1:
        data[2] = (np.full_like(data[2][0], np.inf), data[2][1])
    train(model, optimizer, data, True)
    assert int(optimizer.iterations) == 3
    assert float(optimizer.dynamic_scale) == 2.0**14
    weights = world.allgather_object([v.numpy() for v in model.trainable_variables])
    for other in weights:
        for a, b in zip(other, weights[0], strict=True):
            np.testing.assert_array_equal(a, b)
            assert np.isfinite(a).all()


@pytest.fixture
def mixed_float16() -> Iterator[None]:
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


def compile_and_fit(
    world: Communicator, optimizer: Optimizer, **options: Any
) -> keras.Model:
    """Three batches, of which the second is infinite on the last rank."""
    model = dense()
    model.compile(optimizer, "mse", **options)
    data = [step[world.rank] for step in batches(world.size, steps=3)]
    if world.rank == world.size - 1:
        data[1] = (np.full_like(data[1][0], np.inf), data[1][1])
    x, y = map(np.concatenate, zip(*data, strict=True))
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    return model


def test_loss_scaling_outside_of_the_exchange_is_refused(
    world: Communicator, mixed_float16: None
) -> None:
    """As `compile` wraps it: a rank with infinite gradients would not exchange."""
    plain = distkeras.DistributedOptimizer(keras.optimizers.SGD(0.1))
    if world.size > 1:
        with pytest.raises(ValueError, match=r"DistributedOptimizer\(.*LossScale.*SGD"):
            compile_and_fit(world, plain)
    scaled = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=8.0
    )
    model = compile_and_fit(world, distkeras.DistributedOptimizer(scaled))
    assert model.optimizer is scaled
    assert int(scaled.iterations) == 2
    everyone = world.allgather_object(model.get_weights())
    np.testing.assert_array_equal(everyone[0][0], everyone[-1][0])


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_loss_scaling_around_parts_that_exchange_is_refused(
    world: Communicator, graph: bool
) -> None:
    multi = KINDS["multi"]()
    for part in multi.optimizers:
        distkeras.DistributedOptimizer(part)
    optimizer = keras.optimizers.LossScaleOptimizer(multi)
    data = [step[world.rank] for step in batches(world.size)]
    if world.size == 1:
        train(dense(), optimizer, data, graph)
        return
    with pytest.raises(ValueError, match="Expected the outermost optimizer"):
        train(dense(), optimizer, data, graph)


def test_the_trainer_takes_an_optimizer_that_loss_scaling_is_around(
    world: Communicator, mixed_float16: None
) -> None:
    model = dense()
    model.compile(distkeras.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    x, y = map(np.concatenate, zip(*batches(world.size)[0], strict=True))
    distkeras.Trainer(model).fit(x, y, batch_size=4, verbose=0)
    assert int(model.optimizer.iterations) == 1


@pytest.mark.parametrize("by", ["compile", "function"])
def test_xla_around_the_exchange_is_refused(world: Communicator, by: str) -> None:
    """On a GPU `compile` chooses it by itself, as Horovod's users do not expect."""
    optimizer = distkeras.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model = dense()
    x, y = batches(world.size)[0][world.rank]

    def fit() -> None:
        if by == "compile":
            model.compile(optimizer, "mse", jit_compile=True)
            model.fit(x, y, verbose=0)
            return

        @tf.function(jit_compile=True, autograph=False)
        def step(x: tf.Tensor) -> None:
            optimizer.apply(
                [tf.reduce_sum(x) * v for v in model.trainable_variables],
                model.trainable_variables,
            )

        step(tf.constant(x))

    if world.size == 1:
        fit()
        return
    with pytest.raises(ValueError, match="`jit_compile=False`.*distkeras.Trainer"):
        fit()


def unequal(world: Communicator) -> keras.Model:
    """Returns a model whose weights differ by rank, as those of an unseeded one."""
    keras.utils.set_random_seed(world.rank)
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_ranks_that_begin_with_other_weights_are_told_to_broadcast(
    world: Communicator, graph: bool
) -> None:
    optimizer = distkeras.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model = unequal(world)
    data = [step[world.rank] for step in batches(world.size)]
    if world.size > 1:
        with pytest.raises(MismatchError, match="broadcast_variables") as error:
            train(model, optimizer, data, graph)
        assert "dense" in str(error.value)
        assert len(set(world.allgather_object(str(error.value)))) == 1
    distkeras.callbacks.broadcast_variables([*model.variables, *optimizer.variables])
    train(model, optimizer, data, graph)
    everyone = world.allgather_object(model.get_weights())
    np.testing.assert_array_equal(everyone[0][0], everyone[-1][0])


def test_a_root_that_is_none_is_an_error_on_every_rank(world: Communicator) -> None:
    """Ranks that named different ones were each a sender, and nobody noticed."""
    variables = unequal(world).variables
    if world.size > 1:
        with pytest.raises(MismatchError, match="root=0\n.*root=1"):
            distkeras.callbacks.broadcast_variables(variables, root=min(world.rank, 1))
    for some in (variables, []):
        with pytest.raises(ValueError, match="root to be a rank"):
            distkeras.callbacks.broadcast_variables(some, root=world.size)


def test_weights_are_compared_in_the_first_step_alone(world: Communicator) -> None:
    """A loop may change them later; ranks trace again at different times."""
    optimizer = distkeras.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model = dense()
    data = [step[world.rank] for step in batches(world.size)]
    train(model, optimizer, data, True)
    model.set_weights([w + world.rank for w in model.get_weights()])
    again = 1 + world.rank
    for _ in range(again):
        train(model, optimizer, data[: 6 // again], True)


@pytest.mark.parametrize("where", ["README", "docstring"])
def test_printed_loop_keeps_unseeded_ranks_equal(
    world: Communicator, where: str
) -> None:
    if where == "README":
        page = (Path(__file__).parent.parent / "README.md").read_text()
        text = page.partition("## Loops of your own")[2]
    else:
        text = inspect.cleandoc(distkeras.DistributedOptimizer.__doc__)
    code = textwrap.dedent(text.partition("```python\n")[2].partition("```")[0])
    model = unequal(world)
    names = {
        "distkeras": distkeras,
        "keras": keras,
        "tf": tf,
        "model": model,
        "loss_fn": keras.losses.MeanSquaredError(),
        "batches": [step[world.rank] for step in batches(world.size)],
    }
    exec(code, names)
    assert int(names["optimizer"].iterations) == 6
    everyone = world.allgather_object(model.get_weights())
    np.testing.assert_array_equal(everyone[0][0], everyone[-1][0])


def test_infinity_while_accumulating_skips_on_all(world: Communicator) -> None:
    """Four micro-steps, the third infinite on one rank: the next update is finite."""
    optimizer = distkeras.DistributedOptimizer(KINDS["loss_scale_accumulation"]())
    model = dense()
    data = [step[world.rank] for step in batches(world.size, steps=5)]
    if world.rank == 0:
        data[2] = (np.full_like(data[2][0], np.inf), data[2][1])
    train(model, optimizer, data, True)
    assert updates(optimizer) == 2
    weights = world.allgather_object([v.numpy() for v in model.trainable_variables])
    for other in weights:
        for a, b in zip(other, weights[0], strict=True):
            np.testing.assert_array_equal(a, b)
            assert np.isfinite(a).all()


@pytest.mark.parametrize("steps", [None, 4])
def test_accumulation_numbers(world: Communicator, steps: int | None) -> None:
    """Loss x - (rank + 1)·y0: the gradient of y averages to -(size + 1) / 2."""
    x = keras.Variable(0.0, name="x")
    y = keras.Variable([1.0, 2.0], name="y")
    optimizer = distkeras.DistributedOptimizer(
        keras.optimizers.SGD(1.0, gradient_accumulation_steps=steps)
    )
    optimizer.build([x, y])
    mean = (world.size + 1) / 2
    for i in range(10):
        gradients = [
            tf.constant(-1.0),
            tf.constant([float(world.rank + 1), 0.0]),
        ]
        optimizer.apply(gradients, [x, y])
        k = (i + 1) // (steps or 1)
        assert float(x) == pytest.approx(k)
        assert y.numpy().tolist() == pytest.approx([1 - k * mean, 2])
        assert int(optimizer.iterations) == k


def test_embedding_gradient_is_summed_over_ranks(world: Communicator) -> None:
    keras.utils.set_random_seed(0)
    layer = keras.layers.Embedding(10, 3)
    layer.build()
    before = layer.embeddings.numpy()
    optimizer = distkeras.DistributedOptimizer(keras.optimizers.SGD(1.0))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.constant([world.rank, world.rank, 9])))
    (gradient,) = tape.gradient(loss, [layer.embeddings.value])
    assert isinstance(gradient, tf.IndexedSlices)
    optimizer.apply([gradient], [layer.embeddings])
    expected = np.zeros((10, 3))
    for rank in range(world.size):
        expected[rank] += 2 / world.size
    expected[9] += 1
    np.testing.assert_allclose(before - layer.embeddings.numpy(), expected, atol=1e-6)


def test_mismatch_is_the_same_error_everywhere(world: Communicator) -> None:
    width = 4 if world.rank == world.size - 1 and world.size > 1 else 3
    variable = keras.Variable(np.zeros(width), name="w", dtype="float32")
    optimizer = distkeras.DistributedOptimizer(keras.optimizers.SGD(1.0))
    gradients = [tf.ones(width)]
    if world.size == 1:
        optimizer.apply(gradients, [variable])
        return
    with pytest.raises(MismatchError, match="0 w: 3 float32") as error:
        optimizer.apply(gradients, [variable])
    assert len(set(world.allgather_object(str(error.value)))) == 1


def test_load_model_from_rank_zero_alone(world: Communicator, tmp_path: Path) -> None:
    path = tmp_path / "model.keras"  # another folder on every rank
    trained = dense()
    trained.compile(keras.optimizers.RMSprop(0.25, momentum=0.5), loss="mse")
    train(trained, trained.optimizer, [s[0] for s in batches(1)], True)
    if world.rank == 0:
        trained.save(path)
    model = distkeras.load_model(path)
    assert isinstance(model.optimizer, keras.optimizers.RMSprop)
    assert type(model.optimizer).__name__ == "RMSprop"
    assert is_distributed(model.optimizer) == (world.size > 1)
    assert float(model.optimizer.learning_rate) == 0.25
    for a, b in zip(
        [*model.variables, *model.optimizer.variables],
        [*trained.variables, *trained.optimizer.variables],
        strict=True,
    ):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_load_model_error_is_on_all_ranks(world: Communicator, tmp_path: Path) -> None:
    if world.size == 1:
        pytest.skip("at one rank the error is Keras' own")
    with pytest.raises(distkeras.CommunicatorError, match="rank 0.*missing.keras"):
        distkeras.load_model(tmp_path / "missing.keras")


def test_private_attributes_of_keras_optimizers() -> None:
    """What `backends._optimizers` reads must exist, and mean what it takes it for."""
    for kind, make in KINDS.items():
        optimizer = make()
        model = dense()
        optimizer.build(model.trainable_variables)
        for part in inner_optimizers(optimizer):
            assert int(part._iterations) == 0
            if part.gradient_accumulation_steps:
                variable = part._trainable_variables[0]
                index = part._get_variable_index(variable)
                shape = part._accumulated_gradients[index].shape
                assert shape == variable.shape, kind
