import jax
import jax.numpy as jnp
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
