"""Settings as plain data, and what the pipeline makes of them."""

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_nc import evaluate, experiments, heads, local, losses, models, simulate, training
from fedjax_nc.algorithms import finetune
from fedjax_nc.base import Still
from fedjax_nc.experiments import Setting, command, pipeline, recipes, scene
from fedjax_nc.experiments.measures import Measures
from fedjax_nc.objective import objective

SMALL = {'dataset': 'digits', 'clients': 6, 'rounds': 2, 'local_epochs': 1}


class TestSetting:
    def test_is_the_same_after_a_file(self, tmp_path):
        setting = Setting(**SMALL, algorithm='fedprox', options={'mu': 0.5}, clip=3.0, partition='shards')
        (tmp_path / 'a.json').write_text(json.dumps(setting.plain()))
        lines = [f'{k} = {json.dumps(v)}' for k, v in SMALL.items()]
        lines += ['algorithm = "fedprox"', 'clip = 3.0', 'partition = "shards"', '[options]', 'mu = 0.5']
        (tmp_path / 'a.toml').write_text('\n'.join(lines))
        for name in ('a.json', 'a.toml'):
            assert Setting.read(tmp_path / name) == setting
            assert Setting.read(tmp_path / name).digest == setting.digest

    def test_is_the_same_whatever_its_numbers_and_sequences_are(self, tmp_path):
        given = {'dataset': 'digits', 'algorithm': 'fedprox', 'options': {'anchored': ('head',), 'mu': np.float64(0.5)}}
        setting = Setting(**given, seed=np.int64(1), clients=np.int32(4), lr=np.float64(0.1), alpha=jnp.int32(1))
        plain = given | {'options': {'anchored': ['head'], 'mu': 0.5}}
        assert setting == Setting(**plain, seed=1, clients=4, lr=0.1, alpha=1)
        assert Setting(**json.loads(json.dumps(setting.plain()))) == setting
        assert setting.digest == Setting(**plain, seed=1, clients=4, lr=0.1, alpha=1.0).digest

    def test_what_has_a_default_is_resolved(self):
        assert (Setting().model, Setting().lr, Setting().partition) == ('resnet20', 0.04, 'dirichlet')
        assert (Setting(dataset='digits').model, Setting(dataset='cifar100').lr) == ('mlp', 0.01)
        assert Setting(imbalance=10).partition == 'dirichlet_draws'
        assert Setting(clients=30, participation=0.01).cohort == 1

    def test_its_digest_names_every_difference_and_nothing_else(self):
        seen = {Setting().digest}
        other = {'dataset': 'digits', 'partition': 'iid', 'tests': 'common', 'model': 'cnn', 'norm': 'group',
                 'precision': 'bfloat16', 'pixels': 'cifar10_fednh', 'crop_mode': 'reflect', 'flip': True,
                 'algorithm': 'fedavg', 'options': {'a': 1}, 'head': 'linear', 'loss': 'positive', 'features': 'noisy',
                 'personal': 'latest', 'weigh': 'alike', 'server_optimizer': 'sgd', 'server_momentum': 0.5,
                 'participation': 0.5, 'lr_decay': 0.5, 'momentum': 0.5, 'personal_momentum': 0.5, 'weight_decay': 0.5,
                 'test_share': 0.5, 'validation': 0.5, 'loading': {'label': 'y'}, 'probes': ['collapse']}  # fmt: skip
        for field in dataclasses.fields(Setting):
            own = {'dataset': 'own.csv'} if field.name == 'loading' else {}  # has a meaning for files alone
            seen.add(Setting(**own, **{field.name: other.get(field.name, 7)}).digest)
        assert len(seen) == 1 + len(dataclasses.fields(Setting))
        assert Setting(**Setting().plain()).digest == Setting().digest  # what is said need not be left out
        same = 'from fedjax_nc.experiments import Setting; print(Setting().digest)'
        told = subprocess.run([sys.executable, '-c', same], capture_output=True, text=True, check=True).stdout.strip()
        assert told == Setting().digest

    @pytest.mark.parametrize(
        ('wrong', 'said'),
        [
            ({'dataset': 'imagenet'}, 'dataset must be one of digits, cifar10'),
            ({'algorithm': 'fedfoo'}, 'algorithm must be one of fedavg'),
            ({'model': 'vit'}, 'model must be one of mlp'),
            ({'partition': 'stars'}, 'partition must be one of dirichlet'),
            ({'weigh': 'size'}, 'weigh must be one of published, examples, alike'),
            ({'clients': 0}, 'clients must be at least 1'),
            ({'rounds': 2.5}, 'rounds must be a whole number'),
            ({'alpha': float('nan')}, 'alpha must be finite'),
            ({'lr': -1}, 'lr must be positive'),
            ({'momentum': 1}, 'momentum must lie in'),
            ({'participation': 0}, 'participation must lie in'),
            ({'test_share': 1}, 'test_share must lie in'),
            ({'seed': -1}, 'seed must be at least 0'),
            ({'flip': 1}, 'flip must be true or false'),
            ({'options': ['mu']}, 'options must name arguments'),
            ({'eval_last': 0}, 'eval_last must be at least 1'),
            ({'dataset': 'cifar10.np'}, 'or NAME.npz'),
            ({'server_momentum': 1}, 'server_momentum must lie in'),
            ({'learning_rate': 1}, 'no setting is called learning_rate'),
        ],
    )
    def test_wrong_ones_are_refused_in_one_line(self, wrong, said, tmp_path):
        (tmp_path / 'a.json').write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=said) as caught:
            Setting.read(tmp_path / 'a.json')
        assert '\n' not in str(caught.value)
        assert 'a.json: ' in str(caught.value)

    @pytest.mark.parametrize('name', ['a.json', 'a.toml'])
    def test_what_is_written_is_read_back(self, name, tmp_path):
        setting = Setting(algorithm='ditto', options={'lam': 0.5, 'clip': 1e9}, dataset='mine.csv',
                          loading={'label': 'kind of "tree"', 'columns': ['a', 'b\n']}, flip=True)  # fmt: skip
        setting.write(tmp_path / name)
        assert Setting.read(tmp_path / name) == setting
        setting.write(tmp_path / name)
        assert [path.name for path in tmp_path.iterdir()] == [name]

    def test_toml_has_no_word_for_none(self, tmp_path):
        setting = Setting(algorithm='fedprox', options={'anchored': None})
        with pytest.raises(ValueError, match=r'a\.toml: .*NoneType.*name it \.json'):
            setting.write(tmp_path / 'a.toml')
        assert not list(tmp_path.iterdir())
        setting.write(tmp_path / 'a.json')
        assert Setting.read(tmp_path / 'a.json') == setting

    @pytest.mark.parametrize('text', ['{', '[1]', '3'])
    def test_files_that_are_none_are_named(self, text, tmp_path):
        for name in ('a.json', 'a.toml'):
            (tmp_path / name).write_text(text)
            with pytest.raises(ValueError, match=name):
                Setting.read(tmp_path / name)


