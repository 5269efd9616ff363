"""`load_model`: an ordinary Keras file becomes a model that all ranks train."""

from __future__ import annotations

import pathlib
import tempfile
from typing import Any

import keras

from distkeras._accumulated import part
from distkeras._optimizer import DistributedOptimizer
from distkeras.communicators import Communicator
from distkeras.communicators import collectively
from distkeras.communicators import world


def load_model(
    filepath: str | pathlib.Path,
    *,
    communicator: Communicator | None = None,
    **kwargs: Any,
) -> keras.Model:
    """Loads a model on every rank from a file that only rank 0 needs to see.

    The optimizer comes back with its state and exchanges gradients in `apply`, as
    after `DistributedOptimizer`, for loops of one's own; `Trainer` takes the model
    too. The learning rate is the one of a single process that files hold: `Trainer`
    scales it once.

    Args:
        filepath: a `.keras` or `.h5` file on rank 0.
        communicator: the ranks; by default all of them.
        **kwargs: further arguments of `keras.models.load_model`.

    Returns:
        The model, equal on all ranks.

    Raises:
        CommunicatorError: on every rank, if rank 0 cannot read the file or a rank
            cannot load it; the message says why.

    Example:
        ```python
        model = distkeras.load_model("best.keras")
        distkeras.Trainer(model).fit(x, y, epochs=10)
        ```
    """
    group = communicator or world()
    if group.size == 1:
        return keras.models.load_model(filepath, **kwargs)
    path = pathlib.Path(filepath)
    read = collectively(
        group,
        lambda: path.read_bytes() if group.rank == 0 else b"",
        what=f"reading {str(path)!r} on rank 0",
        advice="Only rank 0 needs to see the file. Is its path right, from the folder "
        "in which rank 0 was started?",
    )
    content = group.broadcast_object(read)

    def load() -> keras.Model:
        if group.rank == 0:
            return keras.models.load_model(filepath, **kwargs)
        with tempfile.TemporaryDirectory() as folder:
            copy = pathlib.Path(folder) / path.name
            copy.write_bytes(content)
            return keras.models.load_model(copy, **kwargs)

    model = collectively(
        group,
        load,
        what=f"loading the model of {str(path)!r}",
        advice="The file must be one that `keras.models.load_model` takes. Classes of "
        "your own must be registered or in `custom_objects=`, on every rank.",
    )
    if model.optimizer is not None:
        DistributedOptimizer(model.optimizer, communicator=group)
        part([model.optimizer], group)
    return model
