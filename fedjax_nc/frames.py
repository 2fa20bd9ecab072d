"""Frames: sets of class vectors that are spread as far as they can be, built once and held still.

A frame `[d, C]` has one column a class.
"""

import jax
import jax.numpy as jnp

from fedjax_nc.base import Array


def normalize(z: Array, eps: float = 1e-6) -> Array:
    """`z` divided by its Euclidean norm over the last axis, in float32; norms below `eps` count as `eps`.

    The clamp inside the root keeps the gradient finite at zero.
    """
    z = z.astype(jnp.float32)
    return z * jax.lax.rsqrt(jnp.maximum(jnp.sum(z * z, axis=-1, keepdims=True), eps**2))


def simplex_etf(key: Array, dim: int, classes: int) -> Array:
    """A random simplex equiangular tight frame: [dim, classes] float32.

    Columns have unit length, add up to zero, and every two of them meet at cosine `-1 / (classes - 1)`. It is
    `sqrt(C / (C-1)) Q H^T` with Haar-distributed orthonormal `Q [d, C-1]` and the Helmert basis `H [C, C-1]` of the
    vectors that sum to zero, and so exists for every `dim >= classes - 1`.

    Raises:
      ValueError: if `classes < 2` or `dim < classes - 1`.
    """
    if classes < 2:
        raise ValueError(f'a simplex ETF needs at least 2 classes, not {classes}')
    if dim < classes - 1:
        raise ValueError(
            f'no simplex ETF of {classes} classes exists in {dim} dimensions: '
            f'choose an ETF dimension of at least {classes - 1}'
        )
    q, r = jnp.linalg.qr(jax.random.normal(key, (dim, classes - 1), jnp.float32))
    q = q * jnp.where(jnp.diag(r) < 0, -1.0, 1.0)
    j = jnp.arange(1, classes, dtype=jnp.float32)
    row = jnp.arange(classes, dtype=jnp.float32)[:, None]
    helmert = jnp.where(row < j, 1.0, jnp.where(row == j, -j, 0.0)) / jnp.sqrt(j * (j + 1))
    return jnp.sqrt(classes / (classes - 1)) * jnp.matmul(q, helmert.T, precision='highest')
