"""Methods on another base than FedAvg: where the base does nothing of its own, neither does the whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from fedjax_nc import frames, heads, local, losses, models, simulate
from fedjax_nc.algorithms import (
    creff,
    ditto,
    fedaws,
    fedbabu,
    feddyn,
    fedetf,
    fedetf_gmv,
    fedloge,
    fedmmd,
    fednh,
    fedper,
    fedprox,
    fedrep,
    fedrod,
    feduh,
    moon,
    ratioloss,
)  # fmt: skip
from fedjax_nc.data import federate
from fedjax_nc.frames import normalize
from fedjax_nc.objective import objective, predict

DATA = toys.ragged([20, 7, 30, 1, 16, 12])
EACH_CLASS = federate(np.eye(5, 12, dtype=np.float32), np.arange(5), [[c] for c in range(5)])
PLAN, FEW = local.Plan(batch_size=8, epochs=1), local.Plan(batch_size=16, epochs=2)


def augmented(x, key):
    return x if key is None else 0.5 * x + 0.3 * jax.random.normal(key, x.shape)


# What batches become, training and evaluation differ in: a method that forgot it would see other examples.
model = models.from_functions(
    lambda key, x: {'w': jax.random.normal(key, (x.shape[-1], 6)) / 3}, lambda p, x: jnp.tanh(x @ p['w']), augmented
)


def task(model):
    return objective(model, heads.cosine(), losses.cross_entropy)


METHODS = {
    'fedetf': functools.partial(fedetf.algorithm, model),
    'gmv': functools.partial(fedetf_gmv.algorithm, model, warm=1, collect=0),
    'gmv, online': functools.partial(fedetf_gmv.algorithm, model, warm=1, collect=0, features='online'),
    'feduh': functools.partial(feduh.algorithm, model),
    'fednh': functools.partial(fednh.algorithm, model, confident=True, augment=True),
    'fedloge': functools.partial(fedloge.algorithm, model, frame=frames.simplex_etf),
    'creff': functools.partial(creff.algorithm, model, samples=4, match_steps=3, retrain=FEW),
    'fedrod': functools.partial(fedrod.algorithm, model),
    'ratio loss': functools.partial(ratioloss.algorithm, model, auxiliary=EACH_CLASS),
    'fedrep': functools.partial(fedrep.algorithm, task(model), head_epochs=2),
    'fedper': functools.partial(fedper.algorithm, task(model)),
    'ditto': functools.partial(ditto.algorithm, task(model)),
    'fedaws': functools.partial(fedaws.algorithm, task(model)),
    'fedbabu': functools.partial(fedbabu.algorithm, task(model)),
}
NEUTRAL = {
    'moon': functools.partial(moon.algorithm, mu=0.0),
    'fedmmd': functools.partial(fedmmd.algorithm, lam=0.0),
    'fedprox': functools.partial(fedprox.algorithm, mu=0.0),
}
QUICK = [('fednh', 'moon')]


def one(clients, k):
    return jax.tree.map(lambda u: u[k], clients)


def rounds(algorithm, n):
    run, state = jax.jit(simulate.make_round(algorithm, chunk=1)), simulate.init(algorithm, toys.KEY, DATA)
    for t in range(n):
        received, (state, report) = state, run(jax.random.fold_in(toys.KEY, t), state, DATA)
    return received, state, report


@functools.cache
def outcome(method, base):
    algorithm = METHODS[method](toys.opt, plan=PLAN, **({'base': NEUTRAL[base]} if base else {}))
    _, state, report = rounds(algorithm, 2)
    clients = [None, *(one(state.clients, k) for k in range(2))]
    return state.server.variables, [algorithm.predict(state.server, k, DATA.x[:9]) for k in clients], report.loss


@pytest.mark.parametrize(
    ('method', 'base'),
    [
        pytest.param(method, base, marks=() if (method, base) in QUICK else pytest.mark.slow)
        for method in METHODS
        for base in NEUTRAL
    ],
)
def test_a_neutral_base_changes_no_number(method, base):
    toys.same(outcome(method, base), outcome(method, None), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('method', ['fednh', 'gmv', 'ratio loss'])
def test_personal_models_of_ditto_have_the_class_vectors_and_memories_that_they_received(method):
    algorithm = METHODS[method](toys.opt, plan=PLAN, base=ditto.algorithm)
    received, state, _ = rounds(algorithm, 3)
    toys.same(one(state.clients.personal.fixed, 2), received.server.variables.fixed)
    if method == 'fednh':
        moved = (
            received.server.variables.fixed['w'] - simulate.init(algorithm, toys.KEY, DATA).server.variables.fixed['w']
        )
        assert np.abs(moved).max() > 1e-3
        mine = objective(model, heads.prototypes(), losses.cross_entropy)
        logits = algorithm.predict(state.server, one(state.clients, 2), DATA.x[:9])
        toys.same(logits, predict(mine, one(state.clients.personal, 2), DATA.x[:9]))


@pytest.mark.slow
@pytest.mark.parametrize('base', [fedper.algorithm, functools.partial(fedrep.algorithm, head_epochs=2)])
def test_confidence_is_that_of_a_head_which_the_client_keeps(base):
    """Against NumPy: means of unit features, weighted by the softmax with the client's own scale."""
    algorithm = fednh.algorithm(toys.tiny, local.sgd(0.2), plan=local.Plan(8, 5), confident=True, base=base, scale=1.0)
    _, state, _ = rounds(algorithm, 3)
    k = 2
    new, message, _ = jax.jit(algorithm.client)(toys.KEY, state.server, one(state.clients, k), DATA.shard(k))
    scale, v = float(new.head['scale']), state.server.variables
    assert abs(scale - float(v.params['head']['scale'])) > 0.5
    x, y = toys.examples(DATA, k)
    body = jax.tree.map(jnp.add, v.params['body'], message.base.delta['body'])
    z = np.asarray(normalize(toys.tiny.features(body, (), jnp.asarray(x, jnp.float32), None, None)[0]), np.float64)
    p = np.exp(scale * z @ np.asarray(v.fixed['w'], np.float64).T)
    p = (p / p.sum(1, keepdims=True))[np.arange(len(y)), y]
    for c in np.unique(y):
        mean = (p[y == c, None] * z[y == c]).sum(0)
        np.testing.assert_allclose(message.prototypes.rows[c], mean / np.linalg.norm(mean), atol=2e-6)


def test_a_base_that_remembers_cannot_leave_the_personal_head_to_a_second_phase():
    dyn = functools.partial(feddyn.algorithm, alpha=0.1)
    algorithm = fedrod.algorithm(toys.tiny, toys.opt, plan=PLAN, personal=fedrod.hyper(), separate=True, base=dyn)
    with pytest.raises(ValueError, match='remembers'):
        simulate.init(algorithm, toys.KEY, DATA)
