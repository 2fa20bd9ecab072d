"""FedAvg_ETF with global memory vectors: a frozen ETF, and late in training the mean features of each class.

Neural Collapse Inspired Federated Learning with Non-iid Data.
Huang, Xie, Yang, Wang, Lin, Cai. arXiv 2023. https://arxiv.org/abs/2303.16066

Logits are `W^T f(x)` with a frozen simplex ETF `W` of column length `scale`; features are neither projected nor
normalised. From round `warm` on, clients train on `f(x) + alpha mu_y`, where the memory `mu_c` is the mean feature of
class c over the clients of the last round that hold it. With a frozen head this only adds `A[y] = alpha mu_y^T W` to
the logits. Prediction knows no label and uses `f(x)` alone.

A client sends the means of its features by class and, when they are weighted by examples, its label counts.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_nc import aggregators, checks, classwise, heads, losses, tree
from fedjax_nc.aggregators import ClassRows
from fedjax_nc.algorithms import fedavg
from fedjax_nc.base import (
    Aggregate,
    Algorithm,
    Array,
    Head,
    Info,
    Model,
    Shard,
    Tree,
)
from fedjax_nc.local import ClientOptimizer, Plan, featurize
from fedjax_nc.memory import remember, remembering, tallying
from fedjax_nc.objective import objective


class Message(NamedTuple):
    """What a client sends."""

    base: Any  #: what it sends under the base algorithm
    means: ClassRows  #: mean features [C, D] and weights [C], float32: counts, or 1 if held; all 0 before `collect`


def algorithm(
    model: Model,
    client_opt: ClientOptimizer,
    *,
    warm: Array | int,
    alpha: Array | float = 0.1,
    collect: Array | int | None = None,
    scale: float = 1.0,
    mu_norm: str = 'present',
    mu_weight: str = 'client',
    mu_ema: Array | float = 0.0,
    features: str = 'final',
    head: Head | None = None,
    plan: Plan = Plan(64, 2),  # noqa: B008
    base: Callable[..., Algorithm] = fedavg.algorithm,
    **kwargs: Any,
) -> Algorithm:
    """Federated training with a frozen ETF and memory vectors.

    Args:
      model: feature extractor with at least C-1 features.
      client_opt: published: `local.sgd(0.03)`.
      warm: rounds before the memory is used; the paper advises more than half of all, and 0.9 of them where clients
        hold two classes each.
      alpha: weight of the memory; 0 is FedAvg with an ETF. The paper's 0.5 to 1 belong to `mu_norm='selected'`.
      collect: rounds before the memory is collected; 20 before `warm` by default, so that every class is met. The
        paper's algorithm begins one before.
      scale: length of the ETF's columns.
      mu_norm: 'present' divides a class's sum of client means by the clients that hold it; 'selected', the paper's
        letter, by all clients of the cohort that hold examples, which shrinks the memory of classes that few hold.
      mu_weight: 'client' gives each holder one vote, 'sample' one for each example.
      mu_ema: inertia of a memory that was seen before.
      features: 'final' takes them from the trained local model in evaluation mode, at the cost of one more pass;
        'online' from the last local epoch as it trains, as the paper's algorithm does. The sums then travel in `stats`,
        and the task of later stages is `memory.remembering(memory.tallying(task, plan.epochs))`.
      head: another head, such as `heads.linear(bias=False)` for memory without ETF: its weights learn from the memory.
      plan: batch size and local epochs.
      base: the algorithm that trains it: a factory that takes an objective and an optimizer.
      **kwargs: as for `base`; clients count alike but for `aggregate` and `aggregate_stats`.

    Returns:
      An `Algorithm` with the states of `base`, whose clients send a `Message`. `variables.fixed` has the head's own in
      'head' and a `memory.Memory` in 'memory'.

    Raises:
      ValueError: for an unknown option, a number out of range, or 'selected' with 'sample', which the paper does not
        define.
    """
    for name, value, known in (
        ('mu_norm', mu_norm, ('present', 'selected')),
        ('mu_weight', mu_weight, ('client', 'sample')),
        ('features', features, ('final', 'online')),
    ):
        if value not in known:
            raise ValueError(f'{name} must be {known[0]!r} or {known[1]!r}, not {value!r}')
    if (mu_norm, mu_weight) == ('selected', 'sample'):
        raise ValueError("mu_norm='selected' divides by clients: it needs mu_weight='client'")
    for name, rounds in (('warm', warm), ('collect', collect)):
        if rounds is not None:
            checks.whole(name, rounds, 0)
    checks.number('alpha', alpha)
    checks.number('mu_ema', mu_ema, high=1)
    first = jnp.maximum(warm - 20, 0) if collect is None else collect
    head = head or heads.etf(scale=scale, learn_scale=False, project=False, unit_features=False)
    plain = objective(model, head, losses.cross_entropy)
    online = features == 'online'
    task = remembering(tallying(plain, plan.epochs) if online else plain)
    inner = base(task, client_opt, plan=plan, **{**fedavg.UNWEIGHTED, **kwargs})

    def client(key: Array, server: fedavg.Server, client: Tree, shard: Shard) -> tuple[Tree, Message, Info]:
        client, message, info = inner.client(key, server, client, shard)
        v = fedavg.trained_model(server, message)
        mu = v.fixed['memory'].mu

        def sums() -> ClassRows:
            if online:
                return ClassRows(*v.stats['tally'])
            own = featurize(lambda batch: task.features(v, batch)[0], shard, plan.batch_size)
            return ClassRows(*classwise.sums(own.x, own.y, classwise.real_rows(own), len(mu)))

        empty = ClassRows(jnp.zeros_like(mu), jnp.zeros(len(mu), jnp.float32))
        total, count = jax.lax.cond(server.round >= first, sums, lambda: empty)
        means = total / jnp.maximum(count, 1.0)[:, None]
        weight = count if mu_weight == 'sample' else jnp.sign(count)
        return client, Message(message, ClassRows(means, weight)), info

    def server(key: Array, server: fedavg.Server, aggregate: Aggregate) -> fedavg.Server:
        server = inner.server(key, server, aggregate._replace(value=aggregate.value['base']))
        v = server.variables
        new = aggregate.value['means']
        share = new.weight / jnp.maximum(aggregate.clients, 1.0) if mu_norm == 'selected' else jnp.sign(new.weight)
        memory = remember(v.fixed['memory'], new._replace(rows=new.rows * share[:, None]), mu_ema)
        memory = memory._replace(alpha=jnp.where(server.round >= warm, alpha, 0.0).astype(jnp.float32))
        v = v._replace(fixed={**v.fixed, 'memory': memory})
        if online:
            v = v._replace(stats={**tree.zeros(v.stats), 'model': v.stats['model']})
        return server._replace(variables=v)

    joined = aggregators.by_field(base=inner.aggregate, means=aggregators.class_mean)
    return inner._replace(client=client, aggregate=joined, server=server)
