"""Frames: sets of class vectors that are spread as far as they can be, built once and held still.

A frame `[d, C]` has one column a class.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_nc import checks
from fedjax_nc.base import Array


def normalize(z: Array, eps: float = 1e-6) -> Array:
    """`z [..., D]` divided by its Euclidean norm over the last axis, in float32; norms below `eps` count as `eps`.

    The clamp inside the root keeps the gradient finite at zero.
    """
    z = z.astype(jnp.float32)
    return z * jax.lax.rsqrt(jnp.maximum(jnp.sum(z * z, axis=-1, keepdims=True), eps**2))


def simplex_etf(key: Array, dim: int, classes: int) -> Array:
    """A random simplex equiangular tight frame: [dim, classes] float32.

    Columns have unit length, add up to zero, and every two of them meet at cosine `-1 / (classes - 1)`. It is
    `sqrt(C / (C-1)) Q H^T` with Haar-distributed orthonormal `Q [d, C-1]` and the Helmert basis `H [C, C-1]` of the
    vectors that sum to zero, and so exists for every `dim >= classes - 1`.

    Args:
      key: draws the directions.
      dim: d, at least `classes - 1`.
      classes: C, at least 2.

    Raises:
      ValueError: if `classes < 2` or `dim < classes - 1`, or for what is no whole number.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from fedjax_nc import frames
      >>> frame = frames.simplex_etf(jax.random.key(0), 8, 5)
      >>> frame.shape
      (8, 5)
      >>> bool(jnp.allclose(frame.T @ frame, jnp.where(jnp.eye(5), 1, -1 / 4), atol=1e-2))
      True
    """
    checks.whole('dim', dim)
    checks.whole('classes', classes)
    if classes < 2:
        raise ValueError(f'a simplex ETF needs at least 2 classes, not {classes}')
    if dim < classes - 1:
        raise ValueError(
            f'no simplex ETF of {classes} classes exists in {dim} dimensions: '
            f'choose an ETF dimension of at least {classes - 1}'
        )
    q = _orthonormal(key, dim, classes - 1)
    j = jnp.arange(1, classes, dtype=jnp.float32)
    row = jnp.arange(classes, dtype=jnp.float32)[:, None]
    helmert = jnp.where(row < j, 1.0, jnp.where(row == j, -j, 0.0)) / jnp.sqrt(j * (j + 1))
    return jnp.sqrt(classes / (classes - 1)) * jnp.matmul(q, helmert.T, precision='highest')


def uniform(key: Array, dim: int, classes: int, method: str = 'auto') -> Array:
    """Unit vectors whose smallest distance is as large as it can be: [dim, classes] float32, for any two sizes.

    The first prototypes of FedNH (Dai et al., AAAI 2023): `max M^2` subject to `|w_i - w_j|^2 >= M^2`, `|w_i| = 1`.

    The optimum is known up to `classes = 2 dim` and in the plane: a simplex ETF for `classes <= dim + 1`, a regular
    polygon for `dim = 2`, and else the vectors `+-e_i` in random directions, at distance sqrt(2). Beyond that the best
    of eight numerical solutions is taken, which costs seconds and may be a little below the optimum. In one dimension
    only two vectors can differ.

    Args:
      key: draws the directions; regular polygons have none to draw.
      dim: of the vectors, d.
      classes: their number C.
      method: 'auto', or 'orthogonal' for orthonormal columns, as the released code of FedNH draws them.
        'semi_orthogonal' is the same up to `classes = dim`; beyond, rows are orthonormal, and columns only brought to
        unit length, with distances of no promise: where the code of FedETF compares with FedNH on many classes.

    Raises:
      ValueError: for another method, sizes below 1, or more orthogonal vectors than dimensions.
    """
    if method not in ('auto', 'orthogonal', 'semi_orthogonal'):
        raise ValueError(f"method must be 'auto', 'orthogonal' or 'semi_orthogonal', not {method!r}")
    checks.whole('dim', dim)
    checks.whole('classes', classes)
    if method == 'orthogonal' and classes > dim:
        raise ValueError(f"{classes} vectors cannot be orthogonal in {dim} dimensions: use method='auto'")
    if method == 'semi_orthogonal' and classes > dim:
        return normalize(_orthonormal(key, classes, dim)).T
    if method != 'auto' or classes == 1:
        return _orthonormal(key, dim, classes)
    if classes <= dim + 1:
        return simplex_etf(key, dim, classes)
    if dim == 2:
        angle = 2 * jnp.pi * jnp.arange(classes, dtype=jnp.float32) / classes
        return jnp.stack([jnp.cos(angle), jnp.sin(angle)])
    if classes <= 2 * dim:
        q = _orthonormal(key, dim, dim)
        return jnp.concatenate([q, -q], axis=1)[:, :classes]
    return _pack(key, dim, classes)


def min_distance(frame: Array) -> Array:
    """Smallest Euclidean distance between two columns of a `frame [d, C]`: [] float32, infinite for one column."""
    columns = jnp.asarray(frame, jnp.float32).T

    def nearest(i: Array) -> Array:
        # Differences, because products would lose the digits of close pairs; one column at a time, to save memory.
        squares = jnp.sum(jnp.square(columns - columns[i]), axis=1)
        return jnp.min(jnp.where(jnp.arange(len(columns)) == i, jnp.inf, squares))

    return jnp.sqrt(jnp.min(jax.lax.map(nearest, jnp.arange(len(columns)))))


def _orthonormal(key: Array, dim: int, columns: int) -> Array:
    """Haar-distributed orthonormal columns `[dim, columns]`, `columns <= dim`."""
    q, r = jnp.linalg.qr(jax.random.normal(key, (dim, columns), jnp.float32))
    return q * jnp.where(jnp.diag(r) < 0, -1.0, 1.0)


@functools.partial(jax.jit, static_argnums=(1, 2), static_argnames=('steps', 'restarts'))
def _pack(key: Array, dim: int, classes: int, *, steps: int = 4000, restarts: int = 8) -> Array:
    """Spreads unit vectors by Adam on a smooth minimum of their squared distances, which sharpens as it goes.

    `1/tau log sum_{i<j} exp(-tau |w_i - w_j|^2)` with tau from 5 to 500; the best of several restarts: [d, C].
    """
    opt = optax.adam(optax.cosine_decay_schedule(0.05, steps))
    pairs = jnp.triu(jnp.ones((classes, classes), bool), 1)

    def crowding(w: Array, tau: Array) -> Array:
        squares = 2.0 - 2.0 * _cosines(w.T)
        return jax.nn.logsumexp(-tau * squares, where=pairs) / tau

    def step(t: Array, carry: tuple[Array, optax.OptState]) -> tuple[Array, optax.OptState]:
        w, state = carry
        updates, state = opt.update(jax.grad(crowding)(w, 5.0 * 100.0 ** (t / steps)), state, w)
        return normalize(optax.apply_updates(w, updates)), state

    def solve(key: Array) -> Array:
        w = normalize(jax.random.normal(key, (classes, dim)))
        return jax.lax.fori_loop(0, steps, step, (w, opt.init(w)))[0].T

    found = jax.vmap(solve)(jax.random.split(key, restarts))
    return found[jnp.argmax(jax.vmap(min_distance)(found))]


def sparse_etf(
    key: Array,
    dim: int,
    classes: int,
    *,
    sparsity: float = 0.6,
    norm: float = 1.0,
    solver: str = 'mma',
    steps: int | None = None,
    fit_norm: float = 0.5,
    start: Callable[[Array, int, int], Array] = simplex_etf,
) -> Array:
    """A frame with a fixed share of zeros that is as close to a simplex ETF as it can be: [dim, classes] float32.

    The sparse ETF classifier of FedLoGe (Xiao et al., ICLR 2024, Equations 3 to 5). Zeros are drawn from all entries of
    a random simplex ETF, and the others are moved until columns `w_i` are equally long and as far apart as before, here
    with gamma = 1/2:

        sum_i (|w_i| - gamma)^2 - 1/C sum_i arccos max_{j != i} cos(w_i, w_j).

    Angles and zeros do not depend on lengths, so columns are brought to `norm` exactly at the end. A sparse frame with
    the angles of a simplex ETF needs about `(1 - sparsity) dim >= (classes + 1) / 2`; `frame_quality` tells how close
    it came.

    Args:
      key: draws the dense frame and the zeros.
      dim: at least `classes - 1`.
      classes: at least 2.
      sparsity: share of zeros; exactly `floor(sparsity * dim * classes)` entries are.
      norm: length of the columns; published: about 1 for CIFAR, 1.6 for ImageNet.
      solver: 'mma', the loss above under Adam of rate 1e-4 for 10,000 steps, as the released code does it; or 'gram',
        which fits all cosines to `-1 / (C-1)` in 2,000 larger steps, and ends closer.
      steps: another number of steps.
      fit_norm: gamma, the length at which 'mma' moves them; published: `norm`. The longer columns are, the more steps
        they need: published angles vary more at 1 and 1.5 than at 1/2.
      start: the dense frame, `(key, dim, classes) -> [dim, classes]`, from whose directions it begins.

    Raises:
      ValueError: if `start` has no frame of this size, for numbers out of range, an unknown solver or a `start` of
        another shape, and, which goes unnoticed under `jit`, if it is not finite or a column has no entry left.
    """
    checks.number('sparsity', sparsity, high=1, open_high=True)
    if solver not in ('mma', 'gram'):
        raise ValueError(f"solver must be 'mma' or 'gram', not {solver!r}")
    checks.number('norm', norm, open_low=True)
    checks.number('fit_norm', fit_norm, open_low=True)
    if steps is not None:
        checks.whole('steps', steps, 0)
    k_dense, k_zeros = jax.random.split(key)
    dense = start(k_dense, dim, classes)
    if dense.shape != (dim, classes):
        raise ValueError(f'start must make a frame {(dim, classes)}, not {dense.shape}')
    checks.finite('the frame of start', dense)
    if start is not simplex_etf:  # whose columns have length one: steps of 1e-4 hardly move longer ones
        dense = normalize(dense.T).T
    zeros = int(sparsity * dim * classes + 1e-6)  # 0.29 * 100 is a little less than 29
    kept = (jax.random.permutation(k_zeros, dim * classes) >= zeros).reshape(dim, classes)
    if not isinstance(kept, jax.core.Tracer) and not kept.any(axis=0).all():
        raise ValueError(
            f'sparsity {sparsity} left a class without an entry in {dim} dimensions: lower it, or use more dimensions'
        )
    steps = steps if steps is not None else 10_000 if solver == 'mma' else 2_000
    return norm * normalize(_spread(dense, kept, solver, steps, fit_norm).T).T


@functools.partial(jax.jit, static_argnums=(2, 3))
def _spread(frame: Array, kept: Array, solver: str, steps: int, length: Array | float) -> Array:
    """Sets the other entries of a frame to zero and moves those that are kept."""
    closest: Callable[[Array], Array] = functools.partial(_closest_pairs, length=length)
    loss, opt = {
        'mma': (closest, optax.adam(1e-4)),
        'gram': (_gram_gap, optax.adam(optax.cosine_decay_schedule(1e-2, max(steps, 1)))),
    }[solver]

    def step(_: Array, carry: tuple[Array, optax.OptState]) -> tuple[Array, optax.OptState]:
        frame, state = carry
        updates, state = opt.update(jax.grad(loss)(frame) * kept, state, frame)
        return optax.apply_updates(frame, updates), state  # Adam leaves entries without gradient at exactly zero

    frame = frame * kept
    return jax.lax.fori_loop(0, steps, step, (frame, opt.init(frame)))[0]


def _closest_pairs(frame: Array, length: Array | float) -> Array:
    """The loss of 'mma'."""
    lengths = jnp.sqrt(jnp.maximum(jnp.sum(frame * frame, axis=0), 1e-12))
    columns = normalize(frame.T)
    apart = jnp.where(jnp.eye(len(columns), dtype=bool), -1.0, _cosines(jax.lax.stop_gradient(frame)))
    # Only the closest pairs have gradients: taken again by themselves, they spare two products of three.
    closest = jnp.sum(columns * columns[jnp.argmax(apart, axis=1)], axis=1)
    angles = jnp.arccos(jnp.clip(closest, -0.99999, 0.99999))
    return jnp.sum(jnp.square(lengths - length)) - jnp.mean(angles)


def _gram_gap(frame: Array) -> Array:
    """The loss of 'gram': how far the cosines are from those of a simplex ETF."""
    return jnp.sum(jnp.square(_etf_gaps(frame)))


def _cosines(frame: Array) -> Array:
    columns = normalize(frame.T)
    return jnp.matmul(columns, columns.T, precision='highest')


def _etf_gaps(frame: Array) -> Array:
    """Cosines [C, C] of a frame less those of a simplex ETF."""
    classes = frame.shape[1]
    return _cosines(frame) - jnp.where(jnp.eye(classes, dtype=bool), 1.0, -1.0 / (classes - 1))


class FrameQuality(NamedTuple):
    """How much a frame is like a simplex ETF, whose angles are all `arccos(-1 / (C-1))`; scalars in float32."""

    norm_mean: Array  #: of the columns' lengths
    norm_var: Array  #: of the columns' lengths
    angle_mean: Array  #: degrees, over pairs of columns
    angle_var: Array  #: degrees squared, over pairs of columns
    gap: Array  #: largest `|cos + 1 / (C-1)|`
    zeros: Array  #: share of entries that are exactly zero


@jax.jit
def frame_quality(frame: Array) -> FrameQuality:
    """Measures a `frame [d, C]` of at least two columns, none of them zero. Variances are those of populations.

    Raises:
      ValueError: for another shape.
    """
    if frame.ndim != 2 or frame.shape[1] < 2:
        raise ValueError(f'a frame has the shape [d, C] with at least two columns, not {frame.shape}')
    frame = frame.astype(jnp.float32)
    norms = jnp.sqrt(jnp.sum(frame * frame, axis=0))
    pairs = jnp.triu_indices(frame.shape[1], 1)
    angles = jnp.degrees(jnp.arccos(jnp.clip(_cosines(frame)[pairs], -1.0, 1.0)))
    gap = jnp.max(jnp.abs(_etf_gaps(frame)[pairs]))
    return FrameQuality(
        jnp.mean(norms), jnp.var(norms), jnp.mean(angles), jnp.var(angles), gap, jnp.mean(frame == 0, dtype=jnp.float32)
    )
