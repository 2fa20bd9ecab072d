"""Partitions become `FederatedData`: one pool of examples on the device and a table of row numbers per client."""

from collections.abc import Sequence, ValuesView
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from numpy.typing import NDArray

from fedjax_nc import checks
from fedjax_nc.base import Array, FederatedData
from fedjax_nc.data import arguments, partition
from fedjax_nc.data.host import HostData


def federate(
    x: ArrayLike,
    y: ArrayLike,
    parts: Sequence[ArrayLike] | ValuesView[ArrayLike],
    num_classes: int | None = None,
    *,
    allow_empty: bool = False,
    width: int | None = None,
    host: bool = False,
) -> FederatedData:
    """Puts a pool of examples and a partition of it on the device.

    Clients may share rows, and rows may belong to nobody.

    Args:
        x: [P, ...] examples, finite; uint8 images stay uint8.
        y: [P] integers in [0, C).
        parts: one vector of rows of the pool per client, as the functions of `partition` make them.
        num_classes: C, by default one more than the largest label.
        allow_empty: whether a client may hold nothing.
        width: N, columns of the table, by default as many as the longest client has rows. Compiled rounds serve any
            partition of the same width and number of clients.
        host: whether everything stays on the host, because it is larger than the device: `x` and `y` are then NumPy
            arrays, in memory or mapped from a file, of which `x` is not copied. See `fedjax_nc.data.host`.

    Returns:
        The data of K clients; int32 except `x`. With `host` they are `HostData`.

    Raises:
        ValueError: if lengths disagree, examples are no numbers or not finite or change as jax stores them, labels or
            rows are out of range or no integers, there is no client, one is empty, or one is longer than `width`.

    Example:
        >>> import numpy as np
        >>> from fedjax_nc import data
        >>> x = np.zeros((6, 8, 8, 1), np.uint8)
        >>> clients = data.federate(x, [0, 0, 1, 1, 2, 2], [[0, 1, 2, 3], [4, 5]])
        >>> clients.num_clients, clients.size.tolist(), clients.counts.tolist()
        (2, [4, 2], [[2, 2, 0], [0, 0, 2]])
    """
    if num_classes is not None:
        _count_classes('`num_classes`', num_classes)
    if (length := getattr(y, 'size', 0)) >= 2**31:  # row numbers are int32
        raise ValueError(f'a pool of {length} examples is beyond counting: it holds at most {2**31 - 1}.')
    labels = arguments.labels('`y`', y, classes=num_classes)
    checks.flags(allow_empty=allow_empty, host=host)
    x = _host_pool(x, len(labels)) if host else _pool(x, len(labels))
    arguments.pixels('`x`', x)
    if num_classes is None:
        num_classes = arguments.classes_of('`y`', labels, ', or give num_classes')
    if isinstance(parts, ValuesView):
        parts = list(parts)
    arguments.several('`parts`', parts, 'one vector of rows per client')
    rows = [_rows(k, arguments.array(f'`parts[{k}]`', part), len(labels), allow_empty) for k, part in enumerate(parts)]
    longest = max(len(part) for part in rows)
    if width is not None:
        width = checks.static('`width`', width)
        if width < longest:
            raise ValueError(f'`width` is {width} and the longest client has {longest} examples.')
    kept = labels.astype(np.int32) if host else jnp.asarray(labels, jnp.int32)
    return _table(x, kept, labels, rows, num_classes, width)


