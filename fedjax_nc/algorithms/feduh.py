"""FedUH: FedAvg with a uniform head, FedNH without its prototype update.

Tackling Data Heterogeneity in Federated Learning with Class Prototypes.
Dai, Chen, Li, Heinecke, Sun, Xu. AAAI 2023. https://arxiv.org/abs/2212.02758

Logits are `s W normalize(f(x))` with unit class prototypes `W [C, D]` that are spread uniformly at the start and never
move. Body and scale are averaged without weights.
"""

from collections.abc import Callable
from typing import Any

from fedjax_nc import frames, heads, losses
from fedjax_nc.algorithms import fedavg
from fedjax_nc.base import Algorithm, Model
from fedjax_nc.local import ClientOptimizer, Plan
from fedjax_nc.objective import objective


def algorithm(
    model: Model,
    client_opt: ClientOptimizer,
    *,
    scale: float = 1.0,
    learn_scale: bool = True,
    init: heads.Frame = frames.uniform,
    plan: Plan = Plan(64, 5),  # noqa: B008
    base: Callable[..., Algorithm] = fedavg.algorithm,
    **kwargs: Any,
) -> Algorithm:
    """Federated training against fixed uniform prototypes.

    Args:
      model: feature extractor.
      client_opt: published: `local.sgd(0.01, weight_decay=1e-5, decay=0.99, clip=10.0)` for CIFAR.
      scale: first value of the logit scale. The released code learns it from 1 (20 for ResNet-18); the paper names a
        fixed 30.
      learn_scale: whether the scale is learned and averaged.
      init: how prototypes are spread, `(key, D, C) -> [D, C]`. The released code draws them orthogonal:
        `functools.partial(frames.uniform, method='orthogonal')`.
      plan: batch size and local epochs.
      base: the algorithm that trains it: a factory that takes an objective and an optimizer.
      **kwargs: as for `base`; clients count alike but for `aggregate` and `aggregate_stats`.

    Returns:
      An `Algorithm` with the states and messages of `base`. The prototypes W [C, D] are
      `variables.fixed['w']`.

    Raises:
      ValueError: for a `scale` that is not positive, or as `base` does.
    """
    head = heads.prototypes(scale, learn_scale, init)
    return base(objective(model, head, losses.cross_entropy), client_opt, plan=plan, **{**fedavg.UNWEIGHTED, **kwargs})
