"""One test body for any number of ranks: ranks run the tests in lockstep.

Run by `mpiexec -n N python -m pytest`, every rank runs the same tests. After each
phase of a test the ranks exchange its outcome, so a failure anywhere is a failure
everywhere, and no rank runs ahead into the next test's collectives. Ranks other than
0 are silent but for their own failures. A rank that hangs is ended by pytest-timeout,
and the job with it.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.terminal import TerminalReporter

from distkeras import communicators
from distkeras._launcher import discover

_LAUNCHER = discover(os.environ)
_MANY_CASES = 6
_HANDS = (2, 3, 2, 2)  # ranks
_HANDS_OF_MANY = (2, 0, 0, 3, 0)
_MANY = _LAUNCHER is not None and _LAUNCHER.size != 1
_RANK = _LAUNCHER.rank if _LAUNCHER is not None else 0

_MARKERS = (
    "launches: starts processes of its own; runs only without a launcher",
    "gpu: needs a GPU, CuPy and NCCL; skipped with the reason where they are missing",
    "soak: runs for minutes; left out by default",
    "dealt: a run of everything deals them to 2 and 3 ranks, see _deal",
    "tensorflow: needs the TensorFlow backend",
)

# What TensorFlow and Keras set when they are imported, in whichever test that is.
_LASTING_VARIABLES = (
    "PYTEST_CURRENT_TEST",
    "ENABLE_RUNTIME_UPTIME_TELEMETRY",
    "HDF5_PLUGIN_PATH",
    "KMP_",
    "TF2_BEHAVIOR",
    "TPU_",
)

# What TensorFlow removes at exit.
_LASTING_FILES = ("__autograph_generated_file",)

# Threads that libraries start once and keep.
_LASTING_THREADS = ("pytest_timeout", "pydevd", "asyncio_", "fsspec", "ptxas")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Gives every rank a temporary folder of its own.

    By default all would share pytest's, and remove each other's folders.
    """
    if _MANY:
        given = config.option.basetemp
        root = given if _RANK or given else tempfile.mkdtemp(prefix="pytest-ranks-")
        root = communicators.world().broadcast_object(root)
        config.option.basetemp = str(Path(root) / f"rank{_RANK}")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Registers the markers; silences all ranks but 0."""
    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)
    if not _MANY:
        return
    manager = config.pluginmanager
    manager.register(_Lockstep(communicators.world()), "lockstep")
    reporter = manager.getplugin("terminalreporter")
    if _RANK > 0 and reporter is not None:
        manager.unregister(reporter)
        nowhere = open(os.devnull, "w")  # noqa: SIM115
        config.add_cleanup(nowhere.close)
        manager.register(TerminalReporter(config, nowhere), "terminalreporter")
        manager.register(_OwnFailures(), "own-failures")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options that choose tests by what they have to do with ranks."""
    parser.addoption(
        "--of-ranks",
        action="store_true",
        help="run the tests that use `world` alone: others give the same at any size",
    )
    parser.addoption(
        "--whole",
        action="store_true",
        help="run the tests marked `dealt` at whatever size, all of them",
    )
    parser.addoption(
        "--record",
        type=Path,
        metavar="FILE",
        help="add a line of JSON for each equivalence test: ranks, test, difference",
    )


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leaves out what an option or the launcher makes pointless."""
    if config.getoption("--of-ranks"):
        chosen = [i for i in items if "world" in getattr(i, "fixturenames", ())]
        config.hook.pytest_deselected(items=[i for i in items if i not in chosen])
        items[:] = chosen
    everything = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if (everything or config.getoption("--of-ranks")) and not config.option.whole:
        left = _deal(items, 1 if _LAUNCHER is None else _LAUNCHER.size or 1)
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
    if _LAUNCHER is None:
        return
    skip = pytest.mark.skip(reason="starts processes of its own; run without mpiexec")
    for item in items:
        if item.get_closest_marker("launches") is not None:
            item.add_marker(skip)


def _deal(items: list[pytest.Item], size: int) -> list[pytest.Item]:
    """Returns which tests a run of everything leaves to other numbers of ranks.

    Those that are marked `dealt` train models for seconds, or are a thousand. Of four
    one runs at 3 ranks, which share the cores, and three at 2; where six or more are
    one function's cases, of five one at 2, one at 3, and three are left to the long
    run (`tests/test_under_mpiexec.py`, marked soak). One in twelve is for 1 rank, where
    a `Trainer` is Keras' own `fit`. Sums of digits (Thue and Morse's sequence) keep the
    choice from going along with any parameter. `--whole` runs all, and so does naming
    the file.
    """
    left = []
    marked = [item for item in items if item.get_closest_marker("dealt") is not None]
    marked = [item for item in marked if "world" in getattr(item, "fixturenames", ())]
    families = collections.Counter(_family(item) for item in marked)
    for number, item in enumerate(marked):
        many = families[_family(item)] >= _MANY_CASES
        hands = _HANDS_OF_MANY if many else _HANDS
        base = len(hands)
        hand = hands[_digit_sum(number, base) % base]
        runs = number % 12 == 0 if size == 1 else size > 3 or hand == size
        if not runs:
            left.append(item)
    return left


def _family(item: pytest.Item) -> str:
    """Returns the name that the cases of one test function share."""
    return item.nodeid.partition("[")[0]


def _digit_sum(number: int, base: int) -> int:
    """Returns the sum of the digits of a number."""
    total = 0
    while number:
        number, digit = divmod(number, base)
        total += digit
    return total


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Shows no stacks before its time of a test that may take longer than most."""
    own = item.get_closest_marker("timeout")
    if own is not None and own.args[0] > float(item.config.getini("timeout")):
        faulthandler.cancel_dump_traceback_later()


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """Prints the matrix of the equivalence tests that ran."""
    equivalence = sys.modules.get("equivalence")
    if equivalence is None or not equivalence.DIFFERENCES:
        return
    size = _LAUNCHER.size if _LAUNCHER is not None else 1
    terminalreporter.section(
        f"largest relative difference to one process, ranks: {size}"
    )
    for line in equivalence.matrix():
        terminalreporter.write_line(line)
    record = terminalreporter.config.option.record
    if record is not None and _RANK == 0:
        with record.open("a") as file:
            for test, difference in equivalence.DIFFERENCES.items():
                print(json.dumps([size, test, difference]), file=file)


