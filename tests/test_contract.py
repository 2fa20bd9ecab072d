"""What every algorithm and stage must do, whatever it is: add yours to the list."""

import functools
import inspect

import jax.numpy as jnp
import numpy as np
import pytest
import toys

from fedjax_nc import aggregators, frames, heads, local, losses, privacy, server_optimizers, simulate, testing
from fedjax_nc.algorithms import (
    ccvr,
    creff,
    ditto,
    fedavg,
    fedaws,
    fedbn,
    feddyn,
    fedetf,
    fedetf_gmv,
    fedloge,
    fedmmd,
    fednh,
    fednova,
    fedper,
    fedproto,
    fedprox,
    fedrep,
    fedrod,
    fedrs,
    feduh,
    finetune,
    latest,
    moon,
    ratioloss,
    scaffold,
    solo,
)
from fedjax_nc.data import federate
from fedjax_nc.objective import objective

normed = objective(toys.normed, heads.linear(), losses.cross_entropy)

ALGORITHMS = {
    'fedavg': fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN),
    'fedavg, noise and statistics': fedavg.algorithm(toys.noisy_task, toys.opt, plan=toys.PLAN),
    'fedavg, momentum kept': fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN, persist_momentum=True),
    'fedavg, body only': fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN, parts=('body',)),
    'fedprox': fedprox.algorithm(toys.task, toys.opt, mu=0.1, plan=toys.PLAN),
    'fedetf': fedetf.algorithm(toys.tiny, toys.opt, plan=toys.PLAN),
    'fedprox + etf': fedetf.algorithm(toys.tiny, toys.opt, plan=toys.PLAN, base=fedprox.algorithm, mu=0.1),
    'fedetf + gmv': fedetf_gmv.algorithm(toys.tiny, toys.opt, warm=1, plan=toys.PLAN),
    'fedetf + gmv, online': fedetf_gmv.algorithm(toys.noisy, toys.opt, warm=1, features='online', plan=toys.PLAN),
    'feduh': feduh.algorithm(toys.tiny, toys.opt, plan=toys.PLAN),
    'fednh': latest.keep(fednh.algorithm(toys.tiny, toys.opt, plan=toys.PLAN)),
    'fedloge': fedloge.algorithm(
        toys.tiny, toys.opt, plan=toys.PLAN, frame=functools.partial(frames.sparse_etf, solver='gram', steps=50)
    ),
    'fedloge realigned': fedloge.realign(toys.tiny, toys.opt, plan=toys.PLAN, finetune_epochs=1),
    'ccvr': ccvr.calibrate(toys.task, samples=20, plan=local.Plan(32, 2)),
    'scaffold': scaffold.algorithm(toys.noisy_task, toys.opt, plan=toys.PLAN),
    'scaffold, option I, by examples': scaffold.algorithm(
        toys.noisy_task, toys.opt, plan=toys.PLAN, option='I', aggregate=aggregators.mean, clip=1.0
    ),
    'fednova, anchored': fednova.algorithm(toys.task, toys.opt, plan=toys.PLAN, mu=0.1),
    'feddyn': feddyn.algorithm(toys.noisy_task, toys.opt, plan=toys.PLAN, alpha=0.1, by_examples=True),
    'fedyogi': fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN, server_opt=server_optimizers.fedyogi(1e-2)),
    'solo': solo.algorithm(toys.task, toys.opt, plan=toys.PLAN),
    'fedper': latest.keep(fedper.algorithm(toys.noisy_task, toys.opt, plan=toys.PLAN)),
    'fedrep': fedrep.algorithm(toys.noisy_task, toys.opt, head_epochs=1, plan=toys.PLAN),
    'fedbn': fedbn.algorithm(normed, toys.opt, plan=toys.PLAN),
    'ditto': ditto.algorithm(toys.noisy_task, toys.opt, plan=toys.PLAN),
    'fedrod': fedrod.algorithm(toys.noisy, toys.opt, plan=toys.PLAN),
    'fedrod, joint network': fedrod.algorithm(
        toys.tiny, toys.opt, separate=False, personal=fedrod.hyper(), plan=toys.PLAN
    ),
    'fedproto': fedproto.algorithm(toys.noisy_task, toys.opt, plan=toys.PLAN),
    'creff': creff.algorithm(
        toys.noisy, toys.opt, samples=4, match_steps=3, retrain=local.Plan(16, 2), draw=8, plan=toys.PLAN
    ),
    'moon': moon.algorithm(
        objective(moon.projected(toys.noisy, 8), heads.linear(), losses.cross_entropy),
        toys.opt,
        mu=1.0,
        plan=toys.PLAN,
        persist_momentum=True,
    ),
    'fedrs': fedrs.algorithm(toys.tiny, toys.opt, soft=True, plan=toys.PLAN),
    'fedaws': fedaws.algorithm(toys.task, toys.opt, plan=toys.PLAN),
    'fedmmd': fedmmd.algorithm(toys.noisy_task, toys.opt, lam=1.0, plan=toys.PLAN),
    'ratio loss': ratioloss.algorithm(
        toys.tiny,
        toys.opt,
        auxiliary=federate(np.eye(5, 12, dtype=np.float32), np.arange(5), [[c] for c in range(5)]),
        plan=toys.PLAN,
    ),
    'fedavg, private': privacy.private(  # with noise, a round of nobody moves the model: here without
        fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN), clip=1.0, noise_multiplier=0.0, cohort=5
    ),
    'fedavg, krum': fedavg.algorithm(
        toys.task, toys.opt, plan=toys.PLAN, aggregate=aggregators.stacked(aggregators.krum(1, 2))
    ),
    'finetune': finetune.algorithm(toys.task, toys.opt, plan=toys.PLAN),
    'fedetf personal': fedetf.personalize(toys.tiny, toys.opt, plan=toys.PLAN, cycles=2),
}
OPTIONS = {
    'solo': {'generic': False},  # their servers hold no model
    'fedproto': {'generic': False},
    'fedetf + gmv': {'moves_fixed': ['memory']},
    'fedetf + gmv, online': {'moves_fixed': ['memory']},
    'fednh': {'moves_fixed': ['w']},  # the prototypes
    'ratio loss': {'moves_fixed': ['weights']},
    'ccvr': {'atol': 1e-3},  # it draws with a factor of the covariance, which amplifies rounding
}


