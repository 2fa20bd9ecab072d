"""What `training.run` is made of: compiled rounds, what rows say of them, and what is said of runs that end early."""

import functools
import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from fedjax_nc import _fingerprint, checks, devices, footprint, population, simulate
from fedjax_nc._checkpoints import Files, Row, agreed
from fedjax_nc.base import Algorithm, Array, FederatedData, State
from fedjax_nc.data.host import HostData, feed, shapes

OWN = ('round', 'loss', 'padded_work', 'broken', 'seconds', 'compile_seconds')
"""What rows say of themselves."""


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


@jax.jit
def keys(key: Array, rounds: Array) -> Array:
    """The keys of rounds by their numbers [R], from that of the run."""
    return jax.vmap(lambda t: jax.random.fold_in(key, t))(rounds)


def made(algorithm: Algorithm, cohort: int | None, chunk: int | None, mesh: Mesh | None, lazy: bool) -> Any:
    """What compiles the rounds; the same for the same algorithm, so that a run like one before finds its programs."""
    given = algorithm, cohort, chunk, mesh, lazy
    try:
        hash(given)
        name = _fingerprint.of_algorithm(algorithm)  # what functions hold, or take from their module, may have changed
    except (TypeError, ValueError, AttributeError, RecursionError):  # such as of records with arrays
        return _made.__wrapped__('', *given)
    return _made(name, *given)


@functools.lru_cache(maxsize=4)  # that of ResNet-20 holds 100 MB
def _made(name: str, algorithm: Algorithm, cohort: int | None, chunk: int | None, mesh: Mesh | None, lazy: bool) -> Any:
    if lazy:
        return population.make_round(algorithm, cohort=cohort, chunk=chunk, mesh=mesh)  # compiles itself
    return simulate.compiled(simulate.several(simulate.make_round(algorithm, cohort=cohort, chunk=chunk, mesh=mesh)))


class Rounds:
    """Compiled rounds, several in a call: `(keys [R], state, data) -> (state, reports [R, ...], times)`.

    The times are seconds a round, and those of compiling before the call if there was any: entries of rows.
    """

    def __init__(
        self, algorithm: Algorithm, state: State, *, cohort: int | None, chunk: int | None, mesh: Mesh | None
    ) -> None:
        """Compiles nothing yet. Arguments are those of `simulate.make_round`, and a state of the kind that comes."""
        self._executables: dict[int, Any] = {}
        self._lazy = isinstance(state.clients, population.Store)
        rounds = made(algorithm, cohort, chunk, mesh, self._lazy)
        if self._lazy:

            def one(keys: Array, state: State, data: FederatedData) -> tuple[State, simulate.Report]:
                state, report = rounds(keys[0], state, data)
                return state, jax.tree.map(lambda u: u[None], report)

            self._rounds: Any = one
        else:
            self._rounds = rounds

    def ready(self, count: int) -> bool:
        """Whether a call of that many rounds runs at once."""
        return count in self._executables

    def __call__(self, keys: Array, state: State, data: FederatedData) -> tuple[State, simulate.Report, Row]:
        begin, compiling = time.perf_counter(), {}
        if not self.ready(len(keys)):
            # Without jit nothing can be compiled ahead of its call.
            called = self._lazy or jax.config.jax_disable_jit  # type: ignore[attr-defined]
            made = self._rounds if called else self._rounds.lower(keys, state, data).compile()
            self._executables[len(keys)] = made
            compiling = {'compile_seconds': time.perf_counter() - begin}
            begin = time.perf_counter()
        state, report = self._executables[len(keys)](keys, state, data)
        report = jax.device_get(report._replace(info=()))
        return state, report, {'seconds': (time.perf_counter() - begin) / len(keys), **compiling}


