"""Compiles rounds for accelerators that are not there, and tells what their compilers say about them.

    python benchmarks/ahead_of_time.py --target v5e:1x1 v5e:2x2 --workload W1 W3 --conv default native \
        --chunk default 1 5 --python tpu=~/aot/tpu/bin/python --out aot
Nothing runs and nothing is measured: figures are the compilers' estimates. Each program is compiled by a process of its
own; its row is added to OUT/rows.jsonl at once, and rows that are there are not made again. Targets, environments and
columns are explained in benchmarks/README.md.
"""

import argparse
import datetime
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import estimates
import targets
from estimates import Wanted
from rounds_per_second import Parser, count
from workloads import CONVS, WORKLOADS

KINDS = {'tpu': 'TPU topologies', 'cuda': 'h100'}


def target(text: str) -> str:
    """Parses the name of a target."""
    if not re.fullmatch(r'h100|v\d\w*:\d+x\d+(x\d+)?', text):
        raise argparse.ArgumentTypeError(f'{text!r} is neither h100 nor a TPU topology such as v5e:2x2')
    return text


def interpreter(text: str) -> tuple[str, str]:
    """Parses KIND=PYTHON."""
    kind, _, python = text.partition('=')
    if kind not in KINDS or not python:
        raise argparse.ArgumentTypeError(f'{text!r} is not KIND=PYTHON with one of {", ".join(KINDS)}')
    return kind, str(Path(python).expanduser())


def form(text: str) -> str | None:
    """Parses the name of a convolution."""
    if text not in ('default', *CONVS):
        raise argparse.ArgumentTypeError(f'{text!r} is not one of default, {", ".join(CONVS)}')
    return None if text == 'default' else text


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog='ahead_of_time.py', description=__doc__)
    parser.add_argument('--target', type=target, nargs='+', default=['v5e:1x1'], help='h100, or a TPU topology')
    parser.add_argument('--workload', choices=list(WORKLOADS), nargs='+', default=['W1'])
    parser.add_argument('--clients', type=count, help='of the workload; those of a round keep their share')
    parser.add_argument('--conv', type=form, nargs='+', default=[None], help="default: the library's choice")
    parser.add_argument(
        '--chunk', type=lambda text: None if text == 'default' else count(text), nargs='+', default=[None],
        help="clients side by side on a device; default: the library's choice",
    )  # fmt: skip
    parser.add_argument('--precision', choices=['float32', 'bfloat16'], nargs='+', default=['float32'])
    parser.add_argument('--out', type=Path, required=True, help='the folder of the rows')
    parser.add_argument(
        '--python', type=interpreter, nargs='+', action='extend', default=[], metavar='KIND=PYTHON',
        help='the Python that compiles for tpu or for cuda; default: this one',
    )  # fmt: skip
    parser.add_argument('--limit', type=count, help='seconds for a program; by default it takes what it takes')
    parser.add_argument('--again', action='store_true', help='also make the rows that are there')
    parser.add_argument('--keep', action='store_true', help='also keep the text of the compiled programs in OUT')
    parser.add_argument('--alone', action='store_true', help=argparse.SUPPRESS)  # the process of one program
    return parser.parse_args(argv)


