"""Convolutions against XLA's, pooling against flax's, BatchNorm against PyTorch's formulas in NumPy."""

import functools
import importlib.metadata
import platform
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest

from fedjax_nc import models
from fedjax_nc.models import convolution, layers, libdnnl, looped, onednn
from fedjax_nc.models.convolution import (
    LAYOUT,
    conv_by_platform,
    conv_grouped,
    conv_native,
    conv_onednn,
    conv_patches,
    conv_sequential,
)
from fedjax_nc.models.mobilenet import Depthwise

FORMS = [conv_patches, conv_grouped, conv_sequential, conv_onednn, conv_by_platform]
GEOMETRIES = [  # image, kernel, strides, padding
    ((7, 6), (1, 1), (1, 1), 'SAME'),
    ((7, 6), (1, 1), (2, 2), 'VALID'),
    ((8, 9), (1, 1), (2, 3), 'VALID'),
    ((7, 6), (1, 1), (2, 2), [(1, 0), (1, 2)]),
    ((7, 6), (3, 3), (1, 1), 'SAME'),
    ((8, 8), (3, 3), (2, 2), [(1, 1), (1, 1)]),
    ((9, 7), (3, 3), (2, 3), 'SAME'),
    ((8, 5), (3, 3), (2, 2), 'SAME'),  # more below than above
    ((9, 8), (3, 3), (3, 3), 'VALID'),
    ((7, 9), (5, 5), (1, 1), 'SAME'),
    ((7, 8), (2, 2), (1, 1), 'SAME'),
    ((7, 8), (4, 4), (2, 2), 'VALID'),
    ((8, 7), (2, 5), (1, 2), [(0, 3), (2, 1)]),
    ((6, 6), (2, 2), (3, 3), 'VALID'),  # a stride that skips pixels
    ((4, 4), (2, 2), (1, 1), [(3, 2), (0, 4)]),  # more padding than the kernel is wide
]


@pytest.fixture(autouse=True)
def onednn_takes_all_gradients(monkeypatch):
    """As jaxlib has it, of few channels too, which are otherwise left to XLA; `test_libdnnl` has oneDNN's own."""
    monkeypatch.setattr(looped, 'CHANNELS', 1)
    monkeypatch.setattr(libdnnl, 'available', lambda dtype: False)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def run(conv, x, kernel, strides=(1, 1), padding='SAME'):
    return conv(x, kernel, strides, padding, dimension_numbers=LAYOUT)


def value_and_gradients(conv, strides, padding):
    def all_three(x, kernel):
        y, back = jax.vjp(lambda x, k: run(conv, x, k, strides, padding), x, kernel)
        # A cotangent without symmetry, so that flipped or shifted gradients cannot agree by chance.
        return (y, *back(jnp.sin(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)))

    return all_three


def ones_back(f, *args):
    y, back = jax.vjp(f, *args)
    return (y, *back(jnp.ones_like(y)))


def assert_close(got, want, tolerance=2e-5):
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * float(jnp.max(jnp.abs(b))))


@pytest.mark.parametrize('conv', FORMS)
@pytest.mark.parametrize(('image', 'kernel', 'strides', 'padding'), GEOMETRIES)
def test_value_and_gradients_equal_native(conv, image, kernel, strides, padding):
    x, k = normal(0, 2, *image, 3), normal(1, *kernel, 3, 4)
    want = jax.jit(value_and_gradients(conv_native, strides, padding))(x, k)
    assert_close(jax.jit(value_and_gradients(conv, strides, padding))(x, k), want)


@pytest.mark.parametrize('conv', FORMS)
@pytest.mark.parametrize(('strides', 'padding'), [((1, 1), 'SAME'), ((2, 2), [(1, 1), (1, 1)])])
@pytest.mark.parametrize('axes', [(0, 0), (0, None), (None, 0)])
def test_clients_may_be_vmapped(conv, strides, padding, axes):
    x, k = normal(0, 3, 2, 6, 6, 3), normal(1, 3, 3, 3, 3, 4)
    x, k = (a if axis == 0 else a[0] for a, axis in zip((x, k), axes, strict=True))
    want = jax.jit(jax.vmap(value_and_gradients(conv_native, strides, padding), axes))(x, k)
    assert_close(jax.jit(jax.vmap(value_and_gradients(conv, strides, padding), axes))(x, k), want)


@pytest.mark.parametrize('conv', FORMS)
@pytest.mark.parametrize('vmapped', [False, True])
def test_training_in_loops_equals_native(conv, vmapped):
    x, k, steps = normal(0, 2, 2, 6, 6, 3), normal(1, 2, 3, 3, 3, 4), jnp.array([3, 2])

    def train(conv, x, kernel, steps):
        loss = lambda kernel: jnp.mean(jnp.sin(run(conv, x, kernel)))  # noqa: E731
        return jax.lax.fori_loop(0, steps, lambda _, k: k - 0.5 * jax.grad(loss)(k), kernel)

    alone = jax.jit(lambda *row: train(conv_native, *row))
    want = [alone(*row) for row in zip(x, k, steps, strict=True)]
    clients = lambda conv: jax.vmap(lambda *row: train(conv, *row))(x, k, steps)  # noqa: E731
    if not vmapped:
        clients = lambda conv: jax.lax.map(lambda row: train(conv, *row), (x, k, steps))  # noqa: E731
    got = jax.jit(clients, static_argnums=0)(conv)
    assert_close(got, want)
    assert float(jnp.max(jnp.abs(got - k))) > 1e-3


