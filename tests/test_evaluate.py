import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from sklearn.metrics import f1_score

from fedjax_nc import evaluate, footprint, heads, losses, models, population, simulate
from fedjax_nc.algorithms import fedavg, finetune
from fedjax_nc.base import Shard, State
from fedjax_nc.data import federate
from fedjax_nc.objective import objective

stage = finetune.algorithm(toys.task, toys.opt, plan=toys.PLAN)


def table_by_hand(logits, y):
    table = np.zeros((toys.CLASSES, toys.CLASSES), int)
    np.add.at(table, (y, np.argmax(logits, 1)), 1)
    return table


def test_personal_models_are_those_of_their_stage(data):
    """The algorithm of the training before would predict by the generic model, and the stage of clients without any."""
    training = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN)
    own, trained = (simulate.init(algorithm, toys.KEY, data) for algorithm in (stage, training))
    for algorithm, state in ((training, own), (stage, trained)):
        with pytest.raises(ValueError, match='clients of the state are of another algorithm'):
            evaluate.per_client(algorithm, state, data)
    same = evaluate.per_client(training, own, data, personal=False)
    np.testing.assert_array_equal(same, evaluate.per_client(stage, own, data, personal=False))


def test_means_of_measures_equal_numpy_for_any_batch_size(data, monkeypatch):
    state = simulate.init(stage, toys.KEY, data)
    logits, y = np.asarray(stage.predict(state.server, None, data.x)), np.asarray(data.y)
    shifted = logits - logits.max(1, keepdims=True)
    loss = np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(y)), y]
    rank = (logits > logits[np.arange(len(y)), y][:, None]).sum(1)
    for batch in (7, 256, 10_000):
        found = evaluate.mean(stage, state, losses.cross_entropy, data.x, y, batch)
        np.testing.assert_allclose(found, loss.mean(), rtol=1e-5)
    for k in (1, 2, toys.CLASSES):
        np.testing.assert_allclose(
            evaluate.mean(stage, state, evaluate.among(k), data.x, y), (rank < k).mean(), rtol=1e-6
        )
    table = evaluate.generic(stage, state, data.x, y, toys.CLASSES)
    np.testing.assert_allclose(evaluate.mean(stage, state, evaluate.among(1), data.x, y), evaluate.accuracy(table))
    monkeypatch.setattr(evaluate.tables, 'AT_ONCE', 1000)  # bytes: in pieces
    found = evaluate.mean(stage, state, losses.cross_entropy, np.asarray(data.x), y)
    np.testing.assert_allclose(found, loss.mean(), rtol=1e-5)
    np.testing.assert_array_equal(evaluate.generic(stage, state, np.asarray(data.x), y, toys.CLASSES), table)
    z = [evaluate.features(toys.task, state.server.variables, x) for x in (np.asarray(data.x), data.x)]
    np.testing.assert_allclose(*z, atol=1e-6)


def test_the_first_classes_are_those_of_argmax():
    logits = np.array([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [np.nan, 2.0, 1.0]], np.float32)
    for k, want in ((1, [1, 0, 0]), (2, [1, 1, 0]), (3, [1, 1, 0])):
        np.testing.assert_array_equal(evaluate.among(k)(logits, np.array([0, 1, 1])), want)


@pytest.mark.parametrize(
    ('measure', 'x', 'y', 'said'),
    [
        ('loss', np.ones((2, 12)), [0, 1], r'measure must be a function of \(logits, labels\), as .*cross_entropy'),
        (
            lambda logits, y: logits,
            np.ones((2, 12)),
            [0, 1],
            r'a number for each of 2 examples, not the shape \(2, 5\)',
        ),
        (losses.cross_entropy, np.ones((2, 12)), [0, 5], r'test labels must lie in \[0, 5\)'),
        (losses.cross_entropy, np.ones((2, 12)), [0], 'one for each of 2 examples, not 1'),
        (losses.cross_entropy, np.ones((0, 12)), [], 'a test set needs examples'),
    ],
)
def test_what_cannot_be_measured_is_said(data, measure, x, y, said):
    state = simulate.init(stage, toys.KEY, data)
    with pytest.raises(ValueError, match=said):
        evaluate.mean(stage, state, measure, x.astype('f'), np.array(y, int))


