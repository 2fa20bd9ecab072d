"""From an equinox module to the library's `Model`. It needs equinox."""

import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from fedjax_nc import checks
from fedjax_nc.base import Array, Model, Tree
from fedjax_nc.models.adapter import Preprocess, as_state, as_values, asked, found, maker, modelled

Make = Callable[..., eqx.Module]
AXIS = 'batch'


def from_equinox(
    module: eqx.Module | Make, preprocess: Preprocess | None = None, *, classifier: str | None = None
) -> Model:
    """Makes a `Model` of an equinox module of one example, `x [...] -> features [D]`.

        model = models.from_equinox(lambda key: Net(64, key=key))

    Arrays of floats become the parameters, and what `eqx.nn.State` holds the `stats`, by their paths in the module:
    'layers.0.weight'. The module's `__call__` is given by name what it asks for: `key`, another for each example and
    None in evaluation; `state`, which it then returns with the features; and, as in `from_flax`, whether it trains.
    `eqx.nn.inference_mode` is on in evaluation. `eqx.nn.BatchNorm` leaves out rows that are padding, and needs the
    axis name 'batch'.

    Args:
        module: makes the body from `key`, such as a class; or a module, whose numbers are then the first ones whatever
            the key: those of a model that was trained before, for instance.
        preprocess: of batches, as for `from_flax`. Images of the library's data have their channels last.
        classifier: the attribute that classifies, such as 'head' or 'layers.2', if the module ends in one. It is left
            out: the features are what it would be given.

    Returns:
        The model, as of `from_flax`.

    Raises:
        ValueError: if `module` is neither, `preprocess` no function, there is no part `classifier`, or a module with
            state was given without what makes it.
    """
    make = (lambda key: module) if isinstance(module, eqx.Module) else maker(module, 'key', 'an eqx.Module')

    def made(key: Array) -> tuple[Any, eqx.nn.State]:
        try:
            body, state = eqx.nn.make_with_state(make)(key)
        except ValueError as error:
            raise ValueError('`module` came from eqx.nn.make_with_state: give what it was made by') from error
        if not isinstance(body, eqx.Module):
            raise ValueError(f'`module` must make an equinox Module; it made {checks.shown(body)}.')
        if classifier is not None:
            body = eqx.tree_at(lambda part: found(part, classifier), body, _Identity())
        return body, state

    shapes, weak = _shapes(made)
    state_like = jax.tree.map(lambda u: jax.ShapeDtypeStruct(u.shape, u.dtype), weak)  # as `stats` come back
    norms = [part for part in jax.tree.leaves(shapes, is_leaf=_is_norm) if _is_norm(part)]
    for norm in norms:
        if norm.axis_name != AXIS:
            raise ValueError(f'eqx.nn.BatchNorm must have the axis name {AXIS!r}, not {norm.axis_name!r}.')
    trained, static = eqx.partition(shapes, _is_trained)
    if others := [u for u in jax.tree.leaves(static) if isinstance(u, jax.ShapeDtypeStruct)]:
        raise ValueError(
            f'the module holds {len(others)} arrays that are no floats: make them NumPy arrays or static fields'
        )
    # Of the class: what `eqx.filter_jit` makes of a method of an instance does not tell what it takes.
    named = asked(type(shapes).__call__, 2, known=('key', 'state'))
    takes = inspect.signature(type(shapes).__call__).parameters.get('state')
    stateful = bool(jax.tree.leaves(state_like))
    if takes is None if stateful else takes is not None and takes.default is takes.empty:
        raise ValueError(
            'a module with state takes and returns it: `__call__(self, x, state)`; and is made anew, '
            'from_equinox(lambda key: Net(key=key)), not given'
        )

    held_like = _held(shapes, state_like)

    def state_of(stats: Tree) -> eqx.nn.State:
        state, held = state_like, _sums(shapes, _filled(held_like, as_state(stats, _flat(held_like))))
        for name, index in _indices(shapes).items():
            state = jax.tree.map(lambda u: u, state).set(index, held[name])
        return state

    def init(key: Array, x: Array) -> tuple[Tree, Tree]:
        body, state = made(key)
        return _flat(eqx.filter(body, _is_trained)), as_values(_flat(_averages(body, _held(body, state)))) or ()

    def apply(params: Tree, stats: Tree, x: Array, mask: Array | None, key: Array | None) -> tuple[Array, Tree]:
        body = eqx.combine(_filled(trained, params), static)
        body = eqx.nn.inference_mode(body, value=key is None)
        state = state_of(stats) if stateful else ()
        rows = jnp.arange(x.shape[0])
        real = jnp.ones(x.shape[0], bool) if mask is None else mask

        def one(x: Array, row: Array, real: Array) -> tuple[Array, Any]:
            noise = None if key is None else jax.random.fold_in(key, row)
            # A part of the module, so that what `eqx.filter_jit` keeps of a call holds nothing of this one.
            known = jax.tree.map(lambda part: _Masked(part, real) if _is_norm(part) else part, body, is_leaf=_is_norm)
            out = known(x, **named(None, key is not None, key=noise, **({'state': state} if stateful else {})))
            return out if stateful else (out, ())

        z, new = jax.vmap(one, out_axes=(0, None), axis_name=AXIS)(x, rows, real)
        return z, as_values(_flat(_averages(shapes, _held(shapes, new)))) if stateful else stats

    return modelled(init, apply, preprocess)


