import json
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

from fedjax_nc import evaluate, local, losses, simulate
from fedjax_nc.algorithms import fedavg, feddyn, fedetf
from fedjax_nc.base import Model
from fedjax_nc.data import dirichlet, federate, load_dataset
from fedjax_nc.experiments import recipes
from fedjax_nc.models import MLP, from_flax, layers
from fedjax_nc.objective import predict


def normed_features(params, stats, x, mask, key):
    z = x * params['BatchNorm_0']['scale']
    return z, stats if key is None else {'mean': 0.9 * stats['mean'] + 0.1 * jnp.mean(x)}


normed = Model(
    lambda key, x: ({'BatchNorm_0': {'scale': jnp.ones(x.shape[-1])}}, {'mean': jnp.float32(0)}), normed_features
)
ROUNDS = 8


class Batched(nn.Module):
    """One layer with BatchNorm."""

    @nn.compact
    def __call__(self, x, mask=None, train=False):
        return nn.relu(layers.BatchNorm(not train)(nn.Dense(32)(x.reshape(len(x), -1)), mask))


def of(name, data, **kwargs):
    held = recipes.auxiliary(data.x, data.y, toys.CLASSES, each=4) if name == 'ratioloss' else None
    model = normed if name == 'fedbn' else toys.tiny
    kwargs = {'dim': 6, 'scale': 2.0, 'rounds': 3, **kwargs}
    return recipes.RECIPES[name](model, toys.opt, toys.PLAN, auxiliary=held, **kwargs)


def finished(recipe, state, data, run=simulate.make_round):
    """What a trained state becomes."""
    if recipe.calibrate is not None:
        begun = simulate.join(recipe.calibrate, toys.KEY, state.server, data.num_clients)
        state, _ = run(recipe.calibrate)(toys.KEY, begun, data)
    if recipe.personalize is None:
        return state
    return run(recipe.personalize)(toys.KEY, recipe.enter(recipe.personalize, toys.KEY, state, data), data)[0]


def fits(recipe, data):
    """Traces a recipe from the first state to predictions, without computing anything."""

    def everything(data):
        state = simulate.init(recipe.train, toys.KEY, data)
        state, _ = simulate.make_round(recipe.train)(toys.KEY, state, data)
        state = finished(recipe, state, data)
        client = jax.tree.map(lambda u: u[0], state.clients)
        generic = [recipe.general.predict(state.server, None, data.x[:3])] if recipe.generic else []
        return [recipe.final.predict(state.server, client, data.x[:3]), *generic]

    assert {u.shape for u in jax.eval_shape(everything, data)} == {(3, toys.CLASSES)}


@pytest.fixture(scope='module')
def digits():
    """Real handwritten digits and their eight clients."""
    digits = load_dataset('digits')
    parts = dirichlet(digits.y_train, 8, 0.5, seed=0)
    return digits, federate(digits.x_train, digits.y_train, parts)


QUICK = ('fedavg', 'fedetf')  # the others are for those with more time


@pytest.mark.parametrize(
    'name', [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in recipes.RECIPES]
)
def test_every_method_learns_digits_and_makes_personal_models(digits, name):
    """A few rounds of five unequal clients each; personal models are good at home."""
    everyone, data = digits
    held = recipes.auxiliary(everyone.x_train, everyone.y_train, 10, each=8)
    body = Batched() if name == 'fedbn' else MLP((32,))
    recipe = recipes.RECIPES[name](
        from_flax(body), local.sgd(0.05, clip=10.0), local.Plan(32, 2), scale=4.0, rounds=ROUNDS, auxiliary=held
    )

    def play(key, data):
        state = simulate.init(recipe.train, key, data)
        rounds = simulate.several(simulate.make_round(recipe.train, cohort=5))
        return rounds(jax.random.split(key, ROUNDS), state, data)

    def accuracy(personal):
        algorithm = recipe.final if personal else recipe.general
        return float(evaluate.over_clients(evaluate.per_client(algorithm, own, data, personal=personal)).mean)

    state, reports = jax.jit(play)(toys.KEY, data)
    own = finished(recipe, state, data, lambda stage: jax.jit(simulate.make_round(stage)))
    assert reports.finite.all()
    assert reports.loss[-1] < 0.8 * reports.loss[0]
    assert accuracy(True) > 0.85
    if not recipe.generic:
        with pytest.raises(ValueError, match='no generic model'):
            accuracy(False)
    elif name in ('fedper', 'fedrep'):  # the head of their generic model is the first one
        assert accuracy(False) < accuracy(True) - 0.2
    else:
        table = evaluate.generic(recipe.general, own, everyone.x_test, everyone.y_test, 10)
        assert evaluate.accuracy(table) > 0.6
        assert accuracy(True) > accuracy(False) - 0.03


