"""Global memory vectors: the mean feature of each class, added to features in training.

The part of FedAvg_ETF + GMV (arXiv 2303.16066) that any algorithm can take: wrap its objective in `remembering`, and
let its server move `fixed['memory']`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_nc import checks, classwise, tree
from fedjax_nc.aggregators import ClassRows
from fedjax_nc.base import Array, Batch, FederatedData, Objective, Tree, Variables


class Memory(NamedTuple):
    """What the server remembers of the features of each class."""

    mu: Array  #: [C, D] float32 mean features, zero before a class was seen
    seen: Array  #: [C] bool
    alpha: Array  #: [] float32, its weight in the coming round: 0 until it is warm


def remember(memory: Memory, new: ClassRows, inertia: Array | float = 0.0) -> Memory:
    """The memory after a round: new rows where their weight is positive, carried over elsewhere.

    Args:
      memory: before the round; its `alpha` stays.
      new: means of the round, rows [C, D] and weights [C], as `aggregators.class_mean` makes them.
      inertia: what remains of the row of a class that was seen before, in [0, 1].

    Raises:
      ValueError: for another `inertia`.
    """
    checks.number('inertia', inertia, high=1)
    known = new.weight > 0
    keep = jnp.where(memory.seen, inertia, 0.0)[:, None]
    mu = jnp.where(known[:, None], keep * memory.mu + (1 - keep) * new.rows, memory.mu)
    return memory._replace(mu=mu, seen=memory.seen | known)


class Strength(NamedTuple):
    """How much a memory weighs; means over the classes that were seen, 0 if none was."""

    norm: Array  #: [] float32, length of the memory's rows
    margin: Array  #: [] float32, w_c . mu_c, which times alpha is what the memory adds to the true class's logit


def strength(memory: Memory, w: Array) -> Strength:
    """How much `memory` weighs against class vectors `w [D, C]`, over the classes that were seen.

    Those of a frozen frame are in its scale, `fixed['scale'] * fixed['v']`, as logits are `w^T z`. Worth a look each
    round: features are not normalised, and the memory grows with them.
    """
    seen = memory.seen.astype(jnp.float32)
    length = jnp.sqrt(jnp.sum(jnp.square(memory.mu), axis=1))
    margin = jnp.sum(memory.mu * w.T, axis=1)
    return Strength(*(jnp.sum(seen * u) / jnp.maximum(jnp.sum(seen), 1.0) for u in (length, margin)))


def remembering(task: Objective) -> Objective:
    """The same task, trained on features to which the memory of their class is added.

    `fixed` becomes `{'head': the task's own, 'memory': Memory}`; whoever moves the memory is another matter. It begins
    with zeros and `alpha` 0. Features and logits are the task's own, so that predictions do without the memory; the
    loss is that of `z + alpha mu_y`, in float32: the factors of `losses.restricted_softmax` act on what the memory adds
    to the logits, too.

    Raises:
      ValueError: for a `task` that is no Objective.
    """

    checks.kind('task', task, Objective)

    def own(v: Variables) -> Variables:
        return v._replace(fixed=v.fixed['head'])

    def init(key: Array, data: FederatedData) -> Variables:
        v = task.init(key, data)
        z, _ = jax.eval_shape(lambda x: task.features(v, Batch(x)), data.x[:1])
        classes = data.num_classes
        memory = Memory(jnp.zeros((classes, z.shape[-1]), jnp.float32), jnp.zeros(classes, bool), jnp.float32(0))
        return v._replace(fixed={'head': v.fixed, 'memory': memory})

    def loss(v: Variables, z: Array, batch: Batch) -> Array:
        memory = v.fixed['memory']
        return task.loss(own(v), z.astype(jnp.float32) + memory.alpha * memory.mu[batch.y], batch)

    return Objective(
        init=init,
        features=lambda v, batch: task.features(own(v), batch),
        logits=lambda v, z: task.logits(own(v), z),
        loss=loss,
    )


def tallying(task: Objective, epochs: int) -> Objective:
    """The same task, which adds up features by class while it trains in the last of `epochs`.

    The sums pass through training as running statistics do: `stats` becomes `{'model': the task's own, 'visited': [],
    'tally': ClassRows}` with sums [C, D] as rows and numbers of examples [C] as weights, in float32. They begin with
    0 in each client's work, and the server should set them back after each round.

    Args:
      task: the task.
      epochs: those of the plan of local work.

    Raises:
      ValueError: for a `task` that is no Objective, or `epochs` below 1.
    """

    checks.kind('task', task, Objective)
    checks.whole('epochs', epochs)

    def own(v: Variables) -> Variables:
        return v._replace(stats=v.stats['model'])

    def init(key: Array, data: FederatedData) -> Variables:
        v = task.init(key, data)
        z, _ = jax.eval_shape(lambda x: task.features(v, Batch(x)), data.x[:1])
        rows = jnp.zeros((data.num_classes, z.shape[-1]), jnp.float32)
        tally = ClassRows(rows, jnp.zeros(data.num_classes, jnp.float32))
        return v._replace(stats={'model': v.stats, 'visited': jnp.float32(0), 'tally': tally})

    def features(v: Variables, batch: Batch) -> tuple[Array, Tree]:
        z, stats = task.features(own(v), batch)
        new = {**v.stats, 'model': stats}
        if batch.key is not None:  # training
            total = jnp.sum(batch.counts)
            # Statistics that stay with clients come back as their last work left them.
            again = v.stats['visited'] >= epochs * total
            before = (v.stats['visited'], v.stats['tally'])
            visited, tally = tree.where(again, tree.zeros(before), before)
            last = visited >= (epochs - 1) * total
            added = classwise.sums(z, batch.y, (batch.mask & last).astype(jnp.float32), len(batch.counts))
            new |= {'visited': visited + jnp.sum(batch.mask), 'tally': tree.add(tally, ClassRows(*added))}
        return z, new

    return Objective(
        init=init,
        features=features,
        logits=lambda v, z: task.logits(own(v), z),
        loss=lambda v, z, batch: task.loss(own(v), z, batch),
    )
