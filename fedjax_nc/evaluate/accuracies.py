"""What tables of counts `[..., C, C]` say: accuracies over examples, classes, groups of classes and clients."""

import contextlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_nc import checks
from fedjax_nc.base import Array


def _square(counts: Array) -> Array:
    """Tables `[..., C, C]`, nested lists too. Raises ValueError, as all that reads them does, for another shape."""
    counts = jnp.asarray(counts)
    if jnp.issubdtype(counts.dtype, jnp.floating):
        counts = counts.astype(jnp.float32)  # in 16 bits their sums overflow
    shape = counts.shape
    if len(shape) < 2 or shape[-1] != shape[-2]:
        raise ValueError(f'a table of counts has the shape [..., C, C], not {shape}: see generic and per_client')
    return counts


def _some(total: Array) -> Array:
    """What to divide by, float32: tables may hold shares, too."""
    return jnp.where(total > 0, total, 1).astype(jnp.float32)


@jax.jit
def accuracy(counts: Array) -> Array:
    """Share of correct predictions of tables, `[..., C, C] -> [...]` float32; 0 for an empty table.

    Raises:
      ValueError: as all that reads tables, for another shape.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_nc import evaluate
      >>> float(evaluate.accuracy(jnp.array([[3, 1], [0, 4]])))
      0.875
    """
    counts = _square(counts)
    total = jnp.sum(counts, axis=(-2, -1))
    return jnp.trace(counts, axis1=-2, axis2=-1) / _some(total)


@jax.jit
def class_accuracy(counts: Array) -> Array:
    """Accuracy of each true class, `[..., C, C] -> [..., C]` float32; 0 for a class without examples.

    Raises ValueError for another shape.
    """
    counts = _square(counts)
    total = jnp.sum(counts, axis=-1)
    return jnp.diagonal(counts, axis1=-2, axis2=-1) / _some(total)


@jax.jit
def weighted_accuracy(counts: Array, weights: Array) -> Array:
    """Class accuracies weighted by `weights [..., C]` over the classes that the table holds: `[..., C, C] -> [...]`.

    With `data.class_weights` these are the personalised accuracies PM(V) and PM(L) of FedNH (Dai et al., AAAI 2023) on
    their balanced test set. On an unbalanced one classes still count by their weights alone, as in FedLoGe.

    Args:
      counts: tables [..., C, C].
      weights: at least 0, of any sum; one table may have several, and several tables one.

    Returns:
      [...] float32; 0 where no class that the table holds has a weight.

    Raises:
      ValueError: for shapes that do not go together.
    """
    counts = _square(counts)
    weights = jnp.asarray(weights).astype(jnp.float32)
    _by_class('weights', weights, counts)
    weights = jnp.where(jnp.sum(counts, axis=-1) > 0, weights, 0.0)
    total = jnp.sum(weights, axis=-1)
    return jnp.sum(weights * class_accuracy(counts), axis=-1) / jnp.where(total > 0, total, 1.0)


def _by_class(name: str, values: Array, counts: Array) -> None:
    """Raises ValueError for values `[..., C]` that do not go with the classes of tables `[..., C, C]`."""
    shape, tables = np.shape(values), np.shape(counts)[:-1]
    with contextlib.suppress(ValueError):
        np.broadcast_shapes(shape, tables)
        if shape and shape[-1] == tables[-1]:
            return
    raise ValueError(
        f'{name} {shape} do not go with tables {np.shape(counts)}: the shapes need one entry for each class'
    )


