"""Where label skew hurts a model, and what CCVR mends: the analyses of Luo et al. (NeurIPS 2021) on handwritten digits.

    python examples/ccvr.py [--seeds 3] [--rounds 10] [--out runs/ccvr]

Twenty clients, all in every round, hold digits that were dealt evenly or by Dirichlet(0.1). Four questions:

(a) Do the class vectors of a client's classifier tell which classes the client holds?
(b) How alike are the clients' models before they are averaged, layer by layer? (CKA on the same test images)
(c) What does the global model gain from a classifier refitted on M virtual features of each class, or on the real
    features of all clients? (The latter, the oracle, is NOT a federated method.)
(d) Which models gain most: those whose classes are further apart in feature space? (sliced Wasserstein distance of the
    Gaussians that CCVR draws from)

With the default settings: (a) after one round they do, and less so later. (b) Less with every layer, least at the
classifier, and less where labels are skewed. (c) 8.5 points of accuracy with M = 100, 6.2 with M = 10; the oracle gains
8.9. (d) No: the distance goes with accuracy, before and after calibration, but not with the gain.

Needs no network. Prints four tables and draws them in ccvr.png; ccvr-dark.png is the same for dark pages.
"""

import argparse
import functools
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from fedjax_nc import data, evaluate, gaussians, heads, local, losses, models, plots, simulate
from fedjax_nc.algorithms import ccvr, fedavg, fedprox, latest
from fedjax_nc.base import Aggregate, Algorithm, Array, FederatedData, Objective, State
from fedjax_nc.metrics import similarity
from fedjax_nc.objective import objective

KEY = jax.random.key(0)
CLIENTS, ALPHA = 20, 0.1
OPT, PLAN = local.sgd(0.02), local.Plan(batch_size=16, epochs=10)
REFIT = local.Plan(batch_size=64, epochs=50)
SAMPLES, USUAL = (0, 10, 50, 100, 500, 1000), 100
BODY = models.MLP((64, 64, 64))
LAYERS = {'Dense_0': 'dense 1', 'Dense_1': 'dense 2', 'Dense_2': 'dense 3', 'logits': 'classifier'}
COLORS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00')

LINEAR, UNIT = (
    objective(models.from_flax(BODY), head, losses.cross_entropy) for head in (heads.linear(), heads.unit_norm())
)
BASES = {  # what is calibrated; clsnorm is FedAvg whose class vectors count as unit vectors
    'FedAvg': (LINEAR, latest.keep(fedavg.algorithm(LINEAR, OPT, plan=PLAN))),
    'FedProx': (LINEAR, fedprox.algorithm(LINEAR, OPT, plan=PLAN, mu=0.1)),
    'clsnorm': (UNIT, fedavg.algorithm(UNIT, OPT, plan=PLAN)),
}


class Gain(NamedTuple):
    """Models of all seeds before and after CCVR with the usual number of samples: [S] each, accuracies in %."""

    distance: np.ndarray  # mean sliced Wasserstein distance between the Gaussians of two classes
    before: np.ndarray
    after: np.ndarray
    oracle: np.ndarray


def populations(digits: data.Dataset, seeds: int) -> dict[str, list[FederatedData]]:
    """The clients of every seed, in tables of one width so that nothing is compiled twice."""
    y = digits.y_train
    parts = {
        'even': [data.iid(y, CLIENTS, seed=seed) for seed in range(seeds)],
        'Dirichlet': [data.dirichlet(y, CLIENTS, ALPHA, seed=seed) for seed in range(seeds)],
    }
    width = max(len(rows) for many in parts.values() for dealt in many for rows in dealt)

    def federate(dealt: list[np.ndarray]) -> FederatedData:
        clients = data.federate(digits.x_train, y, dealt, digits.num_classes)
        return clients._replace(index=jnp.pad(clients.index, ((0, 0), (0, width - clients.index.shape[1]))))

    return {kind: [federate(dealt) for dealt in many] for kind, many in parts.items()}


@functools.cache
def round_of(algorithm: Algorithm) -> simulate.Round:
    """Compiled once for all seeds; it leaves the state that it is given, as all on the way are kept."""
    return jax.jit(simulate.make_round(algorithm))


