"""The pictures of docs/ideas.md: why classifiers drift, what a simplex is, and what five systems change.

    python examples/ideas.py [--out docs/pictures] [--quick]

Needs no network, and one to two minutes on two cores. What is no schematic is computed on handwritten digits, often on
three of them (3, 8 and 9) with features of two dimensions, which can be drawn as they are. Writes each picture for
light and for dark pages, `NAME.png` and `NAME-dark.png`, and prints the numbers that the page tells.
"""

import argparse
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch

from fedjax_nc import data, evaluate, frames, heads, local, losses, models, plots, simulate
from fedjax_nc.algorithms import ccvr, fedavg, fedetf, fedetf_gmv, fedloge, fednh, latest
from fedjax_nc.base import Algorithm, Array, Batch, FederatedData, Objective, State, Variables
from fedjax_nc.frames import normalize
from fedjax_nc.metrics import collapse, similarity
from fedjax_nc.models import layers
from fedjax_nc.objective import objective

KEY = jax.random.key(0)
TRIO = (3, 8, 9)  # digits that are easily confused
FIVE = (0, 3, 4, 8, 9)
BLUE, RED, GREEN, PINK, ORANGE, SKY = '#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9'
OF_CLASS = (BLUE, RED, GREEN)
INK, FAINT = '#404040', '#9a9a9a'


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


# What is computed


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


# What is drawn


def figure_of(width: float, height: float, *columns: float) -> tuple[Figure, list[Axes]]:
    """A row of axes of these relative widths."""
    figure = Figure(figsize=(width, height), layout='constrained')
    FigureCanvasAgg(figure)
    for axes in (row := list(figure.subplots(1, len(columns), width_ratios=columns, squeeze=False)[0])):
        axes.spines[['top', 'right']].set_visible(False)
        axes.spines[['left', 'bottom']].set_color(INK)
        axes.tick_params(colors=INK, labelsize=9)
        axes.set_axisbelow(True)
    return figure, row


def arrow(axes: Axes, start: Sequence[float], end: Sequence[float], color: str, **style: Any) -> None:
    look = {'arrowstyle': '-|>', 'mutation_scale': 10, 'linewidth': 1.5, 'shrinkA': 0, 'shrinkB': 0} | style
    axes.add_patch(FancyArrowPatch(start, end, color=color, **look))


def named(axes: Axes, x: str | None = None, y: str | None = None, title: str | None = None) -> None:
    """Labels of the axes and a title, as far as they are given."""
    if x is not None:
        axes.set_xlabel(x, fontsize=9, color=INK)
    if y is not None:
        axes.set_ylabel(y, fontsize=9, color=INK)
    if title is not None:
        axes.set_title(title, fontsize=10, color=INK)


def plane(axes: Axes, reach: float, title: str) -> None:
    axes.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect='equal')
    named(axes, title=title)
    axes.axhline(0, color='#e4e4e4', linewidth=0.8, zorder=0)
    axes.axvline(0, color='#e4e4e4', linewidth=0.8, zorder=0)


def draw_drift(found: Drift) -> Figure:
    figure, row = figure_of(7.6, 4.5, 1, 1)
    reach = 1.12 * max(np.abs(found.even).max(), np.abs(found.uneven).max())
    panels = (
        ('digits dealt evenly', found.even, np.ones_like(found.held)),
        (f'Dirichlet({ALPHA})', found.uneven, found.held),
    )
    for axes, (title, vectors, held), cosines in zip(row, panels, found.cosines.values(), strict=True):
        plane(axes, reach, f'{title}: mean cosine {cosines[0]:.2f}')
        for (k, c), own in np.ndenumerate(held):
            style = {} if own else {'linestyle': (0, (3, 2)), 'linewidth': 1.1}
            arrow(axes, (0, 0), vectors[k, c], OF_CLASS[c], alpha=0.85 if own else 0.6, **style)
        for received, color in zip(found.received, OF_CLASS, strict=True):
            axes.plot(*received, 'o', color=color, markersize=9, markeredgecolor='#000000', markeredgewidth=2, zorder=5)
        named(axes, 'first feature')
    named(row[0], y='second feature')
    for digit, color in zip(TRIO, OF_CLASS, strict=True):
        row[0].plot([], [], color=color, linewidth=2, label=f'digit {digit}')
    row[0].plot([], [], color=INK, linewidth=1.1, linestyle=(0, (3, 2)), label='client holds none of it')
    received = {'color': '#ffffff', 'markeredgecolor': '#000000', 'markersize': 9, 'markeredgewidth': 2}
    row[0].plot([], [], 'o', label='tip as received', **received)
    figure.legend(loc='outside lower center', ncols=5, frameon=False, fontsize=9)
    return figure


