"""Proof that replicas are replicas: exchanges are counted, weights are compared."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import keras

from distkeras._errors import MismatchError
from distkeras._errors import ReplicaDriftError
from distkeras.backends import updates
from distkeras.communicators import Communicator
from distkeras.communicators import agree
from distkeras.gradients import Counters
from distkeras.gradients import canonical_path


class ReplicaCheck(keras.callbacks.Callback):
    """Raises on every rank when an epoch ends with replicas that differ.

    Two things are compared: the number of gradient exchanges with the number of
    optimizer updates, and a digest of every trainable weight over ranks. The second
    reads each weight once an epoch and sends eight bytes a rank.

    Args:
        communicator: the ranks that must agree.
        counters: of the exchange that training uses.
        optimizers: all that update the model's weights.
    """

    def __init__(
        self,
        communicator: Communicator,
        counters: Counters,
        optimizers: Iterable[keras.optimizers.Optimizer],
    ) -> None:
        super().__init__()
        self._communicator = communicator
        self._counters = counters
        self._optimizers = list(optimizers)
        self._start = (0, 0)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes where the counters stand."""
        self._start = self._now()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Compares.

        Raises:
            ReplicaDriftError: on every rank, saying what differs.
        """
        exchanges, made = (
            now - before for now, before in zip(self._now(), self._start, strict=True)
        )
        counts = self._communicator.allgather_object((exchanges, made))
        for rank, (exchanged, updated) in enumerate(counts):
            if exchanged < updated:
                raise ReplicaDriftError(
                    f"Expected one gradient exchange for each optimizer update of "
                    f"epoch {epoch + 1}. Received on rank {rank}: {exchanged} "
                    f"exchanges for {updated} updates. Does `train_step` change "
                    "weights without an optimizer that the model holds as an "
                    "attribute? Wrap that optimizer in "
                    "`distkeras.DistributedOptimizer`."
                )
        self._compare(f"after epoch {epoch + 1}")

    def _now(self) -> tuple[int, int]:
        return self._counters.exchanges, sum(map(updates, self._optimizers))

    def _compare(self, when: str) -> None:
        rows = weight_digests(self.model.trainable_variables)
        try:
            agree(self._communicator, f"the trainable weights {when}", rows)
        except MismatchError as error:
            raise ReplicaDriftError(
                f"Expected bit-equal trainable weights on all ranks {when}. "
                f"Received: {error}\nSome weights were changed on one rank only, or "
                "otherwise than on the others: by a `train_step` or callback that "
                "bypasses the exchange, by an optimizer or a layer that is set up "
                "otherwise there (momentum, decay), or by an operation whose result "
                "differs from rank to rank. "
                "`Trainer(check_replicas=False)` turns this check off."
            ) from error


def weight_digests(variables: Iterable[Any]) -> list[str]:
    """Returns one line a variable: number, path, and a 64-bit digest of its bytes."""
    rows = []
    for number, variable in enumerate(variables):
        value = keras.ops.convert_to_numpy(variable.value)
        digest = hashlib.blake2b(value.tobytes(), digest_size=8).hexdigest()
        rows.append(f"{number} {canonical_path(variable)}: digest {digest}")
    return rows