def train(algorithm: Algorithm, populations: list[FederatedData], stops: Collection[int]) -> list[dict[int, State]]:
    """For every seed, the states after the rounds `stops`.

    Args:
      algorithm: with `latest.keep`, clients keep their models of before they were averaged.
      populations: the clients of each seed.
      stops: numbers of rounds.
    """
    init, run = jax.jit(simulate.init, static_argnums=0), round_of(algorithm)
    seeds = []
    for seed, clients in enumerate(populations):
        k_init, k_train = jax.random.split(jax.random.key(seed))
        states = [init(algorithm, k_init, clients)]
        for key in jax.random.split(k_train, max(stops)):
            states.append(run(key, states[-1], clients)[0])
        seeds.append({stop: states[stop] for stop in stops})
    return seeds


@jax.jit
def agreement(state: State, x: Array) -> Array:
    """Mean CKA over pairs of local models on the inputs `x`, for each of LAYERS."""
    own = state.clients.variables
    outputs = jax.vmap(lambda v: similarity.layer_outputs(BODY, v.params['body'], v.stats, x))(own)
    outputs['logits'] = jax.vmap(LINEAR.logits)(own, outputs['features'])
    return jnp.stack([similarity.mean_over_pairs(similarity.cka_matrix(outputs[layer])) for layer in LAYERS])


def norms(state: State) -> np.ndarray:
    """Lengths of the class vectors of the local classifiers: [K, C]."""
    return np.asarray(similarity.class_norms(state.clients.variables.params['head']['w']))


@functools.cache
def calibration(task: Objective, samples: int) -> Algorithm:
    return ccvr.calibrate(task, samples=samples, plan=REFIT)


@functools.cache
def observation(task: Objective) -> Algorithm:
    """CCVR, but its server refits nothing and measures how far apart the Gaussians of two classes are."""

    def server(key: Array, server: fedavg.Server, aggregate: Aggregate) -> Array:
        seen = gaussians.merge(aggregate.value['classes'], aggregate.value['scatter'])
        return similarity.separability(key, seen.mean, seen.cov, seen.count)

    return calibration(task, USUAL)._replace(server=server)


@functools.partial(jax.jit, static_argnums=0)
def once(stage: Algorithm, server: fedavg.Server, clients: FederatedData) -> State:
    """One round of a stage on a trained model, compiled once for all of a kind."""
    return simulate.make_round(stage)(KEY, simulate.join(stage, KEY, server, clients.num_clients), clients)[0]


def calibrated(task: Objective, samples: int, state: State, clients: FederatedData, digits: data.Dataset) -> float:
    """Test accuracy after CCVR; without samples, that of the trained model."""
    stage = calibration(task, samples)
    return accuracy(stage, once(stage, state.server, clients) if samples else state, digits)


def bound(task: Objective, state: State, clients: FederatedData, digits: data.Dataset) -> float:
    """Test accuracy after as many epochs on the real features of all clients, seen through the same psi."""
    server = ccvr.oracle(KEY, task, state.server, clients, transform=ccvr.tukey(), plan=REFIT)
    return accuracy(calibration(task, USUAL), State(server, ()), digits)


def gain(task: Objective, states: list[State], populations: list[FederatedData], digits: data.Dataset) -> Gain:
    measured = [
        Gain(
            np.array(once(observation(task), state.server, clients).server),
            np.array(calibrated(task, 0, state, clients, digits)),
            np.array(calibrated(task, USUAL, state, clients, digits)),
            np.array(bound(task, state, clients, digits)),
        )
        for state, clients in zip(states, populations, strict=True)
    ]
    return Gain(*map(np.stack, zip(*measured, strict=True)))


def accuracy(algorithm: Algorithm, state: State, digits: data.Dataset) -> float:
    """In %."""
    table = evaluate.generic(algorithm, state, digits.x_test, digits.y_test, digits.num_classes)
    return 100 * float(evaluate.accuracy(table))


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(np.ravel(a), np.ravel(b))[0, 1])


