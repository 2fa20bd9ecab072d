"""Carrying out a study: what is finished is not run again, what was interrupted goes on, what is missing is run."""

import contextlib
import dataclasses
import json
import math
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fedjax_nc import _checkpoints, _progress, data, training
from fedjax_nc.experiments import geometry, pipeline, probes, scene, seeds
from fedjax_nc.experiments.geometry import Geometry
from fedjax_nc.experiments.setting import Setting
from fedjax_nc.experiments.study import Run, Study

TO = 'rounds_to:'
ROUNDING = 1e-4  # percent: accuracies are shares in float32, and 0.9 of those is less than 0.9
Watch = Callable[[Run, Path], contextlib.AbstractContextManager[training.OnRound]]
"""What makes a tracker for a run and its folder."""
FILES = ('config.json', 'summary.json', 'metrics.jsonl')
ACCURACIES = ('accuracy', 'accuracy_personal')
"""What evaluations have one of: of the generic model, or of clients' own."""


def carry_out(
    study: Study,
    out: str | Path,
    *,
    data_dir: str | Path | None = None,
    together: bool = True,
    chunk: Sequence[int] | None = None,
    tune: bool = False,
    watch: Watch | None = None,
    show: bool = True,
) -> list[Run]:
    """Runs all of a study that is missing, seed by seed. It may be killed and called again.

    Every run has a folder `out/runs/NAME`, named by what it says, so that studies share the runs that they have in
    common. Several processes may carry out one study: each leaves alone what another has in hand.

    A run that diverges is told and counts as done: its summary says so. One line a run tells its first metrics, its
    time, and about how long the rest will take.

    Args:
      study: what to run.
      out: folder of all runs and reports.
      data_dir: where data sets lie or are put.
      together: whether small runs that differ in their seed alone are trained by one program, see `seeds`.
      chunk: clients side by side, as for `pipeline.run`. No runs are trained together then.
      tune: whether each run first measures how its rounds are fastest, see `pipeline.run`. Nor are they then.
      watch: makes a tracker for each run that is trained, from the run and its folder; entered by `with`, as
        `lambda run, folder: watch.tensorboard(folder / 'tensorboard')` is. No runs are trained together then.
      show: whether lines and bars are shown.

    Returns:
      The runs that are still missing, while others went on: another process has them in hand, or a line or warning has
      told why they cannot be run.

    Raises:
      ValueError: if no run is finished and the first of them cannot be run, or its data set is damaged.
      DatasetUnavailableError: if its data set cannot be had.
    """
    left = [run for run in distinct(study.runs) if summary(run, out) is None]
    told, missing, trouble = Teller(study, out, show), list[Run](), None
    for run in distinct(study.runs):
        if run not in left and (what := outdated(run, out, data_dir)):
            told.of(
                run,
                f'{what} changed since it was run: delete {where(run, out)} to have it run again, by a program that is '
                'started anew',
            )
    for runs, error in refused(left, out, data_dir):  # before hours have been spent on others
        told.left_out(runs, error)
        missing, trouble = missing + runs, trouble or error
    left = [run for run in left if run not in missing]
    while left:
        group = alike(left[0], left, out) if together and watch is None and not tune and chunk is None else left[:1]
        left = [run for run in left if run not in group]
        with contextlib.ExitStack() as held:
            ours = []
            for run in group:
                try:
                    held.enter_context(_checkpoints.holding(where(run, out)))
                    ours.append(run)
                except _checkpoints.InUseError:
                    missing.append(run)
            begun = time.perf_counter()
            try:
                found = perform(ours, out, data_dir, chunk, tune, watch, show and _progress.live())
            except training.CheckpointError as error:  # of one run: others can go on
                warnings.warn(f'{where(ours[0], out)}: {error}; this run is left out', stacklevel=2)
                missing += ours
                continue
            except (ValueError, data.DatasetUnavailableError) as error:
                told.left_out(ours, error)
                missing, trouble = missing + ours, trouble or error
                continue
            for run in ours:
                told.done(run, found[run.setting.name], (time.perf_counter() - begun) / len(ours), left)
    if trouble and not told.seconds:
        raise trouble
    return missing


