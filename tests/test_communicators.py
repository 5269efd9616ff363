"""Every communicator keeps the interface's promises, with any number of ranks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from distkeras._errors import CommunicatorError
from distkeras._errors import MismatchError
from distkeras._launcher import discover
from distkeras.communicators import Communicator
from distkeras.communicators import HierarchicalCommunicator
from distkeras.communicators import MPICommunicator
from distkeras.communicators import SharedMemoryCommunicator
from distkeras.communicators import SingleCommunicator
from distkeras.communicators import _shared_chain
from distkeras.communicators import _shared_reduction
from distkeras.communicators import agree
from distkeras.communicators import aligned_zeros
from distkeras.communicators import collectively
from distkeras.communicators._agreement import name_ranks

pytestmark = pytest.mark.dealt

NUMBERS = ("uint8", "int8", "int32", "int64", "float32", "float64")
HALVES = ("float16", ml_dtypes.bfloat16)
OPS = {"sum": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}

# By kind: ranks of a node, 0 for as MPI finds them. Three ranks make a node of one.
NODES = {"nodes": 0, "nodes of two": 2, "nodes of one": 1}


class SmallChunks(MPICommunicator):
    """Cuts messages where nobody would, to reach the seams."""

    chunk_bytes = 24


class Apart(MPICommunicator):
    """MPI takes ranks for alone, as under a launcher that tells it nothing."""

    def _node_leader(self) -> int:
        super()._node_leader()
        return self._rank


# MPI's need mpiexec: test_under_mpiexec.py runs them, at 1, 2 and 3 ranks.
KINDS = ["single", "world"]
if discover(os.environ) is not None:
    KINDS += ["mpi", "self", "chunks"]
    KINDS += ["shared", "shared chunks", "shared slices", "shared in turn"]
    KINDS += ["nodes", "nodes of two", "nodes of one", "apart", "nodes apart"]

# By kind: chunks of few cache lines, slices where each would do it all, and sums in
# turn whatever the number of cores.
SHARED = {
    "shared": {},
    "shared chunks": {"chunk_bytes": 320, "direct_bytes": 1 << 20},
    "shared slices": {"chunk_bytes": 448, "direct_bytes": 0, "in_turn": False},
    "shared in turn": {"chunk_bytes": 192, "direct_bytes": 0, "in_turn": True},
}


@pytest.fixture(params=KINDS)
def communicator(
    request: pytest.FixtureRequest, world: Communicator
) -> Iterator[Communicator]:
    """Each implementation."""
    kind = request.param
    if kind == "single":
        made: Communicator = SingleCommunicator()
    elif kind == "world":
        made = world.duplicate()
    elif kind == "self":
        from mpi4py import MPI

        made = MPICommunicator(MPI.COMM_SELF)
    elif kind == "apart":
        made = SharedMemoryCommunicator(Apart(), chunk_bytes=320)
    elif kind == "nodes apart":
        made = HierarchicalCommunicator(Apart(), chunk_bytes=4096)
        assert made.node_sizes == (world.size,)
    elif kind in NODES:
        size = world.size
        nodes = {2: [r // 2 for r in range(size)], 1: [*range(size)], 0: None}
        made = HierarchicalCommunicator(
            node_of_rank=nodes[NODES[kind]], chunk_bytes=4096
        )
    elif kind in SHARED:
        made = SharedMemoryCommunicator(**SHARED[kind])
    else:
        made = MPICommunicator() if kind == "mpi" else SmallChunks()
    yield made
    made.close()


def values(rank: int, dtype: object, length: int = 17) -> np.ndarray:
    """Small numbers that differ by rank and element; products of three are exact."""
    return ((np.arange(length) + rank) % 4 + 1).astype(dtype)


def sizes(communicator: Communicator, length: int) -> int:
    """Shortens a buffer that would go in thousands of MPI's messages."""
    return min(length, 100) if isinstance(communicator, SmallChunks) else length


def same_everywhere(communicator: Communicator, array: np.ndarray) -> bool:
    return len(set(communicator.allgather_object(array.tobytes()))) == 1


