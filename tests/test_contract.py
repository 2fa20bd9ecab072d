"""What every algorithm and stage must do, whatever it is: add yours to the list."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from fedjax_nc import aggregators, checkpoints, frames, heads, local, losses, privacy, server_optimizers, simulate
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
NO_GENERIC = ('solo', 'fedproto')  # their servers hold no model
MOVE_FIXED = ('fedetf + gmv', 'fedetf + gmv, online', 'fednh', 'ratio loss')  # a memory, prototypes, weights


@pytest.fixture(params=ALGORITHMS, scope='module')
def algorithm(request):
    return ALGORITHMS[request.param]


def start(algorithm, data):
    # Stages take over from training.
    if algorithm is ALGORITHMS['fedetf personal']:
        trained = simulate.init(ALGORITHMS['fedetf'], toys.KEY, data)
        return simulate.join(algorithm, toys.KEY, trained.server, data.num_clients)
    if algorithm is ALGORITHMS['fedloge realigned']:
        return fedloge.stage_state(simulate.init(ALGORITHMS['fedloge'], toys.KEY, data))
    return simulate.init(algorithm, toys.KEY, data)


COHORT = jnp.array([4, 1, 0, 6, 3])  # an odd number, so that chunks of two are filled up by nobody
ABSENT = np.array([2, 5, 7])
KEYS = jax.vmap(lambda t: jax.random.fold_in(toys.KEY, t))(jnp.arange(2))


class Play:
    """A compiled round that counts its traces, and what two rounds of it made."""

    def __init__(self, algorithm, data, before, chunk):
        self.traces = 0
        inner = simulate.make_round(algorithm, chunk=chunk)

        def counted(*args):
            self.traces += 1
            return inner(*args)

        self.round = jax.jit(counted)
        self.before = before
        self.state, self.report = self(data)

    def __call__(self, data, ids=COHORT):
        state = self.before
        for key in KEYS:
            state, report = self.round(key, state, data, ids)
        return state, report


@pytest.fixture(scope='module')
def play(algorithm, data):
    return Play(algorithm, data, start(algorithm, data), chunk=2)


def test_one_trace_and_the_same_structure_round_after_round(play):
    assert play.traces == 1
    chex.assert_trees_all_equal_shapes_and_dtypes(play.before, play.state)
    assert jax.tree.structure(play.before) == jax.tree.structure(play.state)


def test_chunks_change_nothing(algorithm, data, play):
    """One client at a time, or two side by side with nobody beside the last."""
    other = Play(algorithm, data, play.before, chunk=1)
    # CCVR draws with a factor of the covariance, which amplifies rounding.
    toys.same(other.state, play.state, atol=1e-3 if algorithm is ALGORITHMS['ccvr'] else 5e-5)
    np.testing.assert_allclose(other.report.loss, play.report.loss, atol=1e-5)


def test_junk_in_the_padding_changes_nothing(data, play):
    n = jnp.arange(data.index.shape[1])
    junk = (jnp.arange(data.num_clients)[:, None] * 31 + n * 17) % len(data.y)
    dirty = data._replace(index=jnp.where(n < data.size[:, None], data.index, junk))
    assert (dirty.index != data.index).any()
    toys.same(play(dirty)[0], play.state)


def alone(client, data):
    """A cohort of one client, in the shape that is compiled already."""
    return jnp.full(len(COHORT), data.num_clients).at[1].set(client)


def test_nothing_that_a_client_does_not_own_reaches_it(data, play):
    """Not a bit changes if all rows but its own, labels included, turn into junk: nor for a client that owns none."""
    for client in (1, 5, 2):  # of seven examples, of one, and of none
        own = np.zeros(len(data.y), bool)
        size = 0 if client == 2 else int(data.size[client])
        own[np.asarray(data.index[client, :size])] = True
        clean = data._replace(size=data.size.at[2].set(0), counts=data.counts.at[2].set(0))
        junk = jnp.resize(jnp.array([jnp.nan, 3e38, -jnp.inf]), data.x.shape)
        x = jnp.where(jnp.asarray(own)[:, None], data.x, junk)
        dirty = clean._replace(x=x, y=jnp.where(jnp.asarray(own), data.y, 10**6))
        ids = alone(client, data)
        states = [play(d, ids) for d in (clean, dirty)]
        toys.same(states[0], states[1])
        chex.assert_tree_all_finite(states[1][0])


def test_everything_stays_finite(play):
    chex.assert_tree_all_finite((play.state, play.report.info))
    assert bool(play.report.finite)


def test_the_absent_keep_their_state_bit_for_bit(play):
    toys.same(*(jax.tree.map(lambda u: u[ABSENT], s.clients) for s in (play.before, play.state)))
    assert sorted(np.asarray(play.report.ids)) == [0, 1, 3, 4, 6, 8]  # 8 is nobody


def test_randomness_does_not_depend_on_who_else_takes_part(data, play):
    """Client 6 does the same in other company and another lane."""
    for ids in (jnp.array([6, 2, 5, 7, 1]), jnp.array([5, 4, 3, 0, 6])):
        first, other = (play.round(toys.KEY, play.before, data, cohort)[1] for cohort in (COHORT, ids))
        losses = [float(r.info.loss[np.flatnonzero(np.asarray(r.ids) == 6)[0]]) for r in (first, other)]
        np.testing.assert_allclose(*losses, atol=1e-6)


@pytest.mark.parametrize('algorithm', ['fedavg, noise and statistics', 'fednh', 'fedetf personal'], indirect=True)
def test_several_rounds_in_one_call_are_the_same_rounds(algorithm, data, play):
    inner = simulate.make_round(algorithm, chunk=2)
    together = jax.jit(simulate.several(lambda key, state, data: inner(key, state, data, COHORT)))
    state, reports = together(KEYS, play.before, data)
    toys.same(state, play.state, atol=2e-5)
    assert reports.loss.shape == (2,)


def test_resumed_from_a_checkpoint_it_goes_on_bit_for_bit(data, play, tmp_path):
    files = checkpoints.Files(tmp_path)
    files.save(1, play.round(KEYS[0], play.before, data, COHORT)[0], toys.KEY, [{'round': 1.0}])
    _, restored = files.restore(play.before, toys.KEY)
    toys.same(play.round(KEYS[1], restored, data, COHORT)[0], play.state)


def test_a_round_of_nobody_moves_no_parameter(data, play):
    none = data._replace(size=jnp.zeros_like(data.size), counts=jnp.zeros_like(data.counts))
    after, _ = play.round(toys.KEY, play.state, none, COHORT)
    for part in ('params', 'stats'):
        toys.same(*(getattr(s.server.variables, part) for s in (play.state, after)))
    toys.same(*(getattr(s.server, 'opt', ()) for s in (play.state, after)))
    chex.assert_tree_all_finite(after)


def test_predicts_logits_of_every_class(request, algorithm, data, play):
    def logits(client):
        return jax.eval_shape(algorithm.predict, play.state.server, client, data.x[:3]).shape

    if request.node.callspec.params['algorithm'] in NO_GENERIC:
        with pytest.raises(ValueError, match='no generic model'):
            logits(None)
    else:
        assert logits(None) == (3, toys.CLASSES)
    assert logits(jax.tree.map(lambda u: u[0], play.state.clients)) == (3, toys.CLASSES)


def test_fixed_parts_never_move(request, play):
    before, after = (s.server.variables.fixed for s in (play.before, play.state))
    if request.node.callspec.params['algorithm'] in MOVE_FIXED:
        before, after = (f.get('head', ()) for f in (before, after))
    toys.same(before, after)


PUBLISHED = {  # what a paper or its released code takes, where the factory does not ask for it
    (ditto.algorithm, 'lam'): 0.75,
    (ditto.algorithm, 'clip'): 10.0,
    (fedproto.algorithm, 'lam'): 0.1,
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
