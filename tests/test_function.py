"""`distkeras.run`: functions on ranks, from scripts and from a notebook's kernel."""

import ast
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mpi_runtimes
import numpy as np
import pytest

import distkeras
from distkeras._cores import usable_cores
from distkeras.launch import _function
from distkeras.launch import _node
from distkeras.launch._mpiexec import LaunchError

pytestmark = pytest.mark.launches


@pytest.fixture(scope="module", params=["here", "mpich"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Selects a launcher: this environment's, then MPICH's."""
    if request.param == "here":
        return {}
    return {"mpiexec": mpi_runtimes.mpich().command[0]}


def local(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function go by value, as those of a notebook do."""
    function.__module__ = "__main__"
    return function


def total(first: int, stop: int, *, c: int = 0, d: int = 0) -> Any:
    """Gathers on rank 0; other ranks return something else, or nothing."""
    rank = distkeras.rank()
    parts = distkeras.allgather_object([rank, sum((first, stop, c, d))])
    if rank == 0:
        return [value for part in parts for value in part]
    return f"ret_val_of_rank_{rank}" if rank == 1 else None


def test_results_by_rank(
    options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    results = distkeras.run(total, (1, 20), {"c": 300, "d": 4000}, n=3, **options)
    assert results == [[0, 4321, 1, 4321, 2, 4321], "ret_val_of_rank_1", None]
    output = capsys.readouterr()
    assert (output.out, output.err) == ("", "")


def test_a_function_brings_what_it_closes_over(options: dict[str, Any]) -> None:
    table = np.arange(6.0).reshape(2, 3)

    @local
    class Pair:
        def __init__(self, left: Any, right: Any) -> None:
            self.left, self.right = left, right

    @local
    def helper(value: float) -> float:
        return value + table.sum()

    @local
    def fn(scale: float) -> Pair:
        return Pair(scale * helper(distkeras.rank()), os.getpid())

    results = distkeras.run(fn, (2.0,), **options)
    assert [type(result) for result in results] == [Pair, Pair]
    assert [result.left for result in results] == [30.0, 32.0]
    assert len({os.getpid(), *(result.right for result in results)}) == 3


def test_output_appears_with_its_rank_while_the_ranks_run() -> None:
    """Each line is seen before the rank that wrote it may go on."""

    @local
    def fn(folder: Path) -> float:
        print("out", flush=True)
        print("err", file=sys.stderr)
        while not (folder / "seen").exists():
            time.sleep(0.02)
        return time.time()

    class Stream:
        encoding = "utf-8"

        def __init__(self, folder: Path) -> None:
            self.text, self._folder = "", folder

        def write(self, text: str) -> None:
            self.text += text
            if self.text.count("\n") == 2:
                (self._folder / "seen").touch()

        def flush(self) -> None:
            pass

    with tempfile.TemporaryDirectory() as name:
        before = sys.stdout, sys.stderr
        sys.stdout = out = Stream(Path(name))
        sys.stderr = err = Stream(Path(name))
        try:
            distkeras.run(fn, (Path(name),))
        finally:
            sys.stdout, sys.stderr = before
    assert sorted(out.text.splitlines()) == ["[0] out", "[1] out"]
    assert sorted(err.text.splitlines()) == ["[0] err", "[1] err"]


class Awkward(Exception):
    """Can be pickled, and not unpickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def test_an_exception_is_raised_here(options: dict[str, Any]) -> None:
    @local
    class OwnError(ValueError):
        pass

    @local
    def fail() -> None:
        distkeras.barrier()
        if distkeras.rank() == 1:
            raise OwnError("on purpose")
        distkeras.barrier()

    start = time.monotonic()
    with pytest.raises(OwnError, match="on purpose") as caught:
        distkeras.run(fail, n=3, **options)
    assert time.monotonic() - start < 10
    assert "raised on rank 1 of 3" in caught.value.__notes__[0]
    cause = str(caught.value.__cause__)
    assert "Traceback (most recent call last)" in cause
    # The line itself, in this file, and no frames of ours.
    assert f'File "{__file__}"' in cause and 'raise OwnError("on purpose")' in cause
    assert "_call.py" not in cause


class OnlyHere:
    """Can be made again in this process, in others not."""

    def __reduce__(self) -> Any:
        return _check_process, (os.getpid(),)


def _check_process(pid: int) -> None:
    if os.getpid() != pid:
        raise ImportError("no such module on purpose")


def test_an_unpickling_error_is_raised_here() -> None:
    """That of the function itself, and that of a rank which cannot read it."""

    @local
    def fail() -> None:
        raise pickle.UnpicklingError("on purpose")

    with pytest.raises(pickle.UnpicklingError, match="on purpose") as caught:
        distkeras.run(fail, n=1)
    assert "raised on rank 0 of 1" in caught.value.__notes__[0]
    with pytest.raises(pickle.UnpicklingError, match="the function and its") as caught:
        distkeras.run(print, (OnlyHere(),), n=1)
    assert "no such module on purpose" in str(caught.value)


def test_an_exception_that_cannot_be_carried_is_told() -> None:
    @local
    def fail() -> None:
        if distkeras.rank() == 0:
            raise Awkward("one", "two")
        time.sleep(60)

    with pytest.raises(distkeras.RankError, match=r"rank 0 of 2.*one and two") as e:
        distkeras.run(fail)
    assert "Traceback" in str(e.value.__cause__)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exit", r"rank 1 of 2.*exited with code 3"),
        ("kill", r"none from rank 0, 1, and no exception.*killed"),
    ],
)
def test_a_rank_that_leaves_ends_the_job(
    name: str, message: str, options: dict[str, Any]
) -> None:
    @local
    def leave() -> None:
        if distkeras.rank() == 1:
            if name == "exit":
                sys.exit(3)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    start = time.monotonic()
    with pytest.raises(distkeras.RankError, match=f"(?s){message}"):
        distkeras.run(leave, **options)
    assert time.monotonic() - start < 15


def test_what_cannot_be_carried_is_named() -> None:
    lock = threading.Lock()
    config = {"name": "x", "parts": [1, lock]}

    @local
    def inner() -> Any:
        return config

    @local
    def fn() -> Any:
        return inner()

    with pytest.raises(pickle.PicklingError, match=r"`config`.*\['parts'\]\[1\].*lock"):
        distkeras.run(fn)
    with pytest.raises(pickle.PicklingError, match=r"args\[1\], of type _thread.lock"):
        distkeras.run(total, (1, lock))
    with pytest.raises(pickle.PicklingError, match=r"kwargs\['c'\], of type"):
        distkeras.run(total, (1, 2), {"c": lock})


def test_a_result_that_cannot_be_carried_is_named() -> None:
    @local
    def fn() -> Any:
        return {"loss": 1.0, "lock": threading.Lock()}

    with pytest.raises(pickle.PicklingError, match=r"the result\['lock'\]") as caught:
        distkeras.run(fn)
    assert "raised on rank" in caught.value.__notes__[0]


def test_variables_and_the_choice_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    @local
    def fn() -> tuple[str | None, int]:
        return os.environ.get("ONLY_THERE"), distkeras.size()

    cores = usable_cores()
    environ = {"ONLY_THERE": "yes", "CUDA_VISIBLE_DEVICES": ""}
    if cores <= 4:
        results = distkeras.run(fn, n="auto", environ=environ)
        assert results == [("yes", cores)] * cores
    assert distkeras.run(fn, n=1, environ=environ) == [("yes", 1)]
    assert "ONLY_THERE" not in os.environ


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("print",), "Expected a function"),
        ((print, 5), "`args` to be a tuple"),
        ((print, "ab"), "`args` to be a tuple"),
        ((print, (), [1]), "`kwargs` to be a dict"),
        ((print, (), None, 0), "`n` to be a number"),
        ((print, (), None, "two"), "`n` to be a number"),
    ],
)
def test_wrong_calls(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        distkeras.run(*arguments)


def test_a_rank_starts_no_ranks() -> None:
    @local
    def fn() -> None:
        distkeras.run(print)

    with pytest.raises(LaunchError, match=r"rank \d of 2 already"):
        distkeras.run(fn)


def test_the_end_of_a_job_is_not_told_to_the_job_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process is as the one rank of an elastic job is: it may go on."""
    monkeypatch.setenv("DISTKERAS_STATUS", str(tmp_path))
    monkeypatch.setenv("DISTKERAS_ELASTIC", "1")

    @local
    def wait() -> None:
        distkeras.init(timeout=1)
        if distkeras.rank() == 1:
            time.sleep(60)
        distkeras.barrier()

    with pytest.raises(distkeras.RankError, match="exit code 124"):
        distkeras.run(wait)
    assert list(tmp_path.iterdir()) == []


def test_opened_gpus_are_explained() -> None:
    """None are open here; the words are what a user sees."""
    assert _node.opened_gpus() == []
    text = _function.opened_gpus_text([0, 1])
    assert "opened GPU 0, 1" in text and "Restart the kernel" in text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_end_of_the_caller_ends_the_ranks(
    tmp_path: Path, number: signal.Signals
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, time
            from pathlib import Path
            import distkeras
            def sleep():
                Path("{tmp_path}", f"{{distkeras.rank()}}.pid").write_text(
                    str(os.getpid()))
                time.sleep(60)
            try:
                distkeras.run(sleep)
            except KeyboardInterrupt:
                print("interrupted")
            """
        )
    )
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    pids = wait_for_pids(tmp_path, 2)
    process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    if number == signal.SIGINT:
        assert (out, process.returncode) == ("interrupted\n", 0)
        assert not list(tmp_path.glob("distkeras-run-*"))
    assert_gone(pids)


def wait_for_pids(folder: Path, count: int) -> list[int]:
    """Returns the processes that have written their ids."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        texts = [path.read_text() for path in folder.glob("*.pid")]
        if len(texts) == count and all(texts):
            return list(map(int, texts))
        time.sleep(0.05)
    raise AssertionError(f"{len(texts)} of {count} processes came up")


def assert_gone(pids: list[int]) -> None:
    """Waits for processes to end."""
    deadline = time.monotonic() + 10
    left = pids
    while left and time.monotonic() < deadline:
        left = [pid for pid in left if alive(pid)]
        time.sleep(0.05)
    assert left == []


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended but was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][1] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def kernel() -> Any:
    """A Jupyter kernel."""
    manager_module = pytest.importorskip("jupyter_client.manager")
    manager, client = manager_module.start_new_kernel(kernel_name="python3")
    yield Kernel(manager, client)
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    manager.cleanup_resources()


class Kernel:
    """Runs cells and collects what a notebook would show."""

    def __init__(self, manager: Any, client: Any) -> None:
        self.manager, self.client = manager, client

    def start(self, code: str) -> None:
        """Starts a cell."""
        self.client.execute(textwrap.dedent(code))

    def finish(self) -> tuple[dict[str, str], str]:
        """Returns the streams of the cell, and its error as shown."""
        streams, error = {"stdout": "", "stderr": ""}, ""
        while True:
            message = self.client.get_iopub_msg(timeout=60)
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                streams[content["name"]] += content["text"]
            elif kind == "error":
                error = "\n".join(content["traceback"])
            elif kind == "status" and content["execution_state"] == "idle":
                return streams, error

    def cell(self, code: str) -> tuple[dict[str, str], str]:
        """Runs a cell to its end."""
        self.start(code)
        return self.finish()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_in_a_notebook(kernel: Kernel, tmp_path: Path) -> None:
    kernel.cell("import os, time, distkeras; base = 40\nfrom pathlib import Path")
    streams, error = kernel.cell(
        """
        def work(x):
            print("working")
            return base + x + distkeras.rank()
        print(distkeras.run(work, (2,)))
        """
    )
    assert error == ""
    lines = streams["stdout"].splitlines()
    assert sorted(lines[:2]) == ["[0] working", "[1] working"]
    assert lines[2:] == ["[42, 43]"]

    # An exception is shown with the rank and the line of the cell.
    _, error = kernel.cell(
        """
        def work():
            if distkeras.rank() == 1:
                raise LookupError("what")
            time.sleep(60)
        distkeras.run(work)
        """
    )
    plain = without_colours(error)
    assert "LookupError: what" in plain
    assert "on rank 1 of 2" in plain
    assert 'raise LookupError("what")' in plain

    # The stop button ends the ranks.
    kernel.start(
        f"""
        def work():
            Path("{tmp_path}", f"{{distkeras.rank()}}.pid").write_text(str(os.getpid()))
            time.sleep(60)
        distkeras.run(work)
        """
    )
    pids = wait_for_pids(tmp_path, 2)
    kernel.manager.interrupt_kernel()
    _, error = kernel.finish()
    assert "KeyboardInterrupt" in error
    assert_gone(pids)
    streams, _ = kernel.cell("print(base)")
    assert streams["stdout"] == "40\n"


def without_colours(text: str) -> str:
    """Removes the escape sequences of terminals."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.tensorflow
def test_keras_models_go_there_and_back() -> None:
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    x = np.arange(24, dtype="float32").reshape(8, 3) / 24
    y = x.sum(1, keepdims=True)

    @local
    def fit(model: Any, x: Any, y: Any) -> tuple[Any, float]:
        trainer = distkeras.Trainer(model, learning_rate_scaling=None)
        history = trainer.fit(x, y, batch_size=2, epochs=2, shuffle=False, verbose=0)
        return model, history.history["loss"][-1]

    (first, loss), (second, _) = distkeras.run(fit, (model, x, y))
    history = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    np.testing.assert_allclose(loss, history.history["loss"][-1], rtol=1e-5)
    for here, one, two in zip(
        model.weights, first.weights, second.weights, strict=True
    ):
        np.testing.assert_allclose(one.numpy(), here.numpy(), rtol=1e-5, atol=1e-7)
        np.testing.assert_array_equal(one.numpy(), two.numpy())


@pytest.mark.soak
@pytest.mark.tensorflow
def test_the_documented_way_by_ipyparallel() -> None:
    text = (Path(__file__).parent.parent / "docs" / "notebooks.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    (block,) = [block for block in blocks if "ipyparallel" in block]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    answer = subprocess.run(
        [sys.executable, "-c", block],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, **root},
    )
    assert answer.returncode == 0, answer.stderr
    (one, losses), (two, same) = ast.literal_eval(answer.stdout.splitlines()[-1])
    assert (one, two) == (0, 1)
    assert losses == same and losses[1] < losses[0]
