"""Models that are taken away: saved, loaded, exported."""

import json
import subprocess
import sys

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from flax import nnx
from safetensors.numpy import load_file, save_file

import fedjax_nc
from fedjax_nc import data, heads, local, losses, models, population, saving, simulate, training
from fedjax_nc.algorithms import fedavg, fedetf, fedloge, finetune, solo
from fedjax_nc.experiments import recipes
from fedjax_nc.objective import objective

CLIENT = 2


@pytest.fixture(scope='module')
def clients():
    return toys.ragged((30, 20, 25, 9))


def trained(algorithm, clients):
    """A state in which no number is what it began with by chance."""
    state = simulate.init(algorithm, toys.KEY, clients)
    return jax.jit(simulate.make_round(algorithm))(toys.KEY, state, clients)[0]


def logits(algorithm, state, client, x):
    own = None if client is None else jax.tree.map(lambda u: u[client], state.clients)
    return algorithm.predict(state.server, own, x)


METHODS = [name for name in recipes.RECIPES if name != 'fedbn']


@pytest.mark.parametrize('name', METHODS)
def test_every_method_is_read_back_bit_for_bit(name, clients, tmp_path):
    held = recipes.auxiliary(clients.x, clients.y, toys.CLASSES)
    recipe = recipes.RECIPES[name](toys.tiny, toys.opt, local.Plan(16, 1), rounds=5, auxiliary=held)
    first = simulate.init(recipe.train, toys.KEY, clients)
    state = recipe.enter(recipe.final, toys.KEY, first, clients) if recipe.personalize else first
    path = tmp_path / 'model.safetensors'
    for algorithm, held, client, like in (
        (recipe.train, first, None, None), (recipe.final, state, CLIENT, state)
    ):  # fmt: skip
        if client is None and not recipe.generic:
            continue
        saving.save(path, algorithm, held, clients, client=client)
        found = saving.load(path, algorithm, like)
        assert jax.tree.structure(found.server) == jax.tree.structure(held.server)
        toys.same(found.server, held.server)
        x = clients.x[:7]
        toys.same(algorithm.predict(found.server, found.client, x), logits(algorithm, held, client, x))


def test_names_can_be_read_and_the_description_says_what_it_is(clients, tmp_path):
    algorithm = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN)
    path, classes = tmp_path / 'model.safetensors', ['a', 'b', 'c', 'd', 'e']
    saving.save(path, algorithm, trained(algorithm, clients), clients, classes=classes, about={'model': 'tiny'})
    content = load_file(path)
    assert {'server.variables.params.body.w', 'server.variables.params.head.b', 'server.round'} <= set(content)
    about = saving.load(path, algorithm).about
    assert about['example'] == {'shape': [toys.DIM], 'dtype': 'float32'}
    assert (about['num_classes'], about['num_clients'], about['client']) == (toys.CLASSES, 4, None)
    assert (about['classes'], about['model'], about['library']) == (classes, 'tiny', fedjax_nc.__version__)
    assert b'pickle' not in path.read_bytes()
    assert [p.name for p in tmp_path.iterdir()] == ['model.safetensors']


@pytest.mark.parametrize('view', [lambda w: np.ascontiguousarray(w.T).T, lambda w: w[::-1].copy()[::-1]])
def test_arrays_are_saved_as_they_are_however_they_lie_in_memory(view, clients, tmp_path):
    algorithm = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN)
    state, path = trained(algorithm, clients), tmp_path / 'model'
    turned = jax.tree.map(lambda u: view(np.asarray(u)) if u.ndim == 2 else u, state.server)
    assert any(isinstance(u, np.ndarray) and not u.flags.c_contiguous for u in jax.tree.leaves(turned))
    saving.save(path, algorithm, state._replace(server=turned), clients)
    toys.same(saving.load(path, algorithm).server, state.server)


def test_a_store_of_client_states_serves_as_well(clients, tmp_path):
    algorithm = solo.algorithm(toys.task, toys.opt, plan=toys.PLAN)
    state = population.init(algorithm, toys.KEY, clients)
    state, _ = population.make_round(algorithm)(toys.KEY, state, clients)
    saving.save(tmp_path / 'own', algorithm, state, clients, client=CLIENT)
    found = saving.load(tmp_path / 'own', algorithm)
    toys.same(found.client, jax.tree.map(lambda u: u[0], state.clients.take(np.array([CLIENT]))))


