"""What is left over from Horovod in a job or a script, and what to write instead.

Environment variables have no effect here, and that is said once. An argument that does
not exist here is an error that says what does the same.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any
from typing import TypeVar
from typing import cast

from distkeras import _logging
from distkeras._launcher import Launcher

# What does instead what a variable did, for those that people set.
_INSTEAD = {
    "HOROVOD_AUTOTUNE": "there is nothing to tune: the order of buckets is fixed",
    "HOROVOD_CACHE_CAPACITY": "ranks do not negotiate",
    "HOROVOD_CYCLE_TIME": "ranks do not negotiate, nothing waits for a cycle",
    "HOROVOD_ELASTIC": "distkeras run --elastic",
    "HOROVOD_FUSION_THRESHOLD": "Trainer(model, bucket_bytes=...)",
    "HOROVOD_GPU_ALLREDUCE": "DISTKERAS_COMMUNICATOR",
    "HOROVOD_GPU_OPERATIONS": "DISTKERAS_COMMUNICATOR",
    "HOROVOD_CPU_OPERATIONS": "DISTKERAS_COMMUNICATOR",
    "HOROVOD_CONTROLLER": "DISTKERAS_COMMUNICATOR",
    "HOROVOD_HIERARCHICAL_ALLGATHER": "DISTKERAS_COMMUNICATOR",
    "HOROVOD_HIERARCHICAL_ALLREDUCE": "DISTKERAS_COMMUNICATOR",
    "HOROVOD_LOG_LEVEL": "logging.getLogger('distkeras').setLevel(...)",
    "HOROVOD_STALL_CHECK_DISABLE": "DISTKERAS_TIMEOUT",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "DISTKERAS_TIMEOUT",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "DISTKERAS_TIMEOUT",
    "HOROVOD_TIMELINE": "Trainer(model, timeline='trace.json')",
}

# What does instead what an argument did, in Horovod's order.
OPTIMIZER_ARGUMENTS = {
    "name": "leave it out",
    "device_dense": "leave it out",
    "device_sparse": "leave it out",
    "sparse_as_dense": "leave it out, gradients of embeddings stay sparse",
    "gradient_predivide_factor": "leave it out, gradients are averaged",
    "op": "leave it out, gradients are averaged; there is no Adasum",
    "backward_passes_per_step": "`gradient_accumulation_steps` of the Keras optimizer",
    "average_aggregated_gradients": "leave it out, it is always so",
    "num_groups": "bucket_bytes=...",
    "groups": "bucket_bytes=...",
    "process_set": "communicator=...",
    "scale_local_gradients": "leave it out",
}
WARMUP_ARGUMENTS = {
    "initial_lr": "the optimizer's own rate, `SGD(0.1 * distkeras.size())`",
    "momentum_correction": "leave it out, there is none",
}
SCHEDULE_ARGUMENTS = {
    "initial_lr": "the optimizer's own rate, or initial_learning_rate=...",
    "momentum_correction": "leave it out, there is none",
}

_Function = TypeVar("_Function", bound=Callable[..., Any])


def explains_arguments(instead: Mapping[str, str]) -> Callable[[_Function], _Function]:
    """Makes a function say what to write for those arguments of Horovod's it lacks.

    Args:
        instead: what to write, by argument, in Horovod's order.

    Returns:
        A decorator. The function raises TypeError for arguments it does not have, and
        explains those of `instead`; the first of them where too many came by position.
    """

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                names = [name for name in instead if name in kwargs]
                if str(error) == "too many positional arguments":
                    names = [next(iter(instead)), *names]
                if names:
                    lines = [f"  {name}: {instead[name]}" for name in names]
                    raise TypeError(
                        f"Expected {_title(function)}{_shown(signature)}. Received: "
                        f"{error}. Instead of Horovod's\n" + "\n".join(lines)
                    ) from None
            return function(*args, **kwargs)

        return cast(_Function, call)

    return decorate


def _title(function: Callable[..., Any]) -> str:
    return function.__qualname__.removesuffix(".__init__")


def _shown(signature: inspect.Signature) -> str:
    """Returns the arguments and their defaults, as one writes them."""
    arguments = [
        argument.replace(annotation=inspect.Parameter.empty)
        for argument in signature.parameters.values()
        if argument.name != "self"
    ]
    return str(inspect.Signature(arguments))


def warn_of_ignored_variables(
    environ: Mapping[str, str], launcher: Launcher | None
) -> None:
    """Logs a warning, on rank 0, of `HOROVOD_*` variables: they have no effect.

    Args:
        environ: the environment.
        launcher: who started this process, and which rank it is.
    """
    names = sorted(name for name in environ if name.startswith("HOROVOD_"))
    if not names or (launcher is not None and launcher.rank > 0):
        return
    lines = [
        f"  {name}: {_INSTEAD[name]}" if name in _INSTEAD else f"  {name}"
        for name in names
    ]
    text = "\n".join(["These Horovod variables have no effect. Instead:", *lines])
    if "HOROVOD_RANK" in names and launcher is None:
        text += (
            "\nThis process was started by horovodrun and finds no other ranks: start "
            "the script by `distkeras run` or mpiexec."
        )
    _logging.configure(0).warning("%s", text)
