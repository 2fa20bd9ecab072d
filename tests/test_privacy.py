"""User-level privacy against NumPy: what is clipped, what is noisy, and what it is worth."""

import math
import pkgutil
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from fedjax_nc import (
    aggregators,
    algorithms,
    frames,
    heads,
    local,
    losses,
    models,
    objective,
    privacy,
    server_optimizers,
    simulate,
    testing,
)  # fmt: skip
from fedjax_nc.algorithms import (
    ccvr,
    creff,
    ditto,
    fedavg,
    fedaws,
    fedbabu,
    feddyn,
    fedetf,
    fedetf_gmv,
    fedloge,
    fedmmd,
    fednh,
    fednova,
    fedper,
    fedproto,
    fedprox,
    fedrep,
    fedrod,
    fedrs,
    feduh,
    finetune,
    latest,
    moon,
    ratioloss,
    scaffold,
    solo,
)  # fmt: skip
from fedjax_nc.base import Aggregate, Model
from fedjax_nc.data import federate

CLIP, COHORT = 0.5, 5
PLAN = local.Plan(batch_size=1000, epochs=2)  # one batch a client, so that its key is of no account
IDS = [0, 2, 5, 7]
plain = fedavg.algorithm(toys.task, toys.opt, plan=PLAN)


def leaves(u):
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(u)]


@pytest.fixture(scope='module')
def start(data):
    return simulate.init(plain, toys.KEY, data)


@pytest.fixture(scope='module')
def messages(data, start):
    work = jax.jit(plain.client)
    return [leaves(work(toys.KEY, start.server, (), data.shard(k))[1].delta) for k in IDS]


def test_the_server_moves_by_the_sum_of_clipped_messages_over_a_fixed_number(data, start, messages):
    algorithm = privacy.private(plain, clip=CLIP, noise_multiplier=0.0, cohort=COHORT)
    run = jax.jit(simulate.make_round(algorithm, chunk=1))
    after, _ = run(toys.KEY, start, data, jnp.array([*IDS, data.num_clients]))
    norms = [math.sqrt(sum((u**2).sum() for u in m)) for m in messages]
    assert min(norms) < CLIP < max(norms)
    factors = [min(1.0, CLIP / norm) for norm in norms]
    for i, before in enumerate(leaves(start.server.variables.params)):
        want = before + sum(f * m[i] for f, m in zip(factors, messages, strict=True)) / COHORT
        np.testing.assert_allclose(leaves(after.server.variables.params)[i], want, atol=1e-6)


def test_without_clipping_and_noise_it_is_the_uniform_mean(data, start, messages):
    algorithm = privacy.private(plain, clip=1e6, noise_multiplier=0.0, cohort=len(IDS))
    total = jax.tree.unflatten(
        jax.tree.structure(start.server.variables.params),
        [sum(u).astype(np.float32) for u in zip(*messages, strict=True)],
    )
    aggregate = Aggregate(fedavg.Message(total, ()), jnp.float32(99), jnp.float32(len(IDS)))
    after = jax.jit(algorithm.server)(toys.KEY, start.server, aggregate)
    for i, before in enumerate(leaves(start.server.variables.params)):
        want = before + np.mean([m[i] for m in messages], axis=0)
        np.testing.assert_allclose(leaves(after.variables.params)[i], want, atol=1e-6)


def silence(server):
    return Aggregate(fedavg.Message(jax.tree.map(jnp.zeros_like, server.variables.params), ()), 0.0, 0.0)


def test_noise_has_the_promised_size_and_another_one_each_round(data, start):
    algorithm = privacy.private(plain, clip=CLIP, noise_multiplier=3.0, cohort=COHORT)
    step = jax.jit(algorithm.server)
    keys = jax.random.split(toys.KEY, 40)
    moved = [
        np.concatenate(
            [(a - b).ravel() for a, b in zip(*map(leaves, (new, start.server.variables.params)), strict=True)]
        )
        for new in (step(key, start.server, silence(start.server)).variables.params for key in keys)
    ]
    drawn = np.stack(moved)  # 40 rounds of about 300 numbers
    want = 3.0 * CLIP / COHORT
    np.testing.assert_allclose(drawn.std(), want, rtol=0.03)
    assert abs(drawn.mean()) < 4 * want / math.sqrt(drawn.size)
    np.testing.assert_allclose(np.corrcoef(drawn[0], drawn[1])[0, 1], 0.0, atol=0.25)


