"""Neural collapse: how far features and classifier are from the geometry at which training ends.

Prevalence of neural collapse during the terminal phase of deep learning training.
Papyan, Han, Donoho. PNAS 2020. https://arxiv.org/abs/2008.08186

Features h_i fall into their class means m_c (NC1), these around the global mean m into a simplex ETF (NC2), and the
classifier's vectors point along them (NC3). Measures take features `z [n, D]`, labels `y [n]` int in [0, C) and,
where some rows count more than others or not at all, `weight [n]`. The global mean is that of the class means, so
that unequal numbers of examples do not move it. What takes features raises ValueError for other shapes, or labels that
are no integers in [0, C), as far as they are known.
"""

from typing import NamedTuple

import jax.numpy as jnp

from fedjax_nc import classwise
from fedjax_nc.base import Array
from fedjax_nc.evaluate import over
from fedjax_nc.metrics.similarity import ByClass, less, mean_over_pairs, pairwise_cosine, scaled, unit


class Centres(NamedTuple):
    """Where the classes lie. Rows of absent classes are zero."""

    mean: Array  #: [C, D] float32, class means
    centred: Array  #: [C, D] float32, class means less the global mean
    present: Array  #: [C] bool


def centres(z: Array, y: Array, classes: int, weight: Array | None = None) -> Centres:
    """Class means of features, and their gaps to the mean of the class means.

    Args:
      z: features [n, D].
      y: labels [n].
      classes: their number C.
      weight: weights [n], 1 by default.
    """
    mean, count = classwise.means(z, y, _weights(y, weight), classes)
    present = count > 0
    middle = over(mean, present).mean
    return Centres(mean, less(jnp.where(present[:, None], mean, middle), middle), present)


def nc1(z: Array, y: Array, classes: int, weight: Array | None = None) -> Array:
    """NC1, scatter within classes over scatter between them: `sum_c tr Sigma_c / sum_c |m_c - m|^2`, a scalar.

    `tr Sigma_c` is the mean of `|h_i - m_c|^2` over the examples of class c. 0 means collapse; rotating, moving or
    scaling the features changes nothing; infinite where all class means coincide, as those of a single class do.
    Arguments are those of `centres`.
    """
    if weight is not None:  # of what does not count nothing may be the largest
        z = jnp.where(jnp.asarray(weight)[:, None] > 0, z, 0)
    z = scaled(z)  # so that squares neither vanish nor overflow
    at = centres(z, y, classes, weight)
    squares = jnp.sum(jnp.square(z - at.mean[y]), axis=1, keepdims=True)
    within = jnp.sum(classwise.means(squares, y, _weights(y, weight), classes)[0])
    between = jnp.sum(jnp.square(at.centred))
    return jnp.where(between == 0, jnp.inf, within / jnp.where(between == 0, 1.0, between))


def nc1_cosine(z: Array, y: Array, classes: int, weight: Array | None = None) -> Array:
    """NC1 as the released code of FedETF (Li et al., ICCV 2023) logs it: mean over examples of `cos(h_i, m_{y_i})`.

    1 means collapse. Means are not centred, so that features with a large common part come close to 1 as well.
    Arguments are those of `centres`; a scalar.
    """
    cosines = jnp.sum(unit(z) * unit(centres(z, y, classes, weight).mean)[y], axis=1)
    return over(cosines, _weights(y, weight)).mean


def nc2(z: Array, y: Array, classes: int, weight: Array | None = None, *, centred: bool = True) -> Array:
    """NC2, how far class means are from a simplex ETF: mean over pairs of classes of `|cos(m_i, m_j) + 1/(C-1)|`.

    Err_NC2 of FedETF (Li et al., ICCV 2023), a scalar; NaN with fewer than two classes, which have no pair. C counts
    those that are present.

    Args:
      z: features [n, D].
      y: labels [n].
      classes: their number C.
      weight: weights [n], 1 by default.
      centred: whether the global mean is first taken off.
    """
    at = centres(z, y, classes, weight)
    return frame_error((at.centred if centred else at.mean).T, at.present)


def frame_error(frame: Array, present: Array | None = None) -> Array:
    """Mean over pairs of a frame's columns of `|cos + 1/(C-1)|`, a scalar; 0 for a simplex ETF, whatever its scale.

    NaN with fewer than two columns. The largest instead of the mean is the `gap` of `frames.frame_quality`.

    Args:
      frame: [d, C], one column a class.
      present: [C] bool, the classes that count; all by default.
    """
    number = frame.shape[1] if present is None else jnp.sum(present)
    error = mean_over_pairs(jnp.abs(pairwise_cosine(frame.T) + 1.0 / jnp.maximum(number - 1, 1)), present)
    return jnp.where(number > 1, error, jnp.nan)


def nc3(z: Array, y: Array, vectors: Array, weight: Array | None = None) -> ByClass:
    """NC3 by examples: `a_c`, the mean of `cos(v_c, h_i)` over the examples of class c, and its mean over classes.

    As FedETF (Li et al., ICCV 2023) defines it, with the projected features as `z` and the ETF as `vectors`. 1 means
    collapse.

    Args:
      z: features [n, D].
      y: labels [n].
      vectors: [D, C], one column a class, as heads and frames have them.
      weight: weights [n], 1 by default.

    Raises:
      ValueError: if features and vectors differ in dimension.
    """
    _check(z, y, vectors)
    cosines = jnp.sum(unit(z) * unit(vectors.T)[y], axis=1, keepdims=True)
    values, count = classwise.means(cosines, y, _weights(y, weight), vectors.shape[1])
    return ByClass(values[:, 0], count > 0, over(values[:, 0], count > 0).mean)


def nc3_means(z: Array, y: Array, vectors: Array, weight: Array | None = None) -> ByClass:
    """NC3 by class means, self-duality: `cos(v_c, m_c - m)` of each class, and its mean over classes.

    1 means collapse. Arguments and errors are those of `nc3`: ValueError.
    """
    _check(z, y, vectors)
    at = centres(z, y, vectors.shape[1], weight)
    values = jnp.sum(unit(at.centred) * unit(vectors.T), axis=1)
    return ByClass(values, at.present, over(values, at.present).mean)


def _weights(y: Array, weight: Array | None) -> Array:
    return jnp.ones(y.shape, jnp.float32) if weight is None else weight


def _check(z: Array, y: Array, vectors: Array) -> None:
    if vectors.ndim != 2:
        raise ValueError(f'vectors must have the shape [D, C], not {vectors.shape}')
    classwise.check_rows(z, y, _weights(y, None), vectors.shape[1])
    if z.shape[1] != vectors.shape[0]:
        raise ValueError(
            f'features of {z.shape[1]} dimensions cannot be compared with vectors {vectors.shape}: '
            'give vectors [D, C], and features in the space of the classifier'
        )
