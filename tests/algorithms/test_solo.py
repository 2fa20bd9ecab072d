"""Local training against NumPy."""

import jax
import numpy as np
import pytest
import softmax_by_hand as hand
import toys

from fedjax_nc import evaluate, simulate
from fedjax_nc.algorithms import solo

algorithm = solo.algorithm(hand.task, hand.opt, plan=hand.PLAN)


@pytest.fixture(scope='module')
def states(data):
    return hand.two_rounds(algorithm, data, cohorts=(range(8), range(8)))


def test_every_client_goes_on_from_its_own_model(data, states):
    first = hand.numbers(states[0].server.variables)
    got = hand.numbers(states[2].clients)
    for k in range(8):
        x, y = toys.examples(data, k)
        want = first
        for t in range(2):
            want = hand.descend(want, 'uwb', lambda p, x=x, y=y: hand.gradients(p, x, y), hand.LR * hand.FALL**t)
        hand.close(hand.row(got, k), want)


def test_all_begin_with_the_same_untrained_model(data):
    """The loss of the very first step is that of the untrained model on the client's own data."""
    once = solo.algorithm(hand.task, hand.opt, plan=hand.PLAN._replace(epochs=1))
    state = simulate.init(once, toys.KEY, data)
    first = hand.numbers(state.server.variables)
    _, report = jax.jit(simulate.make_round(once, chunk=1))(toys.KEY, state, data)
    want = [hand.loss(first, *toys.examples(data, int(k))) for k in report.ids]
    np.testing.assert_allclose(report.info.loss, want, rtol=1e-5)


def test_the_server_only_counts(states):
    toys.same(states[0].server.variables, states[2].server.variables)
    assert int(states[2].server.round) == 2


def test_there_is_no_generic_model(data, states):
    with pytest.raises(ValueError, match='no generic model'):
        algorithm.predict(states[2].server, None, data.x[:3])
    with pytest.raises(ValueError, match='no generic model'):
        evaluate.per_client(algorithm, states[2], data, personal=False)
    before, after = (evaluate.over_clients(evaluate.per_client(algorithm, s, data)).mean for s in states[::2])
    assert after > before + 0.2
