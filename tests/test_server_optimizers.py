"""The FedOpt family against NumPy: Algorithm 2 of Reddi et al., ICLR 2021."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

from fedjax_nc import heads, losses, simulate
from fedjax_nc import server_optimizers as servers
from fedjax_nc.algorithms import fedavg, fedetf
from fedjax_nc.base import Aggregate
from fedjax_nc.objective import objective

DELTAS = [{'w': np.array([[0.3, -0.02], [0.0, 4.0]]), 'b': np.array(scale)} for scale in (0.5, -1.0, 1e-4, 0.0)]
FOLLOW = {
    'fedadagrad': lambda v, d, rest: v + d**2,
    'fedyogi': lambda v, d, rest: v - rest * d**2 * np.sign(v - d**2),
    'fedadam': lambda v, d, rest: (1 - rest) * v + rest * d**2,
}


def follow(opt):
    """A model that starts at 1 and is given minus each change as a gradient."""
    theta = {'w': jnp.ones((2, 2)), 'b': jnp.ones(())}
    state = opt.init(theta)
    for delta in DELTAS:
        updates, state = opt.update(jax.tree.map(lambda d: jnp.float32(-d), delta), state, theta)
        theta = optax.apply_updates(theta, updates)
    return theta, state


@pytest.mark.parametrize('name', FOLLOW)
@pytest.mark.parametrize('options', [{}, {'lr': 0.3, 'b1': 0.5, 'b2': 0.8, 'tau': 0.1}])
def test_adaptive(name, options):
    if name == 'fedadagrad':
        options = {key: value for key, value in options.items() if key != 'b2'}
    got, _ = follow(getattr(servers, name)(**options))
    lr, tau, rest = options.get('lr', 1e-2), options.get('tau', 1e-3), 1 - options.get('b2', 0.99)
    b1 = options.get('b1', 0.0 if name == 'fedadagrad' else 0.9)
    for leaf in ('w', 'b'):
        theta, m, v = 1.0, 0.0, tau**2
        for delta in DELTAS:
            m = b1 * m + (1 - b1) * delta[leaf]
            v = FOLLOW[name](v, delta[leaf], rest)
            theta = theta + lr * m / (np.sqrt(v) + tau)
        np.testing.assert_allclose(got[leaf], theta, rtol=1e-5)


@pytest.mark.parametrize(('lr', 'beta'), [(0.1, 0.9), (1.0, 0.0)])
def test_fedavgm(lr, beta):
    got, _ = follow(servers.fedavgm() if beta else servers.fedavgm(lr, beta))
    theta, m = 1.0, 0.0
    for delta in DELTAS:
        m = beta * m + delta['w']
        theta = theta + lr * m
    np.testing.assert_allclose(got['w'], theta, rtol=1e-6)


def test_rounds_without_momentum_at_rate_one_are_fedavgs(data):
    plain, avgm = (
        fedavg.algorithm(toys.task, toys.opt),
        fedavg.algorithm(toys.task, toys.opt, server_opt=servers.fedavgm(1.0, 0.0)),
    )
    ends = []
    for algorithm in (plain, avgm):
        state = simulate.init(algorithm, toys.KEY, data)
        for t in range(2):
            state, _ = jax.jit(simulate.make_round(algorithm, cohort=3))(jax.random.fold_in(toys.KEY, t), state, data)
        ends.append(state.server.variables)
    toys.same(*ends, atol=1e-6)


def test_rates_may_be_schedules():
    got, _ = follow(servers.fedyogi(lambda round: jnp.where(round < 2, 0.3, 0.0)))
    want, _ = follow(servers.fedyogi(0.3))
    assert np.abs(got['w'] - want['w']).max() > 0.1


def test_in_fedavg_they_follow_the_mean_change(data):
    algorithm = fedavg.algorithm(toys.task, toys.opt, server_opt=servers.fedyogi(0.1))
    first = algorithm.init(toys.KEY, data)
    delta = jax.tree.map(
        lambda u: jnp.cos(jnp.arange(u.size, dtype=jnp.float32)).reshape(u.shape), first.variables.params
    )
    mean = Aggregate({'delta': delta, 'stats': ()}, jnp.float32(10), jnp.float32(2))
    after = jax.jit(algorithm.server)(toys.KEY, first, mean)

    def moved(theta, d):
        v = 1e-6 - 0.01 * d**2 * np.sign(1e-6 - d**2)
        return theta + 0.1 * 0.1 * d / (np.sqrt(v) + 1e-3)

    toys.same(after.variables.params, jax.tree.map(moved, first.variables.params, delta), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('opt', [optax.sgd(1.0, 0.9), servers.fedyogi(0.1)])
def test_running_statistics_are_not_the_servers_business(data, opt):
    task = objective(toys.normed, heads.linear(), losses.cross_entropy)
    ends = []
    for server_opt in (None, opt):
        algorithm = fedavg.algorithm(task, toys.opt, plan=toys.PLAN, server_opt=server_opt)
        round, state = jax.jit(simulate.make_round(algorithm, cohort=4)), simulate.init(algorithm, toys.KEY, data)
        # The same models train in the second round, so that what differs would be the server's doing.
        first, _ = round(toys.KEY, state, data)
        again = first._replace(server=first.server._replace(variables=state.server.variables))
        second, _ = round(jax.random.key(1), again, data)
        ends.append((first.server.variables.stats, second.server.variables.stats))
    toys.same(*ends, atol=1e-6)
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), ends[0][0], state.server.variables.stats)
    assert min(jax.tree.leaves(moved)) > 1e-3


def test_a_frozen_frame_is_not_the_servers_business(data):
    algorithm = fedetf.algorithm(toys.tiny, toys.opt, plan=toys.PLAN, server_opt=servers.fedadam(0.1))
    state = simulate.init(algorithm, toys.KEY, data)
    round = simulate.make_round(algorithm, cohort=4, chunk=4)
    after, _ = jax.jit(round)(toys.KEY, state, data)
    before, after = state.server, after.server
    toys.same(before.variables.fixed, after.variables.fixed)
    assert np.abs(before.variables.params['body']['w'] - after.variables.params['body']['w']).max() > 1e-3
    assert jax.tree.structure(after.opt[0].v) == jax.tree.structure(after.variables.params)


@pytest.mark.parametrize(
    ('make', 'wrong'),
    [(servers.fedavgm, 'beta'), (servers.fedadagrad, 'b1'), (servers.fedadam, 'b2'), (servers.fedyogi, 'b2')],
)
def test_inertia_lies_below_one(make, wrong):
    for value in (-0.1, 1.0):
        with pytest.raises(ValueError, match=f'{wrong} must lie in'):
            make(**{wrong: value})


def test_no_tau_is_refused():
    with pytest.raises(ValueError, match='tau must be positive'):
        servers.fedadam(tau=0.0)


def test_moments_of_half_precision_are_in_float32():
    state = servers.fedadam(0.1).init({'w': jnp.ones(3, jnp.bfloat16)})
    assert {u.dtype for u in jax.tree.leaves(state)} == {jnp.dtype(jnp.float32)}
