"""The exchange of gradients in device memory: one fused tensor a bucket, by DLPack.

TensorFlow synchronises the device once for every tensor that it hands over, so each
bucket is concatenated in the graph and handed over whole. Example counts and flags
travel by a host message of a few bytes: reading them from the device would cost a
synchronisation more.

DLPack says on which GPU an array is by a number. CUDA and CuPy count all that the
process sees, TensorFlow those that it was shown (github.com/tensorflow/tensorflow,
issue 47866): a rank that sees several and has taken one says "0" and means another,
so each array is handed over under the receiver's number.

The hand-over has been run on CPU memory; with CuPy and NCCL it has not been run on a
GPU yet.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from distkeras._errors import CommunicatorError
from distkeras.backends._tensorflow_host import reduce_counts
from distkeras.gradients import Bucket
from distkeras.gradients import GradientExchange
from distkeras.gradients import Plan


class DeviceHandOver:
    """Sums flat tensors over ranks where they are, through a lasting buffer.

    Collective where the communicator connects late: then it is made to, before
    TensorFlow has taken what memory of the device there is.

    Args:
        exchange: its communicator must take arrays of `arrays`.
        arrays: the array module: CuPy, or NumPy for tensors in host memory.
    """

    def __init__(self, exchange: GradientExchange, arrays: Any = None) -> None:
        self._exchange = exchange
        self._arrays = arrays or importlib.import_module("cupy")
        communicator = exchange.communicator
        on_gpu = self._arrays is not np
        # CUDA's number of this rank's GPU.
        self._gpu = getattr(communicator, "device", None) if on_gpu else None
        connect = getattr(communicator, "connect", None) if on_gpu else None
        if connect is not None:
            connect()

    def sum(self, plan: Plan, number: int, flat: tf.Tensor) -> tf.Tensor:
        """Returns the sum of all ranks' eager tensor `flat`, one-dimensional.

        The result shares the bucket's own buffer; it is valid until the same bucket is
        summed again, which needs the weights that are updated with it.

        Args:
            plan: of the gradients.
            number: of the bucket within the plan.
            flat: the bucket's gradients, in the order of its placements.
        """
        exchange = self._exchange
        exchange.clock.lap("compute")
        with self._current_device():
            array = self._numbered(
                self._arrays.from_dlpack(_Capsule(flat, self._gpu)), self._gpu
            )
            buffer = exchange.buffer(
                plan, number, lambda: _aligned_empty(self._arrays, array)
            )
            buffer[...] = array
            exchange.communicator.allreduce(buffer)
            exchange.counters.collectives += 1
            exchange.counters.bytes += buffer.nbytes
            # TensorFlow reads the result on a stream of its own.
            wait = getattr(exchange.communicator, "synchronize", None)
            if wait is not None:
                wait()
            exchange.clock.lap("exchange")
            theirs = self._numbered(buffer, _number_in_tensorflow(flat))
            return tf.experimental.dlpack.from_dlpack(theirs.__dlpack__())

    def _current_device(self) -> contextlib.AbstractContextManager[Any]:
        """Makes this rank's GPU CUDA's current one, which is a thread's own."""
        if self._gpu is None:
            return contextlib.nullcontext()
        device: contextlib.AbstractContextManager[Any]
        device = self._arrays.cuda.Device(self._gpu)
        return device

    def _numbered(self, array: Any, number: int | None) -> Any:
        """Returns an array of the same memory, on the GPU of another number."""
        if self._gpu is None or array.data.device_id == number:
            return array
        cuda = self._arrays.cuda
        memory = cuda.UnownedMemory(array.data.ptr, array.nbytes, array, number)
        pointer = cuda.MemoryPointer(memory, 0)
        return self._arrays.ndarray(array.shape, array.dtype, pointer)


class _Capsule:
    """A tensor by the array interchange protocol, whatever TensorFlow's version.

    Args:
        tensor: eager.
        gpu: CUDA's number of the GPU it is on, which CuPy makes the current one;
            None in host memory.
    """

    def __init__(self, tensor: tf.Tensor, gpu: int | None) -> None:
        self._tensor = tensor
        self._gpu = gpu

    def __dlpack__(self, **_: Any) -> Any:
        return tf.experimental.dlpack.to_dlpack(self._tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0) if self._gpu is None else (2, self._gpu)  # kDLCPU, kDLCUDA


def _number_in_tensorflow(tensor: tf.Tensor) -> int:
    """Returns the number that TensorFlow gives to the device of an eager tensor."""
    return int(tf.DeviceSpec.from_string(tensor.device).device_index or 0)


