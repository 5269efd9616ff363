"""Arrays: every sample once a pass, in the steps that one process would take."""

from __future__ import annotations

import itertools
from typing import Any

import keras
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
from ranks_alike import OneOfMany

from distkeras import data
from distkeras._errors import MismatchError
from distkeras.data import _order

COUNTS = (1, 2, 3, 7, 32, 103)
BATCHES = (1, 8, 32)
SIZES = (1, 2, 3, 4)


def shards(size: int, *arrays: Any, **options: Any) -> list[data.ShardedData]:
    return [
        data.shard(*arrays, communicator=OneOfMany(rank, size), **options)
        for rank in range(size)
    ]


def numbers(batches: Any) -> list[list[int]]:
    """The samples of each batch; x is a column of sample numbers."""
    found = []
    for batch in batches:
        x = batch[0] if isinstance(batch, tuple) else batch
        found.append([int(i) for i in np.asarray(x).reshape(-1)])
    return found


def steps(ranks: list[list[list[int]]]) -> list[list[int]]:
    """What all ranks together saw in each step."""
    return [list(itertools.chain(*parts)) for parts in zip(*ranks, strict=True)]


def column(count: int) -> np.ndarray:
    return np.arange(count, dtype="float32")[:, None]


# The arithmetic


@pytest.mark.parametrize("size", SIZES)
def test_shares_cover_everything_once(size: int) -> None:
    for count in range(20):
        parts = [_order.share(count, rank, size) for rank in range(size)]
        assert [i for start, stop in parts for i in range(start, stop)] == list(
            range(count)
        )
        lengths = [stop - start for start, stop in parts]
        assert max(lengths) - min(lengths) <= 1
        assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize("shuffle", [False, True, "batch"])
@pytest.mark.parametrize("count", COUNTS)
def test_permutation_holds_every_sample(count: int, shuffle: Any) -> None:
    order = _order.permutation(count, 8, shuffle, _order.generator(5, 2))
    assert sorted(order) == list(range(count))
    again = _order.permutation(count, 8, shuffle, _order.generator(5, 2))
    np.testing.assert_array_equal(order, again)


def test_shuffle_batch_keeps_batches_together() -> None:
    order = _order.permutation(103, 8, "batch", _order.generator(0, 0))
    assert [sorted(order[i : i + 8]) for i in range(0, 103, 8)] == [
        list(range(i, min(i + 8, 103))) for i in range(0, 103, 8)
    ]
    assert list(order[:8]) != list(range(8))


# Training


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", COUNTS)
def test_steps_are_those_of_one_process(size: int, count: int) -> None:
    x, y = column(count), np.arange(count)
    for batch, shuffle in itertools.product(BATCHES, (False, True, "batch")):
        ranks = shards(size, x, y, batch_size=batch, shuffle=shuffle)
        (one,) = shards(1, x, y, batch_size=batch * size, shuffle=shuffle)
        assert {rank.num_batches for rank in ranks} == {one.num_batches}
        for _ in range(2):
            seen = [numbers(rank.get_numpy_iterator()) for rank in ranks]
            whole = numbers(one.get_numpy_iterator())
            assert steps(seen) == whole
            assert all(len(rank) == one.num_batches for rank in seen)
            assert sorted(itertools.chain(*whole)) == list(range(count))
            for parts in zip(*seen, strict=True):
                lengths = [len(part) for part in parts]
                assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("shuffle", [False, True, "batch"])
@pytest.mark.parametrize(
    ("count", "batch", "size"), [(1, 8, 3), (7, 1, 2), (103, 8, 4), (96, 32, 3)]
)
def test_tf_dataset_is_the_same_as_numpy(
    count: int, batch: int, size: int, shuffle: Any
) -> None:
    x, y = column(count), np.arange(count)
    for rank in range(size):
        options = dict(batch_size=batch, shuffle=shuffle)
        ours = shards(size, x, y, **options)[rank]
        dataset = ours.get_tf_dataset()
        other = shards(size, x, y, **options)[rank]
        for _ in range(2):
            found = numbers(dataset)
            assert found == numbers(other.get_numpy_iterator())
            assert len(found) == ours.num_batches


def test_order_differs_by_pass_and_is_reproducible() -> None:
    x = column(103)
    first, second = shards(1, x)[0], shards(1, x)[0]
    dataset = first.get_tf_dataset()
    passes = [numbers(dataset) for _ in range(3)]
    assert passes[0] != passes[1] != passes[2]
    again = second.get_tf_dataset()
    assert passes == [numbers(again) for _ in range(3)]
    assert numbers(shards(1, x, seed=1)[0].get_tf_dataset()) != passes[0]
    second.set_epoch(1)
    assert numbers(again) == passes[1]
    second.start_pass = 0
    assert numbers(again) == passes[0]


