"""Models with BatchNorm under the personalised methods: who evaluates with what, what is averaged, what stays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from fedjax_nc import heads, local, losses, simulate, tree
from fedjax_nc.algorithms import (
    ditto,
    fedavg,
    fedbabu,
    fedetf,
    fedloge,
    fedper,
    fedproto,
    fedprox,
    fedrep,
    fedrod,
    finetune,
    latest,
)
from fedjax_nc.base import Batch
from fedjax_nc.objective import objective, on_features

task = objective(toys.normed, heads.linear(), losses.cross_entropy)
opt, still = local.sgd(0.05), local.sgd(0.0)
EMPTY, IDS = 3, jnp.array([0, 3, 4])


@pytest.fixture(scope='module')
def population(data):
    """Client 3 holds nothing."""
    return data._replace(size=data.size.at[EMPTY].set(0), counts=data.counts.at[EMPTY].set(0))


def played(algorithm, data, ids=IDS):
    before = simulate.init(algorithm, toys.KEY, data)
    after, _ = jax.jit(simulate.make_round(algorithm, chunk=1))(toys.KEY, before, data, ids)
    return before, after


METHODS = {
    'fedper': lambda **kw: fedper.algorithm(task, opt, plan=toys.PLAN, **kw),
    'fedrep': lambda **kw: fedrep.algorithm(task, opt, head_epochs=1, plan=toys.PLAN, **kw),
    'fedbabu': lambda **kw: fedbabu.algorithm(task, opt, plan=toys.PLAN, **kw),
    'fedrod': lambda **kw: fedrod.algorithm(toys.normed, opt, plan=toys.PLAN, **kw),
    'ditto': lambda **kw: ditto.algorithm(task, opt, plan=toys.PLAN, **kw),
}


@pytest.mark.parametrize('name', METHODS)
def test_statistics_are_plain_means_of_what_clients_end_with(population, name):
    algorithm = latest.keep(METHODS[name]())
    before, after = played(algorithm, population)
    ends = jax.tree.map(lambda u: np.asarray(u, np.float64)[np.array([0, 4])].mean(0), after.clients.variables.stats)
    toys.same(after.server.variables.stats, ends, atol=1e-5)
    change = jax.tree.map(
        lambda a, b: float(jnp.abs(a - b).max()), after.server.variables.stats, before.server.variables.stats
    )
    assert min(jax.tree.leaves(change)) > 1e-3
    kept = jax.tree.map(lambda u: u[EMPTY], (before.clients, after.clients))
    toys.same(*kept)  # nobody's work is no work


@pytest.mark.parametrize('name', [name for name in METHODS if name != 'ditto'])  # which has models of its own
def test_latest_models_predict_with_the_statistics_they_ended_with(population, name):
    algorithm = latest.keep(METHODS[name]())
    _, after = played(algorithm, population)
    mine = jax.tree.map(lambda u: u[4], after.clients)
    x = population.x[:20]
    whole = after.server._replace(variables=mine.variables)
    np.testing.assert_array_equal(algorithm.predict(after.server, mine, x), METHODS[name]().predict(whole, mine.own, x))
    stale = mine._replace(variables=mine.variables._replace(stats=after.server.variables.stats))
    assert np.abs(algorithm.predict(after.server, mine, x) - algorithm.predict(after.server, stale, x)).max() > 1e-3


def test_fedreps_head_is_fitted_to_features_in_evaluation_mode(population):
    """With other keys for its batches than the body has."""
    plan = toys.PLAN
    algorithm = fedrep.algorithm(task, still, head_opt=opt, head_epochs=1, plan=plan)
    server, shard = simulate.init(algorithm, toys.KEY, population).server, population.shard(4)
    first = algorithm.init_client(toys.KEY, server)
    got = jax.jit(algorithm.client)(toys.KEY, server, first, shard)[0].head

    def fitted(key):
        v = server.variables
        own = local.featurize(lambda batch: task.features(v, batch)[0], shard, plan.batch_size)

        def put(head):
            return v._replace(params={**v.params, 'head': head})

        one = plan._replace(epochs=1)
        return finetune.fit(key, on_features(task), v, first.head, put, opt(0), own, one)[0].params['head']

    toys.same(got, jax.jit(fitted)(jax.random.fold_in(toys.KEY, plan.epochs)), atol=1e-6)
    other = jax.jit(fitted)(toys.KEY)
    assert max(np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (got, other)), strict=True)) > 1e-5


def test_fedrods_personal_head_is_fitted_to_features_in_evaluation_mode(population):
    """A step along the mean gradient on the whole of a client's data, by hand."""
    whole = local.Plan(1000, 1)
    algorithm = fedrod.algorithm(toys.normed, still, personal_opt=local.sgd(1.0, 0.0, 0.0), plan=whole)
    server = simulate.init(algorithm, toys.KEY, population).server
    start = algorithm.init_client(toys.KEY, server)
    x, y = toys.examples(population, 4)
    mine = jax.jit(algorithm.client)(toys.KEY, server, start, population.shard(4))[0]
    # The generic phase stands still but for running statistics, which one batch of everything has moved.
    v = server.variables
    _, stats = task.features(v, Batch(jnp.asarray(x, jnp.float32), key=toys.KEY))
    z = np.asarray(task.features(v._replace(stats=stats), Batch(jnp.asarray(x, jnp.float32)))[0], np.float64)
    w, p = (np.asarray(u['w'], np.float64) for u in (v.params['head'], start.head))
    e = np.exp(z @ (w + p))
    q = (e / e.sum(1, keepdims=True) - np.eye(toys.CLASSES)[y]) / len(y)
    np.testing.assert_allclose(mine.head['w'], p - z.T @ q, atol=1e-5)


