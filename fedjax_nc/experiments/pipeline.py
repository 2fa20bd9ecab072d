"""A run from its data to its summary: train, calibrate, make personal, evaluate, sum up."""

import contextlib
import functools
import importlib
import itertools
import json
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedjax_nc import _checkpoints, checks, plots, saving, training, tuning
from fedjax_nc.base import Array, State, Tree
from fedjax_nc.experiments import networks, probes, provenance, recipes, traffic
from fedjax_nc.experiments.measures import Measures
from fedjax_nc.experiments.scene import Scene, build, digest, load
from fedjax_nc.experiments.setting import KEPT, Setting

MODEL, PERSONAL = 'model.safetensors', 'personal/{}.safetensors'
"""Files of a run: the generic model, and a client's own by its number."""
PAUSE = 10.0  # seconds between checkpoints, each of which takes about a tenth; rounds may take minutes
FREE = ('rounds', 'eval_every')  # what may differ when a run is resumed


def run(
    setting: Setting,
    out: str | Path,
    *,
    data_dir: str | Path | None = None,
    resume: bool = False,
    chunk: int | Sequence[int] | None = None,
    tune: bool = False,
    host: bool = False,
    mesh: Mesh | None = None,
    record: dict[str, Any] | None = None,
    on_round: training.OnRound | None = None,
    progress: bool = True,
    keep_personal: bool = False,
) -> dict[str, Any]:
    """Carries out a run, and returns its summary.

    Writes `config.json`, `metrics.jsonl`, `metrics.csv`, `summary.json`, `seconds.json`, `accuracy.png`, `checkpoints/`
    and the generic model, if there is one, `model.safetensors`, into `out`, which it holds as long as it lasts.

    Args:
      setting: what to run.
      out: where its files go.
      data_dir: where data sets lie or are put, as for `data.load_dataset`; files of one's own by default in the working
        directory.
      resume: continue the run in `out`, or begin it.
      chunk: clients side by side, as for `simulate.make_round`; or several numbers, to which fewer they go on as others
        are done, as in (10, 4, 2, 1). A run that is resumed keeps those of its beginning but for the first.
      tune: whether to measure first how rounds are fastest on this device, by `tuning.fastest`; what it finds is kept
        in `tuning.json` beside `out`, and used again there.
      host: whether examples stay on the host, because they are larger than the device, and travel as rounds need them.
        Results are the same.
      mesh: devices that share the clients, from `devices.mesh`.
      record: what `config.json` says beside the setting.
      on_round: as for `training.run`, but a run of a setting has all its rounds, whatever it returns.
      progress: whether it is shown.
      keep_personal: whether each client's personal model is kept, too, as `personal/NUMBER.safetensors`.

    Returns:
      What `summary.json` holds. Of the generic model, where there is one, on the test set, there are `global_accuracy`
      after the last round; `global_accuracy_lastN`, the mean of the last N rounds, `eval_last` of them; and
      `class_accuracy`. Of personal models on the clients' tests: `personal_accuracy`, the mean over clients, with
      `_std`, `_pooled` and `_low` as in `evaluate.over_clients`; and `clients`, the numbers of each. Of the generic
      model on the same tests of the same clients: `personal_accuracy_before`. `method` is what the factory of its
      algorithm was given, with that factory's own defaults. Besides `seconds` by part, with those of earlier processes
      up to ten seconds before they were stopped, `rounds_per_second`, `compile_seconds`, `padded_work_share`,
      `broken_clients`, numbers of `parameters`, `bytes` up and down, `versions`, `commit`, `device`, `date` and the
      peak of memory.

    Raises:
      ValueError: for a setting that cannot be, `tune` with `host`, or an `out` that is in use, or holds a run that is
        not to be resumed or has other settings; and as `data.load_dataset` and `training.run`, with their other errors.
      DivergedError: if training or the personal models diverged.
    """
    out = Path(out)
    checks.flags(tune=tune, host=host, keep_personal=keep_personal)
    if tune and host:
        raise ValueError('what is tuned has its examples on the device: tune without host')
    if on_round is not None:
        checks.called('on_round', on_round, 'row, state')
    provenance.commit()  # that of the code which runs, whatever is changed meanwhile
    record = {**(record or {}), **sources(setting)}
    with _checkpoints.holding(out):
        settle(setting, out, resume)
        provenance.forget_peak()
        if not (out / 'config.json').exists():  # of another run, which never began
            (out / 'seconds.json').unlink(missing_ok=True)
        clock = Clock(out / 'seconds.json')
        with clock.part('data'):
            record |= {'data': digest(setting, data_dir) or None}
            begun_with(record, out)
            scene = load(setting, data_dir, host)
        with clock.part('tuning') if tune else contextlib.nullcontext():
            choice = chosen(setting, scene, out, chunk, tune, progress)
        if choice != tuning.Choice(chunk=choice.chunk):
            record |= {'tuned': choice._asdict()}
        recipe = build(setting, scene[0], choice)
        measure = Measures(setting, recipe, scene, choice.chunk)
        with clock.part('initialisation'):
            state = measure.begun()
            first = jax.device_get(state.server)  # training takes the buffers of the state
        write(out / 'seconds.json', clock.seconds)
        config = {**setting.plain(), **{k: v for k, v in record.items() if v is not None}}
        if not (out / 'config.json').exists():
            write(out / 'config.json', config)

        def evaluated(state: State) -> dict[str, Array]:
            with clock.part('evaluation'):
                return jax.block_until_ready(measure.general(state))

        def watched(row: training.Row, state: State) -> None:
            if on_round is not None:
                on_round(row, state)

        if on_round is None:  # which may import what is then half there
            import_ahead()
        with choice.products():
            done = training.run(
                recipe.train, measure.k_train, state, scene[1], rounds=setting.rounds, cohort=setting.cohort,
                chunk=choice.chunk, mesh=mesh, rounds_per_call=choice.rounds_per_call, evaluate=evaluated,
                eval_every=setting.eval_every, eval_last=setting.eval_last, out=out, resume=resume,
                checkpoint_pause=PAUSE, on_round=None if on_round is None else watched, progress=progress,
                name=setting.label,
            )  # fmt: skip
        if mesh is not None:
            done = done._replace(state=jax.tree.map(jnp.asarray, jax.device_get(done.state)))
        return conclude(measure, done, first, clock, config, out, keep_personal)


