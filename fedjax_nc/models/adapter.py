"""From a flax module to the library's `Model`."""

import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_nc import checks
from fedjax_nc.base import Array, Model, Tree

Preprocess = Callable[[Array, Array | None], Array]
"""(batch, key) -> what the module takes; key None means evaluation: no augmentation."""


def scale_images(x: Array, key: Array | None = None) -> Array:
    """Bytes to [-1, 1]; all else is left alone, floats as they are and integers as the tokens that they may be."""
    return (x.astype(jnp.float32) / 255 - 0.5) / 0.5 if x.dtype == jnp.uint8 else x


def from_flax(module: nn.Module, preprocess: Preprocess | None = None) -> Model:
    """Makes a `Model` of a module `__call__(x, *, mask=None, train=False) -> features [B, D]`.

    Its collection 'batch_stats', if any, becomes the `stats`, otherwise they are (). Dropout draws from `key`.

    Args:
        module: the body, without a classifier: an instance of a `flax.linen.Module`.
        preprocess: applied to each raw batch, augmentation included; None means `scale_images`.

    Returns:
        The model. Its features are float32; with `key=None` it runs in evaluation mode and returns `stats` unchanged.

    Raises:
        ValueError: if `module` is no such instance, its `__call__` does not take `mask` and `train` by name, or
            `preprocess` is no function.
    """
    _check_module(module)
    if preprocess is not None and not callable(preprocess):
        raise ValueError(f'`preprocess` must be a function of a batch and a key; got {checks.shown(preprocess)}.')
    prepare = preprocess or scale_images

    # Jitted so that only the parameters are computed, not the features of the example; here, to be compiled once.
    begin = jax.jit(lambda key, x: module.init(key, prepare(x, None), mask=None, train=False))

    def init(key: Array, x: Array) -> tuple[Tree, Tree]:
        variables = begin(key, x)
        return variables['params'], variables.get('batch_stats', ())

    def features(
        params: Tree, stats: Tree, x: Array, mask: Array | None = None, key: Array | None = None
    ) -> tuple[Array, Tree]:
        variables = {'params': params, 'batch_stats': stats} if stats else {'params': params}
        if key is None:
            z = module.apply(variables, prepare(x, None), mask=mask, train=False)
            return jnp.asarray(z, jnp.float32), stats
        augment, dropout = jax.random.split(key)
        z, updated = module.apply(
            variables, prepare(x, augment), mask=mask, train=True, mutable=['batch_stats'], rngs={'dropout': dropout}
        )
        return jnp.asarray(z, jnp.float32), updated['batch_stats'] if stats else stats

    return Model(init, features)


def _check_module(module: Any) -> None:
    if isinstance(module, type) and issubclass(module, nn.Module):
        raise ValueError(f'`module` must be an instance, not the class: pass {module.__name__}(...).')
    if not isinstance(module, nn.Module):
        raise ValueError(
            f'`module` must be an instance of a flax.linen.Module, such as models.MLP(); got {checks.shown(module)}.'
        )
    call = getattr(module, '__call__', None)  # noqa: B004  # what matters is what it takes
    taken = inspect.signature(call).parameters.values() if call else ()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken):
        return
    named = {parameter.name for parameter in taken if parameter.kind is not parameter.POSITIONAL_ONLY}
    if missing := [name for name in ('mask', 'train') if name not in named]:
        raise ValueError(
            f'{type(module).__name__}.__call__ does not take {" and ".join(missing)} by name: '
            'write it as `__call__(self, x, *, mask=None, train=False)`.'
        )
