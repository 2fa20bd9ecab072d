"""What a run says of itself: accuracies, time, bytes, where it came from."""

import dataclasses
import json
import os
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_nc import local, simulate
from fedjax_nc.data import federate, load_dataset
from fedjax_nc.experiments import Setting, measures, pipeline, provenance, recipes, scene, study, traffic
from fedjax_nc.models import MLP, from_flax, libdnnl

D, WIDTH, C = 12, 8, 5
BODY, HEAD = D * WIDTH + WIDTH, WIDTH * C + C
COUNTER = 4  # bytes of the round's number


@pytest.fixture(scope='module')
def told(tmp_path_factory):
    """A run on a common test set of clients of which some never take part, and the tables that it counted."""
    out, tables = tmp_path_factory.mktemp('run') / 'run', []
    setting = Setting(
        dataset='digits', max_examples=400, clients=8, rounds=3, participation=0.25, local_epochs=2, tests='common',
        personal='latest', algorithm='fedavg', eval_every=3, eval_last=2, lr=0.1, batch_size=16, seed=5,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        kept = measures.Measures.told
        patch.setattr(
            measures.Measures, 'told', lambda self, name, t: tables.append(np.asarray(t)) or kept(self, name, t)
        )
        summary = pipeline.run(setting, out, progress=False)
    (counted,) = tables
    return setting, out, summary, counted, np.asarray(scene.load(setting)[1].counts)


def test_the_setting_is_written_whole(told):
    setting, out, *_ = told
    text = (out / 'config.json').read_text()
    assert 'null' not in text
    assert Setting.of(json.loads(text)) == setting


def test_the_summary_is_what_was_returned(told):
    _, out, summary, *_ = told
    text = (out / 'summary.json').read_text()
    assert json.loads(text) == summary
    assert 'NaN' not in text
    said = {name: summary[name] for name in ('algorithm', 'dataset', 'seed', 'rounds')}
    assert said == {'algorithm': 'fedavg', 'dataset': 'digits', 'seed': 5, 'rounds': 3}


def test_time_is_told_in_parts(told):
    *_, summary, _, _ = told
    parts = dict(summary['seconds'])
    total = parts.pop('total')
    assert set(parts) == {'data', 'initialisation', 'compilation', 'rounds', 'evaluation', 'personal'}
    assert all(seconds > 0 for seconds in parts.values())
    assert total == pytest.approx(sum(parts.values()))
    assert summary['rounds_per_second'] == pytest.approx(3 / parts['rounds'])
    assert summary['compile_seconds'] == parts['compilation']


def test_where_it_was_run(told):
    *_, summary, _, _ = told
    assert summary['versions']['jax'] == summary['jax'] == jax.__version__
    assert summary['versions']['numpy'] == np.__version__
    needed = {'python', 'fedjax_nc', 'jax', 'jaxlib', 'flax', 'optax', 'numpy'}
    extra = {libdnnl.PACKAGE} if libdnnl._library() else set()  # which changes results by rounding
    assert set(summary['versions']) == needed | extra
    assert summary['device'].endswith(f'{os.cpu_count()} cores')
    assert 10**8 < summary['peak_process_bytes'] < 10**11


def test_accuracies_go_together(told):
    _, out, summary, *_ = told
    y = load_dataset('digits').y_test
    shares = np.bincount(y, minlength=10) / len(y)
    np.testing.assert_allclose(shares @ summary['class_accuracy'], summary['global_accuracy'], rtol=1e-5)
    seen = [json.loads(line) for line in (out / 'metrics.jsonl').read_text().splitlines()]
    assert ['accuracy' in row for row in seen] == [False, True, True]
    assert summary['global_accuracy'] == seen[-1]['accuracy']
    np.testing.assert_allclose(summary['global_accuracy_last2'], (seen[1]['accuracy'] + seen[2]['accuracy']) / 2)


def test_clients_count_by_the_classes_that_they_have(told):
    """FedNH's PM(V) and PM(L), from the tables of every client's model on the same test set."""
    setting, _, summary, tables, counts = told
    took = tables.sum((1, 2)) > 0
    assert 0 < took.sum() < setting.clients
    plain, present, labels = [], [], []
    for table, have in zip(tables[took], counts[took], strict=True):
        hits = [table[c, c] / table[c].sum() for c in range(10)]
        plain.append(np.trace(table) / table.sum())
        present.append(np.mean([hits[c] for c in range(10) if have[c]]))
        labels.append(sum(have[c] * hits[c] for c in range(10)) / have.sum())
    for end, values in (('', plain), ('_present', present), ('_labels', labels)):
        np.testing.assert_allclose(summary[f'personal_accuracy{end}'], np.mean(values), rtol=1e-5)
        np.testing.assert_allclose(summary[f'personal_accuracy{end}_std'], np.std(values), rtol=1e-4)
    assert len({round(summary[f'personal_accuracy{end}'], 6) for end in ('', '_present', '_labels')}) == 3
    np.testing.assert_allclose(summary['personal_accuracy_low'], np.percentile(plain, 10), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('algorithm', 'name'), [('feddyn', 'global_accuracy_averaged_last2'), ('fedproto', 'personal_accuracy_head')]
)
def test_other_views_of_a_state_are_measured_beside_it(algorithm, name, tmp_path):
    setting = Setting(
        dataset='digits', max_examples=200, clients=4, rounds=3, local_epochs=1, algorithm=algorithm, eval_last=2,
        lr=0.1, batch_size=16, participation=0.5,
    )  # fmt: skip
    summary = pipeline.run(setting, tmp_path / 'run', progress=False)
    beside = summary['global_accuracy_last2' if 'global' in name else 'personal_accuracy']
    assert 0.1 < summary[name] <= 1
    assert summary[name] != beside
    study.known_metric('heading', name, setting)


@pytest.mark.slow
def test_personal_parts_have_the_momentum_of_their_setting():
    rates = {}
    for momentum in (0.0, 0.5):
        setting = Setting(dataset='digits', algorithm='ditto', personal_momentum=momentum, max_examples=200, clients=4)
        dataset, clients, _ = scene.load(setting)
        train = scene.build(setting, dataset).train
        state = simulate.init(train, jax.random.key(0), clients)
        rates[momentum] = simulate.make_round(train, chunk=1)(jax.random.key(1), state, clients)[0].clients.personal
    gaps = [np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, rates.values()), strict=True)]
    assert max(gaps) > 1e-4


