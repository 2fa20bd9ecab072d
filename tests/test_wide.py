"""With 64-bit numbers enabled all stays in 32 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from fedjax_nc import privacy, simulate
from fedjax_nc.algorithms import feddyn, fedetf_gmv, ratioloss, scaffold
from fedjax_nc.data import federate

EXAMPLES = federate(np.eye(5, 12), np.arange(5), [[c] for c in range(5)])


def private(algorithm):
    return privacy.private(algorithm, clip=1.0, noise_multiplier=0.1, cohort=4)


def long(make):
    return pytest.param(make, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    'make',
    [
        lambda: fedetf_gmv.algorithm(toys.tiny, toys.opt, warm=1, plan=toys.PLAN),
        long(lambda: fedetf_gmv.algorithm(toys.tiny, toys.opt, warm=1, plan=toys.PLAN, features='online')),
        long(lambda: ratioloss.algorithm(toys.tiny, toys.opt, auxiliary=EXAMPLES, plan=toys.PLAN)),
        lambda: private(scaffold.algorithm(toys.task, toys.opt, plan=toys.PLAN)),
        long(lambda: private(feddyn.algorithm(toys.task, toys.opt, plan=toys.PLAN, alpha=0.1))),
    ],
    ids=['gmv', 'gmv online', 'ratioloss', 'private scaffold', 'private feddyn'],
)
def test_methods_train(make):
    with jax.enable_x64(True):
        algorithm, key = make(), jax.random.key(0)
        rng = np.random.default_rng(0)
        data = federate(rng.normal(size=(40, 12)), rng.integers(0, 5, 40), np.split(np.arange(40), 4), 5)
        assert data.x.dtype == jnp.float32
        state = simulate.init(algorithm, key, data)
        after, report = jax.jit(simulate.make_round(algorithm))(key, state, data)
        assert bool(report.finite)
        floats = [u for u in jax.tree.leaves(after) if jnp.issubdtype(u.dtype, jnp.floating)]
        assert {u.dtype for u in floats} == {jnp.dtype(jnp.float32)}
