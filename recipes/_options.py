"""Options of the recipes: on the command line, from a file, and written to one."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tomllib
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from typing import get_args

import keras

import distkeras
from distkeras.gradients import Compression

PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")
JIT_COMPILE: dict[str, bool | str] = {"auto": "auto", "on": True, "off": False}
SCALING: dict[str, Any] = {"linear": "linear", "sqrt": "sqrt", "none": None}


def make_parser(
    module: str,
    description: str | None,
    *,
    defaults: Mapping[str, Mapping[str, Any]],
    depths: Sequence[int],
    schedules: Sequence[str],
    learning_rate: str,
) -> tuple[argparse.ArgumentParser, Any]:
    """Returns a parser of what all recipes can be told.

    Args:
        module: that is run, as in `python -m MODULE`.
        description: its docstring.
        defaults: as for `parse`; its first data is trained on by default.
        depths: of the models that there are.
        schedules: names of how the learning rate may fall.
        learning_rate: what the learning rate is that of.

    Returns:
        The parser, and its group for options whose default depends on the data.
    """
    parser = argparse.ArgumentParser(
        prog=module,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", type=Path, help="TOML file with options; those given here win")
    add("--output", type=Path, default=Path("runs") / module.rpartition(".")[2])
    add("--data", choices=list(defaults), default=next(iter(defaults)))
    add("--data-dir", type=Path, help="folder of the data: see the recipes' README")
    add("--seed", type=int, default=0)
    add("--precision", choices=PRECISIONS, default="float32", help="(%(default)s)")
    add("--jit-compile", choices=list(JIT_COMPILE), default="auto", help="by XLA")
    add(
        *("--scaling",),
        choices=list(SCALING),
        default="linear",
        help="how the learning rate grows with the number of ranks (%(default)s)",
    )
    add(
        *("--compression",),
        choices=get_args(Compression),
        help="how gradients travel: in half the bytes (as they are)",
    )
    add(
        *("--error-feedback",),
        action=argparse.BooleanOptionalAction,
        default=False,
        help="with --compression: what rounding took is added to the next gradients",
    )
    add("--weight-decay", type=float, default=1e-4, help="of kernels (%(default)s)")
    add("--ema", type=float, help="evaluate and keep a moving average, say 0.999")
    add(
        *("--resume",),
        action=argparse.BooleanOptionalAction,
        default=False,
        help="keep checkpoints in OUTPUT, and go on from the newest if there is one",
    )
    add(
        *("--checkpoint-steps",),
        type=positive,
        metavar="N",
        help="with --resume: also every N updates, not only after each epoch",
    )
    add("--steps", type=positive, help="end after so many updates: to try things out")
    by_data = parser.add_argument_group("options whose default depends on the data")
    add = by_data.add_argument
    add("--depth", type=int, choices=depths, help="of the ResNet, in layers")
    add("--epochs", type=positive)
    add("--batch-size", type=positive, help="examples a step on each rank")
    add("--learning-rate", type=float, help=f"of {learning_rate}")
    add("--warmup-epochs", type=float, help="to reach the scaled learning rate")
    add("--schedule", choices=schedules, help="how the learning rate falls")
    add("--label-smoothing", type=float)
    return parser, by_data


def parse(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    defaults: Mapping[str, Mapping[str, Any]],
) -> argparse.Namespace:
    """Returns the options: flags win over the file, the file over the defaults.

    Args:
        parser: of `make_parser`.
        argv: the words of the command line; those of the process if None.
        defaults: by the data, what is used where an option was not given.

    Raises:
        SystemExit: with code 2, after a message, if options have no meaning.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", type=Path)
    path = first.parse_known_args(words)[0].config
    if path is not None:
        words = [*_words_of(path, parser), *words]
    args = parser.parse_args(words)
    if args.resume and args.steps is not None:
        parser.error("--steps ends within an epoch: leave it or --resume out")
    if args.checkpoint_steps is not None and not args.resume:
        parser.error("--checkpoint-steps needs --resume")
    if args.error_feedback and args.compression is None:
        parser.error("--error-feedback needs --compression")
    for name, default in defaults[args.data].items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    return args


def positive(word: str) -> int:
    """Reads a number from 1 up."""
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1 up: {word}")
    return number


def write_config(args: argparse.Namespace, *, global_batch_size: int) -> None:
    """Rank 0 writes `config.toml`, which `--config` reads, into the output folder.

    Args:
        args: all options, as they came to be.
        global_batch_size: examples a step of all ranks; goes into a comment.
    """
    if distkeras.rank() != 0:
        return
    ranks = distkeras.size()
    lines = [
        f"# ranks: {ranks}, global batch: {global_batch_size}",
        f"# distkeras {distkeras.__version__}, keras {keras.__version__} on "
        f"{keras.config.backend()}, Python {platform.python_version()}",
    ]
    for name, value in sorted(vars(args).items()):
        if name != "config" and value is not None:
            lines.append(f"{name} = {_toml(value)}")
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "config.toml").write_text("\n".join(lines) + "\n")


def _words_of(path: Path, parser: argparse.ArgumentParser) -> list[str]:
    """Reads a file of options as words of the command line, which are checked."""
    try:
        options = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        parser.error(f"cannot read --config {path}: {error}")
    known = vars(parser.parse_args([]))
    words = []
    for key, value in options.items():
        name = key.replace("-", "_")
        if name not in known or name == "config" or isinstance(value, (dict, list)):
            parser.error(f"{path}: there is no such option: {key} = {value!r}")
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            words.append(f"{flag}={value}")
    return words


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    # JSON's strings are strings of TOML.
    return repr(value) if isinstance(value, (int, float)) else json.dumps(str(value))
