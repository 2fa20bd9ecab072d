"""Composition: every algorithm under every head and loss with which it has a meaning, and a clear error elsewhere."""

import functools
import itertools

import chex
import jax
import numpy as np
import pytest
import toys

from fedjax_nc import aggregators, frames, heads, local, losses, privacy, server_optimizers, simulate
from fedjax_nc.algorithms import (
    creff,
    ditto,
    fedavg,
    fedaws,
    fedbabu,
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
    moon,
    ratioloss,
    scaffold,
    solo,
)
from fedjax_nc.base import Variables
from fedjax_nc.data import federate
from fedjax_nc.objective import objective

NARROW = toys.tiny._replace(features=lambda *args: (toys.tiny.features(*args)[0][:, :3], ()))
HALVED = toys.tiny._replace(
    init=lambda key, x: (jax.tree.map(lambda u: u.astype('bfloat16'), toys.tiny.init(key, x)[0]), ())
)
DATA = toys.ragged([24, 1, 40, 15])
EACH_CLASS = federate(np.eye(5, 12, dtype=np.float32), np.arange(5), [[c] for c in range(5)])
PLAN, ROUNDS = local.Plan(batch_size=8, epochs=1), 12
opt = local.sgd(0.03)

HEADS = {
    'linear': heads.linear(),
    'cosine': heads.cosine(scale=5.0),
    'etf': heads.etf(scale=5.0),
    'prototypes': heads.prototypes(scale=5.0),
    'frame': heads.etf(project=False, unit_features=False, learn_scale=False),  # without any parameter
}
LOSSES = {'cross-entropy': losses.cross_entropy, 'balanced softmax': losses.balanced_softmax}


def on_task(make, model=toys.tiny, **settings):
    """An algorithm that is made for an objective, as a function of head and loss."""
    return lambda head, loss, **more: make(objective(model, head, loss), opt, plan=PLAN, **{**settings, **more})


def on_model(make, **settings):
    """One that brings its own loss."""
    return lambda head, loss, **more: make(toys.tiny, opt, head=head, plan=PLAN, **{**settings, **more})


def in_private(algorithm):
    return privacy.private(algorithm, clip=1.0, noise_multiplier=0.01, cohort=4)


def robust(reduce):
    """FedAvg of a model with BatchNorm, whose statistics need the same care."""
    both = dict.fromkeys(('aggregate', 'aggregate_stats'), aggregators.stacked(reduce))
    return on_task(fedavg.algorithm, toys.normed, **both)


TRAINERS = {
    'fedavg': on_task(fedavg.algorithm),
    'fedprox': on_task(fedprox.algorithm, mu=0.1),
    'fedaws': on_task(fedaws.algorithm),
    'fedbabu': on_task(fedbabu.algorithm),
    'feddyn': on_task(feddyn.algorithm, alpha=0.1),
    'moon': on_task(moon.algorithm, mu=0.1),
    'scaffold': on_task(scaffold.algorithm),
    'fednova': on_task(fednova.algorithm),
    'fedmmd': on_task(fedmmd.algorithm),
    'solo': on_task(solo.algorithm),
    'fedper': on_task(fedper.algorithm),
    'fedrep': on_task(fedrep.algorithm, head_epochs=1),
    'fedbn': on_task(fedbn.algorithm, toys.normed),
    'ditto': on_task(ditto.algorithm, personal_opt=local.sgd(0.1, 0.0, 0.0)),
    'fedproto': on_task(fedproto.algorithm),
}
WITH_OWN_LOSS = {
    'fedrs': on_model(fedrs.algorithm),
    'ratio loss': on_model(ratioloss.algorithm, auxiliary=EACH_CLASS),
    'fedrod': on_model(fedrod.algorithm, personal_opt=local.sgd(0.1, 0.0, 0.0)),
    'fedrod from zeros': on_model(fedrod.algorithm, personal=fedrod.linear('zeros')),
}
VARIANTS = {
    'fedavgm': on_task(fedavg.algorithm, server_opt=server_optimizers.fedavgm(0.5, 0.5)),
    'fedadagrad': on_task(fedavg.algorithm, server_opt=server_optimizers.fedadagrad(0.03)),
    'fedadam': on_task(fedavg.algorithm, server_opt=server_optimizers.fedadam(0.03)),
    'fedyogi': on_task(fedavg.algorithm, server_opt=server_optimizers.fedyogi(0.03)),
    'uniform': on_task(fedavg.algorithm, toys.normed, **fedavg.UNWEIGHTED),
    'pooled statistics': on_task(fedavg.algorithm, toys.normed, aggregate_stats=aggregators.pooled_stats()),
    'median': robust(aggregators.coordinate_median),
    'trimmed mean': robust(aggregators.trimmed_mean(0.25)),
    'krum': robust(aggregators.krum(1, select=3)),  # of four clients: fewer are too unlike the rest
    'private': lambda *task: in_private(on_task(fedavg.algorithm)(*task)),
}
ALGORITHMS = {**TRAINERS, **WITH_OWN_LOSS, **VARIANTS}

