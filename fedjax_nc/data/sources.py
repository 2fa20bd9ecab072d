"""Data sets by name.

CIFAR comes through tensorflow-datasets (TFDS) without TensorFlow: TFDS reads array_record copies without it, and the
builder here does itself the steps that need it, taking the archive apart, encoding images and decoding them. Where TFDS
is not installed, the archive is read as it is; what needs TFDS is downloading it and what TFDS has prepared.

Files may be broken or made to do harm. What they may hold is known to the byte, so it is written here and not read from
them: nothing that a file says is imported or unpickled, and no more is unpacked than the format holds, but for records
of array_record, whose reader knows no limit.
"""

import contextlib
import gzip
import importlib.util
import io
import math
import os
import shutil
import socket
import tarfile
import threading
import urllib.request
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import filelock
import numpy as np
from numpy.typing import NDArray

from fedjax_nc import checks


class Dataset(NamedTuple):
    """A set of labelled images in host memory."""

    x_train: NDArray[np.uint8]  # [n, H, W, ch]
    y_train: NDArray[np.int32]  # [n] in [0, num_classes)
    x_test: NDArray[np.uint8]
    y_test: NDArray[np.int32]
    num_classes: int
    name: str


class DatasetUnavailableError(RuntimeError):
    """The data set is neither in the data directory nor can it be downloaded."""


class _Cifar(NamedTuple):
    name: str
    archive: str
    train: tuple[str, ...]  # files in the archive
    test: tuple[str, ...]
    labels: dict[str, int]  # the label bytes before each image and how many classes each tells apart
    sizes: tuple[int, int] = (50_000, 10_000)

    @property
    def num_classes(self) -> int:
        return self.labels['label']

    @property
    def url(self) -> str:
        return f'https://www.cs.toronto.edu/~kriz/{self.archive}'


_VERSION = '3.0.2'  # of TFDS's CIFAR, whose layout is written
_SLACK = 2**15
"""Bytes that an archive may hold beside images: headers, names of classes and padding take 19,000 in the official ones.

Few, because what parses the headers takes time that grows as their square in some releases of Python.
"""
_BATCHES = tuple(f'data_batch_{i}.bin' for i in range(1, 6))
_CIFAR = {
    'cifar10': _Cifar('cifar10', 'cifar-10-binary.tar.gz', _BATCHES, ('test_batch.bin',), {'label': 10}),
    'cifar100': _Cifar(
        'cifar100', 'cifar-100-binary.tar.gz', ('train.bin',), ('test.bin',), {'coarse_label': 20, 'label': 100}
    ),
}


def load_dataset(name: str, data_dir: str | os.PathLike[str] | None = None) -> Dataset:
    """Loads a data set.

    'digits' is scikit-learn's 1,797 handwritten digits, 8x8x1, with a fixed split of 80 % to 20 % within each class; it
    needs no network and no directory. 'cifar10' and 'cifar100' (fine labels), 32x32x3, come from the first of these in
    `data_dir`:

    1. `<name>.npz`, the cache that the first load leaves;
    2. `<name>/<version>/`, prepared by TFDS as array_record;
    3. the official archive, `cifar-10-binary.tar.gz` or `cifar-100-binary.tar.gz`;
    4. a download of that archive.

    Without tensorflow-datasets and array_record, 2 and 4 cannot be had, and 3 leaves nothing but the cache. Of several
    processes that find neither 1 nor 2, one makes them and the others wait for it. A process that is killed meanwhile
    leaves nothing but `.<name>.unfinished`, which the next one removes.

    Args:
        name: 'digits', 'cifar10' or 'cifar100'.
        data_dir: where to look and write; by default `fedjax_nc` in `$XDG_CACHE_HOME` or `~/.cache`. If 1 or 2 is in
            it, it may be read-only.

    Returns:
        The data set; CIFAR in the order of the archive, whichever way it came.

    Raises:
        ValueError: for an unknown name, or a file that is damaged.
        TypeError: if `data_dir` is no path.
        DatasetUnavailableError: if nothing is in `data_dir` and there is no network, or nothing can be written there.
        ImportError: if 'digits' is asked for without scikit-learn, or what TFDS has prepared without TFDS.
    """
    if not isinstance(name, str) or name not in ('digits', *_CIFAR):
        raise ValueError(f'`name` {checks.shown(name)} is no data set; choose one of {["digits", *_CIFAR]}.')
    if data_dir is not None and not isinstance(data_dir, str | os.PathLike):
        raise TypeError(f'`data_dir` must be a path; got {checks.shown(data_dir)}.')
    if name == 'digits':
        return _digits()
    if data_dir is None:
        data_dir = Path(os.environ.get('XDG_CACHE_HOME') or '~/.cache') / 'fedjax_nc'
    folder = Path(data_dir).expanduser()
    spec = _CIFAR[name]

    if (cache := folder / f'{name}.npz').exists():
        return _read_cache(spec, cache)
    if not _prepares():
        dataset = _read_alone(spec, folder)
        _write_cache(spec, dataset, cache)
        return dataset
    if (prepared := _find_prepared(spec, folder)) is None:
        try:
            with _alone(spec, folder) as unfinished:
                # another process may have left it while this one waited
                prepared = _find_prepared(spec, folder) or _prepare(spec, folder, unfinished)
        except OSError as error:
            raise DatasetUnavailableError(
                f'{name} is not ready in {folder} and cannot be made so ({_line(error)}); choose another `data_dir`.'
            ) from error
    dataset = _read_prepared(spec, prepared)
    _write_cache(spec, dataset, cache)
    return dataset


