"""FEMNIST by writer: LEAF's `.json` files, and a run in which each writer is a client."""

import json

import jax
import numpy as np
import pytest

from fedjax_nc import data, evaluate, experiments, local, models, simulate, training
from fedjax_nc.algorithms import fedetf
from fedjax_nc.data import DatasetUnavailableError, load_dataset, load_femnist

WRITERS = ('f0000_14', 'f0001_41', 'f0002_07', 'f0003_00', 'f0004_33')
SHAPES = np.random.default_rng(7).random((62, 784)) < 0.5  # what each letter looks like


def drawn(rng, count):
    """Images [count, 784] of ink in [0, 1] on white, as LEAF writes them, and their labels: three letters a writer."""
    y = rng.choice(rng.choice(62, 3, replace=False), count)
    grey = np.where(SHAPES[y], 255, rng.integers(0, 60, (count, 784)))
    return grey, y


def write_leaf(folder, sizes=(20, 6)):
    """What `preprocess.sh -s niid --sf 0.05 -k 0 -t sample` leaves: writers in two files a split; returns all of it."""
    rng = np.random.default_rng(0)
    said = {}
    for split, size in zip(('train', 'test'), sizes, strict=True):
        said[split] = {name: drawn(np.random.default_rng((k, size)), size + k) for k, name in enumerate(WRITERS)}
        (folder / split).mkdir(parents=True)
        for part, names in enumerate((WRITERS[3:], WRITERS[:3])):
            content = {
                'users': list(rng.permutation(names)),
                'num_samples': [],
                'user_data': {
                    name: {'x': (said[split][name][0] / 255).tolist(), 'y': said[split][name][1].tolist()}
                    for name in names
                },
            }
            content['num_samples'] = [len(content['user_data'][name]['y']) for name in content['users']]
            file = folder / split / f'all_data_{part}_niid_05_keep_0_{split}_9.json'
            file.write_text(json.dumps(content))
    return said


def test_writers_are_clients(tmp_path, monkeypatch):
    said = write_leaf(tmp_path / 'femnist')
    dataset = load_dataset('femnist', tmp_path)
    assert (dataset.num_classes, dataset.name) == (62, 'femnist')
    assert (dataset.classes[0], dataset.classes[10], dataset.classes[36]) == ('0', 'A', 'a')
    assert (dataset.x_train.dtype, dataset.x_train.shape[1:]) == (np.uint8, (28, 28, 1))
    for k, name in enumerate(WRITERS):
        for split in ('train', 'test'):
            rows = getattr(dataset, f'clients_{split}') == k
            np.testing.assert_array_equal(getattr(dataset, f'x_{split}')[rows].reshape(-1, 784), said[split][name][0])
            np.testing.assert_array_equal(getattr(dataset, f'y_{split}')[rows], said[split][name][1])
    monkeypatch.setattr(json, 'load', lambda file: pytest.fail('read anew'))
    again = load_dataset('femnist', tmp_path)
    for one, other in zip(again, dataset, strict=True):
        np.testing.assert_array_equal(one, other)


def test_as_leaf_leaves_it(tmp_path):
    write_leaf(tmp_path / 'femnist' / 'data')
    assert len(load_femnist(tmp_path / 'femnist', cache=tmp_path).y_train) == 110


@pytest.mark.slow
def test_a_program_with_writers_as_clients(tmp_path):
    """The documented way: FedETF on writers, general accuracy and that of each writer's own test images."""
    write_leaf(tmp_path / 'femnist')

    femnist = data.load_dataset('femnist', tmp_path)
    train, test = (
        data.federate(x, y, data.natural(writers), femnist.num_classes)
        for x, y, writers in (
            (femnist.x_train, femnist.y_train, femnist.clients_train),
            (femnist.x_test, femnist.y_test, femnist.clients_test),
        )
    )
    algorithm = fedetf.algorithm(models.from_flax(models.MLP((64,))), local.sgd(0.1), plan=local.Plan(5, 4))
    k_init, k_train = jax.random.split(jax.random.key(0))
    run = training.run(algorithm, k_train, simulate.init(algorithm, k_init, train), train, rounds=4, progress=False)
    personal = evaluate.over_clients(evaluate.per_client(algorithm, run.state, test))
    table = evaluate.generic(algorithm, run.state, femnist.x_test, femnist.y_test, femnist.num_classes)

    assert train.size.tolist() == [20, 21, 22, 23, 24]
    assert test.size.tolist() == [6, 7, 8, 9, 10]
    assert 0 <= float(personal.mean) <= 1
    losses = [row['loss'] for row in run.history]
    assert losses[-1] < losses[0]
    assert int(table.sum()) == 40


