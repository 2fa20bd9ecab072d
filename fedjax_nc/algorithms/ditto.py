"""Ditto: beside FedAvg, every client has a personal model that is pulled towards the global one.

Ditto: Fair and Robust Federated Learning Through Personalization.
Li, Hu, Beirami, Smith. ICML 2021. https://arxiv.org/abs/2012.04221 (Algorithm 1)

The global model w is trained as if there were no other. The personal model v_k goes on from where it was,

    v <- v - lr (clip(grad F_k(v)) + lambda (v - w)),

with w as the client received it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from fedjax_nc import checks, tree
from fedjax_nc.algorithms import fedavg, fedper, finetune
from fedjax_nc.base import Algorithm, Array, Info, Objective, Shard, Tree, Variables
from fedjax_nc.local import ClientOptimizer, Plan, clipping, joined, sgd
from fedjax_nc.objective import predict as logits


class Client(NamedTuple):
    """What a client keeps."""

    own: Tree  #: what the client keeps under the base algorithm
    personal: Variables  #: v_k


def algorithm(
    objective: Objective,
    client_opt: ClientOptimizer,
    *,
    lam: Array | float = 0.75,
    personal_opt: ClientOptimizer = sgd(0.01, momentum=0.0, weight_decay=0.0, decay=0.99),  # noqa: B008
    personal_epochs: int | None = None,
    clip: float | None = 10.0,
    reference: str = 'received',
    plan: Plan = Plan(64, 5),  # noqa: B008
    base: Callable[..., Algorithm] = fedavg.algorithm,
    **kwargs: Any,
) -> Algorithm:
    """FedAvg, whose generic model does not notice that clients train a second one.

    Personal models are the clients' v_k, trained up to their last participation; all begin with the first global
    model. The loss that is reported is theirs, without the pull.

    Args:
      objective: model, head and loss.
      client_opt: of the global part; published: `local.sgd(0.01, weight_decay=1e-5, decay=0.99, clip=10.0)`.
      lam: lambda, strength of the pull. Steps are stable while `lr * lam < 2`.
      personal_opt: of v_k: it sees the clipped gradient plus the pull, and must not clip again.
      personal_epochs: epochs for v_k; by default those of the plan.
      clip: largest norm of the loss's gradient at v_k; the pull is not clipped. None for no limit.
      reference: the w that v_k is pulled to: 'received', the server's, as in the paper; 'local', the client's freshly
        trained copy of it, as in the released code of FedNH.
      plan: batch size and epochs.
      base: the algorithm of the global part: FedAvg, or another factory whose messages are FedAvg's or hold them.
      **kwargs: as for `base`; clients count alike but for `aggregate` and `aggregate_stats`.

    Returns:
      An `Algorithm` with the server state and messages of `base`, whose client state is a `Client`.

    Raises:
      ValueError: for another `reference`, a negative `lam`, a `clip` that is not positive, or an optimizer or epochs
        that are none; in the first round, with 'local', if the clients of the base send no model.
    """
    checks.number('lam', lam)
    checks.optimizer('personal_opt', personal_opt)
    if personal_epochs is not None:
        checks.whole('personal_epochs', personal_epochs)
    limit = clipping(clip)
    if reference not in ('received', 'local'):
        raise ValueError(f"reference must be 'received' or 'local', not {reference!r}")
    inner = base(objective, client_opt, plan=plan, **{**fedavg.UNWEIGHTED, **kwargs})
    personal_plan = plan if personal_epochs is None else plan._replace(epochs=personal_epochs)

    def init_client(key: Array, server: fedavg.Server) -> Client:
        return Client(inner.init_client(key, server), server.variables)

    def client(key: Array, server: fedavg.Server, client: Client, shard: Shard) -> tuple[Client, Tree, Info]:
        own, message, first = inner.client(key, server, client.own, shard)
        w = server.variables if reference == 'received' else fedper.local_model(server, message, own)
        opt = optax.chain(
            limit,
            _pull(w.params, lam),
            personal_opt(server.round),
        )
        v = client.personal._replace(fixed=server.variables.fixed)  # as prototypes of a base move

        def put(params: Tree) -> Variables:
            return v._replace(params=params)

        k_personal = jax.random.fold_in(key, plan.epochs)  # global training folds in smaller numbers
        v, second = finetune.fit(k_personal, objective, v, v.params, put, opt, shard, personal_plan)
        return Client(own, v), message, joined(first, second)

    def predict(server: fedavg.Server, client: Client | None, x: Array) -> Array:
        if client is None:
            return inner.predict(server, None, x)
        return logits(objective, client.personal, x)

    return inner._replace(init_client=init_client, client=client, predict=predict)


def _pull(w: Tree, lam: Array | float) -> optax.GradientTransformation:
    """Adds `lam (v - w)` to the gradient at v."""
    return optax.stateless(lambda gradient, v: tree.add(gradient, tree.sub(v, w), lam))
