"""Puts the predictions of all ranks together, in the order of the data."""

from __future__ import annotations

from typing import Any
from typing import Literal

import numpy as np
from keras import tree

from distkeras.communicators._base import Communicator
from distkeras.data._base import ShardedData


def gather_predictions(
    local_outputs: Any,
    sharded: ShardedData,
    communicator: Communicator,
    to: Literal["all", "rank0"] = "all",
) -> Any:
    """The predictions for the whole data, in the order of the data.

    Collective.

    Args:
        local_outputs: what `keras.Model.predict(sharded)` returned on this rank:
            an array of shape `(rows, ...)`, or a nested structure of them.
        sharded: the data that was predicted, from `shard(..., training=False)`.
        communicator: the ranks.
        to: "all", or "rank0" to return None on the other ranks.

    Returns:
        The same structure with the rows of all ranks: `(all rows, ...)`. With
        `shard=False` the rows of rank 0 come first, then those of rank 1, and so on.

    Raises:
        ValueError: on every rank, if an output has another number of rows than the
            data, or is sparse.

    Example:
        >>> data = shard(x, communicator=world, training=False)
        >>> gather_predictions(model.predict(data), data, world).shape
        (103, 10)
    """
    if to not in ("all", "rank0"):
        raise ValueError(f"Expected `to` to be 'all' or 'rank0'. Received: {to!r}")
    rows = None if sharded.part.own else sharded.rows_seen
    leaves = tree.flatten(local_outputs)
    layouts = communicator.allgather_object((rows, [_layout(leaf) for leaf in leaves]))
    all_rows = [layout[0] for layout in layouts]
    gathered = [
        _gather_leaf(
            leaf,
            [layout[1][index] for layout in layouts],
            all_rows,
            communicator,
            keep=to == "all" or communicator.rank == 0,
        )
        for index, leaf in enumerate(leaves)
    ]
    if to == "rank0" and communicator.rank != 0:
        return None
    return tree.pack_sequence_as(local_outputs, gathered)


def _layout(leaf: Any) -> tuple[str, tuple[int, ...], str]:
    """Kind, shape and dtype of an output."""
    if isinstance(leaf, np.ndarray):
        return "array", leaf.shape, str(leaf.dtype)
    if hasattr(leaf, "to_tensor"):
        return "ragged", (int(leaf.shape[0]),), str(leaf.dtype)
    return type(leaf).__name__, (), ""


def _gather_leaf(
    leaf: Any,
    layouts: list[tuple[str, tuple[int, ...], str]],
    all_rows: list[list[int] | None],
    communicator: Communicator,
    *,
    keep: bool,
) -> Any:
    kinds = {kind for kind, *_ in layouts}
    if kinds - {"array", "ragged"}:
        raise ValueError(
            "Expected the outputs of the model to be dense or ragged, to be gathered "
            f"from all ranks. Received: {sorted(kinds)}"
        )
    trailing = {shape[1:] for _, shape, _ in layouts if shape and shape[0]}
    if kinds == {"array"} and len(trailing) <= 1:
        whole = _gather_dense(leaf, layouts, communicator, keep=keep)
    else:
        whole = _gather_ragged(leaf, communicator)
    if not keep:
        return None
    counts = [shape[0] for _, shape, _ in layouts]
    return _reorder(whole, counts, all_rows)


def _gather_dense(
    leaf: np.ndarray,
    layouts: list[tuple[str, tuple[int, ...], str]],
    communicator: Communicator,
    *,
    keep: bool,
) -> np.ndarray | None:
    """Gathers bytes, which is exact for every dtype."""
    if leaf.dtype.hasobject:
        parts = communicator.allgather_object(leaf)
        return np.concatenate(parts) if keep else None
    flat = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
    pieces = communicator.allgather(flat)
    if not keep:
        return None
    filled = [
        np.asarray(piece).view(leaf.dtype).reshape(shape)
        for piece, (_, shape, _) in zip(pieces, layouts, strict=True)
        if shape[0]
    ]
    return np.concatenate(filled) if filled else leaf


def _gather_ragged(leaf: Any, communicator: Communicator) -> Any:
    """Rows whose shapes differ: as Python lists, put together as Keras would."""
    import tensorflow as tf

    rows = leaf.to_list() if hasattr(leaf, "to_list") else leaf.tolist()
    parts = communicator.allgather_object(rows)
    return tf.ragged.constant([row for part in parts for row in part], leaf.dtype)


def _reorder(whole: Any, counts: list[int], all_rows: list[list[int] | None]) -> Any:
    """From the ranks' rows one after another to the order of the data."""
    batches = [rows for rows in all_rows if rows is not None]
    if len(batches) < len(all_rows):
        return whole
    if [sum(rows) for rows in batches] != counts:
        raise ValueError(
            f"Expected as many rows as the ranks predicted from, "
            f"{[sum(rows) for rows in batches]}. Received: {counts}. Each output of "
            "the model must have one row an example."
        )
    size = len(batches)
    number = [
        np.repeat(np.arange(len(rows)) * size + rank, rows)
        for rank, rows in enumerate(batches)
    ]
    order = np.argsort(np.concatenate(number), kind="stable")
    if isinstance(whole, np.ndarray):
        return whole[order]
    import tensorflow as tf

    return tf.gather(whole, order)
