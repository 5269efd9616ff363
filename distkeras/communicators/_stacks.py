"""Where this process stands: Python stacks, in few lines that a user can read."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from collections.abc import Mapping
from types import FrameType

_STANDARD = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
# Of library frames, these many at the inner end are shown.
_SHOWN = 2
_LONGEST = 24
# Seconds for the lines of the files.
_PATIENCE = 0.5


def where(thread: int | None = None) -> str:
    """Returns the innermost line of the user's own code, as "train.py:31, in main".

    Args:
        thread: whose stack to look at; the main thread's by default, and where
            that thread runs none of the user's code.
    """
    frames = sys._current_frames()
    main = threading.main_thread().ident
    for ident in (thread, main):
        for frame in _outwards(frames.get(ident or 0)):
            if not _in_library(frame):
                return _place(frame)
    innermost = frames.get(thread or 0) or frames.get(main or 0)
    return "no Python code" if innermost is None else _place(innermost)


def stack(thread: int | None = None) -> str:
    """Returns a thread's stack, the innermost call at the end.

    Args:
        thread: the main thread by default.
    """
    ident = threading.main_thread().ident if thread is None else thread
    inwards = list(_outwards(sys._current_frames().get(ident or 0)))[::-1]
    lines: list[str] = []
    places: dict[int, tuple[str, int]] = {}
    hidden = 0
    for position, frame in enumerate(inwards):
        if _in_library(frame) and position < len(inwards) - _SHOWN:
            hidden += 1
            continue
        if hidden:
            lines.append(f"... {hidden} calls inside of libraries")
            hidden = 0
        path, line = frame.f_code.co_filename, _line(frame)
        lines.append(f'File "{path}", line {line}, in {_name(frame)}')
        places[len(lines)] = (path, line)
    for number, source in sorted(_sources(places).items(), reverse=True):
        lines.insert(number, f"  {source}")
    if len(lines) > 2 * _LONGEST:
        left_out = len(lines) - 2 * _LONGEST
        lines[_LONGEST:-_LONGEST] = [f"... {left_out} lines"]
    return "\n".join(lines)


def _sources(places: Mapping[int, tuple[str, int]]) -> dict[int, str]:
    """Returns lines of files, as far as they can be read within a moment.

    Whatever keeps a rank may be the file system that its script lies on.
    """
    found: dict[int, str] = {}

    def read() -> None:
        for number, (path, line) in places.items():
            source = linecache.getline(path, line).strip()
            if source:
                found[number] = source

    reader = threading.Thread(target=read, name="distkeras-sources", daemon=True)
    reader.start()
    reader.join(_PATIENCE)
    return dict(found)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _in_library(frame: FrameType) -> bool:
    """Whether a frame is of this package, of an installed one or of Python itself."""
    name = str(frame.f_globals.get("__name__", ""))
    if name == "distkeras" or name.startswith("distkeras."):
        return True
    if name == "__main__" and frame.f_globals.get("__package__") == "distkeras.launch":
        return True
    path = frame.f_code.co_filename
    if path.startswith("<frozen") or any(part in path for part in _INSTALLED):
        return True
    return path.startswith(_STANDARD)


def _line(frame: FrameType) -> int:
    return frame.f_lineno or frame.f_code.co_firstlineno


def _name(frame: FrameType) -> str:
    return getattr(frame.f_code, "co_qualname", frame.f_code.co_name)


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{_line(frame)}, in {_name(frame)}"
