import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from fedjax_nc import aggregators, checks, classwise, local, losses, population, privacy, simulate, training
from fedjax_nc.algorithms import fedavg, fedetf, fedprox, finetune, scaffold
from fedjax_nc.base import State
from fedjax_nc.data import federated, host

algorithm = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN)


def test_cohorts_are_drawn_uniformly_without_replacement():
    keys = jax.random.split(toys.KEY, 3000)
    drawn = np.asarray(jax.vmap(lambda k: simulate.choose(k, 8, 3))(keys))
    assert all(len(set(row)) == 3 for row in drawn)
    np.testing.assert_allclose(np.bincount(drawn.ravel(), minlength=8) / drawn.size, 1 / 8, atol=0.01)


def test_the_loss_of_a_round_is_that_of_all_examples(data):
    state = simulate.init(algorithm, toys.KEY, data)
    report = jax.jit(simulate.make_round(algorithm, chunk=3))(toys.KEY, state, data)[1]
    info = report.info
    np.testing.assert_allclose(report.loss, np.average(info.loss, weights=info.examples), rtol=1e-6)
    assert abs(report.loss - np.mean(info.loss[:8])) > 0.01


def test_the_last_of_a_large_population_is_drawn_as_often():
    keys = jax.random.split(toys.KEY, 100_000)
    drawn = np.asarray(jax.jit(jax.vmap(lambda k: simulate.choose(k, 4097, 1)))(keys)).ravel()
    assert np.bincount(drawn, minlength=4097)[[0, 4096]].min() > 8  # of 24


def test_cohorts_of_a_large_population_are_drawn_uniformly():
    keys = jax.random.split(toys.KEY, 1000)
    drawn = np.asarray(jax.jit(jax.vmap(lambda k: simulate.choose(k, 5000, 600)))(keys))
    assert all(len(set(row)) == 600 for row in drawn[:200])
    assert drawn.min() == 0
    assert drawn.max() == 4999
    times = np.bincount(drawn.ravel(), minlength=5000)  # of each client: mean 120, standard deviation 10.3
    assert abs(times - 120).max() < 5.5 * 10.3
    # Whether one client is drawn says next to nothing about its neighbour: expected 0.12 * 599 / 4999 = 0.01438.
    pairs = np.mean([np.isin(row + 1, row).mean() * 0.12 for row in drawn[:500]])
    np.testing.assert_allclose(pairs, 0.01438, atol=0.0002)


def test_impossible_cohorts_and_chunks_are_refused(data):
    state = simulate.init(algorithm, toys.KEY, data)
    with pytest.raises(ValueError, match='cohort of 9 cannot be drawn from 8'):
        simulate.make_round(algorithm, cohort=9)(toys.KEY, state, data)
    with pytest.raises(ValueError, match='cohort must be at least 1'):
        simulate.make_round(algorithm, cohort=0)
    with pytest.raises(ValueError, match='chunk must be at least 1'):
        simulate.make_round(algorithm, chunk=0)


def test_state_of_another_population_is_refused(data):
    kept = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN, persist_momentum=True)
    state = simulate.init(kept, toys.KEY, toys.ragged([20] * 5))
    with pytest.raises(ValueError, match='state has 5 clients and the data 8'):
        simulate.make_round(kept)(toys.KEY, state, data)


@pytest.mark.parametrize(
    ('make', 'missing'),
    [
        (lambda: finetune.algorithm(toys.task, toys.opt), 'params'),  # a stage on that of training
        (lambda: scaffold.algorithm(toys.task, toys.opt), 'c'),
        (lambda: fedetf.algorithm(toys.tiny, toys.opt), 'proj'),  # another head
    ],
)
def test_an_error_on_a_state_of_another_algorithm_says_whence_it_may_come(data, make, missing):
    algorithm, state = make(), simulate.init(fedavg.algorithm(toys.task, toys.opt), toys.KEY, data)
    for work in (
        lambda: simulate.make_round(algorithm)(toys.KEY, state, data),
        lambda: simulate.compiled(simulate.make_round(algorithm))(toys.KEY, state, data),
        lambda: training.run(algorithm, toys.KEY, state, data, rounds=1, progress=False),
        lambda: population.make_round(algorithm)(
            toys.KEY,
            State(state.server, population.init(fedavg.algorithm(toys.task, toys.opt), toys.KEY, data).clients),
            data,
        ),
    ):
        with pytest.raises((AttributeError, KeyError, ValueError), match=f"'{missing}'") as raised:
            work()
        assert any('looks like that of another algorithm' in note for note in raised.value.__notes__)


