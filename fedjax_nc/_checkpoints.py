"""The files of a run: checkpoints, and tables of what was measured.

Checkpoints and tables appear whole or not at all: they are written beside their place and renamed. A checkpoint carries
checksums of all it holds. The log of metrics grows by whole lines, and a resumed run makes log and table agree with the
checkpoint it continues from. One run at a time holds the directory.
"""

import contextlib
import csv
import gc
import hashlib
import io
import json
import logging
import os
import shutil
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from filelock import FileLock, Timeout
from jax.experimental import multihost_utils

from fedjax_nc import _fingerprint, population, tree
from fedjax_nc.base import Array, State

Row = dict[str, float]
"""What is known of one round."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read, or does not fit the run."""


class InUseError(ValueError):
    """Another run holds the directory."""


class DamagedError(Exception):
    """A checkpoint does not hold what was written into it."""


def _orbax() -> Any:
    """`orbax.checkpoint`, imported with the first checkpoint: it takes a third of what importing jax takes."""
    import orbax.checkpoint

    return orbax.checkpoint


def agreed(due: bool) -> bool:
    """What the first process says, where there are several: clocks differ, and all save together."""
    return due if jax.process_count() == 1 else bool(multihost_utils.broadcast_one_to_all(np.bool_(due)))


def first_process() -> bool:
    """Whether this is the one of several processes that writes what is written once."""
    return jax.process_index() == 0


def _written(key: Array) -> list[int]:
    """A key as numbers."""
    data = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    return [int(u) for u in jnp.ravel(data)]


@contextlib.contextmanager
def holding(out: Path) -> Iterator[None]:
    """Holds the directory of a run, which is made if need be. Who holds it already may take it again.

    The lock is the operating system's, on the file `.lock`: it ends with the program that has it, however that ends.

    Raises:
      InUseError: if another run holds it.
    """
    if not first_process():
        yield
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise type(error)(f'{out} cannot be made a folder for a run ({error.strerror}): choose another') from error
    try:
        held = FileLock(out.resolve() / '.lock', is_singleton=True).acquire(timeout=0)
    except Timeout:
        raise InUseError(f'{out} is in use by another run: wait for its end, or choose another directory') from None
    with held:
        yield


