"""`distkeras doctor`: what this machine has for training on several processes.

Everything is tried, not looked up: libraries are loaded and two ranks reduce a
buffer, each in processes of their own. The answers become one line each, and what is
missing becomes the command that brings it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import platform
import socket
from collections.abc import Mapping
from collections.abc import Sequence

from distkeras._version import __version__
from distkeras.launch import _mpiexec
from distkeras.launch._doctor_checks import Check
from distkeras.launch._doctor_checks import check_device
from distkeras.launch._doctor_checks import check_frameworks
from distkeras.launch._doctor_checks import check_gpus
from distkeras.launch._doctor_checks import check_hosts
from distkeras.launch._doctor_checks import check_launcher
from distkeras.launch._doctor_checks import check_mpi
from distkeras.launch._doctor_checks import check_python
from distkeras.launch._doctor_checks import check_shared_memory
from distkeras.launch._doctor_checks import find_launcher
from distkeras.launch._doctor_checks import pip
from distkeras.launch._doctor_checks import there
from distkeras.launch._doctor_checks import try_allreduce
from distkeras.launch._mpiexec import LaunchError

_EPILOG = """\
Each line begins with: ok; none (this machine has none, and needs none); note (it works,
but may work better); missing; broken (it is there and fails).

exit code: 0 if everything is there that training on several processes needs; 1 if
something is missing or broken; 2 for a wrong command line.
"""


def main(argv: Sequence[str]) -> int:
    """Runs the subcommand.

    Args:
        argv: the words after `distkeras doctor`.

    Returns:
        0 if all is there that training on several processes needs, else 1.
    """
    parser = argparse.ArgumentParser(
        prog="distkeras doctor",
        description="Say what this machine has for training on several processes, and "
        "try it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--mpiexec", metavar="PATH", help="the launcher to try")
    options = parser.parse_args(argv)
    checks = examine(_mpiexec.outside_jobs(os.environ), options.mpiexec)
    print(as_json(checks) if options.json else as_text(checks))
    return 0 if all(check.fine for check in checks) else 1


def examine(environ: Mapping[str, str], mpiexec: str | None = None) -> list[Check]:
    """Looks at this machine.

    Args:
        environ: the environment that ranks would be started from.
        mpiexec: the launcher to try; searched for if None.

    Returns:
        What was found, in the order of the report.
    """
    launcher = find_launcher(mpiexec)
    added: dict[str, str] = {}
    if isinstance(launcher, _mpiexec.Mpiexec):
        added = _mpiexec.environment(launcher, environ, root=os.geteuid() == 0)
    gpus = check_gpus(environ)
    # Loading TensorFlow takes seconds: meanwhile the others are asked.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        gpu = bool(gpus.details["visible"])
        asked_frameworks = pool.submit(check_frameworks, environ, gpu)
        asked_mpi = pool.submit(check_mpi, {**environ, **added})
        asked_device = pool.submit(check_device, environ, gpu)
        frameworks = asked_frameworks.result()
        mpi = asked_mpi.result()
        device = asked_device.result()
    checks = [
        check_python(),
        *frameworks,
        *mpi,
        check_launcher(launcher),
        *device,
        gpus,
        check_hosts(environ),
        check_shared_memory(),
    ]
    lacking = [name for name in ("numpy", "mpi4py") if not there(name)]
    if not all(check.fine for check in mpi):
        lacking.append("a working MPI")
    if isinstance(launcher, LaunchError) or lacking:
        if isinstance(launcher, LaunchError):
            lacking.append("mpiexec")
        text = f"not tried without {', '.join(lacking)}"
        remedy = pip("numpy") if "numpy" in lacking else None
        return [*checks, Check("allreduce", "missing", text, remedy=remedy)]
    host = {**environ, "CUDA_VISIBLE_DEVICES": ""}
    host.pop("DISTKERAS_COMMUNICATOR", None)
    checks.append(try_allreduce("allreduce", launcher, host, needed=True))
    if len(gpus.details["visible"]) > 1 and all(c.status == "ok" for c in device):
        by_nccl = {**environ, "DISTKERAS_COMMUNICATOR": "nccl"}
        name = "allreduce by NCCL"
        checks.append(try_allreduce(name, launcher, by_nccl, "device", needed=False))
    return checks


def as_text(checks: Sequence[Check]) -> str:
    """Returns the report as lines for people."""
    width = max(len(check.name) for check in checks)
    lines = [
        f"distkeras {__version__} on {socket.gethostname()}, {platform.platform()}",
        "",
    ]
    for check in checks:
        lines.append(f"  {check.status:<8} {check.name:<{width}}  {check.text}")
        lines += [f"  {'':<8} {'':<{width}}  {line}" for line in check.lines]
    lines.append("")
    for title, chosen in (
        (
            "Needed for training on several processes:",
            [c for c in checks if not c.fine],
        ),
        ("May be of use:", [c for c in checks if c.fine and c.remedy]),
    ):
        remedies: dict[str, list[str]] = {}
        for check in chosen:
            if check.remedy:
                remedies.setdefault(check.remedy, []).append(check.name)
        if remedies:
            lines.append(title)
            lines += [f"  {', '.join(n)}: {remedy}" for remedy, n in remedies.items()]
    if all(check.fine for check in checks):
        lines.append("Ready: distkeras run -n 2 train.py")
    return "\n".join(lines)


def as_json(checks: Sequence[Check]) -> str:
    """Returns the report for programs.

    An object: `version`, `ok` (whether the exit code is 0) and `checks`, a list of
    objects with `name`, `status`, `needed`, `text`, `remedy`, `lines`, `details`.
    """
    report = {
        "version": __version__,
        "ok": all(check.fine for check in checks),
        "checks": [dataclasses.asdict(check) for check in checks],
    }
    return json.dumps(report, indent=2)
