"""The round: the one file that knows that there are many clients.

Algorithms are written for one client. Here their work is vmapped over lanes, scanned over chunks of the cohort, and
summed as it comes, so that a whole round is one function to compile and memory is bounded by the chunk.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_nc import tree
from fedjax_nc.base import Aggregate, Algorithm, Array, FederatedData, Info, State, Tree
from fedjax_nc.models.convolution import compiler_options


class Report(NamedTuple):
    """What a person may look at after a round."""

    loss: Array  # [] float32, mean local training loss over the examples visited
    padded_work: Array  # [] float32, share of the computed batch rows that were padding
    finite: Array  # [] bool, whether the new server state is free of NaN and infinity
    ids: Array  # [M'] int32, the cohort from the largest client to the smallest, filled up with K for nobody
    info: Info  # [M', ...] the clients' own reports in that order


Round = Callable[..., tuple[State, Report]]
"""(key, state, data, ids=None) -> (state, report)."""


def init(algorithm: Algorithm, key: Array, data: FederatedData) -> State:
    """The state before the first round."""
    k_server, k_clients = jax.random.split(key)
    return join(algorithm, k_clients, algorithm.init(k_server, data), data.num_clients)


def join(algorithm: Algorithm, key: Array, server: Tree, num_clients: int) -> State:
    """A server state with the first client states of `algorithm`: how a stage takes over from training."""
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(num_clients))
    clients = jax.vmap(algorithm.init_client, in_axes=(0, None))(keys, server)
    # Donated states must own their buffers: the stage's server would otherwise share those of the state it came from.
    return State(jax.tree.map(jnp.array, server), clients)


def default_chunk(server: Tree) -> int:
    """How many clients to run side by side on this kind of device.

    On a CPU, one at a time keeps a model's working set in the cache, unless models are so small that the cost of a loop
    step shows (measured in `benchmarks/README.md`). Accelerators want lanes; how many is not measured yet.
    """
    floats = sum(leaf.size for leaf in jax.tree.leaves(server))
    if jax.default_backend() == 'cpu':
        return 8 if floats < 10_000 else 1
    return 32


def make_round(algorithm: Algorithm, *, cohort: int | None = None, chunk: int | None = None) -> Round:
    """Builds one round of `algorithm`: choose a cohort, run its clients, aggregate, update the server.

    The result is a pure function to be compiled once, `jit(make_round(...))`. Client i's randomness comes from the
    round's key folded with i, whoever else takes part. Clients that do not take part keep their state bit for bit.

    Args:
      algorithm: any `Algorithm`.
      cohort: clients a round, drawn uniformly without replacement; all of them by default. Ignored where the round is
        called with `ids`, an array of distinct client numbers.
      chunk: clients run side by side (vmapped); the chunks of a cohort follow each other. By default
        `default_chunk`. The cohort is sorted by size, and a chunk takes as many steps as its longest client.

    Raises:
      ValueError: when called, if the cohort is larger than the population, or the state is of another population; when
        built, if either number is below 1.
    """
    for name, value in (('cohort', cohort), ('chunk', chunk)):
        if value is not None and value < 1:
            raise ValueError(f'{name} must be at least 1, not {value}')

    def round(key: Array, state: State, data: FederatedData, ids: Array | None = None) -> tuple[State, Report]:
        pick, k_client, k_server = jax.random.split(key, 3)
        population = data.num_clients
        if any(u.shape[0] != population for u in jax.tree.leaves(state.clients)):
            held = jax.tree.leaves(state.clients)[0].shape[0]
            raise ValueError(f'the state has {held} clients and the data {population}: make it with init or join')
        ids = choose(pick, population, cohort) if ids is None else jnp.asarray(ids)
        lanes = min(chunk or default_chunk(state.server), len(ids))
        ids = ids[jnp.argsort(-data.size[ids])]  # clients of like size share a chunk
        ids = jnp.pad(ids, (0, -len(ids) % lanes), constant_values=population)  # nobody fills the last chunk

        def one(i: Array, client: Tree) -> tuple[Tree, Tree, Info]:
            return algorithm.client(jax.random.fold_in(k_client, i), state.server, client, data.shard(i))

        def run_chunk(clients: Tree, ids: Array, slots: Array) -> tuple[Tree, Tree, tuple[Info, Array]]:
            new, messages, info = lanes_of(one)(ids, tree.take(clients, ids))
            weights = jnp.where(ids < population, jnp.take(data.size, ids, mode='clip'), 0).astype(jnp.float32)
            partial = (algorithm.aggregate.partial(messages, weights, slots, cohort_size),
                       jnp.sum(weights), jnp.sum(jnp.sign(weights)))  # fmt: skip
            paid = lanes * jnp.max(info.slots).astype(jnp.float32)
            return tree.put(clients, ids, new), partial, (info, paid)

        def body(carry: Tree, chunk_ids: tuple[Array, Array]) -> tuple[Tree, Tree]:
            clients, total = carry
            clients, partial, out = run_chunk(clients, *chunk_ids)
            return (clients, tree.add(total, partial)), out

        cohort_size = len(ids)
        chunks = (ids.reshape(-1, lanes), jnp.arange(cohort_size).reshape(-1, lanes))
        empty = jax.eval_shape(lambda: run_chunk(state.clients, chunks[0][0], chunks[1][0])[1])
        total = jax.tree.map(lambda u: jnp.zeros(u.shape, u.dtype), empty)
        (clients, total), (info, paid) = jax.lax.scan(body, (state.clients, total), chunks)

        value, weight, live = total
        aggregate = Aggregate(algorithm.aggregate.finish(value), weight, live)
        server = algorithm.server(k_server, state.server, aggregate)
        info = jax.tree.map(lambda u: u.reshape(cohort_size, *u.shape[2:]), info)
        return State(server, clients), report(server, ids, info, jnp.sum(paid))

    return round


def choose(key: Array, population: int, cohort: int | None) -> Array:
    """The ids of a cohort: [M] int32, distinct."""
    if cohort is None or cohort == population:
        return jnp.arange(population)
    if cohort > population:
        raise ValueError(f'a cohort of {cohort} cannot be drawn from {population} clients')
    return jax.random.choice(key, population, (cohort,), replace=False)


def lanes_of(one: Callable[..., Any]) -> Callable[..., Any]:
    """vmap, except that a single lane is run as it is: convolutions stay ordinary ones."""

    def run(ids: Array, clients: Tree) -> Any:
        if len(ids) > 1:
            return jax.vmap(one)(ids, clients)
        out = one(ids[0], jax.tree.map(lambda u: u[0], clients))
        return jax.tree.map(lambda u: u[None], out)

    return run


def report(server: Tree, ids: Array, info: Info, paid: Array) -> Report:
    """Sums up the clients' reports. `paid` counts the batch rows that were computed."""
    examples = info.examples.astype(jnp.float32)
    visited = jnp.sum(examples)
    loss = jnp.sum(jnp.where(examples > 0, info.loss * examples, 0.0)) / jnp.maximum(visited, 1.0)
    padded = 1.0 - visited / jnp.maximum(paid, 1.0)
    floats = [u for u in jax.tree.leaves(server) if jnp.issubdtype(u.dtype, jnp.inexact)]
    finite = jnp.array([jnp.all(jnp.isfinite(u)) for u in floats], bool)
    return Report(loss, padded, jnp.all(finite), ids, info)


def several(round: Round) -> Round:
    """Several rounds in one call: `(keys [R], state, data) -> (state, reports [R, ...])`, equal to R calls."""

    def rounds(keys: Array, state: State, data: FederatedData) -> tuple[State, Report]:
        return jax.lax.scan(lambda state, key: round(key, state, data), state, keys)

    return rounds


def compiled(round: Round) -> Any:
    """`jit` of a round, or of `several`, with the state donated and the options that suit this device."""
    return jax.jit(round, donate_argnums=1, compiler_options=compiler_options())
