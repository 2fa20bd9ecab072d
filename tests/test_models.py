"""Bodies: the published parameter counts, masks, precision, evaluation mode."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_nc import models
from fedjax_nc.models import CNN, MLP, McMahanCNN, ResNet, ResNet18, ResNet20, from_flax

KEY = jax.random.key(0)
TINY = {'widths': (4,), 'blocks': (1,)}


def images(seed, rows, side, channels=3):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 256, (rows, side, side, channels)), jnp.uint8)


def count(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ('module', 'side', 'channels', 'parameters', 'dim', 'statistics'),
    [
        (CNN(), 32, 3, 121_920, 64, 0),
        (McMahanCNN(), 28, 1, 1_663_370 - 512 * 10 - 10, 512, 0),
        (MLP((200, 200)), 28, 1, 784 * 200 + 200 + 200 * 200 + 200, 200, 0),
        (ResNet20(norm='batch'), 32, 3, 271_824, 64, 2 * 784),
        (ResNet20(), 32, 3, 271_824, 64, 0),
        (ResNet18(), 64, 3, 11_168_832, 512, 0),
        (ResNet18(norm='batch'), 32, 3, 11_168_832, 512, 2 * 4_800),
        (ResNet((64, 128, 256, 512), (3, 4, 6, 3), norm='batch'), 32, 3, 21_276_992, 512, 2 * 8_512),
    ],
)
def test_parameter_counts(module, side, channels, parameters, dim, statistics):
    model, x = from_flax(module), jax.ShapeDtypeStruct((2, side, side, channels), jnp.uint8)
    params, stats = jax.eval_shape(model.init, KEY, x)
    z, _ = jax.eval_shape(model.features, params, stats, x, None, None)
    assert (count(params), z.shape, z.dtype) == (parameters, (2, dim), jnp.float32)
    assert count(stats) == statistics
    assert statistics or stats == ()


@pytest.mark.parametrize(
    ('module', 'side'), [(CNN(), 20), (McMahanCNN(), 9), (MLP((16, 8)), 5), (ResNet((4, 8), (1, 1)), 9)]
)
def test_features_are_rectified_float32_and_bfloat16_is_close(module, side):
    x = images(0, 6, side)
    model, half = from_flax(module), from_flax(module.copy(dtype=jnp.bfloat16))
    params, stats = model.init(KEY, x)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(jax.eval_shape(half.init, KEY, x)))
    z, _ = jax.jit(model.features)(params, stats, x, None, None)
    low, _ = jax.jit(half.features)(params, stats, x, None, None)
    assert z.dtype == low.dtype == jnp.float32
    assert float(z.min()) >= 0
    assert float(z.max()) > 0
    error = float(jnp.linalg.norm(low - z) / jnp.linalg.norm(z))
    assert 0 < error < 0.03


@pytest.mark.parametrize('module', [CNN, McMahanCNN])
def test_gradients_do_not_depend_on_the_form(module):
    x = images(0, 3, 18)
    params, _ = from_flax(module()).init(KEY, x)

    def gradient(conv):
        features = from_flax(module(conv=conv)).features
        return jax.tree.leaves(jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(features(p, (), x, None, KEY)[0]))))(params))

    want = gradient(models.conv_native)
    for conv in (models.conv_patches, models.conv_sequential):
        for a, b in zip(gradient(conv), want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * float(jnp.max(jnp.abs(b))))


@pytest.mark.parametrize('norm', ['group', 'batch'])
def test_padding_leaves_no_trace(norm):
    model, x = from_flax(ResNet(**TINY, norm=norm)), images(0, 5, 8)
    params, stats = model.init(KEY, x)
    junk, mask = x.at[3:].set(255), jnp.arange(5) < 3
    features = jax.jit(model.features)
    z, new = features(params, stats, junk, mask, KEY)
    short, want = features(params, stats, x[:3], None, KEY)
    np.testing.assert_allclose(z[:3], short, rtol=1e-4, atol=1e-5)
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    if norm == 'batch':  # without the mask the junk is seen
        unmasked, _ = features(params, stats, junk, None, KEY)
        assert float(jnp.max(jnp.abs(unmasked[:3] - short))) > 1e-3


def test_evaluation_is_deterministic_and_keeps_the_statistics():
    model, x = from_flax(ResNet(**TINY, norm='batch')), images(0, 4, 8)
    params, stats = model.init(KEY, x)
    features = jax.jit(model.features)
    trained, new = features(params, stats, x, None, KEY)
    assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(stats), strict=True))
    z, same = features(params, new, x, None, None)
    alone, _ = features(params, new, x[:1], None, None)
    np.testing.assert_allclose(alone, z[:1], rtol=1e-4, atol=1e-5)  # a row does not see its batch
    for a, b in zip(jax.tree.leaves(same), jax.tree.leaves(new), strict=True):
        np.testing.assert_array_equal(a, b)
    assert float(jnp.max(jnp.abs(trained - z))) > 1e-3


def test_clients_with_their_own_parameters_may_be_vmapped():
    model, x = from_flax(ResNet(**TINY, norm='batch')), images(0, 6, 8).reshape(2, 3, 8, 8, 3)
    params, stats = jax.vmap(model.init, (0, None))(jax.random.split(KEY, 2), x[0])
    features = jax.jit(lambda p, s, x: model.features(p, s, x, None, KEY))
    z, new = jax.jit(jax.vmap(features))(params, stats, x)
    for i in range(2):
        mine = jax.tree.map(lambda leaf: leaf[i], (params, stats))  # noqa: B023
        want, stat = features(*mine, x[i])
        np.testing.assert_allclose(z[i], want, rtol=1e-4, atol=1e-5)
        for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(stat), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-4, atol=1e-5)


class Noisy(nn.Module):
    """Dropout, to see where keys go."""

    @nn.compact
    def __call__(self, x, *, mask=None, train=False):
        return nn.Dropout(0.5, deterministic=not train)(nn.Dense(32)(x.reshape(x.shape[0], -1)))


def test_keys_reach_preprocessing_and_dropout():
    seen = []

    def preprocess(x, key):
        seen.append(key)
        return models.scale_images(x) if key is None else models.scale_images(x) + jax.random.normal(key, ())

    model, x = from_flax(Noisy(), preprocess), images(0, 2, 4)
    params, stats = model.init(KEY, x)
    assert seen == [None]
    a, b, again = (model.features(params, stats, x, None, jax.random.key(i))[0] for i in (1, 2, 1))
    np.testing.assert_array_equal(a, again)
    assert np.any(a != b)
    assert 0 < int((a == 0).sum()) < a.size
    z, _ = model.features(params, stats, x, None, None)
    assert seen[-1] is None
    assert not np.any(z == 0)


def test_bytes_are_scaled_and_floats_left_alone():
    np.testing.assert_allclose(models.scale_images(jnp.array([0, 51, 255], jnp.uint8)), [-1, -0.6, 1], atol=1e-6)
    x = jnp.array([0.3, 7.0], jnp.bfloat16)
    assert models.scale_images(x) is x
    assert models.scale_images(jnp.array([3])).dtype == jnp.float32


@pytest.mark.parametrize(('module', 'side'), [(CNN(), 17), (McMahanCNN(), 3)])
def test_small_images_are_refused(module, side):
    model = from_flax(module)
    jax.eval_shape(model.init, KEY, images(0, 1, side + 1))
    with pytest.raises(ValueError, match=f'at least {side + 1}x{side + 1}'):
        jax.eval_shape(model.init, KEY, images(0, 1, side))


def test_unknown_norm_is_refused():
    with pytest.raises(ValueError, match='norm'):
        jax.eval_shape(from_flax(ResNet20(norm='layer')).init, KEY, images(0, 1, 8))
