"""VGG without normalisation."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from fedjax_nc.base import Array
from fedjax_nc.models import layers
from fedjax_nc.models.cnn import check_images

STAGES = ((64,), (128,), (256, 256), (512, 512), (512, 512))
"""Channels of the convolutions before each of the five poolings."""


class VGG11(nn.Module):
    """VGG-11 for 32x32 images, without BatchNorm, dropout or hidden dense layers; features [B, 512].

    Images [B, H, W, I]; padded 3x3 convolutions with bias, ReLU after each, pooled by 2 after each stage, then
    flattened: larger images have more features. Kernels start normal with variance `2 / (9 * channels out)`, biases at
    zero; 9,220,480 parameters for three channels.
    Source: the network of FedAvg_ETF+GMV (arXiv 2303.16066), which takes it from FedRS (Li and Zhan, KDD 2021).

    Attributes:
        conv: how convolutions are computed; None means `conv_by_platform`.
        dtype: type of the computation; parameters stay float32.

    Raises:
        ValueError: for images smaller than 32x32.
    """

    conv: layers.ConvFn | None = None
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Array, *, mask: Array | None = None, train: bool = False) -> Array:
        check_images(x, 32)
        he_normal = nn.initializers.variance_scaling(2.0, 'fan_out', 'normal')
        for stage in STAGES:
            for place, width in enumerate(stage, 1):
                pool = 2 if place == len(stage) else 1
                conv = layers.Conv(
                    width, 3, padding=1, kernel_init=he_normal, pool=pool, conv=self.conv, dtype=self.dtype
                )
                x = jax.nn.relu(conv(x))
        return x.reshape(x.shape[0], -1)
