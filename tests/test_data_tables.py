"""CSV and Parquet tables, and data sets of Hugging Face, with a column that says whose a row is."""

import io
import json
import subprocess
import sys

import jax
import numpy as np
import pytest

from fedjax_nc import data, evaluate, experiments, local, models, simulate, training
from fedjax_nc.algorithms import fedetf
from fedjax_nc.data import DatasetUnavailableError, load_hub, load_table, tables

pa = pytest.importorskip('pyarrow')
import pyarrow.csv  # noqa: E402
import pyarrow.parquet  # noqa: E402

HOSPITALS = ('north', 'south', 'west')
KINDS = ('benign', 'malign')


def columns(rows=90, seed=0):
    """Two measurements, which tell the diagnosis, and two columns of another kind."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, rows)
    return {
        'radius': (y * 3 + rng.normal(size=rows)).astype(np.float64),
        'hospital': [HOSPITALS[i % 3] for i in range(rows)],
        'count': rng.integers(0, 5, rows) + y,
        'diagnosis': [KINDS[label] for label in y],
        'smoker': rng.random(rows) < 0.5,
    }


def write(path, **changes):
    table = pa.table({name: value for name, value in {**columns(), **changes}.items() if value is not None})
    path.parent.mkdir(exist_ok=True)
    (pyarrow.csv.write_csv if path.suffix == '.csv' else pyarrow.parquet.write_table)(table, path)
    return path


HOW = {'label': 'diagnosis', 'client': 'hospital'}


@pytest.mark.parametrize('end', ['csv', 'parquet'])
def test_rows_labels_and_clients(tmp_path, end):
    said = columns()
    dataset = load_table(write(tmp_path / f'cells.{end}'), **HOW)
    assert (dataset.classes, dataset.num_classes, dataset.name) == (KINDS, 2, 'cells')
    assert dataset.clients == HOSPITALS
    assert (dataset.x_train.dtype, dataset.y_train.dtype, dataset.x_train.shape[1]) == (np.float32, np.int32, 3)
    rows = np.stack([said['radius'], said['count'], said['smoker']], 1).astype(np.float32)
    places = {row.tobytes(): i for i, row in enumerate(rows)}
    seen = []
    for x, y, clients in (
        (dataset.x_train, dataset.y_train, dataset.clients_train),
        (dataset.x_test, dataset.y_test, dataset.clients_test),
    ):
        at = [places[row.tobytes()] for row in x]
        assert at == sorted(at)
        assert [KINDS[label] for label in y] == [said['diagnosis'][i] for i in at]
        assert [HOSPITALS[k] for k in clients] == [said['hospital'][i] for i in at]
        seen += at
    assert sorted(seen) == list(range(90))
    share = np.bincount(dataset.y_test) / np.bincount(np.concatenate([dataset.y_train, dataset.y_test]))
    np.testing.assert_allclose(share, 0.2, atol=0.03)


def test_chosen_columns_and_a_column_of_splits(tmp_path):
    split = ['test' if i % 3 == 0 else 'train' for i in range(90)]
    path = write(tmp_path / 'a.parquet', split=split, note=['text'] * 90)
    dataset = load_table(path, label='count', features=['radius', 'smoker'], test='split')
    assert (dataset.x_train.shape, dataset.x_test.shape, dataset.clients_train) == ((60, 2), (30, 2), None)
    assert dataset.classes == ('0', '1', '2', '3', '4', '5')
    path = write(tmp_path / 'b.csv', split=[word == 'test' for word in split])
    other = load_table(path, label='count', features=['radius', 'smoker'], test='split')
    np.testing.assert_allclose(other.x_test, dataset.x_test, rtol=1e-6)


def test_classes_that_several_tables_agree_on(tmp_path):
    """A site without a class numbers the others as all do."""
    one = load_table(
        write(tmp_path / 'here.csv', diagnosis=['malign'] * 90), **HOW, classes=['malign', 'unclear', 'benign']
    )
    other = load_table(write(tmp_path / 'there.csv'), **HOW, classes=['malign', 'unclear', 'benign'])
    assert one.classes == other.classes == ('malign', 'unclear', 'benign')
    assert one.num_classes == 3
    assert set(one.y_train.tolist()) == {0}
    assert set(other.y_train.tolist()) == {0, 2}
    assert (load_table(tmp_path / 'there.csv', **HOW).y_train == 1).sum() == (other.y_train == 0).sum()
    numbers = write(tmp_path / 'numbers.csv', diagnosis=[3, 5] * 45)
    assert set(load_table(numbers, **HOW, classes=[5, 4, 3]).y_train.tolist()) == {0, 2}
    for classes, said in (
        (['malign', 'unclear'], "the label 'benign', which is none"), ('malign', 'at least two'),
        (['malign'] * 2, 'at least two'), (['malign'], 'at least two'), (5, 'at least two'),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            load_table(tmp_path / 'there.csv', **HOW, classes=classes)


def test_standardized_by_the_training_rows(tmp_path):
    dataset = load_table(write(tmp_path / 'a.csv', one=[1.0] * 90), **HOW, standardize=True)
    np.testing.assert_allclose(dataset.x_train.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(dataset.x_train.std(0)[:3], 1, atol=1e-5)
    assert dataset.x_train.dtype == np.float32
    assert not dataset.x_train[:, 3].any()


def test_the_index_of_a_data_frame_is_no_feature(tmp_path):
    """It tells the order of the rows, and so their classes where they are sorted."""
    path = write(tmp_path / 'cells.csv')
    lines = path.read_text().splitlines()
    path.write_text('\n'.join(f'{i - 1 if i else ""},{line}' for i, line in enumerate(lines)))
    with pytest.raises(ValueError, match=r"a column '', the index of a data frame.*index=False, or name `features`"):
        load_table(path, **HOW)
    assert load_table(path, **HOW, features=['radius']).x_train.shape[1] == 1
    for name, about in (('__index_level_0__', None), ('row', {'index_columns': ['row'], 'columns': []})):
        table = pa.table({**columns(), name: np.arange(90)})
        table = table.replace_schema_metadata({'pandas': json.dumps(about)}) if about else table
        pyarrow.parquet.write_table(table, tmp_path / 'cells.parquet')
        with pytest.raises(ValueError, match=f'a column {name!r}, the index'):
            load_table(tmp_path / 'cells.parquet', **HOW)
        owned = load_table(tmp_path / 'cells.parquet', label='diagnosis', client=name, features=['radius'])
        assert len(set(owned.clients_train) | set(owned.clients_test)) == 90


def test_large_numbers_are_standardized_before_they_are_rounded(tmp_path):
    late = 1_700_000_000 + np.arange(90)
    path = write(tmp_path / 'cells.parquet', time=late)
    x = load_table(path, **HOW, features=['time'], standardize=True, test=0.2)
    seen = np.sort(np.concatenate([x.x_train, x.x_test])[:, 0])
    np.testing.assert_allclose(np.diff(seen), np.diff(seen)[0], rtol=1e-3)
    with pytest.raises(ValueError, match="'time' holds 90 numbers, of which float32 tells 2 apart: take off"):
        load_table(path, **HOW)
    pyarrow.csv.write_csv(pa.table({**columns(), 'time': 2**24 + 2**20 * np.arange(90)}), tmp_path / 'CELLS.CSV')
    assert load_table(tmp_path / 'CELLS.CSV', **HOW).x_train.shape[1] == 4  # float32 has these


def test_columns_that_training_rows_have_alike_are_zero(tmp_path):
    """Though their deviation is a rounding error; and numbers whose squares are none are scaled, too."""
    split = ['test' if i % 3 == 0 else 'train' for i in range(90)]
    gain = [0.2 if word == 'test' else 0.1 for word in split]
    large = np.random.default_rng(0).normal(size=90) * 1e300
    path = write(tmp_path / 'cells.parquet', split=split, gain=gain, large=large)
    found = load_table(path, label='diagnosis', features=['gain', 'large'], test='split', standardize=True)
    np.testing.assert_array_equal(found.x_train[:, 0], 0)
    np.testing.assert_allclose(found.x_test[:, 0], 1, rtol=1e-5)  # twice the largest, less that
    np.testing.assert_allclose(found.x_train[:, 1].std(), 1, rtol=1e-5)


@pytest.mark.parametrize('ids', [10**15 + np.arange(90), 1_700_000_000_000_000_000 + 1024 * np.arange(90)])
def test_numbers_that_differ_in_their_last_digits_are_told_apart(tmp_path, ids):
    path = write(tmp_path / 'cells.parquet', late=ids)
    found = load_table(path, **HOW, features=['late'], standardize=True, test=0.2)
    x = np.concatenate([found.x_train, found.x_test])[:, 0]
    np.testing.assert_allclose(np.diff(np.sort(x)), np.diff(np.sort(x))[0], rtol=1e-4)
    np.testing.assert_allclose([found.x_train.mean(), found.x_train.std()], [0, 1], atol=1e-5)


def test_a_feature_is_named_once(tmp_path):
    with pytest.raises(ValueError, match="column 'radius' is a feature twice"):
        load_table(write(tmp_path / 'a.csv'), **HOW, features=['radius', 'count', 'radius'])


def test_floats_that_fall_together_are_refused(tmp_path):
    path = write(tmp_path / 'cells.parquet', time=1.6e9 + np.arange(90) + 0.5)
    with pytest.raises(ValueError, match=r"'time' holds 90 numbers, of which float32 tells . apart"):
        load_table(path, **HOW)
    assert load_table(path, **HOW, features=np.array(['radius', 'time']), standardize=True).x_train.shape[1] == 2


@pytest.mark.parametrize('end', ['csv', 'parquet'])
@pytest.mark.parametrize('column', ['diagnosis', 'hospital'])
def test_empty_words_are_no_class_and_no_client(tmp_path, end, column):
    said = columns()[column]
    path = write(tmp_path / f'cells.{end}', **{column: ['', *said[1:-1], '']})
    with pytest.raises(ValueError, match=f'column {column!r} has 2 rows without a value: fill or drop them'):
        load_table(path, **HOW)


def test_one_number_in_several_ways_is_refused(tmp_path):
    path = write(tmp_path / 'cells.csv', hospital=['01', '1', '2'] * 30)
    with pytest.raises(ValueError, match="writes one number of 'hospital' in several ways"):
        load_table(path, **HOW)
    path = write(tmp_path / 'cells.csv', hospital=['01', '10', '02'] * 30)
    assert set(load_table(path, **HOW).clients_train) == {0, 1, 2}


@pytest.mark.slow
def test_a_program_with_hospitals_as_clients(tmp_path):
    """The documented way: a Parquet table with a column of clients, trained with FedETF."""
    path = write(tmp_path / 'cells.parquet')

    cells = data.load_table(path, label='diagnosis', client='hospital', standardize=True)
    train = data.federate(cells.x_train, cells.y_train, data.natural(cells.clients_train), cells.num_classes)
    algorithm = fedetf.algorithm(models.from_flax(models.MLP((16,))), local.sgd(0.1), plan=local.Plan(8, 3))
    k_init, k_train = jax.random.split(jax.random.key(0))
    run = training.run(algorithm, k_train, simulate.init(algorithm, k_init, train), train, rounds=5, progress=False)
    found = evaluate.accuracy(evaluate.generic(algorithm, run.state, cells.x_test, cells.y_test, cells.num_classes))

    assert train.num_clients == 3
    assert float(found) > 0.8


@pytest.mark.slow
@pytest.mark.parametrize('end', ['csv', 'parquet'])
def test_a_run_by_the_name_of_the_file(tmp_path, end):
    write(tmp_path / f'cells.{end}')
    setting = experiments.Setting(
        dataset=f'cells.{end}', loading={**HOW, 'standardize': True}, partition='natural', tests='natural', clients=3,
        rounds=2, local_epochs=2, batch_size=8, lr=0.1, eval_last=1,
    )  # fmt: skip
    assert setting.model == 'mlp'
    summary = experiments.run(setting, tmp_path / 'out', data_dir=tmp_path, progress=False)
    assert summary['global_accuracy'] > 0.6
    assert experiments.Setting.of(setting.plain()) == setting


@pytest.mark.parametrize(
    ('changes', 'how', 'said'),
    [
        ({'diagnosis': None}, {}, "no column 'diagnosis'; there are"),
        ({}, {'client': 'clinic'}, "no column 'clinic'"),
        ({}, {'features': ['radius', 'none']}, "no column 'none'"),
        ({}, {'features': 'radius'}, '`features` must be names'),
        ({}, {'features': []}, '`features` must be names'),
        ({}, {'features': ['hospital']}, "'hospital' cannot be a feature"),
        ({}, {'features': ['radius', 'diagnosis']}, "'diagnosis' cannot be a feature"),
        ({}, {'label': 5}, 'by its name, not by 5'),
        ({}, {'label': 'radius', 'features': ['count']}, "'radius' must hold whole numbers or words"),
        ({}, {'client': 'radius', 'features': ['count']}, "'radius' must hold whole numbers or words"),
        ({'note': ['text'] * 90}, {}, "'note' holds no numbers: name the columns"),
        ({'radius': ['1'] * 89 + ['?']}, {}, "'radius' holds '[?]' in row 90, which is no number: mend or drop"),
        ({'radius': [1.0] * 89 + [None]}, {}, "1 rows without 'radius'"),
        ({'diagnosis': [None, *['a'] * 89]}, {}, "1 rows without 'diagnosis'"),
        ({'hospital': [None, *['a'] * 89]}, {}, "1 rows without 'hospital'"),
        ({'radius': [1.0] * 89 + [float('inf')]}, {}, "'radius' holds NaN or infinity"),
        ({'radius': [1.0] * 89 + [1e300]}, {}, "'radius' holds NaN or infinity"),
        ({}, {'test': 'none'}, "no column 'none'"),
        ({}, {'test': 'hospital'}, "'hospital' must say 'train' or 'test'"),
        ({'split': ['test'] * 90}, {'test': 'split'}, "'split' must say"),
        ({'split': [d == 'benign' for d in columns()['diagnosis']]}, {'test': 'split'}, 'class benign has test rows'),
        ({}, {'test': 1.5}, '`test` must lie in'),
        ({}, {'seed': -1}, '`seed`'),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said_in_one_line(tmp_path, changes, how, said):
    path = write(tmp_path / 'a.parquet', **changes)
    with pytest.raises(ValueError, match=said) as info:
        load_table(path, **{**HOW, **how})
    assert '\n' not in str(info.value)
    assert len(str(info.value)) < 400


@pytest.mark.parametrize('end', ['csv', 'parquet', 'txt'])
@pytest.mark.parametrize('content', [b'', b'PAR1 no', 'half', b'a,b\n1,2\n1\n', b'\xff\x00\n\x00'])
def test_damaged_files_are_named(tmp_path, end, content):
    path = write(tmp_path / 'a.parquet') if end == 'txt' else write(tmp_path / f'a.{end}')
    path = path.rename(tmp_path / f'a.{end}')
    if content != 'half':
        path.write_bytes(content)
    elif end == 'parquet':
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif end == 'csv':
        path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=rf'a\.{end}') as info:
        load_table(path, **HOW)
    assert '\n' not in str(info.value)


def test_tables_too_large_are_refused_before_they_are_read(tmp_path, monkeypatch):
    path = write(tmp_path / 'a.parquet')
    monkeypatch.setattr(tables, 'MOST_VALUES', 449)
    with pytest.raises(ValueError, match='90 rows of 5 columns are more than 449 values'):
        load_table(path, **HOW)
    with pytest.raises(DatasetUnavailableError, match='is not there'):
        load_table(tmp_path / 'none.csv', **HOW)


# Hugging Face


@pytest.fixture
def hub():
    return pytest.importorskip('datasets')


def letters(hub, rows=24, size=(8, 8)):
    """Images by writer, as `datasets` has them."""
    from PIL import Image

    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (rows, *size), np.uint8)
    content = {
        'image': [Image.fromarray(image) for image in pixels],
        'character': [i % 3 for i in range(rows)],
        'writer_id': [f'f{i % 4:04}' for i in range(rows)],
    }
    features = hub.Features(
        image=hub.Image(), character=hub.ClassLabel(names=['a', 'b', 'c']), writer_id=hub.Value('string')
    )
    return hub.Dataset.from_dict(content, features=features), pixels


LETTERS = {'features': 'image', 'label': 'character', 'client': 'writer_id', 'channels': 1}


@pytest.mark.parametrize('kind', ['object', 'saved', 'repository', 'converted'])
def test_images_of_the_hub(hub, tmp_path, kind):
    one, pixels = letters(hub)
    both = hub.DatasetDict(train=one.select(range(16)), test=one.select(range(16, 24)))
    if kind == 'saved':
        both.save_to_disk(tmp_path / 'letters')
    elif kind == 'repository':
        (tmp_path / 'letters' / 'data').mkdir(parents=True)
        for split, part in both.items():
            for i in range(2):
                file = f'data/{split}-0000{i}-of-00002.parquet'
                part.shard(2, i).to_parquet(tmp_path / 'letters' / file)
    elif kind == 'converted':
        for split, part in both.items():
            (tmp_path / 'letters' / 'default' / split).mkdir(parents=True)
            part.to_parquet(tmp_path / 'letters' / 'default' / split / '0000.parquet')
    found = load_hub(both if kind == 'object' else tmp_path / 'letters', **LETTERS)
    np.testing.assert_array_equal(found.x_train[..., 0], pixels[:16])
    np.testing.assert_array_equal(found.x_test[..., 0], pixels[16:])
    assert found.classes == ('a', 'b', 'c')
    assert found.clients_train.tolist() == [i % 4 for i in range(16)]
    assert found.clients_test.tolist() == [i % 4 for i in range(16, 24)]
    assert load_hub(one, **{**LETTERS, 'client': None, 'size': 4}, test=0.5).x_test.shape == (12, 4, 4, 1)


def test_classes_that_several_sets_of_the_hub_agree_on(hub):
    one, known = letters(hub)[0], ['c', 'other', 'b', 'a']
    words = one.cast_column('character', hub.Value('int64')).map(lambda row: {'character': 'abc'[row['character']]})
    for each in (one, words):
        both = hub.DatasetDict(train=each.select(range(16)), test=each.select(range(16, 24)))
        found = load_hub(both, **LETTERS, classes=known)
        assert found.classes == tuple(known)
        assert [*found.y_train, *found.y_test] == [[3, 2, 0][i % 3] for i in range(24)]
        with pytest.raises(ValueError, match=r"'character' has the label '\w', which is none of `classes`"):
            load_hub(each, **LETTERS, test=0.25, classes=['a', 'b'])


def test_numbers_and_arrays_of_the_hub(hub):
    said = columns()
    one = hub.Dataset.from_dict({**said, 'picture': np.zeros((90, 4, 4, 1), np.uint8).tolist()})
    found = load_hub(one, features=['radius', 'count'], **HOW, test=0.2)
    again = load_hub(one.with_format('numpy'), features=['radius', 'count'], **HOW, test=0.2)
    assert (found.x_train.dtype, found.x_train.shape[1], found.classes) == (np.float32, 2, KINDS)
    np.testing.assert_array_equal(found.x_train, again.x_train)
    assert load_hub(one, features='picture', label='count', test=0.2).x_train.shape[1:] == (4, 4, 1)


@pytest.mark.parametrize('dtype', ['uint8', 'int16', 'float64'])
def test_arrays_of_the_hub_keep_their_type(hub, dtype):
    """As bytes are what models scale."""
    x = np.arange(96).reshape(6, 4, 4).astype(dtype)
    several = hub.List if hasattr(hub, 'List') else hub.Sequence
    for kind in (hub.Array2D((4, 4), dtype), several(several(hub.Value(dtype)))):
        features = hub.Features({'x': kind, 'y': hub.Value('int64')})
        one = hub.Dataset.from_dict({'x': x.tolist(), 'y': [0, 1] * 3}, features=features)
        found = load_hub(one, label='y', features='x', test=0.34)
        assert found.x_train.dtype == (np.float32 if dtype == 'float64' else dtype)
        assert sorted(map(int, np.concatenate([found.x_train, found.x_test])[:, 0, 0])) == x[:, 0, 0].tolist()
    if dtype == 'float64':
        one = hub.Dataset.from_dict({'x': (1e300 * x).tolist(), 'y': [0, 1] * 3}, features=features)
        with pytest.raises(ValueError, match="'x' has numbers beyond those of float32"):
            load_hub(one, label='y', features='x', test=0.34)


def test_shards_of_the_hub_come_by_their_numbers(hub, tmp_path):
    for i in range(12):
        (tmp_path / 'train').mkdir(exist_ok=True)
        rows = pa.table({'a': np.full(2, float(i)), 'y': ['u', 'v']})
        pyarrow.parquet.write_table(rows, tmp_path / 'train' / f'{i}.parquet')
    found = load_hub(tmp_path, label='y', features=['a'], test=0.25)
    assert (np.diff(found.x_train[:, 0]) >= 0).all()


@pytest.mark.slow
def test_a_run_on_a_saved_directory(hub, tmp_path):
    letters(hub)[0].save_to_disk(tmp_path / 'letters')
    setting = experiments.Setting(
        dataset='letters/', loading={**LETTERS, 'test': 0.25}, model='mlp', partition='natural', clients=4, rounds=2,
        local_epochs=1, eval_last=1,
    )  # fmt: skip
    summary = experiments.run(setting, tmp_path / 'out', data_dir=tmp_path, progress=False)
    assert 0 <= summary['global_accuracy'] <= 1


@pytest.mark.parametrize(
    ('how', 'said'),
    [
        ({'features': 'none'}, "no column 'none'; there are image"),
        ({'label': 'none'}, "no column 'none'"),
        ({'test': 'validation'}, "no split 'validation', only train"),
        ({'features': 'writer_id', 'client': None}, "'writer_id' must hold images or arrays"),
        ({'features': ['writer_id'], 'client': None}, "'writer_id' holds no numbers"),
        ({'features': ['writer_id']}, "'writer_id' cannot be a feature"),
        ({'client': 5}, 'by its name, not by 5'),
        ({'test': 'train'}, "another split than 'train'"),
        ({'size': 0}, '`size` must be'),
        ({'channels': 2}, '`channels` must be 3 or 1'),
        ({'label': 'image'}, "'image' cannot be a feature"),
    ],
)
def test_what_does_not_fit_the_hub(hub, how, said):
    with pytest.raises(ValueError, match=said) as info:
        load_hub(letters(hub)[0], **{**LETTERS, 'test': 0.5, **how})
    assert '\n' not in str(info.value)


def test_configurations_of_a_copy_are_not_mixed(hub, tmp_path):
    rows = pa.table({'a': np.arange(10.0), 'y': ['u', 'v'] * 5})
    for name in ('small', 'full'):
        for split in ('train', 'test'):
            (tmp_path / 'copy' / name).mkdir(parents=True, exist_ok=True)
            pyarrow.parquet.write_table(rows, tmp_path / 'copy' / name / f'{split}-00000-of-00001.parquet')
    with pytest.raises(ValueError, match="has 'test' in full and small: give the folder of one configuration"):
        load_hub(tmp_path / 'copy', label='y', features=['a'])
    assert len(load_hub(tmp_path / 'copy' / 'full', label='y', features=['a']).x_train) == 10
    with pytest.raises(ValueError, match='`features` must be a column of images'):
        load_hub(tmp_path / 'copy' / 'full', label='y', features=[])
    lacking = hub.Dataset.from_dict({'a': np.arange(4.0), 'y': ['u', None, 'v', 'u'], 'who': [1, 2, None, 1]})
    with pytest.raises(ValueError, match="'y' has 1 rows without a value"):
        load_hub(lacking, label='y', features=['a'], test=0.5)


def test_hostile_images_of_the_hub(hub, tmp_path):
    from PIL import Image

    file = io.BytesIO()
    Image.new('1', (8000, 8000)).save(file, 'png')
    for content, said in ((file.getvalue(), '8000 x 8000 pixels'), (b'no image', 'cannot identify')):
        one = letters(hub)[0].cast_column('image', hub.Image(decode=False))
        rows = [*one, {'image': {'bytes': content, 'path': None}, 'character': 0, 'writer_id': 'a'}]
        with pytest.raises(ValueError, match=f'row 24 of image is damaged .*{said}'):
            load_hub(hub.Dataset.from_list(rows, features=letters(hub)[0].features), **LETTERS, test=0.5)
    lost = [*one, {'image': {'bytes': None, 'path': '/dev/zero'}, 'character': 0, 'writer_id': 'a'}]
    with pytest.raises(ValueError, match="'/dev/zero' is no file here"):
        load_hub(hub.Dataset.from_list(lost, features=letters(hub)[0].features), **LETTERS, test=0.5)
    with pytest.raises(ValueError, match='`source` must be'):
        load_hub([1], **LETTERS)
    with pytest.raises(DatasetUnavailableError, match='is not there'):
        load_hub(tmp_path / 'none', **LETTERS)
    (tmp_path / 'train.parquet').write_bytes(b'PAR1')
    with pytest.raises(ValueError, match='is damaged'):
        load_hub(tmp_path, **LETTERS)
    (tmp_path / 'train.parquet').unlink()
    with pytest.raises(ValueError, match='neither what `save_to_disk` writes nor Parquet files'):
        load_hub(tmp_path, **LETTERS)


def test_without_the_extras_it_is_said_what_to_install():
    program = """
import sys
import fedjax_nc.data as data
late = {'pyarrow', 'datasets', 'PIL', 'pandas'} & set(sys.modules)
assert not late, late
for name in ('pyarrow.csv', 'pyarrow', 'datasets'):
    sys.modules[name] = None
open('a.csv', 'w').close()
for load, extra in ((lambda: data.load_table('a.csv', label='y'), 'tables'),
                    (lambda: data.load_hub({}, label='y', features='x'), 'hub')):
    try:
        load()
    except ImportError as error:
        assert f'pip install "fedjax_nc[{extra}]"' in str(error), error
    else:
        raise AssertionError
"""
    subprocess.run([sys.executable, '-c', f'import os, tempfile; os.chdir(tempfile.mkdtemp())\n{program}'], check=True)