class Calendar(NamedTuple):
    """After which rounds something is due."""

    rounds: int
    eval_every: int | None  #: None if nothing is evaluated
    eval_last: int
    save_every: int | None = None  #: None if nothing is saved
    pause: float = 0.0  #: seconds at least between two checkpoints
    after_any: bool = False  #: whether with a pause any call may be followed by a checkpoint

    def evaluated(self, round: int) -> bool:
        """Whether the state after it is evaluated."""
        if self.eval_every is None:
            return False
        return round % self.eval_every == 0 or round > self.rounds - self.eval_last

    def stops(self, round: int) -> bool:
        """Whether a call of several rounds ends with it."""
        every = None if self.pause and self.after_any else self.save_every
        return self.evaluated(round) or (every is not None and round % every == 0)

    def saved(self, round: int, since: float) -> bool:
        """Whether there is a checkpoint after it, so many seconds after the one before."""
        if self.save_every is None or round == self.rounds:
            return self.save_every is not None
        every = 1 if self.pause and self.after_any else self.save_every
        return round % every == 0 and (not self.pause or agreed(since >= self.pause))


def about(algorithm: Algorithm, data: FederatedData, cohort: int | None) -> dict[str, str]:
    """What a run must have in common with the one that it continues, beside the key."""
    return {
        'algorithm': _fingerprint.of_algorithm(algorithm),
        'data': _fingerprint.of_arrays(data),
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
            raise ValueError(
                f'{files.out} already holds a run: resume it (--resume, `resume=True`), or choose another directory'
            )
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


def rows(report: simulate.Report, start: int, times: Row, data: FederatedData) -> tuple[list[Row], str]:
    """The rows of a call's rounds, of which the first is round `start + 1`; it alone tells what compiling took.

    Up to the first that left the server, or all clients, not finite; what is to be said of that one, or nothing.
    """
    good: list[Row] = []
    for i, (loss, padded, finite) in enumerate(zip(report.loss, report.padded_work, report.finite, strict=True)):
        broken = np.sort(report.ids[i][report.broken[i]])
        if not (math.isfinite(loss) and finite):
            members = int((report.ids[i] < data.num_clients).sum())
            return good, diverged(start + i + 1, broken, members, data)
        own = times if i == 0 else {'seconds': times['seconds']}
        good.append(
            {'round': start + i + 1, 'loss': float(loss), 'padded_work': float(padded), 'broken': len(broken), **own}
        )
    return good, ''


def metrics(found: Any) -> Row:
    """What an evaluation has found, as numbers for a row.

    Raises:
      ValueError: for all but scalars by name, and for a name that every row has already.
    """
    if not isinstance(found, Mapping):
        raise ValueError(f'evaluate must return scalars by name, as {{"accuracy": 0.5}}, not {checks.shown(found)}')
    told: Row = {}
    for name, value in jax.device_get(dict(found)).items():
        if name in OWN:
            raise ValueError(f'{name!r} is what each row says of its round: give that metric of evaluate another name')
        number = np.asarray(value)
        if number.ndim or not _real(number.dtype):
            raise ValueError(f'metric {name!r} of evaluate must be one number, not {checks.shown(value)}')
        told[str(name)] = float(number)
    return told


def _real(dtype: Any) -> bool:
    return any(jax.dtypes.issubdtype(dtype, kind) for kind in (np.bool_, np.integer, np.floating))


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


def compiled(history: list[Row]) -> float:
    """Seconds of compiling, of all processes that had a part in the rounds."""
    return float(sum(row.get('compile_seconds', 0.0) for row in history))


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
        index, size = (_fingerprint.on_host(u) for u in (data.index[k], data.size[k]))
        x, y = (_fingerprint.on_host(u[index[: int(size)]]) for u in (data.x, data.y))
        if np.issubdtype(x.dtype, np.inexact) and not np.isfinite(x.astype(np.float32)).all():
            return f'examples of client {k} hold NaN or infinity: mend the data, or leave the client out'
        if y.min() < 0 or y.max() >= data.num_classes:
            return f'labels of client {k} go from {y.min()} to {y.max()}, and the data have {data.num_classes} classes'
    if np.issubdtype(data.x.dtype, np.integer) and data.x.dtype != np.uint8:
        return (
            'if the model embeds their examples as tokens, see that none is beyond its vocabulary, which is NaN; else '
            'begin a new run with a lower learning rate, or limit gradients by local.sgd(clip=)'
        )
    return (
        'their examples are finite: begin a new run with a lower learning rate, or limit gradients by local.sgd(clip=)'
    )
