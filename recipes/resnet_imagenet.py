r"""Trains a ResNet on ImageNet, or on what has its form, on one process or many.

To try it without ImageNet, on a few photographs that come with scikit-learn, with 1 or
2 ranks:

    python -m distkeras.recipes.resnet_imagenet
    distkeras run -n 2 -m distkeras.recipes.resnet_imagenet

On ImageNet, in FOLDER as TFRecords or with a folder for each class, on 8 GPUs:

    distkeras run -n 8 -m distkeras.recipes.resnet_imagenet --data imagenet \
        --data-dir FOLDER --precision mixed_bfloat16

With 256 ranks on 32 machines, by their MPI launcher or by Slurm, one task a GPU:

    mpiexec -n 256 --bind-to none --hostfile hosts \
        python -m distkeras.recipes.resnet_imagenet \
        --data imagenet --data-dir FOLDER --precision mixed_bfloat16
    srun -N 32 --ntasks-per-node 8 --gpus-per-node 8 --cpu-bind=none \
        python -m distkeras.recipes.resnet_imagenet \
        --data imagenet --data-dir FOLDER --precision mixed_bfloat16

SGD is known to take batches up to 8192: 32 images, the default, on each of 256 ranks.
For more there is LARS (You et al. 2017, arXiv:1708.03888):

    srun -N 32 --ntasks-per-node 8 --gpus-per-node 8 --cpu-bind=none \
        python -m distkeras.recipes.resnet_imagenet \
        --data imagenet --data-dir FOLDER --batch-size 256 --optimizer lars

The rules are those of Goyal et al. 2017 (arXiv:1706.02677): a learning rate of 0.1 for
256 images a step, in proportion for more; it rises over the first 5 epochs, update by
update, and falls to a tenth after 30, 60 and 80 of 90; momentum 0.9; a weight decay of
0.0001, of neither biases nor normalization. The batch size is per rank.

Rank 0 writes `best.keras`, an ordinary Keras file, `history.csv`, TensorBoard logs and
`config.toml`: all options, to run the same again by `--config`. With `--resume` it
keeps checkpoints too, and the same command goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

import distkeras
from distkeras.recipes import _options
from distkeras.recipes import _training
from distkeras.recipes import models
from distkeras.recipes._lars import LARS

DEFAULTS = {
    "samples": {
        "depth": 10,
        "image_size": 48,
        "classes": 8,
        "epochs": 8,
        "batch_size": 8,
        "learning_rate": 0.3,
        "schedule": "cosine",
        "warmup_epochs": 1.0,
        "label_smoothing": 0.1,
    },
    "imagenet": {
        "depth": 50,
        "image_size": 224,
        "classes": 1000,
        "epochs": 90,
        "batch_size": 32,
        "warmup_epochs": 5.0,
        "label_smoothing": 0.1,
    },
    "synthetic": {
        "depth": 50,
        "image_size": 224,
        "classes": 1000,
        "epochs": 1,
        "batch_size": 32,
        "warmup_epochs": 1.0,
        "label_smoothing": 0.1,
    },
}
# Of 256 images a step, and how it falls. That of LARS has not been tuned here.
LEARNING_RATE = {"sgd": 0.1, "lars": 0.25}
SCHEDULE = {"sgd": "steps", "lars": "poly"}
DROPS = (30 / 90, 60 / 90, 80 / 90)
SYNTHETIC = {"train": 8192, "val": 1024}


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

    # Data: every rank reads its own shard of the files.
    try:
        training, validation = load(args)
    except distkeras.CommunicatorError as error:
        _training.leave(str(error), code=2)
    epochs, steps_per_epoch = _training.length(args, steps_of(training))

    # Model
    lars = args.optimizer == "lars"  # brings its own decay
    model = models.resnet(
        args.depth,
        input_shape=(args.image_size, args.image_size, 3),
        num_classes=args.classes,
        weight_decay=0.0 if lars else args.weight_decay,
    )
    rate = _training.schedule(
        args.schedule,
        args.learning_rate * args.batch_size / 256,
        epochs * steps_per_epoch,
        drops=DROPS,
    )
    options = {"momentum": 0.9, "use_ema": args.ema is not None}
    if args.ema is not None:
        options["ema_momentum"] = args.ema
    optimizer = (
        LARS(rate, decay=args.weight_decay, **options)
        if lars
        else keras.optimizers.SGD(rate, **options)
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
        optimizer=optimizer,
        loss=keras.losses.CategoricalCrossentropy(
            from_logits=True, label_smoothing=args.label_smoothing
        ),
        metrics=[
            keras.metrics.CategoricalAccuracy("top_1"),
            keras.metrics.TopKCategoricalAccuracy(5, "top_5"),
        ],
        jit_compile=_options.JIT_COMPILE[args.jit_compile],
    )

    # Training
    _options.write_config(args, global_batch_size=args.batch_size * world.size)
    start = time.perf_counter()
    history = trainer.fit(
        training,
        validation_data=validation,
        shard=False,  # each is this rank's own part already,
        shuffle=False,  # and shuffled
        epochs=epochs,
        steps_per_epoch=steps_per_epoch if args.steps else None,
        callbacks=_training.callbacks(args, "val_top_1"),
        resume="auto" if args.resume else None,
        verbose=2,
    )
    seconds = time.perf_counter() - start
    logs, numbers = history.history, history.epoch
    _training.check(logs)

    if world.rank == 0:
        best = int(np.argmax(logs["val_top_1"]))
        print(
            f"ResNet-{args.depth} on {args.data}, ranks: {world.size}, "
            f"top-1: {logs['val_top_1'][best]:.4f}, "
            f"top-5: {logs['val_top_5'][best]:.4f} "
            f"in epoch {numbers[best] + 1} of {numbers[-1] + 1}, "
            f"time: {seconds:.1f} s, "
            f"best model: {args.output / 'best.keras'}",
            flush=True,
        )


def load(args: argparse.Namespace) -> tuple[Any, Any]:
    """Returns this rank's training and validation data. Collective.

    Raises:
        distkeras.CommunicatorError: on every rank, if there are no images.
    """
    from distkeras.recipes import _image_files
    from distkeras.recipes import _imagenet
    from distkeras.recipes import _samples

    form = {
        "batch_size": args.batch_size,
        "image_size": args.image_size,
        "num_classes": args.classes,
        "seed": args.seed,
    }
    if args.data == "synthetic":
        train, val = (
            _imagenet.synthetic(count, **form) for count in SYNTHETIC.values()
        )
        return train, val if args.steps is None else val.take(args.steps)
    folder = args.data_dir
    if args.data == "samples":
        folder = folder or args.output / f"samples-{args.files}"
        _samples.make(folder, args.files)
    train, val = (
        _imagenet.ShardedImages(
            _image_files.find(folder, split),
            training=split == "train",
            first_label=args.first_label,
            steps=args.steps,
            **form,
        )
        for split in ("train", "val")
    )
    return train, val


def steps_of(training: Any) -> int:
    """Returns how many updates an epoch has, on all ranks. Collective."""
    mine = getattr(training, "num_batches", None) or int(training.cardinality())
    return max(distkeras.allgather_object(mine))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the options; what was not given is filled in by data and optimizer."""
    parser, by_data = _options.make_parser(
        "distkeras.recipes.resnet_imagenet",
        __doc__,
        defaults=DEFAULTS,
        depths=models.LARGE_DEPTHS,
        schedules=("steps", "cosine", "poly"),
        learning_rate="256 images a step (0.1; with lars 0.25)",
    )
    add = parser.add_argument
    add(
        *("--files",),
        choices=("tfrecords", "folders"),
        default="tfrecords",
        help="to make of the samples; ImageNet's are found in --data-dir",
    )
    add("--first-label", type=int, default=1, help="in TFRecords (%(default)s)")
    add("--optimizer", choices=list(LEARNING_RATE), default="sgd")
    add = by_data.add_argument
    add("--image-size", type=_options.positive, help="pixels, height and width")
    add("--classes", type=_options.positive)
    args = _options.parse(parser, argv, DEFAULTS)
    if args.data == "imagenet" and args.data_dir is None:
        parser.error("--data imagenet needs --data-dir FOLDER, where its files are")
    if args.learning_rate is None:
        args.learning_rate = LEARNING_RATE[args.optimizer]
    args.schedule = args.schedule or SCHEDULE[args.optimizer]
    return args


if __name__ == "__main__":
    main()
