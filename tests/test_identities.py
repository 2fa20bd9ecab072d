"""Settings in which one method is another."""

import functools

import jax
import numpy as np
import optax
import pytest
import toys

from fedjax_nc import aggregators, heads, local, losses, simulate
from fedjax_nc.algorithms import fedavg, fedetf, fedprox, finetune
from fedjax_nc.base import Aggregator
from fedjax_nc.objective import objective


@functools.cache  # several tests play the same game
def compiled(algorithm, **kwargs):
    return jax.jit(simulate.make_round(algorithm, cohort=5, **kwargs))


def play(algorithm, data, rounds=2, **kwargs):
    state, run = simulate.init(algorithm, toys.KEY, data), compiled(algorithm, **kwargs)
    for t in range(rounds):
        state, _ = run(jax.random.fold_in(toys.KEY, t), state, data)
    return state.server.variables


fedavg_ = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN)


def test_fedprox_without_anchor_is_fedavg(data):
    toys.same(play(fedprox.algorithm(toys.task, toys.opt, mu=0.0, plan=toys.PLAN), data), play(fedavg_, data))


def test_fine_tuning_with_an_anchor_is_the_client_work_of_fedprox(data):
    train = fedprox.algorithm(toys.task, toys.opt, mu=0.7, plan=toys.PLAN)
    stage = finetune.algorithm(toys.task, toys.opt, plan=toys.PLAN, penalty=fedprox.proximal(0.7))
    server = simulate.init(train, toys.KEY, data).server
    message = train.client(toys.KEY, server, (), data.shard(4))[1]
    mine = stage.client(toys.KEY, server, server.variables, data.shard(4))[0]
    toys.same(mine.params, jax.tree.map(lambda a, d: a + d, server.variables.params, message.delta), atol=1e-6)
    plain = finetune.algorithm(toys.task, toys.opt, plan=toys.PLAN)
    free = plain.client(toys.KEY, server, server.variables, data.shard(4))[0]
    assert max(jax.tree.leaves(jax.tree.map(lambda a, b: np.abs(a - b).max(), mine.params, free.params))) > 1e-3


def test_fedprox_with_an_anchor_is_not(data):
    held, free = (play(fedprox.algorithm(toys.task, toys.opt, mu=mu, plan=toys.PLAN), data, 1) for mu in (5.0, 0.0))
    start = simulate.init(fedavg_, toys.KEY, data).server.variables

    def moved(v):
        return sum(float(np.abs(a - b).sum()) for a, b in zip(*map(jax.tree.leaves, (v, start)), strict=True))

    assert moved(held) < 0.8 * moved(free)


def test_fedetf_without_balance_is_fedavg_with_an_etf_head(data):
    plain = fedavg.algorithm(objective(toys.tiny, heads.etf(), losses.cross_entropy), toys.opt, plan=toys.PLAN)
    for absent in ('floor', 'mask'):
        off = fedetf.algorithm(toys.tiny, toys.opt, gamma=0.0, absent=absent, plan=toys.PLAN)
        toys.same(play(off, data), play(plain, data), atol=1e-6)
    on = fedetf.algorithm(toys.tiny, toys.opt, plan=toys.PLAN)
    gap = jax.tree.map(lambda a, b: np.abs(a - b).max(), play(on, data).params, play(plain, data).params)
    assert max(jax.tree.leaves(gap)) > 1e-3


def test_server_sgd_of_rate_one_is_the_default_and_rate_zero_stands_still(data):
    one = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN, server_opt=optax.sgd(1.0))
    toys.same(play(one, data), play(fedavg_, data))
    zero = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN, server_opt=optax.sgd(0.0))
    toys.same(play(zero, data), simulate.init(zero, toys.KEY, data).server.variables)


