"""FedAvg_ETF + GMV against NumPy, written from the paper's algorithm.

The body is `f = x * u`, and a batch holds a client's whole data, so that each epoch is one step. With the memory's
shift `A[y] = alpha mu_y^T W` of the logits: `q = (softmax(f W + A[y]) - onehot) / n;  d f = q W^T;  d u = sum d f * x`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from fedjax_nc import aggregators, heads, local, losses, memory, simulate
from fedjax_nc.algorithms import fedavg, fedbn, fedetf_gmv, fedprox
from fedjax_nc.base import Batch
from fedjax_nc.objective import objective

LR, MOMENTUM, DECAY, EPOCHS = 0.1, 0.9, 0.01, 3
PLAN = local.Plan(1000, EPOCHS)
opt = local.sgd(LR, MOMENTUM, DECAY)
COHORTS = [[0, 2, 5, 7], [1, 5], [3, 4, 5, 6]]


def train(u, w, x, y, shift):
    m = 0.0
    for _ in range(EPOCHS):
        before = u
        logits = x * u @ w + shift[y]
        q = np.exp(logits - logits.max(1, keepdims=True))
        q /= q.sum(1, keepdims=True)
        q[np.arange(len(y)), y] -= 1
        m = MOMENTUM * m + (q @ w.T / len(y) * x).sum(0) + DECAY * u
        u = u - LR * m
    return u, before


@pytest.mark.parametrize(
    'options',
    [
        {},
        {'mu_norm': 'selected', 'alpha': 0.5},
        {'mu_weight': 'sample', 'mu_ema': 0.3},
        {'features': 'online', 'scale': 1.5},
    ],
)
def test_three_rounds(data, options):
    """Collected from the first round on, used from the second. Who holds nothing is none of those selected."""
    if options.get('mu_norm') == 'selected':
        data = data._replace(size=data.size.at[5].set(0), counts=data.counts.at[5].set(0))
    options = {'alpha': 0.4, **options}
    algorithm = fedetf_gmv.algorithm(toys.scaling, opt, warm=1, collect=0, plan=PLAN, **options)
    round = jax.jit(simulate.make_round(algorithm, chunk=2))
    state = simulate.init(algorithm, toys.KEY, data)
    v = state.server.variables
    u, w = np.asarray(v.params['body']['u'], np.float64), np.asarray(v.fixed['head']['v'], np.float64)
    w = w * options.get('scale', 1.0)
    mu, seen = np.zeros((w.shape[1], len(u))), np.zeros(w.shape[1], bool)
    for t, ids in enumerate(COHORTS):
        state, _ = round(jax.random.fold_in(toys.KEY, t), state, data, jnp.asarray(ids))
        ids = [k for k in ids if data.size[k]]
        shift = options['alpha'] * (mu @ w if t >= 1 else 0 * mu @ w)
        ends, votes, total = [], np.zeros(len(mu)), np.zeros_like(mu)
        for k in ids:
            x, y = toys.examples(data, k)
            end, last = train(u, w, x, y, shift)
            f = x * (last if options.get('features') == 'online' else end)
            ends.append(end)
            for c in np.unique(y):
                n = (y == c).sum() if options.get('mu_weight') == 'sample' else 1
                votes[c] += n
                total[c] += n * f[y == c].mean(0)
        u, held = np.mean(ends, axis=0), votes > 0
        new = total[held] / (len(ids) if options.get('mu_norm') == 'selected' else votes[held, None])
        keep = np.where(seen, options.get('mu_ema', 0.0), 0.0)[held, None]
        mu[held] = keep * mu[held] + (1 - keep) * new
        seen |= held
        got = state.server.variables
        np.testing.assert_allclose(got.params['body']['u'], u, atol=1e-5)
        np.testing.assert_allclose(got.fixed['memory'].mu, mu, atol=1e-5)
        np.testing.assert_array_equal(got.fixed['memory'].seen, seen)
        if t == 1:
            assert (~held).sum() > 0  # the carry-over was tried
    np.testing.assert_array_equal(got.fixed['head']['v'], v.fixed['head']['v'])


def test_means_are_collected_from_twenty_rounds_before_their_use(data):
    algorithm = fedetf_gmv.algorithm(toys.scaling, opt, warm=22, plan=PLAN)
    server = algorithm.init(toys.KEY, data)
    work = jax.jit(lambda t: algorithm.client(toys.KEY, server._replace(round=t), (), data.shard(0))[1])
    assert [float(work(jnp.int32(t)).means.weight.sum()) > 0 for t in (1, 2, 3)] == [False, True, True]


task = objective(
    toys.tiny, heads.etf(scale=1.2, learn_scale=False, project=False, unit_features=False), losses.cross_entropy
)


def remembered(data, task, alpha=0.7):
    v = memory.remembering(task).init(toys.KEY, data)
    mu = jax.random.normal(jax.random.key(1), v.fixed['memory'].mu.shape)
    return v._replace(fixed={**v.fixed, 'memory': v.fixed['memory']._replace(mu=mu, alpha=jnp.float32(alpha))})


def test_memory_of_a_frozen_head_is_an_offset_of_the_logits(data):
    v = remembered(data, task)
    inner, mu = v._replace(fixed=v.fixed['head']), v.fixed['memory'].mu
    offset = 0.7 * mu @ (1.2 * v.fixed['head']['v'])
    batch = Batch(data.x[:40], data.y[:40], None, data.counts[0])

    def with_offset(body):
        z, _ = task.features(inner._replace(params={**inner.params, 'body': body}), batch)
        return jnp.mean(losses.cross_entropy(task.logits(inner, z) + offset[batch.y], batch.y))

    def with_memory(body):
        u = v._replace(params={**v.params, 'body': body})
        wrapped = memory.remembering(task)
        return wrapped.loss(u, wrapped.features(u, batch)[0], batch)

    a, b = (jax.value_and_grad(f)(v.params['body']) for f in (with_memory, with_offset))
    toys.same(a, b, atol=1e-6)


def test_memory_teaches_a_head_that_learns(data):
    linear = objective(toys.tiny, heads.linear(bias=False), losses.cross_entropy)
    v = remembered(data, linear)
    batch = Batch(data.x[:40], data.y[:40], None, data.counts[0])
    z, _ = linear.features(v._replace(fixed=v.fixed['head']), batch)
    shifted = np.asarray(z + 0.7 * v.fixed['memory'].mu[batch.y], np.float64)
    logits = shifted @ np.asarray(v.params['head']['w'], np.float64)
    q = np.exp(logits - logits.max(1, keepdims=True))
    q = q / q.sum(1, keepdims=True) - np.eye(toys.CLASSES)[np.asarray(batch.y)]

    def loss(head):
        return memory.remembering(linear).loss(v._replace(params={**v.params, 'head': head}), z, batch)

    np.testing.assert_allclose(jax.grad(loss)(v.params['head'])['w'], shifted.T @ q / 40, atol=1e-5)


def run(algorithm, data, rounds=4):
    step, state = jax.jit(simulate.make_round(algorithm, cohort=5, chunk=2)), simulate.init(algorithm, toys.KEY, data)
    for t in range(rounds):
        state, _ = step(jax.random.fold_in(toys.KEY, t), state, data)
    return state.server.variables


def test_without_weight_it_is_fedavg_with_an_etf(data):
    bare = objective(toys.tiny, heads.etf(learn_scale=False, project=False, unit_features=False), losses.cross_entropy)
    want = run(fedavg.algorithm(bare, toys.opt, plan=toys.PLAN, **fedavg.UNWEIGHTED), data)
    for features in ('final', 'online'):
        got = run(fedetf_gmv.algorithm(toys.tiny, toys.opt, warm=0, alpha=0.0, plan=toys.PLAN, features=features), data)
        toys.same(got.params, want.params, atol=1e-7)
        assert bool(got.fixed['memory'].seen.any())


def test_nothing_is_collected_before_its_round_nor_used_before_warm(data):
    settings = {'plan': toys.PLAN, 'alpha': 0.5}
    early = run(fedetf_gmv.algorithm(toys.tiny, toys.opt, warm=9, collect=4, **settings), data)
    assert not np.asarray(early.fixed['memory'].mu).any()
    assert not np.asarray(early.fixed['memory'].seen).any()
    collected = run(fedetf_gmv.algorithm(toys.tiny, toys.opt, warm=9, collect=3, **settings), data)
    assert np.asarray(collected.fixed['memory'].mu).any()
    assert float(collected.fixed['memory'].alpha) == 0.0
    toys.same(early.params, collected.params)
    used = run(fedetf_gmv.algorithm(toys.tiny, toys.opt, warm=3, **settings), data)
    assert float(used.fixed['memory'].alpha) == 0.5
    assert np.abs(np.asarray(used.params['body']['w'] - early.params['body']['w'])).max() > 1e-5


def test_it_composes_with_other_algorithms_and_statistics(data):
    prox = fedetf_gmv.algorithm(toys.noisy, toys.opt, warm=1, base=fedprox.algorithm, mu=0.1, plan=toys.PLAN)
    v = run(prox, data, rounds=2)
    assert float(v.stats['batches']) > 0
    online = fedetf_gmv.algorithm(toys.noisy, toys.opt, warm=1, features='online', plan=toys.PLAN)
    v = run(online, data, rounds=2)
    assert float(v.stats['model']['batches']) > 0
    assert float(v.stats['visited']) == 0.0
    heavy = fedetf_gmv.algorithm(toys.tiny, toys.opt, warm=1, aggregate=aggregators.mean, plan=toys.PLAN)
    light = fedetf_gmv.algorithm(toys.tiny, toys.opt, warm=1, plan=toys.PLAN)
    weighted, equal = (run(a, data, rounds=2).params['body']['w'] for a in (heavy, light))
    assert np.abs(np.asarray(weighted - equal)).max() > 1e-4


def test_strength_of_the_memory():
    mu = jnp.array([[3.0, 4.0], [0.0, 2.0], [9.0, 9.0]])
    m = memory.Memory(mu, jnp.array([True, True, False]), jnp.float32(1))
    got = memory.strength(m, jnp.array([[1.0, 0.0, 5.0], [0.0, -1.0, 5.0]]))
    np.testing.assert_allclose(got, (3.5, 0.5))


@pytest.mark.parametrize(
    ('options', 'match'),
    [
        ({'mu_norm': 'all'}, 'present'),
        ({'mu_weight': 'class'}, 'sample'),
        ({'features': 'first'}, 'online'),
        ({'mu_norm': 'selected', 'mu_weight': 'sample'}, 'divides by clients'),
    ],
)
def test_unknown_options_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        fedetf_gmv.algorithm(toys.tiny, toys.opt, warm=1, **options)


@pytest.mark.parametrize('warm', [jnp.float32(jnp.nan), jnp.float32(2.5), jnp.int32(-3), jnp.array([1, 2])])
def test_rounds_of_jax_are_looked_at_too(warm):
    with pytest.raises(ValueError, match='warm must be'):
        fedetf_gmv.algorithm(toys.tiny, toys.opt, warm=warm)


def test_statistics_that_stay_with_clients_begin_anew_each_round(data):
    """Features of the last epoch of this round alone are sent, although FedBN's clients keep what they had added up."""
    algorithm = fedetf_gmv.algorithm(
        toys.normed, toys.opt, warm=1, collect=0, mu_weight='sample', features='online',
        plan=local.Plan(16, 2), base=fedbn.algorithm,
    )  # fmt: skip
    state = simulate.init(algorithm, toys.KEY, data)
    server, client, shard = state.server, jax.tree.map(lambda u: u[2], state.clients), data.shard(2)
    for t in range(3):
        client, message, _ = algorithm.client(jax.random.fold_in(toys.KEY, t), server, client, shard)
        np.testing.assert_array_equal(message.means.weight, shard.counts)


def test_too_few_features_for_an_etf_are_refused(data):
    with pytest.raises(ValueError, match='at least'):
        simulate.init(
            fedetf_gmv.algorithm(toys.scaling, toys.opt, warm=1),
            toys.KEY,
            data._replace(counts=jnp.ones((8, 99), jnp.int32)),
        )
