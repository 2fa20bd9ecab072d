"""Local: every client trains alone, the lower bound for everything that clients gain from each other.

As run in Tackling Data Heterogeneity in Federated Learning with Class Prototypes.
Dai, Chen, Li, Heinecke, Sun, Xu. AAAI 2023. https://arxiv.org/abs/2212.02758

Client k goes on from its own model in each round, `theta_k <- SGD(theta_k; lr_r)`, and sends nothing. All begin with
the same untrained model; the released code let them begin with the first client's trained one.
"""

from typing import Any, NoReturn

from fedjax_nc.algorithms import fedavg, finetune
from fedjax_nc.base import Aggregate, Algorithm, Array, Objective, Tree, Variables
from fedjax_nc.local import ClientOptimizer, Plan


def algorithm(
    objective: Objective,
    client_opt: ClientOptimizer,
    *,
    plan: Plan = Plan(64, 5),  # noqa: B008
    **kwargs: Any,
) -> Algorithm:
    """Fine-tuning from the untrained model, round after round.

    Rounds are meant for the full cohort, as many as a client of the compared method takes part in on average: 20 for
    200 rounds with a tenth of the clients. The learning rate falls with these rounds. A client's personal model is its
    own, here with no difference between latest and last; there is no generic one.

    Args:
      objective: model, head and loss.
      client_opt: published: `local.sgd(0.01, weight_decay=1e-5, decay=0.99, clip=10.0)` for CIFAR.
      plan: batch size and epochs of a round.
      **kwargs: as for `finetune.algorithm`.

    Returns:
      An `Algorithm` whose server state is a `fedavg.Server` that only counts rounds, and whose client state is the
      client's model; nothing is sent.

    Raises:
      ValueError: for an objective, optimizer or plan that is none; in a prediction, if it is asked for the generic
        model.
    """
    return alone(finetune.algorithm(objective, client_opt, plan=plan, **kwargs))


def alone(stage: Algorithm) -> Algorithm:
    """A stage whose rounds are counted, so that rates can fall, and that has no generic model.

    Args:
      stage: one as of `finetune.stage`.

    Raises:
      ValueError: in a prediction, if it is asked for the generic model.
    """

    def server(key: Array, server: fedavg.Server, aggregate: Aggregate) -> fedavg.Server:
        return server._replace(round=server.round + 1)

    def predict(server: fedavg.Server, client: Variables | None, x: Array) -> Array:
        return refuse() if client is None else stage.predict(server, client, x)

    return stage._replace(server=server, predict=predict)


def refuse(*_: Tree) -> NoReturn:
    """What a method without a generic model answers to those who ask for it.

    Raises:
      ValueError: always.
    """
    raise ValueError('this method has no generic model: ask for those of clients, as evaluate.per_client does')
