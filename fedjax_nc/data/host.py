"""Data sets larger than the device: the pool stays on the host, and only a cohort's examples travel.

    train = data.federate(x, y, parts, host=True)     # x may be memory-mapped: np.load('x.npy', mmap_mode='r')
    run = training.run(algorithm, key, state, train, rounds=100, cohort=10)

`training.run` and `evaluate.per_client` see to the rest. Who writes their own loop over rounds takes `feed`:

    round = simulate.compiled(simulate.make_round(algorithm))
    for key, part in zip(keys, data.feed(train, keys, cohort=10)):
        state, report = jax.block_until_ready(round(key, state, part))

Results are those of the same rounds with all data on the device, up to the order of sums.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from fedjax_nc import checks, devices
from fedjax_nc.base import Array, FederatedData

AT_ONCE = 2**28  # bytes of examples that travel together where it does not matter how many do


class HostData(FederatedData):
    """`FederatedData` whose arrays are NumPy's, in main memory or mapped from a file: `federate(..., host=True)`.

    What does not know it takes it as `FederatedData`: all of it then travels at once.
    """


def here(data: FederatedData) -> FederatedData:
    """The same on the device, all of it."""
    return FederatedData(*map(jnp.asarray, data)) if isinstance(data, HostData) else data


@functools.partial(jax.tree_util.register_dataclass, data_fields=('ids', 'data'), meta_fields=('num_clients',))
@dataclasses.dataclass(frozen=True)
class Part:
    """What a round needs of `HostData`: some clients, with a pool of their examples alone."""

    ids: Array  #: [M] int32, who they are; K is nobody
    data: FederatedData  #: of those M clients, in that order
    num_clients: int  #: K, of the whole population


def room(data: HostData, clients: int) -> int:
    """The most examples that so many clients can hold together, and the rows that the pool of a part has.

    What clients share is there once, so that a part is never larger than the pool.
    """
    held = int(np.sort(np.asarray(data.size, np.int64))[::-1][:clients].sum())
    return max(1, min(held, len(data.x)))


def part(data: HostData, ids: NDArray[np.integer], mesh: Mesh | None = None) -> Part:
    """Puts the examples of some clients on the device, or on all of a mesh.

    Parts of as many clients have the same shapes, whoever they are.

    Args:
        data: all clients.
        ids: [M] their numbers in [0, K], all different; K stands for nobody, as often as it likes.
        mesh: from `devices.mesh`; every device of it has the whole part.

    Returns:
        The M clients in the order of `ids`. Their pool has as many rows as M clients can hold together at most, at
        most those of the whole pool: an example that several hold is there once, and zeros fill what is left.

    Raises:
        ValueError: for data that are not on the host, numbers out of range, or a client twice.
    """
    _check(data)
    ids = np.asarray(ids)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer) or np.any((ids < 0) | (ids > data.num_clients)):
        raise ValueError(f'ids must be a vector of integers in [0, {data.num_clients}], not {checks.shown(ids)}')
    real = ids < data.num_clients
    if len(np.unique(ids[real])) < real.sum():
        raise ValueError(f'ids must all be different, not {checks.shown(ids)}')
    known = np.where(real, ids, 0)
    size = np.where(real, np.asarray(data.size)[known], 0).astype(np.int32)
    counts = np.where(real[:, None], np.asarray(data.counts)[known], 0).astype(np.int32)
    index = np.zeros((len(ids), data.index.shape[1]), np.int32)
    # Ascending, as they lie there, which is cheaper to read from a disk.
    held = [data.index[client, :n] for client, n in zip(known, size, strict=True)]
    rows, at = np.unique(np.concatenate([np.zeros(0, np.int32), *held]), return_inverse=True)
    for row, n, end in zip(index, size, size.cumsum(), strict=True):
        row[:n] = at[end - n : end]
    pool, labels = (_taken(np.asarray(u), rows, room(data, len(ids))) for u in (data.x, data.y))
    found = Part(ids.astype(np.int32), FederatedData(pool, labels, index, size, counts), data.num_clients)  # type: ignore[arg-type]
    where = None if mesh is None else devices.shardings(mesh, ())[0]
    return jax.device_put(found, where)


def _taken(pool: NDArray, rows: NDArray[np.int32], length: int) -> NDArray:
    """`pool[rows]` and zeros after it."""
    out = np.zeros((length, *pool.shape[1:]), pool.dtype)
    np.take(pool, rows, axis=0, out=out[: len(rows)], mode='clip')  # else NumPy makes a copy of `out`, too
    return out


def feed(
    data: HostData, keys: Iterable[Array], *, cohort: int | None = None, mesh: Mesh | None = None
) -> Iterator[Part]:
    """The parts of rounds with those keys, each brought to the device while the one before is used.

    Two parts are on the device at a time if each round is waited for, as above and in `training.run`: jax returns from
    a round before it is done, and the parts of rounds that wait for it would pile up. The cohorts are those that
    `simulate.make_round(cohort=)` draws itself.

    Args:
        data: all clients.
        keys: the rounds' keys.
        cohort: clients a round, M; all by default.
        mesh: devices that share the rounds, from `devices.mesh`.

    Yields:
        For each key the `Part` of M clients that its round takes.

    Raises:
        ValueError: when the first part is asked for, for data that are not on the host, or a cohort that is no whole
            number of at least 1, or larger than the population.
    """
    from fedjax_nc import simulate  # which takes parts

    _check(data)
    cohort = None if cohort is None else checks.static('cohort', cohort)
    host = jax.local_devices(backend='cpu')[0]  # elsewhere the choice would wait for the round that is running
    draw = jax.jit(lambda key: simulate.choose(simulate.cohort_key(key), data.num_clients, cohort))

    def made(key: Array) -> Part:
        return part(data, np.asarray(draw(jax.device_put(key, host))), mesh)

    worker, coming = ThreadPoolExecutor(1, 'feed'), None
    try:
        for key in keys:
            following = worker.submit(made, key)
            if coming is not None:
                yield coming.result()
            coming = following
        if coming is not None:
            yield coming.result()
    finally:
        worker.shutdown(wait=False)  # nobody waits for a part that is not used, nor can at the end of a program


def cohorts(data: HostData, most: int = AT_ONCE) -> Iterator[NDArray[np.int32]]:
    """All clients in cohorts of one length, whose examples take at most so many bytes, if one client's do.

    The last one is filled up with K, nobody. The round of a stage that sends nothing, such as `finetune`, is the same
    as a round of each cohort after the other: `round(key, state, data.part(train, ids))`.

    Args:
        data: all clients.
        most: bytes of examples that a cohort may take.

    Yields:
        [M] int32 numbers of clients, ascending, for `part`.
    """
    each = max(1, int(np.prod(data.x.shape[1:])) * data.x.dtype.itemsize)
    largest = np.sort(np.asarray(data.size, np.int64))[::-1].cumsum() * each
    length = max(1, int(np.searchsorted(largest, most, side='right')))
    for start in range(0, data.num_clients, length):
        ids = np.arange(start, min(start + length, data.num_clients), dtype=np.int32)
        yield np.pad(ids, (0, length - len(ids)), constant_values=data.num_clients)


def _check(data: HostData) -> None:
    if not isinstance(data, HostData):
        raise ValueError(
            f'data must be HostData, as data.federate(x, y, parts, host=True) makes them, not {type(data).__name__}'
        )


def shapes(data: HostData, clients: int) -> FederatedData:
    """What two parts of so many clients take on the device, one in use and one on its way, as one population."""
    pool, width = 2 * room(data, clients), data.index.shape[1]

    def of(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    x = of(pool, *data.x.shape[1:], dtype=data.x.dtype)
    return FederatedData(x, of(pool), of(clients, width), of(clients), of(clients, data.num_classes))
