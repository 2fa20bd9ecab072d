"""What else evaluations measure: neural collapse and others by name, and probes of one's own."""

import dataclasses
import json
import re
import sys

import numpy as np
import pytest
import toys

from fedjax_nc import evaluate, experiments, heads, losses, models, objective
from fedjax_nc.base import Batch
from fedjax_nc.experiments import Setting, Study, command, pipeline, probes, recipes, report, runner, scene
from fedjax_nc.experiments.measures import Measures

MODULE = '''
import jax.numpy as jnp

def norms(seen):
    """Of the longest class vector, over that of the shortest."""
    z, v = seen.aligned
    length = jnp.linalg.norm(v, axis=0)
    return {'ratio': length.max() / length.min(), 'above_zero': float(seen.features.min()) >= 0}

def endless(seen):
    return {'far': float('inf')}

def same(seen):
    return {'nc1': 0.0}

def accuracy(seen):
    return {'accuracy_of_mine': 0.5}

def spaced(seen):
    return {'two words': 0.5}

def number(seen):
    return 3

def word(seen):
    return {'said': 'word'}

def broken(seen):
    raise KeyError('nothing')

def two(seen, other):
    return {}
'''
DIGITS = {'dataset': 'digits', 'max_examples': 300, 'clients': 6, 'rounds': 2, 'local_epochs': 1, 'eval_last': 1}


@pytest.fixture(autouse=True)
def mine(tmp_path_factory, monkeypatch):
    """The module `looks.some` in a folder from which Python imports."""
    with toys.own_module(tmp_path_factory, monkeypatch, 'looks.some', MODULE) as module:
        yield module


def cosines(a, b):
    return a @ b.T / np.linalg.norm(a, axis=1)[:, None] / np.linalg.norm(b, axis=1)


@pytest.mark.parametrize('algorithm', ['fedetf', pytest.param('fednh', marks=pytest.mark.slow)])
def test_collapse_and_others_are_those_of_the_model_that_is_kept(algorithm, tmp_path):
    setting = Setting(**DIGITS, algorithm=algorithm, probes=['collapse', 'loss', 'top5', 'f1'])
    summary = experiments.run(setting, tmp_path, progress=False)
    run, digits = experiments.load(tmp_path), scene.load(setting)[0]
    v, y = run.saved.server.variables, digits.y_test
    body = v.params['body']
    z = np.asarray(models.from_flax(models.MLP()).features(body, (), digits.x_test, None, None)[0], np.float64)
    assert z.shape == (len(y), 200)
    means = np.array([z[y == c].mean(0) for c in range(10)])
    centred = means - means.mean(0)
    within = sum(((z[y == c] - means[c]) ** 2).sum(1).mean() for c in range(10))
    apart = cosines(centred, centred)[~np.eye(10, dtype=bool)]
    if algorithm == 'fedetf':
        proj, rows = v.params['head']['proj'], np.asarray(v.fixed['v']).T
        seen = z @ np.asarray(proj['w'], np.float64) + np.asarray(proj['b'])
    else:
        seen, rows = z, np.asarray(v.fixed['w'])
    own = cosines(seen, rows)[np.arange(len(y)), y]
    logits = np.asarray(run.predict(digits.x_test), np.float64)
    true = logits[np.arange(len(y)), y]
    order = np.argsort(-logits, axis=1)[:, :5]
    best = logits.argmax(1)
    f1 = [2 * ((best == c) & (y == c)).sum() / max((best == c).sum() + (y == c).sum(), 1) for c in range(10)]
    for name, value in {
        'nc1': within / (centred**2).sum(),
        'nc2': np.abs(apart + 1 / 9).mean(),
        'nc3': np.mean([own[y == c].mean() for c in range(10)]),
        'test_loss': (np.log(np.exp(logits).sum(1)) - true).mean(),
        'top5_accuracy': (order == y[:, None]).any(1).mean(),
        'macro_f1': np.mean(f1),
    }.items():
        np.testing.assert_allclose(summary[f'global_{name}_last1'], value, rtol=2e-4, err_msg=name)
    plain = experiments.run(dataclasses.replace(setting, probes=()), tmp_path / 'plain', progress=False)
    assert plain['global_accuracy'] == summary['global_accuracy']
    assert not [name for name in plain if 'nc1' in name]


QUICK = ('fedavg', 'fedetf', 'fedetf_gmv', 'fednh', 'creff')
WITHOUT = ('fedbn', 'fedproto', 'solo')  # which needs BatchNorm, and those without a generic model


