"""oneDNN's own kernel gradient against XLA's, in the programs that take it, and what happens where it cannot be had."""

import concurrent.futures
import importlib.metadata

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_layers import GEOMETRIES, assert_close, normal, run, value_and_gradients

from fedjax_nc.models import conv_by_platform, conv_native, conv_onednn, libdnnl, looped, onednn

FLOAT = jnp.dtype('float32')
pytestmark = pytest.mark.skipif(not libdnnl.available(FLOAT), reason='oneDNN cannot be called here')


def gradient(conv, strides=(1, 1), padding='SAME'):
    return jax.jit(lambda x, k, g: jax.vjp(lambda k: run(conv, x, k, strides, padding), k)[1](g)[0])


def test_it_is_installed_with_the_tests_where_there_is_one():
    assert importlib.metadata.version(libdnnl.PACKAGE)


@pytest.mark.parametrize(('inputs', 'outputs'), [(3, 4), (16, 8), (17, 24)])
@pytest.mark.parametrize(('image', 'kernel', 'strides', 'padding'), GEOMETRIES)
def test_gradients_equal_native(image, kernel, strides, padding, inputs, outputs):
    x, k = normal(0, 5, *image, inputs), normal(1, *kernel, inputs, outputs)
    want = jax.jit(value_and_gradients(conv_native, strides, padding))(x, k)
    lowered = jax.jit(value_and_gradients(conv_onednn, strides, padding)).lower(x, k)
    assert (libdnnl.CALL in lowered.as_text()) == (kernel != (1, 1))
    assert_close(lowered.compile()(x, k), want)


def test_sums_of_many_windows_are_near_those_of_double_precision():
    x, g = np.random.default_rng(0).normal(size=(2, 64, 32, 32, 16)).astype(np.float32)
    got = gradient(conv_onednn)(x, jnp.zeros((3, 3, 16, 16)), g)
    around = np.pad(np.float64(x), ((0, 0), (1, 1), (1, 1), (0, 0)))
    want = [
        [np.einsum('bhwi,bhwo->io', around[:, i : i + 32, j : j + 32], g, optimize=True) for j in range(3)]
        for i in range(3)
    ]
    np.testing.assert_allclose(got, want, atol=1e-4 * np.std(want))


@pytest.mark.parametrize('lanes', [jax.vmap, lambda f: lambda *rows: jax.lax.map(lambda row: f(*row), rows)])
def test_clients_have_their_own(lanes):
    x, k, g = normal(0, 3, 4, 6, 6, 16), normal(1, 3, 3, 3, 16, 8), normal(2, 3, 4, 6, 6, 8)
    got = jax.jit(lanes(gradient(conv_onednn)))(x, k, g)
    assert_close([got], [jax.jit(jax.vmap(gradient(conv_native)))(x, k, g)])


def test_calls_may_overlap():
    """From many threads at once, some of them of the same shape."""
    by = gradient(conv_onednn)
    cases = [(normal(i, 6, 8, 8, 16), normal(0, 3, 3, 16, 8), normal(i + 1, 6, 8, 8, 8)) for i in range(40)]
    cases += [(normal(i, 5, 9, 7, 3), normal(0, 5, 3, 3, 8), normal(i + 1, 5, 9, 7, 8)) for i in range(40)]
    want = [gradient(conv_native)(*case) for case in cases]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert_close(list(pool.map(lambda case: np.asarray(by(*case)), cases)), want)


def test_threads_are_shared_out_among_devices(monkeypatch):
    x, g = normal(0, 8, 16, 16, 16), normal(1, 8, 16, 16, 16)
    how = {'size': (3, 3), 'strides': (1, 1), 'pads': ((1, 1), (1, 1))}
    texts, results = [], []
    for devices in (1, 10_000):
        monkeypatch.setattr(jax, 'local_device_count', lambda kind, devices=devices: devices)
        lowered = jax.jit(lambda x, g: libdnnl.kernel_gradient(x, g, **how)).lower(x, g)
        texts.append(lowered.as_text())
        results.append(lowered.compile()(x, g))
    assert ', 1]> : tensor<16xi64>' in texts[1]
    assert (texts[0] == texts[1]) == (libdnnl._library().omp_get_max_threads() == 1)
    assert_close(results[:1], results[1:])


