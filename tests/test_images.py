"""Preprocessing on the device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_nc.data import images

KEY = jax.random.key(0)


@pytest.fixture
def batch():
    return jax.random.randint(jax.random.key(9), (64, 8, 6, 3), 1, 256).astype(jnp.uint8)


def test_normalize():
    x = jnp.array([0, 51, 255], jnp.uint8).reshape(1, 1, 1, 3)
    np.testing.assert_allclose(images.normalize(x, 0.5, 0.5).ravel(), [-1, -0.6, 1], rtol=1e-6)
    mean, std = images.CIFAR10_FEDNH
    want = (np.array([0, 0.2, 1]) - mean) / std
    np.testing.assert_allclose(images.normalize(x, mean, std).ravel(), want, rtol=1e-5)
    scaled = images.normalize(x.astype(jnp.float32) / 255, mean, std)
    assert scaled.dtype == jnp.float32
    np.testing.assert_allclose(scaled.ravel(), want, rtol=1e-5)
    with pytest.raises(TypeError, match='int32'):
        images.normalize(x.astype(jnp.int32), 0.5, 0.5)


@pytest.mark.parametrize('mode', ['constant', 'reflect'])
def test_crops_are_windows_of_the_padded_image(batch, mode):
    out = np.asarray(images.random_crop(KEY, batch, 2, mode))
    assert out.shape == batch.shape
    assert out.dtype == np.uint8
    padded = np.pad(batch, ((0, 0), (2, 2), (2, 2), (0, 0)), mode=mode)
    found = set()
    for i in range(len(out)):
        places = [(a, b) for a in range(5) for b in range(5) if (padded[i, a : a + 8, b : b + 6] == out[i]).all()]
        assert len(places) == 1
        found.add(places[0])
    assert {a for a, _ in found} == set(range(5))
    assert {b for _, b in found} == set(range(5))


def test_flips_are_of_columns_and_fair(batch):
    out, x = np.asarray(images.random_flip(KEY, batch)), np.asarray(batch)
    same, mirrored = (out == x).all((1, 2, 3)), (out == x[:, :, ::-1]).all((1, 2, 3))
    assert (same ^ mirrored).all()
    assert 16 <= mirrored.sum() <= 48


def test_rows_do_not_depend_on_the_rows_after_them(batch):
    preprocess = jax.jit(images.pipeline(crop=2, flip=True))
    whole = preprocess(batch, KEY)
    for count in (1, 63):
        np.testing.assert_array_equal(preprocess(batch[:count], KEY), whole[:count])
    np.testing.assert_array_equal(preprocess(batch.at[40:].set(0), KEY)[:40], whole[:40])


def test_same_under_jit_and_vmap(batch):
    preprocess = images.pipeline(*images.CIFAR10_CCVR, crop=1, flip=True, crop_mode='reflect')
    keys = jax.random.split(KEY, 3)
    stacked = jnp.stack([batch, batch, batch[::-1]])
    out = jax.jit(jax.vmap(preprocess))(stacked, keys)
    for i in range(3):
        np.testing.assert_allclose(out[i], preprocess(stacked[i], keys[i]), rtol=1e-5, atol=1e-6)
    assert not np.array_equal(out[0], out[1])


def test_evaluation_does_not_augment(batch):
    preprocess = images.pipeline(crop=4, flip=True)
    np.testing.assert_array_equal(preprocess(batch, None), images.normalize(batch, 0.5, 0.5))
    assert not np.array_equal(preprocess(batch, KEY), preprocess(batch, None))
    # FedETF's default augments nothing
    np.testing.assert_array_equal(images.pipeline()(batch, KEY), images.normalize(batch, *images.HALF))


def test_pipeline_refuses_nonsense():
    for arguments in ({'crop': -1}, {'std': 0.0}, {'std': (0.2, 0.0, 0.2)}):
        with pytest.raises(ValueError, match='must'):
            images.pipeline(**arguments)
