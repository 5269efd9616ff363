"""Exchanges a bucket as it is: packs, combines and divides it part by part."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distkeras.communicators import Op
from distkeras.gradients._channel import Channel
from distkeras.gradients._flags import StepFlags
from distkeras.gradients._packing import pack_part
from distkeras.gradients._plan import HEADER
from distkeras.gradients._plan import Bucket


def reduce_plain(
    channel: Channel,
    flags: StepFlags,
    bucket: Bucket,
    buffer: np.ndarray,
    examples: float,
    arrays: Sequence[np.ndarray],
) -> None:
    """Leaves the mean of gradients over all examples, or their maximum, in `buffer`.

    Each part is packed and divided while it is in the cache.

    Args:
        channel: carries it.
        flags: of the step; a bucket of means carries them.
        bucket: of the plan.
        buffer: of the bucket's length and dtype.
        examples: how many this rank's gradients average.
        arrays: this rank's gradients, in the order of the bucket's placements.
    """
    clock = channel.clock
    first = HEADER // bucket.dtype.itemsize
    mean = bucket.reduction == "mean"
    op: Op = "sum" if mean else "max"

    def pack(part: np.ndarray, start: int) -> None:
        clock.lap("exchange")
        if start == 0:
            part[:first] = 0
            if mean:
                flags.write(part, examples)
        pack_part(bucket, arrays, examples, part, start)
        clock.lap("pack")

    def unpack(part: np.ndarray, start: int) -> None:
        clock.lap("exchange")
        if not mean:
            return
        if start == 0:
            flags.read(part)
            part = part[first:]
        flags.divide(part)
        clock.lap("unpack")

    if clock.traced:  # packing, waiting and the exchange told apart
        pack(buffer, 0)
        channel.ready()
        channel.communicator.allreduce(buffer, op)
        unpack(buffer, 0)
    else:
        channel.communicator.allreduce_parts(buffer, op, pack=pack, unpack=unpack)
    channel.exchanged(buffer.nbytes)
