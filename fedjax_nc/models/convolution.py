"""Convolutions that stay fast when every client has its own weights.

With weights of its own for each client a vmapped convolution becomes a grouped one, and inside a loop body XLA's CPU
backend computes the gradients of any convolution in a slow layout (jax issues 12868 and 13800). The convolutions
below differ only in how they are computed; each takes the arguments of `lax.conv_general_dilated`. The forms for CPUs
lie in `looped`; those for accelerators, and the choice by platform, here.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_nc.base import Array
from fedjax_nc.models.looped import Form, Geometry, in_loops, product, strided_input_gradient

ConvFn = Callable[..., Array]
"""(images, kernel, strides, padding, **options) -> images, like `lax.conv_general_dilated`."""
Padding = str | Sequence[tuple[int, int]]

LAYOUT = ('NHWC', 'HWIO', 'NHWC')
# YNNPACK keeps everything but single convolutions, which XLA's older code does up to twice as fast in this layout.
_YNN: dict[str, Any] = {
    'xla_cpu_experimental_ynn_fusion_type': ','.join(
        f'LIBRARY_FUSION_TYPE_{kind}' for kind in ('DOT', 'REDUCE', 'INDIVIDUAL_DOT')
    )
}


# Fewer copies of what a loop carries, as XLA's compilers for accelerators do by default.
_COPIES: dict[str, Any] = {'xla_cpu_copy_insertion_use_region_analysis': True}
_QUICK: dict[str, Any] = {'xla_cpu_use_fusion_emitters': False}  # XLA's older code generator
_LEVEL: dict[str, Any] = {'xla_backend_optimization_level': 1}


@functools.cache
def _accepts(option: tuple[tuple[str, Any], ...]) -> bool:
    try:
        jax.jit(lambda x: x, compiler_options=dict(option)).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def compiler_options(once: bool = False) -> dict[str, Any]:
    """What to hand to the outermost `jax.jit(compiler_options=...)`; empty off CPU or where jaxlib does not know it.

    They are those of the default backend: `jit` takes them before it knows where a program will run. On CPU
    `conv_sequential` needs them: a round of FedAvg's CNN took 2.7 s with them and 6.6 s without (jax 0.10.2).

    Args:
        once: for a program that runs a few times, and shortly, and is not deep: it compiles in about 0.6 of the time,
            and may then take 1.5 of the time to run. ResNet-20's takes longer to compile.
    """
    if jax.default_backend() != 'cpu':
        return {}
    found: dict[str, Any] = {}
    for options in (_YNN, _COPIES, _QUICK, _LEVEL) if once else (_YNN, _COPIES):
        found |= options if _accepts(tuple(options.items())) else {}
    return found


conv_native: ConvFn = lax.conv_general_dilated
"""XLA's own convolution, `lax.conv_general_dilated`, fastest outside loops and `vmap`."""


def conv_patches(lhs: Array, rhs: Array, window_strides: Sequence[int], padding: Padding, **options: Any) -> Array:
    """Convolution as one matrix product on shifted slices; a batched product under `vmap`.

    Args:
        lhs: images [B, H, W, I].
        rhs: kernel [h, w, I, O].
        window_strides: two strides.
        padding: 'SAME', 'VALID' or two pairs.
        **options: as flax passes them; `precision` is used.

    Returns:
        Images [B, h', w', O] in the type of `lhs`.

    Raises:
        ValueError: for dilation, groups, negative padding, another layout or type of the result, shapes that do not go
            together, or a kernel that is larger than the padded image.
        TypeError: for images and kernel of two types.
    """
    return product(lhs, rhs, _geometry(lhs, rhs, window_strides, padding, options))


def conv_grouped(lhs: Array, rhs: Array, window_strides: Sequence[int], padding: Padding, **options: Any) -> Array:
    """XLA's own convolution, except that under `vmap` the gradient of a kernel stays one.

    Batching the gradient, as `conv_native` does, makes of it a forward convolution with kernels as large as images;
    here the batched convolution is differentiated, for whose gradient GPU libraries have a kernel. On NVIDIA GPUs that
    of 16 or 32 channels is computed with four or two pixels as one. Arguments, result and errors (ValueError) are those
    of `conv_patches`. Differentiable once, in reverse mode.
    """
    return _conv(lhs, rhs, _geometry(lhs, rhs, window_strides, padding, options), GROUPED)


def conv_sequential(lhs: Array, rhs: Array, window_strides: Sequence[int], padding: Padding, **options: Any) -> Array:
    """Convolution whose gradients are convolutions in the one layout that XLA's CPU backend runs fast inside loops.

    Under `vmap` with per-client weights the clients run one after the other: no grouped convolution. Arguments, result
    and errors (ValueError) are those of `conv_patches`. Differentiable once, in reverse mode.
    """
    return _conv(lhs, rhs, _geometry(lhs, rhs, window_strides, padding, options), SEQUENTIAL)


