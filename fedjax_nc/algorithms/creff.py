"""CReFF: a classifier re-trained on the server with federated features.

Federated Learning on Heterogeneous and Long-Tailed Data via Classifier Re-Training with Federated Features.
Shang, Lu, Huang, Wang. IJCAI 2022. https://arxiv.org/abs/2204.13399

Beside FedAvg, clients send for each class c they hold the gradient of the re-trained head on their features H_c,

    g_c = (softmax(H_c W) - onehot(c))^T H_c / n,

and the server moves m synthetic features F_c of each class until their gradients match the clients' mean, by descent on
`D(A, B) = sum_j 1 - A_j . B_j / (|A_j| |B_j| + 1e-6)` over rows. A fresh head is then trained on all of F, as many
examples of one class as of another, and replaces the averaged one in the generic model.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_nc import aggregators, checks, classwise, heads, losses, tree
from fedjax_nc.aggregators import ClassRows
from fedjax_nc.algorithms import ccvr, fedavg
from fedjax_nc.base import Aggregate, Algorithm, Array, FederatedData, Info, Model, Shard, Tree
from fedjax_nc.local import ClientOptimizer, Plan, checked, featurize, sgd
from fedjax_nc.objective import objective


class Message(NamedTuple):
    """What a client sends."""

    base: Any  #: what it sends under the base algorithm
    #: rows [C, C * D] float32, each g_c [C, D] laid out flat (with a bias D + 1 for D); weights [C], 1 for held classes
    gradients: ClassRows


class Memory(NamedTuple):
    """What the server remembers beside the averaged model."""

    head: Tree  #: the re-trained one, `{'w' [D, C]}`, and 'b' [C] with a bias
    features: Array  #: [C, m, D] float32, F


def algorithm(
    model: Model,
    client_opt: ClientOptimizer,
    *,
    samples: int = 100,
    match_steps: int = 100,
    match_lr: Array | float = 0.01,
    retrain: Plan = Plan(64, 300),  # noqa: B008
    retrain_opt: ClientOptimizer = sgd(0.01, momentum=0.0, weight_decay=0.0),  # noqa: B008
    draw: int = 64,
    repeats: int = 10,
    bias: bool = False,
    augment: bool = False,
    plan: Plan = Plan(64, 5),  # noqa: B008
    base: Callable[..., Algorithm] = fedavg.algorithm,
    **kwargs: Any,
) -> Algorithm:
    """FedAvg with a linear head, whose generic model has the re-trained head instead of the averaged one.

    Personal models are FedAvg's, with averaged or local heads: the latest local ones are `latest.keep(algorithm)`.
    Gradients cost a client C C D floats, and the server's work does not shrink with the cohort.

    Args:
      model: feature extractor.
      client_opt: published: `local.sgd(0.01, weight_decay=1e-5, decay=0.99, clip=10.0)` for CIFAR.
      samples: m, federated features of each class.
      match_steps: steps of descent on the features in each round.
      match_lr: their rate.
      retrain: batch size and epochs of the re-training.
      retrain_opt: its optimizer.
      draw: most examples of a class in one gradient.
      repeats: gradients of each class that a client averages, each of other examples.
      bias: whether heads have one. The released code trained one and then left it out.
      augment: whether gradients are of augmented images, as in the released code; the body is in training mode then,
        which there it is not.
      plan: batch size and local epochs.
      base: the algorithm that trains it: a factory that takes an objective and an optimizer.
      **kwargs: as for `base`; clients count alike but for `aggregate` and `aggregate_stats`.

    Returns:
      An `Algorithm` with the client state of `base`, whose server state is a `fedavg.Server` with a `Memory` for
      `extra`, and whose clients send a `Message`.

    Raises:
      ValueError: if there are no features, draws or repeats, for a negative `match_steps` or `match_lr`, or an
        optimizer or plan that is none; on `init`, if the base remembers more than FedAvg.
    """
    for name, value in (('samples', samples), ('draw', draw), ('repeats', repeats)):
        checks.whole(name, value)
    checks.whole('match_steps', match_steps, 0)
    checks.flags(bias=bias, augment=augment)
    checks.number('match_lr', match_lr)
    checks.optimizer('retrain_opt', retrain_opt)
    checked('retrain', retrain)
    task = objective(model, heads.linear(bias), losses.cross_entropy)
    inner = base(task, client_opt, plan=plan, **{**fedavg.UNWEIGHTED, **kwargs})

    def init(key: Array, data: FederatedData) -> fedavg.Server:
        server = fedavg.plain_server(inner.init(key, data))
        k_head, k_features = jax.random.split(jax.random.fold_in(key, 2))  # 0 and 1 are what training has used
        dim, classes = server.variables.params['head']['w'].shape
        head = heads.dense_init(k_head, dim, classes, bias)
        return server._replace(extra=Memory(head, jax.random.normal(k_features, (classes, samples, dim))))

    def client(key: Array, server: fedavg.Server, client: Tree, shard: Shard) -> tuple[Tree, Message, Info]:
        k_draw, k_images = jax.random.split(jax.random.fold_in(key, plan.epochs))  # training folds in smaller numbers
        v = server.variables
        own = featurize(lambda batch: task.features(v, batch)[0], shard, plan.batch_size, k_images if augment else None)
        weight = _drawn(k_draw, own, draw, repeats)

        def of_class(c: Array) -> Array:
            return _class_gradient(server.extra.head, own.x, own.y, jnp.where(own.y == c, weight, 0.0)).reshape(-1)

        rows = jax.lax.map(of_class, jnp.arange(len(shard.counts)))
        client, message, info = inner.client(key, server, client, shard)
        return client, Message(message, ClassRows(rows, (shard.counts > 0).astype(jnp.float32))), info

    def server(key: Array, server: fedavg.Server, aggregate: Aggregate) -> fedavg.Server:
        k_start, k_order = jax.random.split(key)
        old = server.extra
        features = _matched(old, aggregate.value['gradients'], match_steps, match_lr)
        dim, classes = old.head['w'].shape
        start = heads.dense_init(k_start, dim, classes, bias)
        v = server.variables._replace(params={**server.variables.params, 'head': start})
        opt = retrain_opt(server.round)
        v, _ = ccvr.refit(k_order, task, v, _balanced(features), plan=retrain, opt=opt)
        server = inner.server(key, server, aggregate._replace(value=aggregate.value['base']))
        return server._replace(extra=tree.where(aggregate.clients > 0, Memory(v.params['head'], features), old))

    def predict(server: fedavg.Server, client: Tree | None, x: Array) -> Array:
        v = server.variables
        if client is None:
            server = server._replace(variables=v._replace(params={**v.params, 'head': server.extra.head}))
        return inner.predict(server, client, x)

    joined = aggregators.by_field(base=inner.aggregate, gradients=aggregators.class_mean)
    return inner._replace(init=init, client=client, aggregate=joined, server=server, predict=predict)


def _class_gradient(head: Tree, z: Array, y: Array, weight: Array) -> Array:
    """Gradient of `sum_i weight_i CE(head(z_i), y_i)` by the head: [C, D], with one more column for a bias."""
    logits = heads.dense(head, z)
    error = jax.nn.softmax(logits) - jax.nn.one_hot(y, logits.shape[-1])
    inputs = jnp.pad(z, ((0, 0), (0, 1)), constant_values=1.0) if 'b' in head else z
    return heads.product((weight[:, None] * error).T, inputs)


def _drawn(key: Array, own: Shard, draw: int, repeats: int) -> Array:
    """Weights [N] with which a class's examples enter the mean of gradients on up to `draw` of them, drawn anew."""
    real = classwise.real_rows(own) > 0
    label = jnp.where(real, own.y, len(own.counts))  # padding is a class of its own
    first = jnp.cumsum(own.counts) - own.counts
    take = jnp.minimum(own.counts, draw)

    def once(key: Array) -> Array:
        order = jnp.lexsort((jax.random.uniform(key, label.shape), label))  # class by class, each shuffled
        rank = jnp.zeros_like(label).at[order].set(jnp.arange(len(label), dtype=label.dtype))
        return real & (rank - first[own.y] < draw)

    share = jnp.mean(jax.vmap(once)(jax.random.split(key, repeats)), axis=0)
    return share / jnp.maximum(take, 1)[own.y]


