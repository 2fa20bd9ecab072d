"""Simplex ETFs with and without zeros, and the measure of how good they are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from fedjax_nc import frames, heads
from fedjax_nc.experiments import parts


def quality_by_hand(frame):
    frame = np.asarray(frame, np.float64)
    norms = np.sqrt((frame**2).sum(0))
    unit = frame / norms
    classes = frame.shape[1]
    cosines = np.array([unit[:, i] @ unit[:, j] for i in range(classes) for j in range(classes) if i != j])
    angles = np.degrees(np.arccos(cosines))
    return [norms.mean(), norms.var(), angles.mean(), angles.var(), np.abs(cosines + 1 / (classes - 1)).max(),
            (frame == 0).mean()]  # fmt: skip


def check(frame, *, norm, zeros, angle_var=np.inf, gap=np.inf):
    """What a sparse frame must reach to be accepted."""
    quality = frames.frame_quality(frame)
    ideal = np.degrees(np.arccos(-1 / (frame.shape[1] - 1)))
    assert frame.dtype == jnp.float32
    assert int((frame == 0).sum()) == zeros
    np.testing.assert_allclose(quality.norm_mean, norm, rtol=1e-6)
    assert quality.norm_var < 1e-8 * norm**2
    assert abs(quality.angle_mean - ideal) < 0.01
    assert quality.angle_var < angle_var
    assert quality.gap < gap


def test_quality_is_that_of_numpy():
    frame = jax.random.normal(toys.KEY, (9, 5)).at[3, 2].set(0.0)
    got = frames.frame_quality(frame)
    np.testing.assert_allclose(got, quality_by_hand(frame), rtol=2e-5)
    assert got.zeros == pytest.approx(1 / 45)


@pytest.mark.parametrize(('dim', 'classes'), [(4, 5), (1, 2)])
def test_dense_frames_are_exact(dim, classes):
    quality = frames.frame_quality(frames.simplex_etf(toys.KEY, dim, classes))
    assert quality.gap < 1e-6
    assert quality.zeros == 0
    np.testing.assert_allclose(quality.norm_mean, 1, rtol=1e-6)


def test_the_faithful_solver_is_accepted_for_ten_classes():
    check(frames.sparse_etf(toys.KEY, 64, 10, norm=1.6), norm=1.6, zeros=384, angle_var=0.1)


def test_the_fast_solver_is_accepted_and_closer():
    fast = frames.sparse_etf(toys.KEY, 64, 10, solver='gram', norm=0.1)
    check(fast, norm=0.1, zeros=384, gap=1e-3)
    assert frames.frame_quality(fast).angle_var < 1e-4


@pytest.mark.slow
def test_the_faithful_solver_is_accepted_at_full_size():
    check(frames.sparse_etf(toys.KEY, 512, 100), norm=1.0, zeros=30720, angle_var=0.1)
    check(frames.sparse_etf(toys.KEY, 512, 100, solver='gram'), norm=1.0, zeros=30720, gap=1e-3)


@pytest.mark.parametrize('name', parts.DRAWN)
def test_the_faithful_solver_is_accepted_wherever_it_begins(name):
    """FedLoGe's Table 9; entries of a standard normal distribution make columns of length 8."""
    check(parts.FRAMES[f'sparse_{name}'](toys.KEY, 64, 10), norm=1.0, zeros=384, angle_var=0.1)


@pytest.mark.parametrize('length', [0.5, 1.5])
def test_the_loss_of_the_faithful_solver(length):
    """`sum_i (|w_i| - gamma)^2 - mean_i arccos max_j cos`, written as loops."""
    frame = np.asarray(jax.random.normal(toys.KEY, (6, 4)), np.float64)
    norms = np.sqrt((frame**2).sum(0))
    nearest = [max(frame[:, i] @ frame[:, j] / norms[i] / norms[j] for j in range(4) if j != i) for i in range(4)]
    want = ((norms - length) ** 2).sum() - np.mean(np.arccos(nearest))
    np.testing.assert_allclose(frames._closest_pairs(jnp.asarray(frame, jnp.float32), length), want, rtol=1e-5)


