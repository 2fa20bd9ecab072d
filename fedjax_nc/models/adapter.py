"""From a flax module to the library's `Model`."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_nc.base import Array, Model, Tree

Preprocess = Callable[[Array, Array | None], Array]
"""(batch, key) -> float batch; key None means evaluation: no augmentation."""


def scale_images(x: Array, key: Array | None = None) -> Array:
    """Bytes to [-1, 1]; float input is left alone, other integers become float32."""
    if x.dtype == jnp.uint8:
        return (x.astype(jnp.float32) / 255 - 0.5) / 0.5
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)


def from_flax(module: nn.Module, preprocess: Preprocess | None = None) -> Model:
    """Makes a `Model` of a module `__call__(x, *, mask=None, train=False) -> features [B, D]`.

    Its collection 'batch_stats', if any, becomes the `stats`, otherwise they are (). Dropout draws from `key`.

    Args:
        module: the body, without a classifier.
        preprocess: applied to each raw batch, augmentation included; None means `scale_images`.

    Returns:
        The model. Its features are float32; with `key=None` it runs in evaluation mode and returns `stats` unchanged.
    """
    prepare = preprocess or scale_images

    def init(key: Array, x: Array) -> tuple[Tree, Tree]:
        # Jitted so that only the parameters are computed, not the features of the example.
        variables = jax.jit(lambda key, x: module.init(key, prepare(x, None)))(key, x)
        return variables['params'], variables.get('batch_stats', ())

    def features(
        params: Tree, stats: Tree, x: Array, mask: Array | None = None, key: Array | None = None
    ) -> tuple[Array, Tree]:
        variables = {'params': params, 'batch_stats': stats} if stats else {'params': params}
        if key is None:
            z = module.apply(variables, prepare(x, None), mask=mask)
            return jnp.asarray(z, jnp.float32), stats
        augment, dropout = jax.random.split(key)
        z, updated = module.apply(
            variables, prepare(x, augment), mask=mask, train=True, mutable=['batch_stats'], rngs={'dropout': dropout}
        )
        return jnp.asarray(z, jnp.float32), updated['batch_stats'] if stats else stats

    return Model(init, features)