def subset(dataset: Dataset, max_examples: int, seed: int) -> Dataset:
    """Keeps a random part of the training set, in order, as equally over the classes as their sizes allow.

    Args:
        dataset: any data set; its test set is left alone.
        max_examples: at least 1; the size of the training set or more keeps all.
        seed: a non-negative integer.

    Raises:
        ValueError: if an argument is not of this kind, or the training set holds anything but labels for its examples.
    """
    if not isinstance(dataset, Dataset):
        raise ValueError(f'`dataset` must be a Dataset, as `load_dataset` returns it; got {checks.shown(dataset)}.')
    checks.whole('`max_examples`', max_examples)
    checks.whole('`seed`', seed, 0)
    checks.labels('`dataset.y_train`', dataset.y_train, len(dataset.x_train))
    rows = np.random.default_rng(seed).permutation(len(dataset.y_train))
    rank = np.empty(len(rows), np.intp)  # the how many-th example of its class
    for c in np.unique(dataset.y_train):
        members = dataset.y_train[rows] == c
        rank[members] = np.arange(members.sum())
    keep = np.sort(rows[np.argsort(rank, kind='stable')[:max_examples]])
    return dataset._replace(x_train=dataset.x_train[keep], y_train=dataset.y_train[keep])


def _digits() -> Dataset:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError('\'digits\' comes with scikit-learn: pip install "fedjax_nc[examples]"') from error
    images, labels = load_digits(return_X_y=True)
    x = np.rint(images.reshape(-1, 8, 8, 1) * (255 / 16)).astype(np.uint8)  # 17 levels stay 17 levels
    y = labels.astype(np.int32)
    rng = np.random.default_rng(0)
    classes = [rng.permutation(np.flatnonzero(y == c)) for c in range(10)]
    test = np.sort(np.concatenate([rows[: len(rows) // 5] for rows in classes]))
    train = np.setdiff1d(np.arange(len(y)), test)
    return Dataset(x[train], y[train], x[test], y[test], 10, 'digits')


def _line(error: Exception) -> str:
    """What an error says, on one line: those of other libraries fill pages."""
    text = ' '.join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + '...'


@contextlib.contextmanager
def _refusing(path: Path, remedy: str) -> Iterator[None]:
    try:
        yield
    except (MemoryError, PermissionError):
        raise  # nothing is said about the file
    except Exception as error:  # whatever a damaged file makes its readers raise
        raise ValueError(f'{path} is damaged ({_line(error)}); {remedy}.') from error


@contextlib.contextmanager
def _alone(spec: _Cifar, folder: Path, wait: bool = True) -> Iterator[Path]:
    """An empty folder within `folder` for what is unfinished, while no other process has it.

    The lock ends with the process that holds it, however that ends; what it left is removed.

    Raises:
        filelock.Timeout: if another process has it and `wait` is False.
        OSError: if nothing can be written in `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / f'{spec.name}.lock')
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        if not wait:
            raise
        warnings.warn(f'waiting for another process that prepares {spec.name} in {folder}', stacklevel=4)
        lock.acquire()
    unfinished = folder / f'.{spec.name}.unfinished'
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        yield unfinished
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        lock.release()


def _read_cache(spec: _Cifar, cache: Path) -> Dataset:
    shapes = [shape for size in spec.sizes for shape in ((size, 32, 32, 3), (size,))]
    with _refusing(cache, f'delete it and load {spec.name} again'):
        if cache.stat().st_size > sum(math.prod(shape) * 4 for shape in shapes):
            raise ValueError(f'{cache.stat().st_size} bytes')
        with zipfile.ZipFile(cache) as file:
            if sorted(file.namelist()) != sorted(f'{field}.npy' for field in Dataset._fields[:4]):
                raise ValueError(f'it must hold {", ".join(Dataset._fields[:4])}, each once, and nothing else')
            kinds = zip(Dataset._fields[:4], shapes, (np.uint8, np.int32) * 2, strict=True)
            return _checked(spec, [_read_member(file, f'{field}.npy', shape, dtype) for field, shape, dtype in kinds])


def _read_member(file: zipfile.ZipFile, name: str, shape: tuple[int, ...], dtype: type) -> NDArray[Any]:
    """An array of a known kind: all that announces another is refused before it can take memory."""
    info = file.getinfo(name)
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others unpack without bound
        raise ValueError(f'{name} is compressed in another way than NumPy does')
    with file.open(info) as member:
        if (version := np.lib.format.read_magic(member)) != (1, 0):
            raise ValueError(f'{name} is of version {version}, not (1, 0)')
        got, _, kind = np.lib.format.read_array_header_1_0(member)
        if got != shape or kind != dtype:
            raise ValueError(f'{name} must be {np.dtype(dtype)} of shape {shape}, not {kind} of shape {got}')
        if info.file_size != member.tell() + math.prod(shape) * kind.itemsize:
            raise ValueError(f'{name} takes {info.file_size} bytes for {kind} of shape {shape}')
        member.seek(0)
        return np.lib.format.read_array(member, allow_pickle=False)


def _write_cache(spec: _Cifar, dataset: Dataset, cache: Path) -> None:
    try:
        with _alone(spec, cache.parent, wait=False) as unfinished:
            whole = unfinished / cache.name
            np.savez(whole, **dict(zip(Dataset._fields[:4], dataset[:4], strict=True)))  # type: ignore[arg-type]
            os.replace(whole, cache)  # atomic, so that a reader never meets half a cache
    except filelock.Timeout:
        pass  # another process is about to leave the same
    except OSError as error:
        warnings.warn(f'{cache} cannot be written ({error}): the next load will be as slow as this one', stacklevel=3)


def _checked(spec: _Cifar, arrays: list[NDArray[Any]]) -> Dataset:
    for size, x, y in zip(spec.sizes, arrays[::2], arrays[1::2], strict=True):
        if x.shape != (size, 32, 32, 3) or x.dtype != np.uint8 or y.shape != (size,) or y.dtype != np.int32:
            raise ValueError(f'expected {size} images of 32x32x3 and as many labels, got {x.shape} and {y.shape}')
        if y.min() < 0 or y.max() >= spec.num_classes:
            raise ValueError(f'labels from {y.min()} to {y.max()}, not below {spec.num_classes}')
    x_train, y_train, x_test, y_test = arrays
    return Dataset(x_train, y_train, x_test, y_test, spec.num_classes, spec.name)


def _reachable(url: str, timeout: float = 3.0) -> bool:
    """Whether the host, or the proxy before it, accepts connections; TFDS itself tries for minutes."""
    proxy = urllib.request.getproxies().get('https')
    target = urlsplit(proxy if proxy and '://' in proxy else f'https://{proxy}' if proxy else url)
    answers = []

    def connect() -> None:
        with contextlib.suppress(OSError), socket.create_connection((target.hostname, target.port or 443), timeout):
            answers.append(True)

    # in a thread because looking the name up knows no time limit
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(timeout)
    return bool(answers)


def _download(spec: _Cifar, archive: Path, unfinished: Path) -> None:
    remedy = f'Put {spec.archive} from {spec.url} into {archive.parent}, then load again.'
    if not _reachable(spec.url):
        raise DatasetUnavailableError(
            f'{spec.name} is not in {archive.parent}, and {urlsplit(spec.url).hostname} does not answer. {remedy}'
        )
    import tensorflow_datasets as tfds

    manager = tfds.download.DownloadManager(download_dir=unfinished / 'downloads', dataset_name=spec.name)
    try:
        path = manager.download(spec.url)  # TFDS knows its checksum
    except Exception as error:
        raise DatasetUnavailableError(f'{spec.name} could not be downloaded: {_line(error)}. {remedy}') from error
    os.replace(path, archive)


class _Bounded:
    """A stream that gives `left` bytes and no more."""

    def __init__(self, file: gzip.GzipFile | io.BufferedReader, left: int):
        self.file, self.left = file, left

    def read(self, size: int) -> bytes:
        data = self.file.read(size)
        self.left -= len(data)
        if self.left < 0:
            raise ValueError('it unpacks to more than the format holds')
        return data


def _read_archive(spec: _Cifar, archive: Path) -> dict[str, NDArray[np.uint8]]:
    """Returns the records of each split, [n, label bytes + 3072]."""
    width = len(spec.labels) + 3072
    names = {'train': spec.train, 'test': spec.test}
    sizes = dict(zip(names, spec.sizes, strict=True))
    most = {name: sizes[split] // len(names[split]) * width for split in names for name in names[split]}
    files: dict[str, NDArray[np.uint8]] = {}
    with _refusing(archive, f'replace it by {spec.url}'):
        with open(archive, 'rb') as file:
            zipped = file.read(2) == b'\x1f\x8b'  # some browsers unzip what they download
        with gzip.open(archive) if zipped else open(archive, 'rb') as file:
            stream = _Bounded(file, _SLACK)
            with tarfile.open(fileobj=stream, mode='r|') as tar:  # type: ignore[call-overload]  # a stream goes forward
                for member in tar:
                    if not (member.isdir() or member.isfile()) or member.issparse():
                        raise ValueError(f'{checks.shown(member.name)} is neither a file nor a folder')
                    if member.name.startswith('/') or '..' in member.name.split('/'):
                        raise ValueError(f'{checks.shown(member.name)} leads out of it')
                    if member.isdir() or (name := Path(member.name).name) not in most:
                        continue
                    if name in files:
                        raise ValueError(f'{name} is in it twice')
                    if member.size > most[name]:
                        raise ValueError(f'{name} of {member.size} bytes is larger than its {most[name]}')
                    stream.left += member.size
                    data = np.frombuffer(tar.extractfile(member).read(), np.uint8)
                    if len(data) % width:
                        raise ValueError(f'{name} is not made of records of {width} bytes')
                    files[name] = data.reshape(-1, width)
            while stream.read(_SLACK):  # what is zipped ends with its checksum
                pass
        if missing := most.keys() - files.keys():
            raise ValueError(f'{sorted(missing)} not in it')
        splits = {split: np.concatenate([files[name] for name in names[split]]) for split in names}
        for split, records in splits.items():
            if len(records) != sizes[split]:
                raise ValueError(f'{sizes[split]} {split} records expected, got {len(records)}')
            if (records[:, : len(spec.labels)] >= list(spec.labels.values())).any():
                raise ValueError(f'labels of {split} records not below {spec.labels}')
    return splits


def _prepares() -> bool:
    """Whether what prepares data sets, and reads what is prepared, is installed."""
    return all(importlib.util.find_spec(name) is not None for name in ('tensorflow_datasets', 'array_record', 'PIL'))


def _read_alone(spec: _Cifar, folder: Path) -> Dataset:
    """Reads the archive without preparing anything."""
    if (archive := folder / spec.archive).exists():
        arrays: list[NDArray[Any]] = []
        for records in _read_archive(spec, archive).values():
            planes = records[:, len(spec.labels) :].reshape(-1, 3, 32, 32)
            arrays.append(np.ascontiguousarray(planes.transpose(0, 2, 3, 1)))
            arrays.append(records[:, len(spec.labels) - 1].astype(np.int32))
        return _checked(spec, arrays)
    needed = 'pip install tensorflow-datasets importlib_resources array_record pillow'
    if (prepared := _find_prepared(spec, folder)) is not None:
        raise ImportError(f'{prepared} is read with tensorflow-datasets: {needed}, or put {spec.archive} beside it')
    raise DatasetUnavailableError(
        f'{spec.name} is not in {folder}, and tensorflow-datasets, which downloads it, is not installed. Put '
        f'{spec.archive} from {spec.url} there, or {needed}'
    )


def _find_prepared(spec: _Cifar, folder: Path) -> Path | None:
    # what TFDS has not finished is called incomplete.*
    versions = {path.parent for path in (folder / spec.name).glob('[0-9]*/*.array_record*')}
    return max(versions, default=None)


def _features(spec: _Cifar) -> Any:
    import tensorflow_datasets as tfds

    labels = {key: tfds.features.ClassLabel(num_classes=n) for key, n in spec.labels.items()}
    image = tfds.features.Image(shape=(32, 32, 3), encoding_format='png')
    return tfds.features.FeaturesDict({'id': tfds.features.Text(), 'image': image, **labels})


def _prepare(spec: _Cifar, folder: Path, unfinished: Path) -> Path:
    """Has TFDS write the archive's images beside it as array_record, in the layout of its own CIFAR."""
    prepared = folder / spec.name / _VERSION
    if prepared.exists():
        raise ValueError(
            f'{prepared} holds no array_record files, the one format that is read without TensorFlow; '
            'move it away or choose another `data_dir`.'
        )
    if not (archive := folder / spec.archive).exists():
        _download(spec, archive, unfinished)
    splits = _read_archive(spec, archive)

    import tensorflow_datasets as tfds
    from PIL import Image

    class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
        name = spec.name
        VERSION = tfds.core.Version(_VERSION)

        def _info(self) -> Any:
            return tfds.core.DatasetInfo(builder=self, features=_features(spec), disable_shuffling=True)

        def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
            return {split: self._generate_examples(split) for split in splits}

        def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, Any]]]:
            for i, record in enumerate(splits[split]):
                planes = record[len(spec.labels) :].reshape(3, 32, 32)
                png = io.BytesIO()  # an image already encoded is the one kind TFDS takes without TensorFlow
                Image.fromarray(planes.transpose(1, 2, 0)).save(png, 'png', compress_level=1)
                labels = {key: int(record[j]) for j, key in enumerate(spec.labels)}
                yield i, {'id': f'{split}_{i:05d}', 'image': png.getvalue(), **labels}

    builder = Builder(data_dir=unfinished, file_format='array_record')
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False))
    prepared.parent.mkdir(exist_ok=True)
    os.replace(builder.data_path, prepared)
    return prepared


