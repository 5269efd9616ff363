"""Iterators over the first batches of others."""

from __future__ import annotations

import itertools
from typing import Any

import tensorflow as tf

from distkeras.data._tf_ahead import untuned


def first_batches(iterator: Any, count: int) -> Any:
    """Takes batches from an iterator; returns another one over these alone.

    A function that was traced for the first one takes the second without being traced
    again, and an execution of several steps ends with it.

    Args:
        iterator: of a `tf.data.Dataset`, eager.
        count: batches; fewer where there are no more.

    Raises:
        StopIteration: if there is none.
    """
    held = list(itertools.islice(iterator, count))
    if not held:
        raise StopIteration
    dataset = tf.data.Dataset.from_generator(
        lambda: iter(held), output_signature=iterator.element_spec
    )
    return iter(untuned(dataset))