@pytest.mark.parametrize(
    'algorithm',
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in recipes.RECIPES
        if name not in WITHOUT
    ],
)
def test_every_method_with_a_generic_model_has_features_and_class_vectors(algorithm):
    setting = Setting(**DIGITS, algorithm=algorithm)
    loaded = scene.load(setting)
    recipe = scene.build(setting, loaded[0])
    measure = Measures(setting, recipe, loaded)
    predictor, state = measure.delivered(measure.begun())
    if algorithm == 'fedloge':  # whose realigned head has other vectors than the frame that features are trained to
        predictor = recipe.train
    x, y, variables = loaded[0].x_test, loaded[0].y_test, recipe.variables(state.server)
    z, vectors = probes.Seen(predictor, state, recipe.task, variables, x, y, *loaded[1:], None).aligned
    logits = np.asarray(predictor.predict(state.server, None, x), np.float64)
    products = np.asarray(z, np.float64) @ np.asarray(vectors, np.float64)
    if algorithm in ('fedetf', 'fednh', 'feduh'):  # which compare angles
        products /= np.linalg.norm(z, axis=1, keepdims=True) * np.linalg.norm(vectors, axis=0)
        products *= float(variables.params['head']['scale'])
    np.testing.assert_allclose(logits, products + np.asarray(variables.params['head'].get('b', 0.0)), atol=1e-4)


def test_without_a_generic_model_there_is_nothing_to_probe(tmp_path):
    setting = Setting(**DIGITS, algorithm='solo', probes=['collapse', 'looks.some:broken'])
    assert not [name for name in experiments.run(setting, tmp_path, progress=False) if 'global' in name]


OTHER = """
from typing import Any, NamedTuple

from fedjax_nc.algorithms import fedavg
from fedjax_nc.base import State
from fedjax_nc.experiments import recipes


class Wrapped(NamedTuple):
    inner: Any


def make(s, **known):
    base = fedavg.algorithm(s.task, s.client_opt, plan=s.plan)
    algorithm = base._replace(
        init=lambda key, data: Wrapped(base.init(key, data)),
        init_client=lambda key, server: base.init_client(key, server.inner),
        client=lambda key, server, client, shard: base.client(key, server.inner, client, shard),
        server=lambda key, server, aggregate: Wrapped(base.server(key, server.inner, aggregate)),
        predict=lambda server, client, x: base.predict(server.inner, client, x),
    )

    def enter(stage, key, state, data):
        return recipes.join(stage, key, State(state.server.inner, ()), data)

    return recipes.Recipe(algorithm, s.finetune(), enter=enter, **known)


silent = recipes.Method('silent', make)
telling = recipes.Method('telling', lambda s: make(s, task=s.task, variables=lambda server: server.inner.variables))
"""


@pytest.mark.slow
def test_a_server_of_another_kind_says_where_its_model_is(tmp_path, tmp_path_factory, monkeypatch):
    with toys.own_module(tmp_path_factory, monkeypatch, 'others.some', OTHER):
        fedavg, telling, silent = (
            Setting(**DIGITS, algorithm=name, probes=list(names))
            for name, names in (
                ('fedavg', ['top5', 'collapse']), ('others.some:telling', ['top5', 'collapse']),
                ('others.some:silent', ['top5']),
            )
        )  # fmt: skip
        one, other, least = (experiments.run(s, tmp_path / s.name, progress=False) for s in (fedavg, telling, silent))
        for name in ('global_accuracy', 'personal_accuracy', 'global_top5_accuracy_last1'):
            assert one[name] == other[name] == least[name]
        assert one['global_nc1_last1'] == other['global_nc1_last1']
        asked = dataclasses.replace(silent, probes=['collapse'])
        with pytest.raises(ValueError, match=r'no features to look at: .*recipes\.trained'):
            experiments.run(asked, tmp_path / asked.name, progress=False)
        assert not (tmp_path / asked.name / 'metrics.jsonl').exists()


def test_features_in_batches_are_those_of_all_at_once():
    clients = toys.ragged([30, 7, 25])
    task = objective.objective(models.from_flax(models.MLP((16,))), heads.linear(), losses.cross_entropy)
    v = task.init(toys.KEY, clients)
    z = evaluate.features(task, v, clients.x, batch_size=9)
    np.testing.assert_allclose(z, task.features(v, Batch(clients.x))[0], rtol=1e-6)
    alone = models.from_flax(models.MLP((16,)))
    np.testing.assert_array_equal(z, evaluate.features(alone, v, np.asarray(clients.x), batch_size=9))
    with pytest.raises(ValueError, match='task must be'):
        evaluate.features(lambda x: x, v, clients.x)
    with pytest.raises(ValueError, match='variables must be'):
        evaluate.features(task, v.params, clients.x)


STUDY = {
    'title': 'Collapse',
    'seeds': [0],
    'metrics': {'general': 'global_accuracy_last1', 'NC1': 'global_nc1_last1', 'ratio': 'global_ratio_last1'},
    'setting': {**DIGITS, 'probes': ['collapse', 'looks.some:norms', 'looks.some:endless']},
    'methods': {'FedAvg': {'algorithm': 'fedavg'}, 'Solo': {'algorithm': 'solo'}},
}