@pytest.mark.parametrize('error', [KeyError, ValueError])
@pytest.mark.parametrize('stage', [False, True])
def test_an_error_of_an_algorithm_on_its_own_state_is_left_alone(data, stage, error):
    def client(key, server, client, shard):
        raise error('mine')

    trained = fedavg.algorithm(toys.task, toys.opt)
    algorithm = (finetune.algorithm(toys.task, toys.opt) if stage else trained)._replace(client=client)
    state = simulate.init(trained, toys.KEY, data)
    if stage:
        state = simulate.join(algorithm, toys.KEY, state.server, data.num_clients)
    with pytest.raises(error, match='mine') as raised:
        simulate.make_round(algorithm)(toys.KEY, state, data)
    assert not any('another algorithm' in note for note in getattr(raised.value, '__notes__', ()))


def test_a_refusal_of_something_else_is_left_alone(data):
    def client(key, server, client, shard):
        raise ValueError('mine')

    algorithm = fedetf.algorithm(toys.tiny, toys.opt)._replace(client=client)
    with pytest.raises(ValueError, match='mine') as raised:
        simulate.make_round(algorithm)(
            toys.KEY, simulate.init(fedavg.algorithm(toys.task, toys.opt), toys.KEY, data), data
        )
    assert not any('another algorithm' in note for note in getattr(raised.value, '__notes__', ()))


@pytest.mark.parametrize(
    ('ids', 'match'),
    [
        ([-1], r'\[0, 8\]'),
        ([9], r'\[0, 8\]'),
        ([1, 2, 1], 'client 1 is there more than once'),
        ([0.0, 1.0], 'integers'),
        ([[0, 1]], 'shape'),
        (3, 'shape'),
    ],
)
def test_ids_that_name_no_cohort_are_refused_where_they_are_known(data, ids, match):
    state = simulate.init(algorithm, toys.KEY, data)
    with pytest.raises(ValueError, match=match):
        simulate.make_round(algorithm)(toys.KEY, state, data, jnp.asarray(ids))
    kept = population.init(algorithm, toys.KEY, data)
    with pytest.raises(ValueError, match=match):
        population.make_round(algorithm)(toys.KEY, kept, data, jnp.asarray(ids))


@pytest.mark.slow
def test_ids_that_are_traced_become_nobody_where_they_are_repeated_or_out_of_range(data):
    kept = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN, persist_momentum=True)
    state, run = simulate.init(kept, toys.KEY, data), jax.jit(simulate.make_round(kept, chunk=1))
    bad, report = run(toys.KEY, state, data, jnp.array([3, -1, 3, 99, 6, 8, 3]))
    good, _ = run(toys.KEY, state, data, jnp.array([3, 8, 8, 8, 6, 8, 8]))
    assert sorted(np.asarray(report.ids).tolist()) == [3, 6, 8, 8, 8, 8, 8]
    toys.same(bad, good)
    listed, _ = jax.jit(lambda *ids: simulate.make_round(kept, chunk=1)(toys.KEY, state, data, list(ids)))(3, 6)
    toys.same(listed, good)


def test_a_part_names_its_clients_itself(data):
    state = simulate.init(algorithm, toys.KEY, data)
    part = host.Part(jnp.arange(8), data, 8)
    with pytest.raises(ValueError, match='brings its clients along'):
        simulate.make_round(algorithm)(toys.KEY, state, part, jnp.array([1, 3]))


