"""Every method of the library on real handwritten digits, side by side.

    python benchmarks/digits.py                                     # all of them; needs no network
    python benchmarks/digits.py --methods fedavg fedetf --seeds 0

20 clients by Dirichlet(0.1), 5 of them a round, who count alike whatever their size (but in fednova and
fedavg+examples); the same small MLP, optimizer and plan for all; three seeds, for moon and fedavg+projection fifteen.
Methods whose files lie in --out are not run again. Writes METHOD.json there and digits.md, the table:

general    the generic model on the test set, mean of the last five rounds
personal   clients' models on test parts of their own data, mean over clients
PM(V)      the same models on the whole test set, mean over the classes that a client holds, then over clients
rounds/s   relative to FedAvg, round by round in alternation
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import results

from fedjax_nc import data, evaluate, local, models, simulate
from fedjax_nc.algorithms import moon
from fedjax_nc.base import Algorithm, Array, FederatedData, Model, State
from fedjax_nc.experiments import recipes
from fedjax_nc.models import layers

CLIENTS, COHORT, ALPHA, WIDTHS, TIMED = 20, 5, 0.1, (64, 64), 20
LR, PLAN, SCALE = 0.02, local.Plan(batch_size=16, epochs=10), 4.0
COLUMNS = {'general': 100, 'personal': 100, 'PM(V)': 100, 'rounds/s': 1}  # and what each is multiplied by


class Row(NamedTuple):
    method: str
    head: str | None = None
    server: str | None = None
    model: str = 'plain'  # the MLP; 'normed' with BatchNorm, 'projected' with MOON's projection
    weigh: str = 'alike'
    seeds: tuple[int, ...] = (0, 1, 2)


MANY = tuple(range(15))  # for MOON, of whose seeds three say little
ROWS = {name: Row(name, model='normed' if name == 'fedbn' else 'plain') for name in recipes.RECIPES}
ROWS['moon'] = Row('moon', seeds=MANY)
ROWS['fednova'] = Row('fednova', weigh='examples')  # or the direction of a lone step would count as that of a hundred
ROWS['fedavg+examples'] = Row('fedavg', weigh='examples')  # what fednova is to be compared with
ROWS |= {f'fedavg+{head}': Row('fedavg', head=head) for head in ('cosine', 'etf', 'bare_etf')}
ROWS |= {f'fedavg+{name}': Row('fedavg', server=name) for name in recipes.SERVER_OPTIMIZERS if name != 'sgd'}
ROWS['fedavg+projection'] = Row('fedavg', model='projected', seeds=MANY)  # what moon is to be compared with,
ROWS['fedavg+batchnorm'] = Row('fedavg', model='normed')  # and fedbn


class NormedMLP(nn.Module):
    """The MLP with BatchNorm before each ReLU, for FedBN and for what it is compared with."""

    @nn.compact
    def __call__(self, x: Array, *, mask: Array | None = None, train: bool = False) -> Array:
        x = x.reshape(len(x), -1)
        for width in WIDTHS:
            x = layers.dense(width, x.shape[-1], x.dtype)(x)
            x = jax.nn.relu(layers.BatchNorm(use_running_average=not train)(x, mask))
        return x


class Scene(NamedTuple):
    """What one seed draws."""

    train: FederatedData
    test: FederatedData  # parts of the clients' own data


def scenes(digits: data.Dataset, seeds: list[int]) -> dict[int, Scene]:
    """Populations with tables of one width, so that all are served by one compiled round."""
    drawn = {}
    for seed in seeds:
        parts = data.dirichlet(digits.y_train, CLIENTS, ALPHA, seed=seed)
        clients = data.federate(digits.x_train, digits.y_train, parts, digits.num_classes)
        drawn[seed] = Scene(*data.split(clients, 0.3, seed=seed))
    widest = [max(part.index.shape[1] for part in column) for column in zip(*drawn.values(), strict=True)]

    def padded(part: FederatedData, width: int) -> FederatedData:
        return part._replace(index=np.pad(part.index, ((0, 0), (0, width - part.index.shape[1]))))

    return {seed: Scene(*map(padded, scene, widest)) for seed, scene in drawn.items()}


class Player:
    """A method, whose programs are compiled once for all seeds."""

    def __init__(self, row: Row, digits: data.Dataset, rounds: int):
        model: Model = models.from_flax(NormedMLP() if row.model == 'normed' else models.MLP(WIDTHS))
        if row.model == 'projected':
            model = moon.projected(model)
        held = recipes.auxiliary(digits.x_train, digits.y_train, digits.num_classes)
        server_opt = recipes.SERVER_OPTIMIZERS[row.server]() if row.server else None
        self.recipe = recipes.RECIPES[row.method](
            model, local.sgd(LR), PLAN, head=row.head, server_opt=server_opt, scale=SCALE, rounds=rounds,
            personal_opt=local.sgd(LR, 0.0, 0.0), auxiliary=held, weigh=row.weigh,
        )  # fmt: skip
        self.digits, self.rounds = digits, rounds
        self.begin = jax.jit(lambda key, train: simulate.init(self.recipe.train, key, train))
        self.round = simulate.compiled(simulate.make_round(self.recipe.train, cohort=COHORT, chunk=COHORT))
        self.calibrate, self.personalize = (
            stage and simulate.compiled(simulate.make_round(stage, chunk=COHORT))
            for stage in (self.recipe.calibrate, self.recipe.personalize)
        )

    def delivered(self, key: Array, state: State, scene: Scene) -> tuple[Algorithm, State]:
        """What has the generic model, if training ended here."""
        if self.calibrate is None:
            return self.recipe.general, state
        begun = simulate.join(self.recipe.calibrate, key, state.server, CLIENTS)
        return self.recipe.calibrate, self.calibrate(key, begun, scene.train)[0]

    def play(self, seed: int, scene: Scene) -> dict[str, float]:
        """Trains, makes the personal models, and measures."""
        digits, recipe = self.digits, self.recipe
        k_init, k_train, k_tune = jax.random.split(jax.random.key(seed), 3)
        took = jnp.ones(CLIENTS, bool)
        state = self.begin(k_init, scene.train)
        general = []
        for t in range(self.rounds):
            state, _ = self.round(jax.random.fold_in(k_train, t), state, scene.train)
            if recipe.generic and t >= self.rounds - 5:
                algorithm, model = self.delivered(k_tune, state, scene)
                table = evaluate.generic(algorithm, model, digits.x_test, digits.y_test, digits.num_classes)
                general.append(float(evaluate.accuracy(table)))
        _, own = self.delivered(k_tune, state, scene)
        if self.personalize is None:
            took = simulate.participants(k_train, self.rounds, CLIENTS, COHORT)
        else:
            own, _ = self.personalize(k_tune, recipe.enter(recipe.personalize, k_tune, own, scene.train), scene.train)
        everything = data.common_test(digits.x_test, digits.y_test, CLIENTS, digits.num_classes)
        held = evaluate.per_client(recipe.final, own, everything)
        by_class = evaluate.weighted_accuracy(held, data.class_weights(scene.train, 'present'))
        tables = evaluate.per_client(recipe.final, own, scene.test)
        personal = evaluate.over_clients(jnp.where(took[:, None, None], tables, 0)).mean
        found = {'personal': float(personal), 'PM(V)': float(evaluate.over(by_class, took).mean)}
        return {'general': float(np.mean(general)), **found} if recipe.generic else found


def faster(player: Player, other: Player, seed: int, scene: Scene) -> float:
    """Rounds per second of the one over the other's, which take turns, with the same cohorts: the median of rounds."""
    key = jax.random.key(seed)
    states = [p.begin(key, scene.train) for p in (player, other)]
    seconds = np.zeros((TIMED + 1, 2))
    for t in range(TIMED + 1):
        for i, p in enumerate((player, other)):
            start = time.perf_counter()
            states[i], _ = jax.block_until_ready(p.round(jax.random.fold_in(key, t), states[i], scene.train))
            seconds[t, i] = time.perf_counter() - start
    mine, others = seconds[1:].T  # the first may compile
    return float(np.median(others / mine))


