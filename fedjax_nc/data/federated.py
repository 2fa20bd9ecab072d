"""Partitions become `FederatedData`: one pool of examples on the device and a table of row numbers per client."""

from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from numpy.typing import NDArray

from fedjax_nc.base import Array, FederatedData


def federate(
    x: ArrayLike,
    y: ArrayLike,
    parts: Sequence[ArrayLike],
    num_classes: int | None = None,
    *,
    allow_empty: bool = False,
    width: int | None = None,
) -> FederatedData:
    """Puts a pool of examples and a partition of it on the device.

    Clients may share rows, and rows may belong to nobody.

    Args:
        x: [P, ...] examples; uint8 images stay uint8.
        y: [P] integers in [0, C).
        parts: one vector of rows of the pool per client, as the functions of `partition` make them.
        num_classes: C, by default one more than the largest label.
        allow_empty: whether a client may hold nothing.
        width: N, columns of the table, by default as many as the longest client has rows. Compiled rounds serve any
            partition of the same width and number of clients.

    Returns:
        The data of K clients; int32 except `x`.

    Raises:
        ValueError: if lengths disagree, labels or rows are out of range or no integers, a client is empty, or
            one is longer than `width`.
    """
    x, labels = jnp.asarray(x), np.asarray(y)
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f'`y` must be a vector of integers; got shape {labels.shape}, dtype {labels.dtype}.')
    if x.ndim == 0 or len(x) != len(labels) or len(labels) == 0:
        raise ValueError(f'`x` and `y` must hold one entry per example; got shapes {x.shape} and {labels.shape}.')
    num_classes = int(labels.max()) + 1 if num_classes is None else num_classes
    if labels.min() < 0 or labels.max() >= num_classes:
        raise ValueError(f'labels must lie in [0, {num_classes}); got {labels.min()} to {labels.max()}.')
    if not len(parts):
        raise ValueError('`parts` is empty: give one vector of rows per client.')
    rows = [_rows(k, np.asarray(part), len(labels), allow_empty) for k, part in enumerate(parts)]
    longest = max(len(part) for part in rows)
    if width is not None and width < longest:
        raise ValueError(f'`width` is {width} and the longest client has {longest} examples.')
    return _table(x, jnp.asarray(labels, jnp.int32), labels, rows, num_classes, width)


def split(data: FederatedData, fraction: float, *, seed: int) -> tuple[FederatedData, FederatedData]:
    """Splits every client into a training part and a local test part.

    A client's rows are shuffled and the first floor(fraction n) are its test part, as in FedETF. A client so small
    that a part would be empty keeps everything for training and has an empty test part. How client k is split
    depends on its rows, the seed and k, not on the other clients.

    Args:
        data: K clients.
        fraction: share of the test part, between 0 and 1.
        seed: a non-negative integer.

    Returns:
        (train, test), both of K clients and on the same pool, which is not copied.

    Raises:
        ValueError: if `fraction` is not strictly between 0 and 1.
    """
    if not 0 < fraction < 1:
        raise ValueError(f'`fraction` must lie strictly between 0 and 1; got {fraction}.')
    index, sizes = np.asarray(data.index), np.asarray(data.size)
    train, test = [], []
    for k, size in enumerate(sizes.tolist()):
        rows = index[k, np.random.default_rng((seed, k)).permutation(size)]
        held_out = min(int(fraction * size + 1e-9), max(size - 1, 0))  # 0.29 * 100 is a little less than 29
        test.append(rows[:held_out])
        train.append(rows[held_out:])
    labels = np.asarray(data.y)
    first, second = (_table(data.x, data.y, labels, rows, data.num_classes) for rows in (train, test))
    return first, second


def common_test(x: ArrayLike, y: ArrayLike, num_clients: int, num_classes: int | None = None) -> FederatedData:
    """Lets every client be tested on the whole pool.

    The tables of `evaluate.per_client` on it, weighted by `class_weights` of the training data, give personal
    accuracies without the noise of local test sets: `sum_c (n_kc / n_k) acc_kc` for 'labels'.

    Args:
        x: [P, ...] test examples.
        y: [P] integers in [0, C).
        num_clients: K.
        num_classes: C, by default one more than the largest label.

    Raises:
        ValueError: if there is no client, or as for `federate`.
    """
    if num_clients < 1:
        raise ValueError(f'`num_clients` must be at least 1; got {num_clients}.')
    return federate(x, y, [np.arange(np.size(y))] * num_clients, num_classes)


