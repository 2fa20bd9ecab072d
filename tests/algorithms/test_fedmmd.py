"""FedMMD against NumPy: the discrepancy as a double loop, and training for features `z = x * u`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import softmax_by_hand as by_hand
import toys

from fedjax_nc import footprint, heads, local, losses, models, simulate
from fedjax_nc.algorithms import fedavg, fedmmd
from fedjax_nc.objective import objective

LAM = 2.0


def width(a, b):
    rows = [*a, *b]
    total = sum(((u - v) ** 2).sum() for u in rows for v in rows)
    return total / (len(rows) * (len(rows) - 1))


def kernel(u, v, s):
    return sum(np.exp(-((u - v) ** 2).sum() / (s * 2.0 ** (i - 2))) for i in range(5))


def mmd(a, b):
    s = width(a, b)
    return sum(kernel(u, v, s) * sign / (len(p) * len(q)) for p, q, sign in ((a, a, 1), (b, b, 1), (a, b, -2))
               for u in p for v in q)  # fmt: skip


def test_discrepancy_is_the_double_loop_over_real_rows():
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(6, 3)), rng.normal(size=(6, 3)) * 1.5 + 0.5
    mask = np.array([True, True, False, True, True, False])
    want = mmd(a[mask], b[mask])
    for junk in (0.0, 1e3, 1e30, np.inf, np.nan):
        one, two = (jnp.asarray(np.where(mask[:, None], u, junk), jnp.float32) for u in (a, b))
        got, slope = jax.value_and_grad(fedmmd.mmd)(one, two, jnp.asarray(mask))
        np.testing.assert_allclose(got, want, rtol=1e-5)
        np.testing.assert_allclose(slope[mask], slopes(a[mask], b[mask]), atol=1e-6)
        np.testing.assert_array_equal(slope[~mask], 0.0)
    assert want > 0.1


@pytest.mark.parametrize('rows', [2, 16])
def test_the_gradient_near_the_received_model_keeps_its_digits(rows):
    rng = np.random.default_rng(3)
    received = np.float32(3 + rng.normal(size=(rows, 64)))
    z = np.float32(received + 1e-3 * rng.normal(size=received.shape))
    want = slopes(np.float64(z), np.float64(received))
    got = jax.jit(jax.grad(fedmmd.mmd))(z, received, jnp.ones(rows, bool))
    assert np.linalg.norm(got - want) < 1e-2 * np.linalg.norm(want)


def test_features_that_are_the_same_for_all_examples_are_not_pulled_without_bound():
    """The bandwidth would be that of the gap: the nearer, the stronger."""
    received, mask = np.zeros((8, 4)), jnp.ones(8, bool)
    received[:, 0] = 2.0
    for gap in (1.0, 0.1, 1e-2, 1e-3, 1e-4):
        z = received + gap * np.eye(4)[1]
        floor = 1e-4 * np.mean([(u**2).sum() for u in (*z, *received)])
        want = slopes(z, received, max(width(z, received), floor))
        got = jax.grad(fedmmd.mmd)(jnp.asarray(z, jnp.float32), jnp.asarray(received, jnp.float32), mask)
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)
        assert np.abs(want.sum(0)).max() < 500
    assert np.abs(want.sum(0)).max() < 10  # it fades in the end


@pytest.mark.parametrize('lanes', [1, 3])
def test_no_buffer_holds_a_difference_of_every_pair(lanes):
    shape = (lanes, 128, 512)
    slope = jax.vmap(jax.grad(lambda a, b, mask: fedmmd.mmd(a, jax.lax.stop_gradient(b), mask)))
    args = [jax.ShapeDtypeStruct(s, t) for s, t in ((shape, jnp.float32), (shape, jnp.float32), (shape[:2], bool))]
    all_pairs = 4 * lanes * 256 * 256 * 512
    assert jax.jit(slope).lower(*args).compile().memory_analysis().temp_size_in_bytes < all_pairs / 16
    assert footprint._peak(jax.make_jaxpr(slope)(*args).jaxpr, 3, 'cpu') < all_pairs / 16


def test_lanes_have_their_own_discrepancy():
    rng = np.random.default_rng(4)
    a, b = rng.normal(size=(2, 3, 5, 4)).astype(np.float32)
    mask = np.arange(5) < np.array([[5], [3], [2]])
    values, found = jax.vmap(jax.value_and_grad(fedmmd.mmd))(a, b, mask)
    for k, n in enumerate((5, 3, 2)):
        z, received = np.float64(a[k, :n]), np.float64(b[k, :n])
        np.testing.assert_allclose(values[k], mmd(z, received), rtol=1e-5)
        np.testing.assert_allclose(found[k, :n], slopes(z, received), atol=1e-6)


def test_rows_that_coincide_have_no_discrepancy_and_a_finite_gradient():
    rows, alone = jnp.ones((3, 2)), jnp.array([True, False, False])
    slope = jax.jit(jax.value_and_grad(fedmmd.mmd))
    for mask in (alone, ~alone, jnp.zeros(3, bool)):
        value, g = slope(rows, rows, mask)
        np.testing.assert_allclose(value, 0.0, atol=1e-6)
        assert np.isfinite(g).all()
    value, g = slope(rows, 2 * rows, alone)
    np.testing.assert_array_equal(value, 0.0)
    np.testing.assert_array_equal(g, 0.0)


def slopes(z, ref, s=None):
    """Gradient of the discrepancy by the rows of z; the bandwidth s stands still."""
    s, n = width(z, ref) if s is None else s, len(z)
    out = np.zeros_like(z)
    for i in range(5):
        t = s * 2.0 ** (i - 2)
        for other, sign in ((z, 2.0), (ref, -2.0)):
            gap = z[:, None] - other[None]
            out += sign / n**2 * (np.exp(-(gap**2).sum(2) / t)[:, :, None] * gap).sum(1) * (-2.0 / t)
    return out


def test_no_gradient_flows_through_the_bandwidth():
    rng = np.random.default_rng(2)
    a, b = rng.normal(size=(5, 3)), rng.normal(size=(5, 3)) + 0.7
    got = jax.grad(fedmmd.mmd)(jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32), jnp.ones(5, bool))
    np.testing.assert_allclose(got, slopes(a, b), atol=1e-6)


def test_the_received_model_stands_still_in_training_too(data):
    """Its features lack the noise of those in training, so that the first batch has a discrepancy already."""
    plan, x = local.Plan(1000, 1), data.shard(4)
    first = {}
    for lam in (0.0, 1.0):
        algorithm = fedmmd.algorithm(toys.noisy_task, toys.opt, lam=lam, plan=plan)
        server = simulate.init(algorithm, toys.KEY, data).server
        first[lam] = float(jax.jit(algorithm.client)(toys.KEY, server, (), x)[2].loss)
    assert first[1.0] - first[0.0] > 1e-4


def local_work(start, rate, x, y):
    def gradient(p):
        pull = LAM * slopes(x * p['u'], x * start['u']) if len(y) > 1 else 0.0  # a lone row is free
        return by_hand.gradients(p, x, y, on_features=pull)

    return by_hand.descend(start, start, gradient, rate)


def test_two_rounds_of_partial_cohorts(data):
    algorithm = fedmmd.algorithm(by_hand.task, by_hand.opt, lam=LAM, plan=by_hand.PLAN)
    states = by_hand.two_rounds(algorithm, data)
    want = by_hand.numbers(states[0].server.variables)
    for t, ids in enumerate(by_hand.COHORTS):
        ends = [local_work(want, by_hand.LR * by_hand.FALL**t, *toys.examples(data, k)) for k in ids]
        want = by_hand.average(ends, np.asarray(data.size, np.float64)[ids])
        by_hand.close(by_hand.numbers(states[t + 1].server.variables), want, atol=2e-5)


def jitter(x, key):
    return x if key is None else x + jax.random.normal(key, x.shape)


def test_without_weight_it_is_fedavg_and_the_models_see_the_same_pixels(data):
    """In its first step a client is the received model, and features of the same pixels coincide."""
    plan = local.Plan(1000, 1)
    model = models.from_functions(lambda key, x: {'u': jnp.ones(x.shape[1:])}, lambda p, x: x * p['u'], jitter)
    jittery = objective(model, heads.linear(), losses.cross_entropy)

    @jax.jit
    def work(server, shard, lam):
        algorithm = fedmmd.algorithm(jittery, by_hand.opt, lam=lam, plan=plan)
        return algorithm.client(toys.KEY, server, (), shard)[1:]

    plain = fedavg.algorithm(jittery, by_hand.opt, plan=plan)
    server = simulate.init(plain, toys.KEY, data).server
    off, on = (work(server, data.shard(4), lam) for lam in (0.0, 10.0))
    toys.same(off, jax.jit(plain.client)(toys.KEY, server, (), data.shard(4))[1:])
    np.testing.assert_allclose(on[1].loss, off[1].loss, atol=1e-5)


@pytest.mark.parametrize('lam', [-0.1, np.float32(-0.1), jnp.float32(-0.1), float('nan')])
def test_a_negative_weight_is_refused(lam):
    with pytest.raises(ValueError, match='lam'):
        fedmmd.algorithm(by_hand.task, by_hand.opt, lam=lam)