@pytest.mark.parametrize(
    ('flags', 'instead'),
    [
        ('--classes-per-client 2', '--partition shards'),
        ('--alpha 0.5 --partition iid', '--partition dirichlet_draws'),
        ('--most-classes 4 --partition shards', '--partition uneven_classes'),
        ('--exponent 1', '--partition power_law'),
        ('--min-size 5 --partition iid', '--partition dirichlet_draws'),
        ('--noise 0.2', '--features noisy'),
        ('--test-share 0.2 --tests common', '--tests split'),
        ('--norm group', '--model resnet20'),
        ('--weigh alike --algorithm solo', '--algorithm fedavg'),
    ],
)
def test_flags_that_would_change_nothing_are_refused(flags, instead):
    argv = ['--dataset', 'digits', *flags.split()]
    with pytest.raises(ValueError, match=f'{argv[2]} changes nothing with '):
        command.setting_of(command.arguments(argv, 'cifar.py', ''))
    command.setting_of(command.arguments([*argv, *instead.split()], 'cifar.py', ''))


def given(*argv):
    return command.setting_of(command.arguments(argv, 'cifar.py', ''))


def test_what_a_program_wrote_by_default_is_no_choice_beside_flags(tmp_path):
    """The config of one run, under flags for another: heads, rates and the like are those of the other."""
    Setting(dataset='cifar10', algorithm='fedetf').write(tmp_path / 'config.json')
    file = ['--setting', str(tmp_path / 'config.json')]
    for flags in (
        ['--algorithm', 'fedavg'], ['--dataset', 'digits'], ['--server-optimizer', 'fedadam'],
        ['--dataset', 'cifar100', '--imbalance', '100'], ['--rounds', '3'],
    ):  # fmt: skip
        alone = [] if '--algorithm' in flags else ['--algorithm', 'fedetf']
        assert given(*file, *flags) == given('--dataset', 'cifar10', *alone, *flags)
    # What was chosen, or written by a person, stays.
    Setting(dataset='cifar10', algorithm='fedetf', head='linear', lr=0.5).write(tmp_path / 'config.json')
    chosen = given(*file, '--algorithm', 'fedavg', '--dataset', 'digits')
    assert (chosen.head, chosen.lr, chosen.model) == ('linear', 0.5, 'mlp')
    (tmp_path / 'mine.toml').write_text('head = "etf"\nalgorithm = "fedetf"\n')
    assert given('--setting', str(tmp_path / 'mine.toml'), '--algorithm', 'fedavg').head == 'etf'


