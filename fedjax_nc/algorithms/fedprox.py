"""FedProx: FedAvg with a quadratic anchor to the received model.

Federated Optimization in Heterogeneous Networks.
Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith. MLSys 2020. https://arxiv.org/abs/1812.06127 (Equation 2)
"""

from collections.abc import Sequence
from typing import Any

from fedjax_nc import checks, tree
from fedjax_nc.algorithms import fedavg
from fedjax_nc.base import Algorithm, Array, Batch, Objective, Tree, Variables
from fedjax_nc.local import ClientOptimizer


def algorithm(objective: Objective, client_opt: ClientOptimizer, *, mu: Array | float, **kwargs: Any) -> Algorithm:
    """FedAvg whose clients minimise `loss + mu/2 ||theta_k - theta||^2`.

    Args:
      objective: model, head and loss.
      client_opt: from the round's number to a client's optimizer.
      mu: strength of the anchor; 0 is FedAvg. It is part of the loss: the clip of `local.sgd` limits both together.
      **kwargs: as for `fedavg.algorithm`, without `penalty`.

    Returns:
      An `Algorithm` with the states and messages of `fedavg.algorithm`.

    Raises:
      ValueError: for a negative `mu`, a `penalty`, or as `fedavg.algorithm` does.
    """
    fedavg.refuse_penalty('FedProx', kwargs)
    return fedavg.algorithm(objective, client_opt, penalty=proximal(mu), **kwargs)


def proximal(mu: Array | float, parts: Sequence[str] | None = None) -> fedavg.Penalty:
    """The anchor alone: `mu/2 ||theta_k - theta||^2`, over all parameters or over the named top-level ones.

    With `parts=('head',)` it is the clsprox of CCVR's comparison (Luo et al., NeurIPS 2021).

    Args:
      mu: strength of the anchor.
      parts: names of the top-level parameters that it holds; all by default.

    Returns:
      A penalty [] float32 for `fedavg.algorithm(penalty=...)`.

    Raises:
      ValueError: for a negative `mu`; in the first round, for a name in `parts` that no parameters have.
    """
    checks.number('mu', mu)

    def penalty(v: Variables, z: Array, batch: Batch, server: fedavg.Server, client: Tree) -> Array:
        mine, received = (tree.split(u.params, parts)[0] for u in (v, server.variables))
        return 0.5 * mu * tree.sqdist(mine, received)

    return penalty
