"""Heads: classifiers on features, each a pair of pure functions.

What a head learns is in `params`, what it holds still is in `fixed`. A frozen head has no learnable leaf, so that no
optimizer, average or weight decay of any algorithm can move it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_nc import checks
from fedjax_nc.base import Array, Head, Tree
from fedjax_nc.frames import normalize as normalize
from fedjax_nc.frames import simplex_etf

Frame = Callable[[Array, int, int], Array]
"""(key, d, C) -> [d, C] float32, one column a class; see `frames`."""


def dense_init(key: Array, inputs: int, outputs: int, bias: bool = True) -> dict[str, Array]:
    """An affine layer `{'w' [inputs, outputs], 'b' [outputs]}` in float32, entries uniform in `+-1 / sqrt(inputs)`.

    As PyTorch's `Linear` begins. Without `bias` there is no 'b'.
    """
    bound = inputs**-0.5
    kw, kb = jax.random.split(key)
    layer = {'w': jax.random.uniform(kw, (inputs, outputs), jnp.float32, -bound, bound)}
    if bias:
        layer['b'] = jax.random.uniform(kb, (outputs,), jnp.float32, -bound, bound)
    return layer


def product(z: Array, w: Array) -> Array:
    """`z [..., D] w [D, C]` in float32, also on devices that would round the factors: [..., C]."""
    return jnp.matmul(z.astype(jnp.float32), w, precision='highest')


def dense(params: Tree, z: Array) -> Array:
    """`z w + b` in float32, of the layer `params` as `dense_init` makes it; `z [..., inputs]`."""
    out = product(z, params['w'])
    return out + params['b'] if 'b' in params else out


def linear(bias: bool = True) -> Head:
    """The ordinary classifier `z w + b`: `params = {'w' [D, C], 'b' [C]}`, without 'b' if there is no `bias`.

    It begins as PyTorch's `Linear`, uniform in `+-1 / sqrt(D)`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from fedjax_nc import heads
      >>> head = heads.linear()
      >>> params, fixed = head.init(jax.random.key(0), 16, 10)  # D = 16, C = 10
      >>> {name: value.shape for name, value in params.items()}, fixed
      ({'w': (16, 10), 'b': (10,)}, {})
      >>> head.logits(params, fixed, jnp.ones((3, 16))).shape
      (3, 10)
    """
    checks.flags(bias=bias)
    return Head(
        init=lambda key, dim, classes: (dense_init(key, dim, classes, bias), {}),
        logits=lambda params, fixed, z: dense(params, z),
    )


def cosine(scale: float = 1.0, learn_scale: bool = True) -> Head:
    """Learnable class vectors compared by angle: `scale * cos(z, w_c)`.

    `params = {'w' [D, C], 'scale' []}`; the scale is in `fixed` when it is not learned.

    Args:
      scale: first value of the scale.
      learn_scale: whether it is learned.

    Raises:
      ValueError: for a `scale` that is not positive.
    """
    checks.number('scale', scale, open_low=True)
    checks.flags(learn_scale=learn_scale)

    def init(key: Array, dim: int, classes: int) -> tuple[Tree, Tree]:
        return _with_scale(dense_init(key, dim, classes, bias=False), {}, scale, learn_scale)

    def logits(params: Tree, fixed: Tree, z: Array) -> Array:
        cosines = product(normalize(z), normalize(params['w'].T).T)
        return {**fixed, **params}['scale'] * cosines

    return Head(init, logits)


def etf(
    dim: int | None = None,
    *,
    scale: float = 1.0,
    learn_scale: bool = True,
    project: bool = True,
    unit_features: bool = True,
    frame: Frame = simplex_etf,
) -> Head:
    """A fixed simplex ETF classifier: `scale * mu^T V` with `mu = normalize(z W + b)`.

    The defaults are the head of FedETF (Li et al., ICCV 2023): a projection layer without non-linearity, features of
    unit length and a learnable temperature. `project=False, unit_features=False, learn_scale=False` leaves the bare
    frozen frame of FedAvg_ETF (arXiv 2303.16066).

    `params` holds `proj` (`w [D, d]`, `b [d]`) and `scale []` where they are learned, `fixed` the frame `v [d, C]`.

    Args:
      dim: dimension d of the frame; by default the number of classes with a projection, D without.
      scale: first value of the temperature, which multiplies the cosines.
      learn_scale: whether the temperature is learned.
      project: whether an affine layer maps features to the frame's space.
      unit_features: whether features are normalised.
      frame: `(key, d, C) -> [d, C]`, what is frozen instead of a simplex ETF, such as `frames.sparse_etf`.

    Raises:
      ValueError: for a `scale` that is not positive, or a `dim` below 1; on `init`, if `d < C - 1`, or if `dim` is not
        the feature width and there is no projection.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from fedjax_nc import heads
      >>> head = heads.etf(scale=4.0)
      >>> params, fixed = head.init(jax.random.key(0), 16, 10)  # D = 16, C = 10
      >>> sorted(params), fixed['v'].shape
      (['proj', 'scale'], (10, 10))
      >>> logits = head.logits(params, fixed, jnp.ones((3, 16)))
      >>> logits.shape, bool((abs(logits) <= 4).all())
      ((3, 10), True)
    """
    checks.number('scale', scale, open_low=True)
    checks.flags(learn_scale=learn_scale, project=project, unit_features=unit_features)
    if dim is not None:
        checks.whole('dim', dim)

    def init(key: Array, width: int, classes: int) -> tuple[Tree, Tree]:
        size = dim if dim is not None else classes if project else width
        if not project and size != width:
            raise ValueError(f'features have {width} dimensions and the ETF {size}: use project=True or dim=None')
        if not project and width < classes - 1:
            raise ValueError(
                f'{width} features are too few for {classes} classes: use a model with at least {classes - 1}'
            )
        kv, kp = jax.random.split(key)
        fixed = {'v': frame(kv, size, classes)}
        return _with_scale({'proj': dense_init(kp, width, size)} if project else {}, fixed, scale, learn_scale)

    def logits(params: Tree, fixed: Tree, z: Array) -> Array:
        mu = dense(params['proj'], z) if project else z
        mu = normalize(mu) if unit_features else mu
        return {**fixed, **params}['scale'] * product(mu, fixed['v'])

    return Head(init, logits)


def prototypes(scale: float = 1.0, learn_scale: bool = True, init: Frame = simplex_etf) -> Head:
    """Class prototypes that only the server may move, compared by angle: `scale * W normalize(z)`, `W [C, D]` fixed.

    The head of FedNH (Dai et al., AAAI 2023). `params = {'scale' []}` where it is learned, `fixed = {'w' [C, D]}`.

    Args:
      scale: first value of the scale.
      learn_scale: whether the scale is learned.
      init: `(key, D, C) -> [D, C]`, the first prototypes as unit columns, such as `frames.uniform`.

    Raises:
      ValueError: for a `scale` that is not positive.
    """
    checks.number('scale', scale, open_low=True)
    checks.flags(learn_scale=learn_scale)

    def first(key: Array, dim: int, classes: int) -> tuple[Tree, Tree]:
        return _with_scale({}, {'w': normalize(init(key, dim, classes).T)}, scale, learn_scale)

    def logits(params: Tree, fixed: Tree, z: Array) -> Array:
        return {**fixed, **params}['scale'] * product(normalize(z), fixed['w'].T)

    return Head(first, logits)


def unit_norm() -> Head:
    """A linear classifier whose class vectors have unit length in training and in use: `w_c^T z / |w_c|`, no bias.

    The clsnorm of CCVR's comparison (Luo et al., NeurIPS 2021). `params = {'w' [D, C]}` is averaged as it is.
    """
    return Head(
        init=lambda key, dim, classes: (dense_init(key, dim, classes, bias=False), {}),
        logits=lambda params, fixed, z: product(z, normalize(params['w'].T).T),
    )


def _with_scale(params: Tree, fixed: Tree, scale: float, learn: bool) -> tuple[Tree, Tree]:
    """Adds a temperature to what is learned or to what is fixed."""
    value = {'scale': jnp.float32(scale)}
    return ({**params, **value}, fixed) if learn else (params, {**fixed, **value})
