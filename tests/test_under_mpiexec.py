"""Runs the other tests' bodies under real launchers, at 1, 2 and 3 ranks."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from mpi_runtimes import Finished
from mpi_runtimes import Runtime
from mpi_runtimes import launch
from mpi_runtimes import mpich
from mpi_runtimes import open_mpi

pytestmark = pytest.mark.launches

TESTS = Path(__file__).parent

# At one rank the launcher makes no difference but for MPI's own communicators.
AT_ONE_RANK = ("test_communicators.py", "test_collectives.py", "test_world.py")

# What a second MPI library could do otherwise.
ON_MPICH = (
    "test_communicators.py",
    "test_collectives.py",
    "test_shared_memory.py",
    "test_world.py",
)


def run_tests(
    runtime: Runtime,
    ranks: int,
    paths: tuple[str, ...],
    *options: str,
    timeout: float,
) -> Finished:
    """Runs tests on several ranks in one job and checks that some passed."""
    arguments = ["-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider"]
    arguments += [
        "-m",
        "not launches and not soak",
        "--of-ranks",
        "--rootdir",
        str(TESTS.parent),
    ]
    arguments += ["-c", str(TESTS.parent / "pyproject.toml")]
    result = launch(
        runtime,
        ranks,
        [*arguments, *options, *(str(TESTS / path) for path in paths)],
        timeout=timeout,
    )
    assert result.code == 0, result.tail
    assert result.count("passed") > 0, result.tail
    assert result.count("failed") == 0, result.tail
    return result


@pytest.mark.timeout(1900)
@pytest.mark.parametrize("ranks", (2, 3))
def test_all_on_open_mpi(ranks: int) -> None:
    run_tests(open_mpi(), ranks, ("",), timeout=1800)


@pytest.mark.soak
@pytest.mark.timeout(3700)
@pytest.mark.parametrize("ranks", (1, 2, 3))
def test_whole_on_open_mpi(ranks: int) -> None:
    """Those too that a run of everything deals to other numbers of ranks."""
    run_tests(open_mpi(), ranks, ("",), "--whole", timeout=3600)


@pytest.mark.timeout(400)
def test_some_at_one_rank() -> None:
    run_tests(open_mpi(), 1, AT_ONE_RANK, "--whole", timeout=300)


@pytest.mark.timeout(700)
@pytest.mark.parametrize("ranks", (2, 3))
def test_some_on_mpich(ranks: int) -> None:
    run_tests(mpich(), ranks, ON_MPICH, timeout=600)


def write(tmp_path: Path, text: str) -> list[str]:
    """Writes a test file beside a copy of the conftest; returns pytest's arguments."""
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "test_it.py").write_text(textwrap.dedent(text))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return ["-m", "pytest", "-v", "--color=no", "-p", "no:cacheprovider", str(tmp_path)]


def test_a_failure_on_one_rank_is_one_on_every_rank(tmp_path: Path) -> None:
    """The summary is rank 0's, which saw nothing wrong by itself."""
    arguments = write(
        tmp_path,
        """
        import pytest
        def test_call(world): assert world.rank != 1, "not on one"
        @pytest.fixture
        def broken(world): assert world.rank != 2, "no setup"
        def test_setup(broken): pass
        def test_skip(world):
            if world.rank == 2: pytest.skip("here only")
        def test_fine(world): world.barrier()
        """,
    )
    result = launch(open_mpi(), 3, arguments, timeout=60)
    assert result.code != 0, result.tail
    for count, outcome in ((2, "failed"), (1, "error"), (1, "passed")):
        assert result.count(outcome) == count, result.tail
    assert "call failed on rank 1: AssertionError: not on one" in result.output
    assert "setup failed on rank 2: AssertionError: no setup" in result.output
    assert "call failed on rank 2: skipped" in result.output
    assert result.output.count("test session starts") == 1  # the others are silent
    assert "[rank 1] " in result.output  # but for their own failures


@pytest.mark.parametrize(
    ("name", "statement", "text"),
    (
        ("environment", "os.environ['LEAK'] = '1'", "variables: ['LEAK']"),
        ("thread", "threading.Thread(target=time.sleep, args=(5,)).start()", "threads"),
        ("files", "tempfile.mkdtemp()", "temporary files"),
    ),
)
def test_a_leak_fails_the_test(
    tmp_path: Path, name: str, statement: str, text: str
) -> None:
    arguments = write(
        tmp_path,
        f"""
        import os, tempfile, threading, time
        def test_leak(world):
            if world.rank == world.size - 1:
                {statement}
        """,
    )
    result = launch(open_mpi(), 2, arguments, timeout=60)
    assert result.code != 0, result.tail
    assert result.count("error") == 1 and text in result.output, result.tail


@pytest.mark.timeout(150)
def test_a_hang_ends_the_job_with_the_stack(tmp_path: Path) -> None:
    arguments = write(
        tmp_path,
        """
        import time
        def test_hang(world):
            if world.rank == 0:
                world.barrier()  # waits for those who never come
            time.sleep(50)
        """,
    )
    arguments += ["--timeout=4", "--timeout-method=thread"]
    for _ in range(3):
        result = launch(open_mpi(), 2, arguments, timeout=40)
        assert result.code != 0, result.tail
        # Open MPI may end before it has passed on all that was said last.
        if "Timeout" in result.output and "in test_hang" in result.output:
            break
    else:
        raise AssertionError(result.tail)


def test_different_tests_on_different_ranks_are_refused(tmp_path: Path) -> None:
    arguments = write(
        tmp_path,
        """
        from distkeras import communicators
        if communicators.rank() == 0:
            def test_only_there(): pass
        def test_everywhere(world): world.barrier()
        """,
    )
    result = launch(open_mpi(), 2, arguments, timeout=40)
    assert result.code != 0, result.tail
    assert "Expected the collected tests to be the same" in result.output