def test_momentum_starts_anew_each_round_unless_it_is_kept(data):
    kept = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN, persist_momentum=True)
    toys.same(play(kept, data, 1), play(fedavg_, data, 1))
    gap = jax.tree.map(lambda a, b: np.abs(a - b).max(), play(kept, data).params, play(fedavg_, data).params)
    assert max(jax.tree.leaves(gap)) > 1e-4


NORMED = objective(toys.normed, heads.etf(6, scale=2.0), losses.balanced_softmax)


@pytest.mark.slow
@pytest.mark.parametrize('task', [toys.task, NORMED])  # the second with a temperature and running statistics
def test_aggregating_identical_messages_is_the_identity(data, task):
    """Every client reports the model of client 0: size weights, uniform weights and the median must agree with it."""
    results, fedavg_ = [], fedavg.algorithm(task, toys.opt, plan=toys.PLAN)
    for how in (aggregators.mean, aggregators.uniform, aggregators.stacked(aggregators.coordinate_median)):
        base = fedavg.algorithm(task, toys.opt, plan=toys.PLAN, aggregate=how)

        def copy(key, server, client, shard, base=base):
            first = data.shard(0)
            same = base.client(toys.KEY, server, client, first)
            return same

        results.append(play(base._replace(client=copy), data, 1, chunk=2))
    message = fedavg_.client(toys.KEY, simulate.init(fedavg_, toys.KEY, data).server, (), data.shard(0))[1]
    start = simulate.init(fedavg_, toys.KEY, data).server.variables.params
    for result in results:
        toys.same(result.params, jax.tree.map(lambda a, d: a + d, start, message.delta), atol=1e-6)
        toys.same(result.stats, message.stats, atol=1e-6)


def test_a_stack_gives_the_same_mean_as_the_stream(data):
    def weighted(messages, weights):
        return jax.tree.map(lambda u: np.float32(1) * (weights @ u.reshape(len(u), -1)).reshape(u.shape[1:])
                            / weights.sum(), messages)  # fmt: skip

    how: Aggregator = aggregators.stacked(weighted)
    stack = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN, aggregate=how)
    toys.same(play(stack, data, chunk=2), play(fedavg_, data, chunk=2), atol=1e-6)


def test_frozen_parts_do_not_move_by_a_bit(data):
    body_only = fedavg.algorithm(toys.task, local.sgd(0.1), plan=toys.PLAN, parts=('body',))
    before, after = simulate.init(body_only, toys.KEY, data).server.variables, play(body_only, data)
    toys.same(before.params['head'], after.params['head'])
    assert np.abs(before.params['body']['w'] - after.params['body']['w']).max() > 1e-3


@pytest.mark.slow
def test_learning_rates_can_be_swept_without_recompiling(data):
    """A function that builds an algorithm can be vmapped over its numbers."""

    def loss_after(mu):
        algorithm = fedprox.algorithm(toys.task, toys.opt, mu=mu, plan=toys.PLAN)
        state = simulate.init(algorithm, toys.KEY, data)
        return simulate.make_round(algorithm, chunk=8)(toys.KEY, state, data)[1].loss

    swept = jax.jit(jax.vmap(loss_after))(np.array([0.0, 1.0], np.float32))
    np.testing.assert_allclose(swept[1], loss_after(1.0), rtol=1e-4)


def test_a_body_that_is_not_trained_runs_in_evaluation_mode(data):
    """Its statistics stand still, whether the head is trained by all or tuned by one."""
    train = fedavg.algorithm(toys.noisy_task, toys.opt, plan=toys.PLAN, parts=('head',))
    assert float(play(train, data).stats['batches']) == 0.0
    stage = finetune.algorithm(toys.noisy_task, toys.opt, plan=toys.PLAN, parts=('head',))
    server = stage.init(toys.KEY, data)
    mine, _, _ = jax.jit(stage.client)(toys.KEY, server, server.variables, data.shard(0))
    assert float(mine.stats['batches']) == 0.0
    assert np.abs(mine.params['head']['w'] - server.variables.params['head']['w']).max() > 1e-3
