"""The hierarchical communicator on hosts that only a network joins.

On virtual nodes of one machine it is tested with all others, in test_communicators.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from several_hosts import Hosts
from several_hosts import two_hosts

pytestmark = pytest.mark.launches

SCRIPT = """\
import json, statistics, time
import numpy as np
from distkeras import communicators
from distkeras.communicators import HierarchicalCommunicator, MPICommunicator

world = communicators.world()
rank, size = world.rank, world.size
made = {"hierarchical": HierarchicalCommunicator(), "mpi": MPICommunicator()}
assert world.name == "hierarchical", communicators.describe()
assert made["hierarchical"].node_sizes == (2, 1)
rng = np.random.default_rng(rank)
equal = []
for length, op in ((1, "sum"), (1000, "max"), (3_000_001, "sum"), (3_000_001, "max")):
    for by_parts in (False, True):
        source = rng.normal(size=length).astype("float32")
        parts = world.allgather(source)
        mine = source.copy()
        if by_parts:
            def pack(part, start):
                part[:] = source[start : start + part.size]
            world.allreduce_parts(mine, op, pack=pack, unpack=lambda part, start: None)
        else:
            world.allreduce(mine, op)
        exact = getattr(np, op)(np.array(parts, "float64"), axis=0)
        np.testing.assert_allclose(mine, exact, rtol=1e-5, atol=1e-5)
        equal.append(len(set(world.allgather_object(mine.tobytes()))) == 1)
assert all(equal), equal
seconds = {name: [] for name in made}
buffers = {name: np.zeros(LENGTH, "float32") for name in made}
for _ in range(ROUNDS):
    for name, communicator in made.items():
        world.barrier()
        start = time.perf_counter()
        communicator.allreduce(buffers[name])
        slowest = np.array([time.perf_counter() - start])
        world.allreduce(slowest, "max")
        seconds[name].append(float(slowest[0]))
if rank == 0:
    medians = {name: statistics.median(s) for name, s in seconds.items()}
    print(json.dumps({"medians": medians, "what": communicators.describe()}))
"""


def run(hosts: Hosts, tmp_path: Path, length: int, rounds: int) -> dict[str, object]:
    """Runs the script on two ranks of one host and one of the other."""
    script = tmp_path / "script.py"
    values = {"LENGTH": str(length), "ROUNDS": str(rounds)}
    text = SCRIPT
    for name, value in values.items():
        text = text.replace(name, value)
    script.write_text(text)
    first, second = hosts.addresses
    words = [sys.executable, "-m", "distkeras", "run", "-n", "3"]
    words += ["-H", f"{first}:2,{second}:1", "--prtemca", "plm_ssh_agent"]
    answer = subprocess.run(
        hosts.on_first([*words, str(hosts.agent), str(script)]),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=dict(os.environ),
        stdin=subprocess.DEVNULL,
        timeout=110,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    result: dict[str, object] = json.loads(answer.stdout.splitlines()[-1])
    return result


def test_chosen_where_hosts_have_several_ranks(tmp_path: Path) -> None:
    with two_hosts(tmp_path) as hosts:
        result = run(hosts, tmp_path, 1000, 1)
    assert str(result["what"]).startswith("hierarchical (3 ranks on 2 nodes")


@pytest.mark.soak
def test_faster_than_a_flat_allreduce_on_a_slow_link(tmp_path: Path) -> None:
    """Every byte crosses the link once, at 1 Gbit/s."""
    with two_hosts(tmp_path) as hosts:
        for name in hosts.names:
            words = f"ip netns exec {name} tc qdisc add dev {name}c root tbf".split()
            words += ["rate", "1gbit", "burst", "256kb", "latency", "50ms"]
            subprocess.run(words, check=True)
        result = run(hosts, tmp_path, 4 << 20, 7)
    medians = result["medians"]
    assert isinstance(medians, dict)
    print({name: f"{1e3 * s:.0f} ms for 16 MiB" for name, s in medians.items()})
    assert medians["hierarchical"] < medians["mpi"]
