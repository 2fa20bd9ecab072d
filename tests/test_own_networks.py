"""A model of one's own: by name on the command line, in studies and in programs."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_nc import experiments, saving
from fedjax_nc.data import images
from fedjax_nc.experiments import Setting, command, networks, runner, scene
from fedjax_nc.experiments.study import Study

MODULE = '''
"""Bodies of one's own."""

import flax.linen as nn
import jax.numpy as jnp

from fedjax_nc import models


class Small(nn.Module):
    width: int = 24
    dtype: type = jnp.float32
    norm: type = nn.LayerNorm
    conv: type = nn.Conv

    @nn.compact
    def __call__(self, x):
        x = self.conv(4, (3, 3), dtype=self.dtype)(x if x.ndim == 4 else x[..., None])
        return self.norm(dtype=self.dtype)(nn.relu(nn.Dense(self.width, dtype=self.dtype)(x.reshape(len(x), -1))))


def wide():
    return Small(width=48)


def same(dtype=jnp.float32):
    return models.MLP(dtype=dtype)


def made(preprocess=None):
    return models.from_flax(Small(), preprocess)


def needy(width):
    return Small(width)


def wrong():
    return 'a model'


def rows(**kwargs):
    return Small(**kwargs)


class Switch(nn.Module):
    preprocess: bool = False

    @nn.compact
    def __call__(self, x):
        assert not self.preprocess
        return nn.Dense(8)(x.reshape(len(x), -1))


def bare(preprocess=None):
    return Small()


def lost():
    return {}['weights']


