"""SCAFFOLD against NumPy, written from the paper's equations, and settings in which its answer is known.

The model is linear with squared error, so that the minimiser of all losses is the solution of a linear system:

    F_k(theta) = mean_i 1/2 |x_i theta - t_i|^2,   dF_k = X^T (X theta - T) / n,   X with a column of ones

Every client holds one example many times: each batch has the gradient of the whole, in whatever order, while clients
take unequal numbers of steps.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

from fedjax_nc import aggregators, heads, local, simulate
from fedjax_nc.algorithms import fedavg, fedetf_gmv, scaffold
from fedjax_nc.base import Model
from fedjax_nc.objective import objective

LR, MOMENTUM, DECAY = 0.02, 0.9, 0.1
PLAN = local.Plan(batch_size=64, epochs=2)
COHORTS = [[0, 2, 5, 7], [4, 1, 0], [7, 6, 4, 3]]


def squared(logits, labels, counts):
    return 0.5 * jnp.sum(jnp.square(logits - jax.nn.one_hot(labels, toys.CLASSES)), axis=-1)


three_features = Model(lambda key, x: ({}, ()), lambda params, stats, x, mask, key: (x[:, :3], stats))
task = objective(three_features, heads.linear(), squared)


def copied(data):
    """Every client holds only its first example, as often as it held any."""
    label = jax.nn.one_hot(data.y[data.index[:, 0]], toys.CLASSES, dtype=jnp.int32)
    index = jnp.broadcast_to(data.index[:, :1], data.index.shape)
    return data._replace(index=index, counts=label * data.size[:, None])


@pytest.fixture(scope='module')
def copies(data):
    return copied(data)


def examples(data, k):
    x, y = toys.examples(data, k)
    return np.column_stack([x[:, :3], np.ones(len(x))]), np.eye(toys.CLASSES)[y]


def gradient(theta, x, t):
    return x.T @ (x @ theta - t) / len(x)


def minimiser(data, weights, decay):
    """Of `sum_k p_k F_k + decay/2 |theta|^2`, p in proportion to the weights."""
    left, right = decay * np.eye(4), 0.0
    for k, w in enumerate(weights / np.sum(weights)):
        x, t = examples(data, k)
        left, right = left + w * x.T @ x / len(x), right + w * x.T @ t / len(x)
    return np.linalg.solve(left, right)


def steps(data, k):
    return PLAN.epochs * -(-int(data.size[k]) // PLAN.batch_size)


def flat(params):
    return np.vstack([np.asarray(params['head'][name], np.float64) for name in ('w', 'b')])


def flat_of(clients, k):
    return flat(jax.tree.map(lambda u: u[k], clients))


def clipped(g, norm):
    return g if norm is None else g * min(1.0, norm / np.linalg.norm(g))


def close(got, want, atol=2e-5):
    np.testing.assert_allclose(got, want, atol=atol)


@functools.cache
def compiled(algorithm):
    return jax.jit(simulate.make_round(algorithm, chunk=4))


def play(algorithm, data, cohorts=COHORTS, state=None):
    """The states before the rounds of these cohorts and after each of them. Cohorts of up to four compile once."""
    states = [simulate.init(algorithm, toys.KEY, data) if state is None else state]
    for t, ids in enumerate(cohorts):
        ids = jnp.asarray([*ids, *[data.num_clients] * (4 - len(ids))])
        states.append(compiled(algorithm)(jax.random.fold_in(toys.KEY, t), states[-1], data, ids)[0])
    return states


def moved_to(algorithm, data, theta, **fields):
    """The first state of an algorithm, at other parameters."""
    state = simulate.init(algorithm, toys.KEY, data)
    theta = jnp.asarray(theta, jnp.float32)
    v = state.server.variables._replace(params={'body': {}, 'head': {'w': theta[:3], 'b': theta[3]}})
    return state._replace(server=state.server._replace(variables=v, **fields))


def check_renaming(algorithm, data):
    """Other numbers for the same clients make no other server."""
    order = np.array([3, 0, 7, 1, 6, 2, 5, 4])  # client k becomes client order[k]
    back = np.argsort(order)
    renamed = data._replace(index=data.index[back], size=data.size[back], counts=data.counts[back])
    one, other = play(algorithm, data)[-1], play(algorithm, renamed, [order[ids] for ids in COHORTS])[-1]
    toys.same(one.server, other.server, atol=5e-6)
    toys.same(one.clients, jax.tree.map(lambda u: u[order], other.clients), atol=5e-6)


def check_frozen_frame(data, base, **kwargs):
    """With a frozen ETF and memory vectors around it: the frame stays bit by bit, and nothing has its shape."""
    algorithm = fedetf_gmv.algorithm(toys.tiny, toys.opt, warm=0, collect=0, plan=toys.PLAN, base=base, **kwargs)
    before, once = play(algorithm, data, COHORTS[:1])
    v, u = before.server.variables, once.server.variables
    np.testing.assert_array_equal(v.fixed['head']['v'], u.fixed['head']['v'])
    assert u.params['head'] == {}
    assert np.abs(u.params['body']['w'] - v.params['body']['w']).max() > 1e-3
    assert np.abs(u.fixed['memory'].mu).max() > 0.1
    shapes = {u.shape for u in jax.tree.leaves((once.server.extra, once.clients))}
    assert not any(s[-2:] == v.fixed['head']['v'].shape for s in shapes)
    return once


def oracle(theta, data, cohorts, option='II', by_examples=False, clip=None, eta_g=1.0):
    n = np.asarray(data.size, np.float64)
    p = n / n.sum() if by_examples else np.full(len(n), 1 / len(n))
    c, own = np.zeros_like(theta), np.zeros((len(n), *theta.shape))
    for ids in cohorts:
        moved, turned = 0.0, 0.0
        for k in ids:
            x, t = examples(data, k)
            y, v, met = theta, 0.0, []
            for _ in range(steps(data, k)):
                met.append(clipped(gradient(y, x, t), clip))
                v = MOMENTUM * v + met[-1] - own[k] + c + DECAY * y
                y = y - LR * v
            new = np.mean(met, axis=0) if option == 'II' else clipped(gradient(theta, x, t), clip)
            turned += p[k] * (new - own[k])
            own[k] = new
            moved += (n[k] / n[ids].sum() if by_examples else 1 / len(ids)) * (y - theta)
        theta, c = theta + eta_g * moved, c + turned
    return theta, c, own, p


opt = local.sgd(LR, MOMENTUM, DECAY)
CONTROLLED = scaffold.algorithm(task, opt, plan=PLAN)
PASSING = scaffold.algorithm(task, opt, plan=PLAN, option='I', server_opt=optax.sgd(0.5))
DRIFTING = fedavg.algorithm(task, opt, plan=PLAN, aggregate=aggregators.uniform)


@pytest.mark.parametrize(
    ('algorithm', 'options'),
    [
        (CONTROLLED, {}),
        (PASSING, {'option': 'I', 'eta_g': 0.5}),
        (scaffold.algorithm(task, opt, plan=PLAN, option='I', clip=1.0), {'option': 'I', 'clip': 1.0}),
        (
            scaffold.algorithm(task, opt, plan=PLAN, aggregate=aggregators.mean, clip=1.0),
            {'by_examples': True, 'clip': 1.0},
        ),
    ],
)
def test_three_rounds(copies, algorithm, options):
    states = play(algorithm, copies)
    theta, c, own, p = oracle(flat(states[0].server.variables.params), copies, COHORTS, **options)
    server, clients = states[-1].server, states[-1].clients
    close(flat(server.variables.params), theta)
    close(flat(server.extra.c), c)
    for k in range(8):
        close(flat_of(clients, k), own[k])
    assert np.abs(c).max() > 0.02
    for state in states:  # c is the mean of all c_k in every round
        close(flat(state.server.extra.c), sum(p[k] * flat_of(state.clients, k) for k in range(8)), 1e-6)


def test_the_pass_of_option_one_is_work_but_takes_no_step(copies):
    state = simulate.init(PASSING, toys.KEY, copies)
    info = compiled(PASSING)(toys.KEY, state, copies, jnp.array([0, 2, 5, 7]))[1].info
    np.testing.assert_array_equal(info.steps, [6, 4, 2, 2])
    np.testing.assert_array_equal(info.examples, 3 * np.array([149, 100, 60, 1]))


def test_option_one_is_the_mean_over_all_examples(data):
    """Also where the last batch of the pass is short: its examples count as much as any."""
    plan = local.Plan(batch_size=16, epochs=1)
    assert (np.asarray(data.size) % plan.batch_size > 0).sum() >= 5
    algorithm = scaffold.algorithm(task, opt, plan=plan, option='I')
    cohorts = [[0, 2, 5, 7], [1, 3, 4]]
    states = play(algorithm, data, cohorts)
    for before, after, ids in zip(states, states[1:], cohorts, strict=False):
        theta = flat(before.server.variables.params)
        for k in ids:
            close(flat_of(after.clients, k), gradient(theta, *examples(data, k)), 5e-6)


def test_for_plain_sgd_the_mean_gradient_is_what_the_paper_reads_off_the_models(data):
    lr = 0.05
    algorithm = scaffold.algorithm(toys.noisy_task, local.sgd(lr, 0.0, 0.0), plan=toys.PLAN)
    server = algorithm.init(toys.KEY, data)
    c = jax.tree.map(lambda u: 0.1 * jnp.cos(jnp.arange(u.size, dtype=jnp.float32)).reshape(u.shape), server.extra.c)
    mine = jax.tree.map(lambda u: u[..., ::-1], c)
    server = server._replace(extra=server.extra._replace(c=c))
    new, message, info = jax.jit(algorithm.client)(toys.KEY, server, mine, data.shard(0))
    tau = int(info.steps)
    assert tau == 14
    toys.same(new, jax.tree.map(lambda ck, c, d: ck - c - d / (tau * lr), mine, c, message.base.delta), atol=1e-5)
    toys.same(message.control, jax.tree.map(jnp.subtract, new, mine), atol=1e-7)


def test_first_round_is_that_of_fedavg_without_weights(copies):
    mine, plain = (play(a, copies, COHORTS[:1])[-1].server.variables for a in (CONTROLLED, DRIFTING))
    toys.same(mine, plain, atol=1e-6)


def test_unequal_steps_reach_the_common_minimum(copies):
    """Here of losses with weight decay; half of the clients take part in a round. FedAvg ends elsewhere."""
    want = minimiser(copies, np.ones(8), DECAY)
    turns = [[0, 1, 2, 3], [4, 5, 6, 7]] * 150
    found, drifted = (play(a, copies, turns)[-1].server for a in (CONTROLLED, DRIFTING))
    close(flat(found.variables.params), want, 1e-5)
    close(flat(found.extra.c), -DECAY * want, 1e-5)
    assert np.abs(flat(drifted.variables.params) - want).max() > 0.05


def test_like_clients_need_no_correction(copies):
    """Four of them, which is everyone: the other four hold nothing."""
    four = np.arange(8) < 4
    like = copies._replace(
        index=copies.index[:1].repeat(8, axis=0),
        size=jnp.asarray(100 * four, jnp.int32),
        counts=copies.counts[:1] * four[:, None],
    )
    everyone = play(CONTROLLED, like, [[0, 1, 2, 3]] * 3)[-1]
    alone = play(DRIFTING, like, [[3], [0], [1]])[-1]
    close(flat_of(everyone.clients, 2), flat(everyone.server.extra.c), 1e-6)
    close(flat(everyone.server.variables.params), flat(alone.server.variables.params), 1e-6)


def test_renaming_clients_changes_nothing(copies):
    check_renaming(CONTROLLED, copies)


def test_statistics_are_averaged_by_examples(data):
    algorithm = scaffold.algorithm(toys.noisy_task, toys.opt)
    deltas, stats = ({name: jnp.array([2.0, 6.0])} for name in ('w', 'batches'))
    messages = scaffold.Message(fedavg.Message(deltas, stats), deltas)
    total = algorithm.aggregate.partial(messages, jnp.array([3.0, 1.0]), jnp.arange(2), 2)
    got = algorithm.aggregate.finish(total)
    assert float(got['base']['delta']['w']) == 4.0
    assert float(got['base']['stats']['batches']) == 3.0
    assert float(got['control']['w']) == 4.0


def test_a_robust_mean_keeps_an_attacker_out_of_model_and_variates(copies):
    """Client 1 trains on numbers a million times too large: Krum takes three of the other four."""
    robust = scaffold.algorithm(task, opt, plan=PLAN, aggregate=aggregators.stacked(aggregators.krum(1, select=3)))
    mad = copies._replace(x=copies.x.at[copies.index[1, 0]].mul(1e6))
    ids = [0, 1, 2, 4, 7]
    server = play(robust, mad, [ids] * 2)[-1].server
    assert np.abs(flat(server.variables.params)).max() < 10
    assert np.abs(flat(server.extra.c)).max() < 10
    fooled = play(CONTROLLED, mad, [ids] * 2)[-1].server
    assert not np.abs(flat(fooled.variables.params)).max() < 1e3


def test_a_frozen_frame_has_no_variates(data):
    once = check_frozen_frame(data, scaffold.algorithm)
    assert np.abs(once.server.extra.c['body']['w']).max() > 1e-3


def test_empty_clients_are_no_part_of_the_population(data):
    algorithm = scaffold.algorithm(task, toys.opt)
    assert float(algorithm.init(toys.KEY, data).extra.total) == 8
    assert float(algorithm.init(toys.KEY, data._replace(size=data.size.at[3].set(0))).extra.total) == 7


def test_what_it_does_not_know_is_refused():
    with pytest.raises(ValueError, match="'I' or 'II'"):
        scaffold.algorithm(task, toys.opt, option='III')
    with pytest.raises(ValueError, match='clip must be positive'):
        scaffold.algorithm(task, toys.opt, clip=-1.0)
    with pytest.raises(TypeError, match='persist_momentum'):
        scaffold.algorithm(task, toys.opt, persist_momentum=True)
