"""Data sets by name: every way to CIFAR, on tiny archives in the official format, without a network."""

import functools
import gzip
import http.server
import io
import json
import pathlib
import pickle
import re
import struct
import subprocess
import sys
import tarfile
import threading
import time
import tracemalloc
import zipfile

import numpy as np
import pytest

from fedjax_nc.data import DatasetUnavailableError, cifar, load_dataset, prepared, sources, store, subset

SIZES = (25, 10)
prepares = pytest.mark.skipif(not prepared.possible(), reason='needs tensorflow-datasets and array_record')


@pytest.fixture
def small(monkeypatch):
    """CIFAR of 25 + 10 images instead of 50,000 + 10,000, and no network."""
    for name in cifar.SOURCES:
        monkeypatch.setitem(sources.SOURCES, name, sources.SOURCES[name]._replace(sizes=SIZES))
    monkeypatch.setattr(prepared, 'reachable', lambda url: False)


def write_archive(folder, name, *, change=None):
    """Writes an official archive of random images; returns them in order."""
    spec, members = sources.SOURCES[name], cifar.MEMBERS[name]
    rng = np.random.default_rng(len(spec.labels))
    images, labels, files = {}, {}, {}
    for split, names, size in (('train', members.train, SIZES[0]), ('test', members.test, SIZES[1])):
        images[split] = rng.integers(0, 256, (size, 32, 32, 3), dtype=np.uint8)
        labels[split] = np.stack([rng.integers(0, n, size) for n in spec.labels.values()], 1).astype(np.uint8)
        planes = images[split].transpose(0, 3, 1, 2).reshape(size, 3072)
        records = np.concatenate([labels[split], planes], axis=1)
        files.update({n: part.tobytes() for n, part in zip(names, np.array_split(records, len(names)), strict=True)})
    if change:
        change(files)
    with tarfile.open(folder / spec.files[0], 'w:gz') as tar:
        for file, content in {'batches.meta.txt': b'airplane\n', **files}.items():
            info = tarfile.TarInfo(f'cifar-binary/{file}')
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return images['train'], labels['train'][:, -1], images['test'], labels['test'][:, -1]


def assert_same(dataset, arrays):
    for got, want in zip(dataset[:4], arrays, strict=True):
        np.testing.assert_array_equal(got, want)
    assert [array.dtype for array in dataset[:4]] == [np.uint8, np.int32] * 2


@prepares
@pytest.mark.parametrize(('name', 'classes'), [('cifar10', 10), ('cifar100', 100)])
def test_archive_then_prepared_then_cache(small, tmp_path, name, classes):
    arrays = write_archive(tmp_path, name)
    dataset = load_dataset(name, tmp_path)
    assert_same(dataset, arrays)
    assert (dataset.num_classes, dataset.name) == (classes, name)
    assert not list(tmp_path.glob('.*'))  # nothing unfinished

    (tmp_path / sources.SOURCES[name].files[0]).unlink()
    (tmp_path / f'{name}.npz').unlink()
    assert_same(load_dataset(name, str(tmp_path)), arrays)

    (tmp_path / name).rename(tmp_path / 'elsewhere')
    assert_same(load_dataset(name, tmp_path), arrays)


@pytest.mark.parametrize(('name', 'classes'), [('cifar10', 10), ('cifar100', 100)])
def test_archive_then_cache_without_tfds(small, tmp_path, monkeypatch, name, classes):
    monkeypatch.setattr(prepared, 'possible', lambda: False)
    arrays = write_archive(tmp_path, name)
    archive = tmp_path / sources.SOURCES[name].files[0]
    dataset = load_dataset(name, tmp_path)
    assert_same(dataset, arrays)
    assert (dataset.num_classes, dataset.name) == (classes, name)
    assert {path.name for path in tmp_path.iterdir()} == {archive.name, f'{name}.npz', f'{name}.lock'}
    archive.unlink()
    assert_same(load_dataset(name, tmp_path), arrays)


