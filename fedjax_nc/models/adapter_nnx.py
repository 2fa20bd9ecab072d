"""From a flax nnx module to the library's `Model`."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

from fedjax_nc import checks
from fedjax_nc.base import Array, Model, Tree
from fedjax_nc.models.adapter import (
    Preprocess,
    as_state,
    as_values,
    asked,
    entry,
    found,
    maker,
    masked,
    modelled,
)  # fmt: skip

Make = Callable[..., nnx.Module]
_MASK: contextvars.ContextVar[Array | None] = contextvars.ContextVar('mask', default=None)


def from_nnx(
    module: nnx.Module | Make, preprocess: Preprocess | None = None, *, classifier: str | None = None
) -> Model:
    """Makes a `Model` of a flax nnx module, `x [B, ...] -> features [B, D]`.

        model = models.from_nnx(lambda rngs: Net(64, rngs=rngs))

    `nnx.Param` become the parameters and all other variables, such as `nnx.BatchStat`, the `stats`, by their paths in
    the module: 'layers.0.kernel'. The module runs as `train()` and `eval()` leave it, is told by name what its
    `__call__` asks for, as in `from_flax`, and its streams of random numbers begin anew with every batch.
    `nnx.BatchNorm` leaves out rows that are padding.

    Args:
        module: makes the body from `rngs`, such as a class; or a module, whose numbers are then the first ones whatever
            the key: those of a model that was trained before, for instance.
        preprocess: as for `from_flax`.
        classifier: the attribute that classifies, such as 'head' or 'layers.2', if the module ends in one. It is left
            out: the features are what it would be given.

    Returns:
        The model, as of `from_flax`.

    Raises:
        ValueError: if `module` is neither, `preprocess` no function, or there is no part `classifier`.
    """
    given = isinstance(module, nnx.Module)
    make = (lambda rngs: nnx.clone(module)) if given else maker(module, 'rngs', 'an nnx.Module')

    def made(rngs: nnx.Rngs) -> nnx.Module:
        body = make(rngs)
        if not isinstance(body, nnx.Module):
            raise ValueError(f'`module` must make a flax nnx Module; it made {checks.shown(body)}.')
        if classifier is not None:
            found(body, classifier)
            _replace(body, classifier.split('.'))
        for _, part in nnx.iter_graph(body):
            if isinstance(part, nnx.BatchNorm):
                part.__class__ = _masked(type(part))
        return body

    shapes = nnx.eval_shape(lambda: made(nnx.Rngs(0)))
    parts: Any = nnx.split(shapes, nnx.Param, nnx.RngState, ...)
    graph, params_like, noise_like, stats_like = parts
    named = asked(entry(shapes, nnx.Sequential), known=('rngs',))

    def init(key: Array, x: Array) -> tuple[Tree, Tree]:
        parts: Any = nnx.split(made(nnx.Rngs(key)), nnx.Param, nnx.RngState, ...)
        _, params, _, stats = parts
        return _flat(params), as_values(_flat(stats)) or ()

    def apply(params: Tree, stats: Tree, x: Array, mask: Array | None, key: Array | None) -> tuple[Array, Tree]:
        state = as_state(stats, _flat(stats_like)) if stats else {}
        streams = _streams(noise_like, jax.random.key(0) if key is None else key)
        body = nnx.merge(graph, _filled(params_like, params), _filled(noise_like, streams), _filled(stats_like, state))
        (body.eval if key is None else body.train)()
        if mask is not None:
            for _, part in [*nnx.iter_graph(body)]:
                if isinstance(part, nnx.BatchNorm) and part.mean.ndim == 1:
                    part.rows = _Rows(mask)  # type: ignore[attr-defined]
        with _showing(mask):
            z = body(x, **named(mask, key is not None, rngs=None if key is None else nnx.Rngs(key)))
        new = _flat(nnx.state(body))
        return z, as_values({name: new[name] for name in stats}) if stats else stats

    return modelled(init, apply, preprocess)


def _flat(state: Any) -> dict[str, Any]:
    """Arrays by their paths."""
    return {'.'.join(map(str, path)): variable.get_value() for path, variable in nnx.to_flat_state(state)}


def _filled(like: Any, values: dict[str, Any]) -> Any:
    """The state of these variables with other values."""
    return nnx.from_flat_state(
        [(path, variable.replace(values['.'.join(map(str, path))])) for path, variable in nnx.to_flat_state(like)]
    )


def _streams(like: Any, key: Array) -> dict[str, Array]:
    """Streams of random numbers that begin with a key, each with its own."""
    flat = sorted(_flat(like).items())
    return {
        name: jax.random.split(jax.random.fold_in(key, i), value.shape)
        if value.shape and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)  # layers that are scanned
        else jax.random.fold_in(key, i)
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
        else jax.numpy.zeros(value.shape, value.dtype)
        for i, (name, value) in enumerate(flat)
    }


def _replace(body: Any, path: list[str]) -> None:
    """Puts what returns its input in the place of a part."""
    holder = found(body, '.'.join(path[:-1])) if path[1:] else body
    if path[-1].lstrip('-').isdigit():
        holder[int(path[-1])] = _Identity()
    else:
        setattr(holder, path[-1], _Identity())


class _Rows(nnx.Variable):
    """The mask of a batch, held by a layer: what `nnx.jit` and `nnx.remat` keep of a call must not hold another's."""


class _Identity(nnx.Module):
    def __call__(self, x: Array, *args: Any, **kwargs: Any) -> Array:
        return x


def _masked(norm: type[nnx.BatchNorm]) -> type[nnx.BatchNorm]:
    """The same layer, which leaves out rows that are padding: users' modules do not hand masks on."""

    class BatchNorm(norm):  # type: ignore[misc, valid-type]
        @functools.wraps(norm.__call__)  # what it takes by name is asked for
        def __call__(self, x: Array, *args: Any, **kwargs: Any) -> Array:
            mask = self.rows.get_value() if hasattr(self, 'rows') else _MASK.get()  # of scanned layers, one for all
            return super().__call__(x, *args, **masked(kwargs, mask, x))

    return norm if getattr(norm, 'masked', False) else type('BatchNorm', (BatchNorm,), {'masked': True})


@contextlib.contextmanager
def _showing(mask: Array | None) -> Iterator[None]:
    """Lets masked layers see the mask of the batch that is computed."""
    token = _MASK.set(mask)
    try:
        yield
    finally:
        _MASK.reset(token)
