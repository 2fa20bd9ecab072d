"""Where two trees differ, or one is broken, in words: what refusals and the clauses of `testing` say."""

from typing import Any

import jax
import numpy as np

from fedjax_nc import _keys
from fedjax_nc.base import Array, State, Tree


def plain(leaves: Any) -> list[Array]:
    """Leaves that NumPy can hold: keys become their numbers."""
    return jax.tree.leaves(_keys.plain(leaves))


def described(u: Any) -> str:
    """Type and shape, and whether it is one that yields to others."""
    return f'{u.dtype}[{",".join(map(str, u.shape))}]{" (weak)" if getattr(u, "weak_type", False) else ""}'


def restructured(a: Tree, b: Tree) -> str:
    """The structures of two trees where they differ, in one line."""
    kinds: list[Any] = [jax.tree.structure(u) for u in (a, b)]
    if kinds[0] == kinds[1]:
        return ''
    one, other = (' '.join(str(kind).removeprefix('PyTreeDef').split()) for kind in kinds)
    if one == other:
        return 'parts that are no arrays, and print alike'
    start = next((i for i, (u, v) in enumerate(zip(one, other, strict=False)) if u != v), 0)
    return ' and '.join(f'...{text[max(start - 20, 0) : start + 40]}...' for text in (one, other))


def reshaped(a: Tree, b: Tree) -> str:
    """Where the structures, types or shapes of two trees differ, seen from the first; nothing where they agree."""
    if said := restructured(a, b):
        return said
    for (path, u), v in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        one, other = (jax.typeof(w) for w in (u, v))
        free = getattr(one, 'weak_type', False)  # of a Python number, which takes the type of what it meets
        if one.shape != other.shape or (one.dtype != other.dtype and not free):
            place = jax.tree_util.keystr(path)
            return f'{place}{" " if place else ""}was {one.str_short()} and came back as {other.str_short()}'
    return ''


def changed(a: Tree, b: Tree, atol: float) -> str:
    """Where two trees of one structure are apart by more than `atol`, and how far; nothing where they agree."""
    if said := restructured(a, b):
        return said
    apart = []
    for (path, u), v in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        place = jax.tree_util.keystr(path) or 'there'
        one, other = (np.asarray(plain(w)[0]) for w in (u, v))
        if one.shape != other.shape:
            return f'{place} is {one.shape} and {other.shape}'
        same = (one == other) | ((one != one) & (other != other))
        if same.all():
            continue
        gap = float(np.max(np.abs(one.astype(np.float64) - other.astype(np.float64))[~same]))
        if not gap <= atol:
            apart.append(f'{place} by {gap:.2g}' if np.isfinite(gap) else f'{place} where one is NaN or infinite')
    more = f' and {len(apart) - 1} more' if len(apart) > 1 else ''
    return apart[0] + more if apart else ''


def unsound(a: Tree, first: State | None) -> str:
    """Where a tree holds NaN or infinity; what was infinite in the first states of clients may be so."""
    began = [] if first is None else jax.tree.leaves(State((), first.clients))
    leaves = jax.tree_util.tree_leaves_with_path(a)
    infinite = [False] * (len(leaves) - len(began)) + [bool(np.isinf(np.asarray(plain(u)[0])).any()) for u in began]
    for (path, leaf), may in zip(leaves, infinite, strict=True):
        u = np.asarray(plain(leaf)[0]).astype(np.float64)
        if np.isnan(u).any() or (np.isinf(u).any() and not may):
            return f'NaN or infinity in {jax.tree_util.keystr(path)}'
    return ''


def in_one_line(error: BaseException) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines() or ['']
    text = f'{type(error).__name__}: {lines[0]}'.rstrip(': ')
    return text if len(text) <= 200 else text[:197] + '...'
