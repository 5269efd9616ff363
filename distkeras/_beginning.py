"""Where a `fit` begins: anew, at a checkpoint, or at the last step of more ranks."""

from __future__ import annotations

import dataclasses

from distkeras import data as data_
from distkeras._commits import Commits
from distkeras._fit_arguments import FitArguments
from distkeras._resumption import Resumption
from distkeras._resumption import find
from distkeras._resumption import find_checkpoint
from distkeras._scaling import Scaling
from distkeras._session import Session


@dataclasses.dataclass(frozen=True)
class Beginning:
    """What to train from.

    Attributes:
        given: the arguments of `fit`, with the batch size and the epochs that what was
            found asks for.
        found: a checkpoint or commit to go on from, or None.
        factor: what learning rates are multiplied by.
    """

    given: FitArguments
    found: Resumption | None
    factor: float


def begin(
    given: FitArguments, session: Session, scaling: Scaling, commits: Commits | None
) -> Beginning:
    """Finds where to begin; collective.

    Args:
        given: the arguments of `fit`.
        session: of the model and the ranks.
        scaling: of learning rates.
        commits: of an elastic job, which may have lost ranks; else None.
    """
    found = None
    if commits is not None:
        found = commits.resumption(
            session.model, session.communicator, resized=given.resized
        )
    if found is None:
        found = find(
            given.resume,
            find_checkpoint(given.callbacks),
            session.communicator,
            resized=given.resized,
        )
    size = session.communicator.size
    if found is not None:
        kept = found.kept_factor
        factor = scaling.factor(size) if kept is None else kept
        return Beginning(_gone_on_with(given, found), found, factor)
    before = 0 if commits is None else commits.ranks_before(size)
    by_sample = data_.are_arrays(given.x, given.y, given.sample_weight)
    if before and by_sample and given.resized == "keep_global_batch":
        return Beginning(_as_with(before, given), None, scaling.factor(before))
    return Beginning(given, None, scaling.factor(size))


def _gone_on_with(given: FitArguments, found: Resumption) -> FitArguments:
    """Returns the arguments for going on from what was found."""
    position = found.position
    over = found.stop and position.step == 0
    given = dataclasses.replace(
        given,
        initial_epoch=position.epoch,
        epochs=position.epoch if over else given.epochs,
    )
    batch = found.kept_global_batch
    if batch is None:
        return given
    return dataclasses.replace(given, batch_size=None, global_batch_size=batch)


def _as_with(ranks: int, given: FitArguments) -> FitArguments:
    """Returns the arguments with the global batch that so many ranks would have."""
    of_steps = given.steps_per_epoch is not None and given.batch_size is None
    if given.global_batch_size is not None or of_steps:  # however many they are
        return given
    batch = (given.batch_size or 32) * ranks
    return dataclasses.replace(given, batch_size=None, global_batch_size=batch)
