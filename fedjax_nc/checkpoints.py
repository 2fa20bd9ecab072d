"""The files of a run: checkpoints, and tables of what was measured.

Checkpoints and tables appear whole or not at all: they are written beside their place and renamed. The log of metrics
grows by whole lines, and a resumed run makes it agree with the checkpoint it continues from.
"""

import csv
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from fedjax_nc import population
from fedjax_nc.base import Array, State

Row = dict[str, float]
"""What is known of one round."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read or does not fit the run."""


def first_process() -> bool:
    """Whether this is the one of several processes that writes what is written once."""
    return jax.process_index() == 0


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
        if not first_process():
            return
        with self.metrics.open('a') as file:
            file.write(''.join(json.dumps(row) + '\n' for row in rows))

    def save(self, round: int, state: State, key: Array, history: list[Row]) -> None:
        """Checkpoints the state with the history that led to it, then renews the table."""
        store = state.clients if isinstance(state.clients, population.Store) else None
        leaves = dict(enumerate(jax.tree.leaves(state if store is None else state.server)))
        apart = {} if store is None else {'clients': ocp.args.StandardSave(store.contents())}
        with self.manager() as manager:
            manager.save(round, args=ocp.args.Composite(
                state=ocp.args.StandardSave({str(i): leaf for i, leaf in leaves.items()}),
                run=ocp.args.JsonSave({'key': written(key), 'history': history}), **apart))  # fmt: skip
        if not first_process():
            return
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
        store = like.clients if isinstance(like.clients, population.Store) else None
        leaves, structure = jax.tree.flatten(like if store is None else like.server)
        apart = {} if store is None else {'clients': ocp.args.StandardRestore()}
        place = self.checkpoints / str(newest)
        advice = f'remove {place} to continue from the checkpoint before it, or begin again elsewhere'
        try:
            with self.manager() as manager:
                shapes = [jax.ShapeDtypeStruct(u.shape, u.dtype, sharding=u.sharding) for u in leaves]
                wanted = {str(i): shape for i, shape in enumerate(shapes)}
                args = ocp.args.Composite(state=ocp.args.StandardRestore(wanted), run=ocp.args.JsonRestore(), **apart)
                found = manager.restore(newest, args=args)
            history, values = found['run']['history'], [found['state'][str(i)] for i in range(len(leaves))]
            same = found['run']['key'] == written(key)
        except Exception as error:
            raise CheckpointError(
                f'cannot read the checkpoint {place} as one of this run: {error}; {advice}'
            ) from error
        if not same or len(history) != newest or any(v.shape != u.shape for u, v in zip(leaves, values, strict=True)):
            raise CheckpointError(f'the checkpoint {place} belongs to another run; {advice}')
        restored = jax.tree.unflatten(structure, values)
        if store is not None:
            try:
                store.restore({name: np.asarray(value) for name, value in found['clients'].items()})
            except ValueError as error:
                raise CheckpointError(f'the checkpoint {place} belongs to another run: {error}; {advice}') from error
            restored = State(restored, store)
        self.rewrite(history)
        return history, restored

    def rewrite(self, history: list[Row]) -> None:
        """Makes the log agree with the checkpoint that a run continues from."""
        if not first_process():
            return
        temporary = self.metrics.with_suffix('.tmp')
        temporary.write_text(''.join(json.dumps(row) + '\n' for row in history))
        os.replace(temporary, self.metrics)
