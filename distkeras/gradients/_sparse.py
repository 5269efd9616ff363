"""Exchanges sparse gradients: rows of all ranks, or sums of what is smaller dense."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distkeras.gradients._channel import Channel
from distkeras.gradients._flags import WRITTEN
from distkeras.gradients._flags import StepFlags
from distkeras.gradients._plan import Plan
from distkeras.gradients._plan import wire_dtype
from distkeras.gradients._rows import Kind
from distkeras.gradients._rows import Rows
from distkeras.gradients._rows import dense_bytes
from distkeras.gradients._rows import joined
from distkeras.gradients._rows import pack
from distkeras.gradients._rows import row_bytes
from distkeras.gradients._rows import split_dense
from distkeras.gradients._rows import unpack
from distkeras.gradients._rows import weighted


class SparseExchange:
    """Exchanges all sparse gradients of a plan together.

    A rank's message begins with a head: its flags, and how many rows it has of each
    variable.

    Args:
        channel: carries them.
        flags: of the step.
    """

    def __init__(self, channel: Channel, flags: StepFlags) -> None:
        self._channel = channel
        self._flags = flags

    def reduce(
        self, plan: Plan, examples: float, pieces: Sequence[Rows], *, merge: bool
    ) -> list[Rows]:
        """Returns all ranks' rows, each times n / Σ n.

        See `GradientExchange.reduce_rows`.
        """
        kinds = [
            (plan.gradients[i].shape, wire_dtype(plan.gradients[i].dtype))
            for i in plan.sparse
        ]
        mine = [
            weighted(piece, examples, dtype)
            for piece, (_, dtype) in zip(pieces, kinds, strict=True)
        ]
        if merge:
            result = self._merged(examples, [m.merged() for m in mine], kinds)
        else:
            result = self._allgather(examples, mine, kinds)
        for piece in result:
            self._flags.divide(piece.values)
        return result

    def _merged(
        self, examples: float, mine: list[Rows], kinds: list[Kind]
    ) -> list[Rows]:
        """Sums rows over ranks, each variable's in the form that is smaller."""
        self._channel.ready()
        heads = self._channel.communicator.allgather(self._head(examples, mine))
        self._channel.counters.messages += 1
        if self._plans_differ(heads):
            return mine
        total = np.sum(heads, axis=0)
        forms: dict[str, list[int]] = {}
        for k, (kind, length) in enumerate(zip(kinds, total[WRITTEN:], strict=True)):
            sparse = length * row_bytes(*kind) < dense_bytes(*kind)
            forms.setdefault("rows" if sparse else kind[1].name, []).append(k)
        result = list(mine)
        for form, chosen in forms.items():
            ours, of = [mine[k] for k in chosen], [kinds[k] for k in chosen]
            if form == "rows":
                gathered = self._allgather(examples, ours, of)
                sums = [piece.merged() for piece in gathered]
            else:
                sums = self._allreduce(ours, of)
            for k, piece in zip(chosen, sums, strict=True):
                result[k] = piece
        return result

    def _allreduce(self, mine: list[Rows], kinds: list[Kind]) -> list[Rows]:
        """Returns the sums of gradients of one dtype, which travel dense."""
        flat = np.concatenate(
            [
                rows.dense(*kind).reshape(-1)
                for rows, kind in zip(mine, kinds, strict=True)
            ]
        )
        self._channel.ready()
        self._channel.communicator.allreduce(flat, "sum")
        self._channel.exchanged(flat.nbytes)
        return split_dense(flat, [shape for shape, _ in kinds])

    def _allgather(
        self, examples: float, mine: list[Rows], kinds: list[Kind]
    ) -> list[Rows]:
        """Returns for each variable all ranks' rows."""
        head = self._head(examples, mine)
        packed = pack(head, mine)
        self._channel.ready()
        parts = self._channel.communicator.allgather(packed)
        self._channel.exchanged(packed.nbytes)
        # Those of ranks that follow another plan may be as short as their flags.
        heads = [part[: head.nbytes] for part in parts]
        heads = [each[: each.size // 8 * 8].view(np.float64) for each in heads]
        if self._plans_differ(heads):
            return mine
        unpacked = [
            unpack(part[head.nbytes :], h[WRITTEN:].astype(int).tolist(), kinds)
            for part, h in zip(parts, heads, strict=True)
        ]
        return [joined(pieces) for pieces in zip(*unpacked, strict=True)]

    def _plans_differ(self, heads: list[np.ndarray]) -> bool:
        """Reads the flags of all ranks, which are alike whatever comes after them."""
        self._flags.read(np.sum([head[:WRITTEN] for head in heads], axis=0))
        return self._flags.plans_differ

    def _head(self, examples: float, mine: list[Rows]) -> np.ndarray:
        head = np.zeros(WRITTEN + len(mine), np.float64)
        self._flags.write(head, examples)
        head[WRITTEN:] = [len(rows) for rows in mine]
        return head