def test_long_columns_take_more_steps():
    """Why the angles of the published table vary more the longer its columns are."""
    seen = [
        frames.frame_quality(frames.sparse_etf(toys.KEY, 64, 10, steps=5000, fit_norm=length, norm=2.0))
        for length in (0.5, 1.0, 1.5)
    ]
    assert seen[0].angle_var < seen[1].angle_var < seen[2].angle_var
    np.testing.assert_allclose([quality.norm_mean for quality in seen], 2.0, rtol=1e-6)


short = functools.partial(frames.sparse_etf, solver='gram', steps=30)


def test_the_gradient_of_that_loss_is_by_differences():
    rng = np.random.default_rng(4)
    w = rng.normal(size=(7, 5)).astype(np.float32) / 4
    ours = np.asarray(jax.grad(frames._closest_pairs)(jnp.asarray(w), 0.5))

    def loss(w):
        lengths = np.sqrt((w**2).sum(0))
        cosines = (w / lengths).T @ (w / lengths) - 9 * np.eye(5)
        return ((lengths - 0.5) ** 2).sum() - np.arccos(cosines.max(1)).mean()

    steps = 1e-6 * np.eye(35).reshape(35, 7, 5)
    theirs = [(loss(w + d) - loss(w - d)) / 2e-6 for d in steps]
    np.testing.assert_allclose(ours.ravel(), theirs, atol=1e-6)


def test_zeros_are_counted_exactly_and_drawn_from_the_whole_matrix():
    for sparsity, zeros in ((0.0, 0), (0.29, 29), (0.55, 55)):
        assert int((short(toys.KEY, 20, 5, sparsity=sparsity) == 0).sum()) == zeros
    frame, other = (np.asarray(short(key, 20, 5)) == 0 for key in jax.random.split(toys.KEY))
    assert (frame != other).any()
    assert np.ptp(frame.sum(0)) > 0  # no quota for each column
    compiled = jax.jit(short, static_argnums=(1, 2))
    np.testing.assert_allclose(compiled(toys.KEY, 20, 5), short(toys.KEY, 20, 5), atol=1e-5)


def test_no_steps_leave_the_masked_dense_frame():
    frame = frames.sparse_etf(toys.KEY, 20, 5, steps=0)
    dense = frames.simplex_etf(jax.random.split(toys.KEY)[0], 20, 5) * (frame != 0)
    np.testing.assert_allclose(frame, dense / np.linalg.norm(dense, axis=0), atol=1e-6)


def test_a_head_on_a_sparse_frame():
    head = heads.etf(project=False, unit_features=False, learn_scale=False, frame=short)
    params, fixed = head.init(toys.KEY, 20, 5)
    assert jax.tree.leaves(params) == []
    assert int((fixed['v'] == 0).sum()) == 60
    z = jax.random.normal(toys.KEY, (3, 20))
    np.testing.assert_allclose(head.logits(params, fixed, z), np.asarray(z) @ np.asarray(fixed['v']), atol=1e-5)


@pytest.mark.parametrize(
    ('change', 'match'),
    [
        ({'sparsity': 1.0}, r'in \[0, 1\)'),
        ({'sparsity': -0.1}, r'in \[0, 1\)'),
        ({'solver': 'sgd'}, "'mma' or 'gram'"),
        ({'norm': 0.0}, 'norm must be positive'),
        ({'fit_norm': 0.0}, 'fit_norm must be positive'),
        ({'steps': -1}, 'steps must be at least 0'),
        ({'sparsity': 0.9}, 'left a class without an entry'),  # 2 entries for 5 classes
        ({'dim': 3}, 'no simplex ETF of 5 classes exists in 3'),
        ({'start': lambda key, dim, classes: jnp.full((dim, classes), jnp.nan)}, 'frame of start must be finite'),
        ({'start': lambda key, dim, classes: jnp.ones((classes, dim))}, r'start must make a frame \(4, 5\)'),
    ],
)
def test_impossible_frames_are_refused(change, match):
    with pytest.raises(ValueError, match=match):
        short(toys.KEY, **{'dim': 4, 'classes': 5, **change})
