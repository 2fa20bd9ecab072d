"""SVHN's cropped digits in their official MATLAB files."""

import struct
import zlib
from pathlib import Path
from typing import IO

import numpy as np

from fedjax_nc.data import store

_COMPRESSED = 15  # the kind of an element that is packed by zlib
_SLACK = 4096  # bytes that describe the two arrays


def read(source: store.Source, folder: Path) -> store.Splits:
    """Reads the two files of 'X' [32, 32, 3, n] and 'y' [n, 1], where the digit 0 is called 10.

    Raises:
        ValueError: if one holds anything else.
    """
    from scipy import io  # late, as all that only some data sets need

    splits: store.Splits = {}
    for split, file, size in zip(('train', 'test'), source.files, source.sizes, strict=True):
        with store.refusing(folder / file, f'replace it by {source.url(file)}'):
            with open(folder / file, 'rb') as stream:
                _measure(stream, size * (3072 + 8) + _SLACK)
            shapes = {name: shape for name, shape, _ in io.whosmat(folder / file)}
            if shapes != {'X': (32, 32, 3, size), 'y': (size, 1)}:
                raise ValueError(f'it must hold X (32, 32, 3, {size}) and y ({size}, 1), and it holds {shapes}')
            arrays = io.loadmat(folder / file, variable_names=['X', 'y'])
            x, y = arrays['X'], arrays['y'][:, 0]
            if x.dtype != np.uint8 or y.dtype.kind not in 'uif' or not np.isin(y, np.arange(1, 11)).all():
                raise ValueError(f'images {x.dtype} and labels from {y.min()} to {y.max()}, not bytes and 1 to 10')
            splits[split] = (np.ascontiguousarray(x.transpose(3, 0, 1, 2)), (y % 10).astype(np.uint8)[:, None])
    return splits


def _measure(stream: IO[bytes], most: int) -> None:
    """Refuses what would unpack to more than `most` bytes, before anything does."""
    stream.seek(128)  # after the header
    while head := stream.read(8):
        kind, size = struct.unpack('<II', head)
        left = size
        packed = zlib.decompressobj()
        while left:
            data = stream.read(min(left, 2**16))
            if not data:
                raise ValueError('it ends too early')
            left -= len(data)
            if kind != _COMPRESSED:
                most -= len(data)
            while kind == _COMPRESSED and data and most >= 0:
                most -= len(packed.decompress(data, 2**20))
                data = packed.unconsumed_tail
            if most < 0:
                raise ValueError('it unpacks to more than the format holds')


SOURCES = {
    'svhn': store.Source(
        'svhn', ('svhn/train_32x32.mat', 'svhn/test_32x32.mat'), 'http://ufldl.stanford.edu/housenumbers', read,
        {'label': 10}, (73_257, 26_032), 'svhn_cropped', '3.1.0', ids='{}_{:06d}',
    ),
}  # fmt: skip
