"""Layers of the models, initialised as PyTorch does."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from fedjax_nc.base import Array
from fedjax_nc.models import looped
from fedjax_nc.models.convolution import LAYOUT, ConvFn, conv_by_platform
from fedjax_nc.models.convolution import compiler_options as compiler_options


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def max_pool(x: Array, window: int) -> Array:
    """Largest value of each `window` x `window` tile, [B, H, W, C] -> [B, H // window, W // window, C].

    The gradient goes to the first largest element of a tile, as in `flax.linen.max_pool`, without its scatter.
    """
    return _max_pool_forward(x, window)[0]


def _max_pool_forward(x: Array, window: int) -> tuple[Array, tuple[Array, Array]]:
    if x.dtype == jnp.bfloat16:
        # A TPU's compiler copies such images for their tiles (its estimates in `benchmarks/README.md`).
        forms = (functools.partial(form, window=window) for form in (_largest_in_float32, _largest))
        best, where = lax.platform_dependent(x, tpu=next(forms), default=next(forms))
    else:
        best, where = _largest(x, window)
    return best, (where, jnp.zeros((*x.shape[1:3], 0), x.dtype))  # the empty array only carries the shape


def _largest(x: Array, window: int) -> tuple[Array, Array]:
    """The largest value of each tile and its place in it, counted row by row."""
    b, height, width, c = x.shape
    h, w = height // window, width // window
    tiles = x[:, : h * window, : w * window].reshape(b, h, window, w, window, c)
    small = jnp.uint8 if window <= 16 else jnp.uint32
    best, where = tiles[:, :, 0, :, 0], jnp.zeros((b, h, w, c), small)
    for k in range(1, window * window):
        value = tiles[:, :, k // window, :, k % window]
        where = jnp.where(value > best, small(k), where)
        best = jnp.maximum(best, value)
    return best, where


def _largest_in_float32(x: Array, window: int) -> tuple[Array, Array]:
    best, where = _largest(x.astype(jnp.float32), window)
    return best.astype(x.dtype), where


def _max_pool_backward(window: int, residual: tuple[Array, Array], g: Array) -> tuple[Array]:
    where, shape = residual
    # On a TPU tiles of six dimensions are mostly padding (compiler's estimates in `benchmarks/README.md`).
    dx = lax.platform_dependent(
        where,
        g,
        tpu=lambda where, g: _by_windows(where, g, window),
        default=lambda where, g: _by_tiles(where, g, window),
    )
    rest = (shape.shape[0] - dx.shape[1], shape.shape[1] - dx.shape[2])
    return (jnp.pad(dx, ((0, 0), (0, rest[0]), (0, rest[1]), (0, 0))),)


def _by_tiles(where: Array, g: Array, window: int) -> Array:
    """`g` at the place of each tile that `where` names, zero elsewhere."""
    b, h, w, c = g.shape
    place = jnp.arange(window * window, dtype=where.dtype).reshape(1, 1, window, 1, window, 1)
    dx = jnp.where(where[:, :, None, :, None] == place, g[:, :, None, :, None], 0)
    return dx.reshape(b, h * window, w * window, c)


def _by_windows(where: Array, g: Array, window: int) -> Array:
    """The same: both are repeated over the image by sums over windows that hold one value each."""
    side = (window - 1, window - 1)

    def repeated(x: Array) -> Array:
        return lax.reduce_window(
            x, jnp.zeros((), x.dtype), lax.add, (1, window, window, 1), (1, 1, 1, 1), ((0, 0), side, side, (0, 0)),
            base_dilation=(1, window, window, 1),
        )  # fmt: skip

    named, spread = repeated(where.astype(jnp.float32)), repeated(g)
    row, column = (lax.broadcasted_iota(jnp.int32, spread.shape[1:3], d) % window for d in (0, 1))
    return jnp.where(named == (row * window + column)[:, :, None], spread, 0)


max_pool.defvjp(_max_pool_forward, _max_pool_backward)


@jax.custom_jvp
def stored(x: Array) -> Array:
    """`x`, of which the CPU's compiler keeps one array for all who use it, the forms of convolution for CPUs included.

    Without, a sum of residuals is made again from the convolutions of all blocks before it, wherever it is read.
    """
    return lax.platform_dependent(x, cpu=looped.stored, default=lambda x: x)


stored.defjvp(lambda x, dx: (stored(*x), *dx))


@jax.custom_vjp
def relu_of_sum(x: Array) -> Array:
    """`jax.nn.relu` of a sum of images, whose gradient looks at the result instead of at the sum.

    The result is kept for the next layer, the sum for nothing else: to make it again takes all that it was made of.
    Differentiable in reverse mode.
    """
    return jax.nn.relu(x)


def _relu_of_sum_forward(x: Array) -> tuple[Array, Array]:
    y = jax.nn.relu(x)
    # Without a barrier a GPU's compiler makes it again from the sum; on CPUs barriers do nothing, and TPUs need none.
    y = lax.platform_dependent(y, cuda=lax.optimization_barrier, default=lambda y: y)
    return y, stored(y)


relu_of_sum.defvjp(_relu_of_sum_forward, lambda y, g: (jnp.where(y > 0, g, 0),))


def global_average_pool(x: Array) -> Array:
    """Mean over the image, in float32: [B, H, W, C] -> [B, C] float32."""
    return jnp.mean(x, axis=(1, 2), dtype=jnp.float32)


def uniform_init(fan_in: int) -> Callable[..., Array]:
    """PyTorch's default for weights and biases: uniform in +-1 / sqrt(fan_in)."""
    bound = fan_in**-0.5

    def init(key: Array, shape: Sequence[int], dtype: DTypeLike = jnp.float32) -> Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


def dense(features: int, fan_in: int, dtype: DTypeLike) -> nn.Dense:
    """A dense layer with PyTorch's default initialisation."""
    init = uniform_init(fan_in)
    return nn.Dense(features, dtype=dtype, kernel_init=init, bias_init=init, dot_general=_product)


# Multiplications, batch x inputs x outputs, up to which transposing first pays (measured in `benchmarks/README.md`).
_SMALL = 2**20


def _product(x: Array, w: Array, dimensions: lax.DotDimensionNumbers, **options: Any) -> Array:
    """`lax.dot_general` as a dense layer calls it; on CPUs small kernel gradients transpose the inputs beforehand.

    There YNNPACK takes a product only if the factor on the left is not transposed, as the inputs in a gradient are, and
    what is left to XLA's older code runs on one core.
    """
    known = x.ndim == 2 and isinstance(x.shape[0], int)  # exported programs may take any batch
    if not known or dimensions != (((1,), (0,)), ((), ())) or x.size * w.shape[1] > _SMALL:
        return lax.dot_general(x, w, dimensions, **options)

    @jax.custom_jvp
    def product(x: Array, w: Array) -> Array:
        return lax.dot_general(x, w, dimensions, **options)

    def by_kernel(dw: Array, out: Array, x: Array, w: Array) -> Array:
        # Transposed by autodiff this is a product of what is written here on the left. The barrier keeps it there.
        turned = lax.platform_dependent(x, cpu=lambda x: lax.optimization_barrier(x.T), default=lambda x: x.T)
        return lax.dot_general(turned, dw, (((0,), (0,)), ((), ())), **options)

    product.defjvps(lambda dx, out, x, w: lax.dot_general(dx, w, dimensions, **options), by_kernel)
    return product(x, w)


class Conv(nn.Module):
    """Convolution [B, H, W, I] -> [B, h, w, features] with PyTorch's default initialisation.

    Attributes:
        features: output channels.
        size: height and width of the kernel.
        stride: one stride for both directions.
        padding: 'SAME', 'VALID', or the number of zeros on every side.
        use_bias: whether a bias is added.
        kernel_init: another initialisation of the kernel, with which the bias starts at zero.
        pool: side of the tiles of which the largest value is taken; before the bias is added, which gives the same.
        conv: how it is computed; None means `conv_by_platform`.
        dtype: type of the computation and the result; parameters stay float32.
    """

    features: int
    size: int
    stride: int = 1
    padding: str | int = 'VALID'
    use_bias: bool = True
    kernel_init: Callable[..., Array] | None = None
    pool: int = 1
    conv: ConvFn | None = None
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        init = uniform_init(self.size**2 * x.shape[-1])
        kernel = self.param('kernel', self.kernel_init or init, (self.size, self.size, x.shape[-1], self.features))
        bias_init = nn.initializers.zeros if self.kernel_init else init
        padding = self.padding if isinstance(self.padding, str) else [(self.padding, self.padding)] * 2
        x, kernel = x.astype(self.dtype), kernel.astype(self.dtype)
        y = (self.conv or conv_by_platform)(x, kernel, (self.stride, self.stride), padding, dimension_numbers=LAYOUT)
        y = max_pool(y, self.pool) if self.pool > 1 else y
        if self.use_bias:
            # Added in float32 because its gradient is a sum over all pixels, which bfloat16 would cut short.
            y = (y.astype(jnp.float32) + self.param('bias', bias_init, (self.features,))).astype(self.dtype)
        return y


EPS = 1e-5


class BatchNorm(nn.Module):
    """Batch normalisation over the real rows of [B, ..., C], as PyTorch computes it.

    Eps is 1e-5; the running estimate is 0.9 old + 0.1 new and holds the unbiased variance. A batch without a real row
    leaves it alone. Statistics are float32. Both moments of images come from one pass, which loses digits of the
    variance where the mean is hundreds of deviations from the running estimate, as in first steps on inputs that are
    far from zero; those of vectors, [B, C], come from two, which lose none.

    Attributes:
        use_running_average: normalise by the running estimate, for evaluation.
        dtype: type of the result.
    """

    use_running_average: bool = False
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Array, mask: Array | None = None) -> Array:
        """Normalises x; `mask` [B] bool marks the real rows, None means all."""
        channels = (x.shape[-1],)
        running_mean = self.variable('batch_stats', 'mean', jnp.zeros, channels, jnp.float32)
        running_var = self.variable('batch_stats', 'var', jnp.ones, channels, jnp.float32)
        scale = self.param('scale', nn.initializers.ones, channels)
        bias = self.param('bias', nn.initializers.zeros, channels)
        if self.use_running_average:
            inverse = lax.rsqrt(running_var.value + EPS)
            return ((x.astype(jnp.float32) - running_mean.value) * (inverse * scale) + bias).astype(self.dtype)
        keep = jnp.ones(x.shape[0], bool) if mask is None else mask
        y, mean, var, n = _normalise(x, keep, scale, bias, running_mean.value)
        if not self.is_initializing():
            unbiased = var * (n / jnp.maximum(n - 1, 1))
            running_mean.value += jnp.where(n > 0, 0.1, 0.0) * (mean - running_mean.value)
            # A single value has no variance to learn from.
            running_var.value += jnp.where(n > 1, 0.1, 0.0) * (unbiased - running_var.value)
        return y.astype(self.dtype)


