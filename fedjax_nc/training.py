"""The Python around the round: progress, evaluation, files and resumption."""

import contextlib
import itertools
import math
import time
import warnings
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
from fedjax_nc.data.host import HostData, feed, shapes
from fedjax_nc.progress import Progress

Evaluate = Callable[[State], dict[str, Array]]
"""From the state to named scalars; 'accuracy' is shown in the progress bar."""


OnRound = Callable[[Row, State], None]
"""Sees a round's row and the state after it, which it must not keep: the next round takes its memory."""


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
    checkpoint_pause: float = 0.0,
    resume: bool = False,
    memory_limit: float | None = None,
    on_round: OnRound | None = None,
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
      data: the clients; `data.HostData` stay off the devices, and each round's examples travel while the one before is
        computed.
      rounds: total number of rounds.
      cohort: clients a round; all by default.
      chunk: clients side by side; see `simulate.make_round`.
      mesh: devices to share the rounds, from `devices.mesh`. With several processes each runs this with the same
        arguments; `out` must be a directory that all of them see, and the first one writes the tables.
      rounds_per_call: rounds compiled into one call; saves dispatch when rounds are very short. 1 with a
        `population.Store`, where the time of the first round includes compiling it, and with `data.HostData`.
      evaluate: metrics of a state.
      eval_every: rounds between evaluations.
      eval_last: how many of the last rounds are evaluated whatever `eval_every` says: papers report their mean.
      out: directory for `metrics.jsonl`, `metrics.csv` and `checkpoints/`; nothing is written without it. The run holds
        it as long as it lasts.
      checkpoint_every: rounds between checkpoints; by default as often as evaluation. The last state is always saved.
      checkpoint_pause: seconds at least between two checkpoints, for rounds that take less time than saving them. Not
        with several processes, whose clocks differ.
      resume: continue from the newest checkpoint in `out`, or begin if there is none. A damaged one is put aside, with
        a warning, and the one before it taken.
      memory_limit: bytes that a round may take, as for `footprint.check`; `math.inf` for no limit.
      on_round: called with each round's row of `history`, after it is in the files, and with the state: with
        `rounds_per_call`, that of the end of the call. For trackers see `watch`. An error in it ends the run.
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
    numbers = {
        'rounds': rounds,
        'rounds_per_call': rounds_per_call,
        'eval_every': eval_every,
        'checkpoint_every': every,
    }
    for what, number in numbers.items():
        checks.whole(what, number)
    checks.whole('eval_last', eval_last, 0)
    checks.number('checkpoint_pause', checkpoint_pause)
    if checkpoint_pause and jax.process_count() > 1:
        raise ValueError('with several processes leave checkpoint_pause at 0: all of them save together')
    if resume and out is None:
        raise ValueError('resume needs the directory of the run: pass out=')
    checks.key('key', key)
    checks.kind('state', state, State)
    checks.kind('data', data, FederatedData)
    if (isinstance(state.clients, population.Store) or isinstance(data, HostData)) and rounds_per_call > 1:
        raise ValueError(
            'client states and examples kept off the devices come and go between rounds: leave rounds_per_call at 1'
        )
    if mesh is not None:
        state, data = placed(mesh, state, data)
    step = Rounds(algorithm, state, cohort=cohort, chunk=chunk, mesh=mesh)

    def evaluated(round: int) -> bool:
        return evaluate is not None and (round % eval_every == 0 or round > rounds - eval_last)

    def due(round: int) -> bool:
        return evaluated(round) or round % every == 0

    saved = -math.inf
    with holding(Path(out)) if out is not None else contextlib.nullcontext():
        files = None if out is None else Files(Path(out), about(algorithm, data, cohort))
        history, state = ([], state) if files is None else begun(files, state, key, rounds, resume)
        first = len(history)
        if first < rounds and memory_limit != math.inf:
            check_memory(algorithm, state, data, cohort, chunk, memory_limit)
        with Progress(name, first, rounds, show=progress and first_process()) as bar:
            given = parts(data, key, first, rounds, cohort, mesh)
            for start, stop in calls(first, rounds, rounds_per_call, due):
                if not step.ready(stop - start):
                    bar.compiling()
                keys = jax.vmap(lambda t: jax.random.fold_in(key, t))(jnp.arange(start, stop))
                state, report, seconds = step(keys, state, next(given))
                new, trouble = rows(report, start, seconds, data)
                if trouble:
                    raise DivergedError(trouble + given_up(files, new))
                if evaluate is not None and evaluated(stop):
                    new[-1] |= {k: float(v) for k, v in jax.device_get(evaluate(state)).items()}
                if not any(row['broken'] for row in history):
                    warn_of_broken(report, new, data)
                history += new
                if files is not None:
                    files.log(new)
                    rested = time.monotonic() - saved >= checkpoint_pause
                    if stop == rounds or (stop % every == 0 and rested):
                        files.save(stop, state, key, history)
                        saved = time.monotonic()
                if on_round is not None:
                    for row in new:
                        on_round(row, state)
                bar.at(stop, shown(history, cohort or data.num_clients))
    return Run(state, history, step.compile_seconds, speed(history))


