"""CCVR against NumPy: moments of pooled features, virtual features, the refit of the head."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

from fedjax_nc import evaluate, gaussians, heads, local, losses, simulate, tree
from fedjax_nc.aggregators import ClassRows
from fedjax_nc.algorithms import ccvr, fedavg, fedetf, fedprox
from fedjax_nc.base import FederatedData, Model, Shard
from fedjax_nc.objective import objective

C, D = toys.CLASSES, toys.DIM
given = Model(lambda key, x: ({}, ()), lambda params, stats, x, mask, key: (x, stats))
"""Features that are the examples."""
linear = objective(given, heads.linear(), losses.cross_entropy)
KINDS = ('full', 'diag', 'tied')
SIZES = [40, 0, 1, 60, 23, 1, 0, 77]
SHORT = local.Plan(16, 2)


@pytest.fixture(scope='module')
def ragged():
    return toys.ragged(SIZES, seed=3, padding=5)


@functools.cache
def compiled(stage, chunk):
    return simulate.compiled(simulate.make_round(stage, chunk=chunk))


def run(stage, data, server=None, chunk=3):
    """One round of the stage; chunks of three are filled up by nobody."""
    server = stage.init(toys.KEY, data) if server is None else server
    state = simulate.join(stage, toys.KEY, server, data.num_clients)
    return compiled(stage, chunk)(toys.KEY, state, data)


short = ccvr.calibrate(linear, samples=20, plan=SHORT)


@functools.cache
def watching(kind, transform):
    """A compiled round whose server keeps the Gaussians."""
    stage = ccvr.calibrate(linear, transform=transform, covariance=kind)

    def server(key, server, aggregate):
        return gaussians.merge(aggregate.value['classes'], aggregate.value['scatter'], kind)

    return stage, jax.jit(simulate.make_round(stage._replace(server=server), chunk=2))


def moments(data, kind='full', transform=None):
    """What the server makes of the clients' messages, through the engine."""
    stage, once = watching(kind, transform)
    return once(toys.KEY, simulate.init(stage, toys.KEY, data), data)[0].server


def pooled(data):
    parts = [toys.examples(data, k) for k in range(data.num_clients)]
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


def covariances(x, y, kind, classes=C):
    """[C, D, D] float64 of NumPy; classes of one example have none."""
    cov = np.stack([np.cov(x[y == c].T, ddof=1) if (y == c).sum() > 1 else np.zeros((D, D)) for c in range(classes)])
    if kind == 'diag':
        return np.stack([np.diag(u) for u in cov])
    if kind == 'tied':
        free = np.maximum(np.bincount(y, minlength=classes) - 1, 0)
        return np.stack([np.tensordot(free, cov, 1) / free.sum()] * classes)
    return cov


@pytest.mark.parametrize('kind', KINDS)
def test_merged_moments_are_those_of_the_pooled_features(ragged, kind):
    x, y = pooled(ragged)
    got = moments(ragged, kind=kind)
    np.testing.assert_array_equal(got.count, np.bincount(y, minlength=C))
    np.testing.assert_allclose(got.mean, np.stack([x[y == c].mean(0) for c in range(C)]), atol=2e-6)
    want = covariances(x, y, kind)
    np.testing.assert_allclose(got.cov, want, atol=1e-5)
    if kind == 'full':
        np.testing.assert_array_equal(got.cov, np.swapaxes(got.cov, 1, 2))
    within = [covariances(*toys.examples(ragged, k), kind) for k in (0, 3, 4, 7)]
    assert np.abs(np.mean(within, axis=0) - want).max() > 0.1  # the means of clients differ, and that counts


