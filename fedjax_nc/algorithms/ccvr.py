"""CCVR: a classifier that is calibrated, after training, on virtual features.

No Fear of Heterogeneity: Classifier Calibration for Federated Learning with Non-IID Data.
Luo, Chen, Hu, Zhang, Liang, Feng. NeurIPS 2021. https://arxiv.org/abs/2106.05001

Under the trained extractor f, client k sends for each class c the number `n_kc` of its features `z = psi(f(x))`, their
mean and their scatter `S_kc = sum_j (z_j - mu_kc)(z_j - mu_kc)^T`. The server joins them to the moments of all,

    mu_c = sum_k n_kc mu_kc / n_c,   Sigma_c = sum_k [S_kc + n_kc (mu_kc - mu_c)(mu_kc - mu_c)^T] / (n_c - 1),

draws virtual features from `N(mu_c, Sigma_c)` and trains the head on them from where it stands. The paper writes
`Sigma_c` with differences of `mu mu^T`: the same in exact numbers, but float32 loses all digits where means are large.

It is a stage of one round on all clients, for any trained server state with a field `variables`:

    state = simulate.join(stage, key, state.server, data.num_clients)
    state, report = simulate.compiled(simulate.make_round(stage))(key, state, data)
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_nc import aggregators, checks, classwise, gaussians, losses
from fedjax_nc.aggregators import ClassRows
from fedjax_nc.algorithms import fedavg, finetune
from fedjax_nc.base import Aggregate, Algorithm, Array, Batch, FederatedData, Info, Objective, Shard, Tree, Variables
from fedjax_nc.data.host import here
from fedjax_nc.local import Plan, checked, featurize, sgd
from fedjax_nc.objective import masked_mean, on_features

Transform = Callable[[Array], Array]
"""From features to features, [B, D] -> [B, D]."""


class Message(NamedTuple):
    """What a client sends; of a symmetric scatter, the upper triangle is enough."""

    classes: ClassRows  #: class means [C, D] and counts [C], float32
    scatter: Array  #: [C, D, D] float32, S_kc; for 'diag' [C, D], for 'tied' [D, D], as of `gaussians.scatter`


def tukey(power: float = 0.5, offset: float | None = None) -> Transform:
    """ReLU and Tukey's ladder: `psi(z) = (max(z, 0) + offset)^power`, its log for power 0.

    Args:
      power: 1 is the plain ReLU; smaller ones make skewed features more Gaussian. The paper takes 0.5.
      offset: by default 0 for a positive power and 1e-6 for others.

    Returns:
      The function psi, from [B, D] to [B, D] float32.

    Raises:
      ValueError: for a power that is not finite, a negative offset, or one of 0 with a power that is not positive,
        where zero has no image.
    """
    checks.number('power', power, low=-math.inf)
    if offset is not None:
        checks.number('offset', offset)
    shift = (0.0 if power > 0 else 1e-6) if offset is None else offset
    if shift < 0 or (shift == 0 and power <= 0):
        raise ValueError(f'offset {shift} leaves zeros without a power of {power}: take a small positive one')

    def psi(z: Array) -> Array:
        z = jax.nn.relu(z.astype(jnp.float32)) + shift
        return jnp.log(z) if power == 0 else z**power

    return psi


def calibrate(
    objective: Objective,
    *,
    transform: Transform | None = tukey(),  # noqa: B008
    samples: int = 100,
    proportional: bool = False,
    covariance: str = 'full',
    ridge: Array | float = 0.0,
    raw_gaussians: bool = False,
    plan: Plan = Plan(64, 50),  # noqa: B008
    opt: optax.GradientTransformation | None = None,
) -> Algorithm:
    """One round of it on all clients refits the head; body, statistics and fixed parts stay bit for bit.

    Args:
      objective: the task of training, with a trainable head. The refit minimises the plain cross-entropy.
      transform: psi; None for raw features.
      samples: virtual features of each class. The paper takes 100 for CIFAR-10, 500 for CIFAR-100 and 1000 for
        CINIC-10. With 0 nothing happens at all.
      proportional: whether they are shared out by class counts, `round(samples C n_c / n)`, instead of equally.
      covariance: 'full', which sends [C, D, D] floats; 'diag', [C, D]; or 'tied', one for all classes, [D, D].
      ridge: added to the covariances' diagonals; none is needed, as eigenvalues are clipped at zero.
      raw_gaussians: whether Gaussians describe raw features and psi is applied to what is drawn from them. The paper
        does not say; by default they describe what psi has made more Gaussian.
      plan: batch size and epochs of the refit.
      opt: its optimizer; by default SGD of rate 0.01 and momentum 0.9.

    Returns:
      An `Algorithm` on any server state with a field `variables`, without client state, whose clients send a `Message`.
      Its `predict` is that of the calibrated model, which sees transformed features, for clients too.

    Raises:
      ValueError: for another covariance, a negative number, or an objective, transform, plan or optimizer that is
        none; when joined, if the head has nothing to train.
    """
    checks.kind('objective', objective, Objective)
    gaussians._known(covariance)
    checked('plan', plan)
    checks.whole('samples', samples, 0)
    checks.number('ridge', ridge)
    checks.flags(proportional=proportional, raw_gaussians=raw_gaussians)
    _usable(transform, opt)
    psi = transform if transform is not None and samples else _identity
    before, after = (_identity, psi) if raw_gaussians else (psi, _identity)

    def init(key: Array, data: FederatedData) -> fedavg.Server:
        return fedavg.Server(objective.init(key, data), (), jnp.int32(0))

    def init_client(key: Array, server: Any) -> tuple[()]:
        _trainable(server.variables)
        return ()

    def client(key: Array, server: Any, client: Tree, shard: Shard) -> tuple[Tree, Message, Info]:
        own = featurize(lambda batch: before(objective.features(server.variables, batch)[0]), shard, plan.batch_size)
        b = min(plan.batch_size, len(own.index))
        info = Info(jnp.float32(0), jnp.int32(0), shard.size, -(-shard.size // b) * b)
        return client, _statistics(own, covariance), info

    def server(key: Array, server: Any, aggregate: Aggregate) -> Any:
        if not samples:
            return server
        k_sample, k_fit = jax.random.split(key)
        classes = gaussians.merge(aggregate.value['classes'], aggregate.value['scatter'], covariance)
        virtual = gaussians.sample(k_sample, classes, samples, proportional=proportional, ridge=ridge)
        v, _ = refit(k_fit, objective, server.variables, virtual._replace(x=after(virtual.x)), plan=plan, opt=opt)
        return server._replace(variables=v)

    def predict(server: Any, client: Tree | None, x: Array) -> Array:
        v = server.variables
        return objective.logits(v, psi(objective.features(v, Batch(x))[0]))

    every = aggregators.stacked(lambda classes, weights: classes)  # nobody's counts are zero
    joined = aggregators.by_field(classes=every, scatter=aggregators.total)
    return Algorithm(init, init_client, client, joined, server, predict)


def oracle(
    key: Array,
    objective: Objective,
    server: Any,
    data: FederatedData,
    *,
    transform: Transform | None = None,
    fraction: float = 1.0,
    plan: Plan = Plan(64, 10),  # noqa: B008
    opt: optax.GradientTransformation | None = None,
) -> Any:
    """The server state with its head refitted on the real features of all clients: a bound, NOT a federated method.

    Args:
      key: randomness of the choice of examples and of the refit.
      objective: as for `calibrate`.
      server: a trained server state.
      data: the training data of all clients, pooled here.
      transform: psi. To predict where there is one, use `calibrate(objective, transform=transform).predict`.
      fraction: share of each class that is used, at least one example.
      plan: batch size and epochs.
      opt: as for `calibrate`.

    Returns:
      `server` with another `variables.params['head']`.

    Raises:
      ValueError: for an objective, data, transform, plan or optimizer that are none, a fraction outside (0, 1], or if
        the head has nothing to train.
    """
    checks.kind('objective', objective, Objective)
    checks.kind('data', data, FederatedData)
    checks.number('fraction', fraction, high=1, open_low=True)
    checked('plan', plan)
    _usable(transform, opt)
    k_pick, k_fit = jax.random.split(key)
    data = here(data)
    v, psi = server.variables, transform or _identity
    rows = data.index[jnp.arange(data.index.shape[1]) < data.size[:, None]]
    rows = rows[jnp.lexsort((jax.random.uniform(k_pick, rows.shape), data.y[rows]))]  # class by class, each shuffled
    held = jnp.sum(data.counts, axis=0)
    used = jnp.minimum(held, jnp.maximum(jnp.round(fraction * held), 1)).astype(jnp.int32)
    rank = jnp.arange(len(rows)) - (jnp.cumsum(held) - held)[data.y[rows]]
    rows = rows[rank < used[data.y[rows]]]
    shard = Shard(data.x, data.y, rows, jnp.sum(used), used)
    seen = featurize(lambda batch: psi(objective.features(v, batch)[0]), shard, plan.batch_size)
    return server._replace(variables=refit(k_fit, objective, v, seen, plan=plan, opt=opt)[0])


def _usable(transform: Transform | None, opt: optax.GradientTransformation | None) -> None:
    if transform is not None and not callable(transform):
        raise ValueError(
            f'transform must be a function of features, such as ccvr.tukey(), not {checks.shown(transform)}'
        )
    if opt is not None:
        checks.transformation('opt', opt)


def _statistics(own: Shard, covariance: str = 'full') -> Message:
    """What a client with features `own.x [N, D]`, as `local.featurize` makes them, tells about its classes."""
    weight = classwise.real_rows(own)
    mean, count = classwise.means(own.x, own.y, weight, len(own.counts))
    return Message(ClassRows(mean, count), gaussians.scatter(own.x, own.y, weight, mean, covariance))


def refit(
    key: Array,
    objective: Objective,
    v: Variables,
    shard: Shard,
    *,
    plan: Plan = Plan(64, 50),  # noqa: B008
    opt: optax.GradientTransformation | None = None,
) -> tuple[Variables, Info]:
    """Trains the head of `v` from where it stands by cross-entropy on `shard`, whose examples are features.

    Classes without examples are masked, so that their weights are neither raised nor pushed down.

    Args:
      key: shuffles the features in each epoch.
      objective: whose head it is; its loss is not used.
      v: a trained model.
      shard: features x [N, D] with their labels and counts, such as of `local.featurize` or `gaussians.sample`.
      plan: batch size and epochs.
      opt: an optax optimizer; by default SGD of rate 0.01 and momentum 0.9.

    Returns:
      `v` with another `params['head']`, and the `Info` of the work.

    Raises:
      ValueError: for an objective, plan or optimizer that is none, or if the head has nothing to train.
    """
    _usable(None, opt)
    absent = jnp.where(shard.counts > 0, 0.0, losses.ABSENT)

    def loss(v: Variables, z: Array, batch: Batch) -> Array:
        return masked_mean(losses.cross_entropy(objective.logits(v, z) + absent, batch.y), batch.mask)

    def put(head: Tree) -> Variables:
        return v._replace(params={**v.params, 'head': head})

    task = on_features(objective)._replace(loss=loss)
    opt = opt or sgd(0.01, momentum=0.9, weight_decay=0.0)(jnp.int32(0))
    return finetune.fit(key, task, v, _trainable(v), put, opt, shard, plan)


def _trainable(v: Variables) -> Tree:
    """The parameters of the head; weights must be among them."""
    head = v.params['head']
    if all(leaf.ndim < 2 for leaf in jax.tree.leaves(head)):  # a temperature alone moves no decision
        raise ValueError('the head has no trainable weights to calibrate: train with a linear or a projected one')
    return head


def _identity(z: Array) -> Array:
    return z