def test_every_client_is_told(told):
    _, _, summary, tables, counts = told
    clients = summary['clients']
    assert clients['examples'] == counts.sum(1).tolist()
    assert clients['tested'] == tables.sum((1, 2)).tolist()
    own = clients['personal_accuracy']
    assert [a is None for a in own] == [n == 0 for n in clients['tested']]
    np.testing.assert_allclose(np.mean([a for a in own if a is not None]), summary['personal_accuracy'], rtol=1e-5)
    assert summary['class_examples'] == counts.sum(0).tolist()
    assert sum(summary['class_examples']) == sum(clients['examples']) == 400


def test_parameters_and_bytes(told):
    _, _, summary, *_ = told
    body, head = 64 * 200 + 200 + 200 * 200 + 200, 200 * 10 + 10
    assert summary['parameters'] == {'body': body, 'head': head, 'total': body + head}
    sent = summary['bytes']
    up = 4 * (body + head)
    assert (sent['client_up'], sent['client_once']) == (up, 0)
    assert sent['client_down'] in (up, up + COUNTER)
    assert (sent['round_up'], sent['up']) == (2 * up, 3 * 2 * up)
    assert sent['down'] == 3 * sent['round_down'] == 3 * 2 * sent['client_down']


@pytest.fixture(scope='module')
def few():
    rng = np.random.default_rng(0)
    y = np.arange(60) % C
    return federate(rng.normal(size=(60, D)).astype(np.float32), y, np.array_split(np.arange(60), 3))


def measured(name, data, **kwargs):
    """Traffic of a method after two rounds of all clients."""
    recipe = recipes.RECIPES[name](
        from_flax(MLP((WIDTH,))), local.sgd(0.1, decay=0.9), local.Plan(10, 1), rounds=2, **kwargs
    )
    state = simulate.init(recipe.train, jax.random.key(0), data)
    before = jax.device_get(state.server)
    play = jax.jit(simulate.make_round(recipe.train))
    for t in range(2):
        state, _ = play(jax.random.key(t), state, data)
    return traffic.of(recipe.train, before, state, data)


def test_fedavg_sends_its_model(few):
    assert measured('fedavg', few) == (4 * (BODY + HEAD) + COUNTER, 4 * (BODY + HEAD), 0)


def test_a_server_optimizer_keeps_its_state_to_itself(few):
    kept = measured('fedavg', few, server_opt=recipes.SERVER_OPTIMIZERS['fedadam']())
    assert kept == (4 * (BODY + HEAD) + COUNTER, 4 * (BODY + HEAD), 0)


def test_a_frozen_frame_travels_once(few):
    moving = BODY + WIDTH * C + C + 1  # the body, the projection and the temperature
    assert measured('fedetf', few) == (4 * moving + COUNTER, 4 * moving, 4 * C * C)


def test_a_head_that_stays_at_its_start_travels_once(few):
    assert measured('fedbabu', few) == (4 * BODY + COUNTER, 4 * BODY, 4 * HEAD)


def test_scaffold_sends_twice_as_much(few):
    model = 4 * (BODY + HEAD)
    assert measured('scaffold', few) == (2 * model + COUNTER, 2 * model, 0)