def split(data: FederatedData, fraction: float, *, seed: int) -> tuple[FederatedData, FederatedData]:
    """Splits every client into a training part and a local test part.

    A client's rows are shuffled and the first floor(fraction n) are its test part, as in FedETF. A client so small
    that a part would be empty keeps everything for training and has an empty test part. How client k is split
    depends on its rows, the seed and k, not on the other clients.

    Args:
        data: K clients, from `federate`, on the device or on the host.
        fraction: share of the test part, between 0 and 1.
        seed: a non-negative integer.

    Returns:
        (train, test), both of K clients and on the same pool, which is not copied.

    Raises:
        ValueError: if `fraction` is not strictly between 0 and 1, or another argument is not of this kind.

    Example:
        >>> import numpy as np
        >>> from fedjax_nc import data
        >>> x, y = np.ones((20, 3), np.float32), np.arange(20) % 2
        >>> train, test = data.split(data.federate(x, y, [range(10), range(10, 20)]), 0.3, seed=0)
        >>> train.size.tolist(), test.size.tolist()
        ([7, 7], [3, 3])
    """
    checks.kind('`data`', data, FederatedData)
    fraction = arguments.number('`fraction`', fraction, 0, high=1, open_low=True, open_high=True)
    seed = checks.static('`seed`', seed, 0)
    index, sizes, labels = (arguments.array('`data`', part) for part in (data.index, data.size, data.y))
    train, test = [], []
    for k, size in enumerate(sizes.tolist()):
        rows = index[k, np.random.default_rng((seed, k)).permutation(size)]
        held_out = min(int(fraction * size + 1e-9), max(size - 1, 0))  # 0.29 * 100 is a little less than 29
        test.append(rows[:held_out])
        train.append(rows[held_out:])
    first, second = (_table(data.x, data.y, labels, rows, data.num_classes) for rows in (train, test))
    return first, second


def common_test(x: ArrayLike, y: ArrayLike, num_clients: int, num_classes: int | None = None) -> FederatedData:
    """Lets every client be tested on the whole pool.

    The tables of `evaluate.per_client` on it, weighted by `class_weights` of the training data, give personal
    accuracies without the noise of local test sets: `sum_c (n_kc / n_k) acc_kc` for 'labels'.

    Args:
        x: [P, ...] test examples, as for `federate`.
        y: [P] integers in [0, C).
        num_clients: the number of clients, K.
        num_classes: C, by default one more than the largest label.

    Returns:
        K clients on the test examples as their pool, each with all of its rows: `index` is [K, P] int32.

    Raises:
        ValueError: if there is no client, or as for `federate`.
    """
    num_clients = checks.static('`num_clients`', num_clients)
    labels = arguments.labels('`y`', y)
    return federate(x, labels, [np.arange(len(labels))] * num_clients, num_classes)