def test_training_goes_on_from_what_was_saved(clients, tmp_path):
    algorithm = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN)
    state = trained(algorithm, clients)
    saving.save(tmp_path / 'model', algorithm, state, clients)
    again = simulate.join(algorithm, toys.KEY, saving.load(tmp_path / 'model', algorithm).server, 4)
    round = jax.jit(simulate.make_round(algorithm))
    toys.same(round(toys.KEY, again, clients)[0], round(toys.KEY, state, clients)[0])


def test_what_cannot_be_saved(clients, tmp_path):
    algorithm = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN)
    state, alone = trained(algorithm, clients), solo.algorithm(toys.task, toys.opt, plan=toys.PLAN)
    path = tmp_path / 'model'
    for message, call in {
        'no generic model': lambda: saving.save(path, alone, simulate.init(alone, toys.KEY, clients), clients),
        'keep nothing': lambda: saving.save(path, algorithm, state, clients, client=1),
        'state has 4 clients, and the data have 9': lambda: saving.save(
            path, alone, simulate.init(alone, toys.KEY, clients), toys.ragged([20] * 9), client=7
        ),
        '4 clients, and the data have 9': lambda: saving.save(
            path, alone, population.init(alone, toys.KEY, clients), toys.ragged([20] * 9), client=7
        ),
        'one of 4, not 9': lambda: saving.save(path, algorithm, state, clients, client=9),
        'name all 5': lambda: saving.save(path, algorithm, state, clients, classes=['a', 'b']),
        'JSON can hold': lambda: saving.save(path, algorithm, state, clients, about={'model': nn.Dense(3)}),
        'not say client, format,': lambda: saving.save(
            path, algorithm, state, clients, about={'client': 7, 'format': 'y', 'mine': 1}
        ),
        'not JSON compliant': lambda: saving.save(path, algorithm, state, clients, about={'rate': float('nan')}),
        'platforms must name': lambda: saving.export(path, algorithm, state, clients, platforms=('x86',)),
        'an Algorithm': lambda: saving.load(path, toys.task),
        'state must be': lambda: saving.save(path, algorithm, state.server, clients),
    }.items():
        with pytest.raises(ValueError, match=message) as info:
            call()
        assert '\n' not in str(info.value)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_loaded(clients, tmp_path):
    algorithm, path = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN), tmp_path / 'model'
    saving.save(path, algorithm, trained(algorithm, clients), clients)
    whole = path.read_bytes()
    wide = objective(models.from_flax(models.MLP((17,))), heads.linear(), losses.cross_entropy)
    etf = objective(toys.tiny, heads.etf(), losses.cross_entropy)
    odd = 'of another algorithm or model than the one given: of its arrays it (lacks|has)'
    for task, message in ((wide, odd), (etf, 'more arrays')):
        with pytest.raises(ValueError, match=message):
            saving.load(path, fedavg.algorithm(task, toys.opt))
    small = toys.tiny._replace(init=lambda key, x: (heads.dense_init(key, 12, 4), ()))
    with pytest.raises(ValueError, match=r'is float32 \(16,\) and should be float32 \(4,\)'):
        saving.load(path, fedavg.algorithm(objective(small, heads.linear(), losses.cross_entropy), toys.opt))
    for content in (whole[:100], whole[:-7], b'', b'\x80\x04junk', whole[:8] + b'{' * 50 + whole[58:]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match='damaged, or no safetensors file') as info:
            saving.load(path, algorithm)
        assert '\n' not in str(info.value)
    path.write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])  # one bit of one number
    with pytest.raises(ValueError, match='damaged: its numbers'):
        saving.load(path, algorithm)
    save_file({'a': np.ones(3)}, path)
    with pytest.raises(ValueError, match=r'not written by saving.save'):
        saving.load(path, algorithm)
    with pytest.raises(FileNotFoundError, match='is not there'):
        saving.load(tmp_path / 'other', algorithm)


def test_a_stage_that_follows_training_needs_a_state_of_its_kind(clients, tmp_path):
    algorithm = fedloge.algorithm(toys.tiny, toys.opt, plan=toys.PLAN)
    stage = fedloge.realign(toys.tiny, toys.opt, plan=toys.PLAN)
    state = fedloge.stage_state(trained(algorithm, clients))
    saving.save(tmp_path / 'own', stage, state, clients, client=CLIENT)
    with pytest.raises(ValueError, match='as `like`'):
        saving.load(tmp_path / 'own', stage)
    toys.same(saving.load(tmp_path / 'own', stage, state).server, state.server)