def test_an_error_in_a_call_is_one_of_the_program(monkeypatch):
    x, k, g = normal(0, 2, 6, 6, 16), normal(1, 3, 3, 16, 8), normal(2, 2, 6, 6, 8)
    compiled = gradient(conv_onednn).lower(x, k, g).compile()

    def broken(numbers):
        raise RuntimeError('out of order')

    monkeypatch.setattr(libdnnl, '_planned', broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match='RuntimeError: out of order'):
        compiled(x, k, g).block_until_ready()
    monkeypatch.undo()
    assert_close([compiled(x, k, g)], [gradient(conv_native)(x, k, g)])


def test_what_onednn_refuses_is_told():
    with pytest.raises(RuntimeError, match='dnnl_convolution_backward_weights_primitive_desc_create gave status'):
        libdnnl._planned((2, 6, 6, 16, 3, 3, 5, 6, 8, 1, 1, 1, 1, 1, 1, 1))  # there are six rows of results


def test_programs_for_other_machines_do_not_call_it():
    x, k, g = normal(0, 2, 6, 6, 16), normal(1, 3, 3, 16, 8), normal(2, 2, 6, 6, 8)
    assert libdnnl.CALL in gradient(conv_by_platform).lower(x, k, g).as_text()
    assert libdnnl.CALL not in jax.export.export(gradient(conv_by_platform))(x, k, g).mlir_module()


def test_other_types_are_left_to_xla():
    assert not libdnnl.available(jnp.dtype('bfloat16'))
    x, k, g = (u.astype(jnp.bfloat16) for u in (normal(0, 2, 6, 6, 16), normal(1, 3, 3, 16, 8), normal(2, 2, 6, 6, 8)))
    assert libdnnl.CALL not in gradient(conv_onednn).lower(x, k, g).as_text()


def missing(name):
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.mark.parametrize(
    ('module', 'name', 'value'),
    [
        (libdnnl.importlib.metadata, 'files', missing),
        (libdnnl.importlib.metadata, 'files', lambda name: None),
        (libdnnl.ctypes, 'CDLL', lambda path: (_ for _ in ()).throw(OSError('libgomp.so.1: cannot open'))),
        (libdnnl.platform, 'machine', lambda: 'aarch64'),
        (libdnnl.onednn, 'available', lambda dtype: False),
        (libdnnl, 'OPENMP', 4),  # a library of another runtime
        (libdnnl, 'kernel_gradient', lambda x, g, **how: jnp.zeros((*how['size'], x.shape[3], g.shape[3]))),
    ],
)
def test_without_it_the_gradient_is_computed_otherwise(module, name, value, monkeypatch):
    x, k, g = normal(0, 2, 6, 6, 16), normal(1, 3, 3, 16, 8), normal(2, 2, 6, 6, 8)
    forget()
    monkeypatch.setattr(module, name, value)
    try:
        assert not libdnnl.available(FLOAT)
        lowered = gradient(conv_onednn).lower(x, k, g)
        assert libdnnl.CALL not in lowered.as_text()
        assert_close([lowered.compile()(x, k, g)], [gradient(conv_native)(x, k, g)])
    finally:
        monkeypatch.undo()
        forget()
    assert libdnnl.available(FLOAT)


def forget():
    libdnnl._library.cache_clear()
    libdnnl._usable.cache_clear()
    jax.clear_caches()  # lowering is remembered


def test_few_channels_are_left_to_xla_without_it(monkeypatch):
    """oneDNN's convolution in three dimensions is slower there."""
    monkeypatch.setattr(libdnnl, 'available', lambda dtype: False)
    for channels, calls in ((looped.CHANNELS - 1, 0), (looped.CHANNELS, 1)):
        x, k, g = normal(0, 2, 6, 6, channels), normal(1, 3, 3, channels, 8), normal(2, 2, 6, 6, 8)
        text = gradient(conv_onednn).lower(x, k, g).as_text()
        assert text.count('onednn$') == calls
    assert onednn.available(FLOAT)
