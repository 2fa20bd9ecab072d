"""One federated run on CIFAR-10, CIFAR-100 or digits. The defaults are FedETF's published setting for CIFAR-10.

    python examples/cifar.py --data-dir ~/data --out runs/fedetf
    python examples/cifar.py --algorithm fedavg --dataset digits --rounds 30 --out runs/digits
    python examples/cifar.py --algorithm fedprox --head etf --loss balanced_softmax --out runs/fedprox_etf

Writes into --out: config.json, metrics.jsonl, metrics.csv, summary.json, accuracy.png and checkpoints/.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedjax_nc import (
    base,
    checkpoints,
    data,
    devices,
    evaluate,
    local,
    memory,
    models,
    plots,
    recipes,
    simulate,
    training,
)  # fmt: skip

MODELS: dict[str, Callable[..., nn.Module]] = {
    'mlp': models.MLP,
    'cnn': models.CNN,
    'cnn_mcmahan': models.McMahanCNN,
    'conv2cifar': models.Conv2Cifar,
    'moon_cnn': models.MoonCNN,
    'vgg11': models.VGG11,
    'mobilenet': models.MobileNetV2,
    'resnet20': models.ResNet20,
    'resnet18': models.ResNet18,
    'resnet34': models.ResNet34,
    'resnet50': models.ResNet50,
}
MODEL = {'cifar10': 'resnet20', 'cifar100': 'resnet20', 'digits': 'mlp'}
LR = {'cifar10': 0.04, 'cifar100': 0.01, 'digits': 0.02}
ETF = {'cnn': {'dim': 64, 'scale': 10.0}}  # FedETF's frame and first temperature; C and 1 for the other models
# What may differ when a run is resumed:
FREE = ('out', 'resume', 'rounds', 'data_dir', 'eval_every', 'clients_per_chunk', 'devices')

IMBALANCE = (
    'largest class over smallest of a long-tailed training set; it is spread over clients, who are tested on parts '
    'of the test set, as in FedLoGe'
)
PROBLEMS = (  # what a user can cause and mend
    ValueError, ImportError, OSError, MemoryError,
    data.DatasetUnavailableError, training.DivergedError, training.CheckpointError, jax.errors.JaxRuntimeError,
)  # fmt: skip


class Parser(argparse.ArgumentParser):
    """Ends with one line instead of the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f'{self.prog}: error: {message}\n')


