"""Chooses how an input is sharded, and lets the ranks agree on it."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any
from typing import Literal

from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import array_data_adapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDataset

from distkeras._errors import MismatchError
from distkeras.communicators._agreement import agree
from distkeras.communicators._agreement import collectively
from distkeras.communicators._base import Communicator
from distkeras.data._base import Part
from distkeras.data._base import ShardedData
from distkeras.data._options import check_batch_sizes
from distkeras.data._options import check_shard
from distkeras.data._order import Shuffle


def shard(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    communicator: Communicator,
    batch_size: int | None = None,
    global_batch_size: int | None = None,
    shuffle: Shuffle = True,
    class_weight: dict[int, float] | None = None,
    steps_per_epoch: int | None = None,
    seed: int = 0,
    training: bool = True,
    shard: bool | Literal["auto"] = "auto",
) -> ShardedData:
    """This rank's share of a data set, for `keras.Model.fit` and its siblings.

    Collective: all ranks call it with the same data. Arrays are dealt by sample:
    step k over all ranks is batch k of one process with the global batch size. What
    comes in batches (`tf.data.Dataset`, `keras.utils.PyDataset`, generators, torch
    `DataLoader`) is dealt by batch, in turn: step k takes batches `k * size` to
    `k * size + size - 1`.

    Args:
        x: arrays in any structure, a `tf.data.Dataset`, a `keras.utils.PyDataset`,
            a generator or a torch `DataLoader`. A `ShardedData` is taken as it is.
        y: labels, for arrays only.
        sample_weight: for arrays only.
        communicator: the ranks.
        batch_size: samples a step and rank, for arrays only. 32 as in Keras.
        global_batch_size: samples a step over all ranks, instead.
        shuffle: as in Keras: True, False or "batch". One order for all ranks, and
            another one each pass. For arrays and PyDatasets.
        class_weight: as in Keras, for the kinds that Keras takes it for.
        steps_per_epoch: steps of all ranks together. In training it has to be
            passed on to Keras too. In evaluation and prediction it must not: the
            data is cut to as many steps here.
        seed: decides the order together with the number of the pass.
        training: whether all ranks need the same number of steps. False for
            `evaluate` and `predict`.
        shard: "auto" or True, or False where the data is already this rank's own.
            Then nothing is dealt; in training the number of steps is still agreed.

    Returns:
        A Keras data adapter, to be passed as `x`.

    Raises:
        MismatchError: on every rank, if the ranks do not pass the same data.
        ValueError: on every rank, if the data or the options are not usable.

    Example:
        >>> data = shard(x, y, communicator=world, batch_size=32)
        >>> history = model.fit(data, epochs=3, verbose=0)
    """
    if isinstance(x, ShardedData):
        x.deal_to(communicator.rank, communicator.size)
        _agree_on_data(communicator, x)
        x.settle(communicator)
        return x
    check_shard(shard)
    own = shard is False
    part = Part(
        rank=0 if own else communicator.rank,
        size=1 if own else communicator.size,
        own=own,
        stream=communicator.rank if own else 0,
    )
    if own and global_batch_size is not None and batch_size is None:
        batch_size, more = divmod(global_batch_size, communicator.size)
        batch_size += communicator.rank < more
        global_batch_size = None

    def local() -> ShardedData:
        return _adapter(
            x,
            y,
            sample_weight,
            batch_size=batch_size,
            global_batch_size=global_batch_size,
            shuffle=shuffle,
            class_weight=class_weight,
            steps=steps_per_epoch,
            part=part,
            training=training,
            seed=seed,
        )

    data = _same_error_everywhere(communicator, local)
    if not own:
        _agree_on_data(communicator, data)
    data.settle(communicator)
    return data


def are_arrays(x: Any, y: Any = None, sample_weight: Any = None) -> bool:
    """Whether data is dealt by sample: arrays, tensors, data frames."""
    return array_data_adapter.can_convert_arrays((x, y, sample_weight))


def _adapter(
    x: Any,
    y: Any,
    sample_weight: Any,
    *,
    batch_size: int | None,
    global_batch_size: int | None,
    shuffle: Shuffle,
    class_weight: dict[int, float] | None,
    steps: int | None,
    part: Part,
    training: bool,
    seed: int,
) -> ShardedData:
    """Picks the kind, in the order in which Keras does."""
    _check_counts(batch_size, global_batch_size, steps)
    if are_arrays(x, y, sample_weight):
        from distkeras.data._arrays import ShardedArrays

        return ShardedArrays(
            x,
            y,
            sample_weight,
            batch_size=batch_size,
            global_batch_size=global_batch_size,
            steps=steps,
            shuffle=shuffle,
            class_weight=class_weight,
            part=part,
            training=training,
            seed=seed,
        )
    kind = _kind_of_batches(x)
    for name, value in (("y", y), ("sample_weight", sample_weight)):
        if value is not None:
            raise ValueError(
                f"Expected no `{name}` with a {kind}, which holds it itself. "
                f"Received: {name} of type {type(value).__name__}"
            )
    if global_batch_size is not None:
        raise ValueError(
            f"Expected no `global_batch_size` with a {kind}, which comes in batches. "
            f"Received: global_batch_size={global_batch_size}. Its batches are those "
            "of one rank: divide the batch size by the number of ranks there."
        )
    options: dict[str, Any] = dict(part=part, training=training, seed=seed, steps=steps)
    if kind == "tf.data.Dataset":
        from distkeras.data._tf_dataset import ShardedTFDataset

        return ShardedTFDataset(x, class_weight=class_weight, **options)
    if kind == "PyDataset":
        from distkeras.data._py_dataset import ShardedPyDataset

        return ShardedPyDataset(
            x, class_weight=class_weight, shuffle=bool(shuffle), **options
        )
    if class_weight is not None:
        raise ValueError(
            f"Expected no `class_weight` with a {kind}, as in Keras: yield sample "
            f"weights instead. Received: class_weight={class_weight}"
        )
    if kind == "torch DataLoader":
        from distkeras.data._torch_loader import ShardedTorchLoader

        return ShardedTorchLoader(x, **options)
    from distkeras.data._generator import ShardedGenerator

    return ShardedGenerator(x, **options)


def _kind_of_batches(x: Any) -> str:
    if data_adapters.is_tf_dataset(x):
        return "tf.data.Dataset"
    if isinstance(x, PyDataset):
        return "PyDataset"
    if data_adapters.is_torch_dataloader(x):
        return "torch DataLoader"
    if isinstance(x, types.GeneratorType):
        return "generator"
    raise ValueError(
        "Expected `x` to be arrays, a tf.data.Dataset, a keras.utils.PyDataset, a "
        f"Python generator or a torch DataLoader. Received: {type(x).__name__}"
    )


def _check_counts(
    batch_size: int | None, global_batch_size: int | None, steps: int | None
) -> None:
    counts = {
        "batch_size": batch_size,
        "global_batch_size": global_batch_size,
        "steps_per_epoch": steps,
    }
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ValueError(f"Expected `{name}` to be at least 1. Received: {value}")
    check_batch_sizes(batch_size, global_batch_size)


def _same_error_everywhere(
    communicator: Communicator, function: Callable[[], ShardedData]
) -> ShardedData:
    """Runs a local function; an error on one rank becomes an error on all."""
    failure: Exception | None = None
    try:
        result = function()
    except Exception as error:
        failure = error
    text = None if failure is None else f"{type(failure).__name__}: {failure}"
    texts = communicator.allgather_object(text)
    if failure is not None and len(set(texts)) == 1:
        raise failure

    def sharding_the_data() -> None:
        if failure is not None:
            raise failure

    if any(text is not None for text in texts):
        collectively(communicator, sharding_the_data)
    return result


def _agree_on_data(communicator: Communicator, data: ShardedData) -> None:
    """Dealing needs the same data on every rank."""
    options = [("kind of data", data.kind), ("training", data.training)]
    if data.training:
        options.append(("seed", data.seed))
    rows = [f"{name}: {value}" for name, value in [*options, *data.fingerprint()]]
    try:
        agree(communicator, "the data", rows)
    except MismatchError as error:
        raise MismatchError(
            f"{error}\nTo be dealt to the ranks, the data must be whole and the same "
            "on every rank, in the same order (seed what makes or shuffles it). If "
            "each rank has data of its own already, pass `shard=False`."
        ) from None
