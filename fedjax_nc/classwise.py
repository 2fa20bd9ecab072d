"""Statistics of features by class: what a client can say about its examples without sending one.

All work on `z [n, D]`, `y [n]` int labels and `weight [n]`, 0 for rows that do not count, such as padding; a class
without weight has a zero row. Rows that do not count may hold anything, NaN too. Everything is float32.
"""

import jax
import jax.numpy as jnp

from fedjax_nc import checks
from fedjax_nc.base import Array, Shard


def real_rows(shard: Shard) -> Array:
    """Weights [N] float32 of a client's rows: 1 for its examples, 0 for padding."""
    return (jnp.arange(shard.index.shape[0]) < shard.size).astype(jnp.float32)


def sums(z: Array, y: Array, weight: Array, classes: int) -> tuple[Array, Array]:
    """`sum_i w_i z_i` and `sum_i w_i` of each class: [C, D] and [C].

    Args:
      z: features [n, D].
      y: labels [n] int in [0, C).
      weight: weights [n].
      classes: their number C.

    Raises:
      ValueError: as all of this module, for other shapes than [n, D], [n] and [n], or labels that are no integers in
        [0, C), as far as they are known.
    """
    check_rows(z, y, weight, classes)
    share = jax.nn.one_hot(checks.widened(y), classes, dtype=jnp.float32) * weight[:, None]
    z = jnp.where(weight[:, None] > 0, z.astype(jnp.float32), 0.0)
    return jnp.matmul(share.T, z, precision='highest'), jnp.sum(share, axis=0)


def means(z: Array, y: Array, weight: Array, classes: int) -> tuple[Array, Array]:
    """Weighted mean and total weight of each class: [C, D] and [C]. Arguments and errors are those of `sums`."""
    total, count = sums(z, y, weight, classes)
    return total / jnp.where(count > 0, count, 1.0)[:, None], count


def scatter(z: Array, y: Array, weight: Array, mean: Array) -> Array:
    """`sum_i w_i (z_i - m_c)(z_i - m_c)^T` over the examples of each class c around `mean [C, D]`: [C, D, D].

    Products of centred features: the mean of squares less the square of the mean would lose all digits in float32.
    Classes follow each other, so that memory is that of the features and the result. Other arguments and errors are
    those of `sums`: ValueError, for means of another shape too.
    """
    checks.rows('mean', mean)
    check_rows(z, y, weight, len(mean))
    if mean.shape[1] != z.shape[1]:
        raise ValueError(f'features of {z.shape[1]} dimensions have no means {mean.shape}')
    z = z.astype(jnp.float32)

    def of_class(args: tuple[Array, Array]) -> Array:
        c, m = args
        gap = jnp.where((y == c)[:, None] & (weight > 0)[:, None], z - m, 0.0)
        return jnp.matmul((weight[:, None] * gap).T, gap, precision='highest')

    return jax.lax.map(of_class, (jnp.arange(mean.shape[0]), mean))


def check_rows(z: Array, y: Array, weight: Array, classes: int | None = None) -> None:
    """Raises ValueError unless every row of `z [n, D]` has one integer label `y [n]`, in [0, `classes`) where they are
    said, and one `weight [n]`."""
    checks.rows('z', z)
    checks.labels('y', y, len(z), classes)
    checks.rows('weight', weight, 1, len(z))