def test_what_needs_tfds_says_so(small, tmp_path, monkeypatch):
    monkeypatch.setattr(prepared, 'possible', lambda: False)
    with pytest.raises(DatasetUnavailableError, match=r'Put cifar-10-binary\.tar\.gz from .*pip install') as info:
        load_dataset('cifar10', tmp_path)
    assert '\n' not in str(info.value)
    (tmp_path / 'cifar10' / '3.0.2').mkdir(parents=True)
    (tmp_path / 'cifar10' / '3.0.2' / 'cifar10-train.array_record-00000-of-00001').touch()
    with pytest.raises(ImportError, match=r'3\.0\.2 is read with tensorflow-datasets: pip install'):
        load_dataset('cifar10', tmp_path)
    arrays = write_archive(tmp_path, 'cifar10')  # goes before what cannot be read
    assert_same(load_dataset('cifar10', tmp_path), arrays)


@prepares
def test_prepared_copy_reads_as_the_official_one(small, tmp_path):
    import tensorflow_datasets as tfds

    arrays = write_archive(tmp_path, 'cifar100')
    load_dataset('cifar100', tmp_path)
    examples = list(tfds.data_source('cifar100', split='test', data_dir=tmp_path, download=False))
    assert sorted(int(e['label']) for e in examples) == sorted(arrays[3].tolist())
    assert {'id', 'image', 'label', 'coarse_label'} == set(examples[0])


def rewrite(file, change):
    """Writes the records of an array_record file anew."""
    from array_record.python import array_record_module

    reader = array_record_module.ArrayRecordReader(str(file))
    records = change([reader.read([i])[0] for i in range(reader.num_records())])
    reader.close()
    writer = array_record_module.ArrayRecordWriter(str(file), 'group_size:1')
    for record in records:
        writer.write(record)
    writer.close()


@prepares
def test_shuffled_prepared_copy_comes_back_in_order(small, tmp_path):
    """TFDS shuffles when it prepares CIFAR by itself, and may write several files."""
    arrays = write_archive(tmp_path, 'cifar10')
    load_dataset('cifar10', tmp_path)
    (tmp_path / 'cifar10.npz').unlink()
    first = next(tmp_path.glob('cifar10/*/*train.array_record*'))
    second = first.with_name(first.name.replace('00000-of', '00001-of'))
    second.write_bytes(first.read_bytes())
    rewrite(first, lambda records: records[:9:-1])
    rewrite(second, lambda records: records[:10])
    assert_same(load_dataset('cifar10', tmp_path), arrays)


@prepares
def test_download(small, tmp_path, monkeypatch):
    """Through TFDS's download manager, from a server of our own; a second load needs no server."""
    arrays = write_archive(tmp_path, 'cifar10')
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, 'log_message', lambda *_: None)
    monkeypatch.setenv('NO_PROXY', '127.0.0.1')
    monkeypatch.setattr(prepared, 'reachable', lambda url: True)
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base = f'http://127.0.0.1:{server.server_port}'
        monkeypatch.setattr(store.Source, 'url', lambda spec, file: f'{base}/{file}')
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

    monkeypatch.setattr(prepared.socket, 'create_connection', hang)
    assert not prepared.reachable('https://example.org/file', timeout=0.05)
    release.set()
    asked = []

    def connect(address, timeout):
        asked.append(address)
        return io.BytesIO()

    monkeypatch.setattr(prepared.socket, 'create_connection', connect)
    assert prepared.reachable('https://example.org/file')
    monkeypatch.setenv('https_proxy', 'http://proxy.example.org:3128')
    assert prepared.reachable('https://example.org/file')
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
    if not prepared.possible():
        return
    record = next((tmp_path / 'cifar10').glob('*/*train*array_record*'))
    record.write_bytes(record.read_bytes()[:50])
    with pytest.raises(ValueError, match=r'is damaged.*delete it'):
        load_dataset('cifar10', tmp_path)


@prepares
def test_prepared_in_another_format(small, tmp_path):
    write_archive(tmp_path, 'cifar10')
    folder = tmp_path / 'cifar10' / '3.0.2'
    folder.mkdir(parents=True)
    (folder / 'cifar10-train.tfrecord-00000-of-00001').write_bytes(b'')
    with pytest.raises(ValueError, match='no array_record files'):
        load_dataset('cifar10', tmp_path)


