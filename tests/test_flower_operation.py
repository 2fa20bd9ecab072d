"""What operators of a consortium meet: sites that are slow, away or of another version, and what is kept of a run."""

import json
import stat
import time
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from flwr.app import Error, Message
from loopback import Loopback, agreement, deploy, own, serve, sites, told
from test_contract import ALGORITHMS

from fedjax_nc import evaluate, flower, local, privacy, saving, simulate, training
from fedjax_nc.algorithms import fedavg, fednh, fedper, finetune, latest, scaffold
from fedjax_nc.base import State
from fedjax_nc.data import federate
from fedjax_nc.flower import _plan, _secure, _server, _site, _wire

ROUNDS, TUNE = jax.random.key(1), jax.random.key(2)
FEDAVG = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN)


@pytest.fixture(scope='module')
def data():
    return toys.ragged((20, 7, 12))


def empty(data):
    """The data of a site that has none."""
    first = own(data, 0)
    return first._replace(size=jnp.zeros_like(first.size), counts=jnp.zeros_like(first.counts))


def away(nodes, kinds, rounds=None, phase=0):
    """A fault: these nodes do not answer such messages, of these rounds of the phase."""

    def change(node, message, reply):
        ask = message.content.config_records.get('ask', {})
        asked = rounds is None or (ask.get('phase'), ask.get('round')) in [(phase, t) for t in rounds]
        return None if node in nodes and message.metadata.message_type in kinds and asked else reply

    return change


@pytest.mark.filterwarnings('ignore::UserWarning')
def test_one_site_is_no_round_by_default(data, tmp_path):
    agreed = agreement([flower.Phase(FEDAVG, ROUNDS)], data)
    grid = Loopback(sites(agreed, data, tmp_path), away((102, 103), ('train.round',)))
    patience = flower.Patience(0.2, None, 0.5)
    with pytest.raises(RuntimeError, match=r'1 of at least 2 sites answered and not \[1, 2\]'):
        deploy(agreed, grid, tmp_path / 'server', patience)
    assert deploy(agreed, grid, tmp_path / 'server', patience, least=1)[-1].row['sites'] == 1


def test_neither_rounds_nor_tests_wait_longer_for_a_silent_site(data, tmp_path):
    agreed = agreement([flower.Phase(FEDAVG, ROUNDS)], data)
    grid = Loopback(sites(agreed, data, tmp_path), away((102,), ('train.round', 'evaluate')))
    began = time.monotonic()
    row = deploy(agreed, grid, tmp_path / 'server', flower.Patience(100.0, 0.1, 5.0))[-1].row
    assert (row['sites'], row['tested']) == (2, 32)
    assert time.monotonic() - began < 80


@pytest.mark.slow
def test_a_site_without_a_round_of_a_stage_is_told_so(data, tmp_path):
    tune = finetune.algorithm(toys.task, toys.opt, plan=toys.PLAN)
    agreed = agreement([flower.Phase(FEDAVG, ROUNDS), flower.Phase(tune, TUNE, name='personal')], data)
    grid = Loopback(sites(agreed, data, tmp_path), away((103,), ('train.round',), rounds=[1], phase=1))
    with pytest.warns(UserWarning, match='no round of personal counted with this site'):
        deploy(agreed, grid, tmp_path / 'server', flower.Patience(0.5, None, 5.0))
    about = [saving.load(tmp_path / f'site-{k}/1-personal.safetensors', tune).about for k in range(3)]
    assert [said['last_round'] for said in about] == [1, 1, 0]
    assert [said['rounds'] for said in about] == [1, 1, 1]
    assert stat.S_IMODE((tmp_path / 'site-0').stat().st_mode) == 0o700


def test_who_took_part_is_on_disk_before_anything_is_published(data, tmp_path):
    agreed = agreement([flower.Phase(FEDAVG, ROUNDS, 2)], data)

    def fails(number, state):
        raise OSError('no space left')

    with pytest.raises(OSError, match='no space'):
        deploy(agreed, Loopback(sites(agreed, data, tmp_path)), tmp_path / 'server', measure=fails)
    (line,) = (tmp_path / 'server/0-train/sites.jsonl').read_text().splitlines()
    said = json.loads(line)
    assert (said['round'], said['sites'], said['away'], said['refused']) == (1, [0, 1, 2], [], [])


