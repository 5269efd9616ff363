"""How long a rank may wait for others: from the argument, or the environment."""

from __future__ import annotations

import math
import os
from typing import Any

from distkeras._errors import CommunicatorError

VARIABLE = "DISTKERAS_TIMEOUT"
DEFAULT_TIMEOUT = 600.0


def read_timeout(argument: float | None) -> float:
    """Returns the seconds a rank may wait; 0 for no limit.

    Args:
        argument: that of `init`; the environment variable counts if None.

    Raises:
        CommunicatorError: it is not a number of seconds.
    """
    word: Any = argument
    origin = "timeout"
    if argument is None:
        word = os.environ.get(VARIABLE) or DEFAULT_TIMEOUT
        origin = VARIABLE
    try:
        seconds = float(word)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise CommunicatorError(
            f"Expected {origin} to be a number of seconds, 0 for no limit. Received: "
            f"{word!r}"
        )
    return seconds
