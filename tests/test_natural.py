"""Clients that the data name: in `.npz` files, in parts of data sets, and as a partition of runs."""

import shutil

import numpy as np
import pytest

from fedjax_nc import data, experiments
from fedjax_nc.data import load_npz
from fedjax_nc.experiments import Setting, pipeline, runner, scene, seeds, study

OWNERS = np.array([7, 3, 3, 5, 7, 3] * 10)


def saved(folder, **changes):
    """60 training examples of the clients 3, 5 and 7, and 20 test examples of 3, 5 and 9."""
    rng = np.random.default_rng(0)
    y, y_test = np.arange(60) % 4, np.arange(20) % 4
    arrays = {
        'x_train': y[:, None] + rng.normal(size=(60, 5)).astype(np.float32), 'y_train': y,
        'x_test': y_test[:, None] + rng.normal(size=(20, 5)).astype(np.float32), 'y_test': y_test,
        'clients_train': OWNERS, 'clients_test': np.array([3, 3, 5, 9] * 5), 'classes': np.array(list('abcd')),
    }  # fmt: skip
    arrays = {name: value for name, value in {**arrays, **changes}.items() if value is not None}
    arrays |= {name: arrays[name].astype(np.float32) for name in ('x_train', 'x_test')}
    np.savez(folder / 'own.npz', **arrays)
    return folder / 'own.npz'


SMALL = {
    'dataset': 'own.npz', 'model': 'mlp', 'partition': 'natural', 'rounds': 2, 'local_epochs': 1, 'batch_size': 8,
    'eval_last': 1,
}  # fmt: skip


def test_what_was_saved_is_loaded(tmp_path):
    found = load_npz(saved(tmp_path))
    np.testing.assert_array_equal(found.clients_train, OWNERS)
    assert (found.clients_train.dtype, found.clients_test.dtype) == (np.int32, np.int32)
    assert (found.classes, found.num_classes) == (('a', 'b', 'c', 'd'), 4)
    other = load_npz(saved(tmp_path, clients_test=None, classes=np.array(list('abcde'))))
    assert (other.clients_test, other.num_classes) == (None, 5)


@pytest.mark.parametrize(
    ('changes', 'said'),
    [
        ({'clients_train': OWNERS[:-1]}, 'clients_train must be one for each of 60'),
        ({'clients_train': OWNERS - 4}, 'clients_train must lie in'),
        ({'clients_train': OWNERS / 2}, 'clients_train must be a vector of integers'),
        ({'clients_train': None}, 'clients_test without clients_train'),
        ({'classes': np.array(list('abc'))}, 'y_train must lie in'),
        ({'classes': np.arange(4)}, 'classes must be a vector of names'),
        ({'classes': np.array([{}] * 4, object)}, 'pickle'),
    ],
)
def test_other_arrays_are_refused(tmp_path, changes, said):
    with pytest.raises(ValueError, match=rf'own\.npz.*{said}') as info:
        load_npz(saved(tmp_path, **changes))
    assert '\n' not in str(info.value)


def test_names_of_clients_are_kept(tmp_path):
    arrays = {
        'x_train': np.ones((4, 2)), 'y_train': np.arange(4) % 2, 'x_test': np.ones((2, 2)), 'y_test': np.arange(2),
        'clients_train': np.array([0, 1, 1, 2]), 'clients_test': np.array([0, 2]),
    }  # fmt: skip
    np.savez(tmp_path / 'own.npz', **arrays, clients=['amy', 'bob', 'zed'])
    assert load_npz(tmp_path / 'own.npz').clients == ('amy', 'bob', 'zed')
    np.savez(tmp_path / 'own.npz', **arrays, clients=['amy', 'bob'])
    with pytest.raises(ValueError, match='2 names of clients for numbers up to 2'):
        load_npz(tmp_path / 'own.npz')
    np.savez(tmp_path / 'own.npz', **arrays, clients=np.arange(3))
    with pytest.raises(ValueError, match='clients must be a vector of their names'):
        load_npz(tmp_path / 'own.npz')


def test_clients_by_name_have_one_number_in_both_sets(tmp_path):
    train, test = ['cat', 'ann', 'bob', 'bob'], ['cat', 'bob']
    np.savez(
        tmp_path / 'own.npz', x_train=np.ones((4, 2)), y_train=np.arange(4) % 2, x_test=np.ones((2, 2)),
        y_test=np.arange(2), clients_train=train, clients_test=test,
    )  # fmt: skip
    found = load_npz(tmp_path / 'own.npz')
    assert [found.clients[k] for k in found.clients_train] == train
    assert [found.clients[k] for k in found.clients_test] == test


