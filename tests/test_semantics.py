"""CIFAR-100's super-classes, and how much class vectors know of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from fedjax_nc.metrics import semantics


def gap_by_hand(w, groups):
    """Sums over all pairs, in float64."""
    within, between = [], []
    for i, a in enumerate(w):
        for j, b in enumerate(w):
            if i != j:
                cosine = a @ b / np.sqrt((a @ a) * (b @ b))
                (within if groups[i] == groups[j] else between).append(cosine)
    return np.mean(within) - np.mean(between)


def test_superclasses_share_out_the_hundred_classes():
    order, groups = np.asarray(semantics.class_order()), np.asarray(semantics.superclass())
    np.testing.assert_array_equal(np.sort(order), np.arange(100))
    np.testing.assert_array_equal(groups[order], np.repeat(np.arange(20), 5))
    assert (np.diff(order.reshape(20, 5)) > 0).all()
    assert groups[[0, 30, 8, 89]].tolist() == [4, 0, 18, 19]  # apple, dolphin, bicycle, tractor


def test_gap_is_that_of_numpy():
    w = np.asarray(jax.random.normal(toys.KEY, (9, 4)), np.float64) + 0.5
    groups = np.array([0, 0, 1, 1, 1, 2, 3, 3, 0])
    got = jax.jit(semantics.semantic_gap)(jnp.asarray(w, jnp.float32), groups)
    np.testing.assert_allclose(got.plain, gap_by_hand(w, groups), atol=1e-6)
    np.testing.assert_allclose(got.centred, gap_by_hand(w - w.mean(0), groups), atol=1e-6)
    assert abs(got.plain - got.centred) > 0.01


def test_a_common_part_hides_the_gap_until_it_is_taken_off():
    """Two orthogonal groups of equal vectors: 1 within and 0 between, and -1 between once centred."""
    w = jnp.eye(2)[jnp.array([0, 0, 1, 1])]
    np.testing.assert_allclose(semantics.semantic_gap(w, [0, 0, 1, 1]), [1, 2], atol=1e-6)
    hidden = semantics.semantic_gap(w + 30.0, [0, 0, 1, 1])
    assert hidden.plain < 0.01
    assert hidden.centred == pytest.approx(2, abs=1e-4)


def test_no_semantics_no_gap():
    """A simplex treats all pairs alike, whatever the groups."""
    w = jnp.eye(10) - 0.1
    np.testing.assert_allclose(semantics.semantic_gap(w, np.arange(10) // 5), 0, atol=1e-6)


@pytest.mark.parametrize(
    ('rows', 'groups', 'match'),
    [(4, [0, 1, 1], r'groups \[C\]'), (3, [0, 1, 2], 'every class is alone'), (3, [1, 1, 1], 'all are one')],
)
def test_groups_that_do_not_fit_are_refused(rows, groups, match):
    with pytest.raises(ValueError, match=match):
        semantics.semantic_gap(jnp.eye(rows), groups)
