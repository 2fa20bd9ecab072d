"""Local training against a plain Python loop over the client's real examples."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

from fedjax_nc import heads, local, losses, models, simulate
from fedjax_nc.algorithms import fedavg
from fedjax_nc.base import Batch, Shard
from fedjax_nc.data import federate, images
from fedjax_nc.objective import objective


def loss(params, stats, batch):
    v = params
    z, stats = toys.task.features(v, batch)
    return toys.task.loss(v, z, batch), stats


def test_few_are_sorted_as_many_are():
    rng = np.random.default_rng(0)
    for n in (1, 2, 17, 128):
        by = rng.integers(0, max(n // 2, 1), n).astype(np.float32)  # with ties, which keep their order
        by[rng.random(n) < 0.3] = np.inf
        values = jnp.asarray(rng.permutation(n), jnp.int32)
        few = local._sorted_by_rank(jnp.asarray(by), values)
        np.testing.assert_array_equal(few, np.asarray(values)[np.argsort(by, kind='stable')])
        assert few.dtype == values.dtype


@pytest.mark.parametrize('n', [local._FEW, local._FEW + 1])
def test_a_shuffle_is_the_order_of_its_draws(n):
    size, key = n - 5, jax.random.key(3)
    nothing = jnp.zeros(0)
    shard = Shard(nothing, nothing, jnp.arange(n, 0, -1), jnp.int32(size), nothing)
    order = np.argsort(np.asarray(jax.random.uniform(key, (n,)))[:size], kind='stable')
    np.testing.assert_array_equal(local._shuffled(key, shard, 1)[:size], n - order)


@pytest.fixture(scope='module')
def start(data):
    return toys.task.init(toys.KEY, data)


def train(key, variables, shard, plan=toys.PLAN, opt=None):
    def inner(params, stats, batch):
        return loss(variables._replace(params=params), stats, batch)

    return local.local_sgd(key, inner, variables.params, (), opt or toys.opt(0), shard, plan)


def by_hand(key, variables, data, k, plan):
    """A Python loop that never sees padding: slices the real rows in the same order."""
    shard, n = data.shard(k), int(data.size[k])
    params, opt = variables.params, toys.opt(0)
    state = opt.init(params)
    for e in range(plan.epochs):
        order = np.asarray(local._shuffled(jax.random.split(jax.random.fold_in(key, e))[0], shard, 1))[:n]
        assert sorted(order) == sorted(np.asarray(shard.index)[:n])
        for at in range(0, n, plan.batch_size):
            rows = order[at : at + plan.batch_size]
            batch = Batch(data.x[rows], data.y[rows], None, shard.counts)
            grads = jax.grad(lambda p, batch=batch: loss(variables._replace(params=p), (), batch)[0])(params)
            updates, state = opt.update(grads, state, params)
            params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize('k', [0, 1, 3, 5])
def test_equals_a_loop_over_real_examples(data, start, k):
    got = jax.jit(train)(toys.KEY, start, data.shard(k))
    toys.same(got.params, by_hand(toys.KEY, start, data, k, toys.PLAN), atol=1e-6)
    n, b = int(data.size[k]), toys.PLAN.batch_size
    steps = 2 * -(-n // b)
    assert (int(got.info.steps), int(got.info.examples), int(got.info.slots)) == (steps, 2 * n, steps * b)


@pytest.mark.parametrize('tails', [(1,), (2, 3), (3,)])
def test_tails_change_padding_and_nothing_else(data, start, tails):
    b = toys.PLAN.batch_size
    short = toys.PLAN._replace(tails=tails)
    ids, seen = jnp.arange(8), set()
    together = jax.jit(jax.vmap(lambda i: train(toys.KEY, start, data.shard(i), short)))(ids)
    whole = jax.jit(lambda shard: train(toys.KEY, start, shard))
    cut = jax.jit(lambda shard: train(toys.KEY, start, shard, short))
    for k in range(8):
        want, got = whole(data.shard(k)), cut(data.shard(k))
        for found in (got, jax.tree.map(lambda u, k=k: u[k], together)):
            toys.same(found.params, want.params, atol=1e-6)
            toys.same(found.info.loss, want.info.loss, atol=1e-6)
            assert found.info[1:3] == want.info[1:3]
            n = int(data.size[k])
            rest = min([0, *tails, b], key=lambda width: (width < n % b, width))
            seen.add(rest)
            assert int(found.info.slots) == toys.PLAN.epochs * (n // b * b + rest)
    assert len(seen) > 1


@pytest.mark.slow
@pytest.mark.parametrize(('narrower', 'tails'), [((1,), ()), ((1, 3), (2,)), ((2, 5, 8, 20), ())])
def test_narrower_lanes_change_waiting_and_nothing_else(data, start, narrower, tails):
    plan = toys.PLAN._replace(tails=tails)
    ids = jnp.array([3, 0, 7, 5, 1, 2, 6, 4])  # in no order of size, and some of them empty
    data = data._replace(size=data.size.at[2].set(0).at[4].set(0))

    def together(plan):
        return jax.jit(jax.vmap(lambda i: train(jax.random.fold_in(toys.KEY, i), start, data.shard(i), plan)))(ids)

    want, got = together(plan), together(plan._replace(narrower=narrower))
    toys.same(got._replace(info=()), want._replace(info=()), atol=1e-6)
    toys.same(got.info._replace(lane_slots=()), want.info._replace(loops=()), atol=1e-6)
    np.testing.assert_array_equal(got.info.lane_slots, [waited(data.size, ids, plan, narrower, at) for at in range(8)])
    alone = jax.jit(lambda shard: train(toys.KEY, start, shard, plan._replace(narrower=narrower)))(data.shard(0))
    assert int(alone.info.lane_slots) == int(alone.info.slots)


def waited(sizes, ids, plan, narrower, at):
    """Batch rows computed in one lane, step by step: a lane is dropped when so few others have anything to do."""
    rows = 0
    for width in (plan.batch_size, *plan.tails):
        left = []
        for n in (int(sizes[i]) for i in ids):
            rest = next((t for t in plan.tails if 0 < n % plan.batch_size <= t), plan.batch_size)
            full = n // plan.batch_size + (n % plan.batch_size > 0 and rest == plan.batch_size)
            left.append(full if width == plan.batch_size else int(n % plan.batch_size > 0 and rest == width))
        ranked = sorted(range(8), key=lambda lane: -left[lane])
        for step in range(max(left)):
            busy = sum(n > step for n in left)
            lanes = next((n for n in narrower if busy <= n < 8), 8)
            rows += width * plan.epochs * (at in ranked[:lanes])
    return rows


@pytest.mark.parametrize('narrower', [(), (1, 2), (4,)])
def test_lanes_compute_no_more_than_they_count(narrower):
    """Every lane of every step calls back, one that waits like the others."""
    sizes, called = [5, 16, 90, 23, 2, 48, 13, 8], []
    data, opt, plan = toys.ragged(sizes), local.sgd(0.01)(jnp.int32(0)), local.Plan(8, 2, (), narrower)

    def loss(w, stats, batch):
        jax.debug.callback(lambda mask: called.append(mask), batch.mask)
        return jnp.sum(batch.mask * (w - batch.y) ** 2), stats

    def one(i):
        return local.local_sgd(jax.random.fold_in(toys.KEY, i), loss, jnp.float32(0), (), opt, data.shard(i), plan)

    info = jax.block_until_ready(jax.jit(jax.vmap(one))(jnp.arange(8)).info)
    jax.effects_barrier()
    steps = [2 * -(-n // 8) for n in sizes]
    assert len(called) == (int(info.lane_slots.sum()) // 8 if narrower else 8 * max(steps))
    assert sum(steps) <= len(called) <= 8 * max(steps)


def test_narrower_lanes_know_what_the_loss_closes_over(data):
    """Such as a client's own anchor, which has lanes too, while others have none; twice under `vmap`."""
    pull, common = jnp.arange(8.0), jnp.float32(0.5)

    def one(key, i, pull, narrower):
        def loss(w, stats, batch):
            return jnp.sum(batch.mask * (w - pull * common - batch.y) ** 2), stats

        opt = local.sgd(0.01)(jnp.int32(0))
        plan = toys.PLAN._replace(narrower=narrower)
        return local.local_sgd(key, loss, jnp.float32(0), (), opt, data.shard(i), plan).params

    def many(narrower):
        clients = jax.vmap(lambda key, i, pull: one(key, i, pull, narrower), (None, 0, 0))
        return jax.jit(jax.vmap(clients, (0, None, None)))(jax.random.split(toys.KEY, 3), jnp.arange(8), pull)

    got, want = many((1, 4)), many(())
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert len(np.unique(got)) >= 16  # of clients of one batch, whose order does not matter, some are the same


