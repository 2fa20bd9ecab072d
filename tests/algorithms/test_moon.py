"""MOON against NumPy, for features `z = x * u`, a linear head and one batch a client.

s = sigmoid((cos(z, z_p) - cos(z, z_g)) / T) is the derivative of the contrast by its argument, and
d cos(z, v) / dz = (v/|v| - cos(z, v) z/|z|) / |z|.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import softmax_by_hand as by_hand
import test_scaffold
import toys

from fedjax_nc import heads, local, losses, models, simulate
from fedjax_nc.algorithms import fedavg, fedetf, moon
from fedjax_nc.base import Batch
from fedjax_nc.objective import freezing, objective

MU, T = 3.0, 0.5


def unit(a):
    return a / np.linalg.norm(a, axis=1, keepdims=True)


def slopes(z, received, previous):
    """Gradient of the batch's mean contrast by the features."""
    near, far = unit(received), unit(previous)
    a, b = ((unit(z) * v).sum(1, keepdims=True) for v in (near, far))
    s = 1 / (1 + np.exp((a - b) / T))
    turn = ((far - b * unit(z)) - (near - a * unit(z))) / np.linalg.norm(z, axis=1, keepdims=True)
    return s / T * turn / len(z)


def local_work(start, previous, rate, x, y):
    def gradient(p):
        pull = MU * slopes(x * p['u'], x * start['u'], x * previous['u'])
        return by_hand.gradients(p, x, y, on_features=pull)

    return by_hand.descend(start, start, gradient, rate)


def test_two_rounds_of_partial_cohorts(data):
    algorithm = moon.algorithm(by_hand.task, by_hand.opt, mu=MU, temperature=T, plan=by_hand.PLAN)
    states = by_hand.two_rounds(algorithm, data)
    server = by_hand.numbers(states[0].server.variables)
    previous = [server] * data.num_clients
    for t, ids in enumerate(by_hand.COHORTS):
        rate = by_hand.LR * by_hand.FALL**t
        ends = {k: local_work(server, previous[k], rate, *toys.examples(data, k)) for k in ids}
        server = by_hand.average([ends[k] for k in ids], np.asarray(data.size, np.float64)[ids])
        previous = [ends.get(k, old) for k, old in enumerate(previous)]
        by_hand.close(by_hand.numbers(states[t + 1].server.variables), server)
        for k, want in enumerate(previous):
            by_hand.close(by_hand.row(by_hand.numbers(states[t + 1].clients.previous), k), want)
    assert states[-1].clients.previous.fixed == ()


def arrays(v):
    """Weights and biases of body, both layers of the projection, and head."""
    body = v.params['body']
    four = (body['model'], body['first'], body['second'], v.params['head'])
    return [np.asarray(layer[name], np.float64) for layer in four for name in ('w', 'b')]


def activations(net, x):
    """What each of the four layers sees, the third being linear, and the logits."""
    seen = [x]
    for i in range(4):
        out = seen[-1] @ net[2 * i] + net[2 * i + 1]
        seen.append(np.maximum(out, 0) if i < 2 else out)
    return seen


def gradient(net, received, previous, x, y):
    seen, found = activations(net, x), []
    d = by_hand.errors(seen[4], y)
    for i in (3, 2, 1, 0):
        found = [seen[i].T @ d, d.sum(0), *found]
        d = d @ net[2 * i].T
        if i == 3:
            d += MU * slopes(seen[3], *(activations(other, x)[3] for other in (received, previous)))
        else:
            d *= seen[i] > 0
    return found


def in_small_batches(key, server, previous, data, k):
    """A client's local work, in the order that its key makes."""
    net, momentum = server, [0.0] * 8
    for e in range(toys.PLAN.epochs):
        k_order = jax.random.split(jax.random.fold_in(key, e))[0]
        order = np.asarray(local._shuffled(k_order, data.shard(k), 16))[: int(data.size[k])]
        for rows in np.split(order, range(16, len(order), 16)):
            x, y = np.asarray(data.x, np.float64)[rows], np.asarray(data.y)[rows]
            slope = gradient(net, server, previous, x, y)
            momentum = [0.9 * m + g + 0.01 * p for m, g, p in zip(momentum, slope, net, strict=True)]
            net = [p - 0.05 * m for p, m in zip(net, momentum, strict=True)]
    return net


