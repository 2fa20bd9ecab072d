"""Times steady-state rounds of federated training, beside a hand-written sequential PyTorch loop where asked.

    python benchmarks/rounds_per_second.py --workload W1 --compare pytorch
    python benchmarks/rounds_per_second.py --workload W1 --conv patches sequential --chunk 1 5 20 --json w1.json
The workloads and what the columns mean are explained in benchmarks/README.md.
"""

import argparse
import importlib.util
import json
import math
import os
import platform
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

import fedjax_nc
from fedjax_nc import data, local, models, recipes, simulate
from fedjax_nc.base import Algorithm, FederatedData

MODELS = {'mlp': models.MLP, 'cnn': models.CNN, 'cnn_mcmahan': models.McMahanCNN, 'resnet20': models.ResNet20}
CONVS = {'native': models.conv_native, 'patches': models.conv_patches, 'sequential': models.conv_sequential}
SGD = {'lr': 0.02, 'momentum': 0.9, 'weight_decay': 5e-4}


class Workload(NamedTuple):
    """What a round consists of. `samples` None spreads the whole training set by Dirichlet(0.1)."""

    algorithm: str
    model: str
    clients: int
    cohort: int
    samples: int | None
    batch_size: int
    epochs: int
    side: int = 32  # height and width; 32 means CIFAR-10 or random images like it, otherwise one channel


WORKLOADS = {
    'W1': Workload('fedavg', 'cnn_mcmahan', 20, 20, 200, 50, 1),
    'W2': Workload('fedavg', 'cnn', 100, 10, 500, 50, 1),
    'W3': Workload('fedetf', 'resnet20', 20, 20, None, 128, 3),
    'W4': Workload('fedavg', 'mlp', 1000, 100, 20, 10, 1, 8),
}


class Parser(argparse.ArgumentParser):
    """Ends with one line instead of the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f'{self.prog}: error: {message}\n')


def count(text: str) -> int:
    """Parses a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'{text!r} is not a whole number of at least 1')
    return int(text)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog='rounds_per_second.py', description=__doc__)
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
    parser.add_argument('--chunk', type=count, nargs='+', default=[None], help="default: the library's choice")
    parser.add_argument('--conv', choices=list(CONVS), nargs='+', default=[None], help="default: the library's choice")
    parser.add_argument('--precision', choices=['float32', 'bfloat16'], default='float32')
    parser.add_argument('--rounds', type=count, default=5, help='timed rounds of each row')
    parser.add_argument('--max-examples', type=count, help='use a part of the training set')
    parser.add_argument('--data-dir', type=Path, help='where CIFAR-10 lies or is put; random images without it')
    parser.add_argument('--compare', choices=['pytorch'], help='alternate with a hand-written PyTorch loop')
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
    if work.model != 'mlp' and work.side < 18:
        raise ValueError(f'{args.workload} has images of {work.side}x{work.side}, too small for --model {work.model}')
    if args.compare and importlib.util.find_spec('torch') is None:
        print('Not compared: PyTorch is not installed (pip install torch).', file=sys.stderr)
        args.compare = None
    return work


def load(args: argparse.Namespace, work: Workload) -> tuple[FederatedData, str]:
    """The clients' data, and what they are."""
    source = 'random images'
    if work.side == 32 and args.data_dir is not None:
        try:
            found = data.load_dataset('cifar10', args.data_dir)
            x, y, source = found.x_train, found.y_train, 'CIFAR-10'
        except data.DatasetUnavailableError as problem:
            print(f'Random images are used: {" ".join(str(problem).split())}', file=sys.stderr)
    if source == 'random images':
        total = min(args.max_examples or 10**9, work.clients * work.samples if work.samples else 50_000)
        rng = np.random.default_rng(0)
        x = rng.integers(0, 256, (total, work.side, work.side, 3 if work.side == 32 else 1), np.uint8)
        y = rng.integers(0, 10, total).astype(np.int32)
    limit = min(len(y), args.max_examples or len(y), len(y) if work.samples is None else work.clients * work.samples)
    kept = np.random.default_rng(1).choice(len(y), limit, replace=False)
    x, y = x[kept], y[kept]
    if limit < (wanted := work.clients * (work.samples or 10)):
        raise ValueError(f'{work.clients} clients need {wanted} examples, there are {limit}')
    parts = data.iid(y, work.clients, seed=0) if work.samples else data.dirichlet(y, work.clients, 0.1, seed=0)
    return data.federate(x, y, parts, 10), source


def algorithm(args: argparse.Namespace, work: Workload, conv: str | None) -> Algorithm:
    extra: dict[str, Any] = {'widths': tuple(args.widths)} if work.model == 'mlp' else {'conv': CONVS.get(conv)}
    extra |= {'norm': args.norm} if work.model == 'resnet20' else {}
    model = models.from_flax(MODELS[work.model](dtype=jnp.dtype(args.precision), **extra))
    plan = local.Plan(work.batch_size, work.epochs)
    return recipes.RECIPES[work.algorithm](model, local.sgd(**SGD), plan).train


