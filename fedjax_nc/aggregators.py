"""Aggregators: how the messages of a cohort become one.

Almost every method is a sum over clients, so messages are added chunk by chunk and never kept: the memory of one model,
whatever the size of the cohort. `stacked` is for those that must see all messages at once.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path

from fedjax_nc import checks, tree
from fedjax_nc.base import Aggregator, Array, Tree


def weighted_sum(messages: Tree, weights: Array) -> Tree:
    """`sum_i weights_i messages_i` over the leading axis of `messages [m, ...]` by `weights [m]`, in float32."""
    return jax.tree.map(lambda u: jnp.tensordot(weights, u.astype(jnp.float32), 1, precision='highest'), messages)


def weighted_mean(weigh: Callable[[Array], Array]) -> Aggregator:
    """Mean, in float32, with a function of the clients' sizes as weights; zero when nobody holds data.

    Args:
      weigh: from numbers of examples [m] float32 to weights [m]; 0 must stay 0. `mean` and `uniform` are made with it.
    """

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

    rows: Array  #: [C, D] float32
    weight: Array  #: [C], 0 for a class of which nothing is known; its row does not count


def _class_mean() -> Aggregator:
    def partial(messages: ClassRows, weights: Array, slots: Array, cohort: int) -> ClassRows:
        weight = messages.weight.astype(jnp.float32) * jnp.sign(weights)[:, None]
        rows = jnp.where(weight[..., None] > 0, messages.rows, 0.0)
        return ClassRows(jnp.einsum('kc,kcd->cd', weight, rows, precision='highest'), jnp.sum(weight, axis=0))

    def finish(summed: ClassRows) -> ClassRows:
        return summed._replace(rows=summed.rows / jnp.where(summed.weight > 0, summed.weight, 1.0)[:, None])

    return Aggregator(partial, finish)


class_mean = _class_mean()
"""Mean of the clients' `ClassRows`, each class by its own weights; weight 0 where no client of the cohort knows it."""


def pooled_stats() -> Aggregator:
    """Means BatchNorm statistics as those of the pooled examples.

    `mean = sum w_k m_k` and `var = sum w_k (v_k + m_k^2) - mean^2` for every pair of leaves called 'mean' and 'var', as
    flax does, linen and nnx; `w_k` are shares of examples. All else is averaged as `mean` does. In float32 a variance
    loses its digits where means are hundreds of times as large as deviations.

    A round with it raises ValueError for statistics without such a pair, as haiku and equinox have them.
    """

    def moments(stats: Tree, sign: float) -> Tree:
        leaves = {keystr(path, simple=True, separator='.'): leaf for path, leaf in tree_leaves_with_path(stats)}
        pairs = {name: f'{name[:-3]}mean' for name in leaves if re.fullmatch(r'(.*\.)?var', name)}
        pairs = {var: mean for var, mean in pairs.items() if mean in leaves}
        if leaves and not pairs:
            raise ValueError(f"pooled_stats needs leaves 'mean' and 'var', as of flax: take mean for {sorted(leaves)}")

        def moved(path: Any, leaf: Array) -> Array:
            name = keystr(path, simple=True, separator='.')
            if name not in pairs:
                return leaf
            leaf, at = (u.astype(jnp.float32) for u in (leaf, leaves[pairs[name]]))
            return jnp.maximum(leaf + sign * jnp.square(at), 0.0)  # rounding may leave it below

        return tree_map_with_path(moved, stats)

    return Aggregator(
        partial=lambda messages, *rest: mean.partial(moments(messages, 1.0), *rest),
        finish=lambda total: moments(mean.finish(total), -1.0),
    )


def by_field(**aggregators: Aggregator) -> Aggregator:
    """Aggregates each field of a NamedTuple message by its own aggregator; the aggregate is a dict of the fields.

    Fields that `aggregators` does not name are dropped.

    Raises:
      ValueError: in a round, for messages that lack a field.
    """

    def partial(messages: Any, *rest: Any) -> Tree:
        if lacking := [name for name in aggregators if not hasattr(messages, name)]:
            raise ValueError(
                f'messages must be a NamedTuple with the fields {", ".join(aggregators)}, such as fedavg.Message; '
                f'{type(messages).__name__} has no {", ".join(lacking)}'
            )
        return {name: a.partial(getattr(messages, name), *rest) for name, a in aggregators.items()}

    def finish(total: Tree) -> Tree:
        return {name: a.finish(total[name]) for name, a in aggregators.items()}

    return Aggregator(partial, finish)


def stacked(reduce: Callable[[Tree, Array], Tree]) -> Aggregator:
    """Hands all messages of the cohort to `reduce(messages [M, ...], weights [M])`.

    Messages come in float32, whole numbers as they were sent. Rows of weight 0 belong to nobody and must be ignored by
    `reduce`, and may be more than the cohort has clients. Costs M times the memory of a message.

    Raises:
      ValueError: for what is no such function.
    """
    checks.called('reduce', reduce, 'messages, weights', 'coordinate_median, or what trimmed_mean(0.1) makes, is')

    def partial(messages: Tree, weights: Array, slots: Array, cohort: int) -> Tree:
        def place(u: Array) -> Array:
            kept = u.dtype if jnp.issubdtype(u.dtype, jnp.integer) else jnp.float32
            return jnp.zeros((cohort, *u.shape[1:]), kept).at[slots].set(u.astype(kept))

        return jax.tree.map(place, messages), place(weights)

    return Aggregator(partial, lambda total: reduce(*total))


