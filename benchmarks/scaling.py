"""What several devices would cost and gain: communication and balance of a round, counted on forced CPU devices.

    python benchmarks/scaling.py --workload W3 --devices 1 2 4 8
Strong scaling shares the same cohort among more devices; weak scaling gives every device as many clients. Clients are
drawn from one population. Seconds are an estimate from the numbers given for one device, not a measurement:
benchmarks/README.md says how.
"""

import argparse
import math
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import rounds_per_second

from fedjax_nc import devices, local, losses, models, objective, simulate
from fedjax_nc.algorithms import fedavg
from fedjax_nc.base import FederatedData
from fedjax_nc.heads import linear

BYTES = {'pred': 1, 's8': 1, 'u8': 1, 'bf16': 2, 'f16': 2, 's32': 4, 'u32': 4, 'f32': 4, 's64': 8, 'f64': 8}


def collectives(program: str) -> dict[str, tuple[int, int]]:
    """Kinds of communication in an HLO text, each with its number of operations and the bytes of their results."""
    found: dict[str, tuple[int, int]] = {}
    for shape, kind in re.findall(
        r'= (\(.*?\)|\S+) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(', program
    ):
        size = sum(
            BYTES[dtype] * math.prod(int(n) for n in dims.split(',') if n)
            for dtype, dims in re.findall(r'(\w+)\[([\d,]*)\]', shape)
        )
        count, total = found.get(kind, (0, 0))
        found[kind] = count + 1, total + size
    return found


def balance(clients: FederatedData, plan: local.Plan, cohort: int, count: int) -> tuple[float, float]:
    """Balance of a round on `count` devices and the batch rows of the busiest; they do not depend on the model."""
    small = clients._replace(x=jnp.zeros((len(clients.y), 1)))
    task = objective.objective(models.from_flax(models.MLP(widths=(1,))), linear(), losses.cross_entropy)
    algorithm, mesh = fedavg.algorithm(task, local.sgd(0.1), plan=plan), devices.mesh(jax.devices()[:count])
    state, small = devices.place(mesh, simulate.init(algorithm, jax.random.key(0), small), small)
    round = simulate.make_round(algorithm, cohort=cohort, chunk=1, mesh=mesh)
    report = jax.jit(round)(jax.random.key(1), state, small)[1]
    rows = float(jnp.sum(report.info.slots.astype(jnp.float32)))
    return float(report.balance), rows / count / float(report.balance)


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(prog='scaling.py', description=__doc__)
    parser.add_argument('--workload', choices=list(rounds_per_second.WORKLOADS), default='W3')
    parser.add_argument('--devices', type=int, nargs='+', default=[1, 2, 4, 8])
    parser.add_argument('--samples-per-second', type=float, default=1e5, help='of one device, for the estimate')
    parser.add_argument('--bandwidth', type=float, default=100.0, help='GB/s between devices, for the estimate')
    parser.add_argument('--latency', type=float, default=50.0, help='microseconds of an all-reduce, for the estimate')
    chosen = parser.parse_args(argv)
    rounds_per_second.prepare(max(chosen.devices))
    table = []
    for scaling in ('strong', 'weak'):
        for count in chosen.devices:
            args = rounds_per_second.arguments(['--workload', chosen.workload])
            base = rounds_per_second.settle(args)
            # One population for all rows, large enough for the largest cohort.
            work = base._replace(clients=base.clients * max(chosen.devices))
            work = work._replace(cohort=base.cohort * (count if scaling == 'weak' else 1))
            clients, _ = rounds_per_second.load(args, work)
            row = rounds_per_second.Row(args, work, clients, None, None, count)
            even, busiest = balance(clients, local.Plan(work.batch_size, work.epochs), work.cohort, count)
            talk = collectives(row.step.as_text())
            count_all, size = (sum(each[i] for each in talk.values()) for i in (0, 1))
            sent = 2 * (count - 1) / count * size  # by each device in a ring
            compute = busiest / chosen.samples_per_second
            talking = sent / (1e9 * chosen.bandwidth) + 1e-6 * chosen.latency * count_all if count > 1 else 0.0
            table.append({
                'scaling': scaling, 'devices': count, 'clients': work.cohort, 'balance': even, 'rows': busiest,
                'operations': count_all if count > 1 else 0, 'mib': sent / 2**20, 'compute': compute, 'talk': talking,
            })  # fmt: skip
    print('| scaling | devices | clients | balance | rows of the busiest | collectives | MiB sent | s | talking |')
    print('|' + ' --- |' * 9)
    for r in table:
        print(
            f'| {r["scaling"]} | {r["devices"]} | {r["clients"]} | {r["balance"]:.2f} | {r["rows"]:.0f} '
            f'| {r["operations"]} | {r["mib"]:.2f} | {r["compute"] + r["talk"]:.3g} '
            f'| {100 * r["talk"] / (r["compute"] + r["talk"]):.2g} % |'
        )
    return table


if __name__ == '__main__':
    try:
        main()
    except (ValueError, OSError) as problem:
        sys.exit(f'scaling.py: error: {" ".join(str(problem).split())}')
