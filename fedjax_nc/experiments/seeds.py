"""Seeds as an axis: runs that differ in nothing but their seed, trained by one program.

Small experiments spend their time in compiling and in starting one operation after the other. Here the tables of all
partitions have one width, states, data and keys are stacked, and one compiled call is a round of every seed. Each seed
draws what it would draw alone.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_nc import _checkpoints, _training, simulate, training
from fedjax_nc._progress import Progress
from fedjax_nc.base import Algorithm, Array, FederatedData, State, Tree
from fedjax_nc.experiments import pipeline, provenance, recipes
from fedjax_nc.experiments.measures import Measures
from fedjax_nc.experiments.pipeline import Clock
from fedjax_nc.experiments.scene import Scene, build, digest, load
from fedjax_nc.experiments.setting import Setting

SMALL = 1_000_000  # examples that a run visits
MOST = 8  # seeds of one program: nothing of them is saved until all are trained


ALONE = ('ratioloss',)
"""Methods that keep examples of their own seed in the program."""


def pays(setting: Setting) -> bool:
    """Whether compiling takes longer than what is compiled: an MLP that sees few examples.

    Such runs are not worth a checkpoint on the way either.
    """
    examples = setting.max_examples or (1_442 if setting.dataset == 'digits' else math.inf)
    visits = examples * setting.participation * setting.local_epochs * setting.rounds
    return setting.model == 'mlp' and visits <= SMALL and setting.algorithm not in ALONE


def run(
    settings: Sequence[Setting],
    outs: Sequence[str | Path],
    *,
    data_dir: str | Path | None = None,
    lanes: int | None = None,
    progress: bool = True,
) -> list[dict[str, Any] | training.DivergedError]:
    """Carries out runs that differ in their seed alone.

    Writes what `pipeline.run` writes, at the end; the checkpoint is that of the last round. Results are those of
    `pipeline.run`, seed by seed: bit for bit with one lane, unless a seed's table alone is narrower than a batch.

    Args:
      settings: the runs.
      outs: a folder for each, without a run in it.
      data_dir: where data sets lie or are put.
      lanes: seeds side by side (vmapped); the others follow. By default one on a CPU, and all elsewhere.
      progress: whether it is shown.

    Returns:
      For each seed its summary, or the error with which it diverged; the others go on.

    Raises:
      ValueError: for settings that differ in more than their seed, a method of `ALONE`, or a folder that is in use
        or holds a run; without a setting.
    """
    if not settings:
        raise ValueError('there are no settings to run')
    first = settings[0]
    if any(dataclasses.replace(setting, seed=first.seed) != first for setting in settings):
        raise ValueError('runs of one program may differ in their seed alone')
    if first.algorithm in ALONE:
        raise ValueError(f'{first.algorithm} keeps examples of its own seed in its program: run its seeds one by one')
    apart = {Path(out).resolve() for out in outs}
    if not len({setting.seed for setting in settings}) == len(apart) == len(outs) == len(settings):
        raise ValueError('each run needs a seed and a folder of its own')
    folders, clock = [Path(out) for out in outs], Clock()
    with contextlib.ExitStack() as held:
        for folder in folders:
            held.enter_context(_checkpoints.holding(folder))
            if _checkpoints.Files(folder).begun():
                raise ValueError(f'{folder} already holds a run: choose another directory')
        provenance.forget_peak()
        about = pipeline.sources(first)
        with clock.part('data'):
            about |= {'data': digest(first, data_dir)}
            alone = [load(setting, data_dir) for setting in settings]
            scenes = alike(alone)
        recipe = build(first, scenes[0][0])
        measures = [Measures(setting, recipe, scene) for setting, scene in zip(settings, scenes, strict=True)]
        with clock.part('initialisation'):
            exact = measures
            if first.algorithm not in recipes.RECIPES:  # whose first states may look at what is there to fill up
                exact = [Measures(setting, recipe, scene) for setting, scene in zip(settings, alone, strict=True)]
            begun = [measure.begun() for measure in exact]
            servers = [jax.device_get(state.server) for state in begun]
        trained, histories = train(recipe.train, measures, begun, lanes, clock, progress)
        found: list[dict[str, Any] | training.DivergedError] = []
        for measure, done, history, server, folder, scene in zip(
            measures, trained, histories, servers, folders, alone, strict=True
        ):
            config = {**measure.setting.plain(), **{name: value for name, value in about.items() if value}}
            pipeline.write(folder / 'config.json', config)
            files = _checkpoints.Files(folder, _training.about(recipe.train, scene[1], measure.setting.cohort))
            files.log(history)
            if isinstance(done, training.DivergedError):
                found.append(done)
                continue
            files.save(len(history), done.state, measure.k_train, history)
            own = Clock()
            own.seconds |= {name: seconds / len(settings) for name, seconds in clock.seconds.items()}
            try:
                found.append(pipeline.conclude(measure, done, server, own, config, folder))
            except training.DivergedError as error:
                found.append(error)
        return found


def train(
    algorithm: Algorithm, measures: list[Measures], states: list[State], lanes: int | None, clock: Clock, progress: bool
) -> tuple[list[training.Run | training.DivergedError], list[list[training.Row]]]:
    """Trains all seeds; what each did, or why it stopped, and its rows until then.

    Times are shares of what all took together.
    """
    setting, count = measures[0].setting, len(measures)
    pool, tables = stacked([m.train for m in measures])
    if lanes is None:
        lanes = 1 if jax.default_backend() == 'cpu' else count
    step = simulate.compiled(together(algorithm, setting.cohort, lanes))
    held = jax.tree.map(lambda *u: jnp.stack(u), *states)
    keys = jnp.stack([m.k_train for m in measures])
    begun = time.perf_counter()
    program = step.lower(keys, held, pool, tables, jnp.int32(0)).compile()
    compiling = (time.perf_counter() - begun) / count
    when = _training.Calendar(setting.rounds, setting.eval_every, setting.eval_last)
    histories: list[list[training.Row]] = [[] for _ in measures]
    stopped: dict[int, training.DivergedError] = {}
    with Progress(f'{setting.label}, {count} seeds', 0, setting.rounds, show=progress) as bar:
        for t in range(setting.rounds):
            begun = time.perf_counter()
            held, reports = program(keys, held, pool, tables, jnp.int32(t))
            reports = jax.device_get(reports._replace(info=()))
            seconds = (time.perf_counter() - begun) / count
            for i, measure in enumerate(measures):
                if i in stopped:
                    continue
                one = jax.tree.map(lambda u, i=i: u[i : i + 1], reports)
                times = {'seconds': seconds, **({} if t else {'compile_seconds': compiling})}
                new, trouble = _training.rows(one, t, times, measure.train)
                if trouble:
                    stopped[i] = training.DivergedError(trouble)
                    continue
                if when.evaluated(t + 1):
                    with clock.part('evaluation'):
                        seen = jax.device_get(measure.general(jax.tree.map(lambda u, i=i: u[i], held)))
                    new[-1] |= {name: float(value) for name, value in seen.items()}
                histories[i] += new
            bar.at(t + 1, f'loss {np.mean(reports.loss):.3f}')
    out: list[training.Run | training.DivergedError] = []
    for i, history in enumerate(histories):
        state = jax.tree.map(lambda u, i=i: u[i], held)
        out.append(stopped.get(i) or training.Run(state, history, compiling, _training.speed(history)))
    return out, histories


def together(algorithm: Algorithm, cohort: int | None, lanes: int) -> Callable[..., tuple[State, simulate.Report]]:
    """A round of every seed: `(keys [S], states [S, ...], pool, tables [S, ...], t) -> (states, reports)`."""
    round = simulate.make_round(algorithm, cohort=cohort)

    def rounds(keys: Array, states: State, pool: Tree, tables: Tree, t: Array) -> tuple[State, simulate.Report]:
        def one(of_seed: tuple[Array, State, dict[str, Array]]) -> tuple[State, simulate.Report]:
            key, state, table = of_seed
            return round(jax.random.fold_in(key, t), state, FederatedData(**pool, **table))

        size = None if lanes == 1 else lanes
        return jax.lax.map(one, (keys, states, tables), batch_size=size)

    return rounds


def alike(scenes: list[Scene]) -> list[Scene]:
    """The scenes with index tables of one width and pools of one length, for training and for tests."""

    def widened(parts: list[FederatedData]) -> list[FederatedData]:
        width, length = max(part.index.shape[1] for part in parts), max(len(part.y) for part in parts)
        return [
            part._replace(
                index=jnp.pad(part.index, ((0, 0), (0, width - part.index.shape[1]))),
                x=jnp.pad(part.x, ((0, length - len(part.y)), *[(0, 0)] * (part.x.ndim - 1))),
                y=jnp.pad(part.y, (0, length - len(part.y))),
            )
            for part in parts
        ]

    datasets, trains, tests = zip(*scenes, strict=True)
    return list(zip(datasets, widened(list(trains)), widened(list(tests)), strict=True))


def stacked(data: list[FederatedData]) -> tuple[dict[str, Array], dict[str, Array]]:
    """What all populations share, and what each has of its own, stacked. A pool that all draw from is there once."""
    first = data[0]
    shared = ['x', 'y'] if all(same(first, other) for other in data[1:]) else []
    pool = {name: getattr(first, name) for name in shared}
    own = [name for name in FederatedData._fields if name not in shared]
    return pool, {name: jnp.stack([getattr(part, name) for part in data]) for name in own}


def same(one: FederatedData, other: FederatedData) -> bool:
    """Whether two populations draw from the same pool of examples."""
    return all(bool(jnp.array_equal(getattr(one, name), getattr(other, name))) for name in ('x', 'y'))