def _read_prepared(spec: _Cifar, folder: Path) -> Dataset:
    """Reads the records alone: TFDS imports whatever modules the folder's own description of them names."""
    import tensorflow_datasets as tfds
    from array_record.python.array_record_data_source import ArrayRecordDataSource
    from PIL import Image

    features, arrays = _features(spec), []

    def example(record: bytes) -> tuple[bytes, NDArray[np.uint8], int]:
        fields = features.deserialize_example_np(record, decoders={'image': tfds.decode.SkipDecoding()})
        image = Image.open(io.BytesIO(fields['image']), formats=['PNG'])
        if image.size != (32, 32) or image.mode != 'RGB':  # before it is unpacked
            raise ValueError(f'an image of size {image.size}, {image.mode}')
        return fields['id'], np.asarray(image), fields['label']

    with _refusing(folder, f'delete it and load {spec.name} again'):
        for split, size in zip(('train', 'test'), spec.sizes, strict=True):
            files = sorted(str(path) for path in folder.glob(f'*-{split}.array_record*'))
            if not files:
                raise ValueError(f'no {split} records')
            with ArrayRecordDataSource(files) as records:
                if len(records) != size:
                    raise ValueError(f'{size} {split} records expected, got {len(records)}')
                # TFDS shuffles when it prepares CIFAR itself; ids run in the order of the archive
                examples = sorted(map(example, records), key=lambda fields: fields[0])
            arrays.append(np.stack([image for _, image, _ in examples]))
            arrays.append(np.array([label for _, _, label in examples], np.int32))
        return _checked(spec, arrays)
