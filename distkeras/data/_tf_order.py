"""Whether a `tf.data` pipeline has the same order on every rank.

Every rank runs the whole pipeline and keeps its share of the batches, so the order
must be one. What decides it is read off the pipeline: the arrays that it holds, the
seeds of its shuffles, and whether its parallel steps keep the order. Code that
TensorFlow does not see into (`from_generator`, `py_function`) is taken to be the same
on every rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import numpy as np

from distkeras.data._digest import digest

_SHUFFLES = ("ShuffleDataset", "ShuffleAndRepeatDataset", "RandomDataset")
_RANDOM_OPS = (
    "RandomUniform",
    "RandomUniformInt",
    "RandomStandardNormal",
    "TruncatedNormal",
    "Multinomial",
)
# The graph of a pipeline contains the arrays that it holds in memory.
_MOST_BYTES_IN_GRAPH = 1 << 24
_MOST_STRINGS = 1024


def check_order(dataset: Any) -> list[tuple[str, Any]]:
    """Raises if ranks would see the pipeline in different orders.

    Args:
        dataset: a `tf.data.Dataset`.

    Returns:
        What decides the order: pairs of a name and a value, to be compared over
        the ranks.

    Raises:
        ValueError: if a shuffle is unseeded, or a step does not keep the order.
    """
    found: list[tuple[str, Any]] = []
    datasets = list(_walk(dataset))
    for node in datasets:
        name = type(node).__name__
        if name.startswith("_Shuffle") or name == "_RandomDataset":
            seeds = (int(node._seed), int(node._seed2))
            _check_seeds(seeds, "shuffle" if "Shuffle" in name else "random choice")
            found.append(("seeds of a shuffle in the pipeline", seeds))
        elif name == "_TensorSliceDataset":
            arrays = [_digest(tensor) for tensor in node._tensors]
            found.append(("arrays in the pipeline", arrays))
        elif name == "_ShardDataset":
            shard = (int(node._num_shards), int(node._index))
            found.append(("`shard` in the pipeline", shard))
        if getattr(node, "_deterministic", "") == "false":
            _raise_not_deterministic(name)
        for function in node._functions():
            graph = function.function.graph.as_graph_def()
            _check_nodes(graph.node, in_filter=name == "_FilterDataset")
            for nested in graph.library.function:
                _check_nodes(nested.node_def, in_filter=name == "_FilterDataset")
    # Alone among the datasets this one does not keep the option as an attribute.
    if any(type(node).__name__ == "_ParallelInterleaveDataset" for node in datasets):
        _check_serialized(dataset, datasets)
    return found


def files_of_caches(dataset: Any) -> list[str]:
    """Returns the files, of this machine, that a pipeline is about to write.

    Args:
        dataset: a `tf.data.Dataset`.
    """
    found = []
    for node in _walk(dataset):
        if type(node).__name__.strip("_") == "CacheDataset":
            path = node._filename.numpy().decode()
            if path and "://" not in path and not os.path.exists(f"{path}.index"):
                found.append(os.path.abspath(path))
    return found


def _digest(tensor: Any) -> str | None:
    """Digests what a pipeline holds in memory; of strings some.

    Not what they begin with alike, as the folder of all may be a rank's own.
    """
    import tensorflow as tf

    if not tf.is_tensor(tensor) or not hasattr(tensor, "numpy"):
        return None
    if tensor.dtype in (tf.variant, tf.resource):
        return None
    if tensor.dtype != tf.string:
        return digest(tensor if tensor.shape.rank else tf.reshape(tensor, [1]))
    flat = tf.reshape(tensor, [-1])
    count = int(tf.size(flat))
    picked = np.linspace(0, max(count - 1, 0), min(count, _MOST_STRINGS)).astype(int)
    strings = tf.gather(flat, picked).numpy().tolist()
    common = os.path.commonprefix(strings).rfind(b"/") + 1
    return digest([count, *(string[common:] for string in strings)])


def has_order_of_its_own(dataset: Any) -> bool:
    """Whether each iterator over a pipeline sees another order than the one before.

    TensorFlow counts them where nobody can set them back: a pass that has begun cannot
    be gone through again in the same process.

    Args:
        dataset: a `tf.data.Dataset`.
    """
    return any(
        (type(node).__name__.startswith("_Shuffle") and _reshuffles(node))
        or getattr(node, "_rerandomize", None)
        for node in _walk(dataset)
    )


def _reshuffles(node: Any) -> bool:
    return getattr(node, "_reshuffle_each_iteration", None) is not False


def _walk(dataset: Any) -> Iterator[Any]:
    """The pipeline's datasets, each once, in an order that depends on it alone."""
    seen: set[int] = set()
    waiting = [dataset]
    while waiting:
        node = waiting.pop()
        if id(node) not in seen:
            seen.add(id(node))
            yield node
            waiting.extend(node._inputs())