@pytest.mark.parametrize('conv', FORMS)
def test_bfloat16_sums_in_float32(conv):
    # 5 * 5 * 40 ones: a bfloat16 accumulator would stop at 256.
    x, k = jnp.ones((1, 7, 7, 40), jnp.bfloat16), jnp.ones((5, 5, 40, 2), jnp.bfloat16)
    program = jax.jit(lambda x, k: ones_back(lambda x, k: run(conv, x, k, padding='VALID'), x, k))
    # The CPU sums in float32 unasked; a form of several operations has to say so, three times.
    text = str(jax.make_jaxpr(program)(x, k))
    told = 'onednn_or_xla[' if conv in (conv_onednn, conv_by_platform) else 'preferred_element_type=float32'
    assert conv is conv_grouped or text.count(told) >= 3
    y, dx, dk = program(x, k)
    assert y.dtype == dx.dtype == dk.dtype == jnp.bfloat16
    assert float(y[0, 0, 0, 0]) == 1000
    assert float(dx[0, 3, 3, 0]) == 18
    assert float(dk[0, 0, 0, 0]) == 9


@pytest.mark.parametrize('conv', FORMS)
@pytest.mark.parametrize(
    'options',
    [
        {'rhs_dilation': (2, 2)},
        {'lhs_dilation': (2, 1)},
        {'feature_group_count': 3},
        {'batch_group_count': 2},
        {'dimension_numbers': ('NCHW', 'OIHW', 'NCHW')},
        {'dimension_numbers': None},
        {'preferred_element_type': jnp.bfloat16},
    ],
)
def test_what_is_not_supported_is_refused(conv, options):
    with pytest.raises(ValueError, match='conv_native'):
        conv(normal(0, 2, 6, 6, 3), normal(1, 3, 3, 3, 3), (1, 1), 'SAME', **({'dimension_numbers': LAYOUT} | options))


@pytest.mark.parametrize('conv', FORMS)
@pytest.mark.parametrize('precision', [('highest', 'highest'), 'highest', None])
def test_precision_and_type_are_taken_as_xla_takes_them(conv, precision):
    x, k = normal(0, 2, 6, 6, 3), normal(1, 3, 3, 3, 4)
    options = {'dimension_numbers': LAYOUT, 'preferred_element_type': jnp.float32}

    how = {'window_strides': (1, 1), 'padding': 'SAME', 'precision': precision, **options}

    def both(form):
        called = functools.partial(form, **how)
        return jax.jit(functools.partial(ones_back, called))(x, k)

    assert_close(both(conv), both(conv_native))
    if conv in (conv_patches, conv_grouped, conv_sequential):
        asked = str(jax.make_jaxpr(lambda x, k: ones_back(functools.partial(conv, **how), x, k))(x, k))
        told = len(re.findall(r'precision=\(?Precision.HIGHEST', asked))
        assert told >= 3 if precision else told == 0  # of the value and both gradients


@pytest.mark.parametrize('conv', FORMS)
def test_double_precision_is_kept(conv):
    with jax.enable_x64(True):
        x, k = (jnp.asarray(u, jnp.float64) for u in (normal(0, 2, 6, 6, 3), normal(1, 3, 3, 3, 4)))
        got, want = (jax.jit(value_and_gradients(f, (1, 1), 'SAME'))(x, k) for f in (conv, conv_native))
        assert {u.dtype for u in got} == {jnp.dtype('float64')}
        assert_close(got, want, 1e-12)


@pytest.mark.parametrize('conv', FORMS)
def test_impossible_shapes_are_refused(conv):
    with pytest.raises(ValueError, match='channels'):
        run(conv, normal(0, 2, 6, 6, 3), normal(1, 3, 3, 2, 4))
    for shape in ((2, 2, 6, 3), (2, 6, 2, 3)):
        with pytest.raises(ValueError, match='smaller than the kernel'):
            run(conv, normal(0, *shape), normal(1, 3, 3, 3, 4), padding='VALID')
    with pytest.raises(ValueError, match=r'expected images \[B, H, W, I\]'):
        run(conv, normal(0, 6, 6, 3), normal(1, 3, 3, 3, 4))
    with pytest.raises(ValueError, match='no negative padding'):
        run(conv, normal(0, 2, 6, 6, 3), normal(1, 3, 3, 3, 4), padding=[(0, 0), (1, -1)])
    with pytest.raises(TypeError, match='bfloat16 and float32'):
        run(conv, normal(0, 2, 6, 6, 3).astype(jnp.bfloat16), normal(1, 3, 3, 3, 4))


def test_flax_accepts_the_forms():
    x = normal(0, 2, 6, 6, 3)
    variables = nn.Conv(4, (3, 3)).init(jax.random.key(0), x)
    want = nn.Conv(4, (3, 3)).apply(variables, x)
    for conv in (*FORMS, conv_native):
        got = nn.Conv(4, (3, 3), conv_general_dilated=conv).apply(variables, x)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('platform', ['cpu', 'cuda', 'tpu'])
def test_the_default_follows_the_platform_that_a_program_is_for(platform):
    x, k = normal(0, 3, 2, 6, 6, 32), normal(1, 3, 3, 3, 32, 4)
    exported = {}
    for conv in (conv_by_platform, conv_grouped, conv_sequential):
        program = jax.jit(jax.vmap(value_and_gradients(conv, (1, 1), 'SAME')))
        exported[conv] = jax.export.export(program, platforms=[platform])(x, k)
        assert 'onednn$' not in exported[conv].mlir_module()  # another machine may lack it
    forms = [text.mlir_module().count('stablehlo.convolution') for text in exported.values()]
    grouped = [text.mlir_module().count('feature_group_count = 3') for text in exported.values()]
    assert forms[0] == forms[1 if platform != 'cpu' else 2]
    assert (grouped[0] > 0) == (platform != 'cpu')
    if platform == 'cpu':
        assert_close(
            exported[conv_by_platform].call(x, k), jax.vmap(value_and_gradients(conv_native, (1, 1), 'SAME'))(x, k)
        )


