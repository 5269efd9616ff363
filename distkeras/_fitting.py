"""Runs one call of `Trainer.fit`: from its arguments to Keras' own loop."""

from __future__ import annotations

import contextlib
import random
import weakref
from collections.abc import Sequence
from typing import Any

import keras

from distkeras import _alone
from distkeras import data as data_
from distkeras._beginning import begin
from distkeras._calls import agree_on_call
from distkeras._commits import Commits
from distkeras._csv_logs import gone_on_with
from distkeras._elastic import check_can_be_shared_out_anew
from distkeras._fit_arguments import FitArguments
from distkeras._learning_rate import warms_up
from distkeras._own_training import by_trainer
from distkeras._report import Report
from distkeras._resume import Continuation
from distkeras._resumption import find_checkpoint
from distkeras._scaling import Scaled
from distkeras._scaling import Scaling
from distkeras._session import Session
from distkeras.callbacks._learning_rate import LearningRateWarmup
from distkeras.communicators import Communicator

# Of each model: while the generator stands still they tell one order from the next.
_fits: weakref.WeakKeyDictionary[keras.Model, int] = weakref.WeakKeyDictionary()


def fit(
    given: FitArguments,
    session: Session,
    *,
    scaling: Scaling,
    seed: int | None,
    report: Report,
    commits: Commits | None,
) -> keras.callbacks.History:
    """Trains; collective.

    Args:
        given: the arguments of `Trainer.fit`.
        session: of the model and the ranks.
        scaling: of learning rates.
        seed: of the order of the data; None draws one.
        report: of what is decided.
        commits: where the steps of an elastic job are committed; None in others.

    Returns:
        The history.
    """
    model, ranks = session.model, session.communicator
    _forget_failure(model)
    alone = ranks.size == 1
    checkpoint = find_checkpoint(given.callbacks)
    plain = alone and not (given.resume is not None or checkpoint or commits)
    if alone:
        report.of_one(session, plain=plain)
    if plain:
        kept = _alone.keeping_figures(model, given.callbacks)
        with by_trainer(model), kept as callbacks:
            return model.fit(**{**given.for_keras(), "callbacks": callbacks})
    options = {**given.to_agree_on(), "warmup_epochs": scaling.warmup_epochs}
    agree_on_call("fit", session, given.callbacks, options)
    beginning = begin(given, session, scaling, commits)
    given, found = beginning.given.split(), beginning.found
    data = _training_data(
        given, ranks, _drawn(seed, session) if found is None else found.seed
    )
    validation = _validation_data(given, ranks, data)
    _check_validation(given)
    if commits is not None:
        check_can_be_shared_out_anew(
            data, validation, given.callbacks, given.steps_per_epoch
        )
    with session.exchanging_alone():
        session.build(data)
        scaled = scaling.apply(model, beginning.factor, given.steps_of_epoch(data))
        _prepare_warm_ups(session, given.callbacks, given.steps_of_epoch(data))
        going_on = Continuation(
            model, data, ranks, given.callbacks, found, given.steps_per_epoch, commits
        )
        training = _training(given, session, data, going_on, scaled, report)
        logs = {} if found is None else found.logs
        whole_logs = gone_on_with(logs, given.callbacks, ranks.rank)
        with whole_logs, by_trainer(model), training as callbacks:
            history = _loop(given, session, data, validation, going_on, callbacks)
    return history if commits is None else commits.whole(history)


def _forget_failure(model: keras.Model) -> None:
    """Clears what Keras keeps of a `fit` that ended by an error, and would use again.

    The data to validate on, and the epoch to begin with that `BackupAndRestore` sets.
    """
    model._eval_epoch_iterator = None
    model._initial_epoch = None


def _training_data(given: FitArguments, ranks: Communicator, seed: int) -> Any:
    """Returns this rank's part of the training data; collective."""
    data = data_.shard(
        given.x,
        given.y,
        given.sample_weight,
        communicator=ranks,
        batch_size=given.batch_size,
        global_batch_size=given.global_batch_size,
        shuffle=given.shuffle,
        class_weight=given.class_weight,
        steps_per_epoch=given.steps_per_epoch,
        seed=seed,
        training=True,
        shard=given.shard,
    )
    data.ends = ranks.size == 1
    several = given.epochs > given.initial_epoch + 1
    if data.single_pass and given.steps_per_epoch is None and several:
        raise ValueError(
            "Expected `steps_per_epoch` with a generator and several epochs: it "
            "cannot be started again, and would all be used up in the first. "
            f"Received: epochs={given.epochs}, initial_epoch={given.initial_epoch}, "
            "steps_per_epoch=None. Or pass a keras.utils.PyDataset or a "
            "tf.data.Dataset."
        )
    return data