def test_prototypes_that_move_travel_each_round(few):
    """Up go class means and what they count, down the prototypes that came of them."""
    down, up, once = measured('fednh', few)
    moving = 4 * (BODY + 1)  # the body and the logit scale
    assert down == moving + 4 * WIDTH * C + COUNTER
    assert up == moving + 4 * WIDTH * C + 4 * C
    assert once == 0
    assert measured('feduh', few)[2] == 4 * WIDTH * C  # there they are frozen


def test_where_only_prototypes_are_sent(few):
    down, up, _ = measured('fedproto', few)
    assert 4 * WIDTH * C <= down <= 4 * (WIDTH + 1) * C + 2 * COUNTER
    assert 4 * WIDTH * C <= up <= 4 * (WIDTH + 1) * C


def git(folder, *args):
    who = ('-c', 'user.name=x', '-c', 'user.email=x@example.org')
    return subprocess.run(
        ['git', '-C', str(folder), *who, *args], capture_output=True, text=True, check=True
    ).stdout.strip()


class TestRevision:
    @pytest.fixture
    def package(self, tmp_path):
        package = tmp_path / 'checkout' / 'fedjax_nc'
        package.mkdir(parents=True)
        (package / '__init__.py').write_text('')
        git(package.parent, 'init', '-q')
        git(package.parent, 'add', '.')
        git(package.parent, 'commit', '-qm', 'first')
        return package

    def test_is_the_commit_with_a_sign_where_files_differ(self, package):
        commit = git(package.parent, 'rev-parse', 'HEAD')
        assert len(commit) == 40
        assert provenance.revision(package) == commit
        (package.parent / 'notes.txt').write_text('beside the package')
        assert provenance.revision(package) == commit
        (package / '__init__.py').write_text('x = 1')
        assert provenance.revision(package) == f'{commit}+'
        git(package.parent, 'add', '.')
        assert provenance.revision(package) == f'{commit}+'
        git(package.parent, 'commit', '-qm', 'second')
        assert provenance.revision(package) == git(package.parent, 'rev-parse', 'HEAD') != commit

    def test_is_that_of_no_other_checkout(self, package, tmp_path):
        installed = package.parent / 'venv' / 'site-packages' / 'fedjax_nc'
        installed.mkdir(parents=True)
        assert provenance.revision(installed) == ''
        (tmp_path / 'bare').mkdir()
        assert provenance.revision(tmp_path / 'bare') == ''
        assert provenance.revision(tmp_path / 'nowhere') == ''

    def test_needs_no_git(self, package, monkeypatch):
        monkeypatch.setenv('PATH', '')
        assert provenance.revision(package) == ''

    def test_packages_that_are_not_installed_have_no_version(self):
        assert provenance.version('no-such-package-anywhere') == 'unknown'


def test_a_client_whose_tests_are_empty_is_none():
    values = measures.each(jnp.array([0.5, 0.0, 0.25]), np.array([4, 0, 8]))
    assert values == [0.5, None, 0.25]


def test_where_nobody_is_tested_there_is_no_accuracy():
    """It would be 0 %, which is a number."""
    setting = Setting(dataset='digits', max_examples=40, clients=3, partition='iid', algorithm='fedavg')
    with pytest.raises(ValueError, match='no client has a test example'):
        scene.load(dataclasses.replace(setting, max_examples=20, clients=10, test_share=0.01))
    dataset, train, test = scene.load(setting)
    measure = measures.Measures(setting, scene.build(setting, dataset), (dataset, train, test))
    assert measure.told('personal_accuracy', jnp.zeros((3, 10, 10), jnp.int32)) == {}