QUICK = (  # the others are for those with more time
    'fedavg',
    'fedavg, noise and statistics',
    'scaffold',
    'fedetf',
    'fedetf personal',
    'fedetf + gmv, online',
    'fedloge',
    'ccvr',
    'fednh',
    'fedbn',
    'ditto',
    'fedproto',
    'fedavg, private',
)


@pytest.fixture(
    params=[pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ALGORITHMS],
    scope='module',
)
def name(request):
    return request.param


def start(name, data):
    """Stages take over from training; all else begins by itself."""
    if name == 'fedetf personal':
        trained = simulate.init(ALGORITHMS['fedetf'], toys.KEY, data)
        return simulate.join(ALGORITHMS[name], toys.KEY, trained.server, data.num_clients)
    if name == 'fedloge realigned':
        return fedloge.stage_state(simulate.init(ALGORITHMS['fedloge'], toys.KEY, data))
    return None


@pytest.fixture(scope='module')
def play(name, data):
    return testing.Play(ALGORITHMS[name], data, state=start(name, data), **OPTIONS.get(name, {}))


@pytest.mark.parametrize('clause', [clause for clause in testing.CLAUSES if clause != 'several'])
def test_keeps_the_contract(play, clause):
    assert not testing.CLAUSES[clause](play)


@pytest.mark.parametrize('name', ['fedavg, noise and statistics', 'fednh', 'fedetf personal'], indirect=True)
def test_several_rounds_in_one_call_are_the_same_rounds(play):
    assert not testing.several(play)


@pytest.mark.parametrize('name', ['solo', 'fedproto'])
def test_without_a_generic_model_it_says_so(name, data):
    algorithm = ALGORITHMS[name]
    with pytest.raises(ValueError, match='no generic model'):
        algorithm.predict(simulate.init(algorithm, toys.KEY, data).server, None, data.x[:3])


PUBLISHED = {  # what a paper or its released code takes, where the factory does not ask for it
    (ditto.algorithm, 'lam'): 0.75,
    (ditto.algorithm, 'clip'): 10.0,
    (fedproto.algorithm, 'lam'): 0.1,
    (fedproto.algorithm, 'weigh'): 'holders',
    (fedetf.alternate, 'cycles'): 20,
    (ccvr.refit, 'plan'): local.Plan(64, 50),
    (losses.dot_regression, 'target'): 1.0,
    (losses.restricted_softmax, 'alpha'): 0.5,
    (fedrep.algorithm, 'head_epochs'): 10,
    (creff.algorithm, 'samples'): 100,
    (creff.algorithm, 'match_steps'): 100,
    (creff.algorithm, 'match_lr'): 0.01,
    (creff.algorithm, 'draw'): 64,
    (creff.algorithm, 'repeats'): 10,
    (feddyn.algorithm, 'alpha'): 0.01,
    (fedmmd.algorithm, 'lam'): 0.01,
    (fedrs.algorithm, 'alpha'): 0.5,
    (fedaws.algorithm, 'margin'): 0.8,
    (fedaws.algorithm, 'steps'): 30,
    (moon.algorithm, 'temperature'): 0.5,
    (ratioloss.algorithm, 'beta'): 0.1,
    (scaffold.algorithm, 'option'): 'II',
    (server_optimizers.fedavgm, 'lr'): 0.1,
    (server_optimizers.fedavgm, 'beta'): 0.9,
    (server_optimizers.fedyogi, 'b1'): 0.9,
    (server_optimizers.fedyogi, 'b2'): 0.99,
    (server_optimizers.fedadagrad, 'tau'): 1e-3,
}


@pytest.mark.parametrize(('factory', 'name'), PUBLISHED, ids=lambda u: u if isinstance(u, str) else u.__module__)
def test_defaults_are_the_published_ones(factory, name):
    assert inspect.signature(factory).parameters[name].default == PUBLISHED[factory, name]


@pytest.mark.parametrize('factory', [ditto.algorithm, fedrod.algorithm])
def test_personal_parts_take_plain_steps_of_the_falling_rate(factory):
    opt = inspect.signature(factory).parameters['personal_opt'].default(jnp.int32(2))
    params = {'w': jnp.full(3, 50.0)}
    state = opt.init(params)
    for _ in range(2):  # neither momentum nor decay nor clipping
        update, state = opt.update({'w': jnp.full(3, 7.0)}, state, params)
        np.testing.assert_allclose(update['w'], -0.01 * 0.99**2 * 7.0, rtol=1e-6)