def draw_agreement(found: Agreement) -> Figure:
    figure, row = figure_of(8.0, 2.8, 1, 1, 1.3)
    for axes, (title, cosines) in zip(row, found.cosines.items(), strict=False):
        image = axes.imshow(cosines, vmin=0, vmax=1, cmap='viridis', interpolation='nearest')
        named(axes, 'client', title=title)
        axes.set(xticks=range(0, len(cosines), 5), yticks=range(0, len(cosines), 5))
        axes.spines[:].set_visible(False)
    named(row[0], y='client')
    bar_of(figure, row[:2], image, 'cosine of classifiers')
    for (name, values), color, mark in zip(found.layers.items(), (BLUE, RED), 'os', strict=True):
        row[2].plot(range(len(LAYERS)), values, f'{mark}-', color=color, label=name)
    row[2].set(ylim=(0, 1.03), xlim=(-0.3, len(LAYERS) - 0.7))
    row[2].set_xticks(range(len(LAYERS)), labels=[name.replace(' ', '\n') for name in LAYERS.values()])
    named(row[2], y='CKA, mean over pairs', title='layer by layer')
    row[2].grid(axis='y', color='#e4e4e4', linewidth=0.8)
    row[2].legend(frameon=False, fontsize=9, loc='lower left')
    return figure


def draw_frames() -> Figure:
    """A simplex of three vectors in the plane, of four in space, and the cosines of ten."""
    figure, (flat, space, many) = figure_of(8.0, 2.9, 1, 1, 1.3)
    three = turned(np.asarray(frames.simplex_etf(KEY, 2, 3)).T)
    flat.add_patch(Circle((0, 0), 1, fill=False, edgecolor=FAINT, linewidth=1, linestyle=':'))
    four = turned(np.asarray(frames.simplex_etf(KEY, 3, 4)).T)
    for axes, vectors, title in (
        (flat, three, '3 classes in 2 dimensions'),
        (space, four, '4 classes in 3 dimensions'),
    ):
        spots = seen_from_above(vectors)
        for a, b in itertools.combinations(spots, 2):
            axes.plot(*np.stack([a, b]).T, color=FAINT, linewidth=1, zorder=0)
        for spot, color in zip(spots, (*OF_CLASS, ORANGE), strict=False):
            arrow(axes, (0, 0), spot, color, linewidth=2.6, mutation_scale=15)
        axes.set(xlim=(-1.12, 1.12), ylim=(-1.12, 1.12), aspect='equal')
        axes.axis('off')
        named(axes, title=title)
    bend = np.radians(np.linspace(90, 210, 40))
    flat.plot(0.3 * np.cos(bend), 0.3 * np.sin(bend), color=INK, linewidth=1)
    flat.text(-0.68, 0.4, '120°', fontsize=10, color=INK, ha='center', va='center')
    space.text(0, -1.05, 'any two at 109.5°', fontsize=10, color=INK, ha='center', va='center')
    ten = np.asarray(frames.simplex_etf(KEY, 9, 10))
    image = many.imshow(ten.T @ ten, vmin=-1, vmax=1, cmap='viridis', interpolation='nearest')
    named(many, 'class', 'class', '10 classes in 9 dimensions')
    many.set(xticks=range(0, 10, 3), yticks=range(0, 10, 3))
    many.spines[:].set_visible(False)
    bar_of(figure, many, image, 'cosine of class vectors', {-1: '-1', -1 / 9: '-1/9', 1: '1'})
    return figure