def test_sites_test_the_state_after_every_second_round_and_the_last(data, tmp_path):
    agreed = agreement([flower.Phase(FEDAVG, ROUNDS, 3)], data)
    models = [tmp_path / f'site-{k}/0-train.safetensors' for k in range(3)]
    there = []

    def measure(number, state):
        there.append([path.exists() for path in models])
        return {'number': number, 'after': state.server.round}

    seen = deploy(
        agreed, Loopback(sites(agreed, data, tmp_path)), tmp_path / 'server', evaluate_every=2, measure=measure
    )
    assert ['tested' in s.row for s in seen] == [False, True, True]
    assert not any('personal_accuracy' in s.row for s in seen)  # nobody has a model of its own
    assert [(s.row['number'], s.row['after']) for s in seen] == [(0, 1), (0, 2), (0, 3)]
    table = evaluate.per_client(FEDAVG, State(seen[1].server, ()), data).sum(0)
    assert seen[1].row['accuracy'] == pytest.approx(np.trace(table) / table.sum())
    assert there == [[False] * 3] * 3  # a model is for after the last round
    for path in models:
        assert saving.load(path, FEDAVG).about['last_round'] == 3


@pytest.mark.parametrize('name', ['round', 'accuracy'])
def test_what_is_measured_does_not_stand_in_the_place_of_what_rows_say(data, tmp_path, name):
    agreed = agreement([flower.Phase(FEDAVG, ROUNDS)], data)
    with pytest.raises(ValueError, match=f"'{name}' is what rows say themselves"):
        deploy(
            agreed,
            Loopback(sites(agreed, data, tmp_path)),
            tmp_path / 'server',
            measure=lambda number, state: {'other': 1, name: 0.0},
        )


def test_where_no_model_is_for_everybody_accuracy_is_that_of_each_ones_own(data, tmp_path):
    agreed = agreement([flower.Phase(ALGORITHMS['solo'], ROUNDS)], data)
    (seen,) = deploy(agreed, Loopback(sites(agreed, data, tmp_path)), tmp_path / 'server')
    assert 'accuracy' not in seen.row
    assert 0 <= seen.row['personal_accuracy'] <= 1
    assert not (tmp_path / 'server/0-train/model.safetensors').exists()


def test_a_server_that_is_done_hands_the_model_to_who_was_away(data, tmp_path):
    agreed = agreement([flower.Phase(FEDAVG, ROUNDS)], data)
    found = []

    def site(k):
        def finds(context):
            found.append(k)
            return flower.Site(k, own(data, k), tmp_path / f'site-{k}', own(data, k))

        return finds

    apps = [flower.client_app(agreed, site(k)) for k in range(3)]
    model = tmp_path / 'site-2/0-train.safetensors'

    def broken(message, context):
        if message.metadata.message_type == 'evaluate':
            raise TimeoutError
        return apps[2](message, context)

    with pytest.warns(UserWarning, match='the tests of node 103 do not count'):
        deploy(agreed, Loopback([*apps[:2], broken]), tmp_path / 'server')
    assert not model.exists()
    assert deploy(agreed, Loopback(apps), tmp_path / 'server') == []
    assert model.exists()
    assert sorted(found) == [0, 1, 2]  # each is asked for its site once


def test_a_round_that_fails_after_others_is_asked_for_again(data, tmp_path, monkeypatch):
    agreed = agreement([flower.Phase(FEDAVG, ROUNDS, 3)], data)
    clock, failed = [0.0], []
    monkeypatch.setattr(_server, 'time', types.SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda seconds: None))

    def change(node, message, reply):
        if message.metadata.message_type != 'train.round':
            return reply
        clock[0] += 10.0 * (node == 101)
        if message.content['ask']['round'] == 3 and len(failed) < 3:
            failed.append(node)
            return Message(Error(2, 'no'), reply_to=message)
        return reply

    grid = Loopback(sites(agreed, data, tmp_path), change)
    with pytest.warns(UserWarning, match='round 3 of train is asked for again'):
        seen = deploy(agreed, grid, tmp_path / 'server', flower.Patience(5.0, None, 25.0))
    assert [s.row['sites'] for s in seen] == [3, 3, 3]


