"""Losses: `(logits [B, C], labels [B], counts [C]) -> [B]`, one float32 value an example.

`counts` is the label histogram of the client that trains; losses that do not use it ignore it. Averaging over the real
examples of a batch happens in `objective`. Variants are made with `functools.partial(balanced_softmax, gamma=0.5)`.
"""

import jax.numpy as jnp
import optax

from fedjax_nc.base import Array

ABSENT = -1e9  # a log prior that removes a class; infinite ones would turn 0 * inf into NaN


def cross_entropy(logits: Array, labels: Array, counts: Array | None = None) -> Array:
    """Softmax cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)


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

    Raises:
      ValueError: for another `absent`.
    """
    prior = gamma * jnp.log(jnp.maximum(counts, 1).astype(jnp.float32))
    if absent == 'mask':
        prior = jnp.where((counts > 0) | (jnp.asarray(gamma) == 0), prior, ABSENT)
    elif absent != 'floor':
        raise ValueError(f"absent must be 'floor' or 'mask', not {absent!r}")
    return cross_entropy(logits.astype(jnp.float32) + prior, labels)


def dot_regression(logits: Array, labels: Array, counts: Array | None = None, *, target: Array | float = 1.0) -> Array:
    """Half the squared gap between the true class's logit and `target`; other classes do not matter.

    With logits that are cosines to a fixed ETF this is the dot-regression loss of Yang et al. (NeurIPS 2022), whose
    only force pulls a feature towards its class vector.
    """
    true = jnp.take_along_axis(logits.astype(jnp.float32), labels[:, None], axis=-1)[:, 0]
    return 0.5 * jnp.square(true - target)
