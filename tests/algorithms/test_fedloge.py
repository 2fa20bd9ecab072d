"""FedLoGe against NumPy: one round of training, and realignment.

The extractor is `h = x * u`; a batch holds a client's whole data, so that each epoch is one step. The gradients are
written by hand, with `q(logits) = (softmax - onehot) / n`:

    d u = sum_i x_i * (q(h W) W^T)_i;  d psi = h^T q(h psi + b), d b = sum q;  d phi likewise,

so that neither psi nor phi reaches u.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from fedjax_nc import frames, heads, local, losses, simulate, training
from fedjax_nc.algorithms import fedavg, fedloge, fedprox, latest
from fedjax_nc.objective import objective

LR, MOMENTUM, EPOCHS = 0.05, 0.5, 3
PLAN = local.Plan(1000, EPOCHS)
opt = local.sgd(LR, MOMENTUM, weight_decay=0.0)
FALL = 0.8  # a round, in the stage, which has the rate of the round after training
FADING = local.sgd(LR, MOMENTUM, weight_decay=0.0, decay=FALL)
frame = functools.partial(frames.sparse_etf, solver='gram', steps=20)
SEEN, UNSEEN = [0, 1, 3, 5, 7], [2, 4, 6]


def error(logits, y):
    q = np.exp(logits - logits.max(1, keepdims=True))
    q /= q.sum(1, keepdims=True)
    q[np.arange(len(y)), y] -= 1
    return q / len(y)


def head_gradient(head, h, y):
    q = error(h @ head['w'] + head.get('b', 0.0), y)
    return {'w': h.T @ q, **({'b': q.sum(0)} if 'b' in head else {})}


def descend(gradient, p, epochs=EPOCHS, lr=LR):
    """Heavy-ball gradient descent on a tree."""
    m = jax.tree.map(np.zeros_like, p)
    for _ in range(epochs):
        m = jax.tree.map(lambda m, g: MOMENTUM * m + g, m, gradient(p))
        p = jax.tree.map(lambda p, m: p - lr * m, p, m)
    return p


def local_work(p, w, x, y, b=0.0):
    def gradient(p):
        h = x * p['u']
        return {'u': (x * (error(h @ w + b, y) @ w.T)).sum(0), 'psi': head_gradient(p['psi'], h, y),
                'phi': head_gradient(p['phi'], h, y)}  # fmt: skip

    return descend(gradient, p)


def wide(tree):
    return jax.tree.map(lambda u: np.asarray(u, np.float64), tree)


def of(tree, k):
    return jax.tree.map(lambda u: u[k], tree)


@functools.cache
def training_round(bias=False, frozen_bias=False):
    algorithm = fedloge.algorithm(toys.scaling, opt, frame=frame, aux_bias=bias, frozen_bias=frozen_bias, plan=PLAN)
    return algorithm, jax.jit(simulate.make_round(algorithm, chunk=2))


@functools.cache
def stage_round(**kwargs):
    stage = fedloge.realign(toys.scaling, FADING, plan=PLAN, **kwargs)
    return stage, simulate.compiled(simulate.make_round(stage, chunk=4))


@pytest.fixture(scope='module')
def start(data):
    return simulate.init(training_round()[0], toys.KEY, data)


@pytest.fixture(scope='module')
def trained(start, data):
    """Two rounds with the same five clients."""
    state = start
    for key in jax.random.split(toys.KEY):
        state, _ = training_round()[1](key, state, data, jnp.asarray(SEEN))
    return state


@pytest.mark.parametrize(('bias', 'frozen_bias'), [(False, False), (True, False), (True, True)])
def test_one_round(data, bias, frozen_bias):
    algorithm, run = training_round(bias, frozen_bias)
    before = simulate.init(algorithm, toys.KEY, data)
    after, _ = run(toys.KEY, before, data, jnp.asarray(SEEN))
    v = before.server.variables
    ends, shift = [], np.asarray(v.fixed.get('b', 0.0), np.float64)
    assert ('b' in v.fixed) == frozen_bias
    for k in SEEN:
        p = {'u': v.params['body']['u'], 'psi': v.params['aux'], 'phi': of(before.clients.head, k)}
        assert ('b' in p['psi'], 'b' in p['phi']) == (bias, bias)
        ends.append(local_work(wide(p), np.asarray(v.fixed['v'], np.float64), *toys.examples(data, k), shift))
        toys.same(of(after.clients.head, k), ends[-1]['phi'], atol=5e-6)
    weights = np.asarray(data.size, np.float64)[SEEN]
    want = jax.tree.map(lambda *u: np.average(np.stack(u), axis=0, weights=weights), *ends)
    got = after.server.variables
    toys.same(got.params, {'body': {'u': want['u']}, 'head': {}, 'aux': want['psi']}, atol=5e-6)
    assert np.abs(want['psi']['w'] - np.asarray(v.params['aux']['w'])).max() > 0.01
    toys.same(got.fixed, v.fixed)
    assert after.clients.seen.tolist() == [k in SEEN for k in range(8)]
    toys.same(of(after.clients.head, np.array(UNSEEN)), of(before.clients.head, np.array(UNSEEN)))  # bit for bit


def test_a_frozen_bias_is_drawn_once_and_predicts(data):
    algorithm, _ = training_round(True, True)
    servers = [algorithm.init(jax.random.key(k), data) for k in range(40)]
    drawn = np.stack([server.variables.fixed['b'] for server in servers])
    bound = toys.DIM**-0.5
    assert 0.9 * bound < np.abs(drawn).max() <= bound
    np.testing.assert_allclose(drawn.std(), bound / np.sqrt(3), rtol=0.1)
    plain = training_round(True)[0].init(jax.random.key(3), data).variables
    v = servers[3].variables
    toys.same((v.params, v.fixed['v']), (plain.params, plain.fixed['v']))  # nothing else is drawn otherwise
    h = np.asarray(data.x) * np.asarray(v.params['body']['u'])
    want = h @ np.asarray(v.fixed['v']) + drawn[3]
    np.testing.assert_allclose(algorithm.predict(servers[3], None, data.x), want, atol=1e-4)


def test_heads_start_apart_in_the_published_range(start):
    assert start.clients._fields == ('own', 'head', 'seen')
    assert not start.clients.seen.any()
    heads = [start.server.variables.params['aux']['w'], *start.clients.head['w']]
    bound = toys.DIM**-0.5
    for i, w in enumerate(heads):
        assert 0.8 * bound < float(jnp.abs(w).max()) <= bound
        assert all(float(jnp.abs(w - other).max()) > 0.1 for other in heads[:i])


def test_the_backbone_is_that_of_fedavg_with_the_frozen_frame(data):
    """The auxiliary heads see the features and never shape them, nor the batches and the noise."""
    head = heads.etf(project=False, unit_features=False, learn_scale=False, frame=frame)
    plain = fedavg.algorithm(objective(toys.noisy, head, losses.cross_entropy), toys.opt, plan=toys.PLAN)
    method = fedloge.algorithm(toys.noisy, toys.opt, frame=frame, plan=toys.PLAN)
    ends = []
    for algorithm in (plain, method):
        server = algorithm.init(toys.KEY, data)
        client = algorithm.init_client(toys.KEY, server)
        _, message, _ = jax.jit(algorithm.client)(toys.KEY, server, client, data.shard(7))
        ends.append((message.delta['body'], message.stats, server.variables.stats, server.variables.fixed))
    toys.same(*ends)
    assert float(jnp.abs(ends[0][0]['w']).max()) > 0.05


def test_lengths_of_class_vectors_tell_which_classes_a_client_knows(data):
    """The lengths of absent classes stay near where they began; those of frequent ones grow."""
    algorithm = fedloge.algorithm(toys.tiny, local.sgd(0.1, 0.5, 0.0), frame=frame, plan=local.Plan(8, 15))
    server = algorithm.init(toys.KEY, data)
    before, work = algorithm.init_client(toys.KEY, server), jax.jit(algorithm.client)
    for k in (2, 7):
        after, _, _ = work(toys.KEY, server, before, data.shard(k))
        growth, counts = np.divide(*(np.linalg.norm(c.head['w'], axis=0) for c in (after, before))), data.counts[k]
        assert (counts == 0).sum() >= 2
        assert growth[counts == 0].min() > 0.8
        assert growth[counts == 0].max() < 1.6
        assert growth[counts > 20].min() > 1.8


def test_private_heads_predict_for_their_clients(trained, data):
    algorithm, _ = training_round()
    h = np.asarray(data.x) * np.asarray(trained.server.variables.params['body']['u'])
    for k in (0, 6):
        client = of(trained.clients, k)
        np.testing.assert_allclose(algorithm.predict(trained.server, client, data.x), h @ client.head['w'], atol=1e-4)
    frozen = np.asarray(trained.server.variables.fixed['v'])
    np.testing.assert_allclose(algorithm.predict(trained.server, None, data.x), h @ frozen, atol=1e-4)


def test_another_base_and_momentum_that_is_kept(data):
    algorithm = fedloge.algorithm(toys.scaling, opt, frame=frame, plan=PLAN, base=fedprox.algorithm, mu=0.1,
                                  persist_momentum=True)  # fmt: skip
    server = algorithm.init(toys.KEY, data)
    client = algorithm.init_client(toys.KEY, server)
    after, message, _ = jax.jit(algorithm.client)(toys.KEY, server, client, data.shard(3))
    assert set(message.delta) == set(server.variables.params)
    assert all(float(jnp.abs(u).max()) > 0 for u in jax.tree.leaves(after.own))
    assert jax.tree.structure(after.own) == jax.tree.structure(client.own)


def test_realigned_heads():
    psi = {'w': jnp.array([[3.0, 0.0], [4.0, 2.0]]), 'b': jnp.array([1.0, -1.0])}
    phi = {'w': jnp.array([[0.0, 6.0], [2.0, 8.0]]), 'b': jnp.array([5.0, 5.0])}
    unit = np.array([[0.6, 0.0], [0.8, 1.0]])
    toys.same(fedloge.global_realign(psi), {'w': unit}, atol=1e-6)
    toys.same(fedloge.global_realign(psi, scale=1.7, keep_bias=True), {'w': 1.7 * unit, 'b': psi['b']}, atol=1e-6)
    toys.same(fedloge.local_realign(psi, phi), {'w': psi['w'] * np.array([2.0, 10.0]), 'b': psi['b']}, atol=1e-6)


def realigned(trained, data, **kwargs):
    stage, run = stage_round(**kwargs)
    after, report = run(toys.KEY, fedloge.stage_state(trained), data)
    toys.same(after.server, trained.server)  # which also was not donated
    assert after.clients.seen.tolist() == [k in SEEN for k in range(8)]
    np.testing.assert_array_equal(after.clients.allowed, data.counts > 0)
    visited = dict(zip(report.ids.tolist(), report.info.examples.tolist(), strict=True))
    return stage, after, [visited[k] for k in range(8)]


def features(trained, data, k):
    x, y = toys.examples(data, k)
    return x * np.asarray(trained.server.variables.params['body']['u'], np.float64), y


def scaled(trained, head):
    psi = trained.server.variables.params['aux']['w']
    return np.asarray(psi, np.float64) * np.sqrt((np.asarray(head['w'], np.float64) ** 2).sum(0))


def test_realignment_of_the_paper(trained, data):
    stage, after, visited = realigned(trained, data)
    for k in range(8):
        head = wide(of(trained.clients.head, k))
        if k in UNSEEN:  # learns its own head first, on frozen features
            h, y = features(trained, data, k)
            head = descend(lambda p, h=h, y=y: head_gradient(p, h, y), head, lr=LR * FALL**2)
            toys.same(of(after.clients.head, k), head, atol=5e-6)
        else:
            toys.same(of(after.clients.head, k), of(trained.clients.head, k))
        np.testing.assert_allclose(after.clients.realigned['w'][k], scaled(trained, head), atol=5e-6)
        assert visited[k] == (EPOCHS * int(data.size[k]) if k in UNSEEN else 0)
    h = np.asarray(data.x) * np.asarray(trained.server.variables.params['body']['u'])
    psi = np.asarray(trained.server.variables.params['aux']['w'])
    generic = stage.predict(after.server, None, data.x)
    np.testing.assert_allclose(generic, h @ (psi / np.linalg.norm(psi, axis=0)), atol=1e-4)
    mine = stage.predict(after.server, of(after.clients, 3), data.x)
    np.testing.assert_allclose(mine, h @ np.asarray(after.clients.realigned['w'][3]), atol=1e-4)


RELEASED = {'mode': 'released', 'unseen': 'generic', 'finetune_epochs': 4, 'scale': 1.7, 'keep_bias': True}


def test_fine_tuning_moves_the_realigned_head_and_nothing_else(trained, data):
    """Those who were never met begin with psi itself, and have no head of their own."""
    _, after, visited = realigned(trained, data, **RELEASED)
    toys.same(of(after.clients.head, np.array(SEEN)), of(trained.clients.head, np.array(SEEN)))
    assert not np.any(after.clients.head['w'][np.array(UNSEEN)])
    psi = np.asarray(trained.server.variables.params['aux']['w'], np.float64)
    for k in range(8):
        first = {'w': scaled(trained, of(trained.clients.head, k)) if k in SEEN else psi}
        h, y = features(trained, data, k)
        want = descend(lambda p, h=h, y=y: head_gradient(p, h, y), first, epochs=4, lr=LR * FALL**2)
        toys.same(of(after.clients.realigned, k), want, atol=1e-5)
        assert np.abs(want['w'] - first['w']).max() > 1e-3
        assert visited[k] == 4 * int(data.size[k])


@pytest.mark.slow
def test_work_of_both_phases_counts(trained, data):
    _, _, visited = realigned(trained, data, finetune_epochs=4)
    assert visited == [(4 + EPOCHS * (k in UNSEEN)) * int(data.size[k]) for k in range(8)]


def test_predictions_of_the_released_code(trained, data):
    stage, after, _ = realigned(trained, data, **RELEASED)
    psi = np.asarray(trained.server.variables.params['aux']['w'])
    h = np.asarray(data.x) * np.asarray(trained.server.variables.params['body']['u'])
    generic = stage.predict(after.server, None, data.x)
    np.testing.assert_allclose(generic, 1.7 * h @ (psi / np.linalg.norm(psi, axis=0)), atol=1e-4)
    for k in (1, 5, 6):
        held = np.asarray(data.counts[k]) > 0
        assert not held.all()
        head = np.asarray(after.clients.realigned['w'][k]) + np.asarray(trained.clients.head['w'][k]) * (k in SEEN)
        got = np.asarray(stage.predict(after.server, of(after.clients, k), data.x))
        np.testing.assert_allclose(got[:, held], (h @ head)[:, held], atol=1e-4)
        assert got[:, ~held].max() < got[:, held].min() - 1e6


def test_a_client_without_data_keeps_its_head_and_predicts_as_the_generic_model(start, trained, data):
    emptied = data._replace(size=data.size.at[6].set(0), counts=data.counts.at[6].set(0))
    state, _ = training_round()[1](toys.KEY, start, emptied, jnp.array([0, 1, 6, 5, 7]))
    assert state.clients.seen.tolist() == [k in (0, 1, 5, 7) for k in range(8)]
    toys.same(of(state.clients.head, 6), of(start.clients.head, 6))
    stage, after, _ = realigned(trained, emptied)
    psi = np.asarray(after.server.variables.params['aux']['w'])
    h = np.asarray(data.x) * np.asarray(after.server.variables.params['body']['u'])
    np.testing.assert_array_equal(after.clients.realigned['w'][6], psi)
    for predicts in (stage, fedloge.realign(toys.scaling, opt, mode='released')):
        np.testing.assert_allclose(predicts.predict(after.server, of(after.clients, 6), data.x), h @ psi, atol=1e-4)


def test_checkpoints_keep_the_private_heads(start, data, tmp_path):
    def run(resume):
        state = jax.tree.map(jnp.array, start)
        return training.run(training_round()[0], toys.KEY, state, data, rounds=1, cohort=4, out=tmp_path,
                            resume=resume, progress=False).state  # fmt: skip

    first, restored = run(resume=False), run(resume=True)
    toys.same(restored, first)
    assert restored.clients.seen.sum() == 4
    toys.same(fedloge.stage_state(restored).clients.head, first.clients.head)


def test_the_stage_cannot_begin_without_the_private_heads(trained, data):
    stage, _ = stage_round()
    with pytest.raises(ValueError, match='stage_state'):
        simulate.join(stage, toys.KEY, trained.server, 8)
    with pytest.raises(ValueError, match='stage_state'):
        simulate.init(stage, toys.KEY, data)
    with pytest.raises(ValueError, match='Personal'):
        simulate.make_round(stage)(toys.KEY, trained, data)
    with pytest.raises(ValueError, match='a state of fedloge'):
        fedloge.stage_state(simulate.init(fedavg.algorithm(toys.task, opt), toys.KEY, data))


@pytest.mark.parametrize('wrong', [{'mode': 'code'}, {'unseen': 'skip'}, {'finetune_epochs': -1}])
def test_unknown_options_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        fedloge.realign(toys.scaling, opt, **wrong)


def test_latest_models_have_their_private_heads(data):
    algorithm = fedloge.algorithm(toys.tiny, toys.opt, plan=toys.PLAN, frame=frames.simplex_etf)
    kept = latest.keep(algorithm)
    state = simulate.init(kept, toys.KEY, data)
    mine = jax.tree.map(lambda u: u[3], state.clients)
    want = algorithm.predict(state.server, mine.own, data.x[:5])
    np.testing.assert_array_equal(kept.predict(state.server, mine, data.x[:5]), want)
    assert np.abs(want - kept.predict(state.server, None, data.x[:5])).max() > 0.01


def test_parts_are_refused():
    with pytest.raises(ValueError, match='parts'):
        fedloge.algorithm(toys.tiny, toys.opt, parts=('body',))
