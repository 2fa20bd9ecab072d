"""FedNH and FedUH against NumPy, written from the paper's equations and the sequence of its released code.

The body is `h = x * u`, and a batch holds a client's whole data, so that each epoch is one step:

    f = h / |h|,  logits = s f W^T,  q = (softmax - onehot) / n;  d s = sum q * (f W^T)
    d f = s q W;  d h = (d f - f (f . d f)) / |h|;  d u = sum d h * x
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from fedjax_nc import aggregators, evaluate, frames, local, simulate
from fedjax_nc.aggregators import ClassRows
from fedjax_nc.algorithms import fednh, feduh, latest

LR, MOMENTUM, DECAY, CLIP, EPOCHS = 0.3, 0.9, 0.01, 0.05, 3
PLAN = local.Plan(1000, EPOCHS)
opt = local.sgd(LR, MOMENTUM, DECAY, decay=0.9, clip=CLIP)
IDS = [0, 2, 5, 7]


def unit(a):
    return a / np.maximum(np.linalg.norm(a, axis=-1, keepdims=True), 1e-12)


def probabilities(u, s, w, x):
    logits = s * unit(x * u) @ w.T
    p = np.exp(logits - logits.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)


def train(u, s, w, x, y, rate):
    mu_u = mu_s = 0.0
    for _ in range(EPOCHS):
        h = x * u
        f, norm = unit(h), np.linalg.norm(h, axis=1, keepdims=True)
        q = probabilities(u, s, w, x)
        q[np.arange(len(y)), y] -= 1
        q /= len(y)
        d_s = (q * (f @ w.T)).sum()
        d_f = s * q @ w
        d_u = ((d_f - f * (f * d_f).sum(1, keepdims=True)) / norm * x).sum(0)
        shrink = min(1.0, CLIP / np.sqrt((d_u**2).sum() + d_s**2))
        mu_u = MOMENTUM * mu_u + shrink * d_u + DECAY * u
        mu_s = MOMENTUM * mu_s + shrink * d_s + DECAY * s
        u, s = u - rate * mu_u, s - rate * mu_s
    return u, s


def numbers(v):
    values = v.params['body']['u'], v.params['head']['scale'], v.fixed['w']
    return tuple(np.asarray(value, np.float64) for value in values)


def class_means(u, s, w, x, y, confident, unit_features):
    f = unit(x * u) if unit_features else x * u
    p = probabilities(u, s, w, x)[np.arange(len(y)), y] if confident else np.ones(len(y))
    return np.stack([(p[y == c, None] * f[y == c]).sum(0) / max(p[y == c].sum(), 1e-12) for c in range(len(w))])


@pytest.mark.parametrize(
    'options',
    [
        {},
        {'unit_means': False, 'rho': 0.5},
        {'weigh': 'agreement'},
        {'weigh': 'agreement', 'unit_means': False},
        {'confident': True},
        {'confident': True, 'weigh': 'holders', 'rho': 0.2},
        {'unit_features': False, 'weigh': 'holders'},
    ],
)
def test_two_rounds(data, options):
    algorithm = fednh.algorithm(toys.scaling, opt, scale=2.0, plan=PLAN, **options)
    round = jax.jit(simulate.make_round(algorithm, chunk=2))
    state = simulate.init(algorithm, toys.KEY, data)
    u, s, w = numbers(state.server.variables)
    np.testing.assert_allclose(np.linalg.norm(w, axis=1), 1, atol=1e-6)
    weigh, rho = options.get('weigh', 'counts'), options.get('rho', 0.9)
    unit_means, raw = options.get('unit_means', True), not options.get('unit_features', True)
    for t in range(2):
        state, _ = round(jax.random.fold_in(toys.KEY, t), state, data, jnp.asarray(IDS))
        ends, total, weight = [], np.zeros_like(w), np.zeros(len(w))
        for k in IDS:
            x, y = toys.examples(data, k)
            ends.append(train(u, s, w, x, y, LR * 0.9**t))
            mean = class_means(*ends[-1], w, x, y, options.get('confident', False), not raw)
            mean = unit(mean) if unit_means and not raw else mean
            count = np.bincount(y, minlength=len(w)).astype(float)
            if weigh == 'holders':
                count = np.sign(count)
            if weigh == 'agreement':
                count = np.sign(count) * np.exp((w * unit(mean)).sum(1))
            total += count[:, None] * mean
            weight += count
        target = total / weight[:, None]
        target = unit(target) if unit_means else target
        w = unit(rho * w + (1 - rho) * target)
        u, s = np.mean([e[0] for e in ends], axis=0), np.mean([e[1] for e in ends])
    got = numbers(state.server.variables)
    for name, a, b in zip(('u', 's', 'w'), got, (u, s, w), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, err_msg=name)
    assert abs(s - 2.0) > 5e-4  # the scale is learned and averaged


@pytest.mark.parametrize(
    ('options', 'row'),
    [
        ({'weigh': 'counts', 'unit_means': True}, (0.997784, 0.066537)),
        ({'weigh': 'counts', 'unit_means': False}, (0.999499, 0.031646)),
        ({'weigh': 'agreement', 'unit_means': True}, (0.999354, 0.035935)),
    ],
)
def test_worked_example(options, row):
    """Three prototypes in the plane, two clients: A holds classes 0 (three examples) and 1 (one), B one of class 0."""
    w = np.array([[1, 0], [0, 1], [-1, 0]], np.float32)
    means = np.array([[[0.3, 0.4], [0, 0.5], [0, 0]], [[1, 0], [0, 0], [0, 0]]], np.float32)
    counts = np.array([[3, 1, 0], [1, 0, 0]], np.float32)
    if options['unit_means']:
        means = np.asarray(unit(means), np.float32)
    weight = counts if options['weigh'] == 'counts' else np.sign(counts) * np.exp((w * means).sum(-1))
    messages = ClassRows(jnp.asarray(means), jnp.asarray(weight))
    partial = aggregators.class_mean.partial(messages, jnp.array([4.0, 1.0]), jnp.arange(2), 2)
    got = fednh.follow(jnp.asarray(w), aggregators.class_mean.finish(partial), 0.9, options['unit_means'])
    np.testing.assert_allclose(got, [row, (0, 1), (-1, 0)], atol=2e-6)
    np.testing.assert_array_equal(got[2], w[2])


def test_classes_that_the_cohort_lacks_keep_their_prototype_exactly(data):
    algorithm = fednh.algorithm(toys.tiny, toys.opt, plan=toys.PLAN)
    state = simulate.init(algorithm, toys.KEY, data)
    ids = jnp.array([1, 5])  # seven examples and one
    after, _ = simulate.make_round(algorithm)(toys.KEY, state, data, ids)
    held = np.asarray(data.counts[ids].sum(0) > 0)
    before, now = (np.asarray(s.server.variables.fixed['w']) for s in (state, after))
    assert 0 < held.sum() < toys.CLASSES
    np.testing.assert_array_equal(before[~held], now[~held])
    assert (np.abs(before - now).max(axis=1)[held] > 1e-3).all()
    np.testing.assert_allclose(np.linalg.norm(now, axis=1), 1, atol=1e-6)


def run(algorithm, data, rounds=3, jit=jax.jit):
    step, state = jit(simulate.make_round(algorithm, cohort=4, chunk=2)), simulate.init(algorithm, toys.KEY, data)
    for t in range(rounds):
        state, report = step(jax.random.fold_in(toys.KEY, t), state, data)
    return state, report


def test_rho_one_is_feduh_and_a_frozen_scale_stays(data):
    settings = {'scale': 30.0, 'learn_scale': False, 'plan': toys.PLAN}
    moved, _ = run(fednh.algorithm(toys.tiny, toys.opt, rho=1.0, **settings), data)
    still, _ = run(feduh.algorithm(toys.tiny, toys.opt, **settings), data)
    toys.same(moved.server.variables, still.server.variables, atol=1e-5)
    assert moved.server.variables.params['head'] == {}
    assert float(still.server.variables.fixed['scale']) == 30.0


@pytest.mark.slow
def test_latest_models_are_the_local_ones_with_the_received_prototypes(data):
    algorithm = latest.keep(fednh.algorithm(toys.tiny, toys.opt, plan=toys.PLAN))
    plain, _ = run(fednh.algorithm(toys.tiny, toys.opt, plan=toys.PLAN), data, 1, toys.optimised)
    step = toys.optimised(simulate.make_round(algorithm, cohort=4, chunk=2))
    start = simulate.init(algorithm, toys.KEY, data)
    state, report = step(jax.random.fold_in(toys.KEY, 0), start, data)
    toys.same(state.server, plain.server)  # keeping models changes nothing else
    took = np.isin(np.arange(8), report.ids)
    np.testing.assert_array_equal(state.clients.round, np.where(took, 0, -1))
    for k in range(8):
        toys.same(state.clients.variables.fixed['w'][k], start.server.variables.fixed['w'])
    mean = jax.tree.map(lambda u: u[took].mean(0), state.clients.variables.params)
    toys.same(mean, state.server.variables.params, atol=1e-5)
    tables = evaluate.per_client(algorithm, state, data)
    shared = evaluate.per_client(algorithm, state, data, personal=False)
    assert evaluate.accuracy(tables)[took].mean() > evaluate.accuracy(shared)[took].mean()


@pytest.mark.slow
def test_augmented_means_see_the_batch_key(data):
    plain, _ = run(fednh.algorithm(toys.noisy, toys.opt, plan=toys.PLAN), data, 1, toys.optimised)
    noisy, _ = run(fednh.algorithm(toys.noisy, toys.opt, plan=toys.PLAN, augment=True), data, 1, toys.optimised)
    toys.same(plain.server.variables.params, noisy.server.variables.params)
    gap = np.abs(np.asarray(plain.server.variables.fixed['w'] - noisy.server.variables.fixed['w']))
    assert 1e-6 < gap.max() < 0.1


def test_an_orthogonal_start_is_the_released_code(data):
    init = functools.partial(frames.uniform, method='orthogonal')
    state = simulate.init(fednh.algorithm(toys.tiny, toys.opt, init=init, plan=toys.PLAN), toys.KEY, data)
    w = np.asarray(state.server.variables.fixed['w'])
    np.testing.assert_allclose(w @ w.T, np.eye(toys.CLASSES), atol=1e-5)


@pytest.mark.parametrize(
    ('options', 'match'), [({'weigh': 'size'}, 'holders'), ({'rho': 1.5}, 'rho'), ({'rho': np.float32(-0.1)}, 'rho')]
)
def test_unknown_options_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        fednh.algorithm(toys.tiny, toys.opt, **options)
