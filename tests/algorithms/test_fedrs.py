"""FedRS against NumPy, for features `z = x * u`, a linear head without bias and one batch a client."""

import jax
import numpy as np
import pytest
import softmax_by_hand as by_hand
import toys

from fedjax_nc import heads, losses, simulate
from fedjax_nc.algorithms import fedavg, fedrs
from fedjax_nc.objective import objective


def factors(counts, alpha, soft):
    share = counts / counts.max() if soft else counts > 0
    return alpha + (1 - alpha) * share


def local_work(start, a, rate, x, y):
    def gradient(p):
        z = x * p['u']
        q = a * by_hand.errors(z @ p['w'] * a, y)
        return {'u': (q @ p['w'].T * x).sum(0), 'w': z.T @ q}

    return by_hand.descend(start, start, gradient, rate)


@pytest.mark.parametrize('soft', [False, True])
def test_two_rounds_of_partial_cohorts(data, soft):
    algorithm = fedrs.algorithm(toys.scaling, by_hand.opt, alpha=0.3, soft=soft, plan=by_hand.PLAN)
    states = by_hand.two_rounds(algorithm, data)
    want = by_hand.numbers(states[0].server.variables)
    assert set(want) == {'u', 'w'}  # no bias
    for t, ids in enumerate(by_hand.COHORTS):
        a = {k: factors(np.asarray(data.counts[k], np.float64), 0.3, soft) for k in ids}
        assert any((a[k] == 0.3).any() for k in ids)
        ends = [local_work(want, a[k], by_hand.LR * by_hand.FALL**t, *toys.examples(data, k)) for k in ids]
        want = by_hand.average(ends, np.asarray(data.size, np.float64)[ids])
        by_hand.close(by_hand.numbers(states[t + 1].server.variables), want)
    x = np.asarray(data.x[:9], np.float64)
    got = algorithm.predict(states[-1].server, None, data.x[:9])
    np.testing.assert_allclose(got, x * want['u'] @ want['w'], atol=5e-5)  # not scaled


def test_unrestricted_it_is_fedavg(data):
    plain = fedavg.algorithm(objective(toys.tiny, heads.linear(bias=False), losses.cross_entropy), toys.opt)
    server = simulate.init(plain, toys.KEY, data).server

    @jax.jit
    def work(shard, alpha):
        return fedrs.algorithm(toys.tiny, toys.opt, alpha=alpha).client(toys.KEY, server, (), shard)[1:]

    want = jax.jit(plain.client)(toys.KEY, server, (), data.shard(3))[1:]
    toys.same(work(data.shard(3), 1.0), want)
    assert abs(work(data.shard(3), 0.2)[1].loss - want[1].loss) > 1e-3


def test_a_factor_that_strengthens_is_refused():
    with pytest.raises(ValueError, match='alpha'):
        fedrs.algorithm(toys.tiny, toys.opt, alpha=1.5)