LEARNED = ('linear', 'cosine')  # heads whose class vectors are parameters
REFUSED = {
    **{(name, 'frame'): 'no parameters to be private' for name in ('fedper', 'fedrep')},
    **{('ratio loss', head): 'watches' for head in HEADS if head not in LEARNED},
    **{('fedrod', head): "use linear\\(start='zeros'\\)" for head in HEADS if head not in LEARNED},
}
NO_SERVER_MODEL = ('solo', 'fedproto')
STAND_STILL = {  # on the server
    **{name: ['head'] for name in ('fedbabu', 'fedper', 'fedrep')},
    **{name: ['body', 'head'] for name in NO_SERVER_MODEL},
}

PAIRS = [pair for pair in itertools.product(ALGORITHMS, HEADS) if pair not in REFUSED]
ROWS = [(*pair, loss) for pair in PAIRS for loss in (['its own'] if pair[0] in WITH_OWN_LOSS else LOSSES)]


def quick(name, head, loss):
    """One row of every other algorithm, heads and losses in turns: the whole table is for those with more time."""
    turn, rows = [*ALGORITHMS].index(name), [row for row in ROWS if row[0] == name]
    return turn % 2 == 0 and (name, head, loss) == rows[3 * turn % len(rows)]


TABLE = [pytest.param(*row, marks=() if quick(*row) else pytest.mark.slow) for row in ROWS]


METHODS = {  # those that take another as their base
    'fedetf': functools.partial(fedetf.algorithm, toys.tiny, opt),
    'fedetf + gmv': functools.partial(fedetf_gmv.algorithm, toys.tiny, opt, warm=1),
    'feduh': functools.partial(feduh.algorithm, toys.tiny, opt),
    'fednh': functools.partial(fednh.algorithm, toys.tiny, opt),
    'fedloge': functools.partial(fedloge.algorithm, toys.tiny, opt, frame=frames.simplex_etf),
    'creff': functools.partial(creff.algorithm, toys.tiny, opt),
    'fedbn': functools.partial(fedbn.algorithm, objective(toys.normed, heads.linear(), losses.cross_entropy), opt),
    **{
        name: functools.partial(ALGORITHMS[name], heads.cosine(), losses.cross_entropy)
        for name in ('fedrs', 'ratio loss', 'fedrod', 'fedaws', 'fedbabu', 'fedper', 'fedrep', 'ditto')
    },
}
BASES = {
    'fedprox': functools.partial(fedprox.algorithm, mu=0.1),
    'scaffold': scaffold.algorithm,
    'fednova': fednova.algorithm,
    'feddyn': feddyn.algorithm,
    'moon': functools.partial(moon.algorithm, mu=0.1),
}
UNFIT = {  # clients take out of a message what stays private, and CReFF's memory lies where others keep theirs
    **{
        (name, base): 'remembers' for name in ('fedper', 'fedloge', 'creff', 'fedbn') for base in ('scaffold', 'feddyn')
    },
    **{(name, 'fednova'): 'sends' for name in ('fedper', 'fedloge', 'fedbn', 'fedrod')},
    ('fedrod', 'scaffold'): 'sends',
}


def build(name, head, loss='cross-entropy', **more):
    return ALGORITHMS[name](HEADS[head], LOSSES.get(loss), **more)


def first(algorithm):
    """The shapes of the first state."""
    return jax.eval_shape(lambda key: simulate.init(algorithm, key, DATA), toys.KEY)


def keeps_structure(algorithm):
    before = first(algorithm)
    after, _ = jax.eval_shape(simulate.make_round(algorithm, chunk=1), toys.KEY, before, DATA)
    return before == after


@pytest.mark.parametrize(('name', 'head'), REFUSED)
def test_heads_without_what_an_algorithm_needs_are_refused(name, head):
    with pytest.raises(ValueError, match=REFUSED[name, head]):
        first(build(name, head))