def test_an_iterator_that_is_not_used_is_not_a_pass() -> None:
    """Keras makes one at the end of every epoch and drops it."""
    x = column(20)
    used, dropped = shards(1, x)[0].get_tf_dataset(), shards(1, x)[0].get_tf_dataset()
    for _ in range(3):
        iter(dropped)
        assert numbers(used) == numbers(dropped)


def test_set_epoch_leaves_a_pass_under_way_alone() -> None:
    x = column(64)
    (sharded,) = shards(1, x, batch_size=8)
    expected = numbers(shards(1, x, batch_size=8)[0].get_numpy_iterator())
    iterator = iter(sharded.get_tf_dataset())
    found = numbers(itertools.islice(iterator, 3))
    sharded.set_epoch(1)
    found += numbers(iterator)
    assert found == expected


@pytest.mark.parametrize("size", [1, 2, 3])
def test_element_spec_is_one_for_all_steps(size: int) -> None:
    x, y = column(7), np.arange(7)
    for sharded in shards(size, x, y, batch_size=2):
        spec = sharded.get_tf_dataset().element_spec
        assert spec == (
            tf.TensorSpec((None, 1), tf.float32),
            tf.TensorSpec((None,), tf.int64),
        )


def test_rank_without_samples_gets_zero_rows() -> None:
    x = {"a": np.zeros((1, 4, 2), "float32"), "b": [np.zeros((1, 3), "int32")]}
    last = shards(3, x, np.zeros(1))[2]
    ((inputs, y),) = list(last.get_tf_dataset())
    assert inputs["a"].shape == (0, 4, 2) and inputs["a"].dtype == tf.float32
    assert inputs["b"][0].shape == (0, 3) and inputs["b"][0].dtype == tf.int32
    assert y.shape == (0,)
    assert last.num_batches == 1


def test_global_batch_that_the_ranks_do_not_divide() -> None:
    ranks = shards(3, column(23), global_batch_size=4, shuffle=False)
    seen = [numbers(rank.get_tf_dataset()) for rank in ranks]
    assert steps(seen) == [list(range(i, min(i + 4, 23))) for i in range(0, 23, 4)]
    assert [rank.batch_size for rank in ranks] == [2, 2, 2]
    fewer = shards(3, column(4), global_batch_size=2, shuffle=False)
    assert numbers(fewer[2].get_tf_dataset()) == [[], []]
    assert fewer[2].get_tf_dataset().element_spec.shape.as_list() == [None, 1]


def test_steps_per_epoch_without_batch_size_divides_the_whole_data() -> None:
    ranks = shards(2, column(103), steps_per_epoch=10, shuffle=False)
    seen = [numbers(rank.get_tf_dataset()) for rank in ranks]
    expected = keras.src.trainers.data_adapters.array_data_adapter.ArrayDataAdapter(
        column(103), steps=10
    )
    assert steps(seen) == numbers(expected.get_numpy_iterator())
    assert ranks[0].num_batches == expected.num_batches


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("batch", [1, 2, 8])
@pytest.mark.parametrize("count", COUNTS)
def test_ranks_know_whether_one_may_be_without_samples(
    count: int, batch: int, size: int
) -> None:
    ranks = shards(size, column(count), batch_size=batch)
    seen = [numbers(rank.get_numpy_iterator()) for rank in ranks]
    empty = any(not part for part in itertools.chain(*seen))
    assert [rank.may_be_empty for rank in ranks] == [empty] * size


def test_defaults_and_descriptions() -> None:
    first, second = shards(2, column(103))
    assert (first.batch_size, first.num_batches) == (32, 2)
    assert first.has_partial_batch
    assert (first.partial_batch_size, second.partial_batch_size) == (20, 19)
    assert first.num_examples == 103
    assert first.description == (
        "arrays: dealt to 2 ranks, 103 samples shuffled, global batch 64, 32 a rank; "
        "2 steps"
    )
    even = shards(2, column(64))[0]
    assert not even.has_partial_batch and even.partial_batch_size is None


# Evaluation and prediction


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", COUNTS)
def test_evaluation_takes_contiguous_pieces(size: int, count: int) -> None:
    x = column(count)
    for batch in BATCHES:
        ranks = shards(size, x, batch_size=batch, training=False)
        seen = [numbers(rank.get_tf_dataset()) for rank in ranks]
        assert list(itertools.chain(*itertools.chain(*seen))) == list(range(count))
        for rank, batches in zip(ranks, seen, strict=True):
            assert rank.num_batches == len(batches) >= 1
            assert all(batches[:-1])


