"""FedDyn against NumPy, in the storage of the paper, on the linear model of SCAFFOLD's tests."""

import jax.numpy as jnp
import numpy as np
import pytest
import toys
from test_scaffold import (
    COHORTS,
    LR,
    PLAN,
    check_frozen_frame,
    check_renaming,
    clipped,
    close,
    copied,
    examples,
    flat,
    flat_of,
    gradient,
    minimiser,
    play,
    steps,
    task,
)

from fedjax_nc import aggregators, local
from fedjax_nc.algorithms import fedavg, feddyn

ALPHA, DECAY = 0.5, 0.1
opt = local.sgd(LR, 0.0, DECAY)
DYNAMIC = feddyn.algorithm(task, opt, alpha=ALPHA, plan=PLAN)
WEIGHED = feddyn.algorithm(task, opt, alpha=ALPHA, by_examples=True, clip=6.0, plan=PLAN)


@pytest.fixture(scope='module')
def copies(data):
    return copied(data)


def oracle(theta, data, cohorts, by_examples=False, clip=None):
    """With `h` on the server and `g_k` with clients."""
    n = np.asarray(data.size, np.float64)
    alphas = ALPHA * n.mean() / n if by_examples else np.full(len(n), ALPHA)
    h, own = 0.0, np.zeros((len(n), *theta.shape))
    for ids in cohorts:
        ends = []
        for k in ids:
            x, t = examples(data, k)
            y = theta
            for _ in range(steps(data, k)):
                g = clipped(gradient(y, x, t), clip) - own[k] + alphas[k] * (y - theta)
                y = y - LR * (g + DECAY * y)
            own[k] = own[k] - alphas[k] * (y - theta)
            ends.append(y)
        h = h - ALPHA / len(n) * sum(y - theta for y in ends)
        theta = np.mean(ends, axis=0) - h / ALPHA
    return theta, np.mean(ends, axis=0), h, own, alphas


@pytest.mark.parametrize(('algorithm', 'options'), [(DYNAMIC, {}), (WEIGHED, {'by_examples': True, 'clip': 6.0})])
def test_three_rounds(copies, algorithm, options):
    first, *_, last = play(algorithm, copies)
    theta, mean, h, own, alphas = oracle(flat(first.server.variables.params), copies, COHORTS, **options)
    lam = flat(last.server.extra.lam)
    close(flat(last.server.variables.params), theta)
    close(flat(feddyn.averaged(last.server).variables.params), mean)
    close(-ALPHA * lam, h)
    for k in range(8):
        close(-alphas[k] * flat_of(last.clients, k), own[k])
    close(lam, np.mean([flat_of(last.clients, k) for k in range(8)], axis=0), 1e-6)
    assert np.abs(h).max() > 0.02


@pytest.mark.parametrize('algorithm', [DYNAMIC, WEIGHED])
def test_unequal_steps_and_changing_cohorts_reach_the_common_minimum(copies, algorithm):
    n = np.ones(8) if algorithm is DYNAMIC else np.asarray(copies.size)
    turns = [[0, 1, 2, 3], [4, 5, 6, 7], [0, 2, 4, 6], [1, 3, 5, 7]] * 200
    server = play(algorithm, copies, turns)[-1].server
    close(flat(server.variables.params), minimiser(copies, n, DECAY), 1e-4)
    close(flat(server.extra.lam), 0.0, 1e-4)


def test_a_population_of_one(copies):
    """The model is the client's own plus what it has learned to add, `theta_k - theta`."""
    one = copies._replace(size=jnp.where(jnp.arange(8) == 4, copies.size, 0))
    first, last = play(DYNAMIC, one, [[4]])
    theta, mean = flat(first.server.variables.params), flat(feddyn.averaged(last.server).variables.params)
    close(flat_of(last.clients, 4), mean - theta, 1e-6)
    close(flat(last.server.variables.params), 2 * mean - theta, 1e-6)


def test_renaming_clients_changes_nothing(copies):
    check_renaming(DYNAMIC, copies)


def test_statistics_are_plain_means_and_have_no_dual():
    algorithm = feddyn.algorithm(toys.noisy_task, toys.opt, by_examples=True)
    deltas, stats = ({name: jnp.array([2.0, 6.0])} for name in ('w', 'batches'))
    total = algorithm.aggregate.partial(fedavg.Message(deltas, stats), jnp.array([3.0, 1.0]), jnp.arange(2), 2)
    got = algorithm.aggregate.finish(total)
    assert float(got['delta']['w']) == float(got['stats']['batches']) == 4.0


def test_a_frozen_frame_has_no_dual(data):
    once = check_frozen_frame(data, feddyn.algorithm, alpha=0.1)
    assert np.abs(once.server.extra.lam['body']['w']).max() > 1e-4


def test_what_it_does_not_know_is_refused():
    with pytest.raises(ValueError, match='alpha must be positive'):
        feddyn.algorithm(task, opt, alpha=0.0)
    with pytest.raises(ValueError, match='clip must be positive'):
        feddyn.algorithm(task, opt, clip=0.0)
    with pytest.raises(ValueError, match='by_examples'):
        feddyn.algorithm(task, opt, aggregate=aggregators.mean)
