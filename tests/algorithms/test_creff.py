"""CReFF against NumPy: gradients of classes, the descent that matches them, and the head trained on the result.

With `D = sum_j 1 - A_j . g_j / (|A_j| |g_j| + e)`, `P = softmax(F W)` and `g = (P - E)^T F / m` of m features:

    d g_j = -A_j / N_j + (A_j . g_j) |A_j| g_j / (|g_j| N_j^2),  N_j = |A_j| |g_j| + e
    d F = ((P - E) d g + (T - P sum T) W^T) / m,  T = P * (F d g^T), the sum over classes
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import softmax_by_hand as hand
import toys

from fedjax_nc import heads, local, losses
from fedjax_nc.aggregators import ClassRows
from fedjax_nc.algorithms import creff, fedavg, latest
from fedjax_nc.base import Aggregate, Shard
from fedjax_nc.objective import objective

M, STEPS, MATCH_LR, HEAD_EPOCHS, HEAD_LR = 6, 5, 0.5, 7, 0.2
algorithm = latest.keep(
    creff.algorithm(
        toys.scaling, hand.opt, samples=M, match_steps=STEPS, match_lr=MATCH_LR, draw=1000, repeats=2, plan=hand.PLAN,
        retrain=local.Plan(1000, HEAD_EPOCHS), retrain_opt=local.sgd(HEAD_LR, 0.0, 0.0, decay=hand.FALL),
    )
)  # fmt: skip
plain = fedavg.algorithm(
    objective(toys.scaling, heads.linear(False), losses.cross_entropy),
    hand.opt,
    plan=hand.PLAN,
    **fedavg.UNWEIGHTED,
)


def gradient(w, z, y):
    return hand.errors(z @ w, y).T @ z


def match(features, w, goal, seen):
    features = features.copy()
    for _ in range(STEPS):
        for c in np.flatnonzero(seen):
            f = features[c]
            y = np.full(M, c)
            g, q, p = gradient(w, f, y), hand.errors(f @ w, y), hand.softmax(f @ w)
            a, b = (np.linalg.norm(u, axis=1, keepdims=True) for u in (goal[c], g))
            n = a * b + 1e-6
            d_g = -goal[c] / n + (goal[c] * g).sum(1, keepdims=True) * a * g / (b * n**2)
            t = p * (f @ d_g.T)
            features[c] = f - MATCH_LR * (q @ d_g + (t - p * t.sum(1, keepdims=True)) @ w.T / M)
    return features


COHORTS = ([1, 5, 3, 2], [7, 1, 2, 3])


@pytest.fixture(scope='module')
def states(data):
    return hand.two_rounds(algorithm, data, COHORTS, toys.optimised)


def test_two_rounds(data, states):
    server = hand.numbers(states[0].server.variables)
    memory = jax.tree.map(lambda u: np.asarray(u, np.float64), states[0].server.extra)
    for t, ids in enumerate(([1, 5, 3, 2], [7, 1, 2, 3])):
        goal, owners, ends = np.zeros((toys.CLASSES, toys.CLASSES, toys.DIM)), np.zeros(toys.CLASSES), []
        for k in ids:
            x, y = toys.examples(data, k)
            for c in np.unique(y):
                goal[c] += gradient(memory.head['w'], x[y == c] * server['u'], y[y == c])
                owners[c] += 1
            ends.append(hand.descend(server, 'uw', lambda p, x=x, y=y: hand.gradients(p, x, y), hand.LR * hand.FALL**t))
        goal /= np.maximum(owners, 1)[:, None, None]
        features = match(memory.features, memory.head['w'], goal, owners > 0)
        w = fresh(t, server['w'].shape)
        flat, y = features.reshape(-1, toys.DIM), np.repeat(np.arange(toys.CLASSES), M)
        for _ in range(HEAD_EPOCHS):
            w = w - HEAD_LR * hand.FALL**t * gradient(w, flat, y).T
        server, memory = hand.average(ends), creff.Memory({'w': w}, features)
        hand.close(hand.numbers(states[t + 1].server.variables), server, atol=1e-5)
        toys.same(jax.tree.map(lambda u: np.asarray(u, np.float64), states[t + 1].server.extra), memory, atol=2e-5)
    h = np.asarray(data.x[:9]) * server['u']
    np.testing.assert_allclose(algorithm.predict(states[2].server, None, data.x[:9]), h @ w, atol=1e-4)


def fresh(t, shape):
    """The head that re-training starts from: new in each round, from the server's key."""
    k_server = jax.random.split(jax.random.fold_in(toys.KEY, t), 3)[2]
    head = heads.dense_init(jax.random.split(k_server)[0], *shape, bias=False)
    return np.asarray(head['w'], np.float64)


def test_personal_models_are_those_of_fedavg(data, states):
    *_, other = hand.two_rounds(latest.keep(plain), data, COHORTS, toys.optimised)
    toys.same(states[2].server.variables, other.server.variables)
    toys.same(states[2].clients, other.clients)
    mine = [a.predict(s.server, hand.row(s.clients, 7), data.x[:9]) for a, s in (
        (algorithm, states[2]), (latest.keep(plain), other))]  # fmt: skip
    np.testing.assert_array_equal(*mine)


