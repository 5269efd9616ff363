"""What the toolkit decided, as one block of lines."""

from __future__ import annotations

import logging
import math
from typing import Any

import keras

from distkeras import backends
from distkeras import communicators
from distkeras._metrics import taken_to_add_up
from distkeras._scaling import Scaled
from distkeras._session import Session
from distkeras._version import __version__


class Report:
    """Logs what was decided: once, on rank 0.

    Args:
        logger: where to.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._done = False

    def of_one(self, session: Session, *, plain: bool) -> None:
        """Logs that there is one rank.

        Args:
            session: of the model.
            plain: whether Keras is handed the data as it came.
        """
        own = "own fit, nothing changed" if plain else "own step, data in a kept order"
        if not self._done:
            self._logger.info("1 rank: training with Keras' %s", own)
            if session.timeline is not None:
                self._logger.warning(
                    "No timeline is written to %s: one rank trains by Keras' own step, "
                    "which does not tell its parts",
                    session.timeline,
                )
        self._done = True

    def of_several(self, session: Session, data: Any, scaled: Scaled) -> None:
        """Logs what several ranks do.

        Args:
            session: which has prepared the training.
            data: the sharded training data.
            scaled: what has become of learning rates.
        """
        if not self._done:
            self._logger.info(_decisions(session, data, scaled))
        self._done = True


def _decisions(session: Session, data: Any, scaled: Scaled) -> str:
    model, communicator = session.model, session.communicator
    functions = session.functions
    wire = None if functions is None else functions.exchange.wire
    split = not backends.current().overrides_train_step(model)
    compiled = model.jit_compile and split
    weights = model.trainable_variables
    nbytes = sum(math.prod(v.shape) * _itemsize(v.dtype) for v in weights)
    nodes = len(set(communicator.hosts))
    size = communicator.size
    rate = "; ".join(f"{r.name} {r.before:.6g} -> {r.after:.6g}" for r in scaled.rates)
    lines = {
        "world": f"{size} ranks on {nodes} node{'s'[: nodes > 1]}",
        "communicator": communicators.describe()
        if communicator is communicators.world()
        else f"{communicator.name}, of {communicators.size()} ranks of the job",
        "backend": f"Keras {keras.__version__}, {keras.backend.backend()}, "
        + ("step compiled by XLA" if compiled else "step not compiled"),
        **_batch_norm(model),
        **_metrics(model),
        "data": data.description,
        "batch": _batch(data, size),
        "learning rate": f"{rate} ({scaled.rule})" if rate else "left as it is",
        "gradients": f"{len(weights)} of {nbytes / 2**20:.2f} MiB, averaged by "
        "examples before clipping"
        + ("" if wire is None else f"; sent as {wire.describe()}")
        + ("" if split else "; exchanged inside the optimizer (own train_step)"),
    }
    title = f"distkeras {__version__}"
    return "\n".join([title, *(f"  {k:<14}{v}" for k, v in lines.items())])


def _batch(data: Any, size: int) -> str:
    each = data.batch_size
    if not each:
        return "as dealt"
    by_sample = data.kind == "arrays" and not data.part.own
    whole = data.units_a_step if by_sample else each * size
    most = "" if each * size == whole else "at most "
    return f"{most}{each} a rank, {whole} global"


def _batch_norm(model: keras.Model) -> dict[str, str]:
    count = len(backends.synchronized_layers(model))
    others = len(backends.batch_norm_layers(model)) - count
    texts = []
    if count:
        texts.append(f"{count} synchronised; the backward pass is not compiled")
    if others:
        texts.append(f"{others} by the batch of each rank (synchronized=True: of all)")
    return {"batch norm": "; ".join(texts)} if texts else {}


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