def test_who_am_i(communicator: Communicator) -> None:
    ranks = communicator.allgather_object(communicator.rank)
    assert ranks == list(range(communicator.size))
    assert 0 <= communicator.local_rank < communicator.local_size <= communicator.size
    assert len(communicator.hosts) == communicator.size
    here = communicator.hosts[communicator.rank]
    assert communicator.hosts.count(here) == communicator.local_size


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", NUMBERS + HALVES)
def test_allreduce(communicator: Communicator, dtype: object, op: str) -> None:
    for length in (17, 17**2, 17**3):
        buffer = values(communicator.rank, dtype, length)
        communicator.allreduce(buffer, op)
        everyone = [values(r, dtype, length) for r in range(communicator.size)]
        expected = OPS[op].reduce(everyone, dtype=buffer.dtype)
        assert buffer.dtype == expected.dtype
        np.testing.assert_array_equal(buffer, expected)
        assert same_everywhere(communicator, buffer)


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_is_rounded_once(
    communicator: Communicator, dtype: object
) -> None:
    """A big number and many small ones that half precision would lose one by one."""
    size, rank = communicator.size, communicator.rank
    one = np.array(1, dtype)
    step = float(ml_dtypes.finfo(one.dtype).eps) / 2
    buffer = np.array([1.0 if rank == 0 else step], dtype)
    communicator.allreduce(buffer)
    assert buffer[0] == np.float32(1 + (size - 1) * step).astype(dtype)


def test_half_precision_overflows_to_infinity(communicator: Communicator) -> None:
    buffer = np.array([60000.0], np.float16)
    communicator.allreduce(buffer)
    assert buffer[0] == (60000 if communicator.size == 1 else np.inf)


def test_booleans(communicator: Communicator) -> None:
    first, size = communicator.rank == 0, communicator.size
    for op, expected in (("sum", True), ("product", size == 1), ("max", True)):
        buffer = np.array([first, True, False])
        communicator.allreduce(buffer, op)
        assert buffer.tolist() == [expected, True, False]


@pytest.mark.parametrize("dtype", ("float32", "float64", *HALVES))
@pytest.mark.parametrize("op", OPS)
def test_nan_wins_with_equal_bits(
    communicator: Communicator, op: str, dtype: object
) -> None:
    """A NaN anywhere is one everywhere, whatever its sign and the order of ranks."""
    last = communicator.rank == communicator.size - 1
    nan = -np.nan if communicator.rank % 2 else np.nan
    buffer = np.array([nan, nan if last else 1.0, 2.0, -0.0 if last else 0.0], dtype)
    communicator.allreduce(buffer, op)
    assert np.isnan(buffer.astype("float32")).tolist() == [True, True, False, False]
    assert same_everywhere(communicator, buffer)


def test_sums_have_equal_bits(communicator: Communicator) -> None:
    generator = np.random.default_rng(communicator.rank)
    for length in (1, 1000, 100_003):
        buffer = generator.normal(size=length).astype("float32")
        communicator.allreduce(buffer)
        assert same_everywhere(communicator, buffer)


def test_empty_buffers(communicator: Communicator) -> None:
    empty = np.empty(0, "float32")
    communicator.allreduce(empty)
    communicator.broadcast(empty)
    assert [part.size for part in communicator.allgather(empty)] == (
        [0] * communicator.size
    )


@pytest.mark.parametrize("dtype", (*NUMBERS, *HALVES, "bool", "complex64"))
def test_allgather_of_different_lengths(
    communicator: Communicator, dtype: object
) -> None:
    lengths = [17, 32, 0, 81, 12, 15, 23, 22]
    mine = values(communicator.rank, dtype, lengths[communicator.rank])
    parts = communicator.allgather(mine)
    assert len(parts) == communicator.size
    for rank, part in enumerate(parts):
        np.testing.assert_array_equal(part, values(rank, dtype, lengths[rank]))
        assert part.dtype == mine.dtype
        part[...] = 0  # its own memory: the input stays
    np.testing.assert_array_equal(
        mine, values(communicator.rank, dtype, lengths[communicator.rank])
    )


@pytest.mark.parametrize("dtype", (*NUMBERS, *HALVES, "bool"))
def test_broadcast_from_each_root(communicator: Communicator, dtype: object) -> None:
    for root in range(communicator.size):
        buffer = values(communicator.rank, dtype)
        communicator.broadcast(buffer, root)
        np.testing.assert_array_equal(buffer, values(root, dtype))


