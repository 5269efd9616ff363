"""Puts the predictions of all ranks together, in the order of the data."""

from __future__ import annotations

from typing import Any
from typing import Literal

import numpy as np
from keras import tree

from distkeras.communicators._base import Communicator
from distkeras.data._base import ShardedData

# Kind, shape (ragged: rows only) and dtype of an output.
Layout = tuple[str, tuple[int, ...], str]


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
        >>> from distkeras.data import shard
        >>> data = shard(x, communicator=world, training=False)
        >>> own = model.predict(data, verbose=0)
        >>> gather_predictions(own, data, world).shape == (len(x), 1)
        True
    """
    if to not in ("all", "rank0"):
        raise ValueError(f"Expected `to` to be 'all' or 'rank0'. Received: {to!r}")
    rows = None if sharded.part.own else sharded.rows_seen
    leaves = tree.flatten(local_outputs)
    mine = (rows, [_layout(leaf) for leaf in leaves])
    ranks = communicator.allgather_object(mine)
    all_rows = [theirs for theirs, _ in ranks]
    keep = to == "all" or communicator.rank == 0
    gathered = []
    for index, leaf in enumerate(leaves):
        layouts = [theirs[index] for _, theirs in ranks]
        _check(layouts, all_rows)
        whole = _gather_leaf(leaf, layouts, communicator, keep=keep)
        gathered.append(_reorder(whole, all_rows) if keep else None)
    return tree.pack_sequence_as(local_outputs, gathered) if keep else None


def _layout(leaf: Any) -> Layout:
    if isinstance(leaf, np.ndarray):
        return "array", leaf.shape, str(leaf.dtype)
    if hasattr(leaf, "to_tensor"):
        return "ragged", (int(leaf.shape[0]),), str(leaf.dtype)
    return type(leaf).__name__, (), ""


def _check(layouts: list[Layout], all_rows: list[list[int] | None]) -> None:
    """Raises on all ranks alike: all of them hold all layouts."""
    kinds = {kind for kind, *_ in layouts}
    if kinds - {"array", "ragged"}:
        raise ValueError(
            "Expected the outputs of the model to be dense or ragged, to be gathered "
            f"from all ranks. Received: {sorted(kinds)}"
        )
    counts = [shape[0] if shape else None for _, shape, _ in layouts]
    expected = [
        count if rows is None else sum(rows)
        for rows, count in zip(all_rows, counts, strict=True)
    ]
    if counts != expected or None in counts:
        raise ValueError(
            "Expected outputs with one row an example, so rows by rank of "
            f"{expected}. Received: {counts}"
        )


def _gather_leaf(
    leaf: Any, layouts: list[Layout], communicator: Communicator, *, keep: bool
) -> Any:
    """The rows of all ranks, one rank after the other."""
    trailing = {shape[1:] for _, shape, _ in layouts if shape[0]}
    if {kind for kind, *_ in layouts} == {"array"} and len(trailing) <= 1:
        return _gather_dense(leaf, layouts, communicator, keep=keep)
    return _gather_ragged(leaf, communicator)


def _gather_dense(
    leaf: np.ndarray,
    layouts: list[Layout],
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


def _reorder(whole: Any, all_rows: list[list[int] | None]) -> Any:
    """From the ranks' rows one after another to the order of the data."""
    size = len(all_rows)
    number = [
        np.repeat(np.arange(len(rows)) * size + rank, rows)
        for rank, rows in enumerate(all_rows)
        if rows is not None
    ]
    if len(number) < size or size == 1:
        return whole
    order = np.argsort(np.concatenate(number), kind="stable")
    if isinstance(whole, np.ndarray):
        return whole[order]
    import tensorflow as tf

    return tf.gather(whole, order)
