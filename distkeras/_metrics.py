"""Metrics of the whole data set: state is combined over ranks, results never are.

Once an epoch and once an evaluation, when Keras asks for the results, the state
variables of all metrics are added up over ranks in float64, on the host; then the
results are computed from the state of all. Nothing is added to the compiled steps
but, for models with several losses, the size of a batch (`losses_watched`).

Variables are combined as Keras declares them, which is by adding them up. A metric
of which that is not true says so:

    class Largest(keras.metrics.Metric):
        distributed_reduction = {"largest": "max"}  # attribute or variable name

with "sum", "mean" (over ranks), "min", "max", "product" or "first" (one rank's).

What stays inexact, each named once in a warning of rank 0's log:

- a loss that is not a plain mean over examples (`reduction="sum"`,
  `"mean_with_sample_weight"` with weights, masked values). Already in one process it
  depends on how the data is cut in batches: what is reported is what one process
  reports for the batches that the ranks have.
- what a `train_step` or `test_step` returns and no metric keeps: the mean over ranks
  of what the last steps returned, weighted by examples where their number is known.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import math
import weakref
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from distkeras._logging import LOGGER
from distkeras._watched import flat
from distkeras._watched import functions_watched
from distkeras._watched import inexact_losses
from distkeras._watched import losses_watched
from distkeras.backends import Logs
from distkeras.communicators import Communicator
from distkeras.communicators import Op
from distkeras.communicators import agree
from distkeras.communicators import collectively

# Which allreduce combines a state; the largest is the least of the negative ones.
OPERATIONS: dict[str, Op] = {"min": "min", "max": "min", "product": "product"}

_REDUCTIONS = ("sum", "mean", "min", "max", "product", "first")
_BY_AGGREGATION = {"sum": "sum", "mean": "mean", "only_first_replica": "first"}
_NO_DATA = (
    "Expected examples to compute the logs of an epoch or an evaluation from. "
    "Received: none, on any rank. Zeros would pass for the best results so far. A "
    "generator can be gone through only once: pass a keras.utils.PyDataset or a "
    "tf.data.Dataset, or fewer epochs. The model keeps its weights."
)
_warned: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def exact_metrics(
    model: keras.Model,
    communicator: Communicator,
) -> Iterator[None]:
    """Makes the logs of `fit` and `evaluate` those of all ranks' data, while inside.

    Every rank must be inside, train for as many epochs and evaluate as often. All get
    the same keys and the same numbers to the last bit, also a rank without data.

    Args:
        model: compiled. Enter before its steps are traced.
        communicator: the ranks whose data make up the whole.

    Raises:
        ValueError: if a metric's `distributed_reduction` has no meaning, or, on every
            rank, when results are due of no data.
        MismatchError: on every rank, when results are due, if ranks that saw data
            hold different metrics.

    Example:
        >>> with exact_metrics(model, world):
        ...     history = model.fit(x, y, verbose=0)  # this rank's samples
    """
    if communicator.size == 1:
        yield
        return
    _entries(model.metrics)  # complains now rather than after an epoch
    traits: set[str] = set()
    combined = _Combined(model, communicator, traits)
    with (
        losses_watched(model, traits),
        functions_watched(model.metrics, combined.by_batch),
        _asked_for_results(model, combined.results),
    ):
        yield


@contextlib.contextmanager
def _asked_for_results(
    model: keras.Model, results: Callable[[Any], Any]
) -> Iterator[None]:
    """Lets `results` answer for an epoch's logs: private to Keras, and all here.

    `Model._get_metrics_result_or_logs(logs)` is called once an epoch of training and
    once an evaluation, outside compiled code, after the last batch.
    """
    name = "_get_metrics_result_or_logs"
    if not hasattr(model, name):
        raise AttributeError(
            f"Expected `keras.Model.{name}` (Keras 3.12 to 3.15). Keras "
            f"{keras.__version__} has none; metrics of all ranks cannot be computed."
        )
    outer = vars(model).get(name)  # a callback of `fit` evaluates
    object.__setattr__(model, name, results)
    try:
        yield
    finally:
        if outer is None:
            object.__delattr__(model, name)
        else:
            object.__setattr__(model, name, outer)


@contextlib.contextmanager
def plain_metrics(model: keras.Model) -> Iterator[None]:
    """Leaves results to Keras while inside, within `exact_metrics`."""
    name = "_get_metrics_result_or_logs"
    ours = vars(model).get(name)
    if ours is None:
        yield
        return
    object.__delattr__(model, name)
    try:
        yield
    finally:
        object.__setattr__(model, name, ours)


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A state variable, and how the ranks' values of it are combined."""

    variable: Any
    name: str
    reduction: str

    @property
    def row(self) -> str:
        shape = tuple(self.variable.shape)
        return f"{self.name}: {self.variable.dtype} {shape}, {self.reduction}"