@pytest.fixture(scope='module')
def poisoned(data):
    """Clients 2 and 6 hold NaN."""
    rows = jnp.stack([data.index[2, 4], data.index[6, 0]])
    return data._replace(x=data.x.at[rows, 0].set(jnp.nan))


class TestBrokenClients:
    @pytest.mark.parametrize('chunk', [1, 3])
    def test_are_named_and_the_others_are_those_of_a_round_without_them(self, data, poisoned, chunk):
        kept = fedavg.algorithm(
            toys.task, toys.opt, plan=toys.PLAN, persist_momentum=True,
            aggregate=aggregators.stacked(aggregators.coordinate_median),
        )  # fmt: skip
        state, run = simulate.init(kept, toys.KEY, data), jax.jit(simulate.make_round(kept, chunk=chunk))
        after, report = run(toys.KEY, state, poisoned)
        clean, _ = run(toys.KEY, state, data)
        assert bool(report.finite)
        assert sorted(np.asarray(report.ids)[np.asarray(report.broken)].tolist()) == [2, 6]
        assert np.isfinite(report.loss)
        sound = [k for k in range(8) if k not in (2, 6)]
        toys.same(*(jax.tree.map(lambda u: u[jnp.array(sound)], s.clients) for s in (after, clean)))
        _, others = run(toys.KEY, state, data, jnp.array([*sound, 8, 8]))
        np.testing.assert_allclose(report.loss, others.loss, rtol=1e-5)
        assert not others.broken.any()

    def test_go_on_in_private_from_what_they_had(self, data, poisoned):
        """A client whose message is dropped keeps its state, and is sound in the next round."""
        hidden = privacy.private(
            scaffold.algorithm(toys.task, toys.opt, plan=toys.PLAN), clip=10.0, noise_multiplier=0.0, cohort=8
        )
        run, state = jax.jit(simulate.make_round(hidden, chunk=3)), simulate.init(hidden, toys.KEY, data)
        before, _ = run(toys.KEY, state, data)
        lost, report = run(toys.KEY, before, poisoned)
        assert int(report.broken.sum()) == 2
        for k in (2, 6):
            toys.same(*(jax.tree.map(lambda u, k=k: u[k], s.clients) for s in (lost, before)))
        _, report = run(toys.KEY, lost, data)
        assert not report.broken.any()

    def test_are_known_by_what_they_send_and_keep_too(self, data):
        kept = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN, persist_momentum=True)

        def client(key, server, client, shard):
            new, message, info = kept.client(key, server, client, shard)
            wrong = jnp.where(shard.size == 33, jnp.nan, 0.0)  # client 3
            huge = jnp.where(shard.size == 60, jnp.inf, 0.0)  # client 2
            return jax.tree.map(lambda u: u + wrong, new), message._replace(stats=huge), info

        odd = kept._replace(client=client, aggregate=aggregators.nothing, server=lambda key, server, aggregate: server)
        state = simulate.init(odd, toys.KEY, data)
        _, report = jax.jit(simulate.make_round(odd, chunk=3))(toys.KEY, state, data)
        assert sorted(np.asarray(report.ids)[np.asarray(report.broken)].tolist()) == [2, 3]
        assert bool(report.finite)

    def test_may_hold_infinity_by_design(self, data):
        kept = algorithm._replace(
            init_client=lambda key, server: jnp.float32(jnp.inf),
            client=lambda key, server, client, shard: (client, *algorithm.client(key, server, (), shard)[1:]),
        )
        _, report = jax.jit(simulate.make_round(kept))(toys.KEY, simulate.init(kept, toys.KEY, data), data)
        assert not report.broken.any()

    def test_spoil_a_mean(self, data, poisoned):
        report = jax.jit(simulate.make_round(algorithm))(toys.KEY, simulate.init(algorithm, toys.KEY, data), poisoned)[
            1
        ]
        assert not bool(report.finite)
        assert int(report.broken.sum()) == 2
        assert np.isfinite(report.loss)  # of the others

    def test_leave_no_loss_if_there_is_nobody_else(self, data, poisoned):
        run = jax.jit(simulate.make_round(algorithm))
        report = run(toys.KEY, simulate.init(algorithm, toys.KEY, data), poisoned, jnp.array([2, 6, 8]))[1]
        assert np.isnan(report.loss)

    def test_are_counted_under_privacy_too(self, data, poisoned):
        hidden = privacy.private(algorithm, clip=1.0, noise_multiplier=0.0, cohort=8)
        state, run = simulate.init(hidden, toys.KEY, data), jax.jit(simulate.make_round(hidden))
        _, report = run(toys.KEY, state, poisoned)
        assert bool(report.finite)
        assert sorted(np.asarray(report.ids)[np.asarray(report.broken)].tolist()) == [2, 6]