def matched_tests(counts: ArrayLike, x: ArrayLike, y: ArrayLike, *, total: int = 10_000, seed: int) -> FederatedData:
    """Draws every client a test set with the class proportions of its training data.

    The personalised test sets of FedLoGe (Xiao et al., ICLR 2024): `floor(total n_kc / N)` examples of class c, or all
    that there are, drawn without replacement; clients may share examples. A class so rare that this is 0 is not
    tested, and a client may have no test set. What client k draws depends on its counts, N, the seed and k alone.

    Args:
        counts: [K, C] label histograms of the training data, N examples in all.
        x: [P, ...] test examples, as for `federate`.
        y: [P] integers in [0, C).
        total: size of all test sets together, but for rounding.
        seed: a non-negative integer.

    Returns:
        K clients on the test examples as their pool; some may be empty.

    Raises:
        ValueError: if `counts` is no table of counts, `total` < 1, or as for `federate`.
    """
    table = arguments.array('`counts`', counts)
    if table.ndim != 2 or not np.issubdtype(table.dtype, np.integer) or not table.any() or table.min() < 0:
        raise ValueError(f'`counts` must be a table [K, C] of label counts; got shape {table.shape}, {table.dtype}.')
    _count_classes('the columns of `counts`', table.shape[1])
    total = checks.static('`total`', total)
    seed = checks.static('`seed`', seed, 0)
    if int(table.max()) * max(total, table.size) >= 2**63:
        raise ValueError(f'`counts` up to {table.max()} and a `total` of {total} are too large to be true.')
    labels = arguments.labels('`y`', y, classes=table.shape[1])
    wanted = table.astype(np.int64) * total // table.sum(dtype=np.int64)
    pools = partition.by_class(labels, table.shape[1])
    parts = []
    for k, row in enumerate(wanted):
        rng = np.random.default_rng((seed, k))
        parts.append(np.concatenate([rng.permutation(pool)[:n] for pool, n in zip(pools, row, strict=True)]))
    return federate(x, labels, parts, table.shape[1], allow_empty=True)


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
        ValueError: if `kind` is neither, or `data` are no `FederatedData`.
    """
    checks.kind('`data`', data, FederatedData)
    if kind == 'labels':
        return data.counts / jnp.maximum(data.size, 1).astype(jnp.float32)[:, None]
    if kind == 'present':
        return (data.counts > 0).astype(jnp.float32)
    raise ValueError(f"`kind` must be 'labels' or 'present'; got {kind!r}.")


def _count_classes(name: str, count: int) -> None:
    checks.whole(name, count)
    if count > checks.MOST_CLASSES:
        raise ValueError(f'{name} must be at most {checks.MOST_CLASSES}, not {count}: number the classes from 0.')


def _pool(x: Any, length: int) -> Array:
    """Examples as jax stores them, refused where that makes others of them."""
    given = x if isinstance(x, jax.Array) else arguments.array('`x`', x)
    if given.ndim == 0 or len(given) != length:
        raise ValueError(f'`x` and `y` must hold one entry per example; got shapes {given.shape} and {(length,)}.')
    return arguments.on_device('`x`', given)


def _host_pool(x: Any, length: int) -> NDArray[Any]:
    """Examples as they are, looked at a piece at a time, refused where jax would make others of them."""
    given = arguments.array('`x`', x)
    if given.ndim == 0 or len(given) != length:
        raise ValueError(f'`x` and `y` must hold one entry per example; got shapes {given.shape} and {(length,)}.')
    if not given.dtype.isnative:
        raise ValueError(f'`x` on the host must have its bytes in the order of this machine, not as {given.dtype.str}.')
    if given.dtype != (fits := jax.dtypes.canonicalize_dtype(given.dtype)) or not any(
        jnp.issubdtype(given.dtype, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating)
    ):
        raise ValueError(f'`x` on the host must be of a type that jax has: {fits}, not {given.dtype}.')
    if jnp.issubdtype(given.dtype, jnp.inexact):
        piece = max(1, 2**26 // max(1, given[:1].nbytes))
        for start in range(0, length, piece):
            with np.errstate(invalid='ignore'):
                if not np.isfinite(given[start : start + piece]).all():
                    checks.finite('`x`', given[start : start + piece])
    return given


def _rows(client: int, part: NDArray, pool: int, allow_empty: bool) -> NDArray:
    if part.size == 0:
        if not allow_empty:
            raise ValueError(f'client {client} is empty; raise the minimum size of the partition, or `allow_empty`.')
        return np.zeros(0, np.int32)
    if part.ndim != 1 or not np.issubdtype(part.dtype, np.integer):
        raise ValueError(
            f'client {client} needs a vector of integer rows in `parts`; got shape {part.shape}, dtype {part.dtype}.'
        )
    if part.min() < 0 or part.max() >= pool:
        raise ValueError(f'client {client} has rows from {part.min()} to {part.max()} in `parts`; the pool has {pool}.')
    return part


def _table(
    x: Any, y: Any, labels: NDArray, rows: list[NDArray], num_classes: int, width: int | None = None
) -> FederatedData:
    """Data on the device, or on the host where their pool is."""
    size = np.array([len(part) for part in rows], np.int32)
    index = np.zeros((len(rows), width or max(size.max(), 1)), np.int32)
    counts = np.zeros((len(rows), num_classes), np.int32)
    for k, part in enumerate(rows):
        index[k, : len(part)] = part
        counts[k] = np.bincount(labels[part], minlength=num_classes)
    if isinstance(x, np.ndarray):
        return HostData(x, y, index, size, counts)  # type: ignore[arg-type]
    return FederatedData(x, y, jnp.asarray(index), jnp.asarray(size), jnp.asarray(counts))
