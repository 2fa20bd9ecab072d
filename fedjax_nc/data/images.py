"""Image preprocessing as pure functions of a key and a batch, made to run inside a jitted training step.

Augmentation acts on pixels, before normalisation, and example i draws from a key of its own: what happens to it does
not depend on how many rows, padded or real, follow. All functions work under `jit` and `vmap`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_nc import checks
from fedjax_nc.base import Array

Channels = float | Sequence[float]
"""One number for all channels, or one for each."""

HALF = (0.5, 0.5)
"""(mean, std) of pixels scaled to [0, 1], as FedETF takes them on CIFAR.

This and the following are for `pipeline(*HALF, crop=4, flip=True)`; with three channels, (mean, std) are of one number
per channel.
"""
CIFAR10_CCVR = ((125.3 / 255, 123.0 / 255, 113.9 / 255), (63.0 / 255, 62.1 / 255, 66.7 / 255))
"""(mean, std) of CIFAR-10 as CCVR gives them."""
CIFAR100_CCVR = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
"""(mean, std) of CIFAR-100 as CCVR gives them."""
CINIC10_CCVR = ((0.4789, 0.4723, 0.4305), (0.2421, 0.2383, 0.2587))
"""(mean, std) of CINIC-10, for CCVR."""
CIFAR10_FEDNH = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
"""(mean, std) of CIFAR-10 as FedNH gives them."""
CIFAR100_FEDNH = ((0.507, 0.487, 0.441), (0.267, 0.256, 0.276))
"""(mean, std) of CIFAR-100 as FedNH gives them."""
CIFAR10_FEDLOGE = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""(mean, std) that FedLoGe takes on CIFAR-10, which are those of ImageNet."""
CIFAR100_FEDLOGE = ((0.50708, 0.48655, 0.44092), (0.26733, 0.25644, 0.27615))
"""(mean, std) of CIFAR-100 as FedLoGe gives them."""


def normalize(x: Array, mean: Channels, std: Channels) -> Array:
    """(x - mean) / std in float32.

    Args:
        x: [..., ch] uint8, which is scaled to [0, 1] first, or floating and taken as it is.
        mean: one number or one per channel.
        std: the same.

    Returns:
        [..., ch] float32.

    Raises:
        TypeError: if `x` is of another type.
        ValueError: if `mean` is not finite or `std` not positive, or neither one number nor one per channel.
    """
    if not isinstance(x, jax.Array | np.ndarray) or not x.ndim:
        raise TypeError(f'`x` must be an array of images; got {checks.shown(x)}.')
    _check_channels(mean, std, x.shape[-1])
    if x.dtype == jnp.uint8:
        x = x.astype(jnp.float32) / 255
    elif not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f'`x` must be uint8 or floating images; got {x.dtype}.')
    return (x.astype(jnp.float32) - jnp.asarray(mean, jnp.float32)) / jnp.asarray(std, jnp.float32)


def random_crop(key: Array, x: Array, padding: int, mode: str = 'constant') -> Array:
    """Pads every side and cuts the original size out again at a random place, anew for each image.

    Args:
        key: random key.
        x: [B, H, W, ch] of any type.
        padding: pixels per side.
        mode: of `jnp.pad`: 'constant' pads with 0, black; CCVR uses 'reflect' on CIFAR-10.

    Returns:
        [B, H, W, ch] of the same type.

    Raises:
        ValueError: if `x` is of another shape, `padding` no whole number or negative, or `mode` unknown.
    """
    checks.rows('`x`', x, 4)
    checks.whole('`padding`', padding, 0)
    _check_mode('`mode`', mode)
    padded = jnp.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)), mode=mode)
    offsets = _draw(key, len(x), lambda k: jax.random.randint(k, (2,), 0, 2 * padding + 1))
    return jax.vmap(lambda image, at: jax.lax.dynamic_slice(image, (*at, 0), x.shape[1:]))(padded, offsets)


def random_flip(key: Array, x: Array) -> Array:
    """Mirrors each image left to right with probability 1/2.

    Args:
        key: random key.
        x: [B, H, W, ch] of any type.

    Returns:
        [B, H, W, ch] of the same type.

    Raises:
        ValueError: if `x` is of another shape.
    """
    checks.rows('`x`', x, 4)
    mirrored = _draw(key, len(x), jax.random.bernoulli)
    return jnp.where(mirrored[:, None, None, None], x[:, :, ::-1], x)


def pipeline(
    mean: Channels = 0.5, std: Channels = 0.5, *, crop: int = 0, flip: bool = False, crop_mode: str = 'constant'
) -> Callable[[Array, Array | None], Array]:
    """Builds `preprocess(x, key)`: crop, flip, normalise. The defaults are FedETF's, without augmentation.

    Args:
        mean: one number or one per channel, for pixels in [0, 1].
        std: the same.
        crop: padding of the random crop, 0 for none.
        flip: whether to mirror at random.
        crop_mode: how the crop pads, see `random_crop`.

    Returns:
        A function of x [B, H, W, ch], uint8 or floating in [0, 1], and a key: [B, H, W, ch] float32. Without a key,
        None in evaluation, it only normalises. It raises TypeError and ValueError as `normalize` and `random_crop`.

    Raises:
        ValueError: if `crop` is negative, `crop_mode` unknown, `mean` not finite or some `std` not positive.
    """
    _check_channels(mean, std)
    checks.whole('`crop`', crop, 0)
    checks.flags(flip=flip)
    _check_mode('`crop_mode`', crop_mode)

    def preprocess(x: Array, key: Array | None) -> Array:
        if key is not None:
            crop_key, flip_key = jax.random.split(key)
            if crop:
                x = random_crop(crop_key, x, crop, crop_mode)
            if flip:
                x = random_flip(flip_key, x)
        return normalize(x, mean, std)

    return preprocess


def _draw(key: Array, count: int, sample: Callable[[Array], Array]) -> Array:
    # folding in the position, rather than splitting into `count`, keeps row i the same for every `count`
    return jax.vmap(lambda i: sample(jax.random.fold_in(key, i)))(jnp.arange(count))


def _check_channels(mean: Channels, std: Channels, channels: int | None = None) -> None:
    for name, value, low in (('`mean`', mean, -math.inf), ('`std`', std, 0.0)):
        values: Any = value if isinstance(value, list | tuple) or np.ndim(value) == 1 else [value]
        for part in values:
            checks.number(name, part, low, open_low=True)
        if not len(values) or len(values) not in (1, channels or len(values)):
            known = 'the channels' if channels is None else f'{channels} channels'
            raise ValueError(f'{name} must be one number, or one for each of {known}; got {len(values)}.')


def _check_mode(name: str, mode: str) -> None:
    try:
        jax.eval_shape(lambda: jnp.pad(jnp.zeros(2), 1, mode=mode))
    except Exception as error:  # jax has several for this
        raise ValueError(f"{name} must be one of `jnp.pad`, such as 'reflect'; got {checks.shown(mode)}.") from error
