"""Evaluation: count once which class was taken for which; every reported accuracy is a weighting of the counts.

A table of counts is `[C, C]`: row = true class, column = predicted class; what a model with NaN says counts as wrong.
What a table does not hold, such as the loss, is the `mean` of a measure. The functions that run a model compile
themselves, once for each algorithm and shape.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_nc import checks, tree
from fedjax_nc.base import Algorithm, Array, FederatedData, Shard, State, Tree
from fedjax_nc.data import arguments
from fedjax_nc.data.host import AT_ONCE, HostData, cohorts, part
from fedjax_nc.local import batch_at, full_batches


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


@functools.cache
def among(k: int) -> Callable[[Array, Array], Array]:
    """The measure whether the true class is among the `k` with the largest logits, 1.0 or 0.0: top-k accuracy.

    Of equal logits those of the lower classes come first, as for `argmax`; a NaN among an example's is a 0.

    Raises:
      ValueError: if `k` is no whole number of at least 1.
    """
    checks.whole('k', k)

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


_LOWEST = float(np.finfo(np.float32).min)


def _square(counts: Array) -> Array:
    """Tables `[..., C, C]`, nested lists too. Raises ValueError, as all that reads them does, for another shape."""
    counts = jnp.asarray(counts)
    if jnp.issubdtype(counts.dtype, jnp.floating):
        counts = counts.astype(jnp.float32)  # in 16 bits their sums overflow
    shape = counts.shape
    if len(shape) < 2 or shape[-1] != shape[-2]:
        raise ValueError(f'a table of counts has the shape [..., C, C], not {shape}: see generic and per_client')
    return counts


def _some(total: Array) -> Array:
    """What to divide by, float32: tables may hold shares, too."""
    return jnp.where(total > 0, total, 1).astype(jnp.float32)


@jax.jit
def accuracy(counts: Array) -> Array:
    """Share of correct predictions of tables, `[..., C, C] -> [...]` float32; 0 for an empty table.

    Raises:
      ValueError: as all that reads tables, for another shape.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_nc import evaluate
      >>> float(evaluate.accuracy(jnp.array([[3, 1], [0, 4]])))
      0.875
    """
    counts = _square(counts)
    total = jnp.sum(counts, axis=(-2, -1))
    return jnp.trace(counts, axis1=-2, axis2=-1) / _some(total)


@jax.jit
def class_accuracy(counts: Array) -> Array:
    """Accuracy of each true class, `[..., C, C] -> [..., C]` float32; 0 for a class without examples.

    Raises ValueError for another shape.
    """
    counts = _square(counts)
    total = jnp.sum(counts, axis=-1)
    return jnp.diagonal(counts, axis1=-2, axis2=-1) / _some(total)


@jax.jit
def weighted_accuracy(counts: Array, weights: Array) -> Array:
    """Class accuracies weighted by `weights [..., C]` over the classes that the table holds: `[..., C, C] -> [...]`.

    With `data.class_weights` these are the personalised accuracies PM(V) and PM(L) of FedNH (Dai et al., AAAI 2023) on
    their balanced test set. On an unbalanced one classes still count by their weights alone, as in FedLoGe.

    Args:
      counts: tables [..., C, C].
      weights: at least 0, of any sum; one table may have several, and several tables one.

    Returns:
      [...] float32; 0 where no class that the table holds has a weight.

    Raises:
      ValueError: for shapes that do not go together.
    """
    counts = _square(counts)
    weights = jnp.asarray(weights)
    _by_class('weights', weights, counts)
    weights = jnp.where(jnp.sum(counts, axis=-1) > 0, weights, 0.0)
    total = jnp.sum(weights, axis=-1)
    return jnp.sum(weights * class_accuracy(counts), axis=-1) / jnp.where(total > 0, total, 1.0)


def _by_class(name: str, values: Array, counts: Array) -> None:
    """Raises ValueError for values `[..., C]` that do not go with the classes of tables `[..., C, C]`."""
    shape, tables = np.shape(values), np.shape(counts)[:-1]
    with contextlib.suppress(ValueError):
        np.broadcast_shapes(shape, tables)
        if shape and shape[-1] == tables[-1]:
            return
    raise ValueError(
        f'{name} {shape} do not go with tables {np.shape(counts)}: the shapes need one entry for each class'
    )


@jax.jit
def groups(counts: Array) -> Array:
    """Whether a class has many (0), medium (1) or few (2) training examples: `[..., C] -> [..., C]` int32.

    From the largest class down, 'many' are those up to the one with which three quarters of the examples are reached,
    'medium' those up to 95 %, as in FedLoGe (Xiao et al., ICLR 2024). `counts [K, C]` are grouped row by row; they may
    be shares.
    """
    counts = jnp.asarray(counts)
    whole = jnp.issubdtype(counts.dtype, jnp.integer)
    if whole:
        counts = counts.astype(jnp.int32)  # unsigned ones would wrap below zero, small ones beyond their largest
    order = jnp.argsort(-counts, axis=-1)
    ordered = jnp.take_along_axis(counts, order, axis=-1)
    before = jnp.cumsum(ordered, axis=-1) - ordered
    total = jnp.sum(counts, axis=-1, keepdims=True)
    # Of integers 4 times the total may overflow, and sums of floats are rounded.
    ends = (total - total // n if whole else (1 - 1 / n - 1e-6) * total for n in (4, 20))
    group = sum((before >= end).astype(jnp.int32) for end in ends)
    return jnp.take_along_axis(group, jnp.argsort(order, axis=-1), axis=-1)


def by_group(values: Array, groups: Array) -> Array:
    """Sums `values [..., C]` over the classes of each of `groups [..., C]`: many, medium, few, `[..., 3]`."""
    return jnp.sum(values[..., None] * jax.nn.one_hot(groups, 3, dtype=values.dtype), axis=-2)


@jax.jit
def group_accuracy(counts: Array, groups: Array) -> Array:
    """Accuracy of tables `counts [..., C, C]` over the test examples of each group: `[..., 3]` float32, 0 without any.

    Accuracies of clients by their own groups are to be averaged over those that have any, with
    `over(group_accuracy(tables, g), by_group(tables.sum(-1), g) > 0)`.

    Args:
      counts: tables.
      groups: [..., C], as the function `groups` makes them of counts of training examples.

    Raises:
      ValueError: for shapes that do not go together.
    """
    counts = _square(counts)
    groups = jnp.asarray(groups)
    _by_class('groups', groups, counts)
    hits = by_group(jnp.diagonal(counts, axis1=-2, axis2=-1), groups)
    return hits / _some(by_group(jnp.sum(counts, axis=-1), groups))


@jax.jit
def class_f1(counts: Array) -> Array:
    """F1 score of each class, `[..., C, C] -> [..., C]` float32: `2 hits / (examples + predictions)`; 0 without either.

    Raises ValueError for another shape.
    """
    counts = _square(counts)
    met = jnp.sum(counts, axis=-1) + jnp.sum(counts, axis=-2)
    return 2.0 * jnp.diagonal(counts, axis1=-2, axis2=-1) / _some(met)


@jax.jit
def macro_f1(counts: Array) -> Array:
    """Mean F1 score over the classes that a table holds or predicts: `[..., C, C] -> [...]` float32; 0 if it is empty.

    Raises ValueError for another shape.
    """
    counts = _square(counts)
    met = jnp.sum(counts, axis=-1) + jnp.sum(counts, axis=-2) > 0
    return jnp.sum(class_f1(counts), axis=-1) / jnp.maximum(jnp.sum(met, axis=-1), 1)


@jax.jit
def weighted_f1(counts: Array) -> Array:
    """Mean F1 score weighted by the examples of each true class: `[..., C, C] -> [...]` float32; 0 if there are none.

    Raises ValueError for another shape.
    """
    counts = _square(counts)
    support = jnp.sum(counts, axis=-1)
    return jnp.sum(support * class_f1(counts), axis=-1) / _some(jnp.sum(support, axis=-1))


class Over(NamedTuple):
    """Mean and standard deviation of a number over the clients that count."""

    mean: Array  #: [...] float32
    std: Array  #: [...] float32, of the population


@jax.jit
def over(values: Array, weight: Array) -> Over:
    """Sums up `values [K, ...]` over clients; those of weight 0 or below, or False, are left out, whatever their value.

    Args:
      values: one number for each client, or several.
      weight: as `values` or [K], such as `data.size`, or whether a client counts.

    Returns:
      Mean and standard deviation, of the shape of one client's values; 0 where nobody counts.

    Raises:
      ValueError: for weights of another shape.
    """
    values, weight = jnp.asarray(values), jnp.asarray(weight)
    if weight.ndim == 0 or weight.shape != values.shape[: weight.ndim]:
        raise ValueError(f'weights {weight.shape} do not fit values {values.shape}: give one for each client')
    weight = jnp.maximum(jnp.expand_dims(weight, range(weight.ndim, values.ndim)).astype(jnp.float32), 0.0)
    share = weight / jnp.maximum(jnp.sum(weight, axis=0), jnp.finfo(jnp.float32).tiny)
    values = jnp.where(weight > 0, values, 0.0)
    mean = jnp.sum(share * values, axis=0)
    return Over(mean, jnp.sqrt(jnp.sum(share * jnp.square(values - mean), axis=0)))


class OverClients(NamedTuple):
    """Accuracies of a population; clients without test examples are left out."""

    mean: Array  #: [] float32
    std: Array  #: [] float32, population standard deviation
    pooled: Array  #: [] float32, weighted by numbers of test examples
    low: Array  #: [] float32, 10th percentile


@jax.jit
def over_clients(counts: Array) -> OverClients:
    """Accuracies over a population, of tables `counts [K, C, C]` with one for each client.

    Without any test example `low` is NaN and the others are 0.

    Raises:
      ValueError: for another shape, or no table at all.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_nc import evaluate
      >>> tables = jnp.array([[[4, 0], [0, 0]], [[1, 1], [0, 0]], [[0, 0], [0, 0]]])
      >>> [round(float(u), 3) for u in evaluate.over_clients(tables)]  # mean, std, pooled, low
      [0.75, 0.25, 0.833, 0.55]
    """
    counts = _square(counts)
    checks.rows('tables', counts, 3)
    if not len(counts):
        raise ValueError('there is no client: give a table [C, C] of each')
    tested = jnp.sum(counts, axis=(-2, -1)) > 0
    values = accuracy(counts)
    low = jnp.nanpercentile(jnp.where(tested, values, jnp.nan), 10)
    mean, std = over(values, tested)
    # Floats, because examples of all clients together may be more than integers of 32 bits can count.
    hits, total = (
        jnp.sum(u.astype(jnp.float32)) for u in (jnp.trace(counts, axis1=-2, axis2=-1), jnp.sum(counts, (1, 2)))
    )
    return OverClients(mean, std, hits / _some(total), low)
