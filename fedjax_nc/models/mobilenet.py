"""MobileNetV2 for small images."""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from fedjax_nc.base import Array
from fedjax_nc.models import layers
from fedjax_nc.models.resnet import Norm, normalisation

STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
"""(expansion, channels, blocks, stride of the first block) of each stage."""


class MobileNetV2(nn.Module):
    """Inverted residuals: 1x1 to more channels, depthwise 3x3, 1x1 to fewer; features [B, features], float32.

    For 32x32 images, [B, H, W, I]: stride 1 in the stem and the first stages, ReLU instead of ReLU6; blocks of stride
    1 add their input, through a 1x1 convolution and norm where the width changes. 2,284,112 parameters.
    Source: Sandler et al., MobileNetV2, CVPR 2018, in the layout of the released code of FedETF (Li et al., ICCV 2023);
    CCVR (Luo et al., NeurIPS 2021) names the network only.

    Attributes:
        stem: channels of the first convolution.
        stages: (expansion, channels, blocks, stride of the first block) of each stage.
        features: channels of the last convolution, which are averaged over the image.
        norm: 'group' keeps no running statistics, so nothing to average; 'batch' is the published one.
        groups: groups of 'group'.
        conv: how all but the depthwise convolutions are computed; None means `conv_by_platform`.
        dtype: type of the computation; parameters and statistics stay float32.

    Raises:
        ValueError: for a norm of another name.
    """

    stem: int = 32
    stages: Sequence[tuple[int, int, int, int]] = STAGES
    features: int = 1280
    norm: Norm = 'group'
    groups: int = 2
    conv: layers.ConvFn | None = None
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Array, *, mask: Array | None = None, train: bool = False) -> Array:
        normalise = normalisation(self.norm, self.groups, self.dtype, train, mask)

        def normed(x: Array, width: int, size: int = 1) -> Array:
            conv = layers.Conv(width, size, 1, size // 2, use_bias=False, conv=self.conv, dtype=self.dtype)
            return normalise(conv(x))

        x = jax.nn.relu(normed(x, self.stem, 3))
        for expansion, width, blocks, first_stride in self.stages:
            for stride in (first_stride, *[1] * (blocks - 1)):
                y = jax.nn.relu(normed(x, expansion * x.shape[-1]))
                y = jax.nn.relu(normalise(Depthwise(stride, self.dtype)(y)))
                y = normed(y, width)
                if stride == 1:
                    y += x if x.shape == y.shape else normed(x, width)
                x = y
        return layers.global_average_pool(jax.nn.relu(normed(x, self.features)))


class Depthwise(nn.Module):
    """Depthwise 3x3 convolution padded by 1, without bias: [B, H, W, C], one kernel a channel.

    A sum of nine shifted images, because XLA's grouped convolution is many times slower under vmap on CPU.

    Attributes:
        stride: one stride for both directions.
        dtype: type of the result; parameters stay float32.
    """

    stride: int = 1
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        kernel = self.param('kernel', layers.uniform_init(9), (3, 3, 1, x.shape[-1]))
        height, width = x.shape[1:3]
        padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        # The kernel stays float32 because its gradient is a sum over all pixels, which bfloat16 would cut short.
        y = sum(
            padded[:, i : i + height : self.stride, j : j + width : self.stride] * kernel[i, j]
            for i in range(3)
            for j in range(3)
        )
        return jnp.asarray(y, self.dtype)
