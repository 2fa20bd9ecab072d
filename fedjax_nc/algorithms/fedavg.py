"""FedAvg, and what most other methods are made of.

Communication-Efficient Learning of Deep Networks from Decentralized Data.
McMahan, Moore, Ramage, Hampson, Agüera y Arcas. AISTATS 2017. https://arxiv.org/abs/1602.05629

Client k trains the model `theta` on its own examples and sends `delta_k = theta_k - theta`; the server moves by the
mean of the deltas weighted by numbers of examples. With another server optimizer, which sees `-mean` as a gradient,
it is FedOpt (Reddi et al., ICLR 2021. https://arxiv.org/abs/2003.00295).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_nc import aggregators, checks, tree
from fedjax_nc.base import (
    Aggregate,
    Aggregator,
    Algorithm,
    Array,
    Batch,
    FederatedData,
    Info,
    Objective,
    Shard,
    Tree,
    Variables,
)
from fedjax_nc.local import ClientOptimizer, Plan, checked, local_sgd
from fedjax_nc.objective import freezing
from fedjax_nc.objective import predict as logits

Penalty = Callable[[Variables, Array, Batch, Any, Tree], Array]
"""(variables, features, batch, server, client) -> scalar added to the local loss."""


class Server(NamedTuple):
    """The server state of FedAvg, and of the methods built on it."""

    variables: Variables  #: the generic model
    opt: Tree  #: state of the server's optimizer; () where there is none
    round: Array  #: [] int32, rounds done: the next one's number
    extra: Any = ()  #: whatever a method built on FedAvg must remember


class Message(NamedTuple):
    """What a client sends."""

    delta: Tree  #: change of the trained parameters, by their top-level names
    stats: Tree  #: running statistics at the end


def trained_model(server: Server, message: Any) -> Variables:
    """The model with which a client ended its local work.

    Args:
      server: from which it began: a `Server`, or another state with its `variables`.
      message: what it sent: a `Message`, or another that holds one in a field called `base`, however deep.

    Returns:
      The server's variables with the parameters that the client moved and its running statistics.

    Raises:
      ValueError: for a method whose clients send no model.
    """
    while not isinstance(message, Message):
        if not hasattr(message, 'base'):
            raise ValueError('clients of this method send no model: if they have any, it is their state')
        message = message.base
    v = server.variables
    moved = tree.add({name: v.params[name] for name in message.delta}, message.delta)
    return v._replace(params={**v.params, **moved}, stats=message.stats)


def moved_parts(value: Tree) -> set[str]:
    """Names of the top-level parameters that `Aggregate.value` moves, whatever holds FedAvg's in an entry 'base'.

    Raises:
      ValueError: where it moves none.
    """
    while 'delta' not in value:
        if 'base' not in value:
            raise ValueError('this method works on a model that clients send: use a base that has one, such as fedprox')
        value = value['base']
    return set(value['delta'])


def checked_parts(parts: Sequence[str] | None) -> None:
    """Raises ValueError for `parts` that name nothing."""
    if parts is not None and not parts:
        raise ValueError("parts must name what is trained, such as ('body',), or be None for all")


def checked_penalty(penalty: Any) -> None:
    """Raises ValueError for a penalty that is neither a function of such arguments nor None."""
    if penalty is not None:
        checks.called('penalty', penalty, 'variables, features, batch, server, client', 'fedprox.proximal(0.1)')


def refuse_penalty(method: str, kwargs: Mapping[str, Any]) -> None:
    """Refuses a penalty where a method has one of its own, or can have none.

    Args:
      method: its name.
      kwargs: the arguments that it hands on to FedAvg.

    Raises:
      ValueError: for a `penalty` among them.
    """
    if 'penalty' in kwargs:
        raise ValueError(
            f'{method} takes no penalty beside its own work: add the term to the loss of the task, as '
            'objective.with_term(task, term) does'
        )


def penalised(loss: Array, penalty: Penalty | None, *args: Any) -> Array:
    """A loss with what a penalty adds to it, called with `args`.

    Raises:
      ValueError: if that is no number.
    """
    if penalty is None:
        return loss
    term = penalty(*args)
    checks.number('what penalty returns', term, -math.inf, finite=False)
    return loss + term


def plain_server(server: Server) -> Server:
    """The first state of a base, as it is, for methods that need all of it to be FedAvg's.

    Raises:
      ValueError: if the base remembers more.
    """
    extra = getattr(server, 'extra', ())
    if jax.tree.leaves(extra):
        kind = type(extra).__name__
        raise ValueError(
            f'this method has no room for what its base remembers, {kind}: use one such as fedavg or fedprox'
        )
    return server


def plain_message(message: Any) -> Message:
    """The message of a base, as it is, for methods that change what of it travels.

    Raises:
      ValueError: if it holds more than FedAvg's, which would no longer fit.
    """
    if not isinstance(message, Message):
        sent = sorted(getattr(message, '_fields', ())) or 'nothing'
        raise ValueError(
            f'this method changes what clients send, and its base sends {sent}: '
            'use one whose messages are those of FedAvg, such as fedprox'
        )
    return message


def algorithm(
    objective: Objective,
    client_opt: ClientOptimizer,
    *,
    plan: Plan = Plan(),  # noqa: B008
    server_opt: optax.GradientTransformation | None = None,
    aggregate: Aggregator = aggregators.mean,
    aggregate_stats: Aggregator = aggregators.mean,
    parts: Sequence[str] | None = None,
    penalty: Penalty | None = None,
    persist_momentum: bool = False,
) -> Algorithm:
    """Federated averaging.

    Args:
      objective: model, head and loss.
      client_opt: from the round's number to a client's optimizer, such as `local.sgd(0.04)`.
      plan: batch size and local epochs.
      server_opt: optimizer that follows the pseudo-gradient `-mean(delta)`; by default SGD of rate 1, plain averaging.
      aggregate: how deltas are joined.
      aggregate_stats: how BatchNorm statistics are joined; or `aggregators.pooled_stats()`.
      parts: names of the top-level parameters to train, such as `('body',)`; all by default. The others neither move
        nor travel, and a body among them runs in evaluation mode.
      penalty: a term added to the local loss, see `Penalty`.
      persist_momentum: whether a client's optimizer state outlives the round (as in the released code of FedETF). It
        becomes client state.

    Returns:
      An `Algorithm` whose server state is a `Server` and whose clients send a `Message`. Client state is `()`, or with
      `persist_momentum` the state of the client's optimizer. All predictions are those of the generic model.

    Raises:
      ValueError: for an objective, plan, optimizers, penalty or aggregators that are none, or do not join models, or
        `parts` without a name; on `init`, for a name in `parts` that no parameters have; in the first round, for a
        penalty that is no number.

    Example:
      >>> import jax
      >>> from fedjax_nc import heads, local, losses, models, objective, simulate, testing
      >>> from fedjax_nc.algorithms import fedavg
      >>> clients = testing.clients()
      >>> task = objective.objective(models.from_flax(models.MLP((16,))), heads.linear(), losses.cross_entropy)
      >>> algorithm = fedavg.algorithm(task, local.sgd(0.1), plan=local.Plan(batch_size=16, epochs=1))
      >>> state = simulate.init(algorithm, jax.random.key(0), clients)
      >>> algorithm.predict(state.server, None, clients.x[:3]).shape  # the generic model's logits
      (3, 5)
      >>> _, message, info = algorithm.client(jax.random.key(1), state.server, (), clients.shard(0))
      >>> message.delta['head']['w'].shape, int(info.examples) == int(clients.size[0])
      ((16, 5), True)
    """
    checks.kind('objective', objective, Objective)
    checks.optimizer('client_opt', client_opt)
    checked('plan', plan)
    checks.flags(persist_momentum=persist_momentum)
    checked_parts(parts)
    if server_opt is not None:
        checks.transformation('server_opt', server_opt)
    for name, value in (('aggregate', aggregate), ('aggregate_stats', aggregate_stats)):
        if not isinstance(value, Aggregator) or value in (aggregators.class_mean, aggregators.nothing):
            raise ValueError(
                f'{name} must be an Aggregator of models, such as aggregators.mean, or aggregators.stacked(...) around '
                'a function of all messages'
            )
    checked_penalty(penalty)
    follow = server_opt or optax.sgd(1.0)

    def init(key: Array, data: FederatedData) -> Server:
        v = objective.init(key, data)
        trained = tree.split(v.params, parts)[0]
        checks.steps('client_opt', client_opt(jnp.int32(0)), trained)
        if server_opt is not None:
            checks.steps('server_opt', server_opt, trained)
        return Server(v, follow.init(trained), jnp.int32(0))

    def init_client(key: Array, server: Server) -> Tree:
        if not persist_momentum:
            return ()
        return client_opt(server.round).init(tree.split(server.variables.params, parts)[0])

    def client(key: Array, server: Server, client: Tree, shard: Shard) -> tuple[Tree, Message, Info]:
        v = server.variables
        trained, kept = tree.split(v.params, parts)
        task = freezing(objective, trained)

        def loss(params: Tree, stats: Tree, batch: Batch) -> tuple[Array, Tree]:
            u = v._replace(params={**kept, **params}, stats=stats)
            z, stats = task.features(u, batch)
            return penalised(task.loss(u, z, batch), penalty, u, z, batch, server, client), stats

        start = client if persist_momentum else None
        out = local_sgd(key, loss, trained, v.stats, client_opt(server.round), shard, plan, start)
        message = Message(tree.sub(out.params, trained), out.stats)
        return (out.opt_state if persist_momentum else client), message, out.info

    def server(key: Array, server: Server, aggregate: Aggregate) -> Server:
        v = server.variables
        trained, kept = tree.split(v.params, parts)
        gradient = tree.scale(aggregate.value['delta'], -1.0)
        updates, opt = follow.update(gradient, server.opt, trained)
        someone = aggregate.clients > 0
        v = v._replace(
            params={**kept, **tree.where(someone, optax.apply_updates(trained, updates), trained)},
            stats=tree.where(someone, aggregate.value['stats'], v.stats),
        )
        return server._replace(variables=v, opt=tree.where(someone, opt, server.opt), round=server.round + 1)

    def predict(server: Server, client: Tree | None, x: Array) -> Array:
        return logits(objective, server.variables, x)

    joined = aggregators.by_field(delta=aggregate, stats=aggregate_stats)
    return Algorithm(init, init_client, client, joined, server, predict)


UNWEIGHTED = {'aggregate': aggregators.uniform, 'aggregate_stats': aggregators.uniform}
"""Arguments with which every client counts the same, whatever its size."""
