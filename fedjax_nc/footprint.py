"""How much memory a round needs, told before anything is compiled or allocated.

One client's work and the server's step are traced, and the values alive at each operation added up. XLA needs less
where it fuses operations and more where it copies for a layout or a loop; neither is modelled. Against the buffers of
rounds compiled for a CPU (jax 0.10.2) the estimate was 0.76 to 1.87 times as large: most rounds 1.0 to 1.3, CNNs with
pooling 1.6, robust means of MLPs 1.9, ResNets with BatchNorm side by side 0.76. What oneDNN allocates inside a
convolution is in neither.
"""

import contextlib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from fedjax_nc import checks, simulate, tree
from fedjax_nc.base import Aggregate, Algorithm, Array, FederatedData, Info, State, Tree


class Footprint(NamedTuple):
    """Bytes of a round. The lanes and the server's update take turns, the others stay."""

    data: int  #: the pool, the index table and the rest of the clients' data
    server: int  #: its state
    clients: int  #: the states of all clients
    messages: int  #: their running sum; under `aggregators.stacked` a row for each client of the cohort
    lane: int  #: one client at work: model, gradients, optimizer state, what the backward pass must remember, message
    update: int  #: adding the messages and the server's step
    chunk: int  #: lanes side by side

    @property
    def total(self) -> int:
        """Bytes of the whole round."""
        return self.data + self.server + self.clients + self.messages + max(self.chunk * self.lane, self.update)

    def fitting(self, limit: float) -> int:
        """The largest chunk, up to the present one, with which a round takes at most `limit` bytes; 0 if none does."""
        if self._replace(chunk=1).total > limit:
            return 0
        if limit == math.inf:
            return self.chunk
        return min(self.chunk, int((limit - self._replace(lane=0, update=0).total) // max(self.lane, 1)))


def estimate(
    algorithm: Algorithm,
    state: State,
    data: FederatedData,
    *,
    cohort: int | None = None,
    chunk: int | None = None,
    platform: str | None = None,
) -> Footprint:
    """The memory of a round of `simulate.make_round(algorithm, cohort=cohort, chunk=chunk)`.

    On several devices it is an upper bound for each, because there the states of the clients may be divided.

    Args:
      algorithm: any `Algorithm`.
      state: its state; shapes will do, such as `jax.eval_shape` makes of `simulate.init`; where those of clients
        are kept off the devices, those of a cohort.
      data: the clients; shapes will do.
      cohort: clients a round, all by default.
      chunk: clients side by side; by default `simulate.default_chunk`.
      platform: 'cpu', 'cuda', 'rocm' or 'tpu', by default that of the default backend.

    Returns:
      Bytes of each part; `total` of them all.

    Raises:
      ValueError: for a cohort or a chunk that `make_round` refuses, another platform, or client states that are
        kept off the devices.
    """
    if platform not in (None, 'cpu', 'cuda', 'rocm', 'tpu'):
        raise ValueError(f"platform must be 'cpu', 'cuda', 'rocm' or 'tpu', not {checks.shown(platform)}")
    simulate.make_round(algorithm, cohort=cohort, chunk=chunk)
    checks.stacked('state.clients', state.clients)
    key = jax.eval_shape(lambda: jax.random.key(0))
    members = jax.eval_shape(lambda key: simulate.choose(key, data.num_clients, cohort), key).size
    platform = platform or {'gpu': 'cuda'}.get(name := jax.default_backend(), name)
    lanes = min(chunk, members) if chunk else simulate.default_chunk(state.server, members, platform)
    slots = -(-members // lanes) * lanes

    def work(key: Array, server: Tree, data: FederatedData, client: Tree) -> tuple[Tree, Tree, Info]:
        return checks.worked(client, algorithm.client(key, server, client, data.shard(0)))

    def partial(message: Tree) -> Tree:
        only = jax.tree.map(lambda u: u[None], message)
        return algorithm.aggregate.partial(only, jnp.ones(1), jnp.zeros(1, jnp.int32), slots)

    def update(key: Array, server: Tree, summed: Tree, message: Tree) -> Tree:
        value = algorithm.aggregate.finish(tree.add(summed, partial(message)))
        return algorithm.server(key, server, Aggregate(value, jnp.float32(1), jnp.float32(1)))

    client = jax.eval_shape(lambda clients: jax.tree.map(lambda u: u[0], clients), state.clients)
    with checks.fitting(algorithm, state, data):
        working, (new, message, _) = jax.make_jaxpr(work, return_shape=True)(key, state.server, data, client)
    summed = jax.eval_shape(partial, message)
    lane = _peak(working.jaxpr, len(jax.tree.leaves((key, state.server, data))), platform)
    # Of several lanes, one that is done waits with what it has beside what one more step would make of it.
    lane += _size((new, message)) if lanes > 1 else 0
    updating = jax.make_jaxpr(update)(key, state.server, summed, message)
    last = _peak(updating.jaxpr, len(jax.tree.leaves((key, state.server))), platform) - _size(summed)
    return Footprint(_size(data), _size(state.server), _size(state.clients), _size(summed), lane, last, lanes)


def check(
    algorithm: Algorithm, state: State, data: FederatedData, *, limit: float | None = None, **kwargs: Any
) -> Footprint:
    """Refuses a round that cannot fit.

    Args:
      algorithm: as for `estimate`.
      state: as for `estimate`.
      data: as for `estimate`.
      limit: bytes for the round, its state and data included. By default what those occupy already and what the first
        device, or main memory, can still give; nothing is refused where that is unknown.
      **kwargs: `cohort`, `chunk` and `platform` of `estimate`.

    Returns:
      The estimate.

    Raises:
      ValueError: as `estimate`; for a limit that is no number.
      MemoryError: if the estimate is above the limit, with both, the largest share and the chunk that would fit.
    """
    if limit is not None:
        checks.number('limit', limit, finite=False)
    need = estimate(algorithm, state, data, **kwargs)
    if limit is None:
        there = _size([u for u in jax.tree.leaves((state, data)) if isinstance(u, jax.Array)])
        limit = math.inf if (free := _available()) is None else free + there
    if need.total <= limit:
        return need
    shares = {'data': need.data, 'server': need.server, 'client states': need.clients, 'messages': need.messages,
              'lanes': need.chunk * need.lane, "server's update": need.update}  # fmt: skip
    most = max(shares, key=lambda name: shares[name])
    wanted, given, part, each = (f'{u / 2**30:.3g} GiB' for u in (need.total, limit, shares[most], need.lane))
    advice = f'chunk={fits} would fit' if (fits := need.fitting(limit)) else 'no chunk would fit'
    raise MemoryError(
        f'a round needs about {wanted} and can have {given}; its largest share: {most}, {part}. At chunk={need.chunk} '
        f'each of the clients side by side takes {each}; {advice}'
    )


def _size(a: Tree) -> int:
    """Bytes of all leaves, arrays or shapes."""
    return sum(u.size * u.dtype.itemsize for u in jax.tree.leaves(a))


def _total(values: Iterable['_Value']) -> int:
    return sum(v.bytes for v in values)


class _Value:
    """One array of a trace. XLA rather keeps what a mask was compared from, so that masks count like float32."""

    def __init__(self, aval: Any = None) -> None:
        self.bytes = 0 if aval is None else _size(aval) * (4 if aval.dtype == bool else 1)


_Values = list[_Value]


def _peak(jaxpr: core.Jaxpr, held: int, platform: str) -> int:
    """The most bytes alive at once, besides the first `held` inputs; all others end with their last use."""
    inputs = [_Value(None if i < held else v.aval) for i, v in enumerate(jaxpr.invars)]
    steps, results = _flat(jaxpr, inputs, platform)
    last = {v: t for t, (_, read, _) in enumerate(steps) for v in read} | dict.fromkeys(results, len(steps))
    most = live = _total(inputs)
    for t, (eqn, read, made) in enumerate(steps):
        ending = {v for v in read if last[v] == t}
        most = max(most, live + _during(eqn, read, made, ending, platform))
        live += _total(v for v in made if v in last) - _total(ending)
    return most


def _flat(
    jaxpr: core.Jaxpr, inputs: list[_Value], platform: str
) -> tuple[list[tuple[core.JaxprEqn, _Values, _Values]], _Values]:
    """Each operation with what it reads and makes, those of called functions in place of the call; and the results."""
    known, steps = dict(zip(jaxpr.invars, inputs, strict=True)), []

    def values(atoms: Iterable[Any]) -> _Values:
        return [known[a] if isinstance(a, core.Var) and a in known else _Value() for a in atoms]  # or a constant

    for eqn in jaxpr.eqns:
        read, made = values(eqn.invars), [_Value(v.aval) for v in eqn.outvars]
        more = [(eqn, read, made)]
        for inner in _called(eqn, platform):
            first = 1 if 'branches_platforms' in eqn.params else 0  # after the number of the platform
            sides: Any = ((*eqn.invars[first:], *eqn.outvars), (*inner.invars, *inner.outvars))
            ours, its = ([v.aval.shape for v in side] for side in sides)
            if ours == its and eqn.primitive.name not in ('while', 'scan'):  # nothing but a call of it
                more, made = _flat(inner, read[first:], platform)
        steps += more
        known.update(zip(eqn.outvars, made, strict=True))
    return steps, values(jaxpr.outvars)


def _called(eqn: core.JaxprEqn, platform: str) -> list[core.Jaxpr]:
    """The functions that an operation calls; of those for several platforms the one for this."""
    names = eqn.params.get('branches_platforms')
    if names is None:
        return list(core.jaxprs_in_params(eqn.params))
    which = next(i for i, named in enumerate(names) if named is None or platform in named)
    return [eqn.params['branches'][which].jaxpr]


def _during(eqn: core.JaxprEqn, read: _Values, made: _Values, ending: set[_Value], platform: str) -> int:
    """The most bytes that an operation adds to those alive, its results among them."""
    p = eqn.params
    if eqn.primitive.name == 'while':
        first, constants, body, stacked = p['cond_nconsts'], p['body_nconsts'], p['body_jaxpr'].jaxpr, 0
        carried = len(made)
    elif eqn.primitive.name == 'scan':
        # What is sliced or stacked has one dimension more outside. Versions of jax name the numbers differently.
        body = p['jaxpr'].jaxpr
        whole, carried = (
            sum(outer.aval.ndim == inner.aval.ndim for outer, inner in zip(*pair, strict=True))
            for pair in ((eqn.invars, body.invars), (eqn.outvars, body.outvars))
        )
        first, constants, stacked = 0, whole - carried, _total(made[carried:])
    else:
        return max([_total(made), *(_peak(j, len(j.invars), platform) for j in _called(eqn, platform))])
    # A loop works on its carry in place: it takes over what nobody needs any more, and copies the rest.
    carry = set(read[first + constants :][:carried])
    return _peak(body, constants, platform) + stacked - _total(carry & ending)


def _available() -> int | None:
    """Bytes that the first device can still give; on a CPU those of main memory. None where they are unknown."""
    device = jax.local_devices()[0]
    if 'bytes_limit' in (stats := device.memory_stats() or {}):
        return stats['bytes_limit'] - stats['bytes_in_use']
    return _main_memory() if device.platform == 'cpu' else None


def _main_memory(root: str = '/') -> int | None:
    """Bytes free in main memory and in a container's share of it. Cached files count as free: they give way."""

    def read(name: str) -> list[str]:
        return Path(root, name).read_text().replace(':', ' ').split()

    free = []
    with contextlib.suppress(OSError, ValueError):
        words = read('proc/meminfo')
        free.append(1024 * int(words[words.index('MemAvailable') + 1]))
    for group, limit, usage in (('', 'max', 'current'), ('memory/', 'limit_in_bytes', 'usage_in_bytes')):
        with contextlib.suppress(OSError, ValueError):  # there is no such group, or its limit is 'max'
            at = f'sys/fs/cgroup/{group}memory.'
            words = read(at + 'stat')
            cached = int(words[words.index('inactive_file') + 1])
            free.append(int(*read(at + limit)) - int(*read(at + usage)) + cached)
    return min(free, default=None)