def test_classes_of_one_example_and_of_none(ragged):
    """Two examples of class 1 on different clients, one of class 2, none of class 3."""
    x = np.asarray(ragged.x)
    y = np.full(len(x), 0, np.int32)
    first, other, single = (int(ragged.index[k, 0]) for k in (0, 3, 4))
    y[[first, other]], y[single] = 1, 2
    got = moments(ragged._replace(y=jnp.asarray(y)))
    np.testing.assert_array_equal(got.count, [len(x) - 3, 2, 1, 0, 0])
    gap = x[first].astype(np.float64) - x[other]
    np.testing.assert_allclose(got.cov[1], np.outer(gap, gap) / 2, atol=1e-5)
    np.testing.assert_allclose(got.mean[2], x[single], atol=1e-6)
    np.testing.assert_array_equal(got.cov[2:], 0)


def test_neither_order_nor_padding_matters(ragged):
    want = moments(ragged)
    order = jnp.array([5, 2, 7, 0, 6, 1, 4, 3])
    toys.same(moments(jax.tree.map(lambda u: u[order] if len(u) == len(SIZES) else u, ragged)), want, atol=1e-5)
    n = jnp.arange(ragged.index.shape[1])
    junk = jnp.where(n < ragged.size[:, None], ragged.index, (n * 17 + 3) % len(ragged.y))
    assert (junk != ragged.index).any()
    toys.same(moments(ragged._replace(index=junk)), want)


def test_moments_survive_means_that_dwarf_deviations():
    rng = np.random.default_rng(0)
    x = (50 + 0.05 * rng.normal(size=(8, 60, D))).astype(np.float32)
    y, weight = jnp.zeros(60, jnp.int32), jnp.ones(60)
    means = jnp.stack([u.mean(0) for u in x])[:, None]
    scatters = sum(gaussians.scatter(jnp.asarray(u), y, weight, m) for u, m in zip(x, means, strict=True))
    want = np.cov(x.reshape(-1, D).astype(np.float64).T)

    def error(cov):
        return np.linalg.norm(np.asarray(cov, np.float64) - want) / np.linalg.norm(want)

    assert error(gaussians.merge(ClassRows(means, jnp.full((8, 1), 60.0)), scatters).cov[0]) < 2e-3
    n, m = np.float32(480), np.asarray(means[:, 0])
    total = m.mean(0)
    local_covs = [np.cov(u.astype(np.float64).T).astype(np.float32) for u in x]
    published = sum(np.float32(59) / (n - 1) * s + np.float32(60) / (n - 1) * np.outer(u, u)
                    for s, u in zip(local_covs, m, strict=True)) - n / (n - 1) * np.outer(total, total)  # fmt: skip
    assert published.dtype == np.float32
    assert error(published) > 0.1


# Virtual features


sampled = jax.jit(gaussians.sample, static_argnums=2, static_argnames='proportional')


def drawn(classes, samples, key=toys.KEY, ridge=0.0, **kwargs):
    """The real rows and their labels."""
    shard = sampled(key, classes, samples, ridge=ridge, **kwargs)
    rows = np.asarray(shard.index)[: int(shard.size)]
    assert len(set(rows.tolist())) == len(rows)
    x, y = np.asarray(shard.x)[rows], np.asarray(shard.y)[rows]
    np.testing.assert_array_equal(np.bincount(y, minlength=len(classes.count)), shard.counts)
    return x, y


def some(counts, dim=3, seed=0):
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(len(counts), dim, dim))
    cov = jnp.asarray(root @ np.swapaxes(root, 1, 2), jnp.float32)
    return gaussians.Gaussians(jnp.asarray(counts, jnp.float32), jnp.asarray(rng.normal(size=(len(counts), dim))), cov)


@pytest.mark.parametrize('diagonal', [False, True])
def test_samples_have_the_moments(diagonal):
    g = some([9, 9])
    g = g._replace(cov=jnp.diagonal(g.cov, axis1=1, axis2=2)) if diagonal else g
    x, y = drawn(g, 40_000)
    for c in range(2):
        want = np.asarray(jnp.diag(g.cov[c]) if diagonal else g.cov[c])
        spread = np.sqrt(want.max() / 40_000)
        np.testing.assert_allclose(x[y == c].mean(0), g.mean[c], atol=5 * spread)
        np.testing.assert_allclose(np.cov(x[y == c].T), want, atol=7 * want.max() / 200)


