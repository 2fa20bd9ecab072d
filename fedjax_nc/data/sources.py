"""Data sets by name.

Most come through tensorflow-datasets (TFDS), without TensorFlow. Where TFDS is not installed, official files are read
as they are; what needs TFDS is downloading them and what TFDS has prepared.
"""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedjax_nc import checks
from fedjax_nc.data import cifar, femnist, folders, mnist, prepared, store, svhn
from fedjax_nc.data.dataset import Dataset, DatasetUnavailableError, held_out, keep
from fedjax_nc.data.partition import long_tail

SOURCES = {**cifar.SOURCES, **mnist.SOURCES, **svhn.SOURCES}
ARCHIVES: dict[str, tuple[tuple[str, ...], str, Callable[..., Dataset]]] = {
    'tiny_imagenet': (
        ('tiny-imagenet-200', 'tiny-imagenet-200.zip'),
        'tiny-imagenet-200 or tiny-imagenet-200.zip from http://cs231n.stanford.edu/tiny-imagenet-200.zip',
        folders.load_tiny_imagenet,
    ),
    'cinic10': (
        ('CINIC-10', 'CINIC-10.tar.gz'),
        'CINIC-10 or CINIC-10.tar.gz from https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz',
        folders.load_cinic10,
    ),
    'femnist': (
        ('femnist',),
        'data/femnist/data of https://github.com/TalwalkarLab/leaf, as its preprocess.sh leaves it, as femnist',
        femnist.load_femnist,
    ),
}
"""What TFDS does not have: what it is called in the data directory, what to put there, and what loads it."""
LONG_TAILED = {'cifar10_lt': 'cifar10', 'cifar100_lt': 'cifar100'}
IMBALANCE = 100.0
NAMES = ('digits', *SOURCES, *LONG_TAILED, *ARCHIVES)


def load_dataset(name: str, data_dir: str | os.PathLike[str] | None = None) -> Dataset:
    """Loads a data set.

    'digits' is scikit-learn's 1,797 handwritten digits, 8x8x1, with a fixed split of 80 % to 20 % within each class; it
    needs no network and no directory.

    'cifar10' and 'cifar100' (fine labels), 32x32x3, 'mnist', 'fashion_mnist' and 'emnist' (its balanced split of 47
    classes, upright), 28x28x1, and 'svhn' (cropped digits, without the extra ones), 32x32x3, come from the first of
    these in `data_dir`:

    1. `<name>.npz`, the cache that the first load leaves;
    2. `<name>/<version>/`, prepared by TFDS as array_record (`emnist/balanced/`, `svhn_cropped/`);
    3. the official files: `cifar-10-binary.tar.gz` or `cifar-100-binary.tar.gz`; in the folder `mnist` or
       `fashion_mnist`, the four `*-ubyte.gz`; `emnist/gzip.zip`; `svhn/train_32x32.mat` and `svhn/test_32x32.mat`;
    4. a download of those.

    Without tensorflow-datasets and array_record, 2 and 4 cannot be had, and 3 leaves nothing but the cache. Of several
    processes that find neither 1 nor 2, one makes them and the others wait for it. A process that is killed meanwhile
    leaves nothing but `.<name>.unfinished`, which the next one removes.

    'cifar10_lt' and 'cifar100_lt' are the same with a training set made long-tailed by `long_tail`, imbalance 100 and
    seed 0. 'tiny_imagenet' (`tiny-imagenet-200` or its .zip), 'cinic10' (`CINIC-10` or its .tar.gz) and 'femnist'
    (LEAF's `train` and `test` in the folder `femnist`) are never downloaded: `load_tiny_imagenet`, `load_cinic10` and
    `load_femnist` say what they are.

    Args:
        name: one of these.
        data_dir: where to look and write; by default `fedjax_nc` in `$XDG_CACHE_HOME` or `~/.cache`. If 1 or 2 is in
            it, it may be read-only.

    Returns:
        The data set: images uint8 [n, H, W, ch], labels int32, in the order of the official files; but MNIST,
        Fashion-MNIST and EMNIST as TFDS has shuffled them where TFDS itself has prepared them.

    Raises:
        ValueError: for an unknown name, or a file that is damaged.
        TypeError: if `data_dir` is no path.
        DatasetUnavailableError: if nothing is in `data_dir` and there is no network, or nothing can be written there.
        ImportError: if 'digits' is asked for without scikit-learn, or what TFDS has prepared without TFDS.

    Example:
        >>> from fedjax_nc import data
        >>> digits = data.load_dataset('digits')
        >>> digits.x_train.shape, digits.x_test.shape, digits.num_classes
        ((1442, 8, 8, 1), (355, 8, 8, 1), 10)
    """
    if not isinstance(name, str) or name not in NAMES:
        raise ValueError(f'`name` {checks.shown(name)} is no data set; choose one of {list(NAMES)}.')
    if data_dir is not None and not isinstance(data_dir, str | os.PathLike):
        raise TypeError(f'`data_dir` must be a path; got {checks.shown(data_dir)}.')
    if name == 'digits':
        return _digits()
    if name in LONG_TAILED:
        balanced = load_dataset(LONG_TAILED[name], data_dir)
        return keep(balanced, long_tail(balanced.y_train, IMBALANCE, seed=0))._replace(name=name)
    folder = store.directory(data_dir)
    if name in ARCHIVES:
        return _archive(name, folder)
    source = SOURCES[name]

    if (cache := folder / f'{name}.npz').exists():
        return store.read_cache(source, cache)
    if not prepared.possible():
        dataset = _read_alone(source, folder)
        store.write_cache(source, dataset, cache)
        return dataset
    if (ready := prepared.find(source, folder)) is None:
        try:
            with store.alone(name, folder) as unfinished:
                # another process may have left it while this one waited
                ready = prepared.find(source, folder) or prepared.prepare(source, folder, unfinished)
        except OSError as error:
            raise DatasetUnavailableError(
                f'{name} is not ready in {folder} and cannot be made so ({store.line(error)}); '
                'choose another `data_dir`.'
            ) from error
    dataset = prepared.read(source, ready)
    store.write_cache(source, dataset, cache)
    return dataset


