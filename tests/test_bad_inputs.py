"""Wrong arguments of everything that takes numbers, tasks or plans: refused at once, in one line that names them."""

import functools
import importlib
import inspect
import pkgutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

from fedjax_nc import (
    aggregators,
    algorithms,
    checks,
    classwise,
    devices,
    evaluate,
    experiments,
    frames,
    gaussians,
    heads,
    local,
    losses,
    memory,
    metrics,
    models,
    plots,
    population,
    privacy,
    saving,
    server_optimizers,
    simulate,
    testing,
    training,
    tuning,
    watch,
)  # fmt: skip
from fedjax_nc.algorithms import (
    fedavg,
    fedaws,
    fedetf,
    fedloge,
    fedmmd,
    fednh,
    fedprox,
    finetune,
    latest,
    moon,
    scaffold,
    solo,
)
from fedjax_nc.base import Head
from fedjax_nc.data import federate, folders, host, load_npz
from fedjax_nc.experiments import pipeline, seeds
from fedjax_nc.objective import masked_mean, objective, with_term

FACTORIES = ('algorithm', 'calibrate', 'personalize', 'realign', 'adapt_features', 'alternate')
SINGLE = federate(np.eye(5, 12, dtype=np.float32), np.arange(5), [[c] for c in range(5)])
NEEDED = {'mu': 1.0, 'warm': 3, 'auxiliary': SINGLE}
CE = losses.cross_entropy
NOT_NUMBERS = ('x', [0.1], np.ones(2), np.nan)
NEGATIVE = (-1.0, np.float32(-1), jnp.float32(-1))
NOT_WHOLE = ('x', 2.5, -1, np.float32(2), True)


def factories():
    for module in pkgutil.iter_modules(algorithms.__path__):
        found = importlib.import_module(f'fedjax_nc.algorithms.{module.name}')
        for name in FACTORIES:
            factory = getattr(found, name, None)
            if factory is not None and factory.__module__ == found.__name__:
                yield f'{module.name}.{name}', factory


FOUND = dict(factories())


def call(factory, **wrong):
    """The factory with one wrong argument among good ones."""
    parameters = inspect.signature(factory).parameters
    first = next(iter(parameters))
    good = {
        'objective': toys.task, 'model': toys.tiny, 'task': toys.task, 'client_opt': toys.opt, **NEEDED,
    }  # fmt: skip
    required = [
        name for name, p in parameters.items() if p.default is inspect.Parameter.empty and p.kind is not p.VAR_KEYWORD
    ]
    given = {name: good[name] for name in required} | wrong
    return factory(given.pop(first), **given)


def numbers():
    """Every argument of every factory whose default is a number, with values that it cannot have."""
    for name, factory in FOUND.items():
        for argument, p in inspect.signature(factory).parameters.items():
            default = NEEDED.get(argument, p.default)
            if isinstance(default, bool) or not isinstance(default, int | float):
                continue
            wrong = (*NOT_NUMBERS, *NEGATIVE) if isinstance(default, float) else NOT_WHOLE
            for value in wrong:
                yield pytest.param(factory, argument, value, id=f'{name}-{argument}-{value!r}'.replace('\n', ''))


def refused(build, said):
    with pytest.raises((ValueError, TypeError)) as caught:
        build()
    text = str(caught.value)
    assert '\n' not in text
    assert len(text) < 300
    assert said in text


@pytest.mark.parametrize(('factory', 'argument', 'value'), list(numbers()))
def test_a_number_out_of_range(factory, argument, value):
    refused(lambda: call(factory, **{argument: value}), argument)


def flags():
    """Every argument of every factory that is true or false."""
    for name, factory in {**FOUND, 'linear': heads.linear, 'cosine': heads.cosine, 'etf': heads.etf}.items():
        for argument, p in inspect.signature(factory).parameters.items():
            if isinstance(p.default, bool):
                yield pytest.param(factory, argument, id=f'{name}-{argument}')


@pytest.mark.parametrize(('factory', 'argument'), list(flags()))
def test_a_word_for_true_or_false(factory, argument):
    """'False' would be true."""
    for value in ('False', 'no', None, 0.5, [True]):
        wrong = {argument: value}
        refused(lambda wrong=wrong: call(factory, **wrong) if factory in FOUND.values() else factory(**wrong), argument)


KINDS = {
    'model': toys.tiny, 'task': toys.task, 'head': heads.linear(), 'module': models.MLP(), 'none': None, 'text': 'x',
    'class': models.MLP,
}  # fmt: skip


@pytest.mark.parametrize('wrong', KINDS.values(), ids=KINDS)
@pytest.mark.parametrize('factory', FOUND.values(), ids=FOUND)
def test_a_first_argument_of_another_kind(factory, wrong):
    first = next(iter(inspect.signature(factory).parameters))
    if wrong is {'objective': toys.task, 'model': toys.tiny}[first]:
        pytest.skip('the right one')
    refused(lambda: call(factory, **{first: wrong}), f'{first} must be a')