def conv_onednn(lhs: Array, rhs: Array, window_strides: Sequence[int], padding: Padding, **options: Any) -> Array:
    """`conv_sequential` computed by oneDNN, the fastest form on x86 CPUs; the same as it where oneDNN cannot be used.

    In float32 with the extra `onednn`, oneDNN's own gradients are taken, too, which differ from XLA's in the order of
    sums. Without it, programs cannot be written to jax's persistent compilation cache (jaxlib 0.10.2 and 0.12.0 warn
    and go on without): take `conv_sequential` where starting fast matters more than running fast. Arguments, result
    and errors (ValueError) are those of `conv_patches`.
    """
    return _conv(lhs, rhs, _geometry(lhs, rhs, window_strides, padding, options), ONEDNN)


def conv_by_platform(lhs: Array, rhs: Array, window_strides: Sequence[int], padding: Padding, **options: Any) -> Array:
    """The convolution of models that name none: `conv_onednn` on CPU, `conv_grouped` elsewhere.

    Measured on CPUs and NVIDIA GPUs; on TPUs by compilers' estimates (`benchmarks/README.md`).

    The platform is the one that a program is lowered for, whatever the machine on which it is traced: `jax.export` on a
    CPU makes programs for `cuda` and `tpu`. Arguments, result and errors (ValueError) are those of `conv_patches`.
    Differentiable once, in reverse mode. In a `jax.shard_map` of one's own it needs `check_vma=False`.
    """
    return _conv(lhs, rhs, _geometry(lhs, rhs, window_strides, padding, options), BY_PLATFORM)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _conv(x: Array, kernel: Array, geometry: Geometry, form: Form) -> Array:
    return form.forward(x, kernel, geometry)


def _conv_forward(x: Array, kernel: Array, geometry: Geometry, form: Form) -> tuple[Array, tuple[Array, Array]]:
    x = form.kept(x, geometry)
    return form.forward(x, kernel, geometry), (x, kernel)


