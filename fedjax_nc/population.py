"""Populations whose client states do not fit on the devices: they are kept on the host or on disk.

Only the states of a cohort travel to the devices and back, and only clients that have taken part take up room, so that
memory grows with the clients seen and not with the population. Results are those of `simulate.make_round`.

    state = population.init(algorithm, key, data, folder='states')     # without a folder: in the host's memory
    round = population.make_round(algorithm, cohort=100)
    state, report = round(key, state, data)
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedjax_nc import _keys, checks, devices, simulate, tree
from fedjax_nc.base import Algorithm, Array, FederatedData, State, Tree
from fedjax_nc.data.host import Part
from fedjax_nc.models.convolution import compiler_options


class Store:
    """The states of all clients, of which those never changed are not stored but made when asked for.

    A store is changed in place, like a donated array: a state that holds it must not be used after its round. It begins
    with first states, those of `simulate.join(algorithm, key, server, num_clients)`.

    Args:
      algorithm: whose client states they are.
      key: as `join` takes it.
      server: the server's state on which first states are based; it is copied.
      num_clients: their number K.
      folder: where the states are kept, in files that this store makes and removes; in memory without it. A process
        that is killed leaves them behind in a folder `clients-*`, which may then be removed.

    Attributes:
      num_clients: clients in all, K.
      seen: number of clients whose state is stored.
    """

    def __init__(
        self, algorithm: Algorithm, key: Array, server: Tree, num_clients: int, folder: str | Path | None = None
    ) -> None:
        """Makes a store of first states."""
        self.num_clients, self.seen = num_clients, 0
        self._slots = np.full(num_clients, -1, np.int32)
        server = jax.tree.map(jnp.array, server)
        each = jax.vmap(algorithm.init_client, in_axes=(0, None))
        self._first = jax.jit(lambda ids: each(jax.vmap(lambda i: jax.random.fold_in(key, i))(ids), server))
        first = jax.eval_shape(self._first, jax.ShapeDtypeStruct((1,), jnp.int32))
        (self._kinds, self._structure), self._names = jax.tree.flatten(first), tuple(tree.by_path(first))
        shapes = jax.tree.leaves(jax.eval_shape(_keys.plain, first))  # random keys are kept as their numbers
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
        self._folder = None if folder is None else tempfile.TemporaryDirectory(dir=folder, prefix='clients-')
        self._leaves = [self._room(i, 0, u.shape[1:], u.dtype) for i, u in enumerate(shapes)]

    def _room(self, leaf: int, rows: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        if self._folder is None or rows == 0:
            return np.zeros((rows, *shape), dtype)
        place = Path(self._folder.name, f'{leaf}-{rows}')
        return np.lib.format.open_memmap(place, 'w+', dtype, (rows, *shape))

    @property
    def nbytes(self) -> int:
        """Bytes that the stored states take, room for the next ones included."""
        return sum(leaf.nbytes for leaf in self._leaves)

    def take(self, ids: np.ndarray) -> Tree:
        """The states of clients `ids [M]` int, stacked [M, ...]; those of K and beyond are first states of nobody.

        Raises:
          ValueError: for what are no integers, or negative ones.
        """
        ids = np.asarray(ids)
        if ids.ndim != 1 or ids.dtype.kind not in 'iu' or (ids < 0).any():
            raise ValueError(f'ids must be a vector of numbers of clients, from 0 on, not {checks.shown(ids)}')
        slots = self._slots[np.minimum(ids, self.num_clients - 1)]
        known = (slots >= 0) & (ids < self.num_clients)
        if known.all():
            return self._states([leaf[slots] for leaf in self._leaves])
        rows = self._begun(jnp.asarray(ids, jnp.int32))
        for row, leaf in zip(rows, self._leaves, strict=True):
            row[known] = leaf[slots[known]]
        return self._states(rows)

    def _states(self, rows: list[np.ndarray]) -> Tree:
        """A tree of states from what is kept of them."""
        pairs = zip(rows, self._kinds, strict=True)
        return jax.tree.unflatten(self._structure, [_keys.again(u, k) if _keys.keyed(k) else u for u, k in pairs])

    def _begun(self, ids: Array) -> list[np.ndarray]:
        """What is kept of first states."""
        return [np.array(u) for u in jax.tree.leaves(_keys.plain(self._first(ids)))]

    def put(self, ids: np.ndarray, states: Tree) -> None:
        """Stores the `states [M, ...]` of clients `ids [M]`, all different; those of K and beyond are dropped.

        Raises:
          ValueError: if the states have another structure, other shapes or types than the store's, or are not one for
            each of `ids`; for a negative number or a client twice.
        """
        ids = np.asarray(ids)
        if ids.ndim != 1 or ids.dtype.kind not in 'iu' or not self._known(ids[ids < self.num_clients]):
            raise ValueError(f'ids must be different numbers of clients, from 0 on, not {checks.shown(ids)}')
        real, given = np.flatnonzero(ids < self.num_clients), len(ids)
        ids, (leaves, structure) = ids[real], jax.tree.flatten(_keys.plain(states))
        shapes = [u.shape[1:] for u in self._leaves]
        if (structure, [u.shape[1:] for u in leaves]) != (self._structure, shapes):
            raise ValueError('these are not states of the algorithm that the store was made for')
        for leaf, value in zip(self._leaves, leaves, strict=True):  # before anything is stored
            if len(value) != given or value.dtype != leaf.dtype:
                raise ValueError(
                    f'{given} clients need as many states, of {leaf.dtype}, and there are {len(value)} of {value.dtype}'
                )
        new = ids[self._slots[ids] < 0]
        self._grow(self.seen + len(new))
        self._slots[new] = np.arange(self.seen, self.seen + len(new), dtype=np.int32)
        self.seen += len(new)
        for leaf, value in zip(self._leaves, leaves, strict=True):
            leaf[self._slots[ids]] = np.asarray(value)[real]

    def _known(self, ids: np.ndarray) -> bool:
        """Whether these are different clients."""
        return not len(ids) or (0 <= ids.min() <= ids.max() < self.num_clients and len(np.unique(ids)) == len(ids))

    def _grow(self, rows: int) -> None:
        if not self._leaves or rows <= len(self._leaves[0]):
            return
        room = min(self.num_clients, max(rows, 2 * len(self._leaves[0])))
        for i, old in enumerate(self._leaves):
            self._leaves[i] = self._room(i, room, old.shape[1:], old.dtype)
            self._leaves[i][: len(old)] = old
            if isinstance(old, np.memmap):
                Path(str(old.filename)).unlink()

    def contents(self) -> dict[str, np.ndarray]:
        """What has to be saved: 'clients' [seen] int32, and their states, leaf by leaf. `restore` takes it back.

        With them, the first state of client 0, which tells whether others begin with the same.
        """
        clients = np.flatnonzero(self._slots >= 0)
        leaves = {name: leaf[self._slots[clients]] for name, leaf in zip(self._names, self._leaves, strict=True)}
        return {
            'clients': clients.astype(np.int32),
            **{f'state.{name}': leaf for name, leaf in leaves.items()},
            **{f'first.{name}': leaf for name, leaf in zip(self._names, self._beginning(), strict=True)},
        }

    def _beginning(self) -> list[np.ndarray]:
        return self._begun(jnp.zeros(1, jnp.int32))

    def restore(self, contents: dict[str, np.ndarray]) -> None:
        """Forgets all states and takes over those of `contents`, as the method of that name returns them.

        Raises:
          ValueError: if they are states of another algorithm or population; nothing has changed then.
        """
        clients, leaves = contents['clients'], [contents.get(f'state.{name}') for name in self._names]
        known = [contents.get(f'first.{name}') for name in self._names]
        told = sum(u is not None for u in known)  # nothing by older versions
        fits = len(contents) == len(leaves) + 1 + told and all(
            u is not None and u.shape == (len(clients), *leaf.shape[1:])
            for u, leaf in zip(leaves, self._leaves, strict=True)
        )
        if not fits or not self._known(clients):
            raise ValueError('the saved client states belong to another algorithm or population')
        if told and not all(map(_same, known, self._beginning())):
            raise ValueError(
                'the saved client states belong to a run whose other clients begin with other states: make the state '
                'with the key that it was made with'
            )
        self._slots[:], self.seen = -1, 0
        self.put(clients, self._states([u for u in leaves if u is not None]))

    def state(self, server: Tree) -> State:
        """`server` and the states of all clients in one tree [K, ...], as evaluation takes it; it has to fit."""
        return State(server, jax.tree.map(jnp.asarray, self.take(np.arange(self.num_clients))))


def _same(a: np.ndarray | None, b: np.ndarray) -> bool:
    """Whether first states are equal but for rounding, which another device may do otherwise."""
    if a is None or a.shape != b.shape:
        return False
    return bool(np.array_equal(a, b) or np.allclose(a.astype(np.float32), b.astype(np.float32), 1e-4, 1e-6, True))


def init(algorithm: Algorithm, key: Array, data: FederatedData, folder: str | Path | None = None) -> State:
    """As `simulate.init`, with a `Store` in the place of the client states, in files in `folder` or else in memory.

    Raises ValueError as that does.
    """
    checks.kind('algorithm', algorithm, Algorithm)
    checks.key('key', key)
    checks.kind('data', data, FederatedData)
    k_server, k_clients = jax.random.split(key)
    server = jax.tree.map(jnp.array, algorithm.init(k_server, data))  # buffers of their own, for rounds donate them
    return State(server, Store(algorithm, k_clients, server, data.num_clients, folder))


def make_round(
    algorithm: Algorithm, *, cohort: int | None = None, chunk: int | None = None, mesh: Mesh | None = None
) -> Callable[..., tuple[State, simulate.Report]]:
    """As `simulate.make_round`, for states with a `Store`. The result is not to be compiled: it does that itself.

    It takes a `data.Part` as well, where the examples do not fit on the devices either.

    Args:
      algorithm: as there.
      cohort: as there.
      chunk: as there.
      mesh: as there; the store stays on the host.

    Returns:
      `(key, state, data, ids=None) -> (state, report)`. The store is changed in place: go on with the state that comes
      out.

    Raises:
      ValueError: as there; when called, for a state without a `Store`.
    """
    work = jax.jit(
        simulate.make_work(algorithm, chunk=chunk, mesh=mesh),
        donate_argnums=(1, 2),
        compiler_options=compiler_options(),
    )
    choose = jax.jit(
        lambda key, population: simulate.choose(simulate.cohort_key(key), population, cohort), static_argnums=1
    )
    if cohort is not None:
        cohort = checks.static('cohort', cohort)

    def round(
        key: Array, state: State, data: FederatedData | Part, ids: Array | None = None
    ) -> tuple[State, simulate.Report]:
        checks.key('key', key)
        store: Store = state.clients
        if not isinstance(store, Store):
            raise ValueError('the state holds its clients itself: make it with population.init, or use simulate')
        if store.num_clients != data.num_clients:
            raise ValueError(
                f'the state has {store.num_clients} clients and the data {data.num_clients}: make it with init'
            )
        if isinstance(data, Part):
            chosen = np.asarray(simulate.brought(data, ids))
        else:
            chosen = np.asarray(
                choose(key, data.num_clients) if ids is None else simulate.named_cohort(ids, data.num_clients)
            )
        held = store.take(chosen)
        if mesh is not None:
            held = jax.device_put(held, devices.shardings(mesh, held)[1])
        server, held, report = work(key, state.server, held, data, chosen, np.arange(len(chosen), dtype=np.int32))
        store.put(chosen, held)
        return State(server, store), report

    return round
