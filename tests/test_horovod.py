"""Leftovers of Horovod: variables that have no effect are named, once."""

import os
import subprocess
import sys
import warnings

import pytest

from distkeras import _horovod
from distkeras._launcher import Launcher


def test_variables_are_named_with_what_replaces_them() -> None:
    environ = {"HOROVOD_FUSION_THRESHOLD": "1", "HOROVOD_NEW": "1", "PATH": "/bin"}
    with pytest.warns(RuntimeWarning, match="have no effect") as caught:
        _horovod.warn_of_ignored_variables(environ, None)
    (warning,) = caught
    text = str(warning.message)
    assert "HOROVOD_FUSION_THRESHOLD: Trainer(model, bucket_bytes=...)" in text
    assert "  HOROVOD_NEW\n" in text


def test_nothing_is_said_without_them_or_on_other_ranks() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _horovod.warn_of_ignored_variables({"PATH": "/bin"}, None)
        second = Launcher("test", 1, 2)
        _horovod.warn_of_ignored_variables({"HOROVOD_TIMELINE": "x"}, second)


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
        assert answer.stderr.count("HOROVOD_TIMELINE: keras.callbacks.TensorBoard") == 1
