"""What the toolkit decided, as one block of lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras

from distkeras import communicators
from distkeras._metrics import taken_to_add_up
from distkeras._version import __version__
from distkeras.backends import synchronized_layers
from distkeras.communicators import Communicator
from distkeras.gradients import Wire


def decisions(
    model: keras.Model,
    communicator: Communicator,
    data: Any,
    *,
    rates: Sequence[Any],
    rule: str,
    jit_compile: bool,
    split: bool,
    wire: Wire | None = None,
) -> str:
    """Returns the block that `Trainer.fit` logs once, on rank 0.

    Args:
        model: compiled and built.
        communicator: the ranks.
        data: the sharded training data.
        rates: what became of each learning rate: name, before, after.
        rule: the name of the scaling rule.
        jit_compile: whether XLA compiles the step's halves.
        split: whether the model trains with Keras' own `train_step`.
        wire: codec of what travels.
    """
    weights = model.trainable_variables
    nbytes = sum(math.prod(v.shape) * _itemsize(v.dtype) for v in weights)
    nodes = len(set(communicator.hosts))
    size = communicator.size
    batch = data.batch_size
    rate = "; ".join(f"{r.name} {r.before:.6g} -> {r.after:.6g}" for r in rates)
    lines = {
        "world": f"{size} ranks on {nodes} node{'s'[: nodes > 1]}",
        "communicator": communicators.describe(),
        "backend": f"Keras {keras.__version__}, {keras.backend.backend()}, "
        + ("step compiled by XLA" if jit_compile and split else "step not compiled"),
        **_batch_norm(model),
        **_metrics(model),
        "data": data.description,
        "batch": f"{batch} a rank, {batch * size} global" if batch else "as dealt",
        "learning rate": f"{rate} ({rule})" if rate else "left as it is",
        "gradients": f"{len(weights)} of {nbytes / 2**20:.2f} MiB, averaged by "
        "examples before clipping"
        + ("" if wire is None else f"; sent as {wire.describe()}")
        + ("" if split else "; exchanged inside the optimizer (own train_step)"),
    }
    title = f"distkeras {__version__}"
    return "\n".join([title, *(f"  {k:<14}{v}" for k, v in lines.items())])


def _batch_norm(model: keras.Model) -> dict[str, str]:
    count = len(synchronized_layers(model))
    if not count:
        return {}
    return {"batch norm": f"{count} synchronised; the backward pass is not compiled"}


def _metrics(model: keras.Model) -> dict[str, str]:
    own = taken_to_add_up(model.metrics)
    if not own:
        return {}
    return {
        "metrics": f"state is added up over ranks: {', '.join(own)} (else: "
        "`distributed_reduction` in the class)"
    }


def _itemsize(dtype: str) -> int:
    return {"float64": 8, "float32": 4}.get(keras.backend.standardize_dtype(dtype), 2)
