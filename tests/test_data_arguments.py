"""Wrong arguments of the data functions: one early line that names the argument."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_nc import checks, data
from fedjax_nc.data import images, partition

NAN, INF, HUGE = float('nan'), float('inf'), 2_000_000_000
Y = np.arange(60) % 3
X = np.zeros((60, 2), np.float32)
PARTS = [range(30), range(30, 60)]
FED = data.federate(X, Y, PARTS)
PIXELS = np.zeros((4, 8, 8, 3), np.uint8)
SET = data.Dataset(X, Y, X, Y, 3, 'toy')
KEY = jax.random.key(0)

TYPICAL = {
    data.dirichlet: {'labels': Y, 'clients': 3, 'alpha': 1.0, 'seed': 0, 'min_size': 1},
    data.dirichlet_capped: {'labels': Y, 'clients': 3, 'alpha': 1.0, 'seed': 0, 'min_size': 1},
    data.dirichlet_multiclass: {'labels': Y, 'clients': 3, 'alpha': 9.0, 'seed': 0, 'min_size': 1, 'attempts': 9},
    data.dirichlet_draws: {'labels': Y, 'clients': 3, 'alpha': 1.0, 'seed': 0, 'min_size': 1},
    data.shards: {'labels': Y, 'clients': 3, 'classes_per_client': 1, 'seed': 0},
    data.iid: {'labels': Y, 'clients': 3, 'seed': 0},
    data.natural: {'ids': Y},
    data.long_tail: {'labels': Y, 'imbalance_factor': 2.0, 'seed': 0},
    data.federate: {'x': X, 'y': Y, 'parts': PARTS, 'num_classes': 3, 'width': 30},
    data.split: {'data': FED, 'fraction': 0.3, 'seed': 0},
    data.common_test: {'x': X, 'y': Y, 'num_clients': 2, 'num_classes': 3},
    data.matched_tests: {'counts': [[5, 1, 0]], 'x': X, 'y': Y, 'total': 6, 'seed': 0},
    data.class_weights: {'data': FED, 'kind': 'labels'},
    data.clusters: {'seed': 0, 'num_examples': 9, 'num_classes': 3, 'dim': 2, 'separation': 1.0, 'centers_seed': 0},
    data.spiral: {'seed': 0, 'sizes': (3, 4)},
    data.subset: {'dataset': SET, 'max_examples': 6, 'seed': 0},
    data.load_dataset: {'name': 'digits', 'data_dir': None},
    images.normalize: {'x': PIXELS, 'mean': 0.5, 'std': (0.5, 0.5, 0.5)},
    images.random_crop: {'key': KEY, 'x': PIXELS, 'padding': 1, 'mode': 'constant'},
    images.random_flip: {'key': KEY, 'x': PIXELS},
    images.pipeline: {'mean': 0.5, 'std': 0.5, 'crop': 1, 'crop_mode': 'reflect'},
}

COUNTS = [2.5, '3', None, NAN, True, 0, -1, np.float32(2), np.bool_(True), [3], np.ones(2, int), 1 + 0j]
SEEDS = [-1, 0.5, '0', None, NAN, True, np.int64(-3), [1]]
NUMBERS = [NAN, INF, '1', None, -0.5, [1.0], 1j]
LABELS = [
    None, 'abc', [], 3, [0.0, 1.0], [NAN, 1.0], [True, False], ['a', 'b'], [None, 1], [[0, 1]], [0, -1], [0, HUGE],
    np.array([0, 2**63], np.uint64), [[0], [1, 2]], jax.ShapeDtypeStruct((60,), jnp.int32), {0: 1},
]  # fmt: skip

BAD = [
    *((f, 'labels', value) for f in list(TYPICAL)[:6] for value in LABELS),
    *((data.long_tail, 'labels', value) for value in LABELS),
    *((f, 'clients', value) for f in list(TYPICAL)[:6] for value in COUNTS),
    *((f, 'seed', value) for f, arguments in TYPICAL.items() if 'seed' in arguments for value in SEEDS),
    *((f, 'alpha', value) for f in list(TYPICAL)[:4] for value in (*NUMBERS, 0, -1e300, jnp.ones(2))),
    *((f, 'min_size', value) for f in list(TYPICAL)[:4] for value in (-1, 0.5, '1', None, NAN, True, HUGE)),
    *((data.dirichlet, 'clients', value) for value in (HUGE, 2**40, jnp.float32(3))),
    *((data.dirichlet_multiclass, 'attempts', value) for value in COUNTS),
    *((data.shards, 'classes_per_client', value) for value in COUNTS),
    *((data.natural, 'ids', value) for value in (None, 3, 'abc', [], [[1], [2]], [NAN, 1.0], np.ones((2, 2)), [{}])),
    *((data.natural, 'ids', value) for value in (np.array([1.0, NAN]), [np.ones(2)], [KEY], np.array(3))),
    *((data.long_tail, 'imbalance_factor', value) for value in (*NUMBERS, 0.5, 0)),
    *((f, 'y', value) for f in (data.federate, data.common_test, data.matched_tests) for value in LABELS),
    *((data.federate, 'x', value) for value in (
        None, 'abc', 3.0, [], X[:5], X + 1j, X.astype(object), X.astype(str), [[1], [2, 3]], KEY,
        np.where(np.arange(60) == 7, NAN, 0.0), np.full(60, -INF), np.full(60, 1e300), np.full(60, 2**31),
        np.full(60, -(2**31) - 1), np.full(60, 2**63, np.uint64), [2**70] * 60,
        jax.ShapeDtypeStruct((60, 2), jnp.int32), np.zeros(60, 'M8[s]'), np.array([INF] * 60, jnp.bfloat16),
    )),
    *((data.federate, 'parts', value) for value in (
        None, 3, 'abc', [], {}, {0: [1]}, iter([[1]]), [None], [[0.5]], [['a']], [[0], [60]], [[-1]], [[[1]]], [3],
        [[[1], [2, 3]]], [[True]], [[NAN]], np.array(3), [jax.ShapeDtypeStruct((3,), jnp.int32)], [[2**70]],
    )),
    *((data.federate, 'num_classes', value) for value in (*COUNTS[:2], *COUNTS[3:], HUGE, checks.MOST_CLASSES + 1)),
    *((data.federate, 'width', value) for value in (*COUNTS[:2], *COUNTS[3:], 29)),
    *((data.split, 'fraction', value) for value in (*NUMBERS, 0, 1, 2, True, jax.ShapeDtypeStruct((), jnp.float32))),
    *((data.split, 'data', value) for value in (None, X, (X, Y), data.federate)),
    *((data.common_test, 'num_clients', value) for value in COUNTS),
    *((data.matched_tests, 'counts', value) for value in (
        None, 3, 'abc', [], [[]], [1, 2], [[0, 0, 0]], [[-1, 2, 0]], [[0.5, 1, 1]], [[NAN, 1, 1]], [['a', 'b', 'c']],
        [[1], [2, 3]], [[[1]]], [[2**62] * 3], np.full((1, 3), 2**63, np.uint64),
        np.ones((1, checks.MOST_CLASSES + 1), int), jax.ShapeDtypeStruct((1, 3), jnp.int32), [[True, False, True]],
    )),
    *((data.matched_tests, 'total', value) for value in (*COUNTS, 2**70)),
    *((data.class_weights, 'data', value) for value in (None, X, 3)),
    *((data.class_weights, 'kind', value) for value in (None, 'uniform', 3)),
    *((data.clusters, name, value) for name in ('num_examples', 'num_classes', 'dim') for value in COUNTS),
    *((data.clusters, 'centers_seed', value) for value in SEEDS),
    *((data.clusters, 'separation', value) for value in NUMBERS),
    *((data.spiral, 'sizes', value) for value in (
        None, 3, 'abc', [], [2.5], ['3'], [None], [-1], [True], {3: 4}, [NAN],
    )),
    *((data.subset, 'max_examples', value) for value in COUNTS),
    *((data.subset, 'dataset', value) for value in (
        None, 3, X, (X, Y, X, Y, 3, 'toy'), SET._replace(y_train=Y + HUGE), SET._replace(y_train=Y - 1),
        SET._replace(y_train=Y[:5]), SET._replace(y_train=Y + 0.5), SET._replace(y_train=None),
    )),
    *((data.load_dataset, 'name', value) for value in (None, 3, 'imagenet', '', ['digits'], b'digits', {})),
    *((data.load_dataset, 'data_dir', value) for value in (3, b'x', ['x'], True, NAN)),
    *((f, 'x', value) for f in list(TYPICAL)[17:20] for value in (None, 3, 'abc')),
    *((f, 'x', PIXELS[0]) for f in (images.random_crop, images.random_flip)),
    *((images.normalize, 'x', PIXELS.astype(dtype)) for dtype in (np.int32, complex, bool)),
    *((f, name, value) for f in (images.normalize, images.pipeline) for name in ('mean', 'std') for value in (
        None, 'abc', NAN, INF, (), (0.5, NAN, 0.5), (0.5, '1', 0.5), np.ones((2, 3)), {}, 1j,
    )),
    *((f, 'std', value) for f in (images.normalize, images.pipeline)
      for value in (0, -1.0, (0.5, 0.0, 0.5), jnp.zeros(3))),
    *((images.normalize, name, value) for name in ('mean', 'std') for value in ((0.5, 0.5), np.ones(4))),
    *((images.random_crop, 'padding', value) for value in (-1, 0.5, '1', None, NAN, True, (1, 1))),
    *((images.pipeline, 'crop', value) for value in (-1, 0.5, '1', None, NAN, True, (1, 1))),
    *((f, name, value) for f, name in ((images.random_crop, 'mode'), (images.pipeline, 'crop_mode'))
      for value in ('mirror', None, 3, ['reflect'])),
]  # fmt: skip


def name_of(value):
    function, argument, given = value
    return f'{function.__name__}-{argument}-{checks.shown(given)}'


@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize('case', [pytest.param(case, id=f'{i}-{name_of(case)}') for i, case in enumerate(BAD)])
def test_bad_arguments_are_named_in_one_early_line(case):
    function, argument, value = case
    start = time.process_time()
    with pytest.raises((ValueError, TypeError)) as info:
        function(**{**TYPICAL[function], argument: value})
    line = str(info.value)
    assert time.process_time() - start < 1
    assert '\n' not in line
    assert len(line) < 400
    assert f'`{argument}' in line


@pytest.mark.parametrize('function', TYPICAL)
def test_good_arguments_are_taken(function):
    if function is data.load_dataset:
        pytest.importorskip('sklearn')
    function(**TYPICAL[function])


def test_numbers_of_numpy_and_jax_are_taken():
    for kind in (np.int8, np.int64, np.uint32):
        parts = data.dirichlet(Y, kind(3), np.float32(0.5), seed=kind(4), min_size=kind(1))
        for one, other in zip(parts, data.dirichlet(Y.tolist(), 3, 0.5, seed=4, min_size=1), strict=True):
            np.testing.assert_array_equal(one, other)
    for y in (Y.astype(np.uint64), Y.astype(np.int8), jnp.asarray(Y)):
        np.testing.assert_array_equal(data.iid(y, 3, seed=0)[0], data.iid(Y, 3, seed=0)[0])
        np.testing.assert_array_equal(data.federate(X, y, PARTS).counts, FED.counts)
    data.dirichlet(jnp.asarray(Y), 3, jnp.float32(0.5), seed=0, min_size=1)
    data.split(FED, jnp.float32(0.25), seed=0)


def test_a_label_far_beyond_is_refused_at_once():
    """Once a loop over two thousand million classes."""
    for function in (data.dirichlet, data.dirichlet_capped, data.dirichlet_multiclass, data.dirichlet_draws):
        with pytest.raises(ValueError, match=r'`labels` must lie in.*number the classes from 0'):
            function([0, HUGE], 1, 1.0, seed=0, min_size=0)
    assert len(partition.by_class(np.array([0, checks.MOST_CLASSES - 1]))) == checks.MOST_CLASSES


@pytest.mark.parametrize(
    ('dtype', 'stored'),
    [
        ('uint8', 'uint8'), ('bool', 'bool'), ('int64', 'int32'), ('uint64', 'uint32'), ('int16', 'int16'),
        ('float64', 'float32'), ('float16', 'float16'), ('bfloat16', 'bfloat16'),
    ],
)  # fmt: skip
def test_examples_of_any_numbers_are_taken(dtype, stored):
    x = np.asarray(jnp.arange(60) % 2).astype(jnp.dtype(dtype))
    pool = data.federate(x, Y, PARTS).x
    assert pool.dtype == stored
    np.testing.assert_array_equal(pool, x)


def test_integers_at_the_limits_are_taken():
    for limits in (np.iinfo(np.int32), np.iinfo(np.uint32)):
        x = np.array([limits.min, limits.max] * 30, np.uint64 if limits.min == 0 else np.int64)
        np.testing.assert_array_equal(data.federate(x, Y, PARTS).x, x)


def test_what_overflows_is_named():
    x = X.astype(np.float64)
    x[[4, 9]] = 1e300
    with pytest.raises(ValueError, match='`x` as float32 must be finite: row 4 and 1 more'):
        data.federate(x, Y, PARTS)
    with pytest.raises(ValueError, match='`x` goes from 0 to 4294967296 and does not fit int32'):
        data.federate(np.array([0] * 59 + [2**32]), Y, PARTS)


def test_traced_examples_pass():
    pool, sizes = jax.jit(lambda x: (data.federate(x, Y, PARTS).x * 2, data.federate(x, Y, PARTS).size))(X + 1)
    np.testing.assert_array_equal(pool, 2 * (X + 1))
    assert sizes.tolist() == [30, 30]


@pytest.mark.parametrize(
    'call',
    [
        lambda v: data.federate(X, v[:60].astype(int), PARTS),
        lambda v: data.federate(X, Y, [v.astype(int)]),
        lambda v: data.dirichlet(v.astype(int), 2, 1.0, seed=0),
        lambda v: data.dirichlet(Y, 2, v[0], seed=0),
        lambda v: data.long_tail(Y, v[0], seed=0),
        lambda v: data.split(FED._replace(index=v), 0.5, seed=0),
        lambda v: data.natural(v),
        lambda v: data.matched_tests(v.astype(int), X, Y, seed=0),
    ],
)
def test_what_must_be_known_says_so(call):
    with pytest.raises(ValueError, match='must be known: call this outside of `jit`'):
        jax.jit(call)(np.ones(60))


def test_means_of_other_channels_do_not_add_channels():
    with pytest.raises(ValueError, match='`mean` must be one number, or one for each of 1 channels; got 3'):
        images.normalize(np.zeros((2, 4, 4, 1), np.uint8), *images.CIFAR10_FEDNH)


def test_bytes_are_not_scanned(monkeypatch):
    monkeypatch.setattr(checks.jnp, 'isfinite', lambda x: pytest.fail('integers are finite'))
    data.federate(np.zeros((60, 32, 32, 3), np.uint8), Y, PARTS)
