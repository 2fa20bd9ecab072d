import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_nc import frames, heads

KEY = jax.random.key(3)
Z = np.random.default_rng(1).normal(size=(6, 8)).astype(np.float32)


@pytest.mark.parametrize(
    ('dim', 'classes'), [(1, 2), (2, 2), (4, 5), (5, 5), (9, 10), (10, 10), (64, 10), (99, 100), (512, 200)]
)
def test_simplex_etf_has_the_gram_matrix_of_the_definition(dim, classes):
    v = np.asarray(frames.simplex_etf(KEY, dim, classes), np.float64)
    want = classes / (classes - 1) * np.eye(classes) - np.ones((classes, classes)) / (classes - 1)
    np.testing.assert_allclose(v.T @ v, want, atol=1e-5)
    np.testing.assert_allclose(v.sum(1), 0, atol=1e-5)


def test_simplex_etf_is_haar_distributed():
    """Each entry of a Haar frame has mean 0; the uniform-matrix construction has a strong first direction instead."""
    drawn = jax.vmap(lambda k: frames.simplex_etf(k, 6, 4))(jax.random.split(KEY, 2000))
    np.testing.assert_allclose(np.mean(drawn, 0), 0, atol=0.05)


@pytest.mark.parametrize(('dim', 'classes', 'match'), [(8, 10, 'at least 9'), (3, 1, 'at least 2')])
def test_simplex_etf_that_cannot_exist_is_refused(dim, classes, match):
    with pytest.raises(ValueError, match=match):
        frames.simplex_etf(KEY, dim, classes)


def test_normalize_is_safe_at_zero():
    g = jax.grad(lambda z: heads.normalize(z).sum())(jnp.zeros(4))
    assert np.isfinite(g).all()
    np.testing.assert_allclose(np.linalg.norm(heads.normalize(Z), axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(heads.normalize(jnp.array([1e-5, 0.0])), [1, 0], rtol=1e-5)  # short, and above eps


def test_normalize_works_in_float32():
    assert heads.normalize(jnp.asarray(Z, jnp.bfloat16)).dtype == jnp.float32


def test_products_of_half_precision_are_in_float32():
    z, w = (np.random.default_rng(0).normal(size=shape).astype(np.float32) for shape in ((5, 64), (64, 3)))
    half = jnp.asarray(z, jnp.bfloat16)
    got = heads.product(half, jnp.asarray(w))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, np.asarray(half, np.float64) @ w, atol=1e-5)


def test_linear_head():
    params, fixed = heads.linear().init(KEY, 8, 5)
    assert not fixed
    np.testing.assert_allclose(heads.linear().logits(params, fixed, Z), Z @ params['w'] + params['b'], rtol=1e-5)
    assert np.abs(params['w']).max() <= 8**-0.5
    assert set(heads.linear(bias=False).init(KEY, 8, 5)[0]) == {'w'}


@pytest.mark.parametrize('learn', [True, False])
def test_cosine_head(learn):
    head = heads.cosine(scale=4.0, learn_scale=learn)
    params, fixed = head.init(KEY, 8, 5)
    assert ('scale' in params) == learn
    w = np.asarray(params['w'])
    want = 4 * (Z / np.linalg.norm(Z, axis=1, keepdims=True)) @ (w / np.linalg.norm(w, axis=0))
    np.testing.assert_allclose(head.logits(params, fixed, Z), want, rtol=1e-4, atol=1e-5)


def test_etf_head_is_projection_normalisation_frame_and_temperature():
    head = heads.etf(scale=2.5)
    params, fixed = head.init(KEY, 8, 5)
    assert fixed['v'].shape == (5, 5)
    assert set(params) == {'proj', 'scale'}
    mu = Z @ params['proj']['w'] + params['proj']['b']
    want = 2.5 * (mu / np.linalg.norm(mu, axis=1, keepdims=True)) @ fixed['v']
    np.testing.assert_allclose(head.logits(params, fixed, Z), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('dim', [4, 5, 64])
def test_etf_dimension_is_free_from_classes_minus_one(dim):
    params, fixed = heads.etf(dim).init(KEY, 8, 5)
    assert fixed['v'].shape == (dim, 5)
    assert params['proj']['w'].shape == (8, dim)
    with pytest.raises(ValueError, match='at least 4'):
        heads.etf(3).init(KEY, 8, 5)


def test_bare_etf_has_no_trainable_leaf():
    head = heads.etf(project=False, unit_features=False, learn_scale=False, scale=1.5)
    params, fixed = head.init(KEY, 8, 5)
    assert jax.tree.leaves(params) == []
    np.testing.assert_allclose(head.logits(params, fixed, Z), 1.5 * Z @ fixed['v'], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match='project'):
        heads.etf(4, project=False).init(KEY, 8, 5)


def test_largest_probability_at_temperature_one():
    """FedETF: with beta = 1 and ten classes a perfect feature reaches a probability of 0.252 only."""
    v = frames.simplex_etf(KEY, 10, 10)
    p = jax.nn.softmax(v[:, 3] @ v)[3]
    np.testing.assert_allclose(p, 1 / (1 + 9 * np.exp(-10 / 9)), rtol=1e-5)
    np.testing.assert_allclose(p, 0.252, atol=5e-4)


def test_too_few_features_for_a_bare_frame_are_refused():
    bare = heads.etf(project=False, unit_features=False, learn_scale=False)
    with pytest.raises(ValueError, match='8 features are too few for 20 classes: use a model with at least 19'):
        bare.init(KEY, 8, 20)


def test_unit_norm_forgets_lengths_of_class_vectors():
    params, fixed = heads.unit_norm().init(KEY, 8, 5)
    want = Z @ (np.asarray(params['w']) / np.linalg.norm(params['w'], axis=0))
    np.testing.assert_allclose(heads.unit_norm().logits(params, fixed, Z), want, rtol=1e-5, atol=1e-5)
    longer = {'w': params['w'] * jnp.arange(1, 6)}
    np.testing.assert_allclose(heads.unit_norm().logits(longer, fixed, Z), want, rtol=1e-4, atol=1e-5)


def test_prototypes_compare_by_angle_and_learn_their_scale_only():
    head = heads.prototypes(3.0)
    params, fixed = head.init(KEY, 8, 5)
    assert set(params) == {'scale'}
    unit = Z / np.linalg.norm(Z, axis=1, keepdims=True)
    np.testing.assert_allclose(head.logits(params, fixed, 7 * Z), 3 * unit @ np.asarray(fixed['w']).T, atol=1e-5)
    still, fixed = heads.prototypes(30.0, learn_scale=False).init(KEY, 8, 5)
    assert still == {}
    assert float(fixed['scale']) == 30.0