def test_tables_of_shares_are_read_as_those_of_counts():
    table = np.random.default_rng(0).integers(0, 9, (3, 4, 4))
    shares = table / table.sum((1, 2), keepdims=True)
    groups = np.array([0, 1, 2, 2])
    for read in (
        evaluate.accuracy, evaluate.class_accuracy, evaluate.class_f1, evaluate.macro_f1, evaluate.weighted_f1,
        lambda t: evaluate.group_accuracy(t, groups), lambda t: evaluate.weighted_accuracy(t, np.arange(4.0)),
    ):  # fmt: skip
        np.testing.assert_allclose(read(shares), read(table), rtol=1e-5)
    equal = [[1] * n for n in (12, 20, 40, 60, 100, 200)]
    for counts in ([60, 25, 10, 5], [75, 20, 5, 0], [1, 1, 1, 1], [7, 0, 3, 2], *equal):
        want = evaluate.groups(np.array(counts))
        np.testing.assert_array_equal(evaluate.groups(np.array(counts) / sum(counts)), want)


def test_examples_of_a_population_may_be_beyond_counting():
    tables = np.broadcast_to(np.diag([6_000_000, 4_000_000]).astype(np.int32), (300, 2, 2)).copy()
    tables[:, 0, 1] = 10_000_000
    assert evaluate.over_clients(tables).pooled == pytest.approx(0.5, rel=1e-5)
    with pytest.raises(ValueError, match='there is no client'):
        evaluate.over_clients(np.zeros((0, 2, 2), int))


def test_who_may_not_predict_a_class_is_wrong_where_it_is_nan(data):
    broken = stage._replace(predict=lambda server, client, x: jnp.eye(toys.CLASSES)[0] * x[:, :1] + jnp.array(
        [0.0] * (toys.CLASSES - 1) + [jnp.nan]))  # fmt: skip
    state = simulate.init(stage, toys.KEY, data)
    allowed = np.ones((data.num_clients, toys.CLASSES), bool)
    allowed[:, -1] = False
    np.testing.assert_array_equal(evaluate.accuracy(evaluate.per_client(broken, state, data, allowed=allowed)), 0)
    none = stage._replace(predict=lambda server, client, x: jnp.full((len(x), toys.CLASSES), -jnp.inf))
    tables = evaluate.per_client(
        none, state, data, allowed=np.arange(toys.CLASSES) == np.full((data.num_clients, 1), 2)
    )
    assert np.asarray(tables)[:, :, 2].sum() == np.asarray(tables).sum() == data.size.sum()


def test_shares_in_half_precision_and_weights_below_zero():
    half = np.array([[40000, 40000], [0, 1]], np.float16)
    np.testing.assert_allclose(evaluate.accuracy(half), 40001 / 80001, rtol=1e-3)
    np.testing.assert_allclose(evaluate.over(np.array([1.0, 1.0]), np.array([-1, 2])).mean, 1)


def test_test_sets_are_not_changed_on_their_way(data):
    state = simulate.init(stage, toys.KEY, data)
    x, y = np.asarray(data.x), np.asarray(data.y, np.int64)
    want = evaluate.generic(stage, state, x, y, toys.CLASSES)
    for other in (x.astype('>f4'), x.astype(np.longdouble)):
        np.testing.assert_array_equal(evaluate.generic(stage, state, other, y.astype('>i8'), toys.CLASSES), want)
    with pytest.raises(ValueError, match='test labels must lie in'):
        evaluate.generic(stage, state, x, y + 2**32, toys.CLASSES)
    with pytest.raises(ValueError, match=r'test examples goes from 0 to 4294967296 and does not fit int32'):
        evaluate.generic(stage, state, np.array([[0] * 12, [2**32] * 12]), np.array([0, 1]), toys.CLASSES)
    allowed = np.ones((data.num_clients, toys.CLASSES), bool)
    np.testing.assert_array_equal(
        evaluate.per_client(stage, state, data, allowed=allowed.tolist()), evaluate.per_client(stage, state, data)
    )


