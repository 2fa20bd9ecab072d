"""Measures the library on an accelerator, beside PyTorch there, in slices that a lent machine has time for.

    python benchmarks/accelerator.py --out DIR --data-dir ~/data
    python benchmarks/accelerator.py --out DIR --part a b --workload W1 --minutes 5
    python benchmarks/accelerator.py --out DIR --table
Each row is a process of its own: one that fails or hangs costs itself alone. What it found is in DIR/rows.jsonl before
the next begins, and the same command goes on from there, however the last one ended. All that is needed for that is in
DIR, JAX's and PyTorch's compilation caches included, and no tensorflow-datasets.
"""

import argparse
import contextlib
import datetime
import json
import os
import re
import shlex
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parent.parent))  # a checkout serves without being installed

import accelerator_table
import children
import rounds_per_second

from fedjax_nc import _checkpoints
from fedjax_nc.experiments import runner, study

HERE = Path(__file__).parent
BEST = 'best'
SCENE = 'CIFAR-10, Dir(0.1)'


class Row(NamedTuple):
    """One thing to measure. 'best' is the fastest form in float32 that part a has found for the workload."""

    part: str  # a: forms, lanes, precision; b: beside PyTorch; c: profile; d: FedETF's Table 1
    what: str  # the workload; in part d the method
    form: str = BEST
    lanes: str = BEST  # those of a chunk, and to which fewer it goes on when others are done
    options: str = ''
    seconds: int = 120  # at most
    flags: str = ''  # XLA's, beside those that are set

    @property
    def name(self) -> str:
        own = '' if self.part == 'd' else f' {self.form} {self.lanes}'
        return ' '.join(f'{self.part} {self.what}{own} {self.options} {self.flags}'.split())


# Convolutions in CUDA graphs, too. With loops in them, WHILE and CONDITIONAL, W3 fails (jax 0.11.2).
GRAPHS = '--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONVOLUTION'
APART = '--xla_gpu_enable_command_buffer='  # no CUDA graphs, which hide what kernels are for
TWO = '--rounds 2'
ROWS = (  # by priority
    *(Row('a', 'W1', form, n) for form, n in (('grouped', '4'), ('grouped', '20'), ('native', '20'), ('grouped', '1'))),
    Row('b', 'W1', options='--compare pytorch pytorch-channels-last pytorch-graphs pytorch-vmap', seconds=240),
    *(Row('a', 'W3', 'grouped', n, TWO, 240) for n in ('4', '10 4 2 1', '1')),  # the first is the default
    Row('a', 'W3', 'grouped', '10 4 2 1', TWO, 240, GRAPHS),
    Row('b', 'W3', options='--rounds 1 --compare pytorch pytorch-channels-last pytorch-graphs', seconds=300),
    Row('c', 'W3', options='--rounds 1 --top 30', seconds=240, flags=APART),
    *(Row('d', method, lanes='10 4 2 1', seconds=3600) for method in ('FedETF', 'FedAvg')),
    Row('a', 'W3', options=f'{TWO} --precision bfloat16', seconds=240),
    Row('a', 'W1', options='--precision bfloat16'),
    Row('b', 'W1', options='--compare pytorch-compile', seconds=240),
    *(Row('a', 'W3', form, n, TWO, 240) for form, n in (('grouped', '5 2 1'), ('grouped', '10'), ('native', '4'))),
    *(Row('a', 'W1', form, n) for form, n in (('native', '1'), ('native', '4'), ('patches', '4'), ('patches', '20'))),
    Row('a', 'W1', 'grouped', '20', flags=GRAPHS),
    *(Row('a', 'W3', form, n, TWO, 240) for form, n in (('grouped', '20 10 4 2 1'), ('native', '1'), ('patches', '4'))),
    Row('b', 'W3', options=f'{TWO} --compare pytorch-compile', seconds=360),
    Row('b', 'W1', options='--tf32 off --compare pytorch pytorch-channels-last', seconds=180),
    Row('b', 'W3', options='--rounds 1 --tf32 off --compare pytorch pytorch-channels-last', seconds=300),
    Row('b', 'W1', options='--precision bfloat16 --compare pytorch pytorch-channels-last pytorch-graphs', seconds=240),
    Row('c', 'W1', options='--rounds 5 --top 30', seconds=180, flags=APART),
)
KEPT = 400  # operations and kernels of a profile
SPARE = 5  # seconds at the end of a call, to write what was found
WORTH = 60  # seconds: with fewer of them left, only short rows are begun
TINY = {  # replaces numbers of the workloads for a trial without an accelerator
    'W1': '--clients 4 --samples 8 --batch-size 4 --rounds 1 --torch-threads 1',
    'W3': '--clients 3 --max-examples 120 --batch-size 8 --epochs 1 --rounds 1 --torch-threads 1',
}
TINY_STUDY = """
title = "A trial in the place of Table 1"
seeds = [0]
metrics = {General = "global_accuracy_last5", Personal = "personal_accuracy"}
setting = {dataset = "digits", model = "mlp", clients = 6, rounds = 30, eval_every = 10}
methods = {FedETF = {algorithm = "fedetf"}, FedAvg = {algorithm = "fedavg"}}
"""


