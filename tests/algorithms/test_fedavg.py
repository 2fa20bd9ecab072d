"""One round of FedAvg and of FedProx against NumPy.

The model is a linear softmax classifier on `x * u`, and a batch holds a client's whole data, so that the order of
examples does not matter and each epoch is one step of gradient descent with momentum and weight decay.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

from fedjax_nc import aggregators, heads, local, losses, simulate
from fedjax_nc.algorithms import fedavg, fedprox
from fedjax_nc.objective import masked_mean, objective, with_term

LR, MOMENTUM, DECAY, EPOCHS = 0.1, 0.9, 0.01, 4
PLAN = local.Plan(batch_size=1000, epochs=EPOCHS)
opt = local.sgd(LR, MOMENTUM, DECAY)
task = objective(toys.scaling, heads.linear(), losses.cross_entropy)


def gradients(theta, x, y):
    """Of the mean cross-entropy of `(x * u) W + b` in u, W and b."""
    u, w, b = theta
    z = x * u
    logits = z @ w + b
    q = np.exp(logits - logits.max(1, keepdims=True))
    q /= q.sum(1, keepdims=True)
    q[np.arange(len(y)), y] -= 1
    q /= len(y)
    return [(q @ w.T * x).sum(0), z.T @ q, q.sum(0)]


def local_training(theta, x, y, mu=0.0):
    start, theta, m = theta, [t.copy() for t in theta], [np.zeros_like(t) for t in theta]
    for _ in range(EPOCHS):
        g = gradients(theta, x, y)
        g = [gi + mu * (t - s) + DECAY * t for gi, t, s in zip(g, theta, start, strict=True)]
        m = [MOMENTUM * mi + gi for mi, gi in zip(m, g, strict=True)]
        theta = [t - LR * mi for t, mi in zip(theta, m, strict=True)]
    return theta


def flat(params):
    return [np.asarray(u, np.float64) for u in (params['body']['u'], params['head']['w'], params['head']['b'])]


def one_round(algorithm, data, ids):
    state = simulate.init(algorithm, toys.KEY, data)
    after, _ = jax.jit(simulate.make_round(algorithm, chunk=2))(toys.KEY, state, data, np.asarray(ids))
    return flat(state.server.variables.params), flat(after.server.variables.params)


@pytest.mark.parametrize(('mu', 'ids'), [(0.0, [0, 3, 4]), (0.0, list(range(8))), (0.7, [0, 3, 4])])
def test_one_round_of_full_batches(data, mu, ids):
    algorithm = fedprox.algorithm(task, opt, mu=mu, plan=PLAN) if mu else fedavg.algorithm(task, opt, plan=PLAN)
    start, got = one_round(algorithm, data, ids)
    sizes = np.asarray(data.size, np.float64)[ids]
    ends = [local_training(start, *toys.examples(data, k), mu) for k in ids]
    want = [np.tensordot(sizes / sizes.sum(), np.stack(leaves), 1) for leaves in zip(*ends, strict=True)]
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, atol=2e-6)


def test_server_optimizer_sees_minus_the_mean_delta(data):
    """FedAdam (Reddi et al. 2021) after one round: theta + lr m_hat / (sqrt(v_hat) + eps), so a step of lr * sign."""
    adam = fedavg.algorithm(task, opt, plan=PLAN, server_opt=optax.adam(0.01, eps=1e-8))
    start, got = one_round(adam, data, [0, 3, 4])
    _, plain = one_round(fedavg.algorithm(task, opt, plan=PLAN), data, [0, 3, 4])
    for s, g, p in zip(start, got, plain, strict=True):
        np.testing.assert_allclose(g, s + 0.01 * (p - s) / (np.abs(p - s) + 1e-8), atol=1e-5)


@pytest.mark.parametrize('mu', [None, 0.1])
def test_a_term_of_the_task_is_a_penalty_under_every_method(data, mu):
    def term(v, z, batch):
        return 0.1 * masked_mean(jnp.sum(z**2, axis=-1), batch.mask)

    def penalty(v, z, batch, server, client):
        return term(v, z, batch) + (0.0 if mu is None else fedprox.proximal(mu)(v, z, batch, server, client))

    extended = with_term(task, term)
    method = fedavg.algorithm if mu is None else functools.partial(fedprox.algorithm, mu=mu)
    _, got = one_round(method(extended, opt, plan=PLAN), data, [0, 3, 4])
    _, want = one_round(fedavg.algorithm(task, opt, plan=PLAN, penalty=penalty), data, [0, 3, 4])
    _, plain = one_round(method(task, opt, plan=PLAN), data, [0, 3, 4])
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, atol=1e-6)
    assert max(np.abs(g - p).max() for g, p in zip(got, plain, strict=True)) > 1e-3


def test_learning_rate_falls_with_the_round(data):
    """At decay 0 the second round has no rate left, and the model stays."""
    algorithm = fedavg.algorithm(task, local.sgd(LR, decay=0.0), plan=PLAN)
    run = jax.jit(simulate.make_round(algorithm))
    first, _ = run(toys.KEY, simulate.init(algorithm, toys.KEY, data), data)
    second, _ = run(toys.KEY, first, data)
    toys.same(first.server.variables, second.server.variables)
    assert int(second.server.round) == 2


def test_statistics_are_averaged_as_values(data):
    """Each client counts its batches; the server holds the mean of the counts, weighted by sizes."""
    algorithm = fedavg.algorithm(toys.noisy_task, toys.opt, plan=toys.PLAN)
    state, report = simulate.make_round(algorithm)(toys.KEY, simulate.init(algorithm, toys.KEY, data), data)
    steps, sizes = np.asarray(report.info.steps), np.asarray(data.size)[np.asarray(report.ids)]
    np.testing.assert_allclose(state.server.variables.stats['batches'], np.average(steps, weights=sizes), rtol=1e-5)


def test_unknown_part_is_named(data):
    with pytest.raises(ValueError, match=r"no parameters are called \['neck'\]; there are \['body', 'head'\]"):
        simulate.init(fedavg.algorithm(task, opt, parts=('neck',)), toys.KEY, data)


def test_it_learns(data):
    algorithm = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN)
    run, state = jax.jit(simulate.make_round(algorithm)), simulate.init(algorithm, toys.KEY, data)
    seen = []
    for t in range(8):
        state, report = run(jax.random.fold_in(toys.KEY, t), state, data)
        seen.append(float(report.loss))
    assert seen[-1] < 0.3 * seen[0]


@pytest.mark.parametrize(
    ('wrong', 'said'),
    [
        ({'aggregate': aggregators.class_mean}, 'aggregate must be an Aggregator of models'),
        ({'aggregate': aggregators.coordinate_median}, 'aggregators.stacked'),
        ({'aggregate_stats': aggregators.pooled_stats}, 'aggregate_stats must be'),
        ({'server_opt': local.sgd(1.0)}, 'server_opt must be an optax optimizer'),
        ({'client_opt': optax.sgd(1.0)}, 'client_opt is a function of the round'),
    ],
)
def test_what_is_no_optimizer_or_aggregator_is_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        fedavg.algorithm(task, **{'client_opt': opt, **wrong})


@pytest.mark.parametrize(
    ('wrong', 'said'),
    [
        ({'lr': -0.1}, 'lr must not be negative'),
        ({'momentum': 1.0}, 'momentum must lie in'),
        ({'decay': -1.0}, 'decay must not be negative'),
        ({'clip': 0.0}, 'clip must be positive'),
    ],
)
def test_rates_out_of_range_are_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        local.sgd(**{'lr': 0.1, **wrong})