def test_an_option_is_set_beside_those_of_the_file(tmp_path):
    (tmp_path / 'a.toml').write_text('algorithm = "fedprox"\noptions = {mu = 0.1, anchored = ["head"]}\n')
    file = ['--setting', str(tmp_path / 'a.toml')]
    assert given(*file, '--options', 'mu=0.5').options == {'mu': 0.5, 'anchored': ['head']}
    assert given(*file, '--algorithm', 'moon', '--options', 'mu=0.5').options == {'mu': 0.5}


def test_two_clients_draw_their_numbers_of_classes_as_others_do():
    """A pair of numbers is a range in a setting, and never one for each of two clients."""
    seen = set()
    for seed in range(6):
        setting = Setting(
            dataset='digits', partition='uneven_classes', classes_per_client=6, most_classes=10, clients=2, seed=seed
        )
        seen |= {tuple((np.asarray(scene.load(setting)[1].counts) > 0).sum(1).tolist())}
    assert len(seen) > 2


@pytest.mark.slow
def test_a_run_is_what_its_command_line_makes(tmp_path):
    setting = Setting(**SMALL, algorithm='fedprox', options={'mu': 0.5}, seed=3)
    (tmp_path / 'a.json').write_text(json.dumps({**SMALL, 'algorithm': 'fedprox', 'seed': 9}))
    argv = ['--setting', str(tmp_path / 'a.json'), '--options', 'mu=0.5', '--seed', '3']
    assert command.setting_of(command.arguments(argv, 'cifar.py', '')) == setting
    rows = []
    ours = experiments.run(
        setting, tmp_path / 'ours', progress=False, on_round=lambda row, state: rows.append(row['round'])
    )
    theirs = command.main([*argv, '--out', str(tmp_path / 'theirs')])
    for name in ('global_accuracy', 'personal_accuracy', 'personal_accuracy_before'):
        assert ours[name] == theirs[name]
    assert rows == [1, 2]
    for folder in ('ours', 'theirs'):
        assert Setting.of({
            k: v for k, v in pipeline.known(tmp_path / folder / 'config.json').items()
            if k not in ('data_dir', 'out', 'clients_per_chunk', 'devices')
        }) == setting  # fmt: skip


@pytest.mark.slow
def test_options_reach_the_factory_and_unknown_ones_are_refused(tmp_path):
    done = [
        experiments.run(Setting(**SMALL, algorithm='fedprox', options=options), tmp_path / str(i), progress=False)
        for i, options in enumerate(({}, {'mu': 0.001}, {'mu': 10.0}))
    ]
    losses = [json.loads((tmp_path / str(i) / 'metrics.jsonl').read_text().splitlines()[1])['loss'] for i in range(3)]
    assert losses[0] == losses[1] != losses[2]
    assert len(done) == 3
    with pytest.raises(ValueError, match=r"fedprox cannot take the options {'nu': 1}.*'nu'"):
        experiments.run(Setting(**SMALL, algorithm='fedprox', options={'nu': 1}), tmp_path / 'x', progress=False)


@pytest.mark.parametrize('name', recipes.RECIPES)
def test_every_recipe_refuses_options_that_it_does_not_know(name):
    setting = Setting(**SMALL, algorithm=name, options={'unheard_of': 1})
    dataset, *_ = pipeline.load(setting)
    with pytest.raises(ValueError, match='unheard_of'):
        pipeline.build(setting, dataset)