def test_heads_and_losses_compose(data):
    for head in recipes.HEADS:
        fits(of('fedavg', data, head=head), data)
    for loss in recipes.LOSSES:
        fits(of('fedprox', data, head='cosine', loss=loss), data)
    fits(of('fedrod', data, head='etf'), data)


def test_fedavg_with_the_etf_and_its_loss_is_fedetf(data):
    ours = of('fedavg', data, head='etf', loss='balanced_softmax')
    theirs = fedetf.algorithm(toys.tiny, toys.opt, dim=6, scale=2.0, plan=toys.PLAN)
    programs = []
    for algorithm in (ours.train, theirs):
        state = jax.eval_shape(lambda data, a=algorithm: simulate.init(a, toys.KEY, data), data)
        program = jax.make_jaxpr(simulate.make_round(algorithm))(toys.KEY, state, data)
        programs.append(re.sub('0x[0-9a-f]+', '', str(program)))
    assert programs[0] == programs[1]


def test_losses_of_cosines_meet_cosines(data):
    """Their targets, 0.9 and 1, are cosines: a temperature would move them."""
    for head in recipes.OF_COSINES['heads']:
        recipe = of('fedavg', data, head=head, loss='positive', scale=30.0, dim=32)  # room for a sparse frame
        v = recipe.train.init(toys.KEY, data).variables
        assert 'scale' not in v.params['head']
        logits = recipe.train.predict(fedavg.Server(v, (), jnp.int32(0)), None, data.x[:50])
        assert 0.1 < float(jnp.max(jnp.abs(logits))) <= 1 + 1e-6


@pytest.mark.parametrize(
    ('name', 'choice', 'said'),
    [
        ('fedetf', {'head': 'linear'}, "fedetf has no head 'linear', it takes etf"),
        ('fednh', {'loss': 'balanced_softmax'}, "fednh has no loss 'balanced_softmax', it takes cross_entropy"),
        ('fedaws', {'head': 'etf'}, 'takes linear or unbiased or unit_norm or cosine'),
        ('fedavg', {'head': 'conv'}, "no head 'conv', it takes linear or unbiased"),
        ('fedper', {'loss': 'positive'}, "'positive' is one of cosines: with it fedper takes cosine or etf"),
        ('solo', {'server_opt': optax.sgd(1.0)}, 'solo has no server model to optimize; these have one: fedavg, '),
    ],
)
def test_what_does_not_go_together_lists_what_does(data, name, choice, said):
    with pytest.raises(ValueError, match=said):
        of(name, data, **choice)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('name', 'own'),
    [('fedavg', 'examples'), ('scaffold', 'alike'), ('feddyn', 'alike'), ('fedper', 'alike'), ('fedproto', 'alike')],
)
def test_clients_are_weighed_as_asked_and_else_as_published(data, name, own):
    ids, found = jnp.array([0, 1, 4]), {}  # of 100, 7 and 200 examples
    for weigh in ('examples', 'alike', 'published'):
        train = of(name, data, weigh=weigh).train
        state = simulate.init(train, toys.KEY, data)
        found[weigh] = jax.jit(simulate.make_round(train, chunk=1))(toys.KEY, state, data, ids)[0].server
    toys.same(found['published'], found[own])
    one, other = (dict(jax.tree_util.tree_leaves_with_path(found[w])) for w in ('examples', 'alike'))
    common = one.keys() & other.keys()  # FedDyn's state has the number of examples only if they weigh
    gaps = [np.abs(np.subtract(one[k], other[k], dtype=np.float64)).max() for k in common]
    assert max(gaps) > 1e-3
    with pytest.raises(ValueError, match="'examples' or 'alike', or as 'published', not by 'size'"):
        of(name, data, weigh='size')


def test_personal_parts_have_an_optimizer_of_their_own(data):
    """With a rate of zero they stay, and the rest trains."""
    for name in ('ditto', 'fedrod'):
        train = of(name, data, personal_opt=local.sgd(0.0)).train
        state = simulate.init(train, toys.KEY, data)
        after, _ = jax.jit(simulate.make_round(train, chunk=1))(toys.KEY, state, data)
        if name == 'ditto':
            toys.same(after.clients.personal, state.clients.personal)
        else:
            toys.same(after.clients.own.head, state.clients.own.head)
        assert (
            np.abs(after.server.variables.params['body']['w'] - state.server.variables.params['body']['w']).max() > 0.01
        )


