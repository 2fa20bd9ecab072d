"""SCAFFOLD: FedAvg whose local steps are corrected by control variates.

SCAFFOLD: Stochastic Controlled Averaging for Federated Learning.
Karimireddy, Kale, Mohri, Reddi, Stich, Suresh. ICML 2020. https://arxiv.org/abs/1910.06378 (Algorithm 1)

Client k remembers the mean gradient `c_k` of its own data, the server that of all, `c = 1/N sum_k c_k`. A local step
follows `g(y) - c_k + c` instead of the gradient `g(y)`, so that clients do not drift apart. Afterwards, with `tau` the
number of local steps,

    c_k+ = g_k(theta)                                    option I, one more pass over the data
    c_k+ = c_k - c + (theta - theta_k) / (tau eta)       option II
    c <- c + 1/N sum_S (c_k+ - c_k)

For plain SGD option II is the mean `1/tau sum_s g(y_s)` of the gradients met on the way, and that is what is kept here.
Unlike the difference of models it stays right with momentum, weight decay and schedules; with momentum 0.9 the
difference overrates the gradient up to tenfold, and training diverges.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_nc import aggregators, tree
from fedjax_nc.algorithms import fedavg
from fedjax_nc.base import Aggregate, Aggregator, Algorithm, Array, FederatedData, Info, Objective, Shard, Tree
from fedjax_nc.local import ClientOptimizer, Plan, clipping, joined


class Control(NamedTuple):
    """What the server remembers, in the field `extra` of its state."""

    c: Tree  #: like the trained parameters: the mean of all clients' variates
    total: Array  #: [] float32, clients that hold examples, or examples, in the population


class _Met(NamedTuple):
    total: Tree  # gradients times their weights
    weight: Array  # [] float32, the sum of these


class Message(NamedTuple):
    """What a client sends."""

    base: fedavg.Message  #: change of its model
    control: Tree  #: change of the client's variate


Weigh = Callable[[Array], Array | float]
"""From the weight [] float32 met so far to that of the next gradient."""


def algorithm(
    objective: Objective,
    client_opt: ClientOptimizer,
    *,
    option: str = 'II',
    clip: float | None = None,
    aggregate: Aggregator = aggregators.uniform,
    plan: Plan = Plan(),  # noqa: B008
    **kwargs: Any,
) -> Algorithm:
    """Federated averaging with control variates. A client's state is its variate: K models of memory.

    Variates are of the objective's gradient alone: weight decay and momentum come after its correction. N counts the
    clients that hold examples.

    Args:
      objective: model, head and loss.
      client_opt: from the round's number to a client's optimizer; the paper's is `local.sgd(lr, 0.0, 0.0)`.
      option: which variate a client keeps: 'I', the mean over its examples of the gradient at the received model, or
        'II', the mean over the local steps of the gradients met there.
      clip: norm to which a gradient is scaled down before it is corrected and counted; the clip of `local.sgd` acts on
        the corrected one.
      aggregate: how deltas and changes of variates are joined: with `aggregators.uniform` clients count alike, as in
        the paper; with `aggregators.mean` by examples, `c = sum_k n_k c_k / n`. With any other, c moves by what it
        makes of the changes times the cohort's share of the clients, and is their mean only nearly.
      plan: batch size and local epochs.
      **kwargs: as for `fedavg.algorithm`, without `penalty` and `persist_momentum`; the paper's server rate is
        `server_opt=optax.sgd(eta_g)`.

    Returns:
      An `Algorithm` whose server state is a `fedavg.Server` with a `Control` for `extra`, whose client state is like
      the trained parameters, and whose clients send a `Message`.

    Raises:
      ValueError: for another option, a `clip` that is not positive, a `penalty`, or as `fedavg.algorithm` does.
    """
    fedavg.refuse_penalty('SCAFFOLD', kwargs)
    if option not in ('I', 'II'):
        raise ValueError(f"option must be 'I' or 'II', not {option!r}")

    def training(opt: ClientOptimizer, plan: Plan) -> Algorithm:
        return fedavg.algorithm(
            objective, opt, aggregate=aggregate, plan=plan, penalty=None, persist_momentum=True, **kwargs
        )

    base, clipped, by_examples = training(client_opt, plan), clipping(clip), aggregate is aggregators.mean

    def init(key: Array, data: FederatedData) -> fedavg.Server:
        server = base.init(key, data)
        c = tree.zeros(tree.split(server.variables.params, kwargs.get('parts'))[0])
        total = jnp.sum(data.size if by_examples else data.size > 0)
        return server._replace(extra=Control(c, jnp.maximum(total.astype(jnp.float32), 1.0)))

    def work(
        key: Array,
        server: fedavg.Server,
        shard: Shard,
        correction: Tree,
        opt: ClientOptimizer,
        plan: Plan,
        weigh: Weigh,
    ) -> tuple[Tree, fedavg.Message, Info]:
        """Local work under a correction, after the mean of the gradients that it met."""
        corrected = training(lambda round: optax.chain(clipped, _correcting(correction, weigh), opt(round)), plan)
        (_, met, _), message, info = corrected.client(key, server, corrected.init_client(key, server), shard)
        return tree.scale(met.total, 1.0 / jnp.maximum(met.weight, 1.0)), message, info

    def client(key: Array, server: fedavg.Server, client: Tree, shard: Shard) -> tuple[Tree, Message, Info]:
        c = server.extra.c
        new, message, info = work(key, server, shard, tree.sub(c, client), client_opt, plan, lambda met: 1.0)
        if option == 'I':
            b = min(plan.batch_size, shard.index.shape[0])
            k_pass = jax.random.fold_in(key, plan.epochs + 1)  # beyond training's, and those of methods around it
            once, still = plan._replace(epochs=1), lambda round: optax.set_to_zero()
            # The last batch of a pass may be short.
            new, _, first = work(
                k_pass, server, shard, tree.zeros(c), still, once, lambda met: jnp.minimum(b, shard.size - met)
            )
            info = joined(first, info)._replace(steps=info.steps)
        new = tree.where(shard.size > 0, new, client)
        return new, Message(message, tree.sub(new, client)), info

    def server(key: Array, server: fedavg.Server, aggregate: Aggregate) -> fedavg.Server:
        share = (aggregate.weight if by_examples else aggregate.clients) / server.extra.total
        c = tree.add(server.extra.c, aggregate.value['control'], share)
        server = base.server(key, server, aggregate._replace(value=aggregate.value['base']))
        return server._replace(extra=server.extra._replace(c=c))

    return base._replace(
        init=init,
        init_client=lambda key, server: tree.zeros(server.extra.c),
        client=client,
        aggregate=aggregators.by_field(base=base.aggregate, control=aggregate),
        server=server,
    )


def _correcting(correction: Tree, weigh: Weigh) -> optax.GradientTransformation:
    """Adds `correction` to every gradient; its state adds up the gradients that came in."""

    def update(gradient: Tree, met: _Met, params: Tree | None = None) -> tuple[Tree, _Met]:
        w = weigh(met.weight)
        return tree.add(gradient, correction), _Met(tree.add(met.total, gradient, w), met.weight + w)

    return optax.GradientTransformation(lambda params: _Met(tree.zeros(params), jnp.float32(0)), update)