def outdated(run: Run, out: str | Path, data_dir: str | Path | None = None) -> str:
    """What of one's own has changed since the run was begun, for a sentence; '' if nothing, as far as is known.

    Of a method, a model and their like it is the file that is named, not those that it imports.
    """
    path = where(run, out) / 'config.json'
    if not isinstance(run.setting, Setting) or not path.exists():
        return ''
    before = pipeline.known(path)
    if what := pipeline.replaced(before, run.setting):
        return f'the file of its {what} has'
    now = scene.digest(run.setting, data_dir)
    return 'its data have' if before.get('data') and now and before['data'] != now else ''


def refused(
    runs: Sequence[Run], out: str | Path, data_dir: str | Path | None
) -> Iterator[tuple[list[Run], ValueError | data.DatasetUnavailableError]]:
    """Runs not begun that cannot be: their data cannot be had or cut so, or do not fit the method. Trains nothing."""
    scenes: dict[str, list[tuple[Run, Setting]]] = {}
    for run in runs:
        if isinstance(run.setting, Setting) and not (where(run, out) / 'config.json').exists():
            scenes.setdefault(scene.key(run.setting), []).append((run, run.setting))
    known: dict[str, ValueError | None] = {}  # methods fit the data of all seeds, or of none
    for several in scenes.values():
        try:
            loaded = scene.load(several[0][1], data_dir)
        except (ValueError, data.DatasetUnavailableError) as error:
            yield [run for run, _ in several], error.with_traceback(None)  # whose frames hold data
            continue
        for run, setting in several:
            name = dataclasses.replace(setting, seed=0).name
            if name not in known:
                known[name] = scene.misfit(setting, loaded)
            if (problem := known[name]) is not None:
                yield [run], problem
        del loaded  # before the next one comes


def alike(run: Run, left: Sequence[Run], out: str | Path) -> list[Run]:
    """The run and those that one program can train with it: small ones, not begun, that differ in the seed alone."""
    setting = run.setting
    if not isinstance(setting, Setting) or not seeds.pays(setting) or (where(run, out) / 'config.json').exists():
        return [run]
    return [
        other
        for other in left
        if dataclasses.replace(other.setting, seed=run.seed) == setting
        and not (where(other, out) / 'config.json').exists()
    ][: seeds.MOST]


def perform(
    runs: Sequence[Run],
    out: str | Path,
    data_dir: str | Path | None,
    chunk: Sequence[int] | None,
    tune: bool,
    watch: Watch | None,
    show: bool,
) -> dict[str, dict[str, Any]]:
    """Carries out runs that go together, and returns their summaries by name; one that diverged says so."""
    found: dict[str, dict[str, Any]] = {}
    fresh = []
    for run in runs:
        if (known := summary(run, out)) is not None:  # another process may just have finished it
            found[run.setting.name] = known
        else:
            fresh.append(run)
    if len(fresh) > 1:
        folders = [where(run, out) for run in fresh]
        settings = [run.setting for run in fresh if isinstance(run.setting, Setting)]
        done = seeds.run(settings, folders, data_dir=data_dir, progress=show)
        for run, result in zip(fresh, done, strict=True):
            found[run.setting.name] = diverged(run, out, result) if isinstance(result, Exception) else result
    elif fresh:
        (run,) = fresh
        if isinstance(run.setting, Geometry):
            return {run.setting.name: geometry.run(run.setting, where(run, out))}
        folder = where(run, out)
        try:
            with contextlib.nullcontext() if watch is None else watch(run, folder) as on_round:
                result = pipeline.run(
                    run.setting, folder, data_dir=data_dir, resume=True, chunk=chunk, tune=tune, on_round=on_round,
                    progress=show,
                )  # fmt: skip
        except training.DivergedError as error:
            result = diverged(run, out, error)
        found[run.setting.name] = result
    return found


