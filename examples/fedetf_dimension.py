"""How many dimensions FedETF's classifier needs, on real handwritten digits spread over 20 clients.

    python examples/fedetf_dimension.py [--seeds 3] [--rounds 30] [--dims 9 10 32 64 128 256] [--out runs/dimension]

The projection maps features to d dimensions, in which the simplex ETF of C classes lies; any d of at least C - 1 will
do. For each d: accuracy of the general model on the test set, and NC2 error, the mean gap between the cosines of
centred class means and those of a simplex ETF, before the projection and after it, as means of the last five rounds.

Needs no network. Prints a table and writes fedetf_dimension.png; fedetf_dimension-dark.png is the same for dark pages.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from fedjax_nc import data, evaluate, heads, local, models, plots, simulate
from fedjax_nc.algorithms import fedetf
from fedjax_nc.base import Array, FederatedData, State
from fedjax_nc.metrics import collapse

CLIENTS, COHORT, ALPHA = 20, 5, 0.1
LR, PLAN, SCALE, LAST = 0.02, local.Plan(batch_size=16, epochs=10), 4.0, 5


class Measured(NamedTuple):
    """What is measured after a round, scalars; in results [S, R]."""

    accuracy: Array
    nc2_features: Array  # before the projection
    nc2_projected: Array


def trainer(dim: int, digits: data.Dataset) -> Callable[[Array, FederatedData, Array], Measured]:
    """`(key, clients, keys of the rounds [R]) -> what was measured [R]`, compiled once for all seeds."""
    model = models.from_flax(models.MLP((64, 64)))
    algorithm = fedetf.algorithm(model, local.sgd(LR), dim=dim, scale=SCALE, plan=PLAN)
    round = simulate.make_round(algorithm, cohort=COHORT)
    x, y, classes = digits.x_test, digits.y_test, digits.num_classes

    def measure(state: State) -> Measured:
        v = state.server.variables
        z, _ = model.features(v.params['body'], v.stats, jnp.asarray(x), None, None)
        table = evaluate.generic(algorithm, state, x, y, classes)
        projected = heads.normalize(heads.dense(v.params['head']['proj'], z))
        return Measured(evaluate.accuracy(table), *(collapse.nc2(u, y, classes) for u in (z, projected)))

    @jax.jit
    def train(key: Array, clients: FederatedData, keys: Array) -> Measured:
        def step(state: State, key: Array) -> tuple[State, Measured]:
            state, _ = round(key, state, clients)
            return state, measure(state)

        return jax.lax.scan(step, simulate.init(algorithm, key, clients), keys)[1]

    return train


def populations(digits: data.Dataset, seeds: int) -> list[FederatedData]:
    """The training data of every seed, in tables of one width so that training is compiled once."""
    every = []
    for seed in range(seeds):
        parts = data.dirichlet(digits.y_train, CLIENTS, ALPHA, seed=seed)
        clients = data.federate(digits.x_train, digits.y_train, parts, digits.num_classes)
        every.append(data.split(clients, 0.3, seed=seed)[0])  # as in quickstart.py, which tests on the other part
    width = max(clients.index.shape[1] for clients in every)
    return [c._replace(index=jnp.pad(c.index, ((0, 0), (0, width - c.index.shape[1])))) for c in every]


def draw(results: dict[int, Measured]) -> Figure:
    """Accuracy and NC2 error over the dimension, with a bar of one standard deviation to either side."""
    figure = Figure(figsize=(8.4, 3.7), layout='constrained', facecolor='white')
    left, right = figure.subplots(1, 2)
    dims = list(results)
    for axes, field, label, look, shift in (
        (left, 'accuracy', None, {'fmt': 'o-', 'color': '#0072B2'}, 0.0),
        (right, 'nc2_features', 'before the projection', {'fmt': 's--', 'color': '#D55E00'}, -0.06),
        (right, 'nc2_projected', 'after it', {'fmt': 'o-', 'color': '#0072B2'}, 0.06),
    ):
        values = np.array([getattr(results[d], field) for d in dims]) * (100 if field == 'accuracy' else 1)
        place = np.arange(len(dims)) + shift  # evenly, so that 9 and 10 stand apart
        axes.errorbar(place, values.mean(1), values.std(1), capsize=3, label=label, **look)
    left.set(ylabel='test accuracy [%]', title='General model')
    right.set(ylabel='NC2 error of class means', title='0 would be a simplex ETF', ylim=(0, None))
    right.legend(frameon=False, loc='lower right')
    seeds = len(results[dims[0]].accuracy)
    figure.supxlabel(f'Marks: means over {seeds} seeds; bars: one standard deviation to either side.', fontsize=8)
    for axes in (left, right):
        axes.set_xticks(np.arange(len(dims)), labels=[str(d) for d in dims])
        axes.set(xlabel='dimensions d of the ETF')
        axes.grid(color='#e4e4e4', linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[['top', 'right']].set_visible(False)
    return figure


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'{text!r} is not a whole number of at least 1')
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description="FedETF's accuracy and neural collapse over the dimension of the ETF.")
    parser.add_argument('--seeds', type=positive, default=3)
    parser.add_argument('--rounds', type=positive, default=30)
    parser.add_argument('--dims', type=positive, nargs='+', default=[9, 10, 32, 64, 128, 256])
    parser.add_argument('--out', type=Path, default=Path('runs/dimension'))
    args = parser.parse_args()

    digits = data.load_dataset('digits')
    if min(args.dims) < digits.num_classes - 1:
        parser.error(
            f'a simplex ETF of {digits.num_classes} classes needs at least {digits.num_classes - 1} dimensions'
        )
    clients = populations(digits, args.seeds)
    print(f'Handwritten digits, {CLIENTS} clients, Dirichlet({ALPHA}), {COHORT} a round, {args.rounds} rounds,')
    print(f'mean of the last {min(LAST, args.rounds)} rounds; mean and standard deviation over {args.seeds} seeds\n')
    print(f'{"d":>5}{"accuracy in %":>18}{"NC2 of features":>22}{"NC2 after projection":>24}')
    results = {}
    for dim in args.dims:
        train = trainer(dim, digits)
        runs = []
        for seed, mine in enumerate(clients):
            k_init, k_train = jax.random.split(jax.random.key(seed))
            runs.append(train(k_init, mine, jax.random.split(k_train, args.rounds)))
        results[dim] = jax.tree.map(lambda *u: np.array([np.mean(v[-LAST:]) for v in u]), *runs)
        accuracy, before, after = results[dim]
        print(f'{dim:5}{100 * accuracy.mean():11.1f} ± {100 * accuracy.std():4.1f}{before.mean():14.3f} ± '
              f'{before.std():.3f}{after.mean():16.3f} ± {after.std():.3f}', flush=True)  # fmt: skip

    args.out.mkdir(parents=True, exist_ok=True)
    plots.save(draw(results), args.out / 'fedetf_dimension.png', dpi=120)
    print(f'\nPicture: {args.out / "fedetf_dimension.png"}')


if __name__ == '__main__':
    main()
