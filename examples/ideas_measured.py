"""What the pictures of docs/ideas.md show: computed, and told in numbers."""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_nc import data, evaluate, heads, local, losses, models, simulate
from fedjax_nc.algorithms import ccvr, fedavg, fedetf, fedetf_gmv, fedloge, fednh, latest
from fedjax_nc.base import Algorithm, Array, Batch, FederatedData, Objective, State, Variables
from fedjax_nc.frames import normalize
from fedjax_nc.metrics import collapse, similarity
from fedjax_nc.models import layers
from fedjax_nc.objective import objective

KEY = jax.random.key(0)
TRIO = (3, 8, 9)  # digits that are easily confused
FIVE = (0, 3, 4, 8, 9)


class Setting(NamedTuple):
    """How much is computed."""

    few: int = 8  # clients of three digits
    many: int = 20  # clients of all ten, of which a quarter takes part in a round
    epochs: int = 10  # of local training
    partitions: int = 10  # of which mean cosines are told
    passes: int = 300  # over all of three digits, to collapse
    rounds: int = 30  # of the longest training


QUICK = Setting(few=4, many=8, epochs=2, partitions=2, passes=3, rounds=2)
ALPHA = 0.1


class Plane(nn.Module):
    """A hidden layer, and features of two dimensions that may have any sign."""

    hidden: int = 64

    @nn.compact
    def __call__(self, x: Array, *, mask: Array | None = None, train: bool = False) -> Array:
        return layers.dense(2, self.hidden, jnp.float32)(models.MLP((self.hidden,))(x))


PLANE, WIDE = models.from_flax(Plane()), models.MLP((64, 64))
NARROW = objective(models.from_flax(Plane(32)), heads.linear(bias=False), losses.cross_entropy)
FLAT = objective(PLANE, heads.linear(bias=False), losses.cross_entropy)  # class vectors [2, C]
TALL = objective(models.from_flax(WIDE), heads.linear(), losses.cross_entropy)
LAYERS = {'Dense_0': 'first layer', 'Dense_1': 'second layer', 'logits': 'classifier'}


