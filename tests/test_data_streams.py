"""PyDatasets, generators and torch loaders: batches dealt in turn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from ranks_alike import OneOfMany
from ranks_alike import shards

from distkeras import data
from distkeras._errors import MismatchError


def numbers(batches: Any, most: int | None = None) -> list[list[int]]:
    found = []
    for batch in itertools.islice(iter(batches), most):
        x = batch[0] if isinstance(batch, tuple) else batch
        found.append([int(i) for i in np.asarray(x).reshape(-1)])
    return found


def in_turn(ranks: list[list[list[int]]]) -> list[list[int]]:
    """The batches of all ranks, step by step."""
    return list(itertools.chain(*zip(*ranks, strict=True)))


def blocks(count: int, batch: int) -> list[list[int]]:
    return [list(range(i, min(i + batch, count))) for i in range(0, count, batch)]


class Numbers(keras.utils.PyDataset):
    """Batches of sample numbers."""

    def __init__(self, count: int, batch: int = 2, **options: Any) -> None:
        super().__init__(**options)
        self.order = np.arange(count)
        self.batch = batch
        self.hooks: list[str] = []

    def __len__(self) -> int:
        return math.ceil(len(self.order) / self.batch)

    def __getitem__(self, index: int) -> Any:
        rows = self.order[index * self.batch : (index + 1) * self.batch]
        return rows.astype("float32")[:, None], rows % 3

    def on_epoch_begin(self) -> None:
        self.hooks.append("begin")

    def on_epoch_end(self) -> None:
        self.hooks.append("end")


class Endless(keras.utils.PyDataset):
    """One sample a batch, without end."""

    @property
    def num_batches(self) -> None:
        return None

    def __getitem__(self, index: int) -> Any:
        return (np.array([[index]], "float32"),)


# PyDataset


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(("count", "size"), [(1, 3), (7, 1), (7, 2), (33, 3)])
def test_py_dataset(count: int, size: int, workers: int, shuffle: bool) -> None:
    def make() -> Any:
        return Numbers(count, workers=workers)

    expected = blocks(count, 2)
    ranks = shards(size, make, shuffle=shuffle)
    datasets = [rank.get_tf_dataset() for rank in ranks]
    steps = math.ceil(len(expected) / size)
    assert {rank.num_batches for rank in ranks} == {steps}
    passes = [in_turn([numbers(each) for each in datasets]) for _ in range(2)]
    for found in passes:
        assert sorted(batch for batch in found if batch) == expected
        padding = size * steps - len(expected)
        assert found[size * steps - padding :] == [[]] * padding
        if not shuffle:
            assert found[: len(expected)] == expected
        assert {rank.may_be_empty for rank in ranks} == {padding > 0}
    if shuffle and count == 33:
        assert passes[0] != passes[1]
        again = shards(size, make, shuffle=True)
        assert (
            in_turn([numbers(rank.get_numpy_iterator()) for rank in again])
            == (passes[0])
        )
        (one,) = shards(1, make, shuffle=True)
        assert [batch for batch in passes[0] if batch] == numbers(
            one.get_numpy_iterator()
        )


@pytest.mark.launches
def test_py_dataset_with_processes() -> None:
    ranks = shards(
        2,
        lambda: Numbers(7, workers=2, use_multiprocessing=True),
        shuffle=False,
    )
    found = in_turn([numbers(rank.get_tf_dataset()) for rank in ranks])
    assert found == blocks(7, 2)


@pytest.mark.parametrize("workers", [1, 2])
def test_py_dataset_pass_goes_on_over_epochs(workers: int) -> None:
    (rank,) = shards(1, lambda: Numbers(12, workers=workers), steps_per_epoch=4)
    iterator = iter(rank.get_tf_dataset())
    rank.on_epoch_begin()
    found = numbers(iterator, 4)
    rank.on_epoch_end()
    rank.set_epoch(1)
    rank.on_epoch_begin()
    found += numbers(iterator)
    assert sorted(found) == blocks(12, 2)


@pytest.mark.parametrize("workers", [1, 2])
def test_py_dataset_without_end(workers: int) -> None:
    ranks = shards(3, lambda: Endless(workers=workers), steps_per_epoch=4)
    found = in_turn([numbers(rank.get_tf_dataset(), 4) for rank in ranks])
    assert found == [[i] for i in range(12)]
    assert ranks[0].num_batches is None
    ranks = shards(3, Endless, steps_per_epoch=2, training=False)
    found = in_turn([numbers(rank.get_tf_dataset()) for rank in ranks])
    assert found == [[i] for i in range(6)]
    with pytest.raises(ValueError, match="without end"):
        shards(3, Endless)


def test_py_dataset_class_weight_and_zero_rows() -> None:
    first, second = shards(2, lambda: Numbers(2), class_weight={0: 2.0, 1: 3.0})
    ((_, _, weight),) = list(first.get_tf_dataset())
    assert weight.numpy().tolist() == [2.0, 3.0]
    ((x, y, weight),) = list(second.get_tf_dataset())
    assert (x.shape, y.shape, weight.shape) == ((0, 1), (0,), (0,))
    assert first.get_tf_dataset().element_spec == second.get_tf_dataset().element_spec


def test_py_dataset_hooks_run_with_shared_random_numbers() -> None:
    class Shuffling(Numbers):
        def on_epoch_end(self) -> None:
            np.random.shuffle(self.order)

    mine = [Shuffling(20), Shuffling(20)]
    waiting = iter(mine)
    ranks = shards(2, lambda: next(waiting))
    for _ in range(2):
        for rank in ranks:
            np.random.rand()
            before = np.random.get_state()[1].tolist()
            rank.on_epoch_begin()
            rank.on_epoch_end()
            assert np.random.get_state()[1].tolist() == before
        np.testing.assert_array_equal(mine[0].order, mine[1].order)
    assert sorted(mine[0].order) == list(range(20))
    assert mine[0].order.tolist() != list(range(20))


def test_py_dataset_passes_hooks_on() -> None:
    dataset = Numbers(4)
    (rank,) = shards(1, lambda: dataset)
    rank.on_epoch_begin()
    rank.on_epoch_end()
    assert dataset.hooks == ["begin", "end"]


# Generators


def stream(count: int) -> Iterator[Any]:
    for block in blocks(count, 2):
        yield (np.array(block, "float32")[:, None],)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 7, 33])
def test_generator(count: int, size: int) -> None:
    expected = blocks(count, 2)
    ranks = shards(size, lambda: stream(count))
    most = len(expected) + 1
    found = in_turn([numbers(rank.get_tf_dataset(), most) for rank in ranks])
    assert found == expected + [[]] * (most * size - len(expected))
    assert ranks[0].num_batches is None


def test_generator_goes_on_in_the_next_epoch() -> None:
    ranks = shards(2, lambda: stream(40), steps_per_epoch=3)
    iterators = [iter(rank.get_tf_dataset()) for rank in ranks]
    for epoch in range(3):
        found = in_turn([numbers(iterator, 3) for iterator in iterators])
        assert found == blocks(40, 2)[6 * epoch : 6 * epoch + 6]


def test_generator_steps_limit_the_whole_data_in_evaluation() -> None:
    streams = [stream(40), stream(40)]
    waiting = iter(streams)
    ranks = shards(2, lambda: next(waiting), steps_per_epoch=3, training=False)
    found = in_turn([numbers(rank.get_tf_dataset()) for rank in ranks])
    assert found == blocks(40, 2)[:6]
    # What comes after is still there, at the same place on all ranks.
    assert [int(next(each)[0][0, 0]) for each in streams] == [12, 12]


def test_generator_structures() -> None:
    def nested() -> Iterator[Any]:
        for rows in (3, 2):
            x = {"a": np.ones((rows, 4), "float32"), "b": np.ones((rows, rows + 5))}
            yield x, None, np.ones(rows)

    dataset = shards(3, nested)[2].get_tf_dataset()
    x, y, weight = next(iter(dataset))
    assert x["a"].shape == (0, 4) and x["b"].shape == (0, 8) and weight.shape == (0,)
    assert not y.has_value()
    assert dataset.element_spec[0]["b"].shape.as_list() == [None, None]


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        (lambda: stream(0), {}, "yields none"),
        (lambda: iter_of([np.zeros(3)]), {}, "generator of tuples"),
        (lambda: stream(4), dict(class_weight={0: 1.0}), "class_weight"),
        (lambda: stream(4), dict(y=[1]), "no `y`"),
        (lambda: stream(4), dict(global_batch_size=4), "global_batch_size"),
        (lambda: Numbers(0), {}, "empty"),
    ],
)
def test_wrong_streams(make: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        shards(2, make, **options)


def iter_of(items: list[Any]) -> Iterator[Any]:
    yield from items


# torch


def loader(count: int, **options: Any) -> Any:
    torch = pytest.importorskip("torch")
    x = torch.arange(count, dtype=torch.float32)[:, None]
    dataset = torch.utils.data.TensorDataset(x, torch.arange(count))
    return torch.utils.data.DataLoader(dataset, **{"batch_size": 2, **options})


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("count", "size"), [(1, 3), (7, 1), (7, 2), (33, 3)])
def test_torch_loader(count: int, size: int, shuffle: bool) -> None:
    ranks = shards(size, lambda: loader(count, shuffle=shuffle))
    datasets = [rank.get_tf_dataset() for rank in ranks]
    expected = blocks(count, 2)
    steps = math.ceil(len(expected) / size)
    assert {rank.num_batches for rank in ranks} == {steps}
    assert len({dataset.element_spec for dataset in datasets}) == 1
    passes = [in_turn([numbers(each) for each in datasets]) for _ in range(2)]
    for found in passes:
        assert sorted(itertools.chain(*found)) == list(range(count))
        assert len(found) == steps * size
        if not shuffle:
            assert found == expected + [[]] * (steps * size - len(expected))
    assert ranks[0].num_examples == count
    if shuffle and count == 33:
        assert passes[0] != passes[1]
        again = shards(size, lambda: loader(count, shuffle=True))
        assert in_turn([numbers(r.get_numpy_iterator()) for r in again]) == passes[0]


@pytest.mark.launches
def test_torch_loader_with_workers() -> None:
    ranks = shards(2, lambda: loader(7, num_workers=1))
    found = in_turn([numbers(rank.get_numpy_iterator()) for rank in ranks])
    assert found == blocks(7, 2)


def test_torch_loader_drops_the_last_batch_where_told() -> None:
    ranks = shards(2, lambda: loader(7, drop_last=True))
    found = in_turn([numbers(rank.get_tf_dataset()) for rank in ranks])
    assert found == [*blocks(6, 2), []]


def test_torch_iterable_dataset() -> None:
    torch = pytest.importorskip("torch")

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            return iter(np.arange(11, dtype="float32")[:, None])

    def make() -> Any:
        return torch.utils.data.DataLoader(Stream(), batch_size=2)

    ranks = shards(3, make)
    for _ in range(2):
        found = in_turn([numbers(rank.get_tf_dataset(), 3) for rank in ranks])
        assert found == blocks(11, 2) + [[]] * 3


def test_torch_sampler_without_a_length() -> None:
    torch = pytest.importorskip("torch")

    class Endless(torch.utils.data.Sampler):
        def __iter__(self) -> Iterator[int]:
            return itertools.count()

    with pytest.raises(ValueError, match="has a length"):
        shards(2, lambda: loader(8, sampler=Endless()))


def test_torch_generator_of_the_sampler_is_left_as_it_was() -> None:
    torch = pytest.importorskip("torch")

    def make() -> Any:
        generator = torch.Generator()
        generator.manual_seed(4)
        return loader(33, shuffle=True, generator=generator)

    expected = [batch[0][:, 0].int().tolist() for batch in make()]
    ranks = shards(1, make)
    assert numbers(ranks[0].get_numpy_iterator()) == expected
    found = in_turn([numbers(r.get_numpy_iterator()) for r in shards(3, make)])
    assert [batch for batch in found if batch] == expected


def test_torch_sampler_that_deals_already() -> None:
    torch = pytest.importorskip("torch")

    def make() -> Any:
        dataset = list(range(8))
        sampler = torch.utils.data.distributed.DistributedSampler(
            dataset, num_replicas=2, rank=0
        )
        return torch.utils.data.DataLoader(dataset, sampler=sampler)

    with pytest.raises(ValueError, match="shard=False"):
        shards(2, make)
    own = data.shard(make(), communicator=OneOfMany(0, 2), shard=False)
    assert own.num_batches == 4


# Real ranks


@pytest.mark.parametrize("kind", ["py", "generator", "torch"])
def test_batches_once_over_the_world(world: Any, kind: str) -> None:
    make = {"py": Numbers, "generator": stream, "torch": loader}[kind]
    options = dict(shuffle=True) if kind == "torch" else {}
    sharded = data.shard(make(33, **options), communicator=world)
    dataset = sharded.get_tf_dataset()
    most = None if sharded.num_batches else 20
    found = in_turn(world.allgather_object(numbers(dataset, most)))
    assert sorted(itertools.chain(*found)) == list(range(33))
    assert "dealt to" in sharded.description


@pytest.mark.parametrize("count", [1, 33])
@pytest.mark.parametrize("kind", ["py", "generator", "torch"])
def test_predictions_come_back_in_order(world: Any, count: int, kind: str) -> None:
    make = {"py": Numbers, "generator": stream, "torch": loader}[kind]
    sharded = data.shard(make(count), communicator=world, training=False)
    local = np.concatenate([np.asarray(b[0]) for b in sharded.get_tf_dataset()])
    whole = data.gather_predictions(local, sharded, world)
    assert whole[:, 0].tolist() == list(range(count))


def test_orders_that_differ_raise_on_all_ranks(world: Any) -> None:
    dataset = Numbers(33)
    np.random.default_rng(world.rank).shuffle(dataset.order)
    if world.size == 1:
        return
    with pytest.raises(MismatchError, match="attribute `order`"):
        data.shard(dataset, communicator=world)


def test_own_streams_end_at_different_times(world: Any) -> None:
    count = 4 * world.rank
    sharded = data.shard(stream(count or 1), communicator=world, shard=False)
    assert numbers(sharded.get_tf_dataset(), 20)[:-1][: len(blocks(count or 1, 2))] == (
        blocks(count or 1, 2)
    )
    sharded = data.shard(Numbers(count + 1), communicator=world, shard=False)
    assert sharded.num_batches == len(blocks(4 * (world.size - 1) + 1, 2))
    assert len(numbers(sharded.get_tf_dataset())) == sharded.num_batches


def test_own_stream_may_be_empty_on_a_rank(world: Any) -> None:
    last = world.rank == world.size - 1
    sharded = data.shard(stream(5 if last else 0), communicator=world, shard=False)
    dataset = sharded.get_tf_dataset()
    assert numbers(dataset, 4) == (blocks(5, 2) + [[]] if last else [[]] * 4)
    specs = world.allgather_object([s.shape.as_list() for s in dataset.element_spec])
    assert specs == [[[None, 1]]] * world.size
    assert tf.is_tensor(next(iter(dataset))[0])
    with pytest.raises(ValueError, match="on some rank"):
        data.shard(stream(0), communicator=world, shard=False)