def test_a_state_that_is_not_finite_is_not_kept(data, tmp_path):
    def server(key, server, aggregate):
        after = FEDAVG.server(key, server, aggregate)
        v = after.variables
        params = jax.tree.map(lambda u: jnp.where(after.round > 1, jnp.inf, u), v.params)
        return after._replace(variables=v._replace(params=params))

    agreed = agreement([flower.Phase(FEDAVG._replace(server=server), ROUNDS, 3)], data)
    with pytest.raises(training.DivergedError, match='round 2 of train left the server not finite'):
        deploy(agreed, Loopback(sites(agreed, data, tmp_path)), tmp_path / 'server')
    assert [row['round'] for row in records(tmp_path / 'server/0-train/metrics.jsonl')] == [1]
    assert len(records(tmp_path / 'server/0-train/sites.jsonl')) == 1


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.filterwarnings('ignore::UserWarning')
def test_both_ends_have_a_record_of_what_was_sent(data, tmp_path):
    agreed = agreement([flower.Phase(FEDAVG, ROUNDS, 2)], data)
    gone = away((103,), ('train.round',), rounds=[2])

    def change(node, message, reply):
        ask = message.content.config_records.get('ask', {})
        if (node, message.metadata.message_type, ask.get('round')) == (102, 'train.round', 2):
            return Message(Error(2, 'the disk is full'), reply_to=message)
        return gone(node, message, reply)

    grid = Loopback(sites(agreed, data, tmp_path), change)
    rows = [seen.row for seen in deploy(agreed, grid, tmp_path / 'server', flower.Patience(0.5, None, 5.0), least=1)]
    first, second = records(tmp_path / 'server/0-train/sites.jsonl')
    assert (first['sites'], first['away'], first['refused']) == ([0, 1, 2], [], [])
    assert (second['sites'], second['away']) == ([0], [1, 2])
    assert second['refused'] == ['site 1 answers with an error: the disk is full']
    assert [set(first[name]) for name in ('bytes_up', 'bytes_down', 'seconds')] == [{'0', '1', '2'}] * 3
    assert rows[1]['bytes_down'] < 0.6 * rows[0]['bytes_down']  # what first states are made of travels once
    assert set(second['bytes_up']) == set(second['seconds']) == {'0'}
    for row, said in zip(rows, (first, second), strict=True):
        assert (sum(said['bytes_up'].values()), len(said['refused'])) == (row['bytes_up'], row['refused'])
        assert sum(said['bytes_down'].values()) == row['bytes_down']
    for k, size in enumerate((20, 7, 12)):
        hello, *rounds, tests = records(tmp_path / f'site-{k}/sent.jsonl')
        assert (hello['kind'], hello['examples'], tests['kind']) == ('hello', size, 'tests')
        assert [(row['kind'], row['phase'], row['round'], row['masked']) for row in rounds] == [
            ('round', 0, 1, False), ('round', 0, 2, False),
        ]  # fmt: skip
        assert rounds[0]['bytes'] == first['bytes_up'][str(k)]
        assert np.isfinite(rounds[0]['loss'])
        assert tests['right'] <= tests['examples'] == size


@pytest.mark.slow
def test_records_of_what_was_masked_tell_no_loss(data, tmp_path):
    agreed = agreement([flower.Phase(FEDAVG, ROUNDS)], data, secure=flower.Secure())
    deploy(agreed, Loopback(sites(agreed, data, tmp_path)), tmp_path / 'server')
    (said,) = records(tmp_path / 'server/0-train/sites.jsonl')
    assert (said['sites'], said['refused'], 'seconds' in said) == ([0, 1, 2], [], False)
    for k in range(3):
        (row,) = (row for row in records(tmp_path / f'site-{k}/sent.jsonl') if row['kind'] == 'round')
        assert (row['masked'], row['bytes'], 'loss' in row) == (True, said['bytes_up'][str(k)], False)