def bar_of(
    figure: Figure, axes: Axes | list[Axes], image: Any, label: str, ticks: dict[float, str] | None = None
) -> None:
    bar = figure.colorbar(image, ax=axes, pad=0.03)
    if ticks:
        bar.set_ticks(list(ticks), labels=list(ticks.values()))
    bar.set_label(label, fontsize=9, color=INK)
    bar.ax.tick_params(labelsize=9, colors=INK)
    bar.outline.set_visible(False)


def turned(vectors: np.ndarray) -> np.ndarray:
    """A frame [C, d], turned so that its first vector points upwards, along the last axis."""
    d = vectors.shape[1]
    up = np.concatenate([vectors[:1], np.eye(d)[: d - 1]])
    q, r = np.linalg.qr(up.T)
    q *= np.sign(np.diag(r))
    return np.roll(vectors @ q, -1, axis=1)


def seen_from_above(vectors: np.ndarray) -> np.ndarray:
    """Where points of space [n, 3] lie in a picture, the last axis upwards; points of the plane stay."""
    if vectors.shape[1] == 2:
        return vectors
    around = np.radians(-75) - np.arctan2(vectors[1, 1], vectors[1, 0])  # the second point comes to the front
    turn, tilt = np.array([[np.cos(around), -np.sin(around)], [np.sin(around), np.cos(around)]]), np.radians(20)
    x, y = turn @ vectors[:, :2].T
    return np.stack([x, np.cos(tilt) * vectors[:, 2] + np.sin(tilt) * y], axis=1)


def draw_collapse(found: Collapse) -> Figure:
    figure, row = figure_of(8.6, 2.9, *[1] * len(found.seen), 1.25)
    for axes, (t, (z, w)) in zip(row, found.seen.items(), strict=False):
        reach = 1.1 * np.abs(z).max()
        plane(axes, reach, f'after {t} {"pass" if t == 1 else "passes"}')
        tips = 0.8 * reach * w / np.linalg.norm(w, axis=1).max()
        for c, color in enumerate(OF_CLASS):
            axes.scatter(*z[found.y == c].T, s=7, color=color, alpha=0.55, linewidths=0)
            arrow(axes, (0, 0), tips[c], '#000000', linewidth=1.8, arrowstyle='-', zorder=4)
            axes.plot(
                *tips[c], 'o', color=color, markersize=7, markeredgecolor='#000000', markeredgewidth=1.5, zorder=5
            )
        named(axes, 'first feature')
    named(row[0], y='second feature')
    for digit, color in zip(TRIO, OF_CLASS, strict=True):
        row[0].plot([], [], 'o', color=color, markersize=6, label=f'digit {digit}')
    tip = {'color': '#ffffff', 'markeredgecolor': '#000000', 'markersize': 7, 'markeredgewidth': 1.5}
    row[0].plot([], [], 'o', label='class vector', **tip)
    figure.legend(*row[0].get_legend_handles_labels(), loc='outside lower left', ncols=4, frameon=False, fontsize=9)
    curves = row[-1]
    for (name, values), color, dash in zip(found.curves.items(), (BLUE, RED, GREEN), ('-', '--', '-.'), strict=True):
        curves.plot(range(1, len(values) + 1), values, color=color, linestyle=dash, label=name)
    curves.set(xscale='log', yscale='log')
    named(curves, 'pass over the data', title='0 is collapse')
    curves.grid(color='#e4e4e4', linewidth=0.8)
    curves.set_ylim(top=20)
    curves.legend(frameon=False, fontsize=8, loc='upper right', borderaxespad=0)
    return figure


class Part(NamedTuple):
    """A box of a schematic: what it is, what happens to it, and where it stands."""

    label: str
    kind: str  # of KINDS
    x: float
    y: float
    width: float
    height: float = 4.6


