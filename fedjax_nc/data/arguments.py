"""Arguments of what runs once on the host, before training: unlike those of `checks`, they must be known."""

import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedjax_nc import checks
from fedjax_nc.base import Array


def array(name: str, value: Any) -> NDArray[Any]:
    """An array in host memory.

    Args:
        name: what the caller calls it.
        value: anything.

    Raises:
        ValueError: for what is traced, or nested sequences of unequal lengths.
    """
    _known(name, value)
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise ValueError(f'{name} has entries that are masked, which would be taken: fill or drop them.')
    try:
        return np.asarray(value)
    except (ValueError, TypeError) as error:
        raise ValueError(f'{name} must be an array or make one; got {checks.shown(value)}.') from error


def on_device(name: str, value: Any) -> Array:
    """Examples as jax stores them: integers of at most 32 bits, floats of 64 as float32.

    Args:
        name: what the caller calls them.
        value: anything.

    Raises:
        ValueError: for what are no real, finite numbers, or where storing them would make others of them.
    """
    given = value if isinstance(value, jax.Array) else array(name, value)
    if not any(jnp.issubdtype(given.dtype, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating)):
        raise ValueError(f'{name} must be real numbers; got {given.dtype}.')
    if isinstance(given, np.ndarray) and given.dtype.kind == 'f' and given.dtype.itemsize > 8:
        given = given.astype(np.float64)
    if isinstance(given, np.ndarray) and not given.dtype.isnative:
        given = given.astype(given.dtype.newbyteorder('='))
    with np.errstate(over='ignore'):  # what overflows is found below
        stored = jnp.asarray(given)
    if stored.dtype == np.float64:  # which jax keeps where 64 bits are enabled
        stored = stored.astype(jnp.float32)
    if jnp.issubdtype(given.dtype, jnp.integer) and stored.dtype != given.dtype and given.size:
        low, high, limits = given.min(), given.max(), jnp.iinfo(stored.dtype)
        if low < limits.min or high > limits.max:
            raise ValueError(f'{name} goes from {low} to {high} and does not fit {stored.dtype}: make it floating.')
    checks.finite(f'{name} as {stored.dtype}', stored)
    return stored


def number(name: str, value: Any, low: float = 0.0, **limits: Any) -> float:
    """A known number in the range that `checks.number` takes.

    Raises:
        ValueError: for all else.
    """
    _known(name, value)
    checks.number(name, value, low, **limits)
    return float(value)


def several(name: str, values: Any, what: str) -> None:
    """Refuses what is no sequence of at least one.

    Args:
        name: what the caller calls it.
        values: anything.
        what: its entries, in words.

    Raises:
        ValueError: for all else.
    """
    if isinstance(values, str) or not (isinstance(values, Sequence) or np.ndim(values)):
        raise ValueError(f'{name} must be {what}; got {checks.shown(values)}.')
    if not len(values):
        raise ValueError(f'{name} is empty: give {what}.')


def labels(name: str, y: Any, length: int | None = None, classes: int | None = None) -> NDArray[np.intp]:
    """A vector of known labels, at least one, in [0, C), as `checks.labels` has them.

    Raises:
        ValueError: for all else.
    """
    known = array(name, y)
    if known.size == 0:
        raise ValueError(f'{name} must be a non-empty vector of integers.')
    checks.labels(name, known, length, classes)
    return known.astype(np.intp)


def classes_of(name: str, y: NDArray[np.integer], advice: str = '') -> int:
    """How many classes labels are of, by the largest; warns the caller's caller where they seem to begin with 1."""
    count = int(y.max()) + 1
    if y.min() == 1:
        warnings.warn(
            f'no label of {name} is 0 and they go to {count - 1}, so that there are {count} classes, the first of them '
            f'empty: subtract 1 if they are numbered from 1{advice}',
            stacklevel=3,
        )
    return count


def _known(name: str, value: Any) -> None:
    if checks.traced(value):
        raise ValueError(f'{name} must be known: call this outside of `jit`, `vmap` and `grad`.')


def pixels(name: str, x: Any) -> None:
    """Warns of images that models would take for something else, of those who called the caller.

    Args:
        name: what the caller calls them.
        x: examples that are no images, too.
    """
    if np.ndim(x) != 4 or checks.traced(x):
        return
    _, height, width, channels = x.shape
    if channels not in (1, 3):
        if height in (1, 3) and width == channels >= 8:
            warnings.warn(
                f'{name} looks like images with their channels first, of the shape {tuple(x.shape)}: the models here '
                'take [n, height, width, channels], see numpy.moveaxis',
                stacklevel=3,
            )
        return
    if x.dtype == np.uint8:
        return
    few = np.asarray(x[:100])
    if few.size and few.min() >= 0 and 128 <= few.max() <= 255 and (few == np.round(few)).all():
        warnings.warn(
            f'{name} holds what look like pixels from 0 to 255 as {few.dtype}, which no model scales: make them uint8, '
            'or divide floats by 255',
            stacklevel=3,
        )
