"""Rounds whose examples stay on disk, beside the same rounds with all of them on the device.

    python benchmarks/from_disk.py                  # 200,000 images, FedAvg's CNN, cohorts of 10 of 1,000 clients
    python benchmarks/from_disk.py --model mlp      # a model so small that reading counts most

The file is made anew, of random bytes: what is measured is time. Each way runs in turns, and the ratio is that of the
medians. `limit` is a tenth of the set; a round of the set on the device is refused under it, and one from disk is not.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from fedjax_nc import data, footprint, heads, local, losses, models, simulate, training
from fedjax_nc.algorithms import fedavg
from fedjax_nc.base import Algorithm, FederatedData
from fedjax_nc.data.host import shapes
from fedjax_nc.objective import objective

SIDE = 32


def made(place: Path, images: int) -> np.ndarray:
    """A memory-mapped file of random images [n, 32, 32, 3]."""
    x = np.lib.format.open_memmap(place, 'w+', np.uint8, (images, SIDE, SIDE, 3))
    rng = np.random.default_rng(0)
    for start in range(0, images, 10_000):
        piece = x[start : start + 10_000]
        piece[:] = rng.integers(0, 256, piece.shape, np.uint8)
    x.flush()
    return np.load(place, mmap_mode='r')


def seconds(algorithm: Algorithm, clients: FederatedData, cohort: int, rounds: int, key: jax.Array) -> list[float]:
    """Of each round but the first two, with what lies between rounds."""
    ends: list[float] = []
    training.run(
        algorithm, key, simulate.init(algorithm, key, clients), clients, rounds=rounds + 2, cohort=cohort,
        on_round=lambda row, state: ends.append(time.perf_counter()), progress=False,
    )  # fmt: skip
    return np.diff(ends)[1:].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--images', type=int, default=200_000)
    parser.add_argument('--clients', type=int, default=1000)
    parser.add_argument('--cohort', type=int, default=10)
    parser.add_argument('--rounds', type=int, default=10)
    parser.add_argument('--turns', type=int, default=3)
    parser.add_argument('--model', choices=('cnn', 'mlp'), default='cnn')
    parser.add_argument('--folder', help='where the file is put for the time being')
    args = parser.parse_args()
    body = {'cnn': models.CNN(), 'mlp': models.MLP((64,))}[args.model]
    task = objective(models.from_flax(body), heads.linear(), losses.cross_entropy)
    algorithm = fedavg.algorithm(task, local.sgd(0.01), plan=local.Plan(50, 1))
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        x = made(Path(folder, 'x.npy'), args.images)
        rng = np.random.default_rng(1)
        y, parts = rng.integers(0, 10, args.images), np.array_split(rng.permutation(args.images), args.clients)
        ways = {'device': data.federate(x, y, parts, 10), 'disk': data.federate(x, y, parts, 10, host=True)}
        key, limit = jax.random.key(0), x.nbytes // 10
        state = jax.eval_shape(lambda: simulate.init(algorithm, key, ways['device']))
        taken = footprint.estimate(algorithm, state, shapes(ways['disk'], args.cohort))
        times: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(args.turns):
            for name, clients in ways.items():
                times[name] += seconds(algorithm, clients, args.cohort, args.rounds, jax.random.fold_in(key, turn))
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(
        f'{x.nbytes / 1e6:.0f} MB of examples, limit {limit / 1e6:.0f} MB, a round from disk takes '
        f'{taken.total / 1e6:.0f} MB, {taken.data / 1e6:.0f} of them examples'
    )
    for name, value in medians.items():
        print(f'{name:8}{1000 * value:9.1f} ms a round')
    print(f'speed from disk: {medians["device"] / medians["disk"]:.2f} of that from the device')
    if taken.total > limit:
        print('the limit is too small for a round from disk: take more images, or a smaller model or cohort')


if __name__ == '__main__':
    main()
