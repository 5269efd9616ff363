"""Settings left over from Horovod: none has an effect here, and that is said once."""

from __future__ import annotations

from collections.abc import Mapping

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