OWN = {
    'source': ('algorithm', 'method'),
    **{f'{part}_source': (part, part) for part in ('model', 'head', 'loss', 'partition')},
    'server_optimizer_source': ('server_optimizer', 'server optimizer'),
    'probes_source': ('probes', 'probes'),
}
"""Digests in `config.json`: of which setting's file, and what sentences call it."""


def sources(setting: Setting) -> dict[str, str]:
    """Digests of what runs of a user's own, for `config.json`: of the files of its method, its model and their like."""
    found = {name: digests(getattr(setting, own), provenance.running) for name, (own, _) in OWN.items()}
    return {name: digest for name, digest in found.items() if digest}


def digests(names: str | Sequence[str], digest: Callable[[str], str]) -> str:
    """That of one name, or those of several."""
    return ' '.join(filter(None, map(digest, [names] if isinstance(names, str) else names)))


def replaced(config: dict[str, Any], setting: Setting, digest: Callable[[str], str] = provenance.source) -> str:
    """Of which part of a user's own the file is another one than `config.json` says; '' if none is known."""
    for name, (part, what) in OWN.items():
        now = digests(getattr(setting, part), digest)
        if config.get(name) and now and config[name] != now:
            return what
    return ''


def begun_with(record: dict[str, Any], out: Path) -> None:
    """Refuses to go on from a run whose means would be of two test sets, or of two functions.

    Of a method, its parts and the clients' examples, checkpoints know themselves whether they are the same.

    Raises:
      ValueError: if data of one's own, or files of probes, are not those of `config.json` in `out`.
    """
    before = known(out / 'config.json') if (out / 'config.json').exists() else {}
    for name, what in (('data', 'other data'), ('probes_source', 'another file of probes')):
        if before.get(name) and record.get(name) and before[name] != record[name]:
            raise ValueError(f'{out} was begun with {what}: put back what was there, or choose another directory')


def import_ahead() -> None:
    """Imports beside the compiler what a run needs later: for short ones a tenth of their time."""

    def work() -> None:
        for name in ('orbax.checkpoint', 'matplotlib.backends.backend_agg', 'matplotlib.figure'):
            with contextlib.suppress(Exception):  # told where it is needed
                importlib.import_module(name)

    threading.Thread(target=work, daemon=True).start()


def side_by_side(chunk: int | Sequence[int] | None) -> tuning.Choice:
    """What `run` was asked for as `chunk`.

    Raises:
      ValueError: for numbers that do not descend.
    """
    if not isinstance(chunk, Sequence):
        return tuning.Choice(chunk=chunk)
    if not chunk or any(more <= less for more, less in itertools.pairwise(chunk)):
        raise ValueError(f'clients side by side must become fewer, and they are {", ".join(map(str, chunk))}')
    return tuning.Choice(chunk=chunk[0], narrower=tuple(reversed(chunk[1:])))


