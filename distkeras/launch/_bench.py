"""`distkeras bench`: latency and bandwidth of the allreduce, beside MPI's and memcpy.

Or, with `--model`, the parts of a training step (`_bench_step`).

Everything is measured in turn, round by round, so that what else the machine does
meets all alike; figures are medians over the rounds of the slowest rank's time.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
import os
import re
import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distkeras._launcher import discover
from distkeras.launch import _run
from distkeras.launch._mpiexec import LaunchError

_EPILOG = """\
measured are, for each size:
  MPI                 the library's own Allreduce, in place
  MPI, in and out     the same, the bytes copied to its buffer before and from it after
  MPI, two buffers    the library's own Allreduce, from one buffer to another
  NAME                the communicator's allreduce, in place
  NAME, in and out    its allreduce_parts, as gradients use, from one buffer to another
  memcpy              the bytes copied twice, without any exchange
"""

_KINDS = {
    "mpi": "MPICommunicator",
    "shared_memory": "SharedMemoryCommunicator",
    "hierarchical": "HierarchicalCommunicator",
}
_DTYPES = ("float32", "float64", "int32", "int64")  # that MPI knows as well
_BOTH = ("in and out", "two buffers")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
# At least, between two looks at the clock: where ranks share cores they leave a
# barrier one after the other, milliseconds apart.
_SECONDS = 2e-2
_MOST_REPEATS = 20_000


@dataclasses.dataclass
class Result:
    """The times of one contender at one size.

    Attributes:
        size: bytes.
        name: the contender.
        seconds: of one allreduce on the slowest rank, by round.
    """

    size: int
    name: str
    seconds: list[float]

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)


def main(argv: Sequence[str]) -> int:
    """Runs the subcommand.

    Args:
        argv: the words after `distkeras bench`.

    Returns:
        The exit code.

    Raises:
        LaunchError: the options are wrong or lack a package, or the ranks cannot be
            started.
    """
    options = _parser().parse_args(argv)
    unknown = set(options.communicators) - set(_KINDS)
    if unknown:
        raise LaunchError(
            f"expected communicators of {', '.join(_KINDS)}. Received: "
            f"{', '.join(sorted(unknown))}"
        )
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        raise LaunchError(
            "expected matplotlib for --plot. Install it with `pip install matplotlib`, "
            "or take the numbers from --json."
        )
    launcher = discover(os.environ)
    _check(options, writes=launcher is None or launcher.rank == 0)
    if launcher is None:
        return _run.main(["-n", str(options.n), "-m", "distkeras", "bench", *argv])
    if options.model:
        return _step(options)
    results, about = _measure(options)
    if results:
        _report(options, results, about)
    return 0


def _check(options: argparse.Namespace, *, writes: bool) -> None:
    """Raises LaunchError for what would be found wrong when all is measured.

    Args:
        options: of the command line.
        writes: whether this process is the one that writes the files.
    """
    width = np.dtype(options.dtype).itemsize
    wrong = [size for size in options.sizes if size % width or not size]
    if wrong:
        raise LaunchError(
            f"expected sizes of one {options.dtype} or more, of {width} bytes each. "
            f"Received: {', '.join(map(str, wrong))}"
        )
    for option, file in (("--json", options.json), ("--plot", options.plot)):
        if not writes or not file:
            continue
        path = Path(file).absolute()
        if path.is_dir() or not path.parent.is_dir():
            raise LaunchError(
                f"expected a file in a folder that exists for {option}. Received: "
                f"{file}"
            )


def _step(options: argparse.Namespace) -> int:
    """Measures a training step instead of messages; collective."""
    from distkeras.launch._bench_step import measure_step
    from distkeras.launch._bench_step import print_step

    found = measure_step(options)
    if found is not None:
        print_step(options, found)
        if options.json:
            Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="distkeras bench",
        description="Measure the allreduce by message size and communicator.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("-n", type=_positive, default=2, help="ranks, unless a launcher started some")
    add(
        "--sizes",
        type=lambda text: list(dict.fromkeys(map(_size, text.split(",")))),
        default="4K,32K,256K,4M,32M,100M",
        help="bytes of the messages, as 4K or 100M (default: %(default)s)",
    )
    add(
        "--communicators",
        metavar="NAMES",
        type=lambda text: text.split(","),
        default="mpi,shared_memory",
        help="which to measure (default: %(default)s)",
    )
    add("--dtype", choices=_DTYPES, default="float32", help="default: %(default)s")
    add("--rounds", type=_positive, default=15, help="default: %(default)s")
    add("--json", metavar="FILE", help="write the raw numbers")
    add("--plot", metavar="FILE.png", help="draw them, with matplotlib")
    step = parser.add_argument_group("a training step, with its parts, instead")
    step.add_argument(
        "--model", metavar="NAME", help="resnet20, or one of keras.applications"
    )
    add = step.add_argument
    add(
        "--batch",
        type=_positive,
        default=16,
        help="images a rank (default: %(default)s)",
    )
    add("--image-size", type=_positive, default=64, help="default: %(default)s")
    add("--steps", type=_positive, default=10, help="default: %(default)s")
    add(
        "--jit-compile",
        action=argparse.BooleanOptionalAction,
        default="auto",
        help="whether XLA compiles the step's halves; then nothing overlaps",
    )
    return parser


def _positive(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1 on: {word!r}")
    return int(word)


def _size(word: str) -> int:
    found = re.fullmatch(r"(\d+)([KMG]?)B?", word.strip().upper())
    if found is None:
        raise argparse.ArgumentTypeError(f"expected a size, as 4K or 100M: {word!r}")
    return int(found[1]) * _UNITS[found[2]]


def _measure(options: argparse.Namespace) -> tuple[list[Result], dict[str, Any]]:
    """Returns rank 0's results and what they were measured on; collective."""
    from distkeras.communicators import MPICommunicator

    host = MPICommunicator()
    made = {name: _make(name) for name in options.communicators}
    results = []
    for size in options.sizes:
        contenders = _contenders(host, made, size, np.dtype(options.dtype))
        results += _race(host, contenders, size, options.rounds)
    about = {
        "ranks": host.size,
        "hosts": list(host.hosts),
        "library": host.library,
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "rounds": options.rounds,
        "dtype": options.dtype,
    }
    for communicator in made.values():
        communicator.close()
    first = host.rank == 0
    host.close()
    return (results if first else []), about


