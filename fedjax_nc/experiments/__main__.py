"""Published tables and studies of one's own, from the command line.

    python -m fedjax_nc.experiments list
    python -m fedjax_nc.experiments show fednh_1
    python -m fedjax_nc.experiments run fednh_1 --scale reduced --data-dir ~/data
    python -m fedjax_nc.experiments run study.toml --rows FedAvg FedNH --seeds 0 1 2
    python -m fedjax_nc.experiments report study.toml

`fedjax-nc` is the same command. Runs are kept in OUT/runs, one folder each, which studies share; the report of a study
is in OUT/STUDY. OUT is the folder `runs`, if --out names no other.

What is finished is not run again and what was interrupted goes on: the same command can be given until all is done.
"""

import argparse
import contextlib
import math
import sys
from pathlib import Path

from tqdm import tqdm

from fedjax_nc import training, watch
from fedjax_nc.experiments import cells, command, report, runner, study
from fedjax_nc.experiments.study import Run, Study

PROG = 'fedjax_nc.experiments'


def arguments(argv: list[str] | None, prog: str = PROG) -> argparse.Namespace:
    """The command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = command.Parser(prog=prog, description=__doc__, formatter_class=form)
    kinds = parser.add_subparsers(dest='task', required=True, metavar='list|show|run|report')
    kinds.add_parser('list', help='the published tables, one line each')
    shown = kinds.add_parser('show', help='the settings of a study and what was published')
    run = kinds.add_parser('run', help='runs what is missing of a study, and reports')
    told = kinds.add_parser('report', help='tables and figures of the runs that are finished')
    count = command.number(int, 0, 2**31 - 1)
    for sub in (shown, run, told):
        sub.add_argument('study', help='a published table, or a .toml or .json file')
        sub.add_argument('--scale', default='full', help='full, or another scale that the study has')
        sub.add_argument('--rows', nargs='+', metavar='METHOD', help='methods; by default all')
        sub.add_argument('--scenes', nargs='+', metavar='SCENE', help='by default all')
        sub.add_argument('--seeds', nargs='+', type=count, help="by default the study's")
    for sub in (run, told):
        sub.add_argument('--out', type=Path, default=Path('runs'), help='folder of runs and reports')
        sub.add_argument('--keep', type=Path, help='a folder for copies of results without checkpoints, and the report')
        sub.add_argument('--baseline', metavar='METHOD', help="of the differences; by default the study's")
        sub.add_argument('--target', type=command.number(float, 0, 100), help='accuracy in %% to count rounds to')
    run.add_argument('--one-by-one', action='store_true', help='no program for several seeds of small runs')
    run.add_argument('--tensorboard', action='store_true', help="events for TensorBoard in each run's folder")
    sides = command.number(int, 1, 10**6)
    run.add_argument('--clients-per-chunk', type=sides, nargs='+', metavar='CLIENTS', help=command.SIDE_BY_SIDE)
    run.add_argument('--tune', action='store_true', help='first measure how the rounds of each run are fastest here')
    run.add_argument('--data-dir', type=Path, help='where data sets lie or are put')
    return parser.parse_args(argv)


def main(argv: list[str] | None = None, prog: str = PROG) -> None:
    """Does what a command line says."""
    args = arguments(argv, prog)
    if args.task == 'list':
        print('\n'.join(line(Study.read(name)) for name in study.tables()))
        return
    whole = Study.read(args.study, args.scale)
    if args.task != 'show':
        whole = whole.against(args.baseline)
    chosen = whole.some(args.rows, args.scenes, args.seeds)
    if args.task == 'show':
        print(described(chosen))
        return
    if args.task == 'run':
        if args.tensorboard:
            with watch.tensorboard(args.out):  # whether it can be had, before anything is run
                pass
        left = runner.carry_out(
            chosen, args.out, data_dir=args.data_dir, together=not args.one_by_one, chunk=args.clients_per_chunk,
            tune=args.tune, watch=board if args.tensorboard else None,
        )  # fmt: skip
        for run in left:
            print(f'{run.label}: not done, in the hands of another process unless it was told why')
    if args.keep:
        runner.keep(whole, args.out, args.keep)
    where = args.keep or args.out
    part = {} if args.task == 'run' else {'rows': args.rows, 'scenes': args.scenes, 'seeds': args.seeds}
    folder = report.write(whole, where, args.target, **part)
    print((folder / 'report.md').read_text())
    print(f'written to {folder}')
    if args.task == 'run' and left:
        raise SystemExit(f'{prog}: {len(left)} of {len(runner.distinct(chosen.runs))} runs are not done')


def board(run: Run, folder: Path) -> contextlib.AbstractContextManager[training.OnRound]:
    """TensorBoard's events of a run, in its folder."""
    return watch.tensorboard(folder / 'tensorboard')