def test_generic_counts_equal_numpy_for_any_batch_size(data):
    state = simulate.init(stage, toys.KEY, data)
    want = table_by_hand(stage.predict(state.server, None, data.x), np.asarray(data.y))
    for batch in (7, 256, 10_000):
        got = evaluate.generic(stage, state, data.x, data.y, toys.CLASSES, batch)
        np.testing.assert_array_equal(got, want)
    np.testing.assert_allclose(evaluate.accuracy(got), np.trace(want) / want.sum(), rtol=1e-6)


def test_clients_are_tested_on_their_own_rows_with_their_own_models(data):
    state = simulate.init(stage, toys.KEY, data)
    tuned, _ = jax.jit(simulate.make_round(stage))(toys.KEY, state, data)
    mine = evaluate.per_client(stage, tuned, data, batch_size=16)
    shared = evaluate.per_client(stage, tuned, data, personal=False, batch_size=16)
    for k in range(8):
        x, y = toys.examples(data, k)
        x = x.astype(np.float32)
        own = jax.tree.map(lambda u, k=k: u[k], tuned.clients)
        np.testing.assert_array_equal(mine[k], table_by_hand(stage.predict(tuned.server, own, x), y))
        np.testing.assert_array_equal(shared[k], table_by_hand(stage.predict(tuned.server, None, x), y))
    assert evaluate.over_clients(mine).mean > evaluate.over_clients(shared).mean + 0.1


def test_a_broken_model_is_never_right(data):
    """`argmax` of NaN is 0, and a client that has class 0 alone would be the best of all."""
    state, _ = jax.jit(simulate.make_round(stage))(toys.KEY, simulate.init(stage, toys.KEY, data), data)
    state = state._replace(clients=jax.tree.map(lambda u: u.at[3].set(jnp.nan), state.clients))
    tables = evaluate.per_client(stage, state, data)
    for k in range(8):
        y = toys.examples(data, k)[1]
        np.testing.assert_array_equal(np.sum(tables[k], 1), np.bincount(y, minlength=toys.CLASSES))
        assert (np.trace(tables[k]) == 0) == (k == 3)
    nothing = jax.tree.map(lambda u: jnp.full_like(u, jnp.nan), state.server)
    assert evaluate.accuracy(evaluate.generic(stage, State(nothing, ()), data.x, data.y, toys.CLASSES)) == 0


def test_states_off_the_devices_are_said_to_be_there(data):
    state = population.init(stage, toys.KEY, data)
    for call in (
        lambda: evaluate.per_client(stage, state, data),
        lambda: simulate.make_round(stage)(toys.KEY, state, data),
        lambda: footprint.estimate(stage, state, data),
    ):
        with pytest.raises(ValueError, match=r'population.make_round .* state.clients.state\(state.server\)'):
            call()
    here = state.clients.state(state.server)
    tables = (evaluate.generic(stage, s, data.x, data.y, toys.CLASSES) for s in (state, here))
    np.testing.assert_array_equal(*tables)


TABLES = jnp.asarray([[[3, 1], [0, 4]], [[0, 0], [2, 2]], [[0, 0], [0, 0]]])


def test_accuracies_are_weightings_of_the_counts():
    np.testing.assert_allclose(evaluate.accuracy(TABLES), [7 / 8, 0.5, 0.0])
    np.testing.assert_allclose(evaluate.class_accuracy(TABLES), [[0.75, 1.0], [0.0, 0.5], [0.0, 0.0]])
    weights = jnp.asarray([[1.0, 3.0], [5.0, 1.0], [1.0, 1.0]])
    np.testing.assert_allclose(evaluate.weighted_accuracy(TABLES, weights), [(0.75 + 3) / 4, 0.5, 0.0])


def test_population_summary_leaves_out_clients_without_examples():
    out = evaluate.over_clients(TABLES)
    np.testing.assert_allclose(out.mean, (7 / 8 + 0.5) / 2)
    np.testing.assert_allclose(out.std, (7 / 8 - 0.5) / 2)
    np.testing.assert_allclose(out.pooled, 9 / 12)
    np.testing.assert_allclose(out.low, np.percentile([7 / 8, 0.5], 10))


@pytest.mark.parametrize(('change', 'match'), [(1, r'\[0, 5\)'), (-1, r'\[0, 5\)'), (None, 'one for each of')])
def test_test_sets_that_do_not_fit_are_refused(data, change, match):
    state = simulate.init(stage, toys.KEY, data)
    y = data.y[:-1] if change is None else data.y + change
    with pytest.raises(ValueError, match=match):
        evaluate.generic(stage, state, data.x, y, toys.CLASSES)