@jax.jit
def groups(counts: Array) -> Array:
    """Whether a class has many (0), medium (1) or few (2) training examples: `[..., C] -> [..., C]` int32.

    From the largest class down, 'many' are those up to the one with which three quarters of the examples are reached,
    'medium' those up to 95 %, as in FedLoGe (Xiao et al., ICLR 2024). `counts [K, C]` are grouped row by row; they may
    be shares.
    """
    counts = jnp.asarray(counts)
    whole = jnp.issubdtype(counts.dtype, jnp.integer)
    # Unsigned ones would wrap below zero, small ones beyond their largest.
    counts = counts.astype(jnp.int32 if whole else jnp.float32)
    order = jnp.argsort(-counts, axis=-1)
    ordered = jnp.take_along_axis(counts, order, axis=-1)
    before = jnp.cumsum(ordered, axis=-1) - ordered
    total = jnp.sum(counts, axis=-1, keepdims=True)
    # Of integers 4 times the total may overflow, and sums of floats are rounded.
    ends = (total - total // n if whole else (1 - 1 / n - 1e-6) * total for n in (4, 20))
    group = sum((before >= end).astype(jnp.int32) for end in ends)
    return jnp.take_along_axis(group, jnp.argsort(order, axis=-1), axis=-1)


def by_group(values: Array, groups: Array) -> Array:
    """Sums `values [..., C]` over the classes of each of `groups [..., C]`: many, medium, few, `[..., 3]`."""
    return jnp.sum(values[..., None] * jax.nn.one_hot(groups, 3, dtype=values.dtype), axis=-2)


@jax.jit
def group_accuracy(counts: Array, groups: Array) -> Array:
    """Accuracy of tables `counts [..., C, C]` over the test examples of each group: `[..., 3]` float32, 0 without any.

    Accuracies of clients by their own groups are to be averaged over those that have any, with
    `over(group_accuracy(tables, g), by_group(tables.sum(-1), g) > 0)`.

    Args:
      counts: tables.
      groups: [..., C], as the function `groups` makes them of counts of training examples.

    Raises:
      ValueError: for shapes that do not go together.
    """
    counts = _square(counts)
    groups = jnp.asarray(groups)
    _by_class('groups', groups, counts)
    hits = by_group(jnp.diagonal(counts, axis1=-2, axis2=-1), groups)
    return hits / _some(by_group(jnp.sum(counts, axis=-1), groups))


@jax.jit
def class_f1(counts: Array) -> Array:
    """F1 score of each class, `[..., C, C] -> [..., C]` float32: `2 hits / (examples + predictions)`; 0 without either.

    Raises ValueError for another shape.
    """
    counts = _square(counts)
    met = jnp.sum(counts, axis=-1) + jnp.sum(counts, axis=-2)
    return 2.0 * jnp.diagonal(counts, axis1=-2, axis2=-1) / _some(met)


@jax.jit
def macro_f1(counts: Array) -> Array:
    """Mean F1 score over the classes that a table holds or predicts: `[..., C, C] -> [...]` float32; 0 if it is empty.

    Raises ValueError for another shape.
    """
    counts = _square(counts)
    met = jnp.sum(counts, axis=-1) + jnp.sum(counts, axis=-2) > 0
    return jnp.sum(class_f1(counts), axis=-1) / jnp.maximum(jnp.sum(met, axis=-1), 1)


@jax.jit
def weighted_f1(counts: Array) -> Array:
    """Mean F1 score weighted by the examples of each true class: `[..., C, C] -> [...]` float32; 0 if there are none.

    Raises ValueError for another shape.
    """
    counts = _square(counts)
    support = jnp.sum(counts, axis=-1)
    return jnp.sum(support * class_f1(counts), axis=-1) / _some(jnp.sum(support, axis=-1))


class Over(NamedTuple):
    """Mean and standard deviation of a number over the clients that count."""

    mean: Array  #: [...] float32
    std: Array  #: [...] float32, of the population


@jax.jit
def over(values: Array, weight: Array) -> Over:
    """Sums up `values [K, ...]` over clients; those of weight 0 or below, or False, are left out, whatever their value.

    Args:
      values: one number for each client, or several.
      weight: as `values` or [K], such as `data.size`, or whether a client counts.

    Returns:
      Mean and standard deviation, of the shape of one client's values; 0 where nobody counts.

    Raises:
      ValueError: for weights of another shape.
    """
    values, weight = jnp.asarray(values), jnp.asarray(weight)
    if weight.ndim == 0 or weight.shape != values.shape[: weight.ndim]:
        raise ValueError(f'weights {weight.shape} do not fit values {values.shape}: give one for each client')
    weight = jnp.maximum(jnp.expand_dims(weight, range(weight.ndim, values.ndim)).astype(jnp.float32), 0.0)
    share = weight / jnp.maximum(jnp.sum(weight, axis=0), jnp.finfo(jnp.float32).tiny)
    values = jnp.where(weight > 0, values, 0.0)
    mean = jnp.sum(share * values, axis=0)
    return Over(mean, jnp.sqrt(jnp.sum(share * jnp.square(values - mean), axis=0)))


class OverClients(NamedTuple):
    """Accuracies of a population; clients without test examples are left out."""

    mean: Array  #: [] float32
    std: Array  #: [] float32, population standard deviation
    pooled: Array  #: [] float32, weighted by numbers of test examples
    low: Array  #: [] float32, 10th percentile


@jax.jit
def over_clients(counts: Array) -> OverClients:
    """Accuracies over a population, of tables `counts [K, C, C]` with one for each client.

    Without any test example `low` is NaN and the others are 0.

    Raises:
      ValueError: for another shape, or no table at all.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_nc import evaluate
      >>> tables = jnp.array([[[4, 0], [0, 0]], [[1, 1], [0, 0]], [[0, 0], [0, 0]]])
      >>> [round(float(u), 3) for u in evaluate.over_clients(tables)]  # mean, std, pooled, low
      [0.75, 0.25, 0.833, 0.55]
    """
    counts = _square(counts)
    checks.rows('tables', counts, 3)
    if not len(counts):
        raise ValueError('there is no client: give a table [C, C] of each')
    tested = jnp.sum(counts, axis=(-2, -1)) > 0
    values = accuracy(counts)
    low = jnp.nanpercentile(jnp.where(tested, values, jnp.nan), 10)
    mean, std = over(values, tested)
    # Floats, because examples of all clients together may be more than integers of 32 bits can count.
    hits, total = (
        jnp.sum(u.astype(jnp.float32)) for u in (jnp.trace(counts, axis1=-2, axis2=-1), jnp.sum(counts, (1, 2)))
    )
    return OverClients(mean, std, hits / _some(total), low)
