"""Data sets of one's own."""

import re

import numpy as np
import pytest

from fedjax_nc.data import DatasetUnavailableError, load_npz
from fedjax_nc.experiments import Setting, pipeline

RNG = np.random.default_rng(0)
FINE = {
    'x_train': RNG.integers(0, 256, (40, 8, 8, 3), np.uint8), 'y_train': np.arange(40) % 4,
    'x_test': RNG.integers(0, 256, (12, 8, 8, 3), np.uint8), 'y_test': np.arange(12, dtype=np.int64) % 3,
}  # fmt: skip


def saved(folder, **changes):
    arrays = {name: value for name, value in {**FINE, **changes}.items() if value is not None}
    np.savez(folder / 'own.npz', **arrays)
    return folder / 'own.npz'


def test_what_was_saved_is_loaded(tmp_path):
    found = load_npz(str(saved(tmp_path)))
    for name, value in FINE.items():
        np.testing.assert_array_equal(getattr(found, name), value)
    assert (found.x_train.dtype, found.y_train.dtype, found.y_test.dtype) == (np.uint8, np.int32, np.int32)
    assert (found.num_classes, found.name) == (4, 'own')


@pytest.mark.parametrize(
    ('changes', 'said'),
    [
        ({'y_test': None}, 'it holds x_test, x_train, y_train, not x_train, y_train, x_test, y_test'),
        ({'more': np.ones(3)}, 'it holds more, x_test'),
        ({'y_train': np.array([{}] * 40, object)}, 'cannot be read: .*pickle'),
        ({'x_test': FINE['x_test'][:, :4]}, 'do not go together'),
        ({'x_test': FINE['x_test'].astype(np.float32)}, 'do not go together'),
        ({'x_train': np.ones(40), 'x_test': np.ones(12)}, 'do not go together'),
        ({'x_train': np.float32(1)}, 'own.npz'),
        ({'y_train': FINE['y_train'][:-1]}, 'y_train'),
        ({'y_train': FINE['y_train'] / 2}, 'y_train must be a vector of integers'),
        ({'y_train': FINE['y_train'] - 1}, 'y_train must lie in'),
        ({'y_test': FINE['y_test'] + 9}, 'y_test goes to 11 and y_train to 3'),
        ({'x_test': FINE['x_test'][:0], 'y_test': FINE['y_test'][:0]}, 'y_test'),
    ],
)
def test_other_arrays_are_refused_in_one_line(tmp_path, changes, said):
    path = saved(tmp_path, **changes)
    with pytest.raises(ValueError, match=said) as caught:
        load_npz(path)
    assert str(path) in str(caught.value)
    assert '\n' not in str(caught.value)


def test_nothing_is_unpickled(tmp_path):
    """A file is data, whatever its maker wanted it to do."""
    traces = []

    class Trap:
        def __reduce__(self):
            return (traces.append, (1,))

    path = saved(tmp_path, y_train=np.array([Trap()] * 40, object))
    with pytest.raises(ValueError, match='pickle'):
        load_npz(path)
    assert traces == []


@pytest.mark.parametrize('content', [b'', b'PK\x03\x04 not a zip', b'\x93NUMPY', 'half'])
def test_damaged_files_are_named(tmp_path, content):
    path = saved(tmp_path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if content == 'half' else content)
    with pytest.raises(ValueError, match=f'{re.escape(str(path))} cannot be read: ') as caught:
        load_npz(path)
    assert '\n' not in str(caught.value)


def test_a_single_array_is_no_data_set(tmp_path):
    np.save(tmp_path / 'a.npy', FINE['x_train'])
    (tmp_path / 'a.npy').rename(tmp_path / 'own.npz')
    with pytest.raises(ValueError, match=r'own\.npz'):
        load_npz(tmp_path / 'own.npz')


def test_a_file_that_is_missing_says_what_to_save(tmp_path):
    for path in (tmp_path / 'none.npz', tmp_path):
        with pytest.raises(DatasetUnavailableError, match='is not there: save a data set as x_train, y_train'):
            load_npz(path)


@pytest.mark.slow
def test_a_setting_names_a_file_where_data_sets_lie(tmp_path):
    saved(tmp_path)
    setting = Setting(
        dataset='own.npz',
        model='mlp',
        algorithm='fedavg',
        clients=2,
        partition='iid',
        rounds=1,
        local_epochs=1,
        flip=True,
    )
    assert setting.name.startswith('fedavg-own-')
    found = pipeline.run(setting, tmp_path / 'out', data_dir=tmp_path, progress=False)
    assert 0 <= found['global_accuracy'] <= 1
    assert found['parameters']['body'] == 8 * 8 * 3 * 200 + 200 + 200 * 200 + 200
    assert len(found['class_accuracy']) == 4
    with pytest.raises(DatasetUnavailableError, match=r'elsewhere/own\.npz is not there'):
        pipeline.run(setting, tmp_path / 'other', data_dir=tmp_path / 'elsewhere', progress=False)
