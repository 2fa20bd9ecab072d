"""FedETF against NumPy: one round of training, and both stages of personalisation.

The extractor is `h = x * u`; a batch holds a client's whole data, so that each epoch is one step. The gradients are
written by hand from the paper's equations:

    mu_hat = h W + b,  mu = mu_hat / |mu_hat|,  logits = beta mu V (+ gamma log n in training)
    q = softmax - onehot;  d beta = sum q * (mu V);  d V = beta mu^T q;  d mu = beta q V^T
    d mu_hat = (d mu - mu (mu . d mu)) / |mu_hat|;  d W = h^T d mu_hat;  d b = sum d mu_hat;  d h = d mu_hat W^T
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from fedjax_nc import evaluate, local, simulate
from fedjax_nc.algorithms import fedavg, fedetf

LR, MOMENTUM, DECAY, EPOCHS = 0.1, 0.9, 0.01, 3
PLAN = local.Plan(batch_size=1000, epochs=EPOCHS)
opt = local.sgd(LR, MOMENTUM, DECAY)
FADE = 0.9  # a round, in stages, which have the rates of the round after training


def gradients(p, x, y, prior):
    h = x * p['u']
    raw = h @ p['w'] + p['b']
    norm = np.linalg.norm(raw, axis=1, keepdims=True)
    mu = raw / norm
    cosines = mu @ p['v']
    logits = p['beta'] * cosines + prior
    q = np.exp(logits - logits.max(1, keepdims=True))
    q /= q.sum(1, keepdims=True)
    q[np.arange(len(y)), y] -= 1
    q /= len(y)
    d_mu = p['beta'] * q @ p['v'].T
    d_raw = (d_mu - mu * (mu * d_mu).sum(1, keepdims=True)) / norm
    return {'beta': (q * cosines).sum(), 'v': p['beta'] * mu.T @ q, 'w': h.T @ d_raw, 'b': d_raw.sum(0),
            'u': (d_raw @ p['w'].T * x).sum(0)}  # fmt: skip


def descend(p, moving, x, y, prior, epochs=EPOCHS, lr=LR, momentum=MOMENTUM, decay=DECAY):
    """Gradient descent on some of the parameters; the others do not move, nor decay."""
    p, m = dict(p), dict.fromkeys(moving, 0.0)
    for _ in range(epochs):
        g = gradients(p, x, y, prior)
        for name in moving:
            m[name] = momentum * m[name] + g[name] + decay * p[name]
        for name in moving:
            p[name] = p[name] - lr * m[name]
    return p


def flat(v):
    head = v.params['head']
    numbers = {'u': v.params['body']['u'], 'w': head['proj']['w'], 'b': head['proj']['b'], 'beta': head['scale'],
               'v': v.fixed['v']}  # fmt: skip
    return {name: np.asarray(value, np.float64) for name, value in numbers.items()}


def prior(data, k, gamma, absent):
    n = np.asarray(data.counts[k], np.float64)
    return np.where(n > 0, gamma * np.log(np.maximum(n, 1)), 0.0 if absent == 'floor' else -1e9)


def close(got, want, atol=5e-6):
    for name in want:
        np.testing.assert_allclose(got[name], want[name], atol=atol, err_msg=name)


@pytest.mark.parametrize(('gamma', 'absent', 'dim'), [(1.0, 'floor', None), (0.5, 'mask', 4), (1.0, 'mask', 7)])
def test_one_round(data, gamma, absent, dim):
    algorithm = fedetf.algorithm(toys.scaling, opt, gamma=gamma, absent=absent, dim=dim, scale=1.5, plan=PLAN)
    state = simulate.init(algorithm, toys.KEY, data)
    ids = [0, 2, 5, 7]
    after, _ = jax.jit(simulate.make_round(algorithm, chunk=2))(toys.KEY, state, data, jnp.asarray(ids))
    start = flat(state.server.variables)
    ends = [
        descend(start, ('u', 'w', 'b', 'beta'), *toys.examples(data, k), prior(data, k, gamma, absent)) for k in ids
    ]
    weights = np.asarray(data.size, np.float64)[ids]
    want = {name: np.average(np.stack([e[name] for e in ends]), axis=0, weights=weights) for name in start}
    close(flat(after.server.variables), want)
    assert abs(want['beta'] - 1.5) > 0.01  # the temperature is learned and averaged
    np.testing.assert_array_equal(after.server.variables.fixed['v'], state.server.variables.fixed['v'])


@pytest.fixture(scope='module')
def trained(data):
    algorithm = fedetf.algorithm(toys.scaling, opt, plan=local.Plan(32, 2))
    run, state = jax.jit(simulate.make_round(algorithm)), simulate.init(algorithm, toys.KEY, data)
    for t in range(5):
        state, _ = run(jax.random.fold_in(toys.KEY, t), state, data)
    return state.server


def tuned_by(stage, data, server):
    state = simulate.join(stage, toys.KEY, server, data.num_clients)
    after, report = jax.jit(simulate.make_round(stage, chunk=3))(toys.KEY, state, data)
    toys.same(after.server, server)  # a stage leaves the server alone
    return [flat(jax.tree.map(lambda u, k=k: u[k], after.clients)) for k in range(data.num_clients)], report, after


@pytest.mark.parametrize('released', [False, True])
def test_adapt_features(data, trained, released):
    fading = local.sgd(LR, MOMENTUM, DECAY, decay=FADE)
    got, _, _ = tuned_by(fedetf.adapt_features(toys.scaling, fading, plan=PLAN, released=released), data, trained)
    start = flat(trained.variables)
    for k in (0, 3, 5, 7):
        moving = ('u', 'w', 'b', 'beta') if released else ('u', 'beta')
        shift = prior(data, k, 1.0, 'floor') if released else 0.0
        close(got[k], descend(start, moving, *toys.examples(data, k), shift, lr=LR * FADE**5))


@pytest.mark.parametrize('tune_scale', [True, False])
def test_alternate(data, trained, tune_scale):
    rates = {'frame_opt': local.sgd(0.1, 0.0, 0.0, decay=FADE), 'proj_opt': local.sgd(0.05, decay=FADE)}
    stages = (fedetf.alternate(toys.scaling, cycles=n, turn=PLAN, tune_scale=tune_scale, **rates) for n in (1, 2))
    (_, once, _), (got, report, _) = (tuned_by(stage, data, trained) for stage in stages)
    scale = ('beta',) if tune_scale else ()
    for k in (0, 3, 5, 7):
        want = flat(trained.variables)
        for _ in range(2):
            own, fall = toys.examples(data, k), FADE**5
            want = descend(want, ('v', *scale), *own, 0.0, lr=0.1 * fall, momentum=0.0, decay=0.0)
            want = descend(want, ('w', 'b', *scale), *own, 0.0, lr=0.05 * fall, decay=5e-4)
        close(got[k], want, atol=2e-5)
        np.testing.assert_array_equal(got[k]['u'], flat(trained.variables)['u'])
    order = np.asarray(report.ids)[:8]
    np.testing.assert_array_equal(report.info.examples[:8], 2 * 2 * 3 * np.asarray(data.size)[order])
    assert (report.info.loss[:8] < once.info.loss[:8]).all()  # that of the last turn


def test_alternate_tells_each_loop_of_a_plan_with_tails(data, trained):
    stage = fedetf.alternate(toys.scaling, cycles=3, turn=PLAN._replace(tails=(4, 8)))
    _, report, _ = tuned_by(stage, data, trained)
    assert report.info.loops.shape == (len(report.ids), 6)  # three sizes of a batch in each of two turns
    np.testing.assert_array_equal(report.info.loops.sum(axis=1), report.info.slots)


@pytest.mark.parametrize(
    ('options', 'first', 'scale'),
    [
        ({}, ('u', 'beta'), ('beta',)),
        ({'released': True}, ('u', 'w', 'b', 'beta'), ()),  # the temperature stands still in the second stage
        ({'released': True, 'tune_scale': True}, ('u', 'w', 'b', 'beta'), ('beta',)),
        ({'tune_scale': False}, ('u', 'beta'), ()),
    ],
)
def test_personalize_is_one_stage_after_the_other(data, trained, options, first, scale):
    plan = local.Plan(1000, 2)
    stage = fedetf.personalize(toys.scaling, opt, plan=plan, cycles=1, turn=PLAN, **options)
    both, report, after = tuned_by(stage, data, trained)
    sizes = np.asarray(data.size)[np.asarray(report.ids)[:8]]
    np.testing.assert_array_equal(report.info.examples[:8], (2 + 2 * EPOCHS) * sizes)
    start = flat(trained.variables)
    for k in (0, 4):
        shift = prior(data, k, 1.0, 'floor') if 'released' in options else 0.0
        want = descend(start, first, *toys.examples(data, k), shift, epochs=2)
        want = descend(want, ('v', *scale), *toys.examples(data, k), 0.0, lr=0.1, momentum=0.0, decay=0.0)
        want = descend(want, ('w', 'b', *scale), *toys.examples(data, k), 0.0, lr=0.05, decay=5e-4)
        close(both[k], want, atol=2e-5)
    mine = evaluate.over_clients(evaluate.per_client(stage, after, data))
    shared = evaluate.over_clients(evaluate.per_client(stage, after, data, personal=False))
    assert mine.mean > shared.mean


def test_one_class_clients_train_without_nan(data):
    single = toys.ragged([30, 20])
    y = single.y.at[single.index[0, :30]].set(2)
    single = single._replace(y=y, counts=single.counts.at[0].set(jnp.array([0, 0, 30, 0, 0])))
    for absent in ('floor', 'mask'):
        algorithm = fedetf.algorithm(toys.tiny, toys.opt, absent=absent, plan=toys.PLAN)
        _, report = simulate.make_round(algorithm)(toys.KEY, simulate.init(algorithm, toys.KEY, single), single)
        assert bool(report.finite)
        assert np.isfinite(report.loss)


def test_too_small_a_dimension_is_refused(data):
    with pytest.raises(ValueError, match='at least 4'):
        simulate.init(fedetf.algorithm(toys.tiny, toys.opt, dim=3), toys.KEY, data)


def test_unknown_treatment_of_absent_classes_is_refused_at_once():
    with pytest.raises(ValueError, match='floor'):
        fedetf.algorithm(toys.tiny, toys.opt, absent='zero')


def test_no_cycle_is_refused():
    with pytest.raises(ValueError, match='adapt_features'):
        fedetf.alternate(toys.tiny, cycles=0)


def test_stages_refuse_models_of_other_methods(data):
    plain = simulate.init(fedavg.algorithm(toys.task, toys.opt), toys.KEY, data)
    for stage in (fedetf.adapt_features(toys.tiny, toys.opt), fedetf.alternate(toys.tiny)):
        with pytest.raises(ValueError, match=r'fedetf\.algorithm'):
            simulate.join(stage, toys.KEY, plain.server, data.num_clients)
