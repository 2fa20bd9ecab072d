"""Ratio Loss: classes that the server finds neglected weigh more in the next round.

Addressing Class Imbalance in Federated Learning.
Wang, Xu, Wang, Zhu. AAAI 2021. https://arxiv.org/abs/2008.06217

The server holds a few examples of every class. From the model that it has sent out, it trains one copy on each class,
which changes the class vectors by `U_c [D, C]`. Of the entries that rise most for class c, and for no other class move
by more than 80 % of that, it takes

    R_c = | sum U_c | / | sum mean_{p != c} U_p |,

and in the next round clients minimise `-(1 + beta min(R_y, cap)) log p_y`. In the first round they minimise the plain
cross-entropy. The server averages as in FedAvg.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_nc import checks, heads, losses
from fedjax_nc.algorithms import fedavg
from fedjax_nc.base import Aggregate, Algorithm, Array, Batch, FederatedData, Head, Model, Objective, Tree, Variables
from fedjax_nc.data.host import here
from fedjax_nc.local import ClientOptimizer, Plan, local_sgd
from fedjax_nc.objective import masked_mean, objective


def algorithm(
    model: Model,
    client_opt: ClientOptimizer,
    *,
    auxiliary: FederatedData,
    beta: Array | float = 0.1,
    cap: Array | float = 5000.0,
    head: Head | None = None,
    plan: Plan = Plan(),  # noqa: B008
    base: Callable[..., Algorithm] = fedavg.algorithm,
    **kwargs: Any,
) -> Algorithm:
    """Federated training with the Ratio Loss, as in the released code.

    Args:
      model: feature extractor.
      client_opt: from the round's number to an optimizer, that of clients and of the server's copies.
      auxiliary: the server's examples, those of class c as the data of client c: `data.federate(x, y, rows_by_class)`.
        The released code takes 63 of each.
      beta: weight of the ratios; 0 is FedAvg.
      cap: largest ratio. A client's steps are up to `1 + beta cap` times its rate: the released limit goes with rates
        of 0.001, for larger ones take about C, which is what balanced classes have.
      head: one with learned class vectors; by default linear.
      plan: batch size and local epochs, of clients and of the server's copies.
      base: the algorithm that trains it: a factory that takes an objective and an optimizer, on FedAvg's server state.
      **kwargs: as for `base`.

    Returns:
      An `Algorithm` with the states and messages of `base`. `variables.fixed` is that of `weighing`.

    Raises:
      ValueError: if the server's data are not one client a class; on `init`, if they are of other classes than the
        clients', or for a head that holds no learned class vectors; in the first round, if it is not trained; for a
        negative `beta`, or a `cap` that is not positive.
    """
    checks.number('beta', beta)
    checks.number('cap', cap, open_low=True, finite=False)
    checks.optimizer('client_opt', client_opt)
    checks.kind('auxiliary', auxiliary, FederatedData)
    auxiliary = here(auxiliary)
    held = np.asarray(auxiliary.counts)
    if held.shape[0] != held.shape[1] or ((held > 0) != np.eye(len(held), dtype=bool)).any():
        raise ValueError('auxiliary needs one client for each class, holding examples of that class alone')
    plain = objective(model, head or heads.linear(), losses.cross_entropy)
    inner = base(weighing(plain), client_opt, plan=plan, **kwargs)

    def init(key: Array, data: FederatedData) -> fedavg.Server:
        if data.num_classes != len(held):
            raise ValueError(f'the clients hold {data.num_classes} classes and the server {len(held)}')
        server = inner.init(key, data)
        if 'w' not in server.variables.params['head']:
            raise ValueError("Ratio Loss watches params['head']['w'] move: use a head such as heads.linear()")
        return server

    def server(key: Array, server: fedavg.Server, aggregate: Aggregate) -> fedavg.Server:
        if fedavg.moved_parts(aggregate.value) != {'body', 'head'}:
            raise ValueError(
                'Ratio Loss watches a whole model in training: take no `parts`, nor a base that freezes any'
            )
        k_probe, key = jax.random.split(key)
        v = server.variables
        opt = client_opt(server.round)

        def loss(params: Tree, stats: Tree, batch: Batch) -> tuple[Array, Tree]:
            u = Variables(params, stats, v.fixed['head'])
            z, stats = plain.features(u, batch)
            return plain.loss(u, z, batch), stats

        def change(c: Array) -> Array:
            shard = auxiliary.shard(c)
            end = local_sgd(jax.random.fold_in(k_probe, c), loss, v.params, v.stats, opt, shard, plan)
            return end.params['head']['w'] - v.params['head']['w']

        ratio = ratios(jax.lax.map(change, jnp.arange(len(held))))
        weights = 1.0 + beta * jnp.minimum(ratio, cap)
        server = inner.server(key, server, aggregate)
        v = server.variables
        return server._replace(variables=v._replace(fixed={**v.fixed, 'weights': weights}))

    return inner._replace(init=init, server=server)


def ratios(changes: Array) -> Array:
    """How much more each class moves its own entries than others do, R [C] float32, of `changes [C, D, C]`.

    `changes[c]` is what training on class c does to the class vectors. A class whose entries no other moves gets 10,
    and so does one that has no entries of its own.
    """
    classes = len(changes)
    top, size = jnp.argmax(changes, axis=0), jnp.abs(changes)
    mine = jax.nn.one_hot(top, classes, axis=0, dtype=bool)
    rivals = jnp.sum(~mine & (size > 0.8 * jnp.sum(jnp.where(mine, size, 0.0), axis=0)), axis=0)
    picked = mine & (rivals == 0)
    others = (jnp.sum(changes, axis=0) - changes) / (classes - 1)
    own, other = (jnp.abs(jnp.sum(jnp.where(picked, u, 0.0), axis=(1, 2))) for u in (changes, others))
    return jnp.where(other > 0, own / jnp.where(other > 0, other, 1.0), 10.0)


def weighing(task: Objective) -> Objective:
    """The same task with the cross-entropy weighted by class.

    `fixed` becomes `{'head': the task's own, 'weights': [C] float32}`; the weights begin with 1 and are the server's to
    change. The loss is `losses.weighted_cross_entropy` whatever that of `task`.

    Raises:
      ValueError: for a `task` that is no Objective.
    """
    checks.kind('task', task, Objective)

    def own(v: Variables) -> Variables:
        return v._replace(fixed=v.fixed['head'])

    def init(key: Array, data: FederatedData) -> Variables:
        v = task.init(key, data)
        return v._replace(fixed={'head': v.fixed, 'weights': jnp.ones(data.num_classes, jnp.float32)})

    def loss(v: Variables, z: Array, batch: Batch) -> Array:
        weights = v.fixed['weights']
        values = losses.weighted_cross_entropy(task.logits(own(v), z), batch.y, weights=weights)
        return masked_mean(values, batch.mask)

    return Objective(
        init=init,
        features=lambda v, batch: task.features(own(v), batch),
        logits=lambda v, z: task.logits(own(v), z),
        loss=loss,
    )
