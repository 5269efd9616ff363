"""`distkeras run` over two hosts, which are network namespaces of this machine."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import mpi_runtimes
import numpy as np
import pytest
from several_hosts import Hosts
from several_hosts import two_hosts

pytestmark = pytest.mark.launches


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Two hosts."""
    with two_hosts(tmp_path) as made:
        yield made


@pytest.fixture(params=["Open MPI", "MPICH"])
def job(request: pytest.FixtureRequest, hosts: Hosts) -> list[str]:
    """`distkeras run` for one rank on each of the hosts."""
    words = [sys.executable, "-m", "distkeras", "run"]
    if request.param == "MPICH":
        words += ["--mpiexec", mpi_runtimes.mpich().command[0]]
    words += ["-H", ",".join(f"{address}:1" for address in hosts.addresses)]
    if request.param == "MPICH":
        return [*words, "-launcher", "ssh", "-launcher-exec", str(hosts.agent)]
    return [*words, "--prtemca", "plm_ssh_agent", str(hosts.agent)]


def finish(
    hosts: Hosts, job: list[str], cwd: Path, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Runs a job from the first host to its end."""
    return subprocess.run(
        hosts.on_first(job),
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **environ},
        stdin=subprocess.DEVNULL,
        timeout=90,
    )


def test_environment_folder_and_path_reach_the_other_host(
    hosts: Hosts, job: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "show.py"
    script.write_text(
        "import json, os, socket, sys\n"
        "import numpy as np\n"
        "import helper\n"
        "from distkeras import communicators\n"
        "world = communicators.world()\n"
        "buffer = np.full(1 << 18, world.rank + 1, 'float32')\n"
        "world.allreduce(buffer)\n"
        "assert (buffer == 3).all()\n"
        "print(json.dumps([world.rank, world.local_rank, world.local_size,\n"
        "    socket.gethostname(), os.getcwd(), os.environ.get('MINE'), helper.x]))\n"
    )
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "helper.py").write_text("x = 'from PYTHONPATH'\n")
    words = [*job, "show.py"]
    answer = finish(hosts, words, tmp_path, MINE="a b", PYTHONPATH=str(modules))
    assert answer.returncode == 0, answer.stderr
    lines = sorted(json.loads(line) for line in answer.stdout.splitlines())
    assert lines == [
        [rank, 0, 1, name, str(tmp_path), "a b", "from PYTHONPATH"]
        for rank, name in enumerate(hosts.names)
    ]


def test_an_exception_on_the_other_host_ends_the_job(
    hosts: Hosts, job: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "fail.py"
    script.write_text(
        "import time, distkeras\n"
        "if distkeras.rank() == 1: raise ValueError('on purpose')\n"
        "time.sleep(60)\n"
    )
    start = time.monotonic()
    answer = finish(hosts, [*job, "fail.py"], tmp_path)
    assert time.monotonic() - start < 20
    assert answer.returncode == 1, answer.stderr
    assert "[rank 1] ValueError: on purpose" in answer.stderr


@pytest.mark.soak
@pytest.mark.tensorflow
def test_training_over_tcp_is_exact(hosts: Hosts, tmp_path: Path) -> None:
    """The weights of one process with the global batch."""
    script = tmp_path / "train.py"
    script.write_text(
        "import keras, numpy as np, distkeras\n"
        "keras.utils.set_random_seed(0)\n"
        "x = np.random.default_rng(0).normal(size=(40, 5)).astype('float32')\n"
        "y = x.sum(1, keepdims=True)\n"
        "model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(8, 'tanh'),\n"
        "    keras.layers.Dense(1)])\n"
        "trainer = distkeras.Trainer(model, learning_rate_scaling=None)\n"
        "trainer.compile(keras.optimizers.SGD(0.1), 'mse')\n"
        "trainer.fit(x, y, global_batch_size=8, epochs=2, shuffle=False, verbose=0)\n"
        "if distkeras.rank() == 0:\n"
        "    np.savez(f'{distkeras.size()}.npz', *model.get_weights())\n"
    )
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [sys.executable, "-m", "distkeras", "run"]
    command += ["-H", ",".join(f"{address}:1" for address in hosts.addresses)]
    command += ["--prtemca", "plm_ssh_agent", str(hosts.agent), "train.py"]
    answer = finish(hosts, command, tmp_path, **quiet)
    assert answer.returncode == 0, answer.stderr
    assert "2 ranks on 2 nodes" in answer.stderr
    answer = finish(hosts, [sys.executable, "train.py"], tmp_path, **quiet)
    assert answer.returncode == 0, answer.stderr

    one, two = (np.load(tmp_path / f"{size}.npz") for size in (1, 2))
    assert len(one.files) == 4
    for name in one.files:
        np.testing.assert_allclose(two[name], one[name], 1e-5, 1e-6)
