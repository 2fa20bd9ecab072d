import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_nc import tree

WHOLE = {
    'floats': jnp.ones((2, 3)),
    'halves': jnp.ones((2,), jnp.bfloat16),
    'integers': jnp.arange(2),
    'keys': jax.random.split(jax.random.key(0), 2),
}


@pytest.mark.parametrize('bad', [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize('leaf', ['floats', 'halves'])
def test_one_number_of_any_leaf_counts(leaf, bad):
    broken = WHOLE | {leaf: WHOLE[leaf].at[1].set(bad)}
    assert not tree.finite(broken)
    assert not jax.jit(tree.finite)(broken)
    assert tree.finite_rows(broken).tolist() == [True, False]
    assert tree.nan_rows(broken).tolist() == [False, bool(jnp.isnan(bad))]


@pytest.mark.parametrize('whole', [WHOLE, {'integers': jnp.arange(2)}, {}])
def test_integers_and_keys_are_finite(whole):
    assert tree.finite(whole)
    assert jax.jit(tree.finite)(whole)
    assert jnp.all(tree.finite_rows(whole))
    assert not jnp.any(tree.nan_rows(whole))


@pytest.mark.parametrize('n', [1, 3])
def test_lanes_are_those_of_vmap_but_a_single_one_is_no_lane(n):
    seen = []

    def fn(pair, shared):
        seen.append('vmap' if 'Batch' in type(pair[0]).__name__ else 'alone')
        return pair[0] @ shared, {'key': jax.random.key_data(pair[1]['key']), 'rest': pair[1]['none'], 'number': 2}

    pair = (jax.random.normal(jax.random.key(1), (n, 4)), {'key': jax.random.split(jax.random.key(0), n), 'none': ()})
    shared = jnp.arange(8.0).reshape(4, 2)
    got, want = (f(pair, shared) for f in (tree.vmapped(fn, (True, False)), jax.vmap(fn, (0, None))))
    assert seen == ['alone' if n == 1 else 'vmap', 'vmap']
    jax.tree.map(lambda u, v: np.testing.assert_allclose(u, v, rtol=1e-6), got, want)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert got[1]['number'].tolist() == n * [2]