def _check_nodes(nodes: Iterable[Any], *, in_filter: bool) -> None:
    """Checks a function of the pipeline, which may make datasets itself."""
    by_name = {node.name: node for node in nodes}
    for node in by_name.values():
        if node.op.startswith(_SHUFFLES):
            at = 0 if node.op.startswith("RandomDataset") else 2
            seeds = [_constant(by_name, name) for name in node.input[at : at + 2]]
            _check_seeds(tuple(seeds), "shuffle")
        if node.op.endswith(("Dataset", "DatasetV2", "DatasetV3", "DatasetV4")) and (
            node.attr["deterministic"].s == b"false"
        ):
            _raise_not_deterministic(node.op)
        if in_filter and node.op in _RANDOM_OPS:
            pair = (node.attr["seed"].i, node.attr["seed2"].i)
            _check_seeds(pair, "random choice in `filter`")


def _constant(by_name: dict[str, Any], name: str) -> int | None:
    import tensorflow as tf

    node = by_name.get(name.split(":")[0])
    if node is None or node.op != "Const":
        return None
    return int(tf.make_ndarray(node.attr["value"].tensor))


def _check_serialized(dataset: Any, datasets: list[Any]) -> None:
    import tensorflow as tf

    held = sum(
        tensor.dtype.size * int(tf.size(tensor))
        for node in datasets
        for tensor in getattr(node, "_tensors", ())
        if tf.is_tensor(tensor) and tensor.dtype.size
    )
    if held > _MOST_BYTES_IN_GRAPH:
        return
    policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    serialized = dataset._as_serialized_graph(external_state_policy=policy)
    graph = tf.compat.v1.GraphDef.FromString(serialized.numpy())
    for node in graph.node:
        if "deterministic" in node.attr and node.attr["deterministic"].s == b"false":
            _raise_not_deterministic(node.op)


def _check_seeds(seeds: tuple[int | None, ...], what: str) -> None:
    # TensorFlow's pair for "draw a seed from the machine".
    if seeds == (0, 0):
        raise ValueError(
            "Expected a tf.data pipeline that has the same order on every rank. "
            f"Received: one with a {what} that has no seed, so that every rank would "
            "see another order, and samples would be lost and repeated. Either give "
            "it a seed (`.shuffle(buffer_size, seed=1)`: the order still changes "
            "each epoch), or call `keras.utils.set_random_seed(1)` before the "
            "pipeline is made, or shard before the shuffle "
            "(`.shard(distkeras.size(), distkeras.rank())`) and pass `shard=False`."
        )


def _raise_not_deterministic(name: str) -> None:
    raise ValueError(
        "Expected a tf.data pipeline that has the same order on every rank. "
        f"Received: one with a step ({name.strip('_')}) made with "
        "`deterministic=False`. Leave that out, or shard the pipeline yourself "
        "(`.shard(distkeras.size(), distkeras.rank())`) and pass `shard=False`."
    )
