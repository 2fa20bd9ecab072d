"""Data sets from a user's own `.npz` files."""

import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_nc.data import arguments, decoded
from fedjax_nc.data.dataset import Dataset, DatasetUnavailableError

_FURTHER = ('classes', 'clients_train', 'clients_test', 'clients')


def load_npz(path: str | os.PathLike[str]) -> Dataset:
    """Loads a data set from an `.npz` file, as `np.savez` makes it of four arrays and up to four more.

    Args:
        path: the file, with `x_train`, `y_train`, `x_test` and `y_test`. Examples `[n, ...]` are of one type and shape,
            images of bytes `[n, H, W, ch]` for instance; labels are whole numbers from 0. It may hold `classes`, their
            names, and `clients_train` and `clients_test`: whose an example is, names, or whole numbers from 0,
            which `clients` may name. Nothing is unpickled.

    Returns:
        The data set, named after the file: x as it is there, y and clients int32. Without `classes`, it has one class
        more than the largest label.

    Raises:
        DatasetUnavailableError: if there is no such file.
        ValueError: if it is damaged, or holds other arrays.
        TypeError: if `path` is no path.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise DatasetUnavailableError(f'{path} is not there: save a data set as x_train, y_train, x_test, y_test to it')
    fields = Dataset._fields[:4]
    try:
        opened = np.load(path, allow_pickle=False)
        if not isinstance(opened, np.lib.npyio.NpzFile):
            raise ValueError(f'it holds one array without a name, not {", ".join(fields)} as `np.savez` writes them')
        with opened as file:
            if sorted({*file.files} - {*_FURTHER}) != sorted(fields):
                found = sorted({*file.files} - {*_FURTHER})
                raise ValueError(f'it holds {", ".join(found) or "nothing else"}, not {", ".join(fields)}')
            arrays: dict[str, Any] = {name: np.asarray(file[name]) for name in file.files}
        named = [
            name for name in ('clients_train', 'clients_test') if name in arrays and arrays[name].dtype.kind == 'U'
        ]
        if len(named) == 1 and {'clients_train', 'clients_test'} <= {*arrays}:
            raise ValueError(f'{named[0]} are names and the other numbers: save both as names')
        if named and 'clients' not in arrays:  # numbered together, so that a client has one number
            arrays['clients'] = np.unique(np.concatenate([arrays[name] for name in named]))
            for name in named:
                arrays[name] = np.searchsorted(arrays['clients'], arrays[name])
        if 'clients' in arrays:
            if arrays['clients'].dtype.kind != 'U' or arrays['clients'].ndim != 1:
                raise ValueError('clients must be a vector of their names')
            arrays['clients'] = tuple(arrays['clients'].tolist())
    except (ValueError, TypeError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f'{path} cannot be read: {" ".join(str(error).split())}') from error
    try:
        classes = arrays.pop('classes', None)
        if classes is not None:
            if classes.dtype.kind != 'U' or classes.ndim != 1 or not len(classes):
                raise ValueError(f'classes must be a vector of names, not {classes.dtype} {classes.shape}')
            count = len(classes)
        else:
            count = arguments.classes_of(f'y_train in {path}', arguments.labels('y_train', arrays['y_train']))
            if (most := arguments.labels('y_test', arrays['y_test']).max()) >= count:
                raise ValueError(f'y_test goes to {most} and y_train to {count - 1}')
        names = None if classes is None else tuple(classes.tolist())
        return decoded.sound(Dataset(**arrays, num_classes=count, name=path.stem, classes=names))
    except ValueError as error:
        raise ValueError(f'{path}: {error}') from error