def _ascending(u: Array, weights: Array) -> Array:
    """`u [M, ...]` sorted over clients, each coordinate by itself; rows of nobody come last.

    A value that is not a number counts as infinitely large.
    """
    keep = jnp.expand_dims(weights > 0, range(1, u.ndim)) & ~jnp.isnan(u)
    return jnp.sort(jnp.where(keep, u, jnp.inf), axis=0)


def coordinate_median(messages: Tree, weights: Array) -> Tree:
    """Median over clients of each coordinate; use as `stacked(coordinate_median)`. (Yin et al., ICML 2018.)

    Clients count the same, whatever their size. `messages [M, ...]` and `weights [M]` are what `stacked` hands over;
    the result has no leading axis, and is 0 where nobody holds examples.
    """
    live = jnp.sum(weights > 0)

    def median(u: Array) -> Array:
        ordered = _ascending(u, weights)
        low, high = (jnp.take(ordered, i, axis=0, mode='clip') for i in ((live - 1) // 2, live // 2))
        return jnp.where(live > 0, 0.5 * (low + high), 0.0)

    return jax.tree.map(median, messages)


def trimmed_mean(share: float) -> Callable[[Tree, Array], Tree]:
    """Mean over clients of each coordinate without its smallest and largest values. (Yin et al., ICML 2018.)

    Of n clients that hold examples, `floor(share n)` are left out at either end. Use as `stacked(trimmed_mean(0.1))`.

    Args:
      share: of the clients, from 0, the unweighted mean, to below 0.5, which would be the median.

    Returns:
      `(messages [M, ...], weights [M]) -> mean`, for `stacked`.

    Raises:
      ValueError: for another share.
    """
    checks.number('share', share, high=0.5, open_high=True, advice='coordinate_median trims all but the middle')

    def reduce(messages: Tree, weights: Array) -> Tree:
        live = jnp.sum(weights > 0)
        # By a table, because 0.3 * 10 in float32 may be below 3.
        cut = jnp.array([int(share * n + 1e-9) for n in range(len(weights) + 1)])[live]
        rank = jnp.arange(len(weights))
        inside = (rank >= cut) & (rank < live - cut)

        def mean(u: Array) -> Array:
            kept = jnp.where(jnp.expand_dims(inside, range(1, u.ndim)), _ascending(u, weights), 0.0)
            return jnp.sum(kept, axis=0) / jnp.maximum(jnp.sum(inside), 1)

        return jax.tree.map(mean, messages)

    return reduce


def krum(byzantine: int, select: int = 1) -> Callable[[Tree, Array], Tree]:
    """The message that lies closest to its neighbours, or the mean of a few such. (Blanchard et al., NeurIPS 2017.)

    A client's score is the sum of squared distances, over the whole message, to its `n - byzantine - 2` closest others
    of the n clients that hold examples; the `select` clients of lowest score are averaged, which is Multi-Krum, but no
    more than `n - byzantine` of them. Use as `stacked(krum(2))`. The proof asks for `n >= 2 byzantine + 3`; where n is
    smaller, one neighbour is looked at. In FedAvg it judges parameters alone; give `aggregate_stats` a robust
    aggregator too where there is BatchNorm.

    Args:
      byzantine: how many clients may send anything.
      select: how many messages are averaged.

    Returns:
      `(messages [M, ...], weights [M]) -> mean`, for `stacked`.

    Raises:
      ValueError: if `byzantine` is negative or `select` below 1.
    """
    checks.whole('byzantine', byzantine, 0)
    checks.whole('select', select)

    def reduce(messages: Tree, weights: Array) -> Tree:
        live, everyone = weights > 0, jnp.arange(len(weights))
        n = jnp.sum(live)
        floats = [u.astype(jnp.float32) for u in jax.tree.leaves(messages)]

        def distances(i: Array) -> Array:
            # Differences, because products would lose the digits of messages that agree.
            parts = [jnp.sum(jnp.square(u - u[i]).reshape(len(u), -1), axis=1) for u in floats]
            return jnp.where(live & (everyone != i), jnp.nan_to_num(sum(parts), nan=jnp.inf), jnp.inf)

        ordered = jnp.sort(jax.lax.map(distances, everyone), axis=1)
        near = everyone < jnp.minimum(jnp.maximum(n - byzantine - 2, 1), n - 1)
        score = jnp.where(live, jnp.sum(jnp.where(near, ordered, 0.0), axis=1), jnp.inf)
        whole = tree.finite_rows(messages)
        order = jnp.lexsort((score, ~whole, ~live))[:select]
        chosen = live[order] & (everyone[:select] < jnp.maximum(n - byzantine, 1))

        def mean(u: Array) -> Array:
            kept = jnp.where(jnp.expand_dims(chosen, range(1, u.ndim)), u[order], 0.0)
            return jnp.sum(kept, axis=0) / jnp.maximum(jnp.sum(chosen), 1)

        return jax.tree.map(mean, messages)

    return reduce