KINDS = {
    'trained': (BLUE, 'trained, averaged'),
    'frozen': (FAINT, 'frozen'),
    'kept': (GREEN, 'never sent'),
    'moved': (RED, 'changed by the server'),
    'plain': (INK, ''),
}


class Schematic(NamedTuple):
    """One round: the server above, a client below, what travels between them, and when it happens."""

    parts: tuple[Part, ...]
    links: tuple[tuple[float, float, float, float], ...]  # arrows (from x, y, to x, y)
    notes: tuple[tuple[float, float, str], ...]  # words at x, y
    down: str
    up: str
    before: str
    during: str
    after: str
    acts: tuple[bool, bool, bool]  # where in this pipeline the system differs from FedAvg
    who: str = 'each client of the round'
    detached: tuple[tuple[float, float, float, float], ...] = ()  # arrows that no gradient passes


WIDTH, CLIENT, SERVER = 56.0, (5.6, 18.4), (25.6, 34.0)


def draw_schematic(axes: Axes, drawn: Schematic) -> None:
    axes.set(xlim=(0, WIDTH), ylim=(-0.3, 34.6))
    axes.axis('off')
    for (low, high), name in ((CLIENT, drawn.who), (SERVER, 'server')):
        box(axes, 0.4, low, WIDTH - 0.8, high - low, INK, 0.0, 0.9)
        axes.text(1.4, high - 0.7, name, fontsize=9, color=INK, va='top', weight='bold')
    for part in drawn.parts:
        color, words = KINDS[part.kind]
        if part.kind != 'plain':
            box(axes, part.x, part.y, part.width, part.height, color, 0.22, 1.4)
        middle = part.x + part.width / 2
        axes.text(middle, part.y + part.height / 2, part.label, fontsize=8.5, color='#000000', ha='center', va='center')
        axes.text(middle, part.y - 0.4, words, fontsize=7.5, color=INK, ha='center', va='top', style='italic')
    for x0, y0, x1, y1 in drawn.links:
        arrow(axes, (x0, y0), (x1, y1), INK, linewidth=1.1, mutation_scale=8)
    for x0, y0, x1, y1 in drawn.detached:
        bow = {'connectionstyle': 'arc3,rad=-0.11', 'linestyle': (0, (3, 2))}
        arrow(axes, (x0, y0), (x1, y1), INK, linewidth=1.1, mutation_scale=8, **bow)
    for x, y, words in drawn.notes:
        axes.text(x, y, words, fontsize=8, color=INK, ha='center', va='center')
    for x, words, (start, end) in ((4, drawn.down, (25.4, 18.6)), (31, drawn.up, (18.6, 25.4))):
        arrow(axes, (x, start), (x, end), INK, linewidth=2.2, mutation_scale=14)
        axes.text(x + 1.4, 22, words, fontsize=8.5, color='#000000', va='center')
    third = (WIDTH - 0.8) / 3
    for i, (title, words) in enumerate(
        (('before training', drawn.before), ('in every round', drawn.during), ('after training', drawn.after))
    ):
        color, tint = (ORANGE, 0.25) if drawn.acts[i] else (FAINT, 0.0)
        box(axes, 0.6 + i * third, 0, third - 0.4, 4.4, color, tint, 1)
        axes.text(0.4 + (i + 0.5) * third, 3.9, title, fontsize=7.5, color=INK, ha='center', va='top', style='italic')
        axes.text(0.4 + (i + 0.5) * third, 1.5, words, fontsize=8.5, color='#000000', ha='center', va='center')


def box(axes: Axes, x: float, y: float, width: float, height: float, color: str, tint: float, line: float) -> None:
    shape = 'round,pad=0,rounding_size=0.7'
    if tint:
        axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=shape, facecolor=color, alpha=tint, linewidth=0))
    outline = {'edgecolor': color, 'facecolor': 'none', 'linewidth': line}
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=shape, **outline))


ROW = 9.2  # where boxes of the client stand
IMAGES, BODY = Part('images', 'plain', 0.8, ROW, 7), Part('body', 'trained', 9.5, ROW, 9)
AVERAGES = 'averages, as in FedAvg'


