"""Runs that are done: their models, read without their data."""

import json
import shutil

import jax
import numpy as np
import pytest

from fedjax_nc import experiments, saving, simulate, training
from fedjax_nc.experiments import Setting, command, recipes, runner, scene
from fedjax_nc.experiments.study import Run

DIGITS = {'dataset': 'digits', 'max_examples': 300, 'clients': 5, 'rounds': 2, 'local_epochs': 1, 'seed': 3}
SETTING = Setting(**DIGITS, algorithm='fedavg')
QUICK = (
    'ccvr',
    'fedloge',
    'fedproto',
    'fedrod',
)  # a calibrated model, a stage with states of its own, no generic model
METHODS = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in recipes.RECIPES]


@pytest.mark.slow
@pytest.mark.parametrize('name', METHODS)
def test_models_predict_as_the_summary_says(name, tmp_path):
    setting = Setting(**DIGITS, algorithm=name, model='resnet20' if name == 'fedbn' else 'mlp')
    summary = experiments.run(setting, tmp_path, progress=False, keep_personal=True)
    dataset, _, tests = scene.load(setting)
    recipe = scene.build(setting, dataset)
    if recipe.generic:
        run = experiments.load(tmp_path)
        right = np.mean(np.argmax(run.predict(dataset.x_test), -1) == dataset.y_test)
        assert right == pytest.approx(summary['global_accuracy'])
        assert (run.setting, run.summary) == (setting, json.loads(json.dumps(summary)))
    else:
        with pytest.raises(FileNotFoundError, match=f'{name} has no generic model'):
            experiments.load(tmp_path)
    told = summary['clients']
    for client in range(5):
        x, y = (np.asarray(u)[np.asarray(tests.index)[client, : int(tests.size[client])]] for u in (tests.x, tests.y))
        right = np.mean(np.argmax(experiments.load(tmp_path, client).predict(x), -1) == y)
        assert told['tested'][client] == len(y)
        assert right == pytest.approx(told['personal_accuracy'][client], abs=1e-6)


@pytest.mark.slow
def test_the_command_line_keeps_them_if_it_is_asked(tmp_path, capsys):
    small = ['--dataset', 'digits', '--max-examples', '300', '--clients', '5', '--rounds', '1', '--algorithm', 'fedavg']
    command.main([*small, '--out', str(tmp_path / 'some')])
    assert not (tmp_path / 'some' / 'personal').exists()
    every = tmp_path / 'all {1}'  # no place for a number
    command.main([*small, '--out', str(every), '--keep-personal'])
    assert sorted(path.name for path in (every / 'personal').iterdir()) == [
        f'{client}.safetensors' for client in range(5)
    ]
    said = saving.about(every / 'personal' / '3.safetensors')
    assert (said['client'], said['num_classes'], said['setting']['clients']) == (3, 10, 5)
    with pytest.raises(FileNotFoundError, match='no personal models: ask for them with keep_personal=True'):
        experiments.load(tmp_path / 'some', 3)
    with pytest.raises(FileNotFoundError, match='has no model of client 5: it had 5 clients'):
        experiments.load(every, 5)
    with pytest.raises(ValueError, match='client must be'):
        experiments.load(every, -1)


@pytest.mark.slow
def test_who_never_took_part_has_no_personal_model(tmp_path):
    setting = Setting(**{**DIGITS, 'clients': 6}, algorithm='fedper', participation=0.3)
    told = experiments.run(setting, tmp_path, progress=False, keep_personal=True)['clients']
    kept = sorted(int(path.stem) for path in (tmp_path / 'personal').iterdir())
    assert 2 <= len(kept) < 6
    assert all((told['personal_accuracy'][k] is None) == (k not in kept) for k in range(6) if told['examples'][k] > 3)
    away = next(k for k in range(6) if k not in kept)
    with pytest.raises(FileNotFoundError, match=f'has no model of client {away}: it never took part'):
        experiments.load(tmp_path, away)


@pytest.mark.slow
def test_a_run_that_diverged_has_no_model(tmp_path):
    run = Run('FedETF', '', 0, Setting(**{**DIGITS, 'lr': 1e30}))
    with pytest.raises(training.DivergedError) as caught:
        experiments.run(run.setting, runner.where(run, tmp_path), progress=False)
    runner.diverged(run, tmp_path, caught.value)
    with pytest.raises(FileNotFoundError, match='has no model: training diverged in round '):
        experiments.load(runner.where(run, tmp_path))


@pytest.mark.slow
def test_what_is_not_finished_is_said_to_be(tmp_path):
    with pytest.raises(FileNotFoundError, match='holds no run'):
        experiments.load(tmp_path)
    experiments.run(SETTING, tmp_path, progress=False)
    (tmp_path / 'summary.json').unlink()
    with pytest.raises(FileNotFoundError, match='has not been finished: go on with resume=True'):
        experiments.load(tmp_path)
    experiments.run(SETTING, tmp_path, progress=False, resume=True)
    assert experiments.load(tmp_path).setting == SETTING


@pytest.mark.slow
def test_damage_is_told(tmp_path):
    experiments.run(SETTING, tmp_path / 'run', progress=False)
    for name in ('model.safetensors', 'summary.json', 'config.json'):
        shutil.copytree(tmp_path / 'run', tmp_path / name)
        path = tmp_path / name / name
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(ValueError, match='is damaged'):
            experiments.load(tmp_path / name)
    (tmp_path / 'run' / 'model.safetensors').unlink()
    with pytest.raises(FileNotFoundError, match=r'model\.safetensors is gone'):
        experiments.load(tmp_path / 'run')


@pytest.mark.slow
def test_one_goes_on_from_what_was_loaded(tmp_path):
    """A run's model is the beginning of another training."""
    experiments.run(SETTING, tmp_path, progress=False)
    run = experiments.load(tmp_path)
    dataset, train, _ = scene.load(SETTING)
    recipe = scene.build(SETTING, dataset)
    state = simulate.join(recipe.train, jax.random.key(0), run.saved.server, train.num_clients)
    state, _ = simulate.make_round(recipe.train)(jax.random.key(1), state, train)
    assert int(state.server.round) == 3
