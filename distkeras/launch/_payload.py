"""Carrying functions, arguments and results to and from ranks, by cloudpickle.

What is defined in a notebook or in the main script goes by value, with what it
closes over; what can be imported goes by name. Where something cannot be pickled,
the error names the part that cannot.
"""

from __future__ import annotations

import collections
import inspect
import io
import os
import pickle
import types
from collections.abc import Iterator
from typing import Any

import cloudpickle


class _Pickler(cloudpickle.Pickler):
    """Cloudpickle, but code keeps the name of its file.

    Tracebacks and TensorFlow's AutoGraph look there for the lines of a function.
    """

    dispatch_table = collections.ChainMap(
        {types.CodeType: lambda code: _reduce_code(code)},
        cloudpickle.Pickler.dispatch_table,
    )


def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    make, arguments = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return _make_code, (code.co_filename, make, *arguments)


def _make_code(filename: str, make: Any, *arguments: Any) -> types.CodeType:
    code: types.CodeType = make(*arguments)
    return code.replace(co_filename=filename)


_DEPTH = 5  # of parts within parts that are looked through for the culprit
_PARTS = 100  # of each of them


def dump(value: Any, what: str) -> bytes:
    """Pickles a value.

    Args:
        value: what to carry.
        what: how the error calls it.

    Returns:
        The bytes for `load`.

    Raises:
        pickle.PicklingError: it cannot be pickled; says which part of it.

    Example:
        >>> load(dump(lambda: 3, "the function"), "the function")()
        3
    """
    try:
        return _pickled(value)
    except Exception as error:
        parts = "; ".join(_culprits(what, value, _DEPTH, set()))
        raise pickle.PicklingError(
            f"Expected {what} to be something that can be pickled: it is carried to "
            f"another process. This cannot: {parts} ({type(error).__name__}: {error}). "
            "Make it inside the function, or leave it out."
        ) from error


def _pickled(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def load(data: bytes, what: str) -> Any:
    """Reads what `dump` made.

    Args:
        data: the bytes.
        what: how the error calls it.

    Returns:
        The value.

    Raises:
        pickle.UnpicklingError: it cannot be made again in this process.
    """
    try:
        return pickle.loads(data)
    except Exception as error:
        raise pickle.UnpicklingError(
            f"Expected to read {what} as it was sent. Received: "
            f"{type(error).__name__}: {error}. A class or function goes by the name of "
            "its module, unless it is defined in the notebook or the main script: both "
            "processes must be able to import it."
        ) from error


def _culprits(name: str, value: Any, depth: int, seen: set[int]) -> list[str]:
    """Names the innermost parts of a value that cannot be pickled."""
    if id(value) in seen:
        return []
    seen.add(id(value))
    try:
        _pickled(value)
    except Exception:
        found: list[str] = []
        if depth:
            for part, inner in _parts(name, value):
                found += _culprits(part, inner, depth - 1, seen)
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        return found or [f"{name}, of type {kind.removeprefix('builtins.')}"]
    return []


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the parts of a value, with words for each."""
    if isinstance(value, types.FunctionType):
        used = inspect.getclosurevars(value)
        for variable, inner in [*used.nonlocals.items(), *used.globals.items()]:
            yield f"`{variable}`, which {value.__name__} uses", inner
        for default in value.__defaults__ or ():
            yield f"a default value of {value.__name__}", default
        return
    if isinstance(value, types.MethodType):
        yield f"the object of {value.__name__}", value.__self__
        return
    if isinstance(value, dict):
        items = [(f"{name}[{key!r}]", inner) for key, inner in value.items()]
    elif isinstance(value, list | tuple):
        items = [(f"{name}[{i}]", inner) for i, inner in enumerate(value)]
    else:
        attributes = getattr(value, "__dict__", None) or {}
        items = [(f"{name}.{key}", inner) for key, inner in attributes.items()]
    yield from items[:_PARTS]


def write(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file that appears only when it is whole."""
    temporary = f"{os.fspath(path)}.part"
    with open(temporary, "wb") as file:
        file.write(data)
    os.replace(temporary, path)
