"""Ratio Loss against NumPy, for features `z = x * u`, a linear head and one batch a client."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import softmax_by_hand as by_hand
import toys

from fedjax_nc import heads, simulate
from fedjax_nc.algorithms import fedavg, fedbabu, ratioloss
from fedjax_nc.data import federate

BETA, CAP = 0.1, 25.0
opt, PLAN = by_hand.opt, by_hand.PLAN


@pytest.fixture(scope='module')
def auxiliary(data):
    y = np.asarray(data.y)
    return federate(data.x, y, [np.flatnonzero(y == c)[: 4 + c] for c in range(toys.CLASSES)])


@pytest.fixture(scope='module')
def algorithm(auxiliary):
    return ratioloss.algorithm(toys.scaling, opt, auxiliary=auxiliary, beta=BETA, cap=CAP, plan=PLAN)


def local_work(start, weights, rate, x, y):
    def gradient(p):
        z = x * p['u']
        q = weights[y][:, None] * by_hand.errors(z @ p['w'] + p['b'], y)
        return {'u': (q @ p['w'].T * x).sum(0), 'w': z.T @ q, 'b': q.sum(0)}

    return by_hand.descend(start, start, gradient, rate)


def ratios(changes):
    """Entry by entry: who moves it most, whether alone, and how much the others do on average."""
    own, other = np.zeros((2, len(changes)))
    for entry in np.ndindex(*changes.shape[1:]):
        moves = np.array([u[entry] for u in changes])
        top = moves.argmax()
        rest = np.delete(moves, top)
        if (np.abs(rest) <= 0.8 * abs(moves[top])).all():
            own[top] += moves[top]
            other[top] += rest.mean()
    return np.array([abs(a) / abs(b) if b else 10.0 for a, b in zip(own, other, strict=True)])


def test_ratios_are_those_of_entries_that_one_class_moves_most():
    changes = np.random.default_rng(2).normal(size=(4, 6, 4)).astype(np.float32)
    changes[3] = -10.0  # the largest of no entry
    want = ratios(changes)
    np.testing.assert_allclose(ratioloss.ratios(jnp.asarray(changes)), want, rtol=1e-4)
    assert want[3] == 10.0


def test_two_rounds_of_partial_cohorts(data, auxiliary, algorithm):
    states = by_hand.two_rounds(algorithm, data)
    want, plain = by_hand.numbers(states[0].server.variables), np.ones(toys.CLASSES)
    weights = plain
    for t, ids in enumerate(by_hand.COHORTS):
        rate, state = by_hand.LR * by_hand.FALL**t, states[t + 1].server.variables
        copies = [local_work(want, plain, rate, *toys.examples(auxiliary, c))['w'] for c in range(toys.CLASSES)]
        found = ratios(np.stack(copies) - want['w'])  # of the model that was sent out
        ends = [local_work(want, weights, rate, *toys.examples(data, k)) for k in ids]
        want = by_hand.average(ends, np.asarray(data.size, np.float64)[ids])
        weights = 1 + BETA * np.minimum(found, CAP)
        np.testing.assert_allclose(state.fixed['weights'], weights, rtol=1e-3)
        assert min(found) < CAP < max(found), found
        by_hand.close(by_hand.numbers(state), want, atol=2e-5)


def test_with_equal_weights_a_client_is_that_of_fedavg(data, algorithm):
    plain = fedavg.algorithm(by_hand.task, opt, plan=PLAN)
    mine, server = (simulate.init(a, toys.KEY, data).server for a in (algorithm, plain))
    got, want = (jax.jit(a.client)(toys.KEY, s, (), data.shard(3))[1:] for a, s in ((algorithm, mine), (plain, server)))
    toys.same(got, want)


def test_wrong_data_and_frozen_heads_are_refused(data, auxiliary, algorithm):
    with pytest.raises(ValueError, match='one client for each class'):
        ratioloss.algorithm(toys.scaling, opt, auxiliary=data)
    with pytest.raises(ValueError, match='linear'):
        ratioloss.algorithm(toys.tiny, opt, auxiliary=auxiliary, head=heads.etf()).init(toys.KEY, data)
    wide = data._replace(counts=jnp.pad(data.counts, ((0, 0), (0, 1))))
    with pytest.raises(ValueError, match='6 classes'):
        algorithm.init(toys.KEY, wide)


def test_what_it_watches_must_be_trained(data, auxiliary):
    for wrong in ({'parts': ('body',)}, {'base': fedbabu.algorithm}):
        algorithm = ratioloss.algorithm(toys.scaling, opt, auxiliary=auxiliary, plan=PLAN, **wrong)
        state = simulate.init(algorithm, toys.KEY, data)
        with pytest.raises(ValueError, match='whole model in training'):
            jax.eval_shape(simulate.make_round(algorithm), toys.KEY, state, data)
    for wrong in ({'beta': -0.1}, {'cap': 0.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ratioloss.algorithm(toys.scaling, opt, auxiliary=auxiliary, **wrong)
