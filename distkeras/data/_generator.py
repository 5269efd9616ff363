"""Python generators: one stream, of which each rank takes every `size`-th batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from keras import tree
from keras.src.trainers.data_adapters.data_adapter_utils import (
    NUM_BATCHES_FOR_TENSOR_SPEC,
)

from distkeras._logging import LOGGER
from distkeras.communicators._base import Communicator
from distkeras.data._base import Part
from distkeras.data._digest import digest
from distkeras.data._streams import ShardedStream
from distkeras.data._streams import take_turns


class ShardedGenerator(ShardedStream):
    """This rank's batches of a generator.

    Every rank runs the same generator, and takes every `size`-th batch. A step of
    all ranks is `size` batches, so `steps_per_epoch` steps are `size` times as many
    batches. A generator cannot be started again: the next epoch goes on where the
    last one ended. (Keras repeats the first two batches in each epoch that
    follows the end of the generator; this does not.)

    Args:
        generator: yields tuples of one to three parts, as Keras has it.
        steps: `steps_per_epoch`. In evaluation it limits the data.
        part: this rank's part.
        training: for `fit`, not for `evaluate` or `predict`.
        seed: not used: the order is the generator's.
    """

    kind = "generator"

    def __init__(
        self,
        generator: Iterator[Any],
        *,
        steps: int | None,
        part: Part,
        training: bool,
        seed: int,
    ) -> None:
        super().__init__(part=part, training=training, seed=seed)
        # A validation takes so many batches each time, the next one goes on there.
        self._limit = None if training else steps
        # Looked at in the manner of Keras: the first batches tell types and shapes.
        first = list(itertools.islice(generator, NUM_BATCHES_FOR_TENSOR_SPEC))
        if not first and not part.own:
            raise ValueError(
                "Expected a generator that yields at least one batch. Received: one "
                "that yields none (a generator can be used only once)"
            )
        for batch in first[:1]:
            if not isinstance(batch, tuple):
                raise ValueError(
                    "Expected a generator of tuples: (inputs,), (inputs, targets) or "
                    "(inputs, targets, sample_weights). "
                    f"Received: a batch of type {type(batch).__name__}"
                )
        self._samples = first
        self._whole = itertools.chain(first, generator)
        self._stream = take_turns(self._whole, part.rank, part.size)

    def _first_batches(self) -> list[Any]:
        return self._samples or []

    def settle(self, communicator: Communicator) -> None:
        """Agrees on the number of steps; says so if ranks' first batches differ.

        Args:
            communicator: the ranks.
        """
        super().settle(communicator)
        leaves = [] if self.part.own else tree.flatten(self.first_batches())
        mine = [_digest(leaf) for leaf in leaves]
        alike = len({tuple(d) for d in communicator.allgather_object(mine)}) == 1
        if not alike and communicator.rank == 0:
            # Not `warnings.warn`, which may be made to raise, on this rank alone.
            LOGGER.warning(
                "The first batches of the generator are not the same on all ranks. "
                "Each rank takes its batches in turn: should their order differ, "
                "samples are lost and repeated. Seed what shuffles them, alike on all "
                "ranks, and begin with a generator that no call has used; or let each "
                "rank generate batches of its own, and pass `shard=False`. If it is "
                "noise or augmentation alone, all is well."
            )

    def _own_batches(self) -> Iterator[Any]:
        self._begin_pass()
        return self._stream if self._limit is None else self._rounds(self._limit)

    def start_at(
        self, number: int, units: int, *, steps: int | None = None, epochs: int = 0
    ) -> int:
        """Runs the generator up to where an earlier run left it."""
        whole = itertools.islice(self._whole, units, None)
        self._stream = take_turns(whole, self.part.rank, self.part.size)
        return super().start_at(number, units, steps=steps)

    def _rounds(self, count: int) -> Iterator[Any]:
        """This rank's batch of each of the next rounds, which are used up whole."""
        for _ in range(count):
            batches = list(itertools.islice(self._whole, self.part.size))
            if len(batches) <= self.part.rank:
                return
            yield batches[self.part.rank]

    @property
    def local_steps(self) -> int | None:
        """Not known in training; in evaluation what it was limited to."""
        return self._limit

    @property
    def single_pass(self) -> bool:
        """A generator cannot be started again."""
        return True

    def fingerprint(self) -> list[tuple[str, Any]]:
        """Types and shapes of the first batches."""
        return self._fingerprint_of_types()


def _digest(leaf: Any) -> str | None:
    """Digests a part of a batch; None for what is no dense array."""
    if not hasattr(leaf, "__array__"):
        return None
    array = np.atleast_1d(leaf.detach().cpu() if hasattr(leaf, "detach") else leaf)
    return None if array.dtype == object else digest(array)