@pytest.mark.filterwarnings('ignore::UserWarning')
def test_a_site_whose_examples_have_another_shape_is_told_by_its_number(data, tmp_path):
    agreed = agreement([flower.Phase(FEDAVG, ROUNDS)], data)
    narrow = own(data._replace(x=data.x[:, :-1]), 2)
    other = flower.client_app(agreed, lambda context: flower.Site(2, narrow, tmp_path / 'site-2'))
    grid = Loopback([*sites(agreed, data, tmp_path)[:2], other])
    width = data.x.shape[1]
    with pytest.warns(
        UserWarning, match=rf'site 2: data has examples float32\[{width - 1}\], and agreed are .*{width}'
    ):
        deploy(agreed, grid, tmp_path / 'server', flower.Patience(5.0, None, 0.5))


def test_a_site_whose_data_are_of_another_kind_is_refused(data, tmp_path):
    agreed, mine = agreement([flower.Phase(FEDAVG, ROUNDS)], data), own(data, 0)
    site = flower.Site(0, mine, tmp_path, mine)
    _site.fits(site, agreed)
    _site.fits(site._replace(client=2, test=None), agreed)
    two = federate(np.asarray(mine.x), np.asarray(mine.y), [[0, 1], [2]], data.num_classes)
    wrong = [two, federate(np.asarray(mine.x), np.asarray(mine.y), [[0, 1]], data.num_classes + 1)]
    wrong += [mine._replace(x=mine.x.astype(jnp.int32)), mine._replace(x=mine.x[:, :-1])]
    for other in wrong:
        for name in ('data', 'test'):
            with pytest.raises(flower.WireError, match=f'site 0: {name} '):
                _site.fits(site._replace(**{name: other}), agreed)
    for client in (3, -1, True):
        with pytest.raises(ValueError, match='client must be'):
            _site.fits(site._replace(client=client), agreed)


@pytest.mark.filterwarnings('ignore::UserWarning')
def test_what_spoils_the_model_is_hinted_at_when_honest_sites_fail(data, tmp_path):
    agreed = agreement([flower.Phase(FEDAVG, ROUNDS)], data)

    def broken(node, message, reply):
        if message.metadata.message_type != 'train.round':
            return reply
        return Message(Error(2, 'what site 0 sent goes to nan'), reply_to=message)

    patience = flower.Patience(0.2, None, 0.5)
    with pytest.raises(RuntimeError, match='with a lower `most`'):
        deploy(agreed, Loopback(sites(agreed, data, tmp_path), broken), tmp_path / 'server', patience)


@pytest.mark.filterwarnings('ignore::UserWarning')
def test_what_ends_a_run_says_why_messages_were_refused(data, tmp_path):
    agreed = agreement([flower.Phase(FEDAVG, ROUNDS)], data)

    def full(node, message, reply):
        return (
            reply if message.metadata.message_type != 'train.round' else Message(Error(2, 'no disk'), reply_to=message)
        )

    grid = Loopback(sites(agreed, data, tmp_path), full)
    with pytest.raises(RuntimeError, match=r'3 were refused, the first of them because site \d .*: no disk$'):
        deploy(agreed, grid, tmp_path / 'server', flower.Patience(0.2, None, 0.5))


@pytest.mark.filterwarnings('ignore::UserWarning')
@pytest.mark.parametrize(('hello', 'limit'), [(0.1, 'hello'), (9.0, 'start')])
def test_the_limit_that_was_too_short_is_named(data, tmp_path, hello, limit):
    agreed = agreement([flower.Phase(FEDAVG, ROUNDS)], data)
    grid = Loopback(sites(agreed, data, tmp_path), away((101, 102, 103), ('query.hello',)))
    with pytest.raises(RuntimeError, match=f'3 nodes are there .* raise Patience.{limit}'):
        deploy(agreed, grid, tmp_path / 'server', flower.Patience(0.2, None, 0.3, hello))


def test_sites_have_no_more_examples_than_was_agreed(data, tmp_path):
    agreed = agreement([flower.Phase(FEDAVG, ROUNDS)], data)
    grid = Loopback(sites(agreed, data, tmp_path))
    with pytest.warns(UserWarning, match='site 0 says 20 examples, and it has 19 at most'):
        seen = deploy(agreed, grid, tmp_path / 'server', flower.Patience(5.0, None, 0.2), sizes={0: 19, 1: 7})
    assert seen[-1].row['sites'] == 2
    for wrong, said in (({3: 1}, 'sizes must be of sites 0 to 2'), ({0: 0}, 'sizes')):
        with pytest.raises(ValueError, match=said):
            flower.server_app(agreed, tmp_path, sizes=wrong)


