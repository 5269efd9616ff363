"""Collectives on whatever a script holds: numbers, arrays, tensors, and nests of them.

For a script's own use outside the training step. Every call first agrees on what is
to be done (one small message), so that ranks that disagree all raise the same error
instead of waiting for each other, and then moves one buffer a dtype.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any
from typing import Literal
from typing import get_args

import numpy as np

from distkeras.communicators import Communicator
from distkeras.communicators import agree
from distkeras.communicators import world

ReduceOp = Literal["average", "sum", "min", "max", "product"]

_WHAT = "the collective and its input"


def allreduce(x: Any, *, op: ReduceOp = "average") -> Any:
    """Combines `x` over all ranks.

    Args:
        x: a number, NumPy array, Keras variable, tensor of TensorFlow, PyTorch or
            JAX, or a nest of them in lists, tuples and dicts. Structure, shapes and
            dtypes must be the same on all ranks.
        op: "average" (the mean over ranks), "sum", "min", "max" or "product". The
            average of integers and booleans is `float64`, as NumPy's `mean` has it;
            every other result has the dtype of its input. Sums of integers wrap
            around as NumPy's do; of booleans, "sum" is "or" and "product" is "and".

    Returns:
        The same structure on every rank, the same bits. Arrays and numbers come
        back as NumPy's, tensors and variables as tensors on the device they came
        from. `x` itself is not changed.

    Raises:
        MismatchError: on every rank, if ranks differ in operation, structure,
            shape or dtype; names the first difference.
        ValueError: if `op` is none of those.
        TypeError: if `x` holds something that is not numeric; on several ranks also
            for "min" and "max" of complex numbers, which have no order.

    Example:
        >>> allreduce({"loss": 0.5, "count": np.array([3])}, op="sum")
        {'loss': np.float64(0.5), 'count': array([3])}
    """
    communicator = world()
    leaves, rebuild = _prepare(communicator, f"allreduce(op={op!r})", x)
    # Only now: an error before would leave the other ranks waiting.
    words = get_args(ReduceOp)
    if op not in words:
        raise ValueError(
            f"Expected op to be one of {', '.join(words)}. Received: {op!r}"
        )
    arrays = [leaf.array for leaf in leaves]
    if op == "average":
        arrays = [array.astype(_average_dtype(array.dtype)) for array in arrays]

    def combine(buffer: np.ndarray) -> None:
        communicator.allreduce(buffer, "sum" if op == "average" else op)
        if op == "average":
            buffer /= communicator.size

    results = _fused(arrays, combine)
    if op == "average":
        # Half precision is rounded once, after the division.
        results = [
            result.astype(_average_dtype(leaf.array.dtype, final=True))
            for result, leaf in zip(results, leaves, strict=True)
        ]
    return rebuild(results)


def allgather(x: Any) -> Any:
    """Concatenates `x` of all ranks along the first axis, in the order of ranks.

    Args:
        x: as for `allreduce`. The first dimension may differ from rank to rank;
            structure, other dimensions and dtypes must be the same. A number, or
            an array without dimensions, counts as an array of one element.

    Returns:
        The same structure on every rank; an array of shape `(sum of first
        dimensions, ...)` for each array, a tensor for each tensor.

    Raises:
        MismatchError: on every rank, if ranks differ in structure, dtype or
            another dimension than the first.
        TypeError: if `x` holds something that is not numeric.

    Example:
        >>> allgather(np.arange(3))
        array([0, 1, 2])
    """
    communicator = world()
    leaves, rebuild = _prepare(communicator, "allgather", x, ragged=True)
    arrays = [np.atleast_1d(leaf.array) for leaf in leaves]
    lengths = communicator.allgather_object([len(array) for array in arrays])
    results: list[Any] = [None] * len(arrays)
    for dtype, indices in _by_dtype(arrays).items():
        parts = communicator.allgather(_pack([arrays[i] for i in indices], dtype))
        pieces: dict[int, list[np.ndarray]] = {i: [] for i in indices}
        for part, counts in zip(parts, lengths, strict=True):
            start = 0
            for i in indices:
                shape = (counts[i], *arrays[i].shape[1:])
                end = start + int(np.prod(shape))
                pieces[i].append(part[start:end].reshape(shape))
                start = end
        for i in indices:
            results[i] = np.concatenate(pieces[i])
    return rebuild(results)


def broadcast(x: Any, *, root: int = 0) -> Any:
    """Returns rank `root`'s `x` on every rank.

    Args:
        x: as for `allreduce`. Every rank passes one of the same structure, shapes
            and dtypes; the values of ranks other than `root` are ignored. For
            anything else use `broadcast_object`.
        root: the rank that sends, the same on every rank.

    Returns:
        The same structure with the root's values. A variable is not assigned to:
        what comes back is a tensor.

    Raises:
        MismatchError: on every rank, if ranks differ in root, structure, shape or
            dtype.
        ValueError: if `root` is no rank.
        TypeError: if `x` holds something that is not numeric.

    Example:
        >>> broadcast(np.ones(2))
        array([1., 1.])
    """
    communicator = world()
    leaves, rebuild = _prepare(communicator, f"broadcast(root={root!r})", x)
    return rebuild(
        _fused(
            [leaf.array for leaf in leaves],
            lambda buffer: communicator.broadcast(buffer, root),
        )
    )


def broadcast_object(obj: Any, *, root: int = 0) -> Any:
    """Returns rank `root`'s object on every rank.

    Args:
        obj: anything `pickle` takes; ignored on ranks other than `root`.
        root: the rank that sends, the same on every rank.

    Returns:
        The object itself on rank `root`, an equal one elsewhere.

    Raises:
        MismatchError: on every rank, if ranks name different roots.
        CommunicatorError: on every rank, if the object cannot be pickled.
        ValueError: if `root` is no rank.

    Example:
        >>> broadcast_object({"seed": 42})
        {'seed': 42}
    """
    communicator = world()
    agree(communicator, _WHAT, [f"broadcast_object(root={root!r})"])
    return communicator.broadcast_object(obj, root)


def allgather_object(obj: Any) -> list[Any]:
    """Returns every rank's object, in the order of ranks.

    Args:
        obj: anything `pickle` takes.

    Returns:
        A list of `size()` objects; this rank's own is the object itself.

    Raises:
        CommunicatorError: on every rank, if one cannot be pickled.

    Example:
        >>> allgather_object("report")
        ['report']
    """
    communicator = world()
    agree(communicator, _WHAT, ["allgather_object"])
    return communicator.allgather_object(obj)


def barrier() -> None:
    """Returns once every rank has called it.

    Raises:
        MismatchError: on every rank, if another rank called another collective.

    Example:
        >>> barrier()
    """
    communicator = world()
    agree(communicator, _WHAT, ["barrier"])
    communicator.barrier()


@dataclasses.dataclass
class _Leaf:
    """One number, array or tensor of a nest.

    Attributes:
        path: how a message names it, as in `x['loss'][0]`.
        array: its value, in native byte order.
        restore: makes a result of its kind of an array.
    """

    path: str
    array: np.ndarray
    restore: Callable[[np.ndarray], Any]


def _prepare(
    communicator: Communicator, call: str, x: Any, *, ragged: bool = False
) -> tuple[list[_Leaf], Callable[[list[np.ndarray]], Any]]:
    """Takes a nest apart and agrees with the other ranks on its form.

    Returns:
        Its leaves, and what makes the nest again of their results.
    """
    problem: Exception | None = None
    leaves: list[_Leaf] = []
    try:
        leaves = list(_leaves(x, "x"))
        rows = [call, f"structure {_structure(x)}"]
        rows += [f"{leaf.path}: {_form(leaf.array, ragged)}" for leaf in leaves]
    except TypeError as error:
        # The others wait for this rank's rows: the error goes in their place.
        problem = error
        rows = [call, str(error)]
    try:
        agree(communicator, _WHAT, rows)
    except Exception as mismatch:
        raise mismatch from problem
    if problem is not None:
        raise problem

    def rebuild(results: list[np.ndarray]) -> Any:
        restored = iter(
            leaf.restore(result) for leaf, result in zip(leaves, results, strict=True)
        )
        return _rebuild(x, restored)

    return leaves, rebuild


def _leaves(x: Any, path: str) -> Iterator[_Leaf]:
    if isinstance(x, Mapping):
        for key in _keys(x):
            yield from _leaves(x[key], f"{path}[{key!r}]")
    elif isinstance(x, (list, tuple)):
        for index, item in enumerate(x):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield _leaf(x, path)


def _keys(x: Mapping[Any, Any]) -> list[Any]:
    """Returns a dict's keys in an order that insertion does not change."""
    return sorted(x, key=lambda key: (type(key).__name__, repr(key)))