def test_narrower_lanes_take_numbers_of_python_as_loops_do(data):
    """A carry of `0.0` takes the type that the first step gives it."""

    def run(narrower, chunk):
        def loss(w, stats, batch):
            return jnp.sum(batch.mask * (w - batch.y) ** 2), {
                'm': stats['m'] * 2 + jnp.bfloat16(0.5),
                'n': stats['n'] + 0.5,
            }

        def one(i):
            opt, plan = local.sgd(0.01)(jnp.int32(0)), toys.PLAN._replace(narrower=narrower)
            found = local.local_sgd(toys.KEY, loss, 0.0, {'m': 0.0, 'n': 0}, opt, data.shard(i), plan)
            return found.params, found.stats

        return jax.jit(jax.vmap(one))(jnp.arange(8)) if chunk > 1 else jax.jit(one)(3)

    for chunk in (1, 8):
        got, want = run((1, 2), chunk), run((), chunk)
        assert jax.tree.map(lambda u: u.dtype, got) == jax.tree.map(lambda u: u.dtype, want)
        toys.same(got, want, atol=1e-6)


@pytest.mark.slow
def test_narrower_lanes_are_differentiated_forwards(data):
    """And serve sweeps of settings in which no client has lanes of its own."""

    def trained(lr, i, narrower):
        def loss(w, stats, batch):
            return jnp.sum(batch.mask * (w - batch.y) ** 2), stats

        plan = toys.PLAN._replace(narrower=narrower)
        return local.local_sgd(
            toys.KEY, loss, jnp.float32(0), (), local.sgd(lr, 0.0)(jnp.int32(0)), data.shard(i), plan
        )

    rates, ids = jnp.array([0.001, 0.002, 0.003]), jnp.arange(8)

    def found(narrower):
        def alone(lr, i):
            return trained(lr, i, narrower).params

        def together(lr):
            return jax.vmap(alone, (None, 0))(lr, ids)

        one = jnp.float32(1)
        return (
            jax.vmap(alone, (0, None))(rates, 3),
            jax.jvp(lambda lr: alone(lr, 3), (rates[0],), (one,)),
            jax.jvp(together, (rates[0],), (one,)),
        )

    toys.same(found((1, 2)), found(()), atol=1e-5)
    sweep = jax.vmap(lambda lr: trained(lr, 3, (1, 2)))(rates)
    assert sweep.info.lane_slots.tolist() == sweep.info.slots.tolist()


