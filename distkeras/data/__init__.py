"""Sharding: every kind of input that Keras takes, dealt to the ranks."""

from distkeras.data._base import Part as Part
from distkeras.data._base import ShardedData as ShardedData
from distkeras.data._options import check_batch_sizes as check_batch_sizes
from distkeras.data._options import check_shard as check_shard
from distkeras.data._predictions import gather_predictions as gather_predictions
from distkeras.data._shard import are_arrays as are_arrays
from distkeras.data._shard import shard as shard

__all__ = ["Part", "ShardedData", "gather_predictions", "shard"]