@pytest.mark.parametrize(('method', 'base'), [pair for pair in itertools.product(METHODS, BASES) if pair not in UNFIT])
def test_every_method_takes_every_base(method, base):
    assert keeps_structure(METHODS[method](base=BASES[base]))


@pytest.mark.parametrize(('method', 'base'), UNFIT)
def test_bases_that_send_or_remember_too_much_are_refused(method, base):
    with pytest.raises(ValueError, match=UNFIT[method, base]):
        keeps_structure(METHODS[method](base=BASES[base]))


@pytest.mark.parametrize(
    ('base', 'personal', 'said'),
    [
        ('feddyn', fedrod.linear(), 'remembers'),
        ('scaffold', fedrod.linear(), 'remembers'),
        ('scaffold', fedrod.hyper(), 'sends'),
        ('fednova', fedrod.hyper(), 'treats all parameters alike'),
    ],
)
def test_heads_trained_beside_the_others_need_a_plain_base(base, personal, said):
    algorithm = fedrod.algorithm(toys.tiny, opt, separate=False, personal=personal, base=BASES[base], plan=PLAN)
    with pytest.raises(ValueError, match=said):
        keeps_structure(algorithm)


@pytest.mark.parametrize('name', [*TRAINERS, *WITH_OWN_LOSS])
def test_every_algorithm_takes_aggregators_and_server_optimizers_and_can_be_private(name):
    how = {'aggregate': aggregators.stacked(aggregators.krum(1)), 'server_opt': server_optimizers.fedyogi()}
    if name in NO_SERVER_MODEL:
        with pytest.raises(TypeError, match='aggregate'):
            build(name, 'cosine', **how)
        return
    if name == 'feddyn':
        with pytest.raises(ValueError, match='plain means'):
            build(name, 'cosine', **how)
        del how['aggregate']
    assert keeps_structure(build(name, 'cosine', **how))
    if name not in ('fedbn', 'fednova'):
        assert keeps_structure(in_private(build(name, 'cosine')))


@pytest.mark.parametrize(
    ('make', 'match'),
    [
        (lambda: on_task(fedbn.algorithm)(heads.linear(), losses.cross_entropy), 'BatchNorm'),
        (lambda: in_private(on_task(fedavg.algorithm, toys.normed)(heads.linear(), losses.cross_entropy)), 'GroupNorm'),
        (lambda: in_private(build('fedbn', 'linear')), 'GroupNorm'),
        (lambda: on_task(fedavg.algorithm, HALVED)(heads.linear(), losses.cross_entropy), 'parameters of bfloat16'),
        (lambda: on_task(fedavg.algorithm, NARROW)(HEADS['frame'], losses.cross_entropy), '3 features are too few'),
    ],
)
def test_models_without_what_a_method_needs_are_refused(make, match):
    with pytest.raises(ValueError, match=match):
        first(make())


def test_creff_has_a_head_of_its_own():
    with pytest.raises(TypeError, match='head'):
        creff.algorithm(toys.tiny, opt, head=heads.etf())


def trained(algorithm):
    """The states before and after some rounds, and their reports: one program, which runs once, hardly optimised."""

    def play(key, data):
        state, round = simulate.init(algorithm, key, data), simulate.make_round(algorithm, chunk=1)
        return state, *simulate.several(round)(jax.random.split(key, ROUNDS), state, data)

    return jax.jit(play)(toys.KEY, DATA)


def models(state):
    """The server's model and those that clients keep, stacked."""
    kept = jax.tree.leaves(state.clients, is_leaf=lambda u: isinstance(u, Variables))
    return [state.server.variables, *(u for u in kept if isinstance(u, Variables))]


@pytest.mark.parametrize(('name', 'head', 'loss'), TABLE)
def test_the_loss_falls_and_what_is_frozen_does_not_move_by_a_bit(name, head, loss):
    before, after, reports = trained(build(name, head, loss))
    chex.assert_tree_all_finite((after, reports))
    chex.assert_trees_all_equal_shapes_and_dtypes(before, after)
    assert reports.loss[-1] < 0.97 * reports.loss[0]
    for old, new in zip(models(before), models(after), strict=True):
        frozen = old.fixed.keys() - {'weights'} if old.fixed else ()  # the ratio loss weighs classes anew each round
        toys.same(*({name: v.fixed[name] for name in frozen} for v in (old, new)))
    for part in STAND_STILL.get(name, ()):
        toys.same(*(s.server.variables.params[part] for s in (before, after)))
