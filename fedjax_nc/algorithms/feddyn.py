"""FedDyn: FedAvg with an anchor that moves until local and global optima agree.

Federated Learning Based on Dynamic Regularization.
Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama. ICLR 2021. https://arxiv.org/abs/2111.04263 (Algorithm 1)

Client k minimises `F_k(y) - <g_k, y> + alpha/2 ||y - theta||^2`, ends at `theta_k` and subtracts
`alpha (theta_k - theta)` from its `g_k`. Stored as `lam_k = -g_k / alpha`, as in the authors' code, that is

    step along  g(y) + alpha (y - theta + lam_k),   lam_k <- lam_k + theta_k - theta
    theta <- 1/|S| sum_S theta_k + 1/N sum_k lam_k

and the paper's server state is `h = -alpha/N sum_k lam_k`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_nc import aggregators, checks, tree
from fedjax_nc.algorithms import fedavg
from fedjax_nc.base import Aggregate, Algorithm, Array, FederatedData, Info, Objective, Shard, Tree
from fedjax_nc.local import ClientOptimizer, clipping


class Dual(NamedTuple):
    """What the server remembers, in the field `extra` of its state."""

    lam: Tree  #: like the trained parameters: the mean of all clients' `lam_k`
    clients: Array  #: [] float32, clients of the population that hold examples
    examples: Any  #: [] float32, examples of the population, with `by_examples`; else ()


def algorithm(
    objective: Objective,
    client_opt: ClientOptimizer,
    *,
    alpha: Array | float = 0.01,
    by_examples: bool = False,
    clip: float | None = None,
    **kwargs: Any,
) -> Algorithm:
    """Federated averaging with dynamic regularization. A client's state is its `lam_k`: K models of memory.

    The server's model is the corrected one, from which the next round starts; in early rounds the mean of the clients'
    models may be better, see `averaged`. N counts the clients that hold examples. All means are plain ones, those of
    BatchNorm statistics too, which have no `lam`.

    Args:
      objective: model, head and loss.
      client_opt: from the round's number to a client's optimizer; published:
        `local.sgd(0.1, 0.0, 1e-3, decay=0.998, clip=10.0)`, which clips after the anchor is added.
      alpha: strength of the anchor.
      by_examples: whether clients are anchored by `alpha / (N p_k)`, where `p_k = n_k / n`, as in the authors' code.
        The objective is then `sum_k p_k F_k`; without, that of the paper, clients count alike.
      clip: norm to which a gradient is scaled down before the anchor is added.
      **kwargs: as for `fedavg.algorithm`, without `aggregate` and `persist_momentum`.

    Returns:
      An `Algorithm` whose server state is a `fedavg.Server` with a `Dual` for `extra`, whose client state is like the
      trained parameters, and whose clients send a `fedavg.Message`.

    Raises:
      ValueError: for an `alpha` or `clip` that is not positive, or an aggregator other than `aggregators.uniform`.
    """
    checks.number('alpha', alpha, open_low=True, advice='without anchor it is fedavg.algorithm')
    checks.flags(by_examples=by_examples)
    if kwargs.get('aggregate', aggregators.uniform) is not aggregators.uniform:
        raise ValueError('FedDyn takes plain means: leave aggregate out, and say by_examples=True to weigh clients')

    def training(opt: ClientOptimizer) -> Algorithm:
        return fedavg.algorithm(objective, opt, persist_momentum=False, **{**fedavg.UNWEIGHTED, **kwargs})

    base, clipped = training(client_opt), clipping(clip)

    def trained(server: fedavg.Server) -> Tree:
        return tree.split(server.variables.params, kwargs.get('parts'))[0]

    def init(key: Array, data: FederatedData) -> fedavg.Server:
        server = base.init(key, data)
        clients, examples = (jnp.sum(u).astype(jnp.float32) for u in (data.size > 0, data.size))
        told = examples if by_examples else ()  # nobody needs to learn it
        return server._replace(extra=Dual(tree.zeros(trained(server)), jnp.maximum(clients, 1.0), told))

    def client(key: Array, server: fedavg.Server, lam: Tree, shard: Shard) -> tuple[Tree, fedavg.Message, Info]:
        dual = server.extra
        strength: Array | float = alpha
        if by_examples:
            share = shard.size * dual.clients / dual.examples  # N p_k
            strength = alpha / jnp.where(share > 0, share, 1.0)
        pull = _anchored(tree.sub(trained(server), lam), strength)
        moved = training(lambda round: optax.chain(clipped, pull, client_opt(round)))
        _, message, info = moved.client(key, server, (), shard)
        return tree.add(lam, message.delta), message, info

    def server(key: Array, server: fedavg.Server, aggregate: Aggregate) -> fedavg.Server:
        dual, delta = server.extra, aggregate.value['delta']
        lam = tree.add(dual.lam, delta, aggregate.clients / dual.clients)
        value = {**aggregate.value, 'delta': tree.add(delta, lam)}
        return base.server(key, server, aggregate._replace(value=value))._replace(extra=dual._replace(lam=lam))

    return base._replace(
        init=init, init_client=lambda key, server: tree.zeros(server.extra.lam), client=client, server=server
    )


def _anchored(anchor: Tree, alpha: Array | float) -> optax.GradientTransformation:
    """Adds the gradient `alpha (y - anchor)` of a quadratic anchor to that of the parameters y."""
    return optax.stateless(
        lambda gradient, params: jax.tree.map(lambda g, y, a: g + alpha * (y - a), gradient, params, anchor)
    )


def averaged(server: fedavg.Server) -> fedavg.Server:
    """The server with the mean of the last cohort's models, which lacks the correction of the model that it had.

    It is for evaluation: training goes on from the corrected model. It holds for the default server optimizer. What it
    takes and returns is the server state of `algorithm`; only the trained parameters differ.
    """
    v, lam = server.variables, server.extra.lam
    mean = tree.sub({name: v.params[name] for name in lam}, lam)
    return server._replace(variables=v._replace(params={**v.params, **mean}))
