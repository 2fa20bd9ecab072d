"""Six spiral arms under a free and under a uniform head: the motivating experiments of FedNH (Dai et al., AAAI 2023).

    python examples/spiral.py [--seeds 5] [--epochs 201] [--rounds 100] [--out runs/spiral] [--quick]

Features have two dimensions, so that they can be drawn. First all data lie in one place: while classes are balanced a
free head is as good as a uniform one; when they are not, it shortens the vectors of small classes and lets them close
in. Then the data are spread over 100 clients. Under a uniform head local work leaves every class in its direction on
all clients; under a free head it does not, and the average of their models suffers. (Clients use FedNH's optimizer;
without its momentum steps are small enough for either head.)

Needs no network. Prints three tables and writes spiral.png and spiral_federated.png, and the same for dark pages.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedjax_nc import data, evaluate, frames, heads, local, losses, models, plots, simulate
from fedjax_nc.algorithms import fedavg, latest
from fedjax_nc.base import Array, Batch, FederatedData, Head, Objective, Variables
from fedjax_nc.metrics import similarity
from fedjax_nc.models import layers
from fedjax_nc.objective import objective, transformed

CLASSES, TEST = 6, 100
SIZES = {'balanced': (3000,) * CLASSES, 'imbalanced': (3000, 1500, 750, 375, 187, 93)}
HEADS = {
    'free': heads.linear(bias=False),
    'uniform': heads.prototypes(scale=1.0, learn_scale=False, init=frames.uniform),
    'uniform, raw features': Head(
        init=lambda key, dim, classes: ({}, {'v': frames.uniform(key, dim, classes)}),
        logits=lambda params, fixed, z: heads.product(z, fixed['v']),
    ),
}
CENTRAL_OPT = local.sgd(0.1, momentum=0.9, weight_decay=1e-5, decay=0.99)
CLIENTS, COHORT, ALPHA = 100, 10, 0.3
CLIENT_OPT = local.sgd(0.1, momentum=0.9, weight_decay=1e-5, decay=0.99, clip=10.0)
COLORS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9')


class Body(nn.Module):
    """2 -> 16 -> 8 -> 4 -> 2 with a ReLU after each layer but the last."""

    @nn.compact
    def __call__(self, x: Array, *, mask: Array | None = None, train: bool = False) -> Array:
        return layers.dense(2, 4, jnp.float32)(models.MLP((16, 8, 4))(x))


def task_of(name: str) -> Objective:
    return objective(models.from_flax(Body()), HEADS[name], losses.cross_entropy)


def class_vectors(v: Variables) -> np.ndarray:
    """What a head compares features with: [..., C, 2]."""
    if 'w' in v.fixed:
        return np.asarray(v.fixed['w'])
    return np.asarray(jnp.swapaxes(v.params['head'].get('w', v.fixed.get('v')), -1, -2))


def nearest_angles(vectors: np.ndarray) -> np.ndarray:
    """Angle in degrees from each of `vectors [S, C, 2]` to the nearest other of its seed: [S, C]."""
    cosines = np.asarray(jax.vmap(similarity.pairwise_cosine)(jnp.asarray(vectors)))
    others = np.where(np.eye(vectors.shape[1], dtype=bool), -1.0, cosines)
    return np.degrees(np.arccos(np.clip(others.max(axis=-1), -1, 1)))


class Central(NamedTuple):
    """One head in one place; leading axes: seeds and the entries of SIZES."""

    loss: Array  # [S, 2] in the last epoch
    accuracy: Array  # [S, 2, C] of each class
    variables: Variables


def central(name: str, sizes: dict[str, tuple[int, ...]], seeds: int, epochs: int) -> Central:
    """Trains in one place, which is a round of one client for every epoch; all seeds and sizes side by side.

    Every seed has two clients, of whom one holds the balanced data and the other the imbalanced.
    """
    tests = [data.spiral(2 * seed + 1, (TEST,) * CLASSES) for seed in range(seeds)]
    pools = [holders([data.spiral(2 * seed, number) for number in sizes.values()]) for seed in range(seeds)]
    pool, (x, y) = (jax.tree.map(lambda *u: jnp.stack(u), *many) for many in (pools, tests))
    algorithm = fedavg.algorithm(task_of(name), CENTRAL_OPT, plan=local.Plan(batch_size=5000, epochs=1))
    one = simulate.make_round(algorithm)

    def play(key: Array, pool: FederatedData, x: Array, y: Array, holder: Array) -> Central:
        k_init, k_train = jax.random.split(key)
        rounds = simulate.several(lambda key, state, pool: one(key, state, pool, holder[None]))
        state, reports = rounds(jax.random.split(k_train, epochs), simulate.init(algorithm, k_init, pool), pool)
        table = evaluate.generic(algorithm, state, x, y, CLASSES)
        return Central(reports.loss[-1], evaluate.class_accuracy(table), state.server.variables)

    every = jax.vmap(jax.vmap(play, in_axes=(None, None, None, None, 0)), in_axes=(0, 0, 0, 0, None))
    return jax.jit(every)(jax.random.split(jax.random.key(0), seeds), pool, x, y, jnp.arange(len(sizes)))


def holders(sets: list[tuple[np.ndarray, np.ndarray]]) -> FederatedData:
    """One client for each data set."""
    x, y = (np.concatenate(u) for u in zip(*sets, strict=True))
    return data.federate(x, y, np.split(np.arange(len(y)), np.cumsum([len(y) for _, y in sets])[:-1]))


class Federated(NamedTuple):
    """One seed of the federated experiment."""

    accuracy: float  # of the global model
    agreement: float  # mean cosine between the local mean features of a class on two clients
    own: Variables  # [K, ...] the clients' models before they are averaged
    clients: FederatedData


def federated(name: str, seed: int, sizes: tuple[int, ...], num_clients: int, rounds: int) -> Federated:
    """Trains with some clients a round; then all train once from the result, and their features are compared."""
    x, y = data.spiral(2 * seed, sizes)
    parts = data.dirichlet_multiclass(y, num_clients, ALPHA, seed=seed)
    clients, task = data.federate(x, y, parts), task_of(name)
    algorithm = latest.keep(fedavg.algorithm(task, CLIENT_OPT, plan=local.Plan(batch_size=64, epochs=5)))
    run = simulate.compiled(simulate.make_round(algorithm, chunk=COHORT))
    k_init, k_pick, k_train, k_all = jax.random.split(jax.random.key(seed), 4)
    state = jax.jit(simulate.init, static_argnums=0)(algorithm, k_init, clients)
    for pick, key in zip(jax.random.split(k_pick, rounds), jax.random.split(k_train, rounds), strict=True):
        state, _ = run(key, state, clients, simulate.choose(pick, num_clients, COHORT))
    table = evaluate.generic(algorithm, state, *data.spiral(2 * seed + 1, (TEST,) * CLASSES), CLASSES)
    server = jax.tree.map(np.asarray, state.server)  # all start from here, whoever trains first
    for ids in np.arange(num_clients).reshape(-1, COHORT):
        state, _ = run(k_all, state._replace(server=server), clients, jnp.asarray(ids))
    own = state.clients.variables
    seen = transformed(task, frames.normalize) if name == 'uniform' else task  # features as the head sees them
    means = similarity.client_prototypes(seen, own, clients, own=True)
    agreement = similarity.prototype_consistency(means.rows, means.weight).mean
    return Federated(float(evaluate.accuracy(table)), float(agreement), own, clients)


def draw(axes: Axes, points: np.ndarray, y: np.ndarray, vectors: np.ndarray | None = None) -> None:
    """Points as dots and class vectors as arrows, in the colours of their classes.

    Heads without a bias decide by direction alone, so every class of points is drawn on a scale of its own.
    """
    for c, color in enumerate(COLORS):
        mine = points[y == c]
        if len(mine):
            mine = mine / np.quantile(np.linalg.norm(mine, axis=1), 0.95)
        axes.scatter(*mine.T, s=7, color=color, alpha=0.5, linewidths=0)
    axes.set(xlim=(-1.25, 1.25), ylim=(-1.25, 1.25), aspect='equal', xticks=[], yticks=[])
    axes.spines[:].set_color('#cccccc')
    if vectors is not None:
        style = {'arrowstyle': '-|>', 'linewidth': 2, 'shrinkA': 0, 'shrinkB': 0}
        for tip, color in zip(vectors / np.linalg.norm(vectors, axis=1).max(), COLORS, strict=True):
            axes.plot([0, tip[0]], [0, tip[1]], color='white', linewidth=4, solid_capstyle='butt')
            axes.annotate('', tip, (0, 0), arrowprops=style | {'color': color})


def features(v: Variables, x: Array | np.ndarray) -> np.ndarray:
    """Raw features [n, 2] of one model, whatever its head."""
    return np.asarray(task_of('free').features(v, Batch(jnp.asarray(x)))[0])


def picture(rows: int, columns: int, note: str) -> tuple[Figure, np.ndarray]:
    figure = Figure(figsize=(3 * columns + 1.0, 3 * rows + 0.7), layout='constrained', facecolor='white')
    figure.supxlabel(note, fontsize=8)
    dots = [Line2D([], [], marker='o', linestyle='', color=color, label=str(c)) for c, color in enumerate(COLORS)]
    figure.legend(handles=dots, title='class', loc='outside right center', frameon=False)
    return figure, figure.subplots(rows, columns)


def draw_central(cases: dict[str, Central], sizes: dict[str, tuple[int, ...]]) -> Figure:
    """Data, and the first seed's test features under both heads."""
    note = (
        'Arrows: class vectors. Dots: training data on the left, features of test data elsewhere, of the first seed,\n'
        'every class on a scale of its own (only directions decide).'
    )
    figure, axes = picture(len(sizes), 3, note)
    x_test, y_test = data.spiral(1, (TEST,) * CLASSES)
    for i, (kind, number) in enumerate(sizes.items()):
        x, y = data.spiral(0, number)
        shown = np.random.default_rng(0).permutation(len(y))[:2500]
        draw(axes[i, 0], x[shown], y[shown])
        axes[i, 0].set(title=f'training data, {kind}')
        for panel, name in zip(axes[i, 1:], ('free', 'uniform'), strict=True):
            first = jax.tree.map(lambda u, i=i: u[0, i], cases[name])
            draw(panel, features(first.variables, x_test), y_test, class_vectors(first.variables))
            panel.set(title=f'{name} head, test {100 * first.accuracy.mean():.1f} %')
    return figure


