import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_nc import losses

LOGITS = np.random.default_rng(0).normal(size=(7, 4)).astype(np.float32) * 3
LABELS = np.array([0, 1, 2, 3, 0, 1, 1])
COUNTS = np.array([5, 2, 0, 9])


def log_softmax(a):
    a = a - a.max(1, keepdims=True)
    return a - np.log(np.exp(a).sum(1, keepdims=True))


def test_cross_entropy_is_minus_log_softmax():
    want = -log_softmax(LOGITS)[np.arange(7), LABELS]
    np.testing.assert_allclose(losses.cross_entropy(LOGITS, LABELS), want, rtol=1e-5)


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_cross_entropy_and_its_gradient_are_those_of_optax(dtype):
    logits = jnp.asarray(LOGITS, dtype).at[3, 0].set(-jnp.inf)  # a class that is ruled out
    want, got = (
        jax.jit(jax.value_and_grad(lambda z, loss=loss: jnp.mean(loss(z, LABELS))))(logits)
        for loss in (lambda z, y: optax.softmax_cross_entropy_with_integer_labels(z.astype(jnp.float32), y),
                     losses.cross_entropy)
    )  # fmt: skip
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_allclose(np.float32(got[1]), np.float32(want[1]), atol=1e-7 if dtype == jnp.float32 else 1e-3)
    assert (
        'scatter' not in jax.jit(jax.grad(lambda z: jnp.mean(losses.cross_entropy(z, LABELS)))).lower(logits).as_text()
    )


def test_labels_that_are_no_class_are_not_silent_where_they_are_traced():
    loss = jax.jit(losses.cross_entropy)
    assert np.isnan(loss(LOGITS[:3], np.array([0, 4, -1]))).tolist() == [False, True, True]


@pytest.mark.parametrize(('dtype', 'classes'), [('uint8', 256), ('uint8', 300), ('int8', 128), ('int8', 200)])
def test_labels_of_few_bits_are_classes(dtype, classes):
    logits, labels = jnp.asarray(np.random.default_rng(0).normal(size=(4, classes))), np.array([0, 1, 50, 99])
    expected = losses.cross_entropy(logits, labels)
    for values in (losses.cross_entropy, jax.jit(losses.cross_entropy)):
        np.testing.assert_allclose(values(logits, jnp.asarray(labels, dtype)), expected, rtol=1e-6)
    with warnings.catch_warnings(action='error'):
        np.testing.assert_array_equal(losses.cross_entropy(logits, labels.astype(np.int64)), expected)
    if dtype == 'int8':
        assert np.isnan(jax.jit(losses.cross_entropy)(logits, jnp.full(4, -1, jnp.int8))).all()


@pytest.mark.parametrize('gamma', [0.5, 1.0, 2.0])
def test_balanced_softmax_weights_the_denominator_by_counts(gamma):
    floored = np.maximum(COUNTS, 1).astype(np.float64) ** gamma
    e = np.exp(LOGITS.astype(np.float64)) * floored
    want = -np.log((e / e.sum(1, keepdims=True))[np.arange(7), LABELS])
    got = losses.balanced_softmax(LOGITS, LABELS, COUNTS, gamma=gamma)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_masked_class_leaves_the_denominator():
    present = COUNTS > 0
    rows = present[LABELS]
    e = np.exp(LOGITS.astype(np.float64)) * COUNTS
    want = -np.log((e / e.sum(1, keepdims=True))[np.arange(7), LABELS][rows])
    got = losses.balanced_softmax(LOGITS, LABELS, COUNTS, absent='mask')[rows]
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize('absent', ['floor', 'mask'])
def test_gamma_zero_and_equal_counts_are_cross_entropy(absent):
    plain = losses.cross_entropy(LOGITS, LABELS)
    np.testing.assert_allclose(losses.balanced_softmax(LOGITS, LABELS, COUNTS, gamma=0.0, absent=absent), plain, 1e-6)
    even = np.full(4, 17)
    np.testing.assert_allclose(losses.balanced_softmax(LOGITS, LABELS, even, absent=absent), plain, rtol=1e-4)


def test_gradient_at_zero_logits_is_the_prior():
    """At beta = 0 the softmax is n^gamma / sum n^gamma (floored at 1), and the gradient is that minus the one-hot."""
    g = jax.grad(lambda z: losses.balanced_softmax(z, LABELS[:1], COUNTS, gamma=1.0).sum())(jnp.zeros((1, 4)))
    q = np.maximum(COUNTS, 1) / np.maximum(COUNTS, 1).sum()
    np.testing.assert_allclose(g[0], q - np.eye(4)[0], atol=1e-6)