def table(found: dict[str, list[dict[str, float]]]) -> str:
    """Markdown: a row a method, mean ± standard deviation over seeds, accuracies in %."""
    lines = [f'| method | {" | ".join(COLUMNS)} |', '|---|' + '---:|' * len(COLUMNS)]
    for name, runs in found.items():
        cells = []
        for column, factor in COLUMNS.items():
            values = factor * np.array([run[column] for run in runs if column in run])
            digits = 1 if factor == 100 else 2
            cells.append(f'{values.mean():.{digits}f} ± {values.std():.{digits}f}' if len(values) else '')
        lines.append(f'| {name} | {" | ".join(cells)} |')
    return '\n'.join(lines) + '\n'


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--methods', nargs='+', choices=list(ROWS), default=list(ROWS), metavar='METHOD')
    parser.add_argument('--seeds', nargs='+', type=int, help="by default each row's own")
    parser.add_argument('--rounds', type=int, default=40)
    parser.add_argument('--out', type=Path, default=Path('runs/digits_table'))
    args = parser.parse_args(argv)
    if args.rounds < 1 or min(args.seeds or [0]) < 0:
        parser.error('--rounds must be at least 1 and no seed negative')
    return args


def main(argv: list[str] | None = None) -> str:
    args = arguments(argv)
    seeds = {name: args.seeds or list(ROWS[name].seeds) for name in args.methods}
    digits = data.load_dataset('digits')
    drawn = scenes(digits, sorted({seed for own in seeds.values() for seed in own}))
    reference = Player(ROWS['fedavg'], digits, args.rounds)
    found: dict[str, list[dict[str, float]]] = {}
    for name in args.methods:
        path, begun = args.out / f'{name}.json', time.perf_counter()
        settings = {'rounds': args.rounds, 'seeds': seeds[name]}
        if path.exists():
            known: dict[str, Any] = json.loads(path.read_text())
            if known['settings'] != settings:
                raise ValueError(f'{path} has the settings {known["settings"]}, not {settings}: choose another --out')
        else:
            player = Player(ROWS[name], digits, args.rounds)
            runs = [
                player.play(seed, drawn[seed]) | {'rounds/s': faster(player, reference, seed, drawn[seed])}
                for seed in seeds[name]
            ]
            known = {'settings': settings, 'seconds': time.perf_counter() - begun, 'runs': runs}
            results.write(path, known)
        found[name] = known['runs']
        (args.out / 'digits.md').write_text(text := table(found))
        print(f'{name}: {known["seconds"]:.0f} s', file=sys.stderr)
    print(f'\n{text}\n{args.rounds} rounds; jax {jax.__version__}, {results.device()}')
    return text


if __name__ == '__main__':
    try:
        main()
    except (ValueError, ImportError, OSError) as problem:
        sys.exit(f'digits.py: error: {" ".join(str(problem).split())}')
