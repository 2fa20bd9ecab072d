"""Data sets by name: every way to CIFAR, on tiny archives in the official format, without a network."""

import functools
import http.server
import io
import subprocess
import sys
import tarfile
import threading

import numpy as np
import pytest

from fedjax_nc.data import DatasetUnavailableError, load_dataset, sources, subset

SIZES = (25, 10)


@pytest.fixture
def small(monkeypatch):
    """CIFAR of 25 + 10 images instead of 50,000 + 10,000, and no network."""
    for name, spec in list(sources._CIFAR.items()):
        monkeypatch.setitem(sources._CIFAR, name, spec._replace(sizes=SIZES))
    monkeypatch.setattr(sources, '_reachable', lambda url: False)


def write_archive(folder, name, *, change=None):
    """Writes an official archive of random images; returns them in order."""
    spec = sources._CIFAR[name]
    rng = np.random.default_rng(len(spec.labels))
    images, labels, files = {}, {}, {}
    for split, names, size in (('train', spec.train, SIZES[0]), ('test', spec.test, SIZES[1])):
        images[split] = rng.integers(0, 256, (size, 32, 32, 3), dtype=np.uint8)
        labels[split] = np.stack([rng.integers(0, n, size) for n in spec.labels.values()], 1).astype(np.uint8)
        planes = images[split].transpose(0, 3, 1, 2).reshape(size, 3072)
        records = np.concatenate([labels[split], planes], axis=1)
        files.update({n: part.tobytes() for n, part in zip(names, np.array_split(records, len(names)), strict=True)})
    if change:
        change(files)
    with tarfile.open(folder / spec.archive, 'w:gz') as tar:
        for file, content in {'batches.meta.txt': b'airplane\n', **files}.items():
            info = tarfile.TarInfo(f'cifar-binary/{file}')
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return images['train'], labels['train'][:, -1], images['test'], labels['test'][:, -1]


def assert_same(dataset, arrays):
    for got, want in zip(dataset[:4], arrays, strict=True):
        np.testing.assert_array_equal(got, want)
    assert [array.dtype for array in dataset[:4]] == [np.uint8, np.int32] * 2


@pytest.mark.parametrize(('name', 'classes'), [('cifar10', 10), ('cifar100', 100)])
def test_archive_then_prepared_then_cache(small, tmp_path, name, classes):
    arrays = write_archive(tmp_path, name)
    dataset = load_dataset(name, tmp_path)
    assert_same(dataset, arrays)
    assert (dataset.num_classes, dataset.name) == (classes, name)
    assert not list(tmp_path.glob('.*'))  # nothing unfinished

    (tmp_path / sources._CIFAR[name].archive).unlink()
    (tmp_path / f'{name}.npz').unlink()
    assert_same(load_dataset(name, str(tmp_path)), arrays)

    (tmp_path / name).rename(tmp_path / 'elsewhere')
    assert_same(load_dataset(name, tmp_path), arrays)


def test_prepared_copy_reads_as_the_official_one(small, tmp_path):
    import tensorflow_datasets as tfds

    arrays = write_archive(tmp_path, 'cifar100')
    load_dataset('cifar100', tmp_path)
    examples = list(tfds.data_source('cifar100', split='test', data_dir=tmp_path, download=False))
    assert sorted(int(e['label']) for e in examples) == sorted(arrays[3].tolist())
    assert {'id', 'image', 'label', 'coarse_label'} == set(examples[0])


def test_shuffled_prepared_copy_comes_back_in_order(small, tmp_path):
    """TFDS shuffles when it prepares CIFAR by itself."""
    import tensorflow_datasets as tfds

    arrays = write_archive(tmp_path, 'cifar10')
    load_dataset('cifar10', tmp_path)
    info = next((tmp_path / 'cifar10').glob('*/features.json')).parent
    examples = {s: list(tfds.builder_from_directory(info).as_data_source(split=s)) for s in ('train', 'test')}

    class Source:
        def as_data_source(self):
            return {split: values[::-1] for split, values in examples.items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tfds, 'builder_from_directory', lambda path: Source())
        assert_same(sources._read_prepared(sources._CIFAR['cifar10'], info), arrays)


def test_download(small, tmp_path, monkeypatch):
    """Through TFDS's download manager, from a server of our own; a second load needs no server."""
    arrays = write_archive(tmp_path, 'cifar10')
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, 'log_message', lambda *_: None)
    monkeypatch.setenv('NO_PROXY', '127.0.0.1')
    monkeypatch.setattr(sources, '_reachable', lambda url: True)
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base = f'http://127.0.0.1:{server.server_port}'
        monkeypatch.setattr(sources._Cifar, 'url', property(lambda spec: f'{base}/{spec.archive}'))
        assert_same(load_dataset('cifar10', tmp_path / 'data'), arrays)
        assert (tmp_path / 'data' / 'cifar-10-binary.tar.gz').exists()
        with pytest.raises(DatasetUnavailableError, match=r'could not be downloaded.*cifar-100-binary\.tar\.gz'):
            load_dataset('cifar100', tmp_path / 'data')
        server.shutdown()
    assert_same(load_dataset('cifar10', tmp_path / 'data'), arrays)


def test_offline_says_what_to_put_where(small, tmp_path):
    with pytest.raises(DatasetUnavailableError) as info:
        load_dataset('cifar10', tmp_path)
    for part in (str(tmp_path), 'cifar-10-binary.tar.gz', 'https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz'):
        assert part in str(info.value)


