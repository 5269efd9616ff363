"""What the exchange costs where ranks share cores: twice as many ranks as before.

    python benchmarks/oversubscribed.py --rounds 5

Runs `distkeras bench` with 2 ranks and with 4 (`--ranks`), in turn, and prints for
each size how many times as long the more take for the same buffer, in and out: the
medians of the rounds' ratios. Where N ranks fill the cores, 2 N cannot take less than
twice as long, as each has its own bytes to copy.

With `--floor` the second job has as many ranks as the first, on half of the cores. Two
share a core there too, and change places at each message, but sum half as many buffers
and wait for no other core: more ranks on all cores can hardly take less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

Times = dict[tuple[int, str], float]
"""Seconds of a message by its bytes and the contender."""


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs=2, default=(2, 4))
    parser.add_argument("--sizes", default="4K,256K,4M,32M")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--floor", action="store_true", help="on half of the cores")
    parser.add_argument("--json", type=Path, help="write the raw numbers")
    options = parser.parse_args()
    few, many = options.ranks
    cores = os.sched_getaffinity(0)
    jobs = [(few, cores), (many, cores)]
    second = f"{many} ranks"
    if options.floor:
        jobs[1] = few, set(sorted(cores)[: max(1, len(cores) // 2)])
        second = f"{few}, half"
    rounds = []
    for number in range(options.rounds):
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
        rounds.append([measure(ranks, options.sizes, on) for ranks, on in jobs])
    print(f"{second} to {few} ranks, medians of {options.rounds} pairs")
    print(f"{'':>10} {'contender':28} {f'{few} ranks':>12} {second:>12}")
    for size, name in rounds[0][0]:
        pairs = [[times[size, name] for times in pair] for pair in rounds]
        before, after = (statistics.median(times) for times in zip(*pairs, strict=True))
        ratio = statistics.median(b / a for a, b in pairs)
        print(
            f"{size >> 10:>6} KiB {name:28} {1e6 * before:>9.0f} µs "
            f"{1e6 * after:>9.0f} µs  {ratio:.2f}"
        )
    if options.json:
        raw = [
            [
                [size, name, *(times[size, name] for times in pair)]
                for size, name in pair[0]
            ]
            for pair in rounds
        ]
        options.json.write_text(json.dumps(raw, indent=1) + "\n")


def measure(ranks: int, sizes: str, cores: set[int]) -> Times:
    """Returns the median times of one job, on some cores."""
    all_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)  # which the job inherits
    try:
        return _measure(ranks, sizes)
    finally:
        os.sched_setaffinity(0, all_cores)


def _measure(ranks: int, sizes: str) -> Times:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bench.json"
        command = [sys.executable, "-m", "distkeras", "bench", "-n", str(ranks)]
        command += ["--sizes", sizes, "--rounds", "5", "--json", str(file)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        results = json.loads(file.read_text())["results"]
    return {(r["size"], r["name"]): statistics.median(r["seconds"]) for r in results}


if __name__ == "__main__":
    main()
