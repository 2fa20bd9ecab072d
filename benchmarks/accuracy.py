"""Tables of accuracy: methods side by side on the same clients, over several seeds.

    python benchmarks/accuracy.py --data-dir ~/data                          # both reduced settings
    python benchmarks/accuracy.py --data-dir ~/data --settings table1 table1_005     # FedETF's Table 1, hours on a GPU

Each run is one of `examples/cifar.py` in `--out/SETTING/METHOD/SEED`. What is finished is not run again and what was
interrupted is continued, so that the same command can be given until the table is complete. Writes SETTING.md there.
"""

import argparse
import contextlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_nc.experiments import command, pipeline

REDUCED = ['--model', 'cnn', '--participation', '0.25', '--rounds', '60', '--eval-every', '5']
FEDETF = ['--lr', '0.01', '--batch-size', '32']
FEDLOGE = ['--lr', '0.03', '--batch-size', '16', '--momentum', '0.5', '--weight-decay', '0']
SUMMARY = {'global_accuracy_last5': 'general', 'personal_accuracy': 'personal'}
TAIL = {f'global_{name}_last5': name for name in ('many', 'medium', 'few')}


# CIFAR-10 in Table 1 of FedETF (Li et al., ICCV 2023): general and personal accuracy at alpha = 0.1 and at 0.05.
TABLE1 = {
    'fedavg': ('52.8 / 83.9', '44.5 / 89.8'),
    'fedprox': ('46.6 / 82.1', '41.0 / 87.7'),
    'feddyn': ('36.4 / 85.4', '23.9 / 88.7'),
    'ditto': ('52.8 / 79.8', '44.5 / 85.2'),
    'fedrep': ('26.9 / 87.8', '15.8 / 90.7'),
    'ccvr': ('52.5 / 55.6', '48.0 / 73.5'),
    'fedproto': ('- / 83.3', '- / 88.2'),
    'fedrod': ('55.7 / 86.2', '49.9 / 88.8'),
    'fednh': ('55.4 / 86.0', '48.0 / 91.1'),
    'fedetf': ('59.6 / 87.9', '56.1 / 92.6'),
}


class Setting(NamedTuple):
    title: str
    methods: tuple[str, ...]
    arguments: list[str]
    columns: dict[str, str]  # name in summary.json -> heading
    published: dict[str, str]  # what the paper has for a method


def table1(alpha: str, column: int) -> Setting:
    return Setting(
        f"CIFAR-10, FedETF's published setting: 20 clients, Dirichlet({alpha}), all in 200 rounds, ResNet-20",
        tuple(TABLE1),
        ['--eval-every', '10', '--alpha', alpha, '--weigh', 'examples'],
        SUMMARY,
        {method: values[column] for method, values in TABLE1.items()},
    )


SETTINGS = {
    'dirichlet': Setting(
        'CIFAR-10, 10,000 images, 20 clients, Dirichlet(0.1), 5 clients a round, 60 rounds, small CNN',
        (*TABLE1, 'fedetf_gmv'),
        [*REDUCED, *FEDETF, '--max-examples', '10000', '--weigh', 'examples'],
        SUMMARY,
        {method: values[0] for method, values in TABLE1.items()},
    ),
    'longtail': Setting(
        'CIFAR-10-LT, imbalance 100, 20 clients, Dirichlet(0.5), 5 clients a round, 60 rounds, small CNN',
        ('fedavg', 'fedetf', 'fedloge'),
        [*REDUCED, *FEDLOGE, '--imbalance', '100', '--alpha', '0.5'],
        {
            'global_accuracy_last5': 'GM',
            **TAIL,
            'personal_accuracy': 'PM',
            'personal_accuracy_released': 'PM, released rule',
            'personal_accuracy_tuned': 'PM, heads tuned',
        },
        {},
    ),
    'table1': table1('0.1', 0),
    'table1_005': table1('0.05', 1),
}


def finished(out: Path, arguments: list[str]) -> dict[str, Any]:
    """The summary of a run, which is begun or continued if it is not there yet.

    Raises:
      ValueError: if `out` holds a run with other settings.
    """
    argv, path = [*arguments, '--out', str(out), '--resume'], out / 'summary.json'
    if path.exists():
        setting = command.setting_of(command.arguments(argv, 'accuracy.py', ''))
        pipeline.settle(setting, out, resume=True)
        with contextlib.suppress(ValueError, KeyError):  # a damaged summary is made anew
            summary = pipeline.known(path)
            if summary['rounds'] == setting.rounds and summary['personal_accuracy'] is not None:
                return summary
    return command.main(argv, prog='accuracy.py')


def table(setting: Setting, summaries: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown: a row a method, mean ± standard deviation over seeds in %."""
    columns = [*setting.columns.values(), *(['published'] if setting.published else [])]
    lines = [f'| {setting.title} | {" | ".join(columns)} |', '|---|' + '---|' * len(columns)]
    for method, runs in summaries.items():
        cells = []
        for name in setting.columns:
            values = 100 * np.array([run[name] for run in runs if name in run])
            spread = f' ± {values.std():.1f}' if len(values) > 1 else ''
            cells.append(f'{values.mean():.1f}{spread}' if len(values) else '')
        if setting.published:
            cells.append(setting.published.get(method, ''))
        lines.append(f'| {method} | {" | ".join(cells)} |')
    return '\n'.join(lines) + '\n'


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--settings', nargs='+', choices=list(SETTINGS), default=['dirichlet', 'longtail'])
    parser.add_argument('--methods', nargs='+', help='by default those of the setting')
    parser.add_argument('--seeds', nargs='+', default=['0', '1', '2'])
    parser.add_argument('--data-dir', default=None, help='where CIFAR-10 lies or is put')
    parser.add_argument('--out', type=Path, default=Path('runs/accuracy'))
    parser.add_argument(
        '--more', nargs=argparse.REMAINDER, default=[], help='further arguments of cifar.py, at the end'
    )
    args = parser.parse_args(argv)
    data = ['--data-dir', args.data_dir] if args.data_dir else []
    for name in args.settings:
        setting = SETTINGS[name]
        found: dict[str, list[dict[str, Any]]] = {}
        for seed in args.seeds:  # seed by seed, so that an unfinished table compares like with like
            for method in args.methods or setting.methods:
                arguments = ['--algorithm', method, '--seed', seed, *setting.arguments, *data, *args.more]
                found.setdefault(method, []).append(finished(args.out / name / method / seed, arguments))
                text = table(setting, found)
                (args.out / f'{name}.md').write_text(text)
        print(f'\n{text}\nSeeds {" ".join(args.seeds)}; jax {jax.__version__}, {jax.devices()[0].device_kind}\n')


if __name__ == '__main__':
    command.script(main, 'accuracy.py', resume=None)