def test_parts_of_a_data_set_keep_their_clients(tmp_path):
    whole = load_npz(saved(tmp_path))
    rows = np.array([4, 0, 9])
    for part, kept in ((data.keep(whole, rows), rows), (data.subset(whole, 10, 0), None)):
        at = [int(np.flatnonzero((whole.x_train == x).all(1))[0]) for x in part.x_train]
        assert kept is None or at == kept.tolist()
        np.testing.assert_array_equal(part.clients_train, whole.clients_train[at])
        np.testing.assert_array_equal(part.y_train, whole.y_train[at])
        assert part.clients_test is whole.clients_test
    for wrong in ([60], [-1], [0.5], [[1]], [], None):
        with pytest.raises(ValueError, match='`rows`'):
            data.keep(whole, wrong)
    with pytest.raises(ValueError, match='`dataset`'):
        data.keep(None, [0])


def test_all_clients_with_their_own_tests(tmp_path):
    saved(tmp_path)
    dataset, train, test = scene.load(Setting(**SMALL, clients=3, tests='natural'), tmp_path)
    assert train.size.tolist() == [30, 10, 20]
    assert test.size.tolist() == [10, 5, 0]  # nobody is client 9, and client 7 is not tested
    for k, owner in enumerate((3, 5, 7)):
        for part, owners in ((train, dataset.clients_train), (test, dataset.clients_test)):
            rows = np.asarray(part.index[k, : int(part.size[k])])
            np.testing.assert_array_equal(rows, np.flatnonzero(owners == owner))


def test_several_clients_in_the_place_of_each(tmp_path):
    saved(tmp_path)
    setting = Setting(**{**SMALL, 'partition': 'by_domain'}, clients=5, tests='common', seed=4)
    dataset, train, _ = scene.load(setting, tmp_path)
    assert train.size.tolist() == [10, 15, 10, 10, 15]  # the third domain has one client
    wanted = data.by_domain(dataset.clients_train, 5, seed=4)
    for k, part in enumerate(wanted):
        np.testing.assert_array_equal(train.index[k, : len(part)], part)
        assert len(np.unique(dataset.clients_train[part])) == 1


def test_some_clients_are_drawn_by_the_seed(tmp_path):
    saved(tmp_path)
    seen = {tuple(scene.load(Setting(**SMALL, clients=2, tests='common', seed=s), tmp_path)[1].size.tolist())
            for s in range(20)}  # fmt: skip
    assert seen == {(30, 10), (30, 20), (10, 20)}


@pytest.mark.slow
@pytest.mark.parametrize('owners', [OWNERS, np.array(list('xxnaxsgn'))[OWNERS]])
def test_a_summary_says_who_was_drawn(tmp_path, owners):
    saved(tmp_path, clients_train=owners, clients_test=None)
    setting = Setting(**SMALL, clients=2, tests='split', algorithm='fedavg', seed=3)
    told = pipeline.run(setting, tmp_path / 'run', data_dir=tmp_path, progress=False)['clients']
    _, train, tested = scene.load(setting, tmp_path)
    assert len(told['ids']) == 2
    for k, who in enumerate(told['ids']):
        assert told['examples'][k] == int(train.size[k])
        assert (owners == who).sum() == int(train.size[k] + tested.size[k])


def test_long_tails_and_parts_of_the_training_set(tmp_path):
    saved(tmp_path)
    setting = Setting(**SMALL, clients=3, tests='split', imbalance=5, max_examples=50)
    dataset, train, test = scene.load(setting, tmp_path)
    assert int(train.size.sum() + test.size.sum()) == len(dataset.y_train) == len(dataset.clients_train)
    assert len(dataset.y_train) < 50


@pytest.mark.slow
@pytest.mark.parametrize('tests', ['natural', 'split'])
def test_a_run(tmp_path, tests):
    saved(tmp_path)
    setting = Setting(**SMALL, clients=3, participation=0.7, tests=tests)
    summary = experiments.run(setting, tmp_path / 'out', data_dir=tmp_path, progress=False)
    assert 0 <= summary['global_accuracy'] <= 1
    personal = summary['clients']['personal_accuracy']
    assert len(personal) == 3
    assert (personal[2] is None) == (tests == 'natural')


@pytest.mark.slow
def test_seeds_of_one_program(tmp_path):
    """Other clients by each seed, on one pool."""
    saved(tmp_path)
    settings = [Setting(**SMALL, clients=2, tests='natural', seed=s) for s in range(3)]
    together = seeds.run(settings, [tmp_path / str(s) for s in range(3)], data_dir=tmp_path, progress=False)
    alone = pipeline.run(settings[2], tmp_path / 'alone', data_dir=tmp_path, progress=False)
    assert together[2]['global_accuracy'] == alone['global_accuracy']


