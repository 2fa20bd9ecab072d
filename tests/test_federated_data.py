"""From partitions to `FederatedData`, local test splits, class weights and made-up data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_nc import evaluate
from fedjax_nc.data import class_weights, clusters, common_test, dirichlet, federate, matched_tests, spiral, split


@pytest.fixture
def pool():
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (300, 4, 4, 3), dtype=np.uint8), rng.integers(0, 5, 300)


def rows(data, k):
    return np.asarray(data.index[k, : data.size[k]])


def test_masked_entries_are_not_taken():
    x = np.ma.array([[-999.0], [2.0]], mask=[[1], [0]])
    with pytest.raises(ValueError, match='`x` has entries that are masked'):
        federate(x, np.arange(2), [[0], [1]])
    federate(np.ma.array(x.data), np.arange(2), [[0], [1]])


@pytest.mark.parametrize('kind', ['>f4', '>i2', 'g'])
def test_numbers_of_other_machines_are_the_same(kind):
    x = np.arange(12).reshape(4, 3).astype(kind)
    np.testing.assert_array_equal(federate(x, np.arange(4), [[0, 1], [2, 3]]).x, np.arange(12).reshape(4, 3))


def test_federate_keeps_the_partition(pool):
    x, y = pool
    parts = dirichlet(y, 6, 0.5, seed=0)
    data = federate(x, y, parts, num_classes=7)
    assert data.num_clients == 6
    assert data.num_classes == 7
    assert data.x.dtype == jnp.uint8
    assert {field.dtype for field in data[1:]} == {jnp.dtype('int32')}
    assert all(isinstance(field, jax.Array) for field in data)
    assert data.index.shape == (6, max(len(part) for part in parts))
    assert 0 <= data.index.min() <= data.index.max() < 300
    for k, part in enumerate(parts):
        np.testing.assert_array_equal(rows(data, k), part)
        np.testing.assert_array_equal(data.counts[k], np.bincount(y[part], minlength=7))
    np.testing.assert_array_equal(data.x, x)
    np.testing.assert_array_equal(data.y, y)


def test_shard_of_nobody_is_empty(pool):
    data = federate(*pool, [[0, 1, 2], [3]])
    shard = data.shard(jnp.asarray(2))
    assert shard.size == 0
    assert shard.counts.sum() == 0
    assert data.shard(1).size == 1


def test_empty_clients_only_on_request(pool):
    with pytest.raises(ValueError, match='client 1 is empty'):
        federate(*pool, [[0], []])
    data = federate(*pool, [[0], []], allow_empty=True)
    assert data.size.tolist() == [1, 0]
    assert federate(*pool, [[], []], allow_empty=True).index.shape == (2, 1)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'y': np.zeros(299, int)}, 'one entry per example'),
        ({'y': np.zeros(300)}, 'vector of integers'),
        ({'y': np.full(300, -1)}, 'number the classes from 0'),
        ({'num_classes': 3}, r'must lie in \[0, 3\)'),
        ({'parts': []}, '`parts` is empty'),
        ({'parts': [[0, 300]]}, 'the pool has 300'),
        ({'parts': [[0], [-1]]}, 'client 1 has rows from -1'),
        ({'parts': [[0.5]]}, 'integer rows'),
        ({'parts': [[[0, 1]]]}, 'vector of integer rows'),
    ],
)
def test_federate_refuses(pool, change, message):
    arguments = {'x': pool[0], 'y': pool[1], 'parts': [[0, 1]], **change}
    with pytest.raises(ValueError, match=message):
        federate(**arguments)


def test_split(pool):
    x, y = pool
    data = federate(x, y, dirichlet(y, 6, 0.5, seed=0))
    train, test = split(data, 0.3, seed=1)
    assert train.x is data.x
    assert test.x is data.x
    assert test.y is data.y
    np.testing.assert_array_equal(train.counts + test.counts, data.counts)
    for k in range(6):
        n = int(data.size[k])
        assert int(test.size[k]) == 3 * n // 10
        assert set(rows(train, k)) | set(rows(test, k)) == set(rows(data, k))
        assert not set(rows(train, k)) & set(rows(test, k))
        np.testing.assert_array_equal(test.counts[k], np.bincount(y[rows(test, k)], minlength=5))
    assert not np.array_equal(rows(test, 0), rows(split(data, 0.3, seed=2)[1], 0))


def test_split_of_one_client_ignores_the_others(pool):
    x, y = pool
    one = split(federate(x, y, [range(50), range(50, 90)]), 0.5, seed=3)
    two = split(federate(x, y, [range(100, 300), range(50, 90), range(9)]), 0.5, seed=3)
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(rows(a, 1), rows(b, 1))


def test_split_of_tiny_clients(pool):
    train, test = split(federate(*pool, [range(100), range(3), [5], []], allow_empty=True), 0.29, seed=0)
    assert test.size.tolist() == [29, 0, 0, 0]
    assert train.size.tolist() == [71, 3, 1, 0]
    for fraction in (0.0, 1.0, -0.1):
        with pytest.raises(ValueError, match=r'must lie in \(0, 1\)'):
            split(federate(*pool, [[0]]), fraction, seed=0)


def test_class_weights_give_the_published_accuracies():
    y = np.repeat([0, 1], [6, 2])
    data = federate(np.zeros((8, 1)), y, [range(8), []], num_classes=3, allow_empty=True)
    total, correct = np.array([10, 10, 10]), np.array([9, 5, 2])
    for kind, want in (('present', 0.70), ('labels', 0.80)):
        weights = class_weights(data, kind)
        assert weights.shape == (2, 3)
        assert weights.dtype == jnp.float32
        assert (weights[0] @ correct) / (weights[0] @ total) == pytest.approx(want)
        np.testing.assert_array_equal(weights[1], 0)
    np.testing.assert_allclose(class_weights(data, 'labels')[0], [0.75, 0.25, 0])
    with pytest.raises(ValueError, match='`kind`'):
        class_weights(data, 'uniform')


def test_the_common_test_gives_personal_accuracies_without_noise(pool):
    """`PM_k = sum_c (n_kc / n_k) acc_kc` with the accuracy over all test examples of class c."""
    x, y = pool
    train = federate(x, y, dirichlet(y[:200], 4, 0.5, seed=0))
    test = common_test(x[200:], y[200:], 4, 5)
    assert test.x.shape[0] == 100
    np.testing.assert_array_equal(test.counts, np.tile(np.bincount(y[200:]), (4, 1)))
    guess = np.random.default_rng(1).integers(0, 5, (4, 100))
    tables, want = np.zeros((4, 5, 5), int), np.zeros(4)
    for k in range(4):
        np.add.at(tables[k], (np.asarray(test.y)[rows(test, k)], guess[k][rows(test, k)]), 1)
        for c in range(5):
            share = int(train.counts[k, c]) / int(train.size[k])
            want[k] += share * (guess[k][y[200:] == c] == c).mean()
    got = evaluate.weighted_accuracy(jnp.asarray(tables), class_weights(train, 'labels'))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    with pytest.raises(ValueError, match='`num_clients`'):
        common_test(x, y, 0)


def test_matched_tests(pool):
    x, y = pool
    counts = np.array([[70, 3, 0, 0, 0], [0, 40, 1, 40, 0], [0, 0, 0, 1, 0]])  # 155 in all
    data = matched_tests(counts, x, y, total=310, seed=0)
    pools = np.bincount(y)
    assert pools[0] < 140
    want = np.array([[pools[0], 6, 0, 0, 0], [0, min(pools[1], 80), 2, min(pools[3], 80), 0], [0, 0, 0, 2, 0]])
    np.testing.assert_array_equal(data.counts, want)
    np.testing.assert_array_equal(matched_tests(counts, x, y, total=100, seed=0).counts[2], 0)  # too rare to be tested
    for k in range(3):
        assert len(set(rows(data, k).tolist())) == int(data.size[k])  # without replacement
        np.testing.assert_array_equal(np.bincount(y[rows(data, k)], minlength=5), want[k])
    other = matched_tests(counts, x, y, total=310, seed=1)
    assert set(rows(other, 2)) != set(rows(data, 2))


def test_the_matched_test_of_one_client_ignores_the_others(pool):
    x, y = pool
    counts = np.array([[5, 5, 0, 0, 0], [3, 0, 9, 0, 0], [0, 0, 0, 4, 4]])
    data, other = (matched_tests(table, x, y, total=90, seed=3) for table in (counts, counts[[2, 1, 0]]))
    np.testing.assert_array_equal(rows(data, 1), rows(other, 1))


def test_matched_tests_of_many_examples_do_not_overflow(pool):
    data = matched_tests(jnp.asarray([[400_000, 0, 0, 0, 0], [100_000, 0, 0, 0, 300_000]]), *pool, total=40, seed=0)
    np.testing.assert_array_equal(data.counts, [[20, 0, 0, 0, 0], [5, 0, 0, 0, 15]])


@pytest.mark.parametrize(
    ('counts', 'total', 'match'),
    [([1, 2], 10, r'table \[K, C\]'), ([[0.5]], 10, 'label counts'), ([[0, 0]], 10, 'label counts'),
     ([[-1, 2]], 10, 'label counts'), ([[1] * 5], 0, '`total`'), ([[1, 2]], 10, r'must lie in \[0, 2\)')],
)  # fmt: skip
def test_matched_tests_refuse(pool, counts, total, match):
    with pytest.raises(ValueError, match=match):
        matched_tests(counts, *pool, total=total, seed=0)


def test_clusters_can_be_told_apart():
    x, y = clusters(1, 302, 3, 5, separation=20.0)
    other, labels = clusters(2, 100, 3, 5, separation=20.0)
    assert (x.dtype, y.dtype, x.shape) == (np.float32, np.int32, (302, 5))
    assert np.ptp(np.bincount(y)) <= 1
    means = np.stack([x[y == c].mean(0) for c in range(3)])
    nearest = ((other[:, None] - means) ** 2).sum(-1).argmin(1)
    np.testing.assert_array_equal(nearest, labels)  # other seeds, the same centres


def test_spiral_arms():
    x, y = spiral(0, [100, 50, 25])
    np.testing.assert_array_equal(np.bincount(y), [100, 50, 25])
    for c in range(3):
        radius = np.linalg.norm(x[y == c], axis=1)
        np.testing.assert_allclose(radius, np.linspace(1, 10, len(radius)), rtol=1e-5)
        angle = np.arctan2(*x[y == c].T) % (2 * np.pi)
        turned = (angle - 2 * np.pi * c / 3) % (2 * np.pi)
        assert turned.max() <= 2 * np.pi / 3 + 0.5


def test_a_wider_table_holds_the_same_clients():
    x, y, parts = np.zeros((5, 2)), np.array([0, 1, 0, 1, 1]), [[0, 1, 2], [4]]
    narrow, wide = (federate(x, y, parts, 2, width=width) for width in (None, 7))
    assert narrow.index.shape == (2, 3)
    assert wide.index.shape == (2, 7)
    np.testing.assert_array_equal(wide.index[:, :3], narrow.index)
    np.testing.assert_array_equal(wide.counts, narrow.counts)
    with pytest.raises(ValueError, match='longest client has 3'):
        federate(x, y, parts, 2, width=2)
