"""tf.data: batches dealt in turn, equal steps, and orders that must be one."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from ranks_alike import OneOfMany
from ranks_alike import shards

from distkeras import data
from distkeras._errors import MismatchError

# AutoGraph would leave a file behind for each function.
plain = tf.autograph.experimental.do_not_convert


def numbers(dataset: Any, most: int | None = None) -> list[list[int]]:
    batches = itertools.islice(iter(dataset), most)
    return [[int(i) for i in np.asarray(x).reshape(-1)] for x in batches]


def in_turn(ranks: list[list[list[int]]]) -> list[list[int]]:
    """The batches of all ranks, step by step."""
    return list(itertools.chain(*zip(*ranks, strict=True)))


def batched(count: int, batch: int) -> Any:
    return tf.data.Dataset.range(count).batch(batch)


def unknown(count: int, batch: int) -> Any:
    dataset = tf.data.Dataset.range(2 * count).batch(1)
    dataset = dataset.filter(plain(lambda x: x[0] < count))
    return dataset.unbatch().batch(batch)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 32, 103])
def test_known_length(count: int, size: int) -> None:
    expected = numbers(batched(count, 8))
    ranks = shards(size, lambda: batched(count, 8))
    steps = math.ceil(len(expected) / size)
    datasets = [rank.get_tf_dataset() for rank in ranks]
    assert {rank.num_batches for rank in ranks} == {steps}
    assert len({dataset.element_spec for dataset in datasets}) == 1
    for _ in range(2):
        found = in_turn([numbers(dataset) for dataset in datasets])
        assert found == expected + [[]] * (steps * size - len(expected))
    assert {rank.may_be_empty for rank in ranks} == {[] in found}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_unknown_length_ends_in_zero_rows_for_ever(size: int) -> None:
    expected = numbers(unknown(21, 4))
    ranks = shards(size, lambda: unknown(21, 4))
    assert {rank.num_batches for rank in ranks} == {None}
    found = in_turn([numbers(rank.get_tf_dataset(), 9) for rank in ranks])
    assert found == expected + [[]] * (9 * size - len(expected))


def test_no_end_needs_steps() -> None:
    ranks = shards(2, lambda: batched(10, 4).repeat(), steps_per_epoch=5)
    found = in_turn([numbers(rank.get_tf_dataset(), 5) for rank in ranks])
    assert found == numbers(batched(10, 4).repeat(), 10)
    assert ranks[0].num_batches is None
    with pytest.raises(ValueError, match="steps_per_epoch"):
        shards(2, lambda: batched(10, 4).repeat())
    with pytest.raises(ValueError, match="Expected `steps`"):
        shards(2, lambda: batched(10, 4).repeat(), training=False)


def test_fixed_batch_dimension_is_opened() -> None:
    def make() -> Any:
        dataset = tf.data.Dataset.from_tensor_slices(np.zeros((24, 5), "float32"))
        return dataset.batch(8, drop_remainder=True)

    for rank in shards(2, make):
        dataset = rank.get_tf_dataset()
        assert dataset.element_spec.shape.as_list() == [None, 5]
        assert rank.batch_size == 8
    last = list(shards(2, make)[1].get_tf_dataset())[-1]
    assert last.shape == (0, 5)
    even = shards(3, make)[0].get_tf_dataset()
    assert even.element_spec.shape.as_list() == [8, 5]


def _variable_sizes() -> Any:
    def images() -> Any:
        for size in (4, 6, 5):
            yield {"image": np.ones((2, size, size, 3), "float32"), "name": ["a", "b"]}

    return tf.data.Dataset.from_generator(
        images,
        output_signature={
            "image": tf.TensorSpec((None, None, None, 3), tf.float32),
            "name": tf.TensorSpec((None,), tf.string),
        },
    )


def test_zero_rows_have_the_other_dimensions_of_the_last_batch() -> None:
    for rank in shards(4, _variable_sizes):
        dataset = rank.get_tf_dataset()
        spec = dataset.element_spec
        assert spec["image"].shape.as_list() == [None, None, None, 3]
        shapes = [tuple(b["image"].shape) for b in itertools.islice(dataset, 3)]
        own = [(2, s, s, 3) for s in (4, 6, 5)][rank.part.rank : rank.part.rank + 1]
        assert shapes == own + [(0, 5, 5, 3)] * (3 - len(own))


def test_shapes_that_are_not_known_at_all() -> None:
    def hide(x: Any) -> Any:
        hidden = tf.numpy_function(lambda x: x, [x], tf.int64)
        assert hidden.shape.rank is None
        return hidden

    def make() -> Any:
        return batched(20, 8).batch(1).map(plain(hide))

    for rank in shards(2, make):
        shapes = [tuple(batch.shape) for batch in rank.get_tf_dataset()]
        own = [(1, 8), (1, 8), (1, 4)][rank.part.rank :: 2]
        assert shapes == own + [(0, 4)] * (2 - len(own))


def test_zero_rows_of_every_type() -> None:
    def make() -> Any:
        ragged = tf.RaggedTensor.from_row_lengths(tf.range(6.0), [1, 2, 3])
        sparse = tf.sparse.from_dense(np.eye(3, dtype="float32"))
        whole = {"r": ragged, "s": sparse, "t": tf.constant(["a", "b", "c"])}
        dataset = tf.data.Dataset.from_tensor_slices((whole, tf.range(3)))
        return dataset.batch(3)

    x, y = next(iter(shards(2, make)[1].get_tf_dataset()))
    assert x["r"].shape.as_list() == [0, None] and x["r"].dtype == tf.float32
    assert x["s"].shape.as_list() == [0, 3]
    assert x["t"].shape == (0,) and x["t"].dtype == tf.string
    assert y.shape == (0,)


def test_class_weight() -> None:
    def make() -> Any:
        x = np.zeros((5, 1), "float32")
        return tf.data.Dataset.from_tensor_slices((x, [0, 1, 2, 1, 0])).batch(2)

    for rank in shards(2, make, class_weight={0: 1.0, 1: 3.0, 2: 0.5}):
        for _, y, weight in rank.get_tf_dataset():
            assert [(1.0, 3.0, 0.5)[int(i)] for i in y] == weight.numpy().tolist()


# Evaluation and prediction


@pytest.mark.parametrize("length", [batched, unknown])
@pytest.mark.parametrize("count", [1, 3, 7, 103])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_evaluation_pads_nothing(size: int, count: int, length: Any) -> None:
    expected = numbers(length(count, 8))
    ranks = shards(size, lambda: length(count, 8), training=False)
    for number, rank in enumerate(ranks):
        found = numbers(rank.get_tf_dataset())
        assert found
        assert [batch for batch in found if batch] == expected[number::size]
        assert rank.rows_seen == [len(batch) for batch in found]
        assert rank.num_batches in (None, len(found))


def test_evaluation_steps_limit_the_whole_data() -> None:
    ranks = shards(
        2, lambda: batched(40, 4).repeat(), training=False, steps_per_epoch=3
    )
    found = in_turn([numbers(rank.get_tf_dataset()) for rank in ranks])
    assert found == numbers(batched(40, 4), 6)


# The order


@pytest.mark.parametrize("size", [1, 3])
def test_seeded_shuffle_is_that_of_one_process(size: int) -> None:
    def make() -> Any:
        return tf.data.Dataset.range(30).shuffle(30, seed=7).batch(2)

    one = make()
    datasets = [rank.get_tf_dataset() for rank in shards(size, make)]
    passes = []
    for _ in range(3):
        expected = numbers(one)
        assert in_turn([numbers(dataset) for dataset in datasets]) == expected
        passes.append(expected)
        # Keras makes an iterator that it drops at the end of every epoch.
        for dataset in [one, *datasets]:
            iter(dataset)
    assert passes[0] != passes[1] != passes[2]


@pytest.fixture(autouse=True)
def no_seed_of_other_tests() -> None:
    """With a global seed every shuffle has one."""
    tf.random.set_seed(None)


def test_seed_may_be_the_global_one() -> None:
    def make() -> Any:
        tf.random.set_seed(3)
        return tf.data.Dataset.range(30).shuffle(30).batch(2)

    try:
        found = in_turn([numbers(rank.get_tf_dataset()) for rank in shards(3, make)])
    finally:
        tf.random.set_seed(None)
    assert sorted(itertools.chain(*found)) == list(range(30))


def _numbers() -> Any:
    return tf.data.Dataset.range(12)


UNSAFE = {
    "shuffle": lambda: _numbers().shuffle(4).batch(2),
    "below others": lambda: (
        _numbers().shuffle(4).map(plain(lambda x: x + 1)).repeat(2).batch(2).prefetch(1)
    ),
    "in a zip": lambda: tf.data.Dataset.zip(
        (_numbers().batch(2), _numbers().shuffle(4).batch(2))
    ),
    "in interleave": lambda: (
        _numbers()
        .interleave(plain(lambda i: _numbers().shuffle(3)), cycle_length=2)
        .batch(2)
    ),
    "sampled": lambda: tf.data.Dataset.sample_from_datasets(
        [_numbers(), _numbers()]
    ).batch(2),
    "random filter": lambda: (
        _numbers().filter(plain(lambda x: tf.random.uniform([]) > 0.5)).batch(2)
    ),
    "map": lambda: (
        _numbers()
        .map(plain(lambda x: x), num_parallel_calls=2, deterministic=False)
        .batch(2)
    ),
    "interleave": lambda: (
        _numbers()
        .interleave(
            plain(lambda i: _numbers()), num_parallel_calls=2, deterministic=False
        )
        .batch(2)
    ),
}


@pytest.mark.parametrize("name", UNSAFE)
def test_orders_that_differ_between_ranks_are_errors(name: str) -> None:
    with pytest.raises(ValueError, match="same order on every rank"):
        shards(2, UNSAFE[name])
    assert shards(1, UNSAFE[name])
    own = data.shard(UNSAFE[name](), communicator=OneOfMany(0, 2), shard=False)
    assert own.get_tf_dataset() is not None


def test_option_that_gives_up_the_order_is_overruled() -> None:
    def make() -> Any:
        options = tf.data.Options()
        options.deterministic = False
        return batched(8, 2).with_options(options)

    for rank in shards(2, make):
        assert rank.get_tf_dataset().options().deterministic is True


def test_augmentation_does_not_count_as_order() -> None:
    def make() -> Any:
        return _numbers().map(plain(lambda x: tf.random.uniform([]))).batch(2)

    assert shards(2, make)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (_numbers, "call `.batch"),
        (lambda: _numbers().take(0).batch(2), "empty dataset"),
    ],
)
def test_wrong_pipelines(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        shards(2, make)
    with pytest.raises(ValueError, match="no `y`"):
        data.shard(batched(4, 2), [1], communicator=OneOfMany(0, 2))


# Real ranks


def test_batches_once_over_the_world(world: Any) -> None:
    for make, most in ((batched, None), (unknown, 20)):
        sharded = data.shard(make(103, 8), communicator=world)
        dataset = sharded.get_tf_dataset()
        for _ in range(2):
            found = in_turn(world.allgather_object(numbers(dataset, most)))
            assert [batch for batch in found if batch] == numbers(batched(103, 8))


def test_seeds_and_shards_that_differ_raise_on_all_ranks(world: Any) -> None:
    if world.size == 1:
        return
    with pytest.raises(MismatchError, match="seeds of a shuffle"):
        data.shard(_numbers().shuffle(4, seed=world.rank).batch(2), communicator=world)
    with pytest.raises(MismatchError, match="pass `shard=False`"):
        data.shard(
            _numbers().shard(world.size, world.rank).batch(2), communicator=world
        )


@pytest.mark.parametrize("what", ["slices", "paths", "folders"])
def test_arrays_that_differ_raise_on_all_ranks(world: Any, what: str) -> None:
    """An unseeded permutation before the pipeline begins."""
    if world.size == 1:
        return
    numbers_, rank = np.arange(24), world.rank
    make = {
        "slices": lambda order: (
            numbers_[order],
            tf.sparse.from_dense(np.eye(24)),
        ),
        "paths": lambda order: [f"/scratch/{rank}/{number}.jpg" for number in order],
        "folders": lambda order: [f"/{rank}/{n // 8}/{n % 8}.jpg" for n in order],
    }[what]

    def pipeline(order: np.ndarray) -> Any:
        noise = tf.data.Dataset.from_tensors(float(rank)).repeat()
        slices = tf.data.Dataset.from_tensor_slices(make(order))
        return tf.data.Dataset.zip((slices, noise)).batch(2)

    alike = pipeline(np.random.default_rng(1).permutation(24))
    assert data.shard(alike, communicator=world).num_batches == -(-12 // world.size)
    other = pipeline(np.roll(numbers_, 8 * rank))
    with pytest.raises(MismatchError, match="arrays in the pipeline"):
        data.shard(other, communicator=world)
    data.shard(other, communicator=world, shard=False)


def test_a_cache_is_a_ranks_own_file(world: Any, tmp_path: Path) -> None:
    path = world.broadcast_object(str(tmp_path / "cache"))
    if world.size > 1:
        for own in ("auto", False):
            with pytest.raises(ValueError, match="cache on ranks 0, 1.*distkeras.rank"):
                data.shard(
                    batched(12, 2).cache(path).repeat(2), communicator=world, shard=own
                )
    for file in (f"{path}-{world.rank}", ""):
        found = numbers(
            data.shard(batched(12, 2).cache(file), communicator=world).get_tf_dataset()
        )
        assert in_turn(world.allgather_object(found))[:6] == numbers(batched(12, 2))
    # One that was written before is only read.
    if world.rank == 0:
        list(batched(12, 2).cache(path))
    world.barrier()
    data.shard(batched(12, 2).cache(path), communicator=world)
    world.barrier()


def test_own_pipelines_agree_on_steps(world: Any) -> None:
    rank, size = world.rank, world.size
    own = data.shard(batched(5 * rank, 2), communicator=world, shard=False)
    assert own.num_batches == max(math.ceil(5 * (size - 1) / 2), 1)
    found = numbers(own.get_tf_dataset())
    assert len(found) == own.num_batches
    assert list(itertools.chain(*found)) == list(range(5 * rank))
    make = unknown if rank == 0 else batched
    own = data.shard(make(5, 2), communicator=world, shard=False)
    assert own.num_batches is None
    assert numbers(own.get_tf_dataset(), 5) == [[0, 1], [2, 3], [4], [], []]


@pytest.mark.parametrize("length", [batched, unknown])
@pytest.mark.parametrize("count", [1, 103])
def test_predictions_come_back_in_order(world: Any, count: int, length: Any) -> None:
    sharded = data.shard(length(count, 8), communicator=world, training=False)
    local = np.concatenate([np.asarray(b) for b in sharded.get_tf_dataset()])
    whole = data.gather_predictions({"y": local}, sharded, world)
    np.testing.assert_array_equal(whole["y"], np.arange(count))


def test_ragged_predictions(world: Any) -> None:
    sharded = data.shard(batched(9, 2), communicator=world, training=False)
    rows = [i for batch in numbers(sharded.get_tf_dataset()) for i in batch]
    local = tf.ragged.constant([[i] * (i % 3 + 1) for i in rows], tf.int64, 1)
    whole = data.gather_predictions(local, sharded, world)
    assert whole.to_list() == [[i] * (i % 3 + 1) for i in range(9)]
