"""Losses: `(logits [B, C], labels [B] int in [0, C), counts [C]) -> [B]`, one float32 value an example.

`counts` is the label histogram of the client that trains; losses that do not use it ignore it. Averaging over the real
examples of a batch happens in `objective`. Variants are made with `functools.partial(balanced_softmax, gamma=0.5)`.
"""

import math

import jax
import jax.numpy as jnp

from fedjax_nc import checks
from fedjax_nc.base import Array

ABSENT = -1e9  #: a log prior that removes a class; infinite ones would turn 0 * inf into NaN


def cross_entropy(logits: Array, labels: Array, counts: Array | None = None) -> Array:
    """Softmax cross-entropy `-log softmax(logits)_y`: [B] float32.

    Args:
      logits: [B, C].
      labels: [B] int in [0, C).
      counts: not used.

    Raises:
      ValueError: as all losses, for other shapes than [B, C] and [B], labels that are no integers, or, where they are
        not traced, outside of [0, C).

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_nc import losses
      >>> values = losses.cross_entropy(jnp.array([[2.0, 0.0], [0.0, 0.0]]), jnp.array([0, 1]))
      >>> [round(float(u), 3) for u in values]
      [0.127, 0.693]
    """
    true = _true_logit(logits, labels)
    return jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1) - true


def balanced_softmax(
    logits: Array, labels: Array, counts: Array, *, gamma: Array | float = 1.0, absent: str = 'floor'
) -> Array:
    """Cross-entropy of logits shifted by the log of the client's class counts.

    `-log softmax(logits + gamma log n)_y`: the balanced loss of FedETF (Li et al., ICCV 2023), and at gamma = 1 the
    balanced softmax of Ren et al. (NeurIPS 2020). At gamma = 0 it is the cross-entropy.

    Args:
      logits: [B, C].
      labels: [B].
      counts: [C], label histogram of the client's training data.
      gamma: exponent of the counts.
      absent: what a class that the client lacks counts as: 'floor' counts it once, as in the released code of FedETF;
        'mask' removes it from the denominator, as in the paper.

    Returns:
      [B] float32.

    Raises:
      ValueError: for another `absent`, a negative `gamma`, counts of another shape; and as `cross_entropy`.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_nc import losses
      >>> logits, labels, counts = jnp.zeros((2, 3)), jnp.array([0, 1]), jnp.array([8, 2, 0])
      >>> [round(float(u), 3) for u in losses.balanced_softmax(logits, labels, counts)]  # log(11/8), log(11/2)
      [0.318, 1.705]
      >>> [round(float(u), 3) for u in losses.balanced_softmax(logits, labels, counts, absent='mask')]  # of 10
      [0.223, 1.609]
    """
    checks.rows('counts', counts, 1, logits.shape[-1])
    checks.number('gamma', gamma)
    prior = gamma * jnp.log(jnp.maximum(counts, 1).astype(jnp.float32))
    if absent == 'mask':
        prior = jnp.where((counts > 0) | (jnp.asarray(gamma) == 0), prior, ABSENT)
    elif absent != 'floor':
        raise ValueError(f"absent must be 'floor' or 'mask', not {absent!r}")
    return cross_entropy(logits.astype(jnp.float32) + prior, labels)


def dot_regression(logits: Array, labels: Array, counts: Array | None = None, *, target: Array | float = 1.0) -> Array:
    """Half the squared gap between the true class's logit and `target`; other classes do not matter.

    With logits that are cosines to a fixed ETF this is the dot-regression loss of Yang et al. (NeurIPS 2022), whose
    only force pulls a feature towards its class vector. Other arguments and errors (ValueError) are those of
    `cross_entropy`.
    """
    checks.number('target', target, -math.inf)
    return 0.5 * jnp.square(_true_logit(logits, labels) - target)


def restricted_softmax(
    logits: Array, labels: Array, counts: Array, *, alpha: Array | float = 0.5, soft: bool = False
) -> Array:
    """Cross-entropy of logits that are weakened for classes which the client lacks.

    `-log softmax(a * logits)_y` with `a_c = alpha` where `n_c = 0` and 1 elsewhere: the restricted softmax of FedRS (Li
    and Zhan, KDD 2021). Logits should have no bias, for `a_c` to scale `w_c^T z` alone. A negative logit is raised.

    Args:
      logits: [B, C].
      labels: [B].
      counts: [C], label histogram of the client's training data.
      alpha: factor for absent classes; 1 is the cross-entropy.
      soft: `a_c = alpha + (1 - alpha) n_c / max_j n_j` instead, as in the released code of FedRS.

    Returns:
      [B] float32.

    Raises:
      ValueError: for a negative `alpha`, counts of another shape; and as `cross_entropy`.
    """
    checks.rows('counts', counts, 1, logits.shape[-1])
    checks.number('alpha', alpha)
    checks.flags(soft=soft)
    n = counts.astype(jnp.float32)
    share = n / jnp.maximum(jnp.max(n), 1.0) if soft else jnp.sign(n)
    return cross_entropy(logits.astype(jnp.float32) * (alpha + (1.0 - alpha) * share), labels)


def weighted_cross_entropy(logits: Array, labels: Array, counts: Array | None = None, *, weights: Array) -> Array:
    """Cross-entropy times the weight of the true class, `weights [C]`; the mean of a batch divides by its size alone.

    The Ratio Loss of Wang et al. (AAAI 2021), whose weights `ratioloss.algorithm` finds. Other arguments and errors
    (ValueError) are those of `cross_entropy`.
    """
    checks.rows('weights', weights, 1, logits.shape[-1])
    values = cross_entropy(logits, labels)
    return weights[labels] * values


def positive(logits: Array, labels: Array, counts: Array | None = None, *, target: Array | float = 0.9) -> Array:
    """`max(0, target - logit_y)^2`: draws examples to their class without looking at any other.

    The loss of FedAwS's clients (Yu et al., ICML 2020), for logits that are cosines. Other arguments and errors
    (ValueError) are those of `cross_entropy`.
    """
    checks.number('target', target, -math.inf)
    return jnp.square(jnp.maximum(target - _true_logit(logits, labels), 0.0))


def _true_logit(logits: Array, labels: Array) -> Array:
    """The logit of each example's true class: [B, C] and [B] to [B] float32; NaN where there is no such class."""
    _fitting(logits, labels)
    labels = checks.widened(labels)
    classes = jnp.arange(logits.shape[1], dtype=labels.dtype)
    # By a comparison: the gradient of a gather is a scatter, which takes longer, to compile and on a TPU to compute.
    picked = jnp.sum(jnp.where(labels[:, None] == classes, logits.astype(jnp.float32), 0.0), axis=-1)
    return jnp.where((labels >= 0) & (labels < len(classes)), picked, jnp.nan)


def _fitting(logits: Array, labels: Array) -> None:
    """Raises ValueError unless there is one integer label for each row of `logits [B, C]`.

    Labels [B, 1] would be compared with every row, and the result still be a number.
    """
    checks.rows('logits', logits)
    checks.labels('labels', labels, len(logits), logits.shape[1])
