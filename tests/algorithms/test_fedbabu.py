"""FedBABU: a head that stands still, then a fine-tuned one."""

import jax
import numpy as np
import pytest
import softmax_by_hand as hand
import toys

from fedjax_nc import simulate
from fedjax_nc.algorithms import fedbabu, latest

algorithm = latest.keep(fedbabu.algorithm(hand.task, hand.opt, plan=hand.PLAN))
stage = fedbabu.personalize(hand.task, hand.opt, plan=hand.PLAN)


@pytest.fixture(scope='module')
def states(data):
    return hand.two_rounds(algorithm, data)


@pytest.fixture(scope='module')
def tune():
    return jax.jit(simulate.make_round(stage, chunk=1))


def test_the_body_learns_against_the_first_head(data, states):
    start = server = hand.numbers(states[0].server.variables)
    for t, ids in enumerate(hand.COHORTS):
        ends = []
        for k in ids:
            x, y = toys.examples(data, k)
            rate = hand.LR * hand.FALL**t
            ends.append(hand.descend(server, 'u', lambda p, x=x, y=y: hand.gradients(p, x, y), rate))
        server = hand.average(ends)
        state = states[t + 1]
        hand.close(hand.numbers(state.server.variables), server)
        for head in (state.server.variables.params['head'], hand.row(state.clients.variables.params['head'], 3)):
            toys.same(head, states[0].server.variables.params['head'])
    assert np.abs(server['u'] - start['u']).max() > 0.01


@pytest.mark.parametrize('begin', ['global', 'latest'])
def test_every_client_tunes_everything_at_the_rate_of_the_next_round(data, states, tune, begin):
    trained = states[2]
    joined = {
        'global': lambda: simulate.join(stage, toys.KEY, trained.server, 8),
        'latest': lambda: fedbabu.from_latest(trained),
    }[begin]()
    after, _ = tune(toys.KEY, joined, data)
    toys.same(after.server, trained.server)
    for k in range(8):
        x, y = toys.examples(data, k)
        source = trained.server.variables if begin == 'global' else hand.row(trained.clients.variables, k)
        want = hand.descend(
            hand.numbers(source), 'uwb', lambda p, x=x, y=y: hand.gradients(p, x, y), hand.LR * hand.FALL**2
        )
        hand.close(hand.numbers(hand.row(after.clients, k)), want)
        assert np.abs(want['w'] - hand.numbers(trained.server.variables)['w']).max() > 1e-3


def test_local_models_must_have_been_kept(data):
    with pytest.raises(ValueError, match=r'latest\.keep'):
        fedbabu.from_latest(simulate.init(fedbabu.algorithm(hand.task, hand.opt), toys.KEY, data))


def test_the_head_alone_may_be_tuned(data, states):
    stage = fedbabu.personalize(hand.task, hand.opt, plan=hand.PLAN, parts=('head',))
    trained = states[2].server
    mine, _, _ = jax.jit(stage.client)(toys.KEY, trained, stage.init_client(toys.KEY, trained), data.shard(3))
    toys.same(mine.params['body'], trained.variables.params['body'])
    assert np.abs(mine.params['head']['w'] - trained.variables.params['head']['w']).max() > 1e-3