def _structure(x: Any) -> str:
    """Describes a nest without its leaves."""
    if isinstance(x, Mapping):
        items = (f"{key!r}: {_structure(x[key])}" for key in _keys(x))
        return "{" + ", ".join(items) + "}"
    if isinstance(x, (list, tuple)):
        inner = ", ".join(_structure(item) for item in x)
        return f"[{inner}]" if isinstance(x, list) else f"({inner})"
    return "*"


def _rebuild(x: Any, restored: Iterator[Any]) -> Any:
    """Makes the nest again; results come in the order of `_leaves`."""
    if isinstance(x, Mapping):
        results = {key: _rebuild(x[key], restored) for key in _keys(x)}
        return {key: results[key] for key in x}
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*(_rebuild(item, restored) for item in x))
    if isinstance(x, (list, tuple)):
        items = [_rebuild(item, restored) for item in x]
        return items if isinstance(x, list) else tuple(items)
    return next(restored)


def _form(array: np.ndarray, ragged: bool) -> str:
    """Describes what must agree; for ragged ones, not the first dimension."""
    shape = tuple(array.shape)
    if ragged:
        dims = ["*", *(str(n) for n in shape[1:])]
        return f"{array.dtype.name} ({', '.join(dims)})"
    return f"{array.dtype.name} {shape}"