def test_objects(communicator: Communicator) -> None:
    for root in range(communicator.size):
        mine = {"rank": communicator.rank, "text": "é" * 100, "none": None}
        theirs = communicator.broadcast_object(mine, root)
        assert theirs == {"rank": root, "text": "é" * 100, "none": None}
    gathered = communicator.allgather_object([communicator.rank] * communicator.rank)
    assert gathered == [[r] * r for r in range(communicator.size)]
    for root in range(communicator.size):
        gathered = communicator.gather_object([communicator.rank] * 40, root)
        everyone = [[r] * 40 for r in range(communicator.size)]
        assert gathered == (everyone if communicator.rank == root else None)


def test_an_object_that_cannot_be_pickled(communicator: Communicator) -> None:
    """One rank's bad object is every rank's error, and nobody waits."""
    if isinstance(communicator, SingleCommunicator):
        pytest.skip("a single process pickles nothing")
    last = communicator.size - 1
    bad = threading.Lock() if communicator.rank == last else "fine"
    with pytest.raises(CommunicatorError, match=f"rank {last}: TypeError"):
        communicator.allgather_object(bad)
    with pytest.raises(CommunicatorError, match=f"rank {last}: TypeError"):
        communicator.broadcast_object(bad, last)
    with pytest.raises(CommunicatorError, match=f"rank {last}: TypeError"):
        communicator.gather_object(bad)
    assert communicator.allgather_object(1) == [1] * communicator.size


def test_duplicates_do_not_hear_each_other(communicator: Communicator) -> None:
    """Two threads, each with a communicator of its own, do not mix messages."""
    other = communicator.duplicate()
    results = {}

    def work(name: str, group: Communicator, factor: int) -> None:
        for _ in range(50):
            buffer = np.full(9, factor)
            group.allreduce(buffer)
            results[name] = (
                results.get(name, True) and (buffer == factor * group.size).all()
            )

    thread = threading.Thread(target=work, args=("thread", other, 100))
    thread.start()
    work("main", communicator, 1)
    thread.join()
    other.close()
    assert results == {"thread": True, "main": True}


def test_wrong_arguments(communicator: Communicator) -> None:
    good = np.ones(4, "float32")
    with pytest.raises(ValueError, match="op to be one of sum.*Received: 'mean'"):
        communicator.allreduce(good, "mean")
    with pytest.raises(ValueError, match="root to be a rank"):
        communicator.broadcast(good, communicator.size)
    with pytest.raises(ValueError, match=r"flat.*shape=\(2, 2\)"):
        communicator.allreduce(good.reshape(2, 2))
    with pytest.raises(ValueError, match="C-contiguous"):
        communicator.allreduce(good[::2])
    with pytest.raises(TypeError, match="NumPy array.*list"):
        communicator.allreduce([1.0])
    good.flags.writeable = False
    with pytest.raises(ValueError, match="writable"):
        communicator.allreduce(good)
    assert len(communicator.allgather(good)) == communicator.size


def test_closed(communicator: Communicator) -> None:
    other = communicator.duplicate()
    other.close()
    other.close()
    with pytest.raises(CommunicatorError, match="closed"):
        other.barrier()
    communicator.barrier()


def test_agree(communicator: Communicator) -> None:
    agree(communicator, "rows", ["a", "b"])
    agree(communicator, "rows", [])


def test_agree_names_the_first_difference(communicator: Communicator) -> None:
    if communicator.size == 1:
        pytest.skip("one rank agrees with itself")
    last = communicator.size - 1
    odd = communicator.rank == last
    rows = ["a: (2,)", "b: (3,)" if odd else "b: (4,)", "c: (5,)"]
    with pytest.raises(MismatchError) as caught:
        agree(communicator, "the variables", rows)
    text = str(caught.value)
    others = name_ranks(range(last))
    assert f"{others}: b: (4,)" in text and f"rank {last}: b: (3,)" in text
    assert "the variables" in text and "entry 2 of 3" in text
    assert len(set(communicator.allgather_object(text))) == 1


def test_agree_on_the_number_of_rows(communicator: Communicator) -> None:
    if communicator.size == 1:
        pytest.skip("one rank agrees with itself")
    rows = ["a", "b"][: 2 if communicator.rank == 0 else 1]
    with pytest.raises(MismatchError, match=r"ranks have 2, 1(, 1)* entries"):
        agree(communicator, "rows", rows)


