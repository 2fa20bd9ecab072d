"""Bodies written with other libraries: what they become, that padding leaves no trace, and that they train."""

import functools

import equinox as eqx
import flax.errors
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from flax import nnx

from fedjax_nc import aggregators, evaluate, heads, local, losses, models, simulate
from fedjax_nc.algorithms import fedavg, fedbn, fedetf
from fedjax_nc.base import Batch
from fedjax_nc.data import federate
from fedjax_nc.models import adapter
from fedjax_nc.objective import objective

KEY, RATE = jax.random.key(0), 0.5


class Linen(nn.Module):
    rate: float = RATE

    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))
        x = nn.Dropout(self.rate, deterministic=not train)(nn.relu(x))
        return nn.Dense(5, name='top')(nn.relu(nn.Dense(6)(x)))


class Nnx(nnx.Module):
    def __init__(self, rngs, rate=RATE):
        self.first = nnx.Linear(toys.DIM, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(8, 6, rngs=rngs)])
        self.top = nnx.Linear(6, 5, rngs=rngs)

    def __call__(self, x):
        x = self.drop(nnx.relu(self.norm(self.first(x))))
        return self.top(nnx.relu(self.blocks[0](x)))


class Equinox(eqx.Module):
    layers: list
    norm: eqx.nn.BatchNorm
    drop: eqx.nn.Dropout

    def __init__(self, key, mode='batch', axis='batch', rate=RATE):
        sizes = [(toys.DIM, 8), (8, 6), (6, 5)]
        self.layers = [eqx.nn.Linear(*size, key=k) for size, k in zip(sizes, jax.random.split(key, 3), strict=True)]
        self.norm = eqx.nn.BatchNorm(8, axis, mode=mode)
        self.drop = eqx.nn.Dropout(rate)

    def __call__(self, x, state, *, key):
        x, state = self.norm(self.layers[0](x), state)
        x = self.drop(jax.nn.relu(x), key=key)
        return self.layers[2](jax.nn.relu(self.layers[1](x))), state


def haiku(rate=RATE):
    def body(x, is_training):
        x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(hk.Linear(8)(x), is_training))
        x = hk.dropout(hk.next_rng_key(), rate, x) if is_training else x
        return hk.Linear(5, name='top')(jax.nn.relu(hk.Linear(6)(x)))

    return body


def functions(rate=RATE):
    """No BatchNorm, which has a state: that is a `Model`'s business."""

    def init(key, x):
        first, second = jax.random.split(key)
        return {'a': heads.dense_init(first, x.shape[-1], 8), 'b': heads.dense_init(second, 8, 6)}

    def apply(params, x, key):
        x = jax.nn.relu(heads.dense(params['a'], x))
        if key is not None:
            x *= jax.random.bernoulli(key, 1 - rate, x.shape) / (1 - rate) if rate else 1
        return jax.nn.relu(heads.dense(params['b'], x))

    return init, apply


ADAPTED = {
    'linen': lambda rate, **k: models.from_flax(Linen(rate), **k),
    'nnx': lambda rate, **k: models.from_nnx(lambda rngs: Nnx(rngs, rate), **k),
    'equinox': lambda rate, **k: models.from_equinox(lambda key: Equinox(key, rate=rate), **k),
    'equinox, ema': lambda rate, **k: models.from_equinox(lambda key: Equinox(key, 'ema', rate=rate), **k),
    'haiku': lambda rate, **k: models.from_haiku(haiku(rate), **k),
    'functions': lambda rate, **k: models.from_functions(*functions(rate)),
}
TOP = {name: 'layers.2' if name.startswith('equinox') else 'top' for name in ADAPTED}
X = jax.random.normal(jax.random.key(1), (6, toys.DIM)) * 2 + 1


QUICK = ('linen', 'equinox', 'haiku')  # the others are for those with more time


@pytest.fixture(params=[pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ADAPTED])
def name(request):
    return request.param


def body(name, rate=RATE):
    return ADAPTED[name](rate, classifier=TOP[name])


def close(a, b, atol=1e-5):
    jax.tree.map(lambda u, v: np.testing.assert_allclose(u, v, atol=atol), a, b)