def test_labels_that_would_be_compared_with_every_row_are_refused(data):
    """Labels [n, 1] once made a table of n^2 counts."""
    state = simulate.init(stage, toys.KEY, data)
    for y in (data.y[:, None], data.y.astype(jnp.float32), jnp.zeros((2, 2), jnp.int32), jnp.int32(1)):
        with pytest.raises(ValueError, match='test labels must be a vector of integers'):
            evaluate.generic(stage, state, data.x, y, toys.CLASSES)
    flat = stage._replace(predict=lambda server, client, x: jnp.zeros(len(x)))
    with pytest.raises(ValueError, match='logits'):
        evaluate.generic(flat, state, data.x, data.y, toys.CLASSES)
    with pytest.raises(ValueError, match='row 3'):
        evaluate.generic(stage, state, data.x.at[3, 1].set(jnp.nan), data.y, toys.CLASSES)


@pytest.mark.parametrize(
    ('read', 'args'),
    [
        (evaluate.accuracy, (jnp.ones((3, 4)),)),
        (evaluate.class_accuracy, (jnp.ones(3),)),
        (evaluate.weighted_accuracy, (jnp.ones((2, 3, 3)), jnp.ones((3, 2)))),
        (evaluate.group_accuracy, (jnp.ones((2, 3, 3)), jnp.ones((2, 4), jnp.int32))),
        (evaluate.class_f1, (jnp.ones((3, 2)),)),
        (evaluate.macro_f1, (jnp.ones((3, 2)),)),
        (evaluate.weighted_f1, (jnp.ones((3, 2)),)),
        (evaluate.over_clients, (jnp.ones((3, 3)),)),
        (evaluate.over, (jnp.ones(3), jnp.ones(4))),
        (evaluate.over, (jnp.ones(3), jnp.float32(1))),
    ],
)
def test_tables_of_another_shape_are_refused(read, args):
    with pytest.raises(ValueError, match=r'shape|fit'):
        read(*args)


def test_weights_of_many_clients_go_on_one_table():
    """PM(L) of the generic model for every client."""
    weights = jnp.asarray([[1.0, 3.0], [5.0, 1.0], [1.0, 1.0]])
    one = evaluate.weighted_accuracy(TABLES[0], weights)
    np.testing.assert_allclose(one, [evaluate.weighted_accuracy(TABLES[0], w) for w in weights])
    assert evaluate.weighted_accuracy(TABLES, weights[:, None]).shape == (3, len(TABLES))
    groups = jnp.asarray([[0, 1], [1, 1], [2, 0]])
    assert evaluate.group_accuracy(TABLES[0], groups).shape == (3, 3)


def test_rows_of_others_are_not_even_looked_at(data):
    """NaN in all rows that a client does not own changes nothing in its table."""
    state = simulate.init(stage, toys.KEY, data)
    tables = evaluate.per_client(stage, state, data)
    for k in (1, 5):
        own = jnp.zeros(len(data.y), bool).at[data.index[k, : int(data.size[k])]].set(True)
        dirty = data._replace(x=jnp.where(own[:, None], data.x, jnp.nan), y=jnp.where(own, data.y, -7))
        np.testing.assert_array_equal(evaluate.per_client(stage, state, dirty)[k], tables[k])


def test_numbers_over_clients_that_count():
    values = jnp.asarray([1.0, jnp.nan, 4.0, 5.0])
    out = evaluate.over(values, jnp.asarray([True, False, True, True]))
    np.testing.assert_allclose(out, [10 / 3, np.std([1, 4, 5])], rtol=1e-6)
    out = evaluate.over(jnp.stack([values, values], axis=1), jnp.asarray([2, 0, 1, 1]))
    np.testing.assert_allclose(out.mean, [11 / 4] * 2, rtol=1e-6)
    np.testing.assert_allclose(out.std, [np.std([1, 1, 4, 5])] * 2, rtol=1e-6)
    np.testing.assert_array_equal(evaluate.over(values, jnp.zeros(4)), [0, 0])


def tail(largest, imbalance, classes):
    return np.floor(largest * (1 / imbalance) ** (np.arange(classes) / (classes - 1)) + 1e-9).astype(int)


