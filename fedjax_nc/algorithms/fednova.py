"""FedNova: FedAvg of normalised local changes, so that more local steps do not weigh more.

Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization.
Wang, Liu, Liang, Joshi, Poor. NeurIPS 2020. https://arxiv.org/abs/2007.07481 (Section 4)

After `tau_k` local steps client k has moved by `delta_k = -eta sum_s a_ks g(y_s)`, where `a_k` depends on the optimizer
alone. The server averages directions and makes one step of an effective length:

    theta <- theta + (sum_k w_k eta t_k) sum_k w_k delta_k / (eta |a_k|_1)

The paper has `|a_k| = tau_k` for SGD, `(tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho)` with momentum rho, and
`(1 - (1 - eta mu)^tau) / (eta mu)` with FedProx's anchor; `t_k = tau_k`, or `|a_k|` with momentum.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_nc import aggregators, tree
from fedjax_nc.algorithms import fedavg, fedprox
from fedjax_nc.base import Aggregator, Algorithm, Array, Info, Objective, Shard, Tree
from fedjax_nc.local import ClientOptimizer


class Message(NamedTuple):
    """What a client sends."""

    base: fedavg.Message  #: change of the model, not normalised yet
    reach: Array  #: [] float32, `eta |a_k|`, how far a constant unit gradient moves a parameter
    free: Array  #: [] float32, eta t_k, how far it would without anchor


def algorithm(
    objective: Objective,
    client_opt: ClientOptimizer,
    *,
    mu: Array | float | None = None,
    aggregate: Aggregator = aggregators.mean,
    **kwargs: Any,
) -> Algorithm:
    """Federated averaging of normalised changes.

    `eta |a_k|` is measured, by steps of the client's own optimizer along a constant gradient, so that it holds for any
    rate, momentum and anchor, also together. The step has the effective length of training without anchor; with
    momentum and anchor together, which the paper does not treat, the released code counts plain steps instead.
    BatchNorm statistics are averaged as they are. A gradient that is clipped together with the anchor, by the clip of
    `local.sgd`, does not move as that measure says, and neither does one with another `penalty`.

    Args:
      objective: model, head and loss.
      client_opt: from the round's number to a client's optimizer, one that treats all parameters alike.
      mu: strength of FedProx's anchor; none by default.
      aggregate: the weights `w_k`.
      **kwargs: as for `fedavg.algorithm`, without `persist_momentum`, and without `penalty` beside `mu`; the paper's
        server momentum is `server_opt=optax.sgd(1.0, momentum)`.

    Returns:
      An `Algorithm` with the states of `fedavg.algorithm`, whose clients send a `Message`.

    Raises:
      ValueError: for a negative `mu`, or as `fedavg.algorithm` does; in the first round, for an optimizer that treats
        parts of a model differently.
    """
    kwargs = {'aggregate': aggregate, **kwargs}
    if mu is None:
        base = fedavg.algorithm(objective, client_opt, persist_momentum=False, **kwargs)
    else:
        base = fedprox.algorithm(objective, client_opt, mu=mu, persist_momentum=False, **kwargs)

    def client(key: Array, server: fedavg.Server, client: Tree, shard: Shard) -> tuple[Tree, Message, Info]:
        client, message, info = base.client(key, server, client, shard)
        opt = client_opt(server.round)
        free = _reach(opt, info.steps)
        return client, Message(message, free if mu is None else _reach(opt, info.steps, mu), free), info

    def partial(messages: Message, *rest: Any) -> Tree:
        direction = jax.vmap(tree.scale)(messages.base.delta, 1.0 / jnp.where(messages.reach > 0, messages.reach, 1.0))
        # As one tree, so that an aggregator that selects clients takes both from the same.
        return base.aggregate.partial(messages.base._replace(delta=(direction, messages.free)), *rest)

    def finish(total: Tree) -> Tree:
        value = base.aggregate.finish(total)
        direction, length = value['delta']
        return {**value, 'delta': tree.scale(direction, length)}

    return base._replace(client=client, aggregate=Aggregator(partial, finish))


def _reach(opt: optax.GradientTransformation, steps: Array, mu: Array | float = 0.0) -> Array:
    """How far `steps` of `opt` move a number along a constant unit gradient, against an anchor: [] float32.

    It is `eta |a|_1`. Weight decay has no part in it, as it counts as gradient; nor has clipping, without an anchor.

    Raises:
      ValueError: for an optimizer that cannot move a lone number, because it treats parts of a model differently.
    """
    push, zero = 2.0**-10, jnp.float32(0)  # too small to be clipped

    def step(s: Array, carry: tuple[Array, Tree]) -> tuple[Array, Tree]:
        x, state = carry
        update, state = opt.update(mu * x - push, state, zero)
        return x + update, state

    try:
        start = opt.init(zero)
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise ValueError('FedNova needs a client optimizer that treats all parameters alike') from error
    x, _ = jax.lax.fori_loop(0, steps, step, (zero, start))
    return x / push
