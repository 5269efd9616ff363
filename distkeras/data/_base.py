"""What all sharded inputs have in common."""

from __future__ import annotations

import abc
import dataclasses
import math
import platform
from collections.abc import Sequence
from typing import Any
from typing import ClassVar

from keras.src.trainers.data_adapters.data_adapter import DataAdapter

from distkeras.communicators._base import Communicator


@dataclasses.dataclass(frozen=True)
class Part:
    """How the data is dealt: this rank takes part `rank` of `size`.

    Args:
        rank: this rank's number among those the data is dealt to.
        size: how many ranks the data is dealt to: all of them, or 1 where the data
            is already this rank's own.
        own: whether the data is already this rank's own (`shard=False`).
        stream: makes the random numbers of ranks with data of their own differ.
    """

    rank: int
    size: int
    own: bool = False
    stream: int = 0

    def seeds(self, seed: int) -> tuple[int, ...]:
        """What `_order.generator` takes beside the number of the pass."""
        return (seed, self.stream) if self.own else (seed,)


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a pass begins that an earlier run has left: see `start_at`."""

    number: int
    units: int
    steps: int


class ShardedData(DataAdapter):
    """This rank's share of a data set, as a Keras data adapter.

    Keras takes a `DataAdapter` as it is in `fit`, `evaluate` and `predict`.

    In training every rank has the same number of steps. A rank that has no example
    in a step gets a batch of zero rows. Where the number of steps is not known
    beforehand (`num_batches` is None) such batches follow the last one without end:
    the training step has to notice that no rank has examples left. In evaluation
    and prediction nothing is padded, but a rank without examples gets one batch of
    zero rows, since Keras builds metrics at the first batch.

    Args:
        part: this rank's part.
        training: for `fit`, not for `evaluate` or `predict`.
        seed: with the number of the pass decides the order; equal on all ranks.

    Attributes:
        kind: what the user passed, in words.
        part: this rank's part.
        training: for `fit`, not for `evaluate` or `predict`.
        seed: decides the order, together with the number of the pass.
        ends: set where nobody notices batches of zero rows: none are then made after
            the last one, in training too.
    """

    kind: ClassVar[str]

    def __init__(self, *, part: Part, training: bool, seed: int) -> None:
        self.part = part
        self.training = training
        self.seed = seed
        self._next_pass = 0
        self._steps: int | None = None
        self._examples: int | None = None
        self._start: Start | None = None
        self._going_on: Start | None = None
        self.ends = False

    @property
    def start_pass(self) -> int:
        """The number of the next pass over the data."""
        return self._next_pass

    @start_pass.setter
    def start_pass(self, number: int) -> None:
        self._next_pass = number

    def set_epoch(self, epoch: int) -> None:
        """Gives the next pass over the data the number of the epoch.

        To be called before each epoch, so that a run that is resumed at an epoch
        sees the same order as one that was not interrupted. A pass under way goes
        on: with `steps_per_epoch` smaller than a pass, Keras continues it.

        Args:
            epoch: the number of the epoch that is about to begin, from 0.
        """
        self._next_pass = epoch

    def _begin_pass(self) -> tuple[int, int]:
        """The number of the pass that begins now, and the units to pass over."""
        number, units = self._next_pass, 0
        self._going_on, self._start = self._start, None
        going_on = self._going_on
        if going_on and going_on.units == self.units and going_on.number != number:
            # It was to go on at its very end: nobody has asked for its batches.
            self._going_on = None
        if self._going_on is not None:
            number, units = self._going_on.number, self._going_on.units
        self._next_pass = number + 1
        return number, units

    # A pass that goes on where an earlier run left it

    @property
    def units_a_step(self) -> int:
        """What a step of all ranks takes of the data: batches, or else samples."""
        return self.part.size

    @property
    def units(self) -> int | None:
        """How many batches, or else samples, a pass over the data has, if known."""
        return None

    def units_after(self, steps: int) -> int:
        """What so many steps of a pass take of the data."""
        if steps == 0:
            return 0
        start = self._start or self._going_on
        taken = steps * self.units_a_step
        if start is not None:  # which need not be where a step of these ranks ends
            taken += start.units - start.steps * self.units_a_step
        return taken if self.units is None else min(taken, self.units)

    def start_at(
        self, number: int, units: int, *, steps: int | None = None, epochs: int = 0
    ) -> int:
        """Lets the next pass go on where one of an earlier run was left.

        What was seen of it is neither made nor read, where the data can tell it by
        its number. To be called once, after the data has been looked at.

        Args:
            number: of the pass.
            units: what is to be passed over, as of `units_after`.
            steps: as many; needed where each rank has its own data.
            epochs: how many the earlier run had been through.

        Returns:
            The steps of this pass that are passed over.
        """
        total, each = self.units, self.units_a_step
        if steps is None and total is None:
            steps = math.ceil(units / each)
        elif steps is None:
            steps = (self._steps or 0) - math.ceil(((total or 0) - units) / each)
        self._start = Start(number, units, steps)
        return steps

    def deal_to(self, rank: int, size: int) -> None:
        """Takes the part of this rank of so many, before a pass begins.

        Raises:
            ValueError: if the data was made for other ranks.
        """
        if (rank, size) != (self.part.rank, self.part.size):
            raise ValueError(
                f"Expected data for rank {rank} of {size}. Received: {self.kind} for "
                f"rank {self.part.rank} of {self.part.size}"
            )

    def describe_pass(self, steps: int) -> Any:
        """What else a checkpoint is to hold, so many steps into a pass: plain JSON."""
        return None

    def recall_pass(self, described: Any) -> None:  # noqa: B027
        """Takes over what `describe_pass` gave in an earlier run, before `start_at`."""

    @property
    def _uneven_start(self) -> bool:
        """Whether a pass goes on where no step of these ranks would end."""
        start = self._start or self._going_on
        if start is None or start.units == self.units:
            return False
        return start.units % self.units_a_step != 0

    @property
    @abc.abstractmethod
    def local_steps(self) -> int | None:
        """Steps a pass that this rank has data for, or None if it is not known."""

    def settle(self, communicator: Communicator) -> None:
        """Agrees on the number of steps a pass. Collective.

        In training it is that of the rank with the most, on all ranks; and it is
        unknown on all ranks if it is unknown on one.

        Args:
            communicator: the ranks.

        Raises:
            ValueError: on every rank, if two ranks of a host would write one file.
        """
        self._steps = self.local_steps
        examples = self._local_examples()
        # One message, whatever kind of data ranks have of their own.
        files = [f"{platform.node()}:{path}" for path in self.files_to_write]
        ranks = communicator.allgather_object((self._steps, examples, files))
        if self.training:
            steps = [theirs for theirs, *_ in ranks]
            self._steps = None if None in steps else max(steps)
        if self.part.own:
            counts = [theirs for _, theirs, _ in ranks]
            examples = None if None in counts else sum(counts)
        self._examples = examples
        _check_files([theirs for *_, theirs in ranks])

    @property
    def files_to_write(self) -> list[str]:
        """Files that this rank is going to write while it goes through the data."""
        return []

    def _local_examples(self) -> int | None:
        """Examples of the data this rank was given, or None if it is not known."""
        return None

    @property
    def num_batches(self) -> int | None:
        """Steps a pass, padding included; None if it is not known."""
        return self._steps

    @property
    def batch_size(self) -> int | None:
        """Samples a step and rank, or None if it is not known."""
        return None

    @property
    def may_be_empty(self) -> bool:
        """Whether a rank may have a step without examples; the same on all ranks."""
        return True

    @property
    def has_partial_batch(self) -> bool | None:
        """Whether the last batch is smaller; None if it is not known."""
        return None

    @property
    def partial_batch_size(self) -> int | None:
        """Samples in this rank's last batch, if that is smaller."""
        return None

    @property
    def single_pass(self) -> bool:
        """Whether the data cannot be gone through again."""
        return False

    @property
    def can_begin_again(self) -> bool:
        """Whether a pass that has begun can be gone through again in this process."""
        return not self.single_pass

    @property
    def num_examples(self) -> int | None:
        """Examples of all ranks together, or None if it is not known."""
        return self._examples

    @property
    def description(self) -> str:
        """One line for the user: what the data is and how it is dealt."""
        steps = "unknown number of" if self.num_batches is None else self.num_batches
        if self.part.own:
            how = "each rank has its own"
        else:
            how = f"dealt to {self.part.size} ranks, {self._how()}"
        return f"{self.kind}: {how}; {steps} steps"

    def _how(self) -> str:
        return "batches in turn"

    @property
    def rows_seen(self) -> list[int] | None:
        """Rows of each batch of the last pass, for data dealt in batches.

        None where each rank's share is one contiguous piece of the data.
        """
        return None

    def get_tf_samples(self) -> Any:
        """A `tf.data.Dataset` of batches to be looked at: that takes none of the data.

        Of the types of `get_tf_dataset`, but not necessarily this rank's batches.
        """
        return self.get_tf_dataset()

    def fingerprint(self) -> list[tuple[str, Any]]:
        """What must be the same on all ranks when one data set is dealt.

        Returns:
            Pairs of a name, in the user's words, and a value that compares equal
            and can be pickled.
        """
        return []


def _check_files(files: Sequence[Sequence[str]]) -> None:
    """Raises if two ranks would write one file, `host:path`."""
    writers: dict[str, list[int]] = {}
    for rank, names in enumerate(files):
        for name in dict.fromkeys(names):
            writers.setdefault(name, []).append(rank)
    for name, ranks in writers.items():
        if len(ranks) > 1:
            raise ValueError(
                "Expected every rank to cache what it has read in a file of its own. "
                f"Received: {name} on ranks {', '.join(map(str, ranks))}. Put the "
                'rank into the name: `.cache(f"cache-{distkeras.rank()}")`. Or cache '
                "in memory: `.cache()`."
            )