@pytest.mark.parametrize('wrong', [None, 0.1, optax.sgd(0.1), 'sgd', lambda round: 0.1])
@pytest.mark.parametrize('factory', [f for f in FOUND.values() if 'client_opt' in inspect.signature(f).parameters])
def test_an_optimizer_that_is_no_function_of_the_round(factory, wrong):
    refused(lambda: call(factory, client_opt=wrong), 'client_opt')


def test_a_client_optimizer_that_looks_at_the_round():
    refused(lambda: fedavg.algorithm(toys.task, lambda round: optax.sgd(0.1 if round < 5 else 0.01)), 'jnp.where')


@pytest.mark.parametrize('make', [
    optax.lbfgs, lambda: optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()),
], ids=['lbfgs', 'plateau'])  # fmt: skip
def test_a_client_optimizer_that_asks_for_the_loss(make):
    algorithm = fedavg.algorithm(toys.task, lambda round: make())
    refused(lambda: simulate.init(algorithm, toys.KEY, SINGLE), 'client_opt cannot take a step by a gradient alone')


def test_a_head_that_is_made_otherwise():
    def task(made):
        return objective(toys.tiny, Head(lambda key, d, c: made(d, c), lambda p, f, z: p['t'] * (z @ p['w'])), CE)

    refused(lambda: task(lambda d, c: {'w': jnp.zeros((d, c))}).init(toys.KEY, SINGLE), '(params, fixed)')
    params = task(lambda d, c: ({'w': jnp.zeros((d, c)), 't': 1.0}, {})).init(toys.KEY, SINGLE).params
    assert params['head']['t'].dtype == jnp.float32


def test_a_stage_with_another_head_than_training():
    trained = simulate.init(fedetf.algorithm(toys.tiny, toys.opt, plan=toys.PLAN), toys.KEY, SINGLE)
    stage = finetune.algorithm(objective(toys.tiny, heads.linear(), CE), toys.opt, plan=toys.PLAN)
    state = simulate.join(stage, toys.KEY, trained.server, SINGLE.num_clients)
    with pytest.raises(ValueError, match="the head looks for 'w' where there is proj, scale, v"):
        simulate.make_round(stage)(toys.KEY, state, SINGLE)


@pytest.mark.parametrize('wrong', [local.Plan(0, 1), local.Plan(1, 0), local.Plan(2.5, 1), local.Plan(1, '3'), 5, None])
@pytest.mark.parametrize('factory', FOUND.values(), ids=FOUND)
def test_a_plan_that_is_none(factory, wrong):
    name = 'turn' if 'turn' in inspect.signature(factory).parameters else 'plan'
    refused(lambda: call(factory, **{name: wrong}), '')


Z, Y, W = jnp.ones((6, 3)), jnp.array([0, 1, 2, 0, 1, 2]), jnp.ones(6)
KEY = toys.KEY
NAN = jnp.full((6, 3), jnp.nan)
SHAPES = {  # what takes examples with labels, and what is wrong with them
    'losses.cross_entropy': lambda z, y: losses.cross_entropy(z, y),
    'losses.balanced_softmax': lambda z, y: losses.balanced_softmax(z, y, jnp.ones(3)),
    'losses.restricted_softmax': lambda z, y: losses.restricted_softmax(z, y, jnp.ones(3)),
    'losses.weighted_cross_entropy': lambda z, y: losses.weighted_cross_entropy(z, y, weights=jnp.ones(3)),
    'losses.dot_regression': lambda z, y: losses.dot_regression(z, y),
    'losses.positive': lambda z, y: losses.positive(z, y),
    'classwise.sums': lambda z, y: classwise.sums(z, y, W, 3),
    'classwise.means': lambda z, y: classwise.means(z, y, W, 3),
    'classwise.scatter': lambda z, y: classwise.scatter(z, y, W, jnp.ones((3, 3))),
    'gaussians.scatter': lambda z, y: gaussians.scatter(z, y, W, jnp.ones((3, 3)), 'tied'),
    'collapse.nc1': lambda z, y: metrics.collapse.nc1(z, y, 3),
    'collapse.nc1_cosine': lambda z, y: metrics.collapse.nc1_cosine(z, y, 3),
    'collapse.nc2': lambda z, y: metrics.collapse.nc2(z, y, 3),
    'collapse.nc3': lambda z, y: metrics.collapse.nc3(z, y, jnp.ones((3, 3))),
    'collapse.nc3_means': lambda z, y: metrics.collapse.nc3_means(z, y, jnp.ones((3, 3))),
    'degeneration.degeneration': lambda z, y: metrics.degeneration.degeneration(z, y, 3),
}


@pytest.mark.parametrize(
    ('z', 'y'),
    [(Z, Y[:, None]), (Z, Y.astype(jnp.float32)), (Z, Y[:4]), (Z, jnp.int32(1)), (Z[0], Y), (Z[None], Y), (Z, W > 0)],
    ids=['columns', 'floats', 'short', 'one', 'one row', 'stacked', 'bool'],
)
@pytest.mark.parametrize('fn', SHAPES.values(), ids=SHAPES)
def test_labels_and_rows_of_other_shapes(fn, z, y):
    refused(lambda: fn(z, y), 'must')
    with pytest.raises((ValueError, TypeError), match='must'):  # and also where values are not known
        jax.eval_shape(fn, z, y)


