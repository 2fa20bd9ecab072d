"""How alike things are: clients' classifiers, their class means, the layers of their models, Gaussians of classes."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from fedjax_nc import checks, classwise, tree
from fedjax_nc.aggregators import ClassRows
from fedjax_nc.base import Array, FederatedData, Objective, Tree, Variables
from fedjax_nc.data.host import HostData, cohorts, part
from fedjax_nc.evaluate import over
from fedjax_nc.frames import normalize
from fedjax_nc.local import featurize
from fedjax_nc.models.adapter import Preprocess, scale_images

_ROUNDING = 1e-6  # of float32, relative: as far as the mean of many may be off


class ByClass(NamedTuple):
    """A number for each class."""

    values: Array  #: [C] float32, 0 where it is not known
    known: Array  #: [C] bool
    mean: Array  #: [] float32, over the classes of which it is known


def unit(rows: Array) -> Array:
    """`rows [..., D]` as float32 vectors of length 1, however small or large they are; zeros stay zero."""
    return normalize(scaled(rows, -1))


def pairwise_cosine(rows: Array) -> Array:
    """Cosines of all pairs of `rows [n, D]`: [n, n] float32; those of a row of zeros are 0."""
    rows = unit(rows)
    return jnp.matmul(rows, rows.T, precision='highest')


def mean_over_pairs(matrix: Array, present: Array | None = None) -> Array:
    """Mean of the entries off the diagonal of `matrix [n, n]`, between those `present [n]`; 0 without a pair."""
    here = jnp.ones(len(matrix), bool) if present is None else present > 0
    pair = here[:, None] & here & ~jnp.eye(len(matrix), dtype=bool)
    return jnp.sum(jnp.where(pair, matrix, 0.0)) / jnp.maximum(jnp.sum(pair), 1)


def mean_pairwise_cosine(classifiers: Array) -> Array:
    """Mean cosine between the clients' flattened classifiers `[K, ...]`, a scalar.

    `S = 1/(K(K-1)) sum_{i != j} cos(w_i, w_j)` of FedETF (Li et al., ICCV 2023); low where clients bias theirs in
    different ways.

    Raises:
      ValueError: for fewer than two clients.
    """
    if len(classifiers) < 2:
        raise ValueError(f'at least two classifiers are needed for a pair, not {len(classifiers)}')
    return mean_over_pairs(pairwise_cosine(classifiers.reshape(len(classifiers), -1)))


def prototype_consistency(means: Array, present: Array) -> ByClass:
    """Mean cosine between the class means of clients, for each class: `1/(n_c(n_c-1)) sum_{i != j} cos(p_ic, p_jc)`.

    The measure of FedETF (Li et al., ICCV 2023). Classes with fewer than two owners have no pair and are left out.

    Args:
      means: [K, C, D], as of `client_prototypes`.
      present: [K, C], above 0 where the client owns the class.

    Returns:
      A mean for each class [C], which of them are known, and the mean over those.
    """
    by_class = means.swapaxes(0, 1), (present > 0).T
    values = jax.lax.map(lambda args: mean_over_pairs(pairwise_cosine(args[0]), args[1]), by_class)
    known = jnp.sum(present > 0, axis=0) > 1
    return ByClass(values, known, over(values, known).mean)


def client_prototypes(
    objective: Objective, variables: Variables, data: FederatedData, *, own: bool = False, batch_size: int = 256
) -> ClassRows:
    """Class means of each client's examples in evaluation mode: `rows [K, C, D]`, and their numbers `weight [K, C]`.

    Args:
      objective: what makes the features.
      variables: one model for all clients, or with `own` one each, with leading axis K, as `algorithms.latest` keeps.
      data: K clients; of `data.HostData` some clients' examples travel at a time.
      own: whether each client has its own model.
      batch_size: examples at a time.

    Raises:
      ValueError: for an objective, variables, data or a batch size that are none.
    """
    checks.kind('objective', objective, Objective)
    checks.kind('variables', variables, Variables)
    checks.kind('data', data, FederatedData)
    batch_size = checks.static('batch_size', batch_size)

    def of(data: FederatedData, each: Variables | None) -> ClassRows:
        def one(args: tuple[Array, Variables | None]) -> ClassRows:
            v = variables if args[1] is None else args[1]
            shard = featurize(lambda batch: objective.features(v, batch)[0], data.shard(args[0]), batch_size)
            return ClassRows(*classwise.means(shard.x, shard.y, classwise.real_rows(shard), data.num_classes))

        return jax.lax.map(one, (jnp.arange(data.num_clients), each))

    if not isinstance(data, HostData) or checks.traced(data.size):
        return of(data, variables if own else None)
    parts = [of(part(data, ids).data, tree.take(variables, jnp.asarray(ids)) if own else None) for ids in cohorts(data)]
    return jax.tree.map(lambda *u: jnp.concatenate(u)[: data.num_clients], *parts)  # what fills the last is nobody


def class_norms(w: Array) -> Array:
    """Euclidean norm of each class vector of classifiers `w [..., D, C]`: [..., C] float32."""
    return jnp.sqrt(jnp.sum(jnp.square(w.astype(jnp.float32)), axis=-2))


def linear_cka(x: Array, y: Array) -> Array:
    """Linear centred kernel alignment of two layers' outputs on the same n examples, in [0, 1].

    Similarity of Neural Network Representations Revisited. Kornblith, Norouzi, Lee, Hinton. ICML 2019.
    `|Y^T X|_F^2 / (|X^T X|_F |Y^T Y|_F)` with centred columns; where a layer is wider than n the same number is
    computed from the Gram matrices. Rotations and a common scale of either change nothing. 0 for a layer whose outputs
    are the same for all examples, up to rounding.

    Args:
      x: [n, ...], flattened to [n, p].
      y: [n, ...], flattened to [n, q].

    Returns:
      [] float32.

    Raises:
      ValueError: if they differ in n.
    """
    if len(x) != len(y):
        raise ValueError(f'both layers must have seen the same examples, not {len(x)} and {len(y)}')
    x, y = _centred(x), _centred(y)
    if max(x.shape[1], y.shape[1]) > len(x):
        xx, yy = _gram(x.T, x.T), _gram(y.T, y.T)  # [n, n]
        cross = jnp.vdot(xx, yy)
    else:
        xx, yy = _gram(x, x), _gram(y, y)  # [p, p] and [q, q]
        cross = jnp.sum(jnp.square(_gram(x, y)))
    scale = jnp.sqrt(jnp.sum(jnp.square(xx))) * jnp.sqrt(jnp.sum(jnp.square(yy)))
    return jnp.where(scale == 0, 0.0, cross / jnp.where(scale == 0, 1.0, scale))


def cka_matrix(features: Array) -> Array:
    """Linear CKA of all pairs of models on the same n examples: `features [K, n, ...] -> [K, K]`.

    In float32. It is the cosine of their centred Gram matrices, which cost K n^2 floats; 1000 examples do.
    """
    grams = jax.lax.map(lambda x: _gram(_centred(x).T, _centred(x).T).reshape(-1), features)
    return pairwise_cosine(grams)


def layer_outputs(
    module: nn.Module, params: Tree, stats: Tree, x: Array, *, preprocess: Preprocess = scale_images
) -> dict[str, Array]:
    """Outputs of every layer of a flax module in evaluation mode, by the layers' names: [n, ...] each.

    For CKA by layer: map it over clients' models, then `cka_matrix` of each entry. The last, 'features', is what the
    module returns; logits are the head's and come from `objective.logits`.

    Args:
      module: the one that was given to `models.from_flax`.
      params: a model's `params['body']`.
      stats: its `stats`.
      x: examples [n, ...].
      preprocess: as given to `models.from_flax`.
    """
    variables = {'params': params, 'batch_stats': stats} if stats else {'params': params}
    _, state = module.apply(variables, preprocess(x, None), capture_intermediates=True, mutable=['intermediates'])
    calls = flatten_dict(state['intermediates'])
    return {'/'.join(path[:-1]) or 'features': outputs[-1] for path, outputs in calls.items()}


def sliced_wasserstein(key: Array, mean: Array, cov: Array, *, directions: int = 500) -> Array:
    """Sliced 2-Wasserstein distances between the Gaussians of all pairs of classes: [C, C].

    The root of the mean over random unit vectors w of `(w (m_i - m_j))^2 + (sqrt(w S_i w) - sqrt(w S_j w))^2`, with
    which CCVR (Luo et al., NeurIPS 2021) measures the separability of classes. All pairs share the directions.

    Args:
      key: draws the directions.
      mean: [C, D].
      cov: [C, D, D], or [C, D] where covariances are diagonal.
      directions: their number.

    Raises:
      ValueError: without a direction, or for covariances of another shape.
    """
    checks.whole('directions', directions)
    checks.rows('mean', mean)
    if cov.shape not in (mean.shape, (*mean.shape, mean.shape[1])):
        raise ValueError(f'means {mean.shape} need covariances {(*mean.shape, mean.shape[1])}, not {cov.shape}')
    w = normalize(jax.random.normal(key, (directions, mean.shape[1])))
    cov = jax.vmap(jnp.diag)(cov) if cov.ndim == 2 else cov
    variance = jax.lax.map(lambda s: jnp.sum(jnp.matmul(w, s, precision='highest') * w, axis=1), cov)
    at, width = jnp.matmul(mean, w.T, precision='highest'), jnp.sqrt(jnp.maximum(variance, 0.0))
    squares = sum(jnp.square(u[:, None] - u) for u in (at, width))
    return jnp.sqrt(jnp.mean(squares, axis=-1))


def separability(key: Array, mean: Array, cov: Array, present: Array | None = None, *, directions: int = 500) -> Array:
    """Mean of `sliced_wasserstein` over the pairs of classes `present [C]`, by default all: [] float32.

    Other arguments and errors are those of `sliced_wasserstein`.
    """
    return mean_over_pairs(sliced_wasserstein(key, mean, cov, directions=directions), present)


def less(x: Array, mean: Array) -> Array:
    """`x - mean`, float32; zeros where that is rounding alone."""
    gap = x - mean
    largest = jnp.max(jnp.abs(mean), initial=0.0)
    return jnp.where(jnp.max(jnp.abs(gap), initial=0.0) <= _ROUNDING * largest, 0.0, gap)  # NaN stays


def scaled(x: Array, axis: int | None = None) -> Array:
    """`x` in float32 over its largest absolute value, of all or along `axis`: products neither vanish nor overflow."""
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=axis, keepdims=True, initial=0.0)
    return x / jnp.where(largest > 0, largest, 1.0)


def _centred(x: Array) -> Array:
    x = scaled(x.reshape(len(x), -1))
    return scaled(less(x, jnp.mean(x, axis=0)))


def _gram(x: Array, y: Array) -> Array:
    """`x^T y`."""
    return jnp.matmul(x.T, y, precision='highest')