def _leaf(x: Any, path: str) -> _Leaf:
    """Returns a leaf's value as an array, and the way back."""
    restore: Callable[[np.ndarray], Any]
    if isinstance(x, (bool, int, float, complex, np.generic)):
        array, restore = np.asarray(x), _number
    elif isinstance(x, np.ndarray):
        array, restore = x, _same
    else:
        array, restore = _from_tensor(x, path)
    if not (array.dtype.kind in "biufc" or _is_ml_dtype(array.dtype)):
        raise TypeError(
            f"Expected numbers, arrays, tensors or nests of them. Received: {path} is "
            f"{type(x).__name__} of dtype {array.dtype}; broadcast_object and "
            "allgather_object take any object."
        )
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return _Leaf(path, array, restore)


def _same(array: np.ndarray) -> np.ndarray:
    return array


def _number(array: np.ndarray) -> Any:
    """A number comes back as one, unless gathering made it several."""
    return array[()]


def _is_ml_dtype(dtype: np.dtype) -> bool:
    return dtype.kind == "V" and "float" in dtype.name


def _from_tensor(x: Any, path: str) -> tuple[np.ndarray, Callable[[np.ndarray], Any]]:
    """Converts a tensor; its library is loaded, or it could not be a tensor.

    Raises:
        TypeError: if `x` is no tensor, or has no value yet.
    """
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(x, keras.Variable):
        return _from_tensor(x.value, path)
    tf = sys.modules.get("tensorflow")
    if tf is not None and isinstance(x, (tf.Tensor, tf.Variable)):
        if not tf.executing_eagerly():
            raise TypeError(
                f"Expected a tensor with a value. Received: {path} is {x!r}, inside a "
                "tf.function. Call the collective outside of it."
            )
        return x.numpy(), tf.convert_to_tensor
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return _from_torch(torch, x)
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(x, jax.Array):
        if isinstance(x, jax.core.Tracer):
            raise TypeError(
                f"Expected an array with a value. Received: {path} is {x!r}, inside a "
                "jitted function. Call the collective outside of it."
            )
        return np.asarray(x), lambda array: jax.device_put(array, x.sharding)
    raise TypeError(
        f"Expected numbers, arrays, tensors or nests of them. Received: {path} is "
        f"{type(x).__name__}; broadcast_object and allgather_object take any object."
    )


def _from_torch(torch: Any, x: Any) -> tuple[np.ndarray, Callable[[np.ndarray], Any]]:
    """Converts a PyTorch tensor; NumPy's bfloat16 is ml_dtypes', unknown to torch."""
    host = x.detach().cpu().contiguous()
    if x.dtype != torch.bfloat16:
        return host.numpy(), lambda array: torch.from_numpy(array).to(x.device)
    import ml_dtypes

    def restore(array: np.ndarray) -> Any:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(x.device)

    return host.view(torch.int16).numpy().view(ml_dtypes.bfloat16), restore


def _average_dtype(dtype: np.dtype, *, final: bool = False) -> np.dtype:
    """Returns the dtype in which averages are computed, or the result's."""
    if dtype.kind in "biu":
        return np.dtype(np.float64)
    if not final and (dtype.kind == "V" or dtype.itemsize < 4):
        return np.dtype(np.float32)
    return dtype


def _by_dtype(arrays: list[np.ndarray]) -> dict[np.dtype, list[int]]:
    """Returns the arrays' indices by dtype, in the same order on every rank."""
    groups: dict[np.dtype, list[int]] = {}
    for index, array in enumerate(arrays):
        groups.setdefault(array.dtype, []).append(index)
    return groups


def _pack(arrays: list[np.ndarray], dtype: np.dtype) -> np.ndarray:
    """Returns a new flat buffer of all arrays."""
    buffer = np.empty(sum(array.size for array in arrays), dtype)
    start = 0
    for array in arrays:
        buffer[start : start + array.size] = array.reshape(-1)
        start += array.size
    return buffer


def _fused(
    arrays: list[np.ndarray], collective: Callable[[np.ndarray], None]
) -> list[np.ndarray]:
    """Runs a collective in place on one buffer a dtype; returns arrays of their own."""
    results: list[Any] = [None] * len(arrays)
    for dtype, indices in _by_dtype(arrays).items():
        buffer = _pack([arrays[i] for i in indices], dtype)
        collective(buffer)
        start = 0
        for i in indices:
            part = buffer[start : start + arrays[i].size]
            results[i] = part.reshape(arrays[i].shape).copy()
            start += arrays[i].size
    return results