@pytest.mark.parametrize('aggregate', [aggregators.mean, aggregators.uniform, aggregators.total])
def test_what_nobody_and_the_empty_send_leaves_no_trace(data, aggregate):
    plain = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN, aggregate=aggregate)

    def client(key, server, client, shard):
        new, message, info = plain.client(key, server, client, shard)
        return new, jax.tree.map(lambda u: jnp.where(shard.size > 0, u, jnp.nan), message), info

    odd, ids = plain._replace(client=client), jnp.array([0, 2, 3, 8])
    some = data._replace(size=data.size.at[2].set(0))
    states = [
        jax.jit(simulate.make_round(a))(toys.KEY, simulate.init(a, toys.KEY, data), some, ids)[0] for a in (odd, plain)
    ]
    toys.same(*states)
    assert all(np.isfinite(u).all() for u in jax.tree.leaves(states[0]))


def test_numbers_of_clients_beyond_int32_are_refused_before_they_wrap(data):
    state = simulate.init(algorithm, toys.KEY, data)
    with pytest.raises(ValueError, match='4294967296'):
        simulate.make_round(algorithm)(toys.KEY, state, data, np.array([2**32, 2]))


@pytest.mark.slow
@pytest.mark.parametrize('chunk', [1, 3, 8])
def test_padded_work_with_tails_is_that_of_each_loop_over_batches(chunk):
    """Clients side by side wait for each other in every one of them."""
    sizes, tails, b = (5, 16, 9, 23, 2, 18, 13, 8), (2, 4), 8
    data = toys.ragged(sizes)
    plan = local.Plan(batch_size=b, epochs=2, tails=tails)
    algorithm = fedavg.algorithm(toys.task, toys.opt, plan=plan)
    state = simulate.init(algorithm, toys.KEY, data)
    report = jax.jit(simulate.make_round(algorithm, chunk=chunk))(toys.KEY, state, data)[1]

    def rows(n):
        width = next((tail for tail in tails if 0 < n % b <= tail), b)
        return np.array([n // b * b + b * (width == b and n % b > 0), *(tail * (width == tail) for tail in tails)])

    ranked = sorted(sizes, reverse=True) + [0] * (-len(sizes) % chunk)
    chunks = np.array([rows(n) for n in ranked]).reshape(-1, chunk, 3)
    paid = 2 * chunk * chunks.max(1).sum()
    np.testing.assert_allclose(report.padded_work, 1 - 2 * sum(sizes) / paid, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(('chunk', 'widths'), [(1, (1,)), (3, (3, 2, 1)), (4, (4, 2, 1)), (8, (8, 2, 1))])
def test_padded_work_with_narrower_lanes_is_what_they_compute(chunk, widths):
    sizes = (5, 16, 90, 23, 2, 48, 13, 8)
    data = toys.ragged(sizes)
    plan = local.Plan(batch_size=8, epochs=2, narrower=(1, 2))
    plain, algorithm = (fedavg.algorithm(toys.task, toys.opt, plan=p) for p in (plan._replace(narrower=()), plan))
    state = simulate.init(algorithm, toys.KEY, data)
    after, report = jax.jit(simulate.make_round(algorithm, chunk=chunk))(toys.KEY, state, data)
    wanted, other = jax.jit(simulate.make_round(plain, chunk=chunk))(toys.KEY, state, data)
    toys.same(after, wanted, atol=1e-6)
    np.testing.assert_allclose(report.padded_work, 1 - 2 * sum(sizes) / computed(sizes, chunk, widths), rtol=1e-5)
    assert float(report.padded_work) <= float(other.padded_work)
    assert chunk == 1 or float(report.padded_work) < float(other.padded_work) - 0.1


def computed(sizes, chunk, widths):
    """Batch rows of two epochs in batches of 8, in the fewest of these lanes that hold all clients not yet done."""
    ranked = sorted(sizes, reverse=True) + [0] * (-len(sizes) % chunk)
    batches = -(-np.array(ranked).reshape(-1, chunk) // 8)
    busy = (batches[..., None] > np.arange(batches.max())).sum(1)
    return 16 * sum(min(n for n in widths if n >= lanes) for lanes in busy[busy > 0])


@pytest.mark.slow
@pytest.mark.parametrize('order', ['ab', 'ba', 'aba', 'bab', 'aa', 'bb'])
def test_padded_work_of_phases_of_which_some_count_their_lanes(order):
    """Phase a drops lanes that are done; in phase b all wait for the longest."""
    sizes, chunk = (5, 16, 90, 23, 2, 48, 13, 8), 4
    data, plan = toys.ragged(sizes), local.Plan(batch_size=8, epochs=2)
    plain = fedavg.algorithm(toys.task, toys.opt, plan=plan)
    phases = {'a': fedavg.algorithm(toys.task, toys.opt, plan=plan._replace(narrower=(1, 2))), 'b': plain}

    def client(key, server, client, shard):
        new, message, info = phases[order[0]].client(key, server, client, shard)
        for phase in order[1:]:
            info = local.joined(info, phases[phase].client(key, server, client, shard)[2])
        return new, message, info

    algorithm = plain._replace(client=client)
    state = simulate.init(algorithm, toys.KEY, data)
    report = jax.jit(simulate.make_round(algorithm, chunk=chunk))(toys.KEY, state, data)[1]
    paid = {'a': computed(sizes, chunk, (4, 2, 1)), 'b': computed(sizes, chunk, (4,))}
    wanted = 1 - len(order) * 2 * sum(sizes) / sum(paid[phase] for phase in order)
    np.testing.assert_allclose(report.padded_work, wanted, rtol=1e-5)


@pytest.mark.parametrize('chunk', [1, 3, 8])
def test_padded_work_is_what_the_lanes_compute_beyond_the_examples(data, chunk):
    state = simulate.init(algorithm, toys.KEY, data)
    report = simulate.make_round(algorithm, chunk=chunk)(toys.KEY, state, data)[1]
    sizes = sorted(map(int, data.size), reverse=True)
    steps = [2 * -(-n // 16) for n in sizes]
    paid = sum(16 * chunk * steps[at] for at in range(0, 8, chunk))
    np.testing.assert_allclose(report.padded_work, 1 - 2 * sum(sizes) / paid, rtol=1e-5)


def test_sorting_by_size_saves_work():
    """Alternating small and large clients: chunks of four waste little because like sizes are put together."""
    data = toys.ragged([160, 16] * 8)
    state = simulate.init(algorithm, toys.KEY, data)
    assert float(simulate.make_round(algorithm, chunk=4)(toys.KEY, state, data)[1].padded_work) < 0.01


def test_a_nan_is_reported(data):
    state = simulate.init(algorithm, toys.KEY, data)
    bad = data._replace(x=data.x.at[data.index[0, 0]].set(jnp.nan))
    report = simulate.make_round(algorithm)(toys.KEY, state, bad)[1]
    assert not bool(report.finite)


def test_new_sizes_and_cohorts_do_not_recompile(data):
    run = jax.jit(simulate.make_round(algorithm, cohort=4, chunk=2))
    state = simulate.init(algorithm, toys.KEY, data)
    for t, sizes in enumerate(([100, 7, 60, 33, 200, 1, 50, 149], [10] * 8, [1, 1, 1, 1, 1, 1, 1, 200])):
        state, _ = run(jax.random.fold_in(toys.KEY, t), state, data._replace(size=jnp.asarray(sizes, jnp.int32)))
    assert run._cache_size() == 1


def test_other_rates_cohorts_rounds_and_partitions_do_not_recompile():
    """One program for all values of a rate, all cohorts up to its size, and all partitions of one width."""
    traces = []

    def build(settings):
        traces.append(settings)
        client = local.sgd(settings['lr'], weight_decay=0, decay=settings['decay'])
        return simulate.make_round(fedprox.algorithm(toys.task, client, mu=settings['mu'], plan=toys.PLAN), chunk=2)

    run = simulate.compiled(simulate.tuned(build))
    wide = toys.ragged([100, 7, 60, 33, 200, 1, 50, 149])
    parts = [wide.index[k, :n] for k, n in enumerate([5, 90, 3, 3, 3, 3, 3, 150])]
    other = federated.federate(wide.x, wide.y, parts, toys.CLASSES, width=wide.index.shape[1])
    for t, (lr, ids, clients) in enumerate(
        [(0.1, [0, 1, 2, 3], wide), (0.01, [7, 5, 8, 8], wide), (0.3, [2, 6, 0, 8], other)]  # 8 is nobody
    ):
        settings = {'lr': lr, 'decay': 0.9, 'mu': 0.01 * t}
        key = jax.random.fold_in(toys.KEY, t)
        before = simulate.init(algorithm, toys.KEY, clients)
        want = jax.jit(build(settings))(key, before, clients, jnp.array([k for k in ids if k < 8]))[0]
        toys.same(want, run(key, before, clients, settings, jnp.array(ids))[0], atol=2e-5)
    assert run._cache_size() == 1
    assert len(traces) == 4  # once compiled, and three times for comparison


def test_key_decides_everything(data):
    run = jax.jit(simulate.make_round(algorithm, cohort=4))
    state = simulate.init(algorithm, toys.KEY, data)
    first, again, other = (run(jax.random.key(s), state, data)[0] for s in (1, 1, 2))
    toys.same(first, again)
    w = [np.asarray(s.server.variables.params['head']['w']) for s in (first, other)]
    assert np.abs(w[0] - w[1]).max() > 1e-4


def test_messages_are_folded_not_stacked(data):
    """Temporary memory of a round does not grow with the cohort, only with the chunk."""

    def temporary(clients, chunk):
        wide = toys.ragged([16] * clients)
        state = simulate.init(algorithm, toys.KEY, wide)
        run = jax.jit(simulate.make_round(algorithm, chunk=chunk))
        return run.lower(toys.KEY, state, wide).compile().memory_analysis().temp_size_in_bytes

    few, many, stacked = temporary(8, 2), temporary(64, 2), temporary(64, 64)
    assert many < 1.5 * few
    assert stacked > 3 * many


def test_seeds_do_not_replay_each_others_cohorts():
    """Not one round later or earlier, either, as `seed + round` would."""
    cohorts = [
        [simulate.choose(simulate.cohort_key(jax.random.fold_in(jax.random.key(seed), t)), 100, 10) for t in range(8)]
        for seed in range(3)
    ]
    drawn = {tuple(sorted(np.asarray(ids).tolist())) for rounds in cohorts for ids in rounds}
    assert len(drawn) == 24


@pytest.mark.parametrize('cohort', [2, None])
def test_participants_are_those_that_rounds_report(data, cohort):
    algorithm = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN)
    run, state, seen = (
        jax.jit(simulate.make_round(algorithm, cohort=cohort)),
        simulate.init(algorithm, toys.KEY, data),
        set(),
    )
    for t in range(3):
        np.testing.assert_array_equal(
            np.flatnonzero(simulate.participants(toys.KEY, t, data.num_clients, cohort)), sorted(seen)
        )
        state, report = run(jax.random.fold_in(toys.KEY, t), state, data)
        seen |= {int(k) for k in report.ids if k < data.num_clients}
    assert (len(seen) == 8) == (cohort is None)


def test_a_round_of_nobody_pads_nothing(data):
    none = data._replace(size=jnp.zeros_like(data.size), counts=jnp.zeros_like(data.counts))
    algorithm = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN)
    _, report = simulate.make_round(algorithm)(toys.KEY, simulate.init(algorithm, toys.KEY, data), none)
    assert float(report.padded_work) == 0.0


def test_keys_that_draw_by_lane_are_refused(data):
    algorithm = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN)
    with pytest.raises(ValueError, match=r"key is of rbg, .* impl='threefry2x32'"):
        simulate.init(algorithm, jax.random.key(0, impl='rbg'), data)
    state = simulate.init(algorithm, toys.KEY, data)
    with pytest.raises(ValueError, match='key is of rbg'):
        jax.jit(simulate.make_round(algorithm))(jax.random.key(0, impl='rbg'), state, data)
    with pytest.raises(ValueError, match='key is of rbg'):
        simulate.join(algorithm, jax.random.key(0, impl='rbg'), state.server, 3)


def test_a_round_traces_its_client_once(data):
    """Small experiments spend more time in that than in rounds."""
    seen = []

    def client(*args):
        seen.append(args)
        return plain.client(*args)

    plain = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN)
    state = simulate.init(plain, toys.KEY, data)
    for chunk in (1, 4):
        simulate.compiled(simulate.make_round(plain._replace(client=client), chunk=chunk)).lower(toys.KEY, state, data)
    assert len(seen) == 2


@pytest.mark.slow
def test_a_round_that_is_compiled_for_once_is_the_same(data):
    algorithm = fedprox.algorithm(toys.task, toys.opt, mu=0.1, plan=toys.PLAN)
    ends = []
    for once in (False, True):
        state = simulate.init(algorithm, toys.KEY, data)
        ends.append(simulate.compiled(simulate.make_round(algorithm), once=once)(toys.KEY, state, data)[0])
    toys.same(*ends, atol=1e-6)


@pytest.mark.slow
def test_functions_are_judged_as_they_are_called():
    # What `functools.wraps` has put around a function tells the arguments of the function, which may be others.
    plain = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN)

    def bound(task, key, server, client, shard):
        return plain.client(key, server, client, shard)

    @functools.wraps(bound)
    def client(key, server, client, shard):
        return bound(toys.task, key, server, client, shard)

    def two(logits, labels):
        return losses.cross_entropy(logits, labels)

    @functools.wraps(two)
    def loss(logits, labels, counts):
        return two(logits, labels)

    data = toys.ragged([20, 30])
    state = simulate.init(plain, toys.KEY, data)
    expected = simulate.make_round(plain)(toys.KEY, state, data)[0]
    for form in (client, jax.jit(client), functools.partial(bound, toys.task)):
        found = simulate.make_round(plain._replace(client=form))(toys.KEY, state, data)[0]
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), found, expected)
    for form in (loss, jax.jit(loss), jax.vmap(losses.cross_entropy)):
        checks.called('loss', form, 'logits, labels, counts')
    with pytest.raises(ValueError, match='too many positional arguments'):
        checks.called('loss', jax.jit(two), 'logits, labels, counts')