def _validation_data(given: FitArguments, ranks: Communicator, data: Any) -> Any:
    """Returns this rank's part of the data to validate on; collective."""
    if given.validation_data is None or ranks.size == 1:
        return given.validation_data
    return data_.shard(
        *keras.utils.unpack_x_y_sample_weight(given.validation_data),
        communicator=ranks,
        batch_size=given.validation_batch_size or data.batch_size,
        shuffle=False,
        steps_per_epoch=given.validation_steps,
        training=False,
        shard=given.shard,
    )


def _check_validation(given: FitArguments) -> None:
    """Raises before training where no epoch could be the best."""
    checkpoint = find_checkpoint(given.callbacks)
    if checkpoint is None or not checkpoint.monitors_validation:
        return
    if given.validation_data is None:
        raise ValueError(
            "Expected `validation_data` or `validation_split` with a Checkpoint that "
            "tells the best epoch by a validation. Received: neither, and "
            f"monitor={checkpoint.monitor!r}"
        )


def _prepare_warm_ups(
    session: Session,
    callbacks: Sequence[keras.callbacks.Callback],
    steps: int | None,
) -> None:
    """Lets callbacks change the optimizer before a step is taken that knows it not."""
    model, ranks = session.model, session.communicator.size
    for callback in callbacks:
        if isinstance(callback, LearningRateWarmup):
            rises = model.optimizer is not None and warms_up(model.optimizer)
            callback.prepare(model.optimizer, steps, ranks=ranks)
            if not rises:  # what Keras has traced goes on with a constant rate
                model.train_function = None


def _training(
    given: FitArguments,
    session: Session,
    data: Any,
    going_on: Continuation,
    scaled: Scaled,
    report: Report,
) -> contextlib.AbstractContextManager[list[keras.callbacks.Callback]]:
    """Returns what Keras' loop runs within; collective."""
    if session.communicator.size == 1:
        return _alone.training(session.model, data, given.callbacks, going_on=going_on)
    session.prepare(data, given.callbacks)
    report.of_several(session, data, scaled)
    bar = session.communicator.broadcast_object(given.verbose in ("auto", 1))
    steps = given.steps_of_epoch(data)
    return session.training(
        data, given.callbacks, bar=bar, steps=steps, going_on=going_on
    )


def _loop(
    given: FitArguments,
    session: Session,
    data: Any,
    validation: Any,
    going_on: Continuation,
    callbacks: list[keras.callbacks.Callback],
) -> keras.callbacks.History:
    """Runs Keras' loop over epochs and steps."""
    verbose = given.verbose if session.communicator.rank == 0 else 0
    options = {}
    if session.communicator.size == 1:  # Keras itself deals the data to validate on
        options = {
            "validation_steps": given.validation_steps,
            "validation_batch_size": given.validation_batch_size or data.batch_size,
        }
    return session.model.fit(
        data,
        epochs=given.epochs,
        verbose=verbose,
        callbacks=going_on.arranged(
            callbacks,
            verbose=verbose,
            epochs=given.epochs,
            steps=given.steps_of_epoch(data),
        ),
        validation_data=validation,
        shuffle=False,
        initial_epoch=given.initial_epoch,
        steps_per_epoch=given.steps_per_epoch,
        validation_freq=given.validation_freq,
        **options,
    )


def _drawn(seed: int | None, session: Session) -> int:
    """Returns the seed that rank 0 has chosen or drawn; collective.

    Nothing is taken from the generator of Python: with one process nothing is, and
    what a seeded script draws next, initial weights perhaps, should be the same.
    """
    count = _fits[session.model] = _fits.get(session.model, -1) + 1
    drawn = random.Random(repr((random.getstate(), count))).getrandbits(32)
    return session.communicator.broadcast_object(drawn if seed is None else seed)