def _conv_backward(geometry: Geometry, form: Form, residual: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, kernel = residual
    with jax.named_scope('input_gradient'):
        dx = form.input_gradient(g, kernel, geometry)
    with jax.named_scope('kernel_gradient'):
        return dx, form.kernel_gradient(x, g, geometry)


_conv.defvjp(_conv_forward, _conv_backward)


def _geometry(lhs: Array, rhs: Array, strides: Sequence[int], padding: Padding, options: dict) -> Geometry:
    """Checks what the forms of this file cannot do, and makes padding explicit."""
    if lhs.ndim != 4 or rhs.ndim != 4:
        raise ValueError(f'expected images [B, H, W, I] and a kernel [h, w, I, O], got {lhs.shape} and {rhs.shape}')
    if lhs.dtype != rhs.dtype:
        raise TypeError(f'images and kernel must be of one type, and they are {lhs.dtype} and {rhs.dtype}')
    layout = lax.conv_dimension_numbers(lhs.shape, rhs.shape, options.get('dimension_numbers'))
    if layout != lax.conv_dimension_numbers(lhs.shape, rhs.shape, LAYOUT):
        raise ValueError(f'this convolution needs dimension_numbers={LAYOUT}; use conv_native for other layouts')
    for name in ('lhs_dilation', 'rhs_dilation'):
        if any(d != 1 for d in options.get(name) or ()):
            raise ValueError(f'this convolution has no {name}; use conv_native')
    if options.get('feature_group_count', 1) != 1 or options.get('batch_group_count', 1) != 1:
        raise ValueError('this convolution has no groups; use conv_native')
    if options.get('preferred_element_type') not in (None, lhs.dtype):
        raise ValueError('this convolution has no preferred_element_type; use conv_native')
    if lhs.shape[3] != rhs.shape[2]:
        raise ValueError(f'the images have {lhs.shape[3]} channels, the kernel expects {rhs.shape[2]}')
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(lhs.shape[1:3], rhs.shape[:2], strides, padding)
    (top, bottom), (left, right) = padding
    if min(top, bottom, left, right) < 0:
        raise ValueError(f'this convolution has no negative padding, but got {padding}: cut the images before')
    height, width = lhs.shape[1] + top + bottom, lhs.shape[2] + left + right
    if height < rhs.shape[0] or width < rhs.shape[1]:
        raise ValueError(f'a padded image of {height}x{width} is smaller than the kernel {rhs.shape[0]}x{rhs.shape[1]}')
    pads = ((top, bottom), (left, right))
    return Geometry(lhs.shape, rhs.shape, (strides[0], strides[1]), pads, options.get('precision'))


# By XLA's convolution, for accelerators


def _grouped(x: Array, kernel: Array, geometry: Geometry) -> Array:
    return lax.conv_general_dilated(
        x, kernel, geometry.strides, geometry.pads, dimension_numbers=LAYOUT, precision=geometry.precision
    )


def _grouped_input_gradient(g: Array, kernel: Array, geometry: Geometry) -> Array:
    def derived(g: Array, kernel: Array) -> Array:
        x = jax.ShapeDtypeStruct(geometry.image, g.dtype)
        return jax.linear_transpose(lambda x: _grouped(x, kernel, geometry), x)(g)[0]

    def plain(x: Array, kernel: Array, pads: Any) -> Array:
        return _grouped(x, kernel, geometry._replace(strides=(1, 1), pads=pads))

    if geometry.strides == (1, 1):
        return derived(g, kernel)
    # A GPU's compiler writes the zeros between windows out where there are groups; a TPU's has no need to.
    return lax.platform_dependent(
        g, kernel, tpu=derived, default=lambda g, kernel: strided_input_gradient(g, kernel, geometry, plain)
    )


def _grouped_kernel_gradient(x: Array, g: Array, geometry: Geometry) -> Array:
    @jax.custom_batching.custom_vmap
    def gradient(x: Array, g: Array) -> Array:
        kernel = jax.ShapeDtypeStruct(geometry.kernel, x.dtype)
        return jax.linear_transpose(lambda kernel: _grouped(x, kernel, geometry), kernel)(g)[0]

    @gradient.def_vmap
    def _(size: int, batched: Sequence[bool], x: Array, g: Array) -> tuple[Array, bool]:
        x, g = (u if b else jnp.broadcast_to(u, (size, *u.shape)) for u, b in zip((x, g), batched, strict=True))
        fold = _foldable(geometry, x.dtype) if size > 1 else 1
        if fold == 1:
            return _kernel_gradients(x, g, geometry), True
        plain, folded = (functools.partial(_folded_kernel_gradients, geometry=geometry, fold=n) for n in (1, fold))
        return lax.platform_dependent(x, g, cuda=folded, default=plain), True

    return gradient(x, g)


def _kernel_gradients(x: Array, g: Array, geometry: Geometry) -> Array:
    """Those of several kernels, [N, h, w, I, O], from images [N, B, H, W, I] and gradients [N, B, h', w', O]."""
    kernels = jax.ShapeDtypeStruct((len(x), *geometry.kernel), x.dtype)
    many = jax.vmap(lambda x, kernel: _grouped(x, kernel, geometry))
    return jax.linear_transpose(lambda kernels: many(x, kernels), kernels)(g)[0]


def _folded_kernel_gradients(x: Array, g: Array, geometry: Geometry, fold: int) -> Array:
    """`_kernel_gradients` with `fold` neighbours of a row as one pixel of as many times the channels.

    With few channels the matrix units of a GPU stand idle. A kernel for such pixels is three wide, and has a gradient
    for each two pixels; those of pixels that lie as far apart as the columns of the kernel itself are summed.
    """
    if fold == 1:
        return _kernel_gradients(x, g, geometry)
    height, width, inputs, outputs = geometry.kernel
    x, g = (u.reshape(*u.shape[:3], u.shape[3] // fold, fold * u.shape[4]) for u in (x, g))
    wide = Geometry(
        x.shape[1:], (height, 3, fold * inputs, fold * outputs), (1, 1), (geometry.pads[0], (1, 1)), geometry.precision
    )
    pairs = _kernel_gradients(x, g, wide).reshape(len(x), height, 3 * fold, inputs, fold, outputs)
    first = fold - geometry.pads[1][0]  # what the kernel's first column meets of the first of `fold` pixels
    return functools.reduce(jnp.add, (pairs[:, :, first + i : first + i + width, :, i] for i in range(fold)))


def _foldable(geometry: Geometry, dtype: jnp.dtype) -> int:
    """How many pixels of a row are better taken as one: a power of two, for 64 channels (measured on an H200)."""
    (_, width, inputs, outputs), (left, right) = geometry.kernel, geometry.pads[1]
    same = geometry.strides == (1, 1) and left + right == width - 1 and width > 1
    if not same or dtype != jnp.float32 or min(inputs, outputs) < 16:
        return 1
    fold = 1
    while 2 * fold * max(inputs, outputs) <= 64 and geometry.image[2] % (2 * fold) == 0:
        fold *= 2
    return fold if max(left, right) <= fold else 1


def _chosen(cpu: Callable[..., Array], elsewhere: Callable[..., Array]) -> Callable[..., Array]:
    def call(*args: Any) -> Array:
        *arrays, geometry = args
        return lax.platform_dependent(
            *arrays, cpu=lambda *a: cpu(*a, geometry), default=lambda *a: elsewhere(*a, geometry)
        )

    return call


SEQUENTIAL, ONEDNN = in_loops(library=False), in_loops(library=True)
GROUPED = Form(_grouped, _grouped_input_gradient, _grouped_kernel_gradient, lambda x, geometry: x)
BY_PLATFORM = Form(
    _chosen(ONEDNN.forward, GROUPED.forward),
    _chosen(ONEDNN.input_gradient, GROUPED.input_gradient),
    _chosen(ONEDNN.kernel_gradient, GROUPED.kernel_gradient),
    _chosen(ONEDNN.kept, GROUPED.kept),
)
