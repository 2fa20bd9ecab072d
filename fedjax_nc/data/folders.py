"""Folders of images, one folder a class; Tiny-ImageNet and CINIC-10 as they are published."""

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedjax_nc import checks
from fedjax_nc.data import containers, decoded, pictures, store, tables
from fedjax_nc.data.dataset import Dataset, DatasetUnavailableError, held_out

OFFICIAL = {'tiny_imagenet': (200, 100_000, 10_000), 'cinic10': (10, 90_000, 90_000)}
"""Classes, training images and test images."""


LEVELS = {'split': 'train/ and test/', 'client': 'clients', 'class': 'classes'}
"""What folders may be named after, and what several of them are called."""


class Layout(NamedTuple):
    """Which files are images of which class, and of which client if that is known."""

    train: list[str]
    y_train: NDArray[np.int32]
    test: list[str]
    y_test: NDArray[np.int32]
    classes: tuple[str, ...]
    clients_train: NDArray[np.int32] | None = None
    clients_test: NDArray[np.int32] | None = None
    clients: tuple[str, ...] | None = None


def load_folder(
    path: str | os.PathLike[str],
    *,
    test: str | float = 'test',
    folders: str | None = None,
    size: int | Sequence[int] | None = None,
    channels: int = 3,
    classes: Sequence[str] | None = None,
    seed: int = 0,
    cache: str | os.PathLike[str] | None = None,
) -> Dataset:
    """Loads images from folders that are named after their classes, and after clients if there are any.

    Images (PNG, JPEG, BMP, GIF, PPM, WebP) lie in `train/CLASS/` and `test/CLASS/`, in `CLASS/` alone, or as `folders`
    says, at whatever depth below; other files are passed over. They stand upright as their cameras say. They are
    decoded once, into `cache`; while no file changes, later loads read that, and what is large stays in its files until
    it is used.

    Args:
        path: the folder, or a .zip or .tar file of it, compressed or not, which is not unpacked. In a file, a folder
            that holds all others is left out.
        test: the folder beside `train` with the test images, 'val' for instance; or, where all images lie in `CLASS/`,
            the share of each class that is held out for testing, between 0 and 1.
        folders: what folders are named after, from the top: 'split/client/class' where images lie in
            `train/CLIENT/CLASS/` and `test/CLIENT/CLASS/`, 'client/split/class' for `CLIENT/train/CLASS/`,
            'client/class', with a share for `test`, for `CLIENT/CLASS/`, in whatever order. By default 'split/class',
            and 'class' with a share.
        size: side, or height and width, to which images are scaled, after what is too long is cut off at both ends.
            Without it they must be alike.
        channels: 3 for colours, 1 for grey.
        classes: all that there may be, in the order of their numbers: where several folders must agree, of which some
            lack a class. By default those that occur.
        seed: draws what is held out.
        cache: a folder; by default `fedjax_nc` in `$XDG_CACHE_HOME` or `~/.cache`. Where nothing can be written,
            nothing is kept.

    Returns:
        The data set, named after the folder: x [n, H, W, channels] uint8, y [n] int32; classes if they are not given,
        clients and files in alphabetical order.

    Raises:
        DatasetUnavailableError: if there is no such folder or file.
        ValueError: if an argument is not of its kind, images are missing, damaged, too large or not alike, or the
            training and the test images are of different classes.

    Example:
        >>> import pathlib, tempfile
        >>> import numpy as np
        >>> from PIL import Image
        >>> from fedjax_nc import data
        >>> with tempfile.TemporaryDirectory() as top:
        ...     for hospital in ('north', 'south'):
        ...         for kind, grey in (('bone', 200), ('lung', 90)):
        ...             place = pathlib.Path(top, 'scans', hospital, kind)
        ...             place.mkdir(parents=True)
        ...             for i in range(5):
        ...                 Image.new('L', (8, 8), grey + i).save(place / f'{i}.png')
        ...     scans = data.load_folder(f'{top}/scans', test=0.2, folders='client/class', channels=1, cache=top)
        >>> scans.classes, scans.clients
        (('bone', 'lung'), ('north', 'south'))
        >>> [len(rows) for rows in data.natural(scans.clients_train)]
        [8, 8]
    """
    sides = pictures.sides(size)
    if type(channels) is not int or channels not in (1, 3):
        raise ValueError(f'`channels` must be 3 or 1, not {checks.shown(channels)}.')
    seed = checks.static('`seed`', seed, 0)
    if not isinstance(test, str):
        checks.number('`test`', test, 0, high=1, open_low=True, open_high=True)
    elif test == 'train' or '/' in test or not test:
        raise ValueError(
            "`test` must be the name of another folder than 'train', or the share of all images that is for testing."
        )
    levels = _levels(folders, isinstance(test, str))
    doubtful = folders is None and classes is None
    how = {'test': test, 'seed': seed, 'folders': '/'.join(levels), 'classes': classes}
    return _load(
        path,
        None,
        lambda files: _by_folder(files, levels, test, seed, classes, doubtful),
        cache,
        sides,
        channels,
        **how,
    )


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
    return _load(path, 'cinic10', lambda files: _by_folder(files, ('split', 'class'), 'test', 0), cache)


