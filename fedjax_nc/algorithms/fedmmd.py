"""FedMMD: a two-stream client, whose features may not drift from those of the received model.

Two-Stream Federated Learning: Reduce the Communication Costs.
Yao, Huang, Sun. VCIP 2018. Extended: https://arxiv.org/abs/1908.05891

Clients minimise `loss + lam MMD^2`, the maximum mean discrepancy between the features of a batch under the model in
training and under the received one, which stands still in evaluation mode. The server averages as in FedAvg.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_nc import checks
from fedjax_nc.algorithms import fedavg
from fedjax_nc.algorithms.moon import reference
from fedjax_nc.base import Algorithm, Array, Batch, Objective, Tree, Variables
from fedjax_nc.local import ClientOptimizer


def algorithm(
    objective: Objective,
    client_opt: ClientOptimizer,
    *,
    lam: Array | float = 0.01,
    **kwargs: Any,
) -> Algorithm:
    """FedAvg with the discrepancy of features as penalty.

    Args:
      objective: model, head and loss.
      client_opt: from the round's number to a client's optimizer.
      lam: weight of the discrepancy; the FedRS benchmark tries 0.01 and 0.001. 0 is FedAvg.
      **kwargs: as for `fedavg.algorithm`, without `penalty`.

    Returns:
      An `Algorithm` with the states and messages of `fedavg.algorithm`.

    Raises:
      ValueError: for a negative `lam`, a `penalty`, or as `fedavg.algorithm` does.
    """
    fedavg.refuse_penalty('FedMMD', kwargs)
    checks.number('lam', lam)

    def penalty(v: Variables, z: Array, batch: Batch, server: fedavg.Server, client: Tree) -> Array:
        received = reference(objective, server.variables, batch)
        return lam * mmd(z, received, batch.mask)

    return fedavg.algorithm(objective, client_opt, penalty=penalty, **kwargs)


def mmd(a: Array, b: Array, mask: Array) -> Array:
    """Squared maximum mean discrepancy of the rows of `a [B, D]` and `b [B, D]` where `mask [B]` holds: [] float32.

    `mean k(a, a) + mean k(b, b) - 2 mean k(a, b)` over all pairs, those of a row with itself included, with the kernel
    `k(u, v) = sum_{i=-2..2} exp(-|u - v|^2 / (2^i s))`. The bandwidth s is the mean of `|u - v|^2` over the pairs of
    different rows of both sets together, and no gradient flows through it. (As in the FedRS benchmark.)

    Rows of the same example are among these pairs and nearly coincide, which shrinks s by 1 / (2B - 1): by 33 % for two
    rows, by 0.4 % for 128. That is the published formula, and stays. But where the rows within each set coincide, s is
    a multiple of the discrepancy, and the force grows without bound as that falls. So s is at least 1e-4 times the
    mean of `|u|^2`, which batches seldom are below. For rows of length 1 and gaps of 1e-2, 1e-3 and 1e-4, the gradient
    by a common shift of `a` is 484, 302 and 31 long, and never above 832; without the floor 412, 4,116 and 41,160. Of a
    single row s would always be the discrepancy: there the result is 0.
    """
    a, b = (jnp.where(mask[:, None], u, 0).astype(jnp.float32) for u in (a, b))
    pairs = mask[:, None] & mask
    count = jnp.sum(mask, dtype=jnp.float32)
    aa, bb, ab = (jnp.where(pairs, _square_distances(u, v), 0.0) for u, v in ((a, a), (b, b), (a, b)))
    apart = jnp.sum(aa + bb + 2.0 * ab) / jnp.maximum(2.0 * count * (2.0 * count - 1.0), 1.0)
    length = jnp.sum(jnp.square(a) + jnp.square(b)) / jnp.maximum(2.0 * count, 1.0)
    width = jax.lax.stop_gradient(jnp.maximum(apart, _FLOOR * length + 1e-8))  # all rows may be zero

    def kernel(distance: Array) -> Array:
        return sum((jnp.exp(-distance / (2.0**i * width)) for i in range(-2, 3)), jnp.float32(0))

    # Joined pair by pair, because their sums are nearly the same.
    joined = jnp.where(pairs, kernel(aa) + kernel(bb) - 2.0 * kernel(ab), 0.0)
    return jnp.where(count > 1, jnp.sum(joined) / jnp.maximum(count, 1.0) ** 2, 0.0)


_FLOOR = 1e-4
"""Least bandwidth for features of length 1, that of rows 0.01 apart. Batches of 16 and 32 had from 6e-4 (six dense
layers at their random start) to 1.3."""

_BLOCK = 2**18
"""Most differences of features that are traced at once: what `footprint` counts; XLA keeps fewer."""


@jax.custom_vjp
def _square_distances(u: Array, v: Array) -> Array:
    """`|u_i - v_j|^2` of the rows of `u [n, D]` and `v [m, D]`: [n, m].

    Sums of squared differences, and gradients sums of differences: `|u|^2 + |v|^2 - 2 u.v` has no digit left where rows
    nearly coincide, as those of the same example do. Nothing of size n m D is kept.
    """
    return _by_rows(lambda row: jnp.sum(jnp.square(row - v), axis=1), v.size, u)


def _forward(u: Array, v: Array) -> tuple[Array, tuple[Array, Array]]:
    return _square_distances(u, v), (u, v)


def _backward(rows: tuple[Array, Array], slope: Array) -> tuple[Array, Array]:
    def pull(u: Array, v: Array, slope: Array) -> Array:
        return _by_rows(lambda row, s: 2.0 * jnp.sum(s[:, None] * (row - v), axis=0), v.size, u, slope)

    u, v = rows
    return pull(u, v, slope), pull(v, u, slope.T)


_square_distances.defvjp(_forward, _backward)


def _by_rows(fn: Callable[..., Array], size: int, *args: Array) -> Array:
    """`vmap` of a function that makes `size` numbers on its way, in blocks that make `BLOCK`."""
    return jax.lax.map(lambda row: fn(*row), args, batch_size=max(1, _BLOCK // size))
