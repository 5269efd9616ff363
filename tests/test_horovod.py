"""Leftovers of Horovod: variables that have no effect are named, once."""

import contextlib
import inspect
import io
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import pytest

import distkeras
import distkeras.callbacks
from distkeras import _horovod
from distkeras._launcher import Launcher
from distkeras.launch import _cli


def test_variables_are_named_with_what_replaces_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    environ = {"HOROVOD_FUSION_THRESHOLD": "1", "HOROVOD_NEW": "1", "PATH": "/bin"}
    _horovod.warn_of_ignored_variables(environ, None)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().splitlines() == [
        "These Horovod variables have no effect. Instead:",
        "  HOROVOD_FUSION_THRESHOLD: Trainer(model, bucket_bytes=...)",
        "  HOROVOD_NEW",
    ]


def test_ranks_of_horovodrun_are_told_how_to_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    environ = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}
    _horovod.warn_of_ignored_variables(environ, None)
    assert "finds no other ranks" in caplog.text
    caplog.clear()
    _horovod.warn_of_ignored_variables(environ, Launcher("test", 0, 2))
    assert "have no effect" in caplog.text
    assert "finds no other ranks" not in caplog.text


def test_nothing_is_said_without_them_or_on_other_ranks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _horovod.warn_of_ignored_variables({"PATH": "/bin"}, None)
    _horovod.warn_of_ignored_variables({"HOROVOD_X": "x"}, Launcher("test", 1, 2))
    assert caplog.records == []


def test_what_the_page_names_exists() -> None:
    """Names of distkeras, options of the Trainer and of the command line."""
    page = (Path(__file__).parent.parent / "docs/from-horovod.md").read_text()
    page += "".join(f"`{text}`" for text in _horovod._INSTEAD.values())
    page += "".join(_horovod.WARMUP_ARGUMENTS.values())
    names = set(re.findall(r"`distkeras\.((?:callbacks\.)?\w+)", page))
    assert len(names) >= 10
    for name in names:
        here = distkeras
        for part in name.split("."):
            here = getattr(here, part)
    options = set(re.findall(r"Trainer\(model, (\w+)=", page))
    assert len(options) > 4
    assert options <= set(inspect.signature(distkeras.Trainer).parameters)
    flags = set(re.findall(r"`distkeras run [^`]*?(--[\w-]+)|`(--max-restarts)`", page))
    with pytest.raises(SystemExit), contextlib.redirect_stdout(io.StringIO()) as said:
        _cli.main(["run", "--help"])
    assert flags
    for flag in itertools.chain.from_iterable(flags):
        assert flag in said.getvalue()


# Horovod 0.28, `horovod.tensorflow.keras`.
ARGUMENTS = (
    "name",
    "device_dense",
    "device_sparse",
    "sparse_as_dense",
    "gradient_predivide_factor",
    "op",
    "backward_passes_per_step",
    "average_aggregated_gradients",
    "num_groups",
    "groups",
    "process_set",
    "scale_local_gradients",
)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_its_optimizer_are_explained(name: str) -> None:
    optimizer = keras.optimizers.SGD(0.1)
    with pytest.raises(TypeError, match=f"Instead of Horovod's\n  {name}: ") as error:
        distkeras.DistributedOptimizer(optimizer, **{name: 1})
    instead = _horovod.OPTIMIZER_ARGUMENTS[name]
    if instead.endswith("=..."):
        parameters = inspect.signature(distkeras.DistributedOptimizer).parameters
        assert instead.removesuffix("=...") in parameters
    assert instead in str(error.value)


def test_what_horovod_does_not_have_either_is_pythons_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'unknown'$"):
        distkeras.DistributedOptimizer(keras.optimizers.SGD(0.1), unknown=1)


# As in Horovod's documentation, with what takes their place.
REAL = {
    "HOROVOD_AUTOTUNE": ("1", "there is nothing to tune"),
    "HOROVOD_CYCLE_TIME": ("3.5", "ranks do not negotiate"),
    "HOROVOD_ELASTIC": ("1", "distkeras run --elastic"),
    "HOROVOD_FUSION_THRESHOLD": ("33554432", "bucket_bytes="),
    "HOROVOD_HIERARCHICAL_ALLREDUCE": ("1", "DISTKERAS_COMMUNICATOR"),
    "HOROVOD_STALL_CHECK_TIME_SECONDS": ("30", "DISTKERAS_TIMEOUT"),
    "HOROVOD_THREAD_AFFINITY": ("4,5,6,7", ""),
    "HOROVOD_TIMELINE": ("/tmp/timeline.json", "Trainer(model, timeline="),
}
# What horovodrun gives each of its processes.
STARTED = {
    "HOROVOD_CONTROLLER": "gloo",
    "HOROVOD_CPU_OPERATIONS": "gloo",
    "HOROVOD_CROSS_RANK": "0",
    "HOROVOD_CROSS_SIZE": "1",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "12345",
    "HOROVOD_HOSTNAME": "localhost",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "2",
}


def ask(words: list[str], environ: dict[str, str]) -> str:
    """Asks for rank and size in fresh processes; returns what they say."""
    code = "import distkeras; distkeras.rank(); distkeras.size()"
    answer = subprocess.run(
        [sys.executable, *words, code],
        capture_output=True,
        text=True,
        env={**os.environ, **environ},
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stderr


@pytest.mark.launches
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_world_warns_once(ranks: int) -> None:
    words = ["-c"]
    if ranks > 1:
        words = ["-m", "distkeras", "run", "-n", "2", "-m", "timeit", "-n", "1"]
    said = ask(words, {name: value for name, (value, _) in REAL.items()})
    for name, (_, instead) in REAL.items():
        (line,) = [line for line in said.splitlines() if name in line.split(":")[0]]
        assert instead in line
    assert said.count("have no effect") == 1
    assert "horovodrun" not in said


@pytest.mark.launches
def test_a_process_of_horovodrun_hears_how_to_start() -> None:
    said = ask(["-c"], STARTED)
    assert said.count("started by horovodrun and finds no other ranks") == 1
    assert "HOROVOD_CONTROLLER: DISTKERAS_COMMUNICATOR" in said