def _shapes(made: Callable[[Array], Any]) -> Any:
    """What is made, with shapes for its arrays; those of NumPy stay as they are."""
    rest: list[Any] = []

    def arrays(key: Array) -> Any:
        known, static = eqx.partition(made(key), lambda u: isinstance(u, jax.Array))  # equinox takes NumPy's, too
        rest.append(static)
        return known

    return eqx.combine(jax.eval_shape(arrays, jax.random.key(0)), rest[-1])


def _is_norm(part: Any) -> bool:
    return isinstance(part, eqx.nn.BatchNorm)


def _is_trained(leaf: Any) -> bool:
    known = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
    return known and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _named(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator='.')


def _flat(a: Tree) -> dict[str, Any]:
    """Arrays by their paths."""
    return {_named(path): leaf for path, leaf in jax.tree.leaves_with_path(a)}


def _indices(body: Any) -> dict[str, eqx.nn.StateIndex]:
    """Where a module's state is kept, by the places in the module that use it."""
    leaves = jax.tree.leaves_with_path(body, is_leaf=lambda u: isinstance(u, eqx.nn.StateIndex))
    return {_named(path): leaf for path, leaf in leaves if isinstance(leaf, eqx.nn.StateIndex)}


def _held(body: Any, state: eqx.nn.State) -> dict[str, Tree]:
    """A module's state by the same places."""
    return {name: state.get(index) for name, index in _indices(body).items()}


def _averages(body: Any, held: dict[str, Tree]) -> dict[str, Tree]:
    """The same state with averages in the place of the sums that a BatchNorm of mode 'batch' keeps.

    Such a sum begins with 0 for means and 1 for variances, of which `momentum ** n` is left after n batches, and the
    rest of its weight is that of what it has seen. Of clients with different n the mean of sums is no mean's sum.
    """

    def average(total: Array, first: float, left: Array) -> Array:
        return jnp.where(left == 1, total, (total - first * left) / jnp.where(left == 1, 1, 1 - left))

    return _converted(body, held, average)


def _sums(body: Any, held: dict[str, Tree]) -> dict[str, Tree]:
    """The state of which `_averages` makes `held`."""
    return _converted(
        body, held, lambda mean, first, left: jnp.where(left == 1, mean, first * left + mean * (1 - left))
    )


def _converted(body: Any, held: dict[str, Tree], convert: Callable[[Array, float, Array], Array]) -> dict[str, Tree]:
    out = dict(held)
    for path, part in jax.tree.leaves_with_path(body, is_leaf=_is_norm):
        if _is_norm(part) and part.mode == 'batch':
            at = f'{_named(path)}.' if path else ''
            left = part.momentum ** held[f'{at}batch_counter'].astype(jnp.float32)
            mean, var = held[f'{at}batch_state_index']
            out[f'{at}batch_state_index'] = convert(mean, 0.0, left), convert(var, 1.0, left)
    return out


def _filled(like: Tree, values: dict[str, Any]) -> Tree:
    """The same tree with other values."""
    return jax.tree.unflatten(jax.tree.structure(like), [values[name] for name in _flat(like)])


class _Identity(eqx.Module):
    def __call__(self, x: Array, *args: Any, **kwargs: Any) -> Array:
        return x


class _Masked(eqx.nn.StatefulLayer):
    """Batch normalisation that leaves out rows that are padding.

    The layer itself sees rows that have, padding included, the moments of the real ones: those scaled away from their
    mean, and the mean in the place of the others.
    """

    inner: eqx.nn.BatchNorm
    real: Array  # [] bool

    def __call__(
        self, x: Array, state: eqx.nn.State, *, key: Array | None = None, inference: bool | None = None
    ) -> tuple[Array, eqx.nn.State]:
        inner, real = self.inner, self.real
        if inner.inference if inference is None else inference:
            return inner(x, state, inference=inference)
        space = tuple(range(1, x.ndim))
        n = jnp.maximum(jax.lax.psum(real.astype(x.dtype), AXIS), 1)
        mean = jax.lax.psum(jnp.where(real, jnp.mean(x, space, keepdims=True), 0), AXIS) / n
        spread = jnp.sqrt(jax.lax.psum(jnp.ones((), x.dtype), AXIS) / n)
        seen = jnp.where(real, mean + (x - mean) * spread, mean)
        y, state = inner(seen, state, inference=False)
        if inner.mode == 'ema':  # it normalises by the estimates that it has just renewed
            return inner(x, jax.tree.map(lambda u: u, state), inference=True)[0], state
        bias = jnp.zeros(len(x), x.dtype) if inner.bias is None else inner.bias
        bias = bias.reshape(-1, *[1] * (x.ndim - 1))
        return jnp.where(real, bias + (y - bias) / spread, y), state