def diverged(run: Run, out: str | Path, error: Exception) -> dict[str, Any]:
    """Writes into the summary of a run that it diverged; what is known of its generic model stays."""
    path = where(run, out) / 'summary.json'
    known = pipeline.known(path) if path.exists() else {}
    told = {**known, 'seed': run.seed, 'diverged': str(error)}
    pipeline.write(path, told)
    return told


def where(run: Run, out: str | Path) -> Path:
    """The folder of a run."""
    return Path(out) / 'runs' / run.setting.name


def own_files(config: Mapping[str, Any]) -> dict[str, str]:
    """Digests of the files of a user's own that a run was made with, such as of 'method steps.halved:algorithm'."""
    told = {}
    for name, (part, what) in pipeline.OWN.items():
        if config.get(name):
            given = config.get(part, '')
            told[f'{what} {given if isinstance(given, str) else ", ".join(given)}'] = config[name]
    return told | ({f'data {config["dataset"]}': config['data']} if config.get('data') else {})


def summary(run: Run, out: str | Path) -> dict[str, Any] | None:
    """What a finished run has found, with its `curve`; None for one that is not finished or has other settings than its
    name says, or whose summary is damaged.

    The curve is (round, accuracy in percent) of every evaluation, of the generic model, or of personal ones if it says
    `personal`. Numbers of probes over the rounds stand in `probed` by their names, and in `own` the digests of what is
    a user's own, by what sentences call it.
    """
    path = where(run, out) / 'summary.json'
    if not path.exists():
        return None
    try:
        found = pipeline.known(path)
        config = pipeline.known(beside) if (beside := path.with_name('config.json')).exists() else {}
        if config and type(run.setting).among(config) != run.setting:
            return None  # a default may have changed since: what is there is told when the run is begun
    except ValueError:
        return None
    whole = 'diverged' in found or isinstance(run.setting, Geometry) or found.get('rounds') == run.setting.rounds
    if not whole:
        return None
    rows = list(evaluations(path.parent))
    probed = {name for row in rows for name in row if not probes.taken(name)}
    return found | {
        'curve': [(int(row['round']), 100.0 * next(row[u] for u in ACCURACIES if u in row)) for row in rows],
        'personal': any('accuracy' not in row for row in rows),
        'own': own_files(config),
        'probed': {name: [(int(row['round']), row[name]) for row in rows if name in row] for name in sorted(probed)},
    }