class Flat(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x @ jnp.ones((3, 3))


SMALL, MODEL, number = Small(width=32), models.from_flax(Small()), 3
'''
DIGITS = {'dataset': 'digits', 'max_examples': 300, 'clients': 6, 'rounds': 2, 'local_epochs': 1}


@pytest.fixture(autouse=True)
def mine(tmp_path_factory, monkeypatch):
    """The module `bodies.small` in a folder from which Python imports."""
    folder = tmp_path_factory.mktemp('own')
    (folder / 'bodies').mkdir()
    (folder / 'bodies' / 'small.py').write_text(MODULE)
    (folder / 'bodies' / 'leaves.py').write_text('raise SystemExit(3)')
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module('bodies.small')
    for name in [name for name in sys.modules if name.split('.')[0] == 'bodies']:
        del sys.modules[name]


def shapes(setting):
    found = scene.load(setting)
    recipe = scene.build(setting, found[0])
    server = jax.eval_shape(recipe.train.init, jax.random.key(0), found[1])
    return server.variables.params['body']


def test_it_is_a_class_a_function_a_module_or_a_model():
    widths = {
        name: shapes(Setting(**DIGITS, algorithm='fedavg', model=f'bodies.small:{name}'))['Dense_0']['kernel'].shape[1]
        for name in ('Small', 'wide', 'SMALL', 'MODEL', 'made', 'rows')
    }
    assert widths == {'Small': 24, 'wide': 48, 'SMALL': 32, 'MODEL': 24, 'made': 24, 'rows': 24}


@pytest.mark.slow
def test_the_librarys_own_by_another_name_is_the_same_run(tmp_path):
    named, own = (
        experiments.run(Setting(**DIGITS, model=model), tmp_path / model[:3], progress=False)
        for model in ('mlp', 'bodies.small:same')
    )
    assert own['global_accuracy'] == named['global_accuracy'] > 0
    losses = [
        [json.loads(line)['loss'] for line in (tmp_path / name / 'metrics.jsonl').read_text().splitlines()]
        for name in ('mlp', 'bod')
    ]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_the_command_line_takes_it_and_its_model_is_saved_and_loaded(mine, tmp_path, capsys):
    flags = ['--dataset', 'digits', '--max-examples', '300', '--clients', '6', '--rounds', '2', '--local-epochs', '1']
    summary = command.main([*flags, '--model', 'bodies.small:Small', '--algorithm', 'fedavg', '--out', str(tmp_path)])
    assert summary['global_accuracy'] > 0
    config = json.loads((tmp_path / 'config.json').read_text())
    assert config['model'] == 'bodies.small:Small'
    assert len(config['model_source']) == 12
    assert 'source' not in config
    setting = Setting.among(config)
    dataset, _, _ = scene.load(setting)
    recipe = scene.build(setting, dataset)
    assert jax.tree.leaves(saving.load(tmp_path / 'model.safetensors', recipe.train).server)


@pytest.mark.slow
def test_its_convolutions_are_its_own_when_rounds_are_tuned(tmp_path):
    setting = Setting(**DIGITS, algorithm='fedavg', model='bodies.small:Small')
    experiments.run(setting, tmp_path / 'run', tune=True, progress=False)
    rows = json.loads((tmp_path / 'tuning.json').read_text())
    (tried,) = rows.values()
    assert len(tried) > 1
    assert {form for (form, *_), *_ in tried} == {None}
    assert all(chunk is None or chunk < 20 for (_, chunk, *_), *_ in tried)  # it may have convolutions


def test_precision_and_pixels_reach_what_takes_them():
    x = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3)), jnp.uint8)
    look = images.pipeline(images.CIFAR10_FEDNH[0], images.CIFAR10_FEDNH[1])

    def features(name, **kwargs):
        model = networks.build(name, **kwargs)
        params, stats = model.init(jax.random.key(0), x)
        return model.features(params, stats, x, None, None)[0]

    usual = features('bodies.small:Small')
    assert not np.array_equal(features('bodies.small:Small', precision='bfloat16'), usual)
    seen = features('bodies.small:Small', preprocess=look)
    assert not np.allclose(seen, usual)
    np.testing.assert_array_equal(features('bodies.small:made', preprocess=look), seen)
    np.testing.assert_array_equal(features('bodies.small:rows', preprocess=look), seen)
    assert features('bodies.small:Switch', preprocess=look).shape == (2, 8)
    with pytest.raises(ValueError, match=r'made Small.*, not a base.Model, as what takes `preprocess` must'):
        features('bodies.small:bare', preprocess=look)
    for name in ('SMALL', 'MODEL', 'wide'):
        with pytest.raises(ValueError, match=rf"^model bodies.small:{name}: for precision 'bfloat16' it must be made"):
            features(f'bodies.small:{name}', precision='bfloat16')
    with pytest.raises(ValueError, match=r'^model bodies.small:MODEL: a base.Model prepares its batches itself'):
        features('bodies.small:MODEL', preprocess=look)


@pytest.mark.slow
def test_one_that_breaks_is_told_and_others_go_on(tmp_path, capsys):
    table = {
        'title': 'Mine', 'seeds': [0], 'metrics': {'general': 'global_accuracy'},
        'setting': {**DIGITS, 'algorithm': 'fedavg', 'rounds': 1},
        'methods': {'MLP': {'model': 'mlp'}, 'Flat': {'model': 'bodies.small:Flat'}},
    }  # fmt: skip
    (left,) = runner.carry_out(Study.of(table, 'mine'), tmp_path)
    assert left.setting.model == 'bodies.small:Flat'
    said = capsys.readouterr().err
    assert 'Flat, seed 0' in said
    assert 'dot_general' in said
    for name, said in (
        ('bodies.small:lost', "model bodies.small:lost: KeyError: 'weights'"),
        ('./nets.py:Net', "name a module as `import` does, 'package.module:attribute', and no file"),
        ('nets.py:Net', 'and no file'),
        ('bodies.leaves:Net', 'model bodies.leaves:Net: SystemExit: 3'),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            networks.build(name)


@pytest.mark.slow
def test_devices_are_made_before_a_module_computes(mine, tmp_path):
    path = Path(mine.__file__)
    path.write_text(path.read_text() + '\nMEAN = jnp.array([0.5])\n')
    flags = ['--dataset', 'digits', '--max-examples', '300', '--clients', '6', '--rounds', '1', '--local-epochs', '1']
    flags += ['--model', 'bodies.small:Small', '--devices', '2', '--algorithm', 'fedavg', '--out', str(tmp_path)]
    code = f'from fedjax_nc.experiments import command; command.main({flags!r})'
    paths = os.pathsep.join((str(path.parents[1]), str(Path(__file__).parents[1])))
    done = subprocess.run(
        [sys.executable, '-c', code], env={**os.environ, 'PYTHONPATH': paths}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_a_study_takes_it_and_says_where_it_has_changed_since(mine, tmp_path, capsys):
    table = {
        'title': 'Mine', 'seeds': [0], 'metrics': {'general': 'global_accuracy'},
        'setting': {**DIGITS, 'algorithm': 'fedavg'},
        'methods': {'MLP': {'model': 'mlp'}, 'Mine': {'model': 'bodies.small:Small'}},
    }  # fmt: skip
    study = Study.of(table, 'mine')
    assert runner.carry_out(study, tmp_path) == []
    assert runner.carry_out(study, tmp_path) == []
    assert 'has changed' not in capsys.readouterr().err
    path = Path(mine.__file__)
    path.write_text(path.read_text() + '\n# another thought\n')
    assert runner.carry_out(study, tmp_path) == []
    said = [line for line in capsys.readouterr().err.splitlines() if 'has changed' in line]
    assert len(said) == 1
    assert said[0].startswith('Mine, seed 0: the file of its model has changed since it was run')


@pytest.mark.parametrize(
    ('name', 'said'),
    [
        ('resnet21', "^model must be one of mlp, .* or 'module:attribute', not 'resnet21'"),
        (3, "^model must be one of .*, not 3"),
        ('bodies.nowhere:Small', '^model bodies.nowhere:Small: ModuleNotFoundError.* is its folder in PYTHONPATH'),
        ('bodies.small:Smal', "^model bodies.small:Smal: the module bodies.small has no 'Smal'"),
        ('bodies.small:number', '^model bodies.small:number must be a flax.linen.Module or a base.Model, .* not 3'),
        ('bodies.small:needy', "^model bodies.small:needy: .*missing 1 required positional argument: 'width'"),
        ('bodies.small:wrong', "^model bodies.small:wrong made 'a model', not a flax.linen.Module or a base.Model"),
    ],
)  # fmt: skip
def test_what_is_none_is_refused_before_any_data_is_read(name, said):
    with pytest.raises(ValueError, match=said):
        scene.check(Setting(**DIGITS, model=name))
