"""The allreduce beside its peers': the same work, in turn, on this machine.

    python benchmarks/peers.py -n 2 --mpich FOLDER --horovod PYTHON --plot peers.png

The work: the sum over ranks of one array, which stays as it is, in another. Each does
it in the way of its own that takes least. Contenders:

- distkeras: the communicator that ranks of one node get (shared memory).
- Open MPI: `Allreduce` of two buffers, of the library that `distkeras run` finds.
- MPICH: the same of the MPICH in the folder given (`pip install --prefix` makes one).
- gloo: `torch.distributed.all_reduce` in place of a copy, if torch is installed.
- Horovod: `hvd.allreduce` of a TensorFlow tensor by the Python given, which has Horovod
  0.28.1 (README.md beside this file says how to build one), over MPI and over Gloo.
- memcpy: one array copied to the other, without any exchange.

Each round starts every contender once, in a job of its own, one after another;
figures are medians over the rounds of the slowest rank's median. With `--json FILE`
the raw numbers. Contenders that are not there are left out, and named.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SIZES = (4 << 10, 256 << 10, 4 << 20, 100 << 20)
REPEATS = {4 << 10: 300, 256 << 10: 100, 4 << 20: 15, 100 << 20: 3}


def main() -> None:
    """Measures, or is one rank of one contender."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, default=2, help="ranks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mpich", type=Path, help="a folder with bin/mpiexec and lib")
    parser.add_argument("--horovod", help="a Python with Horovod")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.out)
        return
    results = race(options)
    print(table(results, options))
    if options.json:
        about = {"ranks": options.n, "cores": os.cpu_count(), "load": os.getloadavg()}
        options.json.write_text(json.dumps({**about, "seconds": results}, indent=1))
    if options.plot:
        plot(results, options)


# -- the parent: starts jobs in turn --------------------------------------------------


def commands(options: argparse.Namespace) -> dict[str, tuple[list[str], str]]:
    """Returns how each contender is started: the launcher's words, and its Python."""
    python, ranks = sys.executable, str(options.n)
    ours = [python, "-m", "distkeras", "run", "-n", ranks]
    found = {
        "memcpy": (ours, ""),
        "distkeras": (ours, ""),
        "Open MPI": (ours, ""),
    }
    if options.mpich:
        library = f"MPI4PY_LIBMPI={options.mpich / 'lib' / 'libmpi.so.12'}"
        mpiexec = str(options.mpich / "bin" / "mpiexec")
        found["MPICH"] = ([mpiexec, "-n", ranks, "env", library], python)
    if torch_is_there():
        found["gloo"] = (ours, "")
    if options.horovod:
        mpiexec = shutil.which("mpiexec") or "mpiexec"
        words = [mpiexec, "-n", ranks, "--bind-to", "none", "--oversubscribe"]
        found["Horovod, MPI"] = (words, options.horovod)
        program = Path(options.horovod).parent / "horovodrun"
        words = [options.horovod, str(program), "--gloo", "-np", ranks]
        found["Horovod, Gloo"] = (words, options.horovod)
    return found


def torch_is_there() -> bool:
    """Returns whether torch can be imported, without doing so."""
    import importlib.util

    return importlib.util.find_spec("torch") is not None


def race(options: argparse.Namespace) -> dict[str, dict[int, list[float]]]:
    """Runs all contenders round by round; returns seconds by name and size."""
    found = commands(options)
    results: dict[str, dict[int, list[float]]] = {n: {} for n in found}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            for name, (launcher, python) in found.items():
                if name not in results:
                    continue
                out = Path(folder) / "out"
                shutil.rmtree(out, ignore_errors=True)
                out.mkdir()
                words = [*launcher, *([python] if python else []), __file__]
                words += ["--worker", name, "--out", str(out)]
                done = subprocess.run(words, capture_output=True, text=True)
                files = [json.loads(p.read_text()) for p in out.iterdir()]
                if done.returncode or len(files) != options.n:
                    print(f"{name} is left out:\n{done.stderr[-2000:]}")
                    del results[name]
                    continue
                for size in SIZES:
                    slowest = max(file[str(size)] for file in files)
                    results[name].setdefault(size, []).append(slowest)
    return results


