"""Hosts for tests, made out of this machine: network namespaces that a cable joins.

Each has its own network and host name, so that MPI takes them for two machines: it
starts ranks there by an agent in place of ssh, and reaches them by TCP alone. Files are
shared, as on a cluster. Needs the superuser and iproute2.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_SUBNET = "10.77.{}"

# What ssh would do: a fresh environment, another folder, another host.
_AGENT = """\
#!/bin/bash
while [[ $1 == -* ]]; do shift; done
host=$1; shift
space={prefix}${{host##*.}}
exec ip netns exec $space unshare -u sh -c "hostname $space; cd /; \\
  exec env -i PATH=/usr/bin:/bin HOME=$HOME sh -c '$*'"
"""


class Hosts:
    """Two hosts of one subnet.

    Attributes:
        addresses: by which they reach each other.
        names: their host names.
        agent: a program to use as ssh.
    """

    def __init__(self, folder: Path) -> None:
        self._prefix = f"dk{os.getpid() % 100000}h"
        subnet = _SUBNET.format(os.getpid() % 250)
        self.addresses = [f"{subnet}.{number}" for number in (1, 2)]
        self.names = [f"{self._prefix}{number}" for number in (1, 2)]
        self.agent = folder / "agent"
        self.agent.write_text(_AGENT.format(prefix=self._prefix))
        self.agent.chmod(0o755)

    def __enter__(self) -> Hosts:
        """Makes the hosts and the cable."""
        one, two = self.names
        for name in self.names:
            _ip("netns", "add", name)
        _ip("link", "add", f"{one}c", "type", "veth", "peer", "name", f"{two}c")
        for name, address in zip(self.names, self.addresses, strict=True):
            _ip("link", "set", f"{name}c", "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", f"{name}c")
            _ip("-n", name, "link", "set", f"{name}c", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        """Removes them; the cable goes with them."""
        for name in self.names:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)

    def on_first(self, command: list[str]) -> list[str]:
        """Returns the command that runs `command` on the first host."""
        name = self.names[0]
        shell = f'hostname {name}; exec "$@"'
        inner = ["unshare", "-u", "sh", "-c", shell, "sh", *command]
        return ["ip", "netns", "exec", name, *inner]

    def shape(self, rate: str) -> None:
        """Lets so many bits a second through the cable, `"1gbit"`; each way."""
        limits = ["rate", rate, "burst", "256kb", "latency", "50ms"]
        for name in self.names:
            words = ["tc", "qdisc", "add", "dev", f"{name}c", "root", "tbf", *limits]
            words = ["ip", "netns", "exec", name, *words]
            subprocess.run(words, check=True, capture_output=True, text=True)

    def end(self) -> None:
        """Ends what still runs on the hosts, such as a launcher's daemon."""
        for name in self.names:
            listed = ["ip", "netns", "pids", name]
            found = subprocess.run(listed, capture_output=True, text=True, check=False)
            for pid in found.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    def cut(self) -> None:
        """Takes the second host's cable out."""
        _ip("-n", self.names[1], "link", "set", f"{self.names[1]}c", "down")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[Hosts]:
    """Yields two hosts; skips the test where they cannot be made.

    Args:
        folder: for the agent.
    """
    missing = [word for word in ("ip", "unshare") if shutil.which(word) is None]
    if missing or os.geteuid() != 0:
        pytest.skip("making hosts needs the superuser, iproute2 and util-linux")
    hosts = Hosts(folder)
    try:
        hosts.__enter__()
    except subprocess.CalledProcessError as error:
        hosts.__exit__()
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    try:
        yield hosts
    finally:
        hosts.__exit__()