def parts(
    data: FederatedData, key: Array, first: int, rounds: int, cohort: int | None, mesh: Mesh | None
) -> Iterator[Any]:
    """What each call takes of the data: all of them, or what its round needs of those that stay on the host."""
    if not isinstance(data, HostData):
        return itertools.repeat(data)
    return feed(data, (jax.random.fold_in(key, t) for t in range(first, rounds)), cohort=cohort, mesh=mesh)


def placed(mesh: Mesh, state: State, data: FederatedData) -> tuple[State, FederatedData]:
    """State and data on the devices of a mesh; client states and data that are kept off the devices stay there."""
    apart = isinstance(state.clients, population.Store)
    onto, given = State(state.server, ()) if apart else state, None if isinstance(data, HostData) else data
    onto, given = devices.place(mesh, onto, given)  # type: ignore[arg-type]
    return State(onto.server, state.clients) if apart else onto, data if given is None else given


class Rounds:
    """Compiled rounds, several in a call: `(keys [R], state, data) -> (state, reports [R, ...], seconds a round)`.

    Attributes:
      compile_seconds: what compiling has taken.
    """

    def __init__(
        self, algorithm: Algorithm, state: State, *, cohort: int | None, chunk: int | None, mesh: Mesh | None
    ) -> None:
        """Compiles nothing yet. Arguments are those of `simulate.make_round`, and a state of the kind that comes."""
        self.compile_seconds = 0.0
        self._executables: dict[int, Any] = {}
        self._lazy = isinstance(state.clients, population.Store)
        if self._lazy:
            alone = population.make_round(algorithm, cohort=cohort, chunk=chunk, mesh=mesh)  # compiles itself

            def one(keys: Array, state: State, data: FederatedData) -> tuple[State, simulate.Report]:
                state, report = alone(keys[0], state, data)
                return state, jax.tree.map(lambda u: u[None], report)

            self._rounds: Any = one
        else:
            round = simulate.make_round(algorithm, cohort=cohort, chunk=chunk, mesh=mesh)
            self._rounds = simulate.compiled(simulate.several(round))

    def ready(self, count: int) -> bool:
        """Whether a call of that many rounds runs at once."""
        return count in self._executables

    def __call__(self, keys: Array, state: State, data: FederatedData) -> tuple[State, simulate.Report, float]:
        begin = time.perf_counter()
        if not self.ready(len(keys)):
            made = self._rounds if self._lazy else self._rounds.lower(keys, state, data).compile()
            self._executables[len(keys)] = made
            self.compile_seconds += time.perf_counter() - begin
            begin = time.perf_counter()
        state, report = self._executables[len(keys)](keys, state, data)
        report = jax.device_get(report._replace(info=()))
        return state, report, (time.perf_counter() - begin) / len(keys)


def about(algorithm: Algorithm, data: FederatedData, cohort: int | None) -> dict[str, str]:
    """What a run must have in common with the one that it continues, beside the key."""
    return {
        'algorithm': fingerprint.of_algorithm(algorithm),
        'data': fingerprint.of_arrays(data),
        'cohort': str(cohort or data.num_clients),
    }


