"""What was decoded once is kept as `.npy` files, and mapped into memory where it is large."""

import hashlib
import json
import math
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedjax_nc.data import arguments, store
from fedjax_nc.data.dataset import Dataset

LARGE = 2**28
"""Bytes from which on an array stays in its file."""
_FORMAT = 2
_ARRAYS = ('x_train', 'y_train', 'x_test', 'y_test', 'clients_train', 'clients_test')
_MOST = 2**26  # bytes of the description

Room = Callable[[str, tuple[int, ...]], NDArray[np.uint8]]
"""(field, shape) -> where its bytes are to be put."""


def load(
    path: Path, cache: str | os.PathLike[str] | None, name: str, stamp: str, make: Callable[[Room], Dataset], **how: Any
) -> Dataset:
    """A data set out of the cache, or made and put there.

    Args:
        path: what it is made of.
        cache: the folder of caches, by default `store.directory(None)`.
        name: of the data set.
        stamp: changes with what it is made of.
        make: makes it.
        how: all else that it depends on.

    Raises:
        ValueError: if the cache is damaged, or as `make`.
    """
    folder = store.directory(cache)
    said = json.dumps([_FORMAT, str(path.resolve()), how], sort_keys=True, default=_plain)
    key = f'{name}-{hashlib.blake2b(said.encode(errors="surrogateescape"), digest_size=4).hexdigest()}'
    place = folder / f'{key}.decoded'
    if (found := _read(place, stamp)) is not None:
        return found
    making = False
    try:
        with store.alone(key, folder) as unfinished:
            if (found := _read(place, stamp)) is not None:  # another process has left it while this one waited
                return found
            making = True
            dataset = make(_room(unfinished))
            making = False
            _write(dataset, unfinished, stamp)
            shutil.rmtree(place, ignore_errors=True)
            os.replace(unfinished, place)
    except OSError as error:
        if making and not isinstance(error, _NoRoomError):  # what it is made of cannot be read
            raise
        warnings.warn(f'{place} cannot be written ({store.line(error)}): nothing is kept', stacklevel=4)
        return make(lambda field, shape: np.empty(shape, np.uint8))
    if (found := _read(place, stamp)) is None:
        raise ValueError(f'{place} is gone: another process works on other files of the same name')
    return found


class _NoRoomError(OSError):
    """There is no place in the cache."""


def _plain(value: Any) -> Any:
    """Numbers of NumPy and sequences as JSON has them."""
    return value.item() if isinstance(value, np.generic) else list(value)


def _room(folder: Path) -> Room:
    def room(field: str, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        if math.prod(shape) > shutil.disk_usage(folder).free:  # a full disk would end the process
            raise _NoRoomError(f'{math.prod(shape)} bytes do not fit on the disk')
        try:
            return np.lib.format.open_memmap(folder / f'{field}.npy', 'w+', np.dtype(np.uint8), shape)
        except OSError as error:
            raise _NoRoomError(*error.args) from error

    return room


def _write(dataset: Dataset, folder: Path, stamp: str) -> None:
    for field in _ARRAYS:
        array = getattr(dataset, field)
        if isinstance(array, np.memmap):
            array.flush()
        elif array is not None:
            np.save(folder / f'{field}.npy', array)
    words = ('name', 'num_classes', 'classes', 'clients')
    about = {'stamp': stamp, **{field: getattr(dataset, field) for field in words}}
    (folder / 'about.json').write_text(json.dumps(about))


def _read(place: Path, stamp: str) -> Dataset | None:
    """What is kept, or None where there is nothing, or of other files."""
    if not (place / 'about.json').is_file():
        return None
    with store.refusing(place, 'delete it and load again'):
        if (place / 'about.json').stat().st_size > _MOST:
            raise ValueError('about.json is too long')
        about = json.loads((place / 'about.json').read_text())
        if about['stamp'] != stamp:
            return None
        arrays: dict[str, Any] = {
            field: _array(place / f'{field}.npy') for field in _ARRAYS if (place / f'{field}.npy').exists()
        }
        words: dict[str, Any] = {name: about[name] and tuple(map(str, about[name])) for name in ('classes', 'clients')}
        found = Dataset(**arrays, num_classes=about['num_classes'], name=str(about['name']), **words)
        return sound(found)


def _array(path: Path) -> NDArray[Any]:
    array: NDArray[Any] = np.load(path, mmap_mode='r', allow_pickle=False)
    return array if array.nbytes >= LARGE else np.array(array)


def sound(dataset: Dataset) -> Dataset:
    """The data set, if its parts go together: whatever it was read from may have been damaged.

    Raises:
        ValueError: else.
    """
    x_train, x_test, classes = dataset.x_train, dataset.x_test, dataset.num_classes
    if x_train.shape[1:] != x_test.shape[1:] or x_train.dtype != x_test.dtype or not x_train.shape[1:]:
        raise ValueError(
            f'x_train {x_train.shape} {x_train.dtype} and x_test {x_test.shape} {x_test.dtype} do not go together'
        )
    fields: dict[str, Any] = {}
    for split, x in (('train', x_train), ('test', x_test)):
        fields[f'y_{split}'] = arguments.labels(f'y_{split}', getattr(dataset, f'y_{split}'), len(x), classes)
        if (clients := getattr(dataset, f'clients_{split}')) is not None:
            fields[f'clients_{split}'] = arguments.labels(f'clients_{split}', clients, len(x))
    if dataset.clients_test is not None and dataset.clients_train is None:
        raise ValueError('clients_test without clients_train')
    known = [len(ids) and ids.max() for ids in (dataset.clients_train, dataset.clients_test) if ids is not None]
    if dataset.clients is not None and len(dataset.clients) <= max(known, default=0):
        raise ValueError(f'{len(dataset.clients)} names of clients for numbers up to {max(known, default=0)}')
    if dataset.classes is not None and len(dataset.classes) != classes:
        raise ValueError(f'{len(dataset.classes)} names for {classes} classes')
    return dataset._replace(**{name: value.astype(np.int32) for name, value in fields.items()})