def _load(
    path: str | os.PathLike[str],
    official: str | None,
    layout: Callable[[containers.Container], Layout],
    cache: str | os.PathLike[str] | None,
    sides: tuple[int, int] | None = None,
    channels: int = 3,
    **how: Any,
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
        known = {name: value for name, value in plan._asdict().items() if name not in ('train', 'test')}
        return Dataset(x_train=x_train, x_test=x_test, num_classes=len(plan.classes), name=name, **known)

    return decoded.load(where, cache, name, containers.stamp(where), make, sides=sides, channels=channels, **how)


SPLITS = {'train', 'training', 'test', 'testing', 'val', 'valid', 'validation', 'dev', 'eval'}
"""Folders of such names alone are no classes."""


def _levels(folders: str | None, split: bool) -> tuple[str, ...]:
    """What folders are named after, from the top."""
    if folders is None:
        return ('split', 'class') if split else ('class',)
    levels = tuple(folders.split('/')) if isinstance(folders, str) else ()
    if not {'class'} <= {*levels} <= LEVELS.keys() or len({*levels}) < len(levels):
        raise ValueError(
            "`folders` must be 'class', with 'split' and 'client' above or below it, such as 'split/client/class', not "
            f'{checks.shown(folders)}.'
        )
    if ('split' in levels) != split:
        raise ValueError(
            f"`folders` {folders!r} names {'no' if split else 'a'} 'split': `test` must then be "
            + ('the share of each class that is for testing, such as 0.2.' if split else "a folder, such as 'test'.")
        )
    return levels


def _by_folder(
    files: containers.Container,
    levels: Sequence[str],
    test: str | float,
    seed: int,
    known: Sequence[str] | None = None,
    doubtful: bool = False,
) -> Layout:
    images = [name for name in files.files if pictures.named(name)]
    if isinstance(test, str):
        images = _of_splits(files.path, images, levels.index('split'), test)
    named = _named(files.path, images, levels)
    classes, y = _numbered(files.path, named['class'], known)
    if isinstance(test, str):
        train, held = (np.flatnonzero(np.array(named['split']) == split) for split in ('train', test))
        trained, tested = ({*y[rows].tolist()} for rows in (train, held))
        if other := sorted(tested - trained if known is not None else tested ^ trained):
            raise ValueError(
                f'{files.path} has {checks.shown(classes[other[0]])} in only one of train/ and {test}/, '
                f'and {len(other) - 1} more classes: add their images, or remove their folders'
            )
    else:
        train, held = held_out(y, test, seed)
        for level in levels:
            if {name.lower() for name in named[level]} <= SPLITS:
                raise ValueError(
                    f'{files.path} has the folders {", ".join(sorted({*named[level]}))}, which are parts of a data set '
                    f"and no {LEVELS[level]}: give the name of the one for testing, such as test='val', beside train/"
                )
    if doubtful:
        _warn_of_clients(files.path, images, len(levels))
    names = np.array(images, object)
    layout = Layout(list(names[train]), y[train], list(names[held]), y[held], classes)
    if 'client' not in levels:
        return layout
    clients, whose = tables.numbered('client', np.array(named['client'], object))
    return layout._replace(clients_train=whose[train], clients_test=whose[held], clients=tuple(clients))


def _of_splits(path: Path, images: list[str], place: int, test: str) -> list[str]:
    """Those images that lie in `train` or `test` at that place of their paths."""
    above = {name: name.split('/')[:-1] for name in images}
    at = {name: folders[place] for name, folders in above.items() if len(folders) > place}
    there = sorted({*at.values()})
    if empty := [split for split in ('train', test) if split not in there]:
        others = f', but in {", ".join(there[:5])}{", ..." if len(there) > 5 else ""}' if there else ''
        raise ValueError(
            f'{path} has no images in {" or ".join(f"{split}/" for split in empty)}{others}; name the folder for '
            "testing, such as test='val', or if all lie in CLASS/, give the share of them that is for testing, such as "
            'test=0.2; `folders` says what else folders are named after'
        )
    inside = [name for name in images if at.get(name) in ('train', test)]
    around = {tuple(above[name][:n]) for name in inside for n in range(place + 1)}  # folders of clients and classes
    if other := sorted({tuple(folders[:place]) for folders in above.values()} - around):
        raise ValueError(
            f'{path} has images in {checks.shown("/".join(other[0]))}, and none of them in its train/ or {test}/: name '
            'its folders like those of the others, or remove it'
        )
    return inside


def _named(path: Path, images: list[str], levels: Sequence[str]) -> dict[str, list[str]]:
    """The folders of each level that images lie in."""
    above = [name.split('/')[:-1] for name in images]
    for name, there in zip(images, above, strict=True):
        if len(there) < len(levels):
            raise ValueError(
                f'{path} has {checks.shown(name)} beside folders of {LEVELS[levels[len(there)]]}: move it into one'
            )
        if not all(there):
            raise ValueError(f'{path} has {checks.shown(name)}, in a folder without a name: pack it again')
    return {level: [there[i] for there in above] for i, level in enumerate(levels)}


def _warn_of_clients(path: Path, images: list[str], depth: int) -> None:
    """Warns where folders of classes hold several of the same names, as clients with folders of classes do."""
    below: dict[str, set[str]] = {}
    for name in images:
        above = name.split('/')[:-1]
        if len(above) <= depth:
            return
        below.setdefault(above[depth - 1], set()).add(above[depth])
    inner = set().union(*below.values())
    if len(below) > 1 and min(map(len, below.values())) > 1 and sum(map(len, below.values())) > len(inner):
        split = 'split/' * (depth - 1)
        warnings.warn(
            f'{path}: {", ".join(sorted(below)[:5])} are taken for the classes, and what lies in their folders '
            f'({", ".join(sorted(inner)[:5])}) for nothing: if these are the classes, and those above are clients, say '
            f"folders='{split}client/class'; if these are the clients, '{split}class/client'; else '{split}class'",
            stacklevel=2,
        )


def _numbered(
    path: Path, names: list[str], known: Sequence[str] | None = None
) -> tuple[tuple[str, ...], NDArray[np.int32]]:
    """Classes in order, or as they are `known`, and the label of each image."""
    classes, y = tables.numbered('class', np.array(names, object))
    if known is not None:
        classes, y = tables.renumbered(str(path), classes, y, known)
    if len(classes) < 2:
        raise ValueError(f'{path} must hold images of two classes or more, each in its folder: {classes}')
    return tuple(map(str, classes)), y


def _tiny_imagenet(files: containers.Container) -> Layout:
    train = [name for name in files.files if name.startswith('train/') and pictures.named(name)]
    test = [name for name in files.files if name.startswith('val/images/') and pictures.named(name)]
    classes, y_train = _numbered(files.path, _named(files.path, train, ('split', 'class'))['class'])
    if set(classes) != set(files.text('wnids.txt').split()):
        raise ValueError(f'{files.path} has folders in train/ that are not those of wnids.txt: fetch it again')
    numbers = {name: i for i, name in enumerate(classes)}
    rows = [row.split('\t') for row in files.text('val/val_annotations.txt').splitlines() if row]
    labels = {row[0]: numbers.get(row[1]) for row in rows if len(row) > 1}
    y_test = [labels.get(name.rpartition('/')[2]) for name in test]
    if None in y_test:
        raise ValueError(f'{files.path} has {test[y_test.index(None)]} without a class in val_annotations.txt')
    return Layout(train, y_train, test, np.array(y_test, np.int32), classes)
