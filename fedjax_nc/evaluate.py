"""Evaluation: count once which class was taken for which; every reported accuracy is a weighting of the counts.

A table of counts is `[C, C]`: row = true class, column = predicted class. The two functions that run a model compile
themselves, once for each algorithm and shape.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_nc.base import Algorithm, Array, FederatedData, Shard, State
from fedjax_nc.local import batch_at, full_batches


def confusion(predict: Callable[[Array], Array], shard: Shard, batch_size: int = 256) -> Array:
    """Counts [C, C] int32 of `predict: x [B, ...] -> logits [B, C]` over the examples of one shard."""
    classes = shard.counts.shape[0]
    b = min(batch_size, shard.index.shape[0])
    rows = full_batches(shard.index, b)

    def step(s: Array, table: Array) -> Array:
        batch = batch_at(s, rows, shard, b)
        guess = jnp.argmax(predict(batch.x), axis=-1)
        return table.at[batch.y, guess].add(batch.mask.astype(jnp.int32))

    return jax.lax.fori_loop(0, -(-shard.size // b), step, jnp.zeros((classes, classes), jnp.int32))


def generic(algorithm: Algorithm, state: State, x: Array, y: Array, num_classes: int, batch_size: int = 256) -> Array:
    """Counts [C, C] of the generic model on a test set `x [n, ...]`, `y [n]` int.

    Raises:
      ValueError: if the set is empty, its lengths differ, or a label is not in [0, C).
    """
    if len(x) != len(y) or len(y) == 0:
        raise ValueError(f'a test set needs one label for each example, not {len(y)} for {len(x)}')
    if not isinstance(y, jax.core.Tracer) and (np.min(y) < 0 or np.max(y) >= num_classes):
        raise ValueError(f'test labels must lie in [0, {num_classes}), not in [{np.min(y)}, {np.max(y)}]')
    return _generic(algorithm, state, x, y, num_classes, batch_size)


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def _generic(algorithm: Algorithm, state: State, x: Array, y: Array, num_classes: int, batch_size: int) -> Array:
    shard = Shard(x, y, jnp.arange(len(y)), jnp.int32(len(y)), jnp.zeros(num_classes, jnp.int32))
    return confusion(lambda x: algorithm.predict(state.server, None, x), shard, batch_size)


@functools.partial(jax.jit, static_argnums=0, static_argnames=('personal', 'batch_size'))
def per_client(
    algorithm: Algorithm, state: State, data: FederatedData, *, personal: bool = True, batch_size: int = 256
) -> Array:
    """Counts [K, C, C] of each client's model on its own rows of `data`, such as its local test split.

    Args:
      algorithm: what predicts.
      state: its state.
      data: as many clients as the state has; a client without examples gets a table of zeros.
      personal: whether clients use their own models or all the generic one.
      batch_size: examples at a time.
    """

    def one(args: tuple[Array, Array]) -> Array:
        i, client = args
        model = client if personal else None
        return confusion(lambda x: algorithm.predict(state.server, model, x), data.shard(i), batch_size)

    return jax.lax.map(one, (jnp.arange(data.num_clients), state.clients))


def accuracy(counts: Array) -> Array:
    """Share of correct predictions of tables `[..., C, C]`; 0 for an empty table."""
    total = jnp.sum(counts, axis=(-2, -1))
    return jnp.trace(counts, axis1=-2, axis2=-1) / jnp.maximum(total, 1).astype(jnp.float32)


def class_accuracy(counts: Array) -> Array:
    """Accuracy of each true class, `[..., C, C] -> [..., C]`; 0 for a class without examples."""
    total = jnp.sum(counts, axis=-1)
    return jnp.diagonal(counts, axis1=-2, axis2=-1) / jnp.maximum(total, 1).astype(jnp.float32)


def weighted_accuracy(counts: Array, weights: Array) -> Array:
    """Class accuracies weighted by `weights [..., C]` over the classes that the table holds: `[..., C, C] -> [...]`.

    With `data.class_weights` these are the personalised accuracies PM(V) and PM(L) of FedNH (Dai et al., AAAI 2023).
    """
    weights = jnp.where(jnp.sum(counts, axis=-1) > 0, weights, 0.0)
    total = jnp.sum(weights, axis=-1)
    return jnp.sum(weights * class_accuracy(counts), axis=-1) / jnp.where(total > 0, total, 1.0)


class OverClients(NamedTuple):
    """Accuracies of a population; clients without test examples are left out."""

    mean: Array
    std: Array  # population standard deviation
    pooled: Array  # weighted by numbers of test examples
    low: Array  # 10th percentile


def over_clients(counts: Array) -> OverClients:
    """Sums up tables [K, C, C] of all clients."""
    tested = jnp.sum(counts, axis=(-2, -1)) > 0
    values = accuracy(counts)
    n = jnp.maximum(jnp.sum(tested), 1)
    mean = jnp.sum(jnp.where(tested, values, 0.0)) / n
    std = jnp.sqrt(jnp.sum(jnp.where(tested, jnp.square(values - mean), 0.0)) / n)
    low = jnp.nanpercentile(jnp.where(tested, values, jnp.nan), 10)
    return OverClients(mean, std, accuracy(jnp.sum(counts, axis=0)), low)
