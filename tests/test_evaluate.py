import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from fedjax_nc import evaluate, simulate
from fedjax_nc.algorithms import finetune

stage = finetune.algorithm(toys.task, toys.opt, plan=toys.PLAN)


def table_by_hand(logits, y):
    table = np.zeros((toys.CLASSES, toys.CLASSES), int)
    np.add.at(table, (y, np.argmax(logits, 1)), 1)
    return table


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


@pytest.mark.parametrize(('change', 'match'), [(1, r'\[0, 5\)'), (-1, r'\[0, 5\)'), (None, 'one label for each')])
def test_test_sets_that_do_not_fit_are_refused(data, change, match):
    state = simulate.init(stage, toys.KEY, data)
    y = data.y[:-1] if change is None else data.y + change
    with pytest.raises(ValueError, match=match):
        evaluate.generic(stage, state, data.x, y, toys.CLASSES)