def test_samples_of_singular_covariances_are_finite():
    """Rank one in many dimensions, where Cholesky and unclipped roots fail; and none at all."""
    u = np.random.default_rng(1).normal(size=64).astype(np.float32)
    cov = jnp.stack([jnp.outer(u, u), jnp.zeros((64, 64))])
    assert not np.isfinite(jnp.linalg.cholesky(cov[0])).all()
    assert jnp.linalg.eigvalsh(cov[0]).min() < 0
    x, y = drawn(gaussians.Gaussians(jnp.ones(2), jnp.ones((2, 64)), cov), 500)
    assert np.isfinite(x).all()
    np.testing.assert_array_equal(x[y == 1], 1)
    off = (x[y == 0] - 1) - np.outer((x[y == 0] - 1) @ u / (u @ u), u)
    assert np.abs(off).max() < 0.02
    assert x[y == 0].std() > 0.5
    wide, y = drawn(gaussians.Gaussians(jnp.ones(2), jnp.ones((2, 64)), cov), 500, ridge=4.0)
    np.testing.assert_allclose(wide[y == 1].std(), 2.0, atol=0.05)
    apart, _ = drawn(gaussians.Gaussians(jnp.ones(2), jnp.ones((2, 64)), jnp.zeros((2, 64))), 500, ridge=4.0)
    np.testing.assert_allclose(apart.std(), 2.0, atol=0.05)


def test_classes_are_drawn_on_their_own():
    g = some([5, 0, 7, 2])
    x, y = drawn(g, 6)
    np.testing.assert_array_equal(np.bincount(y, minlength=4), [6, 0, 6, 6])  # nothing of the unknown
    fewer, labels = drawn(tree.take(g, jnp.arange(3)), 6)
    np.testing.assert_array_equal(fewer[labels == 2], x[y == 2])
    other, labels = drawn(g._replace(count=g.count.at[1].set(3.0)), 6)
    np.testing.assert_array_equal(other[labels == 2], x[y == 2])
    assert np.abs(drawn(g, 6, key=jax.random.key(1))[0] - x).max() > 0.1
    x, y = drawn(tree.take(g, jnp.array([2, 2])), 6)  # classes alike, and not their noise
    assert np.abs(x[y == 0] - x[y == 1]).min() > 0


@pytest.mark.parametrize('counts', [[5, 0, 70, 2], [1, 1, 1, 1], [0, 0, 9, 0], [50, 31, 18, 1], [0, 0, 0, 0]])
def test_samples_in_proportion_to_the_counts(counts):
    x, y = drawn(some(counts), 10, proportional=True)
    want = np.round(40 * np.asarray(counts) / max(sum(counts), 1))
    np.testing.assert_array_equal(np.bincount(y, minlength=4), want)
    assert len(np.unique(x, axis=0)) == len(x)  # blocks of one class differ


# The refit


def descend(w, b, z, y, steps, present=None, lr=0.01, momentum=0.9):
    """Heavy ball on the softmax regression of float64 features."""
    mw, mb = np.zeros_like(w), np.zeros_like(b)
    for _ in range(steps):
        logits = z @ w + b + np.where(present, 0.0, -np.inf)
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        p[np.arange(len(y)), y] -= 1
        mw, mb = momentum * mw + z.T @ p / len(y), momentum * mb + p.mean(0)
        w, b = w - lr * mw, b - lr * mb
    return w, b


