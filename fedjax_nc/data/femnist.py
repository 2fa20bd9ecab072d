"""FEMNIST as LEAF makes it: handwritten digits and letters, each writer a client."""

import json
import os
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedjax_nc import checks
from fedjax_nc.data import containers, decoded, store
from fedjax_nc.data.dataset import Dataset, DatasetUnavailableError

CLASSES = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
MOST_BYTES = 2**31
"""Of one file, which is read whole: LEAF's hold 100 writers each and take 0.2 GB."""
_PIXELS = 28 * 28


def load_femnist(path: str | os.PathLike[str], *, cache: str | os.PathLike[str] | None = None) -> Dataset:
    """Loads FEMNIST (Caldas et al., LEAF, 2018) from the `.json` files that LEAF's `preprocess.sh` leaves.

    Each file says `users`, `num_samples` and, in `user_data`, the images `x` [n, 784] in [0, 1] and the labels `y` of
    each: 0-9 for digits, then 26 capital and 26 small letters. They are read once, into `cache`.

    Args:
        path: the folder with `train` and `test` (LEAF's `data/femnist/data`, or `data/femnist`).
        cache: as for `load_folder`.

    Returns:
        The data set: x [n, 28, 28, 1] uint8, black on white, y [n] int32 in [0, 62); one client a writer, in
        alphabetical order of their names, with the official test examples of each. Where LEAF was run with `-t user`,
        the test examples are other writers'.

    Raises:
        DatasetUnavailableError: if there is no such folder.
        ValueError: if a file is damaged.
    """
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f'`path` must be a path; got {checks.shown(path)}.')
    where = Path(path).expanduser()
    root = where / 'data' if (where / 'data').is_dir() else where
    if missing := [split for split in ('train', 'test') if not any((root / split).glob('*.json'))]:
        raise DatasetUnavailableError(
            f'{root} has no {" and no ".join(f"{split}/*.json" for split in missing)}: run data/femnist/preprocess.sh '
            'of https://github.com/TalwalkarLab/leaf, and put the folders train and test that it leaves in data there'
        )

    def make(room: decoded.Room) -> Dataset:
        writers = {split: _writers(root / split) for split in ('train', 'test')}
        ids = {name: k for k, name in enumerate(sorted(set(writers['train']) | set(writers['test'])))}
        fields: dict[str, Any] = {}
        for split, found in writers.items():
            x, y = (np.concatenate([found[name][i] for name in sorted(found)]) for i in (0, 1))
            fields |= {f'x_{split}': x, f'y_{split}': y}
            fields[f'clients_{split}'] = np.repeat(
                np.array([ids[name] for name in sorted(found)], np.int32),
                [len(found[name][1]) for name in sorted(found)],
            )
        return Dataset(**fields, num_classes=len(CLASSES), name='femnist', classes=CLASSES)

    return decoded.load(root, cache, 'femnist', containers.stamp(root), make)


def _writers(folder: Path) -> dict[str, tuple[NDArray[np.uint8], NDArray[np.int32]]]:
    """Images and labels by writer."""
    found: dict[str, tuple[NDArray[np.uint8], NDArray[np.int32]]] = {}
    for path in sorted(folder.glob('*.json')):
        with store.refusing(path, 'make it again with preprocess.sh of LEAF'):
            if path.stat().st_size > MOST_BYTES:
                raise ValueError(f'{path.stat().st_size} bytes, more than {MOST_BYTES}')
            with open(path) as file:
                content = json.load(file)
            for name, x, y in _examples(content):
                if name in found:
                    raise ValueError(f'writer {checks.shown(name)} is in two files')
                found[name] = x, y
    return found


def _examples(content: dict[str, Any]) -> Iterator[tuple[str, NDArray[np.uint8], NDArray[np.int32]]]:
    users, sizes, examples = content['users'], content['num_samples'], content['user_data']
    if len(set(users)) != len(users) or set(users) != set(examples) or len(users) != len(sizes):
        raise ValueError('users, num_samples and user_data are not of the same writers')
    for name, size in zip(users, sizes, strict=True):
        x, y = np.array(examples[name]['x'], np.float32), np.array(examples[name]['y'])
        if not size or x.shape != (size, _PIXELS) or y.shape != (size,) or y.dtype.kind not in 'iu':
            raise ValueError(f'writer {checks.shown(name)} has {size} samples, x {x.shape} and y {y.shape} {y.dtype}')
        if not ((x >= 0) & (x <= 1)).all() or y.min() < 0 or y.max() >= len(CLASSES):
            raise ValueError(f'writer {checks.shown(name)} has pixels outside [0, 1], or labels outside [0, 62)')
        yield str(name), np.rint(x * 255).astype(np.uint8).reshape(-1, 28, 28, 1), y.astype(np.int32)
