"""Run by test_devices.py with several CPU devices, in one process or as one of two: prints what it found as JSON."""

import json
import sys
from pathlib import Path

import jax

if len(sys.argv) > 1:  # address, process, directory
    jax.config.update('jax_cpu_collectives_implementation', 'gloo')
    jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))

import numpy as np
import toys

from fedjax_nc import aggregators, devices, simulate, training
from fedjax_nc.algorithms import fedavg, fednh

ALGORITHMS = {
    'noise and statistics': fedavg.algorithm(toys.noisy_task, toys.opt, plan=toys.PLAN),
    'momentum kept': fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN, persist_momentum=True),
    'prototypes': fednh.algorithm(toys.tiny, toys.opt, plan=toys.PLAN),
    'median': fedavg.algorithm(
        toys.task, toys.opt, plan=toys.PLAN, aggregate=aggregators.stacked(aggregators.coordinate_median)
    ),
}
SIZES = [100, 7, 60, 33, 200, 1, 50, 149]
ONCE = len(sys.argv) > 1


def played(algorithm, data, mesh, chunk):
    traces = 0
    state = simulate.init(algorithm, toys.KEY, data)
    round = simulate.make_round(algorithm, cohort=5, chunk=chunk, mesh=mesh)
    if mesh is not None:
        state, data = devices.place(mesh, state, data)

    def counted(*args):
        nonlocal traces
        traces += 1
        return round(*args)

    run = jax.jit(counted, donate_argnums=1)
    for t in range(1 if ONCE else 3):
        state, report = run(jax.random.fold_in(toys.KEY, t), state, data)
    return state, report, traces, run._cache_size()


def whole(tree):
    """Every leaf as a NumPy array, also where other processes hold parts of it."""
    if jax.process_count() == 1:
        return [np.asarray(u) for u in jax.tree.leaves(tree)]
    replicate = jax.jit(lambda u: u, out_shardings=jax.NamedSharding(mesh, devices.EVERYWHERE))
    return [np.asarray(replicate(u).addressable_data(0)) for u in jax.tree.leaves(tree)]


mesh = devices.mesh()
found = {}
for name, algorithm in ALGORITHMS.items():
    if ONCE and name not in ('noise and statistics', 'momentum kept'):
        continue
    for sizes in (SIZES,) if ONCE or name != 'momentum kept' else (SIZES, SIZES[:7]):  # 7 do not divide by 4
        data = toys.ragged(sizes)
        alone, first, _, _ = played(algorithm, data, None, 2)
        for chunk in (2,) if ONCE else (1, 2):
            state, report, traces, compiled = played(algorithm, data, mesh, chunk)
            gaps = [float(np.abs(a - b).max()) for a, b in zip(whole(alone), whole(state), strict=True)]
            found[f'{name}, {len(sizes)} clients, chunk {chunk}'] = {
                'gap': max(gaps),
                'traces': traces,
                'compiled': compiled,
                'balance': float(report.balance),
                'loss': float(report.loss) - float(first.loss),
                'ids': whole(report.ids)[0][:5].tolist() == whole(first.ids)[0][:5].tolist(),
            }
history, saved = [], []
if ONCE:  # both processes write one run, when the first one's clock says so, and resume it
    for rounds in (2, 3):
        state, data = simulate.init(ALGORITHMS['momentum kept'], toys.KEY, toys.ragged(SIZES)), toys.ragged(SIZES)
        run = training.run(
            ALGORITHMS['momentum kept'], toys.KEY, state, data, rounds=rounds, cohort=5, chunk=2, mesh=mesh,
            out=sys.argv[3], resume=rounds > 2, checkpoint_pause=(1e-9, 1e9)[jax.process_index()],
        )  # fmt: skip
        history = [row['loss'] for row in run.history]
        saved += [sorted(path.name for path in Path(sys.argv[3], 'checkpoints').iterdir())]
print(json.dumps({'history': history, 'saved': saved, 'devices': len(jax.devices()), 'found': found}))