def draw_matrix(figure: Figure, axes: Axes, values: np.ndarray, title: str, label: str, gamma: float = 1.0) -> None:
    """A matrix [K, C] with clients from left to right; a small gamma spreads small values."""
    image = axes.imshow(values.T, aspect='auto', interpolation='nearest', norm=PowerNorm(gamma))
    axes.set(title=title, xlabel='client', ylabel='class')
    axes.set(xticks=range(0, len(values), 5), yticks=range(0, values.shape[1], 3))
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=axes, pad=0.02, label=label)
    bar.outline.set_visible(False)


def draw_agreement(axes: Axes, alike: dict[tuple[str, int], np.ndarray]) -> None:
    for (kind, round), values in alike.items():
        look = {'color': COLORS[kind == 'Dirichlet'], 'fmt': 's--' if round == 1 else 'o-', 'capsize': 3}
        axes.errorbar([*LAYERS.values()], values.mean(0), values.std(0), label=f'{kind}, round {round}', **look)
    axes.set(title='(b) How alike local models are', ylabel='CKA, mean over pairs of clients', ylim=(0, 1.03))
    axes.set_xlabel('layer')
    axes.legend(frameon=False, fontsize=9)


def draw_samples(axes: Axes, sweep: np.ndarray, oracle: np.ndarray) -> None:
    """Accuracies `sweep [S, numbers of samples]` over SAMPLES, of which the first is 0."""
    place = np.arange(1, len(SAMPLES))  # evenly, so that small numbers stand apart
    axes.axhline(oracle.mean(), color=COLORS[2], linestyle='--', label='oracle: real features of all clients, mean')
    values = sweep[:, 1:]
    axes.errorbar(place, values.mean(0), values.std(0), fmt='o-', capsize=3, color=COLORS[0], label='CCVR')
    axes.axhline(sweep[:, 0].mean(), color='#808080', linestyle=':', label='FedAvg as it is, mean')
    axes.set_xticks(place, labels=[str(m) for m in SAMPLES[1:]])
    axes.set(title='(c) Accuracy after calibration', ylabel='test accuracy [%]', xlabel='virtual features M of a class')
    axes.legend(frameon=False, fontsize=9, loc='lower right', bbox_to_anchor=(1, 0.08))


def draw_gains(axes: Axes, gains: dict[str, Gain]) -> None:
    """One mark for every model."""
    for (name, seen), color, marker in zip(gains.items(), COLORS, 'osD^v', strict=False):
        axes.scatter(seen.distance, seen.after - seen.before, color=color, marker=marker, s=36, label=name)
    axes.axhline(0, color='#808080', linewidth=0.8)
    axes.set(title=f'(d) Gain of CCVR, M = {USUAL}', ylabel='points of accuracy gained')
    axes.set_xlabel('distance of classes (mean sliced Wasserstein)')
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.35 * (high - low))  # room for the legend
    axes.legend(frameon=False, fontsize=8, loc='upper center', ncols=2, columnspacing=1.0, handletextpad=0.2)


def spread(values: np.ndarray, digits: int = 1) -> str:
    return f'{values.mean():.{digits}f} ± {values.std():.{digits}f}'


