"""Feature skew: turns against `np.rot90` and plain interpolation, noise of the variance that is asked for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_nc import data, simulate
from fedjax_nc.experiments import Setting, scene, setting

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (24, 6, 6, 3)).astype(np.uint8)
PARTS = [np.array([3, 0, 7]), np.array([1, 9, 20, 5]), np.array([], int), np.array([2]), np.array([11, 4])]


@pytest.mark.parametrize('x', [IMAGES, IMAGES[..., 0], IMAGES.astype(np.float32) - 99], ids=['rgb', 'grey', 'float'])
def test_quarter_turns_are_those_of_numpy(x):
    before = x.copy()
    out = data.rotate(x, PARTS)
    assert out.dtype == x.dtype
    np.testing.assert_array_equal(x, before)
    want = x.copy()
    for k, rows in enumerate(PARTS):
        for row in rows:
            want[row] = np.rot90(x[row], k)  # clients 0 to 4: by 0, 90, 180, 270 and 0 degrees
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(data.rotate(x, PARTS, [450.0, -90.0])[[3, 9]], [np.rot90(x[3]), np.rot90(x[9], -1)])


@pytest.mark.parametrize('angle', [90.00000000000001, 89.99999999999916, 360 - 1e-9, -90 + 1e-12])
def test_quarter_turns_up_to_rounding_lose_no_border(angle):
    x = np.full((1, 8, 8, 1), 255, np.uint8)
    np.testing.assert_array_equal(data.rotate(x, [[0]], [angle]), x)


def test_other_turns_interpolate_in_the_same_direction():
    x = np.zeros((3, 9, 9, 1), np.float32)
    x[:, 4, 8] = 1.0  # a dot to the right of the centre
    out = data.rotate(x, [[0], [1], [2]], [89.999, 45.0, 30.0])
    np.testing.assert_allclose(out[0], np.rot90(x[0]), atol=1e-3)
    np.testing.assert_allclose(data.rotate(x, [[0], [1]], [90.001])[0], np.rot90(x[0]), atol=1e-3)
    # Bilinear by hand: what lies at p comes from the point that the turn carries there.
    for i, degrees in ((1, 45.0), (2, 30.0)):
        t = np.deg2rad(degrees)
        for row in range(9):
            for column in range(9):
                up, right = 4 - row, column - 4
                there = 4 + right * np.cos(t) + up * np.sin(t), 4 - (up * np.cos(t) - right * np.sin(t))
                weight = max(0.0, 1 - abs(there[0] - 8)) * max(0.0, 1 - abs(there[1] - 4))
                if all(0 <= u <= 8 for u in there):
                    np.testing.assert_allclose(out[i, row, column, 0], weight, atol=1e-6)
                else:
                    assert out[i, row, column, 0] == 0
    dots = np.zeros((1, 9, 9), bool)
    dots[0, 4, 7] = dots[0, 1, 1] = True
    turned = data.rotate(dots, [[0]], [30.0])
    np.testing.assert_array_equal(turned, np.rint(data.rotate(dots.astype(float), [[0]], [30.0])).astype(bool))
    white = np.full((1, 9, 9), 200, np.uint8)
    assert data.rotate(white, [[0]], [45])[0, 4, 4] == 200  # rounded, not cut off
    assert data.rotate(white, [[0]], [45])[0, 0, 0] == 0


def test_noise_has_the_variance_that_was_asked_for():
    x = np.full((4000, 10, 10), 51, np.uint8)
    parts = [rows[:950] for rows in np.split(np.random.default_rng(1).permutation(4000), 4)]
    out = data.add_noise(x, parts, 0.4, seed=0)
    assert out.dtype == np.float32
    assert x.max() == 51
    for k, rows in enumerate(parts, start=1):
        noise = out[rows].astype(np.float64) - 0.2
        np.testing.assert_allclose(noise.var(), 0.4 * k / 4, rtol=0.02)  # 95,000 draws: 4 standard errors
        assert abs(noise.mean()) < 0.01
    nobody = np.setdiff1d(np.arange(4000), np.concatenate(parts))
    np.testing.assert_allclose(out[nobody], 0.2, rtol=1e-6)


def test_noise_depends_on_client_and_seed_alone():
    x = RNG.normal(size=(10, 3))
    out = data.add_noise(x, [[0, 1], [2, 3]], 0.1, seed=5)
    assert out.dtype == np.float64
    np.testing.assert_array_equal(out, data.add_noise(x, [[0, 1], [2, 3]], 0.1, seed=5))
    np.testing.assert_array_equal(out[2:4], data.add_noise(x, [[7, 8, 9], [2, 3]], 0.1, seed=5)[2:4])
    assert (out[:4] != data.add_noise(x, [[0, 1], [2, 3]], 0.1, seed=6)[:4]).all()
    np.testing.assert_array_equal(data.add_noise(x, [[0, 1], [2, 3]], 0, seed=5), x)


def test_settings_have_it_in_training_and_local_tests():
    small = Setting(dataset='digits', clients=4, max_examples=200, partition='iid')
    dataset, same, _ = scene.load(small)
    pictures = np.asarray(same.x)
    for features in ('rotated', 'noisy'):
        _, train, test = scene.load(dataclasses.replace(small, features=features))
        assert train.x is test.x
        for k in range(4):
            for part in (train, test):
                row = int(part.index[k, 0])
                if features == 'rotated':
                    np.testing.assert_array_equal(part.x[row], np.rot90(pictures[row], k))
                else:
                    noise = (np.asarray(part.x[row]) + 1) / 2 - pictures[row] / 255
                    assert 0.3 * (k + 1) / 4 < 10 * np.var(noise) < 3 * (k + 1)
    assert dataset.x_train.dtype == pictures.dtype


@pytest.mark.parametrize('pixels', ['half', 'mnist_like'])
def test_without_noise_clients_and_tests_are_those_of_bytes(pixels, monkeypatch):
    """Noise makes floats of bytes, of which models and pipelines must still see the same range everywhere."""
    monkeypatch.setitem(setting.PIXELS, 'mnist_like', (0.3, 0.4))
    known = Setting(dataset='digits', clients=4, max_examples=200, partition='iid', tests='common', pixels=pixels)
    still = dataclasses.replace(known, features='noisy', noise=0.0)
    seen = []
    for one in (known, still):
        dataset, train, tests = scene.load(one)
        task = scene.build(one, dataset).train
        state = simulate.init(task, jax.random.key(0), train)
        seen.append([task.predict(state.server, None, jnp.asarray(x)) for x in (train.x, dataset.x_test, tests.x)])
    for bytes_, floats in zip(*seen, strict=True):
        np.testing.assert_allclose(bytes_, floats, atol=1e-5)


DIRICHLET = ('', '_capped', '_draws', '_sizes')


@pytest.mark.parametrize(
    ('changes', 'check'),
    [
        ({'partition': 'dirichlet_sizes', 'alpha': 0.5}, lambda n, c: n.max() > 3 * n.min()),
        ({'partition': 'power_law', 'exponent': 2.0}, lambda n, c: n.max() > n.sum() / 2),
        ({'partition': 'power_law', 'exponent': 99.0, 'min_size': 31}, lambda n, c: sorted(n)[:11] == [31] * 11),
        *(({'partition': f'dirichlet{kind}', 'min_size': 40}, lambda n, c: n.min() >= 40) for kind in DIRICHLET),
        (
            {'partition': 'uneven_classes', 'classes_per_client': 3, 'most_classes': 7},
            lambda n, c: (c.min(), c.max()) == (3, 7),
        ),
    ],
)
def test_settings_name_the_partitions(changes, check):
    setting = Setting(dataset='digits', clients=12, tests='common', **changes)
    _, train, _ = scene.load(setting)
    assert check(np.asarray(train.size), (np.asarray(train.counts) > 0).sum(axis=1))
    assert setting.digest != Setting(dataset='digits', clients=12, tests='common').digest


@pytest.mark.parametrize(
    ('call', 'said'),
    [
        (lambda: data.rotate(np.zeros((3, 4)), [[0]]), r'images \[P, H, W, ch\]; got shape \(3, 4\)'),
        (lambda: data.rotate(np.zeros((3, 4, 5)), [[0], [1]]), 'images of 4x5 cannot be turned by 90 degrees'),
        (lambda: data.rotate(IMAGES, [[0]], []), '`degrees` is empty'),
        (lambda: data.rotate(IMAGES, [[0]], ['a']), 'each of `degrees` must be one number'),
        (lambda: data.rotate(IMAGES, [[0, 24]]), 'rows from 0 to 24; the pool has 24'),
        (
            lambda: data.rotate(IMAGES, [[0], [0.5]]),
            r'`parts\[1\]` must be a vector of integer rows; got shape \(1,\), f',
        ),
        (
            lambda: Setting(partition='uneven_classes', classes_per_client=6),
            'most_classes must be at least classes_per_client, 6, not 5',
        ),
        (lambda: data.rotate(IMAGES, [[0, 3], [1, 3]]), 'row 3 belongs to several clients'),
        (lambda: data.add_noise(IMAGES, [], 0.1, seed=0), '`parts` is empty'),
        (lambda: data.add_noise(IMAGES, [[0]], -0.1, seed=0), '`variance` must not be negative'),
        (lambda: data.add_noise(IMAGES, [[0]], 0.1, seed=-1), '`seed` must be at least 0'),
        (lambda: data.add_noise(IMAGES.astype(int), [[0]], 0.1, seed=0), 'uint8 or floating examples; got int64'),
        (lambda: Setting(features='blurred'), 'features must be one of same, rotated, noisy'),
        (lambda: Setting(noise=-1), 'noise must not be negative'),
        (lambda: Setting(most_classes=0), 'most_classes must be at least 1'),
    ],
)
def test_impossible_requests_are_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()
