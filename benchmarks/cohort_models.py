"""Whose personal models a table shows: all clients' latest, or those of the clients of one round?

    python benchmarks/cohort_models.py --data-dir ~/data --out runs/cohort
    python benchmarks/cohort_models.py --data-dir ~/data --out runs/cohort --method FedNH

Trains a row of FedNH's Table 1 (CIFAR-10, Dir(0.3)) as `fednh_1 --scale reduced` does. The released code of FedNH tests
after each round the ten clients that took part, with the models that they have just trained, and says nothing of the
others. So this does in each of the last --last rounds, on the first --images test images, beside the generic model on
all of them, and says what PM(V) and PM(L) come out as if those of one round are taken, and which round. Can be stopped,
and goes on when called again. Writes METHOD.json there, of other seeds than 0 "METHOD, seed 1.json", and
cohort_models.md.
"""

import argparse
import json
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from fedjax_nc import data, evaluate, experiments, training, tree
from fedjax_nc.base import State
from fedjax_nc.experiments import pipeline, provenance, scene
from fedjax_nc.experiments.measures import Measures
from fedjax_nc.experiments.setting import Setting

KINDS: dict[Literal['present', 'labels'], str] = {'present': 'PM(V)', 'labels': 'PM(L)'}


def measured(setting: Setting, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Trains, and returns what its summary says and a row of each of the last rounds."""
    found = scene.load(setting, args.data_dir)
    dataset, train, _ = found
    recipe = scene.build(setting, dataset)
    measure = Measures(setting, recipe, found)
    tests = data.common_test(
        dataset.x_test[: args.images], dataset.y_test[: args.images], setting.cohort, dataset.num_classes
    )
    weights = {kind: data.class_weights(train, kind) for kind in KINDS}
    path = folder / 'cohort.jsonl'

    def on_round(row: dict[str, Any], state: State) -> None:
        if row['round'] <= setting.rounds - args.last:
            return
        ids = jnp.flatnonzero(state.clients.round == row['round'] - 1)  # whose latest work is of this round
        cohort = State(state.server, tree.take(state.clients, ids))
        tables = evaluate.per_client(recipe.train, cohort, tests)
        told = {name: evaluate.weighted_accuracy(tables, weights[kind][ids]) for kind, name in KINDS.items()}
        seen = {
            'round': row['round'],
            'images': args.images,
            'GM': float(evaluate.accuracy(measure.table(recipe.general, state))),
            **{name: float(jnp.mean(values)) for name, values in told.items()},
            'clients': {name: np.asarray(values).tolist() for name, values in told.items()},
        }
        with path.open('a') as file:
            file.write(json.dumps(seen) + '\n')

    done = training.run(
        recipe.train, measure.k_train, measure.begun(), train, rounds=setting.rounds, cohort=setting.cohort,
        out=folder, resume=True, checkpoint_pause=pipeline.PAUSE, on_round=on_round, name=setting.label,
    )  # fmt: skip
    told, _, _ = measure.personal(done.state, measure.delivered(done.state))
    rows = map(json.loads, path.read_text().splitlines() if path.exists() else ())
    rounds = {row['round']: row for row in rows if row.get('images') == args.images}  # the last of each counts
    wanted = range(setting.rounds - args.last + 1, setting.rounds + 1)
    if not {*wanted} <= {*rounds}:
        raise ValueError(f'{folder} was measured by other --images or fewer rounds: take another --out, or delete it')
    return {
        'setting': setting.plain(),
        'images': args.images,
        'all': {name: told[f'personal_accuracy_{kind}'] for kind, name in KINDS.items()},
        'rounds': [rounds[t] for t in wanted],
        'of_all': told['clients'],
        **provenance.about(),
    }


def choices(result: dict[str, Any]) -> dict[str, list[float]]:
    """GM, PM(V) and PM(L) of what may be taken for a method's personal accuracy, by name."""
    rounds = result['rounds']
    table = np.array([[row['GM'], *(row[name] for name in KINDS.values())] for row in rounds])
    spread = np.mean([[np.std(row['clients'][name]) for name in KINDS.values()] for row in rounds], axis=0)
    return {
        "all clients' latest models": [float('nan'), *result['all'].values()],
        f'clients of a round, mean of the last {len(rounds)}': table.mean(0).tolist(),
        '.. standard deviation between rounds': table.std(0).tolist(),
        '.. between the clients of one': [float('nan'), *spread.tolist()],
        '.. the last round': table[-1].tolist(),
        **{
            f'.. the round of the best {name}': table[table[:, column].argmax()].tolist()
            for column, name in enumerate(['GM', *KINDS.values()])
        },
    }


def markdown(results: dict[str, dict[str, Any]]) -> str:
    """A table of each method."""
    lines = []
    for method, result in results.items():
        lines += [f'| {method}, % | GM | PM(V) | PM(L) |', '|---|---|---|---|']
        for name, values in choices(result).items():
            lines.append(f'| {name} | ' + ' | '.join('' if np.isnan(v) else f'{100 * v:.1f}' for v in values) + ' |')
        lines += ['', f'{result["images"]} test images for clients; {result["device"]}, {result["date"]}.', '']
    return '\n'.join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--method', choices=('FedAvg', 'FedNH'), default='FedAvg', help='a row of the table')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--last', type=int, default=100, help='rounds at the end whose clients are tested')
    parser.add_argument('--images', type=int, default=2000, help='test images for each client of a round')
    parser.add_argument('--data-dir', type=Path)
    parser.add_argument('--out', type=Path, required=True)
    args = parser.parse_args()

    study = experiments.Study.read('fednh_1', 'reduced')
    setting = study.some([args.method], seeds=[args.seed]).runs[0].setting
    assert isinstance(setting, Setting)
    result = measured(setting, args, args.out / setting.name)
    name = f'{args.method}, seed {args.seed}' if args.seed else args.method
    pipeline.write(args.out / f'{name}.json', result)
    results = {path.stem: json.loads(path.read_text()) for path in sorted(args.out.glob('*.json'))}
    text = markdown(results)
    (args.out / 'cohort_models.md').write_text(text)
    print(text)


if __name__ == '__main__':
    main()