@pytest.mark.slow
@pytest.mark.parametrize('weight', [-1.0, 1e6])
def test_classes_weigh_no_more_than_a_sites_examples(data, tmp_path, weight):
    """Means by class divide by what sites say that they hold of each."""
    algorithm = fednh.algorithm(toys.tiny, toys.opt, plan=toys.PLAN)
    agreed = agreement([flower.Phase(algorithm, ROUNDS)], data)

    def lies(node, message, reply):
        if node == 102 and message.metadata.message_type == 'train.round':
            record = dict(reply.content.array_records['message'])
            (name,) = (name for name in record if name.endswith('weight'))
            record[name] = _wire.pack({'u': np.full(toys.CLASSES, weight, np.float32)})['u']
            reply.content['message'] = type(reply.content['message'])(record)
        return reply

    with pytest.warns(UserWarning, match='site 1 weighs its classes by other numbers than its 7 examples allow'):
        seen = deploy(agreed, Loopback(sites(agreed, data, tmp_path), lies), tmp_path / 'server')
    assert (seen[-1].row['sites'], seen[-1].row['refused']) == (2, 1)


def test_a_site_whose_data_grow_between_two_messages_takes_no_part(data, tmp_path):
    """Each message is a process of its own, which reads them anew, and weights are those that the server was told."""
    algorithm = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN)
    agreed = agreement([flower.Phase(algorithm, ROUNDS)], data)
    apps = sites(agreed, data, tmp_path)
    grown = flower.client_app(agreed, lambda context: flower.Site(1, own(data, 0), tmp_path / 'site-1'))
    before = apps[1]
    apps[1] = lambda message, context: (before if message.metadata.message_type.startswith('query') else grown)(
        message, context
    )
    with pytest.warns(UserWarning, match='site 1 .*told the server 7 examples and has'):
        seen = deploy(agreed, Loopback(apps), tmp_path / 'server')
    assert (seen[-1].row['sites'], seen[-1].row['refused']) == (2, 1)


def test_large_numbers_travel_whole_in_half_precision():
    """They would end a server otherwise that took them from a site."""
    a = {'w': jnp.array([[1e6, 0.1]]), 'v': jnp.array([[0.1, 2.0]])}
    record = _wire.pack(a, half=True)
    assert (record['w'].dtype, record['v'].dtype) == ('float32', 'float16')
    got = _wire.unpack(record, a, 'a site')
    np.testing.assert_array_equal(got['w'], a['w'])
    np.testing.assert_allclose(got['v'], a['v'], atol=1e-4)


def test_changes_too_small_for_half_precision_travel_whole():
    """Of late training, say; single small numbers in an array of larger ones do not matter."""
    a = {'late': jnp.full((4, 4), 1.7e-7), 'later': jnp.full((4, 4), 1e-6), 'mixed': jnp.array([[1e-8, 0.3]])}
    record = _wire.pack(a, half=True)
    assert {name: record[name].dtype for name in a} == {'late': 'float32', 'later': 'float32', 'mixed': 'float16'}
    np.testing.assert_array_equal(_wire.unpack(record, a, 'a site')['late'], a['late'])


def test_zeros_travel_as_half_and_vectors_whole():
    a = {'zeros': jnp.zeros((3, 4)), 'vector': jnp.full(5, 0.5), 'counts': jnp.ones((2, 3), jnp.int32)}
    record = _wire.pack(a, half=True)
    assert {name: record[name].dtype for name in a} == {'zeros': 'float16', 'vector': 'float32', 'counts': 'int32'}
    assert {name: u.dtype for name, u in _wire.unpack(record, a, 'a site').items()} == {
        k: u.dtype for k, u in a.items()
    }