def test_fedprotos_means_are_of_features_in_evaluation_mode(population):
    algorithm = fedproto.algorithm(task, opt, plan=toys.PLAN)
    server = simulate.init(algorithm, toys.KEY, population).server
    mine, message, _ = jax.jit(algorithm.client)(toys.KEY, server, server.variables, population.shard(4))
    x, y = toys.examples(population, 4)
    z = np.asarray(task.features(mine, Batch(jnp.asarray(x, jnp.float32)))[0])
    for c in np.unique(y):
        np.testing.assert_allclose(message.rows[c], z[y == c].mean(0), atol=1e-5)


def test_dittos_personal_model_has_statistics_of_its_own(population):
    """They move in its own training, and prediction uses them."""
    algorithm = ditto.algorithm(task, opt, lam=0.0, personal_opt=opt, clip=None, plan=toys.PLAN)
    server = simulate.init(algorithm, toys.KEY, population).server
    start = algorithm.init_client(toys.KEY, server)
    mine = jax.jit(algorithm.client)(toys.KEY, server, start, population.shard(4))[0]
    alone = finetune.algorithm(task, opt, plan=toys.PLAN)
    key = jax.random.fold_in(toys.KEY, toys.PLAN.epochs)
    want = jax.jit(alone.client)(key, server, server.variables, population.shard(4))[0]
    toys.same(mine.personal, want, atol=1e-6)
    moved = zip(*(jax.tree.leaves(v.stats) for v in (mine.personal, start.personal)), strict=True)
    assert all(np.abs(new - old).max() > 1e-3 for new, old in moved)
    x = population.x[:9]
    z, _ = task.features(want, Batch(x))
    np.testing.assert_allclose(algorithm.predict(server, mine, x), task.logits(want, z), atol=1e-5)


def test_fedproxs_anchor_holds_scales_of_norms_and_no_statistics(population):
    v = simulate.init(fedprox.algorithm(task, opt, mu=2.0), toys.KEY, population).server.variables
    batch = Batch(population.x[:3])

    def penalty(mine):
        return float(fedprox.proximal(2.0)(mine, batch.x, batch, fedavg.Server(v, (), jnp.int32(0)), ()))

    assert penalty(v._replace(stats=jax.tree.map(lambda u: u + 1, v.stats))) == 0
    moved = {name: {**u, 'scale': u['scale'] + 1} if 'scale' in u else u for name, u in v.params['body'].items()}
    assert penalty(v._replace(params={**v.params, 'body': moved})) == pytest.approx(8)  # eight scales


@pytest.mark.slow
def test_fedloges_realignment_leaves_statistics_alone(population):
    """Heads are tuned on features in evaluation mode, and the server stands still."""
    train = fedloge.algorithm(toys.normed, opt, plan=toys.PLAN)
    stage = fedloge.realign(toys.normed, opt, plan=toys.PLAN, finetune_epochs=2)
    _, state = played(train, population)
    begun = fedloge.stage_state(state)
    kept = jax.tree.map(np.asarray, begun.server)
    after, _ = jax.jit(simulate.make_round(stage, chunk=1))(toys.KEY, begun, population)
    toys.same(after.server, kept)
    heads = begun.clients.head['w'], after.clients.realigned['w']
    assert np.abs(heads[0][4] - heads[1][4]).max() > 1e-3


def test_fedetfs_alternating_stage_leaves_the_body_and_its_statistics(population):
    """The other one moves both, and neither projection nor frame."""
    first = simulate.init(fedetf.algorithm(toys.normed, opt, plan=toys.PLAN), toys.KEY, population).server
    shard, moved = population.shard(4), {}
    for name, stage in (
        ('alternate', fedetf.alternate(toys.normed, turn=toys.PLAN, cycles=2)),
        ('adapt', fedetf.adapt_features(toys.normed, opt, plan=toys.PLAN)),
    ):
        start = stage.init_client(toys.KEY, first)
        mine = jax.jit(stage.client)(toys.KEY, first, start, shard)[0]
        before, after = (tree.by_path({**v.params, 'fixed': v.fixed, 'stats': v.stats}) for v in (start, mine))
        moved[name] = {path for path in before if not np.array_equal(before[path], after[path])}
    frozen = {'head.scale', 'fixed.v', 'head.proj.b', 'head.proj.w'}
    assert moved == {'alternate': frozen, 'adapt': set(before) - frozen | {'head.scale'}}