def along(*ends: float, y: float = 11.5) -> tuple[tuple[float, float, float, float], ...]:
    """Arrows from left to right, of which each second number is an end; by default in the row of the client."""
    return tuple((start, y, end, y) for start, end in zip(ends[::2], ends[1::2], strict=True))


SCHEMATICS = {
    'fedetf': Schematic(
        parts=(
            IMAGES,
            BODY,
            Part('projection,\ntemperature', 'trained', 21.5, ROW, 11),
            Part('simplex ETF', 'frozen', 35.5, ROW, 10),
            Part('balanced\nloss', 'plain', 47, ROW, 8),
        ),
        links=along(7.2, 9.5, 18.5, 21.5, 32.5, 35.5, 45.5, 47.6),
        notes=((28, 29, AVERAGES),),
        down='body, projection,\ntemperature',
        up='their changes',
        before='the frame is drawn',
        during='features learn it',
        after='personal models',
        acts=(True, True, True),
    ),
    'gmv': Schematic(
        parts=(
            IMAGES,
            BODY,
            Part('simplex ETF', 'frozen', 35.5, ROW, 10),
            Part('loss', 'plain', 47, ROW, 8),
            Part('memory: a mean\nfeature of each class', 'moved', 36, 28.4, 18),
        ),
        links=along(7.2, 9.5, 18.5, 35.5, 45.5, 48.8),
        notes=((27, 13.2, 'features + $\\alpha$ memory\nof their class'), (18, 29.5, AVERAGES)),
        down='body, memory',
        up='its change,\nclass means of features',
        before='the frame is drawn',
        during='late: the memory acts',
        after='as it is',
        acts=(True, True, False),
    ),
    'fedloge': Schematic(
        parts=(
            IMAGES,
            Part('body', 'trained', 9.5, ROW, 8),
            Part('sparse ETF', 'frozen', 23, ROW, 9.5),
            Part('global\nhead', 'trained', 34.5, ROW, 8.5),
            Part('private\nhead', 'kept', 45, ROW, 9.5),
        ),
        links=along(7.2, 9.5, 17.5, 23),
        notes=((47.5, 17.1, 'dashed: no gradient'), (28, 29, AVERAGES)),
        detached=((16, 13.8, 38.7, 13.8), (14.5, 13.8, 49.7, 13.8)),
        down='body, global head',
        up='their changes',
        before='the frame is made',
        during='two heads beside it',
        after='lengths realigned',
        acts=(True, True, True),
    ),
    'ccvr': Schematic(
        parts=(
            IMAGES,
            Part('body', 'frozen', 9.5, ROW, 9),
            Part('mean and covariance of\nthe features of each class', 'plain', 25, ROW, 26),
            Part('one Gaussian\nfor each class', 'plain', 10, 27.6, 11),
            Part('virtual\nfeatures', 'plain', 25, 27.6, 9),
            Part('classifier', 'moved', 39, 28.2, 12, 4.2),
        ),
        links=along(7.2, 9.5, 18.5, 27.5) + along(21.5, 25.4, 34, 39, y=29.9),
        notes=(),
        down='body',
        up='class means, covariances,\ncounts: once',
        before='as it is',
        during='any method',
        after='classifier refitted',
        acts=(False, False, True),
        who='every client, once',
    ),
    'fednh': Schematic(
        parts=(
            IMAGES,
            BODY,
            Part('unit\nlength', 'plain', 21, ROW, 7),
            Part('prototypes', 'frozen', 31.5, ROW, 10),
            Part('scaled\ncosines, loss', 'plain', 44, ROW, 11),
            Part('prototypes: a step to\nthe mean of the class', 'moved', 36, 28.4, 18),
        ),
        links=along(7.2, 9.5, 18.5, 21.7, 27.2, 31.5, 41.5, 44),
        notes=((18, 29.5, AVERAGES),),
        down='body, scale,\nprototypes',
        up='changes of body and scale,\nclass means of features',
        before='spread evenly',
        during='prototypes follow',
        after='as it is',
        acts=(True, True, False),
    ),
}


