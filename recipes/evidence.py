"""Trains on digits in many ways, and writes what came out as a table.

    python -m distkeras.recipes.evidence --write recipes/README.md

takes a while: three seeds of each row, one after the other. What has run already, in
the folder `--output`, is not run again. Each command in the table starts one of them.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

BEGIN, END = "<!-- evidence: begin -->", "<!-- evidence: end -->"
MODULE = "distkeras.recipes.resnet"
_COMMON = ("--depth", "8")
_LEARNING_RATE, _BATCH = 0.05, 32  # the recipe's defaults for digits
_TIME = re.compile(r"^ResNet-.* time: ([\d.]+) s", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to train.

    Attributes:
        what: in words.
        ranks: processes.
        batch_size: examples a step on each.
        options: of the recipe, beside those.
    """

    what: str
    ranks: int
    batch_size: int = _BATCH
    options: tuple[str, ...] = ()

    @property
    def learning_rate(self) -> float:
        """After scaling and warm-up."""
        scaled = "none" not in self.options
        return _LEARNING_RATE * (self.ranks if scaled else 1)

    @property
    def words(self) -> list[str]:
        """Arguments of `distkeras`, without the seed."""
        words = ["run", "-n", str(self.ranks), "-m", MODULE, *_COMMON]
        if self.batch_size != _BATCH:
            words += ["--batch-size", str(self.batch_size)]
        return [*words, *self.options]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the runs of one row gave, each a number a seed.

    Attributes:
        accuracies: of the validation images after the last epoch, from 0 to 1.
        losses: likewise.
        seconds: of training.
        sent: bytes a step that each rank sends.
    """

    accuracies: list[float]
    losses: list[float]
    seconds: list[float]
    sent: list[float]


_SAME, _NO_WARMUP = ("--scaling", "none"), ("--warmup-epochs", "0")
SCALED = "scaled: batch, rate, warm-up"
_FLOAT16, _BFLOAT16 = ("--compression", "float16"), ("--compression", "bfloat16")
COMPRESSED = "scaled, compressed"
ROWS = (
    Row("one process", 1),
    Row("same global batch", 2, 16, _SAME),
    Row("same global batch", 4, 8, _SAME),
    Row(SCALED, 2),
    Row(SCALED, 4),
    Row(COMPRESSED, 2, options=_FLOAT16),
    Row(COMPRESSED, 2, options=_BFLOAT16),
    Row(COMPRESSED, 2, options=(*_FLOAT16, "--error-feedback")),
    Row("without warm-up", 2, options=_NO_WARMUP),
    Row("without warm-up", 4, options=_NO_WARMUP),
    Row("rate not scaled", 2, options=_SAME),
    Row("rate not scaled", 4, options=_SAME),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what has not run, and prints the table.

    Args:
        argv: the options; those of the process if None.
    """
    parser = argparse.ArgumentParser(
        prog="distkeras.recipes.evidence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--output", type=Path, default=Path("runs/evidence"), help="(%(default)s)")
    add("--seeds", type=int, default=3, help="runs of each row (%(default)s)")
    add(
        *("--ranks",),
        type=int,
        default=4,
        help="leave out rows with more; at least 2 (%(default)s)",
    )
    add("--steps", type=int, help="end each run after so many updates: to try it out")
    add("--write", type=Path, metavar="FILE", help="put the table between its marks")
    args = parser.parse_args(argv)
    more = [] if args.steps is None else ["--steps", str(args.steps)]
    outcomes: dict[Row, Outcome] = {}
    for row in ROWS:
        if row.ranks <= args.ranks:
            runs = [run(row, seed, args.output, more) for seed in range(args.seeds)]
            outcomes[row] = Outcome(*map(list, zip(*runs, strict=True)))
    text = f"{table(outcomes)}\n\n{comparison(outcomes)}"
    print(text)
    if args.write is not None:
        args.write.write_text(replaced(args.write.read_text(), text))


