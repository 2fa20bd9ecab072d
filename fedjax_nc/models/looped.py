"""Convolutions and their gradients that stay fast inside loops on CPUs, where every client has its own weights.

Inside a loop body XLA's CPU backend computes the gradients of any convolution in a slow layout (jax issues 12868 and
13800), and a vmapped convolution becomes a grouped one. Here both gradients are convolutions in the one layout that is
fast, by oneDNN where it can be used, and the lanes of `vmap` follow each other; a 1x1 convolution is a matrix product.
`convolution` chooses between these forms and others.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_nc.base import Array
from fedjax_nc.models import libdnnl, onednn

Pads = tuple[tuple[int, int], tuple[int, int]]
Strides = tuple[int, int]

NO_PADS = ((0, 0), (0, 0))
# Measured, for gradients of kernels:
IMAGES = 16  # handled together by XLA
FLOATS = 2**17  # of images handled together by oneDNN
PIECES = 16  # at most, because each has to be compiled
CHANNELS = 16  # of the images, from which on oneDNN is the faster one


class Geometry(NamedTuple):
    """What a convolution does with shapes, whatever the number of images."""

    image: tuple[int, ...]  #: [B, H, W, I]
    kernel: tuple[int, ...]  #: [h, w, I, O]
    strides: Strides
    pads: Pads
    precision: Any


class Form(NamedTuple):
    """A way to compute a convolution and its gradients. Each function takes the geometry last."""

    forward: Callable[[Array, Array, Geometry], Array]  #: (x, kernel) -> y
    input_gradient: Callable[[Array, Array, Geometry], Array]  #: (g, kernel) -> dx
    kernel_gradient: Callable[[Array, Array, Geometry], Array]  #: (x, g) -> dk
    kept: Callable[[Array, Geometry], Array]  #: x as it is kept for the backward pass


def _sum_type(x: Array) -> jnp.dtype:
    """Sums of bfloat16 are kept in float32."""
    return jnp.promote_types(x.dtype, jnp.float32)


def product(x: Array, kernel: Array, geometry: Geometry) -> Array:
    """Convolution as one matrix product on shifted slices."""
    patches = _patches(x, geometry.kernel[:2], geometry.strides, geometry.pads)
    flat = patches.reshape(-1, patches.shape[-1])
    y = jnp.dot(
        flat,
        kernel.reshape(flat.shape[1], -1),
        precision=geometry.precision,
        preferred_element_type=_sum_type(flat),
    )
    return y.reshape(*patches.shape[:3], geometry.kernel[3]).astype(patches.dtype)


def _patches(x: Array, size: Sequence[int], strides: Strides, pads: Pads) -> Array:
    """[B, H, W, I] -> [B, h', w', h * w * I], the window of each output position."""
    x = lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), (*pads[0], 0), (*pads[1], 0), (0, 0, 0)))
    rows = (x.shape[1] - size[0]) // strides[0] * strides[0] + 1
    cols = (x.shape[2] - size[1]) // strides[1] * strides[1] + 1
    return jnp.concatenate(
        [
            lax.slice(x, (0, i, j, 0), (x.shape[0], i + rows, j + cols, x.shape[3]), (1, *strides, 1))
            for i in range(size[0])
            for j in range(size[1])
        ],
        axis=-1,
    )


def _shared(function: Callable[..., Array]) -> Callable[..., Array]:
    """`function` of images and a kernel, whose lanes under `vmap` are one batch if they share it, else in turn."""

    @jax.custom_batching.custom_vmap
    def called(x: Array, kernel: Array) -> Array:
        return function(x, kernel)

    @called.def_vmap
    def _(size: int, batched: Sequence[bool], x: Array, kernel: Array) -> tuple[Array, bool]:
        if not batched[1]:
            y = called(x.reshape(-1, *x.shape[2:]), kernel)
            return y.reshape(size, -1, *y.shape[1:]), True
        lanes = jax.vmap(_one_by_one(function), in_axes=[0 if b else None for b in batched])
        return lanes(x, kernel), True

    return called


def _chosen(library: bool, by_library: Callable[..., Array], by_xla: Callable[..., Array], geometry: Geometry) -> Any:
    by = functools.partial(onednn.either, by_library, by_xla) if library else by_xla
    return functools.partial(by, geometry=geometry)


def stored(x: Array) -> Array:
    """`x`, kept by XLA's CPU backend as an array instead of being computed again by each of its users.

    Those users read it transposed, so that a fused chain of activation, norm and pooling costs as much as the
    convolution. XLA repeats cheap operations but never divisions, and does not see that this divisor is 1.
    """
    return x / jnp.sign(jnp.abs(x) + 1)


def _kept(x: Array, geometry: Geometry) -> Array:
    return x if geometry.kernel[:2] == (1, 1) else stored(x)


def _padded(x: Array, pads: Sequence[tuple[int, int]]) -> Array:
    """Zeros around the images, fewer pixels where negative."""
    return lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), *((*pad, 0) for pad in pads), (0, 0, 0)))


def _spare(geometry: Geometry) -> list[int]:
    """How far the windows of the last row and column lie from the lower end of the image.

    Negative where the stride leaves some of the image unread.
    """
    spare = []
    for d in (0, 1):
        side, size, (low, high) = geometry.image[d + 1], geometry.kernel[d], geometry.pads[d]
        unread = (side + low + high - size) % geometry.strides[d]
        spare.append(high - unread)
    return spare


def _looped(x: Array, kernel: Array, geometry: Geometry, library: bool) -> Array:
    if geometry.kernel[:2] == (1, 1):
        return product(x, kernel, geometry)
    return _shared(_chosen(library, _by_library, _by_xla, geometry))(x, kernel)


def _by_library(x: Array, kernel: Array, *, geometry: Geometry, devices: int) -> Array:
    if libdnnl.available(x.dtype):
        return libdnnl.convolution(x, kernel, strides=geometry.strides, pads=geometry.pads, devices=devices)
    return _by_xla(x, kernel, geometry=geometry, run=onednn.call)


def _by_xla(x: Array, kernel: Array, *, geometry: Geometry, run: Callable[..., Array] = onednn.portable) -> Array:
    return run(x, kernel, geometry.strides, geometry.pads, (1, 1), x.dtype, geometry.precision)


def _looped_input_gradient(g: Array, kernel: Array, geometry: Geometry, library: bool) -> Array:
    if geometry.kernel[:2] == (1, 1):
        x = jax.ShapeDtypeStruct(geometry.image, g.dtype)
        return jax.linear_transpose(lambda x: product(x, kernel, geometry), x)(g)[0]
    return _shared(_chosen(library, _read_by_library, _read_by_xla, geometry))(g, kernel)


def _read_by_library(g: Array, kernel: Array, *, geometry: Geometry, devices: int) -> Array:
    if libdnnl.available(g.dtype):
        where: Any = {'sides': geometry.image[1:3], 'strides': geometry.strides, 'pads': geometry.pads}
        return libdnnl.input_gradient(g, kernel, **where, devices=devices)
    return _read_by_xla(g, kernel, geometry=geometry, run=onednn.call)


def _read_by_xla(g: Array, kernel: Array, *, geometry: Geometry, run: Callable[..., Array] = onednn.portable) -> Array:
    """Each pixel collects from the windows that read it, so the kernel runs backwards over g."""

    def plain(x: Array, kernel: Array, pads: Pads) -> Array:
        return _by_xla(x, kernel, geometry=geometry._replace(strides=(1, 1), pads=pads), run=run)

    if geometry.strides != (1, 1):
        return strided_input_gradient(g, kernel, geometry, plain)
    spare = _spare(geometry)
    ends: Any = tuple((geometry.kernel[d] - 1 - geometry.pads[d][0], geometry.kernel[d] - 1 - spare[d]) for d in (0, 1))
    if min(map(min, ends)) < 0:
        g, ends = _padded(g, ends), NO_PADS
    return plain(g, kernel[::-1, ::-1].swapaxes(2, 3), ends)


def strided_input_gradient(g: Array, kernel: Array, geometry: Geometry, run: Callable[..., Array]) -> Array:
    """The same without the zeros that a stride leaves between windows.

    Counted from the upper end of the padding, the pixels `stride * q + r` of one remainder r collect from the windows
    q, q - 1, ... by every `stride`-th row of the kernel: the remainders are output channels of one convolution over g.
    A single pixel, whose remainders but one are zero, is spread afterwards.

    Args:
        g: gradient of the result.
        kernel: that of the convolution.
        geometry: that of the convolution.
        run: `(x, kernel, pads) -> y`, a convolution of stride 1.
    """
    (down, across), (height, width, inputs, outputs) = geometry.strides, geometry.kernel
    if (height, width) == (1, 1) and geometry.pads == NO_PADS:
        read = run(g, kernel.swapaxes(2, 3), NO_PADS)
        below = [geometry.image[d + 1] - (g.shape[d + 1] - 1) * geometry.strides[d] - 1 for d in (0, 1)]
        spread = ((0, 0, 0), (0, below[0], down - 1), (0, below[1], across - 1), (0, 0, 0))
        return lax.pad(read, jnp.zeros((), read.dtype), spread)
    rows, cols = -(-height // down), -(-width // across)
    apart = lax.pad(
        kernel,
        jnp.zeros((), kernel.dtype),
        ((0, rows * down - height, 0), (0, cols * across - width, 0), (0, 0, 0), (0, 0, 0)),
    )
    apart = apart.reshape(rows, down, cols, across, inputs, outputs)[::-1, :, ::-1].transpose(0, 2, 5, 1, 3, 4)
    apart = apart.reshape(rows, cols, outputs, down * across * inputs)
    lows = geometry.pads[0][0], geometry.pads[1][0]
    sides = [-(-(geometry.image[d + 1] + lows[d]) // geometry.strides[d]) for d in (0, 1)]
    ends: Any = (rows - 1, sides[0] - g.shape[1]), (cols - 1, sides[1] - g.shape[2])
    if min(map(min, ends)) < 0:
        g, ends = _padded(g, ends), NO_PADS
    y = run(g, apart, ends)
    y = y.reshape(-1, *sides, down, across, inputs).transpose(0, 1, 3, 2, 4, 5)
    y = y.reshape(-1, sides[0] * down, sides[1] * across, inputs)
    return y[:, lows[0] : lows[0] + geometry.image[1], lows[1] : lows[1] + geometry.image[2]]


def _looped_kernel_gradient(x: Array, g: Array, geometry: Geometry, library: bool) -> Array:
    if geometry.kernel[:2] == (1, 1):
        kernel = jax.ShapeDtypeStruct(geometry.kernel, x.dtype)
        return jax.linear_transpose(lambda kernel: product(x, kernel, geometry), kernel)(g)[0]
    if not geometry.image[0]:
        return jnp.zeros(geometry.kernel, x.dtype)
    return _one_by_one(_chosen(library, _sums_by_library, _sums_by_xla, geometry))(x, g).astype(x.dtype)


def _sums_by_library(x: Array, g: Array, *, geometry: Geometry, devices: int) -> Array:
    """Sums [h, w, I, O] in float32 over all windows.

    With jaxlib's part of oneDNN it is a convolution in three dimensions, the last of which are channels: so every
    product that it consists of has all of them in its rows. A few images at a time fill the cache.
    """
    if libdnnl.available(x.dtype):
        where: Any = {'size': geometry.kernel[:2], 'strides': geometry.strides, 'pads': geometry.pads}
        return libdnnl.kernel_gradient(x, g, **where, devices=devices)
    if geometry.kernel[2] < CHANNELS:
        return _sums_by_xla(x, g, geometry=geometry)
    x, ends = _ends(x, geometry)
    dk, some = jnp.zeros((), jnp.float32), max(FLOATS // x[0].size, -(-len(x) // PIECES))
    for at in range(0, len(x), some):
        images, windows = x[at : at + some].transpose(1, 2, 3, 0), g[at : at + some].transpose(1, 2, 0, 3)
        volumes = images[None], windows[:, :, None]
        dk += onednn.call(*volumes, (1, 1, 1), (*ends, (0, 0)), (*geometry.strides, 1), jnp.dtype(jnp.float32))[0]
    return dk


def _sums_by_xla(x: Array, g: Array, *, geometry: Geometry) -> Array:
    """The window sum with images in the place of channels and g as the kernel, and channels in the place of the batch.

    A few images at a time: in a transposed copy of many the neighbours lie too far apart for the cache.
    """
    x, ends = _ends(x, geometry)
    dtype = _sum_type(x)
    dk, some = jnp.zeros((), dtype), max(IMAGES, -(-len(x) // PIECES))
    for at in range(0, len(x), some):
        images, windows = x[at : at + some].transpose(3, 1, 2, 0), g[at : at + some].transpose(1, 2, 0, 3)
        dk += onednn.portable(images, windows, (1, 1), ends, geometry.strides, dtype, geometry.precision)
    return dk.transpose(1, 2, 0, 3)


def _ends(x: Array, geometry: Geometry) -> tuple[Array, Pads]:
    """Images, and the padding up to the last pixel that a window reads."""
    ends: Any = tuple((geometry.pads[d][0], spare) for d, spare in enumerate(_spare(geometry)))
    return (_padded(x, ends), NO_PADS) if min(map(min, ends)) < 0 else (x, ends)


def _one_by_one(function: Callable[..., Array]) -> Callable[..., Array]:
    """`function`, for whose lanes `vmap` calls it one after the other."""
    called = jax.custom_batching.custom_vmap(function)

    @called.def_vmap
    def _(size: int, batched: Sequence[bool], *arrays: Array) -> tuple[Array, bool]:
        def one(lane: list[Array]) -> Array:
            own = iter(lane)
            return called(*(next(own) if b else u for u, b in zip(arrays, batched, strict=True)))

        return lax.map(one, [u for u, b in zip(arrays, batched, strict=True) if b]), True

    return called


def in_loops(library: bool) -> Form:
    """The form for loops on CPUs, by oneDNN's `library` where it can be used, or by XLA alone."""
    return Form(
        functools.partial(_looped, library=library),
        functools.partial(_looped_input_gradient, library=library),
        functools.partial(_looped_kernel_gradient, library=library),
        _kept,
    )
