"""Sleeping until another process writes to a word of shared memory, as Linux offers.

`futex(2)` puts a thread to sleep as long as a word holds what it is expected to hold,
and lets whoever writes to the word wake it. Other ways to sleep wake too late, by a
tenth of a millisecond and more.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import platform
import sys
from collections.abc import Callable

import numpy as np

# Of the system call, by processor; only such that keep the low half first.
_NUMBERS = {"x86_64": 202, "aarch64": 98, "ppc64le": 221}
_WAIT, _WAKE = 0, 1
_EXPECTED = (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT)
_ALL = 2**31 - 1


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Futex:
    """The words of one memory, as a futex sees them.

    Args:
        call: the system call.
        words: eight-byte words in memory that processes share.
    """

    def __init__(self, call: Callable[..., int], words: memoryview) -> None:
        self._call = call
        self._start = np.frombuffer(words, np.uint8).ctypes.data

    def wait(self, word: int, seen: int, seconds: float) -> bool:
        """Sleeps until `wake` is called for a word.

        Args:
            word: its index.
            seen: what it held; if it holds something else, this returns at once.
            seconds: at most; it may be much less. Whoever calls this looks at the word
                afterwards.

        Returns:
            Whether the system can do this with that memory.
        """
        time = _Time(int(seconds), int(seconds % 1 * 1e9))
        half = ctypes.c_int(seen & 0xFFFFFFFF)
        code = self._call(self._start + 8 * word, _WAIT, half, ctypes.byref(time))
        return code != -1 or ctypes.get_errno() in _EXPECTED

    def wake(self, word: int) -> None:
        """Wakes all that sleep for a word."""
        self._call(self._start + 8 * word, _WAKE, ctypes.c_int(_ALL), None)


def find_futex(words: memoryview) -> Futex | None:
    """Returns how to sleep for these words; `None` where the system cannot."""
    call = _system_call()
    return None if call is None else Futex(call, words)


@functools.cache
def _system_call() -> Callable[..., int] | None:
    number = _NUMBERS.get(platform.machine())
    fits = sys.platform == "linux" and sys.byteorder == "little"
    if number is None or not fits or ctypes.sizeof(ctypes.c_long) != 8:
        return None
    try:
        syscall = ctypes.CDLL(None, use_errno=True).syscall
    except (OSError, AttributeError):
        return None
    syscall.restype = ctypes.c_long
    syscall.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
    syscall.argtypes += [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]

    def call(address: int, what: int, value: ctypes.c_int, time: object) -> int:
        return int(syscall(number, address, what, value, time, None, 0))

    word = ctypes.c_int(0)
    # Unlike what is expected: it returns at once, and says so if it may be called.
    refused = call(ctypes.addressof(word), _WAIT, ctypes.c_int(1), None)
    return call if refused == -1 and ctypes.get_errno() == errno.EAGAIN else None
