"""Writes this rank's gradients to a bucket, or to the part of it that goes next."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from distkeras.gradients._plan import HEADER
from distkeras.gradients._plan import Bucket


def pack_part(
    bucket: Bucket,
    arrays: Sequence[np.ndarray],
    weight: float,
    part: np.ndarray,
    start: int,
) -> None:
    """Writes gradients times `weight`, or as they are where the largest is wanted.

    Args:
        bucket: says where each lies.
        arrays: the gradients, in the order of the bucket's placements.
        weight: of this rank; with 0 it adds nothing, whatever its arrays hold.
        part: all of it is written but the header.
        start: the element of the bucket that it begins with.
    """
    stop, mean = start + part.size, bucket.reduction == "mean"
    if weight == 0:
        # Not by multiplication: the arrays of an empty batch may hold NaN.
        header = HEADER // bucket.dtype.itemsize
        part[max(header - start, 0) :] = 0 if mean else -np.inf
        return
    factor = bucket.dtype.type(weight)
    places = bucket.placements
    first = max(bisect.bisect_right(places, start, key=lambda p: p.offset) - 1, 0)
    for number in range(first, len(places)):
        place = places[number]
        if place.offset >= stop:
            break
        end = place.offset + place.length
        low, high = max(place.offset, start), min(end, stop)
        if low < high:
            values = arrays[number].reshape(-1)
            if high - low < place.length:
                values = values[low - place.offset : high - place.offset]
            out = part[low - start : high - start]
            if mean:
                np.multiply(values, factor, out=out, dtype=bucket.dtype)
            else:
                out[...] = values
        last = number + 1 == len(places)
        until = bucket.length if last else places[number + 1].offset
        if end < until:  # up to the next multiple of the alignment
            part[max(end, start) - start : max(until - start, 0)] = 0
