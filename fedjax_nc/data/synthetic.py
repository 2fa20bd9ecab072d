"""Small made-up data sets for tests and demonstrations."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedjax_nc import checks
from fedjax_nc.data import arguments


def clusters(
    seed: int, num_examples: int, num_classes: int, dim: int, *, separation: float = 4.0, centers_seed: int = 0
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Gaussian clusters of unit variance around random centres.

    Args:
        seed: draws the examples.
        num_examples: P; class sizes differ by one at most.
        num_classes: the number of classes, C.
        dim: length of an example.
        separation: typical distance of a centre from the origin; 0 leaves nothing to learn.
        centers_seed: draws the centres, so that sets of different `seed` can serve as training and test set.

    Returns:
        x [P, dim] float32 and y [P] int32 in random order.

    Raises:
        ValueError: if a number is not of its kind.
    """
    seed = checks.static('`seed`', seed, 0)
    num_examples = checks.static('`num_examples`', num_examples)
    num_classes = checks.static('`num_classes`', num_classes)
    dim = checks.static('`dim`', dim)
    centers_seed = checks.static('`centers_seed`', centers_seed, 0)
    separation = arguments.number('`separation`', separation)
    centers = np.random.default_rng(centers_seed).normal(size=(num_classes, dim)) * separation / np.sqrt(dim)
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(num_examples) % num_classes)
    x = centers[y] + rng.normal(size=(num_examples, dim))
    return x.astype(np.float32), y.astype(np.int32)


def spiral(seed: int, sizes: Sequence[int]) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Spiral arms in the plane, one a class: the toy problem of FedNH (Dai et al., AAAI 2023, figure 1).

    Arm i of C has radius from 1 to 10 and angle from 2 pi i / C to 2 pi (i + 1) / C, plus Uniform[0, 0.5] per point,
    as in the authors' code; the noise and the sweep printed in the paper cannot be learnt.

    Args:
        seed: draws the noise.
        sizes: examples of each class; the paper has six classes of 3000, or 3000, 1500, 750, 375, 187, 93.

    Returns:
        x [P, 2] float32 and y [P] int32, class after class.

    Raises:
        ValueError: if `seed` is negative, or `sizes` holds anything but numbers of examples, or none.
    """
    seed = checks.static('`seed`', seed, 0)
    arguments.several('`sizes`', sizes, 'one number of examples per class')
    for n in sizes:
        checks.whole('each of `sizes`', n, 0)
    rng = np.random.default_rng(seed)
    arms = []
    for i, n in enumerate(sizes):
        radius = np.linspace(1, 10, n)
        angle = 2 * np.pi * np.linspace(i, i + 1, n) / len(sizes) + rng.uniform(0, 0.5, n)
        arms.append(np.stack([radius * np.sin(angle), radius * np.cos(angle)], axis=1))
    return np.concatenate(arms).astype(np.float32), np.repeat(np.arange(len(sizes)), sizes).astype(np.int32)
