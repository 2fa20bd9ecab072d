"""FedPer and FedRep against NumPy, two rounds with other clients in each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import softmax_by_hand as hand
import toys

from fedjax_nc import aggregators, evaluate, heads, local, losses, simulate, tree
from fedjax_nc.algorithms import fedavg, fedper, fedrep, latest
from fedjax_nc.objective import objective

HEAD_EPOCHS = 4
WEIGHTED = {'aggregate': aggregators.mean}


def per(p, x, y, rate):
    return hand.descend(p, 'uwb', lambda p: hand.gradients(p, x, y), rate)


def rep(p, x, y, rate):
    p = hand.descend(p, 'wb', lambda p: hand.gradients(p, x, y), rate, epochs=HEAD_EPOCHS)
    return hand.descend(p, 'u', lambda p: hand.gradients(p, x, y), rate)


PER = fedper.algorithm(hand.task, hand.opt, plan=hand.PLAN)
REP = fedrep.algorithm(hand.task, hand.opt, plan=hand.PLAN, head_epochs=HEAD_EPOCHS)
WEIGHED = fedrep.algorithm(hand.task, hand.opt, plan=hand.PLAN, head_epochs=HEAD_EPOCHS, **WEIGHTED)


@pytest.fixture(scope='module', params=['fedper', 'fedrep', pytest.param('fedrep, weighted', marks=pytest.mark.slow)])
def case(request, data):
    algorithm, work = {'fedper': (PER, per), 'fedrep': (REP, rep), 'fedrep, weighted': (WEIGHED, rep)}[request.param]
    kept = latest.keep(algorithm)
    return kept, work, request.param == 'fedrep, weighted', hand.two_rounds(kept, data)


def test_two_rounds(data, case):
    _, work, weighted, states = case
    server = hand.numbers(states[0].server.variables)
    first = {name: server[name] for name in 'wb'}
    private = [first] * 8
    own = {}
    for t, ids in enumerate(hand.COHORTS):
        for k in ids:
            own[k] = work({'u': server['u'], **private[k]}, *toys.examples(data, k), hand.LR * hand.FALL**t)
            private[k] = {name: own[k][name] for name in 'wb'}
        sizes = np.asarray(data.size)[ids] if weighted else None
        server = {**first, 'u': hand.average([own[k] for k in ids], sizes)['u']}
        hand.close(hand.numbers(states[t + 1].server.variables), server)
    got = states[2].clients
    for k in range(8):
        hand.close(hand.row(got.own.head, k), private[k])
    for k in own:  # FedNH's personal models: the latest local body below the private head
        hand.close(hand.numbers(hand.row(got.variables, k)), {'u': own[k]['u']})
        mine = (data.x[:9] * own[k]['u']) @ own[k]['w'] + own[k]['b']
        np.testing.assert_allclose(case[0].predict(states[2].server, hand.row(got, k), data.x[:9]), mine, atol=5e-5)


def test_the_server_never_learns_a_head_and_the_absent_keep_theirs(case):
    states = case[-1]
    toys.same(states[0].server.variables.params['head'], states[2].server.variables.params['head'])
    for before, after, ids in zip(states, states[1:], hand.COHORTS, strict=False):
        moved = np.array(np.abs(before.clients.own.head['w'] - after.clients.own.head['w']).max(axis=(1, 2)))
        np.testing.assert_array_equal(moved > 0, np.isin(np.arange(8), ids))


def test_predictions(data, case):
    """Without local bodies a client's head sits on the server's body; the generic model has the first head."""
    kept, _, _, (start, _, state) = case
    body, x = state.server.variables.params['body'], data.x[:9]
    plain = fedper.private_heads(fedavg.algorithm(hand.task, hand.opt))
    got = plain.predict(state.server, hand.row(state.clients.own, 7), x)
    np.testing.assert_allclose(got, heads.dense(hand.row(state.clients.own.head, 7), x * body['u']), atol=1e-5)
    want = heads.dense(start.server.variables.params['head'], x * body['u'])
    np.testing.assert_allclose(kept.predict(state.server, None, x), want, atol=1e-5)
    took = state.clients.round >= 0
    own, shared = (evaluate.accuracy(evaluate.per_client(kept, state, data, personal=p))[took] for p in (True, False))
    assert own.mean() > shared.mean() + 0.2


def test_the_first_local_work_of_fedper_is_that_of_fedavg(data):
    """Until heads differ, only what is sent does."""
    one = fedper.algorithm(toys.task, toys.opt, plan=toys.PLAN)
    other = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN)
    server = simulate.init(one, toys.KEY, data).server

    @toys.optimised
    def work(shard):
        mine = one.client(toys.KEY, server, one.init_client(toys.KEY, server), shard)
        return mine, other.client(toys.KEY, server, (), shard)[1:]

    (mine, message, info), (whole, told) = work(data.shard(2))
    toys.same(mine.head, fedavg.trained_model(server, whole).params['head'], atol=1e-6)
    toys.same((message.delta['body'], message.stats, info), (whole.delta['body'], whole.stats, told))
    assert set(message.delta) == {'body'}


def test_each_phase_of_fedrep_leaves_the_other_part_bit_for_bit(data):
    """Neither momentum nor decay reach what is frozen, nor do batches of the first phase reach running statistics."""

    @jax.jit
    def work(body_rate, head_rate):
        opts = (local.sgd(rate, weight_decay=0.1) for rate in (body_rate, head_rate))
        algorithm = fedrep.algorithm(toys.noisy_task, next(opts), head_opt=next(opts), head_epochs=2, plan=toys.PLAN)
        server = algorithm.init(toys.KEY, data)
        first = algorithm.init_client(toys.KEY, server)
        mine, message, info = algorithm.client(toys.KEY, server, first, data.shard(3))
        moved = [sum(jnp.abs(u).sum() for u in jax.tree.leaves(t)) for t in (
            message.delta['body'], tree.sub(mine.head, first.head))]  # fmt: skip
        return moved, message.stats['batches'], info.steps

    for rates in ((0.0, 0.1), (0.1, 0.0)):
        moved, batches, steps = work(*rates)
        assert [float(m) > 0 for m in moved] == [rate > 0 for rate in rates]
        assert float(batches) == 2 * 3  # two epochs of three batches, of the second phase alone
        assert int(steps) == 2 * 2 * 3


def test_a_projection_can_be_private_and_a_frozen_head_cannot(data):
    def first_heads(method, head):
        algorithm = method.algorithm(objective(toys.tiny, head, losses.cross_entropy), toys.opt)
        return jax.eval_shape(lambda: simulate.init(algorithm, toys.KEY, data).clients.head)

    for method in (fedper, fedrep):
        assert set(first_heads(method, heads.etf())) == {'proj', 'scale'}
        with pytest.raises(ValueError, match='no parameters to be private'):
            first_heads(method, heads.etf(project=False, learn_scale=False))
