"""FedAwS against NumPy, for features `z = x * u`, a linear head and one batch a client.

With `d = (1 - cos)/2`, the derivative of `max(0, margin - d_cc')^2 / C^2` by the cosine is `max(0, margin - d_cc') /
C^2`; the gradient g by a unit vector w becomes `(g - w (w . g)) / |w|` by the vector itself.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import softmax_by_hand as by_hand
import toys

from fedjax_nc import frames, heads, local, losses, simulate
from fedjax_nc.algorithms import fedavg, fedaws, fedbabu, fedetf
from fedjax_nc.base import Aggregate, Head
from fedjax_nc.objective import objective

opt, PLAN, TASK = by_hand.opt, by_hand.PLAN, by_hand.task


def spread(w, margin, steps, lr, nearest=None):
    """Heavy-ball descent of the repulsion of the columns of w."""
    w, m, classes = w.T.copy(), 0.0, w.shape[1]
    for _ in range(steps):
        norm = np.linalg.norm(w, axis=1, keepdims=True)
        unit = w / norm
        distance = (1 - unit @ unit.T) / 2
        pull = np.maximum(margin - distance, 0) / classes**2
        for c in range(classes):
            others = sorted((c2 for c2 in range(classes) if c2 != c), key=lambda c2, c=c: distance[c, c2])
            pull[c, [c, *others[nearest or classes :]]] = 0
        g = (pull + pull.T) @ unit
        m = 0.9 * m + (g - unit * (unit * g).sum(1, keepdims=True)) / norm
        w = w - lr * m
    return w.T


def local_work(start, rate, x, y):
    return by_hand.descend(start, start, lambda p: by_hand.gradients(p, x, y), rate)


def test_two_rounds_of_partial_cohorts(data):
    algorithm = fedaws.algorithm(
        by_hand.task, by_hand.opt, margin=0.7, steps=4, spread_opt=optax.sgd(0.5, 0.9), plan=by_hand.PLAN
    )
    states = by_hand.two_rounds(algorithm, data)
    want = by_hand.numbers(states[0].server.variables)
    for t, ids in enumerate(by_hand.COHORTS):
        ends = [local_work(want, by_hand.LR * by_hand.FALL**t, *toys.examples(data, k)) for k in ids]
        want = by_hand.average(ends, np.asarray(data.size, np.float64)[ids])
        apart = spread(want['w'], 0.7, 4, 0.5)
        assert np.abs(apart - want['w']).max() > 1e-2
        want['w'] = apart
        by_hand.close(by_hand.numbers(states[t + 1].server.variables), want)


@pytest.mark.parametrize('nearest', [1, 2, 9])
def test_only_the_nearest_repel(nearest):
    w = np.random.default_rng(3).normal(size=(4, 6))
    got = fedaws.spread(jnp.asarray(w, jnp.float32), 0.8, 5, optax.sgd(0.3, 0.9), nearest)
    np.testing.assert_allclose(got, spread(w, 0.8, 5, 0.3, nearest), atol=1e-5)


def test_an_etf_is_stationary_and_equal_vectors_are_safe():
    """In an ETF all pairs have the distance (1 + 1/(C-1))/2 and the forces cancel, whatever the margin."""
    etf = frames.simplex_etf(toys.KEY, 6, 5)
    slope = jax.jit(jax.value_and_grad(lambda w: fedaws._repulsion(w, 0.9)))
    value, g = slope(etf)
    np.testing.assert_allclose(value, 0.8 * (0.9 - 0.625) ** 2, rtol=1e-5)
    np.testing.assert_allclose(g, 0.0, atol=1e-6)
    for equal in (jnp.ones_like(etf), jnp.zeros_like(etf)):
        assert np.isfinite(slope(equal)[1]).all()


@pytest.fixture(scope='module')
def moved(data):
    """A server, and what the messages of a round came to."""
    rng = np.random.default_rng(0)
    server = simulate.init(fedavg.algorithm(TASK, opt), toys.KEY, data).server
    delta = jax.tree.map(lambda u: rng.normal(size=u.shape).astype(np.float32), server.variables.params)
    return server, Aggregate({'delta': delta, 'stats': ()}, jnp.float32(9), jnp.float32(2))


def test_where_nothing_is_spread_the_server_is_that_of_the_base(moved):
    server, aggregate = moved
    want = fedavg.algorithm(TASK, opt).server(toys.KEY, server, aggregate)
    toys.same(fedaws.algorithm(TASK, opt, steps=0).server(toys.KEY, server, aggregate), want)
    nobody = aggregate._replace(clients=jnp.float32(0))
    toys.same(fedaws.algorithm(TASK, opt).server(toys.KEY, server, nobody).variables, server.variables)


def test_a_head_that_is_not_trained_is_left_alone(moved):
    server, aggregate = moved
    body = aggregate._replace(value={'delta': {'body': aggregate.value['delta']['body']}, 'stats': ()})
    algorithm = fedaws.algorithm(TASK, opt, parts=('body',))
    after = algorithm.server(toys.KEY, server, body).variables.params
    toys.same(after['head'], server.variables.params['head'])


def test_with_an_etf_it_is_fedavg_with_an_etf(data):
    ends = []
    for base in (fedaws.algorithm, fedavg.algorithm):
        algorithm = fedetf.algorithm(toys.scaling, opt, base=base, plan=PLAN)
        state = simulate.init(algorithm, toys.KEY, data)
        after, _ = jax.jit(simulate.make_round(algorithm, chunk=1))(toys.KEY, state, data, jnp.array([1, 3]))
        ends.append(after.server)
        np.testing.assert_array_equal(after.server.variables.fixed['v'], state.server.variables.fixed['v'])
    toys.same(*ends)


def test_spreading_keeps_positive_only_clients_from_collapse():
    """Clients that see one class and no negatives draw all class vectors together, unless the server holds on."""
    rng = np.random.default_rng(0)
    shared = toys.ragged([20] * toys.CLASSES)
    y = np.repeat(np.arange(toys.CLASSES), 20)
    x = (3.0 + 0.5 * rng.normal(size=(toys.CLASSES, toys.DIM)))[y]
    single = shared._replace(
        x=jnp.asarray(x, jnp.float32),
        y=jnp.asarray(y, jnp.int32),
        index=jnp.arange(100).reshape(toys.CLASSES, 20),
        counts=20 * jnp.eye(toys.CLASSES, dtype=jnp.int32),
    )
    task = objective(toys.scaling, heads.cosine(learn_scale=False), losses.positive)
    base = fedaws.algorithm(task, local.sgd(1.0), steps=0, plan=PLAN)
    apart = fedaws.algorithm(task, local.sgd(1.0), steps=30, spread_opt=optax.sgd(2.0, 0.9), plan=PLAN)
    cosines = []
    for algorithm in (base, apart):
        state, run = simulate.init(algorithm, toys.KEY, single), jax.jit(simulate.make_round(algorithm, chunk=1))
        for _ in range(12):
            state, _ = run(toys.KEY, state, single)
        unit = np.asarray(heads.normalize(state.server.variables.params['head']['w'].T))
        cosines.append((unit @ unit.T)[~np.eye(toys.CLASSES, dtype=bool)].mean())
    assert cosines[1] < 0.4 < 0.6 < cosines[0]


def test_bad_settings_and_heads_without_class_vectors_are_refused(data):
    with pytest.raises(ValueError, match='steps'):
        fedaws.algorithm(TASK, opt, steps=-1)
    with pytest.raises(ValueError, match='spread_opt must be an optax optimizer'):
        fedaws.algorithm(TASK, opt, spread_opt=opt)
    with pytest.raises(ValueError, match='nearest'):
        fedaws.algorithm(TASK, opt, nearest=0)
    deep = Head(lambda key, dim, classes: ({'first': jnp.ones((dim, classes))}, {}), lambda p, f, z: z @ p['first'])
    odd = fedaws.algorithm(objective(toys.tiny, deep, losses.cross_entropy), opt)
    with pytest.raises(ValueError, match='class vectors'):
        odd.init(toys.KEY, data)


def test_a_base_that_freezes_the_head_keeps_it(data):
    algorithm = fedaws.algorithm(TASK, opt, base=fedbabu.algorithm, plan=PLAN)
    state = simulate.init(algorithm, toys.KEY, data)
    after, _ = jax.jit(simulate.make_round(algorithm, chunk=1))(toys.KEY, state, data, jnp.array([1, 3]))
    toys.same(*(s.server.variables.params['head'] for s in (state, after)))
