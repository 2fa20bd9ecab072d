"""A method of one's own: proven in one line, and run by name from the command line, in studies and in programs."""

import dataclasses
import importlib
import json
import re
import shutil
import sys
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
import toys

from fedjax_nc import data, experiments, local, testing
from fedjax_nc.experiments import Setting, command, measures, recipes, report, runner, scene, seeds
from fedjax_nc.experiments.study import Run, Study, known_metric
from fedjax_nc.training import DivergedError

MODULE = '''
"""FedAvg with steps that are halved, and the same with a decay of the head."""

import jax.numpy as jnp

from fedjax_nc import heads, tree
from fedjax_nc.algorithms import fedavg
from fedjax_nc.experiments import recipes
from fedjax_nc.objective import objective


def algorithm(objective, client_opt, *, share=0.5, plan):
    base = fedavg.algorithm(objective, client_opt, plan=plan)

    def client(key, server, mine, shard):
        mine, message, info = base.client(key, server, mine, shard)
        return mine, message._replace(delta=tree.scale(message.delta, share)), info

    return base._replace(client=client)


def decayed(objective, client_opt, *, decay=0.01, **kwargs):
    def penalty(v, z, batch, server, client):
        return 0.5 * decay * tree.sqdist(v.params['head'], tree.scale(v.params['head'], 0.0))

    return fedavg.algorithm(objective, client_opt, penalty=penalty, **kwargs)


def needing(objective, client_opt, *, rate, plan, slope):
    return fedavg.algorithm(objective, client_opt, plan=plan)


def turned(objective, client_opt, *, plan):
    base = fedavg.algorithm(objective, client_opt, plan=plan)

    def predict(server, client, x):
        return jnp.roll(base.predict(server, client, x), 1, axis=1)

    return base._replace(predict=predict)


def turned_recipe(setup):
    return recipes.trained(turned, setup.task, setup.client_opt, plan=setup.plan)._replace(personalize=setup.finetune())


def etf_recipe(setup):
    task = objective(setup.model, heads.etf(), setup.loss)
    made = recipes.trained(fedavg.algorithm, task, setup.client_opt, plan=setup.plan)
    return made._replace(personalize=setup.finetune(task if setup.options.get('told') else None))


TURNED = recipes.Method('Turned', turned_recipe)
OTHER = recipes.Method('Other', etf_recipe)
HEADLESS = recipes.Method('Headless', turned_recipe, heads=())
METHOD = recipes.Method('Halved / ETF', recipes.shared(algorithm), ('etf',), server=False)
number = 3


def bare(x):
    return x


class Factory:
    def __init__(self, task, client_opt, *, plan):
        pass
'''
DIGITS = {'dataset': 'digits', 'max_examples': 300, 'clients': 6, 'rounds': 2, 'local_epochs': 1}


@pytest.fixture(autouse=True)
def mine(tmp_path_factory, monkeypatch):
    """The module `steps.halved` in a folder from which Python imports."""
    folder = tmp_path_factory.mktemp('own')
    (folder / 'steps').mkdir()
    (folder / 'steps' / 'halved.py').write_text(MODULE)
    (folder / 'steps' / 'broken.py').write_text('import nothing_of_that_name\n')
    (folder / 'steps' / 'wrong.py').write_text('1 +\n')
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module('steps.halved')
    for name in [name for name in sys.modules if name.split('.')[0] == 'steps']:
        del sys.modules[name]


@pytest.mark.slow
def test_it_is_proven_in_one_line(mine):
    testing.check(mine.algorithm(toys.task, local.sgd(0.05), plan=local.Plan(16, 2)))


def test_it_has_a_label_and_a_folder_of_its_own():
    by_name = {name: Setting(**DIGITS, algorithm=f'steps.halved:{name}') for name in ('algorithm', 'decayed', 'METHOD')}
    assert [setting.label for setting in by_name.values()] == ['halved', 'decayed', 'Halved / ETF']
    names = [setting.name for setting in by_name.values()]
    assert [name.rpartition('-')[0] for name in names] == ['halved-digits', 'decayed-digits', 'Halved_ETF-digits']
    assert len({setting.digest for setting in by_name.values()}) == 3
    assert by_name['METHOD'].head == 'etf'
    assert Setting.of(json.loads(json.dumps(by_name['METHOD'].plain()))) == by_name['METHOD']
    assert recipes.named('fedavg') is recipes.RECIPES['fedavg']


