import jax
import numpy as np
import pytest
import toys

from fedjax_nc import evaluate, recipes, simulate


@pytest.mark.parametrize('name', recipes.RECIPES)
def test_recipe_trains_and_then_personalises(data, name):
    recipe = recipes.RECIPES[name](toys.tiny, toys.opt, toys.PLAN, dim=6, scale=2.0, rounds=3)
    run, state = jax.jit(simulate.make_round(recipe.train)), simulate.init(recipe.train, toys.KEY, data)
    seen = []
    for t in range(3):
        state, report = run(jax.random.fold_in(toys.KEY, t), state, data)
        seen.append(float(report.loss))
    assert seen[-1] < seen[0]
    if recipe.calibrate is not None:
        begun = simulate.join(recipe.calibrate, toys.KEY, state.server, data.num_clients)
        state, _ = jax.jit(simulate.make_round(recipe.calibrate))(toys.KEY, begun, data)
    own = recipe.enter(recipe.personalize, toys.KEY, state, data)
    tuned, report = jax.jit(simulate.make_round(recipe.personalize))(toys.KEY, own, data)
    assert np.isfinite(report.loss)
    assert jax.tree.leaves(tuned.clients)[0].shape[0] == 8
    tables = (evaluate.per_client(recipe.personalize, tuned, data, personal=p) for p in (True, False))
    mine, shared = (evaluate.over_clients(table).mean for table in tables)
    assert mine > shared
