"""The public collectives: values against NumPy over ranks, errors on every rank."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import distkeras
from distkeras._errors import CommunicatorError
from distkeras._errors import MismatchError
from distkeras.communicators import Communicator

DTYPES = ("uint8", "int8", "int32", "int64", "float16", "float32", "float64")
FIRST = (17, 32, 81, 12, 15, 23, 22)


def values(rank: int, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    return ((np.arange(np.prod(shape)) + rank) % 4 + 1).astype(dtype).reshape(shape)


@pytest.mark.parametrize("dims", (1, 2, 3))
@pytest.mark.parametrize("dtype", (*DTYPES, ml_dtypes.bfloat16))
def test_allreduce_sum(world: Communicator, dtype: Any, dims: int) -> None:
    x = values(0, dtype, (17,) * dims)
    before = x.copy()
    result = distkeras.allreduce(x, op="sum")
    assert result.dtype == x.dtype and result.shape == x.shape
    np.testing.assert_array_equal(result, (x * world.size).astype(x.dtype))
    np.testing.assert_array_equal(x, before)


@pytest.mark.parametrize("dtype", (*DTYPES, ml_dtypes.bfloat16))
@pytest.mark.parametrize(
    ("op", "ufunc"),
    (("min", np.minimum), ("max", np.maximum), ("product", np.multiply)),
)
def test_allreduce_other_operations(
    world: Communicator, op: Any, ufunc: np.ufunc, dtype: Any
) -> None:
    shape = (17, 17)
    everyone = [values(rank, dtype, shape) for rank in range(world.size)]
    result = distkeras.allreduce(everyone[world.rank], op=op)
    np.testing.assert_array_equal(result, ufunc.reduce(everyone, dtype=result.dtype))


@pytest.mark.parametrize("dtype", (*DTYPES, ml_dtypes.bfloat16, "bool"))
def test_average_of_equal_arrays_is_the_array(world: Communicator, dtype: Any) -> None:
    x = values(0, dtype, (17, 3))
    result = distkeras.allreduce(x)
    np.testing.assert_array_equal(result.astype(x.dtype), x)
    assert result.dtype == ("float64" if x.dtype.kind in "biu" else x.dtype)


def test_average(world: Communicator) -> None:
    mean = (world.size - 1) / 2
    assert distkeras.allreduce(world.rank) == mean
    result = distkeras.allreduce(np.full(3, world.rank, "float32"), op="average")
    np.testing.assert_array_equal(result, np.float32(mean))


def test_average_of_half_precision_does_not_overflow(world: Communicator) -> None:
    result = distkeras.allreduce(np.array([60000.0], np.float16))
    assert result.dtype == np.float16 and result[0] == 60000


def test_numbers_come_back_as_numbers(world: Communicator) -> None:
    result = distkeras.allreduce((2, 0.5, True, np.float32(3)), op="sum")
    n = world.size
    assert result == (2 * n, 0.5 * n, True, 3 * n)
    assert [r.dtype.name for r in result] == ["int64", "float64", "bool", "float32"]
    assert all(np.ndim(r) == 0 for r in result)


def test_nests_are_fused_and_equal_single_results(
    world: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    Point = collections.namedtuple("Point", "x y")
    r = world.rank
    nest = {
        "z": [values(r, "float32", (5, k)) for k in range(1, 40)],
        "a": Point(values(r, "int64", (3,)), (values(r, "float32", ()), 1.5 * r)),
        "none": {},
        3: [],
    }
    calls = []
    original = type(world).allreduce

    def counting(self: Communicator, buffer: np.ndarray, op: Any = "sum") -> None:
        calls.append(buffer.dtype.name)
        original(self, buffer, op)

    monkeypatch.setattr(type(world), "allreduce", counting)
    result = distkeras.allreduce(nest, op="sum")
    assert sorted(calls) == ["float32", "float64", "int64"]
    assert list(result) == ["z", "a", "none", 3] and result["none"] == {}
    assert type(result["a"]) is Point and type(result["a"].y) is tuple
    for got, put in zip(result["z"], nest["z"], strict=True):
        np.testing.assert_array_equal(got, distkeras.allreduce(put, op="sum"))
    np.testing.assert_array_equal(
        result["a"].x, distkeras.allreduce(nest["a"].x, op="sum")
    )


def test_layouts_that_are_not_contiguous(world: Communicator) -> None:
    x = np.arange(24.0).reshape(4, 6)
    for view in (x.T, x[::2, 1:], x.astype(">f8")):
        np.testing.assert_array_equal(
            distkeras.allreduce(view, op="sum"), view * world.size
        )


@pytest.mark.parametrize("dtype", (*DTYPES, ml_dtypes.bfloat16, "bool"))
@pytest.mark.parametrize("dims", (1, 2, 3))
def test_allgather_of_different_lengths(
    world: Communicator, dtype: Any, dims: int
) -> None:
    shapes = [(first, *(17,) * (dims - 1)) for first in FIRST[: world.size]]
    everyone = [values(rank, dtype, shape) for rank, shape in enumerate(shapes)]
    result = distkeras.allgather(everyone[world.rank])
    assert result.dtype == everyone[0].dtype
    np.testing.assert_array_equal(result, np.concatenate(everyone))


def test_allgather_of_nests(world: Communicator) -> None:
    r, n = world.rank, world.size
    result = distkeras.allgather(
        {"rank": r, "rows": np.full((r, 2), r, "int32"), "same": np.array([r])}
    )
    assert result["rank"].tolist() == list(range(n))
    assert result["rows"].shape == (n * (n - 1) // 2, 2)
    assert result["rows"][:, 0].tolist() == [k for k in range(n) for _ in range(k)]
    assert result["same"].tolist() == list(range(n))


@pytest.mark.parametrize("dtype", (*DTYPES, ml_dtypes.bfloat16, "bool"))
def test_broadcast_from_each_root(world: Communicator, dtype: Any) -> None:
    for root in range(world.size):
        x = {"a": values(world.rank, dtype, (17, 2)), "b": float(world.rank)}
        result = distkeras.broadcast(x, root=root)
        np.testing.assert_array_equal(result["a"], values(root, dtype, (17, 2)))
        assert result["b"] == root
        np.testing.assert_array_equal(x["a"], values(world.rank, dtype, (17, 2)))


def test_objects(world: Communicator) -> None:
    mine = [world.rank, "text", {1, 2}]
    for root in range(world.size):
        assert distkeras.broadcast_object(mine, root=root) == [root, "text", {1, 2}]
    gathered = distkeras.allgather_object(mine)
    assert gathered == [[r, "text", {1, 2}] for r in range(world.size)]
    distkeras.barrier()


def _odd(world: Communicator, usual: Any, odd: Any) -> Any:
    return odd if world.rank == world.size - 1 else usual


MISMATCHES: dict[str, Callable[[Communicator], Any]] = {
    "shape": lambda w: distkeras.allreduce(_odd(w, np.ones((2, 3)), np.ones((3, 2)))),
    "dimensions": lambda w: distkeras.allreduce(_odd(w, np.ones(6), np.ones((6, 1)))),
    "dtype": lambda w: distkeras.allreduce(_odd(w, np.ones(2, "f4"), np.ones(2))),
    "operation": lambda w: distkeras.allreduce(1, op=_odd(w, "sum", "max")),
    "unknown operation": lambda w: distkeras.allreduce(1, op=_odd(w, "sum", "mean")),
    "structure": lambda w: distkeras.allreduce(_odd(w, [1, 2], (1, 2))),
    "keys": lambda w: distkeras.allreduce(_odd(w, {"a": 1}, {"b": 1})),
    "count": lambda w: distkeras.allreduce(_odd(w, [1, 2], [1])),
    "not numeric": lambda w: distkeras.allreduce(_odd(w, [1], ["text"])),
    "gathered dimension": lambda w: distkeras.allgather(
        _odd(w, np.ones((2, 3)), np.ones((2, 4)))
    ),
    "gathered dtype": lambda w: distkeras.allgather(_odd(w, np.ones(2), np.arange(2))),
    "broadcast shape": lambda w: distkeras.broadcast(_odd(w, np.ones(2), np.ones(3))),
    "root": lambda w: distkeras.broadcast(1, root=_odd(w, 0, 1)),
    "object's root": lambda w: distkeras.broadcast_object(1, root=_odd(w, 0, 1)),
    "verb": lambda w: _odd(w, distkeras.barrier, lambda: distkeras.allgather(1))(),
    "object's verb": lambda w: _odd(
        w, lambda: distkeras.allgather_object(1), lambda: distkeras.broadcast_object(1)
    )(),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_mismatch_raises_the_same_error_on_every_rank(
    world: Communicator, name: str
) -> None:
    if world.size == 1:
        pytest.skip("one rank agrees with itself")
    with pytest.raises(MismatchError) as caught:
        MISMATCHES[name](world)
    text = str(caught.value)
    assert f"rank {world.size - 1}: " in text
    assert len(set(world.allgather_object(text))) == 1


def test_wrong_input_is_a_type_error(world: Communicator) -> None:
    for bad in ("text", None, np.array(["text"]), np.array([None]), object()):
        with pytest.raises(TypeError, match=r"x\['k'\]\[1\] is .*broadcast_object"):
            distkeras.allreduce({"k": [1, bad]})
    with pytest.raises(ValueError, match="op to be one of average, sum"):
        distkeras.allreduce(1, op="mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="root to be a rank"):
        distkeras.broadcast(1, root=world.size)
    with pytest.raises(ValueError, match="root to be a rank"):
        distkeras.broadcast_object(1, root=-1)
    with pytest.raises(TypeError, match="x is int of dtype object"):
        distkeras.allreduce(2**70)


def test_a_bad_object_is_an_error_everywhere(world: Communicator) -> None:
    if world.size == 1:
        pytest.skip("a single process pickles nothing")
    with pytest.raises(CommunicatorError, match="can be pickled"):
        distkeras.allgather_object(threading.Lock() if world.rank == 1 else 1)


@pytest.mark.tensorflow
def test_tensors_and_variables_of_tensorflow(world: Communicator) -> None:
    tf = pytest.importorskip("tensorflow")
    r, n = world.rank, world.size
    nest = [tf.constant([1.0, 2.0]), tf.Variable([r]), np.ones(2, "float32")]
    result = distkeras.allreduce(nest, op="sum")
    assert isinstance(result[0], tf.Tensor) and isinstance(result[1], tf.Tensor)
    assert isinstance(result[2], np.ndarray)
    assert result[0].numpy().tolist() == [n, 2 * n]
    assert result[1].numpy().tolist() == [n * (n - 1) // 2]
    half = distkeras.allreduce(tf.constant([1.5], tf.bfloat16), op="sum")
    assert half.dtype == tf.bfloat16 and float(half[0]) == 1.5 * n
    assert distkeras.allgather(tf.fill([r, 2], r)).shape == (n * (n - 1) // 2, 2)
    assert int(distkeras.broadcast(tf.constant(r), root=n - 1)) == n - 1


@pytest.mark.tensorflow
def test_keras_variables(world: Communicator) -> None:
    keras = pytest.importorskip("keras")
    variable = keras.Variable(np.full((2, 2), world.rank, "float32"))
    result = distkeras.broadcast({"w": variable}, root=world.size - 1)
    assert keras.ops.is_tensor(result["w"])
    np.testing.assert_array_equal(result["w"], world.size - 1)
    np.testing.assert_array_equal(variable, world.rank)  # not assigned to


@pytest.mark.tensorflow
def test_inside_a_graph_is_an_error(world: Communicator) -> None:
    tf = pytest.importorskip("tensorflow")

    @tf.function
    def step(x: Any) -> Any:
        return distkeras.allreduce(x)

    with pytest.raises(TypeError, match="inside a tf.function"):
        step(tf.constant(1.0))


def test_tensors_of_torch(world: Communicator) -> None:
    torch = pytest.importorskip("torch")
    x = torch.full((2, 3), float(world.rank), requires_grad=True)
    result = distkeras.allreduce(x)
    assert isinstance(result, torch.Tensor) and result.shape == (2, 3)
    assert float(result[0, 0]) == (world.size - 1) / 2
    half = distkeras.allreduce(torch.ones(2, dtype=torch.bfloat16), op="sum")
    assert half.dtype == torch.bfloat16 and half.tolist() == [world.size] * 2


def test_arrays_of_jax(world: Communicator) -> None:
    jax = pytest.importorskip("jax")
    x = jax.numpy.full((2, 3), world.rank, "float32")
    result = distkeras.allreduce(x)
    assert isinstance(result, jax.Array)
    np.testing.assert_array_equal(result, (world.size - 1) / 2)
