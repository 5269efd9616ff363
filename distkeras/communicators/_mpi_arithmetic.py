"""Combining arrays by MPI: what it cannot add, and what it would add otherwise.

It knows no half precision: that travels as float32, or in slices of sixteen bits. And
its minimum and maximum of a NaN depend on the order of the operands, which differs
from rank to rank: here a NaN wins, as in NumPy, and every rank holds the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from distkeras.communicators._arithmetic import UFUNCS
from distkeras.communicators._base import Op

# From where on halving the bytes is worth a second message.
_SLICED_BYTES = 1 << 16


class Arithmetic:
    """Combines chunks over the ranks of a communicator, in place.

    Args:
        mpi: the module `mpi4py.MPI`.
        comm: the ranks.
    """

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi, self._comm = mpi, comm
        self._rank, self._size = int(comm.Get_rank()), int(comm.Get_size())

    def combine(self, part: np.ndarray, op: Op) -> None:
        """Combines a chunk that is short enough for one message."""
        if part.dtype.kind == "b":
            # MPI has logical operations for C's bool, and no others.
            logical: dict[str, Op] = {"sum": "max", "product": "min"}
            self._combine(part.view(np.uint8), logical.get(op, op))
        elif _is_narrow_float(part.dtype):
            self._combine_narrow(part, op)
        else:
            self._combine(part, op)

    def _combine_narrow(self, part: np.ndarray, op: Op) -> None:
        """Combines a chunk that MPI cannot add, through float32."""
        two_bytes = part.dtype.itemsize == 2
        if two_bytes and part.nbytes >= _SLICED_BYTES and self._size > 1:
            self._combine_slices(part, op)
            return
        wide = part.astype(np.float32)
        self._combine(wide, op)
        with np.errstate(over="ignore"):  # beyond the type's range: infinity
            part[...] = wide.astype(part.dtype)

    def _combine_slices(self, part: np.ndarray, op: Op) -> None:
        """Lets each rank combine a slice for all, so that two bytes a number travel."""
        counts = [len(piece) for piece in np.array_split(part, self._size)]
        mine = counts[self._rank]
        received = np.empty((self._size, mine), part.dtype)
        raw = self._mpi.UINT16_T
        self._comm.Alltoallv(
            [part.view(np.uint16), counts, raw],
            [received.view(np.uint16), [mine] * self._size, raw],
        )
        wide = received[0].astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            for other in received[1:]:
                UFUNCS[op](wide, other, out=wide, dtype=np.float32, casting="unsafe")
            combined = wide.astype(part.dtype)
        self._comm.Allgatherv(
            [combined.view(np.uint16), raw], [part.view(np.uint16), counts, raw]
        )

    def _combine(self, part: np.ndarray, op: Op) -> None:
        """Combines one chunk of a dtype that MPI knows."""
        mpi = self._mpi
        real = part.dtype.kind == "f"
        if real and op in ("min", "max"):
            # Also for the sign of a zero, one rank decides for all.
            mine = part if self._rank else mpi.IN_PLACE
            into = None if self._rank else part
            self._comm.Reduce(mine, into, op=_nan_aware_op(mpi, op), root=0)
            self._comm.Bcast(part, root=0)
            return
        names = {"sum": mpi.SUM, "product": mpi.PROD, "min": mpi.MIN, "max": mpi.MAX}
        self._comm.Allreduce(mpi.IN_PLACE, part, op=names[op])
        # Which of two NaNs survives an addition depends on the operands' order,
        # and that on the rank. A minimum finds them at the speed of memory.
        if real and part.size and np.isnan(part.min()):
            part[np.isnan(part)] = np.nan


def _is_narrow_float(dtype: np.dtype) -> bool:
    """Whether MPI has no number type for this float (ml_dtypes' are kind V)."""
    if dtype.kind == "f":
        return dtype.itemsize < 4
    return dtype.kind == "V" and dtype.itemsize <= 2 and "float" in dtype.name


_nan_aware_ops: dict[str, Any] = {}


def _nan_aware_op(mpi: Any, op: str) -> Any:
    """Returns MPI's handle of NumPy's minimum or maximum, in which NaN wins."""
    if op not in _nan_aware_ops:
        ufunc = {"min": np.minimum, "max": np.maximum}[op]

        def combine(mine: Any, theirs: Any, datatype: Any) -> None:
            dtype = np.dtype(f"f{datatype.Get_size()}")
            into = np.frombuffer(theirs, dtype)
            ufunc(np.frombuffer(mine, dtype), into, out=into)

        # Made once a process: mpi4py has room for few operations.
        _nan_aware_ops[op] = mpi.Op.Create(combine, commute=True)
    return _nan_aware_ops[op]
