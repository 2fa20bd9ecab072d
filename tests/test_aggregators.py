from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_nc import aggregators, tree

RNG = np.random.default_rng(0)
ROWS = {'a': RNG.normal(size=(6, 3)).astype(np.float32), 'b': RNG.normal(size=(6,)).astype(np.float32)}
WEIGHTS = np.array([3.0, 1.0, 0.0, 10.0, 2.0, 0.0], np.float32)


def fold(aggregator, rows, weights, lanes):
    """What the engine does: chunk by chunk, partials added."""
    total = None
    for at in range(0, len(weights), lanes):
        chunk = {k: v[at : at + lanes] for k, v in rows.items()} if isinstance(rows, dict) else rows
        part = aggregator.partial(chunk, weights[at : at + lanes], jnp.arange(at, at + lanes), len(weights))
        total = part if total is None else tree.add(total, part)
    return aggregator.finish(total)


@pytest.mark.parametrize('lanes', [1, 2, 3, 6])
@pytest.mark.parametrize(
    ('aggregator', 'oracle'),
    [
        (aggregators.mean, lambda u: np.average(u, axis=0, weights=WEIGHTS)),
        (aggregators.uniform, lambda u: u[WEIGHTS > 0].mean(0)),
        (aggregators.stacked(aggregators.coordinate_median), lambda u: np.median(u[WEIGHTS > 0], axis=0)),
    ],
)
def test_folded_over_any_chunks(aggregator, oracle, lanes):
    got = fold(aggregator, ROWS, WEIGHTS, lanes)
    for name, u in ROWS.items():
        np.testing.assert_allclose(got[name], oracle(u), rtol=1e-5, atol=1e-6)


def test_median_of_an_odd_number_is_a_row_and_rows_of_nobody_do_not_count():
    weights = np.array([1, 1, 1, 0, 0, 0], np.float32)
    got = fold(aggregators.stacked(aggregators.coordinate_median), ROWS, weights, 2)
    np.testing.assert_allclose(got['a'], np.median(ROWS['a'][:3], axis=0))


@pytest.mark.parametrize('lanes', [1, 2, 3, 6])
def test_stacked_hands_whole_numbers_over_as_they_are(lanes):
    ids = np.array([2**31 - 1 - 2 * i for i in range(6)], np.int32)  # more digits than float32 has
    rows = {
        'id': ids,
        'word': 2**31 + ids.astype(np.uint32),
        'a': ROWS['a'],
        'may': ids > ids[3],
    }
    got, weights = fold(aggregators.stacked(lambda messages, weights: (messages, weights)), rows, WEIGHTS, lanes)
    np.testing.assert_array_equal(weights, WEIGHTS)
    for name, u in rows.items():
        np.testing.assert_array_equal(got[name], u)
    assert {name: str(u.dtype) for name, u in got.items()} == {
        'id': 'int32', 'word': 'uint32', 'a': 'float32', 'may': 'float32'
    }  # fmt: skip


@pytest.mark.parametrize('aggregator', [aggregators.mean, aggregators.uniform])
def test_nobody_aggregates_to_zero_not_nan(aggregator):
    got = fold(aggregator, ROWS, np.zeros(6, np.float32), 3)
    np.testing.assert_array_equal(got['a'], 0)


def test_pooled_stats_are_those_of_the_pooled_examples():
    sizes = np.array([4, 9, 30])
    groups = [RNG.normal(loc=i, scale=1 + i, size=(n, 2)) for i, n in enumerate(sizes)]
    rows = {'layer': {'mean': np.stack([g.mean(0) for g in groups]).astype(np.float32),
                      'var': np.stack([g.var(0) for g in groups]).astype(np.float32)}}  # fmt: skip
    pooled = aggregators.pooled_stats()
    got = pooled.finish(pooled.partial(rows, sizes.astype(np.float32), jnp.arange(3), 3))['layer']
    everything = np.concatenate(groups)
    np.testing.assert_allclose(got['mean'], everything.mean(0), rtol=1e-5)
    np.testing.assert_allclose(got['var'], everything.var(0), rtol=1e-4)