def test_agree_tells_rows_from_their_concatenation(communicator: Communicator) -> None:
    if communicator.size == 1:
        pytest.skip("one rank agrees with itself")
    with pytest.raises(MismatchError):
        agree(communicator, "x", ["ab", "c"] if communicator.rank else ["a", "bc"])


def test_collectively(communicator: Communicator) -> None:
    assert collectively(communicator, int, "12") == 12
    last = communicator.size - 1

    def fragile(rank: int) -> int:
        if rank == last:
            raise KeyError("gone")
        return rank

    with pytest.raises(CommunicatorError, match=f"rank {last}: KeyError: 'gone'") as e:
        collectively(communicator, fragile, communicator.rank)
    assert (type(e.value.__cause__) is KeyError) == (communicator.rank == last)


def test_name_ranks() -> None:
    assert name_ranks([4]) == "rank 4"
    assert name_ranks([0, 1]) == "ranks 0, 1"
    assert name_ranks([7, 0, 1, 2, 4, 5]) == "ranks 0-2, 4, 5, 7"


class Source:
    """Packs what it holds, keeps what is unpacked, and looks at the order."""

    def __init__(self, held: np.ndarray) -> None:
        self.held, self.seen = held, np.zeros_like(held)
        self.packed, self.unpacked = [0], [0]

    def pack(self, part: np.ndarray, start: int) -> None:
        assert part.dtype == self.held.dtype and start == self.packed[-1]
        self.packed.append(start + part.size)
        part[...] = self.held[start : self.packed[-1]]

    def unpack(self, part: np.ndarray, start: int) -> None:
        assert start == self.unpacked[-1]
        self.unpacked.append(start + part.size)
        self.seen[start : self.unpacked[-1]] = part
        part[...] = 1  # the caller's from here on


@pytest.mark.parametrize("dtype", ("float32", "int64", "float16", "bool"))
@pytest.mark.parametrize("op", OPS)
def test_parts(communicator: Communicator, dtype: str, op: str) -> None:
    """Packed and unpacked in order, each element once; in turn with whole buffers."""
    for length in (1, 16, sizes(communicator, 20_001)):
        everyone = [values(r, dtype, length) for r in range(communicator.size)]
        expected = OPS[op].reduce(everyone, dtype=dtype)
        buffer = aligned_zeros(length, dtype)
        for _ in range(2):
            source = Source(everyone[communicator.rank])
            communicator.allreduce_parts(
                buffer, op, pack=source.pack, unpack=source.unpack
            )
            np.testing.assert_array_equal(source.seen, expected)
            assert source.packed == source.unpacked and source.packed[-1] == length
            assert (buffer == 1).all()
            whole = source.held.copy()
            communicator.allreduce(whole, op)
            np.testing.assert_array_equal(whole, source.seen)
        assert same_everywhere(communicator, source.seen)
        assert len(set(communicator.allgather_object(len(source.packed)))) == 1


@pytest.mark.parametrize("op", ("sum", "max"))
def test_places_between_words(communicator: Communicator, op: str) -> None:
    """Arrays of a field, or of a file's middle."""
    length = sizes(communicator, 5_001)
    everyone = [values(r, "float32", length) for r in range(communicator.size)]
    room = np.zeros(4 * length + 1, np.uint8)
    buffer = room[1:].view("float32")
    assert not buffer.flags.aligned
    buffer[:] = everyone[communicator.rank]
    communicator.allreduce(buffer, op)
    np.testing.assert_array_equal(buffer, OPS[op].reduce(everyone, dtype="float32"))
    assert room[0] == 0


def test_another_order_of_bytes(communicator: Communicator) -> None:
    buffer = np.ones(3, ">f4" if np.little_endian else "<f4")
    if communicator.size == 1 and communicator.name == "single":
        communicator.allreduce(buffer)
    else:
        with pytest.raises(ValueError, match="order of bytes.*newbyteorder"):
            communicator.allreduce(buffer)
    assert (buffer == 1).all()