@pytest.mark.slow
def test_tails_leave_augmentation_and_batch_statistics_alone():
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (23, 8, 8, 3), np.uint8), rng.integers(0, 4, 23).astype(np.int32)
    clients = federate(x, y, [np.arange(13), np.arange(13, 23)], 4)
    preprocess = images.pipeline(crop=1, flip=True)
    body = models.ResNet(widths=(4, 8), blocks=(1, 1), norm='batch')
    task = objective(models.from_flax(body, preprocess), heads.linear(), losses.cross_entropy)
    ends = []
    for tails in ((), (4, 6)):
        algorithm = fedavg.algorithm(task, local.sgd(0.1), plan=local.Plan(8, 2, tails))
        state = simulate.init(algorithm, toys.KEY, clients)
        ends.append(simulate.compiled(simulate.make_round(algorithm, chunk=1))(toys.KEY, state, clients))
    toys.same(ends[1][0], ends[0][0], atol=1e-5)
    assert float(ends[0][1].padded_work) == pytest.approx(1 - 23 / 32, abs=1e-6)
    assert float(ends[1][1].padded_work) == pytest.approx(1 - 23 / (8 + 6 + 8 + 4), abs=1e-6)


@pytest.mark.slow
def test_narrower_lanes_leave_augmentation_and_batch_statistics_alone():
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (29, 8, 8, 3), np.uint8), rng.integers(0, 4, 29).astype(np.int32)
    clients = federate(x, y, [np.arange(17), np.arange(17, 26), np.arange(26, 29)], 4)
    body = models.ResNet(widths=(4, 8), blocks=(1, 1), norm='batch')
    task = objective(models.from_flax(body, images.pipeline(crop=1, flip=True)), heads.linear(), losses.cross_entropy)
    ends = []
    for narrower in ((), (1, 2)):
        algorithm = fedavg.algorithm(task, local.sgd(0.1), plan=local.Plan(8, 2, (), narrower))
        state = simulate.init(algorithm, toys.KEY, clients)
        ends.append(simulate.compiled(simulate.make_round(algorithm, chunk=3))(toys.KEY, state, clients))
    toys.same(ends[1][0], ends[0][0], atol=1e-5)
    assert float(ends[0][1].padded_work) == pytest.approx(1 - 29 / (3 * 24), abs=1e-6)
    assert float(ends[1][1].padded_work) == pytest.approx(1 - 29 / (24 + 16 + 8), abs=1e-6)


def test_vmapped_clients_of_different_length_equal_single_ones(data, start):
    ids = jnp.arange(8)
    together = jax.jit(jax.vmap(lambda i: train(jax.random.fold_in(toys.KEY, i), start, data.shard(i))))(ids)
    for i in range(8):
        alone = train(jax.random.fold_in(toys.KEY, i), start, data.shard(i))
        toys.same(jax.tree.map(lambda u, i=i: u[i], together), alone, atol=1e-6)


