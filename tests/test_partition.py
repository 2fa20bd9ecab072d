"""Partitions: every example once, the same for the same seed, the published shapes, and an end in all circumstances."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_nc.data import partition

BALANCED = np.repeat(np.arange(10), 5000)
DIRICHLET = [
    partition.dirichlet,
    partition.dirichlet_capped,
    partition.dirichlet_multiclass,
    partition.dirichlet_draws,
]


def sizes(parts):
    return np.array([len(rows) for rows in parts])


def classes(parts, labels):
    return np.array([len(np.unique(labels[rows])) for rows in parts])


def assert_covers(parts, count):
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(count))
    assert all(np.issubdtype(rows.dtype, np.integer) and rows.ndim == 1 for rows in parts)


@pytest.mark.parametrize('function', DIRICHLET)
def test_dirichlet_covers_and_is_deterministic(function):
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.repeat(np.arange(7), rng.integers(60, 200, 7)))
    first, same, other = (function(labels, 8, 0.8, seed=seed) for seed in (3, 3, 4))
    assert_covers(first, len(labels))
    assert len(first) == 8
    assert sizes(first).min() >= 10
    for a, b in zip(first, same, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
    # rows are shuffled, not class by class
    biggest = labels[max(first, key=len)]
    assert (np.diff(biggest) < 0).sum() > 5


@pytest.mark.parametrize('function', [DIRICHLET[0], DIRICHLET[1], DIRICHLET[3]])
@pytest.mark.parametrize(('clients', 'alpha'), [(100, 0.05), (100, 1e-9), (500, 0.01), (100, 1e7), (1, 0.1)])
def test_dirichlet_ends_with_the_minimum_met(function, clients, alpha):
    parts = function(BALANCED, clients, alpha, seed=1)
    assert_covers(parts, len(BALANCED))
    assert len(parts) == clients
    assert sizes(parts).min() >= 10


@pytest.mark.parametrize('function', [DIRICHLET[0], DIRICHLET[1], DIRICHLET[3]])
def test_the_tightest_possible_minimum_is_met(function):
    labels = np.arange(200) % 4
    parts = function(labels, 20, 0.01, seed=0, min_size=10)
    assert_covers(parts, 200)
    assert set(sizes(parts)) == {10}


def test_labels_without_some_class_in_between():
    labels = np.repeat([0, 3, 9], 100)
    for function in DIRICHLET:
        assert_covers(function(labels, 5, 1.0, seed=0), 300)


FIVE = np.repeat(np.arange(5), 101)


def same_parts(got, want):
    assert [sorted(rows.tolist()) for rows in got] == [sorted(rows) for rows in want]


def drawn(rng, alpha=0.5):
    """The recipe of `dirichlet` for six clients, written plainly on the same stream of numbers."""
    parts: list[list[int]] = [[] for _ in range(6)]
    for c in range(5):
        rows = rng.permutation(np.flatnonzero(c == FIVE))
        counts = [round(q * 101) for q in rng.dirichlet([alpha] * 6)]  # Python's round is half-even too
        start = 0
        for k in range(6):
            stop = 101 if k == 5 else start + counts[k]
            parts[k] += rows[start:stop].tolist()
            start = stop
    return parts


def test_dirichlet_follows_the_recipe():
    same_parts(partition.dirichlet(FIVE, 6, 0.5, seed=2, min_size=0), drawn(np.random.default_rng((2, 0))))


def test_a_draw_that_leaves_clients_too_small_is_drawn_again():
    draws = (tuple(drawn(np.random.default_rng((seed, t))) for t in (0, 1)) for seed in range(200))
    least = 25
    seed, again = next((s, b) for s, (a, b) in enumerate(draws) if min(map(len, a)) < least <= min(map(len, b)))
    same_parts(partition.dirichlet(FIVE, 6, 0.5, seed=seed, min_size=least), again)


def test_the_last_of_a_hundred_draws_is_levelled_from_above():
    """Who lacks examples gets as many, of those who are largest, one after the other; all others keep theirs."""
    seed = next(s for s in range(50) if min(map(len, drawn(np.random.default_rng((s, 99)), 0.05))) < 8)
    got = partition.dirichlet(FIVE, 6, 0.05, seed=seed, min_size=80)
    before = drawn(np.random.default_rng((seed, 99)), 0.05)
    had = sizes(before)
    after = had.copy()
    for k in np.flatnonzero(had < 80):
        while after[k] < 80:
            after[np.argmax(after)] -= 1
            after[k] += 1
    np.testing.assert_array_equal(sizes(got), after)
    assert (after < had).sum() > 1
    for k, rows in enumerate(got):
        keeps, gives = set(before[k]) <= set(rows.tolist()), set(rows.tolist()) <= set(before[k])
        assert (keeps, gives) == (after[k] >= had[k], after[k] <= had[k])
    taken = [rows for k, rows in enumerate(before) if after[k] < had[k]]
    went = np.concatenate([np.setdiff1d(rows, got[k]) for k, rows in enumerate(before) if after[k] < had[k]])
    assert len(went) == sum(had[k] - after[k] for k in range(6) if after[k] < had[k])
    first = np.concatenate([rows[: len(rows) // 4] for rows in taken])
    assert 0 < np.isin(went, first).sum() < len(went)  # drawn, not cut off an end


def capped(rng, held, amount=101):
    """How many of a class each of six clients gets: nothing where it holds its share of all."""
    takers = [k for k in range(6) if held[k] * 6 < len(FIVE)]
    ends = np.floor(rng.dirichlet([0.5] * len(takers)).cumsum() * amount).astype(int).tolist()
    ends[-1] = amount
    counts = [0] * 6
    for k, start, stop in zip(takers, [0, *ends], ends, strict=False):
        counts[k] = stop - start
    return counts


def cut(rows, counts):
    return [part.tolist() for part in np.split(rows, np.cumsum(counts)[:-1])]


def test_the_capped_kinds_follow_their_recipes():
    """The second swaps, from the third class on, what clients of one class would have got with the last ones."""
    swapped = 0
    for seed in range(4):
        rng, parts = np.random.default_rng((seed, 0)), [[] for _ in range(6)]
        for c in range(5):
            rows = rng.permutation(np.flatnonzero(c == FIVE))
            for part, more in zip(parts, cut(rows, capped(rng, [len(p) for p in parts])), strict=True):
                part += more
        same_parts(partition.dirichlet_capped(FIVE, 6, 0.5, seed=seed, min_size=0), parts)

        for attempt in range(100):
            rng, parts = np.random.default_rng((seed, attempt)), [[] for _ in range(6)]
            kinds = [0] * 6
            for c in range(5):
                rows = rng.permutation(np.flatnonzero(c == FIVE))
                counts = capped(rng, [len(p) for p in parts])
                poor = [k for k in range(6) if kinds[k] < 2] if c > 1 else []
                for m, k in enumerate(poor):
                    counts[k], counts[5 - m] = counts[5 - m], counts[k]
                    swapped += counts[k] != counts[5 - m]
                for k, more in enumerate(cut(rows, counts)):
                    parts[k] += more
                    kinds[k] += bool(more)
            if min(map(len, parts)) >= 10 and min(kinds) >= 2:
                break
        same_parts(partition.dirichlet_multiclass(FIVE, 6, 0.5, seed=seed), parts)
    assert swapped


def test_who_holds_its_share_gets_nothing_more():
    """A class each for two clients, however the proportions fall."""
    labels = np.repeat([0, 1], 50)
    for seed in range(8):
        parts = partition.dirichlet_capped(labels, 2, 1e-5, seed=seed, min_size=0)
        assert sizes(parts).tolist() == [50, 50]


def dealt(rng, holders):
    """The examples of each class in turns to those who hold it, of whom a random one begins."""
    parts = [[] for _ in range(6)]
    for c in range(5):
        rows = rng.permutation(np.flatnonzero(c == FIVE)).tolist()
        order = rng.permutation([k for k in range(6) if c in holders[k]]).tolist()
        for i, row in enumerate(rows):
            parts[order[i % len(order)]].append(row)
    return parts


def test_shards_and_uneven_classes_follow_their_recipes():
    labels = FIVE
    for seed in range(4):
        rng = np.random.default_rng(seed)
        row = np.concatenate([rng.permutation(5) for _ in range(6)]).tolist()
        same_parts(partition.shards(labels, 6, 1, seed=seed), dealt(rng, [row[k : k + 1] for k in range(6)]))

        rng, taken = np.random.default_rng(seed), [0] * 5
        numbers, holders = rng.integers(1, 4, 6), [[]] * 6
        for k in rng.permutation(6):
            order = sorted(rng.permutation(5).tolist(), key=lambda c: taken[c])
            holders[k] = order[: numbers[k]]
            taken = [n + (c in holders[k]) for c, n in enumerate(taken)]
        same_parts(partition.uneven_classes(labels, 6, (1, 3), seed=seed), dealt(rng, holders))


def test_clients_of_shards_have_other_pairs_of_classes_in_each_turn():
    parts = partition.shards(BALANCED, 50, 2, seed=0)
    assert len({tuple(np.unique(BALANCED[rows])) for rows in parts}) > 10


def test_minimum_zero_allows_empty_clients():
    parts = partition.dirichlet(BALANCED, 100, 0.01, seed=0, min_size=0)
    assert_covers(parts, len(BALANCED))
    assert sizes(parts).min() == 0


def test_alpha_sets_the_skew():
    few, many = (classes(partition.dirichlet(BALANCED, 20, a, seed=0), BALANCED).mean() for a in (0.05, 10.0))
    assert few < 5
    assert many == 10


def test_cap_stops_clients_that_have_their_share():
    # a client can pass P / K only with the class that takes it there
    capped = sizes(partition.dirichlet_capped(BALANCED, 10, 0.5, seed=0))
    assert capped.max() < 5000 + 5000
    spread = [
        np.mean([sizes(f(BALANCED, 10, 0.5, seed=s)).std() for s in range(8)])
        for f in (partition.dirichlet_capped, partition.dirichlet)
    ]
    assert spread[0] < 0.8 * spread[1]


@pytest.mark.parametrize(
    ('beta', 'smallest', 'median', 'largest', 'std', 'fewest', 'mean'),
    [
        (0.3, (45, 110), (495, 525), (1050, 1500), (185, 245), (2, 2.5), (6.8, 7.4)),
        (1.0, (180, 260), (500, 525), (760, 930), (95, 122), (3.4, 5.0), (8.9, 9.2)),
    ],
)
def test_multiclass_statistics(beta, smallest, median, largest, std, fewest, mean):
    rows = []
    for seed in range(10):
        parts = partition.dirichlet_multiclass(BALANCED, 100, beta, seed=seed)
        n, c = sizes(parts), classes(parts, BALANCED)
        assert n.min() >= 10
        assert c.min() >= 2
        rows.append((n.min(), np.median(n), n.max(), n.std(), c.min(), c.mean()))
    for value, (low, high) in zip(np.mean(rows, 0), (smallest, median, largest, std, fewest, mean), strict=True):
        assert low <= value <= high


def test_multiclass_gives_up_with_advice():
    with pytest.raises(ValueError, match='raise `alpha`'):
        partition.dirichlet_multiclass(BALANCED[::50], 100, 0.01, seed=0, min_size=2, attempts=5)
    with pytest.raises(ValueError, match='two classes'):
        partition.dirichlet_multiclass(np.zeros(100, int), 4, 1.0, seed=0)


@pytest.mark.parametrize(('count', 'c', 'holders'), [(10, 2, 20), (10, 5, 50), (100, 20, 20)])
def test_shards_make_the_published_scenes(count, c, holders):
    labels = np.repeat(np.arange(count), 50_000 // count)
    parts = partition.shards(labels, 100, c, seed=0)
    assert_covers(parts, 50_000)
    assert set(sizes(parts)) == {500}
    assert set(classes(parts, labels)) == {c}
    held = np.array([np.bincount(labels[rows], minlength=count) for rows in parts])
    assert set((held > 0).sum(0)) == {holders}
    assert set(held[held > 0]) == {500 // c}


def test_shards_of_unequal_classes():
    labels = np.repeat(np.arange(4), [50, 41, 33, 60])
    parts = partition.shards(labels, 7, 2, seed=0)
    assert_covers(parts, len(labels))
    assert set(classes(parts, labels)) == {2}


def one_class_at_a_time(rng, labels):
    """How rows were found by class at first; all draws hang on it."""
    for c in range(int(labels.max()) + 1):
        yield rng.permutation(np.flatnonzero(labels == c))


@pytest.mark.parametrize('kind', [np.uint8, np.int32, np.uint64, list])
def test_rows_by_class_are_found_at_once_with_the_same_draws(monkeypatch, kind):
    rng = np.random.default_rng(5)
    for trial in range(5):
        gaps = rng.permutation(12)[: rng.integers(2, 13)]  # some classes have no example
        sparse, dense = rng.choice(gaps, 400), rng.permutation(np.arange(400) % 6)

        def draw(sparse, dense, seed=trial):
            yield from (f(sparse, 7, 0.6, seed=seed) for f in DIRICHLET)
            yield from (f(sparse, 9, 0.01, seed=seed, min_size=0) for f in (*DIRICHLET[:2], DIRICHLET[3]))
            yield partition.shards(dense, 8, 3, seed=seed)
            yield [partition.long_tail(dense, 10.0, seed=seed)]

        new = list(draw(*(labels.tolist() if kind is list else labels.astype(kind) for labels in (sparse, dense))))
        with monkeypatch.context() as patch:
            patch.setattr(partition, '_shuffled_classes', one_class_at_a_time)
            old = list(draw(sparse, dense))
        for one, other in zip(new, old, strict=True):
            for a, b in zip(one, other, strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize('alpha', [1e9, 1e300, 1e308, np.finfo(float).max])
def test_huge_alpha_gives_equal_shares(alpha):
    for function in DIRICHLET:
        parts = function(BALANCED, 20, alpha, seed=0)
        if function is partition.dirichlet_draws:
            assert abs(sizes(parts) - 2500).max() < 300
        else:
            assert abs(sizes(parts) - 2500).max() <= 20  # one example of each class, rounded
    assert partition._proportions(np.random.default_rng(0), alpha, 10**6).max() < 2e-6


@pytest.mark.parametrize('alpha', [1e-6, 1e-300, 5e-324])
def test_minute_alpha_gives_a_class_to_one_client(alpha):
    for function in (DIRICHLET[0], DIRICHLET[1], DIRICHLET[3]):
        held = [
            np.unique(BALANCED[rows], return_counts=True) for rows in function(BALANCED, 20, alpha, seed=0, min_size=0)
        ]
        assert sum(len(labels) for labels, _ in held) == 10
        assert {int(count) for _, counts in held for count in counts} == {5000}


def test_numbers_of_any_library_are_taken():
    y = np.arange(60) % 3
    for number in (jnp.int32, np.int8, np.asarray):
        for make, plain in (
            (lambda n: partition.iid(y, n(4), seed=n(3)), partition.iid(y, 4, seed=3)),
            (lambda n: partition.dirichlet(y, n(4), 0.9, seed=n(3), min_size=n(2)),
             partition.dirichlet(y, 4, 0.9, seed=3, min_size=2)),
            (lambda n: partition.uneven_classes(y, n(4), (n(1), n(2)), seed=n(3)),
             partition.uneven_classes(y, 4, (1, 2), seed=3)),
            (lambda n: partition.power_law(y, n(20), 1.0, seed=n(3), min_size=n(3)),
             partition.power_law(y, 20, 1.0, seed=3, min_size=3)),
        ):  # fmt: skip
            for one, other in zip(make(number), plain, strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize('ids', [['a', None], np.array(['2020-01-01', 'NaT'], 'M8[ns]'), [1, float('nan')]])
def test_who_is_missing_is_no_client(ids):
    with pytest.raises(ValueError, match=r'`ids` must be hashable, not NaN or None; got .* in row 1'):
        partition.natural(ids)


def test_iid_and_natural():
    parts = partition.iid(BALANCED, 7, seed=0)
    assert_covers(parts, 50_000)
    assert np.ptp(sizes(parts)) <= 1
    assert classes(parts, BALANCED).min() == 10

    parts = partition.natural(['b', 'a', 'b', ('c', 1), 'a'])
    assert [rows.tolist() for rows in parts] == [[0, 2], [1, 4], [3]]
    tests = partition.natural(['a', ('c', 1), 'b', 'x', 'b'], ['b', 'b', 'd', 'a'])  # in the order of the second
    assert [rows.tolist() for rows in tests] == [[2, 4], [], [0]]
    parts = partition.natural(np.array([7, 7, -1, 7]))
    assert [rows.tolist() for rows in parts] == [[0, 1, 3], [2]]


@pytest.mark.parametrize('count', [10, 0])
def test_sizes_differ_and_labels_do_not(count):
    parts = partition.dirichlet_sizes(BALANCED, 20, 0.5, seed=1, min_size=count)
    assert_covers(parts, 50_000)
    assert sizes(parts).min() >= count
    assert sizes(parts).max() > 3 * 2500
    for rows in parts:
        if len(rows) >= 500:
            np.testing.assert_allclose(np.bincount(BALANCED[rows], minlength=10) / len(rows), 0.1, atol=0.06)
    for a, b in zip(parts, partition.dirichlet_sizes(BALANCED, 20, 0.5, seed=1, min_size=count), strict=True):
        np.testing.assert_array_equal(a, b)
    assert sizes(partition.dirichlet_sizes(BALANCED, 20, 0.5, seed=2)).tolist() != sizes(parts).tolist()


@pytest.mark.parametrize(('clients', 'alpha'), [(100, 0.01), (100, 1e-300), (5000, 0.05), (1, 0.1), (100, 1e300)])
def test_shares_drawn_end_with_the_minimum_met(clients, alpha):
    parts = partition.dirichlet_sizes(BALANCED, clients, alpha, seed=0)
    assert_covers(parts, 50_000)
    assert len(parts) == clients
    assert sizes(parts).min() >= 10
    if alpha == 1e300:
        assert set(sizes(parts)) == {500}


def test_shares_follow_the_recipe():
    rng = np.random.default_rng((3, 0))
    q = rng.dirichlet([0.7] * 6)
    rows, want, start = rng.permutation(500), [], 0
    for k in range(6):
        stop = 500 if k == 5 else round(500 * q[: k + 1].sum())
        want.append(sorted(rows[start:stop].tolist()))
        start = stop
    got = partition.dirichlet_sizes(np.arange(500) % 4, 6, 0.7, seed=3, min_size=0)
    assert [sorted(rows.tolist()) for rows in got] == want


def test_power_law_has_the_sizes_of_the_rule():
    for clients, exponent, least in ((30, 1.0, 10), (30, 0.0, 0), (1, 2.0, 10), (100, 1e6, 5), (7, 0.5, 0)):
        parts = partition.power_law(BALANCED, clients, exponent, seed=4, min_size=least)
        assert_covers(parts, 50_000)
        share = 1.0 / np.arange(1, clients + 1) ** exponent if exponent < 1e3 else np.eye(clients)[0]
        want = least + (50_000 - least * clients) * share / share.sum()
        assert abs(np.sort(sizes(parts))[::-1] - want).max() <= 1
    tight = partition.power_law(np.arange(60) % 3, 6, 3.0, seed=0, min_size=10)
    assert set(sizes(tight)) == {10}
    big = max(partition.power_law(BALANCED, 30, 1.0, seed=4), key=len)
    np.testing.assert_allclose(np.bincount(BALANCED[big]) / len(big), 0.1, atol=0.02)
    first, same, other = (partition.power_law(BALANCED, 30, 1.0, seed=seed) for seed in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(first, same, strict=True))
    assert sizes(first).tolist() != sizes(other).tolist()


def test_numbers_of_classes_are_uneven():
    parts = partition.uneven_classes(BALANCED, 200, (2, 6), seed=0)
    assert_covers(parts, 50_000)
    held = np.array([np.bincount(BALANCED[rows], minlength=10) for rows in parts])
    numbers = (held > 0).sum(axis=1)
    assert set(numbers) == {2, 3, 4, 5, 6}
    np.testing.assert_allclose(np.bincount(numbers)[2:], 40, atol=20)
    holders = (held > 0).sum(axis=0)
    assert np.ptp(holders) <= 1  # as equally as numbers allow
    for c in range(10):
        assert np.ptp(held[:, c][held[:, c] > 0]) <= 1
    given = [1, 10, 3, 1, 4]
    parts = partition.uneven_classes(BALANCED, 5, given, seed=0)
    assert_covers(parts, 50_000)
    assert classes(parts, BALANCED).tolist() == given
    assert (np.diff(BALANCED[parts[1]]) < 0).sum() > 5  # shuffled
    for seed, alike in ((0, True), (1, False)):
        again = partition.uneven_classes(BALANCED, 5, given, seed=seed)
        assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True)) == alike


@pytest.mark.parametrize(('clients', 'numbers'), [(10, (1, 1)), (3, (4, 4)), (40, (10, 10)), (11, (1, 2))])
def test_no_class_is_left_over_however_few_are_held(clients, numbers):
    for seed in range(10):
        parts = partition.uneven_classes(BALANCED[::50], clients, numbers, seed=seed)
        assert_covers(parts, 1000)
        assert numbers[0] <= classes(parts, BALANCED[::50]).min() <= classes(parts, BALANCED[::50]).max() <= numbers[1]


def test_clients_of_a_domain_share_it_at_random():
    domains = np.repeat(['a', 'b'], 60)
    parts = partition.by_domain(domains, 4, seed=0)
    stripes = partition.natural(domains)[0][::2]
    assert sorted(parts[0].tolist()) != stripes.tolist()


def test_a_client_has_one_domain():
    domains = np.random.default_rng(0).permutation(np.repeat(['photo', 'sketch', 'clip'], [90, 41, 70]))
    parts = partition.by_domain(domains, 7, seed=0)
    assert_covers(parts, 201)
    order = list(dict.fromkeys(domains.tolist()))
    for k, rows in enumerate(parts):
        assert set(domains[rows]) == {order[k % 3]}
    for d in range(3):
        assert np.ptp(sizes(parts[d::3])) <= 1
    assert not all(np.array_equal(a, b) for a, b in zip(parts, partition.by_domain(domains, 7, seed=1), strict=True))


@pytest.mark.parametrize(
    ('count', 'factor', 'total', 'tail'),
    [(10, 50, 13_996, 100), (10, 100, 12_406, 50), (100, 50, 12_608, 10), (100, 100, 10_847, 5), (10, 1, 50_000, 5000)],
)
def test_long_tail_totals(count, factor, total, tail):
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(count), 50_000 // count))
    keep = partition.long_tail(labels, factor, seed=0)
    kept = np.bincount(labels[keep], minlength=count)
    assert len(keep) == len(set(keep.tolist())) == total
    assert kept[0] == 50_000 // count
    assert kept[-1] == tail
    assert (np.diff(kept) <= 0).all()
    np.testing.assert_array_equal(keep, partition.long_tail(labels, factor, seed=0))
    if factor > 1:
        assert not np.array_equal(keep, partition.long_tail(labels, factor, seed=1))


def test_long_tail_of_unequal_classes_keeps_what_there_is():
    labels = np.repeat([0, 1, 2], [100, 5, 90])
    kept = np.bincount(labels[partition.long_tail(labels, 4, seed=0)])
    assert kept.tolist() == [100, 5, 25]


@pytest.mark.parametrize(
    ('call', 'message'),
    [
        (lambda: partition.dirichlet(BALANCED, 10, 0.0, seed=0), '`alpha` must be positive'),
        (lambda: partition.dirichlet(BALANCED, 10, float('nan'), seed=0), '`alpha` must be finite'),
        (lambda: partition.dirichlet_capped(BALANCED, 0, 0.1, seed=0), '`clients` must be at least 1'),
        (lambda: partition.dirichlet_draws(BALANCED[:50], 6, 0.1, seed=0), '6 clients cannot have 10'),
        (lambda: partition.dirichlet_multiclass(BALANCED, 10**4, 0.1, seed=0), 'Lower `clients` or `min_size`'),
        (lambda: partition.dirichlet([-1, 0], 1, 0.1, seed=0, min_size=0), 'number the classes from 0'),
        (lambda: partition.dirichlet([0.0, 1.0], 1, 0.1, seed=0, min_size=0), 'vector of integers'),
        (lambda: partition.dirichlet([[0, 1]], 1, 0.1, seed=0, min_size=0), 'vector of integers'),
        (lambda: partition.iid([], 1, seed=0), 'non-empty'),
        (lambda: partition.iid([0, 1], 3, seed=0), '3 clients cannot have 1'),
        (lambda: partition.natural([]), 'empty'),
        (lambda: partition.natural(['a'], []), '`owners` is empty'),
        (lambda: partition.natural(['a'], ['A', 'b']), 'none of the owners has an example'),
        (lambda: partition.shards(BALANCED, 100, 3, seed=0), 'do not divide'),
        (lambda: partition.shards(BALANCED, 100, 0, seed=0), 'at least 1'),
        (lambda: partition.shards([0, 2, 2], 2, 1, seed=0), 'class 1 has no example'),
        (lambda: partition.shards(BALANCED, 4, 2, seed=0), 'cannot hold 10 classes'),
        (lambda: partition.shards(np.arange(10).repeat(12), 100, 2, seed=0), 'lower `clients`'),
        (lambda: partition.dirichlet_sizes(BALANCED, 10, 0, seed=0), '`alpha` must be positive'),
        (lambda: partition.dirichlet_sizes(BALANCED[:50], 6, 0.1, seed=0), '6 clients cannot have 10'),
        (lambda: partition.power_law(BALANCED, 10, -1, seed=0), '`exponent` must not be negative'),
        (lambda: partition.power_law(BALANCED, 10, np.inf, seed=0), '`exponent` must be finite'),
        (lambda: partition.power_law(BALANCED[:50], 6, 1, seed=0), '6 clients cannot have 10'),
        (lambda: partition.uneven_classes(BALANCED, 9, 2, seed=0), 'a range, or one number per client'),
        (lambda: partition.uneven_classes(BALANCED, 9, (0, 2), seed=0), 'must be at least 1'),
        (lambda: partition.uneven_classes(BALANCED, 9, (2, 11), seed=0), 'cannot hold 11 of 10 classes'),
        (lambda: partition.uneven_classes(BALANCED, 9, (3, 2), seed=0), 'name the smaller number first'),
        (lambda: partition.uneven_classes(BALANCED, 9, (3, 2, 1), seed=0), 'must be two numbers or 9; got 3'),
        (lambda: partition.uneven_classes(BALANCED, 4, (2, 2), seed=0), '8 classes for all clients together'),
        (lambda: partition.uneven_classes([0, 2], 2, [1, 1], seed=0), 'class 1 has no example'),
        (lambda: partition.uneven_classes(np.arange(10), 6, (9, 9), seed=0), 'class 0 has 1 examples for'),
        (lambda: partition.by_domain('abc', 3, seed=0), 'one client id per example'),
        (lambda: partition.by_domain(['a', 'b'], 1, seed=0), '1 clients of one domain each leave some of 2'),
        (lambda: partition.by_domain(['a', 'b'], 3, seed=0), 'domain 0 has 1 examples for 2 clients'),
        (lambda: partition.by_domain(['a', 'b'], 2, seed=-1), '`seed` must be at least 0'),
        (lambda: partition.long_tail(BALANCED, 0.5, seed=0), 'at least 1'),
        (lambda: partition.long_tail(BALANCED, 6000, seed=0), 'leaves nothing of class 9'),
    ],
)
def test_impossible_requests_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