def draw_federated(runs: dict[str, Federated]) -> Figure:
    """Features of their own examples on the two clients that share most classes."""
    note = (
        "Arrows: class vectors after local training. Dots: features of a client's own examples,\n"
        'every class on a scale of its own (only directions decide). The median seed.'
    )
    figure, axes = picture(len(runs), 2, note)
    clients = next(iter(runs.values())).clients
    held = np.asarray(clients.counts)
    shared = np.minimum(held[:, None], held).clip(max=20).sum(axis=-1)
    pair = np.unravel_index(np.argmax(np.triu(shared, 1)), shared.shape)
    for row, (name, run) in zip(axes, runs.items(), strict=True):
        for panel, k in zip(row, pair, strict=True):
            v = jax.tree.map(lambda u, k=k: u[k], run.own)
            rows = clients.index[k, : clients.size[k]]
            draw(panel, features(v, clients.x[rows]), np.asarray(clients.y[rows]), class_vectors(v))
            panel.set(title=f'{name} head, client {k}')
    return figure


def spread(values: np.ndarray, unit: float = 100.0) -> str:
    values = unit * np.asarray(values)
    return f'{values.mean():.2f} ± {values.std():.2f}'


def report(cases: dict[str, Central], kinds: list[str]) -> None:
    rows = [(i, f'{kind}, {name}', case) for i, kind in enumerate(kinds) for name, case in cases.items()]
    print(f'{"test accuracy in %":36}{"mean ± sd":>15}{"lowest":>9}{"loss":>9}     mean by class')
    for i, label, case in rows:
        accuracy = np.asarray(case.accuracy[:, i])
        by_class = ' '.join(f'{100 * a:5.1f}' for a in accuracy.mean(axis=0))
        by_seed = accuracy.mean(axis=1)
        loss = np.median(case.loss[:, i])
        print(f'{label:36}{spread(by_seed):>15}{100 * by_seed.min():9.1f}{loss:9.3f}     {by_class}')
    print(f'\n{"median over seeds, by class":36}{"length of the class vectors":34}angle to the nearest other')
    for i, label, case in rows:
        vectors = class_vectors(case.variables)[:, i]
        lengths, angles = (np.median(u, axis=0) for u in (np.linalg.norm(vectors, axis=-1), nearest_angles(vectors)))
        print(f'{label:36}{" ".join(f"{u:.2f}" for u in lengths):34}{" ".join(f"{u:4.1f}" for u in angles)}')


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'{text!r} is not a whole number of at least 1')
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description='Free and uniform heads on six spiral arms.')
    parser.add_argument('--seeds', type=positive, default=5)
    parser.add_argument('--epochs', type=positive, default=201, help='of the centralised experiment')
    parser.add_argument('--rounds', type=positive, default=100, help='of the federated experiment')
    parser.add_argument('--out', type=Path, default=Path('runs/spiral'))
    parser.add_argument('--quick', action='store_true', help='a tenth of the data and 20 clients')
    args = parser.parse_args()
    sizes = {kind: tuple(n // 10 for n in number) if args.quick else number for kind, number in SIZES.items()}
    num_clients = 20 if args.quick else CLIENTS

    cases = {name: central(name, sizes, args.seeds, args.epochs) for name in HEADS}
    print(f'\nSpiral in one place, {args.epochs} epochs, {args.seeds} seeds\n')
    report(cases, list(sizes))

    print(f'\nSpiral on {num_clients} clients, Dirichlet({ALPHA}), {COHORT} a round, {args.rounds} rounds\n')
    print(f'{"":20}{"cosine between clients":>26}{"test accuracy in %":>26}')
    runs = {}
    for name in ('free', 'uniform'):
        runs[name] = [federated(name, seed, sizes['balanced'], num_clients, args.rounds) for seed in range(args.seeds)]
        agreement, accuracy = (np.array([getattr(r, field) for r in runs[name]]) for field in ('agreement', 'accuracy'))
        print(f'{name + " head":20}{spread(agreement, 1):>26}{spread(accuracy):>26}')

    usual = np.argsort([run.agreement for run in runs['free']])[args.seeds // 2]  # the median seed is drawn

    args.out.mkdir(parents=True, exist_ok=True)
    plots.save(draw_central(cases, sizes), args.out / 'spiral.png', dpi=100)
    federated_runs = {name: many[usual] for name, many in runs.items()}
    plots.save(draw_federated(federated_runs), args.out / 'spiral_federated.png', dpi=100)
    print(f'\nPictures: {args.out / "spiral.png"}, {args.out / "spiral_federated.png"}')


if __name__ == '__main__':
    main()