@jax.custom_vjp
def _normalise(x: Array, keep: Array, scale: Array, bias: Array, near: Array) -> tuple[Array, ...]:
    """Normalises by the moments of the rows that `keep` marks; also their mean, biased variance and number.

    Both moments come from one pass, as sums of distances and their squares from `near`, a guess of the mean: the nearer
    it is, the fewer digits cancel. Of vectors it is the mean, which costs them nothing. The gradient is written out,
    because it needs half the passes over the images that a derived one takes. Moments are statistics: nothing is
    differentiated through them where they are returned.
    """
    return _normalise_forward(x, keep, scale, bias, near)[0]


def _normalise_forward(
    x: Array, keep: Array, scale: Array, bias: Array, near: Array
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    values, image = x.astype(jnp.float32), tuple(range(1, x.ndim - 1))
    n = jnp.sum(keep, dtype=jnp.float32) * math.prod(x.shape[1:-1])
    kept = keep.reshape(-1, *[1] * (x.ndim - 1))
    if not image:  # so little is read twice at no cost, and few rows may lie far closer together than to any guess
        near = jnp.sum(jnp.where(kept, values, 0), 0) / jnp.maximum(n, 1)
    sums = lax.platform_dependent(values, keep, near, tpu=_sums_of_kept, default=_kept_sums)
    mean, second = (u / jnp.maximum(n, 1) for u in sums)
    var = jnp.maximum(second - jnp.where(n > 0, mean - near, 0) ** 2, 0)
    inverse = lax.rsqrt(var + EPS)
    y = (values - mean) * (inverse * scale) + bias
    return (y, mean, var, n), (x, kept, scale, mean, inverse, n)


def _kept_sums(x: Array, keep: Array, near: Array) -> tuple[Array, Array]:
    """Sums over the kept rows of x and of its squared distances from `near`, [C] each.

    Rows are left out after the sums over their images, and the two sums share nothing: so no array as large as x comes
    between it and them.
    """
    image = tuple(range(1, x.ndim - 1))
    first, second = (jnp.sum(jnp.where(keep[:, None], jnp.sum(u, image), 0), 0) for u in (x, (x - near) ** 2))
    return first, second


def _sums_of_kept(x: Array, keep: Array, near: Array) -> tuple[Array, Array]:
    """The same in fewer operations, each of which takes a TPU its time."""
    kept = keep.reshape(-1, *[1] * (x.ndim - 1))
    first, second = (jnp.sum(jnp.where(kept, u, 0), tuple(range(x.ndim - 1))) for u in (x, (x - near) ** 2))
    return first, second


def _normalise_backward(
    residual: tuple[Array, ...], gradients: tuple[Array, ...]
) -> tuple[Array, None, Array, Array, None]:
    x, kept, scale, mean, inverse, n = residual
    g, axes = gradients[0], tuple(range(x.ndim - 1))
    values = x.astype(jnp.float32)
    # Where the mean is spread over images in several places, the CPU's compiler writes it out as large as they are.
    near = lax.platform_dependent(mean, cpu=lax.optimization_barrier, default=lambda mean: mean)
    d_bias, d_scale = jnp.sum(g, axes), -jnp.sum(g * (near - values), axes) * inverse
    apart = values - mean
    # What goes by way of the moments, which only kept rows enter.
    through = (d_bias + apart * (inverse * d_scale)) / jnp.maximum(n, 1)
    dx = (g - jnp.where(kept, through, 0)) * (inverse * scale)
    return dx.astype(x.dtype), None, d_scale, d_bias, None


_normalise.defvjp(_normalise_forward, _normalise_backward)
