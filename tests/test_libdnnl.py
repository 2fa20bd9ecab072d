"""oneDNN's own convolutions against XLA's, in programs that take them, and what happens where they cannot be had."""

import concurrent.futures
import functools
import importlib.metadata
import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_layers import GEOMETRIES, assert_close, normal, run, value_and_gradients

from fedjax_nc.models import conv_by_platform, conv_native, conv_onednn, foreign, libdnnl, looped, onednn

FLOAT = jnp.dtype('float32')
HERE = (platform.system(), platform.machine()) == ('Linux', 'x86_64') and onednn.available(FLOAT)
pytestmark = pytest.mark.skipif(not HERE, reason='oneDNN cannot be called on this system, or with this jaxlib')


def gradient(conv, strides=(1, 1), padding='SAME'):
    return jax.jit(lambda x, k, g: jax.vjp(lambda k: run(conv, x, k, strides, padding), k)[1](g)[0])


def test_it_comes_with_the_tests_and_is_used():
    assert libdnnl.version()


@pytest.mark.parametrize(('inputs', 'outputs'), [(3, 4), (16, 8), (17, 24)])
@pytest.mark.parametrize(('image', 'kernel', 'strides', 'padding'), GEOMETRIES)
def test_gradients_equal_native(image, kernel, strides, padding, inputs, outputs):
    x, k = normal(0, 5, *image, inputs), normal(1, *kernel, inputs, outputs)
    want = jax.jit(value_and_gradients(conv_native, strides, padding))(x, k)
    lowered = jax.jit(value_and_gradients(conv_onednn, strides, padding)).lower(x, k)
    assert lowered.as_text().count(f'@{libdnnl.CALL}') == (0 if kernel == (1, 1) else 3)
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
    assert libdnnl.available(FLOAT)  # which registers it
    x, g = normal(0, 8, 16, 16, 16), normal(1, 8, 16, 16, 16)
    how = {'size': (3, 3), 'strides': (1, 1), 'pads': ((1, 1), (1, 1))}
    threads, results = libdnnl._library().omp_get_max_threads(), []
    for local, devices, each in ((1, 1, threads), (1, 4, threads), (10_000, 1, threads), (10_000, 10_000, 1)):
        monkeypatch.setattr(jax, 'local_device_count', lambda kind, local=local: local)
        by = functools.partial(libdnnl.kernel_gradient, **how, devices=devices)
        lowered = jax.jit(lambda x, g, by=by: by(x, g)).lower(x, g)
        assert f', {each}]> : tensor<17xi64>' in lowered.as_text()
        results.append(lowered.compile()(x, g))
    assert_close(results[1:], results[:1] * 3)


DEVICES = """
import jax, numpy as np
from jax.sharding import Mesh, PartitionSpec
from fedjax_nc.models import conv_onednn, convolution, libdnnl
rng = np.random.default_rng(0)
x, k = np.float32(rng.normal(size=(8, 2, 6, 6, 16))), np.float32(rng.normal(size=(8, 3, 3, 16, 8)))
libdnnl._library = lambda library=libdnnl._library(): library
libdnnl._library().omp_set_num_threads(8)
def loss(x, k): return (conv_onednn(x, k, (1, 1), 'SAME', dimension_numbers=convolution.LAYOUT) ** 2).sum()
def lanes(x, k): return jax.lax.map(lambda row: jax.grad(loss, argnums=(0, 1))(*row), (x, k))
where = PartitionSpec('clients')
mesh = Mesh(np.array(jax.devices()), ('clients',))
shared = jax.shard_map(lanes, mesh=mesh, in_specs=where, out_specs=where, check_vma=False)
texts = [jax.jit(f).lower(x, k).as_text() for f in (lanes, shared)]
print(*(text.count(f', {n}]> : tensor<17xi64>') for text, n in zip(texts, (8, 2))))
print(max(float(abs(a - b).max()) for a, b in zip(jax.jit(lanes)(x, k), jax.jit(shared)(x, k))))
"""


