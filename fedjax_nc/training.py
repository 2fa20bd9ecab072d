"""The Python around the round: progress, evaluation, files and resumption."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedjax_nc import checks, devices, fingerprint, footprint, population, simulate
from fedjax_nc.base import Algorithm, Array, FederatedData, State
from fedjax_nc.checkpoints import CheckpointError as CheckpointError
from fedjax_nc.checkpoints import Files, Row, first_process, holding
from fedjax_nc.progress import Progress

Evaluate = Callable[[State], dict[str, Array]]
"""From the state to named scalars; 'accuracy' is shown in the progress bar."""


class DivergedError(RuntimeError):
    """The server's state became NaN or infinite, or the losses of all clients."""


class Run(NamedTuple):
    """What `run` returns."""

    state: State
    history: list[Row]  # one row a round: round, loss, padded_work, broken, seconds, and metrics where evaluated
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
    donated: use the one that comes back. A client is broken in a round if its state, message or loss is not finite;
    where the aggregator keeps the server finite all the same, training goes on, and `history` counts them.

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
      out: directory for `metrics.jsonl`, `metrics.csv` and `checkpoints/`; nothing is written without it. The run holds
        it as long as it lasts.
      checkpoint_every: rounds between checkpoints; by default as often as evaluation. The last state is always saved.
      resume: continue from the newest checkpoint in `out`, or begin if there is none. A damaged one is put aside, with
        a warning, and the one before it taken.
      memory_limit: bytes that a round may take, as for `footprint.check`; `math.inf` for no limit.
      progress: whether to show a progress bar, which is lines where no terminal is.
      name: its label.

    Raises:
      ValueError: if `rounds` or another number is not a whole one of at least 1, if `resume` lacks `out`, if `out`
        already holds a run that is not to be resumed, or one of more rounds, or is in use by another run.
      MemoryError: if a round would need more memory than there is; before anything is compiled.
      DivergedError: when the server is not finite any more, or no client is; it names the round, the broken clients and
        what may be the cause, and the last good checkpoint stays.
      CheckpointError: if all checkpoints are damaged, or they are of another algorithm, cohort, data or key.
    """
    every = eval_every if checkpoint_every is None else checkpoint_every
    numbers = {'rounds': rounds, 'rounds_per_call': rounds_per_call, 'eval_every': eval_every, 'eval_last': eval_last}
    for what, number in {**numbers, 'checkpoint_every': every}.items():
        checks.whole(what, number, 0 if what == 'eval_last' else 1)
    if resume and out is None:
        raise ValueError('resume needs the directory of the run: pass out=')
    checks.kind('data', data, FederatedData)
    store = state.clients if isinstance(state.clients, population.Store) else None
    if store is not None and rounds_per_call > 1:
        raise ValueError('client states kept off the devices come and go between rounds: leave rounds_per_call at 1')
    if mesh is not None:
        server, placed = state.server, () if store is not None else state.clients
        (server, placed), data = devices.place(mesh, State(server, placed), data)
        state = State(server, placed if store is None else store)
    if store is None:
        step = simulate.compiled(
            simulate.several(simulate.make_round(algorithm, cohort=cohort, chunk=chunk, mesh=mesh))
        )
    else:
        alone = population.make_round(algorithm, cohort=cohort, chunk=chunk, mesh=mesh)

        def one(keys: Array, state: State, data: FederatedData) -> tuple[State, simulate.Report]:
            state, report = alone(keys[0], state, data)
            return state, jax.tree.map(lambda u: u[None], report)

    def evaluated(round: int) -> bool:
        return evaluate is not None and (round % eval_every == 0 or round > rounds - eval_last)

    def due(round: int) -> bool:
        return evaluated(round) or round % every == 0

    def fits() -> None:
        held = state
        if store is not None:  # what travels to the devices: the states of a cohort
            members, first = cohort or store.num_clients, store.take(np.arange(1))
            shape = lambda u: jax.ShapeDtypeStruct((members, *u.shape[1:]), u.dtype)  # noqa: E731
            held = state._replace(clients=jax.tree.map(shape, first))
        footprint.check(algorithm, held, data, cohort=cohort, chunk=chunk, limit=memory_limit)

    history: list[Row] = []
    files, compile_seconds = None, 0.0
    executables: dict[int, Any] = {} if store is None else {1: one}
    with holding(Path(out)) if out is not None else contextlib.nullcontext():
        if out is not None:
            parts = {'algorithm': fingerprint.of_algorithm(algorithm), 'data': fingerprint.of_arrays(data)}
            files = Files(Path(out), {**parts, 'cohort': str(cohort)})
            if resume:
                history, state = files.restore(state, key)
                if len(history) > rounds:
                    raise ValueError(f'{out} already holds {len(history)} rounds, more than the {rounds} asked for')
            elif files.begun():
                raise ValueError(f'{out} already holds a run: resume it, or choose another directory')
        first = len(history)
        if first < rounds and memory_limit != math.inf:
            fits()
        with Progress(name, first, rounds, show=progress and first_process()) as bar:
            for start, stop in calls(first, rounds, rounds_per_call, due):
                keys = jax.vmap(lambda t: jax.random.fold_in(key, t))(jnp.arange(start, stop))
                if start == first or stop - start not in executables:
                    bar.compiling()
                if stop - start not in executables:
                    begin = time.perf_counter()
                    executables[stop - start] = step.lower(keys, state, data).compile()
                    compile_seconds += time.perf_counter() - begin
                begin = time.perf_counter()
                state, report = executables[stop - start](keys, state, data)
                told = jax.device_get(report._replace(info=(), balance=()))
                seconds = (time.perf_counter() - begin) / (stop - start)
                for i in range(stop - start):
                    loss, padded, finite = (float(u[i]) for u in (told.loss, told.padded_work, told.finite))
                    members = told.ids[i] < data.num_clients
                    broken = told.ids[i][told.broken[i]]
                    if not (math.isfinite(loss) and finite):
                        if files is not None:
                            files.log(history[start:])
                        raise DivergedError(diverged(start + i + 1, broken, int(members.sum()), data, files))
                    history.append({'round': start + i + 1, 'loss': loss, 'padded_work': padded,
                                    'broken': len(broken), 'seconds': seconds})  # fmt: skip
                if evaluate is not None and evaluated(stop):
                    history[-1] |= {k: float(v) for k, v in jax.device_get(evaluate(state)).items()}
                if files is not None:
                    files.log(history[start:stop])
                    if stop % every == 0 or stop == rounds:
                        files.save(stop, state, key, history)
                bar.at(stop, shown(history, int(members.sum())))
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


def shown(history: list[Row], members: int) -> str:
    """What is said of a run beside how far it is, the most important first."""
    text = [f'loss {history[-1]["loss"]:.3f}']
    seen = [row['accuracy'] for row in history if 'accuracy' in row]
    if seen:
        text.append(f'accuracy {seen[-1]:.3f}')
    if broken := history[-1].get('broken'):
        text.append(f'{broken:.0f} of {members} clients not finite')
    return ', '.join([*text, f'{speed(history):.2f} rounds/s'])


def diverged(round: int, broken: np.ndarray, members: int, data: FederatedData, files: Files | None) -> str:
    """What is said of a run that cannot go on."""
    text = f'training diverged in round {round}: the server or all losses are not finite'
    if len(broken):
        names = ', '.join(map(str, sorted(broken.tolist())[:10])) + (', ...' if len(broken) > 10 else '')
        text += f'; {len(broken)} of {members} clients are not finite: {names}'
    kept = files.newest() if files is not None else None
    advice = cause(broken, data)
    return f'{text}; {advice}' + (f'. The last good checkpoint is that of round {kept}' if kept else '')


def cause(broken: np.ndarray, data: FederatedData) -> str:
    """Why clients broke, as far as their data tell, and what to do."""
    if not len(broken):
        return "no client is broken, so that it is the server's step: begin a new run with a lower server rate"
    for k in sorted(broken.tolist()):
        index, size = (fingerprint.on_host(u) for u in (data.index[k], data.size[k]))
        x, y = (fingerprint.on_host(u[index[: int(size)]]) for u in (data.x, data.y))
        if np.issubdtype(x.dtype, np.inexact) and not np.isfinite(x.astype(np.float32)).all():
            return f'examples of client {k} hold NaN or infinity: mend the data, or leave the client out'
        if y.min() < 0 or y.max() >= data.num_classes:
            return f'labels of client {k} go from {y.min()} to {y.max()}, and the data have {data.num_classes} classes'
    return (
        'their examples are finite: begin a new run with a lower learning rate, or limit gradients by local.sgd(clip=)'
    )


def last_mean(history: list[Row], metric: str = 'accuracy', last: int = 5) -> float:
    """Mean of a metric over the last rounds that have it, as published tables report; NaN if none has."""
    values = [row[metric] for row in history if metric in row][-last:]
    return sum(values) / len(values) if values else math.nan