def test_whole_numbers_and_truths_travel_as_what_they_are():
    like = {'n': jnp.ones((2, 3), jnp.int32), 'b': jnp.ones(4, bool)}
    counts = _wire.pack({'n': np.ones((2, 3), np.float16), 'b': like['b']})
    with pytest.raises(flower.WireError, match='sent as n is float16'):
        _wire.unpack(counts, like, 'a site')
    record = _wire.pack(like)
    said = record['b'].data[:-1] + b'\x02'
    record['b'] = type(record['b'])('bool', (4,), 'numpy.ndarray', said)
    with pytest.raises(flower.WireError, match='neither true nor false'):
        _wire.unpack(record, like, 'a site')


@pytest.mark.slow
def test_classes_that_fednh_weighs_by_agreement_are_taken(tmp_path):
    """A site with one example of a class may weigh it by e."""
    x = np.eye(4, 12, dtype=np.float32)
    data = federate(np.concatenate([x, x]), np.tile(np.arange(4), 2), [[0, 1], [2, 3], [4, 5, 6, 7]], 5)
    algorithm = fednh.algorithm(toys.tiny, toys.opt, plan=toys.PLAN, weigh='agreement', rho=0.0)
    agreed = agreement([flower.Phase(algorithm, ROUNDS, 12)], data)
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        seen = deploy(agreed, Loopback(sites(agreed, data, tmp_path)), tmp_path / 'server')
    assert seen[-1].row['sites'] == 3


def test_an_old_question_does_not_drop_newer_states(data, tmp_path):
    site = flower.Site(0, own(data, 0), tmp_path)
    for round, accepted in ((2, 1), (3, 2), (2, 1)):
        _site.keep(site, 'name', _site.Ask(0, round, [accepted]), {'u': jnp.float32(round)})
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {'0-000002.state', '0-000003.state'}
    _site.keep(site, 'name', _site.Ask(0, 5, [3]), {'u': jnp.float32(5)})
    assert {path.name for path in tmp_path.iterdir()} == {f'0-{t:06d}.state' for t in (2, 3, 5)}


def test_a_site_keeps_the_round_before_the_last_that_counted(data, tmp_path):
    site = flower.Site(0, own(data, 0), tmp_path)
    for round in range(1, 6):
        _site.keep(site, 'name', _site.Ask(0, round, [round - 1]), {'u': jnp.float32(round)})
        kept = {path.name for path in tmp_path.iterdir()}
        assert kept == {f'0-{t:06d}.state' for t in range(max(round - 2, 1), round + 1)}


def test_the_version_tells_commits_apart(monkeypatch, tmp_path):
    import fedjax_nc

    (tmp_path / '__init__.py').write_text('a = 1\n')
    known = _plan.library()
    assert known.startswith(f'{fedjax_nc.__version__}+')
    monkeypatch.setattr(fedjax_nc, '__file__', str(tmp_path / '__init__.py'))
    found = [_plan.library.__wrapped__()]
    (tmp_path / '__init__.py').write_text('a = 2\n')
    found.append(_plan.library.__wrapped__())
    (tmp_path / 'more.py').write_text('')
    found.append(_plan.library.__wrapped__())
    (tmp_path / 'more.py').rename(tmp_path / 'other.py')
    found.append(_plan.library.__wrapped__())
    assert len({known, *found}) == 5


def test_extremes_of_half_precision_travel_whole():
    for scale in (1e19, 1e25, 1e-23, 1e-30):
        a = {'w': jnp.full((3, 4), scale, jnp.float32)}
        record = _wire.pack(a, half=True)
        assert record['w'].dtype == 'float32'
        np.testing.assert_array_equal(_wire.unpack(record, a, 'a site', most=1e30)['w'], a['w'])


@pytest.mark.slow
def test_who_never_took_part_has_no_personal_accuracy(data, tmp_path):
    """Its own model is the one that it began with: of cohorts that are a part, and of whoever was away."""
    kept = latest.keep(fedavg.algorithm(toys.task, local.sgd(0.2), plan=local.Plan(8, 8)))
    agreed = agreement([flower.Phase(kept, ROUNDS, 1, 2)], data)
    row = deploy(agreed, Loopback(sites(agreed, data, tmp_path)), tmp_path / 'server')[-1].row
    state = simulate.init(kept, agreed.init_key, data)
    run = training.run(kept, ROUNDS, state, data, rounds=1, cohort=2, chunk=1, progress=False)
    took = np.asarray(simulate.participants(ROUNDS, 1, 3, 2))
    assert took.sum() == 2
    tables = np.asarray(evaluate.per_client(kept, run.state, data))
    own = tables[took].sum(0)
    np.testing.assert_allclose(row['personal_accuracy'], np.trace(own) / own.sum(), atol=1e-6)
    assert row['tested'] == tables.sum()
    generic = evaluate.generic(kept, State(run.state.server, ()), data.x, data.y, data.num_classes)
    assert row['accuracy'] == pytest.approx(float(evaluate.accuracy(generic)))
    assert row['accuracy'] != row['personal_accuracy']


