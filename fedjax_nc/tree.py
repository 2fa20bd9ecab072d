"""Arithmetic on pytrees of arrays. Two trees that go together have the same structure and shapes."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_nc.base import Array, Tree


def add(a: Tree, b: Tree, scale: Array | float = 1) -> Tree:
    """`a + scale * b`, leaf by leaf."""
    return jax.tree.map(lambda u, v: u + scale * v, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    """`a - b`, leaf by leaf."""
    return jax.tree.map(jnp.subtract, a, b)


def scale(a: Tree, factor: Array | float) -> Tree:
    """`factor * a`, leaf by leaf."""
    return jax.tree.map(lambda u: factor * u, a)


def by_path(a: Tree) -> dict[str, Any]:
    """The leaves of a tree by their paths, such as 'variables.params.head.w', in the order of the leaves."""
    found: dict[str, Any] = {}
    for path, leaf in jax.tree.leaves_with_path(a):
        name = jax.tree_util.keystr(path, simple=True, separator='.') or 'value'
        while name in found:  # a name with a dot in it may look like another's path
            name += "'"
        found[name] = leaf
    return found


def zeros(a: Tree) -> Tree:
    """Zeros of the shapes and types of `a`."""
    return jax.tree.map(jnp.zeros_like, a)


def where(condition: Array, a: Tree, b: Tree) -> Tree:
    """`a` where `condition`, [] bool, holds, else `b`."""
    return jax.tree.map(lambda u, v: jnp.where(condition, u, v), a, b)


def dot(a: Tree, b: Tree) -> Array:
    """Inner product of `a` and `b` over all leaves: [] float32."""

    def product(u: Array, v: Array) -> Array:
        return jnp.vdot(u.astype(jnp.float32), v.astype(jnp.float32), precision='highest')

    products = jax.tree.map(product, a, b)
    return functools.reduce(operator.add, jax.tree.leaves(products), jnp.float32(0))


def sqdist(a: Tree, b: Tree) -> Array:
    """Squared Euclidean distance of `a` and `b` over all leaves: [] float32."""
    gap = sub(a, b)
    return dot(gap, gap)


def split(params: dict[str, Tree], parts: Sequence[str] | None) -> tuple[dict[str, Tree], dict[str, Tree]]:
    """The top-level entries that `parts` names, and the others. `None` names all.

    Raises:
      ValueError: for a name that `params` does not have.
    """
    if parts is None:
        return params, {}
    if isinstance(parts, str):
        raise ValueError(f'parts must be a sequence of names, such as ({parts!r},), not {parts!r}')
    unknown = sorted(set(parts) - set(params))
    if unknown:
        raise ValueError(f'no parameters are called {unknown}; there are {sorted(params)}')
    return ({k: v for k, v in params.items() if k in parts}, {k: v for k, v in params.items() if k not in parts})


def rows_where(condition: Array, a: Tree, other: Array | float) -> Tree:
    """The rows of every leaf of `a` for which `condition [n]` holds, and `other` in place of those for which not."""
    return jax.tree.map(
        lambda u: jnp.where(jnp.expand_dims(condition, range(1, u.ndim)), u, jnp.asarray(other, u.dtype)), a
    )


def finite(a: Tree) -> Array:
    """Whether all leaves of `a` are free of NaN and infinity: [] bool; True without floats."""
    floats = _floats(a)
    if any(isinstance(u, jax.core.Tracer) for u in floats):
        return jnp.all(jnp.array([jnp.all(jnp.isfinite(u)) for u in floats]))
    # Each shape would be compiled for a look that is taken once.
    return jnp.array(all(np.isfinite(u).all() for u in floats))


def finite_rows(a: Tree) -> Array:
    """Whether each row of `a` is free of NaN and infinity, over all leaves [n, ...]: [n] bool; [] without floats."""
    return functools.reduce(jnp.logical_and, [u < jnp.inf for u in _largest(a)], jnp.array(True))


def nan_rows(a: Tree) -> Array:
    """Whether each row of `a` holds NaN, over all leaves [n, ...]: [n] bool; [] without floats."""
    return functools.reduce(jnp.logical_or, [jnp.isnan(u) for u in _largest(a)], jnp.array(False))


def _largest(a: Tree) -> list[Array]:
    """The largest size of a number in each row of each leaf, [n]; of a row with NaN it is NaN.

    Of booleans of all numbers a CPU would make a round of small models 4 % longer.
    """
    return [jnp.max(jnp.abs(u).reshape(len(u), -1), axis=1, initial=0) for u in _floats(a)]


def _floats(a: Tree) -> list[Array]:
    return [u for u in jax.tree.leaves(a) if jnp.issubdtype(jnp.result_type(u), jnp.inexact)]


def take(a: Tree, rows: Array) -> Tree:
    """The `rows [m]` int of every leaf of `a [n, ...]`: [m, ...]; a row beyond the end is clipped to the last."""
    return jax.tree.map(lambda u: jnp.take(u, rows, axis=0, mode='clip'), a)


def put(a: Tree, rows: Array, values: Tree) -> Tree:
    """`a [n, ...]` with `values [m, ...]` in the `rows [m]` int of every leaf; rows beyond the end are dropped."""
    return jax.tree.map(lambda u, v: u.at[rows].set(v, mode='drop'), a, values)


def vmapped(fn: Callable[..., Tree], has_lanes: tuple[Tree, ...]) -> Callable[..., Tree]:
    """`jax.vmap`, except that a single lane is run as it is: its convolutions stay ordinary ones.

    Args:
      fn: of one lane.
      has_lanes: for each argument, or each part of it, whether it has lanes, [n, ...]; at least one must.

    Returns:
      The same of all lanes; what it gives is [n, ...], Python's numbers included.
    """

    def run(*args: Tree) -> Tree:
        parts = jax.tree.leaves(jax.tree.map(lambda has, u: jax.tree.leaves(u) if has else [], has_lanes, args))
        if len(parts[0]) > 1:
            return jax.vmap(fn, jax.tree.map(lambda has: 0 if has else None, has_lanes))(*args)
        first = jax.tree.map(lambda has, u: jax.tree.map(lambda v: v[0], u) if has else u, has_lanes, args)
        return jax.tree.map(lambda u: jnp.asarray(u)[None], fn(*first))

    return run
