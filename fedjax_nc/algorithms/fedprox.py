"""FedProx: FedAvg with a quadratic anchor to the received model.

Federated Optimization in Heterogeneous Networks.
Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith. MLSys 2020. https://arxiv.org/abs/1812.06127 (Equation 2)
"""

from typing import Any

from fedjax_nc import tree
from fedjax_nc.algorithms import fedavg
from fedjax_nc.base import Algorithm, Array, Batch, Objective, Tree, Variables
from fedjax_nc.local import ClientOptimizer


def algorithm(objective: Objective, client_opt: ClientOptimizer, *, mu: Array | float, **kwargs: Any) -> Algorithm:
    """FedAvg whose clients minimise `loss + mu/2 ||theta_k - theta||^2`.

    Args:
      objective: model, head and loss.
      client_opt: from the round's number to a client's optimizer.
      mu: strength of the anchor; 0 is FedAvg.
      **kwargs: as for `fedavg.algorithm`.
    """

    return fedavg.algorithm(objective, client_opt, penalty=proximal(mu), **kwargs)


def proximal(mu: Array | float) -> fedavg.Penalty:
    """The anchor alone: `mu/2 ||theta_k - theta||^2`."""

    def penalty(v: Variables, z: Array, batch: Batch, server: fedavg.Server, client: Tree) -> Array:
        return 0.5 * mu * tree.sqdist(v.params, server.variables.params)

    return penalty
