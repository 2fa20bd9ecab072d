"""FedNova against NumPy, written from the paper's equations, on the linear model of SCAFFOLD's tests."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from test_scaffold import (
    COHORTS,
    LR,
    PLAN,
    check_frozen_frame,
    check_renaming,
    close,
    copied,
    examples,
    flat,
    gradient,
    minimiser,
    moved_to,
    play,
    steps,
    task,
)

from fedjax_nc import aggregators, local, simulate
from fedjax_nc.algorithms import fedavg, fednova

DECAY = 0.1


@pytest.fixture(scope='module')
def copies(data):
    return copied(data)


def counted(tau, momentum, mu, lr):
    """`|a|_1` by the closed forms, or by the recursion for momentum and anchor together."""
    if mu and momentum:
        q = u = 0.0
        for _ in range(tau):
            u = momentum * u + 1 - mu * q
            q += lr * u
        return q / lr
    if mu:
        return (1 - (1 - lr * mu) ** tau) / (lr * mu)
    return (tau - momentum * (1 - momentum**tau) / (1 - momentum)) / (1 - momentum)


@pytest.mark.parametrize('tau', [1, 5, 40])
@pytest.mark.parametrize(('momentum', 'mu'), [(0.0, 0.0), (0.9, 0.0), (0.0, 2.0), (0.9, 2.0)])
def test_counters(tau, momentum, mu):
    """Measured with the client's optimizer; neither weight decay nor clipping nor the round's rate is in the way."""
    opt = local.sgd(LR, momentum, 0.5, decay=0.5, clip=0.1)(jnp.int32(2))
    got = jax.jit(fednova._reach, static_argnums=0)(opt, tau, mu)
    np.testing.assert_allclose(got / (LR / 4), counted(tau, momentum, mu, LR / 4), rtol=1e-5)


def test_counters_of_other_optimizers():
    assert float(fednova._reach(local.sgd(0.1)(0), 0)) == 0.0
    adam = optax.adam(0.1)  # its steps have one length, whatever the gradient's
    np.testing.assert_allclose(fednova._reach(adam, 7) / fednova._reach(adam, 1), 7.0, rtol=1e-3)
    halving = optax.sgd(lambda step: 0.5**step)
    np.testing.assert_allclose(fednova._reach(halving, 3), 1.75, rtol=1e-6)


def oracle(theta, data, cohorts, momentum=0.0, mu=0.0, by_examples=True, beta=0.0):
    n, m = np.asarray(data.size, np.float64), 0.0
    for ids in cohorts:
        w = n[ids] / n[ids].sum() if by_examples else np.full(len(ids), 1 / len(ids))
        direction = effective = 0.0
        for wk, k in zip(w, ids, strict=True):
            x, t = examples(data, k)
            tau, y, v = steps(data, k), theta, 0.0
            for _ in range(tau):
                v = momentum * v + gradient(y, x, t) + DECAY * y + mu * (y - theta)
                y = y - LR * v
            direction += wk * (theta - y) / (LR * counted(tau, momentum, mu, LR))
            effective += wk * counted(tau, momentum, 0.0, LR)  # tau itself without momentum
        m = beta * m + effective * LR * direction
        theta = theta - m
    return theta


PLAIN = fednova.algorithm(task, local.sgd(LR, 0.0, DECAY, decay=0.5), plan=PLAN)
HEAVY = fednova.algorithm(task, local.sgd(LR, 0.9, DECAY), plan=PLAN)
AVERAGED = fedavg.algorithm(task, local.sgd(LR, 0.9, DECAY), plan=PLAN)


@pytest.mark.parametrize(
    ('algorithm', 'options'),
    [
        (HEAVY, {'momentum': 0.9}),
        (fednova.algorithm(task, local.sgd(LR, 0.0, DECAY), mu=2.0, plan=PLAN), {'mu': 2.0}),
        (
            fednova.algorithm(
                task,
                local.sgd(LR, 0.9, DECAY),
                mu=2.0,
                aggregate=aggregators.uniform,
                server_opt=optax.sgd(1.0, 0.5),
                plan=PLAN,
            ),
            {'momentum': 0.9, 'mu': 2.0, 'by_examples': False, 'beta': 0.5},
        ),
    ],
)
def test_three_rounds(copies, algorithm, options):
    first, *_, last = (flat(s.server.variables.params) for s in play(algorithm, copies))
    close(last, oracle(first, copies, COHORTS, **options))


def test_plain_steps(copies):
    first, last = (flat(s.server.variables.params) for s in play(PLAIN, copies, COHORTS[:1]))
    close(last, oracle(first, copies, COHORTS[:1]))


def test_equal_steps_are_fedavg_with_any_momentum(copies):
    """Clients of 65 to 128 examples take two steps an epoch."""
    equal = copies._replace(size=jnp.array([70, 100, 65, 128, 90, 110, 128, 71]))
    mine, plain = (play(a, equal)[-1].server.variables for a in (HEAVY, AVERAGED))
    toys.same(mine, plain, atol=2e-6)
    unequal = [flat(play(a, copies)[-1].server.variables.params) for a in (HEAVY, AVERAGED)]
    assert np.abs(unequal[0] - unequal[1]).max() > 0.01


def test_more_steps_do_not_tilt_the_objective(copies):
    """From the common minimum it moves by the square of the rate, FedAvg by the rate."""
    ids, n = [0, 4, 5, 7], np.asarray(copies.size)
    w = np.where(np.isin(np.arange(8), ids), n, 0) / n[ids].sum()
    best = minimiser(copies, w, DECAY)
    states = (moved_to(PLAIN, copies, best, round=jnp.int32(halvings)) for halvings in (5, 6))
    fine, finer = (
        np.abs(flat(play(PLAIN, copies, [ids], state)[-1].server.variables.params) - best).max() for state in states
    )
    slopes = {k: gradient(best, *examples(copies, k)) + DECAY * best for k in ids}
    drift = LR / 2**5 * np.abs(sum(w[k] * steps(copies, k) * slopes[k] for k in ids)).max()
    assert finer < 0.3 * fine
    assert fine < 0.1 * drift


def test_drift_of_clients_remains_with_a_constant_rate(copies):
    """Where SCAFFOLD comes to rest in the minimum of the mean loss, FedNova stays away from its own: O(rate)."""
    algorithm = fednova.algorithm(task, local.sgd(LR, 0.0, DECAY), aggregate=aggregators.uniform, plan=PLAN)
    end = flat(play(algorithm, copies, [[0, 1, 2, 3], [4, 5, 6, 7]] * 75)[-1].server.variables.params)
    assert np.abs(end - minimiser(copies, np.ones(8), DECAY)).max() > 0.02


def test_renaming_clients_changes_nothing(copies):
    check_renaming(HEAVY, copies)


def test_clients_without_rate_stand_still(copies):
    state = moved_to(PLAIN, copies, np.ones((4, 5)), round=jnp.int32(1000))
    after = play(PLAIN, copies, COHORTS[:1], state)[-1]
    toys.same(state.server.variables, after.server.variables)


def test_a_frozen_frame_stays(data):
    check_frozen_frame(data, fednova.algorithm)


def test_statistics_are_averaged_as_they_are(data):
    """And a selecting aggregator takes direction and length from the same client."""
    ids = jnp.array([0, 3])
    plain, nova = (
        jax.jit(simulate.make_round(make(toys.noisy_task, toys.opt, plan=toys.PLAN), chunk=2))(
            toys.KEY, simulate.init(make(toys.noisy_task, toys.opt), toys.KEY, data), data, ids
        )[0].server.variables.stats
        for make in (fedavg.algorithm, fednova.algorithm)
    )
    toys.same(plain, nova)
    assert plain['batches'] > 1


def test_who_is_selected_gives_direction_and_length(copies):
    """The one message closest to another is kept: the model ends where that client does."""
    krum = aggregators.stacked(aggregators.krum(0, select=1))
    algorithm = fednova.algorithm(task, local.sgd(LR, 0.0, DECAY), aggregate=krum, plan=PLAN)
    first, last = (s.server.variables.params for s in play(algorithm, copies, [[0, 2, 5, 6]]))
    ends = []
    for k in (0, 2, 5, 6):
        x, t = examples(copies, k)
        y = flat(first)
        for _ in range(steps(copies, k)):
            y = y - LR * (gradient(y, x, t) + DECAY * y)
        ends.append(np.abs(y - flat(last)).max())
    assert min(ends) < 2e-5 < 1e-3 < np.sort(ends)[1], ends


def test_a_negative_anchor_is_refused():
    with pytest.raises(ValueError, match='mu must not be negative'):
        fednova.algorithm(task, toys.opt, mu=-1.0)


def test_momentum_that_is_kept_is_refused():
    with pytest.raises(TypeError, match='persist_momentum'):
        fednova.algorithm(task, toys.opt, persist_momentum=True)
