"""Checks of what is asked for with data, also where one rank does without sharding."""

from __future__ import annotations

from typing import Any


def check_shard(shard: Any) -> None:
    """Raises where it is no choice.

    Raises:
        ValueError: it is neither "auto" nor a truth value.

    Example:
        >>> check_shard("auto")
    """
    # Not by equality: 0, or False of NumPy's, would be taken for "auto".
    if shard is not True and shard is not False and shard != "auto":
        raise ValueError(
            "Expected `shard` to be 'auto' (or True, which is the same), or False "
            f"where each rank has data of its own. Received: {shard!r}"
        )


def check_batch_sizes(batch_size: int | None, global_batch_size: int | None) -> None:
    """Raises where both are given.

    Raises:
        ValueError: names both.

    Example:
        >>> check_batch_sizes(32, None)
    """
    if batch_size is not None and global_batch_size is not None:
        raise ValueError(
            "Expected `batch_size` (examples a step on each rank) or "
            "`global_batch_size` (on all ranks together), not both. Received: "
            f"batch_size={batch_size}, global_batch_size={global_batch_size}"
        )