def versions(kind: str, python: str) -> dict[str, str]:
    """What an interpreter would compile with.

    Raises:
      ValueError: with the command that installs it, where something is missing.
    """
    ask = 'import importlib.metadata as m, sys; print(*map(m.version, sys.argv[1:]))'
    packages = ('fedjax_nc', *targets.PACKAGES[kind])
    try:
        said = subprocess.run([python, '-c', ask, *packages], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as problem:
        missing = f'{python} lacks one of {", ".join(packages)}, which {KINDS[kind]} need: {targets.INSTALL[kind]}'
        raise ValueError(f'{missing}; then --python {kind}=PYTHON') from problem
    return dict(zip(packages, said.stdout.split(), strict=True))


def made(wanted: Wanted, python: str, args: argparse.Namespace) -> dict[str, Any]:
    """A row, made by a process of its own; 'error' in it says why there is none."""
    options = {**wanted._asdict(), 'out': args.out}
    named = [
        f'--{name}={"default" if value is None else value}' for name, value in options.items() if name != 'clients'
    ]
    named += [f'--clients={wanted.clients}'] if wanted.clients else []
    command = [python, __file__, '--alone', *named, *(['--keep'] if args.keep else [])]
    try:
        done = subprocess.run(
            command, env=os.environ | targets.environment(wanted.target), capture_output=True, text=True,
            timeout=args.limit,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {'error': f'took more than {args.limit} s'}
    said = [line for line in done.stderr.splitlines() if line.strip()]
    if done.returncode:  # negative: ended by a signal, of which compilers print a long trace
        return {'error': said[-1].strip() if said and done.returncode > 0 else f'ended with {done.returncode}'}
    return json.loads(done.stdout.splitlines()[-1])


COLUMNS = (
    'target', 'workload', 'form', 'chunk', 'precision', 'compile s', 'arguments MB', 'temporaries MB', 'fits',
    "library's estimate MB", 'a step', 'unestimated MB', 'steps', 'padded', 'round, s', 'besides, s',
    'kernels a round', 'collectives', 'degenerate', 'large copies MB', 'float64',
)  # fmt: skip


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    size = '' if row['clients'] is None else f', {row["clients"]} clients'
    chunk = row['chunk'] or (f'{row["lanes"]} (default)' if 'lanes' in row else 'default')
    first = [row['target'], row['workload'] + size, row['conv'] or 'default', f'{chunk}', row['precision']]
    if 'error' in row:
        return [*first, row['error'].replace('|', '/')[:200], *[''] * (len(COLUMNS) - len(first) - 1)]
    gpu, mb = row['target'] == 'h100', {name: f'{row[name] / 1e6:.4g}' for name in row if name.endswith('_bytes')}
    return [
        *first, f'{row["lower_seconds"] + row["compile_seconds"]:.0f}', mb['argument_bytes'], mb['temporary_bytes'],
        f'{"yes" if row["fits"] else "no"}, of {row["chip_bytes"] / 1e9:.0f} GB', mb['estimate_bytes'],
        f'{row["step"] / 1e9:.3g} GB' if gpu else f'{row["step"] / 1e6:.3g} Mcycles',
        '' if gpu else mb['silent_bytes'],
        f'{row["steps"]}', f'{100 * row["padded_work"]:.0f} %', f'{row["seconds"]:.3g}', f'{row["rest_seconds"]:.2g}',
        f'{row["kernels_round"]:.0f}' if gpu else '',
        f'{row["collectives"]}, {mb["collective_bytes"]} MB' if row['devices'] > 1 else '0',
        f'{row["degenerate"]}', mb['large_copies_bytes'], f'{row["float64"]}',
    ]  # fmt: skip


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table, and what it was made with."""
    lines = [f'| {" | ".join(line)} |' for line in (COLUMNS, ['---'] * len(COLUMNS), *map(cells, rows))]
    notes = [
        f'{row["date"]}, ' + ', '.join(f'{name} {version}' for name, version in row['versions'].items()) for row in rows
    ]
    speeds = [f'{row["device"]} {row["assumed_speed"]:.3g}' for row in rows if 'error' not in row]
    assumed = f'Cycles or bytes a second, assumed: {", ".join(dict.fromkeys(speeds))}.' if speeds else ''
    return '\n'.join(
        ["Compilers' estimates, no measurement.", '', *lines, '', f'{"; ".join(dict.fromkeys(notes))}. {assumed}']
    )


def name(wanted: Wanted) -> str:
    """What its row and its file are called."""
    parts = {**wanted._asdict(), 'clients': f'{wanted.clients or "all"}'}
    return '-'.join('default' if part is None else str(part).replace(':', '_') for part in parts.values())


def wanted(args: argparse.Namespace) -> list[Wanted]:
    """The programs that the options ask for."""
    product = itertools.product(args.target, args.workload, args.conv, args.chunk, args.precision)
    return [Wanted(target, workload, args.clients, *rest) for target, workload, *rest in product]


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    args = arguments(argv)
    if args.alone:
        (only,) = wanted(args)
        print(json.dumps(estimates.compiled(only, args.out / f'{name(only)}.hlo' if args.keep else None)))
        return []
    pythons = {kind: dict(args.python).get(kind, sys.executable) for kind in map(targets.platform, args.target)}
    found = {kind: versions(kind, python) for kind, python in pythons.items()}
    args.out.mkdir(parents=True, exist_ok=True)
    path, table = args.out / 'rows.jsonl', []
    for each in wanted(args):
        kind = targets.platform(each.target)
        known = {**each._asdict(), 'versions': found[kind]}
        old = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        old = [row for row in old if {key: row.get(key) for key in known} == known and 'error' not in row]
        if args.again or not old:
            row = {**known, 'date': datetime.date.today().isoformat(), **made(each, pythons[kind], args)}
            with path.open('a') as file:
                file.write(json.dumps(row) + '\n')
            print(f'{name(each)}: {row.get("error") or "done"}', file=sys.stderr)
            old = [row]
        table.append(old[-1])
    print(markdown(table))
    return table


if __name__ == '__main__':
    try:
        main()
    except (ValueError, OSError, RuntimeError) as problem:
        sys.exit(f'ahead_of_time.py: error: {" ".join(str(problem).split())[:500]}')