def images(side=12):
    rng = np.random.default_rng(0)
    y = rng.integers(0, 10, 40)
    return data.federate(
        rng.integers(0, 256, (40, side, side, 3)).astype(np.uint8), y, [np.arange(20), np.arange(20, 40)], 10
    )


BARE = """
import json, sys
sys.modules.update(fedjax_nc=None, flax=None, optax=None, equinox=None)
import jax, numpy as np
program = jax.export.deserialize(bytearray(open(sys.argv[1], 'rb').read()))
x = np.load(sys.argv[2])
np.save(sys.argv[3], np.concatenate([program.call(x[:1]), program.call(x[1:])]))
assert json.load(open(sys.argv[1] + '.json'))['num_classes'] == 10
"""


@pytest.mark.slow
@pytest.mark.parametrize('body', [models.CNN(), models.ResNet20(norm='batch')], ids=['cnn', 'resnet20'])
def test_an_exported_model_predicts_without_this_library(body, tmp_path):
    """In a process that cannot import it, generic and personal, trained here by FedETF."""
    clients = images(32)
    model, plan = models.from_flax(body, data.images.pipeline(crop=2, flip=True)), local.Plan(10, 1)
    algorithm, stage = fedetf.algorithm(model, toys.opt, plan=plan), finetune.algorithm(
        objective(model, heads.etf(), losses.balanced_softmax), toys.opt, plan=plan
    )  # fmt: skip
    state = trained(algorithm, clients)
    own = simulate.join(stage, toys.KEY, state.server, 2)
    own, _ = jax.jit(simulate.make_round(stage))(toys.KEY, own, clients)
    x = clients.x[:5]
    np.save(tmp_path / 'x.npy', x)
    for name, method, held, client in (('generic', algorithm, state, None), ('personal', stage, own, 1)):
        path = tmp_path / f'{name}.jax'
        saving.export(path, method, held, clients, client=client)
        assert b'onednn$' not in path.read_bytes()
        assert json.loads((tmp_path / f'{name}.jax.json').read_text())['platforms'] == ['cpu', 'cuda', 'tpu']
        out = tmp_path / f'{name}.npy'
        subprocess.run([sys.executable, '-c', BARE, path, tmp_path / 'x.npy', out], check=True)
        np.testing.assert_allclose(np.load(out), logits(method, held, client, x), atol=1e-6)


@pytest.mark.parametrize('client', [None, 2])
def test_what_was_read_is_exported_without_data(client, clients, tmp_path):
    plan = {'plan': toys.PLAN}
    algorithm = fedavg.algorithm(toys.task, toys.opt, **plan) if client is None else solo.algorithm(
        toys.task, toys.opt, **plan
    )  # fmt: skip
    state, names = trained(algorithm, clients), [*'abcde']
    said = {'classes': names, 'about': {'made by': 'me'}}
    saving.save(tmp_path / 'kept', algorithm, state, clients, client=client, **said)
    saving.export(tmp_path / 'one', algorithm, state, clients, client=client, **said)
    saved = saving.load(tmp_path / 'kept', algorithm)
    saving.export(tmp_path / 'other', algorithm, saved)
    about = [json.loads((tmp_path / f'{name}.json').read_text()) for name in ('one', 'other')]
    assert about[0] == about[1]
    programs = [jax.export.deserialize(bytearray((tmp_path / name).read_bytes())) for name in ('one', 'other')]
    toys.same(*(program.call(clients.x[:3]) for program in programs))
    saving.export(tmp_path / 'more', algorithm, saved, about={'made for': 'you'}, classes=[*'vwxyz'])
    more = json.loads((tmp_path / 'more.json').read_text())
    assert more == {**about[0], 'made for': 'you', 'classes': [*'vwxyz']}
    for message, given, how in (
        ('give neither', (saved, clients), {}),
        ('give neither', (saved,), {'client': 1}),
        ('data must be given with a state', (state,), {}),
        ('state must be a State, or Saved', ('kept',), {}),
        ('name all 5', (saved,), {'classes': []}),
        ('what JSON can hold by name', (saved,), {'about': ['x']}),
        ('client 9 of 4', (saved._replace(about={**saved.about, 'client': 9}),), {}),
    ):
        with pytest.raises(ValueError, match=message):
            saving.export(tmp_path / 'wrong', algorithm, *given, **how)
    saving.export(tmp_path / 'array', algorithm, saved, classes=np.array(names))
    assert not list(tmp_path.glob('wrong*'))


