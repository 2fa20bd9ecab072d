"""A run that is killed and started again until it is done: `hostile_program.py OUT ROUNDS`."""

import sys
from pathlib import Path

import jax
import numpy as np
import toys

from fedjax_nc import evaluate, simulate, training
from fedjax_nc.algorithms import fedavg, latest

data = toys.ragged([100, 7, 60, 33, 200, 1, 50, 149])
algorithm = latest.keep(fedavg.algorithm(toys.noisy_task, toys.opt, plan=toys.PLAN, persist_momentum=True))


def measure(state):
    return {'accuracy': evaluate.accuracy(evaluate.generic(algorithm, state, data.x, data.y, toys.CLASSES))}


if __name__ == '__main__':
    out, rounds = Path(sys.argv[1]), int(sys.argv[2])
    state = simulate.init(algorithm, toys.KEY, data)
    done = training.run(
        algorithm, toys.KEY, state, data, rounds=rounds, cohort=4, out=out, evaluate=measure, resume=True
    )
    np.savez(out / 'end.npz', *map(np.asarray, jax.tree.leaves(done.state)))
