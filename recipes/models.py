"""ResNets, for small images (CIFAR) and for large ones (ImageNet, "v1.5").

Built here rather than taken from `keras.applications`, whose `ResNet50`, `101` and
`152` are the first version (stride in the 1x1 convolution, biases before batch
normalization), and which has neither 18 and 34 nor the small ones. Layers have the
names that `keras.applications` gives them.
"""

from __future__ import annotations

from typing import Any

import keras

SMALL_DEPTHS = (8, 20, 32, 44, 56, 110)
LARGE_DEPTHS = (10, 18, 34, 50, 101, 152)

# Blocks in each of the four stages, and whether they are bottlenecks.
_LARGE: dict[int, tuple[tuple[int, ...], bool]] = {
    10: ((1, 1, 1, 1), False),
    18: ((2, 2, 2, 2), False),
    34: ((3, 4, 6, 3), False),
    50: ((3, 4, 6, 3), True),
    101: ((3, 4, 23, 3), True),
    152: ((3, 8, 36, 3), True),
}


def resnet_small(
    depth: int = 20,
    *,
    input_shape: tuple[int, int, int] = (32, 32, 3),
    num_classes: int = 10,
    weight_decay: float = 0.0,
) -> keras.Model:
    """Returns a ResNet for small images, as in section 4.2 of He et al.

    A 3x3 convolution, three stages of `(depth - 2) / 6` blocks of two 3x3
    convolutions with 16, 32 and 64 filters, global average pooling and one dense
    layer. Shortcuts are identities without parameters (option A of the paper): where
    the shape changes, every other pixel is kept and the new channels are zero.

    He, Zhang, Ren, Sun 2015, "Deep Residual Learning for Image Recognition",
    arXiv:1512.03385.

    Args:
        depth: weighted layers: 20 (0.27 M parameters on CIFAR), 32 (0.46 M), 44
            (0.66 M), 56 (0.85 M) or 110 (1.7 M); or 8 (0.08 M), which is not in the
            paper, to try things out.
        input_shape: height, width and channels of the images.
        num_classes: size of the output.
        weight_decay: L2 penalty of the kernels, as the papers count it: the gradient
            grows by `weight_decay * kernel`. Scales, offsets and biases have none.

    Returns:
        A functional model, from images `(batch, *input_shape)` to logits
        `(batch, num_classes)` in float32.

    Raises:
        ValueError: if there is no such depth.

    Example:
        >>> model = resnet_small(20, input_shape=(8, 8, 1))
        >>> model.count_params()
        270810
    """
    _check_depth(depth, SMALL_DEPTHS)
    net = _Layers(weight_decay, zero_last_scale=False)
    inputs = keras.Input(input_shape)
    x = net.convolution(inputs, 16, 3, name="conv1")
    x = net.normalization(x, name="conv1")
    x = net.relu(x, name="conv1_relu")
    for stage, filters in enumerate((16, 32, 64)):
        for block in range((depth - 2) // 6):
            stride = 2 if stage and not block else 1
            name = f"conv{stage + 2}_block{block + 1}"
            shortcut = net.padded(x, filters, stride, name=name) if stride > 1 else x
            x = net.basic_block(x, shortcut, filters, stride, name=name)
    return net.classifier(inputs, x, num_classes, name=f"resnet{depth}_small")


def resnet(
    depth: int = 50,
    *,
    input_shape: tuple[int, int, int] = (224, 224, 3),
    num_classes: int = 1000,
    weight_decay: float = 0.0,
) -> keras.Model:
    """Returns a ResNet for large images, in its version 1.5.

    He, Zhang, Ren, Sun 2015 (arXiv:1512.03385), table 1, with projection shortcuts
    where the shape changes (option B) and two changes that are common practice: a
    bottleneck has its stride in the 3x3 convolution, not the first 1x1 (as Goyal et al.
    2017, arXiv:1706.02677, section 5.1, has it), and the last normalization of each
    block starts with a scale of zero, so that the block starts as an identity (the
    same section).

    Args:
        depth: weighted layers: 18 (11.69 M parameters with 1000 classes), 34
            (21.80 M), 50 (25.56 M), 101 (44.55 M) or 152 (60.19 M); or 10 (5.42 M),
            which is not in the paper, to try things out.
        input_shape: height, width and channels of the images.
        num_classes: size of the output.
        weight_decay: L2 penalty of the kernels, as the papers count it: the gradient
            grows by `weight_decay * kernel`. Scales, offsets and biases have none.

    Returns:
        A functional model, from images `(batch, *input_shape)` to logits
        `(batch, num_classes)` in float32.

    Raises:
        ValueError: if there is no such depth.

    Example:
        >>> model = resnet(50, num_classes=100)
        >>> model.output_shape
        (None, 100)
    """
    _check_depth(depth, LARGE_DEPTHS)
    blocks, bottleneck = _LARGE[depth]
    net = _Layers(weight_decay, zero_last_scale=True)
    inputs = keras.Input(input_shape)
    x = net.convolution(inputs, 64, 7, stride=2, name="conv1")
    x = net.normalization(x, name="conv1")
    x = net.relu(x, name="conv1_relu")
    x = net.pooling(x, name="pool1")
    make_block = net.bottleneck_block if bottleneck else net.basic_block
    for stage, count in enumerate(blocks):
        filters = 64 * 2**stage
        for block in range(count):
            stride = 2 if stage and not block else 1
            name = f"conv{stage + 2}_block{block + 1}"
            outputs = 4 * filters if bottleneck else filters
            shortcut = x
            if x.shape[-1] != outputs:
                shortcut = net.projected(x, outputs, stride, name=name)
            x = make_block(x, shortcut, filters, stride, name=name)
    return net.classifier(inputs, x, num_classes, name=f"resnet{depth}")


class _Layers:
    """The pieces that all ResNets are made of, with the options they share."""

    def __init__(self, weight_decay: float, *, zero_last_scale: bool) -> None:
        self._weight_decay = weight_decay
        self._zero_last_scale = zero_last_scale

    def _penalty(self) -> keras.regularizers.Regularizer | None:
        # The papers' decay d adds d/2 * w^2 to the loss; Keras' L2(c) adds c * w^2.
        if not self._weight_decay:
            return None
        return keras.regularizers.L2(self._weight_decay / 2)

    def convolution(
        self, x: Any, filters: int, size: int, *, stride: int = 1, name: str
    ) -> Any:
        """Convolves without a bias, since normalization follows."""
        if stride > 1 and size > 1:
            # "same" would pad by the size of the image; the papers pad evenly.
            pad = keras.layers.ZeroPadding2D(
                size // 2, data_format="channels_last", name=f"{name}_pad"
            )
            x = pad(x)
        return keras.layers.Conv2D(
            filters,
            size,
            strides=stride,
            padding="valid" if stride > 1 else "same",
            data_format="channels_last",
            use_bias=False,
            # He et al. 2015, arXiv:1502.01852: the fan of the outputs.
            kernel_initializer=keras.initializers.VarianceScaling(
                2.0, mode="fan_out", distribution="untruncated_normal"
            ),
            kernel_regularizer=self._penalty(),
            name=f"{name}_conv",
        )(x)

    def normalization(self, x: Any, *, last: bool = False, name: str) -> Any:
        """Normalizes over the batch; `last` marks the last one of a block."""
        zero = last and self._zero_last_scale
        return keras.layers.BatchNormalization(
            axis=-1,
            momentum=0.9,
            epsilon=1e-5,
            gamma_initializer="zeros" if zero else "ones",
            name=f"{name}_bn",
        )(x)

    def relu(self, x: Any, *, name: str) -> Any:
        return keras.layers.Activation("relu", name=name)(x)

    def pooling(self, x: Any, *, name: str) -> Any:
        # After a ReLU a padding of zeros is as good as one of minus infinity.
        x = keras.layers.ZeroPadding2D(
            1, data_format="channels_last", name=f"{name}_pad"
        )(x)
        return keras.layers.MaxPooling2D(
            3, strides=2, data_format="channels_last", name=f"{name}_pool"
        )(x)

    def basic_block(
        self, x: Any, shortcut: Any, filters: int, stride: int, *, name: str
    ) -> Any:
        """Two 3x3 convolutions, the first with the stride, around a shortcut."""
        x = self.convolution(x, filters, 3, stride=stride, name=f"{name}_1")
        x = self.normalization(x, name=f"{name}_1")
        x = self.relu(x, name=f"{name}_1_relu")
        x = self.convolution(x, filters, 3, name=f"{name}_2")
        x = self.normalization(x, last=True, name=f"{name}_2")
        return self._join(x, shortcut, name=name)

    def bottleneck_block(
        self, x: Any, shortcut: Any, filters: int, stride: int, *, name: str
    ) -> Any:
        """1x1, 3x3 (with the stride) and 1x1 to four times as many channels."""
        x = self.convolution(x, filters, 1, name=f"{name}_1")
        x = self.normalization(x, name=f"{name}_1")
        x = self.relu(x, name=f"{name}_1_relu")
        x = self.convolution(x, filters, 3, stride=stride, name=f"{name}_2")
        x = self.normalization(x, name=f"{name}_2")
        x = self.relu(x, name=f"{name}_2_relu")
        x = self.convolution(x, 4 * filters, 1, name=f"{name}_3")
        x = self.normalization(x, last=True, name=f"{name}_3")
        return self._join(x, shortcut, name=name)

    def _join(self, x: Any, shortcut: Any, *, name: str) -> Any:
        x = keras.layers.Add(name=f"{name}_add")([shortcut, x])
        return self.relu(x, name=f"{name}_out")

    def projected(self, x: Any, filters: int, stride: int, *, name: str) -> Any:
        """A shortcut by a 1x1 convolution: option B."""
        x = self.convolution(x, filters, 1, stride=stride, name=f"{name}_0")
        return self.normalization(x, name=f"{name}_0")

    def padded(self, x: Any, filters: int, stride: int, *, name: str) -> Any:
        """A shortcut without parameters: option A."""
        more = filters - x.shape[-1]
        x = keras.layers.AveragePooling2D(
            1, strides=stride, data_format="channels_last", name=f"{name}_0_skip"
        )(x)
        padding = ((0, 0), (0, 0), (0, 0), (more // 2, more - more // 2))
        return keras.ops.pad(x, padding)

    def classifier(
        self, inputs: Any, x: Any, num_classes: int, *, name: str
    ) -> keras.Model:
        x = keras.layers.GlobalAveragePooling2D(
            data_format="channels_last", name="avg_pool"
        )(x)
        outputs = keras.layers.Dense(
            num_classes,
            # Goyal et al. 2017, section 5.1. In float32 under mixed precision too:
            # the softmax of the loss needs it.
            kernel_initializer=keras.initializers.RandomNormal(stddev=0.01),
            kernel_regularizer=self._penalty(),
            dtype="float32",
            name="predictions",
        )(x)
        return keras.Model(inputs, outputs, name=name)


def _check_depth(depth: int, depths: tuple[int, ...]) -> None:
    if depth not in depths:
        raise ValueError(
            f"Expected `depth` to be one of {', '.join(map(str, depths))}. "
            f"Received: depth={depth}"
        )
