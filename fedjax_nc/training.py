"""The Python around the round: progress bar, evaluation, files and resumption."""

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from fedjax_nc import devices, footprint, population, simulate
from fedjax_nc.base import Algorithm, Array, FederatedData, State
from fedjax_nc.checkpoints import CheckpointError as CheckpointError
from fedjax_nc.checkpoints import Files, Row, first_process

Evaluate = Callable[[State], dict[str, Array]]
"""From the state to named scalars; 'accuracy' is shown in the progress bar."""


class DivergedError(RuntimeError):
    """A loss or a parameter became NaN or infinite."""


class Run(NamedTuple):
    """What `run` returns."""

    state: State
    history: list[Row]  # one row a round: round, loss, padded_work, seconds, and metrics where evaluated
    compile_seconds: float
    rounds_per_second: float  # of the whole history, without compilation and evaluation


def run(
    algorithm: Algorithm,
    key: Array,
    state: State,
    data: FederatedData,
    *,
    rounds: int,
    cohort: int | None = None,
    chunk: int | None = None,
    mesh: Mesh | None = None,
    rounds_per_call: int = 1,
    evaluate: Evaluate | None = None,
    eval_every: int = 1,
    eval_last: int = 5,
    out: str | Path | None = None,
    checkpoint_every: int | None = None,
    resume: bool = False,
    memory_limit: float | None = None,
    progress: bool = True,
    name: str = 'train',
) -> Run:
    """Runs rounds until `rounds` are done, counting those of a resumed run.

    Round t uses `fold_in(key, t)`, so that a resumed run does what the uninterrupted one would have done. `state` is
    donated: use the one that comes back.

    Args:
      algorithm: what to train.
      key: key of the whole run.
      state: from `simulate.init`, `simulate.join` or `population.init`, which keeps client states off the devices.
      data: the clients.
      rounds: total number of rounds.
      cohort: clients a round; all by default.
      chunk: clients side by side; see `simulate.make_round`.
      mesh: devices to share the rounds, from `devices.mesh`. With several processes each runs this with the same
        arguments; `out` must be a directory that all of them see, and the first one writes the tables.
      rounds_per_call: rounds compiled into one call; saves dispatch when rounds are very short. 1 with a
        `population.Store`, where the time of the first round includes compiling it.
      evaluate: metrics of a state.
      eval_every: rounds between evaluations.
      eval_last: how many of the last rounds are evaluated whatever `eval_every` says: papers report their mean.
      out: directory for `metrics.jsonl`, `metrics.csv` and `checkpoints/`; nothing is written without it.
      checkpoint_every: rounds between checkpoints; by default as often as evaluation. The last state is always saved.
      resume: continue from the newest checkpoint in `out`, or begin if there is none.
      memory_limit: bytes that a round may take, as for `footprint.check`; `math.inf` for no limit.
      progress: whether to show a progress bar.
      name: its label.

    Raises:
      ValueError: if `rounds` or another number is not a whole one of at least 1, if `resume` lacks `out`, if `out`
        already holds a run that is not to be resumed, or one of more rounds.
      MemoryError: if a round would need more memory than there is; before anything is compiled.
      DivergedError: when training turns NaN; it names the round, and the last good checkpoint stays.
      CheckpointError: if the newest checkpoint is damaged, has other shapes or was made with another key.
    """
    every = eval_every if checkpoint_every is None else checkpoint_every
    numbers = {
        'rounds': rounds,
        'rounds_per_call': rounds_per_call,
        'eval_every': eval_every,
        'checkpoint_every': every,
    }
    for what, number in numbers.items():
        if not isinstance(number, int) or number < 1:
            raise ValueError(f'{what} must be a whole number of at least 1, not {number!r}')
    if resume and out is None:
        raise ValueError('resume needs the directory of the run: pass out=')
    store = state.clients if isinstance(state.clients, population.Store) else None
    if mesh is not None:
        server, placed = state.server, () if store is not None else state.clients
        (server, placed), data = devices.place(mesh, State(server, placed), data)
        state = State(server, placed if store is None else store)
    files = Files(Path(out)) if out is not None else None
    history: list[Row] = []
    if files is not None:
        if resume:
            history, state = files.restore(state, key)
            if len(history) > rounds:
                raise ValueError(f'{out} already holds {len(history)} rounds, more than the {rounds} asked for')
        elif files.begun():
            raise ValueError(f'{out} already holds a run: resume it, or choose another directory')
    if store is not None and rounds_per_call > 1:
        raise ValueError('client states kept off the devices come and go between rounds: leave rounds_per_call at 1')
    if len(history) < rounds and memory_limit != math.inf:
        held = state
        if store is not None:  # what travels to the devices: the states of a cohort
            members, one = cohort or store.num_clients, store.take(np.arange(1))
            shape = lambda u: jax.ShapeDtypeStruct((members, *u.shape[1:]), u.dtype)  # noqa: E731
            held = state._replace(clients=jax.tree.map(shape, one))
        footprint.check(algorithm, held, data, cohort=cohort, chunk=chunk, limit=memory_limit)
    executables: dict[int, Any] = {}
    compile_seconds = 0.0
    if store is None:
        step = simulate.compiled(
            simulate.several(simulate.make_round(algorithm, cohort=cohort, chunk=chunk, mesh=mesh))
        )
    else:
        alone = population.make_round(algorithm, cohort=cohort, chunk=chunk, mesh=mesh)

        def one(keys: Array, state: State, data: FederatedData) -> tuple[State, simulate.Report]:
            state, report = alone(keys[0], state, data)
            return state, jax.tree.map(lambda u: u[None], report)

        executables[1] = one

    def evaluated(round: int) -> bool:
        return evaluate is not None and (round % eval_every == 0 or round > rounds - eval_last)

    def due(round: int) -> bool:
        return evaluated(round) or round % every == 0

    first = len(history)
    with tqdm(
        total=rounds, initial=first, desc=name, unit='round', disable=not (progress and first_process()), leave=True
    ) as bar:
        for start, stop in calls(first, rounds, rounds_per_call, due):
            keys = jax.vmap(lambda t: jax.random.fold_in(key, t))(jnp.arange(start, stop))
            if stop - start not in executables:
                begin = time.perf_counter()
                executables[stop - start] = step.lower(keys, state, data).compile()
                compile_seconds += time.perf_counter() - begin
            begin = time.perf_counter()
            state, report = executables[stop - start](keys, state, data)
            report = jax.device_get((report.loss, report.padded_work, report.finite))
            seconds = time.perf_counter() - begin
            for i, (loss, padded, finite) in enumerate(zip(*report, strict=True)):
                if not (math.isfinite(loss) and finite):
                    if files is not None:
                        files.log(history[start:])
                    raise DivergedError(diverged(start + i + 1, files))
                history.append({'round': start + i + 1, 'loss': float(loss), 'padded_work': float(padded),
                                'seconds': seconds / (stop - start)})  # fmt: skip
            if evaluate is not None and evaluated(stop):
                history[-1] |= {k: float(v) for k, v in jax.device_get(evaluate(state)).items()}
            if files is not None:
                files.log(history[start:stop])
                if stop % every == 0 or stop == rounds:
                    files.save(stop, state, key, history)
            bar.set_postfix(shown(history), refresh=False)
            bar.update(stop - start)
    return Run(state, history, compile_seconds, speed(history))