class Digits(NamedTuple):
    """Some classes of the digits, numbered from 0."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


@functools.cache
def digits(classes: tuple[int, ...] = tuple(range(10))) -> Digits:
    every = data.load_dataset('digits')
    train, test = (np.isin(y, classes) for y in (every.y_train, every.y_test))
    y, y_test = (np.searchsorted(classes, u).astype(np.int32) for u in (every.y_train[train], every.y_test[test]))
    return Digits(every.x_train[train], y, every.x_test[test], y_test)


def dealt(held: Digits, parts: list[np.ndarray]) -> FederatedData:
    """In tables of one width, so that all that is dealt of these digits is served by one compiled program."""
    return data.federate(held.x, held.y, parts, width=len(held.y))


@functools.cache
def round_of(algorithm: Algorithm, cohort: int | None = None) -> simulate.Round:
    return jax.jit(simulate.make_round(algorithm, cohort=cohort))


def trained(algorithm: Algorithm, clients: FederatedData, rounds: int, cohort: int | None = None) -> list[State]:
    """The states after each of some rounds, beginning with the first."""
    states = [simulate.init(algorithm, KEY, clients)]
    for t in range(rounds):
        states.append(round_of(algorithm, cohort)(jax.random.fold_in(KEY, t), states[-1], clients)[0])
    return states


def accuracy(algorithm: Algorithm, state: State, held: Digits) -> float:
    return float(evaluate.accuracy(evaluate.generic(algorithm, state, held.x_test, held.y_test, int(held.y.max()) + 1)))


class Drift(NamedTuple):
    """Class vectors in the plane before and after one local training of each client."""

    received: np.ndarray  # [C, 2]
    even: np.ndarray  # [K, C, 2]
    uneven: np.ndarray  # [K, C, 2]
    held: np.ndarray  # [K, C] bool, which classes uneven clients hold
    cosines: dict[str, np.ndarray]  # mean over pairs of clients, of each of several partitions; the first is drawn


def drift(setting: Setting) -> Drift:
    trio, few = digits(TRIO), setting.few
    algorithm = latest.keep(fedavg.algorithm(NARROW, local.sgd(0.05), plan=local.Plan(16, setting.epochs)))
    start = simulate.init(algorithm, jax.random.key(3), dealt(trio, data.iid(trio.y, few, seed=0)))

    def rows(v: Variables) -> np.ndarray:
        return np.asarray(jnp.swapaxes(v.params['head']['w'], -1, -2))

    def ends(clients: FederatedData) -> np.ndarray:
        return rows(round_of(algorithm)(KEY, start, clients)[0].clients.variables)

    seeds = range(2, 2 + setting.partitions)
    even = [dealt(trio, data.iid(trio.y, few, seed=seed)) for seed in seeds]
    uneven = [dealt(trio, data.dirichlet(trio.y, few, ALPHA, seed=seed)) for seed in seeds]
    vectors = {'even': [ends(clients) for clients in even], 'uneven': [ends(clients) for clients in uneven]}
    cosines = {name: np.array([*map(similarity.mean_pairwise_cosine, every)]) for name, every in vectors.items()}
    held = np.asarray(uneven[0].counts > 0)
    return Drift(rows(start.server.variables), vectors['even'][0], vectors['uneven'][0], held, cosines)


class Agreement(NamedTuple):
    """How alike the models of clients are that were trained from one start."""

    cosines: dict[str, np.ndarray]  # between classifiers [K, K]
    layers: dict[str, np.ndarray]  # CKA on test images, mean over pairs of clients, of each of LAYERS


@functools.partial(jax.jit, static_argnums=0)
def alike(task: Objective, own: Variables, x: Array) -> Array:
    outputs = jax.vmap(lambda v: similarity.layer_outputs(WIDE, v.params['body'], v.stats, x))(own)
    outputs['logits'] = jax.vmap(task.logits)(own, outputs['features'])
    return jnp.stack([similarity.mean_over_pairs(similarity.cka_matrix(outputs[layer])) for layer in LAYERS])


def agreement(setting: Setting) -> Agreement:
    ten, plan = digits(), local.Plan(16, setting.epochs)
    algorithm = latest.keep(fedavg.algorithm(TALL, local.sgd(0.02), plan=plan))
    parts = {
        'dealt evenly': data.iid(ten.y, setting.many, seed=0),
        f'Dirichlet({ALPHA})': data.dirichlet(ten.y, setting.many, ALPHA, seed=0),
    }
    cosines, by_layer = {}, {}
    for name, some in parts.items():
        own = trained(algorithm, dealt(ten, some), 1)[-1].clients.variables
        w = own.params['head']['w']
        cosines[name] = np.asarray(similarity.pairwise_cosine(w.reshape(len(w), -1)))
        by_layer[name] = np.asarray(alike(TALL, own, jnp.asarray(ten.x_test)))
    return Agreement(cosines, by_layer)


class Collapse(NamedTuple):
    """All data in one place, trained on and on."""

    y: np.ndarray  # [n]
    seen: dict[int, tuple[np.ndarray, np.ndarray]]  # pass -> features [n, 2], class vectors [C, 2]
    curves: dict[str, np.ndarray]  # of each pass


@jax.jit
def measured(v: Variables, x: Array, y: Array) -> tuple[Array, Array, Array]:
    z, w = FLAT.features(v, Batch(x))[0], v.params['head']['w']
    return collapse.nc1(z, y, w.shape[1]), collapse.nc2(z, y, w.shape[1]), 1 - collapse.nc3_means(z, y, w).mean


def collapsing(setting: Setting) -> Collapse:
    trio = digits(TRIO)
    algorithm = fedavg.algorithm(FLAT, local.sgd(0.02, weight_decay=5e-3), plan=local.Plan(32, 1))
    one = dealt(trio, [np.arange(len(trio.y))])  # one client that holds everything
    vs = [state.server.variables for state in trained(algorithm, one, setting.passes)]
    shown = sorted({min(1, setting.passes), min(10, setting.passes), setting.passes})
    seen = {
        t: (np.asarray(FLAT.features(vs[t], Batch(one.x))[0]), np.asarray(vs[t].params['head']['w']).T) for t in shown
    }
    values = np.array([measured(v, one.x, one.y) for v in vs[1:]], float)
    names = ('NC1: scatter', 'NC2: angles of means', 'NC3: means and vectors')
    return Collapse(trio.y, seen, dict(zip(names, values.T, strict=True)))


def ten_digits(setting: Setting, algorithm: Algorithm) -> State:
    """After all rounds, a quarter of the uneven clients in each."""
    ten = digits()
    clients = dealt(ten, data.dirichlet(ten.y, setting.many, ALPHA, seed=0))
    return trained(algorithm, clients, setting.rounds, setting.many // 4)[-1]


class Simplex(NamedTuple):
    """Cosines between centred class means of test features, all pairs, by method, and accuracies."""

    cosines: dict[str, np.ndarray]  # [C (C-1) / 2]
    accuracy: dict[str, float]


def with_etf(setting: Setting) -> Simplex:
    ten, plan = digits(), local.Plan(16, setting.epochs)
    methods = {
        'FedAvg': fedavg.algorithm(TALL, local.sgd(0.02), plan=plan),
        'FedETF': fedetf.algorithm(models.from_flax(WIDE), local.sgd(0.02), scale=4.0, plan=plan),
    }
    cosines, right = {}, {}
    for name, algorithm in methods.items():
        state = ten_digits(setting, algorithm)
        v = state.server.variables
        z = TALL.features(v, Batch(jnp.asarray(ten.x_test)))[0]
        if name == 'FedETF':  # as its classifier sees them
            z = normalize(heads.dense(v.params['head']['proj'], z))
        at = collapse.centres(z, jnp.asarray(ten.y_test), 10).centred
        cosines[name] = np.asarray(similarity.pairwise_cosine(at))[np.triu_indices(10, 1)]
        right[name] = accuracy(algorithm, state, ten)
    return Simplex(cosines, right)


class Remembered(NamedTuple):
    """Features of one client that lacks a class, and the memory of all."""

    z: np.ndarray  # [n, 2]
    y: np.ndarray  # [n]
    memory: np.ndarray  # [C, 2]
    frame: np.ndarray  # [C, 2]
    alpha: float


def with_memory(setting: Setting) -> Remembered:
    trio, plan, warm = digits(TRIO), local.Plan(16, setting.epochs), max(setting.rounds // 3, 1)
    algorithm = fedetf_gmv.algorithm(PLANE, local.sgd(0.05), warm=warm, alpha=0.5, plan=plan)
    clients = dealt(trio, data.dirichlet(trio.y, setting.few, ALPHA, seed=1))
    v = trained(algorithm, clients, warm)[-1].server.variables
    one = clients.shard(int(jnp.argmax(jnp.where((clients.counts > 0).sum(1) < 3, clients.size, 0))))
    rows = np.asarray(one.index[: int(one.size)])
    z, memory = PLANE.features(v.params['body'], v.stats, clients.x[rows], None, None)[0], v.fixed['memory']
    frame = np.asarray(v.fixed['head']['v']).T
    return Remembered(np.asarray(z), np.asarray(clients.y[rows]), np.asarray(memory.mu), frame, float(memory.alpha))


class Lengths(NamedTuple):
    """A long tail: how often a class is there, how long its vector becomes, and what realignment brings."""

    examples: np.ndarray  # [C]
    lengths: np.ndarray  # [C], of psi
    before: np.ndarray  # [C] accuracy of each class with psi
    after: np.ndarray  # [C] with all vectors brought to one length


def with_lengths(setting: Setting) -> Lengths:
    ten, plan = digits(), local.Plan(16, max(setting.epochs // 2, 1))
    rows = data.long_tail(ten.y, 20, seed=0)
    tail = ten._replace(x=ten.x[rows], y=ten.y[rows])
    clients = dealt(tail, data.dirichlet(tail.y, setting.many // 2, 0.5, seed=0, min_size=5))
    opt = local.sgd(0.03, momentum=0.5, weight_decay=0.0)
    algorithm = fedloge.algorithm(models.from_flax(WIDE), opt, plan=plan)
    v = trained(algorithm, clients, max(2 * setting.rounds // 3, 1))[-1].server.variables
    z, psi = TALL.features(v, Batch(jnp.asarray(ten.x_test)))[0], v.params['aux']

    def by_class(head: dict[str, Array]) -> np.ndarray:
        hits = np.asarray(jnp.argmax(heads.dense(head, z), axis=1)) == ten.y_test
        return np.array([hits[ten.y_test == c].mean() for c in range(10)])

    lengths = np.asarray(similarity.class_norms(psi['w']))
    return Lengths(np.bincount(tail.y), lengths, by_class(psi), by_class(fedloge.global_realign(psi)))


class Calibrated(NamedTuple):
    """Test features in the plane, what is drawn on the server, and the classifier before and after."""

    z: np.ndarray  # [n, 2]
    y: np.ndarray
    before: dict[str, np.ndarray]
    after: dict[str, np.ndarray]
    accuracy: tuple[float, float]


def with_calibration(setting: Setting) -> Calibrated:
    five, plan = digits(FIVE), local.Plan(16, setting.epochs)
    task = objective(PLANE, heads.linear(), losses.cross_entropy)
    algorithm, stage = fedavg.algorithm(task, local.sgd(0.02), plan=plan), ccvr.calibrate(task, transform=None)
    count = setting.many // 2
    clients = dealt(five, data.dirichlet(five.y, count, ALPHA, seed=0))
    state = trained(algorithm, clients, max(setting.rounds // 3, 1), count // 2)[-1]
    after, _ = round_of(stage)(KEY, simulate.join(stage, KEY, state.server, count), clients)
    v, w = state.server.variables, after.server.variables
    z = np.asarray(task.features(v, Batch(jnp.asarray(five.x_test)))[0])
    lines = (jax.tree.map(np.asarray, u.params['head']) for u in (v, w))
    return Calibrated(z, five.y_test, *lines, (accuracy(algorithm, state, five), accuracy(stage, after, five)))


class Meaning(NamedTuple):
    """Cosines of all pairs of classes."""

    pairs: list[tuple[int, int]]
    images: np.ndarray  # between mean images less the mean of all
    first: np.ndarray  # between prototypes at the start
    last: np.ndarray  # after training


def with_prototypes(setting: Setting) -> Meaning:
    ten, plan = digits(), local.Plan(16, max(setting.epochs // 2, 1))
    algorithm = fednh.algorithm(models.from_flax(WIDE), local.sgd(0.02), scale=5.0, plan=plan)
    means = np.array([ten.x[ten.y == c].reshape(-1, 64).mean(0) for c in range(10)])
    first = simulate.init(algorithm, KEY, dealt(ten, [np.arange(len(ten.y))])).server.variables.fixed['w']
    last = ten_digits(setting, algorithm).server.variables.fixed['w']
    upper = np.triu_indices(10, 1)
    cosines = (
        np.asarray(similarity.pairwise_cosine(jnp.asarray(u)))[upper] for u in (means - means.mean(0), first, last)
    )
    return Meaning(list(zip(*(u.tolist() for u in upper), strict=True)), *cosines)


def told(found: Any) -> list[str]:
    """What a picture says, in numbers."""
    if isinstance(found, Drift):
        return [
            f'mean cosine of classifiers in the plane, {name}: {values[0]:.2f} as drawn, '
            f'{values.mean():.2f} ± {values.std():.2f} over {len(values)} partitions'
            for name, values in found.cosines.items()
        ]
    if isinstance(found, Agreement):
        lines = []
        for name, cosines in found.cosines.items():
            pairs = cosines[np.triu_indices(len(cosines), 1)]
            by_layer = ', '.join(
                f'{layer} {value:.2f}' for layer, value in zip(LAYERS.values(), found.layers[name], strict=True)
            )
            lines.append(f'{name}: mean cosine of classifiers {pairs.mean():.2f}; CKA {by_layer}')
        return lines
    if isinstance(found, Collapse):
        return [f'{name}: from {values[0]:.3f} to {values[-1]:.3f}' for name, values in found.curves.items()]
    if isinstance(found, Simplex):
        return [
            f'{name}: accuracy {found.accuracy[name]:.3f}, mean gap to the simplex {np.abs(cosines + 1 / 9).mean():.3f}'
            for name, cosines in found.cosines.items()
        ]
    if isinstance(found, Remembered):
        lengths = np.linalg.norm(found.memory, axis=1)
        cosines = (found.memory * found.frame).sum(1) / np.maximum(lengths, 1e-9)
        return [f'lengths of the memory {lengths.round(1)}, cosines with the frozen vectors {cosines.round(2)}']
    if isinstance(found, Lengths):
        rare = slice(-3, None)
        link = np.corrcoef(np.log(found.examples), found.lengths)[0, 1]
        return [
            f'correlation of lengths with the logarithm of examples {link:.2f}',
            f'accuracy of all classes {found.before.mean():.2f} to {found.after.mean():.2f}, '
            f'of the three rarest {found.before[rare].mean():.2f} to {found.after[rare].mean():.2f}',
        ]
    if isinstance(found, Calibrated):
        return ['accuracy {:.3f} to {:.3f}'.format(*found.accuracy)]
    links = [np.corrcoef(found.images, values)[0, 1] for values in (found.first, found.last)]
    first = f'first cosines {found.first.min():.2f} to {found.first.max():.2f}'
    return [f'{first}, last {found.last.min():.2f} to {found.last.max():.2f}, correlation with images {links[1]:.2f}']
