"""The notebooks run from a clean kernel, and what they show is right.

What is checked of a fresh run is checked of the committed outputs too.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))

# All that may be seen of stderr: what the Trainer has decided, from rank 0.
REPORT = re.compile(r"(\[0\] )?(\[distkeras, rank 0\] |  )\S")

Book = Any


def read(name: str) -> Book:
    """Returns a committed notebook."""
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def outputs(book: Book, kind: str, stream: str | None = None) -> list[Any]:
    """Returns the outputs of a kind, of all cells."""
    return [
        output
        for cell in book.cells
        for output in cell.get("outputs", [])
        if output.output_type == kind and stream in (None, output.get("name"))
    ]


def text(book: Book, stream: str) -> str:
    """Returns what all cells wrote to a stream."""
    return "".join(output.text for output in outputs(book, "stream", stream))


def pictures(book: Book) -> int:
    """Returns how many pictures are shown."""
    shown = outputs(book, "display_data")
    return sum("image/png" in output.data for output in shown)


def number(pattern: str, where: str) -> float:
    """Returns the number that follows a text."""
    found = re.search(pattern + r"\D*?(\d[\d.e+-]*)", where)
    assert found is not None, where
    return float(found[1])


def check_01_quickstart(book: Book) -> None:
    out = text(book, "stdout")
    assert number("largest difference of a weight:", out) < 1e-5
    assert number("loaded by Keras: validation accuracy", out) > 0.85
    assert out.count("Epoch 6/6") == 2
    assert pictures(book) == 2


def check_02_scale_out(book: Book) -> None:
    out = text(book, "stdout")
    assert number("largest difference to 1 rank in an epoch's loss:", out) < 1e-4
    assert number("validation accuracy at 2 ranks:", out) > 0.85
    # Two trainings of six epochs, each told by rank 0 alone.
    assert out.count("[0] Epoch 6/6") == 2
    assert "[1]" not in out
    assert re.search(r"\{1: '\d+ samples/s', 2: '\d+ samples/s'\}", out)
    assert "world         2 ranks on 1 node" in text(book, "stderr")
    assert pictures(book) == 3  # loss and accuracy, throughput, timeline


def check_03_from_horovod(book: Book) -> None:
    out = text(book, "stdout")
    assert "same history on both ranks: True" in out
    assert "same weights on both ranks: True" in out
    assert number("learning rate in the file, that of one process:", out) == 0.02
    accuracy = number("validation accuracy of the file:", out)
    assert accuracy == number("validation accuracy of the run:", out) > 0.85
    errors = text(book, "stderr")
    assert errors.count("HOROVOD_FUSION_THRESHOLD") == 1
    rate = "sgd 0.02 -> 0.04 (linear scaled, x2, rising to it over 2 epochs)"
    assert rate in errors
    assert pictures(book) == 1


CHECKS: dict[str, Callable[[Book], None]] = {
    "01-quickstart": check_01_quickstart,
    "02-scale-out": check_02_scale_out,
    "03-from-horovod": check_03_from_horovod,
}


def check(name: str, book: Book) -> None:
    """Fails unless the outputs are those that the text speaks of."""
    assert outputs(book, "error") == []
    for line in text(book, "stderr").splitlines():
        assert REPORT.match(line), f"noise: {line}"
    CHECKS[name](book)


def test_each_notebook_is_checked() -> None:
    assert list(CHECKS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_committed_outputs(name: str) -> None:
    book = read(name)
    check(name, book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    # Nothing of the machine that it was rendered on.
    assert not re.search(r"/(home|root|tmp|Users|work)/", str(book))


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    sources = "".join(cell.source for cell in read(name).cells)
    for target in re.findall(r"\]\(([^)#:]+)\)", sources):
        assert (FOLDER / target).exists(), target


@pytest.mark.launches
@pytest.mark.tensorflow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the kernel's client
def test_runs_from_a_clean_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbclient

    for variable in ("TF_CPP_MIN_LOG_LEVEL", "PYTEST_CURRENT_TEST"):
        monkeypatch.delenv(variable, raising=False)
    # Two ranks do not share a GPU, and not each machine has two.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    book = read(name)
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = nbclient.NotebookClient(
        book, timeout=170, kernel_name="python3", coalesce_streams=True
    )
    client.execute(cwd=str(FOLDER))
    check(name, book)