def chosen(
    setting: Setting, scene: Scene, out: Path, chunk: int | Sequence[int] | None, tune: bool, show: bool
) -> tuning.Choice:
    """How rounds are to be computed: as until now if the run goes on, else what is asked for or fastest here."""
    asked, path = side_by_side(chunk), out / 'config.json'
    if path.exists():  # another form would be another algorithm to its checkpoints
        try:
            before = tuning.Choice.of(known(path).get('tuned', {}))
        except TypeError as error:
            raise ValueError(f'{path} is damaged: choose another directory') from error
        return before if chunk is None else before._replace(chunk=asked.chunk)
    if not tune:
        return asked
    choices = tuning.candidates(
        setting.cohort or setting.clients, convolutions=setting.model not in networks.DENSE,
        batch_size=setting.batch_size, sizes=scene[1].size,
    )  # fmt: skip
    if setting.model not in networks.MODELS:  # whose convolutions, if there are any, have a form of their own
        choices = [choice for choice in choices if choice.conv is None]
    if chunk is not None:
        choices = [choice._replace(chunk=asked.chunk, narrower=asked.narrower or choice.narrower) for choice in choices]
    found = tuning.fastest(
        lambda choice: build(setting, scene[0], choice).train, scene[1], choices, cohort=setting.cohort,
        cache=out.parent / 'tuning.json', show=print if show else None,
    )  # fmt: skip
    return found.choice


def conclude(
    measure: Measures,
    done: training.Run,
    first: Tree,
    clock: 'Clock',
    config: dict[str, Any],
    out: Path,
    keep_personal: bool = False,
) -> dict[str, Any]:
    """Makes the personal models of a run that is trained, measures and sums up; writes all but the checkpoints.

    Args:
      measure: what measures it.
      done: the training.
      first: the server state that it began with.
      clock: where its time went until now.
      config: what `config.json` is to say.
      out: where its files go.
      keep_personal: whether personal models are among them.

    Raises:
      DivergedError: if the personal models diverged; after all is written.
    """
    setting, recipe = measure.setting, measure.recipe
    with clock.part('personal'):
        delivered = measure.delivered(done.state)  # once: calibrating takes time
        personal, tuned, own = measure.personal(done.state, delivered)
    seconds = {
        **clock.seconds,
        'compilation': done.compile_seconds,
        'rounds': sum(row['seconds'] for row in done.history),
    }
    final = [row for row in done.history if row['round'] > setting.rounds - setting.eval_last]
    missing = [('accuracy' if recipe.generic else 'accuracy_personal') not in row for row in final]
    if missing[-1]:
        raise ValueError(
            f'{out} was to have more rounds and was not evaluated after {setting.rounds}: let it have more of them'
        )
    if any(missing):
        warnings.warn(
            f'{out}: means over the last {setting.eval_last} rounds leave some out, in which the run was not evaluated '
            'because it was to have more rounds when it was begun',
            stacklevel=2,
        )
    summary = {
        'algorithm': setting.algorithm,
        'method': dict(recipe.told),
        'dataset': setting.dataset,
        'seed': setting.seed,
        'rounds': setting.rounds,
        **({'global_accuracy': done.history[-1]['accuracy']} if recipe.generic else {}),
        **{
            f'global_{name}_last{setting.eval_last}': training.last_mean(final, name, setting.eval_last)
            for name in (*KEPT, *(f'accuracy_{view}' for view in recipe.views))
            if name in done.history[-1]
        },
        **{
            f'global_{name}_last{setting.eval_last}': probes.finite(training.last_mean(final, name, setting.eval_last))
            for name in done.history[-1]
            if setting.probes and not probes.taken(name)
        },
        **personal,
        **measure.final(done.state, delivered),
        'rounds_per_second': done.rounds_per_second,
        'compile_seconds': done.compile_seconds,
        'seconds': {**seconds, 'total': sum(seconds.values())},
        'padded_work_share': float(np.mean([row['padded_work'] for row in done.history])),
        'broken_clients': int(sum(row['broken'] for row in done.history)),
        'parameters': parameters(done.state),
        'bytes': sent(
            setting,
            traffic.of(recipe.train, first, done.state, measure.train),
            recipe.calibrate and traffic.of(recipe.calibrate, delivered[1].server, delivered[1], measure.train),
        ),
        'jax': jax.__version__,
        **provenance.about(),
    }
    save = functools.partial(
        saving.save, data=measure.train, classes=measure.dataset.classes, about={'setting': setting.plain()}
    )
    if recipe.generic and _checkpoints.first_process():
        save(out / MODEL, *delivered)
    if keep_personal and tuned and _checkpoints.first_process():
        algorithm, state = own[0], jax.device_get(own[1])
        (out / PERSONAL).parent.mkdir(exist_ok=True)
        for client in measure.owners(done.state):
            save(out / PERSONAL.format(client), algorithm, state, client=client)
    write(out / 'config.json', config)  # a resumed run may be longer than it was begun
    write(out / 'seconds.json', clock.seconds)
    write(out / 'summary.json', summary)
    try:
        picture(setting, recipe, done, out)
    except ImportError as missing:
        warnings.warn(f'{out} gets no picture: {missing}', stacklevel=2)
    if not tuned:
        raise training.DivergedError('the personal models diverged: begin a new run with a lower lr')
    return summary