def number(kind: type, low: float, high: float = float('inf'), open_low: bool = False) -> Callable[[str], Any]:
    """A parser of numbers in a range."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f'{text!r} is not a {"whole " if kind is int else ""}number') from None
        if not low <= value <= high or (open_low and value == low):
            above = f'above {low:g}' if open_low else f'at least {low:g}'
            bound = above + (f' and at most {high:g}' if high < float('inf') else '')
            raise argparse.ArgumentTypeError(f'{text} is out of range, it must be {bound}')
        return value

    return parse


def arguments(argv: list[str] | None) -> argparse.Namespace:
    count, positive = number(int, 1, 10**6), number(float, 0, open_low=True)
    parser = Parser(prog='cifar.py', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--dataset', choices=list(MODEL), default='cifar10')
    parser.add_argument('--data-dir', type=Path, help='where data sets lie or are put')
    parser.add_argument('--algorithm', choices=list(recipes.RECIPES), default='fedetf')
    parser.add_argument('--head', choices=list(recipes.HEADS), help="by default the algorithm's own")
    parser.add_argument('--loss', choices=list(recipes.LOSSES), help="by default the algorithm's own")
    parser.add_argument(
        '--server-optimizer', choices=list(recipes.SERVER_OPTIMIZERS), help='by default plain averaging'
    )
    parser.add_argument('--server-lr', type=positive, help="by default the server optimizer's own, 1 for sgd")
    parser.add_argument('--weigh', choices=['examples', 'alike'], help='how clients count; by default as published')
    parser.add_argument('--model', choices=list(MODELS), help='by default resnet20, and mlp for digits')
    parser.add_argument('--norm', choices=['batch', 'group'], default='batch', help='of ResNets and MobileNet')
    parser.add_argument('--clients', type=count, default=20)
    parser.add_argument('--participation', type=number(float, 0, 1, open_low=True), default=1.0, help='share a round')
    parser.add_argument('--alpha', type=positive, default=0.1, help='of the Dirichlet partition')
    parser.add_argument('--imbalance', type=number(float, 1), default=1.0, help=IMBALANCE)
    parser.add_argument('--rounds', type=count, default=200)
    parser.add_argument('--local-epochs', type=count, default=3)
    parser.add_argument('--batch-size', type=count, default=128)
    parser.add_argument('--lr', type=positive, help='by default 0.04, 0.01 for cifar100 and 0.02 for digits')
    parser.add_argument('--momentum', type=number(float, 0, 1), default=0.9)
    parser.add_argument('--weight-decay', type=number(float, 0), default=5e-4)
    parser.add_argument('--lr-decay', type=number(float, 0, 1, open_low=True), default=1.0, help='factor a round')
    parser.add_argument('--clip', type=positive, help='largest norm of a gradient')
    parser.add_argument('--seed', type=number(int, 0, 2**31 - 1), default=0)
    parser.add_argument(
        '--clients-per-chunk', type=count, help='clients side by side; chosen for the device by default'
    )
    parser.add_argument('--devices', type=count, default=1, help='that share the clients; a CPU is cut up into as many')
    parser.add_argument('--precision', choices=['float32', 'bfloat16'], default='float32')
    parser.add_argument('--eval-every', type=count, default=1)
    parser.add_argument('--max-examples', type=count, help='use a class-balanced part of the training set')
    parser.add_argument('--out', type=Path, default=Path('runs/cifar'))
    parser.add_argument('--resume', action='store_true', help='continue the run in --out, or begin it')
    args = parser.parse_args(argv)
    args.model = args.model or MODEL[args.dataset]
    args.lr = args.lr or LR[args.dataset]
    return args


def settle(args: argparse.Namespace) -> dict[str, Any]:
    """What goes into config.json, checked against the run that is resumed."""
    config = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k != 'resume'}
    path = args.out / 'config.json'
    if path.exists():
        if not args.resume:
            raise ValueError(f'{args.out} already holds a run: add --resume, or choose another --out')
        before = known(path)
        bound = ('rounds',) if args.algorithm == 'fedetf_gmv' else ()  # its memory is planned from their number
        changed = [k for k, v in config.items() if (k not in FREE or k in bound) and before.get(k) != v]
        if changed:
            said = ', '.join(f'{k} was {before.get(k)} and is now {config[k]}' for k in changed)
            raise ValueError(f'the run in {args.out} has other settings: {said}')
    return config


def known(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise ValueError(f'{path} is damaged: choose another --out')
    return content


def write(path: Path, content: dict[str, Any]) -> None:
    """JSON, written beside its place and renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    checkpoints.replace(path, json.dumps(content, indent=2) + '\n')


def load(args: argparse.Namespace) -> tuple[data.Dataset, Any, Any]:
    """The data set, the clients' training data and their local tests."""
    dataset = data.load_dataset(args.dataset, args.data_dir)
    if args.max_examples is not None:
        dataset = data.subset(dataset, args.max_examples, args.seed)
    classes = dataset.num_classes
    if args.imbalance > 1:
        kept = data.long_tail(dataset.y_train, args.imbalance, seed=args.seed)
        dataset = dataset._replace(x_train=dataset.x_train[kept], y_train=dataset.y_train[kept])
        parts = data.dirichlet_draws(dataset.y_train, args.clients, args.alpha, seed=args.seed)
        train = data.federate(dataset.x_train, dataset.y_train, parts, classes)
        total = len(dataset.y_test)
        test = data.matched_tests(train.counts, dataset.x_test, dataset.y_test, total=total, seed=args.seed)
        return dataset, train, test
    parts = data.dirichlet(dataset.y_train, args.clients, args.alpha, seed=args.seed)
    return dataset, *data.split(data.federate(dataset.x_train, dataset.y_train, parts, classes), 0.3, seed=args.seed)


def prepare(args: argparse.Namespace) -> Mesh | None:
    """The devices to use, if more than one: before anything else has touched them."""
    if args.devices == 1:
        return None
    with contextlib.suppress(RuntimeError):  # a process that has begun keeps the devices it has
        # Far more devices than cores would abort the process.
        jax.config.update('jax_num_cpu_devices', min(args.devices, max(8, os.cpu_count() or 1)))
    if len(jax.devices()) < args.devices:
        raise ValueError(f'--devices {args.devices}: at most {len(jax.devices())} can be had here')
    return devices.mesh(jax.devices()[: args.devices])


