"""What a data set is, and parts of one."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_nc import checks
from fedjax_nc.data import arguments


class Dataset(NamedTuple):
    """Labelled examples in host memory, or mapped into it from a file."""

    x_train: NDArray[Any]  #: [n, ...]: images are uint8 [n, H, W, ch], rows of tables float32 [n, features]
    y_train: NDArray[np.int32]  #: [n] in [0, num_classes)
    x_test: NDArray[Any]  #: [m, ...], shape and type of an example as in `x_train`
    y_test: NDArray[np.int32]  #: [m] in [0, num_classes)
    num_classes: int  #: C, of both sets
    name: str  #: that of `load_dataset`, or of the file or folder
    classes: tuple[str, ...] | None = None  #: their names, where there are any
    clients_train: NDArray[np.int32] | None = None  #: [n] whose example it is, from 0, where the data say so
    clients_test: NDArray[np.int32] | None = None  #: [m] the same; None, too, where the test set is nobody's
    #: the clients' names in the order of these numbers, where there are any; `natural` orders by appearance
    clients: tuple[str, ...] | None = None


class DatasetUnavailableError(RuntimeError):
    """The data set is neither in the data directory nor can it be downloaded."""


def keep(dataset: Dataset, rows: ArrayLike) -> Dataset:
    """Keeps some training examples, such as those that `long_tail` names, with all that is known of them.

    Args:
        dataset: any data set; its test set is left alone.
        rows: [n] row numbers of its training examples, in the order wanted.

    Returns:
        The data set with `x_train`, `y_train` and `clients_train` of these rows alone, copied.

    Raises:
        ValueError: if an argument is not of this kind, or no such rows exist.
    """
    _check(dataset)
    wanted = arguments.array('`rows`', rows)
    if wanted.ndim != 1 or not wanted.size or not np.issubdtype(wanted.dtype, np.integer):
        raise ValueError(f'`rows` must be a vector of row numbers; got shape {wanted.shape}, {wanted.dtype}.')
    if wanted.min() < 0 or wanted.max() >= len(dataset.y_train):
        raise ValueError(f'`rows` go from {wanted.min()} to {wanted.max()} of {len(dataset.y_train)} examples.')
    clients = None if dataset.clients_train is None else dataset.clients_train[wanted]
    return dataset._replace(x_train=dataset.x_train[wanted], y_train=dataset.y_train[wanted], clients_train=clients)


def subset(dataset: Dataset, max_examples: int, seed: int) -> Dataset:
    """Keeps a random part of the training set, in order, as equally over the classes as their sizes allow.

    Args:
        dataset: any data set; its test set is left alone.
        max_examples: at least 1; the size of the training set or more keeps all.
        seed: a non-negative integer.

    Returns:
        The data set with at most so many training examples.

    Raises:
        ValueError: if an argument is not of this kind, or the training set holds anything but labels for its examples.
    """
    _check(dataset)
    max_examples = checks.static('`max_examples`', max_examples)
    seed = checks.static('`seed`', seed, 0)
    checks.labels('`dataset.y_train`', dataset.y_train, len(dataset.x_train))
    rows = np.random.default_rng(seed).permutation(len(dataset.y_train))
    rank = np.empty(len(rows), np.intp)  # the how many-th example of its class
    for c in np.unique(dataset.y_train):
        members = dataset.y_train[rows] == c
        rank[members] = np.arange(members.sum())
    return keep(dataset, np.sort(rows[np.argsort(rank, kind='stable')[:max_examples]]))


def held_out(labels: NDArray[np.integer], share: float, seed: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Rows for training and rows held out for testing: floor(share n) random examples of each class, in order.

    Raises:
        ValueError: if the share is not between 0 and 1, or so small that nothing is held out.
    """
    share = arguments.number('`test`', share, 0, high=1, open_low=True, open_high=True)
    seed = checks.static('`seed`', seed, 0)
    rng = np.random.default_rng(seed)
    classes = [rng.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)]
    test = np.sort(np.concatenate([rows[: int(share * len(rows) + 1e-9)] for rows in classes]))
    if not len(test):
        raise ValueError(f'`test` {share:g} holds out nothing of classes of at most {max(map(len, classes))} examples.')
    return np.setdiff1d(np.arange(len(labels)), test), test


def _check(dataset: Dataset) -> None:
    if not isinstance(dataset, Dataset):
        raise ValueError(f'`dataset` must be a Dataset, as `load_dataset` returns it; got {checks.shown(dataset)}.')
