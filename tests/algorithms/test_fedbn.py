"""FedBN against NumPy: features `h = u (gamma (x - m) / s + beta)`, of which gamma, beta and statistics are private.

A batch holds a client's whole data. With d h = q W^T and xhat = (x - m) / s, which no parameter moves:

    d u = sum d h (gamma xhat + beta),  d gamma = sum d h u xhat,  d beta = sum d h u
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import softmax_by_hand as hand
import toys

from fedjax_nc import heads, losses, simulate
from fedjax_nc.algorithms import fedavg, fedbn, fedloge, fedrep, fedrod
from fedjax_nc.models import adapter, layers, mobilenet, resnet
from fedjax_nc.objective import objective

EPS = 1e-5


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, *, mask=None, train=False):
        return layers.BatchNorm(not train)(x, mask) * self.param('u', nn.initializers.ones, x.shape[-1:])


task = objective(adapter.from_flax(Normed()), heads.linear(), losses.cross_entropy)
algorithm = fedbn.algorithm(task, hand.opt, plan=hand.PLAN)
PRIVATE = ('scale', 'bias', 'mean', 'var')


def numbers(v):
    norm, stats = v.params['body']['BatchNorm_0'], v.stats['BatchNorm_0']
    values = {'u': v.params['body']['u'], **v.params['head'], **norm, **stats}
    return {name: np.asarray(value, np.float64) for name, value in values.items()}


def work(p, x, y, rate):
    mean, var, n = x.mean(0), x.var(0), len(y)
    xhat = (x - mean) / np.sqrt(var + EPS)

    def gradient(p):
        z = p['scale'] * xhat + p['bias']
        q = hand.errors(z * p['u'] @ p['w'] + p['b'], y)
        d_h = q @ p['w'].T
        return {'u': (d_h * z).sum(0), 'scale': (d_h * p['u'] * xhat).sum(0), 'bias': (d_h * p['u']).sum(0),
                'w': (z * p['u']).T @ q, 'b': q.sum(0)}  # fmt: skip

    end = hand.descend(p, ('u', 'w', 'b', 'scale', 'bias'), gradient, rate)
    for _ in range(hand.EPOCHS):
        end['mean'] = 0.9 * end['mean'] + 0.1 * mean
        end['var'] = 0.9 * end['var'] + 0.1 * var * n / (n - 1) if n > 1 else end['var']
    return end


def test_two_rounds(data):
    states = hand.two_rounds(algorithm, data)
    server = numbers(states[0].server.variables)
    private = [{name: server[name] for name in PRIVATE}] * 8
    for t, ids in enumerate(hand.COHORTS):
        ends = []
        for k in ids:
            ends.append(work({**server, **private[k]}, *toys.examples(data, k), hand.LR * hand.FALL**t))
            private[k] = {name: ends[-1][name] for name in PRIVATE}
        server = hand.average(ends, np.asarray(data.size)[ids])
        hand.close(numbers(states[t + 1].server.variables), server, atol=2e-5)
    state = states[2]
    for k in range(8):  # 4 and 6 took no part and have their first layers
        mine = fedbn._holding(state.server, hand.row(state.clients.norms, k)).variables
        hand.close(numbers(mine), {**{name: server[name] for name in 'uwb'}, **private[k]}, atol=2e-5)
    x, own = np.asarray(data.x[:9], np.float64), private[7]
    h = (own['scale'] * (x - own['mean']) / np.sqrt(own['var'] + EPS) + own['bias']) * server['u']
    got = algorithm.predict(state.server, hand.row(state.clients, 7), data.x[:9])
    np.testing.assert_allclose(got, h @ server['w'] + server['b'], atol=1e-4)
    assert np.abs(got - algorithm.predict(state.server, None, data.x[:9])).max() > 0.01


@pytest.mark.parametrize(
    ('module', 'count'), [(resnet.ResNet20(norm='batch'), 21), (mobilenet.MobileNetV2(norm='batch'), None)]
)
def test_all_norm_layers_are_private_and_nothing_else(module, count):
    """Those of shortcuts too, which the released code of FedLoGe missed."""
    params, stats = jax.eval_shape(adapter.from_flax(module).init, toys.KEY, jnp.zeros((1, 32, 32, 3)))
    norms = fedbn.norms(fedavg.Variables({'body': params, 'head': heads.dense_init(toys.KEY, 4, 3)}, stats))
    layers_ = len(jax.tree.leaves(stats)) // 2  # a mean and a variance each
    assert count in (None, layers_)
    assert len(norms.affine) == 2 * layers_
    assert {name.split("'")[-2] for name in norms.affine} == {'scale', 'bias'}


def test_models_without_batch_norm_are_refused(data):
    with pytest.raises(ValueError, match='ResNet20'):
        simulate.init(fedbn.algorithm(toys.noisy_task, toys.opt), toys.KEY, data)


def test_a_block_with_the_words_in_its_name_is_no_norm_layer():
    class ConvBatchNorm(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            return nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            return ConvBatchNorm()(x, train)

    params, stats = adapter.from_flax(Net()).init(toys.KEY, jnp.zeros((2, 3)))
    names = fedbn.norms(fedavg.Variables({'body': params, 'head': {}}, stats)).affine
    assert {name.split("'")[-2] for name in names} == {'scale', 'bias'}


def test_layers_without_scale_and_shift_have_statistics_alone(data):
    class Plain(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            x = nn.Dense(4)(x.reshape(len(x), -1))
            return nn.BatchNorm(use_running_average=not train, use_bias=False, use_scale=False)(x)

    task = objective(adapter.from_flax(Plain()), heads.linear(), losses.cross_entropy)
    norms = simulate.init(fedbn.algorithm(task, toys.opt), toys.KEY, data).clients.norms
    assert not norms.affine
    assert jax.tree.leaves(norms.stats)


@pytest.mark.parametrize(
    'algorithm',
    [
        fedrod.algorithm(toys.normed, toys.opt, base=fedbn.algorithm),
        fedloge.algorithm(toys.normed, toys.opt, base=fedbn.algorithm),
        fedrep.algorithm(objective(toys.normed, heads.linear(), losses.cross_entropy), toys.opt, base=fedbn.algorithm),
    ],
)
def test_methods_that_would_not_see_the_layers_of_clients_refuse_it(data, algorithm):
    with pytest.raises(ValueError, match='own BatchNorm: take another base'):
        simulate.init(algorithm, toys.KEY, data)