@pytest.mark.filterwarnings('ignore::UserWarning')
def test_sites_without_examples_are_none_of_the_least(data, tmp_path):
    agreed = agreement([flower.Phase(FEDAVG, ROUNDS)], data)

    def made(k):
        return lambda context: flower.Site(k, own(data, k) if k else empty(data), tmp_path / f'site-{k}')

    apps = [flower.client_app(agreed, made(k)) for k in range(3)]
    silent = away((103,), ('train.round',))
    with pytest.raises(RuntimeError, match=r'1 of at least 2 sites answered and not \[2\]'):
        deploy(agreed, Loopback(apps, silent), tmp_path / 'server', flower.Patience(0.2, None, 0.5))
    assert deploy(agreed, Loopback(apps), tmp_path / 'server')[-1].row['sites'] == 3


@pytest.mark.filterwarnings('ignore::UserWarning')
def test_a_sum_unseen_begins_with_as_many_sites_as_it_needs(data, tmp_path):
    agreed = agreement([flower.Phase(FEDAVG, ROUNDS)], data, secure=flower.Secure(least=3))
    grid = Loopback(sites(agreed, data, tmp_path)[:2])
    with pytest.raises(RuntimeError, match='2 of at least 3 sites said hello'):
        deploy(agreed, grid, tmp_path / 'server', flower.Patience(0.2, None, 0.2))


def test_a_phase_that_begins_with_what_sites_keep_is_refused(data, tmp_path):
    per = fedper.algorithm(toys.task, toys.opt, plan=toys.PLAN)
    tune = finetune.algorithm(toys.task, toys.opt, plan=toys.PLAN)

    def enter(stage, key, state, data):
        v, head = state.server.variables, jax.tree.map(lambda u: u.mean(0), state.clients.head)
        server = state.server._replace(variables=v._replace(params={**v.params, 'head': head}))
        return simulate.join(stage, key, server, data.num_clients)

    phases = [flower.Phase(per, ROUNDS, 1), flower.Phase(tune, TUNE, 1, enter=enter, name='tune')]
    agreed = agreement(phases, data)
    with pytest.raises(ValueError, match='phase tune begins with what sites keep to themselves'):
        deploy(agreed, Loopback(sites(agreed, data, tmp_path)), tmp_path / 'server')


@pytest.mark.filterwarnings('ignore::UserWarning')
@pytest.mark.parametrize('third', ['nonsense', pytest.param('nothing', marks=pytest.mark.slow)])
def test_an_answer_that_cannot_count_does_not_hurry_the_others(data, tmp_path, third):
    """Once two have answered the others have half a second; nonsense is none of the two, and no examples neither."""
    agreed = agreement([flower.Phase(FEDAVG, ROUNDS)], data)

    class Slow(Loopback):
        def pull_messages(self, ids):
            ready = [n for n in ids if time.monotonic() >= self.due.get(n, 0)]
            return super().pull_messages(ready)

        def push_messages(self, messages):
            sent = list(messages)
            ids = list(super().push_messages(sent))
            late = {101: 0.2, 102: 1.5}
            self.due = {
                n: time.monotonic() + late.get(m.metadata.dst_node_id, 0) * (m.metadata.message_type == 'train.round')
                for m, n in zip(sent, ids, strict=True)
            }
            return ids

    def nonsense(node, message, reply):
        return told(reply, round=99) if node == 103 and message.metadata.message_type == 'train.round' else reply

    apps = sites(agreed, data, tmp_path)
    if third == 'nothing':
        apps[2] = flower.client_app(agreed, lambda context: flower.Site(2, empty(data), tmp_path / 'site-2'))
    grid = Slow(apps, nonsense if third == 'nonsense' else None)
    row = deploy(agreed, grid, tmp_path / 'server', flower.Patience(60.0, 0.5, 5.0), least=2)[-1].row
    assert (row['sites'], row['refused']) == ((2, 1) if third == 'nonsense' else (3, 0))