def test_evaluation_steps_limit_the_whole_data() -> None:
    ranks = shards(2, column(103), batch_size=8, steps_per_epoch=3, training=False)
    seen = [numbers(rank.get_tf_dataset()) for rank in ranks]
    assert sorted(itertools.chain(*itertools.chain(*seen))) == list(range(48))
    assert [rank.num_batches for rank in ranks] == [3, 3]


# Kinds


def _kinds() -> dict[str, Any]:
    dense = np.arange(35, dtype="float64").reshape(7, 5)
    scipy = pytest.importorskip("scipy.sparse")
    return {
        "numpy": dense,
        "tensor": tf.constant(dense, tf.float32),
        "variable": tf.Variable(dense, dtype=tf.float32),
        "frame": pd.DataFrame(dense, columns=list("abcde")),
        "series": pd.Series(dense[:, 0]),
        "ragged": tf.RaggedTensor.from_row_lengths(
            tf.range(21.0), [0, 1, 2, 3, 4, 5, 6]
        ),
        "sparse": tf.sparse.from_dense(dense.astype("float32")),
        "scipy": scipy.csr_matrix(dense),
        "strings": np.array([f"s{i}" for i in range(7)], dtype=object),
    }


@pytest.mark.parametrize("kind", sorted(_kinds()))
def test_every_kind_of_array(kind: str) -> None:
    whole = _kinds()[kind]
    y = np.arange(7)
    reference = keras.src.trainers.data_adapters.array_data_adapter.ArrayDataAdapter(
        whole, y, batch_size=7
    )

    def dense(x: Any) -> list[Any]:
        if isinstance(x, tf.SparseTensor):
            x = tf.sparse.to_dense(tf.sparse.reorder(x))
        if isinstance(x, tf.RaggedTensor):
            return x.to_list()
        return np.asarray(x).tolist()

    ((expected, _),) = list(reference.get_tf_dataset())
    for size, training in itertools.product((1, 3), (True, False)):
        rows: dict[int, Any] = {}
        for sharded in shards(size, whole, y, batch_size=1, training=training):
            dataset = sharded.get_tf_dataset()
            spec = dataset.element_spec
            for x, labels in dataset:
                assert spec[0].is_compatible_with(tf.type_spec_from_value(x))
                assert spec[0].dtype == x.dtype
                assert x.shape.rank == spec[0].shape.rank
                rows.update(zip(labels.numpy().tolist(), dense(x), strict=True))
        assert [rows[i] for i in range(7)] == dense(expected)


def test_nested_structures_keep_their_form() -> None:
    x = {"a": column(5), "b": (column(5) + 10, [column(5) + 20])}
    y = [np.arange(5), column(5)]
    weights = np.linspace(0, 1, 5, dtype="float32")
    rows = []
    for sharded in shards(2, x, y, weights, batch_size=2, shuffle=False):
        for inputs, labels, weight in sharded.get_tf_dataset():
            np.testing.assert_array_equal(inputs["a"] + 10, inputs["b"][0])
            np.testing.assert_array_equal(inputs["a"] + 20, inputs["b"][1][0])
            np.testing.assert_array_equal(inputs["a"], labels[1])
            # One weight array goes to all outputs, as in Keras.
            np.testing.assert_array_equal(weight[0], weight[1])
            rows += zip(labels[0].numpy(), weight[0].numpy(), strict=True)
    assert sorted(rows) == list(zip(range(5), weights, strict=True))


def test_class_weight_becomes_sample_weight() -> None:
    y = np.array([0, 1, 2, 1, 0])
    weights = {0: 1.0, 1: 2.0, 2: 0.5}
    for sharded in shards(2, column(5), y, class_weight=weights, batch_size=2):
        for _, labels, weight in sharded.get_tf_dataset():
            assert [weights[int(i)] for i in labels] == weight.numpy().tolist()


