"""Agreement among ranks: the same error everywhere instead of a hang."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import TypeVar

from distkeras._errors import CommunicatorError
from distkeras._errors import DistkerasError
from distkeras._errors import MismatchError
from distkeras.communicators._base import Communicator

Result = TypeVar("Result")

_ABSENT = "(nothing)"


def agree(communicator: Communicator, what: str, rows: Sequence[str]) -> None:
    """Raises the same error on every rank unless all ranks hold the same rows.

    One small message when they agree, which is the common case: a digest. Only
    after a difference do the rows travel.

    Args:
        communicator: the ranks that must agree; all of them call this.
        what: what the rows are, for the message ("variables of the model").
        rows: one readable line an item, in an order that is the same on every
            rank ("dense/kernel: float32 (784, 128)").

    Raises:
        MismatchError: on every rank, naming the first row that differs, which
            ranks hold what, and what to do.

    Example:
        >>> from distkeras.communicators import SingleCommunicator
        >>> agree(SingleCommunicator(), "options", ["op=sum", "dtype=float32"])
    """
    rows = [str(row) for row in rows]
    digest = hashlib.blake2b(digest_size=16)
    for row in [what, *rows]:
        data = row.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    digests = communicator.allgather_object(digest.digest())
    if len(set(digests)) > 1:
        everyone = communicator.allgather_object((what, rows))
        subjects = [subject for subject, _ in everyone]
        if len(set(subjects)) > 1:
            raise MismatchError(
                _difference("what is to be agreed on", [[s] for s in subjects])
            )
        raise MismatchError(_difference(what, [rows for _, rows in everyone]))


def _difference(what: str, tables: Sequence[Sequence[str]]) -> str:
    """Describes the first row in which the ranks' tables differ."""
    length = max(len(table) for table in tables)
    for index in range(length):
        held: dict[str, list[int]] = {}
        for rank, table in enumerate(tables):
            row = table[index] if index < len(table) else _ABSENT
            held.setdefault(row, []).append(rank)
        if len(held) > 1:
            break
    lines = [f"  {name_ranks(ranks)}: {row}" for row, ranks in held.items()]
    counts = {len(table) for table in tables}
    entries = f"entry {index + 1} of {length}"
    if len(counts) > 1:
        by_rank = ", ".join(str(len(table)) for table in tables)
        entries += f" (the ranks have {by_rank} entries)"
    return "\n".join(
        [
            f"Expected {what} to be the same on all {len(tables)} ranks. "
            f"The first difference is {entries}:",
            *lines,
            "Make every rank run the same code with the same arguments; what depends "
            "on the rank must not change this.",
        ]
    )


def name_ranks(ranks: Sequence[int]) -> str:
    """Returns the ranks in words, runs of numbers shortened.

    Example:
        >>> name_ranks([0, 1, 2, 5])
        'ranks 0-2, 5'
        >>> name_ranks([3])
        'rank 3'
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [
        str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}-{b}" for a, b in runs
    ]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(words)}"


def collectively(
    communicator: Communicator,
    function: Callable[..., Result],
    *args: Any,
    what: str | None = None,
    advice: str | None = None,
    error: type[DistkerasError] = CommunicatorError,
) -> Result:
    """Runs a local function on every rank; if it raises on one, raises on all.

    For work that may fail on some ranks only (reading a file, looking at a GPU)
    before all ranks go on together.

    Args:
        communicator: the ranks; all of them call this.
        function: what to run. It must not use a collective itself: a rank on
            which it fails would leave the others waiting in it.
        *args: its arguments.
        what: what it does, in words that follow "Expected" ("reading the file"); by
            default the function's name, which should be of that kind.
        advice: what to do if it fails, as a sentence.
        error: what to raise.

    Returns:
        What the function returned on this rank.

    Raises:
        CommunicatorError: or `error`, on every rank, saying what was expected, naming
            each rank that failed and its error, and what to do. On those ranks the
            original error is the cause.

    Example:
        >>> from distkeras.communicators import SingleCommunicator
        >>> collectively(SingleCommunicator(), int, "12")
        12
    """
    failure: Exception | None = None
    text: str | None = None
    try:
        result = function(*args)
    except Exception as own:
        failure = own
        text = f"{type(own).__name__}: {own}"
    failures = {
        rank: theirs
        for rank, theirs in enumerate(communicator.allgather_object(text))
        if theirs is not None
    }
    if failures:
        lines = [f"  rank {rank}: {theirs}" for rank, theirs in failures.items()]
        name = getattr(function, "__name__", type(function).__name__)
        names = name_ranks(list(failures))
        rest = (
            "; the others stopped for it" if len(failures) < communicator.size else ""
        )
        message = [
            f"Expected {what or name.replace('_', ' ')} to succeed. "
            f"Received an error on {names}:",
            *lines,
            advice or f"Its own traceback is above, in what {names} wrote{rest}.",
        ]
        raise error("\n".join(message)) from failure
    return result