def test_projections_in_small_batches(data):
    task = objective(moon.projected(toys.tiny, 8), heads.linear(), losses.cross_entropy)
    algorithm = moon.algorithm(task, local.sgd(0.05, 0.9, 0.01), mu=MU, temperature=T, plan=toys.PLAN)
    states = by_hand.two_rounds(algorithm, data)
    server = arrays(states[0].server.variables)
    previous = [server] * data.num_clients
    for t, ids in enumerate(by_hand.COHORTS):
        key = jax.random.split(jax.random.fold_in(toys.KEY, t), 3)[1]
        ends = {k: in_small_batches(jax.random.fold_in(key, k), server, previous[k], data, k) for k in ids}
        weights = np.asarray(data.size, np.float64)[ids]
        server = [np.average(u, axis=0, weights=weights) for u in zip(*ends.values(), strict=True)]
        previous = [ends.get(k, old) for k, old in enumerate(previous)]
        toys.same(arrays(states[t + 1].server.variables), server, atol=2e-5)
        for k, want in enumerate(previous):
            toys.same(arrays(by_hand.row(states[t + 1].clients.previous, k)), want, atol=2e-5)


def jitter(x, key):
    return x if key is None else x + jax.random.normal(key, x.shape)


def test_without_contrast_it_is_fedavg(data):
    quiet = moon.algorithm(toys.task, toys.opt, mu=0.0, plan=toys.PLAN, persist_momentum=True)
    plain = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN, persist_momentum=True)
    server = simulate.init(plain, toys.KEY, data).server
    mine = toys.optimised(quiet.client)(toys.KEY, server, quiet.init_client(toys.KEY, server), data.shard(4))
    momentum, message, info = toys.optimised(plain.client)(
        toys.KEY, server, plain.init_client(toys.KEY, server), data.shard(4)
    )
    toys.same(mine[1:], (message, info))
    toys.same(mine[0].own, momentum)


@pytest.mark.parametrize('project', [False, True])
def test_a_model_that_stands_still_sees_what_the_one_in_training_does(data, project):
    """Its features are those of evaluation on pixels that half of the batch's key has augmented."""

    def task(preprocess):
        body = models.from_flax(models.MLP((6,)), preprocess)
        return objective(moon.projected(body, 3) if project else body, heads.linear(), losses.cross_entropy)

    augmented, quiet = task(jitter), task(None)
    v = augmented.init(toys.KEY, data)
    batch = Batch(data.x[:8], key=toys.KEY)
    seen = batch._replace(x=jitter(batch.x, jax.random.split(batch.key)[0]), key=None)
    toys.same(moon.reference(augmented, v, batch), quiet.features(v, seen)[0])
    toys.same(moon.reference(quiet, v, batch), quiet.features(v, batch._replace(key=None))[0])
    # What is built around a model's features sees the same.
    body = models.from_flax(models.MLP((6,)), jitter)
    around = body._replace(features=lambda *args: (2 * body.features(*args)[0], args[1]))
    doubled, alone = (objective(model, heads.linear(), losses.cross_entropy) for model in (around, body))
    w = alone.init(toys.KEY, data)
    toys.same(moon.reference(doubled, w, batch), 2 * moon.reference(alone, w, batch))
    # A frozen body augments nothing, whoever asks.
    still = freezing(augmented, ('head',))
    toys.same(moon.reference(still, v, batch), still.features(v, batch)[0])


def test_the_models_see_the_same_pixels(data):
    """In its first step a client is the received model: cosine 1 to it, and 1 or -1 to a previous one that points so.

    The contrast is then log 2, or log(1 + e^{-2/T}).
    """
    model = models.from_functions(lambda key, x: {'u': jnp.ones(x.shape[1:])}, lambda p, x: x * p['u'], jitter)
    jittery = objective(model, heads.linear(), losses.cross_entropy)
    algorithm = moon.algorithm(jittery, by_hand.opt, mu=1.0, temperature=T, plan=local.Plan(1000, 1))
    server = simulate.init(algorithm, toys.KEY, data).server
    work = jax.jit(algorithm.client)

    def loss(sign):
        previous = jax.tree.map(lambda leaf: sign * leaf, server.variables._replace(fixed=()))
        return float(work(toys.KEY, server, moon.Client((), previous), data.shard(4))[2].loss)

    np.testing.assert_allclose(loss(-1.0) - loss(1.0), np.log1p(np.exp(-2 / T)) - np.log(2), atol=1e-5)


def test_contrast_of_zero_features_has_a_finite_gradient():
    z, other = jnp.zeros((2, 3)), jnp.ones((2, 3))
    value, g = jax.value_and_grad(lambda z: moon.contrast(z, other, -other, 0.5).sum())(z)
    np.testing.assert_allclose(value, 2 * np.log(2), rtol=1e-6)
    assert np.isfinite(g).all()