def test_refit_is_gradient_descent_from_where_the_head_stands(ragged):
    """Class 3 has no example: its weights stay bit for bit, and no other class is pushed away from it."""
    v = linear.init(toys.KEY, ragged)
    x, y = pooled(ragged)
    x, y = x[y != 3], y[y != 3]
    z, rows = np.full((len(x) + 30, D), 1e4, np.float32), np.arange(len(x) + 30)  # junk beyond the size
    z[: len(x)] = x
    labels = np.concatenate([y, np.full(30, 3)]).astype(np.int32)
    counts = np.bincount(y, minlength=C)
    shard = local.Shard(*map(jnp.asarray, (z, labels, rows, len(x), counts)))
    out, info = jax.jit(functools.partial(ccvr.refit, objective=linear, plan=local.Plan(1000, 4)))(
        toys.KEY, v=v, shard=shard
    )
    head = {name: np.asarray(value, np.float64) for name, value in v.params['head'].items()}
    w, b = descend(head['w'], head['b'], x, y, 4, counts > 0)
    np.testing.assert_allclose(out.params['head']['w'], w, atol=2e-6)
    np.testing.assert_allclose(out.params['head']['b'], b, atol=2e-6)
    assert np.abs(w - head['w']).max() > 0.01
    np.testing.assert_array_equal(out.params['head']['w'][:, 3], v.params['head']['w'][:, 3])
    assert out.params['head']['b'][3] == v.params['head']['b'][3]
    assert int(info.steps) == 4
    pushed, _ = descend(head['w'], head['b'], x, y, 4, counts >= 0)
    assert np.abs(pushed - w).max() > 1e-3  # the mask matters


# The whole stage


@pytest.mark.parametrize(('kind', 'axes'), [('full', 3), ('diag', 2), ('tied', 3)])
def test_options_reach_what_they_are_for(ragged, monkeypatch, kind, axes):
    seen, sample = {}, gaussians.sample

    def watched(key, classes, samples, **options):
        seen.update(options, samples=samples, axes=classes.cov.ndim)
        return sample(key, classes, samples, **options)

    monkeypatch.setattr(gaussians, 'sample', watched)
    stage = ccvr.calibrate(
        linear, samples=7, covariance=kind, proportional=True, ridge=4.0, plan=SHORT, opt=optax.sgd(0.0)
    )
    state = simulate.init(stage, toys.KEY, ragged)
    after, _ = simulate.make_round(stage)(toys.KEY, state, ragged)
    assert seen == {'samples': 7, 'proportional': True, 'ridge': 4.0, 'axes': axes}
    toys.same(after.server, state.server)  # at a rate of nothing