def test_options_without_a_default_are_asked_for(tmp_path):
    small = ['--dataset', 'digits', '--clients', '6', '--rounds', '2', '--out', str(tmp_path / 'run')]
    said = 'needing needs the options rate, slope, which have no default'
    with pytest.raises(ValueError, match=said):
        command.main([*small, '--algorithm', 'steps.halved:needing'])
    with pytest.raises(ValueError, match='needing needs the options slope'):
        command.main([*small, '--algorithm', 'steps.halved:needing', '--options', 'rate=1'])
    assert not (tmp_path / 'run' / 'config.json').exists()


@pytest.mark.slow
def test_the_command_line_takes_it_with_its_options(tmp_path, capsys):
    told = {}
    for name, flags in {
        'half': ['--algorithm', 'steps.halved:algorithm', '--head', 'cosine'],
        'none': ['--algorithm', 'steps.halved:algorithm', '--head', 'cosine', '--options', 'share=0'],
    }.items():
        small = ['--dataset', 'digits', '--max-examples', '300', '--clients', '6', '--rounds', '2']
        told[name] = command.main([*small, '--local-epochs', '1', *flags, '--out', str(tmp_path / name)])
        config = json.loads((tmp_path / name / 'config.json').read_text())
        assert config['algorithm'] == told[name]['algorithm'] == 'steps.halved:algorithm'
        assert (tmp_path / name / 'accuracy.png').exists()
    assert told['half']['global_accuracy'] != told['none']['global_accuracy']
    assert told['half']['personal_accuracy'] > 0


@pytest.mark.slow
def test_a_study_takes_it_beside_others(tmp_path):
    path = tmp_path / 'mine.toml'
    path.write_text(
        'title = "Mine"\nseeds = [0]\nmetrics = {general = "global_accuracy"}\n[setting]\n'
        + ''.join(f'{name} = {json.dumps(value)}\n' for name, value in DIGITS.items())
        + '[methods]\nFedAvg = {algorithm = "fedavg"}\n'
        'Mine = {algorithm = "steps.halved:decayed", options = {decay = 0.1}, server_optimizer = "fedadam"}\n'
    )
    study = Study.read(path)
    assert runner.carry_out(study, tmp_path / 'out', show=False) == []
    found = [runner.summary(run, tmp_path / 'out') for run in study.runs]
    assert [summary['algorithm'] for summary in found] == ['fedavg', 'steps.halved:decayed']
    assert sorted(path.name.split('-')[0] for path in (tmp_path / 'out' / 'runs').iterdir()) == ['decayed', 'fedavg']


def test_a_study_takes_what_it_measures_of_views_of_its_own():
    own = Setting(**DIGITS, algorithm='steps.halved:TURNED', eval_last=1)
    for name in ('personal_accuracy_whole', 'global_accuracy_whole_last1'):
        known_metric('heading', name, own)
        with pytest.raises(ValueError, match=r'metrics: heading cannot be'):
            known_metric('heading', name, Setting(**DIGITS, eval_last=1))
    with pytest.raises(ValueError, match=r'metrics: heading cannot be'):
        known_metric('heading', 'global_accuracy_whole_last2', own)


@pytest.mark.slow
def test_a_study_says_where_its_method_has_changed_since(mine, tmp_path, capsys):
    setting = Setting(**DIGITS, algorithm='steps.halved:algorithm')
    run = Run('Mine', '', 0, setting)
    folder = runner.where(run, tmp_path)
    experiments.run(setting, folder, progress=False)
    table = {
        'title': 'Mine', 'seeds': [0], 'metrics': {'general': 'global_accuracy'}, 'setting': DIGITS,
        'methods': {'Mine': {'algorithm': 'steps.halved:algorithm'}},
    }  # fmt: skip
    again = Study.of(table, 'mine')
    assert again.runs == (run,)
    assert runner.carry_out(again, tmp_path) == []
    assert 'has changed' not in capsys.readouterr().err
    path = Path(mine.__file__)
    path.write_text(path.read_text() + '\n# another thought\n')
    assert runner.carry_out(again, tmp_path) == []
    said = [line for line in capsys.readouterr().err.splitlines() if 'has changed' in line]
    assert said == [
        f'Mine, seed 0: the file of its method has changed since it was run: delete {folder} to have it run again, '
        'by a program that is started anew'
    ]
    shutil.rmtree(folder)  # this program has imported the file as it was, and says what it runs
    runner.carry_out(again, tmp_path)
    capsys.readouterr()
    runner.carry_out(again, tmp_path)
    assert 'has changed' in capsys.readouterr().err
    other = dataclasses.replace(setting, seed=1)
    experiments.run(other, runner.where(Run('Mine', '', 1, other), tmp_path), progress=False)
    assert 'Of several versions' not in (report.write(again, tmp_path) / 'report.md').read_text()
    importlib.reload(mine)
    shutil.rmtree(folder)
    runner.carry_out(again, tmp_path)
    runner.carry_out(again, tmp_path)
    assert 'has changed' not in capsys.readouterr().err
    told = (report.write(again, tmp_path) / 'report.md').read_text()  # of seeds 0 and 1
    assert re.search(
        r'Of several versions:\n\n- method steps.halved:algorithm: '
        r'file \w{12} in Mine, seed 0; file \w{12} in Mine, seed 1\n',
        told,
    )