def replace(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Writes a file beside its place and renames it, so that it is there whole or as it was.

    With `durable` it is on the disk when this returns, whatever happens to the machine's power.
    """
    temporary = path.with_name(f'.{path.name}.{os.getpid()}.{threading.get_ident()}.tmp')  # others may write it, too
    if not path.parent.is_dir():
        raise FileNotFoundError(f'{path} cannot be written: there is no folder {path.parent}')
    try:
        with temporary.open('wb') as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if durable:
            _flush(path.parent)
    finally:
        temporary.unlink(missing_ok=True)  # where there was no room, or a folder is in the way


def append(path: Path, line: str) -> None:
    """Adds a line to a file, beginning a new one if the last was torn by whoever was stopped while writing it."""
    with path.open('ab+') as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b'\n' else f'\n{line}'
        file.write(f'{line}\n'.encode())


def _flush(folder: Path) -> None:
    """The names in a folder to the disk, where the system can."""
    with contextlib.suppress(OSError):  # Windows opens no folders
        held = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(held)
        finally:
            os.close(held)


def _checksum(content: Any) -> str:
    """Of what JSON can hold: 32 hexadecimal digits."""
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


class Files:
    """The directory of one run."""

    def __init__(self, out: Path, about: dict[str, str] | None = None) -> None:
        """Makes the directory if need be.

        Args:
          out: the directory.
          about: fingerprints of what makes this run, by name. A checkpoint of another run is not gone on from.
        """
        self.out, self.about = out, about or {}
        self.metrics = out / 'metrics.jsonl'
        self.table = out / 'metrics.csv'
        self.checkpoints = (out / 'checkpoints').absolute()
        out.mkdir(parents=True, exist_ok=True)

    def manager(self) -> Any:
        options = _orbax().CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        return _orbax().CheckpointManager(self.checkpoints, options=options)

    def rounds(self) -> list[int]:
        """The rounds of the complete checkpoints, the newest first."""
        if not self.checkpoints.is_dir():
            return []
        with self.manager() as manager:
            return sorted(manager.all_steps(), reverse=True)

    def newest(self) -> int | None:
        """The round of the newest complete checkpoint."""
        return next(iter(self.rounds()), None)

    def begun(self) -> bool:
        return self.metrics.exists() or self.newest() is not None

    def log(self, rows: list[Row]) -> None:
        if not first_process():
            return
        with self.metrics.open('a') as file:
            file.write(''.join(json.dumps(row) + '\n' for row in rows))

    def save(self, round: int, state: State, key: Array, history: list[Row]) -> None:
        """Checkpoints the state with the history that led to it, then renews the table.

        Raises:
          CheckpointError: if it was not written.
        """
        store = state.clients if isinstance(state.clients, population.Store) else None
        arrays = {'state': tree.by_path(state if store is None else state.server)}
        if store is not None:
            arrays['clients'] = store.contents()
        sums = {name: _fingerprint.of_arrays(held) for name, held in arrays.items()}
        run = {'key': _written(key), 'about': self.about, 'history': history, 'arrays': sums}
        items = {name: _orbax().args.StandardSave(held) for name, held in arrays.items()}
        described = _orbax().args.JsonSave({**run, 'checksum': _checksum(run)})
        try:
            with self.manager() as manager:
                written = manager.save(round, args=_orbax().args.Composite(run=described, **items))
        except (OSError, ValueError) as error:  # tensorstore calls a full disk a wrong value
            raise CheckpointError(
                f'the checkpoint of round {round} was not written: {" ".join(str(error).split())[:300]}'
            ) from error
        if not written:
            raise CheckpointError(f'the checkpoint of round {round} was not written: {self.checkpoints} has others')
        if first_process():
            self.tabulate(history)

    def restore(self, like: State, key: Array) -> tuple[list[Row], State]:
        """History and state of the newest checkpoint; an empty history and `like` if there is none.

        A damaged one is put aside with a warning, and the one before it taken.

        Raises:
          CheckpointError: if all are damaged, or the newest that is not belongs to another run.
        """
        damaged: dict[int, str] = {}
        history: list[Row] = []
        for round in self.rounds():
            try:
                history, like = self.read(round, like, key)
                break
            except DamagedError as error:
                damaged[round] = str(error)
        else:
            if damaged:
                said = ', '.join(f'{self.checkpoints / str(round)} ({error})' for round, error in damaged.items())
                raise CheckpointError(f'no checkpoint can be read: {said}; begin again in another directory')
        self.put_aside(damaged, len(history))
        if first_process():
            replace(self.metrics, ''.join(json.dumps(row) + '\n' for row in history))
            self.tabulate(history)
        return history, like

    def read(self, round: int, like: State, key: Array) -> tuple[list[Row], State]:
        """History and state of one checkpoint.

        Raises:
          DamagedError: if it does not hold what was written.
          CheckpointError: if it does, and belongs to another run.
        """
        place = self.checkpoints / str(round)
        run = self.load(round, run=_orbax().args.JsonRestore())['run']
        if isinstance(run, dict) and set(run) == {'key', 'history'}:
            raise CheckpointError(
                f'the checkpoint {place} is of a version without checksums: finish that run with it, or begin again in '
                'another directory'
            )
        if not isinstance(run, dict) or run.pop('checksum', None) != _checksum(run):
            raise DamagedError('its description does not agree with its checksum')
        same = {'key': run['key'] == _written(key), **{k: run['about'].get(k) == v for k, v in self.about.items()}}
        if not all(same.values()):
            other = ' and '.join(name for name, agrees in same.items() if not agrees)
            raise CheckpointError(
                f'the checkpoint {place} belongs to another run, with another {other}: resume it with what it was '
                'begun with, or choose another directory'
            )
        store = like.clients if isinstance(like.clients, population.Store) else None
        wanted = like if store is None else like.server
        shapes = {
            i: jax.ShapeDtypeStruct(u.shape, u.dtype, sharding=u.sharding) for i, u in tree.by_path(wanted).items()
        }
        apart = {} if store is None else {'clients': _orbax().args.StandardRestore()}
        if set(run['arrays']) != {'state', *apart}:
            begun, now = ('population.init', 'simulate.init')[:: 1 if store is None else -1]
            raise CheckpointError(f'the run in {self.out} was begun with a state of {begun}, and this one is of {now}')
        found = self.load(round, state=_orbax().args.StandardRestore(shapes), **apart)
        # A dict, so that leaves are in the order in which they were when their sum was made.
        if {name: _fingerprint.of_arrays(dict(held)) for name, held in found.items()} != run['arrays']:
            raise DamagedError('its arrays do not agree with their checksums')
        restored = jax.tree.unflatten(jax.tree.structure(wanted), [found['state'][i] for i in shapes])
        if store is None:
            return run['history'], restored
        try:
            store.restore({name: np.asarray(value) for name, value in found['clients'].items()})
        except ValueError as error:
            raise CheckpointError(f'the checkpoint {place} does not fit: {error}') from error
        return run['history'], State(restored, store)

    def load(self, round: int, **items: Any) -> Any:
        """Items of a checkpoint.

        Raises:
          DamagedError: whatever a damaged file makes its readers raise.
          CheckpointError: if it cannot be read now, damaged or not.
        """
        try:
            with self.manager() as manager:
                return manager.restore(round, args=_orbax().args.Composite(**items))
        except (OSError, MemoryError) as error:
            if not isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
                place = self.checkpoints / str(round)
                raise CheckpointError(f'the checkpoint {place} cannot be read: {error}; try again') from error
            said = f'{type(error).__name__}: {error}'
        except Exception as error:
            said = ' '.join(f'{type(error).__name__}: {error}'.split())[:200]
        # Readers of other arrays have failed too, and would each tell it at length when they are thrown away.
        log = logging.getLogger('asyncio')
        level = log.level
        log.setLevel(logging.CRITICAL)
        gc.collect()
        log.setLevel(level)
        raise DamagedError(said)

    def put_aside(self, damaged: dict[int, str], kept: int) -> None:
        """Moves damaged checkpoints out of the way of those that the run will write, and says so."""
        for round, error in damaged.items():
            aside = self.out / f'damaged-{round}'
            if first_process():
                shutil.rmtree(aside, ignore_errors=True)
                os.replace(self.checkpoints / str(round), aside)
            warnings.warn(
                f'the checkpoint of round {round} is damaged and now lies in {aside}; going on from round {kept} '
                f'({error})',
                stacklevel=4,
            )
        if damaged and jax.process_count() > 1:
            multihost_utils.sync_global_devices('damaged checkpoints are put aside')

    def tabulate(self, history: list[Row]) -> None:
        """Writes the table anew."""
        columns = list(dict.fromkeys(name for row in history for name in row))
        text = io.StringIO(newline='')
        writer = csv.DictWriter(text, columns)
        writer.writeheader()
        writer.writerows(history)
        replace(self.table, text.getvalue())