def test_states_are_compared_by_what_they_are():
    # A set prints in any order, and an object of one's own by its place in memory.
    class Kind:
        def __eq__(self, other):
            return isinstance(other, Kind)

        def __hash__(self):
            return 0

        def __call__(self):
            pass

    kept = jax.tree_util.Partial(Kind(), jnp.zeros(3))
    assert checks.kept('`client`', kept, jax.tree_util.Partial(Kind(), jnp.ones(3))) is not None
    with pytest.raises(ValueError, match=r'another kind than it was given: .*\. A state keeps its structure'):
        checks.kept('`client`', kept, jax.tree_util.Partial(print, jnp.zeros(3)))


@pytest.mark.parametrize('chunk', [1, 3])
def test_pythons_numbers_are_states_too(chunk):
    plain = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN)

    def client(key, server, client, shard):
        return (1.0, *plain.client(key, server, (), shard)[1:])

    counting = plain._replace(init_client=lambda key, server: jnp.float32(0), client=client)
    data = toys.ragged([20, 30, 10])
    state = simulate.init(counting, toys.KEY, data)
    found, _ = simulate.make_round(counting, chunk=chunk)(toys.KEY, state, data)
    np.testing.assert_array_equal(found.clients, np.ones(3, np.float32))


def test_numbers_that_yield_may_become_others_in_several_rounds():
    plain = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN)
    growing = plain._replace(
        init=lambda key, data: {'own': plain.init(key, data), 'sum': 0},
        client=lambda key, server, *rest: plain.client(key, server['own'], *rest),
        server=lambda key, server, aggregate: {
            'own': plain.server(key, server['own'], aggregate), 'sum': server['sum'] + aggregate.weight
        },
    )  # fmt: skip
    data = toys.ragged([20, 30])
    state = State(growing.init(toys.KEY, data), ())
    run = simulate.several(simulate.make_round(growing))
    found, _ = run(jax.random.split(toys.KEY, 2), state, data)
    assert float(found.server['sum']) == 100


