"""A round compiled for a target, and what its program says."""

import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import programs
import rounds_per_second
import targets
import workloads

from fedjax_nc import devices, footprint, simulate
from fedjax_nc.experiments.provenance import commit


class Wanted(NamedTuple):
    """One program. None stands for the library's choice, of clients for the workload's number."""

    target: str
    workload: str
    clients: int | None
    conv: str | None
    chunk: int | None
    precision: str


def compiled(wanted: Wanted, keep: Path | None) -> dict[str, Any]:
    """Compiles a round in this process, which must be that of its target, and reads the program."""
    options = ['--workload', wanted.workload, '--precision', wanted.precision]
    args = rounds_per_second.arguments(options + (['--clients', str(wanted.clients)] if wanted.clients else []))
    work = rounds_per_second.settle(args)
    data, _ = workloads.load(args, work)
    kind, found = targets.platform(wanted.target), targets.devices(wanted.target)
    task = workloads.algorithm(args, work, wanted.conv)
    state = jax.eval_shape(lambda data: simulate.init(task, jax.random.key(0), data), data)
    share = -(-work.cohort // len(found))
    lanes = min(share, wanted.chunk or simulate.default_chunk(state.server, share, platform=kind))
    mesh = devices.mesh(found) if len(found) > 1 else None
    everywhere = by_client = jax.sharding.SingleDeviceSharding(found[0])
    if mesh is not None:
        everywhere, by_client = devices.shardings(mesh, state.clients)

    def at(place: Any, tree: Any) -> Any:
        return jax.tree.map(lambda u: jax.ShapeDtypeStruct(u.shape, u.dtype, sharding=place), tree)

    key = at(everywhere, jax.eval_shape(lambda: jax.random.key(0)))
    placed = state._replace(server=at(everywhere, state.server), clients=at(by_client, state.clients))
    # `simulate.compiled` but for its options, which are those of the machine that compiles.
    round = jax.jit(simulate.make_round(task, cohort=work.cohort, chunk=lanes, mesh=mesh), donate_argnums=1)
    start = time.perf_counter()
    lowered = round.lower(key, placed, at(everywhere, data))
    middle = time.perf_counter()
    executable = lowered.compile()
    end = time.perf_counter()
    text, memory = executable.as_text(), executable.memory_analysis()
    if keep is not None:
        keep.write_text(text)
    ids = simulate.choose(jax.random.key(0), work.clients, work.cohort)
    rows = min(work.batch_size, data.index.shape[1])
    steps, padded = schedule(np.asarray(data.size[ids]), lanes, len(found), rows, work.epochs)
    chip = targets.chip(found[0])
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    total += memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
    return {
        'device': found[0].device_kind, 'devices': len(found), 'cohort': work.cohort, 'lanes': lanes,
        'lower_seconds': middle - start, 'compile_seconds': end - middle,
        'argument_bytes': memory.argument_size_in_bytes, 'temporary_bytes': memory.temp_size_in_bytes,
        'total_bytes': total, 'fits': total <= chip.memory, 'chip_bytes': chip.memory, 'assumed_speed': chip.speed,
        'estimate_bytes': footprint.estimate(task, state, data, cohort=work.cohort, chunk=lanes, platform=kind).total,
        'steps': steps, 'padded_work': padded, 'commit': commit(), **reading(text, kind, steps, chip.speed),
    }  # fmt: skip


def reading(text: str, kind: str, steps: int, speed: float) -> dict[str, Any]:
    """What the text of a round says: its step, and the round as `steps` of them."""
    program = programs.parse(text)
    whole = programs.loop(program)
    step = programs.step(whole)
    if step is None:
        raise ValueError('the program has no loop over batches')

    def read_and_written(within: str, op: programs.Op) -> float:
        return programs.traffic(program, within, op)

    def kernels(within: str, op: programs.Op) -> float:
        return read_and_written(within, op) > 0

    def large_copies(within: str, op: programs.Op) -> float:
        moved = programs.copied(program, op)
        return moved if moved >= programs.LARGE else 0

    def silent(within: str, op: programs.Op) -> float:
        # Transfers between a TPU's memories run beside the rest, and its custom calls only allocate or rename.
        aside = kind == 'cuda' or op.kind == 'custom-call' or op.kind.endswith('-start')
        return 0 if aside or op.cycles else read_and_written(within, op)

    measure = read_and_written if kind == 'cuda' else lambda within, op: op.cycles
    of_step, rest = step.total(measure), whole.total(measure, but=step)
    talks, talked = programs.collectives(program)
    return {
        'step': of_step, 'seconds': steps * of_step / speed, 'rest_seconds': rest / speed,
        'kernels': step.total(kernels), 'kernels_round': steps * step.total(kernels) + whole.total(kernels, but=step),
        'silent_bytes': step.total(silent),
        'large_copies_bytes': step.total(large_copies), 'degenerate': programs.degenerate(program),
        'collectives': talks, 'collective_bytes': talked, 'float64': programs.doubles(program),
    }  # fmt: skip


def schedule(sizes: np.ndarray, lanes: int, count: int, batch: int, epochs: int) -> tuple[int, float]:
    """Batch steps of the busiest device for clients of these sizes, and the share of padding among the rows."""
    chunks = np.sort(sizes)[::-1]
    chunks = np.pad(chunks, (0, -len(chunks) % (lanes * count))).reshape(-1, lanes)
    steps = epochs * -(-chunks.max(axis=1) // batch)
    place = np.asarray(devices.balanced(jnp.asarray(chunks.max(axis=1)), count))
    busiest = steps[np.argsort(place)].reshape(count, -1).sum(axis=1).max()
    return int(busiest), float(1 - epochs * sizes.sum() / (lanes * batch * steps.sum()))
