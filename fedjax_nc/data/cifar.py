"""CIFAR-10 and CIFAR-100 in their official archives."""

import functools
import gzip
import io
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedjax_nc import checks
from fedjax_nc.data import store

_SLACK = 2**15
"""Bytes that an archive may hold beside images: headers, names of classes and padding take 19,000 in the official ones.

Few, because what parses the headers takes time that grows as their square in some releases of Python.
"""


class Bounded:
    """A stream that gives `left` bytes and no more."""

    def __init__(self, file: gzip.GzipFile | io.BufferedReader, left: int):
        self.file, self.left = file, left

    def read(self, size: int) -> bytes:
        data = self.file.read(size)
        self.left -= len(data)
        if self.left < 0:
            raise ValueError('it unpacks to more than the format holds')
        return data


def unzipped(path: Path) -> gzip.GzipFile | io.BufferedReader:
    """Opens a .gz file, which some browsers unzip when they download it."""
    with open(path, 'rb') as file:
        zipped = file.read(2) == b'\x1f\x8b'
    return gzip.open(path) if zipped else open(path, 'rb')


class Members(NamedTuple):
    """The files of an archive that hold the images of a split."""

    train: tuple[str, ...]
    test: tuple[str, ...]


def read(members: Members, source: store.Source, folder: Path) -> store.Splits:
    """Reads an archive: records of label bytes and three planes of 32x32 pixels.

    Raises:
        ValueError: if it holds anything else.
    """
    archive = folder / source.files[0]
    width = len(source.labels) + 3072
    names = members._asdict()
    sizes = dict(zip(names, source.sizes, strict=True))
    most = {name: sizes[split] // len(names[split]) * width for split in names for name in names[split]}
    with store.refusing(archive, f'replace it by {source.url(source.files[0])}'):
        files = _records(archive, most, width)
        splits = {split: np.concatenate([files[name] for name in names[split]]) for split in names}
        for split, records in splits.items():
            if len(records) != sizes[split]:
                raise ValueError(f'{sizes[split]} {split} records expected, got {len(records)}')
            if (records[:, : len(source.labels)] >= list(source.labels.values())).any():
                raise ValueError(f'labels of {split} records not below {source.labels}')
    return {split: _parts(records, len(source.labels)) for split, records in splits.items()}


def _parts(records: NDArray[np.uint8], labels: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    planes = records[:, labels:].reshape(-1, 3, 32, 32)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), records[:, :labels]


def _records(archive: Path, most: dict[str, int], width: int) -> dict[str, NDArray[np.uint8]]:
    """The records [n, width] of the files named in `most`, of at most so many bytes."""
    files: dict[str, NDArray[np.uint8]] = {}
    with unzipped(archive) as file:
        stream: Any = Bounded(file, _SLACK)
        with tarfile.open(fileobj=stream, mode='r|') as tar:  # a stream goes forward
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
                opened = tar.extractfile(member)
                data = np.frombuffer(opened.read() if opened else b'', np.uint8)
                if len(data) % width:
                    raise ValueError(f'{name} is not made of records of {width} bytes')
                files[name] = data.reshape(-1, width)
        while stream.read(_SLACK):  # what is zipped ends with its checksum
            pass
    if missing := most.keys() - files.keys():
        raise ValueError(f'{sorted(missing)} not in it')
    return files


def _source(name: str, members: Members, labels: dict[str, int]) -> store.Source:
    return store.Source(
        name, (f'{name.replace("cifar", "cifar-")}-binary.tar.gz',), 'https://www.cs.toronto.edu/~kriz',
        functools.partial(read, members), labels, (50_000, 10_000), name, '3.0.2', ids='{}_{:05d}',
    )  # fmt: skip


MEMBERS = {
    'cifar10': Members(tuple(f'data_batch_{i}.bin' for i in range(1, 6)), ('test_batch.bin',)),
    'cifar100': Members(('train.bin',), ('test.bin',)),
}
SOURCES = {
    'cifar10': _source('cifar10', MEMBERS['cifar10'], {'label': 10}),
    'cifar100': _source('cifar100', MEMBERS['cifar100'], {'coarse_label': 20, 'label': 100}),
}
