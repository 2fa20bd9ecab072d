"""Fine-tuning: a stage that gives every client its own copy of the model and trains it on the client's own data.

It is how a method without personal models is given them, by one more local update on every client (the "Personal."
columns of FedETF, Li et al., ICCV 2023).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from fedjax_nc import aggregators, checks, tree
from fedjax_nc.algorithms import fedavg
from fedjax_nc.base import Aggregate, Algorithm, Array, Batch, FederatedData, Info, Objective, Shard, Tree, Variables
from fedjax_nc.local import ClientOptimizer, Plan, checked, local_sgd
from fedjax_nc.objective import freezing
from fedjax_nc.objective import predict as logits

Tune = Callable[[Array, fedavg.Server, Variables, Shard], tuple[Variables, Info]]
"""(key, server, a client's model, its data) -> (the tuned model, info)."""


def algorithm(
    objective: Objective,
    client_opt: ClientOptimizer,
    *,
    plan: Plan = Plan(),  # noqa: B008
    parts: Sequence[str] | None = None,
    penalty: fedavg.Penalty | None = None,
) -> Algorithm:
    """One round of it is `plan.epochs` local epochs on every client.

    Args:
      objective: model, head and loss, which may differ from those of training in the loss.
      client_opt: from the round's number to a client's optimizer.
      plan: batch size and epochs.
      parts: names of the top-level parameters to train; all by default. Without 'body', that runs in evaluation mode.
      penalty: a term added to the local loss, as in `fedavg.algorithm`; it sees the client's first model as its state.

    Returns:
      An `Algorithm` as of `stage`. The client state is the client's model, nothing is sent.

    Raises:
      ValueError: for an objective, optimizer, plan or penalty that is none, or `parts` without a name; in the first
        round, for a name in `parts` that no parameters have, or a penalty that is no number.
    """
    checks.optimizer('client_opt', client_opt)
    checked('plan', plan)
    fedavg.checked_parts(parts)
    fedavg.checked_penalty(penalty)

    def tune(key: Array, server: fedavg.Server, mine: Variables, shard: Shard) -> tuple[Variables, Info]:
        trained, kept = tree.split(mine.params, parts)

        def put(params: Tree) -> Variables:
            return mine._replace(params={**kept, **params})

        def value(v: Variables, z: Array, batch: Batch) -> Array:
            return fedavg.penalised(objective.loss(v, z, batch), penalty, v, z, batch, server, mine)

        task = freezing(objective, trained)._replace(loss=value)
        return fit(key, task, mine, trained, put, client_opt(server.round), shard, plan)

    return stage(objective, tune)


def fit(
    key: Array,
    objective: Objective,
    mine: Variables,
    trained: Tree,
    put: Callable[[Tree], Variables],
    opt: Any,
    shard: Shard,
    plan: Plan,
) -> tuple[Variables, Info]:
    """Trains a part of one client's model.

    Args:
      key: the client's key for this work.
      objective: whose loss is minimised.
      mine: the client's model, of which the running statistics are used here.
      trained: the part, any tree.
      put: from such a part to the whole model with it in its place.
      opt: an optax optimizer, which starts anew.
      shard: the client's data.
      plan: batch size and epochs.

    Returns:
      The model with the part and the running statistics as they are at the end, and the `Info` of the work.

    Raises:
      ValueError: for a plan that is none.
    """

    def loss(part: Tree, stats: Tree, batch: Batch) -> tuple[Array, Tree]:
        v = put(part)._replace(stats=stats)
        z, stats = objective.features(v, batch)
        return objective.loss(v, z, batch), stats

    out = local_sgd(key, loss, trained, mine.stats, opt, shard, plan)
    return put(out.params)._replace(stats=out.stats), out.info


def stage(objective: Objective, tune: Tune) -> Algorithm:
    """A stage in which clients tune their own Variables, send nothing, and the server stands still.

    Args:
      objective: which predicts.
      tune: the work of one client, see `Tune`.

    Returns:
      An `Algorithm` on any server state with a field `variables`, from which clients start; their state is their model.

    Raises:
      ValueError: for an objective that is none.
    """
    checks.kind('objective', objective, Objective)

    def init(key: Array, data: FederatedData) -> fedavg.Server:
        return fedavg.Server(objective.init(key, data), (), jnp.int32(0))

    def client(key: Array, server: fedavg.Server, mine: Variables, shard: Shard) -> tuple[Variables, tuple, Info]:
        mine, info = tune(key, server, mine, shard)
        return mine, (), info

    def server(key: Array, server: fedavg.Server, aggregate: Aggregate) -> fedavg.Server:
        return server

    def predict(server: fedavg.Server, client: Variables | None, x: Array) -> Array:
        return logits(objective, server.variables if client is None else client, x)

    return Algorithm(init, lambda key, server: server.variables, client, aggregators.nothing, server, predict)
