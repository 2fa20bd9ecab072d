"""A study as plain data: methods x scenes x seeds, what is measured of them, and what has been published.

A study is a TOML or JSON file. Published tables are such files, in `fedjax_nc/experiments/tables`. Its parts:

    title = "Two methods on digits"
    source = "..."                  # where it was published, if it was
    notes = ["..."]                 # what cannot be had, or was not said
    baseline = "FedAvg"             # what the others are compared with, seed by seed; by default the first method
    seeds = [0, 1, 2]               # by default these

    [metrics]                       # heading = name in `summary.json`, or "rounds_to:0.9"
    general = "global_accuracy_last5"

    [setting]                       # of all runs: names of `Setting`, but for the seed
    dataset = "digits"

    [methods.FedAvg]                # a row: what it changes of the setting
    algorithm = "fedavg"
    [methods.FedNH]
    algorithm = "fednh"
    metrics = {general = "global_accuracy"}   # where this row's numbers come from, if not as for all

    [scenes."Dirichlet(0.1)"]       # a group of columns: what it changes; `unavailable = "why"` if it cannot be run
    alpha = 0.1
    [scenes."Dirichlet(0.1)".methods.FedNH]   # what it changes of a single method
    options = {rho = 0.95}

    [published.FedAvg]              # by scene: for each metric [mean, deviation] or a number, nan if there is none
    "Dirichlet(0.1)" = [[66.4, 3.1]]

    [scales.reduced]                # a smaller form under a name
    about = "what was made smaller, and why the effect can still be seen"
    minutes = 4                     # a run, on two cores
    methods = ["FedAvg"]            # by default all, as for scenes and seeds; scenes = {printed = "as shown"}
    setting = {rounds = 20}         # on top of everything

Options of methods are merged name by name, all else is replaced. Cells with equal settings share a run. `full` is the
scale of what the file says without any; `[scales.full]` may tell `about` and `minutes`.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Self

from fedjax_nc import checks
from fedjax_nc.experiments import probes, recipes
from fedjax_nc.experiments.geometry import Geometry
from fedjax_nc.experiments.scene import check as checked
from fedjax_nc.experiments.scene import method_key
from fedjax_nc.experiments.setting import KEPT, Setting, described
from fedjax_nc.frames import FrameQuality

PARTS = ('title', 'source', 'notes', 'baseline', 'seeds', 'kind', 'metrics', 'setting', 'methods', 'scenes',
         'published', 'scales')  # fmt: skip
SCALE = ('about', 'minutes', 'methods', 'scenes', 'seeds', 'setting')
KINDS: dict[str, type[Setting] | type[Geometry]] = {'training': Setting, 'geometry': Geometry}
KIND_OF: dict[str, Any] = {
    'title': str, 'source': str, 'about': str, 'notes': list, 'methods': Mapping | list,
    'scenes': Mapping | list, 'baseline': str, 'kind': str, 'minutes': int | float, 'setting': Mapping,
}  # fmt: skip
BESIDE = ('unavailable', 'metrics', 'methods')  # what scenes and methods say that is no setting
ONLY = ''  # the scene of a study without any


@dataclasses.dataclass(frozen=True)
class Run:
    """One cell of a study, under one seed."""

    method: str
    scene: str
    seed: int
    setting: Setting | Geometry

    @property
    def label(self) -> str:
        """What it is called where runs are listed."""
        return ', '.join([self.method, *([self.scene] if self.scene else []), f'seed {self.seed}'])


@dataclasses.dataclass(frozen=True)
class Study:
    """A study at one scale: methods x scenes x seeds, what is measured of them, and what has been published.

    `read` and `of` make one; the guide to experiments shows how its file is written.
    """

    name: str  #: of the file
    title: str  #: one line
    source: str  #: where it was published, or ''
    notes: tuple[str, ...]  #: what cannot be had, or was not said
    baseline: str  #: the method that the others are compared with, seed by seed
    metrics: Mapping[str, str]  #: heading -> name in the summary
    own: Mapping[str, Mapping[str, str]]  #: method -> heading -> another name for that row
    methods: tuple[str, ...]  #: rows, in order
    scenes: tuple[str, ...]  #: groups of columns, in order; ('',) of a study without any
    seeds: tuple[int, ...]  #: each of which every cell is run with
    runs: tuple[Run, ...]  #: every method, scene and seed that can be run, with its setting, seed by seed
    #: (method, scene) -> a (mean, deviation) for each metric, NaN where there is none
    published: Mapping[tuple[str, str], tuple[tuple[float, float], ...]]
    unavailable: Mapping[str, str]  #: scene -> why it cannot be run
    scale: str  #: 'full', or the name of a smaller form
    about: str  #: what was made smaller, or ''
    minutes: float  #: what a run takes on two cores, or NaN
    scales: Mapping[str, Mapping[str, Any]]  #: scale -> what is said of it

    @classmethod
    def read(cls, name: str | Path, scale: str = 'full') -> Self:
        """The study in a file, or the published table of that name.

        Args:
          name: path of a `.toml` or `.json` file, or the name of a table in `fedjax_nc/experiments/tables`.
          scale: one of the study's scales.

        Raises:
          OSError: if the file cannot be read.
          ValueError: if there is none, or it is no study; in one line, with the file's name.
        """
        path = found(name)
        try:
            return cls.of(described(path), path.stem, scale)
        except ValueError as error:
            raise ValueError(f'{path.name}: {error}') from error

    @classmethod
    def of(cls, plain: Mapping[str, Any], name: str, scale: str = 'full') -> Self:
        """The study that a mapping describes.

        Args:
          plain: what a study's file holds.
          name: what the study is called.
          scale: one of the study's scales.

        Raises:
          ValueError: for parts, names and settings that cannot be.
        """
        only('a study', plain, PARTS)
        for part, kinds in KIND_OF.items():
            kind_of(part, plain.get(part), kinds)
        for part in ('title', 'metrics', 'methods'):
            if not plain.get(part):
                raise ValueError(f'a study needs {part!r}')
        tables = {part: table(part, plain.get(part, {})) for part in ('metrics', 'setting', 'published', 'scales')}
        methods = tables_in('methods', plain['methods'])
        scenes = tables_in('scenes', plain.get('scenes', {ONLY: {}}))
        scales = {'full': {}, **tables_in('scales', tables['scales'])}
        if scale not in scales:
            raise ValueError(f'there is no scale {scale!r}, only {" and ".join(scales)}')
        for said in scales.values():
            only('a scale', said, SCALE)
            for part, kinds in KIND_OF.items():
                if part in SCALE:
                    kind_of(part, said.get(part), kinds)
            checks.number('minutes', said.get('minutes', 0.0))
        for part, inner, not_here in (
            ('scenes', scenes, 'metrics'),
            ('methods', methods, 'unavailable'),
            ('methods', methods, 'methods'),
        ):
            if wrong := [name for name, said in inner.items() if not_here in said]:
                raise ValueError(f'{part}.{wrong[0]} cannot have {not_here!r}')
        single = {
            scene: tables_in(f'scenes.{scene}.methods', said.get('methods', {})) for scene, said in scenes.items()
        }
        for scene, of_methods in single.items():
            only(f'the methods of scene {scene}', of_methods, list(methods))
            for method, said in of_methods.items():
                if wrong := [name for name in BESIDE if name in said]:
                    raise ValueError(f'scenes.{scene}.methods.{method} cannot have {wrong[0]!r}')
        for said in (
            tables['setting'],
            *scenes.values(),
            *methods.values(),
            *(of_method for of_scene in single.values() for of_method in of_scene.values()),
            *(s.get('setting', {}) for s in scales.values()),
        ):
            if 'seed' in said:
                raise ValueError("settings have no 'seed': name `seeds` of the study")
            kind_of('options', said.get('options'), Mapping)
        chosen = scales[scale]
        kind = plain.get('kind', 'training')
        if kind not in KINDS:
            raise ValueError(f'kind must be one of {", ".join(KINDS)}, not {checks.shown(kind)}')
        unavailable = {scene: line(said['unavailable']) for scene, said in scenes.items() if 'unavailable' in said}
        rows = pick('methods', chosen.get('methods'), methods)
        columns = pick('scenes', chosen.get('scenes'), scenes)
        shown = dict(zip(columns, columns, strict=True))
        if isinstance(chosen.get('scenes'), Mapping):  # where they are run on something else
            shown |= chosen['scenes']
            if len(set(shown.values())) < len(shown) or not all(isinstance(name, str) for name in shown.values()):
                raise ValueError(f'scenes of a scale must be called by different names, not {checks.shown(shown)}')
        own = {row: dict(table(f'methods.{row}.metrics', said.get('metrics', {}))) for row, said in methods.items()}
        for row, said in own.items():
            only(f'the metrics of {row}', said, list(tables['metrics']))
        seeds = chosen.get('seeds', plain.get('seeds', (0, 1, 2)))
        several = isinstance(seeds, list | tuple) and seeds
        if not several or not all(type(s) is int and s >= 0 for s in seeds) or len(set(seeds)) < len(seeds):
            raise ValueError(
                f'seeds must be different whole numbers, at least one, as [0, 1, 2], not {checks.shown(seeds)}'
            )
        seeds = tuple(seeds)
        runs, tried = [], set()
        for seed in seeds:  # seed by seed, so that an unfinished study compares like with like
            for scene in columns:
                for method in rows if scene not in unavailable else ():
                    own_scene = single[scene].get(method, {})
                    said = merged(
                        tables['setting'], scenes[scene], methods[method], own_scene, chosen.get('setting', {})
                    )
                    try:
                        if kind == 'training' and 'algorithm' not in said:
                            raise ValueError(f"names no 'algorithm': say it in methods.{method}, or in setting for all")
                        setting = KINDS[kind].of({**said, 'seed': seed})
                        if isinstance(setting, Setting) and (about := method_key(setting)) not in tried:
                            checked(setting)
                            tried.add(about)
                        runs.append(Run(method, shown[scene], seed, setting))
                    except (ValueError, TypeError) as error:
                        raise ValueError(f'{Run(method, scene, seed, None).label}: {error}') from error  # type: ignore[arg-type]
        for run in runs:
            for heading, told in {**tables['metrics'], **own[run.method]}.items():
                known_metric(heading, told, run.setting)
        baseline = plain.get('baseline', rows[0])
        if baseline not in methods:
            raise ValueError(f'the baseline {baseline!r} is none of the methods')
        notes = tuple(map(line, plain.get('notes', ())))
        printed = published(tables['published'], methods, scenes, len(tables['metrics']))
        return cls(
            name, line(plain['title']), line(plain.get('source', '')), notes, baseline,
            dict(tables['metrics']), own, rows, tuple(shown.values()), seeds, tuple(runs),
            {(method, shown[scene]): pairs for (method, scene), pairs in printed.items() if scene in shown},
            {shown[scene]: why for scene, why in unavailable.items() if scene in shown}, scale,
            line(chosen.get('about', '')), float(chosen.get('minutes', math.nan)), scales,
        )  # fmt: skip

    def metric(self, method: str, heading: str) -> str:
        """The name in the summary of what the row of a `method` has under a `heading`, one of `metrics`."""
        return self.own[method].get(heading, self.metrics[heading])

    def apart(self, method: str, kind: str = 'global_accuracy') -> bool:
        """Whether a row looks at another model of its run than the one it ends with, as before calibration.

        Args:
          method: the row.
          kind: how the names of what it looks at begin: `global_accuracy` for generic models, `personal_accuracy_`.
        """
        final = re.compile(r'global_accuracy(_last\d+)?')  # numbers of the model that the run ends with
        names = self.own.get(method, {}).values()
        return any(name.startswith(kind) and not final.fullmatch(name) for name in names)

    def against(self, baseline: str | None) -> Self:
        """The study with another baseline, one of its methods; its own if that is None.

        Raises:
          ValueError: for a name that it does not have.
        """
        if baseline is None:
            return self
        return dataclasses.replace(self, baseline=pick('methods', [baseline], self.methods)[0])

    def some(
        self,
        methods: Sequence[str] | None = None,
        scenes: Sequence[str] | None = None,
        seeds: Sequence[int] | None = None,
    ) -> Self:
        """A part of the study.

        Args:
          methods: names of rows; all by default.
          scenes: names of groups of columns; all by default.
          seeds: whole numbers, which may be others than its own; its own by default.

        Returns:
          The study with these methods, scenes and seeds alone.

        Raises:
          ValueError: for a name that it does not have, no name or no seed.
        """
        rows, columns = pick('methods', methods, self.methods), pick('scenes', scenes, self.scenes)
        for seed in () if seeds is None else seeds:
            checks.whole('each of the seeds', seed, 0)
        ours = self.seeds if seeds is None else tuple(dict.fromkeys(map(int, seeds)))
        if not ours:
            raise ValueError("seeds name none: leave them out for the study's own")
        cells = {(run.method, run.scene): run for run in self.runs}
        runs = [
            dataclasses.replace(cell, seed=seed, setting=dataclasses.replace(cell.setting, seed=seed))
            for seed in ours
            for scene in columns
            for method in rows
            if (cell := cells.get((method, scene)))
        ]
        return dataclasses.replace(self, methods=rows, scenes=columns, seeds=ours, runs=tuple(runs))


def found(name: str | Path) -> Path:
    """The file of a study, or of the published table of that name.

    Raises:
      ValueError: if there is neither.
    """
    path = Path(name)
    if path.suffix in ('.toml', '.json'):
        if not path.is_file():
            raise ValueError(f'there is no file {path}')
        return path
    if (table := folder() / f'{name}.toml').is_file():
        return table
    raise ValueError(f'{name} is neither a study (a .toml or .json file) nor a published table: {", ".join(tables())}')


def folder() -> Path:
    """Where the published tables lie."""
    return Path(str(resources.files('fedjax_nc.experiments'))) / 'tables'


def tables() -> list[str]:
    """The names of all published tables."""
    return sorted(path.stem for path in folder().glob('*.toml'))


def merged(*said: Mapping[str, Any]) -> dict[str, Any]:
    """Settings on top of each other; options by name."""
    options: dict[str, Any] = {}
    for part in said:
        options |= part.get('options', {})
    plain = {name: value for part in said for name, value in part.items() if name not in BESIDE}
    return {**plain, **({'options': options} if options else {})}


def published(
    said: Mapping[str, Any], methods: Iterable[str], scenes: Iterable[str], metrics: int
) -> dict[tuple[str, str], tuple[tuple[float, float], ...]]:
    """What a table printed: (method, scene) -> (mean, deviation) of every metric."""
    kept = {}
    for method, row in tables_in('published', said).items():
        if method not in methods:
            raise ValueError(f'published: {method!r} is none of the methods')
        for scene, values in row.items():
            if scene not in scenes:
                raise ValueError(f'published: {scene!r} is none of the scenes')
            pairs = tuple(pair(value) for value in (values if isinstance(values, list) else [values]))
            if len(pairs) != metrics:
                raise ValueError(f'published: {method}, {scene} has {len(pairs)} numbers for {metrics} metrics')
            kept[method, scene] = pairs
    return kept


def pair(value: Any) -> tuple[float, float]:
    """A mean and its deviation, from both or the mean alone."""
    both = value if isinstance(value, list) else [value, math.nan]
    if len(both) != 2 or not all(isinstance(number, int | float) for number in both):
        raise ValueError(f'published: {checks.shown(value)} is neither a number nor [mean, deviation]')
    return float(both[0]), float(both[1])


def known_metric(heading: str, name: Any, setting: Setting | Geometry) -> None:
    """Raises ValueError for a name that no summary of such a run has."""
    if isinstance(setting, Geometry):
        names: tuple[str, ...] = FrameQuality._fields
    else:
        ends = ('', '_std', '_pooled', '_low', '_before', '_before_std', '_trained', '_released', '_tuned', '_head',
                '_present', '_present_std', '_labels', '_labels_std')  # fmt: skip
        probed = probes.told(setting.probes)
        last = [f'global_{kind}_last{setting.eval_last}' for kind in (*KEPT, *(probed or ()))]
        names = ('global_accuracy', 'global_accuracy_oracle', *last, *(f'personal_accuracy{end}' for end in ends),
                 'rounds_per_second', 'compile_seconds', 'padded_work_share', 'broken_clients')  # fmt: skip
        if isinstance(name, str) and re.fullmatch(r'rounds_to:(0?\.\d+|1(\.0*)?)', name):
            return
        views = rf'personal_accuracy_\w+|global_accuracy_\w+_last{setting.eval_last}'
        if setting.algorithm not in recipes.RECIPES and isinstance(name, str) and re.fullmatch(views, name):
            return  # what a method of one's own may call its views and variants
        if probed is None and isinstance(name, str) and re.fullmatch(rf'global_\w+_last{setting.eval_last}', name):
            return  # what one's own probe may call so
    if name not in names:
        raise ValueError(f'metrics: {heading} cannot be {checks.shown(name)}; there are {", ".join(names)}')


def kind_of(what: str, value: Any, kinds: Any) -> None:
    """Raises ValueError for a part of another type; what is not there is None."""
    if value is not None and not isinstance(value, kinds):
        raise ValueError(f'{what} cannot be {checks.shown(value)}')


def table(what: str, value: Any) -> Mapping[str, Any]:
    """Raises ValueError for what is no mapping."""
    if not isinstance(value, Mapping):
        raise ValueError(f'{what} must be a table, not {checks.shown(value)}')
    return value


def tables_in(what: str, value: Any) -> dict[str, Mapping[str, Any]]:
    """A table of tables."""
    return {name: table(f'{what}.{name}', inner) for name, inner in table(what, value).items()}


def line(text: Any) -> str:
    """A text in one line."""
    return ' '.join(str(text).split())


def only(what: str, said: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raises ValueError for a name that is not known."""
    if unknown := [name for name in said if name not in known]:
        raise ValueError(f'{what} has no {", ".join(unknown)}; there are {", ".join(known)}')


def pick(what: str, chosen: Sequence[str] | None, known: Iterable[str]) -> tuple[str, ...]:
    """The chosen names, all by default, in their known order."""
    known = tuple(known)
    if chosen is None:
        return known
    if not chosen:
        raise ValueError(f'{what} name none: leave them out for all of {", ".join(known)}')
    if unknown := [name for name in chosen if name not in known]:
        if known == ('',):
            raise ValueError(f'no {what} {", ".join(map(str, unknown))}: the study has none, leave them out')
        raise ValueError(f'no {what} {", ".join(map(str, unknown))}; there are {", ".join(known)}')
    return tuple(name for name in known if name in chosen)
