"""The logger: rank in every record, rank 0 at INFO, others at WARNING."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from distkeras import _logging
from distkeras._logging import LOGGER
from distkeras.communicators import Communicator


@contextlib.contextmanager
def untouched() -> Iterator[logging.Logger]:
    """The root logger, as a program finds it that has configured nothing."""
    root = logging.getLogger()
    held = LOGGER.level, LOGGER.handlers, LOGGER.filters, root.handlers
    LOGGER.setLevel(logging.NOTSET)
    LOGGER.handlers, LOGGER.filters, root.handlers = [], [], []
    yield root
    LOGGER.setLevel(held[0])
    LOGGER.handlers, LOGGER.filters, root.handlers = held[1:]


def test_ranks_say_who_they_are(
    world: Communicator, capsys: pytest.CaptureFixture[str]
) -> None:
    with untouched():
        logger = _logging.configure(world.rank)
        _logging.configure(world.rank)  # again: nothing is added
        logger.info("heard of rank 0")
        logger.warning("heard of all")
    expected = [f"[distkeras, rank {world.rank}] heard of all"]
    if world.rank == 0:
        expected.insert(0, "[distkeras, rank 0] heard of rank 0")
    assert capsys.readouterr().err.splitlines() == expected


def test_what_the_program_has_set_stays(
    world: Communicator, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s of %(rank)d: %(message)s"))
    with untouched() as root:
        root.addHandler(handler)
        LOGGER.setLevel(logging.DEBUG)
        _logging.configure(world.rank).debug("all")
        assert LOGGER.handlers == [] and LOGGER.level == logging.DEBUG
    assert capsys.readouterr().err == f"DEBUG of {world.rank}: all\n"


def test_the_example_of_the_docs(
    world: Communicator, capsys: pytest.CaptureFixture[str]
) -> None:
    """Records of other libraries have no rank, and go through the same format."""
    text = (Path(__file__).parent.parent / "docs" / "logs.md").read_text()
    example = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    with untouched():
        exec(example, {"logging": logging})
        logger = _logging.configure(world.rank)
        logger.info("quiet")
        logger.warning("of all ranks")
        logging.getLogger("another").warning("of a program")
    said = [line.split(" rank ")[1] for line in capsys.readouterr().err.splitlines()]
    assert said == [f"{world.rank}: of all ranks", "-: of a program"]


def test_ranks_of_a_job_that_has_lost_some(capsys: pytest.CaptureFixture[str]) -> None:
    with untouched():
        logger = _logging.configure(2)
        _logging.renumber(2, 0)
        logger.info("first now")
    assert capsys.readouterr().err == "[distkeras, rank 0] first now\n"
