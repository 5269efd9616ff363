"""Who goes on with what, where an epoch was begun by another number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence

# So many ranks, of which each took so many examples of its own.
Stage = tuple[int, int]


class Dealing:
    """Deals what is left of an epoch, as often as the number of ranks changes.

    Of the examples that each rank had left, put one rank after the other, every new
    rank takes a piece; pieces differ by one example at most.

    Args:
        count: how many examples a rank of so many has in a whole epoch.

    Example:
        Three ranks had ten examples each and took four. Two ranks go on:

        >>> dealing = Dealing(lambda rank, size: 30 // size)
        >>> dealing.pieces([(3, 4)], rank=0, size=2)
        [(0, 4, 6), (1, 4, 3)]
        >>> dealing.pieces([(3, 4)], rank=1, size=2)
        [(1, 7, 3), (2, 4, 6)]
    """

    def __init__(self, count: Callable[[int, int], int]) -> None:
        self._count = count

    def count(self, before: Sequence[Stage], rank: int, size: int) -> int:
        """Examples that a rank of so many has after some stages, the epoch's first."""
        if not before:
            return self._count(rank, size)
        start, stop = self._bounds(sum(self._left(before)), rank, size)
        return stop - start

    def pieces(
        self, before: Sequence[Stage], rank: int, size: int
    ) -> list[tuple[int, int, int]]:
        """Which these are.

        Args:
            before: the stages, at least one.
            rank: of those that go on.
            size: how many go on.

        Returns:
            Triples of a rank of the last stage, the number of its first example that
            is taken (in the order in which it had them), and how many are.
        """
        left = self._left(before)
        start, stop = self._bounds(sum(left), rank, size)
        _, taken = before[-1]
        found, begin = [], 0
        for old_rank, count in enumerate(left):
            first, last = max(start, begin), min(stop, begin + count)
            if first < last:
                found.append((old_rank, taken + first - begin, last - first))
            begin += count
        return found

    def _left(self, before: Sequence[Stage]) -> list[int]:
        *earlier, (size, taken) = before
        counts = [self.count(earlier, rank, size) for rank in range(size)]
        return [max(count - taken, 0) for count in counts]

    def _bounds(self, total: int, rank: int, size: int) -> tuple[int, int]:
        return rank * total // size, (rank + 1) * total // size