def test_a_model_that_must_know_the_size_of_a_batch(clients, tmp_path):
    """`len(x)` is a number, which a batch of any size does not have."""
    model = models.from_functions(
        lambda key, x: jnp.ones((toys.DIM, 6)), lambda w, x: jax.nn.relu(jnp.reshape(x, (len(x), -1)) @ w)
    )
    algorithm = fedavg.algorithm(objective(model, heads.linear(), losses.cross_entropy), toys.opt, plan=toys.PLAN)
    state = trained(algorithm, clients)
    with pytest.raises(ValueError, match=r'write x.shape\[0\] for len\(x\)') as info:
        saving.export(tmp_path / 'model.jax', algorithm, state, clients)
    assert '\n' not in str(info.value)
    assert not list(tmp_path.iterdir())
    saving.export(tmp_path / 'model.jax', algorithm, state, clients, batch_size=4)
    program = jax.export.deserialize(bytearray((tmp_path / 'model.jax').read_bytes()))
    want = logits(algorithm, state, None, clients.x[:4])
    np.testing.assert_allclose(program.call(clients.x[:4]), want, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize('library', ['nnx', 'equinox'])
def test_models_of_other_libraries_are_trained_resumed_saved_and_exported(library, clients, tmp_path):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(toys.DIM, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)

        def __call__(self, x):
            return nnx.relu(self.norm(self.layer(x)))

    make = {
        'nnx': lambda: models.from_nnx(Net),
        'equinox': lambda: models.from_equinox(
            lambda key: eqx.nn.MLP(toys.DIM, 8, 8, 1, final_activation=jax.nn.relu, key=key)
        ),
    }[library]
    runs = []
    for rounds in (1, 2):  # the second call makes everything anew, as a new process does
        algorithm = fedetf.algorithm(make(), toys.opt, plan=toys.PLAN)
        state = simulate.init(algorithm, toys.KEY, clients)
        runs.append(training.run(
            algorithm, toys.KEY, state, clients, rounds=rounds, out=tmp_path / 'run', resume=True, progress=False,
        ))  # fmt: skip
    assert len(runs[1].history) == 2
    saving.save(tmp_path / 'model', algorithm, runs[1].state, clients)
    again = fedetf.algorithm(make(), toys.opt, plan=toys.PLAN)
    found = saving.load(tmp_path / 'model', again)
    want = logits(algorithm, runs[1].state, None, clients.x)
    toys.same(again.predict(found.server, None, clients.x), want)
    saving.export(tmp_path / 'model.jax', algorithm, runs[1].state, clients)
    program = jax.export.deserialize(bytearray((tmp_path / 'model.jax').read_bytes()))
    np.testing.assert_allclose(program.call(jnp.asarray(clients.x)), want, atol=1e-6)


@pytest.mark.parametrize(
    ('name', 'value'),
    [
        ('num_clients', 'x'),
        ('num_clients', 0),
        ('num_classes', None),
        ('num_classes', 10**12),
        ('example', {'shape': 'abc', 'dtype': 'float32'}),
        ('example', {'shape': [-1], 'dtype': 'float32'}),
        ('example', {'shape': [3], 'dtype': 'object'}),
        ('', '[' * 100_000),
    ],
)
def test_a_damaged_description_is_said_in_a_line(name, value, clients, tmp_path):
    algorithm, path = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN), tmp_path / 'model'
    saving.save(path, algorithm, simulate.init(algorithm, toys.KEY, clients), clients)
    about = {**saving.load(path, algorithm).about, name: value}
    save_file(load_file(path), path, metadata={'fedjax_nc': json.dumps(about) if name else value})
    with pytest.raises(ValueError, match='is damaged') as info:
        saving.load(path, algorithm)
    assert '\n' not in str(info.value)


def test_what_cannot_be_written_leaves_nothing_behind(clients, tmp_path):
    algorithm, path = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN), tmp_path / 'model'
    state = simulate.init(algorithm, toys.KEY, clients)
    path.mkdir()
    with pytest.raises(OSError, match='directory'):
        saving.save(path, algorithm, state, clients)
    assert [p.name for p in tmp_path.iterdir()] == ['model']
    for wrong in ({'about': [1]}, {'classes': 5}):
        with pytest.raises(ValueError, match='must'):
            saving.save(tmp_path / 'other', algorithm, state, clients, **wrong)