def test_projected_puts_two_layers_behind_the_features(data):
    model = moon.projected(toys.tiny, 7)
    params, stats = model.init(toys.KEY, data.x[:1])
    z, after = model.features(params, stats, data.x[:9], None, None)
    h = np.asarray(toys.tiny.features(params['model'], (), data.x[:9], None, None)[0], np.float64)
    one, two = ({k: np.asarray(u, np.float64) for k, u in params[name].items()} for name in ('first', 'second'))
    assert one['w'].shape == (16, 16)
    np.testing.assert_allclose(z, np.maximum(h @ one['w'] + one['b'], 0) @ two['w'] + two['b'], atol=1e-5)
    assert after == stats == ()
    with pytest.raises(ValueError, match='at least 1'):
        moon.projected(toys.tiny, 0)


def test_a_projection_may_be_one_layer_as_wide_as_the_features(data):
    model = moon.projected(toys.tiny, None, hidden=False)
    params, _ = model.init(toys.KEY, data.x[:1])
    assert set(params) == {'model', 'second'}
    assert params['second']['w'].shape == (16, 16)
    z, _ = model.features(params, (), data.x[:9], None, None)
    h = np.asarray(toys.tiny.features(params['model'], (), data.x[:9], None, None)[0], np.float64)
    np.testing.assert_allclose(z, h @ np.asarray(params['second']['w']) + np.asarray(params['second']['b']), atol=1e-5)


def test_contrast_of_projections_under_a_frozen_etf(data):
    algorithm = fedetf.algorithm(
        moon.projected(toys.tiny, 8), toys.opt, base=moon.algorithm, mu=1.0, plan=toys.PLAN, persist_momentum=True
    )
    before = simulate.init(algorithm, toys.KEY, data)
    after, report = jax.jit(simulate.make_round(algorithm, chunk=1))(toys.KEY, before, data, jnp.array([1, 3]))
    assert bool(report.finite)
    old, new = (state.server.variables for state in (before, after))
    np.testing.assert_array_equal(old.fixed['v'], new.fixed['v'])
    assert np.abs(new.params['body']['second']['w'] - old.params['body']['second']['w']).max() > 1e-3


def test_reference_runs_in_evaluation_mode():
    v = toys.noisy_task.init(toys.KEY, toys.ragged([20]))
    batch = Batch(jnp.ones((2, toys.DIM)), jnp.zeros(2, int), jnp.ones(2, bool), None, toys.KEY)
    quiet = toys.noisy_task.features(v, batch._replace(key=None))[0]
    np.testing.assert_array_equal(moon.reference(toys.noisy_task, v, batch), quiet)
    assert np.abs(toys.noisy_task.features(v, batch)[0] - quiet).max() > 1e-3


def test_the_other_models_are_in_evaluation_mode(data):
    """Where training turns features round, the received model is opposite and its negative alike: the contrast is
    log(1 + e^{2/T}) in the first step."""

    def turned(v, batch):
        z, stats = by_hand.task.features(v, batch)
        return (z if batch.key is None else -z), stats

    def loss(mu):
        task = by_hand.task._replace(features=turned)
        algorithm = moon.algorithm(task, by_hand.opt, mu=mu, temperature=T, plan=local.Plan(1000, 1))
        server = simulate.init(algorithm, toys.KEY, data).server
        negative = jax.tree.map(jnp.negative, server.variables._replace(fixed=()))
        return jax.jit(algorithm.client)(toys.KEY, server, moon.Client((), negative), data.shard(4))[2].loss

    np.testing.assert_allclose(loss(1.0) - loss(0.0), np.log1p(np.exp(2 / T)), atol=1e-5)


def test_renaming_clients_changes_nothing(data):
    algorithm = moon.algorithm(test_scaffold.task, test_scaffold.opt, mu=1.0, plan=test_scaffold.PLAN)
    test_scaffold.check_renaming(algorithm, test_scaffold.copied(data))


def test_an_empty_client_keeps_its_previous_model(data):
    algorithm = moon.algorithm(toys.task, toys.opt, mu=1.0, plan=toys.PLAN)
    none = data._replace(size=data.size.at[3].set(0), counts=data.counts.at[3].set(0))
    state = simulate.init(algorithm, toys.KEY, none)
    marked = jax.tree.map(lambda u: u + 1, state.clients)
    after, _ = jax.jit(simulate.make_round(algorithm, chunk=1))(
        toys.KEY, state._replace(clients=marked), none, jnp.array([3, 1])
    )
    toys.same(*(jax.tree.map(lambda u: u[3], c) for c in (after.clients, marked)))


def test_bad_numbers_are_refused():
    with pytest.raises(ValueError, match='mu'):
        moon.algorithm(by_hand.task, by_hand.opt, mu=-1.0)
    with pytest.raises(ValueError, match='temperature'):
        moon.algorithm(by_hand.task, by_hand.opt, mu=1.0, temperature=0.0)
