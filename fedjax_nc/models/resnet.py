"""Residual networks for small images: 3x3 stem, no max-pool, 1x1 convolution and norm where the shape changes."""

from collections.abc import Sequence
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from fedjax_nc.base import Array
from fedjax_nc.models import layers


class ResNet(nn.Module):
    """Basic blocks, activation after the addition, global average pool; features [B, widths[-1]], float32.

    Every stage but the first halves the image. Convolutions have no bias and are initialised as PyTorch does.
    Source: He et al., Deep Residual Learning, CVPR 2016, with the shortcuts of the FedETF and FedLoGe code.

    Attributes:
        widths: channels of each stage.
        blocks: blocks of each stage.
        norm: 'group' keeps no running statistics, so nothing to average; 'batch' is what FedETF and FedLoGe use.
        groups: groups of 'group', 2 as in FedNH's ResNet-18.
        conv: how convolutions are computed; None means `default_conv()`.
        dtype: type of the computation; parameters and statistics stay float32.

    Raises:
        ValueError: for a norm of another name.
    """

    widths: Sequence[int]
    blocks: Sequence[int]
    norm: Literal['group', 'batch'] = 'group'
    groups: int = 2
    conv: layers.ConvFn | None = None
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Array, *, mask: Array | None = None, train: bool = False) -> Array:
        if self.norm not in ('group', 'batch'):
            raise ValueError(f"norm is 'group' or 'batch', not {self.norm!r}")

        def normed(x: Array, width: int, size: int, stride: int = 1) -> Array:
            conv = layers.Conv(width, size, stride, size // 2, use_bias=False, conv=self.conv, dtype=self.dtype)
            if self.norm == 'batch':
                return layers.BatchNorm(not train, self.dtype)(conv(x), mask)
            return nn.GroupNorm(self.groups, epsilon=1e-5, dtype=self.dtype)(conv(x))

        x = jax.nn.relu(normed(x, self.widths[0], 3))
        for stage, (width, blocks) in enumerate(zip(self.widths, self.blocks, strict=True)):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                y = normed(jax.nn.relu(normed(x, width, 3, stride)), width, 3)
                if y.shape != x.shape:
                    x = normed(x, width, 1, stride)
                x = jax.nn.relu(x + y)
        return layers.global_average_pool(x)


class ResNet20(ResNet):
    """CIFAR's ResNet-20: 3 stages of 3 blocks, 16 to 64 channels, 271,824 parameters."""

    widths: Sequence[int] = (16, 32, 64)
    blocks: Sequence[int] = (3, 3, 3)


class ResNet18(ResNet):
    """ResNet-18 for 32x32 or 64x64 images: 4 stages of 2 blocks, 64 to 512 channels, 11,168,832 parameters."""

    widths: Sequence[int] = (64, 128, 256, 512)
    blocks: Sequence[int] = (2, 2, 2, 2)