def test_the_algorithms_own_aggregator_sees_only_the_noisy_mean(start):
    """A median would be more sensitive than a mean, if it saw the messages; a sum gets the mean M times."""
    moves = []
    for aggregate in (aggregators.mean, aggregators.stacked(aggregators.coordinate_median), aggregators.total):
        inner = fedavg.algorithm(toys.task, toys.opt, plan=PLAN, aggregate=aggregate)
        algorithm = privacy.private(inner, clip=CLIP, noise_multiplier=1.0, cohort=COHORT)
        after = jax.jit(algorithm.server)(toys.KEY, start.server, silence(start.server)).variables.params
        moves.append(jax.tree.map(jnp.subtract, after, start.server.variables.params))
    toys.same(moves[1], moves[0], atol=1e-6)
    toys.same(moves[2], jax.tree.map(lambda u: COHORT * u, moves[0]), atol=1e-6)
    assert np.abs(moves[0]['head']['w']).max() > 0.01


def test_messages_that_are_not_finite_are_dropped_and_small_ones_kept():
    small = {'a': jnp.array([0.1, -0.2]), 'b': (jnp.float32(0.05),)}
    toys.same(privacy._clipped(small, 1.0), small)
    for bad in (jnp.nan, jnp.inf):
        toys.same(privacy._clipped({**small, 'b': (bad * jnp.ones(()),)}, 1.0), jax.tree.map(jnp.zeros_like, small))
    large = privacy._clipped(jax.tree.map(lambda u: 100 * u, small), 1.0)
    np.testing.assert_allclose(sum((u**2).sum() for u in leaves(large)), 1.0, rtol=1e-5)
    np.testing.assert_allclose(large['a'] / large['b'][0], small['a'] / small['b'][0], rtol=1e-5)


def test_a_method_with_messages_of_its_own_can_be_private(data):
    inner = scaffold.algorithm(toys.task, toys.opt, plan=PLAN)
    algorithm = privacy.private(inner, clip=1.0, noise_multiplier=0.1, cohort=2)
    state = simulate.init(algorithm, toys.KEY, data)

    @jax.jit
    def alone(server, shard):
        message = algorithm.client(toys.KEY, server, state.server.extra.c, shard)[1]
        return message, algorithm.server(toys.KEY, server, Aggregate(message, jnp.float32(33), jnp.float32(1)))

    message, after = alone(state.server, data.shard(3))
    assert sum((u**2).sum() for u in leaves(message)) < 1.0001
    assert all(np.isfinite(u).all() for u in leaves(after))
    moved = [np.abs(a - b).max() for a, b in zip(leaves(after.extra.c), leaves(state.server.extra.c), strict=True)]
    assert max(moved) > 1e-3


def test_the_server_counts_as_many_clients_as_the_denominator(data):
    """FedDyn's mean dual moves by the cohort's share of the population times the mean change."""
    kwargs = {'alpha': 0.1, 'plan': PLAN}
    inner = feddyn.algorithm(toys.task, toys.opt, **kwargs)
    algorithm = privacy.private(inner, clip=1e6, noise_multiplier=0.0, cohort=len(IDS))
    one, other = (
        jax.jit(simulate.make_round(a, chunk=1))(toys.KEY, simulate.init(a, toys.KEY, data), data, jnp.array(IDS))[0]
        for a in (inner, algorithm)
    )
    toys.same(one, other, atol=1e-6)


