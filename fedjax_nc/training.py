"""The Python around the round: progress, evaluation, files and resumption."""

import contextlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from fedjax_nc import _training, checks, population
from fedjax_nc._checkpoints import CheckpointError as CheckpointError
from fedjax_nc._checkpoints import Files, Row, first_process, holding
from fedjax_nc._progress import Progress
from fedjax_nc.base import Algorithm, Array, FederatedData, State
from fedjax_nc.data.host import HostData

__all__ = ['CheckpointError', 'DivergedError', 'Evaluate', 'OnRound', 'Run', 'last_mean', 'run']

Evaluate = Callable[[State], dict[str, Array]]
"""From the state to named scalars, arrays [] of numbers; 'accuracy' is shown in the progress bar.

Names are other than those that rows have: `round`, `loss`, `padded_work`, `broken`, `seconds`, `compile_seconds`.
"""


OnRound = Callable[[Row, State], Any]
"""Sees a round's row and the state after it, which it must not keep, for the next round takes its memory."""


class DivergedError(RuntimeError):
    """The server's state became NaN or infinite, or the losses of all clients."""


class Run(NamedTuple):
    """What `run` returns."""

    state: State  #: after the last round
    #: One row a round: round, loss, padded_work, broken, seconds; compile_seconds where something was compiled before
    #: it; and metrics where evaluated.
    history: list[Row]
    compile_seconds: float  #: of the whole history
    rounds_per_second: float  #: of the whole history, without compilation and evaluation


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
    donated: use the one that comes back. A client is broken in a round if its message or loss is not finite, or its
    state NaN; where the aggregator keeps the server finite all the same, training goes on, and `history` counts them.

    Args:
      algorithm: what to train.
      key: key of this run, and best of nothing else: a second call with it has the same cohorts and batches again.
      state: from `simulate.init`, `simulate.join` or `population.init`, which keeps client states off the devices.
      data: the clients; `data.HostData` stay off the devices, and each round's examples travel while the one before is
        computed.
      rounds: total number of rounds.
      cohort: clients a round; all by default.
      chunk: clients side by side; see `simulate.make_round`.
      mesh: devices to share the rounds, from `devices.mesh`. With several processes each runs this with the same
        arguments; `out` must be a directory that all of them see, and the first one writes the tables.
      rounds_per_call: rounds compiled into one call, at most: it ends where an evaluation or a checkpoint is due, which
        with `out` is after each round unless `eval_every`, `checkpoint_every` or a `checkpoint_pause` says otherwise.
        Saves dispatch when rounds are very short. 1 with a `population.Store`, where the time of the first round
        includes compiling it, and with `data.HostData`.
      evaluate: metrics of a state.
      eval_every: rounds between evaluations.
      eval_last: how many of the last rounds are evaluated whatever `eval_every` says: papers report their mean.
      out: directory for `metrics.jsonl`, `metrics.csv` and `checkpoints/`; nothing is written without it. The run holds
        it as long as it lasts.
      checkpoint_every: rounds between checkpoints; by default as often as evaluation, or with `checkpoint_pause` after
        any call. The last state is always saved.
      checkpoint_pause: seconds at least between two checkpoints, for rounds that take less time than saving them; of
        several processes the first one has the clock.
      resume: continue from the newest checkpoint in `out`, or begin if there is none. A damaged one is put aside, with
        a warning, and the one before it taken.
      memory_limit: bytes that a round may take, as for `footprint.check`; `math.inf` for no limit.
      on_round: called with each round's row of `history`, after it is in the files, and with the state: with
        `rounds_per_call`, that of the end of the call. For trackers see `watch`. If it returns True,
        training ends there, and `out` is as after the last of fewer `rounds`; an error in it ends the run.
      progress: whether to show a progress bar, which is lines where no terminal is.
      name: its label.

    Returns:
      A `Run`: the state after the last round, and a row of numbers for each round, those of resumed runs included.
      `loss` and `padded_work` are those of `simulate.Report`, `broken` counts clients, `seconds` are those of a round.
      The first round of a call, and others before which something was compiled, have `compile_seconds`.

    Raises:
      ValueError: if `rounds` or another number is not a whole one of at least 1, if `evaluate` or `on_round` is no
        function of what it is called with, if `resume` lacks `out`, if `out` already holds a run that is not to be
        resumed, or one of more rounds, or is in use by another run; at the first evaluation, if that does not give
        scalars by name.
      MemoryError: if a round would need more memory than there is; before anything is compiled.
      DivergedError: when the server is not finite any more, or no client is; it names the round, the broken clients and
        what may be the cause, and the last good checkpoint stays.
      CheckpointError: if all checkpoints are damaged, or they are of another algorithm, cohort, data or key.

    Example:
      >>> import jax
      >>> from fedjax_nc import heads, local, losses, models, objective, simulate, testing, training
      >>> from fedjax_nc.algorithms import fedavg
      >>> clients = testing.clients()
      >>> task = objective.objective(models.from_flax(models.MLP((16,))), heads.linear(), losses.cross_entropy)
      >>> algorithm = fedavg.algorithm(task, local.sgd(0.1), plan=local.Plan(batch_size=16, epochs=1))
      >>> key = jax.random.key(0)
      >>> state = simulate.init(algorithm, key, clients)
      >>> run = training.run(algorithm, key, state, clients, rounds=2, cohort=3, progress=False)
      >>> [row['round'] for row in run.history]
      [1, 2]
    """
    numbers = {'rounds': rounds, 'rounds_per_call': rounds_per_call, 'eval_every': eval_every}
    if checkpoint_every is not None:
        numbers['checkpoint_every'] = checkpoint_every
    for what, number in numbers.items():
        checks.whole(what, number)
    checks.whole('eval_last', eval_last, 0)
    checks.flags(resume=resume, progress=progress)
    cohort, chunk = (u if u is None else checks.static(what, u) for what, u in (('cohort', cohort), ('chunk', chunk)))
    checks.number('checkpoint_pause', checkpoint_pause)
    if memory_limit is not None:
        checks.number('memory_limit', memory_limit, finite=False)
    if evaluate is not None:
        checks.called('evaluate', evaluate, 'state')
    if on_round is not None:
        checks.called('on_round', on_round, 'row, state', 'what `watch` makes, `watch.tensorboard` entered by `with`')
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
        state, data = _training.placed(mesh, state, data)
    step = _training.Rounds(algorithm, state, cohort=cohort, chunk=chunk, mesh=mesh)
    when = _training.Calendar(
        rounds, eval_every if evaluate is not None else None, eval_last,
        None if out is None else checkpoint_every or eval_every, checkpoint_pause, checkpoint_every is None,
    )  # fmt: skip
    saved, kept = -math.inf, 0
    with holding(Path(out)) if out is not None else contextlib.nullcontext():
        files = None if out is None else Files(Path(out), _training.about(algorithm, data, cohort))
        history, state = ([], state) if files is None else _training.begun(files, state, key, rounds, resume)
        first = len(history)
        if first < rounds and memory_limit != math.inf:
            _training.check_memory(algorithm, state, data, cohort, chunk, memory_limit)
        with Progress(name, first, rounds, show=progress and first_process()) as bar:
            given = _training.parts(data, key, first, rounds, cohort, mesh)
            for start, stop in _training.calls(first, rounds, rounds_per_call, when.stops):
                if not step.ready(stop - start):
                    bar.compiling()
                keys = _training.keys(key, np.arange(start, stop, dtype=np.int32))
                state, report, times = step(keys, state, next(given))
                new, trouble = _training.rows(report, start, times, data)
                if trouble:
                    raise DivergedError(trouble + _training.given_up(files, new))
                if evaluate is not None and when.evaluated(stop):
                    new[-1] |= _training.metrics(evaluate(state))
                if not any(row['broken'] for row in history):
                    _training.warn_of_broken(report, new, data)
                history += new
                if files is not None:
                    files.log(new)
                    if when.saved(stop, time.monotonic() - saved):
                        files.save(stop, state, key, history)
                        saved, kept = time.monotonic(), stop
                enough = False
                if on_round is not None:
                    for row in new:
                        said = on_round(row, state)
                        # Trackers may return anything else; comparisons of a state's values are NumPy's or jax's.
                        enough |= said is True or (getattr(said, 'dtype', None) == np.bool_ and bool(said))
                if enough and files is not None and kept < stop:
                    files.save(stop, state, key, history)
                bar.at(stop, _training.shown(history, cohort or data.num_clients))
                if enough:
                    break
    return Run(state, history, _training.compiled(history), _training.speed(history))


def last_mean(history: list[Row], metric: str = 'accuracy', last: int = 5) -> float:
    """Mean of a metric over the last rounds that have it, as published tables report; NaN if none has.

    Args:
      history: rows as those of `Run`.
      metric: name of an entry.
      last: rounds with that entry that are averaged, at least 1; all where there are fewer.

    Raises:
      ValueError: for a `last` that is not a whole number of at least 1.

    Example:
      >>> from fedjax_nc import training
      >>> history = [{'round': 1}, {'round': 2, 'accuracy': 0.25}, {'round': 3, 'accuracy': 0.75}]
      >>> training.last_mean(history)
      0.5
      >>> training.last_mean(history, last=1)
      0.75
    """
    checks.whole('last', last)
    values = [row[metric] for row in history if metric in row][-last:]
    return sum(values) / len(values) if values else math.nan
