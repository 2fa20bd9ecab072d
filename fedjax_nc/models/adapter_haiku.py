"""From a haiku function to the library's `Model`. It needs haiku."""

from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from fedjax_nc import checks
from fedjax_nc.base import Array, Model, Tree
from fedjax_nc.models.adapter import Preprocess, as_state, as_values, asked, first, modelled, no_part, rows_of


def from_haiku(
    function: Callable[..., Array], preprocess: Preprocess | None = None, *, classifier: str | None = None
) -> Model:
    """Makes a `Model` of a function that builds haiku modules, `x [B, ...] -> features [B, D]`.

        model = models.from_haiku(lambda x: hk.nets.MLP([64, 64])(hk.Flatten()(x)))

    Parameters and state are haiku's, by their names; state that is no float is averaged all the same, and rounded. The
    function is told by name what it asks for: `is_training` and the other names of `from_flax`, and `mask`.
    `hk.next_rng_key()` draws in training alone. `hk.BatchNorm` leaves out rows that are padding.

    Args:
        function: the body, not transformed.
        preprocess: as for `from_flax`.
        classifier: name of the module that classifies, 'mlp/~/linear_2' for instance, if the function ends in one. It
            is left out: the features are what it would be given.

    Returns:
        The model, as of `from_flax`.

    Raises:
        ValueError: if `function` is none, or transformed, or `preprocess` no function; on `init`, if there is no module
            `classifier`.
    """
    if isinstance(function, hk.Transformed | hk.TransformedWithState):
        raise ValueError('`function` must be what was given to hk.transform, not what came of it.')
    if isinstance(function, type | hk.Module) or not callable(function):
        raise ValueError(f'`function` must build its modules: lambda x: Net(64)(x); got {checks.shown(function)}.')
    named = asked(function)

    def body(x: Array, mask: Array | None, train: bool, met: dict[str, hk.Module]) -> Array:
        shifts: list[Array] = []  # that of the masked layer which is being computed

        def intercept(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
            inner = context.module
            if context.method_name == '__call__':
                met[inner.module_name] = inner
                if inner.module_name == classifier:
                    return first(args, kwargs)
                if isinstance(inner, hk.BatchNorm) and mask is not None:
                    if inner.axis is not None or inner.channel_index not in (-1, first(args, kwargs).ndim - 1):
                        raise ValueError(f'{inner.module_name} must have its channels last, and no axes of its own.')
                    return _masked(call, mask, shifts, *args, **kwargs)
                if (
                    shifts
                    and isinstance(inner, hk.ExponentialMovingAverage)
                    and inner.module_name.endswith('/mean_ema')
                ):
                    return call(first(args, kwargs) + shifts[0])
            return call(*args, **kwargs)

        with hk.intercept_methods(intercept):
            return function(x, **named(mask, train))

    pure = hk.transform_with_state(body)

    def state_of(stats: Tree, x: Array) -> dict[str, Any]:
        """The state that the function has, of which `stats` hold the values.

        A moving average without bias is a sum over `1 - decay ** n`, after n batches. Of clients with different n the
        mean of sums belongs to no such average: sums are made anew of the averages.
        """
        met: dict[str, hk.Module] = {}
        like = jax.eval_shape(lambda x: pure.init(jax.random.key(0), x, None, True, met)[1], x)
        state = dict(as_state(stats, dict(like)))
        for name, part in met.items():
            if isinstance(part, hk.ExponentialMovingAverage) and part.zero_debias:
                mean, n = state[name]['average'], state[name]['counter']
                state[name] = {**state[name], 'hidden': mean * (1 - jnp.power(jnp.asarray(part.decay, mean.dtype), n))}
        return state

    def init(key: Array, x: Array) -> tuple[Tree, Tree]:
        met: dict[str, hk.Module] = {}
        params, state = pure.init(key, x, None, True, met)  # as haiku's own examples do: averages are made in training
        if classifier is not None and classifier not in met:
            raise ValueError(no_part('classifier', classifier, met))
        return dict(params), as_values(dict(state)) or ()

    def apply(params: Tree, stats: Tree, x: Array, mask: Array | None, key: Array | None) -> tuple[Array, Tree]:
        state = state_of(stats, x) if stats else {}
        z, new = pure.apply(params, state, key, x, mask, key is not None, {})
        return z, as_values(dict(new)) if stats else stats

    return modelled(init, apply, preprocess)


def _masked(
    call: Callable[..., Array],
    mask: Array,
    shifts: list[Array],
    inputs: Array,
    is_training: bool,
    *args: Any,
    **kwargs: Any,
) -> Array:
    """Batch normalisation of the rows of `x` that `mask` marks.

    haiku's layer takes no mask. It sees rows that have, padding included, the variance of the real ones: those scaled
    away from their mean, zeros in the place of the others, and one more zero, which tells what it adds to all. The mean
    is left out, of which its `E[x^2] - E[x]^2` would have the rounding, and is in `shifts` for its running mean.
    """
    x = inputs
    if not is_training:
        return call(x, is_training, *args, **kwargs)
    keep, axes = rows_of(mask, x), tuple(range(x.ndim - 1))
    n = jnp.maximum(jnp.sum(mask), 1).astype(x.dtype)
    mean = jnp.sum(jnp.where(keep, x, 0), axes, keepdims=True) * (len(x) / (x.size / x.shape[-1])) / n
    spread = jnp.sqrt((len(x) + 1) / n)
    seen = jnp.where(keep, (x - mean) * spread, 0)
    shifts.append(mean)
    y = call(jnp.concatenate([seen, jnp.zeros_like(seen[:1])]), is_training, *args, **kwargs)
    shifts.clear()
    return y[-1:] + (y[:-1] - y[-1:]) / spread
