"""Measures against closed forms and plain NumPy."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from fedjax_nc import frames, models, simulate
from fedjax_nc.algorithms import fedavg, latest
from fedjax_nc.metrics import collapse, degeneration, similarity

# compiled once a shape instead of operation by operation
nc1, nc1_cosine, nc2 = (jax.jit(f, static_argnums=2) for f in (collapse.nc1, collapse.nc1_cosine, collapse.nc2))
uncentred = jax.jit(functools.partial(collapse.nc2, centred=False), static_argnums=2)
nc3, nc3_means, frame_error = map(jax.jit, (collapse.nc3, collapse.nc3_means, collapse.frame_error))
linear_cka, separability = (
    jax.jit(similarity.linear_cka),
    jax.jit(similarity.separability, static_argnames='directions'),
)
sliced_wasserstein = jax.jit(similarity.sliced_wasserstein, static_argnames='directions')
degenerate = jax.jit(degeneration.degeneration, static_argnums=2)


def cosine(a, b):
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


def off_diagonal(matrix):
    matrix = np.asarray(matrix)
    return matrix[~np.eye(len(matrix), dtype=bool)]


@pytest.fixture(scope='module')
def sample():
    """Unbalanced features of classes 0, 2 and 3 of five, and the same as NumPy groups."""
    rng = np.random.default_rng(0)
    y = rng.choice([0, 2, 3], 60, p=[0.6, 0.3, 0.1])
    z = rng.normal(size=(5, 4))[y] + 0.5 * rng.normal(size=(60, 4)) + 1
    return z.astype(np.float32), y, {c: z[y == c] for c in (0, 2, 3)}


# collapse


@pytest.mark.parametrize('dim', [4, 9])  # 4 = C-1
def test_a_perfect_frame_is_a_collapse(dim):
    etf = frames.simplex_etf(toys.KEY, dim, 5)
    y = jnp.array([0, 0, 0, 1, 2, 2, 3, 4])  # class sizes must not matter
    z = 3.0 * etf.T[y] + 7.0
    assert nc1(z, y, 5) < 1e-10
    assert nc2(z, y, 5) < 1e-5
    np.testing.assert_allclose(nc1_cosine(z, y, 5), 1, atol=1e-5)
    assert frame_error(2.0 * etf) < 1e-5
    for measure in (nc3(z - 7.0, y, etf), nc3_means(z, y, 0.1 * etf)):
        np.testing.assert_allclose(measure.values, 1, atol=1e-5)
        np.testing.assert_allclose(measure.mean, 1, atol=1e-5)


def test_frame_error_in_closed_form():
    np.testing.assert_allclose(frame_error(jnp.eye(4)), 1 / 3, atol=1e-6)
    one = jnp.ones((3, 2))
    np.testing.assert_allclose(frame_error(one), 2, atol=1e-6)
    # three orthogonal columns of which two count: their ETF is a line
    np.testing.assert_allclose(frame_error(jnp.eye(3), jnp.array([True, False, True])), 1, atol=1e-6)
    assert np.isnan(frame_error(jnp.ones((3, 1))))  # which has no pair


@pytest.mark.parametrize('scale', [1e-30, 1e-5, 1e10, 1e18])
def test_a_common_scale_changes_nothing(sample, scale):
    z, y, _ = sample
    small, vectors = np.float32(scale) * z, np.eye(4, 5, dtype=np.float32)
    both = np.stack([z, z[:, ::-1] ** 2])
    for measure in (
        lambda z: collapse.nc2(z, y, 5), lambda z: collapse.nc2(z, y, 5, centred=False),
        lambda z: collapse.nc1_cosine(z, y, 5), lambda z: collapse.nc3(z, y, vectors).values,
        lambda z: collapse.nc3_means(z, y, vectors).values, similarity.mean_pairwise_cosine,
        lambda z: similarity.linear_cka(z, both[1]), lambda z: similarity.linear_cka(both[1], z),
    ):  # fmt: skip
        np.testing.assert_allclose(measure(small), measure(z), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(similarity.cka_matrix(np.float32(scale) * both), similarity.cka_matrix(both), rtol=1e-4)


@pytest.mark.parametrize('sizes', [(10, 10, 10), (1, 7, 13), (40,) * 10])
def test_features_that_are_all_alike_have_no_geometry(sizes):
    """Their class means differ by rounding alone, which is no scatter."""
    row = np.random.default_rng(0).normal(size=9).astype(np.float32)
    y = np.repeat(np.arange(len(sizes)), sizes)
    z = np.broadcast_to(row, (len(y), 9))
    assert nc1(z, y, len(sizes)) == np.inf
    np.testing.assert_allclose(nc2(z, y, len(sizes)), 1 / (len(sizes) - 1), rtol=1e-6)  # cosines of 0
    assert linear_cka(z, np.random.default_rng(1).normal(size=(len(y), 4))) == 0
    tiny = degenerate(np.full_like(z, 1e-23), y, len(sizes))
    np.testing.assert_array_equal(tiny.relative, 0)


@pytest.mark.parametrize('scale', [1e-30, 1e25])
def test_nc1_is_of_any_scale(sample, scale):
    z, y, _ = sample
    np.testing.assert_allclose(nc1(np.float32(scale) * z, y, 5), nc1(z, y, 5), rtol=1e-4)


def test_a_broken_layer_is_like_no_other(sample):
    z, _, _ = sample
    broken = z.copy()
    broken[3, 1] = np.nan
    assert np.isnan(linear_cka(broken, z))
    assert np.isnan(linear_cka(z, broken))


def test_nc2_of_one_class_is_not_known():
    assert np.isnan(nc2(np.ones((3, 4), np.float32), np.array([1, 1, 1]), 3))


def test_nc1_in_closed_form():
    z = jnp.array([[1.0, 1.0], [1.0, -1.0], [-1.0, 2.0], [-1.0, -2.0]])
    y = jnp.array([0, 0, 1, 1])
    np.testing.assert_allclose(nc1(z, y, 2), (1 + 4) / (1 + 1), rtol=1e-6)
    np.testing.assert_allclose(nc1(z * 5 + 3, y, 4), 2.5, rtol=1e-5)
    assert nc1(z, jnp.zeros(4, int), 2) == jnp.inf
    single = frames.simplex_etf(toys.KEY, 4, 3).T + 1
    assert nc1(single, jnp.arange(3), 3) < 1e-10  # one example a class


def test_collapse_of_unbalanced_features_with_absent_classes(sample):
    z, y, groups = sample
    means = {c: g.mean(0) for c, g in groups.items()}
    centre = np.mean(list(means.values()), axis=0)
    within = sum(((g - means[c]) ** 2).sum(1).mean() for c, g in groups.items())
    between = sum(((m - centre) ** 2).sum() for m in means.values())
    np.testing.assert_allclose(nc1(z, y, 5), within / between, rtol=1e-5)
    np.testing.assert_allclose(
        nc1_cosine(z, y, 5), np.mean([cosine(h, means[c]) for h, c in zip(z, y, strict=True)]), rtol=1e-5
    )
    pairs = [(0, 2), (0, 3), (2, 3)]
    for measure, centred in ((nc2, True), (uncentred, False)):
        at = {c: m - centred * centre for c, m in means.items()}
        want = np.mean([abs(cosine(at[i], at[j]) + 1 / 2) for i, j in pairs])
        np.testing.assert_allclose(measure(z, y, 5), want, rtol=1e-5)
    vectors = np.random.default_rng(1).normal(size=(4, 5))
    examples, by_means = nc3(z, y, vectors), nc3_means(z, y, vectors)
    want = {c: np.mean([cosine(h, vectors[:, c]) for h in g]) for c, g in groups.items()}
    dual = {c: cosine(m - centre, vectors[:, c]) for c, m in means.items()}
    for got, expected in ((examples, want), (by_means, dual)):
        np.testing.assert_array_equal(got.known, [True, False, True, True, False])
        values = [expected.get(c, 0) for c in range(5)]
        np.testing.assert_allclose(got.values, values, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(got.mean, np.mean(list(expected.values())), rtol=1e-4)


@pytest.mark.parametrize('junk', [1e30, np.inf, np.nan])
def test_what_has_no_weight_is_not_looked_at(junk):
    rng = np.random.default_rng(0)
    z, y = rng.normal(size=(30, 4)).astype(np.float32), np.arange(30) % 3
    weight = (np.arange(30) != 7).astype(np.float32)
    spoilt = np.where(weight[:, None] > 0, z, np.float32(junk))
    want = collapse.nc1(jnp.asarray(z), jnp.asarray(y), 3, jnp.asarray(weight))
    np.testing.assert_allclose(
        collapse.nc1(jnp.asarray(spoilt), jnp.asarray(y), 3, jnp.asarray(weight)), want, rtol=1e-6
    )


def test_weights_are_repetitions_and_zeros_are_absence(sample):
    z, y, _ = sample
    times = np.random.default_rng(2).integers(0, 3, len(y))
    times[y == 3] = 0  # a class whose rows are all padding
    y = np.where((y == 0) & (np.arange(len(y)) % 2 == 0), 1, y)  # three other classes: two are always a perfect simplex
    again = np.repeat(np.arange(len(y)), times)
    vectors = jnp.asarray(np.random.default_rng(3).normal(size=(4, 5)))
    junk = np.where(times[:, None] > 0, z, 1e4).astype(np.float32)
    for measure in (nc1, nc1_cosine, nc2, uncentred):
        want = measure(z[again], y[again], 5)
        np.testing.assert_allclose(measure(junk, y, 5, times), want, rtol=1e-5)
    for measure in (nc3, nc3_means):
        toys.same(measure(junk, y, vectors, times), measure(z[again], y[again], vectors), atol=1e-5)


def test_vectors_of_another_space_are_refused(sample):
    z, y, _ = sample
    for measure in (nc3, nc3_means):
        with pytest.raises(ValueError, match='space of the classifier'):
            measure(z, y, jnp.ones((5, 4)))


# similarity


def test_cosines_of_classifiers():
    w = np.random.default_rng(0).normal(size=(3, 4, 2)).astype(np.float32)
    flat = w.reshape(3, -1)
    want = np.array([[cosine(a, b) for b in flat] for a in flat])
    np.testing.assert_allclose(similarity.pairwise_cosine(flat), want, atol=1e-6)
    np.testing.assert_allclose(similarity.mean_pairwise_cosine(w), off_diagonal(want).mean(), atol=1e-6)
    np.testing.assert_allclose(similarity.pairwise_cosine(np.zeros((2, 3), np.float32)), 0)
    with pytest.raises(ValueError, match='pair'):
        similarity.mean_pairwise_cosine(w[:1])
    np.testing.assert_allclose(similarity.class_norms(w), np.linalg.norm(w, axis=1), rtol=1e-6)
    assert similarity.class_norms(w).shape == (3, 2)


def test_prototype_consistency_leaves_out_classes_without_two_owners():
    means = np.random.default_rng(0).normal(size=(4, 3, 5)).astype(np.float32)
    owns = np.array([[1, 0, 0], [9, 0, 3], [0, 2, 4], [5, 0, 0]])
    got = similarity.prototype_consistency(jnp.asarray(means), jnp.asarray(owns))
    first = np.mean([cosine(means[i, 0], means[j, 0]) for i, j in ((0, 1), (0, 3), (1, 3))])
    third = cosine(means[1, 2], means[2, 2])
    np.testing.assert_allclose(got.values, [first, 0, third], atol=1e-6)
    np.testing.assert_array_equal(got.known, [True, False, True])
    np.testing.assert_allclose(got.mean, (first + third) / 2, atol=1e-6)


@pytest.mark.parametrize('own', [False, True])
def test_client_prototypes(data, own):
    algorithm = latest.keep(fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN))
    state = simulate.init(algorithm, toys.KEY, data)
    if own:
        state, _ = jax.jit(simulate.make_round(algorithm, chunk=4))(toys.KEY, state, data)
    v = state.clients.variables if own else state.server.variables
    got = similarity.client_prototypes(toys.task, v, data, own=own, batch_size=64)
    np.testing.assert_array_equal(got.weight, data.counts)
    for k in (0, 5, 7):
        x, y = toys.examples(data, k)
        layer = jax.tree.map(lambda u, k=k: np.asarray(u[k] if own else u), v.params['body'])
        z = np.maximum(x @ layer['w'] + layer['b'], 0)
        want = [z[y == c].mean(0) if (y == c).any() else np.zeros(16) for c in range(toys.CLASSES)]
        np.testing.assert_allclose(got.rows[k], want, atol=1e-5)


def gram_cka(x, y):
    n = len(x)
    h = np.eye(n) - 1 / n
    k, m = h @ x @ x.T @ h, h @ y @ y.T @ h
    return np.trace(k @ m) / np.sqrt(np.trace(k @ k) * np.trace(m @ m))


@pytest.mark.parametrize(('p', 'q'), [(4, 7), (4, 30), (50, 30)])  # both forms, on 20 examples
def test_linear_cka(p, q):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, p)) + 3, rng.normal(size=(20, q))
    y[:, :4] += x[:, :4]
    value = linear_cka(x, y)
    np.testing.assert_allclose(value, gram_cka(x, y), rtol=1e-5)
    assert 0 < value < 1
    np.testing.assert_allclose(linear_cka(y, x), value, rtol=1e-5)
    np.testing.assert_allclose(linear_cka(x, x), 1, rtol=1e-5)
    turn = np.linalg.qr(rng.normal(size=(p, p)))[0]
    np.testing.assert_allclose(linear_cka(-3 * x @ turn + 5, y), value, rtol=1e-4)
    assert linear_cka(np.ones((20, p)), y) == 0


def test_cka_needs_the_same_examples():
    with pytest.raises(ValueError, match='same examples'):
        linear_cka(jnp.ones((3, 2)), jnp.ones((4, 2)))


def test_cka_matrix_is_linear_cka_of_pairs():
    features = np.random.default_rng(0).normal(size=(3, 12, 2, 3)).astype(np.float32)
    want = [[gram_cka(a.reshape(12, -1), b.reshape(12, -1)) for b in features] for a in features]
    np.testing.assert_allclose(jax.jit(similarity.cka_matrix)(features), want, atol=1e-5)


class Net(nn.Module):
    """A convolution, a BatchNorm and a dense layer."""

    @nn.compact
    def __call__(self, x, *, mask=None, train=False):
        x = nn.Conv(3, (3, 3), name='conv')(x)
        x = nn.BatchNorm(use_running_average=not train, name='norm')(x)
        return nn.relu(nn.Dense(4, name='last')(x.reshape(len(x), -1)))


def test_layer_outputs():
    module, x = Net(), np.random.default_rng(0).integers(0, 256, (5, 4, 4, 1), np.uint8)
    model = models.from_flax(module)
    params, stats = model.init(toys.KEY, x)
    stats = jax.tree.map(lambda u: u + 0.5, stats)
    out = similarity.layer_outputs(module, params, stats, x)
    assert list(out) == ['conv', 'norm', 'last', 'features']
    assert out['conv'].shape == (5, 4, 4, 3)
    np.testing.assert_allclose(out['norm'], (out['conv'] - 0.5) / np.sqrt(1.5 + 1e-5), atol=1e-5)
    np.testing.assert_allclose(out['features'], model.features(params, stats, x)[0], atol=1e-6)
    np.testing.assert_allclose(out['features'], np.maximum(out['last'], 0), atol=1e-6)
    mlp = models.MLP((6, 3))  # without statistics
    params, _ = models.from_flax(mlp).init(toys.KEY, x)
    assert [u.shape for u in similarity.layer_outputs(mlp, params, (), x).values()] == [(5, 6), (5, 3), (5, 3)]


def gaussians(seed=0):
    rng = np.random.default_rng(seed)
    roots = rng.normal(size=(3, 4, 4))
    return rng.normal(size=(3, 4)) * 2, roots @ roots.swapaxes(1, 2)


def test_sliced_wasserstein_is_that_of_samples():
    """For one direction, the Wasserstein distance of sorted samples; averaged over the same directions."""
    mean, cov = gaussians()
    directions = np.asarray(frames.normalize(jax.random.normal(toys.KEY, (50, 4))), np.float64)
    got = np.asarray(sliced_wasserstein(toys.KEY, jnp.asarray(mean), jnp.asarray(cov), directions=50))
    rng = np.random.default_rng(1)
    drawn = [np.sort(rng.multivariate_normal(*g, 20_000) @ directions.T, axis=0) for g in zip(mean, cov, strict=True)]
    want = [[np.sqrt(((a - b) ** 2).mean()) for b in drawn] for a in drawn]
    np.testing.assert_allclose(got, want, rtol=0.02, atol=0.02)


def test_sliced_wasserstein_in_closed_form():
    mean, cov = map(jnp.asarray, gaussians())
    same = sliced_wasserstein(toys.KEY, mean, jnp.broadcast_to(jnp.eye(4), (3, 4, 4)))
    # equal covariances: the mean of (w . gap)^2 over the sphere is |gap|^2 / D
    want = np.linalg.norm(mean[:, None] - mean, axis=-1) / 2
    np.testing.assert_allclose(same, want, rtol=0.1)
    line = sliced_wasserstein(toys.KEY, jnp.array([[1.0], [4.0]]), jnp.array([[[1.0]], [[25.0]]]))
    np.testing.assert_allclose(line, [[0, 5], [5, 0]], rtol=1e-5)
    flat = jnp.diagonal(cov, axis1=1, axis2=2)
    full = jax.vmap(jnp.diag)(flat)
    np.testing.assert_array_equal(*(sliced_wasserstein(toys.KEY, jnp.asarray(mean), c) for c in (flat, full)))
    with pytest.raises(ValueError, match='direction'):
        sliced_wasserstein(toys.KEY, mean, full, directions=0)


def test_separability_is_the_mean_over_pairs_of_known_classes():
    mean, cov = map(jnp.asarray, gaussians())
    table = np.asarray(sliced_wasserstein(toys.KEY, mean, cov, directions=20))
    np.testing.assert_allclose(separability(toys.KEY, mean, cov, directions=20), off_diagonal(table).mean(), rtol=1e-5)
    some = separability(toys.KEY, mean, cov, jnp.array([3, 0, 1]), directions=20)
    np.testing.assert_allclose(some, table[0, 2], rtol=1e-5)


# degeneration


def test_relative_variance_is_sorted_with_the_means(sample):
    z, y, groups = sample
    z = np.concatenate([z, np.zeros((len(z), 1), np.float32)], axis=1)  # a dead dimension
    got = degenerate(z, y, 5)
    for c, group in groups.items():
        mean, variance = np.append(group.mean(0), 0), np.append(group.var(0), 0)
        order = np.argsort(-mean)
        np.testing.assert_array_equal(got.order[c], order)
        np.testing.assert_allclose(got.mean[c], mean[order], atol=1e-5)
        relative = np.where(mean == 0, 0, variance / np.where(mean == 0, 1, mean) ** 2)[order]
        np.testing.assert_allclose(got.relative[c], relative, rtol=1e-3)
        np.testing.assert_allclose(got.top[c], np.median(relative[:2]), rtol=1e-3)
        np.testing.assert_allclose(got.bottom[c], np.median(relative[2:]), rtol=1e-3)
    np.testing.assert_array_equal(got.count, np.bincount(y, minlength=5))
    assert not np.asarray(got.relative)[[1, 4]].any()
    often = np.random.default_rng(1).integers(0, 4, len(y))
    weighed, repeated = (
        degenerate(z, y, 5, jnp.float32(often)),
        degenerate(np.repeat(z, often, 0), np.repeat(y, often), 5),
    )
    for name in ('mean', 'relative', 'top', 'count'):
        np.testing.assert_allclose(getattr(weighed, name), getattr(repeated, name), rtol=1e-3, atol=1e-5)
    balanced = degenerate(jnp.array([[1.0, 1.0], [-1.0, 3.0]]), jnp.zeros(2, int), 1)
    np.testing.assert_allclose(balanced.relative, [[1 / 4, 0]])  # a mean of 0 with a variance
    with pytest.raises(ValueError, match='halves'):
        degeneration.degeneration(z[:, :1], y, 5)


ORDER = jnp.array([[2, 0, 3, 1], [1, 2, 3, 0]])  # of two classes in four dimensions


def test_masked_share():
    w = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    np.testing.assert_allclose(degeneration.masked_share(w, ORDER), [1.0, 0.5])


def test_prune():
    w = jnp.arange(1.0, 9.0).reshape(4, 2)
    keep = {  # share -> kept entries when the negligible, or the dominant, dimensions go
        (0.0, False): [[1, 1], [1, 1], [1, 1], [1, 1]],
        (0.5, False): [[1, 0], [0, 1], [1, 1], [0, 0]],
        (0.3, False): [[1, 0], [0, 1], [1, 1], [1, 1]],  # floor(1.2) = 1 of each
        (0.5, True): [[0, 1], [1, 0], [0, 0], [1, 1]],
        (1.0, True): [[0, 0], [0, 0], [0, 0], [0, 0]],
    }
    for (share, dominant), kept in keep.items():
        got = jax.jit(lambda s, dominant=dominant: degeneration.prune(w, ORDER, s, dominant=dominant))(share)
        np.testing.assert_array_equal(got, w * jnp.array(kept))
    whole = jax.jit(lambda s: degeneration.prune(jnp.ones((22, 1)), jnp.arange(22)[None], s))
    assert jnp.sum(whole(13 / 22)) == 9  # though 22 times that is a little less than 13 in float32
    with pytest.raises(ValueError, match='share'):
        degeneration.prune(w, ORDER, 1.5)


def test_a_broken_feature_is_no_single_class():
    """NC1 is infinite where class means coincide, and NaN where one of them is."""
    z, y = np.eye(4, dtype=np.float32), np.array([0, 1, 0, 1])
    z[0, 0] = np.nan
    assert np.isnan(nc1(z, y, 2))
    assert np.isinf(nc1(np.ones((4, 2), np.float32), y, 2))


@pytest.mark.parametrize(
    'measure',
    [
        lambda z, y: collapse.nc1(z, y, 3),
        lambda z, y: collapse.nc1_cosine(z, y, 3),
        lambda z, y: collapse.nc2(z, y, 3),
        lambda z, y: collapse.nc3(z, y, jnp.eye(4)[:, :3]),
        lambda z, y: collapse.nc3_means(z, y, jnp.eye(4)[:, :3]),
    ],
)
def test_labels_beyond_the_classes_are_refused(measure):
    with pytest.raises(ValueError, match=r'lie in \[0, 3\)'):
        measure(jnp.eye(4), jnp.arange(4))


def test_norms_of_half_precision_are_in_float32():
    w = jnp.asarray(np.random.default_rng(0).normal(size=(200, 3)), jnp.bfloat16)
    got = similarity.class_norms(w)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, np.linalg.norm(np.asarray(w, np.float64), axis=0), rtol=1e-5)
