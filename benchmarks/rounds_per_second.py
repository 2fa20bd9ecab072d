"""Times steady-state rounds of federated training, beside other frameworks where asked.

    python benchmarks/rounds_per_second.py --workload W1 --compare pytorch fedjax flower pfl --peer-python fedjax=PYTHON
    python benchmarks/rounds_per_second.py --workload W1 --conv patches sequential --chunk 1 5 20 --json w1.json
    python benchmarks/rounds_per_second.py --workload W1 --compare pytorch pytorch-channels-last pytorch-compile
The workloads and what the columns mean are explained in benchmarks/README.md.
"""

import argparse
import contextlib
import datetime
import itertools
import platform
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import results
import side_by_side
from workloads import CONVS, MODELS, SGD, WORKLOADS, Workload, algorithm, load, training_flops

import fedjax_nc
from fedjax_nc import devices, population, simulate, tuning
from fedjax_nc.base import FederatedData
from fedjax_nc.models import libdnnl


class Parser(argparse.ArgumentParser):
    """Ends with one line instead of the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f'{self.prog}: error: {message}\n')


def count(text: str) -> int:
    """Parses a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'{text!r} is not a whole number of at least 1')
    return int(text)


def interpreter(text: str) -> tuple[str, str]:
    """Parses PEER=PYTHON."""
    peer, _, python = text.partition('=')
    if peer not in side_by_side.PACKAGES or not python:
        raise argparse.ArgumentTypeError(f'{text!r} is not PEER=PYTHON with one of {", ".join(side_by_side.PACKAGES)}')
    return peer, python


def arguments(argv: list[str] | None, parser: Parser | None = None) -> argparse.Namespace:
    """Parses the options of a workload, beside those that a parser has already."""
    parser = parser or Parser(prog='rounds_per_second.py', description=__doc__)
    parser.add_argument('--workload', choices=list(WORKLOADS), default='W1', help='other options change its numbers')
    parser.add_argument('--algorithm', choices=['fedavg', 'fedetf'])
    parser.add_argument('--model', choices=list(MODELS))
    parser.add_argument('--norm', choices=['batch', 'group'], default='batch', help='of resnet20')
    parser.add_argument('--widths', type=count, nargs='+', default=[64, 64], help='of mlp')
    parser.add_argument('--clients', type=count)
    parser.add_argument('--cohort', type=count, help='clients a round; at most all of them')
    parser.add_argument('--samples', type=count, help='examples per client')
    parser.add_argument('--batch-size', type=count)
    parser.add_argument('--epochs', type=count, help='local epochs')
    parser.add_argument('--tails', type=count, nargs='+', help='smaller batches for what full ones leave over')
    parser.add_argument('--narrower', type=count, nargs='+', help='fewer lanes for clients that outlast others')
    parser.add_argument('--chunk', type=count, nargs='+', default=[None], help="default: the library's choice")
    parser.add_argument('--rounds-per-call', type=count, nargs='+', default=[1], help='rounds compiled into one call')
    parser.add_argument('--devices', type=count, nargs='+', default=[None], help='share a round; CPUs are cut up')
    parser.add_argument('--conv', choices=list(CONVS), nargs='+', default=[None], help="default: the library's choice")
    parser.add_argument('--tune', action='store_true', help='measure forms and chunks first, and add the fastest')
    parser.add_argument('--precision', choices=['float32', 'bfloat16'], default='float32')
    parser.add_argument(
        '--tf32', choices=['on', 'off'], default='on',
        help='whether NVIDIA GPUs may use it for float32, here and in PyTorch alike; other devices have none',
    )  # fmt: skip
    parser.add_argument('--rounds', type=count, default=5, help='timed calls of each row')
    parser.add_argument('--max-examples', type=count, help='use a part of the training set')
    parser.add_argument(
        '--keep', choices=['device', 'host', 'disk'], help='FedAvg whose clients keep their momentum, and where'
    )
    parser.add_argument('--pool', type=count, help='examples that all clients draw from; default: one use each')
    parser.add_argument('--data-dir', type=Path, help='where CIFAR-10 lies or is put; random images without it')
    peers = list(side_by_side.PACKAGES)
    parser.add_argument('--compare', choices=peers, nargs='+', default=[], help='take turns with these')
    parser.add_argument(
        '--peer-python', type=interpreter, nargs='+', action='extend', default=[], metavar='PEER=PYTHON',
        help="the Python that has a peer, for pytorch with all its forms; default: this one",
    )  # fmt: skip
    parser.add_argument('--torch-threads', type=count, help="default: PyTorch's own; 1 is steadier on a busy machine")
    parser.add_argument('--json', type=Path, help='also write the results to this file')
    return parser.parse_args(argv)


