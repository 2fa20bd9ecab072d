"""FedRep: private heads that are fitted to the received body before the body is trained below them.

Exploiting Shared Representations for Personalized Federated Learning.
Collins, Hassani, Mokhtari, Shakkottai. ICML 2021. https://arxiv.org/abs/2102.07078

Client k first trains its head on the frozen body, `W_k <- SGD(W_k; theta)`, then the body below the frozen head,
`theta_k <- SGD(theta; W_k)`, and sends `theta_k - theta`. Each has an optimizer of its own, so that neither momentum
nor decay moves what is frozen.
"""

from collections.abc import Callable
from typing import Any

import jax

from fedjax_nc import checks
from fedjax_nc.algorithms import fedavg, fedbn, fedper, finetune
from fedjax_nc.base import Algorithm, Array, Info, Objective, Shard, Tree, Variables
from fedjax_nc.local import ClientOptimizer, Plan, featurize, joined
from fedjax_nc.objective import on_features


def algorithm(
    objective: Objective,
    client_opt: ClientOptimizer,
    *,
    head_opt: ClientOptimizer | None = None,
    head_epochs: int = 10,
    plan: Plan = Plan(64, 5),  # noqa: B008
    base: Callable[..., Algorithm] = fedavg.algorithm,
    **kwargs: Any,
) -> Algorithm:
    """FedPer in two phases. At 10 + 5 epochs a client works three times as long as in FedNH's other baselines.

    The first phase runs the body in evaluation mode, without augmentation, so that features are computed once. Models
    and predictions are those of `fedper.algorithm`; the loss that is reported is that of the second phase.

    Args:
      objective: model, head and loss.
      client_opt: published: `local.sgd(0.01, weight_decay=1e-5, decay=0.99, clip=10.0)` for CIFAR.
      head_opt: optimizer of the first phase; by default the same.
      head_epochs: epochs of the first phase.
      plan: batch size, and epochs of the second phase.
      base: the algorithm that trains the body: FedAvg, or another factory whose messages are FedAvg's.
      **kwargs: as for `base`, but `parts`; clients count alike but for `aggregate` and `aggregate_stats`.

    Returns:
      An `Algorithm` with the server state and messages of `base`, whose client state is a `fedper.Client`.

    Raises:
      ValueError: for `head_epochs` below 1, or a `head_opt` that is none; when clients are made, if the head has no
        parameters, or the base is FedBN.
    """
    checks.kind('objective', objective, Objective)
    checks.whole('head_epochs', head_epochs)
    if head_opt is not None:
        checks.optimizer('head_opt', head_opt)
    inner = base(objective, client_opt, plan=plan, parts=('body',), **{**fedavg.UNWEIGHTED, **kwargs})
    head_plan = plan._replace(epochs=head_epochs)

    def fit(key: Array, server: fedavg.Server, head: Tree, shard: Shard) -> tuple[Tree, Info]:
        v = server.variables

        def put(head: Tree) -> Variables:
            return v._replace(params={**v.params, 'head': head})

        own = featurize(lambda batch: objective.features(v, batch)[0], shard, plan.batch_size)
        opt = (head_opt or client_opt)(server.round)
        v, info = finetune.fit(key, on_features(objective), v, head, put, opt, own, head_plan)
        return v.params['head'], info

    def client(
        key: Array, server: fedavg.Server, client: fedper.Client, shard: Shard
    ) -> tuple[fedper.Client, Any, Info]:
        k_head = jax.random.fold_in(key, plan.epochs)  # the body's training folds in smaller numbers
        head, first = fit(k_head, server, client.head, shard)
        own, message, second = inner.client(key, fedper.holding(server, head), client.own, shard)
        return fedper.Client(own, head), message, joined(first, second)

    private = fedper.private_heads(inner)

    def init_client(key: Array, server: fedavg.Server) -> fedper.Client:
        return fedbn.refused(private.init_client(key, server), 'the first phase of FedRep')

    return private._replace(init_client=init_client, client=client)