def matched_tests(counts: ArrayLike, x: ArrayLike, y: ArrayLike, *, total: int = 10_000, seed: int) -> FederatedData:
    """Draws every client a test set with the class proportions of its training data.

    The personalised test sets of FedLoGe (Xiao et al., ICLR 2024): `floor(total n_kc / N)` examples of class c, or all
    that there are, drawn without replacement; clients may share examples. A class so rare that this is 0 is not
    tested, and a client may have no test set. What client k draws depends on its counts, N, the seed and k alone.

    Args:
        counts: [K, C] label histograms of the training data, N examples in all.
        x: [P, ...] test examples.
        y: [P] integers in [0, C).
        total: size of all test sets together, but for rounding.
        seed: a non-negative integer.

    Returns:
        K clients on the test examples as their pool.

    Raises:
        ValueError: if `counts` is no table of counts, `total` < 1, or as for `federate`.
    """
    table, labels = np.asarray(counts), np.asarray(y)
    if table.ndim != 2 or not np.issubdtype(table.dtype, np.integer) or table.min() < 0 or not table.any():
        raise ValueError(f'`counts` must be a table [K, C] of label counts; got shape {table.shape}, {table.dtype}.')
    if total < 1:
        raise ValueError(f'`total` must be at least 1; got {total}.')
    wanted = table.astype(np.int64) * total // table.sum(dtype=np.int64)
    pools = [np.flatnonzero(labels == c) for c in range(table.shape[1])]
    parts = []
    for k, row in enumerate(wanted):
        rng = np.random.default_rng((seed, k))
        parts.append(np.concatenate([rng.permutation(pool)[:n] for pool, n in zip(pools, row, strict=True)]))
    return federate(x, y, parts, table.shape[1], allow_empty=True)


def class_weights(data: FederatedData, kind: Literal['labels', 'present']) -> Array:
    """Weights w_kc with which a class counts in a client's personal accuracy on a common test set.

    Accuracy is then sum_c w_kc acc_c / sum_c w_kc, as `evaluate.weighted_accuracy` computes it; the scale of a row does
    not matter. These are the two of FedNH (Dai et al., AAAI 2023).

    Args:
        data: the clients' training data.
        kind: 'labels' for PM(L), w = n_kc / n_k, the label distribution; 'present' for PM(V), w = 1 for the classes
            that the client holds and 0 for the others.

    Returns:
        [K, C] float32; a row of zeros for an empty client.

    Raises:
        ValueError: if `kind` is neither.
    """
    if kind == 'labels':
        return data.counts / jnp.maximum(data.size, 1).astype(jnp.float32)[:, None]
    if kind == 'present':
        return (data.counts > 0).astype(jnp.float32)
    raise ValueError(f"`kind` must be 'labels' or 'present'; got {kind!r}.")


def _rows(client: int, part: NDArray, pool: int, allow_empty: bool) -> NDArray:
    if part.size == 0:
        if not allow_empty:
            raise ValueError(f'client {client} is empty; raise the minimum size of the partition, or `allow_empty`.')
        return np.zeros(0, np.int32)
    if part.ndim != 1 or not np.issubdtype(part.dtype, np.integer):
        raise ValueError(f'client {client} needs a vector of integer rows; got shape {part.shape}, dtype {part.dtype}.')
    if part.min() < 0 or part.max() >= pool:
        raise ValueError(f'client {client} has rows from {part.min()} to {part.max()}; the pool has {pool}.')
    return part


def _table(
    x: Array, y: Array, labels: NDArray, rows: list[NDArray], num_classes: int, width: int | None = None
) -> FederatedData:
    size = np.array([len(part) for part in rows], np.int32)
    index = np.zeros((len(rows), width or max(size.max(), 1)), np.int32)
    counts = np.zeros((len(rows), num_classes), np.int32)
    for k, part in enumerate(rows):
        index[k, : len(part)] = part
        counts[k] = np.bincount(labels[part], minlength=num_classes)
    return FederatedData(x, y, jnp.asarray(index), jnp.asarray(size), jnp.asarray(counts))
