"""FedProto against NumPy: `CE + lambda mean_i |h_i - P_{y_i}|^2 / D`, so that

    d h = q W^T + 2 lambda (h - P_y) / (n D)

in the notation of `softmax_by_hand`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import softmax_by_hand as hand
import toys

from fedjax_nc import evaluate, simulate
from fedjax_nc.aggregators import ClassRows
from fedjax_nc.algorithms import fedproto, latest, solo
from fedjax_nc.base import Aggregate

LAM = 3.0


def work(p, rows, valid, x, y, rate):
    def gradient(p):
        away = np.where(valid[y, None], x * p['u'] - rows[y], 0.0)
        return hand.gradients(p, x, y, on_features=2 * LAM * away / away.size)

    return hand.descend(p, 'uwb', gradient, rate)


@pytest.fixture(scope='module', params=['holders', 'counts'])
def case(request, data):
    algorithm = fedproto.algorithm(hand.task, hand.opt, lam=LAM, weigh=request.param, plan=hand.PLAN)
    cohorts = ([1, 5, 3], [7, 1, 2, 3])
    return algorithm, request.param, cohorts, hand.two_rounds(algorithm, data, cohorts)


def test_two_rounds(data, case):
    """In the first nothing is valid; in the second clients are pulled to the classes that were met in it."""
    _, weigh, cohorts, states = case
    own = [hand.numbers(states[0].server.variables)] * 8
    rows, valid = np.zeros((toys.CLASSES, toys.DIM)), np.zeros(toys.CLASSES, bool)
    for t, ids in enumerate(cohorts):
        sums, total = np.zeros_like(rows), np.zeros(toys.CLASSES)
        for k in ids:
            x, y = toys.examples(data, k)
            own[k] = work(own[k], rows, valid, x, y, hand.LR * hand.FALL**t)
            for c in np.unique(y):
                weight = (y == c).sum() if weigh == 'counts' else 1
                sums[c] += weight * (x * own[k]['u'])[y == c].mean(0)
                total[c] += weight
        rows = np.where(total[:, None] > 0, sums / np.maximum(total, 1)[:, None], rows)
        valid = valid | (total > 0)
        got = states[t + 1].server.extra
        np.testing.assert_allclose(got.rows, rows, atol=1e-5)
        np.testing.assert_array_equal(got.valid, valid)
        assert t or 0 < valid.sum() < toys.CLASSES
    for k in range(8):
        hand.close(hand.numbers(hand.row(states[2].clients, k)), own[k])


def test_the_server_never_holds_a_model(case):
    toys.same(case[-1][0].server.variables, case[-1][2].server.variables)


def test_predicts_the_nearest_valid_prototype_after_aggregation(data, case):
    algorithm, _, _, (start, first, _) = case
    (rows, valid), mine = first.server.extra, hand.row(first.clients, 3)
    z = np.asarray(data.x[:200]) * np.asarray(mine.params['body']['u'])
    gap = np.linalg.norm(z[:, None] - np.asarray(rows), axis=-1)
    want = np.where(np.asarray(valid), gap, np.inf).argmin(1)
    assert (want != gap.argmin(1)).any()  # zero, where an invalid prototype stands, is sometimes nearer
    np.testing.assert_array_equal(algorithm.predict(first.server, mine, data.x[:200]).argmax(1), want)
    assert np.isfinite(algorithm.predict(start.server, mine, data.x[:2])).all()  # before any is valid


def test_the_heads_of_clients_can_be_asked_too(data, case):
    algorithm, _, _, (*_, state) = case
    by_head = algorithm._replace(predict=fedproto.head_predict(hand.task))
    mine = hand.numbers(hand.row(state.clients, 7))
    logits = np.asarray(data.x[:9]) * mine['u'] @ mine['w'] + mine['b']
    np.testing.assert_allclose(by_head.predict(state.server, hand.row(state.clients, 7), data.x[:9]), logits, atol=1e-4)
    near, head = (evaluate.over_clients(evaluate.per_client(a, state, data)).mean for a in (algorithm, by_head))
    assert float(near) != float(head)
    for one in (algorithm, by_head):
        with pytest.raises(ValueError, match='no generic model'):
            one.predict(state.server, None, data.x[:2])


def test_without_regulariser_clients_train_alone(data):
    """The same batches and the same steps, even with prototypes to be pulled to."""
    one = fedproto.algorithm(toys.task, toys.opt, lam=0.0, plan=toys.PLAN)
    other = solo.algorithm(toys.task, toys.opt, plan=toys.PLAN)
    server = one.init(toys.KEY, data)
    far = fedproto.Prototypes(server.extra.rows + 5.0, ~server.extra.valid)

    @jax.jit
    def both(shard):
        return [
            a.client(toys.KEY, server._replace(round=jnp.int32(1), extra=far), server.variables, shard)[0]
            for a in (one, other)
        ]

    toys.same(*both(data.shard(3)), atol=1e-6)


@pytest.mark.parametrize(('weigh', 'share'), [('holders', 0.5), ('counts', 0.9)])
def test_owners_of_a_class_are_averaged_and_others_change_nothing(data, weigh, share):
    algorithm = fedproto.algorithm(hand.task, hand.opt, weigh=weigh, plan=hand.PLAN)
    server = algorithm.init(toys.KEY, data)
    old = fedproto.Prototypes(server.extra.rows + 7.0, jnp.array([False, False, True, False, False]))
    means = np.random.default_rng(0).normal(size=(2, toys.CLASSES, toys.DIM)).astype(np.float32)
    counts = np.zeros((2, toys.CLASSES), np.float32)
    counts[:, 0] = (90, 10)  # both hold class 0, the second alone class 1
    counts[1, 1] = 4
    weight = counts if weigh == 'counts' else np.sign(counts)
    total = algorithm.aggregate.partial(
        ClassRows(jnp.asarray(means), jnp.asarray(weight)), jnp.array([90.0, 14.0]), jnp.arange(2), 2
    )
    value = Aggregate(algorithm.aggregate.finish(total), jnp.float32(104), jnp.float32(2))
    rows, valid = algorithm.server(toys.KEY, server._replace(extra=old), value).extra
    np.testing.assert_allclose(rows[0], share * means[0, 0] + (1 - share) * means[1, 0], atol=1e-6)
    np.testing.assert_allclose(rows[1], means[1, 1], atol=1e-6)
    np.testing.assert_array_equal(rows[2:], old.rows[2:])
    np.testing.assert_array_equal(valid, [True, True, True, False, False])


def test_other_weights_are_refused():
    with pytest.raises(ValueError, match='holders'):
        fedproto.algorithm(toys.task, toys.opt, weigh='size')


def test_it_sends_no_model_to_be_kept(data):
    algorithm = latest.keep(fedproto.algorithm(toys.task, toys.opt, plan=toys.PLAN))
    state = simulate.init(algorithm, toys.KEY, data)
    with pytest.raises(ValueError, match='send no model'):
        jax.eval_shape(simulate.make_round(algorithm), toys.KEY, state, data)
    with pytest.raises(ValueError, match='lam'):
        fedproto.algorithm(toys.task, toys.opt, lam=-0.1)
