"""Rows that do not count may hold anything: neither values nor gradients notice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from fedjax_nc import aggregators, classwise, gaussians, local
from fedjax_nc.aggregators import ClassRows
from fedjax_nc.algorithms import fedmmd
from fedjax_nc.metrics import collapse

RNG = np.random.default_rng(0)
Z, Y = jnp.asarray(RNG.normal(size=(12, 4)), jnp.float32), jnp.arange(12) % 3
WEIGHT = jnp.asarray([1.0] * 9 + [0.0] * 3)
JUNK = [jnp.nan, jnp.inf, -3e38]


def dirty(junk):
    return jnp.where(WEIGHT[:, None] > 0, Z, junk)


STATISTICS = {
    'sums': lambda z: classwise.sums(z, Y, WEIGHT, 3),
    'means': lambda z: classwise.means(z, Y, WEIGHT, 3),
    'scatter': lambda z: classwise.scatter(z, Y, WEIGHT, jnp.zeros((3, 4))),
    'full': lambda z: gaussians.scatter(z, Y, WEIGHT, jnp.zeros((3, 4)), 'full'),
    'diag': lambda z: gaussians.scatter(z, Y, WEIGHT, jnp.zeros((3, 4)), 'diag'),
    'tied': lambda z: gaussians.scatter(z, Y, WEIGHT, jnp.zeros((3, 4)), 'tied'),
    'centres': lambda z: collapse.centres(z, Y, 3, WEIGHT),
    'mmd': lambda z: fedmmd.mmd(z, 0.9 * z + 0.1, WEIGHT > 0),
    'mmd, gradient': jax.grad(lambda z: fedmmd.mmd(z, 0.9 * z + 0.1, WEIGHT > 0)),
}


@pytest.mark.parametrize('junk', JUNK)
@pytest.mark.parametrize('statistic', STATISTICS.values(), ids=STATISTICS)
def test_statistics_of_rows_without_weight(statistic, junk):
    for got, want in zip(*(jax.tree.leaves(statistic(z)) for z in (dirty(junk), Z)), strict=True):
        keep = WEIGHT > 0 if got.shape == Z.shape else ...
        np.testing.assert_array_equal(got[keep], want[keep])
        assert np.isfinite(got).all()


@pytest.mark.parametrize('junk', JUNK)
def test_class_means_that_nobody_knows(junk):
    weight = jnp.array([[1.0, 0.0, 2.0], [0.0, 0.0, 1.0], [3.0, 1.0, 1.0]])
    rows = jnp.asarray(RNG.normal(size=(3, 3, 4)), jnp.float32)
    sizes, slots = jnp.array([5.0, 2.0, 0.0]), jnp.arange(3)  # the last client is nobody
    known = (weight > 0) & (sizes[:, None] > 0)

    def joined(rows):
        return aggregators.class_mean.finish(aggregators.class_mean.partial(ClassRows(rows, weight), sizes, slots, 3))

    toys.same(joined(jnp.where(known[..., None], rows, junk)), joined(rows))


def test_features_of_padding_and_their_labels_are_zero(data):
    shard = data.shard(1)
    foreign = shard._replace(
        y=jnp.where(jnp.isin(jnp.arange(len(data.y)), shard.index[: int(shard.size)]), shard.y, 99)
    )
    seen = local.featurize(lambda batch: batch.x, foreign, 16)
    real = np.arange(len(seen.x)) < int(shard.size)
    assert (np.asarray(seen.y)[~real] == 0).all()
    assert (np.asarray(seen.x)[~real] == 0).all()
    np.testing.assert_array_equal(np.asarray(seen.y)[real], np.asarray(shard.y)[np.asarray(shard.index)[real]])


@pytest.mark.parametrize('size', [1, 7, 16, 20])
def test_padded_rows_of_a_batch_are_copies_of_the_clients_first(data, size):
    rows = jnp.concatenate([jnp.arange(100, 100 + size), jnp.full(40 - size, 3)])
    shard = data.shard(0)._replace(size=jnp.int32(size))
    for step in range(-(-size // 16)):
        batch = local.batch_at(jnp.int32(step), local.full_batches(rows, 16), shard, 16)
        np.testing.assert_array_equal(batch.mask, step * 16 + np.arange(16) < size)
        want = np.where(batch.mask, 100 + step * 16 + np.arange(16), 100)
        np.testing.assert_array_equal(batch.x, np.asarray(data.x)[want])
        np.testing.assert_array_equal(batch.y, np.asarray(data.y)[want])


def test_class_means_that_do_not_count_may_be_anything():
    rows = jnp.array([[[1.0, 1.0], [2.0, 2.0]], [[3.0, 3.0], [jnp.nan, jnp.nan]]])
    found = gaussians.merge(aggregators.ClassRows(rows, jnp.array([[2.0, 2.0], [2.0, 0.0]])), jnp.zeros((2, 2)), 'diag')
    np.testing.assert_array_equal(found.mean, [[2, 2], [2, 2]])
    np.testing.assert_allclose(found.cov, [[4 / 3, 4 / 3], [0, 0]], rtol=1e-6)
