"""Leftovers of Horovod: variables that have no effect are named, once."""

import os
import subprocess
import sys

import pytest

from distkeras import _horovod
from distkeras._launcher import Launcher


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


@pytest.mark.launches
def test_the_world_warns_once() -> None:
    code = "import distkeras; distkeras.rank(); distkeras.size()"
    for words in ([], ["-m", "distkeras", "run", "-n", "2", "-m", "timeit", "-n", "1"]):
        command = [sys.executable, *(words or ["-c"]), code]
        answer = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env={**os.environ, "HOROVOD_TIMELINE": "/tmp/timeline.json"},
        )
        assert answer.returncode == 0, answer.stderr
        assert answer.stderr.count("HOROVOD_TIMELINE: Trainer(model, timeline=") == 1