class Clock:
    """Where the time of a run goes, that of its earlier processes included but for their last seconds.

    What is measured again adds up. Rounds and compiling are not among it: the history of the training has them.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Goes on from what a file says, if one is given, and keeps it there."""
        self.path, self.seconds, self._kept = path, dict[str, float](), -math.inf
        if path is not None and path.exists():
            with contextlib.suppress(ValueError, TypeError):  # a damaged one is begun anew
                self.seconds = {name: float(seconds) for name, seconds in known(path).items()}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Adds what passes in it to a part."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            now = time.perf_counter()
            self.seconds[name] = self.seconds.get(name, 0.0) + now - begun
            if self.path is not None and now - self._kept > PAUSE:
                write(self.path, self.seconds)
                self._kept = now


def parameters(state: State) -> dict[str, int]:
    """Numbers that are trained, by the parts of the model and in all; those of the server's model."""
    if not hasattr(state.server, 'variables'):  # a method of somebody's own, whose server is of another kind
        return {'total': sum(u.size for u in jax.tree.leaves(state.server))}
    parts = {name: sum(u.size for u in jax.tree.leaves(part)) for name, part in state.server.variables.params.items()}
    return {**parts, 'total': sum(parts.values())}


def sent(setting: Setting, each: traffic.Traffic, after: traffic.Traffic | None = None) -> dict[str, int]:
    """Bytes of a client in a round, of a round, and of the run, in which every client is sent once what never moves.

    A stage `after` training, to calibrate, has every client once, which is sent all that it reads; the run includes it.
    """
    members, rounds, clients = setting.cohort, setting.rounds, setting.clients
    stage = {}
    if after is not None:
        stage = {'calibration_down': clients * (after.down + after.once), 'calibration_up': clients * after.up}
    return {
        'client_down': each.down,
        'client_up': each.up,
        'client_once': each.once,
        'round_down': members * each.down,
        'round_up': members * each.up,
        'down': rounds * members * each.down + clients * each.once + stage.get('calibration_down', 0),
        'up': rounds * members * each.up + stage.get('calibration_up', 0),
        **stage,
    }


def picture(setting: Setting, recipe: recipes.Recipe, done: training.Run, out: Path) -> None:
    """Draws the accuracy over rounds."""
    shown = 'accuracy' if recipe.generic else 'accuracy_personal'
    seen = [(row['round'], row[shown]) for row in done.history if shown in row]
    rounds, values = (np.array(column) for column in zip(*seen, strict=True))
    title = f'{setting.dataset}, {setting.clients} clients, {setting.partition}'
    if setting.partition.startswith('dirichlet') and setting.partition != 'dirichlet_sizes':
        title = f'{setting.dataset}, {setting.clients} clients, Dirichlet({setting.alpha:g})'
    plots.accuracy_curves({setting.label: (rounds, values)}, title=title).savefig(out / 'accuracy.png', dpi=150)


def settle(setting: Setting, out: Path, resume: bool) -> None:
    """Raises ValueError if `out` holds a run that is not to be resumed, or one with other settings."""
    path = out / 'config.json'
    if not path.exists():
        return
    if not resume:
        raise ValueError(f'{out} already holds a run: resume it (--resume, `resume=True`), or choose another directory')
    try:
        before = Setting.among(known(path)).plain()
    except TypeError as error:
        raise ValueError(f'{path} is damaged: choose another directory') from error
    planned = setting.algorithm == 'fedetf_gmv' and 'warm' not in dict(setting.options)
    bound = ('rounds',) if planned else ()  # the memory's beginning is planned from their number
    said = [
        f'{name} was {before[name]} and is now {value}'
        for name, value in setting.plain().items()
        if (name not in FREE or name in bound) and before[name] != value
    ]
    if said:
        advice = '; the option warm would free the rounds' if planned and before['rounds'] != setting.rounds else ''
        raise ValueError(f'the run in {out} has other settings: {", ".join(said)}{advice}')


def known(path: Path) -> dict[str, Any]:
    """What a JSON file holds.

    Raises:
      ValueError: if it is damaged.
    """
    try:
        content = json.loads(path.read_text())
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise ValueError(f'{path} is damaged: choose another directory')
    return content


def write(path: Path, content: dict[str, Any]) -> None:
    """JSON, written beside its place and renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _checkpoints.replace(path, json.dumps(content, indent=2) + '\n')