@pytest.mark.parametrize('absent', ['floor', 'mask'])
def test_one_class_client_has_finite_loss_and_gradient(absent):
    counts = np.array([0, 30, 0, 0])
    value, g = jax.value_and_grad(lambda z: losses.balanced_softmax(z, np.array([1]), counts, absent=absent).sum())(
        jnp.asarray(LOGITS[:1])
    )
    assert np.isfinite(value)
    assert np.isfinite(g).all()


@pytest.mark.parametrize(
    'loss',
    [
        losses.balanced_softmax,
        losses.restricted_softmax,
        functools.partial(losses.restricted_softmax, alpha=0.3, soft=True),
        losses.dot_regression,
        losses.positive,
    ],
)
def test_half_precision_logits_are_summed_in_float32(loss):
    half = jnp.asarray(LOGITS, jnp.bfloat16)
    out = loss(half, LABELS, COUNTS)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, loss(half.astype(jnp.float32), LABELS, COUNTS), rtol=1e-6)


def test_dot_regression_sees_the_true_class_only():
    got = losses.dot_regression(LOGITS, LABELS, target=0.5)
    np.testing.assert_allclose(got, 0.5 * (LOGITS[np.arange(7), LABELS] - 0.5) ** 2, rtol=1e-6)


def test_unknown_treatment_of_absent_classes_is_refused():
    with pytest.raises(ValueError, match='floor'):
        losses.balanced_softmax(LOGITS, LABELS, COUNTS, absent='zero')


@pytest.mark.parametrize(
    ('soft', 'factor'), [(False, [1, 1, 0.3, 1]), (True, [0.3 + 0.7 * 5 / 9, 0.3 + 0.7 * 2 / 9, 0.3, 1])]
)
def test_restricted_softmax_scales_the_logits_of_absent_classes(soft, factor):
    want = -log_softmax(LOGITS.astype(np.float64) * factor)[np.arange(7), LABELS]
    got = losses.restricted_softmax(LOGITS, LABELS, jnp.asarray(COUNTS), alpha=0.3, soft=soft)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    whole = losses.restricted_softmax(LOGITS, LABELS, COUNTS, alpha=1.0, soft=soft)
    np.testing.assert_array_equal(whole, losses.cross_entropy(LOGITS, LABELS))


@pytest.mark.parametrize('soft', [False, True])
def test_restricted_softmax_of_a_client_without_data_is_finite(soft):
    assert np.isfinite(losses.restricted_softmax(LOGITS, LABELS, np.zeros(4, int), soft=soft)).all()


def test_weighted_cross_entropy_weighs_the_true_class():
    weights = np.array([1.0, 2.0, 0.0, 5.0], np.float32)
    want = -weights[LABELS] * log_softmax(LOGITS)[np.arange(7), LABELS]
    np.testing.assert_allclose(losses.weighted_cross_entropy(LOGITS, LABELS, weights=weights), want, rtol=1e-5)


def test_positive_draws_to_the_true_class_up_to_the_target():
    true = LOGITS[np.arange(7), LABELS]
    want = np.where(true < 0.9, (0.9 - true) ** 2, 0.0)
    np.testing.assert_allclose(losses.positive(LOGITS, LABELS), want, rtol=1e-5)
    assert (want == 0).any()
    assert (want > 0).any()


@pytest.mark.parametrize(
    ('loss', 'match'),
    [
        (lambda: losses.balanced_softmax(LOGITS, LABELS, jnp.array([5])), 'counts must have'),
        (lambda: losses.balanced_softmax(LOGITS, LABELS, jnp.ones((7, 4), int)), 'counts must have'),
        (lambda: losses.balanced_softmax(LOGITS, LABELS, jnp.ones(4, int), gamma=jnp.nan), 'gamma must be'),
        (lambda: losses.restricted_softmax(LOGITS, LABELS, jnp.ones(3, int)), 'counts must have'),
        (lambda: losses.restricted_softmax(LOGITS, LABELS, jnp.ones(4, int), alpha=-5), 'alpha must not be negative'),
        (lambda: losses.weighted_cross_entropy(LOGITS, LABELS, weights=jnp.ones(3)), 'weights must have'),
    ],
)
def test_numbers_of_classes_that_do_not_fit_are_refused(loss, match):
    with pytest.raises(ValueError, match=match):
        loss()