def member(name, content=b'', **fields):
    """A part of an archive: header and contents."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


def pack(path, members, opener=gzip.open):
    with opener(path, 'wb') as file, tarfile.open(fileobj=file, mode='w') as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))


ZEROS = bytes(2**26)
BATCH = bytes(5 * 3073)
NAMES = [*(f'data_batch_{i}.bin' for i in range(1, 6)), 'test_batch.bin']
GOOD = [member(f'c/{name}', BATCH * (2 if 'test' in name else 1)) for name in NAMES]
HOSTILE = {
    'symbolic link': (
        [member('c/data_batch_1.bin', type=tarfile.SYMTYPE, linkname='/etc/passwd'), *GOOD[1:]],
        'neither',
    ),
    'dangling link': ([member('c/data_batch_1.bin', type=tarfile.SYMTYPE, linkname='nowhere'), *GOOD[1:]], 'neither'),
    'hard link': ([member('c/data_batch_1.bin', type=tarfile.LNKTYPE, linkname='c/lost'), *GOOD[1:]], 'neither'),
    'link to itself': ([member('c/x', type=tarfile.LNKTYPE, linkname='c/x'), *GOOD], 'neither'),
    'character device': ([*GOOD, member('c/zero', type=tarfile.CHRTYPE, devmajor=1, devminor=5)], 'neither'),
    'block device': ([member('c/data_batch_1.bin', type=tarfile.BLKTYPE), *GOOD[1:]], 'neither'),
    'pipe': ([member('c/data_batch_1.bin', type=tarfile.FIFOTYPE), *GOOD[1:]], 'neither'),
    'climbing': ([member('c/../../data_batch_1.bin', BATCH), *GOOD[1:]], 'leads out'),
    'climbing besides': ([*GOOD, member('../x')], 'leads out'),
    'absolute': ([member('/tmp/data_batch_1.bin', BATCH), *GOOD[1:]], 'leads out'),
    'twice': ([*GOOD, GOOD[0]], r'data_batch_1\.bin is in it twice'),
    'twice in two folders': ([*GOOD, member('d/test_batch.bin', BATCH)], r'test_batch\.bin is in it twice'),
    'too large': ([member('c/data_batch_1.bin', ZEROS), *GOOD[1:]], 'larger than its 15365'),
    'one record too many': ([member('c/data_batch_1.bin', BATCH + BATCH[:3073]), *GOOD[1:]], 'larger than its 15365'),
    'large besides': ([*GOOD, member('c/readme.html', ZEROS)], 'more than the format holds'),
    'large first': ([member('c/readme.html', ZEROS), *GOOD], 'more than the format holds'),
    'many besides': ([member(f'c/{i}') for i in range(10_000)], 'more than the format holds'),
    'long name': ([member('c/' + 'x' * 2**20, BATCH), *GOOD], 'more than the format holds'),
    'empty': ([], 'not in it'),
    'folder': ([member('c/data_batch_1.bin', type=tarfile.DIRTYPE), *GOOD[1:]], 'not in it'),
}


def refused(path, remedy, call):
    """The one line that a damaged file gives, quickly and without much memory."""
    tracemalloc.start()
    start = time.monotonic()
    with pytest.raises(ValueError, match=remedy) as info:
        call()
    line = str(info.value)
    seconds, peak = time.monotonic() - start, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert line.startswith(f'{path} is damaged (')
    assert '\n' not in line
    assert len(line) < 500
    assert seconds < 5
    assert peak < 2**24
    return line


@pytest.mark.parametrize('kind', HOSTILE)
def test_hostile_archives(small, tmp_path, kind):
    members, message = HOSTILE[kind]
    archive = tmp_path / 'cifar-10-binary.tar.gz'
    pack(archive, members, functools.partial(gzip.open, compresslevel=1))
    assert re.search(message, refused(archive, 'replace it by https', lambda: load_dataset('cifar10', tmp_path)))
    assert {path.name for path in tmp_path.iterdir()} - {'cifar10.lock'} == {archive.name}


def test_archives_that_are_harmless(small, tmp_path):
    """Folders, notes and an archive that a browser has unzipped already."""
    archive = tmp_path / 'cifar-10-binary.tar.gz'
    pack(archive, [member('c', type=tarfile.DIRTYPE), *GOOD, member('c/readme.html', b'see')], open)
    assert not load_dataset('cifar10', tmp_path).x_train.any()


def test_broken_archives(small, tmp_path):
    archive = tmp_path / 'cifar-10-binary.tar.gz'
    write_archive(tmp_path, 'cifar10')
    whole = archive.read_bytes()
    sizes = struct.pack('>Q', 2**64 - 2**40)  # a negative size, and one beyond any disk
    header = member('c/readme.html')[0].tobuf(tarfile.GNU_FORMAT)
    negative = header[:124] + b'\xff\xff\xff\xff' + sizes + header[136:]
    negative = negative[:148] + b'%06o\0 ' % (sum(negative[:148]) + sum(negative[156:512]) + 256) + negative[156:]
    for broken in (
        whole[:-1],  # without its last byte: the checksum is incomplete
        whole[:-8] + bytes(4) + whole[-4:],  # a wrong checksum
        whole[:30],
        whole[:2],
        gzip.compress(b'no tar'),
        gzip.compress(ZEROS, 1),
        b'PK\x03\x04' + bytes(100),
        gzip.compress(negative + bytes(1024)),
        gzip.compress(bytes(range(256)) * 100),
    ):
        archive.write_bytes(broken)
        refused(archive, 'replace it by https', lambda: load_dataset('cifar10', tmp_path))
    archive.unlink()
    archive.mkdir()
    refused(archive, 'replace it by https', lambda: load_dataset('cifar10', tmp_path))


def save(path, arrays, **options):
    """Writes an .npz with any members."""
    with zipfile.ZipFile(path, 'w', **options) as file:
        for name, array in arrays:
            array = array() if callable(array) else array
            with file.open(name, 'w') as entry:
                entry.write(array) if isinstance(array, bytes) else np.lib.format.write_array(entry, array)


FIELDS = {
    'x_train.npy': np.zeros((25, 32, 32, 3), np.uint8),
    'y_train.npy': np.zeros(25, np.int32),
    'x_test.npy': np.zeros((10, 32, 32, 3), np.uint8),
    'y_test.npy': np.zeros(10, np.int32),
}


def announce(shape, dtype='|u1', version=(1, 0), content=b''):
    """An .npy that announces an array and holds something else."""
    header = io.BytesIO()
    about = {'descr': dtype, 'fortran_order': False, 'shape': shape}
    write = {1: np.lib.format.write_array_header_1_0, 2: np.lib.format.write_array_header_2_0}[version[0]]
    write(header, about)
    return header.getvalue() + content


def instead(**changes):
    return [(name, changes.get(name.removesuffix('.npy'), array)) for name, array in FIELDS.items()]


HOSTILE_CACHES = {
    'bomb': (instead(x_train=lambda: announce((25, 32, 32, 3), content=ZEROS)), 'takes 67108992 bytes'),
    'large array': (instead(x_train=np.frombuffer(ZEROS, np.uint8)), r'must be uint8 of shape \(25, 32, 32, 3\)'),
    'announced': (instead(x_train=announce((10**6, 32, 32, 3))), 'must be uint8 of shape'),
    'announced beyond': (instead(y_train=announce((2**62,), '<i4')), 'must be int32 of shape'),
    'short': (instead(x_train=announce((25, 32, 32, 3))), 'takes 128 bytes'),
    'pickle': (instead(y_train=np.array([Exception] * 25)), 'must be int32'),
    'pickle alone': (instead(y_train=pickle.dumps([1])), 'magic'),
    'objects announced': (instead(y_train=announce((25,), '|O', content=pickle.dumps(1))), 'must be int32'),
    'header of another version': (instead(y_train=announce((25,), '<i4', (2, 0), bytes(100))), 'of version'),
    'long header': (instead(y_train=announce((1,) * 15_000, '<i4')), 'Header'),
    'deep header': (instead(y_train=b'\x93NUMPY\x01\x00\x00\x20' + b'(' * 8192), ''),
    'missing': ([*FIELDS.items()][:3], 'each once'),
    'doubled': ([*FIELDS.items(), ('y_test.npy', FIELDS['y_test.npy'])], 'each once'),
    'foreign': ([*FIELDS.items(), ('../x.npy', b'')], 'each once'),
    'many': ([(f'{i}.npy', b'') for i in range(1000)], 'each once'),
    'wrong shape': (instead(x_test=FIELDS['x_test.npy'][:9]), 'x_test.npy must be uint8 of shape'),
    'wrong width': (instead(y_test=np.zeros(10, np.int64)), 'y_test.npy must be int32'),
    'wrong order of bytes': (instead(y_test=np.zeros(10, '>i4')), 'y_test.npy must be int32'),
    'wrong type': (instead(x_test=FIELDS['x_test.npy'].astype(np.int8)), 'x_test.npy must be uint8'),
    'wrong label': (instead(y_test=np.full(10, 10, np.int32)), 'not below 10'),
    'negative label': (instead(y_test=np.full(10, -1, np.int32)), 'labels from -1'),
}


@pytest.mark.filterwarnings('ignore:Duplicate name')
@pytest.mark.parametrize('kind', HOSTILE_CACHES)
def test_hostile_caches(small, tmp_path, kind):
    arrays, message = HOSTILE_CACHES[kind]
    cache = tmp_path / 'cifar10.npz'
    save(cache, arrays, compression=zipfile.ZIP_DEFLATED, compresslevel=1)
    line = refused(cache, 'delete it and load cifar10 again', lambda: load_dataset('cifar10', tmp_path))
    assert re.search(message, line)


def test_broken_caches(small, tmp_path):
    cache = tmp_path / 'cifar10.npz'
    save(cache, FIELDS.items(), compression=zipfile.ZIP_LZMA)
    assert 'compressed' in refused(cache, 'delete it', lambda: load_dataset('cifar10', tmp_path))
    save(cache, FIELDS.items())
    assert not load_dataset('cifar10', tmp_path).x_train.any()
    whole = cache.read_bytes()
    npy = io.BytesIO()
    np.save(npy, FIELDS['x_train.npy'])
    objects = io.BytesIO()
    np.save(objects, np.array([Exception]), allow_pickle=True)
    encrypted = bytearray(whole)
    encrypted[6] |= 1  # in the header of the first member and in the directory
    encrypted[whole.index(b'PK\x01\x02') + 8] |= 1
    for broken in (
        npy.getvalue(),
        objects.getvalue(),
        pickle.dumps(1),
        whole[:-1],
        whole[1:],
        whole + bytes(2**24),
        encrypted,
    ):
        cache.write_bytes(broken)
        refused(cache, 'delete it', lambda: load_dataset('cifar10', tmp_path))
    cache.unlink()
    cache.mkdir()
    refused(cache, 'delete it', lambda: load_dataset('cifar10', tmp_path))


@pytest.fixture
def ready(small, tmp_path):
    """A folder as TFDS leaves it, without cache and archive."""
    if not prepared.possible():
        pytest.skip('needs tensorflow-datasets and array_record')
    arrays = write_archive(tmp_path, 'cifar10')
    load_dataset('cifar10', tmp_path)
    (tmp_path / 'cifar10.npz').unlink()
    (tmp_path / 'cifar-10-binary.tar.gz').unlink()
    return tmp_path / 'cifar10' / '3.0.2', arrays


def example(**changes):
    import tensorflow_datasets as tfds

    fields = {'id': b'train_00001', 'image': encoded(32, 32), 'label': 1, **changes}
    kinds = {name: tfds.features.Text() if isinstance(value, bytes) else tfds.features.Scalar(np.int64)
             for name, value in fields.items()}  # fmt: skip
    features = tfds.features.FeaturesDict(kinds)
    return features.serialize_example(features.encode_example(fields))


def encoded(width, height, mode='RGB', kind='png'):
    from PIL import Image

    file = io.BytesIO()
    Image.new(mode, (width, height)).save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'image': lambda: encoded(8000, 8000)}, 'size'),
        ({'image': lambda: encoded(32, 31)}, 'size'),
        ({'image': lambda: encoded(32, 32, 'L')}, 'L'),
        ({'image': lambda: encoded(32, 32, kind='jpeg')}, 'identify'),
        ({'image': lambda: encoded(32, 32)[:60]}, ''),
        ({'image': lambda: b''}, 'identify'),
        ({'image': lambda: 3}, ''),
        ({'label': lambda: 10}, 'labels'),
        ({'label': lambda: 2**40}, ''),
        ({'label': lambda: b'cat'}, ''),
    ],
)
def test_hostile_records(ready, tmp_path, changes, message):
    folder, _ = ready
    record = example(**{name: value() for name, value in changes.items()})
    rewrite(next(folder.glob('*train.array*')), lambda records: [*records[1:], record])
    assert re.search(message, refused(folder, 'delete it', lambda: load_dataset('cifar10', tmp_path)))


def test_broken_records(ready, tmp_path):
    folder, arrays = ready
    file = next(folder.glob('*test.array*'))
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[3000] ^= 1
    for broken in (b'', b'junk', whole[:70_000], whole[:-65_536], bytes(len(whole)), whole[::-1], flipped):
        file.write_bytes(broken)
        refused(folder, 'delete it', lambda: load_dataset('cifar10', tmp_path))
    for change in (lambda records: records[:9], lambda records: records * 2, lambda records: [b'junk', *records[1:]]):
        file.write_bytes(whole)
        rewrite(file, change)
        refused(folder, 'delete it', lambda: load_dataset('cifar10', tmp_path))
    file.unlink()
    assert 'no test records' in refused(folder, 'delete it', lambda: load_dataset('cifar10', tmp_path))
    file.write_bytes(whole)
    assert_same(load_dataset('cifar10', tmp_path), arrays)


@pytest.mark.parametrize('where', ['features', 'legacy features', 'info', 'metadata', 'rubbish'])
def test_nothing_that_a_prepared_folder_names_is_imported(ready, tmp_path, monkeypatch, where):
    """TFDS imports the module of every feature that features.json or dataset_info.json names."""
    folder, arrays = ready
    (tmp_path / 'modules').mkdir()
    (tmp_path / 'modules' / 'hostile.py').write_text(f'open({str(tmp_path / "imported")!r}, "w").close()')
    monkeypatch.syspath_prepend(tmp_path / 'modules')
    features, info = folder / 'features.json', folder / 'dataset_info.json'
    about, feature = json.loads(info.read_text()), {'pythonClassName': 'hostile.Feature', 'text': {}}
    if where == 'features':
        features.write_text(features.read_text().replace('tensorflow_datasets.core.features.text_feature', 'hostile'))
    elif where == 'legacy features':
        features.write_text(json.dumps({'type': 'hostile.Feature', 'content': {}}))
    elif where == 'info':
        info.write_text(json.dumps({**about, 'moduleName': 'hostile', 'features': feature}))
    elif where == 'metadata':
        (folder / 'metadata.json').write_text(json.dumps({'py/object': 'hostile.Feature'}))
        (folder / 'metadata.pickle').write_bytes(b'chostile\nFeature\n.')
    else:
        features.write_text('{')
        info.write_text('{')
    assert_same(load_dataset('cifar10', tmp_path), arrays)
    assert not (tmp_path / 'imported').exists()
    assert 'hostile' not in sys.modules


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


def test_digits_are_the_same_wherever_scikit_learn_keeps_them(monkeypatch):
    pytest.importorskip('sklearn')
    digits = load_dataset('digits')
    monkeypatch.setattr(pathlib.Path, 'is_file', lambda self: False)
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
    with pytest.raises(ValueError, match=r"'imagenet'.*digits.*cifar10.*cifar100.*mnist"):
        load_dataset('imagenet')


def test_imports_are_late_and_missing_packages_named():
    program = """
import importlib.util
import sys
import fedjax_nc.data
late = {'tensorflow_datasets', 'tensorflow', 'matplotlib', 'sklearn', 'PIL'} & set(sys.modules)
assert not late, late
if importlib.util.find_spec('sklearn'):
    fedjax_nc.data.load_dataset('digits')
    assert 'sklearn' not in sys.modules
sys.modules['sklearn'] = None
try:
    fedjax_nc.data.load_dataset('digits')
except ImportError as error:
    assert 'pip install "fedjax_nc[examples]"' in str(error)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, '-c', program], check=True)