CALLS = [
    (local.sgd, 'lr', (*NOT_NUMBERS, *NEGATIVE, None)),
    (functools.partial(local.sgd, 0.1), 'momentum', (*NOT_NUMBERS, *NEGATIVE, 1.0, np.float32(1))),
    (functools.partial(local.sgd, 0.1), 'weight_decay', (*NOT_NUMBERS, *NEGATIVE)),
    (functools.partial(local.sgd, 0.1), 'decay', (*NOT_NUMBERS, *NEGATIVE)),
    (functools.partial(local.sgd, 0.1), 'clip', (*NOT_NUMBERS, *NEGATIVE, 0.0)),
    (server_optimizers.fedavgm, 'lr', (*NOT_NUMBERS, *NEGATIVE)),
    (server_optimizers.fedavgm, 'beta', (*NOT_NUMBERS, *NEGATIVE, 1.0)),
    (server_optimizers.fedadam, 'lr', (*NOT_NUMBERS, *NEGATIVE)),
    (server_optimizers.fedadam, 'b1', (*NOT_NUMBERS, *NEGATIVE, 1.0)),
    (server_optimizers.fedadam, 'b2', (*NOT_NUMBERS, *NEGATIVE, 1.0)),
    (server_optimizers.fedadam, 'tau', (*NOT_NUMBERS, *NEGATIVE, 0.0)),
    (server_optimizers.fedyogi, 'lr', (*NOT_NUMBERS, *NEGATIVE)),
    (server_optimizers.fedadagrad, 'lr', (*NOT_NUMBERS, *NEGATIVE)),
    (aggregators.trimmed_mean, 'share', (*NOT_NUMBERS, *NEGATIVE, 0.5)),
    (aggregators.krum, 'byzantine', (*NOT_WHOLE, None)),
    (functools.partial(aggregators.krum, 1), 'select', (*NOT_WHOLE, 0)),
    (functools.partial(frames.uniform, KEY, classes=3), 'dim', (*NOT_WHOLE, 0)),
    (functools.partial(frames.uniform, KEY, 3), 'classes', (*NOT_WHOLE, 0)),
    (functools.partial(frames.simplex_etf, KEY, classes=3), 'dim', (*NOT_WHOLE, 1)),
    (functools.partial(frames.simplex_etf, KEY, 3), 'classes', (*NOT_WHOLE, 1)),
    (functools.partial(frames.sparse_etf, KEY, 6, 5), 'sparsity', (*NOT_NUMBERS, *NEGATIVE, 1.0)),
    (functools.partial(frames.sparse_etf, KEY, 6, 5), 'norm', (*NOT_NUMBERS, *NEGATIVE, 0.0)),
    (functools.partial(frames.sparse_etf, KEY, 6, 5), 'steps', NOT_WHOLE),
    (heads.cosine, 'scale', (*NOT_NUMBERS, *NEGATIVE, 0.0)),
    (heads.prototypes, 'scale', (*NOT_NUMBERS, *NEGATIVE, 0.0)),
    (heads.etf, 'scale', (*NOT_NUMBERS, *NEGATIVE, 0.0)),
    (heads.etf, 'dim', (*NOT_WHOLE, 0)),
    (functools.partial(moon.projected, toys.tiny), 'dim', (*NOT_WHOLE, 0)),
    (functools.partial(privacy.private, call(fedavg.algorithm), noise_multiplier=1.0, cohort=2), 'clip',
     (*NOT_NUMBERS, *NEGATIVE, 0.0, np.inf)),
    (functools.partial(privacy.private, call(fedavg.algorithm), clip=1.0, cohort=2), 'noise_multiplier',
     (*NOT_NUMBERS, *NEGATIVE)),
    (functools.partial(privacy.private, call(fedavg.algorithm), clip=1.0, noise_multiplier=1.0), 'cohort',
     (*NOT_WHOLE, 0)),
    (functools.partial(privacy.private, clip=1.0, noise_multiplier=1.0, cohort=2), 'algorithm', (toys.task, None)),
    (latest.keep, 'algorithm', (toys.task, None, toys.tiny)),
    (simulate.make_round, 'algorithm', (toys.task, None, toys.tiny, fedavg.algorithm)),
    (functools.partial(simulate.make_round, call(fedavg.algorithm)), 'cohort', (*NOT_WHOLE, 0)),
    (functools.partial(simulate.make_round, call(fedavg.algorithm)), 'chunk', (*NOT_WHOLE, 0)),
    (functools.partial(objective, head=heads.linear(), loss=losses.cross_entropy), 'model',
     (heads.linear(), models.MLP(), toys.task, None)),
    (functools.partial(objective, toys.tiny, loss=losses.cross_entropy), 'head',
     (toys.tiny, losses.cross_entropy, None)),
    (functools.partial(objective, toys.tiny, heads.linear()), 'loss', (None, 'cross_entropy', 1.0)),
    (functools.partial(fedprox.proximal), 'mu', (*NOT_NUMBERS, *NEGATIVE)),
    (functools.partial(metrics.degeneration.prune, jnp.ones((4, 3)), jnp.ones((3, 4), int)), 'share',
     (*NOT_NUMBERS, *NEGATIVE, 1.1)),
]  # fmt: skip


