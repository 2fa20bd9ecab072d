"""Random keys as numbers, which files and messages can hold, and back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_nc.base import Array, Tree


def keyed(u: Any) -> bool:
    """Whether an array, or the shape of one, is one of random keys."""
    return jax.dtypes.issubdtype(getattr(u, 'dtype', np.float32), jax.dtypes.prng_key)


def plain(a: Tree) -> Tree:
    """A tree whose random keys are arrays of numbers."""
    return jax.tree.map(lambda u: jax.random.key_data(u) if keyed(u) else u, a)


def again(value: Any, like: Any) -> Array:
    """A leaf from its numbers: a key where `like`, an array or its shape, is one."""
    if keyed(like):
        kind = jax.random.key_impl(jnp.empty((), like.dtype))
        return jax.random.wrap_key_data(jnp.asarray(value), impl=kind)
    return jnp.asarray(value)
