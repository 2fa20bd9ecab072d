"""The workloads of benchmarks/README.md: what a round consists of, its clients, its algorithm and its FLOPs."""

import argparse
import math
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_nc import data, heads, local, losses, models, tuning
from fedjax_nc.algorithms import fedavg
from fedjax_nc.base import Algorithm, FederatedData
from fedjax_nc.experiments import recipes
from fedjax_nc.objective import objective

MODELS = {'mlp': models.MLP, 'cnn': models.CNN, 'cnn_mcmahan': models.McMahanCNN, 'resnet20': models.ResNet20}
CONVS = tuning.FORMS
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
    tails: list[int] | None = None  # smaller batches for what full ones leave over
    narrower: list[int] | None = None  # fewer lanes for those that outlast others


WORKLOADS = {
    'W1': Workload('fedavg', 'cnn_mcmahan', 20, 20, 200, 50, 1),
    'W2': Workload('fedavg', 'cnn', 100, 10, 500, 50, 1),
    'W3': Workload('fedetf', 'resnet20', 20, 20, None, 128, 3),
    'W4': Workload('fedavg', 'mlp', 1000, 100, 20, 10, 1, 8),
}


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
        total = args.pool or min(args.max_examples or 10**9, work.clients * work.samples if work.samples else 50_000)
        rng = np.random.default_rng(0)
        x = rng.integers(0, 256, (total, work.side, work.side, 3 if work.side == 32 else 1), np.uint8)
        y = rng.integers(0, 10, total).astype(np.int32)
    if args.pool:
        if args.pool > len(y):
            raise ValueError(f'--pool {args.pool}: there are {len(y)} images')
        x, y = x[: args.pool], y[: args.pool]
        return drawn(x, y, work), f'{source}, {args.pool} shared by all clients'
    limit = min(len(y), args.max_examples or len(y), len(y) if work.samples is None else work.clients * work.samples)
    kept = np.random.default_rng(1).choice(len(y), limit, replace=False)
    x, y = x[kept], y[kept]
    if limit < (wanted := work.clients * (work.samples or 10)):
        raise ValueError(f'{work.clients} clients need {wanted} examples, there are {limit}')
    parts = data.iid(y, work.clients, seed=0) if work.samples else data.dirichlet(y, work.clients, 0.1, seed=0)
    return data.federate(x, y, parts, 10), source


def drawn(x: np.ndarray, y: np.ndarray, work: Workload) -> FederatedData:
    """Clients that draw their examples from one pool: a population of millions in the memory of its index."""
    if work.samples is None:
        raise ValueError('--pool needs clients of one size: give --samples')
    index = np.random.default_rng(1).integers(0, len(y), (work.clients, work.samples), np.int32)
    cells = np.arange(work.clients)[:, None] * 10 + y[index]
    counts = np.bincount(cells.ravel(), minlength=work.clients * 10).reshape(-1, 10).astype(np.int32)
    size = np.full(work.clients, work.samples, np.int32)
    return jax.tree.map(jnp.asarray, FederatedData(x, y, index, size, counts))


def algorithm(args: argparse.Namespace, work: Workload, conv: str | None) -> Algorithm:
    extra: dict[str, Any] = {'widths': tuple(args.widths)} if work.model == 'mlp' else {'conv': CONVS.get(conv)}
    extra |= {'norm': args.norm} if work.model == 'resnet20' else {}
    model = models.from_flax(MODELS[work.model](dtype=jnp.dtype(args.precision), **extra))
    plan = local.Plan(work.batch_size, work.epochs, tuple(work.tails or ()), tuple(work.narrower or ()))
    if args.keep:
        task = objective(model, heads.linear(), losses.cross_entropy)
        return fedavg.algorithm(task, local.sgd(**SGD), plan=plan, persist_momentum=True)
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