def test_a_program_for_this_machine_takes_onednn_where_it_can(monkeypatch):
    x, k = normal(0, 2, 6, 6, 32), normal(1, 3, 3, 32, 4)
    text = jax.jit(value_and_gradients(conv_by_platform, (1, 1), 'SAME')).lower(x, k).as_text()
    assert text.count('onednn$') == (3 if onednn.available(jnp.dtype('float32')) else 0)
    monkeypatch.setattr(onednn, 'available', lambda dtype: False)
    jax.clear_caches()  # lowering is remembered
    text = jax.jit(value_and_gradients(conv_by_platform, (1, 1), 'SAME')).lower(x, k).as_text()
    assert 'onednn$' not in text


def test_a_kernel_gradient_stays_one_under_vmap():
    x, k = normal(0, 3, 2, 16, 16, 4), normal(1, 3, 3, 3, 4, 4)
    windows = {}
    for conv in (conv_native, conv_grouped):
        gradient = jax.vmap(jax.grad(lambda k, x: jnp.sum(jnp.sin(run(conv, x, k)))))  # noqa: B023
        text = jax.jit(gradient).trace(k, x).lower(lowering_platforms=('cuda',)).as_text()
        windows[conv] = text.count('batch_group_count = 3')
    assert windows[conv_native] == 0 < windows[conv_grouped]


@pytest.mark.parametrize(
    ('fold', 'width', 'kernel', 'pads'),
    [
        (2, 8, (3, 3, 16, 16), ((1, 1), (1, 1))),
        (4, 16, (3, 3, 4, 8), ((0, 0), (2, 0))),
        (4, 12, (5, 5, 3, 6), ((2, 2), (2, 2))),
        (2, 6, (3, 4, 5, 4), ((1, 1), (1, 2))),
        (4, 4, (1, 2, 4, 4), ((0, 0), (0, 1))),
    ],
)
def test_pixels_as_channels_have_the_same_kernel_gradients(fold, width, kernel, pads):
    """Beside sums of products in NumPy, and beside the gradient as it is."""
    geometry = convolution.Geometry((2, 5, width, kernel[2]), kernel, (1, 1), pads, None)
    x = normal(0, 3, *geometry.image)
    height = 5 + sum(pads[0]) - kernel[0] + 1
    g = normal(1, 3, 2, height, width, kernel[3])
    got = convolution._folded_kernel_gradients(x, g, geometry, fold)
    assert_close(got, convolution._kernel_gradients(x, g, geometry))
    padded = np.pad(np.asarray(x, np.float64), ((0, 0), (0, 0), *pads, (0, 0)))
    want = np.stack([
        np.stack([
            np.einsum('nbhwi,nbhwo->nio', padded[:, :, i : i + height, j : j + width], g) for j in range(kernel[1])
        ], 1)
        for i in range(kernel[0])
    ], 1)  # fmt: skip
    assert_close(got, want)


@pytest.mark.parametrize(('platform', 'folded'), [('cuda', True), ('tpu', False), ('cpu', False)])
def test_only_gpus_take_pixels_as_channels(platform, folded):
    x, k = normal(0, 3, 2, 8, 8, 16), normal(1, 3, 3, 3, 16, 16)
    gradient = lambda k, x, **o: jax.grad(lambda k: jnp.sum(jnp.sin(run(conv_grouped, x, k, **o))))(k)  # noqa: E731

    def text(many, *args, **options):
        program = functools.partial(gradient, **options)
        return (
            jax.jit(jax.vmap(program) if many else program).trace(*args).lower(lowering_platforms=(platform,)).as_text()
        )

    assert ('3x2x8x2x64xf32' in text(True, k, x)) == folded
    for other in (
        text(False, k[0], x[0]), text(True, k[:1], x[:1]), text(True, k, x, strides=(2, 2)),
        text(True, k, x, padding='VALID'), text(True, k.astype(jnp.bfloat16), x.astype(jnp.bfloat16)),
        text(True, k[:, :1, :1], x), text(True, normal(1, 3, 3, 3, 8, 16), x[..., :8]),
        text(True, normal(1, 3, 3, 3, 16, 8), x),
        text(True, normal(1, 3, 3, 3, 64, 64), normal(0, 3, 2, 8, 8, 64)),
    ):  # fmt: skip
        assert '8x2x' not in other


@pytest.mark.parametrize(
    ('width', 'kernel', 'sides', 'fold'),
    [
        (8, (3, 3, 16, 16), (1, 1), 4),
        (8, (3, 3, 16, 32), (1, 1), 2),
        (8, (3, 3, 64, 16), (1, 1), 1),  # of the wider side there are enough
        (6, (3, 3, 16, 16), (1, 1), 2),
        (7, (3, 3, 16, 16), (1, 1), 1),  # a row is cut into whole pieces
        (8, (3, 7, 32, 32), (3, 3), 1),  # which see no farther than their neighbours
        (8, (3, 3, 32, 32), (2, 0), 2),
    ],
)
def test_pixels_are_taken_as_channels_where_rows_and_kernels_allow_it(width, kernel, sides, fold):
    geometry = convolution.Geometry((2, 5, width, kernel[2]), kernel, (1, 1), ((1, 1), sides), None)
    assert convolution._foldable(geometry, jnp.dtype('float32')) == fold


