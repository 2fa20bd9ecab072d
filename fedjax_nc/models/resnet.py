"""Residual networks for small images: 3x3 stem, no max-pool, 1x1 convolution and norm where the shape changes."""

from collections.abc import Callable, Sequence
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from fedjax_nc.base import Array
from fedjax_nc.models import layers

Norm = Literal['group', 'batch']


def normalisation(
    norm: Norm, groups: int, dtype: DTypeLike, train: bool, mask: Array | None
) -> Callable[[Array], Array]:
    """What adds one more normalisation layer to the module that calls it.

    Args:
        norm: 'group' or 'batch'.
        groups: of 'group'.
        dtype: type of the result.
        train: whether 'batch' normalises by the batch and updates its running statistics.
        mask: the real rows of the batch, [B] bool, or None where all are.

    Raises:
        ValueError: for a norm of another name.
    """
    if norm == 'batch':
        return lambda x: layers.BatchNorm(not train, dtype)(x, mask)
    if norm == 'group':
        return lambda x: nn.GroupNorm(groups, epsilon=1e-5, dtype=dtype)(x)
    raise ValueError(f"norm is 'group' or 'batch', not {norm!r}")


class ResNet(nn.Module):
    """Residual blocks, activation after the addition, global average pool; float32 features.

    Basic blocks have two 3x3 convolutions and give features [B, widths[-1]]; bottlenecks a 3x3 one between two 1x1,
    the last of which has four times the channels, and give [B, 4 * widths[-1]].

    Images are [B, H, W, I]; every stage but the first halves them. Convolutions have no bias and are initialised as
    PyTorch does.
    Source: He et al., Deep Residual Learning, CVPR 2016, with the shortcuts of the FedETF and FedLoGe code.

    Attributes:
        widths: channels of each stage.
        blocks: blocks of each stage.
        bottleneck: whether blocks are bottlenecks.
        norm: 'group' keeps no running statistics, so nothing to average; 'batch' is what FedETF and FedLoGe use.
        groups: groups of 'group', 2 as in FedNH's ResNet-18.
        norm_blocks: False norms the stem and the shortcuts only, as in FedNH's own ResNet-18 but not in its baselines'.
        conv: how convolutions are computed; None means `conv_by_platform`.
        dtype: type of the computation; parameters and statistics stay float32.

    Raises:
        ValueError: for a norm of another name.
    """

    widths: Sequence[int]
    blocks: Sequence[int]
    bottleneck: bool = False
    norm: Norm = 'group'
    groups: int = 2
    norm_blocks: bool = True
    conv: layers.ConvFn | None = None
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Array, *, mask: Array | None = None, train: bool = False) -> Array:
        normalise = normalisation(self.norm, self.groups, self.dtype, train, mask)

        def conv(x: Array, width: int, size: int, stride: int = 1, norm: bool = self.norm_blocks) -> Array:
            y = layers.Conv(width, size, stride, size // 2, use_bias=False, conv=self.conv, dtype=self.dtype)(x)
            return normalise(y) if norm else y

        def residual(x: Array, width: int, stride: int) -> Array:
            if not self.bottleneck:
                return conv(jax.nn.relu(conv(x, width, 3, stride)), width, 3)
            y = jax.nn.relu(conv(x, width, 1))
            return conv(jax.nn.relu(conv(y, width, 3, stride)), 4 * width, 1)

        x = jax.nn.relu(conv(x, self.widths[0], 3, norm=True))
        for stage, (width, blocks) in enumerate(zip(self.widths, self.blocks, strict=True)):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                y = residual(x, width, stride)
                x = layers.stored(x)
                if y.shape != x.shape:
                    x = conv(x, y.shape[-1], 1, stride, norm=True)
                x = layers.relu_of_sum(x + y)
        return layers.global_average_pool(x)


class ResNet20(ResNet):
    """CIFAR's ResNet-20: 3 stages of 3 blocks, 16 to 64 channels, features [B, 64], 271,824 parameters."""

    widths: Sequence[int] = (16, 32, 64)
    blocks: Sequence[int] = (3, 3, 3)


class ResNet18(ResNet):
    """ResNet-18 for 32x32 or 64x64 images: 4 stages of 2 blocks, features [B, 512], 11,168,832 parameters."""

    widths: Sequence[int] = (64, 128, 256, 512)
    blocks: Sequence[int] = (2, 2, 2, 2)


class ResNet34(ResNet):
    """ResNet-34 for small images, FedLoGe's: basic blocks, features [B, 512], 21,276,992 parameters."""

    widths: Sequence[int] = (64, 128, 256, 512)
    blocks: Sequence[int] = (3, 4, 6, 3)


class ResNet50(ResNet):
    """ResNet-50 for small images, FedLoGe's: bottlenecks, features [B, 2048], 23,500,352 parameters."""

    widths: Sequence[int] = (64, 128, 256, 512)
    blocks: Sequence[int] = (3, 4, 6, 3)
    bottleneck: bool = True