def run(
    row: Row, seed: int, output: Path, more: Sequence[str]
) -> tuple[float, float, float, float]:
    """Runs one command, unless its results are there.

    Returns:
        Accuracy and loss of the validation images after the last epoch, the seconds
        of training, and the bytes that each rank sent in a step.
    """
    words = [*row.words, "--seed", str(seed), *more]
    named = words[words.index(MODULE) + 1 :]
    folder = output / "_".join([f"ranks_{row.ranks}", *(w.strip("-") for w in named)])
    said = folder / "output.txt"
    if not said.is_file():
        command = [sys.executable, "-m", "distkeras", *words, "--output", str(folder)]
        print("distkeras", *words, file=sys.stderr, flush=True)
        answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        said.write_text(answer.stdout)
    match = _TIME.search(said.read_text())
    if match is None:
        raise RuntimeError(f"Expected the recipe's last line in {said}; remove it.")
    with (folder / "history.csv").open(newline="") as file:
        last = list(csv.DictReader(file))[-1]
    accuracy, loss = float(last["val_accuracy"]), float(last["val_loss"])
    return accuracy, loss, float(match[1]), bytes_sent(folder)


def bytes_sent(folder: Path) -> float:
    """Reads how many bytes each rank sent in a step of the last epoch.

    Args:
        folder: that the recipe has written.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util

    events = EventAccumulator(str(folder / "logs/train"))
    events.Reload()
    newest = events.Tensors("distkeras/bytes_sent")[-1]
    return float(tensor_util.make_ndarray(newest.tensor_proto))


def table(outcomes: dict[Row, Outcome]) -> str:
    """Returns the table, in Markdown."""
    head = "what, ranks, global batch, learning rate, accuracy, loss, seconds, kB sent"
    lines = [f"| {head.replace(', ', ' | ')} | command |", "| --- " * 9 + "|"]
    for row, outcome in outcomes.items():
        cells = (
            row.what,
            row.ranks,
            row.ranks * row.batch_size,
            f"{row.learning_rate:g}",
            _spread(outcome.accuracies),
            _spread(outcome.losses),
            f"{statistics.mean(outcome.seconds):.0f}",
            f"{statistics.mean(outcome.sent) / 1e3:.0f}",
            f"`distkeras {' '.join(row.words)}`",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def comparison(outcomes: dict[Row, Outcome]) -> str:
    """Says how far scaled runs are from one process, and compressed ones from others.

    Each in the noise of what it is compared with.
    """
    alone = _found(outcomes, "one process", 1)
    scaled = [o for row, o in outcomes.items() if row.what == SCALED]
    far = max(abs(_difference(outcome, alone)) for outcome in scaled)
    exact = _found(outcomes, SCALED, 2)
    compressed = [o for row, o in outcomes.items() if row.what == COMPRESSED]
    farther = max(abs(_difference(outcome, exact)) for outcome in compressed)
    share = max(map(sum, (o.sent for o in compressed))) / sum(exact.sent)
    return (
        "With batch and rate scaled and a warm-up, mean accuracy differs from that of "
        f"one process by {far:.4f} at most; the standard deviation of one process is "
        f"{_deviation(alone.accuracies):.4f}.\n\n"
        f"Compressed to {share:.0%} of the bytes, mean accuracy differs from that of "
        f"the same training without compression by {farther:.4f} at most; the "
        f"standard deviation without is {_deviation(exact.accuracies):.4f}."
    )


def _found(outcomes: dict[Row, Outcome], what: str, ranks: int) -> Outcome:
    return next(
        outcome
        for row, outcome in outcomes.items()
        if (row.what, row.ranks) == (what, ranks)
    )


def _difference(one: Outcome, other: Outcome) -> float:
    return statistics.mean(one.accuracies) - statistics.mean(other.accuracies)


def _deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.4f} ± {_deviation(values):.4f}"


def replaced(page: str, text: str) -> str:
    """Returns a page with the text between the marks.

    Raises:
        ValueError: if the page has no marks.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"Expected a page with {BEGIN} and {END}.")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


if __name__ == "__main__":
    main()