@pytest.mark.parametrize(
    ('fn', 'name', 'value'),
    [
        pytest.param(fn, name, value, id=f'{getattr(fn, "func", fn).__name__}-{name}-{i}')
        for fn, name, values in CALLS
        for i, value in enumerate(values)
    ],
)
def test_other_functions(fn, name, value):
    refused(lambda: fn(**{name: value}), name)


BODIES = {  # models whose features are not [B, D], and what is said
    'images': (lambda params, stats, x, mask, key: (x[:, :, None], stats), 'features [B, D]'),
    'one number': (lambda params, stats, x, mask, key: (x.sum(), stats), 'features [B, D]'),
    'a flat vector': (lambda params, stats, x, mask, key: (x[:, 0], stats), 'features [B, D]'),
    'one row': (lambda params, stats, x, mask, key: (x.sum(0, keepdims=True), stats), 'features [B, D]'),
}


@pytest.mark.parametrize(('features', 'said'), BODIES.values(), ids=BODIES)
def test_features_of_another_rank(data, features, said):
    task = objective(toys.tiny._replace(features=features), heads.linear(), losses.cross_entropy)
    refused(lambda: simulate.init(fedavg.algorithm(task, toys.opt), KEY, data), said)


@pytest.mark.parametrize('loss', [lambda z, y, n: z.mean(), lambda z, y, n: z, lambda z, y, n: None])
def test_losses_that_are_not_one_for_each_example(data, loss):
    task = objective(toys.tiny, heads.linear(), loss)
    refused(lambda: simulate.init(fedavg.algorithm(task, toys.opt), KEY, data), 'one loss for each example')


def test_logits_of_another_shape(data):
    flat = heads.linear()._replace(logits=lambda params, fixed, z: z[:, 0])
    task = objective(toys.tiny, flat, losses.cross_entropy)
    refused(lambda: simulate.init(fedavg.algorithm(task, toys.opt), KEY, data), 'logits [B, C]')


def test_what_is_known_is_checked_inside_jit_too():
    jax.jit(lambda: metrics.collapse.nc1(Z, Y, 3))()
    jax.jit(lambda: checks.finite('x', Z))()
    with pytest.raises(ValueError, match='row 0 and 5 more hold'):
        jax.jit(lambda: checks.finite('x', NAN))()


def test_data_of_more_classes_than_the_head(data):
    algorithm = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN)
    state = simulate.init(algorithm, KEY, data)
    more = data._replace(counts=jnp.pad(data.counts, ((0, 0), (0, 2))))
    refused(lambda: simulate.make_round(algorithm)(KEY, state, more), 'tells 5 classes apart and the data have 7')


def test_how_many_wrong_inputs_these_are():
    """Beside those of the data, which have a file of their own."""
    factories = len(FOUND) * (6 + 6) + 5 * sum('client_opt' in inspect.signature(f).parameters for f in FOUND.values())
    assert len(list(numbers())) + factories + 7 * len(SHAPES) + sum(len(values) for *_, values in CALLS) > 800


GOOD = [
    lambda: local.sgd(jnp.bfloat16(0.1), clip=jnp.float16(1)),
    lambda: local.sgd(np.array(0.1), momentum=0, weight_decay=np.float64(0)),
    lambda: local.sgd(0.1, clip=np.inf),
    lambda: local.sgd(1, decay=True),
    lambda: simulate.make_round(call(fedavg.algorithm), cohort=jnp.int32(2), chunk=np.array(2)),
    lambda: call(fedavg.algorithm, client_opt=lambda round: optax.MultiSteps(optax.sgd(0.1), 2)),
    lambda: federate(np.eye(4, dtype=np.float32), np.arange(4), {'a': [0, 1], 'b': [2, 3]}.values()),
    lambda: federate(np.eye(4, dtype=np.float32), [0, 1, 2, 3], [[0, 1], [2, 3]], np.int64(4)),
    lambda: losses.cross_entropy(jnp.zeros((2, 3)), jnp.array([0, 2], jnp.uint8)),
    lambda: server_optimizers.fedadam(optax.constant_schedule(0.1)),
]


@pytest.mark.parametrize('make', GOOD)
def test_what_is_right_in_another_type_is_taken(make):
    make()


@pytest.mark.parametrize('name', [n for n in FOUND if n.endswith('algorithm')])
def test_traced_numbers_are_taken(data, name):
    """Every float of every factory may be an argument of a compiled round."""
    arguments = inspect.signature(FOUND[name]).parameters
    floats = {
        k: p.default if k not in NEEDED else 1.0
        for k, p in arguments.items()
        if isinstance(p.default, float) or (k in NEEDED and isinstance(NEEDED[k], float))
    }

    def build(values):
        call(FOUND[name], **values)
        return 0.0

    jax.eval_shape(build, {k: jnp.float32(v) for k, v in floats.items()})