@pytest.mark.slow
def test_a_study_tells_and_draws_what_probes_of_ones_own_measure(tmp_path, mine):
    study = Study.of(STUDY, 'nc')
    assert not runner.carry_out(study, tmp_path, show=False)
    found = report.gather(study, tmp_path)['FedAvg', ''][0]
    assert found['global_ratio_last1'] > 1
    assert found['global_above_zero_last1'] == 1.0
    assert found['global_far_last1'] is None  # JSON has no word for what is not finite
    assert set(found['probed']) == {'nc1', 'nc2', 'nc3', 'ratio', 'above_zero', 'far'}
    folder = report.write(study, tmp_path)
    row = next(line for line in (folder / 'report.md').read_text().splitlines() if line.startswith('| FedAvg'))
    assert f'{found["global_nc1_last1"]:.4g}' in row
    assert f'{found["global_ratio_last1"]:.4g}' in row
    assert {'probe_nc1.png', 'probe_ratio.png'} <= {path.name for path in folder.glob('*.png')}
    assert 'nc1,nc2,nc3' in (runner.where(study.runs[0], tmp_path) / 'metrics.csv').read_text()
    assert not runner.outdated(study.runs[0], tmp_path)
    file = sys.modules['looks.some'].__file__
    with open(file, 'a') as more:
        more.write('\n# changed\n')
    assert runner.outdated(study.runs[0], tmp_path) == 'the file of its probes has'
    experiments.load(runner.where(study.runs[0], tmp_path))  # whose model is what it was


def test_a_study_knows_the_names_of_the_librarys_probes():
    lacking = {**STUDY, 'setting': {**DIGITS, 'probes': ['top5']}}
    with pytest.raises(ValueError, match=r'metrics: NC1 cannot be .*global_top5_accuracy_last1'):
        Study.of(lacking, 'nc')
    told = {**lacking, 'metrics': {'top 5': 'global_top5_accuracy_last1'}}
    assert Study.of(told, 'nc').runs


@pytest.mark.parametrize(
    ('name', 'said'),
    [
        ('same', 'calls a number nc1, as another is called'),
        ('accuracy', 'calls a number accuracy_of_mine, as another is called'),
        ('spaced', "calls a number 'two words': take a word"),
        ('number', 'must return numbers by their names, not 3'),
        ('word', "must return numbers, and said is 'word'"),
        ('broken', "KeyError: 'nothing'"),
    ],
)
def test_what_is_wrong_with_ones_own_shows_before_a_round(name, said, tmp_path):
    setting = Setting(**DIGITS, algorithm='fedavg', probes=['collapse', f'looks.some:{name}'])
    with pytest.raises(ValueError, match=rf'^probe looks\.some:{name}\b.*{re.escape(said)}'):
        experiments.run(setting, tmp_path, progress=False)
    assert not (tmp_path / 'metrics.jsonl').exists()


@pytest.mark.parametrize(
    ('given', 'said'),
    [
        ('collapse', 'probes must be a list of different names'),
        (['collapse', 'collapse'], 'probes must be a list of different names'),
        (['depth'], 'a probe must be one of collapse, loss, top5, f1'),
        ([3], 'a probe must be one of'),
        (['looks.some:none'], "has no 'none'"),
        (['looks.none:norms'], 'is its folder in PYTHONPATH'),
        (['looks.some:two'], r'must be a function of \(seen\)'),
    ],
)
def test_names_are_looked_at_when_a_setting_is_made(given, said):
    with pytest.raises(ValueError, match=said):
        Setting(**DIGITS, probes=given)


def test_a_command_line_names_probes(tmp_path):
    line = '--dataset digits --max-examples 300 --clients 6 --rounds 1 --local-epochs 1 --probes collapse f1'
    command.main([*line.split(), '--algorithm', 'fedavg', '--out', str(tmp_path)])
    row = json.loads((tmp_path / 'metrics.jsonl').read_text().splitlines()[0])
    assert {'nc1', 'nc2', 'nc3', 'macro_f1'} <= set(row)


class Stopped(Exception):
    pass


def test_no_run_goes_on_with_other_probes_or_other_tests(mine, tmp_path, monkeypatch):
    """Its means would be of two things."""
    monkeypatch.setattr(pipeline, 'PAUSE', 1e-6)
    rng, where = np.random.default_rng(0), tmp_path / 'own.npz'
    x, y = rng.normal(size=(90, 6)).astype(np.float32), np.arange(90) % 3
    arrays = {'x_train': x[:60], 'y_train': y[:60], 'x_test': x[60:], 'y_test': y[60:]}
    setting = Setting(
        dataset='own.npz', model='mlp', clients=3, partition='iid', rounds=4, local_epochs=1, algorithm='fedetf',
        probes=['looks.some:norms'],
    )  # fmt: skip

    def stop(row, state):
        if row['round'] == 2:
            raise Stopped

    def go_on(**more):
        return pipeline.run(setting, tmp_path / 'run', data_dir=tmp_path, resume=True, progress=False, **more)

    np.savez(where, **arrays)
    with pytest.raises(Stopped):
        go_on(on_round=stop)
    before = (tmp_path / 'run' / 'config.json').read_text()
    np.savez(where, **{**arrays, 'y_test': (y[60:] + 1) % 3})
    with pytest.raises(ValueError, match='was begun with other data: put back'):
        go_on()
    np.savez(where, **arrays)
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, 'sources', lambda setting: {'probes_source': '0' * 12})
        with pytest.raises(ValueError, match='was begun with another file of probes: put back'):
            go_on()
    assert (tmp_path / 'run' / 'config.json').read_text() == before
    assert go_on()['rounds'] == 4