def test_sites_without_examples_are_none_of_those_that_hide_the_others(data, tmp_path):
    agreed = agreement([flower.Phase(FEDAVG, ROUNDS)], data, secure=flower.Secure(limit=4.0, least=3))

    def made(k):
        return lambda context: flower.Site(k, own(data, k) if k < 2 else empty(data), tmp_path / f'site-{k}')

    apps = [flower.client_app(agreed, made(k)) for k in range(3)]
    with (
        pytest.warns(UserWarning, match='has no examples, and a sum of few sites would show'),
        pytest.raises(RuntimeError, match='a sum is of 3 at least'),
    ):
        deploy(agreed, Loopback(apps), tmp_path / 'server', flower.Patience(1.0, None, 1.0))


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore::UserWarning')
def test_a_sum_needs_a_share_of_the_cohort_and_not_of_those_who_are_there(tmp_path):
    six = toys.ragged((10, 7, 12, 9, 11, 8))
    agreed = agreement([flower.Phase(FEDAVG, ROUNDS, 2)], six, secure=flower.Secure(limit=4.0, least=3))
    grid, rows = Loopback(sites(agreed, six, tmp_path)), []

    def leaves(phase, row, state):
        rows.append(row)
        for node in (104, 105, 106):
            grid.apps.pop(node, None)

    app = flower.server_app(
        agreed, tmp_path / 'server', patience=flower.Patience(2.0, None, 2.0), on_round=leaves, progress=False
    )
    with pytest.raises(RuntimeError, match='3 sites are there, and a sum is of 4 at least'):
        serve(app, grid)
    assert [row['sites'] for row in rows] == [6]


def test_what_is_clipped_to_the_limit_is_within_it(data):
    private = privacy.private(FEDAVG, clip=0.7, noise_multiplier=1.0, cohort=3)
    agreed = agreement([flower.Phase(private, ROUNDS)], data, secure=flower.Secure(limit=0.7))
    kind = _plan.checked(agreed)[0].message
    zeros = jax.tree.map(lambda u: jnp.zeros(u.shape, u.dtype), kind)
    size = int(data.size.max())
    for entry in np.random.default_rng(0).normal(5, 3, 40):
        leaves, structure = jax.tree.flatten(zeros)
        leaves[0] = leaves[0].reshape(-1).at[0].set(entry).reshape(leaves[0].shape)
        clipped = privacy._clipped(jax.tree.unflatten(structure, leaves), 0.7)
        assert np.abs(_secure.vector(agreed, 0, clipped, size, size)).max() <= 0.7


@pytest.mark.slow
def test_a_site_that_later_phases_would_count_is_left_out(data, tmp_path):
    """SCAFFOLD counts clients, whichever phase it is."""
    variates = scaffold.algorithm(toys.task, toys.opt, plan=toys.PLAN)

    def enter(stage, key, state, data):
        begun = simulate.init(stage, key, data)
        return begun._replace(server=begun.server._replace(variables=state.server.variables))

    agreed = agreement(
        [flower.Phase(FEDAVG, ROUNDS, 2), flower.Phase(variates, TUNE, 1, enter=enter, name='more')], data
    )
    grid = Loopback(sites(agreed, data, tmp_path))
    late = grid.apps.pop(103), grid.contexts[103]
    rows = []

    def comes(phase, row, state):
        rows.append((phase, row['sites'], state.server))
        grid.apps[103], grid.contexts[103] = late

    app = flower.server_app(
        agreed, tmp_path / 'server', patience=flower.Patience(5.0, None, 0.5), on_round=comes, progress=False
    )
    with pytest.warns(UserWarning, match='was not there at the beginning, on which the first state'):
        serve(app, grid)
    assert [row[:2] for row in rows] == [('train', 2), ('train', 2), ('more', 2)]
    assert float(rows[-1][2].extra.total) == 2