def test_labels_beyond_the_logits():
    refused(lambda: losses.cross_entropy(jnp.zeros((2, 3)), jnp.array([0, 7])), 'labels must lie in [0, 3)')


def two(key, server, client, shard):
    """A client that forgets its report."""
    return client, server


LATER = {
    'a penalty that is a name': (lambda: fedavg.algorithm(toys.task, toys.opt, penalty='l2'), 'penalty must be a func'),
    'a penalty of fine-tuning that is a name': (
        lambda: finetune.algorithm(toys.task, toys.opt, penalty='l2'),
        'penalty must be a func',
    ),
    'a penalty of nothing': (
        lambda: played(fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN, penalty=lambda *_: None)),
        'what penalty returns must be one number, not None',
    ),
    **{
        f'a penalty under {module.__name__}': (
            functools.partial(module.algorithm, toys.task, toys.opt, penalty=lambda *_: 0.0, **options),
            r'takes no penalty beside its own work: .* objective.with_term\(task, term\)',
        )
        for module, options in ((fedprox, {'mu': 0.1}), (scaffold, {}), (moon, {'mu': 0.1}), (fedmmd, {}))
    },
    'a term of each example': (
        lambda: played(fedavg.algorithm(with_term(toys.task, lambda v, z, batch: z[:, 0]), toys.opt, plan=toys.PLAN)),
        r'what term returns must be one number, not an array',
    ),
    'a term that sees the server': (
        lambda: with_term(toys.task, lambda v, z, batch, server, client: 0.0),
        r'term must be a function of \(variables, features, batch\)',
    ),
    'a penalty of each example': (
        lambda: played(
            fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN, penalty=lambda v, z, *_: jnp.sum(z**2, 1))
        ),
        r'what penalty returns must be one number, not an array',
    ),
    'a client without a report': (
        lambda: played(fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN)._replace(client=two)),
        r'returns \(client, message, info\), .* a tuple of 2',
    ),
    'a client that is given less': (
        lambda: played(fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN)._replace(client=lambda key, server: key)),
        r'`client` of an algorithm must be a function of \(key, server, client, shard\); .* too many positional',
    ),
    'a server that is given less': (
        lambda: simulate.init(PLAIN._replace(server=lambda server: server), toys.KEY, SINGLE),
        r'`server` of an algorithm must be a function of \(key, server, aggregate\)',
    ),
    'a client that returns another state': (
        lambda: played(PLAIN._replace(client=lambda *args: ({'n': args[0]}, *PLAIN.client(*args)[1:]))),
        r"`client` of an algorithm returns a state of another kind than it was given: .*\(\(\)\).*{'n': ",
    ),
    'a client that returns a wider state': (
        lambda: played(COUNTING._replace(client=lambda *args: (jnp.zeros((2, 3)), *PLAIN.client(*args)[1:]))),
        r'of another kind than it was given: was float32\[3\] and came back as float32\[2,3\]. A state keeps its',
    ),
    'a server that returns nothing': (
        lambda: played(PLAIN._replace(server=lambda key, server, aggregate: None), 2),
        '`server` of an algorithm returns a state of another kind than it was given: .*None',
    ),
    'a server that returns other types': (
        lambda: played(
            PLAIN._replace(
                server=lambda *args: PLAIN.server(*args)._replace(round=jnp.float32(1))  # whose rounds are whole
            ),
            2,
        ),
        r'returns a state of another kind than it was given: .round was int32\[\] and came back as float32\[\]',
    ),
    'a loss without counts': (
        lambda: objective(toys.tiny, heads.linear(), lambda logits, labels: labels),
        r'loss must be a function of \(logits, labels, counts\), as losses.cross_entropy; <lambda>.*: too',
    ),
    'a loss by name': (
        lambda: objective(toys.tiny, heads.linear(), 'cross_entropy'),
        "loss must be a function of .*; not 'cross_entropy'",
    ),
    'a penalty of two': (
        lambda: fedavg.algorithm(toys.task, toys.opt, penalty=lambda v, z: 0.0),
        r'penalty must be a function of .*, as fedprox.proximal\(0.1\); <lambda>\(v, z\): too many',
    ),
    'curves that are a list': (lambda: plots.accuracy_curves([0.1, 0.2]), r'`curves` is \[0.1, 0.2\]: give'),
    'a curve without rounds': (
        lambda: plots.accuracy_curves({'a': [0.1, 0.2, 0.3]}),
        "'a' needs two things, rounds .* got 3",
    ),
    'a curve that is a number': (lambda: plots.accuracy_curves({'a': 0.5}), "'a' needs two things, .* got 0.5"),
    'panels that are a list': (lambda: plots.curve_panels([0.5]), r'`panels` must be title -> name .* not \[0.5\]'),
    'a loss of optax': (
        lambda: simulate.init(
            fedavg.algorithm(
                objective(toys.tiny, heads.linear(), optax.softmax_cross_entropy_with_integer_labels), toys.opt
            ),
            toys.KEY,
            SINGLE,
        ),
        "the loss is called with logits .*, as losses.cross_entropy is, and says: ValueError: Keyword argument 'axis'",
    ),
    'an algorithm that adds nothing up': (
        lambda: simulate.make_round(PLAIN._replace(aggregate=None)),
        '`aggregate` of an algorithm must be an Aggregator, such as aggregators.mean, not NoneType',
    ),
    'test images of another size': (
        lambda: evaluate.generic(
            CNN, simulate.init(CNN, toys.KEY, federate(*images(28), [np.arange(4)])), *images(24), 2
        ),
        r'examples of the shape \(24, 24, 3\), as they come from `preprocess`, or features .*, do not fit .*kernel',
    ),
    'a run for a state': (
        lambda: evaluate.generic(PLAIN, training.Run((), [], 0.0, 0.0), SINGLE.x, SINGLE.y, 5),
        'state must be a State, .* or the state of a training.Run, not Run',
    ),
    'a run for the state of clients': (
        lambda: evaluate.per_client(PLAIN, training.Run((), [], 0.0, 0.0), SINGLE),
        'state must be a State',
    ),
    'a metric by name': (
        lambda: training.run(PLAIN, toys.KEY, (), SINGLE, rounds=1, evaluate='accuracy'),
        r"evaluate must be a function of \(state\); not 'accuracy'",
    ),
    'a partition for clients': (lambda: plots.class_distribution([np.arange(3)]), 'data must be FederatedData'),
    'one width': (
        lambda: models.from_flax(models.MLP(8)).init(toys.KEY, SINGLE.x),
        r'widths are one for each layer, such as MLP\(\(8,\)\)',
    ),
    'a folder that is not there': (
        lambda: saving.save('no/where.safetensors', PLAIN, simulate.init(PLAIN, toys.KEY, SINGLE), SINGLE),
        'no/where.safetensors cannot be written: there is no folder no',
    ),
    'labels with a point': (lambda: federate(SINGLE.x, np.arange(5.0), [range(5)]), r'as by y.astype\(int\)'),
    'a tracker before it is entered': (
        lambda: training.run(PLAIN, toys.KEY, (), SINGLE, rounds=1, on_round=watch.tensorboard('no')),
        r'on_round must be a function of \(row, state\), as .*`watch.tensorboard` entered by `with`;',
    ),
    'one choice': (
        lambda: tuning.fastest(lambda choice: PLAIN, SINGLE, tuning.Choice()),
        'choices must be several of Choice, such as candidates',
    ),
    'one precision': (lambda: tuning.candidates(4, precisions='high'), r"must be several, as in \['high'\]"),
    'a picture without a format': (
        lambda: plots.save(plots.accuracy_curves({'a': ([1], [0.5])}), 'picture'),
        r'names no format: give it an ending, such as picture\.png',
    ),
    'clients of a store by floats': (
        lambda: population.Store(PLAIN, toys.KEY, PLAIN.init(toys.KEY, SINGLE), 3).put(np.ones(1), ()),
        'ids must be different numbers of clients',
    ),
    'no virtual feature': (
        lambda: gaussians.sample(toys.KEY, gaussians.Gaussians(jnp.ones(2), jnp.ones((2, 3)), jnp.ones((2, 3))), 0),
        'samples must be at least 1, not 0',
    ),
    'means of other features': (
        lambda: gaussians.scatter(jnp.ones((4, 3)), jnp.zeros(4, int), jnp.ones(4), jnp.ones((2, 1))),
        r'features of 3 dimensions have no means \(2, 1\)',
    ),
    'labels beyond the means': (
        lambda: gaussians.scatter(jnp.ones((2, 3)), jnp.array([0, 5]), jnp.ones(2), jnp.ones((2, 3)), 'tied'),
        r'y must lie in \[0, 2\)',
    ),
    'scatters of another kind': (
        lambda: gaussians.merge(aggregators.ClassRows(jnp.ones((4, 3, 3)), jnp.ones((4, 3))), jnp.ones((3, 3)), 'full'),
        r"'full' scatters of 3 classes must be \(3, 3, 3\), not \(3, 3\)",
    ),
    'inertia of two': (
        lambda: memory.remember(
            memory.Memory(jnp.ones((2, 3)), jnp.ones(2, bool), jnp.float32(0)),
            aggregators.ClassRows(jnp.ones((2, 3)), jnp.ones(2)),
            2.0,
        ),
        r'inertia must lie in \[0, 1\], not 2',
    ),
    'bytes in another order, on the host': (
        lambda: federate(np.ones((2, 3), '>f4'), np.arange(2), [[0], [1]], host=True),
        'bytes in the order of this machine',
    ),
    'names for labels': (lambda: federate(SINGLE.x, np.array([*'abcde']), [range(5)]), r'np.unique\(y, return_inv'),
}
PLAIN = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN)
COUNTING = PLAIN._replace(init_client=lambda key, server: jnp.zeros(3))
CNN = fedavg.algorithm(
    objective(models.from_flax(models.McMahanCNN()), heads.linear(), losses.cross_entropy), toys.opt, plan=toys.PLAN
)