def line(table: Study) -> str:
    """A published table in one line: name, title, rows, and what each scale costs."""
    of_scales = (table if scale == table.scale else Study.read(table.name, scale) for scale in table.scales)
    costs = [f'{smaller.scale} {cost(smaller)}' for smaller in of_scales]
    return f'{table.name:<12} {table.title}; {len(table.methods)} rows; {", ".join(costs)}'


def cost(chosen: Study) -> str:
    """About how long the runs of a study take on two cores."""
    runs = len(runner.distinct(chosen.runs))
    if not runs:
        return 'cannot be run'
    if math.isnan(chosen.minutes):
        return f'{runs} runs'
    return f'{runs} runs of {tqdm.format_interval(60 * chosen.minutes)}'


def described(chosen: Study) -> str:
    """A study in words: what its runs have in common, what sets them apart, and what was published."""
    lines = [chosen.title, *([f'Published: {chosen.source}'] if chosen.source else [])]
    lines += [f'Scale {chosen.scale}: {cost(chosen)} on two cores. {chosen.about}']
    lines += [f'Other scales: {", ".join(s for s in chosen.scales if s != chosen.scale) or "none"}', '']
    plain = [run.setting.plain() for run in chosen.runs]
    common = {k: v for k, v in plain[0].items() if all(p.get(k) == v for p in plain)} if plain else {}
    lines += ['All runs:', '  ' + ', '.join(f'{k} = {v}' for k, v in common.items()), '', 'Rows:']
    seen = set()
    for run, values in zip(chosen.runs, plain, strict=True):
        if (run.method, run.scene) not in seen:
            seen.add((run.method, run.scene))
            own = ', '.join(f'{k} = {v}' for k, v in values.items() if k not in common and k != 'seed')
            lines.append(f'  {run.method}{f" | {run.scene}" if run.scene else ""}: {own}')
    lines += [f'  not run: {scene}: {why}' for scene, why in chosen.unavailable.items() if scene in chosen.scenes]
    if chosen.published:
        lines += ['', f'Published ({", ".join(chosen.metrics)}):']
        for (method, scene), numbers in chosen.published.items():
            if method in chosen.methods and scene in chosen.scenes:
                names = [chosen.metric(method, heading) for heading in chosen.metrics]
                said = ' | '.join(cells.number(name, *pair) or '-' for name, pair in zip(names, numbers, strict=True))
                lines.append(f'  {method}{f" | {scene}" if scene else ""}: {said}')
    lines += ['', *(f'Note: {note}' for note in chosen.notes)]
    return '\n'.join(lines).rstrip()


def program() -> None:
    """The console script, and `python -m`: methods of one's own may lie in the current folder for both."""
    if str(Path.cwd()) not in sys.path and '' not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    prog = PROG if Path(sys.argv[0]).name == '__main__.py' else Path(sys.argv[0]).stem
    command.script(lambda: main(prog=prog), prog, resume=None)


if __name__ == '__main__':
    program()
