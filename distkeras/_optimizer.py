"""`DistributedOptimizer`: an optimizer that exchanges gradients in `apply`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
from keras.src.saving import object_registration

from distkeras import _horovod
from distkeras import backends
from distkeras.communicators import Communicator
from distkeras.communicators import world
from distkeras.gradients import Compression
from distkeras.gradients import GradientExchange
from distkeras.gradients import make_wire

_EXCHANGE = "_distkeras_exchange"


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

    For training loops of one's own; `Trainer` needs no wrapped optimizer. Gradients
    are exchanged before clipping and, with `gradient_accumulation_steps`, once an
    update. Every rank counts alike, whatever its batch size. The learning rate is
    left as it is.

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
        ValueError: if an option has no meaning.
        MismatchError: by `apply`, on every rank, if gradients differ over ranks in
            number, order, shape or dtype. From within a `tf.function` TensorFlow
            raises an error of its own with the same words.

    Example:
        ```python
        optimizer = distkeras.DistributedOptimizer(keras.optimizers.SGD(0.1))
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
        return optimizer
    group = communicator or world()
    if group.size == 1:
        return optimizer
    exchange = GradientExchange(group, bucket_bytes=bucket_bytes, wire=wire)
    object.__setattr__(optimizer, _EXCHANGE, backends.current().exchange(exchange))
    object.__setattr__(optimizer, "__class__", _distributed_class(type(optimizer)))
    return optimizer


def is_distributed(optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether `DistributedOptimizer` has been applied."""
    return type(optimizer) in _DISTRIBUTED.values()


def undistribute(optimizer: keras.optimizers.Optimizer) -> None:
    """Takes `DistributedOptimizer` back, on wrapped optimizers too."""
    parts = [optimizer, getattr(optimizer, "inner_optimizer", None)]
    for part in filter(None, parts):
        if is_distributed(part):
            getattr(part, _EXCHANGE).exchange.close()
            object.__setattr__(part, "__class__", type(part).__mro__[1])
            object.__delattr__(part, _EXCHANGE)


_DISTRIBUTED: dict[type, type] = {}


def _distributed_class(base: Any) -> type:
    """Returns a subclass of `base` that exchanges, and is saved as `base`."""
    if base in _DISTRIBUTED:
        return _DISTRIBUTED[base]

    def apply(self: Any, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        variables = trainable_variables
        variables = self._trainable_variables if variables is None else variables
        getattr(self, _EXCHANGE).apply(
            functools.partial(base.apply, self), self, list(grads), list(variables)
        )

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        # Keras copies by saving and loading, which gives the stock class back.
        make, arguments, *_ = self.__reduce__()
        duplicate = make(*arguments)
        object.__setattr__(duplicate, _EXCHANGE, getattr(self, _EXCHANGE))
        object.__setattr__(duplicate, "__class__", type(self))
        memo[id(self)] = duplicate
        return duplicate

    public = base in _keras_names()
    derived = type(
        base.__name__,
        (base,),
        {
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


def _keras_names() -> dict[type, str]:
    from keras.src.api_export import REGISTERED_OBJS_TO_NAMES

    return REGISTERED_OBJS_TO_NAMES