def build(args: argparse.Namespace, dataset: data.Dataset) -> recipes.Recipe:
    norm = {'norm': args.norm} if args.model.startswith(('resnet', 'mobilenet')) else {}
    module = MODELS[args.model](dtype=jnp.dtype(args.precision), **norm)
    plan = local.Plan(args.batch_size, args.local_epochs)
    etf = ETF.get(args.model, {})
    client_opt = local.sgd(args.lr, args.momentum, args.weight_decay, args.lr_decay, args.clip)
    personal_opt = local.sgd(args.lr, 0.0, 0.0, args.lr_decay)
    server_opt = None
    if args.server_optimizer or args.server_lr:
        rate = {'lr': args.server_lr} if args.server_lr else {}
        server_opt = recipes.SERVER_OPTIMIZERS[args.server_optimizer or 'sgd'](**rate)
    held = None
    if args.algorithm == 'ratioloss':
        held = recipes.auxiliary(dataset.x_train, dataset.y_train, dataset.num_classes)
    return recipes.RECIPES[args.algorithm](
        models.from_flax(module), client_opt, plan, head=args.head, loss=args.loss, server_opt=server_opt,
        personal_opt=personal_opt, rounds=args.rounds, auxiliary=held, weigh=args.weigh, **etf,
    )  # fmt: skip


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = arguments(argv)
    mesh = prepare(args)
    with checkpoints.holding(args.out):
        return run(args, mesh)


