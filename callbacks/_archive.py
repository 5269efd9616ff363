"""A zip archive without compression, written from the beginning to the end.

`zipfile` reads it. It is not written by it, which goes back to each member's head for
its sum: of a checkpoint's many small arrays that takes a multiple of what writing them
does, and of time in which Python holds other threads.

The layout is PKWARE's APPNOTE 6.3.10, with the fields of Zip64 where they are needed.
"""

from __future__ import annotations

import dataclasses
import struct
import zlib
from collections.abc import Iterable
from typing import Any
from typing import BinaryIO

_LARGE, _MANY = 0xFFFFFFFF, 0xFFFF  # from here on a field is in its Zip64 form
_ELSEWHERE = 0xFFFFFFFF  # in the place of such a field
_VERSION = 45  # that knows Zip64
_UTF8 = 0x800
_DATE = (1 << 5) | 1  # the first of January 1980, which `zipfile` takes for none


@dataclasses.dataclass(frozen=True)
class _Member:
    name: bytes
    offset: int
    size: int
    crc: int


class Archive:
    """Writes members one after the other.

    Args:
        file: open for writing, at its beginning. It is not sought in.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._at = 0
        self._members: list[_Member] = []

    def add(self, name: str, parts: Iterable[Any]) -> None:
        """Writes a member.

        Args:
            name: of it, unlike those before.
            parts: of its content: bytes, or flat views of them.
        """
        held = [memoryview(part) for part in parts]
        size, crc = sum(part.nbytes for part in held), 0
        for part in held:
            crc = zlib.crc32(part, crc)
        member = _Member(name.encode(), self._at, size, crc)
        self._members.append(member)
        large = size >= _LARGE
        shown = _ELSEWHERE if large else size
        extra = struct.pack("<HHQQ", 1, 16, size, size) if large else b""
        self._write(
            struct.pack(
                "<4s5H3L2H",
                b"PK\x03\x04",
                _VERSION,
                _UTF8,
                0,  # as it is
                0,
                _DATE,
                crc,
                shown,
                shown,
                len(member.name),
                len(extra),
            )
            + member.name
            + extra
        )
        for part in held:
            self._write(part)

    def close(self, comment: bytes) -> None:
        """Writes the directory, and a comment of less than 64 KiB. The file stays open.

        Args:
            comment: the last bytes of the file.
        """
        start = self._at
        for member in self._members:
            self._write(_entry(member))
        size, count = self._at - start, len(self._members)
        if count >= _MANY or size >= _LARGE or start >= _LARGE:
            end = self._at
            self._write(
                struct.pack(
                    "<4sQ2H2L4Q",
                    b"PK\x06\x06",
                    44,
                    _VERSION,
                    _VERSION,
                    0,
                    0,
                    count,
                    count,
                    size,
                    start,
                )
                + struct.pack("<4sLQL", b"PK\x06\x07", 0, end, 1)
            )
            count, size, start = 0xFFFF, _ELSEWHERE, _ELSEWHERE
        self._write(
            struct.pack(
                "<4s4H2LH",
                b"PK\x05\x06",
                0,
                0,
                count,
                count,
                size,
                start,
                len(comment),
            )
            + comment
        )

    def _write(self, data: Any) -> None:
        self._file.write(data)
        self._at += len(data)


def _entry(member: _Member) -> bytes:
    """Returns a member's entry in the directory."""
    fields = []
    size, offset = member.size, member.offset
    if size >= _LARGE:
        fields += [size, size]
        size = _ELSEWHERE
    if offset >= _LARGE:
        fields.append(offset)
        offset = _ELSEWHERE
    extra = b""
    if fields:
        extra = struct.pack(f"<HH{len(fields)}Q", 1, 8 * len(fields), *fields)
    return (
        struct.pack(
            "<4s6H3L5H2L",
            b"PK\x01\x02",
            _VERSION,
            _VERSION,
            _UTF8,
            0,
            0,
            _DATE,
            member.crc,
            size,
            size,
            len(member.name),
            len(extra),
            0,
            0,
            0,
            0o600 << 16,  # who may read the file, if it is unpacked
            offset,
        )
        + member.name
        + extra
    )
