"""Real models in the engine, and the effect that FedETF was published for on real images."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from fedjax_nc import aggregators, data, evaluate, heads, local, losses, models, simulate, training
from fedjax_nc.algorithms import fedavg, fedetf
from fedjax_nc.experiments import recipes
from fedjax_nc.objective import objective

PLAN = local.Plan(batch_size=8, epochs=2)


@pytest.fixture(scope='module')
def images():
    """Three clients of 5, 19 and 12 random uint8 images, index rows padded with junk."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (40, 12, 12, 3), np.uint8), rng.integers(0, 4, 40).astype(np.int32)
    rows = rng.permutation(40)
    return data.federate(x, y, [rows[:5], rows[5:24], rows[24:36]], 4)


def play(images, norm='batch', conv=None, dtype=jnp.float32, chunk=1, rounds=2, **kwargs):
    """A few rounds of FedETF with a small ResNet, augmentation and the library's own compilation."""
    body = models.ResNet(widths=(4,), blocks=(1,), norm=norm, conv=conv, dtype=dtype)
    model = models.from_flax(body, data.images.pipeline(crop=1, flip=True))
    algorithm = fedetf.algorithm(model, local.sgd(0.05), plan=PLAN, **kwargs)
    state, run = (
        simulate.init(algorithm, toys.KEY, images),
        simulate.compiled(simulate.make_round(algorithm, chunk=chunk)),
    )
    for t in range(rounds):
        state, report = run(jax.random.fold_in(toys.KEY, t), state, images)
    return state.server.variables, report, algorithm, state


@pytest.fixture(scope='module')
def alone(images):
    """One client at a time, group norm, for two rounds and for one."""
    return {rounds: play(images, 'group', rounds=rounds)[0] for rounds in (1, 2)}


def test_pool_stays_uint8(images):
    assert images.x.dtype == jnp.uint8


@pytest.mark.slow
@pytest.mark.parametrize('norm', ['batch', 'group'])
def test_padding_and_lanes_change_nothing_with_batch_norm_and_augmentation(images, norm):
    alone, report, _, _ = play(images, norm)
    n = jnp.arange(images.index.shape[1])
    junk = images._replace(index=jnp.where(n < images.size[:, None], images.index, 39 - n))
    toys.same(play(junk, norm)[0], alone)
    # Float32 sums in another order, amplified by two rounds of training.
    toys.same(play(images, norm, chunk=3)[0], alone, atol=2e-3)
    assert bool(report.finite)
    assert (norm == 'batch') == bool(alone.stats)


@pytest.mark.slow
@pytest.mark.parametrize('conv', [models.conv_native, models.conv_patches, models.conv_onednn])
def test_forms_of_convolution_train_the_same_model(images, alone, conv):
    toys.same(play(images, 'group', conv=conv)[0], alone[2], atol=1e-3)


@pytest.mark.slow
def test_batch_norm_statistics_are_averaged_and_can_be_pooled(images):
    mean, pooled = play(images, rounds=1)[0], play(images, rounds=1, aggregate_stats=aggregators.pooled_stats())[0]
    toys.same(mean.params, pooled.params)
    pairs = list(zip(*(jax.tree_util.tree_leaves_with_path(v.stats) for v in (mean, pooled)), strict=True))
    for (path, a), (_, b) in pairs:
        if path[-1].key == 'mean':
            np.testing.assert_allclose(a, b, atol=1e-5)
        else:
            assert (b > a - 1e-5).all()  # the pooled variance adds that of the means
    assert any((b > a + 1e-6).any() for (path, a), (_, b) in pairs if path[-1].key == 'var')


def test_mixed_precision_keeps_float32_parameters_and_stays_close(images, alone):
    full, low = alone[1], play(images, 'group', rounds=1, dtype=jnp.bfloat16)[0]
    assert all(u.dtype == jnp.float32 for u in jax.tree.leaves(low))
    gap = max(
        float(jnp.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (full.params, low.params)), strict=True)
    )
    assert 0 < gap < 0.1


@pytest.mark.slow
def test_all_clients_become_personal_in_one_call(images):
    _, _, _, state = play(images)
    model = models.from_flax(models.ResNet(widths=(4,), blocks=(1,), norm='batch'))
    stage = fedetf.personalize(model, local.sgd(0.05), plan=PLAN, cycles=3, turn=PLAN)
    own = simulate.join(stage, toys.KEY, state.server, 3)
    own, report = simulate.compiled(simulate.make_round(stage, chunk=2))(toys.KEY, own, images)
    assert np.isfinite(report.loss)
    tables = evaluate.per_client(stage, own, images)
    np.testing.assert_array_equal(tables.sum((1, 2)), images.size)
    shared = evaluate.per_client(stage, own, images, personal=False)
    assert evaluate.over_clients(tables).mean >= evaluate.over_clients(shared).mean


def test_etf_head_runs_under_any_algorithm_and_has_nothing_to_train(images):
    model = models.from_flax(models.MLP((8,)))
    head = heads.etf(project=False, unit_features=False, learn_scale=False)
    algorithm = fedavg.algorithm(objective(model, head, losses.cross_entropy), local.sgd(0.05), plan=PLAN)
    state = simulate.init(algorithm, toys.KEY, images)
    assert state.server.variables.params['head'] == {}
    after, _ = simulate.compiled(simulate.make_round(algorithm))(
        toys.KEY, simulate.init(algorithm, toys.KEY, images), images
    )
    toys.same(after.server.variables.fixed, state.server.variables.fixed)


@pytest.mark.slow
def test_fedetf_beats_fedavg_on_unequal_digits():
    """Handwritten digits, 20 clients, Dirichlet(0.1), 5 clients a round: rounds 16 to 20, three seeds."""
    digits = data.load_dataset('digits')
    reached = {}
    for seed in range(3):
        parts = data.dirichlet(digits.y_train, 20, 0.1, seed=seed)
        train, _ = data.split(data.federate(digits.x_train, digits.y_train, parts), 0.3, seed=seed)
        for name in ('fedavg', 'fedetf'):
            recipe = recipes.RECIPES[name](
                models.from_flax(models.MLP((64, 64))), local.sgd(0.02), local.Plan(16, 10), scale=4.0
            )
            run = training.run(
                recipe.train, jax.random.key(seed), simulate.init(recipe.train, jax.random.key(seed), train), train,
                rounds=20, cohort=5, eval_every=20, progress=False,
                evaluate=lambda s, a=recipe.train: {
                    'accuracy': evaluate.accuracy(evaluate.generic(a, s, digits.x_test, digits.y_test, 10))
                },
            )  # fmt: skip
            reached.setdefault(name, []).append(training.last_mean(run.history))
    assert np.mean(reached['fedetf']) > np.mean(reached['fedavg']) + 0.03, reached
    assert min(reached['fedetf']) > 0.8, reached