def run(args: argparse.Namespace, mesh: Mesh | None) -> dict[str, Any]:
    cohort = max(1, round(args.participation * args.clients))
    config = settle(args)
    dataset, train, test = load(args)
    recipe = build(args, dataset)
    k_init, k_train, k_tune = jax.random.split(jax.random.key(args.seed), 3)
    state = simulate.init(recipe.train, k_init, train)
    if not (args.out / 'config.json').exists():
        write(args.out / 'config.json', config)

    x_test, y_test = jnp.asarray(dataset.x_test), jnp.asarray(dataset.y_test)
    groups = evaluate.groups(jnp.sum(train.counts, axis=0))

    def stage(algorithm: base.Algorithm) -> Any:
        return simulate.compiled(simulate.make_round(algorithm, chunk=args.clients_per_chunk))

    calibrate = recipe.calibrate and stage(recipe.calibrate)

    def generic_model(state: base.State) -> tuple[base.Algorithm, base.State]:
        """What a method would deliver if training ended here."""
        if calibrate is None:
            return recipe.final, state
        begun = simulate.join(recipe.calibrate, k_tune, state.server, args.clients)
        return recipe.calibrate, calibrate(k_tune, begun, train)[0]

    def personal_models(state: base.State) -> evaluate.OverClients:
        """Those of clients that have taken part: the others have only what all began with."""
        took = simulate.participants(k_train, state.server.round, args.clients, cohort)
        tables = evaluate.per_client(recipe.train, state, test)
        return evaluate.over_clients(jnp.where(took[:, None, None], tables, 0))

    def general(state: base.State) -> dict[str, Any]:
        if not recipe.generic:
            return {'accuracy_personal': personal_models(state).mean}
        algorithm, model = generic_model(state)
        table = evaluate.generic(algorithm, model, x_test, y_test, dataset.num_classes)
        seen = {'accuracy': evaluate.accuracy(table)}
        if args.imbalance > 1:
            seen |= dict(zip(('many', 'medium', 'few'), evaluate.group_accuracy(table, groups), strict=True))
        if recipe.refines:
            trained = evaluate.generic(recipe.train, state, x_test, y_test, dataset.num_classes)
            seen['accuracy_trained'] = evaluate.accuracy(trained)
        v = state.server.variables
        if 'memory' in v.fixed:
            strength = memory.strength(v.fixed['memory'], v.fixed['head']['v'])
            seen |= {'memory_norm': strength.norm, 'memory_margin': strength.margin}
        return seen | ({'temperature': v.params['head']['scale']} if 'scale' in v.params['head'] else {})

    done = training.run(
        recipe.train, k_train, state, train, rounds=args.rounds, cohort=cohort, chunk=args.clients_per_chunk, mesh=mesh,
        evaluate=general, eval_every=args.eval_every, out=args.out, resume=args.resume, name=args.algorithm,
    )  # fmt: skip
    trained = done.state if mesh is None else jax.tree.map(jnp.asarray, jax.device_get(done.state))
    algorithm, model = generic_model(trained)
    before = None
    if recipe.generic:
        before = evaluate.over_clients(evaluate.per_client(algorithm, model, test, personal=False))

    def personalized(algorithm: base.Algorithm) -> tuple[base.State, simulate.Report]:
        return stage(algorithm)(k_tune, recipe.enter(algorithm, k_tune, model, train), train)

    tuned = True  # training that makes personal models has not diverged
    if recipe.personalize is None:
        after = personal_models(trained)
    else:
        state, report = personalized(recipe.personalize)
        tuned = all(bool(jnp.all(jnp.isfinite(u))) for u in jax.tree.leaves((state.clients, report.info.loss)))
        after = evaluate.over_clients(evaluate.per_client(recipe.personalize, state, test))
    personal = {'': after.mean, '_std': after.std, '_pooled': after.pooled, '_low': after.low}
    for name, variant in recipe.variants.items():
        tables = evaluate.per_client(variant, personalized(variant)[0], test)
        personal[f'_{name}'] = evaluate.over_clients(tables).mean
    finished = args.out / 'summary.json'
    compile_seconds = done.compile_seconds
    if not compile_seconds:  # nothing was left to train
        with contextlib.suppress(OSError, ValueError, KeyError):  # a damaged summary is made anew
            compile_seconds = known(finished)['compile_seconds']

    summary = {
        'algorithm': args.algorithm,
        'dataset': args.dataset,
        'rounds': args.rounds,
        **({'global_accuracy': done.history[-1]['accuracy']} if recipe.generic else {}),
        **{
            f'global_{name}_last5': training.last_mean(done.history, name)
            for name in ('accuracy', 'accuracy_trained', 'many', 'medium', 'few')
            if name in done.history[-1]
        },
        **{f'personal_accuracy{name}': float(value) if tuned else None for name, value in personal.items()},
        **({'personal_accuracy_before': float(before.mean)} if before else {}),
        **({'personal_accuracy_before_std': float(before.std)} if before else {}),
        'rounds_per_second': done.rounds_per_second,
        'compile_seconds': compile_seconds,
        'padded_work_share': float(np.mean([row['padded_work'] for row in done.history])),
        'device': jax.devices()[0].device_kind,
        'jax': jax.__version__,
    }
    write(args.out / 'config.json', config)  # a resumed run may be longer than it was begun
    write(finished, summary)
    shown = 'accuracy' if recipe.generic else 'accuracy_personal'
    seen = [(row['round'], row[shown]) for row in done.history if shown in row]
    curve = {args.algorithm: tuple(np.array(column) for column in zip(*seen, strict=True))}
    title = f'{args.dataset}, {args.clients} clients, Dirichlet({args.alpha:g})'
    plots.accuracy_curves(curve, title=title).savefig(args.out / 'accuracy.png', dpi=150)
    if not tuned:
        raise training.DivergedError('the personal models diverged: begin a new run with a lower --lr')
    for name in ('global_accuracy', 'global_accuracy_last5', 'personal_accuracy_before', 'personal_accuracy'):
        if name in summary:
            print(f'{name:26} {100 * summary[name]:6.2f} %')
    print(f'{"rounds_per_second":26} {summary["rounds_per_second"]:6.2f}\nwritten to {args.out}')
    return summary


def stop(number: int, frame: Any) -> NoReturn:
    raise KeyboardInterrupt(number)


if __name__ == '__main__':
    for sent in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sent, stop)
    warnings.showwarning = lambda message, *rest: print(f'cifar.py: warning: {message}', file=sys.stderr)
    try:
        main()
    except PROBLEMS as problem:
        sys.exit(f'cifar.py: error: {" ".join(str(problem).split())}')
    except KeyboardInterrupt as stopped:
        again = [*sys.argv, *(['--resume'] if '--resume' not in sys.argv else [])]
        print(f'\ncifar.py: stopped; go on with: python {shlex.join(again)}', file=sys.stderr, flush=True)
        # At once: what the library may still hold open was never finished, and is not what is resumed from.
        os._exit(128 + int(stopped.args[0] if stopped.args else signal.SIGINT))