@pytest.mark.slow
def test_seeds_that_diverged_together_are_told_as_changed(mine, tmp_path, capsys):
    runs = [
        Run('Mine', '', seed, Setting(**{**DIGITS, 'lr': 1e30, 'seed': seed}, algorithm='steps.halved:algorithm'))
        for seed in (0, 1)
    ]
    found = seeds.run([run.setting for run in runs], [runner.where(run, tmp_path) for run in runs], progress=False)
    assert all(isinstance(one, DivergedError) for one in found)
    assert not any(runner.outdated(run, tmp_path) for run in runs)
    path = Path(mine.__file__)
    path.write_text(path.read_text() + '\n# another thought\n')
    assert all(runner.outdated(run, tmp_path) for run in runs)


LOOKING = """
import jax.numpy as jnp

from fedjax_nc import tree
from fedjax_nc.algorithms import fedavg


def algorithm(task, client_opt, *, plan, base=None, kind='fedavg'):
    assert kind == 'fedavg'
    made = (base or fedavg.algorithm)(task, client_opt, plan=plan)

    def init(key, data):
        server, shard = made.init(key, data), data.shard(0)
        seen = 1 + jnp.std(shard.x[shard.index].astype(jnp.float32)) + jnp.mean(data.y[:].astype(jnp.float32))
        v = server.variables
        return server._replace(variables=v._replace(params=tree.scale(v.params, seen)))

    return made._replace(init=init)
"""


@pytest.mark.slow
def test_a_first_model_that_looks_at_examples_sees_them_wherever_they_are(tmp_path, monkeypatch):
    (tmp_path / 'looking.py').write_text(LOOKING)
    monkeypatch.syspath_prepend(tmp_path)
    few = {'dataset': 'digits', 'max_examples': 205, 'imbalance': 5.0, 'clients': 4, 'rounds': 1, 'local_epochs': 1}
    settings = [Setting(**few, algorithm='looking:algorithm', seed=seed) for seed in (0, 2)]
    begun = []
    for host in (False, True):
        found = scene.load(settings[0], None, host)
        begun.append(measures.Measures(settings[0], scene.build(settings[0], found[0]), found).begun())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3), *(state.server.variables for state in begun))
    together = seeds.run(settings, [tmp_path / str(s.seed) for s in settings], progress=False)
    alone = [experiments.run(s, tmp_path / f'alone-{s.seed}', progress=False) for s in settings]
    losses = [
        [
            json.loads((tmp_path / f'{kind}{s.seed}' / 'metrics.jsonl').read_text().splitlines()[0])['loss']
            for s in settings
        ]
        for kind in ('', 'alone-')
    ]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert [one['global_accuracy'] for one in together] == [one['global_accuracy'] for one in alone]


@pytest.mark.slow
def test_clients_count_as_asked_where_the_factory_can_say_so(tmp_path):
    setting = Setting(**DIGITS, algorithm='steps.halved:METHOD')
    assert experiments.run(setting, tmp_path, progress=False)['global_accuracy'] > 0
    method = recipes.named('steps.halved:algorithm')
    assert method(toys.tiny, toys.opt, toys.PLAN).personalize is not None
    with pytest.raises(ValueError, match="halved weighs clients its own way: weigh='alike' needs a factory with `agg"):
        method(toys.tiny, toys.opt, toys.PLAN, weigh='alike')
    assert recipes.named('steps.halved:decayed')(toys.tiny, toys.opt, toys.PLAN, weigh='alike').train
    assert recipes.named('solo')(toys.tiny, toys.opt, toys.PLAN, weigh='alike').train  # there is nothing to weigh
    with pytest.raises(ValueError, match=r'^halved has no server model'):
        method(toys.tiny, toys.opt, toys.PLAN, server_opt=recipes.SERVER_OPTIMIZERS['fedadam']())
    with pytest.raises(ValueError, match=r"halved cannot take the options \{'mu': 1\}"):
        method(toys.tiny, toys.opt, toys.PLAN, options={'mu': 1})


