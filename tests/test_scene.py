"""What a setting says reaches the data, the model, the optimizers and the method, and the seed all that is drawn."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from test_recipes import of

from fedjax_nc import aggregators, data, evaluate, local, server_optimizers, simulate, tree
from fedjax_nc import algorithms as alg
from fedjax_nc.data import femnist, images
from fedjax_nc.experiments import Setting, networks, parts, pipeline, runner, scene, seeds, traffic
from fedjax_nc.experiments.measures import Measures
from fedjax_nc.experiments.setting import PIXELS

SMALL = {'dataset': 'digits', 'clients': 4, 'rounds': 2, 'local_epochs': 1, 'partition': 'iid'}


@pytest.fixture(scope='module')
def digits():
    return data.load_dataset('digits')


def built(**given):
    """A recipe of a setting that looks at no data."""
    return scene.build(Setting(**{'dataset': 'digits', **given}), None)


# Optimizers, models and methods


def test_rates_and_all_beside_them_reach_the_optimizers(monkeypatch):
    calls, real = [], local.sgd
    monkeypatch.setattr(scene.local, 'sgd', lambda *given: calls.append(given) or real(*given))
    built(lr=0.3, momentum=0.1, weight_decay=0.2, lr_decay=0.5, clip=3.0, personal_momentum=0.4)
    assert calls == [(0.3, 0.1, 0.2, 0.5, 3.0), (0.3, 0.4, 0.0, 0.5)]


def test_weights_rounds_and_the_frame_of_a_network_reach_the_method():
    assert built(algorithm='fedavg', weigh='alike').told['aggregate'] == 'uniform'
    assert built(algorithm='fedavg', weigh='examples').told['aggregate'] == 'mean'
    assert built(algorithm='fedetf_gmv', rounds=50).told['warm'] == 30
    told = built(algorithm='fedetf', model='cnn').told
    assert (told['dim'], told['scale']) == (64, 10.0)  # of the small network of FedETF's table


def test_what_is_done_to_pixels_reaches_the_pipeline(monkeypatch):
    seen, real = [], images.pipeline
    monkeypatch.setattr(images, 'pipeline', lambda *look, **how: seen.append((look, how)) or real(*look, **how))
    built(dataset='cifar10', pixels='cifar10_fednh', crop=4, flip=True, crop_mode='reflect')
    assert seen == [(images.CIFAR10_FEDNH, {'crop': 4, 'flip': True, 'crop_mode': 'reflect'})]


def test_looks_of_pixels_are_those_of_their_names():
    assert all(PIXELS[name] is getattr(images, name.upper()) for name in PIXELS)


def test_cohorts_are_rounded():
    assert Setting(clients=10, participation=0.29).cohort == 3
    assert Setting(clients=10, participation=0.31).cohort == 3


def test_norm_and_precision_reach_models_of_the_library():
    x = jnp.zeros((2, 32, 32, 3), jnp.uint8)
    for name in ('resnet20', 'mobilenet'):
        for norm in ('batch', 'group'):
            stats = jax.eval_shape(networks.build(name, norm=norm).init, toys.KEY, x)[1]
            assert bool(jax.tree.leaves(stats)) == (norm == 'batch')
    for precision in ('float32', 'bfloat16'):
        model = networks.build('mlp', precision=precision)
        params, stats = model.init(toys.KEY, x)
        text = str(jax.make_jaxpr(lambda p, s, model=model: model.features(p, s, x, None, None))(params, stats))
        assert ('bf16' in text) == (precision == 'bfloat16')


# Seeds


def indexed(clients):
    return np.asarray(clients.index), np.asarray(clients.size)


def same(a, b):
    for u, v in zip(indexed(a), indexed(b), strict=True):
        np.testing.assert_array_equal(u, v)


@pytest.mark.parametrize('seed', [0, 1])
def test_the_seed_draws_which_examples_there_are(digits, seed):
    some = scene.load(Setting(**SMALL, max_examples=200, seed=seed))[0]
    np.testing.assert_array_equal(some.x_train, data.subset(digits, 200, seed).x_train)
    tail = scene.load(Setting(**SMALL, imbalance=10, seed=seed))[0]
    want = data.keep(digits, data.long_tail(digits.y_train, 10, seed=seed))
    np.testing.assert_array_equal(tail.x_train, want.x_train)
    assert not np.array_equal(some.x_train, data.subset(digits, 200, 2).x_train)


@pytest.mark.parametrize('seed', [0, 1])
def test_the_seed_draws_what_is_held_back(digits, seed):
    clients = data.federate(digits.x_train, digits.y_train, data.iid(digits.y_train, 4, seed=seed), 10)
    _, train, tests = scene.load(Setting(**SMALL, tests='split', test_share=0.3, seed=seed))
    for found, want in zip((train, tests), data.split(clients, 0.3, seed=seed), strict=True):
        same(found, want)
    _, train, _ = scene.load(Setting(**SMALL, tests='common', validation=0.2, seed=seed))
    same(train, data.split(clients, 0.2, seed=seed)[0])
    dataset, train, tests = scene.load(Setting(**SMALL, tests='matched', seed=seed))
    x, y = dataset.x_test, dataset.y_test
    same(tests, data.matched_tests(train.counts, x, y, total=len(y), seed=seed))


def test_the_seed_draws_the_noise_of_clients(digits):
    divided = data.iid(digits.y_train, 4, seed=1)
    pool = scene.load(Setting(**SMALL, features='noisy', noise=0.1, seed=1))[1].x
    want = data.add_noise(digits.x_train, divided, 0.1, seed=1)
    np.testing.assert_allclose(pool, 2 * want - 1, atol=1e-6)


def test_the_seed_draws_first_models_cohorts_and_stages(digits):
    setting = Setting(**SMALL, max_examples=100, seed=5)
    measures = Measures(setting, built(**SMALL), scene.load(setting))
    found = jnp.stack([measures.k_init, measures.k_train, measures.k_tune])
    np.testing.assert_array_equal(
        jax.random.key_data(found), jax.random.key_data(jax.random.split(jax.random.key(5), 3))
    )


def test_clients_are_split_by_draws_of_their_own():
    """Also where they hold as many examples."""
    x, y = np.arange(80, dtype=np.float32)[:, None], np.tile(np.arange(2), 40)
    clients = data.federate(x, y, [np.arange(40), np.arange(40, 80)])
    _, tests = data.split(clients, 0.25, seed=0)
    first, second = (sorted(np.asarray(tests.index[k])[:10] - 40 * k) for k in (0, 1))
    assert first != second
    matched = data.matched_tests(np.array([[5, 5], [5, 5]]), x, y, total=20, seed=0)
    first, second = (sorted(np.asarray(matched.index[k])[: int(matched.size[k])]) for k in (0, 1))
    assert first != second


# Metrics


def test_groups_are_by_training_examples_and_many_come_first(monkeypatch):
    setting = Setting(**SMALL, imbalance=10, tests='common')
    measures = Measures(setting, built(**SMALL), scene.load(setting))
    table = np.diag(np.arange(10)) + 1
    monkeypatch.setattr(measures, 'table', lambda *given: jnp.asarray(table))
    counts = np.asarray(measures.train.counts).sum(0)
    want = evaluate.group_accuracy(table, evaluate.groups(counts))
    assert len(set(want.tolist())) == 3
    got = measures.general(measures.begun())
    np.testing.assert_array_equal([got[name] for name in ('many', 'medium', 'few')], want)


@pytest.mark.slow
def test_what_ccvr_tells_is_of_the_models_that_it_names(tmp_path):
    given = {**SMALL, 'partition': 'dirichlet', 'alpha': 0.2, 'tests': 'common', 'lr': 0.1, 'rounds': 8}
    setting = Setting(**given, algorithm='ccvr', seed=1)
    measures = Measures(setting, scene.build(setting, None), loaded := scene.load(setting))
    run = pipeline.run(setting, tmp_path / 'run', progress=False)
    state = simulate.init(measures.recipe.train, measures.k_init, loaded[1])
    for t in range(8):
        key = jax.random.fold_in(measures.k_train, t)
        state, _ = simulate.make_round(measures.recipe.train, cohort=setting.cohort)(key, state, loaded[1])
    before = float(evaluate.accuracy(measures.table(measures.recipe.train, state)))
    after = float(evaluate.accuracy(measures.table(*measures.delivered(state))))
    assert abs(before - after) > 0.003
    metrics = measures.general(state)
    np.testing.assert_allclose([metrics['accuracy_trained'], metrics['accuracy']], [before, after], atol=1e-6)
    np.testing.assert_allclose(run['personal_accuracy_before'], run['global_accuracy'], atol=1e-6)
    task = scene.build(dataclasses.replace(setting, algorithm='fedavg'), None).task  # without Tukey's transformation
    bound = alg.ccvr.oracle(measures.k_tune, task, state.server, loaded[1])
    oracle = measures.table(measures.recipe.train, state._replace(server=bound))
    np.testing.assert_allclose(run['global_accuracy_oracle'], evaluate.accuracy(oracle), atol=1e-6)
    assert not np.isclose(run['global_accuracy_oracle'], [before, after], atol=0.003).any()


@pytest.mark.slow
def test_models_that_clients_keep_are_told_beside_those_of_the_stage():
    """FedLoGe realigns what clients have kept; those who never took part have nothing to tell."""
    given = {**SMALL, 'partition': 'dirichlet', 'alpha': 0.3, 'rounds': 1, 'clients': 6, 'participation': 0.5}
    setting = Setting(**given, algorithm='fedloge')
    measures = Measures(setting, scene.build(setting, None), loaded := scene.load(setting))
    state, _ = simulate.make_round(measures.recipe.train, cohort=3)(
        jax.random.fold_in(measures.k_train, 0), measures.begun(), loaded[1]
    )
    told, _, _ = measures.personal(state, measures.delivered(state))
    tables = np.array(evaluate.per_client(measures.recipe.train, state, loaded[2]))
    took = np.array(measures.took_part(state))
    each = np.trace(tables, axis1=1, axis2=2) / np.maximum(tables.sum((1, 2)), 1)
    weighed = each[took & (tables.sum((1, 2)) > 0)].mean()
    np.testing.assert_allclose(told['personal_accuracy_trained'], weighed, rtol=1e-6)
    assert not np.isclose(weighed, each[tables.sum((1, 2)) > 0].mean(), rtol=1e-3)
    assert not np.isclose(weighed, [told['personal_accuracy'], told['personal_accuracy_before']], rtol=1e-3).any()


# Recipes


@pytest.mark.parametrize(
    ('algorithm', 'options'),
    [
        ('fednh', {'scale': 30.0, 'learn_scale': False, 'unit_means': False}),
        ('feduh', {'learn_scale': False}),
        ('creff', {'bias': True}),
    ],
)
def test_stages_have_the_head_that_options_make(algorithm, options):
    setting = Setting(**SMALL, max_examples=200, algorithm=algorithm, options=options)
    assert scene.misfit(setting, scene.load(setting)) is None


@pytest.mark.parametrize(
    ('name', 'options', 'told'),
    [
        ('fedrep', {}, {'head_epochs': toys.PLAN.epochs}),
        ('ratioloss', {}, {'cap': toys.CLASSES}),
        ('ccvr', {'base': 'fedprox'}, {'mu': 0.001}),
    ],
)
def test_methods_are_told_what_their_recipe_says(data, name, options, told):
    recipe = of(name, data, options=options)
    assert {name: recipe.told[name] for name in told} == told


def test_stages_have_the_plan_of_training(data, monkeypatch):
    plans = []

    def watched(real):
        return lambda *given, plan, **more: plans.append(plan) or real(*given, plan=plan, **more)

    for module in (alg.fedbabu, alg.fedetf):
        monkeypatch.setattr(module, 'personalize', watched(module.personalize))
    for name in ('fedbabu', 'fedetf'):
        of(name, data)
    assert plans == [toys.PLAN] * 2


def test_calibration_has_its_samples_and_fedloge_its_variants(data, monkeypatch):
    seen, calibrate, realign = {}, alg.ccvr.calibrate, alg.fedloge.realign
    monkeypatch.setattr(
        alg.ccvr, 'calibrate', lambda *given, **how: seen.update(samples=how['samples']) or calibrate(*given, **how)
    )
    made = []
    monkeypatch.setattr(alg.fedloge, 'realign', lambda *given, **how: made.append(how) or realign(*given, **how))
    of('ccvr', data, options={'samples': 500})
    of('fedloge', data)
    assert seen == {'samples': 500}
    said = [{name: value for name, value in how.items() if name != 'plan'} for how in made]
    assert said == [{'mode': 'released'}, {'finetune_epochs': 15}, {}]


def test_the_length_of_gmvs_frame_is_an_option(data):
    logits = []
    for options in ({}, {'scale': 1.6}):
        train = of('fedetf_gmv', data, options=options).train
        logits.append(train.predict(train.init(toys.KEY, data), None, data.x[:9]))
    np.testing.assert_allclose(logits[1], 1.6 * logits[0], rtol=1e-5)


def test_fedrod_has_a_network_or_heads_of_its_clients(data):
    private, shared = (of('fedrod', data, options={'personal': kind}) for kind in ('linear', 'hyper'))
    params = [jax.eval_shape(recipe.train.init, toys.KEY, data).variables.params for recipe in (private, shared)]
    assert [sorted(p['personal']) for p in params] == [['w'], ['in', 'out']]


def test_server_optimizers_by_name_are_those_of_their_names():
    params = {'w': jnp.array([1.0, -2.0])}
    for name in ('fedavgm', 'fedadagrad', 'fedadam', 'fedyogi'):
        ends = []
        for opt in (parts.SERVER_OPTIMIZERS[name](0.1, 0.5), getattr(server_optimizers, name)(0.1, 0.5)):
            state, p = opt.init(params), params
            for g in (1.0, -0.5, 0.25):
                update, state = opt.update({'w': jnp.array([g, 3 * g])}, state, p)
                p = jax.tree.map(jnp.add, p, update)
            ends.append(p['w'])
        np.testing.assert_allclose(*ends, rtol=1e-6)


def test_the_gaussian_frame_is_of_standard_normal_numbers():
    key = jax.random.key(0)
    gaussian = parts.FRAMES['gaussian'](key, 64, 50)
    np.testing.assert_allclose(np.std(gaussian), 1.0, atol=0.05)


def test_accuracies_of_summaries_are_told_in_percent():
    assert runner.value({'personal_accuracy_std': 0.1}, 'personal_accuracy_std') == pytest.approx(10)
    assert runner.value({'global_accuracy': 0.5}, 'global_accuracy') == pytest.approx(50)


def test_seeds_of_ratio_loss_are_no_one_program(tmp_path):
    settings = [Setting(**SMALL, algorithm='ratioloss', seed=s) for s in (0, 1)]
    with pytest.raises(ValueError, match='one by one'):
        seeds.run(settings, [tmp_path / str(s.seed) for s in settings], progress=False)
    assert not list(tmp_path.iterdir())


# Runs


def test_what_never_moves_is_sent_once_to_every_client():
    setting = Setting(**{**SMALL, 'clients': 10, 'rounds': 3}, participation=0.5)
    said = pipeline.sent(setting, traffic.Traffic(down=5, up=7, once=100), traffic.Traffic(down=11, up=13, once=17))
    assert said == {
        'client_down': 5, 'client_up': 7, 'client_once': 100, 'round_down': 25, 'round_up': 35,
        'calibration_down': 10 * 28, 'calibration_up': 130, 'down': 3 * 25 + 10 * 100 + 280, 'up': 3 * 35 + 130,
    }  # fmt: skip


def test_nothing_but_rounds_and_evaluations_may_differ_in_a_run_that_goes_on(tmp_path):
    setting = Setting(**SMALL, algorithm='fedavg')
    pipeline.write(tmp_path / 'config.json', setting.plain())
    for name, other in {
        'seed': 7, 'lr': 0.5, 'lr_decay': 0.5, 'momentum': 0.1, 'weight_decay': 0.1, 'clip': 1.0, 'batch_size': 7,
        'local_epochs': 7, 'participation': 0.5, 'eval_last': 7, 'test_share': 0.5, 'weigh': 'alike', 'server_lr': 0.5,
        'personal_momentum': 0.1, 'max_examples': 300, 'personal': 'latest', 'head': 'unbiased',
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=f'{name} was'):
            pipeline.settle(dataclasses.replace(setting, **{name: other}), tmp_path, resume=True)
    pipeline.settle(dataclasses.replace(setting, rounds=9, eval_every=3), tmp_path, resume=True)


def test_fedprox_stays_near_the_server_while_models_are_made_personal(data):
    moved = []
    for mu in (0.0, 3.0):
        stage = of('fedprox', data, options={'mu': mu}).personalize
        server = of('fedprox', data).train.init(toys.KEY, data)
        mine = jax.jit(stage.client)(toys.KEY, server, stage.init_client(toys.KEY, server), data.shard(0))[0]
        moved.append(tree.sqdist(mine.params, server.variables.params))
    assert moved[1] < 0.5 * moved[0]


def test_the_body_stays_while_ccvrs_head_is_made_personal(data):
    recipe = of('ccvr', data)
    server = recipe.train.init(toys.KEY, data)
    stage = recipe.personalize
    mine = jax.jit(stage.client)(toys.KEY, server, stage.init_client(toys.KEY, server), data.shard(0))[0]
    toys.same(mine.params['body'], server.variables.params['body'])
    assert float(tree.sqdist(mine.params['head'], server.variables.params['head'])) > 0


def test_every_byte_of_a_writers_images_comes_back():
    x = np.resize(np.round(np.arange(256) / 255, 4), 784)  # as files have them that were written with few digits
    content = {'users': ['a'], 'num_samples': [1], 'user_data': {'a': {'x': [x.tolist()], 'y': [3]}}}
    ((_, pixels, _),) = femnist._examples(content)
    np.testing.assert_array_equal(pixels.ravel()[:256], np.arange(256))


def test_stages_tune_by_the_optimizer_of_training(data):
    recipe = of('fedavg', data, personal_opt=local.sgd(0.0))
    server, stage = recipe.train.init(toys.KEY, data), recipe.personalize
    mine = jax.jit(stage.client)(toys.KEY, server, stage.init_client(toys.KEY, server), data.shard(0))[0]
    assert float(tree.sqdist(mine.params, server.variables.params)) > 1e-4


def test_frames_of_a_projection_have_its_dimension(data):
    for head in ('etf', 'projected_sparse_etf'):
        v = of('fedavg', data, head=head, dim=7).train.init(toys.KEY, data).variables
        assert v.fixed['v'].shape == (7, toys.CLASSES)


def test_weights_of_clients_are_those_of_statistics_too():
    wanted = {'examples': aggregators.mean, 'alike': aggregators.uniform}
    for name, mean in wanted.items():
        assert parts.WEIGHTS[name] == {'aggregate': mean, 'aggregate_stats': mean}
