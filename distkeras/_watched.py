"""Notices, while Keras traces a step, what of its results cannot be exact.

Losses and metric functions are looked at through attributes of their instances, which
are put back at the end: private to Keras, and all here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
from keras.src.metrics.reduction_metrics import MeanMetricWrapper


@contextlib.contextmanager
def attribute(instance: Any, name: str, value: Any) -> Iterator[None]:
    """Gives an instance an attribute of its own, over that of its class, while inside.

    Args:
        instance: of a Keras class.
        name: of the attribute.
        value: of the attribute.
    """
    # Past Keras' own __setattr__, which would track or lock what it is given.
    before = vars(instance).get(name, _ABSENT)
    object.__setattr__(instance, name, value)
    try:
        yield
    finally:
        if before is _ABSENT:
            object.__delattr__(instance, name)
        else:
            object.__setattr__(instance, name, before)


_ABSENT = object()


@contextlib.contextmanager
def functions_watched(
    metrics: Sequence[keras.metrics.Metric], found: set[str]
) -> Iterator[None]:
    """Looks at what metric functions return: one number an example, or one a batch.

    Keras wraps a function `f(y_true, y_pred)` in a `MeanMetricWrapper`. Of a number
    that stands for a whole batch it makes the mean over batches, which depends on how
    the data is cut.

    Args:
        metrics: built.
        found: gets the names of metrics whose function returns one number a batch.
    """
    undo = contextlib.ExitStack()

    def watch(metric: keras.metrics.Metric) -> None:
        function = metric._fn

        def watched(*args: Any, **kwargs: Any) -> Any:
            values = function(*args, **kwargs)
            if len(keras.ops.shape(values)) == 0:
                found.add(metric.name)
            return values

        undo.enter_context(attribute(metric, "_fn", watched))

    with undo:
        for metric in flat(metrics):
            if isinstance(metric, MeanMetricWrapper):
                watch(metric)
        yield


def flat(metrics: Sequence[keras.metrics.Metric]) -> Iterator[keras.metrics.Metric]:
    """Yields metrics and those within them."""
    for metric in metrics:
        # `CompileMetrics` lists its parts in `metrics`; others track them.
        yield from flat(getattr(metric, "metrics", None) or metric._metrics)
        yield metric


@contextlib.contextmanager
def losses_watched(model: keras.Model, traits: set[str]) -> Iterator[None]:
    """Makes a model's several losses means over examples: private to Keras.

    Keras keeps a `Mean` for each loss where there are several, and weights it by the
    static batch size, which a compiled TensorFlow step does not have: there it is the
    mean over *batches*, in which a short last batch counts too much. Weighted by the
    actual size, the parts add up to the `loss` and can be summed over ranks.

    Args:
        model: its `CompileLoss` calls, on the instance, `build` once, `call` a step,
            and `update_state` of each of its `metrics`.
        traits: gets "mask" and "weights" where the losses are given such.
    """
    compiled = getattr(model, "_compile_loss", None)
    if compiled is None:
        yield
        return
    undo = contextlib.ExitStack()
    size: list[Any] = [None]

    def watch_trackers() -> None:
        for tracker in compiled.metrics:
            undo.enter_context(_weighted(tracker, size))

    build, call = compiled.build, compiled.call

    def watched_build(*args: Any, **kwargs: Any) -> None:
        build(*args, **kwargs)
        watch_trackers()

    def watched_call(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        leaves = [leaf for leaf in keras.tree.flatten(y_pred) if leaf is not None]
        if any(getattr(leaf, "_keras_mask", None) is not None for leaf in leaves):
            traits.add("mask")
        if sample_weight is not None:
            traits.add("weights")
        size[0] = keras.ops.shape(leaves[0])[0]
        return call(y_true, y_pred, sample_weight)

    with undo:
        watch_trackers()
        undo.enter_context(attribute(compiled, "build", watched_build))
        undo.enter_context(attribute(compiled, "call", watched_call))
        yield


@contextlib.contextmanager
def _weighted(tracker: keras.metrics.Metric, size: list[Any]) -> Iterator[None]:
    original = tracker.update_state

    def update_state(values: Any, sample_weight: Any = None) -> None:
        original(values, size[0] if sample_weight is None else sample_weight)

    with attribute(tracker, "update_state", update_state):
        yield


def inexact_losses(model: keras.Model, traits: set[str]) -> list[str]:
    """Returns why losses of a built model may depend on how data is cut in batches.

    Args:
        model: compiled; its losses are known once a step has been traced.
        traits: "mask" or "weights" where predictions are masked, examples weighted.

    Returns:
        One sentence part a loss, empty where all are plain means over examples.
    """
    compiled = getattr(model, "_compile_loss", None)
    reasons = []
    for layer in model._flatten_layers():
        # Of the newest call. Keras divides those of an `activity_regularizer` by the
        # batch size; regularizers of weights are not among them.
        if layer._losses and layer.activity_regularizer is None:
            reasons.append(
                f"layer '{layer.name}' calls `add_loss`: a mean over examples is "
                "exact, but a sum over the batch counts 1/N on N ranks, and is to be "
                "divided by the batch size"
            )
    for entry in (compiled and compiled._flat_losses) or []:
        reduction = getattr(entry.loss, "reduction", None)
        name = f"loss '{entry.loss.name}'"
        if reduction == "sum":
            reasons.append(f"{name}: reduction='sum' adds up a batch")
        elif reduction == "mean_with_sample_weight" and "weights" in traits:
            reasons.append(f"{name}: each batch is divided by its sample weights")
        elif "mask" in traits and reduction is not None:
            reasons.append(f"{name}: each batch is divided by its unmasked values")
    return reasons
