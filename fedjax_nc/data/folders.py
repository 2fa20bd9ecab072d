"""Folders of images, one folder a class; Tiny-ImageNet and CINIC-10 as they are published."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedjax_nc import checks
from fedjax_nc.data import containers, decoded, pictures, store
from fedjax_nc.data.dataset import Dataset, DatasetUnavailableError, held_out

OFFICIAL = {'tiny_imagenet': (200, 100_000, 10_000), 'cinic10': (10, 90_000, 90_000)}
"""Classes, training images and test images."""


class Layout(NamedTuple):
    """Which files are images of which class."""

    train: list[str]
    y_train: NDArray[np.int32]
    test: list[str]
    y_test: NDArray[np.int32]
    classes: tuple[str, ...]


def load_folder(
    path: str | os.PathLike[str],
    *,
    test: str | float = 'test',
    size: int | Sequence[int] | None = None,
    channels: int = 3,
    seed: int = 0,
    cache: str | os.PathLike[str] | None = None,
) -> Dataset:
    """Loads images from folders that are named after their classes.

    Images (PNG, JPEG, BMP, GIF, PPM, WebP) lie in `train/CLASS/` and `test/CLASS/`, or in `CLASS/` alone, at whatever
    depth below; other files are passed over. They are decoded once, into `cache`; while no file changes, later loads
    read that, and what is large stays in its files until it is used.

    Args:
        path: the folder, or a .zip or .tar file of it, compressed or not, which is not unpacked.
        test: the folder beside `train` with the test images, 'val' for instance; or, where all images lie in `CLASS/`,
            the share of each class that is held out for testing, between 0 and 1.
        size: side, or height and width, to which images are scaled, after what is too long is cut off at both ends.
            Without it they must be alike.
        channels: 3 for colours, 1 for grey.
        seed: draws what is held out.
        cache: a folder; by default `fedjax_nc` in `$XDG_CACHE_HOME` or `~/.cache`. Where nothing can be written,
            nothing is kept.

    Returns:
        The data set, named after the folder: x [n, H, W, channels] uint8, y [n] int32, classes and files in
        alphabetical order.

    Raises:
        DatasetUnavailableError: if there is no such folder or file.
        ValueError: if an argument is not of its kind, images are missing, damaged, too large or not alike, or the
            training and the test images are of different classes.
    """
    sides = pictures.sides(size)
    if channels not in (1, 3):
        raise ValueError(f'`channels` must be 3 or 1, not {checks.shown(channels)}.')
    seed = checks.static('`seed`', seed, 0)
    if not isinstance(test, str):
        checks.number('`test`', test, 0, high=1, open_low=True, open_high=True)
    elif test == 'train':
        raise ValueError("`test` must be another folder than 'train', or the share of all images that is for testing.")
    return _load(path, None, lambda files: _by_class(files, test, seed), cache, sides, channels, test=test, seed=seed)


def load_tiny_imagenet(path: str | os.PathLike[str], *, cache: str | os.PathLike[str] | None = None) -> Dataset:
    """Loads Tiny-ImageNet: 64x64x3, 200 classes by their WordNet ids, 500 training and 50 test images each.

    The test set is the official validation set: the labels of the official test set were never published.

    Args:
        path: the folder `tiny-imagenet-200`, or `tiny-imagenet-200.zip`, which is not unpacked.
        cache: as for `load_folder`.

    Returns:
        The data set: uint8 [100000, 64, 64, 3] for training and [10000, 64, 64, 3] for testing, classes in alphabetical
        order of their ids.

    Raises:
        DatasetUnavailableError: if there is no such folder or file.
        ValueError: if it does not hold Tiny-ImageNet, or is damaged.
    """
    return _load(path, 'tiny_imagenet', _tiny_imagenet, cache)


def load_cinic10(path: str | os.PathLike[str], *, cache: str | os.PathLike[str] | None = None) -> Dataset:
    """Loads CINIC-10: 32x32x3, CIFAR-10's classes, 9,000 training and 9,000 test images each.

    Its validation set is left out.

    Args:
        path: the folder with `train`, `valid` and `test`, or `CINIC-10.tar.gz`, which is not unpacked.
        cache: as for `load_folder`.

    Returns:
        The data set: uint8 [90000, 32, 32, 3] for training and as many for testing, classes in alphabetical order.

    Raises:
        DatasetUnavailableError: if there is no such folder or file.
        ValueError: if it does not hold CINIC-10, or is damaged.
    """
    return _load(path, 'cinic10', lambda files: _by_class(files, 'test', 0), cache)


def _load(
    path: str | os.PathLike[str],
    official: str | None,
    layout: Callable[[containers.Container], Layout],
    cache: str | os.PathLike[str] | None,
    sides: tuple[int, int] | None = None,
    channels: int = 3,
    **how: str | float,
) -> Dataset:
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f'`path` must be a path; got {checks.shown(path)}.')
    where = Path(path).expanduser()
    if not where.exists():
        raise DatasetUnavailableError(f'{where} is not there: give a folder of images, or a .zip or .tar file of one')
    stem = where.name if where.is_dir() else where.name.partition('.')[0]
    name = official or stem.strip('.') or where.resolve().name

    def make(room: decoded.Room) -> Dataset:
        with store.refusing(where, 'fetch it again, or give another'):
            files = containers.opened(where)
        plan = layout(files)
        if official and (found := (len(plan.classes), len(plan.train), len(plan.test))) != OFFICIAL[official]:
            raise ValueError(
                f'{where} does not hold all of {official}: {found} classes, training and test images, '
                f'not {OFFICIAL[official]}; unpack or fetch it again'
            )
        x_train, x_test = pictures.decode(files, [plan.train, plan.test], sides, channels, room)
        return Dataset(x_train, plan.y_train, x_test, plan.y_test, len(plan.classes), name, plan.classes)

    return decoded.load(where, cache, name, containers.stamp(where), make, sides=sides, channels=channels, **how)


SPLITS = {'train', 'training', 'test', 'testing', 'val', 'valid', 'validation', 'dev', 'eval'}
"""Folders of such names alone are no classes."""


def _by_class(files: containers.Container, test: str | float, seed: int) -> Layout:
    images = [name for name in files.files if pictures.named(name)]
    if not isinstance(test, str):
        classes, y = _classes(files.path, images, '')
        train, held = held_out(y, test, seed)
        if {name.lower() for name in classes} <= SPLITS:
            raise ValueError(
                f'{files.path} has the folders {", ".join(classes)}, which are parts of a data set and no classes: '
                "give the name of the one for testing, such as test='val', beside train/"
            )
        names = np.array(images, object)
        return Layout(list(names[train]), y[train], list(names[held]), y[held], classes)
    splits = {split: [name for name in images if name.startswith(f'{split}/')] for split in ('train', test)}
    if empty := [split for split, names in splits.items() if not names]:
        there = sorted({name.partition('/')[0] for name in images if '/' in name})
        others = f', but in {", ".join(there[:5])}{", ..." if len(there) > 5 else ""}' if there else ''
        raise ValueError(
            f'{files.path} has no images in {" or ".join(f"{split}/" for split in empty)}{others}; name the folder for '
            "testing, such as test='val', or if all lie in CLASS/, give the share of them that is for testing, such as "
            'test=0.2'
        )
    (classes, y_train), (tested, y_test) = (_classes(files.path, names, f'{split}/') for split, names in splits.items())
    if other := sorted(set(classes) ^ set(tested)):
        raise ValueError(
            f'{files.path} has {checks.shown(other[0])} in only one of train/ and {test}/, '
            f'and {len(other) - 1} more classes: add their images, or remove their folders'
        )
    return Layout(splits['train'], y_train, splits[test], y_test, classes)


def _classes(path: Path, images: list[str], prefix: str) -> tuple[tuple[str, ...], NDArray[np.int32]]:
    """The names of the folders that images lie in, and the label of each."""
    inner = [name.removeprefix(prefix).partition('/') for name in images]
    if loose := [top for top, below, _ in inner if not below]:
        raise ValueError(f'{path} has {checks.shown(prefix + loose[0])} beside folders of classes: move it into one')
    classes = tuple(sorted({top for top, *_ in inner}))
    if len(classes) < 2:
        raise ValueError(f'{path}/{prefix} must hold images of two classes or more, each in its folder: {classes}')
    numbers = {name: i for i, name in enumerate(classes)}
    return classes, np.array([numbers[top] for top, *_ in inner], np.int32)


def _tiny_imagenet(files: containers.Container) -> Layout:
    train = [name for name in files.files if name.startswith('train/') and pictures.named(name)]
    test = [name for name in files.files if name.startswith('val/images/') and pictures.named(name)]
    classes, y_train = _classes(files.path, train, 'train/')
    if set(classes) != set(files.text('wnids.txt').split()):
        raise ValueError(f'{files.path} has folders in train/ that are not those of wnids.txt: fetch it again')
    numbers = {name: i for i, name in enumerate(classes)}
    rows = [row.split('\t') for row in files.text('val/val_annotations.txt').splitlines() if row]
    labels = {row[0]: numbers.get(row[1]) for row in rows if len(row) > 1}
    y_test = [labels.get(name.rpartition('/')[2]) for name in test]
    if None in y_test:
        raise ValueError(f'{files.path} has {test[y_test.index(None)]} without a class in val_annotations.txt')
    return Layout(train, y_train, test, np.array(y_test, np.int32), classes)
