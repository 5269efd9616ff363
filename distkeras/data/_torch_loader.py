"""torch `DataLoader`: rebuilt with a sampler that deals its batches in turn.

PyTorch is imported only here, and this module only for a `DataLoader`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from keras import tree
from keras.src.trainers.data_adapters.data_adapter_utils import (
    NUM_BATCHES_FOR_TENSOR_SPEC,
)

from distkeras.data._base import Part
from distkeras.data._digest import digest
from distkeras.data._global_random import same_on_all_ranks
from distkeras.data._streams import ShardedStream
from distkeras.data._streams import take_turns


class ShardedTorchLoader(ShardedStream):
    """This rank's batches of a torch `DataLoader`.

    The samplers run on every rank from one seed, and each rank loads every
    `size`-th batch of theirs, with the workers and options of the loader. An
    `IterableDataset` must yield the same on every rank: each rank runs the whole and
    keeps every `size`-th batch.

    Args:
        loader: the user's.
        steps: `steps_per_epoch`. In evaluation it limits the data.
        part: this rank's part.
        training: for `fit`, not for `evaluate` or `predict`.
        seed: with the number of the pass decides what the samplers draw.
    """

    kind = "torch DataLoader"

    def __init__(
        self,
        loader: Any,
        *,
        steps: int | None,
        part: Part,
        training: bool,
        seed: int,
    ) -> None:
        super().__init__(part=part, training=training, seed=seed)
        self._loader = loader
        self._limit = None if training or not steps else steps * part.size
        self._iterable = isinstance(loader.dataset, torch.utils.data.IterableDataset)
        # A sampler of batches, or, where the dataset makes batches, of indices.
        batches = loader.batch_sampler
        self._sampler = loader.sampler if batches is None else batches
        if not self._iterable:
            self._check_sampler()
        if self._count() == 0 and not part.own:
            raise ValueError("Expected at least one batch. Received: an empty loader")
        self.first_batches()

    def _check_sampler(self) -> None:
        inner = self._loader.sampler
        distributed = torch.utils.data.distributed.DistributedSampler
        if (
            self.part.size > 1
            and isinstance(inner, distributed)
            and inner.num_replicas > 1
        ):
            raise ValueError(
                "Expected a torch DataLoader of the whole data. Received: one with a "
                "DistributedSampler, which deals it already. Leave the sampler out, "
                "or pass `shard=False`."
            )
        try:
            len(self._sampler)
        except (TypeError, NotImplementedError):
            raise ValueError(
                "Expected a torch DataLoader whose sampler has a length. Received: "
                f"one with a {type(inner).__name__} that has none. Give it a length, "
                "or use an IterableDataset."
            ) from None

    def _count(self) -> int | None:
        """Batches a pass of the whole data; None if it is not known."""
        count = None if self._iterable else len(self._sampler)
        if self._limit is None or count is None:
            return count
        return min(count, self._limit)

    @property
    def units(self) -> int | None:
        """Batches a pass, or None if it is not known."""
        return self._count()

    @property
    def local_steps(self) -> int | None:
        """Steps a pass, or None if it is not known."""
        return self._steps_of(self._count())

    @property
    def batch_size(self) -> int | None:
        """Samples a batch, where the loader says so."""
        return self._loader.batch_size

    def _local_examples(self) -> int | None:
        if self._iterable or self._limit is not None:
            return None
        return len(self._loader.dataset)

    def fingerprint(self) -> list[tuple[str, Any]]:
        """Length, sampler, generators and types."""
        rows: list[tuple[str, Any]] = [
            ("number of batches", self._count()),
            ("sampler", type(self._loader.sampler).__name__),
        ]
        for state in self._generators():
            rows.append(("state of the sampler's generator", digest(state.get_state())))
        return [*rows, *self._fingerprint_of_types()]

    def _generators(self) -> list[torch.Generator]:
        """The generators that the user gave to samplers."""
        samplers = (self._loader.sampler, self._sampler)
        found = [getattr(sampler, "generator", None) for sampler in samplers]
        return [state for state in found if isinstance(state, torch.Generator)]

    @contextlib.contextmanager
    def _generator_states_kept(self) -> Iterator[None]:
        before = [(state, state.get_state()) for state in self._generators()]
        yield
        for state, content in before:
            state.set_state(content)

    def _first_batches(self) -> list[Any]:
        if self._iterable:
            batches = iter(self._rebuilt(None, num_workers=0))
            looked_at = min(NUM_BATCHES_FOR_TENSOR_SPEC, self._limit or 2)
            return [
                _standardize(batch)
                for _, batch in zip(range(looked_at), batches, strict=False)
            ]
        with self._generator_states_kept():
            drawn = self._draw(0)[:NUM_BATCHES_FOR_TENSOR_SPEC]
        loader = self._rebuilt(drawn, num_workers=0)
        return [_standardize(batch) for batch in loader]

    def _own_batches(self) -> Iterator[Any]:
        number, seen = self._begin_pass()
        rank, size = self.part.rank, self.part.size
        if self._iterable:
            batches = take_turns(self._rebuilt(None), seen + rank, size)
            own = None if self._limit is None else self._limit // size
            for index, batch in enumerate(batches):
                if own is not None and index >= own:
                    return
                yield _standardize(batch)
            return
        drawn = self._draw(number)[seen : self._limit]
        for batch in self._rebuilt(drawn[rank::size]):
            yield _standardize(batch)

    def _draw(self, number: int) -> list[Any]:
        """All batches of a pass, as indices, the same on every rank."""
        seed = self.seed + self.part.stream
        with same_on_all_ranks(seed, number) as shared, torch.random.fork_rng([]):
            torch.manual_seed(shared)
            return list(self._sampler)

    def _rebuilt(self, drawn: list[Any] | None, **changes: Any) -> Any:
        """The user's loader over other indices; with None over its own."""
        loader = self._loader
        options: dict[str, Any] = dict(
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor,
        )
        options.update(changes)
        if options["num_workers"] == 0:
            options.update(
                timeout=0, multiprocessing_context=None, prefetch_factor=None
            )
        if drawn is None:
            options.update(batch_size=loader.batch_size, drop_last=loader.drop_last)
        elif loader.batch_sampler is not None:
            options.update(batch_sampler=drawn)
        else:
            options.update(sampler=drawn, batch_size=None)
        return torch.utils.data.DataLoader(loader.dataset, **options)


def _standardize(batch: Any) -> Any:
    """NumPy arrays in a tuple, or in the structure of the batch."""

    def convert(leaf: Any) -> Any:
        return np.asarray(leaf.cpu()) if isinstance(leaf, torch.Tensor) else leaf

    batch = tree.map_structure(convert, batch, none_is_leaf=False)
    if isinstance(batch, list):
        return tuple(batch)
    return batch if isinstance(batch, tuple | dict) else (batch,)