def test_classes_that_nobody_holds_keep_their_features_bit_for_bit(data, states):
    held = np.asarray(data.counts)[[1, 5, 3, 2]].sum(0) > 0
    assert 0 < held.sum() < toys.CLASSES
    moved = np.abs(np.asarray(states[1].server.extra.features - states[0].server.extra.features)).max(axis=(1, 2))
    np.testing.assert_array_equal(moved > 0, held)
    head = heads.dense_init(toys.KEY, toys.DIM, toys.CLASSES)  # with a bias
    memory = states[0].server.extra._replace(head=head)
    junk = ClassRows(jnp.ones((toys.CLASSES, toys.CLASSES * (toys.DIM + 1))), jnp.array([0.0, 1.0, 0.0, 2.0, 0.0]))
    moved = np.abs(np.asarray(creff._matched(memory, junk, 1, 0.1) - memory.features)).max(axis=(1, 2))
    np.testing.assert_array_equal(moved > 0, [False, True, False, True, False])


@pytest.mark.parametrize('bias', [False, True])
def test_closed_form_is_the_gradient(bias):
    keys = jax.random.split(toys.KEY, 3)
    head = heads.dense_init(keys[0], toys.DIM, toys.CLASSES, bias)
    z, y = jax.random.normal(keys[1], (9, toys.DIM)), jax.random.randint(keys[2], (9,), 0, toys.CLASSES)
    weight = jnp.arange(9) / 36.0

    def loss(head):
        return jnp.sum(weight * losses.cross_entropy(heads.dense(head, z), y))

    want = jax.grad(loss)(head)
    got = creff._class_gradient(head, z, y, weight)
    np.testing.assert_allclose(got[:, : toys.DIM], want['w'].T, atol=1e-6)
    if bias:
        np.testing.assert_allclose(got[:, -1], want['b'], atol=1e-6)
    assert got.shape == (toys.CLASSES, toys.DIM + bias)


def test_row_distance():
    a = jax.random.normal(toys.KEY, (4, 7))
    np.testing.assert_allclose(creff._row_distance(a, 3 * a), 0, atol=1e-5)
    np.testing.assert_allclose(creff._row_distance(a, -a), 8, atol=1e-5)
    small = 1e-3 * jnp.eye(2)  # where the constant below the line counts
    np.testing.assert_allclose(creff._row_distance(small, small), 1.0, atol=1e-5)
    assert np.isfinite(jax.grad(creff._row_distance, (0, 1))(a.at[0].set(0), a.at[1].set(0))).all()


def test_draws_are_of_each_class_without_replacement():
    """Classes of 7, 3 and no examples, padding that claims to be of the last two, up to 4 drawn, 5 times."""
    y = jnp.array([0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 2, 1])
    own = Shard(jnp.zeros((12, 2)), y, jnp.arange(12), jnp.int32(10), jnp.array([7, 3, 0]))
    weight = np.asarray(creff._drawn(toys.KEY, own, 4, 5))
    times = weight * 4 * 5  # how often each example of the first class was drawn
    first, second = np.asarray(y[:10]) == 0, np.asarray(y[:10]) == 1
    np.testing.assert_allclose(times[:10][first], np.round(times[:10][first]), atol=1e-5)
    assert times[:10][first].max() <= 5 + 1e-5
    assert len(set(np.round(times[:10][first]))) > 1  # not the same four again and again
    np.testing.assert_allclose(weight[:10][second], 1 / 3, atol=1e-6)
    np.testing.assert_allclose(weight[:10][first].sum(), 1.0, atol=1e-6)
    np.testing.assert_array_equal(weight[10:], 0.0)


def test_gradients_of_augmented_images_see_the_batch_key(data):
    options = {'plan': toys.PLAN._replace(epochs=1), 'bias': True}
    server = creff.algorithm(toys.noisy, toys.opt, **options).init(toys.KEY, data)

    @jax.jit
    def rows(shard):
        algorithms = (creff.algorithm(toys.noisy, toys.opt, augment=augment, **options) for augment in (False, True))
        return [a.client(toys.KEY, server, (), shard)[1].gradients.rows for a in algorithms]

    still, shaken = rows(data.shard(3))
    assert still.shape == (toys.CLASSES, toys.CLASSES * (16 + 1))
    assert 1e-3 < np.abs(still - shaken).max() < 0.5  # noise of 0.1 on features


def test_a_round_of_nobody_keeps_the_memory(states):
    server = states[0].server
    gradients = ClassRows(jnp.zeros((toys.CLASSES, toys.CLASSES * toys.DIM)), jnp.zeros(toys.CLASSES))
    base = {'delta': jax.tree.map(jnp.zeros_like, server.variables.params), 'stats': ()}
    nothing = Aggregate({'base': base, 'gradients': gradients}, jnp.float32(0), jnp.float32(0))
    toys.same(jax.jit(algorithm.server)(toys.KEY, server, nothing).extra, server.extra)


@pytest.mark.parametrize('name', ['samples', 'draw', 'repeats'])
def test_none_of_them_is_refused(name):
    with pytest.raises(ValueError, match=f'{name} must be at least 1'):
        creff.algorithm(toys.tiny, toys.opt, **{name: 0})
