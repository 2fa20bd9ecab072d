"""FedMMD: a two-stream client, whose features may not drift from those of the received model.

Two-Stream Federated Learning: Reduce the Communication Costs.
Yao, Huang, Sun. VCIP 2018. Extended: https://arxiv.org/abs/1908.05891

Clients minimise `loss + lam MMD^2`, the maximum mean discrepancy between the features of a batch under the model in
training and under the received one, which stands still in evaluation mode. The server averages as in FedAvg.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_nc.algorithms import fedavg
from fedjax_nc.algorithms.moon import Preprocess, prepared, reference, seen
from fedjax_nc.base import Algorithm, Array, Batch, Objective, Tree, Variables
from fedjax_nc.local import ClientOptimizer


def algorithm(
    objective: Objective,
    client_opt: ClientOptimizer,
    *,
    lam: Array | float = 0.01,
    preprocess: Preprocess | None = None,
    **kwargs: Any,
) -> Algorithm:
    """FedAvg with the discrepancy of features as penalty.

    Args:
      objective: model, head and loss.
      client_opt: from the round's number to a client's optimizer.
      lam: weight of the discrepancy; the FedRS benchmark tries 0.01 and 0.001. 0 is FedAvg.
      preprocess: as for `moon.algorithm`, for models that augment.
      **kwargs: as for `fedavg.algorithm`.

    Raises:
      ValueError: for a negative `lam`.
    """
    if isinstance(lam, int | float) and not lam >= 0:
        raise ValueError(f'lam must not be negative: {lam}')

    def penalty(v: Variables, z: Array, batch: Batch, server: fedavg.Server, client: Tree) -> Array:
        received = reference(objective, server.variables, seen(batch, preprocess))
        return lam * mmd(z, received, batch.mask)

    return fedavg.algorithm(prepared(objective, preprocess), client_opt, penalty=penalty, **kwargs)


def mmd(a: Array, b: Array, mask: Array) -> Array:
    """Squared maximum mean discrepancy between the rows of `a [B, D]` and `b [B, D]` where `mask [B]` holds.

    `mean k(a, a) + mean k(b, b) - 2 mean k(a, b)` over all pairs, those of a row with itself included, with the kernel
    `k(u, v) = sum_{i=-2..2} exp(-|u - v|^2 / (2^i s))`. The bandwidth s is the mean of `|u - v|^2` over the pairs of
    different rows of both sets together, and no gradient flows through it. (As in the FedRS benchmark.) Of a single row
    it would be the discrepancy itself, and the force grow without bound as that falls: there the result is 0.
    """
    real = jnp.concatenate([mask, mask]).astype(jnp.float32)
    rows = jnp.where(real[:, None] > 0, jnp.concatenate([a, b]).astype(jnp.float32), 0.0)
    square = jnp.sum(rows * rows, axis=1)
    inner = jnp.matmul(rows, rows.T, precision='highest')
    distance = jnp.maximum(square[:, None] + square - 2.0 * inner, 0.0)
    pairs = real[:, None] * real
    count = jnp.sum(real)
    width = jnp.sum(jax.lax.stop_gradient(distance) * pairs) / jnp.maximum(count * (count - 1.0), 1.0)
    width = jnp.maximum(width, 1e-8)  # all rows may coincide
    kernel = pairs * sum(jnp.exp(-distance / (2.0**i * width)) for i in range(-2, 3))
    sign = jnp.repeat(jnp.array([1.0, -1.0]), len(mask))  # + for pairs within a set, - for those across
    value = sign @ kernel @ sign / jnp.maximum(0.5 * count, 1.0) ** 2
    return jnp.where(count > 2, value, 0.0)
