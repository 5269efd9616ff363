"""How much of the exchange hides behind the backward pass, on a slow link.

    sudo python benchmarks/overlap.py --rate 1gbit --model resnet50

Makes two hosts out of network namespaces, lets `--rate` through the cable between
them, and trains with one rank on each. Three contenders take blocks of steps in turn:

- barrier: no gradient travels; the ranks wait for each other.
- after: all gradients travel in one bucket, thus when the backward pass has ended.
- overlapped: in buckets, as `Trainer` does; without XLA, which would compile the
  backward pass into one operation.

Hidden is the share of what `after` adds to `barrier` that `overlapped` does not add.
`--compression bfloat16` lets half of the bytes travel. With `--json FILE` the raw
numbers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="1gbit", help="of the link, in tc's words")
    choices = ["resnet20", "resnet50", "mlp"]
    parser.add_argument("--model", choices=choices, default="resnet50")
    parser.add_argument("--batch", type=int, help="samples a rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="in a block")
    parser.add_argument("--bucket-bytes", type=int, help="instead of a measured size")
    parser.add_argument("--compression", choices=["float16", "bfloat16"])
    parser.add_argument("--uneven", action="store_true", help="batches may be empty")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def launch(options: argparse.Namespace) -> int:
    """Makes the hosts and starts this script on both."""
    sys.path.insert(0, str(HERE.parent / "tests"))
    from several_hosts import Hosts

    with tempfile.TemporaryDirectory() as folder, Hosts(Path(folder)) as hosts:
        hosts.shape(options.rate)
        slots = ",".join(f"{address}:1" for address in hosts.addresses)
        words = [sys.executable, "-m", "distkeras", "run", "-H", slots]
        words += ["--prtemca", "plm_ssh_agent", str(hosts.agent), __file__, "--worker"]
        return subprocess.run(hosts.on_first([*words, *sys.argv[1:]])).returncode


def work(options: argparse.Namespace) -> None:
    """Measures on this rank."""
    sys.path.insert(0, str(HERE))
    from step import BarrierExchange
    from step import contender

    from distkeras.communicators import world
    from distkeras.gradients import GradientExchange
    from distkeras.gradients import make_wire

    given = {"jit": False, "batch": options.batch, "uneven": options.uneven}
    wire = {"wire": make_wire(options.compression)}
    kinds = {
        "barrier": (BarrierExchange, {}),
        "after": (GradientExchange, {"bucket_bytes": 2**40, **wire}),
        "overlapped": (
            GradientExchange,
            {"bucket_bytes": options.bucket_bytes, **wire},
        ),
    }
    runs = {
        name: contender(options.model, kind, options=settings, **given)
        for name, (kind, settings) in kinds.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.rounds):
        for name, run in runs.items():
            seconds[name].append(run(options.steps))
    if world().rank:
        return
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    exposed = statistics.median(
        a - b for a, b in zip(seconds["after"], seconds["barrier"], strict=True)
    )
    left = statistics.median(
        a - b for a, b in zip(seconds["overlapped"], seconds["barrier"], strict=True)
    )
    print(
        f"{options.model}, {world().size} hosts, {options.rate}: "
        + ", ".join(f"{name} {1e3 * t:.0f} ms" for name, t in medians.items())
        + f"; exchange adds {1e3 * exposed:.0f} ms after the backward pass, "
        f"{1e3 * left:.0f} ms overlapped: {1 - left / exposed:.0%} hidden"
    )
    if options.json:
        record = {"options": {k: str(v) for k, v in vars(options).items()}}
        options.json.write_text(json.dumps({**record, "seconds": seconds}, indent=1))


if __name__ == "__main__":
    parsed = parse()
    if parsed.worker:
        work(parsed)
    else:
        sys.exit(launch(parsed))