@pytest.mark.parametrize(
    ('name', 'said'),
    [
        ('fedfoo', "algorithm must be one of fedavg, .* or 'module:factory', not 'fedfoo'"),
        (3, "or 'module:factory', not 3"),
        (
            'steps.nowhere:algorithm',
            "ModuleNotFoundError: No module named 'steps.nowhere': is its folder in PYTHONPATH",
        ),
        ('steps.broken:algorithm', "No module named 'nothing_of_that_name'"),
        ('steps.wrong:algorithm', 'SyntaxError: invalid syntax'),
        (':algorithm', 'algorithm :algorithm: name a module as `import` does'),
        ('steps.halved:', "the module steps.halved has no ''"),
        ('steps.halved:algoritm', "the module steps.halved has no 'algoritm'"),
        ('steps.halved:number', r'must be a recipes.Method, or a factory \(task, client_opt, .*, not 3'),
        ('steps.halved:bare', 'must be a recipes.Method, or a factory .* not <function bare>'),
        ('steps.halved:Factory', 'must be a recipes.Method, or a factory'),
    ],
)
def test_what_is_none_is_refused_early_in_one_line(name, said):
    with pytest.raises(ValueError, match=said) as caught:
        Setting(**DIGITS, algorithm=name)
    assert '\n' not in str(caught.value)


@pytest.mark.slow
def test_the_general_model_predicts_as_its_method_does(tmp_path):
    """And not as the stage that makes personal models of it; after `load`, too."""
    plain = experiments.run(Setting(**DIGITS, algorithm='fedavg', lr=0.1), tmp_path / 'plain', progress=False)
    for name in ('turned', 'TURNED'):
        setting, out = Setting(**DIGITS, algorithm=f'steps.halved:{name}', lr=0.1), tmp_path / name
        summary = experiments.run(setting, out, progress=False)
        rights = np.trace(np.roll(confusion(tmp_path / 'plain'), 1, axis=1))
        assert rights < 0.5 * plain['global_accuracy']
        assert summary['global_accuracy'] == pytest.approx(rights)
        assert np.trace(confusion(out)) == pytest.approx(rights)
        assert summary['personal_accuracy'] == plain['personal_accuracy']
        assert summary['personal_accuracy_before'] < plain['personal_accuracy_before']


def confusion(out):
    """The finished run's general model on the test set: shares of all examples, by label and prediction."""
    digits, table = data.load_dataset('digits'), np.zeros((10, 10))
    np.add.at(table, (digits.y_test, np.argmax(experiments.load(out).predict(digits.x_test), axis=1)), 1)
    return table / table.sum()


@pytest.mark.slow
def test_a_model_of_a_changed_file_comes_with_a_warning(tmp_path, mine):
    out = tmp_path / 'run'
    experiments.run(Setting(**DIGITS, algorithm='steps.halved:algorithm'), out, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        experiments.load(out)
    config = json.loads((out / 'config.json').read_text())
    (out / 'config.json').write_text(json.dumps({**config, 'source': '0' * 12}))
    with pytest.warns(UserWarning, match='the file of the method of .* has changed since'):
        experiments.load(out)


def test_a_stage_with_another_model_than_training_is_refused(tmp_path):
    setting = Setting(**DIGITS, algorithm='steps.halved:OTHER')
    with pytest.raises(ValueError, match=r'Other: .* without frozen.v, head.proj.b, .* setup.finetune\(task\)'):
        experiments.run(setting, tmp_path, progress=False)
    assert isinstance(scene.misfit(setting, scene.load(setting)), ValueError)
    told = Setting(**DIGITS, algorithm='steps.halved:OTHER', options={'told': True})
    assert scene.misfit(told, scene.load(told)) is None


def test_a_method_without_heads_is_refused():
    with pytest.raises(ValueError, match='HEADLESS must name a head and a loss'):
        Setting(**DIGITS, algorithm='steps.halved:HEADLESS')


def test_the_setting_of_a_run_is_read_from_its_config(tmp_path):
    setting = Setting(**DIGITS, algorithm='steps.halved:algorithm')
    out = tmp_path / 'run'
    experiments.run(setting, out, progress=False, record={'devices': 1})
    assert 'source' in json.loads((out / 'config.json').read_text())
    assert Setting.read(out / 'config.json') == setting
    (tmp_path / 'config.json').write_text('{"classes": 10, "dim": 64}')
    with pytest.raises(ValueError, match='no setting is called classes, dim'):
        Setting.read(tmp_path / 'config.json')
    args = command.arguments(['--setting', str(out / 'config.json'), '--seed', '3', '--out', 'x'], 'cifar.py', '')
    assert command.setting_of(args).plain() == {**setting.plain(), 'seed': 3}