def system(name: str) -> tuple[Figure, Axes]:
    """A figure with the schematic of a system, and axes for what was computed beside it."""
    figure, (left, right) = figure_of(8.0, 3.5, 1.95, 1)
    draw_schematic(left, SCHEMATICS[name])
    named(right, title='computed')
    return figure, right


def draw_etf(found: Simplex) -> Figure:
    figure, axes = system('fedetf')
    rng = np.random.default_rng(0)
    for i, ((name, cosines), color, mark) in enumerate(zip(found.cosines.items(), (RED, BLUE), 'so', strict=True)):
        axes.plot(i + rng.uniform(-0.22, 0.22, len(cosines)), cosines, mark, color=color, alpha=0.6, markersize=4.5)
        axes.text(i, 0.96, f'{100 * found.accuracy[name]:.0f} % right', fontsize=9, color=INK, ha='center', va='top')
    axes.axhline(-1 / 9, color='#000000', linewidth=1.2, linestyle='--')
    axes.text(0.5, -1 / 9 - 0.04, 'simplex', fontsize=8.5, color=INK, ha='center', va='top')
    axes.set(xlim=(-0.55, 1.5), ylim=(-0.8, 1))
    axes.set_xticks([0, 1], labels=list(found.cosines))
    named(axes, y='cosine of two class means', title='45 pairs of digits, test images')
    return figure


def draw_memory(found: Remembered) -> Figure:
    figure, axes = system('gmv')
    moved = found.z + found.alpha * found.memory[found.y]
    reach = 1.1 * max(np.abs(moved).max(), np.abs(found.memory).max())
    plane(axes, reach, 'features of one client')
    for c, color in enumerate(OF_CLASS):
        some = np.flatnonzero(found.y == c)
        axes.scatter(*found.z[some].T, s=9, color=color, alpha=0.5, linewidths=0, label=f'digit {TRIO[c]}')
        for i in some[:12]:
            arrow(axes, found.z[i], moved[i], color, linewidth=0.9, mutation_scale=7, alpha=0.9)
        axes.plot(*found.memory[c], '*', color=color, markersize=15, markeredgecolor='#000000', markeredgewidth=0.9)
    axes.plot([], [], '*', color='#ffffff', markeredgecolor='#000000', markersize=11, label='memory')
    named(axes, 'first feature', 'second feature')
    axes.legend(frameon=False, fontsize=8, loc='lower left', handletextpad=0.2, borderaxespad=0)
    return figure


def draw_lengths(found: Lengths) -> Figure:
    figure, axes = system('fedloge')
    classes = np.arange(len(found.examples))
    axes.bar(classes, found.lengths / found.lengths.max(), 0.8, color=SKY, alpha=0.6, label='length of class vector')
    axes.plot(classes, found.before, 's--', color=RED, markersize=4.5, label='accuracy before')
    axes.plot(classes, found.after, 'o-', color=BLUE, markersize=4.5, label='accuracy after')
    axes.set_xticks(classes, labels=[str(n) for n in found.examples], fontsize=7)
    axes.set_ylim(0, 1.42)
    axes.set_yticks([0, 0.5, 1])
    named(axes, 'training examples of the class', 'accuracy; length, longest = 1', 'all lengths made equal')
    axes.legend(frameon=False, fontsize=8, loc='upper right', borderaxespad=0)
    return figure


