"""The Python around the round: progress bar, metrics files, checkpoints, resumption.

Checkpoints and tables appear whole or not at all: they are written beside their place and renamed. The log of metrics
grows by whole lines, and a resumed run makes it agree with the checkpoint it continues from.
"""

import csv
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from tqdm import tqdm

from fedjax_nc import simulate
from fedjax_nc.base import Algorithm, Array, FederatedData, State

Row = dict[str, float]
Evaluate = Callable[[State], dict[str, Array]]
"""From the state to named scalars; 'accuracy' is shown in the progress bar."""


class DivergedError(RuntimeError):
    """A loss or a parameter became NaN or infinite."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read or does not fit the run."""


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
    rounds_per_call: int = 1,
    evaluate: Evaluate | None = None,
    eval_every: int = 1,
    eval_last: int = 5,
    out: str | Path | None = None,
    checkpoint_every: int | None = None,
    resume: bool = False,
    progress: bool = True,
    name: str = 'train',
) -> Run:
    """Runs rounds until `rounds` are done, counting those of a resumed run.

    Round t uses `fold_in(key, t)`, so that a resumed run does what the uninterrupted one would have done. `state` is
    donated: use the one that comes back.

    Args:
      algorithm: what to train.
      key: key of the whole run.
      state: from `simulate.init` or `simulate.join`.
      data: the clients.
      rounds: total number of rounds.
      cohort: clients a round; all by default.
      chunk: clients side by side; see `simulate.make_round`.
      rounds_per_call: rounds compiled into one call; saves dispatch when rounds are very short.
      evaluate: metrics of a state.
      eval_every: rounds between evaluations.
      eval_last: how many of the last rounds are evaluated whatever `eval_every` says: papers report their mean.
      out: directory for `metrics.jsonl`, `metrics.csv` and `checkpoints/`; nothing is written without it.
      checkpoint_every: rounds between checkpoints; by default as often as evaluation. The last state is always saved.
      resume: continue from the newest checkpoint in `out`, or begin if there is none.
      progress: whether to show a progress bar.
      name: its label.

    Raises:
      ValueError: if `rounds` or another number is not a whole one of at least 1, if `resume` lacks `out`, if `out`
        already holds a run that is not to be resumed, or one of more rounds.
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
    files = Files(Path(out)) if out is not None else None
    history: list[Row] = []
    if files is not None:
        if resume:
            history, state = files.restore(state, key)
            if len(history) > rounds:
                raise ValueError(f'{out} already holds {len(history)} rounds, more than the {rounds} asked for')
        elif files.begun():
            raise ValueError(f'{out} already holds a run: resume it, or choose another directory')

    step = simulate.compiled(simulate.several(simulate.make_round(algorithm, cohort=cohort, chunk=chunk)))
    executables: dict[int, Any] = {}
    compile_seconds = 0.0

    def evaluated(round: int) -> bool:
        return evaluate is not None and (round % eval_every == 0 or round > rounds - eval_last)

    def due(round: int) -> bool:
        return evaluated(round) or round % every == 0

    first = len(history)
    with tqdm(total=rounds, initial=first, desc=name, unit='round', disable=not progress, leave=True) as bar:
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


def diverged(round: int, files: 'Files | None') -> str:
    kept = files.newest() if files is not None else None
    text = f'training diverged in round {round}: the loss or a parameter is not finite'
    advice = 'begin a new run with a lower learning rate'
    return f'{text}; {advice}' + (f'. The last good checkpoint is that of round {kept}' if kept else '')


def last_mean(history: list[Row], metric: str = 'accuracy', last: int = 5) -> float:
    """Mean of a metric over the last rounds that have it, as published tables report; NaN if none has."""
    values = [row[metric] for row in history if metric in row][-last:]
    return sum(values) / len(values) if values else math.nan


def written(key: Array) -> list[int]:
    """A key as numbers."""
    data = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    return [int(u) for u in jnp.ravel(data)]


class Files:
    """The directory of one run."""

    def __init__(self, out: Path) -> None:
        self.metrics = out / 'metrics.jsonl'
        self.table = out / 'metrics.csv'
        self.checkpoints = (out / 'checkpoints').absolute()
        out.mkdir(parents=True, exist_ok=True)

    def manager(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        return ocp.CheckpointManager(self.checkpoints, options=options)

    def newest(self) -> int | None:
        """The round of the newest complete checkpoint."""
        if not self.checkpoints.is_dir():
            return None
        with self.manager() as manager:
            return manager.latest_step()

    def begun(self) -> bool:
        return self.metrics.exists() or self.newest() is not None

    def log(self, rows: list[Row]) -> None:
        with self.metrics.open('a') as file:
            file.write(''.join(json.dumps(row) + '\n' for row in rows))

    def save(self, round: int, state: State, key: Array, history: list[Row]) -> None:
        """Checkpoints the state with the history that led to it, then renews the table."""
        leaves = dict(enumerate(jax.tree.leaves(state)))
        with self.manager() as manager:
            manager.save(round, args=ocp.args.Composite(
                state=ocp.args.StandardSave({str(i): leaf for i, leaf in leaves.items()}),
                run=ocp.args.JsonSave({'key': written(key), 'history': history})))  # fmt: skip
        columns = list(dict.fromkeys(name for row in history for name in row))
        with (temporary := self.table.with_suffix('.tmp')).open('w', newline='') as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(history)
        os.replace(temporary, self.table)

    def restore(self, like: State, key: Array) -> tuple[list[Row], State]:
        """History and state of the newest checkpoint; an empty history and `like` if there is none."""
        newest = self.newest()
        if newest is None:
            self.rewrite([])
            return [], like
        leaves, structure = jax.tree.flatten(like)
        place = self.checkpoints / str(newest)
        advice = f'remove {place} to continue from the checkpoint before it, or begin again elsewhere'
        try:
            with self.manager() as manager:
                shapes = [jax.ShapeDtypeStruct(u.shape, u.dtype, sharding=u.sharding) for u in leaves]
                wanted = {str(i): shape for i, shape in enumerate(shapes)}
                args = ocp.args.Composite(state=ocp.args.StandardRestore(wanted), run=ocp.args.JsonRestore())
                found = manager.restore(newest, args=args)
            history, values = found['run']['history'], [found['state'][str(i)] for i in range(len(leaves))]
            same = found['run']['key'] == written(key)
        except Exception as error:
            raise CheckpointError(
                f'cannot read the checkpoint {place} as one of this run: {error}; {advice}'
            ) from error
        if not same or len(history) != newest or any(v.shape != u.shape for u, v in zip(leaves, values, strict=True)):
            raise CheckpointError(f'the checkpoint {place} belongs to another run; {advice}')
        self.rewrite(history)
        return history, jax.tree.unflatten(structure, values)

    def rewrite(self, history: list[Row]) -> None:
        """Makes the log agree with the checkpoint that a run continues from."""
        temporary = self.metrics.with_suffix('.tmp')
        temporary.write_text(''.join(json.dumps(row) + '\n' for row in history))
        os.replace(temporary, self.metrics)