def evaluations(folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of a run's rounds that were evaluated."""
    path = folder / 'metrics.jsonl'
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:  # the end of a run that was killed
            break
        if any(name in row for name in ACCURACIES):
            yield row


def seeds_of(study: Study, out: str | Path) -> list[int]:
    """The study's seeds, and others under which runs of it are in `out`, by number."""
    cells = {dataclasses.replace(run.setting, seed=0).name for run in study.runs}
    found = set(study.seeds)
    for path in Path(out).glob('runs/*/config.json'):
        with contextlib.suppress(ValueError, TypeError):  # another study's, or damaged
            config = pipeline.known(path)
            for kind in {type(run.setting) for run in study.runs}:
                if kind.among({**config, 'seed': 0}).name in cells:
                    found.add(int(config['seed']))
    return sorted(found)


def keep(study: Study, out: str | Path, folder: str | Path) -> int:
    """Copies what finished runs have found, under whatever seeds, into another folder: settings, summaries, metrics.

    Reports can be made from the copies. Returns the number of runs.
    """
    runs = study.some(seeds=seeds_of(study, out)).runs
    done = [run for run in distinct(runs) if summary(run, out) is not None]
    for run in done:
        there = where(run, folder)
        there.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            if (file := where(run, out) / name).exists():
                _checkpoints.replace(there / name, file.read_text())
    return len(done)


def distinct(runs: tuple[Run, ...]) -> list[Run]:
    """One run of each setting: rows that read different numbers of one model share it."""
    return list({run.setting.name: run for run in reversed(runs)}.values())[::-1]


class Teller:
    """Says what is done and how long the rest will take."""

    def __init__(self, study: Study, out: str | Path, show: bool) -> None:
        self.study, self.show = study, show
        runs = distinct(study.runs)
        known = [summary(run, out) for run in runs]
        self.total = total = len(runs)
        self.seconds = [spent(found) for found in known if found is not None]
        if show:
            missing = total - len(self.seconds)
            print(f'{study.name}: {missing} of {total} runs to do{self.left(missing)}', file=sys.stderr, flush=True)

    def left(self, missing: int) -> str:
        """How long so many runs will take, in words; nothing if that is unknown."""
        known = [seconds for seconds in self.seconds if math.isfinite(seconds)]
        each = sum(known) / len(known) if known else 60 * self.study.minutes
        if not missing or not math.isfinite(each):
            return ''
        return f', about {tqdm.format_interval(missing * each)} left'

    def left_out(self, runs: Sequence[Run], error: Exception) -> None:
        """Some cannot be run, all for one reason."""
        for run in runs:
            self.of(run, f'left out: {" ".join(str(error).split())}')

    def of(self, run: Run, text: str) -> None:
        """Something about one; a warning where lines are not shown."""
        if self.show:
            print(f'{run.label}: {text}', file=sys.stderr, flush=True)
        else:
            warnings.warn(f'{run.label}: {text}', stacklevel=4)

    def done(self, run: Run, found: Mapping[str, Any], seconds: float, rest: list[Run]) -> None:
        """One more run is done."""
        self.seconds.append(seconds)
        if not self.show:
            return
        said = [f'{heading} {shown(name, value(found, name))}' for heading, name in self.first(run, found)]
        text = ', '.join(said) or ('diverged' if 'diverged' in found else "done, with none of this study's metrics")
        took = tqdm.format_interval(seconds)
        line = f'[{len(self.seconds)}/{self.total}] {run.label}: {text}, {took}{self.left(len(rest))}'
        print(line, file=sys.stderr, flush=True)

    def first(self, run: Run, found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """The metrics that a finished run has."""
        for heading in self.study.metrics:
            name = self.study.metric(run.method, heading)
            if math.isfinite(value(found, name)):
                yield heading, name


def spent(found: Mapping[str, Any]) -> float:
    """Seconds that a run took."""
    return float(found.get('seconds', {}).get('total', math.nan))


def value(found: Mapping[str, Any], name: str) -> float:
    """A number of a summary, NaN if it has none; accuracies in percent.

    `rounds_to:0.9` is the first evaluated round in which the generic model's accuracy was at least that.
    """
    if name.startswith(TO):
        if found.get('personal'):
            return math.nan
        goal = 100 * float(name[len(TO) :]) - ROUNDING
        return float(next((r for r, seen in found.get('curve', ()) if seen >= goal), math.nan))
    number = found.get(name)
    if not isinstance(number, int | float):
        return math.nan
    return 100.0 * number if percent(name) else float(number)


def percent(name: str) -> bool:
    """Whether a number is a share that is told in percent."""
    return bool(re.search(r'(^|_)accuracy(_|$)|^global_(many|medium|few)(_last\d+)?$', name))


def shown(name: str, number: float) -> str:
    """A number as it is printed; halves away from zero, as papers round, where floats lie to either side of them."""
    if not (percent(name) or abs(number) >= 100) or not math.isfinite(number):
        return f'{number:.4g}'
    return str(Decimal(f'{number:.9f}').quantize(Decimal('0.1'), ROUND_HALF_UP))
