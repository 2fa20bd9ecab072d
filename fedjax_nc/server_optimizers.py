"""Server optimizers of the FedOpt family, for `fedavg.algorithm(..., server_opt=fedyogi(1e-2))`.

Adaptive Federated Optimization.
Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan. ICLR 2021. https://arxiv.org/abs/2003.00295
(Algorithm 2)

The server follows the mean of the clients' changes, `Delta`, which it takes for minus a gradient:

    m <- b1 m + (1 - b1) Delta,   theta <- theta + lr m / (sqrt(v) + tau),   v = tau^2 at first

Unlike Adam and Yogi elsewhere there is no correction of the first steps' bias; stock optimizers work too, as other
methods. All are optax transformations, which see the gradient `-Delta`, and whose `lr` may be a schedule by rounds.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_nc import checks
from fedjax_nc.base import Array, Tree

Rate = Array | float | Callable[[Array], Array]
"""A number of at least 0, or an optax schedule, which is given the number of rounds done whose cohort had examples."""


class Moments(NamedTuple):
    """State of the adaptive optimizers; trees of float32 like the parameters."""

    m: Tree  #: moving mean of the gradient, 0 at first
    v: Tree  #: second moments, tau^2 at first


def fedavgm(lr: Rate = 0.1, beta: Array | float = 0.9) -> optax.GradientTransformation:
    """FedAvgM: `m <- beta m + Delta; theta <- theta + lr m`. In the long run it moves by `lr / (1 - beta)` times Delta.

    Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification.
    Hsu, Qi, Brown. arXiv 2019. https://arxiv.org/abs/1909.06335

    Args:
      lr: the server's rate.
      beta: momentum, in [0, 1).

    Raises:
      ValueError: for a negative `lr`, or a `beta` outside [0, 1).
    """
    _within(beta=beta)
    _rate(lr)
    return optax.sgd(lr, momentum=beta)


def fedadagrad(lr: Rate = 1e-2, b1: Array | float = 0.0, tau: Array | float = 1e-3) -> optax.GradientTransformation:
    """FedAdagrad: `v <- v + Delta^2`.

    Args:
      lr: the server's rate; worth tuning between 1e-3 and 1.
      b1: inertia of the mean change, in [0, 1).
      tau: what keeps coordinates that hardly moved from large steps; positive.

    Raises:
      ValueError: for a negative `lr`, a `tau` that is not positive, or a `b1` outside [0, 1).
    """
    return _adaptive(lambda v, square: v + square, lr, b1, tau)


def fedadam(
    lr: Rate = 1e-2, b1: Array | float = 0.9, b2: Array | float = 0.99, tau: Array | float = 1e-3
) -> optax.GradientTransformation:
    """FedAdam: `v <- b2 v + (1 - b2) Delta^2`.

    Args:
      lr: as for `fedadagrad`.
      b1: as for `fedadagrad`.
      b2: inertia of `v`, in [0, 1).
      tau: as for `fedadagrad`.

    Raises:
      ValueError: as `fedadagrad`, and for a `b2` outside [0, 1).
    """
    _within(b2=b2)
    return _adaptive(lambda v, square: b2 * v + (1 - b2) * square, lr, b1, tau)


def fedyogi(
    lr: Rate = 1e-2, b1: Array | float = 0.9, b2: Array | float = 0.99, tau: Array | float = 1e-3
) -> optax.GradientTransformation:
    """FedYogi: `v <- v - (1 - b2) Delta^2 sign(v - Delta^2)`.

    Arguments and errors are those of `fedadam`: ValueError for one out of range.
    """
    _within(b2=b2)
    return _adaptive(lambda v, square: v - (1 - b2) * square * jnp.sign(v - square), lr, b1, tau)


def _rate(lr: Rate) -> None:
    """Raises ValueError for a rate that is neither a schedule nor a number of at least 0."""
    if not callable(lr):
        checks.number('lr', lr)


def _within(**shares: Array | float) -> None:
    """Raises ValueError for a number outside [0, 1)."""
    for name, value in shares.items():
        checks.number(name, value, high=1, open_high=True)


def _adaptive(
    follow: Callable[[Array, Array], Array], lr: Rate, b1: Array | float, tau: Array | float
) -> optax.GradientTransformation:
    """What the adaptive methods share.

    Args:
      follow: `(v, Delta^2) -> v`, for each coordinate.
      lr: the server's rate; worth tuning between 1e-3 and 1.
      b1: inertia of the mean change.
      tau: what keeps coordinates that hardly moved from large steps.

    Raises:
      ValueError: for a negative `lr`, a `tau` that is not positive, or a `b1` outside [0, 1).
    """
    _within(b1=b1)
    _rate(lr)
    checks.number('tau', tau, open_low=True, advice='steps are divided by it where nothing has moved')

    def init(params: Tree) -> Moments:
        m, v = (jax.tree.map(lambda u, c=c: jnp.full(u.shape, c, jnp.float32), params) for c in (0.0, tau**2))
        return Moments(m, v)

    def update(gradient: Tree, state: Moments, params: Tree | None = None) -> tuple[Tree, Moments]:
        m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.m, gradient)
        v = jax.tree.map(lambda v, g: follow(v, jnp.square(g)), state.v, gradient)
        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + tau), m, v), Moments(m, v)

    return optax.chain(optax.GradientTransformation(init, update), optax.scale_by_learning_rate(lr))
