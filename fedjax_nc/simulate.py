"""The round: the one file that knows that there are many clients, and perhaps many devices.

Algorithms are written for one client. Here their work is vmapped over lanes, scanned over chunks of the cohort, spread
over the devices of a mesh, and summed as it comes, so that a whole round is one function to compile and memory is
bounded by the chunk.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedjax_nc import checks, devices, tree
from fedjax_nc.base import Aggregate, Algorithm, Array, FederatedData, Info, State, Tree
from fedjax_nc.data.host import Part, here
from fedjax_nc.models.convolution import compiler_options


class Report(NamedTuple):
    """What a person may look at after a round."""

    loss: Array  #: [] float32, mean local training loss over the examples visited by clients that are not broken
    padded_work: Array  #: [] float32, share of the computed batch rows that were padding
    balance: Array  #: [] float32, batch rows of the mean device over those of the busiest; 1 on a single device
    finite: Array  #: [] bool, whether the new server state is free of NaN and infinity
    ids: Array  #: [M'] int32, the cohort from the largest client to the smallest, filled up with K for nobody
    info: Info  #: fields [M'], the clients' own reports in that order
    broken: Array  #: [M'] bool, in that order: whether a client's message or loss is not finite, or its state is NaN


Round = Callable[..., tuple[State, Report]]
"""(key, state, data, ids=None) -> (state, report); `data` may be a `data.Part`, which names its cohort itself."""


def init(algorithm: Algorithm, key: Array, data: FederatedData) -> State:
    """The state before the first round.

    Args:
      algorithm: any `Algorithm`.
      key: draws first parameters and client states.
      data: the clients.

    Returns:
      The server's first state, and the clients' with leading axis K.

    Raises:
      ValueError: for what is no algorithm, key or data; others as the algorithm says.

    Example:
      >>> import jax
      >>> from fedjax_nc import heads, local, losses, models, objective, simulate, testing
      >>> from fedjax_nc.algorithms import fedavg
      >>> task = objective.objective(models.from_flax(models.MLP((16,))), heads.linear(), losses.cross_entropy)
      >>> algorithm = fedavg.algorithm(task, local.sgd(0.1), plan=local.Plan(batch_size=16, epochs=1))
      >>> state = simulate.init(algorithm, jax.random.key(0), testing.clients())
      >>> state.server.variables.params['head']['w'].shape
      (16, 5)
    """
    checks.algorithm(algorithm)
    checks.key('key', key)
    checks.kind('data', data, FederatedData)
    k_server, k_clients = jax.random.split(key)
    return join(algorithm, k_clients, algorithm.init(k_server, data), data.num_clients)


@functools.lru_cache(maxsize=8)
def compiled_init(algorithm: Algorithm) -> Callable[[Array, FederatedData], State]:
    """`init` of one algorithm as one program: it is many small ones otherwise, and each of them has to be compiled.

    Args:
      algorithm: one whose `init` and `init_client` can be traced.

    Returns:
      `(key, data) -> state`, equal to `init` up to rounding. What the algorithm says of bad values in the data is not
      said here.

    Example:
      >>> import jax
      >>> from fedjax_nc import heads, local, losses, models, objective, simulate, testing
      >>> from fedjax_nc.algorithms import fedavg
      >>> task = objective.objective(models.from_flax(models.MLP((16,))), heads.linear(), losses.cross_entropy)
      >>> algorithm = fedavg.algorithm(task, local.sgd(0.1), plan=local.Plan(batch_size=16, epochs=1))
      >>> state = simulate.compiled_init(algorithm)(jax.random.key(0), testing.clients())
      >>> state.server.variables.params['head']['w'].shape
      (16, 5)
    """
    # It runs once. At level 0 some that compute, as of FedLoGe's frame, would take three times as long.
    level = {'xla_backend_optimization_level': 1}
    return jax.jit(functools.partial(init, algorithm), compiler_options={**level, **compiler_options(once=True)})


def join(algorithm: Algorithm, key: Array, server: Tree, num_clients: int) -> State:
    """A server state with the first client states of `algorithm`: how a stage takes over from training.

    Args:
      algorithm: the stage, such as `finetune.algorithm(...)`.
      key: client i's first state is drawn from it folded with i.
      server: a server state as the stage takes it. It is copied: a round of the stage leaves the first one alone.
      num_clients: their number K.

    Returns:
      The state; that of the clients has the leading axis K.

    Raises:
      ValueError: for what is no algorithm, or without a client; others as the algorithm says.

    Example:
      >>> import jax
      >>> from fedjax_nc import heads, local, losses, models, objective, simulate, testing
      >>> from fedjax_nc.algorithms import fedavg, finetune
      >>> clients = testing.clients()
      >>> task = objective.objective(models.from_flax(models.MLP((16,))), heads.linear(), losses.cross_entropy)
      >>> trained = simulate.init(fedavg.algorithm(task, local.sgd(0.1)), jax.random.key(0), clients)  # and rounds
      >>> stage = finetune.algorithm(task, local.sgd(0.01))
      >>> state = simulate.join(stage, jax.random.key(1), trained.server, clients.num_clients)
      >>> state.clients.params['head']['w'].shape
      (8, 16, 5)
    """
    checks.algorithm(algorithm)
    checks.key('key', key)
    checks.whole('num_clients', num_clients)
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(num_clients))
    clients = jax.vmap(algorithm.init_client, in_axes=(0, None))(keys, server)
    # Donated states must own their buffers: the stage's server would otherwise share those of the state it came from.
    return State(jax.tree.map(jnp.array, server), clients)


def default_chunk(server: Tree, clients: int, platform: str | None = None) -> int:
    """How many of `clients` to run side by side on a device of this kind; at most all.

    On a CPU, one at a time keeps a model's working set in the cache, unless models are so small that the cost of a loop
    step shows, and on a GPU a few fill it (measured in `benchmarks/README.md`, on a GPU with ResNet-20). On a TPU one
    at a time keeps convolutions ordinary (compilers' estimates, same place; `tuning.fastest` measures). More lanes do
    more work for nobody where clients differ in size, because a chunk takes as long as its largest one, unless the
    `narrower` of a `local.Plan` lets it go on in fewer. Somewhat fewer are taken where that leaves none empty.

    Args:
      server: a server state; shapes will do.
      clients: those of a cohort.
      platform: 'cpu', 'tpu' or 'cuda'; by default that of the default backend. A round is traced before it is known
        where it will run: for another platform hand `make_round` the chunk for that.

    Returns:
      Lanes, from 1 to `clients`.
    """
    floats = sum(leaf.size for leaf in jax.tree.leaves(server))
    gpu = (32, 5 if clients % 4 else 4)
    small, large = {'cpu': (8, 1), 'tpu': (32, 1)}.get(platform or jax.default_backend(), gpu)
    return even(small if floats < 10_000 else large, clients)


def even(most: int, clients: int) -> int:
    """Lanes of which none is empty, or few are.

    Args:
      most: lanes to have at most.
      clients: those of a cohort.

    Returns:
      The largest number above the half of `most`, up to it, that divides `clients`; else as many as the fewest chunks
      have at least.
    """
    chunks = -(-clients // most)
    return next((n for n in range(min(most, clients), most // 2, -1) if clients % n == 0), -(-clients // chunks))


def make_round(
    algorithm: Algorithm, *, cohort: int | None = None, chunk: int | None = None, mesh: Mesh | None = None
) -> Round:
    """Builds one round of `algorithm`: choose a cohort, run its clients, aggregate, update the server.

    The result is a pure function to be compiled once, `compiled(make_round(...))`. Client i's randomness comes from the
    round's key folded with i, whoever else takes part. Clients that do not take part keep their state bit for bit.

    Args:
      algorithm: any `Algorithm`.
      cohort: clients a round, drawn uniformly without replacement; all of them by default. Ignored where the round is
        called with `ids`, an array of distinct client numbers; the number of clients stands for nobody. Under `jit`,
        where their values are not known, numbers out of range and repeated ones are nobody too.
      chunk: clients run side by side (vmapped) on a device; the chunks of a cohort follow each other. By default
        `default_chunk`. The cohort is sorted by size, and a chunk takes as many steps as its longest client.
      mesh: devices to share the cohort, from `devices.mesh`; state and data go there with `devices.place`. The result
        is that of one device up to the order of sums.

    Returns:
      `(key, state, data, ids=None) -> (state, report)`: the state after the round, and a `Report`.

    Raises:
      ValueError: when called, if the cohort is larger than the population, the state is of another population, or
        known `ids` are repeated or out of range; when built, if either number is below 1 or the mesh lacks the axis
        'clients'.

    Example:
      >>> import jax
      >>> from fedjax_nc import heads, local, losses, models, objective, simulate, testing
      >>> from fedjax_nc.algorithms import fedavg
      >>> clients = testing.clients()
      >>> task = objective.objective(models.from_flax(models.MLP((16,))), heads.linear(), losses.cross_entropy)
      >>> algorithm = fedavg.algorithm(task, local.sgd(0.1), plan=local.Plan(batch_size=16, epochs=1))
      >>> state = simulate.init(algorithm, jax.random.key(0), clients)
      >>> round = simulate.compiled(simulate.make_round(algorithm, cohort=3))
      >>> state, report = round(jax.random.key(1), state, clients)
      >>> int(state.server.round), report.ids.shape
      (1, (3,))
    """
    work = make_work(algorithm, chunk=chunk, mesh=mesh)
    if cohort is not None:
        cohort = checks.static('cohort', cohort)

    def round(key: Array, state: State, data: FederatedData | Part, ids: Array | None = None) -> tuple[State, Report]:
        checks.key('key', key)
        checks.kind('state', state, State)
        population = data.num_clients
        checks.stacked('state.clients', state.clients)
        checks.population(state.clients, population)
        if isinstance(data, Part):
            ids = brought(data, ids)
        else:
            checks.kind('data', data, FederatedData)
            ids = choose(cohort_key(key), population, cohort) if ids is None else named_cohort(ids, population)
            data = here(data)
        server, clients, report = work(key, state.server, state.clients, data, ids, ids)
        return State(server, clients), report

    return round


def make_work(algorithm: Algorithm, *, chunk: int | None = None, mesh: Mesh | None = None) -> Callable[..., Any]:
    """The round without the choice of its cohort, for any place in which client states are held.

    Returns `(key, server, held, data, ids [M], rows [M]) -> (server, held, report)`: the state of client `ids[j]` is
    row `rows[j]` of `held`. `make_round` holds the states of all clients; `population` hands over a cohort's. Of a
    `data.Part`, client `ids[j]` is number j. Arguments and errors are those of `make_round`: ValueError for an
    `algorithm`, `chunk` or `mesh` that is none.
    """
    checks.algorithm(algorithm)
    if chunk is not None:
        chunk = checks.static('chunk', chunk)
    if mesh is not None and getattr(mesh, 'axis_names', None) != (devices.AXIS,):
        raise ValueError(f"the mesh needs the one axis 'clients': make it with devices.mesh, not {mesh!r}")
    count = 1 if mesh is None else mesh.size

    def run(
        key: Array, server: Tree, held: Tree, data: FederatedData, ids: Array, at: Array, rows: Array, slots: Array
    ) -> Tree:
        """Runs chunks of clients [n, lanes] on one device, whose data are those of numbers `at`.

        `slots` are their places in the whole cohort.
        """

        def one(who: tuple[Array, Array], client: Tree) -> tuple[Tree, Tree, Info]:
            i, at = who
            out = algorithm.client(jax.random.fold_in(key, i), server, client, data.shard(at))
            return checks.worked(client, out)

        @functools.partial(jax.jit, inline=True)  # so that it is traced once for its shapes and for the loop
        def run_chunk(held: Tree, ids: Array, at: Array, rows: Array, slots: Array) -> tuple[Tree, Tree, Tree]:
            new, messages, info = tree.vmapped(one, (True, True))((ids, at), tree.take(held, rows))
            real = at < data.num_clients
            weights = jnp.where(real, jnp.take(data.size, at, mode='clip'), 0).astype(jnp.float32)
            # A state may hold infinity by design, as a smallest loss so far; what is NaN stays so.
            sound = tree.finite_rows((messages, info.loss)) & ~tree.nan_rows(new)
            broken = (weights > 0) & ~sound
            messages = tree.rows_where(weights > 0, messages, 0.0)  # nothing of nobody's, not even NaN
            with jax.named_scope('aggregate'):
                total = algorithm.aggregate.partial(messages, weights, slots, count * len(all_slots) * lanes)
            paid = jnp.float32(0)
            if not isinstance(info.lane_slots, tuple):
                paid += jnp.sum(info.lane_slots.astype(jnp.float32))
            if not isinstance(info.waits, tuple):  # in each of these loops clients wait for the longest
                paid += lanes * jnp.sum(jnp.max(info.waits, axis=0)).astype(jnp.float32)
            # Nobody's row lies beyond the end, and what is written there is dropped.
            summed = total, jnp.sum(weights), jnp.sum(jnp.sign(weights))
            return tree.put(held, rows, new), summed, (info, broken, paid)

        def body(carry: Tree, chunk: tuple[Array, ...]) -> tuple[Tree, Tree]:
            held, total = carry
            held, partial, out = run_chunk(held, *chunk)
            with jax.named_scope('aggregate'):
                return (held, tree.add(total, partial)), out

        all_slots, lanes = slots, slots.shape[1]
        empty = jax.eval_shape(lambda: run_chunk(held, ids[0], at[0], rows[0], slots[0])[1])
        total = jax.tree.map(lambda u: jnp.zeros(u.shape, u.dtype), empty)
        (held, total), (info, broken, paid) = jax.lax.scan(body, (held, total), (ids, at, rows, slots))
        return total, held, (info, broken), jnp.sum(paid)[None]

    def spread(key: Array, server: Tree, held: Tree, data: FederatedData, *cut: Array) -> Tree:
        """`run` on every device, each with its share of the chunks and their clients' states."""

        def share(
            key: Array, server: Tree, mine: Tree, data: FederatedData, ids: Array, at: Array, slots: Array
        ) -> Tree:
            rows = jnp.arange(ids.size).reshape(ids.shape)
            total, mine, told, paid = run(key, server, mine, data, ids, at, rows, slots)
            return jax.lax.psum(total, devices.AXIS), mine, told, paid

        ids, at, rows, slots = cut
        whole, split = devices.EVERYWHERE, devices.BY_CLIENT
        where, to = (whole, whole, split, whole, split, split, split), (whole, split, split, split)
        shared = jax.shard_map(share, mesh=mesh, in_specs=where, out_specs=to, check_vma=False)
        flat = rows.reshape(-1)
        total, mine, told, paid = shared(key, server, tree.take(held, flat), data, ids, at, slots)
        return total, tree.put(held, flat, mine), told, paid

    def work(
        key: Array, server: Tree, held: Tree, data: FederatedData | Part, ids: Array, rows: Array
    ) -> tuple[Tree, Tree, Report]:
        population, at = data.num_clients, ids
        if isinstance(data, Part):
            data, at = data.data, jnp.arange(len(ids))
        _, k_client, k_server = jax.random.split(key, 3)
        drawn = len(ids)
        share = -(-drawn // count)
        lanes = min(chunk, share) if chunk else default_chunk(server, share)
        order = jnp.argsort(-data.size.at[at].get(mode='fill', fill_value=0))  # like sizes share a chunk
        fill = -drawn % (lanes * count)
        ids = jnp.pad(ids[order], (0, fill), constant_values=population)  # nobody fills the last chunks
        at = jnp.pad(at[order], (0, fill), constant_values=data.num_clients)
        rows = jnp.pad(rows[order], (0, fill), constant_values=jnp.iinfo(rows.dtype).max)
        cut = [u.reshape(-1, lanes) for u in (ids, at, rows, jnp.arange(len(ids)))]
        if mesh is None:
            total, held, told, paid = run(k_client, server, held, data, *cut)
        else:
            sizes = data.size.at[cut[1]].get(mode='fill', fill_value=0)
            place = devices.balanced(jnp.max(sizes, axis=1), count)
            total, held, told, paid = spread(k_client, server, held, data, *(u[jnp.argsort(place)] for u in cut))
            told = jax.tree.map(lambda u: u[place], told)
        value, weight, live = total
        info, broken = jax.tree.map(lambda u: u.reshape(len(ids), *u.shape[2:]), told)
        with jax.named_scope('server'):
            aggregate = Aggregate(algorithm.aggregate.finish(value), weight, live, drawn)
            server = algorithm.server(k_server, server, aggregate)
        if mesh is not None:
            server, held = devices.settled(mesh, server, held)
        return server, held, _report(server, ids, info, broken, paid)

    def told(
        key: Array, server: Tree, held: Tree, data: FederatedData | Part, ids: Array, rows: Array
    ) -> tuple[Tree, Tree, Report]:
        with checks.fitting(algorithm, State(server, held), data.data if isinstance(data, Part) else data):
            return work(key, server, held, data, ids, rows)

    return told


def cohort_key(key: Array) -> Array:
    """The part of a round's `key` that chooses its cohort: a key, for `choose`."""
    return jax.random.split(key, 3)[0]


def choose(key: Array, population: int, cohort: int | None) -> Array:
    """The ids of a cohort: [M] int32, distinct. The time it takes does not grow with a large population.

    Args:
      key: draws them, as `cohort_key` makes it of a round's key.
      population: number of clients, K.
      cohort: M, drawn uniformly without replacement; None for everyone, in order.

    Raises:
      ValueError: for a cohort larger than the population, or of nobody.
    """
    if cohort is None:
        return jnp.arange(population)
    checks.whole('cohort', cohort)
    if cohort == population:
        return jnp.arange(population)
    if cohort > population:
        raise ValueError(f'a cohort of {cohort} cannot be drawn from {population} clients')
    if population <= max(4096, cohort**2 // 100):  # where shuffling everyone is the quicker way
        return jax.random.choice(key, population, (cohort,), replace=False)

    # Floyd's sampling (Bentley and Floyd, CACM 1987): entry j is a draw from [0, population - cohort + j], or that
    # bound itself if the draw has been taken before. It makes every set equally likely.
    bounds = population - cohort + jnp.arange(cohort)
    draws = jax.random.randint(key, (cohort,), 0, bounds + 1)

    def step(j: Array, ids: Array) -> Array:
        return ids.at[j].set(jnp.where(jnp.any(ids == draws[j]), bounds[j], draws[j]))

    return jax.lax.fori_loop(0, cohort, step, jnp.full(cohort, population, draws.dtype))


def brought(part: Part, ids: Array | None) -> Array:
    """The cohort that a `data.Part` brings along.

    Args:
      part: examples of a cohort.
      ids: None; a cohort that is named as well is refused.

    Returns:
      `part.ids`, [M] int32.

    Raises:
      ValueError: for other `ids`.
    """
    if ids is not None:
        raise ValueError('a data.Part brings its clients along: name none by ids')
    return part.ids


def named_cohort(ids: Array, population: int) -> Array:
    """A cohort that somebody names by `ids [M]`: [M] int32, with the size of the `population` for nobody.

    Numbers that cannot be looked at, because they are traced, become nobody where they are out of range or repeated: a
    client has one state, and two results for it would overwrite each other.

    Raises:
      ValueError: for what is no vector of integers, and for such numbers where they can be looked at.
    """
    if isinstance(ids, list | tuple) and any(map(checks.traced, ids)):
        ids = jnp.stack(ids)
    given = ids if checks.traced(ids) else np.asarray(ids)
    checks.rows('ids', given, 1)
    if not len(given):
        raise ValueError('ids are empty: name at least one client')
    if not jnp.issubdtype(given.dtype, jnp.integer):
        raise ValueError(f'ids must be integers, the numbers of clients, not {given.dtype}')
    if not checks.traced(ids):
        known, times = np.unique(given, return_counts=True)
        if len(known) and not 0 <= known[0] <= known[-1] <= population:
            raise ValueError(f'ids must lie in [0, {population}], and they go from {known[0]} to {known[-1]}')
        twice = known[(times > 1) & (known < population)]
        if len(twice):
            raise ValueError(f'ids must be distinct, and client {twice[0]} is there more than once')
        return jnp.asarray(given, jnp.int32)
    ids = checks.widened(ids)
    ids = jnp.where((ids < 0) | (ids > population), population, ids).astype(jnp.int32)
    order = jnp.argsort(ids)  # stable: the first of equals stays
    again = jnp.concatenate([jnp.zeros(1, bool), ids[order][1:] == ids[order][:-1]])[: len(ids)]
    return jnp.where(jnp.zeros_like(again).at[order].set(again), population, ids)


def participants(key: Array, rounds: Array | int, population: int, cohort: int | None) -> Array:
    """Who took part in any of a run's first rounds, of which round t had the key `fold_in(key, t)`: [K] bool.

    Personal models of the others are still what all began with, and no part of an average.

    Args:
      key: that of the run, as `training.run` takes it.
      rounds: how many of them; may be traced.
      population: number of clients, K.
      cohort: clients a round, None for all.

    Raises:
      ValueError: for a cohort larger than the population.
    """

    def join(t: Array, seen: Array) -> Array:
        return seen.at[choose(cohort_key(jax.random.fold_in(key, t)), population, cohort)].set(True)

    return jax.lax.fori_loop(0, rounds, join, jnp.zeros(population, bool))


def _report(server: Tree, ids: Array, info: Info, broken: Array, paid: Array) -> Report:
    """Sums up the clients' reports. `paid [devices]` counts the batch rows that were computed.

    The loss is that of clients which are not broken, and NaN if all are.
    """
    examples = info.examples.astype(jnp.float32)
    visited = jnp.sum(examples)
    sound = jnp.where(broken, 0.0, examples)
    loss = jnp.sum(jnp.where(sound > 0, info.loss * sound, 0.0)) / jnp.maximum(jnp.sum(sound), 1.0)
    loss = jnp.where(jnp.any(broken) & (jnp.sum(sound) == 0), jnp.nan, loss)
    padded = jnp.where(jnp.sum(paid) > 0, 1.0 - visited / jnp.maximum(jnp.sum(paid), 1.0), 0.0)
    balance = jnp.where(jnp.max(paid) > 0, jnp.mean(paid) / jnp.maximum(jnp.max(paid), 1.0), 1.0)
    return Report(loss, padded, balance, tree.finite(server), ids, info, broken)


def several(round: Round) -> Round:
    """Several rounds in one call: `(keys [R], state, data) -> (state, reports [R, ...])`, equal to R calls of `round`.

    Each draws its own cohort, by its key. To be compiled, as `compiled(several(make_round(...)))`. An algorithm whose
    server makes another kind of state of the one that it is given, as stages may, is refused (ValueError).
    """

    def rounds(keys: Array, state: State, data: FederatedData) -> tuple[State, Report]:
        def one(state: State, key: Array) -> tuple[State, Report]:
            new, report = round(key, state, data)
            return new._replace(server=checks.kept('`server`', state.server, new.server)), report

        return jax.lax.scan(one, state, keys)

    return rounds


def tuned(build: Callable[[Any], Round]) -> Callable[..., tuple[State, Report]]:
    """A round whose settings are arguments: `(key, state, data, settings, ids=None)`.

    `build(settings)` makes the round from settings of any structure, whose numbers may be traced: learning rates, mu,
    smoothing. Compiled once, `compiled(tuned(...))` serves all their values, and `vmap` over them is a sweep.

        run = compiled(tuned(lambda lr: make_round(fedavg.algorithm(task, local.sgd(lr)), cohort=10)))
        state, report = run(key, state, data, 0.05)
    """

    def round(
        key: Array, state: State, data: FederatedData, settings: Any, ids: Array | None = None
    ) -> tuple[State, Report]:
        return build(settings)(key, state, data, ids)

    return round


def compiled(round: Round, *, once: bool = False) -> Any:
    """`jit` of a round, or of `several`, with the state donated and the options that suit this device.

    Args:
      round: what is compiled.
      once: whether it is called but once, as a stage is, of a model that is not deep: see `models.compiler_options`.

    Returns:
      What takes and returns the same as `round`. A state that went in is used up: go on with the one that comes out.
    """
    return jax.jit(round, donate_argnums=1, compiler_options=compiler_options(once))