@pytest.mark.parametrize('partition', ['dirichlet', 'dirichlet_capped', 'dirichlet_draws', 'shards', 'iid'])
def test_partitions_by_name(partition):
    setting = Setting(**{**SMALL, 'clients': 5}, partition=partition, alpha=1.0)
    dataset, train, test = pipeline.load(setting)
    assert int(train.size.sum() + test.size.sum()) == len(dataset.y_train)
    held = (np.asarray(train.counts) > 0).sum(1)
    assert (held == 2).all() if partition == 'shards' else (held > 2).any()


@pytest.mark.slow
def test_a_run_that_is_there_is_not_overwritten_nor_resumed_with_other_settings(tmp_path):
    setting = Setting(**SMALL, algorithm='fedavg')
    experiments.run(setting, tmp_path, progress=False)
    with pytest.raises(ValueError, match=r'already holds a run: resume it .--resume'):
        experiments.run(setting, tmp_path)
    with pytest.raises(ValueError, match=r'alpha was 0.1 and is now 7.0'):
        experiments.run(dataclasses.replace(setting, alpha=7.0), tmp_path, resume=True)
    longer = experiments.run(dataclasses.replace(setting, rounds=3), tmp_path, resume=True, progress=False)
    (tmp_path / 'summary.json').write_text('{"algo')  # damaged, and made anew
    again = experiments.run(dataclasses.replace(setting, rounds=3), tmp_path, resume=True, progress=False)
    assert again['personal_accuracy'] == longer['personal_accuracy']
    assert longer['rounds'] == pipeline.known(tmp_path / 'config.json')['rounds'] == 3
    with pytest.raises(ValueError, match='already holds 3 rounds'):
        experiments.run(setting, tmp_path, resume=True)


def test_a_run_begun_before_there_were_choices_is_resumed(tmp_path):
    setting = Setting(**SMALL, algorithm='fedavg')
    config = setting.plain()
    for name in ('head', 'loss', 'server_optimizer', 'server_lr', 'partition', 'options', 'crop', 'test_share'):
        del config[name]
    pipeline.write(tmp_path / 'config.json', config)
    pipeline.settle(setting, tmp_path, resume=True)
    with pytest.raises(ValueError, match='head was linear and is now etf'):
        pipeline.settle(dataclasses.replace(setting, head='etf'), tmp_path, resume=True)