def images(side):
    return np.zeros((4, side, side, 3), np.uint8), np.arange(4, dtype=np.int32) % 2


def played(algorithm, rounds=1):
    state, round = simulate.init(algorithm, toys.KEY, SINGLE), simulate.make_round(algorithm)
    if rounds > 1:
        return simulate.several(round)(jax.random.split(toys.KEY, rounds), state, SINGLE)
    return round(toys.KEY, state, SINGLE)  # after which a server's state may be of another kind, as those of stages


@pytest.mark.parametrize('what', LATER)
def test_what_people_mistake_is_told_in_their_words(what):
    wrong, said = LATER[what]
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        wrong()


def test_labels_that_begin_with_1_are_told():
    with pytest.warns(UserWarning, match='6 classes, the first of them empty: subtract 1'):
        assert federate(SINGLE.x, np.arange(1, 6), [range(5)]).num_classes == 6
    assert federate(SINGLE.x, np.arange(1, 6), [range(5)], 6).num_classes == 6


def test_labels_of_a_file_that_begin_with_1_are_told(tmp_path):
    x, y = np.zeros((4, 2), np.float32), np.array([1, 2, 1, 2])
    np.savez(tmp_path / 'own.npz', x_train=x, y_train=y, x_test=x, y_test=y)
    with pytest.warns(UserWarning, match='3 classes, the first of them empty: subtract 1'):
        assert load_npz(tmp_path / 'own.npz').num_classes == 3