def test_devices_of_a_mesh_share_the_threads():
    flags = {'XLA_FLAGS': '--xla_force_host_platform_device_count=4'}
    done = subprocess.run([sys.executable, '-c', DEVICES], env=os.environ | flags, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    counts, apart = done.stdout.splitlines()
    assert counts == '3 3'
    assert float(apart) < 1e-3


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


INTERRUPTED = """
import _thread, signal, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # which shells keep from what they start in the background
import jax, numpy as np
from fedjax_nc.models import conv_onednn, convolution
x, k = (jax.random.normal(jax.random.key(0), shape) for shape in ((64, 32, 32, 16), (3, 3, 16, 16)))
k /= 12
jax.block_until_ready((x, k))
def several(x, k):
    for _ in range(8): x = conv_onednn(x, k, (1, 1), 'SAME', dimension_numbers=convolution.LAYOUT)
    return x  # nothing else: programs of little work are run by the thread that asks for them
program = jax.jit(several).lower(x, k).compile()
want, results, told = np.asarray(program(x, k)), [], []
for i in range(6):
    threading.Timer(0.05 + 0.003 * i, _thread.interrupt_main).start()
    try:
        for _ in range(1000): results.append(np.asarray(program(x, k)))
    except (KeyboardInterrupt, jax.errors.JaxRuntimeError, ValueError) as error:
        told.append(f'{type(error).__name__}: {error}')
    assert all(np.array_equal(result, want) for result in results)
    results.clear()
assert len(told) == 6 and all('KeyboardInterrupt' in text for text in told), told
assert any('INTERNAL: KeyboardInterrupt' in text for text in told), told  # it came into a call
"""


def test_no_interruption_is_lost_or_leaves_a_wrong_result():
    done = subprocess.run([sys.executable, '-c', INTERRUPTED], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, '')


@pytest.mark.parametrize('kind', [libdnnl.FORWARD, libdnnl.INPUT_GRADIENT, libdnnl.KERNEL_GRADIENT])
def test_what_onednn_refuses_is_told(kind):
    with pytest.raises(RuntimeError, match=r'dnnl_convolution_\w+_primitive_desc_create gave status'):
        libdnnl._planned((kind, 2, 6, 6, 16, 3, 3, 5, 6, 8, 1, 1, 1, 1, 1, 1, 1))  # there are six rows of results


def test_the_persistent_cache_takes_its_programs(tmp_path):
    """Which jaxlib's own operation forbids."""
    program = """
import sys, warnings
import jax, jax.numpy as jnp
warnings.simplefilter('error')
jax.config.update('jax_compilation_cache_dir', sys.argv[1])
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)
from fedjax_nc.models import conv_onednn, convolution
def convolved(x, k): return conv_onednn(x, k, (1, 1), 'SAME', dimension_numbers=convolution.LAYOUT)
print(float(jax.jit(convolved)(jnp.ones((2, 8, 8, 16)), jnp.ones((3, 3, 16, 8))).sum()))
"""
    results = set()
    for _ in range(2):
        command = [sys.executable, '-c', program, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        results.add(done.stdout)
        assert any(path.name.startswith('jit_convolved') for path in tmp_path.iterdir())
    assert results == {f'{2 * 8 * 16 * (8 * 8 * 9 - 4 * 8 * 3 + 4.0)}\n'}


def test_programs_for_other_machines_do_not_call_it():
    x, k, g = normal(0, 2, 6, 6, 16), normal(1, 3, 3, 16, 8), normal(2, 2, 6, 6, 8)
    assert libdnnl.CALL in gradient(conv_by_platform).lower(x, k, g).as_text()
    assert libdnnl.CALL not in jax.export.export(gradient(conv_by_platform))(x, k, g).mlir_module()


def test_other_types_are_left_to_xla():
    assert not libdnnl.available(jnp.dtype('bfloat16'))
    x, k, g = (u.astype(jnp.bfloat16) for u in (normal(0, 2, 6, 6, 16), normal(1, 3, 3, 16, 8), normal(2, 2, 6, 6, 8)))
    assert libdnnl.CALL not in gradient(conv_onednn).lower(x, k, g).as_text()


def raiser(error):
    def refuse(*args, **how):
        raise error

    return refuse


@pytest.mark.parametrize(
    ('module', 'name', 'value'),
    [
        (libdnnl.importlib.metadata, 'files', raiser(importlib.metadata.PackageNotFoundError(libdnnl.PACKAGE))),
        (libdnnl.importlib.metadata, 'files', lambda name: None),
        (libdnnl, '_interface', lambda: SimpleNamespace(dlopen=raiser(OSError('libgomp.so.1: cannot open')))),
        (libdnnl, '_interface', raiser(ModuleNotFoundError('cffi'))),
        (foreign, 'register', raiser(MemoryError())),
        (libdnnl.platform, 'machine', lambda: 'aarch64'),
        (libdnnl.onednn, 'available', lambda dtype: False),
        (libdnnl, 'OPENMP', 4),  # a library of another runtime
        (libdnnl, 'kernel_gradient', lambda x, g, **how: jnp.zeros((*how['size'], x.shape[3], g.shape[3]))),
        (libdnnl, 'input_gradient', lambda g, kernel, **how: jnp.zeros((len(g), *how['sides'], kernel.shape[2]))),
        (libdnnl, 'convolution', lambda x, kernel, **how: jnp.zeros((2, 3, 5, 6))),
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
    libdnnl._found_usable.cache_clear()
    jax.clear_caches()  # lowering is remembered


def test_few_channels_are_left_to_xla_without_it(monkeypatch):
    """oneDNN's convolution in three dimensions is slower there."""
    monkeypatch.setattr(libdnnl, 'available', lambda dtype: False)
    for channels, calls in ((looped.CHANNELS - 1, 0), (looped.CHANNELS, 1)):
        x, k, g = normal(0, 2, 6, 6, channels), normal(1, 3, 3, channels, 8), normal(2, 2, 6, 6, 8)
        text = gradient(conv_onednn).lower(x, k, g).as_text()
        assert text.count('onednn$') == calls
    assert onednn.available(FLOAT)


def test_empty_channels_are_left_to_xla():
    """oneDNN makes nothing of them."""
    for inputs, outputs in ((0, 4), (3, 0)):
        x, k = jnp.zeros((2, 6, 6, inputs)), jnp.zeros((3, 3, inputs, outputs))
        how = {'dimension_numbers': ('NHWC', 'HWIO', 'NHWC')}
        y, back = jax.vjp(lambda x, k, how=how: conv_onednn(x, k, (1, 1), 'SAME', **how), x, k)
        assert y.shape == (2, 6, 6, outputs)
        assert not np.any(y)
        assert [u.shape for u in back(y)] == [x.shape, k.shape]


def test_threads_may_trace_the_first_model_together():
    """In a process of its own, which a function that was freed ends by a signal."""
    program = (
        'import concurrent.futures, jax, jax.numpy as jnp, numpy as np\n'
        'from fedjax_nc import models\n'
        'x = jnp.ones((4, 8, 8, 3))\n'
        'kernel = jnp.ones((3, 3, 3, 8))\n'
        "how = {'dimension_numbers': ('NHWC', 'HWIO', 'NHWC')}\n"
        'def work(i):\n'
        "    return np.asarray(jax.jit(lambda x: models.conv_onednn(x * i, kernel, (1, 1), 'SAME', **how))(x)).shape\n"
        'with concurrent.futures.ThreadPoolExecutor(4) as pool:\n'
        '    assert set(pool.map(work, range(4))) == {(4, 8, 8, 8)}\n'
    )
    subprocess.run([sys.executable, '-c', program], check=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize('held', ['y = ', ''])
def test_a_program_that_runs_when_the_interpreter_ends_does_not_keep_it(held):
    program = (
        'import jax, jax.numpy as jnp\n'
        'from fedjax_nc import models\n'
        'x, kernel = jnp.ones((128, 32, 32, 16)), jnp.ones((3, 3, 16, 16))\n'
        "how = {'dimension_numbers': ('NHWC', 'HWIO', 'NHWC')}\n"
        'def many(x, kernel):\n'
        '    def once(i, x):\n'
        "        return models.conv_onednn(x, kernel, (1, 1), 'SAME', **how) / 144\n"
        '    return jax.lax.fori_loop(0, 100, once, x)\n'
        f'{held}jax.jit(many)(x, kernel)\n'
        "raise ValueError('a fault of the user')\n"
    )
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.endswith('ValueError: a fault of the user\n')


@pytest.mark.slow
def test_nor_does_a_thread_that_goes_on_and_on():
    program = (
        'import threading, time, jax, jax.numpy as jnp\n'
        'from fedjax_nc import models\n'
        'x, kernel = jnp.ones((32, 32, 32, 16)), jnp.ones((3, 3, 16, 16))\n'
        "how = {'dimension_numbers': ('NHWC', 'HWIO', 'NHWC')}\n"
        "conv = jax.jit(lambda x, kernel: models.conv_onednn(x, kernel, (1, 1), 'SAME', **how) / 144)\n"
        'def work(y):\n'
        '    while True:\n'
        '        y = jax.block_until_ready(conv(y, kernel))\n'
        'threading.Thread(target=work, args=(conv(x, kernel),), daemon=True).start()\n'
        'time.sleep(1)\n'
    )
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
