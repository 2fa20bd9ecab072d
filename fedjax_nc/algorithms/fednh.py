"""FedNH: class prototypes that start uniform and take on the meaning of their classes.

Tackling Data Heterogeneity in Federated Learning with Class Prototypes.
Dai, Chen, Li, Heinecke, Sun, Xu. AAAI 2023. https://arxiv.org/abs/2212.02758

Training is FedUH's: logits `s W normalize(f(x))` with prototypes `W [C, D]` that do not move during local work. After
it, client k sends the mean of its normalised features of each class, `u_kc`, and the server lets the prototypes follow:

    a_c = sum_k n_kc u_kc / sum_k n_kc,   W_c = normalize(rho W_c + (1 - rho) normalize(a_c)),

and keeps `W_c` exactly where no client of the cohort holds class c.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_nc import aggregators, checks, classwise, frames, heads, losses
from fedjax_nc.aggregators import ClassRows
from fedjax_nc.algorithms import fedavg, fedper
from fedjax_nc.base import Aggregate, Algorithm, Array, Info, Model, Shard, Tree
from fedjax_nc.frames import normalize
from fedjax_nc.local import ClientOptimizer, Plan, featurize
from fedjax_nc.objective import objective


class Message(NamedTuple):
    """What a client sends."""

    base: Any  #: what it sends under the base algorithm
    prototypes: ClassRows  #: class means u_kc [C, D] and what they count [C], float32


def algorithm(
    model: Model,
    client_opt: ClientOptimizer,
    *,
    rho: Array | float = 0.9,
    scale: float = 1.0,
    learn_scale: bool = True,
    init: heads.Frame = frames.uniform,
    weigh: str = 'counts',
    unit_means: bool = True,
    unit_features: bool = True,
    confident: bool = False,
    augment: bool = False,
    plan: Plan = Plan(64, 5),  # noqa: B008
    base: Callable[..., Algorithm] = fedavg.algorithm,
    **kwargs: Any,
) -> Algorithm:
    """Federated training against prototypes that the server moves.

    The defaults are those of the released code but for `init` and `augment`, which are the paper's. The released code
    starts with orthogonal prototypes, `init=functools.partial(frames.uniform, method='orthogonal')`, takes class means
    of augmented images, `augment=True`, and has `scale=20.0` for ResNet-18. The paper has a fixed scale, such as
    `scale=30.0, learn_scale=False`, and `unit_means=False`.

    A client's state is that of `base`; personal models are the latest local ones: `latest.keep(algorithm)`.

    Args:
      model: feature extractor.
      client_opt: published: `local.sgd(0.01, weight_decay=1e-5, decay=0.99, clip=10.0)` for CIFAR.
      rho: inertia of the prototypes; 1 is FedUH.
      scale: first value of the logit scale.
      learn_scale: whether the scale is learned and averaged.
      init: how prototypes are spread at first, `(key, D, C) -> [D, C]`; as far as they can be, in the paper.
      weigh: what a client's class mean counts: 'counts', its number of examples; 'holders', the same for all who hold
        the class; 'agreement', `exp(<W_c, u_kc>)` with u_kc at length one, the adaptive weights of the released code.
      unit_means: whether class means are normalised before (with `unit_features` alone) and after they are averaged, as
        the released code does; the paper's equations normalise only the moved prototype, so that steps are shorter.
      unit_features: whether means are of normalised features. FedETF's comparison took raw ones, with 'holders'.
      confident: whether examples count by the local model's probability of their true class.
      augment: whether the class means are of augmented images, in training mode.
      plan: batch size and local epochs.
      base: the algorithm that trains it: a factory that takes an objective and an optimizer.
      **kwargs: as for `base`; clients count alike but for `aggregate` and `aggregate_stats`.

    Returns:
      An `Algorithm` with the states of `base`, whose clients send a `Message`. The prototypes W [C, D] are
      `variables.fixed['w']`.

    Raises:
      ValueError: for another `weigh`, a `rho` outside [0, 1], or a `scale` that is not positive.
    """
    if weigh not in ('counts', 'holders', 'agreement'):
        raise ValueError(f"weigh must be 'counts', 'holders' or 'agreement', not {weigh!r}")
    checks.number('rho', rho, high=1)
    checks.flags(unit_means=unit_means, unit_features=unit_features, confident=confident, augment=augment)
    task = objective(model, heads.prototypes(scale, learn_scale, init), losses.cross_entropy)
    inner = base(task, client_opt, plan=plan, **{**fedavg.UNWEIGHTED, **kwargs})

    def client(key: Array, server: fedavg.Server, client: Tree, shard: Shard) -> tuple[Tree, Message, Info]:
        client, message, info = inner.client(key, server, client, shard)
        v = fedper.local_model(server, message, client)
        k_images = jax.random.fold_in(key, plan.epochs) if augment else None  # training folds in smaller numbers
        own = featurize(lambda batch: task.features(v, batch)[0], shard, plan.batch_size, k_images)
        weight = classwise.real_rows(own)
        if confident:
            p = jax.nn.softmax(task.logits(v, own.x))
            weight *= jnp.take_along_axis(p, own.y[:, None], axis=1)[:, 0]
        z = normalize(own.x) if unit_features else own.x
        mean, _ = classwise.means(z, own.y, weight, shard.counts.shape[0])
        mean = normalize(mean) if unit_means and unit_features else mean
        held = (shard.counts > 0).astype(jnp.float32)
        if weigh == 'counts':
            held = shard.counts.astype(jnp.float32)
        elif weigh == 'agreement':
            held *= jnp.exp(jnp.sum(server.variables.fixed['w'] * normalize(mean), axis=-1))
        return client, Message(message, ClassRows(mean, held)), info

    def server(key: Array, server: fedavg.Server, aggregate: Aggregate) -> fedavg.Server:
        moved = follow(server.variables.fixed['w'], aggregate.value['prototypes'], rho, unit_means)
        server = inner.server(key, server, aggregate._replace(value=aggregate.value['base']))
        v = server.variables
        return server._replace(variables=v._replace(fixed={**v.fixed, 'w': moved}))

    joined = aggregators.by_field(base=inner.aggregate, prototypes=aggregators.class_mean)
    return inner._replace(client=client, aggregate=joined, server=server)


def follow(prototypes: Array, mean: ClassRows, rho: Array | float, unit_means: bool = True) -> Array:
    """Prototypes moved towards class means by the share `1 - rho`, as unit rows.

    Args:
      prototypes: W [C, D] float32.
      mean: a_c [C, D] and weights [C] over all clients, as `aggregators.class_mean` makes them.
      rho: inertia, in [0, 1].
      unit_means: whether the means are normalised first.

    Returns:
      [C, D] float32. Rows of classes whose mean has no weight are kept bit for bit.

    Raises:
      ValueError: for another `rho`, or means of other shapes.
    """
    checks.number('rho', rho, high=1)
    checks.rows('prototypes', prototypes)
    if mean.rows.shape != prototypes.shape:
        raise ValueError(f'prototypes {prototypes.shape} do not follow means {mean.rows.shape}')
    target = normalize(mean.rows) if unit_means else mean.rows
    moved = normalize(rho * prototypes + (1 - rho) * target)
    return jnp.where(mean.weight[:, None] > 0, moved, prototypes)