def allreduce_on_device(
    hand_over: DeviceHandOver,
    exchange: GradientExchange,
    plan: Plan,
    gradients: list[tf.Tensor],
    present: list[int],
    count: tf.Tensor,
    arrived: tf.Tensor,
    on_host: Callable[[int, list[tf.Tensor]], list[tf.Tensor]],
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Returns the mean over all examples of all ranks, and their number.

    Args:
        hand_over: to the communicator.
        exchange: the host's half, which carries the counts.
        plan: of the gradients.
        gradients: dense, one for each index in `present`.
        present: the gradients' places among the plan's.
        count: this rank's examples, a float64 scalar.
        arrived: when the step's data had come; 0 where it is not known.
        on_host: exchanges a bucket, by its number, in host memory.
    """
    position = {index: i for i, index in enumerate(present)}
    reduced: list[Any] = list(gradients)
    # Where gradients accumulate, the step has begun before.
    examples, _ = reduce_counts(
        exchange, count, arrived, tf.constant(False), begins=False, plan=plan
    )
    share = tf.math.divide_no_nan(count, examples)
    after: list[Any] = [examples]
    for number, bucket in enumerate(plan.buckets):
        where = [position[place.index] for place in bucket.placements]
        if bucket.reduction == "max":
            # A few float8 scales: not worth a kernel of their own.
            with tf.control_dependencies(after):
                outputs = on_host(number, [gradients[i] for i in where])
            after = [outputs[0]]
            for i, output in zip(where, outputs, strict=True):
                reduced[i] = output
            continue
        wire, scale = bucket.dtype, 1.0
        if exchange.wire is not None:
            wire = exchange.wire.dtype(bucket)
            scale = exchange.wire.scale(bucket, exchange.communicator.size)
        flat = _pack(bucket, [gradients[i] for i in where], share * scale, wire)
        with tf.control_dependencies([*after, _computed(flat)]):
            call = functools.partial(hand_over.sum, plan, number)
            total = tf.py_function(call, [flat], flat.dtype)
        total.set_shape(flat.shape)
        after = [total]
        for i, output in zip(where, _unpack(bucket, total), strict=True):
            exact = tf.cast(output, tf.as_dtype(bucket.dtype)) * (1 / scale)
            reduced[i] = tf.cast(exact, gradients[i].dtype)
    with tf.control_dependencies(after):
        done = tf.numpy_function(_done_call(exchange), [examples], tf.float64)
    done.set_shape(())
    return reduced, done


def _pack(
    bucket: Bucket, gradients: list[tf.Tensor], share: tf.Tensor, wire: Any
) -> tf.Tensor:
    exact = tf.as_dtype(bucket.dtype)
    share = tf.cast(share, exact)
    parts = [
        # Not by multiplication alone: a rank without examples may hold NaN.
        tf.cast(
            tf.math.multiply_no_nan(tf.cast(tf.reshape(g, [-1]), exact), share), wire
        )
        for g in gradients
    ]
    return tf.concat(parts, 0) if len(parts) > 1 else parts[0]


def _computed(flat: tf.Tensor) -> tf.Tensor:
    """Returns a tensor that is there once the device has computed `flat`.

    The hand-over waits for that too, but with Python's lock in its hand: nothing that
    Python does, data for the next step or the watchdog, would go on beside a step. It
    is TensorFlow that waits for what a function of the host is to be given.
    """
    return tf.numpy_function(lambda first: first.size > 0, [flat[:1]], tf.bool)


def _unpack(bucket: Bucket, flat: tf.Tensor) -> list[tf.Tensor]:
    sizes = [math.prod(place.shape) for place in bucket.placements]
    pieces = tf.split(flat, sizes)
    return [
        tf.reshape(piece, place.shape)
        for piece, place in zip(pieces, bucket.placements, strict=True)
    ]


def _done_call(exchange: GradientExchange) -> Callable[..., Any]:
    def count_exchange(examples: Any) -> Any:
        exchange.finish()
        return np.float64(examples)

    return count_exchange


def _aligned_empty(arrays: Any, like: Any) -> Any:
    """Returns an array like `like` on a 64-byte boundary, as TensorFlow demands."""
    if arrays is not np:
        try:
            return arrays.empty_like(like)  # CuPy's allocations are aligned to 512
        except arrays.cuda.memory.OutOfMemoryError as error:
            raise CommunicatorError(
                f"Expected room for {like.nbytes} bytes of gradients beside what "
                f"TensorFlow has taken of the GPU. Received: {error} Try a smaller "
                "batch, or TF_GPU_ALLOCATOR=cuda_malloc_async in the environment."
            ) from error
    raw = np.empty(like.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + like.nbytes].view(like.dtype)