@pytest.mark.parametrize(
    ('changes', 'said'),
    [
        ({'clients': 4}, r'own\.npz has 3 clients of its own, not 4: lower clients'),
        ({'clients': 3, 'tests': 'natural', 'saved': {'clients_test': None}}, r"the test set of own\.npz is nobody's"),
        ({'clients': 3, 'saved': {'clients_train': None, 'clients_test': None}}, r'own\.npz has no clients of its own'),
        (
            {'partition': 'by_domain', 'saved': {'clients_train': None, 'clients_test': None}},
            r'partition by_domain goes by whose an example is, which own\.npz does not say: name their column',
        ),
        ({'clients': 3, 'loading': {'label': 'y'}}, r"loading of own\.npz: got an unexpected.*'label'.*load_npz"),
        ({'dataset': 'own.csv', 'loading': {}}, r"loading of own\.csv: missing.*'label'"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(tmp_path, changes, said):
    saved(tmp_path, **changes.pop('saved', {}))
    with pytest.raises(ValueError, match=said) as info:
        scene.load(Setting(**{**SMALL, **changes}), tmp_path)
    assert '\n' not in str(info.value)


@pytest.mark.parametrize(
    ('wrong', 'said'),
    [
        ({'partition': 'natural'}, 'cifar10 has no clients of its own'),
        ({'dataset': 'own.npz', 'tests': 'natural'}, "tests 'natural' go with the partition 'natural', not"),
        ({'loading': {'label': 'y'}}, 'loading is for files and folders of your own, not for cifar10'),
        ({'dataset': 'own.csv', 'loading': ['label']}, 'loading must name arguments'),
        ({'dataset': 'photos'}, 'or NAME.npz, NAME.csv, NAME.parquet, NAME/, not'),
        ({'dataset': 3}, 'dataset must be one of'),
    ],
)  # fmt: skip
def test_what_is_known_before_anything_is_loaded(wrong, said):
    with pytest.raises(ValueError, match=said):
        Setting(**wrong)


def test_a_long_tailed_name_is_its_imbalance():
    short, long = Setting(dataset='cifar100_lt'), Setting(dataset='cifar100', imbalance=100)
    assert (short, short.digest, short.name) == (long, long.digest, long.name)
    assert Setting(dataset='cifar10_lt', imbalance=50).imbalance == 50
    assert Setting.of(short.plain()) == short
    assert Setting(dataset='femnist', partition='iid').tests == 'split'


@pytest.mark.slow
def test_a_run_on_a_folder_of_images(tmp_path):
    from PIL import Image

    rng = np.random.default_rng(0)
    for label, name in enumerate(('dark', 'light')):
        (tmp_path / 'photos' / name).mkdir(parents=True)
        for i in range(12):
            pixels = (rng.integers(0, 100, (9, 8, 3)) + 150 * label).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / 'photos' / name / f'{i}.png')
    setting = Setting(
        dataset='photos/', loading={'test': 0.25, 'size': (8, 8)}, model='mlp', clients=2, partition='iid', rounds=2,
        local_epochs=1, batch_size=8, eval_last=1,
    )  # fmt: skip
    assert setting.name.startswith('fedetf-photos-')
    assert Setting.of(setting.plain()) == setting
    summary = experiments.run(setting, tmp_path / 'out', data_dir=tmp_path, progress=False)
    assert 0 <= summary['global_accuracy'] <= 1
    assert list(tmp_path.glob('photos-*.decoded'))


@pytest.mark.slow
@pytest.mark.parametrize('seeds_of_run', [[0], [0, 1]])
def test_a_study_says_where_its_data_have_changed_since(tmp_path, capsys, seeds_of_run):
    for folder, seed in (('a', 0), ('b', 1)):
        (tmp_path / folder).mkdir()
        saved(tmp_path / folder, x_train=np.random.default_rng(seed).normal(size=(60, 5)).astype(np.float32))
    table = {
        'title': 'Own', 'seeds': seeds_of_run, 'metrics': {'general': 'global_accuracy'},
        'setting': {**SMALL, 'clients': 2, 'tests': 'common'}, 'methods': {'FedAvg': {'algorithm': 'fedavg'}},
    }  # fmt: skip
    own = study.Study.of(table, 'own')
    times = {'a': 0, 'b': len(seeds_of_run), 'c': 0}  # of data that are gone nothing is known
    for folder in ('a', *times):
        runner.carry_out(own, tmp_path / 'out', data_dir=tmp_path / folder)
        lines = capsys.readouterr().err.splitlines()
        said = [line for line in lines if 'its data have changed since it was run' in line]
        assert len(said) == times[folder]
        assert all(f'delete {tmp_path / "out"}' in line for line in said)


def test_the_digest_of_a_folder_is_that_of_its_copy(tmp_path):
    setting = Setting(dataset='photos/')
    assert scene.digest(setting, tmp_path) == ''
    (tmp_path / 'photos' / 'cat').mkdir(parents=True)
    (tmp_path / 'photos' / 'cat' / '0.png').write_bytes(b'1234')
    first = scene.digest(setting, tmp_path)
    shutil.copytree(tmp_path / 'photos', tmp_path / 'there' / 'photos')
    assert scene.digest(setting, tmp_path / 'there') == first != ''
    (tmp_path / 'photos' / 'cat' / '1.png').write_bytes(b'1234')
    assert scene.digest(setting, tmp_path) != first
    assert scene.digest(Setting(dataset='digits'), tmp_path) == ''
