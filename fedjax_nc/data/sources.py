"""Data sets by name.

CIFAR comes through tensorflow-datasets (TFDS) without TensorFlow: TFDS reads array_record copies without it, and the
builder here does itself the two steps of preparing CIFAR that need it, taking the archive apart and encoding images.
"""

import contextlib
import io
import os
import socket
import tarfile
import threading
import urllib.request
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray


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

    Args:
        name: 'digits', 'cifar10' or 'cifar100'.
        data_dir: where to look and write; by default `fedjax_nc` in `$XDG_CACHE_HOME` or `~/.cache`.

    Returns:
        The data set; CIFAR in the order of the archive, whichever way it came.

    Raises:
        ValueError: for an unknown name, or a file that is damaged.
        DatasetUnavailableError: if nothing is in `data_dir` and there is no network.
        ImportError: if 'digits' is asked for without scikit-learn.
    """
    if name == 'digits':
        return _digits()
    if name not in _CIFAR:
        raise ValueError(f'there is no data set {name!r}; choose one of {["digits", *_CIFAR]}.')
    if data_dir is None:
        data_dir = Path(os.environ.get('XDG_CACHE_HOME') or '~/.cache') / 'fedjax_nc'
    folder = Path(data_dir).expanduser()
    spec = _CIFAR[name]

    cache = folder / f'{name}.npz'
    if cache.exists():
        return _read_cache(spec, cache)
    prepared = _find_prepared(spec, folder)
    if prepared is None:
        if not (archive := folder / spec.archive).exists():
            _download(spec, archive)
        prepared = _prepare(spec, archive)
    dataset = _read_prepared(spec, prepared)
    _write_cache(dataset, cache)
    return dataset


def subset(dataset: Dataset, max_examples: int, seed: int) -> Dataset:
    """Keeps a random part of the training set, in order, as equally over the classes as their sizes allow.

    Args:
        dataset: any data set; its test set is left alone.
        max_examples: at least 1; the size of the training set or more keeps all.
        seed: a non-negative integer.

    Raises:
        ValueError: if `max_examples` < 1.
    """
    if max_examples < 1:
        raise ValueError(f'`max_examples` must be at least 1; got {max_examples}.')
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


def _read_cache(spec: _Cifar, cache: Path) -> Dataset:
    try:
        with np.load(cache, allow_pickle=False) as arrays:
            return _checked(spec, [arrays[field] for field in Dataset._fields[:4]])
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError) as error:
        raise ValueError(f'{cache} is damaged ({error}); delete it and load {spec.name} again.') from error


def _write_cache(dataset: Dataset, cache: Path) -> None:
    unfinished = cache.with_name(f'.{cache.name}.{os.getpid()}')
    try:
        with open(unfinished, 'wb') as file:
            np.savez(file, **dict(zip(Dataset._fields[:4], dataset[:4], strict=True)))  # type: ignore[arg-type]
        os.replace(unfinished, cache)  # atomic, so that a reader never meets half a cache
    except OSError as error:
        warnings.warn(f'{cache} cannot be written ({error}): the next load will be as slow as this one', stacklevel=3)
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()


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


def _download(spec: _Cifar, archive: Path) -> None:
    remedy = f'Put {spec.archive} from {spec.url} into {archive.parent}, then load again.'
    if not _reachable(spec.url):
        raise DatasetUnavailableError(
            f'{spec.name} is not in {archive.parent}, and {urlsplit(spec.url).hostname} does not answer. {remedy}'
        )
    import tensorflow_datasets as tfds

    manager = tfds.download.DownloadManager(download_dir=archive.parent / 'downloads', dataset_name=spec.name)
    try:
        path = manager.download(spec.url)  # TFDS knows its checksum
    except Exception as error:
        raise DatasetUnavailableError(f'{spec.name} could not be downloaded: {error}. {remedy}') from error
    os.replace(path, archive)


def _read_archive(spec: _Cifar, archive: Path) -> dict[str, NDArray[np.uint8]]:
    """Returns the records of each split, [n, label bytes + 3072]."""
    width = len(spec.labels) + 3072
    files: dict[str, NDArray[np.uint8]] = {}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                name = Path(member.name).name
                if name in spec.train + spec.test:
                    file = tar.extractfile(member)
                    data = np.frombuffer(file.read() if file else b'', np.uint8)
                    if len(data) % width:
                        raise ValueError(f'{name} is not made of records of {width} bytes')
                    files[name] = data.reshape(-1, width)
        if missing := {*spec.train, *spec.test} - files.keys():
            raise ValueError(f'{sorted(missing)} not in it')
        names = {'train': spec.train, 'test': spec.test}
        splits = {split: np.concatenate([files[name] for name in names[split]]) for split in names}
        for size, (split, records) in zip(spec.sizes, splits.items(), strict=True):
            if len(records) != size:
                raise ValueError(f'{size} {split} records expected, got {len(records)}')
            if (records[:, : len(spec.labels)] >= list(spec.labels.values())).any():
                raise ValueError(f'labels of {split} records not below {spec.labels}')
    except (tarfile.TarError, zlib.error, EOFError, ValueError, OSError) as error:
        raise ValueError(f'{archive} is damaged ({error}); replace it by {spec.url}.') from error
    return splits


def _find_prepared(spec: _Cifar, folder: Path) -> Path | None:
    versions = sorted((folder / spec.name).glob('*/dataset_info.json'), reverse=True)
    return next((info.parent for info in versions if any(info.parent.glob('*.array_record*'))), None)


def _prepare(spec: _Cifar, archive: Path) -> Path:
    """Has TFDS write the archive's images beside it as array_record, in the layout of its own CIFAR."""
    import tensorflow_datasets as tfds
    from PIL import Image

    splits = _read_archive(spec, archive)

    class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
        name = spec.name
        VERSION = tfds.core.Version('3.0.2')

        def _info(self) -> Any:
            labels = {key: tfds.features.ClassLabel(num_classes=n) for key, n in spec.labels.items()}
            image = tfds.features.Image(shape=(32, 32, 3), encoding_format='png')
            features = tfds.features.FeaturesDict({'id': tfds.features.Text(), 'image': image, **labels})
            return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

        def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
            return {split: self._generate_examples(split) for split in splits}

        def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, Any]]]:
            for i, record in enumerate(splits[split]):
                planes = record[len(spec.labels) :].reshape(3, 32, 32)
                png = io.BytesIO()  # an image already encoded is the one kind TFDS takes without TensorFlow
                Image.fromarray(planes.transpose(1, 2, 0)).save(png, 'png', compress_level=1)
                labels = {key: int(record[j]) for j, key in enumerate(spec.labels)}
                yield i, {'id': f'{split}_{i:05d}', 'image': png.getvalue(), **labels}

    builder = Builder(data_dir=archive.parent, file_format='array_record')
    if builder.data_path.exists():
        raise ValueError(
            f'{builder.data_path} holds no array_record files, the one format that is read without TensorFlow; '
            'move it away or choose another `data_dir`.'
        )
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False))
    return Path(builder.data_path)


def _read_prepared(spec: _Cifar, folder: Path) -> Dataset:
    import tensorflow_datasets as tfds

    arrays: list[NDArray[Any]] = []
    try:
        source = tfds.builder_from_directory(folder).as_data_source()
        for split in ('train', 'test'):
            # TFDS shuffles when it prepares CIFAR itself; ids run in the order of the archive
            examples = sorted(((e['id'], e['image'], e['label']) for e in source[split]), key=lambda e: e[0])
            arrays.append(np.stack([image for _, image, _ in examples]))
            arrays.append(np.array([label for _, _, label in examples], np.int32))
        return _checked(spec, arrays)
    except Exception as error:  # whatever a damaged file makes its readers raise
        raise ValueError(f'{folder} is damaged ({error}); delete it and load {spec.name} again.') from error