def test_padded_rows_leave_no_trace(name):
    """Features and statistics of six rows are those of six rows and two copies that are masked."""
    model = body(name, rate=0.0)
    params, stats = model.init(KEY, X[:1])
    padded, mask = jnp.concatenate([X, X[:1], X[:1]]), jnp.arange(8) < 6
    features = jax.jit(model.features)
    z, new = features(params, stats, X, None, KEY)
    for rows, keep in ((X, jnp.ones(6, bool)), (padded, mask)):
        other, moved = features(params, stats, rows, keep, KEY)
        close(z, other[:6])
        close(new, moved)
        further, _ = features(params, new, 3 * rows, keep, KEY)  # of which the running estimates are not the moments
        close(features(params, new, 3 * X, None, KEY)[0], further[:6], atol=1e-4)
    if name != 'functions':
        biased = features(params, stats, padded, None, KEY)[1]
        assert any(jnp.abs(u - v).max() > 1e-3 for u, v in zip(*map(jax.tree.leaves, (new, biased)), strict=True))
    for keep in (None, mask):
        close(features(params, new, X)[0], features(params, new, padded, keep)[0][:6])
    gradients = [
        jax.grad(lambda p, rows, keep: jnp.sum(model.features(p, stats, rows, keep, KEY)[0][:6] ** 2))(params, *given)
        for given in ((X, None), (padded, mask))
    ]
    close(*gradients, atol=1e-3)


@pytest.mark.slow
def test_padded_images_leave_no_trace_in_haiku_and_equinox():
    """Those two are told by other rows: moments are over pixels, too."""

    class Image(eqx.Module):
        norm: eqx.nn.BatchNorm

        def __call__(self, x, state):
            y, state = self.norm(jnp.moveaxis(x, -1, 0), state)
            return jnp.mean(jax.nn.relu(y), (1, 2)), state

    made = [models.from_equinox(lambda key, mode=mode: Image(eqx.nn.BatchNorm(3, 'batch', mode=mode)))
            for mode in ('batch', 'ema')]  # fmt: skip
    made.append(models.from_haiku(lambda x, is_training: jnp.mean(
        jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x, is_training)), (1, 2))))  # fmt: skip
    x = jax.random.normal(KEY, (5, 4, 6, 3)) + 2
    padded = jnp.concatenate([x, x[:1], x[:1], x[:1]])
    for model in made:
        params, stats = model.init(KEY, x)
        alone = model.features(params, stats, x, None, KEY)
        z, new = model.features(params, stats, padded, jnp.arange(8) < 5, KEY)
        close(alone, (z[:5], new), atol=5e-5)  # haiku takes the difference of two squares


def test_evaluation_is_without_noise_and_training_with(name):
    model = body(name)
    params, stats = model.init(KEY, X[:1])
    first, second = (model.features(params, stats, X) for _ in range(2))
    np.testing.assert_array_equal(first[0], second[0])
    assert first[1] is stats
    draws = [model.features(params, stats, X, None, k)[0] for k in (KEY, KEY, jax.random.key(5))]
    np.testing.assert_array_equal(draws[0], draws[1])
    assert jnp.abs(draws[0] - draws[2]).max() > 1e-3


def test_the_classifier_is_left_out(name):
    if name == 'functions':
        pytest.skip('there is nothing to name')
    whole, part = ADAPTED[name](0.0), body(name)
    (params, stats), (fewer, _) = whole.init(KEY, X[:1]), part.init(KEY, X[:1])
    assert whole.features(params, stats, X)[0].shape == (6, 5)
    assert part.features(fewer, stats, X)[0].shape == (6, 6)
    assert len(jax.tree.leaves(params)) == len(jax.tree.leaves(fewer)) + 2
    task = objective(whole, heads.linear(), losses.cross_entropy)
    with pytest.raises(ValueError, match='ends in a dense layer of 5 outputs') as info:
        task.init(KEY, toys.ragged((9, 8)))
    assert '\n' not in str(info.value)
    with pytest.raises(ValueError, match="no part of the module is called 'fc'"):
        ADAPTED[name](0.0, classifier='fc').init(KEY, X[:1])


@pytest.mark.parametrize('last', [nn.log_softmax, nn.softmax, lambda z: z.astype(jnp.bfloat16)])
def test_a_classifier_is_known_behind_a_softmax(last):
    class Classifier(nn.Module):
        @nn.compact
        def __call__(self, x):
            return last(nn.Dense(toys.CLASSES)(nn.relu(nn.Dense(7)(x))))

    with pytest.raises(ValueError, match='ends in a dense layer'):
        objective(models.from_flax(Classifier()), heads.etf(), losses.cross_entropy).init(KEY, toys.ragged((9, 8)))


@pytest.mark.parametrize(
    'last', [nn.relu, lambda z: nn.LayerNorm()(z), nn.tanh, lambda z: z / (1e-6 + jnp.linalg.norm(z))]
)
def test_as_many_features_as_classes_are_not_yet_a_classifier(last):
    class Body(nn.Module):
        @nn.compact
        def __call__(self, x):
            return last(nn.Dense(toys.CLASSES)(x))

    objective(models.from_flax(Body()), heads.etf(), losses.cross_entropy).init(KEY, toys.ragged((9, 8)))


