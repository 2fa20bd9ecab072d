"""MNIST, Fashion-MNIST and EMNIST in their official .gz files of bytes (IDX)."""

import gzip
import io
import struct
import zipfile
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from fedjax_nc.data import cifar, containers, store

_FILES = (
    'train-images-idx3-ubyte.gz', 'train-labels-idx1-ubyte.gz',
    't10k-images-idx3-ubyte.gz', 't10k-labels-idx1-ubyte.gz',
)  # fmt: skip
_EMNIST = tuple(
    f'emnist-balanced-{split}-{kind}-ubyte.gz' for split in ('train', 'test') for kind in ('images-idx3', 'labels-idx1')
)


def read(source: store.Source, folder: Path) -> store.Splits:
    """Reads the four files of MNIST and of what has its form.

    Raises:
        ValueError: if one holds anything else.
    """
    arrays = []
    for file, shape in zip(source.files, _shapes(source), strict=True):
        with (
            store.refusing(folder / file, f'replace it by {source.url(file)}'),
            cifar.unzipped(folder / file) as stream,
        ):
            arrays.append(_array(stream, shape))
    return _splits(source, arrays, folder / source.files[0])


def read_emnist(source: store.Source, folder: Path) -> store.Splits:
    """Reads the balanced split out of EMNIST's archive, and turns its images upright.

    Raises:
        ValueError: if the archive holds anything else.
    """
    archive = folder / source.files[0]
    arrays = []
    with store.refusing(archive, f'replace it by {source.url(source.files[0])}'), open(archive, 'rb') as file:
        containers.check_list(file)
        zipped = zipfile.ZipFile(file)
        names = {Path(name).name: name for name in zipped.namelist()}
        if missing := set(_EMNIST) - names.keys():
            raise ValueError(f'{sorted(missing)} not in it')
        for name, shape in zip(_EMNIST, _shapes(source), strict=True):
            info = zipped.getinfo(names[name])
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others unpack without bound
                raise ValueError(f'{name} is compressed in another way')
            with zipped.open(info) as member, gzip.open(member) as stream:
                arrays.append(_array(stream, shape))
        splits = _splits(source, arrays, archive)
    return {split: (x.swapaxes(1, 2), y) for split, (x, y) in splits.items()}


def _shapes(source: store.Source) -> list[tuple[int, ...]]:
    return [shape for size in source.sizes for shape in ((size, *source.shape[:2]), (size,))]


def _array(stream: gzip.GzipFile | io.BufferedReader | IO[bytes], shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Bytes of a known shape, after four of their kind and four a side."""
    head = struct.pack(f'>{1 + len(shape)}I', 0x800 + len(shape), *shape)
    if (got := stream.read(len(head))) != head:
        sides = struct.unpack(f'>{len(got) // 4}I', got[: len(got) // 4 * 4])[1:]
        raise ValueError(f'it does not begin as {"x".join(map(str, shape))} bytes do, but with {list(sides)}')
    size = int(np.prod(shape))
    data = stream.read(size)
    if len(data) != size or stream.read(1):  # what is zipped ends with its checksum
        raise ValueError(f'it holds {"less" if len(data) != size else "more"} than {size} bytes')
    return np.frombuffer(data, np.uint8).reshape(shape)


def _splits(source: store.Source, arrays: list[NDArray[np.uint8]], path: Path) -> store.Splits:
    x_train, y_train, x_test, y_test = arrays
    for y in (y_train, y_test):
        if y.max() >= source.num_classes:
            raise ValueError(f'{path} and what lies beside it are damaged (labels up to {y.max()}): fetch them again')
    return {'train': (x_train[..., None], y_train[:, None]), 'test': (x_test[..., None], y_test[:, None])}


def _source(name: str, base: str) -> store.Source:
    return store.Source(
        name, tuple(f'{name}/{file}' for file in _FILES), base, read, {'label': 10}, (60_000, 10_000), name, '3.0.1',
        shape=(28, 28, 1),
    )  # fmt: skip


SOURCES = {
    'mnist': _source('mnist', 'https://storage.googleapis.com/cvdf-datasets/mnist'),
    'fashion_mnist': _source(
        'fashion_mnist', 'http://fashion-mnist.s3-website.eu-central-1.amazonaws.com'
    ),
    'emnist': store.Source(
        'emnist', ('emnist/gzip.zip',), 'https://biometrics.nist.gov/cs_links/EMNIST', read_emnist, {'label': 47},
        (112_800, 18_800), 'emnist/balanced', '3.1.0', shape=(28, 28, 1), sideways=True,
    ),
}  # fmt: skip
