"""Convolutions that stay fast when every client has its own weights.

With weights of its own for each client a vmapped convolution becomes a grouped one, and inside a loop body XLA's CPU
backend computes the gradients of any convolution in a slow layout (jax issues 12868 and 13800). The convolutions
below differ only in how they are computed; each takes the arguments of `lax.conv_general_dilated`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_nc.base import Array
from fedjax_nc.models import onednn

ConvFn = Callable[..., Array]
"""(images, kernel, strides, padding, **options) -> images, like `lax.conv_general_dilated`."""
Padding = str | Sequence[tuple[int, int]]
Pads = tuple[tuple[int, int], tuple[int, int]]
Strides = tuple[int, int]

LAYOUT = ('NHWC', 'HWIO', 'NHWC')
NO_PADS = [(0, 0), (0, 0)]
IMAGES = 16  # handled together in a kernel gradient; measured
CHANNELS = 32  # from which on oneDNN is the faster one for kernel gradients; measured
# YNNPACK keeps everything but single convolutions, which XLA's older code does up to twice as fast in this layout.
_YNN = {
    'xla_cpu_experimental_ynn_fusion_type': ','.join(
        f'LIBRARY_FUSION_TYPE_{kind}' for kind in ('DOT', 'REDUCE', 'INDIVIDUAL_DOT')
    )
}


def default_conv() -> ConvFn:
    """The convolution for this backend.

    On CPU (measured) `conv_onednn` where oneDNN can be used, else `conv_sequential`; elsewhere (not yet measured)
    `conv_patches`.
    """
    if jax.default_backend() != 'cpu':
        return conv_patches
    return conv_onednn if onednn.available(jnp.dtype(jnp.float32)) else conv_sequential


@functools.cache
def _accepts(option: tuple[tuple[str, str], ...]) -> bool:
    try:
        jax.jit(lambda x: x, compiler_options=dict(option)).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def compiler_options() -> dict[str, Any]:
    """What to hand to the outermost `jax.jit(compiler_options=...)`; empty off CPU or where jaxlib does not know it.

    On CPU `conv_sequential` needs it: a round of FedAvg's CNN took 2.7 s with it and 6.6 s without (jax 0.10.2).
    """
    return dict(_YNN) if jax.default_backend() == 'cpu' and _accepts(tuple(_YNN.items())) else {}


conv_native: ConvFn = lax.conv_general_dilated
"""XLA's own convolution, fastest outside loops and `vmap`."""


def conv_patches(lhs: Array, rhs: Array, window_strides: Sequence[int], padding: Padding, **options: Any) -> Array:
    """Convolution as one matrix product on shifted slices; a batched product under `vmap`.

    Args:
        lhs: images [B, H, W, I].
        rhs: kernel [h, w, I, O].
        window_strides: two strides.
        padding: 'SAME', 'VALID' or two pairs.
        **options: as flax passes them; `precision` is used.

    Raises:
        ValueError: for dilation, groups or another layout.
    """
    strides, pads = _geometry(lhs, rhs, window_strides, padding, options)
    return _matmul(_patches(lhs, rhs.shape[:2], strides, pads), rhs, options.get('precision'))


def conv_sequential(lhs: Array, rhs: Array, window_strides: Sequence[int], padding: Padding, **options: Any) -> Array:
    """Convolution whose gradients are convolutions in the one layout that XLA's CPU backend runs fast inside loops.

    Under `vmap` with per-client weights the clients run one after the other: no grouped convolution. Arguments and
    errors are those of `conv_patches`. Differentiable once, in reverse mode.
    """
    return _by_hand(lhs, rhs, window_strides, padding, options, library=False)


def conv_onednn(lhs: Array, rhs: Array, window_strides: Sequence[int], padding: Padding, **options: Any) -> Array:
    """`conv_sequential` computed by oneDNN, the fastest form on x86 CPUs; the same as it where oneDNN cannot be used.

    Programs that contain it cannot be written to jax's persistent compilation cache (jaxlib 0.10.2 and 0.12.0 warn and
    go on without): take `conv_sequential` where starting fast matters more than running fast.
    """
    return _by_hand(lhs, rhs, window_strides, padding, options, library=onednn.available(lhs.dtype))


def _by_hand(
    lhs: Array, rhs: Array, window_strides: Sequence[int], padding: Padding, options: dict, library: bool
) -> Array:
    strides, pads = _geometry(lhs, rhs, window_strides, padding, options)
    if rhs.shape[:2] == (1, 1):
        return _matmul(_patches(lhs, (1, 1), strides, pads), rhs, options.get('precision'))
    return _conv(lhs, rhs, strides, pads, options.get('precision'), library)


def _geometry(lhs: Array, rhs: Array, strides: Sequence[int], padding: Padding, options: dict) -> tuple[Strides, Pads]:
    """Checks what the hand-written forms cannot do; returns strides and explicit padding."""
    if lhs.ndim != 4 or rhs.ndim != 4:
        raise ValueError(f'expected images [B, H, W, I] and a kernel [h, w, I, O], got {lhs.shape} and {rhs.shape}')
    layout = lax.conv_dimension_numbers(lhs.shape, rhs.shape, options.get('dimension_numbers'))
    if layout != lax.conv_dimension_numbers(lhs.shape, rhs.shape, LAYOUT):
        raise ValueError(f'this convolution needs dimension_numbers={LAYOUT}; use conv_native for other layouts')
    for name in ('lhs_dilation', 'rhs_dilation'):
        if any(d != 1 for d in options.get(name) or ()):
            raise ValueError(f'this convolution has no {name}; use conv_native')
    if options.get('feature_group_count', 1) != 1 or options.get('batch_group_count', 1) != 1:
        raise ValueError('this convolution has no groups; use conv_native')
    if lhs.shape[3] != rhs.shape[2]:
        raise ValueError(f'the images have {lhs.shape[3]} channels, the kernel expects {rhs.shape[2]}')
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(lhs.shape[1:3], rhs.shape[:2], strides, padding)
    (top, bottom), (left, right) = padding
    height, width = lhs.shape[1] + top + bottom, lhs.shape[2] + left + right
    if height < rhs.shape[0] or width < rhs.shape[1]:
        raise ValueError(f'a padded image of {height}x{width} is smaller than the kernel {rhs.shape[0]}x{rhs.shape[1]}')
    return (strides[0], strides[1]), ((top, bottom), (left, right))


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