@pytest.mark.parametrize('dtype', [np.int32, np.float32, np.uint8])
@pytest.mark.parametrize('host', [False, True])
def test_pixels_that_nobody_scales_are_told(dtype, host):
    pixels = np.arange(5 * 64).reshape(5, 8, 8, 1) % 256
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        for x in (pixels, pixels % 2, pixels.reshape(5, 64)):  # the others may be something else
            federate(x.astype(dtype), np.arange(5), [range(5)], host=host)
        federate((pixels / 255).astype(np.float32), np.arange(5), [range(5)], host=host)
    assert len(told) == (dtype is not np.uint8)
    assert all('`x` holds what look like pixels from 0 to 255' in str(w.message) for w in told)


@pytest.mark.parametrize(
    ('call', 'said'),
    [
        (lambda: metrics.degeneration.masked_share(jnp.ones((4, 3)), jnp.zeros((3, 6), int)), 'order [C, D]'),
        (lambda: metrics.degeneration.prune(jnp.ones((4, 3)), jnp.zeros((1, 4), int), 0.5), 'order [C, D]'),
        (lambda: frames.frame_quality(jnp.ones((3, 1))), 'at least two columns'),
        (lambda: metrics.collapse.nc3(jnp.ones((4, 3)), jnp.zeros(4, int), jnp.ones(3)), 'the shape [D, C]'),
        (lambda: evaluate.among([5]), 'k must be'),
        (lambda: evaluate.per_client(PLAIN, simulate.init(PLAIN, KEY, SINGLE), SINGLE, personal='no'), 'personal'),
        (lambda: metrics.similarity.client_prototypes(toys.task, (), SINGLE), 'variables'),
    ],
)
def test_arguments_of_measures(call, said):
    refused(call, said)


def test_a_model_with_other_layers(data):
    """Another depth of the same network, not another width."""
    two, one = (
        fedavg.algorithm(
            objective(models.from_flax(models.MLP(widths)), heads.linear(), losses.cross_entropy), toys.opt
        )
        for widths in ((8, 8), (8,))
    )
    refused(lambda: evaluate.per_client(two, simulate.init(one, KEY, data), data), 'other layers')


def test_the_same_measure_for_the_same_number():
    assert evaluate.among(jnp.int32(5)) is evaluate.among(5)


def test_means_of_nothing_and_masks_of_another_shape():
    assert masked_mean(jnp.zeros(0), None) == 0
    refused(lambda: masked_mean(jnp.ones(3), jnp.ones((3, 1), bool)), 'mask')


@pytest.mark.parametrize(
    ('call', 'said'),
    [
        (lambda: moon.contrast(jnp.ones((2, 3)), jnp.ones((2, 3)), jnp.ones((2, 3)), 0.0), 'temperature'),
        (lambda: testing.clients(sizes=(-1, 5)), 'sizes'),
        (lambda: experiments.Setting(dataset='digits', seed=2**32), 'below 2^32'),
        (lambda: checks.seeded(2**32), 'below 2^32'),
        (lambda: next(host.feed(federate(SINGLE.x, SINGLE.y, [[0], [1]], host=True), [KEY], cohort=0)), 'cohort'),
        (lambda: folders.load_folder('nowhere', channels=True), 'channels'),
        (lambda: pipeline.run(experiments.Setting(dataset='digits'), 'nowhere', keep_personal='no'), 'keep_personal'),
        (
            lambda: seeds.run([experiments.Setting(dataset='digits', seed=k) for k in (0, 1)], ['x', './x']),
            'a folder of its own',
        ),
    ],
)
def test_numbers_that_mean_nothing(call, said):
    refused(call, said)