EVEN = {'plan': PLAN, **fedavg.UNWEIGHTED}
EXACT = {
    'fedavg': lambda: fedavg.algorithm(toys.task, toys.opt, **EVEN),
    'fedavg, sum': lambda: fedavg.algorithm(toys.task, toys.opt, plan=PLAN, aggregate=aggregators.total),
    'fedyogi': lambda: fedavg.algorithm(toys.task, toys.opt, server_opt=server_optimizers.fedyogi(), **EVEN),
    'fedprox': lambda: fedprox.algorithm(toys.task, toys.opt, mu=0.1, **EVEN),
    'scaffold': lambda: scaffold.algorithm(toys.task, toys.opt, plan=PLAN),
    'scaffold, option I': lambda: scaffold.algorithm(toys.task, toys.opt, plan=PLAN, option='I'),
    'feddyn': lambda: feddyn.algorithm(toys.task, toys.opt, plan=PLAN, alpha=0.1),
    'moon': lambda: moon.algorithm(toys.task, toys.opt, mu=1.0, **EVEN),
    'fedmmd': lambda: fedmmd.algorithm(toys.task, toys.opt, lam=0.1, **EVEN),
    'fedrs': lambda: fedrs.algorithm(toys.tiny, toys.opt, **EVEN),
    'fedaws': lambda: fedaws.algorithm(toys.task, toys.opt, **EVEN),
    'ratioloss': lambda: ratioloss.algorithm(
        toys.tiny, toys.opt, auxiliary=federate(np.eye(5, 12, dtype=np.float32), np.arange(5), [[c] for c in range(5)]),
        **EVEN,
    ),
    'fedetf': lambda: fedetf.algorithm(toys.tiny, toys.opt, **EVEN),
    'feduh': lambda: feduh.algorithm(toys.tiny, toys.opt, plan=PLAN),
    'fedloge': lambda: fedloge.algorithm(toys.tiny, toys.opt, frame=frames.simplex_etf, **EVEN),
    'fedbabu': lambda: fedbabu.algorithm(toys.task, toys.opt, **EVEN),
    'fedper': lambda: fedper.algorithm(toys.task, toys.opt, plan=PLAN),
    'fedrep': lambda: fedrep.algorithm(toys.task, toys.opt, plan=PLAN, head_epochs=1),
    'ditto': lambda: ditto.algorithm(toys.task, toys.opt, plan=PLAN),
    'fedrod': lambda: fedrod.algorithm(toys.tiny, toys.opt, plan=PLAN),
    'latest': lambda: latest.keep(fedavg.algorithm(toys.task, toys.opt, **EVEN)),
    'finetune': lambda: finetune.algorithm(toys.task, toys.opt, plan=PLAN),
    'solo': lambda: solo.algorithm(toys.task, toys.opt, plan=PLAN),
}  # fmt: skip
REFUSED = ('fednova', 'fednh', 'fedetf_gmv', 'fedproto', 'creff', 'ccvr', 'fedbn')


def test_every_algorithm_is_exact_in_private_or_refused():
    named = {name.split(',')[0] for name in EXACT} | {*REFUSED}
    assert {module.name for module in pkgutil.iter_modules(algorithms.__path__)} <= named


QUICK = ('scaffold', 'feddyn', 'fedloge')  # the others are for those with more time


@pytest.mark.parametrize(
    'name', [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in EXACT]
)
def test_without_noise_and_clipping_nothing_changes_for_clients_that_count_alike(data, name):
    """Two rounds, so that what the servers remember is compared by what comes of it."""
    inner = EXACT[name]()
    algorithm = privacy.private(inner, clip=1e9, noise_multiplier=0.0, cohort=len(IDS))
    state = simulate.init(inner, toys.KEY, data)
    ends = []
    for a in (inner, algorithm):
        end, run = state, jax.jit(simulate.make_round(a, chunk=1))
        for key in jax.random.split(toys.KEY, 2):
            end, _ = run(key, end, data, jnp.array(IDS))
        ends.append(end)
    toys.same(*ends, atol=2e-5)


def test_a_server_that_asks_for_numbers_of_examples_is_refused(data):
    """SCAFFOLD by examples moved its variate by M over all examples, not by the cohort's share of them."""
    inner = scaffold.algorithm(toys.task, toys.opt, plan=PLAN, aggregate=aggregators.mean)
    algorithm = privacy.private(inner, clip=1e6, noise_multiplier=0.0, cohort=len(IDS))
    with pytest.raises(ValueError, match='count alike'):
        jax.eval_shape(
            simulate.make_round(algorithm), toys.KEY, simulate.init(inner, toys.KEY, data), data, jnp.array(IDS)
        )