def _entries(metrics: Sequence[keras.metrics.Metric]) -> list[_Entry]:
    """Returns the state of `metrics` and of those within them, each variable once."""
    found: dict[int, _Entry] = {}
    for metric in flat(metrics):
        declared = _declared(metric)
        for variable in metric.variables:
            reduction = declared.get(id(variable)) or _BY_AGGREGATION.get(
                str(variable.aggregation), "first"
            )
            name = f"{metric.name}/{variable.name}"
            found.setdefault(id(variable), _Entry(variable, name, reduction))
    return list(found.values())


def _declared(metric: keras.metrics.Metric) -> dict[int, str]:
    """Returns the reductions that a metric declares, by the variable's id."""
    result = {}
    for key, reduction in getattr(metric, "distributed_reduction", {}).items():
        if reduction not in _REDUCTIONS:
            raise ValueError(
                f"Expected a reduction among {', '.join(_REDUCTIONS)}. Received: "
                f"distributed_reduction[{key!r}]={reduction!r} in metric "
                f"'{metric.name}'"
            )
        held = {id(leaf) for leaf in keras.tree.flatten(vars(metric).get(key))}
        chosen = [v for v in metric.variables if v.name == key or id(v) in held]
        if not chosen and metric.variables:
            names = ", ".join(sorted({v.name for v in metric.variables}))
            raise ValueError(
                "Expected the keys of `distributed_reduction` to be attributes or "
                f"variables ({names}) of metric '{metric.name}'. Received: {key!r}"
            )
        result.update({id(variable): reduction for variable in chosen})
    return result