def test_models_are_made_personal_by_the_restriction_that_trained_them(data):
    """With a factor of 1 FedRS is FedAvg, personal models included; another has others."""
    found = {}
    for name, options in (('fedavg', {}), ('fedrs', {'alpha': 1.0}), ('fedrs', {'alpha': 0.1})):
        recipe = of(name, data, head='unbiased', options=options)
        state = simulate.init(recipe.train, toys.KEY, data)
        found[options.get('alpha')] = finished(recipe, state, data, lambda s: jax.jit(simulate.make_round(s, chunk=1)))
    plain, same, other = (found[alpha].clients.params['head']['w'] for alpha in (None, 1.0, 0.1))
    np.testing.assert_allclose(same, plain, atol=1e-6)
    assert np.abs(other - plain).max() > 1e-3


def test_features_that_are_summed_in_training_go_with_running_statistics(data):
    recipe = recipes.RECIPES['fedetf_gmv'](toys.normed, toys.opt, toys.PLAN, rounds=3, options={'features': 'online'})
    fits(recipe, data)


def test_private_heads_have_a_bias_if_the_generic_head_has():
    clients = toys.ragged((7, 5, 4))
    for head, names in (('unbiased', {'w'}), ('linear', {'w', 'b'}), ('etf', {'w'})):
        state = simulate.init(of('fedrod', clients, head=head).train, toys.KEY, clients)
        assert set(state.clients.own.head) == names
    generic = simulate.init(of('fedrod', clients, head='linear').train, toys.KEY, clients).server.variables.params
    toys.same(generic['personal'], generic['head'])


def test_views_predict_otherwise_from_the_same_state(data):
    dyn, proto = of('feddyn', data), of('fedproto', data)
    state, _ = simulate.make_round(dyn.train, cohort=3)(toys.KEY, simulate.init(dyn.train, toys.KEY, data), data)
    x = data.x[:20]
    mean = dyn.train.predict(feddyn.averaged(state.server), None, x)
    np.testing.assert_array_equal(dyn.views['averaged'].predict(state.server, None, x), mean)
    assert np.abs(mean - dyn.train.predict(state.server, None, x)).max() > 1e-3
    assert not of('feddyn', data, server_opt=optax.sgd(0.5)).views  # whose model is not the mean and a correction
    state = simulate.init(proto.train, toys.KEY, data)
    mine = jax.tree.map(lambda u: u[0], state.clients)
    np.testing.assert_array_equal(proto.views['head'].predict(state.server, mine, x), predict(toys.task, mine, x))


def test_ratio_loss_needs_examples_on_the_server():
    with pytest.raises(ValueError, match='on the server: pass auxiliary'):
        recipes.RECIPES['ratioloss'](toys.tiny, toys.opt, toys.PLAN)


def test_auxiliary_examples_are_the_first_of_each_class():
    y = np.array([1, 0, 1, 2, 1, 0, 2, 2])
    held = recipes.auxiliary(np.arange(8), y, 3, each=2)
    np.testing.assert_array_equal(held.counts, 2 * np.eye(3))
    taken = [np.asarray(held.x)[np.asarray(held.index[c, : held.size[c]])].tolist() for c in range(3)]
    assert taken == [[1, 5], [0, 2], [3, 6]]


def test_server_optimizers_start_at_their_rates():
    """The first step along a pseudo-gradient of 0.5; adaptive ones have v = tau^2 and no correction of bias."""
    steps = {}
    for name, make in recipes.SERVER_OPTIMIZERS.items():
        for rate in ({}, {'lr': 0.4}):
            opt, theta = make(**rate), jnp.float32(0)
            update, _ = opt.update(jnp.float32(0.5), opt.init(theta), theta)
            steps[name, bool(rate)] = -float(update)
    tau, d = 1e-3, 0.5
    adam = 0.1 * d / (np.sqrt(0.99 * tau**2 + 0.01 * d**2) + tau)
    yogi = 0.1 * d / (np.sqrt(tau**2 + 0.01 * d**2) + tau)
    adagrad = d / (np.sqrt(tau**2 + d**2) + tau)
    by_hand = {'sgd': (1.0, d), 'fedavgm': (0.1, d), 'fedadagrad': (0.01, adagrad),
               'fedadam': (0.01, adam), 'fedyogi': (0.01, yogi)}  # fmt: skip
    assert set(by_hand) == set(recipes.SERVER_OPTIMIZERS)
    for name, (rate, length) in by_hand.items():
        np.testing.assert_allclose(steps[name, False], rate * length, rtol=1e-5)
        np.testing.assert_allclose(steps[name, True], 0.4 * length, rtol=1e-5)


def test_every_loss_has_its_name():
    assert all(getattr(losses, name) is loss for name, loss in recipes.LOSSES.items())