@pytest.mark.slow
@pytest.mark.parametrize('head', ['bare_etf', 'unbiased'])
def test_a_memory_is_measured_against_frozen_and_learned_classes(head, tmp_path):
    setting = Setting(**SMALL, algorithm='fedetf_gmv', head=head, options={'warm': 0, 'collect': 0}, personal='own')
    pipeline.run(setting, tmp_path, progress=False)
    rows = [json.loads(line) for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
    assert all(row['memory_norm'] > 0 and np.isfinite(row['memory_margin']) for row in rows[1:])
    assert 'global_accuracy' in json.loads((tmp_path / 'summary.json').read_text())


@pytest.mark.parametrize(('head', 'options'), [('bare_etf', {'scale': 1.5}), ('unbiased', {})])
def test_what_a_memory_adds_to_the_logit_of_its_class_is_told(head, options):
    setting = Setting(**SMALL, algorithm='fedetf_gmv', head=head, options=options)
    measures = Measures(setting, scene.build(setting, None), scene.load(setting))
    state = measures.begun()
    v = state.server.variables
    mu = jax.random.normal(jax.random.key(4), v.fixed['memory'].mu.shape)
    seen = jnp.arange(len(mu)) < 7
    fixed = {**v.fixed, 'memory': v.fixed['memory']._replace(mu=mu, seen=seen)}
    server = state.server._replace(variables=v._replace(fixed=fixed))
    told = measures.general(state._replace(server=server))
    w = v.params['head']['w'] if head == 'unbiased' else 1.5 * v.fixed['head']['v']
    added = np.sum(np.asarray(mu) * np.asarray(w).T, axis=1)[:7]
    np.testing.assert_allclose(told['memory_margin'], added.mean(), rtol=1e-5)
    np.testing.assert_allclose(told['memory_norm'], np.linalg.norm(mu, axis=1)[:7].mean(), rtol=1e-6)


def test_a_run_with_memory_is_not_made_longer(tmp_path):
    """When its memory begins depends on how many rounds there will be."""
    for name, refused in (('fedetf_gmv', True), ('fedavg', False)):
        setting = Setting(**{**SMALL, 'rounds': 5}, algorithm=name)
        pipeline.write(tmp_path / name / 'config.json', setting.plain())
        longer = dataclasses.replace(setting, rounds=9)
        if refused:
            with pytest.raises(ValueError, match='rounds was 5 and is now 9'):
                pipeline.settle(longer, tmp_path / name, resume=True)
        else:
            pipeline.settle(longer, tmp_path / name, resume=True)


def test_a_run_whose_memory_begins_where_it_was_told_is_made_longer(tmp_path):
    setting = Setting(**{**SMALL, 'rounds': 5}, algorithm='fedetf_gmv', options={'warm': 2})
    pipeline.write(tmp_path / 'config.json', setting.plain())
    pipeline.settle(dataclasses.replace(setting, rounds=9), tmp_path, resume=True)


def test_before_and_after_are_of_the_same_clients():
    """Where training makes the personal models, those of clients that never took part count in neither."""
    setting = Setting(**{**SMALL, 'rounds': 1}, algorithm='fedper', participation=0.34)
    loaded = scene.load(setting)
    measure = Measures(setting, scene.build(setting, loaded[0]), loaded)
    state, _ = simulate.make_round(measure.recipe.train, cohort=setting.cohort)(
        jax.random.fold_in(measure.k_train, 0), measure.begun(), loaded[1]
    )
    told, _, _ = measure.personal(state, measure.delivered(state))
    took = np.array(told['clients']['tested']) > 0
    assert took.sum() == setting.cohort < setting.clients
    tables = evaluate.per_client(measure.recipe.final, state, loaded[2], personal=False)
    np.testing.assert_allclose(told['personal_accuracy_before'], evaluate.over_clients(tables[took]).mean, rtol=1e-6)
    assert told['personal_accuracy_before'] != float(evaluate.over_clients(tables).mean)


def test_on_the_command_line_values_are_as_json_or_python_writes_them():
    written = {
        'true': True, 'True': True, 'False': False, 'None': None, 'null': None, '.1': 0.1, '1.': 1.0, '1e-3': 1e-3,
        "['a', 1]": ['a', 1], '["a"]': ['a'],
        'word': 'word', '007': '007', 'client/class': 'client/class', '(1)x': '(1)x',
    }  # fmt: skip
    for text, value in written.items():
        assert command.options(f'a={text}') == {'a': value}, text


def test_the_server_of_ratio_loss_has_63_examples_of_each_class(monkeypatch):
    setting, given = Setting(**SMALL, algorithm='ratioloss'), {}
    monkeypatch.setitem(recipes.RECIPES, 'ratioloss', lambda *_, **kwargs: given.update(kwargs))
    pipeline.build(setting, pipeline.load(setting)[0])
    np.testing.assert_array_equal(given['auxiliary'].counts, 63 * np.eye(10))
    assert given['server_opt'] is None


def test_models_that_are_compared_see_the_same_crops(monkeypatch):
    plain, setting = (Setting(**SMALL, algorithm='moon', **look) for look in ({}, {'flip': True, 'crop': 2}))
    given = {}
    monkeypatch.setitem(recipes.RECIPES, 'moon', lambda model, *_, **kwargs: given.update(kwargs, model=model))
    dataset = pipeline.load(setting)[0]
    pipeline.build(setting, dataset)
    x, model = jnp.asarray(dataset.x_train[:4]), given['model']
    params, stats = model.init(jax.random.key(0), x)
    one, two = ((params, stats, x, jnp.ones(4, bool), key) for key in jax.random.split(jax.random.key(0)))
    assert bool((model.features(*one)[0] != model.features(*two)[0]).any())  # the model draws crops of its own
    np.testing.assert_array_equal(model.features(*one[:-1], Still(one[-1]))[0], model.features(*one)[0])
    assert model.augments
    pipeline.build(plain, dataset)
    assert not given['model'].augments


def test_equal_settings_have_one_folder():
    """Whether a file says 10 or 10.0."""
    for one, two in (({'clip': 10}, {'clip': 10.0}), ({'options': {'mu': 1}}, {'options': {'mu': 1.0}})):
        assert Setting(**one) == Setting(**two)
        assert Setting(**one).name == Setting(**two).name


@pytest.mark.parametrize(('choice', 'step'), [({'server_lr': 0.3}, 0.3), ({'server_optimizer': 'fedavgm'}, 0.1)])
def test_server_optimizers_have_their_rate_or_the_one_given(monkeypatch, choice, step):
    setting, given = Setting(**SMALL, algorithm='fedavg', loss='balanced_softmax', **choice), {}
    monkeypatch.setitem(recipes.RECIPES, 'fedavg', lambda *_, **kwargs: given.update(kwargs))
    pipeline.build(setting, pipeline.load(setting)[0])
    opt, theta = given['server_opt'], np.float32(0)
    update, _ = opt.update(np.float32(-1), opt.init(theta), theta)
    np.testing.assert_allclose(update, step, rtol=1e-6)
    assert (given['head'], given['loss']) == ('linear', 'balanced_softmax')


@pytest.mark.slow
def test_means_of_a_run_that_was_cut_short_are_of_its_last_rounds(tmp_path, monkeypatch):
    """Those that were not evaluated, because nobody knew that they would be among the last, are left out."""
    monkeypatch.setattr(pipeline, 'PAUSE', 0.0)
    plain = SMALL | {'algorithm': 'fedavg', 'eval_every': 3, 'eval_last': 3}

    def stop(row, state):
        if row['round'] == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipeline.run(Setting(**plain | {'rounds': 20}), tmp_path, on_round=stop, progress=False)
    with pytest.warns(UserWarning, match='means over the last 3 rounds leave some out'):
        summary = pipeline.run(Setting(**plain | {'rounds': 7}), tmp_path, resume=True, progress=False)
    rows = [json.loads(line) for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
    assert [row['round'] for row in rows if 'accuracy' in row] == [3, 6, 7]
    assert summary['global_accuracy_last3'] == pytest.approx((rows[5]['accuracy'] + rows[6]['accuracy']) / 2)


@pytest.mark.filterwarnings('ignore:round 1')
def test_models_that_clients_keep_and_that_are_broken_are_no_result(tmp_path):
    rng, n = np.random.default_rng(0), 160
    x, y, own = rng.normal(size=(n, 5)).astype(np.float32), rng.integers(0, 3, n), np.repeat(np.arange(4), n // 4)
    x[own == 0] *= 1e25
    np.savez(tmp_path / 'own.npz', x_train=x, y_train=y, x_test=x[-9:], y_test=np.arange(9) % 3, clients_train=own)
    setting = Setting(
        dataset='own.npz', model='mlp', partition='natural', clients=4, algorithm='solo', rounds=1, batch_size=16
    )
    with pytest.raises(training.DivergedError, match='personal models diverged'):
        pipeline.run(setting, tmp_path / 'run', data_dir=tmp_path, progress=False)
    summary = json.loads((tmp_path / 'run' / 'summary.json').read_text())
    assert summary['broken_clients'] >= 1
    assert summary['personal_accuracy'] is None


@pytest.mark.slow
def test_a_variant_of_personal_models_that_diverges_is_no_result():
    setting = Setting(**SMALL, algorithm='fedavg')
    found = scene.load(setting)
    recipe = scene.build(setting, found[0])
    task = objective(models.from_flax(models.MLP()), heads.linear(), losses.cross_entropy)
    stages = {
        name: finetune.algorithm(task, local.sgd(lr), plan=local.Plan(16, 1))
        for name, lr in (('tuned', 0.01), ('wild', 1e30))
    }
    measure = Measures(setting, recipe._replace(variants=stages), found)
    state = measure.begun()
    told, tuned, _ = measure.personal(state, measure.delivered(state))
    assert tuned
    assert told['personal_accuracy_tuned'] > 0
    assert told['personal_accuracy_wild'] is None


@pytest.mark.slow
def test_personal_models_that_diverge_are_no_result(tmp_path, monkeypatch):
    kept = pipeline.Measures.personal
    monkeypatch.setattr(
        pipeline.Measures, 'personal', lambda self, *args: (kept(self, *args)[0], False, kept(self, *args)[2])
    )
    with pytest.raises(training.DivergedError, match='personal models diverged'):
        experiments.run(Setting(**SMALL, algorithm='fedavg'), tmp_path, progress=False)
