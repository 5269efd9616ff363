"""The `distkeras` command: finds the subcommand's module and calls it.

A subcommand is a module of this package with a function `main(argv) -> int`, and
one line in `COMMANDS`. It is imported only when it is asked for.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from distkeras._version import __version__
from distkeras.launch._mpiexec import LaunchError

COMMANDS = {
    "run": ("distkeras.launch._run", "start a script on several ranks"),
    "doctor": ("distkeras.launch._doctor", "say what this machine has, and try it"),
    "bench": ("distkeras.launch._bench", "measure the allreduce beside MPI's own"),
}

USAGE_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: the words after the program's name; those of the process if None.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    width = max(len(name) for name in COMMANDS)
    parser = argparse.ArgumentParser(
        prog="distkeras",
        description="Exact data-parallel training for Keras 3.",
        epilog="commands:\n"
        + "\n".join(
            f"  {name:<{width}}  {what}" for name, (_, what) in COMMANDS.items()
        )
        + "\n\n`distkeras COMMAND --help` says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"distkeras {__version__}"
    )
    parser.add_argument("command", choices=sorted(COMMANDS), metavar="COMMAND")
    # Only the first word is parsed here: all others are the subcommand's.
    command = parser.parse_args(words[:1]).command
    module = importlib.import_module(COMMANDS[command][0])
    try:
        code: int = module.main(words[1:])
    except LaunchError as error:
        print(f"distkeras {command}: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    return code