@pytest.mark.slow
def test_a_resumed_run_tells_the_time_of_all_its_processes(tmp_path):
    setting = Setting(dataset='digits', max_examples=200, clients=4, rounds=2, algorithm='fedavg', local_epochs=1)
    first = pipeline.run(setting, tmp_path, progress=False)['seconds']
    rows = [json.loads(line) for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
    assert ['compile_seconds' in row for row in rows] == [True, False]
    longer = pipeline.run(dataclasses.replace(setting, rounds=4), tmp_path, resume=True, progress=False)
    assert all(longer['seconds'][part] > first[part] for part in first)
    rows = [json.loads(line) for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
    assert ['compile_seconds' in row for row in rows] == [True, False, True, False]
    assert longer['compile_seconds'] == pytest.approx(sum(row.get('compile_seconds', 0) for row in rows))
    assert longer['seconds']['rounds'] == pytest.approx(sum(row['seconds'] for row in rows))


class Stopped(Exception):
    pass


@pytest.mark.slow
def test_a_run_that_ends_early_is_not_told_without_an_evaluation(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, 'PAUSE', 1e-6)
    setting = Setting(
        dataset='digits', max_examples=200, clients=4, rounds=6, algorithm='fedavg', local_epochs=1, eval_every=9,
        eval_last=1,
    )  # fmt: skip

    def stop(row, state):
        if row['round'] == 3:
            raise Stopped

    with pytest.raises(Stopped):
        pipeline.run(setting, tmp_path, progress=False, on_round=stop)
    done = len((tmp_path / 'metrics.jsonl').read_text().splitlines())
    with pytest.raises(ValueError, match=rf'was not evaluated after {done}: let it have more'):
        pipeline.run(dataclasses.replace(setting, rounds=done), tmp_path, progress=False, resume=True)
    assert pipeline.run(setting, tmp_path, progress=False, resume=True)['rounds'] == 6


@pytest.mark.slow
def test_calibration_is_sent_too(tmp_path):
    setting = Setting(dataset='digits', max_examples=300, clients=5, rounds=2, algorithm='ccvr', local_epochs=1)
    said = pipeline.run(setting, tmp_path, progress=False)['bytes']
    width = 200  # of the body, whose means and covariances of ten classes are sent with their numbers
    assert said['calibration_up'] == 5 * 4 * 10 * (width * width + width + 1)
    assert said['up'] == 2 * said['round_up'] + said['calibration_up']
    assert said['calibration_down'] == 5 * 4 * 53_200  # the body, in the training of which the head takes part too
    assert said['down'] == 2 * said['round_down'] + 5 * said['client_once'] + said['calibration_down']


def test_classes_without_tests_have_no_accuracy(tmp_path):
    rng = np.random.default_rng(0)
    y = np.arange(90) % 3
    x = (np.eye(3, 6)[y] + 0.1 * rng.normal(size=(90, 6))).astype(np.float32)
    rows = np.flatnonzero(y[60:] != 1) + 60
    np.savez(tmp_path / 'own.npz', x_train=x[:60], y_train=y[:60], x_test=x[rows], y_test=y[rows])
    setting = Setting(dataset='own.npz', model='mlp', clients=3, partition='iid', rounds=1, algorithm='fedavg')
    told = pipeline.run(setting, tmp_path / 'run', data_dir=tmp_path, progress=False)
    assert told['class_tested'] == [10, 0, 10]
    assert told['class_accuracy'][1] is None
    np.testing.assert_allclose(np.mean([told['class_accuracy'][c] for c in (0, 2)]), told['global_accuracy'])


def test_a_clock_goes_on_from_its_file_whatever_is_in_it(tmp_path, monkeypatch):
    path = tmp_path / 'seconds.json'
    pipeline.write(path, {'data': 2.0})
    monkeypatch.setattr(pipeline, 'PAUSE', 0.0)
    with pipeline.Clock(path).part('data'):
        pass
    assert 2 < pipeline.known(path)['data'] < 3
    setting = Setting(dataset='digits', max_examples=200, clients=4, rounds=1, algorithm='fedavg', local_epochs=1)
    pipeline.write(path, {'data': 1000.0})  # of a run that was refused: there is no config.json
    assert pipeline.run(setting, tmp_path, progress=False)['seconds']['data'] < 1000
    assert set(pipeline.known(path)) == {'data', 'initialisation', 'evaluation', 'personal'}
    for damaged in ('{"data', '{"data": [1]}', '[]'):
        path.write_text(damaged)
        assert pipeline.Clock(path).seconds == {}


@pytest.mark.skipif(not provenance.HIGH_WATER[0].exists(), reason='the system does not forget peaks')
def test_the_peak_of_memory_is_that_since_it_was_forgotten():
    held = np.ones(60_000_000)
    before = provenance.peak_memory()['peak_process_bytes']
    size = held.nbytes
    del held
    provenance.forget_peak()
    assert provenance.peak_memory()['peak_process_bytes'] < before - size / 2


def test_where_the_system_does_not_tell_the_peak_is_that_of_the_process(monkeypatch, tmp_path):
    monkeypatch.setattr(provenance, 'HIGH_WATER', (tmp_path / 'no' / 'refs', tmp_path / 'status'))
    provenance.forget_peak()
    assert provenance.peak_memory()['peak_process_bytes'] > 10_000_000


@pytest.mark.slow
def test_runs_whose_examples_stay_on_the_host_begin_with_the_same_numbers():
    """A sparse frame is fitted in thousands of steps, which make much of how their program was rounded."""
    setting = Setting(dataset='digits', clients=4, max_examples=300, algorithm='fedloge')
    scenes = [scene.load(setting, None, host) for host in (False, True)]
    here, away = (measures.Measures(setting, scene.build(setting, s[0]), s).begun() for s in scenes)
    jax.tree.map(np.testing.assert_array_equal, here, away)