def settle(args: argparse.Namespace) -> Workload:
    """The workload with the options' numbers in place of its own."""
    base = WORKLOADS[args.workload]
    work = base._replace(**{k: v for k in base._fields if (v := getattr(args, k, None)) is not None})
    if args.cohort is None and args.clients is not None:  # the same share of the population as before
        work = work._replace(cohort=max(1, round(base.cohort / base.clients * work.clients)))
    if work.cohort > work.clients:
        raise ValueError(f'--cohort {work.cohort} is more than the {work.clients} clients')
    if args.keep and work.algorithm != 'fedavg':
        raise ValueError(
            f"--keep is FedAvg's, not that of {work.algorithm}: take another workload, or --algorithm fedavg"
        )
    if args.keep in ('host', 'disk') and max(args.rounds_per_call) > 1:
        raise ValueError(f'--keep {args.keep}: what is kept there comes and goes between rounds, one a call')
    if work.model != 'mlp' and work.side < 18:
        raise ValueError(f'{args.workload} has images of {work.side}x{work.side}, too small for --model {work.model}')
    return work


def prepare(count: int, tf32: str = 'on') -> None:
    """Cuts the CPU up into devices, if that is what this process runs on, and says how exact float32 is on a GPU."""
    if count > 1:
        jax.config.update('jax_num_cpu_devices', count)
    if len(jax.devices()) < count:
        raise ValueError(f'--devices {count}: there are {len(jax.devices())}')
    if jax.default_backend() == 'gpu':
        jax.config.update('jax_default_matmul_precision', 'default' if tf32 == 'on' else 'highest')


def matmul_rate(a: jax.Array) -> float:
    """FLOP/s of one large square matrix product."""
    start = time.perf_counter()
    jnp.matmul(a, a).block_until_ready()
    return 2 * len(a) ** 3 / (time.perf_counter() - start)


