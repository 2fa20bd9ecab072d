"""FedBABU: the body is trained against a head that stays at its random start; clients fine-tune at the end.

FedBABU: Towards Enhanced Representation for Federated Image Classification.
Oh, Kim, Yun. ICLR 2022. https://arxiv.org/abs/2106.06042

Clients minimise the loss of `W h(theta; x)` over theta alone, the server averages theta, and W is W^0 throughout. After
the last round every client trains body and head on its own data, which gives the personal models.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_nc.algorithms import fedavg, finetune, latest
from fedjax_nc.base import Algorithm, Objective, State
from fedjax_nc.local import ClientOptimizer, Plan


def algorithm(
    objective: Objective,
    client_opt: ClientOptimizer,
    *,
    plan: Plan = Plan(64, 5),  # noqa: B008
    base: Callable[..., Algorithm] = fedavg.algorithm,
    **kwargs: Any,
) -> Algorithm:
    """Federated training of the body, to be followed by `personalize`.

    Args:
      objective: model, head and loss. All of `params['head']` is frozen: it neither moves nor travels.
      client_opt: published: `local.sgd(0.01, weight_decay=1e-5, decay=0.99, clip=10.0)` for CIFAR.
      plan: batch size and local epochs.
      base: the algorithm that trains it: a factory that takes an objective, an optimizer and `parts`.
      **kwargs: as for `base`; clients count alike but for `aggregate` and `aggregate_stats`.

    Returns:
      An `Algorithm` with the states and messages of `base`; clients without state predict with the server's model.

    Raises:
      ValueError: as `base` does.
    """
    return base(objective, client_opt, plan=plan, parts=('body',), **{**fedavg.UNWEIGHTED, **kwargs})


def personalize(
    objective: Objective,
    client_opt: ClientOptimizer,
    *,
    plan: Plan = Plan(64, 5),  # noqa: B008
    parts: Sequence[str] | None = None,
) -> Algorithm:
    """The last stage, one round on all clients: fine-tuning from the final body and W^0.

    `simulate.join` begins it with the server's final body, as the method has it; `from_latest` with each client's.

    Args:
      objective: as in training.
      client_opt: that of training, whose rate goes on falling; its momentum starts anew.
      plan: batch size and epochs.
      parts: what is tuned; all by default, `('head',)` for the paper's FedBABU (Head).

    Returns:
      An `Algorithm` as of `finetune.algorithm`. The client state is the client's model, nothing is sent.

    Raises:
      ValueError: for an objective, optimizer or plan that is none.
    """
    return finetune.algorithm(objective, client_opt, plan=plan, parts=parts)


def from_latest(trained: State) -> State:
    """The state with which `personalize` begins in the released code of FedNH: every client's own latest body.

    Returns:
      The server of `trained`, and the clients' models as their states. Arrays are copies.

    Raises:
      ValueError: if training did not keep those: it must have been `latest.keep(fedbabu.algorithm(...))`.
    """
    if not isinstance(trained.clients, latest.Latest):
        raise ValueError('no local models were kept: train with latest.keep(fedbabu.algorithm(...))')
    # Owned buffers, as in simulate.join: a donated stage must not take the trained state with it.
    return jax.tree.map(jnp.array, State(trained.server, trained.clients.variables))