@pytest.mark.parametrize(('platform', 'apart'), [('cuda', 0), ('tpu', 2)])
def test_a_gpu_convolves_no_zeros_between_windows(platform, apart):
    """Of a strided input gradient, which its compiler would write out; a TPU's takes them as they are."""
    x, k, one = normal(0, 3, 2, 8, 8, 4), normal(1, 3, 3, 3, 4, 4), normal(2, 3, 1, 1, 4, 4)

    def loss(x, k, one):
        wide, narrow = run(conv_grouped, x, k, (2, 2), [(1, 1)] * 2), run(conv_grouped, x, one, (2, 2), 'VALID')
        return jnp.sum(jnp.sin(wide) + jnp.cos(narrow))

    text = jax.jit(jax.vmap(jax.grad(loss))).trace(x, k, one).lower(lowering_platforms=(platform,)).as_text()
    assert len(re.findall(r'lhs_dilate = \[2, 2\]', text)) == apart


def test_a_relu_of_a_sum_is_a_relu():
    x, g = jnp.asarray([-1.0, -0.0, 0.0, 2.0, jnp.inf, -jnp.inf, jnp.nan]), jnp.arange(1.0, 8.0)
    for one in (lambda f: f, jax.vmap):
        (want, back), (got, mine) = jax.vjp(one(jax.nn.relu), x), jax.vjp(one(layers.relu_of_sum), x)
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(mine(g)[0], back(g)[0])
    for kind, barriers in (('cuda', 1), ('tpu', 0), ('cpu', 0)):
        step = jax.jit(jax.grad(lambda x: jnp.sum(layers.relu_of_sum(x) ** 2)))
        text = step.trace(x).lower(lowering_platforms=(kind,)).as_text()
        assert text.count('optimization_barrier') == barriers


def test_what_is_stored_is_what_it_was():
    x, g = jnp.asarray([-1.0, -0.0, 0.0, 2.0, 3e38, jnp.inf, -jnp.inf, jnp.nan]), jnp.arange(1.0, 9.0)
    for one in (lambda f: f, jax.vmap):
        got, back = jax.vjp(one(layers.stored), x)
        np.testing.assert_array_equal(got.view(jnp.int32), x.view(jnp.int32))
        np.testing.assert_array_equal(back(g)[0], g)
    for kind, divisions in (('cpu', 1), ('cuda', 0), ('tpu', 0)):
        text = jax.jit(layers.stored).trace(x).lower(lowering_platforms=(kind,)).as_text()
        assert text.count('stablehlo.divide') == divisions


@pytest.mark.parametrize(('size', 'divisions'), [(3, 1), (1, 0)])
def test_images_are_stored_for_the_backward_pass_on_cpus_unless_kernels_are_single_pixels(size, divisions):
    x, k = normal(0, 2, 6, 6, 3), normal(1, size, size, 3, 4)
    for conv in (conv_sequential, conv_by_platform):
        program = jax.jit(value_and_gradients(conv, (1, 1), 'SAME')).trace(x, k)
        for kind in ('cpu', 'cuda', 'tpu')[: 1 if conv is conv_sequential else 3]:
            text = program.lower(lowering_platforms=(kind,)).as_text()
            assert text.count('stablehlo.divide') == (divisions if kind == 'cpu' else 0)


def test_a_cpu_makes_no_sum_of_residuals_again_and_writes_no_mean_as_large_as_images():
    """Each of the compiled operations reads three arrays of images at most, and one at least if it writes one."""
    net, x = models.ResNet(widths=(16,), blocks=(4,), norm='batch'), normal(0, 4, 8, 8, 3)
    variables = jax.eval_shape(net.init, jax.random.key(0), x)

    def loss(params, stats):
        y, stats = net.apply({'params': params, 'batch_stats': stats}, x, train=True, mutable=['batch_stats'])
        return jnp.sum(jnp.sin(y)), stats

    step = jax.jit(jax.grad(loss, has_aux=True), compiler_options=convolution.compiler_options())
    text = step.lower(variables['params'], variables['batch_stats']).compile().as_text()
    main = text[text.index('\nENTRY') :]
    images = {name for name, shape in re.findall(r'(%\S+) = (\S+?)\{', main) if shape == 'f32[4,8,8,16]'}
    fusions = re.findall(r'(%\S+) = \S+ fusion\((.*?)\), kind', main)
    reads = {name: len(images & set(re.findall(r'%[\w.-]+', operands))) for name, operands in fusions}
    assert max(reads.values()) == 3
    assert min(reads[name] for name in reads.keys() & images) == 1


def test_compiler_options_are_those_of_the_default_backend(monkeypatch):
    options = convolution.compiler_options()
    assert float(jax.jit(lambda x: x + 1, compiler_options=options)(1.0)) == 2
    assert not convolution._accepts((('xla_no_such_option', 'x'),))
    quick = convolution.compiler_options(once=True)
    assert options.items() < quick.items()
    assert quick.keys() - options.keys() <= {'xla_cpu_use_fusion_emitters', 'xla_backend_optimization_level'}
    assert float(jax.jit(lambda x: x + 1, compiler_options=quick)(1.0)) == 2
    monkeypatch.setattr(convolution, '_QUICK', {'xla_no_such_option': False})  # as of another jaxlib
    assert convolution.compiler_options(once=True).items() == quick.items() - {('xla_cpu_use_fusion_emitters', False)}
    monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
    assert convolution.compiler_options() == convolution.compiler_options(once=True) == {}


@pytest.mark.parametrize(
    ('shape', 'window'), [((2, 6, 4, 3), 2), ((2, 7, 5, 3), 2), ((1, 8, 9, 2), 3), ((1, 34, 17, 1), 17)]
)
@pytest.mark.parametrize('ties', [False, True])
def test_max_pool_equals_flax(shape, window, ties):
    x = normal(0, *shape)
    x = jax.nn.relu(jnp.round(x)) if ties else x
    want, want_back = jax.vjp(lambda x: nn.max_pool(x, (window, window), (window, window)), x)
    got, got_back = jax.vjp(lambda x: layers.max_pool(x, window), x)
    g = normal(1, *want.shape)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(got_back(g)[0], want_back(g)[0])
    vmapped = jax.vmap(jax.grad(lambda x: jnp.sum(layers.max_pool(x, window) * g)))(jnp.stack([x, x]))
    np.testing.assert_array_equal(vmapped[1], want_back(g)[0])


