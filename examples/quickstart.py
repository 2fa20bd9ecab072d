"""FedAvg against FedETF on real handwritten digits, spread very unevenly over 20 clients.

    python examples/quickstart.py [--seeds 3] [--rounds 30] [--out runs/quickstart]

Needs no network. Prints a table and writes accuracy.png and clients.png, and the same for dark pages, NAME-dark.png.
"""

import argparse
from pathlib import Path

import jax
import numpy as np

from fedjax_nc import data, evaluate, local, models, plots, simulate, training
from fedjax_nc.experiments import recipes

CLIENTS, COHORT, ALPHA = 20, 5, 0.1
LR, PLAN, SCALE = 0.02, local.Plan(batch_size=16, epochs=10), 4.0


def play(name: str, seed: int, rounds: int, digits: data.Dataset, parts: list[np.ndarray]) -> dict:
    """Trains one method, makes the personal models, and returns its accuracies."""
    clients = data.federate(digits.x_train, digits.y_train, parts, digits.num_classes)
    train, test = data.split(clients, 0.3, seed=seed)
    recipe = recipes.RECIPES[name](models.from_flax(models.MLP((64, 64))), local.sgd(LR), PLAN, scale=SCALE)

    def general(state):
        table = evaluate.generic(recipe.train, state, digits.x_test, digits.y_test, digits.num_classes)
        return {'accuracy': evaluate.accuracy(table)}

    k_init, k_train, k_tune = jax.random.split(jax.random.key(seed), 3)
    state = simulate.compiled_init(recipe.train)(k_init, train)
    run = training.run(
        recipe.train, k_train, state, train, rounds=rounds, cohort=COHORT, evaluate=general, name=f'{name}, seed {seed}'
    )
    before = evaluate.over_clients(evaluate.per_client(recipe.train, run.state, test, personal=False))
    state = simulate.join(recipe.personalize, k_tune, run.state.server, train.num_clients)
    state, _ = simulate.compiled(simulate.make_round(recipe.personalize), once=True)(k_tune, state, train)
    after = evaluate.over_clients(evaluate.per_client(recipe.personalize, state, test))
    return {
        'curve': [row['accuracy'] for row in run.history],
        f'general, last {min(5, rounds)} rounds': training.last_mean(run.history),
        'general, mean of all rounds': float(np.mean([row['accuracy'] for row in run.history])),
        'personal, before tuning': float(before.mean),
        'personal, after tuning': float(after.mean),
    }


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'{text!r} is not a whole number of at least 1')
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description='FedAvg against FedETF on digits.')
    parser.add_argument('--seeds', type=positive, default=3)
    parser.add_argument('--rounds', type=positive, default=30)
    parser.add_argument('--out', type=Path, default=Path('runs/quickstart'))
    args = parser.parse_args()
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f'--out {args.out} cannot be made a directory: {error.strerror}')

    digits = data.load_dataset('digits')
    results: dict[str, list[dict]] = {'fedavg': [], 'fedetf': []}
    for seed in range(args.seeds):
        parts = data.dirichlet(digits.y_train, CLIENTS, ALPHA, seed=seed)
        for name, runs in results.items():
            runs.append(play(name, seed, args.rounds, digits, parts))

    print(
        f'\nHandwritten digits, {CLIENTS} clients, Dirichlet({ALPHA}), {COHORT} clients a round, {args.rounds} rounds,'
    )
    print(f'accuracy in %, mean and standard deviation over {args.seeds} seeds\n')
    print(f'{"":30}' + ''.join(f'{name:>16}' for name in results))
    for row in [key for key in results['fedavg'][0] if key != 'curve']:
        cells = [100 * np.array([run[row] for run in runs]) for runs in results.values()]
        print(f'{row:30}' + ''.join(f'{c.mean():9.1f} ± {c.std():4.1f}' for c in cells))

    curves = {
        label: (np.arange(1, args.rounds + 1), np.array([run['curve'] for run in results[name]]))
        for name, label in (('fedetf', 'FedETF'), ('fedavg', 'FedAvg'))
    }
    title = f'Handwritten digits, {CLIENTS} clients, Dirichlet({ALPHA}), {COHORT} a round'
    plots.save(plots.accuracy_curves(curves, title=title), args.out / 'accuracy.png', dpi=150)
    parts = data.dirichlet(digits.y_train, CLIENTS, ALPHA, seed=0)
    federated = data.federate(digits.x_train, digits.y_train, parts, digits.num_classes)
    plots.save(plots.class_distribution(federated), args.out / 'clients.png', dpi=150)
    print(f'\nPictures: {args.out / "accuracy.png"}, {args.out / "clients.png"}')


if __name__ == '__main__':
    main()