def draw_calibration(found: Calibrated) -> Figure:
    figure, axes = system('ccvr')
    low, high = found.z.min(0), found.z.max(0)
    low, high = low - 0.06 * (high - low), high + 0.12 * (high - low)
    for c, color in enumerate((BLUE, RED, GREEN, PINK, ORANGE)):
        own = found.z[found.y == c]
        axes.scatter(*own.T, s=11, color=color, marker='os^Dv'[c], alpha=0.75, linewidths=0)
        axes.text(*own.mean(0), str(FIVE[c]), fontsize=13, weight='bold', color='#000000', ha='center', va='center')
    for head, color, style, words in ((found.before, FAINT, '--', 'before'), (found.after, '#000000', '-', 'after')):
        for line in borders(head, 2 * float(np.abs([low, high]).max())):
            axes.plot(*line.T, color=color, linewidth=1.3, linestyle=style)
        axes.plot([], [], color=color, linewidth=1.3, linestyle=style, label=words)
    axes.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]))
    right = ' to '.join(f'{100 * share:.0f}' for share in found.accuracy)
    named(axes, 'first feature', 'second feature', f'test images, {right} % right')
    axes.legend(frameon=False, fontsize=8.5, loc='upper right', borderaxespad=0)
    return figure


def borders(head: dict[str, np.ndarray], reach: float) -> list[np.ndarray]:
    """Where a linear classifier in the plane decides between two classes: points [n, 2] of each pair, NaN elsewhere."""
    lines = []
    for a, b in itertools.combinations(range(len(head['b'])), 2):
        normal, offset = head['w'][:, a] - head['w'][:, b], head['b'][a] - head['b'][b]
        along = np.array([-normal[1], normal[0]]) / np.linalg.norm(normal)
        points = -offset * normal / (normal @ normal) + np.linspace(-reach, reach, 2000)[:, None] * along
        logits = points @ head['w'] + head['b']
        lines.append(np.where((logits[:, a] >= logits.max(1) - 1e-6)[:, None], points, np.nan))
    return lines


def draw_meaning(found: Meaning) -> Figure:
    figure, axes = system('fednh')
    axes.plot(found.images, found.first, 's', color=RED, markersize=3.5, label='first prototypes')
    axes.plot(found.images, found.last, 'o', color=BLUE, markersize=4.5, alpha=0.75, label='after training')
    for i in (np.argmin(found.images), np.argmax(found.images)):
        spot, words = (found.images[i], found.last[i]), '{} and {}'.format(*found.pairs[i])
        axes.annotate(words, spot, (0, -8), textcoords='offset points', fontsize=8.5, color=INK, ha='center', va='top')
    axes.margins(x=0.13)
    named(axes, 'cosine of mean images, centred', 'cosine of prototypes', '45 pairs of digits')
    axes.set_ylim(-0.2, 1.45 * found.last.max())
    axes.legend(frameon=False, fontsize=8, loc='upper left', handletextpad=0.2, borderaxespad=0)
    return figure


def draw_clients() -> Figure:
    """The first picture of docs/getting-started.md."""
    ten = digits()
    return plots.class_distribution(data.federate(ten.x, ten.y, data.dirichlet(ten.y, 20, ALPHA, seed=0)))


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


PICTURES = {
    'drift': (drift, draw_drift),
    'agreement': (agreement, draw_agreement),
    'collapse': (collapsing, draw_collapse),
    'fedetf': (with_etf, draw_etf),
    'gmv': (with_memory, draw_memory),
    'fedloge': (with_lengths, draw_lengths),
    'ccvr': (with_calibration, draw_calibration),
    'fednh': (with_prototypes, draw_meaning),
}


def main() -> None:
    parser = argparse.ArgumentParser(description='The pictures of docs/ideas.md.')
    parser.add_argument('--out', type=Path, default=Path('docs/pictures'))
    parser.add_argument('--quick', action='store_true', help='little training: to see that it runs')
    parser.add_argument('--only', nargs='+', choices=PICTURES, default=list(PICTURES), help='these pictures alone')
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    plots.save(draw_clients(), args.out / 'clients.png', dpi=110)
    plots.save(draw_frames(), args.out / 'frames.png', dpi=140)
    for name in args.only:
        compute, draw = PICTURES[name]
        found = compute(QUICK if args.quick else Setting())
        plots.save(draw(found), args.out / f'{name}.png', dpi=140)
        for line in told(found):
            print(f'{name}: {line}')


if __name__ == '__main__':
    main()