def test_padding_never_changes_a_result(start):
    sizes = [20, 3, 17]
    plain, padded = toys.ragged(sizes), toys.ragged(sizes, padding=44)
    assert padded.index.shape[1] == plain.index.shape[1] + 44
    for k in range(3):
        # A batch no longer than the largest client, so that only the table's padding differs.
        plan = local.Plan(16, 3)
        toys.same(train(toys.KEY, start, plain.shard(k), plan), train(toys.KEY, start, padded.shard(k), plan))


def test_nobody_takes_no_step(data, start):
    out = train(toys.KEY, start, data.shard(data.num_clients))
    toys.same(out.params, start.params)
    assert int(out.info.steps) == 0
    assert float(out.info.loss) == 0


def test_loss_is_the_mean_over_examples_visited(data, start):
    """With a rate of 0 it is the loss of the model itself, whatever the padding of the last batch."""
    still = local.sgd(0.0)(0)
    out = train(toys.KEY, start, data.shard(3), opt=still)
    rows = data.index[3, :33]
    want = loss(start, (), Batch(data.x[rows], data.y[rows]))[0]
    np.testing.assert_allclose(out.info.loss, want, rtol=1e-5)


def test_sgd_is_heavy_ball_with_coupled_decay():
    theta, m = np.array([1.0, -2.0]), np.zeros(2)
    opt = local.sgd(0.1, momentum=0.9, weight_decay=0.01, decay=0.5)(jnp.int32(3))
    params, state = jnp.asarray(theta, jnp.float32), None
    state = opt.init(params)
    for g in np.array([[0.3, 0.1], [-0.2, 0.4], [0.5, 0.5]]):
        m = 0.9 * m + g + 0.01 * theta
        theta = theta - 0.1 * 0.5**3 * m
        updates, state = opt.update(jnp.asarray(g, jnp.float32), state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(params, theta, rtol=1e-5)


def test_sweep_keeps_index_order_and_zeroes_padding(data):
    shard = data.shard(3)
    out = jax.jit(lambda s: local.sweep(lambda batch: 2 * batch.x, s, 8))(shard)
    assert out.shape == (data.index.shape[1], toys.DIM)
    np.testing.assert_array_equal(out[:33], 2 * data.x[shard.index[:33]])
    np.testing.assert_array_equal(out[33:], 0)


def test_batches_have_keys_of_their_own(data):
    """In each step of each epoch, and in a sweep."""

    def noisy(params, stats, batch):
        count, draws = stats
        return params * 0.0, (count + 1, draws.at[count].set(jax.random.uniform(batch.key)))

    shard = data.shard(0)
    start = jnp.int32(0), jnp.zeros(20)
    out = local.local_sgd(toys.KEY, noisy, jnp.float32(1), start, toys.opt(0), shard, local.Plan(16, 2))
    steps = int(out.stats[0])
    assert steps == 2 * 7
    assert len(np.unique(out.stats[1][:steps])) == steps

    def drawn(batch):
        return jnp.zeros((8, 1)) if batch.key is None else jax.random.uniform(batch.key, (8, 1))

    swept = local.sweep(drawn, shard, 8, toys.KEY)[:100]
    assert len(np.unique(swept)) == 100


def test_sizes_do_not_recompile(data, start):
    fn = jax.jit(chex.assert_max_traces(lambda k: train(toys.KEY, start, data.shard(k)), n=1))
    for k in range(9):
        fn(k)


@pytest.mark.parametrize('plan', [local.Plan(0, 1), local.Plan(16, 0), local.Plan(16, 2**31)])
def test_plan_without_work_is_refused(data, start, plan):
    with pytest.raises(ValueError, match=r'at least 1|take fewer'):
        train(toys.KEY, start, data.shard(0), plan)


@pytest.mark.parametrize('tails', [(16,), (8, 4), (0,), (2.5,), [4], (4, 4)])
def test_tails_that_cannot_be_are_refused(data, start, tails):
    with pytest.raises(ValueError, match='tails of plan'):
        train(toys.KEY, start, data.shard(0), local.Plan(16, 1, tails))


@pytest.mark.parametrize('narrower', [(4, 2), (0,), (2.5,), [2], (2, 2)])
def test_narrower_lanes_that_cannot_be_are_refused(data, start, narrower):
    with pytest.raises(ValueError, match='narrower of plan'):
        train(toys.KEY, start, data.shard(0), local.Plan(16, 1, (), narrower))


def test_negative_rates_are_refused():
    with pytest.raises(ValueError, match='lr must not be negative'):
        local.sgd(-0.1)


def test_every_number_of_sgd_may_be_traced():
    w = jnp.array([3.0, 0.5])

    def step(*numbers):
        updates, _ = (opt := local.sgd(*numbers)(jnp.int32(1))).update(jnp.array([1.0, -2.0]), opt.init(w), w)
        return updates

    numbers = (0.1, 0.9, 5e-4, 0.99)
    np.testing.assert_allclose(jax.jit(step)(*numbers), step(*numbers), rtol=1e-6)