class _Lockstep:
    """Keeps the ranks together and makes their outcomes equal."""

    def __init__(self, world: communicators.Communicator) -> None:
        # Its own message space: a test that leaves a collective half done must
        # not be answered by this plugin's.
        self._communicator = world.duplicate()
        self._passed = False

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Raises on every rank if they collected different tests."""
        names = [item.nodeid for item in session.items]
        communicators.agree(self._communicator, "the collected tests", names)
        if self._communicator.rank > 0:
            # They have chosen the tests; rank 0's write the cache.
            for name in ("lfplugin", "nfplugin", "stepwiseplugin"):
                if session.config.pluginmanager.hasplugin(name):
                    session.config.pluginmanager.unregister(name=name)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[Any]
    ) -> Any:
        """Fails the phase on every rank if it failed on one."""
        report = yield
        mine = (report.outcome, _reason(report))
        outcomes = self._communicator.allgather_object(mine)
        failed = {
            r: text for r, (word, text) in enumerate(outcomes) if word == "failed"
        }
        kinds = {word for word, _ in outcomes}
        if len(kinds) > 1 and report.outcome != "failed":
            if not failed:
                failed = {
                    r: "skipped"
                    for r, (word, _) in enumerate(outcomes)
                    if word != "passed"
                }
            report.outcome = "failed"
            report.longrepr = "\n".join(
                f"{report.when} failed on rank {r}: {text}"
                for r, text in failed.items()
            )
            report.failed_elsewhere = True
        return report

    def pytest_internalerror(self, excrepr: object) -> None:
        """Shows an error of pytest or of a plugin, on whichever rank."""
        print(f"[rank {_RANK}] {excrepr}", file=sys.__stderr__, flush=True)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Ends the job when this rank stops for a reason of its own."""
        if exitstatus in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR):
            self._communicator.abort(int(exitstatus))
        self._passed = exitstatus == pytest.ExitCode.OK

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        """Removes the temporary folders of a session that passed."""
        passed = self._communicator.allgather_object(self._passed)
        if all(passed):
            shutil.rmtree(config.option.basetemp, ignore_errors=True)
            self._communicator.barrier()
            if self._communicator.rank == 0:
                with contextlib.suppress(OSError):  # given, and not empty
                    Path(config.option.basetemp).parent.rmdir()


def _reason(report: pytest.TestReport) -> str:
    """Returns what a failed phase says of itself, one line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else report.longreprtext
    return text.strip().partition("\n")[0]


class _OwnFailures:
    """Prints what failed on this rank and not merely elsewhere."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Writes a failed phase to stderr."""
        if report.failed and not getattr(report, "failed_elsewhere", False):
            head = f"[rank {_RANK}] {report.nodeid}, {report.when}:"
            print(f"{head}\n{report.longreprtext}", file=sys.__stderr__, flush=True)


@pytest.fixture(scope="session")
def world() -> communicators.Communicator:
    """The world communicator: `single` without mpiexec, else all its ranks."""
    return communicators.world()


@pytest.fixture
def tmp_path_shared(world: communicators.Communicator, tmp_path: Path) -> Path:
    """Rank 0's `tmp_path`, on every rank."""
    return world.broadcast_object(tmp_path)


@pytest.fixture
def float64() -> Iterator[None]:
    """Makes Keras compute in float64, losses and metrics included."""
    import keras

    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


@pytest.fixture(autouse=True)
def _leaves_no_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    changed = {
        name
        for name in before | after
        if before.get(name) != after.get(name)
        and not name.startswith(_LASTING_VARIABLES)
    }
    for name in changed:  # the next test starts from what this one was given
        os.environ.pop(name, None)
        if name in before:
            os.environ[name] = before[name]
    assert not changed, f"the test changed environment variables: {sorted(changed)}"


@pytest.fixture(autouse=True)
def _leaves_no_threads() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 2
    while (left := _threads_since(before)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left, f"the test left threads running: {left}"


def _threads_since(before: set[threading.Thread]) -> list[str]:
    """Names new threads; C++ threads that once called Python do not count."""
    return [
        thread.name
        for thread in threading.enumerate()
        if thread not in before
        and not isinstance(thread, threading._DummyThread)
        and not thread.name.startswith(_LASTING_THREADS)
    ]


@pytest.fixture(autouse=True)
def _leaves_no_temporary_files(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[None]:
    before = tempfile.tempdir
    folder = tmp_path_factory.mktemp("tempdir")
    tempfile.tempdir = str(folder)
    yield
    tempfile.tempdir = before
    left = sorted(
        path.name
        for path in folder.iterdir()
        if not path.name.startswith(_LASTING_FILES)
    )
    assert not left, f"the test left temporary files: {left}"