@pytest.mark.parametrize('shape', [(5, 3, 4, 2), (5, 2)])
def test_both_ways_to_sum_the_kept_rows_agree(shape):
    x, near, keep = normal(0, *shape), normal(1, shape[-1]), np.array([1, 0, 1, 1, 0], bool)
    x = x.at[1].set(jnp.nan)  # a row that is left out
    rows = np.asarray(x, np.float64)[keep].reshape(-1, shape[-1])
    expected = rows.sum(0), ((rows - np.asarray(near)) ** 2).sum(0)
    for form in (layers._kept_sums, layers._sums_of_kept):
        for found, right in zip(form(x, keep, near), expected, strict=True):
            np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)
    norm, images = layers.BatchNorm(), 'x'.join(map(str, shape))
    variables = norm.init(jax.random.key(0), x)
    chosen = jax.jit(lambda x: norm.apply(variables, x, keep, mutable=['batch_stats'])).trace(x)
    texts = [chosen.lower(lowering_platforms=(kind,)).as_text() for kind in ('cpu', 'cuda', 'tpu')]
    whole = [len(re.findall(rf'stablehlo.select.*tensor<{images}xf32>$', text, re.MULTILINE)) for text in texts]
    assert whole[0] == whole[1]
    assert (whole[2] > whole[0]) == (len(shape) == 4)


def test_tiles_are_the_same_in_float32():
    # With ties, which bfloat16 makes of these numbers, and a NaN.
    x = jnp.round(normal(0, 3, 7, 6, 5) * 4).astype(jnp.bfloat16).at[1, 2, 3, 4].set(jnp.nan)
    for found, expected in zip(layers._largest_in_float32(x, 2), layers._largest(x, 2), strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))
    program = jax.jit(lambda x: layers.max_pool(x, 2)).trace(x)
    for kind in ('cpu', 'cuda', 'tpu'):
        found = re.findall(
            r'stablehlo.maximum.*x(\w+)>$', program.lower(lowering_platforms=(kind,)).as_text(), re.MULTILINE
        )
        assert set(found) == {'f32' if kind == 'tpu' else 'bf16'}


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(('shape', 'window'), [((2, 3, 2, 3), 2), ((1, 2, 3, 2), 3)])
def test_both_ways_to_spread_a_gradient_over_tiles_agree(shape, window, dtype):
    g = normal(0, *shape).astype(dtype)
    where = jnp.asarray(np.random.default_rng(1).integers(0, window**2, shape), jnp.uint8)
    tiles, windows = layers._by_tiles(where, g, window), layers._by_windows(where, g, window)
    assert tiles.dtype == windows.dtype == dtype
    np.testing.assert_array_equal(tiles.astype(jnp.float32), windows.astype(jnp.float32))
    chosen = jax.jit(jax.grad(lambda x: jnp.sum(layers.max_pool(x, window) * g)))
    x = normal(2, shape[0], shape[1] * window, shape[2] * window, shape[3]).astype(dtype)
    forms = [chosen.trace(x).lower(lowering_platforms=(platform,)).as_text() for platform in ('cpu', 'cuda', 'tpu')]
    assert ['reduce_window' in form for form in forms] == [False, False, True]


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_pooling_before_bias_and_relu_gives_the_same(dtype):
    x = normal(0, 3, 9, 8, 4)
    early, late = layers.Conv(6, 3, pool=2, dtype=dtype), layers.Conv(6, 3, dtype=dtype)
    variables = early.init(jax.random.key(0), x)
    assert jax.tree.map(jnp.shape, variables) == jax.tree.map(jnp.shape, late.init(jax.random.key(0), x))

    def value(variables, x, pooled):
        y = (
            jax.nn.relu(early.apply(variables, x))
            if pooled
            else layers.max_pool(jax.nn.relu(late.apply(variables, x)), 2)
        )
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

    (_, got), back = jax.value_and_grad(value, (0, 1), has_aux=True)(variables, x, True)
    (_, want), want_back = jax.value_and_grad(value, (0, 1), has_aux=True)(variables, x, False)
    np.testing.assert_array_equal(got, want)
    if dtype == jnp.float32:  # in bfloat16 adding the bias makes ties
        assert_close(jax.tree.leaves(back), jax.tree.leaves(want_back), 1e-5)


def test_max_pool_shows_nan_and_keeps_the_type():
    x = jnp.zeros((1, 4, 4, 1), jnp.bfloat16).at[0, 1, 1, 0].set(jnp.nan)
    y = layers.max_pool(x, 2)
    assert y.dtype == jnp.bfloat16
    assert bool(jnp.isnan(y[0, 0, 0, 0]))
    assert int(jnp.isnan(y).sum()) == 1


def test_global_average_pool_sums_in_float32():
    y = layers.global_average_pool(jnp.ones((1, 64, 64, 2), jnp.bfloat16).at[0, 0, 0].set(2))
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, 1 + 1 / 64**2, rtol=1e-6)


