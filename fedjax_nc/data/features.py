"""Feature skew: clients that see the same things differently.

Every example belongs to one client, so its features can be changed once, in the pool, before it goes to the device:
nothing is kept per client. Training examples and the local tests that `split` makes of them change alike; a common test
set is another pool, and stays as it is.

    parts = data.iid(y, 20, seed=0)
    clients = data.federate(data.rotate(x, parts), y, parts)

Clients that each see one domain are a partition, `by_domain`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_nc import checks
from fedjax_nc.data import arguments
from fedjax_nc.data.partition import Parts


def rotate(x: ArrayLike, parts: Parts, degrees: Sequence[float] = (0, 90, 180, 270)) -> NDArray[Any]:
    """Turns the images of client k by `degrees[k mod n]`, counter-clockwise around their centre.

    The scene of rotated images of IFCA (Ghosh et al., NeurIPS 2020), whose four kinds of clients are the default.
    Quarter turns move pixels and change none; others interpolate linearly and fill what comes into view with 0.

    Args:
        x: [P, H, W, ch] or [P, H, W] images of any real type.
        parts: K vectors of rows, no row in two of them.
        degrees: n angles, finite and of any sign.

    Returns:
        A copy of `x`, of the same shape and type; rows of nobody are as they were.

    Raises:
        ValueError: if an argument is not of this kind, or a quarter turn does not fit because H is not W.
    """
    images = arguments.array('`x`', x)
    if images.ndim not in (3, 4):
        raise ValueError(f'`x` must be images [P, H, W, ch]; got shape {images.shape}.')
    arguments.several('`degrees`', degrees, 'one angle per kind of client')
    angles = [arguments.number('each of `degrees`', angle, -np.inf) for angle in degrees]
    out = images.copy()
    for k, rows in enumerate(_disjoint(len(images), parts)):
        angle = angles[k % len(angles)] % 360
        quarters = round(angle / 90)
        if abs(angle - 90 * quarters) < 1e-6:  # as sums of tenths are
            if quarters % 2 and images.shape[1] != images.shape[2]:
                raise ValueError(
                    f'images of {images.shape[1]}x{images.shape[2]} cannot be turned by {angle:g} degrees.'
                )
            out[rows] = np.rot90(images[rows], int(quarters), axes=(1, 2))
        elif len(rows):
            from scipy import ndimage  # late: a tenth of what importing the library takes

            turned = ndimage.rotate(images[rows].astype(np.float64), angle, axes=(2, 1), reshape=False, order=1)
            if images.dtype == bool or np.issubdtype(images.dtype, np.integer):
                turned = np.rint(turned)
            out[rows] = turned.astype(images.dtype)
    return out


def add_noise(x: ArrayLike, parts: Parts, variance: float, *, seed: int) -> NDArray[np.floating]:
    """Adds Gaussian noise to the examples of each client, the more the higher its number.

    The noise-based feature skew of Li, Diao, Chen, He (Federated Learning on Non-IID Data Silos, ICDE 2022): client
    k = 1 .. K has noise of mean 0 and variance `variance k / K`. (In the authors' code `variance (k - 1) / (K - 1)` is
    the standard deviation.) It is drawn once, and not anew in each epoch; what client k gets depends on its rows, the
    seed and k, not on the other clients.

    Args:
        x: [P, ...] uint8, which is scaled to [0, 1] first, or floating.
        parts: K vectors of rows, no row in two of them.
        variance: that of the last client, not negative; 0.1 in the paper.
        seed: a non-negative integer.

    Returns:
        [P, ...] floating, float32 of uint8; not clipped. Rows of nobody have no noise.

    Raises:
        ValueError: if an argument is not of this kind.
    """
    given = arguments.array('`x`', x)
    variance = arguments.number('`variance`', variance)
    seed = checks.static('`seed`', seed, 0)
    if given.dtype == np.uint8:
        out = given.astype(np.float32) / 255
    elif np.issubdtype(given.dtype, np.floating) and given.ndim:
        out = given.copy()
    else:
        raise ValueError(f'`x` must be uint8 or floating examples; got {given.dtype}, shape {given.shape}.')
    for k, rows in enumerate(disjoint := _disjoint(len(given), parts)):
        rng = np.random.default_rng((seed, k))
        noise = rng.normal(size=(len(rows), *given.shape[1:]))
        out[rows] += (np.sqrt(variance * (k + 1) / len(disjoint)) * noise).astype(out.dtype)
    return out


def _disjoint(pool: int, parts: Parts) -> list[NDArray[np.intp]]:
    """The rows of each client, refused if one is out of range or has two owners."""
    arguments.several('`parts`', parts, 'one vector of rows per client')
    given = [arguments.array(f'`parts[{k}]`', part) for k, part in enumerate(parts)]
    for k, part in enumerate(given):
        if part.ndim != 1 or (part.size and not np.issubdtype(part.dtype, np.integer)):
            raise ValueError(f'`parts[{k}]` must be a vector of integer rows; got shape {part.shape}, {part.dtype}.')
    rows = [part.astype(np.intp) for part in given]
    joined = np.concatenate(rows)
    if joined.size and not 0 <= joined.min() <= joined.max() < pool:
        raise ValueError(f'`parts` has rows from {joined.min()} to {joined.max()}; the pool has {pool}.')
    if (times := np.bincount(joined, minlength=pool)).max(initial=0) > 1:
        raise ValueError(f'row {times.argmax()} belongs to several clients, who cannot see it differently.')
    return rows
