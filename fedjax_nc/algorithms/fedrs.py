"""FedRS: a softmax that spares the classes that a client lacks.

FedRS: Federated Learning with Restricted Softmax for Label Distribution Non-IID Data.
Li, Zhan. KDD 2021. https://doi.org/10.1145/3447548.3467254

Client k multiplies the logits of classes without local examples by `alpha < 1`, so that their class vectors are pushed
away less by examples of others. Only training sees the scaled logits. The server averages as in FedAvg.
"""

import functools
from collections.abc import Callable
from typing import Any

from fedjax_nc import checks, heads, losses
from fedjax_nc.algorithms import fedavg
from fedjax_nc.base import Algorithm, Array, Head, Model
from fedjax_nc.local import ClientOptimizer
from fedjax_nc.objective import objective


def algorithm(
    model: Model,
    client_opt: ClientOptimizer,
    *,
    alpha: Array | float = 0.5,
    soft: bool = False,
    head: Head | None = None,
    base: Callable[..., Algorithm] = fedavg.algorithm,
    **kwargs: Any,
) -> Algorithm:
    """Federated training with the restricted softmax.

    Args:
      model: feature extractor.
      client_opt: from the round's number to a client's optimizer.
      alpha: what the logits of absent classes are multiplied by; 1 is the plain softmax.
      soft: whether the factor grows with a class's count, as in the released code; see `losses.restricted_softmax`.
      head: by default linear without bias, as the restriction is one of `w_c^T z`. Under a frozen one, such as
        `heads.etf()`, it changes the gradient of the features alone.
      base: the algorithm that trains it: a factory that takes an objective and an optimizer.
      **kwargs: as for `base`.

    Returns:
      An `Algorithm` with the states and messages of `base`.

    Raises:
      ValueError: if `alpha` is outside [0, 1].
    """
    checks.number('alpha', alpha, high=1)
    checks.flags(soft=soft)
    restricted = functools.partial(losses.restricted_softmax, alpha=alpha, soft=soft)
    return base(objective(model, head or heads.linear(bias=False), restricted), client_opt, **kwargs)