def _make(name: str) -> Any:
    """Returns a communicator that works on host memory; collective."""
    from distkeras import communicators

    return getattr(communicators, _KINDS[name])()


def _contenders(
    host: Any, made: dict[str, Any], size: int, dtype: np.dtype
) -> dict[str, Callable[[], None]]:
    """Returns what is measured at one size, by name; collective."""
    length = max(1, size // dtype.itemsize)
    from distkeras.communicators import aligned_zeros

    # Aligned as a framework's arrays are. Zeros: sums that stay what they are.
    source, target, buffer = (aligned_zeros(length, dtype) for _ in range(3))
    for array in (source, target, buffer):
        array[:] = 0  # the system gives memory when it is written to
    from mpi4py import MPI

    def memcpy() -> None:
        np.copyto(buffer, source)
        np.copyto(target, buffer)

    def mpi() -> None:
        host.mpi_comm.Allreduce(MPI.IN_PLACE, buffer)

    def mpi_in_and_out() -> None:
        np.copyto(buffer, source)
        host.mpi_comm.Allreduce(MPI.IN_PLACE, buffer)
        np.copyto(target, buffer)

    def mpi_two_buffers() -> None:
        host.mpi_comm.Allreduce(source, target)

    found = {
        "memcpy": memcpy,
        "MPI": mpi,
        "MPI, in and out": mpi_in_and_out,
        "MPI, two buffers": mpi_two_buffers,
    }
    for name, communicator in made.items():
        found[name] = functools.partial(communicator.allreduce, buffer)
        found[f"{name}, in and out"] = functools.partial(
            communicator.allreduce_parts,
            target,
            pack=functools.partial(_copy_part, source),
            unpack=_leave,
        )
    return found


def _copy_part(source: np.ndarray, part: np.ndarray, start: int) -> None:
    """Packs what is already an array."""
    np.copyto(part, source[start : start + part.size])


def _leave(part: np.ndarray, start: int) -> None:
    """The result is wanted where it is."""


def _race(
    host: Any, contenders: dict[str, Callable[[], None]], size: int, rounds: int
) -> list[Result]:
    """Measures all contenders in turn; collective."""
    names = list(contenders)
    repeats = {}
    for name in names:
        _time(host, contenders[name], 2)  # makes what is made at the first call
        once = _time(host, contenders[name], 3)
        repeats[name] = max(1, min(_MOST_REPEATS, round(_SECONDS / once)))
    results = {name: Result(size, name, []) for name in names}
    for number in range(rounds):
        # Who comes after whom changes, as each leaves its caches to the next.
        for name in names if number % 2 else reversed(names):
            seconds = _time(host, contenders[name], repeats[name])
            results[name].seconds.append(seconds)
    return list(results.values())


def _time(host: Any, run: Callable[[], None], repeats: int) -> float:
    """Returns the slowest rank's seconds for one run, the mean of several."""
    host.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    slowest = np.array([(time.perf_counter() - start) / repeats])
    host.allreduce(slowest, "max")
    return float(slowest[0])


def _report(
    options: argparse.Namespace, results: list[Result], about: dict[str, Any]
) -> None:
    """Prints the table, and writes the files that were asked for."""
    print(
        f"allreduce of {about['dtype']}, {about['ranks']} ranks on "
        f"{len(set(about['hosts']))} node(s), {about['cores']} cores here, "
        f"{about['library']}; medians of {about['rounds']} rounds, load "
        f"{about['load'][0]:.1f}"
    )
    print(f"{'':30}{'time':>12}{'bandwidth':>14}{'of MPI':>9}{'of memcpy':>11}")
    for size in dict.fromkeys(result.size for result in results):
        print(_words(size))
        group = {r.name: r for r in results if r.size == size}
        for name, result in group.items():
            like = "MPI, in and out" if name.endswith(_BOTH) else "MPI"
            print(
                f"  {name:<28}{1e6 * result.median:>9.1f} µs"
                f"{size / result.median / 1e9:>9.2f} GB/s"
                f"{_ratio(result, group[like]):>9.2f}"
                f"{_ratio(result, group['memcpy']):>11.2f}"
            )
    if options.json:
        rows = [dataclasses.asdict(result) for result in results]
        text = json.dumps({**about, "results": rows}, indent=1)
        Path(options.json).write_text(text + "\n")
    if options.plot:
        _plot(options.plot, results, about)


def _ratio(result: Result, other: Result) -> float:
    """Returns the median of the ratios round by round."""
    pairs = zip(result.seconds, other.seconds, strict=True)
    return statistics.median(a / b for a, b in pairs)


def _words(size: int) -> str:
    """Returns a number of bytes in words.

    Example:
        >>> _words(4096), _words(100 << 20), _words(1000)
        ('4 KiB', '100 MiB', '1000 bytes')
    """
    for unit in "GMK":
        if size % _UNITS[unit] == 0 and size:
            return f"{size // _UNITS[unit]} {unit}iB"
    return f"{size} bytes"


def _plot(path: str, results: list[Result], about: dict[str, Any]) -> None:
    """Draws time over size, one line a contender."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name in dict.fromkeys(result.name for result in results):
        mine = [r for r in results if r.name == name]
        style = ":" if name == "memcpy" else "--" if name.startswith("MPI") else "-"
        microseconds = [1e6 * r.median for r in mine]
        axes.loglog([r.size for r in mine], microseconds, style, marker="o", label=name)
    axes.set_xlabel("bytes")
    axes.set_ylabel("µs")
    axes.set_title(f"allreduce, {about['ranks']} ranks, {about['library']}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
