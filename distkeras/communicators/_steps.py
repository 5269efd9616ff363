"""What ranks that meet in shared memory do in a step: said in one number.

The number, the label, is what they compare at every step, and what the watchdog is
told when a wait becomes long. Up to then nothing is noted: that would take as long
as a small exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from distkeras.communicators._base import Op
from distkeras.communicators._checks import OPS
from distkeras.communicators._waiting import Call
from distkeras.communicators._waiting import Calls

# In labels by their places here.
DTYPES = (
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64"),
    *("uint64", "float16", "bfloat16", "float32", "float64"),
)

Label = int
"""What a rank does in a step, in 63 bits."""

BARRIER: Label = 0


class _Step(NamedTuple):
    """A label, taken apart."""

    op: str
    dtype: str
    length: int


def make_label(buffer: np.ndarray, op: Op) -> Label:
    """Returns the label of an allreduce.

    Args:
        buffer: of one of `DTYPES`.
        op: the operation.

    Example:
        >>> describe(make_label(np.ones(3), "max"))
        'allreduce (max) of 3 float64'
    """
    dtype = DTYPES.index(buffer.dtype.name)
    return (buffer.size << 8 | dtype) << 4 | 1 + OPS.index(op)


def _take_apart(label: Label) -> _Step:
    dtype = DTYPES[label >> 4 & 255]
    return _Step(OPS[(label & 15) - 1], dtype, label >> 12)


def describe(label: Label) -> str:
    """Returns a label in words."""
    if label == BARRIER:
        return "barrier"
    op, dtype, length = _take_apart(label)
    return f"allreduce ({op}) of {length} {dtype}"


class Steps(Calls):
    """The steps of this rank, as the watchdog sees collective calls.

    Args:
        parent: the calls of the communicator that shared memory was added to.
        newest: returns the number of the newest step.
        label: returns the label of that step, or of the one before.
    """

    __slots__ = ("_label", "_newest")

    def __init__(
        self, parent: Calls, newest: Callable[[], int], label: Callable[[int], Label]
    ) -> None:
        self._newest, self._label = newest, label
        super().__init__(parent.members, parent)

    @property
    def entered(self) -> int:
        """How many steps have begun."""
        return self._newest()

    def find(self, number: int) -> Call | None:
        """Returns the step of that number, if it is the newest or the one before."""
        if number < 1 or self._newest() - number not in (0, 1):
            return None
        try:
            label = self._label(number)
        except ValueError:  # closed meanwhile, the memory is given back
            return None
        verb, size, op = self._words(label)
        return Call(number, verb, size, op, 0.0, 0)

    def waits(self, number: int) -> Calls:
        """Notes that this rank waits in a step; to be used in a `with` at once."""
        self._previous = number - 1
        return self(*self._words(self._label(number)))

    @staticmethod
    def _words(label: Label) -> tuple[str, int, str | None]:
        """Returns the verb, the bytes, and the operation."""
        if label == BARRIER:
            return "barrier", 0, None
        op, dtype, length = _take_apart(label)
        itemsize = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
        return "allreduce", length * itemsize, op