@pytest.mark.parametrize(
    ('reads', 'use'),
    [
        (False, lambda w: 1.0),
        (True, lambda w: w / 2),
        (True, lambda w: jnp.where(w > 0, 1.0, 0.0)),
        (True, lambda w: jnp.maximum(w, 1.0)),
        (True, jax.jit(lambda w: w.astype(jnp.float32))),
    ],
)
@pytest.mark.parametrize('compiled', [False, True])
def test_whoever_reads_the_number_of_examples_is_refused_however(data, reads, use, compiled):
    def server(key, server, aggregate):
        factor, after = use(aggregate.weight), plain.server(key, server, aggregate)
        return jax.tree.map(lambda u: u * factor if u.dtype == jnp.float32 else u, after)

    served = jax.jit(lambda key, s, value, w, n: server(key, s, Aggregate(value, w, n)))
    through = lambda key, s, a: served(key, s, a.value, a.weight, a.clients)  # noqa: E731
    algorithm = privacy.private(
        plain._replace(server=through if compiled else server), clip=1.0, noise_multiplier=0.0, cohort=4
    )
    state = simulate.init(algorithm, toys.KEY, data)
    run = lambda: jax.eval_shape(simulate.make_round(algorithm, cohort=4), toys.KEY, state, data)  # noqa: E731
    if reads:
        with pytest.raises(ValueError, match='count alike'):
            run()
    else:
        run()


def test_a_message_too_long_to_be_measured_is_dropped_and_its_client_broken(data):
    def client(key, server, client, shard):
        new, message, info = plain.client(key, server, client, shard)
        return new, jax.tree.map(lambda u: u * jnp.where(shard.size == 33, 1e25, 1.0), message), info

    algorithm = privacy.private(plain._replace(client=client), clip=1.0, noise_multiplier=0.0, cohort=8)
    _, report = jax.jit(simulate.make_round(algorithm))(toys.KEY, simulate.init(algorithm, toys.KEY, data), data)
    assert np.asarray(report.ids)[np.asarray(report.broken)].tolist() == [3]
    assert bool(report.finite)


def moved(algorithm, state, key=toys.KEY):
    """What the server adds to the model in a round in which nobody sends anything."""
    zero = fedavg.Message(jax.tree.map(jnp.zeros_like, state.server.variables.params), ())
    after = algorithm.server(key, state.server, Aggregate(zero, jnp.float32(0), jnp.float32(0)))
    pairs = zip(leaves(after.variables.params), leaves(state.server.variables.params), strict=True)
    return after, np.concatenate([(new - old).ravel() for new, old in pairs])


def test_one_key_gives_other_noise_in_other_rounds_and_under_another_clip_or_multiplier(start):
    """Or the difference of two models that are published would be without any."""

    def drawn(state=start, **how):
        algorithm = privacy.private(plain, **{'clip': 1.0, 'noise_multiplier': 1.0, 'cohort': 4, **how})
        return moved(algorithm, state)

    after, first = drawn()
    np.testing.assert_array_equal(drawn()[1], first)
    later = start._replace(server=start.server._replace(round=after.round))
    others = [drawn(later)[1], drawn(clip=2.0)[1] / 2, drawn(noise_multiplier=3.0)[1] / 3]
    others += [drawn(cohort=8)[1] * 2, drawn(clip=0.5, noise_multiplier=2.0)[1]]  # as much noise, of other messages
    assert np.abs(np.corrcoef([first, *others]) - np.eye(6)).max() < 0.3
    np.testing.assert_allclose([u.std() for u in (first, *others)], 1 / 4, rtol=0.2)