def test_parts_of_chunks(communicator: Communicator) -> None:
    """Shared memory hands over parts as long as its chunks."""
    buffer, parts = aligned_zeros(1000, "float32"), []
    communicator.allreduce_parts(
        buffer,
        pack=lambda part, start: part.fill(start),
        unpack=lambda part, start: parts.append(part.nbytes),
    )
    alone = communicator.size == 1 or not isinstance(
        communicator, SharedMemoryCommunicator
    )
    if not alone and communicator._chunk_bytes < 4000:
        assert max(parts) == communicator._chunk_bytes
        assert buffer[-1] == communicator.size * (1000 - parts[-1] // 4)
    elif alone and not isinstance(communicator, HierarchicalCommunicator):
        assert parts == [4000] and not buffer.any()


def test_slow_readers_read_what_was_packed(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that lag behind anywhere: a slot is written to when all have read it."""
    if not isinstance(
        communicator, SharedMemoryCommunicator | HierarchicalCommunicator
    ):
        pytest.skip("no memory is shared")
    lags = np.random.default_rng(communicator.rank)

    def lag() -> None:
        if lags.random() < 0.3:
            time.sleep(lags.random() / 500)

    def copy_bytes(source: np.ndarray, target: np.ndarray) -> None:
        lag()
        target[...] = source

    monkeypatch.setattr(_shared_reduction, "copy_bytes", copy_bytes)
    monkeypatch.setattr(_shared_chain, "copy_bytes", copy_bytes)
    rank, size = communicator.rank, communicator.size
    for number in range(12):
        length = (3000, 20, 700, 80)[number % 4]
        source = np.arange(length, dtype="int64") * (rank + 1) + number

        def pack(part: np.ndarray, start: int, source: np.ndarray = source) -> None:
            lag()
            part[...] = source[start : start + part.size]

        buffer = np.zeros(length, "int64")
        communicator.allreduce_parts(buffer, pack=pack, unpack=lambda *_: lag())
        expected = np.arange(length) * (size * (size + 1) // 2) + number * size
        np.testing.assert_array_equal(buffer, expected)


def test_growing_buffers(communicator: Communicator) -> None:
    """Longer and shorter ones in turn, so that chunks are made anew in between."""
    for length in (3, 5000, 7, 40_000, 20_000, 100_003, 1):
        length = sizes(communicator, length)
        buffer = np.arange(length, dtype="float64") + communicator.rank
        communicator.allreduce(buffer)
        shift = communicator.size * (communicator.size - 1) / 2
        np.testing.assert_array_equal(
            buffer, np.arange(length) * communicator.size + shift
        )


def test_arrays_at_odd_addresses(communicator: Communicator) -> None:
    if not isinstance(communicator, SharedMemoryCommunicator) or communicator.size < 2:
        pytest.skip("mpi4py takes no such arrays")
    raw = np.zeros(8 * 100 + 8, np.uint8)
    for shift in (0, 4, 1 + communicator.rank):
        buffer = raw[shift : shift + 800].view("float64")
        buffer[...] = 1
        communicator.allreduce(buffer)
        assert (buffer == communicator.size).all()


def test_different_calls_are_an_error_on_every_rank(communicator: Communicator) -> None:
    """Shared memory finds out by itself, and goes on."""
    if not isinstance(communicator, SharedMemoryCommunicator) or communicator.size < 2:
        pytest.skip("MPI does not notice")
    last = communicator.rank == communicator.size - 1
    for _ in range(2):
        for mine, theirs in ((3, 4), (3, 100_000), (100_000, 0)):
            with pytest.raises(CommunicatorError, match="Received") as caught:
                length = theirs if last else mine
                if length:
                    communicator.allreduce(np.ones(length))
                else:
                    communicator.barrier()
            texts = communicator.allgather_object(str(caught.value))
            assert len(set(texts)) == 1
            assert f"rank 0: allreduce (sum) of {mine} float64" in texts[0]
    buffer = np.ones(3)
    communicator.allreduce(buffer)
    assert buffer.tolist() == [communicator.size] * 3


def test_machines_of_different_processors(
    world: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one machine finds out about its processor, its peers cannot know."""
    if discover(os.environ) is None:
        pytest.skip("needs a launcher")
    from distkeras.communicators import _hierarchical

    if world.rank == 0:
        monkeypatch.setattr(_hierarchical, "place_matters", lambda *_: True)
    nodes = [*range(world.size)]
    communicator = HierarchicalCommunicator(node_of_rank=nodes)
    for op in OPS:
        buffer = values(world.rank, "float32", 1 << 15)
        communicator.allreduce(buffer, op)
        assert same_everywhere(communicator, buffer)
    communicator.close()