TASKS = {
    'fedavg': (toys.noisy_task, fedavg.algorithm(toys.noisy_task, toys.opt, plan=SHORT)),
    'fedprox + etf': (
        objective(toys.tiny, heads.etf(), losses.balanced_softmax),
        fedetf.algorithm(toys.tiny, toys.opt, plan=SHORT, base=fedprox.algorithm, mu=0.1),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize('name', TASKS)
def test_on_top_of_training(data, name):
    """Only the head moves, whatever trained it; the state keeps its type, so that training can go on."""
    task, algorithm = TASKS[name]
    state, _ = jax.jit(simulate.make_round(algorithm))(toys.KEY, simulate.init(algorithm, toys.KEY, data), data)
    stage = ccvr.calibrate(task, samples=20, plan=SHORT)
    after, report = run(stage, data, state.server, chunk=8)
    assert jax.tree.structure(after.server) == jax.tree.structure(state.server)
    before, new = state.server.variables, after.server.variables
    toys.same(after.server._replace(variables=None), state.server._replace(variables=None))
    toys.same((new.params['body'], new.stats, new.fixed), (before.params['body'], before.stats, before.fixed))
    for was, now in zip(*map(jax.tree.leaves, (before.params['head'], new.params['head'])), strict=True):
        assert np.abs(now - was).max() > 1e-4
    assert bool(report.finite)
    np.testing.assert_array_equal(report.info.examples, data.size[report.ids])
    z, _ = task.features(new, local.Batch(data.x[:9]))
    want = task.logits(new, jnp.sqrt(jnp.maximum(z, 0)))
    np.testing.assert_allclose(stage.predict(after.server, (), data.x[:9]), want, atol=1e-5)


@pytest.mark.slow
def test_nobody_leaves_no_trace(ragged):
    """Clients without data may come or go, also when they fill up chunks."""
    some = jnp.flatnonzero(ragged.size)
    fewer = ragged._replace(index=ragged.index[some], size=ragged.size[some], counts=ragged.counts[some])
    state, report = run(short, ragged)
    toys.same(run(short, fewer, chunk=1)[0].server, state.server, atol=2e-5)
    assert sorted(np.asarray(report.ids)) == [*range(8), 8]


def test_absent_classes_and_clients_of_one_class(ragged):
    """Every client holds a single class, and class 4 nobody does: its weights stay as they are.

    Classes 1 and 2 have a single example.
    """
    held = jnp.arange(8) % 4
    owner = np.zeros(len(ragged.y), np.int32)
    for k in range(8):
        owner[np.asarray(ragged.index[k, : int(ragged.size[k])])] = k
    single = ragged._replace(y=held[owner], counts=jax.nn.one_hot(held, C, dtype=jnp.int32) * ragged.size[:, None])
    before = short.init(toys.KEY, single).variables.params['head']
    after = run(short, single)[0].server.variables.params['head']
    assert all(np.isfinite(u).all() for u in jax.tree.leaves(after))
    known = np.bincount(np.asarray(single.y), minlength=C) > 0
    np.testing.assert_array_equal(known, [True, True, True, True, False])
    np.testing.assert_array_equal((after['w'] != before['w']).any(0), known)
    np.testing.assert_array_equal(after['b'] != before['b'], known)


def test_no_samples_change_nothing(ragged):
    stage = ccvr.calibrate(linear, samples=0)
    before = stage.init(toys.KEY, ragged)
    after = run(stage, ragged)[0].server
    toys.same(after, before)
    x = ragged.x[:5]
    np.testing.assert_array_equal(stage.predict(after, None, x), linear.logits(before.variables, x))


def test_a_message_holds_statistics_only():
    """No leaf has an axis of examples, and examples with the same moments give the same message."""
    n, p = 31, 61
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(p, D)).astype(np.float32), rng.integers(0, C, p).astype(np.int32)
    index = np.stack([rng.permutation(p)[:n] for _ in range(2)])
    counts = np.stack([np.bincount(y[rows], minlength=C) for rows in index])
    data = FederatedData(*map(jnp.asarray, (x, y, index, np.array([n, n]), counts)))
    for kind in KINDS:
        stage = ccvr.calibrate(linear, transform=None, covariance=kind)
        server = stage.init(toys.KEY, data)
        _, message, _ = jax.eval_shape(stage.client, toys.KEY, server, (), data.shard(0))
        many = jax.tree.map(lambda u: jnp.zeros((2, *u.shape)), message)
        seen = jax.eval_shape(
            lambda m, stage=stage: stage.aggregate.finish(
                stage.aggregate.partial(m, jnp.ones(2), jnp.arange(2), 2)), many)  # fmt: skip
        shapes = [u.shape for u in jax.tree.leaves((message, seen))]
        assert {size for shape in shapes for size in shape} <= {C, D, 2}
        floats = sum(u.size for u in jax.tree.leaves(message))
        assert floats == C * (1 + D) + {'full': C * D * D, 'diag': C * D, 'tied': D * D}[kind]

        def send(x, index, stage=stage, server=server):
            return stage.client(toys.KEY, server, (), local.Shard(x, data.y, index, jnp.int32(n), data.counts[0]))[1]

        want = send(data.x, data.index[0])
        toys.same(send(data.x, data.index[0][::-1]), want, atol=2e-5)
        mirrored = 2 * want.classes.rows[data.y] - data.x  # other examples, through the class means
        assert np.abs(mirrored - data.x).max() > 1
        toys.same(send(mirrored, data.index[0]), want, atol=5e-5)


def clusters(sizes, seed):
    """Gaussian features of five classes with covariances of their own, sorted by label."""
    rng = np.random.default_rng(11)
    centre, root = rng.normal(size=(C, D)), rng.normal(size=(C, D, D)) * 0.3
    rng = np.random.default_rng(seed)
    y = np.sort(rng.integers(0, C, sum(sizes))).astype(np.int32)
    x = (centre[y] + np.einsum('nde,ne->nd', root[y], rng.normal(size=(len(y), D)))).astype(np.float32)
    index = np.zeros((len(sizes), max(sizes)), np.int32)
    for k, part in enumerate(np.split(np.arange(len(y)), np.cumsum(sizes)[:-1])):
        index[k, : len(part)] = part
    counts = [np.bincount(y[index[k, :n]], minlength=C) for k, n in enumerate(sizes)]
    return FederatedData(*map(jnp.asarray, (x, y, index, np.asarray(sizes), np.asarray(counts))))


@pytest.fixture(scope='module')
def biased():
    """Clients of one or two classes, a test set, and a good head that is pulled towards two classes."""
    train, test = clusters([300, 500, 100, 700, 400], 0), clusters([4000], 1)
    stage = ccvr.calibrate(linear, transform=None, samples=400, plan=local.Plan(64, 20))
    server = ccvr.oracle(toys.KEY, linear, stage.init(toys.KEY, train), train)
    head = server.variables.params['head']
    head = {**head, 'b': head['b'] + jnp.array([6.0, 0, 3.0, 0, 0])}
    return train, test, stage, server._replace(variables=server.variables._replace(params={'body': {}, 'head': head}))


def accuracy(stage, server, test):
    return float(evaluate.accuracy(evaluate.generic(stage, simulate.State(server, ()), test.x, test.y, C)))


def test_a_biased_head_is_restored(biased):
    train, test, stage, server = biased
    start = accuracy(stage, server, test)
    calibrated = accuracy(stage, run(stage, train, server)[0].server, test)
    bound = accuracy(stage, ccvr.oracle(toys.KEY, linear, server, train), test)
    assert bound - start > 0.1
    assert calibrated > bound - 0.01


def test_the_oracle_takes_a_share_of_every_class(biased, monkeypatch):
    train, _, _, server = biased
    seen = []
    inner = ccvr.refit
    monkeypatch.setattr(ccvr, 'refit', lambda *args, **kwargs: seen.append(args[3]) or inner(*args, **kwargs))
    for key, fraction in [(toys.KEY, 1.0), (toys.KEY, 0.1), (toys.KEY, 1e-6), (jax.random.key(1), 0.1)]:
        after = ccvr.oracle(key, linear, server, train, transform=ccvr.tukey(1.0), fraction=fraction, plan=SHORT)
        toys.same(after._replace(variables=None), server._replace(variables=None))
    held = np.bincount(train.y, minlength=C)
    again, other = (np.asarray(seen[i].x) for i in (1, 3))
    assert not np.array_equal(again, other)
    for shard, want in zip(seen[:3], (held, [max(1, round(0.1 * int(n))) for n in held], np.ones(C)), strict=True):
        np.testing.assert_array_equal(shard.counts, want)
        np.testing.assert_array_equal(np.bincount(shard.y, minlength=C), want)
        pool = {tuple(u) for u in np.maximum(np.asarray(train.x), 0).tolist()}
        assert len({tuple(u) for u in np.asarray(shard.x).tolist()} & pool) == int(shard.size) == len(shard.x)
    with pytest.raises(ValueError, match='fraction'):
        ccvr.oracle(toys.KEY, linear, server, train, fraction=0.0)


# The transform


def test_tukey():
    z = jnp.linspace(-2, 3, 11)
    floor = np.maximum(np.asarray(z, np.float64), 0)
    np.testing.assert_array_equal(ccvr.tukey(1.0)(z), jax.nn.relu(z))
    np.testing.assert_allclose(ccvr.tukey()(z), np.sqrt(floor), rtol=1e-6)
    np.testing.assert_allclose(ccvr.tukey(0.3, 0.1)(z), (floor + 0.1) ** 0.3, rtol=1e-6)
    np.testing.assert_allclose(ccvr.tukey(0)(z), np.log(floor + 1e-6), atol=2e-6)
    np.testing.assert_allclose(ccvr.tukey(-0.5)(z), (floor + 1e-6) ** -0.5, rtol=1e-6)
    for power, offset in ((0.0, 0.0), (-1.0, 0.0), (0.5, -0.1)):
        with pytest.raises(ValueError, match='offset'):
            ccvr.tukey(power, offset)


def test_gaussians_describe_transformed_features_unless_told_otherwise(ragged, monkeypatch):
    psi = ccvr.tukey()
    x, y = pooled(ragged)
    got = moments(ragged, transform=psi)
    np.testing.assert_allclose(got.cov, covariances(np.sqrt(np.maximum(x, 0)), y, 'full'), atol=1e-5)

    def centres(key, classes, samples, **kwargs):
        rows = jnp.arange(C)
        return Shard(classes.mean, rows, rows, jnp.int32(C), jnp.ones(C, jnp.int32))

    monkeypatch.setattr(gaussians, 'sample', centres)
    monkeypatch.setattr(ccvr, 'refit', lambda key, task, v, shard, **kwargs: (v._replace(fixed=shard), None))
    stages = [ccvr.calibrate(linear, transform=psi, samples=7, raw_gaussians=raw) for raw in (False, True)]
    usual, other = (run(stage, ragged)[0].server.variables.fixed.x for stage in stages)
    np.testing.assert_allclose(usual, got.mean, atol=1e-5)
    np.testing.assert_allclose(other, psi(moments(ragged).mean), atol=1e-3)
    assert np.abs(usual - other).max() > 0.1


def test_mistakes_are_refused(ragged):
    with pytest.raises(ValueError, match='covariance'):
        ccvr.calibrate(linear, covariance='spherical')
    for name in ('samples', 'ridge'):
        with pytest.raises(ValueError, match=name):
            ccvr.calibrate(linear, **{name: -1})
    begun = ccvr.calibrate(linear).init(toys.KEY, ragged)
    for how, match in (
        ({'transform': 'tukey'}, 'transform must be a function'),
        ({'opt': local.sgd(0.1)}, 'opt must be an optax optimizer'),
        ({'plan': 5}, 'plan must be a local.Plan'),
    ):
        with pytest.raises(ValueError, match=match):
            ccvr.calibrate(linear, **how)
        with pytest.raises(ValueError, match=match):
            ccvr.oracle(toys.KEY, linear, begun, ragged, **how)
    with pytest.raises(ValueError, match='data must be'):
        ccvr.oracle(toys.KEY, linear, begun, None)
    for numbers in ((np.nan,), (0.5, np.nan), ('0.5',), (0.5, -1.0)):
        with pytest.raises(ValueError, match=r'(power|offset) must'):
            ccvr.tukey(*numbers)

    def bare_frame(key, dim, classes):
        return jnp.eye(dim, classes)

    bare = heads.etf(learn_scale=False, project=False, frame=bare_frame)
    frozen = objective(given, bare, losses.cross_entropy)
    stage = ccvr.calibrate(frozen)
    server = stage.init(toys.KEY, ragged)
    with pytest.raises(ValueError, match='no trainable weights'):
        simulate.join(stage, toys.KEY, server, ragged.num_clients)
    only_scale = objective(given, heads.prototypes(init=bare_frame), losses.cross_entropy)
    with pytest.raises(ValueError, match='no trainable weights'):
        simulate.join(ccvr.calibrate(only_scale), toys.KEY, ccvr.calibrate(only_scale).init(toys.KEY, ragged), 8)
    with pytest.raises(ValueError, match='no trainable weights'):
        ccvr.oracle(toys.KEY, frozen, server, ragged)
