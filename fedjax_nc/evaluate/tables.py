"""Tables of counts `[C, C]`, of the generic model on a test set and of each client's on its own; means of measures, and
features.

The functions that run a model compile themselves, once for each algorithm and shape.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_nc import checks, tree
from fedjax_nc.base import Algorithm, Array, Batch, FederatedData, Model, Objective, Shard, State, Tree, Variables
from fedjax_nc.data import arguments
from fedjax_nc.data.host import AT_ONCE, HostData, cohorts, part
from fedjax_nc.local import batch_at, full_batches, sweep

_LOWEST = float(np.finfo(np.float32).min)


def confusion(predict: Callable[[Array], Array], shard: Shard, batch_size: int = 256) -> Array:
    """Counts [C, C] int32 of `predict: x [B, ...] -> logits [B, C]` over the examples of one shard.

    An example one of whose logits is NaN counts as taken for the class after its own: a broken model is never right,
    unless there is but one class.

    Args:
      predict: the model.
      shard: one client's examples, or a test set.
      batch_size: examples at a time.

    Raises:
      ValueError: for logits or labels of other shapes, a `batch_size` below 1, or if the model and the data have other
        numbers of classes.
    """
    classes = shard.counts.shape[0]
    checks.labels('labels', shard.y, len(shard.x), classes)
    batch_size = checks.static('batch_size', batch_size)
    logits = jax.eval_shape(predict, shard.x[:1])
    checks.rows('logits', logits, length=1)
    width = logits.shape[-1]
    if width != classes:
        raise ValueError(
            f'the model tells {width} classes apart and the data have {classes}: give both the same number, '
            'as by `num_classes` of `data.federate`'
        )
    b = min(batch_size, shard.index.shape[0])
    rows = full_batches(shard.index, b)

    def step(s: Array, table: Array) -> Array:
        batch = batch_at(s, rows, shard, b)
        logits = predict(batch.x)
        broken = jnp.isnan(logits).any(-1)  # of which `argmax` would name the first
        y = checks.widened(batch.y)
        guess = jnp.where(broken, (y + 1) % classes, jnp.argmax(logits, axis=-1))
        return table.at[y, guess].add(batch.mask.astype(jnp.int32))

    return jax.lax.fori_loop(0, -(-shard.size // b), step, jnp.zeros((classes, classes), jnp.int32))


def generic(algorithm: Algorithm, state: State, x: Array, y: Array, num_classes: int, batch_size: int = 256) -> Array:
    """Counts [C, C] int32 of the generic model on a test set.

    A large set in a NumPy array, which may be mapped from a file, goes to the device in pieces.

    Args:
      algorithm: what predicts.
      state: its state.
      x: [n, ...].
      y: [n] int in [0, C).
      num_classes: their number C.
      batch_size: examples at a time.

    Returns:
      [C, C] int32: row = true class, column = predicted class.

    Raises:
      ValueError: if the set is empty, its shapes do not fit, a label is not in [0, C), an example is not finite, the
        model has another number of classes, the state is of another algorithm, or `algorithm` is none.

    Example:
      >>> import jax
      >>> from fedjax_nc import evaluate, heads, local, losses, models, objective, simulate, testing
      >>> from fedjax_nc.algorithms import fedavg
      >>> clients = testing.clients()
      >>> task = objective.objective(models.from_flax(models.MLP((16,))), heads.linear(), losses.cross_entropy)
      >>> algorithm = fedavg.algorithm(task, local.sgd(0.1))
      >>> state = simulate.init(algorithm, jax.random.key(0), clients)
      >>> table = evaluate.generic(algorithm, state, clients.x, clients.y, num_classes=5)
      >>> table.shape, int(table.sum())
      ((5, 5), 600)
    """
    checks.kind('algorithm', algorithm, Algorithm)
    checks.kind('state', state, State)
    num_classes = checks.static('num_classes', num_classes)
    batch_size = checks.static('batch_size', batch_size)
    arguments.pixels('x', x)
    with _predicting():
        return sum(
            _generic(algorithm, state.server, *piece, num_classes, batch_size) for piece in _pieces(x, y, num_classes)
        )


def mean(
    algorithm: Algorithm,
    state: State,
    measure: Callable[[Array, Array], Array],
    x: Array,
    y: Array,
    batch_size: int = 256,
) -> Array:
    """Mean over a test set of a measure of the generic model's logits: its loss, or how often `among` the first five.

    Args:
      algorithm: what predicts.
      state: its state.
      measure: `(logits [B, C], labels [B]) -> [B]`, such as `losses.cross_entropy`; compiled once for each function, so
        hand over the same one again, not a new `lambda` each time.
      x: [n, ...]; a large set in a NumPy array goes to the device in pieces.
      y: [n] int in [0, C).
      batch_size: examples at a time.

    Returns:
      [] float32; NaN where the model says NaN of an example, as the measure may be.

    Raises:
      ValueError: as `generic`, or if `measure` is no function of logits and labels, or does not give a number for each
        example.

    Example:
      >>> import jax
      >>> from fedjax_nc import evaluate, heads, local, losses, models, objective, simulate, testing
      >>> from fedjax_nc.algorithms import fedavg
      >>> clients = testing.clients()
      >>> task = objective.objective(models.from_flax(models.MLP((16,))), heads.linear(), losses.cross_entropy)
      >>> algorithm = fedavg.algorithm(task, local.sgd(0.1))
      >>> state = simulate.init(algorithm, jax.random.key(0), clients)
      >>> loss = evaluate.mean(algorithm, state, losses.cross_entropy, clients.x, clients.y)
      >>> float(evaluate.mean(algorithm, state, evaluate.among(5), clients.x, clients.y))  # of five classes
      1.0
    """
    checks.kind('algorithm', algorithm, Algorithm)
    checks.kind('state', state, State)
    checks.called('measure', measure, 'logits, labels', '`losses.cross_entropy` is')
    batch_size = checks.static('batch_size', batch_size)
    _filled(x)
    arguments.pixels('x', x)
    with _predicting():
        one = jax.eval_shape(lambda: algorithm.predict(state.server, None, arguments.on_device('test examples', x[:1])))
        checks.rows('logits', one, length=1)
        pieces = _pieces(x, y, one.shape[-1])
        return sum(_measured(algorithm, state.server, measure, *piece, batch_size) for piece in pieces) / len(y)


def features(task: Objective | Model, variables: Variables, x: Array, batch_size: int = 256) -> Array:
    """Features of a test set, in batches, as a model computes them when it predicts.

    Args:
      task: an objective, or a model alone.
      variables: its variables, such as `state.server.variables`.
      x: [n, ...]; a large set in a NumPy array goes to the device in pieces.
      batch_size: examples at a time.

    Returns:
      [n, D] float32.

    Raises:
      ValueError: for a `task` that is neither, or as `generic`.

    Example:
      >>> import jax
      >>> from fedjax_nc import evaluate, heads, losses, metrics, models, objective, testing
      >>> clients = testing.clients()
      >>> task = objective.objective(models.from_flax(models.MLP((16,))), heads.linear(), losses.cross_entropy)
      >>> z = evaluate.features(task, task.init(jax.random.key(0), clients), clients.x)
      >>> z.shape[1], metrics.collapse.nc1(z, clients.y, clients.num_classes).shape
      (16, ())
    """
    if not isinstance(task, Model):
        checks.kind('task', task, Objective)
    checks.kind('variables', variables, Variables)
    batch_size = checks.static('batch_size', batch_size)
    _filled(x)
    arguments.pixels('x', x)
    with _predicting():
        pieces = [_features(task, variables, u, batch_size) for u, _ in _pieces(x, jnp.zeros(len(x), jnp.int32), None)]
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)


def among(k: int) -> Callable[[Array, Array], Array]:
    """The measure whether the true class is among the `k` with the largest logits, 1.0 or 0.0: top-k accuracy.

    Of equal logits those of the lower classes come first, as for `argmax`; a NaN among an example's is a 0.

    Raises:
      ValueError: if `k` is no whole number of at least 1.
    """
    return _among(checks.static('k', k))


@functools.cache
def _among(k: int) -> Callable[[Array, Array], Array]:
    """The same function for the same `k`, so that what it is compiled into is found again."""

    def measure(logits: Array, labels: Array) -> Array:
        true = jnp.take_along_axis(logits, labels[:, None], axis=1)
        first = jnp.arange(logits.shape[1]) < labels[:, None]
        before = jnp.sum((logits > true) | ((logits == true) & first), axis=1)
        return jnp.where(jnp.isnan(logits).any(1), 0.0, before < k).astype(jnp.float32)

    return measure


def _filled(x: Array) -> None:
    if np.ndim(x) == 0 or len(x) == 0:
        raise ValueError(f'a test set needs examples [n, ...], not the shape {np.shape(x)}')


def _pieces(x: Array, y: Array, num_classes: int | None) -> Iterator[tuple[Array, Array]]:
    """A test set on the device, a large one in pieces. Raises ValueError for what is none."""
    _filled(x)
    checks.labels('test labels', y, len(x), num_classes)  # before those of 64 bits lose half of them
    large = isinstance(x, np.ndarray) and x.nbytes > AT_ONCE
    rows = max(1, AT_ONCE // x[:1].nbytes) if large else len(x)
    for i in range(0, len(x), rows):
        some = (x[i : i + rows], y[i : i + rows]) if large else (x, y)
        yield arguments.on_device('test examples', some[0]), jnp.asarray(some[1], jnp.int32)


@contextlib.contextmanager
def _predicting() -> Iterator[None]:
    """Raises ValueError where a prediction looks for what the state does not have."""
    try:
        yield
    except (KeyError, AttributeError) as error:
        raise ValueError(
            'the algorithm cannot predict from this state, which may be of another, or its `predict` is at fault '
            f'({type(error).__name__}: {error})'
        ) from error


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def _generic(algorithm: Algorithm, server: Tree, x: Array, y: Array, num_classes: int, batch_size: int) -> Array:
    shard = Shard(x, y, jnp.arange(len(y)), jnp.int32(len(y)), jnp.zeros(num_classes, jnp.int32))
    return confusion(lambda x: algorithm.predict(server, None, x), shard, batch_size)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _features(task: Objective | Model, v: Variables, x: Array, batch_size: int) -> Array:
    n = len(x)
    shard = Shard(x, jnp.zeros(n, jnp.int32), jnp.arange(n), jnp.int32(n), jnp.zeros(0, jnp.int32))

    def seen(batch: Batch) -> Array:
        if isinstance(task, Model):
            return task.features(v.params['body'], v.stats, batch.x, None, None)[0]
        return task.features(v, Batch(batch.x))[0]

    return sweep(seen, shard, batch_size)


@functools.partial(jax.jit, static_argnums=(0, 2, 5))
def _measured(
    algorithm: Algorithm, server: Tree, measure: Callable[[Array, Array], Array], x: Array, y: Array, batch_size: int
) -> Array:
    b, n = min(batch_size, len(y)), len(y)
    rows = full_batches(jnp.arange(n), b)
    shard = Shard(x, y, rows, jnp.int32(n), jnp.zeros(0, jnp.int32))

    def step(s: Array, total: Array) -> Array:
        batch = batch_at(s, rows, shard, b)
        logits = algorithm.predict(server, None, batch.x)
        values = measure(logits, checks.widened(batch.y))
        if jnp.shape(values) != (b,):
            raise ValueError(
                f'`measure` must give a number for each of {b} examples, not the shape {jnp.shape(values)}'
            )
        return total + jnp.sum(jnp.where(batch.mask, values, 0.0), dtype=jnp.float32)

    return jax.lax.fori_loop(0, -(-n // b), step, jnp.float32(0))


def per_client(
    algorithm: Algorithm,
    state: State,
    data: FederatedData,
    *,
    personal: bool = True,
    allowed: Array | None = None,
    batch_size: int = 256,
) -> Array:
    """Counts [K, C, C] of each client's model on its own rows of `data`, such as its local test split.

    Args:
      algorithm: what predicts.
      state: its state.
      data: as many clients as the state has; a client without examples gets a table of zeros. Of `data.HostData` some
        clients' examples travel at a time.
      personal: whether clients use their own models or all the generic one.
      allowed: [K, C], which classes a client may predict at all, such as `train.counts > 0`; every one by default, and
        for a client whose row allows none.
      batch_size: examples at a time.

    Returns:
      [K, C, C] int32, a table for each client.

    Raises:
      ValueError: if the model and the data have other numbers of classes, the state and the data of clients, `allowed`
        has another shape, the state is of another algorithm, or for what is no algorithm, no data or a state that is
        kept off the devices.

    Example:
      >>> import jax
      >>> from fedjax_nc import evaluate, heads, local, losses, models, objective, simulate, testing
      >>> from fedjax_nc.algorithms import solo
      >>> clients = testing.clients()
      >>> task = objective.objective(models.from_flax(models.MLP((16,))), heads.linear(), losses.cross_entropy)
      >>> algorithm = solo.algorithm(task, local.sgd(0.1))
      >>> state = simulate.init(algorithm, jax.random.key(0), clients)
      >>> tables = evaluate.per_client(algorithm, state, clients)
      >>> tables.sum(axis=(1, 2)).tolist() == clients.size.tolist()
      True
    """
    checks.kind('algorithm', algorithm, Algorithm)
    checks.kind('state', state, State)
    checks.kind('data', data, FederatedData)
    allowed = None if allowed is None else jnp.asarray(allowed)
    if allowed is not None and allowed.shape[1:] != (data.num_classes,):
        raise ValueError(f'`allowed` must be [K, C] for {data.num_classes} classes, not {np.shape(allowed)}')
    checks.stacked('state.clients', state.clients)
    batch_size = checks.static('batch_size', batch_size)
    checks.flags(personal=personal)
    personal = bool(personal)
    for what, found in (('the state has', state.clients), ('`allowed` has rows for', allowed)):
        sizes = {len(u) for u in jax.tree.leaves(found)} - {data.num_clients}
        if sizes:
            raise ValueError(f'{what} {sizes.pop()} clients, and the data have {data.num_clients}')

    if not isinstance(data, HostData) or checks.traced(data.size):
        with _predicting():
            return _per_client(algorithm, state, data, allowed, personal, batch_size)
    tables = []
    for ids in cohorts(data):
        some = State(state.server, tree.take(state.clients, jnp.asarray(ids)))
        known = None if allowed is None else tree.take(allowed, jnp.asarray(ids))
        with _predicting():
            found = _per_client(algorithm, some, part(data, ids).data, known, personal, batch_size)
        tables.append(found[: np.sum(ids < data.num_clients)])
    return jnp.concatenate(tables)


def _keeps(algorithm: Algorithm, server: Tree) -> bool:
    """Whether its clients keep anything; so they do where it says only how to take over what another has made."""
    try:
        own = jax.eval_shape(algorithm.init_client, jax.eval_shape(lambda: jax.random.key(0)), server)
    except ValueError:
        return True
    return bool(jax.tree.leaves(own))


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def _per_client(
    algorithm: Algorithm, state: State, data: FederatedData, allowed: Array | None, personal: bool, batch_size: int
) -> Array:
    if personal and _keeps(algorithm, state.server) is not bool(jax.tree.leaves(state.clients)):
        raise ValueError(
            'the clients of the state are of another algorithm: give the one that they are of, such as the stage that '
            'has made them personal'
        )

    def one(args: tuple[Array, Array, Array | None]) -> Array:
        i, client, known = args

        def predict(x: Array) -> Array:
            logits = algorithm.predict(state.server, client if personal else None, x)
            if known is None:
                return logits
            may = known != 0
            broken = jnp.isnan(logits).any(-1, keepdims=True)  # whatever the classes of which it says NaN
            allowed = may | ~jnp.any(may)  # who may predict nothing is not restricted
            return jnp.where(broken, jnp.nan, jnp.where(allowed, jnp.maximum(logits, _LOWEST), -jnp.inf))

        return confusion(predict, data.shard(i), batch_size)

    return jax.lax.map(one, (jnp.arange(data.num_clients), state.clients, allowed))