def begun(files: Files, state: State, key: Array, rounds: int, resume: bool) -> tuple[list[Row], State]:
    """History and state to begin with: those of the run in the directory, if it is to be resumed.

    Raises:
      ValueError: if there is one that is not to be resumed, or of more rounds.
      CheckpointError: as `Files.restore`.
    """
    if not resume:
        if files.begun():
            raise ValueError(f'{files.out} already holds a run: resume it, or choose another directory')
        return [], state
    history, state = files.restore(state, key)
    if len(history) > rounds:
        raise ValueError(f'{files.out} already holds {len(history)} rounds, more than the {rounds} asked for')
    return history, state


def check_memory(
    algorithm: Algorithm,
    state: State,
    data: FederatedData,
    cohort: int | None,
    chunk: int | None,
    limit: float | None,
) -> None:
    """Raises MemoryError as `footprint.check`, also for states and examples that are kept off the devices."""
    if isinstance(store := state.clients, population.Store):  # what travels to the devices: the states of a cohort
        members, first = cohort or store.num_clients, store.take(np.arange(1))
        state = state._replace(
            clients=jax.tree.map(lambda u: jax.ShapeDtypeStruct((members, *u.shape[1:]), u.dtype), first)
        )
    if isinstance(data, HostData):
        data, cohort = shapes(data, cohort or data.num_clients), None
    footprint.check(algorithm, state, data, cohort=cohort, chunk=chunk, limit=limit)


def rows(report: simulate.Report, start: int, seconds: float, data: FederatedData) -> tuple[list[Row], str]:
    """The rows of a call's rounds, of which the first is round `start + 1`.

    Up to the first that left the server, or all clients, not finite; what is to be said of that one, or nothing.
    """
    good: list[Row] = []
    for i, (loss, padded, finite) in enumerate(zip(report.loss, report.padded_work, report.finite, strict=True)):
        broken = np.sort(report.ids[i][report.broken[i]])
        if not (math.isfinite(loss) and finite):
            members = int((report.ids[i] < data.num_clients).sum())
            return good, diverged(start + i + 1, broken, members, data)
        good.append({'round': start + i + 1, 'loss': float(loss), 'padded_work': float(padded), 'broken': len(broken),
                     'seconds': seconds})  # fmt: skip
    return good, ''


def warn_of_broken(report: simulate.Report, new: list[Row], data: FederatedData) -> None:
    """Warns of the first broken clients of a run, which does not stop for them."""
    for i, row in enumerate(new):
        if row['broken']:
            broken = np.sort(report.ids[i][report.broken[i]])
            members = int((report.ids[i] < data.num_clients).sum())
            text = f'round {row["round"]}: {named(broken, members)}; {cause(broken, data)}'
            warnings.warn(f'{text}. Training goes on, and this is said once', stacklevel=3)
            return


def given_up(files: Files | None, good: list[Row]) -> str:
    """Logs the last rounds that were good, of a run that cannot go on; says where it could be taken up again."""
    if files is None:
        return ''
    files.log(good)
    newest = files.newest()
    return f'. The last good checkpoint is that of round {newest}' if newest else ''


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


def diverged(round: int, broken: np.ndarray, members: int, data: FederatedData) -> str:
    """What is said of a run that cannot go on."""
    text = f'training diverged in round {round}: the server or all losses are not finite'
    if len(broken):
        text += f'; {named(broken, members)}'
    return f'{text}; {cause(broken, data)}'


def named(broken: np.ndarray, members: int) -> str:
    """Who is broken, in words."""
    names = ', '.join(map(str, broken[:10])) + (', ...' if len(broken) > 10 else '')
    return f'{len(broken)} of {members} clients are not finite: {names}'


def cause(broken: np.ndarray, data: FederatedData) -> str:
    """Why clients broke, as far as their data tell, and what to do."""
    if not len(broken):
        return (
            'no client is broken: what they send is too large to be added up, or the step of the server: begin a '
            'new run with lower rates'
        )
    for k in broken:
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