def test_noise_is_not_what_first_parameters_are_drawn_from():
    """Even if the run has the key of the first state: children of a key by number are those of `split`."""
    key = jax.random.key(3)
    k_noise = jax.random.split(jax.random.split(key, 3)[2])[0]
    drawn = jax.random.normal(jax.random.split(k_noise, 3)[0], (64,))  # as the first of three arrays
    body = Model(init=lambda key, x: ({'u': drawn}, ()), features=lambda params, stats, x, mask, key: (x, stats))
    inner = fedavg.algorithm(objective.objective(body, heads.linear(), losses.cross_entropy), toys.opt, plan=PLAN)
    state = simulate.init(inner, key, toys.ragged([20, 20]))
    noisy = privacy.private(inner, clip=1.0, noise_multiplier=1.0, cohort=1)
    _, noise = moved(noisy, state, jax.random.split(key, 3)[2])
    assert sorted(state.server.variables.params) == ['body', 'head']  # and the head two
    assert abs(np.corrcoef(drawn, noise[:64])[0, 1]) < 0.5


def test_a_client_whose_state_or_loss_breaks_sends_nothing_and_keeps_what_it_had(data):
    """Of Ditto with a personal rate beyond all measure."""
    steep = ditto.algorithm(toys.task, toys.opt, plan=PLAN, personal_opt=local.sgd(1e20, 0, 0), clip=None)
    algorithm = privacy.private(steep, clip=1.0, noise_multiplier=0.0, cohort=8)
    state = simulate.init(algorithm, toys.KEY, data)
    after, report = jax.jit(simulate.make_round(algorithm))(toys.KEY, state, data)
    broken = np.asarray(report.ids)[np.asarray(report.broken)]
    assert len(broken) >= 4
    for old, new in zip(leaves(state.clients), leaves(after.clients), strict=True):
        assert np.isfinite(new).all()
        np.testing.assert_array_equal(new[broken], old[broken])
    alone = privacy.private(EXACT['ditto'](), clip=1.0, noise_multiplier=0.0, cohort=8)
    there = jnp.asarray([k for k in range(8) if k not in broken] + [8] * len(broken))
    want, _ = jax.jit(simulate.make_round(alone))(toys.KEY, simulate.init(alone, toys.KEY, data), data, there)
    toys.same(after.server.variables.params, want.server.variables.params, atol=1e-6)


@pytest.mark.parametrize('breaks', ['state', 'loss'])
def test_either_alone_makes_a_client_broken(data, breaks):
    def client(key, server, client, shard):
        _, message, info = plain.client(key, server, (), shard)
        odd = jnp.where(shard.size == 33, jnp.nan, 1.0)
        loss = info.loss * odd if breaks == 'loss' else info.loss
        return client + (odd if breaks == 'state' else 1.0), message, info._replace(loss=loss)

    own = plain._replace(init_client=lambda key, server: jnp.float32(0), client=client)
    algorithm = privacy.private(own, clip=1.0, noise_multiplier=0.0, cohort=8)
    state, run = simulate.init(algorithm, toys.KEY, data), jax.jit(simulate.make_round(algorithm))
    after, report = run(toys.KEY, state, data)
    others, _ = run(toys.KEY, state, data, jnp.array([0, 1, 2, 4, 5, 6, 7, 8]))
    assert np.asarray(report.ids)[np.asarray(report.broken)].tolist() == [3]
    np.testing.assert_array_equal(after.clients, [1, 1, 1, 0, 1, 1, 1, 1])
    toys.same(after.server, others.server, atol=1e-7)


def test_whole_numbers_in_messages_are_refused(data):
    def client(key, server, client, shard):
        new, message, info = plain.client(key, server, client, shard)
        return new, (message, jax.random.bits(key)), info

    algorithm = privacy.private(plain._replace(client=client), clip=1.0, noise_multiplier=0.0, cohort=8)
    state = simulate.init(plain, toys.KEY, data)
    with pytest.raises(ValueError, match='hold whole numbers'):
        jax.eval_shape(simulate.make_round(algorithm), toys.KEY, state, data)


