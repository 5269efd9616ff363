"""`DistributedOptimizer`: an optimizer that exchanges gradients in `apply`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
from keras.src.saving import object_registration

from distkeras import _horovod
from distkeras import backends
from distkeras._errors import MismatchError
from distkeras._replicas import weight_digests
from distkeras.communicators import Communicator
from distkeras.communicators import agree
from distkeras.communicators import world
from distkeras.gradients import Compression
from distkeras.gradients import GradientExchange
from distkeras.gradients import make_wire

_EXCHANGE = "_distkeras_exchange"
# Whether all ranks were seen to begin with the same weights.
_BEGUN = "_distkeras_begun"


@_horovod.explains_arguments(_horovod.OPTIMIZER_ARGUMENTS)
def DistributedOptimizer(  # noqa: N802  # the name that Horovod's users look for
    optimizer: keras.optimizers.Optimizer,
    *,
    communicator: Communicator | None = None,
    bucket_bytes: int | None = None,
    compression: Compression | None = None,
    error_feedback: bool = False,
) -> keras.optimizers.Optimizer:
    """Makes an optimizer average gradients over ranks before it applies them.

    For training loops of one's own; `Trainer` needs no wrapped optimizer, and exchanges
    in place of one while it trains. Gradients are exchanged before clipping and, with
    `gradient_accumulation_steps`, once an update. Every rank counts alike, whatever its
    batch size. The learning rate is left as it is.

    The optimizer is changed in place and stays an instance of its class: what is
    saved with it is an ordinary Keras file.

    Args:
        optimizer: any Keras optimizer; under mixed_float16 the outermost one, thus
            `DistributedOptimizer(keras.optimizers.LossScaleOptimizer(inner))`.
        communicator: the ranks to average over; by default all of them.
        bucket_bytes: gradients are fused into buffers of at most so many bytes; None
            chooses by a short measurement of the network, and logs what it chose.
        compression: of gradients on the wire, as for `Trainer`.
        error_feedback: as for `Trainer`.

    Returns:
        `optimizer` itself. At world size 1 nothing about it has changed.

    Raises:
        TypeError: if `optimizer` is not a Keras optimizer.
        ValueError: if an option has no meaning, or comes too late; by `apply`, if XLA
            compiles the step or another optimizer scales the loss around this one.
        MismatchError: by `apply`, on every rank, if gradients differ over ranks in
            number, order, shape or dtype, or the weights do in the first step. From
            within a `tf.function` TensorFlow raises an error of its own with the
            same words.

    Example:
        ```python
        optimizer = distkeras.DistributedOptimizer(keras.optimizers.SGD(0.1))
        optimizer.build(model.trainable_variables)
        distkeras.callbacks.broadcast_variables(
            [*model.variables, *optimizer.variables]
        )
        for x, y in batches:  # this rank's
            with tf.GradientTape() as tape:
                loss = loss_fn(y, model(x, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        ```
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            "Expected a Keras optimizer, such as `keras.optimizers.SGD(0.1)`. "
            f"Received: optimizer={optimizer!r} of type {type(optimizer).__name__}"
        )
    wire = make_wire(compression, error_feedback=error_feedback)
    if is_distributed(optimizer):
        _refuse_late_options(
            communicator=communicator,
            bucket_bytes=bucket_bytes,
            compression=compression,
            error_feedback=error_feedback,
        )
        return optimizer
    group = communicator or world()
    if group.size == 1:
        return optimizer
    exchange = GradientExchange(group, bucket_bytes=bucket_bytes, wire=wire)
    object.__setattr__(optimizer, _EXCHANGE, backends.current().exchange(exchange))
    object.__setattr__(optimizer, _BEGUN, False)
    object.__setattr__(optimizer, "__class__", _distributed_class(type(optimizer)))
    return optimizer


