"""What refitting the head gains, by how it is refitted: CCVR's paper leaves the optimizer to an appendix.

    python benchmarks/ccvr_refits.py --data-dir ~/data --out runs/refits

Trains FedAvg as `ccvr_2 --scale reduced` does (CIFAR-10, Dir(0.5)) and refits the head of the last model in many ways:
on all real features, and on CCVR's virtual ones. Most ways are one change of what the table has. Can be stopped, and
goes on when called again. Writes SCENE.json there, of other seeds than 0 "SCENE, seed 1.json", and ccvr_refits.md.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from fedjax_nc import evaluate, experiments, heads, losses, models, simulate, training
from fedjax_nc.algorithms import ccvr
from fedjax_nc.base import State
from fedjax_nc.data import images
from fedjax_nc.experiments import pipeline, provenance, scene
from fedjax_nc.experiments.measures import Measures
from fedjax_nc.experiments.networks import MODELS
from fedjax_nc.experiments.setting import PIXELS, Setting
from fedjax_nc.local import Plan
from fedjax_nc.objective import objective

OPTIMIZERS: dict[str, dict[str, Any]] = {
    'SGD of rate 0.001': {'opt': optax.sgd(0.001, 0.9)},
    'SGD of rate 0.1': {'opt': optax.sgd(0.1, 0.9)},
    'Adam of rate 0.001': {'opt': optax.adam(0.001)},
    'batches of 256': {'batch_size': 256},
    "FedETF's code: rate 0.01 without momentum, batches of 128, 100 epochs": {
        'opt': optax.sgd(0.01), 'batch_size': 128, 'epochs': 100,
    },
}  # fmt: skip
REAL: dict[str, dict[str, Any]] = {
    'as in the table: SGD of rate 0.01, momentum 0.9, batches of 64, 10 epochs': {},
    '50 epochs': {'epochs': 50},
    **OPTIMIZERS,
    'Adam of rate 0.001, 200 epochs': {'opt': optax.adam(0.001), 'epochs': 200},
    'after the power transform': {'transform': ccvr.tukey()},
    'after the power transform, Adam of rate 0.001, 50 epochs': {
        'transform': ccvr.tukey(), 'opt': optax.adam(0.001), 'epochs': 50,
    },
}  # fmt: skip
VIRTUAL: dict[str, dict[str, Any]] = {
    'as in the table: 100 features a class, SGD of rate 0.01, momentum 0.9, batches of 64, 50 epochs': {},
    '500 features a class': {'samples': 500},
    '2,000 features a class': {'samples': 2000},
    '10 epochs': {'epochs': 10},
    **OPTIMIZERS,
    'no power transform': {'transform': None},
    'Gaussians of raw features, transformed afterwards': {'raw_gaussians': True},
}
EPOCHS = {'real': 10, 'virtual': 50}


def trained(setting: Setting, args: argparse.Namespace, folder: Path) -> tuple[Measures, State]:
    """FedAvg as the table has it, or what of it is still missing."""
    found = scene.load(setting, args.data_dir)
    recipe = scene.build(setting, found[0])
    measure = Measures(setting, recipe, found)
    done = training.run(
        recipe.train, measure.k_train, measure.begun(), measure.train, rounds=setting.rounds, cohort=setting.cohort,
        out=folder, resume=True, checkpoint_every=1, checkpoint_pause=pipeline.PAUSE, name=setting.label,
    )  # fmt: skip
    return measure, done.state


def refitted(measure: Measures, state: State, keys: int) -> dict[str, Any]:
    """Accuracies on the test set: of the trained model, and of each way to refit with each key."""
    setting = measure.setting
    model = models.from_flax(MODELS[setting.model](), images.pipeline(*PIXELS[setting.pixels]))
    task = objective(model, heads.linear(), losses.cross_entropy)

    def virtual(key: jax.Array, plan: Plan, **change: Any) -> jax.Array:
        stage = ccvr.calibrate(task, plan=plan, **change)
        begun = simulate.join(stage, key, state.server, setting.clients)
        after, _ = jax.jit(simulate.make_round(stage, chunk=1))(key, begun, measure.train)
        return measure.table(stage, after)

    def real(key: jax.Array, plan: Plan, **change: Any) -> jax.Array:
        server = ccvr.oracle(key, task, state.server, measure.train, plan=plan, **change)
        psi = change.get('transform')
        predicts = measure.recipe.train if psi is None else ccvr.calibrate(task, transform=psi)
        return measure.table(predicts, State(server, ()))

    result: dict[str, Any] = {'trained': float(evaluate.accuracy(measure.table(measure.recipe.train, state)))}
    for kind, refit, ways in (('real', real, REAL), ('virtual', virtual, VIRTUAL)):
        result[kind] = {}
        for name, change in ways.items():
            change = dict(change)
            plan = Plan(change.pop('batch_size', 64), change.pop('epochs', EPOCHS[kind]))
            tables = [refit(jax.random.fold_in(measure.k_tune, i), plan, **change) for i in range(keys)]
            result[kind][name] = [float(evaluate.accuracy(table)) for table in tables]
            gained = 100 * (np.mean(result[kind][name]) - result['trained'])
            print(f'{kind}, {name}: {gained:+.1f}', flush=True)
    return result


def markdown(results: dict[str, dict[str, Any]]) -> str:
    """A table of each scene."""
    lines = []
    for name, result in results.items():
        base = 100 * result['trained']
        lines += [f'| {name}: the head of FedAvg, {base:.1f} %, refitted | accuracy, % | gain |', '|---|---|---|']
        for kind, title in (('real', 'all real features'), ('virtual', 'virtual features')):
            lines.append(f'| **on {title}** | | |')
            for way, accuracies in result[kind].items():
                row = 100 * np.array(accuracies)
                spread = f' ± {row.std(ddof=1):.1f}' if len(row) > 1 else ''
                lines.append(f'| {way} | {row.mean():.1f}{spread} | {row.mean() - base:+.1f} |')
        lines += ['', f'{result["rounds"]} rounds, {result["keys"]} refits each; {result["device"]}, {result["date"]}.']
        lines.append('')
    return '\n'.join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--alpha', type=float, choices=(0.5, 0.1), default=0.5, help='of the Dirichlet partition')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--keys', type=int, default=3, help='refits of each kind')
    parser.add_argument('--rounds', type=int, help='by default those of the table')
    parser.add_argument('--data-dir', type=Path)
    parser.add_argument('--out', type=Path, required=True)
    args = parser.parse_args()

    name = f'CIFAR-10, Dir({args.alpha:g})'
    study = experiments.Study.read('ccvr_2', 'reduced').some(['FedAvg'], [name], seeds=[args.seed])
    setting = study.runs[0].setting
    assert isinstance(setting, Setting)
    if args.rounds is not None:
        setting = dataclasses.replace(setting, rounds=args.rounds)
    measure, state = trained(setting, args, args.out / setting.name)
    about = {'setting': setting.plain(), 'rounds': setting.rounds, 'keys': args.keys}
    title = f'{name}, seed {args.seed}' if args.seed else name
    pipeline.write(args.out / f'{title}.json', {**about, **refitted(measure, state, args.keys), **provenance.about()})
    text = markdown({path.stem: json.loads(path.read_text()) for path in sorted(args.out.glob('*.json'))})
    (args.out / 'ccvr_refits.md').write_text(text)
    print(text)


if __name__ == '__main__':
    main()