MEANS = aggregators.ClassRows(jnp.ones((3, 1)), jnp.ones(3))
ROWS = jnp.ones((3, 4)), jnp.zeros(3, int), jnp.ones(3)


@pytest.mark.parametrize(
    ('call', 'said'),
    [
        (lambda: finetune.algorithm(toys.task, toys.opt, parts=()), 'parts must name'),
        (lambda: fednh.follow(jnp.ones((3, 4)), MEANS._replace(rows=jnp.ones((3, 4))), 2.0), 'rho'),
        (lambda: fednh.follow(jnp.ones((3, 4)), MEANS, 0.5), 'do not follow means (3, 1)'),
        (lambda: classwise.scatter(*ROWS, jnp.ones((2, 1))), 'no means (2, 1)'),
        (lambda: gaussians.sample(KEY, gaussians.Gaussians(*[jnp.ones((2, 3))] * 3), 4, ridge=-1), 'ridge'),
        (lambda: metrics.similarity.sliced_wasserstein(KEY, ROWS[0], jnp.ones((3, 4, 1))), 'covariances (3, 4, 4)'),
        (lambda: metrics.similarity.sliced_wasserstein(KEY, ROWS[0], jnp.ones((3, 1))), 'covariances (3, 4, 4)'),
        (lambda: losses.dot_regression(*ROWS[:2], target=jnp.ones((3, 1))), 'target'),
        (lambda: losses.positive(*ROWS[:2], target=jnp.ones((3, 1))), 'target'),
        (lambda: memory.tallying(toys.task, 0), 'epochs'),
        (lambda: simulate.make_round(PLAIN, mesh=3), 'devices.mesh'),
        (lambda: simulate.choose(KEY, 5, 0), 'cohort'),
        (lambda: experiments.Setting(dataset=['digits']), 'must be one of'),
        (lambda: seeds.run([], []), 'no settings'),
        (lambda: plots.accuracy_curves({'a': ([0, 1, 2], np.zeros((0, 3)))}), 'shapes'),
    ],
)
def test_shapes_and_ranges_that_would_pass_silently(call, said):
    refused(call, said)


@pytest.mark.parametrize('method', ['fedaws', 'fedloge'])
def test_a_base_that_sends_no_model(method, data):
    if method == 'fedaws':
        algorithm = fedaws.algorithm(toys.task, toys.opt, base=solo.algorithm)
    else:
        model = models.from_flax(models.MLP((8,)))
        algorithm = fedloge.algorithm(model, toys.opt, frame=frames.simplex_etf, base=solo.algorithm)
    state = simulate.init(algorithm, KEY, data)
    refused(lambda: simulate.make_round(algorithm)(KEY, state, data), 'such as fedprox')


@pytest.mark.parametrize('made', [lambda z: (z, z), lambda z: (z, z[:, :2]), lambda z: {'features': z}])
def test_models_of_several_outputs(made, data):
    model = models.from_functions(lambda key, x: jnp.ones((x.shape[1], 3)), lambda w, x: made(x @ w))
    algorithm = fedavg.algorithm(objective(model, heads.linear(), losses.cross_entropy), toys.opt)
    refused(lambda: simulate.init(algorithm, KEY, data), 'must return one array, features [B, D]')


def test_messages_without_a_field(data):
    algorithm = fedavg.algorithm(toys.task, toys.opt)
    sends_dict = algorithm._replace(
        client=lambda *args: (lambda c, m, i: (c, m._asdict(), i))(*algorithm.client(*args))
    )
    state = simulate.init(sends_dict, KEY, data)
    refused(lambda: simulate.make_round(sends_dict)(KEY, state, data), 'a NamedTuple with the fields delta, stats')


def test_labels_that_are_measurements_or_rows():
    x = np.zeros((4, 2), np.float32)
    refused(lambda: federate(x, np.array([0.3, 1.7, 2.2, 0.9]), [[0, 1], [2, 3]]), 'classes, no measurements')
    refused(lambda: federate(x, np.array([0.0, 1.0, 2.0, 1.0]), [[0, 1], [2, 3]]), 'as by y.astype(int)')
    refused(lambda: federate(x, np.eye(4, dtype=int), [[0, 1], [2, 3]]), 'y.argmax(1)')


def test_states_of_another_population(data):
    algorithm = scaffold.algorithm(toys.task, toys.opt)
    state = simulate.init(algorithm, KEY, data)
    refused(lambda: simulate.make_round(algorithm)(KEY, state, SINGLE), 'the state has')
    kept = population.init(algorithm, KEY, data)
    refused(lambda: devices.place(devices.mesh(), kept, data), 'kept off the devices')


def test_clients_by_name_and_by_number(tmp_path):
    arrays = {f'{kind}_{part}': [0, 1] for kind in 'xy' for part in ('train', 'test')}
    np.savez(tmp_path / 'mixed.npz', **arrays, clients_train=['a', 'b'], clients_test=[0, 1])
    refused(lambda: load_npz(tmp_path / 'mixed.npz'), 'save both as names')