@pytest.mark.slow
def test_it_learns_and_several_lanes_change_nothing(name):
    data = toys.ragged((40, 25, 33, 17))
    algorithm = fedetf.algorithm(body(name, rate=0.0), toys.opt, plan=toys.PLAN)
    state = simulate.init(algorithm, KEY, data)
    one, two = (jax.jit(simulate.make_round(algorithm, chunk=c)) for c in (1, 2))
    toys.same(one(KEY, state, data)[0], two(KEY, state, data)[0], atol=2e-5)
    for t in range(12):
        state, report = one(jax.random.fold_in(KEY, t), state, data)
    assert bool(report.finite)
    tables = evaluate.generic(algorithm, state, data.x, data.y, toys.CLASSES)
    assert evaluate.accuracy(tables) > 0.6


@pytest.mark.parametrize(
    ('adapt', 'make', 'given'),
    [
        (models.from_nnx, lambda key: Nnx(nnx.Rngs(key)), lambda m: m.first.kernel.get_value()),
        (models.from_equinox, lambda key: eqx.nn.MLP(toys.DIM, 6, 8, 1, key=key), lambda m: m.layers[0].weight),
    ],
)
def test_a_module_that_is_given_keeps_its_numbers(adapt, make, given):
    module = make(jax.random.key(3))
    model = adapt(module)
    before = np.asarray(given(module))
    for key in (KEY, jax.random.key(9)):
        params, _ = model.init(key, X[:1])
        assert any(u.shape == before.shape and (u == before).all() for u in jax.tree.leaves(params))
    model.features(params, model.init(KEY, X[:1])[1], X, None, KEY)
    np.testing.assert_array_equal(given(module), before)
    assert type(getattr(module, 'norm', None)) in (nnx.BatchNorm, type(None))


def test_makers_are_called_as_they_ask():
    class Keyword(nnx.Module):
        def __init__(self, *, rngs):
            self.a = nnx.Linear(toys.DIM, 3, rngs=rngs)

        def __call__(self, x, *, rngs=None, deterministic=None):
            assert (rngs is None) == bool(deterministic)
            return self.a(x)

    for model in (models.from_nnx(Keyword), models.from_equinox(lambda k: eqx.nn.MLP(toys.DIM, 3, 4, 1, key=k))):
        first, second = (model.init(jax.random.key(k), X[:1])[0] for k in (0, 1))
        assert any((u != v).any() for u, v in zip(*map(jax.tree.leaves, (first, second)), strict=True))
        for key in (None, KEY):
            assert model.features(first, (), X, None, key)[0].shape == (6, 3)


class Bare(nnx.Module):
    def __init__(self):
        self.drop = nnx.Dropout(RATE)


class Forgetful(eqx.Module):
    norm: eqx.nn.BatchNorm

    def __init__(self, key):
        self.norm = eqx.nn.BatchNorm(3, 'batch', mode='batch')

    def __call__(self, x):
        return x


class Stateless(eqx.Module):
    def __call__(self, x, state):
        return x, state


class Ordered(eqx.Module):
    order: jax.Array

    def __init__(self, key):
        self.order = jnp.arange(3)

    def __call__(self, x):
        return x[self.order]


@pytest.mark.parametrize(
    ('adapt', 'given', 'message'),
    [
        (models.from_nnx, 3, 'must be an nnx.Module'),
        (models.from_nnx, lambda: 3, 'from `rngs`'),
        (models.from_nnx, Bare, 'from `rngs`'),
        (models.from_nnx, lambda rngs: 3, 'it made 3'),
        (models.from_nnx, nn.Dense(3), 'must be an nnx.Module'),
        (models.from_equinox, 'MLP', 'must be an eqx.Module'),
        (models.from_equinox, lambda: 3, 'from `key`'),
        (models.from_equinox, lambda key: 3, 'it made 3'),
        (models.from_equinox, lambda key: Equinox(key, axis='rows'), "the axis name 'batch', not 'rows'"),
        (models.from_equinox, eqx.nn.make_with_state(Equinox)(KEY)[0], 'came from eqx.nn.make_with_state'),
        (models.from_equinox, Forgetful, 'a module with state takes and returns it'),
        (models.from_equinox, Stateless(), 'a module with state takes and returns it'),
        (models.from_equinox, Ordered, 'holds 1 arrays that are no floats'),
        (models.from_haiku, hk.transform(lambda x: x), 'what was given to hk.transform'),
        (models.from_haiku, hk.Linear, 'must build its modules'),
        (models.from_haiku, 3, 'must build its modules'),
        (models.from_haiku, lambda x, table: x, 'needs table'),
        (models.from_flax, Linen, r'an instance, not the class: pass Linen\(...\)'),
        (models.from_flax, Nnx, 'from_nnx'),
        (models.from_flax, Equinox, 'from_equinox'),
    ],
)
def test_what_is_refused(adapt, given, message):
    with pytest.raises(ValueError, match=message) as info:
        adapt(given)
    assert '\n' not in str(info.value)