def _row_distance(a: Array, b: Array) -> Array:
    """`sum_j 1 - a_j . b_j / (|a_j| |b_j| + 1e-6)` over rows of `[C, D]`, with a finite gradient at zero."""

    def length(u: Array) -> Array:
        return jnp.sqrt(jnp.maximum(jnp.sum(u * u, axis=-1), 1e-24))

    return jnp.sum(1.0 - jnp.sum(a * b, axis=-1) / (length(a) * length(b) + 1e-6))


def _matched(memory: Memory, real: ClassRows, steps: int, lr: Array | float) -> Array:
    """Federated features after `steps` of descent on the distance of their gradients from `real`'s.

    Those of classes without weight are kept bit for bit.
    """
    classes, samples, _ = memory.features.shape

    def gap(features: Array, c: Array, goal: Array) -> Array:
        y, weight = jnp.full(samples, c), jnp.full(samples, 1 / samples)
        made = _class_gradient(memory.head, features, y, weight)
        return _row_distance(goal.reshape(made.shape), made)

    slope = jax.vmap(jax.grad(gap))

    def step(i: Array, features: Array) -> Array:
        moved = features - lr * slope(features, jnp.arange(classes), real.rows)
        return jnp.where(real.weight[:, None, None] > 0, moved, features)

    return jax.lax.fori_loop(0, steps, step, memory.features)


def _balanced(features: Array) -> Shard:
    """Federated features `[C, m, D]` as a data set."""
    classes, samples, dim = features.shape
    n = classes * samples
    y = jnp.repeat(jnp.arange(classes), samples)
    return Shard(features.reshape(n, dim), y, jnp.arange(n), jnp.int32(n), jnp.full(classes, samples, jnp.int32))