def is_distributed(optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether `DistributedOptimizer` has been applied."""
    return type(optimizer) in _DISTRIBUTED.values()


@contextlib.contextmanager
def undistributed(
    optimizers: Iterable[keras.optimizers.Optimizer],
) -> Iterator[None]:
    """While inside, optimizers exchange nothing, nor do those that they wrap.

    Afterwards they exchange as before: what they do so by is kept.

    Args:
        optimizers: distributed or not.
    """
    taken: dict[keras.optimizers.Optimizer, type] = {}
    for optimizer in optimizers:
        inner = getattr(optimizer, "inner_optimizer", None)
        parts = [optimizer, inner, *backends.inner_optimizers(optimizer)]
        for part in parts:
            if part is not None and is_distributed(part):
                taken[part] = type(part)
                object.__setattr__(part, "__class__", type(part).__mro__[1])
    try:
        yield
    finally:
        for part, kind in taken.items():
            object.__setattr__(part, "__class__", kind)


def _refuse_late_options(**options: Any) -> None:
    given = ", ".join(
        f"{name}={value!r}"
        for name, value in options.items()
        if value is not None and value is not False
    )
    if given:
        raise ValueError(
            "Expected no options for an optimizer that is distributed already: its "
            f"exchange is made. Received: {given}. Give them when it is distributed "
            "first; instead of `distkeras.load_model`, which does so, call "
            "`keras.models.load_model`."
        )


_DISTRIBUTED: dict[type, type] = {}


def _distributed_class(base: Any) -> type:
    """Returns a subclass of `base` that exchanges, and is saved as `base`."""
    if base in _DISTRIBUTED:
        return _DISTRIBUTED[base]

    def apply(self: Any, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        variables = trainable_variables
        variables = self._trainable_variables if variables is None else variables
        _check_that_it_is_outermost(self)

        def update(grads: list[Any], variables: Sequence[Any]) -> None:
            _check_that_ranks_begin_alike(self, variables)
            base.apply(self, grads, variables)

        getattr(self, _EXCHANGE).apply(update, self, list(grads), list(variables))

    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
        # Also for `from_config`: what this class makes anew has no exchange, and is
        # an optimizer of the user's class.
        return base(*args, **kwargs)

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        # Keras copies by saving and loading, which gives the stock class back.
        make, arguments, *_ = self.__reduce__()
        duplicate = make(*arguments)
        for name in (_EXCHANGE, _BEGUN):
            object.__setattr__(duplicate, name, getattr(self, name))
        object.__setattr__(duplicate, "__class__", type(self))
        memo[id(self)] = duplicate
        return duplicate

    public = base in _keras_names()
    derived = type(
        base.__name__,
        (base,),
        {
            "__new__": __new__,
            "apply": apply,
            "__deepcopy__": __deepcopy__,
            "__doc__": base.__doc__,
            "__module__": "keras.optimizers" if public else base.__module__,
            "__qualname__": base.__qualname__,
        },
    )
    registered = object_registration.GLOBAL_CUSTOM_NAMES.get(base)
    if registered is not None:
        object_registration.GLOBAL_CUSTOM_NAMES[derived] = registered
    _DISTRIBUTED[base] = derived
    return derived


def _check_that_it_is_outermost(optimizer: keras.optimizers.Optimizer) -> None:
    """Raises where a rank may skip the exchange because its gradients overflow."""
    if backends.under_loss_scaling():
        name = type(optimizer).__name__
        raise ValueError(
            "Expected the outermost optimizer to be the distributed one. Received: a "
            f"distributed {name} inside of a LossScaleOptimizer, which leaves {name} "
            "out on a rank whose gradients are not finite, and with it the exchange. "
            "Under mixed_float16 `compile` wraps an optimizer so by itself. Write "
            "`distkeras.DistributedOptimizer(keras.optimizers.LossScaleOptimizer("
            f"keras.optimizers.{name}(...)))`, or train by `distkeras.Trainer(model)`."
        )


def _check_that_ranks_begin_alike(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[Any]
) -> None:
    """Raises on every rank, in the first step, if ranks begin with other weights.

    The gradients have been agreed on by then. Collective, as a first step is.
    """
    if getattr(optimizer, _BEGUN):
        return
    exchange = getattr(optimizer, _EXCHANGE)
    with exchange.before_the_step():
        rows = weight_digests(variables)
    try:
        agree(exchange.exchange.communicator, "the trainable weights", rows)
    except MismatchError as error:
        raise MismatchError(
            "Expected bit-equal trainable weights on all ranks before the first step. "
            f"Received: {error}\nOnce the model is built, and before the first step, "
            "call `optimizer.build(model.trainable_variables)` and "
            "`distkeras.callbacks.broadcast_variables([*model.variables, "
            "*optimizer.variables])`."
        ) from error
    object.__setattr__(optimizer, _BEGUN, True)


def _keras_names() -> dict[type, str]:
    from keras.src.api_export import REGISTERED_OBJS_TO_NAMES

    return REGISTERED_OBJS_TO_NAMES
