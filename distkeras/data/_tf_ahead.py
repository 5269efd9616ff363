"""How `tf.data` works ahead of the step: as far as is said here, tuned by nobody.

TensorFlow's tuning runs in a thread of each iterator's own. An iterator that is left
in the middle of an epoch (an exception, a checkpoint before the end of the time, ranks
that were lost) waits for that thread when it is let go, with the lock of Python held.
The thread looks whether it should end before that is written down, and then sleeps on:
up to a minute, the longer the epoch has lasted (TensorFlow 2.21).
"""

from __future__ import annotations

from typing import Any

PARALLEL = 2
"""Batches that are made at a time."""

_AHEAD = 2


def work_ahead(dataset: Any) -> Any:
    """Returns a `tf.data` pipeline that makes batches before they are asked for.

    Args:
        dataset: of batches, which says of nothing that it is to be tuned.
    """
    return untuned(dataset).prefetch(_AHEAD)


def untuned(dataset: Any) -> Any:
    """Returns a `tf.data` pipeline that ends at once wherever it is left."""
    import tensorflow as tf

    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