def test_lanes_of_a_cohort_are_even():
    assert [simulate.even(8, n) for n in (1, 7, 8, 11, 100)] == [1, 7, 8, 6, 5]
    assert simulate.even(100, 101) == 51
    for most in range(1, 20):
        for clients in range(1, 60):
            lanes = simulate.even(most, clients)
            chunks = -(-clients // lanes)
            assert 1 <= lanes <= min(most, clients)
            assert chunks * lanes - clients < chunks  # no chunk has two lanes less than another, or one divides


def test_default_lanes_follow_the_platform_and_the_size_of_a_model():
    small, large = {'w': jnp.zeros(9_999)}, {'w': jnp.zeros(10_000)}
    lanes = lambda server, n, platform: simulate.default_chunk(server, n, platform)  # noqa: E731
    assert [lanes(large, 20, platform) for platform in ('cpu', 'tpu', 'cuda')] == [1, 1, 4]
    assert [lanes(small, 100, platform) for platform in ('cpu', 'tpu', 'cuda')] == [5, 25, 25]
    assert [lanes(large, n, 'cuda') for n in (1, 3, 5, 6, 10, 100)] == [1, 3, 5, 3, 5, 4]  # none of them empty


@pytest.mark.slow
@pytest.mark.parametrize('dtype', ['uint8', 'int8', 'uint32', 'int32'])
def test_clients_may_be_named_by_numbers_of_few_bits(dtype):
    data = toys.ragged([2, 3] * 150)
    ids = jnp.array([1, 2, 100], dtype)
    assert [int(data.shard(i).size) for i in ids] == [3, 2, 2]
    algorithm = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN)
    state = simulate.init(algorithm, toys.KEY, data)
    _, report = jax.jit(simulate.make_round(algorithm))(toys.KEY, state, data, ids)
    assert sorted(report.ids.tolist()) == [1, 2, 100]
    counted = classwise.sums(jnp.ones((6, 2)), jnp.array([0, 44, 44, 99, 127, 1], dtype), jnp.ones(6), 300)[1]
    np.testing.assert_array_equal(counted, np.bincount([0, 44, 44, 99, 127, 1], minlength=300))