def count_flops(jaxpr: Any) -> int:
    """Two for each multiply-add of the products and convolutions in a jaxpr, zeros of the padding included."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == 'dot_general':
            lhs = eqn.invars[0].aval.shape
            total += 2 * eqn.outvars[0].aval.size * math.prod(lhs[d] for d in eqn.params['dimension_numbers'][0][0])
        elif eqn.primitive.name == 'conv_general_dilated':
            kernel = eqn.invars[1].aval
            outputs = kernel.shape[eqn.params['dimension_numbers'].rhs_spec[0]]
            total += 2 * eqn.outvars[0].aval.size * (kernel.size // outputs)
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda u: hasattr(u, 'eqns')):
            inner = getattr(inner, 'jaxpr', inner)
            total += count_flops(inner) if hasattr(inner, 'eqns') else 0
    return total


def training_flops(args: argparse.Namespace, work: Workload, clients: FederatedData) -> int:
    """Model FLOPs of training on one example: three times the forward pass."""
    task = algorithm(args, work, 'native')
    server = jax.eval_shape(task.init, jax.random.key(0), clients)
    x = jax.ShapeDtypeStruct((1, *clients.x.shape[1:]), clients.x.dtype)
    return 3 * count_flops(jax.make_jaxpr(lambda server, x: task.predict(server, None, x))(server, x).jaxpr)


def matmul_rate(a: jax.Array) -> float:
    """FLOP/s of one large square matrix product."""
    start = time.perf_counter()
    jnp.matmul(a, a).block_until_ready()
    return 2 * len(a) ** 3 / (time.perf_counter() - start)


class Row:
    """One way to compute the round: compiled, warmed up and timed."""

    def __init__(self, args: argparse.Namespace, work: Workload, clients: FederatedData, conv: str | None,
                 chunk: int | None) -> None:  # fmt: skip
        task = algorithm(args, work, conv)
        self.data, self.state = clients, simulate.init(task, jax.random.key(0), clients)
        names = {fn: name for name, fn in CONVS.items()}
        self.conv = '-' if work.model == 'mlp' else conv or f'{names[models.default_conv()]} (default)'
        automatic = min(simulate.default_chunk(self.state.server), work.cohort)
        self.chunk = f'{automatic} (default)' if chunk is None else str(chunk)
        start = time.perf_counter()
        step = simulate.compiled(simulate.make_round(task, cohort=work.cohort, chunk=chunk))
        self.step = step.lower(jax.random.key(0), self.state, clients).compile()
        self.compile_seconds = time.perf_counter() - start
        m = self.step.memory_analysis()  # None where the backend does not say; the donated state is an alias
        sizes = m and (m.argument_size_in_bytes, m.output_size_in_bytes, m.temp_size_in_bytes, -m.alias_size_in_bytes)
        self.memory = sum(sizes) if sizes else None
        self.seconds, self.examples, self.padded = list[float](), list[int](), list[float]()

    def round(self, key: jax.Array, timed: bool = True) -> simulate.Report:
        start = time.perf_counter()
        self.state, report = self.step(key, self.state, self.data)
        jax.block_until_ready((self.state, report))
        if timed:
            self.seconds.append(time.perf_counter() - start)
            self.examples.append(int(report.info.examples.sum()))
            self.padded.append(float(report.padded_work))
        return report

    def results(self, flops: int, rate: float, torch_seconds: list[float]) -> dict[str, Any]:
        best, examples = min(self.seconds), statistics.mean(self.examples)
        return {
            'conv': self.conv, 'chunk': self.chunk, 'seconds_per_round': best,
            'median_seconds_per_round': statistics.median(self.seconds),
            'samples_per_second': examples / best, 'model_flops_per_second': flops * examples / best,
            'share_of_matmul': flops * examples / best / rate, 'padded_work': statistics.mean(self.padded),
            'compile_seconds': self.compile_seconds, 'memory_bytes': self.memory,
            'pytorch_ratio': min(torch_seconds) / best if torch_seconds else None,
        }  # fmt: skip


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = arguments(argv)
    work = settle(args)
    clients, source = load(args, work)
    rows = [Row(args, work, clients, conv, chunk) for conv in args.conv for chunk in args.chunk]
    other = None
    if args.compare:
        import pytorch_loop  # lies beside this script and needs torch

        other = pytorch_loop.build(args, work, clients, SGD)
    n, rates, torch_seconds = 2048 if jax.default_backend() == 'cpu' else 8192, [], []
    square = jax.random.normal(jax.random.key(0), (n, n), jnp.float32).astype(args.precision)
    for r in range(args.rounds + 1):  # the first round warms up; then all take turns, so that a busy spell hits each
        for row in rows:
            report = row.round(jax.random.key(r), timed=r > 0)  # the key chooses the cohort: the same for every row
        rates += [matmul_rate(square) for _ in range(3)]
        if other:
            cohort = [k for k in np.asarray(report.ids).tolist() if k < work.clients]
            start = time.perf_counter()
            other.round(cohort)
            torch_seconds += [time.perf_counter() - start] if r > 0 else []
    flops, rate = training_flops(args, work, clients), max(rates)
    table = [row.results(flops, rate, torch_seconds) for row in rows]
    versions = {'fedjax_nc': fedjax_nc.__version__, 'jax': jax.__version__, 'python': platform.python_version()}
    versions |= other.versions if other else {}
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == 'darwin' else 1024)
    result = {
        'workload': args.workload, **work._asdict(), 'precision': args.precision, 'data': source,
        'seconds_per_round': table[0]['seconds_per_round'],
        'pytorch_seconds_per_round': min(torch_seconds) if torch_seconds else None,
        'pytorch_median_seconds_per_round': statistics.median(torch_seconds) if torch_seconds else None,
        'model_flops_per_round': flops * statistics.mean(rows[0].examples), 'matmul_flops_per_second': rate,
        'device': jax.devices()[0].device_kind, 'backend': jax.default_backend(), 'versions': versions,
        'peak_device_bytes': (jax.devices()[0].memory_stats() or {}).get('peak_bytes_in_use'),
        'peak_process_bytes': rss, 'rows': table,
    }  # fmt: skip
    show(result, args.rounds)
    if args.json:
        write(args.json, result)
    return result


def show(result: dict[str, Any], repetitions: int) -> None:
    """Prints Markdown."""
    sampled = '' if result['cohort'] == result['clients'] else f', {result["cohort"]} sampled'
    print(
        f'{result["workload"]}: {result["algorithm"]}, {result["model"]}, {result["clients"]} clients{sampled}, batch '
        f'{result["batch_size"]}, epochs {result["epochs"]}, {result["data"]}, {result["precision"]}; '
        f'{result["model_flops_per_round"] / 1e9:.3g} GFLOP a round; {repetitions} timed rounds.\n'
    )
    names = ['form', 'chunk', 's/round', 'median', 'samples/s', 'GFLOP/s', 'of matmul', 'padded', 'compile s', 'MiB']
    compared = result['pytorch_seconds_per_round'] is not None
    names += ['PyTorch / ours'] if compared else []
    print(f'| {" | ".join(names)} |\n|' + ' --- |' * len(names))
    for row in result['rows']:
        cells = [
            row['conv'], row['chunk'], f'{row["seconds_per_round"]:.4g}', f'{row["median_seconds_per_round"]:.4g}',
            f'{row["samples_per_second"]:.4g}', f'{row["model_flops_per_second"] / 1e9:.3g}',
            f'{100 * row["share_of_matmul"]:.3g} %', f'{100 * row["padded_work"]:.0f} %',
            f'{row["compile_seconds"]:.2g}', f'{row["memory_bytes"] / 2**20:.0f}' if row['memory_bytes'] else '?',
            *([f'{row["pytorch_ratio"]:.2f}'] if compared else []),
        ]  # fmt: skip
        print(f'| {" | ".join(cells)} |')
    if compared:
        best, median = (result[f'pytorch_{kind}seconds_per_round'] for kind in ('', 'median_'))
        speed, rate = result['model_flops_per_round'] / best, result['matmul_flops_per_second']
        print(f'| PyTorch | 1 | {best:.4g} | {median:.4g} | | {speed / 1e9:.3g} | {100 * speed / rate:.3g} % | | | | |')
    on_device = f'{result["peak_device_bytes"] / 2**20:.0f} MiB on the device, ' if result['peak_device_bytes'] else ''
    versions = ', '.join(f'{name} {version}' for name, version in result['versions'].items())
    print(
        f'\nMatrix product {result["matmul_flops_per_second"] / 1e9:.4g} GFLOP/s. Peak of all rows: {on_device}'
        f'{result["peak_process_bytes"] / 2**20:.0f} MiB of the process. {result["device"]}; {versions}.'
    )


def write(path: Path, content: dict[str, Any]) -> None:
    """JSON, written beside its place and renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f'.{path.name}.{os.getpid()}')
    temporary.write_text(json.dumps(content, indent=2) + '\n')
    os.replace(temporary, path)


if __name__ == '__main__':
    try:
        main()
    except (ValueError, ImportError, OSError) as problem:
        sys.exit(f'rounds_per_second.py: error: {" ".join(str(problem).split())}')