def test_probe_is_short(monkeypatch):
    for variable in ('https_proxy', 'HTTPS_PROXY', 'all_proxy', 'ALL_PROXY'):
        monkeypatch.delenv(variable, raising=False)
    release = threading.Event()

    def hang(address, timeout):
        release.wait(20)
        raise OSError

    monkeypatch.setattr(sources.socket, 'create_connection', hang)
    assert not sources._reachable('https://example.org/file', timeout=0.05)
    release.set()
    asked = []

    def connect(address, timeout):
        asked.append(address)
        return io.BytesIO()

    monkeypatch.setattr(sources.socket, 'create_connection', connect)
    assert sources._reachable('https://example.org/file')
    monkeypatch.setenv('https_proxy', 'http://proxy.example.org:3128')
    assert sources._reachable('https://example.org/file')
    assert asked == [('example.org', 443), ('proxy.example.org', 3128)]


def test_sizes_of_the_real_sets_are_demanded(tmp_path):
    write_archive(tmp_path, 'cifar10')
    with pytest.raises(ValueError, match='50000 train records expected, got 25'):
        load_dataset('cifar10', tmp_path)


def cut(files):
    files['test_batch.bin'] = files['test_batch.bin'][:-1]


def lose(files):
    del files['data_batch_3.bin']


def mislabel(files):
    files['data_batch_1.bin'] = b'\x0a' + files['data_batch_1.bin'][1:]


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (cut, r'test_batch\.bin is not made of records of 3073 bytes'),
        (lose, r"\['data_batch_3\.bin'\] not in it"),
        (mislabel, 'labels of train records'),
    ],
)
def test_damaged_contents(small, tmp_path, change, message):
    write_archive(tmp_path, 'cifar10', change=change)
    with pytest.raises(ValueError, match=rf'cifar-10-binary\.tar\.gz is damaged \({message}.*replace it'):
        load_dataset('cifar10', tmp_path)
    assert not (tmp_path / 'cifar10.npz').exists()


def test_damaged_files(small, tmp_path):
    write_archive(tmp_path, 'cifar10')
    archive = tmp_path / 'cifar-10-binary.tar.gz'
    whole = archive.read_bytes()
    for broken in (whole[: len(whole) // 2], b'', b'<html>not found</html>'):
        archive.write_bytes(broken)
        with pytest.raises(ValueError, match='replace it by https'):
            load_dataset('cifar10', tmp_path)

    archive.write_bytes(whole)
    load_dataset('cifar10', tmp_path)
    cache = tmp_path / 'cifar10.npz'
    good = cache.read_bytes()
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 255
    for broken in (good[:1000], b'', b'junk', bytes(flipped)):
        cache.write_bytes(broken)
        with pytest.raises(ValueError, match=r'cifar10\.npz is damaged.*delete it'):
            load_dataset('cifar10', tmp_path)

    cache.unlink()
    record = next((tmp_path / 'cifar10').glob('*/*train*array_record*'))
    record.write_bytes(record.read_bytes()[:50])
    with pytest.raises(ValueError, match=r'is damaged.*delete it'):
        load_dataset('cifar10', tmp_path)


def test_prepared_in_another_format(small, tmp_path):
    write_archive(tmp_path, 'cifar10')
    folder = tmp_path / 'cifar10' / '3.0.2'
    folder.mkdir(parents=True)
    (folder / 'cifar10-train.tfrecord-00000-of-00001').write_bytes(b'')
    with pytest.raises(ValueError, match='no array_record files'):
        load_dataset('cifar10', tmp_path)


def test_digits():
    pytest.importorskip('sklearn')
    from sklearn.datasets import load_digits

    digits = load_dataset('digits')
    assert digits.x_train.shape[1:] == (8, 8, 1)
    assert (digits.x_train.dtype, digits.y_train.dtype) == (np.uint8, np.int32)
    assert len(digits.y_train) + len(digits.y_test) == 1797
    assert digits.num_classes == 10
    assert (digits.x_train.min(), digits.x_train.max()) == (0, 255)
    assert set(np.bincount(digits.y_test)) <= {34, 35, 36}
    # nothing is lost: the 17 levels come back, and every digit is in one part or the other
    both = np.concatenate([digits.x_train, digits.x_test]).reshape(-1, 64)
    levels = np.rint(both / 255 * 16)
    original = load_digits().data
    np.testing.assert_array_equal(
        np.sort(levels.view('f8,' * 63 + 'f8'), 0), np.sort(original.view('f8,' * 63 + 'f8'), 0)
    )
    assert_same(load_dataset('digits'), digits[:4])


def test_subset_is_stratified():
    pytest.importorskip('sklearn')
    digits = load_dataset('digits')
    some = subset(digits, 104, seed=0)
    assert sorted(np.bincount(some.y_train).tolist()) == [10] * 6 + [11] * 4
    assert some.x_test is digits.x_test
    assert not np.array_equal(some.x_train, subset(digits, 104, seed=1).x_train)
    assert_same(subset(digits, 10**6, seed=0), digits[:4])
    with pytest.raises(ValueError, match='at least 1'):
        subset(digits, 0, seed=0)


def test_unknown_names_are_told_the_known():
    with pytest.raises(ValueError, match=r"'mnist'.*digits.*cifar10.*cifar100"):
        load_dataset('mnist')


def test_imports_are_late_and_missing_packages_named():
    program = """
import sys
import fedjax_nc.data
late = {'tensorflow_datasets', 'tensorflow', 'matplotlib', 'sklearn', 'PIL'} & set(sys.modules)
assert not late, late
sys.modules['sklearn.datasets'] = None
try:
    fedjax_nc.data.load_dataset('digits')
except ImportError as error:
    assert 'pip install "fedjax_nc[examples]"' in str(error)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, '-c', program], check=True)
