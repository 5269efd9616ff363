"""The whole state of training: taken to the host of rank 0, and put back on all ranks.

Most of it is the same on all ranks, and rank 0's is taken. What is not (metrics of the
epoch so far, the states of seed generators, moving statistics between averages,
gradients accumulated between updates, the random numbers of Python and NumPy) is taken
of each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import random
import re
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras.src.backend.common import global_state

from distkeras import _accumulated
from distkeras import backends
from distkeras._errors import MismatchError
from distkeras._learning_rate import rates
from distkeras._learning_rate import restore_rates
from distkeras._metrics import _entries
from distkeras._scaled_rate import holding_base_rates
from distkeras._statistics import moving_statistics
from distkeras.callbacks._broadcast import _fold_in
from distkeras.callbacks._broadcast import _is_seed_state
from distkeras.communicators import Communicator

# What Keras appends to the names of layers: it counts those a process has made so far.
_NUMBERS = re.compile(r"_\d+(?=[_/:]|$)")
_OF_RANK = "rank-{}/{}"


@dataclasses.dataclass(frozen=True)
class State:
    """What a checkpoint holds of a model, its optimizers and random numbers.

    Attributes:
        arrays: by name. What differs over ranks is named `rank-0/...`, `rank-1/...`.
        description: the rest, as JSON can hold it.
    """

    arrays: dict[str, np.ndarray]
    description: dict[str, Any]


def take(
    model: keras.Model,
    communicator: Communicator,
    *,
    metrics: bool,
    more: Mapping[str, np.ndarray] | None = None,
    read: Callable[[Iterable[Any]], list[np.ndarray]] | None = None,
) -> State:
    """Returns the state, on rank 0; on other ranks an empty one. Collective.

    Two messages: the digests of what may differ, and what does, to rank 0 alone.

    Args:
        model: built, its optimizers too.
        communicator: the ranks.
        metrics: whether the metrics are in the middle of an epoch.
        more: further arrays of this rank, see `of_ranks`.
        read: reads variables; by default the backend's `read_variables`.
    """
    first = communicator.rank == 0
    optimizers = backends.current().find_optimizers(model)
    read = read or backends.current().read_variables
    with _base_rates(optimizers):
        variables = state_variables(model, optimizers)
        own = _may_differ(model, optimizers)
        wanted = variables
        if not first:
            wanted = {n: v for n, v in variables.items() if id(v) in own}
        arrays = dict(zip(wanted, read(wanted.values()), strict=True))
        mine = {n: a for n, a in arrays.items() if id(variables[n]) in own}
    digests = [hashlib.blake2b(array.tobytes()).digest() for array in mine.values()]
    always = {**_random_state(), **(more or {})}
    if metrics:
        found = _metrics(model)
        values = zip(found, read(found.values()), strict=True)
        always |= {f"metric/{name}": value for name, value in values}
    everyone = communicator.allgather_object(digests)
    differ = [
        name for name, *held in zip(mine, *everyone, strict=True) if len(set(held)) > 1
    ]
    gathered = communicator.gather_object({**always, **{n: mine[n] for n in differ}})
    if gathered is None:
        return State({}, {})
    for rank, theirs in enumerate(gathered):
        for name, array in theirs.items():
            arrays[_OF_RANK.format(rank, name)] = array
    return State(
        arrays,
        {
            "world_size": communicator.size,
            "rates": [rates(optimizer) for optimizer in optimizers],
            "trained": [_trained(model, optimizer) for optimizer in optimizers],
            "metrics": {e.name: e.reduction for e in _entries(model.metrics)},
        },
    )


def of_ranks(state: State, prefix: str) -> list[dict[str, np.ndarray]]:
    """Returns the arrays with a prefix that each rank had of its own, without it."""
    found: list[dict[str, np.ndarray]] = []
    for rank in range(state.description["world_size"]):
        begin = _OF_RANK.format(rank, prefix)
        names = [name for name in state.arrays if name.startswith(begin)]
        found.append({name.removeprefix(begin): state.arrays[name] for name in names})
    return found


def restore(model: keras.Model, state: State, communicator: Communicator) -> None:
    """Puts weights, optimizers and random numbers back; on every rank.

    With as many ranks as the state was taken of, each gets what was its own. With
    another number moving statistics are averaged, accumulated gradients are shared out
    anew, and ranks that are new draw random numbers of their own.

    Args:
        model: as that of which the state was taken, built.
        state: whole, on every rank.
        communicator: the ranks.

    Raises:
        MismatchError: if the model or its optimizers have other variables.
    """
    size = state.description["world_size"]
    optimizers = backends.current().find_optimizers(model)
    _build(model, optimizers, state.description.get("trained", []))
    variables = state_variables(model, optimizers)
    _check(variables, state.arrays)
    averaged = {id(v) for v in moving_statistics(model)}
    parts = {id(part.variable): part for part in _accumulated.parts(optimizers)}
    with _base_rates(optimizers):
        for name, variable in variables.items():
            value = state.arrays[name]
            own = _of_ranks(state.arrays, name, size)
            if own and size == communicator.size:
                value = own[communicator.rank]
            elif id(variable) in parts and size != communicator.size:
                largest = parts[id(variable)].largest
                held = own or [value] * size
                value = _shared_out(held, communicator.size, largest=largest)
            elif own and id(variable) in averaged:
                value = np.mean(own, axis=0, dtype="float64")
            elif own and communicator.rank < size:
                value = own[communicator.rank] if _is_seed_state(variable) else value
            variable.assign(keras.ops.cast(value, variable.dtype))
            if own and communicator.rank >= size and _is_seed_state(variable):
                variable.assign(_fold_in(variable, communicator.rank))
    for optimizer, saved in zip(optimizers, state.description["rates"], strict=True):
        restore_rates(optimizer, saved)
    if communicator.rank < size:
        _restore_random(of_ranks(state, "")[communicator.rank])


def restore_metrics(
    model: keras.Model, state: State, communicator: Communicator
) -> None:
    """Puts back what the metrics have seen of the epoch so far; on every rank.

    With as many ranks as before each gets its own. With another number the first one
    gets what the earlier ones had seen together, and the others begin with nothing.

    Args:
        model: with metrics that are reset.
        state: taken with `metrics=True`.
        communicator: the ranks.
    """
    size, rank = state.description["world_size"], communicator.rank
    entries = _entries(model.metrics)
    for name, entry in zip(_metrics(model), entries, strict=True):
        own = _of_ranks(state.arrays, f"metric/{name}", size)
        if not own:
            continue
        if size == communicator.size:
            value = own[rank]
        elif entry.reduction in ("sum", "product"):
            if rank > 0:
                continue
            combine = np.sum if entry.reduction == "sum" else np.prod
            value = combine(np.asarray(own, "float64"), axis=0)
        else:
            ways: dict[str, Any] = {"mean": np.mean, "min": np.min, "max": np.max}
            combine = ways.get(entry.reduction, lambda values, axis: values[0])
            value = combine(np.asarray(own), axis=0)
        entry.variable.assign(keras.ops.cast(value, entry.variable.dtype))


# What there is


def state_variables(
    model: keras.Model, optimizers: Sequence[keras.optimizers.Optimizer]
) -> dict[str, Any]:
    """Returns all that is restored, by a name that is the same in another process."""
    of_metrics = {id(entry.variable) for entry in _entries(model.metrics)}
    found: dict[int, str] = {}
    variables = {}
    groups = [("model", model.variables)]
    groups += [(f"optimizer-{n}", o.variables) for n, o in enumerate(optimizers)]
    for group, members in groups:
        for number, variable in enumerate(members):
            if id(variable) in found or id(variable) in of_metrics:
                continue
            found[id(variable)] = group
            variables[f"{group}/{number}/{_NUMBERS.sub('', variable.path)}"] = variable
    return variables


def _trained(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> list[int]:
    """Returns which variables of a model an optimizer was built for, by number."""
    numbers = {id(variable): n for n, variable in enumerate(model.variables)}
    trained = getattr(optimizer, "_trainable_variables", [])
    return [numbers[id(v)] for v in trained if id(v) in numbers]


def _build(
    model: keras.Model,
    optimizers: Sequence[keras.optimizers.Optimizer],
    trained: Sequence[Sequence[int]],
) -> None:
    """Builds optimizers that a `train_step` of the model's own would at its first call.

    There may be several, and only that step knows which of them trains what.
    """
    variables = model.variables
    for optimizer, numbers in zip(optimizers, trained, strict=False):
        if numbers and not optimizer.built and max(numbers) < len(variables):
            optimizer.build([variables[n] for n in numbers])


def _metrics(model: keras.Model) -> dict[str, Any]:
    entries = _entries(model.metrics)
    return {f"{n}/{e.name}": e.variable for n, e in enumerate(entries)}


def _may_differ(
    model: keras.Model, optimizers: Sequence[keras.optimizers.Optimizer]
) -> set[int]:
    """Returns what a rank may have of its own, by its id."""
    return {id(v) for v in model.variables} - {
        id(v) for v in model.trainable_variables
    } | {id(part.variable) for part in _accumulated.parts(optimizers)}


def _shared_out(own: list[np.ndarray], size: int, *, largest: bool) -> np.ndarray:
    """Returns what each of `size` ranks accumulates, of what some ranks had.

    Ranks accumulate parts, which add up to the gradient, or else the largest counts.
    """
    if largest:
        return np.max(own, axis=0)
    return np.sum(own, axis=0, dtype="float64") / size


def _check(variables: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    held = [n for n in arrays if n.startswith(("model/", "optimizer-"))]
    for mine, theirs in zip(variables, held, strict=False):
        variable, array = variables[mine], arrays[theirs]
        if mine != theirs or tuple(variable.shape) != array.shape:
            raise MismatchError(
                "Expected a checkpoint of this model and its optimizer. Received one "
                f"that differs first in '{theirs}' of shape {array.shape}, where the "
                f"model has '{mine}' of shape {tuple(variable.shape)}."
            )
    if len(held) != len(variables):
        raise MismatchError(
            "Expected a checkpoint of this model and its optimizer. Received one of "
            f"{len(held)} variables; the model has {len(variables)}."
        )


def _of_ranks(
    arrays: Mapping[str, np.ndarray], name: str, size: int
) -> list[np.ndarray]:
    """Returns what each rank had of its own; nothing where all had the same."""
    names = [_OF_RANK.format(rank, name) for rank in range(size)]
    return [arrays[name] for name in names] if names[0] in arrays else []


def _array(variable: Any) -> np.ndarray:
    """Returns a copy on the host: what training does next does not change it."""
    value = keras.ops.convert_to_tensor(variable)
    return np.array(keras.ops.convert_to_numpy(value))


@contextlib.contextmanager
def _base_rates(optimizers: Sequence[keras.optimizers.Optimizer]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(holding_base_rates(optimizer))
        yield


# Random numbers


def _random_state() -> dict[str, np.ndarray]:
    """Returns the states of the generators that Keras and user code draw from."""
    _, python, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    state = {
        "random/python": np.array(python, "uint32"),
        "random/python_gauss": np.array([] if gauss is None else [gauss], "float64"),
    }
    if kind == "MT19937":
        state["random/numpy"] = np.array(keys, "uint32")
        state["random/numpy_position"] = np.array([position, has_gauss], "int64")
        state["random/numpy_gauss"] = np.array(cached, "float64")
    of_keras = global_state.get_global_attribute("global_seed_generator")
    if of_keras is not None:
        state["random/keras"] = _array(of_keras.state)
    return state


def _restore_random(state: Mapping[str, np.ndarray]) -> None:
    if "random/python" in state:
        gauss = state["random/python_gauss"].tolist()
        words = tuple(state["random/python"].tolist())
        random.setstate((3, words, gauss[0] if gauss else None))
    if "random/numpy" in state:
        position, has_gauss = state["random/numpy_position"].tolist()
        cached = float(state["random/numpy_gauss"])
        np.random.set_state(
            ("MT19937", state["random/numpy"], position, has_gauss, cached)
        )
    if "random/keras" in state:
        of_keras = keras.src.random.seed_generator.global_seed_generator()
        of_keras.state.assign(state["random/keras"])