def test_a_server_may_keep_its_model_as_it_likes(data):
    own = plain._replace(
        init=lambda key, data: {'model': plain.init(key, data)},
        client=lambda key, server, *given: plain.client(key, server['model'], *given),
        server=lambda key, server, aggregate: {'model': plain.server(key, server['model'], aggregate)},
        init_client=lambda key, server: plain.init_client(key, server['model']),
    )
    ends = []
    for inner in (own, plain):
        algorithm = privacy.private(inner, clip=1.0, noise_multiplier=0.0, cohort=8)
        state = simulate.init(algorithm, toys.KEY, data)
        ends.append(jax.jit(simulate.make_round(algorithm))(toys.KEY, state, data)[0].server)
    toys.same(ends[0]['model'].variables, ends[1].variables)
    noisy = fedavg.algorithm(toys.noisy_task, toys.opt, plan=PLAN)
    kept = own._replace(init=lambda key, data: {'model': noisy.init(key, data)})
    with pytest.raises(ValueError, match='GroupNorm'):
        simulate.init(privacy.private(kept, clip=1.0, noise_multiplier=0.0, cohort=8), toys.KEY, data)


def test_the_mean_of_a_large_cohort_loses_no_digits(start):
    delta = jax.tree.map(lambda u: jnp.full_like(u, 0.1 * 20_000), start.server.variables.params)
    algorithm = privacy.private(plain, clip=1.0, noise_multiplier=0.0, cohort=20_000)
    after = algorithm.server(toys.KEY, start.server, Aggregate(fedavg.Message(delta, ()), 0.0, 0.0))
    for new, old in zip(leaves(after.variables.params), leaves(start.server.variables.params), strict=True):
        np.testing.assert_allclose(new - old, 0.1, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize('drawn', [2, 8])
def test_a_cohort_of_another_size_than_the_denominator_is_refused(data, drawn):
    algorithm = privacy.private(plain, clip=1.0, noise_multiplier=1.0, cohort=4)
    state = simulate.init(algorithm, toys.KEY, data)
    with pytest.raises(ValueError, match=f'cohort=4, and the round has {drawn}'):
        jax.eval_shape(simulate.make_round(algorithm, cohort=drawn, chunk=3), toys.KEY, state, data)


@pytest.mark.parametrize(
    'make',
    [
        lambda: fednh.algorithm(toys.tiny, toys.opt, plan=PLAN),
        lambda: fedproto.algorithm(toys.task, toys.opt, plan=PLAN),
        lambda: fednova.algorithm(toys.task, toys.opt, plan=PLAN),
        lambda: fedetf_gmv.algorithm(toys.tiny, toys.opt, warm=1, plan=PLAN),
        lambda: creff.algorithm(toys.tiny, toys.opt, plan=PLAN),
        lambda: ccvr.calibrate(toys.task),
    ],
)
def test_messages_that_are_weighted_are_refused(data, make):
    algorithm = privacy.private(make(), clip=1.0, noise_multiplier=1.0, cohort=5)
    state = simulate.init(algorithm, toys.KEY, data)
    with pytest.raises(ValueError, match='sends changes of a model alone'):
        jax.eval_shape(simulate.make_round(algorithm, chunk=1), toys.KEY, state, data)


def test_running_statistics_are_refused(data):
    """In a state that came from elsewhere, too."""
    noisy = fedavg.algorithm(toys.noisy_task, toys.opt, plan=PLAN)
    algorithm = privacy.private(noisy, clip=1.0, noise_multiplier=1.0, cohort=5)
    with pytest.raises(ValueError, match='GroupNorm'):
        simulate.init(algorithm, toys.KEY, data)
    with pytest.raises(ValueError, match='GroupNorm'):
        jax.eval_shape(simulate.make_round(algorithm, cohort=5), toys.KEY, simulate.init(noisy, toys.KEY, data), data)


@pytest.mark.parametrize('wrapped', [lambda a: a, latest.keep], ids=['alone', 'wrapped'])
def test_a_client_that_moves_what_others_send_is_refused(data, wrapped):
    """FedDyn by examples anchors every client by the examples of all."""
    inner = wrapped(feddyn.algorithm(toys.task, toys.opt, plan=PLAN, alpha=0.1, by_examples=True))
    algorithm = privacy.private(inner, clip=1.0, noise_multiplier=1.0, cohort=8)
    with pytest.raises(ValueError, match='by_examples'):
        jax.eval_shape(simulate.make_round(algorithm), toys.KEY, simulate.init(inner, toys.KEY, data), data)


def test_a_state_of_feddyn_does_not_tell_how_many_examples_there_are(data):
    algorithm = privacy.private(EXACT['feddyn'](), clip=1.0, noise_multiplier=1.0, cohort=8)
    more = data._replace(size=data.size.at[3].set(20))
    toys.same(*(simulate.init(algorithm, toys.KEY, some).server for some in (data, more)))


@pytest.mark.parametrize(
    ('wrong', 'match'),
    [
        ({'clip': 0.0}, 'clip'),
        ({'clip': np.inf}, 'clip'),
        ({'noise_multiplier': -1.0}, 'noise'),
        ({'cohort': 0}, 'cohort'),
    ],
)
def test_bad_settings_are_refused(wrong, match):
    with pytest.raises(ValueError, match=match):
        privacy.private(plain, **{'clip': 1.0, 'noise_multiplier': 1.0, 'cohort': 5, **wrong})


def converted(orders, rdp, delta):
    """From Renyi to approximate differential privacy, at the best of the orders. (Canonne, Kamath, Steinke, 2020.)"""
    return min(r + math.log1p(-1 / a) - math.log(delta * a) / (a - 1) for a, r in zip(orders, rdp, strict=True))


class TestEpsilon:
    @pytest.fixture(autouse=True)
    def _accountant(self):
        pytest.importorskip('dp_accounting')

    def test_of_everyone_every_round_is_that_of_the_gaussian_mechanism(self):
        """Its Renyi divergence is `a s^2 / 2 sigma^2`; the sum moves by S if a client is missing, by 2 S if another."""
        orders = np.linspace(1.1, 60, 3000)
        for sampling, sensitivity in (('poisson', 1), ('fixed', 2)):
            want = converted(orders, 20 * orders * sensitivity**2 / (2 * 8.0**2), 1e-5)
            np.testing.assert_allclose(privacy.epsilon(8.0, 1.0, 20, 1e-5, sampling=sampling), want, rtol=0.01)

    @pytest.mark.parametrize('sampling', ['fixed', 'poisson'])
    def test_is_the_same_for_numbers_of_any_kind(self, sampling):
        want = privacy.epsilon(1.5, 0.25, 100, 2.0**-16, sampling=sampling)
        given = np.float16(1.5), np.float32(0.25), np.int64(100), np.float16(2.0**-16)
        assert privacy.epsilon(*given, sampling=sampling) == want > 1
        assert privacy.epsilon(np.int8(20), 0.25, 100, 1e-5) == privacy.epsilon(20.0, 0.25, 100, 1e-5) > 0

    def test_the_smallest_rates_lose_something(self):
        assert 0 < privacy.epsilon(1.0, 4e-10, 10**6, 1e-12) <= privacy.epsilon(1.0, 1.4e-9, 10**6, 1e-12)

    @pytest.mark.parametrize('z', [1e20, 1e-200])
    def test_noise_beyond_all_measure_is_refused(self, z):
        with pytest.raises(ValueError, match='noise_multiplier must be 0, or between'):
            privacy.epsilon(z, 0.1, 100, 1e-5)

    def test_of_poisson_sampling_is_the_moments_accountant(self):
        """Integer orders by the binomial sum (Mironov, Talwar, Zhang, 2019); at q = 0.01, sigma = 4 and 10,000 steps,
        Abadi et al. (CCS 2016) report 1.26 by a looser conversion."""
        q, sigma, steps = 0.01, 4.0, 10_000
        orders = range(2, 33)
        rdp = [
            steps * math.log(sum(math.comb(a, k) * (1 - q) ** (a - k) * q**k * math.exp((k * k - k) / (2 * sigma**2))
                                 for k in range(a + 1))) / (a - 1)
            for a in orders
        ]  # fmt: skip
        got = privacy.epsilon(sigma, q, steps, 1e-5, sampling='poisson')
        np.testing.assert_allclose(got, converted(orders, rdp, 1e-5), rtol=0.01)
        assert 0.9 < got < 1.26

    def test_moves_as_it_must(self):
        base = privacy.epsilon(4.0, 0.1, 50, 1e-5)
        assert base > privacy.epsilon(4.0, 0.1, 50, 1e-5, sampling='poisson')
        assert base > privacy.epsilon(8.0, 0.1, 50, 1e-5)
        assert base > privacy.epsilon(4.0, 0.05, 50, 1e-5)
        assert base > privacy.epsilon(4.0, 0.1, 25, 1e-5)
        assert base < privacy.epsilon(4.0, 1.0, 50, 1e-5)
        assert privacy.epsilon(1.0, 0.5, 20, 1e-3) <= privacy.epsilon(1.0, 1.0, 20, 1e-3)
        assert privacy.epsilon(4.0, 0.1, 0, 1e-5) == 0.0
        assert privacy.epsilon(0.0, 0.1, 50, 1e-5) == math.inf


@pytest.mark.slow
@pytest.mark.parametrize('sampling', ['fixed', 'poisson'])
def test_the_noise_of_a_promise_keeps_it_and_hardly_more(sampling):
    pytest.importorskip('dp_accounting')
    for epsilon, rate in ((3.0, 0.1), (50.0, 1.0)):
        z = privacy.noise_multiplier(epsilon, rate, 20, 1e-5, sampling=sampling)
        told = [privacy.epsilon(noise, rate, 20, 1e-5, sampling=sampling) for noise in (z, z / 1.01)]
        assert 0.98 * epsilon < told[0] <= epsilon < told[1]
    least = privacy.noise_multiplier(1e13, 1.0, 1, 1e-5, sampling=sampling)
    assert privacy.epsilon(least, 1.0, 1, 1e-5, sampling=sampling) <= 1e13
    for wrong, said in (
        ({'epsilon': 0.0}, 'epsilon must be positive'),
        ({'rounds': 0}, 'rounds must be at least 1'),
        ({'epsilon': 1e-9, 'rounds': 10**9}, 'takes a noise_multiplier above'),
    ):
        with pytest.raises(ValueError, match=said):
            privacy.noise_multiplier(**{'epsilon': 1.0, 'sampling_rate': 0.5, 'rounds': 20, 'delta': 1e-5, **wrong})


def test_epsilon_without_the_accountant_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, 'dp_accounting', None)
    with pytest.raises(ImportError, match=r'fedjax_nc\[privacy\]'):
        privacy.epsilon(1.0, 0.1, 10, 1e-5)