def minutes(text: str) -> float:
    """Parses the minutes of a call."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not SPARE / 60 < number < float('inf'):
        raise argparse.ArgumentTypeError(f'{text!r} is not a number of minutes above {SPARE / 60:.2f}')
    return number


def arguments(argv: list[str] | None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = rounds_per_second.Parser(prog='accelerator.py', description=__doc__, formatter_class=form)
    parser.add_argument('--out', type=Path, required=True, help='folder of results, runs and caches')
    parser.add_argument('--minutes', type=minutes, default=9.0, help='no row outlasts them')
    parser.add_argument('--part', choices=list('abcd'), nargs='+', default=list('abcd'), help='by default all')
    parser.add_argument('--workload', choices=list(TINY), nargs='+', default=list(TINY), help='of parts a, b and c')
    parser.add_argument('--data-dir', type=Path, help='where CIFAR-10 lies; without it images of a to c are random')
    parser.add_argument('--torch-python', default=sys.executable, help='the Python that has PyTorch; default: this one')
    parser.add_argument('--again', action='store_true', help='also rows that failed or took too long')
    parser.add_argument('--tiny', action='store_true', help='a trial with next to no data, in a folder of its own')
    parser.add_argument('--table', action='store_true', help='only print what is known')
    return parser.parse_args(argv)


def read(out: Path, tiny: bool) -> dict[str, dict[str, Any]]:
    """What is known of each row, by its name."""
    path = out / 'rows.jsonl'
    lines = path.read_text().splitlines() if path.exists() else []
    try:
        known = {row['row']: row for row in map(json.loads, lines)}
    except (ValueError, KeyError, TypeError) as problem:
        raise ValueError(f'{path} is damaged ({problem}): move it away or choose another --out') from problem
    if any(row['tiny'] != tiny for row in known.values()):
        raise ValueError(f'{path} is {"no" if tiny else "a"} trial (--tiny): choose another --out')
    return known


def write(out: Path, known: dict[str, dict[str, Any]]) -> None:
    """In the order of `ROWS`; the file is there whole or as it was."""
    ordered = [known[row.name] for row in ROWS if row.name in known]
    _checkpoints.replace(out / 'rows.jsonl', ''.join(json.dumps(record) + '\n' for record in ordered))


def best(what: str, known: dict[str, dict[str, Any]]) -> tuple[str, str] | None:
    """Form and lanes of the fastest row of part a in float32."""
    forms = [row for row in ROWS if (row.part, row.what) == ('a', what) and row.form != BEST and not row.flags]
    done = [row for row in forms if known.get(row.name, {}).get('state') == 'done']
    fastest = min(done, key=lambda row: known[row.name]['result']['seconds_per_round'], default=None)
    return (fastest.form, fastest.lanes) if fastest else None


def command(row: Row, args: argparse.Namespace, known: dict[str, dict[str, Any]], found: Path) -> list[str] | None:
    """How a row is measured; None while it is not known which form is the fastest."""
    data = ['--data-dir', str(args.data_dir)] if args.data_dir else []
    if row.part == 'd':
        chosen = [str(args.out / 'tiny.toml')] if args.tiny else ['fedetf_1', '--scenes', SCENE]
        rest = ['--rows', row.what, '--seeds', '0', '--out', str(args.out), *data]
        lanes = ['--clients-per-chunk', *row.lanes.split()]
        return [sys.executable, '-m', 'fedjax_nc.experiments', 'run', *chosen, *rest, *lanes]
    chosen = best(row.what, known) if row.form == BEST else (row.form, row.lanes)
    if chosen is None:
        return None
    script = HERE / ('profile_round.py' if row.part == 'c' else 'rounds_per_second.py')
    lanes, *fewer = chosen[1].split()
    own = ['--workload', row.what, '--conv', chosen[0], '--chunk', lanes, *row.options.split()]
    own += ['--narrower', *reversed(fewer)] if fewer else []
    peers = ['--peer-python', f'pytorch={args.torch_python}'] if row.part == 'b' else []
    trial = TINY[row.what].split() if args.tiny else []
    return [sys.executable, str(script), *own, *peers, *trial, *data, '--json', str(found)]


def own(row: Row) -> dict[str, str]:
    """Settings of a row's process: its flags, and memory left to PyTorch."""
    flags = f'{os.environ.get("XLA_FLAGS", "")} {row.flags}'.strip()
    memory = {'XLA_PYTHON_CLIENT_MEM_FRACTION': '0.6'} if row.part == 'b' else {}
    return memory | ({'XLA_FLAGS': flags} if flags else {})


def run_of(row: Row, args: argparse.Namespace) -> study.Run:
    """The run of part d."""
    chosen = study.Study.read(str(args.out / 'tiny.toml') if args.tiny else 'fedetf_1')
    (run,) = chosen.some([row.what], None if args.tiny else [SCENE], [0]).runs
    return run


