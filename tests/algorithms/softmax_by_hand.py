"""Softmax regression on features `h = x * u`, with its gradients written by hand and the descent of the baselines.

    logits = h W + b + prior,  q = (softmax - onehot) / n;  d W = h^T q;  d b = sum q;  d h = q W^T;  d u = sum d h * x

A batch holds a client's whole data, so that each epoch is one step: the gradient is scaled down to the norm CLIP over
what moves, then decay is added, then momentum.
"""

import jax
import jax.numpy as jnp
import numpy as np
import toys

from fedjax_nc import heads, local, losses, simulate
from fedjax_nc.objective import objective

LR, MOMENTUM, DECAY, CLIP, FALL, EPOCHS = 0.3, 0.9, 0.01, 0.4, 0.9, 3
PLAN = local.Plan(1000, EPOCHS)
opt = local.sgd(LR, MOMENTUM, DECAY, decay=FALL, clip=CLIP)
plain = local.sgd(LR, 0.0, 0.0, decay=FALL)
task = objective(toys.scaling, heads.linear(), losses.cross_entropy)
COHORTS = ([0, 2, 5, 7], [7, 1, 2, 3])  # two rounds: some clients take part once, some twice, some never


def softmax(logits):
    e = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def errors(logits, y):
    """`(softmax - onehot) / n`, the gradient of the mean cross-entropy by the logits."""
    return (softmax(logits) - np.eye(logits.shape[-1])[y]) / len(y)


def loss(p, x, y):
    return -np.log(softmax(x * p['u'] @ p['w'] + p['b'])[np.arange(len(y)), y]).mean()


def gradients(p, x, y, prior=0.0, on_features=0.0):
    """Gradients of the mean cross-entropy; `on_features` is the gradient by h of whatever else is in the loss."""
    h = x * p['u']
    q = errors(h @ p['w'] + p.get('b', 0.0) + prior, y)
    d_h = q @ p['w'].T + on_features
    return {'u': (d_h * x).sum(0), 'w': h.T @ q, 'b': q.sum(0)}


def descend(p, moving, gradient, rate, *, momentum=MOMENTUM, decay=DECAY, clip=CLIP, pull=None, epochs=EPOCHS):
    """Steps along `gradient(p)` of what moves; `pull(p)` is added to it after clipping."""
    p, m = dict(p), dict.fromkeys(moving, 0.0)
    for _ in range(epochs):
        g = gradient(p)
        shrink = min(1.0, clip / np.sqrt(sum((g[name] ** 2).sum() for name in moving)))
        away = pull(p) if pull else dict.fromkeys(moving, 0.0)
        for name in moving:
            m[name] = momentum * m[name] + shrink * g[name] + away[name] + decay * p[name]
        p.update({name: p[name] - rate * m[name] for name in moving})
    return p


def average(ends, weights=None):
    return {name: np.average([end[name] for end in ends], axis=0, weights=weights) for name in ends[0]}


def numbers(v):
    """The numbers of Variables as float64 arrays; of all clients where they are stacked."""
    values = {'u': v.params['body']['u'], **v.params['head']}
    return {name: np.asarray(value, np.float64) for name, value in values.items()}


def two_rounds(algorithm, data, cohorts=COHORTS, jit=jax.jit):
    """The states before, between and after."""
    run = jit(simulate.make_round(algorithm, chunk=1))
    states = [simulate.init(algorithm, toys.KEY, data)]
    for t, ids in enumerate(cohorts):
        states.append(run(jax.random.fold_in(toys.KEY, t), states[-1], data, jnp.asarray(ids))[0])
    return states


def row(tree, k):
    return jax.tree.map(lambda u: u[k], tree)


def close(got, want, atol=5e-6):
    assert set(want) <= set(got)
    for name in want:
        np.testing.assert_allclose(got[name], want[name], atol=atol, err_msg=name)
