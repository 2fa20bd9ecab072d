"""Small convolutional networks without normalisation, initialised as PyTorch does."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from fedjax_nc.base import Array
from fedjax_nc.models import layers


class CNN(nn.Module):
    """FedETF's network for CIFAR-10: valid 3x3 convolutions of 32, 64 and 64 channels, dense 64; features [B, 64].

    Images [B, H, W, I]; the first two convolutions are pooled by 2, and a ReLU follows each layer.
    Source: Li et al., No Fear of Classifier Biases, ICCV 2023, and its code.

    Attributes:
        conv: how convolutions are computed; None means `conv_by_platform`.
        dtype: type of the computation; parameters stay float32.

    Raises:
        ValueError: for images smaller than 18x18.
    """

    conv: layers.ConvFn | None = None
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Array, *, mask: Array | None = None, train: bool = False) -> Array:
        check_images(x, 18)
        for width in (32, 64):
            x = jax.nn.relu(layers.Conv(width, 3, pool=2, conv=self.conv, dtype=self.dtype)(x))
        x = jax.nn.relu(layers.Conv(64, 3, conv=self.conv, dtype=self.dtype)(x))
        x = x.reshape(x.shape[0], -1)
        return jax.nn.relu(layers.dense(64, x.shape[-1], self.dtype)(x))


class McMahanCNN(nn.Module):
    """FedAvg's network: padded 5x5 convolutions of 32 and 64 channels, each pooled by 2, dense 512; features [B, 512].

    Images [B, H, W, I]; a ReLU after each layer.
    Source: McMahan et al., Communication-Efficient Learning of Deep Networks, AISTATS 2017, the network for MNIST.

    Attributes:
        conv: how convolutions are computed; None means `conv_by_platform`.
        dtype: type of the computation; parameters stay float32.

    Raises:
        ValueError: for images smaller than 4x4.
    """

    conv: layers.ConvFn | None = None
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Array, *, mask: Array | None = None, train: bool = False) -> Array:
        check_images(x, 4)
        for width in (32, 64):
            conv = layers.Conv(width, 5, padding='SAME', pool=2, conv=self.conv, dtype=self.dtype)
            x = jax.nn.relu(conv(x))
        x = x.reshape(x.shape[0], -1)
        return jax.nn.relu(layers.dense(512, x.shape[-1], self.dtype)(x))


class Conv2Cifar(nn.Module):
    """FedNH's network for CIFAR: valid 5x5 convolutions of 64 channels, each pooled by 2, dense 384 and 192.

    Images [B, H, W, I], features [B, 192], a ReLU after each layer; 796,032 parameters for 32x32x3.
    Source: Dai et al., Tackling Data Heterogeneity in Federated Learning with Class Prototypes, AAAI 2023, its code.

    Attributes:
        conv: how convolutions are computed; None means `conv_by_platform`.
        dtype: type of the computation; parameters stay float32.

    Raises:
        ValueError: for images smaller than 16x16.
    """

    conv: layers.ConvFn | None = None
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Array, *, mask: Array | None = None, train: bool = False) -> Array:
        return lenet(x, (64, 64), (384, 192), self.conv, self.dtype)


class MoonCNN(nn.Module):
    """MOON's network for CIFAR-10, on which CCVR is measured: LeNet's layers and a projection to 256 dimensions.

    Images [B, H, W, I]; valid 5x5 convolutions of 6 and 16 channels, each pooled by 2, dense 120, 84, 84, all with a
    ReLU, and a linear 256. The features [B, 256] are not rectified; 90,056 parameters for 32x32x3.
    Source: Li et al., Model-Contrastive Federated Learning, CVPR 2021; Luo et al., No Fear of Heterogeneity (CCVR),
    NeurIPS 2021.

    Attributes:
        conv: how convolutions are computed; None means `conv_by_platform`.
        dtype: type of the computation; parameters stay float32.

    Raises:
        ValueError: for images smaller than 16x16.
    """

    conv: layers.ConvFn | None = None
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Array, *, mask: Array | None = None, train: bool = False) -> Array:
        x = lenet(x, (6, 16), (120, 84, 84), self.conv, self.dtype)
        return layers.dense(256, x.shape[-1], self.dtype)(x)


def lenet(
    x: Array, channels: tuple[int, ...], hidden: tuple[int, ...], conv: layers.ConvFn | None, dtype: DTypeLike
) -> Array:
    """Valid 5x5 convolutions, each pooled by 2, then dense layers, all with ReLU; to be called in a module."""
    check_images(x, 16)
    for width in channels:
        x = jax.nn.relu(layers.Conv(width, 5, pool=2, conv=conv, dtype=dtype)(x))
    x = x.reshape(x.shape[0], -1)
    for width in hidden:
        x = jax.nn.relu(layers.dense(width, x.shape[-1], dtype)(x))
    return x


def check_images(x: Array, smallest: int) -> None:
    """Raises a ValueError unless x is [B, H, W, C] with H and W of at least `smallest`."""
    if x.ndim != 4 or min(x.shape[1:3]) < smallest:
        raise ValueError(f'expected images [B, H, W, C] of at least {smallest}x{smallest}, got shape {x.shape}')