def table(
    results: dict[str, dict[int, list[float]]], options: argparse.Namespace
) -> str:
    """Returns the medians in Markdown: microseconds, and the ratio to Open MPI."""
    lines = [
        f"{options.n} ranks, {os.cpu_count()} cores, {options.rounds} rounds, medians "
        "in ms, in brackets the ratio to Open MPI's",
        "",
        "| | " + " | ".join(words(size) for size in SIZES) + " |",
        "| --- |" + " ---: |" * len(SIZES),
    ]
    for name, sizes in results.items():
        cells = []
        for size in SIZES:
            pairs = zip(sizes[size], results["Open MPI"][size], strict=True)
            ratio = statistics.median(a / b for a, b in pairs)
            cells.append(f"{1e3 * statistics.median(sizes[size]):.3f} ({ratio:.2f})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def words(size: int) -> str:
    """Returns a size as people write it."""
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def plot(
    results: dict[str, dict[int, list[float]]], options: argparse.Namespace
) -> None:
    """Draws time over size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name, sizes in results.items():
        style = ":" if name == "memcpy" else "-" if name == "distkeras" else "--"
        medians = [1e3 * statistics.median(sizes[size]) for size in SIZES]
        axes.loglog(SIZES, medians, style, marker="o", label=name)
    axes.set_xlabel("bytes")
    axes.set_ylabel("ms")
    axes.set_title(f"allreduce, {options.n} ranks on {os.cpu_count()} cores")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(options.plot, dpi=110)


# -- a rank of one contender ----------------------------------------------------------

Run = Callable[[], None]


def work(name: str, out: Path) -> None:
    """Measures one contender on this rank; writes its medians."""
    make = {
        "memcpy": memcpy,
        "distkeras": distkeras,
        "Open MPI": mpi,
        "MPICH": mpi,
        "gloo": gloo,
        "Horovod, MPI": horovod,
        "Horovod, Gloo": horovod,
    }[name]
    prepare, barrier, close = make()
    medians = {}
    for size in SIZES:
        run = prepare(size // 4)
        for _ in range(3):
            run()
        times = []
        for _ in range(5):
            barrier()
            start = time.perf_counter()
            for _ in range(max(1, REPEATS[size] // 5)):
                run()
            times.append((time.perf_counter() - start) / max(1, REPEATS[size] // 5))
        medians[size] = statistics.median(times)
    (out / str(os.getpid())).write_text(json.dumps(medians))
    close()


def arrays(length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns what is summed, and where the result goes.

    Aligned as a framework's arrays are: some processors copy many times slower where
    the target lies a few bytes further in its page than the source.
    """
    from distkeras.communicators import aligned_zeros

    source, target = aligned_zeros(length, "float32"), aligned_zeros(length, "float32")
    source[:], target[:] = 0, 1  # the system gives memory when it is written to
    return source, target


def memcpy() -> tuple[Callable[[int], Run], Run, Run]:
    """The copy alone, on all ranks at the same time."""
    prepare_barrier = distkeras()

    def prepare(length: int) -> Run:
        source, target = arrays(length)
        return lambda: np.copyto(target, source)

    return prepare, *prepare_barrier[1:]


def distkeras() -> tuple[Callable[[int], Run], Run, Run]:
    """This project's, part by part as gradients go."""
    from distkeras.communicators import world

    communicator = world().duplicate()

    def prepare(length: int) -> Run:
        source, target = arrays(length)

        def pack(part: np.ndarray, start: int) -> None:
            np.copyto(part, source[start : start + part.size])

        def unpack(part: np.ndarray, start: int) -> None:
            """Where it is wanted."""

        return lambda: communicator.allreduce_parts(target, pack=pack, unpack=unpack)

    return prepare, communicator.barrier, communicator.close


def mpi() -> tuple[Callable[[int], Run], Run, Run]:
    """The MPI library's own."""
    from mpi4py import MPI

    def prepare(length: int) -> Run:
        source, target = arrays(length)
        return lambda: MPI.COMM_WORLD.Allreduce(source, target)

    return prepare, MPI.COMM_WORLD.Barrier, lambda: None


def gloo() -> tuple[Callable[[int], Run], Run, Run]:
    """PyTorch's on CPUs; MPI only tells ranks where to meet."""
    import torch
    from mpi4py import MPI
    from torch import distributed

    world = MPI.COMM_WORLD
    place = world.bcast(tempfile.mktemp() if world.rank == 0 else None)
    distributed.init_process_group(
        "gloo", init_method=f"file://{place}", rank=world.rank, world_size=world.size
    )
    torch.set_num_threads(1)

    def prepare(length: int) -> Run:
        source, target = map(torch.from_numpy, arrays(length))

        def run() -> None:
            target.copy_(source)
            distributed.all_reduce(target)

        return run

    return prepare, distributed.barrier, distributed.destroy_process_group


def horovod() -> tuple[Callable[[int], Run], Run, Run]:
    """Horovod's, on TensorFlow's tensors."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()

    def prepare(length: int) -> Run:
        source = tf.zeros(length)
        name = f"of{length}"

        @tf.function
        def step(x: Any) -> Any:
            return hvd.allreduce(x, op=hvd.Sum, name=name)

        def run() -> None:
            step(source)

        return run

    def barrier() -> None:
        hvd.allreduce(tf.zeros(1), name="barrier")

    return prepare, barrier, hvd.shutdown


if __name__ == "__main__":
    main()