@pytest.mark.parametrize(('init', 'apply'), [(None, lambda p, x: x), (lambda k, x: x, 3), (dict, lambda p, x: x)])
def test_pairs_are_functions(init, apply):
    with pytest.raises(ValueError, match='must be a function'):
        models.from_functions(init, apply)


@pytest.mark.parametrize('how', [{'data_format': 'NC...'}, {'axis': [0]}])
def test_haiku_batchnorm_has_its_channels_last(how):
    model = models.from_haiku(lambda x, is_training: hk.BatchNorm(True, True, 0.9, **how)(x, is_training))
    x = jnp.ones((4, 3, 2))
    with pytest.raises(ValueError, match='channels last'):
        model.features(*model.init(KEY, x), x, jnp.ones(4, bool), KEY)


def test_linen_variables_of_other_kinds_are_refused():
    class Counts(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.variable('counts', 'n', jnp.zeros, ())
            return nn.Dense(3)(x)

    with pytest.raises(ValueError, match='keeps counts'):
        models.from_flax(Counts()).init(KEY, X)


@pytest.mark.parametrize('layer', [nn.BatchNorm(use_running_average=False), nn.Dropout(0.5, deterministic=False)])
def test_a_linen_layer_that_always_trains_is_told_when_it_evaluates(layer):
    class Body(nn.Module):
        @nn.compact
        def __call__(self, x):
            return layer.copy(name='last')(nn.Dense(4)(x))

    model, x = models.from_flax(Body()), jnp.ones((3, 5))
    params, stats = model.init(jax.random.key(0), x)
    assert model.features(params, stats, x, None, jax.random.key(1))[0].shape == (3, 4)
    with pytest.raises(
        ValueError, match=r'Body trains where it should evaluate .*: let its `__call__` ask for `train`'
    ):
        model.features(params, stats, x)


@pytest.mark.parametrize(
    'library', ['linen', *(pytest.param(u, marks=pytest.mark.slow) for u in ('nnx', 'equinox', 'haiku'))]
)
def test_batchnorm_of_any_library_stays_with_its_client(library):
    data = toys.ragged((40, 25))
    task = objective(body(library), heads.linear(), losses.cross_entropy)
    algorithm = fedbn.algorithm(task, toys.opt, plan=toys.PLAN)
    state = simulate.init(algorithm, KEY, data)
    state, _ = jax.jit(simulate.make_round(algorithm))(KEY, state, data)
    assert len(state.clients.norms.affine) == 2
    assert all((u[0] != u[1]).any() for u in state.clients.norms.affine.values())


class Normed(eqx.Module):
    norm: eqx.nn.BatchNorm

    def __init__(self, key):
        self.norm = eqx.nn.BatchNorm(3, 'batch', mode='batch', momentum=0.9)

    def __call__(self, x, state):
        return self.norm(x, state)


@pytest.mark.parametrize('library', ['equinox', 'haiku'])
def test_running_averages_are_means_of_clients_whatever_their_numbers_of_batches(library):
    """Of clients with 1 and 40 batches; the libraries keep sums, of which a mean is no mean's sum."""
    sizes = [8] * 9 + [320]
    x = (5 + np.random.default_rng(0).normal(size=(sum(sizes), 3))).astype(np.float32)
    data = federate(x, np.arange(len(x)) % 3, np.split(np.arange(len(x)), np.cumsum(sizes)[:-1]))
    if library == 'equinox':
        model = models.from_equinox(Normed)
    else:
        model = models.from_haiku(lambda x, is_training: hk.BatchNorm(True, True, 0.9)(x, is_training))
    task = objective(model, heads.linear(), losses.cross_entropy)
    algorithm = fedavg.algorithm(task, local.sgd(0.0), plan=local.Plan(8, 1), aggregate_stats=aggregators.uniform)
    state, _ = jax.jit(simulate.make_round(algorithm, chunk=1))(KEY, simulate.init(algorithm, KEY, data), data)
    v = state.server.variables
    batch = Batch(data.x[-8:], data.y[-8:], jnp.ones(8, bool), data.counts[0], KEY)
    for _ in range(2):  # after the round, and after one more batch
        z, _ = task.features(v, Batch(data.x))
        np.testing.assert_allclose(z.mean(), 0, atol=0.25)
        if library == 'haiku':  # equinox's variances begin with 1, of which much is left after few batches
            np.testing.assert_allclose(z.std(), 1, atol=0.15)
        v = v._replace(stats=task.features(v, batch)[1])


def test_averages_of_equinox_are_of_what_was_seen_whatever_they_began_with():
    model = models.from_equinox(Normed)
    params, stats = model.init(KEY, X[:, :3])
    for _ in range(2):
        stats = model.features(params, stats, X[:, :3], None, KEY)[1]
        np.testing.assert_allclose(stats['norm.batch_state_index.0'], X[:, :3].mean(0), rtol=1e-4)
        np.testing.assert_allclose(stats['norm.batch_state_index.1'], X[:, :3].var(0), rtol=1e-4)


@pytest.mark.parametrize('scale', [1.0, 10.0, 1e3])
def test_one_real_row_and_large_means_are_no_trouble_to_haiku(scale):
    """Its variance is a difference of two means of squares, which rounding must not make negative."""
    model = models.from_haiku(lambda x, is_training: hk.BatchNorm(True, True, 0.9)(hk.Linear(64)(x), is_training))
    for seed in range(5):
        x = scale * np.random.default_rng(seed).normal(size=(32, toys.DIM)).astype(np.float32)
        params, stats = model.init(jax.random.key(seed), x)
        z, new = model.features(params, stats, x, jnp.arange(32) < 1, KEY)
        np.testing.assert_allclose(z[0], 0, atol=1e-5)
        moved = np.asarray(x[:1] @ params['linear']['w'] + params['linear']['b'])
        np.testing.assert_allclose(new['batch_norm/~/mean_ema']['average'], moved, rtol=1e-4, atol=1e-4 * scale)
    x = (100 + np.random.default_rng(0).normal(size=(8, toys.DIM))).astype(np.float32)
    got = model.features(params, stats, x, jnp.arange(8) < 3, KEY)
    h = np.asarray(x, np.float64) @ np.asarray(params['linear']['w'], np.float64) + np.asarray(params['linear']['b'])
    want = (h[:3] - h[:3].mean(0)) / np.sqrt(h[:3].var(0) + 1e-5)
    np.testing.assert_allclose(got[0][:3], want, atol=0.02)


def test_a_client_alone_has_the_running_averages_of_its_library():
    module, state = eqx.nn.make_with_state(Normed)(KEY)
    model, batches = models.from_equinox(Normed), X[:, :3].reshape(3, 2, 3)
    params, stats = model.init(KEY, X[:1, :3])
    body = hk.transform_with_state(lambda x, train: hk.BatchNorm(True, True, 0.9)(x, train))
    other = models.from_haiku(lambda x, is_training: hk.BatchNorm(True, True, 0.9)(x, is_training))
    weights, means = other.init(KEY, X[:1, :3])
    theirs = body.init(KEY, X[:1, :3], True)[1]
    for x in batches:
        _, state = jax.vmap(module, axis_name='batch', in_axes=(0, None), out_axes=(0, None))(x, state)
        stats = model.features(params, stats, x, None, KEY)[1]
        want, _ = jax.vmap(eqx.nn.inference_mode(module), axis_name='batch', in_axes=(0, None), out_axes=(0, None))(
            X[:, :3], state
        )
        close(model.features(params, stats, X[:, :3], None, None)[0], want)
        _, theirs = body.apply(weights, theirs, None, x, True)
        means = other.features(weights, means, x, None, KEY)[1]
        close(
            other.features(weights, means, X[:, :3], None, None)[0],
            body.apply(weights, theirs, None, X[:, :3], False)[0],
        )
    np.testing.assert_array_equal(means['batch_norm/~/mean_ema']['counter'], 3)


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(__import__('sys').modules, 'haiku', None)
    monkeypatch.delitem(__import__('sys').modules, 'fedjax_nc.models.adapter_haiku', raising=False)
    with pytest.raises(ImportError, match=r'pip install "fedjax_nc\[haiku\]"'):
        _ = models.from_haiku
    with pytest.raises(AttributeError, match='from_torch'):
        _ = models.from_torch


def test_a_round_of_fedavg_is_that_of_linen():
    """The same layers and numbers in nnx and linen take the same steps."""
    linen, other = models.from_flax(Linen(0.0), classifier='top'), body('nnx', rate=0.0)
    data = toys.ragged((40, 25))
    states = []
    for model in (linen, other):
        algorithm = fedavg.algorithm(objective(model, heads.linear(), losses.cross_entropy), toys.opt, plan=toys.PLAN)
        states.append((algorithm, simulate.init(algorithm, KEY, data)))
    (a, first), (b, second) = states
    p = first.server.variables.params['body']
    same = {
        'first.bias': p['Dense_0']['bias'], 'first.kernel': p['Dense_0']['kernel'],
        'norm.bias': p['BatchNorm_0']['bias'], 'norm.scale': p['BatchNorm_0']['scale'],
        'blocks.0.bias': p['Dense_1']['bias'], 'blocks.0.kernel': p['Dense_1']['kernel'],
    }  # fmt: skip
    v = second.server.variables
    assert set(same) == set(v.params['body'])
    second = second._replace(server=second.server._replace(variables=v._replace(params={**v.params, 'body': same})))
    first, _ = jax.jit(simulate.make_round(a))(KEY, first, data)
    second, _ = jax.jit(simulate.make_round(b))(KEY, second, data)
    after = first.server.variables.params['body']
    close(second.server.variables.params['body']['first.kernel'], after['Dense_0']['kernel'])
    close(second.server.variables.params['head'], first.server.variables.params['head'])


class Subclass(nn.BatchNorm):
    """No method of its own."""


class Narrow(nn.BatchNorm):
    """Its method takes no mask."""

    def __call__(self, x):
        return super().__call__(x)


@pytest.mark.parametrize('norm', [Subclass, Narrow])
@pytest.mark.parametrize('by_name', [False, True])
def test_batchnorm_of_linen_may_be_derived_from_and_called_by_name(norm, by_name):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            y = norm(use_running_average=not train)
            return nn.Dense(3, name='top')(inputs=y(x=x) if by_name else y(x))

    leaves_no_trace(models.from_flax(Net(), classifier='top'))


def test_what_a_layer_is_given_need_not_be_named_first():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            return nn.BatchNorm()(use_running_average=not train, x=x)

    def function(x, is_training):
        return hk.BatchNorm(True, True, 0.9)(is_training=is_training, inputs=x)

    leaves_no_trace(models.from_flax(Net()))
    leaves_no_trace(models.from_haiku(function))


def test_batchnorm_of_linen_that_has_a_mask_of_its_own_keeps_it():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            return nn.BatchNorm(use_running_average=not train, momentum=0.0)(x, mask=x > 0)

    model = models.from_flax(Net())
    _, new = model.features(*model.init(KEY, X), X, jnp.arange(6) < 4, KEY)
    want = [np.mean(column[column > 0]) for column in np.asarray(X).T]
    np.testing.assert_allclose(new['BatchNorm_0']['mean'], want, rtol=1e-5)


class Jitted(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(toys.DIM, rngs=rngs)

    @nnx.jit
    def __call__(self, x):
        return self.norm(x)


class Remat(Jitted):
    @nnx.remat
    def __call__(self, x):
        return self.norm(x)


class ScannedNorms(nnx.Module):
    """Two layers in one."""

    def __init__(self, rngs):
        self.layers = nnx.split_rngs(splits=2)(nnx.vmap(lambda rngs: nnx.BatchNorm(toys.DIM, rngs=rngs)))(rngs)

    def __call__(self, x):
        return nnx.scan(lambda x, layer: layer(x) ** 2, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


class FilterJit(eqx.Module):
    norm: eqx.nn.BatchNorm

    def __init__(self, key):
        self.norm = eqx.nn.BatchNorm(toys.DIM, 'batch', mode='batch')

    @eqx.filter_jit
    def __call__(self, x, state):
        return self.norm(x, state)


def leaves_no_trace(model):
    params, stats = model.init(KEY, X[:1])
    padded, features = jnp.concatenate([X, X[:1], X[:1]]), jax.jit(model.features)
    for keep in (6, 5):
        z, new = model.features(params, stats, X[:keep], None, KEY)
        for call in (features, model.features):
            other, moved = call(params, stats, padded, jnp.arange(8) < keep, KEY)
            close((z, new), (other[:keep], moved), atol=3e-5)  # a hundredth of a batch is kept, and made an average


@pytest.mark.parametrize(
    'model',
    [
        lambda: models.from_nnx(Jitted),
        lambda: models.from_nnx(Remat),
        lambda: models.from_nnx(ScannedNorms),
        lambda: models.from_equinox(FilterJit),
    ],
    ids=['nnx.jit', 'nnx.remat', 'nnx.scan', 'eqx.filter_jit'],
)
def test_methods_that_are_compiled_see_the_mask_of_each_batch(model):
    leaves_no_trace(model())


def test_batchnorm_of_other_rows_than_the_batch_is_refused():
    class Flat(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            return nn.BatchNorm(use_running_average=not train)(x.reshape(-1, 2)).reshape(len(x), -1)

    model = models.from_flax(Flat())
    with pytest.raises(ValueError, match='leave the batch as the first axis') as info:
        model.features(*model.init(KEY, X), X, jnp.ones(6, bool), KEY)
    assert '\n' not in str(info.value)


class AtCall(nnx.Module):
    """Its random numbers are handed over."""

    def __init__(self, rngs):
        self.drop = nnx.Dropout(RATE)

    def __call__(self, x, *, rngs):
        return self.drop(x, rngs=rngs)


class Scanned(nnx.Module):
    """Three layers in one, each with its own stream of random numbers."""

    def __init__(self, rngs):
        make = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: nnx.Dropout(RATE, rngs=rngs)))
        self.layers = make(rngs)

    def __call__(self, x):
        return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


class OtherName(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.Dropout(RATE, rng_collection='path', deterministic=not train)(x)


@pytest.mark.parametrize(
    'model',
    [lambda: models.from_nnx(AtCall), lambda: models.from_nnx(Scanned), lambda: models.from_flax(OtherName())],
    ids=['at call', 'scanned', 'other name'],
)
def test_dropout_finds_its_key(model):
    model = model()
    params, stats = model.init(KEY, X)
    np.testing.assert_array_equal(model.features(params, stats, X)[0], X)
    first, second = (np.asarray(model.features(params, stats, X, None, jax.random.key(k))[0]) for k in (0, 5))
    assert (first == 0).any()
    assert (first != second).any()


class Pair(nnx.Module):
    """Two streams of random numbers."""

    def __init__(self, rngs):
        self.first, self.second = nnx.Dropout(RATE, rngs=nnx.Rngs(rngs())), nnx.Dropout(RATE, rngs=nnx.Rngs(rngs()))

    def __call__(self, x):
        return self.first(x) * self.second(x)


@pytest.mark.parametrize(('module', 'layers'), [(Pair, 2), (Scanned, 3)])
def test_layers_of_nnx_draw_apart(module, layers):
    z, _ = models.from_nnx(module).features({}, (), jnp.ones((50, 40)), None, KEY)
    np.testing.assert_allclose((np.asarray(z) > 0).mean(), 0.5**layers, atol=0.05)


def test_each_example_of_equinox_has_its_own_noise():
    model = models.from_equinox(eqx.nn.Sequential([eqx.nn.Dropout(RATE)]))
    z, _ = model.features({}, (), jnp.ones((6, 20)), None, KEY)
    assert len({tuple(row) for row in np.asarray(z).tolist()}) == 6


def eqx_sequence(key):
    return eqx.nn.Sequential([eqx.nn.Linear(toys.DIM, 4, key=key), eqx.nn.Dropout(0.0), eqx.nn.Linear(4, 5, key=key)])


@pytest.mark.parametrize(
    'model',
    [
        lambda: models.from_flax(nn.Sequential([nn.Dense(4), nn.relu, nn.Dense(5)]), classifier='layers_2'),
        lambda: models.from_flax(nn.Sequential([nn.relu, nn.Dense(4)])),
        lambda: models.from_nnx(
            lambda rngs: nnx.Sequential(nnx.Linear(toys.DIM, 4, rngs=rngs), nnx.relu, nnx.Linear(4, 5, rngs=rngs)),
            classifier='layers.-1',
        ),
        lambda: models.from_nnx(
            lambda rngs: nnx.Sequential(nnx.BatchNorm(toys.DIM, rngs=rngs), nnx.Linear(toys.DIM, 4, rngs=rngs))
        ),
        lambda: models.from_equinox(eqx_sequence, classifier='layers.2'),
        lambda: models.from_equinox(eqx_sequence(KEY), classifier='layers.-1'),
    ],
    ids=['linen', 'linen, function', 'nnx', 'nnx, norm', 'equinox', 'equinox, given'],
)
def test_sequences_of_layers_are_models(model):
    model = model()
    params, stats = model.init(KEY, X)
    assert model.features(params, stats, X, jnp.ones(6, bool), KEY)[0].shape == (6, 4)


def test_a_class_may_be_given_with_some_of_its_arguments():
    class Net(nnx.Module):
        def __init__(self, width, *, rngs):
            self.layer = nnx.Linear(toys.DIM, width, rngs=rngs)

        def __call__(self, x):
            return self.layer(x)

    model = models.from_nnx(functools.partial(Net, 3))
    assert model.features(*model.init(KEY, X), X)[0].shape == (6, 3)


def test_arrays_of_numpy_in_equinox_stay_as_they_are():
    class Net(eqx.Module):
        layer: eqx.nn.Linear
        scale: np.ndarray
        order: np.ndarray

        def __init__(self, key):
            self.layer = eqx.nn.Linear(toys.DIM, 3, key=key)
            self.scale, self.order = np.ones(3, np.float32), np.array([2, 0, 1])

        def __call__(self, x):
            return (self.layer(x) * self.scale)[self.order]

    model = models.from_equinox(Net)
    params, stats = model.init(KEY, X)
    assert set(params) == {'layer.weight', 'layer.bias'}
    z = X @ params['layer.weight'].T + params['layer.bias']
    close(model.features(params, stats, X)[0], z[:, jnp.array([2, 0, 1])])


def test_a_classifier_is_known_where_gradients_compute_it_again():
    class Classifier(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(toys.CLASSES)(nn.relu(nn.Dense(7)(x)))

    model = models.from_flax(nn.remat(Classifier)())
    with pytest.raises(ValueError, match='ends in a dense layer'):
        objective(model, heads.etf(), losses.cross_entropy).init(KEY, toys.ragged((9, 8)))


def test_counters_of_linen_are_means_of_clients():
    class Counting(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            steps = self.variable('batch_stats', 'steps', lambda: jnp.int32(0))
            if train and not self.is_initializing():
                steps.value += 1
            return nn.relu(nn.Dense(8)(x))

    task = objective(models.from_flax(Counting()), heads.linear(), losses.cross_entropy)
    plan = local.Plan(batch_size=10, epochs=1)
    algorithm = fedavg.algorithm(task, toys.opt, plan=plan)
    data = toys.ragged([10, 20, 30])
    state = simulate.init(algorithm, KEY, data)
    run = simulate.several(simulate.make_round(algorithm))
    found, _ = run(jax.random.split(KEY, 2), state, data)
    steps = found.server.variables.stats['steps']
    assert steps.dtype == jnp.float32
    np.testing.assert_allclose(steps, 2 * (1 * 10 + 2 * 20 + 3 * 30) / 60, rtol=1e-6)


class Masks(nn.Module):
    def __call__(self, x, mask):
        return x * mask[:, None]


class MasksOfNnx(nnx.Module):
    def __call__(self, x, mask):
        return x * mask[:, None]


@pytest.mark.parametrize(
    'model',
    [
        lambda: models.from_flax(Masks()),
        lambda: models.from_nnx(MasksOfNnx()),
        lambda: models.from_haiku(lambda x, mask: x if mask is None else x * mask[:, None]),
        lambda: models.from_functions(lambda key, x: {}, lambda params, x, mask: x * mask[:, None]),
    ],
    ids=['linen', 'nnx', 'haiku', 'functions'],
)
def test_the_mask_is_told_in_training_and_evaluation(model):
    model, mask = model(), jnp.arange(6) < 4
    for key in (None, KEY):
        np.testing.assert_array_equal(model.features({}, (), X, mask, key)[0], X * mask[:, None])


def test_what_takes_any_name_is_told_the_mask_and_whether_it_trains():
    met = []
    model = models.from_functions(lambda key, x: {}, lambda params, x, **how: met.append(how) or x)
    for key in (None, KEY):
        model.features({}, (), X, None, key)
    assert met == [{'mask': None, 'train': False}, {'mask': None, 'train': True}]


def test_what_is_told_is_taken_by_name():
    with pytest.raises(ValueError, match=r'does not take train by name: write it as \(x, \*, train=None\)'):
        models.from_functions(lambda key, x: {}, lambda params, x, train, /: x)


def test_counters_and_flags_are_rounded():
    stats, like = {'n': jnp.float32(2.7), 'on': jnp.float32(0.3)}, {'n': jnp.int32(0), 'on': jnp.array(True)}
    found = adapter.as_state(stats, like)
    assert (found['n'], found['n'].dtype, found['on'], found['on'].dtype) == (3, jnp.int32, False, jnp.bool_)


def test_a_fault_of_linen_in_training_is_shown_as_it_is():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            if train:
                self.put_variable('params', 'bias', 0.0)
            return x + self.param('bias', nn.initializers.zeros, ())

    model = models.from_flax(Net())
    with pytest.raises(flax.errors.ModifyScopeVariableError):
        model.features(*model.init(KEY, X), X, None, KEY)


def test_counters_of_nnx_are_whole_numbers_to_the_module():
    class Counting(nnx.Module):
        def __init__(self, rngs):
            self.n = nnx.Variable(jnp.int32(0))

        def __call__(self, x):
            assert self.n.get_value().dtype == jnp.int32
            self.n.set_value(self.n.get_value() + 1)
            return x

    model = models.from_nnx(Counting)
    stats = model.features({}, {'n': jnp.float32(2.7)}, X, None, KEY)[1]
    assert (stats['n'], stats['n'].dtype) == (4, jnp.float32)
