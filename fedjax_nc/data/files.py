"""Data sets from a user's own files."""

import os
import zipfile
from pathlib import Path

import numpy as np

from fedjax_nc.data import arguments
from fedjax_nc.data.sources import Dataset, DatasetUnavailableError


def load_npz(path: str | os.PathLike[str]) -> Dataset:
    """Loads a data set from an `.npz` file, as `np.savez` makes it of four arrays.

    Args:
        path: the file, with `x_train`, `y_train`, `x_test` and `y_test`. Examples `[n, ...]` are of one type and shape,
            images of bytes `[n, H, W, ch]` for instance; labels are whole numbers from 0. Nothing is unpickled.

    Returns:
        The data set, named after the file, with one class more than the largest label.

    Raises:
        DatasetUnavailableError: if there is no such file.
        ValueError: if it is damaged, or holds other arrays.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise DatasetUnavailableError(f'{path} is not there: save a data set as x_train, y_train, x_test, y_test to it')
    fields = Dataset._fields[:4]
    try:
        with np.load(path, allow_pickle=False) as file:
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError('it holds one array without a name')
            if sorted(file.files) != sorted(fields):
                raise ValueError(f'it holds {", ".join(sorted(file.files))}, not {", ".join(fields)}')
            x_train, y_train, x_test, y_test = (np.asarray(file[name]) for name in fields)
    except (ValueError, TypeError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f'{path} cannot be read: {" ".join(str(error).split())}') from error
    try:
        if x_train.shape[1:] != x_test.shape[1:] or x_train.dtype != x_test.dtype or not x_train.shape[1:]:
            raise ValueError(
                f'x_train {x_train.shape} {x_train.dtype} and x_test {x_test.shape} {x_test.dtype} do not go together'
            )
        train, test = (
            arguments.labels('y_train', y_train, len(x_train)),
            arguments.labels('y_test', y_test, len(x_test)),
        )
        classes = int(train.max()) + 1
        if test.max() >= classes:
            raise ValueError(f'y_test goes to {test.max()} and y_train to {classes - 1}')
    except ValueError as error:
        raise ValueError(f'{path}: {error}') from error
    return Dataset(x_train, train.astype(np.int32), x_test, test.astype(np.int32), classes, path.stem)
