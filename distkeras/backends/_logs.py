"""What a step has logged, beside the number of examples that it is of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Logs(dict[str, Any]):
    """The logs of a step, as Keras' loops take them.

    Args:
        logs: by name.
        examples: this rank's in that step, a number or a scalar tensor.
    """

    def __init__(self, logs: Mapping[str, Any], examples: Any) -> None:
        super().__init__(logs)
        self.examples = examples
