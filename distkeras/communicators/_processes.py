"""Whether a process of this machine lives, for ranks that do not answer."""

from __future__ import annotations

import dataclasses
import os
import socket
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Process:
    """A rank's process, as it describes itself.

    Attributes:
        host: the machine's name, for messages.
        pid: its number.
        machine: equal for processes that see each other's numbers.
    """

    host: str
    pid: int
    machine: str

    def __str__(self) -> str:
        """Names it in a message."""
        return f"{self.host}, process {self.pid}"


def this_process() -> Process:
    """Describes this process."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:  # not Linux
        parts.append("?")
    return Process(socket.gethostname(), os.getpid(), " ".join(parts))


def status(process: Process, mine: Process) -> str | None:
    """Returns "gone", "stopped" or "alive"; `None` where this cannot be seen.

    Args:
        process: of another rank.
        mine: this process.
    """
    if process.machine != mine.machine or process.machine.endswith("?"):
        return None
    try:
        text = Path(f"/proc/{process.pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    except OSError:
        return None
    letter = text.rpartition(")")[2].split()[0]
    return {"Z": "gone", "X": "gone", "T": "stopped", "t": "stopped"}.get(
        letter, "alive"
    )
