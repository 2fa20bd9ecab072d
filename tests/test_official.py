"""MNIST, Fashion-MNIST, EMNIST and SVHN: small files in the official formats, without a network."""

import gzip
import io
import re
import struct
import zipfile

import numpy as np
import pytest
from test_sources import assert_same, prepares, refused

from fedjax_nc.data import DatasetUnavailableError, load_dataset, mnist, prepared, sources

SIZES = (60, 20)
NAMES = ('mnist', 'fashion_mnist', 'emnist', 'svhn')


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Sets of 60 + 20 images, and no network."""
    for name in NAMES:
        monkeypatch.setitem(sources.SOURCES, name, sources.SOURCES[name]._replace(sizes=SIZES))
    monkeypatch.setattr(prepared, 'reachable', lambda url: False)


@pytest.fixture(params=[pytest.param(True, marks=prepares), False], ids=['tfds', 'alone'])
def tfds(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(prepared, 'possible', lambda: False)
    return request.param


def idx(array):
    return struct.pack(f'>{1 + array.ndim}I', 0x800 + array.ndim, *array.shape) + array.tobytes()


def write(folder, name, *, packed=True):
    """Writes official files of random images; returns the arrays that they hold."""
    from scipy import io as matlab

    source = sources.SOURCES[name]
    rng = np.random.default_rng(0)
    arrays = []
    for size in SIZES:
        arrays += [rng.integers(0, 256, (size, *source.shape), np.uint8), rng.permutation(size) % source.num_classes]
    x_train, y_train, x_test, y_test = arrays
    (folder / source.files[0]).parent.mkdir(parents=True, exist_ok=True)
    if name == 'svhn':
        for file, x, y in zip(source.files, arrays[::2], arrays[1::2], strict=True):
            named = {'X': x.transpose(1, 2, 3, 0), 'y': np.where(y == 0, 10, y).astype(np.uint8)[:, None]}
            matlab.savemat(folder / file, named, do_compression=packed)
    elif name == 'emnist':
        with zipfile.ZipFile(folder / source.files[0], 'w', zipfile.ZIP_DEFLATED) as file:
            for inner, array in zip(mnist._EMNIST, arrays, strict=True):
                raw = array[..., 0].swapaxes(1, 2) if array.ndim > 1 else array.astype(np.uint8)
                file.writestr(f'gzip/{inner}', gzip.compress(idx(raw)))
            file.writestr('gzip/emnist-letters-mapping.txt', '1 65 97')
    else:
        for file, array in zip(source.files, arrays, strict=True):
            content = idx(array[..., 0] if array.ndim > 1 else array.astype(np.uint8))
            (folder / file).write_bytes(gzip.compress(content) if packed else content)
    return x_train, y_train, x_test, y_test


@pytest.mark.parametrize('name', NAMES)
def test_official_files_then_what_is_kept(tmp_path, name, tfds):
    arrays = write(tmp_path, name)
    dataset = load_dataset(name, tmp_path)
    assert_same(dataset, arrays)
    assert (dataset.num_classes, dataset.name) == (47 if name == 'emnist' else 10, name)
    assert not list(tmp_path.glob('.*'))
    for file in sources.SOURCES[name].files:
        (tmp_path / file).unlink()
    assert_same(load_dataset(name, tmp_path), arrays)
    if tfds:
        (tmp_path / f'{name}.npz').unlink()
        assert_same(load_dataset(name, tmp_path), arrays)


@prepares
@pytest.mark.parametrize(('name', 'builder'), [('mnist', 'mnist'), ('emnist', 'emnist/balanced')])
def test_what_is_prepared_reads_as_the_official_one(tmp_path, name, builder):
    import tensorflow_datasets as tfds

    x, y = write(tmp_path, name)[:2]
    load_dataset(name, tmp_path)
    examples = list(tfds.data_source(builder, split='train', data_dir=tmp_path, download=False))
    assert [int(e['label']) for e in examples] == y.tolist()
    assert set(examples[0]) == {'image', 'label'}
    found = np.stack([np.asarray(e['image']) for e in examples])
    np.testing.assert_array_equal(found.swapaxes(1, 2) if name == 'emnist' else found, x)


@pytest.mark.parametrize('name', ['mnist', 'svhn'])
def test_files_that_are_not_packed(tmp_path, name):
    """Some browsers unzip what they download, and some programs do not pack what they write."""
    arrays = write(tmp_path, name, packed=False)
    assert_same(load_dataset(name, tmp_path), arrays)


@pytest.mark.parametrize('name', NAMES)
def test_offline_says_what_to_put_where(tmp_path, name, tfds):
    with pytest.raises(DatasetUnavailableError) as info:
        load_dataset(name, tmp_path)
    source = sources.SOURCES[name]
    for part in (str((tmp_path / source.files[0]).parent), source.base, *(f.split('/')[-1] for f in source.files)):
        assert part in str(info.value)
    assert '\n' not in str(info.value)


@prepares
def test_the_checksums_of_all_downloads_are_known():
    import tensorflow_datasets as tfds

    known = tfds.core.download.checksums.get_all_url_infos()
    known |= tfds.core.download.checksums.load_url_infos(
        tfds.core.utils.tfds_path('datasets') / 'svhn_cropped' / 'checksums.tsv'
    )
    for source in sources.SOURCES.values():
        for file in source.files:
            assert source.url(file) in known


def gzipped(content):
    return lambda whole: gzip.compress(content(gzip.decompress(whole)), 1)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (lambda whole: whole[: len(whole) // 2], ''),
        (lambda whole: whole[:-4] + bytes(4), ''),
        (lambda whole: b'', r'does not begin as 60x28x28 bytes do, but with \[\]'),
        (gzipped(lambda raw: raw[:-1]), 'less than 47040 bytes'),
        (gzipped(lambda raw: raw + bytes(2**26)), 'more than 47040 bytes'),
        (gzipped(lambda raw: idx(np.zeros((30, 28, 28), np.uint8))), r'with \[30, 28, 28\]'),
        (gzipped(lambda raw: struct.pack('>4I', 0x803, 2**31, 2**15, 2**15)), 'does not begin'),
        (lambda whole: b'<html>not found</html>', 'does not begin'),
    ],
)
def test_damaged_images(tmp_path, change, message):
    write(tmp_path, 'mnist')
    path = tmp_path / sources.SOURCES['mnist'].files[0]
    path.write_bytes(change(path.read_bytes()))
    line = refused(path, 'replace it by https://storage', lambda: load_dataset('mnist', tmp_path))
    assert re.search(message, line)


def test_labels_out_of_range(tmp_path):
    write(tmp_path, 'mnist')
    path = tmp_path / sources.SOURCES['mnist'].files[1]
    path.write_bytes(gzip.compress(idx(np.full(60, 10, np.uint8))))
    with pytest.raises(ValueError, match='labels up to 10'):
        load_dataset('mnist', tmp_path)


@pytest.mark.parametrize('kind', ['empty', 'no zip', 'others', 'half', 'lzma'])
def test_damaged_emnist(tmp_path, kind):
    write(tmp_path, 'emnist')
    path = tmp_path / 'emnist' / 'gzip.zip'
    whole = path.read_bytes()
    if kind in ('others', 'lzma'):
        with zipfile.ZipFile(path, 'w', zipfile.ZIP_LZMA) as file:
            for inner in mnist._EMNIST[kind == 'others' :]:
                file.writestr(f'gzip/{inner}', b'')
    else:
        path.write_bytes({'empty': b'', 'no zip': b'PK no', 'half': whole[: len(whole) // 2]}[kind])
    refused(path, 'replace it by https://biometrics', lambda: load_dataset('emnist', tmp_path))


def matlab(**arrays):
    from scipy import io as written

    file = io.BytesIO()
    written.savemat(file, arrays, do_compression=True)
    return file.getvalue()


X, Y = np.zeros((32, 32, 3, 60), np.uint8), np.ones((60, 1), np.uint8)


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        (lambda: b'', ''),
        (lambda: b'<html>', ''),
        (lambda: matlab(X=X, y=Y)[:-30], 'too early'),
        (lambda: matlab(X=X, y=Y, z=np.zeros(2**27, np.uint8)), 'unpacks to more'),
        (lambda: matlab(X=np.zeros((32, 32, 3, 6000), np.uint8), y=Y), 'unpacks to more'),
        (lambda: matlab(X=X[..., :5], y=Y), 'must hold X'),
        (lambda: matlab(X=X), 'must hold X'),
        (lambda: matlab(X=X, y=Y * 0), 'labels from 0'),
        (lambda: matlab(X=X, y=Y + 10), 'to 11'),
        (lambda: matlab(X=X, y=np.array([[{'a': 1}]] * 60, object)), ''),
        (lambda: matlab(X=X, y=Y)[:128] + struct.pack('<II', 15, 2**32 - 1) + b'x' * 100, ''),
    ],
)
def test_damaged_svhn(tmp_path, content, message):
    write(tmp_path, 'svhn')
    path = tmp_path / 'svhn' / 'train_32x32.mat'
    path.write_bytes(content())
    line = refused(path, 'replace it by http://ufldl', lambda: load_dataset('svhn', tmp_path))
    assert message in line


@pytest.mark.parametrize('name', ['cifar10_lt', 'cifar100_lt'])
def test_long_tails(monkeypatch, tmp_path, name):
    plain = sources.LONG_TAILED[name]
    classes = sources.SOURCES[plain].num_classes
    monkeypatch.setitem(sources.SOURCES, plain, sources.SOURCES[plain]._replace(sizes=(classes * 100, classes)))
    y = np.repeat(np.arange(classes, dtype=np.int32), 100)
    x = np.zeros((len(y), 32, 32, 3), np.uint8)
    np.savez(tmp_path / f'{plain}.npz', x_train=x, y_train=y, x_test=x[:classes], y_test=y[::100])
    dataset = load_dataset(name, tmp_path)
    counts = np.bincount(dataset.y_train)
    assert (counts[0], counts[-1], dataset.name, len(dataset.y_test)) == (100, 1, name, classes)
    assert (np.diff(counts) <= 0).all()
