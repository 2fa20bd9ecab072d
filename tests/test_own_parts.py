"""Parts of one's own by name: heads, losses, partitions and server optimizers, in settings, studies, command lines."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
import toys

from fedjax_nc import data, experiments, saving, simulate
from fedjax_nc.experiments import Setting, command, pipeline, runner, scene, seeds
from fedjax_nc.experiments.setting import divided
from fedjax_nc.experiments.study import Study

MODULE = '''
"""A classifier by distance, focal loss, and clients that hold every other example."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_nc import heads, losses
from fedjax_nc.base import Head


def centres():
    def init(key, dim, classes):
        return {'at': 0.1 * jax.random.normal(key, (classes, dim))}, {}

    def logits(params, fixed, z):
        return -jnp.sum((z[:, None] - params['at']) ** 2, axis=-1)

    return Head(init, logits)


linear = heads.linear()


def scaled():
    """A learned scale for each class, which is no temperature."""

    def init(key, dim, classes):
        return {'w': 0.1 * jax.random.normal(key, (dim, classes)), 'scale': jnp.ones(classes)}, {}

    return Head(init, lambda params, fixed, z: params['scale'] * (z @ params['w']))


def focal(logits, labels, counts, power=2):
    loss = losses.cross_entropy(logits, labels)
    return (1 - jnp.exp(-loss)) ** power * loss


def usual(logits, labels, counts):
    return losses.cross_entropy(logits, labels)


def strided(labels, clients, *, seed):
    order = np.random.default_rng(seed).permutation(len(labels))
    return [order[i::clients] for i in range(clients)]


def owned(labels, clients, *, seed, owners):
    return [np.flatnonzero(owners % clients == k) for k in range(clients)]


def first(labels, clients, alpha, *, seed=0):
    return [np.arange(i * int(alpha), (i + 1) * int(alpha)) for i in range(clients)]


def broken():
    return 1 // 0


def of_three(logits, labels):
    return logits


def sizeless(labels, clients):
    return []


def nobody(labels, clients, *, seed):
    raise RuntimeError('nobody is there')


def half(lr=0.5):
    return optax.sgd(lr)


def heavy(rate, *, momentum=0.25):
    return optax.sgd(rate, momentum)


def nothing(lr=1.0):
    return lr


def of_numpy(lr=np.float32(0.5), momentum=jnp.float32(0.25)):
    return optax.sgd(lr, momentum)


def scheduled(lr=optax.constant_schedule(0.5), momentum=None):
    assert momentum is None
    return optax.sgd(lr)


def seeded(lr=1.0):
    return optax.chain(optax.add_noise(1e-3, 0.0, jax.random.key(0)), optax.sgd(lr))


