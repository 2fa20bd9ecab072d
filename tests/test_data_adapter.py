"""What `from_flax` takes and refuses, and what becomes of inputs that are no images."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_nc import heads, models
from fedjax_nc.models import MLP, from_flax, scale_images

KEY = jax.random.key(0)


class Tokens(nn.Module):
    """Looks words up and averages them."""

    @nn.compact
    def __call__(self, x, *, mask=None, train=False):
        return nn.Embed(11, 6)(x).mean(axis=1)


class Trains(nn.Module):
    """Flax modules often train unless they are told not to."""

    @nn.compact
    def __call__(self, x, train=True, mask=None):
        return nn.Dropout(0.5, deterministic=not train)(nn.Dense(4)(x))


class OnlyX(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(x)


class NoMask(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(4)(x)


class NoTrain(nn.Module):
    @nn.compact
    def __call__(self, x, *, mask=None):
        return nn.Dense(4)(x)


class Positional(nn.Module):
    @nn.compact
    def __call__(self, x, mask=None, train=False, /):
        return nn.Dense(4)(x)


class Needs(nn.Module):
    @nn.compact
    def __call__(self, x, table):
        return nn.Dense(4)(x)


class Anything(nn.Module):
    @nn.compact
    def __call__(self, x, **options):
        return nn.Dense(4)(x)


class NoCall(nn.Module):
    size: int = 3


@pytest.mark.parametrize(
    'dtype', ['int8', 'int16', 'int32', 'uint16', 'uint32', 'float16', 'bfloat16', 'float32', 'bool']
)
def test_only_bytes_are_scaled(dtype):
    x = jnp.arange(4).astype(dtype)
    assert scale_images(x) is x
    np.testing.assert_allclose(scale_images(jnp.array([0, 51, 255], jnp.uint8)), [-1, -0.6, 1], atol=1e-6)


@pytest.mark.parametrize('dtype', [jnp.int32, jnp.int16, jnp.uint16])
def test_tokens_reach_an_embedding(dtype):
    model, x = from_flax(Tokens()), jax.random.randint(KEY, (5, 7), 0, 11).astype(dtype)
    params, stats = model.init(KEY, x)
    table = params['Embed_0']['embedding']
    for key in (None, KEY):
        np.testing.assert_allclose(model.features(params, stats, x, key=key)[0], table[x].mean(1), rtol=1e-6)


@pytest.mark.parametrize(
    ('module', 'shape'),
    [
        (MLP((5,)), (4, 6)),
        (models.CNN(), (4, 28, 28, 1)),
        (models.ResNet(widths=(4,), blocks=(1,)), (4, 8, 8, 3)),
    ],
)
def test_integers_still_serve_as_numbers(module, shape):
    model, x = from_flax(module), jax.random.randint(KEY, shape, -3, 9)
    params, stats = model.init(KEY, x)
    same, other = model.init(KEY, x.astype(jnp.float32)), (params, stats)
    jax.tree.map(np.testing.assert_array_equal, same, other)
    for key in (None, KEY):
        whole, floating = (model.features(params, stats, y, key=key)[0] for y in (x, x.astype(jnp.float32)))
        assert whole.dtype == jnp.float32
        np.testing.assert_array_equal(whole, floating)


def test_evaluation_does_not_hang_on_defaults():
    model, x = from_flax(Trains()), jnp.ones((3, 5))
    params, stats = model.init(KEY, x)
    first, second = (model.features(params, stats, x)[0] for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert (np.asarray(model.features(params, stats, x, key=KEY)[0]) == 0).any()


@pytest.mark.parametrize(
    'module',
    [
        Anything(),
        OnlyX(),
        NoMask(),
        NoTrain(),
        nn.Dense(3),
        MLP(),
        nn.remat(MLP)((3,)),
        nn.jit(MLP)((3,)),
        MLP().copy(widths=(3,)),
    ],
)
def test_modules_that_are_taken(module):
    model, x = from_flax(module), jnp.ones((3, 5))
    assert model.features(*model.init(KEY, x), x)[0].ndim == 2


@pytest.mark.parametrize(
    ('module', 'message'),
    [
        (MLP, r'not the class: pass MLP\(\.\.\.\)'),
        (lambda x: x, 'must be an instance of a flax'),
        (jnp.tanh, 'must be an instance of a flax'),
        (from_flax(MLP()), 'must be an instance of a flax'),
        (heads.linear(), 'must be an instance of a flax'),
        (heads.linear, 'must be an instance of a flax'),
        (None, 'got None'),
        ('MLP', "got 'MLP'"),
        (models, 'must be an instance of a flax'),
        ([MLP()], 'must be an instance of a flax'),
        (Positional(), 'Positional.__call__ does not take mask by name'),
        (
            Needs(),
            'needs table, of which nothing is known: if it says whether to train, call it train, training',
        ),
        (NoCall(), 'NoCall has no `__call__`'),
    ],
)
def test_modules_that_are_refused(module, message):
    with pytest.raises(ValueError, match=message) as info:
        from_flax(module)
    assert '\n' not in str(info.value)


class Unlisted(nn.Module):
    @nn.compact
    def __call__(self, x, is_train=False):
        return nn.Dropout(0.9, deterministic=not is_train)(x)


def test_a_flag_that_nobody_changes_is_told():
    with pytest.warns(UserWarning, match='Unlisted.__call__ has is_train=False, which nobody changes.*call it train,'):
        from_flax(Unlisted())


@pytest.mark.parametrize('preprocess', [3, 'scale', jnp.ones(3), (scale_images,)])
def test_preprocess_must_be_a_function(preprocess):
    with pytest.raises(ValueError, match='`preprocess` must be a function') as info:
        from_flax(MLP(), preprocess)
    assert '\n' not in str(info.value)