def table(title: str, columns: Collection[str], rows: dict[str, list[str]]) -> None:
    for name, cells in {title: columns, **rows}.items():
        print(f'{name:28}' + ''.join(f'{cell:>16}' for cell in cells))
    print(flush=True)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'{text!r} is not a whole number of at least 1')
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description='The analyses of CCVR on digits.')
    parser.add_argument('--seeds', type=positive, default=3)
    parser.add_argument('--rounds', type=positive, default=10, help='of the models that are looked at')
    parser.add_argument('--out', type=Path, default=Path('runs/ccvr'))
    args = parser.parse_args()
    last = args.rounds
    lengths = sorted({max(last // 2, 1), last, 2 * last})

    digits = data.load_dataset('digits')
    clients = populations(digits, args.seeds)
    skewed, runs = clients['Dirichlet'], {}
    for kind, stops in (('even', {1, last}), ('Dirichlet', {1, *lengths})):
        runs[kind] = train(BASES['FedAvg'][1], clients[kind], stops)
    print(f'Handwritten digits, {CLIENTS} clients dealt evenly or by Dirichlet({ALPHA}), all in every round;')
    print(f'mean and standard deviation over {args.seeds} seeds\n')

    lines, alike = {}, {}
    for kind, round in [(kind, round) for kind in clients for round in sorted({1, last})]:
        seen = [(norms(run[round]), many.counts) for run, many in zip(runs[kind], clients[kind], strict=True)]
        uneven = np.array([np.mean(u.std(axis=1) / u.mean(axis=1)) for u, _ in seen])
        follows = np.array([correlation(u, held) for u, held in seen])
        lines[f'{kind}, round {round}'] = [spread(uneven, 2), spread(follows, 2)]
        alike[kind, round] = np.stack([agreement(run[round], digits.x_test) for run in runs[kind]])
    table('(a) lengths, class vectors', ('sd / mean', 'corr. to counts'), lines)
    lines = {f'{kind}, round {round}': [spread(u, 2) for u in values.T] for (kind, round), values in alike.items()}
    table('(b) CKA of local models', LAYERS.values(), lines)

    gains = {}
    for name, (task, algorithm) in BASES.items():
        for stop in lengths if name == 'FedAvg' else [last]:
            trained = runs['Dirichlet'] if name == 'FedAvg' else train(algorithm, skewed, {last})
            gains[f'{name}, {stop} rounds'] = gain(task, [run[stop] for run in trained], skewed, digits)
    pairs = [(run[last], many) for run, many in zip(runs['Dirichlet'], skewed, strict=True)]
    sweep = np.array([[calibrated(LINEAR, m, *pair, digits) for m in SAMPLES] for pair in pairs])
    oracle = gains[f'FedAvg, {last} rounds'].oracle
    lines = {f'M = {m}' if m else 'as it is': [spread(u)] for m, u in zip(SAMPLES, sweep.T, strict=True)}
    table(f'(c) FedAvg, {last} rounds', ['accuracy, %'], {**lines, 'oracle, not federated': [spread(oracle)]})
    lines = {
        name: [spread(u.distance, 2), *map(spread, (u.before, u.after, u.after - u.before, u.oracle))]
        for name, u in gains.items()
    }
    table(f'(d) CCVR with M = {USUAL}', ('distance', 'before, %', 'after, %', 'gain', 'oracle, %'), lines)
    far, before, after = (np.stack([u[i] for u in gains.values()]) for i in range(3))
    print(f'Over all of these, distance correlates with accuracy before: {correlation(far, before):.2f}, '
          f'after: {correlation(far, after):.2f}, with the gain: {correlation(far, after - before):.2f}')  # fmt: skip

    figure = Figure(figsize=(13.5, 6.9), layout='constrained', facecolor='white')
    top, bottom = figure.subplots(2, 3, height_ratios=(0.8, 1))
    draw_matrix(figure, top[0], np.asarray(skewed[0].counts), '(a1) What clients hold', 'examples', gamma=0.5)
    for i, (axes, round) in enumerate(zip(top[1:], (1, last), strict=True), 2):
        title = f'(a{i}) Their classifiers, round {round}'
        draw_matrix(figure, axes, norms(runs['Dirichlet'][0][round]), title, 'length of class vector')
    draw_agreement(bottom[0], alike)
    draw_samples(bottom[1], sweep, oracle)
    draw_gains(bottom[2], gains)
    for axes in bottom:
        axes.grid(color='#e4e4e4', linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[['top', 'right']].set_visible(False)
    figure.supxlabel(
        f'(a): the first of {args.seeds} seeds, Dirichlet({ALPHA}). (b), (c): means over {args.seeds} seeds; bars: one '
        'standard deviation to either side. (d): one mark for each seed.',
        fontsize=9,
    )
    args.out.mkdir(parents=True, exist_ok=True)
    plots.save(figure, args.out / 'ccvr.png', dpi=100)
    print(f'\nPicture: {args.out / "ccvr.png"}')


if __name__ == '__main__':
    main()
