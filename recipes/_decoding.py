"""Photographs as models take them: decoded in part, cropped, flipped, normalized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

# Of ImageNet, by channel.
MEAN = (123.675, 116.28, 103.53)
DEVIATION = (58.395, 57.12, 57.375)


def prepared(
    contents: Any,
    label: Any,
    numbers: Any,
    *,
    image_size: int,
    num_classes: int,
    training: bool,
) -> tuple[Any, Any]:
    """Returns an image and its label in the form in which models take them.

    Args:
        contents: of the file.
        label: from 0 to `num_classes` - 1; another one is an error.
        numbers: two, random, from which crop and flip follow.
        image_size: height and width.
        num_classes: how many there are.
        training: whether to crop and flip at random, or to cut out the middle.

    Returns:
        A float32 image `(image_size, image_size, 3)`, about 0 with deviation 1, and a
        float32 label `(num_classes,)`.
    """
    window = random_window(contents, numbers) if training else middle(contents)
    image = tf.image.resize(cut(contents, window), (image_size, image_size))
    if training:
        image = tf.image.stateless_random_flip_left_right(image, numbers)
    label = _checked(label, num_classes)
    image = (image - MEAN) / tf.constant(DEVIATION)
    image = tf.ensure_shape(image, (image_size, image_size, 3))
    return image, tf.one_hot(label, num_classes)


def cut(contents: Any, window: Any) -> Any:
    """Decodes the part of an image in a window: top, left, height, width."""

    def inside(image: Any) -> Any:
        top, left, height, width = tf.unstack(window)
        return image[top : top + height, left : left + width]

    return _if_jpeg(
        contents,
        lambda: tf.io.decode_and_crop_jpeg(contents, window, channels=3),
        inside,
    )


def random_window(contents: Any, numbers: Any) -> Any:
    """Draws a window of 8 to 100 % of the image, from 3:4 to 4:3.

    As Szegedy et al. 2014 (arXiv:1409.4842, section 6) and Goyal et al. 2017.
    """
    begin, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
        _shape(contents),
        bounding_boxes=tf.zeros((0, 0, 4)),
        seed=numbers,
        min_object_covered=0.0,
        aspect_ratio_range=(3 / 4, 4 / 3),
        area_range=(0.08, 1.0),
        max_attempts=10,
        use_image_if_no_bounding_boxes=True,
    )
    return tf.concat([begin[:2], extent[:2]], 0)


def middle(contents: Any) -> Any:
    """The window whose resizing is the middle of the image resized by 256/224."""
    height, width = tf.unstack(_shape(contents)[:2])
    side = tf.minimum(height, width)
    side = tf.cast(tf.round(tf.cast(side, tf.float32) * (224 / 256)), tf.int32)
    return tf.stack([(height - side) // 2, (width - side) // 2, side, side])


def _if_jpeg(contents: Any, yes: Callable[[], Any], no: Callable[[Any], Any]) -> Any:
    """JPEGs are decoded in part. Among ImageNet's files is a PNG."""

    def other() -> Any:
        return no(tf.io.decode_image(contents, channels=3, expand_animations=False))

    return tf.cond(tf.io.is_jpeg(contents), yes, other)


def _shape(contents: Any) -> Any:
    return _if_jpeg(contents, lambda: tf.io.extract_jpeg_shape(contents), tf.shape)


def _checked(label: Any, num_classes: int) -> Any:
    # A label out of range would be a row of zeros, and no error.
    inside = tf.logical_and(label >= 0, label < num_classes)
    check = tf.debugging.Assert(
        inside,
        [
            f"Expected a label from 0 to {num_classes - 1}. Received:",
            label,
            "Set --classes and, for TFRecords, --first-label.",
        ],
    )
    with tf.control_dependencies([check]):
        return tf.identity(label)