def calls(first: int, rounds: int, at_most: int, due: Callable[[int], bool]) -> Iterator[tuple[int, int]]:
    """Cuts the rounds `[first, rounds)` into calls that end wherever something is due."""
    while first < rounds:
        stop = first + 1
        while stop < min(first + at_most, rounds) and not due(stop):
            stop += 1
        yield first, stop
        first = stop


def speed(history: list[Row]) -> float:
    """Rounds per second."""
    return len(history) / sum(row['seconds'] for row in history)


def shown(history: list[Row]) -> dict[str, str]:
    """What the progress bar says after its own counters."""
    text = {'loss': f'{history[-1]["loss"]:.3f}'}
    seen = [row['accuracy'] for row in history if 'accuracy' in row]
    if seen:
        text['accuracy'] = f'{seen[-1]:.3f}'
    return {**text, 'rounds/s': f'{speed(history):.2f}'}


def diverged(round: int, files: Files | None) -> str:
    kept = files.newest() if files is not None else None
    text = f'training diverged in round {round}: the loss or a parameter is not finite'
    advice = 'begin a new run with a lower learning rate'
    return f'{text}; {advice}' + (f'. The last good checkpoint is that of round {kept}' if kept else '')


def last_mean(history: list[Row], metric: str = 'accuracy', last: int = 5) -> float:
    """Mean of a metric over the last rounds that have it, as published tables report; NaN if none has."""
    values = [row[metric] for row in history if metric in row][-last:]
    return sum(values) / len(values) if values else math.nan