def test_pooled_stats_of_other_libraries():
    pooled, sizes = aggregators.pooled_stats(), jnp.ones(2)
    stats = {'mean': jnp.array([0.0, 4.0]), 'var': jnp.ones(2)}
    flat = {**{f'bn.{name}': value for name, value in stats.items()}, 'bn.count': jnp.array([1.0, 3.0])}  # flax nnx
    got = pooled.finish(pooled.partial(flat, sizes, jnp.arange(2), 2))
    assert {name: float(value) for name, value in got.items()} == {'bn.mean': 2, 'bn.var': 5, 'bn.count': 2}
    with pytest.raises(ValueError, match="'mean' and 'var', as of flax"):
        pooled.partial({'norm/~/mean_ema': stats['mean'], 'norm/~/var_ema': stats['var']}, sizes, jnp.arange(2), 2)


def test_pooled_stats_of_half_precision_are_summed_in_float32():
    pooled, sizes = aggregators.pooled_stats(), jnp.ones(3)
    stats = {'mean': jnp.full(3, 10, jnp.bfloat16), 'var': jnp.full(3, 0.125, jnp.bfloat16)}
    got = pooled.finish(pooled.partial(stats, sizes, jnp.arange(3), 3))
    np.testing.assert_allclose(got['var'], 0.125, rtol=1e-3)


def test_fields_have_their_own_weights():
    class Message(NamedTuple):
        delta: dict
        vote: dict

    joined = aggregators.by_field(delta=aggregators.mean, vote=aggregators.uniform)
    got = joined.finish(joined.partial(Message(ROWS, ROWS), WEIGHTS, jnp.arange(6), 6))
    np.testing.assert_allclose(got['delta']['b'], np.average(ROWS['b'], weights=WEIGHTS), rtol=1e-5)
    np.testing.assert_allclose(got['vote']['b'], ROWS['b'][WEIGHTS > 0].mean(), rtol=1e-5)


def test_pooled_variances_are_never_negative():
    stats = {'mean': jnp.array([50.0, 50.001]), 'var': jnp.array([1e-6, 1e-6])}
    a = aggregators.pooled_stats()
    got = a.finish(a.partial(stats, jnp.array([1.0, 2.0]), jnp.arange(2), 2))
    assert float(got['var']) >= 0.0


def test_class_mean_weighs_each_class_by_itself_and_ignores_nobody():
    rows = jnp.array([[[1.0], [7.0], [5.0]], [[3.0], [9.0], [6.0]], [[100.0], [100.0], [100.0]]])
    weight = jnp.array([[1.0, 0.0, 2.0], [3.0, 0.0, 2.0], [9.0, 9.0, 9.0]])
    messages = aggregators.ClassRows(rows, weight)
    got = aggregators.class_mean.finish(
        aggregators.class_mean.partial(messages, jnp.array([4.0, 2.0, 0.0]), jnp.arange(3), 3)
    )
    np.testing.assert_allclose(got.rows, [[2.5], [0.0], [5.5]])
    np.testing.assert_allclose(got.weight, [4.0, 0.0, 4.0])
    summed = aggregators.total.partial(rows, jnp.array([4.0, 2.0, 0.0]), jnp.arange(3), 3)
    np.testing.assert_allclose(aggregators.total.finish(summed)[:, 0], [4.0, 16.0, 11.0])


def trimmed(u, share):
    cut = int(share * len(u) + 1e-9)
    return np.sort(u, axis=0)[cut : len(u) - cut].mean(0)


@pytest.mark.parametrize('share', [0.0, 0.1, 0.25, 0.3, 0.49])
@pytest.mark.parametrize('live', [1, 2, 5, 10])
def test_trimmed_mean_leaves_out_both_ends(share, live):
    rng = np.random.default_rng(live)
    rows = {'a': rng.normal(size=(12, 3)).astype(np.float32), 'b': rng.normal(size=12).astype(np.float32)}
    weights = np.zeros(12, np.float32)
    weights[rng.choice(12, live, replace=False)] = rng.integers(1, 9, live)
    got = fold(aggregators.stacked(aggregators.trimmed_mean(share)), rows, weights, 4)
    for name, u in rows.items():
        np.testing.assert_allclose(got[name], trimmed(u[weights > 0], share), rtol=1e-5, atol=1e-6)


def krum(rows, byzantine, select):
    """Scores by a double loop over the live clients' whole messages."""
    flat = np.concatenate([u.reshape(len(u), -1) for u in rows.values()], axis=1).astype(np.float64)
    n = len(flat)
    scores = []
    for i in range(n):
        others = sorted(((flat[i] - flat[j]) ** 2).sum() for j in range(n) if j != i)
        scores.append(sum(others[: max(n - byzantine - 2, 1)]))
    best = np.argsort(scores, kind='stable')[: min(select, max(n - byzantine, 1))]
    return {name: u[best].mean(0) for name, u in rows.items()}


