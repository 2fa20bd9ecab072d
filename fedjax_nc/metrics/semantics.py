"""Whether class vectors know which classes are alike: the semantics of FedNH's prototypes on CIFAR-100.

Tackling Data Heterogeneity in Federated Learning with Class Prototypes.
Dai, Chen, Li, Heinecke, Sun, Xu. AAAI 2023. https://arxiv.org/abs/2212.02758 (Figure 3)

The figure is `similarity.pairwise_cosine(w)` with rows and columns in `class_order()`: classes of one super-class stand
side by side, and blocks of five on the diagonal are bright where prototypes are alike. `semantic_gap` is its number.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from fedjax_nc.base import Array
from fedjax_nc.metrics.similarity import pairwise_cosine

CIFAR100_SUPERCLASSES = (
    (4, 30, 55, 72, 95),  # aquatic mammals
    (1, 32, 67, 73, 91),  # fish
    (54, 62, 70, 82, 92),  # flowers
    (9, 10, 16, 28, 61),  # food containers
    (0, 51, 53, 57, 83),  # fruit and vegetables
    (22, 39, 40, 86, 87),  # household electrical devices
    (5, 20, 25, 84, 94),  # household furniture
    (6, 7, 14, 18, 24),  # insects
    (3, 42, 43, 88, 97),  # large carnivores
    (12, 17, 37, 68, 76),  # large man-made outdoor things
    (23, 33, 49, 60, 71),  # large natural outdoor scenes
    (15, 19, 21, 31, 38),  # large omnivores and herbivores
    (34, 63, 64, 66, 75),  # medium-sized mammals
    (26, 45, 77, 79, 99),  # non-insect invertebrates
    (2, 11, 35, 46, 98),  # people
    (27, 29, 44, 78, 93),  # reptiles
    (36, 50, 65, 74, 80),  # small mammals
    (47, 52, 56, 59, 96),  # trees
    (8, 13, 48, 58, 90),  # vehicles 1
    (41, 69, 81, 85, 89),  # vehicles 2
)
"""The fine labels of each of the 20 super-classes, which are numbered as in the data set."""


def superclass() -> Array:
    """The super-class of each of CIFAR-100's fine labels: [100] int32."""
    return jnp.argsort(class_order()) // 5


def class_order() -> Array:
    """CIFAR-100's fine labels by super-class, then by label: [100] int32."""
    return jnp.array(CIFAR100_SUPERCLASSES).reshape(-1)


class SemanticGap(NamedTuple):
    """How much closer class vectors are within groups than between them; scalars in [-2, 2]."""

    plain: Array  #: of the rows as they are
    centred: Array  #: of the rows less their mean, a common part that softmax ignores


def semantic_gap(w: Array, groups: ArrayLike) -> SemanticGap:
    """Mean cosine between classes of one group minus mean cosine between classes of different groups.

    Args:
      w: class vectors [C, D], one row a class: FedNH's `fixed['w']`, or the transposed `w` of a linear head.
      groups: [C] int, the group of each class, such as `superclass()`.

    Raises:
      ValueError: if there is not one group for each class, no two classes share one, or all do; the last two go
        unnoticed under `jit`.
    """
    groups = jnp.asarray(groups)
    if w.ndim != 2 or groups.shape != w.shape[:1]:
        raise ValueError(f'give class vectors [C, D] and groups [C], not {w.shape} and {groups.shape}')
    same = groups[:, None] == groups
    within, between = same & ~jnp.eye(len(w), dtype=bool), ~same
    if not isinstance(same, jax.core.Tracer) and not (within.any() and between.any()):
        raise ValueError('the gap needs two classes in one group and two groups: every class is alone, or all are one')

    def gap(rows: Array) -> Array:
        cosines = pairwise_cosine(rows)
        return jnp.mean(cosines, where=within) - jnp.mean(cosines, where=between)

    w = w.astype(jnp.float32)
    return SemanticGap(gap(w), gap(w - jnp.mean(w, axis=0)))
