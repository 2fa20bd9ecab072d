"""A run from a command line. Whatever a user can cause and mend ends in one line."""

import argparse
import ast
import contextlib
import dataclasses
import gc
import json
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import jax
from jax.sharding import Mesh

from fedjax_nc import data, devices, training, watch
from fedjax_nc.experiments import networks, pipeline, recipes
from fedjax_nc.experiments.probes import PROBES
from fedjax_nc.experiments.setting import (
    DATASETS,
    FEATURES,
    KNOBS,
    LOADERS,
    NATURAL,
    PARTITIONS,
    PERSONAL,
    TESTS,
    Setting,
    described,
    knobs,
    partition,
)

IMBALANCE = (
    'largest class over smallest of a long-tailed training set; it is spread over clients, who are tested on parts '
    'of the test set, as in FedLoGe'
)
VALUES = 'a value is JSON or a word, as in \'features=["a", "b"]\''
SIDE_BY_SIDE = (
    'clients side by side, and to which fewer they go on as others are done, such as 10 4 2 1; by default chosen for '
    'the device'
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


def options(text: str) -> dict[str, Any]:
    """Parses NAME=VALUE, where VALUE is JSON, a number, list, True, False or None as Python writes them, or a word."""
    name, given, value = text.partition('=')
    if not given or not name.isidentifier():
        raise argparse.ArgumentTypeError(f'{text!r} is not NAME=VALUE')
    with contextlib.suppress(ValueError):
        return {name: json.loads(value)}
    with contextlib.suppress(ValueError, SyntaxError):
        if isinstance(known := ast.literal_eval(value), bool | int | float | list | None):
            return {name: known}
    return {name: value}


def arguments(argv: list[str] | None, prog: str, description: str) -> argparse.Namespace:
    """A command line, with the defaults of `Setting`."""
    count, positive = number(int, 1, 10**6), number(float, 0, open_low=True)
    parser = Parser(prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--dataset', help=f'{", ".join(DATASETS)}; or NAME{", NAME".join(LOADERS)} in --data-dir')
    parser.add_argument(
        '--loading',
        nargs='+',
        type=options,
        metavar='NAME=VALUE',
        help=f'further arguments of what loads such a file; {VALUES}',
    )
    parser.add_argument('--data-dir', type=Path, help='where data sets lie or are put')
    parser.add_argument('--algorithm', help=f'{", ".join(recipes.RECIPES)}; or MODULE:FACTORY of your own')
    parser.add_argument(
        '--options',
        nargs='+',
        type=options,
        metavar='NAME=VALUE',
        help=f"further arguments of the algorithm's factory; {VALUES}",
    )
    mine = "or MODULE:ATTRIBUTE of your own; by default the algorithm's"
    parser.add_argument('--head', help=f'{", ".join(recipes.HEADS)}; {mine}')
    parser.add_argument('--loss', help=f'{", ".join(recipes.LOSSES)}; {mine}')
    parser.add_argument(
        '--server-optimizer',
        help=f'{", ".join(recipes.SERVER_OPTIMIZERS)}; or MODULE:FUNCTION of your own, such as optax:lion; by default '
        'plain averaging',
    )
    parser.add_argument('--server-lr', type=positive, help="by default the server optimizer's own, 1 for sgd")
    parser.add_argument('--server-momentum', type=number(float, 0, 1), help="by default the server optimizer's own")
    parser.add_argument('--weigh', choices=['examples', 'alike'], help='how clients count; by default as published')
    parser.add_argument(
        '--model',
        help=f'{", ".join(networks.MODELS)}; or MODULE:ATTRIBUTE of your own; by default resnet20, '
        'resnet18 for tiny_imagenet, and mlp for digits and tables',
    )
    parser.add_argument('--norm', choices=['batch', 'group'], help='of ResNets and MobileNet; by default batch')
    parser.add_argument('--crop', type=number(int, 0), help='pixels by which training images are cropped at random')
    parser.add_argument('--flip', action='store_true', default=None, help='mirror training images at random')
    parser.add_argument('--clients', type=count)
    parser.add_argument('--participation', type=number(float, 0, 1, open_low=True), help='share a round')
    parser.add_argument(
        '--partition',
        help=f'{", ".join((*PARTITIONS, NATURAL))}; or MODULE:FUNCTION of your own; by default dirichlet, natural for '
        'femnist',
    )
    parser.add_argument('--alpha', type=positive, help='of Dirichlet partitions')
    parser.add_argument('--classes-per-client', type=count, help='of shards, and the fewest of uneven_classes')
    parser.add_argument('--most-classes', type=count, help='of uneven_classes')
    parser.add_argument('--exponent', type=number(float, 0), help='of power_law')
    parser.add_argument('--min-size', type=count, help='examples of the smallest client; of Dirichlet and power_law')
    parser.add_argument('--features', choices=list(FEATURES), help='whether clients see the same things differently')
    parser.add_argument('--noise', type=number(float, 0), help='largest variance of noisy features')
    parser.add_argument(
        '--tests', choices=TESTS, help='what clients are tested on; by default split, matched where it is long-tailed'
    )
    parser.add_argument('--test-share', type=number(float, 0, 1, open_low=True), help="of clients' examples")
    parser.add_argument('--imbalance', type=number(float, 1), help=IMBALANCE)
    parser.add_argument(
        '--validation',
        type=number(float, 0, 1),
        metavar='SHARE',
        help="of clients' training examples, which takes the place of the test set: choose rates and options so",
    )
    parser.add_argument('--rounds', type=count)
    parser.add_argument('--local-epochs', type=count)
    parser.add_argument('--batch-size', type=count)
    parser.add_argument(
        '--lr', type=positive, help='by default 0.04, 0.01 for cifar100 and tiny_imagenet, 0.02 for digits'
    )
    parser.add_argument('--momentum', type=number(float, 0, 1))
    parser.add_argument('--weight-decay', type=number(float, 0))
    parser.add_argument('--lr-decay', type=number(float, 0, 1, open_low=True), help='factor a round')
    parser.add_argument('--clip', type=positive, help='largest norm of a gradient')
    parser.add_argument(
        '--personal',
        choices=PERSONAL,
        help='personal models as the algorithm makes them, or latest local ones; by default its own',
    )
    parser.add_argument('--seed', type=number(int, 0, 2**31 - 1))
    parser.add_argument('--clients-per-chunk', type=count, nargs='+', metavar='CLIENTS', help=SIDE_BY_SIDE)
    parser.add_argument(
        '--tune',
        action='store_true',
        help='first measure how rounds are fastest here; kept in tuning.json beside --out',
    )
    parser.add_argument(
        '--host', action='store_true', help='examples stay in main memory or on disk: for sets larger than the device'
    )
    parser.add_argument('--devices', type=count, default=1, help='that share the clients; a CPU is cut up into as many')
    parser.add_argument('--precision', choices=['float32', 'bfloat16'])
    parser.add_argument('--eval-every', type=count)
    parser.add_argument('--eval-last', type=count, help='last rounds, over which the summary has a mean; by default 5')
    parser.add_argument(
        '--probes',
        nargs='+',
        metavar='PROBE',
        help=f'what else is measured of the generic model: {", ".join(PROBES)}; or MODULE:FUNCTION of your own',
    )
    parser.add_argument('--max-examples', type=count, help='use a class-balanced part of the training set')
    parser.add_argument('--keep-personal', action='store_true', help="keep each client's personal model in --out, too")
    parser.add_argument('--tensorboard', action='store_true', help='events for TensorBoard in --out')
    parser.add_argument('--setting', type=Path, help='a JSON or TOML file with the same names; flags come on top of it')
    parser.add_argument('--out', type=Path, default=Path('runs/cifar'))
    parser.add_argument('--resume', action='store_true', help='continue the run in --out, or begin it')
    return parser.parse_args(argv)


DEPENDENT = {
    **{knob: ('partition', tuple(name for name, made in PARTITIONS.items() if knob in knobs(made))) for knob in KNOBS},
    'noise': ('features', ('noisy',)),
    'test_share': ('tests', ('split',)),
    'norm': ('model', tuple(name for name in networks.MODELS if name.startswith(('resnet', 'mobilenet')))),
    'weigh': ('algorithm', tuple(name for name in recipes.RECIPES if name != 'solo')),
}
"""Flags that matter only where another setting has one of these values."""


def setting_of(args: argparse.Namespace) -> Setting:
    """The setting of a command line: what is given, on top of the file if there is one.

    Raises:
      ValueError: as `Setting`, and for a flag that changes nothing beside the others.
    """
    base, names = {}, {field.name for field in dataclasses.fields(Setting)}
    if args.setting:
        Setting.read(args.setting)  # with the file's name in what is wrong
        base = {name: value for name, value in described(args.setting).items() if name in names}
    given = {name: value for name, value in vars(args).items() if name in names and value is not None}
    for several, of in (('options', 'algorithm'), ('loading', 'dataset')):
        stated = {} if of in given else base.get(several, {})  # those of another method have no meaning here
        if several in given:
            given[several] = {**stated, **{name: value for part in given[several] for name, value in part.items()}}
    setting = Setting.of({**said(base), **given})
    for name, (chosen, known) in DEPENDENT.items():
        if name in given and (has := getattr(setting, chosen)) not in known:
            if ':' in has and (chosen != 'partition' or name in knobs(partition(has))):  # of one's own
                continue
            flag = f'--{name.replace("_", "-")}'
            raise ValueError(f'{flag} changes nothing with {chosen} {has}: it is for {", ".join(known)}')
    return setting


def said(plain: dict[str, Any]) -> dict[str, Any]:
    """A setting without what it says by default, which beside flags may be another, if a program has written it whole.

    What a person has written in a file is meant, whether it is a default or not.
    """
    open_ended = [field.name for field in dataclasses.fields(Setting) if field.default is None]
    if not plain.keys() >= set(open_ended):
        return plain
    whole, rest = Setting.of(plain).plain(), dict(plain)
    for name in open_ended:
        without = {other: value for other, value in rest.items() if other != name}
        if Setting.of(without).plain() == whole:
            rest = without
    return rest


def prepare(count: int) -> Mesh | None:
    """The devices to use, if more than one: before anything else has touched them.

    Raises:
      ValueError: if there are fewer.
    """
    if count == 1:
        return None
    with contextlib.suppress(RuntimeError):  # a process that has begun keeps the devices it has
        # Far more devices than cores would abort the process.
        jax.config.update('jax_num_cpu_devices', min(count, max(8, os.cpu_count() or 1)))
    if len(jax.devices()) < count:
        raise ValueError(f'--devices {count}: at most {len(jax.devices())} can be had here')
    return devices.mesh(jax.devices()[:count])


def main(argv: list[str] | None = None, *, prog: str = 'cifar.py', description: str = __doc__) -> dict[str, Any]:
    """Runs what a command line says, and prints what came of it."""
    args = arguments(argv, prog, description)
    if args.tune and args.devices > 1:
        raise ValueError('--tune measures one device: tune with --devices 1, and hand on its --clients-per-chunk')
    mesh = prepare(args.devices)  # before a model of one's own is imported, which may compute
    setting = setting_of(args)
    where = {'data_dir': args.data_dir and str(args.data_dir), 'out': str(args.out)}
    tracked = watch.tensorboard(args.out / 'tensorboard') if args.tensorboard else contextlib.nullcontext()
    with tracked as on_round:
        summary = pipeline.run(
            setting, args.out, data_dir=args.data_dir, resume=args.resume, chunk=args.clients_per_chunk,
            tune=args.tune, host=args.host, mesh=mesh, on_round=on_round, keep_personal=args.keep_personal,
            record={**where, 'clients_per_chunk': args.clients_per_chunk, 'devices': args.devices},
        )  # fmt: skip
    last = f'global_accuracy_last{setting.eval_last}'
    for name in ('global_accuracy', last, 'personal_accuracy_before', 'personal_accuracy'):
        if name in summary:
            print(f'{name:26} {100 * summary[name]:6.2f} %')
    print(f'{"rounds_per_second":26} {summary["rounds_per_second"]:6.2f}\nwritten to {args.out}')
    return summary


def script(main: Callable[[], Any], prog: str, resume: str | None = '--resume') -> None:
    """Runs `main` as a program: problems and signals end it with one line.

    Args:
      main: what to run.
      prog: its name.
      resume: the flag with which it goes on from where it was stopped, if it needs one.
    """

    def stop(number: int, frame: Any) -> NoReturn:
        raise KeyboardInterrupt(number)

    for sent in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sent, stop)
    warnings.showwarning = lambda message, *rest: print(f'{prog}: warning: {message}', file=sys.stderr)
    gc.freeze()  # modules are no garbage, and looking for it among them takes time, the most of it as Python ends
    try:
        main()
        gc.freeze()
    except BrokenPipeError:  # who read our output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor can what is left be flushed
    except PROBLEMS as problem:
        sys.exit(f'{prog}: error: {" ".join(str(problem).split())}')
    except KeyboardInterrupt as stopped:
        called = Path(sys.argv[0])
        named = ['python', *sys.argv] if called.suffix == '.py' else [called.name, *sys.argv[1:]]
        if called.name == '__main__.py':
            named = ['python', '-m', prog, *sys.argv[1:]]
        again = [*named, *([resume] if resume and resume not in sys.argv else [])]
        print(f'\n{prog}: stopped; go on with: {shlex.join(again)}', file=sys.stderr, flush=True)
        # At once: what the library may still hold open was never finished, and is not what is resumed from.
        os._exit(128 + int(stopped.args[0] if stopped.args else signal.SIGINT))
