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
    width = jax.eval_shape(predict, shard.x[:1]).shape[-1]
    if width != classes:
        raise ValueError(
            f'the model tells {width} classes apart and the data have {classes}: give both the same number'
        )
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
    if not isinstance(y, jax.core.Tracer):
        low, high = np.min(labels := np.asarray(y)), np.max(labels)
        if low < 0 or high >= num_classes:
            raise ValueError(f'test labels must lie in [0, {num_classes}), not in [{low}, {high}]')
    return _generic(algorithm, state, x, y, num_classes, batch_size)


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def _generic(algorithm: Algorithm, state: State, x: Array, y: Array, num_classes: int, batch_size: int) -> Array:
    shard = Shard(x, y, jnp.arange(len(y)), jnp.int32(len(y)), jnp.zeros(num_classes, jnp.int32))
    return confusion(lambda x: algorithm.predict(state.server, None, x), shard, batch_size)


@functools.partial(jax.jit, static_argnums=0, static_argnames=('personal', 'batch_size'))
def per_client(
    algorithm: Algorithm,
    state: State,
    data: FederatedData,
    *,
    personal: bool = True,
    allowed: Array | None = None,
    batch_size: int = 256,
) -> Array:
    """Counts [K, C, C] of each client's model on its own rows of `data`, such as its local test split.

    Args:
      algorithm: what predicts.
      state: its state.
      data: as many clients as the state has; a client without examples gets a table of zeros.
      personal: whether clients use their own models or all the generic one.
      allowed: [K, C], which classes a client may predict at all, such as `train.counts > 0`; every one by default.
      batch_size: examples at a time.

    Raises:
      ValueError: if the model and the data have other numbers of classes, or the state and the data of clients.
    """
    for what, found in (('the state has', state.clients), ('`allowed` has rows for', allowed)):
        sizes = {len(u) for u in jax.tree.leaves(found)} - {data.num_clients}
        if sizes:
            raise ValueError(f'{what} {sizes.pop()} clients, and the data have {data.num_clients}')

    def one(args: tuple[Array, Array, Array | None]) -> Array:
        i, client, known = args

        def predict(x: Array) -> Array:
            logits = algorithm.predict(state.server, client if personal else None, x)
            return logits if known is None else jnp.where(known, logits, -jnp.inf)

        return confusion(predict, data.shard(i), batch_size)

    return jax.lax.map(one, (jnp.arange(data.num_clients), state.clients, allowed))


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

    With `data.class_weights` these are the personalised accuracies PM(V) and PM(L) of FedNH (Dai et al., AAAI 2023) on
    their balanced test set. On an unbalanced one classes still count by their weights alone, as in FedLoGe.
    """
    weights = jnp.where(jnp.sum(counts, axis=-1) > 0, weights, 0.0)
    total = jnp.sum(weights, axis=-1)
    return jnp.sum(weights * class_accuracy(counts), axis=-1) / jnp.where(total > 0, total, 1.0)


def groups(counts: Array) -> Array:
    """Whether a class has many (0), medium (1) or few (2) training examples: `[..., C] -> [..., C]` int32.

    From the largest class down, 'many' are those up to the one with which three quarters of the examples are reached,
    'medium' those up to 95 %, as in FedLoGe (Xiao et al., ICLR 2024). Rows of [K, C] counts are grouped each by itself.
    """
    counts = jnp.asarray(counts)
    order = jnp.argsort(-counts, axis=-1)
    ordered = jnp.take_along_axis(counts, order, axis=-1)
    before = jnp.cumsum(ordered, axis=-1) - ordered
    total = jnp.sum(counts, axis=-1, keepdims=True)
    group = (4 * before >= 3 * total).astype(jnp.int32) + (20 * before >= 19 * total)
    return jnp.take_along_axis(group, jnp.argsort(order, axis=-1), axis=-1)


def by_group(values: Array, groups: Array) -> Array:
    """Sums `values [..., C]` over the classes of each of `groups`: many, medium, few, `[..., 3]`."""
    return jnp.sum(values[..., None] * jax.nn.one_hot(groups, 3, dtype=values.dtype), axis=-2)


def group_accuracy(counts: Array, groups: Array) -> Array:
    """Accuracy of tables `[..., C, C]` over the test examples of each of `groups [..., C]`: `[..., 3]`, 0 without any.

    Accuracies of clients by their own groups are to be averaged over those that have any, with
    `over(group_accuracy(tables, g), by_group(tables.sum(-1), g) > 0)`.
    """
    hits = by_group(jnp.diagonal(counts, axis1=-2, axis2=-1), groups)
    return hits / jnp.maximum(by_group(jnp.sum(counts, axis=-1), groups), 1).astype(jnp.float32)


def class_f1(counts: Array) -> Array:
    """F1 score of each class, `[..., C, C] -> [..., C]`: `2 hits / (examples + predictions)`; 0 without either."""
    met = jnp.sum(counts, axis=-1) + jnp.sum(counts, axis=-2)
    return 2.0 * jnp.diagonal(counts, axis1=-2, axis2=-1) / jnp.maximum(met, 1).astype(jnp.float32)


def macro_f1(counts: Array) -> Array:
    """Mean F1 score over the classes that a table holds or predicts: `[..., C, C] -> [...]`."""
    met = jnp.sum(counts, axis=-1) + jnp.sum(counts, axis=-2) > 0
    return jnp.sum(class_f1(counts), axis=-1) / jnp.maximum(jnp.sum(met, axis=-1), 1)


def weighted_f1(counts: Array) -> Array:
    """Mean F1 score weighted by the examples of each true class: `[..., C, C] -> [...]`."""
    support = jnp.sum(counts, axis=-1)
    total = jnp.maximum(jnp.sum(support, axis=-1), 1).astype(jnp.float32)
    return jnp.sum(support * class_f1(counts), axis=-1) / total


class Over(NamedTuple):
    """Mean and standard deviation of a number over the clients that count."""

    mean: Array
    std: Array  # of the population


def over(values: Array, weight: Array) -> Over:
    """Sums up `values [K, ...]` over clients; those of weight 0, or False, are left out, whatever their value.

    Args:
      values: one number for each client, or several.
      weight: as `values` or [K], such as `data.size`, or whether a client counts.
    """
    weight = jnp.expand_dims(weight, range(weight.ndim, values.ndim)).astype(jnp.float32)
    share = weight / jnp.maximum(jnp.sum(weight, axis=0), jnp.finfo(jnp.float32).tiny)
    values = jnp.where(weight > 0, values, 0.0)
    mean = jnp.sum(share * values, axis=0)
    return Over(mean, jnp.sqrt(jnp.sum(share * jnp.square(values - mean), axis=0)))


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
    low = jnp.nanpercentile(jnp.where(tested, values, jnp.nan), 10)
    return OverClients(*over(values, tested), accuracy(jnp.sum(counts, axis=0)), low)