class _Combined:
    """The results of a model's metrics over all ranks, each time they are due."""

    def __init__(
        self,
        model: keras.Model,
        communicator: Communicator,
        traits: set[str],
    ) -> None:
        self._model = model
        self._communicator = communicator
        self._traits = traits
        self.by_batch: set[str] = set()
        # The newest of training, and those of the validation between two epochs.
        self._seen: collections.deque[Any] = collections.deque(maxlen=2)

    def results(self, logs: Any) -> dict[str, Any]:
        """Returns the logs of an epoch or evaluation; collective.

        Args:
            logs: what the last step on this rank returned, empty without data.
        """
        communicator = self._communicator
        # Of an epoch without a step Keras has the logs of the one before.
        old = any(logs is seen for seen in self._seen)
        self._seen.append(logs)
        fresh = isinstance(logs, Mapping) and not old
        logs = logs if fresh else {}
        entries = _entries(self._model.metrics)
        rows = [entry.row for entry in entries]
        digest = hashlib.blake2b("\n".join(rows).encode()).digest()
        # Every rank sends every message below, whatever it holds: no rank may rely
        # on what the others hold before it has heard of it.
        held = communicator.allgather_object((digest, len(rows), bool(logs)))
        leader = max(
            range(communicator.size), key=lambda r: (held[r][2], held[r][1], -r)
        )
        follows = [digest == held[leader][0] for digest, _, _ in held]
        if not all(follows):
            self._check(entries, rows, leader, follows)
        _reduce(entries, leader, communicator, follows, [has for *_, has in held])

        def results_of_metrics() -> tuple[dict[str, Any], list[str], list[str]] | None:
            if communicator.rank != leader:
                return None
            if not any(has for *_, has in held):
                return {}, [], []
            results = _plain(self._model.get_metrics_result())
            # What Keras' guide logs, `{m.name: m.result() for m in self.metrics}`, has
            # the metrics of `compile` under one name.
            for metric in self._model.metrics:
                if metric.name in logs and metric.name not in results:
                    results[metric.name] = _plain(metric.result())
            own = set(logs) - set(results)
            if "loss" in results and _is_unused(self._model._loss_tracker):
                if not own and not _has_own_steps(self._model):
                    return {}, [], []
                # Not Keras' loss but one of the step's own, by the same name.
                own |= {"loss"} & set(logs)
            extra = sorted(own)
            return results, extra, list(logs) or list(results)

        # An error in `result()`, of metrics that never saw data, is every rank's.
        mine = collectively(communicator, results_of_metrics)
        results, extra, wanted = communicator.broadcast_object(mine, leader)
        if not results and not extra:
            raise ValueError(_NO_DATA)
        if extra:
            results.update(self._averages(extra, logs))
        self._warn(extra, entries)
        return {name: results[name] for name in wanted}

    def _check(
        self,
        entries: Sequence[_Entry],
        rows: Sequence[str],
        leader: int,
        follows: Sequence[bool],
    ) -> None:
        """Raises on all ranks if one that lacks metrics has seen data; collective."""
        communicator = self._communicator
        without_data = not any(np.any(_value(entry.variable)) for entry in entries)
        excused = communicator.allgather_object(without_data)
        if not all(f or e for f, e in zip(follows, excused, strict=True)):
            agree(communicator, "the state of the metrics", rows)

    def _averages(
        self, names: Sequence[str], logs: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns the mean over ranks of what no metric keeps; collective.

        A rank without examples in its last step logged what a row of zeros gave.
        """
        mine = {name: _plain(logs[name]) for name in names if name in logs}
        examples = int(logs.examples) if isinstance(logs, Logs) else None
        gathered = self._communicator.allgather_object((mine, examples))
        counts = [examples for _, examples in gathered]
        weights = [1.0 if n is None else float(n > 0) for n in counts]
        if None not in counts and any(counts):
            weights = counts
        elif not any(weights):  # nothing better is known of any rank
            weights = [1.0] * len(weights)
        ranks = [(v, w) for (v, _), w in zip(gathered, weights, strict=True) if w]
        return {
            name: _mean([(v[name], w) for v, w in ranks if name in v]) for name in names
        }

    def _warn(self, extra: Sequence[str], entries: Sequence[_Entry]) -> None:
        if self._communicator.rank != 0:
            return
        texts = []
        for reason in inexact_losses(self._model, self._traits):
            texts.append(
                f"{reason}. Such a loss depends on how examples are grouped in "
                "batches: it is reported, and its gradient averaged, for the batches "
                "of each rank, not for the global batch."
            )
        for name in sorted(self.by_batch):
            texts.append(
                f"metric '{name}': its function returns one number a batch, which is "
                "averaged over the batches of all ranks. Return one an example, or use "
                "a `keras.metrics.Metric`."
            )
        for name in extra:
            texts.append(
                f"'{name}' is logged by the step but kept by no metric: logged is the "
                "mean over ranks of their last values. Use a `keras.metrics.Metric` "
                "for the value of the whole data."
            )
        for entry in entries:
            if str(entry.variable.aggregation) == "none" and entry.reduction == "first":
                texts.append(
                    f"metric variable '{entry.name}' is declared with "
                    "aggregation='none': one rank's value is used. Declare "
                    "`distributed_reduction` in the metric's class."
                )
        known = _warned.setdefault(self._model, set())
        for text in texts:
            if text not in known:
                known.add(text)
                # Not `warnings.warn`, which may be made to raise, on this rank alone.
                LOGGER.warning("Not exact over ranks: %s", text)


def _reduce(
    entries: Sequence[_Entry],
    leader: int,
    communicator: Communicator,
    follows: Sequence[bool],
    has_data: Sequence[bool],
) -> None:
    """Combines the state of the ranks that follow the leader; collective.

    One float64 buffer an operation: integers are exact to 2**53, float32 counts no
    longer only to 2**24. Ranks that do not hold the leader's variables, having seen
    no data, send what changes nothing.
    """
    rank = communicator.rank
    groups: dict[Op, list[_Entry]] = {"sum": [], "min": [], "product": []}
    for entry in entries:
        groups[OPERATIONS.get(entry.reduction, "sum")].append(entry)
    sizes = {op: sum(_length(e) for e in members) for op, members in groups.items()}
    if not all(follows):
        sizes = communicator.broadcast_object(sizes, leader)
    contributors = [f and d for f, d in zip(follows, has_data, strict=True)]
    count = sum(contributors) or 1
    neutral: dict[Op, float] = {"sum": 0.0, "min": math.inf, "product": 1.0}
    for op, members in groups.items():
        if not sizes[op]:
            continue
        buffer = np.full(sizes[op], neutral[op], dtype="float64")
        if follows[rank]:
            parts = []
            for entry in members:
                value = _value(entry.variable).astype("float64").ravel()
                if entry.reduction == "max":
                    value = -value
                elif entry.reduction == "first" and rank != leader:
                    value = np.zeros_like(value)
                elif entry.reduction == "mean":
                    value = (
                        value / count if contributors[rank] else np.zeros_like(value)
                    )
                parts.append(value)
            buffer[:] = np.concatenate(parts)
        communicator.allreduce(buffer, op)
        if follows[rank]:
            _assign(members, buffer)


def _has_own_steps(model: keras.Model) -> bool:
    """Returns whether a model's class brings a `train_step` or `test_step`."""
    steps = ("train_step", "test_step")
    return any(getattr(type(model), s) is not getattr(keras.Model, s) for s in steps)


def _is_unused(metric: keras.metrics.Metric | None) -> bool:
    """Returns whether a metric has seen nothing, on any rank."""
    return metric is None or not any(np.any(_value(v)) for v in metric.variables)


def _assign(entries: Sequence[_Entry], buffer: np.ndarray) -> None:
    offset = 0
    for entry in entries:
        variable, length = entry.variable, _length(entry)
        value = buffer[offset : offset + length].reshape(variable.shape)
        offset += length
        if entry.reduction == "max":
            value = -value
        if "int" in str(variable.dtype):
            value = np.rint(value).astype("int64")
        variable.assign(keras.ops.cast(value, variable.dtype))


def _length(entry: _Entry) -> int:
    return math.prod(entry.variable.shape)


def _value(variable: Any) -> np.ndarray:
    value = keras.ops.convert_to_tensor(variable)
    return np.asarray(keras.ops.convert_to_numpy(value))


def _mean(values: Sequence[tuple[Any, float]]) -> Any:
    """Returns the mean of values with weights; the first of what has no mean."""
    first, _ = values[0]
    if isinstance(first, Mapping):
        return {
            name: _mean([(v[name], w) for v, w in values if name in v])
            for name in first
        }
    try:
        total = sum(np.asarray(v, "float64") * w for v, w in values)
        return _plain(total / sum(w for _, w in values))
    except (TypeError, ValueError):  # not numbers, or of different shapes
        return first


def _plain(value: Any) -> Any:
    """Returns numbers and arrays of the host for tensors, other values unchanged."""
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if keras.ops.is_tensor(value) or isinstance(value, keras.Variable):
        value = keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(value))
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    return float(value) if isinstance(value, np.floating) else value


def taken_to_add_up(metrics: Sequence[keras.metrics.Metric]) -> list[str]:
    """Returns the names of metrics not of Keras whose state is added up over ranks.

    Whether that is right cannot be seen from outside; `distributed_reduction` says it.
    """
    return sorted(
        {
            f"{metric.name} ({type(metric).__name__})"
            for metric in flat(metrics)
            if not type(metric).__module__.startswith("keras.")
            and not getattr(metric, "distributed_reduction", None)
            and any(str(v.aggregation) == "sum" for v in metric._variables)
        }
    )