@pytest.mark.slow
def test_a_run_by_its_name(tmp_path):
    write_leaf(tmp_path / 'femnist')
    setting = experiments.Setting(
        dataset='femnist', model='mlp', clients=4, rounds=2, local_epochs=1, batch_size=8, eval_last=1
    )
    assert (setting.partition, setting.tests) == ('natural', 'natural')
    summary = experiments.run(setting, tmp_path / 'out', data_dir=tmp_path, progress=False)
    assert 0 <= summary['global_accuracy'] <= 1
    assert len(summary['clients']['personal_accuracy']) == 4


def other_writers(content):
    content['users'][0] = 'nobody'


def spoiled(change):
    def spoil(path):
        content = json.loads(path.read_text())
        change(content, content['user_data'][content['users'][0]])
        path.write_text(json.dumps(content))

    return spoil


@pytest.mark.parametrize(
    ('spoil', 'said'),
    [
        (lambda path: path.write_text('{'), 'Expecting'),
        (lambda path: path.write_text('[' * 100_000), ''),
        (lambda path: path.write_text('[]'), ''),
        (lambda path: path.write_bytes(b'\xff\xfe'), ''),
        (spoiled(lambda c, d: c.pop('users')), 'users'),
        (spoiled(lambda c, d: c['users'].reverse()), ''),
        (spoiled(lambda c, d: c['users'].append(c['users'][0])), 'not of the same writers'),
        (spoiled(lambda c, d: c['num_samples'].pop()), 'not of the same writers'),
        (spoiled(lambda c, d: c['user_data'].update(nobody={})), 'not of the same writers'),
        (spoiled(lambda c, d: d['x'].pop()), 'samples, x'),
        (spoiled(lambda c, d: d['x'][0].pop()), ''),
        (spoiled(lambda c, d: d['y'].pop()), 'samples, x'),
        (spoiled(lambda c, d: d['y'].__setitem__(0, 62)), 'labels outside'),
        (spoiled(lambda c, d: d['y'].__setitem__(0, -1)), 'labels outside'),
        (spoiled(lambda c, d: d['y'].__setitem__(0, 0.5)), 'float64'),
        (spoiled(lambda c, d: d['x'][0].__setitem__(0, 1.5)), 'pixels outside'),
        (spoiled(lambda c, d: d['x'][0].__setitem__(0, float('nan'))), 'pixels outside'),
        (spoiled(lambda c, d: d['x'][0].__setitem__(0, 'a')), ''),
        (spoiled(lambda c, d: c['users'].__setitem__(0, ['a'])), ''),
    ],
)
def test_damaged_files(tmp_path, spoil, said):
    write_leaf(tmp_path / 'femnist')
    path = sorted((tmp_path / 'femnist' / 'train').iterdir())[0]
    spoil(path)
    with pytest.raises(ValueError, match=rf'\.json is damaged \(.*{said}.*make it again with preprocess\.sh') as info:
        load_dataset('femnist', tmp_path)
    assert str(path) in str(info.value)
    assert '\n' not in str(info.value)
    assert not list(tmp_path.glob('*.decoded'))


def test_a_writer_in_two_files(tmp_path):
    write_leaf(tmp_path / 'femnist')
    path = sorted((tmp_path / 'femnist' / 'train').iterdir())[0]
    path.with_name('z.json').write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match="'f0003_00' is in two files"):
        load_dataset('femnist', tmp_path)


def test_what_is_missing_says_how_it_is_made(tmp_path):
    (tmp_path / 'femnist' / 'train').mkdir(parents=True)
    with pytest.raises(DatasetUnavailableError, match=r'no train/\*\.json and no test/\*\.json: run .*preprocess\.sh'):
        load_dataset('femnist', tmp_path)
    with pytest.raises(ValueError, match='`path`'):
        load_femnist(None)
