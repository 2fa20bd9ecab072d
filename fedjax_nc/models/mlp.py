"""Multilayer perceptron."""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from fedjax_nc.base import Array
from fedjax_nc.models import layers


class MLP(nn.Module):
    """Dense layers with a ReLU after each; the features are the last one, [B, widths[-1]].

    Examples [B, ...] of floats are flattened.
    (200, 200) is the network of FedAvg for MNIST; (1024, 1024, 128) is MLPNet, with which FedAvg_ETF+GMV
    (arXiv 2303.16066) learns FEMNIST: 1,984,640 parameters for 28x28 images.

    Attributes:
        widths: outputs of each layer.
        dtype: type of the computation; parameters stay float32.
    """

    widths: Sequence[int] = (200, 200)
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Array, *, mask: Array | None = None, train: bool = False) -> Array:
        if isinstance(self.widths, int):
            raise ValueError(f'widths are one for each layer, such as MLP(({self.widths},)), not {self.widths}')
        x = x.reshape(x.shape[0], -1)
        for width in self.widths:
            x = jax.nn.relu(layers.dense(width, x.shape[-1], self.dtype)(x))
        return x
