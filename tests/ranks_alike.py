"""Shares of a data set as the ranks of jobs of any size get them, in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distkeras import data
from distkeras.data._base import ShardedData


class OneOfMany:
    """Stands for one rank of several that all hold the same."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def allgather_object(self, obj: Any) -> list[Any]:
        return [obj] * self.size


def shards(size: int, make: Callable[[], Any], **options: Any) -> list[ShardedData]:
    """Returns every rank's share of data that each rank makes for itself."""
    return [
        data.shard(make(), communicator=OneOfMany(rank, size), **options)
        for rank in range(size)
    ]