def test_recipes_tell_what_their_methods_were_made_with():
    """Defaults included, as plain data; what is chosen comes before them."""
    clients = toys.ragged((7, 5, 4))
    for name in recipes.RECIPES:
        told = of(name, clients).told
        assert json.loads(json.dumps(told)) == told
        assert 'null' not in json.dumps(told)
        assert not {'plan', 'server_opt', 'head'} & set(told)
    expected = {
        'fedprox': {'mu': 0.001, 'anchored': 'none'},
        'moon': {'mu': 1.0, 'temperature': 0.5, 'project': True},
        'fednh': {'rho': 0.9, 'scale': 2.0, 'init': 'uniform', 'learn_scale': True},
        'fedetf': {'dim': 6, 'scale': 2.0, 'gamma': 1.0},
        'fedetf_gmv': {'warm': 2, 'alpha': 0.1, 'scale': 1.0},
        'fedloge': {'frame': 'sparse_etf', 'aux_bias': False},
        'ccvr': {'base': 'fedavg', 'samples': 100, 'transform': 'tukey(power=0.5, shift=0.0)'},
        'scaffold': {'option': 'II', 'aggregate': 'uniform'},
        'fedbabu': {'base': 'fedavg', 'aggregate': 'uniform', 'persist_momentum': False},
        'fedper': {'base': 'fedavg', 'aggregate_stats': 'uniform'},
        'fedaws': {'margin': 0.8, 'steps': 30},
        'creff': {'retrain': {'batch_size': 64, 'epochs': 300, 'tails': [], 'narrower': []}},
    }
    for name, said in expected.items():
        assert said.items() <= of(name, clients).told.items(), name
    chosen = {
        'fedprox': {'mu': 0.5},
        'fednh': {'rho': 0.8, 'init': 'orthogonal'},
        'fedetf_gmv': {'scale': 1.6, 'warm': 1},
        'fedloge': {'frame': 'sparse_xavier'},
        'fedrod': {'personal': 'hyper'},
    }
    for name, options in chosen.items():
        told = of(name, clients, options=options).told
        assert {k: v for k, v in options.items() if k not in ('init', 'frame', 'personal')}.items() <= told.items()
    assert 'orthogonal' in of('fednh', clients, options=chosen['fednh']).told['init']
    assert of('fedloge', clients, options=chosen['fedloge']).told['frame'] == 'sparse_xavier'
    assert 'scale' not in of('fedetf_gmv', clients, head='unbiased').told
    assert of('fedetf', clients, dim=None).told['dim'] == 'number of classes'
    assert of('fednh', clients, personal='latest').told['rho'] == 0.9


def test_frames_of_fedloge_may_be_longer_and_features_projected():
    clients = toys.ragged((7, 5, 4))
    for options, length, names in (({}, 1.0, None), ({'length': 1.6}, 1.6, None), ({'project': True}, 1.0, True)):
        recipe = of('fedloge', clients, options=options)
        variables = simulate.init(recipe.train, toys.KEY, clients).server.variables
        (frame,) = (np.asarray(u) for u in jax.tree.leaves(variables.fixed) if u.shape[-1:] == (toys.CLASSES,))
        np.testing.assert_allclose(np.linalg.norm(frame, axis=0), length, rtol=1e-3)
        assert (set(variables.params['body']) == {'model', 'second'}) == bool(names)
        fits(recipe, clients)
    for options, said in (({'length': 0.0}, 'length must be positive'), ({'project': 'no'}, 'true or false')):
        with pytest.raises(ValueError, match=said):
            of('fedloge', clients, options=options)


def test_without_virtual_features_personal_models_begin_with_the_model_that_was_trained(data):
    recipe = of('ccvr', data, options={'samples': 0})
    state = simulate.init(recipe.train, toys.KEY, data)
    begun = simulate.join(recipe.calibrate, toys.KEY, state.server, data.num_clients)
    calibrated, _ = simulate.make_round(recipe.calibrate)(toys.KEY, begun, data)
    trained = recipe.train.predict(state.server, None, data.x[:5])
    for algorithm in (recipe.calibrate, recipe.personalize):
        np.testing.assert_allclose(algorithm.predict(calibrated.server, None, data.x[:5]), trained, rtol=1e-6)
    assert recipe.told['transform'] == 'none'


def test_a_learned_head_has_no_length_of_an_etf(data):
    with pytest.raises(ValueError, match='scale is the length'):
        of('fedetf_gmv', data, head='unbiased', options={'scale': 1.0})


def test_latest_models_leave_the_general_model_what_it_is(digits):
    """FedLoGe's comes from the stage that would be left out; CCVR's does not, and keeps its bound."""
    with pytest.raises(
        ValueError, match="makes its general model in the stage after training, which personal='latest'"
    ):
        of('fedloge', digits, personal='latest')
    own, latest = (of('ccvr', digits, personal=personal) for personal in ('own', 'latest'))
    assert own.oracle is not None
    assert latest.oracle is not None
    assert latest.personalize is None
    assert latest.general is latest.calibrate
    assert not of('solo', digits, personal='latest').generic
