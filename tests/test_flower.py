"""Deployed rounds are the rounds of simulation: `fedjax_nc.flower` with all of Flower's types, in one process."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from jax.flatten_util import ravel_pytree
from loopback import Loopback, agreement, apart, deploy, own, sites
from test_contract import ALGORITHMS

from fedjax_nc import aggregators, evaluate, flower, local, privacy, saving, simulate, training, tree
from fedjax_nc.algorithms import ccvr, ditto, fedavg, fedetf, fedloge, finetune, scaffold
from fedjax_nc.base import State
from fedjax_nc.flower import _plan, _rounds, _secure, _site

SIZES = (40, 7, 61, 23, 90)
ROUNDS, TUNE = jax.random.key(1), jax.random.key(2)
QUICK = ('fedetf', 'scaffold')
STAGES = ('fedetf personal', 'fedloge realigned')


@pytest.fixture(scope='module')
def data():
    return toys.ragged(SIZES)


def simulated(algorithm, data, rounds, cohort=None, key=ROUNDS):
    """By one client after the other, as sites work."""
    state = simulate.init(algorithm, jax.random.key(0), data)
    return training.run(algorithm, key, state, data, rounds=rounds, cohort=cohort, chunk=1, progress=False)


def compare(algorithm, data, out, rounds, cohort, atol, **settings):
    """Server, rows and client states of both."""
    want = simulated(algorithm, data, rounds, cohort)
    agreed = agreement([flower.Phase(algorithm, ROUNDS, rounds, cohort)], data, **settings)
    seen = deploy(agreed, Loopback(sites(agreed, data, out)), out / 'server')
    assert apart(seen[-1].server, want.state.server) <= atol
    assert [row['round'] for _, row, _ in seen] == list(range(1, rounds + 1))
    np.testing.assert_allclose([s.row['loss'] for s in seen], [row['loss'] for row in want.history], atol=1e-5)
    for k, held in enumerate(states(agreed, data, out, 0)):
        if held is not None:
            assert apart(held, jax.tree.map(lambda u, k=k: u[k], want.state.clients)) <= max(atol, 1e-6)
    return seen


def states(agreed, data, out, phase):
    """What sites have kept of a phase; None for those who never took part."""
    kinds, name = _plan.checked(agreed), _plan.fingerprint(agreed)
    for k in range(data.num_clients):
        site = flower.Site(k, own(data, k), out / f'site-{k}')
        rounds = [int(path.stem.split('-')[1]) for path in site.folder.glob(f'{phase}-*.state')]
        yield _site.restore(site, name, phase, max(rounds), kinds[phase].client) if rounds else None


@pytest.mark.parametrize('name', [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in ALGORITHMS])
def test_a_deployed_round_is_the_simulated_one(data, tmp_path, name):
    if name in STAGES:
        pytest.skip('a stage that takes over from training has tests of its own')
    cohort = 5 if name in ('fedavg, private', 'ccvr') else 3
    compare(ALGORITHMS[name], data, tmp_path, 3, cohort, 1e-3 if name == 'ccvr' else 1e-6)  # see test_contract


@pytest.mark.slow
def test_twenty_rounds_of_fedetf_are_the_same(data, tmp_path):
    algorithm = fedetf.algorithm(toys.tiny, local.sgd(0.05), plan=local.Plan(8, 2), scale=4.0)
    seen = compare(algorithm, data, tmp_path, 20, 4, 1e-6)
    table = evaluate.generic(algorithm, State(seen[-1].server, ()), data.x, data.y, data.num_classes)
    assert evaluate.accuracy(table) > 0.8  # and it has learned
    assert seen[-1].row['accuracy'] == pytest.approx(float(evaluate.accuracy(table)))  # as the sites found
    taken = [json.loads(line) for line in (tmp_path / 'server/0-train/sites.jsonl').read_text().splitlines()]
    drawn = [simulate.choose(simulate.cohort_key(jax.random.fold_in(ROUNDS, t)), len(SIZES), 4) for t in range(20)]
    assert [row['sites'] for row in taken] == [sorted(ids.tolist()) for ids in drawn]


@pytest.mark.slow
def test_who_answers_first_makes_no_difference(data, tmp_path):
    algorithm = scaffold.algorithm(toys.task, toys.opt, plan=toys.PLAN)
    agreed = agreement([flower.Phase(algorithm, ROUNDS, 3)], data)

    class Late(Loopback):
        def pull_messages(self, message_ids):
            there = [name for name in message_ids if name in self.replies]
            return super().pull_messages(sorted(there)[-1:])

    a, b = (
        deploy(agreed, grid(sites(agreed, data, tmp_path / name)), tmp_path / name / 'server')[-1].server
        for name, grid in (('one', Loopback), ('other', Late))
    )
    assert apart(a, b) == 0.0


def test_a_site_begins_a_phase_as_simulation_has_it(data):
    drawn = ALGORITHMS['fedavg']._replace(init_client=lambda key, server: jax.random.normal(key, (2,)))
    agreed = agreement([flower.Phase(drawn, ROUNDS), flower.Phase(drawn, TUNE)], data)
    start = simulate.init(drawn, agreed.init_key, data)
    then = simulate.join(drawn, TUNE, start.server, data.num_clients)
    for k in range(data.num_clients):
        mine = _plan.first(agreed, 0, start.server, None, k)
        np.testing.assert_array_equal(mine, start.clients[k])
        np.testing.assert_array_equal(_plan.first(agreed, 1, start.server, mine, k), then.clients[k])


@pytest.mark.slow
def test_stages_follow_training(data, tmp_path):
    train = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN)
    calibrate, tune = (
        ccvr.calibrate(toys.task, samples=20, plan=local.Plan(32, 2)),
        finetune.algorithm(toys.task, toys.opt, plan=toys.PLAN),
    )
    keys = jax.random.split(TUNE)
    agreed = agreement(
        [flower.Phase(train, ROUNDS, 2, 3), flower.Phase(calibrate, keys[0], name='ccvr'), flower.Phase(tune, keys[1])],
        data,
    )
    seen = deploy(agreed, Loopback(sites(agreed, data, tmp_path)), tmp_path / 'server')
    state = simulated(train, data, 2, 3).state
    for stage, key, got in zip((calibrate, tune), keys, seen[2:], strict=True):
        state = simulate.join(stage, key, state.server, data.num_clients)
        state, _ = simulate.make_round(stage, chunk=1)(jax.random.fold_in(key, 0), state, data)
        assert apart(got.server, state.server) < 1e-3  # see test_contract
    assert [s.phase for s in seen] == ['train', 'train', 'ccvr', 'train']
    for k, held in enumerate(states(agreed, data, tmp_path, 2)):
        assert apart(held, jax.tree.map(lambda u, k=k: u[k], state.clients)) < 1e-3
    # What sites take away predicts as their state does.
    whole = evaluate.per_client(tune, state, data)
    table = sum(int(jnp.trace(counts)) for counts in whole) / int(data.size.sum())
    assert seen[-1].row['personal_accuracy'] == pytest.approx(table, abs=0.02)
    mine = saving.load(tmp_path / 'site-3/2-train.safetensors', tune, simulate.join(tune, TUNE, state.server, 1))
    assert apart(mine.client, jax.tree.map(lambda u: u[3], state.clients)) < 1e-3
    assert mine.about['site'] == 3


@pytest.mark.slow
def test_fedloge_realigns_the_heads_that_sites_have_kept(data, tmp_path):
    train = ALGORITHMS['fedloge']
    stage = fedloge.realign(toys.tiny, toys.opt, plan=toys.PLAN, finetune_epochs=1)

    def enter(stage, key, state, data):
        return fedloge.stage_state(state)

    agreed = agreement(
        [flower.Phase(train, ROUNDS, 2, 3), flower.Phase(stage, TUNE, enter=enter, name='realign')], data
    )
    seen = deploy(agreed, Loopback(sites(agreed, data, tmp_path)), tmp_path / 'server')
    state = fedloge.stage_state(simulated(train, data, 2, 3).state)
    state, _ = simulate.make_round(stage, chunk=1)(jax.random.fold_in(TUNE, 0), state, data)
    assert apart(seen[-1].server, state.server) < 1e-6
    held = list(states(agreed, data, tmp_path, 1))
    assert not all(u.seen for u in held)  # some never took part in training, and come in all the same
    for k, mine in enumerate(held):
        assert apart(mine, jax.tree.map(lambda u, k=k: u[k], state.clients)) < 1e-6


@pytest.mark.slow
def test_who_does_not_answer_is_nobody(data, tmp_path):
    algorithm = scaffold.algorithm(toys.task, toys.opt, plan=toys.PLAN)
    agreed = agreement([flower.Phase(algorithm, ROUNDS, 4)], data)
    away = {2: {1}, 3: {1, 4}}

    def change(node, message, reply):
        ask = message.content.config_records.get('ask')
        gone = ask is not None and node - 101 in away.get(ask['round'], ())
        return None if gone else reply

    seen = deploy(agreed, Loopback(sites(agreed, data, tmp_path), change), tmp_path / 'server', flower.Patience(1.0))
    state, round = simulate.init(algorithm, jax.random.key(0), data), simulate.make_round(algorithm, chunk=1)
    for t in range(4):
        ids = [k if k not in away.get(t + 1, ()) else len(SIZES) for k in range(len(SIZES))]
        state, _ = jax.jit(round)(jax.random.fold_in(ROUNDS, t), state, data, jnp.array(ids))
    assert [s.row['sites'] for s in seen] == [5, 4, 3, 5]
    assert apart(seen[-1].server, state.server) < 1e-6
    for k, held in enumerate(states(agreed, data, tmp_path, 0)):
        assert apart(held, jax.tree.map(lambda u, k=k: u[k], state.clients)) < 1e-6


@pytest.mark.slow
def test_no_array_of_examples_is_in_any_message(data, tmp_path):
    """Neither the examples nor a number for each of them: every array has the shape that it has for any other site."""
    algorithm = ditto.algorithm(toys.task, toys.opt, plan=toys.PLAN)
    agreed = agreement([flower.Phase(algorithm, ROUNDS, 2), flower.Phase(ccvr.calibrate(toys.task), TUNE)], data)
    grid = Loopback(sites(agreed, data, tmp_path))
    deploy(agreed, grid, tmp_path / 'server')
    sent = [m for m in grid.log if m.metadata.src_node_id != 1]
    lengths = {node: int(size) for node, size in zip(grid.apps, data.size, strict=True)}
    by_kind = {}
    for message in sent:
        arrays = {(r, n): tuple(a.shape) for r, rec in message.content.array_records.items() for n, a in rec.items()}
        assert all(lengths[message.metadata.src_node_id] not in shape for shape in arrays.values())
        by_kind.setdefault((message.metadata.message_type, len(arrays)), set()).add(tuple(sorted(arrays.items())))
        assert set(message.content) <= {'message', 'info', 'told'}
        for record in message.content.config_records.values():
            assert set(record) <= {
                'client', 'size', 'library', 'versions', 'agreement', 'phase', 'round', 'examples', 'right',
                'examples_personal',
                'right_personal',
            }  # fmt: skip
    assert len(sent) == 5 * (1 + 2 + 1 + 1 + 1)  # hello, two rounds, a test, a stage, a test
    assert all(len(shapes) == 1 for shapes in by_kind.values())


@pytest.mark.slow
def test_half_of_the_bytes(data, tmp_path):
    algorithm = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN)
    whole, half = (agreement([flower.Phase(algorithm, ROUNDS, 3)], data, half=half) for half in (False, True))
    a, b = (
        deploy(it, Loopback(sites(it, data, tmp_path / f'{it.half}')), tmp_path / f'{it.half}/server')[-1]
        for it in (whole, half)
    )
    header = 128  # of NumPy's format, of each array
    arrays = 4 + 4  # of the message, and of its info
    body = a.row['bytes_up'] / 5 - arrays * header
    matrices = sum(4 * u.size for u in jax.tree.leaves(a.server.variables.params) if u.ndim > 1)
    assert 0 < matrices < body - 16  # biases and the info travel whole
    assert b.row['bytes_up'] / 5 == arrays * header + body - matrices / 2
    assert b.row['bytes_down'] == a.row['bytes_down'] - 5 * matrices / 2
    assert 0 < apart(a.server, b.server) < 0.02


class TestSecure:
    def phase(self, algorithm, cohort=None, rounds=3):
        return flower.Phase(algorithm, ROUNDS, rounds, cohort)

    @pytest.mark.slow
    @pytest.mark.parametrize('weigh', [aggregators.mean, aggregators.uniform], ids=['mean', 'uniform'])
    def test_a_sum_unseen_is_the_sum(self, data, tmp_path, weigh):
        algorithm = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN, aggregate=weigh)
        secure = flower.Secure(limit=4.0, levels=2**20)
        agreed = agreement([self.phase(algorithm, rounds=1)], data, secure=secure)
        grid = Loopback(sites(agreed, data, tmp_path))
        seen = deploy(agreed, grid, tmp_path / 'server')
        want = simulated(algorithm, data, 1)
        weights = data.size / data.size.sum() if weigh is aggregators.mean else jnp.full(5, 0.2)
        step = 2 * secure.limit / secure.levels
        scale = float(data.size.max() / data.size.sum()) if weigh is aggregators.mean else 1 / 5
        bound = (
            5
            * step
            * scale
            * (1 + float(jnp.abs(jnp.concatenate([u.ravel() for u in jax.tree.leaves(want.state.server)])).max()))
        )
        difference = apart(seen[-1].server, want.state.server)
        assert 0 < difference <= bound, (difference, bound, weights)
        assert 'loss' not in seen[-1].row
        assert seen[-1].row['sites'] == 5
        for message in grid.log:  # nothing of a site's but masked numbers
            if message.metadata.src_node_id != 1:
                assert not any(len(record) for record in message.content.array_records.values())

    @pytest.mark.slow
    def test_two_runs_of_masks_have_nothing_in_common(self, data, tmp_path):
        algorithm = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN)
        agreed = agreement([self.phase(algorithm, rounds=1)], data, secure=flower.Secure())
        masked = []
        for turn in 'ab':
            grid = Loopback(sites(agreed, data, tmp_path / turn))
            deploy(agreed, grid, tmp_path / turn / 'server')
            masked.append(
                [
                    value
                    for message in grid.log
                    if message.metadata.src_node_id == 101
                    for record in message.content.config_records.values()
                    for name, values in record.items()
                    if isinstance(values, list) and values and isinstance(values[0], bytes) and len(values[0]) > 500
                    for value in values
                ]
            )
        a, b = (np.concatenate([np.frombuffer(v[-400:], np.uint8) for v in values]) for values in masked)
        assert len(a) == len(b) > 300
        assert np.mean(a == b) < 0.2  # one in 256 by chance, but for the upper bytes of numbers

    @pytest.mark.slow
    def test_together_with_user_level_privacy(self, data, tmp_path):
        plain = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN)
        # Without noise, which is the server's own and not that of a simulation.
        algorithm = privacy.private(plain, clip=0.5, noise_multiplier=0.0, cohort=4)
        agreed = agreement([self.phase(algorithm, 4)], data, secure=flower.Secure(limit=0.5))
        seen = deploy(agreed, Loopback(sites(agreed, data, tmp_path)), tmp_path / 'server')
        assert apart(seen[-1].server, simulated(algorithm, data, 3, 4).state.server) < 1e-5

    @pytest.mark.slow
    @pytest.mark.parametrize('secure', [None, flower.Secure(limit=0.5)])
    def test_no_site_can_tell_the_noise_of_privacy_from_what_it_knows(self, data, tmp_path, secure):
        plain = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN)
        exact, noisy = (privacy.private(plain, clip=0.5, noise_multiplier=z, cohort=5) for z in (0.0, 8.0))
        agreed = agreement([self.phase(noisy, rounds=1)], data, secure=secure)
        models = [simulated(noisy, data, 1).state.server]
        for turn in 'ab':
            grid = Loopback(sites(agreed, data, tmp_path / turn))
            models.append(deploy(agreed, grid, tmp_path / turn / 'server')[-1].server)
        clean = simulated(exact, data, 1).state.server.variables.params
        noise = [ravel_pytree(tree.sub(u.variables.params, clean))[0] for u in models]
        for u in noise:
            assert np.std(u) == pytest.approx(8.0 * 0.5 / 5, rel=0.2)
        assert np.abs(np.corrcoef(noise) - np.eye(3)).max() < 0.3

    def test_a_threshold_is_not_rounded_down(self):
        for share, there, least in [
            (2 / 3, 5, 4),
            (2 / 3, 8, 6),
            (2 / 3, 9, 6),
            (0.9, 5, 5),
            (0.75, 3, 3),
            (0.6, 5, 3),
            (0.56, 25, 14),
        ]:
            assert _secure.threshold(flower.Secure(threshold=share), there) == least

    @pytest.mark.parametrize('sites', range(2, 12))
    @pytest.mark.parametrize('threshold', [0.5 + 1e-12, 0.51, 0.6, 2 / 3, 1.0])
    def test_two_sums_of_one_round_cannot_both_have_enough_sites(self, sites, threshold):
        assert sites < 2 * _secure.threshold(flower.Secure(threshold=threshold), sites) <= 2 * sites

    @pytest.mark.slow
    def test_stages_without_messages_tell_no_more_than_sums(self, data, tmp_path):
        train = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN)
        tune = finetune.algorithm(toys.task, toys.opt, plan=toys.PLAN)
        agreed = agreement(
            [self.phase(train, rounds=1), flower.Phase(tune, TUNE, name='tune')], data, secure=flower.Secure(limit=4.0)
        )
        grid = Loopback(sites(agreed, data, tmp_path))
        seen = deploy(agreed, grid, tmp_path / 'server')
        assert [row.phase for row in seen] == ['train', 'tune']
        assert seen[-1].row['sites'] == 5
        assert 'loss' not in seen[-1].row
        told = [m.content.array_records['info'] for m in grid.log if 'info' in m.content.array_records]
        assert len(told) == 5
        assert all(not array.numpy().any() for record in told for array in record.values())
        for k, held in enumerate(states(agreed, data, tmp_path, 1)):  # they were tuned all the same
            assert held is not None, k
            noted = [json.loads(line) for line in (tmp_path / f'site-{k}/sent.jsonl').read_text().splitlines()]
            assert not any('loss' in row for row in noted)

    @pytest.mark.slow
    def test_state_stays_at_sites(self, data, tmp_path):
        algorithm = scaffold.algorithm(toys.task, toys.opt, plan=toys.PLAN)
        agreed = agreement([self.phase(algorithm, 4)], data, secure=flower.Secure())
        seen = deploy(agreed, Loopback(sites(agreed, data, tmp_path)), tmp_path / 'server')
        assert apart(seen[-1].server, simulated(algorithm, data, 3, 4).state.server) < 1e-4

    @pytest.mark.parametrize('name', ['fedavg, krum', 'ccvr'])
    def test_whoever_looks_at_every_message_is_refused(self, data, name):
        agreed = agreement([self.phase(ALGORITHMS[name])], data, secure=flower.Secure())
        with pytest.raises(ValueError, match='sums alone'):
            flower.server_app(agreed, 'nowhere')

    @pytest.mark.filterwarnings('ignore:round 1')
    def test_messages_beyond_the_limit_are_not_sent(self, data, tmp_path):
        algorithm = fedavg.algorithm(toys.task, local.sgd(100.0), plan=toys.PLAN)
        agreed = agreement([self.phase(algorithm)], data, secure=flower.Secure(limit=1.0))
        with pytest.raises(RuntimeError, match='round 1'):
            deploy(agreed, Loopback(sites(agreed, data, tmp_path)), tmp_path / 'server', flower.Patience(2, None, 2))

    @pytest.mark.parametrize(
        ('secure', 'match'),
        [
            (flower.Secure(threshold=0.5), 'half of the sites'),
            (flower.Secure(least=6), 'no sum of 6'),
            (flower.Secure(levels=2**31), 'fewer levels'),
            (flower.Secure(limit=0), 'limit must be positive'),
            (flower.Secure(limit=0.9), "limit must be at least 1, not 0.9: phase '.*' sends what a message weighs"),
            (flower.Secure(least=1), 'least must be at least 2'),
            (flower.Secure(levels=1), 'levels must be at least 2'),
        ],
    )
    def test_settings_that_protect_nobody(self, data, secure, match):
        agreed = agreement([self.phase(fedavg.algorithm(toys.task, toys.opt))], data, secure=secure)
        with pytest.raises(ValueError, match=match):
            flower.client_app(agreed, lambda context: None)

    def test_defaults_are_those_of_the_guide(self):
        assert flower.Secure()._asdict() == {'limit': 8.0, 'least': 3, 'threshold': 2 / 3, 'levels': 4_194_304}

    def test_settings_at_their_bounds(self, data):
        algorithm = fedavg.algorithm(toys.task, toys.opt)
        for cohort, clients, secure, match in [
            (3, 5, flower.Secure(least=4), 'no sum of 4 sites comes out of a cohort of 3'),
            (None, 4, flower.Secure(levels=2**30), 'beyond 2.32: take fewer levels'),
        ]:
            agreed = agreement([self.phase(algorithm, cohort)], data, secure=secure)._replace(clients=clients)
            with pytest.raises(ValueError, match=match):
                flower.server_app(agreed, 'nowhere')
        for secure in (flower.Secure(least=3), flower.Secure(levels=2**32 // 5)):
            flower.server_app(agreement([self.phase(algorithm, 3)], data, secure=secure), 'nowhere')

    def test_entries_beyond_the_limit_and_nan_are_not_clipped(self, data):
        agreed = agreement([self.phase(ALGORITHMS['fedavg'])], data, secure=flower.Secure(limit=2.0))
        leaves, structure = jax.tree.flatten(_plan.checked(agreed)[0].message)

        def sent(value, size):
            message = [np.zeros(u.shape, u.dtype) for u in leaves]
            message[0].reshape(-1)[0] = value
            return _secure.vector(agreed, 0, jax.tree.unflatten(structure, message), size, 90)

        assert np.abs(sent(2.0, 90)).max() == 2.0
        assert np.abs(sent(-2.4, 45)).max() == pytest.approx(1.2)  # the largest site would send the double
        for value in (2.01, -2.01, np.nan, np.inf):
            with pytest.raises(flower.WireError, match='goes beyond the limit'):
                sent(value, 90)

    def test_a_server_learns_of_who_was_there_what_simulation_tells_it(self, data):
        told = ALGORITHMS['fedavg']._replace(
            aggregate=aggregators.total, server=lambda key, server, aggregate: (key, aggregate[1:])
        )
        ids = np.array([0, 5, 2], np.int32)  # the second one of three is away
        blank = _plan.blank(agreement([self.phase(told)], data), data.size)
        key, found = _rounds.unseen_step(self.phase(told))(TUNE, (), blank, ids, jnp.ones(3))
        assert [float(u) for u in found] == [40 + 61, 2, 3]
        assert (jax.random.key_data(key) == jax.random.key_data(TUNE)).all()


@pytest.mark.parametrize(
    ('change', 'match'),
    [
        ({'phases': ()}, 'needs a phase'),
        ({'clients': 0}, 'clients must be'),
        ({'num_classes': 1}, 'num_classes must be'),
        ({'init_key': 3}, 'init_key'),
        ({'phases': ('fedavg',)}, 'phase'),
        ({'example': (12,)}, 'example must have a shape and a type'),
        ({'secure': True}, 'secure must be of the type Secure'),
    ],
)
def test_agreements_that_cannot_be_carried_out(data, change, match):
    agreed = agreement([flower.Phase(fedavg.algorithm(toys.task, toys.opt), ROUNDS)], data)._replace(**change)
    for app in (lambda: flower.client_app(agreed, lambda context: None), lambda: flower.server_app(agreed, 'nowhere')):
        with pytest.raises(ValueError, match=match):
            app()


@pytest.mark.parametrize(
    ('phase', 'match'),
    [
        ({'rounds': 0}, 'rounds must be'),
        ({'cohort': 6}, 'cannot be drawn'),
        ({'key': 1}, 'key'),
        ({'name': 'a/b'}, 'name must be one of a folder'),
        ({'name': '\\..'}, 'name must be one of a folder'),
        ({'name': None}, 'name must be one of a folder'),
    ],
)
def test_phases_that_cannot_be_carried_out(data, phase, match):
    first = flower.Phase(fedavg.algorithm(toys.task, toys.opt), ROUNDS)._replace(**phase)
    with pytest.raises(ValueError, match=match):
        flower.server_app(agreement([first], data), 'nowhere')


@pytest.mark.parametrize(
    'settings',
    [{'least': 0}, {'least': 6}, {'most': 0}, {'evaluate_every': 0}, {'nodes': {1: 0, 2: 0}}, {'patience': 3}],
)
def test_servers_that_cannot_be(data, settings):
    agreed = agreement([flower.Phase(fedavg.algorithm(toys.task, toys.opt), ROUNDS)], data)
    with pytest.raises(ValueError, match=next(iter(settings))):
        flower.server_app(agreed, 'nowhere', **settings)


def test_servers_at_their_bounds(data):
    algorithm = fedavg.algorithm(toys.task, toys.opt)
    flower.server_app(agreement([flower.Phase(algorithm, ROUNDS, cohort=5)], data), 'nowhere', least=5)
    flower.server_app(agreement([flower.Phase(algorithm, ROUNDS, cohort=1)], data), 'nowhere')  # of two by default


def test_whatever_differs_is_another_agreement(data):
    phase = flower.Phase(ALGORITHMS['fedavg'], ROUNDS, 2)
    agreed = agreement([phase], data)
    phases = [phase._replace(**{name: value}) for name, value in [('key', TUNE), ('rounds', 3), ('cohort', 2)]]
    phases.append(phase._replace(algorithm=ALGORITHMS['scaffold']))
    others = [agreed._replace(phases=[other]) for other in phases] + [agreed._replace(phases=[phase, phase])]
    secure = flower.Secure()
    for name, values in {
        'init_key': [TUNE],
        'clients': [6],
        'example': [jax.ShapeDtypeStruct((3,), jnp.float32), jax.ShapeDtypeStruct(data.x.shape[1:], jnp.int32)],
        'num_classes': [6],
        'half': [True],
        'secure': [secure, secure._replace(limit=1.0), secure._replace(least=2), secure._replace(threshold=0.9)],
    }.items():
        others += [agreed._replace(**{name: value}) for value in values]
    names = [_plan.fingerprint(it) for it in (agreed, *others)]
    assert len({*names}) == len(names)
    assert _plan.fingerprint(agreement([phase], data)) == names[0]