@pytest.mark.parametrize(
    ('counts', 'sizes'),
    [
        (tail(500, 100, 100), (30, 31, 39)),  # CIFAR-100 as FedLoGe has it
        (tail(5000, 100, 10), (3, 3, 4)),
        (tail(5000, 50, 10), (4, 3, 3)),
        ([10] * 20, (15, 4, 1)),
        ([75, 20, 5], (1, 1, 1)),  # the class that reaches a bound is the last of its group
        ([7, 0], (1, 0, 1)),
    ],
)
def test_groups_of_frequent_and_rare_classes(counts, sizes):
    counts = np.asarray(counts)
    order = np.random.default_rng(0).permutation(len(counts))
    got = np.asarray(evaluate.groups(jnp.asarray(counts[order])))
    assert got.dtype == np.int32
    np.testing.assert_array_equal(np.bincount(got, minlength=3), sizes)
    smallest = [counts[order][got == g].min() for g in range(3) if (got == g).any()]
    largest = [counts[order][got == g].max() for g in range(3) if (got == g).any()]
    assert all(low >= high for low, high in zip(smallest, largest[1:], strict=False))


@pytest.mark.parametrize('dtype', [np.uint8, np.int8, np.uint16, np.uint32])
def test_groups_of_counts_of_any_integers(dtype):
    counts = np.array([120, 100, 30, 7, 2, 0], dtype)
    np.testing.assert_array_equal(evaluate.groups(counts), evaluate.groups(counts.astype(np.int32)))
    assert evaluate.groups(counts.tolist()).tolist() == [0, 0, 1, 2, 2, 2]


def test_labels_in_eight_bits_of_more_classes_than_these_hold():
    y = np.array([0, 100, 127], np.int8)
    x = jnp.asarray(y, jnp.float32)[:, None]
    shard = Shard(x, jnp.asarray(y), jnp.arange(3), jnp.int32(3), jnp.zeros(200, jnp.int32))
    table = evaluate.confusion(lambda x: jax.nn.one_hot(x[:, 0].astype(jnp.int32), 200), shard)
    assert np.argwhere(np.asarray(table)).tolist() == [[0, 0], [100, 100], [127, 127]]
    broken = evaluate.confusion(lambda x: jnp.full((len(x), 200), jnp.nan), shard)
    assert np.argwhere(np.asarray(broken)).tolist() == [[0, 1], [100, 101], [127, 128]]


def test_nested_lists_are_tables():
    table = [[3, 1], [0, 4]]
    for measure in (evaluate.accuracy, evaluate.class_accuracy, evaluate.macro_f1, evaluate.weighted_f1):
        np.testing.assert_array_equal(measure(table), measure(jnp.array(table)))
    assert float(evaluate.weighted_accuracy(table, [0, 1])) == 1.0
    assert float(evaluate.over([1.0, 2.0, 9.0], [1, 1, 0]).mean) == 1.5
    with pytest.raises(ValueError, match=r'not \(2,\)'):
        evaluate.accuracy([3, 1])


def test_accuracy_by_groups():
    counts = jnp.asarray([[60, 25, 10, 5], [0, 0, 10, 0]])  # of two clients
    group = evaluate.groups(counts)
    np.testing.assert_array_equal(group, [[0, 0, 1, 2], [2, 2, 0, 2]])
    table = jnp.asarray([[3, 1, 0, 0], [2, 4, 0, 0], [0, 0, 0, 2], [0, 0, 0, 0]])
    np.testing.assert_allclose(evaluate.group_accuracy(table, group[0]), [7 / 10, 0, 0])
    both = evaluate.group_accuracy(jnp.stack([table, table]), group)
    np.testing.assert_allclose(both, [[7 / 10, 0, 0], [0, 0, 7 / 10]])
    tested = evaluate.by_group(jnp.sum(table, axis=-1), group)
    np.testing.assert_array_equal(tested, [[10, 2, 0], [2, 0, 10]])
    np.testing.assert_allclose(evaluate.over(both, tested > 0).mean, [0.35, 0, 0.7])


