"""Feature degeneration: what the dimensions do that hardly carry a class.

FedLoGe: Joint Local and Generic Federated Learning under Long-tailed Data.
Xiao, Chen, Liu, Feng, Wu, Liu, Zhou, Yang, Liu. ICLR 2024. https://arxiv.org/abs/2401.08977

The dimensions of a class are sorted by its mean feature, the dominant first, the negligible last. With a dense
classifier the negligible ones scatter widely for their size, with a sparse one much less (Figure 1); and a classifier
can lose its negligible dimensions, but not the dominant ones (Figure 3).
"""

from typing import NamedTuple

import jax.numpy as jnp

from fedjax_nc import checks, classwise
from fedjax_nc.base import Array


class Degeneration(NamedTuple):
    """The dimensions of every class, sorted by its mean feature from the largest to the smallest."""

    order: Array  #: [C, D] int32, the dimensions
    mean: Array  #: [C, D] float32, their means
    relative: Array  #: [C, D] float32, their variance over their squared mean, 0 where that is 0
    top: Array  #: [C] float32, median of `relative` in the upper half
    bottom: Array  #: [C] float32, and in the lower half
    #: [C] float32, 0 for a class without examples, whose rows do not count
    count: Array  # type: ignore[assignment]


def degeneration(z: Array, y: Array, classes: int, weight: Array | None = None) -> Degeneration:
    """Relative variance of each feature within each class, with variances of the population.

    Args:
      z: features [n, D].
      y: labels [n] int in [0, C).
      classes: their number C.
      weight: weights [n], 1 by default.

    Raises:
      ValueError: if there are no two halves of dimensions, for other shapes, or labels that are no integers.
    """
    weight = jnp.ones(y.shape, jnp.float32) if weight is None else weight
    classwise.check_rows(z, y, weight)
    if z.shape[1] < 2:
        raise ValueError(f'{z.shape[1]} dimensions have no two halves: at least 2 are needed')
    mean, count = classwise.means(z, y, weight, classes)
    variance, _ = classwise.means(jnp.square(z.astype(jnp.float32) - mean[y]), y, weight, classes)
    safe = jnp.where(mean == 0, 1.0, mean)
    relative = jnp.where(mean == 0, 0.0, jnp.square(jnp.sqrt(variance) / safe))  # whose square may be no float
    order = jnp.argsort(-mean, axis=1)
    mean, relative = (jnp.take_along_axis(u, order, axis=1) for u in (mean, relative))
    half = z.shape[1] // 2
    top, bottom = (jnp.median(part, axis=1) for part in (relative[:, :half], relative[:, half:]))
    return Degeneration(order, mean, relative, top, bottom, count)


def masked_share(w: Array, order: Array) -> Array:
    """Share of zeros of a sparse classifier `w [D, C]` in the lower half of each class's dimensions: [C].

    To be compared with its sparsity, which is the share of zeros among all: above it where training has put the class
    into the dimensions that its vector sees. `order [C, D]` is that of `degeneration`; float32.

    Raises:
      ValueError: if `order` has another shape.
    """
    _ordered(w, order)
    sorted_zeros = jnp.take_along_axis(w.T == 0, order, axis=1)
    return jnp.mean(sorted_zeros[:, order.shape[1] // 2 :], axis=1, dtype=jnp.float32)


def prune(w: Array, order: Array, share: Array | float, *, dominant: bool = False) -> Array:
    """The classifier `w [D, C]` with a share of each class's dimensions set to zero, `floor(share D)` of them.

    Args:
      w: [D, C].
      order: [C, D], that of `degeneration`.
      share: between 0 and 1; may be traced.
      dominant: whether to prune from the dominant end of the order instead of the negligible one.

    Raises:
      ValueError: if `share` is outside [0, 1], or `order` has another shape.
    """
    _ordered(w, order)
    checks.number('share', share, high=1)
    rank = jnp.argsort(order if dominant else order[:, ::-1], axis=1).T
    return jnp.where(rank < jnp.floor(share * len(w) + 1e-4), 0.0, w)  # 13/22 * 22 is a little less than 13


def _ordered(w: Array, order: Array) -> None:
    if w.ndim != 2 or order.shape != w.T.shape:
        raise ValueError(f'a classifier w [D, C] goes with an order [C, D]; shapes: {w.shape} and {order.shape}')