def _sum_type(x: Array) -> jnp.dtype:
    """Sums of bfloat16 are kept in float32."""
    return jnp.promote_types(x.dtype, jnp.float32)


def _matmul(patches: Array, kernel: Array, precision: Any) -> Array:
    flat = patches.reshape(-1, patches.shape[-1])
    y = jnp.dot(flat, kernel.reshape(flat.shape[1], -1), precision=precision, preferred_element_type=_sum_type(flat))
    return y.reshape(*patches.shape[:3], -1).astype(patches.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _conv(x: Array, kernel: Array, strides: Strides, pads: Pads, precision: Any, library: bool) -> Array:
    return _run(x, kernel, strides, pads, precision, library)


def _run(
    x: Array,
    kernel: Array,
    strides: Strides,
    pads: Sequence,
    precision: Any,
    library: bool,
    *,
    dilation: Strides = (1, 1),
    dtype: jnp.dtype | None = None,
) -> Array:
    dtype = dtype or x.dtype

    @jax.custom_batching.custom_vmap
    def run(x: Array, kernel: Array) -> Array:
        if library:
            return onednn.convolution(x, kernel, strides, pads, dilation, dtype)
        y = lax.conv_general_dilated(
            x,
            kernel,
            strides,
            pads,
            rhs_dilation=dilation,
            dimension_numbers=LAYOUT,
            precision=precision,
            preferred_element_type=_sum_type(x),
        )
        return y.astype(dtype)

    @run.def_vmap
    def _(size: int, batched: Sequence[bool], x: Array, kernel: Array) -> tuple[Array, bool]:
        if not batched[1]:  # shared weights: the clients' images are one batch
            y = run(x.reshape(-1, *x.shape[2:]), kernel)
            return y.reshape(size, -1, *y.shape[1:]), True
        if not batched[0]:
            return lax.map(lambda k: run(x, k), kernel), True
        return lax.map(lambda pair: run(*pair), (x, kernel)), True

    return run(x, kernel)


def _stored(x: Array) -> Array:
    """`x`, kept by XLA's CPU backend as an array instead of being computed again by each of its users.

    Those users read it transposed, so that a fused chain of activation, norm and pooling costs as much as the
    convolution. XLA repeats cheap operations but never divisions, and does not see that this divisor is 1.
    """
    return x / jnp.sign(jnp.abs(x) + 1)


def _padded(x: Array, pads: Sequence[tuple[int, int]], strides: Strides) -> Array:
    """Zeros around the images, fewer pixels where negative, and `stride - 1` zeros between pixels."""
    sides = [(*pad, stride - 1) for pad, stride in zip(pads, strides, strict=True)]
    return lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), *sides, (0, 0, 0)))


def _conv_forward(
    x: Array, kernel: Array, strides: Strides, pads: Pads, precision: Any, library: bool
) -> tuple[Array, tuple[Array, Array]]:
    x = _stored(x)
    return _run(x, kernel, strides, pads, precision, library), (x, kernel)


def _conv_backward(
    strides: Strides, pads: Pads, precision: Any, library: bool, residual: tuple[Array, Array], g: Array
) -> tuple[Array, Array]:
    x, kernel = residual
    # How far the windows of the last row and column lie from the lower end of the image; negative where the stride
    # leaves some of the image unread.
    spare = [kernel.shape[d] + (g.shape[d + 1] - 1) * strides[d] - x.shape[d + 1] - pads[d][0] for d in (0, 1)]
    # Input gradient: each pixel collects from the windows that read it, so the kernel runs backwards over g.
    edges = [(kernel.shape[d] - 1 - pads[d][0], kernel.shape[d] - 1 - spare[d]) for d in (0, 1)]
    wide = g
    if strides != (1, 1) or min(map(min, edges)) < 0:
        wide, edges = _padded(g, edges, strides), NO_PADS
    with jax.named_scope('input_gradient'):
        dx = _run(wide, kernel[::-1, ::-1].swapaxes(2, 3), (1, 1), edges, precision, library)
    # Kernel gradient: the same window sum with channels in the place of the batch and g as the kernel. A few images at
    # a time, because in a transposed copy of many the neighbours lie too far apart for the cache.
    ends = [(pads[d][0], spare[d]) for d in (0, 1)]
    if min(map(min, ends)) < 0:
        x, ends = _padded(x, ends, (1, 1)), NO_PADS
    dk = jnp.zeros((), jnp.float32)
    some = max(IMAGES, -(-len(x) // 16))  # at most 16 pieces, each of which has to be compiled
    for at in range(0, len(x), some):
        images, windows = x[at : at + some].transpose(3, 1, 2, 0), g[at : at + some].transpose(1, 2, 0, 3)
        with jax.named_scope('kernel_gradient'):
            dk += _run(
                images,
                windows,
                (1, 1),
                ends,
                precision,
                library and x.shape[3] >= CHANNELS,
                dilation=strides,
                dtype=jnp.dtype(jnp.float32),
            )
    return dx, dk.transpose(1, 2, 0, 3).astype(kernel.dtype)


_conv.defvjp(_conv_forward, _conv_backward)