def unmade(lr=1.0):
    return optax.GradientTransformation(lambda params: 1 // 0, None)


number = 3
'''
DIGITS = {'dataset': 'digits', 'max_examples': 300, 'clients': 6, 'rounds': 2, 'local_epochs': 1}
SMALL = ['--dataset', 'digits', '--max-examples', '300', '--clients', '6', '--rounds', '2', '--local-epochs', '1']


@pytest.fixture(autouse=True)
def mine(tmp_path_factory, monkeypatch):
    """The module `pieces.some` in a folder from which Python imports."""
    with toys.own_module(tmp_path_factory, monkeypatch, 'pieces.some', MODULE) as module:
        yield module


def losses_of(folder):
    return [json.loads(line)['loss'] for line in (folder / 'metrics.jsonl').read_text().splitlines()]


@pytest.mark.slow
def test_the_librarys_own_by_other_names_are_the_same_run(tmp_path):
    named = {'head': 'linear', 'loss': 'cross_entropy', 'partition': 'iid'}
    own = {'head': 'pieces.some:linear', 'loss': 'pieces.some:usual', 'partition': 'fedjax_nc.data:iid'}
    focal = {**named, 'loss': 'pieces.some:focal'}
    for name, parts in (('named', named), ('own', own), ('focal', focal)):
        experiments.run(Setting(**DIGITS, algorithm='scaffold', **parts), tmp_path / name, progress=False)
    assert losses_of(tmp_path / 'own') == losses_of(tmp_path / 'named')
    assert all(np.array(losses_of(tmp_path / 'focal')) < losses_of(tmp_path / 'named'))  # what is easy counts less


@pytest.mark.slow
def test_a_server_optimizer_has_a_rate_and_what_it_names(tmp_path):
    for own, named in (
        ({}, {'server_optimizer': 'sgd', 'server_lr': 0.5}),
        ({'server_lr': 0.3}, {'server_optimizer': 'sgd', 'server_lr': 0.3}),
    ):
        assert trajectory({'server_optimizer': 'pieces.some:half', **own}) == trajectory(named)
    heavy = {'server_optimizer': 'pieces.some:heavy', 'server_lr': 0.5}
    sgd = {'server_optimizer': 'sgd', 'server_lr': 0.5}
    assert trajectory(heavy) == trajectory({**sgd, 'server_momentum': 0.25})
    assert trajectory({**heavy, 'server_momentum': 0.75}) == trajectory({**sgd, 'server_momentum': 0.75})
    assert trajectory({'server_optimizer': 'pieces.some:scheduled', 'server_lr': 0.5}) == trajectory(sgd)
    own = Setting(**DIGITS, server_optimizer='pieces.some:of_numpy')
    assert json.loads(json.dumps(own.plain()))['server_lr'] == 0.5
    assert trajectory({'server_optimizer': 'pieces.some:of_numpy'}) == trajectory(heavy)
    with pytest.raises(ValueError, match='scheduled has no rate of its own'):
        Setting(**DIGITS, server_optimizer='pieces.some:scheduled')
    with pytest.raises(ValueError, match=r'optax:lion has no rate of its own: give server_lr'):
        Setting(**DIGITS, server_optimizer='optax:lion')
    for given, said in (
        ({'server_optimizer': 'pieces.some:half', 'server_momentum': 0.5}, 'half has no argument `momentum`: leave'),
        ({'server_optimizer': 'pieces.some:nothing'}, 'nothing makes must be an optax optimizer, .*, not 1.0'),
        ({'server_optimizer': 'optax:constant_schedule', 'server_lr': 1.0}, 'must be an optax optimizer, .*, not <'),
        ({'server_optimizer': 'optax:sgd', 'server_lr': 1.0, 'algorithm': 'solo'}, 'no server model to optimize'),
    ):
        with pytest.raises(ValueError, match=said):
            scene.check(Setting(**DIGITS, **{'algorithm': 'fedavg', **given}))
    for given, said in (
        ({'server_optimizer': 'pieces.some:unmade'}, 'server_opt cannot take a step .*: ZeroDivisionError'),
        ({'server_optimizer': 'optax:polyak_sgd', 'server_lr': 1.0}, "server_opt cannot take a step .*'value'"),
    ):
        setting = Setting(**DIGITS, algorithm='fedavg', **given)
        assert re.search(said, str(scene.misfit(setting, scene.load(setting))))
        with pytest.raises(ValueError, match=said):
            experiments.run(setting, tmp_path / given['server_optimizer'], progress=False)


@pytest.mark.slow
def test_random_keys_of_a_server_optimizer_are_kept(tmp_path):
    setting = Setting(**DIGITS, algorithm='fedavg', server_optimizer='pieces.some:seeded')
    summary = experiments.run(setting, tmp_path, progress=False)
    run, digits = experiments.load(tmp_path), scene.load(setting)[0]
    right = np.mean(np.argmax(run.predict(digits.x_test), -1) == digits.y_test)
    assert right == pytest.approx(summary['global_accuracy'])
    assert [u for u in jax.tree.leaves(run.saved.server.opt) if jax.dtypes.issubdtype(u.dtype, jax.dtypes.prng_key)]


def trajectory(given):
    """The losses of three rounds, in which the server moves twice."""
    setting = Setting(**{**DIGITS, 'rounds': 3}, algorithm='fedavg', **given)
    dataset, train, _ = scene.load(setting)
    algorithm, losses = scene.build(setting, dataset).train, []
    state, round = simulate.init(algorithm, toys.KEY, train), jax.jit(simulate.make_round(algorithm))
    for _ in range(3):
        state, report = round(toys.KEY, state, train)
        losses.append(float(report.loss))
    return losses


@pytest.mark.slow
def test_the_command_line_takes_them_and_the_model_is_loaded(tmp_path, capsys):
    own = {
        'head': 'pieces.some:centres', 'loss': 'pieces.some:focal', 'partition': 'pieces.some:strided',
        'server_optimizer': 'pieces.some:half',
    }  # fmt: skip
    flags = [word for name, value in own.items() for word in (f'--{name.replace("_", "-")}', value)]
    summary = command.main([*SMALL, '--algorithm', 'fedprox', *flags, '--out', str(tmp_path)])
    assert summary['global_accuracy'] > 0
    assert summary['personal_accuracy'] > 0
    config = json.loads((tmp_path / 'config.json').read_text())
    assert {name: config[name] for name in own} == own
    assert len({config[f'{name}_source'] for name in own}) == 1  # one file
    assert not {'source', 'model_source'} & set(config)
    setting = Setting.among(config)
    recipe = scene.build(setting, scene.load(setting)[0])
    head = saving.load(tmp_path / 'model.safetensors', recipe.train).server.variables.params['head']
    assert jax.tree.map(np.shape, head) == {'at': (10, 200)}


@pytest.mark.parametrize('name', ['fedetf', 'fedloge', 'ccvr', 'creff', 'fednh'])
def test_methods_with_heads_of_their_own_refuse_others(name):
    with pytest.raises(ValueError, match=f"{name} has no head 'pieces.some:centres', it takes"):
        scene.check(Setting(**DIGITS, algorithm=name, head='pieces.some:centres'))


def test_a_method_with_a_loss_of_its_own_refuses_others():
    with pytest.raises(ValueError, match=r"fednh has no loss 'pieces\.some:focal', it takes cross_entropy"):
        scene.check(Setting(**DIGITS, algorithm='fednh', loss='pieces.some:focal'))


@pytest.mark.parametrize(
    'name',
    [
        'fedavg',
        'fedprox',
        'scaffold',
        'fednova',
        'feddyn',
        'moon',
        'fedmmd',
        'fedrs',
        'fedbn',
        'ditto',
        'fedproto',
        'solo',
    ],
)
def test_the_others_take_them(name):
    setting = Setting(
        **DIGITS, algorithm=name, head='pieces.some:centres', model='resnet20' if name == 'fedbn' else 'mlp'
    )
    assert scene.misfit(setting, scene.load(setting)) is None


def test_a_partition_is_given_what_it_names():
    labels = np.arange(300) % 10
    setting = Setting(**{**DIGITS, 'clients': 3}, partition='pieces.some:first', alpha=7.0)
    assert [list(part[[0, -1]]) for part in divided(labels, setting)] == [[0, 6], [7, 13], [14, 20]]
    for name in ('dirichlet', 'fedjax_nc.data:dirichlet'):
        found = divided(labels, Setting(**DIGITS, partition=name, alpha=0.3, min_size=20, seed=5))
        wanted = data.dirichlet(labels, 6, 0.3, seed=5, min_size=20)
        assert [part.tolist() for part in found] == [part.tolist() for part in wanted]
    found = divided(labels, Setting(**DIGITS, partition='uneven_classes', classes_per_client=3, most_classes=7))
    wanted = data.uneven_classes(labels, 6, (3, 7), seed=0)
    assert [part.tolist() for part in found] == [part.tolist() for part in wanted]
    setting = Setting(**{**DIGITS, 'clients': 2}, partition='pieces.some:owned')
    found = divided(labels[:5], setting, np.array([4, 1, 1, 2, 3]))
    assert [part.tolist() for part in found] == [[0, 3], [1, 2, 4]]
    with pytest.raises(ValueError, match='goes by whose an example is, which digits does not say'):
        divided(labels, setting)


def test_flags_that_a_partition_does_not_name_are_refused():
    def asked(name):
        return command.setting_of(command.arguments([*SMALL, '--partition', name, '--alpha', '9'], 'cifar.py', ''))

    assert asked('pieces.some:first').alpha == 9
    with pytest.raises(ValueError, match=r'--alpha changes nothing with partition pieces\.some:strided'):
        asked('pieces.some:strided')


@pytest.mark.parametrize(
    ('given', 'said'),
    [
        ({'head': 'conic'}, "head must be one of linear, .*, or 'module:attribute', not 'conic'"),
        ({'loss': 3}, "loss must be one of cross_entropy, .*, or 'module:attribute', not 3"),
        ({'partition': 'stars'}, "partition must be one of dirichlet, .*, natural, or 'module:function', not 'stars'"),
        ({'head': 'pieces.some:rings'}, "head pieces.some:rings: the module pieces.some has no 'rings'"),
        ({'loss': 'pieces.gone:focal'}, 'loss pieces.gone:focal: .*No module named'),
        ({'head': 'pieces.some:number'}, 'head pieces.some:number must be a base.Head, or a function that makes one'),
        ({'head': 'pieces.some:broken'}, 'is made by a call without arguments, and says: ZeroDivisionError'),
        ({'head': 'pieces.some:focal'}, 'is made by a call without arguments, and says: .*missing 3'),
        (
            {'loss': 'pieces.some:of_three'},
            r'loss pieces.some:of_three must be a function of \(logits, labels, counts\)',
        ),
        ({'server_optimizer': 'adam'}, "must be one of average, sgd, .*, or 'module:function', not 'adam'"),
        (
            {'server_optimizer': 'pieces.some:number'},
            r'must be a function of \(lr\), as server_optimizers.fedyogi; not 3',
        ),
        ({'server_optimizer': 'pieces.some:of_three'}, r"function of \(lr\).*missing a required argument: 'labels'"),
        ({'partition': 'pieces.some:number'}, r'must be a function of \(labels, clients, seed=\), as data.iid; not 3'),
        ({'partition': 'pieces.some:sizeless'}, "as data.iid; .*: got an unexpected keyword argument 'seed'"),
    ],
)
def test_what_is_none_is_refused_at_once(given, said):
    with pytest.raises(ValueError, match=said):
        Setting(**DIGITS, **given)


def test_what_a_partition_raises_is_told():
    with pytest.raises(ValueError, match=r'partition pieces\.some:nobody: RuntimeError: nobody is there'):
        scene.load(Setting(**DIGITS, partition='pieces.some:nobody'))


@pytest.mark.slow
def test_a_study_takes_them_and_says_where_they_have_changed_since(mine, tmp_path, capsys):
    rows = {
        'Linear': {'algorithm': 'fedavg', 'head': 'linear'},
        'Centres': {'algorithm': 'fedavg', 'head': 'pieces.some:centres'},
        'Strided': {'algorithm': 'fedavg', 'partition': 'pieces.some:strided'},
        'Slower': {'algorithm': 'fedavg', 'server_optimizer': 'pieces.some:half'},
    }
    study = Study.of(
        {
            'title': 'Mine',
            'seeds': [0, 1],
            'metrics': {'general': 'global_accuracy'},
            'setting': DIGITS,
            'methods': rows,
        },
        'mine',
    )
    assert runner.carry_out(study, tmp_path, show=False) == []
    capsys.readouterr()
    assert runner.carry_out(study, tmp_path) == []
    assert 'has changed' not in capsys.readouterr().err
    path = Path(mine.__file__)
    path.write_text(path.read_text() + '\n# another thought\n')
    assert runner.carry_out(study, tmp_path) == []
    said = [line.partition(' since')[0] for line in capsys.readouterr().err.splitlines() if 'has changed' in line]
    assert sorted(said) == [
        *[f'Centres, seed {seed}: the file of its head has changed' for seed in (0, 1)],
        *[f'Slower, seed {seed}: the file of its server optimizer has changed' for seed in (0, 1)],
        *[f'Strided, seed {seed}: the file of its partition has changed' for seed in (0, 1)],
    ]


@pytest.mark.slow
@pytest.mark.parametrize('together', [False, True])
def test_a_scale_of_ones_own_need_be_no_number(tmp_path, together):
    made = Setting(**DIGITS, head='pieces.some:scaled', algorithm='fedavg')
    settings = [dataclasses.replace(made, seed=seed) for seed in range(1 + together)]
    if together:
        found = seeds.run(settings, [tmp_path / str(s.seed) for s in settings], progress=False)
    else:
        found = [pipeline.run(settings[0], tmp_path / 'run', progress=False)]
    assert all(0 < summary['global_accuracy'] < 1 for summary in found)