@pytest.mark.parametrize(('byzantine', 'select'), [(0, 1), (1, 1), (2, 3), (4, 20)])
@pytest.mark.parametrize('live', [1, 2, 4, 9])
def test_krum_takes_the_messages_with_the_closest_neighbours(byzantine, select, live):
    rng = np.random.default_rng(live)
    rows = {'a': rng.normal(size=(12, 3)).astype(np.float32), 'b': rng.normal(size=12).astype(np.float32)}
    alive = np.sort(rng.choice(12, live, replace=False))
    weights = np.zeros(12, np.float32)
    weights[alive] = rng.integers(1, 9, live)
    got = fold(aggregators.stacked(aggregators.krum(byzantine, select)), rows, weights, 3)
    want = krum({name: u[alive] for name, u in rows.items()}, byzantine, select)
    for name in rows:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6)


def test_krum_looks_at_all_of_a_message():
    rows = {'a': np.float32([0.0, 0.1, 0.2, 0.3, 0.14]), 'b': np.float32([[0.0], [0.1], [0.2], [0.3], [50.0]])}
    got = fold(aggregators.stacked(aggregators.krum(1)), rows, np.ones(5, np.float32), 5)
    assert got['b'][0] <= np.float32(0.2)


def test_half_precision_is_averaged_in_float32():
    u = jnp.asarray(np.random.default_rng(2).normal(size=(9, 4)), jnp.bfloat16)
    weights = np.arange(1, 10).astype(np.float32)
    got = fold(aggregators.mean, {'a': u}, weights, 3)['a']
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, np.average(np.asarray(u, np.float64), axis=0, weights=weights), atol=1e-6)


@pytest.mark.parametrize(('byzantine', 'want'), [(3, 0.0), (2, 10.6)])
def test_krum_counts_all_neighbours_but_the_byzantine_ones(byzantine, want):
    """Of a tight group of three and a loose one of four, two neighbours favour the first and three the second."""
    u = np.array([-0.01, 0.0, 0.01, 10.0, 10.3, 10.6, 10.95], np.float32)
    got = fold(aggregators.stacked(aggregators.krum(byzantine)), {'a': u}, np.ones(7, np.float32), 7)
    np.testing.assert_allclose(got['a'], want)


@pytest.mark.parametrize(('live', 'attack'), [(2, np.nan), (5, np.nan), (5, 1e30)])
def test_krum_never_takes_as_many_as_there_are_where_some_may_lie(live, attack):
    u = np.linspace(0, 1, 5).astype(np.float32)
    u[0] = attack
    reduce = aggregators.stacked(aggregators.krum(1, 9))
    got = fold(reduce, {'a': u}, (np.arange(5) < live).astype(np.float32), 5)['a']
    np.testing.assert_allclose(got, u[1:live].mean())


ROBUST = {
    'median': aggregators.coordinate_median,
    'trimmed': aggregators.trimmed_mean(0.3),
    'krum': aggregators.krum(2),
    'multi-krum': aggregators.krum(2, 3),
}


@pytest.mark.parametrize('reduce', ROBUST.values(), ids=ROBUST)
@pytest.mark.parametrize('attack', [1e6, -1e6, np.nan, np.inf])
def test_two_liars_among_seven_move_nothing_far(reduce, attack):
    u = np.random.default_rng(5).normal(size=(10, 4)).astype(np.float32)
    u[[1, 8]] = attack
    weights = np.array([1, 1, 1, 0, 1, 1, 0, 1, 1, 0], np.float32)
    got = fold(aggregators.stacked(reduce), {'a': u}, weights, 5)['a']
    honest = u[[0, 2, 4, 5, 7]]
    assert (got >= honest.min(0)).all()
    assert (got <= honest.max(0)).all()


@pytest.mark.parametrize('reduce', ROBUST.values(), ids=ROBUST)
def test_robust_aggregates_of_nobody_are_zero(reduce):
    got = fold(aggregators.stacked(reduce), ROWS, np.zeros(6, np.float32), 3)
    np.testing.assert_array_equal(got['a'], 0)


def test_impossible_robustness_is_refused():
    for share in (-0.1, 0.5):
        with pytest.raises(ValueError, match='share'):
            aggregators.trimmed_mean(share)
    for numbers in ((-1, 1), (1, 0)):
        with pytest.raises(ValueError, match=r'byzantine|select'):
            aggregators.krum(*numbers)
