"""The exceptions distkeras raises on purpose, the same on every rank."""


class DistkerasError(Exception):
    """Base of all errors that are specific to distkeras."""


class CommunicatorError(DistkerasError, RuntimeError):
    """A communicator cannot be had, or was used wrongly."""


class MismatchError(DistkerasError, ValueError):
    """Ranks that must agree (on shapes, dtypes, counts, options) do not."""


class ReplicaDriftError(DistkerasError, RuntimeError):
    """Gradients were not exchanged, or replicas no longer hold equal weights."""


class RankError(DistkerasError, RuntimeError):
    """A rank that `distkeras.run` started failed, by other means than an exception.

    Or by an exception that cannot be raised here as itself: then its text says which.
    """


class CheckpointError(DistkerasError, RuntimeError):
    """A checkpoint cannot be written, or none can be read."""