@pytest.mark.parametrize('real', [1, 3, 5])
def test_batch_norm_equals_pytorch_on_the_real_rows(real):
    x, mask = np.array(normal(0, 5, 3, 2, 4)) * 3 + 1, np.arange(5) < real
    norm = layers.BatchNorm()
    variables = norm.init(jax.random.key(0), x)
    variables['params'] = {'scale': normal(1, 4), 'bias': normal(2, 4)}
    variables['batch_stats'] = {'mean': normal(3, 4), 'var': normal(4, 4) ** 2}
    rows = x[:real].astype(np.float64)
    mean, var, n = rows.mean((0, 1, 2)), rows.var((0, 1, 2)), rows.size // 4
    want = (rows - mean) / np.sqrt(var + 1e-5) * variables['params']['scale'] + variables['params']['bias']
    for junk in (0.0, 1e6):
        x[real:] = junk
        y, new = norm.apply(variables, x, mask, mutable=['batch_stats'])
        new, old = new['batch_stats'], variables['batch_stats']
        np.testing.assert_allclose(y[:real], want, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(new['mean'], 0.9 * old['mean'] + 0.1 * mean, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(new['var'], 0.9 * old['var'] + 0.1 * var * n / (n - 1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('off', [0.0, 3.0, 300.0])
def test_one_pass_over_values_far_from_zero_loses_no_digits_once_the_mean_is_known(off):
    x = np.asarray(normal(0, 64, 6, 6, 2), np.float64) + off
    want = (x - x.mean((0, 1, 2))) / np.sqrt(x.var((0, 1, 2)) + 1e-5)
    norm = layers.BatchNorm()
    variables = norm.init(jax.random.key(0), jnp.asarray(x, jnp.float32))
    for _ in range(60):
        y, new = norm.apply(variables, jnp.asarray(x, jnp.float32), mutable=['batch_stats'])
        variables |= new
    np.testing.assert_allclose(y, want, atol=1e-5 + off * 1e-6)
    assert float(jnp.min(new['batch_stats']['var'])) > 0
    first, _ = norm.apply(norm.init(jax.random.key(0), y), jnp.asarray(x, jnp.float32), mutable=['batch_stats'])
    np.testing.assert_allclose(first, want, atol=1e-5 + off**2 * 1e-6)  # and few while it is not


@pytest.mark.parametrize('rows', [3, 40])
def test_rows_without_an_image_lose_no_digits_in_the_first_step_either(rows):
    x = np.array(normal(0, rows + 2, 4)) * np.float32(0.01) + 300
    x[rows:], real = 1e6, x[:rows].astype(np.float64)
    norm = layers.BatchNorm()
    y, new = norm.apply(norm.init(jax.random.key(0), x), x, np.arange(len(x)) < rows, mutable=['batch_stats'])
    want = (real - real.mean(0)) / np.sqrt(real.var(0) + 1e-5)
    np.testing.assert_allclose(y[:rows], want, atol=0.01)  # a last digit of the mean is 0.003 deviations
    np.testing.assert_allclose(new['batch_stats']['var'], 0.9 + 0.1 * real.var(0, ddof=1), atol=1e-6)
    narrow, _ = norm.apply(norm.init(jax.random.key(0), x[:rows]), x[:rows], mutable=['batch_stats'])
    np.testing.assert_allclose(y[:rows], narrow, atol=0.01)


def test_a_constant_has_no_variance_below_zero():
    x = jnp.broadcast_to(jnp.linspace(100, 5000, 99), (64, 6, 6, 99))  # some sums of which are rounded up
    y, new = layers.BatchNorm().apply(layers.BatchNorm().init(jax.random.key(0), x), x, mutable=['batch_stats'])
    assert bool(jnp.all(jnp.isfinite(y)))
    assert float(jnp.min(new['batch_stats']['var'])) >= 0


def test_batch_norm_gradient_ignores_padding():
    x, mask = normal(0, 5, 2, 2, 3), jnp.arange(5) < 3
    norm = layers.BatchNorm()
    variables = norm.init(jax.random.key(0), x)

    def loss(x, mask):
        y, _ = norm.apply(variables, x, mask, mutable=['batch_stats'])
        keep = jnp.ones(x.shape[0], bool) if mask is None else mask
        return jnp.sum(jnp.where(keep[:, None, None, None], jnp.sin(3 * y), 0))

    got = jax.grad(loss)(x.at[3:].set(1e6), mask)
    np.testing.assert_allclose(got[:3], jax.grad(loss)(x[:3], None), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(got[3:], 0)


@pytest.mark.parametrize('shape', [(4, 2, 3, 2), (5, 3)])
def test_batch_norm_has_the_gradients_of_its_formula(shape):
    """Beside differences in NumPy; rows that are left out are normalised, too."""
    rng = np.random.default_rng(0)
    given = [rng.normal(size=shape), rng.uniform(0.5, 2, shape[-1]), rng.normal(size=shape[-1])]
    g, keep, h = rng.normal(size=shape), np.arange(len(given[0])) != 1, 1e-6
    norm = layers.BatchNorm()
    rest = norm.init(jax.random.key(0), given[0])

    def value(x, scale, bias):
        rows = x[keep].reshape(-1, shape[-1])
        return np.sum(g * ((x - rows.mean(0)) / np.sqrt(rows.var(0) + 1e-5) * scale + bias))

    def loss(x, scale, bias):
        y, _ = norm.apply(rest | {'params': {'scale': scale, 'bias': bias}}, x, keep, mutable=['batch_stats'])
        return jnp.sum(g * y)

    for i, got in enumerate(jax.grad(loss, (0, 1, 2))(*(jnp.asarray(u, jnp.float32) for u in given))):
        want = np.zeros(given[i].shape)
        for place in np.ndindex(want.shape):
            ends = []
            for step in (h, -h):
                moved = [u.copy() for u in given]
                moved[i][place] += step
                ends.append(value(*moved))
            want[place] = (ends[0] - ends[1]) / (2 * h)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_batch_norm_of_bfloat16_has_statistics_of_float32():
    x = (normal(0, 300, 2, 2, 3) + 5).astype(jnp.bfloat16)
    norm, rows = layers.BatchNorm(dtype=jnp.bfloat16), np.asarray(x, np.float64)
    variables = norm.init(jax.random.key(0), x)
    y, new = norm.apply(variables, x, mutable=['batch_stats'])
    assert y.dtype == layers.BatchNorm(True, jnp.bfloat16).apply(variables, x).dtype == jnp.bfloat16
    assert {u.dtype for u in jax.tree.leaves(new)} == {jnp.dtype('float32')}
    np.testing.assert_allclose(new['batch_stats']['mean'], 0.1 * rows.mean((0, 1, 2)), rtol=1e-5)
    want = 0.9 + 0.1 * rows.reshape(-1, 3).var(0, ddof=1)
    np.testing.assert_allclose(new['batch_stats']['var'], want, rtol=1e-4)
    dx = jax.grad(lambda x: jnp.sum(norm.apply(variables, x, mutable=['batch_stats'])[0].astype(jnp.float32)))(x)
    assert dx.dtype == jnp.bfloat16


@pytest.mark.parametrize('real', [0, 1])
def test_batch_norm_of_one_value_or_none_is_finite(real):
    x, mask = normal(0, 4, 3), jnp.arange(4) < real
    norm = layers.BatchNorm()
    variables = norm.init(jax.random.key(0), x)
    (y, new), back = jax.vjp(lambda x: norm.apply(variables, x, mask, mutable=['batch_stats']), x)
    gradient = back((jnp.ones_like(y), jax.tree.map(jnp.zeros_like, new)))
    for leaf in jax.tree.leaves((y, new, gradient)):
        assert bool(jnp.all(jnp.isfinite(leaf)))
    np.testing.assert_allclose(new['batch_stats']['mean'], 0.1 * real * x[0], rtol=1e-6)
    np.testing.assert_array_equal(new['batch_stats']['var'], 1)  # of a single value there is none


def test_batch_norm_evaluates_with_running_statistics():
    x = normal(0, 4, 3)
    variables = layers.BatchNorm().init(jax.random.key(0), x)
    variables['batch_stats'] = {'mean': jnp.full(3, 2.0), 'var': jnp.full(3, 4.0)}
    y = layers.BatchNorm(use_running_average=True).apply(variables, x)
    np.testing.assert_allclose(y, (x - 2) / np.sqrt(4 + 1e-5), rtol=1e-6)


@pytest.mark.parametrize(
    ('layer', 'shape', 'inputs'),
    [
        (layers.Conv(64, 5, conv=conv_native), (1, 8, 8, 8), 5 * 5 * 8),
        (layers.dense(64, 30, jnp.float32), (1, 30), 30),
        (Depthwise(), (1, 8, 8, 32), 3 * 3),
    ],
)
def test_initialisation_fills_the_range_of_pytorch(layer, shape, inputs):
    params = layer.init(jax.random.key(0), jnp.zeros(shape))['params']
    bound = inputs**-0.5
    for leaf in params.values():
        assert 0.9 * bound < float(jnp.max(jnp.abs(leaf))) <= bound
        assert abs(float(jnp.mean(leaf))) < 0.25 * bound


def test_bias_gradient_is_summed_in_float32():
    layer = layers.Conv(1, 1, dtype=jnp.bfloat16)
    x = jnp.zeros((4, 32, 32, 1))
    params = layer.init(jax.random.key(0), x)['params']
    gradient = jax.grad(lambda p: jnp.sum(layer.apply({'params': p}, x).astype(jnp.float32)))(params)
    assert float(gradient['bias'][0]) == 4 * 32 * 32


@pytest.mark.parametrize('lanes', [None, 3])
def test_a_small_dense_layer_has_the_derivatives_of_a_large_one(monkeypatch, lanes):
    layer = layers.dense(5, 7, jnp.float32)
    shape = () if lanes is None else (lanes,)
    x, w, v = normal(0, *shape, 4, 7), normal(1, *shape, 7, 5), normal(2, *shape, 7, 5)

    def value(w, x):
        return jnp.sum(jnp.sin(layer.apply({'params': {'kernel': w, 'bias': jnp.ones(5)}}, x)))

    def derivatives(w, x, v):
        first = jax.value_and_grad(value, (0, 1))(w, x)
        forward = jax.jvp(lambda w: jax.grad(value, 1)(w, x), (w,), (v,))  # of the gradient: of second order
        backward = jax.grad(lambda w: jnp.vdot(v, jax.grad(value)(w, x)))(w)
        return first, forward, backward

    def all_of_them():
        each = functools.partial(derivatives) if lanes is None else jax.vmap(derivatives)  # traced anew
        return jax.jit(each)(w, x, v), str(jax.make_jaxpr(each)(w, x, v))

    monkeypatch.setattr(layers, '_SMALL', 4 * 7 * 5)
    small, program = all_of_them()
    assert 'optimization_barrier' in program
    monkeypatch.setattr(layers, '_SMALL', 4 * 7 * 5 - 1)
    large, program = all_of_them()
    assert 'optimization_barrier' not in program
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), small, large)


def test_a_dense_layer_may_be_exported_for_any_batch():
    layer = layers.dense(5, 7, jnp.float32)
    params = layer.init(jax.random.key(0), jnp.zeros((1, 7)))
    (batch,) = jax.export.symbolic_shape('batch')
    gradient = jax.grad(lambda params, x: jnp.sum(layer.apply(params, x) ** 2))
    program = jax.export.export(jax.jit(gradient))(params, jax.ShapeDtypeStruct((batch, 7), jnp.float32))
    x = normal(0, 3, 7)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), program.call(params, x), gradient(params, x))


def test_kernel_gradients_of_lanes_are_left_to_no_slow_product():
    """On a CPU; a product whose left factor is transposed runs on one core."""
    if not convolution.compiler_options():
        pytest.skip('this jaxlib is without YNNPACK')
    net, x = models.MLP((16, 8)), normal(0, 6, 4, 12)
    params = net.init(jax.random.key(0), x[0])['params']
    lanes = jax.tree.map(lambda u: jnp.stack([u] * 6), params)
    step = jax.vmap(jax.grad(lambda p, x: jnp.sum(jnp.sin(net.apply({'params': p}, x)))))
    text = jax.jit(step, compiler_options=convolution.compiler_options()).lower(lanes, x).compile().as_text()
    assert text.count(' dot(') == 5  # forward and kernel gradients, and the second layer's input gradient
    assert not re.findall(r' dot\(.*lhs_contracting_dims=\{1\}', text)


@pytest.mark.parametrize('conv', [conv_sequential, conv_onednn])
@pytest.mark.parametrize('batch', [1, 16, 35, 300])
def test_kernel_gradient_takes_every_image_whatever_the_batch(conv, batch, monkeypatch):
    """The images are taken in pieces, of which the last may be shorter."""
    monkeypatch.setattr(looped, 'FLOATS', 8 * 4 * 4 * 2)
    rng = np.random.default_rng(0)
    x, g = rng.normal(size=(batch, 4, 4, 2)), rng.normal(size=(batch, 2, 2, 3))

    def loss(kernel):
        return jnp.sum(run(conv, jnp.asarray(x, jnp.float32), kernel, padding='VALID') * g)

    got = jax.grad(loss)(jnp.zeros((3, 3, 2, 3)))
    want = [[np.einsum('bhwi,bhwo->io', x[:, i : i + 2, j : j + 2], g) for j in range(3)] for i in range(3)]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_pieces_are_no_more_than_can_be_compiled(monkeypatch):
    monkeypatch.setattr(looped, 'FLOATS', 1)
    geometry = looped.Geometry((300, 4, 4, 2), (3, 3, 2, 3), (1, 1), looped.NO_PADS, None)
    x, g = jnp.zeros(geometry.image), jnp.zeros((300, 2, 2, 3))
    by_library = functools.partial(looped._sums_by_library, geometry=geometry, devices=1)
    by_xla = functools.partial(looped._sums_by_xla, geometry=geometry)
    for form, operation in ((by_library, 'ffi_call['), (by_xla, 'conv_general_dilated[')):
        assert str(jax.make_jaxpr(form)(x, g)).count(operation) == looped.PIECES


@pytest.mark.parametrize('conv', [conv_sequential, conv_onednn])
def test_pieces_of_bfloat16_are_added_in_float32(conv):
    x = np.zeros((256, 3, 3, 2))
    x[16::16], x[0] = 1, 256  # of which the first hides the others one by one
    x, kernel = jnp.asarray(x, jnp.bfloat16), jnp.zeros((3, 3, 2, 3), jnp.bfloat16)
    dk = jax.jit(jax.grad(lambda kernel: jnp.sum(run(conv, x, kernel, padding='VALID'))))(kernel)
    np.testing.assert_array_equal(dk, jnp.bfloat16(256 + 15))


def test_onednn_is_used_only_where_it_was_checked(monkeypatch):
    monkeypatch.setattr(onednn.jaxlib, '__version__', '0.0.0')
    onednn.available.cache_clear()
    assert not onednn.available(jnp.dtype('float32'))
    monkeypatch.undo()
    onednn.available.cache_clear()
    assert not onednn.available(jnp.dtype('float16'))


@pytest.mark.skipif(
    (platform.system(), platform.machine()) != ('Linux', 'x86_64') or jaxlib.__version__ not in onednn.CHECKED,
    reason='not checked with oneDNN',
)
def test_where_it_was_checked_it_is_used():
    """All else that is tested of it is left out where it is not."""
    assert onednn.available(jnp.dtype('float32'))
    if any(package.metadata['Name'] == libdnnl.PACKAGE for package in importlib.metadata.distributions()):
        assert libdnnl.version()


@pytest.mark.parametrize('conv', FORMS)
def test_without_jit_a_convolution_is_the_same(conv):
    x, k = normal(0, 2, 6, 6, 16), normal(1, 3, 3, 16, 4)
    want = conv_native(x, k, (1, 1), 'SAME', dimension_numbers=LAYOUT)
    with jax.disable_jit():
        np.testing.assert_allclose(conv(x, k, (1, 1), 'SAME', dimension_numbers=LAYOUT), want, atol=1e-4)


def test_wrong_or_missing_onednn_is_noticed(monkeypatch):
    def refuse(*args, **how):
        raise NotImplementedError

    for broken in (refuse, lambda *arrays_and_how: jnp.zeros((2, 3, 7, 16))):
        monkeypatch.setattr(onednn, 'call', broken)
        assert not onednn._right(jnp.dtype('float32'))


@pytest.mark.parametrize('conv', [conv_patches, conv_grouped, conv_sequential, conv_onednn, conv_by_platform])
@pytest.mark.parametrize('size', [1, 3])
def test_no_image_is_a_batch_too(conv, size):
    x, kernel = jnp.zeros((0, 8, 8, 4)), jnp.ones((size, size, 4, 6))

    def loss(x, kernel):
        return jnp.sum(conv(x, kernel, (1, 1), 'SAME', dimension_numbers=convolution.LAYOUT))

    dx, dk = jax.jit(jax.grad(loss, (0, 1)))(x, kernel)
    assert dx.shape == x.shape
    assert not np.asarray(dk).any()
