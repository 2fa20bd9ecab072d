"""Ditto: the personal model against NumPy, the global one against FedAvg."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import softmax_by_hand as hand
import toys

from fedjax_nc import aggregators, local, simulate, tree
from fedjax_nc.algorithms import ditto, fedavg, finetune

WHOLE = ('u', 'w', 'b')


@pytest.mark.parametrize(('reference', 'lam', 'epochs'), [('received', 2.0, None), ('local', 0.75, 2)])
def test_two_rounds(data, reference, lam, epochs):
    """Clipped is the gradient of the loss alone: the pull adds to what is left of it."""
    algorithm = ditto.algorithm(
        hand.task, hand.opt, lam=lam, personal_opt=hand.plain, personal_epochs=epochs, clip=hand.CLIP,
        reference=reference, plan=hand.PLAN,
    )  # fmt: skip
    states = hand.two_rounds(algorithm, data)
    server = hand.numbers(states[0].server.variables)
    personal = [server] * 8
    for t, ids in enumerate(hand.COHORTS):
        ends, rate = [], hand.LR * hand.FALL**t
        for k in ids:
            x, y = toys.examples(data, k)

            def gradient(p, x=x, y=y):
                return hand.gradients(p, x, y)

            ends.append(hand.descend(server, WHOLE, gradient, rate))
            w = server if reference == 'received' else ends[-1]

            def pull(p, w=w):
                return {name: lam * (p[name] - w[name]) for name in p}

            own = epochs or hand.EPOCHS
            personal[k] = hand.descend(personal[k], WHOLE, gradient, rate, momentum=0, decay=0, pull=pull, epochs=own)
        server = hand.average(ends)
        hand.close(hand.numbers(states[t + 1].server.variables), server)
    got = states[2].clients.personal
    for k in range(8):  # 4 and 6 still have the first global model
        hand.close(hand.numbers(hand.row(got, k)), personal[k])


@pytest.fixture(scope='module')
def global_part():
    run = toys.optimised(simulate.make_round(PLAIN, chunk=1))
    return lambda key, state, data, ids: run(key, state, data, jnp.array(ids))[0]


PLAIN = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN, **fedavg.UNWEIGHTED)


def test_the_generic_model_is_that_of_fedavg_bit_for_bit(data, global_part):
    algorithm = ditto.algorithm(toys.task, toys.opt, lam=1.0, plan=toys.PLAN)
    *_, state = hand.two_rounds(algorithm, data, jit=toys.optimised)
    other = simulate.init(PLAIN, toys.KEY, data)
    for t, ids in enumerate(hand.COHORTS):
        other = global_part(jax.random.fold_in(toys.KEY, t), other, data, ids)
    toys.same(state.server, other.server)
    x = data.x[:9]
    generic, personal = (algorithm.predict(state.server, client, x) for client in (None, hand.row(state.clients, 7)))
    np.testing.assert_array_equal(generic, PLAIN.predict(other.server, None, x))
    assert np.abs(generic - personal).max() > 0.01


def test_the_generic_model_counts_clients_in_any_order(data, global_part):
    """Each the same, whatever its size; weighted by examples, one who has them all is the mean."""
    start = simulate.init(PLAIN, toys.KEY, data)
    one, other = (global_part(toys.KEY, start, data, ids) for ids in ([4, 1, 0, 5], [0, 5, 4, 1]))
    toys.same(one.server, other.server, atol=1e-6)
    updates, sizes = {'a': jnp.array([[1.0], [5.0], [9.0]])}, jnp.array([0.001, 0.001, 1000.0])
    for aggregator, want in ((aggregators.uniform, 5.0), (aggregators.mean, 9.0)):
        mean = aggregator.finish(aggregator.partial(updates, sizes, jnp.arange(3), 3))
        np.testing.assert_allclose(mean['a'], [want], atol=1e-4)


def test_without_pull_the_personal_model_is_trained_alone(data):
    """By the same batches as fine-tuning with the key of that phase."""
    plain, clipped = (local.sgd(0.1, 0.0, 0.0, clip=clip) for clip in (None, 0.5))
    algorithm = ditto.algorithm(
        toys.task, toys.opt, lam=0.0, personal_opt=plain, clip=0.5, reference='local', plan=toys.PLAN
    )
    alone = finetune.algorithm(toys.task, clipped, plan=toys.PLAN)
    server = simulate.init(algorithm, toys.KEY, data).server

    @jax.jit
    def both(mine, shard):
        key = jax.random.fold_in(toys.KEY, toys.PLAN.epochs)
        got = algorithm.client(toys.KEY, server, ditto.Client((), mine), shard)[0].personal
        return got, alone.client(key, server, mine, shard)[0]

    mine = server.variables._replace(params=jax.tree.map(lambda u: u + 0.1, server.variables.params))
    toys.same(*both(mine, data.shard(3)), atol=1e-6)


def test_a_strong_pull_contracts_towards_the_reference_and_is_not_clipped(data):
    """With a loss without slope, `|v - w|` shrinks by `1 - lr lambda` in each step."""
    flat = hand.task._replace(loss=lambda v, z, batch: jnp.float32(0))
    lr, lam = 1e-3, 200.0
    algorithm = ditto.algorithm(
        flat, local.sgd(0.1, weight_decay=0.0), lam=lam, personal_opt=local.sgd(lr, 0.0, 0.0), clip=1e-3, plan=toys.PLAN
    )
    server = simulate.init(algorithm, toys.KEY, data).server
    far = server.variables._replace(params=jax.tree.map(lambda u: u + 3.0, server.variables.params))
    work = jax.jit(lambda far: algorithm.client(toys.KEY, server, ditto.Client((), far), data.shard(3)))
    after, _, info = work(far)
    steps = int(info.steps) // 2  # the other half was the global model's
    before, now = (float(tree.sqdist(v.params, server.variables.params)) ** 0.5 for v in (far, after.personal))
    assert steps == 2 * 3
    np.testing.assert_allclose(now / before, (1 - lr * lam) ** steps, rtol=1e-5)


def test_another_reference_is_refused():
    with pytest.raises(ValueError, match='received'):
        ditto.algorithm(toys.task, toys.opt, reference='own')


@pytest.mark.parametrize(('wrong', 'said'), [
    ({'lam': -1.0}, 'lam must'), ({'clip': 0.0}, 'clip must be positive'),
    ({'personal_epochs': 0}, 'personal_epochs must be at least 1'),
])  # fmt: skip
def test_numbers_out_of_range_are_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        ditto.algorithm(toys.task, toys.opt, **wrong)