def test_f1_scores_are_those_of_scikit_learn():
    rng = np.random.default_rng(0)
    truth, guess = rng.integers(0, 4, (2, 60))  # of six classes: two are neither held nor guessed
    guess[guess == 2] = 3
    truth[truth == 0] = 1  # one is held and never guessed, one guessed and never held
    table = np.zeros((6, 6), int)
    np.add.at(table, (truth, guess), 1)
    tables = jnp.asarray([table, np.zeros((6, 6), int)])
    for ours, average in ((evaluate.macro_f1, 'macro'), (evaluate.weighted_f1, 'weighted')):
        want = f1_score(truth, guess, average=average, zero_division=0)
        np.testing.assert_allclose(ours(tables), [want, 0.0], rtol=1e-6)


def test_classes_that_are_not_allowed_are_never_predicted(data):
    algorithm = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN)
    state = simulate.init(algorithm, toys.KEY, data)
    held = data.counts > 0
    free, masked = (evaluate.per_client(algorithm, state, data, allowed=a) for a in (None, held))
    np.testing.assert_array_equal(masked.sum((1, 2)), free.sum((1, 2)))
    assert not np.asarray(masked.sum(1))[~np.asarray(held)].any()
    assert np.asarray(free.sum(1))[~np.asarray(held)].any()
    assert evaluate.accuracy(masked).mean() >= evaluate.accuracy(free).mean()
    np.testing.assert_array_equal(masked, evaluate.per_client(algorithm, state, data, allowed=held.astype(np.float32)))
    unknown = evaluate.per_client(algorithm, state, data, allowed=held.at[2].set(False))
    np.testing.assert_array_equal(unknown[2], free[2])  # who trained on nothing is not asked to predict nothing


def test_a_state_of_another_algorithm_is_refused(data):
    plain, framed = (
        fedavg.algorithm(task, toys.opt)
        for task in (toys.task, objective(toys.tiny, heads.etf(), losses.cross_entropy))
    )
    with pytest.raises(ValueError, match='trained with another head'):
        evaluate.generic(framed, simulate.init(plain, toys.KEY, data), data.x, data.y, data.num_classes)
    with pytest.raises(ValueError, match=r'cannot predict from this state, .*AttributeError'):
        evaluate.generic(plain, State((), ()), data.x, data.y, data.num_classes)


def test_a_model_of_other_classes_is_refused(data):
    algorithm = fedavg.algorithm(toys.task, toys.opt, plan=toys.PLAN)
    state = simulate.init(algorithm, toys.KEY, data)
    fewer = data._replace(counts=data.counts[:, :4])
    with pytest.raises(ValueError, match='5 classes'):
        evaluate.per_client(algorithm, state, fewer)


def test_other_numbers_of_clients_are_refused(data):
    algorithm = finetune.algorithm(toys.task, toys.opt, plan=toys.PLAN)
    state = simulate.init(algorithm, toys.KEY, data)
    fewer = data._replace(index=data.index[:3], size=data.size[:3], counts=data.counts[:3])
    with pytest.raises(ValueError, match='the state has 8 clients, and the data have 3'):
        evaluate.per_client(algorithm, state, fewer)
    with pytest.raises(ValueError, match='`allowed` has rows for 3'):
        evaluate.per_client(algorithm, state, data, allowed=fewer.counts > 0)


def test_test_images_that_no_model_scales_are_told():
    """Bytes as other numbers, or channels first."""
    model = models.from_flax(models.MLP((4,)))
    task = objective(model, heads.linear(), losses.cross_entropy)
    algorithm = fedavg.algorithm(task, toys.opt)
    x, y = np.arange(256, dtype=np.uint8).reshape(4, 8, 8, 1), np.arange(4)
    clients = federate(x, y, [[0, 1, 2, 3]])
    state = simulate.init(algorithm, toys.KEY, clients)
    generic = functools.partial(evaluate.generic, algorithm, state, num_classes=4)
    generic(x, y)
    with pytest.warns(UserWarning, match='pixels from 0 to 255 as int32'):
        generic(x.astype(np.int32), y)
    with pytest.warns(UserWarning, match='pixels from 0 to 255 as float32'):
        evaluate.mean(algorithm, state, losses.cross_entropy, x.astype(np.float32), y)
    with pytest.warns(UserWarning, match='channels first'):
        generic(x.reshape(4, 1, 8, 8), y)