class Row:
    """One way to compute the round: compiled, warmed up and timed."""

    def __init__(self, args: argparse.Namespace, work: Workload, clients: FederatedData, conv: str | None,
                 chunk: int | None, count: int | None = None, rounds: int = 1) -> None:  # fmt: skip
        task = algorithm(args, work, conv)
        away = args.keep in ('host', 'disk')
        folder = tempfile.gettempdir() if args.keep == 'disk' else None
        self.data = clients
        if away:
            self.state = population.init(task, jax.random.key(0), clients, folder)
        else:
            self.state = simulate.init(task, jax.random.key(0), clients)
        self.conv = '-' if work.model == 'mlp' else conv or 'by platform (default)'
        for name in ('tails', 'narrower'):
            self.conv += f', {name} {" ".join(map(str, numbers))}' if (numbers := getattr(work, name)) else ''
        self.conv += f', {rounds} rounds a call' if rounds > 1 else ''
        self.devices, self.rounds = count or 1, rounds
        mesh = None if count is None else devices.mesh(jax.devices()[:count])
        if mesh is not None:
            placed, self.data = devices.place(mesh, self.state._replace(clients=()) if away else self.state, clients)
            self.state = placed._replace(clients=self.state.clients) if away else placed
        automatic = simulate.default_chunk(self.state.server, -(-work.cohort // self.devices))
        self.chunk = f'{automatic} (default)' if chunk is None else str(chunk)
        self.compile_seconds, self.memory = 0.0, None
        self.seconds, self.examples, self.padded = list[float](), list[float](), list[float]()
        if away:  # compiles itself in the first round
            self.step = population.make_round(task, cohort=work.cohort, chunk=chunk, mesh=mesh)
            return
        start = time.perf_counter()
        step = simulate.make_round(task, cohort=work.cohort, chunk=chunk, mesh=mesh)
        step = simulate.compiled(step if rounds == 1 else simulate.several(step))
        self.step = step.lower(self.keys(jax.random.key(0)), self.state, self.data).compile()
        self.compile_seconds = time.perf_counter() - start
        m = self.step.memory_analysis()  # None where the backend does not say; the donated state is an alias
        sizes = m and (m.argument_size_in_bytes, m.output_size_in_bytes, m.temp_size_in_bytes, -m.alias_size_in_bytes)
        self.memory = sum(sizes) if sizes else None

    def keys(self, key: jax.Array) -> jax.Array:
        return key if self.rounds == 1 else jax.random.split(key, self.rounds)

    def round(self, key: jax.Array, timed: bool = True) -> simulate.Report:
        """One round, or the several of a call, whose mean counts."""
        keys = jax.block_until_ready(self.keys(key))
        start = time.perf_counter()
        self.state, report = self.step(keys, self.state, self.data)
        jax.block_until_ready((self.state.server, report))
        if timed:
            self.seconds.append((time.perf_counter() - start) / self.rounds)
            self.examples.append(int(report.info.examples.sum()) / self.rounds)
            self.padded.append(float(report.padded_work.mean()))
        return report

    def results(self, flops: int, rate: float, peers: list[side_by_side.Peer]) -> dict[str, Any]:
        best, examples = min(self.seconds), statistics.mean(self.examples)
        return {
            'conv': self.conv, 'chunk': self.chunk, 'devices': self.devices, 'seconds_per_round': best,
            'median_seconds_per_round': statistics.median(self.seconds),
            'samples_per_second': examples / best, 'model_flops_per_second': flops * examples / best,
            'share_of_matmul': flops * examples / best / rate, 'padded_work': statistics.mean(self.padded),
            'compile_seconds': self.compile_seconds, 'memory_bytes': self.memory,
            'ratios': {peer.name: min(peer.seconds) / best for peer in peers},
        }  # fmt: skip


def pack(args: argparse.Namespace, work: Workload, row: Row, path: Path) -> dict[str, Any]:
    """Writes the workload, from the weights that `row` has now, for the peers. Returns its settings."""
    settings = {
        'algorithm': work.algorithm, 'model': work.model, 'norm': args.norm, 'widths': args.widths,
        'batch_size': work.batch_size, 'epochs': work.epochs, 'sgd': SGD, 'bfloat16': args.precision == 'bfloat16',
        'device': 'cuda' if jax.default_backend() == 'gpu' else 'cpu', 'threads': args.torch_threads,
        'tf32': args.tf32 == 'on', 'equal': bool((row.data.size == row.data.size[0]).all()),
    }  # fmt: skip
    side_by_side.pack(path, row.data, row.state.server.variables, **settings)
    return settings


def start_peers(args: argparse.Namespace, work: Workload, row: Row, path: Path) -> list[side_by_side.Peer]:
    """The peers asked for that can play this workload."""
    settings = pack(args, work, row, path)
    fit = [peer for peer in dict.fromkeys(args.compare) if side_by_side.fit(peer, settings)]
    return [peer.ready() for peer in [side_by_side.Peer(peer, python_of(peer, args), path) for peer in fit]]


def python_of(peer: str, args: argparse.Namespace) -> str:
    """The interpreter that has a peer: named for itself, for its package, or this one."""
    pythons = dict(args.peer_python)
    return pythons.get(peer) or pythons.get(peer.partition('-')[0]) or sys.executable


def versions(args: argparse.Namespace) -> dict[str, str]:
    """Those of ours, with oneDNN's on a CPU if its own gradients are taken; on a GPU whether float32 may be TF32."""
    known = {'fedjax_nc': fedjax_nc.__version__, 'jax': jax.__version__, 'python': platform.python_version()}
    if jax.default_backend() == 'gpu':
        return known | {'tf32': args.tf32}
    return known | ({'oneDNN': found} if (found := libdnnl.version()) else {})


def tuned(args: argparse.Namespace, work: Workload, clients: FederatedData) -> tuning.Choice:
    """Form, chunk, tails and narrower lanes that are the fastest here, as far as a part of a round tells."""
    batch = None if work.tails or work.narrower else work.batch_size
    choices = tuning.candidates(work.cohort, work.model != 'mlp', batch_size=batch, sizes=clients.size)
    if work.narrower:
        choices = [choice._replace(narrower=tuple(work.narrower)) for choice in choices]
    found = tuning.fastest(
        lambda choice: algorithm(args, planned(work, choice), choice.conv), clients,
        [choice for choice in choices if choice.rounds_per_call == 1 or not args.keep], cohort=work.cohort,
        show=lambda line: print(f'tuning: {line}', file=sys.stderr),
    )  # fmt: skip
    return found.choice


def planned(work: Workload, choice: tuning.Choice) -> Workload:
    """The workload with what a choice adds to its plan, if anything."""
    added = {name: list(found) for name in ('tails', 'narrower') if (found := getattr(choice, name))}
    return work._replace(**added)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = arguments(argv)
    work = settle(args)
    prepare(max(count or 1 for count in args.devices), args.tf32)
    clients, source = load(args, work)
    wanted = [(work, *each) for each in itertools.product(args.conv, args.chunk, args.devices, args.rounds_per_call)]
    if args.tune:
        best = tuned(args, work, clients)
        wanted.append((planned(work, best), best.conv, best.chunk, None, best.rounds_per_call))
    rows = [Row(args, each, clients, *how) for each, *how in wanted]
    n, rates = 2048 if jax.default_backend() == 'cpu' else 8192, list[float]()
    square = jax.random.normal(jax.random.key(0), (n, n), jnp.float32).astype(args.precision)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        peers = start_peers(args, work, rows[0], folder / 'work.npz') if args.compare else []
        for peer in peers:
            stack.callback(peer.close)
        for r in range(args.rounds + 1):  # the first round warms up; all take turns, so that a busy spell hits each
            for row in rows:
                report = row.round(jax.random.key(r), timed=r > 0)  # the key chooses the cohort: the same for every row
            rates += [matmul_rate(square) for _ in range(3)]
            last = np.asarray(report.ids).reshape(-1, report.ids.shape[-1])[-1]
            cohort = [k for k in last.tolist() if k < work.clients]
            for peer in peers:
                peer.round(cohort, timed=r > 0)
    peers = [peer for peer in peers if peer.seconds]
    flops, rate = training_flops(args, work, clients), max(rates)
    table = [row.results(flops, rate, peers) for row in rows]
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == 'darwin' else 1024)
    result = {
        'workload': args.workload, **work._asdict(), 'precision': args.precision, 'data': source,
        'rounds': args.rounds, 'seconds_per_round': table[0]['seconds_per_round'],
        'model_flops_per_round': flops * statistics.mean(rows[0].examples), 'matmul_flops_per_second': rate,
        'date': datetime.date.today().isoformat(), 'device': results.device(), 'backend': jax.default_backend(),
        'versions': versions(args),
        'peak_device_bytes': (jax.devices()[0].memory_stats() or {}).get('peak_bytes_in_use'),
        'peak_process_bytes': rss, 'rows': table, 'peers': {peer.name: peer.results() for peer in peers},
    }  # fmt: skip
    print(results.markdown(result))
    if args.json:
        results.write(args.json, result)
    return result


if __name__ == '__main__':
    try:
        main()
    except (ValueError, ImportError, OSError) as problem:
        sys.exit(f'rounds_per_second.py: error: {" ".join(str(problem).split())}')
