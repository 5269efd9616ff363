r"""Trains a ResNet on small images, on one process or many.

On this machine, with 1, 2 or 8 ranks (a GPU each, or a core):

    python -m distkeras.recipes.resnet
    distkeras run -n 2 -m distkeras.recipes.resnet
    distkeras run -n 8 -m distkeras.recipes.resnet --data cifar10

On several machines, by the MPI launcher that they have; `hosts` is a file with a line
`node1 slots=8` for each:

    mpiexec -n 16 --bind-to none --host node1:8,node2:8 \
        python -m distkeras.recipes.resnet --data cifar10
    mpiexec -n 256 --bind-to none --hostfile hosts python -m distkeras.recipes.resnet \
        --data cifar10 --batch-size 4

Under Slurm, with one task a GPU:

    srun -N 2 --ntasks-per-node 8 --gpus-per-node 8 --cpu-bind=none \
        python -m distkeras.recipes.resnet --data cifar10

Every rank runs this script. The batch size is per rank; the learning rate is that of
one process, and grows with the number of ranks (Goyal et al. 2017, arXiv:1706.02677).
Rank 0 writes `best.keras`, an ordinary Keras file, `history.csv`, TensorBoard logs and
`config.toml`: all options, to run the same again by `--config`. With `--resume` it
keeps checkpoints too, and the same command goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence

import keras
import numpy as np

import distkeras
from distkeras.recipes import _data
from distkeras.recipes import _options
from distkeras.recipes import _training
from distkeras.recipes import models

# What each data set is trained with, unless the options say otherwise. For CIFAR-10
# as He et al. 2015 (arXiv:1512.03385, section 4.2): 64000 updates of 128 images.
_CIFAR = {
    "depth": 20,
    "epochs": 164,
    "batch_size": 128,
    "learning_rate": 0.1,
    "warmup_epochs": 5.0,
    "schedule": "steps",
    "label_smoothing": 0.0,
    "augment": True,
}
DEFAULTS = {
    "digits": {
        "depth": 20,
        "epochs": 15,
        "batch_size": 32,
        "learning_rate": 0.05,
        "warmup_epochs": 2.0,
        "schedule": "cosine",
        "label_smoothing": 0.1,
        "augment": False,
    },
    "cifar10": _CIFAR,
    "cifar100": _CIFAR,
    "synthetic": {
        "depth": 20,
        "epochs": 2,
        "batch_size": 32,
        "learning_rate": 0.02,
        "warmup_epochs": 1.0,
        "schedule": "cosine",
        "label_smoothing": 0.0,
        "augment": False,
    },
}


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, and prints one line at the end.

    Args:
        argv: the options; those of the process if None.

    Raises:
        SystemExit: with code 2 if there are no images, 1 if the loss is not finite.
    """
    args = parse(argv)
    world = distkeras.init()  # before TensorFlow opens its GPUs
    keras.utils.set_random_seed(args.seed)
    keras.config.set_dtype_policy(args.precision)

    # Data: every rank holds the whole, the Trainer deals it out.
    try:
        images = _data.load(args.data, args.data_dir)
    except distkeras.CommunicatorError as error:
        _training.leave(str(error), code=2)
    classes = images.num_classes
    validation = images.x_val, keras.utils.to_categorical(images.y_val, classes)
    x, y = images.x_train, keras.utils.to_categorical(images.y_train, classes)
    training = {"x": x, "y": y, "batch_size": args.batch_size}
    if args.augment:
        data = _data.Augmented(
            x, y, args.batch_size, padding=x.shape[1] // 8, seed=args.seed
        )
        training = {"x": data}
    global_batch_size = args.batch_size * world.size
    epochs, steps_per_epoch = _training.length(
        args, math.ceil(len(x) / global_batch_size)
    )

    # Model
    model = models.resnet_small(
        args.depth,
        input_shape=x.shape[1:],
        num_classes=classes,
        weight_decay=args.weight_decay,
    )
    rate = _training.schedule(
        args.schedule, args.learning_rate, epochs * steps_per_epoch
    )
    trainer = distkeras.Trainer(
        model,
        learning_rate_scaling=_options.SCALING[args.scaling],
        warmup_epochs=args.warmup_epochs,
        seed=args.seed,
        compression=args.compression,
        error_feedback=args.error_feedback,
    )
    trainer.compile(
        optimizer=keras.optimizers.SGD(
            rate,
            momentum=0.9,
            use_ema=args.ema is not None,
            ema_momentum=args.ema or 0.99,
        ),
        loss=keras.losses.CategoricalCrossentropy(
            from_logits=True, label_smoothing=args.label_smoothing
        ),
        metrics=["accuracy"],
        jit_compile=_options.JIT_COMPILE[args.jit_compile],
    )

    # Training
    _options.write_config(args, global_batch_size=global_batch_size)
    start = time.perf_counter()
    history = trainer.fit(
        **training,
        epochs=epochs,
        steps_per_epoch=steps_per_epoch if args.steps else None,
        validation_data=validation,
        validation_batch_size=args.batch_size,
        callbacks=_training.callbacks(args, "val_accuracy"),
        resume="auto" if args.resume else None,
        verbose=2,
    )
    seconds = time.perf_counter() - start
    logs, numbers = history.history, history.epoch
    _training.check(logs)

    if world.rank == 0:
        best = int(np.argmax(logs["val_accuracy"]))
        seen = len(numbers) * min(len(x), steps_per_epoch * global_batch_size)
        print(
            f"ResNet-{args.depth} on {args.data}, ranks: {world.size}, "
            f"val_accuracy: {logs['val_accuracy'][best]:.4f} "
            f"in epoch {numbers[best] + 1} of {numbers[-1] + 1}, "
            f"time: {seconds:.1f} s, "
            f"samples/s: {seen / seconds:.0f}, "
            f"best model: {args.output / 'best.keras'}",
            flush=True,
        )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the options; what was not given is filled in from `DEFAULTS`."""
    parser, by_data = _options.make_parser(
        "distkeras.recipes.resnet",
        __doc__,
        defaults=DEFAULTS,
        depths=models.SMALL_DEPTHS,
        schedules=("cosine", "steps"),
        learning_rate="a single process; scaled by the number of ranks",
    )
    by_data.add_argument(
        "--augment", action=argparse.BooleanOptionalAction, help="crop and flip"
    )
    return _options.parse(parser, argv, DEFAULTS)


if __name__ == "__main__":
    main()