def reached(run: study.Run, out: Path) -> str:
    """How far a run of part d has come."""
    path = runner.where(run, out) / 'metrics.jsonl'
    return f'{len(path.read_text().splitlines()) if path.exists() else 0} of {run.setting.rounds} rounds'


def result(row: Row, args: argparse.Namespace, found: Path) -> dict[str, Any] | None:
    """What a row has found, as far as it is worth keeping."""
    if row.part == 'd':
        summary = runner.summary(run_of(row, args), args.out)
        whole = summary is not None and 'diverged' not in summary
        return {k: v for k, v in summary.items() if k != 'curve'} if whole else None
    try:
        told = json.loads(found.read_text())
    except (OSError, ValueError):
        return None
    if row.part == 'c':
        (told,) = told['profiles']
        return told | {name: told[name][:KEPT] for name in ('operations', 'kernels')}
    return told


def measure(row: Row, args: argparse.Namespace, call: list[str], found: Path, seconds: float, final: bool) -> dict:
    """Carries out a row and says what came of it. `final`: whether one that takes longer is too long."""
    begun = time.monotonic()
    code, said = children.carry_out(call, children.environment(args.out, **own(row)), seconds)
    told = result(row, args, found) if code == 0 else None
    if code is None:
        state, why = ('too long', f'not done after {seconds:.0f} s') if final else ('cut', 'the time was over')
        why += f', {reached(run_of(row, args), args.out)}' if row.part == 'd' else ''
    elif told is None or (row.part == 'b' and not told['peers']):
        named = [line for line in said if re.search(r'^[\w.]*(Error|Exception)\b|: error:', line)]  # XLA adds whence
        state, why, told = 'failed', [f'it ended with status {code}', *said[-1:], *named][-1][:400], None
    else:
        state, why = 'done', ''
    left_out = [line[:400] for line in said if told and line.startswith(('Not compared', 'Random images'))]
    return {
        'row': row.name, **row._asdict(), 'tiny': args.tiny, 'state': state, 'why': why, 'notes': left_out,
        'wall_seconds': round(time.monotonic() - begun, 1), 'date': datetime.date.today().isoformat(),
        'command': shlex.join(['python', *call[1:]]), 'result': told,
    }  # fmt: skip


def carry_on(args: argparse.Namespace, known: dict[str, dict[str, Any]]) -> None:
    """Measures what is missing, in order, until the time is over."""
    end, chosen = time.monotonic() + 60 * args.minutes - SPARE, wanted(args)
    if args.tiny:
        _checkpoints.replace(args.out / 'tiny.toml', TINY_STUDY)
    with tempfile.TemporaryDirectory() as folder:
        first = True
        for row in chosen:
            before = known.get(row.name, {}).get('state')
            if before == 'done' or (before in ('failed', 'too long') and not args.again):
                continue
            found = Path(folder) / 'found.json'
            found.unlink(missing_ok=True)
            call, left = command(row, args, known, found), end - time.monotonic()
            if call is None:
                print(f'{row.name}: waits for a form of {row.what}, part a', file=sys.stderr, flush=True)
                continue
            if left < min(row.seconds / 2, WORTH) and not first:
                break
            final = row.part != 'd' and (first or left >= row.seconds)  # more than this slice it will not get
            record = measure(row, args, call, found, min(row.seconds, left), final)
            known[row.name], first = record, False
            write(args.out, known)
            why = f', {record["why"]}' if record['why'] else ''
            print(f'{row.name}: {record["state"]}, {record["wall_seconds"]:.0f} s{why}', file=sys.stderr, flush=True)
            if record['state'] == 'cut':
                break


def wanted(args: argparse.Namespace) -> list[Row]:
    """The rows that the options choose."""
    return [row for row in ROWS if row.part in args.part and (row.part == 'd' or row.what in args.workload)]


def main(argv: list[str] | None = None) -> str:
    args = arguments(argv)
    args.out = args.out.expanduser().resolve()
    args.data_dir = args.data_dir and args.data_dir.expanduser().resolve()
    with contextlib.nullcontext() if args.table else _checkpoints.holding(args.out):
        known = read(args.out, args.tiny)
        if not args.table:
            carry_on(args, known)
        left = [row.name for row in wanted(args) if known.get(row.name, {}).get('state') in (None, 'cut')]
        given = shlex.join(word for word in (sys.argv[1:] if argv is None else argv) if word != '--table')
        table = accelerator_table.markdown(list(known.values()), left, f'python benchmarks/accelerator.py {given}')
        if not args.table:
            _checkpoints.replace(args.out / 'table.md', table + '\n')
    print(table)
    return table


if __name__ == '__main__':
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the row in hand is ended, too
    try:
        main()
    except (ValueError, OSError) as problem:
        sys.exit(f'accelerator.py: error: {" ".join(str(problem).split())}')
    except KeyboardInterrupt:
        sys.exit('accelerator.py: stopped; the same command goes on')
