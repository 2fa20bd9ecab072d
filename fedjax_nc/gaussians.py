"""A Gaussian for each class: from clients' second moments to virtual features.

What CCVR (Luo et al., NeurIPS 2021) puts between clients and server. Covariances are 'full', a matrix [D, D] for each
class; 'diag', its diagonal; or 'tied', one matrix for all. Moments are float32 and of centred features throughout: the
mean of squares less the square of the mean would lose all digits where means are large.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_nc import checks, classwise
from fedjax_nc.aggregators import ClassRows
from fedjax_nc.base import Array, Shard


class Gaussians(NamedTuple):
    """One Gaussian a class; a class with `count` 0 is unknown."""

    #: [C] float32, examples
    count: Array  # type: ignore[assignment]
    mean: Array  #: [C, D] float32
    cov: Array  #: [C, D, D] float32, or [C, D] where they are diagonal


def scatter(z: Array, y: Array, weight: Array, mean: Array, covariance: str = 'full') -> Array:
    """Second moments of `z [n, D]` around the means of their classes: `sum_i w_i (z_i - m_y)(z_i - m_y)^T`.

    Args:
      z: features [n, D].
      y: labels [n] int in [0, C).
      weight: weights [n], 0 for rows that do not count.
      mean: [C, D].
      covariance: 'full', 'diag' or 'tied'.

    Returns:
      [C, D, D]; for 'diag' their diagonals [C, D]; for 'tied' their sum [D, D]. All float32.

    Raises:
      ValueError: for another `covariance`, or shapes that do not fit.
    """
    _known(covariance)
    checks.rows('mean', mean)
    classwise.check_rows(z, y, weight, len(mean))
    if mean.shape[1] != z.shape[1]:
        raise ValueError(f'features of {z.shape[1]} dimensions have no means {mean.shape}')
    if covariance == 'full':
        return classwise.scatter(z, y, weight, mean)
    gap = jnp.where(weight[:, None] > 0, z - mean[y], 0.0)
    if covariance == 'diag':
        return classwise.sums(jnp.square(gap), y, weight, len(mean))[0]
    return jnp.matmul((weight[:, None] * gap).T, gap, precision='highest')


def merge(classes: ClassRows, scatters: Array, covariance: str = 'full') -> Gaussians:
    """The unbiased moments of all clients' features from those of each, as if they had been pooled.

    The scatter around the global mean is that within clients and that of the clients' means, each counted `n_kc` times.

    Args:
      classes: class means [K, C, D] and counts [K, C].
      scatters: the sum over clients of their `scatter`.
      covariance: of which kind they are: 'full', 'diag' or 'tied'.

    Returns:
      Moments with `n_c - 1` degrees of freedom for each class, or for 'tied' their sum, and at least 1. Covariances are
      [C, D, D], for 'tied' the same one C times, for 'diag' [C, D].

    Raises:
      ValueError: for another `covariance`, or scatters of another.
    """
    _known(covariance)
    number, dim = classes.rows.shape[1:]
    wanted = {'full': (number, dim, dim), 'diag': (number, dim), 'tied': (dim, dim)}[covariance]
    if scatters.shape != wanted:
        raise ValueError(f'{covariance!r} scatters of {number} classes must be {wanted}, not {scatters.shape}')
    weight = classes.weight
    count = jnp.sum(weight, axis=0)
    rows = jnp.where(weight[..., None] > 0, classes.rows, 0.0)  # what does not count may be anything
    mean = jnp.einsum('kc,kcd->cd', weight, rows, precision='highest') / jnp.maximum(count, 1.0)[:, None]
    gap = jnp.where(weight[..., None] > 0, classes.rows - mean, 0.0)
    if covariance == 'diag':
        between = jnp.einsum('kc,kcd->cd', weight, jnp.square(gap), precision='highest')
    else:
        between = jnp.einsum('kc,kcd,kce->cde', weight, gap, gap, precision='highest')
    spread = scatters + (jnp.sum(between, axis=0) if covariance == 'tied' else between)
    freedom = jnp.maximum(count - 1.0, 0.0)
    if covariance == 'diag':
        return Gaussians(count, mean, spread / jnp.maximum(freedom, 1.0)[:, None])
    if covariance == 'tied':
        spread, freedom = (jnp.broadcast_to(u, (number, *u.shape)) for u in (spread, jnp.sum(freedom)))
    spread = 0.5 * (spread + jnp.swapaxes(spread, 1, 2))  # rounding left it a little askew
    return Gaussians(count, mean, spread / jnp.maximum(freedom, 1.0)[:, None, None])


def sample(
    key: Array, gaussians: Gaussians, samples: int, *, proportional: bool = False, ridge: Array | float = 0.0
) -> Shard:
    """Virtual features as the data of a client: `z = mu_c + R_c eps`, where `R_c R_c = Sigma_c`.

    With `Sigma_c = Q diag(w) Q^T` the root is `R_c = Q sqrt(max(w, 0)) Q^T`: exact for any covariance that is positive
    semidefinite, where Cholesky's and unclipped square roots give NaN; and it hardly moves with the covariance, where
    single eigenvectors may turn round. Unknown classes have no samples. A class's samples depend on the key, its number
    and its Gaussian alone.

    Args:
      key: randomness.
      gaussians: of each class.
      samples: features of each known class, or with `proportional` their mean over all classes; at least 1.
      proportional: whether class c gets `round(samples C n_c / n)`.
      ridge: added to the eigenvalues.

    Returns:
      A shard: a pool of `samples C` rows [D], or twice as many with `proportional`, their labels, and row numbers of
      which the first `size` are real; `counts` [C] says how many of each class.

    Raises:
      ValueError: if `samples` is no whole number of at least 1, or `ridge` negative.
    """
    samples = checks.static('samples', samples)
    checks.flags(proportional=proportional)
    checks.number('ridge', ridge)
    count, classes = gaussians.count, len(gaussians.count)
    share = samples * (count > 0).astype(jnp.int32)
    if proportional:
        share = jnp.round(samples * classes * count / jnp.maximum(jnp.sum(count), 1.0)).astype(jnp.int32)
    # Classes are drawn in blocks of `samples`, of which only the last of each is cut: never more than 2 C of them.
    blocks = -(-share // samples)
    ends = jnp.cumsum(blocks)

    def draw(block: Array) -> tuple[Array, Array, Array]:
        c = jnp.minimum(jnp.searchsorted(ends, block, side='right'), classes - 1)
        turn = block - ends[c] + blocks[c]
        k = jax.random.fold_in(jax.random.fold_in(key, c), turn)
        z = _gaussian(k, gaussians.mean[c], gaussians.cov[c], samples, ridge)
        return z, jnp.full(samples, c), turn * samples + jnp.arange(samples) < share[c]

    drawn = jax.lax.map(draw, jnp.arange((2 if proportional else 1) * classes))
    z, y, real = (u.reshape(-1, *u.shape[2:]) for u in drawn)
    return Shard(z, y.astype(jnp.int32), jnp.argsort(~real), jnp.sum(share), share)  # real ones first


def _gaussian(key: Array, mean: Array, cov: Array, samples: int, ridge: Array | float = 0.0) -> Array:
    """Draws [samples, D] from one Gaussian with `mean [D]` and `cov [D, D]`, or the variances [D]."""
    eps = jax.random.normal(key, (samples, len(mean)))
    if cov.ndim == 1:
        return mean + jnp.sqrt(jnp.maximum(cov + ridge, 0.0)) * eps
    w, q = jnp.linalg.eigh(cov)
    root = jnp.matmul(q * jnp.sqrt(jnp.maximum(w + ridge, 0.0)), q.T, precision='highest')
    return mean + jnp.matmul(eps, root, precision='highest')


def _known(covariance: str) -> None:
    if covariance not in ('full', 'diag', 'tied'):
        raise ValueError(f"covariance must be 'full', 'diag' or 'tied', not {covariance!r}")
