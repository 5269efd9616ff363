"""Data-parallel training for Keras 3: N processes train exactly like one.

Public names are loaded on first use, so that `import distkeras` is free: it starts
no MPI, no CUDA and no TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING
from typing import Any

if TYPE_CHECKING:
    from distkeras._collectives import allgather as allgather
    from distkeras._collectives import allgather_object as allgather_object
    from distkeras._collectives import allreduce as allreduce
    from distkeras._collectives import barrier as barrier
    from distkeras._collectives import broadcast as broadcast
    from distkeras._collectives import broadcast_object as broadcast_object
    from distkeras._errors import CheckpointError as CheckpointError
    from distkeras._errors import CommunicatorError as CommunicatorError
    from distkeras._errors import DistkerasError as DistkerasError
    from distkeras._errors import MismatchError as MismatchError
    from distkeras._errors import RankError as RankError
    from distkeras._errors import ReplicaDriftError as ReplicaDriftError
    from distkeras._optimizer import DistributedOptimizer as DistributedOptimizer
    from distkeras._saving import load_model as load_model
    from distkeras._trainer import Trainer as Trainer
    from distkeras._version import __version__ as __version__
    from distkeras.communicators import init as init
    from distkeras.communicators import local_rank as local_rank
    from distkeras.communicators import local_size as local_size
    from distkeras.communicators import rank as rank
    from distkeras.communicators import size as size
    from distkeras.launch._function import RankTraceback as RankTraceback
    from distkeras.launch._function import run as run
    from distkeras.launch._mpiexec import LaunchError as LaunchError

_LOCATIONS = {
    "CheckpointError": "distkeras._errors",
    "CommunicatorError": "distkeras._errors",
    "DistkerasError": "distkeras._errors",
    "MismatchError": "distkeras._errors",
    "RankError": "distkeras._errors",
    "ReplicaDriftError": "distkeras._errors",
    "DistributedOptimizer": "distkeras._optimizer",
    "LaunchError": "distkeras.launch._mpiexec",
    "RankTraceback": "distkeras.launch._function",
    "Trainer": "distkeras._trainer",
    "__version__": "distkeras._version",
    "allgather": "distkeras._collectives",
    "allgather_object": "distkeras._collectives",
    "allreduce": "distkeras._collectives",
    "barrier": "distkeras._collectives",
    "broadcast": "distkeras._collectives",
    "broadcast_object": "distkeras._collectives",
    "init": "distkeras.communicators",
    "load_model": "distkeras._saving",
    "local_rank": "distkeras.communicators",
    "local_size": "distkeras.communicators",
    "rank": "distkeras.communicators",
    "run": "distkeras.launch._function",
    "size": "distkeras.communicators",
}
_SUBPACKAGES = ("callbacks", "communicators", "data", "recipes")

__all__ = sorted([*_LOCATIONS, *_SUBPACKAGES])


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"distkeras.{name}")
    if name in _LOCATIONS:
        return getattr(importlib.import_module(_LOCATIONS[name]), name)
    raise AttributeError(f"module 'distkeras' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
