"""`Trainer`: composes broadcast, scaling, sharding, exchange and exact logs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from typing import Literal

import keras

from distkeras import _logging
from distkeras import data as data_
from distkeras._calls import agree_on_call
from distkeras._commits import Commits
from distkeras._consensus import filter_callbacks
from distkeras._elastic import survives
from distkeras._fit_arguments import FitArguments
from distkeras._fit_arguments import check_callbacks
from distkeras._fit_arguments import check_seed
from distkeras._fitting import fit
from distkeras._learning_rate import Rule
from distkeras._own_training import warn_of_own_training
from distkeras._report import Report
from distkeras._resumption import Resized
from distkeras._saves import write_whole_files
from distkeras._scaling import Scaling
from distkeras._session import Session
from distkeras.communicators import Communicator
from distkeras.communicators import collectively
from distkeras.communicators import world
from distkeras.gradients import Compression
from distkeras.gradients import GradientExchange
from distkeras.gradients import check_bucket_bytes
from distkeras.gradients import make_wire


class Trainer:
    """Trains a Keras model on all ranks as one process would.

    With one rank every method is Keras' own. With more, `fit` broadcasts rank 0's
    weights, multiplies the learning rate, deals the data over ranks, averages
    gradients by the examples behind them, and lets only rank 0 print and write. What
    it decided is logged once. The model's own `save`, `save_weights` and `export` write
    whole files from here on, also where all ranks call them; its own `fit` warns once
    that ranks do not train together.

    Args:
        model: any Keras 3 model, compiled or not. A compiled one keeps its settings.
        learning_rate_scaling: how the learning rate grows with the number of ranks N:
            `"linear"` (×N, Goyal et al. 2017, arXiv:1706.02677), `"sqrt"` (×√N,
            Krizhevsky 2014, arXiv:1404.5997), None (as it is) or a function of N that
            returns the factor. Applied once, in `fit`; one rank's is left as it is.
        warmup_epochs: epochs over which the learning rate rises from its unscaled to
            its scaled value, update by update; 0 for none.
        seed: of the order in which data is dealt, the same on all ranks. By default
            another one at every `fit` of a model, which follows from the state of
            Python's `random` on rank 0: `keras.utils.set_random_seed` repeats it.
        bucket_bytes: gradients are fused into buffers of at most so many bytes; None
            chooses by a short measurement of the network, and logs what it chose.
        compression: `"float16"` or `"bfloat16"` lets float32 gradients travel in half
            the bytes, summed in float32; for slow networks, at the price of rounding.
        error_feedback: with `compression`, whether each rank adds what rounding took
            from its gradients to its next ones (arXiv:1901.09847).
        check_replicas: whether every epoch ends with a proof that gradients were
            exchanged and weights are bit-equal on all ranks.
        timeline: path of a file that rank 0 writes at the end of each `fit`: a trace
            of where all ranks' time went, which opens in Perfetto
            (https://ui.perfetto.dev). Traced steps take a little longer.
        communicator: the ranks to train on; by default all of them.

    Raises:
        TypeError: if `model` is not a Keras model.
        ValueError: if an option has no meaning.

    Example:
        ```python
        trainer = distkeras.Trainer(model)
        trainer.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
        trainer.fit(x, y, batch_size=64, epochs=90)
        ```
    """

    def __init__(
        self,
        model: keras.Model,
        *,
        learning_rate_scaling: Rule = "linear",
        warmup_epochs: float = 0,
        seed: int | None = None,
        bucket_bytes: int | None = None,
        compression: Compression | None = None,
        error_feedback: bool = False,
        check_replicas: bool = True,
        timeline: str | os.PathLike[str] | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        if not isinstance(model, keras.Model):
            raise TypeError(
                "Expected a Keras model (`keras.Model`). Received: "
                f"model={model!r} of type {type(model).__name__}"
            )
        make_wire(compression, error_feedback=error_feedback)  # raises early
        check_bucket_bytes(bucket_bytes)
        self.model = model
        self._of_world = communicator is None
        self.communicator = communicator or world()
        self._commits: Commits | None = None
        self.learning_rate_scaling = learning_rate_scaling
        self.warmup_epochs = warmup_epochs
        scaling = Scaling(learning_rate_scaling, warmup_epochs)
        scaling.factor(self.communicator.size)  # raises early
        check_seed(seed)
        self._seed = seed
        self._session = Session(
            model,
            self.communicator,
            bucket_bytes=bucket_bytes,
            compression=compression,
            error_feedback=error_feedback,
            check_replicas=check_replicas,
            timeline=timeline,
        )
        if self.communicator.size > 1:
            write_whole_files(model)
            warn_of_own_training(model, self.communicator)
        self._report = Report(_logging.configure(self.communicator.rank))

    @property
    def exchange(self) -> GradientExchange | None:
        """The exchange of the newest `fit`, with its counters; None before."""
        functions = self._session.functions
        return functions.exchange if functions else None

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the model, as `keras.Model.compile` does.

        Every rank must compile alike. The learning rate is that of a single process:
        `fit` scales it.

        Args:
            *args: arguments of `keras.Model.compile`: optimizer, loss, ...
            **kwargs: those by name.

        Raises:
            ValueError: as Keras does, if an argument has no meaning.

        Example:
            ```python
            trainer.compile(optimizer="adam", loss="mse", metrics=["mae"])
            ```
        """
        self.model.compile(*args, **kwargs)

    @survives
    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: str | int = "auto",
        callbacks: Sequence[keras.callbacks.Callback] | None = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool | Literal["batch"] = True,
        class_weight: dict[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Sequence[int] = 1,
        *,
        global_batch_size: int | None = None,
        shard: bool | Literal["auto"] = "auto",
        resume: str | os.PathLike[str] | None = None,
        resized: Resized = "keep_global_batch",
    ) -> keras.callbacks.History:
        """Trains the model; the arguments of `keras.Model.fit` keep their meaning.

        They describe the whole job's data: every rank is called with the same, and
        the data is dealt over ranks so that each sample is seen once an epoch.

        Args:
            x: input data, of any kind that Keras takes.
            y: targets, where `x` does not bring them.
            batch_size: examples a step **on each rank**; 32 by default.
            epochs: number of the epoch after the last one.
            verbose: as in Keras, for rank 0; other ranks are silent.
            callbacks: Keras callbacks. Those that write files act on rank 0 alone.
            validation_split: fraction of the samples, the last ones, to validate on.
            validation_data: to validate on, on all ranks together.
            shuffle: whether to deal another permutation every epoch.
            class_weight: weight by class label.
            sample_weight: weight by sample.
            initial_epoch: number of the first epoch.
            steps_per_epoch: steps, the same on every rank, that make an epoch.
            validation_steps: validation steps on each rank; all ranks together use
                so many times N batches of the validation data.
            validation_batch_size: examples a validation step on each rank.
            validation_freq: epochs between validations, or which epochs.
            global_batch_size: examples a step on all ranks together, instead of
                `batch_size`.
            shard: `"auto"` or True deals the data over ranks; False takes `x` and the
                validation data to be this rank's own part already.
            resume: where to go on from: `"auto"` for the newest checkpoint of the
                `distkeras.callbacks.Checkpoint` among the callbacks, if it has one; or
                the path of a checkpoint, or of a folder of them. The checkpoint says
                at which epoch and step, in place of `initial_epoch`.
            resized: what to do if the checkpoint is one of another number of ranks:
                `"keep_global_batch"` and the learning rate, where the data is dealt by
                sample; or `"rescale"` both, by the number of ranks, as is done where
                the data is dealt by batch.

        Returns:
            The history: the same on all ranks, exact over the whole data. With
            `resume` it is that of the epochs that this call has been through.

        Raises:
            ValueError: if arguments contradict each other, or one has no meaning.
            TypeError: if a callback is none.
            MismatchError: on every rank, if ranks were called with different models,
                data or options.
            CommunicatorError: on every rank, if one cannot deal its data or write its
                files, or has ended; names the rank and its error.
            CheckpointError: on every rank, if there is no usable checkpoint at the
                path that `resume` names, or one cannot be written.
            ReplicaDriftError: on every rank, at the end of an epoch, if gradients
                were not exchanged or weights are no longer equal.

        Example:
            ```python
            history = trainer.fit(x, y, batch_size=64, epochs=2, validation_split=0.1)
            history.history["val_loss"][-1]
            ```
        """
        given = FitArguments(
            x=x,
            y=y,
            batch_size=batch_size,
            epochs=epochs,
            verbose=verbose,
            callbacks=filter_callbacks(callbacks, 0),
            validation_split=validation_split,
            validation_data=validation_data,
            shuffle=shuffle,
            class_weight=class_weight,
            sample_weight=sample_weight,
            initial_epoch=initial_epoch,
            steps_per_epoch=steps_per_epoch,
            validation_steps=validation_steps,
            validation_batch_size=validation_batch_size,
            validation_freq=validation_freq,
            global_batch_size=global_batch_size,
            shard=shard,
            resume=resume,
            resized=resized,
        )
        return fit(
            given,
            self._session,
            scaling=Scaling(self.learning_rate_scaling, self.warmup_epochs),
            seed=self._seed,
            report=self._report,
            commits=self._commits,
        )

    @survives
    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Sequence[keras.callbacks.Callback] | None = None,
        return_dict: bool = False,
        *,
        shard: bool | Literal["auto"] = "auto",
    ) -> Any:
        """Evaluates the model; the arguments of `keras.Model.evaluate` keep theirs.

        Each rank evaluates a part; metric states are summed, results never averaged.

        Args:
            x: input data, of any kind that Keras takes.
            y: targets, where `x` does not bring them.
            batch_size: examples a step on each rank; 32 by default.
            verbose: as in Keras, for rank 0; other ranks are silent.
            sample_weight: weight by sample.
            steps: steps on each rank to take; by default all of the data.
            callbacks: Keras callbacks.
            return_dict: whether to return results by name.
            shard: as for `fit`.

        Returns:
            What Keras returns, the same on all ranks.

        Raises:
            ValueError: if an option has no meaning.
            TypeError: if a callback is none.
            MismatchError: on every rank, if ranks were called with different models,
                data or options.
            CommunicatorError: on every rank, if one cannot deal its data, or a metric
                has no result; names the rank and its error.

        Example:
            ```python
            loss, accuracy = trainer.evaluate(x, y, batch_size=256, verbose=0)
            ```
        """
        _check_call(callbacks, shard)
        if self.communicator.size == 1:
            return self.model.evaluate(
                x,
                y,
                batch_size=batch_size,
                verbose=verbose,
                sample_weight=sample_weight,
                steps=steps,
                callbacks=callbacks,
                return_dict=return_dict,
            )
        data = self._deal(
            (x, y, sample_weight), "evaluate", callbacks, batch_size, steps, shard
        )
        with self._session.evaluating(data):
            return self.model.evaluate(
                data,
                verbose=self._verbose(verbose),
                callbacks=filter_callbacks(callbacks or [], self.communicator.rank),
                return_dict=return_dict,
            )

    @survives
    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        steps: int | None = None,
        callbacks: Sequence[keras.callbacks.Callback] | None = None,
        *,
        shard: bool | Literal["auto"] = "auto",
        gather: Literal["all", "rank0"] = "all",
    ) -> Any:
        """Predicts on all ranks together; the arguments of Keras keep their meaning.

        Args:
            x: input data, of any kind that Keras takes.
            batch_size: examples a step on each rank; 32 by default.
            verbose: as in Keras, for rank 0; other ranks are silent.
            steps: steps on each rank to take; by default all of the data.
            callbacks: Keras callbacks.
            shard: as for `fit`.
            gather: who gets the result: `"all"` ranks, or `"rank0"` alone.

        Returns:
            The predictions for the whole of `x`, in its order; None on other ranks
            when `gather="rank0"`.

        Raises:
            ValueError: if an option has no meaning.
            TypeError: if a callback is none.
            MismatchError: on every rank, if ranks were called with different models,
                data or options.
            CommunicatorError: on every rank, if one cannot deal its data; names the
                rank and its error.

        Example:
            ```python
            probabilities = trainer.predict(x, batch_size=256, gather="rank0")
            ```
        """
        _check_call(callbacks, shard)
        if gather not in ("all", "rank0"):
            raise ValueError(
                f"Expected `gather` to be 'all' or 'rank0'. Received: {gather!r}"
            )
        if self.communicator.size == 1:
            return self.model.predict(
                x,
                batch_size=batch_size,
                verbose=verbose,
                steps=steps,
                callbacks=callbacks,
            )
        data = self._deal((x,), "predict", callbacks, batch_size, steps, shard)
        with self._session.equalised(data, predicts=True):
            local = self.model.predict(
                data,
                verbose=self._verbose(verbose),
                callbacks=filter_callbacks(callbacks or [], self.communicator.rank),
            )
        return data_.gather_predictions(local, data, self.communicator, to=gather)

    @survives
    def save(self, filepath: Any, **kwargs: Any) -> None:
        """Saves the model from rank 0, as an ordinary Keras file; collective.

        The file is there when this returns, on every rank; with `model.save` every
        rank that calls it writes one. It holds the learning rate of a single process.

        Args:
            filepath: where to write; `keras.Model.save` says what it can be.
            **kwargs: further arguments of `keras.Model.save`.

        Raises:
            CommunicatorError: on every rank, if rank 0 could not write.

        Example:
            ```python
            trainer.save("model.keras")  # on all ranks, without `if rank == 0`
            ```
        """

        def saving_the_model() -> None:
            if self.communicator.rank == 0:
                self.model.save(filepath, **kwargs)

        collectively(self.communicator, saving_the_model)

    def close(self) -> None:
        """Frees the exchange's buffers and message space; collective.

        For programs that make many trainers. Without it they are freed when the job
        ends. `fit` may be called again, it makes new ones. A second call does nothing.

        Example:
            ```python
            for rate in (0.1, 0.2):
                trainer = distkeras.Trainer(build_model(rate))
                trainer.fit(x, y)
                trainer.close()
            ```
        """
        self._session.close()

    def summary(self, *args: Any, **kwargs: Any) -> None:
        """Prints `keras.Model.summary` on rank 0; nothing elsewhere.

        Not collective: any rank may call it.

        Args:
            *args: arguments of `keras.Model.summary`.
            **kwargs: those by name.

        Raises:
            ValueError: as Keras does, on rank 0, if an argument has no meaning.

        Example:
            ```python
            trainer.summary(line_length=80)
            ```
        """
        if self.communicator.rank == 0:
            self.model.summary(*args, **kwargs)

    def _follow_world(self) -> bool:
        """Takes the world's ranks, if they are others now; whether it uses them.

        They are where an elastic job has lost some.
        """
        if not self._of_world:
            return False
        before, now = self.communicator, world()
        if now is not before:
            self.communicator = now
            self._session.move(now)
            self._report = Report(_logging.LOGGER)
        return True

    def _deal(
        self,
        whole: tuple[Any, ...],
        call: str,
        callbacks: Any,
        batch_size: int | None,
        steps: int | None,
        shard: bool | Literal["auto"],
    ) -> Any:
        """Returns this rank's part of data to be gone through once; collective."""
        agree_on_call(
            call,
            self._session,
            filter_callbacks(callbacks, 0),
            {"batch_size": batch_size, "steps": steps, "shard": shard},
        )
        return data_.shard(
            *whole,
            communicator=self.communicator,
            batch_size=batch_size,
            shuffle=False,
            steps_per_epoch=steps,
            training=False,
            shard=shard,
        )

    def _verbose(self, verbose: str | int) -> str | int:
        return verbose if self.communicator.rank == 0 else 0


def _check_call(callbacks: Any, shard: Any) -> None:
    """Raises where an argument of `evaluate` or `predict` has no meaning."""
    check_callbacks(filter_callbacks(callbacks, 0))
    data_.check_shard(shard)