def _archive(name: str, folder: Path) -> Dataset:
    places, what, load = ARCHIVES[name]
    for place in places:
        if (folder / place).exists():
            return load(folder / place, cache=folder)._replace(name=name)
    raise DatasetUnavailableError(f'{name} is not in {folder}: put {what} there')


def _read_alone(source: store.Source, folder: Path) -> Dataset:
    """Reads the official files without preparing anything."""
    if all((folder / file).exists() for file in source.files):
        splits = source.read(source, folder)
        return store.checked(source, [u for x, y in splits.values() for u in (x, y[:, -1].astype(np.int32))])
    if (ready := prepared.find(source, folder)) is not None:
        raise ImportError(
            f'{ready} is read with tensorflow-datasets: {prepared.NEEDED}, or put {source.files[0]} into {folder}'
        )
    raise DatasetUnavailableError(
        f'{source.name} is not in {folder}, and tensorflow-datasets, which downloads it, is not installed. '
        f'{source.put(folder)}, or {prepared.NEEDED}'
    )


def _digits() -> Dataset:
    package = importlib.util.find_spec('sklearn')
    if package is None or not package.submodule_search_locations:
        raise ImportError('\'digits\' comes with scikit-learn: pip install "fedjax_nc[examples]"')
    file = Path(package.submodule_search_locations[0], 'datasets', 'data', 'digits.csv.gz')
    if file.is_file():  # read without scikit-learn, whose import takes as long as jax's
        table = np.loadtxt(file, np.uint8, delimiter=',')
        images, labels = table[:, :-1], table[:, -1]
    else:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
    x = np.rint(images.reshape(-1, 8, 8, 1) * (255 / 16)).astype(np.uint8)  # 17 levels stay 17 levels
    y = labels.astype(np.int32)
    train, test = held_out(y, 0.2, 0)
    return Dataset(x[train], y[train], x[test], y[test], 10, 'digits')