@pytest.mark.parametrize(
    ('argument', 'value'),
    [
        *[('noise_multiplier', value) for value in (-1.0, math.inf, '1')],
        *[('sampling_rate', value) for value in (0.0, 1.1, math.nan)],
        *[('rounds', value) for value in (-1, 2.5)],
        *[('delta', value) for value in (0.0, 1.0)],
    ],
)
def test_epsilon_refuses_what_is_out_of_range(argument, value):
    given = {'noise_multiplier': 1.0, 'sampling_rate': 0.1, 'rounds': 10, 'delta': 1e-5, argument: value}
    with pytest.raises(ValueError, match=argument):
        privacy.epsilon(**given)
    with pytest.raises(ValueError, match='poisson'):
        privacy.epsilon(1.0, 0.1, 10, 1e-5, sampling='shuffled')


@pytest.mark.slow
@pytest.mark.parametrize('name', ['clip', 'noise_multiplier'])
def test_clip_and_noise_may_be_traced(name):
    task = objective.objective(models.from_flax(models.MLP((8,))), heads.linear(), losses.cross_entropy)
    plain = fedavg.algorithm(task, local.sgd(0.1), plan=local.Plan(8, 1), aggregate=aggregators.uniform)
    clients, key = testing.clients(), jax.random.key(1)

    def private(**changed):
        return privacy.private(plain, **{'clip': 1.0, 'noise_multiplier': 0.5, 'cohort': 3, **changed})

    def ended(step, *args):
        return simulate.compiled(step)(key, simulate.init(private(), key, clients), clients, *args)[0].server

    traced = ended(simulate.tuned(lambda value: simulate.make_round(private(**{name: value}), cohort=3)), 0.7)
    chex.assert_trees_all_close(
        traced.variables.params,
        ended(simulate.make_round(private(**{name: 0.7}), cohort=3)).variables.params,
        atol=1e-6,
    )