# Errors


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((column(5), np.zeros(4)), {}, "cardinality"),
        ((column(5),), dict(batch_size=0), "at least 1"),
        ((column(5),), dict(batch_size=1, global_batch_size=2), "not both"),
        ((column(5),), dict(shard="no"), "'auto' .or True, .*, or False"),
        ((column(5),), dict(shard=0), "'auto' .or True, .*, or False"),
        ((column(0),), {}, "no samples"),
        (("text",), {}, "Received: str"),
        ((column(5), np.zeros(5), np.ones(5)), dict(class_weight={0: 1}), "weight"),
    ],
)
def test_wrong_arguments(arguments: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        shards(2, *arguments, **options)


# Real ranks


def test_all_samples_once_over_the_world(world: Any) -> None:
    for count, batch in ((1, 8), (7, 2), (103, 8)):
        x, y = column(count), np.arange(count)
        sharded = data.shard(x, y, communicator=world, batch_size=batch)
        dataset = sharded.get_tf_dataset()
        for number in range(2):
            ranks = world.allgather_object(numbers(dataset))
            whole = steps(ranks)
            assert sorted(itertools.chain(*whole)) == list(range(count))
            (one,) = shards(1, x, y, batch_size=batch * world.size)
            one.set_epoch(number)
            assert whole == numbers(one.get_numpy_iterator())


def test_sizes_that_differ_raise_on_all_ranks(world: Any) -> None:
    x = column(103 + world.rank)
    if world.size == 1:
        assert data.shard(x, communicator=world).num_examples == 103
        return
    with pytest.raises(MismatchError, match="number of samples: 104"):
        data.shard(x, communicator=world)


def test_values_that_differ_raise_on_all_ranks(world: Any) -> None:
    x = column(50) + world.rank
    if world.size == 1:
        return
    with pytest.raises(MismatchError, match="shard=False"):
        data.shard(x, communicator=world)


@pytest.mark.parametrize("kind", [np.array, tf.constant, pd.DataFrame])
def test_one_value_that_differs_is_found(world: Any, kind: Any) -> None:
    values = np.arange(103 * 7, dtype="float32").reshape(103, 7)
    values[41, 3] += world.rank == world.size - 1
    if world.size == 1:
        assert data.shard(kind(values), communicator=world).num_examples == 103
        return
    with pytest.raises(MismatchError, match="values of the data"):
        data.shard(kind(values), communicator=world)


def test_an_error_on_one_rank_is_raised_on_all(world: Any) -> None:
    y = np.zeros(5 - (world.rank == world.size - 1))
    with pytest.raises((ValueError, RuntimeError), match="cardinality"):
        data.shard(column(5), y, communicator=world)


def test_own_data_agrees_on_steps(world: Any) -> None:
    rank, size = world.rank, world.size
    x = column(10 * rank + 3) + 1000 * rank
    sharded = data.shard(x, communicator=world, batch_size=4, shard=False)
    dataset = sharded.get_tf_dataset()
    assert sharded.num_batches == -(-(10 * (size - 1) + 3) // 4)
    assert sharded.num_examples == sum(10 * r + 3 for r in range(size))
    for _ in range(2):
        found = numbers(dataset)
        assert len(found) == sharded.num_batches
        assert sorted(itertools.chain(*found)) == [int(i) for i in x[:, 0]]


def test_own_data_may_be_empty_on_a_rank(world: Any) -> None:
    x = column(9 if world.rank == 0 else 0)
    sharded = data.shard(x, communicator=world, batch_size=4, shard=False)
    found = numbers(sharded.get_tf_dataset())
    assert [len(batch) for batch in found] == (
        [4, 4, 1] if world.rank == 0 else [0] * 3
    )


@pytest.mark.parametrize("to", ["all", "rank0"])
@pytest.mark.parametrize("count", [1, 2, 103])
def test_predictions_come_back_in_order(world: Any, count: int, to: Any) -> None:
    x = column(count)
    sharded = data.shard(x, communicator=world, batch_size=8, training=False)
    local = np.concatenate([np.asarray(b) for b in sharded.get_tf_dataset()])
    outputs = {"a": local, "b": [local.astype("int32").repeat(3, 1)]}
    whole = data.gather_predictions(outputs, sharded, world, to=to)
    if to == "rank0" and world.rank > 0:
        assert whole is None
        return
    np.testing.assert_array_equal(whole["a"], x)
    np.testing.assert_array_equal(whole["b"][0], x.astype("int32").repeat(3, 1))
    assert whole["b"][0].dtype == np.int32


@pytest.mark.parametrize("to", ["all", "rank0"])
def test_outputs_without_a_row_an_example_raise_on_all_ranks(
    world: Any, to: Any
) -> None:
    batches = tf.data.Dataset.range(9).batch(2)
    sharded = data.shard(batches, communicator=world, training=False)
    local = np.concatenate([np.asarray(b) for b in sharded.get_tf_dataset()])
    wrong = local[: len(local) - (world.rank == world.size - 1)]
    with pytest.raises(ValueError, match="one row an example"):
        data.gather_predictions(wrong, sharded, world, to=to)
