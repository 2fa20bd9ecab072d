"""Aggregators: how the messages of a cohort become one.

Almost every method is a sum over clients, so messages are added chunk by chunk and never kept: the memory of one model,
whatever the size of the cohort. `stacked` is for those that must see all messages at once.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_nc.base import Aggregator, Array, Tree


def weighted_sum(messages: Tree, weights: Array) -> Tree:
    """`sum_i weights_i messages_i` over the leading axis, in float32."""
    return jax.tree.map(lambda u: jnp.tensordot(weights, u.astype(jnp.float32), 1, precision='highest'), messages)


def weighted_mean(weigh: Callable[[Array], Array]) -> Aggregator:
    """Mean with the given function of the clients' sizes as weights; zero when nobody holds data."""

    def partial(messages: Tree, weights: Array, slots: Array, cohort: int) -> Tree:
        w = weigh(weights)
        return weighted_sum(messages, w), jnp.sum(w)

    def finish(total: Tree) -> Tree:
        summed, weight = total
        return jax.tree.map(lambda u: u / jnp.where(weight > 0, weight, 1.0), summed)

    return Aggregator(partial, finish)


mean = weighted_mean(lambda weights: weights)
"""Mean weighted by the clients' numbers of examples."""

uniform = weighted_mean(jnp.sign)
"""Unweighted mean over the clients that hold examples."""

total = Aggregator(
    partial=lambda messages, weights, slots, cohort: weighted_sum(messages, jnp.sign(weights)),
    finish=lambda summed: summed,
)
"""Plain sum over the clients that hold examples."""

nothing = Aggregator(partial=lambda messages, weights, slots, cohort: (), finish=lambda total: ())
"""For stages in which clients send nothing."""


class ClassRows(NamedTuple):
    """What one client, or all together, say about each class."""

    rows: Array  # [C, D]
    weight: Array  # [C], 0 for a class of which nothing is known; its row does not count


def _class_mean() -> Aggregator:
    def partial(messages: ClassRows, weights: Array, slots: Array, cohort: int) -> ClassRows:
        weight = messages.weight.astype(jnp.float32) * jnp.sign(weights)[:, None]
        return ClassRows(jnp.einsum('kc,kcd->cd', weight, messages.rows, precision='highest'), jnp.sum(weight, axis=0))

    def finish(summed: ClassRows) -> ClassRows:
        return summed._replace(rows=summed.rows / jnp.where(summed.weight > 0, summed.weight, 1.0)[:, None])

    return Aggregator(partial, finish)


class_mean = _class_mean()
"""Mean of the clients' `ClassRows`, each class by its own weights; weight 0 where no client of the cohort knows it."""


def pooled_stats() -> Aggregator:
    """Means BatchNorm statistics as those of the pooled examples.

    `mean = sum w_k m_k` and `var = sum w_k (v_k + m_k^2) - mean^2` for every pair of leaves called 'mean' and 'var'.
    """

    def moments(stats: Tree, sign: float) -> Tree:
        if not isinstance(stats, dict):
            return stats
        if set(stats) == {'mean', 'var'}:
            var = stats['var'] + sign * jnp.square(stats['mean'])
            return {'mean': stats['mean'], 'var': jnp.maximum(var, 0.0)}  # rounding may leave it below
        return {name: moments(value, sign) for name, value in stats.items()}

    return Aggregator(
        partial=lambda messages, *rest: mean.partial(moments(messages, 1.0), *rest),
        finish=lambda total: moments(mean.finish(total), -1.0),
    )


def by_field(**aggregators: Aggregator) -> Aggregator:
    """Aggregates each field of a NamedTuple message by its own aggregator; the aggregate is a dict of the fields."""

    def partial(messages: Any, *rest: Any) -> Tree:
        return {name: a.partial(getattr(messages, name), *rest) for name, a in aggregators.items()}

    def finish(total: Tree) -> Tree:
        return {name: a.finish(total[name]) for name, a in aggregators.items()}

    return Aggregator(partial, finish)


def stacked(reduce: Callable[[Tree, Array], Tree]) -> Aggregator:
    """Hands all messages of the cohort to `reduce(messages [M, ...], weights [M])`.

    Rows of weight 0 belong to nobody and must be ignored by `reduce`. Costs M times the memory of a message.
    """

    def partial(messages: Tree, weights: Array, slots: Array, cohort: int) -> Tree:
        def place(u: Array) -> Array:
            return jnp.zeros((cohort, *u.shape[1:]), jnp.float32).at[slots].set(u.astype(jnp.float32))

        return jax.tree.map(place, messages), place(weights)

    return Aggregator(partial, lambda total: reduce(*total))


def coordinate_median(messages: Tree, weights: Array) -> Tree:
    """Median over clients of each coordinate; use as `stacked(coordinate_median)`. (Yin et al., ICML 2018.)"""
    live = jnp.sum(weights > 0)

    def median(u: Array) -> Array:
        keep = jnp.expand_dims(weights > 0, range(1, u.ndim))
        ordered = jnp.sort(jnp.where(keep, u, jnp.inf), axis=0)
        low, high = (jnp.take(ordered, i, axis=0, mode='clip') for i in ((live - 1) // 2, live // 2))
        return jnp.where(live > 0, 0.5 * (low + high), 0.0)

    return jax.tree.map(median, messages)
